//! Does memory grow from step to step, why, and who holds it.
//!
//! [`ObservedSteps::of_replay`] replays a source and writes down how memory stood in every step; [`ObservedSteps::of_snapshots`]
//! takes that from snapshots in order. [`judge`] tests three series in turn. What steps keep is judged by the rules of
//! `floor`, the others and snapshots by the slope of a line and its Student-t interval ([`growth`]):
//!
//! | series | if it grows | what brings it down |
//! |---|---|---|
//! | kept: the lowest `allocated` of a step | leak | a recording does not say |
//! | stuck: cached memory in segments that live blocks share | fragmentation | nothing |
//! | reserved, less what is kept | growing cache | `empty_cache`; the allocator itself, before a request fails |
//!
//! Otherwise memory is steady, or it cannot be told ([`Doubt`]). The low point of a step does not depend on where exactly
//! a step is cut. The first step is start-up and is not judged; neither is one in which memory ran out, nor a last one
//! without requests, nor what comes after the last step ([`LeftOut`]). The command line asks and `report` shows the answer.
//! This module knows no files and prints nothing.

mod boundaries;
mod floor;
pub mod growth;
mod observed;
mod steps;

pub use boundaries::period;
pub use growth::{CourseKind, GrowthThreshold, Trend};
pub use observed::{ObservedSteps, StepUse};
pub use steps::{FEWEST_STEPS, LeftOut, Steps, StepsFrom};

use serde::Serialize;

use self::{
    boundaries::FEWEST_REQUESTS_OF_STEP,
    floor::{KeptCourse, every_step_leaves_blocks, judge_kept, left_behind},
    growth::{FEWEST_POINTS, SeriesCourse, course},
};
use crate::{
    answer::holders::Grower, measure::digits, replay::ReplayError, strategy::StrategyError, trace::TraceError,
};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeakError {
    /// The source cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The strategy could not be closed.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// No such phase, or it does not repeat.
    #[error("no phase '{asked}' begins often enough to be a step; {}", known_phases(known))]
    NoSuchPhase {
        /// What was asked for.
        asked: String,
        /// Those that the source names.
        known: Vec<String>,
    },
    /// Nothing was recorded before the snapshot was taken.
    #[error("there is no history: nothing was recorded before the snapshot was taken, so there is nothing to judge")]
    NoHistory,
    /// No step repeats.
    #[error("no step repeats, and too little was recorded to judge memory without steps")]
    NoSteps,
    /// Too little to judge.
    #[error("{found} {what} are too few to tell growth from start-up: at least {needed} are needed")]
    TooShort {
        /// Of what there is too little.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many it takes.
        needed: u64,
    },
}

fn known_phases(known: &[String]) -> String {
    if known.is_empty() { "the source names none".to_owned() } else { format!("there are: {}", known.join(", ")) }
}

/// What memory does over the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Blocks accumulate that are never freed.
    Leak,
    /// The cache grows, in segments that `empty_cache` would give back.
    GrowingCache,
    /// The cache grows, in pieces between live blocks that nothing gives back.
    Fragmentation,
    /// Nothing grows.
    Steady,
    /// It may grow and may not: see [`Doubt`].
    CannotTell,
}

/// Why it cannot be told whether memory grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// The interval of the slope contains zero and growth that matters.
    WideInterval,
    /// Memory rises over the last steps or over few steps only.
    ShortRise,
    /// Memory rose and is level now, but not for longer than it was between two rises.
    RecentStop,
    /// Memory rises, and blocks of the first steps of the rise are already freed.
    BlocksFreed,
    /// Memory rises, and no step is known: a single pass of a model rises too.
    NoSteps,
    /// Memory rises by short patterns that may be the layers of one pass.
    MayBeLayers,
    /// Nothing was recorded before the snapshot was taken.
    NoHistory,
    /// There are too few steps or events.
    TooShort,
}

impl Doubt {
    /// The sentence about it.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Doubt::WideInterval => "the interval of the slope contains both zero and growth that matters",
            Doubt::ShortRise => "memory rises over the last or over few steps only, and may come down again",
            Doubt::RecentStop => "memory has risen and is level now, but not for long enough to exclude the next rise",
            Doubt::BlocksFreed => {
                "memory rises, but the oldest blocks of the rise are already freed, so that it may stop"
            }
            Doubt::NoSteps => "no step repeats, and memory is not level; a single pass of a model rises as well",
            Doubt::MayBeLayers => "the only steps are a short pattern of requests, which may be the layers of one pass",
            Doubt::NoHistory => "there is no history: nothing was recorded before the snapshot was taken",
            Doubt::TooShort => "there are too few steps to tell growth from start-up",
        }
    }

    /// What would help.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Doubt::WideInterval | Doubt::ShortRise | Doubt::RecentStop | Doubt::BlocksFreed | Doubt::TooShort => {
                "record more steps"
            }
            Doubt::NoSteps | Doubt::MayBeLayers => {
                "record several steps, with `with torch.profiler.record_function(\"step\"):` around each of them; a step of an \
                 optimizer marks itself"
            }
            Doubt::NoHistory => {
                "start to record before the steps: torch.cuda.memory._record_memory_history(); `oomph record` prints the lines"
            }
        }
    }
}

/// A source without anything that could be judged.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnjudgedSource {
    /// What was to be judged.
    pub source: String,
    /// Always [`Verdict::CannotTell`].
    pub verdict: Verdict,
    /// Why.
    pub doubt: Doubt,
    /// The same as a sentence.
    pub reason: String,
}

impl LeakError {
    /// The answer where a source has too little to judge; otherwise the error itself.
    pub fn unjudged(self, source: &str) -> Result<UnjudgedSource, LeakError> {
        let doubt = match self {
            LeakError::NoHistory => Doubt::NoHistory,
            LeakError::NoSteps => Doubt::NoSteps,
            LeakError::TooShort { .. } => Doubt::TooShort,
            error => return Err(error),
        };
        Ok(UnjudgedSource { source: source.to_owned(), verdict: Verdict::CannotTell, doubt, reason: self.to_string() })
    }
}

impl Verdict {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Leak => "leak",
            Verdict::GrowingCache => "growing_cache",
            Verdict::Fragmentation => "fragmentation",
            Verdict::Steady => "steady",
            Verdict::CannotTell => "cannot_tell",
        }
    }
}

/// What brings memory down again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoverableBy {
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// Nothing does; or there is nothing to bring down.
    None,
    /// A recording does not tell a forgotten reference from a cycle that was never collected.
    Unknown,
}

impl RecoverableBy {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            RecoverableBy::EmptyCache => "empty_cache",
            RecoverableBy::None => "none",
            RecoverableBy::Unknown => "unknown",
        }
    }
}

/// Which series was judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// The lowest `allocated` of each step.
    KeptBytes,
    /// Cached memory that cannot be given back.
    StuckBytes,
    /// Everything taken from the device.
    ReservedBytes,
}

impl Quantity {
    fn series(self, steps: &[StepUse]) -> Vec<f64> {
        let of = |step: &StepUse| match self {
            Quantity::KeptBytes => step.kept_bytes,
            Quantity::StuckBytes => step.stuck_bytes.unwrap_or(0),
            Quantity::ReservedBytes => step.reserved_bytes,
        };
        steps.iter().map(|step| of(step) as f64).collect()
    }

    /// What growth of this series is held against: stuck memory grows at the expense of all that is reserved.
    fn level(self, steps: &[StepUse]) -> f64 {
        let measure = if self == Quantity::KeptBytes { Quantity::KeptBytes } else { Quantity::ReservedBytes };
        let series = measure.series(steps);
        series.iter().sum::<f64>() / series.len().max(1) as f64
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What was judged.
    pub source: String,
    /// What memory does.
    pub verdict: Verdict,
    /// Why it cannot be told.
    pub doubt: Option<Doubt>,
    /// What brings it down.
    pub recoverable_by: RecoverableBy,
    /// Slope of [`quantity`](Finding::quantity): what a step adds.
    #[serde(serialize_with = "digits::whole")]
    pub bytes_per_step: f64,
    /// Lower end of its 95 % interval.
    #[serde(serialize_with = "digits::whole")]
    pub bytes_per_step_low: f64,
    /// Upper end.
    #[serde(serialize_with = "digits::whole")]
    pub bytes_per_step_high: f64,
    /// How probable such a slope is without growth.
    #[serde(serialize_with = "digits::required")]
    pub p_value: f64,
    /// Which series the slope is of.
    pub quantity: Quantity,
    /// What that series does.
    pub course: CourseKind,
    /// Whether what is kept rises and is collected again and again.
    pub saw_tooth: bool,
    /// What was collected in the judged steps.
    pub collected_bytes: u64,
    /// What is kept on average.
    pub level_bytes: u64,
    /// The first step that counts.
    pub first_step: usize,
    /// The last step that counts.
    pub last_step: usize,
    /// The events after the last step, which are not judged, if memory falls in them.
    pub left_out: Option<LeftOut>,
    /// Whether reserved memory is that of the recording, because the replay reserved something else.
    pub reserved_from_recording: bool,
    /// What the middle one of the judged steps leaves behind, if every step leaves blocks behind that are never freed.
    /// Otherwise what grows is the size of blocks, or the time for which they are kept.
    pub left_behind_bytes: Option<u64>,
    /// How steps were found.
    #[serde(flatten)]
    pub steps_from: StepsFrom,
    /// How much memory there is.
    pub capacity_bytes: Option<u64>,
    /// The step in which memory will run out at this rate.
    pub runs_out_at_step: Option<u64>,
    /// The step in which it did.
    pub ran_out_at_step: Option<usize>,
    /// From when on growth counts.
    pub bar: GrowthThreshold,
    /// What a step of the baseline adds to the same series, where there is one.
    #[serde(serialize_with = "digits::optional_whole")]
    pub baseline_bytes_per_step: Option<f64>,
    /// Which groups of blocks grow. The caller fills this in, because it needs the source.
    pub growers: Vec<Grower>,
    /// Every step, those that do not count included.
    pub per_step: Vec<StepUse>,
}

/// Judges what was observed; growth that a baseline shows as well is not held against it.
pub fn judge(
    observed: &ObservedSteps,
    baseline: Option<&ObservedSteps>,
    bar: &GrowthThreshold,
) -> Result<Finding, LeakError> {
    let steps = observed.judged();
    let KeptCourse { course: kept, doubt, saw_tooth } = kept_course(observed, baseline, bar)?;
    let collected: u64 = steps.iter().filter_map(|step| step.collected_bytes).sum();
    let level = Quantity::KeptBytes.level(steps);
    let (mut verdict, mut quantity, mut course) = match (doubt, kept.kind) {
        (Some(_), _) => (Verdict::CannotTell, Quantity::KeptBytes, kept),
        (None, CourseKind::Growing) => (Verdict::Leak, Quantity::KeptBytes, kept),
        (None, _) => (Verdict::Steady, Quantity::KeptBytes, kept),
    };
    if verdict == Verdict::Steady {
        for (candidate, of) in
            [(Verdict::Fragmentation, Quantity::StuckBytes), (Verdict::GrowingCache, Quantity::ReservedBytes)]
        {
            let judged = judged_course(observed, baseline, of, bar)?;
            if judged.kind == CourseKind::Growing && cache_rises_with(&steps[judged.first..], &judged.trend) {
                (verdict, quantity, course) = (candidate, of, judged);
                break;
            }
        }
    }
    let baseline_trend = baseline.and_then(|baseline| Trend::of(&quantity.series(baseline.judged())));
    let numbers = |place: usize| steps.get(place).map_or(0, |step| step.step);
    Ok(Finding {
        source: observed.name.clone(),
        verdict,
        doubt,
        recoverable_by: match verdict {
            Verdict::Leak | Verdict::CannotTell => RecoverableBy::Unknown,
            Verdict::GrowingCache => RecoverableBy::EmptyCache,
            Verdict::Fragmentation | Verdict::Steady => RecoverableBy::None,
        },
        bytes_per_step: course.trend.slope,
        bytes_per_step_low: course.trend.low,
        bytes_per_step_high: course.trend.high,
        p_value: course.trend.p_value,
        quantity,
        course: course.kind,
        saw_tooth: saw_tooth && !matches!(verdict, Verdict::Leak | Verdict::CannotTell),
        collected_bytes: collected,
        level_bytes: level as u64,
        first_step: numbers(course.first),
        last_step: numbers(steps.len() - 1),
        left_out: observed.left_out,
        reserved_from_recording: observed.reserved_from_recording,
        left_behind_bytes: (verdict == Verdict::Leak && every_step_leaves_blocks(&steps[kept.first..]))
            .then(|| left_behind(&steps[kept.first..])),
        steps_from: observed.steps_from.clone(),
        capacity_bytes: observed.capacity,
        runs_out_at_step: runs_out_at(observed, verdict, &course),
        ran_out_at_step: observed.ran_out_at,
        bar: *bar,
        baseline_bytes_per_step: baseline_trend.map(|trend| trend.slope),
        growers: Vec::new(),
        per_step: observed.steps.clone(),
    })
}

/// A model has fewer layers than this.
const MOST_LAYERS: usize = 1024;

/// What steps keep: by the floor and by blocks where these are known, otherwise by the line through the levels.
fn kept_course(
    observed: &ObservedSteps,
    baseline: Option<&ObservedSteps>,
    bar: &GrowthThreshold,
) -> Result<KeptCourse, LeakError> {
    // Growth that the baseline has too is not held against the source by its blocks either.
    if baseline.is_some() || observed.steps_from == StepsFrom::Snapshots {
        let course = judged_course(observed, baseline, Quantity::KeptBytes, bar)?;
        let doubt = (course.kind == CourseKind::Unclear).then_some(Doubt::WideInterval);
        return Ok(KeptCourse { course, doubt, saw_tooth: course.kind == CourseKind::SawTooth });
    }
    let steps = observed.judged();
    let mut kept = judge_kept(steps, bar).ok_or_else(|| too_short(observed))?;
    if kept.doubt.is_none() {
        kept.doubt = doubt_about_steps(observed, kept.course.kind == CourseKind::Growing);
    }
    Ok(kept)
}

/// Steps that are not marked may be parts of one step. Growth over them may be that of a single pass, and a level over
/// them says nothing about the steps, unless it is exactly the same all the time.
fn doubt_about_steps(observed: &ObservedSteps, grows: bool) -> Option<Doubt> {
    let steps = observed.judged();
    let is_level = |steps: &[StepUse]| steps.windows(2).all(|pair| pair[0].kept_bytes == pair[1].kept_bytes);
    match observed.steps_from {
        StepsFrom::Windows if grows => Some(Doubt::NoSteps),
        StepsFrom::Period(requests) if requests < FEWEST_REQUESTS_OF_STEP && !observed.has_loss => {
            let is_open = if grows { observed.steps.len() < MOST_LAYERS } else { !is_level(&steps[steps.len() / 2..]) };
            is_open.then_some(Doubt::MayBeLayers)
        }
        StepsFrom::LowPoints => {
            let requests = || steps.iter().filter_map(|step| step.born_blocks);
            let is_irregular = requests().max() > requests().min().map(|least| MOST_TIMES_REQUESTS * least);
            (is_irregular && !is_level(steps)).then_some(Doubt::NoSteps)
        }
        _ => None,
    }
}

/// Low points with more than so many times the requests of others are not those of steps.
const MOST_TIMES_REQUESTS: u64 = 4;

/// Reserved memory rises by at least this share of what is stuck in the cache, if fragmentation is the reason.
const LEAST_SHARE_RESERVED: f64 = 0.5;

/// Whether reserved memory rises with a series, in both halves of it, and more than live memory does. Where it does not rise,
/// free memory only moves from whole segments to others; where it rises once, it does not go on rising; where live memory
/// rises as much, the cache does not.
fn cache_rises_with(steps: &[StepUse], trend: &Trend) -> bool {
    let ([first, ..], Some(last)) = (steps, steps.last()) else { return false };
    let middle = steps[steps.len() / 2].reserved_bytes;
    let least = LEAST_SHARE_RESERVED * trend.growth();
    let reserved = last.reserved_bytes as f64 - first.reserved_bytes as f64;
    let live = last.kept_bytes as f64 - first.kept_bytes as f64;
    first.reserved_bytes < middle && middle < last.reserved_bytes && reserved >= least && reserved - live >= least
}

fn too_short(observed: &ObservedSteps) -> LeakError {
    LeakError::TooShort {
        what: if observed.steps_from == StepsFrom::Snapshots { "snapshots" } else { "complete steps" },
        found: (observed.first_judged + observed.judged().len()) as u64,
        needed: (observed.first_judged + FEWEST_POINTS) as u64,
    }
}

/// The course of one series, less what the baseline shows too.
fn judged_course(
    observed: &ObservedSteps,
    baseline: Option<&ObservedSteps>,
    quantity: Quantity,
    bar: &GrowthThreshold,
) -> Result<SeriesCourse, LeakError> {
    let steps = observed.judged();
    let found = course(&quantity.series(steps), quantity.level(steps), bar);
    let mut course = found.ok_or_else(|| too_short(observed))?;
    if let Some(accepted) = baseline.and_then(|baseline| Trend::of(&quantity.series(baseline.judged())))
        && course.kind == CourseKind::Growing
    {
        let beyond = course.trend.beyond(&accepted);
        if beyond.p_value >= bar.significance || beyond.slope <= 0.0 {
            course.kind = CourseKind::Level;
        } else if beyond.growth() < bar.least(quantity.level(steps)) {
            course.kind = CourseKind::Negligible;
        }
    }
    Ok(course)
}

/// When what grows, and what a step needs beside it, is more than there is. A cache never is: it is given back before a
/// request fails.
fn runs_out_at(observed: &ObservedSteps, verdict: Verdict, course: &SeriesCourse) -> Option<u64> {
    let steps = observed.judged();
    let last = steps.last()?;
    let needed = match verdict {
        Verdict::Leak => course.trend.end() + steps.iter().map(|step| step.transient_bytes.unwrap_or(0)).max()? as f64,
        Verdict::Fragmentation => last.reserved_bytes as f64,
        Verdict::GrowingCache | Verdict::Steady | Verdict::CannotTell => return None,
    };
    let room = (observed.capacity? as f64 - needed).max(0.0);
    Some(last.step as u64 + (room / course.trend.slope) as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{GIB, MIB};

    fn observed(steps: impl Iterator<Item = StepUse>) -> ObservedSteps {
        let mut observed = ObservedSteps::of_snapshots(&[]);
        observed.steps = steps.collect();
        observed.end_judged = observed.steps.len();
        observed.capacity = Some(8 * GIB);
        observed
    }

    /// Ten steps that keep 1 GiB of 2 GiB reserved, and what is done to each.
    fn ten_steps(change: impl Fn(u64, &mut StepUse)) -> ObservedSteps {
        observed((0..10).map(|number: u64| {
            let mut step = StepUse {
                step: number as usize,
                kept_bytes: GIB,
                reserved_bytes: 2 * GIB,
                transient_bytes: Some(512 * MIB),
                ..StepUse::default()
            };
            change(number, &mut step);
            step
        }))
    }

    fn finding(observed: &ObservedSteps) -> Finding {
        judge(observed, None, &GrowthThreshold::default()).unwrap()
    }

    #[test]
    fn four_verdicts_are_distinguished() {
        let leak = finding(&ten_steps(|number, step| {
            step.kept_bytes += number * 100 * MIB;
            step.reserved_bytes += number * 100 * MIB;
        }));
        assert_eq!((leak.verdict, leak.recoverable_by), (Verdict::Leak, RecoverableBy::Unknown));
        assert_eq!((leak.bytes_per_step, leak.p_value), (100.0 * MIB as f64, 0.0));
        let stuck = finding(&ten_steps(|number, step| {
            step.stuck_bytes = Some(number * 100 * MIB);
            step.reserved_bytes += number * 100 * MIB;
        }));
        assert_eq!((stuck.verdict, stuck.recoverable_by), (Verdict::Fragmentation, RecoverableBy::None));
        let moved = finding(&ten_steps(|number, step| step.stuck_bytes = Some(number * 100 * MIB)));
        assert_eq!(moved.verdict, Verdict::Steady, "free memory moves, and reserved memory does not grow");
        for jump in [2, 8] {
            let once = finding(&ten_steps(|number, step| {
                step.stuck_bytes = Some(number * 100 * MIB);
                step.reserved_bytes += if number < jump { 0 } else { GIB };
            }));
            assert_eq!(once.verdict, Verdict::Steady, "reserved memory grew once, in step {jump}");
        }
        let cache = finding(&ten_steps(|number, step| step.reserved_bytes += number * 100 * MIB));
        assert_eq!((cache.verdict, cache.recoverable_by), (Verdict::GrowingCache, RecoverableBy::EmptyCache));
        assert_eq!(cache.runs_out_at_step, None, "a cache is given back before a request fails");
        let steady = finding(&ten_steps(|_, _| {}));
        assert_eq!((steady.verdict, steady.recoverable_by), (Verdict::Steady, RecoverableBy::None));
    }

    #[test]
    fn the_step_that_no_longer_fits_is_foretold() {
        // Step 9 keeps 1,924 MiB and needs 512 more; 8,192 - 2,436 = 5,756, so that 57 steps fit and the 58th does not.
        let leak = finding(&ten_steps(|number, step| step.kept_bytes += number * 100 * MIB));
        assert_eq!(leak.runs_out_at_step, Some(9 + 58));
    }

    #[test]
    fn growth_that_the_baseline_has_too_is_accepted() {
        let growing = |by: u64| ten_steps(move |number, step| step.kept_bytes += number * by * MIB);
        let verdict =
            |by, accepted| judge(&growing(by), Some(&growing(accepted)), &GrowthThreshold::default()).unwrap().verdict;
        assert_eq!(verdict(100, 100), Verdict::Steady);
        assert_eq!(verdict(100, 0), Verdict::Leak);
        assert_eq!(verdict(200, 100), Verdict::Leak);
        assert_eq!(verdict(50, 100), Verdict::Steady);
    }

    #[test]
    fn nothing_is_attributed_to_gc() {
        let collected = |number: u64, step: &mut StepUse| step.collected_bytes = Some((number % 4) * 64 * MIB);
        let steady = finding(&ten_steps(collected));
        assert_eq!((steady.verdict, steady.recoverable_by), (Verdict::Steady, RecoverableBy::None));
        let leak = finding(&ten_steps(|number, step| {
            collected(number, step);
            step.kept_bytes += number * 200 * MIB;
        }));
        assert_eq!((leak.verdict, leak.recoverable_by), (Verdict::Leak, RecoverableBy::Unknown));
    }

    #[test]
    fn two_snapshots_are_a_difference_and_no_trend() {
        let error =
            judge(&observed((0..2).map(|_| StepUse::default())), None, &GrowthThreshold::default()).unwrap_err();
        assert_eq!(error.to_string(), "2 snapshots are too few to tell growth from start-up: at least 3 are needed");
    }
}

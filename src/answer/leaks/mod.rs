//! Does memory grow from step to step, why, and who holds it.
//!
//! [`ObservedSteps::of_replay`] replays a source and writes down how memory stood in every step; [`ObservedSteps::of_snapshots`]
//! takes that from snapshots in order. [`judge`] tests three series in turn, by the slope of a line and its Student-t
//! interval and by the rules of [`growth`]:
//!
//! | series | if it grows | what brings it down |
//! |---|---|---|
//! | kept: the lowest `allocated` of a step | leak | nothing; Python's collector, where only cycles hold it |
//! | stuck: cached memory in segments that live blocks share | fragmentation | nothing |
//! | reserved | growing cache | `empty_cache`; the allocator itself, before a request fails |
//!
//! Otherwise memory is steady. The low point of a step does not depend on where exactly a step is cut. The first step is
//! start-up and is not judged; neither is one in which memory ran out. The command line asks and `report` shows the
//! answer. This module knows no files and prints nothing.

pub mod growth;
mod observed;
mod steps;

pub use growth::{CourseKind, GrowthThreshold, Trend};
pub use observed::{ObservedSteps, StepUse};
pub use steps::{FEWEST_STEPS, Steps, StepsFrom, period};

use serde::Serialize;

use self::growth::{FEWEST_POINTS, SeriesCourse, course};
use crate::{answer::holders::Grower, replay::ReplayError, strategy::StrategyError, trace::TraceError};

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
        }
    }
}

/// What brings memory down again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoverableBy {
    /// Python's garbage collector: blocks of several ages were seen to go at once.
    Gc,
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
            RecoverableBy::Gc => "gc",
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
            Quantity::StuckBytes => step.stuck_bytes,
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
    /// What brings it down.
    pub recoverable_by: RecoverableBy,
    /// Slope of [`quantity`](Finding::quantity): what a step adds.
    pub bytes_per_step: f64,
    /// Lower end of its 95 % interval.
    pub bytes_per_step_low: f64,
    /// Upper end.
    pub bytes_per_step_high: f64,
    /// How probable such a slope is without growth.
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
    let kept = judged_course(observed, baseline, Quantity::KeptBytes, bar)?;
    let collected: u64 = steps.iter().map(|step| step.collected_bytes).sum();
    let level = Quantity::KeptBytes.level(steps);
    let collects = collected as f64 >= (level * bar.least_share).max(bar.least_bytes as f64);
    let (mut verdict, mut quantity, mut course) = (Verdict::Steady, Quantity::KeptBytes, kept);
    for (candidate, of) in [
        (Verdict::Leak, Quantity::KeptBytes),
        (Verdict::Fragmentation, Quantity::StuckBytes),
        (Verdict::GrowingCache, Quantity::ReservedBytes),
    ] {
        let judged = judged_course(observed, baseline, of, bar)?;
        if judged.kind == CourseKind::Growing {
            (verdict, quantity, course) = (candidate, of, judged);
            break;
        }
    }
    let baseline_trend = baseline.and_then(|baseline| Trend::of(&quantity.series(baseline.judged())));
    let numbers = |place: usize| steps.get(place).map_or(0, |step| step.step);
    Ok(Finding {
        source: observed.name.clone(),
        verdict,
        recoverable_by: match verdict {
            Verdict::Leak if collects => RecoverableBy::None,
            Verdict::Leak => RecoverableBy::Unknown,
            Verdict::GrowingCache => RecoverableBy::EmptyCache,
            Verdict::Fragmentation => RecoverableBy::None,
            Verdict::Steady if collects => RecoverableBy::Gc,
            Verdict::Steady => RecoverableBy::None,
        },
        bytes_per_step: course.trend.slope,
        bytes_per_step_low: course.trend.low,
        bytes_per_step_high: course.trend.high,
        p_value: course.trend.p_value,
        quantity,
        course: course.kind,
        saw_tooth: collects && verdict != Verdict::Leak,
        collected_bytes: collected,
        level_bytes: level as u64,
        first_step: numbers(course.first),
        last_step: numbers(steps.len() - 1),
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

/// The course of one series, less what the baseline shows too.
fn judged_course(
    observed: &ObservedSteps,
    baseline: Option<&ObservedSteps>,
    quantity: Quantity,
    bar: &GrowthThreshold,
) -> Result<SeriesCourse, LeakError> {
    let steps = observed.judged();
    let too_short = || LeakError::TooShort {
        what: if observed.steps_from == StepsFrom::Snapshots { "snapshots" } else { "steps" },
        found: (observed.first_judged + steps.len()) as u64,
        needed: (observed.first_judged + FEWEST_POINTS) as u64,
    };
    let mut course = course(&quantity.series(steps), quantity.level(steps), bar).ok_or_else(too_short)?;
    if let Some(accepted) = baseline.and_then(|baseline| Trend::of(&quantity.series(baseline.judged())))
        && course.kind == CourseKind::Growing
    {
        let beyond = course.trend.beyond(&accepted);
        if beyond.p_value >= bar.significance || beyond.slope <= 0.0 {
            course.kind = CourseKind::Level;
        } else if beyond.growth() < (quantity.level(steps) * bar.least_share).max(bar.least_bytes as f64) {
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
        Verdict::Leak => course.trend.end() + steps.iter().map(|step| step.transient_bytes).max()? as f64,
        Verdict::Fragmentation => last.reserved_bytes as f64,
        Verdict::GrowingCache | Verdict::Steady => return None,
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
                transient_bytes: 512 * MIB,
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
            step.stuck_bytes += number * 100 * MIB;
            step.reserved_bytes += number * 100 * MIB;
        }));
        assert_eq!((stuck.verdict, stuck.recoverable_by), (Verdict::Fragmentation, RecoverableBy::None));
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
    fn uncollected_memory_is_not_attributed_to_gc() {
        let collected = |number: u64, step: &mut StepUse| step.collected_bytes = (number % 4) * 64 * MIB;
        let steady = finding(&ten_steps(collected));
        assert_eq!((steady.verdict, steady.recoverable_by), (Verdict::Steady, RecoverableBy::Gc));
        assert!(steady.saw_tooth);
        let leak = finding(&ten_steps(|number, step| {
            collected(number, step);
            step.kept_bytes += number * 200 * MIB;
        }));
        assert_eq!((leak.verdict, leak.recoverable_by), (Verdict::Leak, RecoverableBy::None));
    }

    #[test]
    fn two_snapshots_are_a_difference_and_no_trend() {
        let error =
            judge(&observed((0..2).map(|_| StepUse::default())), None, &GrowthThreshold::default()).unwrap_err();
        assert_eq!(error.to_string(), "2 snapshots are too few to tell growth from start-up: at least 3 are needed");
    }
}

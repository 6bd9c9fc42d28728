//! The smallest memory in which a trace completes under a strategy.

use std::sync::atomic::AtomicBool;

use super::{
    PROBES_AROUND, Probe, REPEATS, Stability, ThresholdError,
    probe::{Rehearsal, Uncapped},
    search::Search,
};
use crate::{
    base::{Bytes, NoProgress, Progress},
    device::DeviceSpec,
    measure::OomReport,
    replay::{LimitEnforcer, Pace, Replay, ReplayOptions},
    strategy::StrategySpec,
    trace::{Op, Trace},
};

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct ThresholdQuestion<'a> {
    /// What must complete. In memory, because it is replayed dozens of times.
    pub trace: &'a Trace,
    /// Under which strategy.
    pub strategy: &'a StrategySpec,
    /// On which simulated device; it says what pages, context and libraries take.
    pub device: &'a DeviceSpec,
    /// Who refuses what goes beyond the cap.
    pub cap: LimitEnforcer,
    /// How often it must complete, back to back in one strategy: what is alive at the end of a round is freed before the
    /// next, what is cached stays.
    pub repeat: u32,
    /// How fast the host goes.
    pub pace: Pace,
    /// How many caps around the threshold are tried.
    pub around: u32,
    /// How many replays run side by side.
    pub jobs: usize,
    /// Set from outside to give up.
    pub stop: Option<&'a AtomicBool>,
    /// Told what is tried, and how far that is.
    pub progress: &'a dyn Progress,
}

impl<'a> ThresholdQuestion<'a> {
    /// The usual question on one core: three rounds, sixteen probes around.
    #[must_use]
    pub fn new(trace: &'a Trace, strategy: &'a StrategySpec, device: &'a DeviceSpec) -> ThresholdQuestion<'a> {
        ThresholdQuestion {
            trace,
            strategy,
            device,
            cap: LimitEnforcer::default(),
            repeat: REPEATS,
            pace: Pace::default(),
            around: PROBES_AROUND,
            jobs: 1,
            stop: None,
            progress: &NoProgress,
        }
    }
}

/// What was found. All sizes are of what the strategy holds, in whole pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// From this cap on every cap tried suffices; `None` where the whole device does not.
    pub threshold_bytes: Option<u64>,
    /// What the context and the libraries take beside it.
    pub overhead_bytes: u64,
    /// The most bytes that are alive at one time: no allocator needs less.
    pub live_peak_bytes: u64,
    /// What the strategy holds where nothing limits it.
    pub uncapped_held_bytes: u64,
    /// What its books call reserved then.
    pub uncapped_reserved_bytes: u64,
    /// What it spends in driver calls then, launches left out.
    pub uncapped_driver_ns: u64,
    /// The unit of the search.
    pub page_bytes: u64,
    /// Every cap that was tried, smallest first.
    pub probes: Vec<Probe>,
    /// The first request that fails right below the threshold, or with the whole device where that is not enough.
    pub failure: Option<OomReport>,
}

impl Threshold {
    /// Whether the caps around agree.
    #[must_use]
    pub fn stability(&self) -> Stability {
        Stability::of(self.probes.iter().map(|probe| (probe.limit_bytes, probe.fits)))
    }

    /// The size of the smallest card: context and libraries counted.
    #[must_use]
    pub fn device_bytes(&self) -> Option<u64> {
        self.threshold_bytes.map(|bytes| bytes.saturating_add(self.overhead_bytes))
    }

    /// The try with one page less than the threshold.
    #[must_use]
    pub fn right_below(&self) -> Option<&Probe> {
        let below = self.threshold_bytes?.checked_sub(self.page_bytes)?;
        self.probes.iter().find(|probe| probe.limit_bytes == below)
    }

    /// The try at the threshold itself.
    #[must_use]
    pub fn at_threshold(&self) -> Option<&Probe> {
        self.probes.iter().find(|probe| Some(probe.limit_bytes) == self.threshold_bytes)
    }
}

/// Searches for the smallest memory that suffices, to one page of the device.
///
/// ```
/// use oomph::answer::threshold::{ThresholdQuestion, threshold};
/// use oomph::{device::DeviceSpec, strategy::StrategySpec, trace::TraceBuilder, base::{StreamId, TagId}};
/// let mut story = TraceBuilder::new();
/// let block = story.alloc(30 << 20, StreamId::DEFAULT, TagId(0));
/// story.free(block);
/// let (trace, strategy) = (story.finish("one block"), StrategySpec::from("caching"));
/// let device: DeviceSpec = "sim".parse()?;
/// let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &device))?;
/// assert_eq!(found.threshold_bytes, Some(30 << 20));
/// assert!(found.stability().stable);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn threshold(question: &ThresholdQuestion<'_>) -> Result<Threshold, ThresholdError> {
    let options =
        ReplayOptions { pace: question.pace, repeat: question.repeat, stop: question.stop, ..ReplayOptions::default() };
    let replay = Replay::new(question.trace)
        .strategy(question.strategy.clone())
        .device(question.device.clone())
        .enforced_by(question.cap)
        .options(options);
    let rehearsal = Rehearsal { replay, progress: question.progress };
    let parts = Rehearsal::parts(question.repeat);
    question.progress.begin_stage(&format!("{}: the whole device", question.strategy), parts);
    let Uncapped { oom, peak_held_bytes, peak_reserved_bytes, page_bytes, driver_ns } = rehearsal.uncapped()?;
    let mut answer = Threshold {
        threshold_bytes: None,
        overhead_bytes: overhead(question.device)?,
        live_peak_bytes: live_peak(question.trace),
        uncapped_held_bytes: peak_held_bytes,
        uncapped_reserved_bytes: peak_reserved_bytes,
        uncapped_driver_ns: driver_ns,
        page_bytes,
        probes: Vec::new(),
        failure: oom,
    };
    if answer.failure.is_some() {
        return Ok(answer);
    }
    let trial = |pages: u64| rehearsal.probe(pages.saturating_mul(page_bytes));
    let announce = |places: &[u64], before: usize| {
        let amounts = in_words(places, |pages| Bytes(pages.saturating_mul(page_bytes)).to_string());
        question.progress.begin_stage(
            &format!("{}: try {}, {amounts}", question.strategy, before + 1),
            parts.saturating_mul(places.len() as u64),
        );
    };
    let mut search = Search::new(&trial, |probe: &Probe| probe.fits, question.jobs, u64::MAX).announced_by(&announce);
    // A strategy that takes nothing from the device cannot run out of it.
    let found = if peak_held_bytes == 0 {
        search.fits(0)?;
        0
    } else {
        let fails = answer.live_peak_bytes.div_ceil(page_bytes).saturating_sub(1);
        let used = peak_held_bytes.div_ceil(page_bytes).max(fails + 1);
        // Some count a segment against the limit of which they then take a part only, and need a little more.
        let fits = if search.fits(used)? { used } else { search.climb(used)? };
        search.settle(fails, fits, question.around)?
    };
    answer.threshold_bytes = Some(found.saturating_mul(page_bytes));
    answer.probes = search.into_tried().into_values().collect();
    if found > 0 {
        question.progress.begin_stage(&format!("{}: what fails below", question.strategy), parts);
        answer.failure = rehearsal.explain((found - 1).saturating_mul(page_bytes))?;
    }
    Ok(answer)
}

/// What is tried at once, the hardest and the easiest of it by name.
pub(super) fn in_words(places: &[u64], name: impl Fn(u64) -> String) -> String {
    match places {
        [] => String::new(),
        [only] => name(*only),
        [first, last] => format!("{} and {}", name(*first), name(*last)),
        [first, .., last] => format!("{} amounts from {} to {}", places.len(), name(*first), name(*last)),
    }
}

/// What the context and the libraries take of a device before a strategy takes anything.
pub(in crate::answer) fn overhead(device: &DeviceSpec) -> Result<u64, ThresholdError> {
    let context_bytes = device.open()?.props().context_bytes;
    Ok(context_bytes.saturating_add(device.footprint().library_bytes))
}

/// The most bytes that are alive at one time.
pub(in crate::answer) fn live_peak(trace: &Trace) -> u64 {
    let mut sizes: Vec<u64> = Vec::new();
    let (mut live, mut peak) = (0u64, 0);
    for event in &trace.events {
        match event.op {
            Op::Alloc { slot, bytes, .. } => {
                let slot = slot as usize;
                if slot >= sizes.len() {
                    sizes.resize(slot + 1, 0);
                }
                sizes[slot] = bytes;
                live = live.saturating_add(bytes);
                peak = peak.max(live);
            }
            Op::Free { slot, .. } => {
                let bytes = sizes.get_mut(slot as usize).map_or(0, std::mem::take);
                live = live.saturating_sub(bytes);
            }
            _ => {}
        }
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, models::Recipe, trace::TraceBuilder};

    fn find(trace: &Trace, strategy: &str, change: impl Fn(&mut ThresholdQuestion<'_>)) -> Threshold {
        let (strategy, device) = (StrategySpec::from(strategy), "sim".parse().unwrap());
        let mut question = ThresholdQuestion::new(trace, &strategy, &device);
        question.jobs = 2;
        change(&mut question);
        threshold(&question).unwrap()
    }

    /// Blocks that leave holes behind, which the larger ones that follow do not fit in.
    fn checkerboard() -> Trace {
        let recipe = Recipe::named("checkerboard").unwrap().with("rounds", "1").with("blocks", "128");
        Trace::read(&recipe.workload().unwrap()).unwrap()
    }

    /// What a cap of this many bytes does, replayed on its own.
    fn completes(trace: &Trace, strategy: &str, cap: LimitEnforcer, limit: u64) -> bool {
        let options = ReplayOptions { repeat: REPEATS, ..ReplayOptions::default() };
        let replay = Replay::new(trace).strategy(strategy).enforced_by(cap).options(options);
        Rehearsal { replay, progress: &NoProgress }.probe(limit).unwrap().fits
    }

    #[test]
    fn the_threshold_suffices_and_a_page_less_does_not_under_every_strategy_and_cap() {
        let trace = checkerboard();
        for strategy in ["direct", "async", "caching", "caching:expandable_segments:True", "address:caching"] {
            for cap in [LimitEnforcer::Allocator, LimitEnforcer::Device] {
                let found = find(&trace, strategy, |question| question.cap = cap);
                let bytes = found.threshold_bytes.unwrap();
                assert!(bytes >= found.live_peak_bytes && bytes.is_multiple_of(2 * MIB), "{strategy}: {bytes}");
                assert!(completes(&trace, strategy, cap, bytes), "{strategy}");
                assert!(!completes(&trace, strategy, cap, bytes - 2 * MIB), "{strategy}");
                assert!(found.probes.len() > 16, "{strategy}: {}", found.probes.len());
                let failure = found.failure.unwrap();
                assert!(failure.requested_bytes > 0, "{strategy}");
            }
        }
    }

    #[test]
    fn a_strategy_without_memory_needs_none() {
        let found = find(&checkerboard(), "null", |_| ());
        assert_eq!((found.threshold_bytes, found.failure.is_none()), (Some(0), true));
        assert!(found.device_bytes().unwrap() > 500 * MIB, "a context and its libraries are there all the same");
    }

    #[test]
    fn a_device_that_is_too_small_is_an_answer_with_its_failure() {
        let device = "sim:600MiB".parse().unwrap();
        let (trace, strategy) = (checkerboard(), StrategySpec::from("caching"));
        let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &device)).unwrap();
        assert_eq!((found.threshold_bytes, found.probes.len()), (None, 0));
        assert!(found.failure.unwrap().requested_bytes > 0);
    }

    #[test]
    fn an_empty_story_needs_nothing() {
        let found = find(&TraceBuilder::new().finish("nothing"), "caching", |_| ());
        assert_eq!(found.threshold_bytes, Some(0));
    }

    #[test]
    fn a_search_can_be_given_up() {
        let stop = AtomicBool::new(true);
        let (trace, strategy, device) = (checkerboard(), StrategySpec::from("caching"), "sim".parse().unwrap());
        let question = ThresholdQuestion { stop: Some(&stop), ..ThresholdQuestion::new(&trace, &strategy, &device) };
        assert!(matches!(threshold(&question), Err(ThresholdError::Interrupted)));
    }
}

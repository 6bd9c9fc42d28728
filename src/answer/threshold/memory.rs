//! The smallest memory in which a trace completes under a strategy.
//!
//! The search does not assume that one value separates failure from success. It works on places that count up from the
//! hardest to the easiest; the caller says what a place stands for and what a trial is.

use std::{collections::BTreeMap, sync::atomic::AtomicBool};

use super::{HeldPeak, LimitTrials, PROBES_AROUND, Probe, REPEATS, Stability, ThresholdError, driver_ns};
use crate::{
    base::{Bytes, NoProgress, Progress, parallel_map},
    device::DeviceSpec,
    measure::OomReport,
    plan::MemoryBound,
    replay::{LimitEnforcer, Pace, Replay, ReplayOptions},
    strategy::StrategySpec,
    trace::Trace,
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
    /// Who refuses requests beyond the limit.
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
    /// Reports what is tried, and how far that is.
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
    pub needed_bytes: Option<u64>,
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
        self.needed_bytes.map(|bytes| bytes.saturating_add(self.overhead_bytes))
    }

    /// The try with one page less than the threshold.
    #[must_use]
    pub fn right_below(&self) -> Option<&Probe> {
        let below = self.needed_bytes?.checked_sub(self.page_bytes)?;
        self.probes.iter().find(|probe| probe.limit_bytes == below)
    }

    /// The try at the threshold itself.
    #[must_use]
    pub fn at_threshold(&self) -> Option<&Probe> {
        self.probes.iter().find(|probe| Some(probe.limit_bytes) == self.needed_bytes)
    }
}

/// Searches for the smallest memory that suffices, to one page of the device.
///
/// ```
/// use oomph::answer::threshold::{ThresholdQuestion, threshold};
/// use oomph::{device::DeviceSpec, strategy::StrategySpec, trace::TraceBuilder, base::{StreamId, TagId}};
/// let mut builder = TraceBuilder::new();
/// let block = builder.alloc(30 << 20, StreamId::DEFAULT, TagId(0));
/// builder.free(block);
/// let (trace, strategy) = (builder.finish("one block"), StrategySpec::from("caching"));
/// let device: DeviceSpec = "sim".parse()?;
/// let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &device))?;
/// assert_eq!(found.needed_bytes, Some(30 << 20));
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
    let trials = LimitTrials { replay, progress: question.progress };
    let parts = LimitTrials::parts(question.repeat);
    question.progress.begin_stage(&format!("{}: the whole device", question.strategy), parts);
    let mut held = HeldPeak::default();
    let uncapped = trials.run(None, &mut held)?;
    let page_bytes = question.device.open()?.props().page_bytes;
    let mut answer = Threshold {
        needed_bytes: None,
        overhead_bytes: overhead(question.device)?,
        live_peak_bytes: live_peak(question.trace),
        uncapped_held_bytes: held.bytes,
        uncapped_reserved_bytes: uncapped.stats.peak.reserved,
        uncapped_driver_ns: driver_ns(&uncapped.calls),
        page_bytes,
        probes: Vec::new(),
        failure: held.ooms.reports.into_iter().next(),
    };
    if answer.failure.is_some() {
        return Ok(answer);
    }
    let trial = |pages: u64| trials.probe(pages.saturating_mul(page_bytes));
    let announce = |places: &[u64], before: usize| {
        let amounts = in_words(places, |pages| Bytes(pages.saturating_mul(page_bytes)).to_string());
        question.progress.begin_stage(
            &format!("{}: try {}, {amounts}", question.strategy, before + 1),
            parts.saturating_mul(places.len() as u64),
        );
    };
    let mut search = PlaceSearch::new(&trial, question.jobs, u64::MAX, &announce);
    // A strategy that takes nothing from the device cannot run out of it.
    let found = if held.bytes == 0 {
        search.fits(0)?;
        0
    } else {
        let fails = answer.live_peak_bytes.div_ceil(page_bytes).saturating_sub(1);
        let used = held.bytes.div_ceil(page_bytes).max(fails + 1);
        // Some count a segment against the limit of which they then take a part only, and need a little more.
        let fits = if search.fits(used)? { used } else { search.climb(used)? };
        search.settle(fails, fits, question.around)?
    };
    answer.needed_bytes = Some(found.saturating_mul(page_bytes));
    answer.probes = search.tried.into_values().collect();
    if found > 0 {
        question.progress.begin_stage(&format!("{}: what fails below", question.strategy), parts);
        answer.failure = trials.explain((found - 1).saturating_mul(page_bytes))?;
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
    Ok(device.overhead_bytes()?)
}

/// The most bytes that are alive at one time; 0 for a broken trace, which no replay gets through.
pub(in crate::answer) fn live_peak(trace: &Trace) -> u64 {
    MemoryBound::of(trace, 1).map_or(0, |bound| bound.requested_bytes)
}

/// Into how many parts each round of the search cuts what is left. Fixed, so that the places that are tried do not
/// depend on the machine; three, because two trials at a time is what any machine can do.
const PARTS: u64 = 3;

/// How often a failure above the place found makes the search begin again above it.
const MOST_RESTARTS: u32 = 16;

/// What is tried, on how many threads, and what is known so far.
pub(super) struct PlaceSearch<'a> {
    trial: &'a (dyn Fn(u64) -> Result<Probe, ThresholdError> + Sync),
    jobs: usize,
    /// The easiest place there is.
    last: u64,
    /// Everything that was tried, hardest first.
    pub(super) tried: BTreeMap<u64, Probe>,
    /// Called with the places of each round before they are tried, and with the number of earlier tries.
    announce: &'a dyn Fn(&[u64], usize),
    /// Into how many parts each round cuts what is left.
    parts: u64,
}

impl<'a> PlaceSearch<'a> {
    pub(super) fn new(
        trial: &'a (dyn Fn(u64) -> Result<Probe, ThresholdError> + Sync),
        jobs: usize,
        last: u64,
        announce: &'a dyn Fn(&[u64], usize),
    ) -> Self {
        PlaceSearch { trial, jobs, last, tried: BTreeMap::new(), announce, parts: PARTS }
    }

    /// Tries one place at a time: the fewest trials, where nothing runs side by side.
    pub(super) fn in_halves(self) -> Self {
        PlaceSearch { parts: 2, ..self }
    }

    /// Whether the place fits.
    pub(super) fn fits(&mut self, place: u64) -> Result<bool, ThresholdError> {
        self.try_all(&[place])?;
        Ok(self.known_fit(place))
    }

    /// The place from which on every place tried fits, and with it its surroundings: `around` places, half of them on
    /// either side. `fails` is known to fail and `fits` was seen to fit; nothing below `fails` is tried.
    pub(super) fn settle(&mut self, fails: u64, fits: u64, around: u32) -> Result<u64, ThresholdError> {
        let mut found = self.narrow(fails, fits)?;
        for _ in 0..MOST_RESTARTS {
            self.try_all(&surroundings(found, fails, fits, around))?;
            let failed = |(&place, probe): (&u64, &Probe)| (!probe.fits).then_some(place);
            let Some(above) = self.tried.range(found + 1..).rev().find_map(failed) else { break };
            // Beyond the easiest place there may be none that was tried: further up it must fit again.
            let next_fit = self.tried.range(above + 1..).next().map(|(&place, _)| place);
            let high = match next_fit {
                Some(place) => place,
                None => self.climb(above)?,
            };
            found = self.narrow(above, high)?;
        }
        Ok(found)
    }

    /// The least place from 1 on that fits, in few trials. `free` is the place of what is held where nothing limits it,
    /// which should fit; nothing around the found place is tried. `None` if the easiest place does not fit.
    pub(super) fn least(&mut self, free: u64) -> Result<Option<u64>, ThresholdError> {
        if self.fits(1)? {
            return Ok(Some(1));
        }
        let mut found = if free > 1 { self.settle(1, free, 0)? } else { free };
        // Some count a segment against the limit of which they then take a part only, and need a little more.
        if !self.fits(found)? {
            let fits = self.climb(found)?;
            found = self.settle(found, fits, 0)?;
        }
        Ok(self.known_fit(found).then_some(found))
    }

    /// The first place that fits, going up from one that fails in growing strides.
    pub(super) fn climb(&mut self, fails: u64) -> Result<u64, ThresholdError> {
        let mut stride = 1;
        loop {
            let place = fails.saturating_add(stride).min(self.last);
            if self.fits(place)? || place == self.last {
                return Ok(place);
            }
            stride = stride.saturating_mul(2);
        }
    }

    /// Between a failure and a fit above it: the fit right above a failure.
    fn narrow(&mut self, mut fails: u64, mut fits: u64) -> Result<u64, ThresholdError> {
        while fits - fails > 1 {
            let span = fits - fails;
            let cut = |part: u64| fails + (u128::from(span) * u128::from(part) / u128::from(self.parts)) as u64;
            let places: Vec<u64> = (1..self.parts).map(cut).filter(|&place| place > fails && place < fits).collect();
            let places = if places.is_empty() { vec![fails + 1] } else { places };
            self.try_all(&places)?;
            fails = places.iter().copied().filter(|&place| !self.known_fit(place)).max().unwrap_or(fails);
            fits = places.iter().copied().filter(|&place| place > fails).min().unwrap_or(fits);
        }
        Ok(fits)
    }

    pub(super) fn known_fit(&self, place: u64) -> bool {
        self.tried.get(&place).is_some_and(|probe| probe.fits)
    }

    /// Tries what has not been tried, side by side.
    fn try_all(&mut self, places: &[u64]) -> Result<(), ThresholdError> {
        let mut new: Vec<u64> =
            places.iter().copied().filter(|place| *place <= self.last && !self.tried.contains_key(place)).collect();
        new.sort_unstable();
        new.dedup();
        if !new.is_empty() {
            (self.announce)(&new, self.tried.len());
        }
        let outcomes = parallel_map(&new, self.jobs, |&place| (self.trial)(place));
        // In the order of places: which error is returned must not depend on the threads.
        for (place, outcome) in new.into_iter().zip(outcomes) {
            self.tried.insert(place, outcome?);
        }
        Ok(())
    }
}

/// Half of the places below and half above: the nearest at growing distances, the others spread over the way to the
/// ends of what was searched, or a little beyond where that is near.
fn surroundings(found: u64, lowest: u64, highest: u64, count: u32) -> Vec<u64> {
    let side = u64::from(count.div_ceil(2));
    let near = side.div_ceil(2);
    let far = side - near;
    let distances = |way: u64| {
        let reach = way.max(1 << near.min(20));
        let nearest = (0..near).map(|step| 1 << step.min(40));
        let spread = (1..=far).map(move |part| {
            let least = (1 << near.min(40)) + part;
            (u128::from(reach) * u128::from(part) / u128::from(far)).max(u128::from(least)) as u64
        });
        nearest.chain(spread).collect::<Vec<u64>>()
    };
    let below = distances(found.saturating_sub(lowest)).into_iter().filter_map(|distance| found.checked_sub(distance));
    let above = distances(highest.saturating_sub(found)).into_iter().map(|distance| found.saturating_add(distance));
    below.chain(above).collect()
}

#[cfg(test)]
mod memory_tests {
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
        LimitTrials { replay, progress: &NoProgress }.probe(limit).unwrap().fits
    }

    #[test]
    fn one_page_below_every_threshold_fails() {
        let trace = checkerboard();
        for strategy in ["direct", "async", "caching", "caching:expandable_segments:True", "address:caching"] {
            for cap in [LimitEnforcer::Allocator, LimitEnforcer::Device] {
                let found = find(&trace, strategy, |question| question.cap = cap);
                let bytes = found.needed_bytes.unwrap();
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
        assert_eq!((found.needed_bytes, found.failure.is_none()), (Some(0), true));
        assert!(found.device_bytes().unwrap() > 500 * MIB, "a context and its libraries are there all the same");
    }

    #[test]
    fn too_small_device_returns_its_failure() {
        let device = "sim:600MiB".parse().unwrap();
        let (trace, strategy) = (checkerboard(), StrategySpec::from("caching"));
        let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &device)).unwrap();
        assert_eq!((found.needed_bytes, found.probes.len()), (None, 0));
        assert!(found.failure.unwrap().requested_bytes > 0);
    }

    #[test]
    fn an_empty_story_needs_nothing() {
        let found = find(&TraceBuilder::new().finish("nothing"), "caching", |_| ());
        assert_eq!(found.needed_bytes, Some(0));
    }

    #[test]
    fn a_search_can_be_given_up() {
        let stop = AtomicBool::new(true);
        let (trace, strategy, device) = (checkerboard(), StrategySpec::from("caching"), "sim".parse().unwrap());
        let question = ThresholdQuestion { stop: Some(&stop), ..ThresholdQuestion::new(&trace, &strategy, &device) };
        assert!(matches!(threshold(&question), Err(ThresholdError::Interrupted)));
    }
}

#[cfg(test)]
mod search_tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn probe(fits: bool) -> Probe {
        Probe { fits, ..Probe::default() }
    }

    fn settle(is_fit: impl Fn(u64) -> bool + Sync, fails: u64, fits: u64) -> (u64, BTreeMap<u64, bool>) {
        let trial = |place| Ok(probe(is_fit(place)));
        let mut search = PlaceSearch::new(&trial, 2, u64::MAX, &|_, _| ());
        assert!(search.fits(fits).unwrap(), "{fits} must fit");
        let found = search.settle(fails, fits, 16).unwrap();
        (found, search.tried.into_iter().map(|(place, probe)| (place, probe.fits)).collect())
    }

    #[test]
    fn sixteen_different_places_around_the_one_found_are_tried() {
        for (fails, edge, fits) in [(0, 5000, 9000), (99, 100, 100), (400, 401, 3000), (400, 2999, 3000)] {
            let (found, tried) = settle(|place| place >= edge, fails, fits);
            assert_eq!(found, edge);
            let others: BTreeSet<u64> = tried.keys().copied().filter(|&place| place != edge).collect();
            assert!(others.len() >= 16, "{fails} {edge} {fits}: {others:?}");
            assert!(others.contains(&(edge - 1)) && others.contains(&(edge + 1)));
        }
    }

    #[test]
    fn at_the_bottom_there_is_nothing_below_to_try() {
        let (found, tried) = settle(|place| place >= 1, 0, 10);
        assert_eq!((found, tried.keys().next()), (1, Some(&0)));
    }

    #[test]
    fn a_failure_above_moves_the_answer_above_it() {
        // Fits from 50, but not at 52, 100 and 101; the far ones are met on the way.
        let (found, tried) = settle(|place| place >= 50 && ![52, 100, 101].contains(&place), 10, 120);
        assert!(found > 52 && tried.range(found..).all(|(_, fits)| *fits), "{found}: {tried:?}");
    }

    #[test]
    fn each_probe_is_announced_once() {
        let announced = std::cell::RefCell::new(Vec::new());
        let announce = |places: &[u64], before: usize| {
            assert_eq!(announced.borrow().len(), before);
            announced.borrow_mut().extend_from_slice(places);
        };
        let trial = |place| Ok(probe(place >= 700));
        let mut search = PlaceSearch::new(&trial, 2, u64::MAX, &announce);
        let found = search.settle(0, 5000, 16).unwrap();
        let tried: Vec<u64> = search.tried.into_keys().collect();
        let mut announced = announced.into_inner();
        announced.sort_unstable();
        assert_eq!((found, announced), (700, tried));
    }

    #[test]
    fn least_place_takes_few_trials() {
        for (edge, free) in [(1, 1), (1, 90), (2, 90), (40, 90), (90, 90), (93, 90), (3, 2)] {
            let trial = |place| Ok(probe(place >= edge));
            let mut search = PlaceSearch::new(&trial, 1, 1000, &|_, _| ()).in_halves();
            assert_eq!(search.least(free).unwrap(), Some(edge), "{edge} {free}");
            assert!(search.tried.len() <= 13, "{edge} {free}: {:?}", search.tried.keys());
        }
        let trial = |_| Ok(probe(false));
        assert_eq!(PlaceSearch::new(&trial, 1, 1000, &|_, _| ()).in_halves().least(90).unwrap(), None);
    }

    #[test]
    fn the_errors_of_a_trial_end_the_search() {
        let trial = |place| if place == 5 { Err(ThresholdError::Interrupted) } else { Ok(probe(place > 3)) };
        let mut search = PlaceSearch::new(&trial, 2, u64::MAX, &|_, _| ());
        assert!(matches!(search.settle(0, 9, 16), Err(ThresholdError::Interrupted)));
    }

    proptest! {
        #[test]
        fn an_edge_is_found_exactly(edge in 1u64..100_000, below in 1u64..5000, above in 0u64..5000) {
            let (found, tried) = settle(|place| place >= edge, edge.saturating_sub(below), edge + above);
            prop_assert_eq!(found, edge);
            prop_assert!(tried.len() < 60, "{}", tried.len());
        }

        #[test]
        fn answer_agrees_with_all_probes(
            holes in prop::collection::btree_set(1u64..400, 0..200),
        ) {
            let (found, tried) = settle(|place| place >= 400 || (place > 0 && !holes.contains(&place)), 0, 500);
            prop_assert!(tried.range(found..).all(|(_, fits)| *fits), "{}: {:?}", found, tried);
            prop_assert!(found == 1 || !tried[&(found - 1)], "{}: {:?}", found, tried);
        }
    }
}

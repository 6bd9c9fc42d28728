//! The threshold of a case of a suite: searched on a simulated device, and confirmed on the case's own device if that
//! is a real one. [`WithThresholds`] adds a coarser one to the row of every case.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use super::{
    LimitTrials, Threshold, ThresholdDetail, ThresholdError, ThresholdQuestion, ThresholdRecord,
    memory::{PlaceSearch, overhead},
    threshold,
};
use crate::{
    base::{Bytes, NoProgress},
    device::DeviceSpec,
    measure::{CaseLabel, CaseRecord, Status, on_one_line},
    plugin,
    replay::{LimitEnforcer, OnOutOfMemory},
    suite::{Case, CaseOutcome, CaseRunner, SourceSpec},
    trace::{Source, Trace},
};

/// The resolution of [`WithThresholds`]: this part of the bound (0.2 %), or a page where that is more.
const STEPS_PER_BOUND: u64 = 500;

/// How many sources are kept in memory. Cases of one source follow each other, so few lanes need few sources.
const KEPT_SOURCES: usize = 4;

/// Runs cases with another runner and adds to the rows of completed ones the least memory in which they complete
/// (`needed_bytes`), for the cases that are wanted.
///
/// The amounts that are tried begin at the bound and lie 0.2 % of it apart, whole pages, and are the same for every
/// strategy. So a need is at most that much too high, and strategies that need the same have the same value. A case with a
/// limit, on a real device or with a plugin is not searched.
pub struct WithThresholds<'a> {
    runner: &'a dyn CaseRunner,
    is_wanted: &'a (dyn Fn(&Case) -> bool + Sync),
    sources: Mutex<VecDeque<(SourceSpec, SharedSource)>>,
}

/// Read by the first case, while others wait. `None` for a source that cannot be read.
type SharedSource = Arc<OnceLock<Option<Arc<dyn Source>>>>;

impl<'a> WithThresholds<'a> {
    /// The runner must add the bound to the rows ([`WithNeeds`](crate::suite::WithNeeds)).
    pub fn new(runner: &'a dyn CaseRunner, is_wanted: &'a (dyn Fn(&Case) -> bool + Sync)) -> WithThresholds<'a> {
        WithThresholds { runner, is_wanted, sources: Mutex::default() }
    }

    /// The source of a case, in memory: it is read for every try.
    fn source(&self, case: &Case) -> Option<Arc<dyn Source>> {
        let entry = {
            let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
            match sources.iter().find(|(origin, _)| *origin == case.origin) {
                Some((_, entry)) => Arc::clone(entry),
                None => {
                    let entry = SharedSource::default();
                    sources.push_front((case.origin.clone(), Arc::clone(&entry)));
                    sources.truncate(KEPT_SOURCES);
                    entry
                }
            }
        };
        let read = || match case.source.initial_layout() {
            // A trace has no initial layout, and such a recording is in memory as it is.
            Some(_) => Some(Arc::clone(&case.source)),
            None => Trace::read(&*case.source).ok().map(|trace| Arc::new(trace) as Arc<dyn Source>),
        };
        entry.get_or_init(read).clone()
    }
}

impl CaseRunner for WithThresholds<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        let mut outcome = self.runner.run(case);
        let is_searched =
            case.device.is_simulated() && case.label.limit.is_none() && !plugin::is_plugin(&case.strategy);
        if !is_searched || outcome.record.status != Status::Completed || !(self.is_wanted)(case) {
            return outcome;
        }
        if let Some(source) = self.source(case) {
            match needed_bytes(case, &*source, &outcome.record) {
                Ok(bytes) => outcome.record.needed_bytes = bytes,
                Err(error) => outcome.record.reason = on_one_line(&format!("its need is not known: {error}")),
            }
        }
        outcome
    }
}

/// The least memory in which a case completes that holds what `record` says where nothing limits it. `None` if it takes
/// no memory from the device, or if its bound is not known.
fn needed_bytes(case: &Case, source: &dyn Source, record: &CaseRecord) -> Result<Option<u64>, ThresholdError> {
    let calls = [record.driver_alloc_calls, record.driver_mapping_calls, record.driver_pool_calls];
    let takes_memory = calls.iter().any(|calls| *calls > Some(0));
    let (Some(bound), Some(reserved), true) = (record.live_peak_bytes, record.peak_reserved_bytes, takes_memory) else {
        return Ok(None);
    };
    let used = record.peak_device_used_bytes.unwrap_or(0);
    let held = reserved.max(used.saturating_sub(overhead(&case.device)?));
    let page_bytes = case.device.open()?.props().page_bytes;
    let amounts = Amounts::new(bound.div_ceil(page_bytes), held.div_ceil(page_bytes));
    let mut replay = case.replay(None).with_source(source);
    replay.options.on_out_of_memory = OnOutOfMemory::Stop;
    let trials = LimitTrials { replay, progress: &NoProgress };
    let trial = |place: u64| trials.probe(amounts.pages(place).saturating_mul(page_bytes));
    let last = amounts.place_of(case.device.total_bytes()?.div_ceil(page_bytes));
    let mut search = PlaceSearch::new(&trial, 1, last, &|_, _| ()).in_halves();
    let found = search.least(amounts.free_place)?;
    Ok(found.map(|place| amounts.pages(place).saturating_mul(page_bytes)))
}

/// The amounts of memory that are tried, in pages. Place 0 is less than the bound, place 1 is the bound.
struct Amounts {
    bound: u64,
    step: u64,
    /// What the case holds where nothing limits it, and its place.
    held: u64,
    free_place: u64,
}

impl Amounts {
    fn new(bound: u64, held: u64) -> Amounts {
        let (bound, held) = (bound.max(1), held.max(bound).max(1));
        let step = (bound / STEPS_PER_BOUND).max(1);
        Amounts { bound, step, held, free_place: (held - bound).div_ceil(step) + 1 }
    }

    fn pages(&self, place: u64) -> u64 {
        match place.checked_sub(1) {
            None => self.bound - 1,
            // Not above it: a case that completes with what it takes does not need more.
            Some(_) if place == self.free_place => self.held,
            Some(steps) => self.bound.saturating_add(steps.saturating_mul(self.step)),
        }
    }

    /// The last place with at most this many pages, and not before that of what is held.
    fn place_of(&self, pages: u64) -> u64 {
        (pages.saturating_sub(self.bound) / self.step + 1).max(self.free_place)
    }
}

/// The threshold of `case`, whose source is the trace of the question. Strategy, device, rounds and pace are those of
/// the case; the threshold of a real device is searched on the simulated H200 and confirmed by `runner`. Errors are in
/// the record.
#[must_use]
pub fn case_threshold(case: &Case, question: &ThresholdQuestion<'_>, runner: &dyn CaseRunner) -> ThresholdDetail {
    let device = &searched_device(case);
    let (repeat, pace) = (case.label.repeat, case.pace);
    let answer = threshold(&ThresholdQuestion { strategy: &case.strategy, device, repeat, pace, ..*question });
    let page_bytes = answer.as_ref().map_or(0, |found| found.page_bytes);
    let mut detail = detail_of(case, question.cap, answer);
    if let Some(bytes) = detail.record.needed_bytes.filter(|_| !case.device.is_simulated()) {
        confirm(&mut detail.record, case, bytes, page_bytes, runner);
    }
    detail
}

/// The answer of a case whose threshold could not be searched.
#[must_use]
pub fn failed_threshold(case: &Case, cap: LimitEnforcer, error: ThresholdError) -> ThresholdDetail {
    detail_of(case, cap, Err(error))
}

/// The device that is searched on.
fn searched_device(case: &Case) -> DeviceSpec {
    if case.device.is_simulated() { case.device.clone() } else { DeviceSpec::default() }
}

fn detail_of(case: &Case, cap: LimitEnforcer, answer: Result<Threshold, ThresholdError>) -> ThresholdDetail {
    let label = CaseLabel { device: searched_device(case).to_string(), limit: None, ..case.label.clone() };
    let mut detail = ThresholdDetail::new(&label, cap, answer);
    detail.record.case_id = case.label.case_id();
    detail
}

/// Runs `case` on its own device with a page more than the threshold, which must complete, and with a page less, which
/// must not, and adds how they ended. The cap is the strategy's limit
/// ([`LimitEnforcer::Allocator`](crate::replay::LimitEnforcer::Allocator)).
fn confirm(record: &mut ThresholdRecord, case: &Case, needed_bytes: u64, page_bytes: u64, runner: &dyn CaseRunner) {
    let mut misses = Vec::new();
    let mut run = |limit: u64, expected: Status| {
        let label = CaseLabel { limit: Some(limit), ..case.label.clone() };
        let record = runner.run(&Case { label, ..case.clone() }).record;
        if record.status != expected {
            let why = if record.reason.is_empty() { String::new() } else { format!(" ({})", record.reason) };
            let (status, expected) = (record.status.name(), expected.name());
            misses.push(format!("{}: {status} with {}, {expected} expected{why}", case.device, Bytes(limit)));
        }
        record.status
    };
    record.real_device = Some(case.device.to_string());
    record.real_above = Some(run(needed_bytes.saturating_add(page_bytes), Status::Completed));
    record.real_below = needed_bytes.checked_sub(page_bytes).map(|below| run(below, Status::Oom));
    record.confirmed = Some(misses.is_empty());
    if !misses.is_empty() {
        record.reason = on_one_line(&misses.join("; "));
    }
}

#[cfg(test)]
mod amounts_tests {
    use super::*;

    #[test]
    fn amounts_are_the_same_for_every_strategy() {
        let (modest, greedy) = (Amounts::new(5000, 5025), Amounts::new(5000, 7000));
        assert_eq!([0, 1, 2, 3].map(|place| greedy.pages(place)), [4999, 5000, 5010, 5020]);
        assert_eq!([0, 1, 2, 3].map(|place| modest.pages(place)), [4999, 5000, 5010, 5020]);
        assert_eq!(
            (modest.free_place, modest.pages(4), modest.pages(5)),
            (4, 5025, 5040),
            "what it holds is one of them"
        );
        assert_eq!((greedy.free_place, greedy.pages(201)), (201, 7000));
        assert_eq!((greedy.place_of(7010), greedy.place_of(5)), (202, 201));
    }

    #[test]
    fn small_bounds_are_searched_page_by_page() {
        let amounts = Amounts::new(7, 9);
        assert_eq!([1, 2, 3, 4].map(|place| amounts.pages(place)), [7, 8, 9, 10]);
        assert_eq!(Amounts::new(0, 0).free_place, 1);
    }
}

#[cfg(test)]
mod need_tests {
    use super::*;
    use crate::{
        base::MIB,
        suite::{CaseSettings, InProcess, SuiteFile, WithNeeds},
    };

    fn cases(text: &str, device: &str) -> Vec<Case> {
        let settings = CaseSettings { device: device.parse().unwrap(), limit: None, seed: None, timeout: None };
        SuiteFile::parse("t", "t.toml", &format!("question = 'how much?'\n[[group]]\n{text}"))
            .unwrap()
            .cases(&settings)
            .unwrap()
    }

    fn record(case: &Case, is_wanted: bool) -> CaseRecord {
        let runner = InProcess::default();
        let with_needs = WithNeeds::new(&runner, None);
        WithThresholds::new(&with_needs, &|_| is_wanted).run(case).record
    }

    #[test]
    fn need_completes_and_a_step_less_does_not() {
        let text = "workloads = ['checkerboard']\nstrategies = ['direct', 'caching', 'slab', 'bfc', 'async']\n\
                    set = { rounds = 2 }\n";
        for case in cases(text, "sim") {
            let record = record(&case, true);
            let (needed, bound) = (record.needed_bytes.unwrap(), record.live_peak_bytes.unwrap());
            let step = (bound.div_ceil(2 * MIB) / STEPS_PER_BOUND).max(1) * 2 * MIB;
            let completes = |bytes: u64| {
                let label = CaseLabel { limit: Some(bytes), ..case.label.clone() };
                InProcess::default().run(&Case { label, ..case.clone() }).record.status == Status::Completed
            };
            let id = case.label.case_id();
            assert!(needed >= bound && needed.is_multiple_of(2 * MIB), "{id}: {needed}");
            assert!(completes(needed) && (needed < bound + step || !completes(needed - step)), "{id}: {needed}");
        }
    }

    #[test]
    fn cache_that_is_given_back_is_appetite_and_not_need() {
        let case = cases("workloads = ['adversary-ladder']\nstrategies = ['caching']\n", "sim").remove(0);
        let record = record(&case, true);
        assert!(record.need_ratio().unwrap() < 1.5 && record.appetite_ratio().unwrap() > 3.0, "{record:?}");
    }

    #[test]
    fn need_is_empty_where_it_was_not_searched() {
        let plain = "workloads = ['checkerboard']\nset = { rounds = 1 }\nstrategies = ['caching']\n";
        assert_eq!(record(&cases(plain, "sim").remove(0), false).needed_bytes, None);
        let limited = cases(&format!("{plain}limits = ['60GiB']\n"), "sim").remove(0);
        let limited = record(&limited, true);
        assert_eq!((limited.status, limited.needed_bytes), (Status::Completed, None));
        let none = "workloads = ['checkerboard']\nset = { rounds = 1 }\nstrategies = ['null']\n";
        assert_eq!(record(&cases(none, "sim").remove(0), true).needed_bytes, None, "it takes no memory");
    }
}

#[cfg(test)]
mod case_tests {
    use super::*;
    use crate::{
        answer::threshold::ThresholdStatus,
        suite::{CaseOutcome, CaseSettings, InProcess, SuiteFile},
        trace::Trace,
    };

    /// Runs the cases of a GPU that is not there on the simulated one.
    struct Understudy;

    impl CaseRunner for Understudy {
        fn run(&self, case: &Case) -> CaseOutcome {
            assert!(!case.device.is_simulated() && case.label.limit.is_some());
            InProcess::default().run(&Case { device: "sim".parse().unwrap(), ..case.clone() })
        }
    }

    fn answer(device: &str) -> ThresholdDetail {
        let text = "question = 'how much?'\n[[group]]\nworkloads = ['checkerboard']\nstrategies = ['caching']\nrepeat = 2\n\
                    set = { rounds = 1, blocks = 128 }\n";
        let settings = CaseSettings { device: device.parse().unwrap(), limit: None, seed: None, timeout: None };
        let case = SuiteFile::parse("t", "t.toml", text).unwrap().cases(&settings).unwrap().remove(0);
        let trace = Trace::read(&*case.source).unwrap();
        case_threshold(&case, &ThresholdQuestion::new(&trace, &case.strategy, &case.device), &Understudy)
    }

    #[test]
    fn a_simulated_case_needs_no_confirmation() {
        let record = answer("sim:80GiB").record;
        assert_eq!((record.status, record.confirmed), (ThresholdStatus::Found, None));
        assert_eq!((record.device.as_str(), record.repeat), ("sim:80GiB", 2));
    }

    #[test]
    fn simulated_search_is_confirmed_by_two_runs() {
        let record = answer("cuda:3").record;
        assert_eq!((record.device.as_str(), record.real_device.as_deref()), ("sim", Some("cuda:3")));
        assert!(record.case_id.contains("@cuda:3"), "{}", record.case_id);
        assert_eq!((record.real_above, record.real_below), (Some(Status::Completed), Some(Status::Oom)));
        assert_eq!((record.confirmed, record.reason.as_str()), (Some(true), ""));
    }
}

#[cfg(test)]
mod confirm_tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        base::MIB,
        strategy::StrategySpec,
        suite::{CaseOutcome, CaseSettings, InProcess, SuiteFile},
        trace::Trace,
    };

    fn case() -> Case {
        let text =
            "question = 'how much?'\n[[group]]\nworkloads = ['checkerboard']\nstrategies = ['caching']\nrepeat = 3\n";
        let settings = CaseSettings { device: "sim".parse().unwrap(), limit: None, seed: None, timeout: None };
        SuiteFile::parse("t", "t.toml", text).unwrap().cases(&settings).unwrap().remove(0)
    }

    fn confirmed(case: &Case, bytes: u64, runner: &dyn CaseRunner) -> ThresholdRecord {
        let mut record = ThresholdRecord::default();
        confirm(&mut record, case, bytes, 2 * MIB, runner);
        record
    }

    #[test]
    fn a_device_that_decides_the_same_confirms() {
        let mut case = case();
        let trace = Trace::read(&*case.source).unwrap();
        let strategy = StrategySpec::from("caching");
        let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &case.device)).unwrap();
        case.source = Arc::new(trace);
        let bytes = found.needed_bytes.unwrap();
        let confirmation = confirmed(&case, bytes, &InProcess::default());
        assert_eq!(confirmation.confirmed, Some(true), "{confirmation:?}");
        let off = confirmed(&case, bytes + 8 * MIB, &InProcess::default());
        assert_eq!(off.confirmed, Some(false));
        assert!(off.reason.contains("oom expected"));
    }

    #[test]
    fn a_run_that_breaks_confirms_nothing_and_says_why() {
        struct Broken;
        impl CaseRunner for Broken {
            fn run(&self, case: &Case) -> CaseOutcome {
                let mut outcome = InProcess::default().run(case);
                (outcome.record.status, outcome.record.reason) = (Status::Error, "cable pulled".to_owned());
                outcome
            }
        }
        let ThresholdRecord { confirmed, reason, .. } = confirmed(&case(), 64 * MIB, &Broken);
        assert_eq!(confirmed, Some(false));
        assert!(reason.contains("completed expected (cable pulled)") && reason.contains("; "), "{reason}");
    }
}

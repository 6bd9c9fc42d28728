//! Runs cases: in parallel where only simulated time counts, alone where wall-clock time is
//! measured. Chooses the process of each case, and adds the bound of its source. Times cases in rounds.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{Case, CaseScope, InProcess, SourceFamily, SourceSpec, WorkerProcess};
use crate::{
    device::DeviceSpec,
    measure::{CaseDetail, CaseLabel, CaseRecord, Status, TimingRecord},
    plan::{MemoryNeeds, PackingBudget},
    plugin,
};

/// The number of cores of this machine.
pub fn all_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseOutcome {
    /// The row of the case.
    pub record: CaseRecord,
    /// Data that is too large for a row.
    pub detail: CaseDetail,
    /// Wall-clock times of a timed case: of one thread, then of each requested number of threads.
    pub timings: Vec<TimingRecord>,
    /// Whether the worker process of the case crashed or took too long.
    #[serde(skip)]
    pub worker_failed: bool,
}

impl CaseOutcome {
    /// The outcome of a case that failed before anything was measured.
    pub(super) fn failed(label: &CaseLabel, reason: &str) -> CaseOutcome {
        CaseOutcome {
            record: CaseRecord::unmeasured(label, Status::Error, reason),
            detail: CaseDetail::unmeasured(label),
            timings: Vec::new(),
            worker_failed: false,
        }
    }
}

/// Runs a case, in this process or in a worker process.
pub trait CaseRunner: Sync {
    /// Runs one case to its end. Errors are part of the record.
    fn run(&self, case: &Case) -> CaseOutcome;
}

/// Events while cases run.
pub enum CaseProgress<'a> {
    /// A case has started.
    Started(&'a Case),
    /// A case has ended.
    Finished(&'a Case, Box<CaseOutcome>),
}

/// Runs `cases` on `jobs` threads; timed cases and those on a real device run afterwards, one at a
/// time. Once `stop` is set no further case starts, and running ones are finished. The listener is
/// called on this thread, in order of completion.
pub fn run(
    cases: &[Case],
    runner: &dyn CaseRunner,
    jobs: usize,
    stop: &AtomicBool,
    mut listener: impl FnMut(CaseProgress<'_>),
) {
    let (alone, free): (Vec<&Case>, Vec<&Case>) =
        cases.iter().partition(|case| case.timed || !case.device.is_simulated());
    let lanes = vec![None; jobs.clamp(1, free.len().max(1))];
    run_in_lanes(&free, runner, &lanes, stop, &mut listener);
    run_in_lanes(&alone, runner, &[None], stop, &mut listener);
}

/// Runs `cases` on all of `devices`, one case per device at a time. Cases timed on a simulated
/// device need the cores of this machine, so they run afterwards, one at a time.
pub fn run_on(
    devices: &[DeviceSpec],
    cases: &[Case],
    runner: &dyn CaseRunner,
    stop: &AtomicBool,
    mut listener: impl FnMut(CaseProgress<'_>),
) {
    let (alone, free): (Vec<&Case>, Vec<&Case>) =
        cases.iter().partition(|case| case.timed && case.device.is_simulated());
    let lanes: Vec<Option<&DeviceSpec>> = devices.iter().map(Some).collect();
    run_in_lanes(&free, runner, &lanes, stop, &mut listener);
    run_in_lanes(&alone, runner, &lanes[..lanes.len().min(1)], stop, &mut listener);
}

/// Every lane takes the next case as soon as it is free, and runs it on the lane's device or on the
/// case's own.
fn run_in_lanes(
    cases: &[&Case],
    runner: &dyn CaseRunner,
    lanes: &[Option<&DeviceSpec>],
    stop: &AtomicBool,
    listener: &mut impl FnMut(CaseProgress<'_>),
) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for &device in lanes {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    // The receiver outlives the lanes, so a send cannot fail.
                    let _ = sender.send((case, None));
                    let outcome = match device {
                        None => runner.run(case),
                        Some(device) => run_on_device(case, runner, device),
                    };
                    let _ = sender.send((case, Some(outcome)));
                }
            });
        }
        drop(sender);
        for (case, outcome) in receiver {
            listener(match outcome {
                None => CaseProgress::Started(case),
                Some(outcome) => CaseProgress::Finished(case, Box::new(outcome)),
            });
        }
    });
}

/// Runs the case on one of several equal devices. The device is noted beside the row, because the
/// row must not depend on it. Simulated devices are all the same.
fn run_on_device(case: &Case, runner: &dyn CaseRunner, device: &DeviceSpec) -> CaseOutcome {
    let mut outcome = runner.run(&Case { device: device.clone(), ..case.clone() });
    outcome.detail.ran_on = (!device.is_simulated()).then(|| device.to_string());
    outcome
}

/// The rows of a case, or why it could not be timed; `None` if the rounds were stopped before the end.
pub type RoundTimes = Option<Result<Vec<TimingRecord>, String>>;

/// Times `cases` in rounds: each round times every case once with `runner`, which should start a process per case. The
/// order of the cases differs from round to round, so that a slow minute of the machine hits all of them alike.
pub fn time_in_rounds(
    cases: &[Case],
    runner: &dyn CaseRunner,
    rounds: u32,
    stop: &AtomicBool,
    mut listener: impl FnMut(u32, &Case),
) -> Vec<RoundTimes> {
    let orders: Vec<Case> = cases.iter().map(|case| Case { scope: CaseScope::Round, ..case.clone() }).collect();
    let mut gathered = vec![Ok(Vec::new()); cases.len()];
    let mut complete = true;
    'rounds: for round in 0..rounds.max(1) {
        for place in shuffled(cases.len(), round) {
            if stop.load(Ordering::Relaxed) {
                complete = false;
                break 'rounds;
            }
            if gathered[place].is_err() {
                continue;
            }
            listener(round, &orders[place]);
            add_round(&mut gathered[place], runner.run(&orders[place]));
        }
    }
    let finished = |times: Result<Vec<Vec<TimingRecord>>, String>| match times {
        Ok(rounds) => complete.then(|| Ok(merged(rounds))),
        Err(reason) => Some(Err(reason)),
    };
    gathered.into_iter().map(finished).collect()
}

/// The numbers below `count`, in an order that belongs to the round.
pub(super) fn shuffled(count: usize, round: u32) -> Vec<usize> {
    let mut places: Vec<usize> = (0..count).collect();
    places.shuffle(&mut ChaCha8Rng::seed_from_u64(u64::from(round)));
    places
}

fn add_round(times: &mut Result<Vec<Vec<TimingRecord>>, String>, outcome: CaseOutcome) {
    match times {
        Ok(rounds) if outcome.record.status != Status::Error && !outcome.worker_failed => rounds.push(outcome.timings),
        Ok(_) => *times = Err(outcome.record.reason),
        Err(_) => {}
    }
}

/// One row per number of threads.
fn merged(rounds: Vec<Vec<TimingRecord>>) -> Vec<TimingRecord> {
    let rows = rounds.first().map_or(0, Vec::len);
    let mut by_row: Vec<Vec<TimingRecord>> = vec![Vec::new(); rows];
    for round in rounds {
        by_row.iter_mut().zip(round).for_each(|(row, record)| row.push(record));
    }
    by_row.into_iter().filter_map(TimingRecord::of_rounds).collect()
}

/// Which cases run in their own process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Isolation {
    /// Cases on a real device, with a plugin or with a time-out.
    ///
    /// Some errors make a real device unusable for the process, a plugin may do anything, and only
    /// a process can be ended from outside.
    #[default]
    Auto,
    /// All cases.
    Always,
    /// No case.
    Never,
}

impl Isolation {
    /// Whether the case runs in its own process.
    pub fn isolates(self, case: &Case) -> bool {
        match self {
            Isolation::Auto => {
                !case.device.is_simulated() || plugin::is_plugin(&case.strategy) || case.timeout.is_some()
            }
            Isolation::Always => true,
            Isolation::Never => false,
        }
    }
}

/// Runs every case in the process that [`Isolation`] chooses.
#[derive(Clone, Debug)]
pub struct IsolatingRunner<'a> {
    /// The choice.
    pub isolation: Isolation,
    /// Runs cases in this process.
    pub here: InProcess<'a>,
    /// Runs the others.
    pub worker: WorkerProcess<'a>,
}

impl CaseRunner for IsolatingRunner<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        if self.isolation.isolates(case) { self.worker.run(case) } else { self.here.run(case) }
    }
}

/// Runs cases with another runner and adds the family and the bound of the source, and the packing if requested,
/// to the rows of measured cases. Both are the same under every strategy, limit and device, so they
/// are computed once per source.
pub struct WithNeeds<'a> {
    runner: &'a dyn CaseRunner,
    pack_within: Option<PackingBudget>,
    known: Mutex<Vec<(SourceSpec, SharedNeeds)>>,
}

/// Computed by the first case, while others wait. `None` for a source that cannot be read.
type SharedNeeds = Arc<OnceLock<Option<MemoryNeeds>>>;

impl<'a> WithNeeds<'a> {
    /// Packs every source too if a budget is given.
    pub fn new(runner: &'a dyn CaseRunner, pack_within: Option<PackingBudget>) -> WithNeeds<'a> {
        WithNeeds { runner, pack_within, known: Mutex::default() }
    }

    /// The needs of a case's source. For a source that cannot be read the case itself reports the
    /// error.
    fn needs(&self, case: &Case) -> Option<MemoryNeeds> {
        let entry = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            match known.iter().find(|(origin, _)| *origin == case.origin) {
                Some((_, entry)) => Arc::clone(entry),
                None => {
                    let entry = SharedNeeds::default();
                    known.push((case.origin.clone(), Arc::clone(&entry)));
                    entry
                }
            }
        };
        *entry.get_or_init(|| MemoryNeeds::of(&*case.source, self.pack_within).ok())
    }
}

impl CaseRunner for WithNeeds<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        let mut outcome = self.runner.run(case);
        // After an interruption the source is not read again.
        if outcome.record.clock.is_some()
            && outcome.record.status != Status::Interrupted
            && let Some(needs) = self.needs(case)
        {
            let family = SourceFamily::of(&case.origin, &case.label.workload);
            outcome.record.set_needs(&needs);
            outcome.record.family = Some(family.family);
            outcome.record.split = family.split;
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;
    use crate::{
        base::PlacementCall,
        device::DeviceFleet,
        suite::test_case,
        trace::{EventReader, InitialLayout, Source, TraceError},
    };

    /// Notes which device each case was given, and how many cases a device had at once.
    #[derive(Default)]
    struct RecordingRunner {
        busy: Mutex<BTreeMap<String, u32>>,
        all: Mutex<Vec<String>>,
        most_at_once: Mutex<u32>,
    }

    impl CaseRunner for RecordingRunner {
        fn run(&self, case: &Case) -> CaseOutcome {
            let device = case.device.to_string();
            let at_once = {
                let mut busy = self.busy.lock().unwrap();
                *busy.entry(device.clone()).or_default() += 1;
                assert_eq!(busy[&device], 1, "two cases on {device}");
                busy.values().sum()
            };
            let most = { *self.most_at_once.lock().unwrap() }.max(at_once);
            *self.most_at_once.lock().unwrap() = most;
            thread::sleep(Duration::from_millis(5));
            *self.busy.lock().unwrap().entry(device.clone()).or_default() -= 1;
            self.all.lock().unwrap().push(device);
            CaseOutcome::failed(&case.label, "")
        }
    }

    fn real_case(workload: &str, timed: bool) -> Case {
        let case = test_case(workload, "null");
        Case { device: "cuda".parse().unwrap(), timed, ..case }
    }

    #[test]
    fn each_device_runs_one_case_at_a_time() {
        let devices: Vec<DeviceSpec> = (0..4).map(|number| format!("cuda:{number}").parse().unwrap()).collect();
        let cases: Vec<Case> = (0..40).map(|number| real_case("checkerboard", number % 2 == 0)).collect();
        let (runner, mut seen) = (RecordingRunner::default(), Vec::new());
        run_on(&devices, &cases, &runner, &AtomicBool::new(false), |progress| {
            if let CaseProgress::Finished(_, outcome) = progress {
                seen.push(outcome.detail.ran_on.unwrap());
            }
        });
        let mut all = runner.all.into_inner().unwrap();
        assert_eq!(all.len(), 40);
        all.sort();
        seen.sort();
        assert_eq!(seen, all, "the device of every case is noted");
        all.dedup();
        assert_eq!(all, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]);
    }

    /// Notes which case it was given; the time of a pass is the number of the call.
    #[derive(Default)]
    struct Stopwatch {
        calls: Mutex<Vec<String>>,
        fails: Option<&'static str>,
    }

    impl CaseRunner for Stopwatch {
        fn run(&self, case: &Case) -> CaseOutcome {
            assert_eq!(case.scope, CaseScope::Round);
            let mut calls = self.calls.lock().unwrap();
            calls.push(case.label.strategy.clone());
            if self.fails == Some(case.label.strategy.as_str()) {
                return CaseOutcome::failed(&case.label, "it broke");
            }
            let record = CaseRecord::unmeasured(&case.label, Status::Completed, "");
            let pass = calls.len().to_string();
            let timing = TimingRecord { rounds: Some(1), round_ns: pass.clone(), pass_ns: pass, ..Default::default() };
            CaseOutcome { record, timings: vec![timing], ..CaseOutcome::failed(&case.label, "") }
        }
    }

    #[test]
    fn rounds_interleave_cases() {
        let runner = Stopwatch::default();
        let cases: Vec<Case> =
            ["null", "direct", "caching"].map(|strategy| test_case("checkerboard", strategy)).to_vec();
        let mut announced = 0;
        let times = time_in_rounds(&cases, &runner, 4, &AtomicBool::new(false), |_, _| announced += 1);
        assert_eq!((times.len(), announced), (3, 12));
        for row in &times {
            let [record] = &row.as_ref().unwrap().as_ref().unwrap()[..] else { panic!("{row:?}") };
            assert_eq!((record.rounds, record.rounds_ns().len()), (Some(4), 4));
        }
        let calls = runner.calls.into_inner().unwrap();
        let rounds: Vec<&[String]> = calls.chunks(3).collect();
        assert!(rounds.iter().any(|order| *order != rounds[0]), "{rounds:?}");
        for round in rounds {
            let mut round = round.to_vec();
            round.sort();
            assert_eq!(round, ["caching", "direct", "null"]);
        }
    }

    #[test]
    fn failed_and_stopped_rounds_have_no_times() {
        let runner = Stopwatch { fails: Some("direct"), ..Stopwatch::default() };
        let cases: Vec<Case> = ["null", "direct"].map(|strategy| test_case("checkerboard", strategy)).to_vec();
        let times = time_in_rounds(&cases, &runner, 5, &AtomicBool::new(false), |_, _| {});
        assert_eq!(times[1].as_ref().unwrap().as_ref().unwrap_err(), "it broke");
        assert!(times[0].as_ref().unwrap().is_ok());
        let tried = runner.calls.lock().unwrap().iter().filter(|strategy| *strategy == "direct").count();
        assert_eq!(tried, 1, "a case that failed is not timed again");
        let stopped = time_in_rounds(&cases, &runner, 5, &AtomicBool::new(true), |_, _| {});
        assert!(stopped.iter().all(Option::is_none));
    }

    #[test]
    fn simulated_timed_cases_run_alone() {
        let fleet: DeviceFleet = "4xsim".parse().unwrap();
        let cases = vec![Case { timed: true, ..test_case("checkerboard", "null") }; 6];
        let runner = RecordingRunner::default();
        run_on(fleet.members(), &cases, &runner, &AtomicBool::new(false), |_| {});
        assert_eq!(runner.most_at_once.into_inner().unwrap(), 1);
    }

    #[test]
    fn several_devices_give_the_same_rows() {
        let cases: Vec<Case> = ["checkerboard", "random", "variable-length"]
            .iter()
            .flat_map(|workload| ["direct", "caching"].map(|strategy| test_case(workload, strategy)))
            .collect();
        let rows_of = |devices: &[DeviceSpec]| {
            let mut rows = Vec::new();
            run_on(devices, &cases, &InProcess::default(), &AtomicBool::new(false), |progress| {
                if let CaseProgress::Finished(_, outcome) = progress {
                    rows.push((outcome.record.case_id.clone(), outcome));
                }
            });
            rows.sort_by(|one, other| one.0.cmp(&other.0));
            rows
        };
        let four: DeviceFleet = "4xsim".parse().unwrap();
        assert!(rows_of(four.members()) == rows_of(&four.members()[..1]));
    }

    #[test]
    fn no_case_starts_after_a_stop() {
        let fleet: DeviceFleet = "2xsim".parse().unwrap();
        let runner = RecordingRunner::default();
        run_on(fleet.members(), &[test_case("checkerboard", "null")], &runner, &AtomicBool::new(true), |_| {});
        assert!(runner.all.into_inner().unwrap().is_empty());
    }

    #[test]
    fn isolation_depends_on_device_plugin_and_timeout() {
        let plain = test_case("checkerboard", "null");
        let mut impatient = plain.clone();
        impatient.timeout = Some("1s".parse().unwrap());
        let mut real = plain.clone();
        real.device = "cuda".parse().unwrap();
        let foreign = Case { strategy: "plugin:./any.so".into(), ..plain.clone() };
        let isolated =
            |isolation: Isolation| [&plain, &impatient, &real, &foreign].map(|case| isolation.isolates(case));
        assert_eq!(isolated(Isolation::Auto), [false, true, true, true]);
        assert_eq!(isolated(Isolation::Always), [true; 4]);
        assert_eq!(isolated(Isolation::Never), [false; 4]);
    }

    /// Counts how often a source is read.
    struct Counted(Arc<dyn Source>, AtomicUsize);

    impl Source for Counted {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn initial_layout(&self) -> Option<InitialLayout> {
            self.0.initial_layout()
        }

        fn placements(&self) -> Arc<[PlacementCall]> {
            self.0.placements()
        }

        fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.open()
        }
    }

    #[test]
    fn needs_are_computed_once_per_source() {
        let mut first = test_case("training", "caching");
        let source = Arc::new(Counted(first.source, AtomicUsize::new(0)));
        first.source = source.clone();
        let second = Case { strategy: "direct".into(), ..first.clone() };
        let here = InProcess::default();
        let runner = WithNeeds::new(&here, Some(PackingBudget::QUICK));
        for case in [&first, &second, &first] {
            let record = runner.run(case).record;
            let steps = [
                record.live_peak_bytes.unwrap(),
                record.live_peak_rounded_bytes.unwrap(),
                record.packed_bytes.unwrap(),
                record.peak_reserved_bytes.unwrap(),
                record.peak_device_used_bytes.unwrap(),
            ];
            assert!(steps.is_sorted(), "{steps:?}");
            assert_eq!(record.live_peak_bytes, record.peak_requested_bytes);
        }
        assert_eq!(source.1.load(Ordering::Relaxed), 3 + 2, "three runs, one bound, one packing");
    }

    #[test]
    fn interrupted_case_is_not_read_again() {
        let stop = AtomicBool::new(true);
        let mut case = test_case("checkerboard", "caching");
        let source = Arc::new(Counted(case.source, AtomicUsize::new(0)));
        case.source = source.clone();
        let here = InProcess { stop: Some(&stop) };
        let record = WithNeeds::new(&here, None).run(&case).record;
        assert_eq!((record.status, record.live_peak_bytes), (Status::Interrupted, None));
        assert_eq!(source.1.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn no_packing_without_a_budget() {
        let here = InProcess::default();
        let record = WithNeeds::new(&here, None).run(&test_case("checkerboard", "caching")).record;
        assert!(record.live_peak_rounded_bytes.is_some());
        assert_eq!(record.packed_bytes, None);
    }
}

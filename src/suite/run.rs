//! Runs cases: side by side where only simulated time counts, alone where the wall clock does.

use std::{
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use serde::{Deserialize, Serialize};

use super::Case;
use crate::{
    device::DeviceSpec,
    measure::{CaseDetail, CaseLabel, CaseRecord, TimingRecord},
};

/// As many jobs as the machine has cores.
#[must_use]
pub fn all_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What a case leaves behind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseOutcome {
    /// Its row.
    pub record: CaseRecord,
    /// What is too large for a row.
    pub detail: CaseDetail,
    /// Wall-clock times, if the case is a timed one: of one thread, then of each number of threads asked for.
    pub timings: Vec<TimingRecord>,
}

impl CaseOutcome {
    /// Of a case that broke before anything could be measured.
    pub(super) fn failed(label: &CaseLabel, reason: &str) -> CaseOutcome {
        CaseOutcome {
            record: CaseRecord::failed(label, reason),
            detail: CaseDetail::unmeasured(label),
            timings: Vec::new(),
        }
    }
}

/// Turns a case into its outcome: in this process, or whole in a worker process.
pub trait CaseRunner: Sync {
    /// Runs one case to its end. Whatever goes wrong is in the record.
    fn run(&self, case: &Case) -> CaseOutcome;
}

/// What happens while cases run.
pub enum CaseProgress<'a> {
    /// A case begins.
    Started(&'a Case),
    /// A case has ended.
    Finished(&'a Case, Box<CaseOutcome>),
}

/// Runs `cases` on `jobs` threads; the timed ones, and those on a real device, afterwards and alone. Once `stop` is set
/// no further case begins; those that run are finished. The listener is called on this thread, in order of completion.
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

/// Runs `cases` on all of `devices`, each of which has one case at a time. Cases timed on a simulated device share the
/// cores of this machine, and so run afterwards and alone.
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

/// Each lane takes the next case when it has done one, on the case's own device or on that of the lane.
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
                    // The listener outlives the workers, so a send cannot fail.
                    let _ = sender.send((case, None));
                    let outcome = match device {
                        None => runner.run(case),
                        Some(device) => run_there(case, runner, device),
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

/// The case on one of several like devices. Which one is told beside the row, because the row must not depend on it;
/// simulated ones cannot be told apart.
fn run_there(case: &Case, runner: &dyn CaseRunner, device: &DeviceSpec) -> CaseOutcome {
    let mut outcome = runner.run(&Case { device: device.clone(), ..case.clone() });
    outcome.detail.ran_on = (!device.is_simulated()).then(|| device.to_string());
    outcome
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Mutex, time::Duration};

    use super::*;
    use crate::{
        device::Fleet,
        suite::{InProcess, test_case},
    };

    /// Notes which device each case was given, and how many cases a device had at once.
    #[derive(Default)]
    struct Watching {
        busy: Mutex<BTreeMap<String, u32>>,
        all: Mutex<Vec<String>>,
        most_at_once: Mutex<u32>,
    }

    impl CaseRunner for Watching {
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
    fn every_device_takes_cases_and_has_one_at_a_time() {
        let devices: Vec<DeviceSpec> = (0..4).map(|number| format!("cuda:{number}").parse().unwrap()).collect();
        let cases: Vec<Case> = (0..40).map(|number| real_case("checkerboard", number % 2 == 0)).collect();
        let (watching, mut told) = (Watching::default(), Vec::new());
        run_on(&devices, &cases, &watching, &AtomicBool::new(false), |progress| {
            if let CaseProgress::Finished(_, outcome) = progress {
                told.push(outcome.detail.ran_on.unwrap());
            }
        });
        let mut all = watching.all.into_inner().unwrap();
        assert_eq!(all.len(), 40);
        all.sort();
        told.sort();
        assert_eq!(told, all, "where a case ran is told");
        all.dedup();
        assert_eq!(all, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]);
    }

    #[test]
    fn cases_timed_on_simulated_devices_do_not_share_the_cores() {
        let fleet: Fleet = "4xsim".parse().unwrap();
        let cases = vec![Case { timed: true, ..test_case("checkerboard", "null") }; 6];
        let watching = Watching::default();
        run_on(fleet.members(), &cases, &watching, &AtomicBool::new(false), |_| {});
        assert_eq!(watching.most_at_once.into_inner().unwrap(), 1);
    }

    #[test]
    fn several_devices_give_the_rows_of_one() {
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
        let four: Fleet = "4xsim".parse().unwrap();
        assert!(rows_of(four.members()) == rows_of(&four.members()[..1]));
    }

    #[test]
    fn no_case_begins_once_it_is_stopped() {
        let fleet: Fleet = "2xsim".parse().unwrap();
        let watching = Watching::default();
        run_on(fleet.members(), &[test_case("checkerboard", "null")], &watching, &AtomicBool::new(true), |_| {});
        assert!(watching.all.into_inner().unwrap().is_empty());
    }
}

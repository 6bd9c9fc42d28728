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
use crate::measure::{CaseDetail, CaseLabel, CaseRecord, TimingRecord};

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
pub enum Progress<'a> {
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
    mut listener: impl FnMut(Progress<'_>),
) {
    let (alone, free): (Vec<&Case>, Vec<&Case>) =
        cases.iter().partition(|case| case.timed || !case.device.is_simulated());
    for (cases, jobs) in [(free, jobs), (alone, 1)] {
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            for _ in 0..jobs.clamp(1, cases.len().max(1)) {
                let (sender, cases, next) = (sender.clone(), &cases, &next);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                        // The listener outlives the workers, so a send cannot fail.
                        let _ = sender.send((case, None));
                        let _ = sender.send((case, Some(runner.run(case))));
                    }
                });
            }
            drop(sender);
            for (case, outcome) in receiver {
                listener(match outcome {
                    None => Progress::Started(case),
                    Some(outcome) => Progress::Finished(case, Box::new(outcome)),
                });
            }
        });
    }
}

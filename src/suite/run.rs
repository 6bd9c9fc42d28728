//! Runs cases: side by side where only simulated time counts, alone where the wall clock does.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use super::Case;
use crate::{
    device::{Device, DeviceSpecError, default_limit, wrap::Limited},
    measure::{self, CaseDetail, CaseRecord, Fresh, Status, TimingRecord},
    replay::{self, ReplayError},
    strategy::{Setup, SpecError},
    trace::{Trace, TraceError},
};

/// As many jobs as the machine has cores.
#[must_use]
pub fn all_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What a case leaves behind.
#[derive(Clone, Debug)]
pub struct CaseOutcome {
    /// Its row.
    pub record: CaseRecord,
    /// What is too large for a row.
    pub detail: CaseDetail,
    /// Wall-clock times, if the case is a timed one.
    pub timing: Option<TimingRecord>,
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

/// Runs `cases` on `jobs` threads; the timed ones, and those on a real device, afterwards and alone. Once `stop` is set no further case begins; those
/// that run are finished. The listener is called on this thread, in order of completion.
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

/// Runs a case in this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess<'a> {
    /// Set from outside to end the running case itself, for runs whose cases are not worth waiting for.
    pub stop: Option<&'a AtomicBool>,
}

impl CaseRunner for InProcess<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        // A panic is a bug of ours, but it must cost one case and not the run.
        catch_unwind(AssertUnwindSafe(|| run_here(case, self.stop)))
            .unwrap_or_else(|panic| failed(case, &in_words(&*panic)))
    }
}

/// What a panic said.
pub(super) fn in_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("internal error: {}", text.unwrap_or("unknown panic"))
}

/// How often a timed case runs unwatched; the median counts.
const TIMED_PASSES: u32 = 5;

/// Why a case could not be run at all.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum Trouble {
    Device(#[from] DeviceSpecError),
    Strategy(#[from] SpecError),
    Trace(#[from] TraceError),
    Replay(#[from] ReplayError),
}

fn run_here(case: &Case, stop: Option<&AtomicBool>) -> CaseOutcome {
    try_run(case, stop).unwrap_or_else(|trouble| failed(case, &trouble.to_string()))
}

fn try_run(case: &Case, stop: Option<&AtomicBool>) -> Result<CaseOutcome, Trouble> {
    let options =
        replay::Options { on_out_of_memory: case.on_out_of_memory, pace: case.pace, repeat: case.label.repeat, stop };
    let (mut strategy, mut device) = prepare(case)?;
    let (record, detail) = measure::measure(&case.label, &*case.source, &mut *strategy, &mut *device, &options);
    let timing = if case.timed && matches!(record.status, Status::Completed | Status::Oom) {
        // In memory, so that generating or parsing is not what is timed.
        let trace = Trace::read(&*case.source)?;
        Some(measure::time(&case.label, &trace, || prepare(case), &options, TIMED_PASSES)?)
    } else {
        None
    };
    Ok(CaseOutcome { record, detail, timing })
}

/// A fresh strategy over a fresh device.
fn prepare(case: &Case) -> Result<Fresh, Trouble> {
    let device = case.device.open()?;
    let cap = case.label.limit.or_else(|| default_limit(&*device));
    let device = capped(device, cap);
    let setup = Setup { props: device.props(), limit: case.label.limit };
    let strategy = case.strategy.build(&setup)?;
    Ok((strategy, device))
}

/// The device, which hands out at most so much.
pub(super) fn capped(device: Box<dyn Device>, cap: Option<u64>) -> Box<dyn Device> {
    match cap {
        Some(cap) => Box::new(Limited::to(cap, device)),
        None => device,
    }
}

fn failed(case: &Case, reason: &str) -> CaseOutcome {
    CaseOutcome {
        record: CaseRecord::failed(&case.label, reason),
        detail: CaseDetail::unmeasured(&case.label),
        timing: None,
    }
}

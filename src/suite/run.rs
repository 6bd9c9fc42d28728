//! Runs cases: side by side where only simulated time counts, alone where the wall clock does.

use std::{
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
    /// Wall-clock times, if the case is a timed one: of one thread, then of each number of threads asked for.
    pub timings: Vec<TimingRecord>,
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
        catch_unwind(AssertUnwindSafe(|| run_here(case, self.stop))).unwrap_or_else(|panic| {
            let words = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "unknown panic".to_owned());
            failed(case, &format!("internal error: {words}"))
        })
    }
}

/// How often a timed case runs unwatched; the median counts.
const TIMED_PASSES: u32 = 5;

/// Why a case could not be run at all.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum Trouble {
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
    let timings = if case.timed && matches!(record.status, Status::Completed | Status::Oom) {
        time(case, &options)?
    } else {
        Vec::new()
    };
    Ok(CaseOutcome { record, detail, timings })
}

/// From memory, so that generating or parsing is not what is timed.
fn time(case: &Case, options: &replay::Options<'_>) -> Result<Vec<TimingRecord>, Trouble> {
    let trace = Trace::read(&*case.source)?;
    let mut timings = vec![measure::time(&case.label, &trace, || prepare(case), options, TIMED_PASSES)?];
    let copies = measure::copies_for_threads(&case.copies)?;
    for &threads in &case.threads {
        let copies = &copies[..copies.len().min(threads.into())];
        timings.push(measure::time_threads(&case.label, copies, || prepare(case), options, TIMED_PASSES)?);
    }
    Ok(timings)
}

/// A fresh strategy over a fresh device.
fn prepare(case: &Case) -> Result<Fresh, Trouble> {
    let device = case.device.open()?;
    let device: Box<dyn Device> = match case.label.limit.or_else(|| default_limit(&*device)) {
        Some(limit) => Box::new(Limited::to(limit, device)),
        None => device,
    };
    let setup = Setup { props: device.props(), limit: case.label.limit };
    let strategy = case.strategy.build(&setup)?;
    Ok((strategy, device))
}

fn failed(case: &Case, reason: &str) -> CaseOutcome {
    CaseOutcome {
        record: CaseRecord::failed(&case.label, reason),
        detail: CaseDetail::unmeasured(&case.label),
        timings: Vec::new(),
    }
}

//! Runs a case in this process, which is a worker's whole business too.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::AtomicBool},
};

use super::{Case, CaseOutcome, CaseRunner, SourceError};
use crate::{
    measure::{self, CaseDetail, CaseRecord, Status, TimingRecord},
    replay::{OpenedAllocator, Replay, ReplayError, ReplayOptions},
    trace::{Source, Trace, TraceError},
};

/// Runs a case in this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess<'a> {
    /// Set from outside to end the running case itself, for runs whose cases are not worth waiting for.
    pub stop: Option<&'a AtomicBool>,
}

impl CaseRunner for InProcess<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        // A panic is a bug of ours, but it must cost one case and not the run. On its way here it drops the device, which
        // gives everything back.
        let attempt = catch_unwind(AssertUnwindSafe(|| try_run(case, self.stop)));
        match attempt {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(trouble)) => CaseOutcome::failed(&case.label, &trouble.to_string()),
            Err(panic) => CaseOutcome::failed(&case.label, &in_words(&*panic)),
        }
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
    Source(#[from] SourceError),
    Trace(#[from] TraceError),
    Replay(#[from] ReplayError),
}

fn try_run(case: &Case, stop: Option<&AtomicBool>) -> Result<CaseOutcome, Trouble> {
    let replay = replay_of(case, stop);
    let (record, detail) = measure_once(case, &replay)?;
    let timings = if case.timed && matches!(record.status, Status::Completed | Status::Oom) {
        time(case, &replay)?
    } else {
        Vec::new()
    };
    Ok(CaseOutcome { record, detail, timings })
}

fn replay_of<'a>(case: &'a Case, stop: Option<&'a AtomicBool>) -> Replay<'a> {
    let options = ReplayOptions {
        on_out_of_memory: case.on_out_of_memory,
        pace: case.pace,
        without_work: case.without_work,
        repeat: case.label.repeat,
        resumes: true,
        stop,
        ..ReplayOptions::default()
    };
    Replay::new(&*case.source)
        .strategy(case.strategy.clone())
        .device(case.device.clone())
        .limit(case.label.limit)
        .options(options)
}

/// From memory, so that generating or parsing is not what is timed. Every thread has its own copy of the story: a
/// workload's differ by their seeds, a trace file's do not. Copies share the strategy, and the memory that was there
/// before a recording was there once: each asks for its blocks anew.
fn time(case: &Case, replay: &Replay<'_>) -> Result<Vec<TimingRecord>, Trouble> {
    let source = in_memory(&case.source)?;
    let mut timings = vec![measure::time(&case.label, &*source, || replay.open(), &replay.options, TIMED_PASSES)?];
    let most = case.threads.iter().copied().max().unwrap_or(0);
    let copies = (0..most).map(|thread| case.origin.copy_for(thread)).collect::<Result<Vec<_>, _>>()?;
    let copies = measure::copies_for_threads(&copies)?;
    for &threads in &case.threads {
        let copies = &copies[..copies.len().min(threads.into())];
        timings.push(measure::time_threads(&case.label, copies, || replay.open(), &replay.options, TIMED_PASSES)?);
    }
    Ok(timings)
}

/// The source in memory, so that timings exclude generating or parsing it. A recording that begins in the middle stays
/// as it is: it is in memory, and a trace has no initial layout.
fn in_memory(source: &Arc<dyn Source>) -> Result<Arc<dyn Source>, TraceError> {
    Ok(if source.initial_layout().is_some() { Arc::clone(source) } else { Arc::new(Trace::read(&**source)?) })
}

/// Measures on a device of its own, which is closed afterwards: what it holds must not be missing from the timed passes.
fn measure_once(case: &Case, replay: &Replay<'_>) -> Result<(CaseRecord, CaseDetail), Trouble> {
    Ok(measure_opened(case, replay.open()?, &replay.options))
}

/// Measures a case, and says so where the device had less to give than its limit allows.
fn measure_opened(case: &Case, opened: OpenedAllocator, options: &ReplayOptions<'_>) -> (CaseRecord, CaseDetail) {
    let OpenedAllocator { mut strategy, mut device, limit } = opened;
    let (mut record, detail) = measure::measure(&case.label, &*case.source, &mut *strategy, &mut *device, options);
    if let (Status::Oom, Some(limit), Some(first)) = (record.status, limit, detail.ooms.first())
        && let Some(words) = first.short_of_limit(limit, device.props().page_bytes)
    {
        record.reason = words;
    }
    (record, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{GIB, NoProgress},
        device::{
            CallKind, Device,
            wrap::{CallFailure, FaultPlan, FaultyDevice},
        },
        suite::test_case,
        trace::torch::Snapshot,
    };

    /// Runs a case on a simulated device whose driver calls fail as planned, below a limit.
    fn run_with(plan: FaultPlan, strategy: &str, limit: u64) -> CaseRecord {
        let case = test_case("random", strategy);
        let device: Box<dyn Device> = Box::new(FaultyDevice::with(plan, case.device.open().unwrap()));
        let opened = replay_of(&case, None).limit(limit).open_on(device).unwrap();
        measure_opened(&case, opened, &ReplayOptions::default()).0
    }

    #[test]
    fn memory_that_others_take_mid_run_is_an_oom_that_says_so() {
        for (strategy, kind) in [
            ("direct", CallKind::MemAlloc),
            ("caching", CallKind::MemAlloc),
            ("caching:expandable_segments:True", CallKind::MemCreate),
        ] {
            let plan = FaultPlan::none().fail_from(Some(kind), 40, CallFailure::OutOfMemory);
            let record = run_with(plan, strategy, 60 * GIB);
            assert_eq!(record.status, Status::Oom, "{strategy}: {}", record.reason);
            for words in ["the device refused ", " held and ", " free: it has less than the limit of 60.0 GiB"] {
                assert!(record.reason.contains(words), "{strategy}: {}", record.reason);
            }
        }
    }

    #[test]
    fn a_limit_that_is_reached_needs_no_remark() {
        for strategy in ["direct", "caching", "caching:expandable_segments:True"] {
            let record = run_with(FaultPlan::none(), strategy, GIB);
            assert_eq!((record.status, record.reason.as_str()), (Status::Oom, ""), "{strategy}");
        }
    }

    #[test]
    fn the_first_error_of_a_lost_context_is_the_one_that_is_told() {
        for strategy in ["direct", "caching", "caching:expandable_segments:True", "async"] {
            let lost = CallFailure::Driver("CUDA_ERROR_ILLEGAL_ADDRESS");
            let record = run_with(FaultPlan::none().fail_from(None, 50, lost), strategy, 60 * GIB);
            assert_eq!(record.status, Status::Error, "{strategy}");
            assert!(record.reason.starts_with("event "), "{strategy}: {}", record.reason);
            let words = ": CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost";
            assert!(record.reason.ends_with(words), "{strategy}: {}", record.reason);
            assert_eq!(record.reason.matches(words).count(), 1, "{strategy}: {}", record.reason);
        }
    }

    #[test]
    fn an_error_that_passes_is_told_with_what_closing_says() {
        let passing = CallFailure::Driver("CUDA_ERROR_NOT_PERMITTED");
        let record = run_with(FaultPlan::none().fail_from(None, 50, passing), "direct", 60 * GIB);
        assert!(record.reason.contains("; closing the strategy failed: "), "{}", record.reason);
    }

    #[test]
    fn what_is_timed_begins_where_what_is_measured_does() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.exp.pickle.xz");
        let mut late = Snapshot::open(path, &NoProgress).unwrap();
        late.traces[0].drain(..1000);
        let late: Arc<dyn Source> = Arc::new(late.into_recording("late", None, &NoProgress).unwrap());
        assert!(in_memory(&late).unwrap().initial_layout().is_some());
        let generated = in_memory(&test_case("random", "direct").source).unwrap();
        assert!(generated.info().events.is_some_and(|events| events > 0), "it is a story in memory");
    }
}

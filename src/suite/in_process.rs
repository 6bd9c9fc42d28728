//! Runs a case in this process, or compares its device with a simulated one.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::AtomicBool},
};

use super::{Case, CaseOutcome, CaseRunner, CaseScope, SourceError};
use crate::{
    base::Nanos,
    device::{DeviceProps, DeviceSpec, default_limit, wrap::capped},
    measure::{
        self, AgreementRecord, CaseDetail, CaseRecord, PassBudget, PassTurn, Status, ThreadSharing, TimingRecord,
        agreement::{AgreementFinding, AgreementSetup},
    },
    plugin,
    replay::{OpenedAllocator, Replay, ReplayError, ReplayOptions},
    strategy::{Built, Setup},
    trace::{Source, Trace, TraceError},
};

/// The passes of a timed case in one process. Short ones are repeated for a fiftieth of a second.
const TIMED_PASSES: PassBudget = PassBudget { least: 5, most: 40, enough: Nanos(20_000_000) };

/// Runs a case in this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess<'a> {
    /// Set from outside to end the running case early.
    pub stop: Option<&'a AtomicBool>,
}

impl CaseRunner for InProcess<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        // A panic is a bug in oomph, but it must fail only one case. Unwinding drops the device,
        // which frees everything.
        let attempt = catch_unwind(AssertUnwindSafe(|| try_run(case, self.stop)));
        match attempt {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => CaseOutcome::failed(&case.label, &error.to_string()),
            Err(panic) => CaseOutcome::failed(&case.label, &panic_reason(&*panic)),
        }
    }
}

/// The message of a panic.
fn panic_reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("internal error: {}", text.unwrap_or("unknown panic"))
}

/// Why a case could not run.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum CaseError {
    Source(#[from] SourceError),
    Trace(#[from] TraceError),
    Replay(#[from] ReplayError),
    #[error(
        "a plugin is one library with one state: sharing = \"own\" can call it from several threads only on a GPU \
         (--device cuda)"
    )]
    OnePlugin,
}

/// Refuses to load a plugin once for each thread on simulated devices: its CUDA calls are served by one of them.
fn check_sharing(case: &Case) -> Result<(), CaseError> {
    let separate = case.sharing == ThreadSharing::Own && plugin::is_plugin(&case.strategy);
    if separate && case.device.is_simulated() { Err(CaseError::OnePlugin) } else { Ok(()) }
}

fn try_run(case: &Case, stop: Option<&AtomicBool>) -> Result<CaseOutcome, CaseError> {
    let replay = case.replay(stop);
    if case.scope == CaseScope::Round {
        let record = CaseRecord::unmeasured(&case.label, Status::Completed, "");
        let timings = time(case, &replay)?;
        return Ok(CaseOutcome { record, detail: CaseDetail::unmeasured(&case.label), timings, worker_failed: false });
    }
    case.device.wait_for_cleared_memory().map_err(ReplayError::from)?;
    // Its device is closed before the timed passes, so that they have its memory.
    let (record, detail) = measure_opened(case, replay.open()?, &replay.options);
    let timings = if case.timed && matches!(record.status, Status::Completed | Status::Oom) {
        time(case, &replay)?
    } else {
        Vec::new()
    };
    Ok(CaseOutcome { record, detail, timings, worker_failed: false })
}

/// Times the case with the source in memory. Every thread plays its own copy: those of a workload
/// differ by their seeds, those of a trace file do not. Copies share the strategy, and each
/// requests the blocks of an initial layout itself.
fn time(case: &Case, replay: &Replay<'_>) -> Result<Vec<TimingRecord>, CaseError> {
    check_sharing(case)?;
    let source = in_memory(&case.source)?;
    let mut timings = vec![measure::time(&case.label, &*source, || replay.open(), &replay.options, TIMED_PASSES)?];
    let most = case.threads.iter().copied().max().unwrap_or(0);
    let copies = (0..most).map(|thread| case.origin.copy_for(thread)).collect::<Result<Vec<_>, _>>()?;
    let copies = measure::copies_for_threads(&copies)?;
    for &threads in &case.threads {
        let copies = &copies[..copies.len().min(threads.into())];
        timings.push(measure::time_threads(
            &case.label,
            copies,
            case.sharing,
            || replay.open(),
            &replay.options,
            TIMED_PASSES,
        )?);
    }
    Ok(timings)
}

/// Times a case pass by pass, whenever it is its turn. Returns why it could not.
pub(super) fn time_in_turns(case: &Case, stop: &AtomicBool, turn: PassTurn<'_>) -> Result<(), String> {
    let replay = case.replay(Some(stop));
    let mut timed = || -> Result<(), CaseError> {
        check_sharing(case)?;
        match case.threads[..] {
            [threads] => {
                let copies = (0..threads).map(|thread| case.origin.copy_for(thread)).collect::<Result<Vec<_>, _>>()?;
                let copies = measure::copies_for_threads(&copies)?;
                measure::time_threads_in_turns(&copies, case.sharing, || replay.open(), &replay.options, turn)?;
            }
            _ => measure::time_in_turns(&*in_memory(&case.source)?, || replay.open(), &replay.options, turn)?,
        }
        Ok(())
    };
    timed().map_err(|error| error.to_string())
}

/// The source in memory, so that timings exclude generating or parsing it. A recording that begins
/// in the middle stays as it is: it is in memory, and a trace has no initial layout.
fn in_memory(source: &Arc<dyn Source>) -> Result<Arc<dyn Source>, TraceError> {
    Ok(if source.initial_layout().is_some() { Arc::clone(source) } else { Arc::new(Trace::read(&**source)?) })
}

fn measure_opened(case: &Case, opened: OpenedAllocator, options: &ReplayOptions<'_>) -> (CaseRecord, CaseDetail) {
    measure::measure_opened(&case.label, &*case.source, opened, options, case.most_lives)
}

/// Compares a case's device with a simulated one under the same limit: on its device, on that
/// device's recorded answers, and on the simulated device. Errors are part of the record. The
/// case's settings for failing requests and for timing are not used.
///
/// ```
/// use std::sync::atomic::AtomicBool;
/// use oomph::measure::agreement::AgreementFinding;
/// use oomph::suite::{CaseSettings, SuiteFile, compare};
/// let device: oomph::device::DeviceSpec = "sim:80GiB".parse()?;
/// let settings = CaseSettings { device: device.clone(), limit: None, seed: None, timeout: None };
/// let cases = SuiteFile::load("quick")?.cases(&settings)?;
/// let record = compare(&cases[0], &device, &AtomicBool::new(false));
/// assert_eq!((record.finding, record.events_agreed_share), (AgreementFinding::Agrees, Some(1.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn compare(case: &Case, simulated: &DeviceSpec, stop: &AtomicBool) -> AgreementRecord {
    let simulated_device = simulated.to_string();
    let failed =
        |reason: &str| AgreementRecord::unmeasured(&case.label, &simulated_device, AgreementFinding::Failed, reason);
    // A panic is a bug in oomph, but it must fail only one case.
    catch_unwind(AssertUnwindSafe(|| {
        let setup = agreement_setup(case, simulated).map_err(|error| error.to_string())?;
        let options = ReplayOptions {
            pace: case.pace,
            without_work: case.without_work,
            repeat: case.label.repeat,
            stop: Some(stop),
            ..ReplayOptions::default()
        };
        Ok(AgreementRecord::measure(&case.label, &simulated_device, &*case.source, setup, &options))
    }))
    .unwrap_or_else(|panic| Err(panic_reason(&*panic)))
    .unwrap_or_else(|reason| failed(&reason))
}

/// The device and the simulated one with the same limit, and three strategies for the three runs.
fn agreement_setup(case: &Case, simulated: &DeviceSpec) -> Result<AgreementSetup, ReplayError> {
    let (device, simulated) = (case.device.open()?, simulated.open()?);
    let limit = case.label.limit;
    let build = |props: &DeviceProps| -> Built { case.strategy.build(&Setup { props, limit }) };
    let strategies = [build(device.props())?, build(device.props())?, build(simulated.props())?];
    let cap = limit.or_else(|| default_limit(&*device));
    Ok(AgreementSetup { device: capped(device, cap), simulated: capped(simulated, cap), strategies })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{GIB, NoProgress},
        device::{
            CallKind, Device,
            wrap::{CallFailure, FaultPlan, FaultSpec, FaultyDevice},
        },
        suite::test_case,
        trace::torch::Snapshot,
    };

    /// A plan under which a call fails, and all later ones.
    fn fail_from(kind: Option<CallKind>, first: u64, failure: CallFailure) -> FaultPlan {
        FaultPlan::none().with(FaultSpec::Calls { kind, first, count: std::num::NonZeroU64::MAX, failure })
    }

    /// Runs a case on a simulated device whose driver calls fail as planned, below a limit.
    fn run_with(plan: FaultPlan, strategy: &str, limit: u64) -> CaseRecord {
        let case = test_case("random", strategy);
        let device: Box<dyn Device> = Box::new(FaultyDevice::with(plan, case.device.open().unwrap()));
        let opened = case.replay(None).limit(limit).open_on(device).unwrap();
        measure_opened(&case, opened, &ReplayOptions::default()).0
    }

    #[test]
    fn less_memory_than_the_limit_is_reported() {
        for (strategy, kind) in [
            ("direct", CallKind::MemAlloc),
            ("caching", CallKind::MemAlloc),
            ("caching:expandable_segments:True", CallKind::MemCreate),
        ] {
            let plan = fail_from(Some(kind), 40, CallFailure::OutOfMemory);
            let record = run_with(plan, strategy, 60 * GIB);
            assert_eq!(record.status, Status::Oom, "{strategy}: {}", record.reason);
            for words in ["the device refused ", " held and ", " free: it has less than the limit of 60.0 GiB"] {
                assert!(record.reason.contains(words), "{strategy}: {}", record.reason);
            }
        }
    }

    #[test]
    fn reached_limit_has_no_reason() {
        for strategy in ["direct", "caching", "caching:expandable_segments:True"] {
            let record = run_with(FaultPlan::none(), strategy, GIB);
            assert_eq!((record.status, record.reason.as_str()), (Status::Oom, ""), "{strategy}");
        }
    }

    #[test]
    fn first_error_of_a_lost_context_is_reported() {
        for strategy in ["direct", "caching", "caching:expandable_segments:True", "async"] {
            let lost = CallFailure::Driver("CUDA_ERROR_ILLEGAL_ADDRESS");
            let record = run_with(fail_from(None, 50, lost), strategy, 60 * GIB);
            assert_eq!(record.status, Status::Error, "{strategy}");
            assert!(record.reason.starts_with("event "), "{strategy}: {}", record.reason);
            let words = ": CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost";
            assert!(record.reason.ends_with(words), "{strategy}: {}", record.reason);
            assert_eq!(record.reason.matches(words).count(), 1, "{strategy}: {}", record.reason);
        }
    }

    #[test]
    fn close_error_is_reported_too() {
        let passing = CallFailure::Driver("CUDA_ERROR_NOT_PERMITTED");
        let record = run_with(fail_from(None, 50, passing), "direct", 60 * GIB);
        assert!(record.reason.contains("; closing the strategy failed: "), "{}", record.reason);
    }

    #[test]
    fn timed_source_keeps_its_initial_layout() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.exp.pickle.xz");
        let mut late = Snapshot::open(path, &NoProgress).unwrap();
        late.traces[0].drain(..1000);
        let late: Arc<dyn Source> = Arc::new(late.into_recording("late", None, &NoProgress).unwrap());
        assert!(in_memory(&late).unwrap().initial_layout().is_some());
        let generated = in_memory(&test_case("random", "direct").source).unwrap();
        assert!(generated.events().is_some_and(|events| events > 0), "it is a trace in memory");
    }
}

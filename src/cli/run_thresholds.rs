//! The cases of `oomph run` that ask for a threshold.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{failure::Failure, output, progress};
use crate::{
    answer::threshold::{CaseSearch, PROBES_AROUND},
    base::NoProgress,
    device::DeviceSpec,
    replay::LimitEnforcer,
    report::{RunFolder, ThresholdFiles},
    suite::{Case, CaseRunner},
    trace::Trace,
};

/// Answers what the folder does not hold yet, one case after the other with all cores, and writes every answer down as
/// soon as it is there.
pub fn run(
    cases: &[Case],
    folder: &RunFolder,
    runner: &dyn CaseRunner,
    jobs: usize,
    stop: &AtomicBool,
) -> Result<ThresholdFiles, Failure> {
    let mut files = ThresholdFiles::open(folder.path())?;
    let done = files.completed_cases();
    let remaining: Vec<&Case> = cases.iter().filter(|case| !done.contains(&case.label.case_id())).collect();
    let bar = progress::of_cases(cases.len(), cases.len() - remaining.len());
    let simulated: DeviceSpec = "sim".parse()?;
    let search = CaseSearch {
        simulated: &simulated,
        runner,
        cap: LimitEnforcer::Allocator,
        around: PROBES_AROUND,
        jobs,
        stop,
        progress: &NoProgress,
    };
    // Cases of one workload follow each other: it is read once.
    let mut last: Option<(&Case, Arc<Trace>)> = None;
    for case in remaining {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        bar.set_message(case.label.case_id());
        let trace = match &last {
            Some((other, trace)) if other.origin == case.origin => Arc::clone(trace),
            _ => Arc::new(Trace::read(&*case.source)?),
        };
        let detail = search.answer(case, &trace);
        if !detail.record.reason.is_empty() {
            output::complain(&format!("{}: {}", detail.record.case_id, detail.record.reason));
        }
        files.append(detail)?;
        last = Some((case, trace));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(files)
}

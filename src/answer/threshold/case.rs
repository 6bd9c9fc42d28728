//! The threshold of a case of a suite: searched on a simulated device, and confirmed on the case's own device if that
//! is a real one.

use super::{Threshold, ThresholdDetail, ThresholdError, ThresholdQuestion, ThresholdRecord, threshold};
use crate::{
    base::Bytes,
    device::DeviceSpec,
    measure::{CaseLabel, Status, on_one_line},
    replay::LimitEnforcer,
    suite::{Case, CaseRunner},
};

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

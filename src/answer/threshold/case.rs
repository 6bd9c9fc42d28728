//! The threshold of a case of a suite: searched on a simulated device, and confirmed on the case's own device if that
//! is a real one.

use std::sync::atomic::AtomicBool;

use super::{ThresholdDetail, ThresholdQuestion, threshold};
use crate::{
    base::{Bytes, Progress},
    device::DeviceSpec,
    measure::{CaseLabel, Status},
    replay::LimitEnforcer,
    suite::{Case, CaseRunner},
    trace::Trace,
};

/// How the cases of a run are searched.
pub struct CaseSearch<'a> {
    /// Where it is searched for cases on a real device; the others bring their own.
    pub simulated: &'a DeviceSpec,
    /// Runs what a real device has to confirm.
    pub runner: &'a dyn CaseRunner,
    /// Who refuses requests beyond the limit.
    pub cap: LimitEnforcer,
    /// How many caps around the threshold are tried.
    pub around: u32,
    /// How many replays run side by side.
    pub jobs: usize,
    /// Set from outside to give up.
    pub stop: &'a AtomicBool,
    /// Reports what is tried, and how far that is.
    pub progress: &'a dyn Progress,
}

impl CaseSearch<'_> {
    /// The threshold of `case`, whose source has been read into `trace`. Whatever goes wrong is in the record.
    #[must_use]
    pub fn answer(&self, case: &Case, trace: &Trace) -> ThresholdDetail {
        let is_real = !case.device.is_simulated();
        let device = if is_real { self.simulated } else { &case.device };
        let question = ThresholdQuestion {
            cap: self.cap,
            repeat: case.label.repeat,
            pace: case.pace,
            around: self.around,
            jobs: self.jobs,
            stop: Some(self.stop),
            progress: self.progress,
            ..ThresholdQuestion::new(trace, &case.strategy, device)
        };
        let answer = threshold(&question);
        let page_bytes = answer.as_ref().map_or(0, |found| found.page_bytes);
        let label = CaseLabel { device: device.to_string(), limit: None, ..case.label.clone() };
        let mut detail = ThresholdDetail::new(&label, self.cap, answer);
        detail.record.case_id = case.label.case_id();
        if let Some(bytes) = detail.record.threshold_bytes.filter(|_| is_real) {
            detail.record.add(&confirm(case, bytes, page_bytes, self.runner));
        }
        detail
    }
}

/// How the two decisive runs ended on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confirmation {
    /// Which device.
    pub device: String,
    /// With a page more than the threshold.
    pub above: Status,
    /// With a page less; `None` where less than a page suffices.
    pub below: Option<Status>,
    /// What is wrong where they did not end as foretold.
    pub reason: Option<String>,
}

impl Confirmation {
    /// Whether they ended as foretold.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.above == Status::Completed && self.below.is_none_or(|below| below == Status::Oom)
    }
}

/// Runs `case` on its own device with a page more than the threshold, which must complete, and with a page less, which
/// must not. The cap is the strategy's limit ([`LimitEnforcer::Allocator`](crate::replay::LimitEnforcer::Allocator)).
pub fn confirm(case: &Case, threshold_bytes: u64, page_bytes: u64, runner: &dyn CaseRunner) -> Confirmation {
    let run = |limit: u64| {
        let label = CaseLabel { limit: Some(limit), ..case.label.clone() };
        let record = runner.run(&Case { label, ..case.clone() }).record;
        (limit, record.status, record.reason)
    };
    let above = run(threshold_bytes.saturating_add(page_bytes));
    let below = threshold_bytes.checked_sub(page_bytes).map(run);
    let miss = |(limit, status, reason): &(u64, Status, String), wanted: Status| {
        (*status != wanted).then(|| {
            let why = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
            format!("{}: {} with {}, {} foretold{why}", case.device, status.name(), Bytes(*limit), wanted.name())
        })
    };
    let misses: Vec<String> = [miss(&above, Status::Completed), below.as_ref().and_then(|run| miss(run, Status::Oom))]
        .into_iter()
        .flatten()
        .collect();
    Confirmation {
        device: case.device.to_string(),
        above: above.1,
        below: below.map(|(_, status, _)| status),
        reason: (!misses.is_empty()).then(|| misses.join("; ")),
    }
}

#[cfg(test)]
mod case_tests {
    use super::*;
    use crate::{
        answer::threshold::{PROBES_AROUND, ThresholdStatus},
        base::NoProgress,
        measure::Status,
        suite::{CaseOutcome, CaseSettings, InProcess, SuiteFile},
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
        let search = CaseSearch {
            simulated: &"sim".parse().unwrap(),
            runner: &Understudy,
            cap: LimitEnforcer::Allocator,
            around: PROBES_AROUND,
            jobs: 1,
            stop: &AtomicBool::new(false),
            progress: &NoProgress,
        };
        search.answer(&case, &Trace::read(&*case.source).unwrap())
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
        answer::threshold::{ThresholdQuestion, threshold},
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

    #[test]
    fn a_device_that_decides_the_same_confirms() {
        let mut case = case();
        let trace = Trace::read(&*case.source).unwrap();
        let strategy = StrategySpec::from("caching");
        let found = threshold(&ThresholdQuestion::new(&trace, &strategy, &case.device)).unwrap();
        case.source = Arc::new(trace);
        let bytes = found.threshold_bytes.unwrap();
        let confirmation = confirm(&case, bytes, 2 * MIB, &InProcess::default());
        assert!(confirmation.holds(), "{confirmation:?}");
        let off = confirm(&case, bytes + 8 * MIB, 2 * MIB, &InProcess::default());
        assert!(!off.holds());
        assert!(off.reason.unwrap().contains("oom foretold"));
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
        let confirmation = confirm(&case(), 64 * MIB, 2 * MIB, &Broken);
        assert!(!confirmation.holds());
        let reason = confirmation.reason.unwrap();
        assert!(reason.contains("completed foretold (cable pulled)") && reason.contains("; "), "{reason}");
    }
}

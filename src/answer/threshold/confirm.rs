//! What a real device says to a threshold that was found on a simulated one.

use crate::{
    base::Bytes,
    measure::{CaseLabel, Status},
    suite::{Case, CaseRunner},
};

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
mod tests {
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

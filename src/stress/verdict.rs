//! Results of stress: failures, verdicts on strategies, and the rows of tables and files.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{CheckedRun, StressBudget, StressTarget};
use crate::trace::Trace;

/// A broken promise of a strategy, with what is needed to reproduce it.
#[derive(Clone, Debug)]
pub struct StressFailure {
    /// The kind of stress that found it: `integrity`, `properties`, `faults` ...
    pub found_by: &'static str,
    /// The strategy as users type it.
    pub strategy: String,
    /// What happened.
    pub detail: String,
    /// The program that shows it, shrunk as far as possible.
    pub trace: Option<Trace>,
    /// Further options of `oomph stress KIND --trace FILE --strategy S` that reproduce it.
    pub conditions: Vec<String>,
}

impl fmt::Display for StressFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.strategy, self.found_by, self.detail)
    }
}

/// A kind of stress as `stress all` runs it.
pub struct StressKind {
    /// The name that users type.
    pub name: &'static str,
    /// Whether it can test the target at all.
    pub applies: fn(&StressTarget) -> bool,
    /// Tests a target with a seed until nothing is left to try or the time is up.
    pub judge: fn(&StressTarget, u64, &StressBudget<'_>) -> StressVerdict,
}

/// The verdict on a strategy that the run did not reach before it ended.
pub const UNTESTED: &str = "untested";

/// The result of one kind of stress for one strategy.
#[derive(Clone, Debug, Default)]
pub struct StressVerdict {
    /// Its kind, strategy and counts.
    pub row: VerdictRow,
    /// Why it was not tested, if so.
    pub skipped: Option<String>,
    /// Broken promises.
    pub failures: Vec<StressFailure>,
}

/// Where a failure is saved and how to reproduce it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FailureEvidence {
    /// The file with its trace; empty if there is none.
    pub trace: String,
    /// The number of events in that file.
    pub trace_events: u64,
    /// The command that reproduces it.
    pub command: String,
}

/// A verdict as a row of a table or file; each failure has its own row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerdictRow {
    /// The kind: `integrity`, `properties`, `faults` ...
    pub kind: String,
    /// The strategy as users type it.
    pub strategy: String,
    /// `passed`, `failed`, `skipped` or `untested`.
    pub verdict: String,
    /// The number of programs played.
    pub trials: u64,
    /// Events of those programs.
    pub events: u64,
    /// Requests that were served.
    pub served: u64,
    /// Requests that ran out of memory, which is not a failure.
    pub ooms: u64,
    /// Driver calls, including failed ones; `None` where they are not counted, or the allocator makes none that can be
    /// seen.
    pub driver_calls: Option<u64>,
    /// What happened, or why it was skipped.
    pub detail: String,
    /// The file with the trace of the failure; empty if there is none.
    pub trace: String,
    /// The number of events in that file.
    pub trace_events: u64,
    /// The command that reproduces the failure.
    pub command: String,
}

impl StressVerdict {
    /// A verdict before the first program.
    pub fn new(kind: &str, strategy: impl ToString) -> StressVerdict {
        let row = VerdictRow { kind: kind.to_owned(), strategy: strategy.to_string(), ..VerdictRow::default() };
        StressVerdict { row, ..StressVerdict::default() }
    }

    /// Counts a run.
    pub(super) fn count(&mut self, run: &CheckedRun) {
        self.row.trials += 1;
        self.row.events += run.events;
        self.row.served += run.served;
        self.row.ooms += run.ooms;
        if run.calls_are_known {
            *self.row.driver_calls.get_or_insert(0) += run.calls.total().count;
        }
    }

    /// The verdict in one word.
    pub fn word(&self) -> &'static str {
        match (&self.skipped, self.failures.is_empty()) {
            (_, false) => "failed",
            (Some(_), true) => "skipped",
            // Stopped before its first program.
            (None, true) if self.row.trials == 0 => UNTESTED,
            (None, true) => "passed",
        }
    }

    /// One row per failure, or a single row if there is none.
    pub fn rows(&self, evidence: &[FailureEvidence]) -> Vec<VerdictRow> {
        let row = VerdictRow {
            verdict: self.word().to_owned(),
            detail: self.skipped.clone().unwrap_or_default(),
            ..self.row.clone()
        };
        if self.failures.is_empty() {
            return vec![row];
        }
        let shown = evidence.iter().cloned().chain(std::iter::repeat_with(FailureEvidence::default));
        let failed =
            self.failures.iter().zip(shown).map(|(failure, FailureEvidence { trace, trace_events, command })| {
                VerdictRow { detail: failure.detail.clone(), trace, trace_events, command, ..row.clone() }
            });
        failed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_per_failure() {
        let mut verdict = StressVerdict::new("properties", "caching");
        assert_eq!(verdict.word(), "untested", "nothing was played");
        verdict.count(&CheckedRun { events: 7, served: 3, ..CheckedRun::default() });
        assert_eq!((verdict.word(), verdict.rows(&[]).len()), ("passed", 1));
        verdict.skipped = Some("no GPU".to_owned());
        assert_eq!((verdict.word(), verdict.rows(&[])[0].detail.as_str()), ("skipped", "no GPU"));
        let failure = |detail: &str| StressFailure {
            found_by: "properties",
            strategy: "caching".to_owned(),
            detail: detail.to_owned(),
            trace: None,
            conditions: Vec::new(),
        };
        verdict.failures = vec![failure("first"), failure("second")];
        let rows = verdict.rows(&[FailureEvidence { trace: "a.oomph".to_owned(), ..FailureEvidence::default() }]);
        let seen: Vec<_> = rows.iter().map(|row| (row.detail.as_str(), row.trace.as_str(), row.events)).collect();
        assert_eq!((verdict.word(), seen), ("failed", vec![("first", "a.oomph", 7), ("second", "", 7)]));
    }
}

//! What one kind of stress has to say about one strategy, and the rows that become of it.

use serde::{Deserialize, Serialize};

use super::{Failure, Trial};

/// What one kind of stress has to say about one strategy.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Which kind: `integrity`, `properties`, `faults` ...
    pub kind: &'static str,
    /// The strategy, as users type it.
    pub strategy: String,
    /// Why it could not be put under stress, if so.
    pub skipped: Option<String>,
    /// How often a program was played.
    pub trials: u64,
    /// Events of those programs.
    pub events: u64,
    /// Requests that were served.
    pub served: u64,
    /// Requests that failed, which is no failure.
    pub ooms: u64,
    /// Driver calls, failed ones included.
    pub driver_calls: u64,
    /// Promises that were broken.
    pub failures: Vec<Failure>,
}

/// Where a failure can be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The file with its trace; empty where there is none.
    pub trace: String,
    /// How many events that has.
    pub trace_events: u64,
    /// The command that shows it again; empty where there is none.
    pub repeat: String,
}

/// A verdict as a row of a table or file; of several failures each has its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the columns are the fields of the verdict and its evidence")]
pub struct VerdictRow {
    pub kind: String,
    pub strategy: String,
    /// `passed`, `failed` or `skipped`.
    pub verdict: String,
    pub trials: u64,
    pub events: u64,
    pub served: u64,
    pub ooms: u64,
    pub driver_calls: u64,
    /// What happened, or why it was skipped.
    pub detail: String,
    pub trace: String,
    pub trace_events: u64,
    pub repeat: String,
}

impl Verdict {
    /// Nothing was tried yet.
    #[must_use]
    pub fn new(kind: &'static str, strategy: impl ToString) -> Verdict {
        Verdict { kind, strategy: strategy.to_string(), ..Verdict::default() }
    }

    /// Counts a trial.
    pub fn count(&mut self, trial: &Trial) {
        self.trials += 1;
        self.events += trial.events;
        self.served += trial.served;
        self.ooms += trial.ooms;
        self.driver_calls += trial.calls.total().count;
    }

    /// The verdict in a word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match (&self.skipped, self.failures.is_empty()) {
            (_, false) => "failed",
            (Some(_), true) => "skipped",
            (None, true) => "passed",
        }
    }

    /// As rows: one, or one a failure.
    #[must_use]
    pub fn rows(&self, evidence: &[Evidence]) -> Vec<VerdictRow> {
        let row = VerdictRow {
            kind: self.kind.to_owned(),
            strategy: self.strategy.clone(),
            verdict: self.word().to_owned(),
            trials: self.trials,
            events: self.events,
            served: self.served,
            ooms: self.ooms,
            driver_calls: self.driver_calls,
            detail: self.skipped.clone().unwrap_or_default(),
            ..VerdictRow::default()
        };
        if self.failures.is_empty() {
            return vec![row];
        }
        let shown = evidence.iter().cloned().chain(std::iter::repeat_with(Evidence::default));
        let failed = self.failures.iter().zip(shown).map(|(failure, Evidence { trace, trace_events, repeat })| {
            VerdictRow { detail: failure.detail.clone(), trace, trace_events, repeat, ..row.clone() }
        });
        failed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_a_row_and_what_passed_or_was_skipped_has_one() {
        let mut verdict = Verdict::new("properties", "caching");
        verdict.count(&Trial { events: 7, served: 3, ..Trial::default() });
        assert_eq!((verdict.word(), verdict.rows(&[]).len()), ("passed", 1));
        verdict.skipped = Some("no GPU".to_owned());
        assert_eq!((verdict.word(), verdict.rows(&[])[0].detail.as_str()), ("skipped", "no GPU"));
        let failure = |detail: &str| Failure {
            found_by: "properties",
            strategy: "caching".to_owned(),
            detail: detail.to_owned(),
            trace: None,
            conditions: Vec::new(),
        };
        verdict.failures = vec![failure("first"), failure("second")];
        let rows = verdict.rows(&[Evidence { trace: "a.oomph".to_owned(), ..Evidence::default() }]);
        let told: Vec<_> = rows.iter().map(|row| (row.detail.as_str(), row.trace.as_str(), row.events)).collect();
        assert_eq!((verdict.word(), told), ("failed", vec![("first", "a.oomph", 7), ("second", "", 7)]));
    }
}

//! What one kind of stress has to say about one strategy.

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

/// A verdict as a row of a table or file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the columns are the fields of the verdict")]
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
    /// How many promises were broken.
    pub failures: u64,
    /// The first failure, or why it was skipped.
    pub detail: String,
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
        self.driver_calls += trial.driver_calls;
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

    /// As a row.
    #[must_use]
    pub fn row(&self) -> VerdictRow {
        let failure = self.failures.first().map(|failure| failure.detail.clone());
        VerdictRow {
            kind: self.kind.to_owned(),
            strategy: self.strategy.clone(),
            verdict: self.word().to_owned(),
            trials: self.trials,
            events: self.events,
            served: self.served,
            ooms: self.ooms,
            driver_calls: self.driver_calls,
            failures: self.failures.len() as u64,
            detail: failure.or_else(|| self.skipped.clone()).unwrap_or_default(),
        }
    }
}

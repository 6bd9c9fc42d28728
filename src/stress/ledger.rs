//! What many runs of a stress came to in all: the file that adds up over slices, and that is published.

use serde::{Deserialize, Serialize};

use super::{Evidence, Levels, Outcome, Tally};

/// The file. A slice is one run of the command; what it came to is added strategy by strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// The version of the file's form.
    pub schema: u32,
    /// Which kind of stress.
    pub kind: String,
    /// The runs, in order.
    pub slices: Vec<Slice>,
    /// All strategies that were put under stress in any of them, in the order of their first appearance.
    pub strategies: Vec<Account>,
}

/// One run of the command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// What the device says it is.
    pub device: String,
    /// The program that ran.
    pub version: String,
    /// The dice.
    pub seed: u64,
    /// Host threads.
    pub threads: u16,
    /// Streams.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: String,
    /// Memory that each strategy had.
    pub memory_bytes: u64,
    /// Time taken by all strategies together.
    pub wall_ns: u64,
}

/// What one strategy came to in all slices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// As users type it.
    pub strategy: String,
    /// In how many slices it ran.
    pub slices: u32,
    /// The numbers.
    #[serde(flatten)]
    pub tally: Tally,
    /// How full memory was.
    #[serde(default)]
    pub levels: Levels,
    /// What was broken.
    pub failures: Vec<String>,
    /// Why it could not be put under stress the last time, if so.
    pub skipped: Option<String>,
}

/// One strategy's account as a row of a table or file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the columns are the fields of the account and its evidence")]
pub struct AccountRow {
    pub kind: String,
    pub strategy: String,
    /// `passed`, `failed` or `skipped`.
    pub verdict: String,
    pub slices: u32,
    pub blocks: u64,
    pub comparisons: u64,
    pub compared_bytes: u64,
    pub damaged: u64,
    pub crossings: u64,
    pub handovers: u64,
    pub trims: u64,
    pub ooms: u64,
    pub faults: u64,
    pub violations: u64,
    pub wall_ns: u64,
    pub samples: u64,
    pub requested_min_bytes: u64,
    pub requested_mean_bytes: u64,
    pub requested_max_bytes: u64,
    pub reserved_max_bytes: u64,
    pub idle_mean_ppm: u64,
    pub idle_max_ppm: u64,
    /// What happened, or why it was skipped.
    pub detail: String,
    pub trace: String,
    pub trace_events: u64,
    pub repeat: String,
}

impl Ledger {
    /// The accounts as rows; `evidence` is there for strategies that failed in this slice.
    #[must_use]
    pub fn rows(&self, evidence: &[(String, Evidence)]) -> Vec<AccountRow> {
        self.strategies.iter().map(|account| self.row(account, evidence)).collect()
    }

    fn row(&self, account: &Account, evidence: &[(String, Evidence)]) -> AccountRow {
        let Account { strategy, slices, tally, levels, failures, skipped } = account;
        let verdict = match (failures.is_empty(), skipped) {
            (false, _) => "failed",
            (true, Some(_)) if *slices == 0 => "skipped",
            (true, _) => "passed",
        };
        let seen = evidence.iter().find(|(whose, _)| whose == strategy).map(|(_, seen)| seen.clone());
        let Evidence { trace, trace_events, repeat } = seen.unwrap_or_default();
        AccountRow {
            kind: self.kind.clone(),
            strategy: strategy.clone(),
            verdict: verdict.to_owned(),
            slices: *slices,
            blocks: tally.blocks,
            comparisons: tally.comparisons,
            compared_bytes: tally.compared_bytes,
            damaged: tally.damaged,
            crossings: tally.crossings,
            handovers: tally.handovers,
            trims: tally.trims,
            ooms: tally.ooms,
            faults: tally.faults,
            violations: tally.violations,
            wall_ns: tally.wall_ns,
            samples: levels.samples,
            requested_min_bytes: levels.requested_min_bytes,
            requested_mean_bytes: levels.requested_mean_bytes,
            requested_max_bytes: levels.requested_max_bytes,
            reserved_max_bytes: levels.reserved_max_bytes,
            idle_mean_ppm: levels.idle_mean_ppm,
            idle_max_ppm: levels.idle_max_ppm,
            detail: failures.first().cloned().or_else(|| skipped.clone()).unwrap_or_default(),
            trace,
            trace_events,
            repeat,
        }
    }

    /// The form that is written.
    pub const SCHEMA: u32 = 1;

    /// A file without slices.
    #[must_use]
    pub fn new(kind: &str) -> Ledger {
        Ledger { schema: Ledger::SCHEMA, kind: kind.to_owned(), ..Ledger::default() }
    }

    /// Whether the file can be added to by this kind of stress; if not, why.
    pub fn check(&self, kind: &str) -> Result<(), String> {
        match (self.schema == Ledger::SCHEMA, self.kind == kind) {
            (true, true) => Ok(()),
            (true, false) => Err(format!("it holds the slices of stress {}, not of {kind}", self.kind)),
            (false, _) => Err(format!("its form is {}, and this program writes {}", self.schema, Ledger::SCHEMA)),
        }
    }

    /// Seed of the next slice: every slice throws other dice.
    #[must_use]
    pub fn next_seed(&self, seed: u64) -> u64 {
        seed.wrapping_add(1_000_000_007 * self.slices.len() as u64)
    }

    /// Adds what one strategy came to.
    pub fn add(&mut self, strategy: &str, outcome: &Outcome) {
        let place = self.strategies.iter().position(|account| account.strategy == strategy).unwrap_or_else(|| {
            self.strategies.push(Account { strategy: strategy.to_owned(), ..Account::default() });
            self.strategies.len() - 1
        });
        let account = &mut self.strategies[place];
        account.slices += u32::from(outcome.skipped.is_none());
        account.tally.absorb(&outcome.tally);
        account.levels.absorb(&outcome.levels);
        account.failures.extend(outcome.failures.iter().map(|failure| failure.detail.clone()));
        account.skipped = outcome.skipped.clone();
    }

    /// All strategies together.
    #[must_use]
    pub fn total(&self) -> Tally {
        let mut total = Tally::default();
        self.strategies.iter().for_each(|account| total.absorb(&account.tally));
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(blocks: u64) -> Outcome {
        let tally = Tally { blocks, compared_bytes: 10 * blocks, wall_ns: 1_000, ..Tally::default() };
        Outcome { tally, ..Outcome::default() }
    }

    #[test]
    fn slices_add_up_strategy_by_strategy_and_survive_a_file() {
        let mut ledger = Ledger::new("integrity");
        for (strategy, blocks) in [("caching", 3), ("bfc", 4), ("caching", 5)] {
            ledger.add(strategy, &outcome(blocks));
            ledger.slices.push(Slice::default());
        }
        ledger.add("planned", &Outcome::skipped("no reason"));
        let names: Vec<&str> = ledger.strategies.iter().map(|account| account.strategy.as_str()).collect();
        assert_eq!(names, ["caching", "bfc", "planned"]);
        assert_eq!((ledger.strategies[0].tally.blocks, ledger.strategies[0].slices), (8, 2));
        assert_eq!((ledger.total().blocks, ledger.total().compared_bytes), (12, 120));
        let text = serde_json::to_string(&ledger).unwrap();
        assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
    }

    #[test]
    fn every_slice_throws_other_dice_and_files_are_not_mixed_up() {
        let mut ledger = Ledger::new("integrity");
        let first = ledger.next_seed(1);
        ledger.slices.push(Slice::default());
        assert_ne!(first, ledger.next_seed(1));
        assert!(ledger.check("integrity").is_ok());
        assert!(ledger.check("soak").unwrap_err().contains("integrity, not of soak"));
    }
}

//! Counts of `stress integrity` and `stress soak`, and the file (`--state`) in which they add up
//! over several runs.

use serde::{Deserialize, Serialize};

use super::{FailureEvidence, StressFailure, UNTESTED};
use crate::strategy::Usage;

/// The result of one run for one strategy.
#[derive(Clone, Debug, Default)]
pub struct EnduranceOutcome {
    /// What was checked.
    pub counts: IntegrityCounts,
    /// Why the strategy was not tested, if so.
    pub skipped: Option<String>,
    /// How full memory was.
    pub levels: MemoryLevels,
    /// Broken promises.
    pub failures: Vec<StressFailure>,
    /// Whether this process can no longer use the device.
    pub lost_context: bool,
}

impl EnduranceOutcome {
    /// The outcome for a strategy that is not tested.
    pub fn skipped(reason: impl ToString) -> EnduranceOutcome {
        EnduranceOutcome { skipped: Some(reason.to_string()), ..EnduranceOutcome::default() }
    }
}

/// What was checked, and the result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntegrityCounts {
    /// Blocks that were filled after the request and compared before the free.
    pub blocks: u64,
    /// Comparisons, including those in between.
    pub comparisons: u64,
    /// Bytes of all comparisons.
    pub compared_bytes: u64,
    /// Blocks whose contents were overwritten.
    pub damaged: u64,
    /// Blocks compared on a stream other than their own.
    pub crossings: u64,
    /// Blocks freed by a thread that did not request them.
    pub handovers: u64,
    /// How often cached memory was released.
    pub trims: u64,
    /// Requests that ran out of memory, which is not a failure.
    pub ooms: u64,
    /// Driver calls that failed on purpose.
    #[serde(default)]
    pub faults: u64,
    /// Broken promises that were found other than by contents.
    #[serde(default)]
    pub violations: u64,
    /// Wall time.
    pub wall_ns: u64,
}

impl IntegrityCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &IntegrityCounts) {
        self.blocks += other.blocks;
        self.comparisons += other.comparisons;
        self.compared_bytes += other.compared_bytes;
        self.damaged += other.damaged;
        self.crossings += other.crossings;
        self.handovers += other.handovers;
        self.trims += other.trims;
        self.ooms += other.ooms;
        self.faults += other.faults;
        self.violations += other.violations;
        self.wall_ns += other.wall_ns;
    }

    /// A count per second.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.wall_ns == 0 { 0.0 } else { count as f64 * 1e9 / self.wall_ns as f64 }
    }
}

/// How full memory was, sampled at every request within a step, from the strategy's statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLevels {
    /// The number of samples.
    pub samples: u64,
    /// The minimum of requested bytes in live blocks.
    pub requested_min_bytes: u64,
    /// Their mean.
    pub requested_mean_bytes: u64,
    /// Their maximum.
    pub requested_max_bytes: u64,
    /// The maximum of reserved bytes.
    pub reserved_max_bytes: u64,
    /// Idle share of reserved memory in parts per million, mean.
    pub idle_mean_ppm: u64,
    /// Its maximum.
    pub idle_max_ppm: u64,
}

impl MemoryLevels {
    /// Adds a sample.
    pub(super) fn sample(&mut self, usage: &Usage) {
        let idle = usage.reserved.saturating_sub(usage.active);
        let idle_ppm = (u128::from(idle) * 1_000_000 / u128::from(usage.reserved.max(1))) as u64;
        self.add(&MemoryLevels {
            samples: 1,
            requested_min_bytes: usage.requested,
            requested_max_bytes: usage.requested,
            requested_mean_bytes: usage.requested,
            reserved_max_bytes: usage.reserved,
            idle_mean_ppm: idle_ppm,
            idle_max_ppm: idle_ppm,
        });
    }

    /// Adds the samples of another run.
    pub fn add(&mut self, other: &MemoryLevels) {
        let samples = self.samples + other.samples;
        if samples == 0 || other.samples == 0 {
            return;
        }
        let mean = |own: u64, others: u64| {
            let sum = u128::from(own) * u128::from(self.samples) + u128::from(others) * u128::from(other.samples);
            (sum / u128::from(samples)) as u64
        };
        *self = MemoryLevels {
            samples,
            requested_min_bytes: match self.samples {
                0 => other.requested_min_bytes,
                _ => self.requested_min_bytes.min(other.requested_min_bytes),
            },
            requested_max_bytes: self.requested_max_bytes.max(other.requested_max_bytes),
            requested_mean_bytes: mean(self.requested_mean_bytes, other.requested_mean_bytes),
            reserved_max_bytes: self.reserved_max_bytes.max(other.reserved_max_bytes),
            idle_mean_ppm: mean(self.idle_mean_ppm, other.idle_mean_ppm),
            idle_max_ppm: self.idle_max_ppm.max(other.idle_max_ppm),
        };
    }
}

/// The state file. A slice is one run of the command; its counts are added per strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StressState {
    /// The version of the file format.
    pub schema: u32,
    /// The kind of stress.
    pub kind: String,
    /// The runs, in order.
    pub slices: Vec<StressSlice>,
    /// All strategies that were tested, in the order of their first appearance.
    pub strategies: Vec<StrategyTotals>,
}

/// One run of the command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StressSlice {
    /// The device's name.
    pub device: String,
    /// The version of oomph.
    pub version: String,
    /// The seed.
    pub seed: u64,
    /// Host threads.
    pub threads: u16,
    /// Streams.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: String,
    /// Memory of each strategy.
    pub memory_bytes: u64,
    /// Wall time of all strategies together.
    pub wall_ns: u64,
}

/// The counts of one strategy over all slices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategyTotals {
    /// The strategy as users type it.
    pub strategy: String,
    /// The number of slices in which it ran.
    pub slices: u32,
    /// What was checked.
    #[serde(flatten)]
    pub counts: IntegrityCounts,
    /// How full memory was.
    #[serde(default)]
    pub levels: MemoryLevels,
    /// Broken promises.
    pub failures: Vec<String>,
    /// Why it was not tested the last time, if so.
    pub skipped: Option<String>,
}

/// The totals of one strategy as a row of a table or file.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the fields are parts of the totals and their evidence")]
pub struct TotalsRow<'a> {
    pub kind: &'a str,
    pub strategy: &'a str,
    /// `passed`, `failed` or `skipped`.
    pub verdict: &'static str,
    pub slices: u32,
    #[serde(flatten)]
    pub counts: &'a IntegrityCounts,
    #[serde(flatten)]
    pub levels: MemoryLevels,
    /// What happened, or why it was skipped.
    pub detail: &'a str,
    #[serde(flatten)]
    pub evidence: FailureEvidence,
}

impl StressState {
    /// One row per strategy, with the evidence of those that failed in this slice.
    pub fn rows(&self, evidence: &[(String, FailureEvidence)]) -> Vec<TotalsRow<'_>> {
        self.strategies.iter().map(|totals| self.row(totals, evidence)).collect()
    }

    fn row<'a>(&'a self, totals: &'a StrategyTotals, evidence: &[(String, FailureEvidence)]) -> TotalsRow<'a> {
        let StrategyTotals { strategy, slices, counts, levels, failures, skipped } = totals;
        let verdict = match (failures.is_empty(), skipped) {
            (false, _) => "failed",
            (true, Some(_)) if *slices == 0 => "skipped",
            (true, None) if *slices == 0 => UNTESTED,
            (true, _) => "passed",
        };
        let seen = evidence.iter().find(|(whose, _)| whose == strategy).map(|(_, seen)| seen.clone());
        TotalsRow {
            kind: &self.kind,
            strategy,
            verdict,
            slices: *slices,
            counts,
            levels: *levels,
            detail: failures.first().or(skipped.as_ref()).map_or("", String::as_str),
            evidence: seen.unwrap_or_default(),
        }
    }

    /// The version of the format that is written.
    pub const SCHEMA: u32 = 1;

    /// A state without slices.
    pub fn new(kind: &str) -> StressState {
        StressState { schema: StressState::SCHEMA, kind: kind.to_owned(), ..StressState::default() }
    }

    /// Checks that slices of this kind can be added.
    pub fn check(&self, kind: &str) -> Result<(), String> {
        match (self.schema == StressState::SCHEMA, self.kind == kind) {
            (true, true) => Ok(()),
            (true, false) => Err(format!("it holds slices of stress {}, not of {kind}", self.kind)),
            (false, _) => Err(format!(
                "its format is version {}, and this program writes version {}",
                self.schema,
                StressState::SCHEMA
            )),
        }
    }

    /// The seed of the next slice, different for every slice.
    pub fn next_seed(&self, seed: u64) -> u64 {
        seed.wrapping_add(1_000_000_007 * self.slices.len() as u64)
    }

    /// Adds the outcome of one strategy.
    pub fn add(&mut self, strategy: &str, outcome: &EnduranceOutcome) {
        let place = self.strategies.iter().position(|totals| totals.strategy == strategy).unwrap_or_else(|| {
            self.strategies.push(StrategyTotals { strategy: strategy.to_owned(), ..StrategyTotals::default() });
            self.strategies.len() - 1
        });
        let totals = &mut self.strategies[place];
        totals.slices += u32::from(outcome.skipped.is_none());
        totals.counts.add(&outcome.counts);
        totals.levels.add(&outcome.levels);
        totals.failures.extend(outcome.failures.iter().map(|failure| failure.detail.clone()));
        totals.skipped = outcome.skipped.clone();
    }

    /// The counts of all strategies together.
    pub fn total(&self) -> IntegrityCounts {
        let mut total = IntegrityCounts::default();
        self.strategies.iter().for_each(|totals| total.add(&totals.counts));
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(blocks: u64) -> EnduranceOutcome {
        let counts =
            IntegrityCounts { blocks, compared_bytes: 10 * blocks, wall_ns: 1_000, ..IntegrityCounts::default() };
        EnduranceOutcome { counts, ..EnduranceOutcome::default() }
    }

    #[test]
    fn slices_add_up_and_are_restored() {
        let mut state = StressState::new("integrity");
        for (strategy, blocks) in [("caching", 3), ("bfc", 4), ("caching", 5)] {
            state.add(strategy, &outcome(blocks));
            state.slices.push(StressSlice::default());
        }
        state.add("planned", &EnduranceOutcome::skipped("no reason"));
        let names: Vec<&str> = state.strategies.iter().map(|totals| totals.strategy.as_str()).collect();
        assert_eq!(names, ["caching", "bfc", "planned"]);
        assert_eq!((state.strategies[0].counts.blocks, state.strategies[0].slices), (8, 2));
        assert_eq!((state.total().blocks, state.total().compared_bytes), (12, 120));
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<StressState>(&text).unwrap(), state);
    }

    #[test]
    fn seeds_differ_and_kinds_are_checked() {
        let mut state = StressState::new("integrity");
        let first = state.next_seed(1);
        state.slices.push(StressSlice::default());
        assert_ne!(first, state.next_seed(1));
        assert!(state.check("integrity").is_ok());
        assert!(state.check("soak").unwrap_err().contains("integrity, not of soak"));
    }

    #[test]
    fn levels_summarise_all_samples() {
        let usage = |requested, reserved| Usage { requested, allocated: requested, active: requested, reserved };
        let mut all = MemoryLevels::default();
        for sample in [usage(10, 20), usage(30, 30), usage(20, 40)] {
            all.sample(&sample);
        }
        assert_eq!((all.samples, all.requested_min_bytes, all.requested_max_bytes), (3, 10, 30));
        assert_eq!((all.requested_mean_bytes, all.reserved_max_bytes, all.idle_max_ppm), (20, 40, 500_000));
    }
}

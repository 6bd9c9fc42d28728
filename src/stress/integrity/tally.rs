//! What was looked at, and what came of it.

use serde::{Deserialize, Serialize};

/// What was looked at, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Blocks that were filled when they came and compared before they went.
    pub blocks: u64,
    /// Comparisons, those in between included.
    pub comparisons: u64,
    /// Bytes of all comparisons.
    pub compared_bytes: u64,
    /// Blocks whose contents were not their own.
    pub damaged: u64,
    /// Blocks compared on another stream than their own.
    pub crossings: u64,
    /// Blocks given back by another thread than had asked for them.
    pub handovers: u64,
    /// How often cached memory was given back.
    pub trims: u64,
    /// Requests that failed, which is no failure.
    pub ooms: u64,
    /// Driver calls that failed on purpose.
    #[serde(default)]
    pub faults: u64,
    /// Breaches of the contract that were seen otherwise than by contents.
    #[serde(default)]
    pub violations: u64,
    /// Time taken.
    pub wall_ns: u64,
}

impl Tally {
    /// Adds another.
    pub fn absorb(&mut self, other: &Tally) {
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

    /// So many of something in a second.
    #[must_use]
    pub fn each_second(&self, count: u64) -> f64 {
        if self.wall_ns == 0 { 0.0 } else { count as f64 * 1e9 / self.wall_ns as f64 }
    }
}

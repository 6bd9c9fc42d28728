//! How long to think, counted in steps and not in seconds, so that the same trace gets the same plan everywhere.

/// How much work a packing may take. A step is about one look at one neighbour of a block: around a nanosecond.
///
/// The first layout is always finished, whatever the budget; what is left goes into better ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    steps: u64,
}

impl Budget {
    /// A fraction of a second: for suites, where every source is packed.
    pub const QUICK: Budget = Budget::of_steps(200_000_000);
    /// Some seconds: for one source that somebody wants to know about.
    pub const THOROUGH: Budget = Budget::of_steps(1_000_000_000);

    /// A budget of so many steps.
    #[must_use]
    pub const fn of_steps(steps: u64) -> Budget {
        Budget { steps }
    }

    /// How many steps are left.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes steps away, and tells whether any are left.
    pub(super) const fn spend(&mut self, steps: u64) -> bool {
        self.steps = self.steps.saturating_sub(steps);
        self.steps > 0
    }

    /// Cuts off `share` of `whole` parts of what is left.
    pub(super) fn portion(&self, share: usize, whole: usize) -> Budget {
        let steps = u128::from(self.steps) * share as u128 / whole.max(1) as u128;
        Budget { steps: u64::try_from(steps).unwrap_or(u64::MAX) }
    }
}

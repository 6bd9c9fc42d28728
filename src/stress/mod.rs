//! Is an allocator correct? Programs that try to break a strategy, and the smallest trace that
//! shows a failure.
//!
//! Every kind of stress plays traces through a [`StressTarget`] and reports [`StressFailure`]s. A
//! failure carries its trace, so that it can be saved, shrunk and repeated. This module uses replay
//! and everything below it; it neither prints nor reads the environment.

pub mod adversary;
mod checked_run;
pub mod concurrent;
pub mod faults;
pub mod history;
mod integrity;
pub mod misuse;
pub mod properties;
mod shrink;
mod soak;
mod state;
mod target;
mod verdict;

pub use checked_run::{CheckedRun, is_under_test};
pub use integrity::{BlockSizes, BlockSizesError, EnduranceTest, StopCondition};
pub use shrink::shrink;
pub use state::{EnduranceOutcome, IntegrityCounts, MemoryLevels, StrategyTotals, StressSlice, StressState, TotalsRow};
pub use target::{StressTarget, TargetError};
pub use verdict::{FailureEvidence, StressFailure, StressKind, StressVerdict, UNTESTED, VerdictRow};

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Every kind that runs without further arguments, in the order of tables. The last three end by
/// themselves and are played first, so that their unused time goes to the others.
pub const KINDS: &[StressKind] =
    &[integrity::STRESS, properties::STRESS, history::STRESS, faults::STRESS, misuse::STRESS, concurrent::STRESS];

/// When a test must end. Shrinking a failure is part of the test: the last quarter of the time is kept for it.
#[derive(Clone, Copy)]
pub struct StressBudget<'a> {
    stop: &'a dyn Fn() -> bool,
    /// Whether enough is known, so that nothing new is to be tried.
    enough: &'a dyn Fn() -> bool,
    begin: Instant,
    end: Option<Instant>,
}

impl<'a> StressBudget<'a> {
    /// Ends only when `stop` returns true.
    pub fn unlimited(stop: &'a dyn Fn() -> bool) -> StressBudget<'a> {
        StressBudget { stop, enough: &|| false, begin: Instant::now(), end: None }
    }

    /// Ends at this time too.
    pub fn until(stop: &'a dyn Fn() -> bool, end: Instant) -> StressBudget<'a> {
        StressBudget { end: Some(end), ..StressBudget::unlimited(stop) }
    }

    /// Searches only until `enough` returns true. What was found is still shrunk.
    #[must_use]
    pub fn search_until(self, enough: &'a dyn Fn() -> bool) -> StressBudget<'a> {
        StressBudget { enough, ..self }
    }

    /// Whether nothing new is to be tried.
    pub fn search_is_over(&self) -> bool {
        let search_end = self.end.map(|end| self.begin + end.saturating_duration_since(self.begin) / 4 * 3);
        (self.stop)() || (self.enough)() || search_end.is_some_and(|end| Instant::now() >= end)
    }

    /// Whether everything has to end.
    pub fn is_over(&self) -> bool {
        (self.stop)() || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

/// Time that several jobs share, some of them in parallel. Each job gets its part of the remaining
/// time, so that unused time goes to later jobs.
#[derive(Debug)]
pub struct TimeShare {
    end: Instant,
    parallel: u32,
    left: AtomicU64,
}

impl TimeShare {
    /// Shares `time`, from now on, among `jobs` of which `parallel` run at once.
    pub fn new(time: Duration, jobs: usize, parallel: usize) -> TimeShare {
        TimeShare { end: Instant::now() + time, parallel: parallel.max(1) as u32, left: AtomicU64::new(jobs as u64) }
    }

    /// When the job that begins now must end.
    pub fn next_end(&self) -> Instant {
        let left = self.left.fetch_sub(1, Ordering::Relaxed).max(1);
        let now = Instant::now();
        let share = self.end.saturating_duration_since(now) * self.parallel.min(left as u32) / left as u32;
        (now + share).min(self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_time_goes_to_the_others() {
        let time = TimeShare::new(Duration::from_secs(90), 3, 1);
        let begun = Instant::now();
        let shares = [(); 3].map(|()| (time.next_end() - begun).as_secs_f64().round());
        assert_eq!(shares, [30.0, 45.0, 90.0]);
    }

    #[test]
    fn parallel_jobs_get_a_larger_share() {
        let time = TimeShare::new(Duration::from_secs(60), 4, 2);
        let begun = Instant::now();
        let shares = [(); 5].map(|()| (time.next_end() - begun).as_secs_f64().round());
        assert_eq!(shares, [30.0, 40.0, 60.0, 60.0, 60.0]);
    }
}

//! Wall-clock times, for cases that are marked timed and run alone. The only file of this room whose numbers differ
//! from run to run; they go to `timings.csv` and nowhere else.
//!
//! Throughput comes from passes that nobody watches. Percentiles come from one more pass in which some operations are
//! timed: reading the clock costs as much as a cache hit, so that pass is slower, and what reading the clock costs is
//! measured and stated beside its percentiles, which still contain it.
//!
//! [`time`] gives one thread the strategy for itself; [`time_threads`] lets several share it under one lock.

mod sampler;
mod threads;

use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use sampler::SAMPLED_ONE_IN;
pub use threads::{copies_for_threads, time_threads};

use self::sampler::Sampler;
use super::{CaseLabel, SCHEMA, latency::Durations};
use crate::{
    base::Nanos,
    device::Clock,
    replay::{self, Observer, OpenedAllocator, ReplayError, replay},
    strategy::{Context, Silent},
    trace::Source,
};

/// How often the clock is read to find out what reading it costs.
const TIMER_READINGS: usize = 1001;

/// One row of `timings.csv`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimingRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// See [`CaseLabel::suite`].
    pub suite: String,
    /// See [`CaseLabel::workload`].
    pub workload: String,
    /// See [`CaseLabel::strategy`].
    pub strategy: String,
    /// See [`CaseLabel::device`].
    pub device: String,
    /// Threads that shared the strategy under one lock, each with a copy of the trace; empty where one thread had it
    /// for itself, without that lock.
    pub threads: Option<u16>,
    /// Always the wall clock.
    pub clock: Option<Clock>,
    /// Passes that nobody watched.
    pub passes: u32,
    /// Events of one pass, those of all threads together.
    pub events: u64,
    /// Allocations served and blocks given back in one pass, by all threads together.
    pub operations: u64,
    /// Requests that failed in one pass.
    pub ooms: u64,
    /// The fastest pass.
    pub pass_min_ns: u64,
    /// The median pass.
    pub pass_median_ns: u64,
    /// The slowest pass.
    pub pass_max_ns: u64,
    /// Every pass, in the order they ran, with spaces between: what `compare` tests. See
    /// [`passes_ns`](TimingRecord::passes_ns).
    pub pass_ns: String,
    /// In the median pass, all threads together; reading the source is part of it.
    pub operations_per_second: f64,
    /// What an operation takes from the side of the thread that asks for it, waiting for the lock included: the median
    /// pass times the number of threads, divided by the operations.
    pub ns_per_operation: f64,
    /// One operation in this many was timed in the sampled pass.
    pub sampled_one_in: u32,
    /// What the percentiles contain of reading the clock.
    pub timer_ns: u64,
    /// Timed requests.
    pub alloc_samples: u64,
    /// Median.
    pub alloc_p50_ns: Option<u64>,
    /// 90th percentile.
    pub alloc_p90_ns: Option<u64>,
    /// 99th percentile.
    pub alloc_p99_ns: Option<u64>,
    /// 99.9th percentile.
    pub alloc_p999_ns: Option<u64>,
    /// Longest.
    pub alloc_max_ns: Option<u64>,
    /// Timed frees.
    pub free_samples: u64,
    /// Median.
    pub free_p50_ns: Option<u64>,
    /// 90th percentile.
    pub free_p90_ns: Option<u64>,
    /// 99th percentile.
    pub free_p99_ns: Option<u64>,
    /// 99.9th percentile.
    pub free_p999_ns: Option<u64>,
    /// Longest.
    pub free_max_ns: Option<u64>,
}

/// Times a case: `passes` passes that nobody watches (at least one), then a sampled one, each on a fresh strategy and
/// device from `make`. A source in memory keeps the cost of generating or parsing out of the figures.
pub fn time(
    label: &CaseLabel,
    source: &dyn Source,
    mut make: impl FnMut() -> Result<OpenedAllocator, ReplayError>,
    options: &replay::ReplayOptions<'_>,
    passes: u32,
) -> Result<TimingRecord, ReplayError> {
    let mut unwatched = Vec::new();
    for _ in 0..passes.max(1) {
        unwatched.push(pass(source, make()?, options, &mut Silent)?);
    }
    let mut sampler = Sampler::default();
    pass(source, make()?, options, &mut sampler)?;
    Ok(TimingRecord::new(label, None, unwatched, &sampler))
}

impl TimingRecord {
    /// The time of every unwatched pass, in the order they ran; empty where the row does not say.
    #[must_use]
    pub fn passes_ns(&self) -> Vec<u64> {
        self.pass_ns.split_whitespace().filter_map(|pass| pass.parse().ok()).collect()
    }

    /// The row of a case, from its passes (at least one) and what was sampled.
    fn new(label: &CaseLabel, threads: Option<u16>, mut unwatched: Vec<Pass>, sampler: &Sampler) -> TimingRecord {
        let pass_ns: Vec<String> = unwatched.iter().map(|pass| pass.wall.0.to_string()).collect();
        unwatched.sort_by_key(|pass| pass.wall);
        let median = unwatched[unwatched.len() / 2];
        let (wall, operations) = (median.wall.0.max(1) as f64, median.operations as f64);
        let quantile = |durations: &Durations, share| durations.quantile(share).map(|time: Nanos| time.0);
        TimingRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            threads,
            clock: Some(Clock::Wall),
            passes: unwatched.len() as u32,
            events: median.events,
            operations: median.operations,
            ooms: median.ooms,
            pass_min_ns: unwatched[0].wall.0,
            pass_median_ns: median.wall.0,
            pass_max_ns: unwatched[unwatched.len() - 1].wall.0,
            pass_ns: pass_ns.join(" "),
            operations_per_second: operations * 1e9 / wall,
            ns_per_operation: wall * f64::from(threads.unwrap_or(1)) / operations.max(1.0),
            sampled_one_in: SAMPLED_ONE_IN,
            timer_ns: timer_cost().0,
            alloc_samples: sampler.allocs.count(),
            alloc_p50_ns: quantile(&sampler.allocs, 0.5),
            alloc_p90_ns: quantile(&sampler.allocs, 0.9),
            alloc_p99_ns: quantile(&sampler.allocs, 0.99),
            alloc_p999_ns: quantile(&sampler.allocs, 0.999),
            alloc_max_ns: sampler.allocs.max().map(|time| time.0),
            free_samples: sampler.frees.count(),
            free_p50_ns: quantile(&sampler.frees, 0.5),
            free_p90_ns: quantile(&sampler.frees, 0.9),
            free_p99_ns: quantile(&sampler.frees, 0.99),
            free_p999_ns: quantile(&sampler.frees, 0.999),
            free_max_ns: sampler.frees.max().map(|time| time.0),
        }
    }
}

/// One pass, by one thread or by several.
#[derive(Clone, Copy)]
struct Pass {
    wall: Nanos,
    events: u64,
    ooms: u64,
    operations: u64,
}

fn pass<O: Observer>(
    source: &dyn Source,
    OpenedAllocator { mut strategy, mut device, .. }: OpenedAllocator,
    options: &replay::ReplayOptions<'_>,
    observer: &mut O,
) -> Result<Pass, ReplayError> {
    let began = Instant::now();
    let replayed = replay(source, &mut *strategy, &mut *device, options, observer)?;
    let wall = elapsed(began);
    let operations = strategy.stats().allocs + strategy.stats().frees;
    strategy
        .close(&mut Context { device: &mut *device, sink: &mut Silent })
        .map_err(|source| ReplayError::Strategy { event: replayed.events, source })?;
    Ok(Pass { wall, events: replayed.events, ooms: replayed.ooms, operations })
}

fn elapsed(since: Instant) -> Nanos {
    elapsed_between(since, Instant::now())
}

fn elapsed_between(begin: Instant, end: Instant) -> Nanos {
    Nanos(u64::try_from(end.saturating_duration_since(begin).as_nanos()).unwrap_or(u64::MAX))
}

/// The median of what two readings of the clock in a row show.
fn timer_cost() -> Nanos {
    let mut readings: Vec<Nanos> = (0..TIMER_READINGS).map(|_| elapsed(Instant::now())).collect();
    readings.sort_unstable();
    readings[TIMER_READINGS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, StreamId, TagId},
        measure::fixture::{Catalog, TinyDevice},
        trace::TraceBuilder,
    };

    fn fresh() -> Result<OpenedAllocator, ReplayError> {
        let (strategy, device) = (Box::new(Catalog::default()), Box::new(TinyDevice::new(64 * KIB)));
        Ok(OpenedAllocator { strategy, device, limit: None })
    }

    #[test]
    fn every_pass_gets_a_fresh_strategy_and_some_operations_are_timed() {
        let mut story = TraceBuilder::new();
        for _ in 0..500 {
            let block = story.alloc(100, StreamId::DEFAULT, TagId(0));
            story.free(block);
        }
        let mut made = 0;
        let make = || {
            made += 1;
            fresh()
        };
        let label = CaseLabel { workload: "w".to_owned(), ..CaseLabel::default() };
        let record = time(&label, &story.finish("w"), make, &replay::ReplayOptions::default(), 3).unwrap();
        assert_eq!(made, 4, "three passes for throughput, one for percentiles");
        assert_eq!((record.events, record.operations, record.ooms), (1000, 1000, 0));
        assert!(record.pass_min_ns <= record.pass_median_ns && record.pass_median_ns <= record.pass_max_ns);
        let samples = record.alloc_samples + record.free_samples;
        let expected = 1000 / u64::from(SAMPLED_ONE_IN);
        assert!((expected / 2..=expected * 2).contains(&samples), "{samples}");
        assert!(record.alloc_p50_ns <= record.alloc_p99_ns && record.alloc_p99_ns <= record.alloc_max_ns);
        assert_eq!(record.clock, Some(Clock::Wall));
        let mut passes = record.passes_ns();
        passes.sort_unstable();
        assert_eq!(passes.len(), 3);
        assert_eq!((passes[0], passes[1], passes[2]), (record.pass_min_ns, record.pass_median_ns, record.pass_max_ns));
    }

    #[test]
    fn what_breaks_in_a_pass_is_returned() {
        let mut story = TraceBuilder::new();
        story.device_sync();
        let outcome = time(&CaseLabel::default(), &story.finish("w"), fresh, &replay::ReplayOptions::default(), 1);
        assert!(matches!(outcome, Err(ReplayError::Device { event: 0, .. })), "{outcome:?}");
    }
}

//! Wall-clock times, for cases that are marked timed and run alone. The only file of this room whose numbers differ
//! from run to run; they go to `timings.csv` and nowhere else.
//!
//! Throughput comes from passes that nobody watches. Percentiles come from one more pass in which some operations are
//! timed: reading the clock costs as much as a cache hit, so that pass is slower, and what reading the clock costs is
//! measured and stated beside its percentiles, which still contain it.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{CaseLabel, SCHEMA, latency::Durations};
use crate::{
    device::{Clock, Device},
    replay::{self, Live, Moment, Observer, OutOfMemory, ReplayError, Replayed, replay},
    strategy::{Context, EventSink, Freed, Outcome, Silent, Strategy, StrategyEvent},
    trace::{Op, Source},
    unit::Nanos,
};

/// One operation in this many is timed, on average.
pub const SAMPLED_ONE_IN: u32 = 16;
/// How often the clock is read to find out what reading it costs.
const TIMER_READINGS: usize = 1001;

/// One row of `timings.csv`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Always the wall clock.
    pub clock: Option<Clock>,
    /// Passes that nobody watched.
    pub passes: u32,
    /// Events of one pass.
    pub events: u64,
    /// Allocations served and blocks given back in one pass.
    pub operations: u64,
    /// Requests that failed in one pass.
    pub ooms: u64,
    /// The fastest pass.
    pub pass_min_ns: u64,
    /// The median pass.
    pub pass_median_ns: u64,
    /// The slowest pass.
    pub pass_max_ns: u64,
    /// In the median pass; reading the source is part of it.
    pub operations_per_second: f64,
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

/// A strategy and the device it runs on, neither of them used before.
pub type Fresh = (Box<dyn Strategy>, Box<dyn Device>);

/// Times a case: `passes` passes that nobody watches (at least one), then a sampled one, each on a fresh strategy and
/// device from `make`. A source in memory keeps the cost of generating or parsing out of the figures.
pub fn time<E: From<ReplayError>>(
    label: &CaseLabel,
    source: &dyn Source,
    mut make: impl FnMut() -> Result<Fresh, E>,
    options: &replay::Options<'_>,
    passes: u32,
) -> Result<TimingRecord, E> {
    let mut unwatched = Vec::new();
    for _ in 0..passes.max(1) {
        unwatched.push(pass(source, make()?, options, &mut Unwatched)?);
    }
    unwatched.sort_by_key(|pass| pass.wall);
    let median = &unwatched[unwatched.len() / 2];

    let mut sampler = Sampler::default();
    pass(source, make()?, options, &mut sampler)?;

    let quantile = |durations: &Durations, share| durations.quantile(share).map(|time: Nanos| time.0);
    Ok(TimingRecord {
        schema: SCHEMA,
        case_id: label.case_id(),
        suite: label.suite.clone(),
        workload: label.workload.clone(),
        strategy: label.strategy.clone(),
        device: label.device.clone(),
        clock: Some(Clock::Wall),
        passes: passes.max(1),
        events: median.replayed.events,
        operations: median.operations,
        ooms: median.replayed.ooms,
        pass_min_ns: unwatched[0].wall.0,
        pass_median_ns: median.wall.0,
        pass_max_ns: unwatched[unwatched.len() - 1].wall.0,
        operations_per_second: median.operations as f64 * 1e9 / median.wall.0.max(1) as f64,
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
    })
}

struct Pass {
    wall: Nanos,
    replayed: Replayed,
    operations: u64,
}

fn pass<O: Observer>(
    source: &dyn Source,
    (mut strategy, mut device): Fresh,
    options: &replay::Options<'_>,
    observer: &mut O,
) -> Result<Pass, ReplayError> {
    let began = Instant::now();
    let replayed = replay(source, &mut *strategy, &mut *device, options, observer)?;
    let wall = elapsed(began);
    let operations = strategy.stats().allocs + strategy.stats().frees;
    strategy
        .close(&mut Context { device: &mut *device, sink: &mut Silent })
        .map_err(|source| ReplayError::Strategy { event: replayed.events, source })?;
    Ok(Pass { wall, replayed, operations })
}

fn elapsed(since: Instant) -> Nanos {
    Nanos(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// The median of what two readings of the clock in a row show.
fn timer_cost() -> Nanos {
    let mut readings: Vec<Nanos> = (0..TIMER_READINGS).map(|_| elapsed(Instant::now())).collect();
    readings.sort_unstable();
    readings[TIMER_READINGS / 2]
}

/// Compiles to nothing.
struct Unwatched;

impl EventSink for Unwatched {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for Unwatched {}

/// Times some operations. The gaps between them are irregular, so that a workload with a period of its own is not met
/// at the same place every time.
#[derive(Default)]
struct Sampler {
    gap: u32,
    state: u64,
    began: Option<Instant>,
    allocs: Durations,
    frees: Durations,
}

impl Sampler {
    /// Between 1 and twice the average, from a linear congruential generator: cheap, and fair enough here.
    fn next_gap(&mut self) -> u32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (self.state >> 33) as u32 % (2 * SAMPLED_ONE_IN - 1)
    }
}

impl EventSink for Sampler {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for Sampler {
    fn before(&mut self, now: &Moment<'_>) {
        if !matches!(now.event.op, Op::Alloc { .. } | Op::Free { .. }) {
            return;
        }
        if self.gap == 0 {
            self.gap = self.next_gap();
            self.began = Some(Instant::now());
        }
        self.gap -= 1;
    }

    fn served(&mut self, _: &Moment<'_>, _: &Live, _: Outcome) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn out_of_memory(&mut self, _: &Moment<'_>, _: &OutOfMemory) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn freed(&mut self, _: &Moment<'_>, _: &Live, _: Freed) {
        if let Some(began) = self.began.take() {
            self.frees.note(elapsed(began));
        }
    }

    fn after(&mut self, _: &Moment<'_>) {
        // A free whose block was never served: nothing happened that could be timed.
        self.began = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::fixture::{Shelf, TinyDevice},
        trace::TraceBuilder,
        unit::{KIB, StreamId, TagId},
    };

    fn fresh() -> Result<Fresh, ReplayError> {
        Ok((Box::new(Shelf::default()), Box::new(TinyDevice::new(64 * KIB))))
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
        let record = time(&label, &story.finish("w"), make, &replay::Options::default(), 3).unwrap();
        assert_eq!(made, 4, "three passes for throughput, one for percentiles");
        assert_eq!((record.events, record.operations, record.ooms), (1000, 1000, 0));
        assert!(record.pass_min_ns <= record.pass_median_ns && record.pass_median_ns <= record.pass_max_ns);
        let samples = record.alloc_samples + record.free_samples;
        let expected = 1000 / u64::from(SAMPLED_ONE_IN);
        assert!((expected / 2..=expected * 2).contains(&samples), "{samples}");
        assert!(record.alloc_p50_ns <= record.alloc_p99_ns && record.alloc_p99_ns <= record.alloc_max_ns);
        assert_eq!(record.clock, Some(Clock::Wall));
    }

    #[test]
    fn what_breaks_in_a_pass_is_returned() {
        let mut story = TraceBuilder::new();
        story.device_sync();
        let outcome = time(&CaseLabel::default(), &story.finish("w"), fresh, &replay::Options::default(), 1);
        assert!(matches!(outcome, Err(ReplayError::Device { event: 0, .. })), "{outcome:?}");
    }
}

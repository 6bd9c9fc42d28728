//! Driver time: of each operation by how it ended, and of all driver calls by kind.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    base::Nanos,
    device::{CallKind, CallLedger, CallTally},
    replay::{FailedRequest, LiveBlock, Observer, ReplayMoment},
    strategy::{EventSink, Freed, Outcome},
    trace::Op,
};

/// Percentiles are right to this many digits.
const SIGNIFICANT_DIGITS: u8 = 3;
/// Longer operations than this (1,000 s) count as this long, except in the exact maximum.
const LONGEST_NS: u64 = 1_000_000_000_000;

/// An operation on a strategy, by how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// A request served by a whole cached block.
    Hit,
    /// A request cut from a larger cached block.
    Split,
    /// A request served by new memory.
    NewSegment,
    /// A request served by new memory after cached memory was given back.
    ReleaseAndRetry,
    /// A request that failed.
    Oom,
    /// A block given back.
    Free,
}

impl Operation {
    /// Every operation, in declaration order.
    pub const ALL: [Operation; 6] = [
        Operation::Hit,
        Operation::Split,
        Operation::NewSegment,
        Operation::ReleaseAndRetry,
        Operation::Oom,
        Operation::Free,
    ];
}

impl From<Outcome> for Operation {
    fn from(outcome: Outcome) -> Operation {
        match outcome {
            Outcome::Hit => Operation::Hit,
            Outcome::Split => Operation::Split,
            Outcome::NewSegment => Operation::NewSegment,
            Outcome::ReleaseAndRetry => Operation::ReleaseAndRetry,
        }
    }
}

/// Durations in fixed memory: percentiles to three digits, count, sum and maximum exact.
#[derive(Clone, Debug, Default)]
pub struct Durations {
    /// Made with the first duration: most runs never see most outcomes, and each histogram takes some 250 KiB.
    histogram: Option<Histogram<u64>>,
    count: u64,
    total: Nanos,
    max: Nanos,
}

impl Durations {
    /// Notes one duration.
    #[inline]
    pub fn note(&mut self, time: Nanos) {
        self.count += 1;
        self.total += time;
        self.max = self.max.max(time);
        if self.histogram.is_none() {
            self.histogram = Histogram::new_with_bounds(1, LONGEST_NS, SIGNIFICANT_DIGITS).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(time.0);
        }
    }

    /// Adds the durations of another collection.
    pub fn absorb(&mut self, other: &Durations) {
        self.count += other.count;
        self.total += other.total;
        self.max = self.max.max(other.max);
        match (&mut self.histogram, &other.histogram) {
            // Both have the same bounds, so that there is nothing to refuse.
            (Some(histogram), Some(more)) => {
                let _ = histogram.add(more);
            }
            (histogram @ None, Some(more)) => *histogram = Some(more.clone()),
            (_, None) => {}
        }
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The duration that a share `quantile` (0 to 1) of all durations does not exceed.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<Nanos> {
        let histogram = self.histogram.as_ref()?;
        // The histogram answers with the upper edge of a bucket, which may lie above the longest duration seen.
        Some(Nanos(histogram.value_at_quantile(quantile)).min(self.max))
    }

    /// The longest.
    #[must_use]
    pub fn max(&self) -> Option<Nanos> {
        (self.count > 0).then_some(self.max)
    }

    /// Upper edge and count of every bucket that is not empty.
    fn buckets(&self) -> Vec<(u64, u64)> {
        let Some(histogram) = &self.histogram else { return Vec::new() };
        histogram
            .iter_recorded()
            .map(|bucket| (bucket.value_iterated_to().min(self.max.0), bucket.count_since_last_iteration()))
            .collect()
    }
}

/// The durations of one operation, as case files keep them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyHistogram {
    /// Which operation.
    pub operation: Operation,
    /// How often.
    pub count: u64,
    /// All durations together.
    pub total_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Upper edge in nanoseconds and count of every bucket that is not empty, in ascending order.
    pub buckets: Vec<(u64, u64)>,
}

/// Watches the driver time of every operation. The strategy's own code takes no time on a virtual clock.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    began: Nanos,
    durations: [Durations; Operation::ALL.len()],
}

impl Latency {
    /// The durations of one operation.
    #[must_use]
    pub fn of(&self, operation: Operation) -> &Durations {
        &self.durations[operation as usize]
    }

    /// The operations that occurred.
    #[must_use]
    pub fn histograms(&self) -> Vec<LatencyHistogram> {
        Operation::ALL
            .into_iter()
            .map(|operation| (operation, self.of(operation)))
            .filter(|(_, durations)| durations.count > 0)
            .map(|(operation, durations)| LatencyHistogram {
                operation,
                count: durations.count,
                total_ns: durations.total.0,
                max_ns: durations.max.0,
                buckets: durations.buckets(),
            })
            .collect()
    }

    #[inline]
    fn note(&mut self, now: &ReplayMoment<'_>, operation: Operation) {
        self.durations[operation as usize].note(now.device.calls().time.since(self.began));
    }
}

impl EventSink for Latency {}

impl Observer for Latency {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        if matches!(now.event.op, Op::Alloc { .. } | Op::Free { .. }) {
            self.began = now.device.calls().time;
        }
    }

    fn served(&mut self, now: &ReplayMoment<'_>, _: &LiveBlock, outcome: Outcome) {
        self.note(now, outcome.into());
    }

    fn freed(&mut self, now: &ReplayMoment<'_>, _: &LiveBlock, _: Freed) {
        self.note(now, Operation::Free);
    }

    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, _: &FailedRequest) {
        self.note(now, Operation::Oom);
    }
}

/// One kind of driver call over a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCalls {
    /// Which call.
    pub call: CallKind,
    /// How often, failed ones included.
    pub count: u64,
    /// How often it failed.
    pub failures: u64,
    /// Time inside it.
    pub time_ns: u64,
}

/// The kinds that were called at all.
#[must_use]
pub(super) fn calls_by_kind(ledger: &CallLedger) -> Vec<DriverCalls> {
    ledger
        .iter()
        .map(|(call, CallTally { count, failures, time })| DriverCalls { call, count, failures, time_ns: time.0 })
        .collect()
}

/// The parts of the driver that have columns of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverPart {
    /// `cuMemAlloc`.
    Alloc,
    /// `cuMemFree`.
    Free,
    /// Waiting for streams, events or the device.
    Synchronize,
    /// Making, recording, querying and destroying events.
    Event,
    /// Reserving, creating, mapping and their opposites.
    Mapping,
    /// The driver's own stream-ordered pools.
    Pool,
    /// Everything else: streams, memory info, host memory, launches.
    Other,
}

impl DriverPart {
    /// The part that a call belongs to.
    #[must_use]
    pub const fn of(call: CallKind) -> DriverPart {
        match call {
            CallKind::MemAlloc => DriverPart::Alloc,
            CallKind::MemFree => DriverPart::Free,
            CallKind::StreamSynchronize | CallKind::CtxSynchronize | CallKind::EventSynchronize => {
                DriverPart::Synchronize
            }
            CallKind::EventCreate | CallKind::EventRecord | CallKind::EventQuery | CallKind::EventDestroy => {
                DriverPart::Event
            }
            CallKind::AddressReserve
            | CallKind::AddressFree
            | CallKind::MemCreate
            | CallKind::MemRelease
            | CallKind::MemMap
            | CallKind::MemSetAccess
            | CallKind::MemUnmap => DriverPart::Mapping,
            CallKind::PoolCreate
            | CallKind::PoolDestroy
            | CallKind::PoolSetAttribute
            | CallKind::PoolGetAttribute
            | CallKind::PoolTrim
            | CallKind::MemAllocAsync
            | CallKind::MemFreeAsync => DriverPart::Pool,
            CallKind::MemGetInfo
            | CallKind::StreamCreate
            | CallKind::StreamWaitEvent
            | CallKind::HostAlloc
            | CallKind::HostFree
            | CallKind::Launch => DriverPart::Other,
        }
    }

    /// All calls of this part.
    #[must_use]
    pub fn tally(self, ledger: &CallLedger) -> CallTally {
        ledger.iter().filter(|(call, _)| DriverPart::of(*call) == self).fold(CallTally::default(), |sum, (_, tally)| {
            CallTally {
                count: sum.count + tally.count,
                failures: sum.failures + tally.failures,
                time: sum.time + tally.time,
            }
        })
    }
}

#[cfg(test)]
mod latency_tests {
    use super::*;

    #[test]
    fn percentiles_have_three_digits() {
        let mut durations = Durations::default();
        assert_eq!((durations.quantile(0.5), durations.max()), (None, None));
        (1..=1000).for_each(|ns| durations.note(Nanos(ns * 1_000)));
        let median = durations.quantile(0.5).unwrap().0 as f64;
        assert!((median / 500_000.0 - 1.0).abs() < 0.001, "{median}");
        assert_eq!(durations.quantile(1.0), Some(Nanos(1_000_000)));
        assert_eq!(durations.max(), Some(Nanos(1_000_000)));
    }

    #[test]
    fn durations_of_several_watchers_add_up() {
        let (mut low, mut high, mut all) = (Durations::default(), Durations::default(), Durations::default());
        (1..=500).for_each(|ns| low.note(Nanos(ns)));
        (501..=1000).for_each(|ns| high.note(Nanos(ns)));
        all.absorb(&low);
        all.absorb(&Durations::default());
        all.absorb(&high);
        assert_eq!((all.count(), all.max()), (1000, Some(Nanos(1000))));
        assert_eq!((all.quantile(0.25), all.quantile(1.0)), (Some(Nanos(250)), Some(Nanos(1000))));
    }

    #[test]
    fn operations_that_cost_nothing_count_too() {
        let mut durations = Durations::default();
        durations.note(Nanos::ZERO);
        durations.note(Nanos(2 * LONGEST_NS));
        assert_eq!(durations.quantile(0.5), Some(Nanos::ZERO));
        assert_eq!(durations.max(), Some(Nanos(2 * LONGEST_NS)));
        assert_eq!(durations.buckets().iter().map(|bucket| bucket.1).sum::<u64>(), 2);
    }
}

#[cfg(test)]
mod driver_tests {
    use super::*;
    use crate::base::Nanos;

    #[test]
    fn the_parts_sum_to_the_whole() {
        let mut ledger = CallLedger::default();
        for (place, &call) in CallKind::ALL.iter().enumerate() {
            ledger.note(call, Nanos(1 << place), place % 2 == 0);
        }
        let parts = [
            DriverPart::Alloc,
            DriverPart::Free,
            DriverPart::Synchronize,
            DriverPart::Event,
            DriverPart::Mapping,
            DriverPart::Pool,
            DriverPart::Other,
        ];
        let tallies = parts.map(|part| part.tally(&ledger));
        assert_eq!(tallies.iter().map(|tally| tally.time).sum::<Nanos>(), ledger.total().time);
        assert_eq!(tallies.iter().map(|tally| tally.count).sum::<u64>(), CallKind::ALL.len() as u64);
        assert_eq!(calls_by_kind(&ledger).len(), CallKind::ALL.len());
    }
}

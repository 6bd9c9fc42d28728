//! Driver time: of each operation by how it ended, and of all driver calls by kind.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{
    base::Nanos,
    device::{CallKind, CallLedger, CallTally},
    replay::ReplayMoment,
    strategy::Outcome,
};

/// Percentiles are right to this many digits.
const SIGNIFICANT_DIGITS: u8 = 3;
/// Longer operations than this (1,000 s) count as this long, except in the exact maximum.
const LONGEST_NS: u64 = 1_000_000_000_000;

oomph_base::named_enum! {
    /// An operation on a strategy, by how it ended.
    pub enum Operation {
        /// A request served by a whole cached block.
        Hit = "hit",
        /// A request cut from a larger cached block.
        Split = "split",
        /// A request served by new memory.
        NewSegment = "new_segment",
        /// A request served by new memory after cached memory was given back.
        ReleaseAndRetry = "release_and_retry",
        /// A request that failed.
        Oom = "oom",
        /// A block given back.
        Free = "free",
    }
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
    total: Nanos,
    max: Nanos,
}

impl Durations {
    /// Notes one duration.
    #[inline]
    pub fn note(&mut self, time: Nanos) {
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
        self.histogram.as_ref().map_or(0, Histogram::len)
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
        self.histogram.as_ref().map(|_| self.max)
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

/// The driver time of every operation. The strategy's own code takes no time on a virtual clock.
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
            .filter(|(_, durations)| durations.count() > 0)
            .map(|(operation, durations)| LatencyHistogram {
                operation,
                count: durations.count(),
                total_ns: durations.total.0,
                max_ns: durations.max.0,
                buckets: durations.buckets(),
            })
            .collect()
    }

    /// An operation begins.
    #[inline]
    pub(super) fn begin(&mut self, now: &ReplayMoment<'_>) {
        self.began = now.device.calls().time;
    }

    /// It is over.
    #[inline]
    pub(super) fn note(&mut self, now: &ReplayMoment<'_>, operation: Operation) {
        self.durations[operation as usize].note(now.device.calls().time.since(self.began));
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

/// Waiting for streams, events or the device.
pub(super) const SYNCHRONIZE: &[CallKind] =
    &[CallKind::StreamSynchronize, CallKind::CtxSynchronize, CallKind::EventSynchronize];
/// Making, recording, querying and destroying events.
pub(super) const EVENT: &[CallKind] =
    &[CallKind::EventCreate, CallKind::EventRecord, CallKind::EventQuery, CallKind::EventDestroy];
/// Reserving, creating, mapping and their opposites.
pub(super) const MAPPING: &[CallKind] = &[
    CallKind::AddressReserve,
    CallKind::AddressFree,
    CallKind::MemCreate,
    CallKind::MemRelease,
    CallKind::MemMap,
    CallKind::MemSetAccess,
    CallKind::MemUnmap,
];
/// The driver's own stream-ordered pools.
pub(super) const POOL: &[CallKind] = &[
    CallKind::PoolCreate,
    CallKind::PoolDestroy,
    CallKind::PoolSetAttribute,
    CallKind::PoolGetAttribute,
    CallKind::PoolTrim,
    CallKind::MemAllocAsync,
    CallKind::MemFreeAsync,
];

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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_call_has_one_place() {
        let one = [CallKind::MemAlloc, CallKind::MemFree];
        let other = [
            CallKind::MemGetInfo,
            CallKind::StreamCreate,
            CallKind::StreamWaitEvent,
            CallKind::HostAlloc,
            CallKind::HostFree,
            CallKind::Launch,
        ];
        let all = [&one, SYNCHRONIZE, EVENT, MAPPING, POOL, &other].concat();
        assert_eq!(all.len(), CallKind::ALL.len());
        assert_eq!(all.iter().map(|call| call.name()).collect::<BTreeSet<_>>().len(), CallKind::ALL.len());
    }
}

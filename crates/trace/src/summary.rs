//! The summary of a trace, which `inspect` shows first.

use serde::{Serialize, Serializer};

use super::{Event, MarkKind, Op, OpKind, Tables, TracedBlock, failed_when_recorded};
use oomph_base::{FileText, Nanos};

/// The most values of memory over time in a summary.
const MOST_LEVELS: usize = 256;

/// The numbers of a trace. Bytes are requested bytes: an allocator needs more, which a replay shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TraceSummary {
    /// Events of all kinds.
    pub events: u64,
    /// Events by kind, in the order of [`OpKind::ALL`]; kinds that do not occur are left out.
    pub by_kind: Vec<(OpKind, u64)>,
    /// Sum of all requests for device memory.
    pub requested_bytes: u64,
    /// The largest request for device memory.
    pub largest_request: u64,
    /// The peak of live device memory, without requests that failed when recorded.
    pub peak: MemoryPeak,
    /// Requests that failed when recorded.
    pub failed: FailedRequests,
    /// The peak of live device bytes in each of up to 256 equal ranges of events; the last range may be shorter.
    pub live_over_time: Vec<u64>,
    /// The lowest live device bytes in each of these ranges.
    pub lowest_over_time: Vec<u64>,
    /// The peak of live pinned host memory.
    pub host_peak: MemoryPeak,
    /// Requests for device memory by size.
    pub sizes: PowerHistogram,
    /// Freed device blocks by the number of events between request and free.
    pub lifetimes: PowerHistogram,
    /// Marked steps.
    pub steps: u64,
    /// Marked micro-batches.
    pub micro_batches: u64,
    /// Names of the phases, in order of first appearance.
    pub phases: Vec<FileText>,
    /// Host threads with events.
    pub threads: usize,
    /// Streams with events.
    pub streams: usize,
    /// Device blocks alive at the end.
    pub live_blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Host buffers alive at the end.
    pub host_live_blocks: u64,
    /// Their bytes.
    pub host_live_bytes: u64,
    /// Time from the first event to the last.
    pub span: Nanos,
}

impl TraceSummary {
    /// The number of events of a kind.
    #[must_use]
    pub fn count(&self, kind: OpKind) -> u64 {
        self.by_kind.iter().find(|(counted, _)| *counted == kind).map_or(0, |&(_, count)| count)
    }
}

/// The largest amount of live memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPeak {
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks at that event.
    pub blocks: u64,
    /// The event that first reached it, from 0.
    pub event: u64,
}

/// Requests that failed when they were recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FailedRequests {
    /// How many.
    pub requests: u64,
    /// The largest of them.
    pub largest_bytes: u64,
}

/// A histogram of blocks by power of two of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerHistogram {
    /// Index 0 counts zeros, index `p` the values from 2^(p-1) to 2^p - 1.
    counts: [u64; 65],
    /// The bytes of the blocks in each.
    bytes: [u64; 65],
}

impl Default for PowerHistogram {
    fn default() -> Self {
        PowerHistogram { counts: [0; 65], bytes: [0; 65] }
    }
}

/// The values from one power of two to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HistogramBucket {
    /// The smallest value of the bucket.
    pub from: u64,
    /// The largest value of the bucket.
    pub to: u64,
    /// The number of values.
    pub count: u64,
    /// The bytes of their blocks.
    pub bytes: u64,
}

impl PowerHistogram {
    /// Counts the value of one block.
    pub fn record(&mut self, value: u64, block_bytes: u64) {
        let place = (u64::BITS - value.leading_zeros()) as usize;
        self.counts[place] += 1;
        self.bytes[place] = self.bytes[place].saturating_add(block_bytes);
    }

    /// The number of all values.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets that are not empty, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = HistogramBucket> + '_ {
        let places = (0..self.counts.len()).filter(|&place| self.counts[place] > 0);
        places.map(|place| {
            let (from, to) = if place == 0 { (0, 0) } else { (1 << (place - 1), u64::MAX >> (64 - place)) };
            HistogramBucket { from, to, count: self.counts[place], bytes: self.bytes[place] }
        })
    }

    /// The bucket of a quantile: 0.5 for the median.
    ///
    /// ```
    /// let mut sizes = oomph_trace::PowerHistogram::default();
    /// [512, 600, 700, 5_000].map(|bytes| sizes.record(bytes, bytes));
    /// let median = sizes.quantile(0.5).unwrap();
    /// assert_eq!((median.from, median.to), (512, 1023));
    /// ```
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<HistogramBucket> {
        let wanted = ((self.total() as f64 * share).ceil() as u64).max(1);
        let mut passed = 0;
        self.buckets().find(|bucket| {
            passed += bucket.count;
            passed >= wanted
        })
    }
}

impl Serialize for PowerHistogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.buckets())
    }
}

/// Counts events for a summary.
#[derive(Default)]
pub(crate) struct SummaryCounter {
    summary: TraceSummary,
    kinds: [u64; OpKind::ALL.len()],
    device: LiveMemory,
    host: LiveMemory,
    /// The event of the latest request that failed when recorded. It is freed at once.
    failed_at: Option<u64>,
    levels: RangeExtremes,
    threads_seen: Vec<bool>,
    streams_seen: Vec<bool>,
    labels_seen: Vec<bool>,
}

impl SummaryCounter {
    /// Counts a checked event, with the block that the checker found.
    pub(crate) fn count(&mut self, event: &Event, block: Option<TracedBlock>, tables: &Tables) {
        let index = self.summary.events;
        self.summary.events += 1;
        self.summary.span += event.delta();
        self.kinds[event.op.kind() as usize] += 1;
        mark(&mut self.threads_seen, event.thread.index());
        match event.op {
            Op::Alloc { bytes, stream, site, .. } => {
                mark(&mut self.streams_seen, stream.index());
                let summary = &mut self.summary;
                if tables.sites().get(site.index()).is_some_and(failed_when_recorded) {
                    self.failed_at = Some(index);
                    summary.failed.requests += 1;
                    summary.failed.largest_bytes = summary.failed.largest_bytes.max(bytes);
                } else {
                    self.device.add(bytes, index);
                }
                summary.requested_bytes = summary.requested_bytes.saturating_add(bytes);
                summary.largest_request = summary.largest_request.max(bytes);
                summary.sizes.record(bytes, bytes);
            }
            Op::HostAlloc { bytes, .. } => self.host.add(bytes, index),
            Op::Free { stream, .. } => {
                mark(&mut self.streams_seen, stream.index());
                if let Some(block) = block.filter(|block| Some(block.born) != self.failed_at) {
                    self.device.remove(block.bytes);
                    self.summary.lifetimes.record(index - block.born, block.bytes);
                }
            }
            Op::HostFree { .. } => {
                if let Some(TracedBlock { bytes, .. }) = block {
                    self.host.remove(bytes);
                }
            }
            Op::Use { stream, .. }
            | Op::EventRecord { stream, .. }
            | Op::EventWait { stream, .. }
            | Op::StreamSync { stream }
            | Op::Work { stream, .. }
            | Op::Collective { stream, .. } => {
                mark(&mut self.streams_seen, stream.index());
            }
            Op::Mark { kind: MarkKind::Phase, label, .. } => {
                let name = &tables.labels()[label as usize];
                if mark(&mut self.labels_seen, label as usize) && !name.is_empty() {
                    self.summary.phases.push(name.clone());
                }
            }
            Op::Mark { kind: MarkKind::Step, .. } => self.summary.steps += 1,
            Op::Mark { kind: MarkKind::MicroBatch, .. } => self.summary.micro_batches += 1,
            Op::Idle { nanos } => self.summary.span += Nanos(nanos),
            Op::DeviceSync | Op::EmptyCache | Op::UsePool { .. } | Op::ReleasePool { .. } => {}
        }
        self.levels.push(clamped(self.device.bytes));
    }

    /// The summary of all events counted.
    pub(crate) fn finish(self) -> TraceSummary {
        let by_kind = OpKind::ALL.into_iter().zip(self.kinds).filter(|(_, count)| *count > 0).collect();
        TraceSummary {
            by_kind,
            peak: self.device.peak,
            live_over_time: self.levels.highest,
            lowest_over_time: self.levels.lowest,
            host_peak: self.host.peak,
            threads: self.threads_seen.iter().filter(|&&seen| seen).count(),
            streams: self.streams_seen.iter().filter(|&&seen| seen).count(),
            live_blocks: self.device.blocks,
            live_bytes: clamped(self.device.bytes),
            host_live_blocks: self.host.blocks,
            host_live_bytes: clamped(self.host.bytes),
            ..self.summary
        }
    }
}

/// Live memory of one kind, with its peak.
#[derive(Default)]
struct LiveMemory {
    /// Wider than any request, so that huge sizes cannot wrap the sum.
    bytes: u128,
    blocks: u64,
    peak: MemoryPeak,
}

impl LiveMemory {
    fn add(&mut self, bytes: u64, event: u64) {
        self.bytes += u128::from(bytes);
        self.blocks += 1;
        let bytes = clamped(self.bytes);
        if bytes > self.peak.bytes {
            self.peak = MemoryPeak { bytes, blocks: self.blocks, event };
        }
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes -= u128::from(bytes);
        self.blocks -= 1;
    }
}

/// The highest and the lowest value of equal ranges. Ranges double in length when there are too many of them.
#[derive(Default)]
struct RangeExtremes {
    highest: Vec<u64>,
    lowest: Vec<u64>,
    /// Items of a full range; 0 before the first item.
    length: u64,
    /// Items of the last range.
    filled: u64,
}

impl RangeExtremes {
    fn push(&mut self, level: u64) {
        match (self.highest.last_mut(), self.lowest.last_mut()) {
            (Some(highest), Some(lowest)) if self.filled < self.length => {
                (*highest, *lowest) = (level.max(*highest), level.min(*lowest));
            }
            _ => {
                if self.highest.len() == MOST_LEVELS {
                    self.highest = self.highest.chunks(2).map(|pair| pair[0].max(pair[pair.len() - 1])).collect();
                    self.lowest = self.lowest.chunks(2).map(|pair| pair[0].min(pair[pair.len() - 1])).collect();
                    self.length *= 2;
                }
                self.highest.push(level);
                self.lowest.push(level);
                self.length = self.length.max(1);
                self.filled = 0;
            }
        }
        self.filled += 1;
    }
}

/// Marks a number, and returns whether it is new.
fn mark(seen: &mut Vec<bool>, number: usize) -> bool {
    if number >= seen.len() {
        seen.resize(number + 1, false);
    }
    !std::mem::replace(&mut seen[number], true)
}

fn clamped(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_bounded_and_keep_their_extremes() {
        let mut levels = RangeExtremes::default();
        for level in 0..10_000 {
            levels.push(if level == 4_321 { 9 } else { 1 + level % 7 });
        }
        assert_eq!(levels.lowest.len(), levels.highest.len());
        assert_eq!(levels.lowest.iter().max(), Some(&1), "every range has a low point");
        assert!((MOST_LEVELS / 2..=MOST_LEVELS).contains(&levels.highest.len()), "{}", levels.highest.len());
        assert_eq!(levels.highest.iter().filter(|&&level| level == 9).count(), 1);
        assert_eq!(levels.highest.iter().position(|&level| level == 9), Some(4_321 / levels.length as usize));
    }

    #[test]
    fn every_value_is_in_its_bucket() {
        for value in [0, 1, 2, 3, 4, 511, 512, 1 << 40, u64::MAX] {
            let mut powers = PowerHistogram::default();
            powers.record(value, 5);
            let bucket = powers.buckets().next().unwrap();
            assert!(bucket.from <= value && value <= bucket.to, "{value} in {bucket:?}");
            assert!(bucket.to / 2 <= bucket.from, "{bucket:?}");
            assert_eq!((bucket.count, bucket.bytes), (1, 5));
        }
    }

    #[test]
    fn quantiles_of_an_empty_histogram_are_none() {
        assert_eq!(PowerHistogram::default().quantile(0.5), None);
        let mut powers = PowerHistogram::default();
        (0..10).for_each(|_| powers.record(1, 1));
        powers.record(1000, 1000);
        assert_eq!(powers.quantile(0.0).unwrap().from, 1);
        assert_eq!(powers.quantile(0.9).unwrap().from, 1);
        assert_eq!(powers.quantile(1.0).unwrap().from, 512);
    }

    #[test]
    fn huge_sizes_saturate() {
        let mut ledger = LiveMemory::default();
        ledger.add(u64::MAX, 0);
        ledger.add(u64::MAX, 1);
        ledger.remove(u64::MAX);
        ledger.remove(u64::MAX);
        assert_eq!((ledger.bytes, ledger.peak.bytes), (0, u64::MAX));
    }
}

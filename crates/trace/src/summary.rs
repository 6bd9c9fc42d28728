//! What is in a trace, in numbers: what `inspect` shows first.

use serde::{Serialize, Serializer};

use super::{Event, MarkKind, Op, OpKind, Resident, Tables};
use oomph_base::Nanos;

/// A summary tells memory over time in at most this many levels.
pub const MOST_LEVELS: usize = 256;

/// What is in a trace. Bytes are requested bytes: what an allocator makes of them is for replay to tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Events of all kinds.
    pub events: u64,
    /// Events by kind, in the order of [`OpKind::ALL`]; kinds that do not occur are left out.
    pub by_kind: Vec<(OpKind, u64)>,
    /// Device bytes asked for, all requests together.
    pub requested_bytes: u64,
    /// The largest request for device memory.
    pub largest_request: u64,
    /// Device memory at its fullest.
    pub peak: Peak,
    /// Most live device bytes of equal stretches of events, at most `MOST_LEVELS` of them; the last may be shorter.
    pub live_over_time: Vec<u64>,
    /// Pinned host memory at its fullest.
    pub host_peak: Peak,
    /// Requests for device memory, by size.
    pub sizes: Powers,
    /// Freed device blocks, by the number of events between request and free.
    pub lifetimes: Powers,
    /// Steps marked.
    pub steps: u64,
    /// Micro-batches marked.
    pub micro_batches: u64,
    /// Names of the phases, in order of first appearance.
    pub phases: Vec<String>,
    /// Host threads that did something.
    pub threads: usize,
    /// Streams that something happened on.
    pub streams: usize,
    /// Device blocks alive at the end.
    pub live_blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Host buffers alive at the end.
    pub host_live_blocks: u64,
    /// Their bytes.
    pub host_live_bytes: u64,
    /// From the first event to the last.
    pub span: Nanos,
}

impl Summary {
    /// How many events of a kind there are.
    #[must_use]
    pub fn count(&self, kind: OpKind) -> u64 {
        self.by_kind.iter().find(|(counted, _)| *counted == kind).map_or(0, |&(_, count)| count)
    }
}

/// Memory at its fullest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks at that moment.
    pub blocks: u64,
    /// The event that first reached it, from 0.
    pub event: u64,
}

/// A histogram by power of two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Powers {
    /// Place 0 counts zeros, place `p` the values from 2^(p-1) to 2^p - 1.
    counts: [u64; 65],
}

impl Default for Powers {
    fn default() -> Self {
        Powers { counts: [0; 65] }
    }
}

/// The values from one power of two to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// The smallest value that belongs here.
    pub from: u64,
    /// The largest value that belongs here.
    pub to: u64,
    /// How many there were.
    pub count: u64,
}

impl Powers {
    /// Counts one value.
    pub fn record(&mut self, value: u64) {
        self.counts[(u64::BITS - value.leading_zeros()) as usize] += 1;
    }

    /// How many values were counted.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets that hold something, smallest values first.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        self.counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(place, &count)| Self::bucket(place, count))
    }

    /// The bucket that holds the value which the given share of all values does not exceed: 0.5 for the median.
    ///
    /// ```
    /// let mut sizes = oomph_trace::Powers::default();
    /// [512, 600, 700, 5_000].map(|bytes| sizes.record(bytes));
    /// let median = sizes.quantile(0.5).unwrap();
    /// assert_eq!((median.from, median.to), (512, 1023));
    /// ```
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<Bucket> {
        let wanted = ((self.total() as f64 * share).ceil() as u64).max(1);
        let mut passed = 0;
        self.buckets().find(|bucket| {
            passed += bucket.count;
            passed >= wanted
        })
    }

    fn bucket(place: usize, count: u64) -> Bucket {
        match place {
            0 => Bucket { from: 0, to: 0, count },
            _ => Bucket { from: 1 << (place - 1), to: u64::MAX >> (64 - place), count },
        }
    }
}

impl Serialize for Powers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.buckets())
    }
}

/// A summary in the making.
#[derive(Default)]
pub(crate) struct Tally {
    summary: Summary,
    kinds: [u64; OpKind::ALL.len()],
    device: Ledger,
    host: Ledger,
    levels: Levels,
    threads_seen: Seen,
    streams_seen: Seen,
    labels_seen: Seen,
    phases: Vec<u32>,
}

impl Tally {
    /// Counts an event that was checked, with the block that the checker found for it.
    pub(crate) fn count(&mut self, event: &Event, resident: Option<Resident>) {
        let index = self.summary.events;
        self.summary.events += 1;
        self.summary.span += event.delta();
        self.kinds[event.op.kind() as usize] += 1;
        self.threads_seen.note(event.thread.index());
        match event.op {
            Op::Alloc { bytes, stream, .. } => {
                self.streams_seen.note(stream.index());
                self.device.add(bytes, index);
                let summary = &mut self.summary;
                summary.requested_bytes = summary.requested_bytes.saturating_add(bytes);
                summary.largest_request = summary.largest_request.max(bytes);
                summary.sizes.record(bytes);
            }
            Op::HostAlloc { bytes, .. } => self.host.add(bytes, index),
            Op::Free { stream, .. } => {
                self.streams_seen.note(stream.index());
                if let Some(resident) = resident {
                    self.device.remove(resident.bytes);
                    self.summary.lifetimes.record(index - resident.born);
                }
            }
            Op::HostFree { .. } => {
                if let Some(Resident { bytes, .. }) = resident {
                    self.host.remove(bytes);
                }
            }
            Op::Use { stream, .. }
            | Op::EventRecord { stream, .. }
            | Op::EventWait { stream, .. }
            | Op::StreamSync { stream }
            | Op::Work { stream, .. }
            | Op::Collective { stream, .. } => {
                self.streams_seen.note(stream.index());
            }
            Op::Mark { kind: MarkKind::Phase, label, .. } => {
                if self.labels_seen.note(label as usize) {
                    self.phases.push(label);
                }
            }
            Op::Mark { kind: MarkKind::Step, .. } => self.summary.steps += 1,
            Op::Mark { kind: MarkKind::MicroBatch, .. } => self.summary.micro_batches += 1,
            Op::Idle { nanos } => self.summary.span += Nanos(nanos),
            Op::DeviceSync | Op::EmptyCache => {}
        }
        self.levels.push(clamped(self.device.bytes));
    }

    /// The summary of all events counted; `tables` must be those of the whole trace.
    pub(crate) fn finish(self, tables: &Tables) -> Summary {
        let by_kind = OpKind::ALL.into_iter().zip(self.kinds).filter(|(_, count)| *count > 0).collect();
        let phases = self.phases.iter().filter_map(|&label| tables.labels().get(label as usize).cloned());
        let phases = phases.filter(|name| !name.is_empty()).collect();
        Summary {
            by_kind,
            phases,
            peak: self.device.peak,
            live_over_time: self.levels.highest,
            host_peak: self.host.peak,
            threads: self.threads_seen.count,
            streams: self.streams_seen.count,
            live_blocks: self.device.blocks,
            live_bytes: clamped(self.device.bytes),
            host_live_blocks: self.host.blocks,
            host_live_bytes: clamped(self.host.bytes),
            ..self.summary
        }
    }
}

/// Live memory of one place.
#[derive(Default)]
struct Ledger {
    /// Wider than any request, so that absurd sizes cannot wrap the sum.
    bytes: u128,
    blocks: u64,
    peak: Peak,
}

impl Ledger {
    fn add(&mut self, bytes: u64, event: u64) {
        self.bytes += u128::from(bytes);
        self.blocks += 1;
        let bytes = clamped(self.bytes);
        if bytes > self.peak.bytes {
            self.peak = Peak { bytes, blocks: self.blocks, event };
        }
    }

    fn remove(&mut self, bytes: u64) {
        self.bytes -= u128::from(bytes);
        self.blocks -= 1;
    }
}

/// The highest of equal stretches, which double in length whenever there are too many.
#[derive(Default)]
struct Levels {
    highest: Vec<u64>,
    /// Items of a full stretch; before the first one, none.
    length: u64,
    /// Items of the last stretch.
    filled: u64,
}

impl Levels {
    fn push(&mut self, level: u64) {
        match self.highest.last_mut() {
            Some(last) if self.filled < self.length => *last = level.max(*last),
            _ => {
                if self.highest.len() == MOST_LEVELS {
                    self.highest = self.highest.chunks(2).map(|pair| pair[0].max(pair[pair.len() - 1])).collect();
                    self.length *= 2;
                }
                self.highest.push(level);
                self.length = self.length.max(1);
                self.filled = 0;
            }
        }
        self.filled += 1;
    }
}

/// Which numbers occurred.
#[derive(Default)]
struct Seen {
    flags: Vec<bool>,
    count: usize,
}

impl Seen {
    /// Whether the number is new.
    fn note(&mut self, number: usize) -> bool {
        if number >= self.flags.len() {
            self.flags.resize(number + 1, false);
        }
        let new = !std::mem::replace(&mut self.flags[number], true);
        self.count += usize::from(new);
        new
    }
}

fn clamped(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_over_time_are_bounded_and_keep_the_highest() {
        let mut levels = Levels::default();
        for level in 0..10_000 {
            levels.push(if level == 4_321 { 9 } else { level % 7 });
        }
        assert!((MOST_LEVELS / 2..=MOST_LEVELS).contains(&levels.highest.len()), "{}", levels.highest.len());
        assert_eq!(levels.highest.iter().filter(|&&level| level == 9).count(), 1);
        assert_eq!(levels.highest.iter().position(|&level| level == 9), Some(4_321 / levels.length as usize));
    }

    #[test]
    fn every_value_falls_into_the_bucket_that_spans_it() {
        for value in [0, 1, 2, 3, 4, 511, 512, 1 << 40, u64::MAX] {
            let mut powers = Powers::default();
            powers.record(value);
            let bucket = powers.buckets().next().unwrap();
            assert!(bucket.from <= value && value <= bucket.to, "{value} in {bucket:?}");
            assert!(bucket.to / 2 <= bucket.from, "{bucket:?}");
        }
    }

    #[test]
    fn quantiles_of_nothing_are_nothing() {
        assert_eq!(Powers::default().quantile(0.5), None);
        let mut powers = Powers::default();
        (0..10).for_each(|_| powers.record(1));
        powers.record(1000);
        assert_eq!(powers.quantile(0.0).unwrap().from, 1);
        assert_eq!(powers.quantile(0.9).unwrap().from, 1);
        assert_eq!(powers.quantile(1.0).unwrap().from, 512);
    }

    #[test]
    fn absurd_sizes_saturate() {
        let mut ledger = Ledger::default();
        ledger.add(u64::MAX, 0);
        ledger.add(u64::MAX, 1);
        ledger.remove(u64::MAX);
        ledger.remove(u64::MAX);
        assert_eq!((ledger.bytes, ledger.peak.bytes), (0, u64::MAX));
    }
}

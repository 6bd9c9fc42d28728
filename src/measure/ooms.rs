//! Requests that failed: where the free memory was, and why it did not serve them.
//!
//! The obstacles follow from the layout of the strategy and from what it says was missing. For a strategy that shows no
//! layout, only the memory left on the device or under the limit is known.

use serde::{Deserialize, Serialize};

use crate::{
    base::{Bytes, FileText, round_up},
    replay::{FailedRequest, Observer, OomCause, ReplayMoment},
    strategy::{BlockState, BlockView, EventSink, Layout, Refusal, SegmentView},
};

/// Reports beyond this are only counted.
const MOST_REPORTS: usize = 100;

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomReport {
    /// Number of the event, from 0.
    pub event: u64,
    /// Its step.
    pub step: Option<u32>,
    /// Its phase.
    pub phase: Option<FileText>,
    /// Its call site, if known.
    pub site: Option<FileText>,
    /// The stream it was for.
    pub stream: u16,
    /// What was asked for.
    pub requested_bytes: u64,
    /// The same as the strategy rounds it.
    pub rounded_bytes: u64,
    /// What the strategy last asked of the device for it.
    pub asked_bytes: u64,
    /// Who refused.
    pub refused_by: Refusal,
    /// Free on the device, or up to the limit.
    pub device_free_bytes: u64,
    /// Held on the device in whole pages.
    #[serde(default)]
    pub device_held_bytes: u64,
    /// Free in the strategy's cache.
    pub cached_free_bytes: u64,
    /// The largest piece of that, where the strategy knows.
    pub largest_free_bytes: Option<u64>,
    /// True exhaustion or fragmentation.
    pub cause: OomCause,
    /// Where the free memory lay and why it did not serve, most first. Only known of the first failure.
    #[serde(default)]
    pub kept_back: Vec<UnusableMemory>,
}

impl OomReport {
    fn new(now: &ReplayMoment<'_>, report: &FailedRequest, kept_back: Vec<UnusableMemory>) -> OomReport {
        let name = |names: &[FileText], number: usize| names.get(number).filter(|name| !name.is_empty()).cloned();
        OomReport {
            event: report.event,
            step: report.step,
            phase: report.phase.and_then(|phase| name(now.tables.labels(), phase as usize)),
            site: name(now.tables.sites(), report.request.site.index()),
            stream: report.request.stream.0,
            requested_bytes: report.request.bytes,
            rounded_bytes: report.shortage.rounded,
            asked_bytes: report.shortage.asked,
            refused_by: report.shortage.refused_by,
            device_free_bytes: report.device_free,
            device_held_bytes: report.device_held,
            cached_free_bytes: report.cached_free,
            largest_free_bytes: report.largest_free,
            cause: report.cause,
            kept_back,
        }
    }

    /// One sentence: what was requested, what was free and where, and why that did not help.
    #[must_use]
    pub fn in_words(&self) -> String {
        let rounded = match self.asked_bytes.max(self.rounded_bytes) {
            asked if asked > self.requested_bytes => format!(" ({} of the device)", Bytes(asked)),
            _ => String::new(),
        };
        let largest = match self.largest_free_bytes {
            Some(largest) => format!(", largest cached block {}", Bytes(largest)),
            None => String::new(),
        };
        let free = self.device_free_bytes.saturating_add(self.cached_free_bytes);
        format!(
            "{} asked for{rounded}, {} free{largest}: {}; {}",
            Bytes(self.requested_bytes),
            Bytes(free),
            self.cause.name(),
            in_words(&self.kept_back),
        )
    }

    /// A sentence that the device had less than the limit allows, because it is smaller or others use it. `None` if the
    /// limit itself or the strategy refused.
    #[must_use]
    pub fn short_of_limit(&self, limit: u64, page_bytes: u64) -> Option<String> {
        let wanted = self.device_held_bytes.saturating_add(round_up(self.asked_bytes, page_bytes));
        (self.refused_by == Refusal::Device && wanted <= limit).then(|| {
            format!(
                "the device refused {} with {} held and {} free: it has less than the limit of {}",
                Bytes(self.asked_bytes),
                Bytes(self.device_held_bytes),
                Bytes(self.device_free_bytes),
                Bytes(limit)
            )
        })
    }
}

/// Watches requests fail.
#[derive(Clone, Debug, Default)]
pub struct OomRecorder {
    /// The first failed requests, in order.
    pub reports: Vec<OomReport>,
    /// How many more there were.
    pub left_out: u64,
    /// The memory at the first of them, where the strategy can show it.
    pub layout: Option<Layout>,
}

impl EventSink for OomRecorder {}

impl Observer for OomRecorder {
    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, report: &FailedRequest) {
        let mut kept_back = Vec::new();
        if self.reports.is_empty() {
            self.layout = now.strategy.layout();
            kept_back = obstacles(report, self.layout.as_ref());
        }
        if self.reports.len() == MOST_REPORTS {
            self.left_out += 1;
        } else {
            self.reports.push(OomReport::new(now, report, kept_back));
        }
    }
}

/// Why a free byte did not serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// Freed by its owner, but another stream may still use it: its events are pending.
    PendingEvents,
    /// In a segment of another stream.
    OtherStream,
    /// In a private pool, or large enough and yet in a pool or of a size that does not serve such requests.
    OtherPool,
    /// Too small, and in one segment with blocks in use, so that it cannot go back to the device either.
    SplitRemainder,
    /// Too small, a segment of its own.
    SmallSegment,
    /// On the device, within a limit that leaves less than was asked of it.
    Limit,
    /// On the device, which has less than was asked of it, or not in one piece.
    Device,
    /// The strategy never serves requests of this size.
    Size,
}

impl Obstacle {
    /// A phrase that follows an amount of memory.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Obstacle::PendingEvents => "freed but waiting for other streams",
            Obstacle::OtherStream => "cached for other streams",
            Obstacle::OtherPool => "cached in a pool that does not serve it",
            Obstacle::SplitRemainder => "in remainders between blocks in use",
            Obstacle::SmallSegment => "in cached segments that are too small",
            Obstacle::Limit => "left under the limit",
            Obstacle::Device => "left on the device",
            Obstacle::Size => "free, but no request of that size is served",
        }
    }
}

/// Free memory that one obstacle kept from a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusableMemory {
    /// Why.
    pub obstacle: Obstacle,
    /// How much in all.
    pub bytes: u64,
    /// The largest piece of it.
    pub largest_bytes: u64,
}

/// Where the free memory lay when a request failed, most first. Empty where nothing at all was free.
fn obstacles(report: &FailedRequest, layout: Option<&Layout>) -> Vec<UnusableMemory> {
    let mut kept: Vec<UnusableMemory> = Vec::new();
    let mut add = |obstacle: Obstacle, bytes: u64| {
        if bytes == 0 {
            return;
        }
        match kept.iter_mut().find(|known| known.obstacle == obstacle) {
            Some(known) => {
                known.bytes = known.bytes.saturating_add(bytes);
                known.largest_bytes = known.largest_bytes.max(bytes);
            }
            None => kept.push(UnusableMemory { obstacle, bytes, largest_bytes: bytes }),
        }
    };
    let refused_by = match report.shortage.refused_by {
        Refusal::Limit => Obstacle::Limit,
        Refusal::Device => Obstacle::Device,
        Refusal::Size => Obstacle::Size,
    };
    add(refused_by, report.device_free);
    for segment in layout.iter().flat_map(|layout| &layout.segments).filter(|segment| !segment.alias) {
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Allocated) {
            add(why(report, segment, block), block.size);
        }
    }
    kept.sort_by_key(|part| (std::cmp::Reverse(part.bytes), part.obstacle));
    kept
}

/// Why this block did not serve the request; the first reason that alone would do.
fn why(report: &FailedRequest, segment: &SegmentView, block: &BlockView) -> Obstacle {
    if block.state == BlockState::Pending {
        Obstacle::PendingEvents
    } else if segment.stream != report.request.stream {
        Obstacle::OtherStream
    } else if segment.pool_id != (0, 0) || block.size >= report.shortage.rounded {
        Obstacle::OtherPool
    } else if block.size < segment.bytes {
        Obstacle::SplitRemainder
    } else {
        Obstacle::SmallSegment
    }
}

/// The obstacles in one phrase: `1.20 GiB in remainders between blocks in use (largest 96.0 MiB), 20.0 MiB left under the
/// limit`.
#[must_use]
pub fn in_words(kept: &[UnusableMemory]) -> String {
    let part = |part: &UnusableMemory| {
        let largest = match part.largest_bytes < part.bytes {
            true => format!(" (largest {})", Bytes(part.largest_bytes)),
            false => String::new(),
        };
        format!("{} {}{largest}", Bytes(part.bytes), part.obstacle.words())
    };
    if kept.is_empty() { "nothing free".to_owned() } else { kept.iter().map(part).collect::<Vec<_>>().join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, MIB, StreamId, TagId},
        device::{
            Device,
            sim::{SimConfig, SimDevice},
            wrap::LimitedDevice,
        },
        measure::{
            fixture::{TinyStrategy, tiny_device},
            ooms::OomRecorder,
        },
        replay::{self, replay},
        strategy::{Setup, StrategySpec},
        trace::{Trace, TraceBuilder},
    };

    /// The obstacles of the first request that fails.
    fn first_failure(trace: &Trace, strategy: &str, limit: u64) -> Vec<(Obstacle, u64, u64)> {
        let mut device = LimitedDevice::to(limit, Box::new(SimDevice::new(SimConfig::default()).unwrap()));
        let setup = Setup { props: device.props(), limit: Some(limit) };
        let mut strategy = StrategySpec::from(strategy).build(&setup).unwrap();
        let mut ooms = OomRecorder::default();
        replay(trace, &mut *strategy, &mut device, &replay::ReplayOptions::default(), &mut ooms).unwrap();
        let report = ooms.reports.first().expect("something fails");
        report.kept_back.iter().map(|part| (part.obstacle, part.bytes / MIB, part.largest_bytes / MIB)).collect()
    }

    #[test]
    fn free_part_of_used_segment_is_a_remainder() {
        let mut builder = TraceBuilder::new();
        let large = builder.alloc(64 * MIB, StreamId::DEFAULT, TagId(0));
        builder.free(large);
        builder.alloc(40 * MIB, StreamId::DEFAULT, TagId(0)); // leaves 24 MiB of the 64
        builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0));
        let kept = first_failure(&builder.finish("remainder"), "caching", 80 * MIB);
        assert_eq!(kept, [(Obstacle::SplitRemainder, 24, 24), (Obstacle::Limit, 16, 16)]);
    }

    #[test]
    fn memory_of_another_stream_does_not_serve() {
        let mut builder = TraceBuilder::new();
        let side = builder.new_stream().unwrap();
        let large = builder.alloc(64 * MIB, side, TagId(0));
        builder.free(large);
        builder.alloc(20 * MIB, side, TagId(0));
        builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0));
        let kept = first_failure(&builder.finish("stream"), "caching", 64 * MIB);
        assert_eq!(kept, [(Obstacle::OtherStream, 44, 44)]);
    }

    #[test]
    fn a_small_request_gets_nothing_of_a_large_segment() {
        let mut builder = TraceBuilder::new();
        let large = builder.alloc(64 * MIB, StreamId::DEFAULT, TagId(0));
        builder.free(large);
        builder.alloc(40 * MIB, StreamId::DEFAULT, TagId(0));
        builder.alloc(1000, StreamId::DEFAULT, TagId(0));
        let kept = first_failure(&builder.finish("pool"), "caching", 64 * MIB);
        assert_eq!(kept, [(Obstacle::OtherPool, 24, 24)]);
    }

    #[test]
    fn pending_blocks_are_distinguished() {
        let mut builder = TraceBuilder::new();
        let shared = builder.alloc(1000, StreamId::DEFAULT, TagId(0));
        builder.use_on(shared, StreamId(1));
        builder.free(shared);
        builder.alloc(4000, StreamId::DEFAULT, TagId(0));
        let (mut strategy, mut device) = (TinyStrategy::default(), tiny_device(4 * KIB));
        let options = replay::ReplayOptions::default();
        let mut ooms = OomRecorder::default();
        replay(&builder.finish("pending"), &mut strategy, &mut device, &options, &mut ooms).unwrap();
        let kept: Vec<_> = ooms.reports[0].kept_back.iter().map(|part| (part.obstacle, part.bytes)).collect();
        assert_eq!(kept, [(Obstacle::Device, 3 * KIB), (Obstacle::PendingEvents, KIB)]);
    }

    #[test]
    fn words_name_the_amounts() {
        let kept = [
            UnusableMemory { obstacle: Obstacle::SplitRemainder, bytes: 24 * MIB, largest_bytes: 10 * MIB },
            UnusableMemory { obstacle: Obstacle::Limit, bytes: 16 * MIB, largest_bytes: 16 * MIB },
        ];
        let words = "24.0 MiB in remainders between blocks in use (largest 10.0 MiB), 16.0 MiB left under the limit";
        assert_eq!(in_words(&kept), words);
        assert_eq!(in_words(&[]), "nothing free");
    }
}

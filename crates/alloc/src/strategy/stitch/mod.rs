//! `stitch`: GMLake's answer to fragmentation: scattered free memory is mapped once more as one
//! range.
//!
//! Large segments are made of physical chunks. When no free tile is large enough for a large
//! request, the chunks of several tiles are mapped a second time, one after the other, into a range
//! of new addresses, and those tiles are lent to the range. A freed range is kept: it serves again
//! while all of its memory is free. Small requests are served as PyTorch serves them.
//!
//! The order of steps is GMLake's (see `alloc`): a free tile, a free range, a new range, new
//! memory, and memory that is given back to get it. Two settings of the PyTorch that GMLake patched
//! are not modelled, because both are off by default: `max_split_size_mb`, on which its release of
//! just enough cached blocks depends, and `garbage_collection_threshold`. Before memory is unmapped
//! its stream is synchronized, because the driver does not wait.

mod alloc;
mod ranges;
mod segments;
#[cfg(test)]
mod tests;

use self::{
    alloc::StitchPressure,
    ranges::{SegmentSpan, StitchedRanges},
    segments::{SegmentPool, SegmentTiles},
};
use super::{
    Attempt, Block, Built, Caller, Context, Freed, Layout, Parameter, Request, SegmentView, Setup, SpecError, Stats,
    Strategy, StrategyEntry, StrategyError,
    deferred::Patience,
    leftovers::MappingLeftovers,
    parameters, plain_state,
    pooled::{MemoryPiece, NONE, PieceState},
};
use crate::device::Capabilities;
use oomph_base::{Address, GIB, MIB, StreamId, round_up};

/// Small blocks are multiples of this.
const QUANTUM: u64 = 512;
/// Rounded requests up to this are small.
const SMALL_SIZE: u64 = MIB;
/// Segments of small requests.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Physical memory comes in chunks of this, or of the device's granularity if that is larger.
const CHUNK: u64 = 2 * MIB;
/// Large blocks below this share segments.
const OWN_SEGMENT: u64 = 10 * MIB;
/// Those segments.
const SHARED_SEGMENT: u64 = 20 * MIB;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "stitch",
    summary: "GMLake: free memory in several places is mapped once more as one range",
    origin: "GMLake (ASPLOS 2024), its allocator for PyTorch 2.0, with its thresholds",
    differs: &[
        "does not model max_split_size_mb and garbage_collection_threshold, which are off by default",
        "synchronizes the stream before memory is unmapped, because the driver does not wait",
    ],
    parameters: PARAMETERS,
    variants: &["fragLimit:4MiB", "fragLimit:2MiB,defragLevel:1,reuseLimit:2", "fragLimit:2MiB,reAlloc:1,autoGC:0"],
    build,
};

const PARAMETERS: &[Parameter] = &[
    Parameter::text("vmmDefragment", "0, 1", "1", "whether to stitch"),
    Parameter::text("fragLimit", "an amount of memory", "512MiB", "smaller requests are not served by stitching"),
    Parameter::text(
        "reuseLimit",
        "a count",
        "10",
        "how many times larger than the request a stitched range may be that serves it",
    ),
    Parameter::text(
        "defragLevel",
        "0, 1, 2",
        "0",
        "stitch before new memory is taken (0), when the device has no more (1), or as a last resort (2)",
    ),
    Parameter::text(
        "autoGC",
        "GiB",
        "1000",
        "unused stitched ranges are given back when all ranges have more addresses than this",
    ),
    Parameter::text("reAlloc", "0, 1", "0", "take only the memory that the free memory lacks, and stitch both"),
];

/// The parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StitchSettings {
    defragments: bool,
    fragment_limit: u64,
    reuse_limit: u64,
    level: u32,
    /// In bytes.
    collect_above: u64,
    takes_shortfall: bool,
}

impl StitchSettings {
    fn read(text: &str) -> Result<StitchSettings, SpecError> {
        let mut settings = StitchSettings::default();
        parameters::read_with_defaults(&ENTRY, text, |setting| {
            let switch = || match setting.number()? {
                0 => Ok(false),
                1 => Ok(true),
                other => Err(setting.refused(&format!("{other} is not 0 or 1"))),
            };
            match setting.key {
                "vmmDefragment" => settings.defragments = switch()?,
                "fragLimit" => settings.fragment_limit = setting.bytes()?,
                "reuseLimit" => settings.reuse_limit = setting.number()?,
                "defragLevel" => {
                    settings.level = setting.number()?;
                    if settings.level > 2 {
                        return Err(setting.refused(&format!("{} is not 0, 1 or 2", settings.level)));
                    }
                }
                "autoGC" => settings.collect_above = setting.number::<u64>()?.saturating_mul(GIB),
                _ => settings.takes_shortfall = switch()?,
            }
            Ok(())
        })?;
        Ok(settings)
    }
}

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    Ok(Box::new(Stitch::new(StitchSettings::read(parameters)?, setup)))
}

/// GMLake's allocator for one device.
#[derive(Clone, Debug)]
pub struct Stitch {
    settings: StitchSettings,
    chunk: u64,
    device_bytes: u64,
    tiles: SegmentTiles,
    ranges: StitchedRanges,
    leftovers: MappingLeftovers,
    counts: StitchCounts,
    stats: Stats,
}

/// Counters beside the common statistics.
#[derive(Clone, Copy, Debug, Default)]
struct StitchCounts {
    /// Ranges made.
    stitched: u64,
    /// Requests served by an existing range.
    reused: u64,
    /// Unused ranges given back.
    collected: u64,
    /// The most addresses that all ranges had.
    peak_range_bytes: u64,
}

impl Stitch {
    fn new(settings: StitchSettings, setup: &Setup<'_>) -> Stitch {
        let chunk = round_up(CHUNK, setup.props.granularity_bytes.max(1));
        Stitch::as_new(settings, chunk, setup.props.total_bytes)
    }

    fn as_new(settings: StitchSettings, chunk: u64, device_bytes: u64) -> Stitch {
        Stitch {
            settings,
            chunk,
            device_bytes,
            tiles: SegmentTiles::default(),
            ranges: StitchedRanges::default(),
            leftovers: MappingLeftovers::default(),
            counts: StitchCounts::default(),
            stats: Stats::default(),
        }
    }

    /// Makes the memory of a tile or of a range free.
    fn free_memory(&mut self, slot: u32) {
        if self.tiles[slot].region != NONE {
            self.free_tile(slot);
            return;
        }
        self.tiles[slot].state = PieceState::Free;
        let range = self.tiles[slot].note;
        self.ranges.note_freed(range);
        for tile in std::mem::take(&mut self.ranges[range].tiles) {
            self.free_tile(tile);
        }
    }

    fn free_tile(&mut self, slot: u32) {
        let span = SegmentSpan::of(&self.tiles[slot]);
        if let Some(segment) = self.tiles.segment(span.segment) {
            self.ranges.count_use(&segment.shown_in, &span, false);
        }
        self.tiles.release(slot);
    }

    /// Completes the frees whose streams are done.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let (completed, result) = self.tiles.completed(cx.device, patience);
        for slot in completed {
            self.tiles.report_completed(cx, &mut self.stats, slot);
            self.free_memory(slot);
        }
        Ok(result?)
    }
}

impl Strategy for Stitch {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        self.complete_frees(cx, Patience::Poll)?;
        let rounded = round_up(request.bytes, QUANTUM);
        if rounded <= SMALL_SIZE {
            self.alloc_small(cx, request, rounded)
        } else {
            self.alloc_large(cx, request, round_up(request.bytes, self.chunk))
        }
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let piece = self.tiles.live(&block)?;
        let (size, requested) = (piece.size, piece.requested);
        if piece.is_shared() {
            self.tiles.free_later(cx.device, block.slot)?;
            self.stats.on_free(size);
            return Ok(Freed::Later);
        }
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        self.free_memory(block.slot);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.tiles.note_use(block, stream, false)
    }

    plain_state!();

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_cached(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_everything(cx)?;
        *self = Stitch::as_new(self.settings, self.chunk, self.device_bytes);
        Ok(())
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let sizes = |pool| self.tiles.descending(pool, stream).map(|slot| self.tiles[slot].size);
        let tile = sizes(SegmentPool::Large).next().unwrap_or(0);
        let range = self.ranges.largest_free(stream).filter(|_| self.settings.reuse_limit > 0).unwrap_or(0);
        let together: u64 = sizes(SegmentPool::Large).sum();
        let stitched = if self.may_stitch(together, StitchPressure::None) { together } else { 0 };
        Some(match tile.max(range).max(stitched) {
            0 => sizes(SegmentPool::Small).next().unwrap_or(0).min(SMALL_SIZE),
            large => large,
        })
    }

    /// Segments and the ranges in use. An idle range has no memory of its own.
    fn layout(&self) -> Option<Layout> {
        let segments = self.tiles.segments().map(|(_, segment)| {
            let large = segment.pool == SegmentPool::Large;
            let blocks = self.tiles.of(segment).map(MemoryPiece::view).collect();
            let (address, pool) = (Address(segment.address), if large { "large" } else { "small" });
            SegmentView { mapped: large, ..SegmentView::new(address, segment.bytes, segment.stream, pool, blocks) }
        });
        let in_use = |piece: &&MemoryPiece| piece.region == NONE && piece.state != PieceState::Free;
        let ranges = self.tiles.iter().map(|(_, piece)| piece).filter(in_use).map(|piece| {
            let blocks = vec![piece.view()];
            let view = SegmentView::new(Address(piece.address), piece.size, piece.stream, "stitched", blocks);
            SegmentView { mapped: true, alias: true, ..view }
        });
        Some(Layout::of(segments.chain(ranges)))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("ranges_stitched", self.counts.stitched),
            ("ranges_reused", self.counts.reused),
            ("ranges_collected", self.counts.collected),
            ("range_bytes", self.ranges.bytes),
            ("peak_range_bytes", self.counts.peak_range_bytes),
        ]
    }

    fn requires(&self) -> Capabilities {
        Capabilities::VIRTUAL_MEMORY
    }
}

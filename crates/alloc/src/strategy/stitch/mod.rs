//! `stitch`: GMLake's answer to fragmentation: scattered free memory is mapped once more as one range.
//!
//! Large segments are made of physical chunks. When no free tile is large enough for a large request,
//! the chunks of several tiles are mapped a second time, one after the other, into a range of new
//! addresses, and those tiles are lent to the range. A freed range is kept: it serves again while all
//! of its memory is free. Small requests are served as PyTorch serves them.
//!
//! The order of steps is GMLake's (see `alloc`): a free tile, a free range, a new range, new memory,
//! and memory that is given back to get it. Two settings of the PyTorch that GMLake patched are not
//! modelled, because both are off by default: `max_split_size_mb`, on which its release of just enough
//! cached blocks depends, and `garbage_collection_threshold`. Before memory is unmapped its stream is
//! synchronized, because the driver does not wait.

mod alloc;
mod chunks;
mod ranges;
mod segments;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::{
    alloc::StitchPressure,
    chunks::MappingLeftovers,
    ranges::{RangeState, SegmentSpan, StitchedRange, StitchedRanges},
    segments::{SegmentPool, SegmentTiles, StitchSegment},
};
use super::{
    Attempt, Block, BlockState, BlockView, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Parameter,
    Request, SegmentView, Setup, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent,
    deferred::insert_sorted,
    deferred::{DeferredFrees, Patience},
    parameters,
    pooled::{MemoryPiece, PieceState},
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
/// Set in the slot of a handle that names a stitched range instead of a tile.
const RANGE: u32 = 1 << 31;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "stitch",
    summary: "GMLake: free memory in several places is mapped once more as one range",
    origin: "GMLake (ASPLOS 2024), its allocator for PyTorch 2.0, with its thresholds",
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

/// The parameters, with GMLake's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StitchSettings {
    defragments: bool,
    fragment_limit: u64,
    reuse_limit: u64,
    level: u32,
    /// In bytes.
    collect_above: u64,
    takes_shortfall: bool,
}

impl Default for StitchSettings {
    fn default() -> Self {
        StitchSettings {
            defragments: true,
            fragment_limit: 512 * MIB,
            reuse_limit: 10,
            level: 0,
            collect_above: 1000 * GIB,
            takes_shortfall: false,
        }
    }
}

impl StitchSettings {
    fn read(text: &str) -> Result<StitchSettings, SpecError> {
        let mut settings = StitchSettings::default();
        parameters::read(&ENTRY, text, |setting| {
            let switch = || match setting.number()? {
                0 => Ok(false),
                1 => Ok(true),
                other => Err(setting.refused(&format!("{other} is not 0 or 1"))),
            };
            match setting.key {
                "vmmDefragment" => settings.defragments = switch()?,
                "fragLimit" => settings.fragment_limit = setting.bytes()?,
                "reuseLimit" => settings.reuse_limit = setting.number()?,
                "defragLevel" => settings.level = setting.number()?,
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
    /// The streams that use a block beside its own, by the slot of its handle.
    uses: BTreeMap<u32, Vec<StreamId>>,
    /// Freed, waiting for events; by the slot of the handle.
    deferred: DeferredFrees<u32>,
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

/// A block that a caller holds or that waits for streams.
#[derive(Clone, Copy, Debug)]
struct HeldBlock {
    address: Address,
    size: u64,
    requested: u64,
    stream: StreamId,
    generation: u32,
    pending: bool,
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
            uses: BTreeMap::new(),
            deferred: DeferredFrees::default(),
            counts: StitchCounts::default(),
            stats: Stats::default(),
        }
    }

    /// The block that the slot of a handle names, if it is held or pending.
    fn held_block(&self, slot: u32) -> Option<HeldBlock> {
        if slot & RANGE == 0 {
            let &MemoryPiece { address, size, requested, stream, generation, state, .. } =
                self.tiles.table.get(slot)?;
            let pending = match state {
                PieceState::Allocated => false,
                PieceState::Pending => true,
                _ => return None,
            };
            Some(HeldBlock { address: Address(address), size, requested, stream, generation, pending })
        } else {
            let range = self.ranges.get(slot & !RANGE)?;
            let pending = match range.state {
                RangeState::Allocated => false,
                RangeState::Pending => true,
                RangeState::Vacant | RangeState::Idle => return None,
            };
            let &StitchedRange { address, bytes: size, requested, stream, generation, .. } = range;
            Some(HeldBlock { address, size, requested, stream, generation, pending })
        }
    }

    /// The live block that a handle stands for.
    fn live(&self, block: &Block) -> Result<HeldBlock, StrategyError> {
        self.held_block(block.slot)
            .filter(|found| !found.pending && found.generation == block.generation && found.address == block.address)
            .ok_or(StrategyError::UnknownBlock { address: block.address, slot: block.slot })
    }

    /// Marks a freed block that waits for streams.
    fn set_pending(&mut self, slot: u32) {
        if slot & RANGE == 0 {
            self.tiles[slot].state = PieceState::Pending;
        } else {
            self.ranges[slot & !RANGE].state = RangeState::Pending;
        }
    }

    /// Makes the memory of a block free.
    fn set_free(&mut self, slot: u32) {
        if slot & RANGE == 0 {
            self.release_tile(slot);
            return;
        }
        let slot = slot & !RANGE;
        self.ranges.note_freed(slot);
        for tile in std::mem::take(&mut self.ranges[slot].tiles) {
            self.release_tile(tile);
        }
    }

    fn release_tile(&mut self, slot: u32) {
        let span = SegmentSpan::of(&self.tiles[slot]);
        if let Some(segment) = self.tiles.segment(span.segment) {
            self.ranges.memory_freed(&segment.shown_in, &span);
        }
        self.tiles.release(slot);
    }

    /// Completes the frees whose streams are done.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let mut released = Vec::new();
        let result = self.deferred.release(cx.device, patience, &mut released);
        for slot in released {
            if let Some(HeldBlock { address, size, requested, stream, .. }) = self.held_block(slot) {
                cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
                self.stats.on_reusable(requested, size);
                self.set_free(slot);
            }
        }
        Ok(result?)
    }
}

/// The view from outside.
impl Stitch {
    /// Segments and the ranges in use, in address order. An idle range has no memory of its own.
    fn segments(&self) -> Layout {
        let mut segments: Vec<SegmentView> = self.tiles.segments().map(|(_, segment)| self.segment(segment)).collect();
        segments.extend(self.ranges.iter().filter_map(|(_, range)| range_in_use(range)));
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    fn segment(&self, segment: &StitchSegment) -> SegmentView {
        SegmentView {
            address: Address(segment.address),
            bytes: segment.bytes,
            stream: segment.stream,
            pool: if segment.pool == SegmentPool::Large { "large" } else { "small" }.into(),
            pool_id: (0, 0),
            mapped: segment.pool == SegmentPool::Large,
            alias: false,
            blocks: self.tiles.of(segment).map(MemoryPiece::view).collect(),
        }
    }

    /// The largest request of this stream that needs no new memory.
    fn largest_cached(&self, stream: StreamId) -> u64 {
        let sizes = |pool| self.tiles.descending(pool, stream).map(|slot| self.tiles[slot].size);
        let tile = sizes(SegmentPool::Large).next().unwrap_or(0);
        let range = self.ranges.largest_free(stream).filter(|_| self.settings.reuse_limit > 0).unwrap_or(0);
        let together: u64 = sizes(SegmentPool::Large).sum();
        let stitched = if self.may_stitch(together, StitchPressure::None) { together } else { 0 };
        match tile.max(range).max(stitched) {
            0 => sizes(SegmentPool::Small).next().unwrap_or(0).min(SMALL_SIZE),
            large => large,
        }
    }
}

fn range_in_use(range: &StitchedRange) -> Option<SegmentView> {
    let state = match range.state {
        RangeState::Vacant | RangeState::Idle => return None,
        RangeState::Allocated => BlockState::Allocated,
        RangeState::Pending => BlockState::Pending,
    };
    let &StitchedRange { address, bytes, stream, requested, .. } = range;
    Some(SegmentView {
        address,
        bytes,
        stream,
        pool: "stitched".into(),
        pool_id: (0, 0),
        mapped: true,
        alias: true,
        blocks: vec![BlockView { address, size: bytes, requested, state }],
    })
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
        let live = self.live(&block)?;
        if let Some(users) = self.uses.get(&block.slot) {
            self.deferred.hold(cx.device, block.slot, users)?;
            self.uses.remove(&block.slot);
            self.set_pending(block.slot);
            self.stats.on_free(live.size);
            return Ok(Freed::Later);
        }
        self.stats.on_free(live.size);
        self.stats.on_reusable(live.requested, live.size);
        self.set_free(block.slot);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        if self.live(block)?.stream != stream {
            insert_sorted(self.uses.entry(block.slot).or_default(), stream);
        }
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_cached(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_everything(cx)?;
        *self = Stitch::as_new(self.settings, self.chunk, self.device_bytes);
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        Some(self.largest_cached(stream))
    }

    fn layout(&self) -> Option<Layout> {
        Some(self.segments())
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
        Capabilities { virtual_memory: true, ..Capabilities::NONE }
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

//! `stitch`: GMLake's answer to fragmentation, free memory in several places shown once more as one range.
//!
//! Large segments are made of physical chunks. Where no free tile is large enough for a large request, chunks of several
//! are mapped a second time, behind each other, into a range of fresh addresses, and the tiles under it are lent to it.
//! The range is kept when it is freed: it serves again while all of its memory is free. Small requests are served as
//! PyTorch serves them.
//!
//! The order of steps is GMLake's (see `alloc`): a free tile, a free range, a new range, new memory, and what can be
//! given back to get it. Two settings of the PyTorch that GMLake patched are not modelled, since both are off by
//! default: `max_split_size_mb`, on which its release of just enough cached blocks depends, and
//! `garbage_collection_threshold`. Before memory is unmapped its stream is waited for, as the driver does not.

mod alloc;
mod chunks;
#[cfg(test)]
mod examples;
mod fused;
mod release;
mod settings;
mod tiles;
mod view;

use std::collections::BTreeMap;

use self::{
    chunks::Leftovers,
    fused::{Fused, Range, Run},
    settings::Settings,
    tiles::{Tile, Tiles},
};
use super::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Request, Setup, Stats, Strategy,
    StrategyEntry, StrategyError, StrategyEvent,
    deferred::{DeferredFrees, Patience},
};
use crate::device::Capabilities;
use oomph_base::{Address, MIB, StreamId, round_up};

/// Small blocks are multiples of this.
const QUANTUM: u64 = 512;
/// Rounded requests up to this are small.
const SMALL_SIZE: u64 = MIB;
/// Segments of small requests.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Physical memory comes in chunks of this, or of the device's granularity where that is coarser.
const CHUNK: u64 = 2 * MIB;
/// Large blocks below this share segments.
const OWN_SEGMENT: u64 = 10 * MIB;
/// Those segments.
const SHARED_SEGMENT: u64 = 20 * MIB;
/// In a handle's slot: it names a stitched range and not a tile.
const RANGE: u32 = 1 << 31;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "stitch",
    summary: "GMLake: free memory in several places is mapped once more as one range",
    origin: "GMLake (ASPLOS 2024), its allocator for PyTorch 2.0, with its thresholds",
    parameters: settings::PARAMETERS,
    variants: &["fragLimit:4MiB", "fragLimit:2MiB,defragLevel:1,reuseLimit:2", "fragLimit:2MiB,reAlloc:1,autoGC:0"],
    build,
};

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    Ok(Box::new(Stitch::new(Settings::read(parameters)?, setup)))
}

/// GMLake's allocator for one device.
#[derive(Clone, Debug)]
pub struct Stitch {
    settings: Settings,
    chunk: u64,
    device_bytes: u64,
    tiles: Tiles,
    fused: Fused,
    leftovers: Leftovers,
    /// The streams that use a block beside its own, by the slot of its handle.
    uses: BTreeMap<u32, Vec<StreamId>>,
    /// Freed, waiting for events; by the slot of the handle.
    deferred: DeferredFrees<u32>,
    counts: Counts,
    stats: Stats,
}

/// What only this strategy does.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Ranges made.
    stitched: u64,
    /// Requests served by a range that was there.
    reused: u64,
    /// Unused ranges given back.
    collected: u64,
    /// Addresses of all ranges at most.
    peak_range_bytes: u64,
}

/// A block that a caller holds, or that waits for streams.
#[derive(Clone, Copy, Debug)]
struct Occupant {
    address: Address,
    size: u64,
    requested: u64,
    stream: StreamId,
    generation: u32,
    pending: bool,
}

impl Stitch {
    fn new(settings: Settings, setup: &Setup<'_>) -> Stitch {
        let chunk = round_up(CHUNK, setup.props.granularity_bytes.max(1));
        Stitch::as_new(settings, chunk, setup.props.total_bytes)
    }

    fn as_new(settings: Settings, chunk: u64, device_bytes: u64) -> Stitch {
        Stitch {
            settings,
            chunk,
            device_bytes,
            tiles: Tiles::default(),
            fused: Fused::default(),
            leftovers: Leftovers::default(),
            uses: BTreeMap::new(),
            deferred: DeferredFrees::default(),
            counts: Counts::default(),
            stats: Stats::default(),
        }
    }

    /// Who is in the slot of a handle.
    fn occupant(&self, slot: u32) -> Option<Occupant> {
        if slot & RANGE == 0 {
            let tile = self.tiles.get(slot)?;
            let pending = match tile.state {
                tiles::State::Allocated => false,
                tiles::State::Pending => true,
                tiles::State::Vacant | tiles::State::Free | tiles::State::Lent => return None,
            };
            let stream = self.tiles.segment(tile.segment)?.stream;
            let &Tile { address, size, requested, generation, .. } = tile;
            Some(Occupant { address: Address(address), size, requested, stream, generation, pending })
        } else {
            let range = self.fused.get(slot & !RANGE)?;
            let pending = match range.state {
                fused::State::Allocated => false,
                fused::State::Pending => true,
                fused::State::Vacant | fused::State::Idle => return None,
            };
            let &Range { address, bytes: size, requested, stream, generation, .. } = range;
            Some(Occupant { address, size, requested, stream, generation, pending })
        }
    }

    /// The live block that a handle stands for.
    fn live(&self, block: &Block) -> Result<Occupant, StrategyError> {
        self.occupant(block.slot)
            .filter(|found| !found.pending && found.generation == block.generation && found.address == block.address)
            .ok_or(StrategyError::UnknownBlock { address: block.address, slot: block.slot })
    }

    /// A block leaves its caller and waits for streams.
    fn set_pending(&mut self, slot: u32) {
        if slot & RANGE == 0 {
            self.tiles[slot].state = tiles::State::Pending;
        } else {
            self.fused[slot & !RANGE].state = fused::State::Pending;
        }
    }

    /// The memory of a block is free again.
    fn set_free(&mut self, slot: u32) {
        if slot & RANGE == 0 {
            self.release_tile(slot);
            return;
        }
        let slot = slot & !RANGE;
        self.fused.note_freed(slot);
        for tile in std::mem::take(&mut self.fused[slot].tiles) {
            self.release_tile(tile);
        }
    }

    fn release_tile(&mut self, slot: u32) {
        let tile = &self.tiles[slot];
        let run = Run { segment: tile.segment, address: tile.address, bytes: tile.size };
        if let Some(segment) = self.tiles.segment(run.segment) {
            self.fused.memory_freed(&segment.shown_in, &run);
        }
        self.tiles.release(slot);
    }

    /// Takes up frees that streams have got past.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let mut released = Vec::new();
        let result = self.deferred.release(cx.device, patience, &mut released);
        for slot in released {
            if let Some(Occupant { address, size, requested, stream, .. }) = self.occupant(slot) {
                cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
                self.stats.on_reusable(requested, size);
                self.set_free(slot);
            }
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
            let users = self.uses.entry(block.slot).or_default();
            if let Err(place) = users.binary_search(&stream) {
                users.insert(place, stream);
            }
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
            ("range_bytes", self.fused.bytes),
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

//! `direct`: one `cuMemAlloc` and one `cuMemFree` for every block, nothing cached.
//!
//! PyTorch does this under `PYTORCH_NO_CUDA_MEMORY_CACHING=1`, and so does RMM's
//! `cuda_memory_resource`. It shows what caching is worth: only the driver fragments memory, and
//! every free waits for the whole device. Because of that wait, blocks used on other streams need
//! no care: when `cuMemFree` returns, no stream uses the block.
//!
//! A block is the request rounded up to [`GRANULE`], each block is a segment, and reserved is their
//! sum. The device holds at least that much: it counts whole pages, which small blocks share.

use super::{
    Attempt, Block, Built, Caller, Context, Freed, Layout, Outcome, Request, SegmentView, Setup, Shortage, Stats,
    Strategy, StrategyEntry, StrategyError, StrategyEvent, parameters, plain_state,
    pooled::{MemoryPiece, PieceTable},
    unless_out_of_memory,
};
use oomph_base::{Address, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "direct",
    summary: "one cuMemAlloc and cuMemFree for every block, nothing cached",
    origin: "PyTorch with PYTORCH_NO_CUDA_MEMORY_CACHING=1; RMM's cuda_memory_resource",
    differs: &[],
    parameters: &[],
    variants: &[],
    build,
};

/// The driver gives out memory in multiples of this.
pub const GRANULE: u64 = 512;

fn build(text: &str, _: &Setup<'_>) -> Built {
    parameters::read(&ENTRY, text, |_| Ok(()))?;
    Ok(Box::new(Direct::default()))
}

/// The strategy without a cache.
#[derive(Clone, Debug, Default)]
pub struct Direct {
    blocks: PieceTable,
    stats: Stats,
}

impl Direct {
    /// Gives a live block back to the device. If the driver fails, it stays live.
    fn release(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let MemoryPiece { address, size, requested, stream, .. } = self.blocks[slot];
        let address = Address(address);
        cx.sink.event(StrategyEvent::SegmentFree { address, bytes: size, stream });
        cx.device.free(address)?;
        self.blocks.remove(slot);
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        self.stats.on_release(size, 1);
        Ok(())
    }
}

impl Strategy for Direct {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        let &Request { bytes: requested, stream, .. } = request;
        let size = round_up(requested, GRANULE);
        let Some(address) = unless_out_of_memory(cx.device.alloc(size))? else {
            return Ok(cx.out_of_memory(&mut self.stats, stream, Shortage::of_device(size)));
        };
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes: size, stream });
        self.stats.on_reserve(size, 1);
        self.stats.on_alloc(requested, size);
        let slot = self.blocks.insert(MemoryPiece::new(address.0, size, stream));
        Ok(Attempt::Served(self.blocks.occupy(slot, requested), Outcome::NewSegment))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        self.blocks.live(&block)?;
        self.release(cx, block.slot)?;
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, _: StreamId) -> Result<(), StrategyError> {
        self.blocks.live(block).map(|_| ())
    }

    plain_state!();

    fn trim(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let live: Vec<u32> = self.blocks.iter().map(|(slot, _)| slot).collect();
        live.into_iter().try_for_each(|slot| self.release(cx, slot))?;
        *self = Direct::default();
        Ok(())
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        Some(0)
    }

    fn layout(&self) -> Option<Layout> {
        let view = |(_, piece): (u32, &MemoryPiece)| {
            let &MemoryPiece { address, size, stream, .. } = piece;
            SegmentView::new(Address(address), size, stream, "direct", vec![piece.view()])
        };
        Some(Layout::of(self.blocks.iter().map(view)))
    }
}

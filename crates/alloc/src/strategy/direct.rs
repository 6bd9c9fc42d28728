//! `direct`: one `cuMemAlloc` and one `cuMemFree` for every block, nothing cached.
//!
//! This is what PyTorch does under `PYTORCH_NO_CUDA_MEMORY_CACHING=1`, and RMM's `cuda_memory_resource`. It shows what
//! caching is worth: fragmentation is the driver's alone, and every free waits for the whole device. That wait is
//! also why a block used on other streams needs no care: when `cuMemFree` returns, nobody uses it any more.
//!
//! Its books: a block is the request rounded up to [`GRANULE`], each block is a segment, and reserved is their sum.
//! The device holds at least that much: it counts whole pages, which small blocks share.

use super::{
    Attempt, Block, BlockState, BlockView, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome,
    Refusal, Request, SegmentView, Setup, Shortage, SpecError, Stats, Strategy, StrategyEntry, StrategyError,
    StrategyEvent, slots::Slots,
};
use crate::device::Capabilities;
use oomph_base::{StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "direct",
    summary: "one cuMemAlloc and cuMemFree for every block, nothing cached",
    origin: "PyTorch with PYTORCH_NO_CUDA_MEMORY_CACHING=1; RMM's cuda_memory_resource",
    parameters: &[],
    variants: &[],
    build,
};

/// The driver gives out memory in multiples of this.
pub const GRANULE: u64 = 512;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    SpecError::unless_empty("direct", parameters)?;
    Ok(Box::new(Direct::default()))
}

/// The strategy without a cache.
#[derive(Clone, Debug, Default)]
pub struct Direct {
    blocks: Slots<Owner>,
    stats: Stats,
}

/// Who asked for a block, and for how much.
#[derive(Clone, Copy, Debug)]
struct Owner {
    requested: u64,
    stream: StreamId,
}

impl Direct {
    /// Gives a live block back to the device. It stays live, and the books as they are, if the driver fails.
    fn release(&mut self, cx: &mut Context<'_>, block: &Block) -> Result<(), StrategyError> {
        let (size, owner) = self.blocks.get(block)?;
        cx.sink.event(StrategyEvent::SegmentFree { address: block.address, bytes: size, stream: owner.stream });
        cx.device.free(block.address)?;
        self.blocks.remove(block)?;
        self.stats.on_free(size);
        self.stats.on_reusable(owner.requested, size);
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
        let address = match cx.device.alloc(size) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => {
                self.stats.ooms += 1;
                cx.sink.event(StrategyEvent::OutOfMemory { rounded: size, stream, device_free: None });
                return Ok(Attempt::OutOfMemory(Shortage {
                    rounded: size,
                    asked: size,
                    refused_by: Refusal::Device,
                    device_free: None,
                }));
            }
            Err(error) => return Err(error.into()),
        };
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes: size, stream });
        self.stats.on_reserve(size, 1);
        self.stats.on_alloc(requested, size);
        Ok(Attempt::Served(self.blocks.insert(address, size, Owner { requested, stream }), Outcome::NewSegment))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        self.release(cx, &block)?;
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, _: StreamId) -> Result<(), StrategyError> {
        self.blocks.get(block).map(|_| ())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let live: Vec<Block> = self.blocks.iter().map(|(block, _)| block).collect();
        for block in live {
            self.release(cx, &block)?;
        }
        *self = Direct::default();
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        Some(0)
    }

    fn layout(&self) -> Option<Layout> {
        let mut segments: Vec<SegmentView> = self
            .blocks
            .iter()
            .map(|(Block { address, size, .. }, Owner { requested, stream })| SegmentView {
                address,
                bytes: size,
                stream,
                pool: "direct".into(),
                pool_id: (0, 0),
                mapped: false,
                alias: false,
                blocks: vec![BlockView { address, size, requested, state: BlockState::Allocated }],
            })
            .collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Some(Layout { segments })
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

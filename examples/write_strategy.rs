//! A strategy of your own, checked by the conformance suite that every built-in strategy passes.
//!
//! To reach the command line, a strategy also needs an `ENTRY` and a line in `STRATEGIES`, inside `crates/alloc`
//! (`buddy.rs` is a short model); from outside, build it as a shared library and use `plugin:FILE`.
//!
//! It gives every request its own driver allocation of whole 2 MiB pages and caches nothing. A driver free waits for the
//! device, so a block that other streams use needs no further care.
//!
//!     cargo run --release --example write_strategy

#![expect(clippy::print_stdout, clippy::expect_used, reason = "an example prints its result and may stop")]

use oomph::{
    base::{MIB, StreamId, round_up},
    device::{
        Capabilities, Device,
        sim::{Profile, SimConfig, SimDevice},
    },
    strategy::{
        Attempt, Block, BlockState, BlockView, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome,
        Refusal, Request, SegmentView, Shortage, Stats, Strategy, StrategyError, StrategyEvent,
        conformance::{ConformanceSubject, conform},
        slots::Slots,
    },
};

/// Live blocks, each with its requested bytes and its stream, and the counters that every strategy keeps.
#[derive(Clone, Debug, Default)]
struct WholePages {
    blocks: Slots<(u64, StreamId)>,
    stats: Stats,
}

impl WholePages {
    /// Returns a block to the device. If the driver fails, the block stays live and the counters stay as they are.
    fn release(&mut self, cx: &mut Context<'_>, block: &Block) -> Result<(), StrategyError> {
        let (size, (requested, stream)) = self.blocks.get(block)?;
        cx.sink.event(StrategyEvent::SegmentFree { address: block.address, bytes: size, stream });
        cx.device.free(block.address)?;
        self.blocks.remove(block)?;
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        self.stats.on_release(size, 1);
        Ok(())
    }
}

impl Strategy for WholePages {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        let &Request { bytes: requested, stream, .. } = request;
        let size = round_up(requested, 2 * MIB);
        let address = match cx.device.alloc(size) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => {
                self.stats.ooms += 1;
                cx.sink.event(StrategyEvent::OutOfMemory { rounded: size, stream, device_free: None });
                let shortage = Shortage { rounded: size, asked: size, refused_by: Refusal::Device, device_free: None };
                return Ok(Attempt::OutOfMemory(shortage));
            }
            Err(error) => return Err(error.into()),
        };
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes: size, stream });
        self.stats.on_reserve(size, 1);
        self.stats.on_alloc(requested, size);
        Ok(Attempt::Served(self.blocks.insert(address, size, (requested, stream)), Outcome::NewSegment))
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

    fn serves_pools(&self) -> bool {
        false
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let live: Vec<Block> = self.blocks.iter().map(|(block, _)| block).collect();
        live.iter().try_for_each(|block| self.release(cx, block))?;
        *self = WholePages::default();
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
            .map(|(Block { address, size, .. }, (requested, stream))| SegmentView {
                address,
                bytes: size,
                stream,
                pool: "pages".into(),
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

/// A simulated GPU on which this many bytes can be allocated.
fn device(bytes: u64) -> Box<dyn Device> {
    let profile = Profile::h200();
    let capacity_bytes = Some(profile.context_bytes + bytes);
    Box::new(SimDevice::new(SimConfig { profile, capacity_bytes }).expect("an H200 is larger than its context"))
}

fn main() {
    let report = conform(&ConformanceSubject { build: &|_| Ok(Box::new(WholePages::default())), device: &device });
    for finding in &report.findings {
        println!("broken: {finding}");
    }
    println!("{} findings, {} parts skipped", report.findings.len(), report.skipped.len());
    assert!(report.findings.is_empty(), "a strategy must pass conformance");
}

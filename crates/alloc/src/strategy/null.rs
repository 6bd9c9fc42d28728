//! `null`: hands out addresses without memory and never calls the device.
//!
//! It is the baseline for speed: a replay with it costs only the replay itself. Its counters are
//! those of a perfect allocator with unlimited memory: a block is as large as its request, reserved
//! equals allocated, and there are no segments. Its peak of `allocated` is the least memory that
//! any allocator needs for the same calls.
//!
//! Addresses only increase, so live blocks cannot overlap, and a block used on other streams need
//! not wait.

use super::{
    ALIGNMENT, Attempt, Block, Built, Caller, Context, Freed, Layout, Outcome, Request, Setup, Shortage, Stats,
    Strategy, StrategyEntry, StrategyError, parameters, plain_state, slots::Slots,
};
use oomph_base::{Address, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "null",
    summary: "hands out fake addresses and calls no driver: the cost of replay itself",
    origin: "a baseline of this suite",
    differs: &[],
    parameters: &[],
    variants: &[],
    build,
};

/// The first address.
const FIRST_ADDRESS: u64 = 1 << 32;

fn build(text: &str, _: &Setup<'_>) -> Built {
    parameters::read(&ENTRY, text, |_| Ok(()))?;
    Ok(Box::new(Null::default()))
}

/// A strategy without memory.
#[derive(Clone, Debug)]
pub struct Null {
    blocks: Slots<()>,
    next_address: u64,
    stats: Stats,
}

impl Default for Null {
    fn default() -> Self {
        Null { blocks: Slots::default(), next_address: FIRST_ADDRESS, stats: Stats::default() }
    }
}

impl Strategy for Null {
    #[inline]
    fn alloc(&mut self, _: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        // Rounding saturates only at the top of the address space, where the sum overflows.
        let Some(next_address) = self.next_address.checked_add(round_up(request.bytes, ALIGNMENT)) else {
            return Ok(Attempt::OutOfMemory(Shortage::of_size(request.bytes)));
        };
        let block = self.blocks.insert(Address(self.next_address), request.bytes, ());
        self.next_address = next_address;
        self.stats.on_alloc(request.bytes, request.bytes);
        self.stats.on_reserve(request.bytes, 0);
        Ok(Attempt::Served(block, Outcome::Hit))
    }

    #[inline]
    fn free(&mut self, _: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (size, ()) = self.blocks.remove(&block)?;
        self.stats.on_free(size);
        self.stats.on_reusable(size, size);
        self.stats.on_release(size, 0);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, _: StreamId) -> Result<(), StrategyError> {
        self.blocks.get(block).map(|_| ())
    }

    plain_state!();

    fn trim(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    /// Addresses continue to increase: work on the old ones may still be running.
    fn close(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        *self = Null { next_address: self.next_address, ..Null::default() };
        Ok(())
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        Some(0)
    }

    fn layout(&self) -> Option<Layout> {
        None
    }
}

//! The steps of a free: merging, and waiting for streams.

use super::{
    Caching,
    blocks::{NONE, State},
};
use crate::{
    strategy::{Context, StrategyError, StrategyEvent, deferred::Patience},
    unit::Address,
};

impl Caching {
    /// Puts a freed block among the free ones, merged with its free neighbours.
    #[inline]
    pub(super) fn free_block(&mut self, slot: u32) {
        let block = &self.blocks[slot];
        let (size, requested, tracked) = (block.size, block.requested, !block.is_expandable());
        self.blocks[slot].state = State::Free;
        let merged = self.absorb_neighbours(slot);
        let large = self.shelve(slot);
        self.books.on_reusable(large, requested, size);
        if tracked {
            let block = &self.blocks[slot];
            let absorbed = (block.size - size) as i64;
            if block.is_split() {
                self.books.on_inactive_split(large, 1 - merged, block.size as i64 - absorbed);
            } else {
                self.books.on_inactive_split(large, -merged, -absorbed);
            }
        }
    }

    /// Merges a free or unmapped block with neighbours of its kind; says with how many.
    #[inline]
    pub(super) fn absorb_neighbours(&mut self, slot: u32) -> i64 {
        let (previous, next) = (self.blocks[slot].previous, self.blocks[slot].next);
        i64::from(self.absorb(slot, previous)) + i64::from(self.absorb(slot, next))
    }

    #[inline]
    fn absorb(&mut self, slot: u32, neighbour: u32) -> bool {
        if neighbour == NONE || self.blocks[neighbour].state != self.blocks[slot].state {
            return false;
        }
        let gone = &self.blocks[neighbour];
        let owner = &mut self.pools.arenas[gone.arena as usize];
        if gone.state == State::Free {
            owner.free.remove(gone.size, gone.address);
        } else {
            owner.unmapped.remove(&gone.address);
        }
        self.forget_uses(neighbour);
        self.blocks.merge(slot, neighbour);
        true
    }

    /// Adds a free block to its arena; says whether that is a large one.
    #[inline]
    pub(super) fn shelve(&mut self, slot: u32) -> bool {
        let block = &mut self.blocks[slot];
        let owner = &mut self.pools.arenas[block.arena as usize];
        block.shelved_at = self.pools.sides[owner.side as usize].clock;
        owner.free.insert(block.size, block.address, slot);
        owner.is_large()
    }

    /// Takes up the frees that streams have got past.
    #[cold]
    pub(super) fn poll_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.send_postponed(cx)?;
        self.complete_frees(cx, Patience::Poll)
    }

    /// Waits for every stream that a free waits for.
    pub(super) fn await_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.books.syncs += 1;
        self.send_postponed(cx)?;
        self.complete_frees(cx, Patience::Wait)
    }

    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let mut released = std::mem::take(&mut self.released);
        let result = self.deferred.release(cx.device, patience, &mut released);
        for slot in released.drain(..) {
            self.complete_free(cx, slot);
        }
        self.released = released;
        Ok(result?)
    }

    /// Lets blocks that were freed during a capture wait for the streams recorded before it.
    fn send_postponed(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        while let Some(&slot) = self.postponed.front() {
            let uses = self.blocks[slot].uses;
            self.uses.end_capture(uses);
            let streams = self.uses.streams(uses);
            let waits = !streams.is_empty();
            if waits {
                self.deferred.hold(cx.device, slot, streams)?;
            }
            self.forget_uses(slot);
            self.postponed.pop_front();
            if !waits {
                self.complete_free(cx, slot);
            }
        }
        Ok(())
    }

    fn complete_free(&mut self, cx: &mut Context<'_>, slot: u32) {
        let block = &self.blocks[slot];
        cx.sink.event(StrategyEvent::FreeCompleted {
            address: Address(block.address),
            requested: block.requested,
            stream: self.pools.arenas[block.arena as usize].stream,
        });
        self.free_block(slot);
    }

    /// Whether anything freed waits for streams or for the end of a capture.
    #[inline]
    pub(super) fn has_waiting_frees(&self) -> bool {
        !(self.deferred.is_empty() && self.postponed.is_empty())
    }
}

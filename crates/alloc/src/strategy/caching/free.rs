//! The steps of a free: merging, and waiting for streams.

use super::{Caching, blocks::State};
use crate::strategy::{Context, StrategyError, StrategyEvent, deferred::Patience};
use oomph_base::Address;

impl Caching {
    /// Puts a freed block among the free ones, merged with its free neighbours; says whether its arena is a large one.
    #[inline(always)]
    pub(super) fn free_block(&mut self, slot: u32) -> bool {
        let block = &self.blocks[slot];
        let (size, tracked) = (block.size, !block.is_expandable());
        let owner = &mut self.pools.arenas[block.arena as usize];
        let merged = self.blocks.merge(slot, State::Free, owner.clock, |gone| owner.free.remove(gone));
        owner.free.insert(merged.entry);
        let large = owner.is_large();
        if tracked {
            if !merged.is_split {
                self.books.lower_inactive_split(large, merged.neighbours, merged.entry.size - size);
            } else if merged.neighbours < 2 {
                self.books.raise_inactive_split(large, 1 - merged.neighbours, size);
            } else {
                self.books.raise_inactive_split(large, 0, size);
                self.books.lower_inactive_split(large, 1, 0);
            }
        }
        large
    }

    /// Frees a block that other streams use: it waits for them, and during a capture for its end first.
    #[cold]
    pub(super) fn free_later(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let block = &self.blocks[slot];
        let (size, large) = (block.size, self.pools.arenas[block.arena as usize].is_large());
        if self.pools.is_capturing() {
            self.postponed.push_back(slot);
        } else {
            self.deferred.hold(cx.device, slot, self.uses.streams(block.uses))?;
            self.forget_uses(slot);
        }
        self.blocks[slot].state = State::Pending;
        self.books.on_free_later(large, size);
        self.count_oversize_freed(size);
        Ok(())
    }

    /// Keeps the count of allocations that are too large to be split.
    #[inline]
    pub(super) fn count_oversize_freed(&mut self, size: u64) {
        if size >= self.settings.max_split_size {
            self.books.oversize_allocations.lower();
        }
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
        self.free_pending(slot);
    }

    /// Frees a block that waited.
    pub(super) fn free_pending(&mut self, slot: u32) {
        let (requested, size) = (self.blocks[slot].requested, self.blocks[slot].size);
        let large = self.free_block(slot);
        self.books.on_free_completed(large, requested, size);
    }

    /// Whether anything freed waits for streams or for the end of a capture.
    #[inline]
    pub(super) fn has_waiting_frees(&self) -> bool {
        !(self.deferred.is_empty() && self.postponed.is_empty())
    }
}

//! The heap's own steps: shelving, merging, and blocks that gain or lose the memory behind them.

use super::{
    Oomph,
    blocks::{NONE, State},
};
use oomph_base::StreamId;

impl Oomph {
    /// Puts a free block on the shelf of its size.
    #[inline(always)]
    pub(super) fn shelve(&mut self, slot: u32) {
        let record = &self.blocks[slot];
        let home = &mut self.homes[record.stream.index()];
        let shelves = if record.is_small() { &mut home.small } else { &mut home.pages };
        shelves.insert(&mut self.blocks, slot);
    }

    /// Takes a free block from its shelf.
    #[inline(always)]
    pub(super) fn unshelve(&mut self, slot: u32) {
        let record = &self.blocks[slot];
        let home = &mut self.homes[record.stream.index()];
        let shelves = if record.is_small() { &mut home.small } else { &mut home.pages };
        shelves.remove(&mut self.blocks, slot);
    }

    /// Takes a cached block of the stream's own, however long the search.
    pub(super) fn take_cached(&mut self, stream: StreamId, bytes: u64, small: bool) -> Option<u32> {
        let home = self.homes.get_mut(stream.index())?;
        let shelves = if small { &mut home.small } else { &mut home.pages };
        let slot = shelves.find_any(&self.blocks, bytes)?;
        shelves.remove(&mut self.blocks, slot);
        Some(slot)
    }

    /// Puts a freed block on a shelf, merged with its free neighbours of the same stream.
    #[inline(always)]
    pub(super) fn free_block(&mut self, slot: u32) {
        self.blocks[slot].state = State::Free;
        let merged = self.merge(slot);
        self.shelve(merged);
    }

    /// Merges a free block that is on no shelf with its free neighbours of the same stream; says under which slot.
    #[inline(always)]
    pub(super) fn merge(&mut self, mut slot: u32) -> u32 {
        let record = &self.blocks[slot];
        let (previous, next, stream) = (record.previous, record.next, record.stream);
        if self.is_free_for(next, stream) {
            self.unshelve(next);
            self.blocks.absorb_next(slot, next);
        }
        if self.is_free_for(previous, stream) {
            self.unshelve(previous);
            self.blocks.absorb_next(previous, slot);
            slot = previous;
        }
        slot
    }

    #[inline(always)]
    fn is_free_for(&self, slot: u32, stream: StreamId) -> bool {
        self.blocks.get(slot).is_some_and(|record| record.state == State::Free && record.stream == stream)
    }

    /// The part `low..high` of a free block has lost its memory; what is left on either side stays free.
    pub(super) fn turn_unmapped(&mut self, mut slot: u32, low: u64, high: u64) {
        self.unshelve(slot);
        if high < self.blocks[slot].end() {
            let tail = self.blocks.split(slot, high - self.blocks[slot].address);
            self.shelve(tail);
        }
        if self.blocks[slot].address < low {
            let rest = self.blocks.split(slot, low - self.blocks[slot].address);
            self.shelve(slot);
            slot = rest;
        }
        self.blocks[slot].state = State::Unmapped;
        let (previous, next) = (self.blocks[slot].previous, self.blocks[slot].next);
        if self.is_gap(next) {
            self.gaps.remove(&self.blocks[next].address);
            self.blocks.absorb_next(slot, next);
        }
        if self.is_gap(previous) {
            self.blocks.absorb_next(previous, slot);
        } else {
            self.gaps.insert(self.blocks[slot].address, slot);
        }
    }

    /// The part `low..high` of a gap has memory now, for `stream`; returns the free block that it is part of, on no
    /// shelf.
    pub(super) fn turn_mapped(&mut self, low: u64, high: u64, stream: StreamId) -> u32 {
        let Some((_, &gap)) = self.gaps.range(..=low).next_back() else { return NONE };
        let mut slot = gap;
        if high < self.blocks[slot].end() {
            let tail = self.blocks.split(slot, high - self.blocks[slot].address);
            self.gaps.insert(high, tail);
        }
        if self.blocks[slot].address < low {
            slot = self.blocks.split(slot, low - self.blocks[slot].address);
        } else {
            self.gaps.remove(&low);
        }
        let record = &mut self.blocks[slot];
        record.state = State::Free;
        record.stream = stream;
        self.merge(slot)
    }

    /// Whether there is such a block and it is free, for whatever stream.
    pub(super) fn is_free(&self, slot: u32) -> bool {
        self.blocks.get(slot).is_some_and(|record| record.state == State::Free)
    }

    fn is_gap(&self, slot: u32) -> bool {
        slot != NONE && self.blocks[slot].state == State::Unmapped
    }
}

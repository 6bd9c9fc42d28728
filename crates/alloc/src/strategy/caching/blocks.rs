//! Blocks as PyTorch splits and merges them, in the table that all strategies share.
//!
//! A slot keeps its identity through splits and merges as a PyTorch `Block` object does, because
//! the requested size that a snapshot shows for a free block is the last one of the object that
//! survived. The `region` of a block is its arena (pool, side and stream), its `note` its expandable
//! segment or [`NONE`], the first of its `links` the time when it was last added to the free ones, the
//! second its number or that of its segment ([`TieOrder`]).

use std::collections::{BTreeMap, BTreeSet};

use super::{Caching, free_index::FreeBlock};
use crate::strategy::pooled::{MemoryPiece, NONE, PieceState, PieceTable};
use oomph_pytorch::{MIN_BLOCK_SIZE, TieOrder};

impl MemoryPiece {
    /// Another block of the same arena and segment, without neighbours.
    pub(super) fn sibling(&self, address: u64, size: u64, state: PieceState, number: u32) -> MemoryPiece {
        let MemoryPiece { region, note, stream, links, .. } = *self;
        MemoryPiece { region, note, state, links: [links[0], number], ..MemoryPiece::new(address, size, stream) }
    }

    /// Its number, or that of its segment.
    #[inline]
    pub(super) fn number(&self) -> u32 {
        self.links[1]
    }

    /// The arena that it belongs to.
    #[inline]
    pub(super) fn arena(&self) -> usize {
        self.region as usize
    }

    /// Whether other blocks share its segment.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        // `NONE` has all bits set: both are `NONE` only if their conjunction is.
        self.previous & self.next != NONE
    }

    #[inline]
    pub(super) fn is_expandable(&self) -> bool {
        self.note != NONE
    }

    /// Its key among the free blocks of its arena.
    #[inline]
    pub(super) fn entry(&self, slot: u32) -> FreeBlock {
        FreeBlock { size: self.size, order: order(self.links[1], self.address), slot }
    }

    /// Notes when the block was added to the free ones (`gc_count_base`).
    #[inline]
    pub(super) fn set_freed_at(&mut self, clock: u32) {
        self.links[0] = clock;
    }

    /// How many searches of its side it has been free for.
    pub(super) fn age(&self, clock: u32) -> u64 {
        u64::from(clock.wrapping_sub(self.links[0]))
    }
}

/// Addresses of GPUs have up to 49 bits, and 40 after division by 512.
const ADDRESS_BITS: u32 = 40;

/// The order of a block among free blocks of its size: by number, then by address. Up to 2.11 all
/// numbers are 0.
#[inline]
pub(super) fn order(number: u32, address: u64) -> u64 {
    (u64::from(number) << ADDRESS_BITS) + (address >> MIN_BLOCK_SIZE.ilog2())
}

/// Gives numbers to blocks and segments, by which free blocks of one size are ordered from 2.12 on.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockNumbers {
    ties: TieOrder,
    next: u32,
}

impl BlockNumbers {
    pub(super) const fn new(ties: TieOrder) -> BlockNumbers {
        BlockNumbers { ties, next: 0 }
    }

    /// The number of the block that a new segment consists of.
    pub(super) fn of_segment(&mut self) -> u32 {
        let number = self.next;
        self.next += u32::from(self.ties != TieOrder::Address);
        number
    }

    /// The number of a block that is split off one with the number `whole`. 2.12 numbers blocks, later releases
    /// segments.
    #[inline]
    pub(super) fn of_part(&mut self, whole: u32) -> u32 {
        if self.ties == TieOrder::Block { self.of_segment() } else { whole }
    }

    /// Whether blocks must be numbered anew before the next number does not fit.
    #[inline]
    pub(super) fn are_used_up(self) -> bool {
        self.next >= 1 << (u64::BITS - ADDRESS_BITS)
    }
}

/// The result of a merge.
pub(super) struct MergedBlock {
    /// The merged block.
    pub(super) entry: FreeBlock,
    /// How many neighbours were merged into it.
    pub(super) neighbours: u64,
    /// Whether other blocks share its segment.
    pub(super) is_split: bool,
}

impl PieceTable {
    /// By how many unmapped bytes behind it a block could be extended.
    #[inline]
    pub(super) fn extension(&self, block: &MemoryPiece) -> u64 {
        let next = self.get(block.next).filter(|next| next.state == PieceState::Unmapped);
        next.map_or(0, |next| next.size)
    }

    /// Whether memory could be mapped behind a block.
    #[cold]
    pub(super) fn can_extend(&self, slot: u32) -> bool {
        self[slot].is_expandable() && self.extension(&self[slot]) > 0
    }

    /// Cuts the first `bytes` off a block; they become a block of their own, which is returned with
    /// its slot. The rest is free since `now`. Written field by field: copying a record that was
    /// just assembled would stall on its stores.
    #[inline(always)]
    pub(super) fn cut_front(&mut self, slot: u32, bytes: u64, now: u32) -> (u32, &mut MemoryPiece) {
        let front = self.take_slot();
        let records = self.pieces.as_mut_slice();
        let rest = &mut records[slot as usize];
        let (address, previous) = (rest.address, rest.previous);
        let (region, note, stream, number) = (rest.region, rest.note, rest.stream, rest.links[1]);
        rest.address += bytes;
        rest.size -= bytes;
        rest.previous = front;
        rest.set_freed_at(now);
        rest.state = PieceState::Free;
        if let Some(previous) = records.get_mut(previous as usize) {
            previous.next = front;
        }
        let block = &mut records[front as usize];
        block.address = address;
        block.size = bytes;
        block.previous = previous;
        block.next = slot;
        block.region = region;
        block.note = note;
        block.uses = NONE;
        block.stream = stream;
        block.links[1] = number;
        (front, block)
    }

    /// Puts `record` in front of `slot`, in the same segment.
    pub(super) fn insert_before(&mut self, slot: u32, record: MemoryPiece) -> u32 {
        self.insert_between(self[slot].previous, slot, record)
    }

    /// Puts `record` behind `slot`, in the same segment.
    pub(super) fn insert_after(&mut self, slot: u32, record: MemoryPiece) -> u32 {
        self.insert_between(slot, self[slot].next, record)
    }

    fn insert_between(&mut self, previous: u32, next: u32, record: MemoryPiece) -> u32 {
        let inserted = self.insert(MemoryPiece { previous, next, ..record });
        if let Some(previous) = self.pieces.get_mut(previous as usize) {
            previous.next = inserted;
        }
        if let Some(next) = self.pieces.get_mut(next as usize) {
            next.previous = inserted;
        }
        inserted
    }

    /// Merges a block with those of its neighbours that are in state `kind`, after calling
    /// `take_out` for each (`try_merge_blocks`). The block is in that state since `now`. Its record
    /// is read once and written once.
    #[inline(always)]
    pub(super) fn merge(
        &mut self,
        slot: u32,
        kind: PieceState,
        now: u32,
        mut take_out: impl FnMut(FreeBlock),
    ) -> MergedBlock {
        let records = self.pieces.as_mut_slice();
        let block = &records[slot as usize];
        let (mut address, mut size, mut previous, mut next) = (block.address, block.size, block.previous, block.next);
        let mut neighbours = 0;
        if let Some(gone) = records.get_mut(previous as usize)
            && gone.state == kind
        {
            take_out(gone.entry(previous));
            address = gone.address;
            size += gone.size;
            let before = gone.previous;
            gone.vacate(&mut self.vacant, previous);
            previous = before;
            neighbours += 1;
            if let Some(before) = records.get_mut(before as usize) {
                before.next = slot;
            }
        }
        if let Some(gone) = records.get_mut(next as usize)
            && gone.state == kind
        {
            take_out(gone.entry(next));
            size += gone.size;
            let behind = gone.next;
            gone.vacate(&mut self.vacant, next);
            next = behind;
            neighbours += 1;
            if let Some(behind) = records.get_mut(behind as usize) {
                behind.previous = slot;
            }
        }
        let block = &mut records[slot as usize];
        block.address = address;
        block.size = size;
        block.previous = previous;
        block.next = next;
        block.set_freed_at(now);
        block.state = kind;
        MergedBlock { entry: block.entry(slot), neighbours, is_split: block.is_split() }
    }
}

impl Caching {
    /// Numbers all blocks anew in their order. Long programs of 2.12 and later need this, because numbers are small.
    #[cold]
    pub(super) fn renumber(&mut self) {
        let numbers: BTreeSet<u32> = self.blocks.iter().map(|(_, block)| block.number()).collect();
        let dense: BTreeMap<u32, u32> = numbers.into_iter().zip(0..).collect();
        for arena in 0..self.pools.arenas.len() {
            self.pools.arenas[arena].free = self.pools.free_index();
        }
        let slots: Vec<u32> = self.blocks.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let block = &mut self.blocks[slot];
            block.links[1] = dense[&block.links[1]];
            if block.state == PieceState::Free {
                let entry = block.entry(slot);
                self.pools.arenas[block.arena()].free.insert(entry);
            }
        }
        self.numbers.next = dense.len() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::StreamId;

    #[test]
    fn neighbours_split_and_merge() {
        let mut blocks = PieceTable::default();
        let whole = MemoryPiece::new(1024, 4096, StreamId::DEFAULT);
        let high = blocks.insert(whole);
        let low = blocks.insert_before(high, whole.sibling(0, 1024, PieceState::Allocated, 0));
        let tail = blocks.insert_after(high, whole.sibling(5120, 512, PieceState::Free, 0));
        assert_eq!((blocks[low].next, blocks[high].previous, blocks[high].next), (high, low, tail));
        let (front, _) = blocks.cut_front(high, 512, 7);
        assert_eq!((blocks[low].next, blocks[front].next, blocks[high].previous), (front, high, front));
        assert_eq!((blocks[front].address, blocks[high].address, blocks[high].size), (1024, 1536, 3584));
        assert_eq!((blocks[high].state, blocks[high].links[0]), (PieceState::Free, 7));
        blocks[front].state = PieceState::Free;
        let mut gone = Vec::new();
        let merged = blocks.merge(front, PieceState::Free, 8, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size, &gone[..]), (1, true, 4096, &[high][..]));
        blocks[low].state = PieceState::Free;
        let merged = blocks.merge(front, PieceState::Free, 9, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size), (2, false, 5632));
        assert_eq!(gone, [high, low, tail]);
        assert_eq!((blocks[front].address, blocks[front].size, blocks[front].links[0]), (0, 5632, 9));
        assert_eq!(blocks.iter().count(), 1);
    }
}

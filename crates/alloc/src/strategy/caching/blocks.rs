//! Blocks as PyTorch splits and merges them, in the table that all strategies share.
//!
//! A slot keeps its identity through splits and merges as a PyTorch `Block` object does, because
//! the requested size that a snapshot shows for a free block is the last one of the object that
//! survived. The `region` of a block is its arena (pool, side and stream), its `note` its expandable
//! segment or [`NONE`], the first of its `links` the time when it was last added to the free ones.

use super::free_index::FreeBlock;
use crate::strategy::pooled::{MemoryPiece, NONE, PieceState, PieceTable};

impl MemoryPiece {
    /// Another block of the same arena and segment, without neighbours.
    pub(super) fn sibling(&self, address: u64, size: u64, state: PieceState) -> MemoryPiece {
        let MemoryPiece { region, note, stream, .. } = *self;
        MemoryPiece { region, note, state, ..MemoryPiece::new(address, size, stream) }
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
        FreeBlock { size: self.size, address: self.address, slot }
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
        let (region, note, stream) = (rest.region, rest.note, rest.stream);
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
        MergedBlock { entry: FreeBlock { size, address, slot }, neighbours, is_split: block.is_split() }
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
        let low = blocks.insert_before(high, whole.sibling(0, 1024, PieceState::Allocated));
        let tail = blocks.insert_after(high, whole.sibling(5120, 512, PieceState::Free));
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

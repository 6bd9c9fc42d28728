//! The blocks of all segments in one table. Neighbours are linked by 32-bit slots; a record fills
//! one cache line.
//!
//! A slot keeps its identity through splits and merges as a PyTorch `Block` object does, because
//! the requested size that a snapshot shows for a free block is the last one of the object that
//! survived.

use std::ops::{Index, IndexMut};

use super::free_index::FreeBlock;

/// No slot, no range, no stream uses.
pub(super) const NONE: u32 = u32::MAX;

/// What a slot of the block table holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Nothing: the slot can be reused.
    Vacant,
    /// Addresses of an expandable segment without memory behind them.
    Unmapped,
    /// Memory that can be handed out.
    Free,
    /// Held by a caller.
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
}

/// One block, or one unmapped range of addresses. Aligned, because a plain vector would lay every
/// record across two cache lines.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct BlockRecord {
    pub(super) address: u64,
    pub(super) size: u64,
    /// The size of the request that it serves, or served last.
    pub(super) requested: u64,
    /// The clock of its arena when the block was last added to the free ones (`gc_count_base`).
    pub(super) freed_at: u64,
    /// Neighbours in the segment, by address.
    pub(super) previous: u32,
    /// In a vacant slot: the next vacant one.
    pub(super) next: u32,
    /// The arena (pool, side and stream) it belongs to.
    pub(super) arena: u32,
    /// Its expandable segment, or [`NONE`].
    pub(super) range: u32,
    /// Its entry among the stream uses, or [`NONE`].
    pub(super) uses: u32,
    pub(super) generation: u32,
    pub(super) state: SlotState,
}

impl BlockRecord {
    /// A record without neighbours.
    pub(super) fn lone(address: u64, size: u64, arena: u32, range: u32, state: SlotState) -> BlockRecord {
        BlockRecord {
            address,
            size,
            requested: 0,
            freed_at: 0,
            previous: NONE,
            next: NONE,
            arena,
            range,
            uses: NONE,
            generation: 0,
            state,
        }
    }

    /// Whether other blocks share its segment.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        // `NONE` has all bits set: both are `NONE` only if their conjunction is.
        self.previous & self.next != NONE
    }

    #[inline]
    pub(super) fn is_expandable(&self) -> bool {
        self.range != NONE
    }

    /// Its key among the free blocks of its arena.
    #[inline]
    pub(super) fn entry(&self, slot: u32) -> FreeBlock {
        FreeBlock { size: self.size, address: self.address, slot }
    }

    pub(super) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Becomes the first of the vacant slots.
    #[inline]
    fn vacate(&mut self, vacant: &mut u32, slot: u32) {
        self.state = SlotState::Vacant;
        self.next = std::mem::replace(vacant, slot);
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

/// The blocks of all segments.
#[derive(Clone, Debug)]
pub(super) struct BlockTable {
    records: Vec<BlockRecord>,
    /// The vacant slot to use next, or [`NONE`]; vacant slots form a list.
    vacant: u32,
}

impl Default for BlockTable {
    fn default() -> Self {
        BlockTable { records: Vec::new(), vacant: NONE }
    }
}

impl Index<u32> for BlockTable {
    type Output = BlockRecord;
    #[inline]
    fn index(&self, slot: u32) -> &BlockRecord {
        &self.records[slot as usize]
    }
}

impl IndexMut<u32> for BlockTable {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut BlockRecord {
        &mut self.records[slot as usize]
    }
}

impl BlockTable {
    /// The record in a slot, if there is such a slot.
    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&BlockRecord> {
        self.records.get(slot as usize)
    }

    /// By how many unmapped bytes behind it a block could be extended.
    #[inline]
    pub(super) fn extension(&self, block: &BlockRecord) -> u64 {
        let next = self.get(block.next).filter(|next| next.state == SlotState::Unmapped);
        next.map_or(0, |next| next.size)
    }

    /// Whether memory could be mapped behind a block.
    #[cold]
    pub(super) fn can_extend(&self, slot: u32) -> bool {
        self[slot].is_expandable() && self.extension(&self[slot]) > 0
    }

    /// Every slot in use, in slot order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &BlockRecord)> {
        (0u32..).zip(&self.records).filter(|(_, record)| record.state != SlotState::Vacant)
    }

    /// Gives a record a slot. Generations count on over all blocks of a slot.
    pub(super) fn insert(&mut self, mut record: BlockRecord) -> u32 {
        let slot = self.take_vacant();
        record.generation = self[slot].generation;
        self[slot] = record;
        slot
    }

    /// Takes a vacant slot; the record of the previous block is still in it.
    fn take_vacant(&mut self) -> u32 {
        if self.vacant == NONE {
            self.add_vacant();
        }
        let slot = self.vacant;
        self.vacant = self[slot].next;
        slot
    }

    #[cold]
    fn add_vacant(&mut self) {
        self.vacant = self.records.len() as u32;
        self.records.push(BlockRecord::lone(0, 0, NONE, NONE, SlotState::Vacant));
    }

    /// Vacates a slot; its neighbours must no longer point to it.
    pub(super) fn remove(&mut self, slot: u32) {
        self.records[slot as usize].vacate(&mut self.vacant, slot);
    }

    /// Cuts the first `bytes` off a block; they become a block of their own, which is returned with
    /// its slot. The rest is free since `now`. Written field by field: copying a record that was
    /// just assembled would stall on its stores.
    #[inline(always)]
    pub(super) fn cut_front(&mut self, slot: u32, bytes: u64, now: u64) -> (u32, &mut BlockRecord) {
        if self.vacant == NONE {
            self.add_vacant();
        }
        let front = self.vacant;
        let records = self.records.as_mut_slice();
        let rest = &mut records[slot as usize];
        let (address, arena, range, previous) = (rest.address, rest.arena, rest.range, rest.previous);
        rest.address += bytes;
        rest.size -= bytes;
        rest.previous = front;
        rest.freed_at = now;
        rest.state = SlotState::Free;
        if let Some(previous) = records.get_mut(previous as usize) {
            previous.next = front;
        }
        let block = &mut records[front as usize];
        self.vacant = std::mem::replace(&mut block.next, slot);
        block.address = address;
        block.size = bytes;
        block.previous = previous;
        block.arena = arena;
        block.range = range;
        block.uses = NONE;
        (front, block)
    }

    /// Puts `record` in front of `slot`, in the same segment.
    pub(super) fn insert_before(&mut self, slot: u32, mut record: BlockRecord) -> u32 {
        let previous = self[slot].previous;
        record.previous = previous;
        record.next = slot;
        let inserted = self.insert(record);
        self[slot].previous = inserted;
        if previous != NONE {
            self[previous].next = inserted;
        }
        inserted
    }

    /// Puts `record` behind `slot`, in the same segment.
    pub(super) fn insert_after(&mut self, slot: u32, mut record: BlockRecord) -> u32 {
        let next = self[slot].next;
        record.previous = slot;
        record.next = next;
        let inserted = self.insert(record);
        self[slot].next = inserted;
        if next != NONE {
            self[next].previous = inserted;
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
        kind: SlotState,
        now: u64,
        mut take_out: impl FnMut(FreeBlock),
    ) -> MergedBlock {
        let records = self.records.as_mut_slice();
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
        block.freed_at = now;
        block.state = kind;
        MergedBlock { entry: FreeBlock { size, address, slot }, neighbours, is_split: block.is_split() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_fills_one_cache_line() {
        assert_eq!((size_of::<BlockRecord>(), align_of::<BlockRecord>()), (64, 64));
    }

    #[test]
    fn neighbours_split_and_merge() {
        let mut blocks = BlockTable::default();
        let high = blocks.insert(BlockRecord::lone(1024, 4096, 0, NONE, SlotState::Free));
        let low = blocks.insert_before(high, BlockRecord::lone(0, 1024, 0, NONE, SlotState::Allocated));
        let tail = blocks.insert_after(high, BlockRecord::lone(5120, 512, 0, NONE, SlotState::Free));
        assert_eq!((blocks[low].next, blocks[high].previous, blocks[high].next), (high, low, tail));
        let (front, _) = blocks.cut_front(high, 512, 7);
        assert_eq!((blocks[low].next, blocks[front].next, blocks[high].previous), (front, high, front));
        assert_eq!((blocks[front].address, blocks[high].address, blocks[high].size), (1024, 1536, 3584));
        assert_eq!((blocks[high].state, blocks[high].freed_at), (SlotState::Free, 7));
        blocks[front].state = SlotState::Free;
        let mut gone = Vec::new();
        let merged = blocks.merge(front, SlotState::Free, 8, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size, &gone[..]), (1, true, 4096, &[high][..]));
        blocks[low].state = SlotState::Free;
        let merged = blocks.merge(front, SlotState::Free, 9, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size), (2, false, 5632));
        assert_eq!(gone, [high, low, tail]);
        assert_eq!((blocks[front].address, blocks[front].size, blocks[front].freed_at), (0, 5632, 9));
        assert_eq!(blocks.iter().count(), 1);
    }
}

//! The blocks of all segments, in one slab: neighbours are linked by 32-bit slots, and a block fills one cache line.
//!
//! A slot keeps its identity through splits and merges as a PyTorch block object does, because the requested size that
//! a free block shows is the last one of the object that survived.

use std::ops::{Index, IndexMut};

use super::free_index::Entry;

/// No slot, no range, no stream uses.
pub(super) const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing: the slot waits for a new tenant.
    Vacant,
    /// Addresses of an expandable segment without memory behind them.
    Unmapped,
    /// Memory that can be handed out.
    Free,
    /// In a caller's hands.
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
}

/// One block, or one unmapped range of addresses.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What the present or last owner asked for.
    pub(super) requested: u64,
    /// The pool's clock when the block was last put among the free ones.
    pub(super) shelved_at: u64,
    /// Neighbours in the segment, by address.
    pub(super) previous: u32,
    /// In a vacant slot: the next vacant one.
    pub(super) next: u32,
    /// Which pool and stream it belongs to.
    pub(super) arena: u32,
    /// Its expandable segment, or [`NONE`].
    pub(super) range: u32,
    /// Its entry among the stream uses, or [`NONE`].
    pub(super) uses: u32,
    pub(super) generation: u32,
    pub(super) state: State,
}

impl Record {
    /// A free or unmapped piece without neighbours.
    pub(super) fn lone(address: u64, size: u64, arena: u32, range: u32, state: State) -> Record {
        Record {
            address,
            size,
            requested: 0,
            shelved_at: 0,
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
        // Both are all ones only if their conjunction is.
        self.previous & self.next != NONE
    }

    #[inline]
    pub(super) fn is_expandable(&self) -> bool {
        self.range != NONE
    }

    /// How it stands among the free blocks of its arena.
    #[inline]
    pub(super) fn entry(&self, slot: u32) -> Entry {
        Entry { size: self.size, address: self.address, slot }
    }

    pub(super) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Becomes the first of the vacant slots.
    #[inline]
    fn vacate(&mut self, vacant: &mut u32, slot: u32) {
        self.state = State::Vacant;
        self.next = std::mem::replace(vacant, slot);
    }
}

/// All blocks.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    records: Vec<Record>,
    /// The vacant slot to use next, or [`NONE`]; each names the one after it.
    vacant: u32,
}

impl Default for Blocks {
    fn default() -> Self {
        Blocks { records: Vec::new(), vacant: NONE }
    }
}

impl Index<u32> for Blocks {
    type Output = Record;
    #[inline]
    fn index(&self, slot: u32) -> &Record {
        &self.records[slot as usize]
    }
}

impl IndexMut<u32> for Blocks {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Record {
        &mut self.records[slot as usize]
    }
}

impl Blocks {
    /// The record in a slot, if there is such a slot.
    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&Record> {
        self.records.get(slot as usize)
    }

    /// Every slot in use, in slot order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Record)> {
        (0u32..).zip(&self.records).filter(|(_, record)| record.state != State::Vacant)
    }

    /// Gives a record a slot. Generations count on over all tenants of a slot.
    pub(super) fn insert(&mut self, mut record: Record) -> u32 {
        let slot = self.settle();
        record.generation = self[slot].generation;
        self[slot] = record;
        slot
    }

    /// Finds a slot for a new tenant, whose predecessor's record is still in it.
    #[inline]
    fn settle(&mut self) -> u32 {
        match self.records.get(self.vacant as usize) {
            Some(record) => std::mem::replace(&mut self.vacant, record.next),
            None => self.add_slot(),
        }
    }

    #[cold]
    fn add_slot(&mut self) -> u32 {
        self.records.push(Record::lone(0, 0, NONE, NONE, State::Vacant));
        (self.records.len() - 1) as u32
    }

    /// Vacates a slot; its neighbours must no longer point to it.
    pub(super) fn remove(&mut self, slot: u32) {
        self.records[slot as usize].vacate(&mut self.vacant, slot);
    }

    /// Cuts the first `bytes` off a block; they become an allocated block of their own, which is returned. The rest is
    /// free. Written field by field: moving a whole record that was just put together would stall the processor.
    #[inline]
    pub(super) fn cut_front(&mut self, slot: u32, bytes: u64) -> u32 {
        let front = self.settle();
        let records = self.records.as_mut_slice();
        let rest = &mut records[slot as usize];
        let (address, arena, range, previous) = (rest.address, rest.arena, rest.range, rest.previous);
        rest.address += bytes;
        rest.size -= bytes;
        rest.previous = front;
        rest.state = State::Free;
        let block = &mut records[front as usize];
        block.address = address;
        block.size = bytes;
        block.previous = previous;
        block.next = slot;
        block.arena = arena;
        block.range = range;
        block.uses = NONE;
        block.state = State::Allocated;
        if let Some(previous) = records.get_mut(previous as usize) {
            previous.next = front;
        }
        front
    }

    /// Puts `record` in front of `slot`, in the same segment.
    pub(super) fn insert_before(&mut self, slot: u32, mut record: Record) -> u32 {
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
    pub(super) fn insert_after(&mut self, slot: u32, mut record: Record) -> u32 {
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

    /// Lets a block swallow `previous`, the one in front of it.
    #[inline]
    pub(super) fn absorb_previous(&mut self, slot: u32, previous: u32) {
        let records = self.records.as_mut_slice();
        let gone = &mut records[previous as usize];
        let (address, size, before) = (gone.address, gone.size, gone.previous);
        gone.vacate(&mut self.vacant, previous);
        let block = &mut records[slot as usize];
        block.address = address;
        block.size += size;
        block.previous = before;
        if let Some(before) = records.get_mut(before as usize) {
            before.next = slot;
        }
    }

    /// Lets a block swallow `next`, the one behind it.
    #[inline]
    pub(super) fn absorb_next(&mut self, slot: u32, next: u32) {
        let records = self.records.as_mut_slice();
        let gone = &mut records[next as usize];
        let (size, behind) = (gone.size, gone.next);
        gone.vacate(&mut self.vacant, next);
        let block = &mut records[slot as usize];
        block.size += size;
        block.next = behind;
        if let Some(behind) = records.get_mut(behind as usize) {
            behind.previous = slot;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fills_one_cache_line() {
        assert_eq!(size_of::<Record>(), 64);
    }

    #[test]
    fn neighbours_split_and_merge_without_losing_a_byte() {
        let mut blocks = Blocks::default();
        let high = blocks.insert(Record::lone(1024, 4096, 0, NONE, State::Free));
        let low = blocks.insert_before(high, Record::lone(0, 1024, 0, NONE, State::Allocated));
        let tail = blocks.insert_after(high, Record::lone(5120, 512, 0, NONE, State::Free));
        assert_eq!((blocks[low].next, blocks[high].previous, blocks[high].next), (high, low, tail));
        let front = blocks.cut_front(high, 512);
        assert_eq!((blocks[low].next, blocks[front].next, blocks[high].previous), (front, high, front));
        assert_eq!((blocks[front].address, blocks[high].address, blocks[high].size), (1024, 1536, 3584));
        blocks.absorb_previous(high, front);
        blocks.absorb_previous(high, low);
        blocks.absorb_next(high, tail);
        assert_eq!((blocks[high].address, blocks[high].size, blocks[high].is_split()), (0, 5632, false));
        assert_eq!(blocks.iter().count(), 1);
    }
}

//! The blocks of all ranges and slabs in one table: neighbours and shelves are linked by 32-bit slots, and a block fills
//! one cache line.

use std::ops::{Index, IndexMut};

use oomph_base::StreamId;

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing: the slot waits for a new tenant.
    Vacant,
    /// Addresses without memory behind them.
    Unmapped,
    /// Memory that can be handed out.
    Free,
    /// In a caller's hands.
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
    /// Cut into small blocks, which have records of their own.
    Slab,
}

/// One block, or one stretch of addresses without memory.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Record {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What the present or last owner asked for.
    pub(super) requested: u64,
    /// Neighbours by address, in the same range or slab.
    pub(super) previous: u32,
    /// In a vacant slot: the next vacant one.
    pub(super) next: u32,
    /// Neighbours on the shelf, while the block is free.
    pub(super) ahead: u32,
    pub(super) behind: u32,
    /// The slab that a small block was cut from; [`NONE`] for a block of the page heap.
    pub(super) slab: u32,
    /// Its entry among the stream uses, or [`NONE`].
    pub(super) uses: u32,
    pub(super) generation: u32,
    /// On which stream it may be used without waiting.
    pub(super) stream: StreamId,
    pub(super) state: State,
}

impl Record {
    /// A piece without neighbours.
    pub(super) fn lone(address: u64, size: u64, slab: u32, stream: StreamId, state: State) -> Record {
        Record {
            address,
            size,
            requested: 0,
            previous: NONE,
            next: NONE,
            ahead: NONE,
            behind: NONE,
            slab,
            uses: NONE,
            generation: 0,
            stream,
            state,
        }
    }

    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.address + self.size
    }

    #[inline]
    pub(super) fn is_small(&self) -> bool {
        self.slab != NONE
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

    /// Vacates a slot; its neighbours must no longer point to it.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let vacant = self.vacant;
        let record = &mut self[slot];
        record.state = State::Vacant;
        record.next = vacant;
        self.vacant = slot;
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
        self.records.push(Record::lone(0, 0, NONE, StreamId::DEFAULT, State::Vacant));
        (self.records.len() - 1) as u32
    }

    /// Cuts a block in two: it keeps its first `bytes`, and the rest, which is returned, is of the same kind. Written
    /// field by field: moving a whole record that was just put together would stall the processor.
    #[inline]
    pub(super) fn split(&mut self, slot: u32, bytes: u64) -> u32 {
        let rest = self.settle();
        let records = self.records.as_mut_slice();
        let front = &mut records[slot as usize];
        let (address, size) = (front.address + bytes, front.size - bytes);
        let (behind, slab, stream, state) = (front.next, front.slab, front.stream, front.state);
        front.size = bytes;
        front.next = rest;
        let record = &mut records[rest as usize];
        record.address = address;
        record.size = size;
        record.requested = 0;
        record.previous = slot;
        record.next = behind;
        record.slab = slab;
        record.uses = NONE;
        record.stream = stream;
        record.state = state;
        if let Some(behind) = records.get_mut(behind as usize) {
            behind.previous = rest;
        }
        rest
    }

    /// Lets a block swallow the one behind it, whose slot becomes vacant.
    #[inline]
    pub(super) fn absorb_next(&mut self, slot: u32, next: u32) {
        let records = self.records.as_mut_slice();
        let gone = &mut records[next as usize];
        let (size, behind) = (gone.size, gone.next);
        gone.state = State::Vacant;
        gone.next = std::mem::replace(&mut self.vacant, next);
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
        let front = blocks.insert(Record::lone(512, 4096, NONE, StreamId(3), State::Free));
        let rest = blocks.split(front, 1024);
        let middle = blocks.split(front, 512);
        assert_eq!((blocks[front].next, blocks[middle].next, blocks[rest].previous), (middle, rest, middle));
        assert_eq!((blocks[middle].address, blocks[rest].address, blocks[rest].size), (1024, 1536, 3072));
        assert_eq!((blocks[rest].stream, blocks[rest].state), (StreamId(3), State::Free));
        blocks.absorb_next(front, middle);
        blocks.absorb_next(front, rest);
        assert_eq!((blocks[front].end(), blocks[front].next), (4608, NONE));
        assert_eq!(blocks.iter().count(), 1);
    }
}

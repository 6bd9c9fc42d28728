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

/// One block, or one unmapped range of addresses. Aligned, as a vector alone would lay every record across two cache
/// lines.
#[derive(Clone, Debug)]
#[repr(align(64))]
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

/// What became of a block and its neighbours.
pub(super) struct Merged {
    /// The block as it is now.
    pub(super) entry: Entry,
    /// How many neighbours it swallowed.
    pub(super) neighbours: u64,
    /// Whether other blocks share its segment.
    pub(super) is_split: bool,
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

    /// By how many unmapped bytes behind it a block could be extended.
    #[inline]
    pub(super) fn extension(&self, block: &Record) -> u64 {
        let next = self.get(block.next).filter(|next| next.state == State::Unmapped);
        next.map_or(0, |next| next.size)
    }

    /// Whether memory could be mapped behind a block.
    #[cold]
    pub(super) fn can_extend(&self, slot: u32) -> bool {
        self[slot].is_expandable() && self.extension(&self[slot]) > 0
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
    fn settle(&mut self) -> u32 {
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
        self.records.push(Record::lone(0, 0, NONE, NONE, State::Vacant));
    }

    /// Vacates a slot; its neighbours must no longer point to it.
    pub(super) fn remove(&mut self, slot: u32) {
        self.records[slot as usize].vacate(&mut self.vacant, slot);
    }

    /// Cuts the first `bytes` off a block; they become an allocated block of their own, which is returned with its
    /// slot. The rest is free since `now`. Written field by field: moving a whole record that was just put together
    /// would stall the processor.
    #[inline(always)]
    pub(super) fn cut_front(&mut self, slot: u32, bytes: u64, now: u64) -> (u32, &mut Record) {
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
        rest.shelved_at = now;
        rest.state = State::Free;
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

    /// Lets a block swallow those of its neighbours that are of a kind; `take_out` is told which. From `now` on the block
    /// is of that kind itself. Its record is read once and written once, whatever it swallows.
    #[inline(always)]
    pub(super) fn merge(&mut self, slot: u32, kind: State, now: u64, mut take_out: impl FnMut(Entry)) -> Merged {
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
        block.shelved_at = now;
        block.state = kind;
        Merged { entry: Entry { size, address, slot }, neighbours, is_split: block.is_split() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fills_one_cache_line() {
        assert_eq!((size_of::<Record>(), align_of::<Record>()), (64, 64));
    }

    #[test]
    fn neighbours_split_and_merge_without_losing_a_byte() {
        let mut blocks = Blocks::default();
        let high = blocks.insert(Record::lone(1024, 4096, 0, NONE, State::Free));
        let low = blocks.insert_before(high, Record::lone(0, 1024, 0, NONE, State::Allocated));
        let tail = blocks.insert_after(high, Record::lone(5120, 512, 0, NONE, State::Free));
        assert_eq!((blocks[low].next, blocks[high].previous, blocks[high].next), (high, low, tail));
        let (front, _) = blocks.cut_front(high, 512, 7);
        assert_eq!((blocks[low].next, blocks[front].next, blocks[high].previous), (front, high, front));
        assert_eq!((blocks[front].address, blocks[high].address, blocks[high].size), (1024, 1536, 3584));
        assert_eq!((blocks[high].state, blocks[high].shelved_at), (State::Free, 7));
        blocks[front].state = State::Free;
        let mut gone = Vec::new();
        let merged = blocks.merge(front, State::Free, 8, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size, &gone[..]), (1, true, 4096, &[high][..]));
        blocks[low].state = State::Free;
        let merged = blocks.merge(front, State::Free, 9, |entry| gone.push(entry.slot));
        assert_eq!((merged.neighbours, merged.is_split, merged.entry.size), (2, false, 5632));
        assert_eq!(gone, [high, low, tail]);
        assert_eq!((blocks[front].address, blocks[front].size, blocks[front].shelved_at), (0, 5632, 9));
        assert_eq!(blocks.iter().count(), 1);
    }
}

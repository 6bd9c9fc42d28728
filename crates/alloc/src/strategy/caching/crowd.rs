//! The free blocks of one size beyond the lowest, which waits in the bin itself: a heap, the lowest address first.
//!
//! Blocks leave for two reasons: the lowest because it is handed out, any other because a neighbour merges with it. The
//! second needs its place in the heap, so that is noted by slot. Next to a tree this is one array, and most steps end
//! after a comparison or two.

use std::hint::select_unpredictable;

/// How many children a place in the heap has: with four, most blocks that come in stay at the bottom, which a processor
/// guesses, and the four lie in one or two cache lines.
const CHILDREN: usize = 4;

/// Where each block stands in its crowd, by slot; only of blocks that are in one.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(Vec<u32>);

impl Places {
    #[inline]
    fn note(&mut self, slot: u32, place: usize) {
        match self.0.get_mut(slot as usize) {
            Some(noted) => *noted = place as u32,
            None => self.note_first(slot, place),
        }
    }

    #[cold]
    fn note_first(&mut self, slot: u32, place: usize) {
        self.0.resize((slot as usize + 1).next_power_of_two(), 0);
        self.note(slot, place);
    }
}

/// Addresses and slots of blocks of one size.
#[derive(Clone, Debug, Default)]
pub(super) struct Crowd {
    heap: Vec<(u64, u32)>,
}

impl Crowd {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, block: (u64, u32), places: &mut Places) {
        self.heap.push(block);
        self.rise(self.heap.len() - 1, block, places);
    }

    /// Removes a block that is in here.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32, places: &mut Places) {
        let place = places.0.get(slot as usize).map_or(usize::MAX, |&place| place as usize);
        let Some(last) = self.heap.pop() else { return };
        if place < self.heap.len() {
            let place = self.sink(place, last, places);
            self.rise(place, last, places);
        }
    }

    /// Removes the block with the lowest address.
    #[inline]
    pub(super) fn take_lowest(&mut self, places: &mut Places) -> Option<(u64, u32)> {
        let last = self.heap.pop()?;
        let Some(&lowest) = self.heap.first() else { return Some(last) };
        let place = self.sink(0, last, places);
        self.settle(place, last, places);
        Some(lowest)
    }

    /// The lowest block above an address.
    pub(super) fn above(&self, address: u64) -> Option<(u64, u32)> {
        self.heap.iter().copied().filter(|&(other, _)| other > address).min()
    }

    /// The highest block below an address.
    pub(super) fn below(&self, address: u64) -> Option<(u64, u32)> {
        self.heap.iter().copied().filter(|&(other, _)| other < address).max()
    }

    /// All blocks, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.heap.iter().copied()
    }

    /// Moves the hole at `place` up to where `block` belongs, and puts it there.
    #[inline]
    fn rise(&mut self, mut place: usize, block: (u64, u32), places: &mut Places) {
        while place > 0 {
            let above = (place - 1) / CHILDREN;
            let parent = self.heap[above];
            if parent.0 < block.0 {
                break;
            }
            self.settle(place, parent, places);
            place = above;
        }
        self.settle(place, block, places);
    }

    /// Moves the hole at `place` down to where `block` belongs.
    #[inline]
    fn sink(&mut self, mut place: usize, block: (u64, u32), places: &mut Places) -> usize {
        loop {
            let first = CHILDREN * place + 1;
            let Some(children) = self.heap.get(first..).filter(|children| !children.is_empty()) else { return place };
            let (nth, child) = match children.first_chunk::<CHILDREN>() {
                Some(children) => lowest_of(children),
                None => lowest_of(children),
            };
            if block.0 < child.0 {
                return place;
            }
            self.settle(place, child, places);
            place = first + nth;
        }
    }

    #[inline]
    fn settle(&mut self, place: usize, block: (u64, u32), places: &mut Places) {
        self.heap[place] = block;
        places.note(block.1, place);
    }
}

/// The lowest of some blocks and its place among them. Without a branch: which it is cannot be guessed.
#[inline(always)]
fn lowest_of(blocks: &[(u64, u32)]) -> (usize, (u64, u32)) {
    let (mut place, mut lowest) = (0, blocks[0]);
    for (other, &block) in blocks.iter().enumerate().skip(1) {
        let is_lower = block.0 < lowest.0;
        place = select_unpredictable(is_lower, other, place);
        lowest.0 = select_unpredictable(is_lower, block.0, lowest.0);
        lowest.1 = select_unpredictable(is_lower, block.1, lowest.1);
    }
    (place, lowest)
}

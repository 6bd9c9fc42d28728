//! Segments and the tiles they are cut into: memory under the address at which it was first mapped (GMLake's pBlocks).
//!
//! The tiles of a segment cover it without gaps; free neighbours are always one tile. This file knows neither the device
//! nor stitched ranges, but for a list in each segment of the ranges that show parts of it once more.

use std::{
    collections::BTreeSet,
    ops::{Index, IndexMut},
};

use crate::device::PhysicalId;
use oomph_base::StreamId;

/// No tile.
pub(super) const NONE: u32 = u32::MAX;

/// The two kinds of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pool {
    /// Allocated whole.
    Small,
    /// Made of chunks, which stitched ranges may show once more.
    Large,
}

/// What a tile is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    Free,
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
    /// In use under the addresses of a stitched range.
    Lent,
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) segment: u32,
    pub(super) generation: u32,
    pub(super) state: State,
    previous: u32,
    next: u32,
}

/// Memory taken from the device at once.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: Pool,
    /// Of a large one, in order.
    pub(super) chunks: Vec<PhysicalId>,
    /// The stitched ranges that show parts of it.
    pub(super) shown_in: Vec<u32>,
    /// The tile at its start, which never changes.
    first: u32,
}

/// Free tiles in the order in which best fit looks at them.
type FreeKey = (Pool, StreamId, u64, u64, u32);

/// All segments and their tiles.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiles {
    tiles: Vec<Tile>,
    vacant: Vec<u32>,
    segments: Vec<Option<Segment>>,
    free: BTreeSet<FreeKey>,
}

impl Index<u32> for Tiles {
    type Output = Tile;
    fn index(&self, slot: u32) -> &Tile {
        &self.tiles[slot as usize]
    }
}

impl IndexMut<u32> for Tiles {
    fn index_mut(&mut self, slot: u32) -> &mut Tile {
        &mut self.tiles[slot as usize]
    }
}

impl Tiles {
    pub(super) fn get(&self, slot: u32) -> Option<&Tile> {
        self.tiles.get(slot as usize)
    }

    /// A new segment, one free tile.
    pub(super) fn add_segment(
        &mut self,
        (address, bytes): (u64, u64),
        (pool, stream): (Pool, StreamId),
        chunks: Vec<PhysicalId>,
    ) -> u32 {
        let number = self.segments.iter().position(Option::is_none).unwrap_or_else(|| {
            self.segments.push(None);
            self.segments.len() - 1
        });
        let first = self.settle((address, bytes), number as u32, (NONE, NONE));
        self.segments[number] = Some(Segment { address, bytes, stream, pool, chunks, shown_in: Vec::new(), first });
        self.shelve(first);
        first
    }

    /// Forgets a segment that is one free tile.
    pub(super) fn remove_segment(&mut self, number: u32) -> Option<Segment> {
        let segment = self.segments.get_mut(number as usize)?.take()?;
        let key = (segment.pool, segment.stream, segment.bytes, segment.address, segment.first);
        self.free.remove(&key);
        self.vacate(segment.first);
        Some(segment)
    }

    pub(super) fn segment(&self, number: u32) -> Option<&Segment> {
        self.segments.get(number as usize)?.as_ref()
    }

    pub(super) fn segment_mut(&mut self, number: u32) -> Option<&mut Segment> {
        self.segments.get_mut(number as usize)?.as_mut()
    }

    /// Segments with their numbers.
    pub(super) fn segments(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0..).zip(&self.segments).filter_map(|(number, segment)| Some((number, segment.as_ref()?)))
    }

    /// The segments of which nothing is in use.
    pub(super) fn free_segments(&self) -> Vec<u32> {
        let whole = |segment: &Segment| {
            let first = &self[segment.first];
            first.state == State::Free && first.next == NONE
        };
        self.segments().filter(|(_, segment)| whole(segment)).map(|(number, _)| number).collect()
    }

    /// The tiles of a segment, in address order.
    pub(super) fn of(&self, segment: &Segment) -> impl Iterator<Item = &Tile> {
        self.chain(segment.first).map(|slot| &self[slot])
    }

    /// Slots of all tiles that are handed out or wait for streams.
    pub(super) fn in_use(&self) -> Vec<u32> {
        let used = |tile: &Tile| matches!(tile.state, State::Allocated | State::Pending);
        (0..).zip(&self.tiles).filter(|(_, tile)| used(tile)).map(|(slot, _)| slot).collect()
    }

    /// The smallest free tile of at least this size, the lowest of its like.
    pub(super) fn best_fit(&self, pool: Pool, stream: StreamId, size: u64) -> Option<u32> {
        let wanted = (pool, stream, size, 0, 0);
        let &(found, owner, _, _, slot) = self.free.range(wanted..).next()?;
        (found == pool && owner == stream).then_some(slot)
    }

    /// Free tiles of a stream, the largest first.
    pub(super) fn descending(&self, pool: Pool, stream: StreamId) -> impl Iterator<Item = u32> {
        let (from, to) = ((pool, stream, 0, 0, 0), (pool, stream, u64::MAX, u64::MAX, NONE));
        self.free.range(from..=to).rev().map(|&(.., slot)| slot)
    }

    /// Cuts `size` bytes from the front of a free tile, which then belong to nobody: the caller gives them a state.
    /// Says whether anything was left behind.
    pub(super) fn take_front(&mut self, slot: u32, size: u64) -> bool {
        self.unshelve(slot);
        let rest = self[slot].size - size;
        if rest > 0 {
            let tail = self.cut(slot, size);
            self.shelve(tail);
        }
        rest > 0
    }

    /// Cuts a range out of the free tile around it; `None` where the range is not wholly free.
    pub(super) fn take_range(&mut self, segment: u32, address: u64, bytes: u64) -> Option<u32> {
        let first = self.segment(segment)?.first;
        let around = self.chain(first).find(|&slot| self[slot].address + self[slot].size > address)?;
        let tile = &self[around];
        if tile.state != State::Free || tile.address > address || address + bytes > tile.address + tile.size {
            return None;
        }
        let before = address - tile.address;
        if before == 0 {
            self.take_front(around, bytes);
            return Some(around);
        }
        self.unshelve(around);
        let middle = self.cut(around, before);
        self.shelve(around);
        self.shelve(middle);
        self.take_front(middle, bytes);
        Some(middle)
    }

    /// Makes a tile free, and one with its free neighbours.
    pub(super) fn release(&mut self, slot: u32) {
        let Tile { previous, next, .. } = self[slot];
        if next != NONE && self[next].state == State::Free {
            self.unshelve(next);
            self.absorb_next(slot);
        }
        if previous != NONE && self[previous].state == State::Free {
            self.unshelve(previous);
            self.absorb_next(previous);
            self.shelve(previous);
        } else {
            self.shelve(slot);
        }
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(first), |&slot| Some(self[slot].next).filter(|&next| next != NONE))
    }

    /// Cuts a tile in two; the front keeps its slot. Returns the slot of the rest.
    fn cut(&mut self, slot: u32, front: u64) -> u32 {
        let Tile { address, size, segment, next, .. } = self[slot];
        let rest = self.settle((address + front, size - front), segment, (slot, next));
        self[slot].size = front;
        self[slot].next = rest;
        if next != NONE {
            self[next].previous = rest;
        }
        rest
    }

    fn absorb_next(&mut self, slot: u32) {
        let gone = self[slot].next;
        let Tile { size, next, .. } = self[gone];
        self[slot].size += size;
        self[slot].next = next;
        if next != NONE {
            self[next].previous = slot;
        }
        self.vacate(gone);
    }

    fn shelve(&mut self, slot: u32) {
        self[slot].state = State::Free;
        let key = self.key(slot);
        self.free.extend(key);
    }

    fn unshelve(&mut self, slot: u32) {
        if let Some(key) = self.key(slot) {
            self.free.remove(&key);
        }
    }

    fn key(&self, slot: u32) -> Option<FreeKey> {
        let tile = &self[slot];
        let segment = self.segment(tile.segment)?;
        Some((segment.pool, segment.stream, tile.size, tile.address, slot))
    }

    fn settle(&mut self, (address, size): (u64, u64), segment: u32, (previous, next): (u32, u32)) -> u32 {
        let state = State::Free;
        let tile = Tile { address, size, requested: 0, segment, generation: 0, state, previous, next };
        match self.vacant.pop() {
            Some(slot) => {
                let generation = self[slot].generation;
                self[slot] = Tile { generation, ..tile };
                slot
            }
            None => {
                self.tiles.push(tile);
                (self.tiles.len() - 1) as u32
            }
        }
    }

    fn vacate(&mut self, slot: u32) {
        self[slot].state = State::Vacant;
        self.vacant.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiled() -> (Tiles, u32) {
        let mut tiles = Tiles::default();
        let first = tiles.add_segment((1000, 100), (Pool::Large, StreamId(1)), Vec::new());
        (tiles, first)
    }

    fn sizes(tiles: &Tiles) -> Vec<(u64, State)> {
        tiles.of(tiles.segment(0).unwrap()).map(|tile| (tile.size, tile.state)).collect()
    }

    #[test]
    fn a_range_is_cut_out_of_the_middle_and_joined_again() {
        let (mut tiles, _) = tiled();
        let middle = tiles.take_range(0, 1040, 20).unwrap();
        tiles[middle].state = State::Lent;
        assert_eq!(sizes(&tiles), [(40, State::Free), (20, State::Lent), (40, State::Free)]);
        assert_eq!(tiles.take_range(0, 1030, 20), None, "half of it is lent");
        assert!(tiles.free_segments().is_empty());
        tiles.release(middle);
        assert_eq!(sizes(&tiles), [(100, State::Free)]);
        assert_eq!(tiles.free_segments(), [0]);
    }

    #[test]
    fn best_fit_keeps_to_its_pool_and_stream() {
        let (mut tiles, first) = tiled();
        tiles.add_segment((5000, 50), (Pool::Large, StreamId(1)), Vec::new());
        tiles.add_segment((7000, 30), (Pool::Large, StreamId(2)), Vec::new());
        let fit = |tiles: &Tiles, size| tiles.best_fit(Pool::Large, StreamId(1), size).map(|slot| tiles[slot].address);
        assert_eq!([20, 51, 101].map(|size| fit(&tiles, size)), [Some(5000), Some(1000), None]);
        assert_eq!(tiles.best_fit(Pool::Small, StreamId(1), 1), None);
        assert!(tiles.take_front(first, 60));
        tiles[first].state = State::Allocated;
        assert_eq!(fit(&tiles, 30), Some(1060));
    }
}

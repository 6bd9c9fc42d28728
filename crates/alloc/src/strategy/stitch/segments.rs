//! Segments and the tiles they are cut into: memory under the address at which it was first mapped
//! (GMLake's pBlocks).
//!
//! The tiles of a segment cover it without gaps; free neighbours are always one tile. A segment
//! lists the stitched ranges that show parts of it. This file does not know the device.

use std::{
    collections::BTreeSet,
    ops::{Deref, DerefMut},
};

use crate::device::PhysicalId;
use crate::strategy::{
    pooled::{MemoryPiece, NONE, PieceState, PieceTable},
    slots::insert_first_free,
};
use oomph_base::StreamId;

/// The two kinds of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SegmentPool {
    /// One device allocation.
    Small,
    /// Made of chunks, which stitched ranges may show once more.
    Large,
}

/// Memory taken from the device at once.
#[derive(Clone, Debug)]
pub(super) struct StitchSegment {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: SegmentPool,
    /// The chunks of a large segment, in order.
    pub(super) chunks: Vec<PhysicalId>,
    /// The stitched ranges that show parts of it.
    pub(super) shown_in: Vec<u32>,
    /// The tile at its start, which never changes.
    first: u32,
}

/// Free tiles in the order of best fit.
type FreeKey = (SegmentPool, StreamId, u64, u64, u32);

/// All segments and their tiles.
#[derive(Clone, Debug, Default)]
pub(super) struct SegmentTiles {
    /// Tiles, and the stitched ranges, which belong to no segment.
    table: PieceTable,
    segments: Vec<Option<StitchSegment>>,
    free: BTreeSet<FreeKey>,
}

/// The segments are used like the table of their tiles.
impl Deref for SegmentTiles {
    type Target = PieceTable;
    fn deref(&self) -> &PieceTable {
        &self.table
    }
}

impl DerefMut for SegmentTiles {
    fn deref_mut(&mut self) -> &mut PieceTable {
        &mut self.table
    }
}

impl SegmentTiles {
    /// A new segment, one free tile.
    pub(super) fn add_segment(
        &mut self,
        (address, bytes): (u64, u64),
        (pool, stream): (SegmentPool, StreamId),
        chunks: Vec<PhysicalId>,
    ) -> u32 {
        let (first, shown_in) = (self.table.insert(MemoryPiece::new(address, bytes, stream)), Vec::new());
        let segment = StitchSegment { address, bytes, stream, pool, chunks, shown_in, first };
        self.table[first].region = insert_first_free(&mut self.segments, segment);
        self.insert_free(first);
        first
    }

    /// Forgets a segment that is one free tile.
    pub(super) fn remove_segment(&mut self, number: u32) -> Option<StitchSegment> {
        let segment = self.segments.get_mut(number as usize)?.take()?;
        let key = (segment.pool, segment.stream, segment.bytes, segment.address, segment.first);
        self.free.remove(&key);
        self.table.remove(segment.first);
        Some(segment)
    }

    pub(super) fn segment(&self, number: u32) -> Option<&StitchSegment> {
        self.segments.get(number as usize)?.as_ref()
    }

    pub(super) fn segment_mut(&mut self, number: u32) -> Option<&mut StitchSegment> {
        self.segments.get_mut(number as usize)?.as_mut()
    }

    /// Segments with their numbers.
    pub(super) fn segments(&self) -> impl Iterator<Item = (u32, &StitchSegment)> {
        (0..).zip(&self.segments).filter_map(|(number, segment)| Some((number, segment.as_ref()?)))
    }

    /// The segments of which nothing is in use.
    pub(super) fn free_segments(&self) -> Vec<u32> {
        let whole =
            |segment: &StitchSegment| self.table.free_piece(segment.first).is_some_and(|tile| tile.next == NONE);
        self.segments().filter(|(_, segment)| whole(segment)).map(|(number, _)| number).collect()
    }

    /// The tiles of a segment, in address order.
    pub(super) fn of(&self, segment: &StitchSegment) -> impl Iterator<Item = &MemoryPiece> {
        self.table.chain(segment.first).map(|slot| &self[slot])
    }

    /// The smallest free tile of at least this size, the lowest address among equals.
    pub(super) fn best_fit(&self, pool: SegmentPool, stream: StreamId, size: u64) -> Option<u32> {
        let wanted = (pool, stream, size, 0, 0);
        let &(found, owner, _, _, slot) = self.free.range(wanted..).next()?;
        (found == pool && owner == stream).then_some(slot)
    }

    /// Free tiles of a stream, the largest first.
    pub(super) fn descending(&self, pool: SegmentPool, stream: StreamId) -> impl Iterator<Item = u32> {
        let (from, to) = ((pool, stream, 0, 0, 0), (pool, stream, u64::MAX, u64::MAX, NONE));
        self.free.range(from..=to).rev().map(|&(.., slot)| slot)
    }

    /// Cuts `size` bytes from the front of a free tile, which is then in no list: the caller sets
    /// its state. Returns whether anything was cut off.
    pub(super) fn take_front(&mut self, slot: u32, size: u64) -> bool {
        self.remove_free(slot);
        let cut = self[slot].size > size;
        if cut {
            let tail = self.table.cut(slot, size);
            self.insert_free(tail);
        }
        cut
    }

    /// Cuts a range out of the free tile around it; `None` if the range is not wholly free.
    pub(super) fn take_range(&mut self, segment: u32, address: u64, bytes: u64) -> Option<u32> {
        let first = self.segment(segment)?.first;
        let around = self.table.chain(first).find(|&slot| self[slot].end() > address)?;
        let tile = self.table.free_piece(around)?;
        if tile.address > address || address + bytes > tile.end() {
            return None;
        }
        let before = address - tile.address;
        if before == 0 {
            self.take_front(around, bytes);
            return Some(around);
        }
        self.remove_free(around);
        let middle = self.table.cut(around, before);
        self.insert_free(around);
        self.insert_free(middle);
        self.take_front(middle, bytes);
        Some(middle)
    }

    /// Makes a tile free and joins it with its free neighbours.
    pub(super) fn release(&mut self, slot: u32) {
        let SegmentTiles { table, segments, free } = self;
        let joined = table.join_free(
            slot,
            |_| true,
            |pieces, gone| {
                if let Some(key) = key(segments, &pieces[gone], gone) {
                    free.remove(&key);
                }
            },
        );
        self.insert_free(joined);
    }

    fn insert_free(&mut self, slot: u32) {
        self[slot].state = PieceState::Free;
        self.free.extend(key(&self.segments, &self.table[slot], slot));
    }

    fn remove_free(&mut self, slot: u32) {
        if let Some(key) = key(&self.segments, &self.table[slot], slot) {
            self.free.remove(&key);
        }
    }
}

/// The place of a tile among the free ones.
fn key(segments: &[Option<StitchSegment>], tile: &MemoryPiece, slot: u32) -> Option<FreeKey> {
    let segment = segments.get(tile.region as usize)?.as_ref()?;
    Some((segment.pool, segment.stream, tile.size, tile.address, slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiled() -> (SegmentTiles, u32) {
        let mut tiles = SegmentTiles::default();
        let first = tiles.add_segment((1000, 100), (SegmentPool::Large, StreamId(1)), Vec::new());
        (tiles, first)
    }

    fn sizes(tiles: &SegmentTiles) -> Vec<(u64, PieceState)> {
        tiles.of(tiles.segment(0).unwrap()).map(|tile| (tile.size, tile.state)).collect()
    }

    #[test]
    fn a_range_is_cut_out_of_the_middle_and_joined_again() {
        let (mut tiles, _) = tiled();
        let middle = tiles.take_range(0, 1040, 20).unwrap();
        tiles[middle].state = PieceState::Lent;
        assert_eq!(sizes(&tiles), [(40, PieceState::Free), (20, PieceState::Lent), (40, PieceState::Free)]);
        assert_eq!(tiles.take_range(0, 1030, 20), None, "half of it is lent");
        assert!(tiles.free_segments().is_empty());
        tiles.release(middle);
        assert_eq!(sizes(&tiles), [(100, PieceState::Free)]);
        assert_eq!(tiles.free_segments(), [0]);
    }

    #[test]
    fn best_fit_keeps_to_its_pool_and_stream() {
        let (mut tiles, first) = tiled();
        tiles.add_segment((5000, 50), (SegmentPool::Large, StreamId(1)), Vec::new());
        tiles.add_segment((7000, 30), (SegmentPool::Large, StreamId(2)), Vec::new());
        let fit = |tiles: &SegmentTiles, size| {
            tiles.best_fit(SegmentPool::Large, StreamId(1), size).map(|slot| tiles[slot].address)
        };
        assert_eq!([20, 51, 101].map(|size| fit(&tiles, size)), [Some(5000), Some(1000), None]);
        assert_eq!(tiles.best_fit(SegmentPool::Small, StreamId(1), 1), None);
        assert!(tiles.take_front(first, 60));
        tiles[first].state = PieceState::Allocated;
        assert_eq!(fit(&tiles, 30), Some(1060));
    }
}

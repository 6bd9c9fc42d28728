//! Stitched ranges (GMLake's sBlocks): second addresses for memory that tiles already hold.
//!
//! A range can serve only while all of its memory is free, so each counts how much of its memory is
//! in use under any address. Its memory is given as spans of segment addresses, which do not change
//! when tiles are cut and joined. This file does not know the device.

use std::{
    collections::BTreeSet,
    ops::{Index, IndexMut},
};

use crate::strategy::pooled::MemoryPiece;
use oomph_base::{Address, StreamId};

/// Memory of one segment, by the segment's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentSpan {
    pub(super) segment: u32,
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl SegmentSpan {
    /// The memory of a tile.
    pub(super) fn of(tile: &MemoryPiece) -> SegmentSpan {
        SegmentSpan { segment: tile.region, address: tile.address, bytes: tile.size }
    }

    fn overlap(&self, other: &SegmentSpan) -> u64 {
        if self.segment != other.segment {
            return 0;
        }
        let end = (self.address + self.bytes).min(other.address + other.bytes);
        end.saturating_sub(self.address.max(other.address))
    }
}

/// A stitched range. A vacant entry has no spans.
#[derive(Clone, Debug)]
pub(super) struct StitchedRange {
    /// Its entry in the table of pieces, by which callers hold it.
    pub(super) piece: u32,
    pub(super) address: Address,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) spans: Vec<SegmentSpan>,
    /// The tiles of its memory while it is in use.
    pub(super) tiles: Vec<u32>,
    /// Bytes of its memory that are in use, under its own addresses or others.
    busy: u64,
    /// When it was last freed, on a clock of frees.
    freed_at: u64,
}

/// All stitched ranges.
#[derive(Clone, Debug, Default)]
pub(super) struct StitchedRanges {
    ranges: Vec<StitchedRange>,
    vacant: Vec<u32>,
    /// Idle ranges whose memory is free, for best fit.
    free: BTreeSet<(StreamId, u64, Address, u32)>,
    clock: u64,
    /// Addresses of all ranges together.
    pub(super) bytes: u64,
}

impl Index<u32> for StitchedRanges {
    type Output = StitchedRange;
    fn index(&self, slot: u32) -> &StitchedRange {
        &self.ranges[slot as usize]
    }
}

impl IndexMut<u32> for StitchedRanges {
    fn index_mut(&mut self, slot: u32) -> &mut StitchedRange {
        &mut self.ranges[slot as usize]
    }
}

impl StitchedRanges {
    /// A new range over memory that is still free.
    pub(super) fn add(&mut self, piece: u32, address: Address, stream: StreamId, spans: Vec<SegmentSpan>) -> u32 {
        let bytes = spans.iter().map(|span| span.bytes).sum();
        let number = self.vacant.pop().unwrap_or(self.ranges.len() as u32);
        let freed_at = self.clock;
        let range = StitchedRange { piece, address, bytes, stream, spans, tiles: Vec::new(), busy: 0, freed_at };
        match self.ranges.get_mut(number as usize) {
            Some(vacant) => *vacant = range,
            None => self.ranges.push(range),
        }
        self.bytes += bytes;
        self.free.insert((stream, bytes, address, number));
        number
    }

    /// Forgets an idle range.
    pub(super) fn remove(&mut self, number: u32) {
        let StitchedRange { address, bytes, stream, .. } = self[number];
        self.free.remove(&(stream, bytes, address, number));
        self[number].spans.clear();
        self.bytes -= bytes;
        self.vacant.push(number);
    }

    /// The smallest range of wholly free memory between `size` and `largest`.
    pub(super) fn best_fit(&self, stream: StreamId, size: u64, largest: u64) -> Option<u32> {
        let &(owner, bytes, _, slot) = self.free.range((stream, size, Address::NULL, 0)..).next()?;
        (owner == stream && bytes <= largest).then_some(slot)
    }

    /// The largest range of wholly free memory.
    pub(super) fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let (from, to) = ((stream, 0, Address::NULL, 0), (stream, u64::MAX, Address(u64::MAX), u32::MAX));
        self.free.range(from..=to).next_back().map(|&(_, bytes, ..)| bytes)
    }

    /// Counts memory as in use, or as free again, in the ranges that show it.
    pub(super) fn count_use(&mut self, shown_in: &[u32], memory: &SegmentSpan, taken: bool) {
        for &slot in shown_in {
            let range = &mut self.ranges[slot as usize];
            let overlap: u64 = range.spans.iter().map(|span| span.overlap(memory)).sum();
            let key = (range.stream, range.bytes, range.address, slot);
            range.busy = if taken { range.busy + overlap } else { range.busy - overlap };
            if range.busy == 0 {
                self.free.insert(key);
            } else {
                self.free.remove(&key);
            }
        }
    }

    /// A range was freed: notes when, for the order of least recent use.
    pub(super) fn note_freed(&mut self, number: u32) {
        self.clock += 1;
        let clock = self.clock;
        self[number].freed_at = clock;
    }

    /// Idle ranges whose memory is wholly free, or all others that are idle; the least recently
    /// used first.
    pub(super) fn idle(&self, wholly_free: bool) -> Vec<u32> {
        let idle = |range: &StitchedRange| !range.spans.is_empty() && range.tiles.is_empty();
        let wanted = |range: &StitchedRange| idle(range) && (range.busy == 0) == wholly_free;
        let ranges = (0..).zip(&self.ranges).filter(|(_, range)| wanted(range));
        let mut numbers: Vec<u32> = ranges.map(|(number, _)| number).collect();
        numbers.sort_by_key(|&number| (self[number].freed_at, number));
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: StreamId = StreamId(0);

    fn span(address: u64, bytes: u64) -> SegmentSpan {
        SegmentSpan { segment: 0, address, bytes }
    }

    #[test]
    fn a_range_serves_only_while_all_of_its_memory_is_free() {
        let mut ranges = StitchedRanges::default();
        let wide = ranges.add(0, Address(1 << 40), STREAM, vec![span(100, 50), span(200, 50)]);
        let narrow = ranges.add(1, Address(2 << 40), STREAM, vec![span(120, 10), span(300, 60)]);
        assert_eq!((ranges.best_fit(STREAM, 60, 1000), ranges.bytes), (Some(narrow), 170));
        ranges.count_use(&[wide, narrow], &span(110, 15), true);
        assert_eq!(ranges.best_fit(STREAM, 60, 1000), None);
        ranges.count_use(&[wide, narrow], &span(240, 10), true);
        ranges.count_use(&[wide, narrow], &span(110, 15), false);
        assert_eq!(ranges.best_fit(STREAM, 60, 1000), Some(narrow));
        assert_eq!(ranges.idle(false), [wide]);
        ranges.count_use(&[wide, narrow], &span(240, 10), false);
        assert_eq!((ranges.best_fit(STREAM, 80, 1000), ranges.best_fit(STREAM, 10, 60)), (Some(wide), None));
        assert_eq!((ranges.largest_free(STREAM), ranges.largest_free(StreamId(1))), (Some(100), None));
    }
}

//! Stitched ranges (GMLake's sBlocks): second addresses for memory that tiles already hold.
//!
//! A range is worth something only while all of its memory is free, so each counts how much of its memory is in use,
//! by whomever. Which memory it shows is written as runs of addresses of the segments, which stay when tiles are cut
//! and joined. This file knows no device.

use std::{
    collections::BTreeSet,
    ops::{Index, IndexMut},
};

use oomph_base::{Address, StreamId};

/// What a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    /// In nobody's hands; all or part of its memory may be in use under other addresses.
    Idle,
    Allocated,
    /// Freed, and waiting for streams.
    Pending,
}

/// Memory of one segment, by the segment's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) segment: u32,
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Run {
    fn overlap(&self, other: &Run) -> u64 {
        if self.segment != other.segment {
            return 0;
        }
        let end = (self.address + self.bytes).min(other.address + other.bytes);
        end.saturating_sub(self.address.max(other.address))
    }
}

/// A stitched range.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) address: Address,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) runs: Vec<Run>,
    pub(super) state: State,
    pub(super) requested: u64,
    pub(super) generation: u32,
    /// While in use: the tiles under it.
    pub(super) tiles: Vec<u32>,
    /// Bytes of its memory that are in use, under its own addresses or others.
    busy: u64,
    /// When it was last freed, on a clock of frees.
    freed_at: u64,
}

/// All stitched ranges.
#[derive(Clone, Debug, Default)]
pub(super) struct Fused {
    ranges: Vec<Range>,
    vacant: Vec<u32>,
    /// Idle ranges whose memory is free, for best fit.
    free: BTreeSet<(StreamId, u64, Address, u32)>,
    clock: u64,
    /// Addresses of all ranges together.
    pub(super) bytes: u64,
}

impl Index<u32> for Fused {
    type Output = Range;
    fn index(&self, slot: u32) -> &Range {
        &self.ranges[slot as usize]
    }
}

impl IndexMut<u32> for Fused {
    fn index_mut(&mut self, slot: u32) -> &mut Range {
        &mut self.ranges[slot as usize]
    }
}

impl Fused {
    pub(super) fn get(&self, slot: u32) -> Option<&Range> {
        self.ranges.get(slot as usize)
    }

    /// A new range over memory that is still free.
    pub(super) fn add(&mut self, address: Address, stream: StreamId, runs: Vec<Run>) -> u32 {
        let bytes = runs.iter().map(|run| run.bytes).sum();
        let slot = self.vacant.pop().unwrap_or(self.ranges.len() as u32);
        let generation = self.get(slot).map_or(0, |range| range.generation);
        let (state, freed_at) = (State::Idle, self.clock);
        let tiles = Vec::new();
        let range = Range { address, bytes, stream, runs, state, requested: 0, generation, tiles, busy: 0, freed_at };
        match self.ranges.get_mut(slot as usize) {
            Some(place) => *place = range,
            None => self.ranges.push(range),
        }
        self.bytes += bytes;
        self.free.insert((stream, bytes, address, slot));
        slot
    }

    /// Forgets an idle range.
    pub(super) fn remove(&mut self, slot: u32) {
        let Range { address, bytes, stream, .. } = self[slot];
        self.free.remove(&(stream, bytes, address, slot));
        self[slot].state = State::Vacant;
        self[slot].runs.clear();
        self.bytes -= bytes;
        self.vacant.push(slot);
    }

    /// The smallest range of wholly free memory that is large enough and not too large.
    pub(super) fn best_fit(&self, stream: StreamId, size: u64, largest: u64) -> Option<u32> {
        let &(owner, bytes, _, slot) = self.free.range((stream, size, Address::NULL, 0)..).next()?;
        (owner == stream && bytes <= largest).then_some(slot)
    }

    /// The largest range of wholly free memory.
    pub(super) fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let (from, to) = ((stream, 0, Address::NULL, 0), (stream, u64::MAX, Address(u64::MAX), u32::MAX));
        self.free.range(from..=to).next_back().map(|&(_, bytes, ..)| bytes)
    }

    /// Ranges of `shown_in` learn that this memory is in use from now on.
    pub(super) fn memory_taken(&mut self, shown_in: &[u32], taken: &Run) {
        for &slot in shown_in {
            let range = &mut self.ranges[slot as usize];
            let overlap: u64 = range.runs.iter().map(|run| run.overlap(taken)).sum();
            if overlap > 0 && range.busy == 0 {
                self.free.remove(&(range.stream, range.bytes, range.address, slot));
            }
            range.busy += overlap;
        }
    }

    /// Ranges of `shown_in` learn that this memory is free again.
    pub(super) fn memory_freed(&mut self, shown_in: &[u32], freed: &Run) {
        for &slot in shown_in {
            let range = &mut self.ranges[slot as usize];
            let overlap: u64 = range.runs.iter().map(|run| run.overlap(freed)).sum();
            range.busy -= overlap;
            if overlap > 0 && range.busy == 0 {
                self.free.insert((range.stream, range.bytes, range.address, slot));
            }
        }
    }

    /// A range is about to come back from its user: its place among the least recently used.
    pub(super) fn note_freed(&mut self, slot: u32) {
        self.clock += 1;
        let clock = self.clock;
        self[slot].freed_at = clock;
        self[slot].state = State::Idle;
    }

    /// Ranges with their slots, vacant ones left out.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Range)> {
        (0..).zip(&self.ranges).filter(|(_, range)| range.state != State::Vacant)
    }

    /// Idle ranges whose memory is wholly free, or all others that are idle; the least recently used first.
    pub(super) fn idle(&self, wholly_free: bool) -> Vec<u32> {
        let wanted = |range: &Range| range.state == State::Idle && (range.busy == 0) == wholly_free;
        let mut slots: Vec<u32> = self.iter().filter(|(_, range)| wanted(range)).map(|(slot, _)| slot).collect();
        slots.sort_by_key(|&slot| (self[slot].freed_at, slot));
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: StreamId = StreamId(0);

    fn run(address: u64, bytes: u64) -> Run {
        Run { segment: 0, address, bytes }
    }

    #[test]
    fn a_range_serves_only_while_all_of_its_memory_is_free() {
        let mut fused = Fused::default();
        let wide = fused.add(Address(1 << 40), STREAM, vec![run(100, 50), run(200, 50)]);
        let narrow = fused.add(Address(2 << 40), STREAM, vec![run(120, 10), run(300, 60)]);
        assert_eq!((fused.best_fit(STREAM, 60, 1000), fused.bytes), (Some(narrow), 170));
        fused.memory_taken(&[wide, narrow], &run(110, 15));
        assert_eq!(fused.best_fit(STREAM, 60, 1000), None);
        fused.memory_taken(&[wide, narrow], &run(240, 10));
        fused.memory_freed(&[wide, narrow], &run(110, 15));
        assert_eq!(fused.best_fit(STREAM, 60, 1000), Some(narrow));
        assert_eq!(fused.idle(false), [wide]);
        fused.memory_freed(&[wide, narrow], &run(240, 10));
        assert_eq!((fused.best_fit(STREAM, 80, 1000), fused.best_fit(STREAM, 10, 60)), (Some(wide), None));
        assert_eq!((fused.largest_free(STREAM), fused.largest_free(StreamId(1))), (Some(100), None));
    }
}

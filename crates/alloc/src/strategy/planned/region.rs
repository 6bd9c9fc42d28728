//! The memory that a plan is carried out in: one allocation a stream, and what lies where in it.

use std::collections::BTreeMap;

use crate::strategy::{BlockState, BlockView, SegmentView};
use oomph_base::{Address, StreamId};

/// One static region.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) address: Address,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    /// Blocks by offset, those included that wait for streams.
    blocks: BTreeMap<u64, Occupant>,
}

/// A block in a region.
#[derive(Clone, Copy, Debug)]
struct Occupant {
    size: u64,
    requested: u64,
    pending: bool,
}

impl Region {
    pub(super) fn new(address: Address, bytes: u64, stream: StreamId) -> Region {
        Region { address, bytes, stream, blocks: BTreeMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether nobody is where a block of this size would go. A plan is only a forecast: its places may still be
    /// taken by blocks that live longer than those of the profiled step.
    pub(super) fn is_vacant(&self, offset: u64, size: u64) -> bool {
        let end = offset + size;
        let before = self.blocks.range(..end).next_back();
        end <= self.bytes && before.is_none_or(|(&start, block)| start + block.size <= offset)
    }

    pub(super) fn occupy(&mut self, offset: u64, size: u64, requested: u64) {
        self.blocks.insert(offset, Occupant { size, requested, pending: false });
    }

    pub(super) fn set_pending(&mut self, offset: u64) {
        if let Some(block) = self.blocks.get_mut(&offset) {
            block.pending = true;
        }
    }

    pub(super) fn vacate(&mut self, offset: u64) {
        self.blocks.remove(&offset);
    }

    pub(super) fn view(&self) -> SegmentView {
        let mut blocks = Vec::new();
        let mut end = 0;
        let gap = |from: u64, to: u64| BlockView {
            address: self.address.offset(from),
            size: to - from,
            requested: 0,
            state: BlockState::Free,
        };
        for (&offset, &Occupant { size, requested, pending }) in &self.blocks {
            if offset > end {
                blocks.push(gap(end, offset));
            }
            let state = if pending { BlockState::Pending } else { BlockState::Allocated };
            blocks.push(BlockView { address: self.address.offset(offset), size, requested, state });
            end = offset + size;
        }
        if end < self.bytes {
            blocks.push(gap(end, self.bytes));
        }
        SegmentView {
            address: self.address,
            bytes: self.bytes,
            stream: self.stream,
            pool: "planned".into(),
            pool_id: (0, 0),
            mapped: false,
            alias: false,
            blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_vacant_where_no_block_reaches_into_it() {
        let mut region = Region::new(Address(4096), 100, StreamId(0));
        region.occupy(20, 30, 25);
        let vacant = [(0, 20), (0, 21), (49, 5), (50, 50), (50, 51), (0, 100), (10, 5)];
        let answers = vacant.map(|(offset, size)| region.is_vacant(offset, size));
        assert_eq!(answers, [true, false, false, true, false, false, true]);
        let sizes: Vec<u64> = region.view().blocks.iter().map(|block| block.size).collect();
        assert_eq!(sizes, [20, 30, 50]);
        region.vacate(20);
        assert!(region.is_empty() && region.is_vacant(0, 100));
    }
}

//! Looking at the memory of the strategy from outside: segments with their blocks, and the largest free block.

use super::{
    Caching,
    blocks::{NONE, State},
};
use crate::strategy::{BlockState, BlockView, Layout, SegmentView};
use oomph_base::{Address, StreamId};
use oomph_pytorch::SMALL_SIZE;

impl Caching {
    /// Segments in address order; of expandable ones every contiguous mapped stretch.
    pub(super) fn segments(&self) -> Layout {
        let starts_segment = |slot: u32| slot == NONE || self.blocks[slot].state == State::Unmapped;
        let heads =
            self.blocks.iter().filter(|(_, block)| block.state != State::Unmapped && starts_segment(block.previous));
        let mut segments: Vec<SegmentView> = heads.map(|(slot, _)| self.segment(slot)).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    fn segment(&self, head: u32) -> SegmentView {
        let arena = &self.pools.arenas[self.blocks[head].arena as usize];
        let mut blocks = Vec::new();
        let mut slot = head;
        while slot != NONE {
            let block = &self.blocks[slot];
            let state = match block.state {
                State::Unmapped | State::Vacant => break,
                State::Free => BlockState::Free,
                State::Allocated => BlockState::Allocated,
                State::Pending => BlockState::Pending,
            };
            blocks.push(BlockView {
                address: Address(block.address),
                size: block.size,
                requested: block.requested,
                state,
            });
            slot = block.next;
        }
        SegmentView {
            address: Address(self.blocks[head].address),
            bytes: blocks.iter().map(|block| block.size).sum(),
            stream: arena.stream,
            pool: if arena.is_large() { "large" } else { "small" }.into(),
            pool_id: self.pools.pools[arena.pool() as usize].key,
            mapped: self.blocks[head].is_expandable(),
            alias: false,
            blocks,
        }
    }

    /// The largest request of this stream that a cached block would serve.
    pub(super) fn largest_cached(&self, stream: StreamId) -> u64 {
        let largest = |large: bool| {
            let side = self.pools.side_for(stream, large);
            let arena = *self.pools.sides[side as usize].arenas.get(stream.index()).filter(|&&arena| arena != NONE)?;
            let free = &self.pools.arenas[arena as usize].free;
            let mut found = free.last()?;
            // Mapped memory is passed over while expandable segments are off.
            while self.blocks[found.slot].is_expandable() && !self.settings.expandable_segments {
                found = free.before(found.size, found.address)?;
            }
            Some(found.size)
        };
        // Small requests never get large blocks, nor the other way round.
        let large = largest(true).filter(|&size| size > SMALL_SIZE);
        large.or_else(|| largest(false).map(|size| size.min(SMALL_SIZE))).unwrap_or(0)
    }
}

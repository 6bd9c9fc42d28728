//! Looking at the memory of the strategy from outside: segments with their blocks, and the largest free block.

use super::{
    SMALL_SIZE, Stitch,
    alloc::Pressure,
    fused,
    tiles::{self, Pool, Segment},
};
use crate::strategy::{BlockState, BlockView, Layout, SegmentView};
use oomph_base::{Address, StreamId};

impl Stitch {
    /// Segments and the ranges in use, in address order. An idle range is only addresses.
    pub(super) fn segments(&self) -> Layout {
        let mut segments: Vec<SegmentView> = self.tiles.segments().map(|(_, segment)| self.segment(segment)).collect();
        segments.extend(self.fused.iter().filter_map(|(_, range)| range_in_use(range)));
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    fn segment(&self, segment: &Segment) -> SegmentView {
        let blocks = self.tiles.of(segment).map(|tile| BlockView {
            address: Address(tile.address),
            size: tile.size,
            requested: tile.requested,
            state: match tile.state {
                tiles::State::Vacant | tiles::State::Free => BlockState::Free,
                tiles::State::Allocated => BlockState::Allocated,
                tiles::State::Pending => BlockState::Pending,
                tiles::State::Lent => BlockState::Lent,
            },
        });
        SegmentView {
            address: Address(segment.address),
            bytes: segment.bytes,
            stream: segment.stream,
            pool: if segment.pool == Pool::Large { "large" } else { "small" }.into(),
            pool_id: (0, 0),
            mapped: segment.pool == Pool::Large,
            alias: false,
            blocks: blocks.collect(),
        }
    }

    /// The largest request of this stream that needs no new memory.
    pub(super) fn largest_cached(&self, stream: StreamId) -> u64 {
        let sizes = |pool| self.tiles.descending(pool, stream).map(|slot| self.tiles[slot].size);
        let tile = sizes(Pool::Large).next().unwrap_or(0);
        let range = self.fused.largest_free(stream).filter(|_| self.settings.reuse_limit > 0).unwrap_or(0);
        let together: u64 = sizes(Pool::Large).sum();
        let stitched = if self.may_stitch(together, Pressure::None) { together } else { 0 };
        match tile.max(range).max(stitched) {
            0 => sizes(Pool::Small).next().unwrap_or(0).min(SMALL_SIZE),
            large => large,
        }
    }
}

fn range_in_use(range: &fused::Range) -> Option<SegmentView> {
    let state = match range.state {
        fused::State::Vacant | fused::State::Idle => return None,
        fused::State::Allocated => BlockState::Allocated,
        fused::State::Pending => BlockState::Pending,
    };
    let &fused::Range { address, bytes, stream, requested, .. } = range;
    Some(SegmentView {
        address,
        bytes,
        stream,
        pool: "stitched".into(),
        pool_id: (0, 0),
        mapped: true,
        alias: true,
        blocks: vec![BlockView { address, size: bytes, requested, state }],
    })
}

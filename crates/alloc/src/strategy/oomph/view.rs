//! Looking at the memory of the strategy from outside: segments with their blocks, and the largest free block.

use std::collections::BTreeMap;

use super::{
    Oomph,
    blocks::{NONE, Record, State},
};
use crate::strategy::{BlockState, BlockView, Layout, SegmentView};
use oomph_base::{Address, StreamId};

impl Oomph {
    /// Every contiguous mapped stretch, slabs as the small blocks in them. A stretch may hold blocks of several streams;
    /// it is shown as that of its first.
    pub(super) fn segments(&self) -> Layout {
        let heads = self.blocks.iter().filter(|(_, record)| record.is_small() && record.previous == NONE);
        let slabs: BTreeMap<u32, u32> = heads.map(|(slot, record)| (record.slab, slot)).collect();
        let starts = |record: &Record| {
            !record.is_small() && record.state != State::Unmapped && !self.has_memory(record.previous)
        };
        let heads = self.blocks.iter().filter(|(_, record)| starts(record));
        let mut segments: Vec<SegmentView> = heads.map(|(slot, _)| self.segment(slot, &slabs)).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    fn has_memory(&self, slot: u32) -> bool {
        self.blocks.get(slot).is_some_and(|record| record.state != State::Unmapped)
    }

    fn segment(&self, head: u32, slabs: &BTreeMap<u32, u32>) -> SegmentView {
        let mut blocks = Vec::new();
        let mut slot = head;
        while self.has_memory(slot) {
            match slabs.get(&slot) {
                Some(&first) => {
                    let mut small = first;
                    while let Some(record) = self.blocks.get(small) {
                        blocks.push(shown(record));
                        small = record.next;
                    }
                }
                None => blocks.push(shown(&self.blocks[slot])),
            }
            slot = self.blocks[slot].next;
        }
        SegmentView {
            address: Address(self.blocks[head].address),
            bytes: blocks.iter().map(|block| block.size).sum(),
            stream: self.blocks[head].stream,
            pool: "pages".into(),
            pool_id: (0, 0),
            mapped: true,
            alias: false,
            blocks,
        }
    }

    /// The largest request that a free block serves where it lies, whosever it is.
    pub(super) fn largest_cached(&self, stream: StreamId) -> u64 {
        let size = |slot: Option<u32>| slot.map_or(0, |slot| self.blocks[slot].size);
        let in_pages = self.homes.iter().map(|home| size(home.pages.largest(&self.blocks))).max().unwrap_or(0);
        let in_slabs = self.homes.iter().map(|home| size(home.small.largest(&self.blocks))).max().unwrap_or(0);
        // An empty slab goes back to the pages where they are asked for.
        let in_pages = if in_slabs == self.settings.slab_bytes { in_pages.max(in_slabs) } else { in_pages };
        if in_pages > self.settings.small_limit {
            return in_pages;
        }
        let own = self.homes.get(stream.index()).map_or(0, |home| size(home.small.largest(&self.blocks)));
        own.min(self.settings.small_limit)
    }
}

fn shown(record: &Record) -> BlockView {
    let state = match record.state {
        State::Allocated => BlockState::Allocated,
        State::Pending => BlockState::Pending,
        State::Free | State::Slab | State::Unmapped | State::Vacant => BlockState::Free,
    };
    BlockView { address: Address(record.address), size: record.size, requested: record.requested, state }
}

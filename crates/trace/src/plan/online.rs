//! Places each block when it is allocated, without knowing what comes later: what an allocator with
//! a single unlimited segment would do.
//!
//! Only the live blocks are looked at, so that even the longest trace gets this layout.

use oomph_base::packing::{BlockLifetime, GapChoice, find_gap};

/// A live block.
struct LiveBlock {
    offset: u64,
    top: u64,
    end: u32,
}

/// The offsets of the blocks, which are in order of their beginnings.
pub(super) fn place_online(blocks: &[BlockLifetime], choice: GapChoice) -> Vec<u64> {
    // By offset.
    let mut live: Vec<LiveBlock> = Vec::new();
    let mut section = 0;
    let mut offsets = Vec::with_capacity(blocks.len());
    for block in blocks {
        if block.begin > section {
            section = block.begin;
            live.retain(|other| other.end > section);
        }
        let offset = find_gap(live.iter().map(|other| (other.offset, other.top)), block.bytes, choice);
        let index = live.partition_point(|other| other.offset < offset);
        live.insert(index, LiveBlock { offset, top: offset + block.bytes, end: block.end });
        offsets.push(offset);
    }
    offsets
}

//! The layout of an allocator's memory: segments and the blocks in them.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{Address, StreamId};

/// The memory of an allocator at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// In address order.
    pub segments: Vec<SegmentView>,
}

impl Layout {
    /// These segments, in address order.
    #[must_use]
    pub fn of(segments: impl IntoIterator<Item = SegmentView>) -> Layout {
        let mut segments: Vec<SegmentView> = segments.into_iter().collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        Layout { segments }
    }

    /// Bytes in free blocks.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.blocks().filter(|block| block.state == BlockState::Free).map(|block| block.size).sum()
    }

    /// All blocks in address order.
    pub fn blocks(&self) -> impl Iterator<Item = &BlockView> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }
}

/// One piece of memory taken from the device; for mapped memory, one contiguous mapped run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentView {
    /// Start.
    pub address: Address,
    /// Size.
    pub bytes: u64,
    /// The stream that it belongs to.
    pub stream: StreamId,
    /// The allocator's name for the pool it belongs to (`small`, `large`, a size class ...).
    pub pool: Cow<'static, str>,
    /// PyTorch's number of the private pool; (0, 0) is the default.
    pub pool_id: (u64, u64),
    /// Mapped by virtual memory rather than allocated whole.
    pub mapped: bool,
    /// A second view of memory that other segments already count (stitched ranges).
    pub alias: bool,
    /// The blocks in it, in address order, without gaps.
    pub blocks: Vec<BlockView>,
}

impl SegmentView {
    /// A segment of the default pool that was allocated whole.
    #[must_use]
    pub fn new(address: Address, bytes: u64, stream: StreamId, pool: &'static str, blocks: Vec<BlockView>) -> Self {
        let (pool, pool_id) = (pool.into(), (0, 0));
        SegmentView { address, bytes, stream, pool, pool_id, mapped: false, alias: false, blocks }
    }
}

/// One block in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockView {
    /// Start.
    pub address: Address,
    /// Size.
    pub size: u64,
    /// The size of the request that it serves, or served last.
    pub requested: u64,
    /// Whether it can be handed out.
    pub state: BlockState,
}

/// The state of a block in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Held by the program.
    Allocated,
    /// Freed, while another stream may still use it.
    Pending,
    /// In use under other addresses: a block of an [alias](SegmentView::alias) segment stands for
    /// it.
    Lent,
    /// Can be handed out.
    Free,
}

/// A driver call of a recorded program: memory that it took, or gave back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementCall {
    /// `cuMemAlloc`.
    Taken {
        /// Where the driver placed the memory.
        address: Address,
        /// Its size.
        bytes: u64,
    },
    /// `cuMemFree`.
    Released {
        /// Where the memory began.
        address: Address,
    },
}

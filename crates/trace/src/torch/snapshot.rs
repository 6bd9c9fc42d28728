//! A PyTorch memory snapshot as a model: what `torch.cuda.memory._snapshot()` returns, without its spelling.
//!
//! Read by `parse`, written by `write`, made into a trace by `recording`. Knows neither pickles nor traces.

use std::sync::Arc;

use super::{StackId, Stacks};
use oomph_base::{Address, StreamId};
use oomph_pytorch::RecordedSettings;

/// A whole snapshot.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The memory at the end, all devices, in the file's order.
    pub segments: Vec<Segment>,
    /// What happened, oldest first, by device.
    pub traces: Vec<Vec<Entry>>,
    /// The allocator's settings, as far as the file tells.
    pub settings: RecordedSettings,
    /// What the program said about itself.
    pub annotations: Vec<Annotation>,
    /// Call stacks of entries, segments and blocks.
    pub stacks: Stacks,
    /// What PyTorch calls each stream, by number; the first is the default stream.
    pub streams: Vec<u64>,
    /// Private pools that entries name, by number.
    pub pools: Vec<(u64, u64)>,
    /// Remarks that entries carry, by number; the first is the empty one.
    pub notes: Vec<Note>,
    /// What the file does not say, one sentence each.
    pub missing: Vec<String>,
}

/// One recorded action of the allocator. 40 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Where; for [`Action::OutOfMemory`] see [`device_free`](Entry::device_free).
    pub address: Address,
    /// Bytes: of the request for allocs and frees, rounded for out of memory, whole for segments.
    pub size: u64,
    /// Microseconds since 1970; 0 where the file has no times.
    pub time_us: u64,
    /// Who called.
    pub stack: StackId,
    /// Compile region and user's remark, a number in [`Snapshot::notes`].
    pub note: u32,
    /// Which private pool, a number in [`Snapshot::pools`]; older files do not say.
    pub pool: Option<u16>,
    /// On which stream.
    pub stream: StreamId,
    /// What happened.
    pub action: Action,
}

impl Entry {
    /// What the driver said was free when memory ran out.
    #[must_use]
    pub fn device_free(&self) -> Option<u64> {
        (self.action == Action::OutOfMemory).then_some(self.address.0)
    }
}

/// What an allocator does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// The program gave a block back.
    FreeRequested,
    /// A freed block became reusable.
    FreeCompleted,
    /// Memory came from the driver.
    SegmentAlloc,
    /// Memory goes back to the driver.
    SegmentFree,
    /// Memory was mapped into an expandable segment.
    SegmentMap,
    /// Memory was unmapped from an expandable segment.
    SegmentUnmap,
    /// A request failed.
    OutOfMemory,
    /// Someone took a snapshot; the size is that of all active blocks.
    Snapshot,
    /// A remark.
    Annotate,
    /// An action that did not exist when this was written.
    #[default]
    Unknown,
}

impl Action {
    /// Every action.
    pub const ALL: [Action; 11] = [
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::OutOfMemory,
        Action::Snapshot,
        Action::Annotate,
        Action::Unknown,
    ];
}

/// What an entry carries beside numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The region of compiled code, `N/A` outside.
    pub compile_context: Arc<str>,
    /// The user's remark.
    pub user_metadata: Arc<str>,
}

/// Memory taken from the driver: one `cudaMalloc`, or one contiguous mapped run of an expandable segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// On which device.
    pub device: u32,
    /// Start.
    pub address: Address,
    /// Bytes.
    pub total_size: u64,
    /// Whose it is.
    pub stream: StreamId,
    /// Which of the two free lists it feeds.
    pub kind: SegmentKind,
    /// The private pool; (0, 0) is the default.
    pub pool: (u64, u64),
    /// Mapped piece by piece.
    pub expandable: bool,
    /// Who caused it.
    pub stack: StackId,
    /// Its blocks, in address order, without gaps.
    pub blocks: Vec<Block>,
}

impl Segment {
    /// Bytes in blocks that the program holds.
    #[must_use]
    pub fn allocated_size(&self) -> u64 {
        self.sum(|block| block.state == BlockState::Allocated, |block| block.size)
    }

    /// Bytes in blocks that cannot be reused yet.
    #[must_use]
    pub fn active_size(&self) -> u64 {
        self.sum(|block| block.state != BlockState::Inactive, |block| block.size)
    }

    /// What was asked for, in blocks that cannot be reused yet.
    #[must_use]
    pub fn requested_size(&self) -> u64 {
        self.sum(|block| block.state != BlockState::Inactive, |block| block.requested_size)
    }

    /// The address after the last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.address.0.saturating_add(self.total_size)
    }

    fn sum(&self, of: impl Fn(&Block) -> bool, what: impl Fn(&Block) -> u64) -> u64 {
        self.blocks.iter().filter(|block| of(block)).fold(0, |sum: u64, block| sum.saturating_add(what(block)))
    }
}

/// Requests of up to 1 MiB are served from small segments, others from large ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// 2 MiB segments.
    Small,
    /// All others.
    Large,
}

/// A block in a segment. 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Start.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// What its owner asked for; in a free block, what some earlier owner did.
    pub requested_size: u64,
    /// Whose it is.
    pub state: BlockState,
    /// Who allocated it.
    pub stack: StackId,
}

/// Whose a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockState {
    /// The program's.
    Allocated,
    /// Freed, while another stream may still use it.
    PendingFree,
    /// Free.
    Inactive,
}

/// A place in the program that it named itself (`record_function`, optimizer steps).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// What the place is called.
    pub name: Arc<str>,
    /// Whether it begins or ends there.
    pub stage: Stage,
    /// On which device, if the file says.
    pub device: Option<u32>,
    /// Microseconds since 1970.
    pub time_us: u64,
}

/// The two ends of an annotated stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It begins.
    Start,
    /// It ends.
    End,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recordings have entries by the million: their size is a promise.
    #[test]
    fn an_entry_takes_40_bytes() {
        assert_eq!(size_of::<Entry>(), 40);
    }
}

//! Page-locked memory of the host in a snapshot: `host_segments` and `host_traces`, from 2.14 on.
//!
//! PyTorch records it if asked (`_record_memory_history(record_pinned_host_memory=True)`). It is shown, not replayed.

use serde::Serialize;

use super::{Action, SnapshotBlockState, TraceEntry};
use oomph_base::Address;

/// The page-locked memory of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// What there is at the end.
    pub segments: Vec<HostSegment>,
    /// What happened, oldest first.
    pub entries: Vec<TraceEntry>,
}

/// One buffer. The host allocator does not split them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSegment {
    /// Start.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Whether the program has it.
    pub state: SnapshotBlockState,
}

/// How much page-locked memory a program used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PinnedUsage {
    /// Recorded requests.
    pub requests: u64,
    /// Buffers at the end.
    pub buffers: u64,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// The bytes of those that the program has.
    pub allocated_bytes: u64,
    /// The most that the program had at one time.
    pub peak_allocated_bytes: u64,
    /// The most that all buffers had at one time.
    pub peak_reserved_bytes: u64,
}

impl HostMemory {
    /// How much there was; `None` if nothing was recorded. Follows the entries from the end to the beginning: the memory at
    /// the end is known.
    #[must_use]
    pub fn usage(&self) -> Option<PinnedUsage> {
        if self.segments.is_empty() && self.entries.is_empty() {
            return None;
        }
        let sum = |of: fn(&&HostSegment) -> bool| {
            self.segments.iter().filter(of).fold(0_u64, |sum, segment| sum.saturating_add(segment.size))
        };
        let (reserved_bytes, allocated_bytes) =
            (sum(|_| true), sum(|segment| segment.state == SnapshotBlockState::Allocated));
        let mut usage = PinnedUsage {
            requests: self.entries.iter().filter(|entry| entry.action == Action::Alloc).count() as u64,
            buffers: self.segments.len() as u64,
            reserved_bytes,
            allocated_bytes,
            peak_allocated_bytes: allocated_bytes,
            peak_reserved_bytes: reserved_bytes,
        };
        let (mut reserved, mut allocated) = (reserved_bytes, allocated_bytes);
        for entry in self.entries.iter().rev() {
            match entry.action {
                Action::Alloc => allocated = allocated.saturating_sub(entry.size),
                Action::FreeRequested => allocated = allocated.saturating_add(entry.size),
                Action::SegmentAlloc => reserved = reserved.saturating_sub(entry.size),
                Action::SegmentFree => reserved = reserved.saturating_add(entry.size),
                _ => {}
            }
            usage.peak_allocated_bytes = usage.peak_allocated_bytes.max(allocated);
            usage.peak_reserved_bytes = usage.peak_reserved_bytes.max(reserved);
        }
        Some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_is_found_from_the_end() {
        let entry = |action, size| TraceEntry { action, size, ..TraceEntry::default() };
        let segment = |address, size, state| HostSegment { address: Address(address), size, state };
        let host = HostMemory {
            segments: vec![segment(1, 32, SnapshotBlockState::Allocated), segment(2, 64, SnapshotBlockState::Inactive)],
            entries: vec![
                entry(Action::SegmentAlloc, 64),
                entry(Action::Alloc, 64),
                entry(Action::FreeRequested, 64),
                entry(Action::FreeCompleted, 64),
                entry(Action::FreeRequested, 8),
                entry(Action::SegmentFree, 8),
            ],
        };
        let usage = host.usage().unwrap();
        assert_eq!((usage.buffers, usage.requests), (2, 1));
        assert_eq!((usage.allocated_bytes, usage.reserved_bytes), (32, 96));
        assert_eq!((usage.peak_allocated_bytes, usage.peak_reserved_bytes), (32 + 8 + 64, 96 + 8));
        assert_eq!(HostMemory::default().usage(), None);
    }
}

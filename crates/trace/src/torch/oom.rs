//! Out-of-memory failures of a recording: the final one ([`FinalOom`]) and the limit that they imply ([`ProcessLimit`]).
//!
//! `oomph record --when oom` makes recordings that end with a failure. They do not contain what the program would have
//! done next, and answers must say so.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{Action, Recording, SnapshotBlockState, StackId, TraceEntry};
use oomph_base::{Address, MIB};
use oomph_pytorch::{LARGE_BUFFER, ROUND_LARGE};

/// The number of memory holders in a report.
const MOST_HOLDERS: usize = 3;

/// The out-of-memory failure that ended a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FinalOom {
    /// The request, rounded as the allocator does.
    pub requested_bytes: u64,
    /// The call site of the request.
    pub site: Option<String>,
    /// Allocated bytes.
    pub allocated_bytes: u64,
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// Free bytes of the device.
    pub device_free_bytes: u64,
    /// All memory that the driver had for the allocator, if the driver refused the request.
    pub room_bytes: Option<u64>,
    /// The limit that the program set for itself, if that refused the request.
    pub own_limit: Option<ProcessLimit>,
    /// The call sites that hold most memory, in descending order; empty without call stacks.
    pub holders: Vec<MemoryHolder>,
}

/// A call site that holds memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryHolder {
    /// The call site.
    pub site: String,
    /// How many there are.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl FinalOom {
    /// Reserved bytes that were not allocated, and could not serve the request.
    #[must_use]
    pub const fn cached_bytes(&self) -> u64 {
        self.reserved_bytes.saturating_sub(self.allocated_bytes)
    }
}

impl Recording {
    /// The failure that ends this recording: nothing was allocated after it.
    #[must_use]
    pub fn dead_end(&self) -> Option<FinalOom> {
        let place = self.witnessed.iter().rposition(|entry| entry.action == Action::OutOfMemory)?;
        let (before, after) = self.witnessed.split_at(place);
        let (failed, after) = after.split_first()?;
        if after.iter().any(|entry| entry.action == Action::Alloc) {
            return None;
        }
        // The file has the memory at the end. What was released after the failure is added again.
        let mut reserved_bytes = self.reserved_at_end();
        for entry in after {
            if let Action::SegmentFree | Action::SegmentUnmap = entry.action {
                reserved_bytes = reserved_bytes.saturating_add(entry.size);
            }
        }
        let held = self.held_at_failure(before, after);
        let device_free_bytes = failed.device_free().unwrap_or(0);
        let driver_refused = failed.fills_the_device();
        Some(FinalOom {
            requested_bytes: failed.size,
            site: self.stacks.site(failed.stack),
            allocated_bytes: held.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
            reserved_bytes,
            device_free_bytes,
            room_bytes: driver_refused.then(|| reserved_bytes.saturating_add(device_free_bytes)),
            own_limit: self.own_limit().filter(|_| !driver_refused),
            holders: self.holders(&held),
        })
    }

    /// Stack and bytes of all blocks at the failure: those at the end, and those freed after the failure.
    fn held_at_failure(&self, before: &[TraceEntry], after: &[TraceEntry]) -> Vec<(StackId, u64)> {
        let blocks = self.final_segments.iter().flat_map(|segment| &segment.blocks);
        let mut held: Vec<(StackId, u64)> = blocks
            .filter(|block| block.state == SnapshotBlockState::Allocated)
            .map(|block| (block.stack, block.size))
            .collect();
        let freed = after.iter().filter(|entry| entry.action == Action::FreeRequested);
        let mut freed: HashMap<Address, u64> = freed.map(|entry| (entry.address, entry.size)).collect();
        for entry in before.iter().rev() {
            if freed.is_empty() {
                break;
            }
            if entry.action == Action::Alloc
                && let Some(bytes) = freed.remove(&entry.address)
            {
                held.push((entry.stack, bytes));
            }
        }
        held.extend(freed.into_values().map(|bytes| (StackId::NONE, bytes)));
        held
    }

    fn holders(&self, held: &[(StackId, u64)]) -> Vec<MemoryHolder> {
        let mut by_site: BTreeMap<String, MemoryHolder> = BTreeMap::new();
        for &(stack, bytes) in held {
            let Some(site) = self.stacks.site(stack) else { continue };
            let holder = by_site.entry(site.clone()).or_insert(MemoryHolder { site, ..MemoryHolder::default() });
            holder.blocks += 1;
            holder.bytes = holder.bytes.saturating_add(bytes);
        }
        let mut holders: Vec<MemoryHolder> = by_site.into_values().collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders.truncate(MOST_HOLDERS);
        holders
    }
}

// The limit that a program set itself (`set_per_process_memory_fraction`), as its failures enclose it.
//
// No snapshot says it. But a request that fails while the GPU has room was refused by such a limit, and says what was held
// and what was too much. `verify` reads failures by it. [`DeadEnd`](super::DeadEnd) is about the one failure that a
// recording ends with, whoever refused; this is about all of them.

/// The driver keeps a little of its memory, and segments are larger than requests.
const DRIVER_RESERVE: u64 = 64 * MIB;

/// The limit that a program set for itself (`set_per_process_memory_fraction`), as its failures imply it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProcessLimit {
    /// The most memory that was reserved.
    pub at_least_bytes: u64,
    /// The least memory that was refused.
    pub below_bytes: u64,
}

impl TraceEntry {
    /// Whether the device had too little free memory for this failed request, or did not report it.
    #[must_use]
    pub fn fills_the_device(&self) -> bool {
        self.device_free().unwrap_or(0) < self.size.saturating_add(DRIVER_RESERVE)
    }
}

impl Recording {
    /// The limit of the program, if requests failed while the device had free memory and one limit explains them all.
    #[must_use]
    pub fn own_limit(&self) -> Option<ProcessLimit> {
        let mut held = self.reserved_at_end();
        let mut limit = ProcessLimit { at_least_bytes: held, below_bytes: u64::MAX };
        // Backwards from the end, because the beginning may be unknown.
        for entry in self.witnessed.iter().rev() {
            match entry.action {
                Action::SegmentAlloc | Action::SegmentMap => held = held.saturating_sub(entry.size),
                Action::SegmentFree | Action::SegmentUnmap => held = held.saturating_add(entry.size),
                Action::OutOfMemory if entry.fills_the_device() => return None,
                Action::OutOfMemory => {
                    limit.below_bytes = limit.below_bytes.min(held.saturating_add(segment_for(entry.size)));
                }
                _ => {}
            }
            limit.at_least_bytes = limit.at_least_bytes.max(held);
        }
        let is_enclosed = limit.below_bytes < u64::MAX && limit.at_least_bytes < limit.below_bytes;
        is_enclosed.then_some(limit)
    }
}

/// The largest segment for a request.
fn segment_for(bytes: u64) -> u64 {
    bytes.max(LARGE_BUFFER).checked_next_multiple_of(ROUND_LARGE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::{Segment, SegmentKind, Snapshot, SnapshotBlock, StackFrame};
    use oomph_base::NoProgress;
    use oomph_base::{MIB, StreamId};

    fn entry(action: Action, address: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size, ..TraceEntry::default() }
    }

    /// Two segments of 20 MiB, of which one was given back, a block of 12 MiB in the other; then `more`.
    fn recorded(free_bytes: u64, more: &[TraceEntry]) -> Recording {
        let block = |address, size, state| SnapshotBlock {
            address: Address(address),
            size,
            requested_size: size,
            state,
            stack: StackId::default(),
        };
        let freed = more.iter().any(|entry| entry.action == Action::FreeRequested);
        let state = if freed { SnapshotBlockState::Inactive } else { SnapshotBlockState::Allocated };
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 20 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::default(),
            blocks: vec![block(MIB, 12 * MIB, state), block(13 * MIB, 8 * MIB, SnapshotBlockState::Inactive)],
        };
        let mut entries = vec![
            entry(Action::SegmentAlloc, MIB, 20 * MIB),
            entry(Action::Alloc, MIB, 12 * MIB),
            entry(Action::SegmentAlloc, 64 * MIB, 20 * MIB),
            entry(Action::SegmentFree, 64 * MIB, 20 * MIB),
            entry(Action::OutOfMemory, free_bytes, 30 * MIB),
        ];
        entries.extend_from_slice(more);
        let snapshot = Snapshot { segments: vec![segment], traces: vec![entries], ..Snapshot::default() };
        snapshot.into_recording("died", None, &NoProgress).unwrap()
    }

    #[test]
    fn free_driver_memory_and_cache_are_available() {
        let end = recorded(10 * MIB, &[]).dead_end().unwrap();
        assert_eq!((end.requested_bytes, end.allocated_bytes, end.reserved_bytes), (30 * MIB, 12 * MIB, 20 * MIB));
        assert_eq!((end.room_bytes, end.own_limit, end.cached_bytes()), (Some(30 * MIB), None, 8 * MIB));
    }

    #[test]
    fn a_driver_that_had_enough_did_not_refuse() {
        let end = recorded(300 * MIB, &[]).dead_end().unwrap();
        let own_limit = ProcessLimit { at_least_bytes: 40 * MIB, below_bytes: 50 * MIB };
        assert_eq!((end.room_bytes, end.own_limit), (None, Some(own_limit)));
    }

    #[test]
    fn frees_after_the_failure_are_undone() {
        let freed = [entry(Action::FreeRequested, MIB, 12 * MIB), entry(Action::FreeCompleted, MIB, 12 * MIB)];
        let end = recorded(10 * MIB, &freed).dead_end().unwrap();
        assert_eq!((end.allocated_bytes, end.reserved_bytes), (12 * MIB, 20 * MIB));
    }

    #[test]
    fn holders_are_named_by_call_site() {
        let mut died = recorded(10 * MIB, &[entry(Action::FreeRequested, MIB, 12 * MIB)]);
        let mut stack = |line| {
            let frame = died.stacks.intern_frame(StackFrame { filename: "train.py".into(), line, name: "f".into() });
            let again = died.stacks.intern_frame(StackFrame { filename: "main.py".into(), line: 1, name: "m".into() });
            [died.stacks.intern(&[frame]), died.stacks.intern(&[frame, again])]
        };
        let (layer, [optimizer, _]) = (stack(3), stack(9));
        died.witnessed[1].stack = optimizer;
        for (block, stack) in died.final_segments[0].blocks.iter_mut().zip(layer) {
            (block.state, block.stack) = (SnapshotBlockState::Allocated, stack);
        }
        let end = died.dead_end().unwrap();
        let holder = |site: &str, blocks, mib| MemoryHolder { site: site.to_owned(), blocks, bytes: mib * MIB };
        assert_eq!(end.holders, [holder("train.py:3 f", 2, 20), holder("train.py:9 f", 1, 12)]);
        assert_eq!(recorded(10 * MIB, &[]).dead_end().unwrap().holders, []);
    }

    #[test]
    fn a_program_that_went_on_did_not_end_there() {
        assert_eq!(recorded(10 * MIB, &[entry(Action::Alloc, 13 * MIB, MIB)]).dead_end(), None);
        let mut fine = recorded(10 * MIB, &[]);
        fine.witnessed.pop();
        assert_eq!(fine.dead_end(), None);
    }
}

#[cfg(test)]
mod own_limit_tests {
    use super::*;
    use crate::torch::Snapshot;
    use oomph_base::Address;
    use oomph_base::NoProgress;

    fn entry(action: Action, place: u64, size: u64) -> TraceEntry {
        TraceEntry { action, address: Address(place), size, ..TraceEntry::default() }
    }

    /// 40 of 100 MiB are released before a request of 201 MiB fails, the rest after it.
    fn recording(device_free: u64) -> Recording {
        let entries = vec![
            entry(Action::SegmentAlloc, 1 << 30, 40 * MIB),
            entry(Action::SegmentAlloc, 2 << 30, 60 * MIB),
            entry(Action::SegmentFree, 1 << 30, 40 * MIB),
            entry(Action::OutOfMemory, device_free, 201 * MIB),
            entry(Action::SegmentFree, 2 << 30, 60 * MIB),
        ];
        Snapshot { traces: vec![entries], ..Snapshot::default() }.into_recording("out", None, &NoProgress).unwrap()
    }

    #[test]
    fn a_failure_with_free_memory_implies_a_limit() {
        let limit = ProcessLimit { at_least_bytes: 100 * MIB, below_bytes: (60 + 202) * MIB };
        assert_eq!(recording(100 << 30).own_limit(), Some(limit));
    }

    #[test]
    fn a_full_device_implies_no_limit() {
        assert_eq!(recording(150 * MIB).own_limit(), None);
        let mut served = recording(100 << 30);
        served.witnessed.remove(3);
        assert_eq!(served.own_limit(), None);
    }

    #[test]
    fn contradictory_amounts_imply_no_limit() {
        let mut contradictory = recording(100 << 30);
        contradictory.witnessed[0].size = 400 * MIB;
        contradictory.witnessed[2].size = 400 * MIB;
        assert_eq!(contradictory.own_limit(), None);
    }
}

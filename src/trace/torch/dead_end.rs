//! A recording that ends because memory ran out: what was asked for, and what there was.
//!
//! `oomph record --when oom` leaves such a recording. What the program would have done next is not in it, which whoever
//! answers from it has to say; how much memory there was, is.

use serde::Serialize;

use super::{Action, Recording};

/// The failure that ended a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeadEnd {
    /// What was asked for, rounded as the allocator does.
    pub requested_bytes: u64,
    /// Who asked.
    pub site: Option<String>,
    /// Bytes in blocks that the program held.
    pub allocated_bytes: u64,
    /// Bytes that the allocator had from the driver.
    pub reserved_bytes: u64,
    /// What the driver still had.
    pub device_free_bytes: u64,
    /// The most that the allocator ever had.
    pub peak_reserved_bytes: u64,
}

impl DeadEnd {
    /// All that the driver had for the allocator, where the driver refused. `None` where it had enough: then the program
    /// refused itself, by a memory fraction, which a recording does not tell.
    #[must_use]
    pub fn room_bytes(&self) -> Option<u64> {
        let driver_refused = self.device_free_bytes < self.requested_bytes;
        driver_refused.then(|| self.reserved_bytes.saturating_add(self.device_free_bytes))
    }

    /// Between which amounts, the second excluded, the limit lies that the program has set itself.
    #[must_use]
    pub fn own_limit_between(&self) -> Option<(u64, u64)> {
        let refused = self.reserved_bytes.saturating_add(self.requested_bytes);
        self.room_bytes().is_none().then_some((self.peak_reserved_bytes, refused))
    }

    /// Bytes that the allocator held and could not use for the request.
    #[must_use]
    pub const fn cached_bytes(&self) -> u64 {
        self.reserved_bytes.saturating_sub(self.allocated_bytes)
    }
}

impl Recording {
    /// The failure that this recording ends with: afterwards nothing was allocated.
    #[must_use]
    pub fn dead_end(&self) -> Option<DeadEnd> {
        let place = self.witnessed.iter().rposition(|entry| entry.action == Action::OutOfMemory)?;
        let (before, after) = self.witnessed.split_at(place);
        let (failed, after) = after.split_first()?;
        if after.iter().any(|entry| entry.action == Action::Alloc) {
            return None;
        }
        // The file has the memory at its end; what was given back since the failure is added again.
        let segments = &self.final_segments;
        let mut reserved_bytes: u64 = segments.iter().fold(0, |sum: u64, one| sum.saturating_add(one.total_size));
        let mut allocated_bytes: u64 =
            segments.iter().fold(0, |sum: u64, one| sum.saturating_add(one.allocated_size()));
        for entry in after {
            match entry.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved_bytes = reserved_bytes.saturating_add(entry.size)
                }
                Action::FreeRequested => allocated_bytes = allocated_bytes.saturating_add(entry.size),
                _ => {}
            }
        }
        let (mut level, mut peak_reserved_bytes) = (reserved_bytes, reserved_bytes);
        for entry in before.iter().rev() {
            match entry.action {
                Action::SegmentFree | Action::SegmentUnmap => level = level.saturating_add(entry.size),
                Action::SegmentAlloc | Action::SegmentMap => level = level.saturating_sub(entry.size),
                _ => {}
            }
            peak_reserved_bytes = peak_reserved_bytes.max(level);
        }
        Some(DeadEnd {
            requested_bytes: failed.size,
            site: self.stacks.site(failed.stack),
            allocated_bytes,
            reserved_bytes,
            device_free_bytes: failed.device_free().unwrap_or(0),
            peak_reserved_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        trace::torch::{Block, BlockState, Entry, Segment, SegmentKind, Snapshot, StackId},
        unit::{Address, MIB, StreamId},
    };

    fn entry(action: Action, address: u64, size: u64) -> Entry {
        Entry { action, address: Address(address), size, ..Entry::default() }
    }

    /// Two segments of 20 MiB, of which one was given back, a block of 12 MiB in the other; then `more`.
    fn recorded(free_bytes: u64, more: &[Entry]) -> Recording {
        let block = |address, size, state| Block {
            address: Address(address),
            size,
            requested_size: size,
            state,
            stack: StackId::default(),
        };
        let freed = more.iter().any(|entry| entry.action == Action::FreeRequested);
        let state = if freed { BlockState::Inactive } else { BlockState::Allocated };
        let segment = Segment {
            device: 0,
            address: Address(MIB),
            total_size: 20 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::default(),
            blocks: vec![block(MIB, 12 * MIB, state), block(13 * MIB, 8 * MIB, BlockState::Inactive)],
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
        snapshot.into_recording("died", None).unwrap()
    }

    #[test]
    fn what_the_driver_had_is_what_there_was() {
        let end = recorded(10 * MIB, &[]).dead_end().unwrap();
        assert_eq!((end.requested_bytes, end.allocated_bytes, end.reserved_bytes), (30 * MIB, 12 * MIB, 20 * MIB));
        assert_eq!((end.room_bytes(), end.own_limit_between()), (Some(30 * MIB), None));
        assert_eq!((end.cached_bytes(), end.peak_reserved_bytes), (8 * MIB, 40 * MIB));
    }

    #[test]
    fn a_driver_that_had_enough_did_not_refuse() {
        let end = recorded(30 * MIB, &[]).dead_end().unwrap();
        assert_eq!((end.room_bytes(), end.own_limit_between()), (None, Some((40 * MIB, 50 * MIB))));
    }

    #[test]
    fn what_is_freed_while_the_program_dies_was_there_when_it_failed() {
        let freed = [entry(Action::FreeRequested, MIB, 12 * MIB), entry(Action::FreeCompleted, MIB, 12 * MIB)];
        let end = recorded(10 * MIB, &freed).dead_end().unwrap();
        assert_eq!((end.allocated_bytes, end.reserved_bytes), (12 * MIB, 20 * MIB));
    }

    #[test]
    fn a_program_that_went_on_did_not_end_there() {
        assert_eq!(recorded(10 * MIB, &[entry(Action::Alloc, 13 * MIB, MIB)]).dead_end(), None);
        let mut fine = recorded(10 * MIB, &[]);
        fine.witnessed.pop();
        assert_eq!(fine.dead_end(), None);
    }
}

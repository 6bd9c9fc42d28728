//! How much memory a program had, as its recording tells it where a request failed.
//!
//! No snapshot says the limit that a program set itself (`set_per_process_memory_fraction`) or how large its GPU was. But
//! each failure says what was held, what was asked for and what the driver had left, and so encloses it. `verify` reads
//! failures by it, and `advise` takes it for the memory that there is when nobody says otherwise.

use super::{Action, Entry, Recording};
use crate::unit::MIB;

/// The driver does not hand out the very last of its memory, and segments are larger than requests.
const DRIVER_RESERVE: u64 = 64 * MIB;
/// The smallest segment for requests of more than 1 MiB, and the unit of larger ones.
const LARGE_SEGMENT: u64 = 20 * MIB;
const SEGMENT_UNIT: u64 = 2 * MIB;

/// What the failed requests of a recording say about the memory there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RanOut {
    /// The entry of the first failure.
    pub entry: usize,
    /// What it asked for, rounded.
    pub requested_bytes: u64,
    /// What the allocator held then, after giving back what it could.
    pub reserved_bytes: u64,
    /// What the driver said was free then.
    pub device_free_bytes: u64,
    /// Who refused.
    pub refused_by: Refuser,
    /// So much the allocator was seen to have.
    pub at_least_bytes: u64,
    /// It did not have so much.
    pub below_bytes: u64,
    /// Whether the program asked for nothing more afterwards, so that nobody knows what it would have needed.
    pub is_the_end: bool,
}

/// Who had no more memory to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refuser {
    /// The GPU was full.
    Driver,
    /// The GPU had enough: a share of it that the program set itself was used up.
    OwnLimit,
}

impl RanOut {
    /// Whether the program had set itself a limit, and one amount explains all that was served and refused.
    #[must_use]
    pub fn is_by_own_limit(&self) -> bool {
        self.refused_by == Refuser::OwnLimit && self.at_least_bytes < self.below_bytes
    }
}

impl Entry {
    /// Whether the driver said that it had no room for this failed request; where it said nothing, it may have been so.
    #[must_use]
    pub fn fills_the_device(&self) -> bool {
        self.device_free().unwrap_or(0) < self.size.saturating_add(DRIVER_RESERVE)
    }
}

impl Recording {
    /// Where memory ran out first, and how much there was; `None` where every request was served.
    #[must_use]
    pub fn ran_out(&self) -> Option<RanOut> {
        let failed = |entry: &&Entry| entry.action == Action::OutOfMemory;
        let first = self.witnessed.iter().find(failed)?;
        let refused_by = if first.fills_the_device() { Refuser::Driver } else { Refuser::OwnLimit };
        let mut held: u64 = self.final_segments.iter().map(|segment| segment.total_size).sum();
        let (mut at_least, mut below) = (held, u64::MAX);
        let mut found = None;
        // Backwards from the end, because only the end is known whole where a recording began in the middle.
        for (number, entry) in self.witnessed.iter().enumerate().rev() {
            match entry.action {
                Action::SegmentAlloc | Action::SegmentMap => held = held.saturating_sub(entry.size),
                Action::SegmentFree | Action::SegmentUnmap => held += entry.size,
                Action::OutOfMemory => {
                    let device_free = entry.device_free().unwrap_or(0);
                    below = below.min(held.saturating_add(segment_for(entry.size)));
                    if refused_by == Refuser::Driver && entry.fills_the_device() {
                        at_least = at_least.max(held + device_free);
                    }
                    found = Some((number, entry.size, held, device_free));
                }
                _ => {}
            }
            at_least = at_least.max(held);
        }
        let (entry, requested_bytes, reserved_bytes, device_free_bytes) = found?;
        let later = &self.witnessed[entry + 1..];
        let is_the_end = !later.iter().any(|entry| matches!(entry.action, Action::Alloc | Action::OutOfMemory));
        Some(RanOut {
            entry,
            requested_bytes,
            reserved_bytes,
            device_free_bytes,
            refused_by,
            at_least_bytes: at_least,
            below_bytes: below,
            is_the_end,
        })
    }
}

/// No segment for a request is larger.
fn segment_for(bytes: u64) -> u64 {
    bytes.max(LARGE_SEGMENT).checked_next_multiple_of(SEGMENT_UNIT).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        trace::torch::{Segment, SegmentKind, Snapshot, StackId},
        unit::{Address, StreamId},
    };

    fn entry(action: Action, place: u64, size: u64) -> Entry {
        Entry { action, address: Address(place), size, ..Entry::default() }
    }

    /// 100 MiB, 60 MiB of them given back when 200 MiB are asked for in vain.
    fn recording(device_free: u64, later: &[Entry]) -> Recording {
        let mut entries = vec![
            entry(Action::SegmentAlloc, 1 << 30, 40 * MIB),
            entry(Action::Alloc, 1 << 30, 40 * MIB),
            entry(Action::SegmentAlloc, 2 << 30, 60 * MIB),
            entry(Action::Alloc, 2 << 30, 60 * MIB),
            entry(Action::FreeRequested, 2 << 30, 60 * MIB),
            entry(Action::FreeCompleted, 2 << 30, 60 * MIB),
            entry(Action::SegmentFree, 2 << 30, 60 * MIB),
            entry(Action::OutOfMemory, device_free, 200 * MIB),
        ];
        entries.extend_from_slice(later);
        let segment = Segment {
            device: 0,
            address: Address(1 << 30),
            total_size: 40 * MIB,
            stream: StreamId::DEFAULT,
            kind: SegmentKind::Large,
            pool: (0, 0),
            expandable: false,
            stack: StackId::default(),
            blocks: Vec::new(),
        };
        let snapshot = Snapshot { traces: vec![entries], segments: vec![segment], ..Snapshot::default() };
        snapshot.into_recording("out", None).unwrap()
    }

    #[test]
    fn a_gpu_with_room_means_a_limit_between_what_was_held_and_what_was_refused() {
        let out = recording(100 << 30, &[]).ran_out().unwrap();
        assert_eq!((out.entry, out.requested_bytes, out.reserved_bytes), (7, 200 * MIB, 40 * MIB));
        assert_eq!((out.refused_by, out.at_least_bytes, out.below_bytes), (Refuser::OwnLimit, 100 * MIB, 240 * MIB));
        assert!(out.is_the_end);
    }

    #[test]
    fn a_full_gpu_had_what_was_held_and_what_was_free() {
        let out = recording(150 * MIB, &[]).ran_out().unwrap();
        assert_eq!((out.refused_by, out.at_least_bytes), (Refuser::Driver, 190 * MIB));
    }

    #[test]
    fn a_program_that_goes_on_is_known_to_the_end() {
        let later = [entry(Action::Alloc, 1 << 30, 512)];
        assert!(!recording(0, &later).ran_out().unwrap().is_the_end);
        let mut served = recording(0, &[]);
        served.witnessed.pop();
        assert_eq!(served.ran_out(), None);
    }
}

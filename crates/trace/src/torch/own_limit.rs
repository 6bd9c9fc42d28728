//! The limit that a program set itself (`set_per_process_memory_fraction`), as its failures enclose it.
//!
//! No snapshot says it. But a request that fails while the GPU has room was refused by such a limit, and says what was held
//! and what was too much. `verify` reads failures by it. [`DeadEnd`](super::DeadEnd) is about the one failure that a
//! recording ends with, whoever refused; this is about all of them.

use super::{Action, Entry, Recording};
use oomph_base::MIB;
use oomph_pytorch::{LARGE_BUFFER, ROUND_LARGE};

/// The driver does not hand out the very last of its memory, and segments are larger than requests.
const DRIVER_RESERVE: u64 = 64 * MIB;

/// Between which amounts the limit lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct OwnLimit {
    /// So much the allocator was seen to have.
    pub at_least_bytes: u64,
    /// So much it could not have.
    pub below_bytes: u64,
}

impl Entry {
    /// Whether the driver had no room for this failed request; where it said nothing, it may have been so.
    #[must_use]
    pub fn fills_the_device(&self) -> bool {
        self.device_free().unwrap_or(0) < self.size.saturating_add(DRIVER_RESERVE)
    }
}

impl Recording {
    /// The limit of the program's own, where requests failed while the GPU had room and one amount explains them all.
    #[must_use]
    pub fn own_limit(&self) -> Option<OwnLimit> {
        let mut held = self.reserved_at_end();
        let mut limit = OwnLimit { at_least_bytes: held, below_bytes: u64::MAX };
        // Backwards from the end, because only the end is known whole where a recording began in the middle.
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

/// No segment for a request is larger.
fn segment_for(bytes: u64) -> u64 {
    bytes.max(LARGE_BUFFER).checked_next_multiple_of(ROUND_LARGE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Snapshot;
    use oomph_base::Address;
    use oomph_base::NoProgress;

    fn entry(action: Action, place: u64, size: u64) -> Entry {
        Entry { action, address: Address(place), size, ..Entry::default() }
    }

    /// 100 MiB come and go, 40 MiB of them before 201 MiB are asked for in vain, the rest afterwards.
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
    fn a_gpu_with_room_means_a_limit_between_what_was_held_and_what_was_refused() {
        let limit = OwnLimit { at_least_bytes: 100 * MIB, below_bytes: (60 + 202) * MIB };
        assert_eq!(recording(100 << 30).own_limit(), Some(limit));
    }

    #[test]
    fn a_full_gpu_or_no_failure_tells_of_no_limit() {
        assert_eq!(recording(150 * MIB).own_limit(), None);
        let mut served = recording(100 << 30);
        served.witnessed.remove(3);
        assert_eq!(served.own_limit(), None);
    }

    #[test]
    fn amounts_that_contradict_each_other_enclose_nothing() {
        let mut contradictory = recording(100 << 30);
        contradictory.witnessed[0].size = 400 * MIB;
        contradictory.witnessed[2].size = 400 * MIB;
        assert_eq!(contradictory.own_limit(), None);
    }
}

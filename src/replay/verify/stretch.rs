//! A stretch of entries that belongs to one call of the program, and the ways in which it can be read.

use super::Sighting;
use crate::{
    base::MIB,
    trace::torch::{Action, Entry},
};

/// Requests of up to this size, rounded, grow ranges in small steps.
const SMALL_REQUEST: u64 = MIB;
const SMALL_GRANULE: u64 = 2 * MIB;

/// What an allocator did on its own, up to and including the end of the call that made it do so: the `alloc` or `oom` of
/// a request, or nothing where only `empty_cache` explains it.
#[derive(Debug, Default)]
pub(super) struct Stretch {
    /// What was recorded.
    pub(super) seen: Vec<Sighting>,
    /// The entry of the request.
    pub(super) request: Option<usize>,
    /// How many completed frees come first.
    pub(super) completed_first: usize,
    releases: bool,
    grows: bool,
    /// The driver may have been out of memory: nothing says that it had enough left.
    driver_may_refuse: bool,
}

/// One way to explain a stretch that ends in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// The program gave its cache back before the request.
    pub(super) empty_cache: bool,
    /// So many of the waiting frees were done when the request began; others come back when it waits for all.
    pub(super) polled: usize,
    /// How often there was no more memory to be had: by the driver, or by a limit that nobody tells.
    pub(super) refusals: usize,
}

impl Reading {
    /// Nothing but the request.
    pub(super) fn plain(polled: usize) -> Reading {
        Reading { empty_cache: false, polled, refusals: 0 }
    }
}

/// Of many waiting frees not every number is tried.
const POLLED_AT_MOST: usize = 32;
/// A request asks the driver again after making room, and once more after giving back everything.
const REFUSALS_AT_MOST: usize = 3;

impl Stretch {
    /// Reads the stretch that starts at an entry, and says where the next one starts.
    pub(super) fn read(&mut self, entries: &[Entry], start: usize) -> usize {
        self.seen.clear();
        (self.request, self.completed_first, self.releases, self.grows) = (None, 0, false, false);
        self.driver_may_refuse = true;
        for (index, entry) in entries.iter().enumerate().skip(start) {
            match entry.action {
                Action::FreeCompleted => {
                    self.completed_first += usize::from(self.completed_first == self.seen.len());
                }
                Action::SegmentFree | Action::SegmentUnmap => self.releases = true,
                Action::SegmentAlloc | Action::SegmentMap => self.grows = true,
                Action::Alloc | Action::OutOfMemory => {
                    self.driver_may_refuse = entry.fills_the_device();
                    self.seen.push(Sighting::of(entry));
                    self.request = Some(index);
                    return index + 1;
                }
                Action::FreeRequested | Action::Snapshot | Action::Annotate => return index,
                Action::Unknown => continue,
            }
            self.seen.push(Sighting::of(entry));
        }
        entries.len()
    }

    /// Whether the program's request failed.
    pub(super) fn runs_out(&self) -> bool {
        self.seen.last().is_some_and(|last| last.action == Action::OutOfMemory)
    }

    /// Whether there is only one way to read it: the request found what it needed, or simply took new memory.
    pub(super) fn is_plain(&self) -> bool {
        !(self.releases || self.runs_out() || self.grows && self.completed_first > 0)
    }

    /// The ways to read it, the likeliest first. That memory was refused from outside is tried last, because in most
    /// recordings the only limit is the one that PyTorch was told; `by_unknown_limit` says that it was told one that we
    /// were not.
    pub(super) fn readings(&self, by_unknown_limit: bool) -> Vec<Reading> {
        let fewer = (0..self.completed_first).rev().take(POLLED_AT_MOST);
        let mut readings: Vec<Reading> =
            std::iter::once(self.completed_first).chain(fewer).map(Reading::plain).collect();
        readings.push(Reading { empty_cache: true, polled: 0, refusals: 0 });
        if !self.driver_may_refuse && !by_unknown_limit {
            return readings;
        }
        let with_refusals = |refusals: usize| readings.iter().map(move |&reading| Reading { refusals, ..reading });
        let refused: Vec<Reading> = (1..=REFUSALS_AT_MOST).flat_map(with_refusals).collect();
        readings.extend(refused);
        readings
    }

    /// Which of a request's calls for memory the driver refuses if it refuses so many, counted from 1. A range grows
    /// granule by granule: what was mapped before the refusal is in the recording.
    pub(super) fn refused_calls(&self, refusals: usize, large_granule: u64) -> Vec<u64> {
        let rounded = self.seen.last().map_or(0, |last| last.bytes);
        let granule = if rounded > SMALL_REQUEST { large_granule } else { SMALL_GRANULE };
        let first_release =
            self.seen.iter().position(|seen| matches!(seen.action, Action::SegmentFree | Action::SegmentUnmap));
        let (before, after) = self.seen.split_at(first_release.unwrap_or(0));
        let granules = |part: &[Sighting]| {
            let mapped = part.iter().filter(|seen| seen.action == Action::SegmentMap);
            mapped.map(|seen| seen.bytes / granule.max(1)).sum::<u64>()
        };
        let first = granules(before) + 1;
        let second = first + if self.runs_out() { granules(after) } else { 0 } + 1;
        [first, second, second + 1].into_iter().take(refusals).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Address;

    fn entries(actions: &[Action]) -> Vec<Entry> {
        let entry = |(place, &action): (usize, &Action)| Entry {
            action,
            address: Address(place as u64 + 1),
            size: 20 * MIB,
            ..Entry::default()
        };
        actions.iter().enumerate().map(entry).collect()
    }

    #[test]
    fn a_stretch_ends_with_its_request_or_before_the_programs_next_action() {
        use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree, Snapshot, Unknown};
        let entries = entries(&[
            FreeCompleted,
            SegmentFree,
            Unknown,
            SegmentAlloc,
            Alloc,
            SegmentFree,
            FreeRequested,
            SegmentFree,
            Snapshot,
        ]);
        let mut stretch = Stretch::default();
        assert_eq!(stretch.read(&entries, 0), 5);
        assert_eq!((stretch.request, stretch.completed_first, stretch.seen.len()), (Some(4), 1, 4));
        assert!(!stretch.is_plain());
        assert_eq!(stretch.read(&entries, 5), 6);
        assert_eq!((stretch.request, stretch.seen.len()), (None, 1));
        assert_eq!(stretch.read(&entries, 7), 8);
    }

    #[test]
    fn the_request_alone_is_tried_first_and_a_refusing_driver_last() {
        use Action::{Alloc, FreeCompleted, SegmentFree};
        let mut stretch = Stretch::default();
        stretch.read(&entries(&[FreeCompleted, SegmentFree, Alloc]), 0);
        let readings = stretch.readings(false);
        assert_eq!(readings[..2], [Reading::plain(1), Reading::plain(0)]);
        assert_eq!(readings[2], Reading { empty_cache: true, polled: 0, refusals: 0 });
        assert!(readings[3..].iter().all(|reading| reading.refusals > 0));
    }

    #[test]
    fn a_driver_with_memory_left_has_not_refused() {
        let mut entries = entries(&[Action::OutOfMemory]);
        let mut stretch = Stretch::default();
        stretch.read(&entries, 0);
        assert!(stretch.readings(false).iter().any(|reading| reading.refusals > 0));
        entries[0].address = Address(100 * MIB);
        stretch.read(&entries, 0);
        assert!(stretch.readings(false).iter().all(|reading| reading.refusals == 0));
        assert!(stretch.readings(true).iter().any(|reading| reading.refusals > 0), "unless PyTorch itself did");
    }

    #[test]
    fn what_was_mapped_before_a_refusal_is_granted() {
        use Action::{OutOfMemory, SegmentMap, SegmentUnmap};
        let mut stretch = Stretch::default();
        stretch.read(&entries(&[SegmentMap, SegmentMap, SegmentUnmap, SegmentMap, OutOfMemory]), 0);
        assert_eq!(stretch.refused_calls(2, 20 * MIB), [3, 5]);
    }
}

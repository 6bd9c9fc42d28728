//! The entries of one call of the program, and the ways in which they can be explained.

use super::divergence::ObservedAction;
use crate::{
    base::MIB,
    trace::torch::{Action, TraceEntry},
};

/// Requests of up to this size, rounded, grow ranges in small steps.
const SMALL_REQUEST: u64 = MIB;
const SMALL_GRANULE: u64 = 2 * MIB;

/// The allocator's actions in one call, up to and including its end: the `alloc` or `oom` of a request, or nothing where
/// only `empty_cache` explains them.
#[derive(Debug, Default)]
pub(super) struct CallEntries {
    /// What was recorded.
    pub(super) seen: Vec<ObservedAction>,
    /// The entry of the request.
    pub(super) request: Option<usize>,
    /// How many completed frees come first.
    pub(super) completed_first: usize,
    releases: bool,
    grows: bool,
    /// The driver may have been out of memory: nothing says that it had enough left.
    driver_may_refuse: bool,
}

/// One way to explain a call that ends in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallReading {
    /// The program gave its cache back before the request.
    pub(super) empty_cache: bool,
    /// How many of the waiting frees were done when the request began. The others complete when it waits for all.
    pub(super) polled: usize,
    /// How many times memory was refused, by the driver or by an unknown limit.
    pub(super) refusals: usize,
    /// A stream was being captured: the allocator does not release its cache.
    pub(super) captures: bool,
}

impl CallReading {
    /// Nothing but the request.
    pub(super) fn plain(polled: usize) -> CallReading {
        CallReading { empty_cache: false, polled, refusals: 0, captures: false }
    }

    /// The request after a call of `empty_cache`.
    pub(super) fn after_empty_cache() -> CallReading {
        CallReading { empty_cache: true, ..CallReading::plain(0) }
    }
}

/// With many waiting frees, not every number of completed ones is tried.
const POLLED_AT_MOST: usize = 32;
/// A request asks the driver again after making room, and once more after giving back everything.
const REFUSALS_AT_MOST: usize = 3;

impl CallEntries {
    /// Reads the call that starts at an entry, and says where the next one starts.
    pub(super) fn read(&mut self, entries: &[TraceEntry], start: usize) -> usize {
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
                    self.seen.push(ObservedAction::of(entry));
                    self.request = Some(index);
                    return index + 1;
                }
                Action::FreeRequested | Action::Snapshot | Action::Annotate => return index,
                Action::Unknown => continue,
            }
            self.seen.push(ObservedAction::of(entry));
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

    /// The ways to explain the call, the likeliest first. A refusal from outside is tried last, because in most
    /// recordings the only limit is the one that PyTorch was given. `by_unknown_limit`: it was given one that we do not
    /// know. `may_capture`: the program may capture graphs.
    pub(super) fn readings(&self, by_unknown_limit: bool, may_capture: bool) -> Vec<CallReading> {
        let fewer = (0..self.completed_first).rev().take(POLLED_AT_MOST);
        let mut readings: Vec<CallReading> =
            std::iter::once(self.completed_first).chain(fewer).map(CallReading::plain).collect();
        readings.push(CallReading::after_empty_cache());
        if may_capture && self.runs_out() {
            readings.push(CallReading { captures: true, ..CallReading::plain(0) });
        }
        if !self.driver_may_refuse && !by_unknown_limit {
            return readings;
        }
        let with_refusals = |refusals: usize| readings.iter().map(move |&reading| CallReading { refusals, ..reading });
        let refused: Vec<CallReading> = (1..=REFUSALS_AT_MOST).flat_map(with_refusals).collect();
        readings.extend(refused);
        readings
    }

    /// Which driver calls of the request are refused, counted from 1, for a number of refusals. A range grows granule by
    /// granule: what was mapped before the refusal is in the recording.
    pub(super) fn refused_calls(&self, refusals: usize, large_granule: u64) -> Vec<u64> {
        let rounded = self.seen.last().map_or(0, |last| last.bytes);
        let granule = if rounded > SMALL_REQUEST { large_granule } else { SMALL_GRANULE };
        let first_release = self.seen.iter().position(|seen| seen.action.is_release());
        let (before, after) = self.seen.split_at(first_release.unwrap_or(0));
        let granules = |part: &[ObservedAction]| {
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

    fn entries(actions: &[Action]) -> Vec<TraceEntry> {
        let entry = |(place, &action): (usize, &Action)| TraceEntry {
            action,
            address: Address(place as u64 + 1),
            size: 20 * MIB,
            ..TraceEntry::default()
        };
        actions.iter().enumerate().map(entry).collect()
    }

    #[test]
    fn call_ends_with_its_request() {
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
        let mut call = CallEntries::default();
        assert_eq!(call.read(&entries, 0), 5);
        assert_eq!((call.request, call.completed_first, call.seen.len()), (Some(4), 1, 4));
        assert!(!call.is_plain());
        assert_eq!(call.read(&entries, 5), 6);
        assert_eq!((call.request, call.seen.len()), (None, 1));
        assert_eq!(call.read(&entries, 7), 8);
    }

    #[test]
    fn plain_reading_comes_first() {
        use Action::{Alloc, FreeCompleted, SegmentFree};
        let mut call = CallEntries::default();
        call.read(&entries(&[FreeCompleted, SegmentFree, Alloc]), 0);
        let readings = call.readings(false, false);
        assert_eq!(readings[..2], [CallReading::plain(1), CallReading::plain(0)]);
        assert_eq!(readings[2], CallReading::after_empty_cache());
        assert!(readings[3..].iter().all(|reading| reading.refusals > 0));
    }

    #[test]
    fn driver_with_memory_left_does_not_refuse() {
        let mut entries = entries(&[Action::OutOfMemory]);
        let mut call = CallEntries::default();
        call.read(&entries, 0);
        assert!(call.readings(false, false).iter().any(|reading| reading.refusals > 0));
        entries[0].address = Address(100 * MIB);
        call.read(&entries, 0);
        assert!(call.readings(false, false).iter().all(|reading| reading.refusals == 0));
        assert!(call.readings(true, false).iter().any(|reading| reading.refusals > 0), "unless PyTorch itself did");
    }

    #[test]
    fn mapping_before_refusal_is_granted() {
        use Action::{OutOfMemory, SegmentMap, SegmentUnmap};
        let mut call = CallEntries::default();
        call.read(&entries(&[SegmentMap, SegmentMap, SegmentUnmap, SegmentMap, OutOfMemory]), 0);
        assert_eq!(call.refused_calls(2, 20 * MIB), [3, 5]);
    }
}

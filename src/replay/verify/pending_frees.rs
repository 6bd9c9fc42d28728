//! Frees that had to wait for another stream: when they completed, and how the model is made to do the same.
//!
//! A recording shows when a free completed, but not which stream it waited for. Any stream that is busy until then will
//! do, so each waiting block gets an invented stream of its own. Blocks that complete together must do so in the recorded
//! order. The model looks at streams in ascending order, so the numbers within such a group ascend.

use std::{collections::HashMap, ops::Range};

use crate::{
    base::{Address, StreamId},
    trace::torch::{Action, TraceEntry},
};

/// When a pending free completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompletionTurn {
    /// Which entry requests the free.
    requested_at: usize,
    /// The frees of one group complete in the same call.
    group: usize,
    /// The place within the group.
    rank: usize,
}

/// All pending frees of a recording, known beforehand.
#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// By entry.
    turns: Vec<CompletionTurn>,
    next: usize,
    /// The size of each group. The first group never completes.
    sizes: Vec<usize>,
}

/// The group of frees that are still pending when the recording ends.
const NEVER: usize = 0;

impl PendingFrees {
    /// Reads the entries of a recording from `start` on. Blocks that were `waiting` by then count as requested there,
    /// before everything else.
    pub(super) fn in_entries(
        entries: &[TraceEntry],
        start: usize,
        waiting: impl Iterator<Item = Address>,
    ) -> PendingFrees {
        let before = |_| CompletionTurn { requested_at: start, group: NEVER, rank: 0 };
        let mut waiting: HashMap<u64, usize> = waiting.enumerate().map(|(turn, block)| (block.0, turn)).collect();
        let mut turns: Vec<CompletionTurn> = (0..waiting.len()).map(before).collect();
        let mut sizes = vec![0];
        let mut group_is_open = false;
        for (index, entry) in entries.iter().enumerate().skip(start) {
            match entry.action {
                Action::FreeRequested => {
                    group_is_open = false;
                    if !completes_at_once(entries, index) {
                        waiting.insert(entry.address.0, turns.len());
                        turns.push(CompletionTurn { requested_at: index, group: NEVER, rank: 0 });
                    }
                }
                Action::FreeCompleted => {
                    let Some(turn) = waiting.remove(&entry.address.0) else { continue };
                    if !group_is_open {
                        sizes.push(0);
                        group_is_open = true;
                    }
                    let group = sizes.len() - 1;
                    (turns[turn].group, turns[turn].rank) = (group, sizes[group]);
                    sizes[group] += 1;
                }
                Action::Alloc | Action::OutOfMemory | Action::Snapshot | Action::Annotate => group_is_open = false,
                _ => {}
            }
        }
        for turn in turns.iter_mut().filter(|turn| turn.group == NEVER) {
            turn.rank = sizes[NEVER];
            sizes[NEVER] += 1;
        }
        PendingFrees { turns, next: 0, sizes }
    }

    /// The turn of the free that an entry requests, if it is pending. Must be called in the order of entries.
    pub(super) fn turn(&mut self, requested_at: usize) -> Option<CompletionTurn> {
        let turn = *self.turns.get(self.next).filter(|turn| turn.requested_at == requested_at)?;
        self.next += 1;
        Some(turn)
    }
}

/// Whether the free that an entry requests is completed by the next one.
fn completes_at_once(entries: &[TraceEntry], index: usize) -> bool {
    let next = entries.get(index + 1);
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == entries[index].address)
}

/// Invented streams, one for each waiting block.
#[derive(Clone, Debug)]
pub(super) struct WaitStreams {
    /// Numbers below are streams of the recording.
    first: usize,
    /// The numbers of the groups that are waiting, ascending.
    taken: Vec<(Range<usize>, usize)>,
}

impl WaitStreams {
    pub(super) fn above(streams: usize) -> WaitStreams {
        WaitStreams { first: streams.max(1), taken: Vec::new() }
    }

    /// The stream for a turn, or `None` where there are no numbers left.
    pub(super) fn lane(&mut self, turn: CompletionTurn, all: &PendingFrees) -> Option<StreamId> {
        let start = match self.taken.iter().find(|(_, group)| *group == turn.group) {
            Some((lanes, _)) => lanes.start,
            None => {
                let size = all.sizes[turn.group];
                let mut start = self.first;
                let mut place = 0;
                while let Some((next, _)) = self.taken.get(place).filter(|(next, _)| next.start < start + size) {
                    start = next.end;
                    place += 1;
                }
                self.taken.insert(place, (start..start + size, turn.group));
                start
            }
        };
        u16::try_from(start + turn.rank).ok().map(StreamId)
    }

    /// The streams of the group that completes next, in order. Groups complete in the order of their numbers.
    pub(super) fn next_group(&self) -> impl Iterator<Item = StreamId> + use<> {
        let next = self.taken.iter().filter(|(_, group)| *group != NEVER).min_by_key(|(_, group)| *group);
        let lanes = next.map_or(0..0, |(lanes, _)| lanes.clone());
        lanes.filter_map(|lane| u16::try_from(lane).ok().map(StreamId))
    }

    /// Removes the next group, which has completed.
    pub(super) fn vacate_next_group(&mut self) {
        let next = self.taken.iter().filter(|(_, group)| *group != NEVER).map(|(_, group)| *group).min();
        self.taken.retain(|(_, group)| Some(*group) != next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Address;

    fn entry(action: Action, address: u64) -> TraceEntry {
        TraceEntry { action, address: Address(address), size: 512, ..TraceEntry::default() }
    }

    #[test]
    fn pending_frees_complete_in_recorded_order() {
        use Action::{Alloc, FreeCompleted as Completed, FreeRequested as Requested};
        let entries = [
            entry(Requested, 1),
            entry(Requested, 2),
            entry(Requested, 3),
            entry(Completed, 3),
            entry(Requested, 4),
            entry(Completed, 2),
            entry(Completed, 1),
            entry(Alloc, 1),
        ];
        let mut held = PendingFrees::in_entries(&entries, 0, std::iter::empty());
        let mut lanes = WaitStreams::above(3);
        let mut lane = |index: usize| held.turn(index).and_then(|turn| lanes.lane(turn, &held));
        let seen = [lane(0), lane(1), lane(2), lane(4)];
        assert_eq!(seen, [Some(StreamId(4)), Some(StreamId(3)), None, Some(StreamId(5))]);
        assert_eq!(lanes.next_group().collect::<Vec<_>>(), [StreamId(3), StreamId(4)]);
        lanes.vacate_next_group();
        assert_eq!(lanes.next_group().count(), 0, "the last one never comes back");
    }

    #[test]
    fn numbers_are_used_again_once_a_group_is_back() {
        use Action::{Alloc, FreeCompleted as Completed, FreeRequested as Requested};
        let mut entries = vec![entry(Requested, 1)];
        for address in 2..100 {
            entries.extend([entry(Requested, address), entry(Alloc, 7)]);
            entries.extend([entry(Completed, address), entry(Alloc, 7)]);
        }
        entries.extend([entry(Completed, 1), entry(Alloc, 7)]);
        let mut held = PendingFrees::in_entries(&entries, 0, std::iter::empty());
        let mut lanes = WaitStreams::above(1);
        let first = held.turn(0).unwrap();
        assert_eq!(lanes.lane(first, &held), Some(StreamId(1)));
        for place in 0..98 {
            let turn = held.turn(1 + 4 * place).unwrap();
            assert_eq!(lanes.lane(turn, &held), Some(StreamId(2)));
            assert_eq!(lanes.next_group().collect::<Vec<_>>(), [StreamId(2)]);
            lanes.vacate_next_group();
        }
        assert_eq!(lanes.next_group().collect::<Vec<_>>(), [StreamId(1)]);
    }
}

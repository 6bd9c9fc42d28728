//! Frees that had to wait for another stream: when they were completed, and how the model is made to do the same.
//!
//! A recording shows when a free was completed, but not which stream it had waited for. Any stream will do that is busy
//! until then, so each waiting block gets a made-up one for itself. Those that come back together must do so in the
//! recorded order; the model looks at streams in ascending order, so the numbers within such a group ascend.

use std::{collections::HashMap, ops::Range};

use crate::{
    base::{Address, StreamId},
    trace::torch::{Action, Entry},
};

/// When a held-back free is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Which entry requests the free.
    requested_at: usize,
    /// Those of one group come back in the same stretch of entries.
    group: usize,
    /// The place within the group.
    rank: usize,
}

/// All held-back frees of a recording, known beforehand.
#[derive(Debug, Default)]
pub(super) struct HeldBack {
    /// By entry.
    turns: Vec<Turn>,
    next: usize,
    /// How many belong to each group. The first is of those that never come back.
    sizes: Vec<usize>,
}

/// Those that are still waiting when the recording ends.
const NEVER: usize = 0;

impl HeldBack {
    /// Looks through the entries of a recording from `start` on. What was `waiting` by then counts as requested there,
    /// before everything else.
    pub(super) fn in_entries(entries: &[Entry], start: usize, waiting: impl Iterator<Item = Address>) -> HeldBack {
        let before = |_| Turn { requested_at: start, group: NEVER, rank: 0 };
        let mut waiting: HashMap<u64, usize> = waiting.enumerate().map(|(turn, block)| (block.0, turn)).collect();
        let mut turns: Vec<Turn> = (0..waiting.len()).map(before).collect();
        let mut sizes = vec![0];
        let mut group_is_open = false;
        for (index, entry) in entries.iter().enumerate().skip(start) {
            match entry.action {
                Action::FreeRequested => {
                    group_is_open = false;
                    if !completes_at_once(entries, index) {
                        waiting.insert(entry.address.0, turns.len());
                        turns.push(Turn { requested_at: index, group: NEVER, rank: 0 });
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
        HeldBack { turns, next: 0, sizes }
    }

    /// The turn of the free that an entry requests, if it is held back. Entries must be asked for in order.
    pub(super) fn turn(&mut self, requested_at: usize) -> Option<Turn> {
        let turn = *self.turns.get(self.next).filter(|turn| turn.requested_at == requested_at)?;
        self.next += 1;
        Some(turn)
    }
}

/// Whether the free that an entry requests is completed by the next one.
fn completes_at_once(entries: &[Entry], index: usize) -> bool {
    let next = entries.get(index + 1);
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == entries[index].address)
}

/// Made-up streams, one for each waiting block.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    /// Numbers below are streams of the recording.
    first: usize,
    /// The numbers of the groups that are waiting, ascending.
    taken: Vec<(Range<usize>, usize)>,
}

impl Lanes {
    pub(super) fn above(streams: usize) -> Lanes {
        Lanes { first: streams.max(1), taken: Vec::new() }
    }

    /// The stream for a turn, or `None` where there are no numbers left.
    pub(super) fn lane(&mut self, turn: Turn, all: &HeldBack) -> Option<StreamId> {
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

    /// The streams of the group that comes back next, in order, if any is waiting. Groups come back in the order in
    /// which they are numbered.
    pub(super) fn next_group(&self) -> impl Iterator<Item = StreamId> + use<> {
        let next = self.taken.iter().filter(|(_, group)| *group != NEVER).min_by_key(|(_, group)| *group);
        let lanes = next.map_or(0..0, |(lanes, _)| lanes.clone());
        lanes.filter_map(|lane| u16::try_from(lane).ok().map(StreamId))
    }

    /// The next group has come back.
    pub(super) fn vacate_next_group(&mut self) {
        let next = self.taken.iter().filter(|(_, group)| *group != NEVER).map(|(_, group)| *group).min();
        self.taken.retain(|(_, group)| Some(*group) != next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Address;

    fn entry(action: Action, address: u64) -> Entry {
        Entry { action, address: Address(address), size: 512, ..Entry::default() }
    }

    #[test]
    fn waiting_blocks_come_back_in_the_order_in_which_the_recording_completes_them() {
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
        let mut held = HeldBack::in_entries(&entries, 0, std::iter::empty());
        let mut lanes = Lanes::above(3);
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
        let mut held = HeldBack::in_entries(&entries, 0, std::iter::empty());
        let mut lanes = Lanes::above(1);
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

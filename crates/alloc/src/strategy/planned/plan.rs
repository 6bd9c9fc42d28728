//! A plan: which request of a step goes where.
//!
//! The n-th request of a stream for so many bytes gets the offset of the n-th such request of the profiled step. While
//! steps repeat exactly that is the request planned next, and found at once; a request more or less of another size
//! does not put the rest out of step. Every stream has offsets of its own, since memory of one may not be handed to
//! another without waiting.

use super::{
    packing::{Interval, pack},
    profile::{Lifetime, Shape},
};
use oomph_base::StreamId;

/// No entry.
const NONE: u32 = u32::MAX;

/// What is planned for one step, and how far the present one has got.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// In the order of the profiled step.
    entries: Vec<Entry>,
    /// By shape.
    groups: Vec<Group>,
    /// The entry after the one that was used last.
    cursor: u32,
    /// Streams and the bytes that each needs.
    pub(super) needs: Vec<(StreamId, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    group: u32,
    /// The next entry of the same shape.
    following: u32,
    /// `None` for a block that stays: it is not the plan's.
    offset: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    shape: Shape,
    first: u32,
    /// The next to be used in this step.
    next: u32,
}

/// The entry for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    entry: u32,
    /// Where its block should go, if the plan has a place for it.
    pub(super) offset: Option<u64>,
}

impl Plan {
    /// A plan for steps like this one.
    pub(super) fn new(lifetimes: &[Lifetime], period: u32) -> Plan {
        let mut shapes: Vec<Shape> = lifetimes.iter().map(|lifetime| lifetime.shape).collect();
        shapes.sort_unstable();
        shapes.dedup();
        let mut groups: Vec<Group> = shapes.into_iter().map(|shape| Group { shape, first: NONE, next: NONE }).collect();
        let mut entries = Vec::with_capacity(lifetimes.len());
        for (place, lifetime) in lifetimes.iter().enumerate().rev() {
            let group = groups.partition_point(|group| group.shape < lifetime.shape);
            entries.push(Entry { group: group as u32, following: groups[group].first, offset: None });
            groups[group].first = place as u32;
        }
        entries.reverse();
        let mut plan = Plan { entries, groups, cursor: 0, needs: Vec::new() };
        plan.pack_streams(lifetimes, period);
        plan.begin_step();
        plan
    }

    fn pack_streams(&mut self, lifetimes: &[Lifetime], period: u32) {
        let mut streams: Vec<StreamId> = lifetimes.iter().map(|lifetime| lifetime.shape.0).collect();
        streams.sort_unstable();
        streams.dedup();
        for stream in streams {
            let (places, intervals): (Vec<usize>, Vec<Interval>) = lifetimes
                .iter()
                .enumerate()
                .filter(|(_, lifetime)| lifetime.shape.0 == stream)
                .filter_map(|(place, &Lifetime { shape: (_, bytes), begin, end })| {
                    Some((place, Interval { bytes, begin, end: end? }))
                })
                .unzip();
            let packing = pack(&intervals, period);
            for (place, offset) in places.into_iter().zip(packing.offsets) {
                self.entries[place].offset = Some(offset);
            }
            if packing.bytes > 0 {
                self.needs.push((stream, packing.bytes));
            }
        }
    }

    /// Starts again from the first request; how many of the last step's entries were not used.
    pub(super) fn begin_step(&mut self) -> u64 {
        let mut unused = 0;
        for group in &mut self.groups {
            let mut entry = std::mem::replace(&mut group.next, group.first);
            while let Some(skipped) = self.entries.get(entry as usize) {
                unused += u64::from(skipped.offset.is_some());
                entry = skipped.following;
            }
        }
        self.cursor = 0;
        unused
    }

    /// How many requests have a place.
    pub(super) fn places(&self) -> u64 {
        self.entries.iter().filter(|entry| entry.offset.is_some()).count() as u64
    }

    /// The entry for the next request of this shape; `None` where there are no more.
    #[inline]
    pub(super) fn look_up(&self, shape: Shape) -> Option<Planned> {
        let expected = self.entries.get(self.cursor as usize).map(|entry| &self.groups[entry.group as usize]);
        let entry = match expected {
            Some(group) if group.shape == shape && group.next == self.cursor => self.cursor,
            _ => self.groups[self.groups.binary_search_by_key(&shape, |group| group.shape).ok()?].next,
        };
        Some(Planned { entry, offset: self.entries.get(entry as usize)?.offset })
    }

    /// The request was served, as planned or not.
    #[inline]
    pub(super) fn advance(&mut self, planned: Planned) {
        let Entry { group, following, .. } = self.entries[planned.entry as usize];
        self.groups[group as usize].next = following;
        self.cursor = planned.entry + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lifetime(stream: u16, bytes: u64, begin: u32, end: Option<u32>) -> Lifetime {
        Lifetime { shape: (StreamId(stream), bytes), begin, end }
    }

    fn step(plan: &mut Plan, shapes: &[(u16, u64)]) -> Vec<Option<u64>> {
        let serve = |&(stream, bytes): &(u16, u64)| {
            let planned = plan.look_up((StreamId(stream), bytes))?;
            plan.advance(planned);
            planned.offset
        };
        shapes.iter().map(serve).collect()
    }

    fn example() -> Plan {
        let lifetimes = [
            lifetime(0, 30, 0, Some(3)),
            lifetime(0, 20, 1, Some(2)),
            lifetime(1, 20, 2, Some(4)),
            lifetime(0, 20, 3, Some(5)),
            lifetime(0, 40, 4, None),
        ];
        Plan::new(&lifetimes, 6)
    }

    #[test]
    fn a_step_like_the_profiled_one_gets_its_offsets_and_streams_are_apart() {
        let mut plan = example();
        assert_eq!(plan.needs, [(StreamId(0), 50), (StreamId(1), 20)]);
        for _ in 0..2 {
            let offsets = step(&mut plan, &[(0, 30), (0, 20), (1, 20), (0, 20), (0, 40)]);
            assert_eq!(offsets, [Some(0), Some(30), Some(0), Some(0), None]);
            assert_eq!(plan.begin_step(), 0);
        }
    }

    #[test]
    fn requests_more_or_less_do_not_put_the_rest_out_of_step() {
        let mut plan = example();
        let offsets = step(&mut plan, &[(0, 20), (0, 99), (0, 20), (0, 20), (1, 20)]);
        assert_eq!(offsets, [Some(30), None, Some(0), None, Some(0)]);
        assert_eq!((plan.begin_step(), plan.places()), (1, 4), "30 bytes were not asked for");
    }
}

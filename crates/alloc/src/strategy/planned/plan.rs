//! A plan: which request of a step goes where.
//!
//! The n-th request of a stream for so many bytes gets the offset of the n-th such request of the profiled step. While
//! steps repeat exactly that is the request planned next, and found at once; a request more or less of another size
//! does not put the rest out of step. Every stream has offsets of its own, since memory of one may not be handed to
//! another without waiting.

use super::profile::{Lifetime, Shape};
use oomph_base::{
    StreamId,
    packing::{BlockLifetime, BlockPlacer, GapChoice, PackingBudget, PlacementOrder, PlacementOutcome},
};

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
            let (places, intervals): (Vec<usize>, Vec<BlockLifetime>) = lifetimes
                .iter()
                .enumerate()
                .filter(|(_, lifetime)| lifetime.shape.0 == stream)
                .filter_map(|(place, &Lifetime { shape: (_, bytes), begin, end })| {
                    Some((place, BlockLifetime { bytes, begin, end: end? }))
                })
                .unzip();
            let (offsets, needed) = pack(&intervals, period);
            for (place, offset) in places.into_iter().zip(offsets) {
                self.entries[place].offset = Some(offset);
            }
            if needed > 0 {
                self.needs.push((stream, needed));
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

/// The offsets of blocks that come again after every period, and the bytes that all together need.
///
/// Each block goes to the lowest free offset, in several orders, and the lowest result is kept. For
/// training steps the order by size is hard to improve on.
fn pack(blocks: &[BlockLifetime], period: u32) -> (Vec<u64>, u64) {
    let mut placer = BlockPlacer::periodic(blocks, period);
    let mut best: Option<(Vec<u64>, u64)> = None;
    for order in [PlacementOrder::Bytes, PlacementOrder::Area, PlacementOrder::Lifetime] {
        let ceiling = best.as_ref().map_or(u64::MAX, |(_, height)| height.saturating_sub(1));
        let mut budget = PackingBudget::of_steps(u64::MAX);
        placer.clear();
        let outcome = placer.place_all(&order.of(blocks), GapChoice::Lowest, ceiling, &mut budget);
        if outcome == PlacementOutcome::Done {
            best = Some((placer.offsets().to_vec(), placer.height()));
        }
    }
    best.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    fn block(bytes: u64, begin: u32, end: u32) -> BlockLifetime {
        BlockLifetime { begin, end, bytes }
    }

    /// The bytes live at each time of the period, counted one time after the other.
    fn live_bytes(blocks: &[BlockLifetime], period: u32) -> Vec<u64> {
        let live =
            |time: u32| blocks.iter().filter(|block| times(block, period).contains(&time)).map(|b| b.bytes).sum();
        (0..period).map(live).collect()
    }

    fn times(block: &BlockLifetime, period: u32) -> Vec<u32> {
        (block.begin..block.end).map(|time| time % period).collect()
    }

    #[test]
    fn successive_blocks_share_an_offset() {
        assert_eq!(pack(&[block(10, 0, 2), block(5, 1, 3), block(10, 2, 4)], 4), (vec![0, 10, 0], 15));
    }

    #[test]
    fn a_block_keeps_its_offset_into_the_next_period() {
        let blocks = [block(8, 0, 1), block(8, 1, 3), block(8, 3, 5)];
        assert_eq!(pack(&blocks, 4), (vec![8, 0, 0], 16));
        assert_eq!(live_bytes(&blocks, 4), [16, 8, 8, 8]);
    }

    proptest! {
        #[test]
        fn blocks_that_are_live_together_do_not_overlap(
            period in 4u32..40,
            blocks in prop::collection::vec((1u64..50, 0u32..40, 1u32..40), 0..40),
        ) {
            let place = |(bytes, begin, length): (u64, u32, u32)| {
                block(bytes, begin % period, begin % period + 1 + length % period)
            };
            let mut blocks: Vec<BlockLifetime> = blocks.into_iter().map(place).collect();
            blocks.sort_by_key(|block| block.begin);
            let (offsets, needed) = pack(&blocks, period);
            prop_assert!(needed >= live_bytes(&blocks, period).into_iter().max().unwrap());
            for (one, first) in blocks.iter().enumerate() {
                prop_assert!(offsets[one] + first.bytes <= needed);
                for (other, second) in blocks.iter().enumerate().take(one) {
                    let together = times(first, period).iter().any(|time| times(second, period).contains(time));
                    let (low, high) = (offsets[one], offsets[other]);
                    let apart = low + first.bytes <= high || high + second.bytes <= low;
                    prop_assert!(apart || !together, "{first:?} at {low} and {second:?} at {high}");
                }
            }
        }
    }
}

//! Profiles of steps, and the plan that is made from one: which request of a step goes where.
//!
//! A profile has the requests of one step, their order and their lifetimes. A block that outlives
//! its step ends in the next one, which has not happened yet when the plan is made. If steps
//! repeat, the same block of the previous step ended in the profiled step, at the same point of the
//! period. The two are matched by size and stream, in the order of allocation. A block without such
//! a predecessor is assumed to stay.
//!
//! The n-th request of a stream for a size gets the offset of the n-th such request of the profiled
//! step, so an extra or a missing request of another size does not disturb the others. Every stream
//! has its own offsets, because memory of one stream may not serve another without waiting.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use oomph_base::{
    StreamId,
    packing::{BlockLifetime, PackingBudget, PeriodicPlace, pack_periodic},
};

/// Steps are profiled up to this many requests; later ones are not planned.
const MOST_REQUESTS: usize = 1 << 14;

/// The stream and the rounded size of a request: all that a plan knows about it.
pub(super) type RequestShape = (StreamId, u64);

/// The step that allocated a block, and the number and shape of the request in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockBirth {
    step: u32,
    number: u32,
    shape: RequestShape,
}

impl BlockBirth {
    /// For blocks that were not profiled.
    pub(super) const UNKNOWN: BlockBirth =
        BlockBirth { step: u32::MAX, number: u32::MAX, shape: (StreamId::DEFAULT, 0) };
}

/// One request of a profiled step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProfiledRequest {
    pub(super) shape: RequestShape,
    pub(super) begin: u32,
    /// After the period if the block outlives the step; `None` if it stays.
    pub(super) end: Option<u32>,
}

/// The profile of the present step. Time is counted in requests and frees.
#[derive(Clone, Debug, Default)]
pub(super) struct StepProfile {
    step: u32,
    clock: u32,
    lifetimes: Vec<ProfiledRequest>,
    /// Blocks of the previous step that were freed in this one: shape, number and time.
    late: Vec<(RequestShape, u32, u32)>,
}

impl StepProfile {
    /// A request was served.
    pub(super) fn record_alloc(&mut self, shape: RequestShape) -> BlockBirth {
        if self.lifetimes.len() == MOST_REQUESTS {
            return BlockBirth::UNKNOWN;
        }
        let number = self.lifetimes.len() as u32;
        self.lifetimes.push(ProfiledRequest { shape, begin: self.clock, end: None });
        self.clock += 1;
        BlockBirth { step: self.step, number, shape }
    }

    /// A block was freed.
    pub(super) fn record_free(&mut self, birth: BlockBirth) {
        if birth == BlockBirth::UNKNOWN {
            return;
        }
        if birth.step == self.step {
            self.lifetimes[birth.number as usize].end = Some(self.clock);
        } else if birth.step.wrapping_add(1) == self.step && self.late.len() < MOST_REQUESTS {
            self.late.push((birth.shape, birth.number, self.clock));
        } else {
            return;
        }
        self.clock += 1;
    }

    /// Ends the step and begins the next; returns the requests of the step and its length.
    pub(super) fn finish(&mut self) -> (Vec<ProfiledRequest>, u32) {
        let period = self.clock.max(1);
        let mut lifetimes = std::mem::take(&mut self.lifetimes);
        let mut late = std::mem::take(&mut self.late);
        late.sort_unstable();
        let mut ends: BTreeMap<RequestShape, VecDeque<u32>> = BTreeMap::new();
        for (shape, _, end) in late {
            ends.entry(shape).or_default().push_back(end);
        }
        for lifetime in lifetimes.iter_mut().filter(|lifetime| lifetime.end.is_none()) {
            // A block that lives longer than a period would overlap itself.
            lifetime.end = ends
                .get_mut(&lifetime.shape)
                .and_then(VecDeque::pop_front)
                .filter(|&end| end <= lifetime.begin)
                .map(|end| end + period);
        }
        *self = StepProfile { step: self.step.wrapping_add(1), ..StepProfile::default() };
        (lifetimes, period)
    }
}

/// The plan for one step, and the position of the present step in it.
#[derive(Clone, Debug, Default)]
pub(super) struct StepPlan {
    groups: BTreeMap<RequestShape, ShapeGroup>,
    /// Streams and the bytes that each needs.
    pub(super) needs: Vec<(StreamId, u64)>,
}

/// The requests of one shape.
#[derive(Clone, Debug, Default)]
struct ShapeGroup {
    /// Where the block of each request goes, in order; `None` for a block that stays.
    offsets: Vec<Option<u64>>,
    /// How many of them this step has made.
    made: usize,
}

impl StepPlan {
    /// A plan for steps like this one.
    pub(super) fn new(lifetimes: &[ProfiledRequest], period: u32) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut offsets = vec![None; lifetimes.len()];
        let streams: BTreeSet<StreamId> = lifetimes.iter().map(|lifetime| lifetime.shape.0).collect();
        for stream in streams {
            let (places, intervals): (Vec<usize>, Vec<BlockLifetime>) = lifetimes
                .iter()
                .enumerate()
                .filter(|(_, lifetime)| lifetime.shape.0 == stream)
                .filter_map(|(place, &ProfiledRequest { shape: (_, bytes), begin, end })| {
                    Some((place, BlockLifetime { bytes, begin, end: end? }))
                })
                .unzip();
            let (packed, needed) = pack(&intervals, period);
            for (place, offset) in places.into_iter().zip(packed) {
                offsets[place] = Some(offset);
            }
            if needed > 0 {
                plan.needs.push((stream, needed));
            }
        }
        for (lifetime, offset) in lifetimes.iter().zip(offsets) {
            plan.groups.entry(lifetime.shape).or_default().offsets.push(offset);
        }
        plan
    }

    /// Starts again from the first request; returns how many offsets the last step did not use.
    pub(super) fn begin_step(&mut self) -> u64 {
        let unused = |group: &mut ShapeGroup| {
            let made = std::mem::take(&mut group.made);
            group.offsets[made..].iter().flatten().count() as u64
        };
        self.groups.values_mut().map(unused).sum()
    }

    /// How many requests have an offset.
    pub(super) fn places(&self) -> u64 {
        self.groups.values().flat_map(|group| &group.offsets).flatten().count() as u64
    }

    /// The offset for the next request of this shape, or `Some(None)` for a block that stays; `None`
    /// if the plan has no more requests of this shape.
    #[inline]
    pub(super) fn look_up(&self, shape: RequestShape) -> Option<Option<u64>> {
        let group = self.groups.get(&shape)?;
        group.offsets.get(group.made).copied()
    }

    /// Moves on past a request in the plan, served as planned or not.
    #[inline]
    pub(super) fn advance(&mut self, shape: RequestShape) {
        if let Some(group) = self.groups.get_mut(&shape) {
            group.made += 1;
        }
    }
}

/// The offsets of blocks that come again after every period, and the bytes that all together need.
fn pack(blocks: &[BlockLifetime], period: u32) -> (Vec<u64>, u64) {
    let packed = pack_periodic(blocks, period, &[], &mut PackingBudget::of_steps(u64::MAX));
    let (places, height) = packed.unwrap_or_default();
    let offset = |place| match place {
        PeriodicPlace::Room(_, offset) | PeriodicPlace::Outside(offset) => offset,
    };
    (places.into_iter().map(offset).collect(), height)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ACTIVATION: RequestShape = (StreamId(0), 100);
    const GRADIENT: RequestShape = (StreamId(0), 70);

    #[test]
    fn long_lived_block_follows_its_predecessor() {
        let mut profile = StepProfile::default();
        let mut gradient = None;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let activation = profile.record_alloc(ACTIVATION);
            if let Some(old) = gradient {
                profile.record_free(old);
            }
            gradient = Some(profile.record_alloc(GRADIENT));
            profile.record_free(activation);
            seen.push(profile.finish());
        }
        let (lifetimes, period) = &seen[1];
        assert_eq!(*period, 4);
        let of = |shape, begin, end| ProfiledRequest { shape, begin, end };
        assert_eq!(*lifetimes, [of(ACTIVATION, 0, Some(3)), of(GRADIENT, 2, Some(5))]);
        assert_eq!(seen[0].0[1].end, None, "nothing like it had ended yet");
        assert_eq!(seen[2], seen[1]);
    }

    #[test]
    fn blocks_that_stay_have_no_end() {
        let mut profile = StepProfile::default();
        let stays = profile.record_alloc(ACTIVATION);
        assert_eq!(profile.finish().0[0].end, None);
        profile.finish();
        profile.record_free(stays);
        profile.record_free(BlockBirth::UNKNOWN);
        assert_eq!(profile.finish(), (Vec::new(), 1));
    }

    fn lifetime(stream: u16, bytes: u64, begin: u32, end: Option<u32>) -> ProfiledRequest {
        ProfiledRequest { shape: (StreamId(stream), bytes), begin, end }
    }

    fn step(plan: &mut StepPlan, shapes: &[(u16, u64)]) -> Vec<Option<u64>> {
        let serve = |&(stream, bytes): &(u16, u64)| {
            let offset = plan.look_up((StreamId(stream), bytes))?;
            plan.advance((StreamId(stream), bytes));
            offset
        };
        shapes.iter().map(serve).collect()
    }

    fn example() -> StepPlan {
        let lifetimes = [
            lifetime(0, 30, 0, Some(3)),
            lifetime(0, 20, 1, Some(2)),
            lifetime(1, 20, 2, Some(4)),
            lifetime(0, 20, 3, Some(5)),
            lifetime(0, 40, 4, None),
        ];
        StepPlan::new(&lifetimes, 6)
    }

    #[test]
    fn equal_steps_get_equal_offsets() {
        let mut plan = example();
        assert_eq!(plan.needs, [(StreamId(0), 50), (StreamId(1), 20)]);
        for _ in 0..2 {
            let offsets = step(&mut plan, &[(0, 30), (0, 20), (1, 20), (0, 20), (0, 40)]);
            assert_eq!(offsets, [Some(0), Some(30), Some(0), Some(0), None]);
            assert_eq!(plan.begin_step(), 0);
        }
    }

    #[test]
    fn extra_and_missing_requests_do_not_disturb_others() {
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

//! Packing blocks that come and go with a period, so that they need little memory: pure arithmetic, no devices.
//!
//! Every block has an interval of time and a size; those whose intervals meet must lie apart. Blocks are placed one by
//! one at the lowest offset that is free during their interval, in several orders, and the lowest result is kept. On
//! training steps the largest first is hard to beat.

use std::cmp::Reverse;

/// When and how much: from `begin` to before `end`, which is beyond the period where a block outlives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interval {
    pub(super) bytes: u64,
    /// Within the period.
    pub(super) begin: u32,
    /// After `begin`, and at most one period after it.
    pub(super) end: u32,
}

impl Interval {
    fn length(&self) -> u64 {
        u64::from(self.end - self.begin)
    }
}

/// Blocks with the highest value come first.
type Order = fn(&Interval) -> (u64, u64);

/// Where everything goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Packing {
    /// In the order of the intervals.
    pub(super) offsets: Vec<u64>,
    /// What all together need.
    pub(super) bytes: u64,
}

/// Packs intervals that repeat after `period`.
pub(super) fn pack(intervals: &[Interval], period: u32) -> Packing {
    const ORDERS: [Order; 3] = [
        |interval| (interval.bytes, interval.length()),
        |interval| (interval.bytes.saturating_mul(interval.length()), interval.bytes),
        |interval| (interval.length(), interval.bytes),
    ];
    let packings = ORDERS.into_iter().map(|order| {
        let mut places: Vec<usize> = (0..intervals.len()).collect();
        places.sort_by_key(|&place| Reverse(order(&intervals[place])));
        first_fit(intervals, period, &places)
    });
    packings.min_by_key(|packing| packing.bytes).unwrap_or_default()
}

/// The bytes that are needed at once at most: no packing can need fewer.
#[cfg(test)]
pub(super) fn bound(intervals: &[Interval], period: u32) -> u64 {
    let needed = |moment| {
        let moment = Interval { bytes: 0, begin: moment, end: moment + 1 };
        intervals.iter().filter(|interval| meet(interval, &moment, period)).map(|interval| interval.bytes).sum()
    };
    (0..period).map(needed).max().unwrap_or(0)
}

fn first_fit(intervals: &[Interval], period: u32, order: &[usize]) -> Packing {
    let mut packing = Packing { offsets: vec![0; intervals.len()], bytes: 0 };
    // What is placed already, by offset.
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(intervals.len());
    for &place in order {
        let interval = &intervals[place];
        let mut offset = 0;
        for &(taken, other) in &placed {
            let other = &intervals[other];
            if taken + other.bytes <= offset || !meet(interval, other, period) {
                continue;
            }
            if taken >= offset + interval.bytes {
                break;
            }
            offset = taken + other.bytes;
        }
        let rank = placed.partition_point(|&(taken, _)| taken <= offset);
        placed.insert(rank, (offset, place));
        packing.offsets[place] = offset;
        packing.bytes = packing.bytes.max(offset + interval.bytes);
    }
    packing
}

/// Whether two intervals share a moment in any of their repetitions.
fn meet(one: &Interval, other: &Interval, period: u32) -> bool {
    let share =
        |one: &Interval, shift: u32, other: &Interval| one.begin + shift < other.end && other.begin < one.end + shift;
    share(one, 0, other) || share(one, period, other) || share(other, period, one)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn interval(bytes: u64, begin: u32, end: u32) -> Interval {
        Interval { bytes, begin, end }
    }

    #[test]
    fn blocks_that_follow_each_other_share_their_place() {
        let intervals = [interval(10, 0, 2), interval(10, 2, 4), interval(5, 1, 3)];
        let packing = pack(&intervals, 4);
        assert_eq!((packing.offsets, packing.bytes), (vec![0, 0, 10], 15));
    }

    #[test]
    fn a_block_that_outlives_the_period_keeps_its_place_into_the_next() {
        let gradient = interval(8, 3, 5);
        let packing = pack(&[gradient, interval(8, 0, 1), interval(8, 1, 3)], 4);
        assert_eq!(packing.offsets, [0, 8, 0]);
        assert_eq!(packing.bytes, bound(&[gradient, interval(8, 0, 1), interval(8, 1, 3)], 4));
    }

    proptest! {
        #[test]
        fn no_two_blocks_that_meet_overlap(
            period in 4u32..40,
            blocks in prop::collection::vec((1u64..50, 0u32..40, 1u32..40), 0..40),
        ) {
            let intervals: Vec<Interval> = blocks
                .into_iter()
                .map(|(bytes, begin, length)| {
                    let begin = begin % period;
                    interval(bytes, begin, begin + 1 + length % period)
                })
                .collect();
            let packing = pack(&intervals, period);
            prop_assert!(packing.bytes >= bound(&intervals, period));
            for (one, first) in intervals.iter().enumerate() {
                prop_assert!(packing.offsets[one] + first.bytes <= packing.bytes);
                for (other, second) in intervals.iter().enumerate().take(one) {
                    // Moment by moment, independent of `meet`.
                    let moments = |interval: &Interval| (interval.begin..interval.end).map(|t| t % period).collect::<Vec<_>>();
                    let together = moments(first).iter().any(|moment| moments(second).contains(moment));
                    let (low, high) = (packing.offsets[one], packing.offsets[other]);
                    let apart = low + first.bytes <= high || high + second.bytes <= low;
                    prop_assert!(apart || !together, "{first:?} at {low} and {second:?} at {high}");
                }
            }
        }
    }
}

//! What one step asked for, in which order, and for how long.
//!
//! A block that outlives its step ends in the next one, which has not happened yet when the plan is made. Its like of
//! the step before did end during the profiled step, at the same point of the period if steps repeat: so the two are
//! matched, by size and stream, in the order of their birth. A block without such a forerunner is there to stay.

use std::collections::{BTreeMap, VecDeque};

use oomph_base::StreamId;

/// Longer steps are profiled up to here: what comes later is not planned.
const MOST_REQUESTS: usize = 1 << 14;

/// What a request looks like to a plan.
pub(super) type Shape = (StreamId, u64);

/// In which step a block was born, and as which request of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Birth {
    step: u32,
    number: u32,
}

impl Birth {
    /// Of blocks that no step saw.
    pub(super) const UNKNOWN: Birth = Birth { step: u32::MAX, number: u32::MAX };
}

/// One request of a profiled step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lifetime {
    pub(super) shape: Shape,
    pub(super) begin: u32,
    /// Beyond the period where it outlives the step; `None` where it stays.
    pub(super) end: Option<u32>,
}

/// The notes on the present step. Time is counted in requests and frees.
#[derive(Clone, Debug, Default)]
pub(super) struct Profile {
    step: u32,
    clock: u32,
    lifetimes: Vec<Lifetime>,
    /// Blocks of the step before that ended in this one: shape, number and time.
    late: Vec<(Shape, u32, u32)>,
}

impl Profile {
    /// A request was served.
    pub(super) fn born(&mut self, shape: Shape) -> Birth {
        if self.lifetimes.len() == MOST_REQUESTS {
            return Birth::UNKNOWN;
        }
        let number = self.lifetimes.len() as u32;
        self.lifetimes.push(Lifetime { shape, begin: self.clock, end: None });
        self.clock += 1;
        Birth { step: self.step, number }
    }

    /// A block was freed.
    pub(super) fn died(&mut self, birth: Birth, shape: Shape) {
        if birth == Birth::UNKNOWN {
            return;
        }
        if birth.step == self.step {
            self.lifetimes[birth.number as usize].end = Some(self.clock);
        } else if birth.step.wrapping_add(1) == self.step && self.late.len() < MOST_REQUESTS {
            self.late.push((shape, birth.number, self.clock));
        } else {
            return;
        }
        self.clock += 1;
    }

    /// Ends the step: what it was like, and its length. The next one begins.
    pub(super) fn finish(&mut self) -> (Vec<Lifetime>, u32) {
        let period = self.clock.max(1);
        let mut lifetimes = std::mem::take(&mut self.lifetimes);
        let mut late = std::mem::take(&mut self.late);
        late.sort_unstable();
        let mut ends: BTreeMap<Shape, VecDeque<u32>> = BTreeMap::new();
        for (shape, _, end) in late {
            ends.entry(shape).or_default().push_back(end);
        }
        for lifetime in lifetimes.iter_mut().filter(|lifetime| lifetime.end.is_none()) {
            // One that lives longer than a period would meet itself.
            lifetime.end = ends
                .get_mut(&lifetime.shape)
                .and_then(VecDeque::pop_front)
                .filter(|&end| end <= lifetime.begin)
                .map(|end| end + period);
        }
        *self = Profile { step: self.step.wrapping_add(1), ..Profile::default() };
        (lifetimes, period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACTIVATION: Shape = (StreamId(0), 100);
    const GRADIENT: Shape = (StreamId(0), 70);

    #[test]
    fn a_block_that_outlives_its_step_ends_where_the_one_before_it_did() {
        let mut profile = Profile::default();
        let mut gradient = None;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let activation = profile.born(ACTIVATION);
            if let Some(old) = gradient {
                profile.died(old, GRADIENT);
            }
            gradient = Some(profile.born(GRADIENT));
            profile.died(activation, ACTIVATION);
            seen.push(profile.finish());
        }
        let (lifetimes, period) = &seen[1];
        assert_eq!(*period, 4);
        let of = |shape, begin, end| Lifetime { shape, begin, end };
        assert_eq!(*lifetimes, [of(ACTIVATION, 0, Some(3)), of(GRADIENT, 2, Some(5))]);
        assert_eq!(seen[0].0[1].end, None, "nothing like it had ended yet");
        assert_eq!(seen[2], seen[1]);
    }

    #[test]
    fn blocks_that_stay_and_blocks_of_long_ago_have_no_end() {
        let mut profile = Profile::default();
        let stays = profile.born(ACTIVATION);
        assert_eq!(profile.finish().0[0].end, None);
        profile.finish();
        profile.died(stays, ACTIVATION);
        profile.died(Birth::UNKNOWN, ACTIVATION);
        assert_eq!(profile.finish(), (Vec::new(), 1));
    }
}

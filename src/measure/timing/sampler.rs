//! Who watches the passes of a timed case: nobody, or a sampler that reads the clock around some operations.

use std::time::Instant;

use super::{super::latency::Durations, elapsed};
use crate::{
    replay::{FailedRequest, LiveBlock, Observer, ReplayMoment},
    strategy::{EventSink, Freed, Outcome},
    trace::Op,
};

/// One operation in this many is timed, on average.
pub const SAMPLED_ONE_IN: u32 = 16;

/// Times some operations. The gaps between them are irregular, so that a workload with a period of its own is not met
/// at the same place every time.
#[derive(Default)]
pub(super) struct Sampler {
    gap: u32,
    state: u64,
    began: Option<Instant>,
    pub(super) allocs: Durations,
    pub(super) frees: Durations,
}

impl Sampler {
    /// Its neighbours' samples are not met at the same operations: every number gives other gaps.
    pub(super) fn numbered(number: u64) -> Sampler {
        Sampler { state: number, ..Sampler::default() }
    }

    /// Adds what another sampler saw.
    pub(super) fn absorb(&mut self, other: &Sampler) {
        self.allocs.absorb(&other.allocs);
        self.frees.absorb(&other.frees);
    }

    /// Between 1 and twice the average, from a linear congruential generator: cheap, and fair enough here.
    fn next_gap(&mut self) -> u32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (self.state >> 33) as u32 % (2 * SAMPLED_ONE_IN - 1)
    }
}

impl EventSink for Sampler {}

impl Observer for Sampler {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        if !matches!(now.event.op, Op::Alloc { .. } | Op::Free { .. }) {
            return;
        }
        if self.gap == 0 {
            self.gap = self.next_gap();
            self.began = Some(Instant::now());
        }
        self.gap -= 1;
    }

    fn served(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, _: &FailedRequest) {
        if let Some(began) = self.began.take() {
            self.allocs.note(elapsed(began));
        }
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, _: Freed) {
        if let Some(began) = self.began.take() {
            self.frees.note(elapsed(began));
        }
    }

    fn after(&mut self, _: &ReplayMoment<'_>) {
        // A free whose block was never served: nothing happened that could be timed.
        self.began = None;
    }
}

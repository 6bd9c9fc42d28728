//! The least memory that a trace needs, and the best layout with full knowledge of lifetimes.
//!
//! [`MemoryBound::of`] is the peak of live bytes: no allocator needs less. [`pack`] gives every block of [`Lifetimes`] an
//! offset in one range of memory. This offline packing separates unavoidable fragmentation from the losses of a policy.
//! `inspect` shows both, and a suite writes them beside the memory that strategies reserve.
//!
//! This module knows neither strategies nor devices.
//!
//! ```
//! use oomph_trace::plan::{GRAIN, Lifetimes, PackingBudget, pack};
//! use oomph_trace::TraceBuilder;
//! use oomph_base::{MIB, StreamId, TagId};
//! let mut builder = TraceBuilder::new();
//! let small = builder.alloc(MIB, StreamId::DEFAULT, TagId(0));
//! let kept = builder.alloc(MIB, StreamId::DEFAULT, TagId(0));
//! builder.free(small);
//! builder.alloc(2 * MIB, StreamId::DEFAULT, TagId(0));
//! let lifetimes = Lifetimes::read(&builder.finish("trap"), GRAIN)?;
//! let packing = pack(&lifetimes, PackingBudget::QUICK);
//! // An allocator that does not know the future leaves a hole of 1 MiB below `kept` and needs 4 MiB.
//! assert_eq!((packing.height_bytes, packing.is_optimal()), (3 * MIB, true));
//! # let _ = kept;
//! # Ok::<(), oomph_trace::plan::PlanError>(())
//! ```

use serde::Serialize;

use crate::{Op, Source, TraceError, TracedBlock, for_each_checked_event};
use oomph_base::{packing::peak_live_bytes, round_up};

mod exact;
mod packing;

pub use oomph_base::packing::{BlockLifetime, PackingBudget, PlacementOrder};
#[cfg(any(test, feature = "testing"))]
pub use packing::PackingOverlap;
pub use packing::{Packing, PackingMethod, pack};

/// The default rounding of requests: the smallest unit of PyTorch's allocator (`kMinBlockSize`).
pub const GRAIN: u64 = 512;

/// The least memory that any allocator needs: the peak of live bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryBound {
    /// The peak of requested live bytes.
    pub requested_bytes: u64,
    /// The peak with every request rounded up to a multiple of the grain.
    pub rounded_bytes: u64,
}

impl MemoryBound {
    /// Reads a source once.
    ///
    /// ```
    /// use oomph_base::{StreamId, TagId};
    /// use oomph_trace::{TraceBuilder, plan::MemoryBound};
    /// let mut builder = TraceBuilder::new();
    /// let first = builder.alloc(100, StreamId::DEFAULT, TagId(0));
    /// builder.alloc(513, StreamId::DEFAULT, TagId(0));
    /// builder.free(first);
    /// builder.alloc(50, StreamId::DEFAULT, TagId(0));
    /// let bound = MemoryBound::of(&builder.finish("tiny"), 512)?;
    /// assert_eq!((bound.requested_bytes, bound.rounded_bytes), (613, 1536));
    /// # Ok::<(), oomph_trace::plan::PlanError>(())
    /// ```
    pub fn of(source: &dyn Source, grain: u64) -> Result<MemoryBound, PlanError> {
        let mut counter = BoundCounter::new(grain);
        for_each_checked_event(source, |event, block, _| {
            counter.count(&event.op, block);
            Ok::<(), PlanError>(())
        })?;
        Ok(counter.bound)
    }
}

/// Finds the bound event by event.
struct BoundCounter {
    grain: u64,
    requested: u64,
    rounded: u64,
    bound: MemoryBound,
}

impl BoundCounter {
    fn new(grain: u64) -> BoundCounter {
        BoundCounter { grain, requested: 0, rounded: 0, bound: MemoryBound::default() }
    }

    fn count(&mut self, op: &Op, block: Option<TracedBlock>) {
        match (*op, block) {
            (Op::Alloc { bytes, .. }, _) => {
                self.requested = self.requested.saturating_add(bytes);
                self.rounded = self.rounded.saturating_add(round_up(bytes, self.grain));
                self.bound.requested_bytes = self.bound.requested_bytes.max(self.requested);
                self.bound.rounded_bytes = self.bound.rounded_bytes.max(self.rounded);
            }
            (Op::Free { .. }, Some(block)) => {
                self.requested = self.requested.saturating_sub(block.bytes);
                self.rounded = self.rounded.saturating_sub(round_up(block.bytes, self.grain));
            }
            _ => {}
        }
    }
}

/// A hash of what an allocator is asked to do: requests, frees, streams, pools and synchronization, in order. Names, call
/// sites, marks, times and host memory do not count, so two recordings of one program have the same hash where it made
/// the same requests.
struct RequestHash(u64);

impl RequestHash {
    fn count(&mut self, op: &Op, block: Option<TracedBlock>) {
        let number = block.map_or(0, |block| block.number);
        let words = match *op {
            Op::Alloc { bytes, stream, .. } => [bytes, u64::from(stream.0), 0],
            Op::Free { stream, .. } | Op::Use { stream, .. } => [number, u64::from(stream.0), 0],
            Op::EventRecord { event, stream } | Op::EventWait { event, stream } => [event.into(), stream.0.into(), 0],
            Op::StreamSync { stream } | Op::Work { stream, .. } | Op::Collective { stream, .. } => {
                [stream.0.into(), 0, 0]
            }
            Op::DeviceSync | Op::EmptyCache => [0; 3],
            Op::UsePool { pool } => [pool.0, pool.1, 0],
            Op::ReleasePool { pool, trims } => [pool.0, pool.1, trims.into()],
            Op::Mark { .. } | Op::HostAlloc { .. } | Op::HostFree { .. } | Op::Idle { .. } => return,
        };
        for word in [op.kind() as u64].into_iter().chain(words) {
            // A multiplication carries upwards only; the rotation brings high bits down.
            self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}

/// The lifetimes of the blocks of a trace, in order of allocation.
///
/// Time is counted in sections: consecutive allocations and the frees after them. All blocks of a section are live between
/// the two, so two blocks overlap in a section exactly if they overlap in the trace, and there are at most as many sections
/// as blocks. A free takes effect at once, on any stream: a strategy that follows the plan must wait for streams where the
/// order of events is not enough.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lifetimes {
    /// The blocks, in order of allocation.
    pub blocks: Vec<BlockLifetime>,
    /// The number of sections.
    pub sections: u32,
}

impl Lifetimes {
    /// Reads a source. Sizes are rounded up to multiples of `grain`. Blocks that are never freed live to the end.
    pub fn read(source: &dyn Source, grain: u64) -> Result<Lifetimes, PlanError> {
        let mut counter = LifetimeCounter::default();
        for_each_checked_event(source, |event, _, _| match event.op {
            Op::Alloc { slot, bytes, .. } => counter.alloc(slot as usize, round_up(bytes, grain)),
            Op::Free { slot, .. } => {
                counter.free(slot as usize);
                Ok(())
            }
            _ => Ok(()),
        })?;
        Ok(counter.finish())
    }

    /// The peak of live bytes: no layout is lower.
    #[must_use]
    pub fn bound_bytes(&self) -> u64 {
        peak_live_bytes(&self.blocks)
    }
}

/// Collects lifetimes event by event.
#[derive(Default)]
struct LifetimeCounter {
    blocks: Vec<BlockLifetime>,
    /// The block in each slot of the trace.
    tenants: Vec<u32>,
    section: u32,
    frees_began: bool,
    total: u64,
}

impl LifetimeCounter {
    fn alloc(&mut self, slot: usize, bytes: u64) -> Result<(), PlanError> {
        if self.frees_began {
            self.section += 1;
            self.frees_began = false;
        }
        self.total = self.total.checked_add(bytes).filter(|&sum| sum <= i64::MAX as u64).ok_or(PlanError::TooMuch)?;
        if slot >= self.tenants.len() {
            self.tenants.resize(slot + 1, 0);
        }
        self.tenants[slot] = u32::try_from(self.blocks.len()).map_err(|_| PlanError::TooMany)?;
        self.blocks.push(BlockLifetime { begin: self.section, end: u32::MAX, bytes });
        Ok(())
    }

    fn free(&mut self, slot: usize) {
        self.frees_began = true;
        self.blocks[self.tenants[slot] as usize].end = self.section + 1;
    }

    fn finish(mut self) -> Lifetimes {
        let sections = if self.blocks.is_empty() { 0 } else { self.section + 1 };
        for block in &mut self.blocks {
            block.end = block.end.min(sections);
        }
        Lifetimes { blocks: self.blocks, sections }
    }
}

/// Lifetimes without a trace, in order of their beginnings.
#[cfg(test)]
pub(crate) fn told_by(blocks: Vec<BlockLifetime>) -> Lifetimes {
    let sections = blocks.iter().map(|block| block.end).max().unwrap_or(0);
    Lifetimes { blocks, sections }
}

/// What a source needs under any strategy: computed once, and written beside every case that runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// The least memory that any allocator needs.
    pub bound: MemoryBound,
    /// The height of the best layout, if one was computed.
    pub packed_bytes: Option<u64>,
    /// A hash of what an allocator is asked to do. Sources with the same requests have the same hash.
    pub requests_hash: u64,
}

impl MemoryNeeds {
    /// Reads a source for the bound and, with a budget, again for a layout. Requests are rounded up to [`GRAIN`].
    pub fn of(source: &dyn Source, pack_within: Option<PackingBudget>) -> Result<MemoryNeeds, PlanError> {
        let (mut bound, mut hash) = (BoundCounter::new(GRAIN), RequestHash(0));
        for_each_checked_event(source, |event, block, _| {
            bound.count(&event.op, block);
            hash.count(&event.op, block);
            Ok::<(), PlanError>(())
        })?;
        let packed_bytes = match pack_within {
            Some(budget) => Some(pack(&Lifetimes::read(source, GRAIN)?, budget).height_bytes),
            None => None,
        };
        Ok(MemoryNeeds { bound: bound.bound, packed_bytes, requests_hash: hash.0 })
    }
}

/// A trace that cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The trace is invalid or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Offsets do not fit into 64 bits.
    #[error("the requests of this trace add up to more than {} EiB: too much to be laid out", (i64::MAX >> 60) + 1)]
    TooMuch,
    /// Block numbers do not fit into 32 bits.
    #[error("more than {} blocks: too many to be laid out", u32::MAX)]
    TooMany,
}

#[cfg(test)]
mod bound_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{arbitrary::traces, check};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_bound_is_the_peak_of_the_summary(trace in traces(80)) {
            let bound = MemoryBound::of(&trace, 512).unwrap();
            prop_assert_eq!(bound.requested_bytes, check(&trace).unwrap().peak.bytes);
            prop_assert!(bound.rounded_bytes >= bound.requested_bytes || bound.requested_bytes > u64::MAX - 512);
        }
    }
}

#[cfg(test)]
mod hash_tests {
    use super::*;
    use crate::{MarkKind, TraceBuilder};
    use oomph_base::{StreamId, TagId};

    fn hash(build: impl Fn(&mut TraceBuilder)) -> u64 {
        let mut builder = TraceBuilder::new();
        build(&mut builder);
        MemoryNeeds::of(&builder.finish("hashed"), None).unwrap().requests_hash
    }

    #[test]
    fn hash_is_of_what_an_allocator_sees() {
        let pair = |is_first_freed: bool, label: &str| {
            hash(|builder| {
                let one = builder.alloc(512, StreamId::DEFAULT, TagId(0));
                let other = builder.alloc(512, StreamId::DEFAULT, TagId(0));
                builder.mark(MarkKind::Phase, label, 0);
                builder.free(if is_first_freed { one } else { other });
            })
        };
        assert_eq!(pair(true, "forward"), pair(true, "backward"), "names do not count");
        assert_ne!(pair(true, "forward"), pair(false, "forward"), "another block is freed");
        let one = |bytes: u64, is_on_side: bool| {
            hash(|builder| {
                let side = builder.new_stream().unwrap();
                builder.alloc(bytes, if is_on_side { side } else { StreamId::DEFAULT }, TagId(0));
            })
        };
        assert_ne!(one(512, false), one(513, false));
        assert_ne!(one(512, false), one(512, true));
    }
}

#[cfg(test)]
mod lifetimes_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::MemoryBound;
    use crate::{TraceBuilder, arbitrary::traces};
    use oomph_base::{StreamId, TagId};

    #[test]
    fn a_section_ends_where_allocs_follow_frees() {
        let mut builder = TraceBuilder::new();
        let mut alloc = |bytes| builder.alloc(bytes, StreamId::DEFAULT, TagId(0));
        let (first, second) = (alloc(1), alloc(513));
        builder.free(first);
        let third = builder.alloc(2, StreamId::DEFAULT, TagId(0));
        builder.free(third);
        builder.free(second);
        builder.alloc(3, StreamId::DEFAULT, TagId(0));
        let lifetimes = Lifetimes::read(&builder.finish("sections"), 512).unwrap();
        let told: Vec<_> = lifetimes.blocks.iter().map(|block| (block.begin, block.end, block.bytes)).collect();
        assert_eq!(told, [(0, 1, 512), (0, 2, 1024), (1, 2, 512), (2, 3, 512)]);
        assert_eq!((lifetimes.sections, lifetimes.bound_bytes()), (3, 1536));
    }

    #[test]
    fn more_bytes_than_addresses_are_refused() {
        let mut builder = TraceBuilder::new();
        for _ in 0..2 {
            builder.alloc(1 << 62, StreamId::DEFAULT, TagId(0));
        }
        let refusal = Lifetimes::read(&builder.finish("huge"), 512).unwrap_err().to_string();
        assert_eq!(refusal, "the requests of this trace add up to more than 8 EiB: too much to be laid out");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn sections_keep_the_bound(trace in traces(80)) {
            if let Ok(lifetimes) = Lifetimes::read(&trace, 512) {
                prop_assert_eq!(lifetimes.bound_bytes(), MemoryBound::of(&trace, 512).unwrap().rounded_bytes);
            }
        }
    }
}

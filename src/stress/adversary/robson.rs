//! Robson's adversary: the program, its parameters, and the bound that theory gives.
//!
//! Let at most `M` units be live at any time, in blocks of 1, 2, 4 ... `n` units. Robson (1971)
//! gave a program that forces every allocator that never moves a block to spread over
//!
//! ```text
//! N(M, n) = M (log2 n / 2 + 1) - n + 1   units,
//! ```
//!
//! and an allocator that needs no more (1974). With 4 GiB live in blocks of 2 to 512 MiB the bound
//! is 19.5 GiB, 4.88 times the live bytes. The program, on one line of addresses:
//!
//! 1. Allocate `M` blocks of one unit.
//! 2. For `P` = 2, 4 ... `n`: divide the line into intervals of `P` units. In each interval one
//!    address matters, the one with remainder `f` modulo `P`. For `f` there are two candidates: the
//!    previous `f`, and that plus `P / 2`. Take the candidate under which the kept blocks leave most
//!    room that cannot be used. Free every block that covers no such address, and allocate blocks of
//!    `P` units with the budget that became free.
//!
//! A kept block blocks its whole interval for blocks of `P` units, because every range of `P` units
//! contains one of those addresses. The new blocks therefore need fresh memory each time. See J. M.
//! Robson, "An estimate of the store size necessary for dynamic storage allocation", Journal of the
//! ACM 18 (1971).
//!
//! The program sees only where its blocks are placed.

use crate::{
    base::{Bytes, GIB},
    strategy::ALIGNMENT,
};

/// How much the adversary may keep live, and in blocks of which sizes.
///
/// ```
/// use oomph::stress::adversary::RobsonParameters;
/// let parameters = RobsonParameters::new(4 << 30, 512 << 20, 2 << 20)?;
/// assert_eq!((parameters.live_units(), parameters.largest_units()), (2048, 256));
/// assert_eq!(parameters.bound_bytes(), (2048 * 5 - 256 + 1) * (2 << 20));
/// # Ok::<(), oomph::stress::adversary::RobsonParametersError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RobsonParameters {
    /// The most bytes that are live at any time.
    pub live_bytes: u64,
    /// The largest block.
    pub largest_bytes: u64,
    /// The smallest block; all others are this times a power of two.
    pub unit_bytes: u64,
}

/// Parameters with which the program cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RobsonParametersError {
    /// Allocators would round such blocks up, and more than the budget would be live.
    #[error("a unit of {0} bytes is not a multiple of {ALIGNMENT}, to which allocators round")]
    UnalignedUnit(u64),
    /// Sizes are the unit, twice the unit, and so on.
    #[error("the largest block of {} is not a power of two times the unit of {}", Bytes(*largest), Bytes(*unit))]
    NotPowerOfTwo {
        /// The largest block.
        largest: u64,
        /// The unit.
        unit: u64,
    },
    /// Nothing could be freed to make room for the largest block.
    #[error("live memory of {} cannot hold two blocks of {}", Bytes(*live), Bytes(*largest))]
    TooFewLive {
        /// The budget.
        live: u64,
        /// The largest block.
        largest: u64,
    },
    /// The budget exceeds what a simulated device can address.
    #[error("live memory of {} is more than {}", Bytes(*.0), Bytes(RobsonParameters::MOST_LIVE_BYTES))]
    TooMuchLive(u64),
    /// The blocks would exceed the host's memory.
    #[error("{live_units} live units are more than {}: use a larger unit", RobsonParameters::MOST_UNITS)]
    TooManyUnits {
        /// The number of live units.
        live_units: u64,
    },
}

impl RobsonParameters {
    /// The largest budget: several times this must fit into the address range of a simulated
    /// device.
    pub const MOST_LIVE_BYTES: u64 = 1024 * GIB;
    /// The most blocks that are live at once.
    pub const MOST_UNITS: u64 = 1 << 22;

    /// Checks the parameters; the budget is rounded down to whole units.
    pub fn new(
        live_bytes: u64,
        largest_bytes: u64,
        unit_bytes: u64,
    ) -> Result<RobsonParameters, RobsonParametersError> {
        if unit_bytes == 0 || !unit_bytes.is_multiple_of(ALIGNMENT) {
            return Err(RobsonParametersError::UnalignedUnit(unit_bytes));
        }
        if !largest_bytes.is_multiple_of(unit_bytes) || !(largest_bytes / unit_bytes).is_power_of_two() {
            return Err(RobsonParametersError::NotPowerOfTwo { largest: largest_bytes, unit: unit_bytes });
        }
        if live_bytes / 2 < largest_bytes {
            return Err(RobsonParametersError::TooFewLive { live: live_bytes, largest: largest_bytes });
        }
        if live_bytes > RobsonParameters::MOST_LIVE_BYTES {
            return Err(RobsonParametersError::TooMuchLive(live_bytes));
        }
        let live_units = live_bytes / unit_bytes;
        if live_units > RobsonParameters::MOST_UNITS {
            return Err(RobsonParametersError::TooManyUnits { live_units });
        }
        Ok(RobsonParameters { live_bytes: live_units * unit_bytes, largest_bytes, unit_bytes })
    }

    /// `M`: the budget in units.
    pub fn live_units(&self) -> u64 {
        self.live_bytes / self.unit_bytes
    }

    /// `n`: the largest block in units.
    pub fn largest_units(&self) -> u64 {
        self.largest_bytes / self.unit_bytes
    }

    /// How often the smallest block can be doubled: `log2 n`.
    fn doublings(&self) -> u32 {
        self.largest_units().ilog2()
    }

    /// What the program forces every allocator to use that never moves a block, in whole units.
    pub fn bound_bytes(&self) -> u64 {
        self.bound_up_to(self.doublings())
    }

    /// The largest block size for which the bound does not exceed `bytes`. A strategy that needs
    /// only `bytes` although blocks are larger returns or remaps memory in pieces of about this
    /// size.
    pub fn fragmenting_bytes(&self, bytes: u64) -> u64 {
        let harmless = (0..=self.doublings()).rev().find(|&doublings| self.bound_up_to(doublings) <= bytes);
        self.unit_bytes << harmless.unwrap_or(0)
    }

    /// The bound for blocks that are doubled this many times.
    fn bound_up_to(&self, doublings: u32) -> u64 {
        let units = (self.live_units() * (u64::from(doublings) + 2)).div_ceil(2) - (1 << doublings) + 1;
        units * self.unit_bytes
    }
}

/// What the adversary can do with an allocator.
pub trait AdversaryHeap {
    /// A block handed out.
    type Block;
    /// Why the program cannot continue; running out of memory is not among the reasons.
    type Error;

    /// Requests a block; `None` if memory has run out.
    fn alloc(&mut self, bytes: u64) -> Result<Option<Self::Block>, Self::Error>;

    /// Where a block begins, on one line.
    fn position(&self, block: &Self::Block) -> u64;

    /// Frees a block.
    fn free(&mut self, block: Self::Block) -> Result<(), Self::Error>;
}

/// Runs the program against an allocator. Returns false if memory ran out before the end. Live
/// blocks are not freed.
pub fn attack<H: AdversaryHeap>(parameters: &RobsonParameters, heap: &mut H) -> Result<bool, H::Error> {
    let mut live = LiveSet { blocks: Vec::new(), bytes: 0 };
    if !live.fill(heap, parameters.unit_bytes, parameters.live_bytes)? {
        return Ok(false);
    }
    let mut remainder = 0;
    for doubling in 1..=parameters.doublings() {
        let size = parameters.unit_bytes << doubling;
        let shifted = remainder + size / 2;
        if live.blocked(shifted, size) > live.blocked(remainder, size) {
            remainder = shifted;
        }
        live.keep_covering(heap, remainder, size)?;
        if !live.fill(heap, size, parameters.live_bytes)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The blocks that are live.
struct LiveSet<B> {
    blocks: Vec<PositionedBlock<B>>,
    /// Their requested bytes.
    bytes: u64,
}

struct PositionedBlock<B> {
    block: B,
    position: u64,
    bytes: u64,
}

impl<B> PositionedBlock<B> {
    /// Whether the block contains an address with this remainder modulo `size`.
    fn covers(&self, remainder: u64, size: u64) -> bool {
        let next = (remainder + size - self.position % size) % size;
        next < self.bytes
    }
}

impl<B> LiveSet<B> {
    /// Allocates blocks of this size within the budget; false if the heap runs out.
    fn fill<H: AdversaryHeap<Block = B>>(&mut self, heap: &mut H, size: u64, budget: u64) -> Result<bool, H::Error> {
        while self.bytes + size <= budget {
            let Some(block) = heap.alloc(size)? else { return Ok(false) };
            self.blocks.push(PositionedBlock { position: heap.position(&block), block, bytes: size });
            self.bytes += size;
        }
        Ok(true)
    }

    /// The room that the blocks over these addresses block for others of this size, beyond their
    /// own bytes.
    fn blocked(&self, remainder: u64, size: u64) -> u64 {
        self.blocks.iter().filter(|held| held.covers(remainder, size)).map(|held| size - held.bytes).sum()
    }

    /// Frees every block that covers no such address, the oldest first.
    fn keep_covering<H: AdversaryHeap<Block = B>>(
        &mut self,
        heap: &mut H,
        remainder: u64,
        size: u64,
    ) -> Result<(), H::Error> {
        let mut kept = Vec::with_capacity(self.blocks.len());
        for held in self.blocks.drain(..) {
            if held.covers(remainder, size) {
                kept.push(held);
            } else {
                self.bytes -= held.bytes;
                heap.free(held.block)?;
            }
        }
        self.blocks = kept;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::base::MIB;

    fn four_gib() -> RobsonParameters {
        RobsonParameters::new(4 * GIB, 512 * MIB, 2 * MIB).unwrap()
    }

    /// A textbook allocator on an endless line. `fit` chooses among the holes between its blocks.
    struct Textbook {
        fit: Fit,
        /// Start and end of each hole, in order.
        holes: Vec<(u64, u64)>,
        /// Everything behind this is free.
        end: u64,
        extent: u64,
        live: u64,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fit {
        First,
        Best,
        Worst,
        /// The first place that is a multiple of the size, as buddies are.
        Aligned,
    }

    impl Textbook {
        fn new(fit: Fit) -> Textbook {
            Textbook { fit, holes: Vec::new(), end: 0, extent: 0, live: 0 }
        }

        /// Where in a hole a block would begin.
        fn start_in(&self, hole: (u64, u64), size: u64) -> Option<u64> {
            let start = if self.fit == Fit::Aligned { hole.0.next_multiple_of(size) } else { hole.0 };
            (start + size <= hole.1).then_some(start)
        }

        /// The hole that serves, and where in it the block begins.
        fn choose(&self, size: u64) -> Option<(usize, u64)> {
            let mut fitting = self.holes.iter().enumerate();
            let mut fitting =
                std::iter::from_fn(|| fitting.by_ref().find_map(|(at, &hole)| Some((at, self.start_in(hole, size)?))));
            let width = |&(at, _): &(usize, u64)| self.holes[at].1 - self.holes[at].0;
            match self.fit {
                Fit::First | Fit::Aligned => fitting.next(),
                Fit::Best => fitting.min_by_key(width),
                Fit::Worst => fitting.max_by_key(width),
            }
        }

        fn add_hole(&mut self, start: u64, end: u64) {
            let at = self.holes.partition_point(|hole| hole.0 < start);
            let joins_next = self.holes.get(at).is_some_and(|next| next.0 == end);
            let end = if joins_next { self.holes.remove(at).1 } else { end };
            match at.checked_sub(1).map(|before| &mut self.holes[before]) {
                Some(before) if before.1 == start => before.1 = end,
                _ => self.holes.insert(at, (start, end)),
            }
            if self.holes.last().is_some_and(|last| last.1 == self.end) {
                self.end = self.holes.pop().unwrap().0;
            }
        }
    }

    impl AdversaryHeap for Textbook {
        type Block = (u64, u64);
        type Error = Infallible;

        fn alloc(&mut self, bytes: u64) -> Result<Option<(u64, u64)>, Infallible> {
            let start = match self.choose(bytes) {
                Some((at, start)) => {
                    let (hole_start, hole_end) = self.holes.remove(at);
                    let rest = [(hole_start, start), (start + bytes, hole_end)];
                    self.holes.splice(at..at, rest.into_iter().filter(|hole| hole.0 < hole.1));
                    start
                }
                None => {
                    let start = if self.fit == Fit::Aligned { self.end.next_multiple_of(bytes) } else { self.end };
                    if start > self.end {
                        self.holes.push((self.end, start));
                    }
                    self.end = start + bytes;
                    start
                }
            };
            self.live += bytes;
            self.extent = self.extent.max(start + bytes);
            Ok(Some((start, bytes)))
        }

        fn position(&self, block: &(u64, u64)) -> u64 {
            block.0
        }

        fn free(&mut self, (start, bytes): (u64, u64)) -> Result<(), Infallible> {
            self.live -= bytes;
            self.add_hole(start, start + bytes);
            Ok(())
        }
    }

    fn units_needed(fit: Fit, live: u64, largest: u64) -> u64 {
        let parameters = RobsonParameters::new(live * 512, largest * 512, 512).unwrap();
        let mut heap = Textbook::new(fit);
        assert_eq!(attack(&parameters, &mut heap), Ok(true));
        assert!(heap.live <= parameters.live_bytes && heap.extent.is_multiple_of(512));
        heap.extent / 512
    }

    /// The figures of the theorem, to the unit: the choice of the hole makes no difference.
    #[test]
    fn first_best_and_worst_fit_need_exactly_the_bound() {
        for (live, largest, units) in [(1024, 16, 3057), (4096, 64, 16321), (4096, 256, 20225)] {
            for fit in [Fit::First, Fit::Best, Fit::Worst] {
                assert_eq!(units_needed(fit, live, largest), units, "{fit:?} of {live} and {largest}");
            }
        }
        assert_eq!(units_needed(Fit::First, 8192, 512), 44545);
    }

    #[test]
    fn aligned_blocks_need_a_whole_multiple() {
        for (live, largest, times) in [(1024, 16, 3), (4096, 64, 4), (4096, 256, 5)] {
            assert_eq!(units_needed(Fit::Aligned, live, largest), times * live, "{live} and {largest}");
        }
    }

    #[test]
    fn one_size_does_not_fragment() {
        assert_eq!(units_needed(Fit::First, 1000, 1), 1000);
    }

    #[test]
    fn running_out_of_memory_ends_the_attack() {
        struct Small(u64);
        impl AdversaryHeap for Small {
            type Block = u64;
            type Error = Infallible;
            fn alloc(&mut self, bytes: u64) -> Result<Option<u64>, Infallible> {
                self.0 += bytes;
                Ok((self.0 <= 100 * 512).then_some(self.0))
            }
            fn position(&self, block: &u64) -> u64 {
                *block
            }
            fn free(&mut self, _: u64) -> Result<(), Infallible> {
                Ok(())
            }
        }
        let parameters = RobsonParameters::new(64 * 512, 16 * 512, 512).unwrap();
        assert_eq!(attack(&parameters, &mut Small(0)), Ok(false));
    }

    #[test]
    fn the_bound_is_the_published_one() {
        let bound = |live: u64, largest: u64| {
            RobsonParameters::new(live * 512, largest * 512, 512).unwrap().bound_bytes() / 512
        };
        // Knuth, The Art of Computer Programming, 2.5, exercises 36 to 38: floor((3M - 1) / 2) for
        // blocks of 1 and 2.
        assert_eq!([bound(16, 2), bound(17, 2), bound(4, 2)], [23, 25, 5]);
        assert_eq!([bound(1024, 16), bound(4096, 64), bound(4096, 256)], [3057, 16321, 20225]);
        assert_eq!(bound(8192, 512), 44545);
        assert_eq!(bound(100, 1), 100, "a hole fits every block of the same size");
    }

    #[test]
    fn fragmenting_size_follows_from_need() {
        let parameters = four_gib();
        assert_eq!(parameters.fragmenting_bytes(parameters.live_bytes), 2 * MIB);
        assert_eq!(parameters.fragmenting_bytes(3 * parameters.live_bytes), 32 * MIB);
        assert_eq!(parameters.fragmenting_bytes(parameters.bound_bytes()), 512 * MIB);
        assert_eq!(parameters.fragmenting_bytes(0), 2 * MIB);
    }

    #[test]
    fn impossible_parameters_are_refused() {
        assert_eq!(RobsonParameters::new(4096, 1024, 100), Err(RobsonParametersError::UnalignedUnit(100)));
        assert_eq!(RobsonParameters::new(4096, 1024, 0), Err(RobsonParametersError::UnalignedUnit(0)));
        assert_eq!(
            RobsonParameters::new(8192, 1536, 512),
            Err(RobsonParametersError::NotPowerOfTwo { largest: 1536, unit: 512 })
        );
        assert_eq!(
            RobsonParameters::new(8192, 0, 512),
            Err(RobsonParametersError::NotPowerOfTwo { largest: 0, unit: 512 })
        );
        assert_eq!(
            RobsonParameters::new(1536, 1024, 512),
            Err(RobsonParametersError::TooFewLive { live: 1536, largest: 1024 })
        );
        assert_eq!(
            RobsonParameters::new(4 * GIB, MIB, 512),
            Err(RobsonParametersError::TooManyUnits { live_units: 1 << 23 })
        );
        assert_eq!(
            RobsonParameters::new(u64::MAX, 1 << 62, 1 << 62),
            Err(RobsonParametersError::TooMuchLive(u64::MAX))
        );
        assert_eq!(RobsonParameters::new(4097, 1024, 512).unwrap().live_bytes, 4096);
    }
}

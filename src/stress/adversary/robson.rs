//! Robson's adversary: small blocks are freed so that each hole is just too small for the next size.
//!
//! The program, for `M` units alive and blocks of up to `n` units, both on one line of addresses:
//!
//! 1. Allocate `M` blocks of one unit.
//! 2. For `P` = 2, 4 ... `n`: cut the line into stretches of `P` units. In each stretch one address matters, the one that
//!    leaves the remainder `f` by `P`; for `f` there are two candidates, the `f` before and that plus `P / 2`. Take the
//!    one under whose addresses the kept blocks leave most room that nobody can use. Free every block that lies over no
//!    such address, and allocate blocks of `P` units with what has become free of the budget.
//!
//! A kept block blocks its whole stretch for blocks of `P` units, since no stretch of `P` units avoids all those addresses.
//! So the new ones need fresh memory, every time. See J. M. Robson, "An estimate of the store size necessary for dynamic
//! storage allocation", Journal of the ACM 18 (1971).
//!
//! The adversary asks for blocks, and sees nothing but where they are put.

use super::Contest;

/// What an adversary can do with an allocator.
pub trait Heap {
    /// A block handed out.
    type Block;
    /// Why it cannot go on; running out of memory is not among the reasons.
    type Error;

    /// Asks for a block; `None` where memory has run out.
    fn take(&mut self, bytes: u64) -> Result<Option<Self::Block>, Self::Error>;

    /// Where a block begins, on one line.
    fn place(&self, block: &Self::Block) -> u64;

    /// Gives a block back.
    fn give_back(&mut self, block: Self::Block) -> Result<(), Self::Error>;
}

/// Plays the program against an allocator, to the end or until it runs out of memory. Says which; all blocks that are
/// alive then stay so.
pub fn attack<H: Heap>(contest: &Contest, heap: &mut H) -> Result<bool, H::Error> {
    let mut holding = Holding { blocks: Vec::new(), bytes: 0 };
    if !holding.fill(heap, contest.unit_bytes, contest.live_bytes)? {
        return Ok(false);
    }
    let mut remainder = 0;
    for doubling in 1..=contest.doublings() {
        let size = contest.unit_bytes << doubling;
        let shifted = remainder + size / 2;
        if holding.blocked(shifted, size) > holding.blocked(remainder, size) {
            remainder = shifted;
        }
        holding.keep_over(heap, remainder, size)?;
        if !holding.fill(heap, size, contest.live_bytes)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The blocks that are alive.
struct Holding<B> {
    blocks: Vec<Held<B>>,
    /// What was asked for in all.
    bytes: u64,
}

struct Held<B> {
    block: B,
    place: u64,
    bytes: u64,
}

impl<B> Held<B> {
    /// Whether an address that leaves this remainder by `size` lies in the block.
    fn lies_over(&self, remainder: u64, size: u64) -> bool {
        let next = (remainder + size - self.place % size) % size;
        next < self.bytes
    }
}

impl<B> Holding<B> {
    /// Allocates blocks of this size as long as the budget lasts; false where the heap does not.
    fn fill<H: Heap<Block = B>>(&mut self, heap: &mut H, size: u64, budget: u64) -> Result<bool, H::Error> {
        while self.bytes + size <= budget {
            let Some(block) = heap.take(size)? else { return Ok(false) };
            self.blocks.push(Held { place: heap.place(&block), block, bytes: size });
            self.bytes += size;
        }
        Ok(true)
    }

    /// What the blocks over these addresses keep others of this size from, beside what they fill themselves.
    fn blocked(&self, remainder: u64, size: u64) -> u64 {
        self.blocks.iter().filter(|held| held.lies_over(remainder, size)).map(|held| size - held.bytes).sum()
    }

    /// Frees every block that lies over no such address, the oldest first.
    fn keep_over<H: Heap<Block = B>>(&mut self, heap: &mut H, remainder: u64, size: u64) -> Result<(), H::Error> {
        let mut kept = Vec::with_capacity(self.blocks.len());
        for held in self.blocks.drain(..) {
            if held.lies_over(remainder, size) {
                kept.push(held);
            } else {
                self.bytes -= held.bytes;
                heap.give_back(held.block)?;
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

    /// A textbook allocator on an endless line: which of the holes between its blocks serves?
    struct Textbook {
        fit: Fit,
        /// Start and end of each hole, in order.
        holes: Vec<(u64, u64)>,
        /// Behind this there is nothing but free memory.
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

        fn free(&mut self, start: u64, end: u64) {
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

    impl Heap for Textbook {
        type Block = (u64, u64);
        type Error = Infallible;

        fn take(&mut self, bytes: u64) -> Result<Option<(u64, u64)>, Infallible> {
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

        fn place(&self, block: &(u64, u64)) -> u64 {
            block.0
        }

        fn give_back(&mut self, (start, bytes): (u64, u64)) -> Result<(), Infallible> {
            self.live -= bytes;
            self.free(start, start + bytes);
            Ok(())
        }
    }

    fn units_needed(fit: Fit, live: u64, largest: u64) -> u64 {
        let contest = Contest::new(live * 512, largest * 512, 512).unwrap();
        let mut heap = Textbook::new(fit);
        assert_eq!(attack(&contest, &mut heap), Ok(true));
        assert!(heap.live <= contest.live_bytes && heap.extent.is_multiple_of(512));
        heap.extent / 512
    }

    /// The figures of the theorem, to the unit: no way to choose a hole is better than another.
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
    fn blocks_of_one_size_cannot_be_made_to_fragment() {
        assert_eq!(units_needed(Fit::First, 1000, 1), 1000);
    }

    /// Whatever else an allocator does wrong, the adversary stays within its budget.
    #[test]
    fn an_allocator_that_runs_out_ends_the_attack() {
        struct Small(u64);
        impl Heap for Small {
            type Block = u64;
            type Error = Infallible;
            fn take(&mut self, bytes: u64) -> Result<Option<u64>, Infallible> {
                self.0 += bytes;
                Ok((self.0 <= 100 * 512).then_some(self.0))
            }
            fn place(&self, block: &u64) -> u64 {
                *block
            }
            fn give_back(&mut self, _: u64) -> Result<(), Infallible> {
                Ok(())
            }
        }
        let contest = Contest::new(64 * 512, 16 * 512, 512).unwrap();
        assert_eq!(attack(&contest, &mut Small(0)), Ok(false));
    }
}

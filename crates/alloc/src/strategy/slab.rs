//! `slab`: slabs of equal blocks, one class a size, the classes binned like floating-point numbers.
//!
//! A class is a number of three binary digits after the leading one and an exponent: 8, 9 ... 15 sixteenths of a power of
//! two, as in Aaltonen's OffsetAllocator. So a block is at most an eighth larger than what was asked for, at any size.
//! Small classes share slabs: a slab is cut into blocks of one class as they are wanted, and a freed block waits for a
//! request of its class. Nothing is searched, cut twice or joined, so that a pair takes a few instructions; the price is
//! that a slab belongs to its class until all of it is free and memory runs out. A class of which fewer than eight would
//! fit into a slab has blocks that are regions of their own.
//!
//! Each stream has slabs of its own.

use super::{
    Built, Outcome, Parameter, Setup, SpecError, Stats, StrategyEntry, parameters,
    pooled::{ABSURD, Ground, Growth, NONE, Need, Policy, Pooled, Region},
};
use crate::device::{Device, DeviceError};
use oomph_base::{MIB, StreamId};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "slab",
    summary: "slabs of equal blocks in float-binned size classes: nothing searched, nothing joined",
    origin: "Bonwick: The slab allocator (1994), with the classes of Aaltonen's OffsetAllocator (2023)",
    parameters: &[Parameter {
        name: SLAB,
        values: "an amount of memory from 2 KiB on",
        default: "2MiB",
        help: "how large a slab is; blocks of up to an eighth of it share slabs",
    }],
    variants: &["slab:16MiB"],
    build,
};

const SLAB: &str = "slab";

/// Sizes are multiples of this.
const QUANTUM_BITS: u32 = 8;
/// Classes between two powers of two.
const STEPS: u64 = 1 << STEP_BITS;
const STEP_BITS: u32 = 3;
/// All classes below [`ABSURD`], and one for what is rounded up to it.
const CLASSES: usize = class_of(ABSURD) as usize + 1;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut slab = 2 * MIB;
    parameters::read(&ENTRY, parameters, |setting| {
        slab = setting.bytes()?;
        Ok(())
    })?;
    if !(STEPS << QUANTUM_BITS..ABSURD).contains(&slab) {
        let reason = format!("'{SLAB}': {slab} bytes hold no eight blocks");
        return Err(SpecError::BadParameters { strategy: ENTRY.name, reason });
    }
    Ok(Box::new(Pooled::new(Slabs { slab, homes: Vec::new() })))
}

/// Free blocks by class, one set a stream.
#[derive(Clone, Debug)]
struct Slabs {
    slab: u64,
    homes: Vec<Home>,
}

/// The free blocks of one stream.
#[derive(Clone, Debug)]
struct Home {
    /// The first free block of each class.
    heads: [u32; CLASSES],
    /// What is not yet cut of each class's newest slab.
    uncut: [u32; CLASSES],
}

/// The class of a size: the smallest whose blocks are as large. Up to eight quanta each is a class.
#[inline]
const fn class_of(bytes: u64) -> u32 {
    let last = (bytes - 1) >> QUANTUM_BITS;
    if last < STEPS {
        return last as u32;
    }
    let exponent = last.ilog2() - STEP_BITS;
    (exponent << STEP_BITS) + (last >> exponent) as u32
}

/// How large the blocks of a class are.
#[inline]
const fn size_of_class(class: u32) -> u64 {
    let above = class as u64 + 1;
    if above <= STEPS {
        return above << QUANTUM_BITS;
    }
    let exponent = (class >> STEP_BITS) - 1;
    (STEPS + (class as u64 & (STEPS - 1)) + 1) << (exponent + QUANTUM_BITS)
}

impl Home {
    fn new() -> Home {
        Home { heads: [NONE; CLASSES], uncut: [NONE; CLASSES] }
    }

    /// Adds a free block to its class. The link to the one before is not reset when the first leaves, so that taking a
    /// block touches no other.
    #[inline]
    fn insert(&mut self, ground: &mut Ground, slot: u32) {
        let class = ground[slot].note as usize;
        let head = std::mem::replace(&mut self.heads[class], slot);
        ground[slot].links[1] = head;
        if head != NONE {
            ground[head].links[0] = slot;
        }
    }

    /// Removes a free block or uncut rest.
    fn remove(&mut self, ground: &mut Ground, slot: u32) {
        let piece = &ground[slot];
        let (class, [before, after]) = (piece.note as usize, piece.links);
        if self.uncut[class] == slot {
            self.uncut[class] = NONE;
        } else if self.heads[class] == slot {
            self.heads[class] = after;
        } else if piece.size == size_of_class(piece.note) {
            ground[before].links[1] = after;
            if after != NONE {
                ground[after].links[0] = before;
            }
        }
    }

    /// Cuts a block from what is left of the class's newest slab.
    fn cut(&mut self, ground: &mut Ground, class: usize) -> Option<(u32, Outcome)> {
        let slot = std::mem::replace(&mut self.uncut[class], NONE);
        if slot == NONE {
            return None;
        }
        let size = size_of_class(class as u32);
        if ground[slot].size == size {
            return Some((slot, Outcome::Hit));
        }
        let rest = ground.cut(slot, size);
        // Less than a block stays where it is until the slab goes back.
        if ground[rest].size >= size {
            self.uncut[class] = rest;
        }
        Some((slot, Outcome::Split))
    }
}

impl Policy for Slabs {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < ABSURD).then(|| size_of_class(class_of(bytes)))
    }

    #[inline]
    fn take(
        &mut self,
        ground: &mut Ground,
        _: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        let Some(home) = self.homes.get_mut(need.stream.index()) else { return Ok(None) };
        let class = class_of(need.size) as usize;
        let slot = home.heads[class];
        if slot == NONE {
            return Ok(home.cut(ground, class));
        }
        home.heads[class] = ground[slot].links[1];
        Ok(Some((slot, Outcome::Hit)))
    }

    #[inline]
    fn keep(&mut self, ground: &mut Ground, slot: u32) {
        let owner = ground.region(ground[slot].region).stream.index();
        self.homes[owner].insert(ground, slot);
    }

    fn welcome(&mut self, ground: &mut Ground, slot: u32, need: &Need) {
        if self.homes.len() <= need.stream.index() {
            self.homes.resize_with(need.stream.index() + 1, Home::new);
        }
        let class = class_of(need.size);
        ground[slot].note = class;
        self.homes[need.stream.index()].uncut[class as usize] = slot;
    }

    fn forget(&mut self, ground: &mut Ground, slot: u32) {
        let owner = ground.region(ground[slot].region).stream.index();
        self.homes[owner].remove(ground, slot);
    }

    fn growth(&mut self, need: &Need, _: &Stats, attempt: u32) -> Growth {
        let shared = need.size <= self.slab / STEPS;
        match attempt {
            0 if shared => Growth::Ask(self.slab),
            0 => Growth::Ask(need.size),
            1 if shared => Growth::Ask(need.size),
            _ => Growth::End,
        }
    }

    fn largest_free(&self, _: &Ground, stream: StreamId) -> u64 {
        let Some(home) = self.homes.get(stream.index()) else { return 0 };
        let free = |&class: &usize| home.heads[class] != NONE || home.uncut[class] != NONE;
        (0..CLASSES).rev().find(free).map_or(0, |class| size_of_class(class as u32))
    }

    fn pool_name(&self, region: &Region) -> &'static str {
        if region.bytes == self.slab { "slab" } else { "single" }
    }

    fn renewed(&self) -> Slabs {
        Slabs { slab: self.slab, homes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::strategy::{StrategySpec, pooled::Trial};
    use oomph_base::{GIB, KIB};

    #[test]
    fn classes_follow_each_other_without_a_gap() {
        for class in 1..CLASSES as u32 {
            let (below, size) = (size_of_class(class - 1), size_of_class(class));
            assert_eq!((class_of(below + 1), class_of(size)), (class, class));
        }
        assert_eq!([0, 7, 8, 15, 16].map(size_of_class), [256, 2048, 2304, 4096, 4608]);
    }

    proptest! {
        #[test]
        fn a_block_is_at_most_an_eighth_or_a_quantum_too_large(bytes in 1..ABSURD) {
            let size = size_of_class(class_of(bytes));
            prop_assert!(size >= bytes && size - bytes < (bytes / 8).max(256), "{bytes} in {size}");
        }
    }

    #[test]
    fn a_slab_is_cut_as_blocks_are_wanted_and_the_last_freed_goes_first() {
        let mut trial = Trial::new("slab", GIB);
        let blocks = [0, 1, 2].map(|_| trial.alloc(5 * KIB));
        assert_eq!(blocks.map(Trial::place), [0, 1, 2].map(|n| (n * 5 * KIB, 5 * KIB)));
        trial.free(blocks[2]);
        trial.free(blocks[0]);
        let again = [0, 1, 2].map(|_| trial.alloc(5 * KIB - 511));
        assert_eq!(again.map(|block| Trial::place(block).0), [0, 10 * KIB, 15 * KIB]);
        assert_eq!(trial.regions(), [2 * MIB as i64]);
    }

    #[test]
    fn no_class_serves_another_and_large_ones_have_regions_of_their_own() {
        let mut trial = Trial::new("slab", GIB);
        let block = trial.alloc(MIB);
        trial.free(block);
        trial.alloc(256 * KIB);
        trial.alloc(256 * KIB + 1);
        assert_eq!(trial.regions(), [MIB, 2 * MIB, 288 * KIB].map(|bytes| bytes as i64));
    }

    #[test]
    fn a_slab_that_is_wholly_free_goes_back_when_memory_runs_out_even_with_a_rest() {
        let mut trial = Trial::new("slab", 4 * MIB);
        let blocks: Vec<_> = (0..9).map(|_| trial.alloc(240 * KIB)).collect();
        trial.regions();
        // Eight fill a slab but for 128 KiB; the ninth has begun the second.
        blocks.into_iter().for_each(|block| trial.free(block));
        trial.alloc(3 * MIB);
        assert_eq!(trial.regions(), [-2, -2, 3].map(|mib| mib * MIB as i64));
        trial.alloc(240 * KIB);
        assert_eq!(trial.regions(), [240 * KIB as i64]);
    }

    #[test]
    fn a_slab_too_small_for_eight_blocks_is_refused() {
        assert!(StrategySpec::from("slab:slab:1KiB").check().is_err());
    }
}

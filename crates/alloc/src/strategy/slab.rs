//! `slab`: slabs of equal blocks, with size classes like floating-point numbers.
//!
//! A class is a mantissa of three bits and an exponent: 8, 9 ... 15 sixteenths of a power of two,
//! as in Aaltonen's OffsetAllocator. A block is therefore at most an eighth larger than the
//! request, at any size. A slab is cut into blocks of one class when they are requested, and a
//! freed block waits for a request of its class. Nothing is searched, cut twice or joined, so that
//! an alloc and a free take a few instructions. The price is that a slab belongs to its class until
//! all of it is free and memory runs out. Blocks of which fewer than eight fit into a slab are
//! regions of their own.
//!
//! Each stream has its own slabs.

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{
        DeviceRegion, FreeLists, MemoryPiece, NONE, PerStream, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy,
        REQUEST_LIMIT, RegionTable, SizeClasses, TakenPiece,
    },
};
use crate::device::Device;
use oomph_base::StreamId;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "slab",
    summary: "slabs of equal blocks in float-binned size classes: nothing searched, nothing joined",
    origin: "Bonwick: The slab allocator (1994), with the classes of Aaltonen's OffsetAllocator (2023)",
    differs: &[
        "a block never holds its own header: all bookkeeping is on the host",
        "slabs of a class that are wholly free go back when memory runs out",
    ],
    parameters: &[Parameter::text(
        "slab",
        "an amount of memory from 2 KiB on",
        "2MiB",
        "how large a slab is; blocks of up to an eighth of it share slabs",
    )],
    variants: &["slab:16MiB"],
    build,
};

/// Sizes are multiples of this.
const QUANTUM_BITS: u32 = 8;
/// Classes between two powers of two.
const STEPS: u64 = 1 << STEP_BITS;
const STEP_BITS: u32 = 3;

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let slab = parameters::read_amount(&ENTRY, parameters)?;
    if !(STEPS << QUANTUM_BITS..REQUEST_LIMIT).contains(&slab) {
        let reason = format!("'slab': {slab} bytes are too few for eight blocks");
        return Err(ENTRY.refused(reason));
    }
    Ok(Box::new(PoolStrategy::new(ENTRY.name, SlabPolicy { slab, free: PerStream::default() })))
}

/// Free blocks by class, one set per stream.
#[derive(Clone, Debug)]
struct SlabPolicy {
    slab: u64,
    free: PerStream<FreeBlocks>,
}

/// The free blocks of one stream.
#[derive(Clone, Debug)]
struct FreeBlocks {
    lists: FreeLists<SlabClasses>,
    /// What is not yet cut of each class's newest slab, or [`NONE`].
    uncut: [u32; SlabClasses::COUNT],
}

impl Default for FreeBlocks {
    fn default() -> Self {
        FreeBlocks { lists: FreeLists::default(), uncut: [NONE; SlabClasses::COUNT] }
    }
}

#[derive(Clone, Debug)]
struct SlabClasses;

impl SizeClasses for SlabClasses {
    /// All classes below [`REQUEST_LIMIT`], and one for what is rounded up to it.
    const COUNT: usize = class_of(REQUEST_LIMIT) as usize + 1;

    #[inline]
    fn class_of(size: u64) -> usize {
        class_of(size) as usize
    }
}

/// The lowest class whose blocks are large enough. Up to eight quanta, each multiple is a class.
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

impl FreeBlocks {
    /// Removes a free block or an uncut rest.
    fn remove(&mut self, table: &mut RegionTable, slot: u32) {
        let MemoryPiece { note: class, size, .. } = table[slot];
        if self.uncut[class as usize] == slot {
            self.uncut[class as usize] = NONE;
        } else if size == size_of_class(class) {
            self.lists.remove(table, slot);
        }
    }

    /// Cuts a block from the rest of the class's newest slab.
    fn cut(&mut self, table: &mut RegionTable, class: usize) -> Option<(u32, Outcome)> {
        let slot = std::mem::replace(&mut self.uncut[class], NONE);
        if slot == NONE {
            return None;
        }
        let size = size_of_class(class as u32);
        if table[slot].size == size {
            return Some((slot, Outcome::Hit));
        }
        let rest = table.cut(slot, size);
        // A rest smaller than a block stays unused until the slab goes back.
        if table[rest].size >= size {
            self.uncut[class] = rest;
        }
        Some((slot, Outcome::Split))
    }
}

impl PoolPolicy for SlabPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < REQUEST_LIMIT).then(|| size_of_class(class_of(bytes)))
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, _: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let free = self.free.of(request.stream);
        let class = class_of(request.size) as usize;
        let Some(slot) = free.lists.head(class) else { return Ok(free.cut(table, class)) };
        free.lists.remove(table, slot);
        Ok(Some((slot, Outcome::Hit)))
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        self.free.of(table.owner(slot)).lists.insert(table, slot);
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, request: &PoolRequest) {
        let class = class_of(request.size);
        table[slot].note = class;
        self.free.of(request.stream).uncut[class as usize] = slot;
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        self.free.of(table.owner(slot)).remove(table, slot);
    }

    fn growth(&mut self, request: &PoolRequest, _: &Stats, attempt: u32) -> PoolGrowth {
        let shared = request.size <= self.slab / STEPS;
        match attempt {
            0 if shared => PoolGrowth::Ask(self.slab),
            0 => PoolGrowth::Ask(request.size),
            1 if shared => PoolGrowth::Ask(request.size),
            _ => PoolGrowth::End,
        }
    }

    fn largest_free(&self, _: &RegionTable, stream: StreamId) -> u64 {
        let Some(free) = self.free.get(stream) else { return 0 };
        let serves = |&class: &usize| free.lists.head(class).is_some() || free.uncut[class] != NONE;
        (0..SlabClasses::COUNT).rev().find(serves).map_or(0, |class| size_of_class(class as u32))
    }

    fn pool_name(&self, region: &DeviceRegion) -> Option<&'static str> {
        Some(if region.bytes == self.slab { "slab" } else { "single" })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::strategy::{StrategySpec, pooled::PoolBench};
    use oomph_base::{GIB, KIB, MIB};

    #[test]
    fn classes_follow_each_other_without_a_gap() {
        for class in 1..SlabClasses::COUNT as u32 {
            let (below, size) = (size_of_class(class - 1), size_of_class(class));
            assert_eq!((class_of(below + 1), class_of(size)), (class, class));
        }
        assert_eq!([0, 7, 8, 15, 16].map(size_of_class), [256, 2048, 2304, 4096, 4608]);
    }

    proptest! {
        #[test]
        fn a_block_is_at_most_an_eighth_or_a_quantum_too_large(bytes in 1..REQUEST_LIMIT) {
            let size = size_of_class(class_of(bytes));
            prop_assert!(size >= bytes && size - bytes < (bytes / 8).max(256), "{bytes} in {size}");
        }
    }

    #[test]
    fn slab_is_cut_on_demand_and_reused_lifo() {
        let mut trial = PoolBench::new("slab", GIB);
        let blocks = [0, 1, 2].map(|_| trial.alloc(5 * KIB));
        assert_eq!(blocks.map(PoolBench::place), [0, 1, 2].map(|n| (n * 5 * KIB, 5 * KIB)));
        trial.free(blocks[2]);
        trial.free(blocks[0]);
        let again = [0, 1, 2].map(|_| trial.alloc(5 * KIB - 511));
        assert_eq!(again.map(|block| PoolBench::place(block).0), [0, 10 * KIB, 15 * KIB]);
        assert_eq!(trial.regions(), [2 * MIB as i64]);
    }

    #[test]
    fn classes_are_separate_and_large_have_regions() {
        let mut trial = PoolBench::new("slab", GIB);
        let block = trial.alloc(MIB);
        trial.free(block);
        trial.alloc(256 * KIB);
        trial.alloc(256 * KIB + 1);
        assert_eq!(trial.regions(), [MIB, 2 * MIB, 288 * KIB].map(|bytes| bytes as i64));
    }

    #[test]
    fn free_slab_is_released_on_oom() {
        let mut trial = PoolBench::new("slab", 4 * MIB);
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

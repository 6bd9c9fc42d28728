//! `binning`: RMM's binning resource over its pool: blocks of fixed sizes for small requests, a
//! pool for the rest.
//!
//! A request takes a block of the smallest bin that is large enough, or else memory of the pool.
//! Bins take memory from the pool, many blocks at a time, and keep it. RMM fills every bin when the
//! resource is created (992 MiB with the bins of its benchmarks). Here a bin is filled at its first
//! request, so that unused bins take nothing.

use super::{
    EMPTY_CACHE_PARAMETER, FIRST_REQUEST, LAZY_EVENTS_PARAMETER, QUANTUM, RECORD_STREAM,
    fixed::{BLOCKS, BLOCKS_PARAMETER, DEFAULT_BLOCKS, EMPTY_QUEUES, EqualBlocks, chunk_bytes},
    multiple_of_quantum,
    pool::{INITIAL_PARAMETER, MAXIMUM_PARAMETER, RmmPool, RmmPoolSettings},
};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Caller, Outcome, Parameter, Refusal, Setup, Stats, StrategyEntry, parameters,
    pooled::{PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, RegionTable, TakenPiece},
};
use oomph_base::{KIB, MIB, StreamId};

/// The registry's line.
pub(crate) const ENTRY: StrategyEntry = StrategyEntry {
    name: "binning",
    summary: "RMM's bins: fixed sizes for small requests, a pool for the rest",
    origin: "RMM 26.10, binning_memory_resource over pool_memory_resource",
    differs: &[
        FIRST_REQUEST,
        RECORD_STREAM,
        EMPTY_QUEUES,
        "fills a bin at its first request; RMM fills every bin when the resource is created",
        "records an event before another stream takes memory that a bin got from the pool, for which RMM does not wait",
    ],
    parameters: &[
        Parameter::text(
            "smallest_bin",
            "a power of two, 256 or more",
            "256KiB",
            "the size of the first bin; there is one for every power of two up to the last",
        ),
        Parameter::text("largest_bin", "a power of two", "4MiB", "the size of the last bin"),
        BLOCKS_PARAMETER,
        INITIAL_PARAMETER,
        MAXIMUM_PARAMETER,
        EMPTY_CACHE_PARAMETER,
        LAZY_EVENTS_PARAMETER,
    ],
    variants: &["smallest_bin:256,largest_bin:1MiB,blocks:8", "empty_cache:True,lazy_events:True"],
    build,
};

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let (mut smallest, mut largest, mut blocks) = (256 * KIB, 4 * MIB, DEFAULT_BLOCKS);
    let mut pool = RmmPoolSettings::default();
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "smallest_bin" => smallest = multiple_of_quantum(&setting)?,
            "largest_bin" => largest = multiple_of_quantum(&setting)?,
            BLOCKS => blocks = setting.number()?,
            _ => pool.apply(&setting)?,
        }
        Ok(())
    })?;
    let refused = |reason| ENTRY.refused(reason);
    pool.check().map_err(refused)?;
    let powers = smallest.is_power_of_two() && largest.is_power_of_two();
    if !powers || smallest < QUANTUM || smallest > largest {
        let reason =
            format!("'smallest_bin' {smallest} and 'largest_bin' {largest} are not powers of two in ascending order");
        return Err(refused(reason));
    }
    chunk_bytes(largest, blocks).map_err(refused)?;
    let sizes = (smallest.ilog2()..=largest.ilog2()).map(|power| 1 << power);
    let bins = sizes.map(|size| EqualBlocks::new(size, pool.lazy_events)).collect();
    let policy = BinningPolicy { bins, blocks, pool: RmmPool::new(pool) };
    Ok(Box::new(PoolStrategy::new(ENTRY.name, policy)))
}

/// Bins over a pool.
#[derive(Clone, Debug)]
struct BinningPolicy {
    /// From the smallest to the largest. A block notes the number of its bin, counted from one.
    bins: Vec<EqualBlocks>,
    /// How many blocks a bin takes at a time.
    blocks: u64,
    pool: RmmPool,
}

impl BinningPolicy {
    /// The bin for a block size of [`block_size`](PoolPolicy::block_size); `None` for the pool.
    #[inline]
    fn bin_of(&self, size: u64) -> Option<usize> {
        let (smallest, largest) = (self.bins.first()?.size, self.bins.last()?.size);
        (size <= largest).then(|| (size.ilog2() - smallest.ilog2()) as usize)
    }

    /// What a request takes from the pool: a chunk for its bin, or the block itself.
    fn of_pool(&self, request: &PoolRequest) -> PoolRequest {
        let size = if self.bin_of(request.size).is_some() { request.size * self.blocks } else { request.size };
        PoolRequest { size, ..*request }
    }
}

impl PoolPolicy for BinningPolicy {
    const GOES_TO_FREEING_STREAM: bool = true;

    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        match self.bins.iter().find(|bin| bytes <= bin.size) {
            Some(bin) => Some(bin.size),
            None => self.pool.block_size(bytes),
        }
    }

    fn begin(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pool.begin(device)
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let Some(number) = self.bin_of(request.size) else { return self.pool.take(table, device, request) };
        if let Some(slot) = self.bins[number].take(device, request.stream)? {
            return Ok(Some((slot, Outcome::Hit)));
        }
        let chunk = self.of_pool(request);
        let Some((slot, _)) = self.pool.take(table, device, &chunk)? else { return Ok(None) };
        let bin = &mut self.bins[number];
        bin.cut_into_blocks(table, slot, request.stream, number as u32 + 1, false);
        Ok(bin.take(device, request.stream)?.map(|slot| (slot, Outcome::Split)))
    }

    #[inline]
    fn before_free(
        &mut self,
        table: &RegionTable,
        device: &mut dyn Device,
        slot: u32,
        caller: Caller,
    ) -> Result<(), DeviceError> {
        match table[slot].note {
            0 => self.pool.before_free(table, device, slot, caller),
            number => self.bins[number as usize - 1].record_free(device, caller.stream),
        }
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        match table[slot].note {
            0 => self.pool.keep(table, slot),
            number => self.bins[number as usize - 1].keep(table, slot),
        }
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, request: &PoolRequest) {
        self.pool.add_region(table, slot, request);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        match table[slot].note {
            0 => self.pool.forget(table, slot),
            number => self.bins[number as usize - 1].forget(table, slot),
        }
    }

    fn trims(&self) -> bool {
        self.pool.trims()
    }

    fn releases_regions(&self, request: &PoolRequest, stats: &Stats, idle: u64) -> bool {
        self.pool.releases_regions(&self.of_pool(request), stats, idle)
    }

    fn has_released_enough(&self, request: &PoolRequest, stats: &Stats, refused_by: Refusal) -> bool {
        self.pool.has_released_enough(&self.of_pool(request), stats, refused_by)
    }

    fn growth(&mut self, request: &PoolRequest, stats: &Stats, attempt: u32) -> PoolGrowth {
        self.pool.growth(&self.of_pool(request), stats, attempt)
    }

    fn largest_free(&self, table: &RegionTable, stream: StreamId) -> u64 {
        let in_pool = self.pool.largest_free(table, stream);
        if self.bins.last().is_some_and(|largest| in_pool > largest.size) {
            return in_pool;
        }
        let served = |bin: &&EqualBlocks| !bin.is_empty() || in_pool >= bin.size * self.blocks;
        self.bins.iter().rev().find(served).map_or(0, |bin| bin.size)
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.pool.details()
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.bins.iter_mut().try_for_each(|bin| bin.close(device))?;
        self.pool.close(device)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::bench::RmmBench, *};

    #[test]
    fn request_goes_to_smallest_bin_or_pool() {
        let mut binning = RmmBench::new("binning:smallest_bin:1KiB,largest_bin:4KiB,blocks:2", MIB);
        // A chunk for each bin, and the pool's rule of growth over all of them.
        assert_eq!(binning.alloc(1, 0), 0);
        assert_eq!(binning.alloc(1025, 0), 2 * KIB);
        assert_eq!(binning.alloc(4 * KIB, 0), 6 * KIB);
        assert_eq!(binning.growth(), [2048, 4096, 8192]);
        assert_eq!(binning.alloc(KIB, 0), KIB);
        assert_eq!(binning.alloc(4 * KIB + 1, 0), 14 * KIB);
        assert_eq!(binning.growth(), [2048, 4096, 8192, 14336]);
        let usage = binning.strategy.stats().current;
        assert_eq!(usage.allocated, (1 + 2 + 4 + 1) * KIB + 4352);
        // The third block of the first bin: a chunk from what the pool has left.
        assert_eq!(binning.ask(600, 0), Ok((14 * KIB + 4352, Outcome::Split)));
    }

    #[test]
    fn a_bin_keeps_its_blocks_and_the_pool_its_own() {
        let mut binning = RmmBench::new("binning:smallest_bin:1KiB,largest_bin:1KiB,blocks:2,initial:8KiB", MIB);
        let blocks = [KIB, KIB, 2 * KIB, 4 * KIB].map(|bytes| binning.alloc(bytes, 0));
        assert_eq!(blocks, [0, KIB, 2 * KIB, 4 * KIB]);
        for block in blocks {
            binning.free(block, 0);
        }
        assert_eq!(binning.free_blocks(), [(0, KIB), (KIB, KIB), (2 * KIB, 6 * KIB)]);
        assert_eq!(binning.strategy.largest_free(StreamId(0)), Some(6 * KIB));
        assert_eq!(binning.alloc(8 * KIB, 0), 8 * KIB);
    }
}

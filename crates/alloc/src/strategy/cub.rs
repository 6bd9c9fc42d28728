//! `cub`: CUB's `CachingDeviceAllocator`, the small cache of CUDA's C++ libraries.
//!
//! Requests are rounded up to the next power of `bin_growth`, and freed blocks are kept by that
//! power. Nothing is cut or joined, and every block is one device allocation. A request above the
//! largest bin is allocated exactly and never cached; neither is a block that would raise the cache
//! above `max_cached_bytes`. When the device refuses, all cached blocks go back, and the request is
//! tried once more.
//!
//! An event is recorded on the stream of a block that is cached. A bin is searched from its oldest
//! block on. The first block serves that was used on the requesting stream or whose event is done.
//!
//! The original creates an event with each block and destroys it with the block; here events are
//! reused.

use std::collections::VecDeque;

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{DeviceRegion, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT, RegionTable, TakenPiece},
};
use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "cub",
    summary: "CUB's caching allocator: powers of 8, reuse by stream or event, no cutting",
    origin: "cub::CachingDeviceAllocator (CUDA Core Compute Libraries; cuML, CMSSW and others)",
    differs: &["reuses events; the original creates one with each block"],
    parameters: &[
        Parameter::text("bin_growth", "a number from 2 to 1024", "8", "bins are powers of this number of bytes"),
        Parameter::text("min_bin", "a power", "3", "the smallest bin, 512 B"),
        Parameter::text("max_bin", "a power", "7", "the largest bin, 2 MiB; larger blocks are never cached"),
        Parameter::text(
            "max_cached_bytes",
            "an amount of memory",
            "three blocks of the largest bin, less one byte",
            "the most that the cache may hold",
        ),
    ],
    variants: &["bin_growth:2,min_bin:9,max_bin:26,max_cached_bytes:64GiB", "max_cached_bytes:0"],
    build,
};

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let (mut growth, mut min_bin, mut max_bin, mut max_cached) = (8u64, 3u32, 7u32, None);
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "bin_growth" => {
                growth = setting.number()?;
                if !(2..=1024).contains(&growth) {
                    return Err(setting.refused("is not between 2 and 1024"));
                }
            }
            "min_bin" => min_bin = setting.number()?,
            "max_bin" => max_bin = setting.number()?,
            _ => max_cached = Some(setting.bytes()?),
        }
        Ok(())
    })?;
    let sizes = (min_bin..=max_bin).map(|power| growth.checked_pow(power).filter(|&size| size < REQUEST_LIMIT));
    let bins = sizes.map(|size| Some(CubBin { size: size?, blocks: VecDeque::new() }));
    let Some(bins) = bins.collect::<Option<Vec<CubBin>>>().filter(|bins| !bins.is_empty()) else {
        let reason = format!("no bins between {growth}^{min_bin} and {growth}^{max_bin} bytes");
        return Err(ENTRY.refused(reason));
    };
    let max_cached = max_cached.unwrap_or(3 * bins[bins.len() - 1].size - 1);
    let policy = CubPolicy { bins, max_cached, cached: 0, idle_events: Vec::new(), fresh: None };
    Ok(Box::new(PoolStrategy::new(ENTRY.name, policy)))
}

/// Cached blocks by bin.
#[derive(Clone, Debug)]
struct CubPolicy {
    bins: Vec<CubBin>,
    max_cached: u64,
    cached: u64,
    /// Events that belong to no cached block.
    idle_events: Vec<EventId>,
    /// The new region, for the request that it was taken for.
    fresh: Option<u32>,
}

/// Cached blocks of one size, in the order in which they came.
#[derive(Clone, Debug)]
struct CubBin {
    size: u64,
    blocks: VecDeque<u32>,
}

impl CubPolicy {
    /// The smallest bin that holds `bytes`, if one does.
    #[inline]
    fn bin_of(&self, bytes: u64) -> Option<usize> {
        self.bins.iter().position(|bin| bytes <= bin.size)
    }

    /// The bin of blocks of exactly this size.
    #[inline]
    fn exact_bin(&self, size: u64) -> Option<usize> {
        self.bin_of(size).filter(|&bin| self.bins[bin].size == size)
    }

    /// Removes a block from the cache.
    fn uncache(&mut self, table: &RegionTable, bin: usize, place: usize) -> Option<u32> {
        let slot = self.bins[bin].blocks.remove(place)?;
        self.idle_events.push(EventId(table[slot].note));
        self.cached -= self.bins[bin].size;
        Some(slot)
    }
}

impl PoolPolicy for CubPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < REQUEST_LIMIT).then(|| self.bin_of(bytes).map_or(bytes, |bin| self.bins[bin].size))
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        if let Some(slot) = self.fresh.take() {
            return Ok(Some((slot, Outcome::NewSegment)));
        }
        let Some(bin) = self.exact_bin(request.size) else { return Ok(None) };
        for place in 0..self.bins[bin].blocks.len() {
            let piece = &table[self.bins[bin].blocks[place]];
            if piece.stream == request.stream || device.event_query(EventId(piece.note))? {
                return Ok(self.uncache(table, bin, place).map(|slot| (slot, Outcome::Hit)));
            }
        }
        Ok(None)
    }

    #[inline]
    fn returns_to_device(
        &mut self,
        table: &mut RegionTable,
        device: &mut dyn Device,
        slot: u32,
    ) -> Result<bool, DeviceError> {
        let (size, stream) = (table[slot].size, table[slot].stream);
        if self.exact_bin(size).is_none() || self.cached + size > self.max_cached {
            return Ok(true);
        }
        if self.idle_events.is_empty() {
            self.idle_events.push(device.event_create()?);
        }
        let event = self.idle_events[self.idle_events.len() - 1];
        device.event_record(event, stream)?;
        self.idle_events.pop();
        table[slot].note = event.0;
        Ok(false)
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        let size = table[slot].size;
        let Some(bin) = self.exact_bin(size) else { return };
        self.bins[bin].blocks.push_back(slot);
        self.cached += size;
    }

    fn add_region(&mut self, _: &mut RegionTable, slot: u32, _: &PoolRequest) {
        self.fresh = Some(slot);
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        let Some(bin) = self.exact_bin(table[slot].size) else { return };
        if let Some(place) = self.bins[bin].blocks.iter().position(|&cached| cached == slot) {
            self.uncache(table, bin, place);
        }
    }

    fn growth(&mut self, request: &PoolRequest, _: &Stats, attempt: u32) -> PoolGrowth {
        if attempt == 0 { PoolGrowth::Ask(request.size) } else { PoolGrowth::End }
    }

    /// Blocks of other streams are not counted: whether they can be had depends on their events.
    fn largest_free(&self, table: &RegionTable, stream: StreamId) -> u64 {
        let serves = |bin: &&CubBin| bin.blocks.iter().any(|&slot| table[slot].stream == stream);
        self.bins.iter().rev().find(serves).map_or(0, |bin| bin.size)
    }

    fn pool_name(&self, region: &DeviceRegion) -> Option<&'static str> {
        Some(if self.exact_bin(region.bytes).is_some() { "binned" } else { "exact" })
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("cached_bytes", self.cached)]
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&event) = self.idle_events.last() {
            device.event_destroy(event)?;
            self.idle_events.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::{StrategySpec, pooled::PoolBench};
    use oomph_base::{GIB, KIB, MIB};

    const MIB_SIGNED: i64 = MIB as i64;

    #[test]
    fn requests_round_to_powers_of_eight() {
        let mut trial = PoolBench::new("cub", GIB);
        let sizes = [1, 512, 513, 4 * KIB, 32 * KIB + 1, 2 * MIB, 2 * MIB + 1].map(|bytes| trial.alloc(bytes).size);
        assert_eq!(sizes, [512, 512, 4 * KIB, 4 * KIB, 256 * KIB, 2 * MIB, 2 * MIB + 1]);
    }

    #[test]
    fn a_freed_block_serves_its_own_bin_only() {
        let mut trial = PoolBench::new("cub", GIB);
        let block = trial.alloc(200 * KIB);
        trial.free(block);
        assert_ne!(trial.alloc(32 * KIB).address, block.address);
        let (again, outcome) = trial.ask(40 * KIB, 0).unwrap();
        assert_eq!((again.address, outcome), (block.address, Outcome::Hit));
    }

    #[test]
    fn the_cache_holds_three_of_the_largest_bin_less_a_byte() {
        let mut trial = PoolBench::new("cub", GIB);
        let blocks = [2 * MIB, 2 * MIB, 2 * MIB, 256 * KIB, 5 * MIB].map(|bytes| trial.alloc(bytes));
        trial.regions();
        blocks.into_iter().for_each(|block| trial.free(block));
        // The third would make it 6 MiB, one byte too many; the fifth is in no bin.
        assert_eq!(trial.regions(), [-2 * MIB_SIGNED, -5 * MIB_SIGNED]);
        assert_eq!(trial.strategy.details(), [("cached_bytes", 4 * MIB + 256 * KIB)]);
    }

    #[test]
    fn a_block_of_another_stream_serves_once_its_event_is_done() {
        let mut trial = PoolBench::new("cub", GIB);
        let block = trial.ask(4 * KIB, 1).unwrap().0;
        trial.free(block);
        trial.device.set_busy(StreamId(1), true);
        let other = trial.ask(4 * KIB, 0).unwrap();
        assert_eq!((other.1, other.0.address == block.address), (Outcome::NewSegment, false));
        trial.device.set_busy(StreamId(1), false);
        assert_eq!(trial.ask(4 * KIB, 0).unwrap().0.address, block.address);
    }

    #[test]
    fn a_bin_is_searched_from_the_block_that_lies_longest() {
        let mut trial = PoolBench::new("cub", GIB);
        let [foreign, first, second] = [1, 0, 0].map(|stream| trial.ask(4 * KIB, stream).unwrap().0);
        [foreign, first, second].into_iter().for_each(|block| trial.free(block));
        trial.device.set_busy(StreamId(1), true);
        assert_eq!(trial.ask(4 * KIB, 0).unwrap().0.address, first.address);
        assert_eq!(trial.calls(CallKind::EventQuery), 1);
        // One's own stream is not preferred: what lies longer and is ready goes first.
        trial.device.set_busy(StreamId(1), false);
        assert_eq!(trial.ask(4 * KIB, 0).unwrap().0.address, foreign.address);
        assert_eq!(trial.ask(4 * KIB, 0).unwrap().0.address, second.address);
    }

    #[test]
    fn refusal_frees_the_cache_and_retries_once() {
        let mut trial = PoolBench::new("cub", 8 * MIB);
        let blocks = [2 * MIB, 2 * MIB, 256 * KIB].map(|bytes| trial.alloc(bytes));
        blocks.into_iter().for_each(|block| trial.free(block));
        trial.regions();
        let (_, outcome) = trial.ask(7 * MIB, 0).unwrap();
        assert_eq!(outcome, Outcome::ReleaseAndRetry);
        let sizes = [-2 * MIB_SIGNED, -2 * MIB_SIGNED, -MIB_SIGNED / 4, 7 * MIB_SIGNED];
        assert_eq!(trial.regions(), sizes);
        assert!(trial.ask(2 * MIB, 0).is_err());
    }

    #[test]
    fn bins_that_cannot_be_are_refused() {
        for parameters in ["bin_growth:1", "min_bin:8", "max_bin:40", "bin_growth:eight"] {
            let spec = StrategySpec::from(format!("cub:{parameters}").as_str());
            assert!(spec.check().is_err(), "{spec}");
        }
    }
}

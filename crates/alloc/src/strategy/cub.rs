//! `cub`: CUB's `CachingDeviceAllocator`, the small cache of CUDA's C++ libraries.
//!
//! Requests are rounded up to the next power of `bin_growth`, and freed blocks are kept by that power: nothing is cut,
//! nothing joined, and every block is an allocation of the device's. What is larger than the largest bin is allocated
//! exactly and never kept, nor is what would raise the cache above `max_cached_bytes`. When the device refuses, all that
//! is cached goes back, and the request is tried once more.
//!
//! A block that is put aside has an event recorded on its stream. Its bin is searched from the block that lies there
//! longest, and the first one serves that was used on the asking stream or whose event is done.
//!
//! The original makes an event with each block and destroys it with the block; here events are used again.

use super::{
    Built, Outcome, Parameter, Setup, SpecError, Stats, StrategyEntry, parameters,
    pooled::{ABSURD, Destination, Ground, Growth, NONE, Need, Policy, Pooled, Region},
};
use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "cub",
    summary: "CUB's caching allocator: powers of 8, reuse by stream or event, no cutting",
    origin: "cub::CachingDeviceAllocator (CUDA Core Compute Libraries; cuML, CMSSW and others)",
    parameters: &[
        Parameter {
            name: BIN_GROWTH,
            values: "a number from 2 to 1024",
            default: "8",
            help: "bins are powers of this number of bytes",
        },
        Parameter { name: MIN_BIN, values: "a power", default: "3", help: "the smallest bin, 512 B" },
        Parameter {
            name: MAX_BIN,
            values: "a power",
            default: "7",
            help: "the largest bin, 2 MiB; what is larger is never kept",
        },
        Parameter {
            name: MAX_CACHED_BYTES,
            values: "an amount of memory",
            default: "three of the largest bin, less a byte",
            help: "what the cache may hold",
        },
    ],
    variants: &["bin_growth:2,min_bin:9,max_bin:26,max_cached_bytes:64GiB", "max_cached_bytes:0"],
    build,
};

const BIN_GROWTH: &str = "bin_growth";
const MIN_BIN: &str = "min_bin";
const MAX_BIN: &str = "max_bin";
const MAX_CACHED_BYTES: &str = "max_cached_bytes";

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let (mut growth, mut min_bin, mut max_bin, mut max_cached) = (8u64, 3u32, 7u32, None);
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            BIN_GROWTH => {
                growth = setting.number()?;
                if !(2..=1024).contains(&growth) {
                    return Err(setting.refused("is not between 2 and 1024"));
                }
            }
            MIN_BIN => min_bin = setting.number()?,
            MAX_BIN => max_bin = setting.number()?,
            _ => max_cached = Some(setting.bytes()?),
        }
        Ok(())
    })?;
    let sizes = (min_bin..=max_bin).map(|power| growth.checked_pow(power).filter(|&size| size < ABSURD));
    let sizes: Option<Vec<u64>> = sizes.collect();
    let Some((sizes, &largest)) = sizes.as_ref().and_then(|sizes| Some((sizes, sizes.last()?))) else {
        let reason = format!("no bins between {growth}^{min_bin} and {growth}^{max_bin} bytes");
        return Err(SpecError::BadParameters { strategy: ENTRY.name, reason });
    };
    let max_cached = max_cached.unwrap_or(3 * largest - 1);
    Ok(Box::new(Pooled::new(Bins::new(sizes, max_cached))))
}

/// Cached blocks by bin.
#[derive(Clone, Debug)]
struct Bins {
    bins: Vec<Bin>,
    max_cached: u64,
    cached: u64,
    /// Events that no cached block has.
    idle_events: Vec<EventId>,
    /// What the device has just given, for the request at hand.
    fresh: Option<u32>,
}

/// Cached blocks of one size, in the order in which they came.
#[derive(Clone, Copy, Debug)]
struct Bin {
    size: u64,
    first: u32,
    last: u32,
}

impl Bins {
    fn new(sizes: &[u64], max_cached: u64) -> Bins {
        let bins = sizes.iter().map(|&size| Bin { size, first: NONE, last: NONE }).collect();
        Bins { bins, max_cached, cached: 0, idle_events: Vec::new(), fresh: None }
    }

    /// The smallest bin that holds `bytes`, if one does.
    #[inline]
    fn bin_of(&self, bytes: u64) -> Option<usize> {
        self.bins.iter().position(|bin| bytes <= bin.size)
    }

    /// The bin of blocks of exactly this size.
    #[inline]
    fn home_of(&self, size: u64) -> Option<usize> {
        self.bin_of(size).filter(|&bin| self.bins[bin].size == size)
    }

    fn unlink(&mut self, ground: &mut Ground, slot: u32) {
        let piece = &ground[slot];
        let (size, [before, after], event) = (piece.size, piece.links, EventId(piece.note));
        let Some(bin) = self.home_of(size) else { return };
        match before {
            NONE => self.bins[bin].first = after,
            before => ground[before].links[1] = after,
        }
        match after {
            NONE => self.bins[bin].last = before,
            after => ground[after].links[0] = before,
        }
        self.idle_events.push(event);
        self.cached -= size;
    }
}

impl Policy for Bins {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < ABSURD).then(|| self.bin_of(bytes).map_or(bytes, |bin| self.bins[bin].size))
    }

    #[inline]
    fn take(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError> {
        if let Some(slot) = self.fresh.take() {
            return Ok(Some((slot, Outcome::NewSegment)));
        }
        let Some(bin) = self.home_of(need.size) else { return Ok(None) };
        let mut slot = self.bins[bin].first;
        while slot != NONE {
            let piece = &ground[slot];
            if piece.stream == need.stream || device.event_query(EventId(piece.note))? {
                self.unlink(ground, slot);
                return Ok(Some((slot, Outcome::Hit)));
            }
            slot = piece.links[1];
        }
        Ok(None)
    }

    #[inline]
    fn destination(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        slot: u32,
    ) -> Result<Destination, DeviceError> {
        let (size, stream) = (ground[slot].size, ground[slot].stream);
        if self.home_of(size).is_none() || self.cached + size > self.max_cached {
            return Ok(Destination::Device);
        }
        let event = match self.idle_events.last() {
            Some(&event) => event,
            None => {
                let event = device.event_create()?;
                self.idle_events.push(event);
                event
            }
        };
        device.event_record(event, stream)?;
        self.idle_events.pop();
        ground[slot].note = event.0;
        Ok(Destination::Pool)
    }

    #[inline]
    fn keep(&mut self, ground: &mut Ground, slot: u32) {
        let size = ground[slot].size;
        let Some(bin) = self.home_of(size) else { return };
        let last = std::mem::replace(&mut self.bins[bin].last, slot);
        ground[slot].links = [last, NONE];
        match last {
            NONE => self.bins[bin].first = slot,
            last => ground[last].links[1] = slot,
        }
        self.cached += size;
    }

    fn welcome(&mut self, _: &mut Ground, slot: u32, _: &Need) {
        self.fresh = Some(slot);
    }

    fn forget(&mut self, ground: &mut Ground, slot: u32) {
        self.unlink(ground, slot);
    }

    fn growth(&mut self, need: &Need, _: &Stats, attempt: u32) -> Growth {
        if attempt == 0 { Growth::Ask(need.size) } else { Growth::End }
    }

    /// What other streams have used may be had or not: nothing is promised of it.
    fn largest_free(&self, ground: &Ground, stream: StreamId) -> u64 {
        let next = |&slot: &u32| Some(ground[slot].links[1]).filter(|&slot| slot != NONE);
        let serves = |bin: &&Bin| {
            let first = Some(bin.first).filter(|&slot| slot != NONE);
            std::iter::successors(first, next).any(|slot| ground[slot].stream == stream)
        };
        self.bins.iter().rev().find(serves).map_or(0, |bin| bin.size)
    }

    fn pool_name(&self, region: &Region) -> &'static str {
        if self.home_of(region.bytes).is_some() { "binned" } else { "exact" }
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

    fn renewed(&self) -> Bins {
        let sizes: Vec<u64> = self.bins.iter().map(|bin| bin.size).collect();
        Bins::new(&sizes, self.max_cached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::{StrategySpec, pooled::Trial};
    use oomph_base::{GIB, KIB, MIB};

    const MIB_SIGNED: i64 = MIB as i64;

    #[test]
    fn requests_are_rounded_to_powers_of_eight_and_left_alone_above_them() {
        let mut trial = Trial::new("cub", GIB);
        let sizes = [1, 512, 513, 4 * KIB, 32 * KIB + 1, 2 * MIB, 2 * MIB + 1].map(|bytes| trial.alloc(bytes).size);
        assert_eq!(sizes, [512, 512, 4 * KIB, 4 * KIB, 256 * KIB, 2 * MIB, 2 * MIB + 1]);
    }

    #[test]
    fn a_freed_block_serves_its_own_bin_only() {
        let mut trial = Trial::new("cub", GIB);
        let block = trial.alloc(200 * KIB);
        trial.free(block);
        assert_ne!(trial.alloc(32 * KIB).address, block.address);
        let (again, outcome) = trial.ask(40 * KIB, 0).unwrap();
        assert_eq!((again.address, outcome), (block.address, Outcome::Hit));
    }

    #[test]
    fn the_cache_holds_three_of_the_largest_bin_less_a_byte() {
        let mut trial = Trial::new("cub", GIB);
        let blocks = [2 * MIB, 2 * MIB, 2 * MIB, 256 * KIB, 5 * MIB].map(|bytes| trial.alloc(bytes));
        trial.regions();
        blocks.into_iter().for_each(|block| trial.free(block));
        // The third would make it 6 MiB, one byte too many; the fifth is in no bin.
        assert_eq!(trial.regions(), [-2 * MIB_SIGNED, -5 * MIB_SIGNED]);
        assert_eq!(trial.strategy.details(), [("cached_bytes", 4 * MIB + 256 * KIB)]);
    }

    #[test]
    fn a_block_of_another_stream_serves_once_its_event_is_done() {
        let mut trial = Trial::new("cub", GIB);
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
        let mut trial = Trial::new("cub", GIB);
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
    fn a_refusal_frees_all_that_is_cached_and_is_tried_once_more() {
        let mut trial = Trial::new("cub", 8 * MIB);
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

//! `bfc`: "best fit with coalescing" of TensorFlow and XLA, a simplified form of Doug Lea's malloc.
//!
//! Free chunks are in the order (size, address), which the original divides into 21 bins by power
//! of two. A request takes the first chunk that is large enough: the best fit. A chunk of at least
//! twice the request, or with more than the tolerated waste, is cut; any other is handed out whole.
//! Freed chunks are joined with free neighbours at once. Regions start at 2 MiB and double. When
//! the device refuses, nine tenths are asked for, until that is less than the request. Then wholly
//! free regions go back to the device (garbage collection), if together with the rest of the limit
//! they could hold the request, and the region is asked for again.
//!
//! The original serves one compute stream; the framework synchronizes others. So there is one pool
//! for all streams here, and a stream that takes memory of another one waits for that stream's
//! work.
//!
//! Left out: timestamped frees (`used_on` does that), sleeping until another thread frees, and
//! joining regions that happen to be neighbours, which needs a device that maps pages. The original
//! has no `empty_cache`; the parameter of that name adds it.

use std::collections::BTreeSet;

use super::{
    Built, Outcome, Parameter, Setup, Stats, StrategyEntry, parameters,
    pooled::{
        PieceTable, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT, RegionTable, StreamHandover,
        TakenPiece,
    },
};
use crate::device::{Device, DeviceError};
use oomph_base::{MIB, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "bfc",
    summary: "TensorFlow's and XLA's best fit with coalescing: 21 bins, regions that double, garbage collection",
    origin: "tsl/framework/bfc_allocator.cc (TensorFlow, JAX, ONNX Runtime), revision of 2026",
    differs: &[
        "serves all streams from one pool, and a stream that takes memory of another waits for its work; the original serves one compute stream",
        "has no timestamped frees: a block that other streams use is held back until they are done",
        "does not sleep until another thread frees, and does not join neighbouring regions",
        "without memory_limit it may take the whole device; TensorFlow leaves 225 MiB to 1,536 MiB to the system, JAX takes 75 %",
    ],
    parameters: &[
        Parameter::text(
            "memory_limit",
            "an amount of memory",
            "the limit, or else all of the device",
            "the most that all regions together may hold",
        ),
        Parameter::text(
            "allow_growth",
            "True, False",
            "False",
            "regions begin at 2 MiB and double; otherwise the first one is as large as the limit (TensorFlow, JAX)",
        ),
        Parameter::text(
            "garbage_collection",
            "True, False",
            "True",
            "give wholly free regions back when the device refuses (TF_ENABLE_GPU_GARBAGE_COLLECTION)",
        ),
        Parameter::text(
            "fragmentation_fraction",
            "a number from 0 to 1",
            "0, which means 128 MiB",
            "the share of the limit at which waste inside a chunk is cut off",
        ),
        Parameter::text(
            "empty_cache",
            "True, False",
            "False",
            "not in the original: give wholly free regions back at an empty_cache, and forget their doublings",
        ),
    ],
    variants: &["allow_growth:True", "allow_growth:True,fragmentation_fraction:0.0001,empty_cache:True"],
    build,
};

/// Sizes are multiples of this.
const QUANTUM: u64 = 256;
/// The first region where growth is allowed.
const FIRST_REGION: u64 = 2 * MIB;
/// Waste inside a chunk that is cut off, unless `fragmentation_fraction` is set.
const INTOLERABLE_WASTE: u64 = 128 * MIB;
/// The factor after each refusal. `f32` as in the original, so that the sizes are equal.
const BACK_OFF: f32 = 0.9;

/// The parameters.
#[derive(Clone, Copy, Debug)]
struct BfcSettings {
    memory_limit: u64,
    allow_growth: bool,
    garbage_collection: bool,
    empty_cache: bool,
    /// Waste of this size and above is cut off.
    intolerable_waste: u64,
}

impl BfcSettings {
    fn first_region(&self) -> u64 {
        let first = if self.allow_growth { FIRST_REGION.min(self.memory_limit) } else { self.memory_limit };
        round_up(first, QUANTUM).max(QUANTUM)
    }
}

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let mut settings = BfcSettings {
        memory_limit: setup.limit.unwrap_or(setup.props.total_bytes),
        allow_growth: false,
        garbage_collection: true,
        empty_cache: false,
        intolerable_waste: INTOLERABLE_WASTE,
    };
    let mut fraction = 0.0;
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "memory_limit" => settings.memory_limit = setting.bytes()?,
            "allow_growth" => settings.allow_growth = setting.truth()?,
            "garbage_collection" => settings.garbage_collection = setting.truth()?,
            "empty_cache" => settings.empty_cache = setting.truth()?,
            _ => {
                fraction = setting.number::<f64>()?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(setting.refused("is not between 0 and 1"));
                }
            }
        }
        Ok(())
    })?;
    if fraction > 0.0 {
        settings.intolerable_waste = (fraction * settings.memory_limit as f64) as u64;
    }
    Ok(Box::new(PoolStrategy::new(ENTRY.name, BfcPolicy::new(settings))))
}

/// A free piece as the set orders it.
#[inline]
fn key(pieces: &PieceTable, slot: u32) -> (u64, u64, u32) {
    (pieces[slot].size, pieces[slot].address, slot)
}

/// Free chunks of all streams.
#[derive(Clone, Debug)]
struct BfcPolicy {
    settings: BfcSettings,
    /// By size, address and slot.
    free: BTreeSet<(u64, u64, u32)>,
    handover: StreamHandover,
    /// The size of the next region.
    next_region: u64,
    /// Whether it was raised for the present request.
    raised: bool,
}

impl BfcPolicy {
    fn new(settings: BfcSettings) -> BfcPolicy {
        BfcPolicy {
            settings,
            free: BTreeSet::new(),
            handover: StreamHandover::default(),
            next_region: settings.first_region(),
            raised: false,
        }
    }

    /// What the limit leaves, in whole quanta.
    fn available(&self, stats: &Stats) -> u64 {
        let left = self.settings.memory_limit.saturating_sub(stats.current.reserved);
        left / QUANTUM * QUANTUM
    }
}

impl PoolPolicy for BfcPolicy {
    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        (bytes < REQUEST_LIMIT).then(|| round_up(bytes, QUANTUM))
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        let Some(&found) = self.free.range((request.size, 0, 0)..).next() else { return Ok(None) };
        let (size, _, slot) = found;
        self.handover.make_safe(device, table[slot].note, request.stream)?;
        self.free.remove(&found);
        if size < 2 * request.size && size - request.size < self.settings.intolerable_waste {
            return Ok(Some((slot, Outcome::Hit)));
        }
        let rest = table.cut(slot, request.size);
        self.free.insert(key(table, rest));
        Ok(Some((slot, Outcome::Split)))
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        self.handover.note_user(table, slot);
        let mut users = table[slot].note;
        let joined = table.join_free(
            slot,
            |_| true,
            |pieces, gone| {
                users |= pieces[gone].note;
                self.free.remove(&key(pieces, gone));
            },
        );
        table[joined].note = users;
        self.free.insert(key(table, joined));
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, _: &PoolRequest) {
        if !self.raised {
            self.next_region = self.next_region.saturating_mul(2);
        }
        table[slot].note = 0;
        self.free.insert(key(table, slot));
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        self.free.remove(&key(table, slot));
    }

    fn growth(&mut self, request: &PoolRequest, stats: &Stats, attempt: u32) -> PoolGrowth {
        let available = self.available(stats);
        if request.size > available {
            return PoolGrowth::BeyondLimit;
        }
        if attempt == 0 {
            self.raised = request.size > self.next_region;
            while request.size > self.next_region {
                self.next_region *= 2;
            }
        }
        let mut bytes = self.next_region.min(available);
        for _ in 0..attempt {
            let less = round_up((bytes as f32 * BACK_OFF) as u64, QUANTUM);
            // Where rounding up undoes the step, the original would never end.
            if less < request.size || less >= bytes {
                return PoolGrowth::End;
            }
            bytes = less;
        }
        PoolGrowth::Ask(bytes)
    }

    fn trims(&self) -> bool {
        self.settings.empty_cache
    }

    /// As if there had never been more regions than now. Otherwise every trim would double the next region.
    fn trimmed(&mut self, stats: &Stats) {
        let doublings = u32::try_from(stats.segments).unwrap_or(u32::MAX);
        let grown = self.settings.first_region().saturating_mul(2u64.saturating_pow(doublings));
        self.next_region = self.next_region.min(grown);
    }

    fn releases_regions(&self, request: &PoolRequest, stats: &Stats, idle: u64) -> bool {
        self.settings.garbage_collection && request.size <= self.available(stats) + idle
    }

    fn largest_free(&self, _: &RegionTable, _: StreamId) -> u64 {
        self.free.last().map_or(0, |&(size, ..)| size)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.handover.event.destroy(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::{Refusal, pooled::PoolBench};
    use oomph_base::{GIB, KIB};

    const MIB_SIGNED: i64 = MIB as i64;

    fn mib(sizes: &[i64]) -> Vec<i64> {
        sizes.iter().map(|size| size * MIB_SIGNED).collect()
    }

    #[test]
    fn regions_begin_at_two_mebibytes_and_double() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", GIB);
        for bytes in [MIB, 2 * MIB, 4 * MIB, 8 * MIB] {
            trial.alloc(bytes + 1);
        }
        // 1 MiB + 256 B of 2 MiB leave too little for 2 MiB + 256 B, and so on.
        assert_eq!(trial.regions(), mib(&[2, 4, 8, 16]));
    }

    #[test]
    fn large_request_sets_the_region_size() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", GIB);
        trial.alloc(20 * MIB);
        assert_eq!(trial.regions(), mib(&[32]));
        // Of the 32 MiB the request got all: they are less than twice 20.
        trial.alloc(MIB);
        assert_eq!(trial.regions(), mib(&[32]));
        trial.alloc(40 * MIB);
        assert_eq!(trial.regions(), mib(&[64]));
    }

    #[test]
    fn a_chunk_is_cut_only_where_half_or_more_would_be_left() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", GIB);
        let whole = trial.alloc(MIB + 256);
        assert_eq!((PoolBench::place(whole), trial.strategy.stats().current.allocated), ((0, 2 * MIB), 2 * MIB));
        trial.free(whole);
        let half = trial.ask(MIB, 0).unwrap();
        assert_eq!((PoolBench::place(half.0), half.1), ((0, MIB), Outcome::Split));
        assert_eq!(trial.strategy.largest_free(StreamId::DEFAULT), Some(MIB));
    }

    #[test]
    fn waste_above_128_mib_is_split_off() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", 4 * GIB);
        let waste = |trial: &mut PoolBench, kept: u64| {
            let all = trial.alloc(512 * MIB);
            trial.free(all);
            let block = trial.alloc(512 * MIB - kept);
            let waste = block.size - (512 * MIB - kept);
            trial.free(block);
            waste
        };
        assert_eq!(waste(&mut trial, 128 * MIB - 256), 128 * MIB - 256);
        assert_eq!(waste(&mut trial, 128 * MIB), 0);
        let mut strict =
            PoolBench::new("bfc:allow_growth:True,fragmentation_fraction:0.001,memory_limit:1000MiB", 4 * GIB);
        assert_eq!(waste(&mut strict, MIB), 0);
        assert_eq!(waste(&mut strict, MIB - 256), MIB - 256);
    }

    #[test]
    fn best_fit_with_lowest_address() {
        let mut trial = PoolBench::new("bfc", 64 * MIB);
        // Chunks of 8, 5, 6 and 5 KiB, with live ones between.
        let sizes = [8, 1, 5, 1, 6, 1, 5, 1].map(|kib| kib * KIB);
        let blocks = sizes.map(|bytes| trial.alloc(bytes));
        for number in [6, 4, 0, 2] {
            trial.free(blocks[number]);
        }
        assert_eq!(trial.alloc(4 * KIB + 1).address, blocks[2].address);
        assert_eq!(trial.alloc(4 * KIB + 1).address, blocks[6].address);
        // Its own bin (4 to 8 KiB) holds 6 KiB; the next bin's 8 KiB are nearer in address.
        assert_eq!(trial.alloc(4 * KIB + 1).address, blocks[4].address);
        assert_eq!(trial.alloc(4 * KIB + 1).address, blocks[0].address);
    }

    #[test]
    fn freed_chunks_join_both_neighbours() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", GIB);
        let [first, second, third] = [100, 200, 300].map(|kib| trial.alloc(kib * KIB));
        assert_eq!(PoolBench::place(third), (300 * KIB, 300 * KIB));
        trial.free(first);
        trial.free(third);
        trial.free(second);
        assert_eq!(trial.strategy.largest_free(StreamId::DEFAULT), Some(2 * MIB));
    }

    #[test]
    fn refused_region_shrinks_by_tenths() {
        let mut trial = PoolBench::new("bfc:allow_growth:True,memory_limit:1GiB", 20 * MIB);
        trial.alloc(10 * MIB);
        // The next region is to be as large again: this one was raised, so nothing doubled.
        assert_eq!(trial.regions(), mib(&[16]));
        let before = trial.calls(CallKind::MemAlloc);
        trial.alloc(3 * MIB);
        // From 16 MiB down, each step rounded up to 256 B, to the first of the 4 MiB that are left:
        // fourteen.
        assert_eq!((trial.regions(), trial.calls(CallKind::MemAlloc) - before), (vec![3_838_720], 15));
        let shortage = trial.ask(8 * MIB, 0).unwrap_err();
        assert_eq!((shortage.refused_by, shortage.rounded), (Refusal::Device, 8 * MIB));
    }

    #[test]
    fn wholly_free_regions_are_given_back_when_that_can_help() {
        let mut trial = PoolBench::new("bfc:allow_growth:True,memory_limit:14MiB", GIB);
        let small = [MIB + 256, 2 * MIB + 256].map(|bytes| trial.alloc(bytes));
        trial.alloc(4 * MIB + 256);
        assert_eq!(trial.regions(), mib(&[2, 4, 8]));
        trial.free(small[0]);
        trial.free(small[1]);
        // 6 MiB are free in two regions, none is left of the limit: 7 MiB cannot be, 5 MiB can.
        assert_eq!(trial.ask(7 * MIB, 0).unwrap_err().refused_by, Refusal::Limit);
        assert_eq!(trial.regions(), mib(&[]));
        assert_eq!(trial.ask(5 * MIB, 0).unwrap().1, Outcome::ReleaseAndRetry);
        // The next region would be 16 MiB; what the limit leaves is 6.
        assert_eq!(trial.regions(), mib(&[-2, -4, 6]));
    }

    #[test]
    fn without_garbage_collection_nothing_goes_back() {
        let mut trial = PoolBench::new("bfc:allow_growth:True,memory_limit:6MiB,garbage_collection:False", GIB);
        let blocks = [MIB + 256, 2 * MIB + 256].map(|bytes| trial.alloc(bytes));
        blocks.into_iter().for_each(|block| trial.free(block));
        assert!(trial.ask(5 * MIB, 0).is_err());
        assert_eq!(trial.regions(), mib(&[2, 4]));
    }

    #[test]
    fn without_growth_the_first_region_is_all_there_is() {
        let mut trial = PoolBench::new("bfc:memory_limit:100MiB", GIB);
        trial.alloc(1);
        assert_eq!(trial.regions(), mib(&[100]));
        assert_eq!(trial.ask(100 * MIB, 0).unwrap_err().refused_by, Refusal::Limit);
    }

    #[test]
    fn an_empty_cache_does_nothing_unless_asked_for() {
        for (spec, regions) in
            [("bfc:allow_growth:True", vec![2]), ("bfc:allow_growth:True,empty_cache:True", vec![2, -2, 2, -2, 2, -2])]
        {
            let mut trial = PoolBench::new(spec, GIB);
            for _ in 0..3 {
                let block = trial.alloc(MIB);
                trial.free(block);
                trial.trim();
            }
            assert_eq!(trial.regions(), mib(&regions), "{spec}");
        }
    }

    #[test]
    fn only_other_streams_wait_for_last_user() {
        let mut trial = PoolBench::new("bfc:allow_growth:True", GIB);
        let block = trial.ask(MIB, 1).unwrap().0;
        trial.free(block);
        let again = trial.ask(MIB, 1).unwrap().0;
        assert_eq!((again.address, trial.calls(CallKind::StreamWaitEvent)), (block.address, 0));
        trial.free(again);
        assert_eq!(trial.ask(MIB, 0).unwrap().0.address, block.address);
        assert_eq!(trial.calls(CallKind::StreamWaitEvent), 1);
        // The other half was one piece with it when stream 1 gave it back, and so counts as used
        // there.
        trial.ask(MIB, 2).unwrap();
        assert_eq!(trial.calls(CallKind::StreamWaitEvent), 2);
    }
}

//! `pool`: RMM's coalescing best-fit pool.
//!
//! Every stream has a list of free blocks. A request takes
//!
//! 1. the smallest block of its own stream's list that fits, the lowest address among equals;
//! 2. else that of the first other list with a block that fits: the stream waits for the stream of
//!    that list, and what is cut off stays in it;
//! 3. else other lists are merged into its own, one after the other, each after a wait, until a
//!    block fits;
//! 4. else the pool grows: by as much as it has (at least by the request), or under a maximum by
//!    half of what remains up to it. When the device refuses, half of that is tried, and so on down
//!    to the request.
//!
//! A freed block goes into the list of the stream that frees it and is joined with its neighbours
//! in that list, but not across two device allocations. When a request does not fit below the
//! maximum, wholly free allocations go back first, in address order, until it does.
//!
//! RMM searches its lists from end to end; here each is an index by size and address. Growth is a
//! multiple of 256 bytes here, which RMM's halving is not.

use super::{
    EMPTY_CACHE, EMPTY_CACHE_PARAMETER, FIRST_REQUEST, LAZY_EVENTS, LAZY_EVENTS_PARAMETER, QUANTUM, RECORD_STREAM,
    RmmAmount, StreamLists, multiple_of_quantum, rounded,
};
use crate::device::{Device, DeviceError};
use crate::strategy::{
    Built, Caller, Outcome, Parameter, Refusal, Setup, Stats, StrategyEntry,
    caching::free_index::{FreeBlock, FreeIndex},
    parameters::{self, Setting},
    pooled::{
        MemoryPiece, PieceState, PieceTable, PoolGrowth, PoolPolicy, PoolRequest, PoolStrategy, REQUEST_LIMIT,
        RegionTable, TakenPiece,
    },
};
use oomph_base::StreamId;

/// The registry's line.
pub(crate) const ENTRY: StrategyEntry = StrategyEntry {
    name: "pool",
    summary: "RMM's pool: coalescing best fit, a free list per stream, grows by doubling",
    origin: "RMM 26.10, pool_memory_resource; cuDF, cuML and Dask on RAPIDS",
    differs: &[
        FIRST_REQUEST,
        RECORD_STREAM,
        "searches the lists of other streams in the order in which the streams were first seen, not by the address of their events",
    ],
    parameters: &[INITIAL_PARAMETER, MAXIMUM_PARAMETER, EMPTY_CACHE_PARAMETER, LAZY_EVENTS_PARAMETER],
    variants: &["initial:50%", "initial:4MiB,maximum:1GiB", "empty_cache:True,lazy_events:True"],
    build,
};

pub(super) const INITIAL_PARAMETER: Parameter = Parameter::text(
    "initial",
    RmmAmount::VALUES,
    "0",
    "taken at the first request, for the default stream; RMM for Python takes 50%",
);
pub(super) const MAXIMUM_PARAMETER: Parameter = Parameter::text(
    "maximum",
    "an amount of memory",
    "none",
    "the pool never holds more, and grows by half of what remains up to it",
);

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    let mut settings = RmmPoolSettings::default();
    parameters::read(&ENTRY, parameters, |setting| settings.apply(&setting))?;
    settings.check().map_err(|reason| ENTRY.refused(reason))?;
    Ok(Box::new(PoolStrategy::new(ENTRY.name, RmmPool::new(settings))))
}

/// The parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct RmmPoolSettings {
    initial: RmmAmount,
    maximum: Option<u64>,
    empty_cache: bool,
    pub(super) lazy_events: bool,
}

impl Default for RmmPoolSettings {
    fn default() -> Self {
        RmmPoolSettings { initial: RmmAmount::Bytes(0), maximum: None, empty_cache: false, lazy_events: false }
    }
}

impl RmmPoolSettings {
    pub(super) fn apply(&mut self, setting: &Setting<'_>) -> Result<(), String> {
        match setting.key {
            "initial" => self.initial = RmmAmount::read(setting)?,
            EMPTY_CACHE => self.empty_cache = setting.truth()?,
            LAZY_EVENTS => self.lazy_events = setting.truth()?,
            _ => self.maximum = Some(multiple_of_quantum(setting)?),
        }
        Ok(())
    }

    pub(super) fn check(&self) -> Result<(), String> {
        match (self.initial, self.maximum) {
            (RmmAmount::Bytes(initial), Some(maximum)) if initial > maximum => {
                Err(format!("'initial' of {initial} bytes is above 'maximum' of {maximum}"))
            }
            _ => Ok(()),
        }
    }
}

/// The pool.
#[derive(Clone, Debug)]
pub(super) struct RmmPool {
    settings: RmmPoolSettings,
    /// The size of the first region, until it is taken.
    initial: Option<u64>,
    lists: StreamLists<FreeIndex>,
    taken_from_others: u64,
    merged: u64,
}

/// A free piece as the index knows it. The index counts in units of 512 bytes and RMM in 256, so
/// sizes are doubled.
#[inline]
fn entry(pieces: &PieceTable, slot: u32) -> FreeBlock {
    let MemoryPiece { size, address, .. } = pieces[slot];
    FreeBlock { size: 2 * size, order: address, slot }
}

/// Takes a piece from its list and puts what exceeds `size` back. The rest has no neighbour in the
/// list: they would have been joined.
#[inline]
fn cut_from(list: &mut FreeIndex, table: &mut RegionTable, found: FreeBlock, size: u64) -> (u32, Outcome) {
    list.remove(found);
    if found.size == 2 * size {
        return (found.slot, Outcome::Hit);
    }
    let rest = table.cut(found.slot, size);
    list.insert(entry(table, rest));
    (found.slot, Outcome::Split)
}

/// Adds a piece to its stream's list, joined with its neighbours there.
#[inline]
fn join_into(list: &mut FreeIndex, table: &mut RegionTable, slot: u32) {
    let MemoryPiece { stream, note, .. } = table[slot];
    let joins = |piece: &MemoryPiece| piece.stream == stream && piece.note == note;
    let joined = table.join_free(slot, joins, |pieces, gone| list.remove(entry(pieces, gone)));
    list.insert(entry(table, joined));
}

impl RmmPool {
    pub(super) fn new(settings: RmmPoolSettings) -> RmmPool {
        let lists = StreamLists::new(settings.lazy_events);
        RmmPool { settings, initial: None, lists, taken_from_others: 0, merged: 0 }
    }

    /// Serves a request that its own stream's list cannot serve.
    #[cold]
    fn take_elsewhere(
        &mut self,
        table: &mut RegionTable,
        device: &mut dyn Device,
        request: &PoolRequest,
    ) -> TakenPiece {
        self.lists.get_or_make(request.stream);
        let others = self.lists.others(request.stream);
        for &owner in &others {
            let fits = |list: &mut FreeIndex| list.first_at_least(2 * request.size);
            if let Some(found) = self.lists.get(owner).and_then(fits) {
                self.lists.wait_for(device, request.stream, owner)?;
                self.taken_from_others += 1;
                return Ok(Some(cut_from(self.lists.get_or_make(owner), table, found, request.size)));
            }
        }
        for &owner in &others {
            self.lists.wait_for(device, request.stream, owner)?;
            self.merge(table, device, request.stream, owner)?;
            let own = self.lists.get_or_make(request.stream);
            if let Some(found) = own.first_at_least(2 * request.size) {
                return Ok(Some(cut_from(own, table, found, request.size)));
            }
        }
        Ok(None)
    }

    /// Merges the list of `owner` into that of `stream`, which has waited for `owner`. RMM then records the event of
    /// `stream` again, so that others who wait for it wait for `owner` too.
    fn merge(
        &mut self,
        table: &mut RegionTable,
        device: &mut dyn Device,
        stream: StreamId,
        owner: StreamId,
    ) -> Result<(), DeviceError> {
        self.lists.record_free(device, stream)?;
        let moved = self.lists.remove(owner);
        let own = self.lists.freed_by(stream);
        for FreeBlock { slot, .. } in moved.ascending(0, 0) {
            table[slot].stream = stream;
            join_into(own, table, slot);
        }
        self.merged += 1;
        Ok(())
    }
}

impl PoolPolicy for RmmPool {
    const GOES_TO_FREEING_STREAM: bool = true;

    #[inline]
    fn block_size(&self, bytes: u64) -> Option<u64> {
        rounded(bytes).filter(|&size| size <= self.settings.maximum.unwrap_or(REQUEST_LIMIT))
    }

    fn begin(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let initial = self.settings.initial.resolve(device)?;
        self.initial = Some(initial.min(self.settings.maximum.unwrap_or(initial))).filter(|&bytes| bytes > 0);
        Ok(())
    }

    #[inline]
    fn take(&mut self, table: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece {
        if let Some(own) = self.lists.get(request.stream)
            && let Some(found) = own.first_at_least(2 * request.size)
        {
            return Ok(Some(cut_from(own, table, found, request.size)));
        }
        self.take_elsewhere(table, device, request)
    }

    #[inline]
    fn before_free(
        &mut self,
        _: &RegionTable,
        device: &mut dyn Device,
        _: u32,
        caller: Caller,
    ) -> Result<(), DeviceError> {
        self.lists.record_free(device, caller.stream)
    }

    #[inline]
    fn keep(&mut self, table: &mut RegionTable, slot: u32) {
        let stream = table[slot].stream;
        join_into(self.lists.freed_by(stream), table, slot);
    }

    fn add_region(&mut self, table: &mut RegionTable, slot: u32, request: &PoolRequest) {
        let stream = if self.initial.take().is_some() { StreamId::DEFAULT } else { request.stream };
        table[slot].stream = stream;
        self.lists.get_or_make(stream).insert(entry(table, slot));
    }

    fn forget(&mut self, table: &mut RegionTable, slot: u32) {
        let stream = table[slot].stream;
        self.lists.get_or_make(stream).remove(entry(table, slot));
    }

    fn trims(&self) -> bool {
        self.settings.empty_cache
    }

    /// Under a maximum RMM 26.10 gives wholly free regions back to stay below it.
    fn releases_regions(&self, request: &PoolRequest, stats: &Stats, _: u64) -> bool {
        let room = self.settings.maximum.map(|maximum| maximum.saturating_sub(stats.current.reserved));
        self.settings.empty_cache || room.is_some_and(|room| room < request.size)
    }

    fn has_released_enough(&self, request: &PoolRequest, stats: &Stats, refused_by: Refusal) -> bool {
        let room = self.settings.maximum.map(|maximum| maximum.saturating_sub(stats.current.reserved));
        refused_by == Refusal::Limit && room.is_none_or(|room| room >= request.size)
    }

    fn growth(&mut self, request: &PoolRequest, stats: &Stats, attempt: u32) -> PoolGrowth {
        let reserved = stats.current.reserved;
        let mut ask = match (self.initial, self.settings.maximum) {
            (Some(initial), _) => initial,
            (None, Some(maximum)) => match maximum.saturating_sub(reserved) {
                room if room < request.size => return PoolGrowth::BeyondLimit,
                room => request.size.max(room / 2 / QUANTUM * QUANTUM),
            },
            (None, None) => request.size.max(reserved),
        };
        for _ in 0..attempt {
            if ask <= request.size {
                return PoolGrowth::End;
            }
            ask = request.size.max(ask / 2 / QUANTUM * QUANTUM);
        }
        PoolGrowth::Ask(ask)
    }

    /// The longest run of free pieces of all streams: lists are merged before the pool grows.
    fn largest_free(&self, table: &RegionTable, _: StreamId) -> u64 {
        let longest = |region| {
            let (mut run, mut longest) = (0, 0);
            for piece in table.pieces_of(region).map(|slot| &table[slot]) {
                run = if piece.state == PieceState::Free && piece.note == 0 { run + piece.size } else { 0 };
                longest = run.max(longest);
            }
            longest
        };
        table.regions().into_iter().map(longest).max().unwrap_or(0)
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("taken_from_other_streams", self.taken_from_others), ("lists_merged", self.merged)]
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.lists.close(device)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::bench::RmmBench, *};
    use crate::device::CallKind;
    use oomph_base::{KIB, MIB};

    const ROOMY: u64 = MIB;

    #[test]
    fn the_pool_grows_by_what_it_has_or_by_the_request() {
        let mut pool = RmmBench::new("pool", ROOMY);
        assert_eq!(pool.ask(1000, 0), Ok((0, Outcome::NewSegment)));
        assert_eq!(pool.ask(512, 0), Ok((1024, Outcome::NewSegment)));
        assert_eq!(pool.ask(4 * KIB, 0), Ok((2 * KIB, Outcome::NewSegment)));
        // The rest of the second region.
        assert_eq!(pool.ask(256, 0), Ok((1536, Outcome::Split)));
        assert_eq!(pool.ask(1, 0), Ok((1792, Outcome::Hit)));
        assert_eq!(pool.ask(1, 0), Ok((6 * KIB, Outcome::NewSegment)));
        assert_eq!(pool.growth(), [1024, 1024, 4096, 6144]);
    }

    #[test]
    fn best_fit_with_lowest_address() {
        let mut pool = RmmBench::new("pool:initial:64KiB", ROOMY);
        // Holes of 2, 1, 1 and 3 KiB between live blocks.
        let sizes = [2, 8, 1, 8, 1, 8, 3, 8].map(|kib| kib * KIB);
        let blocks: Vec<u64> = sizes.iter().map(|&bytes| pool.alloc(bytes, 0)).collect();
        for hole in [6, 4, 2, 0] {
            pool.free(blocks[hole], 0);
        }
        assert_eq!(pool.ask(700, 0), Ok((blocks[2], Outcome::Split)));
        assert_eq!(pool.ask(KIB, 0), Ok((blocks[4], Outcome::Hit)));
        assert_eq!(pool.ask(KIB, 0), Ok((blocks[0], Outcome::Split)));
        assert_eq!(pool.ask(2 * KIB, 0), Ok((blocks[6], Outcome::Split)));
        assert_eq!(pool.ask(256, 0), Ok((blocks[2] + 768, Outcome::Hit)));
        assert_eq!(pool.growth(), [64 << 10]);
    }

    #[test]
    fn neighbours_are_joined_but_not_across_two_regions() {
        let mut pool = RmmBench::new("pool", ROOMY);
        let first = [pool.alloc(512, 0), pool.alloc(512, 0)];
        assert_eq!((first, pool.growth()), ([0, 512], vec![512, 512]));
        let second = [pool.alloc(256, 0), pool.alloc(256, 0), pool.alloc(512, 0)];
        assert_eq!((second, pool.growth()), ([1024, 1280, 1536], vec![512, 512, 1024]));
        for block in [1280, 0, 1536, 512, 1024] {
            pool.free(block, 0);
        }
        // The addresses follow each other without a gap.
        assert_eq!(pool.free_blocks(), [(0, 512), (512, 512), (1024, 1024)]);
        assert_eq!(pool.ask(1280, 0), Ok((2048, Outcome::NewSegment)));
        assert_eq!(pool.strategy.largest_free(StreamId(0)), Some(1024));
    }

    #[test]
    fn other_streams_block_is_taken_after_a_wait() {
        let mut pool = RmmBench::new("pool:initial:4KiB", ROOMY);
        // No stream has used the initial region, so no wait is needed.
        assert_eq!(pool.ask(KIB, 1), Ok((0, Outcome::NewSegment)));
        assert_eq!(pool.calls(CallKind::StreamWaitEvent), 0);
        assert_eq!(pool.ask(3 * KIB, 0), Ok((KIB, Outcome::Hit)));
        pool.free(0, 1);
        assert_eq!(pool.ask(512, 0), Ok((0, Outcome::Split)));
        assert_eq!((pool.calls(CallKind::EventRecord), pool.calls(CallKind::StreamWaitEvent)), (1, 1));
        // The rest is still the first stream's: no wait.
        assert_eq!(pool.ask(512, 1), Ok((512, Outcome::Hit)));
        assert_eq!(pool.calls(CallKind::StreamWaitEvent), 1);
        assert_eq!(pool.strategy.details(), [("taken_from_other_streams", 2), ("lists_merged", 0)]);
    }

    #[test]
    fn other_streams_are_searched_in_creation_order() {
        let mut pool = RmmBench::new("pool:initial:4KiB", ROOMY);
        let blocks = [3, 2, 1].map(|stream| (pool.alloc(KIB, stream), stream));
        assert_eq!(pool.alloc(KIB, 0), 3 * KIB);
        for (block, stream) in blocks {
            pool.free(block, stream);
        }
        // Three fit alike; stream 3 was there before 2 and 1.
        assert_eq!(pool.ask(KIB, 0), Ok((blocks[0].0, Outcome::Hit)));
        assert_eq!(pool.ask(KIB, 0), Ok((blocks[1].0, Outcome::Hit)));
    }

    #[test]
    fn lists_are_merged_where_no_single_block_fits() {
        let mut pool = RmmBench::new("pool:initial:6KiB", ROOMY);
        let blocks = [0, 1, 2].map(|stream| (pool.alloc(2 * KIB, stream), stream));
        for (block, stream) in blocks {
            pool.free(block, stream);
        }
        // Each in a list of its own.
        assert_eq!(pool.free_blocks(), [(0, 2 * KIB), (2 * KIB, 2 * KIB), (4 * KIB, 2 * KIB)]);
        // That of stream 0 is merged first, in vain; with that of stream 1 all are one block.
        assert_eq!(pool.ask(4 * KIB, 2), Ok((0, Outcome::Split)));
        assert_eq!(pool.strategy.details(), [("taken_from_other_streams", 2), ("lists_merged", 2)]);
        assert_eq!((pool.calls(CallKind::StreamWaitEvent), pool.growth().len()), (2, 1));
        pool.free(0, 2);
        assert_eq!(pool.free_blocks(), [(0, 6 * KIB)]);
    }

    #[test]
    fn a_block_belongs_to_the_stream_that_frees_it() {
        let mut pool = RmmBench::new("pool", ROOMY);
        let block = pool.alloc(KIB, 0);
        pool.free(block, 1);
        assert_eq!(pool.ask(KIB, 1), Ok((block, Outcome::Hit)));
        assert_eq!(pool.calls(CallKind::StreamWaitEvent), 0);
        pool.free(block, 1);
        assert_eq!(pool.ask(KIB, 0), Ok((block, Outcome::Hit)));
        assert_eq!(pool.calls(CallKind::StreamWaitEvent), 1);
    }

    #[test]
    fn under_a_maximum_the_pool_grows_by_half_of_what_remains() {
        let mut pool = RmmBench::new("pool:maximum:8KiB", ROOMY);
        let blocks = [4 * KIB, 256, 2 * KIB, 256].map(|bytes| pool.alloc(bytes, 0));
        assert_eq!(pool.growth(), [4096, 2048, 2048]);
        assert_eq!(blocks, [0, 4096, 6144, 4352]);
        assert_eq!(pool.ask(2 * KIB, 0), Err(Refusal::Limit));
        assert_eq!(pool.ask(9 * KIB, 0), Err(Refusal::Size));
        // Together they make room; the second region has live blocks and stays.
        pool.free(blocks[0], 0);
        pool.free(blocks[2], 0);
        assert_eq!(pool.ask(4 * KIB - 256, 0), Ok((0, Outcome::Split)));
        pool.free(0, 0);
        assert_eq!(pool.ask(4 * KIB + 256, 0), Ok((8 * KIB, Outcome::ReleaseAndRetry)));
        assert_eq!(pool.growth(), [4096, 2048, 2048, -4096, -2048, 4352]);
    }

    #[test]
    fn only_needed_memory_is_released_under_maximum() {
        let mut pool = RmmBench::new("pool:initial:2KiB,maximum:10KiB", ROOMY);
        let first = pool.alloc(2 * KIB, 0);
        let blocks = [4 * KIB, 2 * KIB].map(|bytes| pool.alloc(bytes, 0));
        assert_eq!(pool.growth(), [2048, 4096, 2048]);
        for block in [first, blocks[0], blocks[1]] {
            pool.free(block, 0);
        }
        assert_eq!(pool.ask(6 * KIB, 0), Ok((8 * KIB, Outcome::ReleaseAndRetry)));
        assert_eq!(pool.growth(), [2048, 4096, 2048, -2048, -4096, 6144]);
    }

    #[test]
    fn a_refused_growth_is_halved_down_to_the_request() {
        let mut pool = RmmBench::new("pool", 10 * KIB);
        let blocks = [4 * KIB, 4 * KIB, 512].map(|bytes| pool.alloc(bytes, 0));
        assert_eq!((blocks, pool.growth()), ([0, 4096, 8192], vec![4096, 4096, 2048]));
        assert_eq!(pool.ask(2 * KIB, 0), Err(Refusal::Device));
        assert_eq!(pool.ask(1536, 0), Ok((8704, Outcome::Hit)));
    }

    #[test]
    fn an_initial_size_does_not_bound_the_first_request() {
        let mut pool = RmmBench::new("pool:initial:1KiB", ROOMY);
        assert_eq!(pool.ask(5 * KIB, 1), Ok((KIB, Outcome::NewSegment)));
        assert_eq!(pool.growth(), [1024, 5120]);
        let mut half = RmmBench::new("pool:initial:50%", ROOMY);
        half.alloc(1, 0);
        assert_eq!(half.growth(), [ROOMY as i64 / 2]);
    }

    #[test]
    fn parameters_that_rmm_would_refuse_are_refused() {
        for (parameters, reason) in [
            ("initial:2KiB,maximum:1KiB", "'initial' of 2048 bytes is above 'maximum' of 1024"),
            ("maximum:1000", "'maximum': '1000' is not a multiple of 256 bytes"),
            ("initial:0%", "'initial': '0%' is not between 1% and 100%"),
        ] {
            let built = crate::strategy::StrategySpec::from(format!("pool:{parameters}").as_str()).check();
            assert_eq!(built.unwrap_err().to_string(), format!("strategy 'pool': {reason}"));
        }
    }
}

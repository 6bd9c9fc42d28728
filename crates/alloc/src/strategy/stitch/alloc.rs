//! The steps of an allocation, in GMLake's order, and stitching itself.

use super::{
    OWN_SEGMENT, RANGE, SHARED_SEGMENT, SMALL_SEGMENT, Stitch,
    fused::{self, Run},
    tiles::{self, Pool},
};
use crate::device::{DeviceError, PhysicalId};
use crate::strategy::{
    Attempt, Block, Context, Outcome, Refusal, Request, Shortage, StrategyError, StrategyEvent, deferred::Patience,
};
use oomph_base::{Address, StreamId, round_up};

/// New memory for a request, as a free tile, or who refused it.
type Grown = Result<u32, Refusal>;

/// How often a range is tried to be mapped once more, after unused ranges were given back.
const MAPPING_RETRIES: u32 = 3;

/// When stitching is tried: the higher the more is at stake, and `defragLevel` says from where on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pressure {
    /// Before new memory is taken.
    None,
    /// The device has no more.
    DeviceFull,
    /// Nor had it after everything cached was given back.
    LastResort,
}

impl Stitch {
    pub(super) fn alloc_small(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        size: u64,
    ) -> Result<Attempt, StrategyError> {
        if let Some(slot) = self.tiles.best_fit(Pool::Small, request.stream, size) {
            return Ok(self.hand_out_cached(slot, request, size));
        }
        let mut outcome = Outcome::NewSegment;
        let mut grown = self.grow_small(cx, request.stream)?;
        if grown.is_err() {
            outcome = Outcome::ReleaseAndRetry;
            self.make_room(cx, size)?;
            grown = self.grow_small(cx, request.stream)?;
        }
        match grown {
            Ok(slot) => Ok(Attempt::Served(self.hand_out(slot, request, size).0, outcome)),
            Err(refused_by) => self.run_out(cx, request, size, SMALL_SEGMENT, refused_by),
        }
    }

    pub(super) fn alloc_large(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        size: u64,
    ) -> Result<Attempt, StrategyError> {
        let stream = request.stream;
        if let Some(slot) = self.tiles.best_fit(Pool::Large, stream, size) {
            return Ok(self.hand_out_cached(slot, request, size));
        }
        let largest = size.saturating_mul(self.settings.reuse_limit);
        if let Some(range) = self.fused.best_fit(stream, size, largest) {
            self.counts.reused += 1;
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Hit));
        }
        if let Some(range) = self.stitch(cx, stream, size, Pressure::None)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Split));
        }
        if let Some(range) = self.take_shortfall(cx, stream, size)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::NewSegment));
        }
        let asked = if size < OWN_SEGMENT { round_up(SHARED_SEGMENT, self.chunk) } else { size };
        if let Ok(slot) = self.grow_large(cx, stream, asked)? {
            return Ok(Attempt::Served(self.hand_out(slot, request, size).0, Outcome::NewSegment));
        }
        if let Some(range) = self.stitch(cx, stream, size, Pressure::DeviceFull)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Split));
        }
        self.make_room(cx, size)?;
        let refused_by = match self.grow_large(cx, stream, asked)? {
            Ok(slot) => {
                return Ok(Attempt::Served(self.hand_out(slot, request, size).0, Outcome::ReleaseAndRetry));
            }
            Err(refused_by) => refused_by,
        };
        if let Some(range) = self.stitch(cx, stream, size, Pressure::LastResort)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::ReleaseAndRetry));
        }
        self.run_out(cx, request, size, asked, refused_by)
    }

    /// Gives back all that is cached, for a request that the device refused.
    fn make_room(&mut self, cx: &mut Context<'_>, rounded: u64) -> Result<(), StrategyError> {
        self.release_cached(cx)?;
        self.stats.retries += 1;
        cx.sink.event(StrategyEvent::Retry { rounded });
        Ok(())
    }

    fn run_out(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        rounded: u64,
        asked: u64,
        refused_by: Refusal,
    ) -> Result<Attempt, StrategyError> {
        let device_free = Some(cx.device.memory_info()?.free);
        cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream: request.stream, device_free });
        self.stats.ooms += 1;
        Ok(Attempt::OutOfMemory(Shortage { rounded, asked, refused_by, device_free }))
    }

    fn hand_out_cached(&mut self, slot: u32, request: &Request, size: u64) -> Attempt {
        let (block, cut) = self.hand_out(slot, request, size);
        Attempt::Served(block, if cut { Outcome::Split } else { Outcome::Hit })
    }

    /// Makes the front of a free tile the caller's; says whether anything was left of it.
    fn hand_out(&mut self, slot: u32, request: &Request, size: u64) -> (Block, bool) {
        let cut = self.tiles.take_front(slot, size);
        self.memory_taken(slot, tiles::State::Allocated);
        let tile = &mut self.tiles[slot];
        tile.requested = request.bytes;
        tile.generation = tile.generation.wrapping_add(1);
        self.stats.on_alloc(request.bytes, tile.size);
        let (address, generation) = (Address(tile.address), tile.generation);
        (Block { address, size: tile.size, slot, generation }, cut)
    }

    /// Makes a range the caller's; all of its memory is free.
    fn hand_out_range(&mut self, slot: u32, request: &Request) -> Block {
        for place in 0..self.fused[slot].runs.len() {
            let Run { segment, address, bytes } = self.fused[slot].runs[place];
            if let Some(tile) = self.tiles.take_range(segment, address, bytes) {
                self.memory_taken(tile, tiles::State::Lent);
                self.fused[slot].tiles.push(tile);
            }
        }
        let range = &mut self.fused[slot];
        range.state = fused::State::Allocated;
        range.requested = request.bytes;
        range.generation = range.generation.wrapping_add(1);
        self.stats.on_alloc(request.bytes, range.bytes);
        Block { address: range.address, size: range.bytes, slot: slot | RANGE, generation: range.generation }
    }

    /// A tile that was free is in use: every range that shows its memory learns it.
    fn memory_taken(&mut self, slot: u32, state: tiles::State) {
        self.tiles[slot].state = state;
        let tile = &self.tiles[slot];
        if let Some(segment) = self.tiles.segment(tile.segment) {
            let run = Run { segment: tile.segment, address: tile.address, bytes: tile.size };
            self.fused.memory_taken(&segment.shown_in, &run);
        }
    }

    fn grow_small(&mut self, cx: &mut Context<'_>, stream: StreamId) -> Result<Grown, StrategyError> {
        cx.expect_stream(stream)?;
        let bytes = SMALL_SEGMENT;
        let Some(address) = unless_out_of_memory(cx.device.alloc(bytes))? else { return Ok(Err(Refusal::Device)) };
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
        self.stats.on_reserve(bytes, 1);
        Ok(Ok(self.tiles.add_segment((address.0, bytes), (Pool::Small, stream), Vec::new())))
    }

    /// A segment of physical chunks.
    fn grow_large(&mut self, cx: &mut Context<'_>, stream: StreamId, bytes: u64) -> Result<Grown, StrategyError> {
        cx.expect_stream(stream)?;
        self.leftovers.clear(cx.device)?;
        if bytes > self.device_bytes {
            return Ok(Err(Refusal::Device));
        }
        let created = self.leftovers.create(cx.device, bytes / self.chunk, self.chunk);
        let Some(chunks) = unless_out_of_memory(created)? else { return Ok(Err(Refusal::Device)) };
        let mapped = self.leftovers.map(cx.device, chunks.iter().copied(), self.chunk);
        if mapped.is_err() {
            self.leftovers.give_back(cx.device, chunks);
            return unless_out_of_memory(mapped.map(|_| 0)).map(|_| Err(Refusal::Device));
        }
        let address = mapped?;
        cx.sink.event(StrategyEvent::SegmentMap { address, bytes, stream });
        self.stats.on_reserve(bytes, 1);
        Ok(Ok(self.tiles.add_segment((address.0, bytes), (Pool::Large, stream), chunks)))
    }

    /// With `reAlloc`: takes what is missing beside the free memory of the stream, and stitches the two.
    fn take_shortfall(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<u32>, StrategyError> {
        if !self.settings.takes_shortfall || !self.may_stitch(size, Pressure::LastResort) {
            return Ok(None);
        }
        let free: u64 = self.tiles.descending(Pool::Large, stream).map(|slot| self.tiles[slot].size).sum();
        if free == 0 || free >= size || self.grow_large(cx, stream, size - free)?.is_err() {
            return Ok(None);
        }
        self.stitch(cx, stream, size, Pressure::LastResort)
    }

    /// Whether the thresholds allow it.
    pub(super) fn may_stitch(&self, size: u64, pressure: Pressure) -> bool {
        let settings = &self.settings;
        settings.defragments && pressure as u32 >= settings.level && size >= settings.fragment_limit
    }

    /// Makes a range for a request from free tiles, if there are enough; all of its memory is still free.
    fn stitch(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        size: u64,
        pressure: Pressure,
    ) -> Result<Option<u32>, StrategyError> {
        if !self.may_stitch(size, pressure) {
            return Ok(None);
        }
        let Some(runs) = self.choose_runs(stream, size) else { return Ok(None) };
        let Some(address) = self.map_runs(cx, &runs, size)? else { return Ok(None) };
        let segments: Vec<u32> = runs.iter().map(|run| run.segment).collect();
        let slot = self.fused.add(address, stream, runs);
        for number in segments {
            if let Some(segment) = self.tiles.segment_mut(number)
                && !segment.shown_in.contains(&slot)
            {
                segment.shown_in.push(slot);
            }
        }
        self.counts.stitched += 1;
        self.counts.peak_range_bytes = self.counts.peak_range_bytes.max(self.fused.bytes);
        if self.fused.bytes > self.settings.collect_above {
            self.collect(cx, u64::MAX, &[false, true], Some(slot))?;
        }
        Ok(Some(slot))
    }

    /// Free tiles from the largest down, the last one only as far as it is needed.
    fn choose_runs(&self, stream: StreamId, size: u64) -> Option<Vec<Run>> {
        let (mut runs, mut missing) = (Vec::new(), size);
        for slot in self.tiles.descending(Pool::Large, stream) {
            let tile = &self.tiles[slot];
            let bytes = tile.size.min(missing);
            runs.push(Run { segment: tile.segment, address: tile.address, bytes });
            missing -= bytes;
            if missing == 0 {
                return Some(runs);
            }
        }
        None
    }

    /// Maps the chunks under the runs into a fresh range. Where there is no room for it, unused ranges are given back:
    /// first those whose memory is partly in use, then also those least recently used, then all.
    fn map_runs(&mut self, cx: &mut Context<'_>, runs: &[Run], size: u64) -> Result<Option<Address>, StrategyError> {
        self.leftovers.clear(cx.device)?;
        let chunks: Vec<PhysicalId> = runs.iter().flat_map(|run| self.chunks_of(run)).copied().collect();
        for round in 0..=MAPPING_RETRIES {
            let mapped = self.leftovers.map(cx.device, chunks.iter().copied(), self.chunk);
            if let Some(address) = unless_out_of_memory(mapped)? {
                return Ok(Some(address));
            }
            match round {
                0 => self.collect(cx, size.saturating_mul(4), &[false], None)?,
                1 => self.collect(cx, size.saturating_mul(16), &[false, true], None)?,
                2 => self.collect(cx, u64::MAX, &[false, true], None)?,
                _ => {}
            }
        }
        Ok(None)
    }

    fn chunks_of(&self, run: &Run) -> &[PhysicalId] {
        self.tiles.segment(run.segment).map_or(&[], |segment| {
            let first = ((run.address - segment.address) / self.chunk) as usize;
            &segment.chunks[first..first + (run.bytes / self.chunk) as usize]
        })
    }

    /// Frees that wait are waited for, then everything unused goes back to the device.
    pub(super) fn release_cached(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.release_unused(cx)
    }
}

/// Nothing where memory has run out.
fn unless_out_of_memory<T>(answer: Result<T, DeviceError>) -> Result<Option<T>, StrategyError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

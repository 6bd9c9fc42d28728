//! The steps of an allocation in GMLake's order, stitching itself, and giving memory back.

use super::{OWN_SEGMENT, SHARED_SEGMENT, SMALL_SEGMENT, Stitch, ranges::SegmentSpan, segments::SegmentPool};
use crate::device::{DeviceError, PhysicalId};
use crate::strategy::{
    Attempt, Block, Context, Outcome, Request, Shortage, StrategyError, StrategyEvent,
    deferred::Patience,
    leftovers::Leftover,
    pooled::{MemoryPiece, NONE, PieceState},
    unless_out_of_memory,
};
use oomph_base::{Address, StreamId, round_up};

/// How often a range is mapped again, after unused ranges were given back.
const MAPPING_RETRIES: u32 = 3;

/// When stitching is tried. `defragLevel` is the lowest pressure at which it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StitchPressure {
    /// Before new memory is taken.
    None,
    /// The device has no more.
    DeviceFull,
    /// It had no more even after everything cached was given back.
    LastResort,
}

impl Stitch {
    pub(super) fn alloc_small(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        size: u64,
    ) -> Result<Attempt, StrategyError> {
        if let Some(slot) = self.tiles.best_fit(SegmentPool::Small, request.stream, size) {
            return Ok(self.hand_out_cached(slot, request, size));
        }
        let mut outcome = Outcome::NewSegment;
        let mut grown = self.grow_small(cx, request.stream)?;
        if grown.is_none() {
            outcome = Outcome::ReleaseAndRetry;
            self.make_room(cx, size)?;
            grown = self.grow_small(cx, request.stream)?;
        }
        match grown {
            Some(slot) => Ok(Attempt::Served(self.hand_out(slot, request, size).0, outcome)),
            None => self.run_out(cx, request, size, SMALL_SEGMENT),
        }
    }

    pub(super) fn alloc_large(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        size: u64,
    ) -> Result<Attempt, StrategyError> {
        let stream = request.stream;
        if let Some(slot) = self.tiles.best_fit(SegmentPool::Large, stream, size) {
            return Ok(self.hand_out_cached(slot, request, size));
        }
        let largest = size.saturating_mul(self.settings.reuse_limit);
        if let Some(range) = self.ranges.best_fit(stream, size, largest) {
            self.counts.reused += 1;
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Hit));
        }
        if let Some(range) = self.stitch(cx, stream, size, StitchPressure::None)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Split));
        }
        if let Some(range) = self.take_shortfall(cx, stream, size)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::NewSegment));
        }
        let asked = if size < OWN_SEGMENT { round_up(SHARED_SEGMENT, self.chunk) } else { size };
        if let Some(slot) = self.grow_large(cx, stream, asked)? {
            return Ok(Attempt::Served(self.hand_out(slot, request, size).0, Outcome::NewSegment));
        }
        if let Some(range) = self.stitch(cx, stream, size, StitchPressure::DeviceFull)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::Split));
        }
        self.make_room(cx, size)?;
        if let Some(slot) = self.grow_large(cx, stream, asked)? {
            return Ok(Attempt::Served(self.hand_out(slot, request, size).0, Outcome::ReleaseAndRetry));
        }
        if let Some(range) = self.stitch(cx, stream, size, StitchPressure::LastResort)? {
            return Ok(Attempt::Served(self.hand_out_range(range, request), Outcome::ReleaseAndRetry));
        }
        self.run_out(cx, request, size, asked)
    }

    /// Gives everything cached back, for a request that the device refused.
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
    ) -> Result<Attempt, StrategyError> {
        let device_free = Some(cx.device.memory_info()?.free);
        let shortage = Shortage { asked, device_free, ..Shortage::of_device(rounded) };
        Ok(cx.out_of_memory(&mut self.stats, request.stream, shortage))
    }

    fn hand_out_cached(&mut self, slot: u32, request: &Request, size: u64) -> Attempt {
        let (block, cut) = self.hand_out(slot, request, size);
        Attempt::Served(block, if cut { Outcome::Split } else { Outcome::Hit })
    }

    /// Hands out the front of a free tile; returns whether anything was cut off.
    fn hand_out(&mut self, slot: u32, request: &Request, size: u64) -> (Block, bool) {
        let cut = self.tiles.take_front(slot, size);
        let block = self.tiles.occupy(slot, request.bytes);
        self.memory_taken(slot);
        self.stats.on_alloc(request.bytes, block.size);
        (block, cut)
    }

    /// Hands out a range whose memory is all free.
    fn hand_out_range(&mut self, slot: u32, request: &Request) -> Block {
        for index in 0..self.ranges[slot].spans.len() {
            let SegmentSpan { segment, address, bytes } = self.ranges[slot].spans[index];
            if let Some(tile) = self.tiles.take_range(segment, address, bytes) {
                self.tiles[tile].state = PieceState::Lent;
                self.memory_taken(tile);
                self.ranges[slot].tiles.push(tile);
            }
        }
        let block = self.tiles.occupy(self.ranges[slot].piece, request.bytes);
        self.stats.on_alloc(request.bytes, block.size);
        block
    }

    /// A free tile is in use now: counts that in every range that shows its memory.
    fn memory_taken(&mut self, slot: u32) {
        let span = SegmentSpan::of(&self.tiles[slot]);
        if let Some(segment) = self.tiles.segment(span.segment) {
            self.ranges.count_use(&segment.shown_in, &span, true);
        }
    }

    /// A segment for small requests, as a free tile; `None` if the device has no more.
    fn grow_small(&mut self, cx: &mut Context<'_>, stream: StreamId) -> Result<Option<u32>, StrategyError> {
        cx.expect_stream(stream)?;
        let bytes = SMALL_SEGMENT;
        let Some(address) = unless_out_of_memory(cx.device.alloc(bytes))? else { return Ok(None) };
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
        self.stats.on_reserve(bytes, 1);
        Ok(Some(self.tiles.add_segment((address.0, bytes), (SegmentPool::Small, stream), Vec::new())))
    }

    /// A segment of physical chunks, as a free tile; `None` if the device has no more.
    fn grow_large(&mut self, cx: &mut Context<'_>, stream: StreamId, bytes: u64) -> Result<Option<u32>, StrategyError> {
        cx.expect_stream(stream)?;
        self.leftovers.clear(cx.device)?;
        if bytes > self.device_bytes {
            return Ok(None);
        }
        let created = self.leftovers.create(cx.device, bytes / self.chunk, self.chunk);
        let Some(chunks) = unless_out_of_memory(created)? else { return Ok(None) };
        let mapped = self.map_chunks(cx, &chunks);
        if mapped.is_err() {
            self.leftovers.give_back(cx.device, chunks);
            return Ok(unless_out_of_memory(mapped)?.and(None));
        }
        let address = mapped?;
        cx.sink.event(StrategyEvent::SegmentMap { address, bytes, stream });
        self.stats.on_reserve(bytes, 1);
        Ok(Some(self.tiles.add_segment((address.0, bytes), (SegmentPool::Large, stream), chunks)))
    }

    /// With `reAlloc`: takes only the memory that the stream's free memory lacks, and stitches
    /// both.
    fn take_shortfall(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<u32>, StrategyError> {
        if !self.settings.takes_shortfall || !self.may_stitch(size, StitchPressure::LastResort) {
            return Ok(None);
        }
        let free: u64 = self.tiles.descending(SegmentPool::Large, stream).map(|slot| self.tiles[slot].size).sum();
        if free == 0 || free >= size || self.grow_large(cx, stream, size - free)?.is_none() {
            return Ok(None);
        }
        self.stitch(cx, stream, size, StitchPressure::LastResort)
    }

    /// Whether the settings allow stitching.
    pub(super) fn may_stitch(&self, size: u64, pressure: StitchPressure) -> bool {
        let settings = &self.settings;
        settings.defragments && pressure as u32 >= settings.level && size >= settings.fragment_limit
    }

    /// Makes a range for a request from free tiles, if there are enough. Its memory is not taken
    /// yet.
    fn stitch(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        size: u64,
        pressure: StitchPressure,
    ) -> Result<Option<u32>, StrategyError> {
        if !self.may_stitch(size, pressure) {
            return Ok(None);
        }
        let Some(spans) = self.choose_runs(stream, size) else { return Ok(None) };
        let Some(address) = self.map_runs(cx, &spans, size)? else { return Ok(None) };
        let segments: Vec<u32> = spans.iter().map(|span| span.segment).collect();
        let piece = self.tiles.insert(MemoryPiece::new(address.0, size, stream));
        let slot = self.ranges.add(piece, address, stream, spans);
        self.tiles[piece].note = slot;
        for number in segments {
            if let Some(segment) = self.tiles.segment_mut(number)
                && !segment.shown_in.contains(&slot)
            {
                segment.shown_in.push(slot);
            }
        }
        self.counts.stitched += 1;
        self.counts.peak_range_bytes = self.counts.peak_range_bytes.max(self.ranges.bytes);
        if self.ranges.bytes > self.settings.collect_above {
            self.collect(cx, u64::MAX, &[false, true], Some(slot))?;
        }
        Ok(Some(slot))
    }

    /// Free tiles from the largest down, the last one only as far as it is needed.
    fn choose_runs(&self, stream: StreamId, size: u64) -> Option<Vec<SegmentSpan>> {
        let (mut spans, mut missing) = (Vec::new(), size);
        for slot in self.tiles.descending(SegmentPool::Large, stream) {
            let span = SegmentSpan::of(&self.tiles[slot]);
            let bytes = span.bytes.min(missing);
            spans.push(SegmentSpan { bytes, ..span });
            missing -= bytes;
            if missing == 0 {
                return Some(spans);
            }
        }
        None
    }

    /// Maps the chunks of the spans into a new range. If that fails for lack of memory, unused
    /// ranges are given back: first those whose memory is partly in use, then also the least
    /// recently used, then all.
    fn map_runs(
        &mut self,
        cx: &mut Context<'_>,
        spans: &[SegmentSpan],
        size: u64,
    ) -> Result<Option<Address>, StrategyError> {
        self.leftovers.clear(cx.device)?;
        let chunks: Vec<PhysicalId> = spans.iter().flat_map(|span| self.chunks_of(span)).copied().collect();
        for round in 0..=MAPPING_RETRIES {
            let mapped = self.map_chunks(cx, &chunks);
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

    /// Maps chunks one after the other into a new range of addresses.
    fn map_chunks(&mut self, cx: &mut Context<'_>, chunks: &[PhysicalId]) -> Result<Address, DeviceError> {
        let bytes = chunks.len() as u64 * self.chunk;
        let address = cx.device.virtual_memory()?.reserve(bytes)?;
        let sized = chunks.iter().map(|&physical| (physical, self.chunk));
        self.leftovers.map(cx.device, address, sized, [Leftover::Addresses(address, bytes)])?;
        Ok(address)
    }

    fn chunks_of(&self, span: &SegmentSpan) -> &[PhysicalId] {
        self.tiles.segment(span.segment).map_or(&[], |segment| {
            let first = ((span.address - segment.address) / self.chunk) as usize;
            &segment.chunks[first..first + (span.bytes / self.chunk) as usize]
        })
    }

    /// Waits for deferred frees, then gives everything unused back to the device.
    pub(super) fn release_cached(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.release_unused(cx)
    }
}

/// Giving memory and addresses back.
impl Stitch {
    /// Gives unused ranges back, least recently used first, until they have `limit` bytes of
    /// addresses. `wholly_free` says which kinds: those whose memory is all free (`true`) or not.
    pub(super) fn collect(
        &mut self,
        cx: &mut Context<'_>,
        limit: u64,
        wholly_free: &[bool],
        spared: Option<u32>,
    ) -> Result<(), StrategyError> {
        let mut collected = 0;
        for slot in wholly_free.iter().flat_map(|&kind| self.ranges.idle(kind)).collect::<Vec<u32>>() {
            if collected >= limit {
                break;
            }
            if spared != Some(slot) {
                collected += self.ranges[slot].bytes;
                self.drop_range(cx, slot)?;
            }
        }
        Ok(())
    }

    /// Gives the addresses of an idle range back.
    fn drop_range(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let range = &self.ranges[slot];
        let (address, bytes) = (range.address, range.bytes);
        cx.device.stream_synchronize(range.stream)?;
        cx.device.virtual_memory()?.unmap(address, bytes)?;
        self.leftovers.push(Leftover::Addresses(address, bytes));
        for index in 0..self.ranges[slot].spans.len() {
            if let Some(segment) = self.tiles.segment_mut(self.ranges[slot].spans[index].segment) {
                segment.shown_in.retain(|&shown| shown != slot);
            }
        }
        self.tiles.remove(self.ranges[slot].piece);
        self.ranges.remove(slot);
        self.counts.collected += 1;
        Ok(self.leftovers.clear(cx.device)?)
    }

    /// Gives back all unused ranges, and all segments of which nothing is in use.
    pub(super) fn release_unused(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.leftovers.clear(cx.device)?;
        self.collect(cx, u64::MAX, &[false, true], None)?;
        for number in self.tiles.free_segments() {
            self.release_segment(cx, number)?;
        }
        Ok(())
    }

    /// Gives back a segment that no range shows and of which nothing is in use.
    fn release_segment(&mut self, cx: &mut Context<'_>, number: u32) -> Result<(), StrategyError> {
        let Some(segment) = self.tiles.segment(number) else { return Ok(()) };
        let (address, bytes, stream) = (Address(segment.address), segment.bytes, segment.stream);
        match segment.pool {
            SegmentPool::Small => {
                cx.device.free(address)?;
                cx.sink.event(StrategyEvent::SegmentFree { address, bytes, stream });
            }
            SegmentPool::Large => {
                cx.device.stream_synchronize(stream)?;
                cx.device.virtual_memory()?.unmap(address, bytes)?;
                segment.chunks.iter().for_each(|&chunk| self.leftovers.push(Leftover::Physical(chunk)));
                self.leftovers.push(Leftover::Addresses(address, bytes));
                cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes, stream });
            }
        }
        self.tiles.remove_segment(number);
        self.stats.on_release(bytes, 1);
        Ok(self.leftovers.clear(cx.device)?)
    }

    /// Gives everything back, live blocks included.
    pub(super) fn release_everything(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.tiles.deferred.destroy_idle_events(cx.device)?;
        cx.device.synchronize()?;
        // Blocks are freed first, so that a failing call leaves an ordinary cache.
        let live = self.tiles.iter().filter(|(_, piece)| piece.state == PieceState::Allocated);
        let mut live: Vec<u32> = live.map(|(slot, _)| slot).collect();
        live.sort_by_key(|&slot| self.tiles[slot].region == NONE);
        for slot in live {
            let MemoryPiece { size, requested, .. } = self.tiles[slot];
            self.tiles.forget_uses(slot);
            self.stats.on_free(size);
            self.stats.on_reusable(requested, size);
            self.free_memory(slot);
        }
        self.release_unused(cx)
    }
}

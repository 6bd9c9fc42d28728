//! The page heap: ranges of addresses, the blocks in them, and the memory that is mapped into them.
//!
//! A request that no free block of its stream fits is served in this order: free memory of other
//! streams, free chunks that are moved together, new memory. A move costs one unmap for each place
//! that chunks are taken from and waits for the streams that used them last, so it is the last
//! resort before growth. The request is placed where the least memory has to come from elsewhere.

use std::{collections::BTreeSet, ops::Range};

use super::{FoundBlock, OomphAllocator, StreamFreeLists, is_planned, is_small, size_classes::PageClasses};
use crate::device::DeviceError;
use crate::strategy::{
    Context, StrategyError, StrategyEvent,
    deferred::Patience,
    pooled::{FreeLists, MemoryPiece, NONE, PerStream, PieceState, PieceTable},
};
use oomph_base::{Address, MIB, StreamId, round_up};

/// A range has addresses for this many times the device's memory, so that there is nearly always a
/// large gap.
const RANGE_PER_DEVICE: u64 = 4;

/// Where nothing moves, a range has this part of the device's memory. A program may have hundreds of pools, and all
/// addresses are 128 TiB.
const RANGES_IN_PLACE: u64 = 16;

/// Chunks are halved at each of these percentages of free memory that cannot be moved.
const LOST_PERCENT: [u64; 3] = [2, 4, 8];

/// A chunk is at most this part of reserved memory, but not smaller than [`SMALL_CHUNK`] for that reason: a small program
/// loses more in chunks that are partly in use.
const PART_OF_RESERVED: u64 = 64;
const SMALL_CHUNK: u64 = 16 * MIB;

/// Growth beyond what a request needs is at most this part of reserved memory.
const STEP_PART_OF_RESERVED: u64 = 32;

/// Neighbouring free blocks and gaps, in address order.
pub(super) type FreeRun = Vec<RunPart>;

/// A free block or a gap.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunPart {
    slot: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The stream of a free block; `None` for a gap.
    pub(super) stream: Option<StreamId>,
}

/// The parts of runs that have memory.
fn mapped_parts(runs: &[FreeRun]) -> impl Iterator<Item = &[RunPart]> {
    runs.iter().flat_map(|run| run.split(|part| part.stream.is_none())).filter(|parts| !parts.is_empty())
}

/// Neighbouring chunks that are wholly free: they can be unmapped in one call.
#[derive(Clone, Debug)]
pub(super) struct FreeChunks {
    start: u64,
    /// Their sizes, in address order.
    sizes: Vec<u64>,
    /// The free blocks that they are part of.
    parts: Vec<RunPart>,
}

impl FreeChunks {
    pub(super) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// The consecutive chunks with the fewest bytes that cover `missing`, if they are not more than
    /// `limit`; the last among equals.
    fn closest_part(&self, missing: u64, limit: u64) -> Option<FreeChunks> {
        let mut best: Option<(u64, Range<usize>)> = None;
        let (mut first, mut bytes) = (0, 0);
        for last in 0..self.sizes.len() {
            bytes += self.sizes[last];
            while bytes - self.sizes[first] >= missing {
                bytes -= self.sizes[first];
                first += 1;
            }
            if bytes >= missing && best.as_ref().is_none_or(|&(fewest, _)| bytes <= fewest) {
                best = Some((bytes, first..last + 1));
            }
        }
        let (bytes, range) = best?;
        let start = self.start + self.sizes[..range.start].iter().sum::<u64>();
        (bytes <= limit).then(|| FreeChunks { start, sizes: self.sizes[range].to_vec(), parts: self.parts.clone() })
    }
}

/// Chooses the free chunks to move so that they cover `missing` bytes, or as much of it as they
/// can, and are not more than `limit`: from few places, and little more than needed.
pub(super) fn choose_chunks(mut candidates: Vec<FreeChunks>, mut missing: u64, mut limit: u64) -> Vec<FreeChunks> {
    let mut chosen = Vec::new();
    while missing > 0 {
        let covers = candidates.iter().filter_map(|chunks| chunks.closest_part(missing, limit));
        if let Some(part) = covers.min_by_key(FreeChunks::bytes) {
            chosen.push(part);
            break;
        }
        let fits = (0..candidates.len()).filter(|&index| candidates[index].bytes() <= limit);
        let Some(largest) = fits.max_by_key(|&index| candidates[index].bytes()) else { break };
        let chunks = candidates.swap_remove(largest);
        missing = missing.saturating_sub(chunks.bytes());
        limit -= chunks.bytes();
        chosen.push(chunks);
    }
    chosen
}

/// Where a request is placed: the part of a gap that must be filled so that it makes one free block
/// with its free neighbours.
#[derive(Clone, Copy, Debug)]
struct PlacementSite {
    /// The addresses to fill. Nothing is mapped after them up to `limit`.
    fill: (u64, u64),
    limit: u64,
    /// The free memory on either side that the request needs: it is not moved away.
    kept: (u64, u64),
}

impl PlacementSite {
    fn missing(&self) -> u64 {
        self.fill.1 - self.fill.0
    }
}

/// Finding memory for requests.
impl OomphAllocator {
    /// A free block of the page heap for the stream, in no list, and whether new memory was needed;
    /// `None` if the device has no more.
    pub(super) fn find_in_pages(&mut self, cx: &mut Context<'_>, stream: StreamId, bytes: u64) -> FoundBlock {
        let found = self.find_outside_plan(cx, stream, bytes)?;
        if found.is_some() || !self.is_placed {
            return Ok(found);
        }
        self.give_up_plan(cx)?;
        self.find_outside_plan(cx, stream, bytes)
    }

    /// The same, without the memory of a plan. While there is a plan, memory grows only as [`OomphAllocator::may_grow_beside_plan`] allows.
    fn find_outside_plan(&mut self, cx: &mut Context<'_>, stream: StreamId, bytes: u64) -> FoundBlock {
        if let Some(slot) = self.take_cached(stream, bytes, false) {
            return Ok(Some((slot, false)));
        }
        if self.return_empty_slabs()
            && let Some(slot) = self.take_cached(stream, bytes, false)
        {
            return Ok(Some((slot, false)));
        }
        if !self.is_fixed()
            && let Some(slot) = self.take_over(cx, stream, bytes)?
        {
            return Ok(Some((slot, false)));
        }
        self.mapping.mend(cx.device)?;
        let fixed = self.is_fixed();
        let runs = self.runs(|owner| !fixed || owner == stream);
        let (slot, created) = match self.joined(&runs, bytes) {
            Some(slot) => (slot, false),
            None => {
                if !self.may_grow_beside_plan(bytes) {
                    return Ok(None);
                }
                self.look_for_step();
                let site = match self.cheapest_site(&runs, bytes) {
                    Some(site) => site,
                    None => self.new_range(cx, bytes)?,
                };
                match self.fill(cx, &runs, &site, stream)? {
                    Some(filled) => filled,
                    None => return Ok(None),
                }
            }
        };
        let united = self.unite(cx, slot, stream, bytes)?;
        Ok(united.map(|slot| (slot, created)))
    }

    /// All gaps of the page heap and the free blocks of the wanted streams, neighbours together, in address order.
    pub(super) fn runs(&self, wanted: impl Fn(StreamId) -> bool) -> Vec<FreeRun> {
        let free = self.free.iter().zip(0u16..).filter(|&(_, stream)| wanted(StreamId(stream)));
        let free = free.flat_map(|(free, _)| free.pages.iter(&self.blocks));
        let mut slots: Vec<u32> = free.chain(self.gaps.values().copied()).collect();
        slots.sort_unstable_by_key(|&slot| self.blocks[slot].address);
        let mut runs: Vec<FreeRun> = Vec::new();
        let mut follows = NONE;
        for slot in slots {
            let piece = &self.blocks[slot];
            let stream = (piece.state == PieceState::Free).then_some(piece.stream);
            let part = RunPart { slot, start: piece.address, end: piece.end(), stream };
            match runs.last_mut() {
                Some(run) if follows == slot => run.push(part),
                _ => runs.push(vec![part]),
            }
            follows = piece.next;
        }
        runs
    }

    /// The first of neighbouring free blocks of several streams that are large enough together.
    fn joined(&self, runs: &[FreeRun], bytes: u64) -> Option<u32> {
        let together = mapped_parts(runs).map(|parts| (parts[parts.len() - 1].end - parts[0].start, parts[0].slot));
        together.filter(|&(free, _)| free >= bytes).min_by_key(|&(free, _)| free).map(|(_, slot)| slot)
    }

    /// The site where the least memory is missing.
    fn cheapest_site(&self, runs: &[FreeRun], bytes: u64) -> Option<PlacementSite> {
        let sites = runs.iter().flat_map(|run| {
            let gaps = (0..run.len()).filter(|&index| run[index].stream.is_none());
            gaps.filter_map(|index| self.site_at(run, index, bytes))
        });
        sites.min_by_key(|site| (site.missing(), site.fill.0))
    }

    /// How a request would be placed over one gap of a run.
    fn site_at(&self, run: &[RunPart], index: usize, bytes: u64) -> Option<PlacementSite> {
        let gap = run[index];
        let before = run[..index].iter().rev().take_while(|part| part.stream.is_some()).last();
        let behind = run[index + 1..].iter().take_while(|part| part.stream.is_some()).last();
        let low = before.map_or(gap.start, |part| part.start);
        let high = behind.map_or(gap.end, |part| part.end);
        let after_front = round_up(bytes.saturating_sub(gap.start - low), self.page);
        let before_rear = round_up(bytes.saturating_sub(high - gap.end), self.page);
        let at = |fill: (u64, u64), kept| PlacementSite { fill, limit: gap.end, kept };
        if after_front.min(before_rear) <= gap.end - gap.start {
            Some(if after_front <= before_rear {
                at((gap.start, gap.start + after_front), (low, gap.start))
            } else {
                at((gap.end - before_rear, gap.end), (gap.end, high))
            })
        } else {
            (high - low >= bytes).then(|| at((gap.start, gap.end), (low, high)))
        }
    }

    /// Addresses for a request that fits nowhere.
    fn new_range(&mut self, cx: &mut Context<'_>, bytes: u64) -> Result<PlacementSite, DeviceError> {
        let device = round_up(self.device_bytes, self.page);
        let range = if self.in_place {
            round_up(bytes.max(device / RANGES_IN_PLACE), self.page)
        } else {
            device * RANGE_PER_DEVICE
        };
        let base = self.mapping.reserve(cx.device, range)?;
        let gap =
            MemoryPiece { note: NONE, state: PieceState::Unmapped, ..MemoryPiece::new(base, range, StreamId::DEFAULT) };
        let gap = self.blocks.insert(gap);
        self.gaps.insert(base, gap);
        let fill = (base, base + round_up(bytes, self.page));
        Ok(PlacementSite { fill, limit: base + range, kept: (base, base) })
    }

    /// Maps memory into a site: free chunks from elsewhere, and new ones for the rest. Returns the
    /// free block there, and whether any of its memory is new; `None`, with nothing changed, if the
    /// device has no more.
    fn fill(&mut self, cx: &mut Context<'_>, runs: &[FreeRun], site: &PlacementSite, stream: StreamId) -> FoundBlock {
        // Chunks that an earlier failure left loose would be mapped too, and may not fit here.
        self.mapping.release_loose(cx.device)?;
        let room = site.limit - site.fill.0;
        let mut taken = Vec::new();
        let may_grow = self.is_fixed() || self.may_grow(site.missing());
        let grown = may_grow && self.create(cx, site.missing(), room)?;
        if !grown {
            if self.is_fixed() {
                return Ok(None);
            }
            taken = choose_chunks(self.free_chunks(runs, site.kept), site.missing(), room);
            let moved: u64 = taken.iter().map(FreeChunks::bytes).sum();
            let shortfall = site.missing().saturating_sub(moved);
            let was_refused = may_grow && moved == 0;
            if shortfall > 0 && (was_refused || !self.create(cx, shortfall, room - moved)?) {
                return Ok(None);
            }
        }
        let created = self.mapping.loose_bytes() > 0;
        let mapped = self.map_chunks(cx, taken, site.fill.0, stream)?;
        Ok(Some((mapped, created)))
    }

    /// Maps free chunks from elsewhere and all loose chunks from `low` on; returns the free block there.
    pub(super) fn map_chunks(
        &mut self,
        cx: &mut Context<'_>,
        taken: Vec<FreeChunks>,
        low: u64,
        stream: StreamId,
    ) -> Result<u32, StrategyError> {
        self.unmap_chunks(cx, &taken)?;
        self.count_moved(&taken);
        let chunks = self.mapping.mapped_chunks();
        let high = self.mapping.map_loose(cx.device, low)?;
        cx.sink.event(StrategyEvent::SegmentMap { address: Address(low), bytes: high - low, stream });
        self.stats.on_reserve(high - low, self.mapping.mapped_chunks() - chunks);
        let mapped = self.turn_mapped(low, high, stream);
        self.insert_free(mapped);
        Ok(mapped)
    }

    fn count_moved(&mut self, taken: &[FreeChunks]) {
        self.counters.moves += u64::from(!taken.is_empty());
        self.counters.chunks_moved += taken.iter().map(|chunks| chunks.sizes.len() as u64).sum::<u64>();
        self.counters.bytes_moved += taken.iter().map(FreeChunks::bytes).sum::<u64>();
    }

    /// Joins a free block with its free neighbours of all streams, until it is large enough for the
    /// stream; returns it, in no list.
    fn unite(
        &mut self,
        cx: &mut Context<'_>,
        mut slot: u32,
        stream: StreamId,
        bytes: u64,
    ) -> Result<Option<u32>, StrategyError> {
        let mut waited = vec![stream];
        let mut joins = slot;
        loop {
            let owner = self.blocks[joins].stream;
            if !waited.contains(&owner) {
                self.wait_event.wait(cx.device, stream, owner)?;
                waited.push(owner);
            }
            self.remove_free(joins);
            self.counters.blocks_taken_over += u64::from(owner != stream);
            self.blocks[joins].stream = stream;
            slot = self.merge(joins);
            if self.blocks[slot].size >= bytes {
                return Ok(Some(slot));
            }
            self.insert_free(slot);
            let piece = &self.blocks[slot];
            let joinable = |&other: &u32| self.blocks.free_piece(other).is_some_and(|other| !is_planned(other));
            match [piece.previous, piece.next].into_iter().find(joinable) {
                Some(other) => joins = other,
                None => return Ok(None),
            }
        }
    }

    /// Whether growth by this much keeps reserved memory within the slack over peak live memory.
    pub(super) fn may_grow(&self, bytes: u64) -> bool {
        let highest = self.stats.peak.active.max(self.stats.current.active + bytes);
        let allowed = highest + highest / 1000 * self.settings.slack_permille;
        self.settings.slack_permille > 0 && self.stats.current.reserved + bytes <= allowed
    }

    /// The size of new chunks: smaller ones where much free memory is in chunks that are partly in use, because those cannot be
    /// moved, and where there is little memory.
    fn chunk_for(&self, growth: u64) -> u64 {
        let reserved = self.stats.current.reserved;
        let most = ((reserved + growth) / PART_OF_RESERVED).max(SMALL_CHUNK).min(self.largest_chunk());
        let chunk = self.settings.chunk_for(growth, self.page).min(most);
        let movable: u64 = self.free_chunks(&self.runs(|_| true), (0, 0)).iter().map(FreeChunks::bytes).sum();
        let planned: u64 = self.planned_free.iter().map(|slot| self.blocks[slot].size).sum();
        let cached = reserved - self.stats.current.active;
        let lost = cached.saturating_sub(movable + planned) * 100 / self.stats.peak.active.max(1);
        let halvings = LOST_PERCENT.iter().filter(|&&percent| lost >= percent).count();
        round_up((chunk >> halvings).max(1), self.page)
    }

    /// Creates loose chunks of `bytes` in sum, or of the growth step where there is room for it.
    /// Returns false, and has created none, if the device has no more.
    pub(super) fn create(&mut self, cx: &mut Context<'_>, bytes: u64, room: u64) -> Result<bool, StrategyError> {
        // A part of what is reserved already, so that a small program reserves little.
        let step =
            round_up(self.settings.growth_step.min(self.stats.current.reserved / STEP_PART_OF_RESERVED), self.page);
        let generous = bytes.max(step).min(room);
        let largest = self.chunk_for(bytes);
        let mut amounts = vec![generous, bytes];
        amounts.dedup();
        // The last chunk would be refused, after many that are created for nothing and taken from other processes.
        let most = self.available().saturating_sub(self.stats.current.reserved);
        amounts.retain(|&amount| amount <= most);
        for amount in amounts {
            let mut rest = amount;
            while rest > 0 {
                let chunk = rest.min(largest);
                if !self.mapping.create(cx.device, chunk)? {
                    break;
                }
                rest -= chunk;
                self.counters.chunks_created += 1;
                self.counters.bytes_created += chunk;
            }
            if rest == 0 {
                return Ok(true);
            }
            self.mapping.release_loose(cx.device)?;
        }
        Ok(false)
    }

    /// The free chunks of all runs outside of `kept`.
    pub(super) fn free_chunks(&self, runs: &[FreeRun], kept: (u64, u64)) -> Vec<FreeChunks> {
        let elsewhere =
            mapped_parts(runs).filter(|parts| parts[parts.len() - 1].end <= kept.0 || kept.1 <= parts[0].start);
        let candidates = elsewhere.filter_map(|parts| {
            let mut chunks = self.mapping.chunks_within(parts[0].start, parts[parts.len() - 1].end).peekable();
            let start = chunks.peek()?.0;
            Some(FreeChunks { start, sizes: chunks.map(|(_, chunk)| chunk.bytes).collect(), parts: parts.to_vec() })
        });
        candidates.collect()
    }

    /// The parts of these streams' free blocks that are in chunks that are partly in use: they can serve requests, but not be moved.
    pub(super) fn free_in_used_chunks(
        &self,
        runs: &[FreeRun],
        streams: &BTreeSet<StreamId>,
    ) -> Vec<(StreamId, Range<u64>)> {
        let in_parts = mapped_parts(runs).flat_map(|parts| {
            let (start, end) = (parts[0].start, parts[parts.len() - 1].end);
            let mut chunks = self.mapping.chunks_within(start, end);
            let first = chunks.next();
            let last = chunks.next_back().or(first);
            let movable = first.map_or(end, |(low, _)| low)..last.map_or(end, |(low, chunk)| low + chunk.bytes);
            let owned = parts.iter().filter_map(|part| Some((part.stream?, part)));
            owned.filter(|(stream, _)| streams.contains(stream)).flat_map(move |(stream, part)| {
                let sides = [part.start..part.end.min(movable.start), part.start.max(movable.end)..part.end];
                sides.map(|side| (stream, side))
            })
        });
        in_parts.filter(|(_, range)| !range.is_empty()).collect()
    }

    /// Unmaps free chunks, after all work on them is done. They are loose then.
    fn unmap_chunks(&mut self, cx: &mut Context<'_>, taken: &[FreeChunks]) -> Result<(), StrategyError> {
        let mut waited: Vec<StreamId> = Vec::new();
        for chunks in taken {
            let (start, end) = (chunks.start, chunks.start + chunks.bytes());
            let parts = || chunks.parts.iter().filter(|part| part.start < end && start < part.end);
            for stream in parts().filter_map(|part| part.stream) {
                if !waited.contains(&stream) {
                    cx.device.stream_synchronize(stream)?;
                    waited.push(stream);
                }
            }
            self.mapping.unmap(cx.device, start, end)?;
            for part in parts() {
                self.turn_unmapped(part.slot, part.start.max(start), part.end.min(end));
            }
            let (address, stream) = (Address(start), chunks.parts[0].stream.unwrap_or_default());
            cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes: end - start, stream });
            self.stats.on_release(end - start, chunks.sizes.len() as u64);
        }
        Ok(())
    }

    /// Takes the front of a free block of another stream, if one is large enough; it is in no list.
    /// The next work of `stream` waits for what the other stream has queued so far.
    fn take_over(&mut self, cx: &mut Context<'_>, stream: StreamId, bytes: u64) -> Result<Option<u32>, StrategyError> {
        let others = self.free.iter().zip(0u16..).filter(|&(_, other)| StreamId(other) != stream);
        let candidates = others.filter_map(|(free, _)| free.pages.find_best(&self.blocks, bytes, usize::MAX));
        let Some(slot) = candidates.min_by_key(|&slot| (self.blocks[slot].size, self.blocks[slot].address)) else {
            return Ok(None);
        };
        self.wait_event.wait(cx.device, stream, self.blocks[slot].stream)?;
        self.remove_free(slot);
        self.cut_off(slot, bytes);
        self.blocks[slot].stream = stream;
        self.counters.blocks_taken_over += 1;
        Ok(Some(slot))
    }
}

/// The lists that a free block belongs to.
#[inline(always)]
fn lists_of<'a>(free: &'a mut PerStream<StreamFreeLists>, piece: &MemoryPiece) -> &'a mut FreeLists<PageClasses> {
    let free = free.of(piece.stream);
    if is_small(piece) { &mut free.small } else { &mut free.pages }
}

/// Blocks: free lists, merging, slabs, mapped and unmapped.
impl OomphAllocator {
    #[inline(always)]
    pub(super) fn insert_free(&mut self, slot: u32) {
        if is_planned(&self.blocks[slot]) {
            self.planned_free.insert(self.blocks[slot].address, slot);
            return;
        }
        lists_of(&mut self.free, &self.blocks[slot]).insert(&mut self.blocks, slot);
    }

    #[inline(always)]
    pub(super) fn remove_free(&mut self, slot: u32) {
        if is_planned(&self.blocks[slot]) {
            self.planned_free.remove(self.blocks[slot].address);
            return;
        }
        lists_of(&mut self.free, &self.blocks[slot]).remove(&mut self.blocks, slot);
    }

    /// Takes a free block of the stream, whatever the length of the search.
    pub(super) fn take_cached(&mut self, stream: StreamId, bytes: u64, small: bool) -> Option<u32> {
        let free = self.free.of(stream);
        let lists = if small { &mut free.small } else { &mut free.pages };
        let slot = lists.find_best(&self.blocks, bytes, usize::MAX)?;
        lists.remove(&mut self.blocks, slot);
        Some(slot)
    }

    /// Makes a block free, merged with its free neighbours of the same stream.
    #[inline(always)]
    pub(super) fn free_block(&mut self, slot: u32) {
        self.blocks[slot].state = PieceState::Free;
        let piece = &self.blocks[slot];
        if is_planned(piece) {
            self.plan.iter_mut().for_each(|plan| plan.note_free(piece));
        }
        let merged = self.merge(slot);
        self.insert_free(merged);
    }

    /// Cuts off what a block has beyond `bytes`, which becomes free; returns whether it had more.
    #[inline(always)]
    pub(super) fn cut_off(&mut self, slot: u32, bytes: u64) -> bool {
        let cut = self.blocks[slot].size > bytes;
        if cut {
            let rest = self.blocks.cut(slot, bytes);
            self.insert_free(rest);
        }
        cut
    }

    /// Merges a free block that is in no list with its free neighbours of the same stream, and
    /// returns its slot. In the memory of a plan streams do not matter: requests wait for those that they share memory with.
    #[inline(always)]
    pub(super) fn merge(&mut self, slot: u32) -> u32 {
        let stream = self.blocks[slot].stream;
        let (free, planned_free) = (&mut self.free, &mut self.planned_free);
        if is_planned(&self.blocks[slot]) {
            let take_out = |blocks: &mut PieceTable, gone: u32| {
                planned_free.remove(blocks[gone].address);
            };
            return self.blocks.join_free(slot, is_planned, take_out);
        }
        let take_out = |blocks: &mut PieceTable, gone| lists_of(free, &blocks[gone]).remove(blocks, gone);
        self.blocks.join_free(slot, |piece| piece.stream == stream && !is_planned(piece), take_out)
    }

    /// The part `low..high` of a free block was unmapped; the rest on either side stays free.
    fn turn_unmapped(&mut self, mut slot: u32, low: u64, high: u64) {
        self.remove_free(slot);
        if high < self.blocks[slot].end() {
            let tail = self.blocks.cut(slot, high - self.blocks[slot].address);
            self.insert_free(tail);
        }
        if self.blocks[slot].address < low {
            let rest = self.blocks.cut(slot, low - self.blocks[slot].address);
            self.insert_free(slot);
            slot = rest;
        }
        self.blocks[slot].state = PieceState::Unmapped;
        let (previous, next) = (self.blocks[slot].previous, self.blocks[slot].next);
        if self.is_gap(next) {
            self.gaps.remove(&self.blocks[next].address);
            self.blocks.join_next(slot);
        }
        if self.is_gap(previous) {
            self.blocks.join_next(previous);
        } else {
            self.gaps.insert(self.blocks[slot].address, slot);
        }
    }

    /// The part `low..high` of a gap was mapped for `stream`; returns the free block that it is
    /// part of, in no list.
    fn turn_mapped(&mut self, low: u64, high: u64, stream: StreamId) -> u32 {
        let Some((_, &gap)) = self.gaps.range(..=low).next_back() else { return NONE };
        let mut slot = gap;
        if high < self.blocks[slot].end() {
            let tail = self.blocks.cut(slot, high - self.blocks[slot].address);
            self.gaps.insert(high, tail);
        }
        if self.blocks[slot].address < low {
            slot = self.blocks.cut(slot, low - self.blocks[slot].address);
        } else {
            self.gaps.remove(&low);
        }
        let piece = &mut self.blocks[slot];
        piece.state = PieceState::Free;
        piece.stream = stream;
        self.merge(slot)
    }

    fn is_gap(&self, slot: u32) -> bool {
        slot != NONE && self.blocks[slot].state == PieceState::Unmapped
    }

    /// Makes a slab of a free page-heap block that is in no list; returns the small block that
    /// fills it, in no list either. A slab belongs to the stream that made it.
    pub(super) fn make_slab(&mut self, slot: u32) -> u32 {
        self.cut_off(slot, self.settings.slab_bytes);
        self.blocks[slot].state = PieceState::Slab;
        let MemoryPiece { address, size, stream, .. } = self.blocks[slot];
        self.counters.slabs_made += 1;
        self.blocks.insert(MemoryPiece { note: slot, ..MemoryPiece::new(address, size, stream) })
    }

    /// Gives every empty slab back to the page heap; returns whether there was one. Empty slabs
    /// stay in the lists of small blocks until the page heap needs memory.
    fn return_empty_slabs(&mut self) -> bool {
        let before = self.counters.slabs_returned;
        for stream in (0..self.free.len()).map(|stream| StreamId(stream as u16)) {
            while let Some(whole) = self.take_cached(stream, self.settings.slab_bytes, true) {
                let slab = self.blocks[whole].note;
                self.blocks.remove(whole);
                self.free_block(slab);
                self.counters.slabs_returned += 1;
            }
        }
        self.counters.slabs_returned > before
    }
}

/// Giving memory back to the device.
impl OomphAllocator {
    /// Gives back every wholly free chunk of all streams but those in `except`.
    pub(super) fn release_cached(&mut self, cx: &mut Context<'_>, except: &[StreamId]) -> Result<(), StrategyError> {
        self.give_up_plan(cx)?;
        self.mapping.mend(cx.device)?;
        self.return_empty_slabs();
        let candidates = self.free_chunks(&self.runs(|stream| !except.contains(&stream)), (0, 0));
        self.unmap_chunks(cx, &candidates)?;
        Ok(self.mapping.release_loose(cx.device)?)
    }

    /// Gives everything back, live blocks included.
    pub(super) fn release_everything(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        (self.captures, self.in_place) = (0, false);
        self.complete_frees(cx, Patience::Wait)?;
        self.give_up_plan(cx)?;
        self.blocks.deferred.destroy_idle_events(cx.device)?;
        self.wait_event.destroy(cx.device)?;
        if !self.mapping.is_empty() {
            cx.device.synchronize()?;
        }
        // Blocks are freed first, so that a failing call leaves an ordinary cache.
        let live = self.blocks.iter().filter(|(_, piece)| piece.state == PieceState::Allocated);
        let live: Vec<u32> = live.map(|(slot, _)| slot).collect();
        for slot in live {
            let MemoryPiece { requested, size, .. } = self.blocks[slot];
            self.blocks.forget_uses(slot);
            self.free_block(slot);
            self.stats.on_free(size);
            self.stats.on_reusable(requested, size);
        }
        self.release_cached(cx, &[])?;
        while let Some(base) = self.mapping.release_range(cx.device)? {
            if let Some(gap) = self.gaps.remove(&base) {
                self.blocks.remove(gap);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunks(start: u64, sizes: &[u64]) -> FreeChunks {
        FreeChunks { start, sizes: sizes.to_vec(), parts: Vec::new() }
    }

    fn starts(chosen: &[FreeChunks]) -> Vec<(u64, u64)> {
        chosen.iter().map(|chunks| (chunks.start, chunks.bytes())).collect()
    }

    #[test]
    fn one_place_is_preferred() {
        let candidates = vec![chunks(100, &[8, 2, 4, 8]), chunks(200, &[8, 8])];
        assert_eq!(starts(&choose_chunks(candidates.clone(), 6, 100)), [(108, 6)]);
        assert_eq!(starts(&choose_chunks(candidates, 12, 100)), [(110, 12)]);
    }

    #[test]
    fn many_places_are_emptied_the_largest_first() {
        let candidates = vec![chunks(100, &[4]), chunks(200, &[8, 8]), chunks(300, &[2, 4])];
        assert_eq!(starts(&choose_chunks(candidates.clone(), 19, 100)), [(200, 16), (100, 4)]);
        assert_eq!(starts(&choose_chunks(candidates, 1000, 1000)), [(200, 16), (300, 6), (100, 4)]);
    }

    proptest! {
        #[test]
        fn chosen_chunks_fit_and_suffice_where_they_can(
            sizes in prop::collection::vec(prop::collection::vec(1u64..20, 1..6), 0..6),
            missing in 1u64..150,
            spare in 0u64..40,
        ) {
            let candidates: Vec<FreeChunks> =
                (0..).zip(&sizes).map(|(place, sizes)| chunks(place * 1000, sizes)).collect();
            let all: u64 = candidates.iter().map(FreeChunks::bytes).sum();
            let chosen: u64 = choose_chunks(candidates, missing, missing + spare).iter().map(FreeChunks::bytes).sum();
            prop_assert!(chosen <= missing + spare);
            // With room for any one chunk more than needed, only lack of chunks is an excuse.
            if spare >= 20 && all >= missing {
                prop_assert!(chosen >= missing);
            }
        }
    }
}

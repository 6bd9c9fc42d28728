//! The steps of an allocation: search, cut, and what is done when nothing cached fits.

use super::{
    Caching, Grown, OWN_SEGMENT, OWN_SEGMENT_STEP, QUANTUM, SMALL_SEGMENT, SMALL_SIZE,
    blocks::{NONE, Record, State},
    free_index::Entry,
    pools::DEFAULT_POOL,
};
use crate::{
    strategy::{Attempt, Block, Context, Outcome, Refusal, Request, Shortage, StrategyError, StrategyEvent},
    unit::{Address, StreamId, round_up},
};

impl Caching {
    /// Best fit among the free blocks of an arena. The block found is taken out. Only one candidate is looked at: if
    /// the rules for oversize blocks refuse it, larger ones are not tried.
    #[inline(always)]
    pub(super) fn find_free(&mut self, arena: u32, rounded: u64, expandable: bool) -> Option<u32> {
        let collects = self.collects_garbage();
        let owner = &mut self.pools.arenas[arena as usize];
        if collects {
            self.pools.sides[owner.side as usize].clock += 1;
        }
        let mut found = owner.free.first_at_least(rounded)?;
        if self.blocks[found.slot].is_expandable() && (!expandable || self.extension(found.slot) > 0) {
            found = self.prefer_short_extension(arena, found, expandable)?;
        }
        let size = found.size;
        let oversize = self.settings.max_split_size;
        let refused = if rounded < oversize {
            size >= oversize
        } else {
            size >= rounded.saturating_add(self.settings.max_non_split_rounding)
        };
        if refused {
            return None;
        }
        self.pools.arenas[arena as usize].free.remove(found);
        Some(found.slot)
    }

    /// Walks up from an expandable block: to one that can extend less far while expandable segments are on (a block in
    /// front of unmapped addresses counts with those), to the first ordinary block while they are off.
    #[inline(never)]
    fn prefer_short_extension(&self, arena: u32, mut found: Entry, expandable: bool) -> Option<Entry> {
        let free = &self.pools.arenas[arena as usize].free;
        if !expandable {
            let mut candidates = free.ascending(found.size, found.address);
            return candidates.find(|candidate| !self.blocks[candidate.slot].is_expandable());
        }
        // Blocks come in ascending size: none can reach less far than one that cannot extend at all.
        let mut reach = found.size + self.extension(found.slot);
        while reach > found.size
            && self.blocks[found.slot].is_expandable()
            && let Some(next) = free.after(found.size, found.address)
            && next.size + self.extension(next.slot) < reach
        {
            reach = next.size + self.extension(next.slot);
            found = next;
        }
        Some(found)
    }

    /// By how many unmapped bytes behind it a block could be extended.
    #[inline]
    fn extension(&self, slot: u32) -> u64 {
        let next = self.blocks.get(self.blocks[slot].next);
        next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
    }

    #[inline]
    fn collects_garbage(&self) -> bool {
        self.limit.is_some() && self.settings.garbage_collection_threshold > 0.0
    }

    /// Makes a block the caller's, cutting off what it does not need.
    #[inline(always)]
    pub(super) fn hand_out(&mut self, slot: u32, requested: u64, rounded: u64, expandable: bool) -> (Block, bool) {
        let block = &self.blocks[slot];
        let (address, size) = (block.address, block.size);
        let (was_split, tracked) = (block.is_split(), !block.is_expandable());
        let owner = &mut self.pools.arenas[block.arena as usize];
        let large = owner.is_large();
        let remainder = size - rounded;
        let cut = if large && !expandable {
            rounded < self.settings.max_split_size && remainder > SMALL_SIZE
        } else {
            remainder >= QUANTUM
        };
        let mut taken = slot;
        if cut {
            let clock = self.pools.sides[owner.side as usize].clock;
            owner.free.insert(Entry { size: remainder, address: address + rounded, slot });
            taken = self.blocks.cut_front(slot, rounded);
            self.blocks[slot].shelved_at = clock;
        }
        if tracked {
            match (cut, was_split) {
                (true, true) => self.books.lower_inactive_split(large, 0, rounded),
                (true, false) => self.books.raise_inactive_split(large, 1, remainder),
                (false, true) => self.books.lower_inactive_split(large, 1, size),
                (false, false) => {}
            }
        }
        let block = &mut self.blocks[taken];
        block.state = State::Allocated;
        block.requested = requested;
        block.generation = block.generation.wrapping_add(1);
        let handle = Block { address: Address(address), size: block.size, slot: taken, generation: block.generation };
        self.books.on_alloc(large, requested, handle.size);
        if handle.size >= self.settings.max_split_size {
            self.books.oversize_allocations.raise();
        }
        (handle, cut)
    }

    /// No cached block fits: new memory, and what may be done to get it.
    #[cold]
    pub(super) fn alloc_from_device(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        rounded: u64,
        arena: u32,
    ) -> Result<Attempt, StrategyError> {
        let expandable = self.settings.expandable_segments;
        let asked = self.segment_size(rounded);
        if let Some(limit) = self.limit.filter(|_| self.collects_garbage()) {
            self.collect_garbage(cx, limit)?;
        }
        let mut outcome = Outcome::NewSegment;
        let mut grown = self.grow(cx, arena, rounded, asked)?;
        if grown.is_err()
            && self.pools.arenas[arena as usize].pool() == DEFAULT_POOL
            && let Some(slot) = self.find_in_fallback_pools(request.stream, rounded)
        {
            let (block, cut) = self.hand_out(slot, request.bytes, rounded, false);
            return Ok(Attempt::Served(block, if cut { Outcome::Split } else { Outcome::Hit }));
        }
        if grown.is_err() && self.release_available(cx, arena, rounded)? {
            outcome = Outcome::ReleaseAndRetry;
            grown = self.grow(cx, arena, rounded, asked)?;
        }
        if grown.is_err() && !self.pools.is_capturing() {
            self.release_cached(cx)?;
            self.books.retries += 1;
            cx.sink.event(StrategyEvent::Retry { rounded });
            outcome = Outcome::ReleaseAndRetry;
            grown = self.grow(cx, arena, rounded, asked)?;
        }
        match grown {
            Ok(slot) => Ok(Attempt::Served(self.hand_out(slot, request.bytes, rounded, expandable).0, outcome)),
            Err(refused_by) => {
                let device_free = Some(cx.device.memory_info()?.free);
                let stream = request.stream;
                cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free });
                self.books.ooms += 1;
                Ok(Attempt::OutOfMemory(Shortage { rounded, asked, refused_by, device_free }))
            }
        }
    }

    /// Takes new memory within the limit. The limit is tested on the size of a segment, whatever will be mapped.
    fn grow(&mut self, cx: &mut Context<'_>, arena: u32, rounded: u64, asked: u64) -> Result<Grown, StrategyError> {
        if self.limit.is_some_and(|limit| self.reserved.saturating_add(asked) > limit) {
            return Ok(Err(Refusal::Limit));
        }
        if self.settings.expandable_segments {
            return self.grow_expandable(cx, arena, rounded);
        }
        let address = match cx.device.alloc(asked) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(Err(Refusal::Device)),
            Err(error) => return Err(error.into()),
        };
        let owner = &self.pools.arenas[arena as usize];
        self.reserved += asked;
        self.books.on_segment_alloc(owner.is_large(), asked);
        if asked >= self.settings.max_split_size {
            self.books.oversize_segments.raise();
        }
        self.pools.pools[owner.pool() as usize].segments += 1;
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes: asked, stream: owner.stream });
        Ok(Ok(self.blocks.insert(Record::lone(address.0, asked, arena, NONE, State::Free))))
    }

    /// A cached block of a private pool that was offered for times of need. It never grows for that.
    fn find_in_fallback_pools(&mut self, stream: StreamId, rounded: u64) -> Option<u32> {
        self.pools.fallbacks().into_iter().find_map(|pool| {
            let arena = self.pools.arena(pool * 2 + u32::from(rounded > SMALL_SIZE), stream);
            self.find_free(arena, rounded, false)
        })
    }

    /// What is asked of the device for a rounded request.
    fn segment_size(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_SIZE {
            SMALL_SEGMENT
        } else if rounded < OWN_SEGMENT {
            self.settings.large_segment_size
        } else {
            round_up(rounded, OWN_SEGMENT_STEP)
        }
    }
}

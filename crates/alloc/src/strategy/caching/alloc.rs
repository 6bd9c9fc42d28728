//! The steps of an allocation: search, cut, and what is done when nothing cached fits.

use super::{
    Caching, Grown, Wish,
    blocks::{Blocks, NONE, Record, State},
    free_index::{Entry, FreeIndex},
    pools::{Arena, DEFAULT_POOL},
    statistics::Books,
};
use crate::strategy::{Attempt, Block, Context, Outcome, Refusal, Shortage, StrategyError, StrategyEvent};
use oomph_base::{Address, StreamId};
use oomph_pytorch::{AllocatorSettings, MIN_BLOCK_SIZE, SMALL_SIZE};

impl Caching {
    /// Serves a request from the free blocks of an arena, if one fits.
    #[inline(always)]
    pub(super) fn alloc_cached(&mut self, arena: u32, wish: Wish) -> Option<(Block, Outcome)> {
        if self.rare.collects_garbage {
            self.pools.tick(arena);
        }
        let owner = &mut self.pools.arenas[arena as usize];
        let found = best_fit(owner, &self.blocks, &self.settings, &wish)?;
        owner.free.remove(found);
        let (block, cut) = hand_out(found, &wish, owner, &mut self.blocks, &mut self.books, &self.settings);
        Some((block, if cut { Outcome::Split } else { Outcome::Hit }))
    }

    /// No cached block fits: new memory, and what may be done to get it.
    #[cold]
    pub(super) fn alloc_from_device(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        wish: Wish,
        arena: u32,
    ) -> Result<Attempt, StrategyError> {
        let rounded = wish.rounded;
        let asked = self.settings.allocation_size(rounded);
        if let Some(limit) = self.limit.filter(|_| self.rare.collects_garbage) {
            self.collect_garbage(cx, limit)?;
        }
        let mut outcome = Outcome::NewSegment;
        let mut grown = self.grow(cx, arena, rounded, asked)?;
        if grown.is_err()
            && self.pools.arenas[arena as usize].pool() == DEFAULT_POOL
            && let Some((block, outcome)) = self.alloc_from_fallback_pools(stream, wish)
        {
            return Ok(Attempt::Served(block, outcome));
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
            Ok(slot) => {
                let grown = self.blocks[slot].entry(slot);
                let owner = &mut self.pools.arenas[arena as usize];
                let (block, _) = hand_out(grown, &wish, owner, &mut self.blocks, &mut self.books, &self.settings);
                Ok(Attempt::Served(block, outcome))
            }
            Err(refused_by) => {
                let device_free = Some(cx.device.memory_info()?.free);
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
        Ok(Ok(self.book_segment(cx, arena, address, asked)))
    }

    /// Enters a segment that the device has granted into the books, as one block that is not among the free ones.
    pub(super) fn book_segment(&mut self, cx: &mut Context<'_>, arena: u32, address: Address, bytes: u64) -> u32 {
        let owner = &self.pools.arenas[arena as usize];
        self.reserved += bytes;
        self.books.on_segment_alloc(owner.is_large(), bytes);
        if bytes >= self.settings.max_split_size {
            self.books.oversize_segments.raise();
        }
        self.pools.pools[owner.pool() as usize].segments += 1;
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream: owner.stream });
        self.blocks.insert(Record::lone(address.0, bytes, arena, NONE, State::Free))
    }

    /// A cached block of a private pool that was offered for times of need. It never grows for that.
    fn alloc_from_fallback_pools(&mut self, stream: StreamId, wish: Wish) -> Option<(Block, Outcome)> {
        self.pools.fallbacks().into_iter().find_map(|pool| {
            let arena = self.pools.arena(pool * 2 + u32::from(wish.rounded > SMALL_SIZE), stream);
            self.alloc_cached(arena, Wish { expandable: false, ..wish })
        })
    }
}

/// Best fit among the free blocks of an arena. Only one candidate is looked at: if the rules for oversize blocks refuse
/// it, larger ones are not tried.
#[inline(always)]
fn best_fit(owner: &Arena, blocks: &Blocks, settings: &AllocatorSettings, wish: &Wish) -> Option<Entry> {
    let mut found = owner.free.first_at_least(wish.rounded)?;
    let walks = if wish.expandable {
        owner.unmapped.may_start_at(found.address + found.size) && blocks.can_extend(found.slot)
    } else {
        blocks[found.slot].is_expandable()
    };
    if walks {
        let slot = prefer_short_extension(blocks, &owner.free, found, wish.expandable)?;
        found = blocks[slot].entry(slot);
    }
    let oversize = settings.max_split_size;
    let refused = if wish.rounded < oversize {
        found.size >= oversize
    } else {
        found.size >= wish.rounded.saturating_add(settings.max_non_split_rounding)
    };
    (!refused).then_some(found)
}

/// Walks up from an expandable block: to one that can extend less far while expandable segments are on (a block in
/// front of unmapped addresses counts with those), to the first ordinary block while they are off.
#[inline(never)]
fn prefer_short_extension(blocks: &Blocks, free: &FreeIndex, mut found: Entry, expandable: bool) -> Option<u32> {
    if !expandable {
        let mut candidates = free.ascending(found.size, found.address);
        let ordinary = candidates.find(|candidate| !blocks[candidate.slot].is_expandable());
        return ordinary.map(|candidate| candidate.slot);
    }
    // Blocks come in ascending size: none can reach less far than one that cannot extend at all.
    let reach_of = |entry: Entry| entry.size + blocks.extension(&blocks[entry.slot]);
    let mut reach = reach_of(found);
    while reach > found.size
        && blocks[found.slot].is_expandable()
        && let Some(next) = free.after(found.size, found.address)
        && reach_of(next) < reach
    {
        reach = reach_of(next);
        found = next;
    }
    Some(found.slot)
}

/// Makes a block that is not among the free ones the caller's, and cuts off what it does not need; says whether it did.
#[inline(always)]
fn hand_out(
    found: Entry,
    wish: &Wish,
    owner: &mut Arena,
    blocks: &mut Blocks,
    books: &mut Books,
    settings: &AllocatorSettings,
) -> (Block, bool) {
    let block = &mut blocks[found.slot];
    let (was_split, tracked) = (block.is_split(), !block.is_expandable());
    let large = owner.is_large();
    let remainder = found.size - wish.rounded;
    let cut = if large && !wish.expandable {
        wish.rounded < settings.max_split_size && remainder > SMALL_SIZE
    } else {
        remainder >= MIN_BLOCK_SIZE
    };
    let (slot, size, block) = if cut {
        let rest = Entry { size: remainder, address: found.address + wish.rounded, slot: found.slot };
        owner.free.insert(rest);
        let (slot, block) = blocks.cut_front(found.slot, wish.rounded, owner.clock);
        (slot, wish.rounded, block)
    } else {
        (found.slot, found.size, block)
    };
    block.state = State::Allocated;
    block.requested = wish.requested;
    block.generation = block.generation.wrapping_add(1);
    let handle = Block { address: Address(found.address), size, slot, generation: block.generation };
    if tracked {
        match (cut, was_split) {
            (true, true) => books.lower_inactive_split(large, 0, size),
            (true, false) => books.raise_inactive_split(large, 1, remainder),
            (false, true) => books.lower_inactive_split(large, 1, size),
            (false, false) => {}
        }
    }
    books.on_alloc(large, wish.requested, size);
    if size >= settings.max_split_size {
        books.oversize_allocations.raise();
    }
    (handle, cut)
}

//! The steps of an allocation and of a free.

use super::{
    Caching, NewBlock, RoundedRequest,
    blocks::{BlockNumbers, order},
    free_index::{FreeBlock, FreeIndex},
    pools::{DEFAULT_POOL, PoolArena},
    statistics::CachingStatistics,
};
use crate::device::DeviceError;
use crate::strategy::{
    Attempt, Block, Context, Outcome, Refusal, Shortage, StrategyError, StrategyEvent,
    deferred::Patience,
    pooled::{MemoryPiece, NONE, PieceState, PieceTable},
    unless_out_of_memory,
};
use oomph_base::{Address, StreamId};
use oomph_pytorch::{AllocatorSettings, MIN_BLOCK_SIZE, PoolFallback, SMALL_SIZE};

impl Caching {
    /// Serves a request from the free blocks of an arena, if one fits (`get_free_block`, then
    /// `alloc_found_block`).
    #[inline(always)]
    pub(super) fn alloc_cached(&mut self, arena: u32, request: RoundedRequest) -> Option<(Block, Outcome)> {
        if self.rare.collects_garbage {
            self.pools.tick(arena);
        }
        let owner = &mut self.pools.arenas[arena as usize];
        let found = best_fit(owner, &self.blocks, &self.settings, &request)?;
        owner.free.remove(found);
        let (blocks, numbers) = (&mut self.blocks, &mut self.numbers);
        let (block, cut) = hand_out(found, &request, owner, blocks, &mut self.statistics, &self.settings, numbers);
        if cut && self.numbers.are_used_up() {
            self.renumber();
        }
        Some((block, if cut { Outcome::Split } else { Outcome::Hit }))
    }

    /// Serves a request that no cached block fits. The order of attempts is that of
    /// `DeviceCachingAllocator::malloc`: `garbage_collect_cached_blocks`, `alloc_block`,
    /// `try_mempool_fallback` (2.11 on), `release_available_cached_blocks`, `release_cached_blocks`,
    /// `try_mempool_fallback` (2.8 to 2.10). There is no second search after memory was released.
    #[cold]
    pub(super) fn alloc_from_device(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        request: RoundedRequest,
        arena: u32,
    ) -> Result<Attempt, StrategyError> {
        if self.numbers.are_used_up() {
            self.renumber();
        }
        let rounded = request.rounded;
        let asked = self.settings.allocation_size(rounded);
        if let Some(limit) = self.limit.filter(|_| self.rare.collects_garbage) {
            self.collect_garbage(cx, limit)?;
        }
        let mut outcome = Outcome::NewSegment;
        let rejections = self.statistics.rejections;
        let mut grown = self.grow(cx, arena, rounded, asked)?;
        // A first attempt that is rejected before the driver is asked ends the request.
        let goes_on = self.statistics.rejections == rejections;
        let fallback = self.rules().pools.fallback;
        if grown.is_err()
            && goes_on
            && fallback == PoolFallback::First
            && let Some((block, outcome)) = self.alloc_from_fallback_pools(stream, request, arena)?
        {
            return Ok(Attempt::Served(block, outcome));
        }
        if grown.is_err() && goes_on && self.release_available(cx, arena, rounded)? {
            outcome = Outcome::ReleaseAndRetry;
            grown = self.grow(cx, arena, rounded, asked)?;
        }
        if grown.is_err() && goes_on && !self.pools.is_capturing() {
            self.release_cached(cx)?;
            self.statistics.kept.retries += 1;
            cx.sink.event(StrategyEvent::Retry { rounded });
            outcome = Outcome::ReleaseAndRetry;
            grown = self.grow(cx, arena, rounded, asked)?;
        }
        if grown.is_err()
            && matches!(fallback, PoolFallback::Last | PoolFallback::LastOrdinary)
            && let Some((block, outcome)) = self.alloc_from_fallback_pools(stream, request, arena)?
        {
            return Ok(Attempt::Served(block, outcome));
        }
        match grown {
            Ok(slot) => {
                let grown = self.blocks[slot].entry(slot);
                let owner = &mut self.pools.arenas[arena as usize];
                let (blocks, numbers) = (&mut self.blocks, &mut self.numbers);
                let (block, _) =
                    hand_out(grown, &request, owner, blocks, &mut self.statistics, &self.settings, numbers);
                Ok(Attempt::Served(block, outcome))
            }
            Err(refused_by) => {
                let device_free = Some(cx.device.memory_info()?.free);
                let shortage = Shortage { rounded, asked, refused_by, device_free };
                if self.statistics.rejections > rejections {
                    // PyTorch neither counts nor records it as an OOM.
                    return Ok(Attempt::OutOfMemory(shortage));
                }
                Ok(cx.out_of_memory(&mut self.statistics.kept, stream, shortage))
            }
        }
    }

    /// Takes new memory from the device (`alloc_block`). The limit is compared with the size of a
    /// segment, even where less is mapped.
    fn grow(&mut self, cx: &mut Context<'_>, arena: u32, rounded: u64, asked: u64) -> Result<NewBlock, StrategyError> {
        if self.limit.is_some_and(|limit| self.reserved.saturating_add(asked) > limit) {
            return Ok(Err(Refusal::Limit));
        }
        if self.settings.throw_on_oom {
            let share = (self.settings.per_process_memory_fraction * self.device_bytes as f64) as u64;
            if self.reserved.saturating_add(asked) > share {
                self.statistics.rejections += 1;
                return Ok(Err(Refusal::Limit));
            }
        }
        let in_default_pool = self.pools.arenas[arena as usize].pool() == DEFAULT_POOL;
        if self.settings.expandable_segments && (in_default_pool || self.rules().pools.expandable) {
            return self.grow_expandable(cx, arena, rounded);
        }
        let Some(address) = unless_out_of_memory(cx.device.alloc(asked))? else { return Ok(Err(Refusal::Device)) };
        Ok(Ok(self.record_segment(cx, arena, address, asked)))
    }

    /// Records a new segment as one block that is not among the free ones.
    pub(super) fn record_segment(&mut self, cx: &mut Context<'_>, arena: u32, address: Address, bytes: u64) -> u32 {
        let owner = &self.pools.arenas[arena as usize];
        self.reserved += bytes;
        self.statistics.on_segment_alloc(owner.is_large(), bytes);
        if bytes >= self.settings.max_split_size {
            self.statistics.oversize_segments.raise();
        }
        self.pools.pools[owner.pool() as usize].segments += 1;
        let stream = owner.stream;
        cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream });
        let links = [NONE, self.numbers.of_segment()];
        self.blocks.insert(MemoryPiece {
            region: arena,
            note: NONE,
            links,
            ..MemoryPiece::new(address.0, bytes, stream)
        })
    }

    /// A cached block of a private pool that was created with `use_on_oom`
    /// (`try_mempool_fallback`). Such a pool does not grow for it.
    ///
    /// PyTorch routes the request to the pool for the search. Where other requests are routed to it
    /// already, this raises an error, and the user that it added to the pool stays: a bug of 2.8 to
    /// 2.15.
    fn alloc_from_fallback_pools(
        &mut self,
        stream: StreamId,
        request: RoundedRequest,
        arena: u32,
    ) -> Result<Option<(Block, Outcome)>, StrategyError> {
        if self.pools.arenas[arena as usize].pool() != DEFAULT_POOL {
            return Ok(None);
        }
        let expandable = request.expandable && self.rules().pools.fallback == PoolFallback::Last;
        for pool in self.pools.fallbacks() {
            if self.pools.is_routed_to(pool) {
                self.pools.pools[pool as usize].users += 1;
                let reason = format!(
                    "PyTorch {} raises 'already recording to mempool_id', a known bug: a request of the default pool falls \
                     back on a pool with use_on_oom while other requests go to that pool",
                    self.settings.release
                );
                return Err(StrategyError::Refused(reason));
            }
            let arena = self.pools.arena(pool * 2 + u32::from(request.rounded > SMALL_SIZE), stream);
            let served = self.alloc_cached(arena, RoundedRequest { expandable, ..request });
            if served.is_some() {
                return Ok(served);
            }
        }
        Ok(None)
    }
}

impl Caching {
    /// Adds a freed block to the free ones, merged with its free neighbours (`free_block`,
    /// `try_merge_blocks`). Returns whether its arena is a large one.
    #[inline(always)]
    pub(super) fn free_block(&mut self, slot: u32) -> bool {
        let block = &self.blocks[slot];
        let (size, tracked) = (block.size, !block.is_expandable());
        let owner = &mut self.pools.arenas[block.arena()];
        let now = owner.clock;
        let merged = self.blocks.merge(slot, PieceState::Free, now, |gone| owner.free.remove(gone));
        owner.free.insert(merged.entry);
        let large = owner.is_large();
        if tracked {
            if !merged.is_split {
                self.statistics.lower_inactive_split(large, merged.neighbours, merged.entry.size - size);
            } else if merged.neighbours < 2 {
                self.statistics.raise_inactive_split(large, 1 - merged.neighbours, size);
            } else {
                self.statistics.raise_inactive_split(large, 0, size);
                self.statistics.lower_inactive_split(large, 1, 0);
            }
        }
        large
    }

    /// Frees a block that other streams use: it waits for events on them (`insert_events`), and
    /// during a capture for its end first (`insert_events_deferred_until_no_capture`).
    #[cold]
    pub(super) fn free_later(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let block = &self.blocks[slot];
        let (size, large) = (block.size, self.pools.arenas[block.arena()].is_large());
        if self.pools.is_capturing() {
            self.postponed.push_back(slot);
            self.blocks[slot].state = PieceState::Pending;
        } else {
            self.blocks.free_later(cx.device, slot)?;
        }
        self.statistics.on_free_later(large, size);
        self.count_oversize_freed(size);
        Ok(())
    }

    /// Counts the free of a block that is too large to be split.
    #[inline]
    pub(super) fn count_oversize_freed(&mut self, size: u64) {
        if size >= self.settings.max_split_size {
            self.statistics.oversize_allocations.lower();
        }
    }

    /// Completes the frees whose events have finished (`process_events`).
    #[cold]
    pub(super) fn poll_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.send_postponed(cx)?;
        self.complete_frees(cx, Patience::Poll)
    }

    /// Waits for all events and completes all frees (`synchronize_and_free_events`).
    pub(super) fn await_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.statistics.syncs += 1;
        self.send_postponed(cx)?;
        self.complete_frees(cx, Patience::Wait)
    }

    /// Waits for the events of blocks of one pool, and completes their frees.
    pub(super) fn await_frees_of(&mut self, cx: &mut Context<'_>, pool: u32) -> Result<(), StrategyError> {
        self.statistics.syncs += 1;
        self.send_postponed(cx)?;
        let of_pool = |block: &MemoryPiece| self.pools.arenas[block.arena()].pool() == pool;
        let (completed, result) = self.blocks.completed_of(cx.device, of_pool);
        self.complete_all(cx, completed, result)
    }

    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let (completed, result) = self.blocks.completed(cx.device, patience);
        self.complete_all(cx, completed, result)
    }

    fn complete_all(
        &mut self,
        cx: &mut Context<'_>,
        completed: Vec<u32>,
        result: Result<(), DeviceError>,
    ) -> Result<(), StrategyError> {
        for slot in completed {
            self.complete_free(cx, slot);
        }
        Ok(result?)
    }

    /// Makes blocks that were freed during a capture wait for the streams that were recorded before
    /// it.
    fn send_postponed(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        while let Some(&slot) = self.postponed.front() {
            let waits = self.blocks.end_capture(slot);
            if waits {
                self.blocks.free_later(cx.device, slot)?;
            }
            self.blocks.forget_uses(slot);
            self.postponed.pop_front();
            if !waits {
                self.complete_free(cx, slot);
            }
        }
        Ok(())
    }

    fn complete_free(&mut self, cx: &mut Context<'_>, slot: u32) {
        let MemoryPiece { address, requested, stream, .. } = self.blocks[slot];
        cx.sink.event(StrategyEvent::FreeCompleted { address: Address(address), requested, stream });
        self.free_pending(slot);
    }

    /// Frees a block that has waited for streams.
    pub(super) fn free_pending(&mut self, slot: u32) {
        let (requested, size) = (self.blocks[slot].requested, self.blocks[slot].size);
        let large = self.free_block(slot);
        self.statistics.on_free_completed(large, requested, size);
    }

    /// Whether a freed block waits for streams or for the end of a capture.
    #[inline]
    pub(super) fn has_waiting_frees(&self) -> bool {
        !self.blocks.deferred.is_empty() || !self.postponed.is_empty()
    }
}

/// Best fit among the free blocks of an arena (`get_free_block`). Only one candidate is tested: if
/// the rules for oversize blocks reject it, larger ones are not tried.
#[inline(always)]
fn best_fit(
    owner: &PoolArena,
    blocks: &PieceTable,
    settings: &AllocatorSettings,
    request: &RoundedRequest,
) -> Option<FreeBlock> {
    let mut found = owner.free.first_at_least(request.rounded)?;
    let walks = if request.expandable {
        owner.unmapped.may_start_at(blocks[found.slot].end()) && blocks.can_extend(found.slot)
    } else {
        blocks[found.slot].is_expandable()
    };
    if walks {
        found = prefer_short_extension(blocks, &owner.free, found, request.expandable)?;
    }
    // A small request never gets an oversize block, and a large one no block that is much larger.
    let oversize = settings.max_split_size;
    let refused = if request.rounded < oversize {
        found.size >= oversize
    } else {
        found.size >= request.rounded.saturating_add(settings.max_non_split_rounding)
    };
    (!refused).then_some(found)
}

/// Searches upwards from an expandable block, as `get_free_block` does. While expandable segments
/// are on, a block in front of unmapped addresses counts with those, and the search goes on while
/// that size shrinks. While they are off, it goes on to the first ordinary block.
#[inline(never)]
fn prefer_short_extension(
    blocks: &PieceTable,
    free: &FreeIndex,
    mut found: FreeBlock,
    expandable: bool,
) -> Option<FreeBlock> {
    if !expandable {
        return free.ascending(found.size, found.order).find(|candidate| !blocks[candidate.slot].is_expandable());
    }
    // Sizes ascend, so no later block is smaller than one that cannot extend at all.
    let reach_of = |entry: FreeBlock| entry.size + blocks.extension(&blocks[entry.slot]);
    let mut reach = reach_of(found);
    while reach > found.size
        && blocks[found.slot].is_expandable()
        && let Some(next) = free.after(found.size, found.order)
        && reach_of(next) < reach
    {
        reach = reach_of(next);
        found = next;
    }
    Some(found)
}

/// Hands out a block that is not among the free ones, and splits off the remainder where
/// `should_split` allows it (`alloc_found_block`). Returns whether it was split.
#[inline(always)]
fn hand_out(
    found: FreeBlock,
    request: &RoundedRequest,
    owner: &mut PoolArena,
    blocks: &mut PieceTable,
    statistics: &mut CachingStatistics,
    settings: &AllocatorSettings,
    numbers: &mut BlockNumbers,
) -> (Block, bool) {
    let block = &mut blocks[found.slot];
    let (was_split, tracked, address) = (block.is_split(), !block.is_expandable(), block.address);
    let large = owner.is_large();
    let remainder = found.size - request.rounded;
    // `should_split` follows the setting of this call, even for blocks of ordinary segments.
    let cut = if large && !request.expandable {
        request.rounded < settings.max_split_size && remainder > SMALL_SIZE
    } else {
        remainder >= MIN_BLOCK_SIZE
    };
    let (slot, size, block) = if cut {
        let order = order(block.number(), address + request.rounded);
        owner.free.insert(FreeBlock { size: remainder, order, slot: found.slot });
        let (slot, block) = blocks.cut_front(found.slot, request.rounded, owner.clock);
        block.links[1] = numbers.of_part(block.links[1]);
        (slot, request.rounded, block)
    } else {
        (found.slot, found.size, block)
    };
    block.state = PieceState::Allocated;
    block.requested = request.requested;
    block.generation = block.generation.wrapping_add(1);
    let handle = Block { address: Address(address), size, slot, generation: block.generation };
    if tracked {
        match (cut, was_split) {
            (true, true) => statistics.lower_inactive_split(large, 0, size),
            (true, false) => statistics.raise_inactive_split(large, 1, remainder),
            (false, true) => statistics.lower_inactive_split(large, 1, size),
            (false, false) => {}
        }
    }
    statistics.on_alloc(large, request.requested, size);
    if size >= settings.max_split_size {
        statistics.oversize_allocations.raise();
    }
    (handle, cut)
}

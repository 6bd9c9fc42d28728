//! Releasing cached memory to the device: garbage collection, releasing for one request, emptying
//! the cache.

use super::{
    Caching,
    pools::{DEFAULT_POOL, PoolKey},
};
use crate::strategy::{
    Context, StrategyError, StrategyEvent,
    pooled::{MemoryPiece, PieceState},
};
use oomph_base::Address;
use oomph_pytorch::UNLIMITED;

impl Caching {
    /// Frees the segment that a free block fills (`release_block`).
    pub(super) fn release_block(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let block = &self.blocks[slot];
        let (address, size) = (block.address, block.size);
        cx.device.free(Address(address))?;
        let owner = &mut self.pools.arenas[block.arena()];
        owner.free.remove(block.entry(slot));
        let (stream, large, pool) = (owner.stream, owner.is_large(), owner.pool());
        cx.sink.event(StrategyEvent::SegmentFree { address: Address(address), bytes: size, stream });
        self.reserved -= size;
        self.statistics.on_segment_free(large, size);
        if size >= self.settings.max_split_size {
            self.statistics.oversize_segments.lower();
        }
        self.count_segment_gone(pool);
        self.blocks.forget_uses(slot);
        self.blocks.remove(slot);
        Ok(())
    }

    /// Frees large cached segments of at least average age, pass by pass, until reserved memory is
    /// below the threshold (`garbage_collect_cached_blocks`).
    pub(super) fn collect_garbage(&mut self, cx: &mut Context<'_>, limit: u64) -> Result<(), StrategyError> {
        let threshold = (self.settings.garbage_collection_threshold * limit as f64) as u64;
        if self.reserved <= threshold {
            return Ok(());
        }
        let target = self.reserved - threshold;
        let side = DEFAULT_POOL * 2 + 1;
        let clock = self.pools.sides[side as usize].clock;
        let mut candidates = self.free_blocks(cx, side);
        candidates.retain(|&slot| !self.blocks[slot].is_split());
        let mut count = candidates.len() as u64;
        let mut total_age: u64 = candidates.iter().map(|&slot| self.blocks[slot].age(clock)).sum();
        if self.rules().release_skips_expandable {
            candidates.retain(|&slot| !self.blocks[slot].is_expandable());
        }
        let mut reclaimed = 0;
        while reclaimed < target && count > 0 {
            let average = total_age as f64 / count as f64;
            let mut younger = Vec::new();
            for &slot in &candidates {
                let age = self.blocks[slot].age(clock);
                if (age as f64) < average {
                    younger.push(slot);
                    continue;
                }
                if self.blocks[slot].is_expandable() {
                    return Err(self.failed_assertion("garbage collection reached a block of an expandable segment"));
                }
                reclaimed += self.blocks[slot].size;
                total_age -= age;
                count -= 1;
                self.release_block(cx, slot)?;
            }
            if younger.len() == candidates.len() {
                break;
            }
            candidates = younger;
        }
        Ok(())
    }

    /// Frees oversize cached blocks of the request's own arena: the smallest that suffices,
    /// otherwise several, the largest first. Returns whether they suffice
    /// (`release_available_cached_blocks`).
    ///
    /// PyTorch does not check whether such a block shares its segment with a live one, which is
    /// possible after expandable segments were switched on, and then frees memory that is in use.
    /// Here such a block is kept, and counted.
    pub(super) fn release_available(
        &mut self,
        cx: &mut Context<'_>,
        arena: u32,
        rounded: u64,
    ) -> Result<bool, StrategyError> {
        let oversize = self.settings.max_split_size;
        if oversize == UNLIMITED {
            return Ok(false);
        }
        let wanted = rounded.max(oversize);
        let skips = self.rules().release_skips_expandable;
        let free = &self.pools.arenas[arena as usize].free;
        if let Some(found) = free.first_at_least(wanted)
            && (!skips || !self.blocks[found.slot].is_expandable())
        {
            return self.release_whole(cx, found.slot).map(|released| released > 0);
        }
        let mut next = free.before(wanted, 0);
        let mut released = 0;
        while released < wanted
            && let Some(found) = next
            && found.size >= oversize
        {
            next = self.pools.arenas[arena as usize].free.before(found.size, found.order);
            if !skips || !self.blocks[found.slot].is_expandable() {
                released += self.release_whole(cx, found.slot)?;
            }
        }
        Ok(released >= wanted)
    }

    /// Frees a block's segment if the block fills it. Returns the bytes freed.
    fn release_whole(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<u64, StrategyError> {
        let block = &self.blocks[slot];
        if block.is_expandable() {
            return Err(self.failed_assertion("a block of an expandable segment was to be released for a request"));
        }
        if block.is_split() {
            self.statistics.defects_avoided += 1;
            return Ok(0);
        }
        let size = block.size;
        self.release_block(cx, slot)?;
        Ok(size)
    }

    /// Releases all cached memory (`release_cached_blocks`, called by `emptyCache`).
    pub(super) fn release_cached(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if !self.pools.is_capturing() {
            self.await_frees(cx)?;
            self.release_side(cx, DEFAULT_POOL * 2 + 1)?;
            self.release_side(cx, DEFAULT_POOL * 2)?;
        }
        self.pools.unused().into_iter().try_for_each(|pool| self.release_pool(cx, pool))
    }

    /// Releases the cached memory of a pool without users (`emptyCache` with the number of the pool). Waits for the events
    /// of blocks of this pool only.
    pub(super) fn pool_trim(&mut self, cx: &mut Context<'_>, key: PoolKey) -> Result<(), StrategyError> {
        let unused = self.pools.unused().into_iter();
        let mut found = unused.filter(|&pool| self.pools.pools[pool as usize].key == key);
        match found.next() {
            Some(pool) => {
                self.await_frees_of(cx, pool)?;
                self.release_pool(cx, pool)
            }
            None => Ok(()),
        }
    }

    fn release_pool(&mut self, cx: &mut Context<'_>, pool: u32) -> Result<(), StrategyError> {
        self.release_side(cx, pool * 2)?;
        self.release_side(cx, pool * 2 + 1)?;
        self.drop_if_empty(cx, pool)
    }

    /// Lowers PyTorch's count of the segments in a private pool. PyTorch fails an assertion where
    /// the count is zero already.
    pub(super) fn count_segment_gone(&mut self, pool: u32) {
        if pool == DEFAULT_POOL {
            return;
        }
        let pool = &mut self.pools.pools[pool as usize];
        match pool.segments.checked_sub(1) {
            Some(segments) => pool.segments = segments,
            None => self.statistics.defects_avoided += 1,
        }
    }

    /// Drops an unused pool that holds no memory, with the addresses that its failed allocations
    /// may have reserved.
    fn drop_if_empty(&mut self, cx: &mut Context<'_>, pool: u32) -> Result<(), StrategyError> {
        let of_pool = self.blocks.iter().filter(|(_, block)| self.pools.arenas[block.arena()].pool() == pool);
        let (ranges, states): (Vec<u32>, Vec<PieceState>) = of_pool.map(|(slot, block)| (slot, block.state)).unzip();
        if self.pools.pools[pool as usize].segments > 0 {
            return Ok(());
        }
        if states.iter().any(|&state| state != PieceState::Unmapped) {
            // PyTorch's count of mapped segments is not exact: it would drop a pool that is in use.
            self.statistics.defects_avoided += 1;
            return Ok(());
        }
        ranges.into_iter().try_for_each(|slot| self.release_range(cx, slot))?;
        self.pools.drop_pool(pool);
        Ok(())
    }

    /// Frees every segment of a side that is free as a whole, then unmaps the free parts of
    /// expandable ones (`release_blocks`).
    fn release_side(&mut self, cx: &mut Context<'_>, side: u32) -> Result<(), StrategyError> {
        let free = self.free_blocks(cx, side).into_iter();
        let (mapped, allocated): (Vec<u32>, Vec<u32>) = free.partition(|&slot| self.blocks[slot].is_expandable());
        for slot in allocated {
            if !self.blocks[slot].is_split() {
                self.release_block(cx, slot)?;
            }
        }
        mapped.into_iter().try_for_each(|slot| self.unmap_block(cx, slot))
    }

    /// The free blocks of a side, by stream handle, size and age or address.
    fn free_blocks(&self, cx: &Context<'_>, side: u32) -> Vec<u32> {
        let arenas = self.pools.arenas_in_order(cx, side).into_iter();
        arenas
            .flat_map(|arena| self.pools.arenas[arena as usize].free.ascending(0, 0))
            .map(|entry| entry.slot)
            .collect()
    }

    /// Releases everything, live blocks included.
    pub(super) fn release_everything(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.await_frees(cx)?;
        self.blocks.deferred.destroy_idle_events(cx.device)?;
        if !self.ranges.is_empty() {
            cx.device.synchronize()?;
        }
        // Blocks are freed first, so that a failing call leaves an ordinary cache behind.
        let held: Vec<u32> = self.blocks.iter().map(|(slot, _)| slot).collect();
        for slot in held {
            let MemoryPiece { state, requested, size, .. } = self.blocks[slot];
            if state == PieceState::Allocated {
                self.blocks.forget_uses(slot);
                let large = self.free_block(slot);
                self.statistics.on_free(large, requested, size);
            } else if state == PieceState::Pending {
                self.blocks.forget_uses(slot);
                self.free_pending(slot);
            }
        }
        for side in 0..self.pools.sides.len() as u32 {
            self.release_side(cx, side)?;
        }
        let untouched: Vec<u32> = self
            .blocks
            .iter()
            .filter(|(_, b)| b.state == PieceState::Unmapped && !b.is_split())
            .map(|(s, _)| s)
            .collect();
        for slot in untouched {
            self.release_range(cx, slot)?;
        }
        self.release_stranded(cx)
    }
}

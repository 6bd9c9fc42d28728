//! Pools: the default pool and private ones (CUDA graphs, `torch.cuda.MemPool`), and which pool
//! serves a request.
//!
//! A pool has two sides, for small and for large requests, and each side one arena per stream.
//! Blocks never change pool, side or stream.

use super::{Caching, expandable::UnmappedParts, free_index::FreeIndex, unused_pools::UnusedPools};
use crate::strategy::{Context, StrategyError, pooled::NONE};
use oomph_base::StreamId;
use oomph_pytorch::{AllocatorRules, PoolRules};

/// PyTorch's number of a pool (`MempoolId_t`).
pub(super) type PoolKey = (u64, u64);

/// The index of the default pool, which always exists.
pub(super) const DEFAULT_POOL: u32 = 0;

/// A pool (`PrivatePool`).
#[derive(Clone, Debug)]
pub(super) struct CachingPool {
    pub(super) key: PoolKey,
    /// Captures and owners that use it (`use_count`); its memory may be released when there are
    /// none.
    pub(super) users: u32,
    /// PyTorch's count of the segments in it, which decides when an unused pool is dropped.
    pub(super) segments: u64,
    /// The pool was dropped; a new pool may take its index.
    vacant: bool,
    /// It comes from an initial layout: its first user is counted already.
    inherited: bool,
}

/// The small or the large side of a pool.
#[derive(Clone, Debug, Default)]
pub(super) struct PoolSide {
    /// Searches so far while garbage collection was on (`get_free_blocks_call_count`): the clock by
    /// which free blocks age.
    pub(super) clock: u32,
    /// Arenas by stream number, [`NONE`] where there is none yet.
    pub(super) arenas: Vec<u32>,
}

/// The free memory of one pool, side and stream.
#[derive(Clone, Debug)]
pub(super) struct PoolArena {
    pub(super) side: u32,
    pub(super) stream: StreamId,
    /// A copy of the clock of its side, because every free reads it.
    pub(super) clock: u32,
    /// Free blocks.
    pub(super) free: FreeIndex,
    /// The parts of its expandable segments without memory.
    pub(super) unmapped: UnmappedParts,
}

impl PoolArena {
    #[inline]
    pub(super) fn is_large(&self) -> bool {
        self.side & 1 == 1
    }

    #[inline]
    pub(super) fn pool(&self) -> u32 {
        self.side / 2
    }
}

/// All pools.
#[derive(Clone, Debug)]
pub(super) struct PoolTable {
    pub(super) pools: Vec<CachingPool>,
    /// Two for each pool: small, large.
    pub(super) sides: Vec<PoolSide>,
    pub(super) arenas: Vec<PoolArena>,
    vacant_arenas: Vec<u32>,
    /// Pools that requests go to now, each with the stream it is limited to (`captures_underway`).
    /// In the order of their beginnings.
    routes: Vec<(u32, Option<StreamId>)>,
    /// How many captures of CUDA graphs are under way. Counted from 2.13 on; before, every route is one.
    captures: u32,
    rules: PoolRules,
    /// Block sizes need not be multiples of 512.
    any_size: bool,
    /// Pools without users.
    without_users: UnusedPools,
    /// Pools whose cached blocks may serve the default pool before it runs out of memory
    /// (`use_on_oom_pools`).
    fallbacks: Vec<PoolKey>,
    /// The arenas of the default pool that were used last, small and large. The next request most
    /// often uses them too.
    recent: [(StreamId, u32); 2],
}

impl PoolTable {
    pub(super) fn new(rules: &AllocatorRules) -> PoolTable {
        PoolTable {
            pools: vec![CachingPool { key: (0, 0), users: 1, segments: 0, vacant: false, inherited: false }],
            sides: vec![PoolSide::default(), PoolSide::default()],
            arenas: Vec::new(),
            vacant_arenas: Vec::new(),
            routes: Vec::new(),
            captures: 0,
            rules: rules.pools,
            any_size: rules.one_division_keeps_size,
            without_users: UnusedPools::default(),
            fallbacks: Vec::new(),
            recent: [(StreamId::DEFAULT, NONE); 2],
        }
    }

    /// An empty index of free blocks.
    pub(super) fn free_index(&self) -> FreeIndex {
        FreeIndex::new(self.any_size)
    }

    /// Whether any request is routed to a private pool.
    #[inline]
    fn is_routing(&self) -> bool {
        !self.routes.is_empty()
    }

    /// Whether some requests are routed to this pool.
    pub(super) fn is_routed_to(&self, pool: u32) -> bool {
        self.routes.iter().any(|&(routed, _)| routed == pool)
    }

    /// Whether the allocator assumes that a stream is being captured. Up to 2.12 it does while any request is routed to a
    /// private pool.
    #[inline]
    pub(super) fn is_capturing(&self) -> bool {
        if self.rules.scope_is_no_capture { self.captures > 0 } else { self.is_routing() }
    }

    /// The capture of a CUDA graph begins or ends (`markCaptureBegin`, `markCaptureEnd`).
    pub(super) fn capture(&mut self, begins: bool) -> Result<(), StrategyError> {
        let captures = if begins { self.captures.checked_add(1) } else { self.captures.checked_sub(1) };
        self.captures = captures.ok_or_else(|| StrategyError::Refused("no capture is under way".to_owned()))?;
        Ok(())
    }

    /// The side that serves a request of this stream.
    pub(super) fn side_for(&self, stream: StreamId, large: bool) -> u32 {
        let pool = if self.is_routing() { self.routed_pool(stream) } else { DEFAULT_POOL };
        pool * 2 + u32::from(large)
    }

    #[cold]
    fn routed_pool(&self, stream: StreamId) -> u32 {
        let mut matching = self.routes.iter().filter(|(_, only)| only.is_none_or(|only| only == stream));
        let route = if self.rules.latest_scope { matching.next_back() } else { matching.next() };
        route.map_or(DEFAULT_POOL, |&(pool, _)| pool)
    }

    /// The arena that serves a request of this stream.
    #[inline]
    pub(super) fn arena_for(&mut self, stream: StreamId, large: bool) -> u32 {
        let (of_stream, arena) = self.recent[usize::from(large)];
        if of_stream == stream && arena != NONE && !self.is_routing() {
            return arena;
        }
        self.look_up_arena(stream, large)
    }

    #[inline(never)]
    fn look_up_arena(&mut self, stream: StreamId, large: bool) -> u32 {
        let side = self.side_for(stream, large);
        let arena = self.arena(side, stream);
        if side / 2 == DEFAULT_POOL {
            self.recent[usize::from(large)] = (stream, arena);
        }
        arena
    }

    /// The arena of a side and stream, created if needed.
    pub(super) fn arena(&mut self, side: u32, stream: StreamId) -> u32 {
        match self.sides[side as usize].arenas.get(stream.index()) {
            Some(&arena) if arena != NONE => arena,
            _ => self.add_arena(side, stream),
        }
    }

    #[cold]
    fn add_arena(&mut self, side: u32, stream: StreamId) -> u32 {
        let clock = self.sides[side as usize].clock;
        let arena = PoolArena { side, stream, clock, free: self.free_index(), unmapped: UnmappedParts::default() };
        let place = match self.vacant_arenas.pop() {
            Some(place) => {
                self.arenas[place as usize] = arena;
                place
            }
            None => {
                self.arenas.push(arena);
                (self.arenas.len() - 1) as u32
            }
        };
        let arenas = &mut self.sides[side as usize].arenas;
        if arenas.len() <= stream.index() {
            arenas.resize(stream.index() + 1, NONE);
        }
        arenas[stream.index()] = place;
        place
    }

    /// Counts a search on the side of an arena.
    #[cold]
    pub(super) fn tick(&mut self, arena: u32) {
        let side = &mut self.sides[self.arenas[arena as usize].side as usize];
        side.clock = side.clock.wrapping_add(1);
        for &arena in side.arenas.iter().filter(|&&arena| arena != NONE) {
            self.arenas[arena as usize].clock = side.clock;
        }
    }

    /// The arenas of a side, ordered by stream handle.
    pub(super) fn arenas_in_order(&self, cx: &Context<'_>, side: u32) -> Vec<u32> {
        let arenas = self.sides[side as usize].arenas.iter().copied().filter(|&arena| arena != NONE);
        let mut arenas: Vec<u32> = arenas.collect();
        arenas.sort_by_key(|&arena| cx.device.stream_handle(self.arenas[arena as usize].stream));
        arenas
    }

    /// Private pools without users, in the order in which their memory is released.
    pub(super) fn unused(&self) -> Vec<u32> {
        self.without_users.keys().filter_map(|key| self.find(key)).collect()
    }

    /// Pools in use whose cached blocks may serve the default pool.
    pub(super) fn fallbacks(&self) -> Vec<u32> {
        let places = self.fallbacks.iter().filter_map(|&key| self.find(key));
        places.filter(|&place| self.pools[place as usize].users > 0).collect()
    }

    /// Drops an unused pool. Its arenas must be empty.
    pub(super) fn drop_pool(&mut self, pool: u32) {
        self.pools[pool as usize].vacant = true;
        self.without_users.remove(self.pools[pool as usize].key);
        for side in [pool * 2, pool * 2 + 1] {
            let arenas = std::mem::take(&mut self.sides[side as usize]).arenas;
            self.vacant_arenas.extend(arenas.into_iter().filter(|&arena| arena != NONE));
        }
    }

    pub(super) fn find(&self, key: PoolKey) -> Option<u32> {
        (0u32..).zip(&self.pools).find(|(_, pool)| pool.key == key && !pool.vacant).map(|(place, _)| place)
    }

    /// Adds a user to a pool, created if needed (`create_or_incref_pool`).
    pub(super) fn retain(&mut self, key: PoolKey) -> Result<u32, StrategyError> {
        if key == (0, 0) {
            return Err(StrategyError::Refused("pool (0, 0) is the default pool".to_owned()));
        }
        if let Some(place) = self.find(key) {
            let pool = &mut self.pools[place as usize];
            if pool.users == 0 {
                let reason = format!("pool {key:?} has been released and its memory has not yet gone back");
                return Err(StrategyError::Refused(reason));
            }
            if !std::mem::take(&mut pool.inherited) {
                pool.users += 1;
            }
            return Ok(place);
        }
        let pool = CachingPool { key, users: 1, segments: 0, vacant: false, inherited: false };
        Ok(match self.pools.iter().position(|pool| pool.vacant) {
            Some(place) => {
                self.pools[place] = pool;
                place as u32
            }
            None => {
                self.pools.push(pool);
                self.sides.extend([PoolSide::default(), PoolSide::default()]);
                (self.pools.len() - 1) as u32
            }
        })
    }
}

impl PoolTable {
    /// A pool of an initial layout, created if needed.
    pub(super) fn inherit(&mut self, key: PoolKey) -> Result<u32, StrategyError> {
        if let Some(place) = self.find(key) {
            return Ok(place);
        }
        let place = self.retain(key)?;
        self.pools[place as usize].inherited = true;
        Ok(place)
    }
}

impl Caching {
    /// Routes the requests of `stream`, or of all streams, to the pool (`beginAllocateToPool`).
    pub(super) fn pool_begin(&mut self, key: PoolKey, stream: Option<StreamId>) -> Result<(), StrategyError> {
        if self.pools.routes.iter().any(|&(pool, _)| self.pools.pools[pool as usize].key == key) {
            return Err(StrategyError::Refused(format!("requests already go to pool {key:?}")));
        }
        let pool = self.pools.retain(key)?;
        self.pools.routes.push((pool, stream));
        Ok(())
    }

    /// Ends the routing to the pool (`endAllocateToPool`).
    pub(super) fn pool_end(&mut self, key: PoolKey) -> Result<(), StrategyError> {
        let routes = &mut self.pools.routes;
        let place = routes.iter().position(|&(pool, _)| self.pools.pools[pool as usize].key == key);
        match place {
            Some(place) => {
                routes.remove(place);
                Ok(())
            }
            None => Err(StrategyError::Refused(format!("no request goes to pool {key:?}"))),
        }
    }

    /// Adds a user to the pool (`createOrIncrefPool`, `setUseOnOOM`).
    pub(super) fn pool_retain(&mut self, key: PoolKey, use_on_oom: bool) -> Result<(), StrategyError> {
        self.pools.retain(key)?;
        if use_on_oom && let Err(place) = self.pools.fallbacks.binary_search(&key) {
            self.pools.fallbacks.insert(place, key);
        }
        Ok(())
    }

    /// Removes a user from the pool (`releasePool`). After the last user, its memory is released
    /// with the next release of cached memory.
    pub(super) fn pool_release(&mut self, key: PoolKey) -> Result<(), StrategyError> {
        let pool = self.pools.find(key).map(|place| &mut self.pools.pools[place as usize]);
        match pool.filter(|pool| pool.users > 0 && key != (0, 0)) {
            Some(pool) => {
                pool.users -= 1;
                if pool.users == 0 {
                    self.pools.without_users.insert(key);
                }
                Ok(())
            }
            None => Err(StrategyError::Refused(format!("pool {key:?} has no user"))),
        }
    }

    /// Assumes that PyTorch's table of pools without users has at least this many slots, and that the pools `first` came
    /// into it first, in this order. The order of release depends on both, and pools whose memory stays in use leave no
    /// other trace.
    pub fn assume_unused_pools(&mut self, slots: usize, first: &[PoolKey]) {
        self.pools.without_users.rebuild(slots, first);
    }
}

//! The counters of `torch.cuda.memory_stats()`.
//!
//! PyTorch keeps each statistic for `all`, `small_pool` and `large_pool` (`DeviceStats`), each with
//! its current value, its peak, and the sums of increases and decreases. Here only what cannot be
//! derived is kept: `all` is the sum of the two pools except for its peak, and decreases are
//! increases minus the current value. [`Stats`] is derived on request.

use crate::strategy::{Stats, Usage, stats::keep_highest};

/// A value with its peak and the sum of its increases.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    current: u64,
    peak: u64,
    rises: u64,
}

impl Counter {
    #[inline]
    fn raise(&mut self, amount: u64) {
        self.current += amount;
        keep_highest(&mut self.peak, self.current);
        self.rises += amount;
    }

    #[inline]
    fn lower(&mut self, amount: u64) {
        self.current -= amount;
    }

    /// Current value, peak, sum of increases, sum of decreases.
    fn figures(self) -> [u64; 4] {
        [self.current, self.peak, self.rises, self.rises - self.current]
    }
}

/// A count that can fall below zero when settings change, as in PyTorch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SignedCounter {
    current: i64,
    peak: i64,
    rises: u64,
    falls: u64,
}

impl SignedCounter {
    pub(super) fn raise(&mut self) {
        self.current += 1;
        self.peak = self.peak.max(self.current);
        self.rises += 1;
    }

    pub(super) fn lower(&mut self) {
        self.current -= 1;
        self.falls += 1;
    }

    fn figures(self) -> [u64; 4] {
        [self.current.max(0).unsigned_abs(), self.peak.unsigned_abs(), self.rises, self.falls]
    }
}

/// The statistics of all small or all large pools.
#[derive(Clone, Copy, Debug, Default)]
struct PoolStatistics {
    allocation: Counter,
    allocated_bytes: Counter,
    requested_bytes: Counter,
    /// Freed blocks that wait for streams.
    pending: u64,
    pending_bytes: u64,
    /// Peaks of active (allocated or pending) blocks, updated only while blocks are pending.
    peak_active: u64,
    peak_active_bytes: u64,
    segment: Counter,
    reserved_bytes: Counter,
    inactive_split: Counter,
    inactive_split_bytes: Counter,
}

impl PoolStatistics {
    fn active(&self) -> Counter {
        with_pending(self.allocation, self.pending, self.peak_active)
    }

    fn active_bytes(&self) -> Counter {
        with_pending(self.allocated_bytes, self.pending_bytes, self.peak_active_bytes)
    }
}

/// While no block is pending, the active blocks are the allocated ones, and so are their peaks.
fn with_pending(allocated: Counter, pending: u64, peak: u64) -> Counter {
    Counter { current: allocated.current + pending, peak: peak.max(allocated.peak), rises: allocated.rises }
}

/// Every counter of the strategy.
#[derive(Clone, Debug, Default)]
pub(super) struct CachingStatistics {
    pools: [PoolStatistics; 2],
    /// Peaks of the flavour `all`.
    peak_allocation: u64,
    peak_allocated_bytes: u64,
    peak_requested_bytes: u64,
    /// Noted only while anything is pending.
    peak_active: u64,
    peak_active_bytes: u64,
    /// Retries, failures, and reserved memory and segments in our own sense; the rest is derived.
    pub(super) kept: Stats,
    /// Bytes of freed blocks that wait for streams, in all pools.
    pending_bytes: u64,
    peak_segment: u64,
    peak_inactive_split: u64,
    peak_inactive_split_bytes: u64,
    pub(super) oversize_allocations: SignedCounter,
    pub(super) oversize_segments: SignedCounter,
    pub(super) syncs: u64,
    pub(super) device_allocs: u64,
    pub(super) device_frees: u64,
    /// Requests that were refused before the driver was asked (`num_oom_rejections`).
    pub(super) rejections: u64,
    /// How often PyTorch would have freed or lost memory that is in use.
    pub(super) defects_avoided: u64,
}

impl CachingStatistics {
    /// A block was handed out.
    #[inline]
    pub(super) fn on_alloc(&mut self, large: bool, requested: u64, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.raise(1);
        pool.allocated_bytes.raise(size);
        pool.requested_bytes.raise(requested);
        let blocks = self.all(|pool| pool.allocation);
        let (allocated, requested) = (self.all(|pool| pool.allocated_bytes), self.all(|pool| pool.requested_bytes));
        keep_highest(&mut self.peak_allocation, blocks);
        keep_highest(&mut self.peak_allocated_bytes, allocated);
        keep_highest(&mut self.peak_requested_bytes, requested);
        if self.pending_bytes != 0 {
            self.note_active(large);
        }
    }

    /// Updates the peaks of active blocks while some are pending.
    #[cold]
    fn note_active(&mut self, large: bool) {
        let pool = &mut self.pools[usize::from(large)];
        pool.peak_active = pool.active().peak.max(pool.active().current);
        pool.peak_active_bytes = pool.active_bytes().peak.max(pool.active_bytes().current);
        self.peak_active = self.peak_active.max(self.all(|pool| pool.active()));
        self.peak_active_bytes = self.peak_active_bytes.max(self.all(|pool| pool.active_bytes()));
    }

    /// A block was freed and can be reused.
    #[inline]
    pub(super) fn on_free(&mut self, large: bool, requested: u64, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.lower(1);
        pool.allocated_bytes.lower(size);
        pool.requested_bytes.lower(requested);
    }

    /// A block was freed and is pending.
    pub(super) fn on_free_later(&mut self, large: bool, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.lower(1);
        pool.allocated_bytes.lower(size);
        pool.pending += 1;
        pool.pending_bytes += size;
        self.pending_bytes += size;
    }

    /// A pending block can be reused.
    pub(super) fn on_free_completed(&mut self, large: bool, requested: u64, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.pending -= 1;
        pool.pending_bytes -= size;
        self.pending_bytes -= size;
        pool.requested_bytes.lower(requested);
    }

    /// The counters that every strategy has.
    pub(super) fn stats(&self) -> Stats {
        let (allocated, live_blocks) = (self.all(|pool| pool.allocated_bytes), self.all(|pool| pool.allocation));
        let allocs = self.pools.iter().map(|pool| pool.allocation.rises).sum();
        let (requested, active) = (self.all(|pool| pool.requested_bytes), allocated + self.pending_bytes);
        let peak = Usage {
            requested: self.peak_requested_bytes,
            allocated: self.peak_allocated_bytes,
            // While no block is pending, active equals allocated.
            active: self.peak_active_bytes.max(self.peak_allocated_bytes),
            ..self.kept.peak
        };
        let current = Usage { requested, allocated, active, ..self.kept.current };
        Stats { current, peak, live_blocks, allocs, frees: allocs - live_blocks, ..self.kept }
    }

    /// Free blocks that share their segment increased in number or size.
    #[inline]
    pub(super) fn raise_inactive_split(&mut self, large: bool, blocks: u64, bytes: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.inactive_split.raise(blocks);
        pool.inactive_split_bytes.raise(bytes);
        let blocks = self.all(|pool| pool.inactive_split);
        let bytes = self.all(|pool| pool.inactive_split_bytes);
        keep_highest(&mut self.peak_inactive_split, blocks);
        keep_highest(&mut self.peak_inactive_split_bytes, bytes);
    }

    /// Free blocks that share their segment decreased in number or size.
    #[inline]
    pub(super) fn lower_inactive_split(&mut self, large: bool, blocks: u64, bytes: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.inactive_split.lower(blocks);
        pool.inactive_split_bytes.lower(bytes);
    }

    /// The current value for `all`.
    #[inline]
    fn all(&self, gauge: impl Fn(&PoolStatistics) -> Counter) -> u64 {
        self.pools.iter().map(|pool| gauge(pool).current).sum()
    }

    /// A segment was allocated.
    pub(super) fn on_segment_alloc(&mut self, large: bool, bytes: u64) {
        self.kept.on_reserve(bytes, 1);
        self.raise_reserved(large, bytes);
        self.pools[usize::from(large)].segment.raise(1);
        self.peak_segment = self.peak_segment.max(self.all(|pool| pool.segment));
    }

    /// A segment was freed.
    pub(super) fn on_segment_free(&mut self, large: bool, bytes: u64) {
        self.kept.on_release(bytes, 1);
        self.lower_reserved(large, bytes);
        self.pools[usize::from(large)].segment.lower(1);
    }

    /// Memory was mapped next to `mapped_neighbours` mapped runs (0 to 2). PyTorch does not count
    /// mapped memory as segments; [`Stats`] counts each contiguous run.
    pub(super) fn on_map(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.kept.on_reserve(bytes, 1);
        self.kept.on_release(0, mapped_neighbours);
        self.raise_reserved(large, bytes);
    }

    /// Memory was unmapped next to `mapped_neighbours` mapped runs (0 to 2).
    pub(super) fn on_unmap(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.kept.on_reserve(0, mapped_neighbours);
        self.kept.on_release(bytes, 1);
        self.lower_reserved(large, bytes);
    }

    fn raise_reserved(&mut self, large: bool, bytes: u64) {
        self.pools[usize::from(large)].reserved_bytes.raise(bytes);
        self.device_allocs += 1;
    }

    fn lower_reserved(&mut self, large: bool, bytes: u64) {
        self.pools[usize::from(large)].reserved_bytes.lower(bytes);
        self.device_frees += 1;
    }
}

/// Names and values of one statistic of one pool.
macro_rules! figures {
    ($list:ident, $name:literal, $pool:literal, $counter:expr) => {{
        let [current, peak, allocated, freed] = $counter.figures();
        $list.extend([
            (concat!($name, $pool, ".current"), current),
            (concat!($name, $pool, ".peak"), peak),
            (concat!($name, $pool, ".allocated"), allocated),
            (concat!($name, $pool, ".freed"), freed),
        ]);
    }};
}

/// Names and values of one statistic for `all`, `small_pool` and `large_pool`. The peak of `all` is
/// kept separately.
macro_rules! three_pools {
    ($list:ident, $name:literal, $statistics:ident, $peak:expr, $gauge:expr) => {{
        let [small, large]: [Counter; 2] = $statistics.pools.each_ref().map($gauge);
        let (current, rises) = (small.current + large.current, small.rises + large.rises);
        figures!($list, $name, ".all", Counter { current, peak: $peak, rises });
        figures!($list, $name, ".small_pool", small);
        figures!($list, $name, ".large_pool", large);
    }};
}

impl CachingStatistics {
    /// Every counter under its name in `torch.cuda.memory_stats()`, and one that PyTorch does not
    /// have.
    pub(super) fn details(&self) -> Vec<(&'static str, u64)> {
        let mut list = Vec::with_capacity(128);
        let peak = self.stats().peak;
        let peak_active = self.peak_active.max(self.peak_allocation);
        three_pools!(list, "allocation", self, self.peak_allocation, |pool| pool.allocation);
        three_pools!(list, "segment", self, self.peak_segment, |pool| pool.segment);
        three_pools!(list, "active", self, peak_active, |pool| pool.active());
        three_pools!(list, "inactive_split", self, self.peak_inactive_split, |pool| pool.inactive_split);
        three_pools!(list, "allocated_bytes", self, peak.allocated, |pool| pool.allocated_bytes);
        three_pools!(list, "reserved_bytes", self, peak.reserved, |pool| pool.reserved_bytes);
        three_pools!(list, "active_bytes", self, peak.active, |pool| pool.active_bytes());
        three_pools!(list, "inactive_split_bytes", self, self.peak_inactive_split_bytes, |pool| pool
            .inactive_split_bytes);
        three_pools!(list, "requested_bytes", self, peak.requested, |pool| pool.requested_bytes);
        figures!(list, "oversize_allocations", "", self.oversize_allocations);
        figures!(list, "oversize_segments", "", self.oversize_segments);
        list.extend([
            ("num_alloc_retries", self.kept.retries),
            ("num_ooms", self.kept.ooms),
            ("num_sync_all_streams", self.syncs),
            ("num_device_alloc", self.device_allocs),
            ("num_device_free", self.device_frees),
            ("pytorch_defects_avoided", self.defects_avoided),
        ]);
        list
    }
}

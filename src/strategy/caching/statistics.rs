//! The counters of `torch.cuda.memory_stats()`.
//!
//! PyTorch keeps each statistic in three flavours (all, small pool, large pool) with its present value, its peak, and
//! the sums of all rises and falls. Here only what cannot be derived is kept: the flavour `all` is the sum of the two
//! pools but for its peak, and falls are rises minus the present value.

use crate::strategy::Stats;

/// A value and the highest it has been.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    current: u64,
    peak: u64,
}

impl Level {
    #[inline]
    fn raise(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }
}

/// A level that also adds up its rises.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    level: Level,
    rises: u64,
}

impl Gauge {
    #[inline]
    fn raise(&mut self, amount: u64) {
        self.level.raise(amount);
        self.rises += amount;
    }

    #[inline]
    fn lower(&mut self, amount: u64) {
        self.level.current -= amount;
    }
}

/// A count that settings changed on the way can drive below zero, as in PyTorch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SignedGauge {
    current: i64,
    peak: i64,
    rises: u64,
    falls: u64,
}

impl SignedGauge {
    pub(super) fn raise(&mut self) {
        self.current += 1;
        self.peak = self.peak.max(self.current);
        self.rises += 1;
    }

    pub(super) fn lower(&mut self) {
        self.current -= 1;
        self.falls += 1;
    }
}

/// The statistics of all small or all large pools.
#[derive(Clone, Copy, Debug, Default)]
struct PoolBooks {
    allocation: Level,
    allocated_bytes: Level,
    active: Level,
    active_bytes: Level,
    requested_bytes: Level,
    allocs: u64,
    bytes_handed_out: u64,
    bytes_requested: u64,
    segment: Gauge,
    reserved_bytes: Gauge,
    inactive_split: Gauge,
    inactive_split_bytes: Gauge,
}

/// Every counter of the strategy.
#[derive(Clone, Debug, Default)]
pub(super) struct Books {
    pub(super) stats: Stats,
    pools: [PoolBooks; 2],
    /// Peaks of the flavour `all` that `stats` has not.
    peak_allocation: u64,
    peak_active: u64,
    peak_segment: u64,
    peak_inactive_split: u64,
    peak_inactive_split_bytes: u64,
    pub(super) oversize_allocations: SignedGauge,
    pub(super) oversize_segments: SignedGauge,
    pub(super) syncs: u64,
    pub(super) device_allocs: u64,
    pub(super) device_frees: u64,
    /// How often PyTorch would have freed or forgotten memory that is in use.
    pub(super) defects_avoided: u64,
}

impl Books {
    /// A block was handed out.
    #[inline]
    pub(super) fn on_alloc(&mut self, large: bool, requested: u64, size: u64) {
        self.stats.on_alloc(requested, size);
        let pool = &mut self.pools[usize::from(large)];
        pool.allocs += 1;
        pool.bytes_handed_out += size;
        pool.bytes_requested += requested;
        pool.allocation.raise(1);
        pool.allocated_bytes.raise(size);
        pool.active.raise(1);
        pool.active_bytes.raise(size);
        pool.requested_bytes.raise(requested);
        self.peak_allocation = self.peak_allocation.max(self.stats.live_blocks);
        self.peak_active = self.peak_active.max(self.all(|pool| pool.active));
    }

    /// A block was given back by its owner.
    #[inline]
    pub(super) fn on_free(&mut self, large: bool, size: u64) {
        self.stats.on_free(size);
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.current -= 1;
        pool.allocated_bytes.current -= size;
    }

    /// A freed block can be used again.
    #[inline]
    pub(super) fn on_reusable(&mut self, large: bool, requested: u64, size: u64) {
        self.stats.on_reusable(requested, size);
        let pool = &mut self.pools[usize::from(large)];
        pool.active.current -= 1;
        pool.active_bytes.current -= size;
        pool.requested_bytes.current -= requested;
    }

    /// Free blocks that share their segment: how their number and bytes changed.
    #[inline]
    pub(super) fn on_inactive_split(&mut self, large: bool, blocks: i64, bytes: i64) {
        let pool = &mut self.pools[usize::from(large)];
        if blocks > 0 {
            pool.inactive_split.raise(blocks.unsigned_abs());
            let all = self.all(|pool| pool.inactive_split.level);
            self.peak_inactive_split = self.peak_inactive_split.max(all);
        } else {
            pool.inactive_split.lower(blocks.unsigned_abs());
        }
        let pool = &mut self.pools[usize::from(large)];
        if bytes > 0 {
            pool.inactive_split_bytes.raise(bytes.unsigned_abs());
            let all = self.all(|pool| pool.inactive_split_bytes.level);
            self.peak_inactive_split_bytes = self.peak_inactive_split_bytes.max(all);
        } else {
            pool.inactive_split_bytes.lower(bytes.unsigned_abs());
        }
    }

    /// The present value of the flavour `all`.
    #[inline]
    fn all(&self, level: impl Fn(&PoolBooks) -> Level) -> u64 {
        self.pools.iter().map(|pool| level(pool).current).sum()
    }

    /// A segment was allocated.
    pub(super) fn on_segment_alloc(&mut self, large: bool, bytes: u64) {
        self.stats.on_reserve(bytes, 1);
        self.raise_reserved(large, bytes);
        self.pools[usize::from(large)].segment.raise(1);
        self.peak_segment = self.peak_segment.max(self.all(|pool| pool.segment.level));
    }

    /// A segment was freed.
    pub(super) fn on_segment_free(&mut self, large: bool, bytes: u64) {
        self.stats.on_release(bytes, 1);
        self.lower_reserved(large, bytes);
        self.pools[usize::from(large)].segment.lower(1);
    }

    /// Memory was mapped between `mapped_neighbours` mapped stretches (0 to 2). PyTorch does not count mapped memory
    /// as segments; our own books count each contiguous stretch.
    pub(super) fn on_map(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.stats.on_reserve(bytes, 1);
        self.stats.on_release(0, mapped_neighbours);
        self.raise_reserved(large, bytes);
    }

    /// Memory was unmapped between `mapped_neighbours` mapped stretches (0 to 2).
    pub(super) fn on_unmap(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.stats.on_reserve(0, mapped_neighbours);
        self.stats.on_release(bytes, 1);
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

/// Names and values of one statistic in one flavour.
macro_rules! figures {
    ($list:ident, $name:literal, $flavour:literal, $level:expr, $rises:expr) => {{
        let (level, rises): (Level, u64) = ($level, $rises);
        $list.extend([
            (concat!($name, $flavour, ".current"), level.current),
            (concat!($name, $flavour, ".peak"), level.peak),
            (concat!($name, $flavour, ".allocated"), rises),
            (concat!($name, $flavour, ".freed"), rises - level.current),
        ]);
    }};
}

/// Names and values of one statistic in its three flavours. The peak of `all` is kept on its own.
macro_rules! flavours {
    ($list:ident, $name:literal, $books:ident, $peak:expr, $level:expr, $rises:expr) => {{
        let [small, large] = $books.pools.each_ref().map(|pool| -> (Level, u64) { ($level(pool), $rises(pool)) });
        let all = Level { current: small.0.current + large.0.current, peak: $peak };
        figures!($list, $name, ".all", all, small.1 + large.1);
        figures!($list, $name, ".small_pool", small.0, small.1);
        figures!($list, $name, ".large_pool", large.0, large.1);
    }};
}

impl Books {
    /// Every counter under the name that `torch.cuda.memory_stats()` gives it, and one that PyTorch has not.
    pub(super) fn details(&self) -> Vec<(&'static str, u64)> {
        let mut list = Vec::with_capacity(128);
        let peak = &self.stats.peak;
        flavours!(list, "allocation", self, self.peak_allocation, |p: &PoolBooks| p.allocation, |p: &PoolBooks| p
            .allocs);
        flavours!(list, "segment", self, self.peak_segment, |p: &PoolBooks| p.segment.level, |p: &PoolBooks| p
            .segment
            .rises);
        flavours!(list, "active", self, self.peak_active, |p: &PoolBooks| p.active, |p: &PoolBooks| p.allocs);
        flavours!(
            list,
            "inactive_split",
            self,
            self.peak_inactive_split,
            |p: &PoolBooks| p.inactive_split.level,
            |p: &PoolBooks| p.inactive_split.rises
        );
        flavours!(list, "allocated_bytes", self, peak.allocated, |p: &PoolBooks| p.allocated_bytes, |p: &PoolBooks| p
            .bytes_handed_out);
        flavours!(
            list,
            "reserved_bytes",
            self,
            peak.reserved,
            |p: &PoolBooks| p.reserved_bytes.level,
            |p: &PoolBooks| p.reserved_bytes.rises
        );
        flavours!(list, "active_bytes", self, peak.active, |p: &PoolBooks| p.active_bytes, |p: &PoolBooks| p
            .bytes_handed_out);
        flavours!(
            list,
            "inactive_split_bytes",
            self,
            self.peak_inactive_split_bytes,
            |p: &PoolBooks| p.inactive_split_bytes.level,
            |p: &PoolBooks| p.inactive_split_bytes.rises
        );
        flavours!(list, "requested_bytes", self, peak.requested, |p: &PoolBooks| p.requested_bytes, |p: &PoolBooks| p
            .bytes_requested);
        for (names, gauge) in
            [(OVERSIZE_ALLOCATIONS, self.oversize_allocations), (OVERSIZE_SEGMENTS, self.oversize_segments)]
        {
            let values = [gauge.current.max(0).unsigned_abs(), gauge.peak.unsigned_abs(), gauge.rises, gauge.falls];
            list.extend(names.into_iter().zip(values));
        }
        list.extend([
            ("num_alloc_retries", self.stats.retries),
            ("num_ooms", self.stats.ooms),
            ("num_sync_all_streams", self.syncs),
            ("num_device_alloc", self.device_allocs),
            ("num_device_free", self.device_frees),
            ("pytorch_defects_avoided", self.defects_avoided),
        ]);
        list
    }
}

const OVERSIZE_ALLOCATIONS: [&str; 4] = [
    "oversize_allocations.current",
    "oversize_allocations.peak",
    "oversize_allocations.allocated",
    "oversize_allocations.freed",
];
const OVERSIZE_SEGMENTS: [&str; 4] =
    ["oversize_segments.current", "oversize_segments.peak", "oversize_segments.allocated", "oversize_segments.freed"];

//! The counters of `torch.cuda.memory_stats()`.
//!
//! PyTorch keeps each statistic in three flavours (all, small pool, large pool) with its present value, its peak, and
//! the sums of all rises and falls. Here only what cannot be derived is kept: the flavour `all` is the sum of the two
//! pools but for its peak, and falls are rises minus the present value. So are the books that every strategy shows
//! ([`Stats`]): they are put together when somebody asks.

use crate::strategy::{OffBooks, Stats, Usage, stats::keep_highest};

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
        keep_highest(&mut self.peak, self.current);
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
    allocation: Gauge,
    allocated_bytes: Gauge,
    requested_bytes: Gauge,
    /// Blocks that were freed and wait for streams.
    pending: u64,
    pending_bytes: u64,
    /// Peaks of what is active (allocated or pending), noted only while anything is pending.
    peak_active: u64,
    peak_active_bytes: u64,
    segment: Gauge,
    reserved_bytes: Gauge,
    inactive_split: Gauge,
    inactive_split_bytes: Gauge,
}

impl PoolBooks {
    /// While nothing is pending, the active blocks are the allocated ones, and so are their peaks.
    fn active(&self) -> Gauge {
        let Gauge { level, rises } = self.allocation;
        let (current, peak) = (level.current + self.pending, self.peak_active.max(level.peak));
        Gauge { level: Level { current, peak }, rises }
    }

    fn active_bytes(&self) -> Gauge {
        let Gauge { level, rises } = self.allocated_bytes;
        let (current, peak) = (level.current + self.pending_bytes, self.peak_active_bytes.max(level.peak));
        Gauge { level: Level { current, peak }, rises }
    }
}

/// Every counter of the strategy.
#[derive(Clone, Debug, Default)]
pub(super) struct Books {
    pools: [PoolBooks; 2],
    /// Peaks of the flavour `all`.
    peak_allocation: u64,
    peak_allocated_bytes: u64,
    peak_requested_bytes: u64,
    /// Noted only while anything is pending.
    peak_active: u64,
    peak_active_bytes: u64,
    /// Reserved memory and segments in our own sense; the rest of it is not kept.
    reserved: Stats,
    pub(super) retries: u64,
    pub(super) ooms: u64,
    /// Bytes of all pools that were freed and wait for streams.
    pending_bytes: u64,
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

    /// Notes how much is active while something is pending.
    #[cold]
    fn note_active(&mut self, large: bool) {
        let pool = &mut self.pools[usize::from(large)];
        pool.peak_active = pool.active().level.peak.max(pool.active().level.current);
        pool.peak_active_bytes = pool.active_bytes().level.peak.max(pool.active_bytes().level.current);
        self.peak_active = self.peak_active.max(self.all(|pool| pool.active()));
        self.peak_active_bytes = self.peak_active_bytes.max(self.all(|pool| pool.active_bytes()));
    }

    /// A block was given back by its owner and can be used again.
    #[inline]
    pub(super) fn on_free(&mut self, large: bool, requested: u64, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.lower(1);
        pool.allocated_bytes.lower(size);
        pool.requested_bytes.lower(requested);
    }

    /// A block was given back by its owner and is pending.
    pub(super) fn on_free_later(&mut self, large: bool, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.allocation.lower(1);
        pool.allocated_bytes.lower(size);
        pool.pending += 1;
        pool.pending_bytes += size;
        self.pending_bytes += size;
    }

    /// A pending block can be used again.
    pub(super) fn on_free_completed(&mut self, large: bool, requested: u64, size: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.pending -= 1;
        pool.pending_bytes -= size;
        self.pending_bytes -= size;
        pool.requested_bytes.lower(requested);
    }

    /// The books that every strategy shows.
    pub(super) fn stats(&self) -> Stats {
        let allocated = self.all(|pool| pool.allocated_bytes);
        let allocs = self.pools.iter().map(|pool| pool.allocation.rises).sum();
        let live_blocks = self.all(|pool| pool.allocation);
        let current = Usage {
            requested: self.all(|pool| pool.requested_bytes),
            allocated,
            active: allocated + self.pending_bytes,
            reserved: self.reserved.current.reserved,
        };
        let peak = Usage {
            requested: self.peak_requested_bytes,
            allocated: self.peak_allocated_bytes,
            // While nothing is pending, what is active is what is allocated.
            active: self.peak_active_bytes.max(self.peak_allocated_bytes),
            reserved: self.reserved.peak.reserved,
        };
        let (segments, peak_segments) = (self.reserved.segments, self.reserved.peak_segments);
        let (retries, ooms) = (self.retries, self.ooms);
        let frees = allocs - live_blocks;
        Stats {
            current,
            peak,
            live_blocks,
            segments,
            peak_segments,
            allocs,
            frees,
            retries,
            ooms,
            off_books: OffBooks::Nothing,
        }
    }

    /// Free blocks that share their segment became more, or larger.
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

    /// Free blocks that share their segment became fewer, or smaller.
    #[inline]
    pub(super) fn lower_inactive_split(&mut self, large: bool, blocks: u64, bytes: u64) {
        let pool = &mut self.pools[usize::from(large)];
        pool.inactive_split.lower(blocks);
        pool.inactive_split_bytes.lower(bytes);
    }

    /// The present value of the flavour `all`.
    #[inline]
    fn all(&self, gauge: impl Fn(&PoolBooks) -> Gauge) -> u64 {
        self.pools.iter().map(|pool| gauge(pool).level.current).sum()
    }

    /// A segment was allocated.
    pub(super) fn on_segment_alloc(&mut self, large: bool, bytes: u64) {
        self.reserved.on_reserve(bytes, 1);
        self.raise_reserved(large, bytes);
        self.pools[usize::from(large)].segment.raise(1);
        self.peak_segment = self.peak_segment.max(self.all(|pool| pool.segment));
    }

    /// A segment was freed.
    pub(super) fn on_segment_free(&mut self, large: bool, bytes: u64) {
        self.reserved.on_release(bytes, 1);
        self.lower_reserved(large, bytes);
        self.pools[usize::from(large)].segment.lower(1);
    }

    /// Memory was mapped between `mapped_neighbours` mapped stretches (0 to 2). PyTorch does not count mapped memory
    /// as segments; our own books count each contiguous stretch.
    pub(super) fn on_map(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.reserved.on_reserve(bytes, 1);
        self.reserved.on_release(0, mapped_neighbours);
        self.raise_reserved(large, bytes);
    }

    /// Memory was unmapped between `mapped_neighbours` mapped stretches (0 to 2).
    pub(super) fn on_unmap(&mut self, large: bool, bytes: u64, mapped_neighbours: u64) {
        self.reserved.on_reserve(0, mapped_neighbours);
        self.reserved.on_release(bytes, 1);
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
    ($list:ident, $name:literal, $flavour:literal, $gauge:expr) => {{
        let Gauge { level, rises } = $gauge;
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
    ($list:ident, $name:literal, $books:ident, $peak:expr, $gauge:expr) => {{
        let [small, large]: [Gauge; 2] = $books.pools.each_ref().map($gauge);
        let level = Level { current: small.level.current + large.level.current, peak: $peak };
        figures!($list, $name, ".all", Gauge { level, rises: small.rises + large.rises });
        figures!($list, $name, ".small_pool", small);
        figures!($list, $name, ".large_pool", large);
    }};
}

impl Books {
    /// Every counter under the name that `torch.cuda.memory_stats()` gives it, and one that PyTorch has not.
    pub(super) fn details(&self) -> Vec<(&'static str, u64)> {
        let mut list = Vec::with_capacity(128);
        let peak = self.stats().peak;
        let peak_active = self.peak_active.max(self.peak_allocation);
        flavours!(list, "allocation", self, self.peak_allocation, |pool| pool.allocation);
        flavours!(list, "segment", self, self.peak_segment, |pool| pool.segment);
        flavours!(list, "active", self, peak_active, |pool| pool.active());
        flavours!(list, "inactive_split", self, self.peak_inactive_split, |pool| pool.inactive_split);
        flavours!(list, "allocated_bytes", self, peak.allocated, |pool| pool.allocated_bytes);
        flavours!(list, "reserved_bytes", self, peak.reserved, |pool| pool.reserved_bytes);
        flavours!(list, "active_bytes", self, peak.active, |pool| pool.active_bytes());
        flavours!(list, "inactive_split_bytes", self, self.peak_inactive_split_bytes, |pool| pool.inactive_split_bytes);
        flavours!(list, "requested_bytes", self, peak.requested, |pool| pool.requested_bytes);
        for (names, gauge) in
            [(OVERSIZE_ALLOCATIONS, self.oversize_allocations), (OVERSIZE_SEGMENTS, self.oversize_segments)]
        {
            let values = [gauge.current.max(0).unsigned_abs(), gauge.peak.unsigned_abs(), gauge.rises, gauge.falls];
            list.extend(names.into_iter().zip(values));
        }
        list.extend([
            ("num_alloc_retries", self.retries),
            ("num_ooms", self.ooms),
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

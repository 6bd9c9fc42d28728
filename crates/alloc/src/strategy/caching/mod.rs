//! `caching`: the decisions of PyTorch's CUDACachingAllocator, of any release from 2.0 to 2.15, made
//! several times faster.
//!
//! Every rule follows a function of `c10/cuda/CUDACachingAllocator.cpp` and names it. The rules
//! include PyTorch's oddities (no second search after cached memory was released; a limit that is
//! compared with the size of the segment); the data structures are different. `tools/torch-oracle`
//! runs the real allocator for comparison.

mod alloc;
mod blocks;
mod expandable;
pub(super) mod free_index;
mod pools;
mod release;
#[cfg(test)]
mod release_vectors;
mod resume;
mod statistics;
mod unused_pools;
#[cfg(test)]
mod vectors;

use std::collections::VecDeque;

pub use resume::SharedRange;

use self::{blocks::BlockNumbers, expandable::RangeTable, pools::PoolTable, statistics::CachingStatistics};
use super::{
    Attempt, Block, BlockView, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Parameter, Refusal,
    Request, SegmentView, Setup, Shortage, Stats, Strategy, StrategyEntry, StrategyError, checked_fraction,
    pooled::{MemoryPiece, NONE, PieceState, PieceTable},
};
use crate::device::Capabilities;
use oomph_base::{Address, StreamId};
use oomph_pytorch::{
    AllocatorRules, AllocatorSettings, AllocatorSettingsError, MIN_BLOCK_SIZE, REQUEST_LIMIT, SMALL_SIZE,
};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "caching",
    summary: "PyTorch's caching allocator, with all its settings",
    origin: "CUDACachingAllocator of PyTorch 2.1 to 2.15, checked call by call against the real libraries",
    differs: &["has no callbacks, tracing or snapshots, which decide nothing"],
    parameters: PARAMETERS,
    variants: &[
        "expandable_segments:True",
        "max_split_size_mb:64",
        "roundup_power2_divisions:4",
        "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.6",
    ],
    build,
};

const PARAMETERS: &[Parameter] = &[
    Parameter::text("release", "2.0 to 2.15", "2.11", "the release of PyTorch whose allocator this is"),
    Parameter::text(
        "expandable_segments",
        "True, False",
        "False",
        "map memory into ranges that grow, instead of allocating segments",
    ),
    Parameter::text(
        "max_split_size_mb",
        "20 or more",
        "unlimited",
        "larger blocks are not split, and are released first",
    ),
    Parameter::text(
        "max_non_split_rounding_mb",
        "20 or more",
        "20",
        "how much larger than the request an unsplit block may be",
    ),
    Parameter::text(
        "garbage_collection_threshold",
        "between 0 and 1",
        "off",
        "share of the limit above which old cached blocks are released",
    ),
    Parameter::text(
        "roundup_power2_divisions",
        "a power of two, or a list [MIB:DIVISIONS,...,>:DIVISIONS]",
        "off",
        "number of steps between powers of two to which requests are rounded",
    ),
    Parameter::text(
        "large_segment_size_mb",
        "11 or more",
        "20",
        "segment for requests between 1 and 10 MiB, and step of expandable segments",
    ),
    Parameter::text("per_process_memory_fraction", "0 to 1", "1", "share of the device that may be reserved"),
    Parameter::text(
        "throw_on_cudamalloc_oom",
        "True, False",
        "False",
        "fail without a retry where that share would be exceeded (2.12 and later)",
    ),
    Parameter::text(
        "expandable_segments_reserve",
        "a share of the device's memory, or GiB as in 40G",
        "1.125",
        "size of the address ranges of expandable segments (2.15)",
    ),
];

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let settings = AllocatorSettings::with_release(parameters).map_err(|error| ENTRY.refused(error.to_string()))?;
    Ok(Box::new(Caching::new(settings, setup)))
}

/// The slot of a new block that is not among the free ones, or who refused the memory.
type NewBlock = Result<u32, Refusal>;

/// PyTorch's caching allocator for one device.
#[derive(Clone, Debug)]
pub struct Caching {
    settings: AllocatorSettings,
    /// Bytes that may be reserved (`allowed_memory_maximum`).
    limit: Option<u64>,
    rare: RareRules,
    device_bytes: u64,
    /// Bytes of all segments and mapped granules (`total_allocated_memory`).
    reserved: u64,
    blocks: PieceTable,
    pools: PoolTable,
    ranges: RangeTable,
    numbers: BlockNumbers,
    /// Blocks freed during a capture, which wait for its end
    /// (`needs_events_deferred_until_no_capture`).
    postponed: VecDeque<u32>,
    statistics: CachingStatistics,
    /// The initial settings and limit.
    initial: (AllocatorSettings, Option<u64>),
}

/// Which of the rules that few programs use are in force. Every request needs this, so it is
/// computed when settings or limit change.
#[derive(Clone, Copy, Debug)]
struct RareRules {
    /// Searches are counted, and old cached blocks are released.
    collects_garbage: bool,
    /// Requests are rounded to parts of powers of two.
    divides_powers: bool,
}

impl RareRules {
    fn of(settings: &AllocatorSettings, limit: Option<u64>) -> RareRules {
        RareRules {
            collects_garbage: limit.is_some() && settings.garbage_collection_threshold > 0.0,
            divides_powers: settings.roundup_power2_divisions.iter().any(|&divisions| divisions > 0),
        }
    }
}

/// A request with its rounded size.
#[derive(Clone, Copy, Debug)]
struct RoundedRequest {
    requested: u64,
    rounded: u64,
    /// Whether the rules of expandable segments hold.
    expandable: bool,
}

impl Caching {
    /// An allocator that has reserved nothing yet.
    #[must_use]
    pub fn new(settings: AllocatorSettings, setup: &Setup<'_>) -> Caching {
        let device_bytes = setup.props.total_bytes;
        // 1 is the default, which sets no limit in any release.
        let fraction = Some(settings.per_process_memory_fraction).filter(|&fraction| fraction < 1.0);
        let fraction = fraction.and_then(|fraction| settings.release.rules().fraction.limit(fraction, device_bytes));
        let limit = [setup.limit, fraction].into_iter().flatten().min();
        Caching::as_new((settings, limit), device_bytes)
    }

    fn as_new(initial: (AllocatorSettings, Option<u64>), device_bytes: u64) -> Caching {
        Caching {
            rare: RareRules::of(&initial.0, initial.1),
            settings: initial.0.clone(),
            limit: initial.1,
            device_bytes,
            reserved: 0,
            blocks: PieceTable::default(),
            pools: PoolTable::new(initial.0.release.rules()),
            ranges: RangeTable::default(),
            numbers: BlockNumbers::new(initial.0.release.rules().ties),
            postponed: VecDeque::new(),
            statistics: CachingStatistics::default(),
            initial,
        }
    }

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &AllocatorSettings {
        &self.settings
    }

    /// Puts other settings of the same release into force. What is there stays as it is.
    pub fn configure(&mut self, settings: AllocatorSettings) {
        self.settings = settings;
        self.rare = RareRules::of(&self.settings, self.limit);
    }

    /// The rules of the release.
    fn rules(&self) -> &'static AllocatorRules {
        self.settings.release.rules()
    }

    /// Refuses a request of an impossible size.
    #[cold]
    fn refuse(bytes: u64) -> Result<Attempt, StrategyError> {
        if bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        Ok(Attempt::OutOfMemory(Shortage::of_size(bytes)))
    }
}

impl Strategy for Caching {
    /// `DeviceCachingAllocator::malloc`.
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if !(1..REQUEST_LIMIT).contains(&request.bytes) {
            return Caching::refuse(request.bytes);
        }
        if self.has_waiting_frees() && !self.pools.is_capturing() {
            self.poll_frees(cx)?;
        }
        let rounded = if self.rare.divides_powers {
            self.settings.round_size(request.bytes)
        } else {
            (request.bytes + MIN_BLOCK_SIZE - 1) & !(MIN_BLOCK_SIZE - 1)
        };
        let sized = RoundedRequest { requested: request.bytes, rounded, expandable: self.settings.expandable_segments };
        let arena = self.pools.arena_for(request.stream, rounded > SMALL_SIZE);
        match self.alloc_cached(arena, sized) {
            Some((block, outcome)) => Ok(Attempt::Served(block, outcome)),
            None => self.alloc_from_device(cx, request.stream, sized, arena),
        }
    }

    /// `DeviceCachingAllocator::free`.
    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let record = self.blocks.live(&block)?;
        let (size, requested) = (record.size, record.requested);
        if record.is_shared() {
            self.free_later(cx, block.slot)?;
            return Ok(Freed::Later);
        }
        let large = self.free_block(block.slot);
        self.statistics.on_free(large, requested, size);
        self.count_oversize_freed(size);
        Ok(Freed::Now)
    }

    /// `DeviceCachingAllocator::recordStream`.
    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let dropped = self.pools.is_capturing() && self.rules().pools.drops_capture_uses;
        self.blocks.note_use(block, stream, dropped)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        match *command {
            Control::Configure(text) => {
                let refused = |error: AllocatorSettingsError| StrategyError::Refused(error.to_string());
                let settings = self.settings.updated(text).map_err(refused)?;
                if settings.expandable_segments
                    && !cx.device.props().capabilities.contains(Capabilities::VIRTUAL_MEMORY)
                {
                    let reason = "expandable_segments:True needs a device with virtual memory";
                    return Err(StrategyError::Refused(reason.to_owned()));
                }
                self.configure(settings);
                Ok(())
            }
            Control::Fraction(fraction) => {
                let fraction = checked_fraction(fraction)?;
                let rule = self.rules().fraction;
                let total = if rule.one_is_a_limit { cx.device.memory_info()?.total } else { self.device_bytes };
                self.limit = rule.limit(fraction, total);
                self.rare = RareRules::of(&self.settings, self.limit);
                Ok(())
            }
            Control::PoolBegin { pool, stream } => self.pool_begin(pool, stream),
            Control::PoolEnd { pool } => self.pool_end(pool),
            Control::CaptureBegin => self.pools.capture(true),
            Control::CaptureEnd => self.pools.capture(false),
            Control::PoolRetain { pool, use_on_oom } => self.pool_retain(pool, use_on_oom),
            Control::PoolRelease { pool } => self.pool_release(pool),
            Control::PoolTrim { pool } => self.pool_trim(cx, pool),
            // PyTorch gives nothing back during a capture. Its pools keep their memory in place.
            Control::StepBegins(_) | Control::StayInPlace(_) | Control::TrimInCapture { .. } => Ok(()),
        }
    }

    fn serves_pools(&self) -> bool {
        true
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        // Under another limit the allocator would have placed this memory differently.
        if self.settings != initial.settings || self.limit.is_some() && self.limit != initial.limit {
            return Ok(None);
        }
        match self.load_layout(cx, &initial.layout) {
            Ok(held) => Ok(Some(held)),
            Err(StrategyError::Device(error)) if !error.is_out_of_memory() => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// `DeviceCachingAllocator::emptyCache`.
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if self.pools.is_capturing() && !self.rules().pools.trims_in_capture {
            self.statistics.syncs += 1;
            return Err(self.failed_assertion("empty_cache during a capture"));
        }
        self.release_cached(cx)?;
        self.release_stranded(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_everything(cx)?;
        *self = Caching::as_new(self.initial.clone(), self.device_bytes);
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.statistics.stats()
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let largest = |large: bool| {
            let side = self.pools.side_for(stream, large);
            let arena = *self.pools.sides[side as usize].arenas.get(stream.index()).filter(|&&arena| arena != NONE)?;
            let free = &self.pools.arenas[arena as usize].free;
            let mut found = free.last()?;
            // Mapped memory is skipped while expandable segments are off.
            while self.blocks[found.slot].is_expandable() && !self.settings.expandable_segments {
                found = free.before(found.size, found.order)?;
            }
            Some(found.size)
        };
        // Small requests never get large blocks, and large requests never get small ones.
        let large = largest(true).filter(|&size| size > SMALL_SIZE);
        Some(large.or_else(|| largest(false).map(|size| size.min(SMALL_SIZE))).unwrap_or(0))
    }

    /// Of expandable segments, each contiguous mapped run is one segment.
    fn layout(&self) -> Option<Layout> {
        let is_mapped = |slot| self.blocks.get(slot).is_some_and(|block| block.state != PieceState::Unmapped);
        let heads = self.blocks.iter().filter(|&(slot, block)| is_mapped(slot) && !is_mapped(block.previous));
        Some(Layout::of(heads.map(|(slot, _)| self.segment(slot))))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        let mut details = self.statistics.details();
        if self.rules().rejects_early {
            details.push(("num_oom_rejections", self.statistics.rejections));
        }
        details.push(("settings_without_effect", self.settings.ignored.len() as u64));
        details
    }

    fn requires(&self) -> Capabilities {
        Capabilities::VIRTUAL_MEMORY.when(self.settings.expandable_segments)
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

impl Caching {
    /// The error that the program gets where PyTorch's allocator fails one of its assertions.
    fn failed_assertion(&self, what: &str) -> StrategyError {
        StrategyError::Refused(format!("PyTorch {} fails an internal assertion: {what}", self.settings.release))
    }

    fn segment(&self, head: u32) -> SegmentView {
        let arena = &self.pools.arenas[self.blocks[head].arena()];
        let mapped = self.blocks.chain(head).map(|slot| &self.blocks[slot]);
        let mapped = mapped.take_while(|block| block.state != PieceState::Unmapped);
        let blocks: Vec<BlockView> = mapped.map(MemoryPiece::view).collect();
        SegmentView {
            address: Address(self.blocks[head].address),
            bytes: blocks.iter().map(|block| block.size).sum(),
            stream: arena.stream,
            pool: if arena.is_large() { "large" } else { "small" }.into(),
            pool_id: self.pools.pools[arena.pool() as usize].key,
            mapped: self.blocks[head].is_expandable(),
            alias: false,
            blocks,
        }
    }
}

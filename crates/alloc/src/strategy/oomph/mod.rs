//! `oomph`: this project's own allocator, built from what the suite measures about the others.
//!
//! - Blocks are cut from a page heap (`page_heap`): long ranges of addresses, most of them
//!   unmapped, in which free neighbours merge. Where free memory lies in the wrong places, free
//!   chunks are unmapped there and mapped where they are needed, so that reserved memory grows only
//!   when no free chunk is left.
//! - Small requests are cut from slabs, which are blocks of the page heap and go back to it: small
//!   blocks that live long do not obstruct large ones, and both share all memory.
//! - Free blocks are found in constant time ([`FreeLists`]), and a block is one cache line.
//! - Memory freed on one stream serves another before reserved memory grows: one event makes the
//!   second stream wait for the first, on the device. Before the free, the stream of a block must have joined all others that
//!   use it, or `used_on` must have named them: PyTorch requires the same.
//! - While a CUDA graph is captured, and in the memory of captured graphs, a request is served by free memory of its own
//!   stream or by new memory: nothing is moved, given back, waited for or passed from stream to stream.
//! - A step that the program repeats is learned, and its blocks are placed together (`steps`): steady steps move nothing.
//! - Driver calls are few: physical memory is created in large chunks, and neighbouring chunks are
//!   mapped or unmapped in one call (`mapping`).
//!
//! The chunk size trades memory against driver time: a chunk can move only while all of it is free,
//! and each chunk costs a call to create. So chunks are smaller in small programs, under small limits
//! and where much is lost. Sizes and rounding are PyTorch's, multiples of 512 bytes.

mod mapping;
mod page_heap;
mod size_classes;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use self::{
    mapping::ChunkMapping,
    size_classes::{BEST_TRIES, PageClasses, QUANTUM},
    steps::{StepHistory, StepPlan},
};
use super::{
    Attempt, Block, BlockView, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Parameter,
    Request, SegmentView, Setup, Shortage, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent,
    checked_fraction,
    deferred::Patience,
    parameters::{self, Setting},
    pooled::{FreeByAddress, FreeLists, MemoryPiece, NONE, PerStream, PieceState, PieceTable, WaitEvent},
};
use crate::device::Capabilities;
use oomph_base::{Address, GIB, MIB, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "oomph",
    summary: "our own: a page heap that moves free chunks to where they are needed",
    origin: "written for this suite, from what it measures; needs virtual memory",
    differs: &[],
    parameters: PARAMETERS,
    variants: &[THRIFTY],
    build,
};

/// Reserved memory stays closest to live memory, at about twice the driver time of expandable
/// segments.
const THRIFTY: &str = "smallest_chunk:2MiB,largest_chunk:16MiB,growth_step:8MiB,slack_permille:0";

const AN_AMOUNT: &str = "an amount of memory, up to 1TiB";
/// The largest amount that a parameter may have.
const LARGEST_AMOUNT: u64 = 1024 * GIB;

const PARAMETERS: &[Parameter] = &[
    Parameter::text("small_limit", AN_AMOUNT, "256KiB", "requests up to this are cut from slabs"),
    Parameter::text("slab", AN_AMOUNT, "2MiB", "size of a slab"),
    Parameter::text(
        "smallest_chunk",
        AN_AMOUNT,
        "40MiB",
        "smallest chunk of physical memory where there is much memory and little of it is lost in chunks that are partly in use: \
         small chunks save memory and cost driver calls",
    ),
    Parameter::text("largest_chunk", AN_AMOUNT, "40MiB", "largest chunk of physical memory"),
    Parameter::text(
        "growth_step",
        AN_AMOUNT,
        "20MiB",
        "reserved memory grows by at least this, or by 1/32 of itself if that is less",
    ),
    Parameter::text(
        "slack_permille",
        "0 to 1000000",
        "10",
        "how far reserved memory may exceed peak live memory, in thousandths, before chunks are moved",
    ),
];

/// How the allocator weighs memory against driver calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OomphSettings {
    /// Rounded requests up to this are cut from slabs.
    small_limit: u64,
    slab_bytes: u64,
    /// Growth is made of chunks a sixteenth of its size, but not below this where there is much memory.
    smallest_chunk: u64,
    /// Nor above this.
    largest_chunk: u64,
    /// Reserved memory grows by at least this where much is reserved.
    growth_step: u64,
    /// While reserved memory exceeds peak live memory by at most this many thousandths, it grows
    /// rather than moves chunks, because moving waits for the device.
    slack_permille: u64,
}

impl OomphSettings {
    fn read(text: &str) -> Result<OomphSettings, SpecError> {
        let mut settings = OomphSettings::default();
        parameters::read_with_defaults(&ENTRY, text, |setting| settings.apply(&setting))?;
        settings.check().map_err(|reason| ENTRY.refused(reason))?;
        Ok(settings)
    }

    fn apply(&mut self, setting: &Setting<'_>) -> Result<(), String> {
        let amount = match setting.key {
            "small_limit" => &mut self.small_limit,
            "slab" => &mut self.slab_bytes,
            "smallest_chunk" => &mut self.smallest_chunk,
            "largest_chunk" => &mut self.largest_chunk,
            "growth_step" => &mut self.growth_step,
            _ => {
                let permille = setting.number()?;
                if permille > 1_000_000 {
                    return Err(setting.refused("more than 1000000"));
                }
                self.slack_permille = permille;
                return Ok(());
            }
        };
        *amount = setting.bytes()?;
        if !(QUANTUM..=LARGEST_AMOUNT).contains(amount) || !amount.is_multiple_of(QUANTUM) {
            return Err(setting.refused(&format!("not a multiple of {QUANTUM} bytes between that and 1TiB")));
        }
        Ok(())
    }

    /// Whether the settings are consistent.
    fn check(&self) -> Result<(), String> {
        if self.slab_bytes < self.small_limit {
            return Err("'slab' is less than 'small_limit': a small block does not fit into a slab".to_owned());
        }
        if self.largest_chunk < self.smallest_chunk {
            return Err("'largest_chunk' is less than 'smallest_chunk'".to_owned());
        }
        Ok(())
    }

    /// The size of the chunks of a growth, in whole pages.
    fn chunk_for(&self, growth: u64, page: u64) -> u64 {
        round_up((growth / 16).clamp(self.smallest_chunk, self.largest_chunk), page)
    }
}

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let settings = OomphSettings::read(parameters)?;
    let mut allocator = OomphAllocator::new(settings, setup.props.total_bytes, setup.props.granularity_bytes);
    allocator.limit = setup.limit;
    Ok(Box::new(allocator))
}

/// A chunk is at most this part of the memory that the process can have: under a small limit, memory that is lost in chunks that are
/// partly in use can make a program fail.
const PART_OF_AVAILABLE: u64 = 1024;
/// But not smaller than this for that reason: each chunk costs driver calls.
const LEAST_CHUNK: u64 = 4 * MIB;

/// The note of a block in the memory of a plan. No slot has this number.
const PLANNED: u32 = NONE - 1;

/// The free blocks of one stream.
#[derive(Clone, Debug, Default)]
struct StreamFreeLists {
    /// Parts of slabs.
    small: FreeLists<PageClasses>,
    /// Parts of the page heap.
    pages: FreeLists<PageClasses>,
}

/// A free block in no list, and whether new memory was needed; `None` if the device has no more.
type FoundBlock = Result<Option<(u32, bool)>, StrategyError>;

/// Counters beside the common statistics.
#[derive(Clone, Copy, Debug, Default)]
struct OomphCounters {
    chunks_created: u64,
    bytes_created: u64,
    chunks_moved: u64,
    bytes_moved: u64,
    moves: u64,
    blocks_taken_over: u64,
    slabs_made: u64,
    slabs_returned: u64,
    steps_planned: u64,
    plans_given_up: u64,
}

/// This project's own allocator, for one device.
///
/// The `note` of a block is the slot of the slab that a small block was cut from, [`PLANNED`] in the memory of a plan, or [`NONE`];
/// the `region` of a live large block is its number in the history, or [`NONE`]; the first link of a live block of a plan is the
/// number of its request there, until the plan knows it by its address.
#[derive(Clone, Debug)]
struct OomphAllocator {
    settings: OomphSettings,
    /// The memory of the device, and the unit in which it can be mapped.
    device_bytes: u64,
    page: u64,
    /// The most that the process may take, by the setup, and by the program as a fraction of the device.
    limit: Option<u64>,
    fraction: f64,
    blocks: PieceTable,
    free: PerStream<StreamFreeLists>,
    /// Unmapped addresses, by address.
    gaps: BTreeMap<u64, u32>,
    mapping: ChunkMapping,
    wait_event: WaitEvent,
    /// Captures of CUDA graphs that are under way.
    captures: u32,
    /// Whether all memory belongs to captured graphs.
    in_place: bool,
    /// Blocks that other streams use, freed during a capture. An event of a capturing stream cannot be waited for, so they
    /// wait for the end of the capture first.
    postponed: VecDeque<u32>,
    history: StepHistory,
    /// The step that the program repeats.
    plan: Option<StepPlan>,
    /// Whether the plan has its memory, and the free blocks of that memory.
    is_placed: bool,
    planned_free: FreeByAddress,
    /// Requests that made memory grow since the plan was placed.
    beside_plan: u64,
    counters: OomphCounters,
    stats: Stats,
}

#[inline]
fn is_small(piece: &MemoryPiece) -> bool {
    piece.note != NONE && piece.note != PLANNED
}

#[inline]
fn is_planned(piece: &MemoryPiece) -> bool {
    piece.note == PLANNED
}

impl OomphAllocator {
    fn new(settings: OomphSettings, device_bytes: u64, page: u64) -> OomphAllocator {
        OomphAllocator {
            settings,
            device_bytes,
            page,
            limit: None,
            fraction: 1.0,
            blocks: PieceTable::default(),
            free: PerStream::default(),
            gaps: BTreeMap::new(),
            mapping: ChunkMapping::default(),
            wait_event: WaitEvent::default(),
            captures: 0,
            in_place: false,
            postponed: VecDeque::new(),
            history: StepHistory::default(),
            plan: None,
            is_placed: false,
            planned_free: FreeByAddress::default(),
            beside_plan: 0,
            counters: OomphCounters::default(),
            stats: Stats::default(),
        }
    }

    /// The memory that the process can have at most, in use or free.
    fn available(&self) -> u64 {
        let part = (self.device_bytes as f64 * self.fraction) as u64;
        self.limit.unwrap_or(u64::MAX).min(part).min(self.device_bytes)
    }

    /// The largest chunk by the memory that the process can have.
    fn largest_chunk(&self) -> u64 {
        (self.available() / PART_OF_AVAILABLE / self.page * self.page).max(LEAST_CHUNK)
    }

    /// Takes a free block of the stream.
    #[inline(always)]
    fn find_cached(&mut self, stream: StreamId, rounded: u64) -> Option<u32> {
        let free = self.free.get_mut(stream)?;
        if rounded <= self.settings.small_limit {
            let slot = free.small.find(&self.blocks, rounded)?;
            free.small.remove(&mut self.blocks, slot);
            Some(slot)
        } else {
            let slot = free.pages.find_best(&self.blocks, rounded, BEST_TRIES)?;
            free.pages.remove(&mut self.blocks, slot);
            Some(slot)
        }
    }

    /// Hands out a free block that is in no list, and cuts off what the request does not need.
    #[inline(always)]
    fn hand_out(&mut self, slot: u32, requested: u64, rounded: u64) -> (Block, bool) {
        let cut = self.cut_off(slot, rounded);
        self.stats.on_alloc(requested, rounded);
        self.blocks[slot].region = NONE;
        (self.blocks.occupy(slot, requested), cut)
    }

    #[inline(always)]
    fn served(&mut self, slot: u32, requested: u64, rounded: u64) -> Attempt {
        let (block, cut) = self.hand_out(slot, requested, rounded);
        Attempt::Served(block, if cut { Outcome::Split } else { Outcome::Hit })
    }

    /// Serves a request from the memory outside of a plan.
    #[inline(always)]
    fn alloc_anywhere(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        rounded: u64,
    ) -> Result<Attempt, StrategyError> {
        match self.find_cached(request.stream, rounded) {
            Some(slot) => Ok(self.served(slot, request.bytes, rounded)),
            None => self.alloc_slowly(cx, request, rounded),
        }
    }

    /// Serves a request that no free block of its stream fits.
    #[cold]
    fn alloc_slowly(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        rounded: u64,
    ) -> Result<Attempt, StrategyError> {
        let stream = request.stream;
        let mut found = self.find_slowly(cx, stream, rounded)?;
        let may_wait = self.captures == 0;
        let retried =
            found.is_none() && may_wait && (!self.blocks.deferred.is_empty() || self.would_suffice(cx, rounded));
        if retried {
            cx.sink.event(StrategyEvent::Retry { rounded });
            self.stats.retries += 1;
            if !self.blocks.deferred.is_empty() {
                self.complete_frees(cx, Patience::Wait)?;
                found = self.find_slowly(cx, stream, rounded)?;
            }
            if found.is_none() && self.would_suffice(cx, rounded) {
                self.release_cached(cx, &[])?;
                found = self.find_slowly(cx, stream, rounded)?;
            }
        }
        let Some((slot, created)) = found else {
            let shortage = Shortage { asked: round_up(rounded, self.page), ..Shortage::of_device(rounded) };
            return Ok(cx.out_of_memory(&mut self.stats, stream, shortage));
        };
        let (block, cut) = self.hand_out(slot, request.bytes, rounded);
        let outcome = match (created, retried, cut) {
            (true, true, _) => Outcome::ReleaseAndRetry,
            (true, false, _) => Outcome::NewSegment,
            (false, _, true) => Outcome::Split,
            (false, _, false) => Outcome::Hit,
        };
        Ok(Attempt::Served(block, outcome))
    }

    /// Whether the free memory, here and on the device, is enough in sum. Free chunks may be too
    /// large for the gaps where they are needed; given back, they become memory for other chunks.
    fn would_suffice(&self, cx: &Context<'_>, rounded: u64) -> bool {
        let cached = self.stats.current.reserved - self.stats.current.active;
        !self.is_fixed() && cached > 0 && cached.saturating_add(cx.device.free_bytes()) >= round_up(rounded, self.page)
    }

    /// A free block for the stream, in no list, by all means except waiting for deferred frees; and
    /// whether new memory was needed.
    fn find_slowly(&mut self, cx: &mut Context<'_>, stream: StreamId, rounded: u64) -> FoundBlock {
        if self.free.get(stream).is_none() {
            cx.expect_stream(stream)?;
            self.free.of(stream);
        }
        if rounded <= self.settings.small_limit {
            if let Some(slot) = self.take_cached(stream, rounded, true) {
                return Ok(Some((slot, false)));
            }
            if let Some((page_block, created)) = self.find_in_pages(cx, stream, self.settings.slab_bytes)? {
                return Ok(Some((self.make_slab(page_block), created)));
            }
        }
        self.find_in_pages(cx, stream, rounded)
    }

    /// Whether free memory serves only its own stream and stays where it is.
    fn is_fixed(&self) -> bool {
        self.captures > 0 || self.in_place
    }

    /// Completes the frees whose streams are done; none during a capture.
    #[cold]
    pub(super) fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.captures > 0 {
            return Ok(());
        }
        while let Some(&slot) = self.postponed.front() {
            self.free_postponed(cx, slot)?;
            self.postponed.pop_front();
        }
        let (completed, result) = self.blocks.completed(cx.device, patience);
        for slot in completed {
            self.blocks.report_completed(cx, &mut self.stats, slot);
            self.free_block(slot);
        }
        Ok(result?)
    }

    /// A block that was freed during a capture waits for its streams, except for those that used it in the capture alone:
    /// their work is part of the graph.
    fn free_postponed(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        if self.blocks.end_capture(slot) {
            return Ok(self.blocks.free_later(cx.device, slot)?);
        }
        self.blocks.forget_uses(slot);
        self.blocks.report_completed(cx, &mut self.stats, slot);
        self.free_block(slot);
        Ok(())
    }

    fn is_mapped(&self, slot: u32) -> bool {
        self.blocks.get(slot).is_some_and(|piece| piece.state != PieceState::Unmapped)
    }

    fn segment(&self, head: u32, slabs: &BTreeMap<u32, u32>) -> SegmentView {
        let mut blocks = Vec::new();
        for slot in self.blocks.chain(head).take_while(|&slot| self.is_mapped(slot)) {
            match slabs.get(&slot) {
                Some(&first) => blocks.extend(self.blocks.chain(first).map(|small| self.blocks[small].view())),
                None => blocks.push(self.blocks[slot].view()),
            }
        }
        let MemoryPiece { address, stream, .. } = self.blocks[head];
        let bytes = blocks.iter().map(|block: &BlockView| block.size).sum();
        SegmentView { mapped: true, ..SegmentView::new(Address(address), bytes, stream, "pages", blocks) }
    }
}

impl Strategy for OomphAllocator {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        if request.bytes > self.device_bytes {
            let shortage = Shortage::of_device(request.bytes);
            return Ok(cx.out_of_memory(&mut self.stats, request.stream, shortage));
        }
        if !self.blocks.deferred.is_empty() || !self.postponed.is_empty() {
            self.complete_frees(cx, Patience::Poll)?;
        }
        let rounded = round_up(request.bytes, QUANTUM);
        if rounded <= self.settings.small_limit || self.is_fixed() {
            return self.alloc_anywhere(cx, request, rounded);
        }
        let number = self.history.request((request.stream, rounded), self.stats.current.allocated);
        let attempt = match self.take_planned(cx, (request.stream, rounded))? {
            Some(slot) => self.served(slot, request.bytes, rounded),
            None => self.alloc_anywhere(cx, request, rounded)?,
        };
        if let Attempt::Served(block, _) = &attempt {
            self.blocks[block.slot].region = number;
        }
        Ok(attempt)
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let piece = self.blocks.live(&block)?;
        let MemoryPiece { size, requested, region, .. } = *piece;
        let shared = piece.is_shared();
        if region != NONE {
            self.history.freed(region, shared);
        }
        if shared {
            if self.captures > 0 {
                self.blocks[block.slot].state = PieceState::Pending;
                self.postponed.push_back(block.slot);
            } else {
                let users = if is_planned(piece) { self.blocks.users(block.slot).to_vec() } else { Vec::new() };
                self.blocks.free_later(cx.device, block.slot)?;
                let piece = &mut self.blocks[block.slot];
                if is_planned(piece) {
                    self.plan.iter_mut().for_each(|plan| plan.note_shared_free(block.slot, piece, &users));
                }
            }
            self.stats.on_free(size);
            return Ok(Freed::Later);
        }
        self.free_block(block.slot);
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.blocks.note_use(block, stream, self.captures > 0)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        match *command {
            Control::CaptureBegin => {
                self.prepare_capture(cx)?;
                self.captures += 1;
            }
            Control::CaptureEnd => self.captures = self.captures.saturating_sub(1),
            Control::StayInPlace(stays) => self.in_place = stays,
            Control::Fraction(fraction) => self.fraction = checked_fraction(fraction)?,
            Control::TrimInCapture { capturing } if !self.in_place => self.release_cached(cx, capturing)?,
            _ => {}
        }
        Ok(())
    }

    fn serves_pools(&self) -> bool {
        false
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        if self.is_fixed() { Ok(()) } else { self.release_cached(cx, &[]) }
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_everything(cx)?;
        let new = OomphAllocator::new(self.settings, self.device_bytes, self.page);
        *self = OomphAllocator { limit: self.limit, fraction: self.fraction, ..new };
        Ok(())
    }

    /// The largest request that a free block serves where it lies, on whatever stream it was freed.
    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        let small = |free: &StreamFreeLists| free.small.largest(&self.blocks);
        let in_pages = self.free.iter().map(|free| free.pages.largest(&self.blocks)).max().unwrap_or(0);
        let planned = self.planned_free.iter().map(|slot| self.blocks[slot].size).max().unwrap_or(0);
        let in_pages = in_pages.max(planned);
        let in_slabs = self.free.iter().map(small).max().unwrap_or(0);
        // An empty slab goes back to the page heap when memory is needed there.
        let in_pages = if in_slabs == self.settings.slab_bytes { in_pages.max(in_slabs) } else { in_pages };
        if in_pages > self.settings.small_limit {
            return Some(in_pages);
        }
        Some(self.free.get(stream).map_or(0, small).min(self.settings.small_limit))
    }

    /// Every contiguous mapped range, slabs as the small blocks in them. A range may hold blocks of
    /// several streams; it is shown as that of its first.
    fn layout(&self) -> Option<Layout> {
        let heads = self.blocks.iter().filter(|(_, piece)| is_small(piece) && piece.previous == NONE);
        let slabs: BTreeMap<u32, u32> = heads.map(|(slot, piece)| (piece.note, slot)).collect();
        let starts = |piece: &MemoryPiece| {
            !is_small(piece) && piece.state != PieceState::Unmapped && !self.is_mapped(piece.previous)
        };
        let heads = self.blocks.iter().filter(|(_, piece)| starts(piece));
        Some(Layout::of(heads.map(|(slot, _)| self.segment(slot, &slabs))))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        let counters = &self.counters;
        vec![
            ("chunks_created", counters.chunks_created),
            ("bytes_created", counters.bytes_created),
            ("chunks_moved", counters.chunks_moved),
            ("bytes_moved", counters.bytes_moved),
            ("moves", counters.moves),
            ("blocks_taken_over", counters.blocks_taken_over),
            ("slabs_made", counters.slabs_made),
            ("slabs_returned", counters.slabs_returned),
            ("steps_planned", counters.steps_planned),
            ("plans_given_up", counters.plans_given_up),
        ]
    }

    fn requires(&self) -> Capabilities {
        Capabilities::VIRTUAL_MEMORY
    }
}

//! `oomph`: an allocator of our own, built from what the suite teaches about the others.
//!
//! - Blocks are cut from a page heap: long ranges of addresses, most of them empty, in which free neighbours merge. Where
//!   free memory lies in the wrong places, whole chunks of it are unmapped there and mapped where they are needed (`room`,
//!   `stretches`), so that reserved memory grows only when no free chunk is left.
//! - Small requests are cut from slabs (`slabs`), which are blocks of the page heap and go back to it: small blocks that
//!   live long do not get in the way of large ones, and both share all memory.
//! - Free blocks are found in constant time (`shelves`), and a block is one cache line (`blocks`).
//! - Memory freed on one stream serves another before anything grows: one event makes the second wait for the first, on
//!   the device (`streams`).
//! - Driver calls are few: physical memory is made in large chunks, and what is mapped or unmapped together is one call
//!   (`mapping`).
//!
//! How large a chunk is decides between memory and driver time: a chunk moves only while all of it is free, and each costs
//! a call to make. Sizes and rounding are PyTorch's, multiples of 512 bytes.

mod blocks;
mod heap;
mod mapping;
mod release;
mod room;
mod settings;
mod shelves;
mod slabs;
mod streams;
mod stretches;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeMap;

pub use settings::Settings;

use self::{
    blocks::{Blocks, NONE, Record, State},
    mapping::Mapping,
    shelves::{QUANTUM, Shelves},
};
use super::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Refusal, Request, Setup,
    Shortage, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent, deferred::DeferredFrees,
    parameters, stream_uses::StreamUses,
};
use crate::device::Capabilities;
use oomph_base::{Address, EventId, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "oomph",
    summary: "our own: a page heap that moves free chunks to where they are needed",
    origin: "written for this suite, from what it measures; needs virtual memory",
    parameters: settings::PARAMETERS,
    variants: &[THRIFTY],
    build,
};

/// Parameters with which reserved memory stays closest to what is live, at about twice the driver time of expandable segments.
const THRIFTY: &str = "smallest_chunk:2MiB,largest_chunk:16MiB,growth_step:8MiB,slack_permille:0";

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let mut settings = Settings::default();
    parameters::read(&ENTRY, parameters, |setting| settings.apply(&setting))?;
    settings.check().map_err(|reason| SpecError::BadParameters { strategy: ENTRY.name, reason })?;
    Ok(Box::new(Oomph::new(settings, setup)))
}

/// The free blocks of one stream.
#[derive(Clone, Debug, Default)]
struct Home {
    /// Parts of slabs.
    small: Shelves,
    /// Parts of the page heap.
    pages: Shelves,
}

/// What happened so far beside the common books.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    chunks_created: u64,
    bytes_created: u64,
    chunks_moved: u64,
    bytes_moved: u64,
    moves: u64,
    blocks_taken_over: u64,
    slabs_made: u64,
    slabs_returned: u64,
}

/// Our own allocator, for one device.
#[derive(Clone, Debug)]
pub struct Oomph {
    settings: Settings,
    /// What the device has, and the unit in which it can be mapped.
    device_bytes: u64,
    page: u64,
    blocks: Blocks,
    /// By stream.
    homes: Vec<Home>,
    /// Addresses without memory, by address.
    gaps: BTreeMap<u64, u32>,
    mapping: Mapping,
    uses: StreamUses,
    /// Freed, waiting for events.
    deferred: DeferredFrees<u32>,
    /// Kept for its capacity.
    released: Vec<u32>,
    /// By which one stream waits for another.
    handover: Option<EventId>,
    counters: Counters,
    stats: Stats,
}

impl Oomph {
    /// An allocator that has reserved nothing yet.
    #[must_use]
    pub fn new(settings: Settings, setup: &Setup<'_>) -> Oomph {
        Oomph::as_new(settings, setup.props.total_bytes, setup.props.granularity_bytes)
    }

    fn as_new(settings: Settings, device_bytes: u64, page: u64) -> Oomph {
        Oomph {
            settings,
            device_bytes,
            page,
            blocks: Blocks::default(),
            homes: Vec::new(),
            gaps: BTreeMap::new(),
            mapping: Mapping::default(),
            uses: StreamUses::default(),
            deferred: DeferredFrees::default(),
            released: Vec::new(),
            handover: None,
            counters: Counters::default(),
            stats: Stats::default(),
        }
    }

    /// The live block that a handle stands for.
    #[inline]
    fn live(&self, block: &Block) -> Result<&Record, StrategyError> {
        match self.blocks.get(block.slot) {
            Some(record)
                if record.generation == block.generation
                    && record.state == State::Allocated
                    && record.address == block.address.0 =>
            {
                Ok(record)
            }
            _ => Err(StrategyError::UnknownBlock { address: block.address, slot: block.slot }),
        }
    }

    /// A cached block of the stream's own.
    #[inline(always)]
    fn find_cached(&mut self, stream: StreamId, rounded: u64) -> Option<u32> {
        let home = self.homes.get_mut(stream.index())?;
        if rounded <= self.settings.small_limit {
            let slot = home.small.find(&self.blocks, rounded)?;
            home.small.remove(&mut self.blocks, slot);
            Some(slot)
        } else {
            let slot = home.pages.find_best(&self.blocks, rounded)?;
            home.pages.remove(&mut self.blocks, slot);
            Some(slot)
        }
    }

    /// Makes a free block that is on no shelf the caller's, cutting off what it does not need.
    #[inline(always)]
    fn hand_out(&mut self, slot: u32, requested: u64, rounded: u64) -> (Block, bool) {
        let cut = self.blocks[slot].size > rounded;
        if cut {
            let rest = self.blocks.split(slot, rounded);
            self.shelve(rest);
        }
        let record = &mut self.blocks[slot];
        record.state = State::Allocated;
        record.requested = requested;
        record.generation = record.generation.wrapping_add(1);
        let block = Block { address: Address(record.address), size: rounded, slot, generation: record.generation };
        self.stats.on_alloc(requested, rounded);
        (block, cut)
    }

    /// Nothing cached fits.
    #[cold]
    fn alloc_slowly(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        rounded: u64,
    ) -> Result<Attempt, StrategyError> {
        let stream = request.stream;
        let mut found = self.find_slowly(cx, stream, rounded)?;
        let retried = found.is_none() && (!self.deferred.is_empty() || self.would_suffice(cx, rounded));
        if retried {
            cx.sink.event(StrategyEvent::Retry { rounded });
            self.stats.retries += 1;
            if !self.deferred.is_empty() {
                self.await_frees(cx)?;
                found = self.find_slowly(cx, stream, rounded)?;
            }
            if found.is_none() && self.would_suffice(cx, rounded) {
                self.release_cached(cx)?;
                found = self.find_slowly(cx, stream, rounded)?;
            }
        }
        let Some((slot, created)) = found else {
            cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free: None });
            self.stats.ooms += 1;
            let shortage = Shortage {
                rounded,
                asked: round_up(rounded, self.page),
                refused_by: Refusal::Device,
                device_free: None,
            };
            return Ok(Attempt::OutOfMemory(shortage));
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

    /// Whether what is free, here and on the device, would be enough if it lay right. Free chunks may fit nowhere together,
    /// each being larger than the room that is left where they are needed; given back, they are memory for others.
    fn would_suffice(&self, cx: &Context<'_>, rounded: u64) -> bool {
        let cached = self.stats.current.reserved - self.stats.current.active;
        cached > 0 && cached.saturating_add(cx.device.free_bytes()) >= round_up(rounded, self.page)
    }

    /// A free block for the stream, on no shelf, by all means but waiting; and whether new memory was needed.
    fn find_slowly(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        rounded: u64,
    ) -> Result<Option<(u32, bool)>, StrategyError> {
        if self.homes.len() <= stream.index() {
            cx.expect_stream(stream)?;
            self.homes.resize_with(stream.index() + 1, Home::default);
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
}

impl Strategy for Oomph {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        if request.bytes > self.device_bytes {
            let bytes = request.bytes;
            let shortage = Shortage { rounded: bytes, asked: bytes, refused_by: Refusal::Size, device_free: None };
            return Ok(Attempt::OutOfMemory(shortage));
        }
        if !self.deferred.is_empty() {
            self.poll_frees(cx)?;
        }
        let rounded = round_up(request.bytes, QUANTUM);
        match self.find_cached(request.stream, rounded) {
            Some(slot) => {
                let (block, cut) = self.hand_out(slot, request.bytes, rounded);
                Ok(Attempt::Served(block, if cut { Outcome::Split } else { Outcome::Hit }))
            }
            None => self.alloc_slowly(cx, request, rounded),
        }
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let record = self.live(&block)?;
        let (size, requested) = (record.size, record.requested);
        if record.uses != NONE {
            self.free_later(cx, block.slot)?;
            return Ok(Freed::Later);
        }
        self.free_block(block.slot);
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let record = self.live(block)?;
        if record.stream == stream {
            return Ok(());
        }
        if record.uses == NONE {
            self.blocks[block.slot].uses = self.uses.add();
        }
        self.uses.note(self.blocks[block.slot].uses, stream, false);
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.await_frees(cx)?;
        self.release_cached(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release_everything(cx)?;
        *self = Oomph::as_new(self.settings, self.device_bytes, self.page);
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        Some(self.largest_cached(stream))
    }

    fn layout(&self) -> Option<Layout> {
        Some(self.segments())
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
        ]
    }

    fn requires(&self) -> Capabilities {
        Capabilities { virtual_memory: true, ..Capabilities::NONE }
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

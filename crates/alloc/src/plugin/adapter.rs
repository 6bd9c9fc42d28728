//! A loaded plugin as a [`Strategy`].
//!
//! The interface has only `alloc` and `free`. The rest is added here: blocks get handles,
//! statistics are kept, and a free waits for other streams where the plugin has no `record_stream`.
//! A plugin never sees our device: it calls the driver itself, or makes addresses up. So the device
//! cannot limit it. The plugin receives the limit where it has a function for that; a request that
//! takes it beyond the limit, as far as that is known, is undone and fails.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::c_int,
};

use super::{
    library::{PluginCall, PluginFunctions, PluginGone},
    symbols::AllocatorSymbols,
};
use crate::device::{Capabilities, Device, DeviceClock, DeviceError, DeviceProps};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, OffBooks, Outcome, Refusal, Request, Setup,
    Shortage, Stats, Strategy, StrategyError, StrategyEvent,
    deferred::{DeferredFrees, Patience},
    slots::Slots,
};
use oomph_base::{Address, StreamId};

/// A plugin as a strategy.
#[derive(Debug)]
pub struct PluginStrategy {
    plugin: Box<dyn PluginFunctions>,
    /// The number of the device that is passed to the plugin.
    number: c_int,
    limit: Option<u64>,
    /// Whether the plugin has not received the limit yet.
    is_new: bool,
    /// Whether it was closed and not used since.
    is_closed: bool,
    blocks: Slots<RequestOrigin>,
    /// The other streams that use a block, by its slot, where the plugin has no `record_stream`.
    uses: BTreeMap<u32, Vec<StreamId>>,
    waiting: DeferredFrees<FreedBlock>,
    released: Vec<FreedBlock>,
    reserved: ReservedFigure,
    stats: Stats,
}

/// The stream that a block was requested on.
#[derive(Clone, Copy, Debug)]
struct RequestOrigin {
    stream: StreamId,
    /// Its driver handle, which a free must pass again.
    handle: u64,
}

/// A block that was freed and waits for other streams.
#[derive(Clone, Copy, Debug)]
struct FreedBlock {
    address: Address,
    size: u64,
    owner: RequestOrigin,
}

impl PluginStrategy {
    pub(super) fn new(
        plugin: Box<dyn PluginFunctions>,
        symbols: &AllocatorSymbols,
        setup: &Setup<'_>,
    ) -> PluginStrategy {
        PluginStrategy {
            plugin,
            number: c_int::try_from(setup.props.ordinal).unwrap_or(c_int::MAX),
            limit: setup.limit,
            is_new: true,
            is_closed: false,
            blocks: Slots::default(),
            uses: BTreeMap::new(),
            waiting: DeferredFrees::default(),
            released: Vec::new(),
            reserved: ReservedFigure::of(symbols.reserved.is_some(), setup.props),
            stats: Stats::default(),
        }
    }

    fn call_free(&mut self, address: Address, bytes: u64, owner: RequestOrigin) -> Result<(), PluginGone> {
        self.plugin.call(PluginCall::Free { address, bytes }, self.number, owner.handle).map(drop)
    }

    /// Gives a block back to the plugin, which may reuse it from here on.
    fn give_back(&mut self, leaving: &FreedBlock) -> Result<(), PluginGone> {
        let FreedBlock { address, size, owner } = *leaving;
        self.call_free(address, size, owner)?;
        self.stats.on_reusable(size, size);
        Ok(())
    }

    /// Gives the blocks back that no longer wait for other streams.
    fn release(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut released = std::mem::take(&mut self.released);
        let polled = self.waiting.release(cx.device, patience, &mut released);
        for leaving in released.drain(..) {
            self.give_back(&leaving)?;
            let FreedBlock { address, size: requested, owner: RequestOrigin { stream, .. } } = leaving;
            cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
        }
        self.released = released;
        Ok(polled?)
    }

    /// Updates the reserved bytes, which include all live bytes. If the driver does not answer,
    /// they stay as they are: a call that the plugin has carried out must not fail because of a
    /// statistic.
    fn note_reserved(&mut self, cx: &mut Context<'_>) {
        let told = self.reserved.look(&mut *self.plugin, self.number, cx.device);
        let told = told.unwrap_or(Some(self.stats.current.reserved)).unwrap_or(0);
        let held = told.max(self.stats.current.active);
        self.stats.current.reserved = held;
        self.stats.peak.reserved = self.stats.peak.reserved.max(held);
    }

    /// To be called before each request; prepares the first.
    fn before_first(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.reserved.before_first(cx.device)?;
        if let (true, Some(limit)) = (self.is_new, self.limit) {
            self.plugin.call(PluginCall::Limit { bytes: limit }, self.number, 0)?;
        }
        (self.is_new, self.is_closed) = (false, false);
        Ok(())
    }

    /// Requests a block. One that takes the plugin beyond the limit, where that is known, is given
    /// back at once.
    fn take(
        &mut self,
        cx: &mut Context<'_>,
        bytes: u64,
        owner: RequestOrigin,
    ) -> Result<Result<Address, Refusal>, StrategyError> {
        let address = self.plugin.call(PluginCall::Alloc { bytes }, self.number, owner.handle)?;
        let Some(address) = address.map(Address).filter(|&address| address != Address::NULL) else {
            return Ok(Err(Refusal::Device));
        };
        // If the driver does not answer, the block is kept.
        let held = |plugin: &mut PluginStrategy, cx: &mut Context<'_>| {
            plugin.reserved.look(&mut *plugin.plugin, plugin.number, cx.device).ok().flatten()
        };
        if let Some(limit) = self.limit
            && held(self, cx).is_some_and(|held| held > limit)
        {
            self.call_free(address, bytes, owner)?;
            return Ok(Err(Refusal::Limit));
        }
        Ok(Ok(address))
    }

    fn refused(&mut self, cx: &mut Context<'_>, request: &Request, refused_by: Refusal) -> Attempt {
        self.stats.ooms += 1;
        let &Request { bytes: rounded, stream, .. } = request;
        // The counters of the device do not include what the plugin holds.
        let all = cx.device.free_bytes().min(self.limit.unwrap_or(u64::MAX));
        let device_free = Some(all.saturating_sub(self.stats.current.reserved));
        cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free });
        Attempt::OutOfMemory(Shortage { rounded, asked: rounded, refused_by, device_free })
    }
}

impl Strategy for PluginStrategy {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let &Request { bytes, stream, .. } = request;
        if bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        self.release(cx, Patience::Poll)?;
        if self.limit.is_some_and(|limit| self.stats.current.active.saturating_add(bytes) > limit) {
            return Ok(self.refused(cx, request, Refusal::Limit));
        }
        if usize::try_from(bytes).is_err() {
            return Ok(self.refused(cx, request, Refusal::Size));
        }
        self.before_first(cx)?;
        let owner = RequestOrigin { stream, handle: cx.device.stream_handle(stream) };
        let mut taken = self.take(cx, bytes, owner)?;
        if taken.is_err() && !self.waiting.is_empty() {
            // The plugin cannot reuse blocks that wait here: to it they are live.
            self.stats.retries += 1;
            cx.sink.event(StrategyEvent::Retry { rounded: bytes });
            self.release(cx, Patience::Wait)?;
            taken = self.take(cx, bytes, owner)?;
        }
        if taken == Err(Refusal::Limit) {
            self.plugin.call(PluginCall::Reset, self.number, 0)?;
            taken = self.take(cx, bytes, owner)?;
        }
        let address = match taken {
            Ok(address) => address,
            Err(refused_by) => {
                self.note_reserved(cx);
                return Ok(self.refused(cx, request, refused_by));
            }
        };
        let block = self.blocks.insert(address, bytes, owner);
        self.stats.on_alloc(bytes, bytes);
        let before = self.stats.current.reserved;
        if self.reserved.may_have_grown(&block, self.stats.current.allocated) {
            self.note_reserved(cx);
        }
        let has_grown = self.stats.current.reserved > before;
        Ok(Attempt::Served(block, if has_grown { Outcome::NewSegment } else { Outcome::Hit }))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (size, owner) = self.blocks.get(&block)?;
        let leaving = FreedBlock { address: block.address, size, owner };
        let others = self.uses.get(&block.slot);
        if let Some(streams) = others {
            self.waiting.hold(cx.device, leaving, streams)?;
        }
        let freed = if others.is_some() { Freed::Later } else { Freed::Now };
        if freed == Freed::Now {
            self.call_free(block.address, size, owner)?;
        }
        self.uses.remove(&block.slot);
        self.blocks.remove(&block)?;
        self.stats.on_free(size);
        if freed == Freed::Now {
            self.stats.on_reusable(size, size);
        }
        if self.reserved.is_free_to_ask() {
            self.note_reserved(cx);
        }
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let (_, owner) = self.blocks.get(block)?;
        let record = PluginCall::RecordStream { address: block.address };
        if stream == owner.stream || self.plugin.call(record, self.number, cx.device.stream_handle(stream))?.is_some() {
            return Ok(());
        }
        let streams = self.uses.entry(block.slot).or_default();
        if let Err(place) = streams.binary_search(&stream) {
            streams.insert(place, stream);
        }
        Ok(())
    }

    fn serves_pools(&self) -> bool {
        false
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release(cx, Patience::Wait)?;
        self.plugin.call(PluginCall::Reset, self.number, 0)?;
        self.note_reserved(cx);
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release(cx, Patience::Wait)?;
        self.waiting.destroy_idle_events(cx.device)?;
        // A plugin may give the memory to another stream or to the driver at once, so no work may
        // still use it.
        cx.device.synchronize()?;
        let live: Vec<(Block, RequestOrigin)> = self.blocks.iter().collect();
        for (block, owner) in live {
            self.blocks.remove(&block)?;
            self.call_free(block.address, block.size, owner)?;
        }
        self.plugin.call(PluginCall::Reset, self.number, 0)?;
        self.uses.clear();
        self.stats = Stats::default();
        self.is_closed = true;
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn stats(&self) -> Stats {
        let off_books = if self.is_closed { OffBooks::Nothing } else { self.reserved.off_books() };
        Stats { off_books, ..self.stats }
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        None
    }

    fn layout(&self) -> Option<Layout> {
        None
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("reserved_is_known", u64::from(self.reserved.is_known())), ("frees_waiting", self.waiting.len() as u64)]
    }

    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}

/// Where the amount of memory that a plugin holds comes from: the interface has no function for it.
///
/// A plugin may export one. On a real device everything that went missing since the first request
/// is the plugin's. A driver query takes longer than most allocations, so it is made only where the
/// plugin may hold more than before: a block lies on a new page, or more is live than ever. On a
/// simulated device the amount is unknown; the live bytes are a lower bound.
#[derive(Debug)]
enum ReservedFigure {
    /// The plugin reports it.
    Told,
    /// The difference in the free memory of a real device.
    Lost(DeviceLoss),
    /// It is unknown.
    Unknown,
}

/// The free memory of a real device at first, and the pages of all blocks so far.
#[derive(Debug)]
struct DeviceLoss {
    free_at_first: Option<u64>,
    page_bytes: u64,
    seen_pages: HashSet<u64>,
    most_allocated: u64,
}

impl ReservedFigure {
    /// `reports` says whether the plugin exports a function for it.
    fn of(reports: bool, props: &DeviceProps) -> ReservedFigure {
        match (reports, props.clock) {
            (true, _) => ReservedFigure::Told,
            (false, DeviceClock::Virtual) => ReservedFigure::Unknown,
            (false, DeviceClock::Wall) => ReservedFigure::Lost(DeviceLoss {
                free_at_first: None,
                page_bytes: props.page_bytes,
                seen_pages: HashSet::new(),
                most_allocated: 0,
            }),
        }
    }

    /// Whether the figure is more than a lower bound.
    fn is_known(&self) -> bool {
        !matches!(self, ReservedFigure::Unknown)
    }

    /// What the counters of the device do not include.
    fn off_books(&self) -> OffBooks {
        if self.is_known() { OffBooks::AllReserved } else { OffBooks::Unknown }
    }

    /// Whether reading it takes no driver call.
    fn is_free_to_ask(&self) -> bool {
        !matches!(self, ReservedFigure::Lost(_))
    }

    /// Reads the free memory before the first call of the plugin.
    fn before_first(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let ReservedFigure::Lost(loss @ DeviceLoss { free_at_first: None, .. }) = self {
            loss.free_at_first = Some(device.memory_info()?.free);
        }
        Ok(())
    }

    /// Whether the plugin may hold more since it returned this block; `allocated` is the live bytes
    /// with it.
    fn may_have_grown(&mut self, block: &Block, allocated: u64) -> bool {
        let ReservedFigure::Lost(loss) = self else { return true };
        // New memory shows at the beginning of a block, memory that was extended at its end.
        let first = block.address.0 / loss.page_bytes;
        let last = block.address.0.saturating_add(block.size - 1) / loss.page_bytes;
        let is_new_place = loss.seen_pages.insert(first) | loss.seen_pages.insert(last);
        let is_new_high = allocated > loss.most_allocated;
        loss.most_allocated = loss.most_allocated.max(allocated);
        is_new_place || is_new_high
    }

    /// How much the plugin holds now, where that is known.
    fn look(
        &self,
        plugin: &mut dyn PluginFunctions,
        number: c_int,
        device: &mut dyn Device,
    ) -> Result<Option<u64>, StrategyError> {
        Ok(match self {
            ReservedFigure::Told => plugin.call(PluginCall::Reserved, number, 0)?,
            ReservedFigure::Lost(DeviceLoss { free_at_first: Some(before), .. }) => {
                Some(before.saturating_sub(device.memory_info()?.free))
            }
            ReservedFigure::Lost(_) | ReservedFigure::Unknown => None,
        })
    }
}

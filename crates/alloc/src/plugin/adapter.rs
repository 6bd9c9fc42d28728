//! A loaded plugin as a [`Strategy`].
//!
//! The interface has only `alloc` and `free`. The rest is added here: blocks get handles,
//! statistics are kept, and a free waits for other streams where the plugin has no `record_stream`.
//! On a simulated device the plugin's CUDA calls are answered by that device ([`ServedBooks`]): its
//! limit, costs and faults are the plugin's, and what the plugin does with memory is checked
//! ([`Strategy::flaws`]). On a real device it calls the driver itself, and a request that takes it
//! beyond a limit is undone and fails. A plugin that makes addresses up takes nothing from any
//! device: what it holds is unknown.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::c_int,
};

use super::{
    library::{PluginCall, PluginFunctions, PluginGone},
    served::{DeviceServer, ServedBooks, to_device, to_plugin},
    symbols::AllocatorSymbols,
    threads::ThreadsOutcome,
};
use crate::device::{Capabilities, Device, DeviceClock, DeviceError, DeviceProps};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, OffBooks, Outcome, Refusal, Request, Setup,
    Shortage, Stats, Strategy, StrategyError, StrategyEvent, ThreadedCalls,
    deferred::{DeferredFrees, Patience},
    slots::Slots,
    wrap::{ConformanceFinding, rules},
};
use oomph_base::{Address, Bytes, StreamId};

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
    is_simulated: bool,
    /// Whether it can be told to give cached memory back.
    has_reset: bool,
    /// What it took from the simulated device.
    books: ServedBooks,
    /// What it did wrong, as far as only this adapter can see it.
    flaws: Vec<ConformanceFinding>,
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
            is_simulated: setup.props.clock == DeviceClock::Virtual,
            has_reset: symbols.reset.is_some(),
            books: ServedBooks::default(),
            flaws: Vec::new(),
        }
    }

    /// Calls a function of the plugin. Its addresses are those of the device.
    fn call(&mut self, device: &mut dyn Device, call: PluginCall, stream: u64) -> Result<Option<u64>, PluginGone> {
        // Addresses that a plugin makes up are what they are.
        let is_served = self.is_served();
        let shown = |address: Address| if is_served { Address(to_plugin(address)) } else { address };
        let call = match call {
            PluginCall::Free { address, bytes } => PluginCall::Free { address: shown(address), bytes },
            PluginCall::RecordStream { address } => PluginCall::RecordStream { address: shown(address) },
            other => other,
        };
        let mut server = DeviceServer { device, books: &mut self.books };
        let result = self.plugin.call(call, self.number, stream, &mut server)?;
        if let Some(invalid) = self.books.invalid.take() {
            self.note_flaw("driver", format!("it makes a CUDA call that is not valid: {invalid}"));
        }
        let is_address = self.is_served() && matches!(call, PluginCall::Alloc { .. });
        Ok(if is_address { result.map(|address| to_device(address).0) } else { result })
    }

    fn call_free(
        &mut self,
        device: &mut dyn Device,
        address: Address,
        bytes: u64,
        owner: RequestOrigin,
    ) -> Result<(), PluginGone> {
        self.call(device, PluginCall::Free { address, bytes }, owner.handle).map(drop)
    }

    /// Whether the memory that it hands out is the simulated device's.
    fn is_served(&self) -> bool {
        self.is_simulated && self.books.takes_memory()
    }

    /// Notes a flaw, each kind once: the first is the cause of the others.
    fn note_flaw(&mut self, check: &'static str, detail: String) {
        if self.flaws.iter().all(|flaw| flaw.check != check) {
            self.flaws.push(ConformanceFinding { check, detail });
        }
    }

    /// Gives a block back to the plugin, which may reuse it from here on.
    fn give_back(&mut self, device: &mut dyn Device, leaving: &FreedBlock) -> Result<(), PluginGone> {
        let FreedBlock { address, size, owner } = *leaving;
        self.call_free(device, address, size, owner)?;
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
            self.give_back(cx.device, &leaving)?;
            let FreedBlock { address, size: requested, owner: RequestOrigin { stream, .. } } = leaving;
            cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
        }
        self.released = released;
        Ok(polled?)
    }

    /// Updates the reserved bytes, which include all live bytes. If the driver does not answer,
    /// they stay as they are: a call that the plugin has carried out must not fail because of a
    /// statistic.
    fn note_reserved(&mut self, cx: &mut Context<'_>) -> Result<(), PluginGone> {
        if self.is_served() {
            self.compare_told(cx.device)?;
            self.look_at_pools(cx);
            return Ok(());
        }
        let told = self.look(cx.device)?.unwrap_or(self.stats.current.reserved * u64::from(self.reserved.is_known()));
        let held = told.max(self.stats.current.active);
        self.stats.current.reserved = held;
        self.stats.peak.reserved = self.stats.peak.reserved.max(held);
        Ok(())
    }

    /// How much the plugin holds, where it says so or a real device shows it.
    fn look(&mut self, device: &mut dyn Device) -> Result<Option<u64>, PluginGone> {
        match &self.reserved {
            ReservedFigure::Told => self.call(device, PluginCall::Reserved, 0),
            // If the driver does not answer, it is unknown.
            ReservedFigure::Lost(loss) => Ok(loss.look(device)),
            ReservedFigure::Unknown => Ok(None),
        }
    }

    /// The reserved bytes are the pages that it holds of the simulated device.
    fn book_reserved(&mut self, cx: &mut Context<'_>) {
        let (address, stream) = (Address::NULL, StreamId::DEFAULT);
        let (before, held) = (self.stats.current.reserved, self.books.held());
        if held > before {
            cx.sink.event(StrategyEvent::SegmentMap { address, bytes: held - before, stream });
            self.stats.on_reserve(held - before, u64::from(before == 0));
        } else if held < before {
            cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes: before - held, stream });
            self.stats.on_release(before - held, u64::from(held == 0));
        }
    }

    /// Compares what the plugin says that it holds with what it holds. It may count what it asked
    /// for, or the pages that this takes, and a thread of its own may take or free memory meanwhile.
    fn compare_told(&mut self, device: &mut dyn Device) -> Result<(), PluginGone> {
        let ReservedFigure::Told = self.reserved else { return Ok(()) };
        self.books.look_at_pools(device);
        let (asked, held) = (self.books.asked(), self.books.held());
        let Some(told) = self.call(device, PluginCall::Reserved, 0)? else { return Ok(()) };
        let figures = [asked, held, self.books.asked(), self.books.held()];
        if figures.iter().all(|&figure| told < figure) || figures.iter().all(|&figure| told > figure) {
            let detail = format!("it says that it holds {told} bytes, it holds {asked}");
            self.note_flaw("reserved", detail);
        }
        Ok(())
    }

    /// To be called before each call with memory; prepares the first.
    fn before_call(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.reserved.before_first(cx.device)?;
        self.look_at_pools(cx);
        if let (true, Some(limit)) = (self.is_new, self.limit) {
            self.call(cx.device, PluginCall::Limit { bytes: limit }, 0)?;
        }
        (self.is_new, self.is_closed) = (false, false);
        Ok(())
    }

    /// The driver gives memory of pools back whenever the program waits.
    fn look_at_pools(&mut self, cx: &mut Context<'_>) {
        if self.is_served() {
            self.books.look_at_pools(cx.device);
            self.book_reserved(cx);
        }
    }

    /// Whether a plugin that takes nothing from the device would exceed the limit. Then it is kept
    /// here, by the live bytes.
    fn exceeds_limit(&self, bytes: u64) -> bool {
        self.limit.is_some_and(|limit| self.stats.current.active.saturating_add(bytes) > limit)
    }

    /// Requests a block. One that takes the plugin beyond a limit that it keeps itself, where that
    /// is known, is given back at once.
    fn take(
        &mut self,
        cx: &mut Context<'_>,
        bytes: u64,
        owner: RequestOrigin,
    ) -> Result<Result<Address, Refusal>, StrategyError> {
        let address = self.call(cx.device, PluginCall::Alloc { bytes }, owner.handle)?;
        let Some(address) = address.map(Address).filter(|&address| address != Address::NULL) else {
            return Ok(Err(Refusal::Device));
        };
        if self.is_served() {
            if let Some(at) = self.books.outside(address, bytes) {
                let part = if at == address { String::new() } else { format!(" from {at} on") };
                let detail =
                    format!("{bytes} bytes were handed out at {address}{part}, which is not memory of the plugin");
                self.note_flaw("memory", detail);
            }
            return Ok(Ok(address));
        }
        let held = self.look(cx.device)?;
        if self.limit.is_some_and(|limit| held.is_some_and(|held| held > limit)) || self.exceeds_limit(bytes) {
            self.call_free(cx.device, address, bytes, owner)?;
            return Ok(Err(Refusal::Limit));
        }
        Ok(Ok(address))
    }

    /// A request for zero bytes, which PyTorch makes for an empty tensor. Whatever the plugin
    /// returns is freed at once.
    fn request_nothing(&mut self, cx: &mut Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
        self.before_call(cx)?;
        let owner = RequestOrigin { stream, handle: cx.device.stream_handle(stream) };
        let address = self.call(cx.device, PluginCall::Alloc { bytes: 0 }, owner.handle)?;
        if let Some(address) = address.map(Address).filter(|&address| address != Address::NULL) {
            self.call_free(cx.device, address, 0, owner)?;
        }
        Ok(self.note_reserved(cx)?)
    }

    /// Gives cached memory back, and notes what cannot be given back although nothing is live.
    fn empty(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.call(cx.device, PluginCall::Reset, 0)?;
        self.books.look_at_pools(cx.device);
        if !self.has_reset || self.books.held() == 0 {
            return Ok(());
        }
        // Freed blocks may wait for streams until the next request.
        let owner = RequestOrigin { stream: StreamId::DEFAULT, handle: 0 };
        if let Ok(address) = self.take(cx, 1, owner)? {
            self.call_free(cx.device, address, 1, owner)?;
        }
        self.call(cx.device, PluginCall::Reset, 0)?;
        cx.device.synchronize()?;
        self.books.look_at_pools(cx.device);
        let (held, ranges) = (self.books.held(), self.books.ranges());
        if held > 0 {
            let detail = format!(
                "it leaks: every block was freed and reset was called, and it still holds {} of the device in {ranges} \
                 ranges",
                Bytes(held)
            );
            self.note_flaw(rules::CLOSE, detail);
        }
        Ok(())
    }

    fn refused(&mut self, cx: &mut Context<'_>, request: &Request, refused_by: Refusal) -> Attempt {
        self.stats.ooms += 1;
        let &Request { bytes: rounded, stream, .. } = request;
        let free = cx.device.free_bytes();
        let device_free = Some(match self.is_served() {
            true => free,
            // The counters of the device do not include what the plugin holds.
            false => free.min(self.limit.unwrap_or(u64::MAX)).saturating_sub(self.stats.current.reserved),
        });
        cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free });
        Attempt::OutOfMemory(Shortage { rounded, asked: rounded, refused_by, device_free })
    }
}

impl Strategy for PluginStrategy {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let &Request { bytes, stream, .. } = request;
        if bytes == 0 {
            self.request_nothing(cx, stream)?;
            return Err(StrategyError::ZeroBytes);
        }
        self.release(cx, Patience::Poll)?;
        // Without a device that limits it, a plugin may hand out addresses for any size.
        let is_imaginary = self.is_simulated && self.stats.allocs > 0 && !self.books.takes_memory();
        if (is_imaginary || !self.is_simulated) && self.exceeds_limit(bytes) {
            return Ok(self.refused(cx, request, Refusal::Limit));
        }
        if usize::try_from(bytes).is_err() {
            return Ok(self.refused(cx, request, Refusal::Size));
        }
        self.before_call(cx)?;
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
            self.call(cx.device, PluginCall::Reset, 0)?;
            taken = self.take(cx, bytes, owner)?;
        }
        let address = match taken {
            Ok(address) => address,
            Err(refused_by) => {
                self.note_reserved(cx)?;
                return Ok(self.refused(cx, request, refused_by));
            }
        };
        let block = self.blocks.insert(address, bytes, owner);
        self.stats.on_alloc(bytes, bytes);
        let before = self.stats.current.reserved;
        if self.reserved.may_have_grown(&block, self.stats.current.allocated) || self.is_served() {
            self.note_reserved(cx)?;
        }
        let has_grown = self.stats.current.reserved > before;
        Ok(Attempt::Served(block, if has_grown { Outcome::NewSegment } else { Outcome::Hit }))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (size, owner) = self.blocks.get(&block)?;
        self.before_call(cx)?;
        // The caller's size: the interface passes it.
        let leaving = FreedBlock { address: block.address, size: block.size, owner };
        let others = self.uses.get(&block.slot);
        if let Some(streams) = others {
            self.waiting.hold(cx.device, leaving, streams)?;
        }
        let freed = if others.is_some() { Freed::Later } else { Freed::Now };
        if freed == Freed::Now {
            self.call_free(cx.device, block.address, block.size, owner)?;
        }
        self.uses.remove(&block.slot);
        self.blocks.remove(&block)?;
        self.stats.on_free(size);
        if freed == Freed::Now {
            self.stats.on_reusable(size, size);
        }
        if self.reserved.is_free_to_ask() || self.is_served() {
            self.note_reserved(cx)?;
        }
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let (_, owner) = self.blocks.get(block)?;
        let record = PluginCall::RecordStream { address: block.address };
        let handle = cx.device.stream_handle(stream);
        let is_known = stream == owner.stream || self.call(cx.device, record, handle)?.is_some();
        self.look_at_pools(cx);
        if is_known {
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

    fn control(&mut self, cx: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        self.look_at_pools(cx);
        Ok(())
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.release(cx, Patience::Wait)?;
        self.before_call(cx)?;
        self.call(cx.device, PluginCall::Reset, 0)?;
        self.books.look_at_pools(cx.device);
        Ok(self.note_reserved(cx)?)
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
            self.call_free(cx.device, block.address, block.size, owner)?;
        }
        if !self.is_closed {
            self.empty(cx)?;
        }
        self.uses.clear();
        if self.is_simulated && self.plugin.restart() {
            self.books.end_process(cx.device);
            self.is_new = true;
        }
        self.stats = Stats::default();
        self.is_closed = true;
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn stats(&self) -> Stats {
        let is_on_books = self.is_closed || self.is_served();
        let off_books = if is_on_books { OffBooks::Nothing } else { self.reserved.off_books() };
        Stats { off_books, ..self.stats }
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        None
    }

    fn layout(&self) -> Option<Layout> {
        None
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        let is_known = self.is_served() || self.reserved.is_known();
        vec![
            ("reserved_is_known", u64::from(is_known)),
            ("frees_waiting", self.waiting.len() as u64),
            ("events", self.books.events() as u64),
            ("address_ranges", self.books.address_ranges() as u64),
        ]
    }

    fn flaws(&self) -> Vec<ConformanceFinding> {
        self.flaws.clone()
    }

    fn call_from_threads(
        &mut self,
        cx: &mut Context<'_>,
        threads: u64,
        calls: u64,
    ) -> Result<Option<ThreadedCalls>, StrategyError> {
        self.before_call(cx)?;
        let result = self.call(cx.device, PluginCall::Threads { threads, calls }, 0)?.unwrap_or(0);
        self.note_reserved(cx)?;
        Ok(Some(match ThreadsOutcome::of_number(result) {
            ThreadsOutcome::Served(served) => ThreadedCalls { served, overlap: None },
            ThreadsOutcome::Overlap(address) => ThreadedCalls { served: 0, overlap: Some(Address(address)) },
        }))
    }

    /// A plugin may keep what it has until it is closed.
    fn trims(&self) -> bool {
        false
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
}

impl DeviceLoss {
    /// How much went missing since the first request, where the driver answers.
    fn look(&self, device: &mut dyn Device) -> Option<u64> {
        let before = self.free_at_first?;
        Some(before.saturating_sub(device.memory_info().ok()?.free))
    }
}

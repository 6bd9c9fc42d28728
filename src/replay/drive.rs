//! The replay loop: one pass over the events per round, the blocks by slot and the device's events.
//!
//! Allocs and frees are the hot path. The order of fields in [`SlotContent`] and the split between `carry_out` and
//! `carry_out_rare` were chosen by measurement (`benches/replay_cost.rs`).

use std::{collections::HashSet, sync::atomic::Ordering};

use super::{
    FailedRequest, LiveBlock, Observer, OnOutOfMemory, OomCause, Pace, ReplayError, ReplayMoment, ReplayOptions,
    ReplayOutcome,
};
use crate::{
    base::{Address, EventId, Nanos, SiteId, StreamId, TagId, ThreadId, Work},
    device::{Device, DeviceError},
    strategy::{
        Attempt, Block, Caller, Context, Control, Request, Shortage, Strategy, StrategyError, wrap::ResumedStrategy,
    },
    trace::{
        BlockSlot, Event, LabelId, MarkKind, NO_OPERAND, Op, Source, Tables, TraceEventId,
        torch::{DEFAULT_POOL, PoolKey},
    },
};

/// Runs `source` through `strategy` on `device`. Blocks that are alive at the end stay allocated; the caller closes the
/// strategy.
pub fn replay<O: Observer>(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &ReplayOptions<'_>,
    observer: &mut O,
) -> Result<ReplayOutcome, ReplayError> {
    strategy.requires().check(device.props())?;
    let Some(initial) = options.resumes.then(|| source.initial_layout()).flatten() else {
        return drive(source, strategy, device, options, observer);
    };
    let mut resumed = ResumedStrategy::new(strategy, initial);
    let done = drive(source, &mut resumed, device, options, observer)?;
    Ok(ReplayOutcome { inherited: resumed.given, ..done })
}

/// Runs all rounds.
fn drive<O: Observer>(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &ReplayOptions<'_>,
    observer: &mut O,
) -> Result<ReplayOutcome, ReplayError> {
    let mut driver = TraceDriver {
        strategy,
        device,
        observer,
        options: *options,
        blocks: Vec::new(),
        events: TraceEvents::default(),
        streams: 1,
        step: None,
        phase: None,
        pools: PoolScopes::default(),
        done: ReplayOutcome::default(),
    };
    for round in 0..options.repeat.max(1) {
        if round > 0 {
            driver.observer.round_ends(&*driver.strategy);
            driver.free_survivors()?;
        }
        if !driver.run_round(source)? {
            break;
        }
    }
    if options.await_steps {
        let event = driver.done.events;
        driver.device.synchronize().map_err(|source| ReplayError::Device { event, source })?;
    }
    Ok(driver.done)
}

struct TraceDriver<'a, O> {
    strategy: &'a mut dyn Strategy,
    device: &'a mut dyn Device,
    observer: &'a mut O,
    options: ReplayOptions<'a>,
    blocks: Vec<SlotContent>,
    events: TraceEvents,
    /// How many streams of the trace exist on the device.
    streams: usize,
    step: Option<u32>,
    phase: Option<LabelId>,
    pools: PoolScopes,
    done: ReplayOutcome,
}

impl<O: Observer> TraceDriver<'_, O> {
    /// One pass over the trace. Returns false if the replay ends here.
    fn run_round(&mut self, source: &dyn Source) -> Result<bool, ReplayError> {
        let mut reader = source.open()?;
        loop {
            let (events, tables) = reader.next_chunk()?;
            if events.is_empty() {
                return Ok(true);
            }
            if self.options.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                self.done.interrupted = true;
                return Ok(false);
            }
            self.make_streams(tables)?;
            for event in events {
                if self.options.pace == Pace::Recorded {
                    self.device.elapse(event.delta());
                }
                let goes_on = self.carry_out(event, tables)?;
                self.done.events += 1;
                if !goes_on {
                    return Ok(false);
                }
            }
        }
    }

    #[inline]
    fn carry_out(&mut self, event: &Event, tables: &Tables) -> Result<bool, ReplayError> {
        let index = self.done.events;
        self.observer.before(&moment(index, event, tables, &*self.strategy, &*self.device));
        match event.op {
            Op::Alloc { slot, bytes, stream, tag, site } => {
                let request = Request { bytes, stream, thread: event.thread, site };
                let mut cx = Context { device: self.device, sink: self.observer };
                match self.strategy.alloc(&mut cx, &request) {
                    Ok(Attempt::Served(block, outcome)) => {
                        let live = LiveBlock { block, request, born: index, tag };
                        self.fill_slot(slot, SlotContent::block(&live));
                        let now = moment(index, event, tables, &*self.strategy, &*self.device);
                        self.observer.served(&now, &live, outcome);
                    }
                    Ok(Attempt::OutOfMemory(shortage)) => {
                        self.fill_slot(slot, SlotContent::EMPTY);
                        self.ran_out(event, tables, request, shortage);
                        if self.options.on_out_of_memory == OnOutOfMemory::Stop {
                            return Ok(false);
                        }
                    }
                    Err(source) => return Err(ReplayError::Strategy { event: index, source }),
                }
            }
            Op::Free { slot, stream } => match self.blocks.get_mut(slot as usize).and_then(SlotContent::take_block) {
                Some(live) => {
                    let now = moment(index, event, tables, &*self.strategy, &*self.device);
                    self.observer.free_requested(&now, &live);
                    let caller = Caller { stream, thread: event.thread };
                    let mut cx = Context { device: self.device, sink: self.observer };
                    let freed = self
                        .strategy
                        .free(&mut cx, live.block, caller)
                        .map_err(|source| ReplayError::Strategy { event: index, source })?;
                    let now = moment(index, event, tables, &*self.strategy, &*self.device);
                    self.observer.freed(&now, &live, freed);
                }
                None => self.done.left_out += 1,
            },
            Op::Mark { kind, label, index: step } => match kind {
                MarkKind::Phase => self.phase = Some(label),
                MarkKind::Step => {
                    if self.options.await_steps {
                        self.device.synchronize().map_err(|source| ReplayError::Device { event: index, source })?;
                    }
                    self.step = Some(step);
                    let mut cx = Context { device: self.device, sink: self.observer };
                    self.strategy
                        .control(&mut cx, &Control::StepBegins(step))
                        .map_err(|source| ReplayError::Strategy { event: index, source })?;
                }
                MarkKind::MicroBatch => {}
            },
            _ => self.carry_out_rare(event, tables)?,
        }
        self.observer.after(&moment(index, event, tables, &*self.strategy, &*self.device));
        Ok(true)
    }

    /// Carries out everything but allocs, frees and marks. A separate function keeps the hot one small.
    #[inline(never)]
    fn carry_out_rare(&mut self, event: &Event, tables: &Tables) -> Result<(), ReplayError> {
        let index = self.done.events;
        let strategy_failed = |source| ReplayError::Strategy { event: index, source };
        let device_failed = |source| ReplayError::Device { event: index, source };
        match event.op {
            Op::Alloc { .. } | Op::Free { .. } | Op::Mark { .. } => {}
            Op::Use { slot, stream } => match self.content(slot).as_block() {
                Some(live) => {
                    let mut cx = Context { device: self.device, sink: self.observer };
                    self.strategy.used_on(&mut cx, &live.block, stream).map_err(strategy_failed)?;
                }
                None => self.done.left_out += 1,
            },
            Op::EmptyCache => {
                let mut cx = Context { device: self.device, sink: self.observer };
                self.strategy.trim(&mut cx).map_err(strategy_failed)?;
            }
            Op::UsePool { pool } => {
                let mut cx = Context { device: self.device, sink: self.observer };
                self.pools.enter(self.strategy, &mut cx, pool).map_err(strategy_failed)?;
            }
            Op::ReleasePool { pool, trims } => {
                let mut cx = Context { device: self.device, sink: self.observer };
                self.pools.release(self.strategy, &mut cx, pool, trims).map_err(strategy_failed)?;
            }
            Op::EventRecord { event, stream } => {
                let event = self.device_event(event).map_err(device_failed)?;
                self.device.event_record(event, stream).map_err(device_failed)?;
            }
            Op::EventWait { event, stream } => {
                let event = self.device_event(event).map_err(device_failed)?;
                self.device.stream_wait_event(stream, event).map_err(device_failed)?;
            }
            Op::StreamSync { stream } => self.device.stream_synchronize(stream).map_err(device_failed)?,
            Op::DeviceSync => self.device.synchronize().map_err(device_failed)?,
            Op::Work { .. } if self.options.without_work => {}
            Op::Work { shape, stream, operands } => {
                self.launch(&tables.shapes()[shape as usize], stream, operands).map_err(device_failed)?;
            }
            Op::HostAlloc { slot, bytes } => {
                let content = match self.device.pinned_host() {
                    Ok(host) => SlotContent::host_buffer(host.host_alloc(bytes).map_err(device_failed)?, bytes),
                    Err(_) => SlotContent::EMPTY,
                };
                self.fill_slot(slot, content);
            }
            Op::HostFree { slot } => match (self.content(slot).as_host_buffer(), self.device.pinned_host()) {
                (Some(address), Ok(host)) => {
                    host.host_free(address).map_err(device_failed)?;
                    self.fill_slot(slot, SlotContent::EMPTY);
                }
                _ => self.done.left_out += 1,
            },
            // There are no other ranks: a collective only says how much would travel, and takes no time.
            Op::Collective { .. } => {}
            Op::Idle { nanos } => {
                if self.options.pace == Pace::Recorded {
                    self.device.elapse(Nanos(nanos));
                }
            }
        }
        Ok(())
    }

    fn content(&self, slot: BlockSlot) -> SlotContent {
        self.blocks.get(slot as usize).copied().unwrap_or(SlotContent::EMPTY)
    }

    #[inline]
    fn fill_slot(&mut self, slot: BlockSlot, content: SlotContent) {
        let slot = slot as usize;
        if slot >= self.blocks.len() {
            self.grow_slots(slot + 1);
        }
        self.blocks[slot] = content;
    }

    /// Does not take the content, which therefore stays in registers on its way into the table.
    #[cold]
    fn grow_slots(&mut self, count: usize) {
        self.blocks.resize(count, SlotContent::EMPTY);
    }

    #[cold]
    fn ran_out(&mut self, event: &Event, tables: &Tables, request: Request, shortage: Shortage) {
        let index = self.done.events;
        // Taken from the strategy or from the device's books: a diagnosis must not cost a driver call.
        let device_free = shortage.device_free.unwrap_or_else(|| self.device.free_bytes());
        let usage = self.strategy.stats().current;
        let cached_free = usage.reserved.saturating_sub(usage.active);
        let report = FailedRequest {
            event: index,
            step: self.step,
            phase: self.phase,
            request,
            shortage,
            device_free,
            device_held: self.device.held_bytes(),
            cached_free,
            largest_free: self.strategy.largest_free(request.stream),
            cause: if device_free.saturating_add(cached_free) >= shortage.rounded {
                OomCause::Fragmentation
            } else {
                OomCause::Exhaustion
            },
        };
        self.done.ooms += 1;
        self.done.first_oom.get_or_insert(report);
        let now = moment(index, event, tables, &*self.strategy, &*self.device);
        self.observer.out_of_memory(&now, &report);
    }

    fn make_streams(&mut self, tables: &Tables) -> Result<(), ReplayError> {
        while self.streams < tables.streams().len() {
            let known_as = tables.streams()[self.streams];
            self.device
                .stream_create(known_as)
                .map_err(|source| ReplayError::Device { event: self.done.events, source })?;
            self.streams += 1;
        }
        Ok(())
    }

    fn device_event(&mut self, event: TraceEventId) -> Result<EventId, DeviceError> {
        self.events.get_or_make(event, || self.device.event_create())
    }

    /// Queues work, unless the device has no compute or an operand was never served.
    fn launch(&mut self, work: &Work, stream: StreamId, slots: [BlockSlot; 4]) -> Result<(), DeviceError> {
        let mut operands = [(Address::NULL, 0); 4];
        let mut count = 0;
        for slot in slots.into_iter().filter(|&slot| slot != NO_OPERAND) {
            let Some(memory) = self.content(slot).memory() else {
                self.done.left_out += 1;
                return Ok(());
            };
            operands[count] = memory;
            count += 1;
        }
        match self.device.compute() {
            Ok(compute) => compute.launch(stream, work, &operands[..count]),
            Err(_) => Ok(()),
        }
    }

    /// Frees all blocks between two rounds: the program that left them alive has ended.
    fn free_survivors(&mut self) -> Result<(), ReplayError> {
        let event = self.done.events;
        for content in std::mem::take(&mut self.blocks) {
            if let Some(live) = content.as_block() {
                let caller = Caller { stream: live.request.stream, thread: live.request.thread };
                let mut cx = Context { device: self.device, sink: self.observer };
                self.strategy
                    .free(&mut cx, live.block, caller)
                    .map_err(|source| ReplayError::Strategy { event, source })?;
            } else if let (Some(address), Ok(host)) = (content.as_host_buffer(), self.device.pinned_host()) {
                host.host_free(address).map_err(|source| ReplayError::Device { event, source })?;
            }
        }
        let mut cx = Context { device: self.device, sink: self.observer };
        self.pools.next_round(self.strategy, &mut cx).map_err(|source| ReplayError::Strategy { event, source })
    }
}

#[inline]
fn moment<'a>(
    index: u64,
    event: &'a Event,
    tables: &'a Tables,
    strategy: &'a dyn Strategy,
    device: &'a dyn Device,
) -> ReplayMoment<'a> {
    ReplayMoment { index, event, tables, strategy, device }
}

/// The content of a slot of the trace, field by field: a block, a host buffer or nothing.
///
/// The order of the fields is chosen for speed. A strategy has just written the block that it hands out, field by
/// field. If the same fields were neighbours here, the compiler would move several of them at once, and a wide load from
/// several narrower stores waits until the processor has written all of them (store-to-load forwarding fails). In a
/// profile these waits were a third of the cost of an event. So no two fields of a [`Block`] or of a [`Request`] are
/// neighbours. Aligning contents to cache lines was slower.
#[derive(Clone, Copy)]
#[repr(C)]
struct SlotContent {
    address: Address,
    requested: u64,
    size: u64,
    born: u64,
    slot: u32,
    site: SiteId,
    generation: u32,
    tag: TagId,
    stream: StreamId,
    kind: SlotKind,
    thread: ThreadId,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotKind {
    /// Nothing, or a block whose request failed.
    Empty,
    Device,
    Host,
}

impl SlotContent {
    const EMPTY: SlotContent = SlotContent {
        address: Address::NULL,
        requested: 0,
        size: 0,
        born: 0,
        slot: 0,
        site: SiteId(0),
        generation: 0,
        tag: TagId(0),
        stream: StreamId::DEFAULT,
        kind: SlotKind::Empty,
        thread: ThreadId(0),
    };

    #[inline]
    fn block(live: &LiveBlock) -> SlotContent {
        SlotContent {
            address: live.block.address,
            requested: live.request.bytes,
            size: live.block.size,
            born: live.born,
            slot: live.block.slot,
            site: live.request.site,
            generation: live.block.generation,
            tag: live.tag,
            stream: live.request.stream,
            kind: SlotKind::Device,
            thread: live.request.thread,
        }
    }

    fn host_buffer(address: Address, bytes: u64) -> SlotContent {
        SlotContent { address, size: bytes, kind: SlotKind::Host, ..SlotContent::EMPTY }
    }

    /// The block, if there is one.
    #[inline]
    fn as_block(&self) -> Option<LiveBlock> {
        if self.kind != SlotKind::Device {
            return None;
        }
        Some(LiveBlock {
            block: Block { address: self.address, size: self.size, slot: self.slot, generation: self.generation },
            request: Request { bytes: self.requested, stream: self.stream, thread: self.thread, site: self.site },
            born: self.born,
            tag: self.tag,
        })
    }

    /// The host buffer, if there is one.
    fn as_host_buffer(&self) -> Option<Address> {
        (self.kind == SlotKind::Host).then_some(self.address)
    }

    /// Address and size, on the device or the host.
    fn memory(&self) -> Option<(Address, u64)> {
        (self.kind != SlotKind::Empty).then_some((self.address, self.size))
    }

    /// Takes the block out, if there is one. A host buffer stays.
    #[inline]
    fn take_block(&mut self) -> Option<LiveBlock> {
        let live = self.as_block()?;
        self.kind = SlotKind::Empty;
        Some(live)
    }
}

/// Maps events of a trace to events of the device. Each is created when it is first needed.
#[derive(Debug, Default)]
pub struct TraceEvents(Vec<Option<EventId>>);

impl TraceEvents {
    /// The device's event for `event`, created by `make` if there is none yet.
    pub fn get_or_make<E>(
        &mut self,
        event: TraceEventId,
        make: impl FnOnce() -> Result<EventId, E>,
    ) -> Result<EventId, E> {
        let place = event as usize;
        if place >= self.0.len() {
            self.0.resize(place + 1, None);
        }
        match self.0[place] {
            Some(event) => Ok(event),
            None => {
                let made = make()?;
                self.0[place] = Some(made);
                Ok(made)
            }
        }
    }

    /// Takes out all events that were created.
    pub fn take(&mut self) -> impl Iterator<Item = EventId> + use<> {
        std::mem::take(&mut self.0).into_iter().flatten()
    }
}

/// The private pools that a trace uses, as commands to a strategy.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolScopes {
    /// The private pool that requests use now.
    current: Option<PoolKey>,
    /// Pools that were used and not released.
    held: HashSet<PoolKey>,
    /// How often the trace was repeated. Pools of an earlier round are other pools.
    round: u64,
}

impl PoolScopes {
    /// Requests from here on use `pool`.
    pub(crate) fn enter(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
        pool: PoolKey,
    ) -> Result<(), StrategyError> {
        if pool == self.current() {
            return Ok(());
        }
        if let Some(pool) = self.current.take() {
            strategy.control(cx, &Control::PoolEnd { pool })?;
            // A scope is a user of its pool.
            strategy.control(cx, &Control::PoolRelease { pool })?;
        }
        if pool == DEFAULT_POOL {
            return Ok(());
        }
        let pool = self.of_this_round(pool);
        if self.held.insert(pool) {
            strategy.control(cx, &Control::PoolRetain { pool, use_on_oom: false })?;
        }
        strategy.control(cx, &Control::PoolBegin { pool, stream: None })?;
        self.current = Some(pool);
        Ok(())
    }

    /// The pool that requests use now.
    pub(crate) fn current(&self) -> PoolKey {
        self.current.map_or(DEFAULT_POOL, |(first, second)| (first, second.wrapping_sub(self.round << 32)))
    }

    /// The program gives up a pool.
    pub(crate) fn release(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
        pool: PoolKey,
        trims: bool,
    ) -> Result<(), StrategyError> {
        let pool = self.of_this_round(pool);
        if self.current == Some(pool) {
            self.enter(strategy, cx, DEFAULT_POOL)?;
        }
        if !self.held.remove(&pool) {
            // Nothing used it yet. A pool of an initial layout has a user.
            strategy.control(cx, &Control::PoolRetain { pool, use_on_oom: false })?;
        }
        strategy.control(cx, &Control::PoolRelease { pool })?;
        if trims {
            strategy.control(cx, &Control::PoolTrim { pool })?;
        }
        Ok(())
    }

    /// The program has ended, and runs again.
    pub(crate) fn next_round(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
    ) -> Result<(), StrategyError> {
        self.enter(strategy, cx, DEFAULT_POOL)?;
        let mut held: Vec<PoolKey> = self.held.drain().collect();
        held.sort_unstable();
        for pool in held {
            strategy.control(cx, &Control::PoolRelease { pool })?;
        }
        self.round += 1;
        Ok(())
    }

    fn of_this_round(&self, (first, second): PoolKey) -> PoolKey {
        (first, second.wrapping_add(self.round << 32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_returned_once() {
        let block = Block { address: Address(512), size: 1024, slot: 3, generation: 4 };
        let request = Request { bytes: 1000, stream: StreamId(5), thread: ThreadId(6), site: SiteId(7) };
        let live = LiveBlock { block, request, born: 8, tag: TagId(9) };
        let mut content = SlotContent::block(&live);
        assert_eq!((content.as_block(), content.as_host_buffer()), (Some(live), None));
        assert_eq!(content.memory(), Some((Address(512), 1024)));
        assert_eq!(content.take_block(), Some(live));
        assert_eq!((content.take_block(), content.memory()), (None, None));
    }

    #[test]
    fn host_buffer_is_not_a_block() {
        let mut content = SlotContent::host_buffer(Address(64), 10);
        assert_eq!(content.take_block(), None);
        assert_eq!((content.as_host_buffer(), content.memory()), (Some(Address(64)), Some((Address(64), 10))));
    }

    /// Replay touches a slot at nearly every event, so the size matters for speed.
    #[test]
    fn slot_content_takes_56_bytes() {
        assert_eq!(size_of::<SlotContent>(), 56);
    }

    #[test]
    fn failed_event_creation_is_retried() {
        let mut events = TraceEvents::default();
        assert_eq!(events.get_or_make(3, || Err("no")), Err("no"));
        assert_eq!(events.get_or_make(3, || Ok::<_, &str>(EventId(7))), Ok(EventId(7)));
        assert_eq!(events.get_or_make(3, || Err("made already")), Ok(EventId(7)));
        assert_eq!(events.take().collect::<Vec<_>>(), [EventId(7)]);
        assert_eq!(events.take().count(), 0);
    }
}

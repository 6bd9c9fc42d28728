//! Plays a trace and keeps an eye on what is in its blocks.
//!
//! A block is filled on its own stream as soon as it is there, compared on every other stream that it is used on, behind
//! the fill, and on its own before it is given back; after a trim all that live are compared. Nobody waits for any of
//! this, and nothing is looked at but contents: whether a strategy's books are right, or its blocks apart by their
//! addresses, is for others to see. The trace may be any: where a block is used, the order between streams that the fill
//! needs is made here.

use super::{super::Levels, Tally};
use crate::{
    base::{EventId, Nanos, StreamId, ThreadId},
    device::{Clock, Damage, Device, DeviceError, LONGEST_PATTERN_BYTES, Patterned, Patterns},
    replay::TraceEvents,
    strategy::{Attempt, Block, Caller, Context, Control, Request, Silent, Strategy, StrategyError},
    trace::{BlockSlot, Event, MarkKind, Op, Tables, Trace, TraceEventId},
};

/// On a real device findings are asked for once in so many events.
const EVENTS_BETWEEN_LOOKS: u64 = 64;

/// A strategy and its device, and what should be in its blocks.
pub(in crate::stress) struct Keeper<S> {
    pub(in crate::stress) strategy: S,
    pub(in crate::stress) device: Box<dyn Device>,
    /// How often a call is made that a driver error ends.
    tries: u32,
    tenants: Vec<Option<Tenant>>,
    events: TraceEvents,
    /// Streams that exist on the device.
    streams: usize,
    /// Orders one stream behind another.
    order: Option<EventId>,
    last_key: u32,
    played: u64,
    in_steps: bool,
    /// How full memory was, looked at when steps ask for more.
    pub(in crate::stress) levels: Levels,
    pub(in crate::stress) tally: Tally,
    pub(in crate::stress) damaged: Vec<Damage>,
}

/// A block that lives.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    block: Block,
    stream: StreamId,
    thread: ThreadId,
    contents: Patterned,
}

impl<S: Strategy> Keeper<S> {
    /// Calls that a driver error ends are made up to `tries` times.
    pub(in crate::stress) fn new(strategy: S, device: Box<dyn Device>, tries: u32) -> Keeper<S> {
        Keeper {
            strategy,
            device,
            tries,
            tenants: Vec::new(),
            events: TraceEvents::default(),
            streams: 1,
            order: None,
            last_key: 0,
            played: 0,
            in_steps: false,
            levels: Levels::default(),
            tally: Tally::default(),
            damaged: Vec::new(),
        }
    }

    /// Plays a trace until its end, until damage is seen or until it is told to stop. Blocks that it leaves alive stay.
    pub(in crate::stress) fn play(&mut self, trace: &Trace, over: &dyn Fn() -> bool) -> Result<(), StrategyError> {
        while let Some(&known_as) = trace.tables.streams().get(self.streams) {
            self.on_device(|device| device.stream_create(known_as))?;
            self.streams += 1;
        }
        self.in_steps = false;
        let looks_always = self.device.props().clock == Clock::Virtual;
        for event in &trace.events {
            if over() {
                break;
            }
            self.event(event, &trace.tables)?;
            self.played += 1;
            if looks_always || self.played.is_multiple_of(EVENTS_BETWEEN_LOOKS) {
                self.look()?;
                if !self.damaged.is_empty() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Compares and frees what lives, and waits until everything has been looked at.
    pub(in crate::stress) fn clear(&mut self) -> Result<(), StrategyError> {
        for slot in 0..self.tenants.len() {
            let Some(tenant) = self.tenants[slot] else { continue };
            self.free(slot as BlockSlot, Caller { stream: tenant.stream, thread: tenant.thread })?;
        }
        self.on_device(|device| device.synchronize())?;
        self.look()
    }

    /// Gives everything back: the program's own events, and the strategy's memory.
    pub(in crate::stress) fn close(&mut self) -> Result<(), StrategyError> {
        for event in self.events.take().chain(self.order.take()) {
            self.on_device(|device| device.event_destroy(event))?;
        }
        self.insist(|strategy, cx| strategy.close(cx))
    }

    fn event(&mut self, event: &Event, tables: &Tables) -> Result<(), StrategyError> {
        self.device.elapse(event.delta());
        match event.op {
            Op::Alloc { slot, bytes, stream, site, .. } => {
                self.alloc(slot, &Request { bytes, stream, thread: event.thread, site })
            }
            Op::Free { slot, stream } => self.free(slot, Caller { stream, thread: event.thread }),
            Op::Use { slot, stream } => self.use_on(slot, stream),
            Op::EmptyCache => self.trim(),
            Op::Mark { kind: MarkKind::Step, index, .. } => {
                self.in_steps = true;
                self.insist(|strategy, cx| strategy.control(cx, &Control::StepBegins(index)))
            }
            Op::EventRecord { event, stream } => {
                let event = self.device_event(event)?;
                self.on_device(|device| device.event_record(event, stream))
            }
            Op::EventWait { event, stream } => {
                let event = self.device_event(event)?;
                self.on_device(|device| device.stream_wait_event(stream, event))
            }
            Op::StreamSync { stream } => self.on_device(|device| device.stream_synchronize(stream)),
            Op::DeviceSync => self.on_device(|device| device.synchronize()),
            // Without operands: what it would write is not known.
            Op::Work { shape, stream, .. } => match tables.shapes().get(shape as usize) {
                Some(work) => self.on_device(|device| match device.compute() {
                    Some(compute) => compute.launch(stream, work, &[]),
                    None => Ok(()),
                }),
                None => Ok(()),
            },
            Op::Idle { nanos } => {
                self.device.elapse(Nanos(nanos));
                Ok(())
            }
            Op::Mark { kind: MarkKind::Phase, .. } => {
                self.in_steps = false;
                Ok(())
            }
            Op::Mark { .. } | Op::HostAlloc { .. } | Op::HostFree { .. } | Op::Collective { .. } => Ok(()),
        }
    }

    fn alloc(&mut self, slot: BlockSlot, request: &Request) -> Result<(), StrategyError> {
        let place = slot as usize;
        if place >= self.tenants.len() {
            self.tenants.resize(place + 1, None);
        }
        self.tenants[place] = None;
        if self.in_steps {
            self.levels.look_at(&self.strategy.stats().current);
        }
        let block = match self.insist(|strategy, cx| strategy.alloc(cx, request)) {
            Ok(Attempt::Served(block, _)) => block,
            Ok(Attempt::OutOfMemory(_)) => {
                self.tally.ooms += 1;
                return Ok(());
            }
            // Whoever lets calls fail on purpose gets no block.
            Err(StrategyError::Device(error)) if self.tries > 1 && !error.loses_context() => return Ok(()),
            Err(error) => return Err(error),
        };
        // Zero is the key of no block.
        self.last_key = self.last_key.checked_add(1).unwrap_or(1);
        let bytes = request.bytes.min(LONGEST_PATTERN_BYTES);
        let contents = Patterned { address: block.address, bytes, key: self.last_key };
        let tenant = Tenant { block, stream: request.stream, thread: request.thread, contents };
        self.tenants[place] = Some(tenant);
        self.with_patterns(|patterns| patterns.fill_blocks(tenant.stream, &[contents]))
    }

    fn free(&mut self, slot: BlockSlot, caller: Caller) -> Result<(), StrategyError> {
        let Some(tenant) = self.tenants.get(slot as usize).copied().flatten() else { return Ok(()) };
        self.with_patterns(|patterns| patterns.verify_blocks(tenant.stream, &[tenant.contents]))?;
        // Freed on another stream, it is the program that makes that one wait for the block's own.
        self.order_behind(tenant.stream, caller.stream)?;
        self.insist(|strategy, cx| strategy.free(cx, tenant.block, caller))?;
        self.tenants[slot as usize] = None;
        self.tally.blocks += 1;
        self.tally.handovers += u64::from(tenant.thread != caller.thread);
        Ok(())
    }

    fn use_on(&mut self, slot: BlockSlot, stream: StreamId) -> Result<(), StrategyError> {
        let Some(tenant) = self.tenants.get(slot as usize).copied().flatten() else { return Ok(()) };
        self.insist(|strategy, cx| strategy.used_on(cx, &tenant.block, stream))?;
        self.order_behind(tenant.stream, stream)?;
        self.with_patterns(|patterns| patterns.verify_blocks(stream, &[tenant.contents]))?;
        self.tally.crossings += 1;
        Ok(())
    }

    fn trim(&mut self) -> Result<(), StrategyError> {
        self.insist(|strategy, cx| strategy.trim(cx))?;
        self.tally.trims += 1;
        for stream in (0..self.streams).map(|number| StreamId(number as u16)) {
            let living = self.tenants.iter().flatten().filter(|tenant| tenant.stream == stream);
            let living: Vec<Patterned> = living.map(|tenant| tenant.contents).collect();
            if !living.is_empty() {
                self.with_patterns(|patterns| patterns.verify_blocks(stream, &living))?;
            }
        }
        Ok(())
    }

    /// Later work of `stream` comes after what is queued on `before` by now.
    fn order_behind(&mut self, before: StreamId, stream: StreamId) -> Result<(), StrategyError> {
        if before == stream {
            return Ok(());
        }
        let event = match self.order {
            Some(event) => event,
            None => *self.order.insert(insist(self.tries, || self.device.event_create())?),
        };
        self.on_device(|device| device.event_record(event, before))?;
        self.on_device(|device| device.stream_wait_event(stream, event))
    }

    fn device_event(&mut self, event: TraceEventId) -> Result<EventId, StrategyError> {
        Ok(self.events.get_or_make(event, || insist(self.tries, || self.device.event_create()))?)
    }

    /// Takes over what comparisons have come to.
    fn look(&mut self) -> Result<(), StrategyError> {
        let Some(patterns) = self.device.patterns() else { return Ok(()) };
        let verified = patterns.verified()?;
        self.tally.comparisons += verified.blocks;
        self.tally.compared_bytes += verified.bytes;
        self.tally.damaged += verified.damaged.len() as u64;
        self.damaged.extend(verified.damaged);
        Ok(())
    }

    fn with_patterns(
        &mut self,
        mut call: impl FnMut(&mut dyn Patterns) -> Result<(), DeviceError>,
    ) -> Result<(), StrategyError> {
        self.on_device(|device| call(device.require_patterns()?))
    }

    fn on_device<R>(
        &mut self,
        mut call: impl FnMut(&mut dyn Device) -> Result<R, DeviceError>,
    ) -> Result<R, StrategyError> {
        Ok(insist(self.tries, || call(&mut *self.device))?)
    }

    fn insist<R>(
        &mut self,
        mut call: impl FnMut(&mut S, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let (strategy, device) = (&mut self.strategy, &mut *self.device);
        for _ in 1..self.tries {
            match call(strategy, &mut Context { device, sink: &mut Silent }) {
                Err(StrategyError::Device(error)) if !error.loses_context() => {}
                other => return other,
            }
        }
        call(strategy, &mut Context { device, sink: &mut Silent })
    }
}

fn insist<R>(tries: u32, mut call: impl FnMut() -> Result<R, DeviceError>) -> Result<R, DeviceError> {
    for _ in 1..tries {
        match call() {
            Err(error) if !error.loses_context() => {}
            other => return other,
        }
    }
    call()
}

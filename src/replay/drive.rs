//! The loop.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Cause, Live, Moment, Observer, OnOutOfMemory, OutOfMemory, TraceEvents, tenant::Tenant};
use crate::{
    base::{Address, EventId, Nanos, StreamId, Work},
    device::{Device, DeviceError},
    strategy::{Attempt, Caller, Context, Control, Request, Shortage, Strategy, StrategyError, wrap::ResumedStrategy},
    trace::{BlockSlot, Event, LabelId, MarkKind, NO_OPERAND, Op, Source, Tables, TraceError, TraceEventId},
};

/// How to replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// What to do when a request fails.
    pub on_out_of_memory: OnOutOfMemory,
    /// How fast the host goes.
    pub pace: Pace,
    /// How often to run the whole trace, back to back in one strategy; 0 counts as 1.
    pub repeat: u32,
    /// Whether the device is waited for at every step and at the end, as by a program that times its steps.
    pub await_steps: bool,
    /// Whether work is left out: memory is then asked for as ever, and streams stay idle.
    pub without_work: bool,
    /// Whether a recording that began in the middle goes on from the memory that was there, if the strategy can take it
    /// over. Otherwise, and in every strategy that declines, its blocks are asked for first.
    pub resumes: bool,
    /// Set from outside to end the replay early.
    pub stop: Option<&'a AtomicBool>,
}

/// How fast the host goes through the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// As fast as it can: times between events are left out.
    #[default]
    Flat,
    /// The times between events pass on the device's clock.
    Recorded,
}

/// What a replay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Events carried out or left out.
    pub events: u64,
    /// Events left out because their block was never served.
    pub left_out: u64,
    /// Requests at its beginning that got a block from before a recording: see [`Options::resumes`].
    pub inherited: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// The first of them.
    pub first_oom: Option<OutOfMemory>,
    /// Whether it was stopped from outside.
    pub interrupted: bool,
}

/// Why a replay could not go on. Running out of memory is not among the reasons.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The strategy gave up.
    #[error("event {event}: {source}")]
    Strategy {
        /// At which event, from 0.
        event: u64,
        /// Why.
        source: StrategyError,
    },
    /// The device gave up.
    #[error("event {event}: {source}")]
    Device {
        /// At which event, from 0.
        event: u64,
        /// Why.
        source: DeviceError,
    },
}

impl ReplayError {
    /// Whether the device is lost to this process: see [`DeviceError::loses_context`].
    #[must_use]
    pub fn loses_context(&self) -> bool {
        match self {
            ReplayError::Trace(_) => false,
            ReplayError::Strategy { source, .. } => source.loses_context(),
            ReplayError::Device { source, .. } => source.loses_context(),
        }
    }
}

/// Runs `source` through `strategy` on `device`. Blocks still alive at the end stay so: closing is the caller's.
pub fn replay<O: Observer>(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &Options<'_>,
    observer: &mut O,
) -> Result<Replayed, ReplayError> {
    let Some(initial) = options.resumes.then(|| source.initial_layout()).flatten() else {
        return drive(source, strategy, device, options, observer);
    };
    let mut resumed = ResumedStrategy::new(strategy, initial);
    let done = drive(source, &mut resumed, device, options, observer)?;
    Ok(Replayed { inherited: resumed.given(), ..done })
}

/// All rounds, with a strategy that is not wrapped any further.
fn drive<O: Observer>(
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &Options<'_>,
    observer: &mut O,
) -> Result<Replayed, ReplayError> {
    let mut driver = Driver {
        strategy,
        device,
        observer,
        options: *options,
        blocks: Vec::new(),
        events: TraceEvents::default(),
        streams: 1,
        step: None,
        phase: None,
        done: Replayed::default(),
    };
    for round in 0..options.repeat.max(1) {
        if round > 0 {
            driver.observer.round_ends(&*driver.strategy);
            driver.free_survivors()?;
        }
        if !driver.run(source)? {
            break;
        }
    }
    if options.await_steps {
        let event = driver.done.events;
        driver.device.synchronize().map_err(|source| ReplayError::Device { event, source })?;
    }
    Ok(driver.done)
}

struct Driver<'a, O> {
    strategy: &'a mut dyn Strategy,
    device: &'a mut dyn Device,
    observer: &'a mut O,
    options: Options<'a>,
    blocks: Vec<Tenant>,
    events: TraceEvents,
    /// How many streams of the trace exist on the device.
    streams: usize,
    step: Option<u32>,
    phase: Option<LabelId>,
    done: Replayed,
}

impl<O: Observer> Driver<'_, O> {
    /// One pass over the trace. Returns false if the replay ends here.
    fn run(&mut self, source: &dyn Source) -> Result<bool, ReplayError> {
        let mut reader = source.open()?;
        let mut chunk = Vec::new();
        loop {
            let (events, tables) = reader.lend(&mut chunk)?;
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
                        let live = Live { block, request, born: index, tag };
                        self.settle(slot, Tenant::block(&live));
                        let now = moment(index, event, tables, &*self.strategy, &*self.device);
                        self.observer.served(&now, &live, outcome);
                    }
                    Ok(Attempt::OutOfMemory(shortage)) => {
                        self.settle(slot, Tenant::NOBODY);
                        self.ran_out(event, tables, request, shortage);
                        if self.options.on_out_of_memory == OnOutOfMemory::Stop {
                            return Ok(false);
                        }
                    }
                    Err(source) => return Err(ReplayError::Strategy { event: index, source }),
                }
            }
            Op::Free { slot, stream } => match self.blocks.get_mut(slot as usize).and_then(Tenant::take_block) {
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

    /// Everything but allocs, frees and marks: kept out of the hot function.
    #[inline(never)]
    fn carry_out_rare(&mut self, event: &Event, tables: &Tables) -> Result<(), ReplayError> {
        let index = self.done.events;
        let strategy_failed = |source| ReplayError::Strategy { event: index, source };
        let device_failed = |source| ReplayError::Device { event: index, source };
        match event.op {
            Op::Alloc { .. } | Op::Free { .. } | Op::Mark { .. } => {}
            Op::Use { slot, stream } => match self.tenant(slot).as_block() {
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
                let tenant = match self.device.pinned_host() {
                    Some(host) => Tenant::host_buffer(host.host_alloc(bytes).map_err(device_failed)?, bytes),
                    None => Tenant::NOBODY,
                };
                self.settle(slot, tenant);
            }
            Op::HostFree { slot } => match (self.tenant(slot).as_host_buffer(), self.device.pinned_host()) {
                (Some(address), Some(host)) => {
                    host.host_free(address).map_err(device_failed)?;
                    self.settle(slot, Tenant::NOBODY);
                }
                _ => self.done.left_out += 1,
            },
            // Other ranks are not there: a collective says how much would travel, and takes no time here.
            Op::Collective { .. } => {}
            Op::Idle { nanos } => {
                if self.options.pace == Pace::Recorded {
                    self.device.elapse(Nanos(nanos));
                }
            }
        }
        Ok(())
    }

    fn tenant(&self, slot: BlockSlot) -> Tenant {
        self.blocks.get(slot as usize).copied().unwrap_or(Tenant::NOBODY)
    }

    #[inline]
    fn settle(&mut self, slot: BlockSlot, tenant: Tenant) {
        let slot = slot as usize;
        if slot >= self.blocks.len() {
            self.add_slots(slot + 1);
        }
        self.blocks[slot] = tenant;
    }

    /// It does not see the tenant, which so stays in registers on its way into the table.
    #[cold]
    fn add_slots(&mut self, count: usize) {
        self.blocks.resize(count, Tenant::NOBODY);
    }

    #[cold]
    fn ran_out(&mut self, event: &Event, tables: &Tables, request: Request, shortage: Shortage) {
        let index = self.done.events;
        // From the strategy, or from the books: a diagnosis must not spend a driver call of its own.
        let device_free = shortage.device_free.unwrap_or_else(|| self.device.free_bytes());
        let usage = self.strategy.stats().current;
        let cached_free = usage.reserved.saturating_sub(usage.active);
        let report = OutOfMemory {
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
                Cause::Fragmentation
            } else {
                Cause::Exhaustion
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

    /// Queues work; left out where the device has no compute or an operand was never served.
    fn launch(&mut self, work: &Work, stream: StreamId, slots: [BlockSlot; 4]) -> Result<(), DeviceError> {
        let mut operands = [(Address::NULL, 0); 4];
        let mut count = 0;
        for slot in slots.into_iter().filter(|&slot| slot != NO_OPERAND) {
            let Some(memory) = self.tenant(slot).memory() else {
                self.done.left_out += 1;
                return Ok(());
            };
            operands[count] = memory;
            count += 1;
        }
        match self.device.compute() {
            Some(compute) => compute.launch(stream, work, &operands[..count]),
            None => Ok(()),
        }
    }

    /// Between two rounds: the program that left these blocks alive has ended.
    fn free_survivors(&mut self) -> Result<(), ReplayError> {
        let event = self.done.events;
        for tenant in std::mem::take(&mut self.blocks) {
            if let Some(live) = tenant.as_block() {
                let caller = Caller { stream: live.request.stream, thread: live.request.thread };
                let mut cx = Context { device: self.device, sink: self.observer };
                self.strategy
                    .free(&mut cx, live.block, caller)
                    .map_err(|source| ReplayError::Strategy { event, source })?;
            } else if let (Some(address), Some(host)) = (tenant.as_host_buffer(), self.device.pinned_host()) {
                host.host_free(address).map_err(|source| ReplayError::Device { event, source })?;
            }
        }
        Ok(())
    }
}

#[inline]
fn moment<'a>(
    index: u64,
    event: &'a Event,
    tables: &'a Tables,
    strategy: &'a dyn Strategy,
    device: &'a dyn Device,
) -> Moment<'a> {
    Moment { index, event, tables, strategy, device }
}

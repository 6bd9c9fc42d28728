//! A program that does what a trace says, with a strategy under watch.
//!
//! Calls that fail for good are left out with all that follows from them; whether their errors may be is weighed at the
//! end. [`Trial`] plays whole traces with it, `faults` one event at a time.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::{
    Trial,
    trial::{on_trial, panicked},
};
use crate::{
    base::{Address, EventId, Nanos, StreamId, Work},
    device::{Device, DeviceError},
    replay::TraceEvents,
    strategy::{Attempt, Block, Caller, Control, Refusal, Request, Strategy, StrategyError, conformance::Watch},
    trace::{BlockSlot, Event, MarkKind, NO_OPERAND, Op, Tables, Trace, TraceEventId},
};

/// What is broken where the process of an allocator died.
const DEATH: &str = "death";
/// What is broken where an allocator did not return.
pub(super) const HANG: &str = "hang";

/// A program that does what a trace says.
pub(super) struct Player {
    pub(super) watch: Watch,
    /// Whether driver errors are of our making.
    faults: bool,
    /// What may be allocated in all, as far as is known.
    capacity: u64,
    /// What the device holds for somebody else, who shares it with the strategy.
    pub(super) held_by_others: Arc<AtomicU64>,
    blocks: Vec<Option<Tenant>>,
    events: TraceEvents,
    trial: Trial,
}

/// What lives in a slot of the trace.
enum Tenant {
    Device { block: Block, stream: StreamId, used_on: Vec<StreamId> },
    Host { address: Address, bytes: u64 },
}

impl Player {
    /// A program for a strategy whose driver calls may be made to fail.
    pub(super) fn new(watch: Watch, faults: bool) -> Player {
        let capacity = watch.device.free_bytes();
        Player {
            watch,
            faults,
            capacity,
            held_by_others: Arc::default(),
            blocks: Vec::new(),
            events: TraceEvents::default(),
            trial: Trial::default(),
        }
    }

    /// Does what the trace says, up to the first broken promise.
    pub(super) fn tell(&mut self, trace: &Trace, audit_every: u64) {
        for event in &trace.events {
            self.event(event, &trace.tables);
            self.trial.events += 1;
            if self.trial.events.is_multiple_of(audit_every) {
                self.watch.strategy.audit();
            }
            if self.watch.has_findings() {
                return;
            }
        }
        self.watch.strategy.audit();
    }

    /// What was counted so far.
    pub(super) fn so_far(&self) -> &Trial {
        &self.trial
    }

    /// From now on driver errors are findings.
    pub(super) fn expect_no_faults(&mut self) {
        self.faults = false;
    }

    /// Plays the trace, closes the strategy, and tells what came of it.
    pub(super) fn play(mut self, trace: &Trace, audit_every: u64) -> Trial {
        let last = match on_trial(|| self.tell(trace, audit_every)) {
            Ok(()) => self.trial.events.checked_sub(1),
            Err(payload) => {
                self.watch.find("panic", panicked(&*payload));
                // That event was never finished, and so not counted.
                Some(self.trial.events)
            }
        };
        self.trial.findings = self.watch.findings();
        self.trial.at_event = last.filter(|_| !self.trial.findings.is_empty());
        // Closed in any case: a real device is needed again. Of a strategy that broke a promise nothing more is expected.
        let closed = on_trial(|| {
            self.give_back_own();
            self.watch.close();
            let ours = if self.faults { self.watch.device.calls().failures } else { 0 };
            self.weigh_errors(ours);
        });
        if let Err(payload) = closed {
            self.watch.find("panic", panicked(&*payload));
        }
        if self.trial.findings.is_empty() {
            self.trial.findings = self.watch.findings();
        }
        self.trial.calls = self.watch.device.ledger();
        self.trial.driver_errors = self.watch.errors().len() as u64;
        self.trial
    }

    fn event(&mut self, event: &Event, tables: &Tables) {
        self.watch.device.elapse(event.delta());
        match event.op {
            Op::Alloc { slot, bytes, stream, site, .. } => {
                self.alloc(slot, &Request { bytes, stream, thread: event.thread, site });
            }
            Op::Free { slot, stream } => self.free(slot, Caller { stream, thread: event.thread }),
            Op::Use { slot, stream } => self.use_on(slot, stream),
            Op::Mark { kind: MarkKind::Step, index, .. } => {
                let begun = self.watch.call(|strategy, cx| strategy.control(cx, &Control::StepBegins(index)));
                self.expect(begun, "the beginning of a step");
            }
            Op::EmptyCache => self.trim(),
            Op::EventRecord { event, stream } => {
                if let Some(event) = self.device_event(event) {
                    self.on_device(|device| device.event_record(event, stream));
                }
            }
            Op::EventWait { event, stream } => {
                if let Some(event) = self.device_event(event) {
                    self.on_device(|device| device.stream_wait_event(stream, event));
                }
            }
            Op::StreamSync { stream } => self.on_device(|device| device.stream_synchronize(stream)),
            Op::DeviceSync => self.on_device(|device| device.synchronize()),
            Op::Work { shape, stream, operands } => {
                if let Some(work) = tables.shapes().get(shape as usize) {
                    self.launch(work, stream, operands);
                }
            }
            Op::HostAlloc { slot, bytes } => {
                let allocated = self.watch.on_device(|device| match device.pinned_host() {
                    Some(host) => host.host_alloc(bytes).map(Some),
                    None => Ok(None),
                });
                let tenant = allocated.ok().flatten().map(|address| Tenant::Host { address, bytes });
                self.settle(slot, tenant);
            }
            Op::HostFree { slot } => {
                if let Some(Tenant::Host { address, .. }) = self.take(slot) {
                    self.host_free(address);
                }
            }
            Op::Idle { nanos } => self.watch.device.elapse(Nanos(nanos)),
            Op::Mark { .. } | Op::Collective { .. } => {}
        }
    }

    fn alloc(&mut self, slot: BlockSlot, request: &Request) {
        let idle = self.watch.strategy.stats().current.active == 0;
        let tenant = match self.watch.alloc(request) {
            Ok(Attempt::Served(block, _)) => {
                self.trial.served += 1;
                Some(Tenant::Device { block, stream: request.stream, used_on: Vec::new() })
            }
            Ok(Attempt::OutOfMemory(shortage)) => {
                self.trial.ooms += 1;
                // Whoever takes memory in steps larger than all there is may fail; whoever asks for less may not.
                let modest = request.bytes <= self.capacity / 2 && shortage.asked <= self.capacity / 2;
                if idle && modest && !self.faults && shortage.refused_by != Refusal::Size {
                    let (bytes, capacity) = (request.bytes, self.capacity);
                    let detail = format!("{bytes} of {capacity} bytes cannot be had although nothing is in use");
                    self.watch.find("lost memory", detail);
                }
                None
            }
            Err(error) => {
                self.expect(Err(error), "an alloc");
                None
            }
        };
        self.settle(slot, tenant);
    }

    fn free(&mut self, slot: BlockSlot, caller: Caller) {
        let Some(Tenant::Device { block, stream, used_on: mut users }) = self.take(slot) else { return };
        // Freed on another stream, it is the program that must have made that one wait for the block's own.
        if caller.stream == stream {
            users.push(stream);
        }
        let freed = self.watch.free(block, caller, &users).map(|_| ());
        self.expect(freed, "a free");
    }

    fn use_on(&mut self, slot: BlockSlot, stream: StreamId) {
        let Some(Some(Tenant::Device { block, .. })) = self.blocks.get(slot as usize) else { return };
        let block = *block;
        let used = self.watch.call(|strategy, cx| strategy.used_on(cx, &block, stream));
        if used.is_ok()
            && let Some(Some(Tenant::Device { used_on, .. })) = self.blocks.get_mut(slot as usize)
        {
            used_on.push(stream);
        }
        self.expect(used, "a use");
    }

    fn trim(&mut self) {
        let trimmed = self.watch.call(|strategy, cx| strategy.trim(cx));
        let whole = trimmed.is_ok();
        self.expect(trimmed, "a trim");
        let held = self.watch.device.held_bytes().saturating_sub(self.held_by_others.load(Ordering::Relaxed));
        if whole && held != 0 && self.watch.strategy.stats().current.active == 0 {
            self.watch.find("trim", format!("nothing is in use and all was trimmed, but {held} bytes are held"));
        }
    }

    fn launch(&mut self, work: &Work, stream: StreamId, slots: [BlockSlot; 4]) {
        let mut operands = Vec::with_capacity(slots.len());
        for slot in slots.into_iter().filter(|&slot| slot != NO_OPERAND) {
            match self.blocks.get(slot as usize) {
                Some(Some(Tenant::Device { block, .. })) => operands.push((block.address, block.size)),
                Some(Some(Tenant::Host { address, bytes })) => operands.push((*address, *bytes)),
                // Never served, so there is nothing to work on.
                _ => return,
            }
        }
        // Errors of the program's own calls are weighed at the end.
        let _ = self.watch.launch(stream, work, &operands);
    }

    fn device_event(&mut self, event: TraceEventId) -> Option<EventId> {
        self.events.get_or_make(event, || self.watch.on_device(|device| device.event_create())).ok()
    }

    fn settle(&mut self, slot: BlockSlot, tenant: Option<Tenant>) {
        let place = slot as usize;
        if place >= self.blocks.len() {
            self.blocks.resize_with(place + 1, || None);
        }
        self.blocks[place] = tenant;
    }

    fn take(&mut self, slot: BlockSlot) -> Option<Tenant> {
        self.blocks.get_mut(slot as usize)?.take()
    }

    /// Gives back what the program itself took of the device, its blocks left out.
    pub(super) fn give_back_own(&mut self) {
        for event in self.events.take() {
            self.on_device(|device| device.event_destroy(event));
        }
        for tenant in std::mem::take(&mut self.blocks).into_iter().flatten() {
            if let Tenant::Host { address, .. } = tenant {
                self.host_free(address);
            }
        }
    }

    fn host_free(&mut self, address: Address) {
        self.on_device(|device| match device.pinned_host() {
            Some(host) => host.host_free(address),
            None => Ok(()),
        });
    }

    /// A call of the program's own; where it fails for good it is left out, and the error is weighed at the end.
    fn on_device(&mut self, call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>) {
        let _ = self.watch.on_device(call);
    }

    /// A strategy's answer that may only be an error of the driver's: those are weighed at the end.
    fn expect(&mut self, result: Result<(), StrategyError>, what: &str) {
        match result {
            Ok(()) => {}
            Err(StrategyError::Device(_)) if self.faults => {}
            Err(StrategyError::Died(reason)) => self.watch.find(DEATH, reason),
            Err(StrategyError::Hung(reason)) => self.watch.find(HANG, reason),
            Err(error) => self.watch.find("error", format!("{what} failed: {error}")),
        }
    }

    /// Driver errors must be ours: without faults there are none, and nobody breaks the driver's rules.
    pub(super) fn weigh_errors(&mut self, ours: u64) {
        let errors = self.watch.errors();
        if errors.len() as u64 > ours {
            let (count, last) = (errors.len(), errors.last().map(ToString::to_string).unwrap_or_default());
            self.watch.find("driver", format!("{count} driver errors where {ours} calls failed, the last: {last}"));
        }
        let against_rules = |error: &&StrategyError| {
            matches!(error, StrategyError::Device(DeviceError::InvalidValue { .. } | DeviceError::Unsupported { .. }))
        };
        if let Some(error) = self.watch.errors().iter().find(against_rules).map(ToString::to_string) {
            self.watch.find("driver", format!("a driver call against the rules: {error}"));
        }
    }
}

//! One trace played through one strategy, with everything that it promises looked at on the way.
//!
//! The strategy runs under [`Watch`]: blocks, handles, books, events, physical memory and early reuse are compared
//! at every call, layout and books every few events. After the trace it is closed, live blocks or not, and the device
//! must hold nothing. Running out of memory is no finding, a panic is. Every kind of stress that plays traces calls this;
//! it knows nothing of where they come from.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use super::{Subject, SubjectError};
use crate::{
    device::{
        CallLedger, Capabilities, Device, DeviceError,
        wrap::{FaultPlan, Faulty},
    },
    strategy::{
        Attempt, Block, Caller, Control, Refusal, Request, Strategy, StrategyError,
        conformance::{Finding, Watch},
    },
    trace::{BlockSlot, Event, MarkKind, NO_OPERAND, Op, Tables, Trace, TraceEventId},
    unit::{Address, EventId, Nanos, StreamId, Work},
};

/// However long a trace, its layout is compared with the books about this often: that is slow.
const AUDITS: u64 = 512;

/// Under which conditions a trace is played.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// Driver calls that fail.
    pub faults: FaultPlan,
    /// After how many events layout and books are compared; 0 for a number that suits the trace's length.
    pub audit_every: u64,
}

/// What a trial came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// Broken promises, the first one first. The trace is not played on after one.
    pub findings: Vec<Finding>,
    /// The event after which the first of them was seen; `None` where it was before the first or at the close.
    pub at_event: Option<u64>,
    /// Events played.
    pub events: u64,
    /// Requests that were served.
    pub served: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Driver calls, failed ones included.
    pub calls: CallLedger,
    /// Driver errors that came through the strategy.
    pub driver_errors: u64,
}

/// Why a trial cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// There is no such subject.
    #[error(transparent)]
    Subject(#[from] SubjectError),
    /// The device lacks something.
    #[error("this device has no {0}")]
    Missing(Capabilities),
}

impl Trial {
    /// Plays a trace through the subject's strategy on a fresh device. The trace must hold together
    /// ([`check`](crate::trace::check)).
    pub fn of(subject: &Subject, trace: &Trace, conditions: &Conditions) -> Result<Trial, TrialError> {
        let device = subject.open_device()?;
        let strategy = subject.build(device.props()).map_err(SubjectError::from)?;
        let missing = strategy.requires().missing_from(device.props().capabilities);
        if missing != Capabilities::NONE {
            return Err(TrialError::Missing(missing));
        }
        let device: Box<dyn Device> = Box::new(Faulty::with(conditions.faults.clone(), device));
        let watch = Watch::new(strategy, device, trace.tables.streams().get(1..).unwrap_or_default());
        Ok(Player::new(watch, conditions.faults != FaultPlan::none()).play(trace, conditions))
    }

    /// What was broken first, in a word: shrinking a trace must not end at another fault than it began with.
    #[must_use]
    pub fn broke(&self) -> Option<&'static str> {
        self.findings.first().map(|finding| finding.part)
    }
}

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
    events: Vec<Option<EventId>>,
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
            events: Vec::new(),
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

    fn play(mut self, trace: &Trace, conditions: &Conditions) -> Trial {
        let audit_every = match conditions.audit_every {
            0 => (trace.events.len() as u64).div_ceil(AUDITS).max(1),
            chosen => chosen,
        };
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
        let place = event as usize;
        if place >= self.events.len() {
            self.events.resize(place + 1, None);
        }
        if self.events[place].is_none() {
            self.events[place] = self.watch.on_device(|device| device.event_create()).ok();
        }
        self.events[place]
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
        for event in std::mem::take(&mut self.events).into_iter().flatten() {
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

thread_local! {
    static ON_TRIAL: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread plays a trial at the moment: a panic is then a finding, and nobody need be told of it otherwise.
#[must_use]
pub fn is_on_trial() -> bool {
    ON_TRIAL.get()
}

/// Plays something that may panic.
pub(super) fn on_trial<T>(play: impl FnOnce() -> T) -> thread::Result<T> {
    ON_TRIAL.set(true);
    let result = catch_unwind(AssertUnwindSafe(play));
    ON_TRIAL.set(false);
    result
}

/// The words of a panic.
pub(super) fn panicked(payload: &(dyn Any + Send)) -> String {
    let said = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", said.unwrap_or("without words"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        strategy::StrategySpec,
        stress::PlannedFault,
        trace::TraceBuilder,
        unit::{KIB, MIB, TagId},
    };

    fn subject(strategy: &str, memory_bytes: u64) -> Subject {
        let device = "sim".parse().unwrap();
        Subject { strategy: StrategySpec::from(strategy), device, memory_bytes: Some(memory_bytes) }
    }

    /// Three blocks of 10 MiB, the first freed on the way, the last one alive at the end.
    fn three_blocks() -> Trace {
        let mut story = TraceBuilder::new();
        let blocks = [(); 3].map(|()| story.alloc(10 * MIB, StreamId::DEFAULT, TagId(0)));
        story.free(blocks[0]);
        story.free(blocks[1]);
        story.empty_cache();
        story.finish("three blocks")
    }

    fn tried(strategy: &str, memory_bytes: u64, faults: &[PlannedFault]) -> Trial {
        let conditions = Conditions { faults: PlannedFault::plan(faults), audit_every: 1 };
        Trial::of(&subject(strategy, memory_bytes), &three_blocks(), &conditions).unwrap()
    }

    #[test]
    fn what_happened_is_counted_and_running_out_is_no_finding() {
        let roomy = tried("direct", 64 * MIB, &[]);
        assert_eq!((roomy.events, roomy.served, roomy.ooms, roomy.broke()), (6, 3, 0, None));
        assert!(roomy.calls.total().count >= 6);
        let tight = tried("direct", 24 * MIB, &[]);
        assert_eq!((tight.events, tight.served, tight.ooms, tight.broke()), (6, 2, 1, None));
    }

    #[test]
    fn a_trace_is_not_played_on_after_a_finding() {
        let trial = tried("flawed:KeepsCache", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (None, None), "a block is alive at the trim");
        let trial = tried("flawed:DoubleHandOutAfterTrim", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("layout"), Some(5)));
        let trial = tried("flawed:RoundsDown", 64 * MIB, &[]);
        assert_eq!((trial.broke(), trial.events), (None, 6), "10 MiB are round");
    }

    #[test]
    fn a_panic_is_a_finding_at_the_event_that_panicked() {
        let trial = tried("flawed:Panics", 24 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("panic"), Some(2)));
        assert_eq!(trial.findings[0].detail, "panicked: out of memory");
        assert!(!is_on_trial());
    }

    #[test]
    fn a_flaw_that_needs_no_event_is_seen_without_one() {
        let nothing = TraceBuilder::new().finish("nothing");
        let trial = Trial::of(&subject("flawed:BoastsOfLargestFree", MIB), &nothing, &Conditions::default()).unwrap();
        assert_eq!((trial.broke(), trial.at_event), (Some("layout"), None));
    }

    #[test]
    fn errors_that_are_injected_are_forgiven_and_others_are_not() {
        let fault = "cuMemAlloc:2".parse().unwrap();
        let trial = tried("direct", 64 * MIB, &[fault]);
        assert_eq!((trial.broke(), trial.served, trial.driver_errors), (None, 3, 1), "the call was made again");
        let trial = tried("flawed:FailsOnExhaustion", 24 * MIB, &[]);
        assert_eq!((trial.broke(), trial.at_event), (Some("error"), Some(2)));
    }

    #[test]
    fn what_the_program_takes_itself_is_given_back() {
        let mut story = TraceBuilder::new();
        let stream = story.new_stream().unwrap();
        let event = story.new_event();
        story.host_alloc(KIB);
        story.event_record(event, stream);
        story.event_wait(event, StreamId::DEFAULT);
        let trial = Trial::of(&subject("direct", MIB), &story.finish("own"), &Conditions::default()).unwrap();
        assert_eq!((trial.broke(), trial.events), (None, 3));
    }
}

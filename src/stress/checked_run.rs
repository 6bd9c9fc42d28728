//! Plays one trace through one strategy and checks everything that a strategy promises.
//!
//! The strategy runs under [`ObservedStrategy`]: blocks, handles, statistics, events, physical
//! memory and early reuse are checked at every call, layout and statistics every few events. After
//! the trace the strategy is closed, with or without live blocks, and the device must hold nothing.
//! Running out of memory is not a finding; a panic is. Driver calls that fail for good are left out
//! together with everything that depends on them, and their errors are judged at the end.

use std::{
    any::Any,
    cell::Cell,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use super::{StressTarget, TargetError};
use crate::{
    base::{Address, EventId, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{
        CallLedger, Device, DeviceClock, DeviceError,
        wrap::{FaultPlan, FaultyDevice},
    },
    replay::{PoolScopes, TraceEvents},
    strategy::{
        Attempt, Block, Caller, Control, OffBooks, Refusal, Request, Shortage, Stats, Strategy, StrategyError,
        conformance::{ConformanceFinding, ObservedStrategy},
    },
    trace::{BlockSlot, Event, MarkKind, NO_OPERAND, Op, Tables, Trace, TraceEventId},
};

/// Comparing layout and statistics is slow, so it is done about this often per trace.
const AUDITS: u64 = 512;
/// A trace of at most this many events is played again after the close.
const SHORT_EVENTS: usize = 400;
/// The finding if the process of an allocator died.
const DEATH: &str = "death";
/// The finding if an allocator did not return.
pub(super) const HANG: &str = "hang";
/// How long a short run may take. It takes milliseconds on a simulated device and seconds on a real
/// one; the machine may be busy.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(20);
/// How much longer each event of a trace may take.
const TIME_PER_EVENT: Duration = Duration::from_millis(20);

/// The result of playing one trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckedRun {
    /// Broken promises in order. The trace ends after the first one.
    pub findings: Vec<ConformanceFinding>,
    /// The event after which the first finding was made; `None` before the first event and at the
    /// close.
    pub at_event: Option<u64>,
    /// Events played.
    pub events: u64,
    /// Requests that were served.
    pub served: u64,
    /// Requests that ran out of memory.
    pub ooms: u64,
    /// Driver calls, including failed ones.
    pub calls: CallLedger,
    /// Whether the calls include those of the strategy: a plugin that makes addresses up shows none.
    pub calls_are_known: bool,
    /// Driver errors that the strategy returned.
    pub driver_errors: u64,
}

impl CheckedRun {
    /// Plays a trace, which must be valid ([`check`](crate::trace::check)), on a fresh target.
    ///
    /// A strategy that does not return is a finding: on a simulated device it runs in a thread of its own, which is left
    /// behind. A plugin has a process and a time-out of its own.
    pub fn of(target: &StressTarget, trace: &Trace, faults: FaultPlan) -> Result<CheckedRun, TargetError> {
        if target.is_plugin() || !target.device.is_simulated() {
            return CheckedRun::here(target, trace, faults);
        }
        let limit = time_limit(trace.events.len());
        let (target, trace) = (target.clone(), trace.clone());
        match run_within(limit, move || CheckedRun::here(&target, &trace, faults)) {
            Ok(run) => run,
            Err(aborted) => {
                let finding = ConformanceFinding { check: HANG, detail: aborted.to_string() };
                Ok(CheckedRun { findings: vec![finding], ..CheckedRun::default() })
            }
        }
    }

    fn here(target: &StressTarget, trace: &Trace, faults: FaultPlan) -> Result<CheckedRun, TargetError> {
        let (strategy, device) = target.open()?;
        let with_faults = faults != FaultPlan::none();
        let device: Box<dyn Device> = Box::new(FaultyDevice::with(faults, device));
        let watch = ObservedStrategy::new(strategy, device, trace.tables.streams().get(1..).unwrap_or_default());
        let audit_every = (trace.events.len() as u64).div_ceil(AUDITS).max(1);
        Ok(CheckedPlayer::new(watch, with_faults, target.is_plugin()).play(trace, audit_every))
    }

    /// The promise that was broken first, in one word. A trace must not shrink to one that breaks
    /// another promise.
    pub fn broke(&self) -> Option<&'static str> {
        self.findings.first().map(|finding| finding.check)
    }
}

/// Carries out the events of a trace on a strategy under watch.
pub(super) struct CheckedPlayer {
    pub(super) watch: ObservedStrategy,
    /// Whether driver errors are injected; otherwise they are findings.
    pub(super) faults: bool,
    /// Whether the strategy is a plugin, which promises less.
    is_plugin: bool,
    /// The most that can be allocated in all.
    capacity: u64,
    /// The largest request that was served.
    largest_served: u64,
    /// Bytes of the device that another process holds.
    pub(super) held_by_others: Arc<AtomicU64>,
    blocks: Vec<Option<SlotContents>>,
    events: TraceEvents,
    pools: PoolScopes,
    /// The counts so far.
    pub(super) run: CheckedRun,
}

/// What a slot of the trace holds.
enum SlotContents {
    Device { block: Block, stream: StreamId, used_on: Vec<StreamId> },
    Host { address: Address, bytes: u64 },
}

/// Whether a program ends with the same counters each time. On a real device a free that waits for another stream ends sooner or
/// later, and until then its block is counted.
pub(super) fn counters_repeat(trace: &Trace, clock: DeviceClock) -> bool {
    clock == DeviceClock::Virtual || !trace.events.iter().any(|event| matches!(event.op, Op::Use { .. }))
}

impl CheckedPlayer {
    pub(super) fn new(watch: ObservedStrategy, faults: bool, is_plugin: bool) -> CheckedPlayer {
        let capacity = watch.device.free_bytes();
        CheckedPlayer {
            watch,
            faults,
            is_plugin,
            capacity,
            largest_served: 0,
            held_by_others: Arc::default(),
            blocks: Vec::new(),
            events: TraceEvents::default(),
            pools: PoolScopes::default(),
            run: CheckedRun::default(),
        }
    }

    /// Carries out the trace up to the first finding.
    pub(super) fn carry_out(&mut self, trace: &Trace, audit_every: u64) {
        for event in &trace.events {
            self.event(event, &trace.tables);
            self.run.events += 1;
            if self.run.events.is_multiple_of(audit_every) {
                self.watch.strategy.audit();
            }
            if self.watch.has_findings() {
                return;
            }
        }
        self.watch.strategy.audit();
    }

    /// Plays the trace and closes the strategy.
    fn play(mut self, trace: &Trace, audit_every: u64) -> CheckedRun {
        let mut at_end = Stats::default();
        let mut play = |player: &mut CheckedPlayer| {
            player.carry_out(trace, audit_every);
            at_end = player.watch.strategy.stats();
            player.try_largest_free();
        };
        let last = match catch_panic(|| play(&mut self)) {
            Ok(()) => self.run.events.checked_sub(1),
            Err(payload) => {
                self.watch.find("panic", panic_message(&*payload));
                // The event that panicked was not counted.
                Some(self.run.events)
            }
        };
        self.run.calls_are_known = self.watch.strategy.stats().off_books == OffBooks::Nothing;
        self.run.findings = self.watch.findings();
        self.run.at_event = last.filter(|_| !self.run.findings.is_empty());
        // Closed in any case, because a real device is needed again. After a finding nothing more
        // is expected.
        let closed = catch_panic(|| {
            self.free_own();
            self.watch.close();
            let injected = if self.faults { self.watch.device.calls().failures } else { 0 };
            self.judge_errors(injected);
        });
        if let Err(payload) = closed {
            self.watch.find("panic", panic_message(&*payload));
        }
        if self.run.findings.is_empty() {
            self.run.findings = self.watch.findings();
        }
        self.run.calls = self.watch.device.ledger();
        self.run.driver_errors = self.watch.errors.len() as u64;
        if self.run.findings.is_empty() && !self.faults && !self.is_plugin && trace.events.len() <= SHORT_EVENTS {
            let counted = self.run.clone();
            if let Err(payload) = catch_panic(|| self.play_again(trace, audit_every, &at_end)) {
                self.watch.find("panic", panic_message(&*payload));
            }
            self.run = CheckedRun { findings: self.watch.findings(), ..counted };
        }
        self.run
    }

    /// Plays the trace again after the close: a strategy that was closed is as new.
    fn play_again(&mut self, trace: &Trace, audit_every: u64, expected: &Stats) {
        self.carry_out(trace, audit_every);
        let stats = self.watch.strategy.stats();
        if stats != *expected && counters_repeat(trace, self.watch.device.props().clock) && !self.watch.has_findings() {
            let differences = stats.differences(expected).join(", ");
            self.watch
                .find("not as new", format!("after a close the same program ends with other counters: {differences}"));
        }
        self.free_own();
        self.watch.close();
    }

    /// Requests what the strategy says that it could serve without new memory.
    fn try_largest_free(&mut self) {
        if self.faults || self.watch.has_findings() {
            return;
        }
        let request = |bytes| Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) };
        let Some(bytes) = self.watch.strategy.largest_free(StreamId::DEFAULT).filter(|&bytes| bytes > 0) else {
            return;
        };
        match self.watch.alloc(&request(bytes)) {
            Ok(Attempt::Served(block, _)) => {
                let freed = self.watch.free(block, Caller::default(), &[]).map(|_| ());
                self.expect(freed, "a free");
            }
            Ok(Attempt::OutOfMemory(_)) => {
                let detail = format!("{bytes} bytes should be free for this stream, but cannot be allocated");
                self.watch.find("largest free", detail);
            }
            Err(error) => self.expect(Err(error), "an alloc"),
        }
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
            Op::UsePool { pool } => {
                let used = self.watch.call(|strategy, cx| self.pools.enter(strategy, cx, pool));
                self.expect(used, "the use of a pool");
            }
            Op::ReleasePool { pool, trims } => {
                let released = self.watch.call(|strategy, cx| self.pools.release(strategy, cx, pool, trims));
                self.expect(released, "the release of a pool");
            }
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
                    Ok(host) => host.host_alloc(bytes).map(Some),
                    Err(_) => Ok(None),
                });
                let contents = allocated.ok().flatten().map(|address| SlotContents::Host { address, bytes });
                self.set_slot(slot, contents);
            }
            Op::HostFree { slot } => {
                if let Some(SlotContents::Host { address, .. }) = self.take(slot) {
                    self.host_free(address);
                }
            }
            Op::Idle { nanos } => self.watch.device.elapse(Nanos(nanos)),
            Op::Mark { .. } | Op::Collective { .. } => {}
        }
    }

    fn alloc(&mut self, slot: BlockSlot, request: &Request) {
        let idle = self.watch.strategy.stats().current.active == 0;
        let contents = match self.watch.alloc(request) {
            Ok(Attempt::Served(block, _)) => {
                self.run.served += 1;
                self.largest_served = self.largest_served.max(request.bytes);
                Some(SlotContents::Device { block, stream: request.stream, used_on: Vec::new() })
            }
            Ok(Attempt::OutOfMemory(shortage)) => {
                self.run.ooms += 1;
                if idle && !self.faults && shortage.refused_by != Refusal::Size && self.must_serve(request, &shortage) {
                    let (bytes, capacity) = (request.bytes, self.capacity);
                    let detail = format!("{bytes} of {capacity} bytes cannot be allocated although nothing is in use");
                    self.watch.find("lost memory", detail);
                }
                None
            }
            Err(error) => {
                self.expect(Err(error), "an alloc");
                None
            }
        };
        self.set_slot(slot, contents);
    }

    /// Whether a strategy of which nothing is in use must serve a request. One that grows in steps
    /// larger than the memory may fail; one that requests less may not, unless it is the model of an allocator that keeps
    /// its memory. A plugin may have a region of any size, and blocks that wait for streams: it must serve what it has served
    /// before.
    fn must_serve(&self, request: &Request, shortage: &Shortage) -> bool {
        match self.is_plugin {
            true => request.bytes <= self.largest_served && self.watch.is_idle(),
            false => {
                let half = self.capacity / 2;
                self.watch.strategy.trims() && request.bytes <= half && shortage.asked <= half
            }
        }
    }

    fn free(&mut self, slot: BlockSlot, caller: Caller) {
        let Some(SlotContents::Device { block, stream, used_on: mut users }) = self.take(slot) else { return };
        // A free on another stream is valid only if the program made that stream wait for the
        // block's own.
        if caller.stream == stream {
            users.push(stream);
        }
        let freed = self.watch.free(block, caller, &users).map(|_| ());
        self.expect(freed, "a free");
    }

    fn use_on(&mut self, slot: BlockSlot, stream: StreamId) {
        let Some(Some(SlotContents::Device { block, .. })) = self.blocks.get(slot as usize) else { return };
        let block = *block;
        let used = self.watch.call(|strategy, cx| strategy.used_on(cx, &block, stream));
        if used.is_ok()
            && let Some(Some(SlotContents::Device { used_on, .. })) = self.blocks.get_mut(slot as usize)
        {
            used_on.push(stream);
        }
        self.expect(used, "a use");
    }

    fn trim(&mut self) {
        let trimmed = self.watch.call(|strategy, cx| strategy.trim(cx));
        let succeeded = trimmed.is_ok();
        self.expect(trimmed, "a trim");
        let held = self.watch.device.held_bytes().saturating_sub(self.held_by_others.load(Ordering::Relaxed));
        // Some keep what they have; what must be given back at the close is checked there.
        if succeeded && held != 0 && self.watch.strategy.trims() && self.watch.strategy.stats().current.active == 0 {
            self.watch.find("trim", format!("nothing is in use and all was trimmed, but {held} bytes are held"));
        }
    }

    fn launch(&mut self, work: &Work, stream: StreamId, slots: [BlockSlot; 4]) {
        let mut operands = Vec::with_capacity(slots.len());
        for slot in slots.into_iter().filter(|&slot| slot != NO_OPERAND) {
            match self.blocks.get(slot as usize) {
                Some(Some(SlotContents::Device { block, .. })) => operands.push((block.address, block.size)),
                Some(Some(SlotContents::Host { address, bytes })) => operands.push((*address, *bytes)),
                // An operand was never served, so there is nothing to work on.
                _ => return,
            }
        }
        // Errors of the program's own calls are judged at the end.
        let _ = self.watch.launch(stream, work, &operands);
    }

    fn device_event(&mut self, event: TraceEventId) -> Option<EventId> {
        self.events.get_or_make(event, || self.watch.on_device(|device| device.event_create())).ok()
    }

    fn set_slot(&mut self, slot: BlockSlot, contents: Option<SlotContents>) {
        let slot = slot as usize;
        if slot >= self.blocks.len() {
            self.blocks.resize_with(slot + 1, || None);
        }
        self.blocks[slot] = contents;
    }

    fn take(&mut self, slot: BlockSlot) -> Option<SlotContents> {
        self.blocks.get_mut(slot as usize)?.take()
    }

    /// Frees everything, and waits: the program's end, if it is to be played again. A program that is shrunk may have lost
    /// its frees.
    pub(super) fn end_round(&mut self) {
        for slot in 0..self.blocks.len() as BlockSlot {
            if let Some(Some(SlotContents::Device { stream, .. })) = self.blocks.get(slot as usize) {
                let stream = *stream;
                self.free(slot, Caller { stream, thread: ThreadId::default() });
            }
        }
        self.free_own();
        self.on_device(|device| device.synchronize());
    }

    /// Frees what the program itself took from the device: events and host memory, but not its
    /// blocks.
    pub(super) fn free_own(&mut self) {
        for event in self.events.take() {
            self.on_device(|device| device.event_destroy(event));
        }
        for contents in std::mem::take(&mut self.blocks).into_iter().flatten() {
            if let SlotContents::Host { address, .. } = contents {
                self.host_free(address);
            }
        }
    }

    fn host_free(&mut self, address: Address) {
        self.on_device(|device| match device.pinned_host() {
            Ok(host) => host.host_free(address),
            Err(_) => Ok(()),
        });
    }

    /// A call of the program's own. If it fails for good it is left out, and the error is judged at
    /// the end.
    fn on_device(&mut self, call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>) {
        let _ = self.watch.on_device(call);
    }

    /// Checks that the only errors of a strategy are driver errors, which are judged at the end.
    fn expect(&mut self, result: Result<(), StrategyError>, what: &str) {
        match result {
            Ok(()) => {}
            Err(StrategyError::Device(_)) if self.faults => {}
            Err(StrategyError::Died(reason)) => self.watch.find(DEATH, reason),
            Err(StrategyError::Hung(reason)) => self.watch.find(HANG, reason),
            Err(error) => self.watch.find("error", format!("{what} failed: {error}")),
        }
    }

    /// Checks that there are no more driver errors than injected ones, and that no call was
    /// invalid.
    pub(super) fn judge_errors(&mut self, injected: u64) {
        let errors = &self.watch.errors;
        if errors.len() as u64 > injected {
            let (count, last) = (errors.len(), errors.last().map(ToString::to_string).unwrap_or_default());
            self.watch.find(
                "driver",
                format!("{count} driver errors although only {injected} calls failed, the last: {last}"),
            );
        }
        let is_invalid = |error: &&StrategyError| {
            matches!(error, StrategyError::Device(DeviceError::InvalidValue { .. } | DeviceError::Unsupported(_)))
        };
        if let Some(error) = self.watch.errors.iter().find(is_invalid).map(ToString::to_string) {
            self.watch.find("driver", format!("an invalid driver call: {error}"));
        }
    }
}

thread_local! {
    static UNDER_TEST: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread runs a strategy under test. A panic is then a finding and need not be
/// printed.
pub fn is_under_test() -> bool {
    UNDER_TEST.get()
}

/// Runs code of a strategy under test, which may panic.
pub(super) fn catch_panic<T>(play: impl FnOnce() -> T) -> thread::Result<T> {
    UNDER_TEST.set(true);
    let result = catch_unwind(AssertUnwindSafe(play));
    UNDER_TEST.set(false);
    result
}

/// The message of a panic.
pub(super) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let message = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", message.unwrap_or("without a message"))
}

/// Why a run has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunAborted {
    /// It panicked.
    #[error("{0}")]
    Panicked(String),
    /// It did not return.
    #[error("did not return within {} s", .0.as_secs_f64())]
    Hung(Duration),
    /// No thread could be started.
    #[error("no thread to run it in: {0}")]
    NotStarted(#[from] io::Error),
}

/// How long a run with this many events may take.
pub(super) fn time_limit(events: usize) -> Duration {
    TIME_LIMIT.saturating_add(TIME_PER_EVENT.saturating_mul(u32::try_from(events).unwrap_or(u32::MAX)))
}

/// Calls `run` in its own thread and waits at most `limit`. A thread cannot be ended from outside:
/// one that hangs is left behind.
pub(super) fn run_within<T: Send + 'static>(
    limit: Duration,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RunAborted> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("stress".to_owned()).spawn(move || {
        // The receiver is gone once the time is up.
        let _ = sender.send(catch_panic(run));
    })?;
    match receiver.recv_timeout(limit) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(panic)) => Err(RunAborted::Panicked(panic_message(&*panic))),
        Err(_) => Err(RunAborted::Hung(limit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{KIB, MIB, StreamId, TagId},
        trace::TraceBuilder,
    };

    /// Three blocks of 10 MiB, the first freed on the way, the last one live at the end.
    fn three_blocks() -> Trace {
        let mut builder = TraceBuilder::new();
        let blocks = [(); 3].map(|()| builder.alloc(10 * MIB, StreamId::DEFAULT, TagId(0)));
        builder.free(blocks[0]);
        builder.free(blocks[1]);
        builder.empty_cache();
        builder.finish("three blocks")
    }

    fn played(strategy: &str, memory_bytes: u64, faults: &[&str]) -> CheckedRun {
        let target = StressTarget::simulated(strategy, memory_bytes);
        let plan = faults.iter().fold(FaultPlan::none(), |plan, fault| plan.with(fault.parse().unwrap()));
        CheckedRun::of(&target, &three_blocks(), plan).unwrap()
    }

    #[test]
    fn running_out_of_memory_is_no_finding() {
        let roomy = played("direct", 64 * MIB, &[]);
        assert_eq!((roomy.events, roomy.served, roomy.ooms, roomy.broke()), (6, 3, 0, None));
        assert!(roomy.calls.total().count >= 6);
        let tight = played("direct", 24 * MIB, &[]);
        assert_eq!((tight.events, tight.served, tight.ooms, tight.broke()), (6, 2, 1, None));
    }

    #[test]
    fn frees_that_wait_make_counters_depend_on_a_real_device() {
        let mut builder = TraceBuilder::new();
        let block = builder.alloc(MIB, StreamId::DEFAULT, TagId(0));
        let other = builder.stream_known_as(7).unwrap();
        builder.use_on(block, other);
        let waits = builder.finish("waits");
        let repeats = |trace| [DeviceClock::Virtual, DeviceClock::Wall].map(|clock| counters_repeat(trace, clock));
        assert_eq!((repeats(&waits), repeats(&three_blocks())), ([true, false], [true, true]));
    }

    #[test]
    fn finding_ends_the_trace() {
        let run = played("flawed:KeepsCache", 64 * MIB, &[]);
        assert_eq!((run.broke(), run.at_event), (None, None), "a block is live at the trim");
        let run = played("flawed:DoubleHandOutAfterTrim", 64 * MIB, &[]);
        assert_eq!((run.broke(), run.at_event), (Some("layout"), Some(5)));
        let run = played("flawed:RoundsDown", 64 * MIB, &[]);
        assert_eq!((run.broke(), run.events), (None, 6), "10 MiB is a round size");
    }

    #[test]
    fn panic_is_a_finding_at_its_event() {
        let run = played("flawed:Panics", 24 * MIB, &[]);
        assert_eq!((run.broke(), run.at_event), (Some("panic"), Some(2)));
        assert_eq!(run.findings[0].detail, "panicked: out of memory");
        assert!(!is_under_test());
    }

    #[test]
    fn flaw_without_events_is_seen() {
        let nothing = TraceBuilder::new().finish("nothing");
        let run =
            CheckedRun::of(&StressTarget::simulated("flawed:BoastsOfLargestFree", MIB), &nothing, FaultPlan::none())
                .unwrap();
        assert_eq!((run.broke(), run.at_event), (Some("layout"), None));
    }

    #[test]
    fn only_injected_errors_are_accepted() {
        let run = played("direct", 64 * MIB, &["cuMemAlloc:2"]);
        assert_eq!((run.broke(), run.served, run.driver_errors), (None, 3, 1), "the call was repeated");
        let run = played("flawed:FailsOnExhaustion", 24 * MIB, &[]);
        assert_eq!((run.broke(), run.at_event), (Some("error"), Some(2)));
    }

    #[test]
    fn own_resources_are_freed() {
        let mut builder = TraceBuilder::new();
        let stream = builder.new_stream().unwrap();
        let event = builder.new_event();
        builder.host_alloc(KIB);
        builder.event_record(event, stream);
        builder.event_wait(event, StreamId::DEFAULT);
        let run =
            CheckedRun::of(&StressTarget::simulated("direct", MIB), &builder.finish("own"), FaultPlan::none()).unwrap();
        assert_eq!((run.broke(), run.events), (None, 3));
    }

    #[test]
    fn result_is_returned() {
        assert_eq!(run_within(TIME_LIMIT, || 6 * 7).unwrap(), 42);
    }

    #[test]
    fn panic_message_is_kept() {
        let ended = run_within(TIME_LIMIT, || assert_eq!(1, 2, "lost count")).unwrap_err();
        assert!(ended.to_string().contains("lost count"), "{ended}");
    }

    #[test]
    fn hanging_run_is_abandoned() {
        let ended = run_within(Duration::from_millis(20), || thread::sleep(Duration::from_secs(3))).unwrap_err();
        assert!(matches!(ended, RunAborted::Hung(_)));
    }
}

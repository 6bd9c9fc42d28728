//! One program under one fault, and what must hold afterwards: nothing leaked, nothing lost, and
//! the strategy works as a new one.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use crate::{
    base::{Address, StreamId},
    device::{
        Capabilities,
        wrap::{FaultInjector, FaultPlan, FaultSpec, InterceptedDevice},
    },
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, OffBooks, Request, Stats, Strategy,
        StrategyError,
        conformance::{ConformanceFinding, ObservedStrategy},
    },
    stress::{
        checked_run::{CheckedPlayer, CheckedRun, counters_repeat},
        target::OpenedTarget,
    },
    trace::Trace,
};

/// Layout and statistics are compared at most once in this many events, because programs are played
/// many times.
const AUDIT_EVERY: u64 = 4;
/// They are compared about this often in a long program.
const AUDITS: u64 = 128;

/// The result of one program under one fault.
#[derive(Clone, Debug)]
pub(super) struct FaultRun {
    /// Findings and counts of both times. Driver calls are those that the strategy made until it
    /// was closed for the first time.
    pub(super) run: CheckedRun,
    /// Calls of the strategy until then.
    pub(super) strategy_calls: u64,
    /// The statistics at the end of the second time, without faults.
    pub(super) stats: Stats,
}

impl FaultRun {
    /// Plays the program under the fault, frees everything, and plays it again without faults. The
    /// second time must end with the statistics `expected`.
    pub(super) fn of(
        program: &Trace,
        (strategy, device): OpenedTarget,
        fault: Option<FaultSpec>,
        expected: Option<&Stats>,
        is_plugin: bool,
    ) -> FaultRun {
        let plan = fault.into_iter().fold(FaultPlan::none(), FaultPlan::with);
        let monitor = FaultMonitor::default();
        monitor.state().injector = FaultInjector::new(plan);
        let strategy = FaultedStrategy { inner: strategy, monitor: monitor.clone() };
        let streams = program.tables.streams().get(1..).unwrap_or_default();
        let mut player =
            CheckedPlayer::new(ObservedStrategy::new(Box::new(strategy), device, streams), true, is_plugin);
        player.held_by_others = Arc::clone(&monitor.state().injector.taken_bytes);
        let mut test = FaultTest { player, monitor, program };
        test.play_with_fault(fault);
        let calls_are_known = test.player.watch.strategy.stats().off_books == OffBooks::Nothing;
        let (calls, strategy_calls) = {
            let state = test.monitor.state();
            (state.injector.calls.clone(), state.injector.strategy_calls)
        };
        test.recover();
        // A plugin that was closed is a new process.
        let stats = if is_plugin { Stats::default() } else { test.play_again(expected) };
        let findings = test.player.watch.findings();
        FaultRun { run: CheckedRun { findings, calls, calls_are_known, ..test.player.run }, strategy_calls, stats }
    }
}

/// A strategy, the program that uses it, and what is known of it from outside.
struct FaultTest<'a> {
    player: CheckedPlayer,
    monitor: FaultMonitor,
    program: &'a Trace,
}

impl FaultTest<'_> {
    /// Plays the program and frees everything while driver calls fail.
    fn play_with_fault(&mut self, fault: Option<FaultSpec>) {
        self.player.carry_out(self.program, self.audit_every());
        self.player.free_own();
        // Errors are not findings yet, because any of these calls may be the one that fails.
        let _ = self.free_all();
        let _ = self.player.watch.on_device(|device| device.synchronize());
        let _ = self.player.watch.call(|strategy, cx| strategy.trim(cx));
        self.player.watch.strategy.audit();
        // After a failed close it is unknown which blocks are live. With events that never complete
        // the strategy is therefore closed only every other time; the other times every block must
        // still exist.
        let closes = !matches!(fault, Some(FaultSpec::Stuck { first }) if first % 2 == 0);
        if closes {
            let _ = self.player.watch.call(|strategy, cx| strategy.close(cx));
        }
        let (injected, spins) = {
            let state = self.monitor.state();
            (state.injector.injected.load(Ordering::Relaxed), state.injector.spins)
        };
        self.player.judge_errors(injected);
        if spins {
            let under = fault.map(|fault| format!(" under {fault}")).unwrap_or_default();
            self.player.watch.find("spinning", format!("one call queried events thousands of times{under}"));
        }
    }

    /// Ends the fault. Everything that is left must now be freed.
    fn recover(&mut self) {
        self.monitor.state().injector.lift(&mut *self.player.watch.device);
        if self.player.watch.strategy.is_sound()
            && let Err(error) = self.free_all()
        {
            self.player.watch.find("lost block", format!("a live block cannot be freed: {error}"));
        }
        self.player.watch.close();
    }

    /// Plays the program again and returns the statistics at its end, which must be those of a new
    /// strategy.
    fn play_again(&mut self, expected: Option<&Stats>) -> Stats {
        if self.player.watch.has_findings() {
            return Stats::default();
        }
        self.player.faults = false;
        self.player.carry_out(self.program, self.audit_every());
        let stats = self.player.watch.strategy.stats();
        let repeats = counters_repeat(self.program, self.player.watch.device.props().clock);
        if let Some(expected) = expected.filter(|&expected| *expected != stats && repeats) {
            let differences = stats.differences(expected).join(", ");
            let detail = format!("played again without faults the program ends with other counters: {differences}");
            self.player.watch.find("not as new", detail);
        }
        self.player.free_own();
        self.player.watch.close();
        stats
    }

    fn audit_every(&self) -> u64 {
        (self.program.events.len() as u64 / AUDITS).max(AUDIT_EVERY)
    }

    /// Frees every live block; returns the first error.
    fn free_all(&mut self) -> Result<(), StrategyError> {
        let mut outcome = Ok(());
        let live: Vec<(Block, Caller)> = self.monitor.state().live.values().copied().collect();
        for (block, caller) in live {
            let freed = self.player.watch.call(|strategy, cx| strategy.free(cx, block, caller));
            if let (Ok(()), Err(error)) = (&outcome, freed) {
                outcome = Err(error);
            }
        }
        outcome
    }
}

/// Shared access to the state of a [`FaultedStrategy`].
#[derive(Clone, Default)]
struct FaultMonitor {
    shared: Arc<Mutex<FaultState>>,
}

#[derive(Default)]
struct FaultState {
    injector: FaultInjector,
    /// Live blocks of the program, and how to free them.
    live: BTreeMap<Address, (Block, Caller)>,
}

impl FaultMonitor {
    /// A panic of the strategy cannot leave this state half changed.
    fn state(&self) -> MutexGuard<'_, FaultState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A strategy whose own driver calls fail. As a strategy itself it can be checked like any other,
/// and calls of the program cannot fail.
struct FaultedStrategy {
    inner: Box<dyn Strategy>,
    monitor: FaultMonitor,
}

impl FaultedStrategy {
    fn call<R>(
        &mut self,
        cx: &mut Context<'_>,
        call: impl FnOnce(&mut dyn Strategy, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let mut state = self.monitor.state();
        state.injector.begin_strategy_call(cx.device);
        let mut device = InterceptedDevice::new(&mut *cx.device, &mut state.injector);
        call(&mut *self.inner, &mut Context { device: &mut device, sink: cx.sink })
    }
}

impl Strategy for FaultedStrategy {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let attempt = self.call(cx, |inner, cx| inner.alloc(cx, request))?;
        if let Attempt::Served(block, _) = attempt {
            let caller = Caller { stream: request.stream, thread: request.thread };
            self.monitor.state().live.insert(block.address, (block, caller));
        }
        Ok(attempt)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let freed = self.call(cx, |inner, cx| inner.free(cx, block, caller))?;
        self.monitor.state().live.remove(&block.address);
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.used_on(cx, block, stream))
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.control(cx, command))
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        self.call(cx, |inner, cx| inner.resume_from(cx, initial))
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.trim(cx))
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.close(cx))?;
        self.monitor.state().live.clear();
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.inner.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        self.inner.layout()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.inner.details()
    }

    fn flaws(&self) -> Vec<ConformanceFinding> {
        self.inner.flaws()
    }

    fn serves_pools(&self) -> bool {
        self.inner.serves_pools()
    }

    fn trims(&self) -> bool {
        self.inner.trims()
    }

    fn requires(&self) -> Capabilities {
        self.inner.requires()
    }

    /// Faults do not affect the fork.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        self.inner.fork()
    }
}

//! `stress integrity`: do blocks keep their contents? Finds overlap, reuse before all streams are
//! done, and memory that is lost when it is mapped elsewhere.
//!
//! Every block is filled with its own pattern on its stream and compared before it is freed, and in
//! between on other streams and after trims. Only contents are checked, on the device itself, so
//! that nothing depends on what a strategy reports. On the simulated device the programs are
//! traces: one that fails is shrunk and can be repeated. On a real device the program is a team of
//! threads.

mod player;
mod program;
#[cfg(test)]
mod tests;
mod threads;

use std::{
    thread,
    time::{Duration, Instant},
};

pub use program::{BlockSizes, BlockSizesError};

pub(super) use self::{
    player::PatternPlayer,
    program::{ProgramMix, integrity_program},
};

use super::{
    StressBudget, StressFailure, StressKind, StressTarget, StressVerdict, TargetError,
    checked_run::{HANG, catch_panic, panic_message, run_within, time_limit},
    shrink,
    state::{EnduranceOutcome, IntegrityCounts},
    target::OpenedTarget,
};
use crate::{
    base::{Bytes, MIB},
    device::{Damage, DeviceClock},
    strategy::{Strategy, StrategyError},
    trace::Trace,
};

/// The name of this kind of stress.
const KIND: &str = "integrity";
/// The most requested bytes that are live, as a share of the memory.
const OCCUPANCY_PERCENT: u64 = 90;
/// No block is larger than the memory divided by this: a few large ones would fill it.
const LARGEST_PART: u64 = 8;
/// Blocks per trace on the simulated device.
const PROGRAM_BLOCKS: u64 = 2_000;
/// How many traces are tried to shrink a failing one.
const MOST_TRIES: usize = 2_000;

/// Its part in `stress all`: programs until the time is up.
pub(super) const STRESS: StressKind = StressKind { name: KIND, applies: |_| true, judge };

fn judge(target: &StressTarget, seed: u64, budget: &StressBudget<'_>) -> StressVerdict {
    let mut verdict = StressVerdict::new(KIND, &target.strategy);
    let integrity = EnduranceTest { target: target.clone(), threads: 4, streams: 4, sizes: BlockSizes::MIXED, seed };
    match integrity.run(&StopCondition { blocks: None, budget: *budget }, &mut |_| {}) {
        Ok(outcome) => {
            (verdict.row.trials, verdict.row.served) = (outcome.counts.blocks, outcome.counts.blocks);
            (verdict.row.ooms, verdict.skipped, verdict.failures) =
                (outcome.counts.ooms, outcome.skipped, outcome.failures);
        }
        Err(error) => verdict.skipped = Some(error.to_string()),
    }
    verdict
}

/// Why a strategy is skipped that served no block.
const NOTHING_SERVED: &str = "no request was served in this much memory";

/// The test of one strategy.
#[derive(Clone, Debug)]
pub struct EnduranceTest {
    /// The strategy and device; its memory must be set.
    pub target: StressTarget,
    /// Host threads.
    pub threads: u16,
    /// Streams, the default one among them.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: BlockSizes,
    /// The seed of the programs.
    pub seed: u64,
}

/// When a test ends.
#[derive(Clone, Copy)]
pub struct StopCondition<'a> {
    /// After this many blocks.
    pub blocks: Option<u64>,
    /// As soon as this time is up.
    pub budget: StressBudget<'a>,
}

impl StopCondition<'_> {
    /// Whether the test ends now.
    pub fn is_reached(&self, counts: &IntegrityCounts) -> bool {
        self.budget.search_is_over() || self.blocks.is_some_and(|blocks| counts.blocks >= blocks)
    }
}

impl EnduranceTest {
    /// Tests the strategy until the stop condition holds, and reports the counts to `progress` now
    /// and then.
    pub fn run(
        &self,
        until: &StopCondition<'_>,
        progress: &mut dyn FnMut(&IntegrityCounts),
    ) -> Result<EnduranceOutcome, TargetError> {
        let opened = self.target.open_with_contents()?;
        if opened.1.props().clock == DeviceClock::Wall {
            return Ok(self.with_threads(opened, until, progress));
        }
        drop(opened);
        let begin = Instant::now();
        let mut outcome = EnduranceOutcome::default();
        let mut number = 0;
        while !until.is_reached(&outcome.counts) && outcome.failures.is_empty() {
            let trace = integrity_program(&self.mix(), self.seed.wrapping_add(number), PROGRAM_BLOCKS);
            outcome = self.add(outcome, &trace, until)?;
            // A program that was cut short by the clock says nothing about memory.
            let was_cut = until.is_reached(&outcome.counts);
            if outcome.counts.blocks == 0 && outcome.failures.is_empty() && !was_cut {
                return Ok(EnduranceOutcome::skipped(NOTHING_SERVED));
            }
            outcome.counts.wall_ns = begin.elapsed().as_nanos() as u64;
            progress(&outcome.counts);
            number += 1;
        }
        Ok(outcome)
    }

    /// Plays one trace on any device.
    pub fn play(&self, trace: &Trace, until: &StopCondition<'_>) -> Result<EnduranceOutcome, TargetError> {
        let begin = Instant::now();
        let mut outcome = self.add(EnduranceOutcome::default(), trace, until)?;
        outcome.counts.wall_ns = begin.elapsed().as_nanos() as u64;
        Ok(outcome)
    }

    fn mix(&self) -> ProgramMix {
        let memory = self.target.memory_bytes.unwrap_or(u64::MAX);
        ProgramMix {
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.up_to(memory / LARGEST_PART),
            live_bytes: memory / 100 * OCCUPANCY_PERCENT,
            long_lived_bytes: memory / 2,
            replaced_one_in: 3,
        }
    }

    /// Plays a trace and adds the result; a failing trace is shrunk.
    fn add(
        &self,
        mut outcome: EnduranceOutcome,
        trace: &Trace,
        until: &StopCondition<'_>,
    ) -> Result<EnduranceOutcome, TargetError> {
        let run = play_within(&self.target, trace, &|| until.budget.search_is_over())?;
        outcome.counts.add(&run.counts);
        outcome.lost_context |= run.lost_context;
        if let Some(broken) = run.broken {
            // A thousand tries take too long on a real device, and its context may be lost.
            let (smallest, broken) = match self.target.device.is_simulated() {
                true => smallest_of(&self.target, trace, broken, &until.budget),
                false => (trace.clone(), broken),
            };
            outcome.failures.push(StressFailure { trace: Some(smallest), ..self.target.failure(KIND, broken.1) });
        }
        Ok(outcome)
    }

    fn with_threads(
        &self,
        (strategy, device): OpenedTarget,
        until: &StopCondition<'_>,
        progress: &mut dyn FnMut(&IntegrityCounts),
    ) -> EnduranceOutcome {
        let run = threads::run_threads(strategy, device, &self.mix(), self.seed, until, progress);
        let idle = run.counts.blocks == 0 && run.error.is_none();
        let skipped = idle.then(|| NOTHING_SERVED.to_owned());
        let mut outcome = EnduranceOutcome { counts: run.counts, skipped, ..EnduranceOutcome::default() };
        if let Some(error) = run.error {
            outcome.lost_context = error.loses_context();
            outcome.failures.push(self.target.failure(KIND, error.to_string()));
        }
        if !run.damaged.is_empty() {
            let trace = self.find_in_simulation(until);
            let mut detail = damage_text(&run.damaged);
            if trace.is_some() {
                detail += "; the trace reproduces it with --device sim --limit 256MiB";
            }
            outcome.failures.push(StressFailure { trace, ..self.target.failure(KIND, detail) });
        }
        outcome
    }

    /// Looks for a trace that shows damage on the simulated device too, after damage on a real one.
    fn find_in_simulation(&self, until: &StopCondition<'_>) -> Option<Trace> {
        let simulated = EnduranceTest {
            target: StressTarget {
                device: "sim".parse().ok()?,
                memory_bytes: Some(SIMULATED_BYTES),
                ..self.target.clone()
            },
            ..self.clone()
        };
        let end = Instant::now() + LONGEST_SEARCH;
        let over = || until.budget.is_over();
        let budget = StressBudget::until(&over, end);
        let until = StopCondition { blocks: Some(10 * PROGRAM_BLOCKS), budget };
        let outcome = simulated.run(&until, &mut |_| {}).ok()?;
        outcome.failures.into_iter().next().and_then(|failure| failure.trace)
    }
}

/// How long the simulated device is searched for a failure of a real one.
const LONGEST_SEARCH: Duration = Duration::from_secs(20);
/// The simulated device's memory in that search.
const SIMULATED_BYTES: u64 = 256 * MIB;

/// A broken promise as a word and as a sentence.
pub(super) type BrokenPromise = (&'static str, String);

/// The result of playing one trace.
struct IntegrityRun {
    counts: IntegrityCounts,
    broken: Option<BrokenPromise>,
    lost_context: bool,
}

/// Plays a trace on a fresh target. On a simulated device a strategy that does not return is left behind; a plugin has
/// time-outs of its own.
fn play_within(target: &StressTarget, trace: &Trace, over: &dyn Fn() -> bool) -> Result<IntegrityRun, TargetError> {
    if target.is_plugin() || !target.device.is_simulated() {
        return Ok(play(target.open_with_contents()?, trace, over));
    }
    let limit = time_limit(trace.events.len());
    let (target, trace) = (target.clone(), trace.clone());
    run_within(limit, move || Ok(play(target.open_with_contents()?, &trace, &|| false))).unwrap_or_else(|aborted| {
        let broken = Some((HANG, aborted.to_string()));
        Ok(IntegrityRun { counts: IntegrityCounts::default(), broken, lost_context: false })
    })
}

/// Plays a trace and closes the strategy. A panic is a broken promise.
fn play((strategy, device): OpenedTarget, trace: &Trace, over: &dyn Fn() -> bool) -> IntegrityRun {
    let mut player = PatternPlayer::new(strategy, device, 1);
    let played = catch_panic(|| {
        player.play(trace, over)?;
        if player.damaged.is_empty() {
            player.free_all()?;
        }
        player.close()
    });
    let broken = match player.damaged.is_empty() {
        false => Some(("contents", damage_text(&player.damaged))),
        true => broken_otherwise(&player, &played),
    };
    IntegrityRun { counts: player.counts, broken, lost_context: lost_context(&played) }
}

/// How the programs of a player and the close ended; a panic is an error of the thread.
pub(super) type PlayResult = thread::Result<Result<(), StrategyError>>;

/// What a run broke other than contents.
pub(super) fn broken_otherwise<S: Strategy>(player: &PatternPlayer<S>, played: &PlayResult) -> Option<BrokenPromise> {
    let held = player.device.held_bytes();
    match played {
        Ok(_) if !player.strategy.flaws().is_empty() => {
            player.strategy.flaws().into_iter().next().map(|flaw| (flaw.check, flaw.detail))
        }
        Ok(Ok(())) if held > 0 => Some(("close", format!("after a close the device still holds {}", Bytes(held)))),
        Ok(Ok(())) => None,
        Ok(Err(StrategyError::Hung(reason))) => Some((HANG, reason.clone())),
        Ok(Err(error)) => Some(("error", error.to_string())),
        Err(payload) => Some(("panic", panic_message(&**payload))),
    }
}

/// Whether this process can no longer use the device.
pub(super) fn lost_context(played: &PlayResult) -> bool {
    matches!(played, Ok(Err(error)) if error.loses_context())
}

/// Shrinks a trace that breaks a promise of the target. Calls that hang get a short time-out; a strategy of our own that
/// hangs is not shrunk, because every run would leave a thread behind.
fn smallest_of(
    target: &StressTarget,
    trace: &Trace,
    broken: BrokenPromise,
    budget: &StressBudget<'_>,
) -> (Trace, BrokenPromise) {
    let hangs = broken.0 == HANG;
    if hangs && !target.is_plugin() {
        return (trace.clone(), broken);
    }
    let tried = if hangs { target.with_short_timeout() } else { target.clone() };
    let mut broken_by = |trace: &Trace| play_within(&tried, trace, &|| false).ok()?.broken;
    smallest(trace, broken, &mut broken_by, &|| budget.is_over())
}

/// The smallest trace that breaks the same promise, and how.
fn smallest(
    trace: &Trace,
    broken: BrokenPromise,
    broken_by: &mut dyn FnMut(&Trace) -> Option<BrokenPromise>,
    over: &dyn Fn() -> bool,
) -> (Trace, BrokenPromise) {
    let mut same = |trace: &Trace| broken_by(trace).filter(|(what, _)| *what == broken.0);
    let smallest = shrink(trace, &mut |trace| same(trace).is_some(), MOST_TRIES, over);
    let breaks = same(&smallest);
    (smallest, breaks.unwrap_or(broken))
}

/// Damage as a sentence.
fn damage_text(damaged: &[Damage]) -> String {
    match damaged {
        [] => "nothing is damaged".to_owned(),
        [only] => only.to_string(),
        [first, others @ ..] => format!("{first}; likewise {} other blocks", others.len()),
    }
}

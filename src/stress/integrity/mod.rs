//! Do blocks keep their contents: no overlap, no reuse before all streams are done, nothing lost when memory is mapped
//! elsewhere.
//!
//! Every block is filled with a pattern of its own on its stream and compared before it is given back, and in between on
//! other streams and after trims. Only contents are looked at, on the device itself, so that nothing depends on what a
//! strategy says about itself. On the simulated device the program is a trace ([`story`]), one after another: what fails
//! is shrunk and can be played again. On a real one it is a crew of threads.

mod crew;
mod keeper;
mod sizes;
mod story;
mod tally;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

pub use sizes::{Sizes, SizesError};
pub use story::{Mixture, story};
pub use tally::Tally;

pub(super) use keeper::Keeper;

use super::{
    Failure, Levels, Subject, SubjectError, Verdict,
    every_kind::KindOfStress,
    shrink,
    trial::{on_trial, panicked},
};
use crate::{
    base::{Bytes, MIB},
    device::{Capabilities, Clock, Damage, Device},
    strategy::Strategy,
    trace::Trace,
};

/// The name of this kind of stress.
pub const KIND: &str = "integrity";
/// Share of the memory that lives at most, in requested bytes.
const OCCUPANCY_PERCENT: u64 = 90;
/// No block is larger than this part of the memory: a few would leave room for nothing else.
const LARGEST_PART: u64 = 8;
/// Blocks of one trace on the simulated device.
const STORY_BLOCKS: u64 = 2_000;
/// How many traces are tried to make a failing one smaller.
const MOST_TRIES: usize = 2_000;

/// Its part in `all`: programs until time is up.
pub(super) const UNTIL_STOPPED: KindOfStress = KindOfStress { name: KIND, judge };

fn judge(subject: &Subject, seed: u64, over: &dyn Fn() -> bool) -> Verdict {
    let mut verdict = Verdict::new(KIND, &subject.strategy);
    let integrity = Integrity { subject: subject.clone(), threads: 4, streams: 4, sizes: Sizes::MIXED, seed };
    match integrity.run(&Until { blocks: None, over }, &mut |_| {}) {
        Ok(outcome) => {
            (verdict.trials, verdict.served) = (outcome.tally.blocks, outcome.tally.blocks);
            (verdict.ooms, verdict.skipped, verdict.failures) = (outcome.tally.ooms, outcome.skipped, outcome.failures);
        }
        Err(error) => verdict.skipped = Some(error.to_string()),
    }
    verdict
}

/// Why a strategy is skipped that has no block to show.
const NOTHING_SERVED: &str = "not one request was served in this much memory";

/// What to do to a strategy.
#[derive(Clone, Debug)]
pub struct Integrity {
    /// Who, and where; its memory must be given.
    pub subject: Subject,
    /// Host threads.
    pub threads: u16,
    /// Streams, the default one among them.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: Sizes,
    /// The dice.
    pub seed: u64,
}

/// When it is enough.
#[derive(Clone, Copy)]
pub struct Until<'a> {
    /// After so many blocks.
    pub blocks: Option<u64>,
    /// When somebody says so.
    pub over: &'a dyn Fn() -> bool,
}

impl Until<'_> {
    /// Whether it is.
    #[must_use]
    pub fn is_reached(&self, tally: &Tally) -> bool {
        (self.over)() || self.blocks.is_some_and(|blocks| tally.blocks >= blocks)
    }
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The numbers.
    pub tally: Tally,
    /// Why the strategy could not be put under stress, if so.
    pub skipped: Option<String>,
    /// How full memory was.
    pub levels: Levels,
    /// What was broken.
    pub failures: Vec<Failure>,
    /// Whether the device is lost to this process.
    pub lost_context: bool,
}

impl Outcome {
    pub(super) fn skipped(reason: impl Into<String>) -> Outcome {
        Outcome { skipped: Some(reason.into()), ..Outcome::default() }
    }
}

/// A strategy and the device it runs on.
pub(super) type Pair = (Box<dyn Strategy>, Box<dyn Device>);

/// A fresh pair that can be put under stress, or why it cannot.
pub(super) fn open(subject: &Subject) -> Result<Result<Pair, String>, SubjectError> {
    if subject.strategy.name == "null" {
        return Ok(Err("its memory is imaginary".to_owned()));
    }
    let device = subject.open_device()?;
    let strategy = subject.build(device.props())?;
    let needed = Capabilities { patterns: true, ..strategy.requires() };
    Ok(match needed.check(device.props()) {
        Ok(()) => Ok((strategy, device)),
        Err(missing) => Err(missing.to_string()),
    })
}

impl Integrity {
    /// Puts the strategy under stress until it is enough; `progress` is told the numbers now and then.
    pub fn run(&self, until: &Until<'_>, progress: &mut dyn FnMut(&Tally)) -> Result<Outcome, SubjectError> {
        let (strategy, device) = match open(&self.subject)? {
            Ok(opened) => opened,
            Err(reason) => return Ok(Outcome::skipped(reason)),
        };
        if device.props().clock == Clock::Wall {
            return Ok(self.with_threads(strategy, device, until, progress));
        }
        drop((strategy, device));
        let begin = Instant::now();
        let mut outcome = Outcome::default();
        let mut number = 0;
        while !until.is_reached(&outcome.tally) && outcome.failures.is_empty() {
            let trace = story(&self.mixture(), self.seed.wrapping_add(number), STORY_BLOCKS);
            outcome = self.add(outcome, &trace, until)?;
            if outcome.tally.blocks == 0 && outcome.failures.is_empty() {
                return Ok(Outcome::skipped(NOTHING_SERVED));
            }
            outcome.tally.wall_ns = begin.elapsed().as_nanos() as u64;
            progress(&outcome.tally);
            number += 1;
        }
        Ok(outcome)
    }

    /// Plays one trace, on whatever device.
    pub fn play(&self, trace: &Trace, until: &Until<'_>) -> Result<Outcome, SubjectError> {
        let begin = Instant::now();
        let mut outcome = self.add(Outcome::default(), trace, until)?;
        outcome.tally.wall_ns = begin.elapsed().as_nanos() as u64;
        Ok(outcome)
    }

    /// The program.
    #[must_use]
    pub fn mixture(&self) -> Mixture {
        let memory = self.subject.memory_bytes.unwrap_or(u64::MAX);
        Mixture {
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.up_to(memory / LARGEST_PART),
            live_bytes: memory / 100 * OCCUPANCY_PERCENT,
            lasting_bytes: memory / 2,
            replaced_one_in: 3,
        }
    }

    /// Plays a trace and adds what came of it; what fails is made small.
    fn add(&self, mut outcome: Outcome, trace: &Trace, until: &Until<'_>) -> Result<Outcome, SubjectError> {
        let pair = match open(&self.subject)? {
            Ok(pair) => pair,
            Err(reason) => return Ok(Outcome::skipped(reason)),
        };
        let kept = keep(pair, trace, until.over);
        outcome.tally.absorb(&kept.tally);
        outcome.lost_context |= kept.lost_context;
        if let Some(detail) = kept.broken {
            // A real device is not asked a thousand times, nor can it be once its context is lost.
            let (smallest, detail) = match self.subject.device.is_simulated() {
                true => smallest(trace, detail, &mut || open(&self.subject).ok()?.ok()),
                false => (trace.clone(), detail),
            };
            outcome.failures.push(self.failure(detail.1, Some(smallest)));
        }
        Ok(outcome)
    }

    fn with_threads(
        &self,
        strategy: Box<dyn Strategy>,
        device: Box<dyn Device>,
        until: &Until<'_>,
        progress: &mut dyn FnMut(&Tally),
    ) -> Outcome {
        let shift = crew::work(strategy, device, &self.mixture(), self.seed, until, progress);
        let idle = shift.tally.blocks == 0 && shift.error.is_none();
        let skipped = idle.then(|| NOTHING_SERVED.to_owned());
        let mut outcome = Outcome { tally: shift.tally, skipped, ..Outcome::default() };
        if let Some(error) = shift.error {
            outcome.lost_context = error.loses_context();
            outcome.failures.push(self.failure(error.to_string(), None));
        }
        if !shift.damaged.is_empty() {
            let trace = self.repeated_in_simulation(until);
            let mut detail = told(&shift.damaged);
            if trace.is_some() {
                detail += "; the trace shows it with --device sim --memory 256MiB";
            }
            outcome.failures.push(self.failure(detail, trace));
        }
        outcome
    }

    /// A trace that shows on the simulated device what was seen on a real one, where there is one.
    fn repeated_in_simulation(&self, until: &Until<'_>) -> Option<Trace> {
        let simulated = Integrity {
            subject: Subject {
                device: "sim".parse().ok()?,
                memory_bytes: Some(SIMULATED_BYTES),
                ..self.subject.clone()
            },
            ..self.clone()
        };
        let end = Instant::now() + LONGEST_SEARCH;
        let over = || (until.over)() || Instant::now() >= end;
        let until = Until { blocks: Some(10 * STORY_BLOCKS), over: &over };
        let outcome = simulated.run(&until, &mut |_| {}).ok()?;
        outcome.failures.into_iter().next().and_then(|failure| failure.trace)
    }

    fn failure(&self, detail: String, trace: Option<Trace>) -> Failure {
        Failure { found_by: KIND, strategy: self.subject.strategy.to_string(), detail, trace, conditions: Vec::new() }
    }
}

/// How long a failure of a real device is looked for on the simulated one.
const LONGEST_SEARCH: Duration = Duration::from_secs(20);
/// Memory in which a failure of a real device is looked for on the simulated one.
const SIMULATED_BYTES: u64 = 256 * MIB;

/// A broken promise, in a word and in a sentence.
type Broken = (&'static str, String);

/// What playing one trace came to.
struct Kept {
    tally: Tally,
    broken: Option<Broken>,
    lost_context: bool,
}

/// Plays a trace through a fresh pair, and closes the strategy. A panic is a broken promise.
fn keep((strategy, device): Pair, trace: &Trace, over: &dyn Fn() -> bool) -> Kept {
    let mut keeper = Keeper::new(strategy, device, 1);
    let played = on_trial(|| {
        keeper.play(trace, over)?;
        if keeper.damaged.is_empty() {
            keeper.clear()?;
        }
        keeper.close()
    });
    let held = keeper.device.held_bytes();
    let broken = match &played {
        _ if !keeper.damaged.is_empty() => Some(("contents", told(&keeper.damaged))),
        Ok(Ok(())) if held > 0 => Some(("close", format!("after a close the device still holds {}", Bytes(held)))),
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(("error", error.to_string())),
        Err(payload) => Some(("panic", panicked(&**payload))),
    };
    let lost_context = matches!(&played, Ok(Err(error)) if error.loses_context());
    Kept { tally: keeper.tally, broken, lost_context }
}

/// The smallest trace that breaks the same promise, and how.
fn smallest(trace: &Trace, broken: Broken, open: &mut dyn FnMut() -> Option<Pair>) -> (Trace, Broken) {
    let mut broken_by = |trace: &Trace| keep(open()?, trace, &|| false).broken.filter(|(what, _)| *what == broken.0);
    let smallest = shrink(trace, &mut |trace| broken_by(trace).is_some(), MOST_TRIES);
    let told = broken_by(&smallest);
    (smallest, told.unwrap_or(broken))
}

/// Damage in a sentence.
fn told(damaged: &[Damage]) -> String {
    match damaged {
        [] => "nothing is damaged".to_owned(),
        [only] => only.to_string(),
        [first, others @ ..] => format!("{first}; so {} other blocks", others.len()),
    }
}

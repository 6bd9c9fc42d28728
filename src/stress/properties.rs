//! Random programs against any strategy: what it promises is watched at every call, and a third of the programs are played
//! again on a driver that fails now and then.
//!
//! The first program that breaks a promise is shrunk, its faults as well, and reported. Called by the command line for
//! strategies by name, on any device; programs come from `program`.

use super::{
    Conditions, Failure, KindOfStress, PlannedFault, Subject, Trial, TrialError, Verdict, player::HANG,
    program::random_program, shrink,
};
use crate::{
    base::MIB,
    device::{CallKind, CallLedger},
    models::SeededRandom,
    trace::Trace,
};

/// What this kind of stress is called.
pub const KIND: &str = "properties";

/// Its part in `all`: programs until time is up.
pub(super) const UNTIL_STOPPED: KindOfStress = KindOfStress {
    name: KIND,
    judge: |subject, seed, stop| properties(subject, &Programs { first: 0, count: u64::MAX, seed }, stop),
};

/// Of so many programs one is played again with faults.
const ONE_WITH_FAULTS_IN: u64 = 3;
/// Faults a program: fewer than the tries that a call gets.
const MOST_FAULTS: u64 = 3;
/// Memory where the subject does not say: little, so that it runs out.
const MEMORY_BYTES: u64 = 256 * MIB;
/// How many smaller traces are tried after a failure: a trial is quick on a simulated device and not on a real one.
const SHRINKS: (usize, usize) = (5_000, 300);
/// How many earlier turns are tried for a fault.
const MOST_TURNS: usize = 32;

/// How many programs, and which.
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    /// The first of them.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Where their numbers come from.
    pub seed: u64,
}

/// Plays programs until one breaks a promise, all are played, or `stop` says so.
#[must_use]
pub fn properties(subject: &Subject, programs: &Programs, stop: &dyn Fn() -> bool) -> Verdict {
    let mut verdict = Verdict::new(KIND, &subject.strategy);
    let memory = subject.memory_bytes.unwrap_or(MEMORY_BYTES);
    for number in programs.first..programs.first.saturating_add(programs.count) {
        if stop() {
            break;
        }
        let program = random_program(programs.seed, number, memory);
        let Some(trial) = put_on_trial(subject, &program, &[], &mut verdict) else { break };
        if number % ONE_WITH_FAULTS_IN == ONE_WITH_FAULTS_IN - 1 {
            let mut dice = SeededRandom::new(programs.seed, &format!("properties faults {number}"));
            let faults = faults_among(&trial.calls, &mut dice);
            if put_on_trial(subject, &program, &faults, &mut verdict).is_none() {
                break;
            }
        }
    }
    verdict
}

/// Plays one trace.
#[must_use]
pub fn play(subject: &Subject, trace: &Trace, faults: &[PlannedFault]) -> Verdict {
    let mut verdict = Verdict::new(KIND, &subject.strategy);
    put_on_trial(subject, trace, faults, &mut verdict);
    verdict
}

/// Plays a trace and notes what came of it; `None` where there is nothing more to be tried.
fn put_on_trial(subject: &Subject, trace: &Trace, faults: &[PlannedFault], verdict: &mut Verdict) -> Option<Trial> {
    match on_trial(subject, trace, faults) {
        Ok(trial) => {
            verdict.count(&trial);
            let Some(broke) = trial.broke() else { return Some(trial) };
            verdict.failures.push(smallest(subject, trace, faults, broke));
            None
        }
        Err(error) => {
            verdict.skipped = Some(error.to_string());
            None
        }
    }
}

fn on_trial(subject: &Subject, trace: &Trace, faults: &[PlannedFault]) -> Result<Trial, TrialError> {
    Trial::of(subject, trace, &Conditions { faults: PlannedFault::plan(faults), ..Conditions::default() })
}

/// The smallest trace, with the fewest faults, that breaks the same promise.
fn smallest(subject: &Subject, trace: &Trace, faults: &[PlannedFault], broke: &'static str) -> Failure {
    // A trace that hangs is shrunk by many that hang.
    let tried = if broke == HANG { subject.hurried() } else { subject.clone() };
    let (small, fewer) = shrunk(&tried, trace, faults, broke);
    let failure = |trace: Trace, faults: &[PlannedFault], detail: Option<String>| Failure {
        found_by: KIND,
        strategy: subject.strategy.to_string(),
        detail: detail.unwrap_or_else(|| broke.to_owned()),
        trace: Some(trace),
        conditions: PlannedFault::options(faults),
    };
    match detail(subject, &small, &fewer) {
        // In a hurry, slow may have looked like broken: with all the time that it has, this one is fine.
        None => failure(trace.clone(), faults, detail(subject, trace, faults)),
        told => failure(small, &fewer, told),
    }
}

/// Makes a trace and its faults smaller as long as the same promise is broken.
fn shrunk(
    subject: &Subject,
    trace: &Trace,
    faults: &[PlannedFault],
    broke: &'static str,
) -> (Trace, Vec<PlannedFault>) {
    let breaks = |trace: &Trace, faults: &[PlannedFault]| {
        on_trial(subject, trace, faults).is_ok_and(|trial| trial.broke() == Some(broke))
    };
    let mut faults = faults.to_vec();
    for place in (0..faults.len()).rev() {
        let mut fewer = faults.clone();
        fewer.remove(place);
        if breaks(trace, &fewer) {
            faults = fewer;
        }
    }
    let most_tries = if subject.device.is_simulated() { SHRINKS.0 } else { SHRINKS.1 };
    let mut small = shrink(trace, &mut |trace| breaks(trace, &faults), most_tries);
    // The sooner a call fails, the less has to come before it.
    for place in 0..faults.len() {
        let sooner = (1..faults[place].turn).take(MOST_TURNS).map(|turn| {
            let mut sooner = faults.clone();
            sooner[place].turn = turn;
            sooner
        });
        if let Some(sooner) = sooner.into_iter().find(|sooner| breaks(&small, sooner)) {
            faults = sooner;
            small = shrink(&small, &mut |trace| breaks(trace, &faults), most_tries);
        }
    }
    (small, faults)
}

/// What the smallest trace breaks, in words.
fn detail(subject: &Subject, trace: &Trace, faults: &[PlannedFault]) -> Option<String> {
    let trial = on_trial(subject, trace, faults).ok()?;
    let finding = trial.findings.first()?;
    Some(match trial.at_event {
        Some(event) => format!("event {event}: {}", finding.detail),
        None => finding.detail.clone(),
    })
}

/// Some of the calls that were made fail, the next time.
fn faults_among(calls: &CallLedger, dice: &mut SeededRandom) -> Vec<PlannedFault> {
    let made: Vec<(CallKind, u64)> = calls.iter().map(|(call, tally)| (call, tally.count)).collect();
    if made.is_empty() {
        return Vec::new();
    }
    let mut faults: Vec<PlannedFault> = (0..dice.between(1, MOST_FAULTS))
        .map(|_| {
            let (call, count) = made[dice.index(made.len())];
            let takes_memory = matches!(call, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync);
            PlannedFault { call, turn: dice.between(1, count), out_of_memory: takes_memory && dice.chance(0.5) }
        })
        .collect();
    faults.sort_unstable();
    faults.dedup();
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{StrategySpec, flawed::Flaw};

    fn subject(strategy: &str) -> Subject {
        let device = "sim".parse().unwrap();
        Subject { strategy: StrategySpec::from(strategy), device, memory_bytes: Some(MEMORY_BYTES) }
    }

    fn judged(strategy: &str, count: u64) -> Verdict {
        properties(&subject(strategy), &Programs { first: 0, count, seed: 1 }, &|| false)
    }

    /// What each flaw breaks, and how many events its smallest trace has at most. The others are not seen by programs
    /// that use an allocator as it is meant to be used: handles made up, requests for nothing, copies.
    const SEEDED: [(Flaw, &str, usize); 18] = [
        (Flaw::OverlappingSplit, "layout", 1),
        (Flaw::Misaligned, "alignment", 1),
        // Every seventh free.
        (Flaw::LostAccounting, "books", 14),
        (Flaw::EarlyReuse, "was handed to stream", 5),
        (Flaw::StreamsMixed, "was handed to stream", 4),
        (Flaw::LeakOnClose, "after a close", 1),
        (Flaw::KeepsCache, "trimmed", 3),
        (Flaw::BooksTooEarly, "reserved", 1),
        (Flaw::ForgetsOnFailure, "no live block", 3),
        (Flaw::SilentSegments, "events", 1),
        (Flaw::FailsOnExhaustion, "out of memory", 1),
        (Flaw::BoastsOfLargestFree, "in one piece", 0),
        (Flaw::Panics, "panicked", 1),
        (Flaw::LostCoalesce, "layout", 2),
        (Flaw::LeakOnRetry, "trimmed", 2),
        (Flaw::DoubleHandOutAfterTrim, "layout", 2),
        (Flaw::RoundsDown, "size", 1),
        (Flaw::LosesSegmentOnFailure, "device still holds", 1),
    ];

    #[test]
    fn every_seeded_bug_is_caught_within_sixty_programs_and_shrunk_to_a_handful_of_events() {
        for (flaw, says, most_events) in SEEDED {
            let verdict = judged(&format!("flawed:{flaw:?}"), 60);
            let [failure] = &verdict.failures[..] else { panic!("{flaw:?}: {verdict:?}") };
            let events = &failure.trace.as_ref().unwrap().events;
            println!("{flaw:?}: trial {}, {} events: {failure} {:?}", verdict.trials, events.len(), failure.conditions);
            assert!(failure.detail.contains(says), "{flaw:?}: {failure}");
            assert!(events.len() <= most_events, "{flaw:?}: {failure}: {events:?}");
        }
    }

    /// Free chunks that together fitted into no gap were once held back until memory "ran out".
    #[test]
    fn what_was_found_once_stays_mended() {
        let once = Programs { first: 360, count: 1, seed: 1 };
        assert_eq!(properties(&subject("oomph"), &once, &|| false).word(), "passed");
    }

    #[test]
    fn the_same_allocator_without_a_flaw_passes() {
        let verdict = judged("flawed:None", 60);
        assert_eq!((verdict.word(), verdict.trials), ("passed", 80), "{:?}", verdict.failures);
    }

    #[test]
    fn a_saved_failure_shows_again() {
        let failure = judged("flawed:ForgetsOnFailure", 60).failures.remove(0);
        let faults: Vec<PlannedFault> =
            failure.conditions.iter().map(|option| option.strip_prefix("--fail ").unwrap().parse().unwrap()).collect();
        let again = play(&subject("flawed:ForgetsOnFailure"), failure.trace.as_ref().unwrap(), &faults);
        assert_eq!(again.failures[0].detail, failure.detail);
    }

    #[test]
    fn the_same_seed_gives_the_same_verdict() {
        let numbers = |verdict: Verdict| (verdict.trials, verdict.events, verdict.ooms, verdict.driver_calls);
        assert_eq!(numbers(judged("caching", 12)), numbers(judged("caching", 12)));
    }

    #[test]
    fn who_is_told_to_stop_stops_and_who_cannot_run_is_skipped() {
        let programs = Programs { first: 0, count: 10, seed: 1 };
        assert_eq!(properties(&subject("caching"), &programs, &|| true).trials, 0);
        let verdict = judged("no such strategy", 10);
        assert!(verdict.skipped.is_some_and(|reason| reason.contains("unknown strategy")));
    }
}

//! `stress history`: the same program again and again, thousands of calls on one strategy.
//!
//! A program that frees everything it requests leaves a strategy as it was, but for what it caches. So from some round on
//! the memory that is held no longer grows: growth that goes on is a leak, whatever the strategy reports. All other
//! promises are checked at every call, so that faults show which need a long history.

use super::{
    StressBudget, StressFailure, StressKind, StressTarget, StressVerdict, TargetError,
    checked_run::{CheckedPlayer, CheckedRun, catch_panic, panic_message, run_within, time_limit},
    properties::repeatable_program,
    shrink,
};
use crate::{
    base::{Bytes, MIB},
    strategy::{
        OffBooks, Strategy,
        conformance::{ConformanceFinding, ObservedStrategy},
    },
    trace::Trace,
};

/// The name of this kind of stress.
const KIND: &str = "history";
/// Its part in `stress all`: programs until the time is up.
pub(super) const STRESS: StressKind = StressKind {
    name: KIND,
    applies: |_| true,
    judge: |target, seed, budget| history(target, seed, &HistoryOptions::default(), budget),
};
/// Memory unless the target sets it.
const MEMORY_BYTES: u64 = 256 * MIB;
/// The least rounds after which growth is judged; again at every power of two of it.
const LEAST_ROUNDS: u64 = 64;
/// How often a program is repeated.
const ROUNDS: u64 = 512;
/// Events and address ranges that may be created without being destroyed.
const FEW_OBJECTS: u64 = 64;
/// How many smaller programs are tried after a failure.
const MOST_TRIES: usize = 400;
/// Layout and statistics are compared once in this many events.
const AUDIT_EVERY: u64 = 64;

/// What to play.
#[derive(Clone, Copy, Debug)]
pub struct HistoryOptions<'a> {
    /// The program; if none, programs of its own until the time is up.
    pub program: Option<&'a Trace>,
    /// How often it is repeated.
    pub rounds: u64,
    /// How many programs are played; each on a new strategy.
    pub programs: u64,
}

impl Default for HistoryOptions<'_> {
    fn default() -> Self {
        HistoryOptions { program: None, rounds: ROUNDS, programs: u64::MAX }
    }
}

/// Plays programs again and again until one breaks a promise or the time is up.
pub fn history(
    target: &StressTarget,
    seed: u64,
    options: &HistoryOptions<'_>,
    budget: &StressBudget<'_>,
) -> StressVerdict {
    let mut verdict = StressVerdict::new(KIND, &target.strategy);
    let memory = target.memory_bytes.unwrap_or(MEMORY_BYTES);
    for number in 0..options.programs {
        if budget.search_is_over() {
            break;
        }
        let program = options.program.cloned().unwrap_or_else(|| repeatable_program(seed, number, memory));
        match HistoryRun::of(target, &program, options.rounds, budget) {
            Ok(played) => {
                verdict.count(&played.run);
                if let Some(finding) = played.run.findings.first() {
                    verdict.failures.push(smallest(target, &program, &played, finding, budget));
                }
            }
            Err(error) => verdict.skipped = Some(error.to_string()),
        }
        if options.program.is_some() || !verdict.failures.is_empty() || verdict.skipped.is_some() {
            break;
        }
    }
    verdict
}

/// The smallest program that breaks the same promise in as many rounds.
fn smallest(
    target: &StressTarget,
    program: &Trace,
    played: &HistoryRun,
    finding: &ConformanceFinding,
    budget: &StressBudget<'_>,
) -> StressFailure {
    let rounds = played.rounds;
    let mut detail = finding.detail.clone();
    let mut breaks = |candidate: &Trace| {
        let run = HistoryRun::of(target, candidate, rounds, budget);
        let found = run.ok().and_then(|played| played.run.findings.into_iter().next());
        found.filter(|found| found.check == finding.check).map(|found| detail = found.detail).is_some()
    };
    let hangs = matches!(finding.check, super::checked_run::HANG);
    let small = if hangs { program.clone() } else { shrink(program, &mut breaks, MOST_TRIES, &|| budget.is_over()) };
    StressFailure {
        trace: Some(small),
        conditions: vec![format!("--rounds {rounds}")],
        ..target.failure(KIND, format!("round {rounds}: {detail}"))
    }
}

/// One program, played again and again.
struct HistoryRun {
    run: CheckedRun,
    /// The round in which it ended.
    rounds: u64,
}

impl HistoryRun {
    fn of(
        target: &StressTarget,
        program: &Trace,
        rounds: u64,
        budget: &StressBudget<'_>,
    ) -> Result<HistoryRun, TargetError> {
        if target.is_plugin() || !target.device.is_simulated() {
            return HistoryRun::here(target, program, rounds, &|| budget.is_over());
        }
        // A strategy that does not return is left behind in its thread.
        let limit = time_limit(program.events.len().saturating_mul(rounds as usize));
        let (target, program) = (target.clone(), program.clone());
        run_within(limit, move || HistoryRun::here(&target, &program, rounds, &|| false)).unwrap_or_else(|aborted| {
            let finding = ConformanceFinding { check: super::checked_run::HANG, detail: aborted.to_string() };
            Ok(HistoryRun { run: CheckedRun { findings: vec![finding], ..CheckedRun::default() }, rounds: 1 })
        })
    }

    fn here(
        target: &StressTarget,
        program: &Trace,
        rounds: u64,
        over: &dyn Fn() -> bool,
    ) -> Result<HistoryRun, TargetError> {
        let (strategy, device) = target.open()?;
        let streams = program.tables.streams().get(1..).unwrap_or_default();
        let mut player =
            CheckedPlayer::new(ObservedStrategy::new(strategy, device, streams), false, target.is_plugin());
        let mut levels = Levels::default();
        let mut round = 0;
        let played = catch_panic(|| {
            while round < rounds && !over() {
                round += 1;
                player.carry_out(program, AUDIT_EVERY);
                player.end_round();
                if player.watch.has_findings() {
                    return;
                }
                levels.note(&player.watch);
                if let Some(growth) = levels.growth() {
                    player.watch.find("leak", growth);
                    return;
                }
            }
        });
        if let Err(payload) = played {
            player.watch.find("panic", panic_message(&*payload));
        }
        player.run.calls = player.watch.device.ledger();
        player.run.calls_are_known = player.watch.strategy.stats().off_books == OffBooks::Nothing;
        let mut findings = player.watch.findings();
        if findings.is_empty() {
            let closed = catch_panic(|| {
                player.free_own();
                player.watch.close();
            });
            if let Err(payload) = closed {
                player.watch.find("panic", panic_message(&*payload));
            }
            findings = player.watch.findings();
        }
        Ok(HistoryRun { run: CheckedRun { findings, ..player.run }, rounds: round })
    }
}

/// What a strategy held after each round, when nothing was in use.
#[derive(Debug, Default)]
struct Levels {
    held: Vec<u64>,
    events: Vec<u64>,
    address_ranges: Vec<u64>,
}

impl Levels {
    fn note(&mut self, watch: &ObservedStrategy) {
        self.held.push(watch.device.held_bytes());
        let details = watch.strategy.details();
        let count = |of: &str| details.iter().find(|(name, _)| *name == of).map_or(0, |&(_, count)| count);
        self.events.push(count("events"));
        self.address_ranges.push(count("address_ranges"));
    }

    /// Growth that goes on, as a sentence. Judged after 64, 128, 256 ... rounds.
    fn growth(&self) -> Option<String> {
        let rounds = self.held.len() as u64;
        if rounds < LEAST_ROUNDS || !rounds.is_power_of_two() {
            return None;
        }
        if let Some((first, last)) = goes_on(&self.held, 1) {
            return Some(format!(
                "it leaks: the same program was played {rounds} times and freed everything, and the memory held has grown \
                 from {} to {}",
                Bytes(first),
                Bytes(last)
            ));
        }
        [("events", &self.events), ("address ranges", &self.address_ranges)].into_iter().find_map(|(what, counts)| {
            let (first, last) = goes_on(counts, FEW_OBJECTS)?;
            Some(format!(
                "it leaks {what}: the same program was played {rounds} times, and the {what} that exist have grown \
                 from {first} to {last}"
            ))
        })
    }
}

/// The first and the last level, if the levels grow in each quarter of the rounds, and in the last one at least half as
/// fast as before. A cache grows at first and then no longer.
pub(super) fn goes_on(levels: &[u64], least: u64) -> Option<(u64, u64)> {
    let quarter = levels.len() / 4;
    let tops: Vec<u64> = levels.chunks(quarter.max(1)).map(|part| part.iter().copied().max().unwrap_or(0)).collect();
    let grown: Vec<u64> = tops.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    let [second, third, fourth] = grown[..] else { return None };
    let sustained = second > 0 && third > 0 && fourth > 0 && fourth >= third / 2 && third >= second / 4;
    (sustained && second + third + fourth >= least).then(|| (levels[0], levels[levels.len() - 1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::STRATEGIES;

    fn played(strategy: &str, number: u64, rounds: u64) -> StressVerdict {
        let target = StressTarget::simulated(strategy, 96 * MIB);
        let program = repeatable_program(1, number, 96 * MIB);
        let options = HistoryOptions { program: Some(&program), rounds, programs: 1 };
        history(&target, 1, &options, &StressBudget::unlimited(&|| false))
    }

    #[test]
    fn no_strategy_leaks() {
        for entry in STRATEGIES.iter().filter(|entry| !["null", "address"].contains(&entry.name)) {
            let verdict = played(entry.name, 0, 64);
            assert_eq!(verdict.word(), "passed", "{:?}", verdict.failures);
            // `fixed` serves only small requests, of which this program has none.
            assert!(verdict.row.served > 64 || entry.name == "fixed", "{}", entry.name);
            let exhausted = played(entry.name, 1, 64);
            assert_eq!(exhausted.word(), "passed", "{:?}", exhausted.failures);
            assert!(exhausted.row.ooms >= 64, "{}: memory never ran out", entry.name);
        }
    }

    #[test]
    fn growth_that_ends_is_no_leak() {
        let cache: Vec<u64> = (0..64).map(|round: u64| round.min(40)).collect();
        assert_eq!(goes_on(&cache, 1), None);
        let leak: Vec<u64> = (0..64).map(|round| 7 + round / 4).collect();
        assert_eq!(goes_on(&leak, 1), Some((7, 22)));
        assert_eq!(goes_on(&leak, 1000), None);
        assert_eq!(goes_on(&[5; 64], 1), None);
    }
}

//! `stress faults`: every driver call that a strategy makes fails once, and more.
//!
//! A few programs lead a strategy through all that it asks of a device. A run without faults counts
//! its driver calls by kind; then each of them fails once, or is the first of several that fail, or
//! reports out of memory. In further runs another process takes the free memory, or events never
//! complete. After each run: nothing leaked, no block is lost, and the same program gives the same
//! result as on a new strategy. A failing program is shrunk together with the place of the fault.
//!
//! Only calls of the strategy are counted and fail, so `cuMemCreate:3` means the same whatever the
//! program does.

mod programs;
mod run;

pub use programs::programs;

use std::{num::NonZeroU64, sync::Arc};

use rand::seq::index;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use self::run::FaultRun;
use super::{
    StressBudget, StressFailure, StressKind, StressTarget, StressVerdict,
    checked_run::{run_within, time_limit},
    shrink,
};
use crate::{
    device::{
        CallKind, CallLedger,
        wrap::{CallFailure, FaultSpec},
    },
    strategy::{Stats, conformance::ConformanceFinding},
    trace::Trace,
};

/// The name of this kind of stress.
const KIND: &str = "faults";

/// Its part in `stress all`.
pub(super) const STRESS: StressKind = StressKind {
    name: KIND,
    applies: |_| true,
    judge: |target, seed, budget| faults(target, &FaultOptions { seed, ..FaultOptions::default() }, budget).verdict,
};

/// How many traces are tried to shrink a failing program, on a simulated and on a real device. Each
/// is played with the fault at several places.
const SHRINKING_TRIES: (usize, usize) = (400, 40);
/// At how many earlier places a fault is tried while its program shrinks.
const PLACES: u64 = 24;

/// What to try.
#[derive(Clone, Debug, Default)]
pub struct FaultOptions {
    /// The programs; if empty, those of [`programs`].
    pub programs: Vec<Trace>,
    /// The faults; if empty, all that a program leaves room for.
    pub faults: Vec<FaultSpec>,
    /// The seed of the sample where a program makes too many driver calls to let each fail.
    pub seed: u64,
}

/// The result for one strategy.
#[derive(Clone, Debug, Default)]
pub struct FaultReport {
    /// The verdict on the strategy.
    pub verdict: StressVerdict,
    /// Driver calls of the runs without faults.
    pub calls: CallLedger,
    /// The number of calls that were not made to fail, because there are too many.
    pub left_out: u64,
}

/// Plays the target's programs under every fault until the time is up.
///
/// The functions of a plugin cannot report an error. So only memory runs out for one: calls that take memory report that
/// there is none, and another process takes what is free.
pub fn faults(target: &StressTarget, options: &FaultOptions, budget: &StressBudget<'_>) -> FaultReport {
    let verdict = StressVerdict::new(KIND, &target.strategy);
    let report = FaultReport { verdict, ..FaultReport::default() };
    let mut tester = FaultTester { target, budget, report, broken: Vec::new() };
    match target.open() {
        Err(error) => tester.report.verdict.skipped = Some(error.to_string()),
        Ok((strategy, device)) => {
            let programs = match options.programs.as_slice() {
                [] => programs(device.free_bytes(), device.props().page_bytes),
                given => given.to_vec(),
            };
            drop((strategy, device));
            for program in programs.into_iter().map(Arc::new) {
                if budget.search_is_over() || tester.hangs() {
                    break;
                }
                tester.test(&program, options);
            }
        }
    }
    tester.report
}

/// Tests one target.
struct FaultTester<'a> {
    target: &'a StressTarget,
    budget: &'a StressBudget<'a>,
    report: FaultReport,
    /// The promises whose first failure was shrunk and kept.
    broken: Vec<&'static str>,
}

impl FaultTester<'_> {
    /// Plays one program under every fault. Of the runs that break the same promise, in any program, only the first is
    /// shrunk and kept.
    fn test(&mut self, program: &Arc<Trace>, options: &FaultOptions) {
        let clean = match self.run(program, None, None) {
            Ok(run) => run,
            Err(reason) => return self.fail(program, None, reason),
        };
        self.report.verdict.count(&clean.run);
        if let Some(finding) = clean.run.findings.first() {
            return self.keep_first(program, None, finding);
        }
        let sweep = match options.faults.as_slice() {
            [] if self.target.is_plugin() => {
                FaultSweep::of(&clean.run.calls, clean.strategy_calls, options.seed).without_errors()
            }
            [] => FaultSweep::of(&clean.run.calls, clean.strategy_calls, options.seed),
            given => FaultSweep { faults: given.to_vec(), left_out: 0 },
        };
        self.report.calls.absorb(&clean.run.calls);
        self.report.left_out += sweep.left_out;
        for fault in sweep.faults {
            if self.budget.search_is_over() {
                return;
            }
            match self.run(program, Some(fault), Some(&clean.stats)) {
                Ok(run) => {
                    self.report.verdict.count(&run.run);
                    if let Some(finding) = run.run.findings.first() {
                        self.keep_first(program, Some(fault), finding);
                    }
                }
                // A strategy that panics or hangs may do so again, so the program ends here.
                Err(reason) => return self.fail(program, Some(fault), reason),
            }
        }
    }

    /// Whether a run did not return: no further program is tried, because each would have to be waited for.
    fn hangs(&self) -> bool {
        self.report.verdict.failures.iter().any(|failure| failure.detail.contains("did not return"))
    }

    /// One run in its own thread; the reason if it panicked or did not return.
    fn run(
        &self,
        program: &Arc<Trace>,
        fault: Option<FaultSpec>,
        expected: Option<&Stats>,
    ) -> Result<FaultRun, String> {
        let (target, program, expected) = (self.target.clone(), Arc::clone(program), expected.copied());
        let run = move |program: &Trace| {
            let opened = target.open().map_err(|error| error.to_string())?;
            Ok(FaultRun::of(program, opened, fault, expected.as_ref(), target.is_plugin()))
        };
        run_within(time_limit(program.events.len()), move || run(&program))
            .unwrap_or_else(|aborted| Err(aborted.to_string()))
    }

    fn keep_first(&mut self, program: &Trace, fault: Option<FaultSpec>, finding: &ConformanceFinding) {
        if !self.broken.contains(&finding.check) {
            self.broken.push(finding.check);
            self.shrink(program, fault, finding);
        }
    }

    /// Adds the failure with the smallest program that shows it. While the program shrinks the
    /// fault moves, because fewer driver calls come before it.
    fn shrink(&mut self, program: &Trace, fault: Option<FaultSpec>, finding: &ConformanceFinding) {
        let (mut place, mut detail) = (fault, finding.detail.clone());
        let mut still_fails = |candidate: &Trace| match self.breaks(candidate, place, finding.check) {
            Some(found) => {
                (place, detail) = found;
                true
            }
            None => false,
        };
        let tries = if self.target.device.is_simulated() { SHRINKING_TRIES.0 } else { SHRINKING_TRIES.1 };
        let small = shrink(program, &mut still_fails, tries, &|| self.budget.is_over());
        self.fail(&small, place, detail);
    }

    /// A fault of the same kind, no later than this one, that breaks the same promise; and how.
    fn breaks(&self, program: &Trace, fault: Option<FaultSpec>, part: &str) -> Option<(Option<FaultSpec>, String)> {
        let program = Arc::new(program.clone());
        let broken = |run: &FaultRun| {
            let finding = run.run.findings.first().filter(|finding| finding.check == part)?;
            Some(finding.detail.clone())
        };
        let clean = self.run(&program, None, None).ok()?;
        let Some(fault) = fault else { return broken(&clean).map(|detail| (None, detail)) };
        if !clean.run.findings.is_empty() {
            return None;
        }
        let last = fault.first();
        let places =
            (last.saturating_sub(PLACES).max(1)..=last).rev().chain(1..=PLACES.min(last.saturating_sub(PLACES)));
        places.map(|place| fault.moved_to(place)).find_map(|fault| {
            let run = self.run(&program, Some(fault), Some(&clean.stats)).ok()?;
            Some((Some(fault), broken(&run)?))
        })
    }

    fn fail(&mut self, program: &Trace, fault: Option<FaultSpec>, detail: String) {
        let under = fault.map(|fault| format!("under {fault}: ")).unwrap_or_default();
        self.report.verdict.failures.push(StressFailure {
            trace: Some(program.clone()),
            conditions: fault.map(|fault| format!("--fault {fault}")).into_iter().collect(),
            ..self.target.failure(KIND, format!("{}: {under}{detail}", program.name))
        });
    }
}

/// A program with at most this many driver calls is played under every fault.
const FEW_CALLS: u64 = 300;
/// With more calls, all calls up to this number fail ...
const FIRST_CALLS: u64 = 100;
/// ... and this many of the later ones.
const SAMPLED_CALLS: usize = 50;
/// How many calls fail in a row: a call, what undoes it, and what is tried next. One less than the
/// tries that a program gives a call.
const IN_A_ROW: NonZeroU64 = NonZeroU64::MIN.saturating_add(2);
/// At how many moments of a program its memory is taken and its events get stuck.
const MOMENTS: u64 = 8;

/// The faults that a program is played under, and how many were left out.
#[derive(Clone, Debug, Default)]
struct FaultSweep {
    faults: Vec<FaultSpec>,
    left_out: u64,
}

impl FaultSweep {
    /// All faults, or a sample, for a run that made these driver calls in this many calls of the
    /// strategy.
    fn of(calls: &CallLedger, strategy_calls: u64, seed: u64) -> FaultSweep {
        let mut sweep = FaultSweep::default();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let total = calls.total().count;
        let all = total <= FEW_CALLS;
        let failure = CallFailure::UNKNOWN;
        for (kind, tally) in calls.iter() {
            let chosen = chosen_calls(tally.count, all, &mut random);
            sweep.add(&chosen, tally.count, |n| FaultSpec::once(kind, n, failure));
            sweep.add(&chosen, tally.count, |first| FaultSpec::Calls {
                kind: Some(kind),
                first,
                count: IN_A_ROW,
                failure,
            });
            if may_run_out(kind) {
                sweep.add(&chosen, tally.count, |n| FaultSpec::once(kind, n, CallFailure::OutOfMemory));
            }
        }
        let chosen = chosen_calls(total, all, &mut random);
        sweep.add(&chosen, total, |first| FaultSpec::Calls { kind: None, first, count: IN_A_ROW, failure });
        let step = strategy_calls.div_ceil(MOMENTS).max(1);
        let count = NonZeroU64::new(strategy_calls / 4).unwrap_or(NonZeroU64::MIN);
        for first in (1..=strategy_calls).step_by(step as usize) {
            sweep.faults.push(FaultSpec::MemoryTaken { first, count });
            sweep.faults.push(FaultSpec::Stuck { first });
        }
        sweep
    }

    /// Only the faults that are no errors: memory runs out.
    fn without_errors(mut self) -> FaultSweep {
        let failure_is_oom = |fault: &FaultSpec| match fault {
            FaultSpec::Calls { failure, .. } => *failure == CallFailure::OutOfMemory,
            FaultSpec::MemoryTaken { .. } => true,
            FaultSpec::Stuck { .. } => false,
        };
        self.faults.retain(failure_is_oom);
        self
    }

    fn add(&mut self, chosen: &[u64], of: u64, fault: impl Fn(u64) -> FaultSpec) {
        self.faults.extend(chosen.iter().map(|&n| fault(n)));
        self.left_out += of - chosen.len() as u64;
    }
}

/// The numbers of the calls that fail, in ascending order.
fn chosen_calls(count: u64, all: bool, random: &mut ChaCha8Rng) -> Vec<u64> {
    if all || count <= FIRST_CALLS {
        return (1..=count).collect();
    }
    let later = (count - FIRST_CALLS) as usize;
    let mut sampled = index::sample(random, later, SAMPLED_CALLS.min(later)).into_vec();
    sampled.sort_unstable();
    (1..=FIRST_CALLS).chain(sampled.into_iter().map(|place| FIRST_CALLS + 1 + place as u64)).collect()
}

/// Whether a call of this kind may report that memory or address space has run out.
const fn may_run_out(kind: CallKind) -> bool {
    matches!(kind, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync | CallKind::AddressReserve)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        strategy::{STRATEGIES, flawed::Flaw},
    };

    fn target(strategy: &str) -> StressTarget {
        StressTarget::simulated(strategy, 96 * MIB)
    }

    fn everything(strategy: &str) -> FaultReport {
        faults(&target(strategy), &FaultOptions::default(), &StressBudget::unlimited(&|| false))
    }

    #[test]
    fn no_driver_fault_breaks_a_strategy() {
        // The two that map memory page by page make most of the calls, and are tested by the
        // command itself.
        let quick = STRATEGIES.iter().filter(|entry| !["null", "address", "stitch", "planned"].contains(&entry.name));
        for entry in quick {
            let report = everything(entry.name);
            assert_eq!(report.verdict.word(), "passed", "{:?}", report.verdict.failures);
            assert_eq!(report.left_out, 0, "{}: programs are short enough for every call", entry.name);
            assert!(report.verdict.row.trials > 3 * report.calls.total().count, "{}: {:?}", entry.name, report.verdict);
        }
    }

    #[test]
    fn programs_reach_every_driver_call() {
        let mut seen = CallLedger::default();
        for strategy in ["caching:expandable_segments:True", "async", "cub", "pool"] {
            let what = FaultOptions { faults: vec![FaultSpec::Stuck { first: 1 }], ..FaultOptions::default() };
            seen.absorb(&faults(&target(strategy), &what, &StressBudget::unlimited(&|| false)).calls);
        }
        let of_the_program =
            ["cuStreamCreate", "cuCtxSynchronize", "cuMemHostAlloc", "cuMemFreeHost", "cuLaunchKernel"];
        let expected = CallKind::ALL.iter().filter(|kind| !of_the_program.contains(&kind.name()));
        let missing: Vec<&CallKind> = expected.filter(|&&kind| seen.of(kind).count == 0).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// What each flaw breaks, and the most events of its smallest program.
    const SEEDED: [(Flaw, &str, usize); 8] = [
        (Flaw::ForgetsOnFailure, "", 4),
        (Flaw::LosesSegmentOnFailure, "", 3),
        (Flaw::LeakOnRetry, "after a close", 5),
        (Flaw::BooksTooEarly, "reserved", 3),
        (Flaw::LeakOnClose, "after a close", 10),
        (Flaw::FailsOnExhaustion, "", 10),
        (Flaw::Panics, "panicked", 80),
        (Flaw::Spins, "thousands of times", 6),
    ];

    #[test]
    fn every_flaw_is_found_shrunk_and_reproduced() {
        for (flaw, says, most_events) in SEEDED {
            let name = format!("flawed:{flaw:?}");
            let report = everything(&name);
            let found = report.verdict.failures.iter().find(|failure| failure.detail.contains(says));
            let failure = found.unwrap_or_else(|| panic!("{flaw:?}: {:?}", report.verdict.failures));
            let program = failure.trace.clone().unwrap();
            assert!(program.events.len() <= most_events, "{failure}: {:?}", program.events);
            let faults_found = failure
                .conditions
                .iter()
                .map(|condition| condition.strip_prefix("--fault ").unwrap().parse::<FaultSpec>().unwrap());
            let again = FaultOptions { programs: vec![program], faults: faults_found.collect(), seed: 0 };
            let again = faults(&target(&name), &again, &StressBudget::unlimited(&|| false)).verdict;
            assert_eq!(again.word(), "failed", "{failure} {:?}", failure.conditions);
        }
    }

    #[test]
    fn flawless_allocator_passes() {
        let verdict = everything("flawed:None").verdict;
        assert_eq!(verdict.word(), "passed", "{:?}", verdict.failures);
    }

    #[test]
    fn stop_and_unknown_strategy() {
        assert_eq!(
            faults(&target("caching"), &FaultOptions::default(), &StressBudget::unlimited(&|| true)).verdict.row.trials,
            0
        );
        let skipped = everything("no such strategy").verdict.skipped;
        assert!(skipped.is_some_and(|reason| reason.contains("unknown strategy")));
    }

    #[test]
    fn many_calls_are_sampled() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        assert!(chosen_calls(200, true, &mut random).into_iter().eq(1..=200));
        assert!(chosen_calls(90, false, &mut random).into_iter().eq(1..=90));
        let many = chosen_calls(1_000, false, &mut random);
        assert!(many.iter().copied().take(100).eq(1..=100));
        assert_eq!(many.len(), 150);
        assert!(many.is_sorted() && many.iter().all(|&n| n <= 1_000));
        assert_eq!(
            many,
            chosen_calls(1_000, false, &mut {
                let mut same = ChaCha8Rng::seed_from_u64(7);
                chosen_calls(200, true, &mut same);
                same
            })
        );
    }
}

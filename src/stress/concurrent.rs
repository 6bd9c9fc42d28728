//! `stress threads`: an allocator's functions called from several threads at once.
//!
//! A [`Strategy`] of ours is called by one thread at a time; its callers share it under a lock.
//! A plugin has to lock by itself: PyTorch calls it from the threads of the program and of autograd. The threads run in
//! the plugin's process, so that nothing here orders their calls.

use super::{
    StressBudget, StressKind, StressTarget, StressVerdict, TargetError, checked_run::CheckedRun, history::goes_on,
};
use crate::{
    base::{Bytes, GIB, MIB},
    strategy::{Strategy, StrategyError, ThreadedCalls, conformance::ObservedStrategy},
};

/// The name of this kind of stress.
const KIND: &str = "threads";
/// Its part in `stress all`.
pub(super) const STRESS: StressKind = StressKind {
    name: KIND,
    applies: StressTarget::is_plugin,
    judge: |target, _, budget| {
        threads(target, &ThreadsOptions { processes: MOST_PROCESSES, ..ThreadsOptions::default() }, budget)
    },
};

/// The calls of half of the processes are made in batches, each by new threads: what a thread that ends leaves behind adds
/// up. The threads of the others live longer, and memory runs out under them: races are more likely.
const BATCHES: usize = 64;
/// Where the memory held grows from batch to batch, it is watched for this many batches before it is called a leak: how
/// threads interleave is random, and so is the most that a cache holds.
const BATCHES_OF_A_LEAK: usize = 2 * BATCHES;
/// The most processes in `stress all`: a race is a matter of luck, and a process takes a tenth of a second.
const MOST_PROCESSES: u64 = 120;
/// Memory for each thread, and for all, where it is to run out.
const LITTLE_MEMORY: (u64, u64) = (4 * MIB, 8 * MIB);
/// Memory where it is not to run out, whatever leaks.
const MUCH_MEMORY: u64 = 8 * GIB;

/// How many threads call, and how often.
#[derive(Clone, Copy, Debug)]
pub struct ThreadsOptions {
    /// Threads.
    pub threads: u64,
    /// Calls of each thread in a process.
    pub calls: u64,
    /// Processes: each starts with a new plugin.
    pub processes: u64,
}

impl Default for ThreadsOptions {
    fn default() -> ThreadsOptions {
        ThreadsOptions { threads: 8, calls: 4_000, processes: 12 }
    }
}

/// Calls the target from several threads until something breaks, all was played, or the time is up.
pub fn threads(target: &StressTarget, options: &ThreadsOptions, budget: &StressBudget<'_>) -> StressVerdict {
    let mut verdict = StressVerdict::new(KIND, &target.strategy);
    for process in 0..options.processes {
        if budget.search_is_over() {
            break;
        }
        // More threads than processors, and as few as can race: different interleavings.
        let threads = if process % 2 == 0 { options.threads } else { options.threads.clamp(1, 2) };
        let in_batches = process % 4 < 2;
        let runs_out = target.varies_memory && !in_batches;
        let little = LITTLE_MEMORY.1 + threads * LITTLE_MEMORY.0;
        let mut target = target.clone();
        if target.varies_memory {
            target.memory_bytes = Some(if runs_out { little } else { MUCH_MEMORY });
        }
        match play(&target, &ThreadsOptions { threads, ..*options }, in_batches) {
            Ok(Some((run, broken))) => {
                verdict.count(&run);
                if let Some(detail) = broken {
                    let memory = if runs_out { format!(" in {}", Bytes(little)) } else { String::new() };
                    let detail = format!("called from {threads} threads at once{memory}: {detail}");
                    verdict.failures.push(target.failure(KIND, detail));
                    break;
                }
            }
            Ok(None) => {
                verdict.skipped = Some("it is called by one thread at a time".to_owned());
                break;
            }
            Err(error) => {
                verdict.skipped = Some(error.to_string());
                break;
            }
        }
    }
    verdict
}

type ThreadsRun = (CheckedRun, Option<String>);

/// One process; what broke, if something did. `None` if the strategy cannot be called from several threads.
fn play(
    target: &StressTarget,
    &ThreadsOptions { threads, calls, .. }: &ThreadsOptions,
    in_batches: bool,
) -> Result<Option<ThreadsRun>, TargetError> {
    let (strategy, device) = target.open()?;
    let mut watch = ObservedStrategy::new(strategy, device, &[]);
    let mut run = CheckedRun { events: threads * calls, ..CheckedRun::default() };
    let mut held = Vec::new();
    let mut broken = None;
    let batches = if in_batches { BATCHES } else { 1 };
    while broken.is_none() && (held.len() < batches || is_growing(&held)) {
        let batch = calls.div_ceil(batches as u64);
        match watch.call(|strategy, cx| Strategy::call_from_threads(strategy, cx, threads, batch)) {
            Ok(None) => return Ok(None),
            Ok(Some(ThreadedCalls { overlap: Some(address), .. })) => {
                broken = Some(format!("the block at {address} overlaps another that is live"));
            }
            Ok(Some(ThreadedCalls { served, .. })) => run.served += served,
            Err(StrategyError::Died(reason) | StrategyError::Hung(reason)) => broken = Some(reason),
            Err(error) => broken = Some(error.to_string()),
        }
        held.push(watch.device.held_bytes());
    }
    // In little memory a plugin may serve nothing.
    if broken.is_none() && run.served == 0 && (in_batches || !target.varies_memory) {
        broken = Some("no request was served".to_owned());
    }
    let broken = broken.or_else(|| leak(&held)).or_else(|| {
        watch.close();
        watch.findings().into_iter().next().map(|finding| finding.detail)
    });
    run.calls = watch.device.ledger();
    run.calls_are_known = run.calls.total().count > 0;
    Ok(Some((run, broken)))
}

/// Whether more batches must tell a leak from chance.
fn is_growing(held: &[u64]) -> bool {
    (BATCHES..BATCHES_OF_A_LEAK).contains(&held.len()) && goes_on(&held[..BATCHES], 1).is_some()
}

/// A leak, as a sentence: the memory held grows all the time, and the second half of the batches adds at least a quarter.
fn leak(held: &[u64]) -> Option<String> {
    let is_long = held.len() >= BATCHES_OF_A_LEAK;
    let (_, last) = goes_on(held, 1).filter(|&(_, last)| is_long && last >= held[BATCHES - 1] / 4 * 5)?;
    Some(format!(
        "it leaks: {} times new threads made the same calls, freed everything and ended, and the memory held has grown \
         from {} to {}",
        held.len(),
        Bytes(held[0]),
        Bytes(last)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leak_grows_with_the_batches() {
        let linear: Vec<u64> = (1..=128).map(|batch| batch * MIB).collect();
        assert!(leak(&linear).is_some_and(|detail| detail.contains("from 1.00 MiB to 128 MiB")));
        // Too short to tell, and growth that becomes less and less.
        assert_eq!(leak(&linear[..64]), None);
        let cache: Vec<u64> = (1..=128).map(|batch: u64| 30 * MIB + u64::from(batch.ilog2()) * MIB).collect();
        assert_eq!(leak(&cache), None);
        assert!(is_growing(&linear[..64]) && !is_growing(&linear) && !is_growing(&[MIB; 64]));
    }

    #[test]
    fn strategies_of_one_thread_are_skipped() {
        let target = StressTarget::simulated("caching", 64 * MIB);
        let verdict = threads(&target, &ThreadsOptions::default(), &StressBudget::unlimited(&|| false));
        assert_eq!(verdict.word(), "skipped");
        assert!(!(STRESS.applies)(&target));
    }
}

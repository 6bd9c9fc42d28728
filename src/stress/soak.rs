//! `stress soak`: a long mixed program in memory that is nearly full, on a driver that fails now
//! and then.
//!
//! One strategy runs one program after another. Contents are checked as by `stress integrity`, and
//! its other promises as well. Any driver call may fail at random, and is then repeated. The report
//! says how full memory was and how much of it was idle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    StressFailure, TargetError,
    checked_run::{RunAborted, TIME_LIMIT, catch_panic},
    integrity::{
        EnduranceTest, PatternPlayer, ProgramMix, StopCondition, broken_otherwise, integrity_program, lost_context,
    },
    state::{EnduranceOutcome, IntegrityCounts},
};
use crate::{
    device::{
        Device,
        wrap::{FaultPlan, FaultyDevice},
    },
    models::SeededRandom,
    strategy::wrap::CheckedStrategy,
};

/// The name of this kind of stress.
const KIND: &str = "soak";
/// Live bytes that the program aims for, as a share of the memory: more than there is, so that
/// occupancy depends on the strategy. Requests that fail are counted and left out.
const WANTED_PERCENT: u64 = 150;
/// The same for long-lived blocks.
const LONG_LIVED_PERCENT: u64 = 130;
/// No block is larger than the memory divided by this: at this occupancy most larger ones would not
/// fit.
const LARGEST_PART: u64 = 64;
/// Blocks per program, without long-lived ones.
const PROGRAM_BLOCKS: u64 = 1_500;
/// How often a soak in a thread of its own is asked whether it is over.
const NEWS_EVERY: Duration = Duration::from_millis(50);

/// What a soak tells while it runs.
enum SoakNews {
    Counts(IntegrityCounts),
    End(Result<EnduranceOutcome, TargetError>),
}

/// How often a failing call is tried.
const TRIES: u32 = 16;

impl EnduranceTest {
    /// Soaks the strategy until the stop condition holds. One driver call in `fault_one_in` fails;
    /// none if it is 0. For a plugin none fails: its functions cannot report an error.
    pub fn soak(
        &self,
        fault_one_in: u64,
        until: &StopCondition<'_>,
        progress: &mut dyn FnMut(&IntegrityCounts),
    ) -> Result<EnduranceOutcome, TargetError> {
        if self.target.is_plugin() {
            return self.soak_here(0, &|counts| until.is_reached(counts), progress);
        }
        if !self.target.device.is_simulated() {
            return self.soak_here(fault_one_in, &|counts| until.is_reached(counts), progress);
        }
        self.soak_apart(fault_one_in, until, progress)
    }

    /// In a thread of its own, which is left behind if the strategy does not return.
    fn soak_apart(
        &self,
        fault_one_in: u64,
        until: &StopCondition<'_>,
        progress: &mut dyn FnMut(&IntegrityCounts),
    ) -> Result<EnduranceOutcome, TargetError> {
        let (sender, receiver) = mpsc::channel();
        let over = Arc::new(AtomicBool::new(false));
        let (test, blocks, is_over) = (self.clone(), until.blocks, Arc::clone(&over));
        let soak = move || {
            let enough = |counts: &IntegrityCounts| {
                is_over.load(Ordering::Relaxed) || blocks.is_some_and(|blocks| counts.blocks >= blocks)
            };
            // The receiver is gone once the strategy was given up.
            let mut tell = |counts: &IntegrityCounts| drop(sender.send(SoakNews::Counts(counts.clone())));
            let outcome = test.soak_here(fault_one_in, &enough, &mut tell);
            let _ = sender.send(SoakNews::End(outcome));
        };
        if let Err(error) = thread::Builder::new().name("soak".to_owned()).spawn(soak) {
            return Ok(EnduranceOutcome::skipped(error));
        }
        let mut counts = IntegrityCounts::default();
        let mut last_news = Instant::now();
        loop {
            over.fetch_or(until.budget.search_is_over(), Ordering::Relaxed);
            match receiver.recv_timeout(NEWS_EVERY) {
                Ok(SoakNews::End(outcome)) => return outcome,
                Ok(SoakNews::Counts(news)) => {
                    (counts, last_news) = (news, Instant::now());
                    progress(&counts);
                }
                Err(_) if last_news.elapsed() < TIME_LIMIT => {}
                Err(_) => {
                    let failure = self.target.failure(KIND, RunAborted::Hung(TIME_LIMIT).to_string());
                    return Ok(EnduranceOutcome { counts, failures: vec![failure], ..EnduranceOutcome::default() });
                }
            }
        }
    }

    fn soak_here(
        &self,
        fault_one_in: u64,
        enough: &dyn Fn(&IntegrityCounts) -> bool,
        progress: &mut dyn FnMut(&IntegrityCounts),
    ) -> Result<EnduranceOutcome, TargetError> {
        let (strategy, device) = self.target.open_with_contents()?;
        let begin = Instant::now();
        let random = SeededRandom::new(self.seed, "soak faults").into_rng();
        let device = FaultyDevice::with(FaultPlan::none().fail_one_in(fault_one_in, random), device);
        let injected = std::sync::Arc::clone(&device.interceptor.injected);
        let device: Box<dyn Device> = Box::new(device);
        let mut player =
            PatternPlayer::new(CheckedStrategy::new(strategy), device, if fault_one_in == 0 { 1 } else { TRIES });
        let mut count = |player: &mut PatternPlayer<_>| {
            let checked: &CheckedStrategy<_> = &player.strategy;
            player.counts.violations = checked.violation_count();
            player.counts.faults = injected.load(Ordering::Relaxed);
            player.counts.wall_ns = begin.elapsed().as_nanos() as u64;
            progress(&player.counts);
        };
        let mut is_lost = false;
        let played = catch_panic(|| {
            let mut number = 0;
            while !enough(&player.counts) && player.damaged.is_empty() && player.counts.violations == 0 {
                let trace = integrity_program(&self.soak_mix(), self.seed.wrapping_add(number), PROGRAM_BLOCKS);
                let so_far = player.counts.clone();
                player.play(&trace, &|| enough(&so_far))?;
                count(&mut player);
                number += 1;
            }
            player.free_all()?;
            is_lost = player.cannot_serve_again()?;
            player.close()?;
            count(&mut player);
            Ok(())
        });
        let broken = player.damaged.first().map(ToString::to_string);
        let broken = broken.or_else(|| player.strategy.violations().first().map(|violation| violation.detail.clone()));
        let broken = broken.or_else(|| broken_otherwise(&player, &played).map(|(_, detail)| detail));
        let broken = broken.or_else(|| {
            is_lost.then(|| {
                let bytes = player.largest_served;
                format!("it leaks: {bytes} bytes were served, and cannot be served again although nothing is in use")
            })
        });
        let served_nothing = player.counts.blocks == 0 && player.counts.ooms > 0;
        let broken =
            broken.or_else(|| served_nothing.then(|| format!("none of {} requests was served", player.counts.ooms)));
        // A soak is too long for a trace; the seed repeats it on the simulated device.
        let failure = |detail| StressFailure {
            conditions: vec![format!("--fault-one-in {fault_one_in}")],
            ..self.target.failure(KIND, detail)
        };
        Ok(EnduranceOutcome {
            levels: player.levels,
            failures: broken.map(failure).into_iter().collect(),
            lost_context: lost_context(&played),
            counts: player.counts,
            skipped: None,
        })
    }

    fn soak_mix(&self) -> ProgramMix {
        let memory = self.target.memory_bytes.unwrap_or(u64::MAX);
        ProgramMix {
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.up_to(memory / LARGEST_PART),
            live_bytes: memory / 100 * WANTED_PERCENT,
            long_lived_bytes: memory / 100 * LONG_LIVED_PERCENT,
            replaced_one_in: 12,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        strategy::STRATEGIES,
        stress::{BlockSizes, StressBudget, StressTarget},
    };

    fn soak(strategy: &str, fault_one_in: u64) -> EnduranceOutcome {
        let target = StressTarget::simulated(strategy, 256 * MIB);
        let test = EnduranceTest { target, threads: 4, streams: 3, sizes: BlockSizes::MIXED, seed: 1 };
        let until = StopCondition { blocks: Some(1), budget: StressBudget::unlimited(&|| false) };
        test.soak(fault_one_in, &until, &mut |_| {}).unwrap()
    }

    #[test]
    fn every_strategy_survives_a_failing_driver() {
        for entry in STRATEGIES.iter().filter(|entry| entry.name != "null") {
            let outcome = soak(entry.name, 200);
            assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
            assert!(outcome.counts.faults > 10, "{}: {:?}", entry.name, outcome.counts);
            assert!(outcome.counts.blocks > 100, "{}: {:?}", entry.name, outcome.counts);
        }
    }

    #[test]
    fn memory_is_nearly_full() {
        let outcome = soak("caching:expandable_segments:True", 0);
        let levels = outcome.levels;
        assert_eq!(outcome.counts.faults, 0);
        assert!(levels.requested_mean_bytes > 230 * MIB, "{levels:?}");
        assert!(levels.requested_min_bytes <= levels.requested_mean_bytes);
        assert!(levels.requested_mean_bytes <= levels.requested_max_bytes);
        assert!(levels.requested_max_bytes <= levels.reserved_max_bytes && levels.reserved_max_bytes <= 256 * MIB);
    }
}

//! `stress soak`: a long mixed program in memory that is nearly full, on a driver that fails now
//! and then.
//!
//! One strategy runs one program after another. Contents are checked as by `stress integrity`, and
//! its other promises as well. Any driver call may fail at random, and is then repeated. The report
//! says how full memory was and how much of it was idle.

use std::{sync::atomic::Ordering, time::Instant};

use super::{
    StressFailure, TargetError,
    checked_run::catch_panic,
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
/// How often a failing call is tried.
const TRIES: u32 = 16;

impl EnduranceTest {
    /// Soaks the strategy until the stop condition holds. One driver call in `fault_one_in` fails;
    /// none if it is 0.
    pub fn soak(
        &self,
        fault_one_in: u64,
        until: &StopCondition<'_>,
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
        let played = catch_panic(|| {
            let mut number = 0;
            while !until.is_reached(&player.counts) && player.damaged.is_empty() && player.counts.violations == 0 {
                let trace = integrity_program(&self.soak_mix(), self.seed.wrapping_add(number), PROGRAM_BLOCKS);
                player.play(&trace, until.over)?;
                count(&mut player);
                number += 1;
            }
            player.free_all()?;
            player.close()?;
            count(&mut player);
            Ok(())
        });
        let broken = player.damaged.first().map(ToString::to_string);
        let broken = broken.or_else(|| player.strategy.violations().first().map(|violation| violation.detail.clone()));
        let broken = broken.or_else(|| broken_otherwise(&player, &played).map(|(_, detail)| detail));
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
        stress::{BlockSizes, StressTarget},
    };

    fn soak(strategy: &str, fault_one_in: u64) -> EnduranceOutcome {
        let target = StressTarget::simulated(strategy, 256 * MIB);
        let test = EnduranceTest { target, threads: 4, streams: 3, sizes: BlockSizes::MIXED, seed: 1 };
        let until = StopCondition { blocks: Some(1), over: &|| false };
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

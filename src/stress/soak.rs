//! A long mixed program in memory that is nearly full, on a driver that fails now and then.
//!
//! One strategy lives through all of it: programs follow each other, the same blocks are filled and compared as for
//! [`Integrity`](super::Integrity), and its contract is watched as well. Any driver call may fail, at random; whoever is
//! told so makes the call again. What is reported is what was held: how full memory was, how much of it lay idle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    Failure, Mixture, Outcome, Sizes, Subject, SubjectError, Tally, Until,
    integrity::{Keeper, open, story},
    trial::{on_trial, panicked},
};
use crate::{
    base::Bytes,
    device::{
        Device, DeviceError,
        wrap::{DriverAnswer, DriverCall, InterceptedDevice, Interceptor},
    },
    models::SeededRandom,
    strategy::{Usage, wrap::Checked},
};

/// The name of this kind of stress.
const KIND: &str = "soak";
/// Share of the memory that the program would like to have: more than there is, so that what fits is what a strategy
/// makes of it. Requests that fail are gone, and are counted.
const WANTED_PERCENT: u64 = 150;
/// Share of the memory that blocks would like to have which outlive steps.
const LASTING_PERCENT: u64 = 130;
/// No block is larger than this part of the memory: at this occupancy most would find no place.
const LARGEST_PART: u64 = 64;
/// Blocks of one program, those that outlive its steps left out.
const STORY_BLOCKS: u64 = 1_500;
/// How often a call is made that fails.
const TRIES: u32 = 16;

/// What to do to a strategy.
#[derive(Clone, Debug)]
pub struct Soak {
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
    /// One driver call in so many fails; 0 for none.
    pub fault_one_in: u64,
}

/// How full memory was, looked at whenever a step asked for more. Bytes asked for, as the strategy's books have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Levels {
    /// How often it was looked at.
    pub samples: u64,
    /// Requested bytes in blocks at least.
    pub requested_min_bytes: u64,
    /// At most.
    pub requested_max_bytes: u64,
    /// In the mean.
    pub requested_mean_bytes: u64,
    /// Reserved bytes at most.
    pub reserved_max_bytes: u64,
    /// Parts of a million of what was reserved that lay idle, in the mean.
    pub idle_mean_ppm: u64,
    /// At most.
    pub idle_max_ppm: u64,
}

impl Levels {
    /// Looks once more.
    pub(super) fn look_at(&mut self, usage: &Usage) {
        let idle = usage.reserved.saturating_sub(usage.active);
        let idle_ppm = (u128::from(idle) * 1_000_000 / u128::from(usage.reserved.max(1))) as u64;
        self.absorb(&Levels {
            samples: 1,
            requested_min_bytes: usage.requested,
            requested_max_bytes: usage.requested,
            requested_mean_bytes: usage.requested,
            reserved_max_bytes: usage.reserved,
            idle_mean_ppm: idle_ppm,
            idle_max_ppm: idle_ppm,
        });
    }

    /// Adds what was seen elsewhere.
    pub fn absorb(&mut self, other: &Levels) {
        let samples = self.samples + other.samples;
        if samples == 0 || other.samples == 0 {
            return;
        }
        let mean = |mine: u64, others: u64| {
            let sum = u128::from(mine) * u128::from(self.samples) + u128::from(others) * u128::from(other.samples);
            (sum / u128::from(samples)) as u64
        };
        *self = Levels {
            samples,
            requested_min_bytes: match self.samples {
                0 => other.requested_min_bytes,
                _ => self.requested_min_bytes.min(other.requested_min_bytes),
            },
            requested_max_bytes: self.requested_max_bytes.max(other.requested_max_bytes),
            requested_mean_bytes: mean(self.requested_mean_bytes, other.requested_mean_bytes),
            reserved_max_bytes: self.reserved_max_bytes.max(other.reserved_max_bytes),
            idle_mean_ppm: mean(self.idle_mean_ppm, other.idle_mean_ppm),
            idle_max_ppm: self.idle_max_ppm.max(other.idle_max_ppm),
        };
    }
}

impl Soak {
    /// Puts the strategy under stress until it is enough; `progress` is told the numbers now and then.
    pub fn run(&self, until: &Until<'_>, progress: &mut dyn FnMut(&Tally)) -> Result<Outcome, SubjectError> {
        let (strategy, device) = match open(&self.subject)? {
            Ok(opened) => opened,
            Err(reason) => return Ok(Outcome::skipped(reason)),
        };
        let begin = Instant::now();
        let injected = Arc::new(AtomicU64::new(0));
        let faults = RandomFaults {
            dice: SeededRandom::new(self.seed, "soak faults"),
            one_in: self.fault_one_in,
            injected: Arc::clone(&injected),
        };
        let device: Box<dyn Device> = Box::new(InterceptedDevice::new(device, faults));
        let mut keeper = Keeper::new(Checked::new(strategy), device, if self.fault_one_in == 0 { 1 } else { TRIES });
        let mut count = |keeper: &mut Keeper<_>| {
            let checked: &Checked<_> = &keeper.strategy;
            keeper.tally.violations = checked.violation_count();
            keeper.tally.faults = injected.load(Ordering::Relaxed);
            keeper.tally.wall_ns = begin.elapsed().as_nanos() as u64;
            progress(&keeper.tally);
        };
        let played = on_trial(|| {
            let mut number = 0;
            while !until.is_reached(&keeper.tally) && keeper.damaged.is_empty() && keeper.tally.violations == 0 {
                let trace = story(&self.mixture(), self.seed.wrapping_add(number), STORY_BLOCKS);
                keeper.play(&trace, until.over)?;
                count(&mut keeper);
                number += 1;
            }
            keeper.clear()?;
            keeper.close()?;
            count(&mut keeper);
            Ok(())
        });
        let mut outcome = Outcome { tally: keeper.tally.clone(), levels: keeper.levels, ..Outcome::default() };
        let held = keeper.device.held_bytes();
        let broken = keeper.damaged.first().map(ToString::to_string);
        let broken = broken.or_else(|| keeper.strategy.violations().first().map(ToString::to_string));
        let broken = broken.or_else(|| match played {
            Ok(Ok(())) => (held > 0).then(|| format!("after a close the device still holds {}", Bytes(held))),
            Ok(Err::<(), crate::strategy::StrategyError>(error)) => {
                outcome.lost_context = error.loses_context();
                Some(error.to_string())
            }
            Err(payload) => Some(panicked(&*payload)),
        });
        outcome.failures.extend(broken.map(|detail| self.failure(detail)));
        Ok(outcome)
    }

    fn mixture(&self) -> Mixture {
        let memory = self.subject.memory_bytes.unwrap_or(u64::MAX);
        Mixture {
            threads: self.threads,
            streams: self.streams,
            sizes: self.sizes.up_to(memory / LARGEST_PART),
            live_bytes: memory / 100 * WANTED_PERCENT,
            lasting_bytes: memory / 100 * LASTING_PERCENT,
            replaced_one_in: 12,
        }
    }

    /// A soak is too long to be a trace. The seed repeats it on the simulated device.
    fn failure(&self, detail: String) -> Failure {
        Failure {
            found_by: KIND,
            strategy: self.subject.strategy.to_string(),
            detail,
            trace: None,
            conditions: vec![format!("--fault-one-in {}", self.fault_one_in)],
        }
    }
}

/// Lets any driver call fail at random: for want of memory where it asks for some, for no reason otherwise.
struct RandomFaults {
    dice: SeededRandom,
    one_in: u64,
    injected: Arc<AtomicU64>,
}

impl Interceptor for RandomFaults {
    fn before<D: Device + ?Sized>(&mut self, call: &DriverCall, _: &D) -> Result<(), DeviceError> {
        if self.one_in == 0 || self.dice.between(1, self.one_in) > 1 {
            return Ok(());
        }
        self.injected.fetch_add(1, Ordering::Relaxed);
        Err(match call.requested_bytes() {
            0 => DeviceError::Driver { call: call.kind(), name: "CUDA_ERROR_UNKNOWN".to_owned() },
            requested => DeviceError::OutOfMemory { call: call.kind(), requested },
        })
    }

    fn after<D: Device + ?Sized>(&mut self, _: &DriverCall, _: &mut DriverAnswer, _: &D) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, strategy::STRATEGIES};

    fn soak(strategy: &str, fault_one_in: u64) -> Outcome {
        let subject =
            Subject { strategy: strategy.into(), device: "sim".parse().unwrap(), memory_bytes: Some(256 * MIB) };
        let soak = Soak { subject, threads: 4, streams: 3, sizes: Sizes::MIXED, seed: 1, fault_one_in };
        let until = Until { blocks: Some(1), over: &|| false };
        soak.run(&until, &mut |_| {}).unwrap()
    }

    #[test]
    fn every_strategy_holds_what_it_should_on_a_driver_that_fails() {
        for entry in STRATEGIES.iter().filter(|entry| entry.name != "null") {
            let outcome = soak(entry.name, 200);
            assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
            assert!(outcome.tally.faults > 10, "{}: {:?}", entry.name, outcome.tally);
            assert!(outcome.tally.blocks > 100, "{}: {:?}", entry.name, outcome.tally);
        }
    }

    #[test]
    fn memory_is_nearly_full_for_a_strategy_that_wastes_little() {
        let outcome = soak("caching:expandable_segments:True", 0);
        let levels = outcome.levels;
        assert_eq!(outcome.tally.faults, 0);
        assert!(levels.requested_mean_bytes > 230 * MIB, "{levels:?}");
        assert!(levels.requested_min_bytes <= levels.requested_mean_bytes);
        assert!(levels.requested_mean_bytes <= levels.requested_max_bytes);
        assert!(levels.requested_max_bytes <= levels.reserved_max_bytes && levels.reserved_max_bytes <= 256 * MIB);
    }

    #[test]
    fn levels_add_up_to_what_all_samples_say() {
        let usage = |requested, reserved| Usage { requested, allocated: requested, active: requested, reserved };
        let mut all = Levels::default();
        for sample in [usage(10, 20), usage(30, 30), usage(20, 40)] {
            all.look_at(&sample);
        }
        assert_eq!((all.samples, all.requested_min_bytes, all.requested_max_bytes), (3, 10, 30));
        assert_eq!((all.requested_mean_bytes, all.reserved_max_bytes, all.idle_max_ppm), (20, 40, 500_000));
    }
}

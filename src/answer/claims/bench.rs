//! The replays that tests of claims make.

use std::sync::atomic::AtomicBool;

use crate::{
    answer::{
        leaks::{self, GrowthThreshold, ObservedSteps, judge},
        threshold::{LargestQuestion, ThresholdQuestion, largest, overhead, threshold},
        trial::{self, SIMULATED_STEPS, STEPS_FOR_MEMORY, TrialError},
    },
    base::Nanos,
    device::DeviceSpec,
    measure::{CaseDetail, CaseRecord, Status},
    models::Recipe,
    replay::Replay,
    strategy::StrategySpec,
    trace::Trace,
};

pub(super) use crate::answer::trial::{CACHING, EXPANDABLE};

/// On a real device steps vary.
const REAL_STEPS: u64 = 8;

/// The model of which PyTorch's times and peaks are known.
pub(super) const MODEL: &str = "reference-gpt-406m";

/// The result of a test, or of a part of it.
pub(super) type ClaimResult<T> = Result<T, TrialError>;

/// The device to replay on, and the simulated one for searches.
#[derive(Clone, Copy)]
pub(super) struct ClaimBench<'a> {
    pub(super) device: &'a DeviceSpec,
    pub(super) simulated: &'a DeviceSpec,
    pub(super) stop: &'a AtomicBool,
}

/// The default seed of the commands, so that their numbers are the same.
const SEED: u64 = 1;

/// A recipe with some parameters set. Empty values are skipped.
pub(super) fn recipe(name: &str, set: &[(&str, &str)]) -> ClaimResult<Recipe> {
    let recipe = Recipe::named(name).map_err(Box::new)?.seed(SEED);
    Ok(set.iter().filter(|(_, text)| !text.is_empty()).fold(recipe, |recipe, (key, text)| recipe.with(key, text)))
}

/// Three training steps of a model, for its peaks.
pub(super) fn model(name: &str, techniques: &str) -> ClaimResult<Recipe> {
    recipe(name, &[("steps", STEPS_FOR_MEMORY), ("techniques", techniques)])
}

impl ClaimBench<'_> {
    /// The memory of a program under PyTorch's allocator, without a limit.
    pub(super) fn memory(&self, recipe: &Recipe) -> ClaimResult<CaseRecord> {
        Ok(self.replayed(recipe, CACHING, None)?.0)
    }

    /// The most that a program has allocated under PyTorch's allocator, without a limit.
    pub(super) fn peak(&self, recipe: &Recipe) -> ClaimResult<u64> {
        Ok(self.memory(recipe)?.peak_allocated_bytes.unwrap_or(0))
    }

    /// The same as [`ClaimBench::memory`] under any strategy, with at most `limit` bytes of the device.
    pub(super) fn replayed(
        &self,
        recipe: &Recipe,
        strategy: &str,
        limit: Option<u64>,
    ) -> ClaimResult<(CaseRecord, CaseDetail)> {
        self.replayed_on(self.device, recipe, strategy, limit)
    }

    /// The same on any device.
    pub(super) fn replayed_on(
        &self,
        device: &DeviceSpec,
        recipe: &Recipe,
        strategy: &str,
        limit: Option<u64>,
    ) -> ClaimResult<(CaseRecord, CaseDetail)> {
        let workload = recipe.workload().map_err(Box::new)?;
        let (record, detail) = trial::replay_memory(&workload, strategy, device, limit, self.stop)?;
        match record.status {
            Status::Error => Err(TrialError::Broken { workload: record.workload, reason: record.reason }),
            Status::Interrupted => Err(TrialError::Interrupted),
            Status::Completed | Status::Oom | Status::Skipped => Ok((record, detail)),
        }
    }

    /// The median step under PyTorch's allocator; `None` where memory runs out.
    pub(super) fn step(&self, recipe: &Recipe) -> ClaimResult<Option<Nanos>> {
        self.step_on(self.device, recipe)
    }

    /// The same on any device.
    pub(super) fn step_on(&self, device: &DeviceSpec, recipe: &Recipe) -> ClaimResult<Option<Nanos>> {
        let steps = if device.is_simulated() { SIMULATED_STEPS } else { REAL_STEPS };
        let (times, replayed) = trial::time_recipe(recipe, steps, device, None, self.stop)?;
        if replayed.interrupted {
            return Err(TrialError::Interrupted);
        }
        Ok(times.median().filter(|_| replayed.ooms == 0))
    }

    /// How memory develops over the steps of a program.
    pub(super) fn growth(
        &self,
        recipe: &Recipe,
        strategy: &str,
        limit: Option<u64>,
    ) -> ClaimResult<(ObservedSteps, leaks::Finding)> {
        let workload = recipe.workload().map_err(Box::new)?;
        let replay = Replay::new(&workload)
            .strategy(strategy)
            .device(self.device.clone())
            .limit(limit)
            .options(trial::without_work(self.stop));
        let observed = ObservedSteps::of_replay(&replay, None)?;
        let mut finding = judge(&observed, None, &GrowthThreshold::default())?;
        finding.growers = observed.growers(&workload, finding.first_step)?;
        Ok((observed, finding))
    }

    /// The largest batch with which a program completes on a card with this memory; 0 where none does. Searched on the
    /// simulated device.
    pub(super) fn largest_batch(&self, recipe: &Recipe, memory_bytes: u64) -> ClaimResult<u64> {
        let strategy = StrategySpec::from(CACHING);
        let question = LargestQuestion {
            repeat: 1,
            around: 0,
            guess: recipe.count("batch"),
            stop: Some(self.stop),
            ..LargestQuestion::new(recipe, "batch", memory_bytes, &strategy, self.simulated)
        };
        Ok(largest(&question)?.largest.unwrap_or(0))
    }

    /// The least memory in which a program completes. Searched on the simulated device.
    pub(super) fn smallest_memory(&self, recipe: &Recipe, strategy: &str) -> ClaimResult<Option<u64>> {
        let trace = Trace::read(&recipe.workload().map_err(Box::new)?)?;
        let strategy = StrategySpec::from(strategy);
        let question = ThresholdQuestion {
            repeat: 1,
            around: 0,
            stop: Some(self.stop),
            ..ThresholdQuestion::new(&trace, &strategy, self.simulated)
        };
        Ok(threshold(&question)?.needed_bytes)
    }

    /// The memory that the driver's context and the libraries take.
    pub(super) fn overhead(&self) -> ClaimResult<u64> {
        Ok(overhead(self.simulated)?)
    }

    /// The memory that a card leaves for the allocator.
    pub(super) fn available_on(&self, card_bytes: u64) -> ClaimResult<u64> {
        Ok(card_bytes.saturating_sub(self.overhead()?))
    }
}

//! The replays that tests of claims make, and what PyTorch was measured to do.

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

// The measurements below are of PyTorch 2.11.0+cu130 on one NVIDIA H200 with CUDA 13.0, one run each. Byte counts are reproducible;
// times vary by some percent from run to run.

/// One run of a training program.
#[derive(Clone, Copy, Debug)]
pub(super) struct PytorchRun {
    /// The peak of `memory_allocated`.
    pub(super) peak_allocated: u64,
    /// The median step in milliseconds.
    pub(super) step_ms: f64,
}

const fn run(peak_allocated: u64, step_ms: f64) -> PytorchRun {
    PytorchRun { peak_allocated, step_ms }
}

/// The reference GPT, 24 layers x 1024, batch 8 x 1024 tokens, single precision, AdamW; then with one thing changed.
pub(super) mod gpt_355m {
    use super::{PytorchRun, run};

    pub(crate) const BASE: PytorchRun = run(19_630_711_808, 424.42);
    pub(crate) const AMP: PytorchRun = run(15_471_859_200, 83.757);
    pub(crate) const CHECKPOINTING: PytorchRun = run(10_757_661_696, 510.714);
    pub(crate) const HALF_BATCH: PytorchRun = run(12_289_467_392, 223.023);
    pub(crate) const ACCUMULATION: PytorchRun = run(10_240_525_312, 476.695);
    pub(crate) const OFFLOADING: PytorchRun = run(9_884_124_160, 1144.54);
    pub(crate) const EMPTY_CACHE: PytorchRun = run(19_630_711_808, 434.757);
    pub(crate) const ZERO_FILL: PytorchRun = run(21_255_857_152, 427.404);
    pub(crate) const IN_PLACE: PytorchRun = run(19_630_711_808, 432.057);
}

/// ResNet-50 on 64 images of 224 x 224.
pub(super) mod resnet_50 {
    use super::{PytorchRun, run};
    use crate::base::MIB;

    pub(crate) const BASE: PytorchRun = run(5_961_803_776, 34.848);
    pub(crate) const AMP: PytorchRun = run(3_317_150_208, 29.917);
    /// Peaks by whether ReLU writes over its input, and with `cudnn.benchmark`; read in MiB.
    pub(crate) const IN_PLACE: u64 = 5_482 * MIB;
    pub(crate) const SEPARATE: u64 = 5_483 * MIB;
    pub(crate) const AUTOTUNED: u64 = 10_413 * MIB;
}

/// The reference GPT with 12 layers x 768: what every step adds to `memory_allocated` from the second step on, batch 2.
pub(super) mod growth {
    pub(crate) const OUTPUTS: f64 = 1_331_871_744.0;
    pub(crate) const OUTPUTS_DETACHED: f64 = 411_705_344.0;
    pub(crate) const OUTPUTS_ON_CPU: f64 = 0.0;
    pub(crate) const VALIDATION_OUTPUTS: f64 = 1_331_871_744.0;
    pub(crate) const VALIDATION_OUTPUTS_NO_GRAD: f64 = 411_705_344.0;
    pub(crate) const RETAINED_LOSS: f64 = 1_331_872_768.0;
    pub(crate) const NO_ZERO_GRAD: f64 = 0.0;
    /// Changes by 1.5 MiB up and down from step to step.
    pub(crate) const RETAINED_REBOUND: f64 = 0.0;
    pub(crate) const RETAINED_TWICE: f64 = 0.0;
}

/// Peaks of `memory_allocated` and `memory_reserved` in validation, batch 2, with and without a graph.
pub(super) const VALIDATION_WITH_GRAPH: u64 = 3_352_094_720;
pub(super) const VALIDATION_NO_GRAD: u64 = 1_524_361_216;

/// The recording `varlen`: random sequence lengths, batch 4, 24 steps: peaks of allocated and reserved memory. Its lengths
/// are drawn by PyTorch, so it is another program than the workload `variable-length`.
pub(super) const VARIABLE_LENGTH_ALLOCATED: u64 = 6_304_151_552;
pub(super) const VARIABLE_LENGTH_RESERVED: u64 = 9_397_338_112;
/// The same run under a cap of 7,055 MB, more than it allocates at the peak, ended in an OOM (with `expandable_segments` it
/// did not).
pub(super) const DIES_WITH_MORE_THAN_ITS_BLOCKS: bool = true;

/// Requests and frees in six steps of the 12-layer GPT at batch 8, gradients dropped and zeroed: entries `alloc` and
/// `free_requested` of the recordings `train_base` and `train_zero_fill`.
pub(super) const SET_TO_NONE_CALLS: u64 = 9_880;
pub(super) const ZERO_FILL_CALLS: u64 = 9_731;

/// The most bytes in circular references over eight steps with 64 MiB each.
pub(super) const GARBAGE_PENDING: u64 = 2_299_138_560 - 2_030_703_104;

/// An allocation and its free of 512 B: through PyTorch's allocator; `cuMemAlloc` and `cuMemFree` themselves.
pub(super) const CACHED_PAIR_NS: u64 = 371;
pub(super) const DRIVER_PAIR_NS: u64 = 44_080 + 36_692;

/// `del` of a 256 MiB tensor brought `memory_allocated` from 256 MiB to 0 at once; `memory_reserved` stayed until
/// `empty_cache`.
pub(super) const DEL_LEAVES_IT_ALLOCATED: bool = false;

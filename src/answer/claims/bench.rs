//! Where claims are put to the test: replays of workloads, and the few questions that tests ask of them.

use std::{collections::BTreeMap, sync::atomic::AtomicBool};

use super::ClaimError;
use crate::{
    answer::{
        leaks::{self, Bar, Observed, judge},
        threshold::{LargestQuestion, ThresholdError, ThresholdQuestion, largest, overhead, threshold},
    },
    base::Nanos,
    device::{Device, DeviceSpec, default_limit, wrap::capped},
    measure::{CaseDetail, CaseLabel, CaseRecord, Status, measure, time_steps},
    models::Recipe,
    replay::{self, Replay},
    strategy::{Context, Setup, Silent, StrategySpec},
    trace::{Op, Source, Trace},
};

/// PyTorch's allocator as it is without settings.
pub(super) const CACHING: &str = "caching";
/// The same with segments that grow.
pub(super) const EXPANDABLE: &str = "caching:expandable_segments:True";

/// Three steps show the highest memory of a training loop: optimizer states and gradients are there from the second on.
const STEPS_FOR_MEMORY: &str = "3";
/// Two steps of warm-up and two that count on a virtual clock, where all are alike.
const SIMULATED_STEPS: &str = "4";
/// More of them where they vary.
const REAL_STEPS: &str = "8";

/// What a test may end with.
pub(super) type ClaimResult<T> = Result<T, ClaimError>;

/// A device to replay on, and the simulated one for what takes many replays.
#[derive(Clone, Copy)]
pub(super) struct Bench<'a> {
    pub(super) device: &'a DeviceSpec,
    pub(super) simulated: &'a DeviceSpec,
    pub(super) stop: &'a AtomicBool,
}

/// The seed that commands take where nobody names another, so that theirs are the same numbers.
const SEED: u64 = 1;

/// A recipe with some parameters set; an empty list of techniques is none.
pub(super) fn recipe(name: &str, set: &[(&str, &str)]) -> ClaimResult<Recipe> {
    let recipe = Recipe::named(name).map_err(Box::new)?.seed(SEED);
    Ok(set.iter().filter(|(_, text)| !text.is_empty()).fold(recipe, |recipe, (key, text)| recipe.with(key, text)))
}

/// A model in training, for its peaks: three steps.
pub(super) fn model(name: &str, techniques: &str) -> ClaimResult<Recipe> {
    recipe(name, &[("steps", STEPS_FOR_MEMORY), ("techniques", techniques)])
}

/// Memory and time of one program.
pub(super) struct Costs {
    pub(super) peak_allocated: u64,
    pub(super) step: Option<Nanos>,
}

impl Bench<'_> {
    /// What a program holds under PyTorch's allocator with the whole device.
    pub(super) fn memory(&self, recipe: &Recipe) -> ClaimResult<CaseRecord> {
        Ok(self.replayed(recipe, CACHING, None)?.0)
    }

    /// The same under any strategy, with at most `limit` bytes of the device. Work is left out: what programs of one
    /// stream hold does not depend on when it ends.
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
        let spec = StrategySpec::from(strategy);
        let mut device = limited(device.open()?, limit);
        let mut built = spec.build(&Setup { props: device.props(), limit })?;
        let label =
            CaseLabel { workload: workload.name().to_owned(), strategy: spec.to_string(), ..CaseLabel::default() };
        let (record, detail) = measure(&label, &workload, &mut *built, &mut *device, &self.options());
        match record.status {
            Status::Error => Err(ClaimError::Broken { workload: record.workload, reason: record.reason }),
            Status::Interrupted => Err(ClaimError::Interrupted),
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
        let workload = recipe.clone().with("steps", steps).workload().map_err(Box::new)?;
        let mut device = device.open()?;
        let mut strategy = StrategySpec::from(CACHING).build(&Setup { props: device.props(), limit: None })?;
        let options = replay::ReplayOptions { stop: Some(self.stop), ..replay::ReplayOptions::default() };
        let timed = time_steps(&workload, &mut *strategy, &mut *device, &options);
        strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
        let (times, replayed) = timed?;
        if replayed.interrupted {
            return Err(ClaimError::Interrupted);
        }
        Ok(times.median().filter(|_| replayed.ooms == 0))
    }

    /// Both.
    pub(super) fn costs(&self, recipe: &Recipe) -> ClaimResult<Costs> {
        Ok(Costs { peak_allocated: self.memory(recipe)?.peak_allocated_bytes, step: self.step(recipe)? })
    }

    /// What memory does over the steps of a program.
    pub(super) fn growth(
        &self,
        recipe: &Recipe,
        strategy: &str,
        limit: Option<u64>,
    ) -> ClaimResult<(Observed, leaks::Finding)> {
        let workload = recipe.workload().map_err(Box::new)?;
        let replay =
            Replay::new(&workload).strategy(strategy).device(self.device.clone()).limit(limit).options(self.options());
        let observed = Observed::of_replay(&replay, None)?;
        let mut finding = judge(&observed, None, &Bar::default())?;
        finding.growers = observed.growers(&workload, finding.first_step)?;
        Ok((observed, finding))
    }

    /// The largest batch with which a program completes in a card of so much memory; 0 where none does. Searched on the
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
        Ok(largest(&question).map_err(interrupted)?.largest.unwrap_or(0))
    }

    /// The smallest memory in which a program completes. Searched on the simulated device.
    pub(super) fn smallest_memory(&self, recipe: &Recipe, strategy: &str) -> ClaimResult<Option<u64>> {
        let trace = Trace::read(&recipe.workload().map_err(Box::new)?)?;
        let strategy = StrategySpec::from(strategy);
        let question = ThresholdQuestion {
            repeat: 1,
            around: 0,
            stop: Some(self.stop),
            ..ThresholdQuestion::new(&trace, &strategy, self.simulated)
        };
        Ok(threshold(&question).map_err(interrupted)?.threshold_bytes)
    }

    /// What the driver's context and the libraries take of a card.
    pub(super) fn overhead(&self) -> ClaimResult<u64> {
        Ok(overhead(self.simulated)?)
    }

    /// What a card of so much memory leaves for the allocator.
    pub(super) fn room_in(&self, card_bytes: u64) -> ClaimResult<u64> {
        Ok(card_bytes.saturating_sub(self.overhead()?))
    }

    fn options(&self) -> replay::ReplayOptions<'_> {
        replay::ReplayOptions { without_work: true, stop: Some(self.stop), ..replay::ReplayOptions::default() }
    }
}

/// A device of which at most so much may be held; a real one is never used up.
fn limited(device: Box<dyn Device>, limit: Option<u64>) -> Box<dyn Device> {
    let limit = limit.or_else(|| default_limit(&*device));
    capped(device, limit)
}

/// Who stops a search is told so, and not that there is an error.
fn interrupted(error: ThresholdError) -> ClaimError {
    match error {
        ThresholdError::Interrupted => ClaimError::Interrupted,
        other => other.into(),
    }
}

/// The most pinned host memory that a program holds at one time.
pub(super) fn pinned_peak(recipe: &Recipe) -> ClaimResult<u64> {
    let trace = Trace::read(&recipe.workload().map_err(Box::new)?)?;
    let (mut live, mut peak, mut sizes) = (0, 0, BTreeMap::new());
    for event in &trace.events {
        match event.op {
            Op::HostAlloc { slot, bytes, .. } => {
                sizes.insert(slot, bytes);
                live += bytes;
                peak = peak.max(live);
            }
            Op::HostFree { slot, .. } => live -= sizes.remove(&slot).unwrap_or(0),
            _ => {}
        }
    }
    Ok(peak)
}

//! One model with one technique: its memory under three allocators, its steps' times, and what fits in which card.

use std::sync::atomic::AtomicBool;

use super::{Fit, Technique, TechniqueError, TechniqueRecord, exchange, guess::MemoryByBatch};
use crate::{
    answer::threshold::{LargestQuestion, largest},
    base::{Bytes, GIB, Nanos},
    device::{DeviceSpec, default_limit, wrap::capped},
    measure::{CaseLabel, CaseRecord, SCHEMA, Status, StepTimes, measure, time_steps},
    models::{Recipe, Workload},
    replay,
    strategy::{Context, Setup, Silent, StrategySpec},
    trace::Source,
};

/// Cards that people have.
pub const CARDS: [u64; 6] = [8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB, 80 * GIB, 141 * GIB];

const CACHING: &str = "caching";
const EXPANDABLE: &str = "caching:expandable_segments:True";
const ASYNC: &str = "async";

/// In the second step optimizer states and gradients are there from the start; the third shows what stays.
const STEPS_FOR_MEMORY: &str = "3";
/// Steps to be timed, on a virtual clock on which all are alike.
const SIMULATED_STEPS: u64 = 4;
/// Steps to be timed on a real device, the warm-up included: the most where they are short, the fewest where they are long.
const REAL_STEPS: std::ops::RangeInclusive<u64> = 5..=8;
/// How long the steps of a trial should take on a real device.
const REAL_TIME: Nanos = Nanos(3_000_000_000);
/// Larger batches are not looked for: throughput does not grow any more.
const MOST_BATCH: u64 = 4096;

/// What every trial shares.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    /// Where memory and times are measured.
    pub(super) device: &'a DeviceSpec,
    /// Where everything else is worked out.
    pub(super) simulated: &'a DeviceSpec,
    pub(super) link_bytes_per_second: u64,
    pub(super) stop: &'a AtomicBool,
}

/// A row, and the times behind it.
#[derive(Clone)]
pub(super) struct Trial {
    pub(super) record: TechniqueRecord,
    pub(super) times: StepTimes,
}

impl Stage<'_> {
    /// Measures memory and time. What does not work is in the record.
    pub(super) fn measure(&self, model: &Recipe, technique: &Technique) -> Result<Trial, TechniqueError> {
        let mut record = TechniqueRecord {
            schema: SCHEMA,
            model: model.name().to_owned(),
            technique: technique.id.to_owned(),
            title: technique.title.to_owned(),
            device: self.device.to_string(),
            batch: technique.batch(model),
            published_memory: technique.published.map_or("", |said| said.memory).to_owned(),
            published_performance: technique.published.map_or("", |said| said.performance).to_owned(),
            best_use: technique.best_use.to_owned(),
            ..TechniqueRecord::default()
        };
        let recipe = technique.applied_to(model);
        let workload = match recipe.clone().with("steps", STEPS_FOR_MEMORY).workload() {
            Ok(workload) => workload,
            Err(refusal) => {
                record.status = Status::Skipped;
                record.reason = refusal.to_string();
                return Ok(Trial { record, times: StepTimes::default() });
            }
        };
        let caching = self.memory(&workload, CACHING, self.device)?;
        record.clock = caching.clock;
        record.status = caching.status;
        record.reason.clone_from(&caching.reason);
        let mut times = StepTimes::default();
        if caching.status == Status::Completed {
            note_memory(&mut record, &caching);
            let expandable = self.memory(&workload, EXPANDABLE, self.device)?;
            let pool = self.memory(&workload, ASYNC, self.device)?;
            record.expandable_peak_reserved_bytes = Some(expandable.peak_reserved_bytes);
            record.expandable_peak_device_used_bytes = expandable.peak_device_used_bytes;
            record.async_peak_reserved_bytes = Some(pool.peak_reserved_bytes);
            record.async_peak_device_used_bytes = pool.peak_device_used_bytes;
            times = self.times(&recipe, self.device, None)?;
            record.step_ns = times.median().map(|step| step.0);
        } else if caching.status == Status::Oom {
            record.reason =
                format!("does not fit: {} allocated when memory ran out", Bytes(caching.peak_allocated_bytes));
        }
        record.exchanged_bytes_per_step = exchange::bytes_per_step(&workload)?;
        record.modelled_exchange_ns = exchange::time(record.exchanged_bytes_per_step, self.link_bytes_per_second).0;
        Ok(Trial { record, times })
    }

    /// The largest batch that fits in each card, and its speed.
    pub(super) fn largest_batches(
        &self,
        model: &Recipe,
        technique: &Technique,
        cards: &[u64],
        record: &TechniqueRecord,
    ) -> Result<Vec<Fit>, TechniqueError> {
        let recipe = technique.applied_to(model).with("steps", STEPS_FOR_MEMORY);
        let (strategy, exchange_ns) = (StrategySpec::from(CACHING), record.modelled_exchange_ns);
        let step = technique.batch_step();
        // The same guess whatever other cards are asked for: where memory does not grow evenly, the answer depends on it.
        let known = match cards.is_empty() {
            true => MemoryByBatch::default(),
            false => self.two_batches(&recipe, u64::from(step), record)?,
        };
        let mut overhead = 0;
        if let (Some(used), Some(reserved)) = (record.peak_device_used_bytes, record.peak_reserved_bytes) {
            overhead = used.saturating_sub(reserved);
        }
        let mut fits = Vec::with_capacity(cards.len());
        for &memory_bytes in cards {
            let question = LargestQuestion {
                step,
                repeat: 1,
                around: 0,
                guess: known.guess(memory_bytes.saturating_sub(overhead)),
                stop: Some(self.stop),
                ..LargestQuestion::new(&recipe, "batch", memory_bytes, &strategy, self.simulated)
            };
            let found = largest(&question)?;
            let batch = found.largest.unwrap_or(0).min(MOST_BATCH);
            let mut per_second = None;
            if batch > 0 {
                let roomy = self.simulated.with_room_for(memory_bytes);
                let step = self.times(&recipe.clone().with("batch", &batch.to_string()), &roomy, None)?.median();
                per_second = step.map(|step| per_second_of(batch, step, exchange_ns));
            }
            fits.push(Fit { memory_bytes, batch, per_second });
        }
        Ok(fits)
    }

    /// Sequences a second on the device itself with the batch that was found for a card, given no more memory than the
    /// card has.
    pub(super) fn confirm(
        &self,
        model: &Recipe,
        technique: &Technique,
        fit: &Fit,
        record: &TechniqueRecord,
    ) -> Result<Option<f64>, TechniqueError> {
        let recipe = technique.applied_to(model).with("batch", &fit.batch.to_string());
        let step = self.times(&recipe, self.device, Some(fit.memory_bytes))?.median();
        Ok(step.map(|step| per_second_of(fit.batch, step, record.modelled_exchange_ns)))
    }

    /// What the batch that was measured takes, and one more; nothing where not even that one fits.
    fn two_batches(
        &self,
        recipe: &Recipe,
        step: u64,
        record: &TechniqueRecord,
    ) -> Result<MemoryByBatch, TechniqueError> {
        let mut known = MemoryByBatch::default();
        if let Some(bytes) = record.peak_reserved_bytes {
            let other = if record.batch > step { step } else { 2 * step };
            let workload = recipe.clone().with("batch", &other.to_string()).workload().map_err(Box::new)?;
            let small = self.memory(&workload, CACHING, self.simulated)?;
            known.note(other, small.peak_reserved_bytes);
            known.note(record.batch, bytes);
        }
        Ok(known)
    }

    /// The row of a replay that asks for memory and runs nothing: what is held does not depend on when work ends, in
    /// programs of one stream.
    fn memory(&self, workload: &Workload, strategy: &str, on: &DeviceSpec) -> Result<CaseRecord, TechniqueError> {
        let spec = StrategySpec::from(strategy);
        let device = on.open()?;
        let limit = default_limit(&*device);
        let mut device = capped(device, limit);
        let mut built = spec.build(&Setup { props: device.props(), limit: None })?;
        let label =
            CaseLabel { workload: workload.name().to_owned(), strategy: spec.to_string(), ..CaseLabel::default() };
        let options =
            replay::ReplayOptions { without_work: true, stop: Some(self.stop), ..replay::ReplayOptions::default() };
        Ok(measure(&label, workload, &mut *built, &mut *device, &options).0)
    }

    /// How long steps take under `caching`, with the whole device or with what a card of so much memory leaves; there are
    /// none where memory runs out.
    fn times(&self, recipe: &Recipe, on: &DeviceSpec, card_bytes: Option<u64>) -> Result<StepTimes, TechniqueError> {
        let steps = if on.is_simulated() { SIMULATED_STEPS } else { self.real_steps(recipe)? };
        let workload = recipe.clone().with("steps", &steps.to_string()).workload().map_err(Box::new)?;
        let device = on.open()?;
        let limit = card_bytes.map(|bytes| bytes.saturating_sub(device.overhead_bytes()));
        let mut device = capped(device, limit);
        let mut strategy = StrategySpec::from(CACHING).build(&Setup { props: device.props(), limit: None })?;
        let options = replay::ReplayOptions { stop: Some(self.stop), ..replay::ReplayOptions::default() };
        let timed = time_steps(&workload, &mut *strategy, &mut *device, &options);
        strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
        let (times, replayed) = timed?;
        // Steps that ran out of memory, or were cut short, say nothing about steps.
        Ok(if replayed.ooms > 0 || replayed.interrupted { StepTimes::default() } else { times })
    }

    /// How many steps are timed on a real device, from how long one is on the simulated one.
    fn real_steps(&self, recipe: &Recipe) -> Result<u64, TechniqueError> {
        let roomy = self.simulated.with_room_for(CARDS[CARDS.len() - 1]);
        let step = self.times(recipe, &roomy, None)?.median().unwrap_or(REAL_TIME);
        Ok((REAL_TIME.0 / step.0.max(1)).clamp(*REAL_STEPS.start(), *REAL_STEPS.end()))
    }
}

fn per_second_of(batch: u64, Nanos(step): Nanos, exchange_ns: u64) -> f64 {
    batch as f64 * 1e9 / (step + exchange_ns) as f64
}

fn note_memory(record: &mut TechniqueRecord, caching: &CaseRecord) {
    record.peak_allocated_bytes = Some(caching.peak_allocated_bytes);
    record.peak_reserved_bytes = Some(caching.peak_reserved_bytes);
    record.peak_device_used_bytes = caching.peak_device_used_bytes;
    record.at_peak_parameter_bytes = caching.at_peak_parameter_bytes;
    record.at_peak_gradient_bytes = caching.at_peak_gradient_bytes;
    record.at_peak_optimizer_bytes = caching.at_peak_optimizer_bytes;
    record.at_peak_activation_bytes = caching.at_peak_activation_bytes;
    record.at_peak_temporary_bytes = caching.at_peak_temporary_bytes;
    record.at_peak_workspace_bytes = caching.at_peak_workspace_bytes;
    record.at_peak_other_bytes = caching.at_peak_input_bytes + caching.at_peak_unknown_bytes;
}

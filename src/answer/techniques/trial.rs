//! One model with one technique: its memory under three allocators, the times of its steps, and the largest batch per
//! card.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{AppliedTechnique, CardFit, Technique, TechniqueRecord, TechniquesQuestion, base_settings};
use crate::{
    answer::{
        threshold::{LargestQuestion, largest},
        trial::{
            CACHING, EXPANDABLE, SIMULATED_STEPS, STEPS_FOR_MEMORY, TrialError, exchange_time,
            exchanged_bytes_per_step, replay_memory, time_recipe,
        },
    },
    base::{Bytes, GIB, Nanos},
    device::DeviceSpec,
    measure::{CaseRecord, SCHEMA, Status, StepTimes},
    models::{Recipe, Workload},
    strategy::StrategySpec,
};

/// The memory of common cards.
pub const CARDS: [u64; 6] = [8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB, 80 * GIB, 141 * GIB];

/// Timed steps on a real device, the warm-up included: the most where they are short, the fewest where they are long.
const REAL_STEPS: std::ops::RangeInclusive<u64> = 5..=8;
/// The time that the steps of a trial should take on a real device.
const REAL_TIME: Nanos = Nanos(3_000_000_000);
/// No larger batches are searched: throughput no longer grows.
const MOST_BATCH: u64 = 4096;

/// A row, and the times behind it.
#[derive(Clone)]
pub(super) struct TechniqueTrial {
    pub(super) record: TechniqueRecord,
    pub(super) times: StepTimes,
    /// What was measured; `None` where the technique does not apply.
    pub(super) applied: Option<AppliedTechnique>,
}

impl TechniquesQuestion {
    /// Measures memory and time. A technique that does not apply is noted in the record.
    pub(super) fn measure(&self, model: &Recipe, technique: &Technique) -> Result<TechniqueTrial, TrialError> {
        let base = base_settings(model);
        let has_own_base = technique.is_base() && !base.is_empty();
        let mut record = TechniqueRecord {
            schema: SCHEMA,
            model: model.name.clone(),
            technique: technique.id.to_owned(),
            title: if has_own_base { format!("Base: {base}") } else { technique.title.to_owned() },
            base_settings: base,
            device: self.device.to_string(),
            batch: technique.batch(model),
            published_memory: technique.published.map_or("", |said| said.memory).to_owned(),
            published_performance: technique.published.map_or("", |said| said.performance).to_owned(),
            best_use: technique.best_use.to_owned(),
            ..TechniqueRecord::default()
        };
        let applied = match technique.applied_to(model) {
            Ok(applied) => applied,
            Err(refusal) => {
                record.status = Status::Skipped;
                record.reason = refusal.to_string();
                return Ok(TechniqueTrial { record, times: StepTimes::default(), applied: None });
            }
        };
        record.numerics = Some(applied.numerics);
        let workload = applied.recipe.clone().with("steps", STEPS_FOR_MEMORY).workload().map_err(Box::new)?;
        let caching = self.memory(&workload, CACHING, &self.device)?;
        record.clock = caching.clock;
        record.status = caching.status;
        record.reason.clone_from(&caching.reason);
        let mut times = StepTimes::default();
        if caching.status == Status::Completed {
            note_memory(&mut record, &caching);
            let expandable = self.memory(&workload, EXPANDABLE, &self.device)?;
            let pool = self.memory(&workload, "async", &self.device)?;
            record.expandable_peak_reserved_bytes = expandable.peak_reserved_bytes;
            record.expandable_peak_device_used_bytes = expandable.peak_device_used_bytes;
            record.async_peak_reserved_bytes = pool.peak_reserved_bytes;
            record.async_peak_device_used_bytes = pool.peak_device_used_bytes;
            times = self.times(&applied.recipe, &self.device, None)?;
            record.step_ns = times.median().map(|step| step.0);
        } else if caching.status == Status::Oom {
            let allocated = Bytes(caching.peak_allocated_bytes.unwrap_or(0));
            record.reason = format!("does not fit: {allocated} allocated when memory ran out");
        }
        let exchanged = exchanged_bytes_per_step(&workload)?;
        record.exchanged_bytes_per_step = Some(exchanged);
        record.modelled_exchange_ns = Some(exchange_time(exchanged, self.link_bytes_per_second).0);
        Ok(TechniqueTrial { record, times, applied: Some(applied) })
    }

    /// The largest batch that fits on each card, and its speed.
    pub(super) fn largest_batches(
        &self,
        applied: &AppliedTechnique,
        record: &TechniqueRecord,
    ) -> Result<Vec<CardFit>, TrialError> {
        let recipe = applied.recipe.clone().with("steps", STEPS_FOR_MEMORY);
        let (strategy, exchange_ns) = (StrategySpec::from(CACHING), record.modelled_exchange_ns.unwrap_or(0));
        let step = applied.batch_step;
        // The same guess for any list of cards: where memory does not grow evenly, the answer depends on it.
        let known = match record.peak_reserved_bytes {
            Some(reserved) if !self.cards.is_empty() => {
                Some(self.two_batches(&recipe, u64::from(step), (record.batch, reserved))?)
            }
            _ => None,
        };
        let used_and_reserved = record.peak_device_used_bytes.zip(record.peak_reserved_bytes);
        let overhead = used_and_reserved.map_or(0, |(used, reserved)| used.saturating_sub(reserved));
        let mut fits = Vec::with_capacity(self.cards.len());
        for &memory_bytes in &self.cards {
            let question = LargestQuestion {
                step,
                repeat: 1,
                around: 0,
                guess: known.and_then(|known| batch_with_memory(known, memory_bytes.saturating_sub(overhead))),
                stop: Some(&*self.stop),
                ..LargestQuestion::new(&recipe, "batch", memory_bytes, &strategy, &self.simulated)
            };
            let found = largest(&question)?;
            let batch = found.largest.unwrap_or(0).min(MOST_BATCH);
            let mut per_second = None;
            if batch > 0 {
                let roomy = self.simulated.with_room_for(memory_bytes);
                let step = self.times(&recipe.clone().with("batch", &batch.to_string()), &roomy, None)?.median();
                per_second = step.map(|step| per_second_of(batch, step, exchange_ns));
            }
            fits.push(CardFit { memory_bytes, batch, per_second });
        }
        Ok(fits)
    }

    /// Sequences per second on the device itself with the batch that was found for a card, limited to the memory of the
    /// card.
    pub(super) fn confirmed(
        &self,
        applied: &AppliedTechnique,
        fit: &CardFit,
        record: &TechniqueRecord,
    ) -> Result<Option<f64>, TrialError> {
        let recipe = applied.recipe.clone().with("batch", &fit.batch.to_string());
        let step = self.times(&recipe, &self.device, Some(fit.memory_bytes))?.median();
        Ok(step.map(|step| per_second_of(fit.batch, step, record.modelled_exchange_ns.unwrap_or(0))))
    }

    /// Batch and memory of another batch and of the measured one.
    fn two_batches(&self, recipe: &Recipe, step: u64, measured: (u64, u64)) -> Result<[(u64, u64); 2], TrialError> {
        let other = if measured.0 > step { step } else { 2 * step };
        let workload = recipe.clone().with("batch", &other.to_string()).workload().map_err(Box::new)?;
        let reserved = self.memory(&workload, CACHING, &self.simulated)?.peak_reserved_bytes;
        Ok([(other, reserved.unwrap_or(0)), measured])
    }

    fn memory(&self, workload: &Workload, strategy: &str, on: &DeviceSpec) -> Result<CaseRecord, TrialError> {
        Ok(replay_memory(workload, strategy, on, None, &self.stop)?.0)
    }

    /// Step times under `caching`, on the whole device or on a card with this memory; none where memory runs out.
    fn times(&self, recipe: &Recipe, on: &DeviceSpec, card_bytes: Option<u64>) -> Result<StepTimes, TrialError> {
        let steps = if on.is_simulated() { SIMULATED_STEPS } else { self.real_steps(recipe)? };
        let (times, replayed) = time_recipe(recipe, steps, on, card_bytes, &self.stop)?;
        // After an OOM or an interruption the times mean nothing.
        Ok(if replayed.ooms > 0 || replayed.interrupted { StepTimes::default() } else { times })
    }

    /// The number of timed steps on a real device, from the time of a step on the simulated one.
    fn real_steps(&self, recipe: &Recipe) -> Result<u64, TrialError> {
        let roomy = self.simulated.with_room_for(CARDS[CARDS.len() - 1]);
        let step = self.times(recipe, &roomy, None)?.median().unwrap_or(REAL_TIME);
        Ok((REAL_TIME.0 / step.0.max(1)).clamp(*REAL_STEPS.start(), *REAL_STEPS.end()))
    }
}

fn per_second_of(batch: u64, Nanos(step): Nanos, exchange_ns: u64) -> f64 {
    batch as f64 * 1e9 / (step + exchange_ns) as f64
}

fn note_memory(record: &mut TechniqueRecord, caching: &CaseRecord) {
    record.peak_allocated_bytes = caching.peak_allocated_bytes;
    record.peak_reserved_bytes = caching.peak_reserved_bytes;
    record.peak_device_used_bytes = caching.peak_device_used_bytes;
    record.at_peak_parameter_bytes = caching.at_peak_parameter_bytes;
    record.at_peak_gradient_bytes = caching.at_peak_gradient_bytes;
    record.at_peak_optimizer_bytes = caching.at_peak_optimizer_bytes;
    let activations = [caching.at_peak_activation_bytes, caching.at_peak_logits_bytes];
    record.at_peak_activation_bytes = activations.into_iter().sum();
    record.at_peak_temporary_bytes = caching.at_peak_temporary_bytes;
    record.at_peak_workspace_bytes = caching.at_peak_workspace_bytes;
    let others = [caching.at_peak_input_bytes, caching.at_peak_cache_bytes, caching.at_peak_unknown_bytes];
    record.at_peak_other_bytes = others.into_iter().sum();
}

/// The batch that takes about `bytes`, on the line through two batches whose memory is known; `None` where it does not
/// rise. Memory grows almost evenly with the batch, so this guess saves most of a search.
fn batch_with_memory([(first, first_bytes), (second, second_bytes)]: [(u64, u64); 2], bytes: u64) -> Option<u64> {
    let per_sequence = (second_bytes as f64 - first_bytes as f64) / (second as f64 - first as f64);
    let batch = second as f64 + (bytes as f64 - second_bytes as f64) / per_sequence;
    (per_sequence > 0.0).then_some(batch.max(1.0) as u64)
}

/// Bootstrap resamplings.
const RESAMPLINGS: usize = 1000;
/// A fixed seed: the table must not change from run to run.
const SEED: u64 = 7;

/// A ratio and the interval that contains 95 % of the resamplings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MedianRatio {
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// The ratio of the medians; `None` without samples or where the base takes no time.
pub(super) fn ratio_of_medians(times: &[Nanos], base: &[Nanos]) -> Option<MedianRatio> {
    let ratio = |times: &[Nanos], base: &[Nanos]| {
        let base = median(base)?;
        (base > 0.0).then_some(median(times)? / base)
    };
    let value = ratio(times, base)?;
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mut drawn: Vec<f64> =
        (0..RESAMPLINGS).filter_map(|_| ratio(&resampled(times, &mut random), &resampled(base, &mut random))).collect();
    drawn.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| drawn.get((drawn.len() as f64 * share) as usize).copied();
    Some(MedianRatio { value, low: at(0.025)?.min(value), high: at(0.975)?.max(value) })
}

fn resampled(times: &[Nanos], random: &mut impl Rng) -> Vec<Nanos> {
    (0..times.len()).map(|_| times[random.random_range(0..times.len())]).collect()
}

fn median(times: &[Nanos]) -> Option<f64> {
    let mut sorted: Vec<u64> = times.iter().map(|time| time.0).collect();
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle] as f64),
        _ => Some((sorted[middle - 1] as f64 + sorted[middle] as f64) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(times: &[u64]) -> Vec<Nanos> {
        times.iter().copied().map(Nanos).collect()
    }

    #[test]
    fn constant_times_have_no_interval() {
        let ratio = ratio_of_medians(&nanos(&[30, 30, 30]), &nanos(&[20, 20])).unwrap();
        assert_eq!(ratio, MedianRatio { value: 1.5, low: 1.5, high: 1.5 });
    }

    #[test]
    fn varying_times_have_an_interval() {
        let ratio = ratio_of_medians(&nanos(&[95, 100, 105, 110, 90]), &nanos(&[50, 52, 48, 51, 49])).unwrap();
        assert!(ratio.low < ratio.value && ratio.value < ratio.high, "{ratio:?}");
        assert!((1.7..2.0).contains(&ratio.low) && (2.0..2.3).contains(&ratio.high), "{ratio:?}");
    }

    #[test]
    fn no_samples_no_ratio() {
        assert_eq!(ratio_of_medians(&[], &nanos(&[1])), None);
        assert_eq!(ratio_of_medians(&nanos(&[1]), &[]), None);
        assert_eq!(ratio_of_medians(&nanos(&[1]), &nanos(&[0])), None);
    }

    #[test]
    fn guess_lies_on_the_line() {
        let guess = |bytes| batch_with_memory([(8, 900), (1, 200)], bytes);
        assert_eq!((guess(1000), guess(350), guess(0)), (Some(9), Some(2), Some(1)));
        assert_eq!(batch_with_memory([(8, 900), (1, 1100)], 2000), None, "a falling line gives no guess");
    }
}

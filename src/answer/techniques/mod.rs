//! The comparison table of memory-saving techniques: how much memory each saves, and what it costs in time.
//!
//! Every technique of the [catalogue](TECHNIQUES) is tried on every model: its memory under PyTorch's allocator, native
//! and with expandable segments, and under the driver's pool; the times of its steps; and the largest batch that fits on
//! cards of six sizes. A row adds its technique to what the model has; the base is the model alone. Memory and times are measured on the chosen device; the largest batches are computed on the
//! simulated one, whose times are calibrated.

mod advice;
mod catalogue;
mod record;
mod trial;

pub use advice::{AdvisedTechnique, NoAdvice, TechniqueAdvice, advise};
pub use catalogue::{AppliedTechnique, BASE, PublishedFigures, TECHNIQUES, Technique, TechniqueRefusal, base_settings};
pub use record::{CardFit, TechniqueRecord, TechniqueRow, row_id};
pub use trial::CARDS;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use trial::{TechniqueTrial, ratio_of_medians};

use super::trial::{TrialError, simulated_beside};
use crate::{
    base::parallel_for_each,
    device::{DeviceSpec, DeviceSpecError},
    measure::Status,
    models::Recipe,
};

/// The default rate at which ranks exchange data: NVLink of an H200, in one direction.
pub const LINK_BYTES_PER_SECOND: u64 = 450_000_000_000;

/// The question: which techniques on which models, measured where.
#[derive(Clone)]
pub struct TechniquesQuestion {
    /// The models.
    pub models: Vec<Recipe>,
    /// The techniques. The base is always measured.
    pub techniques: Vec<&'static Technique>,
    /// Where memory and times are measured.
    pub device: DeviceSpec,
    /// The simulated device, for the largest batches.
    pub simulated: DeviceSpec,
    /// The memory of the cards for which the largest batch is computed: [`CARDS`], or others.
    pub cards: Vec<u64>,
    /// The card whose largest batch is run on the device, too.
    pub confirm: Option<u64>,
    /// How fast ranks exchange data.
    pub link_bytes_per_second: u64,
    /// How many techniques are tried in parallel; on a real device they run one after the other.
    pub jobs: usize,
    /// Set from outside to end early.
    pub stop: Arc<AtomicBool>,
}

impl TechniquesQuestion {
    /// All techniques and [`CARDS`], one after the other.
    pub fn new(models: Vec<Recipe>, device: DeviceSpec) -> Result<TechniquesQuestion, DeviceSpecError> {
        Ok(TechniquesQuestion {
            models: with_own_names(models),
            techniques: TECHNIQUES.iter().collect(),
            simulated: simulated_beside(&device)?,
            device,
            cards: CARDS.to_vec(),
            confirm: None,
            link_bytes_per_second: LINK_BYTES_PER_SECOND,
            jobs: 1,
            stop: Arc::default(),
        })
    }
}

/// Models of one workload with different settings get names with their settings: a name is a part of a row's id.
fn with_own_names(models: Vec<Recipe>) -> Vec<Recipe> {
    let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let renamed = models.into_iter().map(|mut model| {
        if names.iter().filter(|name| **name == model.name).count() > 1 {
            model.name = model.title();
        }
        model
    });
    renamed.collect()
}

/// Tries every technique on every model that `is_wanted`. Calls `listener` with each row as soon as it is done, in any
/// order.
pub fn techniques(
    question: &TechniquesQuestion,
    is_wanted: impl Fn(&str, &str) -> bool + Sync,
    mut listener: impl FnMut(TechniqueRow),
) -> Result<(), TrialError> {
    let jobs = if question.device.is_simulated() { question.jobs } else { 1 };
    for model in &question.models {
        let mut wanted = question.techniques.clone();
        wanted.retain(|technique| is_wanted(&model.name, technique.id));
        if wanted.is_empty() || question.stop.load(Ordering::Relaxed) {
            continue;
        }
        let base = question.measure(model, &TECHNIQUES[0])?;
        let work = |technique: &&Technique| row(question, model, technique, &base);
        parallel_for_each(&wanted, jobs, &question.stop, work, |_, row| {
            // An interrupted row is left for the next run.
            if !question.stop.load(Ordering::Relaxed) {
                listener(row?);
            }
            Ok::<(), TrialError>(())
        })?;
    }
    Ok(())
}

fn row(
    question: &TechniquesQuestion,
    model: &Recipe,
    technique: &Technique,
    base: &TechniqueTrial,
) -> Result<TechniqueRow, TrialError> {
    // The base was measured already; on a real device a second time would be the longest row of all.
    let TechniqueTrial { mut record, times, applied } =
        if technique.is_base() { base.clone() } else { question.measure(model, technique)? };
    record.compare_with(&base.record);
    if let Some(ratio) = ratio_of_medians(times.settled(), base.times.settled()) {
        record.step_ratio = Some(ratio.value);
        (record.step_ratio_low, record.step_ratio_high) = (Some(ratio.low), Some(ratio.high));
    }
    let mut fits = Vec::new();
    if let Some(applied) = applied.filter(|_| record.status != Status::Skipped) {
        fits = question.largest_batches(&applied, &record)?;
        fits.iter().for_each(|fit| record.note(fit));
        if !fits.is_empty() {
            record.per_second_gpu = question.simulated.device_name()?;
        }
        if let Some(fit) = fits.iter().find(|fit| Some(fit.memory_bytes) == question.confirm && fit.batch > 0) {
            record.confirmed_card_bytes = Some(fit.memory_bytes);
            record.confirmed_batch = Some(fit.batch);
            record.confirmed_simulated_per_second = fit.per_second;
            record.confirmed_per_second = question.confirmed(&applied, fit, &record)?;
        }
    }
    Ok(TechniqueRow { record, fits })
}

impl TechniqueRecord {
    fn compare_with(&mut self, base: &TechniqueRecord) {
        let reduction = |own: Option<u64>, base: Option<u64>| {
            let (own, base) = (own?, base.filter(|&bytes| bytes > 0)?);
            Some(1.0 - own as f64 / base as f64)
        };
        self.allocated_reduction_share = reduction(self.peak_allocated_bytes, base.peak_allocated_bytes);
        self.reserved_reduction_share = reduction(self.peak_reserved_bytes, base.peak_reserved_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(models: Vec<Recipe>, ids: &[&str]) -> Vec<TechniqueRecord> {
        let question = TechniquesQuestion {
            techniques: TECHNIQUES.iter().filter(|technique| ids.contains(&technique.id)).collect(),
            cards: Vec::new(),
            ..TechniquesQuestion::new(models, DeviceSpec::default()).unwrap()
        };
        let mut records = Vec::new();
        techniques(&question, |_, _| true, |row| records.push(row.record)).unwrap();
        records
    }

    fn model(techniques: &str) -> Recipe {
        let small = Recipe::named("reference-gpt-163m").unwrap().with("layers", "4").with("batch", "4");
        if techniques.is_empty() { small } else { small.with("techniques", techniques) }
    }

    #[test]
    fn rows_are_combined_with_the_base() {
        let ids = ["base", "tf32", "amp", "ckpt"];
        let [base, tf32, amp, ckpt] = records(vec![model("tf32")], &ids).try_into().unwrap();
        assert_eq!(
            (base.title.as_str(), ckpt.base_settings.as_str()),
            ("Base: tf32, layers=4, batch=4", "tf32, layers=4, batch=4")
        );
        assert_eq!((tf32.status, tf32.reason.as_str()), (Status::Skipped, "the base has it already"));
        assert!(amp.step_ns < base.step_ns, "autocast on top of tf32 is faster");
        // The combination as a base of its own.
        let [both] = records(vec![model("tf32,ckpt")], &["base"]).try_into().unwrap();
        assert_eq!((ckpt.step_ns, ckpt.peak_allocated_bytes), (both.step_ns, both.peak_allocated_bytes));
        let ratio = both.step_ns.unwrap() as f64 / base.step_ns.unwrap() as f64;
        assert!((ckpt.step_ratio.unwrap() / ratio - 1.0).abs() < 1e-6, "{:?}, not {ratio}", ckpt.step_ratio);
        assert!((1.05..1.5).contains(&ratio), "one more forward pass: {ratio}");
    }

    #[test]
    fn conflicts_are_said_in_the_row() {
        let rows = records(vec![model("amp")], &["base", "fp16", "bf16_model"]);
        let reasons: Vec<&str> = rows.iter().map(|row| row.reason.as_str()).collect();
        assert_eq!(reasons[0], "");
        assert_eq!(
            reasons[1],
            "workload 'reference-gpt-163m': 'amp' and 'fp16' contradict: only one of them can be set"
        );
        assert_eq!(rows[2].status, Status::Skipped);
        assert_eq!(rows[2].numerics, None);
    }

    #[test]
    fn micro_batches_of_the_base_divide_every_batch() {
        let question = TechniquesQuestion {
            techniques: TECHNIQUES.iter().filter(|technique| technique.id == "ckpt").collect(),
            cards: vec![CARDS[0]],
            ..TechniquesQuestion::new(vec![model("accum4")], DeviceSpec::default()).unwrap()
        };
        let mut rows = Vec::new();
        techniques(&question, |_, _| true, |row| rows.push(row)).unwrap();
        let batch = rows[0].record.largest_batch_8gib.unwrap();
        assert!(batch > 0 && batch.is_multiple_of(4), "{batch}");
        assert_eq!(rows[0].record.per_second_gpu, "NVIDIA H200 (simulated)");
    }

    #[test]
    fn models_of_one_workload_have_own_rows() {
        let rows = records(vec![model(""), model("tf32")], &["base"]);
        let models: Vec<&str> = rows.iter().map(|row| row.model.as_str()).collect();
        assert_eq!(
            models,
            ["reference-gpt-163m[layers=4;batch=4]", "reference-gpt-163m[layers=4;batch=4;techniques=tf32]"]
        );
        let other = Recipe::named("resnet-50").unwrap();
        let names = with_own_names(vec![model(""), other]);
        assert_eq!(
            names.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(),
            ["reference-gpt-163m", "resnet-50"]
        );
    }
}

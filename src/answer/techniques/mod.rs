//! The comparison table of memory-saving techniques: how much memory each saves, and what it costs in time.
//!
//! Every technique of the [catalogue](TECHNIQUES) is tried on every model: its memory under PyTorch's allocator, native
//! and with expandable segments, and under the driver's pool; the times of its steps; and the largest batch that fits on
//! cards of six sizes. Memory and times are measured on the chosen device; the largest batches are computed on the
//! simulated one, whose times are calibrated.

mod catalogue;
mod record;
mod trial;

pub use catalogue::{BASE, PublishedFigures, TECHNIQUES, Technique};
pub use record::{CardFit, TechniqueRecord, TechniqueRow, row_id};
pub use trial::CARDS;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use trial::{TechniqueTrial, ratio_of_medians};

use super::trial::{TrialError, simulated_beside};
use crate::{
    base::{GIB, parallel_for_each},
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
            models,
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
    let TechniqueTrial { mut record, times } =
        if technique.is_base() { base.clone() } else { question.measure(model, technique)? };
    record.compare_with(&base.record);
    if let Some(ratio) = ratio_of_medians(times.settled(), base.times.settled()) {
        record.step_ratio = Some(ratio.value);
        (record.step_ratio_low, record.step_ratio_high) = (Some(ratio.low), Some(ratio.high));
    }
    let mut fits = Vec::new();
    if record.status != Status::Skipped {
        fits = question.largest_batches(model, technique, &record)?;
        fits.iter().for_each(|fit| record.note(fit));
        if let Some(fit) = fits.iter().find(|fit| Some(fit.memory_bytes) == question.confirm && fit.batch > 0) {
            record.confirmed_memory_bytes = Some(fit.memory_bytes);
            record.confirmed_batch = Some(fit.batch);
            record.confirmed_simulated_per_second = fit.per_second;
            record.confirmed_per_second = question.confirmed(model, technique, fit, &record)?;
        }
    }
    Ok(TechniqueRow { record, fits })
}

impl TechniqueRecord {
    fn compare_with(&mut self, base: &TechniqueRecord) {
        let reduction = |own: Option<u64>, base: Option<u64>| {
            let (own, base) = (own?, base.filter(|&bytes| bytes > 0)?);
            Some(100.0 * (1.0 - own as f64 / base as f64))
        };
        self.reduction_percent = reduction(self.peak_allocated_bytes, base.peak_allocated_bytes);
        self.reserved_reduction_percent = reduction(self.peak_reserved_bytes, base.peak_reserved_bytes);
    }

    /// Notes the largest batch of a card. Sizes other than [`CARDS`] have no column.
    fn note(&mut self, fit: &CardFit) {
        if !CARDS.contains(&fit.memory_bytes) {
            return;
        }
        let (batch, per_second) = match fit.memory_bytes / GIB {
            8 => (&mut self.largest_batch_8gib, &mut self.per_second_8gib),
            12 => (&mut self.largest_batch_12gib, &mut self.per_second_12gib),
            16 => (&mut self.largest_batch_16gib, &mut self.per_second_16gib),
            24 => (&mut self.largest_batch_24gib, &mut self.per_second_24gib),
            80 => (&mut self.largest_batch_80gib, &mut self.per_second_80gib),
            _ => (&mut self.largest_batch_141gib, &mut self.per_second_141gib),
        };
        (*batch, *per_second) = (Some(fit.batch), fit.per_second);
    }
}

/// The recommended technique for a card.
#[derive(Clone, Debug, PartialEq)]
pub struct TechniqueAdvice<'a> {
    /// The row of the fastest combination that fits.
    pub best: &'a TechniqueRow,
    /// Its largest batch.
    pub fit: CardFit,
    /// The largest batch without any technique; `None` where not even one sequence fits.
    pub base: Option<CardFit>,
}

/// The technique with the most sequences per second on a card with `memory_bytes`; of equal ones the first, which is the
/// simplest. Techniques of several ranks are left out unless nothing else fits. `None` where nothing fits.
#[must_use]
pub fn advise(rows: &[TechniqueRow], memory_bytes: u64) -> Option<TechniqueAdvice<'_>> {
    let fit_of = |row: &TechniqueRow| {
        row.fits.iter().copied().find(|fit| fit.memory_bytes == memory_bytes && fit.per_second.is_some())
    };
    let fitting: Vec<(&TechniqueRow, CardFit)> = rows.iter().filter_map(|row| Some((row, fit_of(row)?))).collect();
    let fastest = |of_one_rank: bool| {
        fitting
            .iter()
            .filter(|(row, _)| !of_one_rank || row.record.exchanged_bytes_per_step == 0)
            // The first of equals: max_by would take the last.
            .rev()
            .max_by(|(_, a), (_, b)| a.per_second.unwrap_or(0.0).total_cmp(&b.per_second.unwrap_or(0.0)))
    };
    let &(best, fit) = fastest(true).or_else(|| fastest(false))?;
    let base = fitting.iter().find(|(row, _)| row.record.technique == BASE).map(|&(_, fit)| fit);
    Some(TechniqueAdvice { best, fit, base })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(technique: &str, batch: u64, per_second: f64, exchanged: u64) -> TechniqueRow {
        let record = TechniqueRecord {
            technique: technique.to_owned(),
            exchanged_bytes_per_step: exchanged,
            ..TechniqueRecord::default()
        };
        let per_second = (batch > 0).then_some(per_second);
        TechniqueRow { record, fits: vec![CardFit { memory_bytes: 24 * GIB, batch, per_second }] }
    }

    #[test]
    fn fastest_that_fits_is_recommended() {
        let rows = [row("base", 8, 20.0, 0), row("ckpt", 30, 16.0, 0), row("amp", 10, 90.0, 0), row("big", 0, 0.0, 0)];
        let advice = advise(&rows, 24 * GIB).unwrap();
        assert_eq!((advice.best.record.technique.as_str(), advice.fit.batch), ("amp", 10));
        assert_eq!(advice.base.map(|fit| fit.batch), Some(8));
        assert_eq!(advise(&rows, 80 * GIB), None);
    }

    #[test]
    fn several_ranks_only_if_nothing_else_fits() {
        let sharded = row("zero3", 4, 500.0, 1);
        let rows = [row("base", 0, 0.0, 0), sharded.clone(), row("offload", 1, 1.0, 0)];
        assert_eq!(advise(&rows, 24 * GIB).unwrap().best.record.technique, "offload");
        let rows = [row("base", 0, 0.0, 0), sharded];
        let advice = advise(&rows, 24 * GIB).unwrap();
        assert_eq!((advice.best.record.technique.as_str(), advice.base), ("zero3", None));
    }
}

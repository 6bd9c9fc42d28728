//! The comparison table of memory-saving techniques: how much memory each saves, and what it costs in time.
//!
//! Every technique of the [catalogue](TECHNIQUES) is tried on every model: its memory under PyTorch's allocator, native
//! and with expandable segments, and under the driver's pool; the time of its steps; and the largest batch that fits in
//! cards of six sizes. Memory and times are measured on the device that was asked for; what fits is worked out on the
//! simulated one, whose times are calibrated.

mod advice;
mod catalogue;
pub(in crate::answer) mod exchange;
mod guess;
mod ratio;
mod record;
mod trial;

pub use advice::{Advice, advise};
pub use catalogue::{BASE, Published, TECHNIQUES, Technique};
pub use record::{Fit, TechniqueRecord, TechniqueRow, row_id};
pub use trial::CARDS;

use std::sync::atomic::{AtomicBool, Ordering};

use trial::{Stage, Trial};

use super::threshold::ThresholdError;
use crate::{
    base::{GIB, parallel_for_each},
    device::{DeviceSpec, DeviceSpecError},
    measure::Status,
    models::{Recipe, WorkloadError},
    replay::ReplayError,
    strategy::{SpecError, StrategyError},
    trace::TraceError,
};

/// The rate at which ranks are taken to exchange data where nobody says otherwise: NVLink of an H200, one way.
pub const LINK_BYTES_PER_SECOND: u64 = 450_000_000_000;

/// What is asked.
#[derive(Clone, Copy)]
pub struct TechniquesQuestion<'a> {
    /// The models.
    pub models: &'a [Recipe],
    /// Which techniques; the base is measured whether it is among them or not.
    pub techniques: &'a [&'a Technique],
    /// Where memory and times are measured.
    pub device: &'a DeviceSpec,
    /// The simulated device that says what fits.
    pub simulated: &'a DeviceSpec,
    /// For cards of which memory it shall be worked out what fits: [`CARDS`], or others.
    pub cards: &'a [u64],
    /// The card whose largest batch is run on the device too.
    pub confirm: Option<u64>,
    /// How fast ranks exchange data.
    pub link_bytes_per_second: u64,
    /// How many techniques are tried side by side; on a real device they take turns.
    pub jobs: usize,
    /// Set from outside to end early.
    pub stop: &'a AtomicBool,
}

/// Why there is no row. That a model does not fit, or does not know a technique, is in its row.
#[derive(Debug, thiserror::Error)]
pub enum TechniqueError {
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// A strategy cannot be made.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A strategy gave up.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// A replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A workload cannot be made; boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
    /// The search for what fits broke.
    #[error(transparent)]
    Threshold(#[from] ThresholdError),
}

/// Tries every technique on every model that `is_wanted`, and tells `listener` of each row as soon as there is one, in no
/// particular order; each row comes with its place in the table.
pub fn techniques(
    question: &TechniquesQuestion<'_>,
    is_wanted: impl Fn(&str, &str) -> bool + Sync,
    mut listener: impl FnMut(usize, TechniqueRow),
) -> Result<(), TechniqueError> {
    let stage = Stage {
        device: question.device,
        simulated: question.simulated,
        link_bytes_per_second: question.link_bytes_per_second,
        stop: question.stop,
    };
    let jobs = if question.device.is_simulated() { question.jobs } else { 1 };
    for (number, model) in question.models.iter().enumerate() {
        let first_place = number * question.techniques.len();
        let wanted: Vec<(usize, &Technique)> = question
            .techniques
            .iter()
            .enumerate()
            .filter(|(_, technique)| is_wanted(model.name(), technique.id))
            .map(|(place, technique)| (first_place + place, *technique))
            .collect();
        if wanted.is_empty() || question.stop.load(Ordering::Relaxed) {
            continue;
        }
        let base = stage.measure(model, &TECHNIQUES[0])?;
        let work = |(_, technique): &(usize, &Technique)| row(&stage, model, technique, &base, question);
        parallel_for_each(&wanted, jobs, question.stop, work, |number, row| {
            // A row that was cut short is left for the next time.
            if !question.stop.load(Ordering::Relaxed) {
                listener(wanted[number].0, row?);
            }
            Ok::<(), TechniqueError>(())
        })?;
    }
    Ok(())
}

fn row(
    stage: &Stage<'_>,
    model: &Recipe,
    technique: &Technique,
    base: &Trial,
    question: &TechniquesQuestion<'_>,
) -> Result<TechniqueRow, TechniqueError> {
    // The base was measured for everyone: on a real device a second time would be the longest row of all.
    let Trial { mut record, times } =
        if technique.is_base() { base.clone() } else { stage.measure(model, technique)? };
    record.compare_with(&base.record);
    if let Some(ratio) = ratio::of_medians(times.settled(), base.times.settled()) {
        record.step_ratio = Some(ratio.value);
        (record.step_ratio_low, record.step_ratio_high) = (Some(ratio.low), Some(ratio.high));
    }
    let mut fits = Vec::new();
    if record.status != Status::Skipped {
        fits = stage.largest_batches(model, technique, question.cards, &record)?;
        fits.iter().for_each(|fit| record.note(fit));
        if let Some(fit) = fits.iter().find(|fit| Some(fit.memory_bytes) == question.confirm && fit.batch > 0) {
            record.confirmed_memory_bytes = Some(fit.memory_bytes);
            record.confirmed_batch = Some(fit.batch);
            record.confirmed_simulated_per_second = fit.per_second;
            record.confirmed_per_second = stage.confirm(model, technique, fit, &record)?;
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

    /// Cards of other sizes than [`CARDS`] have no column.
    fn note(&mut self, fit: &Fit) {
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

    /// Whether there is anything to compare.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.status == Status::Completed
    }
}

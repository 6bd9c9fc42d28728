//! The row of the comparison table.

use serde::{Deserialize, Serialize};

use super::CARDS;
use crate::{
    base::GIB,
    device::DeviceClock,
    measure::{SCHEMA, Status, digits},
    models::NumericEffect,
};

/// The id of the row of a model and a technique.
#[must_use]
pub fn row_id(model: &str, technique: &str) -> String {
    format!("{model}/{technique}")
}

/// One model with one technique: a row of `techniques.csv`. A cell is empty where the value is unknown or does not apply.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TechniqueRecord {
    /// [`SCHEMA`](crate::measure::SCHEMA).
    pub schema: u32,
    /// The recipe.
    pub model: String,
    /// [`Technique::id`](super::Technique::id).
    pub technique: String,
    /// [`Technique::title`](super::Technique::title).
    pub title: String,
    /// What the base of the model has, separated by commas: techniques and parameters beyond the workload's file. Every row
    /// has them, too. Empty for the file as it is.
    pub base_settings: String,
    /// What the technique does to the numbers of the base's training.
    pub numerics: Option<NumericEffect>,
    /// Where memory and times were measured.
    pub device: String,
    /// The clock of the times.
    pub clock: Option<DeviceClock>,
    /// How it ended under `caching`.
    pub status: Status,
    /// Why, where it did not complete.
    pub reason: String,
    /// Sequences, or images, of a step.
    pub batch: u64,

    /// Most bytes in blocks at one time, under `caching`.
    pub peak_allocated_bytes: Option<u64>,
    /// Most bytes taken from the device under `caching`.
    pub peak_reserved_bytes: Option<u64>,
    /// Most bytes that `nvidia-smi` would have shown under `caching`.
    pub peak_device_used_bytes: Option<u64>,
    /// The same with expandable segments.
    pub expandable_peak_reserved_bytes: Option<u64>,
    /// The same with expandable segments.
    pub expandable_peak_device_used_bytes: Option<u64>,
    /// The same with the driver's stream-ordered pool.
    pub async_peak_reserved_bytes: Option<u64>,
    /// The same with the driver's stream-ordered pool.
    pub async_peak_device_used_bytes: Option<u64>,
    /// Of the allocated peak: weights.
    pub at_peak_parameter_bytes: Option<u64>,
    /// Of the allocated peak: gradients.
    pub at_peak_gradient_bytes: Option<u64>,
    /// Of the allocated peak: the optimizer's states.
    pub at_peak_optimizer_bytes: Option<u64>,
    /// Of the allocated peak: activations.
    pub at_peak_activation_bytes: Option<u64>,
    /// Of the allocated peak: temporaries.
    pub at_peak_temporary_bytes: Option<u64>,
    /// Of the allocated peak: workspaces.
    pub at_peak_workspace_bytes: Option<u64>,
    /// Of the allocated peak: inputs and everything else.
    pub at_peak_other_bytes: Option<u64>,
    /// How much less than the base's its allocated peak is, as a share of it.
    #[serde(alias = "reduction_percent", serialize_with = "digits::optional")]
    pub allocated_reduction_share: Option<f64>,
    /// The same of its reserved peak.
    #[serde(alias = "reserved_reduction_percent", serialize_with = "digits::optional")]
    pub reserved_reduction_share: Option<f64>,

    /// The median step, the exchange between ranks left out.
    pub step_ns: Option<u64>,
    /// How many times the base's step that is.
    #[serde(serialize_with = "digits::optional")]
    pub step_ratio: Option<f64>,
    /// In 95 of 100 resamplings of both the ratio is not below this.
    #[serde(serialize_with = "digits::optional")]
    pub step_ratio_low: Option<f64>,
    /// ... and not above this.
    #[serde(serialize_with = "digits::optional")]
    pub step_ratio_high: Option<f64>,
    /// What a rank sends in a step.
    pub exchanged_bytes_per_step: Option<u64>,
    /// How long the link would take for it: modelled, never measured, and nothing else runs meanwhile.
    pub modelled_exchange_ns: Option<u64>,

    /// The largest batch that fits in 8 GiB, by simulation; 0 where not even one sequence does.
    pub largest_batch_8gib: Option<u64>,
    /// Sequences per second with that batch, by simulation, the exchange included: the speed of `per_second_gpu` with that
    /// memory.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_8gib: Option<f64>,
    /// The same in 12 GiB.
    pub largest_batch_12gib: Option<u64>,
    /// The same in 12 GiB.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_12gib: Option<f64>,
    /// The same in 16 GiB.
    pub largest_batch_16gib: Option<u64>,
    /// The same in 16 GiB.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_16gib: Option<f64>,
    /// The same in 24 GiB.
    pub largest_batch_24gib: Option<u64>,
    /// The same in 24 GiB.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_24gib: Option<f64>,
    /// The same in 80 GiB.
    pub largest_batch_80gib: Option<u64>,
    /// The same in 80 GiB.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_80gib: Option<f64>,
    /// The same in 141 GiB.
    pub largest_batch_141gib: Option<u64>,
    /// The same in 141 GiB.
    #[serde(serialize_with = "digits::optional")]
    pub per_second_141gib: Option<f64>,
    /// The GPU whose speed the columns `per_second_*` show. Cards of those sizes have other speeds.
    pub per_second_gpu: String,
    /// The memory of the card whose largest batch was run on the device, too.
    #[serde(alias = "confirmed_memory_bytes")]
    pub confirmed_card_bytes: Option<u64>,
    /// That batch.
    pub confirmed_batch: Option<u64>,
    /// Its speed by simulation.
    #[serde(serialize_with = "digits::optional")]
    pub confirmed_simulated_per_second: Option<f64>,
    /// Sequences per second with that batch on the device, limited to the memory of the card; the exchange included.
    /// Empty where it does not fit after all.
    #[serde(serialize_with = "digits::optional")]
    pub confirmed_per_second: Option<f64>,

    /// What is published: memory.
    pub published_memory: String,
    /// What is published: performance.
    pub published_performance: String,
    /// When to use it.
    pub best_use: String,

    /// The commit of the program that measured the row; set by run folders.
    pub commit: String,
    /// The device on which the row was measured, as it calls itself; set by run folders.
    pub device_name: String,
    /// When the process that measured the row began; set by run folders, and not on a simulated device.
    pub run_started: String,
}

impl TechniqueRecord {
    /// The row of schema 1 as one of [`SCHEMA`]: reductions were in percent, and a technique that did not run had 0 bytes
    /// in every category.
    #[must_use]
    pub fn upgraded(mut self) -> TechniqueRecord {
        self.schema = SCHEMA;
        for reduction in [&mut self.allocated_reduction_share, &mut self.reserved_reduction_share] {
            *reduction = reduction.map(|percent| percent / 100.0);
        }
        if self.peak_allocated_bytes.is_none() {
            for bytes in [
                &mut self.at_peak_parameter_bytes,
                &mut self.at_peak_gradient_bytes,
                &mut self.at_peak_optimizer_bytes,
                &mut self.at_peak_activation_bytes,
                &mut self.at_peak_temporary_bytes,
                &mut self.at_peak_workspace_bytes,
                &mut self.at_peak_other_bytes,
            ] {
                *bytes = None;
            }
        }
        if self.status == Status::Skipped {
            (self.exchanged_bytes_per_step, self.modelled_exchange_ns) = (None, None);
        }
        self
    }
}

/// The largest batch on a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardFit {
    /// The memory of the card.
    pub memory_bytes: u64,
    /// The largest batch; 0 where not even one sequence fits.
    pub batch: u64,
    /// Sequences per second with it.
    pub per_second: Option<f64>,
}

/// A row with the largest batch per card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TechniqueRow {
    /// The row of the table.
    pub record: TechniqueRecord,
    /// In the order of the cards in the question.
    pub fits: Vec<CardFit>,
}

impl From<TechniqueRecord> for TechniqueRow {
    /// A row that was read from a file: it has the fits of [`CARDS`].
    fn from(record: TechniqueRecord) -> TechniqueRow {
        let fit = |memory_bytes| {
            let (batch, per_second) = record.columns_of(memory_bytes)?;
            Some(CardFit { memory_bytes, batch: batch?, per_second })
        };
        TechniqueRow { fits: CARDS.into_iter().filter_map(fit).collect(), record }
    }
}

impl TechniqueRecord {
    /// Notes the largest batch of a card. Sizes other than [`CARDS`] have no column.
    pub(super) fn note(&mut self, fit: &CardFit) {
        if let Some((batch, per_second)) = self.columns_of_mut(fit.memory_bytes) {
            (*batch, *per_second) = (Some(fit.batch), fit.per_second);
        }
    }

    /// Largest batch and speed on a card.
    fn columns_of(&self, memory_bytes: u64) -> Option<(Option<u64>, Option<f64>)> {
        self.clone().columns_of_mut(memory_bytes).map(|(batch, per_second)| (*batch, *per_second))
    }

    fn columns_of_mut(&mut self, memory_bytes: u64) -> Option<(&mut Option<u64>, &mut Option<f64>)> {
        if !CARDS.contains(&memory_bytes) {
            return None;
        }
        Some(match memory_bytes / GIB {
            8 => (&mut self.largest_batch_8gib, &mut self.per_second_8gib),
            12 => (&mut self.largest_batch_12gib, &mut self.per_second_12gib),
            16 => (&mut self.largest_batch_16gib, &mut self.per_second_16gib),
            24 => (&mut self.largest_batch_24gib, &mut self.per_second_24gib),
            80 => (&mut self.largest_batch_80gib, &mut self.per_second_80gib),
            _ => (&mut self.largest_batch_141gib, &mut self.per_second_141gib),
        })
    }
}

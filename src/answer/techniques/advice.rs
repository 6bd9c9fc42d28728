//! Which technique to use on a card.

use super::{BASE, CardFit, TechniqueRow};
use crate::{answer::trial::DISTINCT, measure::Status, models::NumericEffect};

/// The techniques to use on a card: first the one that leaves the training as it is, as far as one fits.
#[derive(Clone, Debug, PartialEq)]
pub struct TechniqueAdvice<'a> {
    /// The recommendation: of those that fit, it has the weakest effect on numbers.
    pub first: AdvisedTechnique<'a>,
    /// Faster ones, or ones with the whole batch of the model where those before have a smaller one. Each has a stronger
    /// effect on numbers than those before it.
    pub others: Vec<AdvisedTechnique<'a>>,
    /// The largest batch of the base; `None` where not even one sequence fits.
    pub base: Option<CardFit>,
    /// The batch of the model.
    pub batch: u64,
}

/// A technique that fits on the card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdvisedTechnique<'a> {
    /// Its row.
    pub row: &'a TechniqueRow,
    /// Its largest batch.
    pub fit: CardFit,
}

impl AdvisedTechnique<'_> {
    /// What it does to the numbers of the base's training. Where that is unknown, the worst is assumed.
    #[must_use]
    pub fn numerics(&self) -> NumericEffect {
        self.row.record.numerics.unwrap_or(NumericEffect::Training)
    }

    fn rate(&self) -> f64 {
        self.fit.per_second.unwrap_or(0.0)
    }

    fn is_distinctly_faster_than(&self, other: &AdvisedTechnique<'_>) -> bool {
        self.rate() > other.rate() * DISTINCT
    }
}

/// Why there is no recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAdvice {
    /// Not even one sequence fits with any technique.
    NothingFits,
    /// The largest batch was not computed for this card.
    NotComputed,
}

/// Recommends techniques for a card with `memory_bytes`. The order is: the weaker effect on numbers, the whole batch of the
/// model, speed. Speeds that differ by less than the accuracy of simulated times are equal; then the first row counts,
/// which is the simplest. Techniques of several ranks are left out unless nothing else fits.
pub fn advise(rows: &[TechniqueRow], memory_bytes: u64) -> Result<TechniqueAdvice<'_>, NoAdvice> {
    let fit_of = |row: &TechniqueRow| row.fits.iter().copied().find(|fit| fit.memory_bytes == memory_bytes);
    let is_open = |row: &TechniqueRow| row.record.status != Status::Skipped && fit_of(row).is_none();
    let fitting = |row| fit_of(row).filter(|fit| fit.per_second.is_some()).map(|fit| AdvisedTechnique { row, fit });
    let fitting: Vec<AdvisedTechnique<'_>> = rows.iter().filter_map(fitting).collect();
    let of_one_rank = |advised: &&AdvisedTechnique<'_>| advised.row.record.exchanged_bytes_per_step.unwrap_or(0) == 0;
    let mut usable: Vec<AdvisedTechnique<'_>> = fitting.iter().filter(of_one_rank).copied().collect();
    if usable.is_empty() {
        usable.clone_from(&fitting);
    }
    if usable.is_empty() {
        return Err(if rows.iter().any(is_open) { NoAdvice::NotComputed } else { NoAdvice::NothingFits });
    }
    let base_row = rows.iter().find(|row| row.record.technique == BASE);
    let batch = base_row.map_or(1, |row| row.record.batch);
    let mut advised: Vec<AdvisedTechnique<'_>> = Vec::new();
    for numerics in [NumericEffect::Same, NumericEffect::Rounding, NumericEffect::Training] {
        let of_effect: Vec<AdvisedTechnique<'_>> =
            usable.iter().filter(|advised| advised.numerics() == numerics).copied().collect();
        let Some(found) = best_of(&of_effect, batch) else { continue };
        let is_better = |other: &AdvisedTechnique<'_>| {
            found.is_distinctly_faster_than(other) || (other.fit.batch < batch && found.fit.batch >= batch)
        };
        if advised.iter().all(is_better) {
            advised.push(found);
        }
    }
    let base = base_row.and_then(fit_of).filter(|fit| fit.batch > 0);
    let first = advised.remove(0);
    Ok(TechniqueAdvice { first, others: advised, base, batch })
}

/// The best of techniques with the same effect on numbers.
fn best_of<'a>(techniques: &[AdvisedTechnique<'a>], batch: u64) -> Option<AdvisedTechnique<'a>> {
    let whole: Vec<AdvisedTechnique<'a>> =
        techniques.iter().filter(|advised| advised.fit.batch >= batch).copied().collect();
    let pool = if whole.is_empty() { techniques } else { whole.as_slice() };
    let fastest = pool.iter().max_by(|a, b| a.rate().total_cmp(&b.rate()))?;
    pool.iter().find(|advised| !fastest.is_distinctly_faster_than(advised)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{answer::techniques::TechniqueRecord, base::GIB};

    const SAME: NumericEffect = NumericEffect::Same;
    const ROUNDING: NumericEffect = NumericEffect::Rounding;
    const TRAINING: NumericEffect = NumericEffect::Training;

    fn row(technique: &str, numerics: NumericEffect, batch: u64, per_second: f64) -> TechniqueRow {
        let record = TechniqueRecord {
            technique: technique.to_owned(),
            numerics: Some(numerics),
            batch: 8,
            status: Status::Completed,
            ..TechniqueRecord::default()
        };
        let per_second = (batch > 0).then_some(per_second);
        TechniqueRow { record, fits: vec![CardFit { memory_bytes: 24 * GIB, batch, per_second }] }
    }

    fn of_ranks(mut row: TechniqueRow) -> TechniqueRow {
        row.record.exchanged_bytes_per_step = Some(1);
        row
    }

    fn advised(rows: &[TechniqueRow]) -> Vec<(&str, u64)> {
        let advice = advise(rows, 24 * GIB).unwrap();
        let all = std::iter::once(advice.first).chain(advice.others);
        all.map(|advised| (advised.row.record.technique.as_str(), advised.fit.batch)).collect()
    }

    #[test]
    fn what_keeps_the_numbers_comes_first() {
        let rows = [
            row("base", SAME, 10, 20.0),
            row("ckpt", SAME, 30, 16.0),
            row("amp", ROUNDING, 12, 90.0),
            row("bf16_model", TRAINING, 20, 120.0),
            row("big", SAME, 0, 0.0),
        ];
        assert_eq!(advised(&rows), [("base", 10), ("amp", 12), ("bf16_model", 20)]);
        assert_eq!(advise(&rows, 24 * GIB).unwrap().base.map(|fit| fit.batch), Some(10));
        let slow = [row("base", SAME, 10, 20.0), row("amp", ROUNDING, 12, 22.0), row("sgd", TRAINING, 12, 21.0)];
        assert_eq!(advised(&slow), [("base", 10)], "no faster within the accuracy of the times");
    }

    #[test]
    fn whole_batch_before_speed() {
        let rows = [row("base", SAME, 6, 20.0), row("ckpt", SAME, 8, 16.0), row("amp", ROUNDING, 7, 90.0)];
        assert_eq!(advised(&rows), [("ckpt", 8), ("amp", 7)]);
        let rows = [row("base", SAME, 4, 20.0), row("ckpt", SAME, 6, 16.0), row("bf16_model", TRAINING, 9, 5.0)];
        assert_eq!(advised(&rows), [("base", 4), ("bf16_model", 9)], "slower, with the whole batch");
    }

    #[test]
    fn changed_numbers_where_nothing_else_fits() {
        let rows =
            [row("base", SAME, 0, 0.0), row("bf16_model", TRAINING, 9, 50.0), row("amp+ckpt", ROUNDING, 8, 40.0)];
        assert_eq!(advised(&rows), [("amp+ckpt", 8), ("bf16_model", 9)]);
        assert_eq!(advise(&rows, 24 * GIB).unwrap().base, None);
    }

    #[test]
    fn several_ranks_only_if_nothing_else_fits() {
        let sharded = of_ranks(row("zero3", TRAINING, 9, 500.0));
        let rows = [row("base", SAME, 0, 0.0), sharded.clone(), row("offload", SAME, 1, 1.0)];
        assert_eq!(advised(&rows), [("offload", 1)]);
        assert_eq!(advised(&[row("base", SAME, 0, 0.0), sharded]), [("zero3", 9)]);
    }

    #[test]
    fn no_advice_has_a_reason() {
        let rows = [row("base", SAME, 0, 0.0)];
        assert_eq!(advise(&rows, 24 * GIB), Err(NoAdvice::NothingFits));
        assert_eq!(advise(&rows, 40 * GIB), Err(NoAdvice::NotComputed));
        let of_file = TechniqueRow::from(TechniqueRecord {
            largest_batch_24gib: Some(9),
            per_second_24gib: Some(2.0),
            ..rows[0].record.clone()
        });
        assert_eq!(advise(&[of_file], 24 * GIB).unwrap().first.fit.batch, 9);
    }
}

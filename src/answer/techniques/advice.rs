//! Which technique to take for a card of some size.

use super::{Fit, TechniqueRow};

/// What to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice<'a> {
    /// The row of the fastest combination that fits.
    pub best: &'a TechniqueRow,
    /// What fits with it.
    pub fit: Fit,
    /// What fits without any technique; `None` where not even one sequence does.
    pub base: Option<Fit>,
}

/// The technique with which most sequences a second fit in `memory_bytes`; of equals the one with the smaller batch,
/// which was the simpler one. Techniques of several ranks are for those who have several: they are left out unless
/// nothing else fits. `None` where nothing fits.
#[must_use]
pub fn advise(rows: &[TechniqueRow], memory_bytes: u64) -> Option<Advice<'_>> {
    let fit_of = |row: &TechniqueRow| {
        row.fits.iter().copied().find(|fit| fit.memory_bytes == memory_bytes && fit.per_second.is_some())
    };
    let fitting: Vec<(&TechniqueRow, Fit)> = rows.iter().filter_map(|row| Some((row, fit_of(row)?))).collect();
    let fastest = |of_one_rank: bool| {
        fitting
            .iter()
            .filter(|(row, _)| !of_one_rank || row.record.exchanged_bytes_per_step == 0)
            // The first of equals: max_by would take the last.
            .rev()
            .max_by(|(_, a), (_, b)| a.per_second.unwrap_or(0.0).total_cmp(&b.per_second.unwrap_or(0.0)))
    };
    let &(best, fit) = fastest(true).or_else(|| fastest(false))?;
    let base = fitting.iter().find(|(row, _)| row.record.technique == super::BASE).map(|&(_, fit)| fit);
    Some(Advice { best, fit, base })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{answer::techniques::TechniqueRecord, base::GIB};

    fn row(technique: &str, batch: u64, per_second: f64, exchanged: u64) -> TechniqueRow {
        let record = TechniqueRecord {
            technique: technique.to_owned(),
            exchanged_bytes_per_step: exchanged,
            ..TechniqueRecord::default()
        };
        let per_second = (batch > 0).then_some(per_second);
        TechniqueRow { record, fits: vec![Fit { memory_bytes: 24 * GIB, batch, per_second }] }
    }

    #[test]
    fn the_fastest_that_fits_is_taken() {
        let rows = [row("base", 8, 20.0, 0), row("ckpt", 30, 16.0, 0), row("amp", 10, 90.0, 0), row("big", 0, 0.0, 0)];
        let advice = advise(&rows, 24 * GIB).unwrap();
        assert_eq!((advice.best.record.technique.as_str(), advice.fit.batch), ("amp", 10));
        assert_eq!(advice.base.map(|fit| fit.batch), Some(8));
        assert_eq!(advise(&rows, 80 * GIB), None);
    }

    #[test]
    fn several_ranks_are_for_when_nothing_else_fits() {
        let sharded = row("zero3", 4, 500.0, 1);
        let rows = [row("base", 0, 0.0, 0), sharded.clone(), row("offload", 1, 1.0, 0)];
        assert_eq!(advise(&rows, 24 * GIB).unwrap().best.record.technique, "offload");
        let rows = [row("base", 0, 0.0, 0), sharded];
        let advice = advise(&rows, 24 * GIB).unwrap();
        assert_eq!((advice.best.record.technique.as_str(), advice.base), ("zero3", None));
    }
}

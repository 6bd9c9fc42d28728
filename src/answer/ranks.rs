//! One answer for all ranks of a distributed program: the worst rank, the spread, and the outliers.
//!
//! Every command that accepts a folder of recordings computes one [`RankRow`] per rank and decides which figure is
//! compared. This module does not know what a rank does.

use serde::{Deserialize, Serialize};

use crate::base::MIB;

/// A rank is an outlier if its distance from the median is this many times the usual distance.
const FAR: f64 = 3.5;
/// What the median distance is short of a standard deviation, where chance is normal.
const TO_DEVIATION: f64 = 1.4826;
/// Ranks that do the same differ by rounding: less than this share of the median, or a page, does not count.
const LEAST_SHARE: f64 = 0.01;
const LEAST_BYTES: f64 = 2.0 * MIB as f64;
/// With fewer ranks, the usual distance is unknown.
const FEWEST: usize = 4;

/// What one rank comes to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankRow {
    /// Which rank.
    pub rank: String,
    /// Most bytes alive at one time, as requested.
    pub live_peak_bytes: Option<u64>,
    /// Most bytes in blocks at one time: what `leaks` shows instead.
    pub peak_allocated_bytes: Option<u64>,
    /// What ranks are compared by: the memory that it needs, what a step adds.
    pub figure_bytes: Option<u64>,
    /// The answer in a word or two, or why there is none.
    pub verdict: String,
    /// How bad that is; the worst rank is one of those with the highest.
    #[serde(skip)]
    pub severity: u8,
    /// How far it is from the median of all, where that is unusual.
    pub outlier_by_bytes: Option<i64>,
}

impl RankRow {
    /// The row of a rank without an answer.
    #[must_use]
    pub fn unanswered(reason: &str) -> RankRow {
        RankRow { verdict: format!("no answer: {reason}"), ..RankRow::default() }
    }
}

/// How far ranks are apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankSpread {
    /// The least.
    pub min_bytes: u64,
    /// Half of the ranks have no more.
    pub median_bytes: u64,
    /// The most.
    pub max_bytes: u64,
}

/// All ranks together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankComparison {
    /// What [`RankRow::figure_bytes`] is, in two words.
    pub figure: &'static str,
    /// The place of the worst among the rows; `None` if there is no answer for any.
    pub worst: Option<usize>,
    /// Of the figures.
    pub spread: Option<RankSpread>,
    /// One per rank, in order.
    pub rows: Vec<RankRow>,
}

impl RankComparison {
    /// Gathers the rows of all ranks.
    ///
    /// ```
    /// use oomph::answer::ranks::{RankRow, RankComparison};
    /// let row = |rank: u64| RankRow { rank: rank.to_string(), figure_bytes: Some((10 + 5 * (rank / 7)) << 30), ..RankRow::default() };
    /// let ranks = RankComparison::gather("memory needed", (0..8).map(row).collect());
    /// assert_eq!(ranks.worst, Some(7));
    /// assert_eq!(ranks.outliers().map(|row| &*row.rank).collect::<Vec<_>>(), ["7"]);
    /// ```
    #[must_use]
    pub fn gather(figure: &'static str, mut rows: Vec<RankRow>) -> RankComparison {
        // The first of equals, so that the answer is deterministic.
        let known = rows.iter().enumerate().filter(|(_, row)| row.figure_bytes.is_some()).rev();
        let worst = known.max_by_key(|(_, row)| (row.severity, row.figure_bytes)).map(|(place, _)| place);
        let figures: Vec<u64> = rows.iter().filter_map(|row| row.figure_bytes).collect();
        let spread = spread(figures.clone());
        if let Some(spread) = spread.filter(|_| figures.len() >= FEWEST) {
            let usual = deviation(&figures, spread.median_bytes);
            for row in &mut rows {
                let away = row.figure_bytes.map(|bytes| bytes as f64 - spread.median_bytes as f64);
                row.outlier_by_bytes = away.filter(|away| away.abs() > usual).map(|away| away as i64);
            }
        }
        RankComparison { figure, worst, spread, rows }
    }

    /// The outliers.
    pub fn outliers(&self) -> impl Iterator<Item = &RankRow> {
        self.rows.iter().filter(|row| row.outlier_by_bytes.is_some())
    }

    /// Ranks without an answer.
    pub fn unanswered(&self) -> impl Iterator<Item = &RankRow> {
        self.rows.iter().filter(|row| row.figure_bytes.is_none())
    }
}

fn spread(mut figures: Vec<u64>) -> Option<RankSpread> {
    figures.sort_unstable();
    let (min_bytes, max_bytes) = (*figures.first()?, *figures.last()?);
    Some(RankSpread { min_bytes, median_bytes: median(&figures), max_bytes })
}

/// Of sorted figures; the lower of two in the middle, so that it is one of them.
fn median(sorted: &[u64]) -> u64 {
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// From which distance on a figure is unusual: the median distance, which no few outliers can move.
fn deviation(figures: &[u64], median_bytes: u64) -> f64 {
    let mut distances: Vec<u64> = figures.iter().map(|&bytes| bytes.abs_diff(median_bytes)).collect();
    distances.sort_unstable();
    let usual = FAR * TO_DEVIATION * median(&distances) as f64;
    usual.max(LEAST_SHARE * median_bytes as f64).max(LEAST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;
    use proptest::prelude::*;

    fn ranks(figures: &[Option<u64>]) -> RankComparison {
        let row = |(rank, figure): (usize, &Option<u64>)| RankRow {
            rank: rank.to_string(),
            figure_bytes: *figure,
            ..RankRow::default()
        };
        RankComparison::gather("memory needed", figures.iter().enumerate().map(row).collect())
    }

    fn outliers(figures: &[u64]) -> Vec<String> {
        let figures: Vec<Option<u64>> = figures.iter().copied().map(Some).collect();
        ranks(&figures).outliers().map(|row| row.rank.clone()).collect()
    }

    #[test]
    fn the_rank_that_differs_is_named_on_either_side() {
        assert_eq!(outliers(&[10 * GIB, 10 * GIB, 14 * GIB, 10 * GIB, 10 * GIB]), ["2"]);
        assert_eq!(outliers(&[10 * GIB, 10 * GIB, 3 * GIB, 10 * GIB, 14 * GIB, 10 * GIB, 10 * GIB]), ["2", "4"]);
    }

    #[test]
    fn what_is_usual_is_no_outlier() {
        assert_eq!(outliers(&[10 * GIB, 11 * GIB, 12 * GIB, 13 * GIB, 14 * GIB]), [""; 0], "all are apart");
        assert_eq!(outliers(&[10 * GIB, 10 * GIB, 10 * GIB, 10 * GIB + 90 * MIB]), [""; 0], "less than 1 %");
        assert_eq!(outliers(&[MIB, MIB, MIB, 3 * MIB]), [""; 0], "no more than a page");
        assert_eq!(outliers(&[GIB, GIB, 9 * GIB]), [""; 0], "three are too few");
    }

    #[test]
    fn worst_rank_is_first_of_most_severe() {
        let mut found = ranks(&[Some(3), Some(9), None, Some(9)]);
        assert_eq!((found.worst, found.unanswered().count()), (Some(1), 1));
        assert_eq!(found.spread, Some(RankSpread { min_bytes: 3, median_bytes: 9, max_bytes: 9 }));
        found.rows[0].severity = 1;
        assert_eq!(
            RankComparison::gather("memory needed", found.rows).worst,
            Some(0),
            "a leak is worse than a high peak"
        );
        assert_eq!(ranks(&[None]).worst, None);
    }

    proptest! {
        #[test]
        fn outliers_are_a_minority_with_the_worst(
            figures in proptest::collection::vec(0u64..1 << 40, 1..40),
        ) {
            let found = ranks(&figures.iter().copied().map(Some).collect::<Vec<_>>());
            prop_assert!(found.outliers().count() * 2 <= figures.len());
            prop_assert_eq!(figures[found.worst.unwrap()], *figures.iter().max().unwrap());
        }
    }
}

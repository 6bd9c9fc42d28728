//! Wall-clock times of two runs: the Mann-Whitney U test over their passes.
//!
//! A difference counts if chance hardly gives such ranks *and* the medians are further apart than machines are from run
//! to run. Five passes against five can reach a p-value of 0.008 at best, when none of one run is as fast as any of the
//! other.

use std::collections::BTreeMap;

use serde::Serialize;
use statrs::stats_tests::{
    Alternative,
    mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu},
};

use crate::measure::TimingRecord;

/// From when on a difference of times counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerance {
    /// The p-value must be below this.
    pub significance: f64,
    /// The medians must differ by more than this share.
    pub noise_threshold: f64,
}

impl Default for Tolerance {
    fn default() -> Tolerance {
        Tolerance { significance: 0.01, noise_threshold: 0.05 }
    }
}

/// The times of a case in two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeChange {
    /// Which case.
    pub case_id: String,
    /// With how many threads.
    pub threads: Option<u16>,
    /// Median pass of the old run.
    pub old_median_ns: u64,
    /// Median pass of the new run.
    pub new_median_ns: u64,
    /// New as a ratio to old.
    pub ratio: f64,
    /// How probable such ranks are if nothing changed; empty where the passes themselves are not known.
    pub p_value: Option<f64>,
    /// Effect size: how much more often a pass of the new run is slower than one of the old than faster, from -1 to 1.
    pub rank_biserial: Option<f64>,
    /// The judgement.
    pub verdict: TimeVerdict,
}

/// What the times say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeVerdict {
    /// It takes longer.
    Slower,
    /// It takes less.
    Faster,
    /// Nothing that chance and machines do not explain.
    Noise,
}

/// The cases that both runs have timed, in the order of the new one.
#[must_use]
pub fn changes(old: &[TimingRecord], new: &[TimingRecord], tolerance: &Tolerance) -> Vec<TimeChange> {
    let earlier: BTreeMap<(&str, Option<u16>), &TimingRecord> =
        old.iter().map(|row| ((row.case_id.as_str(), row.threads), row)).collect();
    let pairs = new.iter().filter_map(|row| Some((*earlier.get(&(row.case_id.as_str(), row.threads))?, row)));
    pairs.map(|(old, new)| change(old, new, tolerance)).collect()
}

fn change(old: &TimingRecord, new: &TimingRecord, tolerance: &Tolerance) -> TimeChange {
    let ratio = new.pass_median_ns as f64 / old.pass_median_ns.max(1) as f64;
    let (p_value, rank_biserial) = match ranks(&old.passes_ns(), &new.passes_ns()) {
        Some((p_value, effect)) => (Some(p_value), Some(effect)),
        None => (None, None),
    };
    let is_significant = p_value.is_some_and(|p_value| p_value < tolerance.significance);
    let verdict = if is_significant && ratio > 1.0 + tolerance.noise_threshold {
        TimeVerdict::Slower
    } else if is_significant && ratio < 1.0 / (1.0 + tolerance.noise_threshold) {
        TimeVerdict::Faster
    } else {
        TimeVerdict::Noise
    };
    TimeChange {
        case_id: new.case_id.clone(),
        threads: new.threads,
        old_median_ns: old.pass_median_ns,
        new_median_ns: new.pass_median_ns,
        ratio,
        p_value,
        rank_biserial,
        verdict,
    }
}

/// p-value and effect size of two samples; `None` where one is empty.
fn ranks(old: &[u64], new: &[u64]) -> Option<(f64, f64)> {
    let pairs = (old.len() * new.len()) as f64;
    let slower = new.iter().flat_map(|new| old.iter().map(move |old| new.cmp(old) as i64)).sum::<i64>() as f64;
    let mut all = [old, new].concat();
    all.sort_unstable();
    let has_ties = all.windows(2).any(|pair| pair[0] == pair[1]);
    let p_value = if has_ties || all.len() > MOST_COUNTED {
        let method = MannWhitneyUMethod::AsymptoticInclContinuityCorrection;
        let (_, p_value) = mannwhitneyu(old, new, method, Alternative::TwoSided).ok()?;
        // Samples that are all one value have no spread for the test to work with.
        if p_value.is_nan() { 1.0 } else { p_value }
    } else if pairs > 0.0 {
        // U counts the pairs of one order; both tails of its distribution are equal.
        exact_p_value(((pairs + slower.abs()) / 2.0) as usize, old.len(), new.len())
    } else {
        return None;
    };
    Some((p_value, slower / pairs))
}

/// Samples that together have more members are compared by the normal approximation.
const MOST_COUNTED: usize = 40;

/// How probable it is that U, of two samples of these sizes without ties, is at least `u` away to either side. Counted
/// out, because samples are small, and because statrs 0.19 gives different exact values for the same samples in the other
/// order: the coefficients of the Gaussian binomial are the numbers of arrangements for each U.
fn exact_p_value(u: usize, one: usize, other: usize) -> f64 {
    let mut arrangements = vec![0.0; one * other + 1];
    arrangements[0] = 1.0;
    for member in 1..=one {
        for place in (other + member..arrangements.len()).rev() {
            arrangements[place] -= arrangements[place - other - member];
        }
        for place in member..arrangements.len() {
            arrangements[place] += arrangements[place - member];
        }
    }
    let (tail, all): (f64, f64) = (arrangements[u..].iter().sum(), arrangements.iter().sum());
    (2.0 * tail / all).min(1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn timing(passes: &[u64]) -> TimingRecord {
        let mut sorted = passes.to_vec();
        sorted.sort_unstable();
        let shown: Vec<String> = passes.iter().map(u64::to_string).collect();
        TimingRecord { pass_median_ns: sorted[passes.len() / 2], pass_ns: shown.join(" "), ..TimingRecord::default() }
    }

    fn judged(old: &[u64], new: &[u64]) -> TimeChange {
        changes(&[timing(old)], &[timing(new)], &Tolerance::default()).remove(0)
    }

    #[test]
    fn a_difference_counts_only_if_it_is_sure_and_large() {
        let old = [1000, 1010, 1005, 990, 1001];
        let slower = judged(&old, &[1200, 1210, 1190, 1205, 1195]);
        assert_eq!((slower.verdict, slower.rank_biserial), (TimeVerdict::Slower, Some(1.0)));
        assert!((slower.p_value.unwrap() - 2.0 / 252.0).abs() < 1e-9, "{slower:?}");
        assert_eq!(judged(&[1200, 1210, 1190, 1205, 1195], &old).verdict, TimeVerdict::Faster);
        assert_eq!(judged(&old, &[1020, 1021, 1022, 1023, 1024]).verdict, TimeVerdict::Noise, "sure, and 2 %");
        assert_eq!(judged(&old, &[1300, 995, 1400, 1002, 1250]).verdict, TimeVerdict::Noise, "large, and not sure");
        assert_eq!(judged(&[5; 5], &[5; 5]).verdict, TimeVerdict::Noise);
    }

    /// By hand: of the 10 arrangements of two and three, U is 6, 5 and 4 in one, one and two.
    #[test]
    fn small_samples_are_counted_out() {
        let found: Vec<f64> = [6, 5, 4, 3].iter().map(|&u| exact_p_value(u, 2, 3)).collect();
        for (found, expected) in found.iter().zip([0.2, 0.4, 0.8, 1.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }

    #[test]
    fn without_passes_there_is_no_verdict() {
        let (mut old, new) = (timing(&[1000; 5]), timing(&[9000; 5]));
        old.pass_ns.clear();
        let found = changes(&[old], &[new], &Tolerance::default());
        assert_eq!((found[0].verdict, found[0].p_value), (TimeVerdict::Noise, None));
    }

    #[test]
    fn noise_rarely_looks_like_a_change() {
        let mut dice = ChaCha8Rng::seed_from_u64(1);
        let mut passes = || [(); 5].map(|()| 1_000_000 + (dice.random::<f64>() * 200_000.0) as u64);
        let alarms = (0..1000).filter(|_| judged(&passes(), &passes()).verdict != TimeVerdict::Noise).count();
        assert!(alarms <= 20, "{alarms} of 1000");
    }

    proptest! {
        #[test]
        fn what_is_slower_one_way_is_faster_the_other(
            old in proptest::collection::vec(1_u64..1_000_000, 1..12),
            new in proptest::collection::vec(1_u64..1_000_000, 1..12),
        ) {
            let (one, other) = (judged(&old, &new), judged(&new, &old));
            prop_assert!((one.p_value.unwrap() - other.p_value.unwrap()).abs() < 1e-9);
            prop_assert_eq!(one.rank_biserial.unwrap(), -other.rank_biserial.unwrap());
            prop_assert_eq!(one.verdict == TimeVerdict::Slower, other.verdict == TimeVerdict::Faster);
        }
    }
}

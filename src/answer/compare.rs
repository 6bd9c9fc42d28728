//! Compares two runs of the same cases: what changed, what got worse, what is noise.
//!
//! Columns of `runs.csv` that do not depend on a real clock must be equal to the byte. Wall-clock times are compared by
//! the Mann-Whitney U test over their passes: a difference counts if chance hardly gives such ranks *and* the medians
//! are further apart than usual between runs of one machine. Five passes against five reach a p-value of 0.008 at best,
//! when none of one run is as fast as any of the other. Runs with different clocks are refused, because their times mean
//! different things. This module knows rows, not files.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;
use statrs::stats_tests::{
    Alternative,
    mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu},
};

use crate::{
    device::DeviceClock,
    measure::{CaseRecord, TimingRecord, digits},
};

/// What one run left behind.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// What to call it.
    pub name: String,
    /// Where wall-clock times were taken: times of two machines are not compared.
    pub machine: String,
    /// Its rows.
    pub records: Vec<CaseRecord>,
    /// Its wall-clock rows.
    pub timings: Vec<TimingRecord>,
}

/// Why two runs cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// One ran on a simulated clock and the other on a real one.
    #[error("{simulated} ran on a simulated clock and {real} on a real one: such times are never compared")]
    Clocks {
        /// The run on a simulated device.
        simulated: String,
        /// The run on a real one.
        real: String,
    },
    /// They share no case.
    #[error("{old} and {new} have no case in common")]
    NothingInCommon {
        /// One run.
        old: String,
        /// The other.
        new: String,
    },
}

/// What changed from one run to the other.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Cases that both have.
    pub compared: usize,
    /// Columns that must be equal and are not.
    pub changes: Vec<ColumnChange>,
    /// Wall-clock times, those that did not change included.
    pub times: Vec<TimeChange>,
    /// Cases that only the old run has.
    pub gone: Vec<String>,
    /// Cases that only the new run has.
    pub added: Vec<String>,
    /// Why times were not compared, where there were some.
    pub times_left_out: Option<String>,
}

impl Comparison {
    /// Whether anything got worse.
    #[must_use]
    pub fn has_regressions(&self) -> bool {
        self.changes.iter().any(|change| change.direction == ChangeDirection::Worse)
            || self.times.iter().any(|time| time.verdict == TimeVerdict::Slower)
    }

    /// Whether anything changed, for better or worse. Noise does not count.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        let equal = |time: &TimeChange| time.verdict == TimeVerdict::Noise;
        !(self.changes.is_empty() && self.gone.is_empty() && self.added.is_empty() && self.times.iter().all(equal))
    }
}

/// Compares two runs, case by case in the order of the new one.
pub fn compare(old: &Run, new: &Run, tolerance: &TimeTolerance) -> Result<Comparison, CompareError> {
    refuse_strangers(old, new)?;
    let before: BTreeMap<&str, &CaseRecord> = by_id(&old.records);
    let after: BTreeSet<&str> = new.records.iter().map(|record| record.case_id.as_str()).collect();
    let mut comparison = Comparison::default();
    for record in &new.records {
        match before.get(record.case_id.as_str()) {
            Some(earlier) => {
                comparison.compared += 1;
                comparison.changes.extend(column_changes(earlier, record));
            }
            None => comparison.added.push(record.case_id.clone()),
        }
    }
    if comparison.compared == 0 {
        return Err(CompareError::NothingInCommon { old: old.name.clone(), new: new.name.clone() });
    }
    let gone = old.records.iter().map(|record| &record.case_id).filter(|id| !after.contains(id.as_str()));
    comparison.gone = gone.cloned().collect();
    let both_timed = !old.timings.is_empty() && !new.timings.is_empty();
    if both_timed && old.machine != new.machine {
        comparison.times_left_out =
            Some(format!("times of '{}' and '{}' are not comparable", old.machine, new.machine));
    } else if both_timed {
        comparison.times = time_changes(&old.timings, &new.timings, tolerance);
    }
    Ok(comparison)
}

fn by_id(records: &[CaseRecord]) -> BTreeMap<&str, &CaseRecord> {
    records.iter().map(|record| (record.case_id.as_str(), record)).collect()
}

fn refuse_strangers(old: &Run, new: &Run) -> Result<(), CompareError> {
    let runs_on = |run: &Run, clock| run.records.iter().any(|record| record.clock == Some(clock));
    for (simulated, real) in [(old, new), (new, old)] {
        if runs_on(simulated, DeviceClock::Virtual) && runs_on(real, DeviceClock::Wall) {
            return Err(CompareError::Clocks { simulated: simulated.name.clone(), real: real.name.clone() });
        }
    }
    Ok(())
}

/// A column of a case that is not what it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ColumnChange {
    /// Which case.
    pub case_id: String,
    /// Which column.
    pub column: String,
    /// What it was; null where there was nothing to say.
    pub old: Value,
    /// What it is.
    pub new: Value,
    /// Whether that is good.
    pub direction: ChangeDirection,
}

impl ColumnChange {
    /// New as a ratio to old, of numbers above zero.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        let (old, new) = (self.old.as_f64()?, self.new.as_f64()?);
        (old > 0.0).then_some(new / old)
    }
}

/// Whether a change is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeDirection {
    /// Less is needed, or more succeeds.
    Better,
    /// More is needed, or less succeeds.
    Worse,
    /// Something else happens; whether that is good, the column does not say.
    Different,
}

/// Columns of which less is better.
const LESS_IS_BETTER: [&str; 14] = [
    "ooms",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "peak_device_used_bytes",
    "internal_fragmentation_share",
    "external_fragmentation_share",
    "fragmentation_share",
    "retries",
    "driver_calls",
    "driver_failures",
    "driver_ns",
    "elapsed_ns",
];

/// How cases end, the best first; being interrupted or skipped is neither.
const ENDINGS: [&str; 3] = ["completed", "oom", "error"];

/// The columns that differ. On a real clock times differ from run to run, and so are not among them.
fn column_changes(old: &CaseRecord, new: &CaseRecord) -> Vec<ColumnChange> {
    let timed = new.clock == Some(DeviceClock::Wall);
    let is_compared = |column: &str| column != "reason" && !(timed && column.ends_with("_ns"));
    cells(old)
        .into_iter()
        .zip(cells(new))
        .filter(|((column, old), (_, new))| old != new && is_compared(column))
        .map(|((column, before), (_, after))| {
            let direction = direction(&column, &before, &after);
            ColumnChange { case_id: new.case_id.clone(), column, old: before, new: after, direction }
        })
        .collect()
}

/// Name and value of every column, in order of names.
fn cells(record: &CaseRecord) -> Vec<(String, Value)> {
    match serde_json::to_value(record) {
        Ok(Value::Object(cells)) => cells.into_iter().collect(),
        _ => Vec::new(),
    }
}

fn direction(column: &str, old: &Value, new: &Value) -> ChangeDirection {
    let better_if = |better: bool| if better { ChangeDirection::Better } else { ChangeDirection::Worse };
    if column == "status" {
        let place = |value: &Value| ENDINGS.iter().position(|ending| value.as_str() == Some(ending));
        return match (place(old), place(new)) {
            (Some(old), Some(new)) => better_if(new < old),
            _ => ChangeDirection::Different,
        };
    }
    match (old.as_f64(), new.as_f64()) {
        (Some(old), Some(new)) if LESS_IS_BETTER.contains(&column) => better_if(new < old),
        _ => ChangeDirection::Different,
    }
}

/// From when on a difference of times counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeTolerance {
    /// The p-value must be below this.
    pub significance: f64,
    /// The medians must differ by more than this share.
    pub noise_threshold: f64,
}

impl Default for TimeTolerance {
    fn default() -> TimeTolerance {
        TimeTolerance { significance: 0.01, noise_threshold: 0.05 }
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
    #[serde(serialize_with = "digits::required")]
    pub ratio: f64,
    /// How probable such ranks are if nothing changed; empty where the passes themselves are not known.
    #[serde(serialize_with = "digits::optional")]
    pub p_value: Option<f64>,
    /// Effect size: how much more often a pass of the new run is slower than one of the old than faster, from -1 to 1.
    #[serde(serialize_with = "digits::optional")]
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
fn time_changes(old: &[TimingRecord], new: &[TimingRecord], tolerance: &TimeTolerance) -> Vec<TimeChange> {
    let earlier: BTreeMap<(&str, Option<u16>), &TimingRecord> =
        old.iter().map(|row| ((row.case_id.as_str(), row.threads), row)).collect();
    let pairs = new.iter().filter_map(|row| Some((*earlier.get(&(row.case_id.as_str(), row.threads))?, row)));
    pairs.map(|(old, new)| time_change(old, new, tolerance)).collect()
}

fn time_change(old: &TimingRecord, new: &TimingRecord, tolerance: &TimeTolerance) -> TimeChange {
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
    use super::*;
    use crate::measure::{CaseLabel, Status};

    fn run(name: &str, workloads: &[&str]) -> Run {
        let record = |workload: &&str| {
            let label = CaseLabel { workload: (*workload).to_owned(), ..CaseLabel::default() };
            CaseRecord { clock: Some(DeviceClock::Virtual), ..CaseRecord::unmeasured(&label, Status::Completed, "") }
        };
        Run { name: name.to_owned(), records: workloads.iter().map(record).collect(), ..Run::default() }
    }

    #[test]
    fn runs_of_other_clocks_or_cases_are_refused() {
        let (old, mut new) = (run("old", &["a"]), run("new", &["a"]));
        assert_eq!(compare(&old, &new, &TimeTolerance::default()).map(|found| found.compared), Ok(1));
        new.records[0].clock = Some(DeviceClock::Wall);
        let error = compare(&old, &new, &TimeTolerance::default()).unwrap_err();
        assert_eq!(error, CompareError::Clocks { simulated: "old".to_owned(), real: "new".to_owned() });
        assert_eq!(compare(&new, &old, &TimeTolerance::default()).unwrap_err(), error, "in whichever order");
        let error = compare(&old, &run("other", &["b"]), &TimeTolerance::default()).unwrap_err();
        assert_eq!(error.to_string(), "old and other have no case in common");
    }

    #[test]
    fn cases_that_come_and_go_are_changes_and_no_regressions() {
        let found = compare(&run("old", &["a", "b"]), &run("new", &["b", "c"]), &TimeTolerance::default()).unwrap();
        let id = |workload: &str| run("", &[workload]).records[0].case_id.clone();
        assert_eq!((found.compared, &found.gone, &found.added), (1, &vec![id("a")], &vec![id("c")]));
        assert!(found.has_changes() && !found.has_regressions());
    }
}

#[cfg(test)]
mod columns_tests {
    use super::*;
    use crate::measure::Status;

    fn record() -> CaseRecord {
        CaseRecord {
            clock: Some(DeviceClock::Virtual),
            status: Status::Completed,
            driver_ns: Some(100),
            peak_reserved_bytes: Some(0),
            ..CaseRecord::default()
        }
    }

    #[test]
    fn a_single_byte_or_nanosecond_is_a_change() {
        assert_eq!(column_changes(&record(), &record()), []);
        let found = column_changes(
            &record(),
            &CaseRecord { peak_reserved_bytes: Some(1), driver_ns: Some(99), hits: Some(3), ..record() },
        );
        let seen: Vec<_> = found.iter().map(|change| (change.column.as_str(), change.direction)).collect();
        assert_eq!(
            seen,
            [
                ("driver_ns", ChangeDirection::Better),
                ("hits", ChangeDirection::Different),
                ("peak_reserved_bytes", ChangeDirection::Worse)
            ]
        );
        assert_eq!((found[0].ratio(), found[2].ratio()), (Some(0.99), None));
    }

    #[test]
    fn on_a_real_clock_times_are_left_to_the_statistics() {
        let old = CaseRecord { clock: Some(DeviceClock::Wall), ..record() };
        let new = CaseRecord { driver_ns: Some(7), peak_allocated_bytes: Some(7), ..old.clone() };
        let found = column_changes(&old, &new);
        assert_eq!(found.iter().map(|change| change.column.as_str()).collect::<Vec<_>>(), ["peak_allocated_bytes"]);
    }

    #[test]
    fn running_out_of_memory_is_worse_than_completing() {
        let oom = CaseRecord { status: Status::Oom, reason: "words".to_owned(), ..record() };
        assert_eq!(column_changes(&record(), &oom)[0].direction, ChangeDirection::Worse);
        assert_eq!(column_changes(&oom, &record())[0].direction, ChangeDirection::Better);
        assert_eq!(column_changes(&oom, &record()).len(), 1, "the reason is words about the status");
        let skipped = CaseRecord { status: Status::Skipped, ..record() };
        assert_eq!(column_changes(&skipped, &record())[0].direction, ChangeDirection::Different);
    }

    #[test]
    fn unknown_device_memory_is_neither_better_nor_worse() {
        let known = CaseRecord { peak_device_used_bytes: Some(7), ..record() };
        for (old, new) in [(record(), known.clone()), (known, record())] {
            let [change] = column_changes(&old, &new).try_into().unwrap();
            assert_eq!((change.direction, change.ratio()), (ChangeDirection::Different, None), "{change:?}");
        }
    }

    #[test]
    fn every_column_that_is_judged_exists() {
        let columns: Vec<String> = cells(&record()).into_iter().map(|(column, _)| column).collect();
        for name in LESS_IS_BETTER {
            assert!(columns.iter().any(|column| column == name), "{name}");
        }
    }
}

#[cfg(test)]
mod times_tests {
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
        time_changes(&[timing(old)], &[timing(new)], &TimeTolerance::default()).remove(0)
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
        let found = time_changes(&[old], &[new], &TimeTolerance::default());
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
        fn comparison_is_antisymmetric(
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

//! Compares two runs of the same cases: what changed, what got worse, what is noise.
//!
//! Columns of `runs.csv` that do not depend on a real clock must be equal to the byte, or to the tolerance that users choose.
//! What changed is also summed up: the geometric mean of the ratios of each column ([`ColumnBalance`]). Wall-clock times are
//! judged by [`times`](super::times). Runs with different clocks are refused, because their times mean different things.
//! This module knows rows, not files.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

pub use super::times::TimeTolerance;
use super::times::{TimeChange, TimeVerdict, TooFewRounds, judge_rows};
use crate::{
    device::DeviceClock,
    measure::{CaseRecord, Status, TimingRecord, digits},
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
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
    /// No time could be judged.
    #[error(transparent)]
    Rounds(#[from] TooFewRounds),
}

/// What counts as a change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Numbers that differ by at most this share are equal.
    pub columns: f64,
    /// Wall-clock times.
    pub times: TimeTolerance,
    /// Whether rounds that cannot reach the significance are an error. Otherwise the times are left out.
    pub demands_times: bool,
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
    /// Columns that differ by no more than the tolerance.
    pub within_tolerance: usize,
    /// The columns of which less is better, over all cases: the largest effect first.
    pub balance: Vec<ColumnBalance>,
    /// Times of several cases together.
    pub times_together: Vec<TimeChange>,
    /// Whether the two were programs or strategies that took turns.
    pub took_turns: bool,
}

impl Comparison {
    /// Whether anything got worse.
    #[must_use]
    pub fn has_regressions(&self) -> bool {
        self.changes.iter().any(|change| change.direction == ChangeDirection::Worse)
            || self.all_times().any(|time| time.verdict == TimeVerdict::Slower)
    }

    /// The times of cases, and of several together.
    fn all_times(&self) -> impl Iterator<Item = &TimeChange> {
        self.times.iter().chain(&self.times_together)
    }

    /// Whether anything changed, for better or worse. Noise does not count.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        let equal = |time: &TimeChange| matches!(time.verdict, TimeVerdict::Noise | TimeVerdict::Unclear);
        !(self.changes.is_empty() && self.gone.is_empty() && self.added.is_empty() && self.all_times().all(equal))
    }
}

/// Compares two runs. Changes are sorted by effect, the largest first.
pub fn compare(old: &Run, new: &Run, tolerance: &Tolerance) -> Result<Comparison, CompareError> {
    refuse_strangers(old, new)?;
    let before: BTreeMap<&str, &CaseRecord> = by_id(&old.records);
    let after: BTreeSet<&str> = new.records.iter().map(|record| record.case_id.as_str()).collect();
    let mut comparison = Comparison::default();
    let mut balance = BTreeMap::new();
    for record in &new.records {
        match before.get(record.case_id.as_str()) {
            Some(earlier) => {
                comparison.compared += 1;
                comparison.changes.extend(column_changes(earlier, record));
                ColumnBalance::add(&mut balance, earlier, record, tolerance.columns);
            }
            None => comparison.added.push(record.case_id.clone()),
        }
    }
    if comparison.compared == 0 {
        return Err(CompareError::NothingInCommon { old: old.name.clone(), new: new.name.clone() });
    }
    let all = comparison.changes.len();
    comparison.changes.retain(|change| !change.is_within(tolerance.columns));
    comparison.within_tolerance = all - comparison.changes.len();
    comparison.changes.sort_by(|one, other| other.effect().total_cmp(&one.effect()));
    comparison.balance = ColumnBalance::finish(balance);
    let gone = old.records.iter().map(|record| &record.case_id).filter(|id| !after.contains(id.as_str()));
    comparison.gone = gone.cloned().collect();
    let both_timed = !old.timings.is_empty() && !new.timings.is_empty();
    if both_timed && old.machine != new.machine {
        comparison.times_left_out =
            Some(format!("times of '{}' and '{}' are not comparable", old.machine, new.machine));
    } else if both_timed {
        match judge_rows(&old.timings, &new.timings, &tolerance.times) {
            Ok(times) => comparison.times = by_effect(times),
            Err(error) if tolerance.demands_times => return Err(error.into()),
            Err(error) => comparison.times_left_out = Some(format!("times were not compared: {error}")),
        }
    }
    Ok(comparison)
}

/// Times, the largest effect first.
pub fn by_effect(mut times: Vec<TimeChange>) -> Vec<TimeChange> {
    times.sort_by(|one, other| other.ratio.ln().abs().total_cmp(&one.ratio.ln().abs()));
    times
}

/// A column of which less is better, over all cases that both runs completed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ColumnBalance {
    /// Which column.
    pub column: String,
    /// The geometric mean of new / old, over the cases in which both are above zero.
    #[serde(serialize_with = "digits::required")]
    pub mean_ratio: f64,
    /// Cases in which it got better.
    pub better: usize,
    /// Cases in which it got worse.
    pub worse: usize,
    /// Cases in which it is equal, or within the tolerance.
    pub equal: usize,
    #[serde(skip)]
    logarithms: f64,
    #[serde(skip)]
    ratios: usize,
}

impl ColumnBalance {
    /// Adds a case. One that did not complete in both runs is left out: the figures of half a run are smaller.
    fn add(all: &mut BTreeMap<&'static str, ColumnBalance>, old: &CaseRecord, new: &CaseRecord, tolerance: f64) {
        if [old, new].iter().any(|record| record.status != Status::Completed) {
            return;
        }
        let timed = new.clock == Some(DeviceClock::Wall);
        let (before, after) = (cells(old), cells(new));
        for column in LESS_IS_BETTER.into_iter().filter(|column| !(timed && column.ends_with("_ns"))) {
            let number = |cells: &BTreeMap<String, Value>| cells.get(column).and_then(Value::as_f64);
            let (Some(old), Some(new)) = (number(&before), number(&after)) else { continue };
            let balance = all.entry(column).or_default();
            match () {
                () if is_within(old, new, tolerance) => balance.equal += 1,
                () if new < old => balance.better += 1,
                () => balance.worse += 1,
            }
            if old > 0.0 && new > 0.0 {
                balance.logarithms += (new / old).ln();
                balance.ratios += 1;
            }
        }
    }

    /// The columns that changed in any case.
    fn finish(all: BTreeMap<&'static str, ColumnBalance>) -> Vec<ColumnBalance> {
        let named = |(column, balance): (&str, ColumnBalance)| {
            let mean_ratio = (balance.logarithms / balance.ratios.max(1) as f64).exp();
            ColumnBalance { column: column.to_owned(), mean_ratio, ..balance }
        };
        let mut changed: Vec<ColumnBalance> =
            all.into_iter().map(named).filter(|balance| balance.better + balance.worse > 0).collect();
        changed.sort_by(|one, other| other.mean_ratio.ln().abs().total_cmp(&one.mean_ratio.ln().abs()));
        changed
    }
}

/// Whether two numbers differ by no more than a share of the old one.
fn is_within(old: f64, new: f64, tolerance: f64) -> bool {
    (new - old).abs() <= tolerance * old.abs()
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

    /// How large the change is, whatever its direction. A status, or a number that was zero or unknown, has no ratio and
    /// comes first.
    fn effect(&self) -> f64 {
        match self.ratio() {
            Some(ratio) if ratio > 0.0 => ratio.ln().abs(),
            _ => f64::INFINITY,
        }
    }

    /// Whether both are numbers that differ by no more than this share.
    fn is_within(&self, tolerance: f64) -> bool {
        let numbers = self.old.as_f64().zip(self.new.as_f64());
        numbers.is_some_and(|(old, new)| is_within(old, new, tolerance))
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
const LESS_IS_BETTER: [&str; 15] = [
    "ooms",
    "needed_bytes",
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

/// Columns that older releases do not write, or that only some runs have: compared where both runs have a value.
const NOT_IN_EVERY_RUN: [&str; 4] = ["family", "split", "requests_hash", "needed_bytes"];

/// How cases end, the best first; being interrupted or skipped is neither.
const ENDINGS: [&str; 3] = ["completed", "oom", "error"];

/// Columns that say why, or where and when a row was measured: two runs may differ in them.
const NOT_COMPARED: [&str; 4] = ["reason", "commit", "device_name", "run_started"];

/// The columns that differ. On a real clock times differ from run to run, and so are not among them.
fn column_changes(old: &CaseRecord, new: &CaseRecord) -> Vec<ColumnChange> {
    let timed = new.clock == Some(DeviceClock::Wall);
    let is_left_out = |column: &str| NOT_COMPARED.contains(&column) || (timed && column.ends_with("_ns"));
    cells(old)
        .into_iter()
        .zip(cells(new))
        .filter(|((column, old), (_, new))| old != new && !is_left_out(column))
        .filter(|((column, old), (_, new))| !NOT_IN_EVERY_RUN.contains(&&**column) || !(old.is_null() || new.is_null()))
        .map(|((column, before), (_, after))| {
            let direction = direction(&column, &before, &after);
            ColumnChange { case_id: new.case_id.clone(), column, old: before, new: after, direction }
        })
        .collect()
}

/// Name and value of every column, in order of names.
fn cells(record: &CaseRecord) -> BTreeMap<String, Value> {
    match serde_json::to_value(record) {
        Ok(Value::Object(cells)) => cells.into_iter().collect(),
        _ => BTreeMap::new(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::CaseLabel;

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
        assert_eq!(compare(&old, &new, &Tolerance::default()).map(|found| found.compared), Ok(1));
        new.records[0].clock = Some(DeviceClock::Wall);
        let error = compare(&old, &new, &Tolerance::default()).unwrap_err();
        assert_eq!(error, CompareError::Clocks { simulated: "old".to_owned(), real: "new".to_owned() });
        assert_eq!(compare(&new, &old, &Tolerance::default()).unwrap_err(), error, "in whichever order");
        let error = compare(&old, &run("other", &["b"]), &Tolerance::default()).unwrap_err();
        assert_eq!(error.to_string(), "old and other have no case in common");
    }

    #[test]
    fn changes_are_sorted_by_effect_and_balanced_within_a_tolerance() {
        let (mut old, mut new) = (run("old", &["a", "b", "c"]), run("new", &["a", "b", "c"]));
        for (place, (before, after)) in [(1000, 1010), (1000, 2000), (1000, 500)].into_iter().enumerate() {
            old.records[place].peak_reserved_bytes = Some(before);
            new.records[place].peak_reserved_bytes = Some(after);
        }
        new.records[0].retries = Some(1);
        old.records[0].retries = Some(0);
        let found = compare(&old, &new, &Tolerance::default()).unwrap();
        let ratios: Vec<Option<f64>> = found.changes.iter().map(ColumnChange::ratio).collect();
        assert_eq!(ratios, [None, Some(2.0), Some(0.5), Some(1.01)]);
        let reserved = found.balance.iter().find(|row| row.column == "peak_reserved_bytes").unwrap();
        assert_eq!((reserved.better, reserved.worse, reserved.equal), (1, 2, 0));
        assert!((reserved.mean_ratio - 1.01_f64.powf(1.0 / 3.0)).abs() < 1e-12);
        let tolerant = Tolerance { columns: 0.02, ..Tolerance::default() };
        let found = compare(&old, &new, &tolerant).unwrap();
        assert_eq!((found.changes.len(), found.within_tolerance), (3, 1));
        let reserved = found.balance.iter().find(|row| row.column == "peak_reserved_bytes").unwrap();
        assert_eq!((reserved.better, reserved.worse, reserved.equal), (1, 1, 1));
    }

    #[test]
    fn cases_that_come_and_go_are_changes_and_no_regressions() {
        let found = compare(&run("old", &["a", "b"]), &run("new", &["b", "c"]), &Tolerance::default()).unwrap();
        let id = |workload: &str| run("", &[workload]).records[0].case_id.clone();
        assert_eq!((found.compared, &found.gone, &found.added), (1, &vec![id("a")], &vec![id("c")]));
        assert!(found.has_changes() && !found.has_regressions());
    }
}

#[cfg(test)]
mod columns_tests {
    use super::*;

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
    fn need_is_compared_where_both_runs_searched_it() {
        let with = |bytes| CaseRecord { needed_bytes: bytes, family: bytes.map(|_| "f".to_owned()), ..record() };
        assert_eq!(column_changes(&with(None), &with(Some(7))), []);
        let found = column_changes(&with(Some(7)), &with(Some(8)));
        assert_eq!((found.len(), found[0].direction), (1, ChangeDirection::Worse));
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
        let columns: Vec<String> = cells(&record()).into_keys().collect();
        for name in LESS_IS_BETTER {
            assert!(columns.iter().any(|column| column == name), "{name}");
        }
    }
}

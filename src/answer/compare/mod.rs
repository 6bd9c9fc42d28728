//! Two runs of the same cases against each other: what changed, what got worse, what is noise.
//!
//! Columns of `runs.csv` that do not come from a clock that anybody else can disturb must be equal to the byte
//! ([`columns`]); wall-clock times are compared by their passes with a rank test ([`times`]). Runs whose schemas or clocks
//! differ are refused: their numbers mean different things. Whoever asks has read the files; this room knows none.

pub mod columns;
pub mod times;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use columns::{Change, Direction};
pub use times::{TimeChange, TimeVerdict, Tolerance};

use crate::{
    device::Clock,
    measure::{CaseRecord, TimingRecord},
};

/// What one run left behind.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// What to call it.
    pub name: String,
    /// The version of its columns.
    pub schema: u32,
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
    /// The columns mean different things.
    #[error("{old} has schema {old_schema} and {new} has schema {new_schema}: their columns mean different things")]
    Schemas {
        /// One run.
        old: String,
        /// Its schema.
        old_schema: u32,
        /// The other.
        new: String,
        /// Its schema.
        new_schema: u32,
    },
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
    pub changes: Vec<Change>,
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
        self.changes.iter().any(|change| change.direction == Direction::Worse)
            || self.times.iter().any(|time| time.verdict == TimeVerdict::Slower)
    }

    /// Whether anything changed at all, for better or worse; noise is no change.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        let equal = |time: &TimeChange| time.verdict == TimeVerdict::Noise;
        !(self.changes.is_empty() && self.gone.is_empty() && self.added.is_empty() && self.times.iter().all(equal))
    }
}

/// Compares two runs, case by case in the order of the new one.
pub fn compare(old: &Run, new: &Run, tolerance: &Tolerance) -> Result<Comparison, CompareError> {
    refuse_strangers(old, new)?;
    let before: BTreeMap<&str, &CaseRecord> = by_id(&old.records);
    let after: BTreeSet<&str> = new.records.iter().map(|record| record.case_id.as_str()).collect();
    let mut comparison = Comparison::default();
    for record in &new.records {
        match before.get(record.case_id.as_str()) {
            Some(earlier) => {
                comparison.compared += 1;
                comparison.changes.extend(columns::changes(earlier, record));
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
        comparison.times = times::changes(&old.timings, &new.timings, tolerance);
    }
    Ok(comparison)
}

fn by_id(records: &[CaseRecord]) -> BTreeMap<&str, &CaseRecord> {
    records.iter().map(|record| (record.case_id.as_str(), record)).collect()
}

fn refuse_strangers(old: &Run, new: &Run) -> Result<(), CompareError> {
    if old.schema != new.schema {
        return Err(CompareError::Schemas {
            old: old.name.clone(),
            old_schema: old.schema,
            new: new.name.clone(),
            new_schema: new.schema,
        });
    }
    let runs_on = |run: &Run, clock| run.records.iter().any(|record| record.clock == Some(clock));
    for (simulated, real) in [(old, new), (new, old)] {
        if runs_on(simulated, Clock::Virtual) && runs_on(real, Clock::Wall) {
            return Err(CompareError::Clocks { simulated: simulated.name.clone(), real: real.name.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CaseLabel, Status};

    fn run(name: &str, workloads: &[&str]) -> Run {
        let record = |workload: &&str| {
            let label = CaseLabel { workload: (*workload).to_owned(), ..CaseLabel::default() };
            CaseRecord { clock: Some(Clock::Virtual), ..CaseRecord::unmeasured(&label, Status::Completed, "") }
        };
        Run { name: name.to_owned(), schema: 1, records: workloads.iter().map(record).collect(), ..Run::default() }
    }

    #[test]
    fn runs_of_other_schemas_or_clocks_or_cases_are_refused() {
        let (old, mut new) = (run("old", &["a"]), run("new", &["a"]));
        assert_eq!(compare(&old, &new, &Tolerance::default()).map(|found| found.compared), Ok(1));
        new.schema = 2;
        assert!(matches!(compare(&old, &new, &Tolerance::default()), Err(CompareError::Schemas { .. })));
        new.schema = 1;
        new.records[0].clock = Some(Clock::Wall);
        let error = compare(&old, &new, &Tolerance::default()).unwrap_err();
        assert_eq!(error, CompareError::Clocks { simulated: "old".to_owned(), real: "new".to_owned() });
        assert_eq!(compare(&new, &old, &Tolerance::default()).unwrap_err(), error, "in whichever order");
        let error = compare(&old, &run("other", &["b"]), &Tolerance::default()).unwrap_err();
        assert_eq!(error.to_string(), "old and other have no case in common");
    }

    #[test]
    fn cases_that_come_and_go_are_changes_and_no_regressions() {
        let found = compare(&run("old", &["a", "b"]), &run("new", &["b", "c"]), &Tolerance::default()).unwrap();
        let id = |workload: &str| run("", &[workload]).records[0].case_id.clone();
        assert_eq!((found.compared, &found.gone, &found.added), (1, &vec![id("a")], &vec![id("c")]));
        assert!(found.has_changes() && !found.has_regressions());
    }
}

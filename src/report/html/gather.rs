//! What a page is made from: the files of one run or of several.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::super::{Environment, ReportError, folder, rows};
use crate::{
    answer::{claims::ClaimRecord, techniques::TechniqueRecord, threshold::ThresholdRecord},
    measure::{CaseDetail, CaseRecord, TimingRecord},
};

/// A run, from its folder or still in memory.
#[derive(Debug, Default)]
pub struct Run {
    /// What tells it from others: the folder's name.
    pub name: String,
    /// Where and how it was made.
    pub environment: Environment,
    /// The rows of `runs.csv`.
    pub records: Vec<CaseRecord>,
    /// The rows of `timings.csv`.
    pub timings: Vec<TimingRecord>,
    /// The rows of `thresholds.csv`.
    pub thresholds: Vec<ThresholdRecord>,
    /// The rows of `techniques.csv`.
    pub techniques: Vec<TechniqueRecord>,
    /// The rows of `claims.csv`.
    pub claims: Vec<ClaimRecord>,
    /// Where the details of its cases are.
    pub details: Details,
}

/// Where the details of cases are.
#[derive(Debug)]
pub enum Details {
    /// In the folder of the run. A published folder has none.
    Folder(PathBuf),
    /// Here, by case.
    Held(BTreeMap<String, CaseDetail>),
}

impl Default for Details {
    fn default() -> Details {
        Details::Held(BTreeMap::new())
    }
}

impl Run {
    /// Reads all of a run's folder but the details of its cases, which are read one by one when they are needed.
    pub fn of_folder(path: &Path) -> Result<Run, ReportError> {
        let environment = folder::read_environment(path)?;
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(Run {
            name: whole.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            environment,
            records: rows::read_any_release(&path.join("runs.csv"))?,
            timings: rows::read_any_release(&path.join("timings.csv"))?,
            thresholds: rows::read_any_release(&path.join("thresholds.csv"))?,
            techniques: rows::read_any_release(&path.join("techniques.csv"))?,
            claims: rows::read_any_release(&path.join("claims.csv"))?,
            details: Details::Folder(path.to_owned()),
        })
    }

    /// The detail of a case; none where it was left out of the folder.
    fn detail(&self, case_id: &str) -> Result<Option<Cow<'_, CaseDetail>>, ReportError> {
        match &self.details {
            Details::Held(held) => Ok(held.get(case_id).map(Cow::Borrowed)),
            Details::Folder(path) if folder::has_detail(path, case_id) => {
                folder::read_detail(path, case_id).map(|detail| Some(Cow::Owned(detail)))
            }
            Details::Folder(_) => Ok(None),
        }
    }
}

/// Several runs as one.
pub(super) struct Gathered<'a> {
    pub(super) runs: &'a [Run],
    /// The rows of all runs, each case once. Cases that two runs tell differently are kept apart by the runs' names.
    pub(super) records: Vec<CaseRecord>,
    /// By case: which run it comes from, and its id there.
    origins: BTreeMap<String, (usize, String)>,
}

impl<'a> Gathered<'a> {
    pub(super) fn new(runs: &'a [Run]) -> Gathered<'a> {
        let mut gathered = Gathered { runs, records: Vec::new(), origins: BTreeMap::new() };
        for (number, run) in runs.iter().enumerate() {
            for record in &run.records {
                gathered.add(number, record);
            }
        }
        gathered
    }

    fn add(&mut self, run: usize, record: &CaseRecord) {
        let known = self.records.iter().find(|known| known.case_id == record.case_id);
        let mut own = record.clone();
        match known {
            Some(known) if known == record => return,
            Some(_) => {
                let name = &self.runs[run].name;
                own.suite = format!("{} ({name})", record.suite);
                own.case_id = format!("{} ({name})", record.case_id);
            }
            None => {}
        }
        self.origins.insert(own.case_id.clone(), (run, record.case_id.clone()));
        self.records.push(own);
    }

    /// What the case left behind beside its row.
    pub(super) fn detail(&self, case_id: &str) -> Result<Option<Cow<'a, CaseDetail>>, ReportError> {
        match self.origins.get(case_id) {
            Some((run, id)) => self.runs[*run].detail(id),
            None => Ok(None),
        }
    }

    pub(super) fn timings(&self) -> impl Iterator<Item = &'a TimingRecord> {
        self.runs.iter().flat_map(|run| &run.timings)
    }

    pub(super) fn thresholds(&self) -> Vec<&'a ThresholdRecord> {
        self.runs.iter().flat_map(|run| &run.thresholds).collect()
    }

    pub(super) fn techniques(&self) -> Vec<&'a TechniqueRecord> {
        self.runs.iter().flat_map(|run| &run.techniques).collect()
    }

    pub(super) fn claims(&self) -> Vec<&'a ClaimRecord> {
        self.runs.iter().flat_map(|run| &run.claims).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{CaseLabel, Status};

    fn run(name: &str, rows: &[(&str, u64)]) -> Run {
        let record = |&(workload, reserved): &(&str, u64)| {
            let label = CaseLabel { workload: workload.to_owned(), ..CaseLabel::default() };
            CaseRecord { peak_reserved_bytes: reserved, ..CaseRecord::unmeasured(&label, Status::Completed, "") }
        };
        Run { name: name.to_owned(), records: rows.iter().map(record).collect(), ..Run::default() }
    }

    #[test]
    fn shards_are_one_run_and_what_differs_is_kept_apart() {
        let runs = [run("one", &[("a", 1), ("b", 2)]), run("two", &[("b", 2), ("c", 3)]), run("three", &[("a", 9)])];
        let gathered = Gathered::new(&runs);
        let rows: Vec<_> = gathered.records.iter().map(|row| (row.workload.as_str(), row.suite.as_str())).collect();
        assert_eq!(rows, [("a", ""), ("b", ""), ("c", ""), ("a", " (three)")]);
    }
}

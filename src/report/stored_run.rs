//! A run folder, read and checked: what it holds, and what is missing.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use super::{
    Environment, PlannedCase, ReportError, folder,
    folder::FolderRecord,
    render::counted,
    rows::{self, CsvRow},
};
use crate::{
    answer::{claims::ClaimRecord, techniques::TechniqueRecord, threshold::ThresholdRecord},
    base::escaped,
    measure::{CaseRecord, TimingRecord},
};

/// More cases than this are counted, not named.
const MOST_NAMED: usize = 10;

/// The files of a run folder, finished or not. Rows of an older schema are converted. Files that were changed or damaged
/// cannot be read.
#[derive(Clone, Debug, Default)]
pub struct StoredRun {
    /// The folder.
    pub path: PathBuf,
    /// `env.json`.
    pub environment: Environment,
    /// `plan.csv`; older releases wrote it for shards only.
    pub plan: Option<Vec<PlannedCase>>,
    /// `runs.csv`.
    pub records: Vec<CaseRecord>,
    /// `timings.csv`.
    pub timings: Vec<TimingRecord>,
    /// `thresholds.csv`.
    pub thresholds: Vec<ThresholdRecord>,
    /// `techniques.csv`.
    pub techniques: Vec<TechniqueRecord>,
    /// `claims.csv`.
    pub claims: Vec<ClaimRecord>,
    /// Files whose last line was cut, and cases with two rows: one sentence each.
    pub defects: Vec<String>,
    /// Whether its release writes a plan for every run.
    needs_plan: bool,
}

impl StoredRun {
    /// Reads a folder.
    pub fn read(path: &Path) -> Result<StoredRun, ReportError> {
        let (environment, needs_plan) = folder::sealed_environment(path)?;
        let plan = PlannedCase::read(path)?;
        let mut defects = Vec::new();
        let mut run = StoredRun {
            path: path.to_owned(),
            environment,
            plan,
            records: read_rows(path, "runs.csv", &mut defects)?,
            timings: read_rows(path, "timings.csv", &mut defects)?,
            thresholds: read_rows(path, "thresholds.csv", &mut defects)?,
            techniques: read_rows(path, "techniques.csv", &mut defects)?,
            claims: read_rows(path, "claims.csv", &mut defects)?,
            defects,
            needs_plan,
        };
        let twice = repeated(run.ids());
        if !twice.is_empty() {
            run.defects.push(format!("there is more than one row for {}", named(&twice)));
        }
        Ok(run)
    }

    /// The ids of all rows, besides those of times.
    pub(super) fn ids(&self) -> Vec<String> {
        let cases = self.records.iter().map(|row| row.case_id.clone());
        let thresholds = self.thresholds.iter().map(|row| row.case_id.clone());
        let techniques = self.techniques.iter().map(FolderRecord::id);
        cases.chain(thresholds).chain(techniques).chain(self.claims.iter().map(FolderRecord::id)).collect()
    }

    /// Why this is not a complete run or shard, one sentence per reason. Without a plan, missing rows are not noticed.
    #[must_use]
    pub fn gaps(&self) -> Vec<String> {
        let mut gaps = self.defects.clone();
        let Some(plan) = &self.plan else {
            if self.needs_plan {
                gaps.push("plan.csv is missing, so missing rows cannot be noticed".to_owned());
            }
            return gaps;
        };
        let ids = self.ids();
        let rows: HashSet<&str> = ids.iter().map(String::as_str).collect();
        let own = self.environment.shard.map(|partition| partition.shard);
        let expected: Vec<&PlannedCase> = plan.iter().filter(|case| own.is_none() || case.shard == own).collect();
        let missing: Vec<String> = expected
            .iter()
            .filter(|case| !rows.contains(case.case_id.as_str()))
            .map(|case| case.case_id.clone())
            .collect();
        if !missing.is_empty() {
            let have = if missing.len() == 1 { "has" } else { "have" };
            let names = listed(&missing);
            gaps.push(format!(
                "{} of {} {have} no row{names}",
                missing.len(),
                counted(expected.len(), "case", "cases")
            ));
        }
        let planned: HashSet<&str> = plan.iter().map(|case| case.case_id.as_str()).collect();
        let unplanned: Vec<String> = ids.iter().filter(|id| !planned.contains(id.as_str())).cloned().collect();
        if !unplanned.is_empty() {
            gaps.push(format!("plan.csv does not have {}", named(&unplanned)));
        }
        gaps
    }
}

fn read_rows<T: CsvRow>(folder: &Path, name: &str, defects: &mut Vec<String>) -> Result<Vec<T>, ReportError> {
    let read = rows::read_any_release(&folder.join(name))?;
    if read.is_cut {
        defects.push(format!("the end of {name} is missing: its last line was cut and is left out"));
    }
    Ok(read.rows)
}

/// The names that are there more than once.
fn repeated(names: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    let mut twice: Vec<String> = names.into_iter().filter(|name| !seen.insert(name.clone())).collect();
    twice.dedup();
    twice
}

/// The number of cases and the first of their names.
pub(super) fn named(case_ids: &[String]) -> String {
    format!("{}{}", counted(case_ids.len(), "case", "cases"), listed(case_ids))
}

/// The first names, one per line.
fn listed(case_ids: &[String]) -> String {
    let shown = case_ids.iter().take(MOST_NAMED).map(|id| format!("\n  {}", escaped(id))).collect::<String>();
    let rest = match case_ids.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        rest => format!("\n  and {rest} more"),
    };
    shown + &rest
}

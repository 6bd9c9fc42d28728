//! The plan of a run: which cases it has and what they contain.
//!
//! Every run folder has its plan, so that missing rows are noticed and merging needs no suite.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::{
    ReportError,
    rows::{self, CsvTable},
};

/// A row of `plan.csv`, which lists every case of a run, in order. The folder of every shard has the whole plan.
///
/// An id names a case but does not determine it: a suite, a recipe or a recording may change under the same name. The
/// fingerprints tell two contents apart. Plans of older releases have none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedCase {
    /// The case.
    pub case_id: String,
    /// The shard that runs it, from 1; `None` if the run is not divided.
    pub shard: Option<u32>,
    /// A hash of its settings.
    #[serde(default)]
    pub settings_fingerprint: String,
    /// A hash of its recipe or of its trace file.
    #[serde(default)]
    pub source_fingerprint: String,
}

/// The fields of a case whose content is not that of another run, for messages.
const SETTINGS: &str = "its settings in the suite";
const SOURCE: &str = "its workload or trace file";

impl PlannedCase {
    /// What is not the same in another plan, where both plans say it.
    pub(super) fn difference(&self, other: &PlannedCase) -> Option<&'static str> {
        let differ = |one: &str, other: &str| !one.is_empty() && !other.is_empty() && one != other;
        if differ(&self.settings_fingerprint, &other.settings_fingerprint) {
            Some(SETTINGS)
        } else {
            differ(&self.source_fingerprint, &other.source_fingerprint).then_some(SOURCE)
        }
    }

    /// Writes the plan into a folder.
    pub(super) fn write(folder: &Path, plan: &[PlannedCase]) -> Result<(), ReportError> {
        rows::save(&folder.join("plan.csv"), rows::to_checked_csv(plan)?)
    }

    /// The plan of a folder, if it has one.
    pub(super) fn read(folder: &Path) -> Result<Option<Vec<PlannedCase>>, ReportError> {
        let path = folder.join("plan.csv");
        let Some(CsvTable { columns, records, is_cut }) = CsvTable::read(&path)? else { return Ok(None) };
        if is_cut {
            // It is written at once, so no crash can cut it.
            return Err(ReportError::ChangedFile { path });
        }
        records.iter().map(|record| rows::deserialized(&path, record, &columns)).collect::<Result<_, _>>().map(Some)
    }
}

/// Whether two plans distribute the same cases in the same way.
pub(super) fn has_same_cases(one: &[PlannedCase], other: &[PlannedCase]) -> bool {
    let key = |case: &PlannedCase| (case.case_id.clone(), case.shard);
    one.len() == other.len() && one.iter().map(key).eq(other.iter().map(key))
}

/// The cases of `plan` that have another content in `other`, each with what differs.
pub(super) fn different_cases<'a>(plan: &'a [PlannedCase], other: &[PlannedCase]) -> Vec<(&'a str, &'static str)> {
    let others: HashMap<&str, &PlannedCase> = other.iter().map(|case| (case.case_id.as_str(), case)).collect();
    let difference =
        |case: &'a PlannedCase| Some((case.case_id.as_str(), case.difference(others.get(case.case_id.as_str())?)?));
    plan.iter().filter_map(difference).collect()
}

/// The plan of a whole run that continues with `plan`: a run may grow by other filters, and forgets no case.
pub(super) fn grown(plan: &[PlannedCase], earlier: &[PlannedCase]) -> Vec<PlannedCase> {
    let known: HashSet<&str> = plan.iter().map(|case| case.case_id.as_str()).collect();
    let others = earlier.iter().filter(|case| !known.contains(case.case_id.as_str()));
    plan.iter().chain(others).cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn case(case_id: &str, shard: Option<u32>, settings: &str, source: &str) -> PlannedCase {
        PlannedCase {
            case_id: case_id.to_owned(),
            shard,
            settings_fingerprint: settings.to_owned(),
            source_fingerprint: source.to_owned(),
        }
    }

    #[test]
    fn plan_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(PlannedCase::read(folder.path()).unwrap(), None);
        let plan = [case("a,\"b\"\nc", Some(1), "1", "2"), case("d", None, "", "")];
        PlannedCase::write(folder.path(), &plan).unwrap();
        assert_eq!(PlannedCase::read(folder.path()).unwrap().unwrap(), plan);
        let path = folder.path().join("plan.csv");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert!(matches!(PlannedCase::read(folder.path()), Err(ReportError::ChangedFile { .. })));
        fs::write(&path, "case_id,shard\na,2\n").unwrap();
        let old = PlannedCase::read(folder.path()).unwrap().unwrap();
        assert_eq!(old, [case("a", Some(2), "", "")], "an older release wrote it");
    }

    #[test]
    fn other_contents_are_found() {
        let plan = [case("a", None, "1", "1"), case("b", None, "1", "1"), case("c", None, "1", "1")];
        let other = [case("c", None, "1", "2"), case("b", None, "3", "1"), case("a", None, "", "")];
        assert_eq!(different_cases(&plan, &other), [("b", SETTINGS), ("c", SOURCE)]);
        assert!(!has_same_cases(&plan, &other) && has_same_cases(&plan, &plan));
        assert!(!has_same_cases(&plan, &plan[..2]));
    }

    #[test]
    fn grown_plan_forgets_no_case() {
        let ids = |plan: &[PlannedCase]| plan.iter().map(|case| case.case_id.clone()).collect::<Vec<_>>();
        let (a, b, c) = (case("a", None, "", ""), case("b", None, "", ""), case("c", None, "", ""));
        assert_eq!(ids(&grown(&[c.clone(), a.clone()], &[a, b])), ["c", "a", "b"]);
    }
}

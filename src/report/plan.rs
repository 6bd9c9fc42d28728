//! `plan.csv` in the folder of a shard: every case of the whole run, in its order, and the shard that runs it.
//!
//! Whoever runs a shard writes it down; whoever merges shards learns from it what there must be, and needs to know
//! neither the suites nor the rule that cases were dealt out by.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    ReportError,
    rows::{self, RowFile},
};

/// A row of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedCase {
    /// Which case.
    pub case_id: String,
    /// Who runs it, from 1.
    pub shard: u32,
}

/// Makes sure that a folder, if it has a plan, has this one.
pub fn check_plan(folder: &Path, plan: &[PlannedCase]) -> Result<(), ReportError> {
    match read(folder)? {
        Some(there) if there != plan => Err(ReportError::OtherPlan { path: folder.to_owned() }),
        _ => Ok(()),
    }
}

/// Writes the plan into a folder.
pub fn write_plan(folder: &Path, plan: &[PlannedCase]) -> Result<(), ReportError> {
    RowFile::write(&place(folder), plan).map(drop)
}

/// The plan of a folder, if it has one.
pub(super) fn read(folder: &Path) -> Result<Option<Vec<PlannedCase>>, ReportError> {
    let path = place(folder);
    if path.is_file() { rows::read(&path).map(Some) } else { Ok(None) }
}

fn place(folder: &Path) -> PathBuf {
    folder.join("plan.csv")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_kept_and_another_one_refused() {
        let folder = tempfile::tempdir().unwrap();
        let case = |case_id: &str, shard| PlannedCase { case_id: case_id.to_owned(), shard };
        let plan = [case("a,\"b\"\nc", 1), case("d", 2)];
        check_plan(folder.path(), &plan).unwrap();
        write_plan(folder.path(), &plan).unwrap();
        check_plan(folder.path(), &plan).unwrap();
        assert_eq!(read(folder.path()).unwrap().unwrap(), plan);
        assert!(matches!(check_plan(folder.path(), &plan[..1]), Err(ReportError::OtherPlan { .. })));
    }
}

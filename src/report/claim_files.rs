//! The folder of a test of claims: `env.json`, `claims.csv`, `claims.md`.

use std::path::{Path, PathBuf};

use super::{
    Environment, ReportError,
    claim_table::claims_page,
    folder,
    rows::{self, RowFile},
};
use crate::answer::claims::ClaimRecord;

/// A folder that takes row by row: each is on disk before the next begins.
#[derive(Debug)]
pub struct ClaimFiles {
    folder: PathBuf,
    table: RowFile<ClaimRecord>,
    records: Vec<ClaimRecord>,
}

impl ClaimFiles {
    /// A new folder. One that holds a run already is refused.
    pub fn create(folder: &Path, environment: &Environment) -> Result<ClaimFiles, ReportError> {
        folder::begin(folder, environment)?;
        ClaimFiles::with(folder, Vec::new())
    }

    /// Goes on with a folder that holds some rows. One from another device or commit is refused.
    pub fn resume(folder: &Path, environment: &Environment) -> Result<ClaimFiles, ReportError> {
        folder::check_environment(folder, environment)?;
        ClaimFiles::with(folder, rows::read(&folder.join("claims.csv"))?)
    }

    /// The folder, with these rows and no others.
    pub(super) fn with(folder: &Path, records: Vec<ClaimRecord>) -> Result<ClaimFiles, ReportError> {
        let table = RowFile::write(&folder.join("claims.csv"), &records)?;
        Ok(ClaimFiles { folder: folder.to_owned(), table, records })
    }

    /// Whether the claim was tested.
    #[must_use]
    pub fn has(&self, id: &str) -> bool {
        self.records.iter().any(|record| record.id == id)
    }

    /// Adds a row.
    pub fn append(&mut self, record: &ClaimRecord) -> Result<(), ReportError> {
        self.table.append(record)?;
        self.records.push(record.clone());
        Ok(())
    }

    /// Puts the rows into order, writes the page, and returns the rows.
    pub fn finish(mut self, place: impl Fn(&ClaimRecord) -> usize) -> Result<Vec<ClaimRecord>, ReportError> {
        self.records.sort_by_key(place);
        RowFile::write(&self.folder.join("claims.csv"), &self.records)?;
        rows::replace(&self.folder.join("claims.md"), claims_page(&self.records).as_bytes())?;
        Ok(self.records)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::answer::claims::Verdict;

    #[test]
    fn what_was_tested_is_kept_and_put_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let row = |id: &str| ClaimRecord {
            id: id.to_owned(),
            verdict: Verdict::Depends,
            lesson: "Sometimes.".to_owned(),
            ..ClaimRecord::default()
        };
        let mut files = ClaimFiles::create(&path, &Environment::default()).unwrap();
        files.append(&row("second")).unwrap();
        drop(files);
        assert!(ClaimFiles::create(&path, &Environment::default()).is_err(), "a run is not written over");
        let mut files = ClaimFiles::resume(&path, &Environment::default()).unwrap();
        assert!(files.has("second") && !files.has("first"));
        files.append(&row("first")).unwrap();
        let records = files.finish(|record| usize::from(record.id != "first")).unwrap();
        assert_eq!(records.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["first", "second"]);
        let csv = fs::read_to_string(path.join("claims.csv")).unwrap();
        assert!(csv.lines().nth(1).unwrap().contains("first") && csv.contains("depends"), "{csv}");
        assert!(fs::read_to_string(path.join("claims.md")).unwrap().contains("**second**: Sometimes."));
    }
}

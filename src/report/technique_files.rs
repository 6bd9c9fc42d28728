//! The folder of a comparison of techniques: `env.json`, `techniques.csv`, `techniques.md`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Environment, ReportError, folder,
    rows::{self, RowFile},
    technique_table::techniques_page,
};
use crate::answer::techniques::TechniqueRecord;

/// A folder that takes row by row: each is on disk before the next begins.
#[derive(Debug)]
pub struct TechniqueFiles {
    folder: PathBuf,
    table: RowFile<TechniqueRecord>,
    records: Vec<TechniqueRecord>,
}

impl TechniqueFiles {
    /// A new folder. One that holds a run already is refused.
    pub fn create(folder: &Path, environment: &Environment) -> Result<TechniqueFiles, ReportError> {
        folder::begin(folder, environment)?;
        TechniqueFiles::with(folder, Vec::new())
    }

    /// Goes on with a folder that holds some rows. One from another device or commit is refused.
    pub fn resume(folder: &Path, environment: &Environment) -> Result<TechniqueFiles, ReportError> {
        folder::check_environment(folder, environment)?;
        let mut records: Vec<TechniqueRecord> = rows::read(&folder.join("techniques.csv"))?;
        records.retain(|record| record.status.is_final());
        TechniqueFiles::with(folder, records)
    }

    /// The folder, with these rows and no others.
    pub(super) fn with(folder: &Path, records: Vec<TechniqueRecord>) -> Result<TechniqueFiles, ReportError> {
        fs::create_dir_all(folder).map_err(ReportError::io(folder))?;
        let table = RowFile::write(&folder.join("techniques.csv"), &records)?;
        Ok(TechniqueFiles { folder: folder.to_owned(), table, records })
    }

    /// Whether the row is there.
    #[must_use]
    pub fn has(&self, model: &str, technique: &str) -> bool {
        self.records.iter().any(|record| record.model == model && record.technique == technique)
    }

    /// Adds a row.
    pub fn append(&mut self, record: &TechniqueRecord) -> Result<(), ReportError> {
        self.table.append(record)?;
        self.records.push(record.clone());
        Ok(())
    }

    /// Puts the rows into order, writes the page, and returns the rows.
    pub fn finish(mut self, place: impl Fn(&TechniqueRecord) -> usize) -> Result<Vec<TechniqueRecord>, ReportError> {
        self.records.sort_by_key(place);
        RowFile::write(&self.folder.join("techniques.csv"), &self.records)?;
        rows::replace(&self.folder.join("techniques.md"), techniques_page(&self.records).as_bytes())?;
        Ok(self.records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Status;

    #[test]
    fn what_is_there_is_not_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let row = |technique: &str| TechniqueRecord {
            model: "gpt".to_owned(),
            technique: technique.to_owned(),
            title: technique.to_owned(),
            status: Status::Completed,
            ..TechniqueRecord::default()
        };
        let mut files = TechniqueFiles::create(&path, &Environment::default()).unwrap();
        files.append(&row("amp")).unwrap();
        files.append(&TechniqueRecord { status: Status::Error, ..row("ckpt") }).unwrap();
        drop(files);
        assert!(TechniqueFiles::create(&path, &Environment::default()).is_err(), "a run is not written over");
        let mut files = TechniqueFiles::resume(&path, &Environment::default()).unwrap();
        assert!(files.has("gpt", "amp") && !files.has("gpt", "ckpt"));
        files.append(&row("base")).unwrap();
        let records = files.finish(|record| usize::from(record.technique != "base")).unwrap();
        assert_eq!(records[0].technique, "base");
        assert!(fs::read_to_string(path.join("techniques.md")).unwrap().contains("| amp"));
    }
}

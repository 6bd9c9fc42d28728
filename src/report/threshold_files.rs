//! `thresholds.csv` and `thresholds.json` of a run's folder.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{
    Medium, ReportError, rows,
    threshold_table::{thresholds, thresholds_csv, thresholds_json},
};
use crate::answer::threshold::{ThresholdDetail, ThresholdStatus};

/// The thresholds of a run. Both files are written anew after every case: there are few rows, and each takes a search.
#[derive(Debug)]
pub struct ThresholdFiles {
    folder: PathBuf,
    details: Vec<ThresholdDetail>,
}

/// `thresholds.json` as it is written.
#[derive(Deserialize)]
struct Written {
    rows: Vec<ThresholdDetail>,
}

impl ThresholdFiles {
    /// Those of a run's folder, with the answers that are there already and need not be searched for again.
    pub fn open(folder: &Path) -> Result<ThresholdFiles, ReportError> {
        let mut details = ThresholdFiles::read(folder)?;
        details.retain(|detail| {
            let broken = matches!(detail.record.status, ThresholdStatus::Interrupted | ThresholdStatus::Error);
            !broken
        });
        Ok(ThresholdFiles::with(folder, details))
    }

    /// Those of a run's folder, with these answers.
    pub(super) fn with(folder: &Path, details: Vec<ThresholdDetail>) -> ThresholdFiles {
        ThresholdFiles { folder: folder.to_owned(), details }
    }

    /// What a run's folder holds, finished or not.
    pub(super) fn read(folder: &Path) -> Result<Vec<ThresholdDetail>, ReportError> {
        let path = folder.join("thresholds.json");
        if !path.is_file() {
            return Ok(Vec::new());
        }
        let text = fs::read(&path).map_err(ReportError::io(&path))?;
        let written: Written = serde_json::from_slice(&text).map_err(ReportError::json(&path))?;
        Ok(written.rows)
    }

    /// The ids of the cases that are answered.
    #[must_use]
    pub fn completed_cases(&self) -> BTreeSet<String> {
        self.details.iter().map(|detail| detail.record.case_id.clone()).collect()
    }

    /// Adds an answer.
    pub fn append(&mut self, detail: ThresholdDetail) -> Result<(), ReportError> {
        self.details.push(detail);
        self.write()
    }

    /// Puts the rows into the order of `case_ids` and adds their table to `summary.md`. Returns them in that order.
    pub fn finish(mut self, case_ids: &[String]) -> Result<Vec<ThresholdDetail>, ReportError> {
        self.details.sort_by_key(|detail| case_ids.iter().position(|id| *id == detail.record.case_id));
        self.write()?;
        let path = self.folder.join("summary.md");
        let page = fs::read_to_string(&path).map_err(ReportError::io(&path))?;
        let table = thresholds(&self.details, Medium::Markdown);
        rows::replace(&path, format!("{page}\n## Thresholds\n\n{table}").as_bytes())?;
        Ok(self.details)
    }

    fn write(&self) -> Result<(), ReportError> {
        rows::replace(&self.folder.join("thresholds.json"), thresholds_json(&self.details).as_bytes())?;
        rows::replace(&self.folder.join("thresholds.csv"), thresholds_csv(&self.details)?.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::threshold::ThresholdRecord;

    fn detail(case_id: &str, status: ThresholdStatus) -> ThresholdDetail {
        let record = ThresholdRecord { case_id: case_id.to_owned(), status, ..ThresholdRecord::default() };
        ThresholdDetail { record, ..ThresholdDetail::default() }
    }

    #[test]
    fn what_is_answered_is_kept_and_what_broke_is_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = ThresholdFiles::open(folder.path()).unwrap();
        for (id, status) in
            [("b", ThresholdStatus::Found), ("c", ThresholdStatus::Error), ("d", ThresholdStatus::Interrupted)]
        {
            files.append(detail(id, status)).unwrap();
        }
        let mut again = ThresholdFiles::open(folder.path()).unwrap();
        assert_eq!(again.completed_cases().into_iter().collect::<Vec<_>>(), ["b"]);
        again.append(detail("a", ThresholdStatus::NeverFits)).unwrap();
        fs::write(folder.path().join("summary.md"), "# Run\n").unwrap();
        let details = again.finish(&["a".to_owned(), "b".to_owned()]).unwrap();
        let ids: Vec<&str> = details.iter().map(|detail| detail.record.case_id.as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
        let csv = fs::read_to_string(folder.path().join("thresholds.csv")).unwrap();
        assert_eq!(csv.lines().count(), 3);
        assert!(fs::read_to_string(folder.path().join("summary.md")).unwrap().contains("## Thresholds\n\n| source"));
    }
}

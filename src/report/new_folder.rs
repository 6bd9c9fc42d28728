//! Folders that are complete before they get their name.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

use super::ReportError;

/// The files of a run that comparisons need.
const COMPARED_FILES: [&str; 6] = ["env.json", "plan.csv", "runs.csv", "timings.csv", "thresholds.csv", "summary.md"];

/// Copies the files needed for comparisons to `place`, replacing the run there. The copy is
/// complete before it gets its name.
pub fn copy_run(folder: &Path, place: &Path) -> Result<(), ReportError> {
    // A run that cannot be read any more may be replaced; anything else may not.
    if place.exists() && !place.join("env.json").is_file() {
        return Err(ReportError::NoRun { path: place.to_owned() });
    }
    let copy = NewFolder::beside(place)?;
    for name in COMPARED_FILES {
        let from = folder.join(name);
        if from.is_file() {
            fs::copy(&from, copy.path.join(name)).map_err(ReportError::io(&from))?;
        }
    }
    loop {
        match fs::remove_dir_all(place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(ReportError::io(place)(error)),
            _ => {}
        }
        match fs::rename(&copy.path, place) {
            // Another process kept its run at this moment: the last one counts.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            renamed => return renamed.map_err(ReportError::io(place)),
        }
    }
}

/// A folder beside the one that it becomes when it is complete. Removed if it never does.
pub(super) struct NewFolder {
    pub(super) path: PathBuf,
}

impl NewFolder {
    /// Creates it. The parent of `place` is created too.
    pub(super) fn beside(place: &Path) -> Result<NewFolder, ReportError> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let path = place.with_file_name(format!(".{name}.new-{}", process::id()));
        // Left by a process of the same number that was killed.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(ReportError::io(&path))?;
        Ok(NewFolder { path })
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

//! A run folder has one writer, and a copy of one is complete before it gets its name.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    process,
};

use super::ReportError;

/// The lock of a run folder: nobody else writes into it until it is dropped.
///
/// The operating system locks the file `run.lock` and ends the lock with the process, so a crash leaves no lock behind. The
/// file is removed with the lock. On a file system without locks, the folder is used without one.
#[derive(Debug)]
pub(super) struct RunLock {
    path: PathBuf,
    /// Locked while it is open.
    _file: File,
}

impl RunLock {
    /// Locks an existing folder. A folder that another process writes is refused.
    pub(super) fn acquire(folder: &Path) -> Result<RunLock, ReportError> {
        let path = folder.join("run.lock");
        loop {
            let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = opened.map_err(ReportError::io(&path))?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    return Err(ReportError::Locked { path: folder.to_owned(), owner: owner(&mut file) });
                }
                // The file system has no locks.
                Err(TryLockError::Error(_)) => return Ok(RunLock { path, _file: file }),
                Ok(()) => {}
            }
            // The last owner may have removed the file after it was opened here: then somebody else may lock a new one.
            if is_at(&file, &path) {
                let _ = file.set_len(0).and_then(|()| write!(file, "{}", process::id()));
                return Ok(RunLock { path, _file: file });
            }
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // While it is still locked. A file that stays is locked by nobody and does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// The process that holds the lock, in words.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.take(20).read_to_string(&mut text));
    match (read, text.parse::<u32>()) {
        (Ok(_), Ok(process)) => format!("process {process}"),
        _ => "another process".to_owned(),
    }
}

/// Whether the open file is the one at the path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |one: fs::Metadata, other: fs::Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
    file.metadata().and_then(|one| fs::metadata(path).map(|other| same(one, other))).unwrap_or(false)
}

/// Other systems do not remove an open file.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

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

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use super::*;

    #[test]
    fn second_writer_is_refused_until_the_first_one_ends() {
        let folder = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(folder.path()).unwrap();
        let refusal = RunLock::acquire(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains(&format!("is being written by process {}", process::id())), "{refusal}");
        drop(lock);
        assert!(!folder.path().join("run.lock").exists());
        RunLock::acquire(folder.path()).unwrap();
    }

    #[test]
    fn lock_file_of_a_killed_process_does_not_matter() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("run.lock"), "123").unwrap();
        RunLock::acquire(folder.path()).unwrap();
    }

    /// Removing the file must not let two threads in.
    #[test]
    fn there_is_never_more_than_one_owner() {
        let folder = tempfile::tempdir().unwrap();
        let (owners, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if let Ok(lock) = RunLock::acquire(folder.path()) {
                            assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
                            taken.fetch_add(1, Ordering::SeqCst);
                            owners.fetch_sub(1, Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() > 0);
    }
}

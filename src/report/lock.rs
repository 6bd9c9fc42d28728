//! One writer per run folder.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{Read, Seek, Write},
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

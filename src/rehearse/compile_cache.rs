//! The folders in which torch.compile keeps what it compiled and measured, for one run.
//!
//! Inductor measures kernels when it compiles them for the first time and allocates for that, so the state of its cache
//! changes the recording. Times on the shadow GPU are simulated, and choices made by them must not reach a cache that a
//! GPU uses later. So a run has folders of its own, which are deleted at its end. They are empty, as on a new machine, unless
//! the user named a cache: then they begin as copies of it.

use std::{
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use serde::Serialize;

/// Where Inductor and Triton look for their folders.
const INDUCTOR: &str = "TORCHINDUCTOR_CACHE_DIR";
const TRITON: &str = "TRITON_CACHE_DIR";
/// Caches on servers. Without these variables PyTorch uses none.
const REMOTE: [&str; 4] = [
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
];
/// A larger cache is not copied.
const LARGEST_COPY: u64 = 4 << 30;

/// What Inductor's cache contained when the program began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "began_as", rename_all = "snake_case")]
pub enum CompileCacheState {
    /// Nothing.
    #[default]
    Empty,
    /// A copy of the user's.
    Copied {
        /// The user's folder.
        from: PathBuf,
        /// How many files it has.
        files: u64,
    },
    /// Nothing, because the user's could not be copied.
    NotCopied {
        /// The user's folder.
        from: PathBuf,
        /// Why.
        reason: String,
    },
    /// The program chose a folder itself.
    Chosen {
        /// Its folder.
        folder: PathBuf,
    },
}

/// The folders of one run.
#[derive(Debug)]
pub struct CompileCache {
    folder: PathBuf,
    state: CompileCacheState,
}

impl CompileCache {
    /// Makes the folders inside a folder of the run, with copies of the caches that the environment names.
    pub fn create(folder: &Path) -> io::Result<CompileCache> {
        CompileCache::with(folder, |name| env::var_os(name))
    }

    fn with(folder: &Path, variable: impl Fn(&str) -> Option<OsString>) -> io::Result<CompileCache> {
        let mut cache = CompileCache { folder: folder.to_owned(), state: CompileCacheState::Empty };
        for name in [INDUCTOR, TRITON] {
            let target = cache.path(name);
            fs::create_dir_all(&target)?;
            let Some(from) = variable(name).filter(|path| !path.is_empty()).map(PathBuf::from) else { continue };
            let state = match copy_within(&from, &target, LARGEST_COPY) {
                Ok(files) => CompileCacheState::Copied { from, files },
                Err(error) => {
                    let _ = fs::remove_dir_all(&target);
                    fs::create_dir_all(&target)?;
                    CompileCacheState::NotCopied { from, reason: error.to_string() }
                }
            };
            if name == INDUCTOR {
                cache.state = state;
            }
        }
        Ok(cache)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(if name == INDUCTOR { "inductor" } else { "triton" })
    }

    /// Lets a program use the folders.
    pub fn set(&self, command: &mut Command) {
        for name in [INDUCTOR, TRITON] {
            command.env(name, self.path(name));
        }
        for name in REMOTE {
            command.env_remove(name);
        }
    }

    /// What a program found there, if at its end it used this folder.
    #[must_use]
    pub fn state_for(&self, used: Option<&Path>) -> CompileCacheState {
        match used.filter(|&used| used != self.path(INDUCTOR)) {
            Some(other) => CompileCacheState::Chosen { folder: other.to_owned() },
            None => self.state.clone(),
        }
    }
}

/// Copies a folder that has no more than these bytes; the number of files. A folder that does not exist is empty.
fn copy_within(from: &Path, to: &Path, most_bytes: u64) -> io::Result<u64> {
    let (mut files, mut bytes) = (0, 0);
    let mut folders = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = folders.pop() {
        let entries = match fs::read_dir(&from) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        fs::create_dir_all(&to)?;
        for entry in entries {
            let entry = entry?;
            let (path, target) = (entry.path(), to.join(entry.file_name()));
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push((path, target));
            } else if kind.is_file() {
                bytes += entry.metadata()?.len();
                if bytes > most_bytes {
                    return Err(io::Error::other(format!("it is larger than {} GiB", most_bytes >> 30)));
                }
                fs::copy(path, target)?;
                files += 1;
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_empty() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CompileCache::with(folder.path(), |_| None).unwrap();
        let inductor = cache.path(INDUCTOR);
        assert_eq!(fs::read_dir(&inductor).unwrap().count(), 0);
        assert_eq!(cache.state_for(Some(&inductor)), CompileCacheState::Empty);
        let other = CompileCacheState::Chosen { folder: "/else".into() };
        assert_eq!(cache.state_for(Some(Path::new("/else"))), other);
    }

    #[test]
    fn a_named_cache_is_copied_and_never_written() {
        let (folder, user) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(user.path().join("ab")).unwrap();
        fs::write(user.path().join("ab/kernel.py"), "x").unwrap();
        let named = |name: &str| (name == INDUCTOR).then(|| user.path().as_os_str().to_owned());
        let cache = CompileCache::with(folder.path(), named).unwrap();
        let state = CompileCacheState::Copied { from: user.path().to_owned(), files: 1 };
        assert_eq!(cache.state_for(None), state);
        let copy = cache.path(INDUCTOR).join("ab/kernel.py");
        fs::write(&copy, "changed").unwrap();
        assert_eq!(fs::read_to_string(user.path().join("ab/kernel.py")).unwrap(), "x");
        let too_large = copy_within(user.path(), &folder.path().join("to"), 0).unwrap_err();
        assert!(too_large.to_string().contains("larger than"), "{too_large}");
    }

    #[test]
    fn a_named_cache_that_does_not_exist_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let cache = CompileCache::with(folder.path(), |_| Some(missing.clone().into_os_string())).unwrap();
        assert_eq!(cache.state_for(None), CompileCacheState::Copied { from: missing, files: 0 });
    }
}

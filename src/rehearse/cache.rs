//! The files that a rehearsal needs, in the user's cache: the core, the forwarders for one PyTorch, and the injected module.
//!
//! A folder is named by a hash of its contents, and its files are compared with what they must be before they are used. So
//! several programs and several versions can share the cache.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use oomph_shadow::{
    LIBRARY,
    forwarder::{CORE_SONAME, ForwarderError, ForwarderPlan},
    functions::family_of,
};

use super::needs::{CudaNeeds, NeedsError};
use crate::base::{fnv1a, write_file};

/// Injected by `PYTHONPATH`.
const MODULES: [(&str, &str); 5] = [
    ("sitecustomize.py", include_str!("python/sitecustomize.py")),
    ("_oomph_cudnn.py", include_str!("python/_oomph_cudnn.py")),
    ("_oomph_rehearsal.py", include_str!("python/_oomph_rehearsal.py")),
    ("_oomph_compile.py", include_str!("python/_oomph_compile.py")),
    ("_oomph_ranks.py", include_str!("python/_oomph_ranks.py")),
];

/// Why the files cannot be provided.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The needs of PyTorch cannot be read.
    #[error(transparent)]
    Needs(#[from] NeedsError),
    /// A library cannot be written.
    #[error(transparent)]
    Forwarder(#[from] ForwarderError),
    /// The cache cannot be written.
    #[error("{path}: {source}; XDG_CACHE_HOME names a folder that can be written", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A folder for files that can be made again.
#[derive(Clone, Debug)]
pub struct RehearsalCache {
    folder: PathBuf,
}

impl RehearsalCache {
    /// In the user's cache folder.
    #[must_use]
    pub fn inside(user_cache: &Path) -> RehearsalCache {
        RehearsalCache { folder: user_cache.join("oomph").join("rehearse") }
    }

    /// The folder of the injected module.
    pub fn python(&self) -> Result<PathBuf, CacheError> {
        let files = MODULES.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
        self.provide("python", &files)
    }

    /// The core, then a library for each of NVIDIA's that the PyTorch in this folder needs.
    pub fn libraries(&self, torch: &Path) -> Result<Vec<PathBuf>, CacheError> {
        let needs = CudaNeeds::of_torch(torch)?;
        let mut files = vec![(CORE_SONAME.to_owned(), LIBRARY.to_vec())];
        for (soname, needed) in &needs.libraries {
            let plan = ForwarderPlan::new(
                soname,
                needed,
                family_of(soname).into_iter().flat_map(|family| family.functions().map(|line| line.name)),
            );
            files.push((plan.soname().to_owned(), plan.write()?));
        }
        let loaded = files.len();
        // Triton links with `-lcuda`. It is not loaded under this name.
        if let Some((_, driver)) = files.iter().find(|(name, _)| name == "libcuda.so.1") {
            files.push(("libcuda.so".to_owned(), driver.clone()));
        }
        let folder = self.provide("lib", &files)?;
        Ok(files.iter().take(loaded).map(|(name, _)| folder.join(name)).collect())
    }

    /// Writes what is missing or differs; each file appears whole. Other processes may do the same at the same time.
    fn provide(&self, kind: &str, files: &[(String, Vec<u8>)]) -> Result<PathBuf, CacheError> {
        let all: Vec<u8> =
            files.iter().flat_map(|(name, bytes)| name.bytes().chain(fnv1a(bytes).to_le_bytes())).collect();
        let folder = self.folder.join(format!("{kind}-{:016x}", fnv1a(&all)));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CacheError::Io { path, source }
        };
        fs::create_dir_all(&folder).map_err(failed(&folder))?;
        for (name, bytes) in files {
            let path = folder.join(name);
            if fs::read(&path).ok().as_deref() != Some(bytes.as_slice()) {
                write_file(&path, bytes).map_err(failed(&path))?;
            }
        }
        Ok(folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_once_and_repaired() {
        let user = tempfile::tempdir().unwrap();
        let cache = RehearsalCache::inside(user.path());
        let folder = cache.python().unwrap();
        let file = folder.join("sitecustomize.py");
        let written = fs::metadata(&file).unwrap().modified().unwrap();
        assert_eq!(cache.python().unwrap(), folder);
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written, "it was not written again");
        fs::write(&file, "import evil").unwrap();
        cache.python().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), MODULES[0].1);
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named() {
        let user = tempfile::tempdir().unwrap();
        fs::write(user.path().join("oomph"), "a file").unwrap();
        let message = RehearsalCache::inside(user.path()).python().unwrap_err().to_string();
        assert!(message.contains("oomph/rehearse/python-") && message.contains("XDG_CACHE_HOME"), "{message}");
    }
}

//! Trace files in suites: found by pattern, and read when the first case needs them.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{SourceSpec, filter::glob};
use crate::trace::{EventReader, Source, SourceInfo, Trace, TraceError};

/// The files that a pattern means, by name: `*` in its last part stands for any run of characters.
pub(super) fn matching(pattern: &str) -> Vec<PathBuf> {
    let path = Path::new(pattern);
    let Some(last) = path.file_name().and_then(|name| name.to_str()).filter(|name| name.contains('*')) else {
        return if path.is_file() { vec![path.to_owned()] } else { Vec::new() };
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = entries
        .filter(|path| path.is_file())
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| glob(last, name)))
        .collect();
    found.sort();
    found
}

/// A trace file that is read once, by whoever needs it first, and kept: its cases are many, and decompressing takes
/// longer than replaying.
#[derive(Debug)]
pub(super) struct RecordedSource {
    spec: SourceSpec,
    name: String,
    read: OnceLock<Result<Trace, String>>,
}

impl RecordedSource {
    pub(super) fn new(path: &Path) -> RecordedSource {
        let spec = SourceSpec { name: path.display().to_string(), ..SourceSpec::default() };
        // As the file calls itself, up to the first dot: `train_base.pickle.xz` is `train_base`.
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = file.split('.').next().unwrap_or_default().to_owned();
        RecordedSource { spec, name, read: OnceLock::new() }
    }

    pub(super) fn spec(&self) -> &SourceSpec {
        &self.spec
    }

    fn trace(&self) -> Result<&Trace, TraceError> {
        let read = || -> Result<Trace, String> {
            let source = self.spec.open().map_err(|error| error.to_string())?;
            Trace::read(&*source).map_err(|error| error.to_string())
        };
        let failed =
            |reason: &String| TraceError::Format { path: PathBuf::from(&self.spec.name), reason: reason.clone() };
        self.read.get_or_init(read).as_ref().map_err(failed)
    }
}

impl Source for RecordedSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn info(&self) -> SourceInfo {
        match self.read.get() {
            Some(Ok(trace)) => trace.info(),
            _ => SourceInfo::default(),
        }
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        self.trace()?.open()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_pattern_in_order() {
        let found = matching("workloads/recorded/train_*.pickle.xz");
        assert!(found.len() > 3 && found.is_sorted(), "{found:?}");
        assert_eq!(matching("workloads/recorded/varlen.pickle.xz").len(), 1);
        assert!(matching("workloads/recorded/nothing-*.xz").is_empty() && matching("nowhere/*").is_empty());
    }

    #[test]
    fn a_recording_is_read_when_it_is_needed() {
        let source = RecordedSource::new(Path::new("workloads/recorded/varlen.pickle.xz"));
        assert_eq!((source.name(), source.info().events), ("varlen", None));
        let mut chunk = Vec::new();
        source.open().unwrap().read(&mut chunk).unwrap();
        assert!(!chunk.is_empty() && source.info().events > Some(1000));
        let missing = RecordedSource::new(Path::new("gone.pickle"));
        assert!(missing.open().err().unwrap().to_string().contains("gone.pickle: no such file"));
    }
}

//! What the cases of a suite tell: workloads by name, each with every seed, and trace files by path or pattern.
//!
//! Trace files are looked for in the current folder and read when the first case of theirs runs, so that a list of cases
//! costs nothing. `case` asks; a file that is not there is an error before anything runs, unless the suite came with the
//! binary and has other cases.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use super::{Group, SourceError, SourceSpec, SuiteError, SuiteFile, filter::glob};
use crate::{
    base::NoProgress,
    models::Recipe,
    trace::{EventReader, InitialLayout, Source, SourceInfo, Trace, TraceError},
};

/// A source with its identity.
pub(super) struct Story {
    pub(super) source: Arc<dyn Source>,
    pub(super) origin: SourceSpec,
}

/// Whether the name in a suite is that of a file: no workload has a separator in its name.
pub(super) fn is_path(name: &str) -> bool {
    name.contains('/')
}

impl Story {
    /// A workload with a seed; one that knows no chance has its own.
    pub(super) fn of_recipe(suite: &SuiteFile, group: &Group, recipe: &Recipe, seed: u64) -> Result<Story, SuiteError> {
        let workload = recipe.clone().seed(seed).workload().map_err(|source| suite.refuse(source))?;
        let origin = SourceSpec {
            name: recipe.name().to_owned(),
            set: group.set.iter().map(|(key, value)| (key.clone(), value.to_string())).collect(),
            seed: workload.seed(),
            device_index: None,
        };
        Ok(Story { source: Arc::new(workload), origin })
    }

    /// A trace file, which is the same with every seed.
    pub(super) fn of_file(path: &Path, seed: u64) -> Story {
        let origin = SourceSpec { name: path.to_string_lossy().into_owned(), seed, ..SourceSpec::default() };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Story { source: Arc::new(TraceFile { name, origin: origin.clone(), content: OnceLock::new() }), origin }
    }
}

/// No such file.
pub(super) fn nowhere(suite: &str, pattern: &str) -> SuiteError {
    SuiteError::NoTraceFile { suite: suite.to_owned(), pattern: pattern.to_owned() }
}

/// The files that a path means, in order: `*` in its last part stands for anything.
pub(super) fn files(suite: &str, pattern: &str) -> Result<Vec<PathBuf>, SuiteError> {
    let nowhere = || nowhere(suite, pattern);
    let path = Path::new(pattern);
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Err(nowhere());
    };
    let entries = fs::read_dir(folder).map_err(|_| nowhere())?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file() && path.file_name().is_some_and(|file| glob(name, &file.to_string_lossy())))
        .collect();
    found.sort();
    if found.is_empty() { Err(nowhere()) } else { Ok(found) }
}

/// A trace file that is read once, when somebody wants to know what is in it.
struct TraceFile {
    name: String,
    origin: SourceSpec,
    content: OnceLock<Result<Box<dyn Source>, String>>,
}

impl TraceFile {
    fn content(&self) -> Result<&dyn Source, &str> {
        let content = self.content.get_or_init(|| self.read().map_err(|error| error.to_string()));
        content.as_ref().map(|source| &**source).map_err(String::as_str)
    }

    /// A recording that begins in the middle stays as it is: a trace has no initial layout.
    fn read(&self) -> Result<Box<dyn Source>, SourceError> {
        let source = self.origin.open(&NoProgress)?;
        Ok(if source.initial_layout().is_some() { source } else { Box::new(Trace::read(&*source)?) })
    }
}

impl Source for TraceFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn info(&self) -> SourceInfo {
        self.content.get().and_then(|read| read.as_ref().ok()).map(|source| source.info()).unwrap_or_default()
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        self.content().ok()?.initial_layout()
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        match self.content() {
            Ok(source) => source.open(),
            Err(reason) => Err(TraceError::Format { path: self.origin.name.clone().into(), reason: reason.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{MIB, StreamId, TagId},
        measure::Status,
        suite::{CaseRunner, CaseSettings, InProcess},
        trace::TraceBuilder,
    };

    fn settings() -> CaseSettings {
        CaseSettings { device: "sim".parse().unwrap(), limit: None, seed: None, timeout: None }
    }

    fn suite(workloads: &str, more: &str) -> SuiteFile {
        let text = format!(
            "question = 'what?'\nseeds = [3, 4]\n[[group]]\nworkloads = [{workloads}]\nstrategies = ['direct']\n{more}\n"
        );
        SuiteFile::parse("mine", "mine.toml", &text).unwrap()
    }

    #[test]
    fn files_of_a_pattern_are_cases_in_order_and_read_when_they_run() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (name, mebibytes) in [("b.oomph", 4), ("a.oomph", 2)] {
            let mut story = TraceBuilder::new();
            story.alloc(mebibytes * MIB, StreamId::DEFAULT, TagId(0));
            crate::trace::write(&story.finish(name), at(name)).unwrap();
        }
        fs::write(at("c.oomph"), "no trace at all").unwrap();
        fs::write(at("other.txt"), "").unwrap();
        let pattern = format!("'{}', 'random'", at("*.oomph").display());
        let cases = suite(&pattern, "").cases(&settings()).unwrap();
        let seen: Vec<(&str, u64)> = cases.iter().map(|case| (&*case.label.workload, case.label.seed)).collect();
        assert_eq!(seen, [("a.oomph", 3), ("b.oomph", 3), ("c.oomph", 3), ("random", 3), ("random", 4)]);
        let records: Vec<_> = cases[..3].iter().map(|case| InProcess::default().run(case).record).collect();
        assert_eq!((records[0].peak_reserved_bytes, records[1].peak_reserved_bytes), (2 * MIB, 4 * MIB));
        assert_eq!(records[2].status, Status::Error, "a file that is no trace costs its case only");
        assert!(records[2].reason.contains("c.oomph"), "{}", records[2].reason);
    }

    #[test]
    fn a_pattern_that_matches_nothing_says_where_to_look() {
        for pattern in ["nowhere/*.pickle", "workloads/*.none"] {
            let error = suite(&format!("'{pattern}'"), "").cases(&settings()).err().unwrap().to_string();
            assert!(error.contains(pattern) && error.contains("current folder"), "{error}");
        }
    }

    #[test]
    fn a_suite_of_the_binary_goes_without_files_that_are_elsewhere_as_long_as_it_has_other_cases() {
        let embedded = |workloads| SuiteFile { is_embedded: true, ..suite(workloads, "") };
        let partly = embedded("'random', 'nowhere/*.pickle'");
        assert_eq!(partly.absent_files(), ["nowhere/*.pickle"]);
        assert_eq!(partly.cases(&settings()).unwrap().len(), 2, "random with two seeds");
        let nothing = embedded("'nowhere/*.pickle'").cases(&settings()).err().unwrap().to_string();
        assert!(nothing.contains("nowhere/*.pickle"), "{nothing}");
    }

    #[test]
    fn a_file_has_nothing_to_set() {
        let error = suite("'./Cargo.*'", "set = { batch = 2 }").cases(&settings()).err().unwrap();
        assert!(error.to_string().contains("Cargo.*"), "{error}");
    }
}

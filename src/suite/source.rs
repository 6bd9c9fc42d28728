//! What users name as SOURCE, and the sources of a suite's cases: a workload, a workload TOML, or a
//! trace file.
//!
//! A PyTorch snapshot is verified first, which finds the calls of `empty_cache` that the file
//! itself does not record.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use serde::{Deserialize, Serialize};

use super::{SuiteError, SuiteFile, SuiteGroup, rank_files::matching};
use crate::{
    base::{Bytes, MemoryLimit, NoProgress, PlacementCall, Progress, did_you_mean, path_text, text_path},
    device::{
        Device,
        sim::{SimConfig, SimConfigError, SimDevice},
    },
    measure::Split,
    models::{Recipe, WorkloadError, is_recipe_name},
    replay::verify::{Companion, CompanionError, RecordedConditions, Verdict, Verification, verify_recording},
    trace::{
        self, EventReader, InitialLayout, Source, TableFull, Trace, TraceError,
        torch::{self, GivenFacts, Recording},
    },
};

/// A source by name, with everything that determines its events, so that every process reads the
/// same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSpec {
    /// The name of a workload, or the path of a recipe or trace file as [`path_text`].
    pub name: String,
    /// Parameters of the workload beyond its recipe: key and value as users type them.
    pub set: Vec<(String, String)>,
    /// The seed of the workload.
    pub seed: u64,
    /// The GPU of a PyTorch snapshot; by default the first one with data.
    pub device_index: Option<u32>,
    /// What the user says about a PyTorch snapshot.
    #[serde(default)]
    pub given: GivenFacts,
}

/// A source that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The recipe or its parameters are wrong; boxed, because it is much larger than the other
    /// variants.
    #[error(transparent)]
    Workload(Box<WorkloadError>),
    /// The trace file cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The recording has more different sites, tags or streams than a trace can hold.
    #[error(transparent)]
    Tables(#[from] TableFull),
    /// The table beside a recording cannot be read.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The simulated device cannot be created.
    #[error(transparent)]
    Device(#[from] SimConfigError),
    /// It looks like a path, and no file is there.
    #[error("{name}: no such file{}", did_you_mean(suggestion.as_deref()))]
    NoSuchFile {
        /// The name.
        name: String,
        /// The file in that folder with the nearest name.
        suggestion: Option<String>,
    },
    /// It is a folder.
    #[error(
        "{0}: is a directory; name its files, such as {0}/*.pickle. advise, leaks, inspect and threshold take the folder as \
         the ranks of one program; `oomph report` and `oomph compare` take the folder of a run"
    )]
    Directory(String),
    /// A pipe, a socket or a device.
    #[error("{0}: this is not a plain file; a trace is read several times, so save it in a file first")]
    NotPlainFile(String),
    /// A folder or pattern without recordings.
    #[error("{0}: no recording there; a folder is searched for .pickle, .pkl and .oomph files, compressed or not")]
    NoRankFiles(String),
    /// Parameters for a trace file.
    #[error("--set changes workloads; '{0}' is a trace file")]
    NothingToSet(String),
    /// Options of a snapshot for something else.
    #[error("--device-index, --release and --settings are for PyTorch snapshots")]
    NotASnapshot,
}

impl From<WorkloadError> for SourceError {
    fn from(error: WorkloadError) -> SourceError {
        SourceError::Workload(Box::new(error))
    }
}

impl SourceSpec {
    /// Opens the source. Reports progress while it reads a recording.
    pub fn open(&self, progress: &dyn Progress) -> Result<Box<dyn Source>, SourceError> {
        match self.recipe()? {
            Some(_) if self.has_snapshot_options() => Err(SourceError::NotASnapshot),
            Some(recipe) => {
                let recipe = self.set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
                Ok(Box::new(recipe.seed(self.seed).workload()?))
            }
            None if !self.set.is_empty() => Err(SourceError::NothingToSet(self.shown())),
            None => Ok(match self.verified_recording(progress)? {
                Some((recording, _)) => recording.into_source(),
                None => trace::open(self.path(), progress)?,
            }),
        }
    }

    fn has_snapshot_options(&self) -> bool {
        self.device_index.is_some() || self.given != GivenFacts::default()
    }

    /// Whether it is a file with a PyTorch snapshot.
    pub fn is_snapshot(&self) -> Result<bool, SourceError> {
        let path = self.path();
        let is_recipe = path.extension().is_some_and(|extension| extension == "toml") || Recipe::is_config(&path);
        Ok(path.is_file() && !is_recipe && trace::recognise(path)?.name == torch::NAME)
    }

    /// The path that the name may be.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        text_path(&self.name)
    }

    /// The name for people.
    #[must_use]
    pub fn shown(&self) -> String {
        self.path().display().to_string()
    }

    /// The source for another thread: a workload with another seed.
    pub(super) fn copy_for(&self, thread: u16) -> Result<Arc<dyn Source>, SourceError> {
        let spec = SourceSpec { seed: self.seed.wrapping_add(thread.into()), ..self.clone() };
        Ok(Arc::from(spec.open(&NoProgress)?))
    }

    /// The source as a recording, if it is a PyTorch snapshot.
    pub fn recording(&self, progress: &dyn Progress) -> Result<Option<Recording>, SourceError> {
        Ok(self.verified_recording(progress)?.map(|(recording, _)| recording))
    }

    /// Like `recording`, with the result of verifying it.
    pub fn verified_recording(
        &self,
        progress: &dyn Progress,
    ) -> Result<Option<(Recording, Verification)>, SourceError> {
        self.verified_under(None, progress)
    }

    /// Like `verified_recording`, for a program that ran under a limit of `limit` bytes. Without it, the limit is that of
    /// the files beside the recording, or the one that the recording implies.
    pub fn verified_under(
        &self,
        limit: Option<u64>,
        progress: &dyn Progress,
    ) -> Result<Option<(Recording, Verification)>, SourceError> {
        let path = &*self.path();
        if !self.is_snapshot()? {
            return if self.has_snapshot_options() { Err(SourceError::NotASnapshot) } else { Ok(None) };
        }
        let companion = Companion::beside(path)?.unwrap_or_default();
        let given = companion.complete(&self.given);
        let mut recording = Recording::open_given(path, self.device_index, &given, progress)?;
        let device = SimDevice::new(SimConfig::default())?;
        let props = device.props();
        let limit = limit.map(|bytes| MemoryLimit::Size(Bytes(bytes)));
        let limit = limit.or(companion.limit(Some(recording.device)));
        let conditions = RecordedConditions { props, limit, counters: &companion.counters };
        let verification = verify_recording(&recording, &conditions, progress);
        recording.limit = verification.limit.clone();
        let mut recording = recording.with_release(verification.release.clone());
        recording = match verification.verdict {
            Verdict::Exact => recording
                .with_sizes_before(&verification.sizes_before)
                .with_pools(verification.pools.requests.clone(), &verification.pools.segments)
                .with_empty_caches(verification.empty_caches.clone(), progress)?,
            Verdict::Partial { .. } | Verdict::Diverged(_) => recording,
        };
        Ok(Some((recording, verification)))
    }

    /// Older names that the source uses: a sentence each, with the name to use.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let Ok(Some(recipe)) = self.recipe() else { return Vec::new() };
        self.set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value)).notes()
    }

    /// The recipe, or `None` if the source is a trace file. Does not open a trace.
    pub fn recipe(&self) -> Result<Option<Recipe>, SourceError> {
        let path = &*self.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            return Ok(Some(Recipe::from_file(path)?));
        }
        if path.is_file() && Recipe::is_config(path) {
            return Ok(Some(Recipe::from_config(path)?));
        }
        if path.is_file() {
            return Ok(None);
        }
        if path.is_dir() {
            return Err(SourceError::Directory(self.shown()));
        }
        if path.exists() {
            return Err(SourceError::NotPlainFile(self.shown()));
        }
        // Names may have a dot (`reference-gpt-1.4b`).
        if !is_recipe_name(&self.name) && (self.name.contains('/') || path.extension().is_some()) {
            return Err(SourceError::NoSuchFile { name: self.shown(), suggestion: nearest_file(path) });
        }
        Ok(Some(Recipe::named(&self.name)?))
    }
}

/// The families of the workloads and recordings of the repository: `source,family,split`. A source is the name of a workload,
/// or the path of a recording below `workloads/`.
const FAMILIES: &str = include_str!("../../suites/families.csv");

/// Which program a source is a variant of, and whether settings were chosen on it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SourceFamily {
    /// What the table calls the source.
    source: String,
    /// The program.
    pub family: String,
    /// Train or test; `None` for a source that the table does not have.
    pub split: Option<Split>,
}

impl SourceFamily {
    /// All rows of the table.
    fn all() -> &'static [SourceFamily] {
        static ROWS: OnceLock<Vec<SourceFamily>> = OnceLock::new();
        ROWS.get_or_init(|| {
            // A test reads the table strictly.
            csv::Reader::from_reader(FAMILIES.as_bytes()).into_deserialize().filter_map(Result::ok).collect()
        })
    }

    /// The family of a source with this name in tables. A source that the table does not have is a family of its own.
    pub(super) fn of(origin: &SourceSpec, workload: &str) -> SourceFamily {
        let is_recording = |row: &&SourceFamily| {
            row.source.contains('/') && origin.path().ends_with(Path::new("workloads").join(&row.source))
        };
        let is_recipe = |row: &&SourceFamily| row.source == origin.name;
        let known = match is_path(&origin.name) {
            true => SourceFamily::all().iter().find(is_recording),
            false => SourceFamily::all().iter().find(is_recipe),
        };
        known.cloned().unwrap_or_else(|| {
            let family = workload.split('[').next().unwrap_or(workload).to_owned();
            SourceFamily { source: origin.name.clone(), family, split: None }
        })
    }
}

/// Names that differ by more than this many letters are not suggested.
const MOST_TYPOS: usize = 2;

/// The file with the nearest name. Extensions are alike anyway, so differing letters are counted.
fn nearest_file(missing: &Path) -> Option<String> {
    // Numbers of descriptors are not typed by people.
    if missing.starts_with("/dev") {
        return None;
    }
    let folder = missing.parent().filter(|folder| *folder != Path::new(""));
    let files = fs::read_dir(folder.unwrap_or(Path::new("."))).ok()?;
    let typed = missing.file_name()?.to_string_lossy();
    let names = files.flatten().map(|file| file.file_name().to_string_lossy().into_owned());
    // A link to nothing has the name itself.
    let others = names.filter(|name| *name != typed);
    let (typos, name) = others.map(|name| (strsim::levenshtein(&typed, &name), name)).min()?;
    if typos > MOST_TYPOS {
        return None;
    }
    Some(folder.map_or_else(|| name.clone(), |folder| folder.join(&name).display().to_string()))
}

/// The source of a case, and how to find it again.
pub(super) struct CaseSource {
    pub(super) source: Arc<dyn Source>,
    pub(super) origin: SourceSpec,
}

/// Whether a name in a suite is a file: names of workloads have no separator.
pub(super) fn is_path(name: &str) -> bool {
    name.contains('/')
}

impl CaseSource {
    /// A workload with a seed. A deterministic workload has a fixed one.
    pub(super) fn of_recipe(
        suite: &SuiteFile,
        group: &SuiteGroup,
        recipe: &Recipe,
        seed: u64,
    ) -> Result<CaseSource, SuiteError> {
        let workload = recipe.clone().seed(seed).workload().map_err(|source| suite.refuse(source))?;
        let origin = SourceSpec {
            name: recipe.name.clone(),
            set: group.set.iter().map(|(key, value)| (key.clone(), value.to_string())).collect(),
            seed: workload.seed,
            ..SourceSpec::default()
        };
        Ok(CaseSource { source: Arc::new(workload), origin })
    }

    /// A trace file, for which the seed does not matter.
    pub(super) fn of_file(path: &Path, name: &str, seed: u64) -> CaseSource {
        let origin = SourceSpec { name: path_text(path), seed, ..SourceSpec::default() };
        let source = LazyTraceFile { name: name.to_owned(), origin: origin.clone(), content: OnceLock::new() };
        CaseSource { source: Arc::new(source), origin }
    }
}

/// The error for a pattern without files.
pub(super) fn no_trace_file(suite: &str, pattern: &str) -> SuiteError {
    SuiteError::NoTraceFile { suite: suite.to_owned(), pattern: pattern.to_owned() }
}

/// The files of a path in order; `*` stands for any characters of a name.
pub(super) fn files_of_pattern(suite: &str, pattern: &str) -> Result<Vec<PathBuf>, SuiteError> {
    let mut found: Vec<PathBuf> = matching(Path::new(pattern)).into_iter().map(|(_, path)| path).collect();
    found.retain(|path| path.is_file());
    found.sort();
    if found.is_empty() { Err(no_trace_file(suite, pattern)) } else { Ok(found) }
}

/// A trace file that is read once, at its first use, so that listing cases costs nothing.
struct LazyTraceFile {
    name: String,
    origin: SourceSpec,
    content: OnceLock<Result<Box<dyn Source>, String>>,
}

impl LazyTraceFile {
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

impl Source for LazyTraceFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn events(&self) -> Option<u64> {
        self.content.get()?.as_ref().ok()?.events()
    }

    fn initial_layout(&self) -> Option<InitialLayout> {
        self.content().ok()?.initial_layout()
    }

    fn uses_pools(&self) -> Result<bool, TraceError> {
        self.source()?.uses_pools()
    }

    fn placements(&self) -> Arc<[PlacementCall]> {
        self.content().map_or_else(|_| Arc::default(), Source::placements)
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        self.source()?.open()
    }
}

impl LazyTraceFile {
    fn source(&self) -> Result<&dyn Source, TraceError> {
        self.content().map_err(|reason| {
            let path = self.origin.path();
            // Most errors begin with the path, which this error adds.
            let reason = reason.strip_prefix(&format!("{}: ", path.display())).unwrap_or(reason).to_owned();
            TraceError::Format { path, reason }
        })
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

    fn family(name: &str, workload: &str) -> (String, Option<Split>) {
        let found = SourceFamily::of(&SourceSpec { name: name.to_owned(), ..SourceSpec::default() }, workload);
        (found.family, found.split)
    }

    #[test]
    fn variants_of_a_program_are_one_family() {
        let train = |family: &str| (family.to_owned(), Some(Split::Train));
        assert_eq!(family("random", "random[rounds=5]"), train("random"));
        assert_eq!(family("leak-outputs-fixed", "leak-outputs-fixed"), train("leak-outputs"));
        for name in ["varlen.pickle.xz", "varlen_cap042.exp.pickle.xz"] {
            assert_eq!(family(&format!("some/where/workloads/recorded/{name}"), name), train("variable-length"));
        }
        let recording = "workloads/recorded/programs/unet.pickle.xz";
        assert_eq!(family(recording, "unet.pickle.xz"), ("unet".to_owned(), Some(Split::Test)));
        assert_eq!(family("mine/unet.pickle.xz", "unet.pickle.xz"), ("unet.pickle.xz".to_owned(), None));
        assert_eq!(family("workloads/streams.toml", "streams[n=2]"), ("streams".to_owned(), None));
    }

    #[test]
    fn every_source_of_the_repository_has_a_family() {
        let rows: Vec<SourceFamily> =
            csv::Reader::from_reader(FAMILIES.as_bytes()).into_deserialize().collect::<Result<_, _>>().unwrap();
        let mut listed: Vec<&str> = rows.iter().map(|row| row.source.as_str()).collect();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads");
        let folder = |folder: &str| {
            let files = fs::read_dir(root.join(folder)).unwrap().map(|file| file.unwrap().file_name());
            files.map(|name| name.into_string().unwrap()).collect::<Vec<String>>()
        };
        let recipes = folder("").into_iter().filter_map(|name| Some(name.strip_suffix(".toml")?.to_owned()));
        let mut there: Vec<String> = recipes.collect();
        for place in ["recorded", "recorded/programs"] {
            let files = folder(place).into_iter().filter(|name| name.ends_with(".pickle.xz"));
            there.extend(files.map(|name| format!("{place}/{name}")));
        }
        let pools = ["graphed", "mempool", "settings_change"].map(|name| format!("recorded/pools/{name}.pickle.xz"));
        there.extend(pools);
        there.sort();
        listed.sort_unstable();
        assert_eq!(listed, there);
        for row in &rows {
            assert!(row.split.is_some(), "{}", row.source);
            let splits = rows.iter().filter(|other| other.family == row.family).map(|other| other.split);
            assert!(splits.into_iter().all(|split| split == row.split), "family '{}' is in both splits", row.family);
        }
    }

    #[test]
    fn pattern_files_are_read_when_they_run() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (name, mebibytes) in [("b.oomph", 4), ("a.oomph", 2)] {
            let mut builder = TraceBuilder::new();
            builder.alloc(mebibytes * MIB, StreamId::DEFAULT, TagId(0));
            crate::trace::write(&builder.finish(name), at(name)).unwrap();
        }
        fs::write(at("c.oomph"), "not a trace").unwrap();
        fs::write(at("other.txt"), "").unwrap();
        let pattern = format!("'{}', 'random'", at("*.oomph").display());
        let cases = suite(&pattern, "").cases(&settings()).unwrap();
        let seen: Vec<(&str, u64)> = cases.iter().map(|case| (&*case.label.workload, case.label.seed)).collect();
        assert_eq!(seen, [("a.oomph", 3), ("b.oomph", 3), ("c.oomph", 3), ("random", 3), ("random", 4)]);
        let records: Vec<_> = cases[..3].iter().map(|case| InProcess::default().run(case).record).collect();
        assert_eq!((records[0].peak_reserved_bytes, records[1].peak_reserved_bytes), (Some(2 * MIB), Some(4 * MIB)));
        assert_eq!(records[2].status, Status::Error, "an invalid file fails only its case");
        assert_eq!(records[2].reason.matches("c.oomph").count(), 1, "{}", records[2].reason);
    }

    #[test]
    fn pattern_without_files_is_an_error() {
        for pattern in ["nowhere/*.pickle", "workloads/*.none"] {
            let error = suite(&format!("'{pattern}'"), "").cases(&settings()).err().unwrap().to_string();
            assert!(error.contains(pattern) && error.contains("current folder"), "{error}");
        }
    }

    #[test]
    fn built_in_suite_skips_missing_files() {
        let embedded = |workloads| SuiteFile { is_embedded: true, ..suite(workloads, "") };
        let partly = embedded("'random', 'nowhere/*.pickle'");
        assert_eq!(partly.absent_files(), ["nowhere/*.pickle"]);
        assert_eq!(partly.cases(&settings()).unwrap().len(), 2, "random with two seeds");
        let nothing = embedded("'nowhere/*.pickle'").cases(&settings()).err().unwrap().to_string();
        assert!(nothing.contains("nowhere/*.pickle"), "{nothing}");
    }

    #[test]
    fn file_has_no_parameters() {
        let error = suite("'./Cargo.*'", "set = { batch = 2 }").cases(&settings()).err().unwrap();
        assert!(error.to_string().contains("Cargo.*"), "{error}");
    }
}

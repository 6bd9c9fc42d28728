//! A case: a workload, a strategy, a device, and everything else that decides what is measured. How
//! a suite unfolds into cases, how cases are chosen, and how a list of cases is identified.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::json;

use super::{
    CaseTimeout, NameSelection, SourceSpec, SuiteError, SuiteFile, SuiteGroup,
    case_names::{names_of_files, tell_apart},
    source::{CaseSource, files_of_pattern, is_path, no_trace_file},
};
use crate::{
    base::{MemoryLimit, fnv1a},
    device::DeviceSpec,
    measure::{CaseLabel, ThreadSharing, lifetimes},
    models::{Recipe, WorkloadError, recipe_names},
    plugin,
    replay::{OnOutOfMemory, Pace, Replay, ReplayOptions, verify::Companion},
    strategy::{STRATEGIES, StrategySpec},
    trace::{Source, Trace},
};

/// One case, ready to run. It is sent to a worker process as JSON, with everything by name.
#[derive(Clone, Serialize, Deserialize)]
pub struct Case {
    /// The identity of the case.
    pub label: CaseLabel,
    /// The events. A worker opens `origin` instead.
    #[serde(skip, default = "no_events")]
    pub source: Arc<dyn Source>,
    /// How another process finds the source.
    pub origin: SourceSpec,
    /// The strategy.
    pub strategy: StrategySpec,
    /// The device.
    #[serde(serialize_with = "device_to_text", deserialize_with = "device_from_text")]
    pub device: DeviceSpec,
    /// What to do when a request fails.
    pub on_out_of_memory: OnOutOfMemory,
    /// The times between events.
    pub pace: Pace,
    /// Whether only memory requests are carried out, without work.
    pub without_work: bool,
    /// Whether wall-clock times are measured too.
    pub timed: bool,
    /// What is measured. Left out of the JSON for a whole case, so that fingerprints of cases stay the same.
    #[serde(default, skip_serializing_if = "CaseScope::is_whole")]
    pub scope: CaseScope,
    /// The numbers of threads that share the strategy in further timings.
    pub threads: Vec<u16>,
    /// How they share it. The default is left out of the JSON, so that fingerprints of cases stay the same.
    #[serde(default, skip_serializing_if = "ThreadSharing::is_default")]
    pub sharing: ThreadSharing,
    /// The most blocks that its detail has in [`CaseDetail::lifetimes`](crate::measure::CaseDetail::lifetimes). The default
    /// is left out of the JSON, so that fingerprints of cases stay the same.
    #[serde(default = "usual_lives", skip_serializing_if = "is_usual_lives")]
    pub most_lives: usize,
    /// The time-out, which needs its own process and is watched by the parent.
    #[serde(skip)]
    pub timeout: Option<CaseTimeout>,
}

/// What is measured of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CaseScope {
    /// Its figures, and its wall-clock times if it is timed.
    #[default]
    Whole,
    /// One round of wall-clock times.
    Round,
    /// Single passes, whenever the parent asks for one; with several threads if the case has exactly one number of them.
    Turns,
}

impl CaseScope {
    fn is_whole(&self) -> bool {
        *self == CaseScope::Whole
    }
}

fn usual_lives() -> usize {
    lifetimes::MOST_LIVES
}

fn is_usual_lives(most: &usize) -> bool {
    *most == usual_lives()
}

fn no_events() -> Arc<dyn Source> {
    Arc::new(Trace::default())
}

fn device_to_text<S: Serializer>(device: &DeviceSpec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(device)
}

fn device_from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DeviceSpec, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

impl Case {
    /// A case without options: it stops at the first OOM and takes no times.
    pub fn new(label: CaseLabel, source: Arc<dyn Source>, strategy: StrategySpec, device: DeviceSpec) -> Case {
        Case {
            label,
            source,
            origin: SourceSpec::default(),
            strategy,
            device,
            on_out_of_memory: OnOutOfMemory::Stop,
            pace: Pace::Flat,
            without_work: false,
            timed: false,
            scope: CaseScope::Whole,
            threads: Vec::new(),
            sharing: ThreadSharing::default(),
            most_lives: usual_lives(),
            timeout: None,
        }
    }

    /// Its replay; `stop` ends it early.
    pub fn replay<'a>(&'a self, stop: Option<&'a AtomicBool>) -> Replay<'a> {
        let options = ReplayOptions {
            on_out_of_memory: self.on_out_of_memory,
            pace: self.pace,
            without_work: self.without_work,
            repeat: self.label.repeat,
            resumes: true,
            stop,
            ..ReplayOptions::default()
        };
        Replay::new(&*self.source)
            .strategy(self.strategy.clone())
            .device(self.device.clone())
            .limit(self.label.limit)
            .options(options)
    }
}

/// Settings from the command line for all cases of a suite.
#[derive(Clone, Debug)]
pub struct CaseSettings {
    /// The device.
    pub device: DeviceSpec,
    /// A limit for every case instead of the suite's.
    pub limit: Option<MemoryLimit>,
    /// A seed for every case instead of the suite's.
    pub seed: Option<u64>,
    /// A time-out for every case instead of the suite's.
    pub timeout: Option<CaseTimeout>,
}

/// The most cases of a suite. A small file can name more of them than fit into memory.
const MOST_CASES: usize = 200_000;

impl SuiteFile {
    /// All cases of the suite in a fixed order: groups, then workloads and trace files, strategies,
    /// limits and seeds. Their ids are different.
    pub fn cases(&self, settings: &CaseSettings) -> Result<Vec<Case>, SuiteError> {
        let mut cases = Vec::new();
        let mut planned = 0_usize;
        for group in &self.group {
            let strategies = self.strategies(group)?;
            let limits = self.limits(group, settings)?;
            let seeds = match settings.seed {
                Some(seed) => vec![seed],
                None => group.seeds.clone().unwrap_or_else(|| self.seeds.clone()),
            };
            let factors = [strategies.len(), limits.len(), seeds.len(), self.names(group).count()];
            planned = planned.saturating_add(factors.into_iter().fold(1, usize::saturating_mul));
            if planned > MOST_CASES {
                return Err(SuiteError::TooManyCases { suite: self.name.clone(), most: MOST_CASES });
            }
            for sources in self.sources(group, &seeds)? {
                for strategy in &strategies {
                    for &limit in &limits {
                        cases.extend(sources.iter().map(|source| self.case(group, source, strategy, limit, settings)));
                    }
                }
            }
        }
        if let (true, Some(pattern)) = (cases.is_empty(), self.absent_files().first()) {
            return Err(no_trace_file(&self.name, pattern));
        }
        let replaced = settings.limit.is_some() || settings.seed.is_some() || self.is_extended;
        tell_apart(&self.name, &mut cases, replaced)?;
        Ok(cases)
    }

    /// The limits of a group in bytes; `None` is no limit.
    fn limits(&self, group: &SuiteGroup, settings: &CaseSettings) -> Result<Vec<Option<u64>>, SuiteError> {
        let limits = match &settings.limit {
            Some(limit) => std::slice::from_ref(limit),
            None if group.limits.is_empty() => return Ok(vec![None]),
            None => &group.limits[..],
        };
        let refused = |source| SuiteError::Device { suite: self.name.clone(), source };
        limits.iter().map(|limit| settings.device.limit_bytes(*limit).map_err(refused)).collect()
    }

    /// Trace files of the suite that do not exist in the current folder. A built-in suite skips
    /// their cases if it has others; for other suites they are an error.
    pub fn absent_files(&self) -> Vec<&str> {
        let names = self.group.iter().flat_map(|group| self.names(group));
        names.filter(|name| is_path(name) && files_of_pattern(&self.name, name).is_err()).collect()
    }

    fn case(
        &self,
        group: &SuiteGroup,
        source: &CaseSource,
        strategy: &StrategySpec,
        limit: Option<u64>,
        settings: &CaseSettings,
    ) -> Case {
        Case {
            label: CaseLabel {
                suite: self.name.clone(),
                workload: source.source.name().to_owned(),
                strategy: strategy.to_string(),
                device: settings.device.to_string(),
                limit,
                seed: source.origin.seed,
                repeat: group.repeat,
            },
            origin: source.origin.clone(),
            source: Arc::clone(&source.source),
            strategy: strategy.clone(),
            device: settings.device.clone(),
            on_out_of_memory: group.on_oom,
            pace: Pace::Flat,
            without_work: !group.work,
            timed: group.timed,
            scope: CaseScope::Whole,
            threads: group.threads.clone(),
            sharing: group.sharing,
            most_lives: usual_lives(),
            timeout: settings.timeout.or(group.timeout).or(self.timeout),
        }
    }

    /// The sources of a group: every workload with every seed, and every trace file once.
    fn sources(&self, group: &SuiteGroup, seeds: &[u64]) -> Result<Vec<Vec<CaseSource>>, SuiteError> {
        let all_files = self.files();
        let file_names = names_of_files(&all_files);
        let mut sources = Vec::new();
        for name in self.names(group) {
            if is_path(name) {
                if !group.set.is_empty() {
                    return Err(SuiteError::NothingToSet { suite: self.name.clone(), path: name.to_owned() });
                }
                let seed = seeds.first().copied().unwrap_or_default();
                let files = match files_of_pattern(&self.name, name) {
                    Err(_) if self.is_embedded => Vec::new(),
                    found => found?,
                };
                // A file that appeared a moment ago has no name yet.
                let name =
                    |path: &PathBuf| file_names.get(&**path).cloned().unwrap_or_else(|| path.display().to_string());
                sources.extend(files.iter().map(|path| vec![CaseSource::of_file(path, &name(path), seed)]));
            } else {
                let recipe = self.recipe(group, name)?;
                let with_seed = |&seed: &u64| CaseSource::of_recipe(self, group, &recipe, seed);
                sources.push(seeds.iter().map(with_seed).collect::<Result<_, _>>()?);
            }
        }
        Ok(sources)
    }

    /// The trace files of all groups.
    fn files(&self) -> BTreeSet<PathBuf> {
        let names = self.group.iter().flat_map(|group| self.names(group)).filter(|name| is_path(name));
        names.flat_map(|name| files_of_pattern(&self.name, name).unwrap_or_default()).collect()
    }

    fn strategies(&self, group: &SuiteGroup) -> Result<Vec<StrategySpec>, SuiteError> {
        let specs: Vec<StrategySpec> = match &group.strategies {
            NameSelection::All(_) => STRATEGIES.iter().flat_map(|entry| entry.specs()).collect(),
            NameSelection::Names(names) => names.iter().map(|name| StrategySpec::from(name.as_str())).collect(),
        };
        // The base is checked too, because the comparison needs it.
        let base = StrategySpec::from(self.base.as_str());
        for spec in specs.iter().chain([&base]) {
            plugin::check(spec).map_err(|source| SuiteError::Strategy { suite: self.name.clone(), source })?;
        }
        Ok(specs)
    }

    /// The workloads of all groups with their parameters.
    pub fn models(&self) -> Result<Vec<Recipe>, SuiteError> {
        let named = self.group.iter().flat_map(|group| self.names(group).map(move |name| (group, name)));
        let models = named.map(|(group, name)| self.recipe(group, name)).collect::<Result<Vec<_>, _>>()?;
        let mut known = BTreeSet::new();
        match models.iter().map(Recipe::title).find(|title| !known.insert(title.clone())) {
            None => Ok(models),
            Some(model) => Err(SuiteError::DuplicateModel { suite: self.name.clone(), model }),
        }
    }

    fn names<'a>(&self, group: &'a SuiteGroup) -> impl Iterator<Item = &'a str> {
        let names: Vec<&str> = match &group.workloads {
            NameSelection::All(_) => recipe_names().collect(),
            NameSelection::Names(names) => names.iter().map(String::as_str).collect(),
        };
        names.into_iter().filter(|name| !group.except.iter().any(|pattern| glob(pattern, name)))
    }

    fn recipe(&self, group: &SuiteGroup, name: &str) -> Result<Recipe, SuiteError> {
        let recipe = Recipe::named(name).map_err(|source| self.refuse(source))?;
        Ok(group.set.iter().fold(recipe, |recipe, (key, value)| recipe.with_value(key, value.clone())))
    }

    pub(super) fn refuse(&self, source: WorkloadError) -> SuiteError {
        SuiteError::Workload { suite: self.name.clone(), source: Box::new(source) }
    }
}

/// What a case contains, as two hashes. An id names a case but does not determine it: another machine, or the same one on
/// another day, may have another suite, recipe or recording of the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaseFingerprint {
    /// A hash of its settings. A time-out does not change the row of a case that ends in time, so it is not part of them.
    pub settings: String,
    /// A hash of its recipe, or of all bytes of its trace file.
    pub source: String,
}

/// The fingerprints of cases, in order. Every trace file is read once.
pub fn fingerprints(cases: &[Case]) -> Vec<CaseFingerprint> {
    let mut sources: HashMap<&str, String> = HashMap::new();
    let mut all = Vec::with_capacity(cases.len());
    for case in cases {
        let source = sources.entry(&case.origin.name).or_insert_with(|| source_fingerprint(&case.origin)).clone();
        all.push(CaseFingerprint { settings: fingerprint(json!(case).to_string().as_bytes()), source });
    }
    all
}

/// A hash for `plan.csv`.
pub fn fingerprint(bytes: &[u8]) -> String {
    format!("{:016x}", fnv1a(bytes))
}

/// The fingerprint of a source. Empty if it cannot be read; the case itself reports the error.
fn source_fingerprint(origin: &SourceSpec) -> String {
    match origin.recipe() {
        Ok(Some(recipe)) => fingerprint(recipe.words().as_bytes()),
        Ok(None) => file_fingerprint(&origin.path()).unwrap_or_default(),
        Err(_) => String::new(),
    }
}

/// A hash of the bytes of a trace file and of its row in the table beside it, which says under which limit it was recorded.
fn file_fingerprint(path: &Path) -> io::Result<String> {
    let (mut file, mut checksum) = (fs::File::open(path)?, flate2::Crc::new());
    let (mut buffer, mut bytes) = (vec![0; 1 << 16], 0_u64);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => {
                checksum.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
    let beside = Companion::beside(path).ok().flatten();
    Ok(fingerprint(format!("{bytes} {:08x} {beside:?}", checksum.sum()).as_bytes()))
}

/// Chooses cases by their id.
///
/// A pattern is a part of the id, or a glob over the whole id if it contains `*`. A case is chosen
/// if any `only` pattern matches, or there is none, and no `skip` pattern does.
#[derive(Clone, Debug, Default)]
pub struct CaseFilter {
    /// Only these.
    pub only: Vec<String>,
    /// Without these.
    pub skip: Vec<String>,
    /// Patterns must equal the whole id.
    pub exact: bool,
}

impl CaseFilter {
    /// Whether the case is chosen.
    pub fn takes(&self, case_id: &str) -> bool {
        let matches = |pattern: &String| self.matches(pattern, case_id);
        (self.only.is_empty() || self.only.iter().any(matches)) && !self.skip.iter().any(matches)
    }

    fn matches(&self, pattern: &str, case_id: &str) -> bool {
        if self.exact {
            pattern == case_id
        } else if pattern.contains('*') {
            glob(pattern, case_id)
        } else {
            case_id.contains(pattern)
        }
    }
}

/// Whether `text` matches `pattern`, in which `*` stands for any characters.
pub(super) fn glob(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let Some((last, middle)) = pieces.split_last() else { return rest.is_empty() };
    for piece in middle {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::test_case;

    fn of(case: Case) -> CaseFingerprint {
        fingerprints(&[case]).remove(0)
    }

    #[test]
    fn fingerprint_depends_on_settings() {
        let case = || test_case("checkerboard", "caching");
        let known = of(case());
        assert_eq!(of(case()), known);
        assert_eq!(of(Case { timeout: Some("1s".parse().unwrap()), ..case() }), known, "a time-out changes no row");
        let skipping = of(Case { on_out_of_memory: OnOutOfMemory::Skip, ..case() });
        assert!(skipping.settings != known.settings && skipping.source == known.source);
        assert_ne!(of(test_case("random", "caching")).source, known.source);
    }

    #[test]
    fn fingerprint_depends_on_sources() {
        let folder = tempfile::tempdir().unwrap();
        let with = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::write(&path, text).unwrap();
            let origin = SourceSpec { name: path.display().to_string(), ..SourceSpec::default() };
            of(Case { origin, ..test_case("random", "caching") }).source
        };
        let recipe = |rest: &str| format!("generator = 'checkerboard'\npurpose = 'Mine.'\norigin = 'here'\n{rest}");
        let plain = with("mine.toml", &recipe(""));
        assert_ne!(with("mine.toml", &recipe("set = { rounds = 2 }\n")), plain);
        assert_eq!(with("mine.toml", &recipe("# a note\n")), plain);
        let trace = with("mine.oomph", "oomph-trace 1\nalloc 1 512\n");
        assert_eq!(with("mine.oomph", "oomph-trace 1\nalloc 1 512\n"), trace);
        assert_ne!(with("mine.oomph", "oomph-trace 1\nalloc 1 513\n"), trace, "the same length is not enough");
    }

    fn takes(only: &[&str], skip: &[&str], exact: bool, id: &str) -> bool {
        let own = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
        CaseFilter { only: own(only), skip: own(skip), exact }.takes(id)
    }

    #[test]
    fn words_globs_and_exact_ids() {
        let id = "quick/random/caching@sim:h200#1";
        assert!(takes(&[], &[], false, id));
        assert!(takes(&["random"], &[], false, id));
        assert!(takes(&["quick/*/caching*"], &[], false, id));
        assert!(!takes(&["*/direct*"], &[], false, id));
        assert!(!takes(&["quick/*/caching"], &[], false, id), "a glob covers the whole id");
        assert!(!takes(&["random"], &["caching"], false, id));
        assert!(takes(&[id], &[], true, id));
        assert!(!takes(&["random"], &[], true, id));
    }

    #[test]
    fn glob_uses_a_character_once() {
        assert!(!glob("ab*ba", "aba"));
        assert!(glob("ab*ba", "abba"));
    }
}

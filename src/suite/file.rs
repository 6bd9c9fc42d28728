//! The TOML file of a suite.
//!
//! Suites in `suites/` are built into the binary. A file of the same name in `suites/` of the
//! current folder takes precedence.

use std::{fmt, path::Path, str::FromStr, time::Duration};

use serde::Deserialize;

use super::SuiteError;
use crate::{
    base::{Catalog, CatalogEntry, MemoryLimit, parse_toml, read_text_file, text_path},
    measure::ThreadSharing,
    replay::OnOutOfMemory,
};

/// The built-in suites and those of the current folder.
const CATALOG: Catalog = Catalog { folder: "suites", built_in: include!(concat!(env!("OUT_DIR"), "/suites.rs")) };

/// A suite: a question, and the groups of cases that answer it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteFile {
    /// The name of the file.
    #[serde(skip)]
    pub name: String,
    /// Whether it is built in; its trace files may then be missing.
    #[serde(skip)]
    pub is_embedded: bool,
    /// Whether strategies were added: groups that divided the strategies of a workload then have the same case.
    #[serde(skip)]
    pub is_extended: bool,
    /// The question that the suite answers, in one line.
    pub question: String,
    /// What is measured of every case.
    #[serde(default)]
    pub kind: SuiteKind,
    /// The strategy that ratios in the comparison refer to.
    #[serde(default = "default_base")]
    pub base: String,
    /// The seeds of groups that have none.
    #[serde(default = "default_seeds")]
    pub seeds: Vec<u64>,
    /// Whether the least memory in which each case completes is searched too (`needed_bytes`).
    #[serde(default)]
    pub need: bool,
    /// The time-out of cases whose group has none.
    pub timeout: Option<CaseTimeout>,
    /// The groups; each is a matrix. A suite of claims has none, because its cases are the claims.
    #[serde(default)]
    pub group: Vec<SuiteGroup>,
}

/// What is measured of the cases of a suite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SuiteKind {
    /// Each case is run and measured.
    #[default]
    Run,
    /// How much memory suffices: each case is run under many limits.
    Threshold,
    /// What memory-saving techniques save and cost on the suite's models.
    Techniques,
    /// Whether published claims are true.
    Claims,
}

impl SuiteKind {
    /// Whether it has its own table instead of cases of workload and strategy.
    pub const fn has_own_table(self) -> bool {
        matches!(self, SuiteKind::Techniques | SuiteKind::Claims)
    }
}

/// A matrix of cases: every workload with every strategy, limit and seed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteGroup {
    /// Names of workloads, paths of trace files (`*` stands for any characters of a part), or `"all"`
    /// workloads.
    pub workloads: NameSelection,
    /// Workloads to leave out of `"all"`; `*` stands for any characters.
    #[serde(default)]
    pub except: Vec<String>,
    /// Strategies with parameters, or `"all"`; none in a suite of techniques.
    #[serde(default)]
    pub strategies: NameSelection,
    /// What the process may take: sizes such as "6GiB", or fractions of the device such as 0.5; no limit if empty.
    #[serde(default)]
    pub limits: Vec<MemoryLimit>,
    /// Seeds of this group.
    pub seeds: Option<Vec<u64>>,
    /// Parameters of the workloads.
    #[serde(default)]
    pub set: toml::Table,
    /// How often each trace runs in succession.
    #[serde(default = "one")]
    pub repeat: u32,
    /// What to do when a request fails.
    #[serde(default)]
    pub on_oom: OnOutOfMemory,
    /// Whether work is carried out; otherwise only memory requests are, and streams stay idle.
    #[serde(default = "yes")]
    pub work: bool,
    /// Whether wall-clock times are measured too; such cases run alone.
    #[serde(default)]
    pub timed: bool,
    /// Numbers of threads that share the strategy in further timings of timed cases.
    #[serde(default)]
    pub threads: Vec<u16>,
    /// How those threads share it.
    #[serde(default)]
    pub sharing: ThreadSharing,
    /// The time-out of each case of this group.
    pub timeout: Option<CaseTimeout>,
}

/// A list of names, or all.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "write \"all\" or a list of names")]
pub enum NameSelection {
    /// All registered ones.
    All(AllWord),
    /// Those with these names.
    Names(Vec<String>),
}

/// The word `"all"` in a suite file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AllWord {
    /// It.
    All,
}

impl Default for NameSelection {
    fn default() -> Self {
        NameSelection::Names(Vec::new())
    }
}

impl SuiteFile {
    /// The names of the built-in suites.
    pub fn embedded() -> impl Iterator<Item = &'static str> {
        CATALOG.built_in_names()
    }

    /// Whether `suites/` of the current folder has a suite of this name.
    #[must_use]
    pub fn is_in_current_folder(name: &str) -> bool {
        CATALOG.own_file(name).is_some()
    }

    /// The built-in suites and those in `suites/` of the current folder.
    pub fn all_named() -> Vec<CatalogEntry> {
        CATALOG.all()
    }

    /// The suite of that name, or the file at that path (a text that ends in `.toml` or has a
    /// separator). For a name `suites/NAME.toml` takes precedence over the built-in suite.
    pub fn load(name_or_path: &str) -> Result<SuiteFile, SuiteError> {
        if name_or_path.ends_with(".toml") || name_or_path.contains('/') {
            return SuiteFile::from_file(&text_path(name_or_path));
        }
        let name = name_or_path;
        if let Some(path) = CATALOG.own_file(name) {
            return SuiteFile::from_file(&path);
        }
        let Some(text) = CATALOG.built_in_text(name) else {
            let (suggestion, known) = CATALOG.nearest_and_all(name);
            return Err(SuiteError::UnknownSuite { name: name.to_owned(), suggestion, known });
        };
        let suite = SuiteFile::parse(name, &format!("suites/{name}.toml"), text)?;
        Ok(SuiteFile { is_embedded: true, ..suite })
    }

    /// The suite with this strategy only.
    #[must_use]
    pub fn with_only(mut self, strategy: &str) -> SuiteFile {
        self.is_extended = true;
        for group in &mut self.group {
            group.strategies = NameSelection::Names(vec![strategy.to_owned()]);
        }
        self
    }

    /// Adds strategies to every group, after its own ones.
    pub fn add_strategies(&mut self, added: &[String]) {
        self.is_extended |= !added.is_empty();
        for group in &mut self.group {
            if let NameSelection::Names(names) = &mut group.strategies {
                for name in added {
                    if !names.contains(name) {
                        names.push(name.clone());
                    }
                }
            }
        }
    }

    fn from_file(path: &Path) -> Result<SuiteFile, SuiteError> {
        let text = read_text_file(path).map_err(|source| SuiteError::Io { path: path.to_owned(), source })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        SuiteFile::parse(&name, &path.display().to_string(), &text)
    }

    /// Parses a suite. Errors name the file `shown_as`.
    pub fn parse(name: &str, shown_as: &str, text: &str) -> Result<SuiteFile, SuiteError> {
        let refused = |reason: String| SuiteError::Syntax { file: shown_as.to_owned(), reason };
        let mut suite: SuiteFile = parse_toml(text).map_err(|error| refused(error.to_string()))?;
        let no_seeds =
            suite.seeds.is_empty() || suite.group.iter().any(|g| g.seeds.as_ref().is_some_and(Vec::is_empty));
        let is_of_claims = suite.kind == SuiteKind::Claims;
        if no_seeds || (suite.group.is_empty() && !is_of_claims) {
            let what = if no_seeds { "seed" } else { "[[group]]" };
            return Err(refused(format!("a suite needs at least one {what}")));
        }
        if is_of_claims && !suite.group.is_empty() {
            return Err(refused("a suite of claims has its own cases and no [[group]]".to_owned()));
        }
        let names_strategies = |group: &SuiteGroup| group.strategies != NameSelection::default();
        if suite.kind.has_own_table() && suite.group.iter().any(names_strategies) {
            return Err(refused("a suite of techniques chooses its strategies itself; remove `strategies`".to_owned()));
        }
        if !suite.kind.has_own_table() && !suite.group.iter().all(names_strategies) {
            return Err(refused("every [[group]] needs strategies: a list of names, or \"all\"".to_owned()));
        }
        if suite.group.iter().any(|group| group.threads.contains(&0) || (!group.timed && !group.threads.is_empty())) {
            return Err(refused("threads are numbers from 1, in groups with timed = true".to_owned()));
        }
        if suite.group.iter().any(|group| group.threads.is_empty() && !group.sharing.is_default()) {
            return Err(refused("sharing says how threads share a strategy; add threads = [2, 4]".to_owned()));
        }
        let searches = suite.kind == SuiteKind::Threshold;
        if searches && suite.group.iter().any(|group| group.timed || !group.limits.is_empty()) {
            return Err(refused(
                "a suite of thresholds finds the limits itself; remove `limits` and `timed`".to_owned(),
            ));
        }
        if suite.need && suite.kind != SuiteKind::Run {
            return Err(refused("need = true is for suites whose cases are run; remove it or `kind`".to_owned()));
        }
        suite.name = name.to_owned();
        Ok(suite)
    }
}

fn default_base() -> String {
    "caching".to_owned()
}

fn default_seeds() -> Vec<u64> {
    vec![1]
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

/// The longest wall time of a case, written `90s` or `5m`. A longer case is ended from outside, so
/// it runs in its own process.
///
/// ```
/// use oomph::suite::CaseTimeout;
/// let timeout: CaseTimeout = "1m 30s".parse()?;
/// assert_eq!((timeout.duration().as_secs(), timeout.to_string()), (90, "1m 30s".to_owned()));
/// assert!("0s".parse::<CaseTimeout>().is_err());
/// # Ok::<(), oomph::suite::CaseTimeoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct CaseTimeout(Duration);

/// A text that is not a time-out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a time-out: {reason}; write it like 90s or 5m")]
pub struct CaseTimeoutError {
    text: String,
    reason: String,
}

impl CaseTimeout {
    /// The default for cases with a plugin, which may hang.
    pub const OF_PLUGINS: CaseTimeout = CaseTimeout(Duration::from_secs(600));

    /// The time.
    pub fn duration(self) -> Duration {
        self.0
    }
}

impl FromStr for CaseTimeout {
    type Err = CaseTimeoutError;

    fn from_str(text: &str) -> Result<CaseTimeout, CaseTimeoutError> {
        let refused = |reason: String| CaseTimeoutError { text: text.to_owned(), reason };
        match humantime::parse_duration(text) {
            Ok(Duration::ZERO) => Err(refused("the time-out must be greater than zero".to_owned())),
            Ok(duration) => Ok(CaseTimeout(duration)),
            Err(error) => Err(refused(error.to_string())),
        }
    }
}

impl fmt::Display for CaseTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl TryFrom<String> for CaseTimeout {
    type Error = CaseTimeoutError;

    fn try_from(text: String) -> Result<CaseTimeout, CaseTimeoutError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::CaseSettings;

    #[test]
    fn built_in_suites_are_valid() {
        assert!(SuiteFile::embedded().any(|name| name == "quick"));
        for name in SuiteFile::embedded() {
            let suite = SuiteFile::load(name).unwrap();
            assert!(suite.question.ends_with('?'), "{name}: {}", suite.question);
            assert_eq!(suite.group.is_empty(), suite.kind == SuiteKind::Claims, "{name}");
        }
    }

    #[test]
    fn misspelt_key_is_refused_with_its_line() {
        let text = "question = 'why?'\n[[group]]\nworkloads = 'all'\nstrategys = ['caching']\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("x.toml") && message.contains("line 4") && message.contains("strategys"), "{message}");
    }

    #[test]
    fn added_strategies_run_on_every_workload_once() {
        let text = "question = 'why?'\n[[group]]\nworkloads = ['random']\nstrategies = ['direct']\n\
                    [[group]]\nworkloads = ['random', 'sawtooth']\nstrategies = ['caching']\n";
        let mut suite = SuiteFile::parse("x", "x.toml", text).unwrap();
        suite.add_strategies(&["tlsf".to_owned(), "caching".to_owned()]);
        let settings = CaseSettings { device: "sim".parse().unwrap(), limit: None, seed: None, timeout: None };
        let cases = suite.cases(&settings).unwrap();
        let ids: Vec<String> =
            cases.iter().map(|case| format!("{} {}", case.label.workload, case.label.strategy)).collect();
        assert_eq!(
            ids,
            ["random direct", "random tlsf", "random caching", "sawtooth caching", "sawtooth tlsf"],
            "groups that named different strategies for one workload have each case once"
        );
    }

    #[test]
    fn invalid_timeout_is_refused() {
        let text = "question = 'why?'\ntimeout = 'soon'\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("'soon' is not a time-out"), "{message}");
    }

    #[test]
    fn bare_word_for_a_list_is_explained() {
        let text = "question = 'why?'\n[[group]]\nworkloads = 'random'\nstrategies = 'all'\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("line 3") && message.contains("write \"all\" or a list of names"), "{message}");
    }

    #[test]
    fn suite_needs_groups_and_seeds() {
        for (text, word) in [
            ("question = 'why?'\ngroup = []\n", "[[group]]"),
            ("question = 'why?'\nseeds = []\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\n", "seed"),
        ] {
            let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn threads_need_timed_cases() {
        let parse = |more: &str| {
            let text = format!("question = 'why?'\n[[group]]\nworkloads = ['random']\nstrategies = 'all'\n{more}\n");
            SuiteFile::parse("x", "x.toml", &text)
        };
        assert_eq!(parse("timed = true\nthreads = [1, 8]").unwrap().group[0].threads, [1, 8]);
        for wrong in ["threads = [2]", "timed = true\nthreads = [1, 0]"] {
            let message = parse(wrong).unwrap_err().to_string();
            assert!(message.contains("timed = true"), "{message}");
        }
    }

    #[test]
    fn threshold_suite_has_no_limits() {
        let parse = |more: &str| {
            let text = format!(
                "question = 'how much?'\nkind = 'threshold'\n[[group]]\nworkloads = ['random']\nstrategies = 'all'\n{more}\n"
            );
            SuiteFile::parse("x", "x.toml", &text)
        };
        assert_eq!(parse("repeat = 3").unwrap().kind, SuiteKind::Threshold);
        for wrong in ["limits = ['6GiB']", "timed = true"] {
            assert!(parse(wrong).unwrap_err().to_string().contains("finds the limits itself"), "{wrong}");
        }
    }

    #[test]
    fn need_is_of_cases_that_run() {
        let parse = |more: &str| {
            let text =
                format!("question = 'how much?'\n{more}\n[[group]]\nworkloads = ['random']\nstrategies = 'all'\n");
            SuiteFile::parse("x", "x.toml", &text).map(|suite| suite.need)
        };
        assert!(parse("need = true").unwrap() && !parse("").unwrap());
        assert!(parse("need = true\nkind = 'threshold'").unwrap_err().to_string().contains("need = true is for"));
        let built_in = |name| SuiteFile::load(name).unwrap().need;
        assert!(built_in("strategies") && !built_in("quick"), "the quick suite stays quick");
    }

    #[test]
    fn strategies_depend_on_the_kind() {
        let parse = |kind: &str, more: &str| {
            let text = format!("question = 'why?'\nkind = '{kind}'\n[[group]]\nworkloads = ['random']\n{more}\n");
            SuiteFile::parse("x", "x.toml", &text).map(|suite| suite.kind).map_err(|error| error.to_string())
        };
        assert_eq!(parse("techniques", ""), Ok(SuiteKind::Techniques));
        assert!(parse("techniques", "strategies = 'all'").unwrap_err().contains("chooses its strategies itself"));
        assert!(parse("run", "").unwrap_err().contains("needs strategies"));
        assert!(parse("claims", "").unwrap_err().contains("has its own cases"));
        assert_eq!(SuiteFile::parse("x", "x.toml", "question = 'why?'\nkind = 'claims'\n").unwrap().group.len(), 0);
    }

    #[test]
    fn nearest_suite_is_suggested() {
        let message = SuiteFile::load("quik").unwrap_err().to_string();
        assert!(message.contains("did you mean 'quick'?"), "{message}");
    }

    #[test]
    fn lists_do_not_multiply_without_bound() {
        let seeds = (0..1_000).map(|seed| seed.to_string()).collect::<Vec<_>>().join(",");
        let text = format!(
            "question = 'why?'\nseeds = [{seeds}]\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\nlimits = ['6GiB', '8GiB']\n"
        );
        let settings = CaseSettings { device: "sim".parse().unwrap(), limit: None, seed: None, timeout: None };
        let refusal = SuiteFile::parse("x", "x.toml", &text).unwrap().cases(&settings).err().unwrap().to_string();
        assert!(refusal.starts_with("suite 'x' has more than 200000 cases"), "{refusal}");
    }

    #[test]
    fn names_have_no_control_characters() {
        for text in [
            r#"question = "why?\u001b[2K""#,
            "question = 'why?'\n[[group]]\nworkloads = [\"a\\nb\"]\nstrategies = 'all'",
            "question = 'why?'\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\nset = { \"\\u202e\" = 1 }",
        ] {
            let refusal = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
            assert!(refusal.contains("contains a control character"), "{refusal}");
        }
    }
}

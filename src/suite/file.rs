//! A suite as it is written: one TOML file.
//!
//! Those in `suites/` are part of the binary, so that it works wherever it is installed. A file of that name in the
//! `suites/` of the current folder is taken instead.

use std::{fmt, fs, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use super::{CaseTimeout, SuiteError};
use crate::base::{Bytes, Catalog, CatalogEntry};

/// Where suites are found by name.
const CATALOG: Catalog = Catalog { folder: "suites", built_in: include!(concat!(env!("OUT_DIR"), "/suites.rs")) };

/// One suite: a question, and the groups of cases that answer it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteFile {
    /// What to call it; the name of the file.
    #[serde(skip)]
    pub name: String,
    /// Whether it came with the binary, which may be far from the trace files that the suite names.
    #[serde(skip)]
    pub is_embedded: bool,
    /// What the suite answers, in one line.
    pub question: String,
    /// What is asked of every case.
    #[serde(default)]
    pub kind: SuiteKind,
    /// The strategy that the comparison gives ratios to.
    #[serde(default = "default_base")]
    pub base: String,
    /// Seeds that every group runs with, unless it has its own.
    #[serde(default = "default_seeds")]
    pub seeds: Vec<u64>,
    /// How long each case may take, unless its group says otherwise; without it, as long as it likes.
    pub timeout: Option<CaseTimeout>,
    /// The groups; each is a matrix. A suite of claims has none: its cases are the claims.
    #[serde(default)]
    pub group: Vec<Group>,
}

/// What is asked of the cases of a suite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SuiteKind {
    /// What happens: each is run and measured.
    #[default]
    Run,
    /// How much memory suffices: each is run under many limits.
    Threshold,
    /// What memory-saving techniques save and cost: its workloads are the models that each is tried on.
    Techniques,
    /// Whether what is published is true.
    Claims,
}

impl SuiteKind {
    /// Whether it has no cases of workload and strategy, but a table of its own.
    #[must_use]
    pub const fn has_own_table(self) -> bool {
        matches!(self, SuiteKind::Techniques | SuiteKind::Claims)
    }
}

/// A matrix of cases: every workload with every strategy, limit and seed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Names of workloads, paths of trace files with `*` in the last part if need be, or `"all"` workloads.
    pub workloads: Selection,
    /// Workloads to leave out of `"all"`, `*` standing for any run of characters.
    #[serde(default)]
    pub except: Vec<String>,
    /// Strategies with parameters, or `"all"`; none in a suite of techniques, which chooses them itself.
    #[serde(default)]
    pub strategies: Selection,
    /// Caps on physical memory; without any, the whole device.
    #[serde(default)]
    pub limits: Vec<Bytes>,
    /// Seeds of this group.
    pub seeds: Option<Vec<u64>>,
    /// Overrides of the workloads' parameters.
    #[serde(default)]
    pub set: toml::Table,
    /// How often each trace runs, back to back.
    #[serde(default = "one")]
    pub repeat: u32,
    /// What to do when a request fails.
    #[serde(default)]
    pub on_oom: OnOom,
    /// Whether the workloads' work is run; without it only requests for memory are carried out, and streams stay idle.
    #[serde(default = "yes")]
    pub work: bool,
    /// Whether wall-clock times are taken as well; such cases run alone.
    #[serde(default)]
    pub timed: bool,
    /// How many threads share the strategy, for further timings of the same cases; only where they are timed.
    #[serde(default)]
    pub threads: Vec<u16>,
    /// How long each case of this group may take.
    pub timeout: Option<CaseTimeout>,
}

/// What to do when a request fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOom {
    /// The case ends there.
    #[default]
    Stop,
    /// The request is left out.
    Skip,
}

/// Names, or everything there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Everything that is registered.
    All,
    /// These.
    Names(Vec<String>),
}

impl Default for Selection {
    fn default() -> Self {
        Selection::Names(Vec::new())
    }
}

impl<'de> Deserialize<'de> for Selection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesOrAll;
        impl<'de> Visitor<'de> for NamesOrAll {
            type Value = Selection;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"all\" or a list of names")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Selection, E> {
                match text {
                    "all" => Ok(Selection::All),
                    other => Err(E::custom(format!("'{other}' is neither \"all\" nor a list; write [\"{other}\"]"))),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Selection, A::Error> {
                let mut list = Vec::new();
                while let Some(name) = names.next_element()? {
                    list.push(name);
                }
                Ok(Selection::Names(list))
            }
        }
        deserializer.deserialize_any(NamesOrAll)
    }
}

impl SuiteFile {
    /// The names of the suites that travel with the binary.
    pub fn embedded() -> impl Iterator<Item = &'static str> {
        CATALOG.built_in_names()
    }

    /// Every suite that has a name here: the embedded ones, and those in the `suites/` of the current folder.
    #[must_use]
    pub fn all_named() -> Vec<CatalogEntry> {
        CATALOG.all()
    }

    /// The suite of that name, or the file at that path (anything that ends in `.toml` or has a separator). Under a name
    /// `suites/NAME.toml` is looked for first, then what came with the binary.
    pub fn load(name_or_path: &str) -> Result<SuiteFile, SuiteError> {
        if name_or_path.ends_with(".toml") || name_or_path.contains('/') {
            return SuiteFile::from_file(Path::new(name_or_path));
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

    fn from_file(path: &Path) -> Result<SuiteFile, SuiteError> {
        let text = fs::read_to_string(path).map_err(|source| SuiteError::Io { path: path.to_owned(), source })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        SuiteFile::parse(&name, &path.display().to_string(), &text)
    }

    /// Reads a suite. `shown_as` is what errors call the file.
    pub fn parse(name: &str, shown_as: &str, text: &str) -> Result<SuiteFile, SuiteError> {
        let refused = |reason: String| SuiteError::Syntax { file: shown_as.to_owned(), reason };
        let mut suite: SuiteFile = toml::from_str(text).map_err(|error| refused(error.to_string()))?;
        let no_seeds =
            suite.seeds.is_empty() || suite.group.iter().any(|g| g.seeds.as_ref().is_some_and(Vec::is_empty));
        let is_of_claims = suite.kind == SuiteKind::Claims;
        if no_seeds || (suite.group.is_empty() && !is_of_claims) {
            let what = if no_seeds { "seed" } else { "[[group]]" };
            return Err(refused(format!("a suite needs at least one {what}")));
        }
        if is_of_claims && !suite.group.is_empty() {
            return Err(refused("a suite of claims brings its own cases: no [[group]]".to_owned()));
        }
        let names_strategies = |group: &Group| group.strategies != Selection::default();
        if suite.kind.has_own_table() && suite.group.iter().any(names_strategies) {
            return Err(refused("a suite of techniques chooses its strategies itself".to_owned()));
        }
        if !suite.kind.has_own_table() && !suite.group.iter().all(names_strategies) {
            return Err(refused("every [[group]] needs strategies: a list of names, or \"all\"".to_owned()));
        }
        if suite.group.iter().any(|group| group.threads.contains(&0) || (!group.timed && !group.threads.is_empty())) {
            return Err(refused("threads are numbers from 1, in groups with timed = true".to_owned()));
        }
        let searches = suite.kind == SuiteKind::Threshold;
        if searches && suite.group.iter().any(|group| group.timed || !group.limits.is_empty()) {
            return Err(refused("a suite of thresholds finds the limits itself: no limits, nothing timed".to_owned()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_suite_can_be_read_and_asks_a_question() {
        assert!(SuiteFile::embedded().any(|name| name == "quick"));
        for name in SuiteFile::embedded() {
            let suite = SuiteFile::load(name).unwrap();
            assert!(suite.question.ends_with('?'), "{name}: {}", suite.question);
            assert_eq!(suite.group.is_empty(), suite.kind == SuiteKind::Claims, "{name}");
        }
    }

    #[test]
    fn a_misspelt_key_is_refused_with_its_line() {
        let text = "question = 'why?'\n[[group]]\nworkloads = 'all'\nstrategys = ['caching']\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("x.toml") && message.contains("line 4") && message.contains("strategys"), "{message}");
    }

    #[test]
    fn a_time_out_that_is_none_is_refused() {
        let text = "question = 'why?'\ntimeout = 'soon'\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("'soon' is no time"), "{message}");
    }

    #[test]
    fn a_bare_word_for_a_list_is_explained() {
        let text = "question = 'why?'\n[[group]]\nworkloads = 'random'\nstrategies = 'all'\n";
        let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
        assert!(message.contains("write [\"random\"]"), "{message}");
    }

    #[test]
    fn a_suite_without_cases_or_seeds_is_refused() {
        for (text, word) in [
            ("question = 'why?'\ngroup = []\n", "[[group]]"),
            ("question = 'why?'\nseeds = []\n[[group]]\nworkloads = 'all'\nstrategies = 'all'\n", "seed"),
        ] {
            let message = SuiteFile::parse("x", "x.toml", text).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn threads_are_refused_where_nothing_is_timed_and_where_there_are_none() {
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
    fn a_suite_of_thresholds_has_no_limits_of_its_own() {
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
    fn strategies_are_named_where_they_are_a_choice_and_nowhere_else() {
        let parse = |kind: &str, more: &str| {
            let text = format!("question = 'why?'\nkind = '{kind}'\n[[group]]\nworkloads = ['random']\n{more}\n");
            SuiteFile::parse("x", "x.toml", &text).map(|suite| suite.kind).map_err(|error| error.to_string())
        };
        assert_eq!(parse("techniques", ""), Ok(SuiteKind::Techniques));
        assert!(parse("techniques", "strategies = 'all'").unwrap_err().contains("chooses its strategies itself"));
        assert!(parse("run", "").unwrap_err().contains("needs strategies"));
        assert!(parse("claims", "").unwrap_err().contains("brings its own cases"));
        assert_eq!(SuiteFile::parse("x", "x.toml", "question = 'why?'\nkind = 'claims'\n").unwrap().group.len(), 0);
    }

    #[test]
    fn the_nearest_suite_is_named() {
        let message = SuiteFile::load("quik").unwrap_err().to_string();
        assert!(message.contains("did you mean 'quick'?"), "{message}");
    }
}

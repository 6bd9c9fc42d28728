//! Where and how a run was made (`env.json`), what two runs differ in, and the command line to paste into a shell.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Partition;
use crate::{base::escaped, measure::SCHEMA};

/// What a reader needs to judge a run and to repeat it. The command line fills it in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// [`SCHEMA`](crate::measure::SCHEMA).
    pub schema: u32,
    /// When the run began, RFC 3339 in UTC.
    pub started: String,
    /// The command line, word by word.
    pub command: Vec<String>,
    /// The program's version.
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
    /// The seed of random numbers.
    pub seed: u64,
    /// The processor's name, or the architecture if the name is unknown.
    pub machine: String,
    /// The operating system.
    pub os: String,
    /// Usable processors.
    pub cpus: u32,
    /// The device, as users type it.
    pub device: String,
    /// The name that the device reports.
    pub device_name: String,
    /// The driver's version, if there is a driver.
    pub driver: Option<String>,
    /// The options of the run; `None` for commands that run no suite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<RunSettings>,
    /// Which part of a shared run this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<Partition>,
    /// The number of shards that the run was merged from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_shards: Option<u32>,
}

/// The options of a run besides its device. All shards of a run have the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSettings {
    /// The suites by name.
    pub suites: Vec<String>,
    /// Their questions, in the same order; empty in runs of older releases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub questions: Vec<String>,
    /// `--filter`.
    pub only: Vec<String>,
    /// `--skip`.
    pub skip: Vec<String>,
    /// `--exact`.
    pub exact: bool,
    /// `--limit`.
    pub limit_bytes: Option<u64>,
    /// `--seed`.
    pub seed: Option<u64>,
    /// `--case-timeout`.
    pub case_timeout: Option<String>,
    /// `--pack`.
    pub pack: bool,
    /// `--need`, or `need = true` in a suite.
    #[serde(default)]
    pub need: bool,
    /// The strategy that ratios are given to.
    pub base: String,
}

/// A property in which two runs differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentDifference {
    /// The property.
    pub what: &'static str,
    /// Its value here.
    pub here: String,
    /// Its value in the other run.
    pub there: String,
}

/// The properties of an environment that must be equal, as keys of `env.json`.
const ENVIRONMENT_KEYS: [&str; 7] = ["schema", "version", "commit", "device", "device_name", "driver", "seed"];
/// The options of a run that must be equal, as keys of `settings`, and their names on the command
/// line.
const SETTING_KEYS: [(&str, &str); 10] = [
    ("suites", "suites"),
    ("only", "--filter"),
    ("skip", "--skip"),
    ("exact", "--exact"),
    ("limit_bytes", "--limit"),
    ("seed", "--seed"),
    ("case_timeout", "--case-timeout"),
    ("pack", "--pack"),
    ("need", "--need"),
    ("base", "base strategy"),
];

impl Environment {
    /// What a reader of an older run should know.
    #[must_use]
    pub fn schema_note(&self, folder: &Path) -> Option<String> {
        let Environment { schema, version, .. } = self;
        (*schema < SCHEMA).then(|| {
            format!(
                "note: {} has schema {schema} (oomph {}); its columns are converted to schema {SCHEMA}",
                folder.display(),
                escaped(version)
            )
        })
    }

    /// The first difference from `other` that forbids mixing their rows.
    pub fn conflict(&self, other: &Environment) -> Option<EnvironmentDifference> {
        let part = |run: &Environment| run.shard.map_or_else(|| "the whole run".to_owned(), |part| part.to_string());
        let mut found = differences(&ENVIRONMENT_KEYS.map(|key| (key, key)), self, other);
        found.extend(difference("shard", part(self), part(other)));
        // A shard must hold exactly its part of the plan. A whole run may grow by other filters.
        if self.shard.is_some() {
            found.extend(self.setting_differences(other));
        }
        found.into_iter().next()
    }

    /// The differences from `other` that mean the two are not shards of one run.
    pub fn unlike_shards(&self, other: &Environment) -> Vec<EnvironmentDifference> {
        let rule =
            |run: &Environment| run.shard.map_or_else(String::new, |part| format!("{:?}", part.rule).to_lowercase());
        let shards = |run: &Environment| run.shard.map_or(0, |part| part.shards).to_string();
        let mut found = differences(&ENVIRONMENT_KEYS.map(|key| (key, key)), self, other);
        found.extend(self.setting_differences(other));
        found.extend(difference("partition rule", rule(self), rule(other)));
        found.extend(difference("number of shards", shards(self), shards(other)));
        found
    }

    fn setting_differences(&self, other: &Environment) -> Vec<EnvironmentDifference> {
        let settings = |run: &Environment| run.settings.clone().unwrap_or_default();
        differences(&SETTING_KEYS, &settings(self), &settings(other))
    }
}

/// The fields that differ, with the names for messages.
fn differences<T: Serialize>(keys: &[(&str, &'static str)], here: &T, there: &T) -> Vec<EnvironmentDifference> {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        Value::Array(words) => words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    };
    let (here, there) = (json!(here), json!(there));
    keys.iter().filter_map(|(key, what)| difference(what, text(&here[*key]), text(&there[*key]))).collect()
}

fn difference(what: &'static str, here: String, there: String) -> Option<EnvironmentDifference> {
    (here != there).then_some(EnvironmentDifference { what, here, there })
}

/// Options that belong to one process of a run; all of them take a value.
pub const OPTIONS_OF_ONE_PROCESS: [&str; 4] = ["--output", "-o", "--resume", "--partition"];

/// A word, in quotes where a shell would interpret it.
pub fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "_.-/:,=%+@".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The words of a command line without these options and their values.
pub fn without_options<'a>(words: &'a [String], options: &[&str]) -> Vec<&'a str> {
    // The value may be attached: `--output=x`, `-ox`.
    let has_value = |word: &str| {
        options.iter().any(|option| {
            let value = word.strip_prefix(option).filter(|value| !value.is_empty());
            value.is_some_and(|value| value.starts_with('=') || !option.starts_with("--"))
        })
    };
    let mut kept = Vec::new();
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if options.contains(&word) {
            words.next();
        } else if !has_value(word) {
            kept.push(word);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(number: u32, only: &str) -> Environment {
        let settings = RunSettings { only: vec![only.to_owned()], ..RunSettings::default() };
        let shard = format!("slice:{number}/4").parse().unwrap();
        Environment { settings: Some(settings), shard: Some(shard), ..Environment::default() }
    }

    #[test]
    fn shard_resumes_only_as_the_same_shard() {
        assert_eq!(shard(1, "a").conflict(&shard(1, "a")), None);
        assert_eq!(shard(1, "a").conflict(&shard(2, "a")).unwrap().there, "slice:2/4");
        assert_eq!(shard(1, "a").conflict(&shard(1, "b")).unwrap().what, "--filter");
        let whole = Environment { shard: None, ..shard(1, "a") };
        assert_eq!(whole.conflict(&shard(1, "a")).unwrap().here, "the whole run");
        let wider = Environment { settings: None, ..whole.clone() };
        assert_eq!(wider.conflict(&whole), None, "a whole run may grow");
    }

    #[test]
    fn every_difference_between_shards_is_named() {
        assert_eq!(shard(1, "a").unlike_shards(&shard(2, "a")), []);
        let mut other = shard(2, "b");
        other.commit = "abc".to_owned();
        other.shard = Some("hash:2/8".parse().unwrap());
        let found: Vec<&str> = shard(1, "a").unlike_shards(&other).iter().map(|difference| difference.what).collect();
        assert_eq!(found, ["commit", "--filter", "partition rule", "number of shards"]);
    }

    #[test]
    fn old_environment_can_be_read() {
        let json = serde_json::to_value(Environment::default()).unwrap();
        assert!(json.get("shard").is_none() && json.get("settings").is_none());
        assert_eq!(serde_json::from_value::<Environment>(json).unwrap(), Environment::default());
    }

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("caching:expandable_segments:True"), "caching:expandable_segments:True");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn options_go_with_their_values() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for given in ["run a --output x --pack", "run a -o x --pack", "run a -ox --pack", "run a --output=x --pack"] {
            assert_eq!(without_options(&words(given), &["--output", "-o"]), ["run", "a", "--pack"], "{given}");
        }
        assert_eq!(without_options(&words("run --outputs x"), &["--output", "-o"]), ["run", "--outputs", "x"]);
        assert_eq!(without_options(&words("run -o"), &["-o"]), ["run"]);
    }
}

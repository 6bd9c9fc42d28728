//! Where and how a run was made: `env.json`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a reader needs to judge a run and to repeat it. The caller fills it in: this room looks at no machine.
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
    /// What the random choices start from.
    pub seed: u64,
    /// The processor's name, or the architecture where it is not known.
    pub machine: String,
    /// The operating system.
    pub os: String,
    /// Processors that could be used.
    pub cpus: u32,
    /// The device, as users type it.
    pub device: String,
    /// What the device says it is.
    pub device_name: String,
    /// The driver's version, if there is a driver.
    pub driver: Option<String>,
    /// What was asked for; not there in folders of commands that run no suite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<Settings>,
    /// Which part of the run this is, where it is not the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<Shard>,
    /// How many shards the run was put together from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_shards: Option<u32>,
}

/// What a run was asked for beside its device: shards of one run agree on all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The suites by name.
    pub suites: Vec<String>,
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
    /// The strategy that ratios are given to.
    pub base: String,
    /// A number for what the cases of a shared run are told to do, which their ids do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contents: Option<String>,
}

/// Which part of a run a folder holds. Which cases those are is in `plan.csv`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// How cases were dealt out.
    pub rule: String,
    /// Which shard this is, from 1.
    pub shard: u32,
    /// How many make the run.
    pub shards: u32,
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.rule, self.shard, self.shards)
    }
}

/// Something about two runs that is not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What differs.
    pub what: &'static str,
    /// Its value here.
    pub here: String,
    /// Its value in the other run.
    pub there: String,
}

impl Environment {
    /// What differs from `other` so that their rows must not stand in one file.
    #[must_use]
    pub fn conflict(&self, other: &Environment) -> Option<Difference> {
        let part = |run: &Environment| run.shard.as_ref().map_or_else(|| "the whole run".to_owned(), Shard::to_string);
        let mut found = self.made_otherwise(other);
        found.extend(difference("shard", part(self), part(other)));
        // A shard must hold what its siblings count on; a run of its own may grow by other filters.
        if self.shard.is_some() {
            found.extend(self.asked_otherwise(other));
        }
        found.into_iter().next()
    }

    /// What differs from `other` so that they are not shards of one run. Which shards they are is left out.
    #[must_use]
    pub fn unlike_shards(&self, other: &Environment) -> Vec<Difference> {
        let rule = |run: &Environment| run.shard.as_ref().map_or_else(String::new, |shard| shard.rule.clone());
        let shards = |run: &Environment| run.shard.as_ref().map_or(0, |shard| shard.shards).to_string();
        let mut found = self.made_otherwise(other);
        found.extend(self.asked_otherwise(other));
        found.extend(difference("partition rule", rule(self), rule(other)));
        found.extend(difference("number of shards", shards(self), shards(other)));
        found
    }

    fn made_otherwise(&self, other: &Environment) -> Vec<Difference> {
        let driver = |run: &Environment| run.driver.clone().unwrap_or_default();
        [
            difference("schema", self.schema.to_string(), other.schema.to_string()),
            difference("version", self.version.clone(), other.version.clone()),
            difference("commit", self.commit.clone(), other.commit.clone()),
            difference("device", self.device.clone(), other.device.clone()),
            difference("device_name", self.device_name.clone(), other.device_name.clone()),
            difference("driver", driver(self), driver(other)),
            difference("seed", self.seed.to_string(), other.seed.to_string()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn asked_otherwise(&self, other: &Environment) -> Vec<Difference> {
        let (here, there) = (self.settings.clone().unwrap_or_default(), other.settings.clone().unwrap_or_default());
        let number = |number: Option<u64>| number.map_or_else(|| "none".to_owned(), |number| number.to_string());
        let time = |settings: &Settings| settings.case_timeout.clone().unwrap_or_else(|| "none".to_owned());
        [
            difference("suites", here.suites.join(" "), there.suites.join(" ")),
            difference("--filter", here.only.join(" "), there.only.join(" ")),
            difference("--skip", here.skip.join(" "), there.skip.join(" ")),
            difference("--exact", here.exact.to_string(), there.exact.to_string()),
            difference("--limit", number(here.limit_bytes), number(there.limit_bytes)),
            difference("--seed", number(here.seed), number(there.seed)),
            difference("--case-timeout", time(&here), time(&there)),
            difference("--pack", here.pack.to_string(), there.pack.to_string()),
            difference("base strategy", here.base, there.base),
            difference(
                "content of suites, workloads and trace files",
                here.contents.unwrap_or_default(),
                there.contents.unwrap_or_default(),
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

fn difference(what: &'static str, here: String, there: String) -> Option<Difference> {
    (here != there).then_some(Difference { what, here, there })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(number: u32, only: &str) -> Environment {
        let settings = Settings { only: vec![only.to_owned()], ..Settings::default() };
        let shard = Shard { rule: "slice".to_owned(), shard: number, shards: 4 };
        Environment { settings: Some(settings), shard: Some(shard), ..Environment::default() }
    }

    #[test]
    fn a_shard_goes_on_only_as_the_same_shard_of_the_same_run() {
        assert_eq!(shard(1, "a").conflict(&shard(1, "a")), None);
        assert_eq!(shard(1, "a").conflict(&shard(2, "a")).unwrap().there, "slice:2/4");
        assert_eq!(shard(1, "a").conflict(&shard(1, "b")).unwrap().what, "--filter");
        let whole = Environment { shard: None, ..shard(1, "a") };
        assert_eq!(whole.conflict(&shard(1, "a")).unwrap().here, "the whole run");
        let wider = Environment { settings: None, ..whole.clone() };
        assert_eq!(wider.conflict(&whole), None, "a run of its own may grow");
    }

    #[test]
    fn all_that_keeps_shards_apart_is_named() {
        assert_eq!(shard(1, "a").unlike_shards(&shard(2, "a")), []);
        let mut other = shard(2, "b");
        other.commit = "abc".to_owned();
        other.shard = Some(Shard { rule: "hash".to_owned(), shard: 2, shards: 8 });
        let found: Vec<&str> = shard(1, "a").unlike_shards(&other).iter().map(|difference| difference.what).collect();
        assert_eq!(found, ["commit", "--filter", "partition rule", "number of shards"]);
    }

    #[test]
    fn an_environment_without_the_newer_fields_can_be_read() {
        let json = serde_json::to_value(Environment::default()).unwrap();
        assert!(json.get("shard").is_none() && json.get("settings").is_none());
        assert_eq!(serde_json::from_value::<Environment>(json).unwrap(), Environment::default());
    }
}

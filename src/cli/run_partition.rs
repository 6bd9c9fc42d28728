//! `oomph run --partition`: the part of a run's cases that this process takes, and how its folder says so.

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{environment, failure::Failure, run::Args};
use crate::{
    report::{
        Environment, PlannedCase, ReportError, Shard,
        command_line::{self, OPTIONS_OF_ONE_PROCESS},
    },
    suite::{Partition, PartitionError},
};

/// What `--partition` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// This one.
    Named(Partition),
    /// That of this task of a Slurm job array.
    Slurm,
}

impl FromStr for Part {
    type Err = PartitionError;

    fn from_str(text: &str) -> Result<Part, PartitionError> {
        if text == "slurm" { Ok(Part::Slurm) } else { text.parse().map(Part::Named) }
    }
}

impl Part {
    /// The part, with what the environment says about it.
    pub fn resolve(self) -> Result<Partition, Failure> {
        match self {
            Part::Named(partition) => Ok(partition),
            Part::Slurm => Partition::of_array_task(|name| env::var(name).ok()).map_err(Failure::usage),
        }
    }
}

/// What this process has of a run's cases: all of them, or those of a shard.
pub struct Share {
    shard: Option<Dealt>,
}

/// A shard, and what was dealt to it and to the others.
struct Dealt {
    partition: Partition,
    plan: Vec<PlannedCase>,
    own: BTreeSet<String>,
}

impl Share {
    /// Deals out the cases of the whole run.
    pub fn new(partition: Option<Partition>, case_ids: &[String]) -> Share {
        let shard = partition.map(|partition| {
            let dealt = partition.deal(case_ids.iter().map(String::as_str));
            let own = dealt.iter().filter(|(_, shard)| *shard == partition.shard()).map(|(id, _)| (*id).to_owned());
            let planned = |&(id, shard): &(&str, u32)| PlannedCase { case_id: id.to_owned(), shard };
            Dealt { partition, own: own.collect(), plan: dealt.iter().map(planned).collect() }
        });
        Share { shard }
    }

    /// Whether the case runs here.
    pub fn has(&self, case_id: &str) -> bool {
        self.shard.as_ref().is_none_or(|dealt| dealt.own.contains(case_id))
    }

    /// Those of the cases that run here.
    pub fn of(&self, case_ids: Vec<String>) -> Vec<String> {
        case_ids.into_iter().filter(|id| self.has(id)).collect()
    }

    /// The cases that run here, where not all do.
    pub fn own(&self) -> Option<BTreeSet<String>> {
        self.shard.as_ref().map(|dealt| dealt.own.clone())
    }

    /// The environment, which says what part this is.
    pub fn in_environment(&self, environment: Environment) -> Environment {
        let shard = self.shard.as_ref().map(|Dealt { partition, .. }| Shard {
            rule: partition.rule().to_owned(),
            shard: partition.shard(),
            shards: partition.shards(),
        });
        Environment { shard, ..environment }
    }

    /// The folder that the command line names, or a new one whose name carries the shard.
    pub fn place(&self, args: &Args) -> PathBuf {
        let part = self.shard.as_ref().map(|Dealt { partition, .. }| {
            let digits = partition.shards().to_string().len();
            format!("{:0digits$}-of-{}", partition.shard(), partition.shards())
        });
        let suites = if args.suites.is_empty() { vec!["quick".to_owned()] } else { args.suites.clone() };
        let new = || environment::new_run_folder(&suites, part.as_deref());
        args.resume.clone().or_else(|| args.output.clone()).unwrap_or_else(new)
    }

    /// Creates or resumes the folder of this run, and writes the plan into it. A shard with another plan
    /// is refused.
    pub fn open<T>(
        &self,
        args: &Args,
        place: &Path,
        open: impl FnOnce() -> Result<T, ReportError>,
    ) -> Result<T, ReportError> {
        let Some(dealt) = &self.shard else { return open() };
        if args.resume.is_some() {
            PlannedCase::check(place, &dealt.plan)?;
        }
        let opened = open()?;
        PlannedCase::write(place, &dealt.plan)?;
        Ok(opened)
    }

    /// The command that goes on with a folder: this very one, with everything that it was asked for.
    pub fn again(&self, place: &Path) -> String {
        let words: Vec<String> = environment::arguments().collect();
        continued(&words, self.shard.as_ref().map(|dealt| &dealt.partition), place)
    }
}

/// The words of a run, on the folder that it left. A shard is named by its number: `slurm` means another one elsewhere.
fn continued(words: &[String], part: Option<&Partition>, place: &Path) -> String {
    let mut again = vec!["oomph".to_owned()];
    if words.is_empty() {
        again.push("run".to_owned());
    }
    let kept = command_line::without(words, &OPTIONS_OF_ONE_PROCESS);
    again.extend(kept.into_iter().map(command_line::quoted));
    again.extend(part.into_iter().flat_map(|part| ["--partition".to_owned(), part.to_string()]));
    again.extend(["--resume".to_owned(), command_line::quoted(&place.to_string_lossy())]);
    again.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_goes_on_with_everything_that_it_was_asked_for() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let part: Partition = "slice:2/4".parse().unwrap();
        let asked = words("run quick --filter a* --partition slurm --device sim:8GiB -o out");
        assert_eq!(
            continued(&asked, Some(&part), Path::new("out")),
            "oomph run quick --filter 'a*' --device sim:8GiB --partition slice:2/4 --resume out"
        );
        assert_eq!(continued(&[], None, Path::new("new run")), "oomph run --resume 'new run'");
    }
}

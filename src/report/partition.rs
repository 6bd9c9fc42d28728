//! Which cases of a run belong to one shard, so that several machines can share a run.
//!
//! The rule depends only on the position and the id of a case, so every shard can compute it, and
//! each case is in exactly one shard. The assignment is saved beside the results, so that merging
//! them does not need the rule.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::base::fnv1a;

/// One shard of a run: `slice:2/4` or `hash:2/4`, counted from 1.
///
/// ```
/// use oomph::report::Partition;
/// let second: Partition = "slice:2/3".parse()?;
/// let taken: Vec<usize> = (0..8).filter(|&place| second.shard_of(place, "any id") == second.shard).collect();
/// assert_eq!(taken, [1, 4, 7]);
/// assert_eq!(second.to_string(), "slice:2/3");
/// # Ok::<(), oomph::report::PartitionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PartitionFields")]
pub struct Partition {
    /// How cases are assigned to shards.
    pub rule: PartitionRule,
    /// The number of this shard, from 1.
    pub shard: u32,
    /// The number of shards of the run.
    pub shards: u32,
}

/// A partition as `env.json` has it.
#[derive(Deserialize)]
struct PartitionFields {
    rule: PartitionRule,
    shard: u32,
    shards: u32,
}

impl TryFrom<PartitionFields> for Partition {
    type Error = PartitionError;

    fn try_from(PartitionFields { rule, shard, shards }: PartitionFields) -> Result<Partition, PartitionError> {
        let partition = Partition { rule, shard, shards };
        if shard < 1 || shard > shards {
            return Err(PartitionError::Syntax { text: partition.to_string(), reason: OUT_OF_RANGE });
        }
        Ok(partition)
    }
}

/// How cases are assigned to shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartitionRule {
    /// In turn, so that sizes differ by at most one case.
    Slice,
    /// By a hash of the id, so that a case stays in its shard whatever else is in the run.
    Hash,
}

const OUT_OF_RANGE: &str = "shards are counted from 1 to their number";

/// A text or an environment that does not name a shard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The text is not a partition.
    #[error("'{text}' is not a partition: {reason}; write slice:2/4, hash:2/4 or, in a Slurm array, slurm")]
    Syntax {
        /// What was typed.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A variable of Slurm's job arrays is not set.
    #[error(
        "--partition slurm: {variable} is not set, so this is not a task of a job array; submit with sbatch --array=1-4, \
         or name the shard: --partition slice:1/4"
    )]
    NoArray {
        /// The variable.
        variable: &'static str,
    },
    /// A variable of Slurm is not a number.
    #[error("--partition slurm: {variable} is '{value}', which is not a number")]
    NoNumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// The numbers of the array's tasks have gaps.
    #[error(
        "--partition slurm: task {task} is not one of {count} tasks from {first} in steps of {step}; number the array \
         without gaps, such as sbatch --array=1-{count}, or name the shard: --partition slice:1/{count}"
    )]
    Gaps {
        /// The number of this task.
        task: u64,
        /// The number of tasks in the array.
        count: u64,
        /// The number of the first task.
        first: u64,
        /// The step from one task to the next.
        step: u64,
    },
}

impl Partition {
    /// The shard of a task in a Slurm job array: one shard per task, cases assigned in turn.
    /// `variable` reads the environment.
    pub fn of_array_task(variable: impl Fn(&str) -> Option<String>) -> Result<Partition, PartitionError> {
        let number = |name: &'static str| match variable(name) {
            None => Err(PartitionError::NoArray { variable: name }),
            Some(value) => value.trim().parse().map_err(|_| PartitionError::NoNumber { variable: name, value }),
        };
        let task: u64 = number("SLURM_ARRAY_TASK_ID")?;
        let count: u64 = number("SLURM_ARRAY_TASK_COUNT")?;
        let first: u64 = number("SLURM_ARRAY_TASK_MIN")?;
        let optional = |name| variable(name).is_some().then(|| number(name)).transpose();
        let step = optional("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
        let last: Option<u64> = optional("SLURM_ARRAY_TASK_MAX")?;
        let gaps = PartitionError::Gaps { task, count, first, step };
        let offset = task.checked_sub(first).ok_or_else(|| gaps.clone())?;
        let span = count.checked_sub(1).and_then(|gaps| gaps.checked_mul(step));
        let reaches = last.is_none_or(|last| last.checked_sub(first) == span);
        if !offset.is_multiple_of(step) || offset / step >= count || !reaches {
            return Err(gaps);
        }
        match (u32::try_from(offset / step + 1), u32::try_from(count)) {
            (Ok(shard), Ok(shards)) => Ok(Partition { rule: PartitionRule::Slice, shard, shards }),
            _ => Err(gaps),
        }
    }

    /// The shard of a case; `place` is its position among all filtered cases, from 0.
    pub fn shard_of(&self, place: usize, case_id: &str) -> u32 {
        let number = match self.rule {
            PartitionRule::Slice => place as u64,
            PartitionRule::Hash => fnv1a(case_id.as_bytes()),
        };
        // Less than `shards`, so it fits.
        (number % u64::from(self.shards)) as u32 + 1
    }

    /// Every case once, in the order of the run, with its shard.
    pub fn deal<'a>(&self, case_ids: impl IntoIterator<Item = &'a str>) -> Vec<(&'a str, u32)> {
        let mut seen = BTreeSet::new();
        let different = case_ids.into_iter().filter(|&id| seen.insert(id));
        different.enumerate().map(|(place, id)| (id, self.shard_of(place, id))).collect()
    }
}

impl FromStr for Partition {
    type Err = PartitionError;

    fn from_str(text: &str) -> Result<Partition, PartitionError> {
        let refused = |reason| PartitionError::Syntax { text: text.to_owned(), reason };
        let (name, part) = text.split_once(':').ok_or_else(|| refused("there is no rule before a colon"))?;
        let rule = match name {
            "slice" => PartitionRule::Slice,
            "hash" => PartitionRule::Hash,
            _ => return Err(refused("the rule is neither slice nor hash")),
        };
        let (shard, shards) = part.split_once('/').ok_or_else(|| refused("there is no '/' between two numbers"))?;
        let (Ok(shard), Ok(shards)) = (shard.parse(), shards.parse()) else {
            return Err(refused("shards are numbers"));
        };
        PartitionFields { rule, shard, shards }.try_into().map_err(|_| refused(OUT_OF_RANGE))
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = match self.rule {
            PartitionRule::Slice => "slice",
            PartitionRule::Hash => "hash",
        };
        write!(f, "{rule}:{}/{}", self.shard, self.shards)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn task(id: &str, count: &str, first: &str, more: &[(&str, &str)]) -> Result<Partition, PartitionError> {
        let known = [("SLURM_ARRAY_TASK_ID", id), ("SLURM_ARRAY_TASK_COUNT", count), ("SLURM_ARRAY_TASK_MIN", first)];
        let all: Vec<(&str, &str)> = known.iter().chain(more).copied().collect();
        Partition::of_array_task(|name| {
            let found = all.iter().find(|(known, value)| *known == name && !value.is_empty());
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    proptest! {
        #[test]
        fn each_case_is_in_exactly_one_shard(
            ids in proptest::collection::vec(".{0,40}", 0..60),
            shards in 1_u32..20,
            rule in prop_oneof![Just("slice"), Just("hash")],
        ) {
            for (place, id) in ids.iter().enumerate() {
                let parse = |shard: u32| format!("{rule}:{shard}/{shards}").parse::<Partition>().unwrap();
                let takers = (1..=shards).filter(|&shard| parse(shard).shard_of(place, id) == shard);
                prop_assert_eq!(takers.count(), 1);
            }
        }

        #[test]
        fn slices_differ_by_one_case_at_most(cases in 0_usize..500, shards in 1_u32..20) {
            let sizes: Vec<usize> = (1..=shards)
                .map(|shard| format!("slice:{shard}/{shards}").parse::<Partition>().unwrap())
                .map(|partition| (0..cases).filter(|&place| partition.shard_of(place, "") == partition.shard).count())
                .collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
        }

        #[test]
        fn hash_ignores_the_position(id in ".{0,40}", place in 0_usize..1000) {
            let partition: Partition = "hash:1/7".parse().unwrap();
            prop_assert_eq!(partition.shard_of(place, &id), partition.shard_of(0, &id));
        }

        #[test]
        fn parsed_partition_is_printed_unchanged(text in "(slice|hash):[1-9]/[1-9]") {
            if let Ok(partition) = text.parse::<Partition>() {
                prop_assert_eq!(partition.to_string(), text);
            }
        }
    }

    #[test]
    fn repeated_case_is_assigned_once() {
        let partition: Partition = "slice:1/2".parse().unwrap();
        assert_eq!(partition.deal(["a", "b", "a", "c"]), [("a", 1), ("b", 2), ("c", 1)]);
    }

    #[test]
    fn hash_is_stable_across_releases() {
        let partition: Partition = "hash:1/5".parse().unwrap();
        let dealt = ["", "a", "quick/checkerboard/caching@sim#1", "strategies/random/direct@sim<=8GiB#7"]
            .map(|id| partition.shard_of(0, id));
        // FNV-1a of "" is 14695981039346656037, and of "a" 12638187200555641996.
        assert_eq!(dealt[..2], [3, 2]);
        assert_eq!(dealt, [3, 2, 1, 4]);
    }

    #[test]
    fn invalid_partitions_are_refused() {
        for (text, reason) in [
            ("2/4", "no rule"),
            ("third:2/4", "neither slice nor hash"),
            ("slice:2", "no '/'"),
            ("slice:two/4", "numbers"),
            ("slice:0/4", "counted from 1"),
            ("hash:5/4", "counted from 1"),
            ("hash:0/0", "counted from 1"),
            ("slice:-1/4", "numbers"),
        ] {
            let message = text.parse::<Partition>().unwrap_err().to_string();
            assert!(message.contains(reason) && message.contains("write slice:2/4"), "{message}");
        }
    }

    #[test]
    fn invalid_shards_in_files_are_refused() {
        let read = |json| serde_json::from_str::<Partition>(json).map_err(|error| error.to_string());
        assert_eq!(read(r#"{"rule": "slice", "shard": 2, "shards": 3}"#).unwrap().to_string(), "slice:2/3");
        for (json, name) in [
            (r#"{"rule": "slice", "shard": 99, "shards": 3}"#, "slice:99/3"),
            (r#"{"rule": "hash", "shard": 0, "shards": 0}"#, "hash:0/0"),
        ] {
            let message = read(json).unwrap_err();
            assert!(message.contains(name) && message.contains("counted from 1"), "{message}");
        }
    }

    #[test]
    fn array_tasks_are_shards() {
        for (id, count, first, more, expected) in [
            ("1", "4", "1", vec![], "slice:1/4"),
            ("3", "4", "0", vec![("SLURM_ARRAY_TASK_MAX", "3"), ("SLURM_ARRAY_TASK_STEP", "1")], "slice:4/4"),
            ("14", "3", "10", vec![("SLURM_ARRAY_TASK_MAX", "14"), ("SLURM_ARRAY_TASK_STEP", "2")], "slice:3/3"),
        ] {
            assert_eq!(task(id, count, first, &more).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn invalid_array_variables_are_explained() {
        let message = task("", "4", "1", &[]).unwrap_err().to_string();
        assert!(message.contains("SLURM_ARRAY_TASK_ID is not set") && message.contains("--array=1-4"), "{message}");
        assert!(task("1", "", "1", &[]).unwrap_err().to_string().contains("SLURM_ARRAY_TASK_COUNT is not set"));
        assert!(task("1", "many", "1", &[]).unwrap_err().to_string().contains("'many', which is not a number"));
        for (id, count, first, more) in [
            ("5", "4", "1", vec![]),
            ("0", "4", "1", vec![]),
            ("7", "3", "1", vec![("SLURM_ARRAY_TASK_MAX", "7")]),
            ("3", "3", "1", vec![("SLURM_ARRAY_TASK_MAX", "7")]),
            ("3", "3", "2", vec![("SLURM_ARRAY_TASK_STEP", "2")]),
            ("1", "0", "1", vec![]),
            ("1", "18446744073709551615", "0", vec![]),
        ] {
            let refusal = task(id, count, first, &more);
            assert!(matches!(refusal, Err(PartitionError::Gaps { .. })), "{id} of {count} from {first}: {refusal:?}");
        }
    }
}

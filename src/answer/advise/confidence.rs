//! How sure advice is: how exactly the model reproduces the recording, and how often predictions for other settings were
//! compared with real runs.

use serde::Serialize;

use crate::replay::verify::{Verdict, Verification};

/// How exactly the model reproduces the recorded run. Predictions for other settings have their own record:
/// [`checked_predictions`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Confidence {
    /// Under the settings of the recording the model does what PyTorch did, entry by entry.
    Exact {
        /// How many entries were compared.
        entries: usize,
        /// Blocks that were there before the recording. Where there are any, thresholds are searched with them asked for
        /// first, in address order: how they and the free memory between them really lay depends on what came before.
        blocks_before: usize,
    },
    /// The recording does not tell enough to say.
    Partial {
        /// What it does not tell.
        reasons: Vec<String>,
    },
    /// The model does something else than PyTorch did.
    Diverged {
        /// How many entries agree before that.
        entries_agreed: usize,
        /// The first difference.
        difference: String,
    },
    /// There is no recording to compare with: a workload, or a trace that says what was asked for and not what was
    /// answered.
    #[default]
    Unverified,
}

impl Confidence {
    /// The confidence that follows from verifying the recording.
    #[must_use]
    pub fn of(verification: &Verification) -> Confidence {
        match &verification.verdict {
            Verdict::Exact => Confidence::Exact {
                entries: verification.agreed,
                blocks_before: verification.beginning.map_or(0, |beginning| beginning.blocks),
            },
            Verdict::Partial { reasons, divergence } => Confidence::Partial {
                reasons: reasons.iter().cloned().chain(divergence.as_ref().map(|found| found.in_words())).collect(),
            },
            Verdict::Diverged(divergence) => {
                Confidence::Diverged { entries_agreed: verification.agreed, difference: divergence.in_words() }
            }
        }
    }
}

/// How often predictions for a kind of settings were compared with real runs (`results/what-if`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckedPredictions {
    /// Real runs under settings with the same keys.
    pub runs: u32,
    /// The runs whose peak of reserved memory was predicted to the byte.
    pub exact: u32,
}

/// The published comparisons, by the keys of the settings.
const CHECKED: &[(&[&str], u32, u32)] = &[
    (&[], 3, 3),
    (&["expandable_segments"], 8, 8),
    (&["expandable_segments", "roundup_power2_divisions"], 4, 4),
    (&["garbage_collection_threshold"], 8, 8),
    (&["max_split_size_mb"], 8, 8),
    (&["roundup_power2_divisions"], 4, 3),
];

/// How often predictions for settings with these keys were compared with real runs.
#[must_use]
pub fn checked_predictions(settings: &str) -> CheckedPredictions {
    let keys = keys(settings);
    let row = CHECKED.iter().find(|(checked, ..)| *checked == keys);
    row.map_or_else(CheckedPredictions::default, |&(_, runs, exact)| CheckedPredictions { runs, exact })
}

/// The keys of settings in words, such as `expandable_segments and max_split_size_mb`.
#[must_use]
pub fn checked_keys(settings: &str) -> String {
    match keys(settings)[..] {
        [] => "the default settings".to_owned(),
        ref keys => keys.join(" and "),
    }
}

/// The keys of settings as in `PYTORCH_CUDA_ALLOC_CONF`, in order of the alphabet.
fn keys(settings: &str) -> Vec<&str> {
    // A list such as [256:1,512:2] is one value.
    let mut depth = 0_i32;
    let separate = |c: char| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    };
    let mut keys: Vec<&str> =
        settings.split(separate).filter_map(|setting| setting.split(':').next()).map(str::trim).collect();
    keys.retain(|key| !key.is_empty());
    keys.sort_unstable();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_comparisons_are_counted() {
        let table = include_bytes!("../../../results/what-if/what-if.csv");
        let mut counted: std::collections::BTreeMap<Vec<String>, (u32, u32)> = std::collections::BTreeMap::new();
        for row in csv::Reader::from_reader(&table[..]).records() {
            let row = row.unwrap();
            let keys = keys(&row[2]).iter().map(|key| (*key).to_owned()).collect();
            let (runs, exact) = counted.entry(keys).or_default();
            (*runs, *exact) = (*runs + 1, *exact + u32::from(row[4] == row[5]));
        }
        let expected: std::collections::BTreeMap<Vec<String>, (u32, u32)> = CHECKED
            .iter()
            .map(|(keys, runs, exact)| (keys.iter().map(|key| (*key).to_owned()).collect(), (*runs, *exact)))
            .collect();
        assert_eq!(counted, expected);
    }

    #[test]
    fn combination_that_never_ran_is_unchecked() {
        assert_eq!(checked_predictions("max_split_size_mb:64").runs, 8);
        assert_eq!(checked_predictions("roundup_power2_divisions:[256:1,>:8],expandable_segments:True").runs, 4);
        assert_eq!(checked_predictions("max_split_size_mb:64,garbage_collection_threshold:0.8").runs, 0);
    }
}

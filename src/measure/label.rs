//! Which case it is: the identity that rows, files and `--resume` agree on.

use serde::{Deserialize, Serialize};

use crate::base::{GIB, KIB, MIB};

/// What was run, where, and from which seed. Two cases with the same label give the same deterministic columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CaseLabel {
    /// The suite that asked for it, or the command where there was none.
    pub suite: String,
    /// The workload with the parameters that were set, or the name of a recording.
    pub workload: String,
    /// The strategy as users type it.
    pub strategy: String,
    /// The device as users type it.
    pub device: String,
    /// `--limit`: cap on physical bytes.
    pub limit: Option<u64>,
    /// What the workload's random choices start from.
    pub seed: u64,
    /// How often the whole trace runs back to back; 0 counts as 1.
    pub repeat: u32,
}

/// File systems take names of 255 bytes; the hash and the ending need room too.
const LONGEST_READABLE_PART: usize = 160;

impl CaseLabel {
    /// The case in one line: `suite/workload/strategy@device<=limit#seed`, followed by `x` and the number of rounds
    /// where there is more than one.
    ///
    /// ```
    /// use oomph::measure::CaseLabel;
    /// let label = CaseLabel {
    ///     suite: "quick".into(),
    ///     workload: "checkerboard".into(),
    ///     strategy: "caching".into(),
    ///     device: "sim".into(),
    ///     limit: Some(8 << 30),
    ///     seed: 7,
    ///     repeat: 1,
    /// };
    /// assert_eq!(label.case_id(), "quick/checkerboard/caching@sim<=8GiB#7");
    /// ```
    #[must_use]
    pub fn case_id(&self) -> String {
        let mut id = format!("{}/{}/{}@{}", self.suite, self.workload, self.strategy, self.device);
        if let Some(limit) = self.limit {
            id.push_str("<=");
            id.push_str(&exact_bytes(limit));
        }
        id.push_str(&format!("#{}", self.seed));
        if self.repeat > 1 {
            id.push_str(&format!("x{}", self.repeat));
        }
        id
    }

    /// The case as the stem of a file name: letters, digits and a few signs that every file system and shell leaves
    /// alone, and a hash that keeps apart what the replacement would throw together.
    #[must_use]
    pub fn file_stem(&self) -> String {
        file_stem(&self.case_id())
    }
}

/// [`CaseLabel::file_stem`] for an id that was read from a file.
#[must_use]
pub fn file_stem(case_id: &str) -> String {
    let readable: String = case_id
        .chars()
        .take(LONGEST_READABLE_PART)
        .map(|c| if c.is_ascii_alphanumeric() || "._-=+".contains(c) { c } else { '_' })
        .collect();
    format!("{readable}-{:016x}", fnv1a(case_id.as_bytes()))
}

/// The amount in the largest unit that divides it, so that nothing is rounded away.
fn exact_bytes(bytes: u64) -> String {
    [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes != 0 && bytes.is_multiple_of(*unit))
        .map_or_else(|| format!("{bytes}B"), |(unit, name)| format!("{}{name}", bytes / unit))
}

/// The 64-bit FNV-1a hash: file names and shards must stay the same from release to release, which the standard
/// library's hasher does not promise.
#[must_use]
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> CaseLabel {
        CaseLabel {
            suite: "quick".to_owned(),
            workload: "varlen".to_owned(),
            strategy: "caching:max_split_size_mb:128".to_owned(),
            device: "sim:80GiB".to_owned(),
            limit: None,
            seed: 0,
            repeat: 0,
        }
    }

    #[test]
    fn the_id_reads_from_left_to_right_and_leaves_out_what_was_not_asked_for() {
        assert_eq!(label().case_id(), "quick/varlen/caching:max_split_size_mb:128@sim:80GiB#0");
        let limited = CaseLabel { limit: Some(3 * MIB), repeat: 3, ..label() };
        assert_eq!(limited.case_id(), "quick/varlen/caching:max_split_size_mb:128@sim:80GiB<=3MiB#0x3");
    }

    #[test]
    fn limits_are_never_rounded_in_an_id() {
        assert_eq!(exact_bytes(GIB + 1), "1073741825B");
        assert_eq!(exact_bytes(1536 * MIB), "1536MiB");
        assert_eq!(exact_bytes(0), "0B");
    }

    #[test]
    fn file_names_are_safe_short_and_different_for_different_cases() {
        let stem = label().file_stem();
        assert!(stem.chars().all(|c| c.is_ascii_alphanumeric() || "._-=+".contains(c)), "{stem}");
        let long = CaseLabel { workload: "w/".repeat(400), ..label() };
        assert!(long.file_stem().len() < 200);
        assert_ne!(file_stem("a/b"), file_stem("a:b"));
    }
}

//! The releases of PyTorch whose allocator is known, and the rules in which they differ.
//!
//! Every rule was found on the allocator library of each release's wheel and is compared with it by
//! `tools/torch-oracle`. What is not here is the same in all releases.

use std::{fmt, str::FromStr};

/// A release of PyTorch 2, without its patch number: `2.11`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Release {
    minor: u8,
}

impl Release {
    /// The oldest release whose files can be read.
    pub const OLDEST: Release = Release::new(0);
    /// The newest known release.
    pub const NEWEST: Release = Release::new(15);
    /// The release where none is named. All published results were measured with it.
    pub const DEFAULT: Release = Release::new(11);

    /// Release 2.`minor`.
    #[must_use]
    pub const fn new(minor: u8) -> Release {
        Release { minor }
    }

    /// All known releases, the oldest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Release> {
        (Release::OLDEST.minor..=Release::NEWEST.minor).map(Release::new)
    }

    /// The rules of its allocator.
    #[must_use]
    pub const fn rules(self) -> &'static AllocatorRules {
        &RULES[self.minor as usize]
    }
}

impl Default for Release {
    fn default() -> Self {
        Release::DEFAULT
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "2.{}", self.minor)
    }
}

/// A text that is not a known release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a known release of PyTorch; write {oldest} to {newest}",
    oldest = Release::OLDEST,
    newest = Release::NEWEST
)]
pub struct ReleaseError {
    text: String,
}

/// Reads `2.13`, `2.13.1` and `2.13.0+cu130`: patch releases have the same allocator.
impl FromStr for Release {
    type Err = ReleaseError;

    fn from_str(text: &str) -> Result<Release, ReleaseError> {
        let number = text.trim().split('+').next().unwrap_or_default();
        let mut parts = number.split('.');
        let (major, minor) = (parts.next(), parts.next().and_then(|minor| minor.parse().ok()));
        let has_valid_rest = parts.all(|part| part.starts_with(|c: char| c.is_ascii_digit()));
        match (major, minor.map(Release::new)) {
            (Some("2"), Some(release)) if release <= Release::NEWEST && has_valid_rest => Ok(release),
            _ => Err(ReleaseError { text: text.to_owned() }),
        }
    }
}

impl From<Release> for String {
    fn from(release: Release) -> String {
        release.to_string()
    }
}

impl TryFrom<String> for Release {
    type Error = ReleaseError;

    fn try_from(text: String) -> Result<Release, ReleaseError> {
        text.parse()
    }
}

/// The rules of an allocator that differ between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorRules {
    /// Which of several free blocks of one size comes first (`BlockComparatorSize`).
    pub ties: TieOrder,
    /// The entry `>` of `roundup_power2_divisions` also replaces the entry of the last key
    /// (`parseRoundUpPower2Divisions`).
    pub above_includes_last: bool,
    /// A list entry of `roundup_power2_divisions` may be 0.
    pub accepts_no_divisions: bool,
    /// Where `roundup_power2_divisions` is 1, a size above 512 stays as it is (`round_size`).
    pub one_division_keeps_size: bool,
    /// How a memory fraction becomes a limit (`setMemoryFraction`).
    pub fraction: FractionRule,
    /// The text of settings is read strictly: separators are checked and whole numbers have 32 bits
    /// (`CUDAAllocatorConfig::consumeToken`). Later, separators are skipped unseen.
    pub strict_settings: bool,
    /// The least value of `max_split_size_mb` and `max_non_split_rounding_mb` is
    /// `large_segment_size_mb`. Before, it was 21.
    pub oversize_from_segment: bool,
    /// Reading settings resets `max_non_split_rounding_mb`.
    pub resets_non_split_rounding: bool,
    /// `throw_on_cudamalloc_oom` exists, and its rejections are counted.
    pub rejects_early: bool,
    /// `release_available_cached_blocks` skips blocks of expandable segments. Before, an assertion
    /// failed at such a block.
    pub release_skips_expandable: bool,
    /// The rules of private pools.
    pub pools: PoolRules,
}

/// Which of several free blocks of one size comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TieOrder {
    /// The one with the lowest address.
    Address,
    /// The oldest `Block` object.
    Block,
    /// The one in the oldest segment, and within it the one with the lowest address.
    Segment,
}

/// How a memory fraction becomes a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FractionRule {
    /// The product is rounded to the nearest byte. Before, it was truncated.
    pub rounds: bool,
    /// A fraction of 1 is a limit too, and the memory is what `cudaMemGetInfo` calls the total.
    /// Later, only fractions below 1 are limits, of `totalGlobalMem`.
    pub one_is_a_limit: bool,
}

impl FractionRule {
    /// The limit that a fraction of a device with `total` bytes sets.
    #[must_use]
    pub fn limit(self, fraction: f64, total: u64) -> Option<u64> {
        let bytes = fraction * total as f64;
        let limit = if self.rounds { bytes.round() } else { bytes } as u64;
        (self.one_is_a_limit || fraction < 1.0).then_some(limit)
    }
}

/// The rules of private pools that differ between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// They use expandable segments. Before, they used `cudaMalloc`, but were searched and split as
    /// the setting says.
    pub expandable: bool,
    /// Of several scopes that match a stream, the latest decides. Before, it was the first one.
    pub latest_scope: bool,
    /// Only a stream capture is a capture. Before, any scope of a pool was one.
    pub scope_is_no_capture: bool,
    /// `empty_cache` during a capture releases pools without users. Before, an assertion failed.
    pub trims_in_capture: bool,
    /// Stream uses that are recorded during a capture are dropped when it ends. Before, they got
    /// events.
    pub drops_capture_uses: bool,
    /// When memory of a pool with `use_on_oom` serves a request of the default pool.
    pub fallback: PoolFallback,
}

/// When memory of a pool with `use_on_oom` serves a request of the default pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolFallback {
    /// Never: the option does not exist.
    Absent,
    /// As the last resort, searched as the setting of expandable segments says.
    Last,
    /// As the last resort, searched as without expandable segments.
    LastOrdinary,
    /// After the first failed allocation, searched as without expandable segments.
    First,
}

const R2_0: AllocatorRules = AllocatorRules {
    ties: TieOrder::Address,
    above_includes_last: true,
    accepts_no_divisions: false,
    one_division_keeps_size: true,
    fraction: FractionRule { rounds: false, one_is_a_limit: true },
    strict_settings: true,
    oversize_from_segment: false,
    resets_non_split_rounding: false,
    rejects_early: false,
    release_skips_expandable: false,
    pools: PoolRules {
        expandable: false,
        latest_scope: false,
        scope_is_no_capture: false,
        trims_in_capture: false,
        drops_capture_uses: false,
        fallback: PoolFallback::Absent,
    },
};
const R2_4: AllocatorRules = AllocatorRules {
    accepts_no_divisions: true,
    one_division_keeps_size: false,
    pools: PoolRules { drops_capture_uses: true, ..R2_0.pools },
    ..R2_0
};
const R2_5: AllocatorRules =
    AllocatorRules { release_skips_expandable: true, pools: PoolRules { expandable: true, ..R2_4.pools }, ..R2_4 };
const R2_8: AllocatorRules =
    AllocatorRules { pools: PoolRules { trims_in_capture: true, fallback: PoolFallback::Last, ..R2_5.pools }, ..R2_5 };
const R2_10: AllocatorRules = AllocatorRules {
    above_includes_last: false,
    fraction: FractionRule { one_is_a_limit: false, ..R2_8.fraction },
    strict_settings: false,
    oversize_from_segment: true,
    pools: PoolRules { latest_scope: true, fallback: PoolFallback::LastOrdinary, ..R2_8.pools },
    ..R2_8
};
const R2_11: AllocatorRules = AllocatorRules {
    resets_non_split_rounding: true,
    pools: PoolRules { fallback: PoolFallback::First, ..R2_10.pools },
    ..R2_10
};
const R2_12: AllocatorRules = AllocatorRules { ties: TieOrder::Block, rejects_early: true, ..R2_11 };
const R2_13: AllocatorRules = AllocatorRules {
    ties: TieOrder::Segment,
    fraction: FractionRule { rounds: true, ..R2_12.fraction },
    pools: PoolRules { scope_is_no_capture: true, ..R2_12.pools },
    ..R2_12
};

/// The rules of each release, from [`Release::OLDEST`] to [`Release::NEWEST`].
const RULES: [AllocatorRules; Release::NEWEST.minor as usize + 1] =
    [R2_0, R2_0, R2_0, R2_0, R2_4, R2_5, R2_5, R2_5, R2_8, R2_8, R2_10, R2_11, R2_12, R2_13, R2_13, R2_13];

/// The releases from one to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseSpan {
    /// The oldest.
    pub first: Release,
    /// The newest.
    pub last: Release,
}

impl ReleaseSpan {
    /// Every known release.
    pub const ALL: ReleaseSpan = ReleaseSpan { first: Release::OLDEST, last: Release::NEWEST };

    /// One release.
    #[must_use]
    pub const fn only(release: Release) -> ReleaseSpan {
        ReleaseSpan { first: release, last: release }
    }

    /// Whether it has this release.
    #[must_use]
    pub fn contains(self, release: Release) -> bool {
        self.first <= release && release <= self.last
    }

    /// Its releases, the oldest first.
    pub fn releases(self) -> impl DoubleEndedIterator<Item = Release> {
        Release::all().filter(move |&release| self.contains(release))
    }
}

impl fmt::Display for ReleaseSpan {
    /// `2.13`, `2.3 or 2.4`, `2.5 to 2.7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReleaseSpan { first, last } = self;
        match self.releases().count() {
            1 => write!(f, "{first}"),
            2 => write!(f, "{first} or {last}"),
            _ => write!(f, "{first} to {last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_with_patch_and_build() {
        for text in ["2.13", "2.13.0", "2.13.1+cu130", " 2.13 "] {
            assert_eq!(text.parse(), Ok(Release::new(13)), "{text}");
        }
        assert_eq!(Release::new(13).to_string(), "2.13");
        for text in ["", "2", "2.16", "1.13", "2.x", "3.0", "2.13.x", "2.-1"] {
            let message = text.parse::<Release>().unwrap_err().to_string();
            assert!(message.contains(text) && message.contains("2.0 to 2.15"), "{message}");
        }
    }

    #[test]
    fn every_release_has_rules() {
        assert_eq!(Release::all().count(), RULES.len());
        assert_eq!(Release::DEFAULT.rules().ties, TieOrder::Address);
        assert_eq!(Release::NEWEST.rules().ties, TieOrder::Segment);
    }

    #[test]
    fn span_is_shown_in_words() {
        let span = |first, last| ReleaseSpan { first: Release::new(first), last: Release::new(last) }.to_string();
        assert_eq!([span(13, 13), span(3, 4), span(5, 7)], ["2.13", "2.3 or 2.4", "2.5 to 2.7"]);
        assert_eq!(ReleaseSpan::ALL.releases().count(), Release::all().count());
    }
}

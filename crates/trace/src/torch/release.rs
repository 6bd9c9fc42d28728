//! Tells the release of PyTorch that wrote a snapshot from the keys in it.
//!
//! [`SIGNS`] has the keys that are new in each release. A key that is there gives the oldest possible release. A key that
//! PyTorch always writes and that is not there gives the newest one.

use std::fmt;

use super::{RecordedSettings, keys::SnapshotWord};
use oomph_pytorch::{AllocatorSettingsError, MIN_BLOCK_SIZE, Release, ReleaseSpan};

/// Where a key is in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyPlace {
    TopLevel,
    Settings,
    Entries,
    Segments,
    Blocks,
}

impl KeyPlace {
    const COUNT: usize = 5;

    const fn words(self) -> &'static str {
        match self {
            KeyPlace::TopLevel => "its top-level keys",
            KeyPlace::Settings => "its settings",
            KeyPlace::Entries => "its entries",
            KeyPlace::Segments => "its segments",
            KeyPlace::Blocks => "its blocks",
        }
    }
}

/// A key that is new in a release.
struct ReleaseSign {
    since: Release,
    place: KeyPlace,
    word: SnapshotWord,
    /// It is there wherever its place is. Other keys are there only if the program used something.
    always: bool,
}

const fn always(minor: u8, place: KeyPlace, word: SnapshotWord) -> ReleaseSign {
    ReleaseSign { since: Release::new(minor), place, word, always: true }
}

const fn sometimes(minor: u8, place: KeyPlace, word: SnapshotWord) -> ReleaseSign {
    ReleaseSign { always: false, ..always(minor, place, word) }
}

/// The new keys of each release (`THCPModule_memorySnapshot` in `torch/csrc/cuda/Module.cpp`, and
/// `_memory_snapshot_pickled`, which writes the same ones). 2.4, 2.6 and 2.7 have none.
const SIGNS: [ReleaseSign; 19] = [
    always(1, KeyPlace::Segments, SnapshotWord::IsExpandable),
    always(1, KeyPlace::Segments, SnapshotWord::SegmentPoolId),
    always(1, KeyPlace::Blocks, SnapshotWord::Address),
    sometimes(1, KeyPlace::Entries, SnapshotWord::SegmentMap),
    always(2, KeyPlace::Entries, SnapshotWord::TimeUs),
    always(3, KeyPlace::TopLevel, SnapshotWord::AllocatorSettings),
    always(5, KeyPlace::TopLevel, SnapshotWord::ExternalAnnotations),
    always(8, KeyPlace::Entries, SnapshotWord::CompileContext),
    always(9, KeyPlace::Settings, SnapshotWord::GraphReuse),
    always(10, KeyPlace::Entries, SnapshotWord::UserMetadata),
    sometimes(11, KeyPlace::Entries, SnapshotWord::ForwardFrames),
    sometimes(11, KeyPlace::Blocks, SnapshotWord::ForwardFrames),
    always(12, KeyPlace::Entries, SnapshotWord::PoolId),
    always(13, KeyPlace::Settings, SnapshotWord::MaxRoundThreshold),
    always(13, KeyPlace::Settings, SnapshotWord::MaxCachedSize),
    always(14, KeyPlace::TopLevel, SnapshotWord::HostSegments),
    always(14, KeyPlace::TopLevel, SnapshotWord::HostTraces),
    sometimes(14, KeyPlace::Entries, SnapshotWord::Annotate),
    sometimes(15, KeyPlace::Entries, SnapshotWord::InternalMetadata),
];

/// The keys that a snapshot has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeysSeen {
    /// By place, one bit for each word.
    words: [u128; KeyPlace::COUNT],
    places: [bool; KeyPlace::COUNT],
}

impl KeysSeen {
    /// The snapshot has such a place.
    pub(crate) fn look_at(&mut self, place: KeyPlace) {
        self.places[place as usize] = true;
    }

    /// The place has a key; of entries also an action.
    pub(crate) fn see(&mut self, place: KeyPlace, word: SnapshotWord) {
        self.words[place as usize] |= 1 << word as u32;
    }

    /// Whether the snapshot has such a place.
    pub(crate) fn looked_at(&self, place: KeyPlace) -> bool {
        self.places[place as usize]
    }

    /// Whether the place has the key.
    pub(crate) fn has(&self, place: KeyPlace, word: SnapshotWord) -> bool {
        self.words[place as usize] >> word as u32 & 1 == 1
    }

    fn shows(&self, sign: &ReleaseSign) -> bool {
        self.has(sign.place, sign.word)
    }

    /// These keys and others.
    pub(crate) fn with(mut self, others: &KeysSeen) -> KeysSeen {
        for place in 0..KeyPlace::COUNT {
            self.words[place] |= others.words[place];
            self.places[place] |= others.places[place];
        }
        self
    }

    /// The keys of one place that tell a release.
    pub(crate) fn telling(place: KeyPlace) -> impl Iterator<Item = SnapshotWord> {
        SIGNS.iter().filter(move |sign| sign.place == place).map(|sign| sign.word)
    }

    /// The release that these keys tell.
    pub(crate) fn release(&self) -> RecordedRelease {
        let newest = SIGNS.iter().rev().find(|sign| self.shows(sign));
        let least = newest.map_or(Release::OLDEST, |sign| sign.since);
        let is_missing = |sign: &&ReleaseSign| {
            sign.always && sign.since > least && self.places[sign.place as usize] && !self.shows(sign)
        };
        let missing = SIGNS.iter().find(is_missing);
        let bound = |release: Release, sign: &ReleaseSign, verb: &str| ReleaseBound {
            release,
            place: sign.place.words(),
            sign: format!("{verb} `{}`, which exists since {}", sign.word.text(), sign.since),
        };
        let before = |since: Release| Release::all().rev().find(|&release| release < since).unwrap_or(since);
        RecordedRelease {
            at_least: newest.map(|sign| bound(sign.since, sign, "have")),
            at_most: missing.map(|sign| bound(before(sign.since), sign, "have no")),
            ..RecordedRelease::default()
        }
    }
}

/// Whether PyTorch writes a key in all releases that are possible, from the oldest one on.
pub(crate) fn is_expected(word: SnapshotWord, release: &RecordedRelease) -> bool {
    let least = release.at_least.as_ref().map_or(Release::OLDEST, |bound| bound.release);
    SIGNS.iter().any(|sign| sign.word == word && sign.since <= least)
}

/// Whether a release writes a key.
pub(crate) fn writes(release: Release, word: SnapshotWord) -> bool {
    SIGNS.iter().all(|sign| sign.word != word || sign.since <= release)
}

/// The oldest or newest possible release, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ReleaseBound {
    release: Release,
    /// What tells it: `its settings`.
    place: &'static str,
    /// What about it: ``have `pool_id`, which exists since 2.12``.
    sign: String,
}

/// The release that wrote a recording, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedRelease {
    at_least: Option<ReleaseBound>,
    at_most: Option<ReleaseBound>,
    /// The one that the user told.
    told: Option<Release>,
    /// The releases whose rules reproduce the recording, ascending, if that was tried.
    reproduced_by: Vec<Release>,
}

/// A release that cannot have written a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PyTorch {told} did not write it: {place} {sign}. Leave out the release, or give one that fits: {span}")]
pub struct ReleaseContradiction {
    told: Release,
    place: &'static str,
    sign: String,
    span: ReleaseSpan,
}

impl RecordedRelease {
    /// A known release.
    #[must_use]
    pub fn of(release: Release) -> RecordedRelease {
        RecordedRelease { told: Some(release), ..RecordedRelease::default() }
    }

    /// The release that the user tells.
    pub(crate) fn told(self, told: Release) -> Result<RecordedRelease, ReleaseContradiction> {
        let too_old = self.at_least.as_ref().filter(|bound| told < bound.release);
        let too_new = self.at_most.as_ref().filter(|bound| told > bound.release);
        match too_old.or(too_new) {
            Some(ReleaseBound { place, sign, .. }) => {
                Err(ReleaseContradiction { told, place, sign: sign.clone(), span: self.span() })
            }
            None => Ok(RecordedRelease { told: Some(told), ..self }),
        }
    }

    /// Leaves out the releases that cannot read its settings, or do not have such blocks.
    pub(crate) fn narrowed_by(self, settings: &RecordedSettings, odd_sizes: bool) -> RecordedRelease {
        let mut narrowed = self.narrowed_by_settings(settings);
        let last_with_odd_sizes = Release::all().rev().find(|release| release.rules().one_division_keeps_size);
        if let Some(last) = last_with_odd_sizes.filter(|&last| odd_sizes && narrowed.span().contains(last)) {
            let sign = format!("have sizes that are not multiples of {MIN_BLOCK_SIZE}, as up to {last}");
            narrowed.at_most = Some(ReleaseBound { release: last, place: KeyPlace::Blocks.words(), sign });
        }
        narrowed
    }

    fn narrowed_by_settings(mut self, settings: &RecordedSettings) -> RecordedRelease {
        let span = self.span();
        let refusal = settings.in_force(span.first).err();
        let first = span.releases().find(|&release| settings.in_force(release).is_ok());
        if let (Some(refusal), Some(first)) = (refusal, first) {
            let sign = match refusal {
                AllocatorSettingsError::NotYet { key, since, .. } => format!("name {key}, which exists since {since}"),
                refusal => format!("are valid since {first} only ({refusal})"),
            };
            self.at_least = Some(ReleaseBound { release: first, place: KeyPlace::Settings.words(), sign });
        }
        self
    }

    /// The releases that may have written it.
    #[must_use]
    pub fn span(&self) -> ReleaseSpan {
        if let Some(told) = self.told {
            return ReleaseSpan::only(told);
        }
        if let (Some(&first), Some(&last)) = (self.reproduced_by.first(), self.reproduced_by.last()) {
            return ReleaseSpan { first, last };
        }
        let bound = |bound: &Option<ReleaseBound>| bound.as_ref().map(|bound| bound.release);
        ReleaseSpan {
            first: bound(&self.at_least).unwrap_or(Release::OLDEST),
            last: bound(&self.at_most).unwrap_or(Release::NEWEST),
        }
    }

    /// The releases that may have written it, if something tells them.
    #[must_use]
    pub fn known_span(&self) -> Option<ReleaseSpan> {
        let is_known = self.told.is_some() || self.at_least.is_some() || self.at_most.is_some();
        is_known.then(|| self.span())
    }

    /// The release whose rules are used: the newest possible one; the default where nothing excludes newer ones.
    #[must_use]
    pub fn assumed(&self) -> Release {
        let span = self.span();
        let is_open = self.told.is_none() && self.at_most.is_none() && self.reproduced_by.is_empty();
        if is_open && span.contains(Release::DEFAULT) { Release::DEFAULT } else { span.last }
    }

    /// The releases to try: all possible ones, or the assumed one if nothing tells any.
    #[must_use]
    pub fn candidates(&self) -> ReleaseSpan {
        self.known_span().unwrap_or(ReleaseSpan::only(self.assumed()))
    }

    /// The same, after verification with each possible release. `reproduced_by`: those that agree, ascending.
    #[must_use]
    pub fn tried(&self, reproduced_by: Vec<Release>) -> RecordedRelease {
        RecordedRelease { reproduced_by, ..self.clone() }
    }
}

impl fmt::Display for RecordedRelease {
    /// The release and how it is known: `2.13, from its settings`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = self.span();
        if self.told.is_some() {
            return write!(f, "{span}, as told");
        }
        let possible = RecordedRelease { reproduced_by: Vec::new(), ..self.clone() }.span();
        let among = possible.releases().count();
        match self.reproduced_by[..] {
            [only] if among > 1 => return write!(f, "{only}, the only one of {possible} that agrees"),
            [_, _] => return write!(f, "{span}: both agree"),
            [_, _, ..] => return write!(f, "{span}: all agree"),
            _ => {}
        }
        match self.at_least.as_ref().or(self.at_most.as_ref()) {
            Some(bound) => write!(f, "{span}, from {}", bound.place),
            None => write!(f, "{}, assumed", self.assumed()),
        }
    }
}

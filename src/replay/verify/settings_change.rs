//! Settings that the program changed while it ran. A snapshot contains those at its end, and the text that the program
//! started with.

use super::{Assumptions, Counters, Divergence, Verdict, Verification, verify_assuming};
use crate::{
    base::{MIB, NoProgress, Progress},
    pytorch::{AllocatorSettings, ROUNDUP_INTERVALS, Release, UNLIMITED},
    strategy::Setup,
    trace::torch::{Recording, SettingsOrigin},
};

/// Settings, and from where on they were in force.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsPhase {
    /// The first entry of the first call under them.
    pub entry: usize,
    /// The settings.
    pub settings: AllocatorSettings,
}

impl SettingsPhase {
    /// What is different from the settings before, as `name before -> after`.
    #[must_use]
    pub fn change_from(&self, before: &AllocatorSettings) -> String {
        let after = &self.settings;
        let mebibytes = |bytes: u64| if bytes == UNLIMITED { "none".to_owned() } else { (bytes / MIB).to_string() };
        let all = [
            ("max_split_size_mb", mebibytes(before.max_split_size), mebibytes(after.max_split_size)),
            (
                "garbage_collection_threshold",
                before.garbage_collection_threshold.to_string(),
                after.garbage_collection_threshold.to_string(),
            ),
            (
                "max_non_split_rounding_mb",
                mebibytes(before.max_non_split_rounding),
                mebibytes(after.max_non_split_rounding),
            ),
            ("large_segment_size_mb", mebibytes(before.large_segment_size), mebibytes(after.large_segment_size)),
            ("expandable_segments", before.expandable_segments.to_string(), after.expandable_segments.to_string()),
            (
                "roundup_power2_divisions",
                format!("{:?}", before.roundup_power2_divisions),
                format!("{:?}", after.roundup_power2_divisions),
            ),
        ];
        let changed = all.into_iter().filter(|(_, before, after)| before != after);
        let changed: Vec<String> = changed.map(|(name, before, after)| format!("{name} {before} -> {after}")).collect();
        if changed.is_empty() { "other settings".to_owned() } else { changed.join(", ") }
    }
}

/// How many times a program may have changed its settings. With many changes, anything could be explained.
const MOST_CHANGES: usize = 2;

/// How many places before the first visible one are tried for a change, each twice as far away as the one before.
const MOST_STEPS_BACK: usize = 8;

/// How many entries are read in a search.
const MOST_ENTRIES: usize = 30_000_000;

/// How many settings may differ from the usual ones of a phase.
const MOST_REFINEMENTS: usize = 12;

/// How hard settings are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchWidth {
    /// The settings of the file's text, the defaults, and usual values.
    Usual,
    /// Also other values of every single setting, one after the other. The more is tried, the more can be explained, so this
    /// comes after other explanations.
    Wide,
}

/// Explains a divergence by settings that the program changed, if that explains everything: it started with others, and
/// ended with those of the recording. Each phase ends with the first call that its settings do not explain, or before.
pub(super) fn explain(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    diverged: &Verification,
    width: SearchWidth,
    progress: &dyn Progress,
) -> Option<Verification> {
    // Settings that are not in the file are those of the whole run, as far as is known.
    let are_of_the_end = recording.settings_from == SettingsOrigin::File;
    if !are_of_the_end || !matches!(diverged.divergence(), Some(Divergence::Entries { .. })) {
        return None;
    }
    if width == SearchWidth::Wide && recording.has_private_pools() {
        // Unknown pools explain much by themselves.
        return None;
    }
    let last = recording.settings_in_force().ok()?;
    progress.begin_stage("looking for settings that changed", 0);
    let mut search = SettingsSearch { recording, setup, counters, last, entries_left: MOST_ENTRIES };
    let mut phases: Vec<SettingsPhase> = Vec::new();
    let mut reached = next_call(diverged);
    for _ in 0..MOST_CHANGES {
        let begins = phases.last().map_or(0, |_| reached);
        let (place, settings) = search.furthest(&phases, begins, reached, width)?;
        phases.push(SettingsPhase { entry: begins, settings });
        if let Some(explained) = search.ends_with_last(&phases, begins, place, width) {
            return Some(explained);
        }
        reached = place;
    }
    None
}

/// A search for settings, within a budget.
struct SettingsSearch<'a> {
    recording: &'a Recording,
    setup: &'a Setup<'a>,
    counters: &'a Counters,
    /// The settings at the end.
    last: AllocatorSettings,
    entries_left: usize,
}

impl SettingsSearch<'_> {
    /// Verifies under settings; `None` where the budget is spent.
    fn verify(&mut self, phases: &[SettingsPhase], next: SettingsPhase) -> Option<Verification> {
        self.entries_left = self.entries_left.checked_sub(self.recording.witnessed.len())?;
        let settings = [phases, &[next]].concat();
        let assumptions = Assumptions { settings, ..Assumptions::of(self.recording) };
        Some(verify_assuming(self.recording, self.setup, self.counters, &assumptions, &NoProgress))
    }

    /// The settings that explain the most entries from `begins` on, and the first entry that they do not explain. `None` if
    /// that is not beyond `reached`.
    fn furthest(
        &mut self,
        phases: &[SettingsPhase],
        begins: usize,
        reached: usize,
        width: SearchWidth,
    ) -> Option<(usize, AllocatorSettings)> {
        let mut best: Option<(usize, AllocatorSettings)> = None;
        let mut candidates = other_settings(self.recording, &self.last);
        let rounds = if width == SearchWidth::Wide { MOST_REFINEMENTS } else { 0 };
        for round in 0..=rounds {
            let before = best.as_ref().map_or(reached, |(place, _)| *place);
            for settings in std::mem::take(&mut candidates) {
                let phase = SettingsPhase { entry: begins, settings: settings.clone() };
                let Some(found) = self.verify(phases, phase) else { return best };
                let place = next_call(&found);
                if place > best.as_ref().map_or(reached, |(place, _)| *place) {
                    best = Some((place, settings));
                }
            }
            let after = best.as_ref().map_or(reached, |(place, _)| *place);
            if after >= self.recording.witnessed.len() || round > 0 && after == before {
                break;
            }
            candidates = single_changes(best.as_ref().map_or(&self.last, |(_, settings)| settings));
        }
        best
    }

    /// Whether the program went over to the last settings before `place`, the first entry that those of the last phase do
    /// not explain. Settings can have changed some calls before the first entry that shows it.
    fn ends_with_last(
        &mut self,
        phases: &[SettingsPhase],
        begins: usize,
        place: usize,
        width: SearchWidth,
    ) -> Option<Verification> {
        let steps = if width == SearchWidth::Wide { MOST_STEPS_BACK } else { 0 };
        let steps_back = std::iter::once(0).chain((0..steps).map(|step| 1_usize << step));
        for back in steps_back.take_while(|back| begins + back <= place) {
            let change = SettingsPhase { entry: place - back, settings: self.last.clone() };
            let found = self.verify(phases, change)?;
            if found.verdict == Verdict::Exact {
                return Some(found);
            }
        }
        None
    }
}

/// Settings that differ from others in one point.
fn single_changes(base: &AllocatorSettings) -> Vec<AllocatorSettings> {
    let mut changed = vec![AllocatorSettings { expandable_segments: !base.expandable_segments, ..base.clone() }];
    let divisions = [0, 1, 2, 4, 8, 16];
    changed.extend(
        divisions
            .map(|parts| AllocatorSettings { roundup_power2_divisions: [parts; ROUNDUP_INTERVALS], ..base.clone() }),
    );
    for interval in 0..ROUNDUP_INTERVALS {
        changed.extend(divisions.map(|parts| {
            let mut roundup_power2_divisions = base.roundup_power2_divisions;
            // A list is given from one size on; the next sizes have the same divisions until another one is given.
            roundup_power2_divisions[interval..].fill(parts);
            AllocatorSettings { roundup_power2_divisions, ..base.clone() }
        }));
        changed.extend(divisions.map(|parts| {
            let mut roundup_power2_divisions = base.roundup_power2_divisions;
            roundup_power2_divisions[interval] = parts;
            AllocatorSettings { roundup_power2_divisions, ..base.clone() }
        }));
    }
    let splits = [UNLIMITED / MIB, 21, 24, 32, 40, 48, 50, 64, 80, 96, 100, 128, 200, 256, 512, 1024];
    changed.extend(splits.map(|mebibytes| AllocatorSettings {
        max_split_size: if mebibytes == UNLIMITED / MIB { UNLIMITED } else { mebibytes * MIB },
        ..base.clone()
    }));
    if base.release >= Release::new(11) {
        changed.extend(
            [12, 16, 20, 24, 32, 40, 64]
                .map(|mebibytes| AllocatorSettings { large_segment_size: mebibytes * MIB, ..base.clone() }),
        );
    }
    if base.release >= Release::new(6) {
        changed.extend(
            [20, 32, 40, 50, 64, 100, 128]
                .map(|mebibytes| AllocatorSettings { max_non_split_rounding: mebibytes * MIB, ..base.clone() }),
        );
    }
    changed.retain(|settings| settings != base);
    changed
}

/// Settings that the program may have had before the last ones: those of its text, the defaults, and the usual values of
/// single settings.
fn other_settings(recording: &Recording, last: &AllocatorSettings) -> Vec<AllocatorSettings> {
    let defaults = AllocatorSettings::of_release(last.release);
    let of_text = defaults.updated(recording.settings.conf()).ok();
    let mut others: Vec<AllocatorSettings> = of_text.into_iter().chain([defaults.clone()]).collect();
    for base in [last, &defaults] {
        let toggled = AllocatorSettings { expandable_segments: !base.expandable_segments, ..base.clone() };
        for base in [base.clone(), toggled] {
            let unsplit = AllocatorSettings { max_split_size: UNLIMITED, ..base.clone() };
            for base in [base.clone(), unsplit] {
                others.extend([0, 2, 4, 8].map(|parts| AllocatorSettings {
                    roundup_power2_divisions: [parts; ROUNDUP_INTERVALS],
                    ..base.clone()
                }));
                others.push(base);
            }
        }
    }
    let mut distinct: Vec<AllocatorSettings> = Vec::new();
    for settings in others.into_iter().filter(|settings| settings != last) {
        if !distinct.contains(&settings) {
            distinct.push(settings);
        }
    }
    distinct
}

/// The first entry of the call at which the model and the recording parted.
fn next_call(verification: &Verification) -> usize {
    verification.beginning.map_or(0, |beginning| beginning.entries_passed_over) + verification.agreed
}

//! Settings that the program changed while it ran. A snapshot contains those at its end, and the text that the program
//! started with.

use super::{Assumptions, Counters, Divergence, Verdict, Verification, verify_assuming};
use crate::{
    base::{MIB, NoProgress, Progress},
    pytorch::{AllocatorSettings, ROUNDUP_INTERVALS, UNLIMITED},
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

/// How many entries are read in a search.
const MOST_ENTRIES: usize = 30_000_000;

/// Explains a divergence by settings that the program changed, if that explains everything: it started with others, and
/// ended with those of the recording. Each phase ends with the first call that its settings do not explain.
pub(super) fn explain(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    diverged: &Verification,
    progress: &dyn Progress,
) -> Option<Verification> {
    // Settings that are not in the file are those of the whole run, as far as is known.
    let are_of_the_end = recording.settings_from == SettingsOrigin::File;
    if !are_of_the_end || !matches!(diverged.divergence(), Some(Divergence::Entries { .. })) {
        return None;
    }
    let last = recording.settings_in_force().ok()?;
    let explains = |phases: &[SettingsPhase]| {
        let assumptions = Assumptions { settings: phases.to_vec(), ..Assumptions::of(recording) };
        verify_assuming(recording, setup, counters, &assumptions, &NoProgress)
    };
    progress.begin_stage("looking for settings that changed", 0);
    let mut phases: Vec<SettingsPhase> = Vec::new();
    let mut reached = next_call(diverged);
    let mut entries_left = MOST_ENTRIES;
    for _ in 0..MOST_CHANGES {
        let begins = phases.last().map_or(0, |_| reached);
        let mut furthest: Option<(usize, AllocatorSettings)> = None;
        for settings in other_settings(recording, &last) {
            entries_left = entries_left.checked_sub(recording.witnessed.len())?;
            let phase = SettingsPhase { entry: begins, settings: settings.clone() };
            let place = next_call(&explains(&[&phases[..], &[phase]].concat()));
            if place > furthest.as_ref().map_or(reached, |(place, _)| *place) {
                furthest = Some((place, settings));
            }
        }
        let (place, settings) = furthest?;
        phases.push(SettingsPhase { entry: begins, settings });
        reached = place;
        let change = SettingsPhase { entry: reached, settings: last.clone() };
        let all = explains(&[&phases[..], &[change]].concat());
        if all.verdict == Verdict::Exact {
            return Some(all);
        }
        reached = reached.max(next_call(&all));
        if reached > place {
            return None;
        }
    }
    None
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

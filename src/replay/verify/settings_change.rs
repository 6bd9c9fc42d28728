//! Settings that the program changed while it ran. A snapshot contains those at its end, and the text that the program
//! started with.

use super::{Assumptions, Counters, Divergence, Verdict, Verification, verify_assuming};
use crate::{
    base::{MIB, Progress},
    pytorch::{AllocatorSettings, UNLIMITED},
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

/// Explains a divergence by settings that the program changed, if that explains everything: it started with others, and
/// had those of the recording from the first call on that the others do not explain.
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
    let explains = |settings: Vec<SettingsPhase>| {
        let assumptions = Assumptions { settings, ..Assumptions::of(recording) };
        verify_assuming(recording, setup, counters, &assumptions, progress)
    };
    for first in earlier_settings(recording, &last) {
        let first = SettingsPhase { entry: 0, settings: first };
        let alone = explains(vec![first.clone()]);
        let reached = next_call(&alone);
        if reached <= next_call(diverged) {
            continue;
        }
        let change = SettingsPhase { entry: reached, settings: last.clone() };
        let both = explains(vec![first, change]);
        if both.verdict == Verdict::Exact {
            return Some(both);
        }
    }
    None
}

/// The settings that the program may have started with: those of its text, and the defaults.
fn earlier_settings(recording: &Recording, last: &AllocatorSettings) -> Vec<AllocatorSettings> {
    let defaults = AllocatorSettings::of_release(last.release);
    let of_text = defaults.updated(recording.settings.conf()).ok();
    let mut earlier: Vec<AllocatorSettings> = of_text.into_iter().chain([defaults]).collect();
    earlier.dedup();
    earlier.retain(|settings| settings != last);
    earlier
}

/// The first entry of the call at which the model and the recording parted.
fn next_call(verification: &Verification) -> usize {
    verification.beginning.map_or(0, |beginning| beginning.entries_passed_over) + verification.agreed
}

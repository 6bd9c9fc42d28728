//! Settings that the program changed while it ran. A snapshot contains those at its end, and the text that the program
//! started with.

use super::{Assumptions, Counters, Divergence, Verdict, Verification, verify_assuming};
use crate::{base::Progress, pytorch::AllocatorSettings, strategy::Setup, trace::torch::Recording};

/// Settings, and from where on they were in force.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsPhase {
    /// The first entry of the first call under them.
    pub entry: usize,
    /// The settings.
    pub settings: AllocatorSettings,
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
    if !matches!(diverged.divergence(), Some(Divergence::Entries { .. })) {
        return None;
    }
    let last = recording.settings.in_force().ok()?;
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

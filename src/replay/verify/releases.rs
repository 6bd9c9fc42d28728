//! Verifies a recording with the rules of every release that may have written it.
//!
//! Files of some releases have the same keys. Where the rules of these releases differ in what the recorded program uses, each
//! is tried.

use super::{Counters, Verdict, Verification, limit::verify_with_limit, of_another_allocator};
use crate::{
    base::{MemoryLimit, Progress},
    device::DeviceProps,
    pytorch::{AllocatorRules, AllocatorSettings, Release},
    strategy::Setup,
    trace::torch::Recording,
};

/// What is known about the run of a recorded program beyond its file.
#[derive(Clone, Copy, Debug)]
pub struct RecordedConditions<'a> {
    /// The device.
    pub props: &'a DeviceProps,
    /// The limit on its memory.
    pub limit: Option<MemoryLimit>,
    /// PyTorch's counters at the end.
    pub counters: &'a Counters,
}

impl RecordedConditions<'_> {
    /// The limit in bytes, as a release computes it from a fraction (`setMemoryFraction`).
    #[must_use]
    pub fn limit_bytes(&self, release: Release) -> Option<u64> {
        match self.limit? {
            MemoryLimit::Fraction(fraction) => release.rules().fraction.limit(fraction, self.props.total_bytes),
            limit => limit.resolve(self.props.total_bytes),
        }
    }
}

/// Releases that do the same in a recording, the oldest first.
struct EqualReleases {
    behaviour: Option<AllocatorBehaviour>,
    releases: Vec<Release>,
}

/// What a release does, as far as it matters for a recording.
#[derive(PartialEq)]
struct AllocatorBehaviour {
    settings: AllocatorSettings,
    rules: AllocatorRules,
    limit: Option<u64>,
}

impl AllocatorBehaviour {
    /// `None` if the release does not know the settings.
    fn of(recording: &Recording, conditions: &RecordedConditions<'_>, release: Release) -> Option<AllocatorBehaviour> {
        let settings = recording.settings.in_force(release).ok()?;
        let (rules, usual) = (*release.rules(), *Release::DEFAULT.rules());
        let divides_by_one = settings.roundup_power2_divisions.contains(&1);
        let rules = AllocatorRules {
            // These decide how settings and fractions are read, and what was read is compared.
            above_includes_last: usual.above_includes_last,
            accepts_no_divisions: usual.accepts_no_divisions,
            strict_settings: usual.strict_settings,
            oversize_from_segment: usual.oversize_from_segment,
            resets_non_split_rounding: usual.resets_non_split_rounding,
            fraction: usual.fraction,
            one_division_keeps_size: rules.one_division_keeps_size && divides_by_one,
            pools: if recording.has_private_pools() { rules.pools } else { usual.pools },
            ..rules
        };
        let settings = AllocatorSettings { release: Release::DEFAULT, ignored: Vec::new(), ..settings };
        Some(AllocatorBehaviour { settings, rules, limit: conditions.limit_bytes(release) })
    }
}

/// Verifies a recording, and finds the release that it is of and the limit under which it was made. Of several releases that
/// reproduce it, the newest is taken.
#[must_use]
pub fn verify_recording(
    recording: &Recording,
    conditions: &RecordedConditions<'_>,
    progress: &dyn Progress,
) -> Verification {
    if let Some(allocator) = recording.settings.other_allocator() {
        return of_another_allocator(recording, allocator);
    }
    let mut groups: Vec<EqualReleases> = Vec::new();
    for release in recording.release.candidates().releases() {
        let behaviour = AllocatorBehaviour::of(recording, conditions, release);
        match groups.iter_mut().find(|group| group.behaviour == behaviour) {
            Some(group) => group.releases.push(release),
            None => groups.push(EqualReleases { behaviour, releases: vec![release] }),
        }
    }
    if groups.iter().any(|group| group.behaviour.is_some()) {
        groups.retain(|group| group.behaviour.is_some());
    }
    let mut best: Option<Verification> = None;
    let mut exact: Vec<Release> = Vec::new();
    for group in groups.iter().rev() {
        let verification = verify_as(recording, group, conditions, progress);
        let is_exact = verification.verdict == Verdict::Exact;
        if is_exact {
            exact.extend(&group.releases);
        }
        let is_better =
            |best: &Verification| best.verdict != Verdict::Exact && (is_exact || verification.agreed > best.agreed);
        if best.as_ref().is_none_or(is_better) {
            best = Some(verification);
        }
    }
    exact.sort_unstable();
    let verification = best.unwrap_or_else(|| {
        let limit = conditions.limit_bytes(recording.release.assumed());
        verify_with_limit(recording, &Setup { props: conditions.props, limit }, conditions.counters, progress)
    });
    match exact.is_empty() {
        true => verification,
        false => Verification { release: recording.release.tried(exact), ..verification },
    }
}

/// Verifies a recording as one of the newest of these releases.
fn verify_as(
    recording: &Recording,
    group: &EqualReleases,
    conditions: &RecordedConditions<'_>,
    progress: &dyn Progress,
) -> Verification {
    let newest = group.releases.last().copied().unwrap_or_default();
    let setup = Setup { props: conditions.props, limit: conditions.limit_bytes(newest) };
    if newest == recording.release.assumed() {
        return verify_with_limit(recording, &setup, conditions.counters, progress);
    }
    let other = recording.clone().with_release(recording.release.tried(group.releases.clone()));
    let verification = verify_with_limit(&other, &setup, conditions.counters, progress);
    Verification { release: recording.release.clone(), ..verification }
}

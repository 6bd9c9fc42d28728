//! Infers the memory limit of a recorded program (`set_per_process_memory_fraction`), which snapshots do not contain.
//!
//! Every reservation and every failed request of a recording encloses the limit. Garbage collection narrows the range,
//! because it begins at a share of the limit. The range is searched by verification: below it the model releases memory
//! that PyTorch kept, above it the model keeps memory that PyTorch released.

use super::{Counters, Divergence, Verification, pools, settings_change, settings_change::SearchWidth, verify};
use crate::{
    base::{MIB, NoProgress, Progress},
    device::DeviceProps,
    pytorch::FractionRule,
    strategy::Setup,
    trace::torch::{Action, MemoryRefuser, ProcessLimit, RecordedLimit, Recording, TraceEntry},
};

/// Verifies a recording and finds the limit under which it was made: the one of `setup`, or else the one that the
/// recording implies, if any.
#[must_use]
pub fn verify_with_limit(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    progress: &dyn Progress,
) -> Verification {
    let verification = verify_under_limit(recording, setup, counters, progress);
    if verification.divergence().is_none() {
        return verification;
    }
    let changed = |width| settings_change::explain(recording, setup, counters, &verification, width, progress);
    let explained = changed(SearchWidth::Usual)
        .or_else(|| pools::explain(recording, setup, counters, &verification, progress))
        .or_else(|| changed(SearchWidth::Wide));
    match explained {
        Some(explained) => Verification { limit: verification.limit, ..explained },
        None => verification,
    }
}

fn verify_under_limit(
    recording: &Recording,
    setup: &Setup<'_>,
    counters: &Counters,
    progress: &dyn Progress,
) -> Verification {
    let verification = verify(recording, setup, counters, progress);
    if let Some(bytes) = setup.limit {
        return Verification { limit: Some(RecordedLimit::given(bytes)), ..verification };
    }
    if let Some(limit) = recording.device_limit() {
        return Verification { limit: Some(limit), ..verification };
    }
    let is_limited = is_limited(recording, &verification);
    if !is_limited && !may_be_limited(recording, &verification) {
        return verification;
    }
    progress.begin_stage("finding the memory limit", 0);
    let mut search = LimitSearch { recording, props: setup.props, counters, entries_left: MOST_ENTRIES };
    match search.find() {
        Some((_, found)) if !is_limited && (found.refusals > 0 || !found.empty_caches.is_empty()) => verification,
        Some((limit, found)) => Verification { limit: Some(limit), ..found },
        None => Verification { limit: recording.own_limit().map(|range| of_range(range, recording)), ..verification },
    }
}

/// Whether something refused memory to the program, and the device was not full. Without a limit in the model, refused
/// requests appear as refusals, and garbage collection as releases that the model does not make.
fn is_limited(recording: &Recording, verification: &Verification) -> bool {
    let collected = || collects(recording) && verification.divergence().is_some_and(of_releases);
    recording.own_limit().is_some() || verification.refusals > 0 || collected()
}

/// Whether one limit may explain all that was read as calls of `empty_cache`: every release is part of a request that got
/// new memory, and would have exceeded the limit otherwise. A program that certainly calls `empty_cache` also does so before
/// such requests.
fn may_be_limited(recording: &Recording, verification: &Verification) -> bool {
    verification.divergence().is_none()
        && recording.empty_caches.is_empty()
        && !verification.empty_caches.is_empty()
        && recording.range_of_limit_before(&verification.empty_caches).is_some()
}

fn collects(recording: &Recording) -> bool {
    recording.settings_in_force().is_ok_and(|settings| settings.garbage_collection_threshold > 0.0)
}

/// Whether the model and the recording differ in what they release.
fn of_releases(divergence: &Divergence) -> bool {
    Misfit::of(divergence) != Misfit::Other
}

/// A limit of which only the range is known.
fn of_range(range: ProcessLimit, recording: &Recording) -> RecordedLimit {
    let refused_by = match recording.own_limit() {
        Some(_) => MemoryRefuser::OwnLimit,
        None => MemoryRefuser::Unknown,
    };
    RecordedLimit { range, refused_by, inferred: true, ..RecordedLimit::given(range.at_least_bytes) }
}

/// How many entries are verified in total by a search.
const MOST_ENTRIES: usize = 20_000_000;

/// Segments are multiples of this.
const STEP: u64 = 2 * MIB;

/// How a tried limit differs from that of the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Misfit {
    /// The model refuses or releases too much.
    TooLow,
    /// The model refuses or releases too little.
    TooHigh,
    /// Something else differs.
    Other,
}

impl Misfit {
    fn of(divergence: &Divergence) -> Misfit {
        let Divergence::Entries { recorded, modelled, .. } = divergence else { return Misfit::Other };
        let released = |actions: &[super::ObservedAction]| -> u64 {
            let releases = actions.iter().filter(|seen| seen.action.is_release());
            releases.fold(0, |sum, seen| sum.saturating_add(seen.bytes))
        };
        let fails =
            |actions: &[super::ObservedAction]| actions.last().is_some_and(|last| last.action == Action::OutOfMemory);
        let recorded = (fails(recorded), released(recorded));
        match (fails(modelled), released(modelled)).cmp(&recorded) {
            std::cmp::Ordering::Greater => Misfit::TooLow,
            std::cmp::Ordering::Less => Misfit::TooHigh,
            std::cmp::Ordering::Equal => Misfit::Other,
        }
    }
}

/// A verification under a limit.
struct VerifiedLimit {
    verification: Verification,
    misfit: Option<Misfit>,
}

impl VerifiedLimit {
    /// How many releases of the recording the limit does not explain.
    fn unexplained(&self) -> usize {
        self.verification.refusals + self.verification.empty_caches.len()
    }
}

struct LimitSearch<'a> {
    recording: &'a Recording,
    props: &'a DeviceProps,
    counters: &'a Counters,
    entries_left: usize,
}

impl LimitSearch<'_> {
    fn find(&mut self) -> Option<(RecordedLimit, Verification)> {
        let collects = collects(self.recording);
        let range = self.widest_range()?;
        // Segments and their sums are multiples of 2 MiB; the threshold of garbage collection is not.
        let step = if collects { 1 } else { STEP };
        let least = self.least_that_is_not_too_low(range, step)?;
        let found = self.try_limit(least)?;
        if found.misfit.is_some() {
            return None;
        }
        let below_bytes = self.first_that_explains_less(least, range.below_bytes, step, found.unexplained());
        let mut limit = of_range(ProcessLimit { at_least_bytes: least, below_bytes }, self.recording);
        if !self.is_another_device(limit.range) {
            let total = self.props.total_bytes;
            let rule = self.recording.release.assumed().rules().fraction;
            (limit.fraction, limit.fractions) = round_fractions(limit.range, total, rule);
            limit.bytes = limit.fraction.map_or(limit.bytes, |fraction| limit_of(fraction, total, rule));
            limit.device = self.props.name.trim_end_matches(" (simulated)").to_owned();
            limit.device_bytes = total;
        }
        if collects {
            // Garbage collection works under a limit of the program's own only.
            limit.refused_by = MemoryRefuser::OwnLimit;
        }
        Some((limit, found.verification))
    }

    /// The limits that need to be tried.
    fn widest_range(&self) -> Option<ProcessLimit> {
        let ProcessLimit { at_least_bytes, below_bytes } = self.recording.range_of_limit()?;
        let threshold =
            self.recording.settings_in_force().map_or(0.0, |settings| settings.garbage_collection_threshold);
        // A request was refused, or memory was collected, while no more than this was reserved.
        let refused = at_least_bytes.saturating_add(self.recording.largest_segment());
        let collected = if threshold > 0.0 { (at_least_bytes as f64 / threshold) as u64 + 1 } else { 0 };
        let below_bytes = below_bytes.min(refused.max(collected));
        (at_least_bytes < below_bytes).then_some(ProcessLimit { at_least_bytes, below_bytes })
    }

    fn least_that_is_not_too_low(&mut self, range: ProcessLimit, step: u64) -> Option<u64> {
        let (mut too_low, mut enough) = (range.at_least_bytes, range.below_bytes - 1);
        if self.try_limit(too_low)?.misfit != Some(Misfit::TooLow) {
            return Some(too_low);
        }
        while enough - too_low > step {
            let middle = too_low + (enough - too_low) / 2;
            match self.try_limit(middle)?.misfit {
                Some(Misfit::TooLow) => too_low = middle,
                _ => enough = middle,
            }
        }
        Some(enough)
    }

    /// The least limit above `least` that does not reproduce the recording, or leaves more releases unexplained. If the
    /// search ends early, a higher one.
    fn first_that_explains_less(&mut self, least: u64, below: u64, step: u64, unexplained: usize) -> u64 {
        let (mut good, mut bad) = (least, below);
        while bad - good > step {
            let middle = good + (bad - good) / 2;
            let middle = if step > 1 { (middle / step * step).max(good + 1) } else { middle };
            match self.try_limit(middle) {
                Some(tried) if tried.misfit.is_none() && tried.unexplained() <= unexplained => good = middle,
                Some(_) => bad = middle,
                None => break,
            }
        }
        bad
    }

    /// Verifies the recording under a limit; `None` if the search has taken too long.
    fn try_limit(&mut self, limit: u64) -> Option<VerifiedLimit> {
        self.entries_left = self.entries_left.checked_sub(self.recording.witnessed.len())?;
        let setup = Setup { props: self.props, limit: Some(limit) };
        let verification = verify(self.recording, &setup, self.counters, &NoProgress);
        let misfit = verification.divergence().map(Misfit::of);
        Some(VerifiedLimit { verification, misfit })
    }

    /// Whether the recording shows that its device has more or less memory than the simulated one.
    fn is_another_device(&self, range: ProcessLimit) -> bool {
        let total = self.props.total_bytes;
        let free = self.recording.witnessed.iter().filter_map(TraceEntry::device_free).max();
        free.is_some_and(|free| {
            free > total || (free.saturating_add(range.at_least_bytes) as f64) < total as f64 * LEAST_SEEN
        })
    }
}

/// Other processes and the context take less than the rest of the device.
const LEAST_SEEN: f64 = 0.8;

/// More fractions than this say nothing.
const MOST_FRACTIONS: usize = 4;

fn limit_of(fraction: f64, total: u64, rule: FractionRule) -> u64 {
    rule.limit(fraction, total).unwrap_or(total)
}

/// The only fraction in a range with at most three decimals, or the roundest ones: hundredths, thousandths, or
/// ten-thousandths, with sixteenths and thirds.
fn round_fractions(range: ProcessLimit, total: u64, rule: FractionRule) -> (Option<f64>, Vec<f64>) {
    let inside = |parts: &[u32]| {
        let mut fractions: Vec<f64> = parts
            .iter()
            .flat_map(|&parts| (1..parts).map(move |part| f64::from(part) / f64::from(parts)))
            .filter(|fraction| range.contains(limit_of(*fraction, total, rule)))
            .collect();
        fractions.sort_by(f64::total_cmp);
        fractions.dedup();
        fractions
    };
    let (hundredths, thousandths) = (inside(&[100]), inside(&[1000, 16, 3]));
    match thousandths[..] {
        [fraction] => return (Some(fraction), Vec::new()),
        [] => {
            let finer = inside(&[10_000]);
            return match finer[..] {
                [fraction] => (Some(fraction), Vec::new()),
                _ => (None, few(finer)),
            };
        }
        _ => {}
    }
    (None, few(if hundredths.is_empty() { thousandths } else { hundredths }))
}

/// The fractions, or nothing if there are too many to help.
fn few(fractions: Vec<f64>) -> Vec<f64> {
    if fractions.len() <= MOST_FRACTIONS { fractions } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pytorch::Release;

    const TOTAL: u64 = 150_109_880_320;

    #[track_caller]
    fn assert_between(at_least: f64, below: f64, fraction: Option<f64>, fractions: &[f64]) {
        let rule = Release::DEFAULT.rules().fraction;
        let bytes = |fraction| limit_of(fraction, TOTAL, rule);
        let range = ProcessLimit { at_least_bytes: bytes(at_least), below_bytes: bytes(below) };
        assert_eq!(round_fractions(range, TOTAL, rule), (fraction, fractions.to_vec()));
    }

    #[test]
    fn only_round_fraction_is_the_answer() {
        assert_between(0.0415, 0.0425, Some(0.042), &[]);
        assert_between(0.4995, 0.5004, Some(0.5), &[]);
        assert_between(0.3332, 0.3334, Some(1.0 / 3.0), &[]);
        assert_between(0.02449, 0.02456, Some(0.0245), &[]);
    }

    #[test]
    fn several_fractions_leave_the_range() {
        assert_between(0.0518, 0.0624, None, &[0.06]);
        assert_between(0.0399, 0.0422, None, &[0.04]);
        assert_between(0.0408, 0.0434, None, &[0.041, 0.042, 0.043]);
        assert_between(0.024_491, 0.024_499, None, &[]);
        assert_between(0.2, 0.9, None, &[]);
    }
}

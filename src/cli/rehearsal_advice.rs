//! What a rehearsal's recording shows beyond its peaks: what holds memory, and the allocator settings to use.

use std::{cmp::Reverse, fs, sync::atomic::AtomicBool};

use super::{advise, progress::Stages};
use crate::{
    answer::{
        advise::Advice,
        holders::{GroupBy, lack_sites, requesters},
    },
    base::FileText,
    device::Card,
    rehearse::record::RehearsalRecord,
    report::{MemoryHolders, RehearsalReport},
    suite::SourceSpec,
    trace,
};

/// Advice replays a recording under more than thirty settings. A larger recording, of some hundred thousand entries, is left to
/// `oomph advise`.
const LARGEST_RECORDING: u64 = 128 << 20;

/// Adds the advice and the holders of the record that is explained.
pub(super) fn explain(report: &mut RehearsalReport, cards: &[Card], stop: &AtomicBool) {
    let Some(record) = report.explained() else { return };
    let Some(recording) = record.largest_recording.clone() else { return };
    let card = cards.iter().find(|card| card.to_string() == record.card);
    let is_small = fs::metadata(&recording).is_ok_and(|file| file.len() <= LARGEST_RECORDING);
    let advice = card.filter(|_| is_small).and_then(|card| {
        // The recording is kept, and the answer names the command: a failure here loses nothing.
        advise::of_recording(&recording, card, record.limit_bytes, stop).ok().flatten()
    });
    report.holders = holders_of(record, &recording, advice.as_ref());
    report.advice = advice;
}

/// What held memory where it ran out, or else at the peak of the recording.
fn holders_of(record: &RehearsalRecord, recording: &str, advice: Option<&Advice>) -> MemoryHolders {
    let end = advice.filter(|_| record.oom.is_some()).and_then(|advice| advice.dead_end.as_ref());
    match end {
        Some(end) if !end.holders.is_empty() => {
            let sites = end.holders.iter().map(|holder| (holder.bytes, holder.site.clone()));
            MemoryHolders { at_failure: true, sites: sites.collect() }
        }
        _ => MemoryHolders { at_failure: false, sites: at_peak(recording) },
    }
}

/// What held memory at the peak of a recording, by call site.
fn at_peak(name: &str) -> Vec<(u64, FileText)> {
    let stages = Stages::of(name);
    let spec =
        SourceSpec { name: name.to_owned(), set: Vec::new(), seed: 1, device_index: None, given: Default::default() };
    let Ok(source) = spec.open(&stages) else { return Vec::new() };
    let Ok(summary) = trace::check(&*source) else { return Vec::new() };
    let mut usages = requesters(&*source, GroupBy::Site, Some(summary.peak.event + 1)).unwrap_or_default();
    stages.finish();
    if lack_sites(&usages) {
        return Vec::new();
    }
    usages.retain(|usage| usage.live_bytes > 0);
    usages.sort_by_key(|usage| Reverse(usage.live_bytes));
    usages.into_iter().map(|usage| (usage.live_bytes, usage.name)).collect()
}

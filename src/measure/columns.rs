//! Which number goes into which column of a row.

use super::{
    CaseRecord, Levels, TagBytes,
    driver::Part,
    latency::{Durations, Latency, Operation},
    lost_share,
    ooms::Ooms,
    peaks::PeakSummary,
};
use crate::{
    device::{CallLedger, Device},
    strategy::Strategy,
    trace::Category,
};

pub(super) fn from_books(record: &mut CaseRecord, strategy: &dyn Strategy, device: &dyn Device) {
    let stats = strategy.stats();
    let last = Levels::new(&stats, device);
    record.final_requested_bytes = last.requested_bytes;
    record.final_allocated_bytes = last.allocated_bytes;
    record.final_active_bytes = last.active_bytes;
    record.final_reserved_bytes = last.reserved_bytes;
    record.final_device_used_bytes = last.device_used_bytes;
    record.peak_device_used_bytes = last.device_used_bytes;
    record.peak_requested_bytes = stats.peak.requested;
    record.peak_allocated_bytes = stats.peak.allocated;
    record.peak_active_bytes = stats.peak.active;
    record.peak_reserved_bytes = stats.peak.reserved;
    record.peak_gap_share = lost_share(stats.peak.allocated, stats.peak.reserved);
    record.allocs = stats.allocs;
    record.frees = stats.frees;
    record.segments = stats.segments;
    record.peak_segments = stats.peak_segments;
    record.retries = stats.retries;
}

pub(super) fn from_ledger(record: &mut CaseRecord, ledger: &CallLedger) {
    let total = ledger.total();
    (record.driver_calls, record.driver_failures, record.driver_ns) = (total.count, total.failures, total.time.0);
    for (part, calls, ns) in [
        (Part::Alloc, &mut record.driver_alloc_calls, &mut record.driver_alloc_ns),
        (Part::Free, &mut record.driver_free_calls, &mut record.driver_free_ns),
        (Part::Synchronize, &mut record.driver_synchronize_calls, &mut record.driver_synchronize_ns),
        (Part::Event, &mut record.driver_event_calls, &mut record.driver_event_ns),
        (Part::Mapping, &mut record.driver_mapping_calls, &mut record.driver_mapping_ns),
        (Part::Pool, &mut record.driver_pool_calls, &mut record.driver_pool_ns),
    ] {
        let tally = part.tally(ledger);
        (*calls, *ns) = (tally.count, tally.time.0);
    }
}

pub(super) fn from_peaks(record: &mut CaseRecord, seen: &PeakSummary) {
    record.peak_device_used_bytes = record.peak_device_used_bytes.max(seen.highest.device_used_bytes);
    record.peak_allocated_event = seen.allocated_event;
    record.peak_reserved_event = seen.reserved_event;
    record.internal_fragmentation = seen.internal_fragmentation;
    record.external_fragmentation = seen.external_fragmentation;
    record.idle_share_at_allocated_peak = seen.idle_share_at_allocated_peak;
    record.idle_share_at_reserved_peak = seen.idle_share_at_reserved_peak;
}

pub(super) fn from_latency(record: &mut CaseRecord, latency: &Latency) {
    record.hits = latency.of(Operation::Hit).count();
    record.splits = latency.of(Operation::Split).count();
    record.new_segments = latency.of(Operation::NewSegment).count();
    record.releases_and_retries = latency.of(Operation::ReleaseAndRetry).count();
    for (operation, p50, p99, max) in [
        (Operation::Hit, &mut record.hit_p50_ns, &mut record.hit_p99_ns, &mut record.hit_max_ns),
        (Operation::Split, &mut record.split_p50_ns, &mut record.split_p99_ns, &mut record.split_max_ns),
        (
            Operation::NewSegment,
            &mut record.new_segment_p50_ns,
            &mut record.new_segment_p99_ns,
            &mut record.new_segment_max_ns,
        ),
        (
            Operation::ReleaseAndRetry,
            &mut record.release_and_retry_p50_ns,
            &mut record.release_and_retry_p99_ns,
            &mut record.release_and_retry_max_ns,
        ),
        (Operation::Oom, &mut record.oom_p50_ns, &mut record.oom_p99_ns, &mut record.oom_max_ns),
        (Operation::Free, &mut record.free_p50_ns, &mut record.free_p99_ns, &mut record.free_max_ns),
    ] {
        let durations: &Durations = latency.of(operation);
        *p50 = durations.quantile(0.50).map(|time| time.0);
        *p99 = durations.quantile(0.99).map(|time| time.0);
        *max = durations.max().map(|time| time.0);
    }
}

pub(super) fn from_ooms(record: &mut CaseRecord, ooms: &Ooms) {
    let Some(first) = ooms.reports.first() else { return };
    record.oom_event = Some(first.event);
    record.oom_step = first.step;
    record.oom_phase.clone_from(&first.phase);
    record.oom_requested_bytes = Some(first.requested_bytes);
    record.oom_free_bytes = Some(first.device_free_bytes.saturating_add(first.cached_free_bytes));
    record.oom_cached_free_bytes = Some(first.cached_free_bytes);
    record.oom_largest_free_bytes = first.largest_free_bytes;
    record.oom_cause = Some(first.cause);
    record.oom_refused_by = Some(first.refused_by);
    record.oom_obstacle = first.kept_back.first().map(|most| most.obstacle);
    record.oom_obstacle_bytes = first.kept_back.first().map(|most| most.bytes);
    record.oom_external_fragmentation =
        first.largest_free_bytes.and_then(|largest| lost_share(largest, first.cached_free_bytes));
    record.ooms = ooms.reports.len() as u64 + ooms.left_out;
}

pub(super) fn from_categories(record: &mut CaseRecord, parts: &[TagBytes]) {
    for part in parts {
        let column = match part.category {
            Category::Parameter => &mut record.at_peak_parameter_bytes,
            Category::Gradient => &mut record.at_peak_gradient_bytes,
            Category::Optimizer => &mut record.at_peak_optimizer_bytes,
            Category::Activation => &mut record.at_peak_activation_bytes,
            Category::Temporary => &mut record.at_peak_temporary_bytes,
            Category::Workspace => &mut record.at_peak_workspace_bytes,
            Category::Input => &mut record.at_peak_input_bytes,
            Category::Unknown => &mut record.at_peak_unknown_bytes,
        };
        *column += part.bytes;
    }
}

//! Runs one case and writes down what it left behind.

use super::{
    CaseDetail, CaseLabel, CaseRecord, Layouts, Levels, Status, Warning,
    categories::Categories,
    driver::{self, Part},
    latency::{Durations, Latency, Operation},
    layouts::within_bounds,
    lost_share,
    ooms::Ooms,
    peaks::Peaks,
    timeline::TimelineRecorder,
};
use crate::{
    device::{Capabilities, Device},
    replay::{self, Live, Moment, Observer, OutOfMemory, ReplayError, Replayed, replay},
    strategy::{Context, EventSink, Freed, Outcome, Silent, Strategy, StrategyEvent},
    trace::{Op, Source},
    unit::Nanos,
};

/// Replays `source` through a fresh strategy on a fresh device, and measures it.
///
/// Afterwards the strategy is closed. What goes wrong is in the record: a device that lacks what the strategy needs is
/// [`Status::Skipped`], a broken trace, strategy or device, and memory that does not come back, is [`Status::Error`].
pub fn measure(
    label: &CaseLabel,
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &replay::Options<'_>,
) -> (CaseRecord, CaseDetail) {
    let missing = strategy.requires().missing_from(device.props().capabilities);
    if missing != Capabilities::NONE {
        let reason = format!("this device has no {missing}");
        return (CaseRecord::skipped(label, &reason), CaseDetail::unmeasured(label));
    }
    let held_before = device.held_bytes();
    let began = device.now();
    let mut watch = Watch::new(began);
    let replayed = replay(source, strategy, device, options, &mut watch);

    let mut record = CaseRecord::unmeasured(label, Status::Completed, "");
    let mut detail = CaseDetail::unmeasured(label);
    record.clock = Some(device.props().clock);
    record.elapsed_ns = device.now().since(began).0;
    read_books(&mut record, strategy, device);
    read_ledger(&mut record, &mut detail, device);
    watch.write_down(&mut record, &mut detail, strategy, device);
    conclude(&mut record, &mut detail, replayed);
    close(&mut record, strategy, device, held_before);
    (record, detail)
}

/// All observers of a measured replay.
struct Watch {
    peaks: Peaks,
    timeline: TimelineRecorder,
    categories: Categories,
    latency: Latency,
    ooms: Ooms,
    /// Pieces of work in the trace.
    work: u64,
}

impl Watch {
    fn new(began: Nanos) -> Watch {
        Watch {
            peaks: Peaks::default(),
            timeline: TimelineRecorder::new(began),
            categories: Categories::default(),
            latency: Latency::default(),
            ooms: Ooms::default(),
            work: 0,
        }
    }

    fn write_down(
        self,
        record: &mut CaseRecord,
        detail: &mut CaseDetail,
        strategy: &dyn Strategy,
        device: &dyn Device,
    ) {
        write_peaks(self.peaks, record, detail, strategy);
        write_latencies(&self.latency, record);
        write_first_oom(&self.ooms, record);
        detail.timeline = self.timeline.finish();
        detail.at_peak = self.categories.finish();
        for part in &detail.at_peak {
            *record.at_peak_mut(part.category) += part.bytes;
        }
        detail.latencies = self.latency.histograms();
        detail.layouts = Layouts {
            at_oom: within_bounds(self.ooms.layout, &mut detail.warnings),
            at_peak: None,
            at_end: within_bounds(strategy.layout(), &mut detail.warnings),
        };
        detail.ooms = self.ooms.reports;
        detail.strategy_counters =
            strategy.details().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();

        let mut warn_of = |count: u64, warning: Warning| {
            if count > 0 {
                detail.warnings.push(warning);
            }
        };
        warn_of(self.ooms.left_out, Warning::OomReportsLeftOut { count: self.ooms.left_out });
        let unmarked = detail.timeline.incidents_left_out;
        warn_of(unmarked, Warning::IncidentsLeftOut { count: unmarked });
        let waiting = record.final_active_bytes.saturating_sub(record.final_allocated_bytes);
        warn_of(waiting, Warning::BlocksStillWaiting { bytes: waiting });
        let idle = if device.props().capabilities.compute { 0 } else { self.work };
        warn_of(idle, Warning::WorkNotRun { count: idle });
        warn_of(u64::from(detail.steps.is_empty()), Warning::NoSteps);
    }
}

impl EventSink for Watch {
    fn event(&mut self, event: StrategyEvent) {
        // The only one of the observers that listens to what happens inside.
        self.timeline.event(event);
    }
}

impl Observer for Watch {
    fn before(&mut self, now: &Moment<'_>) {
        self.work += u64::from(matches!(now.event.op, Op::Work { .. }));
        self.peaks.before(now);
        self.latency.before(now);
    }

    fn served(&mut self, now: &Moment<'_>, live: &Live, outcome: Outcome) {
        self.latency.served(now, live, outcome);
        self.peaks.served(now, live, outcome);
        self.timeline.served(now, live, outcome);
        self.categories.served(now, live, outcome);
    }

    fn free_requested(&mut self, now: &Moment<'_>, live: &Live) {
        self.peaks.free_requested(now, live);
    }

    fn freed(&mut self, now: &Moment<'_>, live: &Live, freed: Freed) {
        self.latency.freed(now, live, freed);
        self.categories.freed(now, live, freed);
    }

    fn out_of_memory(&mut self, now: &Moment<'_>, report: &OutOfMemory) {
        self.latency.out_of_memory(now, report);
        self.timeline.out_of_memory(now, report);
        self.ooms.out_of_memory(now, report);
    }

    fn after(&mut self, now: &Moment<'_>) {
        self.peaks.after(now);
        self.timeline.after(now);
    }

    fn round_ends(&mut self, strategy: &dyn Strategy) {
        self.peaks.round_ends(strategy);
        self.categories.round_ends(strategy);
    }
}

fn read_books(record: &mut CaseRecord, strategy: &dyn Strategy, device: &dyn Device) {
    let stats = strategy.stats();
    let last = Levels::new(&stats.current, device);
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
    record.allocs = stats.allocs;
    record.frees = stats.frees;
    record.segments = stats.segments;
    record.peak_segments = stats.peak_segments;
    record.retries = stats.retries;
}

fn read_ledger(record: &mut CaseRecord, detail: &mut CaseDetail, device: &dyn Device) {
    let ledger = device.ledger();
    detail.driver = driver::by_kind(&ledger);
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
        let tally = part.tally(&ledger);
        (*calls, *ns) = (tally.count, tally.time.0);
    }
}

fn write_peaks(peaks: Peaks, record: &mut CaseRecord, detail: &mut CaseDetail, strategy: &dyn Strategy) {
    let seen = peaks.finish(strategy);
    record.peak_device_used_bytes = record.peak_device_used_bytes.max(seen.highest.device_used_bytes);
    record.peak_allocated_event = seen.allocated_event;
    record.peak_reserved_event = seen.reserved_event;
    record.internal_fragmentation = seen.internal_fragmentation;
    record.external_fragmentation = seen.external_fragmentation;
    record.idle_share_at_allocated_peak = seen.idle_share_at_allocated_peak;
    record.idle_share_at_reserved_peak = seen.idle_share_at_reserved_peak;
    record.peak_gap_share = lost_share(record.peak_allocated_bytes, record.peak_reserved_bytes);
    detail.steps = seen.steps;
    detail.phases = seen.phases;
}

fn write_latencies(latency: &Latency, record: &mut CaseRecord) {
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

fn write_first_oom(ooms: &Ooms, record: &mut CaseRecord) {
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
    record.oom_external_fragmentation =
        first.largest_free_bytes.and_then(|largest| lost_share(largest, first.cached_free_bytes));
    record.ooms = ooms.reports.len() as u64 + ooms.left_out;
}

/// How the replay ended.
fn conclude(record: &mut CaseRecord, detail: &mut CaseDetail, replayed: Result<Replayed, ReplayError>) {
    match replayed {
        Ok(replayed) => {
            record.events = replayed.events;
            if replayed.left_out > 0 {
                detail.warnings.push(Warning::EventsLeftOut { count: replayed.left_out });
            }
            if replayed.interrupted {
                record.status = Status::Interrupted;
                record.set_reason("stopped from outside");
            } else if replayed.ooms > 0 {
                record.status = Status::Oom;
            }
        }
        Err(error) => {
            if let ReplayError::Strategy { event, .. } | ReplayError::Device { event, .. } = &error {
                record.events = *event;
            }
            record.status = Status::Error;
            record.set_reason(&error.to_string());
        }
    }
}

/// Closes the strategy; whoever keeps memory then is broken, however well it did before.
fn close(record: &mut CaseRecord, strategy: &mut dyn Strategy, device: &mut dyn Device, held_before: u64) {
    let closed = strategy.close(&mut Context { device, sink: &mut Silent });
    let kept = device.held_bytes().saturating_sub(held_before);
    let complaint = match closed {
        Err(error) => format!("closing the strategy failed: {error}"),
        Ok(()) if kept > 0 => format!("the strategy was closed and {kept} bytes are still held on the device"),
        Ok(()) => return,
    };
    if record.status == Status::Error {
        let reason = format!("{}; {complaint}", record.reason);
        record.set_reason(&reason);
    } else {
        record.status = Status::Error;
        record.set_reason(&complaint);
    }
}

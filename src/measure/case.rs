//! Runs one case and collects its row, its detail and what a reader should know about the numbers.

use serde::{Deserialize, Serialize};

use super::{
    CaseLabel, CaseRecord, Composition, DriverCalls, LatencyHistogram, LayoutFrame, Levels, OomReport, PhasePeak,
    SCHEMA, Status, StepPeak, TagBytes, Timeline,
    categories::CategoryRecorder,
    frames::FrameRecorder,
    latency::{Latency, Operation, calls_by_kind},
    lifetimes::{EVERY_LIFE, LifetimeRecorder, Lifetimes, MOST_LIVES},
    ooms::OomRecorder,
    peaks::PeakRecorder,
    timeline::TimelineRecorder,
};
use crate::{
    base::{FileText, Nanos},
    device::{Capabilities, Device},
    replay::{
        self, FailedRequest, LiveBlock, Observer, OpenedAllocator, Replay, ReplayError, ReplayMoment, ReplayOutcome,
        replay,
    },
    strategy::{Context, EventSink, Freed, Layout, Outcome, Silent, Strategy, StrategyEvent},
    trace::{Op, Source},
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
    options: &replay::ReplayOptions<'_>,
) -> (CaseRecord, CaseDetail) {
    measure_lives(label, source, strategy, device, options, MOST_LIVES)
}

/// [`measure`] that keeps at most `most_lives` blocks in [`CaseDetail::lifetimes`].
pub fn measure_lives(
    label: &CaseLabel,
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &replay::ReplayOptions<'_>,
    most_lives: usize,
) -> (CaseRecord, CaseDetail) {
    let held_before = device.held_bytes();
    let began = device.now();
    let mut observer = CaseObserver::new(began, most_lives);
    let replayed = replay(source, strategy, device, options, &mut observer);
    if let Err(incapable @ ReplayError::Incapable(_)) = &replayed {
        let record = CaseRecord::unmeasured(label, Status::Skipped, &incapable.to_string());
        return (record, CaseDetail::unmeasured(label));
    }

    let mut record = CaseRecord::unmeasured(label, Status::Completed, "");
    let mut detail = CaseDetail::unmeasured(label);
    record.clock = Some(device.props().clock);
    record.elapsed_ns = Some(device.now().since(began).0);
    record.note_books(strategy, device);
    let ledger = device.ledger();
    detail.driver = calls_by_kind(&ledger);
    record.note_ledger(&ledger);
    observer.write_down(&mut record, &mut detail, strategy, device);
    record.forget_what_is_unknown(strategy.stats().off_books);
    let context_lost = replayed.as_ref().is_err_and(ReplayError::loses_context);
    conclude(&mut record, &mut detail, replayed);
    // A lost context has taken everything with it: what closing says would only bury the first error.
    if !context_lost {
        close(&mut record, strategy, device, held_before);
    }
    (record, detail)
}

/// Measures a replay whose device and strategy are open. If the device had less memory than the limit allows, the reason says
/// so.
pub fn measure_opened(
    label: &CaseLabel,
    source: &dyn Source,
    opened: OpenedAllocator,
    options: &replay::ReplayOptions<'_>,
    most_lives: usize,
) -> (CaseRecord, CaseDetail) {
    let OpenedAllocator { mut strategy, mut device, limit } = opened;
    let (mut record, detail) = measure_lives(label, source, &mut *strategy, &mut *device, options, most_lives);
    if let (Status::Oom, Some(limit), Some(first)) = (record.status, limit, detail.ooms.first())
        && let Some(reason) = first.short_of_limit(limit, device.props().page_bytes)
    {
        record.reason = reason;
    }
    (record, detail)
}

/// Opens a replay and measures it, with the life of every block. The label gets its limit and its number of rounds.
pub fn measure_replay(label: CaseLabel, replay: &Replay<'_>) -> Result<(CaseRecord, CaseDetail), ReplayError> {
    let label = CaseLabel { limit: replay.limit, repeat: replay.options.repeat, ..label };
    Ok(measure_opened(&label, replay.source, replay.open()?, &replay.options, EVERY_LIFE))
}

/// Everything that is recorded of a measured replay.
struct CaseObserver {
    peaks: PeakRecorder,
    timeline: TimelineRecorder,
    categories: CategoryRecorder,
    frames: FrameRecorder,
    lifetimes: LifetimeRecorder,
    latency: Latency,
    ooms: OomRecorder,
    /// Requested bytes of the blocks that callers hold.
    live: u64,
    /// Pieces of work in the trace.
    work: u64,
}

impl CaseObserver {
    fn new(began: Nanos, most_lives: usize) -> CaseObserver {
        CaseObserver {
            peaks: PeakRecorder::default(),
            timeline: TimelineRecorder::new(began),
            categories: CategoryRecorder::default(),
            frames: FrameRecorder::default(),
            lifetimes: LifetimeRecorder::new(most_lives),
            latency: Latency::default(),
            ooms: OomRecorder::default(),
            live: 0,
            work: 0,
        }
    }

    fn write_down(
        mut self,
        record: &mut CaseRecord,
        detail: &mut CaseDetail,
        strategy: &dyn Strategy,
        device: &dyn Device,
    ) {
        self.look_at_peak(strategy);
        record.note_peaks(&self.peaks);
        (detail.steps, detail.phases) = self.peaks.into_parts();
        record.note_latency(&self.latency);
        record.note_ooms(&self.ooms);
        detail.timeline = self.timeline.finish();
        (detail.categories, detail.at_peak) = self.categories.finish();
        let (lifetimes, owners) = self.lifetimes.finish();
        detail.frames = self.frames.finish(strategy, &owners);
        detail.lifetimes = lifetimes;
        let sites = detail.frames.iter_mut().flat_map(LayoutFrame::sites);
        detail.sites = owners.name_sites(sites.chain(&mut detail.lifetimes.blocks.site));
        detail.lifetimes.drop_defaults();
        record.note_categories(&detail.at_peak);
        detail.latencies = self.latency.histograms();
        detail.layouts = Layouts {
            at_oom: limited_layout(self.ooms.layout, &mut detail.warnings),
            at_peak: None,
            at_end: limited_layout(strategy.layout(), &mut detail.warnings),
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
        let stats = strategy.stats();
        let waiting = stats.current.active.saturating_sub(stats.current.allocated);
        warn_of(waiting, Warning::BlocksStillWaiting { bytes: waiting });
        let idle = if device.props().capabilities.contains(Capabilities::COMPUTE) { 0 } else { self.work };
        warn_of(idle, Warning::WorkNotRun { count: idle });
        warn_of(u64::from(detail.steps.is_empty()), Warning::NoSteps);
    }

    /// Looks at memory as it was at a new peak of `allocated`. Called just before memory falls, so that a long ramp-up
    /// looks once.
    #[inline]
    fn look_at_peak(&mut self, strategy: &dyn Strategy) {
        if let Some(peak) = self.peaks.take_unread() {
            peak.largest_free = strategy.largest_free(peak.stream);
            if peak.usage.allocated > 0 {
                self.frames.take_peak(peak.event, peak.usage.allocated, strategy, &self.lifetimes.owners);
            }
        }
    }
}

impl EventSink for CaseObserver {
    fn event(&mut self, event: StrategyEvent) {
        self.timeline.event(event);
        self.lifetimes.event(event);
    }
}

impl Observer for CaseObserver {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        match now.event.op {
            Op::Alloc { .. } | Op::Free { .. } => self.latency.begin(now),
            Op::Work { .. } => self.work += 1,
            Op::EmptyCache => self.look_at_peak(now.strategy),
            Op::Mark { kind, label, index } => self.peaks.begin(now, kind, label, index),
            _ => {}
        }
    }

    fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock, outcome: Outcome) {
        self.live += live.request.bytes;
        self.latency.note(now, outcome.into());
        self.peaks.served(now, live.request.stream, self.live);
        self.timeline.answered(now, false);
        self.categories.served(now, live);
        self.lifetimes.served(now, live);
    }

    fn free_requested(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock) {
        self.look_at_peak(now.strategy);
        self.live -= live.request.bytes;
    }

    fn freed(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock, freed: Freed) {
        self.latency.note(now, Operation::Free);
        self.categories.freed(live);
        self.lifetimes.freed(now, live, freed);
    }

    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, report: &FailedRequest) {
        self.latency.note(now, Operation::Oom);
        self.timeline.answered(now, true);
        self.ooms.out_of_memory(now, report);
        self.frames.out_of_memory(now, &self.lifetimes.owners);
    }

    fn after(&mut self, now: &ReplayMoment<'_>) {
        let stats = now.strategy.stats();
        let levels = Levels::new(&stats, now.device);
        self.peaks.after(now.index, &stats, levels);
        self.timeline.after(now, self.live, &levels);
        self.categories.after(now.index);
        self.frames.after(now, &self.lifetimes.owners);
        self.lifetimes.after(now);
    }

    fn round_ends(&mut self, strategy: &dyn Strategy) {
        self.look_at_peak(strategy);
        self.live = 0;
        self.categories.round_ends();
        self.lifetimes.round_ends();
    }
}

/// How the replay ended.
fn conclude(record: &mut CaseRecord, detail: &mut CaseDetail, replayed: Result<ReplayOutcome, ReplayError>) {
    match replayed {
        Ok(replayed) => {
            record.events = Some(replayed.events);
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
                record.events = Some(*event);
            }
            record.status = Status::Error;
            record.set_reason(&error.to_string());
        }
    }
}

/// Closes the strategy. One that still holds memory afterwards is broken.
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

/// Everything about a case that does not fit in a row. From this and the row, reports are made on other machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseDetail {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// The identity, part by part.
    pub label: CaseLabel,
    /// Which of several GPUs it ran on, where the label names them all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_on: Option<String>,
    /// What a reader of the numbers should know.
    pub warnings: Vec<Warning>,
    /// Failed requests.
    pub ooms: Vec<OomReport>,
    /// Memory over time.
    pub timeline: Timeline,
    /// What live memory is for, over time.
    #[serde(default)]
    pub categories: Vec<Composition>,
    /// Peaks by step.
    pub steps: Vec<StepPeak>,
    /// Peaks by phase.
    pub phases: Vec<PhasePeak>,
    /// Live bytes by category and layer at the allocated peak; they sum to it.
    pub at_peak: Vec<TagBytes>,
    /// Driver time of operations by how they ended.
    pub latencies: Vec<LatencyHistogram>,
    /// Driver calls by kind.
    pub driver: Vec<DriverCalls>,
    /// The strategy's own counters.
    pub strategy_counters: Vec<(String, u64)>,
    /// Memory block by block.
    pub layouts: Layouts,
    /// Pictures of memory over time, in order of their events.
    #[serde(default)]
    pub frames: Vec<LayoutFrame>,
    /// Blocks and segments as rectangles of addresses and events.
    #[serde(default)]
    pub lifetimes: Lifetimes,
    /// The call sites that `frames` and `lifetimes` name by their places here.
    #[serde(default)]
    pub sites: Vec<FileText>,
}

impl CaseDetail {
    /// A detail with its identity and nothing else: what a skipped case has.
    #[must_use]
    pub fn unmeasured(label: &CaseLabel) -> CaseDetail {
        CaseDetail { schema: SCHEMA, case_id: label.case_id(), label: label.clone(), ..CaseDetail::default() }
    }
}

/// A layout with more blocks than this is left out of the case file: it would be larger than all the rest together.
const MOST_BLOCKS: usize = 200_000;

/// The memory at the moments that reports draw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layouts {
    /// At the first failed request.
    pub at_oom: Option<Layout>,
    /// At the allocated peak: always empty, kept for readers of older files.
    pub at_peak: Option<Layout>,
    /// At the end, before the strategy was closed.
    pub at_end: Option<Layout>,
}

/// The layout, unless it is too large for a file.
fn limited_layout(layout: Option<Layout>, warnings: &mut Vec<Warning>) -> Option<Layout> {
    let layout = layout?;
    let blocks = layout.blocks().count();
    if blocks > MOST_BLOCKS {
        warnings.push(Warning::LayoutLeftOut { blocks: blocks as u64 });
        return None;
    }
    Some(layout)
}

/// Something that makes a case's numbers less than they seem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Warning {
    /// Events were left out because their block was never served.
    EventsLeftOut {
        /// How many.
        count: u64,
    },
    /// Blocks were freed and still wait for a stream at the end.
    BlocksStillWaiting {
        /// How much they are.
        bytes: u64,
    },
    /// A layout is not in the case file.
    LayoutLeftOut {
        /// How many blocks it has.
        blocks: u64,
    },
    /// Failed requests are counted but not all described.
    OomReportsLeftOut {
        /// How many are not.
        count: u64,
    },
    /// A mark on the timeline is missing for some retries and failed requests.
    IncidentsLeftOut {
        /// How many.
        count: u64,
    },
    /// The workload queues work, and the device runs none: no stream is ever busy, so no free has to wait.
    WorkNotRun {
        /// How many pieces of work.
        count: u64,
    },
    /// The workload has no step marks, so there are no figures per step.
    NoSteps,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;

    use super::{super::digits::six_digits, *};
    use crate::{
        base::{KIB, StreamId, TagId},
        device::DeviceClock,
        measure::{
            categories::TagBytes,
            fixture::{ALLOC_NS, FREE_NS, OVERHEAD, TinyStrategy, tiny_device},
            timeline::IncidentKind,
        },
        replay::{OnOutOfMemory, OomCause},
        strategy::Refusal,
        trace::{Category, MarkKind, Trace, TraceBuilder},
    };

    const STREAM: StreamId = StreamId::DEFAULT;

    fn run(builder: TraceBuilder, capacity: u64, options: &replay::ReplayOptions<'_>) -> (CaseRecord, CaseDetail) {
        let mut device = tiny_device(capacity);
        measure(&CaseLabel::default(), &builder.finish("builder"), &mut TinyStrategy::default(), &mut device, options)
    }

    /// Two steps; events are numbered in comments, sizes after `->` are blocks.
    fn two_steps() -> TraceBuilder {
        let mut builder = TraceBuilder::new();
        let parameter = builder.tag(Category::Parameter, None);
        let first = builder.tag(Category::Activation, Some(0));
        let second = builder.tag(Category::Activation, Some(1));
        let temporary = builder.tag(Category::Temporary, None);
        let gradient = builder.tag(Category::Gradient, None);
        builder.mark(MarkKind::Phase, "forward", 0); // 0
        builder.mark(MarkKind::Step, "", 0); // 1
        builder.alloc(1000, STREAM, parameter); // 2 -> 1024
        let b = builder.alloc(300, STREAM, first); // 3 -> 512
        let x = builder.alloc(700, STREAM, first); // 4 -> 768
        let c = builder.alloc(1500, STREAM, second); // 5 -> 1536
        [b, x, c].into_iter().for_each(|block| builder.free(block)); // 6, 7, 8
        builder.mark(MarkKind::Step, "", 1); // 9
        builder.mark(MarkKind::Phase, "backward", 0); // 10
        let d = builder.alloc(2600, STREAM, temporary); // 11 -> 2816
        let e = builder.alloc(200, STREAM, gradient); // 12 -> 512, the segment of b
        builder.free(d); // 13
        builder.free(e); // 14
        builder.empty_cache(); // 15
        builder
    }

    #[test]
    fn a_run_by_hand_gives_the_figures_computed_by_hand() {
        let (record, detail) = run(two_steps(), 64 * KIB, &replay::ReplayOptions::default());
        assert_eq!((record.status, record.reason.as_str()), (Status::Completed, ""));
        assert_eq!((record.events, record.allocs, record.frees, record.ooms), (Some(16), Some(6), Some(5), Some(0)));
        assert_eq!(record.clock, Some(DeviceClock::Virtual));

        assert_eq!(record.peak_requested_bytes, Some(1000 + 2600 + 200));
        assert_eq!(record.peak_allocated_bytes, Some(1024 + 2816 + 512));
        assert_eq!(record.peak_active_bytes, Some(1024 + 2816 + 512));
        assert_eq!(record.peak_reserved_bytes, Some(1024 + 512 + 768 + 1536 + 2816));
        assert_eq!(record.peak_device_used_bytes, Some(OVERHEAD + 8 * KIB), "1 + 1 + 1 + 2 + 3 pages");
        assert_eq!((record.peak_allocated_event, record.peak_reserved_event), (Some(12), Some(11)));
        assert_eq!(record.final_allocated_bytes, Some(1024));
        assert_eq!(record.final_reserved_bytes, Some(1024));
        assert_eq!(record.final_device_used_bytes, Some(OVERHEAD + KIB));

        assert_eq!(record.internal_fragmentation_share, Some(six_digits(1.0 - 3800.0 / 4352.0)));
        assert_eq!(record.external_fragmentation_share, Some(six_digits(1.0 - 1536.0 / (768.0 + 1536.0))));
        assert_eq!(record.idle_at_allocated_peak_share, Some(six_digits(1.0 - 4352.0 / 6656.0)));
        assert_eq!(record.idle_at_reserved_peak_share, Some(six_digits(1.0 - 3840.0 / 6656.0)));
        assert_eq!(record.fragmentation_share, Some(six_digits(1.0 - 4352.0 / 6656.0)));
        assert_eq!((record.segments, record.peak_segments, record.retries), (Some(1), Some(5), Some(0)));

        assert_eq!((record.driver_calls, record.driver_ns), (Some(9), Some(5 * ALLOC_NS + 4 * FREE_NS)));
        assert_eq!(record.elapsed_ns, record.driver_ns);
        assert_eq!((record.driver_alloc_calls, record.driver_alloc_ns), (Some(5), Some(5 * ALLOC_NS)));
        assert_eq!((record.driver_free_calls, record.driver_mapping_calls), (Some(4), Some(0)));
        assert_eq!((record.hits, record.new_segments, record.splits), (Some(1), Some(5), Some(0)));
        assert_eq!((record.hit_p50_ns, record.hit_max_ns), (Some(0), Some(0)));
        assert_eq!((record.new_segment_p99_ns, record.split_p99_ns), (Some(ALLOC_NS), None));

        assert_eq!(record.at_peak_parameter_bytes, Some(1024));
        assert_eq!(record.at_peak_gradient_bytes, Some(512));
        assert_eq!(record.at_peak_temporary_bytes, Some(2816));
        assert_eq!(record.at_peak_activation_bytes, Some(0));
        assert_eq!(detail.at_peak[0], TagBytes { category: Category::Parameter, layer: None, bytes: 1024 });
        assert_eq!(detail.warnings, []);
        assert_eq!(detail.strategy_counters, [("segments_on_the_shelf".to_owned(), 1)]);
        assert_eq!(detail.layouts.at_end.as_ref().map(|layout| layout.segments.len()), Some(1));
    }

    #[test]
    fn peaks_are_also_known_per_step_and_phase() {
        let (_, detail) = run(two_steps(), 64 * KIB, &replay::ReplayOptions::default());
        let steps: Vec<_> = detail
            .steps
            .iter()
            .map(|step| (step.first_step, step.event, step.lowest_allocated_bytes, step.peak.allocated_bytes))
            .collect();
        assert_eq!(steps, [(0, 1, 0, 3840), (1, 9, 1024, 4352)]);
        let phases: Vec<_> =
            detail.phases.iter().map(|phase| (phase.phase.raw(), phase.times, phase.peak.reserved_bytes)).collect();
        assert_eq!(phases, [("forward", 1, 3840), ("backward", 1, 6656)]);
    }

    #[test]
    fn running_out_of_memory_is_described_and_not_an_error() {
        let mut builder = TraceBuilder::new();
        builder.mark(MarkKind::Step, "", 7); // 0
        builder.mark(MarkKind::Phase, "backward", 0); // 1
        builder.alloc(1000, STREAM, TagId(0)); // 2: one page of four
        let large = builder.alloc(2000, STREAM, TagId(0)); // 3: two more
        builder.free(large); // 4
        builder.alloc(3000, STREAM, TagId(0)); // 5: fits after the two were given back
        builder.alloc(500, STREAM, TagId(0)); // 6: nothing left
        builder.alloc(1, STREAM, TagId(0)); // 7: never reached
        let (record, detail) = run(builder, 4 * KIB, &replay::ReplayOptions::default());
        assert_eq!(record.status, Status::Oom);
        assert_eq!((record.events, record.ooms, record.oom_event), (Some(7), Some(1), Some(6)));
        assert_eq!((record.oom_step, record.oom_phase), (Some(7), Some("backward".into())));
        assert_eq!((record.oom_requested_bytes, record.oom_free_bytes), (Some(500), Some(0)));
        assert_eq!((record.oom_cause, record.oom_refused_by), (Some(OomCause::Exhaustion), Some(Refusal::Device)));
        assert_eq!((record.retries, record.releases_and_retries), (Some(2), Some(1)));
        assert_eq!(record.release_and_retry_max_ns, Some(2 * ALLOC_NS + FREE_NS));
        assert_eq!(record.oom_max_ns, Some(2 * ALLOC_NS));
        assert_eq!(record.driver_failures, Some(3));
        let incidents: Vec<_> = detail.timeline.incidents.iter().map(|mark| (mark.event, mark.kind)).collect();
        assert_eq!(incidents, [(5, IncidentKind::Retry), (6, IncidentKind::Retry), (6, IncidentKind::OutOfMemory)]);
        assert_eq!(detail.ooms.len(), 1);
        assert_eq!(detail.layouts.at_oom.as_ref().map(|layout| layout.segments.len()), Some(2));
    }

    #[test]
    fn skipped_requests_cause_a_warning() {
        let mut builder = TraceBuilder::new();
        for _ in 0..3 {
            let block = builder.alloc(9000, STREAM, TagId(0));
            builder.free(block);
        }
        let options =
            replay::ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..replay::ReplayOptions::default() };
        let (record, detail) = run(builder, 4 * KIB, &options);
        assert_eq!((record.status, record.ooms, record.events), (Status::Oom, Some(3), Some(6)));
        assert_eq!(detail.warnings, [Warning::NoSteps, Warning::EventsLeftOut { count: 3 }]);
    }

    #[test]
    fn pending_blocks_count_as_active() {
        let mut builder = TraceBuilder::new();
        let shared = builder.alloc(256, STREAM, TagId(0));
        builder.use_on(shared, StreamId(1));
        builder.free(shared);
        builder.alloc(512, STREAM, TagId(0));
        let (record, detail) = run(builder, 64 * KIB, &replay::ReplayOptions::default());
        assert_eq!((record.peak_allocated_bytes, record.peak_active_bytes), (Some(512), Some(768)));
        assert_eq!(record.internal_fragmentation_share, Some(0.0));
        assert_eq!(record.external_fragmentation_share, None, "nothing was free");
        assert!(detail.warnings.contains(&Warning::BlocksStillWaiting { bytes: 256 }), "{:?}", detail.warnings);
    }

    #[test]
    fn survivors_of_a_round_are_gone_in_the_next() {
        let options = replay::ReplayOptions { repeat: 3, ..replay::ReplayOptions::default() };
        let (record, detail) = run(two_steps(), 64 * KIB, &options);
        assert_eq!((record.status, record.events), (Status::Completed, Some(48)));
        assert_eq!(Some(detail.at_peak.iter().map(|part| part.bytes).sum::<u64>()), record.peak_allocated_bytes);
        assert_eq!(record.internal_fragmentation_share, Some(six_digits(1.0 - 3800.0 / 4352.0)));
        assert_eq!(detail.phases[0].times, 3);
    }

    #[test]
    fn failed_case_keeps_reason_and_figures() {
        let mut builder = TraceBuilder::new();
        builder.alloc(100, STREAM, TagId(0));
        builder.device_sync();
        let (record, _) = run(builder, 64 * KIB, &replay::ReplayOptions::default());
        assert_eq!((record.status, record.events, record.allocs), (Status::Error, Some(1), Some(1)));
        assert_eq!(record.reason, "event 1: cuCtxSynchronize: injected");
    }

    #[test]
    fn memory_that_does_not_come_back_is_an_error() {
        let mut strategy = TinyStrategy::default();
        strategy.forgets = 1;
        let mut device = tiny_device(64 * KIB);
        let source = two_steps().finish("builder");
        let options = replay::ReplayOptions::default();
        let (record, _) = measure(&CaseLabel::default(), &source, &mut strategy, &mut device, &options);
        assert_eq!(record.status, Status::Error);
        assert_eq!(record.reason, "the strategy was closed and 1024 bytes are still held on the device");
        assert_eq!(record.peak_allocated_bytes, Some(4352), "the books were read before");
    }

    #[test]
    fn missing_device_feature_skips_the_case() {
        let mut strategy = TinyStrategy::default();
        strategy.requires = Capabilities::VIRTUAL_MEMORY;
        let mut device = tiny_device(64 * KIB);
        let options = replay::ReplayOptions::default();
        let (record, _) = measure(&CaseLabel::default(), &Trace::default(), &mut strategy, &mut device, &options);
        assert_eq!((record.status, record.clock), (Status::Skipped, None));
        assert_eq!((record.events, record.peak_reserved_bytes, record.driver_ns), (None, None, None));
        assert_eq!(record.reason, "this device has no virtual memory");
    }

    #[test]
    fn a_run_stopped_from_outside_is_not_taken_for_complete() {
        let stop = AtomicBool::new(true);
        let options = replay::ReplayOptions { stop: Some(&stop), ..replay::ReplayOptions::default() };
        let (record, _) = run(two_steps(), 64 * KIB, &options);
        assert_eq!((record.status, record.events), (Status::Interrupted, Some(0)));
    }

    proptest! {
        #[test]
        fn parts_sum_to_the_whole_in_any_run(
            moves in prop::collection::vec((any::<bool>(), 1u64..5000, 0u16..4), 1..150),
            capacity in 8u64..200,
        ) {
            let mut builder = TraceBuilder::new();
            let mut blocks = Vec::new();
            builder.mark(MarkKind::Step, "", 0);
            for (place, (is_alloc, bytes, layer)) in moves.into_iter().enumerate() {
                if is_alloc || blocks.is_empty() {
                    let tag = builder.tag(Category::ALL[place % 8], Some(layer));
                    blocks.push(builder.alloc(bytes, STREAM, tag));
                } else {
                    builder.free(blocks.swap_remove(bytes as usize % blocks.len()));
                }
                if place % 10 == 9 {
                    builder.mark(MarkKind::Step, "", place as u32);
                }
            }
            let options = replay::ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..replay::ReplayOptions::default() };
            let (record, detail) = run(builder, capacity * KIB, &options);
            prop_assert!(record.status != Status::Error, "{}", record.reason);
            prop_assert_eq!(Some(detail.at_peak.iter().map(|part| part.bytes).sum::<u64>()), record.peak_allocated_bytes);
            let steps = || detail.steps.iter().map(|step| step.peak);
            prop_assert_eq!(steps().map(|peak| peak.allocated_bytes).max(), record.peak_allocated_bytes);
            prop_assert_eq!(steps().map(|peak| peak.reserved_bytes).max(), record.peak_reserved_bytes);
            prop_assert_eq!(steps().map(|peak| peak.requested_bytes).max(), record.peak_requested_bytes);
            prop_assert_eq!(steps().map(|peak| peak.device_used_bytes).max(), Some(record.peak_device_used_bytes));
            let drawn = detail.timeline.points.iter().map(|point| point.allocated_bytes.max).max().unwrap();
            prop_assert_eq!(Some(drawn), record.peak_allocated_bytes);
            prop_assert_eq!(
                detail.latencies.iter().map(|latency| latency.count).sum::<u64>(),
                [record.allocs, record.frees, record.ooms].iter().flatten().sum::<u64>()
            );
            let shares = [
                record.internal_fragmentation_share,
                record.external_fragmentation_share,
                record.oom_external_fragmentation_share,
                record.idle_at_allocated_peak_share,
                record.idle_at_reserved_peak_share,
                record.fragmentation_share,
            ];
            prop_assert!(shares.iter().flatten().all(|share| (0.0..=1.0).contains(share)), "{:?}", shares);
        }
    }
}

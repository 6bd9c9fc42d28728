//! A replay as PyTorch would have recorded it: under any strategy, for PyTorch's own viewer and for `verify`.
//!
//! [`SnapshotRecorder`] watches and keeps entries in PyTorch's order: what a request caused before the request itself, and a free
//! that is done at once right after it was asked for. [`record_snapshot`] runs a replay under its eyes and adds the memory at
//! the end. Call sites become stacks of one frame, marks become annotations; times are those of the trace or of the
//! device, whichever is further, from the first microsecond on.

use std::{collections::HashMap, sync::Arc};

use crate::{
    base::{Address, FileText, SiteId, StreamId},
    pytorch::{AllocatorSettings, RecordedSettings, Release},
    replay::{
        FailedRequest, LiveBlock, Observer, Replay, ReplayError, ReplayMoment, ReplayOptions, ReplayOutcome,
        verify::ObservedAction,
    },
    strategy::{self, EventSink, Freed, Layout, Outcome, SegmentView, Silent, StrategyEvent, StrategySpec},
    trace::{
        MarkKind, Op, Tables,
        torch::{
            Action, Annotation, AnnotationEdge, RecordedRelease, Segment, SegmentKind, Snapshot, SnapshotBlock,
            SnapshotBlockState, StackFrame, StackId, Stacks, TraceEntry,
        },
    },
};

/// A snapshot of a replay, and how the replay ended.
#[derive(Clone, Debug)]
pub struct RecordedReplay {
    /// What PyTorch would have recorded.
    pub snapshot: Snapshot,
    /// What was done.
    pub replayed: ReplayOutcome,
}

/// Why a replay leaves no snapshot. Running out of memory is not among the reasons.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotExportError {
    /// The replay could not go on.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A snapshot shows segments and blocks, and the strategy cannot.
    #[error("strategy '{0}' cannot show its memory, and a snapshot needs it")]
    NoLayout(String),
}

/// Runs a replay once and returns it as PyTorch would have recorded it. The settings in the snapshot are PyTorch's if
/// the strategy is PyTorch's allocator; another strategy is named as the backend.
///
/// If the replay continues a recording that began in the middle, the snapshot begins in the middle too.
pub fn record_snapshot(replay: &Replay<'_>) -> Result<RecordedReplay, SnapshotExportError> {
    let mut opened = replay.open()?;
    let options = ReplayOptions { repeat: 1, ..replay.options };
    let mut recorder = SnapshotRecorder::default();
    let replayed = opened.replay(replay.source, &options, &mut recorder)?;
    recorder.forget_inherited(replayed.inherited);
    let no_layout = || SnapshotExportError::NoLayout(replay.strategy.to_string());
    let layout = opened.strategy.layout().ok_or_else(no_layout)?;
    let mut snapshot = recorder.into_snapshot(&layout, settings(&replay.strategy));
    let release = allocator_settings(&replay.strategy).map_or(Release::DEFAULT, |settings| settings.release);
    snapshot.release = RecordedRelease::of(release);
    opened.close(replayed.events, &mut Silent)?;
    Ok(RecordedReplay { snapshot, replayed })
}

/// PyTorch's microseconds count from 1970, and 0 means unknown.
const FIRST_MICROSECOND: u64 = 1;

/// Watches a replay and keeps what PyTorch would have recorded.
#[derive(Debug, Default)]
pub struct SnapshotRecorder {
    entries: Vec<TraceEntry>,
    annotations: Vec<Annotation>,
    stacks: Stacks,
    /// By site; `None` where not yet needed.
    stack_of_site: Vec<Option<StackId>>,
    streams: Vec<u64>,
    /// Who allocated each block that is not reusable yet, by address.
    owners: HashMap<u64, StackId>,
    /// Who caused each segment, by address.
    origins: HashMap<u64, StackId>,
    /// Who makes the present call.
    caller: StackId,
    /// Where the latest free was asked for.
    free_requested_at: usize,
    /// An out-of-memory entry whose strategy did not ask the device what is free.
    unmeasured: Option<usize>,
    phase: Option<Arc<str>>,
    step: Option<Arc<str>>,
    story_ns: u64,
    time_us: u64,
}

impl SnapshotRecorder {
    /// Everything seen, with the memory at the end.
    #[must_use]
    pub fn into_snapshot(mut self, layout: &Layout, settings: RecordedSettings) -> Snapshot {
        for open in [self.phase.take(), self.step.take()] {
            self.annotate(open, AnnotationEdge::End);
        }
        let segments = layout.segments.iter().map(|segment| self.segment(segment)).collect();
        Snapshot {
            segments,
            traces: vec![self.entries],
            settings,
            annotations: self.annotations,
            stacks: self.stacks,
            streams: self.streams,
            ..Snapshot::default()
        }
    }

    /// Removes the entries that allocate the first `blocks` blocks. They were there before, so no call of the program
    /// allocated them.
    fn forget_inherited(&mut self, blocks: u64) {
        let mut left = blocks;
        let is_last = |entry: &TraceEntry| {
            left -= u64::from(left > 0 && entry.action == Action::Alloc);
            left == 0
        };
        if blocks > 0 {
            let first = self.entries.iter().position(is_last).map_or(self.entries.len(), |last| last + 1);
            self.entries.drain(..first);
        }
    }

    fn segment(&self, segment: &SegmentView) -> Segment {
        let blocks = segment.blocks.iter().map(|block| {
            let (state, stack) = match block.state {
                strategy::BlockState::Allocated => (SnapshotBlockState::Allocated, self.owners.get(&block.address.0)),
                strategy::BlockState::Pending => (SnapshotBlockState::PendingFree, self.owners.get(&block.address.0)),
                // The block that stands for lent memory has its own line: counted here too, it would be there twice.
                strategy::BlockState::Free | strategy::BlockState::Lent => (SnapshotBlockState::Inactive, None),
            };
            SnapshotBlock {
                address: block.address,
                size: block.size,
                requested_size: block.requested,
                state,
                stack: stack.copied().unwrap_or_default(),
            }
        });
        Segment {
            device: 0,
            address: segment.address,
            total_size: segment.bytes,
            stream: segment.stream,
            // PyTorch knows two kinds; what other strategies call their parts has no place in its files.
            kind: if segment.pool == "small" { SegmentKind::Small } else { SegmentKind::Large },
            pool: segment.pool_id,
            expandable: segment.mapped,
            stack: self.origins.get(&segment.address.0).copied().unwrap_or_default(),
            blocks: blocks.collect(),
        }
    }

    fn push(&mut self, action: Action, address: Address, size: u64, stream: StreamId, stack: StackId) {
        let time_us = self.time_us;
        self.entries.push(TraceEntry { action, address, size, stream, stack, time_us, ..TraceEntry::default() });
    }

    fn stack(&mut self, site: SiteId, tables: &Tables) -> StackId {
        let place = site.index();
        if place >= self.stack_of_site.len() {
            self.stack_of_site.resize(place + 1, None);
        }
        if let Some(stack) = self.stack_of_site[place] {
            return stack;
        }
        let text = tables.sites().get(place).map_or("", FileText::raw);
        let stack = if text.is_empty() {
            StackId::NONE
        } else {
            let frame = self.stacks.intern_frame(frame(text));
            self.stacks.intern(&[frame])
        };
        self.stack_of_site[place] = Some(stack);
        stack
    }

    fn annotate(&mut self, name: Option<Arc<str>>, stage: AnnotationEdge) {
        if let Some(name) = name {
            // Only its time tells between which entries an annotation stands.
            self.time_us += 1;
            self.annotations.push(Annotation { name: name.into(), stage, device: Some(0), time_us: self.time_us });
        }
    }

    fn mark(&mut self, kind: MarkKind, label: &str, index: u32) {
        // Steps are called as PyTorch's profiler does.
        let (open, name) = match kind {
            MarkKind::Phase => (&mut self.phase, label.to_owned()),
            MarkKind::Step => (&mut self.step, format!("ProfilerStep#{index}")),
            MarkKind::MicroBatch => return,
        };
        let begins: Option<Arc<str>> = (!name.is_empty()).then(|| name.into());
        let ends = std::mem::replace(open, begins.clone());
        for (name, edge) in [(ends, AnnotationEdge::End), (begins, AnnotationEdge::Start)] {
            self.annotate(name, edge);
        }
    }
}

impl EventSink for SnapshotRecorder {
    fn event(&mut self, event: StrategyEvent) {
        // PyTorch counts retries without recording them.
        let Some(ObservedAction { action, mut address, bytes, stream }) = ObservedAction::of_event(&event) else {
            return;
        };
        let mut stack = self.caller;
        match event {
            StrategyEvent::SegmentAlloc { .. } | StrategyEvent::SegmentMap { .. } => {
                self.origins.insert(address.0, stack);
            }
            StrategyEvent::FreeCompleted { .. } => stack = self.owners.remove(&address.0).unwrap_or_default(),
            StrategyEvent::OutOfMemory { device_free, .. } => {
                self.unmeasured = device_free.is_none().then_some(self.entries.len());
                address = Address(device_free.unwrap_or(0));
            }
            _ => {}
        }
        self.push(action, address, bytes, stream, stack);
    }
}

impl Observer for SnapshotRecorder {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        self.story_ns = self.story_ns.saturating_add(now.event.delta_ns.into());
        let elapsed_us = self.story_ns.max(now.device.now().0) / 1000;
        self.time_us = self.time_us.max(elapsed_us.saturating_add(FIRST_MICROSECOND));
        let known = self.streams.len();
        self.streams.extend(now.tables.streams().iter().skip(known));
        self.caller = StackId::NONE;
        match now.event.op {
            Op::Alloc { site, .. } => self.caller = self.stack(site, now.tables),
            Op::Mark { kind, label, index } => {
                self.mark(kind, now.tables.labels().get(label as usize).map_or("", FileText::raw), index);
            }
            Op::Idle { nanos } => self.story_ns = self.story_ns.saturating_add(nanos),
            _ => {}
        }
    }

    fn served(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, _: Outcome) {
        self.owners.insert(live.block.address.0, self.caller);
        self.push(Action::Alloc, live.block.address, live.request.bytes, live.request.stream, self.caller);
    }

    fn free_requested(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock) {
        let owner = self.owners.get(&live.block.address.0).copied().unwrap_or_default();
        self.free_requested_at = self.entries.len();
        self.push(Action::FreeRequested, live.block.address, live.request.bytes, live.request.stream, owner);
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, freed: Freed) {
        if freed == Freed::Now {
            self.owners.remove(&live.block.address.0);
            // It was done before anything else that the free caused.
            let requested = self.entries[self.free_requested_at];
            let completed = TraceEntry { action: Action::FreeCompleted, ..requested };
            self.entries.insert(self.free_requested_at + 1, completed);
        }
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, report: &FailedRequest) {
        if let Some(place) = self.unmeasured.take() {
            self.entries[place].address = Address(report.device_free);
        }
    }
}

/// The frame that a call site stands for: `file:line function`, or words of any kind.
fn frame(site: &str) -> StackFrame {
    let located = site.match_indices(':').find_map(|(colon, _)| {
        let (line, name) = site[colon + 1..].split_once(' ')?;
        Some(StackFrame { filename: site[..colon].into(), line: line.parse().ok()?, name: name.into() })
    });
    located.unwrap_or_else(|| StackFrame { filename: "??".into(), line: 0, name: site.into() })
}

/// The settings of PyTorch's allocator, with its release; `None` for another strategy.
fn allocator_settings(spec: &StrategySpec) -> Option<AllocatorSettings> {
    AllocatorSettings::with_release(&spec.parameters).ok().filter(|_| spec.name == "caching")
}

/// What a snapshot says about the allocator's settings.
fn settings(spec: &StrategySpec) -> RecordedSettings {
    match allocator_settings(spec) {
        Some(settings) => {
            let named: Vec<&str> =
                spec.parameters.split(',').filter(|key| !key.trim().starts_with("release:")).collect();
            RecordedSettings::of(&settings, &named.join(","))
        }
        // PyTorch has no such backend, so nothing takes the file for one of PyTorch's own allocator.
        None => RecordedSettings::of(&AllocatorSettings::default(), &format!("backend:{}", spec.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{MIB, NoProgress, TagId},
        device::{
            Device,
            sim::{SimConfig, SimDevice},
        },
        replay::{
            OnOutOfMemory,
            verify::{Counters, Verdict, verify},
        },
        strategy::Setup,
        trace::TraceBuilder,
    };

    fn witnessed(builder: TraceBuilder, strategy: &str, device: &str) -> RecordedReplay {
        let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..ReplayOptions::default() };
        let (builder, device) = (builder.finish("builder"), device.parse().unwrap());
        record_snapshot(&Replay::new(&builder).strategy(strategy).device(device).options(options)).unwrap()
    }

    fn actions(snapshot: &Snapshot) -> Vec<&'static str> {
        snapshot.traces[0].iter().map(|entry| entry.action.name()).collect()
    }

    #[test]
    fn entries_are_in_causal_order() {
        let mut builder = TraceBuilder::new();
        let site = builder.site("train.py:12 forward");
        let block = builder.alloc_at(100, StreamId::DEFAULT, TagId(0), site);
        builder.free(block);
        builder.alloc(2 << 40, StreamId::DEFAULT, TagId(0));
        let RecordedReplay { snapshot, replayed } = witnessed(builder, "direct", "sim:1GiB");
        let order = ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free", "oom"];
        assert_eq!(actions(&snapshot), order);
        assert_eq!(replayed.ooms, 1);
        let entries = &snapshot.traces[0];
        assert!(entries[5].device_free().is_some_and(|free| free > 0));
        for place in [0, 1, 2, 3] {
            assert_eq!(snapshot.stacks.site(entries[place].stack).as_deref(), Some("train.py:12 forward"));
        }
        assert_eq!(snapshot.segments, []);
    }

    #[test]
    fn pending_free_completes_on_strategy_event() {
        let mut builder = TraceBuilder::new();
        let side = builder.stream_known_as(32).unwrap();
        let block = builder.alloc(3 * MIB, StreamId::DEFAULT, TagId(0));
        builder.use_on(block, side);
        builder.free(block);
        builder.alloc(3 * MIB, StreamId::DEFAULT, TagId(0));
        let snapshot = witnessed(builder, "caching", "sim").snapshot;
        let after_free = ["free_requested", "free_completed", "alloc"];
        assert_eq!(actions(&snapshot), [&["segment_alloc", "alloc"][..], &after_free[..]].concat());
        assert_eq!(snapshot.streams, [0, 32]);
    }

    #[test]
    fn exported_snapshot_verifies_under_all_settings() {
        for strategy in ["caching", "caching:expandable_segments:True", "caching:roundup_power2_divisions:4"] {
            let mut builder = TraceBuilder::new();
            let mut live = Vec::new();
            for step in 0..300_u64 {
                live.push(builder.alloc(1 + step * 7_919_993 % 60_000_000, StreamId::DEFAULT, TagId(0)));
                if step % 3 == 2 {
                    builder.free(live.remove((step * 31 % live.len() as u64) as usize));
                }
                if step == 150 {
                    builder.empty_cache();
                }
            }
            let recording =
                witnessed(builder, strategy, "sim").snapshot.into_recording("again", None, &NoProgress).unwrap();
            let device = SimDevice::new(SimConfig::default()).unwrap();
            let setup = Setup { props: device.props(), limit: None };
            assert_eq!(
                verify(&recording, &setup, &Counters::default(), &NoProgress).verdict,
                Verdict::Exact,
                "{strategy}"
            );
        }
    }

    #[test]
    fn steps_and_phases_keep_their_position() {
        let mut builder = TraceBuilder::new();
        for step in 0..2 {
            builder.mark(MarkKind::Step, "", step);
            builder.mark(MarkKind::Phase, "forward", 0);
            let block = builder.alloc(100, StreamId::DEFAULT, TagId(0));
            builder.mark(MarkKind::Phase, "backward", 0);
            builder.free(block);
        }
        let snapshot = witnessed(builder, "caching", "sim").snapshot;
        let trace = snapshot.into_recording("again", None, &NoProgress).unwrap().trace;
        let told: Vec<String> = trace
            .events
            .iter()
            .map(|event| match event.op {
                Op::Mark { kind: MarkKind::Step, index, .. } => format!("step {index}"),
                Op::Mark { label, .. } => trace.tables.labels()[label as usize].to_string(),
                other => other.kind().name().to_owned(),
            })
            .filter(|word| ["step 0", "step 1", "forward", "backward", "alloc", "free"].contains(&word.as_str()))
            .collect();
        let round = |step| [step, "alloc", "backward", "free"];
        // A step that begins during a phase repeats that phase.
        let between = ["backward", "forward"];
        assert_eq!(told, [&["forward"][..], &round("step 0"), &between, &round("step 1")].concat());
    }

    #[test]
    fn a_strategy_that_is_not_pytorchs_is_not_taken_for_it() {
        let mut builder = TraceBuilder::new();
        builder.alloc(100, StreamId::DEFAULT, TagId(0));
        let recording =
            witnessed(builder, "direct", "sim").snapshot.into_recording("again", None, &NoProgress).unwrap();
        let device = SimDevice::new(SimConfig::default()).unwrap();
        let verdict =
            verify(&recording, &Setup { props: device.props(), limit: None }, &Counters::default(), &NoProgress)
                .verdict;
        let Verdict::Partial { reasons, .. } = verdict else { panic!("{verdict:?}") };
        assert!(reasons[0].contains("direct"), "{reasons:?}");
    }

    #[test]
    fn call_sites_become_frames_and_come_back_as_they_were() {
        for site in ["model.py:7 forward", "C:\\run 1\\model.py:7 Net.forward <lambda>", "??:0 c10::malloc(x: 1)"] {
            let frame = frame(site);
            assert_eq!(format!("{}:{} {}", frame.filename, frame.line, frame.name), site);
        }
        assert_eq!(&*frame("embedding table").name, "embedding table");
    }
}

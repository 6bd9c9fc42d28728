//! Makes a trace of a recording: the actions of the program, which are allocations, frees, uses on other streams and
//! marks.
//!
//! Actions of the allocator (segments, completed frees) are left out, because another allocator acts differently.

use std::{collections::HashMap, sync::Arc};

use super::{
    Action, Annotation, AnnotationEdge, DEFAULT_POOL, PoolKey, PoolRelease, Recording, RecordingGaps,
    SnapshotBlockState, StackId, TraceEntry,
};
use crate::{
    BEFORE_RECORDING, BlockSlot, MarkKind, TableFull, Trace, TraceBuilder, builder::add_failed_request,
    memory_budget::MemoryBudget,
};
use oomph_base::{Nanos, PlacementCall, Progress, SiteId, StreamId, TagId};

/// The memory that all call sites may take.
const ALL_SITES: MemoryBudget = MemoryBudget::of(1 << 30);

/// Annotations nest a few levels deep. Annotations that never end must not accumulate.
const DEEPEST_NESTING: usize = 256;

/// Makes the trace of a recording. The second result has the gaps that this found.
pub(crate) fn to_trace(
    recording: &Recording,
    name: &str,
    progress: &dyn Progress,
) -> Result<(Trace, RecordingGaps), TableFull> {
    let mut converter = TraceConverter::new(recording)?;
    converter.add_initial_blocks();
    let entries = &recording.witnessed;
    let mut empty_caches = recording.empty_caches.iter().copied().peekable();
    let pools = &recording.request_pools;
    let (mut switches, mut releases) = (pools.switches.iter().peekable(), pools.releases.iter().peekable());
    for (index, entry) in progress.each("making the trace", entries).enumerate() {
        converter.pass_time_until(entry.time_us);
        while let Some(release) = releases.next_if(|release| release.entry <= index) {
            converter.release_pool(release);
        }
        while empty_caches.next_if(|&before| before <= index).is_some() {
            converter.empty_cache();
        }
        while let Some((_, pool)) = switches.next_if(|(entry, _)| *entry <= index) {
            converter.pool = *pool;
        }
        converter.add_entry(entry, entries.get(index + 1))?;
    }
    converter.pass_time_until(u64::MAX);
    releases.for_each(|release| converter.release_pool(release));
    empty_caches.for_each(|_| converter.empty_cache());
    let trace = Trace { placements: placements(recording), ..converter.builder.finish(name) };
    Ok((trace, converter.gaps))
}

/// Where the driver placed ordinary segments: those before the recording from the highest down, as a model of the
/// allocator requests them to continue from there, then those of the entries.
fn placements(recording: &Recording) -> Arc<[PlacementCall]> {
    let before = recording.initial.segments.iter().rev().filter(|segment| !segment.expandable);
    let before = before.map(|segment| PlacementCall::Taken { address: segment.address, bytes: segment.total_size });
    let calls = recording.witnessed.iter().filter_map(|entry| match entry.action {
        Action::SegmentAlloc => Some(PlacementCall::Taken { address: entry.address, bytes: entry.size }),
        Action::SegmentFree => Some(PlacementCall::Released { address: entry.address }),
        _ => None,
    });
    before.chain(calls).collect()
}

struct TraceConverter<'a> {
    recording: &'a Recording,
    builder: TraceBuilder,
    /// The live blocks of the program, by address.
    live: HashMap<u64, BlockSlot>,
    /// By stack; `None` before its first use.
    sites: Vec<Option<SiteId>>,
    sites_budget: MemoryBudget,
    streams: ActiveStreams,
    steps: StepMarks,
    annotations: std::slice::Iter<'a, Annotation>,
    /// Names of the open annotations, outermost first, and the number of times each name began.
    open: Vec<&'a str>,
    seen: HashMap<&'a str, u32>,
    /// A step that begins with the next request. The frees after an optimizer step still belong to that step.
    due_step: Option<u32>,
    /// The pool of the requests that come, and the one that the trace uses now.
    pool: PoolKey,
    pool_in_use: PoolKey,
    now_us: u64,
    gaps: RecordingGaps,
}

impl<'a> TraceConverter<'a> {
    fn new(recording: &'a Recording) -> Result<TraceConverter<'a>, TableFull> {
        let mut builder = TraceBuilder::new();
        for &handle in &recording.streams {
            builder.stream_known_as(handle)?;
        }
        let steps = StepMarks::of(&recording.annotations);
        Ok(TraceConverter {
            recording,
            builder,
            live: HashMap::new(),
            sites: vec![None; recording.stacks.count()],
            sites_budget: ALL_SITES,
            streams: ActiveStreams::of(&recording.witnessed),
            due_step: if matches!(steps, StepMarks::AfterOptimizer { .. }) { Some(0) } else { None },
            steps,
            annotations: recording.annotations.iter(),
            open: Vec::new(),
            seen: HashMap::new(),
            pool: DEFAULT_POOL,
            pool_in_use: DEFAULT_POOL,
            now_us: recording.witnessed.first().map_or(0, |entry| entry.time_us),
            gaps: RecordingGaps::default(),
        })
    }

    fn add_initial_blocks(&mut self) {
        let initial = &self.recording.initial;
        if initial.live().next().is_none() {
            return;
        }
        self.builder.mark(MarkKind::Phase, BEFORE_RECORDING, 0);
        for ((block, stream), pool) in initial.live().zip(initial.live_pools()) {
            if block.requested_size == 0 {
                self.gaps.contradictions += 1;
                continue;
            }
            let site = self.site(block.stack);
            self.use_pool(pool);
            let slot = self.builder.alloc_at(block.requested_size, stream, TagId(0), site);
            match block.state {
                SnapshotBlockState::PendingFree => self.builder.free(slot),
                SnapshotBlockState::Allocated | SnapshotBlockState::Inactive => {
                    self.live.insert(block.address.0, slot);
                }
            }
        }
        self.builder.mark(MarkKind::Phase, "", 0);
    }

    fn add_entry(&mut self, entry: &TraceEntry, next: Option<&TraceEntry>) -> Result<(), TableFull> {
        let address = entry.address.0;
        if let Action::Alloc | Action::OutOfMemory = entry.action
            && let Some(step) = self.due_step.take()
        {
            self.builder.mark(MarkKind::Step, "", step);
        }
        match entry.action {
            Action::Alloc | Action::OutOfMemory if entry.size == 0 => self.gaps.contradictions += 1,
            Action::Alloc => {
                self.streams.active(entry.stream);
                let site = self.site(entry.stack);
                self.use_pool(self.pool);
                let slot = self.builder.alloc_at(entry.size, entry.stream, TagId(0), site);
                if self.live.insert(address, slot).is_some() {
                    self.gaps.contradictions += 1;
                }
            }
            Action::FreeRequested => {
                let Some(slot) = self.live.remove(&address) else {
                    self.gaps.contradictions += 1;
                    return Ok(());
                };
                let at_once =
                    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address.0 == address);
                if !at_once {
                    self.add_use(slot, entry.stream)?;
                }
                self.builder.free_on(slot, entry.stream);
            }
            Action::OutOfMemory => {
                let site = self.recording.stacks.site(entry.stack);
                self.use_pool(self.pool);
                add_failed_request(&mut self.builder, entry.size, entry.stream, site.as_deref());
            }
            Action::FreeCompleted
            | Action::SegmentAlloc
            | Action::SegmentFree
            | Action::SegmentMap
            | Action::SegmentUnmap
            | Action::Snapshot
            | Action::Annotate
            | Action::Unknown => {}
        }
        Ok(())
    }

    /// A free that was completed later: another stream used the block. The recording does not say which one.
    fn add_use(&mut self, slot: BlockSlot, own: StreamId) -> Result<(), TableFull> {
        self.gaps.held_back_frees += 1;
        // While requests use a private pool, PyTorch's allocator forgets uses on other streams.
        self.use_pool(DEFAULT_POOL);
        self.gaps.streams_guessed += u64::from(self.streams.seen != 2);
        let other = match self.streams.other_than(own) {
            Some(other) => other,
            None => {
                let known = self.builder.tables().streams();
                let unseen = (1..).map(|number| number * 16).find(|handle| !known.contains(handle)).unwrap_or(u64::MAX);
                let stream = self.builder.stream_known_as(unseen)?;
                self.streams.side = Some(stream);
                stream
            }
        };
        self.builder.use_on(slot, other);
        Ok(())
    }

    fn use_pool(&mut self, pool: PoolKey) {
        if self.pool_in_use != pool {
            self.pool_in_use = pool;
            self.builder.use_pool(pool);
        }
    }

    /// While requests use a private pool, PyTorch's allocator does not release memory of the default pool.
    fn empty_cache(&mut self) {
        self.use_pool(DEFAULT_POOL);
        self.builder.empty_cache();
    }

    fn release_pool(&mut self, release: &PoolRelease) {
        self.use_pool(DEFAULT_POOL);
        self.builder.release_pool(release.pool, release.trims);
    }

    fn site(&mut self, stack: StackId) -> SiteId {
        match self.sites.get(stack.0 as usize) {
            None => SiteId(0),
            Some(Some(site)) => *site,
            Some(None) => {
                let text = self.recording.stacks.site(stack).unwrap_or_default();
                let site = match self.sites_budget.charge(text.len()) {
                    Ok(()) => self.builder.site(&text),
                    Err(_) => {
                        self.gaps.sites_left_out += 1;
                        SiteId(0)
                    }
                };
                self.sites[stack.0 as usize] = Some(site);
                site
            }
        }
    }

    /// Advances the clock and adds the annotations on the way.
    fn pass_time_until(&mut self, time_us: u64) {
        while let Some(annotation) = self.annotations.as_slice().first().filter(|next| next.time_us <= time_us) {
            self.annotations.next();
            if !self.recording.witnessed.is_empty() {
                self.move_clock(annotation.time_us);
            }
            self.annotate(annotation);
        }
        if time_us < u64::MAX {
            self.gaps.clock_steps_back += u64::from(time_us < self.now_us);
            self.move_clock(time_us);
        }
    }

    fn move_clock(&mut self, time_us: u64) {
        let passed = time_us.saturating_sub(self.now_us).saturating_mul(1000);
        if passed > 0 {
            self.builder.elapse(Nanos(passed));
            self.now_us = time_us;
        }
    }

    fn annotate(&mut self, annotation: &'a Annotation) {
        let name = annotation.name.raw();
        match annotation.stage {
            AnnotationEdge::Start => {
                let count = self.seen.entry(name).or_default();
                self.builder.mark(MarkKind::Phase, name, *count);
                *count = count.saturating_add(1);
                if self.open.len() < DEEPEST_NESTING {
                    self.open.push(name);
                }
            }
            AnnotationEdge::End => {
                // An annotation may have begun before the recording.
                if let Some(place) = self.open.iter().rposition(|open| *open == name) {
                    self.open.remove(place);
                }
                self.builder.mark(MarkKind::Phase, self.open.last().copied().unwrap_or(""), 0);
            }
        }
        self.due_step = self.steps.begins_at(annotation).or(self.due_step);
    }
}

/// The streams that allocate, to guess which other stream used a block.
struct ActiveStreams {
    /// The number of streams that allocate.
    seen: usize,
    latest: StreamId,
    /// The one before `latest`.
    before: Option<StreamId>,
    /// An invented stream, where the recording has only one.
    side: Option<StreamId>,
}

impl ActiveStreams {
    fn of(entries: &[TraceEntry]) -> ActiveStreams {
        let mut order: Vec<StreamId> = Vec::new();
        let mut known = vec![false; 1 << 16];
        for entry in entries.iter().filter(|entry| entry.action == Action::Alloc) {
            if !std::mem::replace(&mut known[entry.stream.index()], true) {
                order.push(entry.stream);
            }
        }
        let first = order.first().copied().unwrap_or_default();
        ActiveStreams { seen: order.len(), latest: first, before: order.get(1).copied(), side: None }
    }

    fn active(&mut self, stream: StreamId) {
        if stream != self.latest {
            self.before = Some(self.latest);
            self.latest = stream;
        }
    }

    fn other_than(&self, own: StreamId) -> Option<StreamId> {
        if self.latest != own { Some(self.latest) } else { self.before.or(self.side) }
    }
}

/// How a recording marks its steps.
enum StepMarks {
    /// Not at all.
    Unmarked,
    /// By annotations of the profiler, which have the number.
    Numbered,
    /// By the optimizer: its end begins the next step.
    AfterOptimizer { optimizer: String, done: u32 },
}

const PROFILER_STEP: &str = "ProfilerStep#";
const OPTIMIZER_STEP: &str = "Optimizer.step#";

impl StepMarks {
    fn of(annotations: &[Annotation]) -> StepMarks {
        if annotations.iter().any(|annotation| annotation.name.raw().starts_with(PROFILER_STEP)) {
            return StepMarks::Numbered;
        }
        // Of several optimizers, the first one counts.
        match annotations.iter().find(|annotation| annotation.name.raw().starts_with(OPTIMIZER_STEP)) {
            Some(annotation) => StepMarks::AfterOptimizer { optimizer: annotation.name.raw().to_owned(), done: 0 },
            None => StepMarks::Unmarked,
        }
    }

    fn begins_at(&mut self, annotation: &Annotation) -> Option<u32> {
        match self {
            StepMarks::Unmarked => None,
            StepMarks::Numbered => match annotation.stage {
                AnnotationEdge::Start => annotation.name.raw().strip_prefix(PROFILER_STEP)?.parse().ok(),
                AnnotationEdge::End => None,
            },
            StepMarks::AfterOptimizer { optimizer, done } => {
                if annotation.stage != AnnotationEdge::End || annotation.name.raw() != optimizer {
                    return None;
                }
                *done = done.saturating_add(1);
                Some(*done)
            }
        }
    }
}

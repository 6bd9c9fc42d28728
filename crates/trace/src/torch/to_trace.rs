//! Tells the program's own actions out of what its allocator recorded: allocs, frees, uses on other streams, marks.
//!
//! What the allocator did on its own (segments, completed frees) is left out: another allocator does otherwise.

use std::collections::HashMap;

use super::{Action, Annotation, BlockState, Entry, Initial, StackId, Stacks, Stage};
use crate::{
    BlockSlot, MarkKind, TableFull, Trace, TraceBuilder, builder::add_failed_request, memory_budget::MemoryBudget,
};
use oomph_base::{Nanos, Progress, SiteId, StreamId, TagId};

/// The longest call site that is kept whole. C++ templates know no measure.
const LONGEST_SITE: usize = 4 << 10;
/// What call sites may take in all, so that one long file name in a million frames stays one.
const ALL_SITES: MemoryBudget = MemoryBudget::of(1 << 30);

/// Annotations nest a few levels deep; ends that never come must not pile up.
const DEEPEST_NESTING: usize = 256;

/// What a story is told from.
#[derive(Clone, Copy)]
pub(crate) struct Material<'a> {
    pub(crate) entries: &'a [Entry],
    pub(crate) annotations: &'a [Annotation],
    pub(crate) stacks: &'a Stacks,
    pub(crate) streams: &'a [u64],
    pub(crate) initial: &'a Initial,
    /// Before which entries the program gave back its cache, ascending.
    pub(crate) empty_caches: &'a [usize],
}

/// What could be told only in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Doubts {
    /// Frees that had to wait for another stream.
    pub(crate) held_back: u64,
    /// Of these, how many could mean more than one stream, or one that the recording never shows.
    pub(crate) streams_guessed: u64,
    /// Entries that cannot be: a request for nothing, two blocks in one place, a free of nothing.
    pub(crate) impossible: u64,
    /// Entries earlier than the one before.
    pub(crate) clock_steps_back: u64,
    /// Call sites left out because there are too many.
    pub(crate) sites_left_out: u64,
}

/// Tells the story of a recording.
pub(crate) fn tell(material: &Material<'_>, name: &str, progress: &dyn Progress) -> Result<(Trace, Doubts), TableFull> {
    let mut teller = Teller::new(material)?;
    teller.tell_what_was_there();
    let mut empty_caches = material.empty_caches.iter().copied().peekable();
    for (index, entry) in progress.each("telling the story", material.entries).enumerate() {
        teller.pass_time_until(entry.time_us);
        while empty_caches.next_if(|&before| before <= index).is_some() {
            teller.story.empty_cache();
        }
        teller.tell(entry, material.entries.get(index + 1))?;
    }
    teller.pass_time_until(u64::MAX);
    empty_caches.for_each(|_| teller.story.empty_cache());
    Ok((teller.story.finish(name), teller.doubts))
}

struct Teller<'a> {
    material: &'a Material<'a>,
    story: TraceBuilder,
    /// The blocks that the program holds, by address.
    live: HashMap<u64, BlockSlot>,
    /// By stack; `None` where not yet known.
    sites: Vec<Option<SiteId>>,
    sites_budget: MemoryBudget,
    streams: Streams,
    steps: Steps,
    annotations: std::slice::Iter<'a, Annotation>,
    /// Names of the annotated stretches that are open, outermost first, and how often each name came so far.
    open: Vec<&'a str>,
    seen: HashMap<&'a str, u32>,
    /// A step that begins with the next request: what an optimizer leaves to be freed still belongs to its own.
    due_step: Option<u32>,
    now_us: u64,
    doubts: Doubts,
}

impl<'a> Teller<'a> {
    fn new(material: &'a Material<'a>) -> Result<Teller<'a>, TableFull> {
        let mut story = TraceBuilder::new();
        for &handle in material.streams {
            story.stream_known_as(handle)?;
        }
        let steps = Steps::of(material.annotations);
        Ok(Teller {
            material,
            story,
            live: HashMap::new(),
            sites: vec![None; material.stacks.count()],
            sites_budget: ALL_SITES,
            streams: Streams::of(material.entries),
            due_step: if matches!(steps, Steps::AfterOptimizer { .. }) { Some(0) } else { None },
            steps,
            annotations: material.annotations.iter(),
            open: Vec::new(),
            seen: HashMap::new(),
            now_us: material.entries.first().map_or(0, |entry| entry.time_us),
            doubts: Doubts::default(),
        })
    }

    fn tell_what_was_there(&mut self) {
        let initial = self.material.initial;
        if initial.live().next().is_none() {
            return;
        }
        self.story.mark(MarkKind::Phase, "before the recording", 0);
        for (block, stream) in initial.live() {
            if block.requested_size == 0 {
                self.doubts.impossible += 1;
                continue;
            }
            let site = self.site(block.stack);
            let slot = self.story.alloc_at(block.requested_size, stream, TagId(0), site);
            match block.state {
                BlockState::PendingFree => self.story.free(slot),
                BlockState::Allocated | BlockState::Inactive => drop(self.live.insert(block.address.0, slot)),
            }
        }
        self.story.mark(MarkKind::Phase, "", 0);
    }

    fn tell(&mut self, entry: &Entry, next: Option<&Entry>) -> Result<(), TableFull> {
        let address = entry.address.0;
        if let Action::Alloc | Action::OutOfMemory = entry.action
            && let Some(step) = self.due_step.take()
        {
            self.story.mark(MarkKind::Step, "", step);
        }
        match entry.action {
            Action::Alloc | Action::OutOfMemory if entry.size == 0 => self.doubts.impossible += 1,
            Action::Alloc => {
                self.streams.active(entry.stream);
                let site = self.site(entry.stack);
                let slot = self.story.alloc_at(entry.size, entry.stream, TagId(0), site);
                if self.live.insert(address, slot).is_some() {
                    self.doubts.impossible += 1;
                }
            }
            Action::FreeRequested => {
                let Some(slot) = self.live.remove(&address) else {
                    self.doubts.impossible += 1;
                    return Ok(());
                };
                let at_once =
                    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address.0 == address);
                if !at_once {
                    self.tell_use(slot, entry.stream)?;
                }
                self.story.free_on(slot, entry.stream);
            }
            Action::OutOfMemory => {
                let site = self.material.stacks.site(entry.stack).map(clipped);
                add_failed_request(&mut self.story, entry.size, entry.stream, site.as_deref());
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

    /// A free that had to wait: some other stream used the block. Which one is not recorded.
    fn tell_use(&mut self, slot: BlockSlot, own: StreamId) -> Result<(), TableFull> {
        self.doubts.held_back += 1;
        self.doubts.streams_guessed += u64::from(self.streams.seen != 2);
        let other = match self.streams.other_than(own) {
            Some(other) => other,
            None => {
                let known = self.story.tables().streams();
                let unseen = (1..).map(|number| number * 16).find(|handle| !known.contains(handle)).unwrap_or(u64::MAX);
                let stream = self.story.stream_known_as(unseen)?;
                self.streams.side = Some(stream);
                stream
            }
        };
        self.story.use_on(slot, other);
        Ok(())
    }

    fn site(&mut self, stack: StackId) -> SiteId {
        match self.sites.get(stack.0 as usize) {
            None => SiteId(0),
            Some(Some(site)) => *site,
            Some(None) => {
                let text = self.material.stacks.site(stack).map(clipped).unwrap_or_default();
                let site = match self.sites_budget.charge(text.len()) {
                    Ok(()) => self.story.site(&text),
                    Err(_) => {
                        self.doubts.sites_left_out += 1;
                        SiteId(0)
                    }
                };
                self.sites[stack.0 as usize] = Some(site);
                site
            }
        }
    }

    /// Lets time pass, with the annotations that fall into it.
    fn pass_time_until(&mut self, time_us: u64) {
        while let Some(annotation) = self.annotations.as_slice().first().filter(|next| next.time_us <= time_us) {
            self.annotations.next();
            if !self.material.entries.is_empty() {
                self.move_clock(annotation.time_us);
            }
            self.annotate(annotation);
        }
        if time_us < u64::MAX {
            self.doubts.clock_steps_back += u64::from(time_us < self.now_us);
            self.move_clock(time_us);
        }
    }

    fn move_clock(&mut self, time_us: u64) {
        let passed = time_us.saturating_sub(self.now_us).saturating_mul(1000);
        if passed > 0 {
            self.story.elapse(Nanos(passed));
            self.now_us = time_us;
        }
    }

    fn annotate(&mut self, annotation: &'a Annotation) {
        let name: &str = &annotation.name;
        match annotation.stage {
            Stage::Start => {
                let count = self.seen.entry(name).or_default();
                self.story.mark(MarkKind::Phase, name, *count);
                *count = count.saturating_add(1);
                if self.open.len() < DEEPEST_NESTING {
                    self.open.push(name);
                }
            }
            Stage::End => {
                // One that began before the recording ends here without having been opened.
                if let Some(place) = self.open.iter().rposition(|open| *open == name) {
                    self.open.remove(place);
                }
                self.story.mark(MarkKind::Phase, self.open.last().copied().unwrap_or(""), 0);
            }
        }
        self.due_step = self.steps.begins_at(annotation).or(self.due_step);
    }
}

fn clipped(mut site: String) -> String {
    if site.len() > LONGEST_SITE {
        let boundary = (0..=LONGEST_SITE).rev().find(|&place| site.is_char_boundary(place)).unwrap_or(0);
        site.truncate(boundary);
    }
    site
}

/// Which streams are busy, to say which other stream may have used a block.
struct Streams {
    /// How many streams allocate at all.
    seen: usize,
    latest: StreamId,
    /// The latest that is not `latest`.
    before: Option<StreamId>,
    /// Made up where the recording shows only one.
    side: Option<StreamId>,
}

impl Streams {
    fn of(entries: &[Entry]) -> Streams {
        let mut order: Vec<StreamId> = Vec::new();
        let mut known = vec![false; 1 << 16];
        for entry in entries.iter().filter(|entry| entry.action == Action::Alloc) {
            if !std::mem::replace(&mut known[entry.stream.index()], true) {
                order.push(entry.stream);
            }
        }
        let first = order.first().copied().unwrap_or_default();
        Streams { seen: order.len(), latest: first, before: order.get(1).copied(), side: None }
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

/// How a recording shows its steps.
enum Steps {
    /// Not at all.
    Unmarked,
    /// By the profiler's own annotations, which carry the number.
    Numbered,
    /// By the optimizer: when it is done the next step begins.
    AfterOptimizer { optimizer: String, done: u32 },
}

const PROFILER_STEP: &str = "ProfilerStep#";
const OPTIMIZER_STEP: &str = "Optimizer.step#";

impl Steps {
    fn of(annotations: &[Annotation]) -> Steps {
        if annotations.iter().any(|annotation| annotation.name.starts_with(PROFILER_STEP)) {
            return Steps::Numbered;
        }
        // With several optimizers the first one counts.
        match annotations.iter().find(|annotation| annotation.name.starts_with(OPTIMIZER_STEP)) {
            Some(annotation) => Steps::AfterOptimizer { optimizer: annotation.name.to_string(), done: 0 },
            None => Steps::Unmarked,
        }
    }

    fn begins_at(&mut self, annotation: &Annotation) -> Option<u32> {
        match self {
            Steps::Unmarked => None,
            Steps::Numbered => match annotation.stage {
                Stage::Start => annotation.name.strip_prefix(PROFILER_STEP)?.parse().ok(),
                Stage::End => None,
            },
            Steps::AfterOptimizer { optimizer, done } => {
                if annotation.stage != Stage::End || *annotation.name != **optimizer {
                    return None;
                }
                *done = done.saturating_add(1);
                Some(*done)
            }
        }
    }
}

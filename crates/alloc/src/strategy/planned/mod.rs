//! `planned`: a plan made from one step of the program says where the blocks of later steps go.
//!
//! Training steps repeat: the same sizes in the same order with the same lifetimes. So one step is profiled while its
//! requests are served by a fallback, the [`caching`] strategy; its blocks are packed into
//! one region a stream; and once a step has gone by the plan, each request of the next ones gets the place that the plan
//! has for it. Whatever is not planned goes to the fallback: small requests, blocks that stay, requests that the
//! profiled step did not make, and those whose place is still taken, because a block lives longer than it did. A plan
//! that the program leaves gives its memory back, and another is made from what the program does now.
//!
//! Steps are known by [`Control::StepBegins`] alone. A source that marks none, or fewer than
//! three from the profiled one on, gets the fallback and nothing else.
//!
//! STAlloc, the model, profiles a run of its own and plans before the next; here the profiled step and the plan belong
//! to the same run, so its peak is that of both. `peak_reserved_since_plan_bytes` among the details says what the
//! planned steps alone need.

mod plan;
mod profile;
mod region;
mod settings;
mod step;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::{
    plan::Plan,
    profile::{Birth, Profile, Shape},
    region::Region,
    settings::Settings,
};
use super::{
    Attempt, Block, Built, Caller, Context, Control, EventSink, Freed, InitialLayout, Layout, Outcome, Refusal,
    Request, Setup, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent, Usage,
    caching::Caching,
    deferred::{DeferredFrees, Patience},
    slots::Slots,
};
use crate::device::Capabilities;
use oomph_base::{Address, MIB, StreamId, round_up};
use oomph_pytorch::AllocatorSettings;

/// Planned blocks are multiples of this.
const QUANTUM: u64 = 512;
/// What the fallback maps at once.
const PAGE: u64 = 2 * MIB;
/// In a handle's slot: the block is planned and not the fallback's.
const PLANNED: u32 = 1 << 31;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "planned",
    summary: "STAlloc: steps follow a plan made from a profiled one; without step marks, just its fallback",
    origin: "STAlloc (arXiv 2507.16274): a static plan for what repeats, a caching allocator for what does not",
    parameters: settings::PARAMETERS,
    variants: &["expandable_segments:False", "profile_step:0,minimum_size:512,replan:0"],
    build,
};

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let settings = Settings::read(parameters)?;
    Ok(Box::new(Planned::new(settings, Caching::new(fallback_settings(&settings), setup))))
}

/// Mapped in the smallest pieces, next to nothing of what is free stays behind when blocks that stay lie between.
fn fallback_settings(settings: &Settings) -> AllocatorSettings {
    let defaults = AllocatorSettings::default();
    if settings.expandable_segments {
        AllocatorSettings { expandable_segments: true, large_segment_size: PAGE, ..defaults }
    } else {
        defaults
    }
}

/// The strategy that follows a plan.
#[derive(Clone, Debug)]
pub struct Planned {
    settings: Settings,
    fallback: Caching,
    /// What the fallback's blocks are to the profile, by slot.
    notes: Vec<Note>,
    /// From the first step on.
    profile: Option<Profile>,
    plan: Option<Plan>,
    /// All there are; those that the plan no longer uses go when they are empty.
    regions: Vec<Option<Region>>,
    /// Which region serves a stream.
    serving: Vec<(StreamId, u32)>,
    blocks: Slots<Tenant>,
    /// The streams that use a planned block beside its own, by slot.
    uses: BTreeMap<u32, Vec<StreamId>>,
    deferred: DeferredFrees<Departing>,
    /// Private pools that take requests at the moment: theirs are not planned.
    open_pools: u32,
    progress: step::Progress,
    counts: Counts,
    /// Of planned blocks and regions.
    own: Stats,
    /// Of everything together.
    peak: Usage,
    peak_segments: u64,
}

/// What a block is to the profile.
#[derive(Clone, Copy, Debug)]
struct Note {
    birth: Birth,
    shape: Shape,
}

const NO_NOTE: Note = Note { birth: Birth::UNKNOWN, shape: (StreamId::DEFAULT, 0) };

/// Where a planned block lies, and for whom.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    region: u32,
    offset: u64,
    requested: u64,
    note: Note,
}

/// A planned block that waits for streams.
#[derive(Clone, Copy, Debug)]
struct Departing {
    address: Address,
    size: u64,
    tenant: Tenant,
}

/// What only this strategy does.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    plans: u64,
    /// Requests served by the plan.
    as_planned: u64,
    /// Requests that no plan foresaw.
    unforeseen: u64,
    /// Requests whose place was still taken.
    place_taken: u64,
    /// Regions that the device refused.
    regions_refused: u64,
    peak_reserved_since_plan: u64,
}

/// Passes on all but failures: the fallback's may not be the end.
struct WithoutFailures<'a>(&'a mut dyn EventSink);

impl EventSink for WithoutFailures<'_> {
    fn event(&mut self, event: StrategyEvent) {
        if !matches!(event, StrategyEvent::OutOfMemory { .. }) {
            self.0.event(event);
        }
    }
}

impl Planned {
    fn new(settings: Settings, fallback: Caching) -> Planned {
        Planned {
            settings,
            fallback,
            notes: Vec::new(),
            profile: None,
            plan: None,
            regions: Vec::new(),
            serving: Vec::new(),
            blocks: Slots::default(),
            uses: BTreeMap::new(),
            deferred: DeferredFrees::default(),
            open_pools: 0,
            progress: step::Progress::default(),
            counts: Counts::default(),
            own: Stats::default(),
            peak: Usage::default(),
            peak_segments: 0,
        }
    }

    /// Serves a request at its place, if that is vacant.
    fn alloc_as_planned(&mut self, request: &Request, shape: Shape, offset: u64) -> Option<Block> {
        let (stream, size) = shape;
        let &(_, number) = self.serving.iter().find(|(served, _)| *served == stream)?;
        let region = self.regions.get_mut(number as usize)?.as_mut()?;
        if !region.is_vacant(offset, size) {
            self.counts.place_taken += 1;
            self.progress.deviate();
            return None;
        }
        region.occupy(offset, size, request.bytes);
        let address = region.address.offset(offset);
        let note = self.note(shape);
        let tenant = Tenant { region: number, offset, requested: request.bytes, note };
        let block = self.blocks.insert(address, size, tenant);
        self.own.on_alloc(request.bytes, size);
        self.counts.as_planned += 1;
        Some(Block { slot: block.slot | PLANNED, ..block })
    }

    fn note(&mut self, shape: Shape) -> Note {
        match &mut self.profile {
            Some(profile) => Note { birth: profile.born(shape), shape },
            None => NO_NOTE,
        }
    }

    /// Serves a request from the fallback; regions that stand empty go first if that is what it takes.
    fn alloc_from_fallback(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        self.retire_regions(cx)?;
        let mut attempt = self.try_fallback(cx, request)?;
        if let Attempt::OutOfMemory(shortage) = attempt
            && shortage.refused_by != Refusal::Size
            && self.give_back_regions(cx, false)?
        {
            self.own.retries += 1;
            cx.sink.event(StrategyEvent::Retry { rounded: shortage.rounded });
            attempt = match self.try_fallback(cx, request)? {
                Attempt::Served(block, _) => Attempt::Served(block, Outcome::ReleaseAndRetry),
                failed => failed,
            };
        }
        if let Attempt::OutOfMemory(shortage) = attempt
            && shortage.refused_by != Refusal::Size
        {
            let (rounded, device_free) = (shortage.rounded, shortage.device_free);
            cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream: request.stream, device_free });
            self.own.ooms += 1;
        }
        Ok(attempt)
    }

    fn try_fallback(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let mut sink = WithoutFailures(cx.sink);
        self.fallback.alloc(&mut Context { device: cx.device, sink: &mut sink }, request)
    }

    /// Remembers what a block of the fallback is to the profile.
    fn write_note(&mut self, slot: u32, note: Note) {
        let slot = slot as usize;
        if slot >= self.notes.len() {
            self.notes.resize(slot + 1, NO_NOTE);
        }
        self.notes[slot] = note;
    }

    fn note_death(&mut self, note: Note) {
        if let Some(profile) = &mut self.profile {
            profile.died(note.birth, note.shape);
        }
    }

    fn free_planned(&mut self, cx: &mut Context<'_>, block: Block) -> Result<Freed, StrategyError> {
        let (size, tenant) = self.blocks.get(&block)?;
        let freed = match self.uses.get(&block.slot) {
            Some(users) => {
                self.deferred.hold(cx.device, Departing { address: block.address, size, tenant }, users)?;
                self.uses.remove(&block.slot);
                Freed::Later
            }
            None => Freed::Now,
        };
        self.blocks.remove(&block)?;
        self.own.on_free(size);
        self.note_death(tenant.note);
        if let Some(region) = self.region(tenant.region) {
            match freed {
                Freed::Later => region.set_pending(tenant.offset),
                Freed::Now => region.vacate(tenant.offset),
            }
        }
        if freed == Freed::Now {
            self.own.on_reusable(tenant.requested, size);
        }
        Ok(freed)
    }

    fn region(&mut self, number: u32) -> Option<&mut Region> {
        self.regions.get_mut(number as usize)?.as_mut()
    }

    /// Takes up frees that streams have got past.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let mut departed = Vec::new();
        let result = self.deferred.release(cx.device, patience, &mut departed);
        for Departing { address, size, tenant } in departed {
            if let Some(region) = self.region(tenant.region) {
                region.vacate(tenant.offset);
                let (requested, stream) = (tenant.requested, region.stream);
                cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
                self.own.on_reusable(requested, size);
            }
        }
        Ok(result?)
    }

    /// What is in use now, the fallback's and the plan's.
    fn usage(&self) -> Usage {
        let (theirs, ours) = (self.fallback.stats().current, self.own.current);
        Usage {
            requested: theirs.requested + ours.requested,
            allocated: theirs.allocated + ours.allocated,
            active: theirs.active + ours.active,
            reserved: theirs.reserved + ours.reserved,
        }
    }

    fn keep_peaks(&mut self) {
        let now = self.usage();
        self.peak = highest(self.peak, now);
        self.peak_segments = self.peak_segments.max(self.fallback.stats().segments + self.own.segments);
        if self.progress.follows_plan() {
            let peak = &mut self.counts.peak_reserved_since_plan;
            *peak = now.reserved.max(*peak);
        }
    }
}

fn highest(one: Usage, other: Usage) -> Usage {
    Usage {
        requested: one.requested.max(other.requested),
        allocated: one.allocated.max(other.allocated),
        active: one.active.max(other.active),
        reserved: one.reserved.max(other.reserved),
    }
}

impl Strategy for Planned {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        self.complete_frees(cx, Patience::Poll)?;
        self.settle(cx)?;
        let shape = (request.stream, round_up(request.bytes, QUANTUM));
        let plannable = shape.1 >= self.settings.minimum_size && self.open_pools == 0;
        let planned = self.plan.as_ref().filter(|_| plannable).and_then(|plan| plan.look_up(shape));
        let place = planned.filter(|_| self.progress.trusts_plan()).and_then(|planned| planned.offset);
        let served = place.and_then(|offset| self.alloc_as_planned(request, shape, offset));
        let attempt = match served {
            Some(block) => Attempt::Served(block, Outcome::Hit),
            None => self.alloc_from_fallback(cx, request)?,
        };
        if let (Attempt::Served(block, _), None) = (attempt, served) {
            let note = if plannable { self.note(shape) } else { NO_NOTE };
            self.write_note(block.slot, note);
        }
        match (&mut self.plan, planned) {
            (Some(plan), Some(planned)) => plan.advance(planned),
            (Some(_), None) if plannable => {
                self.counts.unforeseen += 1;
                self.progress.deviate();
            }
            _ => {}
        }
        self.keep_peaks();
        Ok(attempt)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        if block.slot & PLANNED != 0 {
            return self.free_planned(cx, Block { slot: block.slot & !PLANNED, ..block });
        }
        let freed = self.fallback.free(cx, block, caller)?;
        if let Some(note) = self.notes.get_mut(block.slot as usize) {
            let note = std::mem::replace(note, NO_NOTE);
            self.note_death(note);
        }
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        if block.slot & PLANNED == 0 {
            return self.fallback.used_on(cx, block, stream);
        }
        let block = Block { slot: block.slot & !PLANNED, ..*block };
        let (_, tenant) = self.blocks.get(&block)?;
        if tenant.note.shape.0 != stream {
            let users = self.uses.entry(block.slot).or_default();
            if let Err(place) = users.binary_search(&stream) {
                users.insert(place, stream);
            }
        }
        Ok(())
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        match *command {
            Control::StepBegins(number) => {
                self.begin_step(number);
                self.settle(cx)?;
                self.keep_peaks();
                Ok(())
            }
            Control::PoolBegin { .. } => {
                self.fallback.control(cx, command)?;
                self.open_pools += 1;
                Ok(())
            }
            Control::PoolEnd { .. } => {
                self.fallback.control(cx, command)?;
                self.open_pools = self.open_pools.saturating_sub(1);
                Ok(())
            }
            _ => self.fallback.control(cx, command),
        }
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    /// Regions that stand empty go as well; the next step takes them anew.
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.give_back_regions(cx, false)?;
        self.fallback.trim(cx)?;
        // Giving mapped memory back can leave it in more pieces than before.
        self.keep_peaks();
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.deferred.destroy_idle_events(cx.device)?;
        self.vacate_regions()?;
        self.give_back_regions(cx, false)?;
        self.fallback.close(cx)?;
        *self = Planned::new(self.settings, self.fallback.clone());
        Ok(())
    }

    fn stats(&self) -> Stats {
        let (theirs, ours, current) = (self.fallback.stats(), &self.own, self.usage());
        let segments = theirs.segments + ours.segments;
        // After a call that failed half-way the present may be a peak that nobody has noted yet.
        Stats {
            current,
            peak: highest(self.peak, current),
            live_blocks: theirs.live_blocks + ours.live_blocks,
            segments,
            peak_segments: self.peak_segments.max(segments),
            allocs: theirs.allocs + ours.allocs,
            frees: theirs.frees + ours.frees,
            retries: theirs.retries + ours.retries,
            // A failure of the fallback that regions could cure is none.
            ooms: ours.ooms,
            off_books: theirs.off_books,
        }
    }

    /// What the plan keeps free is for the plan.
    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.fallback.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        let mut layout = self.fallback.layout()?;
        layout.segments.extend(self.regions.iter().flatten().map(Region::view));
        layout.segments.sort_unstable_by_key(|segment| segment.address);
        Some(layout)
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        let counts = &self.counts;
        vec![
            ("plans", counts.plans),
            ("served_as_planned", counts.as_planned),
            ("unforeseen_requests", counts.unforeseen),
            ("places_still_taken", counts.place_taken),
            ("regions_refused", counts.regions_refused),
            ("region_bytes", self.own.current.reserved),
            ("peak_reserved_since_plan_bytes", counts.peak_reserved_since_plan),
        ]
    }

    fn requires(&self) -> Capabilities {
        self.fallback.requires()
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

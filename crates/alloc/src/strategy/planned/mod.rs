//! `planned`: a plan made from one step of the program says where the blocks of later steps go.
//!
//! Training steps repeat: the same sizes in the same order with the same lifetimes. One step is
//! profiled while the fallback, the [`caching`](super::caching) strategy, serves its requests. Its
//! blocks are packed into one region per stream. Once a step has followed the plan, each request of
//! later steps gets its planned offset. The fallback serves everything else: small requests, blocks
//! that stay, requests that the profiled step did not make, and requests whose offset is still
//! taken because a block lives longer than it did. A plan that the program no longer follows gives
//! its memory back, and another is made from the program's present behaviour.
//!
//! Steps are known only by [`Control::StepBegins`]. A source without step marks, or with fewer than
//! three from the profiled step on, gets only the fallback.
//!
//! A region is one allocation and goes back as a whole. While a block is left in it, its free ranges
//! serve what the fallback cannot, so that a plan that is given up does not keep memory from the
//! program.
//!
//! STAlloc, the model, profiles a separate run and plans before the next. Here the profiled step
//! and the plan belong to the same run, so the peak includes both. `peak_reserved_since_plan_bytes`
//! among the details is what the planned steps alone need.

mod plan;
mod step;
#[cfg(test)]
mod tests;

use self::{
    plan::{BlockBirth, RequestShape, StepPlan, StepProfile},
    step::{PlanProgress, PlannedRegion},
};
use super::{
    Attempt, Block, Built, Caller, Context, Control, EventSink, Freed, InitialLayout, Layout, Outcome, Parameter,
    Refusal, Request, Setup, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent, Usage,
    caching::Caching,
    deferred::Patience,
    parameters,
    pooled::{MemoryPiece, NONE, PieceTable},
};
use crate::device::Capabilities;
use oomph_base::{MIB, StreamId, round_up};
use oomph_pytorch::AllocatorSettings;

/// Planned blocks are multiples of this.
const QUANTUM: u64 = 512;
/// The segment size of the fallback.
const PAGE: u64 = 2 * MIB;
/// Set in the slot of a handle of a planned block.
const PLANNED: u32 = 1 << 31;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "planned",
    summary: "STAlloc: steps follow a plan made from a profiled step; without step marks, only its fallback",
    origin: "STAlloc (arXiv 2507.16274): a static plan for what repeats, a caching allocator for what does not",
    differs: &[
        "profiles a step of the same run; STAlloc profiles a separate run and plans before the next",
        "makes a new plan when the program no longer follows the old one",
    ],
    parameters: PARAMETERS,
    variants: &["expandable_segments:False", "profile_step:0,minimum_size:512,replan:0"],
    build,
};

const PARAMETERS: &[Parameter] = &[
    Parameter::text(
        "profile_step",
        "a count",
        "1",
        "the step that the plan is made from, counted from 0; the first step often differs from the others",
    ),
    Parameter::text("minimum_size", "an amount of memory", "1MiB", "smaller requests go to the fallback"),
    Parameter::text(
        "replan",
        "between 0 and 1, or off",
        "0.1",
        "a plan is given up when a step deviates from more than this share of it",
    ),
    Parameter::text(
        "expandable_segments",
        "True, False",
        "True",
        "whether the fallback uses expandable segments, so that it can give back more memory",
    ),
];

/// The parameters as read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct PlannedSettings {
    profile_step: u32,
    minimum_size: u64,
    /// `None`: the first plan is never given up.
    replan_above: Option<f64>,
    expandable_segments: bool,
}

impl PlannedSettings {
    fn read(text: &str) -> Result<PlannedSettings, SpecError> {
        let mut settings = PlannedSettings::default();
        parameters::read_with_defaults(&ENTRY, text, |setting| {
            match setting.key {
                "profile_step" => settings.profile_step = setting.number()?,
                "minimum_size" => settings.minimum_size = setting.bytes()?,
                "replan" if setting.value == "off" => settings.replan_above = None,
                "replan" => match setting.number()? {
                    share @ 0.0..=1.0 => settings.replan_above = Some(share),
                    other => return Err(setting.refused(&format!("{other} is not between 0 and 1"))),
                },
                _ => settings.expandable_segments = setting.truth()?,
            }
            Ok(())
        })?;
        Ok(settings)
    }
}

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let settings = PlannedSettings::read(parameters)?;
    Ok(Box::new(PlannedStrategy::new(settings, Caching::new(fallback_settings(&settings), setup))))
}

/// The fallback maps the smallest possible segments, so that blocks that stay keep little free
/// memory reserved between them.
fn fallback_settings(settings: &PlannedSettings) -> AllocatorSettings {
    let defaults = AllocatorSettings::default();
    if settings.expandable_segments {
        AllocatorSettings { expandable_segments: true, large_segment_size: PAGE, ..defaults }
    } else {
        defaults
    }
}

/// The strategy that follows a plan.
#[derive(Clone, Debug)]
pub struct PlannedStrategy {
    settings: PlannedSettings,
    fallback: Caching,
    /// When blocks of the fallback and planned blocks were allocated, by slot.
    fallback_births: Vec<BlockBirth>,
    planned_births: Vec<BlockBirth>,
    /// From the first step on.
    profile: Option<StepProfile>,
    plan: Option<StepPlan>,
    /// All regions. Those that the plan no longer uses go back when they are empty.
    regions: Vec<Option<PlannedRegion>>,
    /// The region of each stream.
    serving: Vec<(StreamId, u32)>,
    /// Planned blocks.
    blocks: PieceTable,
    /// Open private pools: while there are any, requests are not planned.
    open_pools: u32,
    progress: PlanProgress,
    counts: PlannedCounts,
    /// Statistics of planned blocks and regions.
    own: Stats,
    /// Peaks of planned and fallback memory together.
    peak: Usage,
    peak_segments: u64,
}

/// Counters beside the common statistics.
#[derive(Clone, Copy, Debug, Default)]
struct PlannedCounts {
    plans: u64,
    /// Requests served by the plan.
    as_planned: u64,
    /// Requests that are not in the plan.
    unforeseen: u64,
    /// Requests whose offset was still taken.
    place_taken: u64,
    /// Regions that the device refused.
    regions_refused: u64,
    /// Requests served by free ranges of regions because nothing else was left.
    in_regions: u64,
    peak_reserved_since_plan: u64,
}

/// Passes on all events except failures: after a failure of the fallback there is a retry.
struct WithoutOutOfMemory<'a>(&'a mut dyn EventSink);

impl EventSink for WithoutOutOfMemory<'_> {
    fn event(&mut self, event: StrategyEvent) {
        if !matches!(event, StrategyEvent::OutOfMemory { .. }) {
            self.0.event(event);
        }
    }
}

impl PlannedStrategy {
    fn new(settings: PlannedSettings, fallback: Caching) -> PlannedStrategy {
        PlannedStrategy {
            settings,
            fallback,
            fallback_births: Vec::new(),
            planned_births: Vec::new(),
            profile: None,
            plan: None,
            regions: Vec::new(),
            serving: Vec::new(),
            blocks: PieceTable::default(),
            open_pools: 0,
            progress: PlanProgress::default(),
            counts: PlannedCounts::default(),
            own: Stats::default(),
            peak: Usage::default(),
            peak_segments: 0,
        }
    }

    /// Serves a request at its planned offset, if that is free.
    fn alloc_as_planned(&mut self, request: &Request, shape: RequestShape, offset: u64) -> Option<Block> {
        let (stream, size) = shape;
        let &(_, number) = self.serving.iter().find(|(served, _)| *served == stream)?;
        let region = self.regions.get_mut(number as usize)?.as_mut()?;
        if !region.is_free(&self.blocks, offset, size) {
            self.counts.place_taken += 1;
            self.progress.deviate();
            return None;
        }
        let birth = self.record_alloc(shape);
        self.counts.as_planned += 1;
        self.place(request, shape, (number, offset), birth)
    }

    /// Serves a request that no other memory could serve from a free range of a region: a plan that is given up may leave
    /// blocks in a region, which then cannot go back.
    fn alloc_in_region(&mut self, request: &Request) -> Option<Block> {
        let shape = (request.stream, round_up(request.bytes, QUANTUM));
        let (number, offset) = (0..).zip(&self.regions).find_map(|(number, region)| {
            let region = region.as_ref().filter(|region| region.stream == request.stream && self.open_pools == 0)?;
            Some((number, region.first_free(&self.blocks, shape.1)?))
        })?;
        self.counts.in_regions += 1;
        self.place(request, shape, (number, offset), BlockBirth::UNKNOWN)
    }

    /// Puts a block at the offset of a region, which must be free.
    fn place(
        &mut self,
        request: &Request,
        (stream, size): RequestShape,
        (number, offset): (u32, u64),
        birth: BlockBirth,
    ) -> Option<Block> {
        let region = self.regions.get_mut(number as usize)?.as_mut()?;
        let piece = MemoryPiece::new(region.address.offset(offset).0, size, stream);
        let slot = self.blocks.insert(MemoryPiece { region: number, ..piece });
        region.blocks.insert(offset, slot);
        write_birth(&mut self.planned_births, slot, birth);
        self.own.on_alloc(request.bytes, size);
        let block = self.blocks.occupy(slot, request.bytes);
        Some(Block { slot: slot | PLANNED, ..block })
    }

    fn record_alloc(&mut self, shape: RequestShape) -> BlockBirth {
        self.profile.as_mut().map_or(BlockBirth::UNKNOWN, |profile| profile.record_alloc(shape))
    }

    /// Serves a request from the fallback; if it fails, after empty regions were given back; if that fails too, from a free
    /// range of a region.
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
            if let Some(block) = self.alloc_in_region(request) {
                return Ok(Attempt::Served(block, Outcome::Split));
            }
            return Ok(cx.out_of_memory(&mut self.own, request.stream, shortage));
        }
        Ok(attempt)
    }

    fn try_fallback(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let mut sink = WithoutOutOfMemory(cx.sink);
        self.fallback.alloc(&mut Context { device: cx.device, sink: &mut sink }, request)
    }

    fn record_free(&mut self, birth: BlockBirth) {
        if let Some(profile) = &mut self.profile {
            profile.record_free(birth);
        }
    }

    fn free_planned(&mut self, cx: &mut Context<'_>, block: &Block) -> Result<Freed, StrategyError> {
        let &MemoryPiece { size, requested, uses, .. } = self.blocks.live(block)?;
        if uses != NONE {
            self.blocks.free_later(cx.device, block.slot)?;
        }
        self.own.on_free(size);
        self.record_free(self.planned_births[block.slot as usize]);
        if uses != NONE {
            return Ok(Freed::Later);
        }
        self.remove_planned(block.slot);
        self.own.on_reusable(requested, size);
        Ok(Freed::Now)
    }

    /// Completes the frees whose streams are done.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let (completed, result) = self.blocks.completed(cx.device, patience);
        for slot in completed {
            self.blocks.report_completed(cx, &mut self.own, slot);
            self.remove_planned(slot);
        }
        Ok(result?)
    }

    /// The memory of the fallback and of the plan.
    fn usage(&self) -> Usage {
        self.fallback.stats().current.with(&self.own.current, |theirs, ours| theirs + ours)
    }

    fn keep_peaks(&mut self) {
        let now = self.usage();
        self.peak = self.peak.with(&now, u64::max);
        self.peak_segments = self.peak_segments.max(self.fallback.stats().segments + self.own.segments);
        if self.progress.follows_plan() {
            let peak = &mut self.counts.peak_reserved_since_plan;
            *peak = now.reserved.max(*peak);
        }
    }
}

fn write_birth(births: &mut Vec<BlockBirth>, slot: u32, birth: BlockBirth) {
    let slot = slot as usize;
    if slot >= births.len() {
        births.resize(slot + 1, BlockBirth::UNKNOWN);
    }
    births[slot] = birth;
}

impl Strategy for PlannedStrategy {
    /// The fallback serves them.
    fn serves_pools(&self) -> bool {
        true
    }

    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        self.complete_frees(cx, Patience::Poll)?;
        self.settle(cx)?;
        let shape = (request.stream, round_up(request.bytes, QUANTUM));
        let plannable = shape.1 >= self.settings.minimum_size && self.open_pools == 0;
        let planned = self.plan.as_ref().filter(|_| plannable).and_then(|plan| plan.look_up(shape));
        let place = planned.flatten().filter(|_| self.progress.trusts_plan);
        let served = place.and_then(|offset| self.alloc_as_planned(request, shape, offset));
        let attempt = match served {
            Some(block) => Attempt::Served(block, Outcome::Hit),
            None => self.alloc_from_fallback(cx, request)?,
        };
        if let (Attempt::Served(block, _), None) = (attempt, served)
            && block.slot & PLANNED == 0
        {
            let birth = if plannable { self.record_alloc(shape) } else { BlockBirth::UNKNOWN };
            write_birth(&mut self.fallback_births, block.slot, birth);
        }
        match (&mut self.plan, planned) {
            (Some(plan), Some(_)) => plan.advance(shape),
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
            return self.free_planned(cx, &Block { slot: block.slot & !PLANNED, ..block });
        }
        let freed = self.fallback.free(cx, block, caller)?;
        if let Some(birth) = self.fallback_births.get_mut(block.slot as usize) {
            let birth = std::mem::replace(birth, BlockBirth::UNKNOWN);
            self.record_free(birth);
        }
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        if block.slot & PLANNED == 0 {
            return self.fallback.used_on(cx, block, stream);
        }
        self.blocks.note_use(&Block { slot: block.slot & !PLANNED, ..*block }, stream, false)
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

    /// Empty regions go back too; the next step takes them again.
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.give_back_regions(cx, false)?;
        self.fallback.trim(cx)?;
        // Unmapping can divide memory into more segments than before.
        self.keep_peaks();
        Ok(())
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.blocks.deferred.destroy_idle_events(cx.device)?;
        self.vacate_regions();
        self.give_back_regions(cx, false)?;
        self.fallback.close(cx)?;
        *self = PlannedStrategy::new(self.settings, self.fallback.clone());
        Ok(())
    }

    fn stats(&self) -> Stats {
        let (theirs, ours, current) = (self.fallback.stats(), &self.own, self.usage());
        let segments = theirs.segments + ours.segments;
        // After a call that failed half-way, the present may be a peak that is not noted yet.
        Stats {
            current,
            peak: self.peak.with(&current, u64::max),
            live_blocks: theirs.live_blocks + ours.live_blocks,
            segments,
            peak_segments: self.peak_segments.max(segments),
            allocs: theirs.allocs + ours.allocs,
            frees: theirs.frees + ours.frees,
            retries: theirs.retries + ours.retries,
            // A failure of the fallback counts only if the retry failed too.
            ooms: ours.ooms,
            off_books: theirs.off_books,
        }
    }

    /// Without the regions: their free memory is reserved for the plan.
    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.fallback.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        let regions = self.regions.iter().flatten().map(|region| region.view(&self.blocks));
        Some(Layout::of(self.fallback.layout()?.segments.into_iter().chain(regions)))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        let counts = &self.counts;
        vec![
            ("plans", counts.plans),
            ("served_as_planned", counts.as_planned),
            ("unforeseen_requests", counts.unforeseen),
            ("places_still_taken", counts.place_taken),
            ("regions_refused", counts.regions_refused),
            ("served_in_free_ranges", counts.in_regions),
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

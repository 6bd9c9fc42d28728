//! Memory in every step, from a replay or from snapshots taken one after the other.

use serde::Serialize;

use super::{
    LeakError,
    steps::{LeftOut, Steps, StepsFrom},
};
use crate::{
    answer::holders::{Grower, LiveInventory},
    base::MIB,
    replay::{FailedRequest, LiveBlock, Observer, OpenedAllocator, Replay, ReplayMoment, replay as run},
    strategy::{BlockState, Context, EventSink, Freed, Layout, Outcome, Silent, Strategy},
    trace::{
        Op, Source,
        torch::{Action, Recording, TraceEntry},
    },
};

/// How memory stood in every step, and who held it.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedSteps {
    /// What to call it.
    pub name: String,
    /// How steps were found.
    pub steps_from: StepsFrom,
    /// Every step.
    pub steps: Vec<StepUse>,
    /// The first of them that is judged: start-up is not.
    pub first_judged: usize,
    /// The end of those that are judged: a step in which memory ran out is not.
    pub end_judged: usize,
    /// The step in which memory ran out.
    pub ran_out_at: Option<usize>,
    /// How much memory there is.
    pub capacity: Option<u64>,
    /// The events after the last step, if memory falls in them.
    pub left_out: Option<LeftOut>,
    /// Whether reserved memory is that of the recording, because the replay reserved something else.
    pub reserved_from_recording: bool,
    /// Whether a loss is computed in every step that was found by its period: it is no layer.
    pub has_loss: bool,
    /// Number of the event that each step begins with, and of the end.
    starts: Vec<u64>,
    /// For each step, the number of requests in the trace up to its end.
    request_ends: Vec<u64>,
    /// For each step, what the replay had reserved after its last request.
    reserved_after_requests: Vec<u64>,
}

impl ObservedSteps {
    /// Runs a replay step by step. Steps begin at `phase`, where one is named.
    pub fn of_replay(replay: &Replay<'_>, phase: Option<&str>) -> Result<ObservedSteps, LeakError> {
        let source = replay.source;
        let OpenedAllocator { mut strategy, mut device, limit } = replay.open()?;
        let found = Steps::find(source, phase)?;
        let props = device.props();
        let all = props.total_bytes.saturating_sub(props.context_bytes);
        let capacity = replay.limit.or(limit).unwrap_or(all);
        let mut ledger = StepRecorder::new(&found);
        let replayed = run(source, &mut *strategy, &mut *device, &replay.options, &mut ledger)?;
        let reserved_after_requests = std::mem::take(&mut ledger.reserved);
        let steps = ledger.finish(&*strategy);
        strategy.close(&mut Context { device: &mut *device, sink: &mut Silent })?;
        let ran_out_at = replayed.first_oom.map(|FailedRequest { event, .. }| found.step_of(event).unwrap_or(0));
        let mut starts = found.starts.clone();
        starts.truncate(steps.len());
        starts.push(replayed.events.min(found.end));
        // A last step without requests has not begun.
        let with_requests = steps.iter().rposition(|step| step.born_blocks > Some(0)).map_or(0, |last| last + 1);
        Ok(ObservedSteps {
            name: source.name().to_owned(),
            steps_from: found.from.clone(),
            first_judged: found.start_up().min(steps.len()),
            end_judged: ran_out_at.map_or(steps.len(), |step| step.min(steps.len())).min(with_requests),
            steps,
            ran_out_at,
            capacity: Some(capacity),
            left_out: found.left_out,
            reserved_from_recording: false,
            has_loss: found.has_loss,
            starts,
            request_ends: found.request_ends,
            reserved_after_requests,
        })
    }

    /// Takes every snapshot as one step.
    #[must_use]
    pub fn of_snapshots(recordings: &[Recording]) -> ObservedSteps {
        let steps: Vec<StepUse> =
            recordings.iter().zip(0..).map(|(recording, number)| level(recording, number)).collect();
        let names: Vec<&str> = recordings.iter().map(|recording| recording.trace.name.as_str()).collect();
        ObservedSteps {
            name: match names.as_slice() {
                [first, .., last] => format!("{first} .. {last}"),
                names => names.concat(),
            },
            steps_from: StepsFrom::Snapshots,
            first_judged: 0,
            end_judged: steps.len(),
            steps,
            ran_out_at: None,
            capacity: None,
            left_out: None,
            reserved_from_recording: false,
            has_loss: false,
            starts: Vec::new(),
            request_ends: Vec::new(),
            reserved_after_requests: Vec::new(),
        }
    }

    /// Takes reserved memory from the recording if the replay reserved something else: the program had a limit of its
    /// own, which no snapshot contains, or pools. What is stuck in the cache is not known then.
    #[must_use]
    pub fn with_recorded_reserved(mut self, recording: &Recording) -> ObservedSteps {
        let recorded = reserved_after(recording, &self.request_ends);
        let differs =
            |(replayed, recorded): (&u64, &u64)| *replayed > 0 && replayed.abs_diff(*recorded) > replayed / PARTS_ALIKE;
        if self.reserved_after_requests.iter().zip(&recorded).any(differs) {
            for (step, reserved) in self.steps.iter_mut().zip(recorded) {
                (step.reserved_bytes, step.stuck_bytes, step.releasable_bytes) = (reserved, None, None);
            }
            self.reserved_from_recording = true;
        }
        self
    }

    /// The steps that count.
    #[must_use]
    pub fn judged(&self) -> &[StepUse] {
        &self.steps[self.first_judged.min(self.end_judged)..self.end_judged]
    }

    /// Who grew in a source from the beginning of the step `first` to the end of the judged steps.
    pub fn growers(&self, source: &dyn Source, first: usize) -> Result<Vec<Grower>, LeakError> {
        let (Some(&before), Some(&after)) = (self.starts.get(first), self.starts.get(self.end_judged)) else {
            return Ok(Vec::new());
        };
        let [before, after] = LiveInventory::at_events(source, before, after)?;
        Ok(before.growers(&after, self.end_judged - first))
    }
}

/// A replay is like the recording if both reserve the same to one part in so many. Addresses decide which of two cached
/// blocks of one size is taken, so that reserved memory may differ a little.
const PARTS_ALIKE: u64 = 10;

/// What a recording had reserved after each of these numbers of requests of its trace.
fn reserved_after(recording: &Recording, requests: &[u64]) -> Vec<u64> {
    let is_request = |entry: &TraceEntry| entry.size > 0 && matches!(entry.action, Action::Alloc | Action::OutOfMemory);
    let change = |entry: &TraceEntry| match entry.action {
        Action::SegmentAlloc | Action::SegmentMap => entry.size as i64,
        Action::SegmentFree | Action::SegmentUnmap => -(entry.size as i64),
        _ => 0,
    };
    let in_trace = recording.trace.events.iter().filter(|event| matches!(event.op, Op::Alloc { .. })).count();
    let in_entries = recording.witnessed.iter().filter(|entry| is_request(entry)).count();
    // The trace first requests the blocks that existed before.
    let mut made = in_trace.saturating_sub(in_entries) as u64;
    let at_end: u64 = recording.final_segments.iter().map(|segment| segment.total_size).sum();
    let mut reserved = at_end as i64 - recording.witnessed.iter().map(change).sum::<i64>();
    let mut found = Vec::with_capacity(requests.len());
    for entry in &recording.witnessed {
        reserved += change(entry);
        made += u64::from(is_request(entry));
        while requests.get(found.len()).is_some_and(|&end| end <= made) {
            found.push(reserved.max(0) as u64);
        }
    }
    found.resize(requests.len(), at_end);
    found
}

/// Memory at the end of a recording, as the snapshot itself says.
fn level(recording: &Recording, number: usize) -> StepUse {
    let segments = &recording.final_segments;
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0_u64, u64::saturating_add);
    let allocated = sum(&mut segments.iter().map(|segment| segment.allocated_size()));
    let reserved = sum(&mut segments.iter().map(|segment| segment.total_size));
    let free = sum(&mut segments.iter().map(|segment| segment.total_size.saturating_sub(segment.active_size())));
    let whole = segments.iter().filter(|segment| segment.active_size() == 0);
    let releasable = sum(&mut whole.map(|segment| segment.total_size));
    StepUse {
        step: number,
        kept_bytes: allocated,
        allocated_bytes: allocated,
        peak_allocated_bytes: allocated,
        reserved_bytes: reserved,
        releasable_bytes: Some(releasable),
        stuck_bytes: Some(free.saturating_sub(releasable)),
        ..StepUse::default()
    }
}

/// Memory in one step. What a snapshot does not show, or a replay that reserves something else than the recording, is
/// unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepUse {
    /// Its number, from 0.
    pub step: usize,
    /// The lowest that `allocated` went: what the step holds for longer than itself.
    pub kept_bytes: u64,
    /// `allocated` when the step ended.
    pub allocated_bytes: u64,
    /// The highest that `allocated` went.
    pub peak_allocated_bytes: u64,
    /// What the step needed above what it kept.
    pub transient_bytes: Option<u64>,
    /// `reserved` when the step ended.
    pub reserved_bytes: u64,
    /// Cached memory that no `empty_cache` gives back, because live blocks share its segments; when the step ended.
    pub stuck_bytes: Option<u64>,
    /// Cached memory that `empty_cache` would give back; when the step ended.
    pub releasable_bytes: Option<u64>,
    /// Blocks asked for.
    pub born_blocks: Option<u64>,
    /// Blocks asked for and given back within the step.
    pub passing_blocks: Option<u64>,
    /// Their bytes, as asked for.
    pub passing_bytes: Option<u64>,
    /// Bytes of the blocks that were asked for in this step and are alive when the last step ends.
    pub surviving_bytes: Option<u64>,
    /// Given back after they had outlived at least one whole step, together with blocks of another age: a garbage
    /// collection, or a list that is cleared.
    pub collected_bytes: Option<u64>,
}

impl StepUse {
    /// The surviving bytes where blocks are known; the rules that use them are not for snapshots.
    pub(super) fn survived(&self) -> u64 {
        self.surviving_bytes.unwrap_or(0)
    }
}

/// How much of a cache `empty_cache` would give back, and how much not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSplit {
    /// Whole free segments, and whole free pages of mapped ones.
    pub releasable: u64,
    /// Free blocks beside live ones.
    pub stuck: u64,
}

/// The unit in which mapped memory is given back.
const PAGE: u64 = 2 * MIB;

impl CacheSplit {
    /// Of a strategy's memory at one moment.
    #[must_use]
    pub fn of(layout: &Layout) -> CacheSplit {
        let mut cached = CacheSplit::default();
        for segment in layout.segments.iter().filter(|segment| !segment.alias) {
            let free = || segment.blocks.iter().filter(|block| block.state == BlockState::Free);
            let all: u64 = free().map(|block| block.size).sum();
            let releasable = if segment.mapped {
                free().map(|block| whole_pages(block.address.0, block.size)).sum()
            } else if all == segment.bytes {
                all
            } else {
                0
            };
            cached.releasable += releasable;
            cached.stuck += all - releasable;
        }
        cached
    }
}

fn whole_pages(address: u64, size: u64) -> u64 {
    let (first, end) = (address.div_ceil(PAGE), address.saturating_add(size) / PAGE);
    end.saturating_sub(first) * PAGE
}

/// More steps than this, and only some of them look at the layout, which is slow; the others say what the one before said.
const MOST_LAYOUTS: usize = 1024;

/// Watches a replay step by step.
#[derive(Debug)]
pub struct StepRecorder<'a> {
    steps: &'a Steps,
    /// The number of steps per layout.
    layout_every: usize,
    done: Vec<StepUse>,
    /// The step that runs, once one has begun.
    current: Option<StepUse>,
    /// Whether the last step has ended.
    ended: bool,
    /// Live bytes by the step that asked for them.
    surviving: Vec<u64>,
    /// Reserved bytes after the last request of each step; 0 for a step without one.
    reserved: Vec<u64>,
    /// Birth steps of what outlived a step and was given back in this one: the earliest, the latest and the bytes.
    aged: Option<(usize, usize, u64)>,
}

impl<'a> StepRecorder<'a> {
    /// Nothing seen yet.
    #[must_use]
    pub fn new(steps: &'a Steps) -> StepRecorder<'a> {
        let layout_every = steps.starts.len().div_ceil(MOST_LAYOUTS);
        StepRecorder {
            steps,
            layout_every,
            done: Vec::new(),
            current: None,
            ended: false,
            surviving: Vec::new(),
            reserved: Vec::new(),
            aged: None,
        }
    }

    /// Every step. `strategy` is the one that was watched, in its last state.
    #[must_use]
    pub fn finish(mut self, strategy: &dyn Strategy) -> Vec<StepUse> {
        self.end_step(strategy);
        for (step, bytes) in self.done.iter_mut().zip(self.surviving) {
            step.surviving_bytes = Some(bytes);
        }
        self.done
    }

    fn begin_step(&mut self, strategy: &dyn Strategy) {
        let step = self.current.map_or(0, |current| current.step + 1);
        self.end_step(strategy);
        let allocated = strategy.stats().current.allocated;
        let (kept_bytes, peak_allocated_bytes) = (allocated, allocated);
        let (born_blocks, passing_blocks, passing_bytes, surviving_bytes) = (Some(0), Some(0), Some(0), Some(0));
        self.current = Some(StepUse {
            step,
            kept_bytes,
            peak_allocated_bytes,
            born_blocks,
            passing_blocks,
            passing_bytes,
            surviving_bytes,
            ..StepUse::default()
        });
    }

    fn end_step(&mut self, strategy: &dyn Strategy) {
        let Some(mut step) = self.current.filter(|_| !self.ended) else { return };
        let usage = strategy.stats().current;
        let cached = if step.step % self.layout_every == 0 {
            strategy.layout().as_ref().map(CacheSplit::of)
        } else {
            let last = self.done.last().and_then(|last| last.releasable_bytes.zip(last.stuck_bytes));
            last.map(|(releasable, stuck)| CacheSplit { releasable, stuck })
        };
        step.allocated_bytes = usage.allocated;
        step.transient_bytes = Some(step.peak_allocated_bytes - step.kept_bytes);
        step.reserved_bytes = usage.reserved;
        step.releasable_bytes = cached.map(|cached| cached.releasable);
        step.stuck_bytes = cached.map(|cached| cached.stuck);
        step.collected_bytes = match self.aged.take() {
            Some((earliest, latest, bytes)) if earliest != latest => Some(bytes),
            _ => Some(0),
        };
        self.done.push(step);
    }
}

impl EventSink for StepRecorder<'_> {}

impl Observer for StepRecorder<'_> {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        if now.index >= self.steps.end && !self.ended {
            // The exit has begun to free blocks of all ages.
            self.aged = None;
            self.end_step(now.strategy);
            self.ended = true;
        }
        let next = self.current.map_or(0, |current| current.step + 1);
        if self.steps.starts.get(next).is_some_and(|&start| start <= now.index) {
            self.begin_step(now.strategy);
        }
    }

    fn served(&mut self, now: &ReplayMoment<'_>, live: &LiveBlock, _: Outcome) {
        let Some(step) = self.current.as_mut().filter(|_| !self.ended) else { return };
        *step.born_blocks.get_or_insert(0) += 1;
        self.surviving.resize(step.step + 1, 0);
        self.surviving[step.step] += live.block.size;
        self.reserved.resize(step.step + 1, 0);
        self.reserved[step.step] = now.strategy.stats().current.reserved;
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, _: Freed) {
        let Some(step) = self.current.as_mut().filter(|_| !self.ended) else { return };
        if let Some(surviving) = self.steps.step_of(live.born).and_then(|born| self.surviving.get_mut(born)) {
            *surviving -= live.block.size;
        }
        // What was there before the first step belongs to it.
        let born = self.steps.step_of(live.born).unwrap_or(0);
        if born == step.step {
            *step.passing_blocks.get_or_insert(0) += 1;
            *step.passing_bytes.get_or_insert(0) += live.request.bytes;
        } else if born + 1 < step.step {
            let (earliest, latest, bytes) = self.aged.unwrap_or((born, born, 0));
            self.aged = Some((earliest.min(born), latest.max(born), bytes + live.block.size));
        }
    }

    fn after(&mut self, now: &ReplayMoment<'_>) {
        if let Some(step) = self.current.as_mut().filter(|_| !self.ended) {
            let allocated = now.strategy.stats().current.allocated;
            step.kept_bytes = step.kept_bytes.min(allocated);
            step.peak_allocated_bytes = step.peak_allocated_bytes.max(allocated);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        answer::leaks::steps::StepsFrom,
        base::{Address, StreamId, TagId},
        device::{
            Device,
            sim::{SimConfig, SimDevice},
        },
        replay::{ReplayOptions, replay},
        strategy::{BlockView, SegmentView, Setup, StrategySpec},
        trace::{MarkKind, TraceBuilder},
    };

    fn ledger(builder: TraceBuilder) -> Vec<StepUse> {
        let builder = builder.finish("builder");
        let steps = Steps::find(&builder, None).unwrap();
        assert_eq!(steps.from, StepsFrom::Marks);
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let setup = Setup { props: device.props(), limit: None };
        let mut strategy = StrategySpec::from("caching").build(&setup).unwrap();
        let mut ledger = StepRecorder::new(&steps);
        replay(&builder, &mut *strategy, &mut device, &ReplayOptions::default(), &mut ledger).unwrap();
        ledger.finish(&*strategy)
    }

    #[test]
    fn step_counts_kept_freed_and_collected() {
        let mut builder = TraceBuilder::new();
        let mut garbage = Vec::new();
        for step in 0..6 {
            builder.mark(MarkKind::Step, "", step);
            let passing = builder.alloc(20 * MIB, StreamId::DEFAULT, TagId(0));
            garbage.push(builder.alloc(32 * MIB, StreamId::DEFAULT, TagId(0)));
            builder.free(passing);
            if step == 4 {
                garbage.drain(..).for_each(|block| builder.free(block));
            }
        }
        let steps = ledger(builder);
        assert_eq!(steps.iter().map(|step| step.kept_bytes / MIB).collect::<Vec<_>>(), [0, 32, 64, 96, 0, 0]);
        assert_eq!(steps.iter().map(|step| step.allocated_bytes / MIB).collect::<Vec<_>>(), [32, 64, 96, 128, 0, 32]);
        assert_eq!(steps[1].transient_bytes, Some(52 * MIB));
        assert_eq!(
            (steps[1].born_blocks, steps[1].passing_blocks, steps[1].passing_bytes),
            (Some(2), Some(1), Some(20 * MIB))
        );
        let collected: Vec<u64> = steps.iter().map(|step| step.collected_bytes.unwrap() / MIB).collect();
        assert_eq!(collected, [0, 0, 0, 0, 96, 0], "the blocks of steps 0, 1 and 2 go together");
    }

    #[test]
    fn blocks_of_one_age_that_go_together_are_no_collection() {
        let mut builder = TraceBuilder::new();
        let mut queue = std::collections::VecDeque::new();
        for step in 0..8 {
            builder.mark(MarkKind::Step, "", step);
            queue.push_back(builder.alloc(32 * MIB, StreamId::DEFAULT, TagId(0)));
            if queue.len() > 3 {
                builder.free(queue.pop_front().unwrap());
            }
        }
        assert!(ledger(builder).iter().all(|step| step.collected_bytes == Some(0)), "a window of three batches");
    }

    #[test]
    fn only_free_segments_and_pages_are_releasable() {
        let block = |at: u64, size, state| BlockView { address: Address(at), size, requested: size, state };
        let segment = |mapped, blocks: Vec<BlockView>| SegmentView {
            address: blocks[0].address,
            bytes: blocks.iter().map(|block| block.size).sum(),
            stream: StreamId::DEFAULT,
            pool: "large".into(),
            pool_id: (0, 0),
            mapped,
            alias: false,
            blocks,
        };
        let layout = Layout {
            segments: vec![
                segment(false, vec![block(0, 20 * MIB, BlockState::Free)]),
                segment(false, vec![block(0, MIB, BlockState::Allocated), block(MIB, 9 * MIB, BlockState::Free)]),
                segment(true, vec![block(0, MIB, BlockState::Allocated), block(MIB, 5 * MIB, BlockState::Free)]),
            ],
        };
        assert_eq!(CacheSplit::of(&layout), CacheSplit { releasable: 24 * MIB, stuck: 10 * MIB });
    }
}

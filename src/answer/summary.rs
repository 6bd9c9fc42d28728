//! The state of memory at one moment of a trace, as `torch.cuda.memory_summary()` shows it.
//!
//! [`summarize`] runs a replay and keeps the counters of the requested moment.

use std::{ops::ControlFlow, str::FromStr};

use serde::Serialize;

use crate::{
    answer::scan,
    replay::{LiveBlock, Observer, Replay, ReplayError, ReplayMoment},
    strategy::{BlockState, EventSink, Layout, Outcome, Silent, Stats, Strategy, StrategyEvent, Usage},
    trace::{MarkKind, Op, Source, TraceError},
};

/// A moment of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SummaryMoment {
    /// When all is done.
    #[default]
    End,
    /// When `allocated` is highest for the first time.
    Peak,
    /// When this step begins.
    Step(u32),
    /// When the phase of this name begins for the n-th time, from 0.
    Phase(String, usize),
    /// Before this event, from 0.
    Event(u64),
}

/// Why there is no summary.
#[derive(Debug, thiserror::Error)]
pub enum SummaryError {
    /// The source cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The moment never comes.
    #[error("it has no {0}; `oomph inspect` without --at shows how many steps, phases and events there are")]
    NoSuchMoment(String),
    /// The text names no moment.
    #[error("'{0}' is not a moment; write end, peak, step:3, phase:NAME, phase:NAME:2 or event:1000")]
    BadMoment(String),
}

impl FromStr for SummaryMoment {
    type Err = SummaryError;

    /// ```
    /// use oomph::answer::summary::SummaryMoment;
    /// assert_eq!("step:3".parse::<SummaryMoment>().unwrap(), SummaryMoment::Step(3));
    /// assert_eq!("phase:forward:2".parse::<SummaryMoment>().unwrap(), SummaryMoment::Phase("forward".to_owned(), 2));
    /// assert!("noon".parse::<SummaryMoment>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<SummaryMoment, SummaryError> {
        let refused = || SummaryError::BadMoment(text.to_owned());
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        match (kind, rest) {
            ("end", "") => Ok(SummaryMoment::End),
            ("peak", "") => Ok(SummaryMoment::Peak),
            ("step", number) => number.parse().map(SummaryMoment::Step).map_err(|_| refused()),
            ("event", number) => number.parse().map(SummaryMoment::Event).map_err(|_| refused()),
            ("phase", "") => Err(refused()),
            // A name may have a colon of its own: only a number behind the last one counts.
            ("phase", name) => Ok(match name.rsplit_once(':').map(|(name, nth)| (name, nth.parse())) {
                Some((name, Ok(nth))) => SummaryMoment::Phase(name.to_owned(), nth),
                _ => SummaryMoment::Phase(name.to_owned(), 0),
            }),
            _ => Err(refused()),
        }
    }
}

impl SummaryMoment {
    /// Before which event the moment is; `None` stands for the end, and for the peak, which only a replay finds.
    pub fn event(&self, source: &dyn Source) -> Result<Option<u64>, SummaryError> {
        let missing = match self {
            SummaryMoment::End | SummaryMoment::Peak => return Ok(None),
            SummaryMoment::Event(event) => return Ok(Some(*event)),
            SummaryMoment::Step(step) => format!("step {step}"),
            SummaryMoment::Phase(name, nth) => format!("phase '{name}' number {nth}"),
        };
        let mut seen = 0;
        let (found, _) = scan(source, |index, op, tables| {
            let begins = match (self, *op) {
                (SummaryMoment::Step(step), Op::Mark { kind: MarkKind::Step, index, .. }) => index == *step,
                (SummaryMoment::Phase(name, nth), Op::Mark { kind: MarkKind::Phase, label, .. }) => {
                    let is_it = tables.labels().get(label as usize).is_some_and(|label| label.raw() == name);
                    seen += usize::from(is_it);
                    is_it && seen == nth + 1
                }
                _ => false,
            };
            if begins { ControlFlow::Break(index) } else { ControlFlow::Continue(()) }
        })?;
        found.map(Some).ok_or(SummaryError::NoSuchMoment(missing))
    }
}

/// Runs a replay and returns the state of memory at the moment `at`. If memory runs out before that moment, the state at
/// the end.
pub fn summarize(replay: &Replay<'_>, at: &SummaryMoment) -> Result<MemorySummary, SummaryError> {
    let mut opened = replay.open()?;
    let (until, at_peak) = (at.event(replay.source)?, *at == SummaryMoment::Peak);
    let mut books = SummaryRecorder { until, at_peak, ..SummaryRecorder::default() };
    let replayed = opened.replay(replay.source, &replay.options, &mut books)?;
    let summary = books.finish(&*opened.strategy, replayed.events);
    opened.close(replayed.events, &mut Silent)?;
    match at {
        SummaryMoment::Event(event) if *event > replayed.events && replayed.ooms == 0 => {
            Err(SummaryError::NoSuchMoment(format!("event {event}")))
        }
        _ => Ok(summary),
    }
}

/// One line of the summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UsageTotals {
    /// At the moment.
    pub current: u64,
    /// At most until then.
    pub peak: u64,
    /// All that ever came.
    pub total_allocated: u64,
    /// All that ever went.
    pub total_freed: u64,
}

/// How memory stood at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemorySummary {
    /// The number of events before the moment.
    pub event: u64,
    /// `memory_allocated`: blocks that callers hold.
    pub allocated_bytes: UsageTotals,
    /// Allocated, or freed and waiting for a stream.
    pub active_bytes: UsageTotals,
    /// What callers asked for in those.
    pub requested_bytes: UsageTotals,
    /// `memory_reserved`: taken from the device.
    pub reserved_bytes: UsageTotals,
    /// Free pieces of segments that were split; `None` where the strategy does not show its memory.
    pub inactive_split_bytes: Option<u64>,
    /// How many such pieces.
    pub inactive_split_blocks: Option<u64>,
    /// Blocks that callers hold.
    pub allocations: UsageTotals,
    /// Segments.
    pub segments: UsageTotals,
    /// `num_alloc_retries`.
    pub retries: u64,
    /// `num_ooms`.
    pub ooms: u64,
}

/// Keeps the books of a replay.
#[derive(Debug, Default)]
struct SummaryRecorder {
    /// Before which event to stop; to the end without one.
    until: Option<u64>,
    /// Rather at the first moment at which `allocated` is highest.
    at_peak: bool,
    last: Usage,
    came: Usage,
    went: Usage,
    live_peak: u64,
    /// Segments that came and went, with their bytes, as the strategy tells.
    segments: (u64, u64),
    reported: (u64, u64),
    kept: Option<MemorySummary>,
    peak: u64,
    /// The peak is new, and the memory of that moment not yet looked at.
    unread: Option<(u64, Stats)>,
}

impl SummaryRecorder {
    fn finish(mut self, strategy: &dyn Strategy, events: u64) -> MemorySummary {
        self.read_peak(strategy);
        match self.kept {
            Some(kept) => kept,
            None => self.summary(events, &strategy.stats(), strategy.layout().as_ref()),
        }
    }

    /// Looks at memory as it was at the peak: called just before anything changes, so that a ramp-up looks once.
    fn read_peak(&mut self, strategy: &dyn Strategy) {
        if let Some((event, stats)) = self.unread.take() {
            self.kept = Some(self.summary(event + 1, &stats, strategy.layout().as_ref()));
        }
    }

    fn summary(&self, event: u64, stats: &Stats, layout: Option<&Layout>) -> MemorySummary {
        let account = |of: fn(&Usage) -> u64| UsageTotals {
            current: of(&stats.current),
            peak: of(&stats.peak),
            total_allocated: of(&self.came),
            total_freed: of(&self.went),
        };
        let split = layout.map(inactive_split);
        let mut reserved = account(|usage| usage.reserved);
        // Within one event memory may come and go, which levels do not show; strategies with segments tell.
        if self.reported.0 > 0 {
            (reserved.total_allocated, reserved.total_freed) = self.reported;
        }
        MemorySummary {
            event,
            allocated_bytes: account(|usage| usage.allocated),
            active_bytes: account(|usage| usage.active),
            requested_bytes: account(|usage| usage.requested),
            reserved_bytes: reserved,
            inactive_split_bytes: split.map(|(bytes, _)| bytes),
            inactive_split_blocks: split.map(|(_, blocks)| blocks),
            allocations: UsageTotals {
                current: stats.live_blocks,
                peak: self.live_peak,
                total_allocated: stats.allocs,
                total_freed: stats.frees,
            },
            segments: UsageTotals {
                current: stats.segments,
                peak: stats.peak_segments,
                total_allocated: self.segments.0,
                total_freed: self.segments.1,
            },
            retries: stats.retries,
            ooms: stats.ooms,
        }
    }

    fn is_over(&self) -> bool {
        !self.at_peak && self.kept.is_some()
    }
}

/// Bytes and number of free blocks in segments that have other blocks too.
fn inactive_split(layout: &Layout) -> (u64, u64) {
    let split = layout.segments.iter().filter(|segment| !segment.alias && segment.blocks.len() > 1);
    let free = split.flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Free);
    free.fold((0, 0), |(bytes, blocks), block| (bytes + block.size, blocks + 1))
}

impl EventSink for SummaryRecorder {
    fn event(&mut self, event: StrategyEvent) {
        if self.is_over() {
            return;
        }
        match event {
            StrategyEvent::SegmentAlloc { bytes, .. } => {
                self.reported.0 += bytes;
                self.segments.0 += 1;
            }
            StrategyEvent::SegmentFree { bytes, .. } => {
                self.reported.1 += bytes;
                self.segments.1 += 1;
            }
            StrategyEvent::SegmentMap { bytes, .. } => self.reported.0 += bytes,
            StrategyEvent::SegmentUnmap { bytes, .. } => self.reported.1 += bytes,
            StrategyEvent::FreeCompleted { .. } | StrategyEvent::Retry { .. } | StrategyEvent::OutOfMemory { .. } => {}
        }
    }
}

impl Observer for SummaryRecorder {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        self.read_peak(now.strategy);
        if self.until == Some(now.index) {
            self.kept = Some(self.summary(now.index, &now.strategy.stats(), now.strategy.layout().as_ref()));
        }
    }

    fn served(&mut self, now: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        self.live_peak = self.live_peak.max(now.strategy.stats().live_blocks);
    }

    fn after(&mut self, now: &ReplayMoment<'_>) {
        let stats = now.strategy.stats();
        let (last, usage) = (self.last, stats.current);
        for (before, after, came, went) in [
            (last.requested, usage.requested, &mut self.came.requested, &mut self.went.requested),
            (last.allocated, usage.allocated, &mut self.came.allocated, &mut self.went.allocated),
            (last.active, usage.active, &mut self.came.active, &mut self.went.active),
            (last.reserved, usage.reserved, &mut self.came.reserved, &mut self.went.reserved),
        ] {
            *came += after.saturating_sub(before);
            *went += before.saturating_sub(after);
        }
        self.last = usage;
        if self.at_peak && usage.allocated > self.peak {
            self.peak = usage.allocated;
            self.unread = Some((now.index, stats));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{MIB, StreamId, TagId},
        trace::{MarkKind, Trace, TraceBuilder},
    };

    fn builder() -> Trace {
        let mut builder = TraceBuilder::new();
        let kept = builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0)); // 0
        builder.mark(MarkKind::Step, "", 0); // 1
        let passing = builder.alloc(5 * MIB, StreamId::DEFAULT, TagId(0)); // 2
        builder.mark(MarkKind::Phase, "backward", 0); // 3
        builder.free(passing); // 4
        builder.mark(MarkKind::Phase, "backward", 1); // 5
        builder.free(kept); // 6
        builder.empty_cache(); // 7
        builder.finish("builder")
    }

    fn at(moment: &str, strategy: &str) -> MemorySummary {
        let at: SummaryMoment = moment.parse().unwrap();
        summarize(&Replay::new(&builder()).strategy(strategy), &at).unwrap()
    }

    #[test]
    fn every_moment_has_its_own_books() {
        let peak = at("peak", "caching");
        assert_eq!((peak.event, peak.allocated_bytes.current, peak.allocated_bytes.peak), (3, 35 * MIB, 35 * MIB));
        assert_eq!(peak.reserved_bytes.current, 50 * MIB, "a segment of 30 and one of 20 MiB");
        assert_eq!((peak.inactive_split_bytes, peak.inactive_split_blocks), (Some(15 * MIB), Some(1)));
        let phase = at("phase:backward:1", "caching");
        assert_eq!((phase.event, phase.allocated_bytes.current, phase.allocations.total_freed), (5, 30 * MIB, 1));
        assert_eq!(phase.inactive_split_bytes, Some(0), "a segment that is free as a whole is not split");
        let end = at("end", "caching");
        assert_eq!((end.event, end.reserved_bytes.current, end.reserved_bytes.peak), (8, 0, 50 * MIB));
        assert_eq!((end.reserved_bytes.total_allocated, end.reserved_bytes.total_freed), (50 * MIB, 50 * MIB));
        assert_eq!((end.allocated_bytes.total_allocated, end.allocated_bytes.total_freed), (35 * MIB, 35 * MIB));
        assert_eq!((end.segments.total_allocated, end.segments.total_freed, end.allocations.peak), (2, 2, 2));
        assert_eq!(at("step:0", "caching").event, 1);
        assert_eq!(at("event:2", "direct").allocated_bytes.current, 30 * MIB);
    }

    #[test]
    fn a_moment_that_never_comes_is_said_to_be_missing() {
        for (moment, words) in
            [("step:7", "no step 7"), ("phase:forward", "no phase 'forward' number 0"), ("event:99", "no event 99")]
        {
            let at: SummaryMoment = moment.parse().unwrap();
            let error = summarize(&Replay::new(&builder()), &at).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

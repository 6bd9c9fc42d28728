//! Where the steps of a trace begin and where the last one ends.
//!
//! Steps begin at step marks, at a phase that repeats, where requested sizes or call sites repeat, or at the low points of
//! memory. What comes after the last step (the exit of the program, a last evaluation) belongs to no step.

use std::{collections::BTreeMap, ops::ControlFlow};

use serde::Serialize;

use super::{
    LeakError,
    boundaries::{FEWEST_REQUESTS_OF_STEP, LowPoints, Repetition},
};
use crate::{
    answer::scan,
    base::{FileText, MIB},
    trace::{BEFORE_RECORDING, LabelId, MarkKind, Op, Source, TraceError},
};

/// Fewer steps than this, the first of which is start-up, say nothing.
pub const FEWEST_STEPS: usize = 4;
/// Into how many parts of equal length a trace without any steps is cut.
const WINDOWS: u64 = 32;
/// Without steps, memory is judged only if what was requested is so many times what memory spans: a part of one step
/// requests a few times as much.
const LEAST_TURNOVER: f64 = 16.0;

/// How steps were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "steps_from", content = "steps_at")]
pub enum StepsFrom {
    /// By the trace's own step marks.
    Marks,
    /// By the beginnings of the annotated phase of this name.
    Phase(String),
    /// By the period of the requested sizes or of the call sites, in requests.
    Period(usize),
    /// At the low points of memory between two rises.
    LowPoints,
    /// Not at all: parts of equal length stand in for them.
    Windows,
    /// Every snapshot is one.
    Snapshots,
}

/// Where steps begin and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps {
    /// How they were found.
    pub from: StepsFrom,
    /// The number of the event that each begins with, ascending. What comes before the first belongs to no step.
    pub starts: Vec<u64>,
    /// The number of the event with which the last one has ended.
    pub end: u64,
    /// What comes after it, if memory falls below what the last step began with.
    pub left_out: Option<LeftOut>,
    /// Whether a loss is computed in every step that was found by its period: it is no layer.
    pub(super) has_loss: bool,
    /// The first event after the repetition that steps were found by.
    repeats_until: Option<u64>,
    /// For each step, the number of requests in the trace up to its end.
    pub(super) request_ends: Vec<u64>,
}

/// The events after the last step, in which memory falls: the program exits, or does something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// How many there are.
    pub events: u64,
    /// How many of them are requests.
    pub requests: u64,
    /// How far memory falls in them, as requested.
    pub freed_bytes: u64,
    /// Whether they are the exit of the program: nothing is requested any more, and almost everything is freed.
    pub is_exit: bool,
}

/// What a trace says about its steps.
#[derive(Default)]
struct StepSigns {
    events: u64,
    /// The first event of the history. Blocks that existed before it come first in the trace.
    history: u64,
    /// The event of each step mark and how many requests came before it.
    marks: Vec<(u64, u64)>,
    /// By label: the event and how many requests came before it.
    phases: BTreeMap<LabelId, Vec<(u64, u64)>>,
    requests: u64,
    /// Requests and frees in the history.
    recorded: u64,
}

impl Steps {
    /// Finds the steps of a source. A phase that is named is taken at its word.
    pub fn find(source: &dyn Source, phase: Option<&str>) -> Result<Steps, LeakError> {
        let (signs, labels) = signs(source)?;
        if signs.recorded == 0 {
            return Err(LeakError::NoHistory);
        }
        let name = |label: LabelId| labels.get(label as usize).map_or("", FileText::raw);
        if let Some(asked) = phase {
            let places = signs.phases.iter().find(|(label, _)| name(**label) == asked).map(|(_, places)| places);
            let Some(places) = places.filter(|places| places.len() >= FEWEST_STEPS) else {
                let mut known: Vec<String> = signs.phases.keys().map(|&label| name(label).to_owned()).collect();
                known.retain(|name| !name.is_empty() && name != BEFORE_RECORDING);
                return Err(LeakError::NoSuchPhase { asked: asked.to_owned(), known });
            };
            return Ok(Steps::at_phase(asked, places).ended(source, &signs)?);
        }
        if signs.marks.len() >= FEWEST_STEPS {
            let starts = one_mark_per_step(&signs.marks, signs.requests);
            return Ok(Steps::at(StepsFrom::Marks, starts).ended(source, &signs)?);
        }
        // The most regular of the annotated phases; of equally regular ones the most frequent.
        let regular = signs
            .phases
            .iter()
            .filter(|(label, places)| !name(**label).is_empty() && places.len() >= FEWEST_STEPS)
            .min_by(|(_, one), (_, other)| {
                irregularity(one).total_cmp(&irregularity(other)).then(other.len().cmp(&one.len()))
            });
        if let Some((&label, places)) = regular {
            return Ok(Steps::at_phase(name(label), places).ended(source, &signs)?);
        }
        // Where steps are marked, parts of one step would be taken for steps.
        if let found @ 1.. = signs.marks.len() as u64 {
            return Err(LeakError::TooShort { what: "steps", found, needed: FEWEST_STEPS as u64 });
        }
        let history = RequestHistory::read(source, signs.history)?;
        let periodic = history.by_period();
        let is_long = matches!(&periodic, Some((FEWEST_REQUESTS_OF_STEP.., _)));
        let low_points = if is_long { None } else { history.low_points.starts() };
        let unmarked = match (periodic, low_points) {
            // A short pattern may be a layer. Low points that are further apart are better steps.
            (Some((_, starts)), Some(low_points)) if low_points.len() < starts.len() => {
                Some(Steps::at(StepsFrom::LowPoints, low_points))
            }
            (Some((requests, starts)), _) => Some(Steps {
                has_loss: history.computes_loss(requests, &starts),
                repeats_until: history.repeats_until(requests, &starts),
                ..Steps::at(StepsFrom::Period(requests), starts)
            }),
            (None, low_points) => low_points.map(|starts| Steps::at(StepsFrom::LowPoints, starts)),
        };
        if let Some(steps) = unmarked {
            return Ok(steps.ended(source, &signs)?);
        }
        let last = history.places.last().map_or(signs.events, |&place| place + 1);
        if signs.recorded < WINDOWS {
            return Err(LeakError::TooShort { what: "requests and frees", found: signs.recorded, needed: WINDOWS });
        }
        if history.turnover() < LEAST_TURNOVER {
            return Err(LeakError::NoSteps);
        }
        let events = last - signs.history.min(last);
        let starts = (0..WINDOWS).map(|window| signs.history + events * window / WINDOWS).collect();
        Ok(Steps::at(StepsFrom::Windows, starts).ended(source, &signs)?)
    }

    fn at(from: StepsFrom, starts: Vec<u64>) -> Steps {
        let (left_out, repeats_until, request_ends) = (None, None, Vec::new());
        Steps { from, starts, end: u64::MAX, left_out, has_loss: false, repeats_until, request_ends }
    }

    fn at_phase(name: &str, places: &[(u64, u64)]) -> Steps {
        Steps::at(StepsFrom::Phase(name.to_owned()), places.iter().map(|(event, _)| *event).collect())
    }

    /// The number of first steps that are start-up. Steps that are not marked begin within start-up, so that the second
    /// one has a part of it.
    #[must_use]
    pub fn start_up(&self) -> usize {
        match self.from {
            StepsFrom::Marks | StepsFrom::Phase(_) => 1,
            StepsFrom::Snapshots => 0,
            StepsFrom::Period(_) | StepsFrom::LowPoints | StepsFrom::Windows => {
                if self.starts.len() > FEWEST_STEPS + 1 { 2 } else { 1 }
            }
        }
    }

    /// Which step an event belongs to; `None` before the first and after the last.
    #[must_use]
    pub fn step_of(&self, event: u64) -> Option<usize> {
        if event >= self.end {
            return None;
        }
        self.starts.partition_point(|&start| start <= event).checked_sub(1)
    }

    /// Finds where the last step ends: after the last moment at which memory was as high as when it began. What follows
    /// is left out if it is the exit of the program or something else, and not the habit of the program (see
    /// [`StepLows::ends_with`]). Memory may fall before a last evaluation, too, which requests other amounts than a step.
    fn ended(mut self, source: &dyn Source, signs: &StepSigns) -> Result<Steps, TraceError> {
        self.end = signs.events;
        let Some(&last) = self.starts.last() else { return Ok(self) };
        let before = self.starts.len().checked_sub(2).map(|before| self.starts[before]);
        let mut lows = StepLows::new(self.starts.len());
        let (mut live, mut sizes, mut made) = (0_u64, LiveSizes::default(), 0_u64);
        let mut at_end = FallWatch::new(last, u64::MAX);
        let mut at_rest = self.repeats_until.map(|until| FallWatch::new(last, until));
        let mut at_last = before.map(|before| FallWatch::new(before, last));
        scan(source, |event, op, _| {
            let (step, before) = (self.step_of(event), live);
            let change = sizes.change(op);
            live = live.saturating_add_signed(change);
            made += u64::from(change > 0);
            if let Some(step) = step {
                lows.low[step] = lows.low[step].min(before).min(live);
                lows.requests[step] += u64::from(change > 0);
                lows.requested[step] += change.max(0) as u64;
            }
            for watch in [Some(&mut at_end), at_rest.as_mut(), at_last.as_mut()].into_iter().flatten() {
                watch.push(event, before, live, made);
            }
            ControlFlow::<()>::Continue(())
        })?;
        let in_steps: u64 = lows.requests.iter().sum();
        let mut until = made - in_steps;
        self.request_ends = lows
            .requests
            .iter()
            .map(|requests| {
                until += requests;
                until
            })
            .collect();
        let steps = self.starts.len();
        let at_last = at_last.filter(|_| lows.last_is_unlike());
        let falls = [(at_rest, steps), (at_last, steps - 1), (Some(at_end), steps)];
        let found = falls.into_iter().find_map(|(watch, steps)| {
            let (level, fall) = (watch.as_ref()?.level?, watch?.fall?);
            lows.ends_with(steps, level, fall.lowest).then_some((steps, level, fall))
        });
        if let Some((steps, level, fall)) = found {
            self.end = fall.event;
            self.starts.truncate(steps);
            self.request_ends.truncate(steps);
            if let Some(last) = self.request_ends.last_mut() {
                *last = fall.requests_before;
            }
            let requests = made - fall.requests_before;
            self.left_out = Some(LeftOut {
                events: signs.events - fall.event,
                requests,
                freed_bytes: level - fall.lowest,
                is_exit: requests == 0 && live <= level / PARTS_LEFT_AT_EXIT,
            });
        }
        Ok(self)
    }
}

/// Where two marks are one step, because two optimizers are used in turn: the numbers of requests alternate. The last
/// step may be incomplete.
fn one_mark_per_step(marks: &[(u64, u64)], requests: u64) -> Vec<u64> {
    let ends = marks.iter().skip(1).map(|mark| mark.1).chain([requests]);
    let counts: Vec<u64> = marks.iter().zip(ends).map(|(mark, end)| end - mark.1).collect();
    let alike = |one: u64, other: u64| one.abs_diff(other) * PARTS_OF_COUNT_ALIKE <= one.max(other);
    let alternate =
        |counts: &[u64]| counts.windows(3).all(|count| alike(count[0], count[2]) && !alike(count[0], count[1]));
    let all = || marks.iter().map(|mark| mark.0);
    let complete = counts.len() - 1;
    // The first two are start-up.
    if complete < 2 + FEWEST_STEPS || !alternate(&counts[2..complete]) {
        return all().collect();
    }
    let is_whole = alike(counts[complete], counts[complete - 2]);
    let paired = if is_whole { counts.len() } else { complete };
    let first = paired % 2;
    // What is left over at the beginning is start-up.
    let left_over = all().take(first);
    left_over.chain(all().take(paired).skip(first).step_by(2)).chain(all().skip(paired)).collect()
}

/// Two numbers of requests are alike if they differ by at most one part in so many.
const PARTS_OF_COUNT_ALIKE: u64 = 50;

/// After an exit at most one part in so many is left.
const PARTS_LEFT_AT_EXIT: u64 = 10;

/// Looks for a fall of memory for good, below the level at the event `from`, up to the event `until`.
struct FallWatch {
    from: u64,
    until: u64,
    level: Option<u64>,
    /// The first event after the last request. A fall begins there.
    frees_from: u64,
    fall: Option<FinalFall>,
}

impl FallWatch {
    fn new(from: u64, until: u64) -> FallWatch {
        FallWatch { from, until, level: None, frees_from: from, fall: None }
    }

    fn push(&mut self, event: u64, before: u64, live: u64, made: u64) {
        if event >= self.until {
            return;
        }
        if event == self.from {
            self.level = Some(before);
        }
        let Some(level) = self.level else { return };
        if live > before {
            self.frees_from = event + 1;
        }
        self.fall = match self.fall {
            _ if live >= level => None,
            None => Some(FinalFall { event: self.frees_from, requests_before: made, lowest: live }),
            Some(fall) => Some(FinalFall { lowest: fall.lowest.min(live), ..fall }),
        };
    }
}

/// Memory falls for good below what the last step began with.
#[derive(Clone, Copy)]
struct FinalFall {
    event: u64,
    requests_before: u64,
    lowest: u64,
}

/// Live bytes and requests of each step.
struct StepLows {
    /// The lowest level.
    low: Vec<u64>,
    requests: Vec<u64>,
    /// Requested bytes.
    requested: Vec<u64>,
}

/// The least rise of a step, as a share of the middle one, with which memory still rises in every step.
const LEAST_SHARE_OF_RISE: f64 = 0.05;

/// A garbage collector runs within this many steps.
const MANY_STEPS: usize = 12;

impl StepLows {
    fn new(steps: usize) -> StepLows {
        StepLows { low: vec![u64::MAX; steps], requests: vec![0; steps], requested: vec![0; steps] }
    }

    /// Whether the last step requests more than any other one but the first, which is start-up.
    fn last_is_unlike(&self) -> bool {
        let [_, others @ .., last] = self.requested.as_slice() else { return false };
        others.iter().max().is_some_and(|&most| *last > most + most / PARTS_MORE)
    }

    /// Whether a final fall of the first `steps` from the `level` with which the last step began, down to `lowest`, is not
    /// part of the steps. It must go below what the step before keeps: steps fall to that level by themselves. And it goes
    /// below what all steps keep, or gives back what every step has added, or what has been added over many steps without a
    /// fall. Otherwise a fall to an earlier level is what a garbage collector does.
    fn ends_with(&self, steps: usize, level: u64, lowest: u64) -> bool {
        let least = (level / 100).max(2 * MIB);
        // The first step is start-up.
        let levels = self.low.get(1..steps.saturating_sub(1)).unwrap_or_default().iter().copied().chain([level]);
        let levels: Vec<u64> = levels.filter(|&low| low < u64::MAX).collect();
        let below_all = levels.iter().all(|&low| lowest.saturating_add(least) < low);
        let mut rises: Vec<f64> = levels.windows(2).map(|pair| pair[1] as f64 - pair[0] as f64).collect();
        rises.sort_by(f64::total_cmp);
        let never_fell = levels.len() >= MANY_STEPS && rises.first().is_some_and(|&least| least >= 0.0);
        let rises_always = match rises.as_slice() {
            [] => false,
            rises => rises[0] > 0.0 && rises[0] >= LEAST_SHARE_OF_RISE * rises[rises.len() / 2],
        };
        let kept_before = steps.checked_sub(2).and_then(|before| self.low.get(before)).copied().unwrap_or(level);
        let is_deeper = lowest.saturating_add(least) < kept_before.min(level);
        is_deeper && (below_all || rises_always || never_fell)
    }
}

/// A last step is unlike the others if it requests more than the most that they request by one part in so many.
const PARTS_MORE: u64 = 4;

/// The sizes of live blocks, by slot of the trace.
#[derive(Default)]
struct LiveSizes(Vec<u64>);

impl LiveSizes {
    /// By how much an event changes live bytes.
    fn change(&mut self, op: &Op) -> i64 {
        match *op {
            Op::Alloc { slot, bytes, .. } => {
                let slot = slot as usize;
                if slot >= self.0.len() {
                    self.0.resize(slot + 1, 0);
                }
                self.0[slot] = bytes;
                i64::try_from(bytes).unwrap_or(i64::MAX)
            }
            Op::Free { slot, .. } => {
                let bytes = self.0.get_mut(slot as usize).map(std::mem::take).unwrap_or(0);
                -i64::try_from(bytes).unwrap_or(i64::MAX)
            }
            _ => 0,
        }
    }
}

fn signs(source: &dyn Source) -> Result<(StepSigns, Vec<FileText>), TraceError> {
    let mut signs = StepSigns::default();
    let mut before = false;
    let (_, tables) = scan(source, |index, op, tables| {
        signs.events = index + 1;
        if let Op::Mark { kind: MarkKind::Phase, label, .. } = *op {
            let name = tables.labels().get(label as usize).map_or("", FileText::raw);
            if before {
                signs.history = signs.events;
            }
            before = name == BEFORE_RECORDING;
        }
        match *op {
            // Annotations may go back further than the history: what comes before its first event is no step.
            Op::Mark { kind: MarkKind::Step, .. } => {
                signs.marks.truncate(if signs.recorded == 0 { 0 } else { usize::MAX });
                signs.marks.push((index, signs.requests));
            }
            Op::Mark { kind: MarkKind::Phase, label, .. } => {
                let places = signs.phases.entry(label).or_default();
                places.truncate(if signs.recorded == 0 { 0 } else { usize::MAX });
                places.push((index, signs.requests));
            }
            Op::Alloc { .. } => signs.requests += 1,
            _ => {}
        }
        signs.recorded += u64::from(!before && matches!(op, Op::Alloc { .. } | Op::Free { .. }));
        ControlFlow::<()>::Continue(())
    })?;
    Ok((signs, tables.labels().to_vec()))
}

/// The requests of a trace without marks.
#[derive(Default)]
struct RequestHistory {
    sizes: Vec<u64>,
    sites: Vec<u64>,
    /// The event of each.
    places: Vec<u64>,
    /// The call sites that compute a loss.
    losses: Vec<bool>,
    low_points: LowPoints,
}

impl RequestHistory {
    fn read(source: &dyn Source, from: u64) -> Result<RequestHistory, TraceError> {
        let mut history = RequestHistory::default();
        let (mut live, mut sizes) = (0_u64, LiveSizes::default());
        let (_, tables) = scan(source, |event, op, _| {
            live = live.saturating_add_signed(sizes.change(op));
            if event < from {
                return ControlFlow::<()>::Continue(());
            }
            if let Op::Alloc { bytes, site, .. } = *op {
                history.sizes.push(bytes);
                history.sites.push(site.0.into());
                history.places.push(event);
            }
            history.low_points.push(event, live, matches!(op, Op::Alloc { .. }));
            ControlFlow::Continue(())
        })?;
        history.losses = tables.sites().iter().map(|site| names_loss(site.raw())).collect();
        Ok(history)
    }

    /// Whether a loss is computed in every step of one period. The first step is what was left over.
    fn computes_loss(&self, period: usize, starts: &[u64]) -> bool {
        let is_loss = |site: &u64| self.losses.get(*site as usize).copied().unwrap_or(false);
        starts.iter().skip(1).all(|start| {
            let first = self.places.partition_point(|place| place < start);
            self.sites.iter().skip(first).take(period).any(is_loss)
        })
    }

    /// The event of the first request after the last of these steps.
    fn repeats_until(&self, period: usize, starts: &[u64]) -> Option<u64> {
        let first = self.places.partition_point(|place| Some(place) < starts.last());
        self.places.get(first + period).copied()
    }

    /// How many times what memory spans was requested, in the second half: start-up loads the model.
    fn turnover(&self) -> f64 {
        let requested: f64 = self.sizes[self.sizes.len() / 2..].iter().map(|&bytes| bytes as f64).sum();
        requested / self.low_points.late_span().max(1) as f64
    }

    /// Steps of one period each, counted back from the end of the repetition, so that the last is whole. The first is
    /// whatever is left over. Where lengths vary, sizes do not repeat, but call sites do.
    fn by_period(&self) -> Option<(usize, Vec<u64>)> {
        let has_sites = self.sites.iter().any(|&site| site != 0);
        let by_site = || has_sites.then(|| Repetition::find(&self.sites)).flatten();
        let Repetition { period, end } = Repetition::find(&self.sizes).or_else(by_site)?;
        let first = end % period;
        let mut starts: Vec<u64> = self.places[first..end].iter().copied().step_by(period).collect();
        if first > 0 {
            starts.insert(0, self.places[0]);
        }
        (starts.len() >= FEWEST_STEPS).then_some((period, starts))
    }
}

/// Whether a call site computes a loss, by the names of its file and function: with it a pass of a model ends.
fn names_loss(site: &str) -> bool {
    let site = site.rsplit('/').next().unwrap_or(site).to_lowercase();
    site.contains("loss") || site.contains("cross_entropy")
}

/// How much the number of requests from one beginning to the next varies, against its mean.
fn irregularity(places: &[(u64, u64)]) -> f64 {
    let gaps: Vec<f64> = places.windows(2).map(|pair| (pair[1].1 - pair[0].1) as f64).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    if mean == 0.0 {
        return f64::INFINITY;
    }
    let variance = gaps.iter().map(|gap| (gap - mean) * (gap - mean)).sum::<f64>() / gaps.len() as f64;
    variance.sqrt() / mean
}

#[cfg(test)]
mod steps_tests {
    use super::*;
    use crate::{
        base::{StreamId, TagId},
        trace::TraceBuilder,
    };

    fn turn(builder: &mut TraceBuilder, sizes: &[u64]) {
        for &bytes in sizes {
            let block = builder.alloc(bytes, StreamId::DEFAULT, TagId(0));
            builder.free(block);
        }
    }

    const SIZES: [u64; 5] = [512, 1024, 512, 2048, 4096];

    #[test]
    fn marks_win_over_phases_and_phases_over_periods() {
        let mut builder = TraceBuilder::new();
        for step in 0..6 {
            builder.mark(MarkKind::Phase, "forward", step);
            turn(&mut builder, &SIZES);
        }
        let unmarked = Steps::find(&builder.clone().finish("phases"), None).unwrap();
        assert_eq!(unmarked.from, StepsFrom::Phase("forward".into()));
        assert_eq!(unmarked.starts, (0..6).map(|n| n * 11).collect::<Vec<_>>());
        assert_eq!((unmarked.end, unmarked.left_out), (66, None));
        for step in 0..4 {
            builder.mark(MarkKind::Step, "", step);
        }
        assert_eq!(Steps::find(&builder.finish("marks"), None).unwrap().from, StepsFrom::Marks);
    }

    #[test]
    fn the_most_regular_phase_is_taken_unless_another_is_named() {
        let mut builder = TraceBuilder::new();
        for step in 0..8_u32 {
            builder.mark(MarkKind::Phase, "data", step);
            turn(&mut builder, &SIZES[..1 + step as usize % 5]);
            builder.mark(MarkKind::Phase, "train", step);
            turn(&mut builder, &SIZES);
            turn(&mut builder, &SIZES[step as usize % 5 + 1..]);
        }
        let builder = builder.finish("two phases");
        assert_eq!(Steps::find(&builder, None).unwrap().from, StepsFrom::Phase("data".into()));
        assert_eq!(Steps::find(&builder, Some("train")).unwrap().from, StepsFrom::Phase("train".into()));
        let error = Steps::find(&builder, Some("trian")).unwrap_err();
        assert!(error.to_string().contains("data, train"), "{error}");
    }

    #[test]
    fn steps_align_to_the_end_or_split_evenly() {
        let mut builder = TraceBuilder::new();
        turn(&mut builder, &[7, 9, 11]);
        (0..6).for_each(|_| turn(&mut builder, &SIZES));
        let steps = Steps::find(&builder.finish("periodic"), None).unwrap();
        assert_eq!(steps.from, StepsFrom::Period(5));
        assert_eq!(steps.starts, [0, 6, 16, 26, 36, 46, 56]);
        assert_eq!((steps.step_of(5), steps.step_of(6), steps.step_of(65)), (Some(0), Some(1), Some(6)));
        assert_eq!(steps.step_of(66), None, "after the end");

        let mut builder = TraceBuilder::new();
        (1..200).for_each(|bytes| turn(&mut builder, &[bytes]));
        let steps = Steps::find(&builder.finish("larger and larger"), None).unwrap();
        assert_eq!(steps.from, StepsFrom::LowPoints);

        let mut builder = TraceBuilder::new();
        for bytes in 1..200 {
            builder.alloc(bytes, StreamId::DEFAULT, TagId(0));
        }
        let found = Steps::find(&builder.clone().finish("one pass"), None);
        assert!(matches!(found, Err(LeakError::NoSteps)), "{found:?}");
        // Much more is requested than is kept.
        (1..4000).for_each(|at| turn(&mut builder, &[1 + at * at % 1999]));
        let steps = Steps::find(&builder.finish("slow growth"), None).unwrap();
        assert_eq!((steps.from, steps.starts.len()), (StepsFrom::Windows, 32));
    }

    #[test]
    fn call_sites_repeat_where_lengths_vary() {
        let mut builder = TraceBuilder::new();
        let sites: Vec<_> = (0..80).map(|line| builder.site(&format!("train.py:{line}"))).collect();
        for length in [3, 7, 5, 8, 2, 9, 4] {
            for &site in &sites {
                let block = builder.alloc_at(length * 1000 + u64::from(site.0), StreamId::DEFAULT, TagId(0), site);
                builder.free(block);
            }
        }
        let steps = Steps::find(&builder.finish("varying lengths"), None).unwrap();
        assert_eq!((steps.from, steps.starts.len()), (StepsFrom::Period(80), 7));
    }

    /// The layers of one pass, then its loss: only a loss in every turn makes turns to steps.
    #[test]
    fn a_loss_after_the_layers_of_one_pass_is_not_in_every_step() {
        let has_loss = |in_every_turn: bool| {
            let mut builder = TraceBuilder::new();
            let layer = builder.site("/home/loss/model.py:5 forward");
            let loss = builder.site("/home/loss/train.py:9 cross_entropy");
            for turn in 0..8 {
                for &bytes in &SIZES {
                    builder.alloc_at(bytes, StreamId::DEFAULT, TagId(0), layer);
                }
                if in_every_turn || turn == 7 {
                    builder.alloc_at(9000, StreamId::DEFAULT, TagId(0), loss);
                }
            }
            let steps = Steps::find(&builder.finish("one pass or eight"), None).unwrap();
            assert!(matches!(steps.from, StepsFrom::Period(_)), "{:?}", steps.from);
            steps.has_loss
        };
        assert!(has_loss(true));
        assert!(!has_loss(false));
    }

    #[test]
    fn blocks_from_before_the_recording_are_no_history() {
        let mut builder = TraceBuilder::new();
        builder.mark(MarkKind::Phase, BEFORE_RECORDING, 0);
        let block = builder.alloc(512, StreamId::DEFAULT, TagId(0));
        builder.mark(MarkKind::Phase, "", 0);
        let nothing = Steps::find(&builder.clone().finish("no history"), None);
        assert!(matches!(nothing, Err(LeakError::NoHistory)), "{nothing:?}");
        builder.free(block);
        let one = Steps::find(&builder.finish("one entry"), None);
        assert!(matches!(one, Err(LeakError::TooShort { found: 1, .. })), "{one:?}");
        let empty = Steps::find(&TraceBuilder::new().finish("empty"), None);
        assert!(matches!(empty, Err(LeakError::NoHistory)), "{empty:?}");
    }

    /// Six steps of 8 MiB more each, or of the same; then the frees of the last `freed` blocks.
    fn ends(grows: bool, freed: usize) -> Steps {
        let mut builder = TraceBuilder::new();
        let mut kept = vec![builder.alloc(64 * MIB, StreamId::DEFAULT, TagId(0))];
        for step in 0..6 {
            builder.mark(MarkKind::Step, "", step);
            turn(&mut builder, &[20 * MIB, 30 * MIB]);
            if grows {
                kept.push(builder.alloc(8 * MIB, StreamId::DEFAULT, TagId(0)));
            }
        }
        kept.drain(kept.len().saturating_sub(freed)..).for_each(|block| builder.free(block));
        Steps::find(&builder.finish("ends"), None).unwrap()
    }

    #[test]
    fn exit_is_left_out() {
        assert_eq!(ends(true, 0).left_out, None);
        assert_eq!(ends(false, 0).left_out, None);
        let all = ends(true, 7);
        let left_out = all.left_out.unwrap();
        assert_eq!((left_out.requests, left_out.freed_bytes, left_out.is_exit), (0, 104 * MIB, true));
        assert_eq!(all.end + left_out.events, ends(true, 0).end + 7);
        assert_eq!(ends(true, 6).left_out.unwrap().freed_bytes, 40 * MIB, "down to the model");
        assert_eq!(ends(false, 1).left_out.unwrap().freed_bytes, 64 * MIB);
    }

    #[test]
    fn parts_of_few_marked_steps_are_not_taken_for_steps() {
        let mut builder = TraceBuilder::new();
        builder.mark(MarkKind::Step, "", 0);
        (1..200).for_each(|bytes| turn(&mut builder, &[bytes]));
        builder.mark(MarkKind::Step, "", 1);
        (300..400).for_each(|bytes| turn(&mut builder, &[bytes]));
        let found = Steps::find(&builder.finish("died in its second step"), None);
        assert!(matches!(found, Err(LeakError::TooShort { what: "steps", found: 2, .. })), "{found:?}");
    }
}

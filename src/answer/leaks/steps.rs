//! Where the steps of a trace begin: at its step marks, at a phase that repeats, or where the requested sizes repeat.

use std::{collections::BTreeMap, ops::ControlFlow};

use serde::Serialize;

use super::LeakError;
use crate::{
    answer::scan,
    trace::{LabelId, MarkKind, Op, Source, TraceError},
};

/// Fewer steps than this, the first of which is start-up, say nothing.
pub const FEWEST_STEPS: usize = 4;
/// Into how many parts of equal length a trace without any steps is cut.
const WINDOWS: u64 = 32;

/// How steps were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "steps_from", content = "steps_at")]
pub enum StepsFrom {
    /// By the trace's own step marks.
    Marks,
    /// By the beginnings of the annotated phase of this name.
    Phase(String),
    /// By the period of the requested sizes, in requests.
    Period(usize),
    /// Not at all: parts of equal length stand in for them.
    Windows,
    /// Every snapshot is one.
    Snapshots,
}

/// Where steps begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps {
    /// How they were found.
    pub from: StepsFrom,
    /// The number of the event that each begins with, ascending. What comes before the first belongs to no step.
    pub starts: Vec<u64>,
}

/// What a trace says about its steps.
#[derive(Default)]
struct StepSigns {
    events: u64,
    marks: Vec<u64>,
    /// By label: the event and how many requests came before it.
    phases: BTreeMap<LabelId, Vec<(u64, u64)>>,
    requests: u64,
}

impl Steps {
    /// Finds the steps of a source. A phase that is named is taken at its word.
    pub fn find(source: &dyn Source, phase: Option<&str>) -> Result<Steps, LeakError> {
        let (signs, labels) = signs(source)?;
        let name = |label: LabelId| labels.get(label as usize).map_or("", String::as_str);
        if let Some(asked) = phase {
            let places = signs.phases.iter().find(|(label, _)| name(**label) == asked).map(|(_, places)| places);
            let Some(places) = places.filter(|places| places.len() >= FEWEST_STEPS) else {
                let mut known: Vec<String> = signs.phases.keys().map(|&label| name(label).to_owned()).collect();
                known.retain(|name| !name.is_empty());
                return Err(LeakError::NoSuchPhase { asked: asked.to_owned(), known });
            };
            return Ok(Steps::at_phase(asked, places));
        }
        if signs.marks.len() >= FEWEST_STEPS {
            return Ok(Steps { from: StepsFrom::Marks, starts: signs.marks });
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
            return Ok(Steps::at_phase(name(label), places));
        }
        if let Some(steps) = by_period(source)? {
            return Ok(steps);
        }
        // Parts of equal length stand in for unmarked steps. Where steps are marked, parts of one step would be taken
        // for steps.
        if let found @ 1.. = signs.marks.len() as u64 {
            return Err(LeakError::TooShort { what: "steps", found, needed: FEWEST_STEPS as u64 });
        }
        let starts = (0..WINDOWS).map(|window| signs.events * window / WINDOWS).collect::<Vec<_>>();
        match signs.events {
            0..WINDOWS => Err(LeakError::TooShort { what: "events", found: signs.events, needed: WINDOWS }),
            _ => Ok(Steps { from: StepsFrom::Windows, starts }),
        }
    }

    fn at_phase(name: &str, places: &[(u64, u64)]) -> Steps {
        Steps { from: StepsFrom::Phase(name.to_owned()), starts: places.iter().map(|(event, _)| *event).collect() }
    }

    /// Which step an event belongs to; `None` before the first.
    #[must_use]
    pub fn step_of(&self, event: u64) -> Option<usize> {
        self.starts.partition_point(|&start| start <= event).checked_sub(1)
    }
}

fn signs(source: &dyn Source) -> Result<(StepSigns, Vec<String>), TraceError> {
    let mut signs = StepSigns::default();
    let (_, tables) = scan(source, |index, op, _| {
        match *op {
            Op::Mark { kind: MarkKind::Step, .. } => signs.marks.push(index),
            Op::Mark { kind: MarkKind::Phase, label, .. } => {
                signs.phases.entry(label).or_default().push((index, signs.requests));
            }
            Op::Alloc { .. } => signs.requests += 1,
            _ => {}
        }
        signs.events = index + 1;
        ControlFlow::<()>::Continue(())
    })?;
    Ok((signs, tables.labels().to_vec()))
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

/// Steps of one period each, counted back from the end, so that the last is whole. The first is whatever is left over.
fn by_period(source: &dyn Source) -> Result<Option<Steps>, TraceError> {
    let (mut sizes, mut places) = (Vec::new(), Vec::new());
    scan(source, |index, op, _| {
        if let Op::Alloc { bytes, .. } = *op {
            sizes.push(bytes);
            places.push(index);
        }
        ControlFlow::<()>::Continue(())
    })?;
    let Some(period) = period(&sizes) else { return Ok(None) };
    let first = places.len() % period;
    let mut starts: Vec<u64> = places[first..].iter().copied().step_by(period).collect();
    if first > 0 {
        starts.insert(0, places[0]);
    }
    let enough = starts.len() >= FEWEST_STEPS;
    Ok(enough.then_some(Steps { from: StepsFrom::Period(period), starts }))
}

/// The fewest requests of a step.
const SHORTEST: usize = 4;
/// How many equal turns the end of the trace must have.
const LEAST_TURNS: usize = 3;
/// This share of requests must equal the request one period earlier.
const LEAST_MATCHING: f64 = 0.98;
/// A period is examined only if this many places, evenly spread over the trace, match.
const PROBES: usize = 64;

/// After how many requests the sizes repeat, if they do: the shortest period that holds for the second half of the trace
/// (start-up is not periodic) and for at least three turns.
///
/// ```
/// use oomph::answer::leaks::period;
/// let start_up = [7, 9, 11];
/// let turns = [1, 2, 1, 2, 3].repeat(6);
/// assert_eq!(period(&[&start_up[..], &turns].concat()), Some(5));
/// ```
#[must_use]
pub fn period(sizes: &[u64]) -> Option<usize> {
    (SHORTEST..=sizes.len() / LEAST_TURNS).find(|&lag| repeats(sizes, lag))
}

fn repeats(sizes: &[u64], lag: usize) -> bool {
    let from = (sizes.len() / 2).min(sizes.len() - (LEAST_TURNS - 1) * lag).max(lag);
    let compared = sizes.len() - from;
    let matches = |at: usize| sizes[at] == sizes[at - lag];
    let mut misses = (0..PROBES).filter(|probe| !matches(from + probe * compared / PROBES));
    // Twice as many misses as allowed among the probes: chance does not explain it.
    if misses.nth((PROBES as f64 * (1.0 - LEAST_MATCHING) * 2.0) as usize).is_some() {
        return false;
    }
    let matching = (from..sizes.len()).filter(|&at| matches(at)).count();
    matching as f64 >= LEAST_MATCHING * compared as f64
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
        assert_eq!(
            unmarked,
            Steps { from: StepsFrom::Phase("forward".into()), starts: (0..6).map(|n| n * 11).collect() }
        );
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
        assert_eq!((steps.step_of(5), steps.step_of(6), steps.step_of(1000)), (Some(0), Some(1), Some(6)));

        let mut builder = TraceBuilder::new();
        (1..200).for_each(|bytes| turn(&mut builder, &[bytes]));
        let steps = Steps::find(&builder.finish("growing"), None).unwrap();
        assert_eq!((steps.from, steps.starts.len()), (StepsFrom::Windows, 32));
        let nothing = Steps::find(&TraceBuilder::new().finish("empty"), None);
        assert!(matches!(nothing, Err(LeakError::TooShort { .. })), "{nothing:?}");
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

#[cfg(test)]
mod period_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_layers_within_a_step_are_not_its_period() {
        let layers = [3, 5, 4, 8, 3, 6].repeat(12);
        let step = [&[100, 50][..], &layers, &[200, 51, 50]].concat();
        assert_eq!(period(&step.repeat(5)), Some(step.len()));
    }

    #[test]
    fn what_never_repeats_has_no_period() {
        let sizes: Vec<u64> = (0..500).map(|at: u64| at.wrapping_mul(2_654_435_761) % 977).collect();
        assert_eq!(period(&sizes), None);
        assert_eq!(period(&[]), None);
        assert_eq!(period(&[1; 11]), None, "two turns are no habit");
    }

    proptest! {
        #[test]
        fn a_repeated_step_is_found_behind_any_start(
            start in proptest::collection::vec(1000_u64..2000, 0..40),
            mut step in proptest::collection::vec(1_u64..6, 4..80),
            turns in 5_usize..9,
        ) {
            step.push(10);
            let sizes = [start, step.repeat(turns)].concat();
            // The second half is compared with what came a period before it.
            prop_assume!(sizes.len() / 2 >= sizes.len() - (turns - 1) * step.len());
            prop_assert_eq!(period(&sizes), Some(step.len()));
        }
    }
}

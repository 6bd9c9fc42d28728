//! Where steps begin in a trace without marks: whether requests repeat, after how many, and where the repetition ends; and the
//! low points of memory, where it has fallen far and rises again.

use super::steps::FEWEST_STEPS;

/// The fewest requests of a step.
const SHORTEST: usize = 4;
/// How many equal turns the end of the trace must have.
const LEAST_TURNS: usize = 3;
/// This share of requests must equal the request one period earlier.
const LEAST_MATCHING: f64 = 0.98;
/// A period is examined only if this many places, evenly spread over the trace, match.
const PROBES: usize = 64;
/// A step makes at least this many requests; a shorter pattern may be a layer.
pub(super) const FEWEST_REQUESTS_OF_STEP: usize = 64;
/// A longer period is taken instead of one that may be of layers, if it leaves at most one mismatch where the shorter one has this
/// many. The layers of a deep model repeat almost as well as its steps.
const MISMATCHES_PER_BETTER: usize = 10;

/// After how many requests they repeat, if they do: the shortest period that holds for the second half of the trace
/// (start-up is not periodic) and for at least three turns.
///
/// ```
/// use oomph::answer::leaks::period;
/// let start_up = [7, 9, 11];
/// let turns = [1, 2, 1, 2, 3].repeat(6);
/// assert_eq!(period(&[&start_up[..], &turns].concat()), Some(5));
/// ```
#[must_use]
pub fn period(requests: &[u64]) -> Option<usize> {
    let mut best: Option<(usize, usize)> = None;
    for lag in SHORTEST..=requests.len() / LEAST_TURNS {
        let Some(mismatches) = mismatches(requests, lag) else { continue };
        match best {
            Some((_, fewest)) if mismatches * MISMATCHES_PER_BETTER > fewest => continue,
            _ => best = Some((lag, mismatches)),
        }
        if mismatches == 0 || lag >= FEWEST_REQUESTS_OF_STEP {
            break;
        }
    }
    best.map(|(lag, _)| lag)
}

/// How many requests differ from the request one period earlier; `None` if that are too many.
fn mismatches(requests: &[u64], lag: usize) -> Option<usize> {
    let from = (requests.len() / 2).min(requests.len() - (LEAST_TURNS - 1) * lag).max(lag);
    let compared = requests.len() - from;
    let differs = |at: usize| requests[at] != requests[at - lag];
    let mut probes = (0..PROBES).filter(|probe| differs(from + probe * compared / PROBES));
    // Twice as many mismatches as allowed among the probes: chance does not explain it.
    if probes.nth((PROBES as f64 * (1.0 - LEAST_MATCHING) * 2.0) as usize).is_some() {
        return None;
    }
    let found = (from..requests.len()).filter(|&at| differs(at)).count();
    (found as f64 <= (1.0 - LEAST_MATCHING) * compared as f64).then_some(found)
}

/// A part of a trace that repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repetition {
    /// After how many requests.
    pub(super) period: usize,
    /// The number of requests up to its end.
    pub(super) end: usize,
}

impl Repetition {
    /// The repetition that lasts to the end of the trace, or almost: what a program does before it exits (a last
    /// evaluation, a checkpoint) does not repeat.
    pub(super) fn find(requests: &[u64]) -> Option<Repetition> {
        let count = requests.len();
        [count, count - count / 8, count - count / 4].into_iter().find_map(|end| {
            let period = period(&requests[..end])?;
            Some(Repetition { period, end }.extended(requests))
        })
    }

    /// The same repetition, as far as it goes.
    fn extended(mut self, requests: &[u64]) -> Repetition {
        let matching = |turn: std::ops::Range<usize>| {
            turn.clone().filter(|&at| requests[at] == requests[at - self.period]).count() as f64
                >= LEAST_MATCHING * turn.len() as f64
        };
        while self.end + self.period <= requests.len() && matching(self.end..self.end + self.period) {
            self.end += self.period;
        }
        while self.end < requests.len() && requests[self.end] == requests[self.end - self.period] {
            self.end += 1;
        }
        self
    }
}

/// A fall and a rise count if they are at least a half, a quarter or an eighth of the range of memory. The largest share that
/// gives enough low points is taken. Smaller falls happen within the layers of one step.
const PARTS: [u64; 3] = [2, 4, 8];

/// The turning points of live memory.
#[derive(Default)]
pub(super) struct LowPoints {
    /// The event of each turn and the level there; rises and falls alternate.
    turns: Vec<(u64, u64)>,
    rises: bool,
    /// The number of turns up to the last request. What is freed after it is not a step.
    until: usize,
}

impl LowPoints {
    /// Adds the level after an event.
    pub(super) fn push(&mut self, event: u64, level: u64, is_request: bool) {
        let is_first = self.turns.len() == 1;
        match self.turns.last_mut() {
            Some(last) if last.1 == level => {}
            Some(last) if !is_first && self.rises == (level > last.1) => *last = (event, level),
            Some(last) => {
                self.rises = level > last.1;
                self.turns.push((event, level));
            }
            None => self.turns.push((event, level)),
        }
        if is_request {
            self.until = self.turns.len();
        }
    }

    /// From the lowest level to the highest in the second half, up to the last request.
    pub(super) fn late_span(&self) -> u64 {
        span(&self.turns[(self.until / 2).saturating_sub(1)..self.until])
    }

    /// The events with which steps begin: the first one, and the one after each low point.
    pub(super) fn starts(&self) -> Option<Vec<u64>> {
        let turns = &self.turns[..self.until];
        let span = span(turns);
        PARTS.iter().map(|part| starts(turns, (span / part).max(1))).find(|starts| starts.len() > FEWEST_STEPS)
    }
}

fn span(turns: &[(u64, u64)]) -> u64 {
    let levels = || turns.iter().map(|turn| turn.1);
    levels().max().unwrap_or(0) - levels().min().unwrap_or(0)
}

/// Cuts where memory has fallen by `least` and then rises by it.
fn starts(turns: &[(u64, u64)], least: u64) -> Vec<u64> {
    let Some(&(event, level)) = turns.first() else { return Vec::new() };
    let mut starts = vec![event];
    let (mut high, mut low, mut falls) = (level, (event, level), false);
    for &(event, level) in turns {
        if falls {
            if level < low.1 {
                low = (event, level);
            } else if level - low.1 >= least {
                starts.push(low.0 + 1);
                (high, falls) = (level, false);
            }
        } else {
            high = high.max(level);
            if high - level >= least {
                (low, falls) = ((event, level), true);
            }
        }
    }
    starts
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
    fn layers_of_a_deep_model_are_not_its_steps() {
        // 100 layers of 8 requests, and 4 requests before and after them: one period of layers matches in 98.5 %.
        let layers = [3, 5, 4, 8, 3, 6, 7, 9].repeat(100);
        let step = [&[100, 50][..], &layers, &[200, 51]].concat();
        assert_eq!(period(&step.repeat(6)), Some(step.len()));
    }

    #[test]
    fn what_never_repeats_has_no_period() {
        let sizes: Vec<u64> = (0..500).map(|at: u64| at.wrapping_mul(2_654_435_761) % 977).collect();
        assert_eq!(period(&sizes), None);
        assert_eq!(period(&[]), None);
        assert_eq!(period(&[1; 11]), None, "two turns are no habit");
    }

    #[test]
    fn repetition_ends_before_the_last_evaluation() {
        let turns = [1, 2, 1, 2, 3].repeat(20);
        let evaluation: Vec<u64> = (100..112).collect();
        let found = Repetition::find(&[&[7, 9, 11][..], &turns, &evaluation].concat());
        assert_eq!(found, Some(Repetition { period: 5, end: 103 }));
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

#[cfg(test)]
mod low_points_tests {
    use super::*;

    fn of(levels: &[u64]) -> Option<Vec<u64>> {
        let mut points = LowPoints::default();
        let mut before = 0;
        for (event, &level) in (0..).zip(levels) {
            points.push(event, level, level > before);
            before = level;
        }
        points.starts()
    }

    #[test]
    fn a_step_begins_after_each_low_point() {
        let step = [10, 40, 90, 70, 30, 10];
        assert_eq!(of(&step.repeat(6)), Some(vec![0, 6, 12, 18, 24, 30]));
    }

    #[test]
    fn small_falls_within_one_rise_are_no_low_points() {
        let rise: Vec<u64> = (0..60).flat_map(|layer| [layer * 100 + 90, layer * 100 + 60]).collect();
        assert_eq!(of(&rise), None);
    }

    #[test]
    fn the_last_fall_begins_no_step() {
        let mut levels = [10, 40, 90, 70, 30, 10].repeat(6);
        levels.extend([8, 4, 2, 0]);
        assert_eq!(of(&levels).map(|starts| starts.len()), Some(6));
    }
}

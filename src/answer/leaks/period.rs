//! Whether requests repeat, after how many, and where the repetition ends.

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

#[cfg(test)]
mod tests {
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

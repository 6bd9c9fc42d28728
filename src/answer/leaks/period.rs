//! The period of a program that marks no steps, from the sizes that it asks for.

/// At least so many requests make a step worth the name.
const SHORTEST: usize = 4;
/// So many equal turns must have been seen, at the end of the story.
const LEAST_TURNS: usize = 3;
/// This share of requests must equal the request one period earlier.
const LEAST_MATCHING: f64 = 0.98;
/// A period is looked at closely only if so many places of the story, evenly spread, match.
const PROBES: usize = 64;

/// After how many requests the sizes repeat, if they do: the shortest period that holds for the second half of the story
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

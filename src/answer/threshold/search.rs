//! Searching a line of places for the one from which on everything fits, without trusting that there is only one.
//!
//! Places count up from the hardest to the easiest. What a place stands for, and what trying one costs, is the caller's.

use std::collections::BTreeMap;

use crate::base::parallel_map;

/// Into how many parts each round of the search cuts what is left. Fixed, so that the places that are tried do not
/// depend on the machine; three, because two trials at a time is what any machine can do.
const PARTS: u64 = 3;

/// How often a failure above the place found makes the search begin again above it.
const MOST_RESTARTS: u32 = 16;

/// What is tried, on how many threads, and what is known so far.
pub(super) struct Search<'a, T, E> {
    trial: &'a (dyn Fn(u64) -> Result<T, E> + Sync),
    fits: fn(&T) -> bool,
    jobs: usize,
    /// The easiest place there is.
    last: u64,
    tried: BTreeMap<u64, T>,
    /// Told the places of each round before they are tried, and how many were tried before.
    announce: &'a dyn Fn(&[u64], usize),
}

impl<'a, T: Send, E: Send> Search<'a, T, E> {
    pub(super) fn new(
        trial: &'a (dyn Fn(u64) -> Result<T, E> + Sync),
        fits: fn(&T) -> bool,
        jobs: usize,
        last: u64,
    ) -> Self {
        Search { trial, fits, jobs, last, tried: BTreeMap::new(), announce: &|_, _| () }
    }

    /// The same, with somebody who is told what is tried next.
    pub(super) fn announced_by(self, announce: &'a dyn Fn(&[u64], usize)) -> Self {
        Search { announce, ..self }
    }

    /// Everything that was tried, hardest first.
    pub(super) fn into_tried(self) -> BTreeMap<u64, T> {
        self.tried
    }

    /// Whether the place fits.
    pub(super) fn fits(&mut self, place: u64) -> Result<bool, E> {
        self.try_all(&[place])?;
        Ok(self.tried.get(&place).is_some_and(self.fits))
    }

    /// The place from which on every place tried fits, and with it its surroundings: `around` places, half of them on
    /// either side. `fails` is known to fail and `fits` was seen to fit; nothing below `fails` is tried.
    pub(super) fn settle(&mut self, fails: u64, fits: u64, around: u32) -> Result<u64, E> {
        let (mut low, mut high) = (fails, fits);
        let mut found = self.narrow(low, high)?;
        for _ in 0..MOST_RESTARTS {
            self.try_all(&surroundings(found, fails, fits, around))?;
            let Some(above) = self.last_failure().filter(|&place| place > found) else { break };
            // Beyond the easiest place there may be none that was tried: further up it must fit again.
            (low, high) = (above, self.first_fit_above(above).unwrap_or(above));
            if high == low {
                high = self.climb(low)?;
            }
            found = self.narrow(low, high)?;
        }
        Ok(found)
    }

    /// The first place that fits, going up from one that fails in growing strides.
    pub(super) fn climb(&mut self, fails: u64) -> Result<u64, E> {
        let mut stride = 1;
        loop {
            let place = fails.saturating_add(stride).min(self.last);
            if self.fits(place)? || place == self.last {
                return Ok(place);
            }
            stride = stride.saturating_mul(2);
        }
    }

    /// Between a failure and a fit above it: the fit right above a failure.
    fn narrow(&mut self, mut fails: u64, mut fits: u64) -> Result<u64, E> {
        while fits - fails > 1 {
            let span = fits - fails;
            let cut = |part: u64| fails + (u128::from(span) * u128::from(part) / u128::from(PARTS)) as u64;
            let places: Vec<u64> = (1..PARTS).map(cut).filter(|&place| place > fails && place < fits).collect();
            let places = if places.is_empty() { vec![fails + 1] } else { places };
            self.try_all(&places)?;
            fails = places.iter().copied().filter(|&place| !self.known_fit(place)).max().unwrap_or(fails);
            fits = places.iter().copied().filter(|&place| place > fails).min().unwrap_or(fits);
        }
        Ok(fits)
    }

    fn known_fit(&self, place: u64) -> bool {
        self.tried.get(&place).is_some_and(self.fits)
    }

    fn last_failure(&self) -> Option<u64> {
        self.tried.iter().rev().find(|(_, outcome)| !(self.fits)(outcome)).map(|(&place, _)| place)
    }

    fn first_fit_above(&self, place: u64) -> Option<u64> {
        self.tried.range(place..).find(|(_, outcome)| (self.fits)(outcome)).map(|(&place, _)| place)
    }

    /// Tries what has not been tried, side by side.
    fn try_all(&mut self, places: &[u64]) -> Result<(), E> {
        let mut new: Vec<u64> =
            places.iter().copied().filter(|place| *place <= self.last && !self.tried.contains_key(place)).collect();
        new.sort_unstable();
        new.dedup();
        if !new.is_empty() {
            (self.announce)(&new, self.tried.len());
        }
        let outcomes = parallel_map(&new, self.jobs, |&place| (self.trial)(place));
        // In the order of places: which error is told must not depend on who was first.
        for (place, outcome) in new.into_iter().zip(outcomes) {
            self.tried.insert(place, outcome?);
        }
        Ok(())
    }
}

/// Half of the places below and half above: the nearest at growing distances, the others spread over the way to the
/// ends of what was searched, or a little beyond where that is near.
fn surroundings(found: u64, lowest: u64, highest: u64, count: u32) -> Vec<u64> {
    let side = u64::from(count.div_ceil(2));
    let near = side.div_ceil(2);
    let far = side - near;
    let distances = |way: u64| {
        let reach = way.max(1 << near.min(20));
        let nearest = (0..near).map(|step| 1 << step.min(40));
        let spread = (1..=far).map(move |part| {
            let least = (1 << near.min(40)) + part;
            (u128::from(reach) * u128::from(part) / u128::from(far)).max(u128::from(least)) as u64
        });
        nearest.chain(spread).collect::<Vec<u64>>()
    };
    let below = distances(found.saturating_sub(lowest)).into_iter().filter_map(|distance| found.checked_sub(distance));
    let above = distances(highest.saturating_sub(found)).into_iter().map(|distance| found.saturating_add(distance));
    below.chain(above).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, convert::Infallible};

    use proptest::prelude::*;

    use super::*;

    fn settle(is_fit: impl Fn(u64) -> bool + Sync, fails: u64, fits: u64) -> (u64, BTreeMap<u64, bool>) {
        let trial = |place| Ok::<bool, Infallible>(is_fit(place));
        let mut search = Search::new(&trial, |fits| *fits, 2, u64::MAX);
        let Ok(true) = search.fits(fits) else { panic!("{fits} must fit") };
        let Ok(found) = search.settle(fails, fits, 16);
        (found, search.into_tried())
    }

    #[test]
    fn sixteen_different_places_around_the_one_found_are_tried() {
        for (fails, edge, fits) in [(0, 5000, 9000), (99, 100, 100), (400, 401, 3000), (400, 2999, 3000)] {
            let (found, tried) = settle(|place| place >= edge, fails, fits);
            assert_eq!(found, edge);
            let others: BTreeSet<u64> = tried.keys().copied().filter(|&place| place != edge).collect();
            assert!(others.len() >= 16, "{fails} {edge} {fits}: {others:?}");
            assert!(others.contains(&(edge - 1)) && others.contains(&(edge + 1)));
        }
    }

    #[test]
    fn at_the_bottom_there_is_nothing_below_to_try() {
        let (found, tried) = settle(|place| place >= 1, 0, 10);
        assert_eq!((found, tried.keys().next()), (1, Some(&0)));
    }

    #[test]
    fn a_failure_above_moves_the_answer_above_it() {
        // Fits from 50, but not at 52, 100 and 101; the far ones are met on the way.
        let (found, tried) = settle(|place| place >= 50 && ![52, 100, 101].contains(&place), 10, 120);
        assert!(found > 52 && tried.range(found..).all(|(_, fits)| *fits), "{found}: {tried:?}");
    }

    #[test]
    fn what_is_tried_is_announced_before_and_only_once() {
        let announced = std::cell::RefCell::new(Vec::new());
        let announce = |places: &[u64], before: usize| {
            assert_eq!(announced.borrow().len(), before);
            announced.borrow_mut().extend_from_slice(places);
        };
        let trial = |place| Ok::<bool, Infallible>(place >= 700);
        let mut search = Search::new(&trial, |fits| *fits, 2, u64::MAX).announced_by(&announce);
        let Ok(found) = search.settle(0, 5000, 16);
        let tried: Vec<u64> = search.into_tried().into_keys().collect();
        let mut announced = announced.into_inner();
        announced.sort_unstable();
        assert_eq!((found, announced), (700, tried));
    }

    #[test]
    fn the_errors_of_a_trial_end_the_search() {
        let trial = |place| if place == 5 { Err("five") } else { Ok(place > 3) };
        let mut search = Search::new(&trial, |fits| *fits, 2, u64::MAX);
        assert_eq!(search.settle(0, 9, 16), Err("five"));
    }

    proptest! {
        #[test]
        fn an_edge_is_found_exactly(edge in 1u64..100_000, below in 1u64..5000, above in 0u64..5000) {
            let (found, tried) = settle(|place| place >= edge, edge.saturating_sub(below), edge + above);
            prop_assert_eq!(found, edge);
            prop_assert!(tried.len() < 60, "{}", tried.len());
        }

        #[test]
        fn whatever_fits_and_fails_the_answer_agrees_with_all_that_was_tried(
            holes in prop::collection::btree_set(1u64..400, 0..200),
        ) {
            let (found, tried) = settle(|place| place >= 400 || (place > 0 && !holes.contains(&place)), 0, 500);
            prop_assert!(tried.range(found..).all(|(_, fits)| *fits), "{}: {:?}", found, tried);
            prop_assert!(found == 1 || !tried[&(found - 1)], "{}: {:?}", found, tried);
        }
    }
}

//! Breeds programs until one makes a strategy reserve as much as possible for what is alive.
//!
//! A few programs are kept. Again and again one of them is varied, or two are crossed, or a new one is invented, and what
//! comes out takes the place of the worst if it is better than that. There is chance in it and no adapting to addresses:
//! what is found is a plain trace, which any allocator can be asked to serve. One seed finds the same every time.
//!
//! How bad a trace is, is what the strategy reserves for it at most, in terms of the budget: not of what the trace has
//! alive, or else one tiny block in a large segment would win.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    AdversaryError, Contest,
    program::{Breeder, Program},
};
use crate::{
    device::Capabilities,
    models::Dice,
    replay::{self, Observer, replay},
    strategy::{EventSink, StrategyEvent},
    stress::{Subject, SubjectError, shrink},
    trace::{Op, Trace, check},
};

/// How many programs are kept.
const KEPT: usize = 12;
/// A shrunk trace must be as bad as the one found, to this part.
const TOLERANCE: f64 = 0.01;

/// What to look for.
#[derive(Clone, Debug)]
pub struct Quest {
    /// Who is to look bad.
    pub subject: Subject,
    /// Who is to look good at the same time, if anybody.
    pub rival: Option<Subject>,
    /// How much may be alive, in blocks of which sizes: any multiple of 512 bytes from the unit to the largest.
    pub contest: Contest,
    /// How many streams blocks are on.
    pub streams: u16,
    /// How many programs are tried.
    pub tries: u32,
    /// Chance's seed.
    pub seed: u64,
}

/// A trace and how bad it is.
#[derive(Clone, Debug)]
pub struct Find {
    /// What to do.
    pub trace: Trace,
    /// What the subject reserves for the budget, in terms of what its rival does, where it has one.
    pub badness: f64,
    /// What the subject reserves at most.
    pub peak_reserved_bytes: u64,
    /// The number of the try, from 1.
    pub found_at: u32,
}

/// What a strategy takes for a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Toll {
    /// Reserved at most.
    pub peak_reserved_bytes: u64,
    /// Asked for at most.
    pub peak_requested_bytes: u64,
    /// Requests that were not served.
    pub ooms: u64,
}

/// Serves a trace to its end or until memory runs out, and says what it took.
pub fn toll(subject: &Subject, trace: &Trace) -> Result<Toll, AdversaryError> {
    let mut device = subject.open_device()?;
    let mut strategy = subject.build(device.props()).map_err(SubjectError::from)?;
    let missing = strategy.requires().missing_from(device.props().capabilities);
    if missing != Capabilities::NONE {
        return Err(AdversaryError::Unable { missing });
    }
    let replayed = replay(trace, &mut *strategy, &mut *device, &replay::Options::default(), &mut Nobody)?;
    let peak = strategy.stats().peak;
    Ok(Toll { peak_reserved_bytes: peak.reserved, peak_requested_bytes: peak.requested, ooms: replayed.ooms })
}

/// Looks at nothing: only the books matter.
struct Nobody;

impl EventSink for Nobody {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for Nobody {}

impl Quest {
    /// How bad a trace is, and what the subject reserves for it.
    pub fn badness(&self, trace: &Trace) -> Result<(f64, u64), AdversaryError> {
        let reserved = toll(&self.subject, trace)?.peak_reserved_bytes;
        let measured_by = match &self.rival {
            Some(rival) => toll(rival, trace)?.peak_reserved_bytes.max(self.contest.live_bytes),
            None => self.contest.live_bytes,
        };
        Ok((reserved as f64 / measured_by as f64, reserved))
    }

    /// The smallest trace that is about as bad as one that was found, and keeps to the same rules.
    pub fn shrink(&self, found: &Find, most_tries: usize, stop: &AtomicBool) -> Find {
        let least = found.badness * (1.0 - TOLERANCE);
        let mut judge = |trace: &Trace| {
            let goes_on = !stop.load(Ordering::Relaxed);
            goes_on && self.allows(trace) && self.badness(trace).is_ok_and(|(badness, _)| badness >= least)
        };
        let trace = shrink(&found.trace, &mut judge, most_tries);
        match self.badness(&trace) {
            Ok((badness, peak_reserved_bytes)) => Find { trace, badness, peak_reserved_bytes, ..found.clone() },
            Err(_) => found.clone(),
        }
    }

    /// Whether a trace keeps to the rules of the contest. What is shrunk below the unit, or is no longer freed, is another
    /// pattern than the one that was found.
    fn allows(&self, trace: &Trace) -> bool {
        let smallest = trace.events.iter().filter_map(|event| match event.op {
            Op::Alloc { bytes, .. } => Some(bytes),
            _ => None,
        });
        let of_unit = smallest.min().is_none_or(|bytes| bytes >= self.contest.unit_bytes);
        of_unit && check(trace).is_ok_and(|summary| summary.peak.bytes <= self.contest.live_bytes)
    }

    /// Searches, and tells of everything that is worse than all before. `None` if stopped before the first try.
    pub fn search(
        &self,
        stop: &AtomicBool,
        mut on_progress: impl FnMut(u32, &Find),
    ) -> Result<Option<Find>, AdversaryError> {
        let breeder = Breeder { contest: self.contest, streams: usize::from(self.streams.max(1)) };
        let mut dice = Dice::new(self.seed, "adversary");
        let mut kept: Vec<(f64, Program)> = Vec::new();
        let mut seen = HashSet::new();
        let mut worst: Option<Find> = None;
        for number in 1..=self.tries {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let program = next_program(&breeder, &kept, &mut dice);
            if !seen.insert(program.clone()) {
                continue;
            }
            let trace = breeder.write_out(&program)?;
            let (badness, peak_reserved_bytes) = self.badness(&trace)?;
            keep(&mut kept, badness, program);
            if worst.as_ref().is_none_or(|worst| badness > worst.badness) {
                worst = Some(Find { trace, badness, peak_reserved_bytes, found_at: number });
            }
            if let Some(worst) = &worst {
                on_progress(number, worst);
            }
        }
        Ok(worst)
    }
}

/// Whom to try next: mostly children of what is kept.
fn next_program(breeder: &Breeder, kept: &[(f64, Program)], dice: &mut Dice) -> Program {
    if kept.len() < KEPT || dice.chance(0.1) {
        return breeder.invent(dice);
    }
    // The worse of two at random: what is worst has most children, and not all of them.
    let parent = |dice: &mut Dice| &kept[dice.index(kept.len()).min(dice.index(kept.len()))].1;
    if dice.chance(0.2) {
        let (first, second) = (parent(dice), parent(dice));
        breeder.cross(first, second, dice)
    } else {
        breeder.vary(parent(dice), dice)
    }
}

/// Takes a program among those that are kept, the worst first; the least bad goes. Equally bad ones change places, so that
/// the search drifts where it cannot climb.
fn keep(kept: &mut Vec<(f64, Program)>, badness: f64, program: Program) {
    let place = kept.partition_point(|&(other, _)| other > badness);
    kept.insert(place, (badness, program));
    kept.truncate(KEPT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, strategy::StrategySpec};

    fn subject(strategy: &str) -> Subject {
        Subject { strategy: StrategySpec::from(strategy), device: "sim".parse().unwrap(), memory_bytes: None }
    }

    fn quest(strategy: &str, tries: u32) -> Quest {
        let contest = Contest::new(256 * MIB, 64 * MIB, 2 * MIB).unwrap();
        Quest { subject: subject(strategy), rival: None, contest, streams: 1, tries, seed: 7 }
    }

    fn find(quest: &Quest) -> Find {
        quest.search(&AtomicBool::new(false), |_, _| ()).unwrap().unwrap()
    }

    #[test]
    fn a_search_finds_what_fragments_an_allocator_that_does_not_move_pages() {
        let quest = quest("tlsf", 300);
        let found = find(&quest);
        assert!(found.badness > 2.0, "{}", found.badness);
        assert_eq!(quest.badness(&found.trace).unwrap(), (found.badness, found.peak_reserved_bytes));
    }

    #[test]
    fn what_is_found_is_shrunk_and_stays_as_bad() {
        let quest = quest("caching", 60);
        let found = find(&quest);
        let small = quest.shrink(&found, 400, &AtomicBool::new(false));
        assert!(small.trace.events.len() < found.trace.events.len() / 2, "{} events", small.trace.events.len());
        assert!(small.badness >= found.badness * 0.99);
        assert_eq!(quest.badness(&small.trace).unwrap(), (small.badness, small.peak_reserved_bytes));
        assert!(quest.allows(&small.trace), "no block is below the unit");
        let alive = check(&small.trace).unwrap().peak.bytes;
        assert!(alive <= quest.contest.live_bytes, "{alive} bytes: frees that matter are not dropped");
        let untouched = quest.shrink(&found, 400, &AtomicBool::new(true));
        assert_eq!(untouched.trace.events, found.trace.events);
    }

    #[test]
    fn nothing_fragments_an_allocator_without_a_cache() {
        let found = find(&quest("direct", 40));
        assert!(found.badness <= 1.0, "{}", found.badness);
    }

    #[test]
    fn one_seed_finds_the_same_and_another_something_else() {
        let first = find(&quest("caching", 60));
        assert_eq!(first.trace.events, find(&quest("caching", 60)).trace.events);
        let other = find(&Quest { seed: 8, ..quest("caching", 60) });
        assert_ne!(first.trace.events, other.trace.events);
    }

    #[test]
    fn progress_never_gets_better_for_the_subject_and_a_stop_is_heeded() {
        let (mut last, mut tries) = (0.0, 0);
        let stop = AtomicBool::new(false);
        let found = quest("caching", 1000).search(&stop, |number, find| {
            assert!(find.badness >= last && number > tries);
            (last, tries) = (find.badness, number);
            stop.store(number >= 20, Ordering::Relaxed);
        });
        assert!(found.unwrap().unwrap().found_at <= 20 && tries == 20);
    }

    #[test]
    fn with_a_rival_it_is_the_difference_that_counts() {
        let alone = quest("caching", 1);
        let with_rival = Quest { rival: Some(subject("caching")), ..alone.clone() };
        let trace = find(&alone).trace;
        assert!(with_rival.badness(&trace).unwrap().0 <= 1.0, "nobody is worse than itself");
    }
}

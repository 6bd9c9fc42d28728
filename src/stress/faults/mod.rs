//! Drivers that fail: every driver call that a strategy makes fails once, and then some.
//!
//! A few stories lead a strategy through all that it asks of a device. A clean run counts its driver calls by kind; then
//! each of them fails once, or is the first of several, or says that memory has run out; another process takes the memory
//! that is free; events never complete. After each: nothing leaked, no block lost, and the same story gives the same result
//! as on a new strategy. What breaks is shrunk together with the place of the fault.
//!
//! [`Affliction`] says what befalls a run, `hindrance` and `afflicted` let it happen between a strategy and its device,
//! `sweep` chooses, `run` plays and judges.

mod afflicted;
mod affliction;
mod hindrance;
mod run;
mod stories;
mod sweep;

pub use affliction::{Affliction, AfflictionError, Manner};
pub use hindrance::Tallies;
pub use stories::stories;

use std::sync::Arc;

use self::{run::Run, sweep::Sweep};
use super::{
    Failure, KindOfStress, Subject, SubjectError, Verdict,
    patience::{patience_for, within},
    shrink,
};
use crate::{
    device::Device,
    strategy::{Stats, Strategy, conformance::Finding},
    trace::Trace,
};

/// What this kind of stress is called.
pub const KIND: &str = "faults";

/// Its part in `all`.
pub(super) const EVERYTHING: KindOfStress = KindOfStress {
    name: KIND,
    judge: |subject, seed, stop| faults(subject, &Faults { seed, ..Faults::default() }, stop).verdict,
};

/// How many traces are tried to make a failing story smaller, on a simulated device and on a real one; each is played at
/// several places of the fault.
const SHRINKING_TRIES: (usize, usize) = (400, 40);
/// At how many places before its own a fault is tried again while its story shrinks.
const PLACES: u64 = 24;

/// What to try.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The stories; those of this room where there are none.
    pub stories: Vec<Trace>,
    /// The afflictions; all that a story leaves room for where there are none.
    pub afflictions: Vec<Affliction>,
    /// For the sample where a story makes too many driver calls to let each fail.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Faulted {
    /// The verdict on the strategy.
    pub verdict: Verdict,
    /// Driver calls of the clean runs, by kind.
    pub calls: Tallies,
    /// Turns of driver calls that no run let fail, because there are too many.
    pub left_out: u64,
}

/// Makes a strategy and the device it runs on, in the thread that will use them.
type Opener = Arc<dyn Fn() -> Result<(Box<dyn Strategy>, Box<dyn Device>), SubjectError> + Send + Sync>;

/// Lets the driver fail the subject in every way that was asked for; `stop` ends it early.
#[must_use]
pub fn faults(subject: &Subject, what: &Faults, stop: &dyn Fn() -> bool) -> Faulted {
    let owned = subject.clone();
    let open: Opener = Arc::new(move || {
        let device = owned.open_device()?;
        let strategy = owned.build(device.props())?;
        Ok((strategy, device))
    });
    let tries = if subject.device.is_simulated() { SHRINKING_TRIES.0 } else { SHRINKING_TRIES.1 };
    Examiner { name: subject.strategy.to_string(), open, tries }.examine(what, stop)
}

/// Whoever has a strategy to look at.
struct Examiner {
    name: String,
    open: Opener,
    /// How many traces may be tried to make a failing story smaller.
    tries: usize,
}

impl Examiner {
    fn examine(&self, what: &Faults, stop: &dyn Fn() -> bool) -> Faulted {
        let mut faulted = Faulted { verdict: Verdict::new(KIND, &self.name), ..Faulted::default() };
        let stories = match self.stories(what) {
            Ok(stories) => stories,
            Err(reason) => {
                faulted.verdict.skipped = Some(reason);
                return faulted;
            }
        };
        for story in stories.into_iter().map(Arc::new) {
            if stop() {
                break;
            }
            self.tell(&story, what, stop, &mut faulted);
        }
        faulted
    }

    /// What is to be played, or why nothing can be.
    fn stories(&self, what: &Faults) -> Result<Vec<Trace>, String> {
        let (strategy, device) = (self.open)().map_err(|error| error.to_string())?;
        strategy.requires().check(device.props()).map_err(|missing| missing.to_string())?;
        Ok(match what.stories.as_slice() {
            [] => stories(device.free_bytes(), device.props().page_bytes),
            given => given.to_vec(),
        })
    }

    /// One story under every affliction. Of the runs that break the same promise only the first is shrunk and kept.
    fn tell(&self, story: &Arc<Trace>, what: &Faults, stop: &dyn Fn() -> bool, faulted: &mut Faulted) {
        let verdict = &mut faulted.verdict;
        let clean = match self.run(story, None, None) {
            Ok(run) => run,
            Err(ended) => return verdict.failures.push(self.failure(story, None, ended)),
        };
        count(verdict, &clean);
        if let Some(finding) = clean.findings.first() {
            return verdict.failures.push(self.failure(story, None, finding.to_string()));
        }
        let sweep = match what.afflictions.as_slice() {
            [] => Sweep::of(&clean.asked, clean.moments, what.seed),
            given => Sweep { afflictions: given.to_vec(), left_out: 0 },
        };
        faulted.calls.absorb(&clean.asked);
        faulted.left_out += sweep.left_out;
        let mut broken: Vec<&'static str> = Vec::new();
        for affliction in sweep.afflictions {
            if stop() {
                return;
            }
            match self.run(story, Some(affliction), Some(&clean.books)) {
                Ok(run) => {
                    count(verdict, &run);
                    if let Some(finding) = run.findings.first()
                        && !broken.contains(&finding.part)
                    {
                        broken.push(finding.part);
                        verdict.failures.push(self.shrunk(story, affliction, finding));
                    }
                }
                // What panics or hangs may do so again: the story ends here.
                Err(ended) => return verdict.failures.push(self.failure(story, Some(affliction), ended)),
            }
        }
    }

    /// One run in a thread of its own; in words where it panicked or did not come back.
    fn run(&self, story: &Arc<Trace>, affliction: Option<Affliction>, expected: Option<&Stats>) -> Result<Run, String> {
        let (open, story, expected) = (Arc::clone(&self.open), Arc::clone(story), expected.copied());
        let patience = patience_for(story.events.len());
        let trial = move || {
            let (strategy, device) = open().map_err(|error| error.to_string())?;
            Ok(Run::of(&story, strategy, device, affliction, expected.as_ref()))
        };
        within(patience, trial).unwrap_or_else(|ended| Err(ended.to_string()))
    }

    /// The failure with as small a story as shows it. While the story shrinks the fault moves: fewer driver calls lead up
    /// to it.
    fn shrunk(&self, story: &Trace, affliction: Affliction, finding: &Finding) -> Failure {
        let (mut place, mut words) = (affliction, finding.to_string());
        let mut still_fails = |candidate: &Trace| match self.breaks(candidate, place, finding.part) {
            Some(found) => {
                (place, words) = found;
                true
            }
            None => false,
        };
        let small = shrink(story, &mut still_fails, self.tries);
        self.failure(&small, Some(place), words)
    }

    /// Where an affliction of the same sort, no later than this one, breaks the same promise; and how.
    fn breaks(&self, story: &Trace, affliction: Affliction, part: &str) -> Option<(Affliction, String)> {
        let story = Arc::new(story.clone());
        let clean = self.run(&story, None, None).ok().filter(|run| run.findings.is_empty())?;
        let last = affliction.first();
        let places =
            (last.saturating_sub(PLACES).max(1)..=last).rev().chain(1..=PLACES.min(last.saturating_sub(PLACES)));
        places.map(|place| affliction.moved_to(place)).find_map(|affliction| {
            let run = self.run(&story, Some(affliction), Some(&clean.books)).ok()?;
            let finding = run.findings.first().filter(|finding| finding.part == part)?;
            Some((affliction, finding.to_string()))
        })
    }

    fn failure(&self, story: &Trace, affliction: Option<Affliction>, detail: String) -> Failure {
        let fault = affliction.map(|affliction| format!("--fault {affliction}"));
        let under = affliction.map(|affliction| format!("under {affliction}: ")).unwrap_or_default();
        Failure {
            found_by: KIND,
            strategy: self.name.clone(),
            detail: format!("{}: {under}{detail}", story.name),
            trace: Some(story.clone()),
            conditions: fault.into_iter().collect(),
        }
    }
}

fn count(verdict: &mut Verdict, run: &Run) {
    verdict.trials += 1;
    verdict.events += run.events;
    verdict.served += run.served;
    verdict.ooms += run.ooms;
    verdict.driver_calls += run.asked.total();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        device::CallKind,
        strategy::{STRATEGIES, StrategySpec, flawed::Flaw},
    };

    fn subject(strategy: &str) -> Subject {
        let device = "sim".parse().unwrap();
        Subject { strategy: StrategySpec::from(strategy), device, memory_bytes: Some(96 * MIB) }
    }

    fn everything(strategy: &str) -> Faulted {
        faults(&subject(strategy), &Faults::default(), &|| false)
    }

    #[test]
    fn no_failing_driver_call_breaks_a_strategy_of_ours() {
        // The two that map memory page by page make most of the calls, and are looked at by the command itself.
        let quick = STRATEGIES.iter().filter(|entry| !["null", "address", "stitch", "planned"].contains(&entry.name));
        for entry in quick {
            let faulted = everything(entry.name);
            assert_eq!(faulted.verdict.word(), "passed", "{:?}", faulted.verdict.failures);
            assert_eq!(faulted.left_out, 0, "{}: stories are short enough for every call", entry.name);
            assert!(faulted.verdict.trials > 3 * faulted.calls.total(), "{}: {:?}", entry.name, faulted.verdict);
        }
    }

    #[test]
    fn stories_lead_strategies_to_every_call_they_can_make() {
        let mut seen = Tallies::default();
        for strategy in ["caching:expandable_segments:True", "async", "cub", "pool"] {
            let what = Faults { afflictions: vec![Affliction::Stuck { first: 1 }], ..Faults::default() };
            seen.absorb(&faults(&subject(strategy), &what, &|| false).calls);
        }
        let of_the_program =
            ["cuStreamCreate", "cuCtxSynchronize", "cuMemHostAlloc", "cuMemFreeHost", "cuLaunchKernel"];
        let expected = CallKind::ALL.iter().filter(|kind| !of_the_program.contains(&kind.name()));
        let missing: Vec<&CallKind> = expected.filter(|&&kind| seen.of(kind) == 0).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// What each flaw breaks, and how many events its smallest story has at most.
    const SEEDED: [(Flaw, &str, usize); 8] = [
        (Flaw::ForgetsOnFailure, "", 4),
        (Flaw::LosesSegmentOnFailure, "", 3),
        (Flaw::LeakOnRetry, "after a close", 5),
        (Flaw::BooksTooEarly, "reserved", 3),
        (Flaw::LeakOnClose, "after a close", 80),
        (Flaw::FailsOnExhaustion, "", 80),
        (Flaw::Panics, "panicked", 80),
        (Flaw::Spins, "thousands of times", 6),
    ];

    #[test]
    fn every_seeded_bug_is_caught_shrunk_and_shows_again() {
        for (flaw, says, most_events) in SEEDED {
            let name = format!("flawed:{flaw:?}");
            let faulted = everything(&name);
            let found = faulted.verdict.failures.iter().find(|failure| failure.detail.contains(says));
            let failure = found.unwrap_or_else(|| panic!("{flaw:?}: {:?}", faulted.verdict.failures));
            let story = failure.trace.clone().unwrap();
            assert!(story.events.len() <= most_events, "{failure}: {:?}", story.events);
            let afflictions = failure
                .conditions
                .iter()
                .map(|condition| condition.strip_prefix("--fault ").unwrap().parse::<Affliction>().unwrap());
            let again = Faults { stories: vec![story], afflictions: afflictions.collect(), seed: 0 };
            let again = faults(&subject(&name), &again, &|| false).verdict;
            assert_eq!(again.word(), "failed", "{failure} {:?}", failure.conditions);
        }
    }

    #[test]
    fn the_same_allocator_without_a_flaw_passes() {
        let verdict = everything("flawed:None").verdict;
        assert_eq!(verdict.word(), "passed", "{:?}", verdict.failures);
    }

    #[test]
    fn who_is_told_to_stop_stops_and_who_cannot_run_is_skipped() {
        assert_eq!(faults(&subject("caching"), &Faults::default(), &|| true).verdict.trials, 0);
        let skipped = everything("no such strategy").verdict.skipped;
        assert!(skipped.is_some_and(|reason| reason.contains("unknown strategy")));
    }
}

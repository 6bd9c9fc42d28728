//! One story under one affliction, and what is expected of the strategy afterwards: nothing leaked, nothing lost, as good
//! as new.

use super::{
    afflicted::{Afflicted, Chart},
    affliction::Affliction,
    hindrance::Tallies,
};
use crate::{
    device::Device,
    strategy::{
        Stats, Strategy, StrategyError,
        conformance::{Finding, Watch},
    },
    stress::player::Player,
    trace::Trace,
};

/// After so many events layout and books are compared at the most often: stories are played many times.
const AUDIT_EVERY: u64 = 4;
/// However long a story, about this often: that is slow.
const AUDITS: u64 = 128;

/// What a run came to.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) findings: Vec<Finding>,
    /// Driver calls that the strategy made until it was closed for the first time.
    pub(super) asked: Tallies,
    /// How often the strategy was called until then.
    pub(super) moments: u64,
    /// Events that were played, both times.
    pub(super) events: u64,
    pub(super) served: u64,
    pub(super) ooms: u64,
    /// The books at the end of the second, untroubled time.
    pub(super) books: Stats,
}

impl Run {
    /// Plays the story under the affliction, gives everything back, and plays it once more in peace, which must end as
    /// `expected`.
    pub(super) fn of(
        story: &Trace,
        strategy: Box<dyn Strategy>,
        device: Box<dyn Device>,
        affliction: Option<Affliction>,
        expected: Option<&Stats>,
    ) -> Run {
        let (afflicted, chart) = Afflicted::new(strategy, affliction);
        let streams = story.tables.streams().get(1..).unwrap_or_default();
        let mut player = Player::new(Watch::new(Box::new(afflicted), device, streams), true);
        player.held_by_others = chart.taken_bytes();
        let mut patient = Patient { player, chart, story };
        patient.suffer(affliction);
        let (asked, moments) = (patient.chart.asked(), patient.chart.moments());
        patient.recover();
        let books = patient.live_on(expected);
        let trial = patient.player.so_far();
        Run {
            findings: patient.player.watch.findings(),
            asked,
            moments,
            events: trial.events,
            served: trial.served,
            ooms: trial.ooms,
            books,
        }
    }
}

/// A strategy, the program that uses it, and what is known of it from outside.
struct Patient<'a> {
    player: Player,
    chart: Chart,
    story: &'a Trace,
}

impl Patient<'_> {
    /// The story, and everything given back, while driver calls fail.
    fn suffer(&mut self, affliction: Option<Affliction>) {
        self.player.tell(self.story, self.audit_every());
        self.player.give_back_own();
        // Errors are no findings yet: the one call that fails may be any of these.
        let _ = self.free_all();
        let _ = self.player.watch.on_device(|device| device.synchronize());
        let _ = self.player.watch.call(|strategy, cx| strategy.trim(cx));
        self.player.watch.strategy.audit();
        // Of a close that failed nobody can say which blocks are still live. What hangs for good is therefore closed only
        // every other time: the other times every block must still be there.
        let closes = !matches!(affliction, Some(Affliction::Stuck { first }) if first % 2 == 0);
        if closes {
            let _ = self.player.watch.call(|strategy, cx| strategy.close(cx));
        }
        self.weigh_errors(affliction);
    }

    /// With the affliction gone, all that is left can be given back.
    fn recover(&mut self) {
        self.chart.lift(&mut *self.player.watch.device);
        if self.player.watch.strategy.is_sound()
            && let Err(error) = self.free_all()
        {
            self.player.watch.find("lost block", format!("a live block cannot be freed: {error}"));
        }
        self.player.watch.close();
    }

    /// The story once more, as for a new strategy; the books at its end.
    fn live_on(&mut self, expected: Option<&Stats>) -> Stats {
        if self.player.watch.has_findings() {
            return Stats::default();
        }
        self.player.expect_no_faults();
        self.player.tell(self.story, self.audit_every());
        let books = self.player.watch.strategy.stats();
        if let Some(expected) = expected.filter(|&expected| *expected != books) {
            let detail = format!("played again in peace the story ends with {books:?}, should be {expected:?}");
            self.player.watch.find("not as new", detail);
        }
        self.player.give_back_own();
        self.player.watch.close();
        books
    }

    fn audit_every(&self) -> u64 {
        (self.story.events.len() as u64 / AUDITS).max(AUDIT_EVERY)
    }

    /// Gives every live block back; the first error.
    fn free_all(&mut self) -> Result<(), StrategyError> {
        let mut outcome = Ok(());
        for (block, caller) in self.chart.live() {
            let freed = self.player.watch.call(|strategy, cx| strategy.free(cx, block, caller));
            if let (Ok(()), Err(error)) = (&outcome, freed) {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Every error must be one that was put there, and nobody asks for ever.
    fn weigh_errors(&mut self, affliction: Option<Affliction>) {
        self.player.weigh_errors(self.chart.injected());
        if self.chart.spins() {
            let what = affliction.map(|affliction| format!(" under {affliction}")).unwrap_or_default();
            self.player.watch.find("spinning", format!("one call asked for events thousands of times{what}"));
        }
    }
}

//! Who holds the second run against the transcript of the first.

use super::{Decision, Difference, Place, transcript::Reader};
use crate::{
    replay::{FailedRequest, LiveBlock, Observer, ReplayMoment},
    strategy::{EventSink, Freed, Outcome, StrategyEvent},
};

/// Holds every decision against the transcript.
pub(super) struct Proofreader {
    reader: Reader,
    place: Place,
    /// Of the present event.
    decisions: Vec<Decision>,
    /// What the transcript says of it.
    expected: Vec<Decision>,
    /// Events at which the two runs decided the same.
    pub(super) agreed: u64,
    /// The first difference.
    pub(super) difference: Option<Difference>,
}

impl Proofreader {
    pub(super) fn new(reader: Reader) -> Proofreader {
        Proofreader {
            reader,
            place: Place::default(),
            decisions: Vec::new(),
            expected: Vec::new(),
            agreed: 0,
            difference: None,
        }
    }

    /// At the end of an event.
    fn compare_event(&mut self) {
        let told = self.reader.next_event(&mut self.expected);
        if told && self.decisions == self.expected {
            self.agreed += 1;
        } else {
            let complaint = (!told).then(|| "the device's run had already ended".to_owned());
            self.note_difference(complaint);
        }
        self.decisions.clear();
    }

    /// After the last event, or in the middle of the one that could not be carried out.
    pub(super) fn conclude(&mut self, finished: bool, complaint: Option<String>) {
        let goes_on = self.reader.next_event(&mut self.expected);
        if finished || !goes_on {
            self.place = Place::default();
        }
        let complaint = complaint.or((finished && goes_on).then(|| "the device's run had more events".to_owned()));
        if complaint.is_some() || self.decisions != self.expected {
            self.note_difference(complaint);
        }
    }

    fn note_difference(&mut self, complaint: Option<String>) {
        if self.difference.is_none() {
            let place = self.place.clone();
            self.difference = Some(Difference::new(place, &self.expected, &self.decisions, complaint));
        }
    }
}

impl EventSink for Proofreader {
    fn event(&mut self, event: StrategyEvent) {
        self.decisions.push(Decision::Inside(event));
    }
}

impl Observer for Proofreader {
    fn before(&mut self, now: &ReplayMoment<'_>) {
        self.place.reach(now);
    }

    fn served(&mut self, _: &ReplayMoment<'_>, live: &LiveBlock, outcome: Outcome) {
        self.decisions.push(Decision::served(live, outcome));
    }

    fn freed(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, freed: Freed) {
        self.decisions.push(Decision::Freed(freed));
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, report: &FailedRequest) {
        self.decisions.push(Decision::Failed(report.shortage));
    }

    fn after(&mut self, _: &ReplayMoment<'_>) {
        self.compare_event();
    }
}

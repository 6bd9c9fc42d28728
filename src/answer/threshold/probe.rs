//! One try: a source, a strategy, a device, and a cap on memory.

use serde::{Deserialize, Serialize};

use super::ThresholdError;
use crate::{
    base::Progress,
    device::{CallKind, CallLedger},
    measure::{OomReport, ooms::Ooms},
    replay::{FailedRequest, LiveBlock, Observer, Replay, ReplayMoment, ReplayOutcome, ReplayRun},
    strategy::{EventSink, Outcome, Silent},
    trace::{PROGRESS_PER_READING, ProgressSource},
};

/// A cap that was tried, and how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The cap on what the strategy holds.
    pub limit_bytes: u64,
    /// Whether every request of every round was served.
    pub fits: bool,
    /// In which round it failed, from 1.
    pub failed_round: Option<u32>,
    /// At which event of that round, from 0.
    pub failed_event: Option<u64>,
    /// Most that the strategy had reserved.
    pub peak_reserved_bytes: u64,
    /// How often cached memory had to be given back to make room.
    pub retries: u64,
    /// Time inside driver calls, launches left out: what the strategy costs.
    #[serde(default)]
    pub driver_ns: u64,
}

/// Tries one replay under different limits.
pub(in crate::answer) struct Rehearsal<'a> {
    /// Everything about a try but its limit.
    pub(in crate::answer) replay: Replay<'a>,
    /// Told how far a try is. The caller begins the stage, with [`parts`](Rehearsal::parts) for every try.
    pub(in crate::answer) progress: &'a dyn Progress,
}

/// What an uncapped try took.
pub(super) struct Uncapped {
    pub(super) oom: Option<OomReport>,
    pub(super) peak_held_bytes: u64,
    pub(super) peak_reserved_bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) driver_ns: u64,
}

impl Rehearsal<'_> {
    /// How many parts a try of so many rounds has.
    pub(in crate::answer) fn parts(repeat: u32) -> u64 {
        PROGRESS_PER_READING * u64::from(repeat.max(1))
    }

    /// Tries the cap. Ends at the first request that fails.
    pub(in crate::answer) fn probe(&self, limit_bytes: u64) -> Result<Probe, ThresholdError> {
        let run = self.run(Some(limit_bytes), &mut Silent)?;
        let failure = run.outcome.first_oom.map(|oom| self.place(&run.outcome, &oom));
        Ok(Probe {
            limit_bytes,
            fits: failure.is_none(),
            failed_round: failure.map(|(round, _)| round),
            failed_event: failure.map(|(_, event)| event),
            peak_reserved_bytes: run.stats.peak.reserved,
            retries: run.stats.retries,
            driver_ns: driver_ns(&run.calls),
        })
    }

    /// The first failure under the cap, with everything that is known about it.
    pub(in crate::answer) fn explain(&self, limit_bytes: u64) -> Result<Option<OomReport>, ThresholdError> {
        let mut ooms = Ooms::default();
        self.run(Some(limit_bytes), &mut ooms)?;
        Ok(ooms.reports.into_iter().next())
    }

    /// What it takes with the whole device.
    pub(super) fn uncapped(&self) -> Result<Uncapped, ThresholdError> {
        let mut seen = Heights::default();
        let run = self.run(None, &mut seen)?;
        Ok(Uncapped {
            oom: seen.ooms.reports.into_iter().next(),
            peak_held_bytes: seen.peak_held_bytes,
            peak_reserved_bytes: run.stats.peak.reserved,
            page_bytes: seen.page_bytes.max(1),
            driver_ns: driver_ns(&run.calls),
        })
    }

    fn run<O: Observer>(&self, limit: Option<u64>, observer: &mut O) -> Result<ReplayRun, ThresholdError> {
        let rounds = self.replay.options.repeat.max(1);
        let source = ProgressSource::within(self.replay.source, self.progress, rounds.into());
        let run = self.replay.with_source(&source).limit(limit).run_observed(observer)?;
        if run.outcome.interrupted { Err(ThresholdError::Interrupted) } else { Ok(run) }
    }

    /// The round and the event within it, where the length of the source is known; otherwise counted from the start.
    fn place(&self, replayed: &ReplayOutcome, oom: &FailedRequest) -> (u32, u64) {
        match self.replay.source.info().events.filter(|&events| events > 0 && events <= replayed.events) {
            Some(events) => ((oom.event / events) as u32 + 1, oom.event % events),
            None => (1, oom.event),
        }
    }
}

/// Time in driver calls, launches left out.
fn driver_ns(calls: &CallLedger) -> u64 {
    (calls.total().time - calls.of(CallKind::Launch).time).0
}

/// Looks at what the device holds.
#[derive(Default)]
struct Heights {
    peak_held_bytes: u64,
    page_bytes: u64,
    ooms: Ooms,
}

impl EventSink for Heights {}

impl Observer for Heights {
    fn served(&mut self, now: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        self.peak_held_bytes = self.peak_held_bytes.max(now.device.held_bytes());
        self.page_bytes = now.device.props().page_bytes;
    }

    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, report: &FailedRequest) {
        self.ooms.out_of_memory(now, report);
    }
}

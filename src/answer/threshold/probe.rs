//! One try: a source, a strategy, a device, and a cap on memory.

use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::ThresholdError;
use crate::{
    base::{Nanos, Progress},
    device::{CallKind, DeviceSpec, wrap::capped},
    measure::{OomReport, ooms::Ooms},
    replay::{self, Moment, Observer, OutOfMemory, Pace, Replayed, replay},
    strategy::{EventSink, Setup, Strategy, StrategyEvent, StrategySpec},
    trace::{PROGRESS_PER_READING, ProgressSource, Source},
};

/// Who refuses what goes beyond the cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cap {
    /// The strategy itself, where it has a limit of its own, and otherwise the device: what `--limit` does. PyTorch's
    /// allocator tests its memory fraction on the size of a segment, before it asks the driver.
    #[default]
    Allocator,
    /// The driver alone, as on a card of that size: the strategy knows of no limit and finds out by failing.
    Device,
}

impl Cap {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Cap::Allocator => "allocator",
            Cap::Device => "device",
        }
    }
}

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

/// Everything about a try but its cap.
pub(in crate::answer) struct Rehearsal<'a> {
    pub(in crate::answer) source: &'a dyn Source,
    pub(in crate::answer) strategy: &'a StrategySpec,
    pub(in crate::answer) device: &'a DeviceSpec,
    pub(in crate::answer) cap: Cap,
    pub(in crate::answer) repeat: u32,
    pub(in crate::answer) pace: Pace,
    pub(in crate::answer) stop: Option<&'a AtomicBool>,
    /// Told how far a try is; the stage is for the caller to begin, with [`parts`](Rehearsal::parts) for every try.
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

/// How a replay ended, and what it leaves to look at.
struct Ended {
    replayed: Replayed,
    strategy: Box<dyn Strategy>,
    driver_time: Nanos,
}

impl Rehearsal<'_> {
    /// How many parts a try of so many rounds has.
    pub(in crate::answer) fn parts(repeat: u32) -> u64 {
        PROGRESS_PER_READING * u64::from(repeat.max(1))
    }

    /// Tries the cap. Ends at the first request that fails.
    pub(in crate::answer) fn probe(&self, limit_bytes: u64) -> Result<Probe, ThresholdError> {
        let Ended { replayed, strategy, driver_time } = self.replay(Some(limit_bytes), &mut Nobody)?;
        let stats = strategy.stats();
        let failure = replayed.first_oom.map(|oom| self.place(&replayed, &oom));
        Ok(Probe {
            limit_bytes,
            fits: failure.is_none(),
            failed_round: failure.map(|(round, _)| round),
            failed_event: failure.map(|(_, event)| event),
            peak_reserved_bytes: stats.peak.reserved,
            retries: stats.retries,
            driver_ns: driver_time.0,
        })
    }

    /// The first failure under the cap, with everything that is known about it.
    pub(in crate::answer) fn explain(&self, limit_bytes: u64) -> Result<Option<OomReport>, ThresholdError> {
        let mut ooms = Ooms::default();
        self.replay(Some(limit_bytes), &mut ooms)?;
        Ok(ooms.reports.into_iter().next())
    }

    /// What it takes with the whole device.
    pub(super) fn uncapped(&self) -> Result<Uncapped, ThresholdError> {
        let mut seen = Heights::default();
        let Ended { strategy, driver_time, .. } = self.replay(None, &mut seen)?;
        Ok(Uncapped {
            oom: seen.ooms.reports.into_iter().next(),
            peak_held_bytes: seen.peak_held_bytes,
            peak_reserved_bytes: strategy.stats().peak.reserved,
            page_bytes: seen.page_bytes.max(1),
            driver_ns: driver_time.0,
        })
    }

    fn replay<O: Observer>(&self, limit: Option<u64>, observer: &mut O) -> Result<Ended, ThresholdError> {
        let mut device = capped(self.device.open()?, limit);
        let known_limit = limit.filter(|_| self.cap == Cap::Allocator);
        let mut strategy = self.strategy.build(&Setup { props: device.props(), limit: known_limit })?;
        strategy.requires().check(device.props())?;
        let options =
            replay::Options { pace: self.pace, repeat: self.repeat, stop: self.stop, ..replay::Options::default() };
        let source = ProgressSource::within(self.source, self.progress, self.repeat.max(1).into());
        let replayed = replay(&source, &mut *strategy, &mut *device, &options, observer)?;
        if replayed.interrupted {
            return Err(ThresholdError::Interrupted);
        }
        let ledger = device.ledger();
        Ok(Ended { replayed, strategy, driver_time: ledger.total().time - ledger.of(CallKind::Launch).time })
    }

    /// The round and the event within it, where the length of the source is known; otherwise counted from the start.
    fn place(&self, replayed: &Replayed, oom: &OutOfMemory) -> (u32, u64) {
        match self.source.info().events.filter(|&events| events > 0 && events <= replayed.events) {
            Some(events) => ((oom.event / events) as u32 + 1, oom.event % events),
            None => (1, oom.event),
        }
    }
}

/// Looks at nothing: a probe only wants to know how it ends.
struct Nobody;

impl EventSink for Nobody {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for Nobody {}

/// Looks at what the device holds.
#[derive(Default)]
struct Heights {
    peak_held_bytes: u64,
    page_bytes: u64,
    ooms: Ooms,
}

impl EventSink for Heights {
    fn event(&mut self, _: StrategyEvent) {}
}

impl Observer for Heights {
    fn served(&mut self, now: &Moment<'_>, _: &replay::Live, _: crate::strategy::Outcome) {
        self.peak_held_bytes = self.peak_held_bytes.max(now.device.held_bytes());
        self.page_bytes = now.device.props().page_bytes;
    }

    fn out_of_memory(&mut self, now: &Moment<'_>, report: &OutOfMemory) {
        self.ooms.out_of_memory(now, report);
    }
}

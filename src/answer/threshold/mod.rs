//! The smallest memory in which a source completes under a strategy, and the largest workload that fits in a memory.
//!
//! Both are searches over replays on a simulated device: [`threshold`] over caps on memory, [`largest`] over the values
//! of a generator's parameter. A found value is only worth something if its surroundings agree with it, so both look
//! around it and tell what contradicts. [`case_threshold`] also repeats the two decisive runs on a real device, if the
//! case has one.
//!
//! # What is counted
//!
//! A cap is on the physical bytes that the *strategy* holds, in whole pages: `needed_bytes`. A card must hold the
//! driver's context and the libraries that a program loads as well (`overhead_bytes`, those of the simulated GPU's
//! profile): `needed_card_bytes` is the sum, the size of the smallest card. Workspaces of libraries are blocks like any other
//! where a source has them. [`LimitEnforcer`] says who refuses requests beyond it.

mod case;
mod largest;
mod memory;

pub use case::{WithThresholds, case_threshold, failed_threshold};
pub use largest::{LargestQuestion, failed_largest, largest};
pub use memory::{Threshold, ThresholdQuestion, threshold};
pub(in crate::answer) use memory::{live_peak, overhead};

use serde::{Deserialize, Serialize};

use crate::{
    base::{Bytes, Progress, did_you_mean},
    device::{CallKind, CallLedger, DeviceSpecError},
    measure::{CaseLabel, Obstacle, OomReport, SCHEMA, Status, digits, lost_share, on_one_line, ooms::OomRecorder},
    models::WorkloadError,
    pytorch::Release,
    replay::{
        FailedRequest, LimitEnforcer, LiveBlock, Observer, OomCause, Replay, ReplayError, ReplayMoment, ReplayOutcome,
        ReplayRun,
    },
    strategy::{EventSink, Outcome, Refusal, Silent},
    suite::CaseTimeout,
    trace::{PROGRESS_PER_READING, ProgressSource, TraceError},
};

/// The default number of rounds back to back. Some sources fail only in the third.
pub const REPEATS: u32 = 3;

/// The default number of places that are tried around a found value.
pub const PROBES_AROUND: u32 = 16;

/// Why there is no answer. Insufficient memory is an answer, not an error.
#[derive(Debug, thiserror::Error)]
pub enum ThresholdError {
    /// The device cannot be made.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// A replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The workload cannot be made with some value; boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
    /// No parameter of that name that counts something.
    #[error("generator '{generator}' has no whole-number parameter '{name}'{}", did_you_mean(suggestion.as_deref()))]
    NoSuchParameter {
        /// The workload's generator.
        generator: &'static str,
        /// What was asked for.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// Nothing is left for an allocator.
    #[error("{card} is too small for a card: the context and libraries alone take {overhead}")]
    NoRoom {
        /// The whole of it.
        card: Bytes,
        /// What others take.
        overhead: Bytes,
    },
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] TraceError),
    /// The strategy is a plugin.
    #[error("no threshold is searched for a plugin: a plugin calls the driver itself, so its memory cannot be limited")]
    Plugin,
    /// The search took too long.
    #[error("timed out after {0}")]
    TimedOut(CaseTimeout),
    /// The search was stopped.
    #[error("stopped before an answer was found")]
    Interrupted,
}

/// A limit that was tried, and the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    pub driver_without_launches_ns: u64,
}

/// Tries one replay under different limits.
pub(in crate::answer) struct LimitTrials<'a> {
    /// Everything about a try but its limit.
    pub(in crate::answer) replay: Replay<'a>,
    /// Reports how far a try is. The caller begins the stage, with [`parts`](LimitTrials::parts) for every try.
    pub(in crate::answer) progress: &'a dyn Progress,
}

impl LimitTrials<'_> {
    /// The progress units of a try with this many rounds.
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
            driver_without_launches_ns: driver_ns(&run.calls),
        })
    }

    /// The first failure under the cap, with everything that is known about it.
    pub(in crate::answer) fn explain(&self, limit_bytes: u64) -> Result<Option<OomReport>, ThresholdError> {
        let mut ooms = OomRecorder::default();
        self.run(Some(limit_bytes), &mut ooms)?;
        Ok(ooms.reports.into_iter().next())
    }

    fn run<O: Observer>(&self, limit: Option<u64>, observer: &mut O) -> Result<ReplayRun, ThresholdError> {
        let rounds = self.replay.options.repeat.max(1);
        let source = ProgressSource::within(self.replay.source, self.progress, rounds.into());
        let run = self.replay.with_source(&source).limit(limit).run_observed(observer)?;
        if run.outcome.interrupted { Err(ThresholdError::Interrupted) } else { Ok(run) }
    }

    /// The round and the event within it, where the length of the source is known; otherwise counted from the start.
    fn place(&self, replayed: &ReplayOutcome, oom: &FailedRequest) -> (u32, u64) {
        match self.replay.source.events().filter(|&events| events > 0 && events <= replayed.events) {
            Some(events) => ((oom.event / events) as u32 + 1, oom.event % events),
            None => (1, oom.event),
        }
    }
}

/// Time in driver calls, launches left out.
fn driver_ns(calls: &CallLedger) -> u64 {
    calls.total().time.since(calls.of(CallKind::Launch).time).0
}

/// Keeps the most that the device held, and the failed requests.
#[derive(Default)]
struct HeldPeak {
    bytes: u64,
    ooms: OomRecorder,
}

impl EventSink for HeldPeak {}

impl Observer for HeldPeak {
    fn served(&mut self, now: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        self.bytes = self.bytes.max(now.device.held_bytes());
    }

    fn out_of_memory(&mut self, now: &ReplayMoment<'_>, report: &FailedRequest) {
        self.ooms.out_of_memory(now, report);
    }
}

/// Whether everything that was tried agrees: nothing below the answer fits, nothing above it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stability {
    /// Whether it does.
    pub stable: bool,
    /// The least that fits.
    pub lowest_fit: Option<u64>,
    /// The first failure above that.
    pub first_failure_above: Option<u64>,
}

impl Stability {
    /// Of what was tried, in ascending order of how much there was to fit in.
    pub(super) fn of(tried: impl Iterator<Item = (u64, bool)>) -> Stability {
        let (mut lowest_fit, mut first_failure_above) = (None, None);
        for (place, fits) in tried {
            match (fits, lowest_fit) {
                (true, None) => lowest_fit = Some(place),
                (false, Some(_)) => first_failure_above = first_failure_above.or(Some(place)),
                _ => {}
            }
        }
        Stability { stable: first_failure_above.is_none(), lowest_fit, first_failure_above }
    }
}

oomph_base::named_enum! {
    /// How a search ended.
    #[derive(Default)]
    pub enum ThresholdStatus {
        /// There is a threshold.
        Found = "found",
        /// Nothing that could be tried suffices: not the whole device, not the smallest value.
        NeverFits = "never_fits",
        /// The device lacks what the strategy needs.
        #[default]
        Skipped = "skipped",
        /// It was stopped.
        Interrupted = "interrupted",
        /// Something is broken.
        Error = "error",
    }
}

/// One row of `thresholds.csv`. A cell is empty where there is nothing to say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThresholdRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// See [`CaseLabel::suite`].
    pub suite: String,
    /// See [`CaseLabel::workload`].
    pub workload: String,
    /// See [`CaseLabel::strategy`].
    pub strategy: String,
    /// The release of PyTorch whose allocator the strategy is; empty for other strategies.
    pub release: Option<Release>,
    /// The simulated device that was searched on.
    pub device: String,
    /// See [`CaseLabel::seed`].
    pub seed: u64,
    /// Rounds back to back.
    pub repeat: u32,
    /// Who refuses requests beyond the limit.
    #[serde(alias = "cap")]
    pub limit_enforcer: LimitEnforcer,
    /// How the search ended.
    pub status: ThresholdStatus,
    /// Why, where that is not plain.
    pub reason: String,

    /// The smallest cap on what the strategy holds from which on every cap tried suffices.
    #[serde(alias = "threshold_bytes")]
    pub needed_bytes: Option<u64>,
    /// What the context and the libraries take beside it.
    pub overhead_bytes: Option<u64>,
    /// Both together: the smallest card.
    #[serde(alias = "device_bytes")]
    pub needed_card_bytes: Option<u64>,
    /// Most bytes alive at one time: no allocator needs less.
    pub live_peak_bytes: Option<u64>,
    /// What the strategy holds where nothing limits it.
    pub uncapped_held_bytes: Option<u64>,
    /// 1 - live peak / threshold: the share of the memory that the strategy cannot use.
    #[serde(serialize_with = "digits::optional")]
    pub lost_share: Option<f64>,
    /// How often cached memory was given back to make room at the threshold.
    #[serde(alias = "retries")]
    pub retries_at_needed: Option<u64>,

    /// Whether everything that was tried agrees.
    pub stable: Option<bool>,
    /// The least that fits; below the threshold where it is not stable.
    pub lowest_fit_bytes: Option<u64>,
    /// The first cap above that which fails.
    pub first_failure_above_bytes: Option<u64>,
    /// How many caps were tried.
    pub probes: u64,

    /// Right below the threshold: the round in which it fails, from 1.
    pub oom_round: Option<u32>,
    /// The number of the event that fails, from 0 and over all rounds.
    pub oom_event: Option<u64>,
    /// Its step.
    pub oom_step: Option<u32>,
    /// What it asks for.
    pub oom_requested_bytes: Option<u64>,
    /// Free then, on the device and in the strategy's cache together.
    pub oom_free_bytes: Option<u64>,
    /// The largest free piece of the cache.
    pub oom_largest_free_bytes: Option<u64>,
    /// True exhaustion or fragmentation.
    pub oom_cause: Option<OomCause>,
    /// Who refused.
    pub oom_refused_by: Option<Refusal>,
    /// What kept the request from most of what was free.
    pub oom_obstacle: Option<Obstacle>,
    /// How much that is.
    pub oom_obstacle_bytes: Option<u64>,

    /// The real device on which the threshold was tried.
    pub real_device: Option<String>,
    /// How the run with one page more ended there.
    pub real_above: Option<Status>,
    /// How the run with one page less ended there.
    pub real_below: Option<Status>,
    /// Whether the real device agrees: completed above, out of memory below.
    pub confirmed: Option<bool>,

    /// The commit of the program that measured the row; set by run folders.
    pub commit: String,
    /// The device on which the row was measured, as it calls itself; set by run folders.
    pub device_name: String,
    /// When the process that measured the row began; set by run folders, and not on a simulated device.
    pub run_started: String,
}

impl ThresholdRecord {
    fn note(&mut self, found: &Threshold) {
        self.status = if found.needed_bytes.is_some() { ThresholdStatus::Found } else { ThresholdStatus::NeverFits };
        if found.needed_bytes.is_none() {
            self.reason = "memory runs out even with the whole device; --card SIZE is a larger one".to_owned();
        }
        self.needed_bytes = found.needed_bytes;
        self.overhead_bytes = Some(found.overhead_bytes);
        self.needed_card_bytes = found.device_bytes();
        self.live_peak_bytes = Some(found.live_peak_bytes);
        self.uncapped_held_bytes = Some(found.uncapped_held_bytes);
        self.lost_share = found.needed_bytes.and_then(|bytes| lost_share(found.live_peak_bytes.min(bytes), bytes));
        self.retries_at_needed = found.at_threshold().map(|probe| probe.retries);
        if found.needed_bytes.is_some() {
            let stability = found.stability();
            self.stable = Some(stability.stable);
            self.lowest_fit_bytes = stability.lowest_fit;
            self.first_failure_above_bytes = stability.first_failure_above;
        }
        self.probes = found.probes.len() as u64;
        self.oom_round = found.right_below().and_then(|probe| probe.failed_round);
        if let Some(failure) = &found.failure {
            self.oom_event = Some(failure.event);
            self.oom_step = failure.step;
            self.oom_requested_bytes = Some(failure.requested_bytes);
            self.oom_free_bytes = Some(failure.device_free_bytes.saturating_add(failure.cached_free_bytes));
            self.oom_largest_free_bytes = failure.largest_free_bytes;
            self.oom_cause = Some(failure.cause);
            self.oom_refused_by = Some(failure.refused_by);
            self.oom_obstacle = failure.kept_back.first().map(|most| most.obstacle);
            self.oom_obstacle_bytes = failure.kept_back.first().map(|most| most.bytes);
        }
    }
}

/// A row and everything that does not fit in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ThresholdDetail {
    /// The row.
    #[serde(flatten)]
    pub record: ThresholdRecord,
    /// Every cap that was tried, smallest first.
    pub tried: Vec<Probe>,
    /// The first request that fails right below the threshold.
    pub failure: Option<OomReport>,
}

impl ThresholdDetail {
    /// Everything about an answer.
    #[must_use]
    pub fn new(label: &CaseLabel, cap: LimitEnforcer, answer: Result<Threshold, ThresholdError>) -> ThresholdDetail {
        let mut record = ThresholdRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            release: label.release(),
            device: label.device.clone(),
            seed: label.seed,
            repeat: label.repeat,
            limit_enforcer: cap,
            ..ThresholdRecord::default()
        };
        match answer {
            Ok(found) => {
                record.note(&found);
                ThresholdDetail { record, tried: found.probes, failure: found.failure }
            }
            Err(error) => {
                record.status = status_of(&error);
                record.reason = on_one_line(&error.to_string());
                ThresholdDetail { record, ..ThresholdDetail::default() }
            }
        }
    }
}

/// The largest value of a parameter that fits in a memory: a row, and what was tried.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LargestRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The workload without the parameter.
    pub workload: String,
    /// The strategy as users type it.
    pub strategy: String,
    /// The release of PyTorch whose allocator the strategy is; empty for other strategies.
    pub release: Option<Release>,
    /// The simulated device.
    pub device: String,
    /// Rounds back to back.
    pub repeat: u32,
    /// Who refuses requests beyond the limit.
    pub limit_enforcer: LimitEnforcer,
    /// Which parameter.
    pub parameter: String,
    /// The memory of the whole card.
    pub card_bytes: u64,
    /// What the context and the libraries take of it.
    pub overhead_bytes: u64,
    /// What is left for the strategy: whole pages, or the limit of the process.
    pub limit_bytes: u64,
    /// How the search ended.
    pub status: ThresholdStatus,
    /// Why, where that is not plain.
    pub reason: String,
    /// The value up to which every value tried fits.
    pub largest: Option<u64>,
    /// What the strategy reserved with it.
    pub peak_reserved_bytes: Option<u64>,
    /// Whether everything that was tried agrees.
    pub stable: Option<bool>,
    /// The largest value that fits at all; above `largest` where it is not stable.
    pub highest_fit: Option<u64>,
    /// The first value below that which does not.
    pub first_failure_below: Option<u64>,
    /// How many values were tried.
    pub probes: u64,
    /// The values and whether they fit, smallest first; not in CSV.
    #[serde(skip)]
    pub tried: Vec<(u64, bool)>,
}

/// How a search ended that gave no answer.
pub(in crate::answer) fn status_of(error: &ThresholdError) -> ThresholdStatus {
    match error {
        ThresholdError::Replay(ReplayError::Incapable(_)) => ThresholdStatus::Skipped,
        ThresholdError::Interrupted => ThresholdStatus::Interrupted,
        _ => ThresholdStatus::Error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_monotonic_threshold_is_unstable() {
        let of = |tried: &[(u64, bool)]| Stability::of(tried.iter().copied());
        let stable = of(&[(1, false), (2, true), (3, true)]);
        assert_eq!(stable, Stability { stable: true, lowest_fit: Some(2), first_failure_above: None });
        let unstable = of(&[(1, false), (2, true), (3, false), (4, false), (5, true)]);
        assert_eq!(unstable, Stability { stable: false, lowest_fit: Some(2), first_failure_above: Some(3) });
        assert!(of(&[(1, false)]).stable);
    }
}

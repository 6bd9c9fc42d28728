//! The rows that thresholds leave in `thresholds.csv`, and what does not fit in a row.

use serde::{Deserialize, Serialize};

use super::{Confirmation, Probe, Threshold, ThresholdError};
use crate::{
    measure::{CaseLabel, Obstacle, OomReport, SCHEMA, Status, lost_share},
    replay::{LimitEnforcer, OomCause, ReplayError},
    strategy::Refusal,
};

/// Whether everything that was tried agrees: nothing below the answer fits, nothing above it fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// How a search ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThresholdStatus {
    /// There is a threshold.
    Found,
    /// Nothing that could be tried suffices: not the whole device, not the smallest value.
    NeverFits,
    /// The device lacks what the strategy needs.
    #[default]
    Skipped,
    /// Somebody stopped it.
    Interrupted,
    /// Something is broken.
    Error,
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
    /// The simulated device that was searched on.
    pub device: String,
    /// See [`CaseLabel::seed`].
    pub seed: u64,
    /// Rounds back to back.
    pub repeat: u32,
    /// Who refuses what goes beyond the cap.
    pub cap: LimitEnforcer,
    /// How the search ended.
    pub status: ThresholdStatus,
    /// Why, where that is not plain.
    pub reason: String,

    /// The smallest cap on what the strategy holds from which on every cap tried suffices.
    pub threshold_bytes: Option<u64>,
    /// What the context and the libraries take beside it.
    pub overhead_bytes: Option<u64>,
    /// Both together: the smallest card.
    pub device_bytes: Option<u64>,
    /// Most bytes alive at one time: no allocator needs less.
    pub live_peak_bytes: Option<u64>,
    /// What the strategy holds where nothing limits it.
    pub uncapped_held_bytes: Option<u64>,
    /// 1 - live peak / threshold: the share of the memory that the strategy cannot use.
    pub lost_share: Option<f64>,
    /// How often cached memory was given back to make room at the threshold.
    pub retries: Option<u64>,

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
}

impl ThresholdRecord {
    /// The row of an answer, or of none.
    #[must_use]
    pub fn new(label: &CaseLabel, cap: LimitEnforcer, answer: &Result<Threshold, ThresholdError>) -> ThresholdRecord {
        let mut record = ThresholdRecord {
            schema: SCHEMA,
            case_id: label.case_id(),
            suite: label.suite.clone(),
            workload: label.workload.clone(),
            strategy: label.strategy.clone(),
            device: label.device.clone(),
            seed: label.seed,
            repeat: label.repeat,
            cap,
            ..ThresholdRecord::default()
        };
        match answer {
            Ok(found) => record.note(found),
            Err(error) => {
                record.status = status_of(error);
                record.reason = on_one_line(&error.to_string());
            }
        }
        record
    }

    fn note(&mut self, found: &Threshold) {
        self.status = if found.threshold_bytes.is_some() { ThresholdStatus::Found } else { ThresholdStatus::NeverFits };
        if found.threshold_bytes.is_none() {
            self.reason = "memory runs out even with the whole device; a larger one is --device sim:SIZE".to_owned();
        }
        self.threshold_bytes = found.threshold_bytes;
        self.overhead_bytes = Some(found.overhead_bytes);
        self.device_bytes = found.device_bytes();
        self.live_peak_bytes = Some(found.live_peak_bytes);
        self.uncapped_held_bytes = Some(found.uncapped_held_bytes);
        self.lost_share = found.threshold_bytes.and_then(|bytes| lost_share(found.live_peak_bytes.min(bytes), bytes));
        self.retries = found.at_threshold().map(|probe| probe.retries);
        if found.threshold_bytes.is_some() {
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

    /// Adds what a real device said.
    pub fn add(&mut self, confirmation: &Confirmation) {
        self.real_device = Some(confirmation.device.clone());
        self.real_above = Some(confirmation.above);
        self.real_below = confirmation.below;
        self.confirmed = Some(confirmation.holds());
        if let Some(reason) = &confirmation.reason {
            self.reason = on_one_line(reason);
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
        let record = ThresholdRecord::new(label, cap, &answer);
        let (tried, failure) = answer.map_or_else(|_| Default::default(), |found| (found.probes, found.failure));
        ThresholdDetail { record, tried, failure }
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
    /// The simulated device.
    pub device: String,
    /// Rounds back to back.
    pub repeat: u32,
    /// Who refuses what goes beyond.
    pub cap: LimitEnforcer,
    /// Which parameter.
    pub parameter: String,
    /// The memory of the whole card.
    pub memory_bytes: u64,
    /// What the context and the libraries take of it.
    pub overhead_bytes: u64,
    /// What is left for the strategy, in whole pages.
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

fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_in_less_and_fails_in_more_is_not_stable() {
        let of = |tried: &[(u64, bool)]| Stability::of(tried.iter().copied());
        let stable = of(&[(1, false), (2, true), (3, true)]);
        assert_eq!(stable, Stability { stable: true, lowest_fit: Some(2), first_failure_above: None });
        let unstable = of(&[(1, false), (2, true), (3, false), (4, false), (5, true)]);
        assert_eq!(unstable, Stability { stable: false, lowest_fit: Some(2), first_failure_above: Some(3) });
        assert!(of(&[(1, false)]).stable);
    }
}

//! Why settings do not help, or do not help for long.

use serde::Serialize;

use super::{Advice, AdviceQuestion, choice::least_gain};
use crate::{
    answer::{
        holders::Grower,
        leaks::{self, GrowthThreshold, LeakError, ObservedSteps, StepsFrom},
        threshold::ThresholdError,
    },
    base::FileText,
    measure::{Obstacle, OomReport, UnusableMemory, digits},
    replay::{OomCause, Replay, ReplayOptions},
    trace::ProgressSource,
};

/// A request of at least this share of the memory is too large to be served from what others leave.
const LARGE_SHARE: f64 = 0.25;

/// Why settings do not help.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AdviceReason {
    /// So much is alive at one time that no allocator can do with less, or with noticeably less than there is.
    Exhaustion {
        /// The most bytes alive at one time.
        live_peak_bytes: u64,
    },
    /// Memory grows from step to step: settings only postpone the end.
    Leak {
        /// What a step adds.
        #[serde(serialize_with = "digits::whole")]
        bytes_per_step: f64,
        /// Who grows most.
        grower: Option<Grower>,
    },
    /// One request asks for a large part of all memory.
    LargeRequest {
        /// How much it asks for.
        requested_bytes: u64,
        /// Its number, from 0.
        event: u64,
        /// Its call site, if known.
        site: Option<FileText>,
    },
    /// Enough is free, but cached for another stream or waiting for one.
    SideStream {
        /// How much.
        stranded_bytes: u64,
        /// What the failing request asks for.
        requested_bytes: u64,
    },
    /// Enough is free, but in pieces.
    Fragmentation {
        /// What the failing request asks for.
        requested_bytes: u64,
        /// Where free memory lies, most first.
        kept_back: Vec<UnusableMemory>,
    },
}

/// Why less memory than `advice` says does not suffice: the obstacles at the request that fails with `memory_bytes`.
pub(super) fn obstacles(advice: &Advice, memory_bytes: u64, failure: Option<&OomReport>) -> Vec<AdviceReason> {
    let mut reasons = Vec::new();
    let live_peak_bytes = advice.live_peak_bytes;
    let nothing_lost = live_peak_bytes.saturating_add(least_gain(memory_bytes)) >= memory_bytes;
    let exhausted = failure.is_some_and(|failure| failure.cause == OomCause::Exhaustion);
    if nothing_lost || exhausted {
        reasons.push(AdviceReason::Exhaustion { live_peak_bytes });
    }
    let Some(failure) = failure else { return reasons };
    let requested_bytes = failure.requested_bytes;
    if requested_bytes as f64 >= memory_bytes as f64 * LARGE_SHARE {
        reasons.push(AdviceReason::LargeRequest { requested_bytes, event: failure.event, site: failure.site.clone() });
    }
    let on_side_streams =
        |part: &&UnusableMemory| matches!(part.obstacle, Obstacle::OtherStream | Obstacle::PendingEvents);
    let stranded_bytes = failure.kept_back.iter().filter(on_side_streams).map(|part| part.bytes).sum();
    if stranded_bytes >= requested_bytes {
        reasons.push(AdviceReason::SideStream { stranded_bytes, requested_bytes });
    }
    if reasons.is_empty() {
        reasons.push(AdviceReason::Fragmentation { requested_bytes, kept_back: failure.kept_back.clone() });
    }
    reasons
}

impl AdviceQuestion<'_> {
    /// The leak that the source shows under `strategy`, if it does. Too few steps show nothing.
    pub(super) fn leak(&self, strategy: &str) -> Result<Option<AdviceReason>, ThresholdError> {
        let options = ReplayOptions { stop: self.stop, ..ReplayOptions::default() };
        // Its steps are looked for first.
        let watched = ProgressSource::stage(self.trace, self.progress, "looking for a leak", 2);
        let replay = Replay::new(&watched).strategy(strategy).device(self.device.clone()).options(options);
        let found = ObservedSteps::of_replay(&replay, None).and_then(|observed| {
            let finding = leaks::judge(&observed, None, &GrowthThreshold::default())?;
            // Parts of equal length are not steps: a single forward pass of a program that then died grows over them too.
            if finding.verdict != leaks::Verdict::Leak || finding.steps_from == StepsFrom::Windows {
                return Ok(None);
            }
            let grower = observed.growers(self.trace, finding.first_step)?.into_iter().next();
            Ok(Some(AdviceReason::Leak { bytes_per_step: finding.bytes_per_step, grower }))
        });
        match found {
            Ok(leak) => Ok(leak),
            Err(LeakError::Replay(error)) => Err(error.into()),
            // Too short, without steps, or beyond what can be closed: nothing is known about leaks then.
            Err(_) => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::MIB, strategy::Refusal};

    fn failure(requested_mib: u64, cause: OomCause, kept_back: &[(Obstacle, u64)]) -> OomReport {
        OomReport {
            event: 7,
            step: None,
            phase: None,
            site: Some("train.py:12".into()),
            stream: 0,
            requested_bytes: requested_mib * MIB,
            rounded_bytes: requested_mib * MIB,
            asked_bytes: requested_mib * MIB,
            refused_by: Refusal::Limit,
            device_free_bytes: 0,
            device_held_bytes: 0,
            cached_free_bytes: 0,
            largest_free_bytes: None,
            cause,
            kept_back: kept_back
                .iter()
                .map(|&(obstacle, mib)| UnusableMemory { obstacle, bytes: mib * MIB, largest_bytes: mib * MIB })
                .collect(),
        }
    }

    fn kinds(live_mib: u64, memory_mib: u64, failure: Option<&OomReport>) -> Vec<&'static str> {
        let advice = Advice { live_peak_bytes: live_mib * MIB, ..Advice::default() };
        let name = |reason: &AdviceReason| match reason {
            AdviceReason::Exhaustion { .. } => "exhaustion",
            AdviceReason::Leak { .. } => "leak",
            AdviceReason::LargeRequest { .. } => "large",
            AdviceReason::SideStream { .. } => "stream",
            AdviceReason::Fragmentation { .. } => "fragmentation",
        };
        obstacles(&advice, memory_mib * MIB, failure).iter().map(name).collect()
    }

    #[test]
    fn more_alive_than_there_is_memory_is_exhaustion() {
        assert_eq!(kinds(9000, 8000, None), ["exhaustion"]);
        assert_eq!(kinds(7950, 8000, None), ["exhaustion"], "less than the least gain is left");
        assert_eq!(kinds(4000, 8000, Some(&failure(10, OomCause::Exhaustion, &[]))), ["exhaustion"]);
    }

    #[test]
    fn one_request_for_a_quarter_of_all_memory_is_named() {
        let large = failure(2000, OomCause::Fragmentation, &[(Obstacle::SplitRemainder, 3000)]);
        assert_eq!(kinds(4000, 8000, Some(&large)), ["large"]);
        assert_eq!(kinds(4000, 8001, Some(&large)), ["fragmentation"]);
    }

    #[test]
    fn other_streams_memory_counts_if_sufficient() {
        let stranded =
            failure(100, OomCause::Fragmentation, &[(Obstacle::OtherStream, 60), (Obstacle::PendingEvents, 40)]);
        assert_eq!(kinds(4000, 8000, Some(&stranded)), ["stream"]);
        let little = failure(100, OomCause::Fragmentation, &[(Obstacle::OtherStream, 99)]);
        assert_eq!(kinds(4000, 8000, Some(&little)), ["fragmentation"]);
    }
}

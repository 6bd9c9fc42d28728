//! What claims and techniques measure of a recipe: its memory, the times of its steps, and what ranks exchange.

use std::sync::atomic::AtomicBool;

use super::{leaks::LeakError, threshold::ThresholdError};
use crate::{
    base::Nanos,
    device::{DeviceSpec, DeviceSpecError},
    measure::{CaseDetail, CaseLabel, CaseRecord, StepTimes, measure, time_steps},
    models::{Recipe, Workload, WorkloadError},
    replay::{LimitEnforcer, OpenedAllocator, Replay, ReplayError, ReplayOptions, ReplayOutcome},
    strategy::{Silent, StrategySpec},
    trace::{CollectiveKind, MarkKind, Op, Source, TraceError, for_each_event},
};

/// PyTorch's allocator as it is without settings.
pub(super) const CACHING: &str = "caching";
/// The same with expandable segments.
pub(super) const EXPANDABLE: &str = "caching:expandable_segments:True";

/// In the second step optimizer states and gradients exist from the start; the third shows what stays.
pub(super) const STEPS_FOR_MEMORY: &str = "3";
/// Two steps of warm-up and two that count. On a virtual clock all are equal.
pub(super) const SIMULATED_STEPS: u64 = 4;

/// Simulated times are right to 15 % (`tests/integration/techniques_truth.rs`): smaller differences are not reported.
pub(super) const DISTINCT: f64 = 1.15;

/// Why a claim or a technique has no row. That a model does not fit, or does not know a technique, is in its row.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrialError {
    /// A device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// A replay failed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A workload cannot be made. Boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
    /// A search failed.
    #[error(transparent)]
    Threshold(#[from] ThresholdError),
    /// The steps cannot be judged.
    #[error(transparent)]
    Leak(#[from] LeakError),
    /// A replay ended with something worse than an OOM.
    #[error("{workload}: {reason}")]
    Broken {
        /// What was replayed.
        workload: String,
        /// How it ended.
        reason: String,
    },
    /// The user stopped it.
    #[error("stopped before an answer was found")]
    Interrupted,
}

/// The simulated device for what is computed beside measurements on this device.
pub fn simulated_beside(device: &DeviceSpec) -> Result<DeviceSpec, DeviceSpecError> {
    if device.is_simulated() { Ok(device.clone()) } else { "sim".parse() }
}

/// Options of a replay that asks for memory and runs no work.
pub(super) fn without_work(stop: &AtomicBool) -> ReplayOptions<'_> {
    ReplayOptions { without_work: true, stop: Some(stop), ..ReplayOptions::default() }
}

/// Replays a workload without its work: in programs of one stream, memory does not depend on when work ends.
pub(super) fn replay_memory(
    workload: &Workload,
    strategy: &str,
    device: &DeviceSpec,
    limit: Option<u64>,
    stop: &AtomicBool,
) -> Result<(CaseRecord, CaseDetail), TrialError> {
    let spec = StrategySpec::from(strategy);
    let label = CaseLabel { workload: workload.name().to_owned(), strategy: spec.to_string(), ..CaseLabel::default() };
    let replay = Replay::new(workload).strategy(spec).device(device.clone()).limit(limit);
    let OpenedAllocator { mut strategy, mut device, .. } = replay.open()?;
    Ok(measure(&label, workload, &mut *strategy, &mut *device, &without_work(stop)))
}

/// Times the steps of a recipe under PyTorch's allocator, on the whole device or on a card with this memory.
pub(super) fn time_recipe(
    recipe: &Recipe,
    steps: u64,
    device: &DeviceSpec,
    card_bytes: Option<u64>,
    stop: &AtomicBool,
) -> Result<(StepTimes, ReplayOutcome), TrialError> {
    let workload = recipe.clone().with("steps", &steps.to_string()).workload().map_err(Box::new)?;
    let device = device.open()?;
    let limit = card_bytes.map(|bytes| bytes.saturating_sub(device.overhead_bytes()));
    let replay = Replay::new(&workload).limit(limit).enforced_by(LimitEnforcer::Device);
    let mut opened = replay.open_on(device)?;
    let options = ReplayOptions { stop: Some(stop), ..ReplayOptions::default() };
    let timed = time_steps(&workload, &mut *opened.strategy, &mut *opened.device, &options);
    // A failed replay must return its memory, too.
    opened.close(timed.as_ref().map_or(0, |(_, outcome)| outcome.events), &mut Silent)?;
    Ok(timed?)
}

/// The bytes that a rank sends in the last step of a workload. There is one rank here: exchange is counted, not run.
pub(super) fn exchanged_bytes_per_step(source: &dyn Source) -> Result<u64, TraceError> {
    let mut sent = 0.0;
    for_each_event(source, |event, _| {
        match event.op {
            Op::Mark { kind: MarkKind::Step, .. } => sent = 0.0,
            Op::Collective { kind, bytes, ranks, .. } => sent += bytes as f64 * share_sent(kind, ranks),
            _ => {}
        }
        Ok::<(), TraceError>(())
    })?;
    Ok(sent as u64)
}

/// The bytes that a rank sends per byte that it contributes, in the usual ring algorithms.
fn share_sent(kind: CollectiveKind, ranks: u16) -> f64 {
    let ranks = f64::from(ranks.max(1));
    match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        // Every rank passes on the parts of all others.
        CollectiveKind::AllGather => ranks - 1.0,
        CollectiveKind::ReduceScatter => (ranks - 1.0) / ranks,
        CollectiveKind::Broadcast => 1.0,
    }
}

/// The modelled time of an exchange: the link at its full rate, with nothing else running.
pub(super) fn exchange_time(bytes: u64, link_bytes_per_second: u64) -> Nanos {
    Nanos((bytes as f64 / link_bytes_per_second.max(1) as f64 * 1e9) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Recipe;

    #[test]
    fn data_parallel_ranks_send_gradients_almost_twice() {
        let parameters = 162_322_944.0; // of the reference model with its untied head
        let workload = Recipe::named("reference-gpt-163m").unwrap().with("techniques", "ddp:8").workload().unwrap();
        let sent = exchanged_bytes_per_step(&workload).unwrap() as f64;
        assert!((sent / (parameters * 4.0 * 2.0 * 7.0 / 8.0) - 1.0).abs() < 0.01, "{sent} bytes");
        assert_eq!(exchange_time(50_000_000_000, 50_000_000_000), Nanos(1_000_000_000));
    }

    #[test]
    fn sharding_exchanges_as_much_as_data_parallel() {
        let sent = |techniques: &str| {
            let workload =
                Recipe::named("reference-gpt-163m").unwrap().with("techniques", techniques).workload().unwrap();
            exchanged_bytes_per_step(&workload).unwrap() as f64
        };
        // A sum is a scatter and a gather. ZeRO 3 gathers weights once more, in the backward pass.
        let replicated = sent("ddp:8");
        assert!((sent("zero2:8") / replicated - 1.0).abs() < 0.02, "{} {replicated}", sent("zero2:8"));
        assert!((1.2..1.6).contains(&(sent("zero3:8") / replicated)), "{} {replicated}", sent("zero3:8"));
    }

    #[test]
    fn one_rank_sends_nothing() {
        let workload = Recipe::named("reference-gpt-163m").unwrap().workload().unwrap();
        assert_eq!(exchanged_bytes_per_step(&workload).unwrap(), 0);
        assert_eq!(share_sent(CollectiveKind::AllReduce, 1), 0.0);
    }
}

//! Every strategy on realistic patterns, checked call by call: on one stream and on three, with
//! failing driver calls.
//!
//! The conformance suite tests every promise with small scripts; here the promises must hold over
//! whole workloads.

use oomph::{
    base::{GIB, parallel_map},
    device::{
        CallKind, Device, DeviceSpec,
        wrap::{CallFailure, FaultPlan, FaultyDevice},
    },
    models::{Recipe, Workload},
    replay::{self, FailedRequest, LiveBlock, Observer, OnOutOfMemory, ReplayMoment, replay},
    strategy::{
        Context, EventSink, Outcome, Refusal, STRATEGIES, Setup, Silent, Strategy, StrategySpec, wrap::CheckedStrategy,
    },
    suite::all_cores,
};

/// Patterns of all kinds, short enough to be checked call by call.
fn patterns() -> Vec<Workload> {
    let sets: &[(&str, &[(&str, &str)])] = &[
        ("random", &[("allocations", "1200"), ("live_limit", "2GiB")]),
        ("power-law", &[("allocations", "800"), ("max_bytes", "256MiB")]),
        ("sawtooth", &[]),
        ("training", &[("steps", "3"), ("layers", "2"), ("batch", "1"), ("context", "256")]),
        // A producer and two consumers: three streams, with kernels in flight.
        ("streams", &[("rounds", "60"), ("side_streams", "2"), ("max_bytes", "64MiB")]),
        ("stream-mix-4", &[("streams", "3"), ("operations", "800"), ("live", "120")]),
    ];
    let recipe = |name: &str, set: &[(&str, &str)]| {
        set.iter().fold(Recipe::named(name).unwrap(), |recipe, (key, text)| recipe.with(key, text)).seed(3)
    };
    sets.iter().map(|(name, set)| recipe(name, set).workload().unwrap()).collect()
}

fn specs() -> impl Iterator<Item = StrategySpec> {
    STRATEGIES.iter().flat_map(|entry| entry.specs())
}

/// The injected driver error.
const INJECTED: &str = "CUDA_ERROR_INJECTED";

/// Counts the outcomes of requests, to detect a test without effect.
#[derive(Default)]
struct Counter {
    served: u64,
    /// Refused because the strategy cannot serve the size at all, or because of its own limit.
    turned_away: u64,
    out_of_memory: u64,
}

impl EventSink for Counter {}

impl Observer for Counter {
    fn served(&mut self, _: &ReplayMoment<'_>, _: &LiveBlock, _: Outcome) {
        self.served += 1;
    }

    fn out_of_memory(&mut self, _: &ReplayMoment<'_>, report: &FailedRequest) {
        match report.shortage.refused_by {
            Refusal::Size | Refusal::Limit => self.turned_away += 1,
            Refusal::Device => self.out_of_memory += 1,
        }
    }
}

/// Replays a pattern with all checks and returns the findings.
fn watched(spec: &StrategySpec, pattern: &Workload, plan: FaultPlan) -> Vec<String> {
    let expects_ooms = plan != FaultPlan::none();
    let device: Box<dyn Device> = "sim:16GiB".parse::<DeviceSpec>().unwrap().open().unwrap();
    let inner = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
    if inner.requires().check(device.props()).is_err() {
        return Vec::new();
    }
    let mut device = FaultyDevice::with(plan, device);
    let mut strategy = CheckedStrategy::new(inner);
    let mut counter = Counter::default();
    let options = replay::ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..replay::ReplayOptions::default() };
    let outcome = replay(pattern, &mut strategy, &mut device, &options, &mut counter);
    let mut found: Vec<String> = strategy.violations().iter().take(3).map(ToString::to_string).collect();
    match outcome {
        // A driver error other than out of memory ends a replay: it is returned, and no memory may
        // leak.
        Err(error) if error.to_string().contains(INJECTED) => {}
        Err(error) => found.push(error.to_string()),
        Ok(_) if counter.served + counter.turned_away + counter.out_of_memory == 0 => {
            found.push("no request was made".to_owned());
        }
        Ok(_) if !expects_ooms && counter.out_of_memory > 0 => {
            found.push(format!("{} requests failed with memory to spare", counter.out_of_memory));
        }
        Ok(_) => {}
    }
    // Closing makes driver calls too, which the fault plan may fail. Then close is called again.
    for _ in 0..64 {
        let mut cx = Context { device: &mut device, sink: &mut Silent };
        if strategy.close(&mut cx).is_ok() {
            break;
        }
    }
    if device.held_bytes() != 0 {
        found.push(format!("{} bytes are still held after closing", device.held_bytes()));
    }
    found.extend(strategy.violations().iter().take(3).map(|breach| format!("after closing: {breach}")));
    found
}

/// All strategies on all patterns, on all cores.
fn everything(plan: &(dyn Fn() -> FaultPlan + Sync)) -> Vec<String> {
    let patterns = patterns();
    let cases: Vec<(StrategySpec, usize)> =
        specs().flat_map(|spec| (0..patterns.len()).map(move |pattern| (spec.clone(), pattern))).collect();
    let findings = parallel_map(&cases, all_cores(), |(spec, pattern)| {
        let found = watched(spec, &patterns[*pattern], plan());
        let name = oomph::trace::Source::name(&patterns[*pattern]);
        found.into_iter().map(|what| format!("{spec} on {name}: {what}")).collect::<Vec<_>>()
    });
    findings.concat()
}

#[test]
fn strategies_keep_promises_on_all_patterns() {
    let findings = everything(&FaultPlan::none);
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn promises_hold_when_memory_runs_out() {
    // Only calls that allocate: an event call cannot run out of memory.
    let kinds = [CallKind::MemAlloc, CallKind::MemAllocAsync, CallKind::MemCreate];
    let plan =
        || kinds.iter().fold(FaultPlan::none(), |plan, &kind| plan.fail_every(Some(kind), 5, CallFailure::OutOfMemory));
    let findings = everything(&plan);
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn driver_error_loses_nothing() {
    for turn in [7, 40, 200] {
        let findings = everything(&|| FaultPlan::none().fail_nth(None, turn, CallFailure::Driver(INJECTED)));
        assert!(findings.is_empty(), "at call {turn}: {}", findings.join("\n"));
    }
}

#[test]
fn patterns_are_large_enough() {
    assert!(patterns().iter().all(|pattern| oomph::trace::check(pattern).unwrap().peak.bytes < 14 * GIB));
    assert!(patterns().iter().any(|pattern| oomph::trace::check(pattern).unwrap().streams >= 3));
}

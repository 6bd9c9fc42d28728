//! `cargo bench --bench strategies`: one group per registered strategy and variant: the hot pair
//! per size, the random mix per number of live blocks, and the replay of a training trace.

#![expect(clippy::expect_used, reason = "a bench that cannot run must fail with a message")]

mod recipe;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use oomph::{
    device::{
        Device,
        sim::{Profile, SimDevice},
    },
    models::Recipe,
    replay::{Observer, ReplayOptions, replay},
    strategy::{EventSink, STRATEGIES, Setup, StrategySpec},
    trace::Trace,
};
use recipe::{Allocator, ByHandle, HOT, MIX, Mix};

/// Observes nothing, like the untimed pass of a timed case.
struct Unwatched;

impl EventSink for Unwatched {}

impl Observer for Unwatched {}

fn strategies(criterion: &mut Criterion) {
    let training = Recipe::named("training").and_then(|recipe| recipe.workload()).expect("an embedded recipe");
    let training = Trace::read(&training).expect("a generator does not fail");
    for spec in STRATEGIES.iter().flat_map(|entry| entry.specs()) {
        let Some(mut bench) = ByHandle::new(&spec) else { continue };
        let mut group = criterion.benchmark_group(spec.to_string());
        for (bytes, name) in HOT {
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    let block = bench.alloc(black_box(bytes));
                    bench.free(block);
                });
            });
        }
        // Strategies that call the driver for every block would take too long with half a million
        // blocks.
        if spec.name != "direct" {
            for (live, name) in MIX {
                let mut bench = ByHandle::new(&spec).expect("it was built above");
                let mut mix = Mix::new(live);
                mix.warm_up(&mut bench);
                group.bench_function(name, |bencher| bencher.iter(|| mix.step(&mut bench)));
            }
        }
        group.throughput(Throughput::Elements(training.events.len() as u64));
        group.bench_function("replay training", |bencher| bencher.iter(|| replayed(&spec, &training)));
        group.finish();
    }
}

fn replayed(spec: &StrategySpec, trace: &Trace) -> u64 {
    let mut device = SimDevice::new(Profile::h200()).expect("a valid built-in profile");
    let mut strategy = spec.build(&Setup { props: device.props(), limit: None }).expect("a registered strategy");
    let options = ReplayOptions::default();
    replay(trace, &mut *strategy, &mut device, &options, &mut Unwatched).expect("a valid trace").events
}

criterion_group!(benches, strategies);
criterion_main!(benches);

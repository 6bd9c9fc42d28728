//! `cargo bench --bench workloads`: how fast traces are generated, in events per second.

#![expect(clippy::expect_used, reason = "a bench that cannot run must fail with a message")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use oomph::{
    models::{Recipe, Workload},
    trace::Source,
};

fn workloads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("generate");
    let training = [
        ("reference-gpt-163m", ""),
        ("reference-gpt-406m", "amp,ckpt"),
        ("variable-length", "accum4"),
        ("reference-gpt-moe-560m", "amp"),
        ("resnet-50", ""),
        ("resnet-50", "amp"),
    ]
    .map(|(recipe, techniques)| {
        let recipe = Recipe::named(recipe).expect("an embedded recipe").with("steps", "40");
        recipe.with("techniques", techniques)
    });
    let others = [
        ("llm-serve", "requests", "64"),
        ("llm-serve-concatenated", "requests", "32"),
        ("llm-serve-pool", "requests", "64"),
        ("museum-rmm-2039", "rounds", "100"),
        ("museum-pytorch-193400", "cycles", "40000"),
    ]
    .map(|(recipe, length, value)| Recipe::named(recipe).expect("an embedded recipe").with(length, value));
    for recipe in training.into_iter().chain(others) {
        let workload = recipe.workload().expect("sound parameters");
        group.throughput(Throughput::Elements(read(&workload)));
        group.bench_function(workload.name(), |bencher| bencher.iter(|| read(&workload)));
    }
    group.finish();
}

/// Reads a trace to its end and returns its number of events.
fn read(workload: &Workload) -> u64 {
    let mut reader = workload.open().expect("a generator does not fail");
    let mut events = 0;
    while let (chunk @ [_, ..], _) = reader.next_chunk().expect("a generator does not fail") {
        events += chunk.len() as u64;
    }
    events
}

criterion_group!(benches, workloads);
criterion_main!(benches);

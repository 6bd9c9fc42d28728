//! `cargo bench --bench workloads`: how fast stories are made, in events a second.

#![expect(clippy::expect_used, reason = "a bench that cannot run should say so and stop")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use oomph::{
    trace::{CHUNK_EVENTS, Source},
    workload::{Recipe, Workload},
};

fn workloads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("generate");
    for (recipe, techniques) in [("gpt-124m", ""), ("gpt-355m", "amp,ckpt"), ("variable-length", "accum4")] {
        let recipe = Recipe::named(recipe).expect("an embedded recipe").with("steps", "40");
        let workload = recipe.with("techniques", techniques).workload().expect("sound parameters");
        group.throughput(Throughput::Elements(read(&workload)));
        group.bench_function(workload.name(), |bencher| bencher.iter(|| read(&workload)));
    }
    group.finish();
}

/// Reads a story to its end and tells how many events it had.
fn read(workload: &Workload) -> u64 {
    let mut reader = workload.open().expect("a generator does not fail");
    let (mut chunk, mut events) = (Vec::with_capacity(CHUNK_EVENTS), 0);
    loop {
        reader.read(&mut chunk).expect("a generator does not fail");
        if chunk.is_empty() {
            return events;
        }
        events += chunk.len() as u64;
    }
}

criterion_group!(benches, workloads);
criterion_main!(benches);

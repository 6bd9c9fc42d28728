//! `cargo bench --bench advice`: how long `advise` takes for one recording, after parsing. The goal of the project is
//! five seconds for at least thirty settings on two cores.

#![expect(clippy::expect_used, reason = "a bench that cannot run must fail with a message")]

use criterion::{Criterion, criterion_group, criterion_main};
use oomph::{
    answer::advise::{AdviceQuestion, AvailableMemory, advise},
    base::NoProgress,
    device::DeviceSpec,
    suite::SourceSpec,
};

fn advice(criterion: &mut Criterion) {
    let name = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.pickle.xz").to_owned();
    let spec = SourceSpec { name, seed: 1, ..SourceSpec::default() };
    let (recording, _) = spec.verified_recording(&NoProgress).expect("a readable file").expect("a recording");
    let device = DeviceSpec::default();
    let room = Some(AvailableMemory::Limit(7_000_000_000));
    let question = AdviceQuestion { room, jobs: 2, ..AdviceQuestion::new(&recording.trace, "", &device) };
    let mut group = criterion.benchmark_group("advise");
    group.sample_size(10);
    group.bench_function("varlen", |bencher| bencher.iter(|| advise(&question).expect("an answer")));
    group.finish();
}

criterion_group!(benches, advice);
criterion_main!(benches);

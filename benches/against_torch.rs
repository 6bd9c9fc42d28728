//! `cargo bench --bench against_torch`: PyTorch's own allocator and `caching`, one after the other in one run.
//!
//! PyTorch's side is `tools/torch-oracle/bench.cpp`, built by `tools/torch-oracle/build.sh`: its real library over a
//! stand-in runtime. Ours runs by handle, and by address under a lock, which is how PyTorch is called. The two take
//! turns, and the medians of all turns are compared, so that a noisy machine is equally unfair to both.

#![expect(clippy::expect_used, clippy::print_stdout, reason = "a bench prints, and stops where it cannot run")]

mod recipe;

use std::{collections::BTreeMap, env, path::PathBuf, process::Command, time::Instant};

use oomph::strategy::StrategySpec;
use recipe::{Bench, HOT, MIX, MIX_PAIRS, Mix};

/// Turns that each side takes.
const TURNS: usize = 7;
const HOT_PAIRS: u32 = 200_000;

/// Nanoseconds per pair by case.
type Times = BTreeMap<String, Vec<f64>>;

fn main() {
    let torch =
        env::var_os("OOMPH_TORCH_BENCH").map_or_else(|| PathBuf::from("target/torch-oracle/bench"), PathBuf::from);
    if !torch.exists() {
        println!("skipped: {} is not there; tools/torch-oracle/build.sh builds it", torch.display());
        return;
    }
    println!(
        "{:<12} {:<18} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "settings", "case", "PyTorch", "address", "handle", "x addr", "x handle"
    );
    for (name, settings) in [("native", ""), ("expandable", "expandable_segments:True")] {
        let (mut theirs, mut address, mut handle) = (Times::new(), Times::new(), Times::new());
        for _ in 0..TURNS {
            time_torch(&torch, settings, &mut theirs);
            time_ours(&format!("address:caching:{settings}"), &mut address);
            time_ours(&format!("caching:{settings}"), &mut handle);
        }
        for case in HOT.iter().map(|(_, case)| case).chain(MIX.iter().map(|(_, case)| case)) {
            let [theirs, address, handle] = [&mut theirs, &mut address, &mut handle].map(|times| median(times, case));
            println!(
                "{name:<12} {case:<18} {theirs:>6.1} ns {address:>6.1} ns {handle:>6.1} ns {:>8.1} {:>8.1}",
                theirs / address,
                theirs / handle
            );
        }
    }
}

/// Lines of the form `case: nanoseconds`.
fn time_torch(program: &PathBuf, settings: &str, times: &mut Times) {
    let output = Command::new(program).env("PYTORCH_CUDA_ALLOC_CONF", settings).output().expect("it can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (case, time) = line.split_once(": ").expect("case: nanoseconds");
        times.entry(case.to_owned()).or_default().push(time.parse().expect("a number"));
    }
}

fn time_ours(spec: &str, times: &mut Times) {
    let mut bench = Bench::new(&StrategySpec::from(spec)).expect("the simulated device has virtual memory");
    for (bytes, case) in HOT {
        let first = bench.alloc(bytes);
        bench.free(first);
        let began = Instant::now();
        for _ in 0..HOT_PAIRS {
            let block = bench.alloc(bytes);
            bench.free(block);
        }
        let pairs = f64::from(HOT_PAIRS);
        times.entry(case.to_owned()).or_default().push(began.elapsed().as_nanos() as f64 / pairs);
    }
    for (live, case) in MIX {
        let mut bench = Bench::new(&StrategySpec::from(spec)).expect("it was there above");
        let mut mix = Mix::new(live);
        mix.warm_up(&mut bench);
        let began = Instant::now();
        mix.warm_up(&mut bench);
        times.entry(case.to_owned()).or_default().push(began.elapsed().as_nanos() as f64 / MIX_PAIRS as f64);
    }
}

fn median(times: &mut Times, case: &str) -> f64 {
    let times = times.get_mut(case).expect("both sides time the same cases");
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

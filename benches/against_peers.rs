//! `cargo bench --bench against_peers`: PyTorch's own allocator, RMM's and `caching`, one after the other in one run.
//!
//! A peer is a program that prints `case: nanoseconds` and follows the recipe in
//! `tools/allocator_recipe.h`. PyTorch's is `target/torch-oracle/bench` (built by
//! `tools/torch-oracle/build.sh`: the real library over a stand-in runtime) or the program named by
//! `OOMPH_TORCH_BENCH` (built by `build_for_gpu.sh` in the same folder: over the real CUDA
//! runtime). RMM needs a GPU; `OOMPH_RMM_BENCH` names its program (`tools/rmm-bench/build.sh`).
//! `caching` runs twice: by handle, and by address under a lock, which is how PyTorch's allocator
//! is called. All run in turns, so that noise on the machine affects all of them equally. The table has the median of each
//! allocator and the ratio of each turn: its median, least and greatest. `OOMPH_PEER_TURNS` sets the number of turns,
//! `OOMPH_PEER_CASES` the cases (`pairs` of one thread, or `threads`; unset: both), `OOMPH_BENCH_DEVICE` the device of
//! `caching`. `OOMPH_PEER_CSV` names a file that gets one row per allocator, case and turn.

#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench prints its results, and panics if it cannot run"
)]

mod recipe;

use std::{
    collections::BTreeMap,
    env,
    fs::{self, OpenOptions},
    num::NonZeroU64,
    path::{Path, PathBuf},
    process::Command,
    sync::Barrier,
    thread,
    time::Instant,
};

use oomph::{
    base::Address,
    strategy::{
        Caller, Context, Silent, Strategy, StrategySpec,
        wrap::{AddressedStrategy, LockedStrategy},
    },
};
use recipe::{Allocator, ByHandle, HOT, MIX, MIX_PAIRS, Mix, fresh, request, served, steps};

/// The default number of turns.
const TURNS: usize = 7;
const HOT_PAIRS: u32 = 200_000;
/// Numbers of threads that share an allocator, and their case names.
const THREADS: [(usize, &str); 5] =
    [(1, "1 thread"), (2, "2 threads"), (4, "4 threads"), (8, "8 threads"), (16, "16 threads")];
/// Live blocks and timed pairs per thread.
const THREAD_LIVE: usize = 100;
const THREAD_PAIRS: usize = 50_000;

/// Nanoseconds per pair by case, one for each turn.
type Times = BTreeMap<String, Vec<f64>>;

/// An allocator of another project, timed by an external program.
struct Peer {
    name: &'static str,
    program: PathBuf,
    argument: Option<&'static str>,
}

fn main() {
    let turns = env::var("OOMPH_PEER_TURNS").map_or(TURNS, |text| text.parse().expect("a number of turns"));
    let torch =
        env::var_os("OOMPH_TORCH_BENCH").map_or_else(|| PathBuf::from("target/torch-oracle/bench"), PathBuf::from);
    let torch = Peer { name: "PyTorch", program: torch, argument: None };
    let rmm = env::var_os("OOMPH_RMM_BENCH").map(PathBuf::from);
    // Rows of an earlier run would be taken for turns of this one.
    if let Some(path) = env::var_os("OOMPH_PEER_CSV") {
        drop(fs::remove_file(path));
    }
    for (name, settings) in [("native", ""), ("expandable", "expandable_segments:True")] {
        let mut peers: Vec<Peer> = Vec::new();
        if torch.program.exists() {
            peers.push(Peer { program: torch.program.clone(), ..torch });
        } else {
            println!(
                "PyTorch is not timed: {} does not exist; build it with tools/torch-oracle/build.sh",
                torch.program.display()
            );
        }
        // RMM has no such settings: it is timed once, in the table of PyTorch's native settings.
        match &rmm {
            Some(program) if settings.is_empty() => {
                for (name, resource) in [("RMM pool", "pool"), ("RMM arena", "arena"), ("RMM async", "async")] {
                    peers.push(Peer { name, program: program.clone(), argument: Some(resource) });
                }
            }
            Some(_) => {}
            None if settings.is_empty() => println!("RMM is not timed: OOMPH_RMM_BENCH is not set"),
            None => {}
        }
        compare(name, settings, &peers, turns);
    }
}

/// Times all allocators in turns and prints one line per case: the peers' times, ours, and the
/// speed-up of ours by address.
fn compare(name: &str, settings: &str, peers: &[Peer], turns: usize) {
    let mut theirs: Vec<Times> = peers.iter().map(|_| Times::new()).collect();
    let (mut address, mut handle) = (Times::new(), Times::new());
    for turn in 0..turns {
        for (peer, times) in peers.iter().zip(&mut theirs) {
            time_peer(peer, settings, times);
            keep(name, peer.name, turn, times);
        }
        let spec = StrategySpec::from(format!("caching:{settings}").as_str());
        if asked_for("pairs") {
            time_ours(|| ByPointer::new(&spec), &mut address);
            time_ours(|| ByHandle::new(&spec).expect("the device has virtual memory"), &mut handle);
        }
        if asked_for("threads") {
            time_threads(settings, &mut address, &mut handle);
        }
        keep(name, "address", turn, &address);
        keep(name, "handle", turn, &handle);
    }
    let names = || peers.iter().map(|peer| peer.name);
    let times_heads: String = names().chain(["address", "handle"]).map(|name| format!(" {name:>12}")).collect();
    let ratio_heads: String = names().map(|name| format!(" {:>22}", format!("x {name}"))).collect();
    println!("{name:<12} {:<18}{times_heads}{ratio_heads}", "case");
    let hot_and_mix = HOT.iter().map(|(_, case)| *case).chain(MIX.iter().map(|(_, case)| *case));
    for case in hot_and_mix.chain(THREADS.iter().map(|(_, case)| *case)) {
        let Some(ours) = address.get(case) else { continue };
        let shown = |times: Option<&Vec<f64>>| {
            format!(" {:>12}", times.map_or("-".to_owned(), |times| format!("{:.1} ns", quantile(times, 0.5))))
        };
        let all = theirs.iter().chain([&address, &handle]);
        let times: String = all.map(|times| shown(times.get(case))).collect();
        let ratios: String = theirs
            .iter()
            .map(|times| times.get(case).map_or("-".to_owned(), |theirs| ratio(theirs, ours)))
            .map(|ratio| format!(" {ratio:>22}"))
            .collect();
        println!("{name:<12} {case:<18}{times}{ratios}");
    }
}

/// The ratio of each turn: median (least to greatest).
fn ratio(theirs: &[f64], ours: &[f64]) -> String {
    let ratios: Vec<f64> = theirs.iter().zip(ours).map(|(theirs, ours)| theirs / ours).collect();
    let [low, middle, high] = [0.0, 0.5, 1.0].map(|share| quantile(&ratios, share));
    format!("{middle:.1} ({low:.1} to {high:.1})")
}

/// Appends the times of a turn to the file named by `OOMPH_PEER_CSV`.
fn keep(settings: &str, allocator: &str, turn: usize, times: &Times) {
    let Some(path) = env::var_os("OOMPH_PEER_CSV") else { return };
    let file = OpenOptions::new().create(true).append(true).open(path).expect("the file of OOMPH_PEER_CSV");
    let is_new = file.metadata().expect("its length").len() == 0;
    let mut rows = csv::Writer::from_writer(file);
    if is_new {
        rows.write_record(["settings", "allocator", "case", "turn", "ns_per_pair"]).expect("a writable file");
    }
    for (case, times) in times {
        if let Some(time) = times.get(turn) {
            let row = [settings, allocator, case, &turn.to_string(), &format!("{time:.2}")];
            rows.write_record(row).expect("a writable file");
        }
    }
    rows.flush().expect("a writable file");
}

fn asked_for(cases: &str) -> bool {
    env::var("OOMPH_PEER_CASES").map_or(true, |asked| asked == cases)
}

/// Parses lines of the form `case: nanoseconds`. A peer that cannot run is an error: a comparison
/// without it would mislead.
fn time_peer(peer: &Peer, settings: &str, times: &mut Times) {
    let program: &Path = &peer.program;
    let output = Command::new(program)
        .args(peer.argument)
        .env("PYTORCH_CUDA_ALLOC_CONF", settings)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    assert!(output.status.success(), "{}: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (case, time) = line.split_once(": ").expect("case: nanoseconds");
        times.entry(case.to_owned()).or_default().push(time.parse().expect("a number"));
    }
}

/// A strategy called like PyTorch's allocator: under a lock, with frees by pointer only.
struct ByPointer(LockedStrategy<AddressedStrategy<Box<dyn Strategy>>, Silent>);

impl ByPointer {
    fn new(spec: &StrategySpec) -> ByPointer {
        let (strategy, device) = fresh(spec);
        ByPointer(LockedStrategy::new(AddressedStrategy::new(strategy), device, Silent))
    }
}

impl Allocator for ByPointer {
    /// The size of a pointer, with `None` as null.
    type Held = NonZeroU64;

    #[inline]
    fn alloc(&mut self, bytes: u64) -> NonZeroU64 {
        let block = served(self.0.with(|strategy, cx| strategy.alloc(cx, &request(bytes))));
        NonZeroU64::new(block.address.0).expect("a block never has address 0")
    }

    #[inline]
    fn free(&mut self, pointer: NonZeroU64) {
        let free = |strategy: &mut AddressedStrategy<_>, cx: &mut Context<'_>| {
            strategy.free_by_address(cx, Address(pointer.get()), Caller::default())
        };
        self.0.with(free).expect("a live block");
    }
}

impl Drop for ByPointer {
    fn drop(&mut self) {
        self.0.with(|strategy, cx| strategy.close(cx)).expect("the device frees its memory");
    }
}

fn time_ours<A: Allocator>(fresh: impl Fn() -> A, times: &mut Times) {
    let mut note = |case: &str, time: f64| times.entry(case.to_owned()).or_default().push(time);
    let mut allocator = fresh();
    for (bytes, case) in HOT {
        let first = allocator.alloc(bytes);
        allocator.free(first);
        let began = Instant::now();
        for _ in 0..HOT_PAIRS {
            let held = allocator.alloc(bytes);
            allocator.free(held);
        }
        note(case, began.elapsed().as_nanos() as f64 / f64::from(HOT_PAIRS));
    }
    drop(allocator);
    for (live, case) in MIX {
        let mut allocator = fresh();
        let mut mix = Mix::new(live);
        mix.warm_up(&mut allocator);
        let began = Instant::now();
        mix.warm_up(&mut allocator);
        note(case, began.elapsed().as_nanos() as f64 / MIX_PAIRS as f64);
    }
}

/// Threads under one lock, by address and by handle.
fn time_threads(settings: &str, address: &mut Times, handle: &mut Times) {
    let spec = StrategySpec::from(format!("caching:{settings}").as_str());
    let caller = Caller::default();
    for (threads, case) in THREADS {
        let (strategy, device) = fresh(&spec);
        let shared = LockedStrategy::new(AddressedStrategy::new(strategy), device, Silent);
        let alloc = |bytes| served(shared.with(|strategy, cx| strategy.alloc(cx, &request(bytes)))).address;
        let free = |block: Address| {
            shared.with(|strategy, cx| strategy.free_by_address(cx, block, caller)).expect("a live block");
        };
        address.entry(case.to_owned()).or_default().push(mix_in_threads(threads, alloc, free));
        shared.with(|strategy, cx| strategy.close(cx)).expect("the device frees its memory");

        let (strategy, device) = fresh(&spec);
        let shared = LockedStrategy::new(strategy, device, Silent);
        let alloc = |bytes| served(shared.with(|strategy, cx| strategy.alloc(cx, &request(bytes))));
        let free = |block| {
            shared.with(|strategy, cx| strategy.free(cx, block, caller)).expect("a live block");
        };
        handle.entry(case.to_owned()).or_default().push(mix_in_threads(threads, alloc, free));
        shared.with(|strategy, cx| strategy.close(cx)).expect("the device frees its memory");
    }
}

/// The time per pair as one thread sees it, including waiting for the others.
fn mix_in_threads<B: Copy>(threads: usize, alloc: impl Fn(u64) -> B + Sync, free: impl Fn(B) + Sync) -> f64 {
    let together = Barrier::new(threads + 1);
    thread::scope(|scope| {
        for number in 0..threads as u64 {
            let (alloc, free, together) = (&alloc, &free, &together);
            scope.spawn(move || {
                let steps = steps(THREAD_LIVE, THREAD_PAIRS, 42 + number);
                let mut places: Vec<Option<B>> = vec![None; THREAD_LIVE];
                let mut pass = || {
                    for &(place, bytes) in &steps {
                        if let Some(block) = places[place].take() {
                            free(block);
                        }
                        places[place] = Some(alloc(bytes));
                    }
                };
                pass();
                together.wait();
                pass();
                together.wait();
                // No thread frees its blocks before all have read the time.
                together.wait();
                places.into_iter().flatten().for_each(free);
            });
        }
        together.wait();
        let began = Instant::now();
        together.wait();
        let took = began.elapsed().as_nanos() as f64;
        together.wait();
        took / THREAD_PAIRS as f64
    })
}

/// The value below which this share of the times lies.
fn quantile(times: &[f64], share: f64) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * share).round() as usize]
}

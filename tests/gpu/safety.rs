//! Failures on a real GPU: lost contexts, killed processes, time-outs, memory taken by others.
//! Without a GPU, each test prints why it is skipped and passes.
//!
//! On a GPU machine: `cargo test --release --test gpu safety:: -- --nocapture`. If the tests were
//! built elsewhere, `OOMPH_BINARY` is the path of the program.

#![cfg(all(feature = "cuda", target_os = "linux"))]
use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use crate::one_gpu::gpu;
use oomph::{
    base::{MIB, Nanos, NoProgress, StreamId, Work},
    device::{Compute, Device, DeviceSpec, Patterned, Patterns, PoolId, PoolSettings, VirtualMemory, cuda::CudaDevice},
    measure::{CaseLabel, Status},
    suite::{
        self, Case, CaseOutcome, CaseProgress, CaseRunner, Isolation, SourceSpec, WorkerProcess,
        worker::{carry_out, read_case},
    },
};
use tempfile::TempDir;

/// Tolerance for free memory after everything is freed: the driver keeps some for itself.
const SLACK: u64 = 64 * MIB;
/// The driver needs time to clean up after a process.
const PATIENCE: Duration = Duration::from_secs(60);

fn program() -> PathBuf {
    env::var_os("OOMPH_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_oomph").into(), PathBuf::from)
}

/// Arguments that make this test binary run one of its ignored tests only. With more than one
/// thread the test's name is not printed on the line of its output.
fn as_program(test: &str) -> [&str; 6] {
    [test, "--exact", "--ignored", "--nocapture", "--test-threads", "2"]
}

fn case(workload: &str, set: &[(&str, &str)], strategy: &str) -> Case {
    let set = set.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let origin = SourceSpec { name: workload.to_owned(), set, seed: 1, ..SourceSpec::default() };
    let source = origin.open(&NoProgress).unwrap();
    Case {
        label: CaseLabel {
            suite: "safety".to_owned(),
            workload: source.name().to_owned(),
            strategy: strategy.to_owned(),
            device: "cuda".to_owned(),
            ..CaseLabel::default()
        },
        source: source.into(),
        origin,
        strategy: strategy.into(),
        device: "cuda".parse().unwrap(),
        on_out_of_memory: Default::default(),
        pace: Default::default(),
        without_work: false,
        timed: false,
        most_lives: oomph::measure::lifetimes::MOST_LIVES,
        scope: Default::default(),
        threads: Vec::new(),
        sharing: Default::default(),
        timeout: Some("2m".parse().unwrap()),
    }
}

/// Sends cases of one strategy to a worker that corrupts its own GPU context, and all others to a
/// normal one.
struct OneCorrupted<'a> {
    corrupted: &'a str,
    normal: WorkerProcess<'a>,
    corrupting: WorkerProcess<'a>,
}

impl CaseRunner for OneCorrupted<'_> {
    fn run(&self, case: &Case) -> CaseOutcome {
        if case.label.strategy == self.corrupted { self.corrupting.run(case) } else { self.normal.run(case) }
    }
}

#[test]
fn sticky_error_fails_one_case() {
    let Some((device, _guard)) = gpu() else { return };
    drop(device);
    let long = [("steps", "100000")];
    let cases = [
        case("checkerboard", &[], "direct"),
        case("training", &long, "caching"),
        case("checkerboard", &[], "caching:expandable_segments:True"),
    ];
    assert!(cases.iter().all(|case| Isolation::Auto.isolates(case)));
    let runner = OneCorrupted {
        corrupted: "caching",
        normal: WorkerProcess { program: program(), arguments: vec!["worker".into()], stop: None },
        corrupting: WorkerProcess {
            program: env::current_exe().unwrap(),
            arguments: as_program("safety::worker_that_corrupts_its_context").map(Into::into).to_vec(),
            stop: None,
        },
    };
    let mut outcomes = Vec::new();
    suite::run(&cases, &runner, 1, &AtomicBool::new(false), |progress| {
        if let CaseProgress::Finished(_, outcome) = progress {
            println!("{}: {} {}", outcome.record.case_id, outcome.record.status.name(), outcome.record.reason);
            outcomes.push((outcome.record.status, outcome.record.reason));
        }
    });
    let statuses: Vec<Status> = outcomes.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [Status::Completed, Status::Error, Status::Completed]);
    let reason = &outcomes[1].1;
    assert!(reason.starts_with("event "), "{reason}");
    assert!(reason.ends_with(": CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost"), "{reason}");
}

#[test]
#[ignore = "started as a worker by another test"]
fn worker_that_corrupts_its_context() {
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    // Half a second into the case, a kernel in the same context writes to memory that was unmapped
    // while the kernel was queued.
    thread::spawn(|| {
        let mut device = CudaDevice::open(0).unwrap();
        let (stream, bytes) = (device.stream_create(0).unwrap(), 2 * MIB);
        let (address, physical) = (device.reserve(bytes).unwrap(), device.create(bytes).unwrap());
        device.map(address, bytes, physical).unwrap();
        device.set_access(address, bytes).unwrap();
        let block = Patterned { address, bytes, key: 7 };
        device.fill_blocks(stream, &[block]).unwrap();
        thread::sleep(Duration::from_millis(500));
        device.launch(stream, &Work::Spin { nanos: Nanos(200_000_000) }, &[]).unwrap();
        device.fill_blocks(stream, &[block]).unwrap();
        device.unmap(address, bytes).unwrap();
        let _ = device.synchronize();
    });
    let outcome = carry_out(read_case(&line).unwrap(), &AtomicBool::new(false)).unwrap();
    let mut out = io::stdout().lock();
    writeln!(out, "\n{outcome}").unwrap();
    out.flush().unwrap();
    // Exit before the test harness prints anything more.
    process::exit(0);
}

/// A run on the GPU in its own folder, long enough to be stopped halfway.
fn long_run(folder: &TempDir) -> Child {
    let suite = "question = 'when?'\nseeds = [1, 2]\n[[group]]\nworkloads = ['training']\nstrategies = ['caching']\n\
                 set = { steps = 100000 }\n";
    fs::write(folder.path().join("long.toml"), suite).unwrap();
    Command::new(program())
        .args(["run", "./long.toml", "--device", "cuda", "--output", "out"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn free(device: &mut CudaDevice) -> u64 {
    device.memory_info().unwrap().free
}

fn wait_until(what: &str, mut seen: impl FnMut() -> bool) {
    let began = Instant::now();
    while !seen() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Stops a run halfway and checks that the GPU's memory is free again.
fn memory_comes_back_after(what: &str, end: impl FnOnce(&mut Child)) {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let folder = TempDir::new().unwrap();
    let before = free(&mut watcher);
    let mut run = long_run(&folder);
    // More than a context takes, so the case itself is running.
    wait_until("the run takes memory", || free(&mut watcher) + 2048 * MIB < before);
    end(&mut run);
    run.wait().unwrap();
    wait_until("its memory is free again", || free(&mut watcher) + SLACK >= before);
    println!("after {what}: {before} bytes were free, {} are", free(&mut watcher));
}

fn signal(name: &str, child: &Child) {
    assert!(Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn two_signals_free_all_memory() {
    memory_comes_back_after("SIGTERM, twice", |run| {
        signal("TERM", run);
        thread::sleep(Duration::from_millis(300));
        signal("TERM", run);
    });
}

#[test]
fn killed_run_frees_all_memory() {
    memory_comes_back_after("SIGKILL", |run| run.kill().unwrap());
}

#[test]
fn one_signal_finishes_the_case_and_frees_memory() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let folder = TempDir::new().unwrap();
    let before = free(&mut watcher);
    let mut run = Command::new(program())
        .args(["run", "quick", "--device", "cuda", "--output", "out"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let rows = |folder: &Path| fs::read_to_string(folder.join("out/runs.csv")).map_or(0, |text| text.lines().count());
    wait_until("the first case is done", || rows(folder.path()) > 1);
    signal("TERM", &run);
    assert_eq!(run.wait().unwrap().code(), Some(130));
    let text = fs::read_to_string(folder.path().join("out/runs.csv")).unwrap();
    assert!(!text.contains(",error,") && !text.contains(",interrupted,"), "{text}");
    wait_until("its memory is free again", || free(&mut watcher) + SLACK >= before);
    println!(
        "one SIGTERM: {} cases were kept; {before} bytes were free, {} are",
        rows(folder.path()) - 1,
        free(&mut watcher)
    );
}

#[test]
fn time_out_frees_all_memory() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let before = free(&mut watcher);
    let mut endless = case("training", &[("steps", "100000000")], "caching");
    endless.timeout = Some("5s".parse().unwrap());
    let worker = WorkerProcess { program: program(), arguments: vec!["worker".into()], stop: None };
    let record = worker.run(&endless).record;
    assert_eq!((record.status, record.reason.as_str()), (Status::Error, "timed out after 5s"));
    wait_until("its memory is free again", || free(&mut watcher) + SLACK >= before);
}

#[test]
fn querying_the_gpu_leaves_no_context() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let before = free(&mut watcher);
    // In its own process, because this one already has a context.
    let mut looking = Command::new(env::current_exe().unwrap())
        .args(as_program("safety::process_that_queries_the_gpu_and_waits"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(looking.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line == "looked"), "the process did not print 'looked'");
    let meanwhile = free(&mut watcher);
    drop(looking.stdin.take());
    looking.wait().unwrap();
    println!("{before} bytes were free, {meanwhile} with a process that queried the device");
    assert!(meanwhile + 256 * MIB >= before, "the process holds a context");
}

#[test]
#[ignore = "the other process of another test"]
fn process_that_queries_the_gpu_and_waits() {
    let spec: DeviceSpec = "cuda".parse().unwrap();
    spec.check().unwrap();
    println!("{}\nlooked", spec.device_name().unwrap());
    // Block until the other side closes the pipe.
    io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn default_pool_is_trimmed_on_drop() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let before = free(&mut watcher);
    let mut device = CudaDevice::open(0).unwrap();
    let Ok(pools) = device.stream_ordered_pools() else {
        println!("skipped: this device has no stream-ordered pools");
        return;
    };
    let hoarding = PoolSettings { release_threshold: u64::MAX, ..PoolSettings::DRIVER_DEFAULT };
    pools.pool_configure(PoolId(0), hoarding).unwrap();
    let address = pools.alloc_async(PoolId(0), 1024 * MIB, StreamId::DEFAULT).unwrap();
    pools.free_async(address, StreamId::DEFAULT).unwrap();
    device.synchronize().unwrap();
    assert!(free(&mut watcher) + 512 * MIB < before, "the pool keeps the memory");
    drop(device);
    assert!(free(&mut watcher) + SLACK >= before, "{before} bytes were free, {} are", free(&mut watcher));
}

#[test]
fn foreign_memory_is_named_in_the_oom_row() {
    let Some((mut hog, _guard)) = gpu() else { return };
    let folder = TempDir::new().unwrap();
    // The limit is the whole device, but most of the memory is taken.
    let total = hog.props().total_bytes;
    let taken = free(&mut hog).saturating_sub(4096 * MIB);
    let address = hog.alloc(taken).unwrap();
    let limit = format!("{total}B");
    let output = Command::new(program())
        .args(["replay", "training", "-s", "direct", "-s", "caching", "--device", "cuda", "--limit", &limit])
        .args(["--format", "json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    hog.free(address).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for row in document["rows"].as_array().unwrap() {
        println!("{}: {} {}", row["strategy"], row["status"], row["reason"]);
        assert_eq!(row["status"], "oom", "{row}");
        let reason = row["reason"].as_str().unwrap();
        assert!(reason.starts_with("the device refused ") && reason.contains("less than the limit"), "{row}");
    }
}

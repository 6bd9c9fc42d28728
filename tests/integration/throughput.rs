//! Timed cases as a user runs them: kernels on several streams, and threads that share a strategy.

use std::fs;

use crate::command::run;
use oomph::{
    device::{
        CallKind, Device,
        sim::{Profile, SimDevice},
    },
    models::Recipe,
    replay::{Observer, ReplayOptions, replay},
    strategy::{EventSink, Setup, StrategyEvent, StrategySpec},
};
use tempfile::TempDir;

/// Counts frees that waited for another stream.
#[derive(Default)]
struct Deferred(u64);

impl EventSink for Deferred {
    fn event(&mut self, event: StrategyEvent) {
        self.0 += u64::from(matches!(event, StrategyEvent::FreeCompleted { .. }));
    }
}

impl Observer for Deferred {}

#[test]
fn cross_stream_blocks_are_freed_late() {
    let deferred = |name: &str| {
        let mut device = SimDevice::new(Profile::h200()).unwrap();
        let mut strategy = StrategySpec::from("caching").build(&Setup { props: device.props(), limit: None }).unwrap();
        let mut deferred = Deferred::default();
        let workload = Recipe::named(name).unwrap().workload().unwrap();
        replay(&workload, &mut *strategy, &mut device, &ReplayOptions::default(), &mut deferred).unwrap();
        assert!(device.ledger().of(CallKind::Launch).count >= 20_000, "{name}: kernels are in flight");
        // More queries than waiting frees: some answers were "not ready".
        let queries = device.ledger().of(CallKind::EventQuery).count;
        assert!(deferred.0 == 0 || queries > deferred.0, "{name}: {queries} queries");
        deferred.0
    };
    assert_eq!(deferred("stream-mix-1"), 0);
    for name in ["stream-mix-4", "stream-mix-16"] {
        let frees = deferred(name);
        assert!((3_000..5_000).contains(&frees), "{name}: a fifth of 20,000 frees, not {frees}");
    }
}

#[test]
fn suite_times_cases_per_thread_count() {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'how fast?'\n[[group]]\nworkloads = ['mix-100']\nstrategies = ['null', 'caching']\n\
                 set = { operations = 2000 }\ntimed = true\nthreads = [1, 3]\n";
    fs::write(folder.path().join("fast.toml"), suite).unwrap();
    let (out, _) = run(&folder, &["run", "fast.toml", "--output", "fast"], 0);
    assert!(out.contains("threads") && out.contains("under one lock"), "{out}");

    let timings = fs::read_to_string(folder.path().join("fast/timings.csv")).unwrap();
    let mut lines = timings.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let column = |name: &str| header.iter().position(|&heading| heading == name).unwrap();
    let rows: Vec<[&str; 3]> =
        lines.map(|row| ["strategy", "threads", "operations"].map(|name| row[column(name)])).collect();
    let expected = [
        ["null", "", "4000"],
        ["null", "1", "4000"],
        ["null", "3", "12000"],
        ["caching", "", "4000"],
        ["caching", "1", "4000"],
        ["caching", "3", "12000"],
    ];
    assert_eq!(rows, expected);
    let runs = fs::read_to_string(folder.path().join("fast/runs.csv")).unwrap();
    assert_eq!(runs.lines().count(), 3, "a header and one row per case for any number of threads");
}

#[test]
fn timed_replay_with_threads() {
    let folder = TempDir::new().unwrap();
    let replay = ["replay", "mix-100", "--set", "operations=2000", "--strategy", "caching", "--threads", "1,2"];
    let (out, _) = run(&folder, &replay, 0);
    assert!(out.contains("peak") && out.contains("events/s") && out.contains("under one lock"), "{out}");
    for (more, words) in [(["--format", "csv"], "timings.csv"), (["--threads", "0"], "--threads")] {
        let (out, err) = run(&folder, &[&replay[..6], &["--threads", "2"], &more].concat(), 2);
        assert_eq!(out, "", "{err}");
        assert!(err.contains(words), "{err}");
    }
}

//! Runs `oomph threshold` and threshold suites as a user does.

use std::fs;

use crate::command::run;
use serde_json::Value;
use tempfile::TempDir;

const SMALL: [&str; 4] = ["--set", "rounds=1", "--set", "blocks=128"];

fn json(folder: &TempDir, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--format", "json"]].concat();
    serde_json::from_str(&run(folder, &arguments, 0).0).unwrap()
}

#[test]
fn threshold_is_the_least_limit() {
    let folder = TempDir::new().unwrap();
    let found = json(&folder, &[&["threshold", "checkerboard", "--strategy", "caching"], &SMALL[..]].concat());
    let row = &found["rows"][0];
    let bytes = row["needed_bytes"].as_u64().unwrap();
    assert_eq!(row["needed_card_bytes"].as_u64(), Some(bytes + row["overhead_bytes"].as_u64().unwrap()));
    assert_eq!((row["status"].as_str(), row["stable"].as_bool()), (Some("found"), Some(true)));
    assert!(row["tried"].as_array().unwrap().len() > 16);
    assert_eq!(row["failure"]["kept_back"][0]["obstacle"], "split_remainder");
    for (limit, status) in [(bytes, "completed"), (bytes - (2 << 20), "oom")] {
        let limit = limit.to_string();
        let replay = ["replay", "checkerboard", "--strategy", "caching", "--repeat", "3", "--limit", &limit];
        let replayed = json(&folder, &[&replay[..], &SMALL[..]].concat());
        assert_eq!(replayed["rows"][0]["status"], status, "{limit}");
    }
}

#[test]
fn threshold_table_explains_the_failure_below() {
    let folder = TempDir::new().unwrap();
    let (out, _) = run(&folder, &[&["threshold", "checkerboard"], &SMALL[..]].concat(), 0);
    for words in [
        "smallest",
        "context and libraries",
        "enforced by the allocator",
        "3 rounds",
        "one page less fails",
        "exhaustion",
    ] {
        assert!(out.contains(words), "'{words}' is missing in {out}");
    }
    let device = [&["threshold", "checkerboard", "--smallest", "card", "--repeat", "1"], &SMALL[..]].concat();
    let (out, _) = run(&folder, &device, 0);
    assert!(out.contains("the driver refuses; 1 round"), "{out}");
}

#[test]
fn the_largest_batch_grows_with_the_memory() {
    let folder = TempDir::new().unwrap();
    let arguments = [
        "threshold",
        "training",
        "--set",
        "steps=1",
        "--strategy",
        "caching",
        "--repeat",
        "1",
        "--probes",
        "2",
        "--largest",
        "batch",
        "--card",
        "8GiB,24GiB",
    ];
    let found = json(&folder, &arguments);
    let batch = |row: usize| found["rows"][row]["largest"].as_u64().unwrap();
    assert!(batch(0) < batch(1), "{found}");
    let (out, _) = run(&folder, &arguments, 0);
    assert!(out.contains(&format!("batch = {}", batch(1))), "{out}");
}

#[test]
fn invalid_questions_are_refused() {
    let folder = TempDir::new().unwrap();
    for (arguments, words) in [
        (&["threshold", "training", "--largest", "batches", "--card", "8GiB"][..], "did you mean 'batch'?"),
        (&["threshold", "training", "--largest", "batch"], "--card"),
        (&["threshold", "training", "--limit", "8GiB"], "without --largest, the smallest limit is what is searched"),
        (&["threshold", "training", "--card", "8GiB,24GiB"], "the search uses one --card"),
        (&["threshold", "checkerbord"], "did you mean 'checkerboard'?"),
        (&["threshold", "checkerboard", "--strategy", "cachin"], "did you mean 'caching'?"),
        (&["threshold", "checkerboard", "--repeat", "0"], "--repeat"),
    ] {
        let (out, err) = run(&folder, arguments, 2);
        assert!(out.is_empty() && err.contains(words), "{arguments:?}: {err}");
    }
    let (_, err) = run(&folder, &["threshold", "checkerboard", "--device", "cuda:4000"], 103);
    assert!(err.contains("cuda:4000"), "{err}");
}

#[test]
fn threshold_suite_can_be_resumed() {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'how much?'\nkind = 'threshold'\n[[group]]\nworkloads = ['checkerboard']\n\
                 strategies = ['direct', 'caching']\nrepeat = 2\nset = { rounds = 1, blocks = 128 }\n";
    fs::write(folder.path().join("mine.toml"), suite).unwrap();
    let (out, _) = run(&folder, &["run", "mine.toml", "--output", "a"], 0);
    assert!(out.contains("2 rounds back to back") && out.contains("results: a"), "{out}");
    let read = |name: &str| fs::read_to_string(folder.path().join("a").join(name)).unwrap();
    let (csv, details) = (read("thresholds.csv"), read("thresholds.json"));
    assert_eq!(csv.lines().count(), 3);
    assert!(read("summary.md").contains("## Thresholds"));
    // The first result exists, the second does not.
    let mut torn: Value = serde_json::from_str(&details).unwrap();
    torn["rows"].as_array_mut().unwrap().pop();
    fs::write(folder.path().join("a/thresholds.json"), torn.to_string()).unwrap();
    run(&folder, &["run", "mine.toml", "--resume", "a"], 0);
    assert_eq!((read("thresholds.csv"), read("thresholds.json")), (csv, details));
}

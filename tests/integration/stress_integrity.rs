//! `oomph stress integrity` and `oomph stress soak` as users run them.

use std::{fs, path::Path};

use assert_cmd::Command;
use serde_json::Value;

/// Runs the program, checks its exit code, and returns its output.
fn oomph(arguments: &[&str], folder: &Path, code: i32) -> String {
    let output = Command::cargo_bin("oomph").unwrap().args(arguments).current_dir(folder).output().unwrap();
    let text = String::from_utf8_lossy(if code == 0 { &output.stdout } else { &output.stderr }).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text} {}", String::from_utf8_lossy(&output.stderr));
    text
}

fn says(printed: &str, words: &str) {
    assert!(printed.contains(words), "{printed}");
}

fn rows(text: &str) -> Vec<Value> {
    let printed: Value = serde_json::from_str(text).unwrap();
    assert_eq!(printed["schema"], 2);
    printed["rows"].as_array().unwrap().clone()
}

#[test]
fn contents_survive_under_every_strategy() {
    let folder = tempfile::tempdir().unwrap();
    let printed = oomph(&["stress", "integrity", "--stress-count", "300", "--format", "json"], folder.path(), 0);
    let rows = rows(&printed);
    assert!(rows.len() >= 15, "{}", rows.len());
    for row in rows {
        assert_eq!(row["verdict"], "passed", "{row}");
        assert!(row["blocks"].as_u64().unwrap() >= 300, "{row}");
        assert!(row["compared_bytes"].as_u64().unwrap() > 1 << 20, "{row}");
        assert_eq!(row["damaged"], 0);
    }
    assert!(!folder.path().join("stress-failures").exists());
}

#[test]
fn integrity_slices_accumulate_with_new_seeds() {
    let folder = tempfile::tempdir().unwrap();
    let slice =
        ["stress", "integrity", "-s", "caching", "-s", "null", "--stress-count", "500", "--state", "state.json"];
    let first = oomph(&slice, folder.path(), 0);
    says(&first, "In 1 slice: ");
    says(&first, "its memory is imaginary");
    says(&oomph(&slice, folder.path(), 0), "In 2 slices: ");
    let state: Value = serde_json::from_slice(&fs::read(folder.path().join("state.json")).unwrap()).unwrap();
    let slices = state["slices"].as_array().unwrap();
    assert_eq!(slices.len(), 2);
    assert_ne!(slices[0]["seed"], slices[1]["seed"]);
    let caching = &state["strategies"][0];
    assert_eq!((&caching["strategy"], &caching["slices"]), (&"caching".into(), &2.into()));
    assert!(caching["blocks"].as_u64().unwrap() >= 1_000, "{caching}");
    let other = ["stress", "soak", "-s", "caching", "--stress-count", "1", "--state", "state.json"];
    says(&oomph(&other, folder.path(), 2), "slices of stress integrity");
}

#[test]
fn integrity_plays_a_trace_until_time_is_up() {
    let folder = tempfile::tempdir().unwrap();
    oomph(&["convert", "stream-mix-4", "mix.oomph", "--set", "operations=300"], folder.path(), 0);
    let play = ["stress", "integrity", "-s", "bfc", "--trace", "mix.oomph", "--format", "json"];
    assert_eq!(rows(&oomph(&play, folder.path(), 0))[0]["blocks"], 300);
    let timed = ["stress", "integrity", "-s", "caching", "--stress-duration", "1s", "--sizes", "small"];
    says(&oomph(&timed, folder.path(), 0), "blocks and");
    says(&oomph(&["stress", "integrity", "--sizes", "huge"], folder.path(), 2), "512..2MiB");
}

#[test]
fn soak_reports_held_memory_on_failing_driver() {
    let folder = tempfile::tempdir().unwrap();
    let soak = ["stress", "soak", "-s", "caching", "-s", "oomph", "--stress-count", "1000", "--fault-one-in", "100"];
    for row in rows(&oomph(&[&soak[..], &["--format", "json"]].concat(), folder.path(), 0)) {
        assert_eq!((&row["verdict"], &row["violations"]), (&"passed".into(), &0.into()), "{row}");
        assert!(row["faults"].as_u64().unwrap() > 10, "{row}");
        assert!(row["requested_mean_bytes"].as_u64().unwrap() > 200 << 20, "{row}");
    }
    says(&oomph(&["stress", "soak", "--trace", "x"], folder.path(), 2), "stress integrity --trace");
}

#[test]
fn integrity_on_a_missing_gpu_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    says(&oomph(&["stress", "integrity", "--device", "cuda:4000"], folder.path(), 103), "not available");
}

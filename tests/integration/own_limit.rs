//! Recordings as users have them: without the table that names their memory limit, without a history, or with a short one.

use std::{fs, path::Path};

use crate::command::run;
use oomph::{base::NoProgress, trace::torch::Snapshot};
use serde_json::Value;
use tempfile::TempDir;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded");

/// Memory of the GPU on which the recordings were made.
const DEVICE_BYTES: f64 = 150_109_880_320.0;

/// A copy of a recording in a folder without `snapshots.csv`.
fn copied(folder: &TempDir, name: &str) -> String {
    let copy = folder.path().join(format!("{name}.pickle.xz"));
    fs::copy(Path::new(RECORDED).join(format!("{name}.pickle.xz")), &copy).unwrap();
    copy.display().to_string()
}

/// A changed copy of a recording.
fn changed(folder: &TempDir, name: &str, change: impl FnOnce(&mut Snapshot)) -> String {
    let path = Path::new(RECORDED).join(format!("{name}.pickle.xz"));
    let mut snapshot = Snapshot::open(&path, &NoProgress).unwrap();
    change(&mut snapshot);
    let copy = folder.path().join("changed.pickle");
    snapshot.write(fs::File::create(&copy).unwrap(), &NoProgress).unwrap();
    copy.display().to_string()
}

fn row(arguments: &[&str]) -> Value {
    let (out, _) = run(".", &[arguments, &["--format", "json"]].concat(), 0);
    serde_json::from_str::<Value>(&out).unwrap()["rows"][0].take()
}

/// A figure of PyTorch.
fn measured(name: &str, column: &str) -> u64 {
    let mut table = csv::Reader::from_path(format!("{RECORDED}/snapshots.csv")).unwrap();
    let headers = table.headers().unwrap().clone();
    let place = headers.iter().position(|header| header == column).unwrap();
    let row = table.records().map(Result::unwrap).find(|row| &row[0] == name).unwrap();
    row[place].parse().unwrap()
}

#[test]
fn advice_names_the_own_limit_first() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["oom_base", "varlen_cap042", "varlen_cap042.exp", "varlen_cap042.gc", "varlen_cap047.split64"] {
        let path = copied(&folder, name);
        let (text, _) = run(".", &["advise", &path, "--top", "3"], 0);
        let first = text.lines().next().unwrap();
        let died = measured(name, "ooms") > 0;
        let named = first.contains("your own memory limit refused this request: the GPU had 1");
        assert_eq!(named, died, "{name}: {first}");
        assert!(text.contains("recorded with") && !text.contains("0x"), "{name}: {text}");
        let recommended_in_vain = |line: &str| line.contains(" NO ") && line.contains("recommended");
        assert!(!text.lines().any(recommended_in_vain), "{name}: {text}");
    }
}

#[test]
fn advice_is_for_the_inferred_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = copied(&folder, "varlen_cap042.split64");
    let advice = row(&["advise", &path]);
    assert_eq!(advice["recorded_limit"]["fraction"], 0.042, "the only fraction with three decimals");
    assert_eq!(advice["limit_bytes"], (0.042 * DEVICE_BYTES) as u64);
    assert_eq!((&advice["fits_now"], &advice["confidence"]["verdict"]), (&false.into(), &"exact".into()));
    let path = copied(&folder, "varlen_cap042");
    let advice = row(&["advise", &path]);
    assert_eq!((&advice["recorded_limit"]["fraction"], &advice["fits"]), (&Value::Null, &true.into()));
    assert_eq!(advice["recommended"], "expandable_segments:True");
    // 0.042 of the memory refused it with expandable segments, too, but later.
    let (text, _) = run(".", &["advise", &copied(&folder, "varlen_cap042.exp"), "--top", "1"], 0);
    assert!(!text.contains("another setting avoids this OOM. "), "{text}");
}

#[test]
fn advise_and_verify_agree_under_a_given_limit() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["varlen_cap042.gc", "varlen_cap052.gc"] {
        let path = copied(&folder, name);
        let fraction: f64 = format!("0.{}", &name[10..13]).parse().unwrap();
        for (limit, is_exact) in [((fraction * DEVICE_BYTES) as u64, true), (4 << 30, false)] {
            let limit = limit.to_string();
            let code = if is_exact { 0 } else { 100 };
            let (text, _) = run(".", &["verify", &path, "--limit", &limit], code);
            assert_eq!(text.starts_with("EXACT"), is_exact, "{name}: {text}");
        }
        let limit = ((fraction * DEVICE_BYTES) as u64).to_string();
        let advice = row(&["advise", &path, "--limit", &limit]);
        assert_eq!(advice["confidence"]["verdict"], "exact", "{name}");
        assert_eq!(advice["recorded_limit"]["bytes"].as_u64(), limit.parse().ok(), "{name}");
    }
}

#[test]
fn replays_repeat_the_limited_run() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["oom_base", "varlen_cap042.split64", "varlen_cap047.split64", "varlen_cap052.gc"] {
        let path = copied(&folder, name);
        let inspected = row(&["inspect", &path, "--summary"]);
        let summary = &inspected["memory_summary"];
        for (ours, column) in [
            (&summary["allocated_bytes"]["peak"], "peak_allocated"),
            (&summary["reserved_bytes"]["peak"], "peak_reserved"),
            (&summary["reserved_bytes"]["current"], "final_reserved"),
            (&summary["retries"], "alloc_retries"),
            (&summary["ooms"], "ooms"),
        ] {
            assert_eq!(ours, &measured(name, column), "{name}: {column}");
        }
        assert!(inspected["peak"]["bytes"].as_u64().unwrap() <= measured(name, "peak_allocated"), "{name}");
        let replayed = row(&["replay", &path, "--strategy", "caching:recorded"]);
        assert_eq!(replayed["peak_reserved_bytes"], measured(name, "peak_reserved"), "{name}");
    }
}

#[test]
fn replay_shows_the_recorded_settings() {
    let folder = tempfile::tempdir().unwrap();
    let path = copied(&folder, "varlen_cap042.split64");
    let (text, notes) = run(".", &["replay", &path], 0);
    for strategy in ["caching:max_split_size_mb:64", "caching ", "caching:expandable_segments:True", "direct"] {
        assert!(text.contains(strategy), "{strategy}: {text}");
    }
    assert!(notes.contains("replayed under the limit of the recorded program"), "{notes}");
    let (_, notes) = run(".", &["replay", "checkerboard", "--strategy", "caching:recorded"], 2);
    assert!(notes.contains("caching:recorded takes the settings of a PyTorch snapshot"), "{notes}");
}

#[test]
fn leaks_are_judged_under_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = copied(&folder, "varlen_cap047.split64");
    let (out, _) = run(".", &["leaks", &path, "--format", "json", "--fail-on", "never"], 0);
    let report: Value = serde_json::from_str(&out).unwrap();
    let steps = report["rows"][0]["per_step"].as_array().unwrap();
    let most = steps.iter().filter_map(|step| step["reserved_bytes"].as_u64()).max().unwrap();
    assert!(most <= measured("varlen_cap047.split64", "peak_reserved"), "{most}");
}

#[test]
fn recordings_without_history_get_no_advice() {
    let folder = tempfile::tempdir().unwrap();
    for kept in [0, 1, 30] {
        let path = changed(&folder, "varlen_stack", |snapshot| {
            let entries = &mut snapshot.traces[0];
            entries.drain(..entries.len() - kept);
        });
        let (text, _) = run(".", &["advise", &path], 109);
        assert!(text.contains("cannot tell: it") && text.contains("oomph record"), "{kept}: {text}");
        assert!(!text.contains("export") && !text.contains("keep your"), "{kept}: {text}");
    }
    let path = changed(&folder, "varlen_stack", |snapshot| {
        let entries = &mut snapshot.traces[0];
        entries.drain(..entries.len() / 2);
    });
    run(".", &["advise", &path, "--top", "1"], 0);
}

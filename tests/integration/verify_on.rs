//! `oomph verify --on`: without a GPU, the simulated device is compared with itself, except for the
//! driver.

use std::{fs, path::Path, process::Stdio, thread, time::Duration};

use crate::command::{end_within, oomph, run, signal};
use serde_json::Value;
use tempfile::TempDir;

/// Runs `verify`, checks the exit code, and returns standard output and standard error.
#[track_caller]
fn verify(arguments: &[&str], code: i32) -> (String, String) {
    run(".", &[&["verify"], arguments].concat(), code)
}

#[track_caller]
fn rows(arguments: &[&str]) -> Vec<Value> {
    let (out, _) = verify(&[arguments, &["--format", "json"]].concat(), 0);
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["schema"], 2);
    value["rows"].as_array().unwrap().clone()
}

/// Every event decided the same, every peak the same.
#[track_caller]
fn assert_agrees(row: &Value) {
    assert_eq!(row["finding"], "agrees", "{row}");
    assert_eq!(row["events"], row["events_agreed"], "{row}");
    assert_eq!(row["events_agreed_share"], 1.0, "{row}");
    assert_eq!(row["peak_reserved_bytes"], row["simulated_peak_reserved_bytes"], "{row}");
    assert_eq!(row["ooms"], row["simulated_ooms"], "{row}");
    assert_eq!(row["peak_reserved_difference_share"], 0.0, "{row}");
}

#[test]
fn recordings_agree_on_the_simulated_device() {
    let names = ["fuzz1", "fuzz2.exp", "infer_kv", "streams.gc", "varlen_cap042", "oom_base"];
    let paths = names.map(|name| format!("workloads/recorded/{name}.pickle.xz"));
    let arguments: Vec<&str> = ["--on", "sim"].into_iter().chain(paths.iter().map(String::as_str)).collect();
    let rows = rows(&arguments);
    assert_eq!(rows.len(), names.len() * 3, "three strategies each");
    rows.iter().for_each(assert_agrees);
    let of = |source: &str, strategy: &str| {
        let mut found = rows.iter().filter(|row| row["workload"] == source && row["strategy"] == strategy);
        found.next().unwrap().clone()
    };
    let capped = of("varlen_cap042.pickle.xz", "caching");
    assert_eq!(capped["limit_bytes"], 6_304_614_973u64, "0.042 of the device, as recorded");
    assert!(capped["retries"].as_u64().unwrap() > 0 && capped["ooms"].as_u64().unwrap() > 0, "{capped}");
    assert_eq!(of("fuzz1.pickle.xz", "direct")["limit_bytes"], Value::Null);
}

#[test]
fn workloads_of_a_suite_agree_under_its_limits() {
    let rows = rows(&["--on", "sim", "--suite", "quick"]);
    assert_eq!(rows.len(), 7 * 3, "six workloads, one of them also with 6 GiB");
    rows.iter().for_each(assert_agrees);
    let busy = rows.iter().find(|row| row["workload"] == "streams" && row["strategy"] == "caching").unwrap();
    assert!(busy["peak_active_bytes"].as_u64() < busy["peak_reserved_bytes"].as_u64(), "{busy}");
}

#[test]
fn agreement_table_explains_async() {
    let (out, err) = verify(&["--on", "sim", "checkerboard", "-s", "caching", "-s", "async"], 0);
    let line = |strategy: &str| out.lines().find(|line| line.contains(&format!(" {strategy} "))).unwrap().to_owned();
    assert!(line("caching").contains("100 %"), "{out}");
    assert!(line("async").contains(" - ") && line("async").contains(" 0 %"), "{out}");
    assert!(out.contains("async: the driver's pool decides"), "{out}");
    assert!(out.contains("2 cases; 10260 of 10260 events decided the same (100 %)"), "{out}");
    assert_eq!(err, "");
}

#[test]
fn other_device_differs_in_peaks_only() {
    let rows = rows(&["--on", "sim", "--card", "6GiB", "training", "-s", "caching"]);
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((&row["finding"], &row["events_agreed_share"]), (&"agrees".into(), &1.0.into()));
    assert_eq!((&row["device"], &row["simulated_device"]), (&"sim".into(), &"sim:6GiB".into()));
    assert!(row["peak_reserved_difference_share"].as_f64().unwrap() < -0.1, "{row}");
    assert!(row["ooms"] == 0 && row["simulated_ooms"].as_u64().unwrap() > 0, "{row}");
}

#[test]
fn filters_choose_cases_and_csv_has_a_row_each() {
    let (out, _) =
        verify(&["--on", "sim", "random", "checkerboard", "--filter", "random/direct", "--format", "csv"], 0);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 2, "{out}");
    assert!(lines[0].starts_with("schema,case_id,workload,strategy,device,"), "{out}");
    assert!(lines[1].starts_with("2,verify/random/direct@sim#1,random,direct,sim,"), "{out}");
    verify(&["--on", "sim", "random", "--filter", "nothing"], 4);
}

#[test]
fn missing_gpu_is_an_error_not_simulated() {
    let (out, err) = verify(&["--on", "cuda:4000", "training"], 103);
    assert!(out.is_empty() && err.contains("'cuda:4000' is not available"), "{out}{err}");
}

#[test]
fn slips_are_refused_before_anything_runs() {
    for (arguments, words) in [
        (&["--on", "sim", "trainin"][..], "did you mean 'training'?"),
        (&["--on", "sim", "nowhere/run.pickle"], "no such file"),
        (&["--on", "sim", "training", "-s", "cashing"], "did you mean 'caching'?"),
        (&["--on", "sim", "--suite", "quik"], "did you mean 'quick'?"),
        (&["--on", "sim", "--device", "cuda:4000", "training"], "the simulated side"),
        (&["--strategy", "caching", "snapshot.pickle"], "--on"),
        (&["--on", "sim"], "required"),
    ] {
        let (out, err) = verify(arguments, 2);
        assert!(out.is_empty() && err.contains(words), "{arguments:?}: '{words}' is missing in: {err}");
    }
}

#[test]
fn unreadable_file_loses_only_its_rows() {
    let folder = TempDir::new().unwrap();
    let damaged = folder.path().join("damaged.pickle");
    let recording = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded/oom_base.pickle.xz"));
    let recording = recording.unwrap();
    fs::write(&damaged, &recording[..recording.len() / 2]).unwrap();
    let (out, _) = verify(&["--on", "sim", damaged.to_str().unwrap(), "checkerboard", "-s", "direct"], 2);
    let failed = out.lines().find(|line| line.contains("damaged.pickle")).unwrap();
    assert!(failed.contains("failed"), "{out}");
    assert!(out.contains("2 cases") && out.contains("; 1 failed"), "{out}");
}

#[test]
fn first_signal_prints_completed_cases() {
    let folder = TempDir::new().unwrap();
    let recipe = |name: &str, generator: &str, setting: &str| {
        let text = format!("generator = '{generator}'\npurpose = 'a test'\norigin = 'a test'\n[set]\n{setting}\n");
        fs::write(folder.path().join(name), text).unwrap();
    };
    recipe("short.toml", "transformer", "steps = 1\nlayers = 1");
    recipe("endless.toml", "transformer", "steps = 100000000");
    let child = oomph(&folder)
        .args(["verify", "--on", "sim", "short.toml", "endless.toml", "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_secs(2));
    signal("TERM", child.id().into());
    let output = end_within(Duration::from_secs(20), child);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(130), "{out}{err}");
    let shown: Value = serde_json::from_str(&out).unwrap();
    let shown = shown["rows"].as_array().unwrap();
    assert_eq!(shown.len(), 3, "{out}");
    shown.iter().for_each(assert_agrees);
    assert!(err.contains("interrupted after 3 of 6 cases"), "{err}");
}

#[test]
fn a_plain_verification_is_a_csv_table_too() {
    let (out, _) = verify(&["workloads/recorded/oom_base.pickle.xz", "--format", "csv"], 0);
    let mut table = csv::Reader::from_reader(out.as_bytes());
    let headings = table.headers().unwrap().clone();
    let row = table.records().next().unwrap().unwrap();
    let cell = |name: &str| &row[headings.iter().position(|heading| heading == name).unwrap()];
    assert_eq!((cell("result"), cell("ooms"), cell("reason")), ("exact", "1", ""));
    assert_eq!(cell("entries"), cell("entries_agreed"));
}

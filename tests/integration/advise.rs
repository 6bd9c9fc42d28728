//! `oomph advise` and its suites: against real runs that failed or completed, and as a command.

use std::path::Path;

use crate::command::run;
use oomph::{
    answer::advise::{Advice, AdviceQuestion, AvailableMemory, Confidence, advise},
    base::NoProgress,
    device::DeviceSpec,
    replay::verify::Companion,
    suite::{CaseSettings, SourceSpec, SuiteFile},
    trace::{Trace, torch::Recording},
};
use serde_json::Value;

/// Memory of the GPU on which the recordings were made.
const DEVICE_BYTES: f64 = 150_109_880_320.0;

fn path_of(name: &str) -> String {
    format!("{}/workloads/recorded/{name}.pickle.xz", env!("CARGO_MANIFEST_DIR"))
}

/// The requests of the run without a cap, and how well the model reproduces it.
fn varlen() -> (Trace, Confidence) {
    let spec = SourceSpec { name: path_of("varlen"), seed: 1, ..SourceSpec::default() };
    let (recording, verification) = spec.verified_recording(&NoProgress).unwrap().unwrap();
    (recording.trace, Confidence::of(&verification))
}

fn ask(trace: &Trace, room: Option<AvailableMemory>) -> Advice {
    let device: DeviceSpec = "sim".parse().unwrap();
    advise(&AdviceQuestion { room, jobs: 2, ..AdviceQuestion::new(trace, "", &device) }).unwrap()
}

#[test]
fn advice_matches_twelve_capped_runs() {
    let (trace, confidence) = varlen();
    assert!(
        matches!(confidence, Confidence::Exact { entries, blocks_before: 0 } if entries > 50_000),
        "{confidence:?}"
    );
    let mut wrong = Vec::new();
    for share in ["042", "047", "052"] {
        let companion = |run: &str| Companion::beside(Path::new(&path_of(run))).unwrap().unwrap();
        let fraction = companion(&format!("varlen_cap{share}")).memory_fraction.unwrap();
        let advice = ask(&trace, Some(AvailableMemory::Limit((fraction * DEVICE_BYTES) as u64)));
        // In 0.042 of the memory no setting is enough.
        let best = advice.closest.as_ref().unwrap_or(&advice.recommended);
        assert_eq!((&**best, advice.closest.is_some()), ("expandable_segments:True", share == "042"), "{share}");
        assert!(advice.saved_bytes > 500 << 20, "{share}: {}", advice.saved_bytes);
        for setting in ["", ".exp", ".split64", ".gc"] {
            let run = format!("varlen_cap{share}{setting}");
            let settings = Recording::open(path_of(&run), None, &NoProgress).unwrap().settings.conf().to_owned();
            let survived = companion(&run).counters.ooms == Some(0);
            let row = advice.tried.iter().find(|row| row.settings.as_deref() == Some(&settings)).unwrap();
            if row.fits != Some(survived) {
                wrong.push(format!("{run}: {row:?}, survived: {survived}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// PyTorch's error message: 8.57 GiB requested, 8.30 GiB free, 120.83 GiB allocated, 9.92 GiB
/// reserved but unallocated. With expandable segments the program ran all its steps on that GPU,
/// with 130.1 GiB reserved.
#[test]
fn advice_for_a_recorded_oom() {
    let path = format!("{}/tools/recording/run-0.pickle.xz", env!("CARGO_MANIFEST_DIR"));
    let (text, _) = run(".", &["advise", &path, "--format", "json"], 0);
    let report: Value = serde_json::from_str(&text).unwrap();
    let advice = &report["rows"][0];
    let gib = |value: &Value| (value.as_f64().unwrap() / f64::from(1 << 30) * 100.0).round() / 100.0;
    let end = &advice["dead_end"];
    let sizes = ["requested_bytes", "device_free_bytes", "allocated_bytes"].map(|size| gib(&end[size]));
    assert_eq!(sizes, [8.57, 8.3, 120.83]);
    assert_eq!(gib(&end["reserved_bytes"]), 130.75, "120.83 and 9.92");
    assert_eq!(advice["recommended"], "expandable_segments:True");
    assert_eq!((&advice["fits_now"], &advice["fits"]), (&Value::Bool(false), &Value::Bool(true)));
    assert!(gib(&advice["needed_bytes"]) < 130.1, "the real run reserved 130.1 GiB");
    assert_eq!(advice["confidence"]["verdict"], "exact");
    let (text, _) = run(".", &["advise", &path, "--top", "1"], 0);
    assert!(text.contains("it ran out of memory; another setting avoids this OOM"), "{text}");
    assert!(text.contains("not in the recording"), "{text}");
}

#[test]
fn advise_prints_line_and_json() {
    let recording = path_of("varlen_stack");
    let (out, _) = run(".", &["advise", &recording, "--card", "24GiB"], 0);
    assert!(out.contains("EXACT") && out.contains("smallest limit"), "{out}");
    let (out, _) = run(".", &["advise", &recording, "--format", "json"], 0);
    let row = &serde_json::from_str::<Value>(&out).unwrap()["rows"][0];
    assert!(row["recommended"].is_string() && row["saved_bytes"].is_u64(), "{row}");
    assert_eq!(row["confidence"]["verdict"], "exact");
    assert!(row["tried"].as_array().unwrap().len() >= 40);
}

#[test]
fn named_workload_advice_names_a_leak() {
    let small = ["--set", "layers=1", "--set", "steps=10"];
    let (out, _) = run(".", &[&["advise", "leak-cache"], &small[..]].concat(), 0);
    assert!(out.contains("but it leaks") && out.contains("not a PyTorch snapshot"), "{out}");
    let (out, _) = run(".", &[&["advise", "leak-cache", "--format", "csv"], &small[..]].concat(), 0);
    assert!(out.lines().count() > 40 && out.starts_with("source,settings,strategy"), "{out}");
}

#[test]
fn too_little_memory_is_exhaustion() {
    let (out, _) = run(".", &["advise", "checkerboard", "--set", "rounds=1", "--limit", "64MiB"], 0);
    assert!(out.contains("no setting") && out.contains("true exhaustion"), "{out}");
}

#[test]
fn mistakes_are_explained() {
    for (arguments, words) in [
        (&["advise", "checkerbord"][..], "did you mean 'checkerboard'?"),
        (&["advise", "checkerboard", "--current", "expandable_segment:True"], "did you mean 'expandable_segments'?"),
        (
            &["advise", "checkerboard", "--card", "590MiB"],
            "590 MiB is too small for a card: the context and libraries alone take",
        ),
        (&["advise"], "SNAPSHOT"),
    ] {
        let (out, err) = run(".", arguments, 2);
        assert!(out.is_empty() && err.contains(words), "{arguments:?}: {err}");
    }
}

#[test]
fn settings_and_leaks_suites_expand() {
    let settings = CaseSettings { device: "sim".parse().unwrap(), limit: None, seed: None, timeout: None };
    let cases = |name: &str| SuiteFile::load(name).unwrap().cases(&settings).unwrap();
    let recorded = cases("settings");
    assert!(recorded.len() >= 72 * 30, "{}", recorded.len());
    assert!(recorded.iter().any(|case| case.label.workload == "varlen.pickle.xz"));
    let leaks = cases("leaks");
    assert!(leaks.iter().all(|case| case.label.limit.is_some() && !case.label.workload.contains("fixed")));
    for fault in ["leak-outputs", "leak-slow", "val-with-grad"] {
        assert!(leaks.iter().any(|case| case.label.workload.starts_with(fault)), "{fault}");
    }
}

#[test]
fn suite_without_recordings_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let (_, err) = run(&folder, &["run", "settings"], 2);
    assert!(err.contains("workloads/recorded/*.pickle.xz") && err.contains("current folder"), "{err}");
}

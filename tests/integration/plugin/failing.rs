//! Plugins that hang or crash their process, while loading or in any of their functions: the result
//! names the plugin, the call and how it ended, and no process is left behind.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use super::{PluginFixture, plugin};

const PLACES: [(&str, &str); 6] = [
    ("load", "loading it"),
    ("alloc", "alloc of "),
    ("free", "free of "),
    ("reset", "reset"),
    ("reserved", "reserved"),
    ("limit", "limit of 68719476736 bytes"),
];
/// A plugin's limit function is called only if there is a limit.
const LIMITED: [&str; 2] = ["--limit", "64GiB"];
/// Ways to end a process: the C statement, and oomph's description.
const ENDS: [(&str, &str); 4] = [
    ("*(volatile int *)8=0", "was ended by SIGSEGV, a bad memory access"),
    ("abort()", "was ended by SIGABRT, an abort"),
    ("exit(3)", "ended with exit code 3"),
    ("__builtin_trap()", "was ended by SIGILL, an illegal instruction"),
];
const HANG: &str = "for(;;)pause()";

/// Processes whose working folder is the test's folder, which all processes started by the test
/// share. A process that was just killed gets a moment to end.
fn left_behind(fixture: &PluginFixture) -> Vec<String> {
    let began = Instant::now();
    loop {
        let still_there = working_in(fixture);
        if still_there.is_empty() || began.elapsed() > Duration::from_secs(1) {
            return still_there;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn working_in(fixture: &PluginFixture) -> Vec<String> {
    let folder = fixture.0.path().canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let works_here = |process: &PathBuf| fs::read_link(process.join("cwd")).is_ok_and(|place| place == folder);
    processes
        .filter(works_here)
        .map(|process| fs::read_to_string(process.join("cmdline")).unwrap_or_default())
        .collect()
}

/// The reason of the failed case, and the exit code.
fn replayed(fixture: &PluginFixture, strategy: &str, options: &[&str]) -> (String, Option<i32>) {
    let strategies = ["replay", "training", "--strategy", "null", "--strategy", strategy, "--format", "json"];
    let output = fixture.oomph(&[&strategies, options].concat());
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &document["rows"][1];
    assert_eq!(row["status"], "error", "{row}");
    assert_eq!(left_behind(fixture), Vec::<String>::new());
    (row["reason"].as_str().unwrap().to_owned(), output.status.code())
}

#[test]
fn replay_names_the_call_and_end_of_a_plugin() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (place, call) in PLACES {
        for (way, end) in ENDS {
            let library = fixture.failing(place, way);
            let (reason, code) = replayed(&fixture, &plugin(&library), &LIMITED);
            assert!(reason.starts_with(&format!("plugin {}: {call}", library.display())), "{place} {way}: {reason}");
            assert!(reason.ends_with(&format!(": the worker process {end}")), "{place} {way}: {reason}");
            assert_eq!(code, Some(104));
        }
    }
}

#[test]
fn hanging_plugin_call_is_named() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (place, call) in PLACES {
        let library = fixture.failing(place, HANG);
        let (reason, code) = replayed(&fixture, &format!("{},timeout:600ms", plugin(&library)), &LIMITED);
        assert!(reason.starts_with(&format!("plugin {}: {call}", library.display())), "{reason}");
        assert!(reason.ends_with(" did not return within 600ms"), "{reason}");
        assert_eq!(code, Some(104));
    }
}

#[test]
fn hanging_case_hits_the_case_timeout_first() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = plugin(&fixture.failing("alloc", HANG));
    let (reason, code) = replayed(&fixture, &library, &["--case-timeout", "2s"]);
    assert_eq!((reason.as_str(), code), ("timed out after 2s", Some(104)));
}

#[test]
fn failure_of_the_only_case_is_not_bad_usage() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (library, options, words) in [
        (fixture.failing("alloc", "abort()"), &[][..], "SIGABRT"),
        (fixture.failing("alloc", HANG), &["--case-timeout", "1s"], "timed out after 1s"),
    ] {
        let strategy = plugin(&library);
        let output = fixture.oomph(&[&["replay", "training", "--strategy", &strategy], options].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("failed: replay/training/plugin:") && said.contains(words), "{said}");
        assert_eq!(output.status.code(), Some(104), "{said}");
    }
}

/// The output of `stress`, and its exit code.
fn stressed(fixture: &PluginFixture, kind: &str, strategy: &str, options: &[&str]) -> (String, Option<i32>) {
    let output = fixture.oomph(&[&["stress", kind, "--strategy", strategy, "--format", "json"], options].concat());
    assert_eq!(left_behind(fixture), Vec::<String>::new());
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (said, output.status.code())
}

#[test]
fn stress_shrinks_plugin_crash_and_hang() {
    let Some(fixture) = PluginFixture::open() else { return };
    let hang = (HANG, "did not return within 3s");
    let [load, alloc, free, ..] = PLACES;
    for ((place, call), (way, end)) in
        [(load, ENDS[0]), (load, hang), (alloc, ENDS[2]), (alloc, hang), (free, ENDS[1]), (free, hang)]
    {
        let library = fixture.failing(place, way);
        let strategy = format!("{},timeout:3s", plugin(&library));
        let output = fixture.oomph(&["stress", "properties", "--strategy", &strategy, "--format", "json"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!((output.status.code(), left_behind(&fixture)), (Some(106), Vec::new()), "{place} {way}: {said}");
        let row = &serde_json::from_str::<serde_json::Value>(&said).unwrap()["rows"][0];
        let detail = row["detail"].as_str().unwrap();
        assert!(detail.contains(&format!("plugin {}: {call}", library.display())), "{place} {way}: {detail}");
        assert!(detail.ends_with(end), "{place} {way}: {detail}");
        let fewest = match place {
            "load" => 0..=1,
            "free" => 1..=2,
            // The plugin fails in the third request.
            _ => 3..=3,
        };
        assert!(fewest.contains(&row["trace_events"].as_u64().unwrap()), "{place} {way}: {row}");
        let trace = row["trace"].as_str().unwrap();
        let (again, code) = stressed(&fixture, "properties", &strategy, &["--trace", trace]);
        assert!(code == Some(106) && again.contains(call), "{place} {way}: {again}");
    }
}

#[test]
fn misuse_reports_plugin_crash_as_damage() {
    let Some(fixture) = PluginFixture::open() else { return };
    for (way, end) in [ENDS[1], (HANG, "did not return within 500ms")] {
        let strategy = format!("{},timeout:500ms", plugin(&fixture.failing("free", way)));
        let (said, code) = stressed(&fixture, "misuse", &strategy, &["--misuse", "zero-bytes"]);
        assert!(code == Some(106) && said.contains("corrupts"), "{way}: {said}");
        assert!(said.contains("free of ") && said.contains(end), "{way}: {said}");
    }
}

#[test]
fn dead_plugin_with_live_child_is_dead() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = fixture.failing("alloc", "if(fork()){fputs(\"farewell\\n\",stderr);_exit(3);}for(;;)pause()");
    let strategy = format!("{},timeout:1s", plugin(&library));
    let (said, code) = stressed(&fixture, "properties", &strategy, &[]);
    assert_eq!(code, Some(106), "{said}");
    assert!(said.contains(" bytes: its process ended with exit code 3; its last words: farewell"), "{said}");
}

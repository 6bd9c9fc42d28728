//! Plugins that hang or bring their process down, while they are loaded or in any of their functions: the result names
//! the plugin, the call and the way it ended, and no process is left behind.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use super::{Workshop, plugin};

const PLACES: [(&str, &str); 6] = [
    ("load", "loading it"),
    ("alloc", "alloc of "),
    ("free", "free of "),
    ("reset", "reset"),
    ("reserved", "reserved"),
    ("limit", "limit of 68719476736 bytes"),
];
/// A plugin is told a limit only where there is one.
const LIMITED: [&str; 2] = ["--limit", "64GiB"];
/// Ways to end, as C writes them, and in words.
const ENDS: [(&str, &str); 4] = [
    ("*(volatile int *)8=0", "was ended by SIGSEGV, a bad memory access"),
    ("abort()", "was ended by SIGABRT, an abort"),
    ("exit(3)", "ended with exit code 3"),
    ("__builtin_trap()", "was ended by SIGILL, an illegal instruction"),
];
const HANG: &str = "for(;;)pause()";

/// Processes that work in the workshop's folder, as all do that a test starts. One that was just killed has a moment.
fn left_behind(workshop: &Workshop) -> Vec<String> {
    let began = Instant::now();
    loop {
        let still_there = working_in(workshop);
        if still_there.is_empty() || began.elapsed() > Duration::from_secs(1) {
            return still_there;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn working_in(workshop: &Workshop) -> Vec<String> {
    let folder = workshop.0.path().canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let works_here = |process: &PathBuf| fs::read_link(process.join("cwd")).is_ok_and(|place| place == folder);
    processes
        .filter(works_here)
        .map(|process| fs::read_to_string(process.join("cmdline")).unwrap_or_default())
        .collect()
}

/// The reason of the failed case, and the exit code.
fn replayed(workshop: &Workshop, strategy: &str, options: &[&str]) -> (String, Option<i32>) {
    let strategies = ["replay", "training", "--strategy", "null", "--strategy", strategy, "--format", "json"];
    let output = workshop.oomph(&[&strategies, options].concat());
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &document["rows"][1];
    assert_eq!(row["status"], "error", "{row}");
    assert_eq!(left_behind(workshop), Vec::<String>::new());
    (row["reason"].as_str().unwrap().to_owned(), output.status.code())
}

#[test]
fn a_replay_names_the_call_in_which_a_plugin_died_and_how() {
    let Some(workshop) = Workshop::open() else { return };
    for (place, call) in PLACES {
        for (way, end) in ENDS {
            let library = workshop.failing(place, way);
            let (reason, code) = replayed(&workshop, &plugin(&library), &LIMITED);
            assert!(reason.starts_with(&format!("plugin {}: {call}", library.display())), "{place} {way}: {reason}");
            assert!(reason.ends_with(&format!(": the worker process {end}")), "{place} {way}: {reason}");
            assert_eq!(code, Some(104));
        }
    }
}

#[test]
fn hanging_plugin_call_is_named() {
    let Some(workshop) = Workshop::open() else { return };
    for (place, call) in PLACES {
        let library = workshop.failing(place, HANG);
        let (reason, code) = replayed(&workshop, &format!("{},timeout:600ms", plugin(&library)), &LIMITED);
        assert!(reason.starts_with(&format!("plugin {}: {call}", library.display())), "{reason}");
        assert!(reason.ends_with(" did not return within 600ms"), "{reason}");
        assert_eq!(code, Some(104));
    }
}

#[test]
fn a_case_that_hangs_runs_out_of_time_before_its_call_does() {
    let Some(workshop) = Workshop::open() else { return };
    let library = plugin(&workshop.failing("alloc", HANG));
    let (reason, code) = replayed(&workshop, &library, &["--case-timeout", "2s"]);
    assert_eq!((reason.as_str(), code), ("timed out after 2s", Some(104)));
}

/// What `stress` has to say, and its exit code.
fn stressed(workshop: &Workshop, kind: &str, strategy: &str, options: &[&str]) -> (String, Option<i32>) {
    let output = workshop.oomph(&[&["stress", kind, "--strategy", strategy, "--format", "json"], options].concat());
    assert_eq!(left_behind(workshop), Vec::<String>::new());
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (said, output.status.code())
}

#[test]
fn stress_shrinks_plugin_crash_and_hang() {
    let Some(workshop) = Workshop::open() else { return };
    let hang = (HANG, "did not return within 3s");
    let [load, alloc, free, ..] = PLACES;
    for ((place, call), (way, end)) in
        [(load, ENDS[0]), (load, hang), (alloc, ENDS[2]), (alloc, hang), (free, ENDS[1]), (free, hang)]
    {
        let library = workshop.failing(place, way);
        let strategy = format!("{},timeout:3s", plugin(&library));
        let output = workshop.oomph(&["stress", "properties", "--strategy", &strategy, "--format", "json"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!((output.status.code(), left_behind(&workshop)), (Some(106), Vec::new()), "{place} {way}: {said}");
        let row = &serde_json::from_str::<serde_json::Value>(&said).unwrap()["rows"][0];
        let detail = row["detail"].as_str().unwrap();
        assert!(detail.contains(&format!("plugin {}: {call}", library.display())), "{place} {way}: {detail}");
        assert!(detail.ends_with(end), "{place} {way}: {detail}");
        let fewest = match place {
            "load" => 0..=1,
            "free" => 1..=2,
            // The third request is the one.
            _ => 3..=3,
        };
        assert!(fewest.contains(&row["trace_events"].as_u64().unwrap()), "{place} {way}: {row}");
        let trace = row["trace"].as_str().unwrap();
        let (again, code) = stressed(&workshop, "properties", &strategy, &["--trace", trace]);
        assert!(code == Some(106) && again.contains(call), "{place} {way}: {again}");
    }
}

#[test]
fn misuse_of_a_plugin_that_dies_or_hangs_is_told_as_damage() {
    let Some(workshop) = Workshop::open() else { return };
    for (way, end) in [ENDS[1], (HANG, "did not return within 500ms")] {
        let strategy = format!("{},timeout:500ms", plugin(&workshop.failing("free", way)));
        let (said, code) = stressed(&workshop, "misuse", &strategy, &["--misuse", "double-free"]);
        assert!(code == Some(106) && said.contains("corrupts"), "{way}: {said}");
        assert!(said.contains("free of ") && said.contains(end), "{way}: {said}");
    }
}

#[test]
fn dead_plugin_with_live_child_is_dead() {
    let Some(workshop) = Workshop::open() else { return };
    let library = workshop.failing("alloc", "if(fork()){fputs(\"farewell\\n\",stderr);_exit(3);}for(;;)pause()");
    let strategy = format!("{},timeout:1s", plugin(&library));
    let (said, code) = stressed(&workshop, "properties", &strategy, &[]);
    assert_eq!(code, Some(106), "{said}");
    assert!(said.contains(" bytes: its process ended with exit code 3; its last words: farewell"), "{said}");
}

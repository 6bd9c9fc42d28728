//! Worker processes that are killed, stopped, timed out and orphaned.

#![cfg(target_os = "linux")]
use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::Duration,
};

use crate::command::{self, TIME_LIMIT, end_within, signal, wait_until};
use tempfile::TempDir;

/// A workload that practically never ends.
const ENDLESS: &str =
    "question = 'when?'\n[[group]]\nworkloads = ['training']\nstrategies = ['null']\nset = { steps = 100000000 }\n";
const SHORT: &str = "[[group]]\nworkloads = ['checkerboard']\nstrategies = ['direct', 'caching']\n";

fn oomph(folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = command::oomph(folder);
    command.args(arguments);
    command
}

fn output_of(folder: &TempDir, arguments: &[&str]) -> Output {
    oomph(folder, arguments).output().unwrap()
}

/// Starts the program in its own process group, as a shell does.
fn start(folder: &TempDir, arguments: &[&str]) -> Child {
    let mut command = command::with_default_signals(&oomph(folder, arguments));
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The worker of a process, once it has read its case: it then has a listening thread and a working
/// thread.
fn worker_of(parent: &Child) -> u32 {
    wait_until("a worker runs", || {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        processes.into_iter().find(|&process| {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let after_name = stat.rsplit(") ").next().unwrap_or_default();
            let parent_id = after_name.split(' ').nth(1).and_then(|id| id.parse().ok());
            let threads = fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
            // The signal handler has a thread too.
            parent_id == Some(parent.id()) && threads >= 3
        })
    })
}

fn is_alive(process: u32) -> bool {
    // A zombie has ended, even if its parent has not waited for it yet.
    fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn end_of(child: Child) -> (Option<i32>, String, String) {
    let output = end_within(TIME_LIMIT, child);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Case ids with status and reason, from a run's folder.
fn rows(folder: &Path) -> Vec<(String, String, String)> {
    let mut reader = csv::Reader::from_path(folder.join("runs.csv")).unwrap();
    let headers = reader.headers().unwrap().clone();
    let column = |name: &str| headers.iter().position(|header| header == name).unwrap();
    let [id, status, reason] = ["case_id", "status", "reason"].map(column);
    let rows = reader.records().map(Result::unwrap);
    rows.map(|row| (row[id].to_owned(), row[status].to_owned(), row[reason].to_owned())).collect()
}

fn write_suite(folder: &TempDir, text: &str) {
    fs::write(folder.path().join("suite.toml"), text).unwrap();
}

#[test]
fn worker_results_equal_in_process_results() {
    let folder = TempDir::new().unwrap();
    write_suite(&folder, &format!("question = 'the same?'\nseeds = [3]\n{SHORT}limits = ['1GiB', '8GiB']\n"));
    for (isolate, out) in [("never", "here"), ("always", "there")] {
        let output = output_of(&folder, &["run", "./suite.toml", "--isolate", isolate, "--output", out]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let files = |name: &str| {
        let path = folder.path().join(name);
        let cases = fs::read_dir(path.join("cases")).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = cases.chain([path.join("runs.csv"), path.join("comparison.csv")]).collect();
        files.sort();
        files.iter().map(|file| (file.file_name().unwrap().to_owned(), fs::read(file).unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(files("here").len(), 6);
    assert!(files("here") == files("there"));
}

#[test]
fn worker_finds_all_kinds_of_sources() {
    let folder = TempDir::new().unwrap();
    let recipe = "generator = 'random'\npurpose = ''\norigin = ''\n[set]\nallocations = 500\n";
    fs::write(folder.path().join("mine.toml"), recipe).unwrap();
    assert!(output_of(&folder, &["convert", "mine.toml", "mine.oomph.gz"]).status.success());
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.pickle.xz");
    for source in [&["mine.toml", "--seed", "5", "--set", "live_limit=2GiB"][..], &["mine.oomph.gz"], &[recording]] {
        let rows = |isolate: &str| {
            let arguments = [&["replay"], source, &["--format", "csv", "--isolate", isolate]].concat();
            let output = output_of(&folder, &arguments);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(rows("never"), rows("always"), "{source:?}");
    }
}

#[test]
fn killed_worker_fails_one_case() {
    let folder = TempDir::new().unwrap();
    write_suite(&folder, &format!("{ENDLESS}{SHORT}"));
    let run = start(&folder, &["run", "./suite.toml", "--isolate", "always", "--jobs", "1", "--output", "out"]);
    // Not SIGSEGV: the Rust runtime ignores the first one that no bad access caused.
    signal("ABRT", i64::from(worker_of(&run)));
    let (code, _, complaint) = end_of(run);
    assert_eq!(code, Some(104), "{complaint}");
    assert!(complaint.contains("failed: suite/training"), "{complaint}");
    let statuses: Vec<_> = rows(&folder.path().join("out")).into_iter().map(|(_, status, _)| status).collect();
    assert_eq!(statuses, ["error", "completed", "completed"]);
    assert!(rows(&folder.path().join("out"))[0].2.contains("SIGABRT, an abort"));
}

#[test]
fn time_out_ends_a_case() {
    let folder = TempDir::new().unwrap();
    let timed_out = |suite: &str, options: &[&str], out: &str| {
        write_suite(&folder, suite);
        let output = output_of(&folder, &[&["run", "./suite.toml", "--output", out], options].concat());
        assert_eq!(output.status.code(), Some(104), "{}", String::from_utf8_lossy(&output.stderr));
        let rows = rows(&folder.path().join(out));
        assert_eq!(rows[0].1, "error");
        assert!(rows[1..].iter().all(|(_, status, _)| status == "completed"), "{rows:?}");
        rows[0].2.clone()
    };
    let by_suite = format!("{ENDLESS}timeout = '300ms'\n{SHORT}");
    assert_eq!(timed_out(&by_suite, &[], "a"), "timed out after 300ms");
    let by_command_line = format!("timeout = '1h'\n{ENDLESS}{SHORT}");
    assert_eq!(timed_out(&by_command_line, &["--case-timeout", "5s"], "b"), "timed out after 5s");
}

#[test]
fn impossible_time_out_is_refused() {
    let folder = TempDir::new().unwrap();
    let output = output_of(&folder, &["run", "--isolate", "never", "--case-timeout", "5m", "--output", "out"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!folder.path().join("out").exists());
    let output = output_of(&folder, &["replay", "checkerboard", "--case-timeout", "soon"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("write it like 90s or 5m"));
}

#[test]
fn ctrl_c_lets_workers_finish() {
    let folder = TempDir::new().unwrap();
    let seeds: Vec<String> = (1..=200).map(|seed| seed.to_string()).collect();
    write_suite(
        &folder,
        &format!(
            "question = 'how long?'\nseeds = [{}]\n[[group]]\nworkloads = ['power-law']\nstrategies = ['caching']\n",
            seeds.join(",")
        ),
    );
    let run = start(&folder, &["run", "./suite.toml", "--isolate", "always", "--jobs", "2", "--output", "out"]);
    worker_of(&run);
    // As from a terminal, the whole group gets it: the run and its workers.
    signal("INT", -i64::from(run.id()));
    let (code, _, complaint) = end_of(run);
    assert_eq!(code, Some(130), "{complaint}");
    assert!(complaint.contains("--resume out"), "{complaint}");
    let rows = rows(&folder.path().join("out"));
    assert!((1..200).contains(&rows.len()), "{} rows", rows.len());
    // A worker that has only just started may not ignore the signal yet.
    let finished = rows.iter().filter(|(_, status, _)| status == "completed").count();
    assert!(finished >= 1 && rows.iter().all(|(_, status, _)| status != "error"), "{rows:?}");
}

#[test]
fn second_ctrl_c_ends_everything() {
    let folder = TempDir::new().unwrap();
    write_suite(&folder, ENDLESS);
    let run = start(&folder, &["run", "./suite.toml", "--isolate", "always", "--output", "out"]);
    let worker = worker_of(&run);
    signal("INT", -i64::from(run.id()));
    thread::sleep(Duration::from_millis(300));
    assert!(is_alive(worker), "the first signal lets it finish");
    signal("INT", -i64::from(run.id()));
    assert_eq!(end_of(run).0, Some(130));
    wait_until("the worker has ended", || (!is_alive(worker)).then_some(()));
}

#[test]
fn interrupted_worker_replay_shows_results() {
    let folder = TempDir::new().unwrap();
    let arguments = ["replay", "training", "-s", "null", "--set", "steps=100000000", "--isolate", "always"];
    let replay = start(&folder, &[&arguments[..], &["--format", "json"]].concat());
    worker_of(&replay);
    thread::sleep(Duration::from_secs(1));
    signal("INT", -i64::from(replay.id()));
    let (code, out, complaint) = end_of(replay);
    assert_eq!(code, Some(130), "{complaint}");
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(document["rows"][0]["status"], "interrupted");
    assert!(document["rows"][0]["events"].as_u64().unwrap() > 0, "{document}");
}

#[test]
fn worker_ends_with_its_parent() {
    let folder = TempDir::new().unwrap();
    write_suite(&folder, ENDLESS);
    let mut run = start(&folder, &["run", "./suite.toml", "--isolate", "always", "--output", "out"]);
    let worker = worker_of(&run);
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until("the worker has ended", || (!is_alive(worker)).then_some(()));
}

#[test]
fn worker_started_by_hand_is_refused() {
    let folder = TempDir::new().unwrap();
    let output = oomph(&folder, &["worker"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("started by oomph itself"));
    let help = String::from_utf8(output_of(&folder, &["--help"]).stdout).unwrap();
    assert!(!help.contains("worker"), "{help}");
}

#[test]
fn timed_out_replay_of_one_strategy_is_a_failed_case() {
    let folder = TempDir::new().unwrap();
    let endless = ["replay", "training", "--set", "steps=100000000", "--strategy", "null", "--case-timeout", "300ms"];
    let output = output_of(&folder, &endless);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("failed: ") && said.contains("timed out after 300ms"), "{said}");
    assert_eq!(output.status.code(), Some(104));
    // A source that cannot be read is bad usage, in a process of its own too.
    std::fs::write(folder.path().join("bad.oomph"), "oomph-trace 1\nnonsense\n").unwrap();
    for isolate in ["never", "always"] {
        let output = output_of(&folder, &["replay", "bad.oomph", "--strategy", "null", "--isolate", isolate]);
        assert!(String::from_utf8_lossy(&output.stderr).contains("bad.oomph:2"));
        assert_eq!(output.status.code(), Some(2));
    }
}

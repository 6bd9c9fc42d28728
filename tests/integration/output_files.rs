//! Files that commands write: pipes, devices and links, what is overwritten, and what a signal leaves behind.

#![cfg(unix)]

use std::{
    fs::{self, File},
    os::unix::fs::{FileTypeExt, PermissionsExt, symlink},
    path::Path,
    process::{Command, Stdio},
    thread,
};

use crate::command::{TIME_LIMIT, end_within, oomph, run, signal, wait_until, with_default_signals};
use tempfile::TempDir;

/// A replay that takes no time, with the options that follow.
const QUICK: [&str; 6] = ["replay", "checkerboard", "--strategy", "null", "--set", "rounds=1"];
const HEADER: &str = "schema,case_id,";
const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.pickle.xz");

fn quick<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&QUICK, options].concat()
}

fn empty() -> TempDir {
    TempDir::new().unwrap()
}

fn names(folder: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Makes a FIFO; `false` and a note where the machine cannot.
fn mkfifo(path: &Path) -> bool {
    let made = Command::new("mkfifo").arg(path).status().is_ok_and(|status| status.success());
    if !made {
        eprintln!("note: this machine has no mkfifo");
    }
    made
}

#[test]
fn pipes_and_devices_are_written_into() {
    let folder = empty();
    run(&folder, &quick(&["--export-csv", "/dev/null", "--export-html", "/dev/null"]), 0);
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let pipe = folder.path().join("pipe");
    if !mkfifo(&pipe) {
        return;
    }
    let read = thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    run(&folder, &quick(&["--export-csv", "pipe"]), 0);
    assert!(read.join().unwrap().starts_with(HEADER));
    assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(names(&folder), ["pipe"]);
}

#[test]
fn standard_output_gets_both_the_table_and_the_export() {
    let folder = empty();
    let whole = |text: &str| {
        let line = |beginning: &str| text.lines().find(|line| line.starts_with(beginning)).unwrap_or_default();
        assert!(text.contains("Fragmentation = 1"), "the table: {text}");
        let (header, row) = (line(HEADER), line("2,replay/"));
        assert!(!row.is_empty() && header.matches(',').count() == row.matches(',').count(), "the export: {text}");
    };
    for place in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        whole(&run(&folder, &quick(&["--export-csv", place]), 0).0);
        // A plain file behind it: not replaced, and nothing is written over.
        let target = folder.path().join("out.txt");
        let status = oomph(&folder)
            .args(quick(&["--export-csv", place]))
            .stdout(File::create(&target).unwrap())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        whole(&fs::read_to_string(&target).unwrap());
        // `run` writes its files before it prints.
        let status = oomph(&folder)
            .args(["run", "quick", "--filter", "checkerboard/direct", "--output", "out", "--export-csv", place])
            .stdout(File::create(&target).unwrap())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let text = fs::read_to_string(&target).unwrap();
        assert!(text.contains(HEADER) && text.contains("results: out"), "{text}");
        fs::remove_dir_all(folder.path().join("out")).unwrap();
    }
}

#[test]
fn the_target_of_a_link_is_replaced_and_keeps_its_mode() {
    let folder = empty();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("real.csv"), "old").unwrap();
    fs::set_permissions(at("real.csv"), PermissionsExt::from_mode(0o640)).unwrap();
    fs::write(at("victim"), "precious").unwrap();
    symlink("real.csv", at("link.csv")).unwrap();
    symlink("made.csv", at("dangling.csv")).unwrap();
    // The temporary name of older releases.
    symlink("victim", at("link.csv.new")).unwrap();
    symlink("victim", at("real.csv.new")).unwrap();
    run(&folder, &quick(&["--export-csv", "link.csv", "--export-json", "dangling.csv"]), 0);
    assert!(fs::read_to_string(at("real.csv")).unwrap().starts_with(HEADER));
    assert!(fs::read_to_string(at("made.csv")).unwrap().starts_with('{'));
    assert_eq!(fs::read_to_string(at("victim")).unwrap(), "precious");
    assert_eq!(fs::metadata(at("real.csv")).unwrap().permissions().mode() & 0o777, 0o640);
    for link in ["link.csv", "dangling.csv", "link.csv.new"] {
        assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
    }
    let (_, err) = run(&folder, &quick(&["--export-csv", "."]), 2);
    assert!(err.contains("directory"), "{err}");
}

#[test]
fn answers_are_written_as_pages() {
    let folder = empty();
    fs::copy(RECORDING, folder.path().join("run.pickle.xz")).unwrap();
    let commands: [&[&str]; 5] = [
        &["advise", "checkerboard", "--set", "rounds=1"],
        &["leaks", "checkerboard", "--fail-on", "never"],
        &["inspect", "checkerboard", "--set", "rounds=1"],
        &["threshold", "checkerboard", "--set", "rounds=1", "-s", "direct"],
        &["fits", "llama-3.2-1b", "--card", "24GiB", "--techniques", "bf16_model,ckpt"],
    ];
    for command in commands {
        let (_, err) = run(&folder, &[command, &["--export-html", "page.html"]].concat(), 0);
        assert!(err.contains("wrote page.html"), "{command:?}: {err}");
        let page = fs::read_to_string(folder.path().join("page.html")).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.contains("<div class=\"answer-cards\">"), "{command:?}");
        let (_, err) = run(&folder, &[command, &["--export-html", "run.pickle.xz"]].concat(), 2);
        assert!(err.contains("may be a recording"), "{command:?}: {err}");
    }
    let ranks = ["advise", ".", "--export-html", "page.html"];
    assert!(run(&folder, &ranks, 2).1.contains("name the file of one rank"));
    let largest = ["threshold", "training", "--largest", "batch", "--card", "8GiB", "--export-html", "page.html"];
    assert!(run(&folder, &largest, 2).1.contains("leave out --largest"));
}

#[test]
fn recordings_and_runs_are_not_overwritten_by_exports() {
    let folder = empty();
    let at = |name: &str| folder.path().join(name);
    fs::copy(RECORDING, at("a.csv")).unwrap();
    run(&folder, &["convert", "checkerboard", "rmm.csv", "--to", "rmm"], 0);
    run(&folder, &["convert", "checkerboard", "native.csv", "--to", "oomph"], 0);
    run(&folder, &["run", "quick", "--filter", "checkerboard/direct", "--output", "run"], 0);
    symlink("a.csv", at("link.csv")).unwrap();
    let files = ["a.csv", "link.csv", "rmm.csv", "native.csv", "run/runs.csv", "run/env.json", "run/report.html"];
    for name in files {
        let before = fs::read(at(name)).unwrap();
        for option in ["--export-csv", "--export-json", "--export-markdown", "--export-html"] {
            let (out, err) = run(&folder, &quick(&[option, name]), 2);
            assert!(out.is_empty() && err.contains(name) && err.contains("--force overwrites it"), "{err}");
        }
        let (_, err) = run(&folder, &["run", "quick", "--output", "never", "--export-csv", name], 2);
        assert!(err.contains(name) && !at("never").exists(), "{err}");
        assert_eq!(fs::read(at(name)).unwrap(), before);
    }
    run(&folder, &quick(&["--export-csv", "a.csv", "--force"]), 0);
    // Earlier results are replaced without a word.
    run(&folder, &quick(&["--export-csv", "a.csv", "--export-json", "a.json", "--export-html", "a.html"]), 0);
    run(&folder, &quick(&["--export-csv", "a.csv", "--export-json", "a.json", "--export-html", "a.html"]), 0);
    assert!(fs::read_to_string(at("a.csv")).unwrap().starts_with(HEADER));
    let (_, err) = run(&folder, &quick(&["--force"]), 2);
    assert!(err.contains("--force overwrites files of --export-snapshot"), "{err}");
}

/// Starts a command that writes for a long time, waits for its temporary file, and sends signals.
fn interrupted(arguments: &[&str], signals: &[&str]) {
    let folder = empty();
    let mut command = oomph(&folder);
    let child =
        with_default_signals(command.args(arguments)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("there is a temporary file", || {
        names(&folder).iter().any(|name| name.ends_with(".partial")).then_some(())
    });
    for name in signals {
        signal(name, child.id().into());
    }
    assert_eq!(end_within(TIME_LIMIT, child).status.code(), Some(130), "{arguments:?} {signals:?}");
    assert!(!names(&folder).iter().any(|name| name.ends_with(".partial")), "{arguments:?}: {:?}", names(&folder));
}

#[test]
fn a_signal_leaves_no_partial_file() {
    for name in ["INT", "TERM", "HUP"] {
        interrupted(&["convert", "training", "out.oomph", "--set", "steps=100000000"], &[name]);
        interrupted(&["convert", "training", "out.oomph.gz", "--set", "steps=100000000"], &[name]);
    }
}

#[test]
fn a_second_signal_leaves_no_partial_snapshot() {
    let export =
        ["replay", "training", "--set", "steps=3000", "--strategy", "caching", "--export-snapshot", "a.pickle"];
    interrupted(&export, &["INT", "INT"]);
}

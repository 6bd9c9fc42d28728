//! Long recordings in bounded memory: 10 million events may take 4 GiB; this tests a fortieth of
//! both.

#![cfg(target_os = "linux")]

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use assert_cmd::cargo::cargo_bin;

/// 2,446 events per step: 250 thousand in total.
const STEPS: &str = "steps=103";
const MOST_KIB: u64 = 4 * 1024 * 1024 / 40;

/// Runs the binary to its end and returns its peak memory. The kernel keeps the high-water mark, so
/// polling misses only what happens right before the end.
fn peak_kib(folder: &Path, args: &[&str]) -> u64 {
    let mut process = Command::new(cargo_bin!("oomph"))
        .current_dir(folder)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", process.id());
    let mut peak = 0;
    loop {
        let mark = fs::read_to_string(&status).unwrap_or_default();
        let mark = mark.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = mark.and_then(|text| text.split_whitespace().next()?.parse().ok());
        peak = peak.max(kib.unwrap_or(0));
        if let Some(ended) = process.try_wait().unwrap() {
            assert!(ended.success(), "{args:?}: {ended}");
            return peak;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn long_recording_needs_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    for args in [
        &["convert", "training", "long.oomph", "--set", STEPS][..],
        &["convert", "long.oomph", "long.pickle"],
        &["convert", "long.pickle", "again.oomph"],
        &["verify", "long.pickle"],
        &["replay", "long.oomph", "--strategy", "caching"],
        &["replay", "long.pickle", "--strategy", "caching"],
    ] {
        let peak = peak_kib(folder.path(), args);
        println!("{args:?}: {} MiB", peak / 1024);
        assert!(peak > 1024, "nothing was measured");
        assert!(peak < MOST_KIB, "{args:?} took {} MiB of {}", peak / 1024, MOST_KIB / 1024);
    }
}

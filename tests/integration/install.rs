//! The binary in an empty folder, as after `cargo install`: it needs no other file.

use std::{fs, path::Path, process::Output};

use assert_cmd::cargo::cargo_bin_cmd;

fn oomph_in(folder: &Path, args: &[&str]) -> Output {
    cargo_bin_cmd!("oomph").current_dir(folder).args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn suites_list_cases_or_missing_files() {
    let folder = tempfile::tempdir().unwrap();
    let listed = oomph_in(folder.path(), &["list", "suites", "--json"]);
    let document: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let suites: Vec<&str> =
        document["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert!(suites.contains(&"quick") && suites.contains(&"settings"), "{suites:?}");
    for suite in suites {
        let output = oomph_in(folder.path(), &["run", suite, "--list"]);
        let words = text(&output);
        if suite == "settings" {
            assert_eq!(output.status.code(), Some(2), "{words}");
            assert!(words.contains("run it where the files are"), "{words}");
        } else {
            assert_eq!(output.status.code(), Some(0), "{suite}: {words}");
            assert!(!output.stdout.is_empty(), "{suite}");
        }
        let goes_without = words.contains("note: suite 'strategies' runs without 'workloads/recorded/*.pickle.xz'");
        assert_eq!(goes_without, suite == "strategies", "{suite}: {words}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "--list writes no files");
}

#[test]
fn a_case_of_the_quick_suite_runs() {
    let folder = tempfile::tempdir().unwrap();
    let output = oomph_in(
        folder.path(),
        &["run", "quick", "--filter", "random/", "--filter", "checkerboard", "--output", "out"],
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(folder.path().join("out/runs.csv").is_file());
}

#[test]
fn local_files_replace_built_in_ones() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("workloads")).unwrap();
    fs::create_dir(folder.path().join("suites")).unwrap();
    let recipe = "generator = 'random'\npurpose = 'Mine.'\norigin = 'here'\n";
    fs::write(folder.path().join("workloads/random.toml"), recipe).unwrap();
    fs::write(folder.path().join("workloads/my-1.5.toml"), recipe).unwrap();
    let suite = "question = 'mine?'\n[[group]]\nworkloads = ['my-1.5', 'random']\nstrategies = ['direct']\n";
    fs::write(folder.path().join("suites/quick.toml"), suite).unwrap();

    let workloads = text(&oomph_in(folder.path(), &["list", "workloads"]));
    assert!(
        workloads.lines().any(|line| line.trim_start().starts_with("random ") && line.contains("Mine. [workloads/")),
        "{workloads}"
    );
    let cases = text(&oomph_in(folder.path(), &["run", "--list"]));
    assert_eq!(cases.lines().count(), 2, "{cases}");
    assert!(oomph_in(folder.path(), &["inspect", "my-1.5"]).status.success());

    // Check that these files exist, so that a wrong path cannot pass silently.
    fs::write(folder.path().join("suites/quick.toml"), suite.replace("'random'", "'runs/*.pickle'")).unwrap();
    assert_eq!(oomph_in(folder.path(), &["run", "--list"]).status.code(), Some(2));
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let written = oomph_in(folder.path(), &["man", "--output", "man1"]);
    assert!(written.status.success(), "{}", text(&written));
    for page in ["oomph.1", "oomph-advise.1", "oomph-stress-misuse.1"] {
        let page = fs::read_to_string(folder.path().join("man1").join(page)).unwrap();
        assert!(page.contains(".TH oomph") && page.contains(".SH SYNOPSIS"), "{page}");
    }
    assert!(!folder.path().join("man1/oomph-worker.1").exists(), "an internal command has no manual page");
    let advise = text(&oomph_in(folder.path(), &["man", "advise"]));
    assert_eq!(advise, fs::read_to_string(folder.path().join("man1/oomph-advise.1")).unwrap());
    let unknown = oomph_in(folder.path(), &["man", "avdise"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", text(&unknown));
}

//! A folder of recordings, one per rank: one answer for all of them, from the binary.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use assert_cmd::cargo::cargo_bin_cmd;
use serde_json::Value;

fn oomph(args: &[&str]) -> Output {
    cargo_bin_cmd!("oomph").args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}\n{}", text(output)))
}

/// Twelve ranks of one program, as PyTorch records them. The tenth has twice the batch.
fn ranks_with_one_that_differs(folder: &Path) {
    for rank in 0..12 {
        let path = folder.join(format!("run-{rank}.pickle")).display().to_string();
        let batch = if rank == 10 { "batch=4" } else { "batch=2" };
        let made = oomph(&["convert", "training", &path, "--set", batch, "--set", "steps=2", "--set", "layers=2"]);
        assert!(made.status.success(), "{}", text(&made));
    }
}

#[test]
fn largest_rank_is_answered_and_named() {
    let folder = tempfile::tempdir().unwrap();
    ranks_with_one_that_differs(folder.path());
    let place = folder.path().display().to_string();
    for command in [&["threshold", "--strategy", "caching", "--repeat", "1"][..], &["inspect"]] {
        let asked = [command, &[place.as_str()]].concat();
        let output = oomph(&asked);
        let words = text(&output);
        assert!(output.status.success(), "{words}");
        assert!(words.contains("The worst of 12 ranks is 10:"), "{words}");
        assert!(words.contains("One rank is an outlier: 10 by +"), "{words}");
        let order: Vec<usize> = ["run-9", "run-10"].iter().filter_map(|name| words.find(name)).collect();
        assert!(order.is_sorted(), "{words}");

        let document = json(&oomph(&[&asked[..], &["--format", "json"]].concat()));
        let rows = document["rows"].as_array().unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row["rank"].as_str().unwrap()).collect();
        assert_eq!(names, ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"]);
        assert_eq!((&document["worst"], &document["outliers"][0]), (&"10".into(), &"10".into()));
        assert_eq!(rows[10]["figure_bytes"], document["spread"]["max_bytes"]);
        assert!(rows.iter().all(|row| row["answers"].as_array().is_some_and(|answers| answers.len() == 1)));
    }
}

#[test]
fn folder_advice_is_for_the_largest_rank() {
    let folder = tempfile::tempdir().unwrap();
    for (rank, batch) in [(0, "batch=1"), (1, "batch=16")] {
        let path = folder.path().join(format!("rank{rank}.pickle")).display().to_string();
        let made = oomph(&["convert", "training", &path, "--set", batch, "--set", "steps=1", "--set", "layers=1"]);
        assert!(made.status.success(), "{}", text(&made));
    }
    let pattern = folder.path().join("rank*.pickle").display().to_string();
    let whole = json(&oomph(&["advise", &pattern, "--format", "json"]));
    let alone = folder.path().join("rank1.pickle").display().to_string();
    let alone = json(&oomph(&["advise", &alone, "--format", "json"]));
    assert_eq!(whole["worst"], "1");
    assert_eq!(
        whole["rows"][1]["answers"], alone["rows"],
        "a rank in a folder and a single rank must give the same answer"
    );
}

#[test]
fn one_leaking_rank_is_found_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    for (rank, workload) in ["leak-outputs-fixed", "leak-outputs", "leak-outputs-fixed"].iter().enumerate() {
        let path = folder.path().join(format!("rank{rank}.oomph")).display().to_string();
        assert!(oomph(&["convert", workload, &path, "--set", "layers=1", "--set", "steps=12"]).status.success());
    }
    let output = oomph(&["leaks", &folder.path().display().to_string()]);
    let words = text(&output);
    assert_eq!(output.status.code(), Some(105), "{words}");
    assert!(words.contains("The worst of 3 ranks is 1:") && words.contains("steady"), "{words}");
}

#[test]
fn unreadable_rank_loses_only_its_answer() {
    let folder = tempfile::tempdir().unwrap();
    for rank in [0, 2] {
        let path = folder.path().join(format!("rank{rank}.pickle")).display().to_string();
        assert!(oomph(&["convert", "training", &path, "--set", "steps=1", "--set", "layers=1"]).status.success());
    }
    fs::write(folder.path().join("rank1.pickle"), "cut off").unwrap();
    let output = oomph(&["inspect", &folder.path().display().to_string()]);
    let words = text(&output);
    assert_eq!(output.status.code(), Some(104), "{words}");
    assert!(words.contains("No answer for 1.") && words.contains("rank1.pickle"), "{words}");
}

#[test]
fn folder_without_recordings_lists_endings() {
    let folder = tempfile::tempdir().unwrap();
    let output = oomph(&["advise", &folder.path().display().to_string()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains(".pickle, .pkl and .oomph"), "{}", text(&output));
}

#[test]
fn all_recordings_of_the_repository_are_read_as_ranks() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded");
    if !folder.exists() {
        println!("skipped: the recordings are not in the package");
        return;
    }
    let output = oomph(&["inspect", &folder.display().to_string(), "--format", "json"]);
    let document = json(&output);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let files = Command::new("ls").arg(&folder).output().unwrap();
    let pickles = String::from_utf8_lossy(&files.stdout).lines().filter(|name| name.contains(".pickle")).count();
    assert_eq!(document["rows"].as_array().unwrap().len(), pickles);
}

#[test]
fn several_files_explain_rank_patterns() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a.oomph", "b.oomph"].map(|name| folder.path().join(name).display().to_string());
    for path in &paths {
        fs::write(path, "").unwrap();
    }
    let refused = oomph(&["threshold", &paths[0], &paths[1]]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused).contains("as a pattern in quotes such as 'run-*.pickle'"), "{}", text(&refused));
}

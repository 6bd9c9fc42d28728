//! `oomph compare` and baselines, as a user or a CI job runs them.

use std::fs;

use crate::command::{remove_checksums, run};
use tempfile::TempDir;

const CASES: [&str; 4] = ["run", "quick", "--filter", "quick/checkerboard/"];

fn run_cases(folder: &TempDir, more: &[&str], code: i32) -> (String, String) {
    run(folder, &[&CASES[..], more].concat(), code)
}

/// Replaces a string in a file of a run.
fn edit(folder: &TempDir, file: &str, old: &str, new: &str) {
    let path = folder.path().join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(old), "{old} is missing in {text}");
    fs::write(&path, text.replace(old, new)).unwrap();
}

/// Changes one cell of the first row of a table.
fn set_cell(folder: &TempDir, file: &str, column: &str, change: impl Fn(&str) -> String) {
    let path = folder.path().join(file);
    let mut table = csv::Reader::from_path(&path).unwrap();
    let header = table.headers().unwrap().clone();
    let place = header.iter().position(|name| name == column).unwrap();
    let mut rows: Vec<Vec<String>> =
        table.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect();
    rows[0][place] = change(&rows[0][place]);
    let mut writer = csv::Writer::from_path(&path).unwrap();
    writer.write_record(&header).unwrap();
    rows.iter().for_each(|row| writer.write_record(row).unwrap());
    writer.flush().unwrap();
}

#[test]
fn one_more_byte_is_a_regression() {
    let folder = TempDir::new().unwrap();
    run_cases(&folder, &["--output", "old"], 0);
    run_cases(&folder, &["--output", "new"], 0);
    let (out, _) = run(&folder, &["compare", "old", "new"], 0);
    assert!(out.contains("cases compared: all deterministic columns are equal"), "{out}");

    remove_checksums(&folder.path().join("new"));
    set_cell(&folder, "new/runs.csv", "peak_reserved_bytes", |value| (value.parse::<u64>().unwrap() + 1).to_string());
    let (out, _) = run(&folder, &["compare", "old", "new"], 102);
    assert!(out.contains("worse:") && out.contains("peak_reserved_bytes"), "{out}");
    run(&folder, &["compare", "old", "new", "--fail-on", "never"], 0);
    let (out, _) = run(&folder, &["compare", "new", "old", "--format", "json"], 0);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(
        json["rows"][0]["changes"].as_array().unwrap().iter().any(|change| change["direction"] == "better"),
        "{out}"
    );
    run(&folder, &["compare", "new", "old", "--fail-on", "change"], 102);
}

#[test]
fn runs_that_mean_different_things_are_refused() {
    let folder = TempDir::new().unwrap();
    run_cases(&folder, &["--output", "old"], 0);
    run_cases(&folder, &["--output", "new"], 0);
    remove_checksums(&folder.path().join("new"));
    edit(&folder, "new/runs.csv", ",virtual,", ",wall,");
    let (_, err) = run(&folder, &["compare", "old", "new"], 2);
    assert!(err.contains("old ran on a simulated clock and new on a real one"), "{err}");
    edit(&folder, "new/env.json", "\"schema\": 2", "\"schema\": 7");
    let (_, err) = run(&folder, &["compare", "old", "new"], 2);
    assert!(err.contains("new has schema 7; this release of oomph reads schemas 1 to 2"), "{err}");
    let (_, err) = run(&folder, &["compare", "old", "nowhere"], 2);
    assert!(err.contains("'nowhere' is neither the folder of a run nor a saved baseline"), "{err}");
    run(&folder, &["run", "quick", "--filter", "quick/random/direct", "--output", "other"], 0);
    run(&folder, &["compare", "old", "other"], 4);
}

#[test]
fn baseline_is_saved_and_compared_by_name() {
    let folder = TempDir::new().unwrap();
    let (_, err) = run_cases(&folder, &["--baseline", "main"], 2);
    assert!(err.contains("'main' is neither"), "{err}");
    let (_, err) = run_cases(&folder, &["--save-baseline", "../main"], 2);
    assert!(err.contains("is not a valid baseline name"), "{err}");
    let (_, err) = run_cases(&folder, &["--output", "first", "--save-baseline", "main"], 0);
    assert!(err.contains("kept as baseline"), "{err}");
    let (_, err) = run_cases(&folder, &["--output", "second", "--baseline", "main", "--save-baseline", "main"], 0);
    assert!(err.contains("all deterministic columns are equal"), "{err}");
    remove_checksums(&folder.path().join("results/local/baselines/main"));
    edit(&folder, "results/local/baselines/main/runs.csv", ",completed,", ",error,");
    let (_, err) = run_cases(&folder, &["--output", "third", "--baseline", "main"], 0);
    assert!(err.contains("better"), "{err}");
}

#[test]
fn times_are_compared_by_their_passes() {
    let folder = TempDir::new().unwrap();
    let suite = "question = \"How fast?\"\nbase = \"caching\"\nseeds = [1]\n[[group]]\n\
                 workloads = [\"hot-4k\"]\nstrategies = [\"caching\"]\ntimed = true\nset = { pairs = 1000 }\n";
    fs::write(folder.path().join("timed.toml"), suite).unwrap();
    run(&folder, &["run", "timed.toml", "--output", "old"], 0);
    run(&folder, &["run", "timed.toml", "--output", "new"], 0);
    // Real times are too noisy for a test, so the passes are written by hand.
    for (run, times) in [("old", [100, 101, 102, 103, 104]), ("new", [200, 201, 202, 203, 204])] {
        remove_checksums(&folder.path().join(run));
        let file = format!("{run}/timings.csv");
        set_cell(&folder, &file, "pass_median_ns", |_| times[2].to_string());
        set_cell(&folder, &file, "pass_ns", |passes| {
            assert_eq!(passes.split(' ').count(), 5, "five passes are kept: {passes}");
            times.map(|time| time.to_string()).join(" ")
        });
    }
    let (out, _) = run(&folder, &["compare", "old", "new"], 102);
    assert!(out.contains("slower:") && out.contains("1.980"), "{out}");
    run(&folder, &["compare", "old", "new", "--noise-threshold", "1.5"], 0);
    edit(&folder, "new/env.json", "\"cpus\": ", "\"cpus\": 9");
    let (out, _) = run(&folder, &["compare", "old", "new"], 0);
    assert!(out.contains("are not comparable"), "{out}");
}

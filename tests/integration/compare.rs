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
    // Real times are too noisy for a test, so the rounds are written by hand.
    for (run, first) in [("old", 100), ("new", 200)] {
        remove_checksums(&folder.path().join(run));
        let file = format!("{run}/timings.csv");
        set_cell(&folder, &file, "round_ns", |rounds| {
            assert_eq!(rounds.split(' ').count(), 16, "sixteen rounds are kept: {rounds}");
            (0..16).map(|round| (first * 100 + round).to_string()).collect::<Vec<_>>().join(" ")
        });
        set_cell(&folder, &file, "reference_ns", |_| "1000 1000".to_owned());
    }
    let (out, _) = run(&folder, &["compare", "old", "new"], 102);
    assert!(out.contains("slower:") && out.contains("1.999"), "{out}");
    run(&folder, &["compare", "old", "new", "--noise-threshold", "1.5"], 0);
    let (_, err) = run(&folder, &["compare", "old", "new", "--significance", "1e-10"], 2);
    assert!(err.contains("cannot be reached with 16 rounds") && err.contains("at least 19 rounds"), "{err}");
    edit(&folder, "new/env.json", "\"cpus\": ", "\"cpus\": 9");
    let (out, _) = run(&folder, &["compare", "old", "new"], 0);
    assert!(out.contains("are not comparable"), "{out}");
}

#[test]
fn cases_of_one_run_take_one_line() {
    let folder = TempDir::new().unwrap();
    run(&folder, &["run", "quick", "--filter", "quick/r", "--output", "old"], 0);
    run(&folder, &["run", "quick", "--filter", "quick/random/direct", "--output", "new", "--strategy", "tlsf,bfc"], 0);
    let (out, _) = run(&folder, &["compare", "old", "new"], 0);
    let only: Vec<&str> = out.lines().filter(|line| line.contains("only in one run")).collect();
    assert_eq!(
        only,
        ["only in one run: 2 cases in the old run (quick/random/caching@sim#1, ..); --format json lists all"]
    );
}

#[test]
fn tolerance_accepts_small_changes() {
    let folder = TempDir::new().unwrap();
    run_cases(&folder, &["--output", "old"], 0);
    run_cases(&folder, &["--output", "new"], 0);
    remove_checksums(&folder.path().join("new"));
    set_cell(&folder, "new/runs.csv", "peak_reserved_bytes", |value| (value.parse::<u64>().unwrap() + 1).to_string());
    let (out, _) = run(&folder, &["compare", "old", "new"], 102);
    assert!(out.contains("on balance:") && out.contains("geometric mean"), "{out}");
    let (out, _) = run(&folder, &["compare", "old", "new", "--tolerance", "0.001"], 0);
    assert!(out.contains("1 columns within the tolerance"), "{out}");
    let (_, err) = run(&folder, &["compare", "old", "new", "--tolerance=-1"], 2);
    assert!(err.contains("--tolerance"), "{err}");
}

/// Two programs, here the same one, and two strategies. Their times are not judged: only that all rounds were made.
#[test]
fn programs_and_strategies_take_turns() {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'how fast?'\n[[group]]\nworkloads = ['hot-4k']\nstrategies = ['caching', 'tlsf']\n\
                 timed = true\nset = { pairs = 200 }\nthreads = [2]\n";
    fs::write(folder.path().join("timed.toml"), suite).unwrap();
    let program = env!("CARGO_BIN_EXE_oomph");
    let compare = |old, new, more: &[&str], code| {
        let fixed = ["compare", old, new, "--suite", "timed.toml", "--fail-on", "never", "--format", "json"];
        run(&folder, &[&fixed[..], more].concat(), code)
    };
    let (out, _) = compare(program, program, &["--rounds", "11"], 0);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = &json["rows"][0];
    assert_eq!((row["compared"].as_u64(), row["changes"].as_array().map(Vec::len)), (Some(2), Some(0)), "{out}");
    let times = row["times"].as_array().unwrap();
    assert_eq!(times.len(), 4, "two strategies, alone and with two threads");
    assert!(times.iter().all(|time| time["rounds"] == 11), "{out}");
    let together: Vec<&str> =
        row["times_together"].as_array().unwrap().iter().filter_map(|time| time["case_id"].as_str()).collect();
    assert_eq!(together, ["all cases", "all cases of caching", "all cases of tlsf"]);
    let (_, err) = compare(program, program, &["--rounds", "5"], 2);
    assert!(err.contains("cannot be reached with 5 rounds and 4 rows of times: at least 11 rounds"), "{err}");

    let (out, _) = compare("direct", "caching", &["--rounds", "10", "--filter", "hot"], 0);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = &json["rows"][0];
    assert_eq!((row["compared"].as_u64(), row["times"].as_array().map(Vec::len)), (Some(1), Some(2)), "{out}");
    let reserved = row["balance"].as_array().unwrap().iter().any(|row| row["column"] == "driver_calls");
    assert!(reserved, "strategies are compared by the same cases: {out}");

    let (_, err) = compare("tlfs", "caching", &[], 2);
    assert!(err.contains("'tlfs' is not a program") && err.contains("tlsf"), "{err}");
    let (_, err) = compare(program, "caching", &[], 2);
    assert!(err.contains("compare two programs, or two strategies"), "{err}");
    let (out, err) = compare("/bin/true", program, &["--rounds", "11"], 104);
    assert!(out.is_empty() && err.contains("the worker process ended without an outcome"), "{out}{err}");
    let (_, err) = run(&folder, &["compare", program, program], 2);
    assert!(err.contains("say with --suite"), "{err}");
}

#[test]
fn added_strategies_run_in_a_built_in_suite() {
    let folder = TempDir::new().unwrap();
    let list =
        |more: &[&str]| run(&folder, &[&["run", "quick", "--list", "--filter", "quick/random/"], more].concat(), 0).0;
    let own = list(&[]).lines().count();
    assert_eq!(
        list(&["--strategy", "tlsf,caching:max_split_size_mb:64,roundup_power2_divisions:4"]).lines().count(),
        own + 2
    );
    assert_eq!(list(&["-s", "caching", "-s", "slab"]).lines().count(), own + 1, "a strategy of the suite is not added");
    assert!(list(&["--strategy", "all"]).lines().count() > own + 10);
    let (_, err) = run(&folder, &["run", "quick", "--strategy", "tlsf,budy"], 2);
    assert!(err.contains("unknown strategy 'budy'") && err.contains("buddy"), "{err}");
    let (_, err) = run(&folder, &["run", "claims", "--strategy", "tlsf"], 2);
    assert!(err.contains("chooses its strategies itself"), "{err}");
    let (out, _) =
        run(&folder, &["run", "quick", "--filter", "quick/r", "--filter", "quick/p", "-s", "tlsf", "-o", "out"], 0);
    assert!(out.contains("a multiple of the bound") && out.contains("Median appetite by generator"), "{out}");
    let bounds = fs::read_to_string(folder.path().join("out/bounds.csv")).unwrap();
    assert!(bounds.lines().any(|line| line.contains(",tlsf,,random,1,1,1,1,")), "{bounds}");
}

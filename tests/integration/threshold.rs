//! Runs `oomph threshold` and threshold suites as a user does.

use std::fs;

use crate::command::run;
use serde_json::Value;
use tempfile::TempDir;

const SMALL: [&str; 4] = ["--set", "rounds=1", "--set", "blocks=128"];

fn json(folder: &TempDir, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--format", "json"]].concat();
    serde_json::from_str(&run(folder, &arguments, 0).0).unwrap()
}

#[test]
fn threshold_is_the_least_limit() {
    let folder = TempDir::new().unwrap();
    let found = json(&folder, &[&["threshold", "checkerboard", "--strategy", "caching"], &SMALL[..]].concat());
    let row = &found["rows"][0];
    let bytes = row["needed_bytes"].as_u64().unwrap();
    assert_eq!(row["needed_card_bytes"].as_u64(), Some(bytes + row["overhead_bytes"].as_u64().unwrap()));
    assert_eq!((row["status"].as_str(), row["stable"].as_bool()), (Some("found"), Some(true)));
    assert!(row["tried"].as_array().unwrap().len() > 16);
    assert_eq!(row["failure"]["kept_back"][0]["obstacle"], "split_remainder");
    for (limit, status) in [(bytes, "completed"), (bytes - (2 << 20), "oom")] {
        let limit = limit.to_string();
        let replay = ["replay", "checkerboard", "--strategy", "caching", "--repeat", "3", "--limit", &limit];
        let replayed = json(&folder, &[&replay[..], &SMALL[..]].concat());
        assert_eq!(replayed["rows"][0]["status"], status, "{limit}");
    }
}

#[test]
fn threshold_table_explains_the_failure_below() {
    let folder = TempDir::new().unwrap();
    let (out, _) = run(&folder, &[&["threshold", "checkerboard"], &SMALL[..]].concat(), 0);
    for words in [
        "smallest",
        "context and libraries",
        "enforced by the allocator",
        "3 rounds",
        "one page less fails",
        "exhaustion",
    ] {
        assert!(out.contains(words), "'{words}' is missing in {out}");
    }
    let device = [&["threshold", "checkerboard", "--smallest", "card", "--repeat", "1"], &SMALL[..]].concat();
    let (out, _) = run(&folder, &device, 0);
    assert!(out.contains("the driver refuses; 1 round"), "{out}");
}

#[test]
fn the_largest_batch_grows_with_the_memory() {
    let folder = TempDir::new().unwrap();
    let arguments = [
        "threshold",
        "training",
        "--set",
        "steps=1",
        "--strategy",
        "caching",
        "--repeat",
        "1",
        "--probes",
        "2",
        "--largest",
        "batch",
        "--card",
        "8GiB,24GiB",
    ];
    let found = json(&folder, &arguments);
    let batch = |row: usize| found["rows"][row]["largest"].as_u64().unwrap();
    assert!(batch(0) < batch(1), "{found}");
    let (out, _) = run(&folder, &arguments, 0);
    assert!(out.contains(&format!("batch = {}", batch(1))), "{out}");
}

#[test]
fn invalid_questions_are_refused() {
    let folder = TempDir::new().unwrap();
    for (arguments, words) in [
        (&["threshold", "training", "--largest", "batches", "--card", "8GiB"][..], "did you mean 'batch'?"),
        (&["threshold", "training", "--largest", "batch"], "--card"),
        (&["threshold", "training", "--limit", "8GiB"], "without --largest, the smallest limit is what is searched"),
        (&["threshold", "training", "--card", "8GiB,24GiB"], "the search uses one --card"),
        (&["threshold", "checkerbord"], "did you mean 'checkerboard'?"),
        (&["threshold", "checkerboard", "--strategy", "cachin"], "did you mean 'caching'?"),
        (&["threshold", "checkerboard", "--repeat", "0"], "--repeat"),
    ] {
        let (out, err) = run(&folder, arguments, 2);
        assert!(out.is_empty() && err.contains(words), "{arguments:?}: {err}");
    }
    let (_, err) = run(&folder, &["threshold", "checkerboard", "--device", "cuda:4000"], 103);
    assert!(err.contains("cuda:4000"), "{err}");
}

#[test]
fn threshold_suite_can_be_resumed() {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'how much?'\nkind = 'threshold'\n[[group]]\nworkloads = ['checkerboard']\n\
                 strategies = ['direct', 'caching']\nrepeat = 2\nset = { rounds = 1, blocks = 128 }\n";
    fs::write(folder.path().join("mine.toml"), suite).unwrap();
    let (out, _) = run(&folder, &["run", "mine.toml", "--output", "a"], 0);
    assert!(out.contains("2 rounds back to back") && out.contains("results: a"), "{out}");
    let read = |name: &str| fs::read_to_string(folder.path().join("a").join(name)).unwrap();
    let (csv, details) = (read("thresholds.csv"), read("thresholds.json"));
    assert_eq!(csv.lines().count(), 3);
    assert!(read("summary.md").contains("## Thresholds"));
    // The first result exists, the second does not.
    let mut torn: Value = serde_json::from_str(&details).unwrap();
    torn["rows"].as_array_mut().unwrap().pop();
    torn.as_object_mut().unwrap().remove("crc32");
    fs::write(folder.path().join("a/thresholds.json"), torn.to_string()).unwrap();
    run(&folder, &["run", "mine.toml", "--resume", "a"], 0);
    assert_eq!((read("thresholds.csv"), read("thresholds.json")), (csv, details));
}

/// A suite of thresholds with a file that cannot be read, and one whose search takes long.
fn write_suite(folder: &TempDir, workloads: &str, set: &str) {
    let text = format!(
        "kind = 'threshold'\nquestion = 'how much?'\n[[group]]\nworkloads = [{workloads}]\n\
         strategies = ['direct', 'caching']\nrepeat = 1\n{set}\n"
    );
    fs::write(folder.path().join("suite.toml"), text).unwrap();
}

fn thresholds(folder: &TempDir, run: &str) -> Vec<(String, String)> {
    let mut rows = csv::Reader::from_path(folder.path().join(run).join("thresholds.csv")).unwrap();
    let headers = rows.headers().unwrap().clone();
    let column = |name: &str| headers.iter().position(|header| header == name).unwrap();
    let (status, reason) = (column("status"), column("reason"));
    rows.records().map(Result::unwrap).map(|row| (row[status].to_owned(), row[reason].to_owned())).collect()
}

#[test]
fn unreadable_file_fails_only_its_case() {
    let folder = TempDir::new().unwrap();
    for name in ["a.oomph", "c.oomph"] {
        run(&folder, &[&["convert", "checkerboard", name], &SMALL[..]].concat(), 0);
    }
    fs::write(folder.path().join("b.oomph"), "oomph-trace 1\nnonsense\n").unwrap();
    write_suite(&folder, "'./*.oomph'", "");
    let arguments = ["run", "./suite.toml", "--output", "out"];
    let (_, err) = run(&folder, &arguments, 104);
    assert!(err.contains("b.oomph:2"), "{err}");
    let failed =
        |rows: &[(String, String)]| -> Vec<bool> { rows.iter().map(|(status, _)| status == "error").collect() };
    let rows = thresholds(&folder, "out");
    assert_eq!(failed(&rows), [false, false, true, true, false, false], "{rows:?}");
    assert!(rows[2].1.contains("b.oomph:2"), "{rows:?}");
    // The others have an answer and are not searched again.
    let resumed = ["run", "./suite.toml", "--resume", "out"];
    run(&folder, &resumed, 104);
    assert_eq!(thresholds(&folder, "out"), rows);
    fs::copy(folder.path().join("a.oomph"), folder.path().join("b.oomph")).unwrap();
    run(&folder, &resumed, 0);
    assert_eq!(failed(&thresholds(&folder, "out")), [false; 6]);
}

#[test]
fn case_timeout_ends_a_search() {
    let folder = TempDir::new().unwrap();
    // Reading alone would take minutes.
    write_suite(&folder, "'training'", "set = { steps = 1000000 }");
    let (_, err) = run(&folder, &["run", "./suite.toml", "--output", "out", "--case-timeout", "50ms"], 104);
    assert!(err.contains("timed out after 50ms"), "{err}");
    let timed_out = ("error".to_owned(), "timed out after 50ms".to_owned());
    assert_eq!(thresholds(&folder, "out"), vec![timed_out; 2]);

    let arguments = ["threshold", "training", "--set", "steps=200", "--strategy", "caching", "--case-timeout", "1ms"];
    let (out, _) = run(&folder, &[&arguments[..], &["--format", "json"]].concat(), 104);
    let found: Value = serde_json::from_str(&out).unwrap();
    let row = &found["rows"][0];
    assert_eq!((row["status"].as_str(), row["reason"].as_str()), (Some("error"), Some("timed out after 1ms")));
    let largest = [&arguments[..], &["--largest", "batch", "--card", "24GiB", "--format", "csv"]].concat();
    let (out, _) = run(&folder, &largest, 104);
    assert!(out.contains(",error,timed out after 1ms,"), "{out}");
    // Enough time changes nothing.
    let plain = [&["threshold", "checkerboard", "--strategy", "caching"], &SMALL[..]].concat();
    let timed = [&plain[..], &["--case-timeout", "1h"]].concat();
    assert_eq!(json(&folder, &plain), json(&folder, &timed));
}

#[test]
fn plugins_have_no_threshold() {
    let folder = TempDir::new().unwrap();
    let (_, err) = run(&folder, &["threshold", "checkerboard", "--strategy", "plugin:./x.so"], 2);
    assert!(err.contains("no threshold is searched for a plugin") && err.contains("`oomph replay`"), "{err}");
}

//! Run folders: what is damaged, missing, changed or written by somebody else is noticed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::command::{oomph, remove_checksums, run, table_without_checksums};

const SOME: [&str; 4] = ["run", "quick", "--filter", "quick/checkerboard/"];

fn run_some(folder: &TempDir, more: &[&str], code: i32) -> (String, String) {
    run(folder, &[&SOME[..], more].concat(), code)
}

/// A folder with a run in `a`, and the text of its `runs.csv`.
fn with_run() -> (TempDir, PathBuf, String) {
    let folder = TempDir::new().unwrap();
    run_some(&folder, &["--output", "a"], 0);
    let rows = folder.path().join("a/runs.csv");
    let text = fs::read_to_string(&rows).unwrap();
    assert!(text.lines().count() > 3, "{text}");
    (folder, rows, text)
}

#[test]
fn changed_rows_are_refused() {
    let (folder, rows, text) = with_run();
    fs::write(&rows, text.replacen(",completed,", ",oom,", 1)).unwrap();
    let resume = [&SOME[..], &["--resume", "a"]].concat();
    for arguments in [&["report", "a"][..], &["compare", "a", "a"], &resume] {
        let (_, err) = run(&folder, arguments, 2);
        assert!(err.contains("runs.csv:") && err.contains("was changed or damaged after it was written"), "{err}");
    }
    fs::write(&rows, &text).unwrap();
    let environment = folder.path().join("a/env.json");
    let whole = fs::read_to_string(&environment).unwrap();
    fs::write(&environment, whole.replace("\"seed\": 1", "\"seed\": 2")).unwrap();
    let (_, err) = run(&folder, &["report", "a"], 2);
    assert!(err.contains("env.json was changed or damaged"), "{err}");
}

/// The cells of a column of a CSV file of a run.
fn column(folder: &TempDir, file: &str, column: &str) -> Vec<String> {
    let mut reader = csv::Reader::from_path(folder.path().join(file)).unwrap();
    let place = reader.headers().unwrap().iter().position(|name| name == column).unwrap();
    reader.records().map(|row| row.unwrap()[place].to_owned()).collect()
}

#[test]
fn need_is_searched_on_request() {
    let folder = TempDir::new().unwrap();
    let (plain, _) = run_some(&folder, &["--output", "plain"], 0);
    assert!(!plain.contains("lowest need"), "{plain}");
    assert!(column(&folder, "plain/runs.csv", "needed_bytes").iter().all(String::is_empty));
    let (searched, _) = run_some(&folder, &["--need", "--output", "searched"], 0);
    assert!(searched.contains("* = lowest need") && searched.contains("appetite"), "{searched}");
    let bytes = |name: &str| -> Vec<u64> {
        column(&folder, "searched/runs.csv", name).iter().map(|cell| cell.parse().unwrap()).collect()
    };
    let (needed, bound, reserved) = (bytes("needed_bytes"), bytes("live_peak_bytes"), bytes("peak_reserved_bytes"));
    let used = bytes("peak_device_used_bytes");
    for (place, needed) in needed.iter().enumerate() {
        assert!(*needed >= bound[place] && *needed <= used[place], "{needed} {place}");
    }
    assert_eq!(needed, reserved, "on this workload nothing can be given back");
    for (file, name) in [("comparison.csv", "need_ratio"), ("bounds.csv", "median_need_ratio")] {
        assert!(column(&folder, &format!("searched/{file}"), name).iter().all(|cell| cell.parse::<f64>().is_ok()));
    }
    assert!(column(&folder, "searched/runs.csv", "family").iter().all(|family| family == "checkerboard"));
    assert!(column(&folder, "searched/runs.csv", "split").iter().all(|split| split == "train"));
    for file in ["summary.md", "report.html"] {
        let text = fs::read_to_string(folder.path().join("searched").join(file)).unwrap();
        assert!(text.contains("need") && text.contains("appetite"), "{file}");
    }
}

#[test]
fn missing_rows_are_said() {
    let (folder, rows, text) = with_run();
    run_some(&folder, &["--output", "whole"], 0);
    let all = text.lines().count() - 1;
    let lines: Vec<&str> = text.lines().collect();
    let without_last = lines[..all].join("\n") + "\n";
    let cut = without_last.clone() + &lines[all][..20];
    for (damaged, missing) in [(String::new(), all), (format!("{}\n", lines[0]), all), (without_last, 1), (cut, 1)] {
        fs::write(&rows, &damaged).unwrap();
        let words = format!("a: {missing} of {all} cases {} no row", if missing == 1 { "has" } else { "have" });
        let (_, err) = run(&folder, &["report", "a"], 107);
        assert!(err.contains(&words), "{err}");
        let page = fs::read_to_string(folder.path().join("a/report.html")).unwrap();
        assert!(page.contains("What is missing?") && page.contains(&words[3..]), "the page says it");
        if missing < all {
            let (_, err) = run(&folder, &["compare", "whole", "a"], 107);
            assert!(err.contains(&words), "{err}");
        }
    }
    run_some(&folder, &["--resume", "a"], 0);
    assert_eq!(fs::read_to_string(&rows).unwrap(), text);
    run(&folder, &["report", "a"], 0);
    assert!(!fs::read_to_string(folder.path().join("a/report.html")).unwrap().contains("What is missing?"));
}

/// One quote must not hide rows, with checksums or without.
#[test]
fn stray_quote_is_noticed() {
    let (folder, rows, text) = with_run();
    let plain = table_without_checksums(&rows);
    for whole in [text, plain] {
        let second = whole.match_indices('\n').nth(1).unwrap().0 + 1;
        let cell = whole[second..].find(',').unwrap() + second + 1;
        for place in [second, cell, cell + 5] {
            fs::write(&rows, format!("{}\"{}", &whole[..place], &whole[place..])).unwrap();
            let (_, err) = run(&folder, &["report", "a"], 2);
            assert!(err.contains("runs.csv:"), "{err}");
        }
    }
}

#[test]
fn page_replaces_pages_only() {
    let (folder, _, _) = with_run();
    let environment = fs::read(folder.path().join("a/env.json")).unwrap();
    fs::write(folder.path().join("notes.html"), "my notes").unwrap();
    for place in ["a/env.json", "a/runs.csv", "a/other.csv", "a/cases/x", "notes.html"] {
        run(&folder, &["report", "a", "--output", place], 2);
    }
    assert_eq!(fs::read(folder.path().join("a/env.json")).unwrap(), environment);
    assert_eq!(fs::read(folder.path().join("notes.html")).unwrap(), b"my notes");
    for _ in 0..2 {
        run(&folder, &["report", "a", "--output", "page.html"], 0);
    }
}

const TRACES: &str = "question = 'the same?'\n[[group]]\nworkloads = ['./a.oomph', 'checkerboard']\n\
                      strategies = ['direct', 'caching']\n";

fn write_trace(folder: &TempDir, bytes: u64) {
    let trace = format!("oomph-trace 1 \"a\"\nalloc 1 {bytes}\nfree 1\nend 2\n");
    fs::write(folder.path().join("a.oomph"), trace).unwrap();
}

#[test]
fn changed_recording_is_not_resumed() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("suite.toml"), TRACES).unwrap();
    write_trace(&folder, 1048576);
    run(&folder, &["run", "./suite.toml", "--output", "a"], 0);
    let rows = folder.path().join("a/runs.csv");
    let whole = fs::read_to_string(&rows).unwrap();
    let first_rows: Vec<&str> = whole.lines().take(2).collect();
    fs::write(&rows, first_rows.join("\n") + "\n").unwrap();
    write_trace(&folder, 2097152);
    let (_, err) = run(&folder, &["run", "./suite.toml", "--resume", "a"], 2);
    assert!(
        err.contains("a.oomph/direct@sim") && err.contains("its workload or trace file is not what it was"),
        "{err}"
    );
    // A case without a row may change. The other cases go on.
    run(&folder, &["run", "./suite.toml", "--filter", "checkerboard", "--output", "b"], 0);
    run(&folder, &["run", "./suite.toml", "--resume", "b"], 0);
    write_trace(&folder, 1048576);
    run(&folder, &["run", "./suite.toml", "--resume", "a"], 0);
    assert_eq!(fs::read_to_string(&rows).unwrap(), whole);
}

#[test]
fn shards_of_other_recordings_are_not_merged() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("suite.toml"), TRACES).unwrap();
    for (shard, bytes) in [("1", 1048576), ("2", 2097152)] {
        write_trace(&folder, bytes);
        run(&folder, &["run", "./suite.toml", "--partition", &format!("slice:{shard}/2"), "--output", shard], 0);
    }
    let (_, err) = run(&folder, &["report", "1", "2", "--output", "both"], 107);
    assert!(err.contains("its workload or trace file, of 2 cases") && err.contains("a.oomph"), "{err}");
    assert!(!folder.path().join("both").exists());
}

#[test]
fn damaged_shards_are_not_merged() {
    let folder = TempDir::new().unwrap();
    for shard in ["1", "2"] {
        run_some(&folder, &["--partition", &format!("slice:{shard}/2"), "--output", shard], 0);
    }
    let refused = |code: i32, words: &str| {
        let (_, err) = run(&folder, &["report", "1", "2", "--output", "both"], code);
        assert!(err.contains(words), "{words}: {err}");
        assert!(!folder.path().join("both").exists());
    };
    let at = |name: &str| folder.path().join(name);
    fs::rename(at("1/cases"), at("kept")).unwrap();
    refused(107, "damaged: 1: the files in cases/ cannot be read");
    fs::rename(at("kept"), at("1/cases")).unwrap();

    let rows = fs::read_to_string(at("1/runs.csv")).unwrap();
    let again = rows.lines().nth(1).unwrap();
    fs::write(at("1/runs.csv"), format!("{rows}{again}\n")).unwrap();
    refused(107, "damaged: 1: there is more than one row for 1 case");
    fs::write(at("1/runs.csv"), &rows).unwrap();

    let environment = fs::read_to_string(at("2/env.json")).unwrap();
    let mut document: serde_json::Value = serde_json::from_str(&environment).unwrap();
    document["shard"]["shard"] = 99.into();
    document.as_object_mut().unwrap().remove("crc32");
    fs::write(at("2/env.json"), document.to_string()).unwrap();
    refused(2, "'slice:99/2' is not a partition");
    fs::write(at("2/env.json"), &environment).unwrap();
    run(&folder, &["report", "1", "2", "--output", "both"], 0);
}

/// As a single process does.
#[test]
fn merged_failures_have_their_exit_code() {
    let folder = TempDir::new().unwrap();
    let suite = "question = 'how much?'\nkind = 'threshold'\n[[group]]\nworkloads = ['checkerboard']\n\
                 strategies = ['direct', 'caching']\nset = { rounds = 1, blocks = 128 }\n";
    fs::write(folder.path().join("thresholds.toml"), suite).unwrap();
    let suite = "question = 'what saves?'\nkind = 'techniques'\n[[group]]\nworkloads = ['training']\n\
                 set = { layers = 1, context = 64, batch = 2 }\n";
    fs::write(folder.path().join("techniques.toml"), suite).unwrap();
    for shard in 1..=2 {
        let part = format!("slice:{shard}/2");
        run(&folder, &["run", "./thresholds.toml", "--partition", &part, "--output", &format!("s{shard}")], 0);
        let two = ["--exact", "--filter", "training/base", "--filter", "training/amp"];
        let run_techniques = ["run", "./techniques.toml", "--partition", &part, "--output", &format!("t{shard}")];
        run(&folder, &[&run_techniques[..], &two].concat(), 0);
    }
    let path = folder.path().join("s2/thresholds.json");
    let mut document: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (document["rows"][0]["status"], document["rows"][0]["reason"]) = ("error".into(), "no memory".into());
    document.as_object_mut().unwrap().remove("crc32");
    fs::write(&path, document.to_string()).unwrap();
    let (_, err) = run(&folder, &["report", "s1", "s2", "--output", "thresholds"], 104);
    assert!(err.contains("failed: thresholds/checkerboard") && err.contains(": no memory"), "{err}");

    let path = folder.path().join("t2/techniques.csv");
    let table = table_without_checksums(&path).replacen(",completed,", ",error,", 1);
    fs::write(&path, table).unwrap();
    let (_, err) = run(&folder, &["report", "t1", "t2", "--output", "techniques"], 104);
    assert!(err.contains("failed: training/amp"), "{err}");
}

#[test]
fn damaged_baseline_is_noticed_before_the_run() {
    let folder = TempDir::new().unwrap();
    run_some(&folder, &["--output", "a", "--save-baseline", "main"], 0);
    let rows = folder.path().join("results/local/baselines/main/runs.csv");
    let text = fs::read_to_string(&rows).unwrap();
    for (damaged, words) in [
        (text.replacen(",completed,", ",oom,", 1), "runs.csv:"),
        (text.lines().take(2).collect::<Vec<_>>().join("\n") + "\n", "the baseline 'main' is not a complete run"),
        (String::new(), "cases have no row"),
    ] {
        fs::write(&rows, damaged).unwrap();
        let (_, err) = run_some(&folder, &["--output", "b", "--baseline", "main"], 2);
        assert!(err.contains(words), "{words}: {err}");
        assert!(!folder.path().join("b").exists(), "nothing has run");
    }
    fs::write(&rows, text).unwrap();
    run_some(&folder, &["--output", "b", "--baseline", "main"], 0);
}

/// Starts these commands at once, and returns their exit codes.
fn at_once(folder: &TempDir, commands: &[Vec<String>]) -> Vec<i32> {
    let start = |words: &Vec<String>| {
        oomph(folder)
            .args(words)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = commands.iter().map(start).collect();
    children.into_iter().map(|mut child| child.wait().unwrap().code().unwrap()).collect()
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[test]
fn one_of_several_runs_gets_the_folder() {
    let folder = TempDir::new().unwrap();
    for round in 0..4 {
        let of = |seed: u32| words(&format!("run quick --filter quick/random/direct --seed {seed} --output {round}"));
        let codes = at_once(&folder, &[of(11), of(12), of(13)]);
        assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?}");
        assert!(codes.iter().all(|code| [0, 2].contains(code)), "{codes:?}");
        let place = folder.path().join(round.to_string());
        let environment = fs::read(place.join("env.json")).unwrap();
        let environment: serde_json::Value = serde_json::from_slice(&environment).unwrap();
        let rows = fs::read_to_string(place.join("runs.csv")).unwrap();
        assert!(rows.contains(&format!("#{},", environment["seed"])), "{rows}");
        assert!(!place.join("run.lock").exists());
        run(&folder, &["report", &round.to_string()], 0);
    }
}

#[test]
fn runs_of_one_second_get_their_own_folders() {
    let folder = TempDir::new().unwrap();
    let command = words("run quick --filter quick/random/direct");
    assert_eq!(at_once(&folder, &vec![command; 6]), [0; 6]);
    let places: BTreeSet<_> =
        fs::read_dir(folder.path().join("results/local")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(places.len(), 6);
    assert!(places.iter().all(|place| place.join("summary.md").is_file()));
}

/// Texts of a folder cannot imitate the output of the program.
#[test]
fn texts_of_a_folder_cannot_forge_lines() {
    const FORGED: &str = "\r\u{1b}[2K\nerror: forged\u{202e}";
    let folder = TempDir::new().unwrap();
    for name in ["a", "b"] {
        run_some(&folder, &["--output", name], 0);
        remove_checksums(&folder.path().join(name));
    }
    let path = folder.path().join("a/env.json");
    let mut environment: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for key in ["version", "commit", "machine", "device_name", "started"] {
        environment[key] = FORGED.into();
    }
    environment["schema"] = 1.into();
    fs::write(&path, environment.to_string()).unwrap();
    let rows = folder.path().join("a/runs.csv");
    let mut reader = csv::Reader::from_path(&rows).unwrap();
    let columns = reader.headers().unwrap().clone();
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&columns).unwrap();
    for row in reader.records().map(Result::unwrap) {
        let cells = columns.iter().zip(&row).map(|(column, cell)| match column {
            "case_id" | "workload" | "reason" if cell.contains("direct") => format!("{cell}{FORGED}"),
            "status" if row.iter().any(|cell| cell.contains("direct")) => "error".to_owned(),
            _ => cell.to_owned(),
        });
        writer.write_record(cells).unwrap();
    }
    fs::write(&rows, writer.into_inner().unwrap()).unwrap();
    let resume = [&SOME[..], &["--resume", "a"]].concat();
    for arguments in [&["report", "a"][..], &["compare", "a", "b"], &["compare", "b", "a"], &resume] {
        let output = oomph(&folder).args(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        let is_forged =
            text.lines().any(|line| line.starts_with("error: forged")) || text.contains(['\u{1b}', '\u{202e}', '\r']);
        assert!(!is_forged, "{arguments:?}: {}", text.escape_debug());
    }
    let page = fs::read_to_string(folder.path().join("a/report.html")).unwrap();
    assert!(!page.contains(['\u{1b}', '\u{202e}']), "the page has no invisible characters");
}

#[test]
fn published_folders_are_still_read() {
    let folder = TempDir::new().unwrap();
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/schema-1");
    let mut read = 0;
    for entry in fs::read_dir(published).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.join("env.json").is_file() {
            run(&folder, &["report", entry.to_str().unwrap(), "--output", "page.html"], 0);
            read += 1;
        }
    }
    assert!(read >= 7, "{read}");
}

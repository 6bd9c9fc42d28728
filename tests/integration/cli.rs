//! Runs the binary as a user does.

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use crate::command::{end_within, oomph, remove_checksums, run, signal, wait_until, with_default_signals};
use tempfile::TempDir;

fn empty() -> TempDir {
    TempDir::new().unwrap()
}

/// Runs a command that must be refused with exit code 2 and exactly one line that contains all of
/// `words`.
#[track_caller]
fn refused(folder: &TempDir, arguments: &[&str], words: &[&str]) {
    let (out, err) = run(folder, arguments, 2);
    assert_eq!(out, "", "a refusal prints nothing on standard output");
    for word in words {
        assert!(err.contains(word), "{arguments:?}: '{word}' is missing in: {err}");
    }
}

fn run_files(folder: &TempDir, name: &str) -> String {
    fs::read_to_string(folder.path().join(name).join("runs.csv")).unwrap()
}

#[test]
fn help_teaches_and_lists_the_exit_codes() {
    let (out, _) = run(empty(), &["--help"], 0);
    for word in ["run", "replay", "inspect", "convert", "list", "doctor", "completions", "103"] {
        assert!(out.contains(word), "{word} is missing in {out}");
    }
    let (out, _) = run(empty(), &["replay", "--help"], 0);
    assert!(out.contains("caching:expandable_segments:True") && out.contains("Examples:"), "{out}");
}

#[test]
fn help_groups_commands_by_what_users_come_for() {
    let (out, _) = run(empty(), &["--help"], 0);
    let place = |text: &str| out.find(text).unwrap_or_else(|| panic!("{text} is missing in {out}"));
    let places = [
        "You come with a problem:\n  rehearse ",
        "\n  advise ",
        "\n  leaks ",
        "\n  inspect ",
        "You compare allocators:\n  run ",
        "\n  replay ",
        "Set-up:\n  doctor ",
        "`oomph COMMAND --help`",
        "Options:\n",
        "Exit codes:\n",
    ]
    .map(place);
    assert!(places.is_sorted(), "{out}");
    assert_eq!(out.matches("\n  replay ").count(), 1, "every command once: {out}");
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
    assert_eq!(run(empty(), &["help"], 0).0, out);
}

#[test]
fn no_subcommand_elsewhere_shows_the_overview() {
    let folder = empty();
    let (out, err) = run(&folder, &[], 0);
    assert!(out.contains("You come with a problem:\n  rehearse ") && out.contains("`oomph run quick` runs"), "{out}");
    assert_eq!(err, "");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is written");
    // A folder with other suites is not the repository.
    fs::create_dir(folder.path().join("suites")).unwrap();
    assert_eq!(run(&folder, &[], 0).0, out);
}

/// `cargo run --release` in the repository.
#[test]
fn no_subcommand_runs_quick_where_it_is() {
    let folder = empty();
    fs::create_dir(folder.path().join("suites")).unwrap();
    fs::copy("suites/quick.toml", folder.path().join("suites/quick.toml")).unwrap();
    let (out, _) = run(&folder, &[], 0);
    assert!(out.contains("checkerboard") && out.contains("caching"), "{out}");
    let place = out.lines().find_map(|line| line.strip_prefix("results: ")).expect("the last line says where");
    for file in ["runs.csv", "comparison.csv", "env.json", "summary.md", "cases"] {
        assert!(folder.path().join(place).join(file).exists(), "{file}");
    }
}

#[test]
fn several_sources_are_compared_in_one_table() {
    let folder = empty();
    let twins = ["replay", "leak-loss-sum", "leak-loss-sum-fixed", "-s", "caching", "--set", "steps=2"];
    let twins = [&twins[..], &["--set", "layers=1", "--set", "width=64", "--set", "heads=1"]].concat();
    let (table, _) = run(&folder, &twins, 0);
    assert_eq!(table.matches("fragmen-").count(), 1, "one table: {table}");
    for name in ["leak-loss-sum[", "leak-loss-sum-fixed["] {
        let is_row =
            |line: &str| line.trim_start().starts_with(name) && line.contains("] ") && line.contains(" caching ");
        assert!(table.lines().any(is_row), "{table}");
        assert!(table.contains(&format!("reserved over events of {name}")), "a plot for each workload: {table}");
    }
    let (json, _) = run(&folder, &[&twins[..], &["--format", "json"]].concat(), 0);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let workloads: Vec<&str> =
        json["rows"].as_array().unwrap().iter().map(|row| row["workload"].as_str().unwrap()).collect();
    assert!(workloads.len() == 2 && workloads[0].starts_with("leak-loss-sum["), "{workloads:?}");
    assert!(workloads[1].starts_with("leak-loss-sum-fixed["), "{workloads:?}");
    let alone = [&["replay", "leak-loss-sum"], &twins[3..]].concat();
    let (csv, _) = run(&folder, &[&twins[..], &["--format", "csv"]].concat(), 0);
    let (csv_alone, _) = run(&folder, &[&alone[..], &["--format", "csv"]].concat(), 0);
    assert_eq!(csv.lines().count(), 3, "{csv}");
    assert!(csv.starts_with(&csv_alone), "the row of a source does not depend on the others: {csv}\n{csv_alone}");
}

#[test]
fn sources_of_one_name_are_told_apart() {
    let folder = empty();
    for (place, seed) in [("a", "1"), ("b", "2")] {
        fs::create_dir(folder.path().join(place)).unwrap();
        run(&folder, &["convert", "checkerboard", &format!("{place}/run.oomph"), "--seed", seed], 0);
    }
    let (csv, _) = run(&folder, &["replay", "a/run.oomph", "b/run.oomph", "-s", "direct", "--format", "csv"], 0);
    assert!(csv.contains("replay/a/run.oomph/direct@") && csv.contains("replay/b/run.oomph/direct@"), "{csv}");
    refused(&folder, &["replay", "a/run.oomph", "a/run.oomph"], &["'a/run.oomph' is given twice", "--repeat"]);
    let export = ["replay", "a/run.oomph", "b/run.oomph", "-s", "caching", "--export-snapshot", "x.pickle"];
    refused(&folder, &export, &["--export-snapshot needs exactly one SOURCE; there are 2"]);
    refused(&folder, &["replay", "a/run.oomph", "b/none.oomph"], &["b/none.oomph: no such file"]);
    let recorded = ["replay", "a/run.oomph", "checkerboard", "-s", "caching:recorded"];
    refused(&folder, &recorded, &["caching:recorded", "'a/run.oomph' is something else"]);
}

#[test]
fn cases_of_suites_never_share_an_id() {
    let folder = empty();
    let suite = "question = 'what?'\n[[group]]\nworkloads = ['*/snapshot.oomph']\nstrategies = ['direct']\n";
    for (place, rounds) in [("rank0", "2"), ("rank1", "3")] {
        fs::create_dir(folder.path().join(place)).unwrap();
        let file = format!("{place}/snapshot.oomph");
        run(&folder, &["convert", "checkerboard", "--set", &format!("rounds={rounds}"), &file], 0);
        fs::write(folder.path().join(place).join("mine.toml"), suite).unwrap();
    }
    run(&folder, &["run", "rank0/mine.toml", "--output", "out"], 0);
    let rows = run_files(&folder, "out");
    assert_eq!(rows.lines().count(), 3, "{rows}");
    assert!(rows.contains("mine/rank0/snapshot.oomph/direct") && rows.contains("mine/rank1/snapshot.oomph/direct"));
    refused(&folder, &["run", "rank0/mine.toml", "rank1/mine.toml"], &["two suites called 'mine'", "rank1/mine.toml"]);
    refused(&folder, &["run", "quick", "quick"], &["suite 'quick' is given twice"]);
    fs::write(folder.path().join("twice.toml"), suite.replace("['direct']", "['direct', 'direct']")).unwrap();
    refused(
        &folder,
        &["run", "twice.toml"],
        &["suite 'twice': two cases have the id 'twice/rank0/snapshot.oomph/direct"],
    );
}

#[test]
fn rows_do_not_depend_on_jobs() {
    let folder = empty();
    run(&folder, &["run", "quick", "--jobs", "1", "--output", "a"], 0);
    run(&folder, &["run", "quick", "--jobs", "4", "--output", "b"], 0);
    assert_eq!(run_files(&folder, "a"), run_files(&folder, "b"));
    run(&folder, &["run", "quick", "--seed", "99", "--output", "c"], 0);
    assert_ne!(run_files(&folder, "a"), run_files(&folder, "c"), "another seed must change the result");
}

#[test]
fn resume_runs_missing_cases_only() {
    let folder = empty();
    run(&folder, &["run", "quick", "--output", "whole"], 0);
    run(&folder, &["run", "quick", "--output", "torn"], 0);
    let rows = folder.path().join("torn/runs.csv");
    let text = fs::read_to_string(&rows).unwrap();
    let kept: Vec<&str> = text.lines().take(4).collect();
    // Three complete rows and the start of a fourth, as a crash leaves them.
    fs::write(&rows, format!("{}\n1,quick/chec", kept.join("\n"))).unwrap();
    run(&folder, &["run", "quick", "--resume", "torn"], 0);
    assert_eq!(run_files(&folder, "whole"), run_files(&folder, "torn"));
}

#[test]
fn an_existing_folder_is_never_overwritten() {
    let folder = empty();
    run(&folder, &["run", "quick", "--filter", "checkerboard/direct", "--output", "a"], 0);
    let before = run_files(&folder, "a");
    refused(&folder, &["run", "quick", "--output", "a"], &["a", "--resume"]);
    assert_eq!(run_files(&folder, "a"), before);
}

#[test]
fn empty_filter_has_its_exit_code() {
    let folder = empty();
    let (all, _) = run(&folder, &["run", "--list"], 0);
    let (some, _) = run(&folder, &["run", "--list", "--filter", "checkerboard", "--skip", "direct"], 0);
    assert!(some.lines().count() > 0 && some.lines().count() < all.lines().count());
    assert!(some.lines().all(|id| id.contains("checkerboard") && !id.contains("direct")), "{some}");
    let (_, err) = run(&folder, &["run", "--filter", "no such case"], 4);
    assert!(err.contains("--list"), "{err}");
}

#[test]
fn wrong_kinds_of_names_are_explained() {
    let folder = empty();
    run(&folder, &["convert", "checkerboard", "steps.oomph"], 0);
    let (_, err) = run(&folder, &["steps.oomph"], 2);
    assert!(err.contains("unrecognized subcommand") && err.contains("oomph advise steps.oomph"), "{err}");
    refused(&folder, &["run", "steps.oomph"], &["not a suite", "`oomph replay steps.oomph`"]);
    refused(&folder, &["run", "checkerboard"], &["not a suite", "`oomph replay checkerboard`"]);
    refused(&folder, &["replay", "steps.ooph"], &["steps.ooph: no such file; did you mean 'steps.oomph'?"]);
    refused(&folder, &["replay", "others.oomph"], &["others.oomph: no such file"]);
    refused(&folder, &["report", "nowhere"], &["nowhere: no such folder"]);
    refused(&folder, &["report", "steps.oomph"], &["steps.oomph is a file", "folder of a run"]);
    refused(&folder, &["run", "--filter", "checkerboard", "--output", "steps.oomph"], &["steps.oomph is a file"]);
    refused(&folder, &["replay", "checkerboard", "--limit", "99999999999999GiB"], &["neither a size"]);
    let missing = ["replay", "checkerboard", "-s", "direct", "--export-csv", "nowhere/rows.csv"];
    let (_, err) = run(&folder, &missing, 2);
    assert!(err.contains("nowhere/rows.csv: ") && !err.contains(".new"), "{err}");
}

#[test]
fn suite_with_unknown_base_is_refused() {
    let folder = empty();
    let suite =
        "question = \"?\"\nbase = \"cachin\"\n[[group]]\nworkloads = [\"checkerboard\"]\nstrategies = [\"direct\"]\n";
    fs::write(folder.path().join("mine.toml"), suite).unwrap();
    refused(&folder, &["run", "mine.toml"], &["suite 'mine'", "unknown strategy 'cachin'", "did you mean 'caching'?"]);
}

#[test]
fn help_wraps_only_at_the_terminal_width() {
    let (help, _) = run(empty(), &["advise", "--help"], 0);
    let lines: Vec<&str> = help.lines().collect();
    let is_prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
    for pair in lines.windows(2).filter(|pair| pair.iter().all(|line| is_prose(line))) {
        let next = pair[1].split(' ').next().unwrap();
        assert!(pair[0].len() + 1 + next.len() > 100, "'{next}' would have fit after: {}", pair[0]);
    }
    assert!(help.contains("Examples:\n  oomph advise snapshot.pickle\n"), "{help}");
}

#[test]
fn unknown_names_suggest_the_nearest() {
    let folder = empty();
    refused(&folder, &["run", "quik"], &["unknown suite 'quik'", "did you mean 'quick'?"]);
    refused(&folder, &["replay", "chekerboard"], &["unknown workload 'chekerboard'", "did you mean 'checkerboard'?"]);
    refused(&folder, &["run", "nope"], &["unknown suite 'nope'", "there are:", "quick"]);
    refused(&folder, &["replay", "nope"], &["unknown workload 'nope'", "`oomph list` names all"]);
    refused(&folder, &["replay", "checkerboard", "-s", "nope"], &["unknown strategy 'nope'", "there are:", "caching"]);
    refused(&folder, &["replay", "checkerboard", "-s", "cachign"], &["unknown strategy", "did you mean 'caching'?"]);
    refused(&folder, &["replay", "checkerboard", "-s", "caching:max_split_size:8"], &["max_split_size_mb"]);
    refused(&folder, &["replay", "checkerboard", "--set", "ruonds=2"], &["ruonds", "rounds"]);
    refused(&folder, &["replay", "checkerboard", "--device", "sin"], &["unknown device 'sin'", "did you mean 'sim'?"]);
}

#[test]
fn missing_device_is_an_error() {
    let (out, err) = run(empty(), &["replay", "checkerboard", "--device", "cuda:4000"], 103);
    assert_eq!(out, "");
    assert!(err.contains("cuda"), "{err}");
}

#[test]
fn impossible_devices_and_limits_are_refused() {
    let folder = empty();
    refused(&folder, &["replay", "checkerboard", "--card", "0"], &["too small"]);
    refused(&folder, &["replay", "checkerboard", "--limit", "lots"], &["lots", "24GiB", "0.5"]);
}

#[test]
fn broken_files_are_named_with_their_line() {
    let folder = empty();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("suite.toml", "question = 'why?'\n[[group]\n");
    refused(&folder, &["run", "./suite.toml"], &["suite.toml", "line 2"]);
    write("empty.toml", "question = 'why?'\ngroup = []\n");
    refused(&folder, &["run", "./empty.toml"], &["empty.toml"]);
    write("unknown.toml", "question = 'why?'\n[[group]]\nworkloads = ['checkerbord']\nstrategies = 'all'\n");
    refused(&folder, &["run", "./unknown.toml"], &["unknown", "did you mean 'checkerboard'?"]);
    write("recipe.toml", "generator = 'checkerbord'\npurpose = ''\norigin = ''\n");
    refused(&folder, &["replay", "recipe.toml"], &["recipe.toml", "checkerboard"]);
    refused(&folder, &["replay", "missing.oomph"], &["missing.oomph"]);
    fs::create_dir(folder.path().join("folder")).unwrap();
    refused(&folder, &["replay", "folder"], &["folder", "directory"]);

    run(&folder, &["convert", "checkerboard", "good.oomph"], 0);
    let good = fs::read_to_string(folder.path().join("good.oomph")).unwrap();
    let mut lines: Vec<&str> = good.lines().collect();
    let broken = lines.len() / 2;
    lines[broken] = "alock 1 2 3";
    write("bad.oomph", &lines.join("\n"));
    refused(&folder, &["inspect", "bad.oomph"], &[&format!("bad.oomph:{}", broken + 1), "alock"]);
}

#[test]
fn converted_trace_replays_equally() {
    let folder = empty();
    for file in ["t.oomph", "t.oomph.gz"] {
        run(&folder, &["convert", "power-law", file], 0);
    }
    let numbers = |source: &str| {
        let (out, _) = run(&folder, &["replay", source, "--format", "json"], 0);
        let document: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(document["schema"], 2);
        let rows = document["rows"].as_array().unwrap().clone();
        let of = |row: &serde_json::Value| {
            (row["strategy"].clone(), row["peak_reserved_bytes"].clone(), row["driver_ns"].clone())
        };
        rows.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(numbers("power-law"), numbers("t.oomph"));
    assert_eq!(numbers("power-law"), numbers("t.oomph.gz"));
    assert!(
        fs::metadata(folder.path().join("t.oomph.gz")).unwrap().len()
            < fs::metadata(folder.path().join("t.oomph")).unwrap().len() / 2
    );
}

#[test]
fn running_out_of_memory_is_a_result_with_its_cause() {
    let folder = empty();
    let (out, _) = run(&folder, &["replay", "checkerboard", "--limit", "64MiB", "--format", "json"], 0);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    for row in document["rows"].as_array().unwrap() {
        assert_eq!(row["status"], "oom", "{row}");
        assert!(row["oom_cause"] == "exhaustion" || row["oom_cause"] == "fragmentation", "{row}");
        assert!(row["peak_reserved_bytes"].as_u64().unwrap() <= 64 << 20, "{row}");
    }
}

#[test]
fn environment_settings_need_caching_env() {
    let folder = empty();
    let replay = |strategy: &str| {
        let output = oomph(&folder)
            .args(["replay", "checkerboard", "--format", "json", "--strategy", strategy])
            .env("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
            .output()
            .unwrap();
        assert!(output.status.success());
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (document["rows"][0]["strategy"].clone(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(replay("caching").0, "caching");
    let (strategy, note) = replay("caching:env");
    assert_eq!(strategy, "caching:max_split_size_mb:64");
    assert!(note.contains("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"), "{note}");
}

#[test]
fn inspect_says_what_is_in_a_workload() {
    let folder = empty();
    let (out, _) = run(&folder, &["inspect", "training"], 0);
    for word in ["events", "peak live", "steps", "phases", "sizes", "lifetimes"] {
        assert!(out.contains(word), "{word} is missing in {out}");
    }
    let (out, _) = run(&folder, &["inspect", "training", "--format", "json"], 0);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(document["rows"][0]["events"].as_u64().unwrap() > 1000, "{document}");
}

#[test]
fn list_names_everything_that_can_be_used() {
    let folder = empty();
    let (out, _) = run(&folder, &["list"], 0);
    for word in ["strategies:", "workloads:", "generators:", "suites:", "caching", "checkerboard", "quick"] {
        assert!(out.contains(word), "{word} is missing in {out}");
    }
    let (out, _) = run(&folder, &["list", "strategies", "--long"], 0);
    assert!(out.contains("max_split_size_mb"), "{out}");
    let (out, _) = run(&folder, &["list", "--json"], 0);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(document["rows"].as_array().unwrap().len() > 5);
}

#[test]
fn help_lists_only_exports_under_exports() {
    for command in ["run", "replay"] {
        let (help, _) = run(empty(), &[command, "--help"], 0);
        let (before, after) = help.split_once("\nExports:\n").unwrap();
        assert!(before.contains("--format") && !before.contains("--export-csv"), "{help}");
        assert!(after.contains("--export-html") && !after.contains("--format"), "{help}");
    }
}

#[cfg(unix)]
#[test]
fn folder_name_may_be_invalid_utf8() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let folder = empty();
    let place = folder.path().join(OsStr::from_bytes(b"run\xfe"));
    let words = ["run", "quick", "--filter", "checkerboard/direct", "--output"];
    let ended = oomph(&folder).args(words).arg(&place).output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
    assert!(place.join("runs.csv").is_file());
}

#[test]
fn list_marks_local_files() {
    let folder = empty();
    let put = |path: &str, text: &str| {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let suite = "question = 'what of mine?'\n[[group]]\nworkloads = ['tidal']\nstrategies = ['caching']\n";
    let recipe = "generator = 'random'\npurpose = 'ebb and flood'\norigin = 'the sea'\n[set]\nallocations = 10\n";
    put("suites/quick.toml", suite);
    put("suites/harbour.toml", suite);
    put("workloads/tidal.toml", recipe);
    put("workloads/broken.toml", "generator = 'randm'\npurpose = ''\norigin = ''\n");

    let (out, _) = run(&folder, &["list"], 0);
    let line = |name: &str| out.lines().find(|line| line.trim_start().starts_with(&format!("{name} "))).unwrap();
    for (name, rest) in [
        ("quick", "what of mine? [suites/quick.toml, replaces the built-in one]"),
        ("harbour", "what of mine? [suites/harbour.toml]"),
        ("tidal", "ebb and flood [workloads/tidal.toml]"),
        ("broken", "invalid: workloads/broken.toml:1:13: unknown generator 'randm'"),
    ] {
        assert!(line(name).contains(rest), "{}", line(name));
    }
    assert!(!line("checkerboard").contains('['), "{}", line("checkerboard"));
    let (out, _) = run(&folder, &["list", "suites", "--json"], 0);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = |name: &str| document["rows"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(row("quick")["file"], "suites/quick.toml");
    assert_eq!(row("quick")["replaces_built_in"], true);
    assert_eq!(row("harbour")["file"], "suites/harbour.toml");
    assert!(row("harbour").get("replaces_built_in").is_none() && row("claims").get("file").is_none());

    refused(&folder, &["run", "harbor"], &["unknown suite 'harbor'; did you mean 'harbour'?"]);
    refused(&folder, &["inspect", "tidle"], &["unknown workload 'tidle'; did you mean 'tidal'?"]);
    refused(&folder, &["inspect", "zzz"], &["unknown workload 'zzz'; `oomph list` names all "]);
    run(&folder, &["run", "harbour", "--output", "out"], 0);
}

#[test]
fn doctor_and_completions_work_anywhere() {
    let folder = empty();
    let (out, _) = run(&folder, &["doctor"], 0);
    assert!(out.contains("simulated") && out.contains("cuda"), "{out}");
    let (out, _) = run(&folder, &["completions", "bash"], 0);
    assert!(out.contains("_oomph"), "{out}");
}

#[test]
fn closed_pipe_is_not_an_error() {
    let folder = empty();
    let script = format!("{} list --long | head -1", env!("CARGO_BIN_EXE_oomph"));
    let output =
        Command::new("bash").args(["-o", "pipefail", "-c", &script]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn ctrl_c_keeps_cases_and_resume_continues() {
    let folder = empty();
    let seeds: Vec<String> = (1..=400).map(|seed| seed.to_string()).collect();
    let suite = format!(
        "question = 'how long?'\nseeds = [{}]\n[[group]]\nworkloads = ['power-law']\nstrategies = ['caching']\n",
        seeds.join(",")
    );
    fs::write(folder.path().join("long.toml"), suite).unwrap();
    let mut command = oomph(&folder);
    command.args(["run", "./long.toml", "--jobs", "1", "--output", "out", "--format", "csv"]);
    let mut child = with_default_signals(&command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let rows = folder.path().join("out/runs.csv");
    wait_until("there are rows", || fs::read_to_string(&rows).ok().filter(|text| text.lines().count() > 3));
    signal("INT", child.id().into());
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{complaint}");
    assert!(complaint.contains("--resume out"), "{complaint}");
    let kept = fs::read_to_string(&rows).unwrap().lines().count() - 1;
    assert!((3..400).contains(&kept), "{kept} cases were kept");
    run(&folder, &["run", "./long.toml", "--resume", "out", "--format", "csv"], 0);
    assert_eq!(fs::read_to_string(&rows).unwrap().lines().count() - 1, 400);
}

/// As under nohup.
#[test]
fn ignored_signal_stays_ignored() {
    let folder = empty();
    let mut command = Command::new("env");
    command.arg("--ignore-signal=HUP").arg(env!("CARGO_BIN_EXE_oomph")).current_dir(folder.path());
    command.args(["convert", "training", "out.oomph", "--set", "steps=100000000"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let is_writing = || {
        let files = fs::read_dir(folder.path()).unwrap();
        files.flatten().any(|file| file.file_name().to_string_lossy().ends_with(".partial")).then_some(())
    };
    wait_until("there is a temporary file", is_writing);
    signal("HUP", child.id().into());
    thread::sleep(Duration::from_millis(300));
    assert_eq!(is_writing(), Some(()));
    signal("TERM", child.id().into());
    assert_eq!(end_within(Duration::from_secs(20), child).status.code(), Some(130));
}

#[test]
fn first_signal_ends_an_endless_replay() {
    let folder = empty();
    let child = oomph(&folder)
        .args(["replay", "training", "--strategy", "null", "--set", "steps=100000000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(500));
    signal("TERM", child.id().into());
    assert_eq!(end_within(Duration::from_secs(20), child).status.code(), Some(130));
}

#[test]
fn a_folder_is_not_resumed_with_another_suite() {
    let folder = empty();
    run(&folder, &["run", "quick", "--filter", "checkerboard/direct", "--output", "a"], 0);
    let before = run_files(&folder, "a");
    refused(
        &folder,
        &["run", "throughput", "--filter", "hot-4k/null", "--resume", "a"],
        &["quick/checkerboard", "same"],
    );
    assert_eq!(run_files(&folder, "a"), before);
}

#[test]
fn refused_folder_is_not_touched() {
    let folder = empty();
    run(&folder, &["run", "quick", "--filter", "checkerboard", "--output", "a"], 0);
    let rows = folder.path().join("a/runs.csv");
    remove_checksums(&folder.path().join("a"));
    // One case failed and the last line is cut short: a resumed run would drop both.
    let broken = run_files(&folder, "a").replacen(",completed,", ",error,", 1) + "1,quick/chec";
    fs::write(&rows, &broken).unwrap();
    refused(
        &folder,
        &["run", "throughput", "--filter", "hot-4k/null", "--resume", "a"],
        &["quick/checkerboard", "same"],
    );
    assert_eq!(run_files(&folder, "a"), broken);
    // A failed row, which would run again, identifies another run as well as a completed one.
    let text = run_files(&folder, "a");
    let only_broken: Vec<&str> = text.lines().take(2).collect();
    fs::write(&rows, only_broken.join("\n") + "\n").unwrap();
    refused(
        &folder,
        &["run", "throughput", "--filter", "hot-4k/null", "--resume", "a"],
        &["quick/checkerboard", "same"],
    );
}

#[test]
fn failed_conversion_leaves_no_partial_file() {
    let folder = empty();
    fs::write(folder.path().join("bad.oomph"), "oomph-trace 1\nnonsense\n").unwrap();
    refused(&folder, &["convert", "bad.oomph", "out.oomph"], &["bad.oomph:2"]);
    assert!(!Path::new(&folder.path().join("out.oomph")).exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
}

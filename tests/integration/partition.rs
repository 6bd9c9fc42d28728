//! A run shared by several processes: shards, merging, signals, and several devices.

use std::{fs, path::Path, process::Stdio};

use crate::command::{self, oomph};
use tempfile::TempDir;

const SUITE: &str = "question = 'who needs how much?'
[[group]]
workloads = ['checkerboard', 'random']
strategies = ['direct', 'caching', 'bfc']
[[group]]
workloads = ['checkerboard']
strategies = ['null', 'caching']
timed = true
seeds = [7]
";

fn folder_with(suite: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("suite.toml"), suite).unwrap();
    folder
}

/// Runs `oomph` with these arguments, checks the exit code, and returns standard output and
/// standard error together.
#[track_caller]
fn run(folder: &TempDir, words: &str, code: i32) -> String {
    let (out, err) = command::run(folder, &words.split(' ').collect::<Vec<_>>(), code);
    out + &err
}

fn read(folder: &TempDir, path: impl AsRef<Path>) -> String {
    fs::read_to_string(folder.path().join(path)).unwrap()
}

fn rows(folder: &TempDir, name: &str) -> usize {
    read(folder, Path::new(name).join("runs.csv")).lines().count() - 1
}

#[test]
fn merged_shards_name_failed_cases() {
    let folder = folder_with(&SUITE.replace("timed = true", "timeout = '1ns'"));
    run(&folder, "run ./suite.toml --output alone", 104);
    for number in 1..=2 {
        run(&folder, &format!("run ./suite.toml --partition slice:{number}/2 --output={number}"), 104);
    }
    let printed = run(&folder, "report 1 2 --output both", 104);
    assert!(printed.contains("merged: both") && printed.contains("failed: suite/checkerboard/null"), "{printed}");
    assert_eq!(read(&folder, "both/runs.csv"), read(&folder, "alone/runs.csv"));
    let environment: serde_json::Value = serde_json::from_str(&read(&folder, "both/env.json")).unwrap();
    let command: Vec<&str> =
        environment["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(command[1..], ["run", "./suite.toml"]);
}

#[test]
fn merged_shards_equal_a_single_run() {
    let folder = folder_with(SUITE);
    run(&folder, "run ./suite.toml --output alone", 0);
    for rule in ["slice", "hash"] {
        let shards: Vec<String> = (1..=3).map(|shard| format!("{rule}-{shard}")).collect();
        for (number, name) in (1..).zip(&shards) {
            run(&folder, &format!("run ./suite.toml --partition {rule}:{number}/3 --output {name}"), 0);
        }
        assert_eq!(shards.iter().map(|name| rows(&folder, name)).sum::<usize>(), 8);
        let printed = run(&folder, &format!("report {} --output {rule}", shards.join(" ")), 0);
        assert!(printed.contains(&format!("merged: {rule} (8 cases from 3 shards)")), "{printed}");
        for name in ["runs.csv", "comparison.csv"] {
            let merged = read(&folder, Path::new(rule).join(name));
            assert_eq!(merged, read(&folder, Path::new("alone").join(name)), "{rule}/{name}");
        }
        let timed = |name: &str| {
            let text = read(&folder, Path::new(name).join("timings.csv"));
            text.lines().map(|line| line.split(',').nth(1).unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(timed(rule), timed("alone"), "the same cases in the same order");
        let details = |name: &str| fs::read_dir(folder.path().join(name).join("cases")).unwrap().count();
        assert_eq!(details(rule), details("alone"));
        assert!(read(&folder, Path::new(rule).join("summary.md")).contains("8 cases"));
        assert!(folder.path().join(rule).join("report.html").is_file());
    }
}

#[test]
fn other_suite_kinds_can_be_divided() {
    let folder = folder_with(
        "question = 'how much suffices?'\nkind = 'threshold'\n[[group]]\nworkloads = ['checkerboard']\n\
         strategies = ['direct', 'caching', 'pool']\n",
    );
    fs::write(folder.path().join("techniques.toml"), TECHNIQUES).unwrap();
    for (suite, options, table, beside) in [
        ("./suite.toml", "", "thresholds.csv", "thresholds.json"),
        ("./techniques.toml", SOME_TECHNIQUES, "techniques.csv", "techniques.md"),
        ("claims", " --exact --filter dangling --filter too-large --filter restart", "claims.csv", "claims.md"),
    ] {
        let listed = run(&folder, &format!("run {suite}{options} --list"), 0);
        assert!(listed.lines().count() > 1, "{listed}");
        run(&folder, &format!("run {suite}{options} --output alone-{table}"), 0);
        for shard in 1..=2 {
            run(&folder, &format!("run {suite}{options} --partition slice:{shard}/2 --output {shard}-{table}"), 0);
        }
        // The order of the shards does not matter.
        run(&folder, &format!("report 2-{table} 1-{table} --output merged-{table}"), 0);
        let file = |run: &str, name: &str| read(&folder, Path::new(&format!("{run}-{table}")).join(name));
        for name in [table, beside] {
            assert_eq!(file("merged", name), file("alone", name), "{name}");
        }
        let lines = |run: &str| file(run, table).lines().count() - 1;
        assert_eq!(lines("1") + lines("2"), lines("alone"));
        assert!(lines("1") > 0 && lines("2") > 0, "both shards ran cases");
    }
}

const TECHNIQUES: &str = "question = 'what saves?'\nkind = 'techniques'\n[[group]]\n\
    workloads = ['training', 'reference-gpt-163m']\nset = { layers = 1, context = 64, batch = 2 }\n";

/// Rows of two models, without the base row that the second model's row is compared with.
const SOME_TECHNIQUES: &str = " --exact --filter training/base --filter training/amp --filter training/ckpt \
    --filter training/zero1 --filter reference-gpt-163m/amp";

#[test]
fn incomplete_technique_shards_are_refused() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("techniques.toml"), TECHNIQUES).unwrap();
    let only = format!("run ./techniques.toml{SOME_TECHNIQUES}");
    for shard in 1..=2 {
        run(&folder, &format!("{only} --partition slice:{shard}/2 --output {shard}"), 0);
    }
    let printed = run(&folder, "report 1 --output merged", 107);
    assert!(printed.contains("missing: shard slice:2/2, with 2 cases\n  training/amp\n  training/zero1"), "{printed}");
    let whole = read(&folder, "2/techniques.csv");
    let (rest, last) = whole.trim_end().rsplit_once('\n').unwrap();
    fs::write(folder.path().join("2/techniques.csv"), format!("{rest}\n")).unwrap();
    let printed = run(&folder, "report 1 2 --output merged", 107);
    assert!(printed.contains("missing: 2 lacks 1 case\n  training/zero1"), "{printed}");
    assert!(!folder.path().join("merged").exists());

    run(&folder, &format!("{only} --partition slice:2/2 --resume 2"), 0);
    assert_eq!(read(&folder, "2/techniques.csv"), whole, "{last} came back");
    run(&folder, "report 1 2 --output merged", 0);
}

#[test]
fn incomplete_shards_are_refused_by_name() {
    let folder = folder_with(SUITE);
    for shard in [1, 2] {
        run(&folder, &format!("run ./suite.toml --partition slice:{shard}/3 --output {shard}"), 0);
    }
    run(&folder, "run ./suite.toml --partition slice:3/3 --seed 9 --output other", 0);
    run(&folder, "run ./suite.toml --filter random/direct --output whole", 0);

    let printed = run(&folder, "report 1 2 --output merged", 107);
    assert!(printed.contains("missing: shard slice:3/3, with 2 cases\n  suite/checkerboard/bfc@sim"), "{printed}");
    let printed = run(&folder, "report 1 2 other --output merged", 107);
    assert!(printed.contains("different: other: its seed is '9', that of 1 is '1'"), "{printed}");
    assert!(printed.contains("its plan.csv is not that of 1"), "{printed}");
    let printed = run(&folder, "report 1 2 1 --output merged", 107);
    assert!(printed.contains("duplicate: 1 and 1 both hold shard slice:1/3"), "{printed}");
    assert!(!folder.path().join("merged").exists());

    let printed = run(&folder, "report 1 2 whole --output merged", 2);
    assert!(printed.contains("whole is a complete run, not a shard"), "{printed}");
    assert!(!folder.path().join("merged").exists());

    let printed = run(&folder, "report 1 2 --output half.html", 107);
    assert!(printed.contains("report: half.html") && folder.path().join("half.html").is_file(), "{printed}");
    run(&folder, "report 1", 0);
    run(&folder, "report 1 whole --output mixed.html", 0);
}

#[test]
fn job_array_tasks_take_their_part() {
    let folder = folder_with(SUITE);
    let task = |id: &str| {
        let mut command = oomph(&folder);
        command.args(["run", "./suite.toml", "--partition", "slurm", "--format", "csv"]);
        for (name, value) in [("ID", id), ("COUNT", "4"), ("MIN", "10"), ("MAX", "16"), ("STEP", "2")] {
            command.env(format!("SLURM_ARRAY_TASK_{name}"), value);
        }
        command.output().unwrap()
    };
    assert_eq!(task("12").status.code(), Some(0));
    let name = fs::read_dir(folder.path().join("results/local")).unwrap().next().unwrap().unwrap().file_name();
    let name = name.into_string().unwrap();
    assert!(name.ends_with("-suite-2-of-4"), "{name}");
    let environment = read(&folder, Path::new("results/local").join(name).join("env.json"));
    let environment: serde_json::Value = serde_json::from_str(&environment).unwrap();
    assert_eq!(environment["shard"], serde_json::json!({"rule": "slice", "shard": 2, "shards": 4}));
    assert_eq!(environment["settings"]["suites"], serde_json::json!(["suite"]));

    let outside = task("11");
    let words = String::from_utf8_lossy(&outside.stderr).into_owned();
    assert_eq!(outside.status.code(), Some(2));
    assert!(words.contains("task 11 is not one of 4 tasks from 10 in steps of 2"), "{words}");
    let words = run(&folder, "run ./suite.toml --partition slurm", 2);
    assert!(words.contains("SLURM_ARRAY_TASK_ID is not set") && words.contains("sbatch --array"), "{words}");
    assert!(run(&folder, "run ./suite.toml --partition third", 2).contains("write slice:2/4"));
    run(&folder, "run ./suite.toml --partition slice:1/2 --baseline main", 2);
}

#[test]
fn a_shard_without_cases_is_a_result() {
    let folder = folder_with(SUITE);
    let only = "run ./suite.toml --filter random/direct";
    for shard in 1..=2 {
        run(&folder, &format!("{only} --partition slice:{shard}/2 --output {shard}"), 0);
    }
    assert_eq!((rows(&folder, "1"), rows(&folder, "2")), (1, 0));
    run(&folder, "report 1 2 --output merged", 0);
    assert_eq!(rows(&folder, "merged"), 1);
    run(&folder, "report 1 --output without", 0);
    run(&folder, "run ./suite.toml --filter nothing --partition slice:1/2", 4);
}

#[test]
fn shard_resumes_only_with_its_own_options() {
    let folder = folder_with(SUITE);
    run(&folder, "run ./suite.toml --partition slice:1/3 --output one", 0);
    let before = read(&folder, "one/runs.csv");
    for (part, words) in [
        ("--partition slice:2/3", "its shard is 'slice:1/3', this run's is 'slice:2/3'"),
        ("--partition slice:1/4", "its plan.csv has other cases"),
        ("--filter random --partition slice:1/3", "its plan.csv has other cases"),
        ("--pack --partition slice:1/3", "its --pack is 'false', this run's is 'true'"),
    ] {
        let printed = run(&folder, &format!("run ./suite.toml {part} --resume one"), 2);
        assert!(printed.contains(words), "{printed}");
    }
    let printed = run(&folder, "run ./suite.toml --resume one", 2);
    assert!(printed.contains("this run's is 'the whole run'"), "{printed}");
    assert_eq!(read(&folder, "one/runs.csv"), before);
    run(&folder, "run ./suite.toml --partition slice:1/3 --resume one", 0);
    assert_eq!(read(&folder, "one/runs.csv"), before);
}

/// Starts `oomph run` with one job, sends SIGTERM when the folder has this many rows and the next
/// case runs, and returns the exit code and the output.
#[cfg(unix)]
fn terminated(folder: &TempDir, words: &str, output: &str, after: usize) -> (Option<i32>, String) {
    let mut child = oomph(folder)
        .args(words.split(' '))
        .args(["--jobs", "1", "--output", output])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let file = folder.path().join(output).join("runs.csv");
    command::wait_until("there are rows", || (file.is_file() && rows(folder, output) >= after).then_some(()));
    command::signal("TERM", child.id().into());
    let code = child.wait().unwrap().code();
    (code, std::io::read_to_string(child.stderr.take().unwrap()).unwrap())
}

#[cfg(unix)]
#[test]
fn sigterm_during_the_last_case_completes() {
    let folder = folder_with(
        "question = 'done?'\n[[group]]\nworkloads = ['checkerboard']\nstrategies = ['null']\n\
         [[group]]\nworkloads = ['training']\nstrategies = ['null']\nset = { steps = 800 }\n",
    );
    let (code, complaint) = terminated(&folder, "run ./suite.toml", "out", 1);
    assert_eq!(rows(&folder, "out"), 2, "{complaint}");
    assert_eq!(code, Some(0), "{complaint}");
    assert!(complaint.contains("stopping after the cases that are running"), "{complaint}");
}

#[cfg(unix)]
#[test]
fn requeued_shard_equals_uninterrupted_one() {
    let seeds: Vec<String> = (1..=60).map(|seed| seed.to_string()).collect();
    let folder = folder_with(&format!(
        "question = 'how long?'\nseeds = [{}]\n[[group]]\nworkloads = ['power-law']\nstrategies = ['caching']\n",
        seeds.join(",")
    ));
    let part = "run ./suite.toml --filter power-law --limit 64GiB --partition hash:1/2";
    let (code, complaint) = terminated(&folder, part, "requeued", 3);
    assert_eq!(code, Some(130), "{complaint}");
    let (_, again) = complaint.trim_end().rsplit_once("continue with: oomph ").unwrap();
    assert!(again.ends_with("--partition hash:1/2 --resume requeued"), "{complaint}");
    let kept = read(&folder, "requeued/runs.csv");
    assert!(!kept.contains("interrupted"), "the case that ran was finished");
    run(&folder, again, 0);
    run(&folder, &format!("{part} --output straight"), 0);
    assert_eq!(read(&folder, "requeued/runs.csv"), read(&folder, "straight/runs.csv"));
}

#[test]
fn several_devices_give_equal_rows() {
    let folder = folder_with(SUITE);
    run(&folder, "run ./suite.toml --output one", 0);
    for isolate in ["auto", "always"] {
        run(&folder, &format!("run ./suite.toml --device 4xsim --isolate {isolate} --output {isolate}"), 0);
        let table = |name: &str| command::table_without_checksums(&folder.path().join(name).join("runs.csv"));
        let several = table(isolate);
        assert!(several.contains("@4xsim#") && several.contains(",4xsim,"), "{several}");
        assert_eq!(several.replace("4xsim", "sim"), table("one"));
    }
}

#[test]
fn several_devices_are_refused_where_one_is_needed() {
    let folder = folder_with(SUITE);
    for words in [
        "replay checkerboard --strategy caching --device 4xsim",
        "run oom-thresholds --device 4xsim",
        "run techniques --device 4xsim",
        "run claims --device cuda:all",
    ] {
        let printed = run(&folder, words, 2);
        assert!(printed.contains("means several devices"), "{printed}");
    }
    run(&folder, "run ./suite.toml --device 0xsim", 2);
}

#[test]
fn shards_with_other_contents_are_refused() {
    let folder = folder_with(SUITE);
    run(&folder, "run ./suite.toml --partition slice:1/2 --output 1", 0);
    let other = SUITE.replace("strategies = ['direct'", "on_oom = 'skip'\nstrategies = ['direct'");
    fs::write(folder.path().join("suite.toml"), other).unwrap();
    run(&folder, "run ./suite.toml --partition slice:2/2 --output 2", 0);
    let printed = run(&folder, "report 1 2 --output merged", 107);
    let words = "different: 2: its content of suites, workloads and trace files is not that of 1: its settings in the suite, of 6 \
                 cases\n  suite/checkerboard/direct@sim";
    assert!(printed.contains(words), "{printed}");
    let printed = run(&folder, "run ./suite.toml --partition slice:1/2 --resume 1", 2);
    assert!(printed.contains("content of suites"), "{printed}");

    for (number, batch) in [(1, "batch = 2"), (2, "batch = 4")] {
        fs::write(folder.path().join("techniques.toml"), TECHNIQUES.replace("batch = 2", batch)).unwrap();
        let two = "--exact --filter training/base --filter training/amp";
        run(&folder, &format!("run ./techniques.toml {two} --partition slice:{number}/2 --output t{number}"), 0);
    }
    let printed = run(&folder, "report t1 t2 --output merged", 107);
    let words = "is not that of t1: its workload or trace file, of 2 cases\n  training/base";
    assert!(printed.contains(words), "{printed}");
}

#[test]
fn case_with_truncated_file_runs_again() {
    let folder = folder_with(SUITE);
    run(&folder, "run ./suite.toml --output alone", 0);
    for shard in 1..=2 {
        run(&folder, &format!("run ./suite.toml --partition slice:{shard}/2 --output {shard}"), 0);
    }
    let cases = fs::read_dir(folder.path().join("1/cases")).unwrap();
    let cut = cases.map(|entry| entry.unwrap().path()).min().unwrap();
    fs::write(&cut, &fs::read(&cut).unwrap()[..100]).unwrap();
    let printed = run(&folder, "report 1 2 --output merged", 107);
    assert!(printed.contains("damaged: 1: the files in cases/ cannot be read for"), "{printed}");
    run(&folder, "run ./suite.toml --partition slice:1/2 --resume 1", 0);
    run(&folder, "report 1 2 --output merged", 0);
    assert_eq!(read(&folder, "merged/runs.csv"), read(&folder, "alone/runs.csv"));
}

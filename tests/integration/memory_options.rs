//! The two options about memory, `--card` and `--limit`, in all commands, and the options that they replace.

use std::{fs, path::Path};

use crate::command::run;
use serde_json::Value;
use tempfile::TempDir;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded");

/// Memory of the GPU on which the recordings were made.
const DEVICE_BYTES: f64 = 150_109_880_320.0;

/// A recording whose program ran in this share of the GPU.
const LIMITED: &str = "varlen_cap042.split64";
const FRACTION: f64 = 0.042;

/// A copy of a recording in a folder without the table that names its limit.
fn copied(folder: &TempDir) -> String {
    let copy = folder.path().join("run.pickle.xz");
    fs::copy(Path::new(RECORDED).join(format!("{LIMITED}.pickle.xz")), &copy).unwrap();
    copy.display().to_string()
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

const SMALL: &str = "--set rounds=1 --set blocks=128";

#[test]
fn old_options_work_and_name_the_new_ones() {
    let recording = format!("{RECORDED}/oom_base.pickle.xz");
    let on_checkerboard = |command: &str| command.replace("SMALL", &format!("checkerboard {SMALL}"));
    for (old, new, note, code) in [
        ("advise SMALL --memory 8GiB", "advise SMALL --card 8GiB", "--memory is now --card", 0),
        ("threshold SMALL --cap=device", "threshold SMALL --smallest card", "--cap device is now --smallest card", 0),
        (
            "threshold checkerboard -s direct --repeat 1 --set rounds=1 --largest blocks --memory 1GiB,2GiB",
            "threshold checkerboard -s direct --repeat 1 --set rounds=1 --largest blocks --card 1GiB,2GiB",
            "--memory is now --card",
            0,
        ),
        (
            "techniques --model reference-gpt-163m --set layers=2 --technique ckpt --memory 24GiB",
            "techniques --model reference-gpt-163m --set layers=2 --technique ckpt --card 24GiB",
            "--memory is now --card",
            0,
        ),
        ("verify --fraction 0.5 RECORDING", "verify --limit 50% RECORDING", "--fraction is now --limit", 100),
        ("verify --fraction 1 RECORDING", "verify --limit 1.0 RECORDING", "--fraction 1 is now --limit 1.0", 0),
        (
            "stress properties --cases 2 -s direct --memory 64MiB",
            "stress properties --cases 2 -s direct --limit 64MiB",
            "--memory is now --limit",
            0,
        ),
        (
            "stress adversary -s direct --live 16MiB --largest 8MiB --memory 1GiB",
            "stress adversary -s direct --live 16MiB --largest 8MiB --limit 1GiB",
            "--memory is now --limit",
            0,
        ),
        ("replay SMALL --device sim:8GiB", "replay SMALL --card 8GiB", "--device sim:8GiB is now --card 8GiB", 0),
        (
            "leaks leak-cache --set steps=8 --fail-on never --device sim:20GiB",
            "leaks leak-cache --set steps=8 --fail-on never --card 20GiB",
            "--device sim:20GiB is now --card 20GiB",
            0,
        ),
        (
            "inspect SMALL --summary --device sim:8GiB",
            "inspect SMALL --summary --card 8GiB",
            "--device sim:8GiB is now --card 8GiB",
            0,
        ),
        (
            "run quick --list --device 2xsim:80GiB",
            "run quick --list --device 2xsim --card 80GiB",
            "--device 2xsim:80GiB is now --device 2xsim --card 80GiB",
            0,
        ),
    ] {
        let command = |text: &str| on_checkerboard(text).replace("RECORDING", &recording);
        let (old_out, old_err) = run(".", &words(&command(old)), code);
        let (new_out, new_err) = run(".", &words(&command(new)), code);
        assert!(old_err.contains(&format!("note: {note}")), "{old}: {old_err}");
        assert!(!new_err.contains("is now"), "{new}: {new_err}");
        assert_eq!(old_out, new_out, "{old}");
    }
}

#[test]
fn an_option_under_both_names_is_an_error() {
    for (line, message) in [
        ("advise checkerboard --card 8GiB --memory 9GiB", "--card and --memory 9GiB mean the same; write --card once"),
        ("verify x.pickle --fraction 0.5 --limit 0.5", "--fraction 0.5 and --limit mean the same; write --limit once"),
        ("run --device sim:8GiB --card 8GiB", "--device sim:8GiB and --card mean the same; write --card once"),
    ] {
        let (out, err) = run(".", &words(line), 2);
        assert!(out.is_empty() && err.contains(message), "{line}: {err}");
    }
}

#[test]
fn a_number_without_a_unit_is_questioned() {
    let question = "24 means 24 bytes; did you mean 24GiB? (write 24B for bytes)";
    for command in [
        "run quick",
        "replay checkerboard",
        "leaks leak-cache",
        "inspect checkerboard --summary",
        "verify x.pickle",
        "advise checkerboard",
        "techniques",
        "threshold training --largest batch",
        "stress all",
        "stress integrity",
        "stress adversary",
    ] {
        for option in ["--limit", "--card"] {
            let (out, err) = run(".", &[words(command), vec![option, "24"]].concat(), 2);
            assert!(out.is_empty() && err.contains(question) && err.contains(option), "{command}: {err}");
        }
        let (_, err) = run(".", &[words(command), vec!["--limit", "1"]].concat(), 2);
        assert!(err.contains("did you mean 1GiB, or 1.0 for no limit?"), "{command}: {err}");
    }
    let (_, err) = run(".", &["replay", "checkerboard", "--limit", "24B"], 0);
    assert!(!err.contains("did you mean"), "{err}");
}

#[test]
fn unknown_cards_are_explained() {
    let (_, err) = run(".", &["replay", "checkerboard", "--card", "H20"], 2);
    assert!(
        err.contains("unknown card 'H20'") && err.contains("(h200, b200,") && err.contains("did you mean 'h200'?"),
        "{err}"
    );
}

#[test]
fn a_real_device_has_no_card() {
    for command in ["replay checkerboard", "run quick", "threshold checkerboard", "stress all"] {
        let (_, err) = run(".", &[words(command), vec!["--device", "cuda", "--card", "24GiB"]].concat(), 2);
        assert!(err.contains("--device cuda is a real one") && err.contains("--limit"), "{command}: {err}");
    }
}

/// The rows of a command as JSON.
fn rows(line: &str, limit: &str, code: i32) -> Value {
    let (out, err) = run(".", &[words(line), vec!["--limit", limit, "--format", "json"]].concat(), code);
    let mut document: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{line}: {error}: {err}"));
    document["rows"].take()
}

#[test]
fn a_fraction_is_the_size_that_pytorch_computes() {
    let folder = tempfile::tempdir().unwrap();
    let recording = copied(&folder);
    let size = (FRACTION * DEVICE_BYTES) as u64;
    for command in [
        "verify RECORDING",
        "advise RECORDING",
        "inspect RECORDING --summary",
        "leaks RECORDING --fail-on never",
        "replay RECORDING -s caching:recorded",
        "stress properties -s direct --cases 1",
        "threshold checkerboard -s direct --repeat 1 --probes 0 --set rounds=1 --largest blocks",
    ] {
        let line = command.replace("RECORDING", &recording);
        let of_size = rows(&line, &size.to_string(), 0);
        for fraction in ["0.042", "4.2%"] {
            assert_eq!(rows(&line, fraction, 0), of_size, "{command}");
        }
    }
    let verified = rows(&format!("verify {recording}"), "0.042", 0);
    assert_eq!((&verified[0]["result"], &verified[0]["limit_bytes"]), (&"exact".into(), &size.into()));
    // Of a smaller card the fraction is less, and the program could not have run in that.
    let on_card = rows(&format!("verify {recording} --card 24GiB"), "0.042", 100);
    assert_eq!(on_card[0]["limit_bytes"], (FRACTION * f64::from(24u32) * f64::from(1u32 << 30)) as u64);
}

#[test]
fn advise_and_verify_agree() {
    let folder = tempfile::tempdir().unwrap();
    let recording = copied(&folder);
    for (limit, is_exact) in [("0.042", true), ("0.041", false), ("4GiB", false), ("1.0", true)] {
        let (text, _) = run(".", &["verify", &recording, "--limit", limit], if is_exact { 0 } else { 100 });
        assert_eq!(text.starts_with("EXACT"), is_exact, "{limit}: {text}");
        let (_, notes) = run(".", &["advise", &recording, "--limit", limit, "--top", "1"], 0);
        assert_eq!(notes.contains("did not run under a limit of"), !is_exact, "{limit}: {notes}");
    }
}

#[test]
fn the_smaller_of_card_and_limit_decides() {
    let row = |line: &str| {
        let (out, err) = run(".", &[words(line), vec!["--format", "json"]].concat(), 0);
        (serde_json::from_str::<Value>(&out).unwrap()["rows"][0].take(), err)
    };
    let (limited, _) = row("advise checkerboard --set rounds=1 --card 8GiB --limit 0.25");
    assert_eq!(limited["limit_bytes"], 2_u64 << 30);
    let (of_card, notes) = row("advise checkerboard --set rounds=1 --card 8GiB --limit 9GiB");
    assert_eq!(of_card["limit_bytes"], row("advise checkerboard --set rounds=1 --card 8GiB").0["limit_bytes"]);
    assert!(notes.contains("the card decides"), "{notes}");
    let largest = "threshold checkerboard -s direct --repeat 1 --probes 0 --set rounds=1 --largest blocks";
    let (limited, _) = row(&format!("{largest} --card 8GiB --limit 1GiB"));
    assert_eq!((&limited["card_bytes"], &limited["limit_bytes"]), (&(8_u64 << 30).into(), &(1_u64 << 30).into()));
    assert!(row(&format!("{largest} --card 8GiB")).0["largest"].as_u64() > limited["largest"].as_u64());
}

#[test]
fn a_card_replaces_the_full_device_of_a_recording() {
    // The program died because its GPU was full.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/recording/run-0.pickle.xz");
    let replayed = |card: &[&str]| {
        let options = ["replay", path, "-s", "caching:recorded", "--format", "json"];
        let (out, notes) = run(".", &[&options, card].concat(), 0);
        (serde_json::from_str::<Value>(&out).unwrap()["rows"][0]["status"].take(), notes)
    };
    let (status, notes) = replayed(&[]);
    assert!(status == "oom" && notes.contains("under the limit of the recorded program"), "{status} {notes}");
    let (status, notes) = replayed(&["--card", "200GiB"]);
    assert!(status == "completed" && !notes.contains("under the limit"), "{status} {notes}");
}

#[test]
fn suites_take_fractions() {
    let folder = tempfile::tempdir().unwrap();
    let suite = "question = 'what?'\n[[group]]\nworkloads = ['checkerboard']\nstrategies = ['direct']\n\
                 limits = ['2GiB', 0.5, '12.5%', 1.0]\n";
    fs::write(folder.path().join("mine.toml"), suite).unwrap();
    let (out, _) = run(&folder, &["run", "./mine.toml", "--card", "8GiB", "--list"], 0);
    let limits: Vec<&str> = out.lines().map(|line| line.split_once("@sim:8GiB").unwrap().1).collect();
    assert_eq!(limits, ["<=2GiB#1", "<=4GiB#1", "<=1GiB#1", "#1"]);
    let (out, _) = run(&folder, &["run", "./mine.toml", "--card", "8GiB", "--list", "--limit", "0.125"], 0);
    assert_eq!(out.lines().map(|line| line.split_once("@").unwrap().1).collect::<Vec<_>>(), ["sim:8GiB<=1GiB#1"]);
}

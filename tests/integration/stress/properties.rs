//! `oomph stress properties` and `oomph stress all`.

use super::{code, oomph, rows};

#[test]
fn properties_pass_and_repeat_by_seed() {
    let folder = tempfile::tempdir().unwrap();
    let play = || oomph(folder.path(), "stress properties --cases 6 --seed 3 --format json");
    let first = play();
    assert_eq!(code(&first), 0, "{}", String::from_utf8_lossy(&first.stdout));
    let rows = rows(&first);
    let names: Vec<&str> = rows.iter().map(|row| row["strategy"].as_str().unwrap()).collect();
    assert!(names.contains(&"caching") && !names.contains(&"null"), "{names:?}");
    for row in &rows {
        // One of three programs runs again with faults.
        assert_eq!((row["verdict"].as_str(), row["trials"].as_u64()), (Some("passed"), Some(8)), "{row}");
    }
    assert_eq!(first.stdout, play().stdout);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing broke, so nothing is saved");
}

#[test]
fn trace_runs_with_failing_driver_calls() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(code(&oomph(folder.path(), "convert training training.oomph")), 0);
    let played = |more: &str| {
        let base = "stress properties --trace training.oomph --strategy caching --limit 8GiB --format json";
        let output = oomph(folder.path(), &format!("{base} {more}"));
        assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stdout));
        rows(&output).remove(0)
    };
    let (smooth, rough) = (played(""), played("--fail cuMemAlloc:2 --fail cuMemFree:1"));
    assert_eq!((&smooth["trials"], &smooth["verdict"]), (&1.into(), &"passed".into()));
    assert_eq!(smooth["events"], rough["events"]);
    assert_ne!(smooth["driver_calls"], rough["driver_calls"], "failed calls are retried");
}

#[test]
fn time_is_divided_among_strategies_and_kinds() {
    let folder = tempfile::tempdir().unwrap();
    let output = oomph(folder.path(), "stress all --seconds 8 --strategy caching --strategy stitch --strategy oomph");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(code(&output), 0, "{text}");
    assert!(text.contains("No failures"), "{text}");
    assert!(text.lines().any(|line| line.split_whitespace().eq([
        "strategy",
        "integrity",
        "properties",
        "history",
        "faults",
        "misuse"
    ])));
    for strategy in ["caching", "stitch", "oomph"] {
        let line = text.lines().find(|line| line.trim_start().starts_with(strategy)).unwrap();
        assert!(line.contains("passed") && !line.contains("passed 0"), "{line}");
    }
}

#[test]
fn invalid_arguments_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("no.trace"), "certainly not").unwrap();
    for (arguments, expected, says) in [
        ("stress properties --strategy cachin", 2, "did you mean 'caching'"),
        ("stress properties --cases 0", 2, "greater than 0"),
        ("stress properties --fail cuMemAlloc:2", 2, "--trace"),
        ("stress properties --trace no.trace --fail cuMemAloc:2", 2, "did you mean 'cuMemAlloc'"),
        ("stress properties --trace no.trace", 2, "not a trace in a known format"),
        ("stress properties --trace absent.oomph", 2, "absent.oomph"),
        ("stress properties --device cuda:4000", 103, "cuda:4000"),
        ("stress all --seconds 0", 2, "0 is not in"),
    ] {
        let output = oomph(folder.path(), arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(code(&output), expected, "{arguments}: {told}");
        assert!(told.contains(says), "{arguments}: {told}");
    }
}

#[test]
fn help_teaches_by_examples_and_names_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in ["stress --help", "stress properties --help", "stress all --help"] {
        let text = String::from_utf8(oomph(folder.path(), arguments).stdout).unwrap();
        assert!(text.contains("Examples:\n  oomph stress"), "{text}");
    }
    assert!(String::from_utf8(oomph(folder.path(), "--help").stdout).unwrap().contains("106  stress"));
}

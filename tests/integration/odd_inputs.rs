//! Sources that are pipes, names that are not UTF-8, and locales without UTF-8.

#![cfg(unix)]

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::OsStringExt,
    path::PathBuf,
    process::{Command, Output},
};

use crate::command::{oomph, run};
use tempfile::TempDir;

const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/workloads/recorded/varlen.pickle.xz");

fn empty() -> TempDir {
    TempDir::new().unwrap()
}

/// Runs the binary with words that need not be UTF-8, checks the exit code and returns its standard output.
#[track_caller]
fn succeed(folder: &TempDir, words: &[&OsStr]) -> String {
    let output = oomph(folder).args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{words:?}\n{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn names_that_are_not_utf8_can_be_read_and_written() {
    let folder = empty();
    let name = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let snapshot = name(b"run-\xfe\xff.pickle.xz");
    if fs::copy(RECORDING, folder.path().join(&snapshot)).is_err() {
        return eprintln!("note: this file system has only UTF-8 names");
    }
    fn word(text: &str) -> &OsStr {
        OsStr::new(text)
    }
    let plain = empty();
    fs::copy(RECORDING, plain.path().join("run-a.pickle.xz")).unwrap();
    for command in
        [&["inspect", "--format", "json"][..], &["leaks"], &["advise"], &["verify"], &["threshold"], &["replay"]]
    {
        let mut words: Vec<&OsStr> = command.iter().copied().map(word).collect();
        words.push(&snapshot);
        let output = oomph(&folder).args(&words).output().unwrap();
        words.pop();
        words.push(word("run-a.pickle.xz"));
        let expected = oomph(&plain).args(&words).output().unwrap();
        assert_eq!(output.status.code(), expected.status.code(), "{command:?}: {output:?}");
        assert_eq!(output.stdout.is_empty(), expected.stdout.is_empty(), "{command:?}");
    }
    // Worker processes get the name as JSON.
    let isolated = ["replay", "--isolate", "always", "--strategy", "null", "--format", "csv"].map(word);
    assert!(succeed(&folder, &[&isolated[..], &[snapshot.as_os_str()]].concat()).contains(",completed,"));

    let (trace, table) = (name(b"out-\xfe.oomph"), name(b"\xe9.csv"));
    succeed(&folder, &[word("convert"), &snapshot, &trace]);
    succeed(&folder, &[word("replay"), &trace, word("--export-csv"), &table, word("--strategy"), word("null")]);
    assert!(fs::read_to_string(folder.path().join(&table)).unwrap().contains(",completed,"));
    // A folder and a pattern of ranks, a suite, and runs.
    let ranks = folder.path().join(name(b"ranks-\xfe"));
    fs::create_dir(&ranks).unwrap();
    for number in 0..2 {
        fs::copy(folder.path().join(&trace), ranks.join(format!("run-{number}.oomph"))).unwrap();
    }
    assert!(succeed(&folder, &[word("inspect"), ranks.as_os_str()]).contains("events"));
    let suite = name(b"suite-\xfe.toml");
    let text = "question = '?'\n[[group]]\nworkloads = ['./out-*.oomph']\nstrategies = ['null']\n";
    fs::write(folder.path().join(&suite), text).unwrap();
    let results = [name(b"a-\xfe"), name(b"b-\xfe")];
    for result in &results {
        succeed(&folder, &[word("run"), &suite, word("--output"), result]);
    }
    succeed(&folder, &[word("compare"), &results[0], &results[1]]);
    let missing = oomph(&folder).args([word("replay"), &name(b"no-\xfe.oomph")]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no such file"), "{missing:?}");
}

/// Runs a line of bash in which `$OOMPH` is the binary; `None` and a note where the machine has no bash.
fn bash(folder: &TempDir, line: &str) -> Option<Output> {
    let binary: PathBuf = oomph(folder).get_program().into();
    let mut command = Command::new("bash");
    command.current_dir(folder).env("TMPDIR", folder.path()).env("OOMPH", binary).args(["-c", line]);
    let output = command.output();
    if output.is_err() {
        eprintln!("note: this machine has no bash");
    }
    output.ok()
}

#[test]
fn a_pipe_is_read_once_and_then_like_a_file() {
    let folder = empty();
    run(&folder, &["convert", "checkerboard", "a.oomph", "--set", "rounds=1"], 0);
    let files = || fs::read_dir(folder.path()).unwrap().count();
    for line in [
        "\"$OOMPH\" inspect <(cat a.oomph)",
        "cat a.oomph | \"$OOMPH\" inspect /dev/stdin",
        "\"$OOMPH\" inspect /dev/stdin < a.oomph",
        "\"$OOMPH\" replay <(cat a.oomph) <(cat a.oomph) --isolate always --strategy null",
        "\"$OOMPH\" threshold <(cat a.oomph) --strategy direct --repeat 1",
        "\"$OOMPH\" convert <(gzip -c a.oomph) /dev/stdout --to rmm | grep -q allocate",
    ] {
        let Some(output) = bash(&folder, line) else { return };
        assert!(output.status.success(), "{line}: {output:?}");
        assert_eq!(files(), 1, "{line}: no copy stays");
    }
    let Some(output) = bash(&folder, "\"$OOMPH\" inspect <(echo nonsense)") else { return };
    assert_eq!((output.status.code(), files()), (Some(2), 1));
}

#[test]
fn devices_are_refused_and_no_name_is_suggested_for_itself() {
    let folder = empty();
    let (_, err) = run(&folder, &["inspect", "/dev/null"], 2);
    assert!(err.contains("/dev/null: this is not a plain file") && !err.contains("did you mean"), "{err}");
    std::os::unix::fs::symlink("nowhere", folder.path().join("gone.oomph")).unwrap();
    let (_, err) = run(&folder, &["inspect", "gone.oomph"], 2);
    assert!(err.contains("gone.oomph: no such file") && !err.contains("did you mean"), "{err}");
}

#[test]
fn locale_without_utf8_gets_ascii() {
    let folder = empty();
    let output = |variables: &[(&str, &str)]| {
        let mut command = oomph(&folder);
        command.env_remove("LC_ALL").env_remove("LC_CTYPE").env_remove("LANG").env_remove("TERM");
        command.envs(variables.iter().copied());
        let words = ["replay", "checkerboard", "--set", "rounds=1", "--export-markdown", "a.md"];
        let output = command.args(words).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    for ascii in [
        &[("LANG", "C")][..],
        &[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")],
        &[("LC_ALL", "POSIX")],
        &[("LC_ALL", ""), ("LC_CTYPE", "de_DE.ISO-8859-1"), ("LANG", "C.UTF-8")],
    ] {
        let text = output(ascii);
        assert!(text.is_ascii() && text.contains("=====") && text.contains("#####"), "{ascii:?}\n{text}");
    }
    for unicode in [&[("LANG", "C.UTF-8")][..], &[("LC_CTYPE", "en_US.utf8"), ("LANG", "C")]] {
        let text = output(unicode);
        assert!(text.contains('═') && text.contains('█'), "{unicode:?}\n{text}");
    }
    // Containers often have no locale.
    let text = output(&[]);
    assert!(text.contains('═') && !text.contains('█') && text.contains("#####"), "{text}");
}

//! Names in a recording cannot imitate the output of the program, on a terminal or in a pipe.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use crate::command::oomph;

/// What each hostile name contains: it moves the cursor up, clears lines, begins new ones, and turns text around.
const FORGED: &str = "forward\x1b[3A\r\x1b[2K    export LD_PRELOAD=/tmp/x.so\n    export FORGED=1\n\u{202e}\u{9b}2K";

/// A program that leaks, whose call sites, phases and name are hostile.
fn hostile_trace() -> String {
    let name = serde_json::to_string(FORGED).unwrap();
    let mut trace = format!("oomph-trace 1 {name}\nsite 1 {name}\nlabel 1 {name}\n");
    let mut events = 0;
    for step in 0..30 {
        let (kept, freed) = (2 * step + 1, 2 * step + 2);
        let _ = writeln!(trace, "mark step {step}\nmark phase {step} label=1");
        let _ = writeln!(trace, "alloc {kept} 67108864 site=1\nalloc {freed} 134217728 site=1\nfree {freed}");
        events += 5;
    }
    let _ = writeln!(trace, "end {events}");
    trace
}

fn is_forged(text: &str) -> bool {
    let is_safe = |character: char| character == '\n' || character == '\t' || !character.is_control();
    let direction = ['\u{202e}', '\u{2028}'];
    !text.chars().all(is_safe)
        || text.contains(direction)
        || text.lines().any(|line| line.trim_start().starts_with("export LD_PRELOAD") || line.contains(" FORGED=1 "))
        || text.lines().any(|line| line.trim_start().starts_with("export FORGED"))
}

fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let code = output.status.code().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!([0, 2, 100, 105, 109].contains(&code), "{command:?} ended with {code}: {text}");
    text
}

/// Every command that prints names of a recording.
fn command_lines(trace: &str, snapshot: &str) -> Vec<Vec<String>> {
    let mut lines = Vec::new();
    for file in [trace, snapshot] {
        for words in [
            "inspect",
            "inspect --by site",
            "inspect --by tag",
            "inspect --summary",
            "leaks",
            "advise --limit 1GiB",
            "replay --limit 1GiB",
            "replay --format markdown",
            "verify",
            "threshold",
        ] {
            let mut words = words.split(' ');
            let command = words.next().unwrap_or_default();
            lines.push([command, file].into_iter().chain(words).map(str::to_owned).collect());
        }
    }
    lines
}

fn write_files(folder: &Path) -> [String; 2] {
    let [trace, snapshot] = ["a.oomph", "a.pickle"].map(|name| folder.join(name).to_str().unwrap().to_owned());
    fs::write(&trace, hostile_trace()).unwrap();
    let text =
        output_of(oomph(folder).args(["replay", &trace, "--strategy", "caching", "--export-snapshot", &snapshot]));
    assert!(Path::new(&snapshot).exists(), "{text}");
    [trace, snapshot]
}

#[test]
fn names_cannot_forge_lines_in_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, snapshot] = write_files(folder.path());
    let mut shown = 0;
    for line in command_lines(&trace, &snapshot) {
        let text = output_of(oomph(folder.path()).args(&line));
        assert!(!is_forged(&text), "{line:?}:\n{}", text.escape_debug());
        shown += usize::from(text.contains("forward\\u{1b}[3A"));
    }
    assert!(shown > 6, "only {shown} commands show the names, so the others prove nothing");
}

/// JSON and CSV keep the names as they are.
#[test]
fn names_are_data_in_json() {
    let folder = tempfile::tempdir().unwrap();
    let [_, snapshot] = write_files(folder.path());
    let text = output_of(oomph(folder.path()).args(["inspect", &snapshot, "--by", "site", "--format", "json"]));
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(document.to_string().contains("export FORGED=1\\n\u{202e}"), "{document:#}");
}

/// On a terminal, the same. `script` gives the program one.
#[cfg(target_os = "linux")]
#[test]
fn names_cannot_forge_lines_on_a_terminal() {
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: `script` of util-linux is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [trace, snapshot] = write_files(folder.path());
    for line in command_lines(&trace, &snapshot) {
        let words: Vec<String> = line.iter().map(|word| format!("'{word}'")).collect();
        let inner = format!("{} {} 2>/dev/null", env!("CARGO_BIN_EXE_oomph"), words.join(" "));
        let output = Command::new("script").args(["--quiet", "--command", &inner, "/dev/null"]).output().unwrap();
        // The terminal ends lines with both characters.
        let text = String::from_utf8(output.stdout).unwrap().replace("\r\n", "\n");
        assert!(!is_forged(&text), "{line:?}:\n{}", text.escape_debug());
    }
}

//! `oomph convert` and `oomph replay --export-snapshot`: written files can be read again, by oomph
//! and by Python.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use crate::command::run;
use oomph::{
    base::NoProgress,
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::{Counters, Verdict, verify},
    strategy::Setup,
    trace::{
        self, Trace,
        torch::{Action, Snapshot},
    },
};
use tempfile::TempDir;

fn empty() -> TempDir {
    TempDir::new().unwrap()
}

/// Runs a command that must be refused with these words and must leave no file behind.
#[track_caller]
fn refused(folder: &TempDir, arguments: &[&str], words: &[&str]) {
    let files = || fs::read_dir(folder.path()).unwrap().count();
    let before = files();
    let (out, err) = run(folder, arguments, 2);
    assert_eq!(out, "", "a refusal prints nothing on standard output");
    for word in words {
        assert!(err.contains(word), "{arguments:?}: '{word}' is missing in: {err}");
    }
    assert_eq!(files(), before, "{arguments:?} leaves something behind");
}

fn recorded(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    path.to_str().unwrap().to_owned()
}

/// The result of one strategy on a source.
#[track_caller]
fn figures(folder: &TempDir, source: &str, strategy: &str, columns: &[&str]) -> Vec<u64> {
    let (out, _) = run(folder, &["replay", source, "--strategy", strategy, "--format", "json"], 0);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    columns.iter().map(|&column| document["rows"][0][column].as_u64().unwrap()).collect()
}

#[test]
fn rmm_and_minimalloc_replay_to_one_peak() {
    let folder = empty();
    for source in ["training", "checkerboard", "power-law"] {
        let peak = |source: &str| figures(&folder, source, "direct", &["peak_requested_bytes", "allocs"]);
        let expected = peak(source);
        assert!(expected[0] > 0 && expected[1] > 0);
        for format in ["rmm", "minimalloc"] {
            let (out, _) = run(&folder, &["convert", source, "log.csv", "--to", format, "--force"], 0);
            assert!(out.ends_with("written to log.csv\n"), "{out}");
            assert_eq!(trace::recognise(folder.path().join("log.csv")).unwrap().name, format);
            assert_eq!(peak("log.csv"), expected, "{source} as {format}");
        }
    }
}

#[test]
fn file_ending_selects_format_and_gz() {
    let folder = empty();
    let head = |name: &str| fs::read(folder.path().join(name)).unwrap()[..2].to_vec();
    for (name, format, compressed) in [
        ("a.oomph", "oomph", false),
        ("a.oomph.gz", "oomph", true),
        ("a.pickle", "torch", false),
        ("A.PKL.GZ", "torch", true),
    ] {
        run(&folder, &["convert", "checkerboard", name], 0);
        assert_eq!(trace::recognise(folder.path().join(name)).unwrap().name, format, "{name}");
        assert_eq!(head(name) == [0x1f, 0x8b], compressed, "{name}");
    }
    run(&folder, &["convert", "checkerboard", "log.csv.gz", "--to", "rmm"], 0);
    assert_eq!(trace::recognise(folder.path().join("log.csv.gz")).unwrap().name, "rmm");
    assert_eq!(head("log.csv.gz"), [0x1f, 0x8b]);
}

#[test]
fn standard_output_gets_what_a_file_would() {
    let folder = empty();
    for (options, name) in [(&[][..], "a.oomph"), (&["--to", "rmm"], "b.csv"), (&["--to", "minimalloc"], "c.csv")] {
        let (text, err) = run(&folder, &[&["convert", "checkerboard", "-"], options].concat(), 0);
        run(&folder, &[&["convert", "checkerboard", name], options].concat(), 0);
        assert_eq!(text, fs::read_to_string(folder.path().join(name)).unwrap());
        assert_eq!(err, "");
    }
    assert!(!folder.path().join("-").exists());
}

#[test]
fn names_that_tell_no_format_are_refused() {
    let folder = empty();
    refused(&folder, &["convert", "checkerboard", "out.csv"], &["out.csv", "--to rmm", "--to minimalloc"]);
    for name in ["out.txt", "out", "out.gz", "oomph"] {
        refused(&folder, &["convert", "checkerboard", name], &[name, ".oomph", ".pickle", ".csv"]);
    }
    refused(&folder, &["convert", "checkerboard", "out.oomph", "--to", "umpire"], &["umpire", "minimalloc"]);
    refused(&folder, &["convert", "checkerbord", "out.oomph"], &["checkerboard"]);
    refused(&folder, &["convert", "checkerboard", "no/such/folder.oomph"], &["no/such/folder.oomph"]);
}

#[test]
fn only_traces_are_overwritten_unless_forced() {
    let folder = empty();
    let precious = folder.path().join("thesis.oomph");
    fs::write(&precious, "Chapter 1").unwrap();
    refused(&folder, &["convert", "checkerboard", "thesis.oomph"], &["thesis.oomph", "--force"]);
    let export = ["replay", "checkerboard", "--strategy", "caching", "--export-snapshot", "thesis.oomph"];
    refused(&folder, &export, &["thesis.oomph", "--force"]);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "Chapter 1");
    run(&folder, &["convert", "checkerboard", "thesis.oomph", "--force"], 0);
    let checkerboard = fs::read(&precious).unwrap();
    run(&folder, &["convert", "power-law", "thesis.oomph"], 0);
    assert_ne!(fs::read(&precious).unwrap(), checkerboard);
}

#[test]
fn a_recording_is_never_overwritten_by_mistake() {
    let folder = empty();
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded/oom_base.pickle.xz");
    fs::copy(&recorded, folder.path().join("run-0.pickle")).unwrap();
    let precious = fs::read(folder.path().join("run-0.pickle")).unwrap();
    refused(&folder, &["convert", "checkerboard", "run-0.pickle"], &["run-0.pickle", "a recording", "--force"]);
    refused(&folder, &["convert", "run-0.pickle", "run-0.pickle"], &["run-0.pickle", "a recording", "--force"]);
    let export = ["replay", "checkerboard", "-s", "caching", "--export-snapshot", "run-0.pickle"];
    refused(&folder, &export, &["run-0.pickle", "a recording", "--force"]);
    assert!(fs::read(folder.path().join("run-0.pickle")).unwrap() == precious);
}

#[test]
fn broken_source_keeps_the_existing_file() {
    let folder = empty();
    run(&folder, &["convert", "checkerboard", "good.oomph"], 0);
    let good = fs::read_to_string(folder.path().join("good.oomph")).unwrap();
    let half: Vec<&str> = good.lines().take(good.lines().count() / 2).collect();
    fs::write(folder.path().join("bad.oomph"), format!("{}\nalock 1 2\n", half.join("\n"))).unwrap();
    for options in [&["out.csv", "--to", "rmm"][..], &["out.pickle"], &["good.oomph"]] {
        refused(&folder, &[&["convert", "bad.oomph"], options].concat(), &["bad.oomph", "alock"]);
    }
    assert_eq!(fs::read_to_string(folder.path().join("good.oomph")).unwrap(), good);
}

#[test]
fn snapshot_export_needs_one_strategy() {
    let folder = empty();
    let export =
        |options: &[&'static str]| [&["replay", "checkerboard", "--export-snapshot", "out.pickle"], options].concat();
    refused(&folder, &export(&[]), &["--export-snapshot", "exactly one --strategy; there are 0"]);
    refused(&folder, &export(&["-s", "caching", "-s", "direct"]), &["exactly one --strategy; there are 2"]);
    refused(&folder, &export(&["-s", "caching", "--repeat", "2"]), &["--repeat"]);
    refused(&folder, &["replay", "checkerboard", "-s", "direct", "--force"], &["--export-snapshot"]);
    let (_, err) = run(&folder, &export(&["-s", "null"]), 2);
    assert!(err.contains("strategy 'null' cannot show its memory"), "{err}");
    assert!(!folder.path().join("out.pickle").exists());
}

/// Replays a recording under PyTorch's allocator and returns the exported snapshot.
fn exported(folder: &TempDir, source: &str, strategy: &str) -> PathBuf {
    let arguments = ["replay", source, "--strategy", strategy, "--export-snapshot", "again.pickle", "--force"];
    let (_, err) = run(folder, &arguments, 0);
    assert!(err.contains("entries written to again.pickle"), "{err}");
    folder.path().join("again.pickle")
}

#[test]
fn exported_recording_is_exact() {
    let folder = empty();
    let original = Snapshot::open(recorded("train_base"), &NoProgress).unwrap();
    let again = Snapshot::open(exported(&folder, &recorded("train_base"), "caching"), &NoProgress).unwrap();
    let actions = |snapshot: &Snapshot| -> Vec<(Action, u64)> {
        snapshot.traces[0].iter().map(|entry| (entry.action, entry.size)).collect()
    };
    assert_eq!(actions(&again), actions(&original), "the same settings must give the same actions");
    assert_eq!(again.settings, original.settings);
    let recording = again.into_recording("again", None, &NoProgress).unwrap();
    assert_eq!((recording.gaps.alive_before, recording.gaps.contradictions), (0, 0), "{:?}", recording.gaps);
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let setup = Setup { props: device.props(), limit: None };
    assert_eq!(verify(&recording, &setup, &Counters::default(), &NoProgress).verdict, Verdict::Exact);
    let (out, _) = run(&folder, &["verify", "again.pickle"], 0);
    assert!(out.starts_with("EXACT"), "{out}");
}

#[test]
fn snapshot_export_keeps_settings_and_stacks() {
    let folder = empty();
    for (name, strategy) in [
        ("streams", "caching:expandable_segments:True"),
        ("varlen_stack", "caching:max_split_size_mb:64,garbage_collection_threshold:0.6"),
    ] {
        let path = exported(&folder, &recorded(name), strategy);
        let (out, _) = run(&folder, &["verify", "again.pickle"], 0);
        assert!(out.starts_with("EXACT"), "{name}: {out}");
        let sites = |path: &Path| {
            let trace = Trace::read(&*trace::open(path, &NoProgress).unwrap()).unwrap();
            let mut sites = trace.tables.sites().to_vec();
            sites.sort();
            sites
        };
        assert_eq!(sites(&path), sites(Path::new(&recorded(name))), "{name}");
    }
}

#[test]
fn snapshot_export_replays_like_the_source() {
    let folder = empty();
    let columns = ["peak_requested_bytes", "allocs", "frees"];
    let expected = figures(&folder, "checkerboard", "direct", &columns);
    for strategy in ["direct", "caching"] {
        exported(&folder, "checkerboard", strategy);
        assert_eq!(figures(&folder, "again.pickle", "direct", &columns), expected, "{strategy}");
    }
    let (out, _) = run(&folder, &["convert", "checkerboard", "default.pickle"], 0);
    assert!(out.ends_with("entries written to default.pickle\n"), "{out}");
    let written = |name: &str| fs::read(folder.path().join(name)).unwrap();
    assert_eq!(written("default.pickle"), written("again.pickle"), "the default is caching");
}

#[test]
fn export_stops_at_out_of_memory() {
    let folder = empty();
    let limited = ["replay", "checkerboard", "-s", "caching", "--limit", "16MiB", "--export-snapshot", "oom.pickle"];
    let (_, err) = run(&folder, &limited, 0);
    assert!(err.contains("out of memory at event"), "{err}");
    let snapshot = Snapshot::open(folder.path().join("oom.pickle"), &NoProgress).unwrap();
    assert_eq!(snapshot.traces[0].last().map(|entry| entry.action), Some(Action::OutOfMemory));
}

/// A Python program that prints the keys of a snapshot, level by level.
const KEYS: &str = "
import lzma, pickle, sys
opened = lzma.open if sys.argv[1].endswith('.xz') else open
snapshot = pickle.load(opened(sys.argv[1], 'rb'))
trace = [entry for entries in snapshot['device_traces'] for entry in entries]
blocks = [block for segment in snapshot['segments'] for block in segment['blocks']]
settings = snapshot['allocator_settings']
frames = [frame for place in trace + blocks + snapshot['segments'] for frame in place.get('frames', [])]
for name, dicts in [('top', [snapshot]), ('entry', trace), ('segment', snapshot['segments']), ('block', blocks),
                    ('settings', [settings]), ('divisions', [settings['roundup_power2_divisions']]),
                    ('annotation', snapshot['external_annotations']), ('frame', frames)]:
    shapes = {tuple(sorted((key, type(value).__name__) for key, value in found.items())) for found in dicts}
    print(name, sorted(shapes))
";

#[test]
fn python_reads_pytorch_keys_and_types() {
    let folder = empty();
    let keys = |path: &str| match Command::new("python3").args(["-c", KEYS, path]).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        output => {
            let output = output.unwrap();
            assert!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8(output.stdout).unwrap())
        }
    };
    for name in ["train_base", "varlen_stack"] {
        let again = exported(&folder, &recorded(name), "caching");
        let again = keys(again.to_str().unwrap());
        assert_eq!(again, keys(&recorded(name)), "{name}");
    }
}

//! Recordings of every release of PyTorch: which release they are of, and that its rules reproduce them.
//!
//! `tools/torch-oracle/recordings.py` made the recordings with the library of each release.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::command::run;
use oomph::{
    base::{MemoryLimit, NoProgress, StreamId, TagId},
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    measure::torch_snapshot::record_snapshot,
    pytorch::Release,
    replay::{
        Replay,
        verify::{Counters, RecordedConditions, Verdict, Verification, verify_recording},
    },
    strategy::StrategySpec,
    trace::{
        Trace, TraceBuilder,
        torch::{GivenFacts, Recording, Snapshot},
    },
};
use tempfile::TempDir;

fn seeds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/verify")
}

/// A short recording of a release with PyTorch's default settings.
fn seed(release: Release) -> PathBuf {
    seeds().join(format!("release-{release}.pickle"))
}

fn verified(recording: &Recording) -> Verification {
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let counters = Counters::default();
    let conditions = RecordedConditions { props: device.props(), limit: None, counters: &counters };
    verify_recording(recording, &conditions, &NoProgress)
}

/// What `recordings.py` knows about a recording and the file does not contain.
#[derive(serde::Deserialize)]
struct RecordingTruth {
    release: Release,
    settings: String,
    fraction: Option<f64>,
    device_total: u64,
}

/// The recordings without private pools, with their truth.
fn recordings() -> Vec<(PathBuf, RecordingTruth)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded/releases");
    let files = folder.read_dir().unwrap().map(|file| file.unwrap().path());
    let truths = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let mut found = Vec::new();
    let is_plain = |path: &PathBuf| !path.file_name().is_some_and(|name| name.to_string_lossy().contains("pools"));
    for truth in truths.filter(is_plain) {
        let facts = serde_json::from_str(&fs::read_to_string(&truth).unwrap()).unwrap();
        found.push((truth.with_extension("pickle.xz"), facts));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

#[test]
fn recordings_of_every_release_are_exact_or_say_what_is_missing() {
    let (mut exact, mut others) = (0, Vec::new());
    let recordings = recordings();
    for (path, truth) in &recordings {
        // PyTorch up to 2.2 does not record its settings.
        let settings = (truth.release <= Release::new(2)).then(|| truth.settings.clone());
        let given = GivenFacts { settings, ..GivenFacts::default() };
        let recording = Recording::open_given(path, None, &given, &NoProgress).unwrap();
        let span = recording.release.span();
        assert!(span.contains(truth.release) && span.releases().count() <= 3, "{}: {span}", path.display());
        let device =
            SimDevice::new(SimConfig { capacity_bytes: Some(truth.device_total), ..SimConfig::default() }).unwrap();
        let limit = truth.fraction.map(MemoryLimit::Fraction);
        let counters = Counters::default();
        let conditions = RecordedConditions { props: device.props(), limit, counters: &counters };
        let verification = verify_recording(&recording, &conditions, &NoProgress);
        match verification.verdict {
            Verdict::Exact => {
                exact += 1;
                assert!(verification.release.span().contains(truth.release), "{}", path.display());
            }
            Verdict::Partial { reasons, .. } => others.push((path.file_name().unwrap().to_owned(), reasons)),
            Verdict::Diverged(divergence) => panic!("{}: {divergence}", path.display()),
        }
    }
    assert!(
        recordings.len() > 40 && exact * 20 >= recordings.len() * 19,
        "{exact} of {}: {others:?}",
        recordings.len()
    );
}

/// Requests of few sizes, so that many free blocks are equally large.
fn program() -> Trace {
    let mut builder = TraceBuilder::new();
    let mut live = Vec::new();
    for step in 0..600_u64 {
        let mebibytes = [1, 3, 3, 12, 12, 12, 30][(step * 31 % 7) as usize];
        live.push(builder.alloc(mebibytes << 20, StreamId::DEFAULT, TagId(0)));
        if step % 3 > 0 && live.len() > 12 {
            builder.free(live.remove((step * 37 % live.len() as u64) as usize));
        }
        if step == 200 {
            builder.empty_cache();
        }
    }
    builder.finish("ties")
}

fn recorded_by(release: Release) -> Snapshot {
    let trace = program();
    let strategy = StrategySpec::from("caching").of_release(release);
    let snapshot = record_snapshot(&Replay::new(&trace).strategy(strategy)).unwrap().snapshot;
    let mut file = Vec::new();
    snapshot.write(&mut file, &NoProgress).unwrap();
    Snapshot::read(&file[..]).unwrap()
}

#[test]
fn exported_snapshots_have_the_format_of_their_release() {
    for release in Release::all() {
        let recording = recorded_by(release).into_recording("again", None, &NoProgress).unwrap();
        assert!(recording.release.span().contains(release), "{release}: {}", recording.release);
        let verification = verified(&recording);
        assert_eq!(verification.verdict, Verdict::Exact, "{release}");
    }
}

/// From 2.12 on the age of segments decides between free blocks, and a recording that begins in the middle does not
/// contain it.
#[test]
fn unknown_age_of_segments_is_no_divergence() {
    let mut exact = 0;
    for release in [12, 13, 15].map(Release::new) {
        let whole = recorded_by(release);
        let entries = whole.traces[0].len();
        for lost in [entries / 4, entries / 2, entries * 3 / 4] {
            let mut late = whole.clone();
            late.traces[0].drain(..lost);
            let verification = verified(&late.into_recording("late", None, &NoProgress).unwrap());
            match verification.verdict {
                Verdict::Exact => exact += 1,
                Verdict::Partial { reasons, .. } => {
                    assert!(
                        reasons.iter().any(|reason| reason.contains("the order in which")),
                        "{release}: {reasons:?}"
                    );
                }
                Verdict::Diverged(divergence) => panic!("{release} without {lost} entries: {divergence}"),
            }
        }
    }
    assert!(exact >= 6, "{exact} of 9 are exact");
}

#[test]
fn told_release_is_checked() {
    let folder = TempDir::new().unwrap();
    let path = seed(Release::new(12));
    let path = path.to_str().unwrap();
    let (out, _) = run(&folder, &["verify", "--release", "2.12", path], 0);
    assert!(out.contains("PyTorch 2.12, as told"), "{out}");
    let (out, _) = run(&folder, &["verify", "--release", "2.11", path], 2);
    assert!(out.contains("its entries have `pool_id`, which exists since 2.12"), "{out}");
    for command in ["inspect", "advise", "leaks", "replay", "threshold"] {
        let (_, err) = run(&folder, &[command, path, "--release", "2.13"], 2);
        assert!(err.contains("its settings have no `max_round_threshold`"), "{command}: {err}");
    }
    let (_, err) = run(&folder, &["inspect", "training", "--release", "2.13"], 2);
    assert!(err.contains("are for PyTorch snapshots"), "{err}");
    let (_, err) = run(&folder, &["inspect", path, "--release", "3.1"], 2);
    assert!(err.contains("'3.1' is not a known release"), "{err}");
}

#[test]
fn settings_are_given_where_none_are_recorded() {
    let folder = TempDir::new().unwrap();
    let path = seed(Release::new(1));
    let path = path.to_str().unwrap();
    let (out, _) = run(&folder, &["verify", path], 0);
    assert!(out.contains("with PyTorch's default settings, as none are recorded"), "{out}");
    // Other settings do something else. What is missing is no longer unknown then.
    let (out, _) = run(&folder, &["verify", path, "--settings", "roundup_power2_divisions:2"], 100);
    assert!(out.contains("DIVERGED") && out.contains("with the given settings"), "{out}");
    let newer = seed(Release::new(8));
    let (out, _) = run(&folder, &["verify", newer.to_str().unwrap(), "--settings", "max_split_size_mb:99"], 2);
    assert!(out.contains("its settings are") && out.contains("max_split_size_mb:99"), "{out}");
}

#[test]
fn inspect_shows_release_and_host_memory() {
    let folder = TempDir::new().unwrap();
    let path = seeds().join("host.pickle");
    let (out, _) = run(&folder, &["inspect", path.to_str().unwrap()], 0);
    for line in [
        "PyTorch      2.14 or 2.15: both agree",
        "annotated    embedding",
        "metadata     phase one",
        "annotations  forward",
        "pinned       5 buffers (2.56 MiB) at the end, 2.06 MiB in use, peak 2.53 MiB",
    ] {
        assert!(out.contains(line), "'{line}' is missing in:\n{out}");
    }
    let (json, _) = run(&folder, &["inspect", path.to_str().unwrap(), "--format", "json"], 0);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let recording = &json["rows"][0]["recording"];
    assert_eq!((&recording["release"], &recording["pinned"]["requests"]), (&"2.15".into(), &5.into()), "{recording}");
    assert_eq!(recording["pinned"]["peak_allocated_bytes"], 32_768 + 524_288 + 2 * 1_048_576);
}

#[test]
fn replays_use_the_release_of_the_recording() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("run.pickle");
    let mut bytes = Vec::new();
    recorded_by(Release::new(13)).write(&mut bytes, &NoProgress).unwrap();
    fs::write(&file, bytes).unwrap();
    let arguments = ["replay", "run.pickle", "-s", "caching", "-s", "caching:release:2.11", "--format", "csv"];
    let (out, _) = run(&folder, &arguments, 0);
    assert!(out.contains("caching:release:2.13") && out.contains("caching:release:2.11"), "{out}");
}

//! Recordings that start in the middle of a program, as most do, because PyTorch keeps only the
//! last entries. They are verified from the memory at their start, with every recording of
//! `workloads/recorded` and with random programs.

use crate::recordings;
use std::{
    fs::{self, File},
    path::Path,
};

use crate::command::run;
use oomph::{
    base::{Nanos, NoProgress, StreamId, TagId, Work, parallel_map},
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    measure::torch_snapshot::record_snapshot,
    replay::{
        OnOutOfMemory, Replay, ReplayOptions, replay,
        verify::{Companion, Counters, Verdict, Verification, verify},
    },
    strategy::{Setup, Silent, StrategySpec},
    suite::all_cores,
    trace::{
        Trace, TraceBuilder,
        torch::{Action, Recording, Snapshot},
    },
};
use proptest::prelude::*;
use recordings::{recordings, verify_as_recorded};

/// The snapshot as PyTorch writes it with a ring buffer of this many entries: the last ones, and
/// the memory at the end.
fn last_entries(snapshot: &Snapshot, count: usize) -> Snapshot {
    let mut late = snapshot.clone();
    let lost = late.traces[0].len().saturating_sub(count);
    late.traces[0].drain(..lost);
    late
}

/// The age of cached blocks before a recording is unknown, and garbage collection depends on it. Of
/// the 72 recordings, these two, cut there, start a collection while such blocks are still cached.
const AGES_MATTER: [(&str, &str); 2] =
    [("varlen_cap042.gc.pickle.xz", "the last tenth"), ("varlen_cap052.gc.pickle.xz", "the last tenth")];

#[test]
fn every_recording_is_exact_from_the_middle() {
    let found = parallel_map(&recordings(), all_cores(), |path| {
        let snapshot = Snapshot::open(path, &NoProgress).unwrap();
        let companion = Companion::beside(path).unwrap().unwrap();
        let all = snapshot.traces[0].len();
        let cuts = [
            (all - 1, "all but the first"),
            (all / 2, "the last half"),
            (all / 10, "the last tenth"),
            (100, "the last hundred"),
        ];
        let (mut agreed, mut failures) = (0, Vec::new());
        for (count, cut) in cuts {
            let recording = last_entries(&snapshot, count).into_recording("late", None, &NoProgress).unwrap();
            let verification = verify_as_recorded(&recording, &companion);
            agreed += verification.agreed;
            let began = verification.beginning.unwrap();
            assert!(began.segments > 0 || began.entries_passed_over > 0, "{}: {cut}", path.display());
            let name = path.file_name().unwrap().to_str().unwrap();
            match &verification.verdict {
                Verdict::Exact => assert!(!AGES_MATTER.contains(&(name, cut)), "{name}: {cut}"),
                Verdict::Partial { reasons, .. } if AGES_MATTER.contains(&(name, cut)) => {
                    assert!(reasons.iter().any(|reason| reason.contains("garbage collection")));
                }
                other => failures.push(format!("{name}: {cut}: {other:?}")),
            }
        }
        (agreed, failures)
    });
    let failures: Vec<&str> = found.iter().flat_map(|(_, failures)| failures).map(String::as_str).collect();
    assert!(failures.is_empty(), "{} diverge:\n{}", failures.len(), failures.join("\n"));
    assert_eq!(found.iter().map(|(agreed, _)| agreed).sum::<usize>(), 3_002_450);
}

#[test]
fn recording_without_a_complete_call_is_skipped() {
    let path = recordings().into_iter().find(|path| path.ends_with("varlen.pickle.xz")).unwrap();
    let snapshot = Snapshot::open(&path, &NoProgress).unwrap();
    let whole_call = [Action::FreeRequested, Action::Alloc, Action::OutOfMemory];
    let behind = snapshot.traces[0].iter().rev().take_while(|entry| !whole_call.contains(&entry.action)).count();
    assert!(behind > 0, "the snapshot must end with part of a call");
    for count in 1..=behind {
        let recording = last_entries(&snapshot, count).into_recording("late", None, &NoProgress).unwrap();
        let Verification { verdict, agreed, beginning, .. } = verify_as_recorded(&recording, &Companion::default());
        let Verdict::Partial { reasons, divergence: None } = verdict else { panic!("{count}: {verdict:?}") };
        assert_eq!(reasons, ["it began in the middle: no whole call is in it"]);
        assert_eq!((agreed, beginning.unwrap().entries_passed_over), (0, count));
    }
}

/// The peak that PyTorch's allocator reserves in a replay on the simulated device.
fn peak_reserved(recording: &Recording, resumes: bool) -> u64 {
    let mut device = SimDevice::new(SimConfig::default()).unwrap();
    let spec = StrategySpec { name: "caching".to_owned(), parameters: recording.settings.conf().to_owned() };
    let mut strategy = spec.build(&Setup { props: &device.props().clone(), limit: None }).unwrap();
    replay(recording, &mut *strategy, &mut device, &ReplayOptions { resumes, ..ReplayOptions::default() }, &mut Silent)
        .unwrap();
    strategy.stats().peak.reserved
}

#[test]
fn replay_continues_from_initial_memory() {
    let mut without = 0;
    // Other segments serve the last request if segments of one size change their order.
    let cut = ["train_base", "varlen", "varlen_stack", "train_base.exp", "varlen.exp"].map(|name| (name, 3));
    for (name, part) in cut.into_iter().chain([("fuzz1.split32", 2)]) {
        let path = recordings().into_iter().find(|path| path.ends_with(format!("{name}.pickle.xz")));
        let path = path.unwrap_or_else(|| panic!("no {name}"));
        let snapshot = Snapshot::open(&path, &NoProgress).unwrap();
        let count = snapshot.traces[0].len() / part;
        let recording = last_entries(&snapshot, count).into_recording(name, None, &NoProgress).unwrap();
        let verification = verify_as_recorded(&recording, &Companion::default());
        assert_eq!(verification.verdict, Verdict::Exact, "{name}");
        let recording = recording.with_empty_caches(verification.empty_caches, &NoProgress).unwrap();
        assert_eq!(peak_reserved(&recording, true), verification.stats.peak.reserved, "{name}");
        without += u32::from(peak_reserved(&recording, false) != verification.stats.peak.reserved);
    }
    assert!(without > 0, "the test has no effect: new blocks give the same result");
}

#[test]
fn replay_uses_the_repaired_sizes() {
    let path = recordings().into_iter().find(|path| path.ends_with("fuzz1.split32.pickle.xz")).unwrap();
    let snapshot = Snapshot::open(&path, &NoProgress).unwrap();
    let recording =
        last_entries(&snapshot, snapshot.traces[0].len() / 20).into_recording("late", None, &NoProgress).unwrap();
    let verification = verify_as_recorded(&recording, &Companion::default());
    assert_eq!((&verification.verdict, verification.sizes_before.len()), (&Verdict::Exact, 1));
    let estimated = recording.with_empty_caches(verification.empty_caches, &NoProgress).unwrap();
    assert_ne!(
        peak_reserved(&estimated, true),
        verification.stats.peak.reserved,
        "the test has no effect: the estimate gives the same result"
    );
    let mended = estimated.with_sizes_before(&verification.sizes_before);
    assert_eq!(peak_reserved(&mended, true), verification.stats.peak.reserved);
    let folder = tempfile::tempdir().unwrap();
    let file = File::create(folder.path().join("late.pickle")).unwrap();
    last_entries(&snapshot, snapshot.traces[0].len() / 20).write(file, &NoProgress).unwrap();
    let strategy = format!("caching:{}", mended.settings.conf());
    let (text, _) = run(&folder, &["replay", "late.pickle", "--strategy", &strategy, "--format", "json"], 0);
    let replayed: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(replayed["rows"][0]["peak_reserved_bytes"], verification.stats.peak.reserved);
}

/// Writes the last entries of a recording as `late.pickle`.
fn late_file(name: &str, folder: &Path) {
    let path = recordings().into_iter().find(|path| path.ends_with(format!("{name}.pickle.xz")));
    let late = last_entries(&Snapshot::open(path.unwrap(), &NoProgress).unwrap(), 1001);
    late.write(File::create(folder.join("late.pickle")).unwrap(), &NoProgress).unwrap();
}

#[test]
fn commands_report_a_start_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    late_file("train_sgd", folder.path());
    let (text, _) = run(&folder, &["verify", "late.pickle"], 0);
    let line = text.lines().next().unwrap();
    assert!(line.starts_with("EXACT     late.pickle: ") && line.contains("from the middle: "), "{text}");
    assert!(line.contains(" segments existed before"), "{text}");
    let (text, _) = run(&folder, &["verify", "late.pickle", "--format", "json"], 0);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let row = &document["rows"][0];
    let passed_over = row["beginning"]["entries_passed_over"].as_u64().unwrap();
    assert_eq!(row["entries_agreed"].as_u64().unwrap() + passed_over, 1001);
    let (csv, _) = run(&folder, &["replay", "late.pickle", "--strategy", "caching", "--format", "json"], 0);
    let replayed: serde_json::Value = serde_json::from_str(&csv).unwrap();
    assert_eq!(replayed["rows"][0]["peak_reserved_bytes"], row["peak_reserved_bytes"]);
    let (text, _) = run(&folder, &["advise", "late.pickle", "--format", "json"], 0);
    assert!(text.contains("\"blocks_before\": "), "{text}");
}

#[test]
fn suite_resumes_mid_run_recordings() {
    let folder = tempfile::tempdir().unwrap();
    late_file("varlen.exp", folder.path());
    let suite = "question = 'the same?'\n[[group]]\nworkloads = ['./late.pickle']\n\
                 strategies = ['caching:expandable_segments:True']\n";
    fs::write(folder.path().join("suite.toml"), suite).unwrap();
    let rows = ["never", "always"].map(|isolate| {
        let arguments = ["run", "./suite.toml", "--isolate", isolate, "--output", isolate];
        run(&folder, &arguments, 0);
        fs::read_to_string(folder.path().join(isolate).join("runs.csv")).unwrap()
    });
    assert_eq!(rows[0], rows[1]);
}

#[test]
fn exported_snapshot_begins_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    late_file("varlen.exp", folder.path());
    let strategy = "caching:expandable_segments:True";
    let arguments = ["replay", "late.pickle", "--strategy", strategy, "--format", "json"];
    let (text, _) = run(&folder, &[&arguments[..], &["--export-snapshot", "export.pickle"]].concat(), 0);
    let replayed: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (text, _) = run(&folder, &["verify", "export.pickle", "--format", "json"], 0);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["rows"][0]["peak_reserved_bytes"], replayed["rows"][0]["peak_reserved_bytes"]);
}

/// A step of a random program.
#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc {
        bytes: u64,
        stream: u8,
    },
    Free {
        which: u16,
    },
    /// A free that has to wait: another stream uses the block and is busy for a while.
    FreeWhileUsed {
        which: u16,
        by: u8,
        micros: u16,
    },
    EmptyCache,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![1_u64..1 << 20, 1_u64 << 20..12 << 20, 1_u64 << 20..80 << 20];
    prop_oneof![
        12 => (bytes, 0_u8..3).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        8 => any::<u16>().prop_map(|which| Step::Free { which }),
        3 => (any::<u16>(), 0_u8..3, 1_u16..3000)
            .prop_map(|(which, by, micros)| Step::FreeWhileUsed { which, by, micros }),
        1 => Just(Step::EmptyCache),
    ]
}

fn random_program(steps: &[Step]) -> Trace {
    let mut builder = TraceBuilder::new();
    let streams = [StreamId::DEFAULT, builder.stream_known_as(32).unwrap(), builder.stream_known_as(16).unwrap()];
    let mut live = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc { bytes, stream } => live.push(builder.alloc(bytes, streams[usize::from(stream)], TagId(0))),
            Step::EmptyCache => builder.empty_cache(),
            Step::Free { .. } | Step::FreeWhileUsed { .. } if live.is_empty() => {}
            Step::Free { which } => builder.free(live.swap_remove(usize::from(which) % live.len())),
            Step::FreeWhileUsed { which, by, micros } => {
                let block = live.swap_remove(usize::from(which) % live.len());
                let stream = streams[usize::from(by)];
                builder.work(Work::Spin { nanos: Nanos(u64::from(micros) * 1000) }, stream, &[block]);
                builder.use_on(block, stream);
                builder.free(block);
            }
        }
    }
    builder.finish("made up")
}

/// A device that the program sometimes fills.
const SMALL_DEVICE: &str = "sim:3GiB";

/// The snapshot of the program.
fn recorded(steps: &[Step], strategy: &str) -> Snapshot {
    let options = ReplayOptions { on_out_of_memory: OnOutOfMemory::Skip, ..ReplayOptions::default() };
    let (trace, device) = (random_program(steps), SMALL_DEVICE.parse().unwrap());
    record_snapshot(&Replay::new(&trace).strategy(strategy).device(device).options(options)).unwrap().snapshot
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn random_program_is_exact_from_any_start(
        steps in prop::collection::vec(step(), 20..400),
        strategy in prop::sample::select(vec![
            "caching",
            "caching:expandable_segments:True",
            "caching:max_split_size_mb:32",
            "caching:roundup_power2_divisions:4",
            "caching:expandable_segments:True,roundup_power2_divisions:8",
        ]),
        share in 0.0..1.0_f64,
    ) {
        let device = SimDevice::new(SMALL_DEVICE.parse::<SimConfig>().unwrap()).unwrap();
        let snapshot = recorded(&steps, strategy);
        let setup = Setup { props: device.props(), limit: None };
        let whole = verify(&snapshot.clone().into_recording("whole", None, &NoProgress).unwrap(), &setup, &Counters::default(), &NoProgress);
        prop_assume!(whole.verdict == Verdict::Exact);
        let count = (snapshot.traces[0].len() as f64 * share) as usize;
        prop_assume!(count > 0);
        let recording = last_entries(&snapshot, count).into_recording("late", None, &NoProgress).unwrap();
        prop_assert_eq!(recording.gaps.contradictions, 0);
        let late = verify(&recording, &setup, &Counters::default(), &NoProgress);
        let passed_over = late.beginning.map_or(0, |before| before.entries_passed_over);
        if passed_over == count {
            prop_assert!(matches!(late.verdict, Verdict::Partial { divergence: None, .. }), "{:?}", late.verdict);
        } else {
            prop_assert_eq!(&late.verdict, &Verdict::Exact, "the last {} entries: {:?}", count, late.beginning);
            prop_assert_eq!(late.agreed + passed_over, count);
        }
    }
}

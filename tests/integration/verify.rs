//! Verifies every recording in `workloads/recorded` entry by entry, and checks that deliberate
//! changes are found.

use std::{path::Path, process::Command};

use crate::recordings::{recordings, verify_as_recorded};
use oomph::{
    base::{Address, NoProgress, SiteId, StreamId, ThreadId, parallel_map},
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::verify::{Companion, Counters, Divergence, Verdict, verify_with_limit},
    strategy::{self, Attempt, Caller, Context, Request, SegmentView, Setup, StrategyEvent, StrategySpec},
    suite::all_cores,
    trace::torch::{
        Action, RecordedSettings, RecordedValue, Recording, Segment, SegmentKind, Snapshot, SnapshotBlock,
        SnapshotBlockState, StackId, TraceEntry,
    },
};

#[test]
fn every_recording_is_exact() {
    let paths = recordings();
    let verifications = parallel_map(&paths, all_cores(), |path| {
        let recording = Recording::open(path, None, &NoProgress).unwrap();
        let companion = Companion::beside(path).unwrap().unwrap();
        verify_as_recorded(&recording, &companion)
    });
    let mut failures = Vec::new();
    let (mut entries, mut empty_caches, mut retries, mut ooms) = (0, 0, 0, 0);
    for (path, verification) in paths.iter().zip(verifications) {
        if verification.verdict != Verdict::Exact {
            failures.push(format!("{}: {:?}", path.display(), verification.verdict));
        }
        assert_eq!(verification.refusals, 0, "{}: PyTorch's own limit explains it", path.display());
        entries += verification.agreed;
        empty_caches += verification.empty_caches.len();
        retries += verification.stats.retries;
        ooms += verification.stats.ooms;
    }
    assert!(failures.is_empty(), "{} diverge:\n{}", failures.len(), failures.join("\n"));
    assert_eq!((entries, empty_caches, retries, ooms), (1_875_087, 35, 343, 245));
}

/// As a user has it: a snapshot file without the table of the recordings' folder.
#[test]
fn unknown_limit_is_inferred() {
    let device = SimDevice::new(SimConfig::default()).unwrap();
    let paths: Vec<_> = recordings()
        .into_iter()
        .filter_map(|path| {
            let companion = Companion::beside(&path).unwrap().unwrap();
            Some((path, companion.memory_fraction?, companion.counters))
        })
        .collect();
    let found = parallel_map(&paths, all_cores(), |(path, ..)| {
        let recording = Recording::open(path, None, &NoProgress).unwrap();
        let setup = Setup { props: device.props(), limit: None };
        verify_with_limit(&recording, &setup, &Counters::default(), &NoProgress)
    });
    let mut without = Vec::new();
    for ((path, fraction, counters), verification) in paths.iter().zip(found) {
        let name = path.file_name().unwrap().to_string_lossy().replace(".pickle.xz", "");
        assert_eq!(verification.verdict, Verdict::Exact, "{name}");
        let Some(limit) = verification.limit else {
            without.push(name);
            continue;
        };
        assert_eq!(Some(verification.stats.peak.reserved), counters.peak_reserved, "{name}");
        assert_eq!((verification.refusals, Some(verification.stats.retries)), (0, counters.alloc_retries), "{name}");
        let real = (fraction * device.props().total_bytes as f64) as u64;
        assert!(limit.inferred && limit.range.contains(real) && limit.range.contains(limit.bytes), "{name}: {limit:?}");
        assert!(limit.fraction.is_none_or(|found| found == *fraction), "{name}: {limit:?}");
    }
    // Nothing was refused.
    assert_eq!(without, ["varlen_cap047.exp", "varlen_cap052.exp"]);
    assert_eq!(paths.len(), 17);
}

fn open(name: &str) -> (Snapshot, Companion) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    (Snapshot::open(&path, &NoProgress).unwrap(), Companion::beside(&path).unwrap().unwrap())
}

/// The result of verifying a changed recording.
fn divergence_after(name: &str, change: impl FnOnce(&mut Snapshot, &mut Companion)) -> Divergence {
    let (mut snapshot, mut companion) = open(name);
    change(&mut snapshot, &mut companion);
    let recording = snapshot.into_recording(name, None, &NoProgress).unwrap();
    match verify_as_recorded(&recording, &companion).verdict {
        Verdict::Diverged(divergence) | Verdict::Partial { divergence: Some(divergence), .. } => divergence,
        other => panic!("{name}: {other:?}"),
    }
}

/// The entry of the first divergence.
#[track_caller]
fn entry_of(divergence: Divergence) -> usize {
    match divergence {
        Divergence::Entries { entry, .. } => entry,
        other => panic!("{other}"),
    }
}

#[test]
fn changed_entry_is_located() {
    for (action, what) in [
        (Action::Alloc, "a block elsewhere"),
        (Action::FreeCompleted, "a free of something else"),
        (Action::SegmentFree, "a segment of another size"),
    ] {
        let mut place = 0;
        let divergence = divergence_after("fuzz2", |snapshot, _| {
            let entries = &mut snapshot.traces[0];
            place = entries.iter().enumerate().filter(|(_, entry)| entry.action == action).nth(40).unwrap().0;
            match action {
                Action::Alloc => entries[place].address.0 += 512,
                _ => entries[place].size += 512,
            }
        });
        assert_eq!(entry_of(divergence), place, "{what}");
    }
}

#[test]
fn wrongly_refused_request_is_found() {
    let mut place = 0;
    let divergence = divergence_after("varlen_cap042", |snapshot, _| {
        let entries = &mut snapshot.traces[0];
        place = entries.iter().position(|entry| entry.action == Action::OutOfMemory).unwrap();
        entries[place].size = 512;
    });
    assert!(entry_of(divergence) <= place, "the model releases nothing for 512 bytes");
}

#[test]
fn changed_settings_cap_or_counters_are_found() {
    let first_oom =
        |snapshot: &Snapshot| snapshot.traces[0].iter().position(|entry| entry.action == Action::OutOfMemory).unwrap();
    let mut at = 0;
    let uncapped = divergence_after("varlen_cap042", |snapshot, companion| {
        at = first_oom(snapshot);
        companion.memory_fraction = None;
        // As if the program had emptied its cache at once, which looks like a retry.
        snapshot.traces[0].truncate(at + 1);
    });
    assert!(matches!(uncapped, Divergence::Memory { .. }) || entry_of(uncapped) <= at);
    let unsplit = divergence_after("varlen", |snapshot, _| {
        for (name, value) in &mut snapshot.settings.values {
            if &**name == "max_split_size" {
                *value = RecordedValue::Int(64 << 20);
            }
        }
    });
    assert!(matches!(unsplit, Divergence::Entries { .. }), "{unsplit}");
    let miscounted = divergence_after("fuzz2", |_, companion| companion.counters.alloc_retries = Some(1));
    assert_eq!(miscounted, Divergence::Figure { what: "num_alloc_retries", recorded: 1, modelled: 115 });
}

#[test]
fn final_memory_is_compared_by_block() {
    let divergence = divergence_after("streams", |snapshot, _| {
        let mut blocks = snapshot.segments.iter_mut().flat_map(|segment| &mut segment.blocks);
        let block =
            blocks.find(|block| block.state == SnapshotBlockState::Inactive && block.requested_size > 0).unwrap();
        block.requested_size += 1;
    });
    assert!(matches!(divergence, Divergence::Memory { recorded: Some(_), modelled: Some(_) }), "{divergence}");
}

/// A program that fills a device of 1 GiB without a PyTorch limit, as its snapshot, and its number
/// of failed requests.
fn full_device(conf: &str) -> (Snapshot, u64) {
    let mut device = SimDevice::new("sim:1GiB".parse::<SimConfig>().unwrap()).unwrap();
    let spec = StrategySpec { name: "caching".to_owned(), parameters: conf.to_owned() };
    let mut strategy = spec.build(&Setup { props: &device.props().clone(), limit: None }).unwrap();
    let mut entries: Vec<TraceEntry> = Vec::new();
    let mut live = Vec::new();
    let mut ooms = 0;
    for step in 0..400_u64 {
        let bytes = (1 + step * 7_919_993 % 60_000_000) | 1;
        let mut events: Vec<StrategyEvent> = Vec::new();
        let mut cx = Context { device: &mut device, sink: &mut events };
        let request = Request { bytes, stream: StreamId(0), thread: ThreadId(0), site: SiteId(0) };
        let attempt = strategy.alloc(&mut cx, &request).unwrap();
        entries.extend(events.iter().filter_map(entry_of_event));
        match attempt {
            Attempt::Served(block, _) => {
                entries.push(entry(Action::Alloc, block.address, bytes));
                live.push((block, bytes));
            }
            Attempt::OutOfMemory(_) => ooms += 1,
        }
        if step % 3 == 2 && live.len() > 4 {
            let (block, bytes) = live.remove((step * 31 % live.len() as u64) as usize);
            let mut cx = Context { device: &mut device, sink: &mut events };
            strategy.free(&mut cx, block, Caller::default()).unwrap();
            entries.push(entry(Action::FreeRequested, block.address, bytes));
            entries.push(entry(Action::FreeCompleted, block.address, bytes));
        }
    }
    let snapshot = Snapshot {
        segments: strategy.layout().unwrap().segments.iter().map(segment_of).collect(),
        traces: vec![entries],
        settings: RecordedSettings {
            values: vec![("PYTORCH_CUDA_ALLOC_CONF".into(), RecordedValue::Text(conf.into()))],
        },
        streams: vec![0],
        pools: vec![(0, 0)],
        ..Snapshot::default()
    };
    (snapshot, ooms)
}

fn entry(action: Action, address: Address, size: u64) -> TraceEntry {
    TraceEntry { action, address, size, ..TraceEntry::default() }
}

fn entry_of_event(event: &StrategyEvent) -> Option<TraceEntry> {
    Some(match *event {
        StrategyEvent::SegmentAlloc { address, bytes, .. } => entry(Action::SegmentAlloc, address, bytes),
        StrategyEvent::SegmentFree { address, bytes, .. } => entry(Action::SegmentFree, address, bytes),
        StrategyEvent::SegmentMap { address, bytes, .. } => entry(Action::SegmentMap, address, bytes),
        StrategyEvent::SegmentUnmap { address, bytes, .. } => entry(Action::SegmentUnmap, address, bytes),
        StrategyEvent::OutOfMemory { rounded, .. } => entry(Action::OutOfMemory, Address::NULL, rounded),
        StrategyEvent::FreeCompleted { .. } | StrategyEvent::Retry { .. } => return None,
    })
}

fn segment_of(segment: &SegmentView) -> Segment {
    let blocks = segment.blocks.iter().map(|block| SnapshotBlock {
        address: block.address,
        size: block.size,
        requested_size: block.requested,
        state: if block.state == strategy::BlockState::Free {
            SnapshotBlockState::Inactive
        } else {
            SnapshotBlockState::Allocated
        },
        stack: StackId::default(),
    });
    Segment {
        device: 0,
        address: segment.address,
        total_size: segment.bytes,
        stream: segment.stream,
        kind: if segment.pool == "large" { SegmentKind::Large } else { SegmentKind::Small },
        pool: segment.pool_id,
        expandable: segment.mapped,
        stack: StackId::default(),
        blocks: blocks.collect(),
    }
}

#[test]
fn driver_refusal_is_recognised() {
    for conf in ["", "max_split_size_mb:20", "expandable_segments:True"] {
        let (snapshot, ooms) = full_device(conf);
        assert!(ooms > 10, "{conf}: the device is too large");
        let recording = snapshot.into_recording("full", None, &NoProgress).unwrap();
        let verification = verify_as_recorded(&recording, &Companion::default());
        assert_eq!(verification.verdict, Verdict::Exact, "{conf}");
        assert_eq!(verification.stats.ooms, ooms, "{conf}");
        assert!(verification.refusals as u64 > ooms, "{conf}");
    }
}

/// The binary's output for `arguments`, and its exit code.
fn oomph(arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomph"));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code().unwrap(), text)
}

const OOM_BASE: &str = "workloads/recorded/oom_base.pickle.xz";
const VARLEN_STACK: &str = "workloads/recorded/varlen_stack.pickle.xz";

#[test]
fn verify_prints_a_line_per_file_and_a_total() {
    let (code, text) = oomph(&["verify", OOM_BASE, VARLEN_STACK]);
    assert_eq!(code, 0, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        format!("EXACT     {OOM_BASE}: 510 entries, 1 retry, 1 out of memory, PyTorch 2.10 or 2.11: both agree")
    );
    assert!(lines[1].starts_with("EXACT") && lines[1].contains(VARLEN_STACK), "{text}");
    assert!(lines[2].starts_with("2 recordings, ") && lines[2].ends_with(": 2 exact"), "{text}");
}

#[test]
fn verify_prints_the_inferred_limit() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("run-0.pickle.xz").display().to_string();
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(OOM_BASE), &copy).unwrap();
    let (code, text) = oomph(&["verify", &copy]);
    assert_eq!(code, 0, "{text}");
    let limit = "under a memory limit of its own, between 7412 and 8984 MiB (the roundest fraction of the NVIDIA H200 in it is 0.06)";
    assert!(text.starts_with("EXACT") && text.contains(limit) && !text.contains("by the driver"), "{text}");
    assert!(text.contains("1 recording, 510 entries agree: 1 exact"), "{text}");
    let (_, text) = oomph(&["verify", "--format", "json", &copy]);
    let row = &serde_json::from_str::<serde_json::Value>(&text).unwrap()["rows"][0];
    assert_eq!(
        (&row["limit_bytes"], &row["own_limit"]["at_least_bytes"]),
        (&serde_json::Value::Null, &7_772_045_312_u64.into())
    );
}

#[test]
fn verify_exit_code_names_the_failure() {
    let (code, text) = oomph(&["verify", "--limit", "0.5", OOM_BASE]);
    assert_eq!(code, 100, "{text}");
    assert!(text.starts_with("DIVERGED") && text.contains("recorded") && text.contains("model"), "{text}");
    let (code, text) = oomph(&["verify", "Cargo.toml", OOM_BASE]);
    assert_eq!(code, 2, "{text}");
    assert!(text.starts_with("FAILED    Cargo.toml: ") && text.contains("1 exact, 1 failed"), "{text}");
    let (code, text) = oomph(&["verify", "--limit", "200%", OOM_BASE]);
    assert!(code == 2 && text.contains("not a fraction from 0 to 1"), "{text}");
}

#[test]
fn verify_prints_json() {
    let (code, text) = oomph(&["verify", "--format", "json", OOM_BASE]);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let row = &document["rows"][0];
    assert_eq!((code, &row["result"], &row["entries_agreed"]), (0, &"exact".into(), &510.into()));
    assert_eq!(row["peak_reserved_bytes"], 7_772_045_312_u64);
}

/// PyTorch reserves addresses for the second request before it finds that no memory is left. No entry shows them.
#[test]
fn range_without_any_mapping_is_not_a_divergence() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, snapshot] =
        ["two.oomph", "two.pickle"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    std::fs::write(&trace, "oomph-trace 1 \"two\"\nalloc 1 137438953472\nalloc 2 137438953472\nend 2\n").unwrap();
    let strategy = "caching:expandable_segments:True";
    let (code, text) = oomph(&["replay", &trace, "--strategy", strategy, "--export-snapshot", &snapshot]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = oomph(&["verify", &snapshot]);
    assert!(code == 0 && text.starts_with("EXACT"), "{text}");
}

#[test]
fn snapshot_can_be_inspected_and_replayed() {
    let (code, text) = oomph(&["inspect", OOM_BASE]);
    assert_eq!(code, 0, "{text}");
    let limit = "own limit    8.39 GiB";
    for words in ["PyTorch's defaults", "80", "allocated", "largest free", "1 oom", limit] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (code, text) = oomph(&["inspect", OOM_BASE, "--device-index", "3"]);
    assert!(code == 2 && text.contains("nothing of device 3"), "{text}");
    let (code, text) = oomph(&[
        "replay",
        VARLEN_STACK,
        "--strategy",
        "caching",
        "--strategy",
        "direct",
        "--repeat",
        "2",
        "--format",
        "csv",
    ]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(text.lines().filter(|line| line.contains("completed")).count(), 2, "{text}");
}

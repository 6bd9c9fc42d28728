//! Every recording in `workloads/recorded` can be read completely, agrees with PyTorch's own
//! counters, can be written and read again, and can be rewound to any entry.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oomph::{
    base::{Address, NoProgress, parallel_map},
    suite::all_cores,
    trace::{
        OpKind, check,
        torch::{Action, Recording, Snapshot, SnapshotBlockState, TraceEntry},
    },
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded")
}

/// One row of `snapshots.csv`.
struct Truth {
    name: String,
    conf: String,
    final_allocated: u64,
    final_reserved: u64,
    ooms: u64,
    entries: usize,
}

fn truths() -> Vec<Truth> {
    let mut table = csv::Reader::from_path(folder().join("snapshots.csv")).unwrap();
    let headers = table.headers().unwrap().clone();
    let rows = table.records().map(|row| {
        let row = row.unwrap();
        let field = |name: &str| row[headers.iter().position(|header| header == name).unwrap()].to_owned();
        Truth {
            name: field("snapshot"),
            conf: field("alloc_conf"),
            final_allocated: field("final_allocated").parse().unwrap(),
            final_reserved: field("final_reserved").parse().unwrap(),
            ooms: field("ooms").parse().unwrap(),
            entries: field("trace_events").parse().unwrap(),
        }
    });
    rows.collect()
}

/// Runs a check on every recording, on all cores.
fn for_every_recording(check: impl Fn(&Truth, &Path) + Sync) {
    let truths = truths();
    assert_eq!(truths.len(), 72);
    parallel_map(&truths, all_cores(), |truth| check(truth, &folder().join(format!("{}.pickle.xz", truth.name))));
}

#[test]
fn every_recording_agrees_with_pytorchs_own_counters() {
    for_every_recording(|truth, path| {
        let name = &truth.name;
        let recording = Recording::open(path, None, &NoProgress).unwrap_or_else(|error| panic!("{name}: {error}"));
        let gaps = &recording.gaps;
        assert_eq!((gaps.alive_before, gaps.contradictions, gaps.missing.len()), (0, 0, 0), "{name}: {gaps:?}");
        assert!(recording.initial.segments.is_empty(), "{name}");
        assert_eq!(recording.settings.conf(), truth.conf, "{name}");
        assert_eq!(recording.witnessed.len(), truth.entries, "{name}");
        let ooms = recording.witnessed.iter().filter(|entry| entry.action == Action::OutOfMemory).count() as u64;
        assert_eq!(ooms, truth.ooms, "{name}");
        let segments = &recording.final_segments;
        let allocated: u64 = segments.iter().map(|segment| segment.allocated_size()).sum();
        let reserved: u64 = segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!((allocated, reserved), (truth.final_allocated, truth.final_reserved), "{name}");

        let summary = check(&recording.trace).unwrap_or_else(|error| panic!("{name}: {error}"));
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == SnapshotBlockState::Allocated);
        let (count, requested) = live.fold((0, 0), |sum, block| (sum.0 + 1, sum.1 + block.requested_size));
        assert_eq!((summary.live_blocks, summary.live_bytes), (count, requested), "{name}");
        let allocs = recording.witnessed.iter().filter(|entry| entry.action == Action::Alloc).count() as u64;
        assert_eq!(summary.count(OpKind::Alloc), allocs + ooms, "{name}");
    });
}

#[test]
fn snapshot_round_trips() {
    for_every_recording(|truth, path| {
        let snapshot = Snapshot::open(path, &NoProgress).unwrap();
        let mut written = Vec::new();
        snapshot.write(&mut written, &NoProgress).unwrap();
        let again = Snapshot::read(&written[..]).unwrap();
        assert_eq!(again.traces, snapshot.traces, "{}", truth.name);
        assert_eq!(again.segments, snapshot.segments, "{}", truth.name);
        assert_eq!(again.settings, snapshot.settings, "{}", truth.name);
        assert_eq!(again.annotations, snapshot.annotations, "{}", truth.name);
        assert_eq!(again.streams, snapshot.streams, "{}", truth.name);
    });
}

/// The memory at one entry, computed forward from the start of the recording.
#[derive(Default)]
struct Memory {
    /// The request, and whether the block is freed but pending.
    blocks: BTreeMap<Address, (u64, bool)>,
    segments: BTreeMap<Address, u64>,
    mapped: i128,
}

impl Memory {
    fn after(entries: &[TraceEntry]) -> Memory {
        let mut memory = Memory::default();
        for entry in entries {
            match entry.action {
                Action::Alloc => drop(memory.blocks.insert(entry.address, (entry.size, false))),
                Action::FreeRequested => memory.blocks.get_mut(&entry.address).unwrap().1 = true,
                Action::FreeCompleted => drop(memory.blocks.remove(&entry.address)),
                Action::SegmentAlloc => drop(memory.segments.insert(entry.address, entry.size)),
                Action::SegmentFree => drop(memory.segments.remove(&entry.address)),
                Action::SegmentMap => memory.mapped += i128::from(entry.size),
                Action::SegmentUnmap => memory.mapped -= i128::from(entry.size),
                _ => {}
            }
        }
        memory
    }
}

#[test]
fn cut_recording_is_rewound() {
    for_every_recording(|truth, path| {
        let name = &truth.name;
        let mut snapshot = Snapshot::open(path, &NoProgress).unwrap();
        let entries = std::mem::take(&mut snapshot.traces[0]);
        let (lost, kept) = entries.split_at(entries.len() / 2);
        snapshot.traces[0] = kept.to_vec();
        let recording = snapshot.into_recording(name, None, &NoProgress).unwrap();
        assert_eq!(recording.gaps.contradictions, 0, "{name}");
        check(&recording.trace).unwrap_or_else(|error| panic!("{name}: {error}"));

        let there = Memory::after(lost);
        let rewound: BTreeMap<_, _> = recording
            .initial
            .live()
            .map(|(block, _)| (block.address, (block.requested_size, block.state == SnapshotBlockState::PendingFree)))
            .collect();
        assert_eq!(rewound, there.blocks, "{name}");
        assert!(recording.initial.astray.is_empty(), "{name}");
        let (runs, whole): (Vec<_>, Vec<_>) = recording.initial.segments.iter().partition(|segment| segment.expandable);
        let segments: BTreeMap<_, _> = whole.iter().map(|segment| (segment.address, segment.total_size)).collect();
        assert_eq!(segments, there.segments, "{name}");
        let mapped: i128 = runs.iter().map(|run| i128::from(run.total_size)).sum();
        assert_eq!(mapped, there.mapped, "{name}");
        for segment in &recording.initial.segments {
            let sizes: u64 = segment.blocks.iter().map(|block| block.size).sum();
            assert_eq!(sizes, segment.total_size, "{name}: the blocks of {} leave gaps or overlap", segment.address);
        }
    });
}

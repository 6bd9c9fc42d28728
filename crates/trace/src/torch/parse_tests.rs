//! Snapshots of every age and in every state of disrepair.

use proptest::prelude::*;

use super::{
    Action, AnnotationEdge, SegmentKind, Snapshot, SnapshotBlockState, StackId,
    keys::ACTIONS,
    pickle::sample::PlainValue::{self, Bool, Dict, Float, Int, List, Pair, Text},
};
use crate::{MarkKind, Op, check, memory_budget::MemoryBudget};
use oomph_base::{Address, MIB, NoProgress};

fn entry(action: &'static str, address: i128, size: i128) -> PlainValue {
    let place = if action == "oom" { "device_free" } else { "addr" };
    Dict(vec![
        ("action", Text(action)),
        (place, Int(address)),
        ("size", Int(size)),
        ("stream", Int(0)),
        ("time_us", Int(1000)),
    ])
}

fn segment(device: i128, address: i128, size: i128, blocks: Vec<PlainValue>) -> PlainValue {
    Dict(vec![
        ("device", Int(device)),
        ("address", Int(address)),
        ("total_size", Int(size)),
        ("stream", Int(0)),
        ("segment_type", Text("large")),
        ("segment_pool_id", Pair(0, 7)),
        ("is_expandable", Bool(true)),
        ("blocks", List(blocks)),
    ])
}

fn block(address: i128, size: i128, state: &'static str) -> PlainValue {
    let frame = Dict(vec![("filename", Text("a.py")), ("line", Int(3)), ("name", Text("f"))]);
    Dict(vec![
        ("address", Int(address)),
        ("size", Int(size)),
        ("requested_size", Int(size - 1)),
        ("state", Text(state)),
        ("frames", List(vec![frame])),
    ])
}

fn whole(segments: Vec<PlainValue>, traces: Vec<Vec<PlainValue>>) -> PlainValue {
    Dict(vec![
        ("segments", List(segments)),
        ("device_traces", List(traces.into_iter().map(List).collect())),
        ("allocator_settings", Dict(vec![("PYTORCH_CUDA_ALLOC_CONF", Text("x:1")), ("share", Float(0.5))])),
        ("external_annotations", List(vec![])),
    ])
}

fn read(data: &PlainValue) -> Snapshot {
    Snapshot::read(&data.pickle(4)[..]).unwrap()
}

fn complaint(data: &PlainValue) -> String {
    Snapshot::read(&data.pickle(4)[..]).unwrap_err().to_string()
}

#[test]
fn entries_tell_the_release() {
    let release = |more: Vec<(&'static str, PlainValue)>| {
        let Dict(mut items) = entry("alloc", 512, 5) else { panic!("an entry is a dict") };
        items.extend(more);
        read(&whole(vec![], vec![vec![Dict(items)]])).release.to_string()
    };
    let context = || ("compile_context", Text(""));
    assert_eq!(release(vec![]), "2.5 to 2.7, from its top-level keys");
    assert_eq!(release(vec![context()]), "2.8, from its entries");
    assert_eq!(release(vec![context(), ("user_metadata", Text(""))]), "2.10 or 2.11, from its entries");
    let forward = || ("forward_frames", List(vec![]));
    assert_eq!(release(vec![context(), ("user_metadata", Text("")), forward()]), "2.11, from its entries");
    assert_eq!(read(&List(vec![])).release.to_string(), "2.11, assumed");
}

#[test]
fn both_writers_of_pytorch_are_read_alike() {
    let address = i128::from(u64::MAX - 511);
    let data = |address| whole(vec![segment(0, address, 512, vec![])], vec![vec![entry("alloc", address, 5)]]);
    let python = read(&data(address));
    // The C++ writer knows only signed integers.
    let native = Snapshot::read(&data(-512).pickle(2)[..]).unwrap();
    assert_eq!(python.traces, native.traces);
    assert_eq!(python.segments, native.segments);
    assert_eq!(python.traces[0][0].address, Address(u64::MAX - 511));
    assert_eq!(python.segments[0].pool, (0, 7));
    assert_eq!(python.settings.conf(), "x:1");
    assert_eq!(python.missing, [""; 0]);
}

#[test]
fn a_bare_list_of_segments_is_a_snapshot_too() {
    let blocks = vec![block(0x1000, 512, "active_allocated"), block(0x1200, 512, "inactive")];
    let snapshot = read(&List(vec![segment(0, 0x1000, 1024, blocks)]));
    assert_eq!(snapshot.segments[0].blocks[0].state, SnapshotBlockState::Allocated);
    assert_eq!(snapshot.missing, ["a bare list of segments: no history and no settings"]);
    let recording = snapshot.into_recording("bare", None, &NoProgress).unwrap();
    assert_eq!(recording.gaps.alive_before, 1);
    let asked: Vec<u64> = recording
        .trace
        .events
        .iter()
        .filter_map(|event| if let Op::Alloc { bytes, .. } = event.op { Some(bytes) } else { None })
        .collect();
    assert_eq!(asked, [511]);
    check(&recording.trace).unwrap();
}

#[test]
fn very_old_files_are_read_and_their_gaps_are_said() {
    let history = List(vec![Dict(vec![("addr", Int(0)), ("real_size", Int(400)), ("frames", List(vec![]))])]);
    let old = |state| Dict(vec![("size", Int(512)), ("state", Text(state)), ("history", history.clone())]);
    let bare = Dict(vec![("size", Int(512)), ("state", Text("active_awaiting_free"))]);
    let segment = Dict(vec![
        ("address", Int(0x1000)),
        ("total_size", Int(2 << 20)),
        ("blocks", List(vec![old("active_allocated"), bare])),
    ]);
    let snapshot = read(&Dict(vec![("segments", List(vec![segment]))]));
    let [first, second] = snapshot.segments[0].blocks[..] else { panic!("{snapshot:?}") };
    assert_eq!((first.address.0, first.requested_size), (0x1000, 400));
    assert_eq!((second.address.0, second.requested_size, second.state), (0x1200, 512, SnapshotBlockState::PendingFree));
    assert_eq!(snapshot.segments[0].kind, SegmentKind::Small);
    assert_eq!(
        snapshot.missing,
        [
            "no `device_traces`: what happened is unknown",
            "1 segments without `device`: taken as device 0",
            "1 segments without `segment_type`: told by their size",
            "1 segments without `stream`: taken as the default stream",
            "1 live blocks without `requested_size`: taken as their size",
        ]
    );
    assert_eq!(
        snapshot.not_yet,
        [
            "no `allocator_settings`: taken as PyTorch's defaults",
            "no `external_annotations`: steps are not marked",
            "2 blocks without `address`: taken as lying one behind the other",
        ]
    );
    assert_eq!(snapshot.release.to_string(), "2.0, from its segments");
}

#[test]
fn devices_are_kept_apart() {
    let traces = vec![vec![], vec![entry("alloc", 0x1000, 5)], vec![entry("alloc", 0x1000, 6), entry("oom", 99, 7)]];
    let snapshot = read(&whole(vec![segment(3, 0x1000, 512, vec![])], traces));
    assert_eq!(snapshot.devices(), [1, 2, 3]);
    assert_eq!(snapshot.traces.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1, 2]);
    let refusal = snapshot.clone().into_recording("", Some(0), &NoProgress).unwrap_err().to_string();
    assert_eq!(refusal, "nothing of device 0 in this snapshot; it has device 1, 2, 3");
    let second = snapshot.into_recording("", Some(2), &NoProgress).unwrap();
    assert_eq!(second.witnessed[1].device_free(), Some(99));
    assert_eq!(second.witnessed[0].size, 6);
}

#[test]
fn parse_errors_name_their_position() {
    assert_eq!(
        complaint(&Text("hello")),
        "not a PyTorch memory snapshot: the outermost value is a str, not a dict or a list of segments"
    );
    assert_eq!(
        complaint(&Dict(vec![("weights", Int(1))])),
        "not a PyTorch memory snapshot: a dict with neither `segments` nor `device_traces`"
    );
    assert_eq!(
        complaint(&List(vec![Dict(vec![("address", Int(1))])])),
        "not a PyTorch memory snapshot: segments[0]: `total_size` is missing"
    );
    let sizeless = Dict(vec![("action", Text("alloc")), ("addr", Int(1))]);
    assert!(complaint(&whole(vec![], vec![vec![sizeless]])).ends_with("a trace entry (alloc) has no `size`"));
    let negative = entry("alloc", 1, -5);
    assert!(complaint(&whole(vec![], vec![vec![negative]])).ends_with("`size` of a trace entry is an int"));
    let odd = whole(vec![segment(0, 0, 512, vec![block(0, 512, "floating")])], vec![]);
    assert!(complaint(&odd).ends_with("number 0 of the blocks has the unknown state `floating`"));
    assert!(complaint(&whole(vec![], vec![vec![Int(3)]])).ends_with("device_traces[0]: number 0 is not a trace entry"));
}

#[test]
fn an_unknown_action_is_kept_and_said() {
    let snapshot = read(&whole(vec![], vec![vec![entry("alloc", 1, 5), entry("teleport", 1, 5)]]));
    assert_eq!(snapshot.traces[0][1].action, Action::Unknown);
    assert_eq!(snapshot.missing, ["1 entries with the unknown action `teleport`: left out"]);
}

#[test]
fn annotations_become_phases_and_steps() {
    let scope = |stage, time| {
        let name = Text("Optimizer.step#SGD.step");
        Dict(vec![("stage", Text(stage)), ("name", name), ("device", Int(0)), ("time_us", Int(time))])
    };
    let at = |time, address| {
        let Dict(mut keys) = entry("alloc", address, 5) else { unreachable!() };
        keys[4].1 = Int(time);
        Dict(keys)
    };
    let trace = List(vec![at(10, 0x200), at(30, 0x400)]);
    let data = Dict(vec![
        ("device_traces", List(vec![trace])),
        ("external_annotations", List(vec![scope("START", 20), scope("END", 25)])),
    ]);
    let snapshot = read(&data);
    assert_eq!(snapshot.annotations[1].stage, AnnotationEdge::End);
    let trace = snapshot.into_recording("", None, &NoProgress).unwrap().trace;
    let told: Vec<String> = trace
        .events
        .iter()
        .map(|event| match event.op {
            Op::Alloc { .. } => format!("alloc +{}", event.delta_ns),
            Op::Mark { kind: MarkKind::Step, index, .. } => format!("step {index} +{}", event.delta_ns),
            Op::Mark { label, .. } => format!("phase {} +{}", trace.tables.labels()[label as usize], event.delta_ns),
            other => format!("{other:?}"),
        })
        .collect();
    let phase = "phase Optimizer.step#SGD.step +10000";
    assert_eq!(told, ["step 0 +0", "alloc +0", phase, "phase  +5000", "step 1 +5000", "alloc +0"]);
}

#[test]
fn failed_request_and_pending_free_are_read() {
    let trace = vec![
        entry("alloc", 0x1000, 600),
        entry("free_requested", 0x1000, 600),
        entry("oom", 0, 1 << 40),
        entry("free_completed", 0x1000, 600),
        entry("segment_free", 0x1000, i128::from(2 * MIB)),
    ];
    let recording = read(&whole(vec![], vec![trace])).into_recording("", None, &NoProgress).unwrap();
    check(&recording.trace).unwrap();
    let kinds: Vec<_> = recording.trace.events.iter().map(|event| event.op.kind().name()).collect();
    assert_eq!(kinds, ["alloc", "use", "free", "alloc", "free", "empty_cache"]);
    assert_eq!(recording.gaps.streams_guessed, 1);
    assert!(recording.trace.tables.sites().iter().any(crate::failed_when_recorded));
    let without = recording.with_empty_caches(vec![], &NoProgress).unwrap();
    assert_eq!(without.trace.events.len(), 5);
    assert_eq!(without.trace.tables.streams().len(), 2);
}

/// Two lists that refer to one entry: `[[e], [e]]`.
#[test]
fn an_entry_in_two_places_is_refused_rather_than_copied() {
    use super::pickle::opcode as op;
    let Dict(keys) = whole(vec![], vec![]) else { unreachable!() };
    let segments = Dict(keys[..1].to_vec()).pickle(4);
    let entry = entry("alloc", 1, 5).pickle(4);
    let (entry, keys) = (&entry[2..entry.len() - 1], &segments[..segments.len() - 2]);
    let traces = b"\x8c\x0ddevice_traces";
    let twice = [&[op::EMPTY_LIST, op::MARK, op::EMPTY_LIST][..], entry, &[op::LONG_BINPUT, 9, 9, 0, 0, op::APPEND]];
    let again = [op::EMPTY_LIST, op::LONG_BINGET, 9, 9, 0, 0, op::APPEND, op::APPENDS, op::SETITEMS, op::STOP];
    let file = [keys, traces, &twice.concat(), &again].concat();
    let complaint = Snapshot::read(&file[..]).unwrap_err().to_string();
    assert_eq!(complaint, "not a PyTorch memory snapshot: device_traces[1]: number 0 stands in two places");
}

#[test]
fn bytes_after_the_pickle_are_refused() {
    let file = [&whole(vec![], vec![]).pickle(4)[..], b"."].concat();
    let complaint = Snapshot::read(&file[..]).unwrap_err().to_string();
    let place = format!("byte {}: the pickle ends here", file.len() - 1);
    assert!(complaint.starts_with(&place), "{complaint}");
}

#[test]
fn names_in_notes_and_errors_are_escaped() {
    let snapshot = read(&whole(vec![], vec![vec![entry("new\nline", 1, 5)]]));
    assert!(
        snapshot.missing.iter().any(|note| note.contains(r"the unknown action `new\nline`")),
        "{:?}",
        snapshot.missing
    );
    let blocks = vec![block(0x1000, 512, "new\nline")];
    let refusal = complaint(&whole(vec![segment(0, 0x1000, 1024, blocks)], vec![]));
    assert!(refusal.ends_with(r"the unknown state `new\nline`"), "{refusal}");
}

#[test]
fn a_long_name_is_not_repeated_without_bound() {
    use super::pickle::opcode as op;
    let name = "a".repeat(256 << 10);
    let length = (name.len() as u32).to_le_bytes();
    let kept = [&[op::BINUNICODE][..], &length, name.as_bytes(), &[op::LONG_BINPUT, 9, 9, 0, 0, op::POP]].concat();
    // Frames on different lines that share the name.
    let with_frame = |line: u8| {
        let one = segment(0, 0x1000, 1024, vec![]).pickle(4);
        let begin = [&b"\x8c\x06frames"[..], &[op::EMPTY_LIST, op::EMPTY_DICT, op::MARK]].concat();
        let name = [&b"\x8c\x04name"[..], &[op::LONG_BINGET, 9, 9, 0, 0]].concat();
        let line = [&b"\x8c\x04line"[..], &[op::BININT1, line, op::SETITEMS, op::APPEND, op::SETITEM]].concat();
        [&one[2..one.len() - 1], &begin, &name, &line].concat()
    };
    let file = |count: u8| {
        let segments: Vec<u8> = (0..count).flat_map(with_frame).collect();
        [&[op::PROTO, 4][..], &kept, &[op::EMPTY_LIST, op::MARK], &segments, &[op::APPENDS, op::STOP]].concat()
    };
    let budget = MemoryBudget::of(16 << 20);
    assert_eq!(Snapshot::read_within(&file(10)[..], budget).unwrap().stacks.count(), 11);
    let complaint = Snapshot::read_within(&file(100)[..], budget).unwrap_err().to_string();
    assert!(complaint.contains("needs more than 16.0 MiB of memory"), "{complaint}");
}

#[test]
fn a_list_of_blocks_in_two_segments_is_refused_rather_than_copied() {
    use super::pickle::opcode as op;
    let one = segment(0, 0x1000, 1024, vec![block(0x1000, 512, "active_allocated")]).pickle(4);
    let one = &one[2..one.len() - 1];
    let again = [op::LONG_BINPUT, 9, 9, 0, 0, op::LONG_BINGET, 9, 9, 0, 0];
    let file = [&[op::PROTO, 4, op::EMPTY_LIST, op::MARK], one, &again, &[op::APPENDS, op::STOP]].concat();
    let complaint = Snapshot::read(&file[..]).unwrap_err().to_string();
    assert!(complaint.ends_with("segments[1]: its `blocks` are those of another segment"), "{complaint}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_files_are_refused_or_read_but_never_panic(place in 0..4000_usize, byte in any::<u8>(), cut in 0..4000_usize) {
        let blocks = vec![block(0x1000, 512, "active_allocated"), block(0x1200, 512, "inactive")];
        let trace = vec![entry("alloc", 0x1000, 511), entry("free_requested", 0x1000, 5), entry("oom", 1, 5)];
        let intact = whole(vec![segment(0, 0x1000, 1024, blocks)], vec![trace]).pickle(4);
        let (mut file, length) = (intact.clone(), intact.len());
        file[place % length] = byte;
        if let Ok(snapshot) = Snapshot::read_within(&file[..], MemoryBudget::of(16 << 20)) {
            let recording = snapshot.into_recording("damaged", None, &NoProgress).unwrap();
            check(&recording.trace).unwrap();
        }
        prop_assert!(Snapshot::read(&intact[..cut % length]).is_err());
        // Here the damage may be the very byte that ends a pickle.
        let _ = Snapshot::read(&file[..cut % length]);
    }

    #[test]
    fn any_sequence_of_entries_is_readable(
        entries in prop::collection::vec((0..10_usize, 0..6_u64, 0..4_u64, 0..3_u16), 0..60),
    ) {
        let tell = |(action, place, size, stream): (usize, u64, u64, u16)| super::TraceEntry {
            action: ACTIONS.get(action).map_or(Action::Unknown, |known| known.0),
            address: Address(place * MIB),
            size: size * MIB,
            stream: oomph_base::StreamId(stream),
            stack: StackId::NONE,
            ..super::TraceEntry::default()
        };
        let trace = entries.into_iter().map(tell).collect();
        let snapshot = Snapshot { traces: vec![trace], streams: vec![0, 16, 32], ..Snapshot::default() };
        let mut file = Vec::new();
        snapshot.write(&mut file, &NoProgress).unwrap();
        let again = Snapshot::read(&file[..]).unwrap();
        let named = |snapshot: &Snapshot| -> Vec<(Action, Address, u64, u64)> {
            let handle = |stream: oomph_base::StreamId| snapshot.streams[stream.index()];
            snapshot.traces[0].iter().map(|e| (e.action, e.address, e.size, handle(e.stream))).collect()
        };
        prop_assert_eq!(named(&again), named(&snapshot));
        let recording = snapshot.into_recording("any", Some(0), &NoProgress);
        if let Ok(recording) = recording {
            check(&recording.trace).unwrap();
            prop_assert!(recording.initial.segments.is_sorted_by_key(|segment| segment.address));
        }
    }
}

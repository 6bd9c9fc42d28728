//! Snapshots of every release, and what tells their release.

use super::{
    Action, GivenFacts, HostMemory, HostSegment, RecordedRelease, RecordedSettings, Segment, SegmentKind,
    SettingsOrigin, Snapshot, SnapshotBlock, SnapshotBlockState, StackId, TraceEntry,
};
use oomph_base::{Address, MIB, NoProgress, StreamId};
use oomph_pytorch::{AllocatorSettings, Release, ReleaseSpan};

fn block(address: u64, size: u64, requested_size: u64, state: SnapshotBlockState) -> SnapshotBlock {
    SnapshotBlock { address: Address(address), size, requested_size, state, stack: StackId::NONE }
}

/// A program that allocates one block, as a release records it.
fn snapshot(release: Release, conf: &str) -> Snapshot {
    let settings = AllocatorSettings::of_release(release).updated(conf).unwrap();
    let size = settings.round_size(1000);
    let entry = |action, size| TraceEntry { action, address: Address(MIB), size, time_us: 7, ..TraceEntry::default() };
    let blocks = vec![
        block(MIB, size, 1000, SnapshotBlockState::Allocated),
        block(MIB + size, 2 * MIB - size, 0, SnapshotBlockState::Inactive),
    ];
    let segment = Segment {
        device: 0,
        address: Address(MIB),
        total_size: 2 * MIB,
        stream: StreamId::DEFAULT,
        kind: SegmentKind::Small,
        pool: (0, 0),
        expandable: false,
        stack: StackId::NONE,
        blocks,
    };
    let buffer = HostSegment { address: Address(512), size: 4096, state: SnapshotBlockState::Allocated };
    Snapshot {
        segments: vec![segment],
        traces: vec![vec![entry(Action::SegmentAlloc, 2 * MIB), entry(Action::Alloc, 1000)]],
        settings: RecordedSettings::of(&settings, conf),
        host: HostMemory { segments: vec![buffer], entries: vec![entry(Action::Alloc, 4096)] },
        release: RecordedRelease::of(release),
        ..Snapshot::default()
    }
}

fn written(snapshot: &Snapshot) -> Snapshot {
    let mut file = Vec::new();
    snapshot.write(&mut file, &NoProgress).unwrap();
    Snapshot::read(&file[..]).unwrap()
}

/// The releases that cannot be told apart by the keys that every file has.
fn alike(minor: u8) -> (u8, u8) {
    match minor {
        3 | 4 => (3, 4),
        5..=7 => (5, 7),
        10 | 11 => (10, 11),
        14 | 15 => (14, 15),
        other => (other, other),
    }
}

#[test]
fn every_format_is_read_and_tells_its_release() {
    for (minor, release) in (0..).zip(Release::all()) {
        let original = snapshot(release, "");
        let again = written(&original);
        let (first, last) = alike(minor);
        let span = ReleaseSpan { first: Release::new(first), last: Release::new(last) };
        assert_eq!(again.release.span(), span, "{release}");
        assert_eq!(again.release.assumed(), Release::new(last), "{release}");
        assert_eq!(again.segments, original.segments, "{release}");
        assert_eq!(again.missing, [""; 0], "{release}: a key that did not exist yet is no gap");
        assert_eq!(again.settings_from == SettingsOrigin::Unknown, minor <= 2, "{release}");
        assert_eq!(again.host.usage() == original.host.usage(), minor >= 14, "{release}");
        assert_eq!(again.traces[0][1].time_us == 7, minor >= 2, "{release}");
        let recording = again.into_recording("one", None, &NoProgress).unwrap();
        assert_eq!((recording.gaps.alive_before, recording.gaps.contradictions), (0, 0), "{release}");
    }
}

#[test]
fn settings_and_sizes_tell_more() {
    let release = |minor, conf: &str| written(&snapshot(Release::new(minor), conf)).release.to_string();
    assert_eq!(release(11, "large_segment_size_mb:32"), "2.11, from its settings");
    assert_eq!(release(4, "roundup_power2_divisions:[64:0,>:2]"), "2.4, from its settings");
    assert_eq!(release(3, "roundup_power2_divisions:1"), "2.3, from its top-level keys");
    assert_eq!(release(4, "roundup_power2_divisions:1"), "2.3 or 2.4, from its top-level keys");
    assert_eq!(release(13, ""), "2.13, from its settings");
}

#[test]
fn told_release_must_fit_the_keys() {
    let tell = |minor, told| {
        let given = GivenFacts { release: Some(Release::new(told)), ..GivenFacts::default() };
        written(&snapshot(Release::new(minor), "")).with_given(&given)
    };
    assert_eq!(tell(4, 3).unwrap().release.to_string(), "2.3, as told");
    let refusal = |minor, told| tell(minor, told).unwrap_err().to_string();
    let too_old = refusal(12, 11);
    assert!(
        too_old.contains("2.11 did not write it: its entries have `pool_id`, which exists since 2.12"),
        "{too_old}"
    );
    let too_new = refusal(12, 13);
    assert!(too_new.contains("its settings have no `max_round_threshold`, which exists since 2.13"), "{too_new}");
    assert!(too_new.ends_with("give one that fits: 2.12"), "{too_new}");
}

#[test]
fn settings_are_given_where_the_file_has_none() {
    let give = |minor, settings: &str| {
        let given = GivenFacts { settings: Some(settings.to_owned()), ..GivenFacts::default() };
        written(&snapshot(Release::new(minor), "max_split_size_mb:64")).with_given(&given)
    };
    let old = give(2, "max_split_size_mb:64").unwrap();
    assert_eq!(old.settings_from, SettingsOrigin::Given);
    assert_eq!(old.settings.in_force(Release::new(2)).unwrap().max_split_size, 64 * MIB);
    let refusal = give(2, "large_segment_size_mb:32").unwrap_err().to_string();
    assert!(refusal.contains("PyTorch 2.2 has no setting 'large_segment_size_mb'"), "{refusal}");
    assert_eq!(give(8, " max_split_size_mb:64").unwrap().settings_from, SettingsOrigin::File);
    let refusal = give(8, "max_split_size_mb:65").unwrap_err().to_string();
    assert!(refusal.contains("'max_split_size_mb:64', not 'max_split_size_mb:65'"), "{refusal}");
}

#[test]
fn mapped_memory_tells_a_setting_that_is_not_recorded() {
    let mut mapped = snapshot(Release::new(2), "");
    mapped.traces[0][0].action = Action::SegmentMap;
    mapped.segments[0].expandable = true;
    let settings = written(&mapped).settings.in_force(Release::new(2)).unwrap();
    assert!(settings.expandable_segments);
}

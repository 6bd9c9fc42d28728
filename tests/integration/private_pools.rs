//! Recordings with private pools (CUDA graphs, `torch.cuda.MemPool`) and with settings that change on the way: they are
//! reproduced, and replayed with pools kept apart.

use std::path::Path;

use oomph::{
    base::NoProgress,
    device::{
        Device,
        sim::{SimConfig, SimDevice},
    },
    replay::{
        Replay,
        verify::{Counters, Verdict, Verification, verify_with_limit},
    },
    strategy::Setup,
    trace::{
        Op, Trace,
        torch::{Action, Recording, Segment},
    },
};

fn recording(name: &str) -> Recording {
    let path = format!("workloads/recorded/pools/{name}.pickle.xz");
    Recording::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), None, &NoProgress).unwrap()
}

/// Verified as a user does, without anything that the file does not contain.
fn verified(recording: &Recording, counters: &Counters) -> Verification {
    let device = SimDevice::new(SimConfig::default()).unwrap();
    verify_with_limit(recording, &Setup { props: device.props(), limit: None }, counters, &NoProgress)
}

/// PyTorch's own peaks, which the files do not contain.
fn peaks(allocated: u64, reserved: u64) -> Counters {
    Counters { peak_allocated: Some(allocated), peak_reserved: Some(reserved), ..Counters::default() }
}

/// The requests, with the pools that verification found.
fn requests(recording: Recording) -> Trace {
    let found = verified(&recording, &Counters::default());
    let recording = recording.with_pools(found.pools.requests, &found.pools.segments);
    recording.with_empty_caches(found.empty_caches, &NoProgress).unwrap().trace
}

#[test]
fn private_pools_are_reproduced() {
    for (name, counters, private) in [
        ("graphed", peaks(2_217_802_240, 6_098_518_016), 352),
        ("graphed.exp", peaks(2_205_088_256, 3_238_002_688), 352),
        ("mempool", peaks(3_415_218_176, 3_762_290_688), 24),
        ("graphed.middle", Counters::default(), 0),
    ] {
        let verification = verified(&recording(name), &counters);
        assert_eq!(verification.verdict, Verdict::Exact, "{name}");
        assert_eq!(verification.pools.evidence.private, private, "{name}");
    }
}

/// 8 of the 12 segments of the pool were released before the end; every request in them follows from the decisions.
#[test]
fn a_deleted_pool_is_inferred() {
    let evidence = verified(&recording("mempool"), &Counters::default()).pools;
    assert_eq!((evidence.evidence.inferred, evidence.evidence.either), (20, 0));
    let [release] = evidence.requests.releases[..] else { panic!("{:?}", evidence.requests.releases) };
    assert_eq!((release.pool, release.trims), ((0, 1), true));
}

/// Recordings of 2.13, whose entries have their pool. In the first, a deleted pool waits for the events of its own blocks
/// only. In the second, pools without users are released in the order of PyTorch's hash table, which pools that kept their
/// memory were in. In the third, requests fail during captures, where nothing is released for them.
#[test]
fn known_pools_are_released_as_in_pytorch() {
    for (name, ooms) in [("waiting_pool.2.13", 0), ("table_order.2.13", 0), ("capture_oom.2.13", 1)] {
        let recording = recording(name);
        let verification = verified(&recording, &Counters::default());
        assert_eq!(verification.verdict, Verdict::Exact, "{name}");
        assert_eq!(verification.pools.evidence.known, requests_of(&recording), "{name}");
        assert!(verification.stats.ooms >= ooms, "{name}");
        assert!(ooms > 0 || !verification.pools.requests.releases.is_empty(), "{name}");
    }
}

/// How many requests succeeded.
fn requests_of(recording: &Recording) -> usize {
    recording.witnessed.iter().filter(|entry| entry.action == Action::Alloc).count()
}

/// A recording whose segments name other pools than the program used is not exact.
#[test]
fn wrong_pools_are_found() {
    let mut wrong = recording("graphed");
    let of_graph = |segment: &&mut Segment| segment.pool != (0, 0);
    wrong.final_segments.iter_mut().filter(of_graph).for_each(|segment| segment.pool = (0, 0));
    assert_ne!(verified(&wrong, &Counters::default()).verdict, Verdict::Exact);
}

/// The memory of the graph's pool is not used by other requests, under any setting and in any strategy.
#[test]
fn replays_keep_pools_apart() {
    let graphed = requests(recording("graphed"));
    let peak = |trace: &Trace, strategy: &str| Replay::new(trace).strategy(strategy).run().unwrap().stats.peak.reserved;
    assert_eq!(peak(&graphed, "caching:expandable_segments:True"), 3_238_002_688, "as on the GPU");
    let mut together = graphed.clone();
    together.events.retain(|event| !matches!(event.op, Op::UsePool { .. } | Op::ReleasePool { .. }));
    for strategy in ["caching", "pool", "oomph"] {
        assert!(peak(&graphed, strategy) > peak(&together, strategy), "{strategy}");
    }
}

#[test]
fn changed_settings_are_found() {
    let verification = verified(&recording("settings_change"), &peaks(4_986_639_360, 15_325_986_816));
    assert_eq!(verification.verdict, Verdict::Exact);
    let [first, second] = &verification.settings[..] else { panic!("{:?}", verification.settings) };
    assert_eq!(second.change_from(&first.settings), "max_split_size_mb none -> 64");
    assert_eq!((first.entry, second.entry), (0, 7277));
}

/// The rounding of the end has other divisions for each size; the program started without.
#[test]
fn changed_rounding_is_found() {
    let verification = verified(&recording("roundup_change.2.13"), &Counters::default());
    assert_eq!(verification.verdict, Verdict::Exact);
    let [first, second] = &verification.settings[..] else { panic!("{:?}", verification.settings) };
    let change = second.change_from(&first.settings);
    assert!(change.starts_with("roundup_power2_divisions [0, 0, 0") && change.contains("-> [8, 8, 8"), "{change}");
    assert!((330..=336).contains(&second.entry), "{}: it was 335", second.entry);
}

//! Worked examples, written from the description of GMLake: which step serves a request, where, and
//! what it takes.
//!
//! Addresses are those of the simulated device: reserved ranges follow each other in steps of 32
//! MiB.

use super::{ENTRY, Stitch, StitchSettings};
use crate::device::{
    CallKind, Device,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Outcome, Request, Setup, Strategy, StrategyEvent, test_device::simulated,
    wrap::CheckedStrategy,
};
use oomph_base::{Address, GIB, KIB, MIB, SiteId, StreamId, ThreadId};

const STREAM: StreamId = StreamId::DEFAULT;
/// Where the device begins to reserve addresses.
const FIRST: u64 = 0x3_0200_0000;

/// A checked strategy, its device and its events.
struct StitchBench {
    stitch: CheckedStrategy<Stitch>,
    device: Box<dyn Device>,
    events: Vec<StrategyEvent>,
}

impl StitchBench {
    fn new(parameters: &str, capacity: u64) -> StitchBench {
        StitchBench::on(simulated(capacity), parameters)
    }

    fn on(device: Box<dyn Device>, parameters: &str) -> StitchBench {
        let settings = StitchSettings::read(parameters).unwrap();
        let stitch = CheckedStrategy::new(Stitch::new(settings, &Setup { props: device.props(), limit: None }));
        StitchBench { stitch, device, events: Vec::new() }
    }

    fn try_alloc(&mut self, bytes: u64) -> Attempt {
        let request = Request { bytes, stream: STREAM, thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: &mut *self.device, sink: &mut self.events };
        let attempt = self.stitch.alloc(&mut cx, &request).unwrap();
        self.stitch.audit();
        assert_eq!(self.stitch.violations(), []);
        attempt
    }

    fn alloc(&mut self, bytes: u64) -> (Block, Outcome) {
        match self.try_alloc(bytes) {
            Attempt::Served(block, outcome) => (block, outcome),
            Attempt::OutOfMemory(shortage) => panic!("{bytes} bytes: {shortage:?}"),
        }
    }

    fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut *self.device, sink: &mut self.events };
        self.stitch.free(&mut cx, block, Caller::default()).unwrap();
        self.stitch.audit();
        assert_eq!(self.stitch.violations(), []);
    }

    /// Free segments of these sizes, in the order in which they were made.
    fn with_free_segments<const N: usize>(&mut self, sizes: [u64; N]) -> [Block; N] {
        let blocks = sizes.map(|bytes| self.alloc(bytes).0);
        blocks.iter().for_each(|&block| self.free(block));
        blocks
    }

    /// Bytes of the segments taken since the last look.
    fn taken(&mut self) -> Vec<u64> {
        let taken = self.events.drain(..).filter_map(|event| match event {
            StrategyEvent::SegmentAlloc { bytes, .. } | StrategyEvent::SegmentMap { bytes, .. } => Some(bytes),
            _ => None,
        });
        taken.collect()
    }

    fn reserved(&self) -> u64 {
        self.stitch.stats().current.reserved
    }

    fn count(&self, name: &str) -> u64 {
        let found = self.stitch.details().into_iter().find(|(counter, _)| *counter == name);
        found.unwrap().1
    }
}

fn mib(address: Address) -> u64 {
    (address.0 - FIRST) / MIB
}

#[test]
fn segments_grow_by_the_size_of_the_request() {
    let mut bench = StitchBench::new("", 4096 * MIB);
    let steps = [
        (1, 512, vec![2 * MIB]),
        (MIB, MIB, vec![]),
        (MIB + 1, 2 * MIB, vec![20 * MIB]),
        (9 * MIB, 10 * MIB, vec![]),
        (9 * MIB, 10 * MIB, vec![10 * MIB]),
        (7 * MIB, 8 * MIB, vec![]),
        (8 * MIB, 8 * MIB, vec![20 * MIB]),
        (13 * MIB, 14 * MIB, vec![14 * MIB]),
        (700 * MIB + 1, 702 * MIB, vec![702 * MIB]),
    ];
    for (bytes, size, taken) in steps {
        let (block, _) = bench.alloc(bytes);
        assert_eq!((block.size, bench.taken()), (size, taken), "{bytes} bytes");
    }
    assert_eq!(bench.device.ledger().of(CallKind::MemCreate).count, 10 + 5 + 10 + 7 + 351, "one a chunk");
    assert_eq!(bench.device.ledger().of(CallKind::MemAlloc).count, 1);
}

#[test]
fn exact_tiles_come_before_larger_ones() {
    let mut bench = StitchBench::new("", 4096 * MIB);
    let [wide, exact] = bench.with_free_segments([64 * MIB, 32 * MIB]);
    let (block, outcome) = bench.alloc(31 * MIB);
    assert_eq!((block.address, block.size, outcome), (exact.address, 32 * MIB, Outcome::Hit));
    let (block, outcome) = bench.alloc(62 * MIB);
    assert_eq!((block.address, block.size, outcome), (wide.address, 62 * MIB, Outcome::Split));
    let (rest, outcome) = bench.alloc(2 * MIB);
    assert_eq!((rest.address, outcome), (wide.address.offset(62 * MIB), Outcome::Hit), "2 MiB are left to be had");
}

#[test]
fn tiles_are_stitched_from_the_largest_down() {
    let mut bench = StitchBench::new("", 4096 * MIB);
    let [largest, second, third] = bench.with_free_segments([600 * MIB, 400 * MIB, 100 * MIB]);
    assert_eq!([largest, second, third].map(|block| mib(block.address)), [0, 608, 608 + 416]);
    let reserved = bench.reserved();
    let (stitched, outcome) = bench.alloc(900 * MIB);
    assert_eq!((mib(stitched.address), stitched.size, outcome), (608 + 416 + 128, 900 * MIB, Outcome::Split));
    assert_eq!((bench.reserved(), bench.count("ranges_stitched")), (reserved, 1), "no new memory");
    let (tail, _) = bench.alloc(100 * MIB);
    assert_eq!(tail.address, second.address.offset(300 * MIB), "best fit: the lowest of its like");
    let alias = bench.stitch.layout().unwrap().segments.into_iter().find(|segment| segment.alias).unwrap();
    assert_eq!((alias.address, alias.bytes), (stitched.address, 900 * MIB));
}

#[test]
fn a_range_serves_again_while_all_of_its_memory_is_free() {
    let mut bench = StitchBench::new("", 4096 * MIB);
    let [first, _] = bench.with_free_segments([600 * MIB, 400 * MIB]);
    let (range, _) = bench.alloc(1000 * MIB);
    bench.free(range);
    bench.taken();

    let (inside, outcome) = bench.alloc(600 * MIB);
    assert_eq!((inside.address, outcome), (first.address, Outcome::Hit), "a tile comes before a range");
    let (other, _) = bench.alloc(1000 * MIB);
    assert_eq!(bench.taken(), [1000 * MIB], "the range is broken: part of it is in use");
    bench.free(inside);

    let (again, outcome) = bench.alloc(700 * MIB);
    assert_eq!((again.address, again.size, outcome), (range.address, 1000 * MIB, Outcome::Hit), "whole, not cut");
    assert_eq!((bench.taken(), bench.count("ranges_reused"), bench.count("ranges_stitched")), (vec![], 1, 1));
    assert_ne!(again.address, other.address);
}

#[test]
fn a_range_much_larger_than_the_request_is_not_used() {
    for (parameters, stitched, size) in [("reuseLimit:1", 2, 800), ("reuseLimit:2", 1, 1000)] {
        let mut bench = StitchBench::new(parameters, 4096 * MIB);
        bench.with_free_segments([600 * MIB, 400 * MIB]);
        let (range, _) = bench.alloc(1000 * MIB);
        bench.free(range);
        let (block, _) = bench.alloc(800 * MIB);
        assert_eq!((bench.count("ranges_stitched"), block.size), (stitched, size * MIB), "{parameters}");
    }
}

#[test]
fn requests_below_the_limit_are_not_stitched_for() {
    for (parameters, stitched) in [("", 0), ("fragLimit:128MiB", 1), ("vmmDefragment:0,fragLimit:128MiB", 0)] {
        let mut bench = StitchBench::new(parameters, 4096 * MIB);
        bench.with_free_segments([64 * MIB, 64 * MIB]);
        bench.alloc(128 * MIB);
        assert_eq!(bench.count("ranges_stitched"), stitched, "{parameters}");
        assert_eq!(bench.reserved(), (256 - 128 * stitched) * MIB, "{parameters}");
    }
}

#[test]
fn stitching_begins_at_the_level() {
    for (level, reserved) in [(0, 128), (1, 256), (2, 256)] {
        let mut bench = StitchBench::new(&format!("fragLimit:64MiB,defragLevel:{level}"), 4096 * MIB);
        bench.with_free_segments([64 * MIB, 64 * MIB]);
        bench.alloc(128 * MIB);
        assert_eq!(bench.reserved(), reserved * MIB, "level {level}: there is new memory");
    }
    let cases = [(0, 0, Outcome::Split), (1, 0, Outcome::Split), (2, 1, Outcome::ReleaseAndRetry)];
    for (level, retries, outcome) in cases {
        let mut bench = full_of_two_tiles(&format!("fragLimit:64MiB,defragLevel:{level}"));
        assert_eq!(bench.alloc(128 * MIB).1, outcome, "level {level}");
        assert_eq!(bench.stitch.stats().retries, retries, "level {level}");
    }
    let refused = StitchSettings::read("defragLevel:9").unwrap_err().to_string();
    assert_eq!(refused, "strategy 'stitch': 'defragLevel': 9 is not 0, 1 or 2");
    let mut bench = full_of_two_tiles("fragLimit:64MiB,vmmDefragment:0");
    assert!(matches!(bench.try_alloc(128 * MIB), Attempt::OutOfMemory(_)));
}

/// A full device with two free tiles of 64 MiB, each in a segment of which 2 MiB are in use.
fn full_of_two_tiles(parameters: &str) -> StitchBench {
    let mut bench = StitchBench::new(parameters, 132 * MIB);
    bench.with_free_segments([66 * MIB, 66 * MIB]);
    let rests = [0, 1].map(|_| {
        bench.alloc(2 * MIB);
        bench.alloc(64 * MIB).0
    });
    rests.into_iter().for_each(|rest| bench.free(rest));
    assert_eq!((bench.reserved(), bench.device.free_bytes()), (132 * MIB, 0));
    bench
}

#[test]
fn with_re_alloc_only_the_shortfall_is_taken() {
    let mut bench = StitchBench::new("fragLimit:64MiB,reAlloc:1", 4096 * MIB);
    bench.with_free_segments([64 * MIB, 32 * MIB]);
    bench.taken();
    let (block, outcome) = bench.alloc(128 * MIB);
    assert_eq!((block.size, outcome, bench.taken()), (128 * MIB, Outcome::NewSegment, vec![32 * MIB]));
    assert_eq!((bench.reserved(), bench.count("ranges_stitched")), (128 * MIB, 1));
}

#[test]
fn unused_ranges_are_collected() {
    let mut bench = StitchBench::new("fragLimit:64MiB,autoGC:0", 4096 * MIB);
    bench.with_free_segments([64 * MIB, 64 * MIB]);
    let (first, _) = bench.alloc(128 * MIB);
    assert_eq!(bench.count("range_bytes"), 128 * MIB, "what is in use stays");
    bench.free(first);
    let (half, _) = bench.alloc(64 * MIB);
    bench.with_free_segments([66 * MIB]);
    bench.alloc(128 * MIB);
    assert_eq!((bench.count("ranges_collected"), bench.count("range_bytes")), (1, 128 * MIB));
    bench.free(half);
}

#[test]
fn a_refused_mapping_gives_unused_ranges_back() {
    // Segments and ranges alike reserve addresses: the fifth time is that of the second range.
    let plan = FaultPlan::none().fail_nth(Some(CallKind::AddressReserve), 5, CallFailure::OutOfMemory);
    let device = Box::new(FaultyDevice::with(plan, simulated(4096 * MIB)));
    let mut bench = StitchBench::on(device, "fragLimit:64MiB");
    bench.with_free_segments([64 * MIB, 64 * MIB]);
    let (range, _) = bench.alloc(128 * MIB);
    bench.free(range);
    let (_half, _) = bench.alloc(64 * MIB);
    bench.with_free_segments([66 * MIB]);
    let (block, outcome) = bench.alloc(130 * MIB);
    assert_eq!((block.size, outcome, bench.reserved()), (130 * MIB, Outcome::Split, 194 * MIB));
    assert_eq!((bench.count("ranges_stitched"), bench.count("ranges_collected")), (2, 1), "the broken one went");
}

#[test]
fn small_requests_are_cut_from_segments_of_two_mebibytes() {
    let mut bench = StitchBench::new("", 64 * MIB);
    let (first, _) = bench.alloc(100 * KIB);
    let (second, outcome) = bench.alloc(1);
    assert_eq!((second.address, second.size, outcome), (first.address.offset(100 * KIB), 512, Outcome::Split));
}

#[test]
fn the_registry_shows_every_threshold() {
    let names: Vec<&str> = ENTRY.parameters.iter().map(|parameter| parameter.name).collect();
    assert_eq!(names, ["vmmDefragment", "fragLimit", "reuseLimit", "defragLevel", "autoGC", "reAlloc"]);
}

#[test]
fn parameters_have_the_names_of_gmlake() {
    let read = StitchSettings::read("fragLimit:268435456,reuseLimit:2, defragLevel:1,autoGC:80,reAlloc:1").unwrap();
    let expected = StitchSettings {
        fragment_limit: 256 * MIB,
        reuse_limit: 2,
        level: 1,
        collect_above: 80 * GIB,
        takes_shortfall: true,
        ..StitchSettings::read("").unwrap()
    };
    assert_eq!(read, expected);
    assert!(!StitchSettings::read("vmmDefragment:0").unwrap().defragments);
}

#[test]
fn mistakes_are_explained() {
    let refused = |text: &str| StitchSettings::read(text).unwrap_err().to_string();
    assert!(refused("fragLimits:1").contains("did you mean 'fragLimit'?"));
    assert!(refused("reAlloc:2").contains("'reAlloc': 2 is not 0 or 1"));
}

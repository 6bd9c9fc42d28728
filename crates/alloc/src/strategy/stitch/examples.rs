//! Worked examples, written from the description of GMLake: which step serves a request, where, and what it takes.
//!
//! Addresses are those of the simulated device: reserved ranges follow each other in steps of 32 MiB.

use super::{ENTRY, Stitch, settings::Settings};
use crate::device::{
    CallKind, Device,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Outcome, Request, Setup, Strategy, StrategyEvent, test_device::simulated,
    wrap::Checked,
};
use oomph_base::{Address, KIB, MIB, SiteId, StreamId, ThreadId};

const STREAM: StreamId = StreamId::DEFAULT;
/// Where the device begins to reserve addresses.
const FIRST: u64 = 0x3_0200_0000;

/// A strategy under watch, its device and its events.
struct Desk {
    stitch: Checked<Stitch>,
    device: Box<dyn Device>,
    events: Vec<StrategyEvent>,
}

impl Desk {
    fn new(parameters: &str, capacity: u64) -> Desk {
        Desk::on(simulated(capacity), parameters)
    }

    fn on(device: Box<dyn Device>, parameters: &str) -> Desk {
        let settings = Settings::read(parameters).unwrap();
        let stitch = Checked::new(Stitch::new(settings, &Setup { props: device.props(), limit: None }));
        Desk { stitch, device, events: Vec::new() }
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
    let mut desk = Desk::new("", 4096 * MIB);
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
        let (block, _) = desk.alloc(bytes);
        assert_eq!((block.size, desk.taken()), (size, taken), "{bytes} bytes");
    }
    assert_eq!(desk.device.ledger().of(CallKind::MemCreate).count, 10 + 5 + 10 + 7 + 351, "one a chunk");
    assert_eq!(desk.device.ledger().of(CallKind::MemAlloc).count, 1);
}

#[test]
fn an_exact_tile_comes_before_a_larger_one_and_a_larger_one_is_cut() {
    let mut desk = Desk::new("", 4096 * MIB);
    let [wide, exact] = desk.with_free_segments([64 * MIB, 32 * MIB]);
    let (block, outcome) = desk.alloc(31 * MIB);
    assert_eq!((block.address, block.size, outcome), (exact.address, 32 * MIB, Outcome::Hit));
    let (block, outcome) = desk.alloc(62 * MIB);
    assert_eq!((block.address, block.size, outcome), (wide.address, 62 * MIB, Outcome::Split));
    let (rest, outcome) = desk.alloc(2 * MIB);
    assert_eq!((rest.address, outcome), (wide.address.offset(62 * MIB), Outcome::Hit), "2 MiB are left to be had");
}

#[test]
fn tiles_are_stitched_from_the_largest_down_and_the_last_is_cut() {
    let mut desk = Desk::new("", 4096 * MIB);
    let [largest, second, third] = desk.with_free_segments([600 * MIB, 400 * MIB, 100 * MIB]);
    assert_eq!([largest, second, third].map(|block| mib(block.address)), [0, 608, 608 + 416]);
    let reserved = desk.reserved();
    let (stitched, outcome) = desk.alloc(900 * MIB);
    assert_eq!((mib(stitched.address), stitched.size, outcome), (608 + 416 + 128, 900 * MIB, Outcome::Split));
    assert_eq!((desk.reserved(), desk.count("ranges_stitched")), (reserved, 1), "no new memory");
    let (tail, _) = desk.alloc(100 * MIB);
    assert_eq!(tail.address, second.address.offset(300 * MIB), "best fit: the lowest of its like");
    let alias = desk.stitch.layout().unwrap().segments.into_iter().find(|segment| segment.alias).unwrap();
    assert_eq!((alias.address, alias.bytes), (stitched.address, 900 * MIB));
}

#[test]
fn a_range_serves_again_while_all_of_its_memory_is_free() {
    let mut desk = Desk::new("", 4096 * MIB);
    let [first, _] = desk.with_free_segments([600 * MIB, 400 * MIB]);
    let (range, _) = desk.alloc(1000 * MIB);
    desk.free(range);
    desk.taken();

    let (inside, outcome) = desk.alloc(600 * MIB);
    assert_eq!((inside.address, outcome), (first.address, Outcome::Hit), "a tile comes before a range");
    let (other, _) = desk.alloc(1000 * MIB);
    assert_eq!(desk.taken(), [1000 * MIB], "the range is broken: part of it is in use");
    desk.free(inside);

    let (again, outcome) = desk.alloc(700 * MIB);
    assert_eq!((again.address, again.size, outcome), (range.address, 1000 * MIB, Outcome::Hit), "whole, not cut");
    assert_eq!((desk.taken(), desk.count("ranges_reused"), desk.count("ranges_stitched")), (vec![], 1, 1));
    assert_ne!(again.address, other.address);
}

#[test]
fn a_range_far_larger_than_the_request_is_left_alone() {
    for (parameters, stitched, size) in [("reuseLimit:1", 2, 800), ("reuseLimit:2", 1, 1000)] {
        let mut desk = Desk::new(parameters, 4096 * MIB);
        desk.with_free_segments([600 * MIB, 400 * MIB]);
        let (range, _) = desk.alloc(1000 * MIB);
        desk.free(range);
        let (block, _) = desk.alloc(800 * MIB);
        assert_eq!((desk.count("ranges_stitched"), block.size), (stitched, size * MIB), "{parameters}");
    }
}

#[test]
fn requests_below_the_limit_are_not_stitched_for() {
    for (parameters, stitched) in [("", 0), ("fragLimit:128MiB", 1), ("vmmDefragment:0,fragLimit:128MiB", 0)] {
        let mut desk = Desk::new(parameters, 4096 * MIB);
        desk.with_free_segments([64 * MIB, 64 * MIB]);
        desk.alloc(128 * MIB);
        assert_eq!(desk.count("ranges_stitched"), stitched, "{parameters}");
        assert_eq!(desk.reserved(), (256 - 128 * stitched) * MIB, "{parameters}");
    }
}

#[test]
fn the_level_says_how_great_the_need_must_be() {
    for (level, reserved) in [(0, 128), (1, 256), (2, 256)] {
        let mut desk = Desk::new(&format!("fragLimit:64MiB,defragLevel:{level}"), 4096 * MIB);
        desk.with_free_segments([64 * MIB, 64 * MIB]);
        desk.alloc(128 * MIB);
        assert_eq!(desk.reserved(), reserved * MIB, "level {level}: there is new memory");
    }
    let cases = [(0, 0, Outcome::Split), (1, 0, Outcome::Split), (2, 1, Outcome::ReleaseAndRetry)];
    for (level, retries, outcome) in cases {
        let mut desk = full_of_two_tiles(&format!("fragLimit:64MiB,defragLevel:{level}"));
        assert_eq!(desk.alloc(128 * MIB).1, outcome, "level {level}");
        assert_eq!(desk.stitch.stats().retries, retries, "level {level}");
    }
    let mut desk = full_of_two_tiles("fragLimit:64MiB,defragLevel:3");
    assert!(matches!(desk.try_alloc(128 * MIB), Attempt::OutOfMemory(_)));
}

/// A full device with two free tiles of 64 MiB, each in a segment of which 2 MiB are in use.
fn full_of_two_tiles(parameters: &str) -> Desk {
    let mut desk = Desk::new(parameters, 132 * MIB);
    desk.with_free_segments([66 * MIB, 66 * MIB]);
    let rests = [0, 1].map(|_| {
        desk.alloc(2 * MIB);
        desk.alloc(64 * MIB).0
    });
    rests.into_iter().for_each(|rest| desk.free(rest));
    assert_eq!((desk.reserved(), desk.device.free_bytes()), (132 * MIB, 0));
    desk
}

#[test]
fn with_re_alloc_only_the_shortfall_is_taken() {
    let mut desk = Desk::new("fragLimit:64MiB,reAlloc:1", 4096 * MIB);
    desk.with_free_segments([64 * MIB, 32 * MIB]);
    desk.taken();
    let (block, outcome) = desk.alloc(128 * MIB);
    assert_eq!((block.size, outcome, desk.taken()), (128 * MIB, Outcome::NewSegment, vec![32 * MIB]));
    assert_eq!((desk.reserved(), desk.count("ranges_stitched")), (128 * MIB, 1));
}

#[test]
fn too_many_addresses_of_ranges_are_collected() {
    let mut desk = Desk::new("fragLimit:64MiB,autoGC:0", 4096 * MIB);
    desk.with_free_segments([64 * MIB, 64 * MIB]);
    let (first, _) = desk.alloc(128 * MIB);
    assert_eq!(desk.count("range_bytes"), 128 * MIB, "what is in use stays");
    desk.free(first);
    let (half, _) = desk.alloc(64 * MIB);
    desk.with_free_segments([66 * MIB]);
    desk.alloc(128 * MIB);
    assert_eq!((desk.count("ranges_collected"), desk.count("range_bytes")), (1, 128 * MIB));
    desk.free(half);
}

#[test]
fn where_no_range_can_be_mapped_unused_ones_are_given_back() {
    // Segments and ranges alike reserve addresses: the fifth time is that of the second range.
    let plan = FaultPlan::none().fail_nth(Some(CallKind::AddressReserve), 5, CallFailure::OutOfMemory);
    let device = Box::new(FaultyDevice::with(plan, simulated(4096 * MIB)));
    let mut desk = Desk::on(device, "fragLimit:64MiB");
    desk.with_free_segments([64 * MIB, 64 * MIB]);
    let (range, _) = desk.alloc(128 * MIB);
    desk.free(range);
    let (_half, _) = desk.alloc(64 * MIB);
    desk.with_free_segments([66 * MIB]);
    let (block, outcome) = desk.alloc(130 * MIB);
    assert_eq!((block.size, outcome, desk.reserved()), (130 * MIB, Outcome::Split, 194 * MIB));
    assert_eq!((desk.count("ranges_stitched"), desk.count("ranges_collected")), (2, 1), "the broken one went");
}

#[test]
fn small_requests_are_cut_from_segments_of_two_mebibytes() {
    let mut desk = Desk::new("", 64 * MIB);
    let (first, _) = desk.alloc(100 * KIB);
    let (second, outcome) = desk.alloc(1);
    assert_eq!((second.address, second.size, outcome), (first.address.offset(100 * KIB), 512, Outcome::Split));
}

#[test]
fn the_registry_shows_every_threshold() {
    let names: Vec<&str> = ENTRY.parameters.iter().map(|parameter| parameter.name).collect();
    assert_eq!(names, ["vmmDefragment", "fragLimit", "reuseLimit", "defragLevel", "autoGC", "reAlloc"]);
}

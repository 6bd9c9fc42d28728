//! Stories about the allocator as a whole, on a simulated device.

use super::{super::test_device::simulated, *};
use crate::device::{CallKind, Device};
use crate::strategy::Silent;
use oomph_base::{MIB, SiteId, ThreadId};

/// An allocator with its device.
struct Stage {
    strategy: Oomph,
    device: Box<dyn Device>,
}

impl Stage {
    fn new(settings: Settings) -> Stage {
        let mut device = simulated(1024 * MIB);
        device.stream_create(1).unwrap();
        let strategy = Oomph::new(settings, &Setup { props: device.props(), limit: None });
        Stage { strategy, device }
    }

    fn attempt(&mut self, bytes: u64, stream: u16) -> Attempt {
        let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
        self.strategy.alloc(&mut Context { device: &mut *self.device, sink: &mut Silent }, &request).unwrap()
    }

    fn alloc(&mut self, bytes: u64, stream: u16) -> Block {
        match self.attempt(bytes, stream) {
            Attempt::Served(block, _) => block,
            other => panic!("{bytes} bytes: {other:?}"),
        }
    }

    fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        assert_eq!(self.strategy.free(&mut cx, block, Caller::default()).unwrap(), Freed::Now);
    }

    fn calls(&self, kind: CallKind) -> u64 {
        self.device.ledger().of(kind).count
    }

    fn reserved(&self) -> u64 {
        self.strategy.stats().current.reserved
    }
}

/// Every chunk is a page, and no byte is reserved that could be moved.
fn by_pages() -> Settings {
    in_chunks_of(2 * MIB)
}

fn in_chunks_of(bytes: u64) -> Settings {
    let settings = Settings { smallest_chunk: bytes, largest_chunk: bytes, growth_step: bytes, ..Settings::default() };
    Settings { slack_permille: 0, ..settings }
}

#[test]
fn free_pages_in_many_places_serve_one_large_request_without_growth() {
    let mut stage = Stage::new(by_pages());
    let blocks: Vec<Block> = (0..20).map(|_| stage.alloc(4 * MIB, 0)).collect();
    for block in blocks.iter().step_by(2) {
        stage.free(*block);
    }
    let before = stage.reserved();
    assert_eq!(before, 80 * MIB);
    let large = stage.alloc(40 * MIB, 0);
    assert_eq!((large.size, stage.reserved()), (40 * MIB, before));
    assert_eq!(stage.strategy.counters.chunks_moved, 20);
    assert_eq!(stage.calls(CallKind::MemUnmap), 10, "one call for each place");
    assert_eq!(stage.calls(CallKind::MemCreate), 40, "and no new memory");
}

#[test]
fn only_what_is_missing_is_new() {
    let mut stage = Stage::new(by_pages());
    let first = stage.alloc(6 * MIB, 0);
    let wall = stage.alloc(2 * MIB, 0);
    stage.free(first);
    stage.alloc(10 * MIB, 0);
    assert_eq!(stage.reserved(), 12 * MIB);
    assert_eq!(wall.size, 2 * MIB);
}

#[test]
fn chunks_in_use_stay_where_they_are() {
    let mut stage = Stage::new(in_chunks_of(8 * MIB));
    stage.alloc(8 * MIB, 0);
    // Two blocks share a chunk: with one of them free, it cannot be moved.
    let blocks: Vec<Block> = (0..4).map(|_| stage.alloc(4 * MIB, 0)).collect();
    stage.free(blocks[0]);
    stage.free(blocks[2]);
    stage.alloc(8 * MIB, 0);
    assert_eq!((stage.strategy.counters.moves, stage.reserved()), (0, 32 * MIB));
    // With both free it can, and only the rest is new.
    stage.free(blocks[1]);
    stage.alloc(16 * MIB, 0);
    assert_eq!((stage.strategy.counters.chunks_moved, stage.reserved()), (1, 40 * MIB));
}

#[test]
fn within_the_slack_memory_grows_rather_than_waits() {
    let grown_to = |slack_permille: u64| {
        let mut stage = Stage::new(Settings { slack_permille, ..by_pages() });
        stage.alloc(200 * MIB, 0);
        let blocks: Vec<Block> = (0..4).map(|_| stage.alloc(2 * MIB, 0)).collect();
        stage.free(blocks[0]);
        stage.free(blocks[2]);
        stage.alloc(4 * MIB, 0);
        (stage.reserved() / MIB, stage.strategy.counters.moves)
    };
    assert_eq!(grown_to(0), (208, 1));
    assert_eq!(grown_to(50), (212, 0));
}

#[test]
fn memory_of_one_stream_serves_another_with_one_event() {
    let mut stage = Stage::new(Settings::default());
    let block = stage.alloc(30 * MIB, 0);
    stage.free(block);
    let before = stage.reserved();
    let other = stage.alloc(30 * MIB, 1);
    assert_eq!((other.address, stage.reserved()), (block.address, before));
    let events = [CallKind::EventRecord, CallKind::StreamWaitEvent].map(|kind| stage.calls(kind));
    assert_eq!(events, [1, 1]);
    assert_eq!(stage.calls(CallKind::StreamSynchronize), 0, "the host does not wait");
    assert_eq!(stage.strategy.counters.blocks_taken_over, 1);
}

#[test]
fn neighbours_of_several_streams_are_joined() {
    let mut stage = Stage::new(by_pages());
    let blocks = [0, 1, 0].map(|stream| stage.alloc(4 * MIB, stream));
    for block in blocks {
        stage.free(block);
    }
    let joined = stage.alloc(12 * MIB, 1);
    assert_eq!((joined.address, stage.reserved()), (blocks[0].address, 12 * MIB));
}

#[test]
fn an_empty_slab_serves_large_requests_again() {
    let mut stage = Stage::new(Settings::default());
    let small: Vec<Block> = (0..100).map(|_| stage.alloc(20_000, 0)).collect();
    let before = stage.reserved();
    for block in small {
        stage.free(block);
    }
    stage.alloc(2 * MIB, 0);
    assert_eq!(stage.reserved(), before);
    assert_eq!(stage.strategy.counters.slabs_returned, 1);
}

#[test]
fn a_program_that_needs_little_gets_little() {
    let mut stage = Stage::new(Settings::default());
    stage.alloc(512, 0);
    assert_eq!(stage.reserved(), 2 * MIB);
    stage.alloc(64 * MIB, 0);
    assert_eq!(stage.reserved(), 66 * MIB);
}

#[test]
fn in_need_small_requests_are_served_from_what_is_left() {
    let mut stage = Stage::new(by_pages());
    stage.alloc(1023 * MIB, 0);
    // There is one MiB in the last page, too little for a slab.
    let Attempt::Served(block, outcome) = stage.attempt(512, 0) else { panic!("half a page is free") };
    assert_eq!((block.size, outcome), (512, Outcome::Split));
    assert!(matches!(stage.attempt(2 * MIB, 0), Attempt::OutOfMemory(_)));
}

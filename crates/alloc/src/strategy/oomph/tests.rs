//! Tests of the whole allocator on a simulated device.

use std::{
    array,
    ops::Range,
    sync::{Arc, Mutex},
};

use super::{super::test_device::simulated, *};
use crate::device::{
    CallKind, Device,
    wrap::{DriverAnswer, DriverCall, DriverReply, InterceptedDevice, Interceptor},
};
use crate::strategy::Silent;
use oomph_base::{EventId, GIB, MIB, SiteId, ThreadId};

/// The streams of a bench.
const STREAMS: usize = 3;

/// For each stream, how many of its frees have happened before.
type FreesBefore = [usize; STREAMS];

/// What runs before what: each free is the last use of its block, by work of its stream.
#[derive(Debug, Default)]
struct WorkOrder {
    /// What all later work of each stream comes after.
    streams: [FreesBefore; STREAMS],
    events: BTreeMap<EventId, FreesBefore>,
    /// The streams that use each live block, by address; the first is its own.
    live: BTreeMap<u64, Vec<usize>>,
    /// Freed memory, its stream, and the number of the free among that stream's.
    freed: Vec<(Range<u64>, usize, usize)>,
    host: FreesBefore,
    queries: u64,
}

impl WorkOrder {
    fn join(to: &mut FreesBefore, other: &FreesBefore) {
        to.iter_mut().zip(other).for_each(|(mine, other)| *mine = (*mine).max(*other));
    }

    /// The host waits, and whatever it queues later comes after that, too.
    fn host_waits(&mut self, before: FreesBefore) {
        WorkOrder::join(&mut self.host, &before);
        let host = self.host;
        self.streams.iter_mut().for_each(|stream| WorkOrder::join(stream, &host));
    }

    /// Memory is used by work that comes after `before`: all earlier uses must have happened by then.
    fn use_memory(&mut self, range: &Range<u64>, before: &FreesBefore) {
        for (freed, stream, free) in &self.freed {
            let overlaps = freed.start < range.end && range.start < freed.end;
            assert!(!overlaps || before[*stream] >= *free, "{range:?} is still used by stream {stream}");
        }
        self.freed.retain(|(freed, ..)| freed.start < range.start || range.end < freed.end);
    }

    fn allocate(&mut self, block: &Block, stream: usize) {
        let before = self.streams[stream];
        self.use_memory(&(block.address.0..block.address.0 + block.size), &before);
        self.live.insert(block.address.0, vec![stream]);
    }

    /// Returns whether other streams used the block, too.
    fn free(&mut self, block: &Block) -> bool {
        let users = self.live.remove(&block.address.0).unwrap();
        for &stream in &users {
            self.streams[stream][stream] += 1;
            self.freed.push((block.address.0..block.address.0 + block.size, stream, self.streams[stream][stream]));
        }
        users.len() > 1
    }
}

impl Interceptor for Arc<Mutex<WorkOrder>> {
    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, _: &D) {
        let order = &mut *self.lock().unwrap();
        let at = |stream: StreamId| usize::from(stream.0);
        match *call {
            DriverCall::EventRecord { event, stream } => {
                order.events.insert(event, order.streams[at(stream)]);
            }
            DriverCall::StreamWaitEvent { stream, event } => {
                WorkOrder::join(&mut order.streams[at(stream)], &order.events[&event]);
            }
            // Every second time, the work is still running.
            DriverCall::EventQuery { event } => {
                order.queries += 1;
                if order.queries.is_multiple_of(2) {
                    *answer = Ok(DriverReply::Ready(false));
                } else {
                    order.host_waits(order.events[&event]);
                }
            }
            DriverCall::StreamSynchronize { stream } => order.host_waits(order.streams[at(stream)]),
            DriverCall::EventSynchronize { event } => order.host_waits(order.events[&event]),
            DriverCall::Synchronize {} => array::from_fn::<_, STREAMS, _>(|stream| order.streams[stream])
                .into_iter()
                .for_each(|stream| order.host_waits(stream)),
            DriverCall::Unmap { address, bytes } => {
                let before = order.host;
                order.use_memory(&(address.0..address.0 + bytes), &before);
            }
            _ => {}
        }
    }
}

/// An allocator with its device. Every test sees that memory is used again only after work that used it before.
pub(super) struct OomphBench {
    pub(super) strategy: OomphAllocator,
    pub(super) device: Box<dyn Device>,
    order: Arc<Mutex<WorkOrder>>,
}

impl OomphBench {
    pub(super) fn new(settings: OomphSettings) -> OomphBench {
        OomphBench::on(64 * GIB, settings)
    }

    fn on(device_bytes: u64, settings: OomphSettings) -> OomphBench {
        let order: Arc<Mutex<WorkOrder>> = Arc::default();
        let mut device: Box<dyn Device> = Box::new(InterceptedDevice::new(simulated(device_bytes), order.clone()));
        (1..STREAMS as u64).for_each(|stream| assert!(device.stream_create(stream).is_ok()));
        let props = device.props();
        let strategy = OomphAllocator::new(settings, props.total_bytes, props.granularity_bytes);
        OomphBench { strategy, device, order }
    }

    fn attempt(&mut self, bytes: u64, stream: u16) -> Attempt {
        let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
        let attempt = self.strategy.alloc(&mut Context { device: &mut *self.device, sink: &mut Silent }, &request);
        let attempt = attempt.unwrap();
        if let Attempt::Served(block, _) = &attempt {
            self.order.lock().unwrap().allocate(block, stream.into());
        }
        attempt
    }

    pub(super) fn alloc(&mut self, bytes: u64, stream: u16) -> Block {
        match self.attempt(bytes, stream) {
            Attempt::Served(block, _) => block,
            other => panic!("{bytes} bytes: {other:?}"),
        }
    }

    pub(super) fn free(&mut self, block: Block) {
        // The work that uses the block was queued before.
        let is_shared = self.order.lock().unwrap().free(&block);
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        let freed = self.strategy.free(&mut cx, block, Caller::default()).unwrap();
        assert!(is_shared || freed == Freed::Now);
    }

    /// The block is used on another stream as well.
    fn use_on(&mut self, block: &Block, stream: u16) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        self.strategy.used_on(&mut cx, block, StreamId(stream)).unwrap();
        self.order.lock().unwrap().live.get_mut(&block.address.0).unwrap().push(stream.into());
    }

    fn calls(&self, kind: CallKind) -> u64 {
        self.device.ledger().of(kind).count
    }

    pub(super) fn reserved(&self) -> u64 {
        self.strategy.stats().current.reserved
    }
}

/// Every chunk is a page, and no byte is reserved that could be moved.
fn by_pages() -> OomphSettings {
    in_chunks_of(2 * MIB)
}

pub(super) fn in_chunks_of(bytes: u64) -> OomphSettings {
    let settings = OomphSettings {
        smallest_chunk: bytes,
        largest_chunk: bytes,
        growth_step: bytes,
        ..OomphSettings::read("").unwrap()
    };
    OomphSettings { slack_permille: 0, ..settings }
}

#[test]
fn scattered_free_pages_serve_one_large_request() {
    let mut bench = OomphBench::new(by_pages());
    let blocks: Vec<Block> = (0..20).map(|_| bench.alloc(4 * MIB, 0)).collect();
    for block in blocks.iter().step_by(2) {
        bench.free(*block);
    }
    let before = bench.reserved();
    assert_eq!(before, 80 * MIB);
    let large = bench.alloc(40 * MIB, 0);
    assert_eq!((large.size, bench.reserved()), (40 * MIB, before));
    assert_eq!(bench.strategy.counters.chunks_moved, 20);
    assert_eq!(bench.calls(CallKind::MemUnmap), 10, "one call for each place");
    assert_eq!(bench.calls(CallKind::MemCreate), 40, "and no new memory");
}

#[test]
fn only_what_is_missing_is_new() {
    let mut bench = OomphBench::new(by_pages());
    let first = bench.alloc(6 * MIB, 0);
    let wall = bench.alloc(2 * MIB, 0);
    bench.free(first);
    bench.alloc(10 * MIB, 0);
    assert_eq!(bench.reserved(), 12 * MIB);
    assert_eq!(wall.size, 2 * MIB);
}

#[test]
fn chunks_in_use_stay_where_they_are() {
    let mut bench = OomphBench::new(in_chunks_of(8 * MIB));
    bench.alloc(8 * MIB, 0);
    let chunks = [0; 2].map(|_| bench.alloc(8 * MIB, 0));
    chunks.into_iter().for_each(|block| bench.free(block));
    // Two blocks share a chunk: with one of them free, it cannot be moved.
    let blocks: Vec<Block> = (0..4).map(|_| bench.alloc(4 * MIB, 0)).collect();
    bench.free(blocks[0]);
    bench.free(blocks[2]);
    bench.alloc(8 * MIB, 0);
    assert_eq!((bench.strategy.counters.moves, bench.reserved()), (0, 32 * MIB));
    // With both free it can, and only the rest is new.
    bench.free(blocks[1]);
    bench.alloc(16 * MIB, 0);
    assert_eq!((bench.strategy.counters.chunks_moved, bench.reserved()), (1, 40 * MIB));
}

#[test]
fn memory_grows_within_the_slack() {
    let grown_to = |slack_permille: u64| {
        let mut bench = OomphBench::new(OomphSettings { slack_permille, ..by_pages() });
        bench.alloc(200 * MIB, 0);
        let blocks: Vec<Block> = (0..4).map(|_| bench.alloc(2 * MIB, 0)).collect();
        bench.free(blocks[0]);
        bench.free(blocks[2]);
        bench.alloc(4 * MIB, 0);
        (bench.reserved() / MIB, bench.strategy.counters.moves)
    };
    assert_eq!(grown_to(0), (208, 1));
    assert_eq!(grown_to(50), (212, 0));
}

#[test]
fn memory_of_one_stream_serves_another_with_one_event() {
    let mut bench = OomphBench::new(OomphSettings::read("").unwrap());
    let block = bench.alloc(30 * MIB, 0);
    bench.free(block);
    let before = bench.reserved();
    let other = bench.alloc(30 * MIB, 1);
    assert_eq!((other.address, bench.reserved()), (block.address, before));
    let events = [CallKind::EventRecord, CallKind::StreamWaitEvent].map(|kind| bench.calls(kind));
    assert_eq!(events, [1, 1]);
    assert_eq!(bench.calls(CallKind::StreamSynchronize), 0, "the host does not wait");
    assert_eq!(bench.strategy.counters.blocks_taken_over, 1);
}

#[test]
fn neighbours_of_several_streams_are_joined() {
    let mut bench = OomphBench::new(by_pages());
    let blocks = [0, 1, 0].map(|stream| bench.alloc(4 * MIB, stream));
    for block in blocks {
        bench.free(block);
    }
    let joined = bench.alloc(12 * MIB, 1);
    assert_eq!((joined.address, bench.reserved()), (blocks[0].address, 12 * MIB));
}

#[test]
fn an_empty_slab_serves_large_requests_again() {
    let mut bench = OomphBench::new(OomphSettings::read("").unwrap());
    let small: Vec<Block> = (0..100).map(|_| bench.alloc(20_000, 0)).collect();
    let before = bench.reserved();
    for block in small {
        bench.free(block);
    }
    bench.alloc(2 * MIB, 0);
    assert_eq!(bench.reserved(), before);
    assert_eq!(bench.strategy.counters.slabs_returned, 1);
}

#[test]
fn small_programs_reserve_little() {
    let mut bench = OomphBench::new(OomphSettings::read("").unwrap());
    bench.alloc(512, 0);
    assert_eq!(bench.reserved(), 2 * MIB);
    bench.alloc(64 * MIB, 0);
    assert_eq!(bench.reserved(), 66 * MIB);
}

#[test]
fn small_requests_use_the_last_page() {
    let mut bench = OomphBench::on(GIB, by_pages());
    bench.alloc(1023 * MIB, 0);
    // There is one MiB in the last page, too little for a slab.
    let Attempt::Served(block, outcome) = bench.attempt(512, 0) else { panic!("half a page is free") };
    assert_eq!((block.size, outcome), (512, Outcome::Split));
    assert!(matches!(bench.attempt(2 * MIB, 0), Attempt::OutOfMemory(_)));
}

#[test]
fn a_request_that_cannot_fit_takes_no_memory_first() {
    let mut bench = OomphBench::new(OomphSettings::read("").unwrap());
    bench.alloc(40 * GIB, 0);
    let before = bench.device.calls().count;
    assert!(matches!(bench.attempt(30 * GIB, 0), Attempt::OutOfMemory(_)));
    let mut cx = Context { device: &mut *bench.device, sink: &mut Silent };
    bench.strategy.control(&mut cx, &Control::Fraction(0.65)).unwrap();
    assert!(matches!(bench.attempt(3 * GIB, 0), Attempt::OutOfMemory(_)));
    assert_eq!(bench.device.calls().count, before);
    bench.alloc(GIB, 0);
}

#[test]
fn memory_that_other_processes_have_is_tried_for_once() {
    let mut bench = OomphBench::new(OomphSettings::read("").unwrap());
    bench.device.alloc(30 * GIB).unwrap();
    assert!(matches!(bench.attempt(40 * GIB, 0), Attempt::OutOfMemory(_)));
    let created = bench.calls(CallKind::MemCreate);
    assert_eq!(created, 34 * GIB / (40 * MIB) + 1, "the last one is refused");
    assert_eq!((bench.calls(CallKind::MemRelease), bench.device.free_bytes()), (created - 1, 34 * GIB));
}

#[test]
fn bad_settings_are_explained() {
    let refused = |parameters: &str| {
        let spec = crate::strategy::StrategySpec { name: "oomph".to_owned(), parameters: parameters.to_owned() };
        spec.check().map_err(|error| error.to_string()).unwrap_err()
    };
    for (text, reason) in [
        ("slab", "not of the form key:value"),
        ("grow_step:2MiB", "did you mean 'growth_step'"),
        ("growth_step:two", "not an amount of memory"),
        ("growth_step:0", "not a multiple of 512"),
        ("smallest_chunk:1000", "not a multiple of 512"),
        ("slack_permille:2000000", "more than 1000000"),
        ("slab:100KiB", "does not fit into a slab"),
        ("largest_chunk:2MiB", "less than 'smallest_chunk'"),
    ] {
        let refusal = refused(text);
        assert!(refusal.contains(reason), "{refusal}");
    }
}

#[test]
fn chunks_follow_the_growth_within_their_limits() {
    let settings =
        OomphSettings { smallest_chunk: 2 * MIB, largest_chunk: 16 * MIB, ..OomphSettings::read("").unwrap() };
    let chunk = |mib: u64| settings.chunk_for(mib * MIB, 2 * MIB) / MIB;
    assert_eq!([1, 33, 100, 1000].map(chunk), [2, 4, 8, 16]);
}

/// What is lost in chunks that are partly in use decides whether a program completes, so chunks are small where memory is.
#[test]
fn chunks_are_small_in_small_programs_and_under_small_limits() {
    let chunks = |device_gib: u64| {
        let mut bench = OomphBench::on(device_gib * GIB, OomphSettings::read("").unwrap());
        [100, 3900, 200].map(|mebibytes| {
            let before = bench.calls(CallKind::MemCreate);
            bench.alloc(mebibytes * MIB, 0);
            bench.calls(CallKind::MemCreate) - before
        })
    };
    assert_eq!(chunks(128), [7, 98, 5], "16 MiB each, then 40 MiB");
    assert_eq!(chunks(8), [13, 488, 25], "8 MiB each");
}

/// A request of a step: its size in MiB, its stream, and how many requests of the step later its block is freed.
type StepRequest = (u64, u16, usize);

impl OomphBench {
    /// Runs a step and returns the blocks that it leaves. No two live blocks overlap.
    fn step(&mut self, script: &[StepRequest], kept: &mut Vec<(usize, Block)>) {
        self.step_with_users(script, kept, |_| None);
    }

    /// The same, where some blocks are used on another stream, by number of the request.
    fn step_with_users(
        &mut self,
        script: &[StepRequest],
        kept: &mut Vec<(usize, Block)>,
        user: impl Fn(usize) -> Option<u16>,
    ) {
        for (number, &(mebibytes, stream, lives)) in script.iter().enumerate() {
            let due = |&(end, _): &(usize, Block)| end <= number;
            for place in (0..kept.len()).rev() {
                if due(&kept[place]) {
                    let (_, block) = kept.swap_remove(place);
                    self.free(block);
                }
            }
            let block = self.alloc(mebibytes * MIB, stream);
            let (start, end) = (block.address.0, block.address.0 + block.size);
            assert!(kept.iter().all(|(_, other)| other.address.0 + other.size <= start || end <= other.address.0));
            if let Some(other) = user(number).filter(|&other| other != stream) {
                self.use_on(&block, other);
            }
            kept.push((number + lives, block));
        }
        for (end, _) in kept {
            *end = end.saturating_sub(script.len());
        }
    }

    fn driver_calls(&self) -> u64 {
        self.device.ledger().total().count
    }
}

/// A step in which chunks are moved every time if requests are placed as they come (found by random search).
const SCATTERED: [StepRequest; 12] = [
    (10, 0, 5),
    (20, 0, 7),
    (60, 0, 2),
    (10, 0, 7),
    (90, 0, 6),
    (10, 0, 3),
    (30, 0, 6),
    (90, 0, 4),
    (30, 0, 1),
    (120, 0, 2),
    (120, 0, 2),
    (10, 0, 6),
];

#[test]
fn a_repeated_step_is_placed_together_and_makes_no_driver_call() {
    let mut bench = OomphBench::new(in_chunks_of(10 * MIB));
    let mut kept = Vec::new();
    for _ in 0..8 {
        bench.step(&SCATTERED, &mut kept);
    }
    assert_eq!(bench.strategy.counters.steps_planned, 1, "{:?}", bench.strategy.counters);
    let (calls, reserved) = (bench.driver_calls(), bench.reserved());
    for _ in 0..20 {
        bench.step(&SCATTERED, &mut kept);
    }
    assert_eq!((bench.driver_calls(), bench.reserved()), (calls, reserved));
    let live = bench.strategy.stats().peak.active;
    assert!(reserved <= live + live / 20, "{reserved} bytes for {live}");
}

#[test]
fn another_program_gets_the_memory_of_a_plan() {
    let mut bench = OomphBench::new(in_chunks_of(10 * MIB));
    let mut kept = Vec::new();
    for _ in 0..10 {
        bench.step(&SCATTERED, &mut kept);
    }
    let reserved = bench.reserved();
    kept.drain(..).for_each(|(_, block)| bench.free(block));
    // Requests that no step had: the plan is given up before memory grows.
    let blocks: Vec<Block> = (0..reserved / MIB / 25).map(|_| bench.alloc(25 * MIB, 0)).collect();
    assert_eq!((bench.strategy.counters.plans_given_up, bench.reserved()), (1, reserved));
    blocks.into_iter().for_each(|block| bench.free(block));
    bench.strategy.trim(&mut Context { device: &mut *bench.device, sink: &mut Silent }).unwrap();
    assert_eq!(bench.reserved(), 0);
}

/// The same step on two streams, after it was planned.
fn planned_on_two_streams() -> (OomphBench, Vec<StepRequest>, Vec<(usize, Block)>) {
    let on_stream =
        |(place, &(mebibytes, _, lives)): (usize, &StepRequest)| (mebibytes, u16::from(place % 3 == 2), lives);
    let script: Vec<StepRequest> = SCATTERED.iter().enumerate().map(on_stream).collect();
    let (mut bench, mut kept) = (OomphBench::new(in_chunks_of(10 * MIB)), Vec::new());
    for _ in 0..8 {
        bench.step(&script, &mut kept);
    }
    assert_eq!(bench.strategy.counters.steps_planned, 1, "{:?}", bench.strategy.counters);
    (bench, script, kept)
}

/// What one stream frees serves another in the same plan only after it has waited.
#[test]
fn streams_of_a_plan_wait_where_they_share_memory() {
    let (mut bench, script, mut kept) = planned_on_two_streams();
    let kinds = [CallKind::EventRecord, CallKind::StreamWaitEvent, CallKind::MemMap];
    let before = kinds.map(|kind| bench.calls(kind));
    bench.step(&script, &mut kept);
    let after = kinds.map(|kind| bench.calls(kind));
    let [records, waits, maps] = [0, 1, 2].map(|kind| after[kind] - before[kind]);
    assert!(records > 0 && waits == records && maps == 0, "{records} events, {waits} waits, {maps} mappings");
}

/// Where most blocks are used on another stream, the next request at their place waits on the GPU: no memory is mapped, and the host
/// does not wait.
#[test]
fn blocks_that_other_streams_use_have_places_in_a_plan() {
    let (mut bench, mut kept) = (OomphBench::new(in_chunks_of(10 * MIB)), Vec::new());
    let user = |number: usize| (!number.is_multiple_of(4)).then_some(1);
    for _ in 0..8 {
        bench.step_with_users(&SCATTERED, &mut kept, user);
    }
    let planned = |bench: &OomphBench| (bench.strategy.is_placed, bench.strategy.counters.steps_planned);
    let plans = planned(&bench);
    assert!(plans.0, "{:?}", bench.strategy.counters);
    let kinds = [CallKind::StreamWaitEvent, CallKind::MemMap, CallKind::EventSynchronize, CallKind::EventCreate];
    let before = kinds.map(|kind| bench.calls(kind));
    let reserved = bench.reserved();
    for _ in 0..10 {
        bench.step_with_users(&SCATTERED, &mut kept, user);
    }
    let after = kinds.map(|kind| bench.calls(kind));
    assert!(after[0] > before[0], "{after:?}");
    assert_eq!((&after[1..], bench.reserved(), planned(&bench)), (&before[1..], reserved, plans));
}

/// Two streams that use each other's blocks have one memory: each waits for what used its place before.
#[test]
fn streams_of_a_plan_share_memory_of_blocks_that_both_use() {
    let script = SCATTERED.map(|(mebibytes, _, lives)| (mebibytes, 0, lives));
    let on_two: Vec<StepRequest> = script.iter().zip(0..).map(|(&(size, _, lives), n)| (size, n % 2, lives)).collect();
    let reserved = |script: &[StepRequest]| {
        let (mut bench, mut kept) = (OomphBench::new(in_chunks_of(10 * MIB)), Vec::new());
        for _ in 0..12 {
            bench.step_with_users(script, &mut kept, |number| Some(u16::from(number % 4 < 2)));
        }
        assert!(bench.strategy.is_placed, "{:?}", bench.strategy.counters);
        let maps = bench.calls(CallKind::MemMap);
        bench.step_with_users(script, &mut kept, |number| Some(u16::from(number % 4 < 2)));
        assert_eq!(bench.calls(CallKind::MemMap), maps);
        bench.reserved()
    };
    let (alone, together) = (reserved(&script), reserved(&on_two));
    assert!(together <= alone + alone / 20, "{together} bytes for two streams, {alone} for one");
}

/// Caches of a few requests, to which a token is added in each step. Each request is slightly larger than the block that is freed next, and
/// free memory between the caches that serves none of them is moved.
#[test]
fn caches_that_grow_stay_close_to_live() {
    for (chunk, part) in [(8 * MIB, 8), (2 * MIB, 20)] {
        let mut bench = OomphBench::new(OomphSettings { slack_permille: 0, ..in_chunks_of(chunk) });
        let cache = |bench: &mut OomphBench, tokens: u64| bench.alloc(tokens * 32 * 1024, 0);
        let mut caches: Vec<(u64, Block)> =
            (0..60).map(|number| 300 + number / 20 * 220).map(|tokens| (tokens, cache(&mut bench, tokens))).collect();
        for _ in 0..120 {
            for (tokens, block) in &mut caches {
                *tokens += 1;
                let grown = cache(&mut bench, *tokens);
                bench.free(std::mem::replace(block, grown));
            }
        }
        let (live, reserved) = (bench.strategy.stats().peak.active, bench.reserved());
        assert!(reserved <= live + live / part, "{reserved} bytes for {live} in chunks of {chunk}");
    }
}

/// In a capture no stream can be waited for, so memory that streams share serves all requests before.
#[test]
fn a_capture_ends_a_plan_of_several_streams() {
    let (mut bench, _, kept) = planned_on_two_streams();
    let control = |bench: &mut OomphBench, command| {
        bench.strategy.control(&mut Context { device: &mut *bench.device, sink: &mut Silent }, &command).unwrap();
    };
    control(&mut bench, Control::CaptureBegin);
    assert_eq!(bench.strategy.counters.plans_given_up, 1);
    let waits = bench.calls(CallKind::StreamWaitEvent);
    let blocks: Vec<Block> = (0..4).map(|_| bench.alloc(30 * MIB, 0)).collect();
    assert_eq!(bench.calls(CallKind::StreamWaitEvent), waits);
    control(&mut bench, Control::CaptureEnd);
    blocks.into_iter().chain(kept.into_iter().map(|(_, block)| block)).for_each(|block| bench.free(block));
}

#[test]
fn nothing_is_left_when_an_allocator_with_a_plan_is_closed() {
    let (mut bench, ..) = planned_on_two_streams();
    bench.strategy.close(&mut Context { device: &mut *bench.device, sink: &mut Silent }).unwrap();
    assert_eq!(bench.device.held_bytes(), 0);
    assert_eq!(bench.calls(CallKind::EventCreate), bench.calls(CallKind::EventDestroy));
}

mod repeated_steps {
    use proptest::prelude::{ProptestConfig, Strategy as _, any, prop, prop_assert_eq, proptest};

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        /// Whatever a program repeats and however it departs from it, live blocks are apart, and all memory goes back.
        #[test]
        fn live_blocks_are_apart_and_all_memory_goes_back(
            script in prop::collection::vec((1u64..24, 0u16..3, 1usize..14), 9..30),
            other in prop::collection::vec((1u64..30, 0u16..3, 1usize..5), 1..12),
            departures in prop::collection::vec(any::<bool>(), 12),
            chunk in 1u64..8,
            streams in 1u16..=3,
            users in prop::sample::select(vec![0.1, 0.7])
                .prop_flat_map(|shared| prop::collection::vec(prop::option::weighted(shared, 0u16..3), 30)),
        ) {
            let on_streams = |requests: Vec<StepRequest>| -> Vec<StepRequest> {
                requests.into_iter().map(|(size, stream, lives)| (size, stream % streams, lives)).collect()
            };
            let (script, other) = (on_streams(script), on_streams(other));
            let mut bench = OomphBench::new(in_chunks_of(2 * chunk * MIB));
            let mut kept = Vec::new();
            for departs in departures {
                bench.step_with_users(&script, &mut kept, |number| users[number]);
                if departs {
                    bench.step(&other, &mut kept);
                }
            }
            let layout = bench.strategy.layout().unwrap();
            let mapped: u64 = layout.segments.iter().map(|segment| segment.bytes).sum();
            prop_assert_eq!(mapped, bench.reserved());
            kept.into_iter().for_each(|(_, block)| bench.free(block));
            bench.strategy.trim(&mut Context { device: &mut *bench.device, sink: &mut Silent }).unwrap();
            prop_assert_eq!(bench.reserved(), 0);
        }
    }
}

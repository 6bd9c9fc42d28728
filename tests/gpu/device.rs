//! The CUDA device and every strategy on a real GPU. Without one, each test prints why it is
//! skipped and passes.
//!
//! On a GPU machine: `cargo test --release --test gpu -- --nocapture --test-threads 1`. All
//! strategies and variants take minutes; `OOMPH_GPU_STRATEGIES=stitch,oomph` runs only the listed
//! ones.

#![cfg(feature = "cuda")]
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use crate::one_gpu::{fill, gpu, wrong_words};
use oomph::{
    base::{GIB, KIB, MIB, Nanos, SiteId, StreamId, ThreadId, Work},
    device::{
        CallKind, Compute, Damage, Device, DeviceClock, PatternPlace, Patterned, Patterns, PinnedHost, VirtualMemory,
        cuda::CudaDevice,
        default_limit,
        wrap::{InterceptedDevice, LimitedDevice, ScriptedDevice, stand_in::CallLog},
    },
    measure::agreement::AgreementFinding,
    strategy::{
        Attempt, Block, Caller, Context, Control, Request, STRATEGIES, Setup, Silent, Strategy, StrategySpec,
        conformance::{ProgramStep, conform_spec, mixed_script},
    },
    stress::{BlockSizes, EnduranceTest, StopCondition, StressBudget, StressTarget},
    suite::{CaseSettings, SuiteFile, compare},
};

const HOME: StreamId = StreamId::DEFAULT;

/// A new device on the same GPU with a capacity of this many bytes.
fn limited(bytes: u64) -> Box<dyn Device> {
    let device: Box<dyn Device> = Box::new(CudaDevice::open(0).unwrap());
    Box::new(LimitedDevice::to(bytes, device))
}

fn every_spec() -> impl Iterator<Item = StrategySpec> {
    let only = std::env::var("OOMPH_GPU_STRATEGIES").ok();
    let chosen = move |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == name));
    STRATEGIES.iter().filter(move |entry| chosen(entry.name)).flat_map(|entry| entry.specs())
}

fn request(bytes: u64, stream: StreamId) -> Request {
    Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) }
}

#[test]
fn pattern_damage_is_counted() {
    let Some((mut device, _guard)) = gpu() else { return };
    let bytes = 3 * MIB;
    let address = device.alloc(bytes).unwrap();
    fill(&mut device, HOME, address, bytes, 7);
    assert_eq!(wrong_words(&mut device, HOME, address, bytes, 7), 0);
    fill(&mut device, HOME, address.offset(MIB), 512, 8);
    assert_eq!(wrong_words(&mut device, HOME, address, bytes, 7), 64, "512 bytes are 64 words");
    assert!(
        device.fill_blocks(HOME, &[Patterned { address: address.offset(bytes), bytes: 512, key: 1 }]).is_err(),
        "memory of another owner must be refused"
    );
    device.free(address).unwrap();
    assert_eq!(device.held_bytes(), 0);
}

#[test]
fn one_launch_checks_many_blocks() {
    let Some((mut device, _guard)) = gpu() else { return };
    let ground = device.alloc(GIB).unwrap();
    let mut place = 0;
    let blocks: Vec<Patterned> = (1..10_000)
        .map(|key| {
            let bytes = if key % 1000 == 0 { 40 * MIB + 3 } else { 1 + u64::from(key) * 7919 % (40 * KIB) };
            let block = Patterned { address: ground.offset(place), bytes, key };
            place = (place + bytes).next_multiple_of(256);
            block
        })
        .collect();
    assert!(place <= GIB, "{place}");
    device.fill_blocks(HOME, &blocks).unwrap();
    device.verify_blocks(HOME, &blocks).unwrap();
    device.synchronize().unwrap();
    let verified = device.verified().unwrap();
    let bytes: u64 = blocks.iter().map(|block| block.bytes).sum();
    assert_eq!((verified.blocks, verified.bytes, verified.damaged), (9_999, bytes, vec![]));

    // Damage the middle of one block and the last byte of another; a third was never filled.
    let (large, small) = (blocks[999], blocks[40]);
    let intruder = Patterned { address: large.address.offset(20 * MIB), bytes: 4096, key: 77_777 };
    device.fill_blocks(HOME, &[intruder]).unwrap();
    device.write(HOME, small.address.offset(small.bytes - 1), &[0x5a; 1]).unwrap();
    let foreign = Patterned { key: 88_888, ..blocks[500] };
    device.verify_blocks(HOME, &[&blocks[..], &[foreign]].concat()).unwrap();
    device.synchronize().unwrap();
    let damaged = device.verified().unwrap().damaged;
    let last_byte = (small.bytes - 1) / 16 * 16..small.bytes;
    assert_eq!(damaged.len(), 3, "{damaged:?}");
    assert!(damaged[0].key == small.key && last_byte.contains(&damaged[0].offset), "{damaged:?}");
    let written = |key, offset| Some(PatternPlace { key, offset });
    assert_eq!(damaged[1], Damage { key: large.key, offset: 20 * MIB, found: written(77_777, 0) });
    assert_eq!(damaged[2], Damage { key: 88_888, offset: 0, found: written(blocks[500].key, 0) });

    device.verify_blocks(HOME, &blocks[100..200]).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.verified().unwrap().damaged, [], "the counters were cleared");
    let beyond = Patterned { address: ground.offset(GIB), bytes: 512, key: 1 };
    assert!(device.fill_blocks(HOME, &[beyond]).is_err(), "memory of another owner must be refused");
    let askew = Patterned { address: ground.offset(8), bytes: 512, key: 1 };
    assert!(device.fill_blocks(HOME, &[askew]).is_err(), "16-byte accesses need 16-byte alignment");
    device.free(ground).unwrap();
}

#[test]
fn patterns_run_at_memory_bandwidth() {
    let Some((mut device, _guard)) = gpu() else { return };
    for (bytes_each, count) in [(GIB, 8), (MIB, 4096), (2 * KIB, 100_000)] {
        let ground = device.alloc(bytes_each * count).unwrap();
        let blocks: Vec<Patterned> = (0..count)
            .map(|number| Patterned {
                address: ground.offset(number * bytes_each),
                bytes: bytes_each,
                key: number as u32 + 1,
            })
            .collect();
        let mut timed = |queue: &dyn Fn(&mut CudaDevice)| {
            queue(&mut device);
            device.synchronize().unwrap();
            let begin = device.now();
            (0..8).for_each(|_| queue(&mut device));
            device.synchronize().unwrap();
            device.now().since(begin).0 as f64 / 8.0
        };
        let fill = timed(&|device| device.fill_blocks(HOME, &blocks).unwrap());
        let verify = timed(&|device| device.verify_blocks(HOME, &blocks).unwrap());
        assert_eq!(device.verified().unwrap().damaged, []);
        let bytes = (bytes_each * count) as f64;
        println!(
            "blocks of {bytes_each} bytes: filled at {:.0} GB/s, compared at {:.0} GB/s, {:.2} million blocks/s",
            bytes / fill,
            bytes / verify,
            count as f64 * 1e3 / verify,
        );
        device.free(ground).unwrap();
    }
}

#[test]
fn work_keeps_block_contents() {
    let Some((mut device, _guard)) = gpu() else { return };
    let bytes = 64 * MIB;
    let operand = [(device.alloc(bytes).unwrap(), bytes)];
    fill(&mut device, HOME, operand[0].0, bytes, 3);
    for work in [
        Work::Elementwise { bytes: GIB },
        Work::Reduction { bytes: GIB },
        Work::CopyOut { bytes, pinned: true },
        Work::CopyOut { bytes: 2 * bytes, pinned: false },
        Work::Spin { nanos: Nanos(1_000) },
    ] {
        device.launch(HOME, &work, &operand).unwrap();
    }
    assert_eq!(wrong_words(&mut device, HOME, operand[0].0, bytes, 3), 0);
    fill(&mut device, HOME, operand[0].0, bytes, 4);
    device.launch(HOME, &Work::CopyIn { bytes, pinned: true }, &operand).unwrap();
    assert!(wrong_words(&mut device, HOME, operand[0].0, bytes, 4) > 0, "a copy overwrites the block");
    // Fake addresses, as `null` hands them out, must not crash the device.
    let imaginary = [(oomph::base::Address(1 << 40), MIB)];
    device.launch(HOME, &Work::Elementwise { bytes: MIB }, &imaginary).unwrap();
    device.synchronize().unwrap();
}

#[test]
fn an_event_is_pending_while_its_stream_spins() {
    let Some((mut device, _guard)) = gpu() else { return };
    let side = device.stream_create(0).unwrap();
    let event = device.event_create().unwrap();
    let nanos = Nanos(50_000_000);
    let begin = device.now();
    device.launch(side, &Work::Spin { nanos }, &[]).unwrap();
    device.event_record(event, side).unwrap();
    assert!(!device.event_query(event).unwrap());
    device.stream_synchronize(HOME).unwrap();
    assert!(!device.event_query(event).unwrap(), "the default stream does not wait for others");
    device.event_synchronize(event).unwrap();
    assert!(device.event_query(event).unwrap());
    assert!(device.now().since(begin) > Nanos(nanos.0 * 99 / 100), "{}", device.now().since(begin));
}

#[test]
fn mapped_pieces_form_one_range() {
    let Some((mut device, _guard)) = gpu() else { return };
    if device.virtual_memory().is_err() {
        println!("skipped: this device has no virtual memory");
        return;
    }
    let piece_bytes = device.props().granularity_bytes;
    let base = device.reserve(4 * piece_bytes).unwrap();
    let pieces: Vec<_> = (0..4).map(|_| device.create(piece_bytes).unwrap()).collect();
    for (place, &piece) in (0..).zip(&pieces) {
        device.map(base.offset(place * piece_bytes), piece_bytes, piece).unwrap();
    }
    device.set_access(base, 4 * piece_bytes).unwrap();
    fill(&mut device, HOME, base, 4 * piece_bytes, 11);
    assert_eq!(wrong_words(&mut device, HOME, base, 4 * piece_bytes, 11), 0);
    for piece in pieces {
        device.release(piece).unwrap();
    }
    assert_eq!(device.held_bytes(), 4 * piece_bytes, "mappings keep the memory");
    assert!(device.unmap(base, piece_bytes / 2).is_err());
    device.unmap(base, 4 * piece_bytes).unwrap();
    device.address_free(base, 4 * piece_bytes).unwrap();
    assert_eq!(device.held_bytes(), 0);
}

#[test]
fn pinned_memory_comes_and_goes() {
    let Some((mut device, _guard)) = gpu() else { return };
    let address = device.host_alloc(MIB).unwrap();
    device.host_free(address).unwrap();
    assert!(device.host_free(address).is_err());
}

#[test]
fn dropped_device_leaves_nothing() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    let before = watcher.memory_info().unwrap().free;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut device = CudaDevice::open(0).unwrap();
        let address = device.alloc(GIB).unwrap();
        fill(&mut device, HOME, address, GIB, 1);
        if let Ok(memory) = device.virtual_memory() {
            let base = memory.reserve(64 * MIB).unwrap();
            let piece = memory.create(64 * MIB).unwrap();
            memory.map(base, 64 * MIB, piece).unwrap();
        }
        if let Ok(pools) = device.stream_ordered_pools() {
            let pool = pools.pool_create(Some(GIB)).unwrap();
            pools.alloc_async(pool, 100 * MIB, HOME).unwrap();
        }
        device.host_alloc(MIB).unwrap();
        device.launch(HOME, &Work::Spin { nanos: Nanos(10_000_000) }, &[]).unwrap();
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    let after = watcher.memory_info().unwrap().free;
    assert!(before.saturating_sub(after) < 64 * MIB, "{before} bytes were free before, {after} after");
}

#[test]
fn oom_is_a_result_and_default_limit_holds() {
    let Some((mut device, _guard)) = gpu() else { return };
    assert_eq!(device.props().clock, DeviceClock::Wall);
    let free = device.memory_info().unwrap().free;
    assert!(default_limit(&device).is_some_and(|limit| limit > free / 10 * 8 && limit < free));
    assert!(device.alloc(free + GIB).unwrap_err().is_out_of_memory());
    assert!(device.alloc(u64::MAX).unwrap_err().is_out_of_memory());
    let address = device.alloc(MIB).unwrap();
    device.free(address).unwrap();
    assert_eq!(device.ledger().of(CallKind::MemAlloc).failures, 2);
}

fn patterned(block: &Block, key: u32) -> Patterned {
    Patterned { address: block.address, bytes: block.size, key }
}

/// Checks that a block holds the pattern of its key.
fn check(device: &mut CudaDevice, spec: &StrategySpec, block: &Block, stream: StreamId, key: u32) {
    device.verify_blocks(stream, &[patterned(block, key)]).unwrap();
    device.stream_synchronize(stream).unwrap();
    assert_eq!(device.verified().unwrap().damaged, [], "{spec}: {block:?}");
}

#[test]
fn blocks_keep_contents_under_every_strategy() {
    let Some((device, _guard)) = gpu() else { return };
    drop(device);
    for spec in every_spec() {
        let mut device = CudaDevice::open(0).unwrap();
        let mut strategy = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
        if strategy.requires().check(device.props()).is_err() {
            println!("{spec}: skipped, the device lacks a feature that it needs");
            continue;
        }
        device.stream_create(0).unwrap();
        let mut held: Vec<(Block, StreamId, u32)> = Vec::new();
        let mut full = false;
        let mut served = 0;
        for key in 1..=400u32 {
            // Every third time, and after every failure, free the oldest block, so that memory is
            // reused in pieces.
            if (key % 3 == 2 || full) && !held.is_empty() {
                let (block, stream, key) = held.remove(0);
                check(&mut device, &spec, &block, stream, key);
                let mut cx = Context { device: &mut device, sink: &mut Silent };
                strategy.free(&mut cx, block, Caller { stream, thread: ThreadId(0) }).unwrap();
            }
            let stream = StreamId((key % 2) as u16);
            let bytes =
                [512, 100 * KIB, 900 * KIB, 3 * MIB, 7 * MIB, 30 * MIB][(key * 7 % 6) as usize] + u64::from(key);
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            // Variants with a maximum size, or with one block size only, do not serve every
            // request.
            let Attempt::Served(block, _) = strategy.alloc(&mut cx, &request(bytes, stream)).unwrap() else {
                full = true;
                continue;
            };
            full = false;
            served += 1;
            if strategy.stats().segments == 0 {
                println!("{spec}: skipped, it has no real memory");
                break;
            }
            device.fill_blocks(stream, &[patterned(&block, key)]).unwrap();
            held.push((block, stream, key));
        }
        println!("{spec}: {served} blocks");
        assert!(served > 0, "{spec}");
        for (block, stream, key) in held {
            check(&mut device, &spec, &block, stream, key);
        }
        strategy.close(&mut Context { device: &mut device, sink: &mut Silent }).unwrap();
        assert_eq!(device.held_bytes(), 0, "{spec}");
    }
}

#[test]
fn contents_survive_threads_and_streams() {
    let Some((device, _guard)) = gpu() else { return };
    drop(device);
    for entry in STRATEGIES.iter().filter(|entry| entry.name != "null") {
        let strategy = StrategySpec { name: entry.name.to_owned(), parameters: String::new() };
        let target = StressTarget {
            strategy,
            device: "cuda".parse().unwrap(),
            memory_bytes: Some(8 * GIB),
            varies_memory: false,
        };
        let integrity = EnduranceTest { target, threads: 16, streams: 8, sizes: BlockSizes::MIXED, seed: 1 };
        let budget = StressBudget::until(&|| false, Instant::now() + Duration::from_millis(500));
        let outcome = integrity.run(&StopCondition { blocks: None, budget }, &mut |_| {}).unwrap();
        let counts = &outcome.counts;
        println!(
            "{}: {:.0} blocks/s, {:.0} GB/s compared, {} out of memory",
            entry.name,
            counts.per_second(counts.blocks),
            counts.per_second(counts.compared_bytes) / 1e9,
            counts.ooms,
        );
        assert!(outcome.failures.is_empty(), "{}", outcome.failures[0]);
        assert!(counts.blocks > 0 && counts.damaged == 0, "{}: {:?} {counts:?}", entry.name, outcome.skipped);
    }
}

#[test]
fn every_registered_strategy_conforms() {
    let Some((_keeps_the_context, _guard)) = gpu() else { return };
    let mut findings = Vec::new();
    for spec in every_spec() {
        let report = conform_spec(&spec, &limited);
        for skipped in report.skipped {
            println!("{spec}: skipped: {skipped}");
        }
        println!("{spec}: {} findings", report.findings.len());
        findings.extend(report.findings.into_iter().map(|finding| format!("{spec}: {finding}")));
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

/// Runs a program and returns every decision: blocks, outcomes, strategy events and counters.
fn decisions(strategy: &mut dyn Strategy, device: &mut dyn Device, steps: &[ProgramStep]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut live: Vec<(Block, StreamId)> = Vec::new();
    for _ in 1..3 {
        device.stream_create(0).unwrap();
    }
    for step in steps {
        let mut events = Vec::new();
        let mut cx = Context { device: &mut *device, sink: &mut events };
        let place = |nth: usize| nth.checked_rem(live.len());
        let outcome = match *step {
            ProgramStep::Alloc { bytes, stream } => {
                let attempt = strategy.alloc(&mut cx, &request(bytes, stream));
                if let Ok(Attempt::Served(block, _)) = attempt {
                    live.push((block, stream));
                }
                format!("{attempt:?}")
            }
            ProgramStep::Free { nth } => match place(nth) {
                Some(place) => {
                    let (block, stream) = live.remove(place);
                    format!("{:?}", strategy.free(&mut cx, block, Caller { stream, thread: ThreadId(0) }))
                }
                None => String::new(),
            },
            ProgramStep::UsedOn { nth, stream } => match place(nth) {
                Some(place) => format!("{:?}", strategy.used_on(&mut cx, &live[place].0, stream)),
                None => String::new(),
            },
            ProgramStep::Work { stream, nanos } => {
                let compute = cx.device.compute().unwrap();
                format!("{:?}", compute.launch(stream, &Work::Spin { nanos }, &[]))
            }
            ProgramStep::StreamSync { stream } => format!("{:?}", cx.device.stream_synchronize(stream)),
            ProgramStep::DeviceSync => format!("{:?}", cx.device.synchronize()),
            ProgramStep::Trim => format!("{:?}", strategy.trim(&mut cx)),
            ProgramStep::NextStep => format!("{:?}", strategy.control(&mut cx, &Control::StepBegins(0))),
        };
        lines.push(format!("{step:?}: {outcome} {events:?} {:?}", strategy.stats()));
    }
    let closed = strategy.close(&mut Context { device, sink: &mut Silent });
    lines.push(format!("{closed:?}"));
    lines
}

#[test]
fn logged_answers_repeat_decisions() {
    let Some((mut watcher, _guard)) = gpu() else { return };
    watcher.synchronize().unwrap();
    for spec in every_spec() {
        for seed in 0..4 {
            let steps = mixed_script(seed, 400, 40 * MIB, true);
            let mut gpu = limited(if seed % 2 == 0 { 2 * GIB } else { 160 * MIB });
            let props = gpu.props().clone();
            let fresh = || spec.build(&Setup { props: &props, limit: None }).unwrap();
            if fresh().requires().check(&props).is_err() {
                println!("{spec}: skipped, the device lacks a feature that it needs");
                continue;
            }
            let mut logged = InterceptedDevice::new(&mut *gpu, CallLog::default());
            let on_gpu = decisions(&mut *fresh(), &mut logged, &steps);
            let CallLog(mut log) = logged.interceptor;
            let mut scripted = ScriptedDevice::following(props.clone(), move || std::mem::take(&mut log));
            let on_script = decisions(&mut *fresh(), &mut scripted, &steps);
            for (number, (real, replayed)) in on_gpu.iter().zip(&on_script).enumerate() {
                assert_eq!(real, replayed, "{spec}, seed {seed}, step {number}");
            }
            assert_eq!((scripted.mismatch(), scripted.unread()), (None, 0), "{spec}, seed {seed}");
        }
        println!("{spec}: every decision agrees");
    }
}

#[test]
fn quick_suite_repeats_on_logged_answers() {
    let Some((device, _guard)) = gpu() else { return };
    drop(device);
    let simulated = "sim".parse().unwrap();
    let settings = CaseSettings { device: "cuda".parse().unwrap(), limit: None, seed: None, timeout: None };
    for case in SuiteFile::load("quick").unwrap().cases(&settings).unwrap() {
        let record = compare(&case, &simulated, &AtomicBool::new(false));
        println!(
            "{}: {:?}, {:?} of {:?} events, free-running peak reserved more by the share {:?}",
            record.case_id, record.finding, record.events_agreed, record.events, record.peak_reserved_difference_share
        );
        let sound = matches!(record.finding, AgreementFinding::Agrees | AgreementFinding::Skipped);
        assert!(sound, "{}: {} {:?}", record.case_id, record.reason, record.first_difference);
    }
}

//! Runs a program on `caching` and prints the result in the oracle's format.

use std::collections::BTreeMap;

use oomph::{
    base::{Address, SiteId, StreamId, ThreadId},
    device::{Device, wrap::stand_in::StandInDevice},
    pytorch::{AllocatorSettings, Release},
    strategy::{
        Attempt, Block, BlockState, Caller, Context, Control, Freed, Request, Setup, Strategy, StrategyEvent,
        caching::Caching,
    },
};

use super::program::{Call, HEADER_LINES, Program};

/// Handles in order of creation; not ascending, because PyTorch orders streams by handle.
pub const STREAMS: [u64; 5] = [0, 48, 16, 0x9000, 32];

/// The result of a program on `caching`.
pub struct Run {
    /// In the oracle's output format.
    pub lines: Vec<String>,
    /// The first call at which PyTorch would have freed or dropped memory in use.
    pub spoilt_at: Option<usize>,
}

fn stream_id(handle: u64) -> StreamId {
    StreamId(STREAMS.iter().position(|&stream| stream == handle).unwrap() as u16)
}

fn stream_handle(stream: StreamId) -> u64 {
    STREAMS[stream.index()]
}

/// Runs a program.
pub fn run(program: &Program) -> Run {
    let mut device = StandInDevice::new(program.total, program.capacity, program.downwards);
    device.memory_total = program.memory_total;
    for &handle in &STREAMS[1..] {
        device.stream_create(handle).unwrap();
    }
    let settings = AllocatorSettings::of_release(program.release).updated(&program.environment).unwrap();
    let mut caching = Caching::new(settings, &Setup { props: device.props(), limit: None });
    let (mut refused, mut trace) = (Vec::new(), Vec::new());
    let mut spoilt_at = None;
    let mut live: BTreeMap<u64, (Block, Request)> = BTreeMap::new();
    for (number, call) in (HEADER_LINES..).zip(&program.calls) {
        let mut events: Vec<StrategyEvent> = Vec::new();
        let accepted = refused.len();
        let mut cx = Context { device: &mut device, sink: &mut events };
        let mut control = |cx: &mut Context<'_>, command: Control<'_>| {
            if caching.control(cx, &command).is_err() {
                refused.push(format!("refused {number}"));
            }
        };
        let mut own = Vec::new();
        match *call {
            Call::Configure(ref text) => control(&mut cx, Control::Configure(text)),
            Call::Fraction(fraction) => control(&mut cx, Control::Fraction(fraction)),
            Call::PoolRetain { pool, use_on_oom } => {
                control(&mut cx, Control::PoolRetain { pool: (0, pool), use_on_oom })
            }
            Call::PoolRelease { pool } => control(&mut cx, Control::PoolRelease { pool: (0, pool) }),
            Call::PoolBegin { pool, stream } => {
                control(&mut cx, Control::PoolBegin { pool: (0, pool), stream: stream.map(stream_id) });
            }
            Call::PoolEnd { pool } => control(&mut cx, Control::PoolEnd { pool: (0, pool) }),
            Call::Alloc { id, bytes, stream } => {
                let request = Request { bytes, stream: stream_id(stream), thread: ThreadId(0), site: SiteId(0) };
                match caching.alloc(&mut cx, &request) {
                    Ok(Attempt::Served(block, _)) => {
                        live.insert(id, (block, request));
                        own.push(line("alloc", block.address, bytes, request.stream));
                    }
                    Ok(Attempt::OutOfMemory(_)) => {}
                    Err(_) => refused.push(format!("refused {number}")),
                }
            }
            Call::Free { id } => {
                if let Some((block, Request { bytes, stream, .. })) = live.remove(&id) {
                    own.push(line("free_requested", block.address, bytes, stream));
                    if caching.free(&mut cx, block, Caller::default()).unwrap() == Freed::Now {
                        own.push(line("free_completed", block.address, bytes, stream));
                    }
                }
            }
            Call::UsedOn { id, stream } => {
                if let Some((block, _)) = live.get(&id) {
                    caching.used_on(&mut cx, block, stream_id(stream)).unwrap();
                }
            }
            Call::EmptyCache => {
                if caching.trim(&mut cx).is_err() {
                    refused.push(format!("refused {number}"));
                }
            }
            Call::CaptureBegin => control(&mut cx, Control::CaptureBegin),
            Call::CaptureEnd => control(&mut cx, Control::CaptureEnd),
            Call::Busy { stream } => device.set_busy(stream_id(stream), true),
            Call::Idle { stream } => device.set_busy(stream_id(stream), false),
        }
        let did_something = !events.is_empty() || refused.len() > accepted;
        if spoilt_at.is_none() && did_something && avoided_a_defect(&caching) {
            spoilt_at = Some(number - HEADER_LINES);
        }
        trace.extend(events.into_iter().filter_map(event_line));
        trace.extend(own);
    }
    let mut lines = refused;
    lines.append(&mut trace);
    lines.extend(statistics(&caching, program.release));
    lines.extend(segments(&caching));
    caching.close(&mut Context { device: &mut device, sink: &mut Vec::new() }).unwrap();
    assert_eq!(device.leftovers(), 0, "memory was not freed");
    Run { lines, spoilt_at }
}

fn avoided_a_defect(caching: &Caching) -> bool {
    caching.details().into_iter().any(|(name, value)| name == "pytorch_defects_avoided" && value > 0)
}

fn line(action: &str, address: Address, bytes: u64, stream: StreamId) -> String {
    format!("{action} {} {bytes} {}", address.0, stream_handle(stream))
}

fn event_line(event: StrategyEvent) -> Option<String> {
    Some(match event {
        StrategyEvent::SegmentAlloc { address, bytes, stream } => line("segment_alloc", address, bytes, stream),
        StrategyEvent::SegmentFree { address, bytes, stream } => line("segment_free", address, bytes, stream),
        StrategyEvent::SegmentMap { address, bytes, stream } => line("segment_map", address, bytes, stream),
        StrategyEvent::SegmentUnmap { address, bytes, stream } => line("segment_unmap", address, bytes, stream),
        StrategyEvent::FreeCompleted { address, requested, stream } => {
            line("free_completed", address, requested, stream)
        }
        StrategyEvent::OutOfMemory { rounded, stream, device_free } => {
            line("oom", Address(device_free.unwrap()), rounded, stream)
        }
        StrategyEvent::Retry { .. } => return None,
    })
}

/// Counters that PyTorch has too, in its order.
fn statistics(caching: &Caching, release: Release) -> impl Iterator<Item = String> {
    let own = ["pytorch_defects_avoided", "settings_without_effect"];
    let from_2_3 = ["num_sync_all_streams", "num_device_alloc", "num_device_free"];
    let known = move |name: &str| !own.contains(&name) && (release >= Release::new(3) || !from_2_3.contains(&name));
    let details = caching.details().into_iter().filter(move |(name, _)| known(name));
    details.map(|(name, value)| format!("stat {name} {value}"))
}

fn segments(caching: &Caching) -> Vec<String> {
    let layout = caching.layout().unwrap();
    let line = |segment: &oomph::strategy::SegmentView| {
        let kind = if segment.mapped { "mapped" } else { "allocated" };
        let mut line = format!(
            "segment {} {} {} {} {kind} pool {}",
            segment.address.0,
            segment.bytes,
            stream_handle(segment.stream),
            segment.pool,
            segment.pool_id.1
        );
        for block in &segment.blocks {
            let state = match block.state {
                BlockState::Allocated => "allocated",
                BlockState::Pending => "pending",
                BlockState::Lent => "lent",
                BlockState::Free => "free",
            };
            line += &format!(" {}:{}:{state}:{}", block.address.0, block.size, block.requested);
        }
        line
    };
    layout.segments.iter().map(line).collect()
}

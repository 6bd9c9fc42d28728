//! Worked examples: short programs whose every event and end state were seen on the real PyTorch
//! 2.11 allocator.

use super::Caching;
use crate::device::wrap::stand_in::{FIRST_RANGE, FIRST_SEGMENT, StandInDevice};
use crate::strategy::{
    Attempt, Block, BlockState, Caller, Context, Control, Freed, Outcome, Refusal, Request, Setup, Shortage, Strategy,
    StrategyError, StrategyEvent,
};
use oomph_base::{GIB, MIB, SiteId, StreamId, ThreadId};
use oomph_pytorch::AllocatorSettings;

pub(super) const DEVICE: u64 = 80 * GIB;

/// An allocator on its device. Everything that happens is written down in a short form:
/// `segment@0+20` is a segment of 20 MiB at the start of the segments, `map@E40+20` a mapping 40
/// MiB into the first range.
pub(super) struct Bench {
    pub(super) device: StandInDevice,
    pub(super) caching: Caching,
    pub(super) log: Vec<String>,
}

fn place(address: u64) -> String {
    if address >= FIRST_SEGMENT {
        mebibytes(address - FIRST_SEGMENT)
    } else {
        format!("E{}", mebibytes(address - FIRST_RANGE))
    }
}

/// Whole mebibytes as a number, anything else in bytes.
fn mebibytes(bytes: u64) -> String {
    if bytes.is_multiple_of(MIB) { (bytes / MIB).to_string() } else { format!("{bytes}B") }
}

impl Bench {
    pub(super) fn new(settings: &str, limit_mib: Option<u64>) -> Bench {
        Bench::on(StandInDevice::new(DEVICE, DEVICE, false), settings, limit_mib)
    }

    pub(super) fn on(device: StandInDevice, settings: &str, limit_mib: Option<u64>) -> Bench {
        use crate::device::Device;
        let setup = Setup { props: device.props(), limit: limit_mib.map(|limit| limit * MIB) };
        let caching = Caching::new(AllocatorSettings::with_release(settings).unwrap(), &setup);
        Bench { device, caching, log: Vec::new() }
    }

    pub(super) fn call<R>(&mut self, call: impl FnOnce(&mut Caching, &mut Context<'_>) -> R) -> R {
        let mut events = Vec::new();
        let result = call(&mut self.caching, &mut Context { device: &mut self.device, sink: &mut events });
        self.log.extend(events.into_iter().map(|event| match event {
            StrategyEvent::SegmentAlloc { address, bytes, .. } => {
                format!("segment@{}+{}", place(address.0), mebibytes(bytes))
            }
            StrategyEvent::SegmentFree { address, bytes, .. } => {
                format!("free@{}+{}", place(address.0), mebibytes(bytes))
            }
            StrategyEvent::SegmentMap { address, bytes, .. } => {
                format!("map@{}+{}", place(address.0), mebibytes(bytes))
            }
            StrategyEvent::SegmentUnmap { address, bytes, .. } => {
                format!("unmap@{}+{}", place(address.0), mebibytes(bytes))
            }
            StrategyEvent::FreeCompleted { address, .. } => format!("completed@{}", place(address.0)),
            StrategyEvent::Retry { .. } => "retry".to_owned(),
            StrategyEvent::OutOfMemory { rounded, .. } => format!("oom {rounded}"),
        }));
        result
    }

    pub(super) fn try_alloc(&mut self, bytes: u64, stream: u16) -> Result<Attempt, StrategyError> {
        let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
        let attempt = self.call(|caching, cx| caching.alloc(cx, &request));
        if let Ok(Attempt::Served(block, _)) = attempt {
            self.log.push(format!("alloc@{}", place(block.address.0)));
        }
        attempt
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> Block {
        match self.try_alloc(bytes, 0).unwrap() {
            Attempt::Served(block, _) => block,
            Attempt::OutOfMemory(shortage) => panic!("{shortage:?}"),
        }
    }

    pub(super) fn short_of(&mut self, bytes: u64) -> Shortage {
        match self.try_alloc(bytes, 0).unwrap() {
            Attempt::Served(block, _) => panic!("{block:?}"),
            Attempt::OutOfMemory(shortage) => shortage,
        }
    }

    pub(super) fn free(&mut self, block: Block) -> Freed {
        self.call(|caching, cx| caching.free(cx, block, Caller::default())).unwrap()
    }

    pub(super) fn used_on(&mut self, block: Block, stream: u16) {
        self.call(|caching, cx| caching.used_on(cx, &block, StreamId(stream))).unwrap();
    }

    pub(super) fn control(&mut self, command: Control<'_>) {
        self.call(|caching, cx| caching.control(cx, &command)).unwrap();
    }

    pub(super) fn empty_cache(&mut self) {
        self.call(|caching, cx| caching.trim(cx)).unwrap();
    }

    pub(super) fn counter(&self, name: &str) -> u64 {
        self.caching.details().into_iter().find(|(other, _)| *other == name).unwrap().1
    }

    /// The events since the last call.
    pub(super) fn happened(&mut self) -> String {
        std::mem::take(&mut self.log).join(" ")
    }

    pub(super) fn reserved(&self) -> u64 {
        self.caching.stats().current.reserved
    }
}

#[test]
fn v1_small_blocks_are_cut_from_one_segment() {
    let mut bench = Bench::new("", None);
    let first = bench.alloc(1);
    bench.alloc(513);
    bench.free(first);
    bench.alloc(1024);
    assert_eq!(bench.happened(), "segment@0+2 alloc@0 alloc@512B alloc@1536B");
    let usage = bench.caching.stats().current;
    assert_eq!((usage.reserved, usage.allocated, usage.requested), (2 * MIB, 2048, 1537));
    assert_eq!(bench.counter("inactive_split.all.current"), 2);
    assert_eq!(bench.counter("inactive_split_bytes.all.current"), 2_095_104);
}

#[test]
fn v2_one_byte_more_than_a_mebibyte_is_large() {
    let mut bench = Bench::new("", None);
    bench.alloc(MIB);
    bench.alloc(MIB + 1);
    assert_eq!(bench.happened(), "segment@0+2 alloc@0 segment@2+20 alloc@2");
    assert_eq!((bench.reserved(), bench.caching.stats().current.allocated), (22 * MIB, 2_097_664));
}

#[test]
fn v3_ten_mebibytes_get_a_segment_of_their_own() {
    let mut bench = Bench::new("", None);
    for bytes in [10 * MIB - 512, 10 * MIB, 21 * MIB / 2, 11_743_744] {
        bench.alloc(bytes);
    }
    assert_eq!(bench.happened(), "segment@0+20 alloc@0 alloc@10485248B segment@20+12 alloc@20 segment@32+12 alloc@32");
    let usage = bench.caching.stats().current;
    assert_eq!((usage.reserved, usage.allocated, usage.requested), (44 * MIB, 44_564_480, 43_724_800));
}

#[test]
fn v4_a_remainder_of_a_mebibyte_is_not_cut_off() {
    let mut bench = Bench::new("", None);
    let blocks: Vec<Block> = (0..3).map(|_| bench.alloc(5 * MIB)).collect();
    bench.free(blocks[0]);
    bench.free(blocks[2]);
    bench.alloc(4 * MIB);
    bench.alloc(10 * MIB - 512);
    bench.free(blocks[1]);
    assert_eq!(bench.happened(), "segment@0+20 alloc@0 alloc@5 alloc@10 alloc@0 alloc@10");
    assert_eq!(bench.caching.stats().current.allocated, 15 * MIB);
    assert_eq!(bench.counter("inactive_split.all.current"), 1);
    assert_eq!(bench.counter("inactive_split_bytes.all.current"), 5 * MIB);
}

#[test]
fn v5_cache_is_released_at_the_limit() {
    let mut bench = Bench::new("", Some(120));
    let blocks: Vec<Block> = (0..3).map(|_| bench.alloc(40 * MIB)).collect();
    blocks.into_iter().for_each(|block| {
        bench.free(block);
    });
    bench.happened();
    assert!(matches!(bench.try_alloc(120 * MIB, 0), Ok(Attempt::Served(_, Outcome::ReleaseAndRetry))));
    assert_eq!(bench.happened(), "free@0+40 free@40+40 free@80+40 retry segment@120+120 alloc@120");
    let counters = ["num_alloc_retries", "num_sync_all_streams", "num_device_alloc", "num_device_free"];
    assert_eq!(counters.map(|name| bench.counter(name)), [1, 1, 4, 3]);
}

#[test]
fn v6_oom_names_rounded_size_and_refusal() {
    let mut bench = Bench::new("", Some(100));
    let first = bench.alloc(40 * MIB);
    bench.alloc(40 * MIB);
    bench.free(first);
    bench.alloc(60 * MIB);
    bench.happened();
    let shortage = bench.short_of(61 * MIB);
    assert_eq!(bench.happened(), "retry oom 63963136");
    assert_eq!((shortage.asked, shortage.refused_by), (62 * MIB, Refusal::Limit));
    assert_eq!(shortage.device_free, Some(DEVICE - 100 * MIB));
    let counters = ["num_alloc_retries", "num_ooms", "num_sync_all_streams"];
    assert_eq!(counters.map(|name| bench.counter(name)), [2, 1, 2]);
    assert_eq!(bench.reserved(), 100 * MIB);
}

#[test]
fn v7_oversize_block_serves_no_small_request() {
    let mut bench = Bench::new("max_split_size_mb:40", None);
    let block = bench.alloc(100 * MIB);
    bench.free(block);
    bench.alloc(30 * MIB);
    bench.alloc(90 * MIB);
    assert_eq!(bench.happened(), "segment@0+100 alloc@0 segment@100+30 alloc@100 alloc@0");
    let usage = bench.caching.stats().current;
    assert_eq!((usage.allocated, usage.requested), (130 * MIB, 120 * MIB));
}

#[test]
fn v8_oversize_blocks_make_room_largest_first() {
    let mut bench = Bench::new("max_split_size_mb:40", Some(200));
    let blocks = [60, 50, 80].map(|size| bench.alloc(size * MIB));
    for block in blocks {
        bench.free(block);
    }
    bench.happened();
    bench.alloc(100 * MIB);
    assert_eq!(bench.happened(), "free@110+80 free@0+60 segment@190+100 alloc@190");
    assert_eq!((bench.counter("num_alloc_retries"), bench.reserved()), (0, 150 * MIB));
}

#[test]
fn v9_garbage_collection_frees_old_segments() {
    let mut bench = Bench::new("garbage_collection_threshold:0.5", Some(200));
    let blocks = [30, 40, 50].map(|size| bench.alloc(size * MIB));
    bench.free(blocks[0]);
    bench.alloc(2 * MIB);
    bench.free(blocks[1]);
    bench.free(blocks[2]);
    bench.happened();
    bench.alloc(60 * MIB);
    assert_eq!(bench.happened(), "free@30+40 free@70+50 segment@120+60 alloc@120");
    assert_eq!(bench.reserved(), 90 * MIB);
}

#[test]
fn v26_garbage_collection_completes_a_pass() {
    let mut bench = Bench::new("garbage_collection_threshold:0.5", Some(400));
    let blocks = [30, 40, 50, 60].map(|size| bench.alloc(size * MIB));
    bench.free(blocks[0]);
    bench.alloc(12 * MIB);
    bench.free(blocks[1]);
    bench.alloc(70 * MIB);
    bench.free(blocks[2]);
    bench.free(blocks[3]);
    bench.happened();
    bench.alloc(80 * MIB);
    assert_eq!(bench.happened(), "free@30+40 free@70+50 free@120+60 segment@250+80 alloc@250");
}

#[test]
fn v10_expandable_segment_grows_at_its_end() {
    let mut bench = Bench::new("expandable_segments:True", None);
    let first = bench.alloc(30 * MIB);
    bench.alloc(5 * MIB);
    bench.alloc(20 * MIB);
    bench.free(first);
    bench.alloc(31 * MIB);
    assert_eq!(bench.happened(), "map@E0+40 alloc@E0 alloc@E30 map@E40+20 alloc@E35 map@E60+40 alloc@E55");
    assert_eq!(bench.reserved(), 100 * MIB);
}

#[test]
fn v11_emptying_the_cache_unmaps_whole_granules() {
    let mut bench = Bench::new("expandable_segments:True", None);
    let (first, second) = (bench.alloc(30 * MIB), bench.alloc(5 * MIB));
    bench.free(first);
    bench.empty_cache();
    let third = bench.alloc(25 * MIB);
    bench.free(second);
    bench.free(third);
    bench.empty_cache();
    assert_eq!(bench.happened(), "map@E0+40 alloc@E0 alloc@E30 unmap@E0+20 map@E0+20 alloc@E0 unmap@E0+40");
    assert_eq!((bench.reserved(), bench.caching.stats().segments), (0, 0));
    assert_eq!(bench.device.leftovers(), 0);
}

#[test]
fn v14_block_waits_for_another_stream() {
    let mut bench = Bench::new("", None);
    bench.device.set_busy(StreamId(7), true);
    let first = bench.alloc(5 * MIB);
    bench.used_on(first, 7);
    assert_eq!(bench.free(first), Freed::Later);
    bench.alloc(5 * MIB);
    bench.device.set_busy(StreamId(7), false);
    bench.alloc(5 * MIB);
    assert_eq!(bench.happened(), "segment@0+20 alloc@0 alloc@5 completed@0 alloc@0");
}

#[test]
fn v15_streams_never_share_blocks() {
    let mut bench = Bench::new("", None);
    let block = bench.alloc(5 * MIB);
    bench.free(block);
    assert!(matches!(bench.try_alloc(5 * MIB, 9), Ok(Attempt::Served(_, Outcome::NewSegment))));
    assert_eq!(bench.happened(), "segment@0+20 alloc@0 segment@20+20 alloc@20");
    assert_eq!(bench.reserved(), 40 * MIB);
}

#[test]
fn v17_no_second_search_after_waiting() {
    let mut bench = Bench::on(StandInDevice::new(DEVICE, 100 * MIB, false), "", None);
    bench.device.set_busy(StreamId(7), true);
    let whole = bench.alloc(100 * MIB);
    bench.free(whole);
    bench.alloc(20 * MIB);
    let large = bench.alloc(70 * MIB);
    bench.used_on(large, 7);
    bench.free(large);
    bench.happened();
    assert_eq!(bench.short_of(60 * MIB).refused_by, Refusal::Device);
    assert_eq!(bench.happened(), "completed@20 retry oom 62914560");
    bench.alloc(60 * MIB);
    assert_eq!(bench.happened(), "alloc@20");
    assert_eq!(bench.counter("num_ooms"), 1);
}

#[test]
fn v18_partial_mapping_stays() {
    let mut bench = Bench::on(StandInDevice::new(DEVICE, 50 * MIB, false), "expandable_segments:True", None);
    let (first, second) = (bench.alloc(20 * MIB), bench.alloc(20 * MIB));
    bench.free(first);
    bench.empty_cache();
    bench.free(second);
    bench.happened();
    bench.short_of(55 * MIB);
    assert_eq!(bench.happened(), "map@E0+20 unmap@E0+40 retry oom 57671680");
    assert_eq!(bench.reserved(), 0);
}

#[test]
fn v19_limit_compares_the_segment_size() {
    let mut bench = Bench::new("expandable_segments:True", Some(22));
    bench.alloc(21 * MIB);
    assert_eq!((bench.happened().as_str(), bench.reserved()), ("map@E0+40 alloc@E0", 40 * MIB));
}

#[test]
fn v20_refused_oversize_block_is_found_by_address() {
    let mut bench = Bench::new("expandable_segments:True,max_split_size_mb:40", None);
    let block = bench.alloc(100 * MIB);
    bench.free(block);
    bench.alloc(30 * MIB);
    assert_eq!(bench.happened(), "map@E0+100 alloc@E0 alloc@E0");
}

#[test]
fn v21_expandable_setting_splits_old_segments() {
    let mut bench = Bench::new("", None);
    let block = bench.alloc(30 * MIB);
    bench.free(block);
    bench.control(Control::Configure("expandable_segments:True"));
    assert_eq!(bench.alloc(59 * MIB / 2).size, 59 * MIB / 2);
    assert_eq!(bench.happened(), "segment@0+30 alloc@0 alloc@0");
    assert_eq!(bench.caching.layout().unwrap().free_bytes(), MIB / 2);
}

#[test]
fn v22_mapped_blocks_are_skipped_when_off() {
    let mut bench = Bench::new("expandable_segments:True", None);
    let block = bench.alloc(30 * MIB);
    bench.free(block);
    bench.control(Control::Configure("expandable_segments:False"));
    bench.alloc(25 * MIB);
    assert_eq!(bench.happened(), "map@E0+40 alloc@E0 segment@0+26 alloc@0");
    assert_eq!(bench.caching.stats().current.allocated, 26 * MIB);
}

#[test]
fn v23_hole_is_preferred_to_growing_tail() {
    let mut bench = Bench::new("expandable_segments:True", None);
    let first = bench.alloc(12 * MIB);
    bench.alloc(19 * MIB);
    bench.free(first);
    bench.happened();
    bench.alloc(8 * MIB);
    assert_eq!(bench.happened(), "alloc@E0");
}

#[test]
fn v24_lowest_address_among_equal_sizes() {
    let mut bench = Bench::new("", None);
    let blocks: Vec<Block> = (0..3).map(|_| bench.alloc(12 * MIB)).collect();
    bench.free(blocks[2]);
    bench.free(blocks[0]);
    bench.happened();
    bench.alloc(12 * MIB);
    assert_eq!(bench.happened(), "alloc@0");
}

#[test]
fn shared_segment_is_not_released() {
    // The recipe in which PyTorch frees a segment with a live block in it.
    let settings = "max_split_size_mb:64";
    let mut bench = Bench::on(StandInDevice::new(DEVICE, 100 * MIB, false), settings, None);
    let block = bench.alloc(84 * MIB);
    bench.free(block);
    bench.control(Control::Configure("max_split_size_mb:64,expandable_segments:True"));
    let first = bench.alloc(66 * MIB);
    bench.alloc(17 * MIB);
    bench.free(first);
    bench.happened();
    bench.short_of(70 * MIB);
    assert!(!bench.happened().contains("free@"));
    assert_eq!(bench.counter("pytorch_defects_avoided"), 1);
}

#[test]
fn pool_in_use_defers_frees() {
    let mut bench = Bench::new("", Some(60));
    let cached = bench.alloc(40 * MIB);
    let waiting = bench.alloc(20 * MIB);
    bench.free(cached);
    bench.used_on(waiting, 3);
    bench.control(Control::PoolBegin { pool: (0, 1), stream: None });
    assert_eq!(bench.free(waiting), Freed::Later);
    bench.happened();
    bench.short_of(50 * MIB);
    assert_eq!(bench.happened(), "oom 52428800");
    bench.control(Control::PoolEnd { pool: (0, 1) });
    bench.alloc(50 * MIB);
    assert_eq!(bench.happened(), "completed@40 free@40+20 free@0+40 retry segment@60+50 alloc@60");
    assert!(bench.call(|caching, cx| caching.control(cx, &Control::PoolEnd { pool: (0, 1) })).is_err());
}

#[test]
fn released_pool_is_dropped() {
    let mut bench = Bench::new("", None);
    bench.control(Control::PoolRetain { pool: (0, 1), use_on_oom: true });
    bench.control(Control::PoolBegin { pool: (0, 1), stream: Some(StreamId(0)) });
    let block = bench.alloc(40 * MIB);
    assert_eq!(bench.caching.layout().unwrap().segments[0].pool_id, (0, 1));
    bench.control(Control::PoolEnd { pool: (0, 1) });
    bench.free(block);
    bench.empty_cache();
    assert_eq!(bench.reserved(), 40 * MIB);
    bench.control(Control::PoolRelease { pool: (0, 1) });
    bench.control(Control::PoolRelease { pool: (0, 1) });
    bench.empty_cache();
    assert_eq!(bench.reserved(), 0);
    bench.control(Control::PoolRetain { pool: (0, 1), use_on_oom: false });
}

#[test]
fn invalid_calls_are_refused() {
    let mut bench = Bench::new("", None);
    let block = bench.alloc(512);
    bench.free(block);
    let again = bench.call(|caching, cx| caching.free(cx, block, Caller::default()));
    assert!(matches!(again, Err(StrategyError::UnknownBlock { .. })));
    assert_eq!(bench.try_alloc(0, 0), Err(StrategyError::ZeroBytes));
    assert_eq!(bench.short_of(1 << 60).refused_by, Refusal::Size);
    assert_eq!(bench.counter("num_ooms"), 0);
}

/// A mixed program in which any single call may fail; afterwards everything must still add up.
fn survives_a_failure_of_call(number: u64, settings: &str) -> bool {
    let mut bench = Bench::on(StandInDevice::new(DEVICE, 150 * MIB, false), settings, None);
    bench.device.fails_at = Some(number);
    let mut live = Vec::new();
    let mut failed = false;
    for step in 0..40u64 {
        let bytes = (step * 7 % 11 + 1) * MIB * 3;
        match bench.try_alloc(bytes, (step % 2) as u16) {
            Ok(Attempt::Served(block, _)) => live.push(block),
            Ok(Attempt::OutOfMemory(_)) => {}
            Err(error) => {
                assert!(matches!(error, StrategyError::Device(_)));
                failed = true;
            }
        }
        if step % 3 != 0 && !live.is_empty() {
            let block = live.remove((step as usize * 5) % live.len());
            if step % 2 == 0 {
                bench.used_on(block, 5);
            }
            if bench.call(|caching, cx| caching.free(cx, block, Caller::default())).is_err() {
                failed = true;
                live.push(block);
            }
        }
        if step % 13 == 12 {
            failed |= bench.call(|caching, cx| caching.trim(cx)).is_err();
        }
        let layout = bench.caching.layout().unwrap();
        let stats = bench.caching.stats();
        let allocated = layout.blocks().filter(|block| block.state == BlockState::Allocated);
        assert_eq!(allocated.map(|block| block.size).sum::<u64>(), stats.current.allocated);
        assert_eq!(layout.segments.iter().map(|segment| segment.bytes).sum::<u64>(), stats.current.reserved);
        assert_eq!(layout.segments.len() as u64, stats.segments);
        assert_eq!(stats.live_blocks, live.len() as u64);
        assert!(stats.current.reserved <= crate::device::Device::held_bytes(&bench.device));
    }
    while bench.call(|caching, cx| caching.close(cx)).is_err() {
        failed = true;
    }
    assert_eq!(bench.device.leftovers(), 0);
    assert_eq!(crate::device::Device::held_bytes(&bench.device), 0);
    failed
}

#[test]
fn any_failing_driver_call_loses_nothing() {
    for settings in ["", "expandable_segments:True"] {
        let failures = (0..400).filter(|&number| survives_a_failure_of_call(number, settings)).count();
        assert!(failures > 50, "only {failures} runs saw their call fail");
    }
}

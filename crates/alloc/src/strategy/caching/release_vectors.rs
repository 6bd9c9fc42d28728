//! Short programs in which releases differ. Each was seen on the allocator libraries of the releases
//! on both sides of the change.

use super::vectors::{Bench, DEVICE};
use crate::device::wrap::stand_in::StandInDevice;
use crate::strategy::{Attempt, Control, Refusal, Strategy, StrategyError};
use oomph_base::{GIB, MIB, StreamId};

fn of_release(minor: u8, settings: &str) -> Bench {
    Bench::new(&format!("release:2.{minor},{settings}"), None)
}

#[test]
fn oldest_of_equal_segments_is_taken_from_2_12_on() {
    for (minor, taken) in [(11, "alloc@2nd"), (12, "alloc@1st"), (13, "alloc@1st"), (15, "alloc@1st")] {
        // Addresses descend.
        let device = StandInDevice::new(DEVICE, DEVICE, true);
        let mut bench = Bench::on(device, &format!("release:2.{minor}"), None);
        let (first, second) = (bench.alloc(20 * MIB), bench.alloc(20 * MIB));
        bench.free(first);
        bench.free(second);
        let third = bench.alloc(20 * MIB);
        let seen = if third.address == first.address { "alloc@1st" } else { "alloc@2nd" };
        assert_eq!((seen, third.address == second.address), (taken, taken == "alloc@2nd"), "2.{minor}");
    }
}

#[test]
fn oldest_block_of_a_segment_is_taken_in_2_12_only() {
    for (minor, taken) in [(11, "alloc@0"), (12, "alloc@1536B"), (13, "alloc@0")] {
        let mut bench = of_release(minor, "");
        let whole = bench.alloc(1024);
        let _between = bench.alloc(512);
        let third = bench.alloc(512);
        let _last = bench.alloc(512);
        bench.free(whole);
        // The lower half is a new block, the upper half keeps the number.
        let half = bench.alloc(512);
        let _upper = bench.alloc(512);
        bench.free(half);
        bench.free(third);
        bench.alloc(512);
        assert_eq!(bench.log.last().map(String::as_str), Some(taken), "2.{minor}");
    }
}

#[test]
fn one_division_keeps_sizes_up_to_2_3() {
    for (minor, second) in [(3, "alloc@5001B"), (4, "alloc@5120B")] {
        let mut bench = of_release(minor, "roundup_power2_divisions:1");
        let first = bench.alloc(5001);
        bench.alloc(600);
        assert_eq!(bench.log.last().map(String::as_str), Some(second), "2.{minor}");
        bench.free(first);
        bench.alloc(5001);
        assert_eq!(bench.log.last().map(String::as_str), Some("alloc@0"), "2.{minor}");
    }
}

#[test]
fn expandable_blocks_fail_an_assertion_up_to_2_4() {
    for (minor, fails) in [(4, true), (5, false)] {
        let mut bench = of_release(minor, "expandable_segments:True,max_split_size_mb:40");
        let block = bench.alloc(100 * MIB);
        bench.free(block);
        bench.control(Control::Fraction(0.0015));
        let second = bench.try_alloc(120 * MIB, 0);
        match second {
            Err(StrategyError::Refused(reason)) => {
                assert!(fails && reason.contains("PyTorch 2.4 fails an internal assertion"), "{reason}");
            }
            other => assert!(!fails && matches!(other, Ok(Attempt::Served(..))), "2.{minor}: {other:?}"),
        }
        assert!(!bench.log.iter().any(|entry| entry.starts_with("oom")));
    }
}

#[test]
fn early_rejections_leave_no_oom() {
    let mut bench = of_release(13, "throw_on_cudamalloc_oom:True,per_process_memory_fraction:1");
    bench.control(Control::Configure("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.00125"));
    let kept = bench.alloc(30 * MIB);
    assert_eq!(bench.short_of(110_000_000).refused_by, Refusal::Limit);
    assert_eq!((bench.counter("num_ooms"), bench.counter("num_oom_rejections")), (0, 1));
    // Cached memory is not released for it.
    bench.free(kept);
    bench.short_of(110_000_000);
    assert_eq!(bench.log, ["segment@0+30", "alloc@0"]);
    assert_eq!((bench.counter("num_alloc_retries"), bench.counter("num_oom_rejections")), (0, 2));
    assert!(!of_release(11, "").caching.details().iter().any(|(name, _)| *name == "num_oom_rejections"));
}

#[test]
fn request_larger_than_a_short_range_fails() {
    let mut bench = of_release(15, "expandable_segments:True,expandable_segments_reserve:1G");
    assert_eq!(bench.short_of(3 * GIB).refused_by, Refusal::Size);
    assert_eq!(bench.log, ["retry".to_owned(), format!("oom {}", 3 * GIB)]);
    // Two attempts took addresses and gave them back; each range takes 3 GiB of addresses here.
    bench.alloc(100 * MIB);
    assert_eq!(bench.log.last().map(String::as_str), Some("alloc@E6144"));
}

#[test]
fn fraction_of_one_is_a_limit_up_to_2_9() {
    for (minor, limited) in [(9, true), (10, false)] {
        let mut bench = Bench::on(StandInDevice::new(100 * MIB, GIB, false), &format!("release:2.{minor}"), None);
        bench.control(Control::Fraction(1.0));
        bench.alloc(80 * MIB);
        assert_eq!(matches!(bench.try_alloc(40 * MIB, 0), Ok(Attempt::OutOfMemory(_))), limited, "2.{minor}");
    }
}

#[test]
fn fallback_on_a_pool_in_use_raises_an_error_and_keeps_a_user() {
    let pool = (0, 1);
    let mut bench = of_release(15, "");
    bench.control(Control::PoolRetain { pool, use_on_oom: true });
    bench.control(Control::PoolBegin { pool, stream: Some(StreamId(1)) });
    let Ok(Attempt::Served(block, _)) = bench.try_alloc(30 * MIB, 1) else { panic!("no memory") };
    bench.free(block);
    bench.control(Control::Fraction(0.0005));
    let raised = bench.try_alloc(30 * MIB, 0).unwrap_err().to_string();
    assert!(raised.contains("PyTorch 2.15 raises 'already recording to mempool_id', a known bug"), "{raised}");
    // Two users were known; the third one is never removed, so the pool is not released.
    bench.control(Control::PoolEnd { pool });
    bench.control(Control::PoolRelease { pool });
    bench.control(Control::PoolRelease { pool });
    bench.empty_cache();
    assert_eq!(bench.caching.stats().current.reserved, 30 * MIB);
}

//! Promises about blocks, handles, books, and giving memory back.

use super::{Bench, Echo, Step, Subject, Unplayable, mixed_script};
use crate::strategy::{Block, BlockState, Caller, Context, Outcome, Silent, Strategy};
use oomph_base::{Address, KIB, MIB, Nanos, StreamId};

/// A device on which nothing here runs out.
pub(super) const ROOMY: u64 = 2048 * MIB;
/// A device on which a few blocks are too many.
pub(super) const TIGHT: u64 = 96 * MIB;

const STREAM: StreamId = StreamId::DEFAULT;

pub(super) fn sizes(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    for border in [1, 256, 512, KIB, 4 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB] {
        for bytes in [border.max(2) - 1, border, border + 1] {
            let echo = bench.step(&Step::Alloc { bytes, stream: STREAM });
            if !matches!(echo, Echo::Served(..)) && !echo.is_refused_for_its_size() {
                bench.find(format!("{bytes} bytes on a roomy device: {echo:?}"));
            }
        }
    }
    bench.free_every_other();
    for bytes in [1, 700, 100 * KIB, MIB, 3 * MIB, 12 * MIB] {
        bench.step(&Step::Alloc { bytes, stream: STREAM });
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn nothing(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    bench.step(&Step::Alloc { bytes: 0, stream: STREAM });
    bench.step(&Step::Alloc { bytes: 1, stream: STREAM });
    bench.step(&Step::Alloc { bytes: 0, stream: STREAM });
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn absurd(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, TIGHT)?;
    for bytes in [u64::MAX, u64::MAX - 511, u64::MAX / 2, 1 << 60, 1 << 48] {
        let echo = bench.step(&Step::Alloc { bytes, stream: STREAM });
        // Imaginary memory may go this far; memory of the device does not.
        let real = bench.watch.strategy.stats().segments > 0;
        if matches!(echo, Echo::Failed(_)) || (real && matches!(echo, Echo::Served(..))) {
            bench.find(format!("{bytes} bytes: {echo:?}"));
        }
        if matches!(echo, Echo::Served(..)) {
            bench.free_all();
        }
    }
    bench.step(&Step::Alloc { bytes: MIB, stream: STREAM });
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn handles(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    for bytes in [512, 512, 3 * MIB, 24 * MIB] {
        bench.step(&Step::Alloc { bytes, stream: STREAM });
    }
    let blocks: Vec<Block> = bench.blocks().copied().collect();
    bench.step(&Step::Free { nth: 2 });
    bench.step(&Step::Free { nth: 0 });
    // One of the two gets a new tenant, in the same slot and at the same address if the strategy is thrifty.
    bench.step(&Step::Alloc { bytes: 512, stream: STREAM });
    let mut wrong: Vec<Block> = blocks.into_iter().filter(|block| bench.blocks().all(|live| live != block)).collect();
    if let Some(&live) = bench.blocks().next() {
        wrong.push(Block { generation: live.generation.wrapping_add(1), ..live });
        wrong.push(Block { slot: u32::MAX, ..live });
        wrong.push(Block { address: live.address.offset(256), ..live });
    }
    wrong.push(Block { address: Address::NULL, size: 0, slot: 0, generation: 0 });
    let before = bench.watch.strategy.stats();
    for block in wrong {
        // `Checked` says so if one of these is not refused.
        let mut cx = Context { device: &mut *bench.watch.device, sink: &mut Silent };
        let freed = bench.watch.strategy.free(&mut cx, block, Caller::default());
        let used = bench.watch.strategy.used_on(&mut cx, &block, StreamId(1));
        bench.watch.strategy.audit();
        if freed.is_ok() || used.is_ok() || bench.watch.strategy.stats() != before {
            bench.find(format!("a wrong handle was taken for a block: {block:?}"));
        }
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn exhaustion(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    const BYTES: u64 = 7 * MIB;
    let mut bench = Bench::new(subject, TIGHT)?;
    let more_than_fit = TIGHT / BYTES + 1;
    let ran_out = (0..more_than_fit).find_map(|_| match bench.step(&Step::Alloc { bytes: BYTES, stream: STREAM }) {
        Echo::Served(..) => None,
        other => Some(other),
    });
    match ran_out {
        // Imaginary memory never ends.
        None if bench.watch.strategy.stats().segments == 0 => {}
        Some(echo) if echo.is_refused_for_its_size() => {
            found.extend(bench.finish());
            return Err(Unplayable::NotOffered("the strategy serves no request of that size"));
        }
        Some(Echo::OutOfMemory(shortage)) if shortage.rounded >= BYTES => {
            bench.step(&Step::Free { nth: 0 });
            let echo = bench.step(&Step::Alloc { bytes: BYTES, stream: STREAM });
            if !matches!(echo, Echo::Served(..)) {
                bench.find(format!("what was just freed cannot be had again: {echo:?}"));
            }
            // With everything free again, memory that lies in the wrong pieces must be pieced together or given back.
            bench.free_all();
            let echo = bench.step(&Step::Alloc { bytes: TIGHT / 2, stream: STREAM });
            if !matches!(echo, Echo::Served(..)) {
                bench.find(format!("half of an empty device cannot be had: {echo:?}"));
            }
        }
        other => bench.find(format!("{more_than_fit} blocks of {BYTES} bytes on a device of {TIGHT}: {other:?}")),
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn largest_free(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    bench.play(&mixed_script(11, 200, 40 * MIB, false));
    for _ in 0..4 {
        let Some(bytes) = bench.watch.strategy.largest_free(STREAM) else {
            found.extend(bench.finish());
            return Err(Unplayable::NotOffered("the strategy does not know its largest free block"));
        };
        if bytes == 0 {
            break;
        }
        let reserved = bench.watch.strategy.stats().current.reserved;
        let echo = bench.step(&Step::Alloc { bytes, stream: STREAM });
        match echo {
            // The request was rounded up beyond the free block: nothing was promised.
            Echo::Served(block, Outcome::NewSegment) if block.size > bytes => break,
            Echo::Served(_, Outcome::Hit | Outcome::Split)
                if bench.watch.strategy.stats().current.reserved == reserved => {}
            _ => {
                bench.find(format!("{bytes} bytes should be free in one piece: {echo:?}"));
                break;
            }
        }
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn trim(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    for bytes in [512, 100 * KIB, MIB, 5 * MIB, 15 * MIB, 30 * MIB, 60 * MIB, 30 * MIB] {
        bench.step(&Step::Alloc { bytes, stream: STREAM });
        bench.step(&Step::Alloc { bytes, stream: StreamId(1) });
    }
    bench.free_every_other();
    bench.step(&Step::Trim);
    let kept = bench.watch.strategy.layout().unwrap_or_default().segments.into_iter();
    let wholly_free = kept.filter(|segment| segment.blocks.iter().all(|block| block.state == BlockState::Free));
    let wholly_free: Vec<String> = wholly_free.map(|segment| segment.address.to_string()).collect();
    if !wholly_free.is_empty() {
        bench.find(format!("trim kept free segments: {}", wholly_free.join(", ")));
    }
    bench.free_all();
    bench.step(&Step::Trim);
    let (held, reserved) = (bench.watch.device.held_bytes(), bench.watch.strategy.stats().current.reserved);
    if held != 0 || reserved != 0 {
        bench.find(format!("all is free and trimmed, but {held} bytes are held and {reserved} reserved"));
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn close(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    let mut bench = Bench::new(subject, ROOMY)?;
    bench.close();
    for _ in 0..2 {
        for bytes in [512, MIB, 5 * MIB, 15 * MIB, 30 * MIB] {
            bench.step(&Step::Alloc { bytes, stream: STREAM });
            bench.step(&Step::Alloc { bytes, stream: StreamId(1) });
        }
        // Free blocks, live blocks, and blocks that wait for a stream which is busy for long.
        bench.step(&Step::Free { nth: 4 });
        bench.step(&Step::Free { nth: 6 });
        bench.work(StreamId(2), Nanos(1_000_000_000));
        bench.used_on(0, StreamId(2));
        bench.used_on(3, StreamId(2));
        bench.step(&Step::Free { nth: 3 });
        bench.step(&Step::Free { nth: 0 });
        bench.close();
        bench.close();
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn random(subject: &Subject<'_>, found: &mut Vec<String>) -> Result<(), Unplayable> {
    for (seed, room) in [(1, ROOMY), (2, TIGHT), (3, TIGHT)] {
        let mut bench = Bench::new(subject, room)?;
        bench.play(&mixed_script(seed, 300, 40 * MIB, false));
        found.extend(bench.finish());
    }
    Ok(())
}

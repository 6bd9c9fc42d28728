//! The checks of the conformance suite. Each adds its findings to `found`.

use super::{
    CheckSkipped, ConformanceProgram, ConformanceSubject, MissingCapabilities, ProgramStep, StepOutcome, mixed_script,
};
use crate::device::{
    CallKind, Capabilities, Device, DeviceClock,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use crate::strategy::{Block, BlockState, Caller, Context, Outcome, Silent, Strategy};
use oomph_base::{Address, KIB, MIB, Nanos, StreamId};

/// A device on which no check runs out of memory.
pub(super) const LARGE_DEVICE: u64 = 2048 * MIB;
/// A device that a few blocks fill.
pub(super) const SMALL_DEVICE: u64 = 96 * MIB;

const STREAM: StreamId = StreamId::DEFAULT;

pub(super) fn sizes(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    for border in [1, 256, 512, KIB, 4 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB] {
        for bytes in [border.max(2) - 1, border, border + 1] {
            let echo = bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
            if !matches!(echo, StepOutcome::Served(..)) && !echo.is_unsupported_size() {
                bench.find(format!("{bytes} bytes on a large device: {echo:?}"));
            }
        }
    }
    bench.free_every_other();
    for bytes in [1, 700, 100 * KIB, MIB, 3 * MIB, 12 * MIB] {
        bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn zero_bytes(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    bench.step(&ProgramStep::Alloc { bytes: 0, stream: STREAM });
    bench.step(&ProgramStep::Alloc { bytes: 1, stream: STREAM });
    bench.step(&ProgramStep::Alloc { bytes: 0, stream: STREAM });
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn huge_requests(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, SMALL_DEVICE)?;
    for bytes in [u64::MAX, u64::MAX - 511, u64::MAX / 2, 1 << 60, 1 << 48] {
        let echo = bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
        // Imaginary memory may go this far; memory of the device does not.
        let real = bench.watch.strategy.stats().segments > 0;
        if matches!(echo, StepOutcome::Failed(_)) || (real && matches!(echo, StepOutcome::Served(..))) {
            bench.find(format!("{bytes} bytes: {echo:?}"));
        }
        if matches!(echo, StepOutcome::Served(..)) {
            bench.free_all();
        }
    }
    bench.step(&ProgramStep::Alloc { bytes: MIB, stream: STREAM });
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn handles(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    for bytes in [512, 512, 3 * MIB, 24 * MIB] {
        bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
    }
    let blocks: Vec<Block> = bench.blocks().copied().collect();
    bench.step(&ProgramStep::Free { nth: 2 });
    bench.step(&ProgramStep::Free { nth: 0 });
    // The new block may get the slot and the address of a freed one.
    bench.step(&ProgramStep::Alloc { bytes: 512, stream: STREAM });
    let mut wrong: Vec<Block> = blocks.into_iter().filter(|block| bench.blocks().all(|live| live != block)).collect();
    if let Some(&live) = bench.blocks().next() {
        wrong.push(Block { generation: live.generation.wrapping_add(1), ..live });
        wrong.push(Block { slot: u32::MAX, ..live });
        wrong.push(Block { address: live.address.offset(256), ..live });
    }
    wrong.push(Block { address: Address::NULL, size: 0, slot: 0, generation: 0 });
    let before = bench.watch.strategy.stats();
    for block in wrong {
        // `CheckedStrategy` records a violation if one of these is not refused.
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

pub(super) fn exhaustion(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    const BYTES: u64 = 7 * MIB;
    let mut bench = ConformanceProgram::new(subject, SMALL_DEVICE)?;
    let more_than_fit = SMALL_DEVICE / BYTES + 1;
    let ran_out =
        (0..more_than_fit).find_map(|_| match bench.step(&ProgramStep::Alloc { bytes: BYTES, stream: STREAM }) {
            StepOutcome::Served(..) => None,
            other => Some(other),
        });
    match ran_out {
        // A strategy without segments (`null`) never runs out.
        None if bench.watch.strategy.stats().segments == 0 => {}
        Some(echo) if echo.is_unsupported_size() => {
            found.extend(bench.finish());
            return Err(CheckSkipped::NotOffered("the strategy does not serve requests of that size"));
        }
        Some(StepOutcome::OutOfMemory(shortage)) if shortage.rounded >= BYTES => {
            bench.step(&ProgramStep::Free { nth: 0 });
            let echo = bench.step(&ProgramStep::Alloc { bytes: BYTES, stream: STREAM });
            if !matches!(echo, StepOutcome::Served(..)) {
                bench.find(format!("memory that was just freed cannot be allocated again: {echo:?}"));
            }
            // With all blocks free, fragments must be merged or released. A strategy that keeps its regions cannot
            // merge two of them.
            bench.free_all();
            if bench.watch.strategy.trims() {
                let echo = bench.step(&ProgramStep::Alloc { bytes: SMALL_DEVICE / 2, stream: STREAM });
                if !matches!(echo, StepOutcome::Served(..)) {
                    bench.find(format!("half of an empty device cannot be allocated: {echo:?}"));
                }
            }
        }
        other => {
            bench.find(format!("{more_than_fit} blocks of {BYTES} bytes on a device of {SMALL_DEVICE}: {other:?}"))
        }
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn largest_free(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    bench.play(&mixed_script(11, 200, 40 * MIB, false));
    for _ in 0..4 {
        let Some(bytes) = bench.watch.strategy.largest_free(STREAM) else {
            found.extend(bench.finish());
            return Err(CheckSkipped::NotOffered("the strategy does not know its largest free block"));
        };
        if bytes == 0 {
            break;
        }
        let reserved = bench.watch.strategy.stats().current.reserved;
        let echo = bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
        match echo {
            // The request was rounded up beyond the free block.
            StepOutcome::Served(block, Outcome::NewSegment) if block.size > bytes => break,
            StepOutcome::Served(_, Outcome::Hit | Outcome::Split)
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

pub(super) fn trim(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    if !bench.watch.strategy.trims() {
        return Err(CheckSkipped::NotOffered("the strategy keeps its memory until it is closed"));
    }
    for bytes in [512, 100 * KIB, MIB, 5 * MIB, 15 * MIB, 30 * MIB, 60 * MIB, 30 * MIB] {
        bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
        bench.step(&ProgramStep::Alloc { bytes, stream: StreamId(1) });
    }
    bench.free_every_other();
    bench.step(&ProgramStep::Trim);
    let kept = bench.watch.strategy.layout().unwrap_or_default().segments.into_iter();
    let wholly_free = kept.filter(|segment| segment.blocks.iter().all(|block| block.state == BlockState::Free));
    let wholly_free: Vec<String> = wholly_free.map(|segment| segment.address.to_string()).collect();
    if !wholly_free.is_empty() {
        bench.find(format!("trim kept free segments: {}", wholly_free.join(", ")));
    }
    bench.free_all();
    bench.step(&ProgramStep::Trim);
    let (held, reserved) = (bench.watch.device.held_bytes(), bench.watch.strategy.stats().current.reserved);
    if held != 0 || reserved != 0 {
        bench.find(format!("all is free and trimmed, but {held} bytes are held and {reserved} reserved"));
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn close(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, LARGE_DEVICE)?;
    bench.close();
    for _ in 0..2 {
        for bytes in [512, MIB, 5 * MIB, 15 * MIB, 30 * MIB] {
            bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
            bench.step(&ProgramStep::Alloc { bytes, stream: StreamId(1) });
        }
        // Free blocks, live blocks, and blocks that wait for a busy stream.
        bench.step(&ProgramStep::Free { nth: 4 });
        bench.step(&ProgramStep::Free { nth: 6 });
        bench.work(StreamId(2), Nanos(1_000_000_000));
        bench.used_on(0, StreamId(2));
        bench.used_on(3, StreamId(2));
        bench.step(&ProgramStep::Free { nth: 3 });
        bench.step(&ProgramStep::Free { nth: 0 });
        bench.close();
        bench.close();
    }
    found.extend(bench.finish());
    Ok(())
}

pub(super) fn random_calls(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    for (seed, capacity) in [(1, LARGE_DEVICE), (2, SMALL_DEVICE), (3, SMALL_DEVICE)] {
        let mut bench = ConformanceProgram::new(subject, capacity)?;
        bench.play(&mixed_script(seed, 300, 40 * MIB, false));
        found.extend(bench.finish());
    }
    Ok(())
}

/// A real device gives other addresses and times in every run.
fn require_deterministic(device: &dyn Device) -> Result<(), CheckSkipped> {
    match device.props().clock {
        DeviceClock::Virtual => Ok(()),
        DeviceClock::Wall => Err(CheckSkipped::NotOffered("a real device does not give the same answers twice")),
    }
}

pub(super) fn same_calls(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    require_deterministic(&*(subject.device)(SMALL_DEVICE))?;
    for capacity in [LARGE_DEVICE, SMALL_DEVICE] {
        let steps = mixed_script(21, 200, 30 * MIB, true);
        let (mut first, mut second) =
            (ConformanceProgram::new(subject, capacity)?, ConformanceProgram::new(subject, capacity)?);
        let difference = first.play(&steps).into_iter().zip(second.play(&steps)).position(|(a, b)| a != b);
        if let Some(number) = difference {
            first.find(format!("step {number}, {:?}, gave another result the second time", steps[number]));
        }
        if first.watch.device.ledger() != second.watch.device.ledger() {
            first.find("the second run made other driver calls".to_owned());
        }
        found.extend(first.finish());
    }
    Ok(())
}

pub(super) fn fork(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    require_deterministic(&*(subject.device)(SMALL_DEVICE))?;
    let (past, future) = (mixed_script(31, 150, 30 * MIB, true), mixed_script(32, 100, 30 * MIB, true));
    let (mut original, mut twin) =
        (ConformanceProgram::new(subject, SMALL_DEVICE)?, ConformanceProgram::new(subject, SMALL_DEVICE)?);
    original.play(&past);
    twin.play(&past);
    // The copy continues on the twin's device, which is in the same state.
    let Some(mut copy) = original.fork(twin.watch.device) else {
        found.extend(original.finish());
        return Err(CheckSkipped::NotOffered("the strategy cannot be copied"));
    };
    let (stats, layout) = (original.watch.strategy.stats(), original.watch.strategy.layout());
    if copy.watch.strategy.stats() != stats || copy.watch.strategy.layout() != layout {
        original.find("the copy has other counters or another layout".to_owned());
    }
    let results_of_copy = copy.play(&future);
    if original.watch.strategy.stats() != stats || original.watch.strategy.layout() != layout {
        original.find("calls on the copy changed the original".to_owned());
    }
    let difference = original.play(&future).into_iter().zip(results_of_copy).position(|(a, b)| a != b);
    if let Some(number) = difference {
        original.find(format!("step {number}, {:?}, gave another result in the copy", future[number]));
    }
    found.extend(original.finish());
    found.extend(copy.finish());
    Ok(())
}

const OTHER_STREAM: StreamId = StreamId(1);
/// Longer than all driver calls of a check together.
const LONG: Nanos = Nanos(10_000_000_000);
/// The same on a real device, where the check waits for it. Memory that is handed out after the
/// work is not checked.
const LONG_ENOUGH: Nanos = Nanos(300_000_000);

pub(super) fn used_elsewhere(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    for bytes in [512, 100 * KIB, 5 * MIB, 30 * MIB] {
        let mut bench = busy_program(subject, LARGE_DEVICE, OTHER_STREAM)?;
        bench.alloc(bytes, STREAM);
        bench.used_on(0, OTHER_STREAM);
        bench.free(0);
        // The program checks whether any of these is handed out too early.
        for _ in 0..3 {
            bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
            bench.step(&ProgramStep::Alloc { bytes, stream: OTHER_STREAM });
            bench.step(&ProgramStep::Alloc { bytes, stream: StreamId(2) });
        }
        bench.step(&ProgramStep::DeviceSync);
        bench.step(&ProgramStep::Alloc { bytes, stream: STREAM });
        let usage = bench.watch.strategy.stats().current;
        if usage.active != usage.allocated {
            let waiting = usage.active - usage.allocated;
            bench.find(format!("{waiting} bytes still wait although all work is done and an alloc has followed"));
        }
        found.extend(bench.finish());
    }
    Ok(())
}

pub(super) fn other_stream(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    for bytes in [512, 100 * KIB, 5 * MIB, 30 * MIB] {
        let mut bench = busy_program(subject, LARGE_DEVICE, OTHER_STREAM)?;
        bench.alloc(bytes, OTHER_STREAM);
        bench.free(0);
        for stream in [STREAM, StreamId(2), STREAM] {
            bench.step(&ProgramStep::Alloc { bytes, stream });
        }
        found.extend(bench.finish());
    }
    Ok(())
}

pub(super) fn random_calls_on_busy_streams(
    subject: &ConformanceSubject<'_>,
    found: &mut Vec<String>,
) -> Result<(), CheckSkipped> {
    for (seed, capacity) in [(41, LARGE_DEVICE), (42, SMALL_DEVICE), (43, SMALL_DEVICE)] {
        let mut bench = busy_program(subject, capacity, STREAM)?;
        bench.play(&mixed_script(seed, 300, 40 * MIB, true));
        found.extend(bench.finish());
    }
    Ok(())
}

/// A program with one stream busy for long.
fn busy_program(
    subject: &ConformanceSubject<'_>,
    capacity: u64,
    stream: StreamId,
) -> Result<ConformanceProgram, CheckSkipped> {
    let mut bench = ConformanceProgram::new(subject, capacity)?;
    let long = match bench.watch.device.props().clock {
        DeviceClock::Virtual => LONG,
        DeviceClock::Wall => LONG_ENOUGH,
    };
    match bench.work(stream, long) {
        StepOutcome::LeftOut => Err(MissingCapabilities(Capabilities::COMPUTE).into()),
        _ => Ok(bench),
    }
}

/// On a real device, failing every call would take minutes: this many of each kind fail, spread
/// over the program.
const FAILURES_ON_A_REAL_DEVICE: u64 = 6;

/// Runs one program repeatedly, each time with another driver call failing once.
pub(super) fn driver_failures(subject: &ConformanceSubject<'_>, found: &mut Vec<String>) -> Result<(), CheckSkipped> {
    let mut steps = mixed_script(51, 70, 30 * MIB, true);
    // In any case, a block that other streams use is freed, and memory is requested right after.
    steps.extend([ProgramStep::Alloc { bytes: MIB, stream: StreamId(0) }]);
    steps.extend([1, 2].map(|user| ProgramStep::Work { stream: StreamId(user), nanos: Nanos(100_000) }));
    steps.extend([0, 1, 2].map(|user| ProgramStep::UsedOn { nth: 0, stream: StreamId(user) }));
    steps.extend([
        ProgramStep::Free { nth: 0 },
        ProgramStep::Alloc { bytes: 3 * MIB, stream: StreamId(0) },
        ProgramStep::Trim,
    ]);
    // Equal steps, with blocks freed in the next step: strategies that learn from steps have
    // something to learn.
    for _ in 0..6 {
        let mut step = vec![ProgramStep::NextStep];
        step.extend([3 * MIB, 2 * MIB, 5 * MIB].map(|bytes| ProgramStep::Alloc { bytes, stream: StreamId(0) }));
        step.extend([0; 3].map(|nth| ProgramStep::Free { nth }));
        steps.extend(step);
    }
    let mut rehearsal = ConformanceProgram::new(subject, SMALL_DEVICE)?;
    rehearsal.play(&steps);
    rehearsal.wind_down();
    for (kind, tally) in rehearsal.watch.device.ledger().iter() {
        let step = match rehearsal.watch.device.props().clock {
            DeviceClock::Virtual => 1,
            DeviceClock::Wall => tally.count.div_ceil(FAILURES_ON_A_REAL_DEVICE).max(1),
        };
        for turn in (1..=tally.count).step_by(step as usize) {
            for fault in faults_of(kind) {
                let plan = FaultPlan::none().fail_nth(Some(kind), turn, fault);
                let device = Box::new(FaultyDevice::with(plan, (subject.device)(SMALL_DEVICE)));
                let mut bench = ConformanceProgram::on(device, subject)?;
                bench.play(&steps);
                bench.wind_down();
                if bench.watch.errors.len() > 1 {
                    bench.find(format!("one fault became {} errors", bench.watch.errors.len()));
                }
                let findings = bench.into_findings().into_iter();
                found.extend(findings.map(|finding| format!("{kind} number {turn} fails ({fault:?}): {finding}")));
            }
        }
    }
    Ok(())
}

/// How a call of this kind may fail. Calls that take memory may also run out of it.
fn faults_of(kind: CallKind) -> Vec<CallFailure> {
    let mut faults = vec![CallFailure::UNKNOWN];
    if matches!(kind, CallKind::MemAlloc | CallKind::MemCreate | CallKind::MemAllocAsync) {
        faults.push(CallFailure::OutOfMemory);
    }
    faults
}

//! The programs that are played under faults.
//!
//! Each is short, because it is played once for every driver call that it causes. Together they
//! lead a strategy through everything that it asks of a device: growth, reuse, release and retry,
//! mapping and unmapping, events, repeated steps, trims, and the last page of the device.

use crate::{
    base::{KIB, MIB, Nanos, StreamId, TagId, Work},
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder},
};

/// Long enough that a stream is still busy when its blocks are freed.
const BUSY: Nanos = Nanos(400_000);

/// All programs, for a device on which `memory_bytes` can be allocated in pages of `page_bytes`.
pub fn programs(memory_bytes: u64, page_bytes: u64) -> Vec<Trace> {
    vec![growth(), pressure(memory_bytes), streams(), steps(), trims(), brink(memory_bytes, page_bytes)]
}

/// A program that is being written.
struct FaultProgramWriter {
    trace: TraceBuilder,
}

impl FaultProgramWriter {
    fn new() -> FaultProgramWriter {
        FaultProgramWriter { trace: TraceBuilder::new() }
    }

    fn alloc(&mut self, bytes: u64) -> BlockSlot {
        self.alloc_on(bytes, StreamId::DEFAULT)
    }

    fn alloc_on(&mut self, bytes: u64, stream: StreamId) -> BlockSlot {
        self.trace.alloc(bytes, stream, TagId(0))
    }

    fn free(&mut self, blocks: impl IntoIterator<Item = BlockSlot>) {
        blocks.into_iter().for_each(|block| self.trace.free(block));
    }

    /// A new stream; the default one if there can be no more.
    fn stream(&mut self) -> StreamId {
        self.trace.new_stream().unwrap_or(StreamId::DEFAULT)
    }

    fn keep_busy(&mut self, stream: StreamId) {
        self.trace.work(Work::Spin { nanos: BUSY }, stream, &[]);
    }
}

/// Small and large blocks, freed out of order, and their memory reused in other sizes. Some stay
/// live to the end.
fn growth() -> Trace {
    let mut writer = FaultProgramWriter::new();
    let sizes = [512, 3 * KIB, 200 * KIB, MIB + 1, 3 * MIB, 7 * MIB, 12 * MIB, 21 * MIB];
    let blocks = sizes.map(|bytes| writer.alloc(bytes));
    writer.free([1, 5, 3, 7].map(|number| blocks[number]));
    let again = [6 * MIB, 900 * KIB, 14 * MIB, 2 * KIB].map(|bytes| writer.alloc(bytes));
    writer.free([blocks[6], again[1], blocks[4]]);
    writer.alloc(24 * MIB);
    writer.trace.finish("growth")
}

/// More than fits, in blocks that must be freed before others fit.
fn pressure(memory_bytes: u64) -> Trace {
    let mut writer = FaultProgramWriter::new();
    let piece = memory_bytes / 12;
    let blocks: Vec<BlockSlot> = (0..13).map(|number| writer.alloc(piece - number * KIB)).collect();
    writer.free(blocks.iter().copied().step_by(2));
    let middle = writer.alloc(2 * piece + MIB);
    writer.free(blocks.iter().copied().skip(1).step_by(2));
    let half = writer.alloc(memory_bytes / 2);
    writer.alloc(memory_bytes / 2);
    writer.free([middle, half]);
    writer.alloc(memory_bytes / 3);
    writer.trace.finish("pressure")
}

/// Blocks that other streams still use when they are freed, and memory that passes from stream to
/// stream.
fn streams() -> Trace {
    let mut writer = FaultProgramWriter::new();
    let (home, left, right) = (StreamId::DEFAULT, writer.stream(), writer.stream());
    for round in 0..2 {
        let small = writer.alloc_on(5 * KIB, home);
        let large = writer.alloc_on(4 * MIB, left);
        let other = writer.alloc_on(11 * MIB + round, right);
        for stream in [home, left, right] {
            writer.keep_busy(stream);
        }
        writer.trace.use_on(small, left);
        writer.trace.use_on(small, right);
        writer.trace.use_on(large, home);
        writer.free([small, large]);
        let next = writer.alloc_on(4 * MIB, right);
        writer.trace.use_on(other, left);
        writer.free([other]);
        let last = writer.alloc_on(10 * MIB, home);
        writer.free([next, last]);
        if round == 0 {
            writer.trace.stream_sync(left);
            writer.alloc_on(MIB, left);
        }
    }
    // The cache is emptied while frees are pending, and again when none is.
    let block = writer.alloc_on(2 * MIB, left);
    writer.keep_busy(right);
    writer.trace.use_on(block, right);
    writer.free([block]);
    writer.trace.empty_cache();
    writer.trace.device_sync();
    writer.trace.empty_cache();
    writer.trace.finish("streams")
}

/// Equal steps, for strategies that learn from steps, and one that differs.
fn steps() -> Trace {
    let mut writer = FaultProgramWriter::new();
    let weights = writer.alloc(9 * MIB);
    for step in 0..5 {
        writer.trace.mark(MarkKind::Step, "step", step);
        let odd = if step == 4 { 5 * MIB } else { 0 };
        let activations = [3 * MIB, 2 * MIB, 5 * MIB, 40 * KIB].map(|bytes| writer.alloc(bytes + odd));
        let gradient = writer.alloc(9 * MIB);
        writer.free(activations.into_iter().rev());
        writer.free([gradient]);
    }
    writer.free([weights]);
    writer.trace.finish("steps")
}

/// Growing blocks with the cache emptied in between, and a block left in the middle.
fn trims() -> Trace {
    let mut writer = FaultProgramWriter::new();
    for bytes in [10 * MIB, 26 * MIB, 44 * MIB] {
        let block = writer.alloc(bytes);
        let kept = writer.alloc(300 * KIB);
        let after = writer.alloc(bytes / 2);
        writer.free([block, after]);
        writer.trace.empty_cache();
        let again = writer.alloc(bytes / 2 + 1);
        writer.free([kept, again]);
    }
    writer.trace.empty_cache();
    writer.alloc(MIB);
    writer.trace.empty_cache();
    writer.trace.finish("trims")
}

/// The last pages of the device: all but one, all, one too many; and the last page beside all
/// others.
fn brink(memory_bytes: u64, page_bytes: u64) -> Trace {
    let mut writer = FaultProgramWriter::new();
    let whole = memory_bytes / page_bytes * page_bytes;
    let nearly = whole.saturating_sub(page_bytes).max(1);
    for bytes in [nearly, whole, whole + 1, nearly] {
        let block = writer.alloc(bytes);
        writer.free([block]);
    }
    let block = writer.alloc(nearly);
    let last = writer.alloc(page_bytes);
    writer.alloc(1);
    writer.free([last]);
    writer.alloc(page_bytes / 2);
    writer.free([block]);
    writer.alloc(whole / 2);
    writer.trace.finish("brink")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::check;

    #[test]
    fn programs_are_valid_and_short() {
        for program in programs(96 * MIB, 2 * MIB) {
            check(&program).unwrap();
            assert!(program.events.len() < 80, "{}: {} events", program.name, program.events.len());
        }
    }

    #[test]
    fn programs_exist_for_any_memory() {
        for memory_bytes in [2 * MIB, 13 * MIB + 5, 1 << 40] {
            programs(memory_bytes, 2 * MIB).iter().for_each(|program| drop(check(program).unwrap()));
        }
    }
}

//! The programs that are played while something befalls the strategy.
//!
//! Each is short, because it is played once for every driver call that it leads to, and together they lead a strategy
//! through everything that it asks of a device: growth, reuse, release and retry, mapping and unmapping, events, steps that
//! are alike, trims, and the last page of the device.

use crate::{
    base::{KIB, MIB, Nanos, StreamId, TagId, Work},
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder},
};

/// Long enough that a stream is still at it when its blocks are freed.
const BUSY: Nanos = Nanos(400_000);

/// All stories, for a device on which `memory_bytes` can be allocated in pages of `page_bytes`.
#[must_use]
pub fn stories(memory_bytes: u64, page_bytes: u64) -> Vec<Trace> {
    vec![growth(), pressure(memory_bytes), streams(), steps(), trims(), brink(memory_bytes, page_bytes)]
}

/// A story that is being written.
struct Writer {
    story: TraceBuilder,
}

impl Writer {
    fn new() -> Writer {
        Writer { story: TraceBuilder::new() }
    }

    fn alloc(&mut self, bytes: u64) -> BlockSlot {
        self.alloc_on(bytes, StreamId::DEFAULT)
    }

    fn alloc_on(&mut self, bytes: u64, stream: StreamId) -> BlockSlot {
        self.story.alloc(bytes, stream, TagId(0))
    }

    fn free(&mut self, blocks: impl IntoIterator<Item = BlockSlot>) {
        blocks.into_iter().for_each(|block| self.story.free(block));
    }

    /// A new stream; the default one where there can be no more.
    fn stream(&mut self) -> StreamId {
        self.story.new_stream().unwrap_or(StreamId::DEFAULT)
    }

    fn keep_busy(&mut self, stream: StreamId) {
        self.story.work(Work::Spin { nanos: BUSY }, stream, &[]);
    }
}

/// Small and large blocks, freed out of order, and their memory used again in other sizes. Some live on to the end.
fn growth() -> Trace {
    let mut writer = Writer::new();
    let sizes = [512, 3 * KIB, 200 * KIB, MIB + 1, 3 * MIB, 7 * MIB, 12 * MIB, 21 * MIB];
    let blocks = sizes.map(|bytes| writer.alloc(bytes));
    writer.free([1, 5, 3, 7].map(|number| blocks[number]));
    let again = [6 * MIB, 900 * KIB, 14 * MIB, 2 * KIB].map(|bytes| writer.alloc(bytes));
    writer.free([blocks[6], again[1], blocks[4]]);
    writer.alloc(24 * MIB);
    writer.story.finish("growth")
}

/// More than fits, in pieces that must be given back before others fit.
fn pressure(memory_bytes: u64) -> Trace {
    let mut writer = Writer::new();
    let piece = memory_bytes / 12;
    let blocks: Vec<BlockSlot> = (0..13).map(|number| writer.alloc(piece - number * KIB)).collect();
    writer.free(blocks.iter().copied().step_by(2));
    let middle = writer.alloc(2 * piece + MIB);
    writer.free(blocks.iter().copied().skip(1).step_by(2));
    let half = writer.alloc(memory_bytes / 2);
    writer.alloc(memory_bytes / 2);
    writer.free([middle, half]);
    writer.alloc(memory_bytes / 3);
    writer.story.finish("pressure")
}

/// Blocks that other streams are still working on when they are freed, and memory that passes from stream to stream.
fn streams() -> Trace {
    let mut writer = Writer::new();
    let (home, left, right) = (StreamId::DEFAULT, writer.stream(), writer.stream());
    for round in 0..2 {
        let small = writer.alloc_on(5 * KIB, home);
        let large = writer.alloc_on(4 * MIB, left);
        let other = writer.alloc_on(11 * MIB + round, right);
        for stream in [home, left, right] {
            writer.keep_busy(stream);
        }
        writer.story.use_on(small, left);
        writer.story.use_on(small, right);
        writer.story.use_on(large, home);
        writer.free([small, large]);
        let next = writer.alloc_on(4 * MIB, right);
        writer.story.use_on(other, left);
        writer.free([other]);
        let last = writer.alloc_on(10 * MIB, home);
        writer.free([next, last]);
        if round == 0 {
            writer.story.stream_sync(left);
            writer.alloc_on(MIB, left);
        }
    }
    // The cache is emptied while frees wait, and again when nothing does.
    let block = writer.alloc_on(2 * MIB, left);
    writer.keep_busy(right);
    writer.story.use_on(block, right);
    writer.free([block]);
    writer.story.empty_cache();
    writer.story.device_sync();
    writer.story.empty_cache();
    writer.story.finish("streams")
}

/// Steps that are alike, so that what learns from steps has something to learn, and one that is not.
fn steps() -> Trace {
    let mut writer = Writer::new();
    let weights = writer.alloc(9 * MIB);
    for step in 0..5 {
        writer.story.mark(MarkKind::Step, "step", step);
        let odd = if step == 4 { 5 * MIB } else { 0 };
        let activations = [3 * MIB, 2 * MIB, 5 * MIB, 40 * KIB].map(|bytes| writer.alloc(bytes + odd));
        let gradient = writer.alloc(9 * MIB);
        writer.free(activations.into_iter().rev());
        writer.free([gradient]);
    }
    writer.free([weights]);
    writer.story.finish("steps")
}

/// Memory that comes and goes: blocks ever larger, the cache emptied in between, a block left in the middle.
fn trims() -> Trace {
    let mut writer = Writer::new();
    for bytes in [10 * MIB, 26 * MIB, 44 * MIB] {
        let block = writer.alloc(bytes);
        let kept = writer.alloc(300 * KIB);
        let after = writer.alloc(bytes / 2);
        writer.free([block, after]);
        writer.story.empty_cache();
        let again = writer.alloc(bytes / 2 + 1);
        writer.free([kept, again]);
    }
    writer.story.empty_cache();
    writer.alloc(MIB);
    writer.story.empty_cache();
    writer.story.finish("trims")
}

/// The last pages of the device: all but one, all, one too many; and the last page beside all others.
fn brink(memory_bytes: u64, page_bytes: u64) -> Trace {
    let mut writer = Writer::new();
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
    writer.story.finish("brink")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::check;

    #[test]
    fn every_story_holds_together_and_is_short() {
        for story in stories(96 * MIB, 2 * MIB) {
            check(&story).unwrap();
            assert!(story.events.len() < 80, "{}: {} events", story.name, story.events.len());
        }
    }

    #[test]
    fn stories_can_be_written_for_a_device_of_any_size() {
        for memory_bytes in [2 * MIB, 13 * MIB + 5, 1 << 40] {
            stories(memory_bytes, 2 * MIB).iter().for_each(|story| drop(check(story).unwrap()));
        }
    }
}

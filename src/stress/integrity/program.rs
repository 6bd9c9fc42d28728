//! The programs of `stress integrity` and `stress soak` as traces: many threads and streams at high
//! occupancy, so that memory is reused at once.
//!
//! Three steps in a row are alike, because some strategies learn from one step what the next will
//! request. Within a step blocks are allocated and freed on streams that are often busy; some are
//! also used on another stream, some are freed by another thread, and now and then cached memory is
//! released. Between such groups of steps some of the long-lived blocks are replaced. At the end
//! everything is freed.

use std::{fmt, str::FromStr};

use crate::{
    base::{Bytes, GIB, KIB, MIB, Nanos, StreamId, TagId, ThreadId, Work},
    models::{PowerLaw, SeededRandom},
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder},
};

/// Exponent of the power law: small blocks are most numerous, large ones hold most of the memory.
const TAIL_EXPONENT: f64 = 0.25;

/// A range of block sizes in which small ones are more frequent. Users type `small`, `mixed`,
/// `large`, or the two ends of a range.
///
/// ```
/// use oomph::stress::BlockSizes;
/// let sizes: BlockSizes = "512..2MiB".parse()?;
/// assert_eq!(sizes.to_string(), "512..2097152");
/// assert!("2MiB..512".parse::<BlockSizes>().is_err());
/// # Ok::<(), oomph::stress::BlockSizesError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    least: u64,
    most: u64,
}

/// A text that is not a range of sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a range of sizes; write small, mixed, large, or a range such as 512..2MiB")]
pub struct BlockSizesError(String);

impl BlockSizes {
    /// 1 byte to 64 KiB: many blocks.
    pub const SMALL: BlockSizes = BlockSizes { least: 1, most: 64 * KIB };
    /// 1 byte to 32 MiB, of every order of magnitude.
    pub const MIXED: BlockSizes = BlockSizes { least: 1, most: 32 * MIB };
    /// 1 MiB to 1 GiB: many bytes.
    pub const LARGE: BlockSizes = BlockSizes { least: MIB, most: GIB };

    /// The same range, cut off at a size.
    pub fn up_to(self, most: u64) -> BlockSizes {
        let most = most.clamp(1, self.most);
        BlockSizes { least: self.least.min(most), most }
    }

    /// Draws a size.
    pub(super) fn draw(self, random: &mut SeededRandom) -> u64 {
        PowerLaw::new(self.least, self.most, TAIL_EXPONENT).draw(random)
    }
}

impl FromStr for BlockSizes {
    type Err = BlockSizesError;

    fn from_str(text: &str) -> Result<BlockSizes, BlockSizesError> {
        let refused = || BlockSizesError(text.to_owned());
        let size = |part: &str| part.trim().parse::<Bytes>().map(|Bytes(bytes)| bytes).map_err(|_| refused());
        match text.trim() {
            "small" => Ok(BlockSizes::SMALL),
            "mixed" => Ok(BlockSizes::MIXED),
            "large" => Ok(BlockSizes::LARGE),
            range => {
                let (least, most) = range.split_once("..").ok_or_else(refused)?;
                let sizes = BlockSizes { least: size(least)?, most: size(most)? };
                if sizes.least == 0 || sizes.least > sizes.most { Err(refused()) } else { Ok(sizes) }
            }
        }
    }
}

impl fmt::Display for BlockSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.least, self.most)
    }
}

/// Blocks of one step.
const STEP_BLOCKS: u64 = 200;
/// The most long-lived blocks.
const LONG_LIVED_BLOCKS: usize = 20_000;
/// Steps in a row that are alike.
const ALIKE: u64 = 3;
/// The longest time that a stream is kept busy.
const LONGEST_SPIN_NS: u64 = 200_000;

/// The properties of a program.
#[derive(Clone, Copy, Debug)]
pub struct ProgramMix {
    /// Host threads.
    pub threads: u16,
    /// Streams, the default one among them.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: BlockSizes,
    /// The most live bytes.
    pub live_bytes: u64,
    /// The most live bytes of long-lived blocks.
    pub long_lived_bytes: u64,
    /// One in this many long-lived blocks is replaced between groups of steps.
    pub replaced_one_in: usize,
}

/// A live block and the thread that requested it.
#[derive(Clone, Copy, Debug)]
struct WrittenBlock {
    slot: BlockSlot,
    bytes: u64,
    thread: ThreadId,
}

struct IntegrityWriter<'a> {
    mix: &'a ProgramMix,
    trace: TraceBuilder,
    streams: Vec<StreamId>,
    live_bytes: u64,
}

/// Writes a program of about this many blocks.
pub fn integrity_program(mix: &ProgramMix, seed: u64, blocks: u64) -> Trace {
    let mut trace = TraceBuilder::new();
    let mut streams = vec![StreamId::DEFAULT];
    while streams.len() < usize::from(mix.streams.max(1))
        && let Ok(stream) = trace.new_stream()
    {
        streams.push(stream);
    }
    let mut writer = IntegrityWriter { mix, trace, streams, live_bytes: 0 };
    let mut random = SeededRandom::new(seed, "integrity between steps");
    let mut long_lived: Vec<WrittenBlock> = Vec::new();
    for step in 0..blocks.div_ceil(STEP_BLOCKS).max(1) {
        let chapter = step / ALIKE;
        if step.is_multiple_of(ALIKE) {
            writer.replace_long_lived(&mut random, &mut long_lived);
        }
        writer.trace.mark(MarkKind::Step, "step", step as u32);
        // Steps of one group use the same seed.
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(chapter);
        writer.step(&mut SeededRandom::new(seed, "integrity step"));
    }
    for held in long_lived {
        writer.free(held);
    }
    writer.trace.device_sync();
    writer.trace.finish("integrity")
}

impl IntegrityWriter<'_> {
    /// Replaces some of the long-lived blocks.
    fn replace_long_lived(&mut self, random: &mut SeededRandom, long_lived: &mut Vec<WrittenBlock>) {
        self.trace.mark(MarkKind::Phase, "replace long-lived blocks", 0);
        for _ in 0..long_lived.len() / self.mix.replaced_one_in.max(1) {
            let place = random.index(long_lived.len());
            self.free(long_lived.swap_remove(place));
        }
        while self.live_bytes < self.mix.long_lived_bytes && long_lived.len() < LONG_LIVED_BLOCKS {
            let (held, _) = self.alloc(random);
            long_lived.push(held);
        }
    }

    fn step(&mut self, random: &mut SeededRandom) {
        let mut held: Vec<WrittenBlock> = Vec::new();
        for _ in 0..STEP_BLOCKS {
            if random.chance(0.2) {
                self.keep_busy(random);
            }
            let (block, home) = self.alloc(random);
            held.push(block);
            if random.chance(0.25) {
                self.use_elsewhere(random, block, home);
            }
            while self.live_bytes > self.mix.live_bytes || (!held.is_empty() && random.chance(0.4)) {
                if held.is_empty() {
                    break;
                }
                let place = random.index(held.len());
                let gone = held.swap_remove(place);
                self.free_by_any_thread(random, gone);
            }
            if random.chance(0.01) {
                self.trace.empty_cache();
            }
            if random.chance(0.01) {
                let stream = self.streams[random.index(self.streams.len())];
                self.trace.stream_sync(stream);
            }
        }
        for block in held {
            self.free(block);
        }
    }

    fn alloc(&mut self, random: &mut SeededRandom) -> (WrittenBlock, StreamId) {
        let thread = ThreadId(random.index(usize::from(self.mix.threads.max(1))) as u16);
        let stream = self.streams[random.index(self.streams.len())];
        let bytes = self.mix.sizes.draw(random);
        self.trace.set_thread(thread);
        let slot = self.trace.alloc(bytes, stream, TagId(0));
        self.live_bytes += bytes;
        (WrittenBlock { slot, bytes, thread }, stream)
    }

    fn free(&mut self, held: WrittenBlock) {
        self.trace.set_thread(held.thread);
        self.trace.free(held.slot);
        self.live_bytes -= held.bytes;
    }

    fn free_by_any_thread(&mut self, random: &mut SeededRandom, held: WrittenBlock) {
        let thread = match random.chance(0.2) {
            true => ThreadId(random.index(usize::from(self.mix.threads.max(1))) as u16),
            false => held.thread,
        };
        self.free(WrittenBlock { thread, ..held });
    }

    /// Queues work, so that a stream reaches what is queued next only later.
    fn keep_busy(&mut self, random: &mut SeededRandom) {
        let stream = self.streams[random.index(self.streams.len())];
        let nanos = Nanos(random.between(1_000, LONGEST_SPIN_NS));
        self.trace.work(Work::Spin { nanos }, stream, &[]);
    }

    fn use_elsewhere(&mut self, random: &mut SeededRandom, block: WrittenBlock, home: StreamId) {
        let others: Vec<StreamId> = self.streams.iter().copied().filter(|&stream| stream != home).collect();
        if others.is_empty() {
            return;
        }
        let other = others[random.index(others.len())];
        if random.chance(0.5) {
            let nanos = Nanos(random.between(1_000, LONGEST_SPIN_NS));
            self.trace.work(Work::Spin { nanos }, other, &[]);
        }
        self.trace.use_on(block.slot, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        trace::{OpKind, check},
    };

    const MIX: ProgramMix = ProgramMix {
        threads: 4,
        streams: 3,
        sizes: BlockSizes::MIXED,
        live_bytes: 64 * MIB,
        long_lived_bytes: 32 * MIB,
        replaced_one_in: 3,
    };

    #[test]
    fn program_is_valid_and_frees_everything() {
        let program = integrity_program(&MIX, 1, 1_000);
        let summary = check(&program).unwrap();
        assert_eq!(summary.streams, 3);
        let blocks = summary.count(OpKind::Alloc);
        assert!(blocks >= 1_000, "{blocks}");
        assert_eq!(blocks, summary.count(OpKind::Free));
        assert!(summary.count(OpKind::Use) > blocks / 8);
        assert!(summary.count(OpKind::EmptyCache) > 2 && summary.count(OpKind::Work) > 100);
    }

    #[test]
    fn program_is_determined_by_seed() {
        let events = |seed| integrity_program(&MIX, seed, 400).events;
        assert_eq!(events(1), events(1));
        assert_ne!(events(1), events(2));
    }

    #[test]
    fn three_steps_are_alike() {
        let program = integrity_program(&MIX, 1, 1_200);
        let steps: Vec<Vec<u64>> = program
            .events
            .chunk_by(|_, next| !matches!(next.op, crate::trace::Op::Mark { .. }))
            .map(|step| {
                let sizes = step.iter().filter_map(|event| match event.op {
                    crate::trace::Op::Alloc { bytes, .. } => Some(bytes),
                    _ => None,
                });
                sizes.take(STEP_BLOCKS as usize).collect()
            })
            .collect();
        assert_eq!(steps[1], steps[2]);
        assert_ne!(steps[2], steps[4]);
    }

    #[test]
    fn drawn_sizes_cover_the_range() {
        let (sizes, mut random) = (BlockSizes::MIXED.up_to(MIB), SeededRandom::new(1, "sizes"));
        let drawn: Vec<u64> = (0..20_000).map(|_| sizes.draw(&mut random)).collect();
        assert!(drawn.iter().all(|bytes| (1..=MIB).contains(bytes)));
        assert!(drawn.iter().any(|&bytes| bytes < 8) && drawn.iter().any(|&bytes| bytes > MIB / 2));
    }

    #[test]
    fn invalid_ranges_are_refused() {
        for text in ["", "huge", "0..5", "5..4", "1..x", "7"] {
            assert!(text.parse::<BlockSizes>().unwrap_err().to_string().contains("512..2MiB"), "{text}");
        }
        assert_eq!("large".parse::<BlockSizes>().unwrap().up_to(512), BlockSizes { least: 512, most: 512 });
    }
}

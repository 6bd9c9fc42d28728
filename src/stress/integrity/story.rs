//! The program as a trace: blocks of many threads on many streams at high occupancy, so that memory is reused at once.
//!
//! Steps come in threes that are alike, because some strategies learn from a step what the next will ask for. Within a
//! step blocks come and go, on streams that are often busy; some are also used on another stream, some are freed by a
//! thread that did not ask for them, and now and then cached memory is given back. Between the threes some of the blocks
//! are replaced that outlive steps. At the end everything is freed.

use super::Sizes;
use crate::{
    base::{Nanos, StreamId, TagId, ThreadId, Work},
    models::SeededRandom,
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder},
};

/// Blocks of one step.
const STEP_BLOCKS: u64 = 200;
/// The most blocks that outlive steps.
const LASTING_BLOCKS: usize = 20_000;
/// Steps in a row that are alike.
const ALIKE: u64 = 3;
/// How long a stream is kept busy at most.
const LONGEST_SPIN_NS: u64 = 200_000;

/// What the program is like.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    /// Host threads.
    pub threads: u16,
    /// Streams, the default one among them.
    pub streams: u16,
    /// Sizes of blocks.
    pub sizes: Sizes,
    /// How many bytes live at most.
    pub live_bytes: u64,
    /// How many of them outlive steps.
    pub lasting_bytes: u64,
    /// One in so many of those is replaced now and then.
    pub replaced_one_in: usize,
}

/// A block that lives, by whom it was asked for.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: BlockSlot,
    bytes: u64,
    thread: ThreadId,
}

struct Author<'a> {
    mixture: &'a Mixture,
    story: TraceBuilder,
    streams: Vec<StreamId>,
    live_bytes: u64,
}

/// Writes a program of about so many blocks.
#[must_use]
pub fn story(mixture: &Mixture, seed: u64, blocks: u64) -> Trace {
    let mut story = TraceBuilder::new();
    let mut streams = vec![StreamId::DEFAULT];
    while streams.len() < usize::from(mixture.streams.max(1))
        && let Ok(stream) = story.new_stream()
    {
        streams.push(stream);
    }
    let mut author = Author { mixture, story, streams, live_bytes: 0 };
    let mut dice = SeededRandom::new(seed, "integrity between steps");
    let mut lasting: Vec<Held> = Vec::new();
    for step in 0..blocks.div_ceil(STEP_BLOCKS).max(1) {
        let chapter = step / ALIKE;
        if step.is_multiple_of(ALIKE) {
            author.replace_lasting(&mut dice, &mut lasting);
        }
        author.story.mark(MarkKind::Step, "step", step as u32);
        // The same dice for steps that are to be alike.
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(chapter);
        author.step(&mut SeededRandom::new(seed, "integrity step"));
    }
    for held in lasting {
        author.free(held);
    }
    author.story.device_sync();
    author.story.finish("integrity")
}

impl Author<'_> {
    /// Some of the blocks that outlive steps go, and others come.
    fn replace_lasting(&mut self, dice: &mut SeededRandom, lasting: &mut Vec<Held>) {
        self.story.mark(MarkKind::Phase, "replace what lasts", 0);
        for _ in 0..lasting.len() / self.mixture.replaced_one_in.max(1) {
            let place = dice.index(lasting.len());
            self.free(lasting.swap_remove(place));
        }
        while self.live_bytes < self.mixture.lasting_bytes && lasting.len() < LASTING_BLOCKS {
            let (held, _) = self.alloc(dice);
            lasting.push(held);
        }
    }

    fn step(&mut self, dice: &mut SeededRandom) {
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..STEP_BLOCKS {
            if dice.chance(0.2) {
                self.keep_busy(dice);
            }
            let (block, home) = self.alloc(dice);
            held.push(block);
            if dice.chance(0.25) {
                self.cross_over(dice, block, home);
            }
            while self.live_bytes > self.mixture.live_bytes || (!held.is_empty() && dice.chance(0.4)) {
                if held.is_empty() {
                    break;
                }
                let place = dice.index(held.len());
                let gone = held.swap_remove(place);
                self.free_by_somebody(dice, gone);
            }
            if dice.chance(0.01) {
                self.story.empty_cache();
            }
            if dice.chance(0.01) {
                let stream = self.streams[dice.index(self.streams.len())];
                self.story.stream_sync(stream);
            }
        }
        for block in held {
            self.free(block);
        }
    }

    fn alloc(&mut self, dice: &mut SeededRandom) -> (Held, StreamId) {
        let thread = ThreadId(dice.index(usize::from(self.mixture.threads.max(1))) as u16);
        let stream = self.streams[dice.index(self.streams.len())];
        let bytes = self.mixture.sizes.draw(dice);
        self.story.set_thread(thread);
        let slot = self.story.alloc(bytes, stream, TagId(0));
        self.live_bytes += bytes;
        (Held { slot, bytes, thread }, stream)
    }

    fn free(&mut self, held: Held) {
        self.story.set_thread(held.thread);
        self.story.free(held.slot);
        self.live_bytes -= held.bytes;
    }

    fn free_by_somebody(&mut self, dice: &mut SeededRandom, held: Held) {
        let thread = match dice.chance(0.2) {
            true => ThreadId(dice.index(usize::from(self.mixture.threads.max(1))) as u16),
            false => held.thread,
        };
        self.free(Held { thread, ..held });
    }

    /// A stream that has something to do gets to what is queued next only later.
    fn keep_busy(&mut self, dice: &mut SeededRandom) {
        let stream = self.streams[dice.index(self.streams.len())];
        let nanos = Nanos(dice.between(1_000, LONGEST_SPIN_NS));
        self.story.work(Work::Spin { nanos }, stream, &[]);
    }

    fn cross_over(&mut self, dice: &mut SeededRandom, block: Held, home: StreamId) {
        let others: Vec<StreamId> = self.streams.iter().copied().filter(|&stream| stream != home).collect();
        if others.is_empty() {
            return;
        }
        let away = others[dice.index(others.len())];
        if dice.chance(0.5) {
            let nanos = Nanos(dice.between(1_000, LONGEST_SPIN_NS));
            self.story.work(Work::Spin { nanos }, away, &[]);
        }
        self.story.use_on(block.slot, away);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::MIB,
        trace::{OpKind, check},
    };

    const MIXTURE: Mixture = Mixture {
        threads: 4,
        streams: 3,
        sizes: Sizes::MIXED,
        live_bytes: 64 * MIB,
        lasting_bytes: 32 * MIB,
        replaced_one_in: 3,
    };

    #[test]
    fn a_story_holds_together_keeps_to_its_memory_and_frees_everything() {
        let story = story(&MIXTURE, 1, 1_000);
        let summary = check(&story).unwrap();
        assert_eq!(summary.streams, 3);
        let blocks = summary.count(OpKind::Alloc);
        assert!(blocks >= 1_000, "{blocks}");
        assert_eq!(blocks, summary.count(OpKind::Free));
        assert!(summary.count(OpKind::Use) > blocks / 8);
        assert!(summary.count(OpKind::EmptyCache) > 2 && summary.count(OpKind::Work) > 100);
    }

    #[test]
    fn a_seed_is_a_story_and_another_is_another() {
        let events = |seed| story(&MIXTURE, seed, 400).events;
        assert_eq!(events(1), events(1));
        assert_ne!(events(1), events(2));
    }

    #[test]
    fn three_steps_in_a_row_ask_for_the_same() {
        let story = story(&MIXTURE, 1, 1_200);
        let steps: Vec<Vec<u64>> = story
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
}

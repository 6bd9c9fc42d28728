//! Random programs as traces, for [`properties`](super::properties): the same seed and number, the same program.
//!
//! A program is of one temper (how large its blocks are, how much of the memory it fills, how many streams and threads it
//! has, how busy they are), so that every corner of an allocator gets programs that live in it, and not only the average.

use crate::{
    base::{KIB, MIB, Nanos, StreamId, TagId, ThreadId, Work},
    models::SeededRandom,
    trace::{BlockSlot, MarkKind, Trace, TraceBuilder, TraceEventId},
};

/// Limits that allocators like to draw; requests right at them are as likely as all others together in one temper.
const BORDERS: [u64; 9] = [256, 512, 4 * KIB, 64 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB];

/// How large the blocks of a program are.
#[derive(Clone, Debug)]
enum Sizes {
    /// Up to a few KiB.
    Small,
    /// Every order of magnitude equally likely.
    Magnitudes,
    /// At the limits that allocators draw, and a byte to either side.
    Borders,
    /// From a MiB on.
    Large,
    /// A few sizes again and again, as in training.
    Few(Vec<u64>),
}

impl Sizes {
    fn throw(dice: &mut SeededRandom, most: u64) -> Sizes {
        match dice.between(0, 4) {
            0 => Sizes::Small,
            1 => Sizes::Magnitudes,
            2 => Sizes::Borders,
            3 => Sizes::Large,
            _ => Sizes::Few((0..dice.between(2, 5)).map(|_| Sizes::Magnitudes.draw(dice, most)).collect()),
        }
    }

    fn draw(&self, dice: &mut SeededRandom, most: u64) -> u64 {
        let bytes = match self {
            Sizes::Small => dice.between(1, 8 * KIB),
            Sizes::Magnitudes => {
                let low = 1 << dice.between(0, u64::from(most.ilog2()));
                dice.between(low, 2 * low - 1)
            }
            Sizes::Borders => BORDERS[dice.index(BORDERS.len())] + dice.between(0, 2) - 1,
            Sizes::Large => dice.between(MIB, (most).max(2 * MIB)),
            Sizes::Few(sizes) => sizes[dice.index(sizes.len())],
        };
        bytes.clamp(1, most)
    }
}

/// The program of this seed and number for a memory of so many bytes.
#[must_use]
pub fn random_program(seed: u64, number: u64, memory_bytes: u64) -> Trace {
    let mut dice = SeededRandom::new(seed, &format!("properties {number}"));
    let mut author = Author::new(&mut dice, memory_bytes.max(MIB));
    for _ in 0..dice.between(10, 160) {
        author.next(&mut dice);
    }
    if dice.chance(0.5) {
        author.wind_down(&mut dice);
    }
    author.story.finish(&format!("properties seed {seed} program {number}"))
}

/// Writes a program of one temper.
struct Author {
    story: TraceBuilder,
    sizes: Sizes,
    /// The largest request.
    most: u64,
    /// How much is to be live.
    fill: u64,
    streams: Vec<StreamId>,
    threads: u16,
    /// Per cent of the events that keep a stream busy or use blocks there.
    busy: u64,
    /// Per cent that trim, begin steps and wait for everything.
    breaks: u64,
    live: Vec<(BlockSlot, u64, StreamId)>,
    live_bytes: u64,
    host: Vec<BlockSlot>,
    recorded: Vec<TraceEventId>,
    steps: u32,
}

impl Author {
    fn new(dice: &mut SeededRandom, memory: u64) -> Author {
        let most = memory / [2, 4, 8, 16][dice.index(4)];
        let mut story = TraceBuilder::new();
        let mut streams = vec![StreamId::DEFAULT];
        for _ in 0..[0, 0, 1, 2, 3][dice.index(5)] {
            streams.extend(story.new_stream());
        }
        Author {
            story,
            sizes: Sizes::throw(dice, most),
            most,
            // From a corner of the memory to more than there is.
            fill: memory / 100 * [5, 30, 70, 95, 110][dice.index(5)],
            streams,
            threads: [1, 1, 1, 2, 4][dice.index(5)],
            busy: [0, 10, 30][dice.index(3)],
            breaks: [0, 4, 12][dice.index(3)],
            live: Vec::new(),
            live_bytes: 0,
            host: Vec::new(),
            recorded: Vec::new(),
            steps: 0,
        }
    }

    fn next(&mut self, dice: &mut SeededRandom) {
        self.story.set_thread(ThreadId(dice.between(0, u64::from(self.threads) - 1) as u16));
        if dice.chance(0.2) {
            self.story.elapse(Nanos(dice.between(1, 200_000)));
        }
        let kind = dice.between(0, 99);
        if kind < self.busy {
            self.work(dice);
        } else if kind < self.busy + self.breaks {
            self.pause(dice);
        } else if self.live_bytes < self.fill && (self.live.is_empty() || dice.chance(0.6)) {
            self.alloc(dice);
        } else if dice.chance(0.8) {
            self.free(dice);
        } else {
            // Beyond the fill now and then: running out is part of the game.
            self.alloc(dice);
        }
    }

    fn alloc(&mut self, dice: &mut SeededRandom) {
        let bytes = self.sizes.draw(dice, self.most);
        let stream = self.stream(dice);
        let slot = self.story.alloc(bytes, stream, TagId(0));
        self.live.push((slot, bytes, stream));
        self.live_bytes += bytes;
    }

    fn free(&mut self, dice: &mut SeededRandom) {
        if self.live.is_empty() {
            return;
        }
        // The newest as often as any other: stacks are common.
        let place = if dice.chance(0.5) { self.live.len() - 1 } else { dice.index(self.live.len()) };
        let (slot, bytes, home) = self.live.remove(place);
        self.live_bytes -= bytes;
        let elsewhere = self.stream(dice);
        if elsewhere != home && dice.chance(0.2) {
            // A free on another stream is the program's to order.
            let event = self.event(dice);
            self.story.event_record(event, home);
            self.story.event_wait(event, elsewhere);
            self.story.free_on(slot, elsewhere);
        } else {
            self.story.free(slot);
        }
    }

    /// Keeps a stream busy, often with a block of another one.
    fn work(&mut self, dice: &mut SeededRandom) {
        let stream = self.stream(dice);
        if !self.live.is_empty() && dice.chance(0.7) {
            let (slot, _, home) = self.live[dice.index(self.live.len())];
            if stream != home {
                self.story.use_on(slot, stream);
            }
        }
        let most = if dice.chance(0.1) { 100_000_000 } else { 2_000_000 };
        let spin = Work::Spin { nanos: Nanos(dice.between(1_000, most)) };
        self.story.work(spin, stream, &[]);
        if dice.chance(0.1) {
            let (event, waiting) = (self.event(dice), self.stream(dice));
            self.story.event_record(event, stream);
            self.story.event_wait(event, waiting);
        }
    }

    fn pause(&mut self, dice: &mut SeededRandom) {
        match dice.between(0, 9) {
            0..=2 => self.story.empty_cache(),
            3..=4 => {
                self.story.mark(MarkKind::Step, "", self.steps);
                self.steps += 1;
            }
            5..=6 => {
                let stream = self.stream(dice);
                self.story.stream_sync(stream);
            }
            7 => self.story.device_sync(),
            8 => self.host.push(self.story.host_alloc(dice.between(1, MIB))),
            _ => {
                if let Some(slot) = self.host.pop() {
                    self.story.host_free(slot);
                }
            }
        }
    }

    /// All blocks go, in an order of its own, and then the cache.
    fn wind_down(&mut self, dice: &mut SeededRandom) {
        while !self.live.is_empty() {
            let (slot, ..) = self.live.swap_remove(dice.index(self.live.len()));
            self.story.free(slot);
        }
        if dice.chance(0.5) {
            self.story.device_sync();
        }
        self.story.empty_cache();
        if dice.chance(0.5) {
            let bytes = self.sizes.draw(dice, self.most);
            self.story.alloc(bytes, StreamId::DEFAULT, TagId(0));
        }
    }

    fn stream(&self, dice: &mut SeededRandom) -> StreamId {
        self.streams[dice.index(self.streams.len())]
    }

    fn event(&mut self, dice: &mut SeededRandom) -> TraceEventId {
        if self.recorded.len() < 4 {
            self.recorded.push(self.story.new_event());
        }
        self.recorded[dice.index(self.recorded.len())]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::trace::{Op, check};

    const MEMORY: u64 = 256 * MIB;

    #[test]
    fn every_program_holds_together_and_asks_for_no_more_than_half_the_memory() {
        for number in 0..300 {
            for memory in [1, 20 * MIB, MEMORY] {
                let program = random_program(7, number, memory);
                check(&program).unwrap();
                let most = program.events.iter().filter_map(|event| match event.op {
                    Op::Alloc { bytes, .. } => Some(bytes),
                    _ => None,
                });
                assert!(most.max() <= Some(memory.max(MIB) / 2), "{number}");
            }
        }
    }

    #[test]
    fn a_seed_and_a_number_are_one_program() {
        assert_eq!(random_program(1, 2, MEMORY).events, random_program(1, 2, MEMORY).events);
        let different: BTreeSet<usize> = (0..20).map(|number| random_program(1, number, MEMORY).events.len()).collect();
        assert!(different.len() > 10);
        assert_ne!(random_program(1, 2, MEMORY).events, random_program(2, 2, MEMORY).events);
    }

    #[test]
    fn among_a_hundred_programs_everything_happens() {
        let mut kinds = BTreeSet::new();
        let (mut streams, mut threads) = (0, 0);
        for number in 0..100 {
            let program = random_program(1, number, MEMORY);
            kinds.extend(program.events.iter().map(|event| event.op.kind()));
            streams = streams.max(program.tables.streams().len());
            threads = threads.max(program.tables.threads().len());
        }
        // Ranks and long pauses are nothing to an allocator.
        assert_eq!((kinds.len(), streams, threads), (12, 4, 4), "{kinds:?}");
    }
}

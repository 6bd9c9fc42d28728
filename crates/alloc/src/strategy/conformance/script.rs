//! Calls to play, made up from a seed.

use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use super::Bench;
use oomph_base::{KIB, MIB, Nanos, StreamId};

/// One thing that a program does. Blocks are named by their place among the live ones, counted round and round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Asks for memory.
    Alloc {
        /// How much.
        bytes: u64,
        /// On which stream.
        stream: StreamId,
    },
    /// Gives a block back.
    Free {
        /// Which.
        nth: usize,
    },
    /// Uses a block on another stream.
    UsedOn {
        /// Which.
        nth: usize,
        /// Where.
        stream: StreamId,
    },
    /// Keeps a stream busy.
    Work {
        /// Which.
        stream: StreamId,
        /// How long.
        nanos: Nanos,
    },
    /// Waits for a stream.
    StreamSync {
        /// Which.
        stream: StreamId,
    },
    /// Waits for all streams.
    DeviceSync,
    /// Empties the cache.
    Trim,
    /// Begins the next step of the program.
    NextStep,
}

/// A random program of `length` steps: about as many frees as allocs, sizes from bytes to `largest` with every order
/// of magnitude equally likely, work and uses on three streams if `busy`.
#[must_use]
pub fn mixed_script(seed: u64, length: usize, largest: u64, busy: bool) -> Vec<Step> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let streams = if busy { Bench::STREAMS } else { 1 };
    (0..length)
        .map(|_| {
            let stream = StreamId(random.random_range(0..streams));
            let nth = random.random_range(0..1 << 16);
            match random.random_range(0..100) {
                0..42 => Step::Alloc { bytes: size(&mut random, largest), stream },
                42..44 => Step::NextStep,
                44..82 => Step::Free { nth },
                82..88 if busy => Step::UsedOn { nth, stream },
                88..96 if busy => Step::Work { stream, nanos: Nanos(random.random_range(1_000..2_000_000)) },
                96..98 if busy => Step::StreamSync { stream },
                98 => Step::DeviceSync,
                99 => Step::Trim,
                _ => Step::Alloc { bytes: size(&mut random, largest), stream },
            }
        })
        .collect()
}

fn size(random: &mut ChaCha8Rng, largest: u64) -> u64 {
    // Requests around the limits that allocators like to draw are as likely as all others together.
    const BORDERS: [u64; 8] = [256, 512, KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB];
    let bytes = if random.random_bool(0.5) {
        BORDERS[random.random_range(0..BORDERS.len())] + random.random_range(0..3) - 1
    } else {
        let magnitude = random.random_range(0..=largest.max(1).ilog2());
        (1 << magnitude) + random.random_range(0..1 << magnitude)
    };
    bytes.clamp(1, largest)
}

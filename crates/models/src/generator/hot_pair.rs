//! The hot pair: one block is asked for and given back, again and again.
//!
//! After the first pair a cache serves every request from the block it holds, so what is timed is the shortest path
//! through an allocator. Nothing lives at the end.

use super::{Generator, GeneratorEntry, start};
use crate::Parameter;
use oomph_base::{GIB, StreamId, TagId};
use oomph_trace::{MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "hot_pair",
    summary: "asks for one block and gives it back, again and again: the shortest path through an allocator",
    seeded: false,
    parameters: &[
        Parameter::count("pairs", 1..=100_000_000, "200000", "how often"),
        Parameter::size("bytes", 1..=64 * GIB, "4KiB", "size of the block"),
    ],
    build: |parameters| {
        let (pairs, bytes) = (parameters.count("pairs")?, parameters.size("bytes")?);
        Ok(start(move |_| HotPair { left: pairs, bytes, part: 0 }))
    },
};

/// Pairs written at a time.
const PART: u32 = 1024;

struct HotPair {
    left: u32,
    bytes: u64,
    part: u32,
}

impl Generator for HotPair {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        let pairs = self.left.min(PART);
        if pairs == 0 {
            return false;
        }
        if self.part == 0 {
            story.mark(MarkKind::Phase, "pairs", 0);
        }
        story.mark(MarkKind::Step, "part", self.part);
        self.part += 1;
        for _ in 0..pairs {
            let block = story.alloc(self.bytes, StreamId::DEFAULT, TagId(0));
            story.free(block);
        }
        self.left -= pairs;
        true
    }

    fn left(&self) -> u64 {
        self.left.into()
    }
}

//! The checkerboard: fill, free every second block, ask for double.
//!
//! Every hole is half as large as the next request, so a strategy that cannot move or stitch memory must take new
//! memory although half of what it holds is free. With several doublings the survivors of every size stay, which is
//! how the known lower bounds for such strategies are built. A round ends by freeing everything.

use super::{Generator, GeneratorEntry, start};
use crate::Parameter;
use oomph_base::{GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "checkerboard",
    summary: "fills memory, frees every second block, asks for blocks twice as large",
    seeded: false,
    parameters: &[
        Parameter::count("rounds", 1..=1_000_000, "4", "how often the whole is done"),
        Parameter::count("blocks", 4..=1_000_000, "1024", "blocks of the first filling"),
        Parameter::size("block_bytes", 1..=64 * GIB, "4MiB", "size of the first blocks"),
        Parameter::count("doublings", 1..=9, "1", "how often the size is doubled within a round"),
    ],
    build: |parameters| {
        let checkerboard = Checkerboard {
            rounds: parameters.count("rounds")?,
            blocks: parameters.count("blocks")?,
            block_bytes: parameters.size("block_bytes")?,
            doublings: parameters.count("doublings")?,
            round: 0,
        };
        // Every doubling asks for a quarter as many blocks, in half the bytes.
        if checkerboard.blocks >> (2 * checkerboard.doublings) == 0 {
            return Err(parameters.refuse(format!(
                "{} blocks are too few for {} doublings, which need {}",
                checkerboard.blocks,
                checkerboard.doublings,
                1_u64 << (2 * checkerboard.doublings)
            )));
        }
        Ok(start(move |_| checkerboard.clone()))
    },
};

#[derive(Clone)]
struct Checkerboard {
    rounds: u32,
    blocks: u32,
    block_bytes: u64,
    doublings: u32,
    round: u32,
}

impl Generator for Checkerboard {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.round == self.rounds {
            return false;
        }
        story.mark(MarkKind::Step, "round", self.round);
        story.mark(MarkKind::Phase, "fill", self.round);
        let mut survivors = Vec::new();
        let mut newest = fill(story, self.blocks, self.block_bytes);
        for doubling in 1..=self.doublings {
            story.mark(MarkKind::Phase, "punch", doubling);
            for pair in newest.chunks(2) {
                story.free(pair[0]);
                survivors.extend(pair.get(1));
            }
            story.mark(MarkKind::Phase, "double", doubling);
            newest = fill(story, self.blocks >> (2 * doubling), self.block_bytes << doubling);
        }
        story.mark(MarkKind::Phase, "clear", self.round);
        for slot in survivors.into_iter().chain(newest) {
            story.free(slot);
        }
        self.round += 1;
        true
    }

    fn left(&self) -> u64 {
        (self.rounds - self.round).into()
    }
}

fn fill(story: &mut TraceBuilder, blocks: u32, bytes: u64) -> Vec<BlockSlot> {
    (0..blocks).map(|_| story.alloc(bytes, StreamId::DEFAULT, TagId(0))).collect()
}

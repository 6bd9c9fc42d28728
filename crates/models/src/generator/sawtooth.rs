//! The saw-tooth: memory ramps up in growing blocks, drops, and ramps up again.
//!
//! Sizes vary a little from tooth to tooth, so that what was freed almost fits and never quite; a few blocks outlive
//! the drop by one tooth and keep the memory around them from being given back. Nothing lives at the end.

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter};
use oomph_base::{GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "sawtooth",
    summary: "ramps up in growing blocks, drops, and starts again with slightly other sizes",
    seeded: true,
    parameters: &[
        Parameter::count("teeth", 1..=10_000_000, "20", "how often memory ramps up and drops"),
        Parameter::count("blocks", 1..=100_000, "256", "blocks on a ramp"),
        Parameter::size("min_bytes", 1..=64 * GIB, "1MiB", "size of the first block of a ramp"),
        Parameter::size("max_bytes", 1..=64 * GIB, "32MiB", "size of the last block of a ramp"),
        Parameter::number("jitter", 0.0..=0.9, "0.1", "how far sizes stray, as a part of the size"),
        Parameter::number("kept", 0.0..=0.9, "0.05", "chance of a block to outlive the drop by one tooth"),
    ],
    build: |parameters| {
        let (teeth, blocks) = (parameters.count("teeth")?, parameters.count("blocks")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (jitter, kept) = (parameters.number("jitter")?, parameters.number("kept")?);
        Ok(start(move |dice| Sawtooth {
            dice,
            teeth,
            blocks,
            min_bytes,
            max_bytes,
            jitter,
            kept,
            tooth: 0,
            survivors: Vec::new(),
        }))
    },
};

struct Sawtooth {
    dice: Dice,
    teeth: u32,
    blocks: u32,
    min_bytes: u64,
    max_bytes: u64,
    jitter: f64,
    kept: f64,
    tooth: u32,
    survivors: Vec<BlockSlot>,
}

impl Sawtooth {
    fn size(&mut self, place: u32) -> u64 {
        let climbed = f64::from(place) / f64::from((self.blocks - 1).max(1));
        let bytes = self.min_bytes as f64 + (self.max_bytes - self.min_bytes) as f64 * climbed;
        let stray = (bytes * self.jitter) as u64;
        self.dice.between((bytes as u64 - stray).max(1), bytes as u64 + stray)
    }
}

impl Generator for Sawtooth {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.tooth == self.teeth {
            return false;
        }
        story.mark(MarkKind::Step, "tooth", self.tooth);
        story.mark(MarkKind::Phase, "ramp", self.tooth);
        let ramp: Vec<BlockSlot> =
            (0..self.blocks).map(|place| story.alloc(self.size(place), StreamId::DEFAULT, TagId(0))).collect();
        story.mark(MarkKind::Phase, "drop", self.tooth);
        self.tooth += 1;
        for slot in std::mem::take(&mut self.survivors) {
            story.free(slot);
        }
        for slot in ramp {
            if self.tooth < self.teeth && self.dice.chance(self.kept) {
                self.survivors.push(slot);
            } else {
                story.free(slot);
            }
        }
        true
    }

    fn left(&self) -> u64 {
        (self.teeth - self.tooth).into()
    }
}

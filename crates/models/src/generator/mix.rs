//! The mix: a fixed number of places, each step replaces the block in a random one by a block of a random size.
//!
//! Sizes are even over powers of two, on a grid of 64 steps an octave, which needs no logarithm: the last bit of one
//! differs between machines. It is the recipe by which PyTorch's
//! and RMM's allocators were timed, so that the numbers can stand beside each other. Nothing lives at the end.

use std::sync::Arc;

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter};
use oomph_base::{GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "mix",
    summary: "replaces a random one of so many live blocks by one of a random size, sizes even over powers of two",
    seeded: true,
    parameters: &[
        Parameter::count("live", 1..=10_000_000, "10000", "how many blocks live at most"),
        Parameter::count("operations", 1..=1_000_000_000, "400000", "how many blocks are asked for"),
        Parameter::size("min_bytes", 1..=64 * GIB, "512B", "smallest block"),
        Parameter::size("max_bytes", 1..=64 * GIB, "4MiB", "largest block"),
    ],
    build: |parameters| {
        let (live, operations) = (parameters.count("live")?, parameters.count("operations")?);
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let sizes = sizes_even_over_octaves(min_bytes, max_bytes);
        Ok(start(move |dice| Mix {
            dice,
            sizes: sizes.clone(),
            left: operations,
            places: vec![None; live as usize],
            part: 0,
        }))
    },
};

/// `least` and every following 64th of an octave up to `most`.
pub(super) fn sizes_even_over_octaves(least: u64, most: u64) -> Arc<[u64]> {
    // Six square roots of two: every one is exact to the last bit on every machine, as is the product.
    let step = (0..6).fold(2.0_f64, |root, _| root.sqrt());
    let octave: Vec<f64> = std::iter::successors(Some(1.0), |size| Some(size * step)).take(64).collect();
    (0..64)
        .flat_map(|doublings| octave.iter().map(move |part| (least as f64 * part * 2_f64.powi(doublings)) as u64))
        .take_while(|&bytes| bytes <= most)
        .collect()
}

/// Blocks replaced at a time.
const PART: u32 = 1024;

struct Mix {
    dice: Dice,
    sizes: Arc<[u64]>,
    left: u32,
    places: Vec<Option<BlockSlot>>,
    part: u32,
}

impl Mix {
    /// The end of the story. Returns whether there was anything left to write.
    fn free_all(&mut self, story: &mut TraceBuilder) -> bool {
        let places = std::mem::take(&mut self.places);
        for block in places.iter().flatten() {
            story.free(*block);
        }
        !places.is_empty()
    }
}

impl Generator for Mix {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        let blocks = self.left.min(PART);
        if blocks == 0 {
            return self.free_all(story);
        }
        if self.part == 0 {
            story.mark(MarkKind::Phase, "mix", 0);
        }
        story.mark(MarkKind::Step, "part", self.part);
        self.part += 1;
        for _ in 0..blocks {
            let bytes = self.sizes[self.dice.index(self.sizes.len())];
            let place = self.dice.index(self.places.len());
            if let Some(block) = self.places[place].take() {
                story.free(block);
            }
            self.places[place] = Some(story.alloc(bytes, StreamId::DEFAULT, TagId(0)));
        }
        self.left -= blocks;
        true
    }

    fn left(&self) -> u64 {
        self.left.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::MIB;

    #[test]
    fn sizes_are_even_over_powers_of_two() {
        let sizes = sizes_even_over_octaves(512, 4 * MIB);
        assert_eq!((sizes[0], sizes[64], sizes[sizes.len() - 1]), (512, 1024, 4 * MIB));
        assert_eq!(sizes.len(), 13 * 64 + 1);
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

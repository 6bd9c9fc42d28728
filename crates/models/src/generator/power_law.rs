//! Sizes and lifetimes that follow power laws: most blocks are small and short-lived, a few are huge, a few stay.
//!
//! Lifetimes are counted in allocations. The few that live long are scattered over the memory of the many that do not,
//! which is what keeps a caching strategy from ever giving a segment back. Nothing lives at the end.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter, dice::PowerLaw};
use oomph_base::{GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "power_law",
    summary: "many small, short-lived blocks, a few huge ones, a few that stay",
    seeded: true,
    parameters: &[
        Parameter::count("allocations", 1..=1_000_000_000, "10000", "how many blocks are allocated in all"),
        Parameter::size("min_bytes", 1..=64 * GIB, "256KiB", "smallest size"),
        Parameter::size("max_bytes", 1..=64 * GIB, "1GiB", "largest size"),
        Parameter::number("size_exponent", 0.1..=8.0, "0.9", "tail exponent of sizes; smaller is heavier"),
        Parameter::count("min_lifetime", 1..=1_000_000, "16", "shortest life, in allocations"),
        Parameter::count("max_lifetime", 1..=100_000_000, "8192", "longest life, in allocations"),
        Parameter::number("lifetime_exponent", 0.1..=8.0, "0.8", "tail exponent of lifetimes; smaller is heavier"),
    ],
    build: |parameters| {
        let allocations = parameters.count("allocations")?;
        let (min_bytes, max_bytes) = parameters.size_range("min_bytes", "max_bytes")?;
        let (min_lifetime, max_lifetime) = (parameters.count("min_lifetime")?, parameters.count("max_lifetime")?);
        if min_lifetime > max_lifetime {
            return Err(parameters
                .refuse(format!("min_lifetime ({min_lifetime}) must not exceed max_lifetime ({max_lifetime})")));
        }
        let sizes = PowerLaw::new(min_bytes, max_bytes, parameters.number("size_exponent")?);
        let lifetimes =
            PowerLaw::new(min_lifetime.into(), max_lifetime.into(), parameters.number("lifetime_exponent")?);
        Ok(start(move |dice| HeavyTails {
            dice,
            allocations: allocations.into(),
            sizes,
            lifetimes,
            now: 0,
            deaths: BinaryHeap::new(),
        }))
    },
};

const ALLOCATIONS_PER_MARK: u64 = 500;

struct HeavyTails {
    dice: Dice,
    allocations: u64,
    sizes: PowerLaw,
    lifetimes: PowerLaw,
    /// Allocations made so far.
    now: u64,
    /// When each live block dies, the next one on top.
    deaths: BinaryHeap<Reverse<(u64, BlockSlot)>>,
}

impl HeavyTails {
    fn bury_until(&mut self, time: u64, story: &mut TraceBuilder) {
        while let Some(&Reverse((death, slot))) = self.deaths.peek()
            && death <= time
        {
            self.deaths.pop();
            story.free(slot);
        }
    }
}

impl Generator for HeavyTails {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.now == self.allocations {
            let left = !self.deaths.is_empty();
            if left {
                story.mark(MarkKind::Phase, "drain", 0);
                self.bury_until(u64::MAX, story);
            }
            return left;
        }
        if self.now == 0 {
            story.mark(MarkKind::Phase, "churn", 0);
        }
        story.mark(MarkKind::Step, "allocations", (self.now / ALLOCATIONS_PER_MARK) as u32);
        for _ in self.now..self.allocations.min(self.now + ALLOCATIONS_PER_MARK) {
            self.bury_until(self.now, story);
            let bytes = self.sizes.draw(&mut self.dice);
            let death = self.now + self.lifetimes.draw(&mut self.dice);
            self.deaths.push(Reverse((death, story.alloc(bytes, StreamId::DEFAULT, TagId(0)))));
            self.now += 1;
        }
        true
    }

    fn left(&self) -> u64 {
        self.allocations - self.now
    }
}

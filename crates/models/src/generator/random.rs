//! Random sizes, random order: the recipe of RMM's random-allocations benchmark.
//!
//! With `n` allocations asked for, `2n` steps are made. Each draws a size; it allocates with a chance of 73 % if fewer
//! than `n` were made and the live bytes stay below the limit, otherwise it frees a live block picked at random. With
//! nothing alive it always allocates. So there are exactly `n` allocs and `n` frees, and nothing lives at the end.
//! RMM turns a failed allocation into a free; here that is the replay's decision.

use super::{Generator, GeneratorEntry, start};
use crate::{Dice, Parameter};
use oomph_base::{Bytes, GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "random",
    summary: "random sizes allocated and freed in random order (RMM's benchmark)",
    seeded: true,
    parameters: &[
        Parameter::count("allocations", 1..=1_000_000_000, "10000", "how many blocks are allocated in all"),
        Parameter::size("max_bytes", 1..=1024 * GIB, "64MiB", "sizes are even from 1 byte to this"),
        Parameter::size("live_limit", 1..=1024 * GIB, "16000MiB", "no allocation that would bring the live bytes here"),
    ],
    build: |parameters| {
        let (allocations, max_bytes) = (parameters.count("allocations")?, parameters.size("max_bytes")?);
        let live_limit = parameters.size("live_limit")?;
        if max_bytes >= live_limit {
            return Err(parameters.refuse(format!(
                "max_bytes ({}) must be below live_limit ({})",
                Bytes(max_bytes),
                Bytes(live_limit)
            )));
        }
        Ok(start(move |dice| Random {
            dice,
            allocations: u64::from(allocations),
            max_bytes,
            live_limit,
            step: 0,
            allocated: 0,
            live_bytes: 0,
            live: Vec::new(),
        }))
    },
};

/// RMM's constant.
const CHANCE_TO_ALLOCATE: f64 = 0.73;
/// RMM has no steps; these are for timelines.
const STEPS_PER_MARK: u64 = 1000;

struct Random {
    dice: Dice,
    allocations: u64,
    max_bytes: u64,
    live_limit: u64,
    step: u64,
    allocated: u64,
    live_bytes: u64,
    live: Vec<(BlockSlot, u64)>,
}

impl Generator for Random {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        let last = self.allocations * 2;
        if self.step == last {
            return false;
        }
        if self.step == 0 {
            story.mark(MarkKind::Phase, "random", 0);
        }
        story.mark(MarkKind::Step, "steps", (self.step / STEPS_PER_MARK) as u32);
        let stop = last.min(self.step + STEPS_PER_MARK);
        while self.step < stop {
            self.step += 1;
            let bytes = self.dice.between(1, self.max_bytes);
            let allocates = self.live.is_empty()
                || (self.dice.chance(CHANCE_TO_ALLOCATE)
                    && self.allocated < self.allocations
                    && self.live_bytes + bytes < self.live_limit);
            if allocates {
                self.live.push((story.alloc(bytes, StreamId::DEFAULT, TagId(0)), bytes));
                self.allocated += 1;
                self.live_bytes += bytes;
            } else {
                let victim = self.dice.index(self.live.len());
                let (slot, bytes) = self.live.swap_remove(victim);
                story.free(slot);
                self.live_bytes -= bytes;
            }
        }
        true
    }

    fn left(&self) -> u64 {
        self.allocations * 2 - self.step
    }
}

#[cfg(test)]
mod tests {
    use crate::Recipe;
    use oomph_trace::{Op, Source};

    #[test]
    fn rmms_recipe_makes_n_allocs_and_n_frees_below_the_limit() {
        let workload = Recipe::named("random")
            .and_then(|recipe| {
                recipe.with("allocations", "3000").with("max_bytes", "1MiB").with("live_limit", "100MiB").workload()
            })
            .unwrap();
        let (mut reader, mut chunk) = (workload.open().unwrap(), Vec::new());
        let (mut allocs, mut frees, mut live, mut peak, mut sizes) = (0, 0, 0, 0, Vec::new());
        loop {
            reader.read(&mut chunk).unwrap();
            if chunk.is_empty() {
                break;
            }
            for event in &chunk {
                match event.op {
                    Op::Alloc { slot, bytes, .. } => {
                        allocs += 1;
                        live += bytes;
                        peak = peak.max(live);
                        sizes.resize(sizes.len().max(slot as usize + 1), 0);
                        sizes[slot as usize] = bytes;
                    }
                    Op::Free { slot, .. } => {
                        frees += 1;
                        live -= sizes[slot as usize];
                    }
                    _ => {}
                }
            }
        }
        assert_eq!((allocs, frees, live), (3000, 3000, 0));
        assert!((90 << 20..100 << 20).contains(&peak), "the limit is approached and kept: {peak}");
    }
}

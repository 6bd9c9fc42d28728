//! A workload: a generator, its parameters and a seed, read like any other trace.

use super::{Dice, Generator, GeneratorEntry, Start};
use oomph_trace::{CHUNK_EVENTS, Event, EventReader, Source, Tables, TraceBuilder, TraceError};

/// A trace that is made while it is read. Every opening gives the same events.
#[derive(Clone)]
pub struct Workload {
    /// The recipe's name and what was overridden.
    pub(super) title: String,
    /// What the dice are named after: overriding a parameter does not change the luck.
    pub(super) recipe: String,
    pub(super) generator: &'static GeneratorEntry,
    pub(super) start: Start,
    pub(super) seed: u64,
}

impl Workload {
    /// The generator behind it.
    #[must_use]
    pub fn generator(&self) -> &'static GeneratorEntry {
        self.generator
    }

    /// The seed that it was made with.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

impl Source for Workload {
    fn name(&self) -> &str {
        &self.title
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        let generator = (self.start)(Dice::new(self.seed, &self.recipe));
        Ok(Box::new(Reading::of(generator)))
    }
}

/// Holds what the generator remembers and the part that it wrote last, however long the story is.
struct Reading {
    generator: Box<dyn Generator>,
    story: TraceBuilder,
    /// What was left to write at the beginning.
    whole: u64,
}

impl Reading {
    fn of(generator: Box<dyn Generator>) -> Reading {
        let whole = generator.left();
        Reading { generator, story: TraceBuilder::new(), whole }
    }
}

impl EventReader for Reading {
    fn read(&mut self, chunk: &mut Vec<Event>) -> Result<(), TraceError> {
        chunk.clear();
        while self.story.pending() < CHUNK_EVENTS && self.generator.advance(&mut self.story) {}
        self.story.take_into(chunk, CHUNK_EVENTS);
        Ok(())
    }

    fn tables(&self) -> &Tables {
        self.story.tables()
    }

    fn share_read(&self) -> Option<f64> {
        Some(1.0 - self.generator.left() as f64 / self.whole.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Recipe, recipe_names};
    use oomph_trace::Op;

    /// The most events that ever waited to be read, how many slots were needed, and how many shapes of work.
    fn footprint(recipe: Recipe) -> [usize; 3] {
        let workload = recipe.workload().unwrap();
        let mut reading = Reading::of((workload.start)(Dice::new(0, &workload.recipe)));
        let (mut chunk, mut pending, mut slots) = (Vec::new(), 0, 0);
        loop {
            reading.read(&mut chunk).unwrap();
            if chunk.is_empty() {
                return [pending, slots, reading.tables().shapes().len()];
            }
            pending = pending.max(reading.story.pending() + chunk.len());
            for event in &chunk {
                if let Op::Alloc { slot, .. } = event.op {
                    slots = slots.max(slot as usize + 1);
                }
            }
        }
    }

    #[test]
    fn a_story_ten_times_as_long_takes_no_more_memory() {
        for (recipe, length, short, long) in [
            ("power-law", "allocations", "20000", "200000"),
            ("checkerboard", "rounds", "4", "40"),
            ("sawtooth", "teeth", "8", "80"),
            ("training", "steps", "16", "160"),
            ("leak-outputs-fixed", "steps", "8", "80"),
            ("streams", "rounds", "400", "4000"),
            ("stream-mix-16", "operations", "20000", "200000"),
            ("resnet-50", "steps", "8", "80"),
            ("museum-rmm-2039", "rounds", "4", "40"),
            ("museum-tt-metal-35516", "cycles", "2000", "20000"),
        ] {
            let of = |value| footprint(Recipe::named(recipe).unwrap().with(length, value));
            let (short, long) = (of(short), of(long));
            for (before, after) in short.into_iter().zip(long) {
                assert!(after * 10 <= before * 12, "{recipe}: {short:?} became {long:?}");
            }
        }
    }

    /// Every length has shapes of its own, and there are no more lengths than the context has tokens.
    #[test]
    fn random_lengths_add_shapes_and_nothing_else() {
        let of = |steps| footprint(Recipe::named("variable-length").unwrap().with("steps", steps));
        let ([pending, slots, shapes], [pending_long, slots_long, shapes_long]) = (of("16"), of("160"));
        assert!(pending_long * 10 <= pending * 12, "{pending} became {pending_long}");
        assert_eq!(slots, slots_long);
        assert!(shapes_long < shapes * 10, "{shapes} became {shapes_long}");
    }

    #[test]
    fn every_workload_knows_how_far_it_is_told() {
        for name in recipe_names() {
            let recipe = Recipe::named(name).unwrap();
            let workload = recipe.workload().unwrap();
            let (mut reader, mut chunk, mut share) = (workload.open().unwrap(), Vec::new(), 0.0);
            // Whole stories would take too long here; how they go on is tried with the short ones.
            for _ in 0..64 {
                reader.read(&mut chunk).unwrap();
                let now = reader.share_read().unwrap();
                assert!((share..=1.0).contains(&now), "{name}: {share} became {now}");
                share = now;
                if chunk.is_empty() {
                    assert_eq!(share, 1.0, "{name} ends in the middle");
                    break;
                }
            }
            assert!(share > 0.0, "{name} has not begun after 64 chunks");
        }
    }

    #[test]
    fn no_chunk_is_longer_than_promised() {
        let workload = Recipe::named("training").unwrap().workload().unwrap();
        let (mut reader, mut chunk) = (workload.open().unwrap(), Vec::new());
        loop {
            reader.read(&mut chunk).unwrap();
            assert!(chunk.len() <= CHUNK_EVENTS);
            if chunk.is_empty() {
                break;
            }
        }
    }
}

//! A workload: a generator, its parameters and a seed, read like any other trace.

use crate::{Generator, GeneratorStart, SeededRandom};
use oomph_trace::{CHUNK_EVENTS, Event, EventReader, Source, Tables, TraceBuilder, TraceError};

/// A trace that is generated while it is read. Every opening gives the same events.
#[derive(Clone)]
pub struct Workload {
    /// The recipe's name and its overrides.
    pub(crate) title: String,
    /// The name that goes into the random numbers. It leaves overrides out, so that they do not change the numbers.
    pub(crate) recipe: String,
    pub(crate) start: GeneratorStart,
    /// Its seed.
    pub seed: u64,
}

impl Workload {
    fn reader(&self) -> WorkloadReader {
        let generator = (self.start)(SeededRandom::new(self.seed, &self.recipe));
        let parts = generator.parts_left(0);
        WorkloadReader { generator, trace: TraceBuilder::new(), parts, written: 0 }
    }
}

impl Source for Workload {
    fn name(&self) -> &str {
        &self.title
    }

    fn open(&self) -> Result<Box<dyn EventReader + '_>, TraceError> {
        Ok(Box::new(self.reader()))
    }
}

/// Holds the state of the generator and the part that it wrote last, whatever the length of the trace.
struct WorkloadReader {
    generator: Box<dyn Generator>,
    trace: TraceBuilder,
    /// Parts at the beginning.
    parts: u64,
    written: u32,
}

impl WorkloadReader {
    fn parts_left(&self) -> u64 {
        self.generator.parts_left(self.written)
    }
}

impl EventReader for WorkloadReader {
    fn next_chunk(&mut self) -> Result<(&[Event], &Tables), TraceError> {
        while self.trace.pending() < CHUNK_EVENTS && self.parts_left() > 0 {
            self.generator.write_part(self.written, &mut self.trace);
            self.written += 1;
        }
        Ok(self.trace.take(CHUNK_EVENTS))
    }

    fn tables(&self) -> &Tables {
        self.trace.tables()
    }

    fn share_read(&self) -> Option<f64> {
        Some(1.0 - self.parts_left() as f64 / self.parts.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Recipe, recipe_names};
    use oomph_trace::Op;

    /// The most events that waited to be read, the number of slots, and the number of shapes of work.
    fn footprint(recipe: Recipe) -> [usize; 3] {
        let workload = recipe.workload().unwrap();
        let mut reading = workload.reader();
        let (mut pending, mut slots) = (0, 0);
        loop {
            let chunk = reading.next_chunk().unwrap().0.to_vec();
            if chunk.is_empty() {
                return [pending, slots, reading.tables().shapes().len()];
            }
            pending = pending.max(reading.trace.pending() + chunk.len());
            for event in &chunk {
                if let Op::Alloc { slot, .. } = event.op {
                    slots = slots.max(slot as usize + 1);
                }
            }
        }
    }

    #[test]
    fn longer_traces_take_no_more_memory() {
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

    /// Every length has its own shapes of work; there are at most as many lengths as the context has tokens.
    #[test]
    fn random_lengths_add_only_shapes() {
        let of = |steps| footprint(Recipe::named("variable-length").unwrap().with("steps", steps));
        let ([pending, slots, shapes], [pending_long, slots_long, shapes_long]) = (of("16"), of("160"));
        assert!(pending_long * 10 <= pending * 12, "{pending} became {pending_long}");
        assert_eq!(slots, slots_long);
        assert!(shapes_long < shapes * 10, "{shapes} became {shapes_long}");
    }

    #[test]
    fn every_workload_reports_progress() {
        for name in recipe_names() {
            let recipe = Recipe::named(name).unwrap();
            let workload = recipe.workload().unwrap();
            let (mut reader, mut share) = (workload.open().unwrap(), 0.0);
            // Whole traces would take too long here; the short ones are read to their end.
            for _ in 0..64 {
                let is_at_end = reader.next_chunk().unwrap().0.is_empty();
                let now = reader.share_read().unwrap();
                assert!((share..=1.0).contains(&now), "{name}: {share} became {now}");
                share = now;
                if is_at_end {
                    assert_eq!(share, 1.0, "{name} ends in the middle");
                    break;
                }
            }
            assert!(share > 0.0, "{name} has not begun after 64 chunks");
        }
    }

    #[test]
    fn chunks_keep_their_limit() {
        let workload = Recipe::named("training").unwrap().workload().unwrap();
        let mut reader = workload.open().unwrap();
        while let (chunk @ [_, ..], _) = reader.next_chunk().unwrap() {
            assert!(chunk.len() <= CHUNK_EVENTS);
        }
    }
}

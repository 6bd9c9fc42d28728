//! A training run whose sequence length changes at random from step to step.
//!
//! Activations scale with the length while parameters stay, so the holes that one step leaves rarely fit the next: the
//! classic way to fragment an allocator that cannot grow its segments. What lives on at the end is the same as in
//! `training`.

use super::{
    Generator, GeneratorEntry,
    decoder::{self, Decoder, Model},
    start,
};
use crate::{
    trace::TraceBuilder,
    workload::{Dice, Parameter},
};

const MIN_LENGTH: Parameter =
    Parameter::count("min_length", 1..=decoder::MOST_TOKENS, "64", "shortest sequence; the longest is the context");

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "variable_length",
    summary: "training steps of a transformer whose sequence length is random in every step",
    seeded: true,
    parameters: &[
        decoder::STEPS,
        decoder::LAYERS,
        decoder::WIDTH,
        decoder::HEADS,
        decoder::VOCABULARY,
        decoder::CONTEXT,
        decoder::BATCH,
        MIN_LENGTH,
    ],
    build: |parameters| {
        let (model, steps) = (Model::read(parameters)?, parameters.count(decoder::STEPS.name)?);
        let min_length = parameters.count(MIN_LENGTH.name)?;
        if min_length > model.context {
            return Err(
                parameters.refuse(format!("min_length ({min_length}) must not exceed the context ({})", model.context))
            );
        }
        Ok(start(move |dice| VariableLength { dice, decoder: Decoder::new(model), steps, min_length, step: 0 }))
    },
};

struct VariableLength {
    dice: Dice,
    decoder: Decoder,
    steps: u32,
    min_length: u32,
    step: u32,
}

impl Generator for VariableLength {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.step == self.steps {
            return false;
        }
        let length = self.dice.between(self.min_length.into(), self.decoder.model().context.into());
        self.decoder.step(story, self.step, length as u32);
        self.step += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        trace::{Category, Op, Source},
        workload::Recipe,
    };

    #[test]
    fn every_step_has_a_length_of_its_own_within_the_range() {
        let workload = Recipe::named("variable-length").unwrap().workload().unwrap();
        let (mut reader, mut chunk, mut lengths) = (workload.open().unwrap(), Vec::new(), Vec::new());
        loop {
            reader.read(&mut chunk).unwrap();
            if chunk.is_empty() {
                break;
            }
            for event in &chunk {
                if let Op::Alloc { bytes, tag, .. } = event.op
                    && reader.tables().tags()[tag.index()].category == Category::Input
                {
                    // Eight bytes a token, four sequences a batch.
                    lengths.push(bytes / 32);
                }
            }
        }
        assert_eq!(lengths.len(), 24);
        assert!(lengths.iter().all(|length| (64..=1024).contains(length)), "{lengths:?}");
        let different: std::collections::BTreeSet<_> = lengths.iter().collect();
        assert!(different.len() > 20, "{lengths:?}");
    }
}

//! A plain training run: the same step again and again, as PyTorch allocates it for a decoder-only transformer.
//!
//! Parameters, their AdamW state and the workspace live on at the end, as they do in a program that has not exited.

use super::{
    Generator, GeneratorEntry,
    decoder::{self, Decoder, Model},
    start,
};
use crate::trace::TraceBuilder;

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "training",
    summary: "training steps of a decoder-only transformer with AdamW, all of one sequence length",
    seeded: false,
    parameters: &[
        decoder::STEPS,
        decoder::LAYERS,
        decoder::WIDTH,
        decoder::HEADS,
        decoder::VOCABULARY,
        decoder::CONTEXT,
        decoder::BATCH,
    ],
    build: |parameters| {
        let (model, steps) = (Model::read(parameters)?, parameters.count(decoder::STEPS.name)?);
        Ok(start(move |_| Training { decoder: Decoder::new(model), steps, step: 0 }))
    },
};

struct Training {
    decoder: Decoder,
    steps: u32,
    step: u32,
}

impl Generator for Training {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.step == self.steps {
            return false;
        }
        self.decoder.step(story, self.step, self.decoder.model().context);
        self.step += 1;
        true
    }
}

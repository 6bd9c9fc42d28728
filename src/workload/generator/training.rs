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

#[cfg(test)]
mod tests {
    use crate::{trace::check, workload::Recipe};

    /// PyTorch 2.11 allocated 10,648,095,744 bytes at the peak of this run, 2,027,055,616 after it, both rounded up to
    /// its blocks.
    #[test]
    fn the_default_run_needs_what_pytorch_needed() {
        let summary = check(&Recipe::named("training").unwrap().workload().unwrap()).unwrap();
        assert!((summary.peak.bytes as f64 / 10_648_095_744.0 - 1.0).abs() < 0.001, "{}", summary.peak.bytes);
        assert!((summary.live_bytes as f64 / 2_027_055_616.0 - 1.0).abs() < 0.002, "{}", summary.live_bytes);
    }

    #[test]
    fn a_step_leaves_nothing_behind_but_what_the_first_one_left() {
        let live = |steps| {
            check(&Recipe::named("training").unwrap().with("steps", steps).workload().unwrap()).unwrap().live_bytes
        };
        assert_eq!(live("1"), live("5"));
    }
}

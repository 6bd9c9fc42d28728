//! A decoder-only transformer in training, told operator by operator as PyTorch's autograd allocates it.
//!
//! Not a table of sizes but a miniature of PyTorch: the reference model's Python runs on a [`machine`] whose tensors are
//! reference-counted, forward records a [`graph`], [`saving`] decides what is kept for [`backward`], and blocks die when
//! their last holder lets go. So the order of allocs and frees, and with it what an allocator makes of them, follows
//! from the model's code for every shape and every combination of [`technique`]s. Recordings of PyTorch 2.11 on an H200
//! hold it to that, event by event (`tests/transformer_truth.rs`).
//!
//! [`trainer`] is the program around it, one call for each thing that a training script does.

mod attention;
mod backward;
mod elementwise;
mod embedding;
mod graph;
mod linear;
mod loss;
mod machine;
mod model;
mod norm;
mod optimizer;
mod plan;
mod precision;
#[cfg(test)]
mod recorded_programs;
mod saving;
mod scratch;
mod shape;
mod sharding;
mod technique;
mod trainer;
mod weights;

use std::sync::Arc;

use plan::Plan;
use trainer::Trainer;

use super::{Generator, GeneratorEntry, start};
use crate::{trace::TraceBuilder, workload::Dice};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "transformer",
    summary: "training steps of a decoder-only transformer, operator by operator as PyTorch allocates",
    seeded: true,
    parameters: &[
        shape::STEPS,
        shape::LAYERS,
        shape::WIDTH,
        shape::HEADS,
        shape::VOCABULARY,
        shape::CONTEXT,
        shape::BATCH,
        shape::MIN_LENGTH,
        shape::LENGTHS,
        technique::PRECISION,
        technique::OPTIMIZER,
        technique::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (Plan::read(parameters)?, parameters.count(shape::STEPS.name)?);
        let lengths: Arc<[u32]> = plan.shape.read_lengths(parameters)?.into();
        Ok(start(move |dice| {
            let (trainer, lengths) = (Trainer::new(plan.clone()), lengths.clone());
            Training { dice, trainer, lengths, steps, step: 0 }
        }))
    },
};

/// The same step again and again.
struct Training {
    dice: Dice,
    trainer: Trainer,
    /// Given lengths, in turn; where there are none, the context's or random ones.
    lengths: Arc<[u32]>,
    steps: u32,
    step: u32,
}

impl Training {
    fn next_length(&mut self) -> u32 {
        let shape = self.trainer.plan().shape;
        if let Some(turn) = self.step.checked_rem(self.lengths.len() as u32) {
            self.lengths[turn as usize]
        } else if shape.is_variable() {
            self.dice.between(shape.min_length.into(), shape.context.into()) as u32
        } else {
            shape.context
        }
    }
}

impl Generator for Training {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        if self.step == self.steps {
            return false;
        }
        let (step, length) = (self.step, self.next_length());
        self.trainer.write(story, |trainer| {
            if step == 0 {
                trainer.load();
            }
            trainer.step(step, length);
        });
        self.step += 1;
        true
    }
}

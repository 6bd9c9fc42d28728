//! A miniature of PyTorch's autograd, and the programs on it: models told operator by operator as PyTorch allocates them.
//!
//! Not a table of sizes: a model's Python runs on a [`machine`] whose tensors are reference-counted, forward records a
//! [`graph`], [`saving`] decides what is kept for [`backward`], and blocks die when their last holder lets go. So the
//! order of allocs and frees, and with it what an allocator makes of them, follows from the model's code for every shape
//! and every combination of [`technique`]s. Recordings of PyTorch 2.11 on an H200 hold it to that, event by event
//! (`tests/transformer_truth`).
//!
//! The first program trains a decoder-only transformer ([`model`]): [`trainer`] has one call for each thing that a
//! training script does. [`faulty`] are programs that do it wrong, [`serving`] answers requests with the model, and
//! [`residual`] trains a network of images.

mod adapter;
mod attention;
mod autocast;
mod backward;
mod checkpoint;
mod collector;
mod elementwise;
mod embedding;
mod experts;
mod faulty;
mod graph;
mod lengths;
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
mod residual;
mod saving;
mod scratch;
mod serving;
mod shape;
mod sharding;
mod staging;
mod technique;
mod trainer;
mod weights;

use lengths::Lengths;
use plan::Plan;
use trainer::Trainer;

use crate::{
    Generator, GeneratorEntry, Parameter, Parameters, SeededRandom, WorkloadError,
    generator::{start, to_u32},
};
use oomph_trace::TraceBuilder;

pub(crate) use faulty::ENTRY as FAULTY_TRAINING;
pub(crate) use residual::ENTRY as RESNET;
pub(crate) use serving::ENTRY as SERVING;

/// The registry's line of the transformer.
pub(crate) const TRANSFORMER: GeneratorEntry = GeneratorEntry {
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
        shape::VALIDATE_EVERY,
        shape::VALIDATION_PASSES,
        shape::VALIDATION_LENGTH,
        shape::EXPERTS,
        shape::CHOSEN_EXPERTS,
        shape::IMBALANCE,
        technique::PRECISION,
        technique::OPTIMIZER,
        technique::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (Plan::read(parameters)?, parameters.count(shape::STEPS.name)?);
        let lengths = Lengths::read(plan.shape, parameters)?;
        let validation = Validation::read(parameters, &plan)?;
        Ok(start(move |random| {
            let (trainer, lengths) = (Trainer::new(plan.clone()).with_random(random.clone()), lengths.clone());
            Training { random, trainer, lengths, validation, steps }
        }))
    },
};

/// The same step again and again.
struct Training {
    random: SeededRandom,
    trainer: Trainer,
    lengths: Lengths,
    validation: Option<Validation>,
    steps: u32,
}

/// Passes without a graph between training steps.
#[derive(Clone, Copy, Debug)]
struct Validation {
    every: u32,
    passes: u32,
    /// As in training where it is not set.
    length: Option<u32>,
}

impl Validation {
    fn read(parameters: &Parameters<'_>, plan: &Plan) -> Result<Option<Validation>, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (every, length) = (count(&shape::VALIDATE_EVERY)?, count(&shape::VALIDATION_LENGTH)?);
        let context = plan.shape.context;
        if length > context {
            let reason = format!("validation_length ({length}) must not exceed the context ({context})");
            return Err(parameters.refuse(reason));
        }
        let passes = count(&shape::VALIDATION_PASSES)?;
        Ok((every > 0).then_some(Validation { every, passes, length: Some(length).filter(|length| *length > 0) }))
    }
}

impl Training {
    /// Validates where it is time to; never after the last step, so that training goes on behind it.
    fn validate(&mut self, step: u32, trace: &mut TraceBuilder) {
        let Some(Validation { every, passes, length }) = self.validation else { return };
        if step == self.steps || !step.is_multiple_of(every) {
            return;
        }
        for pass in 0..passes {
            let length = length.unwrap_or_else(|| self.lengths.of_step(step, &mut self.random));
            self.trainer.write(trace, |trainer| trainer.validate(pass, length));
        }
    }
}

impl Generator for Training {
    fn parts_left(&self, written: u64) -> u64 {
        u64::from(self.steps) - written
    }

    fn write_part(&mut self, step: u64, trace: &mut TraceBuilder) {
        let (step, length) = (to_u32(step), self.lengths.of_step(to_u32(step), &mut self.random));
        self.trainer.write(trace, |trainer| {
            if step == 0 {
                trainer.load();
            }
            trainer.step(step, length);
        });
        self.validate(step + 1, trace);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Op, OpKind, Summary, Trace, check};

    fn small(techniques: &str, steps: u32) -> Recipe {
        let shape = [("layers", 4), ("width", 256), ("heads", 4), ("vocab", 5000), ("context", 256), ("batch", 8)];
        let recipe =
            Recipe::named("gpt-124m").unwrap().with("techniques", techniques).with("steps", &steps.to_string());
        shape.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, &value.to_string()))
    }

    fn summary(techniques: &str) -> Summary {
        check(&small(techniques, 3).workload().unwrap()).unwrap()
    }

    #[test]
    fn techniques_save_what_they_are_for() {
        let peak = |techniques| summary(techniques).peak.bytes;
        for (less, more) in [
            ("amp", ""),
            ("bf16_model", "amp"),
            ("bf16_model", "bf16_model,master_weights"),
            ("ckpt", "ckpt2"),
            ("ckpt2", ""),
            ("amp,ckpt", "ckpt"),
            ("accum4", "accum2"),
            ("accum2", ""),
            ("offload", ""),
            ("offload,ckpt", "ckpt"),
            ("offload_optimizer", ""),
            ("offload_params", "offload_optimizer"),
            ("offload_component", ""),
            ("sgd", "adam8bit"),
            ("adam8bit", ""),
            ("chunked_loss", ""),
            ("chunked_loss:16", "chunked_loss:2"),
            ("lora", ""),
            ("lora,ckpt", "lora"),
            ("zero1:8", "ddp"),
            ("zero2:8,ckpt,chunked_loss:16", "zero1:8,ckpt,chunked_loss:16"),
            ("zero3:8", "zero2:8"),
            ("tensor_parallel:4", "tensor_parallel:2"),
            ("pipeline:4,accum4", "accum4"),
            ("", "zero_fill"),
            ("", "ddp"),
        ] {
            assert!(peak(less) < peak(more), "'{less}' {} against '{more}' {}", peak(less), peak(more));
        }
        for same in ["tf32", "gc", "empty_cache:phase"] {
            assert_eq!(peak(same), peak(""), "{same}");
        }
    }

    #[test]
    fn techniques_leave_their_marks() {
        let count = |techniques, kind| summary(techniques).count(kind);
        assert_eq!(count("", OpKind::Collective) + count("", OpKind::HostAlloc) + count("", OpKind::EmptyCache), 0);
        for ranks in ["ddp", "zero1:2", "zero2:2", "zero3:2", "tensor_parallel:2"] {
            assert!(count(ranks, OpKind::Collective) > 0, "{ranks}");
        }
        for host in ["offload", "offload_optimizer", "offload_params", "offload_component"] {
            assert!(count(host, OpKind::HostAlloc) > 0, "{host}");
        }
        assert_eq!(count("empty_cache", OpKind::EmptyCache), 3);
        assert_eq!(count("empty_cache:2", OpKind::EmptyCache), 1);
        assert_eq!(count("empty_cache:forward,accum2", OpKind::EmptyCache), 6);
        assert_eq!(count("empty_cache:phase", OpKind::EmptyCache), 9);
    }

    /// Pinned buffers are used again: a second step needs no new ones.
    #[test]
    fn offloading_takes_its_host_memory_once() {
        let buffers = |steps| check(&small("offload", steps).workload().unwrap()).unwrap().count(OpKind::HostAlloc);
        assert_eq!(buffers(1), buffers(4));
    }

    #[test]
    fn every_block_says_what_it_is_for_and_which_layer_it_belongs_to() {
        let trace = Trace::read(&small("", 2).workload().unwrap()).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for event in &trace.events {
            if let Op::Alloc { tag, .. } = event.op {
                let tag = trace.tables.tags()[tag.index()];
                assert_ne!(tag.category, Category::Unknown);
                seen.insert((tag.category, tag.layer));
            }
        }
        for layer in 0..4 {
            for category in [Category::Parameter, Category::Gradient, Category::Optimizer, Category::Activation] {
                assert!(seen.contains(&(category, Some(layer))), "{category:?} of layer {layer}");
            }
        }
        assert!(seen.contains(&(Category::Input, None)) && seen.contains(&(Category::Workspace, None)));
    }

    #[test]
    fn validation_comes_between_steps_and_leaves_nothing() {
        let with = |every: &str| {
            let recipe = small("", 4).with("validate_every", every).with("validation_passes", "3");
            check(&recipe.with("validation_length", "100").workload().unwrap()).unwrap()
        };
        let (without, between) = (with("0"), with("2"));
        assert!(between.phases.iter().any(|phase| phase == "validate"));
        assert_eq!((between.live_bytes, between.peak.bytes), (without.live_bytes, without.peak.bytes));
        // Three passes after the second step, none after the last.
        let of_a_pass = (between.count(OpKind::Alloc) - without.count(OpKind::Alloc)) / 3;
        assert!((50..100).contains(&of_a_pass), "{of_a_pass}");
        let error = small("", 4).with("validation_length", "300").workload().err().unwrap().to_string();
        assert!(error.ends_with("validation_length (300) must not exceed the context (256)"), "{error}");
    }

    #[test]
    fn given_lengths_are_taken_in_turn() {
        let recipe = small("", 3).with("lengths", "64,256");
        let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
        let batches: Vec<u64> = trace
            .events
            .iter()
            .filter_map(|event| match event.op {
                Op::Alloc { tag, bytes, .. } if trace.tables.tags()[tag.index()].category == Category::Input => {
                    Some(bytes / (8 * 8))
                }
                _ => None,
            })
            .collect();
        assert_eq!(batches, [64, 256, 64]);
        let error = small("", 3).with("lengths", "64,512").workload().err().unwrap().to_string();
        assert!(error.ends_with("'512' among lengths is no whole number from 1 to the context (256)"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is combined: it is refused with a reason, or it is a trace without contradiction whose steps leave
        /// nothing behind but what the first ones left.
        #[test]
        fn any_combination_of_techniques_is_refused_or_trains(
            words in prop::sample::subsequence(vec![
                "amp", "fp16", "bf16_model", "ckpt", "accum2", "offload", "offload_optimizer", "offload_params",
                "offload_component", "inplace", "zero_fill", "empty_cache", "gc", "sgd", "adam8bit", "chunked_loss",
                "lora", "ddp", "zero1:2", "zero2:2", "zero3:2", "tensor_parallel:2", "pipeline:2", "tf32",
            ], 0..6),
        ) {
            let techniques = words.join(",");
            match small(&techniques, 2).workload() {
                Err(error) => prop_assert!(error.to_string().contains("contradict"), "{techniques}: {error}"),
                Ok(short) => {
                    let long = small(&techniques, 4).workload().unwrap();
                    let (short, long) = (check(&short).unwrap(), check(&long).unwrap());
                    prop_assert_eq!(short.live_bytes, long.live_bytes, "{}", techniques);
                    prop_assert_eq!(short.peak.bytes, long.peak.bytes, "{}", techniques);
                }
            }
        }
    }
}

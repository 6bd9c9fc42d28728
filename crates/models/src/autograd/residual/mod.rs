//! A residual convolutional network in training, on the same machine as the transformer.
//!
//! The network is torchvision's ResNet with bottleneck blocks; its actions equal recordings of ResNet-50, plain and under
//! autocast, one by one (`tests/resnet_truth.rs`). [`kernels`] knows what cuDNN takes for itself.

mod convolution;
mod kernels;
mod layers;
mod network;

use std::sync::Arc;

pub(super) use convolution::Convolved;
pub(super) use kernels::KernelSearch;
use layers::Activation;
pub(super) use layers::Pooled;
use network::{COLOURS, Network};

use super::{
    backward::Retain,
    graph::{Origin, Value},
    machine::{Machine, Tensor},
    plan::Plan,
    precision::{Number, Precision},
    saving::Saving,
    shape::Shape,
    technique::{self, DataParallel, EmptyCache, Techniques},
    weights::{Declared, Layout},
};
use crate::{
    Generator, GeneratorEntry, Parameter, Parameters, WorkloadError,
    generator::{start, to_u32},
};
use oomph_trace::{Category, MarkKind, TraceBuilder};

/// Bytes of the number of a class.
const CLASS: u64 = 8;

pub(crate) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "resnet",
    summary: "training steps of a residual convolutional network, operator by operator as PyTorch allocates",
    seeded: false,
    parameters: &[
        Parameter::count("steps", 1..=100_000_000, "6", "training steps"),
        Parameter::count("depth", 50..=152, "50", "layers with weights: 50, 101 or 152"),
        Parameter::count("image", 32..=1024, "224", "rows, and columns, of an image"),
        Parameter::count("classes", 1..=1 << 20, "1000", "classes that images are sorted into"),
        Parameter::count("batch", 1..=1 << 12, "64", "images per step"),
        Parameter::choice("activation", &["in_place", "separate"], "in_place", "whether ReLU writes over its input"),
        Parameter::choice(
            "autotune",
            &["off", "on"],
            "off",
            "whether every convolution tries all its kernels at first (cudnn.benchmark)",
        ),
        technique::PRECISION,
        technique::OPTIMIZER,
        technique::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (read_plan(parameters)?, parameters.count("steps")?);
        let activation = match parameters.choice("activation")? {
            "separate" => Activation::Separate,
            _ => Activation::InPlace,
        };
        let (side, searches) = (parameters.count("image")?, parameters.choice("autotune")? == "on");
        let blocks = blocks_per_stage(parameters)?;
        let declared = Network::declare(blocks, side, plan.shape.vocabulary, activation);
        let (network, weights) = declared.ok_or_else(|| parameters.refuse("no kernel is known for this network"))?;
        let (network, weights): (_, Arc<[Declared]>) = (Arc::new(network), weights.into());
        Ok(start(move |_| Training::new(plan.clone(), network.clone(), &weights, side, searches, steps)))
    },
};

fn blocks_per_stage(parameters: &Parameters<'_>) -> Result<[u32; 4], WorkloadError> {
    match parameters.count("depth")? {
        50 => Ok([3, 4, 6, 3]),
        101 => Ok([3, 4, 23, 3]),
        152 => Ok([3, 8, 36, 3]),
        depth => {
            Err(parameters.refuse(format!("there is no residual network of depth {depth}, but of 50, 101 and 152")))
        }
    }
}

/// Reads number formats and techniques; what only a transformer can do is refused.
fn read_plan(parameters: &Parameters<'_>) -> Result<Plan, WorkloadError> {
    let (precision, techniques) = Techniques::read(parameters)?;
    let has_16_bit_weights = matches!(precision, Precision::HalfModel { .. });
    for (is_asked, word) in [
        (techniques.checkpoint_every.is_some(), "ckpt"),
        (techniques.in_place, "inplace"),
        (techniques.loss_chunks.is_some(), "chunked_loss"),
        (techniques.lora_rank.is_some(), "lora"),
        (techniques.offload_weights, "offload_params"),
        (techniques.offload_embeddings, "offload_component"),
        (techniques.tensor_ranks > 1, "tensor_parallel"),
        (techniques.pipeline_stages > 1, "pipeline"),
        (matches!(techniques.data_parallel, DataParallel::Sharded { stage: 3, .. }), "zero3"),
        (has_16_bit_weights, "bf16_model"),
        (precision.scales_loss(), "fp16"),
    ] {
        if is_asked {
            let instead = if word == "inplace" { "; its activation is set by 'activation'" } else { "" };
            return Err(parameters.refuse(format!("technique '{word}' is not known for residual networks{instead}")));
        }
    }
    let shape = Shape::of_images(parameters.count("batch")?, parameters.count("classes")?);
    let plan = Plan { shape, precision, techniques };
    plan.check().map_err(|reason| parameters.refuse(reason))?;
    Ok(plan)
}

/// The same step again and again.
struct Training {
    machine: Machine,
    network: Arc<Network>,
    side: u32,
    /// What the program's variables hold: images and their classes, and the loss.
    batch: Option<[Tensor; 2]>,
    loss: Option<Tensor>,
    steps: u32,
}

impl Training {
    fn new(plan: Plan, network: Arc<Network>, weights: &[Declared], side: u32, searches: bool, steps: u32) -> Training {
        let mut machine = Machine::of(plan, Layout { declared: weights.to_vec(), ..Layout::default() });
        if searches {
            machine.kernel_search = KernelSearch::exhaustive();
        }
        Training { machine, network, side, batch: None, loss: None, steps }
    }

    fn train(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Step, "step", step);
        let micro_batches = self.machine.plan.techniques.micro_batches;
        for micro_batch in 0..micro_batches {
            if micro_batches > 1 {
                self.machine.trace.mark(MarkKind::MicroBatch, "micro-batch", micro_batch);
            }
            self.machine.trace.mark(MarkKind::Phase, "forward", step);
            let loss = self.forward();
            self.empty_cache_after(EmptyCache::AfterForward);
            self.machine.trace.mark(MarkKind::Phase, "backward", step);
            self.machine.is_last_micro_batch = micro_batch + 1 == micro_batches;
            let recorded = std::mem::take(&mut self.machine.graph);
            self.machine.backward(loss, recorded, Retain::Nothing);
            self.machine.release(loss.tensor);
            self.empty_cache_after(EmptyCache::AfterBackward);
        }
        self.machine.trace.mark(MarkKind::Phase, "optimizer", step);
        self.machine.optimizer_step();
        self.empty_cache_after(EmptyCache::AfterPhases);
        self.machine.zero_gradients();
        self.end_step(step);
    }

    /// One pass over a new batch; the old batch goes as the new one comes, the old loss when the new one is there.
    fn forward(&mut self) -> Value {
        let images = self.machine.plan.micro_batch();
        self.machine.graph = self.machine.fresh_graph(images, 1);
        let pixels = u64::from(self.side) * u64::from(self.side);
        let of_images = u64::from(images) * u64::from(COLOURS) * pixels * Number::Single.bytes();
        let before = self.batch.take().map(|before| before.map(Some)).unwrap_or_default();
        let mut renew = |bytes: u64, before: Option<Tensor>| {
            let tensor = self.machine.copy_in(bytes, Category::Input);
            if let Some(before) = before {
                self.machine.release(before);
            }
            tensor
        };
        let batch = [renew(of_images, before[0]), renew(u64::from(images) * CLASS, before[1])];
        self.batch = Some(batch);
        let saves_on_host = self.machine.plan.techniques.offload_activations;
        self.machine.saving = if saves_on_host { Saving::ToHost } else { Saving::Keep };
        self.machine.enter_pass();
        let network = self.network.clone();
        let images = Value { tensor: batch[0], number: Number::Single, origin: Origin::Constant };
        let loss = network.loss(&mut self.machine, images, batch[1]);
        self.machine.forget_casts();
        let held = self.machine.retain(loss.tensor);
        if let Some(before) = self.loss.replace(held) {
            self.machine.release(before);
        }
        loss
    }

    fn empty_cache_after(&mut self, phase: EmptyCache) {
        let chosen = self.machine.plan.techniques.empty_cache;
        if chosen == phase || chosen == EmptyCache::AfterPhases {
            self.machine.trace.empty_cache();
        }
    }

    fn end_step(&mut self, step: u32) {
        let techniques = &self.machine.plan.techniques;
        let (empty_cache, garbage) = (techniques.empty_cache, techniques.collect_garbage_every);
        if garbage.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            // A loop without cycles leaves nothing to collect.
            self.machine.trace.mark(MarkKind::Phase, "gc", step);
        }
        if matches!(empty_cache, EmptyCache::AfterSteps(every) if (step + 1).is_multiple_of(every)) {
            self.machine.trace.empty_cache();
        }
    }
}

impl Generator for Training {
    fn parts_left(&self, written: u64) -> u64 {
        u64::from(self.steps) - written
    }

    fn write_part(&mut self, step: u64, trace: &mut TraceBuilder) {
        std::mem::swap(&mut self.machine.trace, trace);
        if step == 0 {
            self.machine.load();
        }
        self.train(to_u32(step));
        std::mem::swap(&mut self.machine.trace, trace);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Op, OpKind, Summary, Trace, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let all = [("image", "32"), ("batch", "4"), ("steps", "3"), ("classes", "10")];
        let all = all.iter().chain(settings);
        all.fold(Recipe::named("resnet-50").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> Summary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    /// Numbers of weights that torchvision's models have, and of the statistics and counters of their norms.
    #[test]
    fn networks_have_the_weights_that_they_are_known_for() {
        for (depth, weights, norms, channels) in
            [("50", 25_557_032_u64, 53, 26_560_u64), ("101", 44_549_160, 104, 52_672), ("152", 60_192_808, 155, 75_712)]
        {
            let recipe = small(&[("depth", depth), ("classes", "1000"), ("steps", "1")]);
            let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
            let tags = trace.tables.tags();
            let bytes = trace.events.iter().filter_map(|event| match event.op {
                Op::Alloc { bytes, tag, .. } if tags[tag.index()].category == Category::Parameter => Some(bytes),
                _ => None,
            });
            assert_eq!(bytes.sum::<u64>(), 4 * weights + 2 * 4 * channels + 8 * norms, "{depth}");
        }
    }

    #[test]
    fn a_search_for_kernels_costs_memory_once_and_nothing_later() {
        let (off, on) = (summary(&[("autotune", "off")]), summary(&[("autotune", "on")]));
        let searches = on.count(OpKind::EmptyCache);
        // 23 shapes in three directions, less the images' own gradient.
        assert_eq!(searches, 23 * 3 - 1);
        assert_eq!(on.count(OpKind::Alloc), off.count(OpKind::Alloc) + 2 * searches);
        let longer = summary(&[("autotune", "on"), ("steps", "6")]);
        assert_eq!(longer.count(OpKind::EmptyCache), searches);
    }

    #[test]
    fn what_only_transformers_can_do_is_refused_with_the_reason() {
        for (settings, reason) in [
            (("techniques", "ckpt"), "technique 'ckpt' is not known for residual networks"),
            (
                ("techniques", "inplace"),
                "technique 'inplace' is not known for residual networks; its activation is set by 'activation'",
            ),
            (("techniques", "amp,zero3:2"), "technique 'zero3' is not known for residual networks"),
            (("precision", "fp16"), "technique 'fp16' is not known for residual networks"),
            (("techniques", "accum3"), "3 micro-batches do not divide 4 sequences"),
            (("depth", "51"), "there is no residual network of depth 51, but of 50, 101 and 152"),
        ] {
            let error = small(&[settings]).workload().err().unwrap().to_string();
            assert_eq!(error, format!("workload 'resnet-50': {reason}"));
        }
    }

    #[test]
    fn techniques_save_what_they_are_for() {
        let peak = |techniques| summary(&[("image", "96"), ("batch", "32"), ("techniques", techniques)]).peak.bytes;
        for (less, more) in [("amp", ""), ("accum4", "accum2"), ("accum2", ""), ("offload", ""), ("sgd", "adam8bit")] {
            assert!(peak(less) < peak(more), "'{less}' {} against '{more}' {}", peak(less), peak(more));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn networks_of_any_kind_train_without_contradiction_and_leave_the_same_behind(
            (depth, image, batch) in (prop::sample::select(vec!["50", "101", "152"]), 32..160_u32, 1..5_u32),
            activation in prop::sample::select(vec!["in_place", "separate"]),
            techniques in prop::sample::select(vec![
                "", "amp", "accum2", "amp,accum4", "offload", "amp,offload", "zero_fill", "empty_cache:phase", "gc",
                "sgd", "adam8bit", "ddp", "zero1:2", "zero2:4", "offload_optimizer", "tf32",
            ]),
        ) {
            let (image, batch) = (image.to_string(), (4 * batch).to_string());
            let of = |steps| summary(&[
                ("depth", depth), ("image", &image), ("batch", &batch), ("activation", activation),
                ("techniques", techniques), ("steps", steps),
            ]);
            let (short, long) = (of("2"), of("4"));
            prop_assert_eq!(short.live_bytes, long.live_bytes);
            prop_assert_eq!(short.peak.bytes, long.peak.bytes);
        }
    }
}

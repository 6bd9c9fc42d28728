//! torchvision's ResNet with bottleneck blocks: a stem, four stages of blocks with shortcuts, and a classifier.
//!
//! Its actions equal recordings of ResNet-50, plain and under autocast, one by one (`tests/integration/resnet_truth.rs`).
//! Written like torchvision's Python code: the scope of a local variable decides when its block is freed.

use std::sync::Arc;

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{Tensor, TensorSplit, Variable},
        layers::{
            INDEX, ReluOutput,
            convolution::Convolution,
            convolution_kernels::{ConvolutionShape, KernelSearch},
            linear::LinearWeights,
            norm::{BatchNorm, NormWeights},
        },
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{ModelShape, SequenceLengths, TrainingPlan},
        techniques::{self, DataParallel, NumberFormat, Precision, Techniques},
        trainer::PlainTraining,
        weights::{DeclaredWeight, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

/// The width at the end of a block, as a multiple of its middle.
const EXPANSION: u32 = 4;
/// Widths of the middles of the four stages' blocks.
const WIDTHS: [u32; 4] = [64, 128, 256, 512];
/// Channels of an input image.
const COLOURS: u32 = 3;

/// The registry entry of residual networks.
pub(crate) const RESNET: GeneratorEntry = GeneratorEntry {
    name: "resnet",
    summary: "training steps of a residual convolutional network, operator by operator as PyTorch allocates",
    seeded: false,
    parameters: &[
        Parameter::count("steps", 1..=100_000_000, "6", "training steps"),
        Parameter::count("depth", 50..=152, "50", "layers with weights: 50, 101 or 152"),
        Parameter::count("image", 32..=1024, "224", "rows, and columns, of an image"),
        Parameter::count("classes", 1..=1 << 20, "1000", "classes of images"),
        Parameter::count("batch", 1..=1 << 12, "64", "images per step"),
        Parameter::choice("activation", &["in_place", "separate"], "in_place", "whether ReLU writes over its input"),
        Parameter::choice(
            "autotune",
            &["off", "on"],
            "off",
            "whether every convolution tries all its kernels at first (cudnn.benchmark)",
        ),
        techniques::PRECISION,
        techniques::OPTIMIZER,
        techniques::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (read_plan(parameters)?, parameters.count("steps")?);
        let model = Arc::new(ResNet::read(parameters)?);
        let kernel_search = match parameters.choice("autotune")? {
            "on" => KernelSearch::exhaustive(),
            _ => KernelSearch::default(),
        };
        let (lengths, validation) = (SequenceLengths::fixed(plan.shape), None);
        Ok(PlainTraining { plan, model, lengths, validation, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| Ok(parameter_count(&ResNet::read(parameters)?.weights))),
};

fn blocks_per_stage(parameters: &Parameters<'_>) -> Result<[u32; 4], WorkloadError> {
    match parameters.count("depth")? {
        50 => Ok([3, 4, 6, 3]),
        101 => Ok([3, 4, 23, 3]),
        152 => Ok([3, 8, 36, 3]),
        depth => {
            Err(parameters
                .refuse(format!("there is no residual network of depth {depth}; the depths are 50, 101 and 152")))
        }
    }
}

/// Reads number formats and techniques. Techniques that only a transformer has are refused.
fn read_plan(parameters: &Parameters<'_>) -> Result<TrainingPlan, WorkloadError> {
    let (precision, techniques) = Techniques::read(parameters)?;
    for (is_set, word) in [
        (techniques.keeps_products, "ckpt_selective"),
        (techniques.checkpoint_every.is_some(), "ckpt"),
        (techniques.in_place, "inplace"),
        (techniques.loss_chunks.is_some(), "chunked_loss"),
        (techniques.liger, "liger"),
        (techniques.quantized, "qlora"),
        (techniques.lora_rank.is_some(), "lora"),
        (techniques.offload_weights, "offload_params"),
        (techniques.offload_embeddings, "offload_component"),
        (techniques.tensor_ranks > 1, techniques.tensor_word()),
        (techniques.pipeline_stages > 1, "pipeline"),
        (matches!(techniques.data_parallel, DataParallel::Sharded { stage: 3, .. }), "zero3"),
        (matches!(techniques.data_parallel, DataParallel::FullyShard { .. }), "fsdp"),
        (precision == Precision::HalfModel { master_weights: false }, "bf16_model"),
        (precision == Precision::HalfModel { master_weights: true }, "bf16_master"),
        (precision.scales_loss(), "fp16"),
    ] {
        if is_set {
            let instead = if word == "inplace" { "; its activation is set by 'activation'" } else { "" };
            return Err(parameters.refuse(format!("technique '{word}' does not apply to residual networks{instead}")));
        }
    }
    let shape = ModelShape::of_images(parameters.count("batch")?, parameters.count("classes")?);
    let plan = TrainingPlan { shape, precision, techniques };
    plan.check().map_err(|reason| parameters.refuse(reason))?;
    Ok(plan)
}

/// A convolution and the norm behind it.
#[derive(Clone, Copy, Debug)]
struct ConvolutionUnit {
    convolution: Convolution,
    norm: BatchNorm,
}

/// Narrow, 3 x 3, widen. The shortcut adds the input, brought to shape where necessary.
#[derive(Clone, Copy, Debug)]
struct BottleneckBlock {
    narrow: ConvolutionUnit,
    spatial: ConvolutionUnit,
    widen: ConvolutionUnit,
    shortcut: Option<ConvolutionUnit>,
}

#[derive(Debug)]
struct ResNet {
    weights: Vec<DeclaredWeight>,
    stem: ConvolutionUnit,
    blocks: Vec<BottleneckBlock>,
    head: LinearWeights,
    relu: ReluOutput,
    /// Rows, and columns, of an input image.
    side: u32,
}

impl ResNet {
    fn read(parameters: &Parameters<'_>) -> Result<ResNet, WorkloadError> {
        let relu = match parameters.choice("activation")? {
            "separate" => ReluOutput::NewTensor,
            _ => ReluOutput::InPlace,
        };
        let (blocks, image) = (blocks_per_stage(parameters)?, parameters.count("image")?);
        ResNet::new(blocks, image, parameters.count("classes")?, relu)
            .ok_or_else(|| parameters.refuse("cuDNN's kernels for this network are not known"))
    }

    /// Declares the weights in torchvision's order. Nothing where cuDNN's choice for a shape is not known.
    fn new(blocks_per_stage: [u32; 4], image: u32, classes: u32, relu: ReluOutput) -> Option<ResNet> {
        let mut list = WeightList::default();
        let stem = ConvolutionUnit::new(&mut list, [COLOURS, WIDTHS[0], 7, 2], image)?;
        let mut side = stem.output_side().div_ceil(2);
        let (mut blocks, mut channels) = (Vec::new(), WIDTHS[0]);
        for (stage, (count, width)) in blocks_per_stage.into_iter().zip(WIDTHS).enumerate() {
            for place in 0..count {
                list.layer = Some(blocks.len() as u16);
                let stride = if place == 0 && stage > 0 { 2 } else { 1 };
                let narrow = ConvolutionUnit::new(&mut list, [channels, width, 1, 1], side)?;
                let spatial = ConvolutionUnit::new(&mut list, [width, width, 3, stride], side)?;
                let output_side = spatial.output_side();
                let widen = ConvolutionUnit::new(&mut list, [width, EXPANSION * width, 1, 1], output_side)?;
                let shortcut = match place {
                    0 => Some(ConvolutionUnit::new(&mut list, [channels, EXPANSION * width, 1, stride], side)?),
                    _ => None,
                };
                blocks.push(BottleneckBlock { narrow, spatial, widen, shortcut });
                (side, channels) = (output_side, EXPANSION * width);
            }
        }
        list.layer = None;
        let weight = list.declare(u64::from(channels) * u64::from(classes), true);
        let bias = Some(list.declare(classes.into(), true));
        let head = LinearWeights { bias, ..LinearWeights::plain(weight, channels, classes, TensorSplit::Whole) };
        Some(ResNet { weights: list.declared, stem, blocks, head, relu, side: image })
    }
}

impl ModelArchitecture for ResNet {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        let images = u64::from(machine.graph.sequences);
        let numbers = images * u64::from(COLOURS) * u64::from(self.side) * u64::from(self.side);
        (numbers * NumberFormat::Single.bytes(), Some(images * INDEX))
    }

    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let stem = self.stem.apply(machine, Variable::constant(batch.input, NumberFormat::Single));
        let stem = machine.relu(stem, self.relu);
        let side = u64::from(self.stem.output_side().div_ceil(2));
        let numbers = u64::from(machine.graph.sequences) * u64::from(WIDTHS[0]) * side * side;
        let mut x = machine.max_pool(stem, numbers);
        machine.release(stem.tensor);
        for (place, block) in self.blocks.iter().enumerate() {
            machine.layer = Some(place as u16);
            let output = block.apply(machine, x, self.relu);
            machine.release(x.tensor);
            x = output;
        }
        machine.layer = None;
        let last_side = self.blocks.last().map_or(1, |block| u64::from(block.widen.output_side()));
        let pooled = machine.mean_pool(x, last_side * last_side);
        machine.release(x.tensor);
        let logits = machine.linear(pooled, self.head, Category::Logits);
        machine.release(pooled.tensor);
        let (ForwardResult::Loss, Some(classes)) = (result, batch.targets) else { return logits };
        let loss = machine.cross_entropy(logits, classes);
        machine.release(logits.tensor);
        // The recorded program left autocast before it bound the loss to its variable.
        machine.end_autocast();
        loss
    }

    /// Never called: residual networks have no checkpoints here.
    fn recompute_block(&self, _machine: &mut TensorMachine, _layer: u32, _input: Variable) -> Vec<Tensor> {
        Vec::new()
    }
}

impl ConvolutionUnit {
    /// Declares a convolution of this shape (inputs, outputs, kernel, stride) and its norm.
    fn new(list: &mut WeightList, shape: [u32; 4], side: u32) -> Option<ConvolutionUnit> {
        /// The norm's 64-bit counter, in numbers of single precision.
        const COUNTER: u64 = 2;
        let channels = shape[1];
        let shape = ConvolutionShape::new(shape, side)?;
        let weight = list.declare(shape.filter(), true);
        let [scale, shift] = [(); 2].map(|()| list.declare(channels.into(), true));
        let running = [(); 2].map(|()| list.declare_buffer(channels.into(), None));
        list.declare_buffer(COUNTER, None);
        let norm = BatchNorm { weights: NormWeights { scale, shift }, running, channels };
        Some(ConvolutionUnit { convolution: Convolution { weight, shape }, norm })
    }

    fn output_side(&self) -> u32 {
        self.convolution.shape.output_side()
    }

    fn apply(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        let convolved = machine.convolve(input, self.convolution);
        let normed = machine.batch_norm(convolved, self.norm);
        machine.release(convolved.tensor);
        normed
    }
}

impl BottleneckBlock {
    fn apply(&self, machine: &mut TensorMachine, input: Variable, relu: ReluOutput) -> Variable {
        let narrow = self.narrow.apply(machine, input);
        let narrow = machine.relu(narrow, relu);
        let spatial = self.spatial.apply(machine, narrow);
        machine.release(narrow.tensor);
        let spatial = machine.relu(spatial, relu);
        let wide = self.widen.apply(machine, spatial);
        machine.release(spatial.tensor);
        let sum = match &self.shortcut {
            Some(shortcut) => {
                let identity = shortcut.apply(machine, input);
                let sum = machine.add_in_place(wide, identity);
                machine.release(identity.tensor);
                sum
            }
            None => machine.add_in_place(wide, input),
        };
        machine.relu(sum, relu)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Op, OpKind, Trace, TraceSummary, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let all = [("image", "32"), ("batch", "4"), ("steps", "3"), ("classes", "10")];
        let all = all.iter().chain(settings);
        all.fold(Recipe::named("resnet-50").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> TraceSummary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    /// Numbers of weights that torchvision's models have, and of the statistics and counters of their norms.
    #[test]
    fn networks_have_the_known_weights() {
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
    fn kernel_search_happens_once() {
        let (off, on) = (summary(&[("autotune", "off")]), summary(&[("autotune", "on")]));
        let searches = on.count(OpKind::EmptyCache);
        // 23 shapes in three directions, less the images' own gradient.
        assert_eq!(searches, 23 * 3 - 1);
        assert_eq!(on.count(OpKind::Alloc), off.count(OpKind::Alloc) + 2 * searches);
        let longer = summary(&[("autotune", "on"), ("steps", "6")]);
        assert_eq!(longer.count(OpKind::EmptyCache), searches);
    }

    #[test]
    fn transformer_techniques_are_refused() {
        for (settings, reason) in [
            (("techniques", "ckpt"), "technique 'ckpt' does not apply to residual networks"),
            (
                ("techniques", "inplace"),
                "technique 'inplace' does not apply to residual networks; its activation is set by 'activation'",
            ),
            (("techniques", "amp,zero3:2"), "technique 'zero3' does not apply to residual networks"),
            (("techniques", "fsdp:2"), "technique 'fsdp' does not apply to residual networks"),
            (("precision", "fp16"), "technique 'fp16' does not apply to residual networks"),
            (("techniques", "accum3"), "3 micro-batches do not divide 4 sequences"),
            (("depth", "51"), "there is no residual network of depth 51; the depths are 50, 101 and 152"),
        ] {
            let error = small(&[settings]).workload().err().unwrap().to_string();
            assert_eq!(error, format!("workload 'resnet-50': {reason}"));
        }
    }

    #[test]
    fn techniques_save_memory() {
        let peak = |techniques| summary(&[("image", "96"), ("batch", "32"), ("techniques", techniques)]).peak.bytes;
        for (less, more) in [("amp", ""), ("accum4", "accum2"), ("accum2", ""), ("offload", ""), ("sgd", "adam8bit")] {
            assert!(peak(less) < peak(more), "'{less}' {} against '{more}' {}", peak(less), peak(more));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn any_network_trains_and_keeps_its_level(
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

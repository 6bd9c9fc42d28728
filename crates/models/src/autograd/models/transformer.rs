//! The reference transformer: decoder-only, pre-norm, learned positions, fused attention, a ReLU MLP four times as wide,
//! an untied output head. A mixture of experts can replace the MLP.
//!
//! Written like its Python code: every local variable lives until its scope ends, and then its block is freed.

use std::sync::Arc;

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{Tensor, TensorSplit, Variable, WeightId},
        layers::{
            INDEX,
            convolution_kernels::KernelSearch,
            experts::ExpertWeights,
            linear::{LinearWeights, LoraAdapter},
            norm::NormWeights,
        },
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{self, SequenceLengths, TrainingPlan},
        techniques,
        trainer::{PlainTraining, Validation},
        weights::{DeclaredWeight, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

/// The registry entry of the transformer.
pub(crate) const TRANSFORMER: GeneratorEntry = GeneratorEntry {
    name: "transformer",
    summary: "training steps of a decoder-only transformer, operator by operator as PyTorch allocates",
    seeded: true,
    parameters: &[
        plan::STEPS,
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::VOCABULARY,
        plan::CONTEXT,
        plan::BATCH,
        plan::MIN_LENGTH,
        plan::LENGTHS,
        plan::VALIDATE_EVERY,
        plan::VALIDATION_PASSES,
        plan::VALIDATION_LENGTH,
        plan::EXPERTS,
        plan::CHOSEN_EXPERTS,
        plan::IMBALANCE,
        techniques::PRECISION,
        techniques::OPTIMIZER,
        techniques::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (TrainingPlan::read(parameters)?, parameters.count(plan::STEPS.name)?);
        plan.refuse_libraries().map_err(|reason| parameters.refuse(reason))?;
        if plan.shape.mixture.is_some() {
            plan.refuse_fully_shard().map_err(|reason| parameters.refuse(reason))?;
        }
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let validation = read_validation(parameters, plan.shape.context)?;
        let (model, kernel_search) = (Arc::new(Transformer::new(&plan)), KernelSearch::default());
        Ok(PlainTraining { plan, model, lengths, validation, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| Ok(parameter_count(&Transformer::new(&TrainingPlan::read(parameters)?).weights))),
};

fn read_validation(parameters: &Parameters<'_>, context: u32) -> Result<Option<Validation>, WorkloadError> {
    let count = |parameter: &Parameter| parameters.count(parameter.name);
    let (every, length) = (count(&plan::VALIDATE_EVERY)?, count(&plan::VALIDATION_LENGTH)?);
    if length > context {
        let reason = format!("validation_length ({length}) must not exceed the context ({context})");
        return Err(parameters.refuse(reason));
    }
    let passes = count(&plan::VALIDATION_PASSES)?;
    Ok((every > 0).then_some(Validation { every, passes, length: (length > 0).then_some(length) }))
}

/// The weights of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockWeights {
    pub(crate) norm_1: NormWeights,
    pub(crate) query_key_value: LinearWeights,
    pub(crate) projection: LinearWeights,
    pub(crate) norm_2: NormWeights,
    pub(crate) mlp: MlpWeights,
}

/// What follows attention in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MlpWeights {
    Dense { up: LinearWeights, down: LinearWeights },
    Experts(ExpertWeights),
}

/// The model, as far as it is on this rank.
#[derive(Debug)]
pub(crate) struct Transformer {
    weights: Vec<DeclaredWeight>,
    pub(crate) tokens: WeightId,
    pub(crate) positions: WeightId,
    pub(crate) blocks: Vec<BlockWeights>,
    /// The last norm and the output head; the first stage of a pipeline has neither.
    pub(crate) head: Option<(NormWeights, LinearWeights)>,
}

impl Transformer {
    /// Declares the weights of this rank, in the order of the Python code.
    pub(crate) fn new(plan: &TrainingPlan) -> Transformer {
        let mut weights = TransformerWeights { plan, list: WeightList::default() };
        let width = plan.shape.width;
        // Rows of the token table, and columns of the output head.
        let vocabulary = plan.shape.vocabulary.div_ceil(plan.techniques.tensor_ranks);
        let tokens = weights.embedding(vocabulary, width);
        let positions = weights.embedding(plan.shape.context, width);
        let blocks = (0..plan.shape.layers / plan.techniques.pipeline_stages)
            .map(|layer| {
                weights.list.layer = u16::try_from(layer).ok();
                weights.block()
            })
            .collect();
        weights.list.layer = None;
        let head = plan.has_head().then(|| {
            let norm = weights.norm(width);
            let split = if vocabulary == plan.shape.vocabulary { TensorSplit::Whole } else { TensorSplit::Outputs };
            let weight = weights.declare_rows(vocabulary, width);
            (norm, LinearWeights::plain(weight, width, vocabulary, split))
        });
        Transformer { weights: weights.list.declared, tokens, positions, blocks, head }
    }

    fn embed(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        let length = u64::from(machine.graph.length);
        let tokens = machine.embedding(self.tokens, ids, machine.tokens());
        if machine.plan.techniques.tensor_ranks > 1 {
            // Every rank looked up the rows that it has.
            machine.sum_over_tensor_ranks(tokens.tensor);
        }
        let range = machine.alloc(INDEX * length, Category::Activation);
        machine.elementwise(INDEX * length, [range]);
        let positions = machine.embedding(self.positions, range, length);
        machine.release(range);
        let x = machine.sum(tokens, positions, Some(machine.graph.sequences), Category::Activation);
        machine.release_all([tokens.tensor, positions.tensor]);
        x
    }

    fn block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Variable {
        let (middle, lowered) = match self.blocks[layer as usize].mlp {
            MlpWeights::Experts(_) => self.block_until_experts(machine, layer, input),
            MlpWeights::Dense { up, down } => {
                let (middle, hidden) = self.block_until_hidden(machine, layer, input, up);
                let lowered = machine.linear(hidden, down, Category::Temporary);
                machine.release(hidden.tensor);
                (middle, lowered)
            }
        };
        let output = machine.add(middle, lowered, Category::Activation);
        machine.release_all([lowered.tensor, middle.tensor]);
        output
    }

    /// Attention with its residual sum, and the norm after it.
    fn block_until_normed(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> (Variable, Variable) {
        let weights = &self.blocks[layer as usize];
        let normed = machine.layer_norm(input, weights.norm_1);
        let query_key_value = machine.linear(normed, weights.query_key_value, Category::Activation);
        let attended = machine.attention(query_key_value);
        let projected = machine.linear(attended, weights.projection, Category::Temporary);
        machine.release_all([query_key_value.tensor, attended.tensor, normed.tensor]);
        let middle = machine.add(input, projected, Category::Activation);
        machine.release(projected.tensor);
        let normed = machine.layer_norm(middle, weights.norm_2);
        (middle, normed)
    }

    /// The first half of the MLP included.
    fn block_until_hidden(
        &self,
        machine: &mut TensorMachine,
        layer: u32,
        input: Variable,
        up: LinearWeights,
    ) -> (Variable, Variable) {
        let (middle, normed) = self.block_until_normed(machine, layer, input);
        let raised = machine.linear(normed, up, Category::Temporary);
        machine.release(normed.tensor);
        (middle, machine.mlp_relu(raised))
    }

    /// All experts included.
    fn block_until_experts(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> (Variable, Variable) {
        let (middle, normed) = self.block_until_normed(machine, layer, input);
        let mixed = match (self.blocks[layer as usize].mlp, machine.plan.shape.mixture) {
            (MlpWeights::Experts(experts), Some(mixture)) => machine.mixture(layer, normed, &experts, &mixture),
            _ => return (middle, normed),
        };
        machine.release(normed.tensor);
        (middle, mixed)
    }
}

impl ModelArchitecture for Transformer {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        (INDEX * machine.tokens(), None)
    }

    /// The first stage of a pipeline ends with the output of its last block.
    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let ids = batch.input;
        machine.draw_expert_tokens(self.blocks.len() as u32);
        let mut x = self.embed(machine, ids);
        for layer in 0..self.blocks.len() as u32 {
            machine.enter_layer(layer);
            let output = machine.checkpointed(layer, x, [], |machine| self.block(machine, layer, x));
            machine.release(x.tensor);
            x = output;
            machine.leave_layer(layer);
        }
        machine.layer = None;
        let Some((norm, head)) = self.head else { return x };
        let normed = machine.layer_norm(x, norm);
        if let (ForwardResult::Loss, Some(chunks)) = (result, machine.plan.techniques.loss_chunks) {
            let loss = machine.fused_loss(normed, &head, ids, chunks);
            machine.release_all([normed.tensor, x.tensor]);
            return loss;
        }
        let logits = machine.linear(normed, head, Category::Logits);
        machine.release(normed.tensor);
        if result == ForwardResult::Logits {
            machine.release(x.tensor);
            return logits;
        }
        let loss = machine.cross_entropy(logits, ids);
        machine.release_all([x.tensor, logits.tensor]);
        loss
    }

    /// Stops before the last product where nothing is saved after it.
    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        let (middle, last) = match self.blocks[layer as usize].mlp {
            // The last expert saves the places of its rows: it must run to its end.
            MlpWeights::Experts(_) => self.block_until_experts(machine, layer, input),
            MlpWeights::Dense { up, down } => {
                let (middle, hidden) = self.block_until_hidden(machine, layer, input, up);
                if down.adapter.is_none() {
                    machine.save_linear(hidden, down);
                } else {
                    // The adapter saves after the product.
                    let lowered = machine.linear(hidden, down, Category::Temporary);
                    machine.release(lowered.tensor);
                }
                (middle, hidden)
            }
        };
        vec![last.tensor, middle.tensor]
    }
}

struct TransformerWeights<'a> {
    plan: &'a TrainingPlan,
    list: WeightList,
}

impl TransformerWeights<'_> {
    fn block(&mut self) -> BlockWeights {
        let width = self.plan.shape.width;
        let ranks = self.plan.techniques.tensor_ranks;
        let (narrow, wide) = (width / ranks, 4 * width / ranks);
        let split = |split| if ranks == 1 { TensorSplit::Whole } else { split };
        let norm_1 = self.norm(width);
        let query_key_value = self.linear(width, 3 * narrow, split(TensorSplit::Outputs));
        let projection = self.linear(narrow, width, split(TensorSplit::Inputs));
        let norm_2 = self.norm(width);
        let router = self.plan.shape.mixture.map(|mixture| {
            let weight = self.declare_rows(mixture.experts, width);
            LinearWeights::plain(weight, width, mixture.experts, TensorSplit::Whole)
        });
        let first = self.list.declared.len();
        let mut expert = || {
            let up = self.linear(width, wide, split(TensorSplit::Outputs));
            (up, self.linear(wide, width, split(TensorSplit::Inputs)))
        };
        let (up, down) = expert();
        for _ in 1..router.map_or(1, |router| router.outputs) {
            expert();
        }
        let mlp = match router {
            None => MlpWeights::Dense { up, down },
            Some(router) => {
                let all = (self.list.declared.len() - first) as WeightId;
                let weights_per_expert = all / router.outputs;
                MlpWeights::Experts(ExpertWeights { router, up, down, weights_per_expert })
            }
        };
        BlockWeights { norm_1, query_key_value, projection, norm_2, mlp }
    }

    fn norm(&mut self, width: u32) -> NormWeights {
        NormWeights { scale: self.declare(width.into()), shift: self.declare(width.into()) }
    }

    fn linear(&mut self, inputs: u32, outputs: u32, split: TensorSplit) -> LinearWeights {
        let weight = self.declare_rows(outputs, inputs);
        let bias = Some(self.declare(outputs.into()));
        let adapter = self.plan.techniques.lora_rank.map(|rank| LoraAdapter {
            down: self.list.declare(u64::from(inputs) * u64::from(rank), true),
            up: self.list.declare(u64::from(rank) * u64::from(outputs), true),
            rank,
        });
        LinearWeights { bias, adapter, ..LinearWeights::plain(weight, inputs, outputs, split) }
    }

    fn embedding(&mut self, rows: u32, width: u32) -> WeightId {
        let id = self.declare_rows(rows, width);
        self.list.declared[id as usize].is_embedding = true;
        id
    }

    /// Declares a weight, frozen where adapters are trained instead.
    fn declare(&mut self, elements: u64) -> WeightId {
        self.list.declare(elements, self.plan.techniques.lora_rank.is_none())
    }

    fn declare_rows(&mut self, rows: u32, columns: u32) -> WeightId {
        let elements = u64::from(rows) * u64::from(columns);
        self.list.declare_rows(rows, elements, self.plan.techniques.lora_rank.is_none())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Op, OpKind, Trace, TraceSummary, check};

    fn small(techniques: &str, steps: u32) -> Recipe {
        let shape = [("layers", 4), ("width", 256), ("heads", 4), ("vocab", 5000), ("context", 256), ("batch", 8)];
        let recipe = Recipe::named("reference-gpt-163m")
            .unwrap()
            .with("techniques", techniques)
            .with("steps", &steps.to_string());
        shape.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, &value.to_string()))
    }

    fn summary(techniques: &str) -> TraceSummary {
        check(&small(techniques, 3).workload().unwrap()).unwrap()
    }

    #[test]
    fn techniques_save_memory() {
        let peak = |techniques| summary(techniques).peak.bytes;
        for (less, more) in [
            ("amp", ""),
            ("bf16_model", "amp"),
            ("bf16_model", "bf16_master"),
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
            ("fsdp:8", "fsdp:2"),
            ("fsdp:2", ""),
            ("fsdp:2,ckpt", "fsdp:2"),
            ("fsdp:2,bf16_master", "fsdp:2"),
            ("fsdp:2,bf16_model", "fsdp:2,bf16_master"),
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
    fn techniques_leave_their_operations() {
        let count = |techniques, kind| summary(techniques).count(kind);
        assert_eq!(count("", OpKind::Collective) + count("", OpKind::HostAlloc) + count("", OpKind::EmptyCache), 0);
        for ranks in ["ddp", "zero1:2", "zero2:2", "zero3:2", "fsdp:2", "tensor_parallel:2"] {
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

    /// FSDP divides the rows of a weight, and pads them to as many on every rank. Its buffers have streams of their own, and
    /// the gradients of a block are one tensor.
    #[test]
    fn fully_sharded_rows_are_padded() {
        let sizes_of = |techniques: &str| {
            let trace = Trace::read(&small(techniques, 1).workload().unwrap()).unwrap();
            let sizes = trace.events.iter().filter_map(|event| match event.op {
                Op::Alloc { stream, bytes, .. } => Some((stream.index(), bytes)),
                _ => None,
            });
            sizes.collect::<Vec<(usize, u64)>>()
        };
        let (gather, reduce) = (1, 2);
        // Of 5000 tokens, 1667 on each of three ranks; of the other sizes, 256, 768 and 1024, 86, 256 and 342.
        let table = 1667 * 256;
        let block = 256 * 256 + 256 + 86 * 256 + 86 + 342 * 256 + 342 + 86 * 1024 + 86 + 4 * 86;
        let root = 2 * table + 86 * 256 + 2 * 86;
        let sizes = sizes_of("fsdp:3");
        let on = |sizes: &[(usize, u64)], stream: usize| {
            let mut found: Vec<u64> = sizes.iter().filter(|(of, _)| *of == stream).map(|(_, bytes)| *bytes).collect();
            found.sort_unstable();
            found
        };
        assert!(sizes.contains(&(0, table * 4)) && sizes.contains(&(0, 3 * table * 4)));
        // Blocks are gathered for forward and for backward, the rest once.
        let mut expected = vec![3 * 4 * block; 8];
        expected.push(3 * 4 * root);
        assert_eq!(on(&sizes, gather), expected);
        assert_eq!(on(&sizes, reduce), [[4 * block; 4].as_slice(), &[4 * root]].concat());
        // A policy for mixed precision gathers 16 bits, by way of a narrowed copy, and reduces 32 bits.
        let mixed = sizes_of("fsdp:3,bf16_master");
        assert!(mixed.contains(&(gather, 2 * block)) && mixed.contains(&(gather, 3 * 2 * block)));
        assert_eq!(on(&mixed, reduce), on(&sizes, reduce));
        assert_eq!(on(&sizes_of("fsdp:3,accum2"), reduce).len(), 10, "every micro-batch is reduced");
    }

    /// Pinned buffers are used again: a second step needs no new ones.
    #[test]
    fn offloading_reuses_host_memory() {
        let buffers = |steps| check(&small("offload", steps).workload().unwrap()).unwrap().count(OpKind::HostAlloc);
        assert_eq!(buffers(1), buffers(4));
    }

    #[test]
    fn every_block_has_category_and_layer() {
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
    fn validation_leaves_nothing() {
        let with = |every: &str| {
            let recipe = small("", 4).with("validate_every", every).with("validation_passes", "3");
            check(&recipe.with("validation_length", "100").workload().unwrap()).unwrap()
        };
        let (without, between) = (with("0"), with("2"));
        assert!(between.phases.iter().any(|phase| phase.raw() == "validate"));
        assert_eq!((between.live_bytes, between.peak.bytes), (without.live_bytes, without.peak.bytes));
        // Three passes after the second step, none after the last.
        let of_a_pass = (between.count(OpKind::Alloc) - without.count(OpKind::Alloc)) / 3;
        assert!((50..100).contains(&of_a_pass), "{of_a_pass}");
        let error = small("", 4).with("validation_length", "300").workload().err().unwrap().to_string();
        assert!(error.ends_with("validation_length (300) must not exceed the context (256)"), "{error}");
    }

    #[test]
    fn given_lengths_are_used_in_turn() {
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
        assert!(error.ends_with("'512' in lengths is not a whole number from 1 to the context (256)"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any combination is refused with a reason, or gives a consistent trace whose later steps keep the same memory.
        #[test]
        fn any_techniques_are_refused_or_train(
            words in prop::sample::subsequence(vec![
                "amp", "fp16", "bf16_model", "ckpt", "accum2", "offload", "offload_optimizer", "offload_params",
                "offload_component", "inplace", "zero_fill", "empty_cache", "gc", "sgd", "adam8bit", "fused",
                "foreach_off", "chunked_loss", "lora", "ddp", "zero1:2", "zero2:2", "zero3:2", "fsdp:3",
                "tensor_parallel:2", "pipeline:2", "tf32",
            ], 0..6),
        ) {
            let techniques = words.join(",");
            match small(&techniques, 2).workload() {
                Err(error) => {
                    let is_reason = ["contradict", "together are not modelled"].map(|words| error.to_string().contains(words));
                    prop_assert!(is_reason.contains(&true), "{techniques}: {error}");
                }
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

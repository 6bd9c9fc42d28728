//! T5 as Hugging Face's transformers (5.22) runs it, with SDPA: an encoder, and a decoder that attends to its result.
//!
//! Written after the modeling file: every operator there is one here, in the same order, and every local variable lives
//! until its scope ends. The target is as long as the source.

use std::{iter, sync::Arc};

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{AttentionShape, Tensor, TensorSplit, Variable, WeightId},
        layers::{INDEX, ReluOutput, convolution_kernels::KernelSearch, linear::LinearWeights, pointwise::Factor},
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{self, SequenceLengths, TrainingPlan},
        techniques::{self, NumberFormat},
        trainer::PlainTraining,
        weights::{DeclaredWeight, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

const DECODER_LAYERS: Parameter =
    Parameter::count("decoder_layers", 0..=10_000, "0", "blocks of the decoder; 0: as many as layers");
const GATED: Parameter = Parameter::choice(
    "gated",
    &["yes", "no"],
    "no",
    "whether the MLP is gated, with GELU, as in version 1.1, or has ReLU",
);
const BUCKETS: Parameter = Parameter::count("buckets", 2..=1 << 16, "32", "buckets of relative positions");
const TIED: Parameter =
    Parameter::choice("tied", &["yes", "no"], "yes", "whether the output head is the table of tokens");
const DROPOUT: Parameter =
    Parameter::choice("dropout", &["yes", "no"], "yes", "whether numbers are dropped in training");

/// The registry entry of T5.
pub(crate) const ENCODER_DECODER: GeneratorEntry = GeneratorEntry {
    name: "encoder_decoder",
    summary: "training steps of T5, an encoder and a decoder of Hugging Face's transformers, operator by operator",
    seeded: true,
    parameters: &[
        plan::STEPS,
        plan::LAYERS,
        DECODER_LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::HEAD_WIDTH,
        plan::FFN,
        GATED,
        BUCKETS,
        TIED,
        DROPOUT,
        plan::VOCABULARY,
        plan::CONTEXT,
        plan::BATCH,
        plan::MIN_LENGTH,
        plan::LENGTHS,
        techniques::PRECISION,
        techniques::OPTIMIZER,
        techniques::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (TrainingPlan::read(parameters)?, parameters.count(plan::STEPS.name)?);
        let shape = T5Shape::read(parameters, &plan)?;
        plan.refuse_unmodelled(false, shape.head_width).map_err(|reason| parameters.refuse(reason))?;
        plan.refuse_fully_shard().map_err(|reason| parameters.refuse(reason))?;
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let model = Arc::new(T5::new(&plan, shape));
        let kernel_search = KernelSearch::default();
        Ok(PlainTraining { plan, model, lengths, validation: None, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| {
        let plan = TrainingPlan::read(parameters)?;
        let shape = T5Shape::read(parameters, &plan)?;
        Ok(parameter_count(&T5::new(&plan, shape).weights))
    }),
};

/// What the configuration says, beyond the plan.
#[derive(Clone, Copy, Debug)]
struct T5Shape {
    decoder_layers: u32,
    head_width: u32,
    ffn: u32,
    is_gated: bool,
    buckets: u32,
    is_tied: bool,
    drops: bool,
}

impl T5Shape {
    fn read(parameters: &Parameters<'_>, plan: &TrainingPlan) -> Result<T5Shape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        Ok(T5Shape {
            decoder_layers: or(count(&DECODER_LAYERS)?, plan.shape.layers),
            head_width: or(count(&plan::HEAD_WIDTH)?, plan.shape.width / plan.shape.heads),
            ffn: count(&plan::FFN)?,
            is_gated: parameters.choice(GATED.name)? == "yes",
            buckets: count(&BUCKETS)?,
            is_tied: parameters.choice(TIED.name)? == "yes",
            drops: parameters.choice(DROPOUT.name)? == "yes",
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct T5Attention {
    query: LinearWeights,
    key: LinearWeights,
    value: LinearWeights,
    output: LinearWeights,
    /// The table of relative positions, in the first block of a stack.
    positions: Option<WeightId>,
    norm: WeightId,
}

#[derive(Clone, Copy, Debug)]
struct T5Block {
    attention: T5Attention,
    /// Attention to the encoder's result, in the decoder.
    cross: Option<T5Attention>,
    /// Where the MLP has one.
    gate: Option<LinearWeights>,
    up: LinearWeights,
    down: LinearWeights,
    norm: WeightId,
}

/// What blocks get beside their input. The first block of a stack makes both biases.
#[derive(Clone, Copy, Debug, Default)]
struct BlockArguments {
    bias: Option<Variable>,
    cross_bias: Option<Variable>,
    encoded: Option<Variable>,
}

impl BlockArguments {
    fn tensors(&self) -> impl Iterator<Item = Tensor> {
        [self.bias, self.cross_bias, self.encoded].into_iter().flatten().map(|argument| argument.tensor)
    }

    fn biases(&self) -> impl Iterator<Item = Variable> {
        [self.bias, self.cross_bias].into_iter().flatten()
    }
}

/// See the [module](self).
#[derive(Debug)]
struct T5 {
    shape: T5Shape,
    weights: Vec<DeclaredWeight>,
    tokens: WeightId,
    /// The encoder's, then the decoder's.
    blocks: Vec<T5Block>,
    encoder_layers: u32,
    /// Of the encoder and of the decoder.
    norms: [WeightId; 2],
    head: LinearWeights,
}

impl T5 {
    /// Declares the weights in the order of `model.to`.
    fn new(plan: &TrainingPlan, shape: T5Shape) -> T5 {
        let mut weights = T5Weights { plan, shape, list: WeightList::default() };
        let (width, vocabulary) = (plan.shape.width, plan.shape.vocabulary);
        let tokens = weights.declare(vocabulary, width);
        weights.list.declared[tokens as usize].is_embedding = true;
        let mut blocks = Vec::new();
        let norms = [(0, plan.shape.layers), (plan.shape.layers, shape.decoder_layers)].map(|(first, count)| {
            for layer in 0..count {
                weights.list.layer = u16::try_from(first + layer).ok();
                blocks.push(weights.block(layer == 0, first > 0));
            }
            weights.list.layer = None;
            weights.declare(width, 1)
        });
        let head = if shape.is_tied { tokens } else { weights.declare(vocabulary, width) };
        let head =
            LinearWeights { flattens: true, ..LinearWeights::plain(head, width, vocabulary, TensorSplit::Whole) };
        let encoder_layers = plan.shape.layers;
        T5 { shape, weights: weights.list.declared, tokens, blocks, encoder_layers, norms, head }
    }

    fn drop(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        if self.shape.drops {
            return machine.dropout(input);
        }
        machine.retain(input.tensor);
        input
    }

    /// An RMS norm of plain operators: only the mean of squares is made from rows in single precision.
    fn norm(&self, machine: &mut TensorMachine, input: Variable, scale: WeightId) -> Variable {
        let wide = machine.in_format(input, NumberFormat::Single);
        let squares = machine.power(wide);
        machine.release(wide.tensor);
        let variance = machine.row_mean(squares, machine.plan.shape.width.into());
        machine.release(squares.tensor);
        let shifted = machine.shift(variance);
        let inverse = machine.inverse_root(shifted);
        machine.release(shifted.tensor);
        let normed = machine.multiply(input, Factor::per_row(inverse), Category::Activation);
        machine.release(inverse.tensor);
        let narrow = machine.in_format(normed, machine.plan.precision.of_weights());
        machine.release(normed.tensor);
        let weight = machine.weight_factor(scale);
        let output = machine.multiply(weight, narrow, Category::Activation);
        machine.release_all([narrow.tensor, variance.tensor]);
        output
    }

    /// Attention of `input` to `source`, with a mask.
    fn attention(
        &self,
        machine: &mut TensorMachine,
        weights: &T5Attention,
        [input, source]: [Variable; 2],
        mask: impl FnOnce(&mut TensorMachine, NumberFormat) -> Variable,
    ) -> Variable {
        let query = machine.linear(input, weights.query, Category::Activation);
        let [key, value] =
            [weights.key, weights.value].map(|linear| machine.linear(source, linear, Category::Activation));
        let mask = mask(machine, query.number);
        let heads = machine.plan.shape.heads;
        let shape = AttentionShape {
            number: machine.plan.precision.of_attended(),
            heads,
            key_value_heads: heads,
            head_width: self.shape.head_width,
            is_causal: false,
        };
        let attended = machine.masked_attention([query, key, value], mask, shape);
        machine.release(mask.tensor);
        let output = machine.linear(attended, weights.output, Category::Temporary);
        machine.release_all([attended.tensor, query.tensor, key.tensor, value.tensor]);
        output
    }

    /// The input plus a branch, after dropout.
    fn residual(&self, machine: &mut TensorMachine, input: Variable, branch: Variable) -> Variable {
        let dropped = self.drop(machine, branch);
        let sum = machine.add(input, dropped, Category::Activation);
        machine.release(dropped.tensor);
        sum
    }

    fn mlp(&self, machine: &mut TensorMachine, weights: &T5Block, input: Variable) -> Variable {
        let normed = self.norm(machine, input, weights.norm);
        let mut factors = None;
        let active = match weights.gate {
            None => {
                let raised = machine.linear(normed, weights.up, Category::Activation);
                machine.relu(raised, ReluOutput::NewTensor)
            }
            Some(gate) => {
                let gate = machine.linear(normed, gate, Category::Activation);
                let opened = machine.composite_gelu(gate);
                machine.release(gate.tensor);
                let raised = machine.linear(normed, weights.up, Category::Activation);
                factors = Some([opened.tensor, raised.tensor]);
                machine.multiply(opened, raised, Category::Activation)
            }
        };
        let dropped = self.drop(machine, active);
        machine.release(active.tensor);
        // Autocast runs the product in 16 bits all the same.
        let wide = machine.in_format(dropped, machine.plan.precision.of_weights());
        machine.release(dropped.tensor);
        let lowered = machine.linear(wide, weights.down, Category::Temporary);
        machine.release(wide.tensor);
        factors.into_iter().flatten().for_each(|factor| machine.release(factor));
        machine.release(normed.tensor);
        let output = self.residual(machine, input, lowered);
        machine.release(lowered.tensor);
        output
    }

    fn block(
        &self,
        machine: &mut TensorMachine,
        layer: u32,
        input: Variable,
        arguments: &mut BlockArguments,
    ) -> Variable {
        let weights = &self.blocks[layer as usize];
        let (is_decoder, heads) = (weights.cross.is_some(), machine.plan.shape.heads);
        let normed = self.norm(machine, input, weights.attention.norm);
        let attended = self.attention(machine, &weights.attention, [normed; 2], |machine, _| {
            let table = weights.attention.positions.unwrap_or_default();
            let bias = *arguments.bias.get_or_insert_with(|| machine.position_bias(table, heads, !is_decoder));
            machine.bias_mask(bias, is_decoder)
        });
        let mut middle = self.residual(machine, input, attended);
        machine.release_all([attended.tensor, normed.tensor]);
        if let (Some(cross), Some(encoded)) = (&weights.cross, arguments.encoded) {
            let normed = self.norm(machine, middle, cross.norm);
            let attended = self.attention(machine, cross, [normed, encoded], |machine, number| {
                let bias = *arguments.cross_bias.get_or_insert_with(|| machine.zero_bias(heads, number));
                machine.retain(bias.tensor);
                bias
            });
            let sum = self.residual(machine, middle, attended);
            machine.release_all([attended.tensor, normed.tensor, middle.tensor]);
            middle = sum;
        }
        let output = self.mlp(machine, weights, middle);
        machine.release(middle.tensor);
        output
    }

    /// The encoder, or the decoder where there is an encoder's result.
    fn stack(&self, machine: &mut TensorMachine, tokens: Tensor, encoded: Option<Variable>) -> Variable {
        let (first, last, norm) = match encoded {
            None => (0, self.encoder_layers, self.norms[0]),
            Some(_) => (self.encoder_layers, self.blocks.len() as u32, self.norms[1]),
        };
        let count = machine.tokens();
        let embedded = machine.embedding(self.tokens, tokens, count);
        let mut hidden = self.drop(machine, embedded);
        let mut arguments = BlockArguments { encoded, ..BlockArguments::default() };
        for layer in first..last {
            machine.enter_layer(layer);
            let held: Vec<Tensor> = arguments.tensors().collect();
            let output =
                machine.checkpointed(layer, hidden, held, |machine| self.block(machine, layer, hidden, &mut arguments));
            machine.release(hidden.tensor);
            hidden = output;
            machine.leave_layer(layer);
            if layer == first {
                machine.graph.arguments.extend(arguments.biases());
            }
        }
        machine.layer = None;
        let normed = self.norm(machine, hidden, norm);
        machine.release(hidden.tensor);
        let output = self.drop(machine, normed);
        machine.release_all([normed.tensor, embedded.tensor]);
        arguments.biases().for_each(|bias| machine.release(bias.tensor));
        output
    }

    /// The arguments of a block that runs again. The forward pass left, in order: the encoder's bias, its result, and
    /// both biases of the decoder.
    fn arguments_of(&self, machine: &TensorMachine, layer: u32) -> BlockArguments {
        let argument = |place: usize| machine.graph.arguments.get(place).copied();
        let is_decoder = layer >= self.encoder_layers;
        let is_first = layer == 0 || layer == self.encoder_layers;
        BlockArguments {
            bias: argument(if is_decoder { 2 } else { 0 }).filter(|_| !is_first),
            cross_bias: argument(3).filter(|_| is_decoder && !is_first),
            encoded: argument(1).filter(|_| is_decoder),
        }
    }

    /// The labels, moved by one token, with a first token before them.
    fn shifted_labels(&self, machine: &mut TensorMachine) -> Tensor {
        let (sequences, length) = (u64::from(machine.graph.sequences), u64::from(machine.graph.length));
        let shifted = machine.temporary(INDEX * sequences * length);
        let copied = machine.temporary(INDEX * sequences * (length - 1));
        machine.elementwise(2 * machine.bytes(copied), [copied, shifted]);
        machine.release(copied);
        let is_ignored = machine.temporary(sequences * length);
        machine.elementwise(machine.bytes(shifted), [is_ignored, shifted]);
        machine.release(is_ignored);
        shifted
    }
}

impl ModelArchitecture for T5 {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        (INDEX * machine.tokens(), None)
    }

    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let encoded = self.stack(machine, batch.input, None);
        machine.graph.arguments.push(encoded);
        let targets = self.shifted_labels(machine);
        let decoded = self.stack(machine, targets, Some(encoded));
        let scaled = if self.shape.is_tied {
            machine.scale(decoded)
        } else {
            machine.retain(decoded.tensor);
            decoded
        };
        let logits = machine.linear(scaled, self.head, Category::Logits);
        let result = match result {
            ForwardResult::Logits => logits,
            ForwardResult::Loss => {
                let loss = machine.cross_entropy(logits, batch.input);
                machine.release(logits.tensor);
                loss
            }
        };
        machine.release_all([scaled.tensor, decoded.tensor, targets, encoded.tensor]);
        result
    }

    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        let mut arguments = self.arguments_of(machine, layer);
        let is_first = layer == 0 || layer == self.encoder_layers;
        let output = self.block(machine, layer, input, &mut arguments);
        let made = arguments.biases().filter(|_| is_first);
        iter::once(output).chain(made).map(|variable| variable.tensor).collect()
    }
}

struct T5Weights<'a> {
    plan: &'a TrainingPlan,
    shape: T5Shape,
    list: WeightList,
}

impl T5Weights<'_> {
    fn block(&mut self, is_first: bool, is_decoder: bool) -> T5Block {
        let width = self.plan.shape.width;
        let attention = self.attention(is_first);
        let cross = is_decoder.then(|| self.attention(false));
        let gate = self.shape.is_gated.then(|| self.linear(width, self.shape.ffn));
        let up = self.linear(width, self.shape.ffn);
        let down = self.linear(self.shape.ffn, width);
        let norm = self.declare(width, 1);
        T5Block { attention, cross, gate, up, down, norm }
    }

    fn attention(&mut self, has_positions: bool) -> T5Attention {
        let (width, heads) = (self.plan.shape.width, self.plan.shape.heads);
        let inner = heads * self.shape.head_width;
        let [query, key, value] = [(); 3].map(|()| self.linear(width, inner));
        let output = self.linear(inner, width);
        let positions = has_positions.then(|| self.declare(self.shape.buckets, heads));
        let norm = self.declare(width, 1);
        T5Attention { query, key, value, output, positions, norm }
    }

    fn linear(&mut self, inputs: u32, outputs: u32) -> LinearWeights {
        let weight = self.declare(inputs, outputs);
        LinearWeights { flattens: true, ..LinearWeights::plain(weight, inputs, outputs, TensorSplit::Whole) }
    }

    fn declare(&mut self, rows: u32, columns: u32) -> WeightId {
        self.list.declare(u64::from(rows) * u64::from(columns), self.plan.techniques.lora_rank.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Recipe,
        autograd::{
            plan::ModelShape,
            techniques::{Precision, Techniques},
        },
    };
    use oomph_trace::check;

    /// The number of parameters of a model of width 512.
    fn parameters(layers: u32, heads: u32, ffn: u32, is_gated: bool) -> u64 {
        let (width, vocabulary, context) = (512, 32_128, 512);
        let shape =
            ModelShape { layers, width, heads, vocabulary, context, batch: 1, min_length: context, mixture: None };
        let precision = Precision::Single { tf32: false };
        let plan = TrainingPlan { shape, precision, techniques: Techniques::default() };
        let shape = T5Shape {
            decoder_layers: layers,
            head_width: 64,
            ffn,
            is_gated,
            buckets: 32,
            is_tied: !is_gated,
            drops: true,
        };
        parameter_count(&T5::new(&plan, shape).weights)
    }

    #[test]
    fn t5_small_has_its_published_parameters() {
        assert_eq!(parameters(6, 8, 2048, false), 60_506_624);
    }

    /// The peak of the rehearsed program. A block that runs again makes its mask again, and nothing holds that one after the
    /// block's backward.
    #[test]
    fn masks_that_are_made_again_are_released() {
        let settings = [("batch", "2"), ("context", "64"), ("steps", "3"), ("techniques", "bf16_model,ckpt")];
        let recipe = Recipe::named("t5-small").unwrap();
        let recipe = settings.iter().fold(recipe, |recipe, (name, value)| recipe.with(name, value));
        assert_eq!(check(&recipe.workload().unwrap()).unwrap().peak.bytes, 672_307_202);
    }

    #[test]
    fn t5_v1_1_small_has_its_published_parameters() {
        assert_eq!(parameters(8, 6, 1024, true), 76_961_152);
    }
}

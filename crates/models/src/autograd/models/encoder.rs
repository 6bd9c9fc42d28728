//! Encoders as Hugging Face's transformers (5.22) runs them, with SDPA and without a mask: BERT with the head of a masked
//! language model, and ViT with the head of an image classifier.
//!
//! Written after the modeling files: every operator there is one here, in the same order, and every local variable lives
//! until its scope ends.

use std::sync::Arc;

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{AttentionShape, Tensor, TensorSplit, Variable, WeightId},
        layers::{
            INDEX,
            convolution_kernels::KernelSearch,
            embedding::{Lookup, PatchShape, PatchWeights},
            linear::LinearWeights,
            norm::NormWeights,
        },
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{self, ModelShape, SequenceLengths, TrainingPlan},
        techniques::{self, NumberFormat, Techniques},
        trainer::PlainTraining,
        weights::{DeclaredWeight, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

const POSITIONS: Parameter =
    Parameter::count("positions", 0..=1 << 20, "0", "positions that the model has learned; 0: the context's");
const TOKEN_TYPES: Parameter = Parameter::count("token_types", 1..=1 << 16, "2", "different kinds of tokens");
const DROPOUT: Parameter =
    Parameter::choice("dropout", &["yes", "no"], "yes", "whether numbers are dropped in training");
const IMAGE: Parameter = Parameter::count("image", 1..=1 << 14, "224", "rows, and columns, of an image");
const PATCH: Parameter = Parameter::count("patch", 1..=1 << 10, "16", "rows, and columns, of a patch");
const CHANNELS: Parameter = Parameter::count("channels", 1..=1 << 10, "3", "channels of an image");
const CLASSES: Parameter = Parameter::count("classes", 1..=1 << 20, "1000", "classes of images");

/// The registry entry of BERT.
pub(crate) const ENCODER: GeneratorEntry = GeneratorEntry {
    name: "encoder",
    summary: "training steps of BERT, a masked language model of Hugging Face's transformers, operator by operator",
    seeded: true,
    parameters: &[
        plan::STEPS,
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::FFN,
        plan::VOCABULARY,
        POSITIONS,
        TOKEN_TYPES,
        DROPOUT,
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
        plan.refuse_unmodelled(false, plan.shape.head_width()).map_err(|reason| parameters.refuse(reason))?;
        plan.refuse_fully_shard().map_err(|reason| parameters.refuse(reason))?;
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let model = Arc::new(Bert::new(&plan, BertShape::read(parameters)?));
        let kernel_search = KernelSearch::default();
        Ok(PlainTraining { plan, model, lengths, validation: None, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| {
        let plan = TrainingPlan::read(parameters)?;
        Ok(parameter_count(&Bert::new(&plan, BertShape::read(parameters)?).weights))
    }),
};

/// The registry entry of ViT.
pub(crate) const VISION_ENCODER: GeneratorEntry = GeneratorEntry {
    name: "vision_encoder",
    summary: "training steps of ViT, an image classifier of Hugging Face's transformers, operator by operator",
    seeded: true,
    parameters: &[
        plan::STEPS,
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::FFN,
        IMAGE,
        PATCH,
        CHANNELS,
        CLASSES,
        plan::BATCH,
        techniques::PRECISION,
        techniques::OPTIMIZER,
        techniques::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, shape) = read_vision(parameters)?;
        plan.refuse_unmodelled(false, plan.shape.head_width()).map_err(|reason| parameters.refuse(reason))?;
        plan.refuse_fully_shard().map_err(|reason| parameters.refuse(reason))?;
        let steps = parameters.count(plan::STEPS.name)?;
        let lengths = SequenceLengths::fixed(plan.shape);
        let model = Arc::new(Vit::new(&plan, shape));
        let kernel_search = KernelSearch::default();
        Ok(PlainTraining { plan, model, lengths, validation: None, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| {
        let (plan, shape) = read_vision(parameters)?;
        Ok(parameter_count(&Vit::new(&plan, shape).weights))
    }),
};

/// What BERT's configuration says, beyond the plan.
#[derive(Clone, Copy, Debug)]
struct BertShape {
    ffn: u32,
    positions: u32,
    token_types: u32,
    drops: bool,
}

impl BertShape {
    fn read(parameters: &Parameters<'_>) -> Result<BertShape, WorkloadError> {
        let (positions, context) = (parameters.count(POSITIONS.name)?, parameters.count(plan::CONTEXT.name)?);
        let positions = if positions == 0 { context } else { positions };
        if positions < context {
            return Err(parameters.refuse(format!("{positions} positions are fewer than the context ({context})")));
        }
        Ok(BertShape {
            ffn: parameters.count(plan::FFN.name)?,
            positions,
            token_types: parameters.count(TOKEN_TYPES.name)?,
            drops: parameters.choice(DROPOUT.name)? == "yes",
        })
    }
}

/// What ViT's configuration says, beyond the plan.
#[derive(Clone, Copy, Debug)]
struct VitShape {
    ffn: u32,
    classes: u32,
    patches: PatchShape,
}

/// The plan of a network for images, whose tokens are patches.
fn read_vision(parameters: &Parameters<'_>) -> Result<(TrainingPlan, VitShape), WorkloadError> {
    let count = |parameter: &Parameter| parameters.count(parameter.name);
    let (width, heads, batch) = (count(&plan::WIDTH)?, count(&plan::HEADS)?, count(&plan::BATCH)?);
    if !width.is_multiple_of(heads) {
        return Err(parameters.refuse(format!("{heads} heads do not divide a width of {width}")));
    }
    let patches = PatchShape { channels: count(&CHANNELS)?, side: count(&IMAGE)?, patch: count(&PATCH)?, width };
    if patches.patches() == 0 {
        return Err(parameters.refuse(format!("an image of {0} x {0} has no whole patch", patches.side)));
    }
    let shape = VitShape { ffn: count(&plan::FFN)?, classes: count(&CLASSES)?, patches };
    let tokens = patches.patches() + 1;
    let model = ModelShape {
        layers: count(&plan::LAYERS)?,
        width,
        heads,
        vocabulary: shape.classes,
        context: tokens,
        batch,
        min_length: tokens,
        mixture: None,
    };
    let (precision, techniques) = Techniques::read(parameters)?;
    let plan = TrainingPlan { shape: model, precision, techniques };
    plan.check().map_err(|reason| parameters.refuse(reason))?;
    Ok((plan, shape))
}

/// The weights of a block. Which norm comes when is up to the model.
#[derive(Clone, Copy, Debug)]
struct EncoderBlock {
    query: LinearWeights,
    key: LinearWeights,
    value: LinearWeights,
    output: LinearWeights,
    up: LinearWeights,
    down: LinearWeights,
    norms: [NormWeights; 2],
}

impl EncoderBlock {
    /// Queries, keys and values.
    fn project(&self, machine: &mut TensorMachine, input: Variable) -> [Variable; 3] {
        [self.query, self.key, self.value].map(|linear| machine.linear(input, linear, Category::Activation))
    }

    /// Attention of every token to all tokens, without the product with the output weight.
    fn attend(&self, machine: &mut TensorMachine, projected: [Variable; 3]) -> Variable {
        let shape = AttentionShape {
            number: machine.plan.precision.of_attended(),
            heads: machine.plan.shape.heads,
            key_value_heads: machine.plan.shape.heads,
            head_width: machine.plan.shape.head_width(),
            is_causal: false,
        };
        machine.grouped_attention(projected, shape)
    }

    /// The MLP, until before the product that makes rows as narrow as they were.
    fn raise(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        let raised = machine.linear(input, self.up, Category::Activation);
        let active = machine.smooth_activation(raised);
        machine.release(raised.tensor);
        active
    }
}

/// Runs all blocks. The caller of the blocks holds their first input until they end.
fn run_blocks(
    machine: &mut TensorMachine,
    count: u32,
    input: Variable,
    block: impl Fn(&mut TensorMachine, u32, Variable) -> Variable,
) -> Variable {
    machine.retain(input.tensor);
    let mut hidden = input;
    for layer in 0..count {
        machine.enter_layer(layer);
        let output = machine.checkpointed(layer, hidden, [], |machine| block(machine, layer, hidden));
        machine.release(hidden.tensor);
        hidden = output;
        machine.leave_layer(layer);
    }
    machine.layer = None;
    hidden
}

/// BERT: norms follow the sums.
#[derive(Debug)]
struct Bert {
    shape: BertShape,
    weights: Vec<DeclaredWeight>,
    words: WeightId,
    positions: WeightId,
    token_types: WeightId,
    norm: NormWeights,
    position_indices: WeightId,
    blocks: Vec<EncoderBlock>,
    transform: LinearWeights,
    transform_norm: NormWeights,
    head: LinearWeights,
}

impl Bert {
    /// Declares the weights in the order of `model.to`.
    fn new(plan: &TrainingPlan, shape: BertShape) -> Bert {
        let mut weights = EncoderWeights { plan, list: WeightList::default() };
        let (width, vocabulary) = (plan.shape.width, plan.shape.vocabulary);
        let words = weights.declare(vocabulary, width);
        weights.list.declared[words as usize].is_embedding = true;
        let positions = weights.declare(shape.positions, width);
        let token_types = weights.declare(shape.token_types, width);
        let norm = weights.norm();
        // The numbers of all positions, and a kind for each.
        let [position_indices, _] = [(); 2].map(|()| weights.indices(shape.positions));
        let blocks = weights.blocks(|weights| weights.post_norm_block(shape.ffn));
        let transform = weights.linear(width, width);
        let transform_norm = weights.norm();
        let bias = weights.declare(vocabulary, 1);
        let head = LinearWeights { weight: words, bias: Some(bias), outputs: vocabulary, ..transform };
        Bert {
            shape,
            weights: weights.list.declared,
            words,
            positions,
            token_types,
            norm,
            position_indices,
            blocks,
            transform,
            transform_norm,
            head,
        }
    }

    fn drop(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        if self.shape.drops {
            return machine.dropout(input);
        }
        machine.retain(input.tensor);
        input
    }

    fn embeddings(&self, machine: &mut TensorMachine, batch: TrainingBatch) -> Variable {
        let (tokens, length) = (machine.tokens(), u64::from(machine.graph.length));
        let kinds = machine.temporary(INDEX * length);
        let words = machine.embedding(self.words, batch.input, tokens);
        let several = machine.several_sequences();
        let lookup = Lookup {
            count: tokens,
            width: machine.plan.shape.width,
            is_expanded: several.is_some(),
            is_permuted: false,
        };
        let types = machine.look_up(self.token_types, kinds, lookup);
        let typed = machine.add(words, types, Category::Temporary);
        let indices = machine.weight_on_device(self.position_indices);
        let positions = machine.embedding(self.positions, indices, length);
        let placed = machine.sum(typed, positions, several, Category::Activation);
        machine.release(typed.tensor);
        let normed = machine.layer_norm(placed, self.norm);
        machine.release(placed.tensor);
        let dropped = self.drop(machine, normed);
        machine.release_all([normed.tensor, words.tensor, types.tensor, positions.tensor, kinds]);
        dropped
    }

    fn block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Variable {
        let weights = &self.blocks[layer as usize];
        let projected = weights.project(machine, input);
        let attended = weights.attend(machine, projected);
        machine.release_all(projected.map(|part| part.tensor));
        let middle = self.add_and_norm(machine, attended, weights.output, input, weights.norms[0]);
        machine.release(attended.tensor);
        let raised = weights.raise(machine, middle);
        let output = self.add_and_norm(machine, raised, weights.down, middle, weights.norms[1]);
        machine.release_all([raised.tensor, middle.tensor]);
        output
    }

    /// A product, dropout, the sum with the residual and a norm.
    fn add_and_norm(
        &self,
        machine: &mut TensorMachine,
        input: Variable,
        linear: LinearWeights,
        residual: Variable,
        norm: NormWeights,
    ) -> Variable {
        let lowered = machine.linear(input, linear, Category::Temporary);
        let dropped = self.drop(machine, lowered);
        machine.release(lowered.tensor);
        let sum = machine.add(dropped, residual, Category::Activation);
        let normed = machine.layer_norm(sum, norm);
        machine.release_all([sum.tensor, dropped.tensor]);
        normed
    }

    /// The head: a product, GELU, a norm, and the product with the table of words.
    fn logits(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        let transformed = machine.linear(input, self.transform, Category::Activation);
        let active = machine.smooth_activation(transformed);
        machine.release(transformed.tensor);
        // Autocast runs norms in single precision.
        let is_widened = machine.plan.precision.is_autocast();
        let wide = machine.in_format(active, if is_widened { NumberFormat::Single } else { active.number });
        let normed = machine.layer_norm(wide, self.transform_norm);
        machine.release_all([wide.tensor, active.tensor]);
        let logits = machine.linear(normed, self.head, Category::Logits);
        machine.release(normed.tensor);
        logits
    }
}

impl ModelArchitecture for Bert {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        (INDEX * machine.tokens(), None)
    }

    /// The bias of the head is its own weight, and those of its transform are of a part of it.
    fn update_order(&self) -> Vec<WeightId> {
        let (first, bias) = (self.transform.weight, self.weights.len() as WeightId - 1);
        (0..first).chain([bias]).chain(first..bias).collect()
    }

    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let embedded = self.embeddings(machine, batch);
        let count = self.blocks.len() as u32;
        let hidden = run_blocks(machine, count, embedded, |machine, layer, input| self.block(machine, layer, input));
        machine.release(embedded.tensor);
        let logits = self.logits(machine, hidden);
        if result == ForwardResult::Logits {
            machine.release(hidden.tensor);
            return logits;
        }
        let loss = machine.cross_entropy(logits, batch.input);
        machine.release_all([hidden.tensor, logits.tensor]);
        loss
    }

    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        vec![self.block(machine, layer, input).tensor]
    }
}

/// ViT: norms come before attention and MLP.
#[derive(Debug)]
struct Vit {
    shape: VitShape,
    weights: Vec<DeclaredWeight>,
    patches: PatchWeights,
    class_token: WeightId,
    positions: WeightId,
    blocks: Vec<EncoderBlock>,
    norm: NormWeights,
    head: LinearWeights,
}

impl Vit {
    /// Declares the weights in the order of `model.to`.
    fn new(plan: &TrainingPlan, shape: VitShape) -> Vit {
        let mut weights = EncoderWeights { plan, list: WeightList::default() };
        let width = plan.shape.width;
        let filter = weights.declare_numbers(shape.patches.filter());
        let bias = weights.declare(width, 1);
        let class_token = weights.declare(width, 1);
        let positions = weights.declare(shape.patches.patches() + 1, width);
        let blocks = weights.blocks(|weights| weights.pre_norm_block(shape.ffn));
        let norm = weights.norm();
        let head = weights.linear(width, shape.classes);
        Vit {
            shape,
            weights: weights.list.declared,
            patches: PatchWeights { filter, bias, shape: shape.patches },
            class_token,
            positions,
            blocks,
            norm,
            head,
        }
    }

    fn embeddings(&self, machine: &mut TensorMachine, batch: TrainingBatch) -> Variable {
        let images = Variable::constant(batch.input, machine.plan.precision.of_weights());
        let patches = machine.patch_convolution(images, self.patches);
        let tokens = machine.prepend_row(self.class_token, patches);
        machine.release(patches.tensor);
        let placed = machine.add_weight(tokens, self.positions, Category::Activation);
        machine.release(tokens.tensor);
        placed
    }

    fn block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Variable {
        let weights = &self.blocks[layer as usize];
        let normed = machine.layer_norm(input, weights.norms[0]);
        let projected = weights.project(machine, normed);
        let attended = weights.attend(machine, projected);
        let output = machine.linear(attended, weights.output, Category::Temporary);
        machine.release(attended.tensor);
        machine.release_all(projected.map(|part| part.tensor));
        machine.release(normed.tensor);
        let middle = machine.add(output, input, Category::Activation);
        machine.release(output.tensor);
        let normed = machine.layer_norm(middle, weights.norms[1]);
        let raised = weights.raise(machine, normed);
        let lowered = machine.linear(raised, weights.down, Category::Temporary);
        machine.release_all([raised.tensor, normed.tensor]);
        let output = machine.add(lowered, middle, Category::Activation);
        machine.release_all([lowered.tensor, middle.tensor]);
        output
    }

    /// The class of every image, from its first token.
    fn logits(&self, machine: &mut TensorMachine, tokens: Variable) -> Variable {
        let bytes = machine.bytes(tokens.tensor) / u64::from(machine.graph.length);
        let first = machine.part(tokens, bytes);
        machine.linear(first, self.head, Category::Logits)
    }
}

impl ModelArchitecture for Vit {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        let images = u64::from(machine.graph.sequences);
        let of_images = images * self.shape.patches.image() * machine.plan.precision.of_weights().bytes();
        (of_images, Some(INDEX * images))
    }

    /// Class token and positions are the embedding's own weights, filter and bias those of a part of it.
    fn update_order(&self) -> Vec<WeightId> {
        let own = [self.class_token, self.positions];
        let parts = [self.patches.filter, self.patches.bias];
        own.into_iter().chain(parts).chain(self.positions + 1..self.weights.len() as WeightId).collect()
    }

    fn has_whole_batches(&self) -> bool {
        true
    }

    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let embedded = self.embeddings(machine, batch);
        let count = self.blocks.len() as u32;
        let hidden = run_blocks(machine, count, embedded, |machine, layer, input| self.block(machine, layer, input));
        let normed = machine.layer_norm(hidden, self.norm);
        machine.release_all([hidden.tensor, embedded.tensor]);
        let logits = self.logits(machine, normed);
        let result = match batch.targets.filter(|_| result == ForwardResult::Loss) {
            Some(targets) => {
                let loss = machine.cross_entropy(logits, targets);
                machine.release(logits.tensor);
                loss
            }
            None => logits,
        };
        machine.release(normed.tensor);
        result
    }

    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        vec![self.block(machine, layer, input).tensor]
    }
}

struct EncoderWeights<'a> {
    plan: &'a TrainingPlan,
    list: WeightList,
}

impl EncoderWeights<'_> {
    fn blocks(&mut self, mut block: impl FnMut(&mut Self) -> EncoderBlock) -> Vec<EncoderBlock> {
        let blocks = (0..self.plan.shape.layers)
            .map(|layer| {
                self.list.layer = u16::try_from(layer).ok();
                block(self)
            })
            .collect();
        self.list.layer = None;
        blocks
    }

    /// BERT's order: each norm after the weight whose product it follows.
    fn post_norm_block(&mut self, ffn: u32) -> EncoderBlock {
        let width = self.plan.shape.width;
        let [query, key, value, output] = [(); 4].map(|()| self.linear(width, width));
        let first = self.norm();
        let up = self.linear(width, ffn);
        let down = self.linear(ffn, width);
        let second = self.norm();
        EncoderBlock { query, key, value, output, up, down, norms: [first, second] }
    }

    /// ViT's order: both norms between attention and MLP.
    fn pre_norm_block(&mut self, ffn: u32) -> EncoderBlock {
        let width = self.plan.shape.width;
        let [query, key, value, output] = [(); 4].map(|()| self.linear(width, width));
        let norms = [(); 2].map(|()| self.norm());
        let up = self.linear(width, ffn);
        let down = self.linear(ffn, width);
        EncoderBlock { query, key, value, output, up, down, norms }
    }

    fn linear(&mut self, inputs: u32, outputs: u32) -> LinearWeights {
        let weight = self.declare(inputs, outputs);
        let bias = Some(self.declare(outputs, 1));
        LinearWeights { bias, flattens: true, ..LinearWeights::plain(weight, inputs, outputs, TensorSplit::Whole) }
    }

    fn norm(&mut self) -> NormWeights {
        let width = self.plan.shape.width;
        NormWeights { scale: self.declare(width, 1), shift: self.declare(width, 1) }
    }

    fn declare(&mut self, rows: u32, columns: u32) -> WeightId {
        self.declare_numbers(u64::from(rows) * u64::from(columns))
    }

    fn declare_numbers(&mut self, numbers: u64) -> WeightId {
        self.list.declare(numbers, self.plan.techniques.lora_rank.is_none())
    }

    /// A buffer of indices, as many single-precision numbers as it has bytes, without a gradient.
    fn indices(&mut self, count: u32) -> WeightId {
        let number = NumberFormat::Single;
        let id = self.list.declared.len() as WeightId;
        self.list.declare_buffer(u64::from(count) * INDEX / number.bytes(), Some(number));
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::techniques::Precision;

    /// The plan of a model with the shape of the base models.
    fn base_plan(vocabulary: u32, context: u32) -> TrainingPlan {
        let (layers, width, heads) = (12, 768, 12);
        let shape =
            ModelShape { layers, width, heads, vocabulary, context, batch: 1, min_length: context, mixture: None };
        TrainingPlan { shape, precision: Precision::Single { tf32: false }, techniques: Techniques::default() }
    }

    fn parameters(model: &dyn ModelArchitecture) -> u64 {
        parameter_count(model.weights())
    }

    #[test]
    fn bert_base_uncased_has_its_published_parameters() {
        let shape = BertShape { ffn: 3072, positions: 512, token_types: 2, drops: true };
        assert_eq!(parameters(&Bert::new(&base_plan(30_522, 512), shape)), 109_514_298);
    }

    #[test]
    fn vit_base_patch16_224_has_its_published_parameters() {
        let patches = PatchShape { channels: 3, side: 224, patch: 16, width: 768 };
        let shape = VitShape { ffn: 3072, classes: 1000, patches };
        assert_eq!(parameters(&Vit::new(&base_plan(1000, 197), shape)), 86_567_656);
    }

    #[test]
    fn every_weight_is_updated_once() {
        let shape = BertShape { ffn: 3072, positions: 512, token_types: 2, drops: true };
        let bert = Bert::new(&base_plan(30_522, 512), shape);
        let patches = PatchShape { channels: 3, side: 224, patch: 16, width: 768 };
        let vit = Vit::new(&base_plan(1000, 197), VitShape { ffn: 3072, classes: 1000, patches });
        let models: [&dyn ModelArchitecture; 2] = [&bert, &vit];
        for model in models {
            let mut order = model.update_order();
            order.sort_unstable();
            assert_eq!(order, (0..model.weights().len() as WeightId).collect::<Vec<_>>());
        }
    }
}

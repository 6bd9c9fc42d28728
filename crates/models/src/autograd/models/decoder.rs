//! Decoder-only language models as Hugging Face's transformers (5.22) runs them, with SDPA. Only sequences that fill a
//! sliding window take a mask.
//!
//! Written after the modeling files: every operator there is one here, in the same order, and every local variable lives
//! until its scope ends. A [`DecoderFamily`] says which file; [`DecoderShape`] is what the configuration says.
//! What transformers allocates to find packed sequences is left out: it is a few KiB and freed at once.

mod generation;

use std::sync::Arc;

pub(crate) use generation::GENERATION;

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{AttentionShape, SavingMode, Tensor, TensorSplit, Variable, WeightId},
        layers::{
            INDEX,
            convolution_kernels::KernelSearch,
            experts::GroupedExperts,
            linear::{LinearWeights, LoraAdapter},
            norm::{NormWeights, RmsStyle},
            quantized,
        },
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{self, SequenceLengths, TrainingPlan},
        techniques::{self, DataParallel, HalfFormat, NumberFormat, Precision},
        trainer::PlainTraining,
        weights::{DeclaredWeight, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

const FAMILY: Parameter = Parameter::choice(
    "family",
    &["llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "gpt2", "mixtral"],
    "llama",
    "whose code runs: a model_type of Hugging Face",
);
const EXPERTS: Parameter =
    Parameter::count("local_experts", 1..=1 << 10, "8", "experts of a block, where the family has them");
const CHOSEN_EXPERTS: Parameter = Parameter::count("experts_per_token", 1..=64, "2", "experts that a token goes to");
const ROTARY_WIDTH: Parameter =
    Parameter::count("rotary_width", 0..=1 << 12, "0", "numbers of a head that are rotated; 0: all");
const POSITIONS: Parameter =
    Parameter::count("positions", 0..=1 << 24, "0", "learned positions, where the family has them; 0: the context");
const WINDOW: Parameter =
    Parameter::count("window", 0..=1 << 24, "0", "tokens that a token attends to at most; 0: all before it");

/// The registry entry of the decoders.
pub(crate) const DECODER: GeneratorEntry = GeneratorEntry {
    name: "decoder",
    summary: "training steps of a language model of Hugging Face's transformers, operator by operator",
    seeded: true,
    parameters: &[
        plan::STEPS,
        FAMILY,
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::KEY_VALUE_HEADS,
        plan::HEAD_WIDTH,
        plan::FFN,
        EXPERTS,
        CHOSEN_EXPERTS,
        ROTARY_WIDTH,
        POSITIONS,
        WINDOW,
        plan::DROPOUT,
        plan::TIED,
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
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let shape = DecoderShape::read(parameters, &plan)?;
        plan.refuse_unmodelled(shape.is_llama_like(), shape.head_width).map_err(|reason| parameters.refuse(reason))?;
        shape.check_quantized(&plan).map_err(|reason| parameters.refuse(reason))?;
        shape.check_window(&plan).map_err(|reason| parameters.refuse(reason))?;
        let model = Arc::new(Decoder::new(&plan, shape));
        let kernel_search = KernelSearch::default();
        Ok(PlainTraining { plan, model, lengths, validation: None, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| {
        let plan = TrainingPlan::read(parameters)?;
        let shape = DecoderShape::read(parameters, &plan)?;
        Ok(parameter_count(&Decoder::new(&plan, shape).weights))
    }),
};

/// Whose code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecoderFamily {
    /// Llama and Mistral.
    Llama,
    /// Biases of queries, keys and values.
    Qwen2,
    /// Norms of queries and keys.
    Qwen3,
    /// Norms that multiply in single precision, and scaled embeddings.
    Gemma,
    /// Attention and MLP side by side on one layer norm, biases everywhere.
    Phi,
    /// Attention and MLP side by side on a layer norm each.
    GptNeox,
    /// Learned positions, dropout.
    Gpt2,
    /// Llama with experts.
    Mixtral,
}

/// What the configuration says, beyond the plan.
#[derive(Clone, Copy, Debug)]
struct DecoderShape {
    family: DecoderFamily,
    key_value_heads: u32,
    head_width: u32,
    rotary_width: u32,
    /// Rows of the table of positions, where they are learned.
    positions: u32,
    /// Tokens that a token attends to at most; 0 for all before it.
    window: u32,
    ffn: u32,
    experts: u32,
    chosen_experts: u32,
    is_tied: bool,
    drops: bool,
}

impl DecoderShape {
    fn read(parameters: &Parameters<'_>, plan: &TrainingPlan) -> Result<DecoderShape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        let heads = plan.shape.heads;
        let key_value_heads = or(count(&plan::KEY_VALUE_HEADS)?, heads);
        if !heads.is_multiple_of(key_value_heads) {
            return Err(parameters.refuse(format!("{key_value_heads} kv_heads do not divide {heads} heads")));
        }
        let head_width = or(count(&plan::HEAD_WIDTH)?, plan.shape.width / heads);
        let rotary_width = or(count(&ROTARY_WIDTH)?, head_width);
        if rotary_width > head_width || rotary_width % 2 == 1 {
            let reason = format!("rotary_width ({rotary_width}) must be even and not exceed head_width ({head_width})");
            return Err(parameters.refuse(reason));
        }
        let (positions, context) = (or(count(&POSITIONS)?, plan.shape.context), plan.shape.context);
        if positions < context {
            return Err(
                parameters.refuse(format!("a context of {context} is longer than the {positions} learned positions"))
            );
        }
        let (experts, chosen_experts) = (count(&EXPERTS)?, count(&CHOSEN_EXPERTS)?);
        if chosen_experts > experts {
            let reason = format!("experts_per_token ({chosen_experts}) must not exceed local_experts ({experts})");
            return Err(parameters.refuse(reason));
        }
        Ok(DecoderShape {
            family: match parameters.choice(FAMILY.name)? {
                "qwen2" => DecoderFamily::Qwen2,
                "qwen3" => DecoderFamily::Qwen3,
                "gemma" => DecoderFamily::Gemma,
                "phi" => DecoderFamily::Phi,
                "gpt_neox" => DecoderFamily::GptNeox,
                "gpt2" => DecoderFamily::Gpt2,
                "mixtral" => DecoderFamily::Mixtral,
                _ => DecoderFamily::Llama,
            },
            key_value_heads,
            head_width,
            rotary_width,
            positions,
            window: count(&WINDOW)?,
            ffn: count(&plan::FFN)?,
            experts,
            chosen_experts,
            is_tied: parameters.choice(plan::TIED.name)? == "yes",
            drops: parameters.choice(plan::DROPOUT.name)? == "yes",
        })
    }

    /// Llama and its relatives: adapters of queries and values, and the kernels of liger-kernel, are modelled.
    fn is_llama_like(&self) -> bool {
        matches!(self.family, DecoderFamily::Llama | DecoderFamily::Qwen2 | DecoderFamily::Qwen3 | DecoderFamily::Gemma)
    }

    /// Whether sequences of this length take a mask (`_ignore_causal_mask_sdpa`).
    fn fills_window(&self, length: u32) -> bool {
        self.window > 0 && length >= self.window
    }

    /// Refuses what was not compared with transformers where attention takes a mask.
    fn check_window(&self, plan: &TrainingPlan) -> Result<(), String> {
        let techniques = &plan.techniques;
        let refused = [
            ("liger", techniques.liger),
            ("ckpt_selective", techniques.keeps_products),
            ("offload", techniques.offload_activations),
        ];
        match refused.into_iter().find(|(_, is_set)| *is_set) {
            Some((word, _)) if self.fills_window(plan.shape.context) => Err(format!(
                "technique '{word}' is not modelled for a context of {} that fills the sliding window of {}; `oomph \
                 rehearse` runs the model's own code",
                plan.shape.context, self.window
            )),
            _ => Ok(()),
        }
    }

    /// Refuses prompts that take a mask.
    fn refuse_window(&self, context: u32) -> Result<(), String> {
        match self.fills_window(context) {
            true => Err(format!(
                "a context of {context} fills the sliding window of {}, and the mask that this takes is not modelled for \
                 answers; `oomph rehearse` runs the model's own code",
                self.window
            )),
            false => Ok(()),
        }
    }

    /// Refuses 4-bit weights where nothing confirms what they take.
    fn check_quantized(&self, plan: &TrainingPlan) -> Result<(), String> {
        let techniques = &plan.techniques;
        if !techniques.quantized {
            return Ok(());
        }
        let is_alone = techniques.data_parallel == DataParallel::Alone
            && !(techniques.offload_weights || techniques.offload_activations);
        if techniques.liger || techniques.keeps_products {
            let word = if techniques.liger { "liger" } else { "ckpt_selective" };
            return Err(format!("techniques 'qlora' and '{word}' are not modelled together"));
        }
        let is_modelled = matches!(plan.precision, Precision::Single { .. } | Precision::Autocast(HalfFormat::Brain));
        if !self.is_llama_like() || !is_alone || !is_modelled {
            let reason = "technique 'qlora' is modelled for llama, mistral, qwen2, qwen3 and gemma, alone or with amp, and \
                          without offloading and several GPUs";
            return Err(reason.to_owned());
        }
        let keys = u64::from(self.key_value_heads * self.head_width);
        quantized::refuse_few_tokens(plan, u64::from(plan.shape.width) * keys)
    }

    fn has_rotation(&self) -> bool {
        self.family != DecoderFamily::Gpt2
    }
}

#[derive(Clone, Copy, Debug)]
enum DecoderNorm {
    Rms(WeightId, RmsStyle),
    Layer(NormWeights),
}

/// How queries, keys and values are made.
#[derive(Clone, Copy, Debug)]
enum Projections {
    Separate([LinearWeights; 3]),
    /// By one product.
    Fused(LinearWeights),
}

/// What follows attention.
#[derive(Clone, Copy, Debug)]
enum DecoderMlp {
    Dense {
        /// Where the MLP has one.
        gate: Option<LinearWeights>,
        up: LinearWeights,
        down: LinearWeights,
    },
    Experts(GroupedExperts),
}

#[derive(Clone, Copy, Debug)]
struct DecoderBlock {
    projections: Projections,
    output: LinearWeights,
    head_norms: Option<[DecoderNorm; 2]>,
    mlp: DecoderMlp,
    norms: [DecoderNorm; 2],
}

/// See the [module](self).
#[derive(Debug)]
struct Decoder {
    shape: DecoderShape,
    weights: Vec<DeclaredWeight>,
    tokens: WeightId,
    /// What rows of that table are multiplied with, where the family does so.
    token_scale: Option<WeightId>,
    /// The table of positions, where they are learned.
    positions: Option<WeightId>,
    blocks: Vec<DecoderBlock>,
    norm: DecoderNorm,
    head: LinearWeights,
}

impl Decoder {
    /// Declares the weights in the order of `model.to`.
    fn new(plan: &TrainingPlan, shape: DecoderShape) -> Decoder {
        let mut weights = DecoderWeights { plan, shape, list: WeightList::default() };
        let (width, vocabulary) = (plan.shape.width, plan.shape.vocabulary);
        let tokens = weights.embedding(vocabulary);
        let positions = (shape.family == DecoderFamily::Gpt2).then(|| weights.embedding(shape.positions));
        let token_scale = (shape.family == DecoderFamily::Gemma).then(|| weights.list.declare_buffer(1, None));
        let blocks = (0..plan.shape.layers)
            .map(|layer| {
                weights.list.layer = u16::try_from(layer).ok();
                weights.block()
            })
            .collect();
        weights.list.layer = None;
        // Phi has its rotation before the last norm.
        let rotates_first = shape.family == DecoderFamily::Phi;
        if rotates_first {
            weights.frequencies();
        }
        let norm = weights.norm(width);
        if shape.has_rotation() && !rotates_first {
            weights.frequencies();
        }
        let head = if shape.is_tied { tokens } else { weights.declare(vocabulary, width) };
        let bias = (shape.family == DecoderFamily::Phi).then(|| weights.declare(vocabulary, 1));
        let head =
            LinearWeights { bias, flattens: true, ..LinearWeights::plain(head, width, vocabulary, TensorSplit::Whole) };
        Decoder { shape, weights: weights.list.declared, tokens, token_scale, positions, blocks, norm, head }
    }

    fn normed(&self, machine: &mut TensorMachine, input: Variable, norm: DecoderNorm) -> Variable {
        match norm {
            DecoderNorm::Rms(scale, _) if machine.plan.techniques.liger => machine.liger_norm(input, scale),
            DecoderNorm::Rms(scale, style) => machine.rms_norm(input, scale, style),
            DecoderNorm::Layer(weights) => machine.layer_norm(input, weights),
        }
    }

    /// Drops numbers of a variable, which is released.
    fn dropped(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        if !self.shape.drops || machine.saving == SavingMode::Off {
            return input;
        }
        let output = machine.dropout(input);
        machine.release(input.tensor);
        output
    }

    /// Cosines and sines of this many positions and every frequency, in the format of the activations.
    fn rotation(&self, machine: &mut TensorMachine, count: u64, number: NumberFormat) -> [Variable; 2] {
        let single = NumberFormat::Single;
        let frequencies = count * u64::from(self.shape.rotary_width / 2) * single.bytes();
        let positions = machine.temporary(count * single.bytes());
        let angles = machine.temporary(frequencies);
        machine.elementwise(2 * frequencies, [positions, angles]);
        machine.release(positions);
        let doubled = machine.temporary(2 * frequencies);
        machine.elementwise(4 * frequencies, [angles, doubled]);
        let tables = [(); 2].map(|()| {
            let table = machine.temporary(2 * frequencies);
            let scaled = machine.alloc(2 * frequencies, Category::Activation);
            machine.elementwise(8 * frequencies, [doubled, table, scaled]);
            machine.release(table);
            Variable::constant(scaled, single)
        });
        let narrowed = tables.map(|table| machine.in_format(table, number));
        machine.release_all([angles, doubled]);
        tables.iter().for_each(|table| machine.release(table.tensor));
        narrowed
    }

    fn block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Variable {
        let weights = &self.blocks[layer as usize];
        let normed = self.normed(machine, input, weights.norms[0]);
        let attended = self.attention(machine, weights, normed);
        match self.shape.family {
            DecoderFamily::Phi => {
                let attended = self.dropped(machine, attended);
                let lowered = self.mlp(machine, weights, normed);
                let output = self.sum_of_three(machine, [attended, lowered, input]);
                machine.release_all([normed.tensor, attended.tensor, lowered.tensor]);
                output
            }
            DecoderFamily::GptNeox => {
                machine.release(normed.tensor);
                let normed = self.normed(machine, input, weights.norms[1]);
                let lowered = self.mlp(machine, weights, normed);
                machine.release(normed.tensor);
                let output = self.sum_of_three(machine, [lowered, attended, input]);
                machine.release_all([attended.tensor, lowered.tensor]);
                output
            }
            DecoderFamily::Gpt2 => {
                let middle = machine.add(attended, input, Category::Activation);
                machine.release(normed.tensor);
                let normed = self.normed(machine, middle, weights.norms[1]);
                let lowered = self.mlp(machine, weights, normed);
                let output = machine.add(middle, lowered, Category::Activation);
                machine.release_all([normed.tensor, middle.tensor, attended.tensor, lowered.tensor]);
                output
            }
            _ => {
                machine.release(normed.tensor);
                let middle = machine.add(input, attended, Category::Activation);
                machine.release(attended.tensor);
                let normed = self.normed(machine, middle, weights.norms[1]);
                let lowered = self.mlp(machine, weights, normed);
                machine.release(normed.tensor);
                let output = machine.add(middle, lowered, Category::Activation);
                machine.release_all([lowered.tensor, middle.tensor]);
                output
            }
        }
    }

    /// The sum of attention, MLP and input.
    fn sum_of_three(&self, machine: &mut TensorMachine, parts: [Variable; 3]) -> Variable {
        let both = machine.add(parts[0], parts[1], Category::Temporary);
        let output = machine.add(both, parts[2], Category::Activation);
        machine.release(both.tensor);
        output
    }

    fn attention(&self, machine: &mut TensorMachine, weights: &DecoderBlock, input: Variable) -> Variable {
        match weights.projections {
            Projections::Separate(projections) => self.separate_attention(machine, weights, projections, input),
            Projections::Fused(projection) => self.fused_attention(machine, projection, weights, input),
        }
    }

    /// Queries, keys and values by a product each.
    fn separate_attention(
        &self,
        machine: &mut TensorMachine,
        weights: &DecoderBlock,
        projections: [LinearWeights; 3],
        input: Variable,
    ) -> Variable {
        let project = |machine: &mut TensorMachine, place: usize, count: u32| {
            let heads = adapted(machine, input, projections[place]);
            // The gradient comes back head by head, and the product needs it token by token.
            let is_reordered = count > 1 && !machine.plan.techniques.liger;
            let heads = if is_reordered { machine.reordered(heads) } else { heads };
            let Some(norms) = weights.head_norms else { return heads };
            let normed = self.normed(machine, heads, norms[place]);
            machine.release(heads.tensor);
            normed
        };
        let query = project(machine, 0, machine.plan.shape.heads);
        let key = project(machine, 1, self.shape.key_value_heads);
        let value = adapted(machine, input, projections[2]);
        let is_by_head = self.has_gradients_by_head(machine) || self.copies_keys(machine);
        let is_reordered = is_by_head && self.shape.key_value_heads > 1;
        let value = if is_reordered { machine.reordered(value) } else { value };
        if self.shape.rotary_width < self.shape.head_width {
            let (rotated, rotations) = self.rotate_in_part(machine, [query, key], true);
            let [all_keys, value] = self.cached(machine, [rotated[1], value]);
            let attended = self.attend(machine, [rotated[0], all_keys, value]);
            let output = self.projected(machine, attended, weights.output);
            // The parts are variables of the function, as are the queries and keys that the other parts lie in.
            machine.release_all([rotated[0].tensor, all_keys.tensor, value.tensor]);
            machine.release_all([rotations[0].tensor, query.tensor, rotations[1].tensor, key.tensor]);
            return output;
        }
        let rotated = self.all_rotated(machine, [query, key]);
        let [key, value] = self.cached(machine, [rotated[1], value]);
        let attended = self.attend(machine, [rotated[0], key, value]);
        let output = self.projected(machine, attended, weights.output);
        machine.release_all([rotated[0].tensor, key.tensor, value.tensor]);
        output
    }

    /// Queries, keys and values by one product.
    fn fused_attention(
        &self,
        machine: &mut TensorMachine,
        projection: LinearWeights,
        weights: &DecoderBlock,
        input: Variable,
    ) -> Variable {
        let joined = machine.linear(input, projection, Category::Activation);
        if !self.shape.has_rotation() {
            let attended = match machine.graph.cache.is_some() {
                true => self.attend_to_cache(machine, joined),
                false => machine.attention(joined),
            };
            let output = self.projected(machine, attended, weights.output);
            machine.release(joined.tensor);
            return output;
        }
        let heads = machine.reordered(joined);
        let [query, key, value] = machine.split_in_three(heads);
        let (rotated, _) = self.rotate_in_part(machine, [query, key], false);
        // Values are a part of the joined product.
        machine.retain(value.tensor);
        let [key, value] = self.cached(machine, [rotated[1], value]);
        let attended = self.attend(machine, [rotated[0], key, value]);
        let output = self.projected(machine, attended, weights.output);
        machine.release_all([rotated[0].tensor, key.tensor, value.tensor, joined.tensor]);
        output
    }

    /// The output of attention, which is released.
    fn projected(&self, machine: &mut TensorMachine, attended: Variable, weights: LinearWeights) -> Variable {
        let output = machine.linear(attended, weights, Category::Temporary);
        machine.release(attended.tensor);
        match self.shape.family {
            // The block drops them.
            DecoderFamily::Phi => output,
            _ => self.dropped(machine, output),
        }
    }

    /// Rotates queries and keys, which are released.
    fn all_rotated(&self, machine: &mut TensorMachine, heads: [Variable; 2]) -> [Variable; 2] {
        if let ([cosines, sines, ..], true) = (&machine.graph.arguments[..], machine.plan.techniques.liger) {
            let angles = [*cosines, *sines];
            let is_by_head = self.has_gradients_by_head(machine);
            let copied = [machine.plan.shape.heads, self.shape.key_value_heads].map(|count| is_by_head && count > 1);
            return machine.liger_rotate(heads, angles, copied);
        }
        let rotated = heads.map(|heads| self.rotated(machine, heads));
        heads.iter().for_each(|heads| machine.release(heads.tensor));
        rotated
    }

    fn rotated(&self, machine: &mut TensorMachine, heads: Variable) -> Variable {
        match machine.graph.arguments[..] {
            [cosines, sines, ..] => machine.rotate(heads, [cosines, sines]),
            _ => heads,
        }
    }

    /// Rotates the first numbers of every head and joins them with the others. Returns the rotated numbers, too, which
    /// the caller may keep.
    fn rotate_in_part(
        &self,
        machine: &mut TensorMachine,
        heads: [Variable; 2],
        keeps: bool,
    ) -> ([Variable; 2], [Variable; 2]) {
        let (rotary, whole) = (u64::from(self.shape.rotary_width), u64::from(self.shape.head_width));
        let parts = heads.map(|variable| {
            let turned = machine.size(variable) / whole * rotary;
            (machine.part(variable, turned), machine.part(variable, machine.size(variable) - turned))
        });
        let rotations = parts.map(|(turned, _)| self.rotated(machine, turned));
        let mut joined = rotations;
        for (place, (_, other)) in parts.into_iter().enumerate() {
            joined[place] = machine.join(rotations[place], other, Category::Activation);
            if !keeps {
                machine.release(rotations[place].tensor);
            }
        }
        (joined, rotations)
    }

    /// Whether no fused kernel takes heads that share keys and values.
    fn attends_by_operators(&self, machine: &TensorMachine) -> bool {
        let is_shared = self.shape.key_value_heads < machine.plan.shape.heads;
        let is_masked = self.shape.fills_window(machine.graph.length);
        is_shared && !is_masked && machine.plan.precision.of_attended() == NumberFormat::Single
    }

    /// Whether attention's backward makes gradients head by head: plain operators do, and so does cuDNN's kernel where its
    /// inputs come from the host, for it takes their layout.
    fn has_gradients_by_head(&self, machine: &TensorMachine) -> bool {
        let is_from_host = machine.saving == SavingMode::ToHost;
        self.attends_by_operators(machine)
            || (is_from_host && machine.plan.precision.of_attended() == NumberFormat::Half)
    }

    /// Whether every head gets a copy of the keys and values that it shares.
    fn copies_keys(&self, machine: &TensorMachine) -> bool {
        let is_shared = self.shape.key_value_heads < machine.plan.shape.heads;
        is_shared && self.shape.fills_window(machine.graph.length)
    }

    /// Attention over queries, keys and values, token by token.
    fn attend(&self, machine: &mut TensorMachine, [query, key, value]: [Variable; 3]) -> Variable {
        let shape = AttentionShape {
            number: machine.plan.precision.of_attended(),
            heads: machine.plan.shape.heads,
            key_value_heads: self.shape.key_value_heads,
            head_width: self.shape.head_width,
            is_causal: true,
        };
        if let &[_, _, flags] = &machine.graph.arguments[..] {
            return machine.flagged_attention([query, key, value], flags.tensor, shape);
        }
        if self.attends_by_operators(machine) {
            let by_head = machine.math_attention([query, key, value], shape, false);
            let by_token = machine.by_token(by_head, shape.heads);
            machine.release(by_head.tensor);
            return by_token;
        }
        // Autocast casts the last argument first.
        let narrow_value = machine.cast_for_product(value);
        let narrow_key = machine.cast_for_product(key);
        let narrow_query = machine.cast_for_product(query);
        let attended = machine.grouped_attention([narrow_query, narrow_key, narrow_value], shape);
        for (narrow, wide) in [(narrow_query, query), (narrow_key, key), (narrow_value, value)] {
            if narrow.tensor != wide.tensor {
                machine.release(narrow.tensor);
            }
        }
        // Joined queries are in the order of heads, and so is the result.
        let is_by_head = self.shape.rotary_width < self.shape.head_width && shape.number == NumberFormat::Half;
        if !is_by_head {
            return attended;
        }
        let by_token = machine.contiguous(attended);
        machine.release(attended.tensor);
        by_token
    }

    fn mlp(&self, machine: &mut TensorMachine, weights: &DecoderBlock, input: Variable) -> Variable {
        let (gate, up, down) = match &weights.mlp {
            DecoderMlp::Experts(experts) => return machine.grouped_experts(input, experts),
            DecoderMlp::Dense { gate, up, down } => (*gate, *up, *down),
        };
        let hidden = match gate {
            Some(gate) => {
                let gate = machine.linear(input, gate, Category::Activation);
                if machine.plan.techniques.liger {
                    let up = machine.linear(input, up, Category::Activation);
                    let hidden = machine.liger_gate(gate, up);
                    machine.release_all([gate.tensor, up.tensor]);
                    hidden
                } else {
                    let active = machine.smooth_activation(gate);
                    machine.release(gate.tensor);
                    let up = machine.linear(input, up, Category::Activation);
                    let hidden = machine.multiply(active, up, Category::Activation);
                    machine.release_all([active.tensor, up.tensor]);
                    hidden
                }
            }
            None => {
                let up = machine.linear(input, up, Category::Activation);
                let hidden = match self.shape.family {
                    DecoderFamily::GptNeox => machine.smooth_activation(up),
                    _ => machine.composite_gelu(up),
                };
                machine.release(up.tensor);
                hidden
            }
        };
        let output = machine.linear(hidden, down, Category::Temporary);
        machine.release(hidden.tensor);
        self.dropped(machine, output)
    }

    /// The labels, moved by one token: a padded copy, and the part of it that is compared.
    fn shifted_labels(&self, machine: &mut TensorMachine) -> [Tensor; 2] {
        let (sequences, length) = (u64::from(machine.graph.sequences), u64::from(machine.graph.length));
        let padded = machine.temporary(INDEX * sequences * (length + 1));
        if sequences == 1 {
            // That part is contiguous: no copy is made.
            return [padded, machine.retain(padded)];
        }
        let labels = machine.temporary(INDEX * sequences * length);
        machine.elementwise(2 * INDEX * sequences * length, [padded, labels]);
        [padded, labels]
    }

    /// Rows of the table of tokens, scaled where the family does so. The scale is brought to the format of the rows: a
    /// buffer keeps its own where FSDP narrows the table (`MixedPrecisionPolicy`) or peft widens it
    /// (`prepare_model_for_kbit_training`).
    fn token_rows(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        let tokens = machine.embedding(self.tokens, ids, machine.tokens());
        let Some(scale) = self.token_scale else { return tokens };
        let scale = machine.weight_on_device(scale);
        let is_half = machine.bytes(scale) == NumberFormat::Half.bytes();
        let kept = Variable::constant(scale, if is_half { NumberFormat::Half } else { NumberFormat::Single });
        let scale = machine.in_format(kept, tokens.number);
        let scaled = machine.multiply(tokens, scale, Category::Temporary);
        machine.release_all([scale.tensor, tokens.tensor]);
        scaled
    }

    /// Rows of the table of tokens, and what is added to them.
    fn embed(&self, machine: &mut TensorMachine, ids: Tensor) -> EmbeddedTokens {
        let length = u64::from(machine.graph.length);
        let mut tokens = self.token_rows(machine, ids);
        let techniques = &machine.plan.techniques;
        if techniques.lora_rank.is_some() && techniques.checkpoint_every.is_some() {
            // peft does so for checkpoints, which once needed inputs with a gradient.
            tokens = machine.with_gradient(tokens);
        }
        let range = machine.temporary(INDEX * length);
        let places = machine.temporary(INDEX * length);
        machine.elementwise(2 * machine.bytes(range), [range, places]);
        machine.release(range);
        let Some(table) = self.positions else {
            machine.retain(tokens.tensor);
            return EmbeddedTokens { tokens, places, positions: None, hidden: tokens };
        };
        let positions = machine.embedding(table, places, length);
        let hidden = machine.sum(tokens, positions, Some(machine.graph.sequences), Category::Activation);
        EmbeddedTokens { tokens, places, positions: Some(positions), hidden: self.dropped(machine, hidden) }
    }

    /// Releases the variables of the model's forward.
    fn release_variables(&self, machine: &mut TensorMachine, embedded: &EmbeddedTokens, rotation: &[Tensor]) {
        let (tokens, places) = (embedded.tokens.tensor, embedded.places);
        let is_llama = self.shape.family == DecoderFamily::Llama;
        machine.release_all(if is_llama { [places, tokens] } else { [tokens, places] });
        rotation.iter().for_each(|&table| machine.release(table));
        if let Some(positions) = embedded.positions {
            machine.release(positions.tensor);
        }
    }
}

/// A product with a frozen weight, and beside it one through an adapter, as peft makes it: in the adapter's format, scaled,
/// added, and brought to the format of the first product.
fn adapted(machine: &mut TensorMachine, input: Variable, linear: LinearWeights) -> Variable {
    let mut output = machine.linear(input, LinearWeights { adapter: None, ..linear }, Category::Activation);
    let Some(adapter) = linear.adapter else { return output };
    if linear.is_quantized {
        // Against an error of autograd with 4-bit products, peft says.
        let copy = machine.cloned(output);
        machine.release(output.tensor);
        output = copy;
    }
    let thin = |weight, inputs, outputs| LinearWeights {
        flattens: true,
        ..LinearWeights::plain(weight, inputs, outputs, TensorSplit::Whole)
    };
    let wide = machine.in_format(input, machine.weight_number(adapter.down));
    let lowered = machine.linear(wide, thin(adapter.down, linear.inputs, adapter.rank), Category::Activation);
    let raised = machine.linear(lowered, thin(adapter.up, adapter.rank, linear.outputs), Category::Temporary);
    machine.release(lowered.tensor);
    let scaled = machine.scale(raised);
    machine.release(raised.tensor);
    let sum = machine.add(output, scaled, Category::Temporary);
    machine.release_all([scaled.tensor, output.tensor]);
    let result = machine.in_format(sum, output.number);
    machine.release_all([sum.tensor, wide.tensor]);
    result
}

/// What the model makes before its blocks.
struct EmbeddedTokens {
    tokens: Variable,
    places: Tensor,
    positions: Option<Variable>,
    hidden: Variable,
}

impl ModelArchitecture for Decoder {
    fn weights(&self) -> &[DeclaredWeight] {
        &self.weights
    }

    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>) {
        (INDEX * machine.tokens(), None)
    }

    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable {
        let embedded = self.embed(machine, batch.input);
        let mut hidden = embedded.hidden;
        if self.shape.has_rotation() {
            let is_masked = self.shape.fills_window(machine.graph.length);
            let flags = is_masked.then(|| machine.window_flags());
            // All sequences have the same positions.
            let count = machine.graph.length.into();
            machine.graph.arguments = self.rotation(machine, count, hidden.number).to_vec();
            machine.graph.arguments.extend(flags.map(|flags| Variable::constant(flags, NumberFormat::Single)));
        }
        let rotation: Vec<Tensor> = machine.graph.arguments.iter().map(|table| table.tensor).collect();
        for layer in 0..self.blocks.len() as u32 {
            machine.enter_layer(layer);
            let arguments = [embedded.places].into_iter().chain(rotation.iter().copied());
            let output = machine.checkpointed(layer, hidden, arguments, |machine| self.block(machine, layer, hidden));
            machine.release(hidden.tensor);
            hidden = output;
            machine.leave_layer(layer);
        }
        machine.layer = None;
        let normed = self.normed(machine, hidden, self.norm);
        machine.release(hidden.tensor);
        self.release_variables(machine, &embedded, &rotation);
        if machine.plan.techniques.liger && result == ForwardResult::Loss {
            let [padded, labels] = self.shifted_labels(machine);
            let loss = machine.liger_loss(normed, &self.head, labels);
            machine.release_all([padded, labels, normed.tensor]);
            return loss;
        }
        let logits = machine.linear(normed, self.head, Category::Logits);
        if result == ForwardResult::Logits {
            machine.release(normed.tensor);
            return logits;
        }
        let wide = machine.in_format(logits, NumberFormat::Single);
        let [padded, labels] = self.shifted_labels(machine);
        let loss = machine.cross_entropy(wide, labels);
        machine.release_all([wide.tensor, padded, labels, normed.tensor, logits.tensor]);
        loss
    }

    fn load_order(&self) -> Vec<WeightId> {
        let norm_of = |norm: &DecoderNorm| match norm {
            DecoderNorm::Rms(scale, _) => *scale,
            DecoderNorm::Layer(weights) => weights.scale,
        };
        // A tied head is not in the file.
        let head = (!self.shape.is_tied).then_some(self.head.weight);
        let mut order: Vec<WeightId> = head.into_iter().chain([self.tokens]).collect();
        for block in &self.blocks {
            order.push(norm_of(&block.norms[0]));
            if let DecoderMlp::Dense { gate, up, down } = &block.mlp {
                order.extend([Some(down), gate.as_ref(), Some(up)].into_iter().flatten().map(|linear| linear.weight));
            }
            order.push(norm_of(&block.norms[1]));
            let head_norm = |place: usize| block.head_norms.as_ref().map(|norms| norm_of(&norms[place]));
            if let Projections::Separate([query, key, value]) = &block.projections {
                for (norm, linear) in [(head_norm(1), key), (None, &block.output), (head_norm(0), query), (None, value)]
                {
                    order.extend([norm, linear.bias, Some(linear.weight)].into_iter().flatten());
                }
            }
        }
        order.push(norm_of(&self.norm));
        let is_buffer = |id: &WeightId| self.weights[*id as usize].is_buffer;
        order.extend((0..self.weights.len() as WeightId).filter(is_buffer));
        order
    }

    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        vec![self.block(machine, layer, input).tensor]
    }
}

struct DecoderWeights<'a> {
    plan: &'a TrainingPlan,
    shape: DecoderShape,
    list: WeightList,
}

impl DecoderWeights<'_> {
    /// A block's weights, in the order of its modules.
    fn block(&mut self) -> DecoderBlock {
        match self.shape.family {
            DecoderFamily::Gpt2 => {
                let first = self.norm(self.plan.shape.width);
                let (projections, output) = self.fused_projections();
                let second = self.norm(self.plan.shape.width);
                let mlp = self.plain_mlp();
                let norms = [first, second];
                DecoderBlock { projections, output, head_norms: None, mlp, norms }
            }
            DecoderFamily::GptNeox => {
                let norms = [(); 2].map(|()| self.norm(self.plan.shape.width));
                let (projections, output) = self.fused_projections();
                let mlp = self.plain_mlp();
                DecoderBlock { projections, output, head_norms: None, mlp, norms }
            }
            DecoderFamily::Phi => {
                let (projections, output) = self.separate_projections(true, true);
                let mlp = self.plain_mlp();
                let norm = self.norm(self.plan.shape.width);
                DecoderBlock { projections, output, head_norms: None, mlp, norms: [norm; 2] }
            }
            _ => self.gated_block(),
        }
    }

    fn gated_block(&mut self) -> DecoderBlock {
        let DecoderShape { family, head_width, .. } = self.shape;
        let width = self.plan.shape.width;
        let (projections, output) = self.separate_projections(family == DecoderFamily::Qwen2, false);
        let head_norms = (family == DecoderFamily::Qwen3).then(|| [(); 2].map(|()| self.norm(head_width)));
        let mlp = if family == DecoderFamily::Mixtral { self.experts() } else { self.gated_mlp() };
        let norms = [(); 2].map(|()| self.norm(width));
        DecoderBlock { projections, output, head_norms, mlp, norms }
    }

    fn separate_projections(&mut self, has_bias: bool, has_output_bias: bool) -> (Projections, LinearWeights) {
        let width = self.plan.shape.width;
        let queries = self.plan.shape.heads * self.shape.head_width;
        let keys = self.shape.key_value_heads * self.shape.head_width;
        let mut projections = [self.linear(width, queries, has_bias); 3];
        projections[0].adapter = self.adapter(width, queries);
        projections[1] = self.linear(width, keys, has_bias);
        projections[2] = self.linear(width, keys, has_bias);
        projections[2].adapter = self.adapter(width, keys);
        (Projections::Separate(projections), self.linear(queries, width, has_output_bias))
    }

    /// The adapter of a product, where one is trained: peft adapts queries and values, in single precision.
    fn adapter(&mut self, inputs: u32, outputs: u32) -> Option<LoraAdapter> {
        let rank = self.plan.techniques.lora_rank?;
        let mut declare = |elements: u32| {
            let id = self.list.declare(u64::from(elements) * u64::from(rank), true);
            self.list.declared[id as usize].number = Some(NumberFormat::Single);
            id
        };
        Some(LoraAdapter { down: declare(inputs), up: declare(outputs), rank })
    }

    fn fused_projections(&mut self) -> (Projections, LinearWeights) {
        let width = self.plan.shape.width;
        (Projections::Fused(self.linear(width, 3 * width, true)), self.linear(width, width, true))
    }

    fn plain_mlp(&mut self) -> DecoderMlp {
        let (width, ffn) = (self.plan.shape.width, self.shape.ffn);
        DecoderMlp::Dense { gate: None, up: self.linear(width, ffn, true), down: self.linear(ffn, width, true) }
    }

    fn gated_mlp(&mut self) -> DecoderMlp {
        let (width, ffn) = (self.plan.shape.width, self.shape.ffn);
        let [gate, up] = [(); 2].map(|()| self.linear(width, ffn, false));
        DecoderMlp::Dense { gate: Some(gate), up, down: self.linear(ffn, width, false) }
    }

    fn experts(&mut self) -> DecoderMlp {
        let DecoderShape { ffn, experts, chosen_experts: chosen, .. } = self.shape;
        let width = self.plan.shape.width;
        let router = LinearWeights { flattens: false, ..self.linear(width, experts, false) };
        let [raise, lower] = [2, 1].map(|parts| {
            // All experts are one tensor, with a row for each.
            let elements = u64::from(experts) * u64::from(width) * u64::from(parts * ffn);
            self.list.declare_rows(experts, elements, self.plan.techniques.lora_rank.is_none())
        });
        DecoderMlp::Experts(GroupedExperts { router, raise, lower, experts, chosen, width, inner: ffn })
    }

    fn norm(&mut self, width: u32) -> DecoderNorm {
        match self.shape.family {
            DecoderFamily::Phi | DecoderFamily::GptNeox | DecoderFamily::Gpt2 => {
                DecoderNorm::Layer(NormWeights { scale: self.declare(width, 1), shift: self.declare(width, 1) })
            }
            DecoderFamily::Gemma => DecoderNorm::Rms(self.declare(width, 1), RmsStyle::ScaleInSingle),
            _ => DecoderNorm::Rms(self.declare(width, 1), RmsStyle::ScaleLast),
        }
    }

    fn linear(&mut self, inputs: u32, outputs: u32, has_bias: bool) -> LinearWeights {
        // GPT-2 has `Conv1D`, whose weight has a row for every input.
        let casts_weight_first = self.shape.family == DecoderFamily::Gpt2;
        let (rows, columns) = if casts_weight_first { (inputs, outputs) } else { (outputs, inputs) };
        let weight = self.declare(rows, columns);
        let bias = has_bias.then(|| self.declare(outputs, 1));
        let is_quantized = self.plan.techniques.quantized;
        self.list.declared[weight as usize].is_quantized = is_quantized;
        let plain = LinearWeights::plain(weight, inputs, outputs, TensorSplit::Whole);
        LinearWeights { bias, flattens: true, casts_weight_first, is_quantized, ..plain }
    }

    fn embedding(&mut self, rows: u32) -> WeightId {
        let id = self.declare(rows, self.plan.shape.width);
        self.list.declared[id as usize].is_embedding = true;
        id
    }

    fn declare(&mut self, rows: u32, columns: u32) -> WeightId {
        let elements = u64::from(rows) * u64::from(columns);
        self.list.declare_rows(rows, elements, self.plan.techniques.lora_rank.is_none())
    }

    /// The frequencies of the rotation, as they are and as they were: in single precision and without a gradient.
    fn frequencies(&mut self) {
        for _ in 0..2 {
            self.list.declare_buffer((self.shape.rotary_width / 2).into(), Some(NumberFormat::Single));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;
    use oomph_trace::{Op, Trace};

    #[test]
    fn mixtral_8x7b_has_its_published_parameters() {
        let settings = [
            ("family", "mixtral"),
            ("layers", "32"),
            ("width", "4096"),
            ("heads", "32"),
            ("kv_heads", "8"),
            ("ffn", "14336"),
            ("vocab", "32000"),
        ];
        let settings = settings.map(|(name, value)| (name, value.to_owned())).to_vec();
        let recipe = Recipe::of_settings("mixtral".to_owned(), &DECODER, "test", settings);
        assert_eq!(recipe.weight_count().unwrap(), Some(46_702_792_704));
    }

    /// The sizes of all requests of a model with these settings.
    fn requests_of(name: &str, settings: &[(&'static str, &str)]) -> Result<Vec<u64>, String> {
        let settings = settings.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let recipe = Recipe::of_settings(name.to_owned(), &DECODER, "test", settings);
        let trace = Trace::read(&recipe.workload().map_err(|error| error.to_string())?).unwrap();
        let sizes = trace.events.iter().filter_map(|event| match event.op {
            Op::Alloc { bytes, .. } => Some(bytes),
            _ => None,
        });
        Ok(sizes.collect())
    }

    fn requests(family: &str, techniques: &str) -> Vec<u64> {
        let settings = [("family", family), ("layers", "1"), ("width", "64"), ("heads", "2"), ("ffn", "96")];
        let sizes = [("vocab", "100"), ("context", "16"), ("batch", "1"), ("steps", "1"), ("techniques", techniques)];
        requests_of(family, &[settings, sizes].concat()).unwrap()
    }

    /// A seventh of the rows, rounded up: of 192 outputs of a `Linear`, of 64 inputs of a `Conv1D`, of 8 experts.
    #[test]
    fn fsdp_divides_rows() {
        let has = |family: &str, rows: u64, columns: u64| requests(family, "fsdp:7").contains(&(rows * columns * 4));
        assert!(has("gpt_neox", 28, 64) && !has("gpt_neox", 10, 192));
        assert!(has("gpt2", 10, 192) && !has("gpt2", 28, 64));
        assert!(has("mixtral", 2, 2 * 96 * 64));
    }

    fn in_window(window: &str, techniques: &str) -> Result<Vec<u64>, String> {
        let settings = [("layers", "3"), ("width", "64"), ("heads", "4"), ("kv_heads", "2"), ("ffn", "96")];
        let sizes = [("vocab", "100"), ("context", "99"), ("batch", "2"), ("steps", "1"), ("techniques", techniques)];
        requests_of("windowed", &[&settings[..], &sizes, &[("window", window)]].concat())
    }

    /// Sequences that fill the window take flags of pairs once, and a mask of them in every layer: in the format of
    /// attention, with a row per token of all sequences, which memory-efficient attention pads to 104 numbers.
    #[test]
    fn sequences_that_fill_the_window_take_a_mask() {
        let count = |window: &str, techniques: &str, bytes: u64| {
            in_window(window, techniques).unwrap().into_iter().filter(|&request| request == bytes).count()
        };
        for (window, flags, masks) in [("0", 0, 0), ("100", 0, 0), ("99", 4, 3), ("20", 4, 3)] {
            assert_eq!(count(window, "bf16_model", 99 * 99), flags, "{window}");
            assert_eq!(count(window, "bf16_model", 2 * 99 * 99 * 2), masks, "{window}");
            assert_eq!(count(window, "", 2 * 99 * 104 * 4), masks, "{window}");
        }
        for word in ["liger", "offload", "ckpt_selective"] {
            assert!(in_window("100", word).is_ok(), "{word}");
            let reason = format!(
                "workload 'windowed': technique '{word}' is not modelled for a context of 99 that fills the sliding window \
                 of 99; `oomph rehearse` runs the model's own code"
            );
            assert_eq!(in_window("99", word), Err(reason));
        }
    }

    /// The number of requests and their bytes, of a rehearsed Llama. cuDNN's kernel makes the gradients of values that come
    /// from the host head by head, and they are copied; labels of one sequence are copied without their padding.
    #[test]
    fn tensors_from_the_host_have_another_order() {
        let shape = [("layers", "3"), ("width", "256"), ("heads", "4"), ("kv_heads", "2"), ("ffn", "700")];
        let sizes = [("vocab", "3001"), ("context", "130"), ("steps", "3")];
        for (batch, techniques, count, bytes) in [
            ("2", "bf16_model,offload", 1807, 417_336_248),
            ("2", "amp,offload", 2017, 555_178_424),
            ("1", "amp,offload,ckpt", 2005, 408_535_328),
        ] {
            let settings = [&shape[..], &sizes, &[("batch", batch), ("techniques", techniques)]].concat();
            let requests = requests_of("llama", &settings).unwrap();
            assert_eq!((requests.len(), requests.iter().sum::<u64>()), (count, bytes), "{batch} {techniques}");
        }
    }

    /// The scale of Gemma's embeddings is a buffer: no policy narrows it, so the model does. Its norms add one to whole
    /// weights, without the rows that FSDP pads.
    #[test]
    fn gemma_scales_its_embeddings_in_their_format() {
        let count = |techniques: &str, bytes: u64| {
            requests("gemma", techniques).into_iter().filter(|&request| request == bytes).count()
        };
        assert_eq!((count("fsdp:7", 2), count("bf16_model", 2)), (0, 1), "the buffer");
        assert_eq!(count("fsdp:7,bf16_master", 2), 1, "the cast of a buffer of 4 bytes");
        // Gathered for forward and backward, the last norm once; 70 rows of 64.
        assert_eq!((count("fsdp:7", 70 * 4), count("fsdp:7,bf16_master", 70 * 4)), (5, 0));
    }
}

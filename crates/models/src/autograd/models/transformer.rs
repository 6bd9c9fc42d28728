//! The reference transformer, in plain PyTorch: pre-norm blocks of attention and an MLP, and an output head.
//!
//! Without further settings it has layer norms, a ReLU MLP four times as wide, learned positions, an untied head, biases and
//! causal attention by the fused kernel that PyTorch takes. [`Architecture`] has the settings. Queries, keys and values
//! always come from one product, which is split; heads that share keys and values are left to
//! `scaled_dot_product_attention(enable_gqa=True)`; heads are rotated after they are transposed. A mixture of experts can
//! replace the MLP.
//!
//! Written like its Python code: every local variable lives until its scope ends, and then its block is freed.

use std::sync::Arc;

use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{AttentionKernel, AttentionShape, SavingMode, SplitDimension, Tensor, TensorSplit, Variable, WeightId},
        layers::{
            INDEX, ReluOutput,
            convolution_kernels::KernelSearch,
            experts::ExpertWeights,
            linear::{LinearWeights, LoraAdapter},
            norm::{RowNorm, RowNormKind},
        },
        machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
        plan::{self, SequenceLengths, TrainingPlan},
        techniques::{self, NumberFormat},
        trainer::{PlainTraining, Validation},
        weights::{DeclaredWeight, RankLayout, WeightList, parameter_count},
    },
};
use oomph_trace::Category;

const NORM: Parameter = Parameter::choice(
    "norm",
    &["layer", "rms"],
    "layer",
    "torch.nn.LayerNorm, or torch.nn.RMSNorm by its fused kernel",
);
const ACTIVATION: Parameter =
    Parameter::choice("activation", &["relu", "gelu", "gelu_tanh", "silu"], "relu", "the activation of the MLP");
const GATED: Parameter = Parameter::choice(
    "gated",
    &["no", "yes"],
    "no",
    "whether a second product gates the MLP: down(act(gate(x)) * up(x))",
);
const FFN: Parameter =
    Parameter::count("ffn", 0..=1 << 20, "0", "numbers per token inside the MLP; 0: four times the width");
const ROTARY: Parameter = Parameter::choice(
    "rotary",
    &["no", "yes"],
    "no",
    "whether queries and keys are rotated by their positions, which are then not learned: x*cos + rotate_half(x)*sin",
);
const BIAS: Parameter = Parameter::choice(
    "bias",
    &["yes", "no"],
    "yes",
    "whether the products of the blocks and the layer norms have biases",
);
const ATTENTION: Parameter = Parameter::choice(
    "attention",
    &["auto", "math", "flash", "efficient", "cudnn"],
    "auto",
    "the kernel of attention that the program names (torch.nn.attention.sdpa_kernel); auto: PyTorch takes one",
);
const DROPOUT: Parameter = Parameter {
    help: "whether numbers are dropped after embeddings and projections and in attention",
    ..plan::DROPOUT
};
const VOCABULARY_MULTIPLE: Parameter = Parameter::count(
    "vocab_multiple",
    0..=1 << 16,
    "0",
    "the vocabulary is padded to a multiple of this; 0: not padded",
);
const CAUSAL: Parameter =
    Parameter::choice("causal", &["yes", "no"], "yes", "whether a token attends only to those before it");

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
        plan::KEY_VALUE_HEADS,
        FFN,
        NORM,
        ACTIVATION,
        GATED,
        ROTARY,
        BIAS,
        ATTENTION,
        CAUSAL,
        DROPOUT,
        plan::TIED,
        plan::VOCABULARY,
        VOCABULARY_MULTIPLE,
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
        refuse_uncompared_sequences(parameters, &plan)?;
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let validation = read_validation(parameters, plan.shape.context)?;
        let architecture = Architecture::read(parameters, &plan)?;
        let (model, kernel_search) = (Arc::new(Transformer::of(&plan, architecture)), KernelSearch::default());
        Ok(PlainTraining { plan, model, lengths, validation, kernel_search, steps }.start())
    },
    count_weights: Some(|parameters| {
        let plan = TrainingPlan::read(parameters)?;
        let architecture = Architecture::read(parameters, &plan)?;
        Ok(parameter_count(&Transformer::of(&plan, architecture).weights))
    }),
};

/// Refuses passes whose sequences were not divided among ranks in a comparison with PyTorch.
fn refuse_uncompared_sequences(parameters: &Parameters<'_>, plan: &TrainingPlan) -> Result<(), WorkloadError> {
    let varies = plan.shape.min_length < plan.shape.context || !parameters.words(plan::LENGTHS.name)?.is_empty();
    let refused = [
        (plan.shape.mixture.is_some(), "for experts"),
        (varies, "for sequences of several lengths"),
        (parameters.count(plan::VALIDATE_EVERY.name)? > 0, "with validation"),
    ];
    for (_, reason) in refused.into_iter().filter(|(is_refused, _)| *is_refused) {
        plan.refuse_split_sequences(reason).map_err(|reason| parameters.refuse(reason))?;
    }
    Ok(())
}

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

/// The activation of the MLP, as far as memory is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activation {
    /// Saves its result.
    Relu,
    /// GELU and SiLU save their input.
    Smooth,
}

/// What computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionChoice {
    /// What PyTorch takes by itself.
    Auto,
    /// Plain operators.
    Math,
    Kernel(AttentionKernel),
}

/// What the code of the model says, beyond the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Architecture {
    norm: RowNormKind,
    activation: Activation,
    is_gated: bool,
    /// Numbers per token inside the MLP.
    ffn: u32,
    /// Heads of keys and values of all ranks.
    key_value_heads: u32,
    is_rotary: bool,
    is_tied: bool,
    has_bias: bool,
    attention: AttentionChoice,
    drops: bool,
    /// Rows of the token table, those that pad it included.
    vocabulary: u32,
    is_causal: bool,
}

impl Architecture {
    /// The reference model.
    fn reference(plan: &TrainingPlan) -> Architecture {
        Architecture {
            norm: RowNormKind::Layer,
            activation: Activation::Relu,
            is_gated: false,
            ffn: 4 * plan.shape.width,
            key_value_heads: plan.shape.heads,
            is_rotary: false,
            is_tied: false,
            has_bias: true,
            attention: AttentionChoice::Auto,
            drops: false,
            vocabulary: plan.shape.vocabulary,
            is_causal: true,
        }
    }

    fn read(parameters: &Parameters<'_>, plan: &TrainingPlan) -> Result<Architecture, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let is = |parameter: &Parameter, word: &str| Ok::<_, WorkloadError>(parameters.choice(parameter.name)? == word);
        let reference = Architecture::reference(plan);
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        let architecture = Architecture {
            norm: if is(&NORM, "rms")? { RowNormKind::Rms } else { RowNormKind::Layer },
            activation: if is(&ACTIVATION, "relu")? { Activation::Relu } else { Activation::Smooth },
            is_gated: is(&GATED, "yes")?,
            ffn: or(count(&FFN)?, reference.ffn),
            key_value_heads: or(count(&plan::KEY_VALUE_HEADS)?, reference.key_value_heads),
            is_rotary: is(&ROTARY, "yes")?,
            is_tied: is(&plan::TIED, "yes")?,
            has_bias: is(&BIAS, "yes")?,
            attention: match parameters.choice(ATTENTION.name)? {
                "math" => AttentionChoice::Math,
                "flash" => AttentionChoice::Kernel(AttentionKernel::Flash),
                "efficient" => AttentionChoice::Kernel(AttentionKernel::MemoryEfficient),
                "cudnn" => AttentionChoice::Kernel(AttentionKernel::Cudnn),
                _ => AttentionChoice::Auto,
            },
            drops: is(&DROPOUT, "yes")?,
            vocabulary: plan.shape.vocabulary.next_multiple_of(count(&VOCABULARY_MULTIPLE)?.max(1)),
            is_causal: is(&CAUSAL, "yes")?,
        };
        architecture.check(plan).map_err(|reason| parameters.refuse(reason))?;
        Ok(architecture)
    }

    /// Whether heads share keys and values.
    fn shares_keys(&self, plan: &TrainingPlan) -> bool {
        self.key_value_heads < plan.shape.heads
    }

    fn check(&self, plan: &TrainingPlan) -> Result<(), String> {
        let (heads, ranks) = (plan.shape.heads, plan.techniques.tensor_ranks);
        if self.kernel(plan).is_some() {
            plan.refuse_padded_heads(plan.shape.head_width())?;
        }
        if *self == Architecture::reference(plan) {
            return Ok(());
        }
        // Compared with the reference model only.
        plan.refuse_fully_shard()?;
        if !heads.is_multiple_of(self.key_value_heads) {
            return Err(format!("{} kv_heads do not divide {heads} heads", self.key_value_heads));
        }
        for (count, what) in [(self.key_value_heads, "kv_heads"), (self.ffn, "numbers of ffn")] {
            if !count.is_multiple_of(ranks) {
                let word = plan.techniques.tensor_word();
                return Err(format!("{ranks} ranks of {word} do not divide {count} {what}"));
            }
        }
        if self.is_rotary && !plan.shape.head_width().is_multiple_of(2) {
            return Err(format!("heads of {} numbers cannot be rotated in pairs", plan.shape.head_width()));
        }
        self.check_attention(plan)?;
        self.check_techniques(plan)
    }

    /// Refuses what PyTorch's kernels of attention refuse, and what is not modelled of them.
    fn check_attention(&self, plan: &TrainingPlan) -> Result<(), String> {
        const WIDEST_HEAD: u32 = 256;
        if self.kernel(plan).is_none() {
            return Ok(());
        }
        let is_single = plan.precision.of_attended() == NumberFormat::Single;
        match self.attention {
            AttentionChoice::Kernel(AttentionKernel::Flash | AttentionKernel::Cudnn) if is_single => {
                return Err(
                    "this kernel of attention takes 16 bits only: set amp, fp16 or bf16_model, or attention=efficient \
                            or math"
                        .to_owned(),
                );
            }
            AttentionChoice::Kernel(AttentionKernel::MemoryEfficient) if self.shares_keys(plan) => {
                return Err("attention=efficient does not take heads that share keys and values (kv_heads)".to_owned());
            }
            _ => {}
        }
        let head_width = plan.shape.head_width();
        if head_width > WIDEST_HEAD {
            return Err(format!("heads of {head_width} numbers are not modelled: more than {WIDEST_HEAD}"));
        }
        Ok(())
    }

    /// Refuses techniques whose memory is not known with these settings.
    fn check_techniques(&self, plan: &TrainingPlan) -> Result<(), String> {
        let techniques = &plan.techniques;
        let has_other_mlp = *self
            != Architecture {
                activation: Activation::Relu,
                is_gated: false,
                ffn: 4 * plan.shape.width,
                has_bias: true,
                drops: false,
                ..*self
            };
        let refused = [
            (techniques.in_place && self.activation == Activation::Smooth, "'inplace' needs activation=relu"),
            (techniques.splits_sequences && self.is_tied, "'sequence_parallel' is not modelled for a tied head"),
            (techniques.pipeline_stages > 1 && self.is_tied, "'pipeline' is not modelled for a tied head"),
            (techniques.offload_embeddings && self.is_tied, "'offload_component' is not modelled for a tied head"),
            (techniques.loss_chunks.is_some() && self.is_tied, "'chunked_loss' is not modelled for a tied head"),
            (
                plan.shape.mixture.is_some() && has_other_mlp,
                "experts are ReLU MLPs four times as wide, with biases: activation, gated, ffn, bias and dropout do not apply",
            ),
        ];
        refused.into_iter().find(|(is_refused, _)| *is_refused).map_or(Ok(()), |(_, reason)| Err(reason.to_owned()))
    }

    /// The fused kernel of attention. Plain operators compute it where the program says so, or where no kernel takes heads
    /// that share keys and values in single precision.
    fn kernel(&self, plan: &TrainingPlan) -> Option<AttentionKernel> {
        let number = plan.precision.of_attended();
        match self.attention {
            AttentionChoice::Math => None,
            AttentionChoice::Kernel(kernel) => Some(kernel),
            AttentionChoice::Auto if self.shares_keys(plan) && number == NumberFormat::Single => None,
            AttentionChoice::Auto => Some(AttentionKernel::of(number, false)),
        }
    }
}

/// The weights of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockWeights {
    pub(crate) norm_1: RowNorm,
    pub(crate) query_key_value: LinearWeights,
    pub(crate) projection: LinearWeights,
    pub(crate) norm_2: RowNorm,
    pub(crate) mlp: MlpWeights,
}

/// What follows attention in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MlpWeights {
    Dense { up: LinearWeights, down: LinearWeights },
    Gated { gate: LinearWeights, up: LinearWeights, down: LinearWeights },
    Experts(ExpertWeights),
}

/// The model, as far as it is on this rank.
#[derive(Debug)]
pub(crate) struct Transformer {
    architecture: Architecture,
    weights: Vec<DeclaredWeight>,
    pub(crate) tokens: WeightId,
    /// Learned positions, or the cosines of their rotation, which the sines follow in the list.
    pub(crate) positions: WeightId,
    pub(crate) blocks: Vec<BlockWeights>,
    /// The last norm and the output head; the first stage of a pipeline has neither.
    pub(crate) head: Option<(RowNorm, LinearWeights)>,
}

impl Transformer {
    /// The reference model.
    pub(crate) fn new(plan: &TrainingPlan) -> Transformer {
        Transformer::of(plan, Architecture::reference(plan))
    }

    /// Declares the weights of this rank, in the order of the Python code.
    fn of(plan: &TrainingPlan, architecture: Architecture) -> Transformer {
        let mut weights = TransformerWeights { plan, architecture, list: WeightList::default() };
        let width = plan.shape.width;
        // Rows of the token table, and columns of the output head.
        let vocabulary = architecture.vocabulary.div_ceil(plan.techniques.tensor_ranks);
        let tokens = weights.embedding(architecture.vocabulary, vocabulary, width);
        // Without parts of the sequences, every rank has all positions.
        let positions = plan.shape.context / plan.techniques.sequence_ranks();
        let learned = (!architecture.is_rotary).then(|| weights.embedding(plan.shape.context, positions, width));
        let blocks = (0..plan.shape.layers / plan.techniques.pipeline_stages)
            .map(|layer| {
                weights.list.layer = u16::try_from(layer).ok();
                weights.block()
            })
            .collect();
        weights.list.layer = None;
        let head = plan.has_head().then(|| {
            let norm = weights.norm(width);
            let split = if vocabulary == architecture.vocabulary { TensorSplit::Whole } else { TensorSplit::Outputs };
            let is_tied = architecture.is_tied;
            let weight = if is_tied { tokens } else { weights.declare_rows(vocabulary, width) };
            if !is_tied {
                weights.divide(weight, RankLayout::Rows, u64::from(architecture.vocabulary) * u64::from(width));
            }
            (norm, LinearWeights { flattens: is_tied, ..LinearWeights::plain(weight, width, vocabulary, split) })
        });
        // A module moves its buffers after its parts.
        let positions = learned.unwrap_or_else(|| {
            let elements = u64::from(plan.shape.context) * u64::from(plan.shape.head_width());
            let cosines = weights.list.declare_buffer(elements, None);
            weights.list.declare_buffer(elements, None);
            cosines
        });
        Transformer { architecture, weights: weights.list.declared, tokens, positions, blocks, head }
    }

    fn embed(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        if machine.plan.techniques.splits_sequences {
            return self.embed_parts(machine, ids);
        }
        let length = u64::from(machine.graph.length);
        let tokens = machine.embedding(self.tokens, ids, machine.tokens());
        if machine.plan.techniques.tensor_ranks > 1 {
            // Every rank looked up the rows that it has.
            machine.sum_over_tensor_ranks(tokens.tensor);
        }
        if self.architecture.is_rotary {
            return self.dropped(machine, tokens);
        }
        let range = machine.alloc(INDEX * length, Category::Activation);
        machine.elementwise(INDEX * length, [range]);
        let positions = machine.embedding(self.positions, range, length);
        machine.release(range);
        let x = machine.sum(tokens, positions, Some(machine.graph.sequences), Category::Activation);
        machine.release_all([tokens.tensor, positions.tensor]);
        self.dropped(machine, x)
    }

    /// This rank's part of every sequence. Ranks have parts of both tables.
    fn embed_parts(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        let length = u64::from(machine.graph.length);
        let tokens = machine.embedding_of_ranks(self.tokens, ids, machine.tokens(), SplitDimension::Tokens);
        if self.architecture.is_rotary {
            return self.dropped(machine, tokens);
        }
        let range = machine.alloc(INDEX * length, Category::Activation);
        machine.elementwise(INDEX * length, [range]);
        let positions = machine.embedding_of_ranks(self.positions, range, length, SplitDimension::Positions);
        machine.release(range);
        let x = machine.sum(tokens, positions, Some(machine.graph.sequences), Category::Activation);
        machine.release_all([tokens.tensor, positions.tensor]);
        self.dropped(machine, x)
    }

    /// The input of the products after a norm, and the norm's result where that is something else: then its caller holds it.
    fn gathered(machine: &mut TensorMachine, normed: Variable) -> (Variable, Option<Tensor>) {
        match machine.plan.techniques.splits_sequences {
            true => (machine.gather_sequences(normed), Some(normed.tensor)),
            false => (normed, None),
        }
    }

    /// The result of a product that is split by its inputs, as this rank goes on with it.
    fn scattered(machine: &mut TensorMachine, summand: Variable) -> Variable {
        match machine.plan.techniques.splits_sequences {
            true => machine.scatter_sums(summand, SplitDimension::Tokens),
            false => summand,
        }
    }

    /// Whether numbers are dropped now: validation drops none.
    fn drops_now(&self, machine: &TensorMachine) -> bool {
        self.architecture.drops && machine.saving != SavingMode::Off
    }

    /// Drops numbers of a variable, which is released.
    fn dropped(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        if !self.drops_now(machine) {
            return input;
        }
        let output = machine.dropout(input);
        machine.release(input.tensor);
        output
    }

    fn block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Variable {
        let weights = &self.blocks[layer as usize];
        let normed = machine.layer_norm(input, weights.norm_1);
        let projected = self.attention(machine, weights, normed);
        let projected = self.dropped(machine, projected);
        let middle = machine.add(input, projected, Category::Activation);
        machine.release(projected.tensor);
        let normed = machine.layer_norm(middle, weights.norm_2);
        let lowered = self.mlp(machine, layer, normed);
        let lowered = self.dropped(machine, lowered);
        let output = machine.add(middle, lowered, Category::Activation);
        machine.release_all([lowered.tensor, middle.tensor]);
        output
    }

    /// Attention and the product after it. Releases its input.
    fn attention(&self, machine: &mut TensorMachine, weights: &BlockWeights, normed: Variable) -> Variable {
        let (rows, held) = Self::gathered(machine, normed);
        let joined = machine.linear(rows, weights.query_key_value, Category::Activation);
        let ranks = machine.plan.techniques.tensor_ranks;
        let shape = AttentionShape {
            number: machine.plan.precision.of_attended(),
            heads: machine.plan.local_heads(),
            key_value_heads: self.architecture.key_value_heads / ranks,
            head_width: machine.plan.shape.head_width(),
            is_causal: self.architecture.is_causal,
        };
        let [mut query, mut key, value] = self.heads_of(machine, joined, &shape);
        if self.architecture.is_rotary {
            let tables = self.rotation(machine);
            [query, key] = [query, key].map(|heads| machine.rotate(heads, tables));
        }
        let attended = self.attend(machine, [query, key, value], shape);
        let by_token = match self.architecture.kernel(&machine.plan) {
            None => machine.by_token(attended, shape.heads),
            Some(_) => Variable { tensor: machine.retain(attended.tensor), ..attended },
        };
        let projected = machine.linear(by_token, weights.projection, Category::Temporary);
        let projected = Self::scattered(machine, projected);
        if self.architecture.is_rotary {
            machine.release_all([query.tensor, key.tensor]);
        }
        machine.release_all([by_token.tensor, joined.tensor, attended.tensor, rows.tensor]);
        held.into_iter().for_each(|normed| machine.release(normed));
        projected
    }

    /// Queries, keys and values as parts of one product. Their gradients are joined token by token: those that come back
    /// head by head are copied.
    fn heads_of(&self, machine: &mut TensorMachine, joined: Variable, shape: &AttentionShape) -> [Variable; 3] {
        let parts = machine.attention_bytes(&AttentionShape { number: joined.number, ..*shape });
        let [query, key, value] = machine.split_in_parts(joined, parts);
        let is_math = self.architecture.kernel(&machine.plan).is_none();
        let (is_rotary, is_shared) = (self.architecture.is_rotary, shape.key_value_heads < shape.heads);
        // These kernels make gradients in the order of their inputs, and what comes from the host is in the order of heads.
        let follows_inputs =
            !is_math && self.architecture.kernel(&machine.plan) != Some(AttentionKernel::MemoryEfficient);
        let is_restored = follows_inputs && machine.saving == SavingMode::ToHost;
        let mut by_head = |heads: Variable, count: u32, is_by_head: bool| match is_by_head {
            true if machine.is_reordered(count) => machine.reordered(heads),
            _ => heads,
        };
        [
            by_head(query, shape.heads, is_rotary || is_math || is_restored),
            // The product with all keys makes their gradient column by column, of which the heads are a view.
            by_head(key, shape.key_value_heads, is_rotary || (is_math && is_shared) || is_restored),
            by_head(value, shape.key_value_heads, is_math || is_restored),
        ]
    }

    /// Cosines and sines of the positions of this pass.
    fn rotation(&self, machine: &mut TensorMachine) -> [Variable; 2] {
        let number = machine.plan.precision.of_weights();
        let bytes = u64::from(machine.graph.length) * u64::from(machine.plan.shape.head_width()) * number.bytes();
        [self.positions, self.positions + 1].map(|table| {
            let tensor = machine.weight_on_device(table);
            Variable { part: Some(bytes), ..Variable::constant(tensor, number) }
        })
    }

    /// Attention over queries, keys and values, in their order: by token, or by head where plain operators compute it.
    fn attend(&self, machine: &mut TensorMachine, inputs: [Variable; 3], shape: AttentionShape) -> Variable {
        let [query, key, value] = inputs;
        let drops = self.drops_now(machine);
        // Autocast casts the last argument first.
        let value = machine.cast_for_product(value);
        let key = machine.cast_for_product(key);
        let query = machine.cast_for_product(query);
        let narrow = [query, key, value];
        let attended = match self.architecture.kernel(&machine.plan) {
            None => machine.math_attention(narrow, shape, drops),
            Some(kernel) => machine.kernel_attention(narrow, shape, kernel, drops),
        };
        for (cast, input) in narrow.into_iter().zip(inputs) {
            if cast.tensor != input.tensor {
                machine.release(cast.tensor);
            }
        }
        attended
    }

    /// The MLP or the experts of a block. Releases its input.
    fn mlp(&self, machine: &mut TensorMachine, layer: u32, normed: Variable) -> Variable {
        match self.blocks[layer as usize].mlp {
            MlpWeights::Experts(experts) => {
                let Some(mixture) = machine.plan.shape.mixture else { return normed };
                let mixed = machine.mixture(layer, normed, &experts, &mixture);
                machine.release(normed.tensor);
                mixed
            }
            MlpWeights::Dense { up, down } => {
                let (rows, held) = Self::gathered(machine, normed);
                let raised = machine.linear(rows, up, Category::Temporary);
                // A module of its own holds its input until it returns.
                let input = held.map(|normed| [rows.tensor, normed]);
                if input.is_none() {
                    machine.release(rows.tensor);
                }
                let hidden = self.activated(machine, raised);
                let lowered = machine.linear(hidden, down, Category::Temporary);
                let lowered = Self::scattered(machine, lowered);
                machine.release(hidden.tensor);
                input.into_iter().for_each(|tensors| machine.release_all(tensors));
                lowered
            }
            MlpWeights::Gated { gate, up, down } => {
                let (rows, held) = Self::gathered(machine, normed);
                let gate = machine.linear(rows, gate, Category::Activation);
                let active = self.activated(machine, gate);
                let raised = machine.linear(rows, up, Category::Activation);
                let hidden = machine.multiply(active, raised, Category::Activation);
                machine.release_all([active.tensor, raised.tensor]);
                let lowered = machine.linear(hidden, down, Category::Temporary);
                let lowered = Self::scattered(machine, lowered);
                machine.release_all([hidden.tensor, rows.tensor]);
                held.into_iter().for_each(|normed| machine.release(normed));
                lowered
            }
        }
    }

    /// The activation of a variable, which is released.
    fn activated(&self, machine: &mut TensorMachine, input: Variable) -> Variable {
        if self.architecture.activation == Activation::Relu {
            // The result of a product without a bias is not a view (`_unsafe_view`).
            return match machine.plan.techniques.in_place && !self.architecture.has_bias {
                true => machine.relu(input, ReluOutput::InPlace),
                false => machine.mlp_relu(input),
            };
        }
        let active = machine.smooth_activation(input);
        machine.release(input.tensor);
        active
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
        let (rows, held) = Self::gathered(machine, normed);
        let mut logits = machine.linear(rows, head, Category::Logits);
        if held.is_some() {
            logits = machine.gather_columns(logits, self.architecture.vocabulary);
        }
        [Some(rows.tensor), held].into_iter().flatten().for_each(|tensor| machine.release(tensor));
        if result == ForwardResult::Logits {
            machine.release(x.tensor);
            return logits;
        }
        let loss = machine.cross_entropy(logits, ids);
        machine.release_all([x.tensor, logits.tensor]);
        loss
    }

    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor> {
        vec![self.block(machine, layer, input).tensor]
    }
}

struct TransformerWeights<'a> {
    plan: &'a TrainingPlan,
    architecture: Architecture,
    list: WeightList,
}

impl TransformerWeights<'_> {
    fn block(&mut self) -> BlockWeights {
        let width = self.plan.shape.width;
        let ranks = self.plan.techniques.tensor_ranks;
        let (narrow, wide) = (width / ranks, self.architecture.ffn / ranks);
        let keys = self.architecture.key_value_heads / ranks * self.plan.shape.head_width();
        let split = |split| if ranks == 1 { TensorSplit::Whole } else { split };
        let norm_1 = self.norm(width);
        let query_key_value = self.linear(width, narrow + 2 * keys, split(TensorSplit::Outputs));
        let projection = self.linear(narrow, width, split(TensorSplit::Inputs));
        let norm_2 = self.norm(width);
        let router = self.plan.shape.mixture.map(|mixture| {
            let weight = self.declare_rows(mixture.experts, width);
            LinearWeights::plain(weight, width, mixture.experts, TensorSplit::Whole)
        });
        if self.architecture.is_gated {
            // Several products share their input: its gradients are added up.
            let flat = |linear| LinearWeights { flattens: true, ..linear };
            let gate = flat(self.linear(width, wide, split(TensorSplit::Outputs)));
            let up = flat(self.linear(width, wide, split(TensorSplit::Outputs)));
            let down = self.linear(wide, width, split(TensorSplit::Inputs));
            let mlp = MlpWeights::Gated { gate, up, down };
            return BlockWeights { norm_1, query_key_value, projection, norm_2, mlp };
        }
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

    fn norm(&mut self, width: u32) -> RowNorm {
        let Architecture { norm: kind, has_bias, .. } = self.architecture;
        let mut declare = || {
            let id = self.declare(width.into());
            self.divide(id, RankLayout::PartialGradient, width.into());
            id
        };
        let scale = declare();
        let shift = (kind == RowNormKind::Layer && has_bias).then(declare);
        RowNorm { kind, scale, shift }
    }

    fn linear(&mut self, inputs: u32, outputs: u32, split: TensorSplit) -> LinearWeights {
        let weight = self.declare_rows(outputs, inputs);
        let bias = self.architecture.has_bias.then(|| self.declare(outputs.into()));
        let (layout, divided_bias) = match split {
            TensorSplit::Whole => (RankLayout::Replicated, None),
            TensorSplit::Outputs => (RankLayout::Rows, bias),
            TensorSplit::Inputs => (RankLayout::Columns, None),
        };
        for id in [Some(weight), divided_bias].into_iter().flatten() {
            let whole = self.list.declared[id as usize].elements * u64::from(self.plan.techniques.sequence_ranks());
            self.divide(id, layout, whole);
        }
        let adapter = self.plan.techniques.lora_rank.map(|rank| LoraAdapter {
            down: self.list.declare(u64::from(inputs) * u64::from(rank), true),
            up: self.list.declare(u64::from(rank) * u64::from(outputs), true),
            rank,
        });
        LinearWeights { bias, adapter, ..LinearWeights::plain(weight, inputs, outputs, split) }
    }

    /// A table of this many rows, of which this rank has some.
    fn embedding(&mut self, whole: u32, rows: u32, width: u32) -> WeightId {
        let id = self.declare_rows(rows, width);
        self.list.declared[id as usize].is_embedding = true;
        self.divide(id, RankLayout::RowsWithWholeGradient, u64::from(whole) * u64::from(width));
        id
    }

    /// Says how ranks that have parts of the sequences share a weight of this many elements.
    fn divide(&mut self, id: WeightId, layout: RankLayout, whole: u64) {
        if self.plan.techniques.splits_sequences {
            let declared = &mut self.list.declared[id as usize];
            (declared.layout, declared.whole) = (layout, whole);
        }
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
            ("bf16_model", "bf16_model,fp32_grads"),
            ("bf16_master,fp32_grads", ""),
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
            ("sequence_parallel:4", "sequence_parallel:2"),
            ("sequence_parallel:2", ""),
            ("sequence_parallel:2,ckpt", "sequence_parallel:2"),
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

    fn with_settings(settings: &[(&str, &str)]) -> Recipe {
        settings.iter().fold(small("", 2), |recipe, (name, value)| recipe.with(name, value))
    }

    /// Weights by hand: four blocks 256 wide, 5,000 tokens, 256 positions.
    #[test]
    fn settings_change_the_weights() {
        let count = |settings: &[(&str, &str)]| with_settings(settings).weight_count().unwrap().unwrap();
        let reference = 2 * 5000 * 256 + 256 * 256 + 4 * (12 * 256 * 256 + 13 * 256) + 2 * 256;
        assert_eq!(count(&[]), reference);
        assert_eq!(count(&[("tied", "yes")]), reference - 5000 * 256);
        assert_eq!(count(&[("vocab_multiple", "64")]), reference + 2 * 56 * 256);
        assert_eq!(count(&[("rotary", "yes")]), reference - 256 * 256);
        assert_eq!(count(&[("norm", "rms")]), reference - 9 * 256);
        assert_eq!(count(&[("bias", "no")]), reference - 9 * 256 - 4 * 9 * 256);
        assert_eq!(count(&[("kv_heads", "1")]), reference - 4 * 2 * 3 * 64 * (256 + 1));
        assert_eq!(count(&[("ffn", "512")]), reference - 4 * 512 * (2 * 256 + 1));
        assert_eq!(count(&[("gated", "yes")]), reference + 4 * 1024 * (256 + 1));
    }

    #[test]
    fn settings_change_memory() {
        let peak = |settings: &[(&str, &str)]| check(&with_settings(settings).workload().unwrap()).unwrap().peak.bytes;
        for (name, less, more) in [
            ("activation", "relu", "gelu"),
            ("gated", "no", "yes"),
            ("dropout", "no", "yes"),
            ("attention", "auto", "math"),
            ("ffn", "512", "1024"),
            ("tied", "yes", "no"),
            ("norm", "rms", "layer"),
        ] {
            assert!(peak(&[(name, less)]) < peak(&[(name, more)]), "{name}");
        }
        for (name, value) in [("activation", "silu"), ("activation", "gelu_tanh")] {
            assert_eq!(peak(&[(name, value)]), peak(&[("activation", "gelu")]), "{value}");
        }
        assert_eq!(peak(&[("causal", "no")]), peak(&[]));
        assert_eq!(peak(&[("attention", "efficient")]), peak(&[]));
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        for (settings, reason) in [
            (vec![("kv_heads", "3")], "3 kv_heads do not divide 4 heads"),
            (
                vec![("attention", "flash")],
                "this kernel of attention takes 16 bits only: set amp, fp16 or bf16_model, or attention=efficient or math",
            ),
            (
                vec![("attention", "efficient"), ("kv_heads", "2")],
                "attention=efficient does not take heads that share keys and values (kv_heads)",
            ),
            (
                vec![("heads", "256"), ("rotary", "yes"), ("attention", "math")],
                "heads of 1 numbers cannot be rotated in pairs",
            ),
            (
                vec![("heads", "128")],
                "heads of 2 numbers are not modelled: not a multiple of 4; `oomph rehearse` runs the model's own code",
            ),
            (vec![("tied", "yes"), ("techniques", "fsdp:4")], "technique 'fsdp' is not modelled for this model yet"),
            (
                vec![("tied", "yes"), ("techniques", "sequence_parallel:2")],
                "'sequence_parallel' is not modelled for a tied head",
            ),
            (
                vec![("experts", "4"), ("techniques", "sequence_parallel:2")],
                "technique 'sequence_parallel' is not modelled for experts",
            ),
            (
                vec![("lengths", "64,256"), ("techniques", "sequence_parallel:2")],
                "technique 'sequence_parallel' is not modelled for sequences of several lengths",
            ),
            (
                vec![("validate_every", "1"), ("techniques", "sequence_parallel:2")],
                "technique 'sequence_parallel' is not modelled with validation",
            ),
            (
                vec![("ffn", "601"), ("techniques", "sequence_parallel:2")],
                "2 ranks of sequence_parallel do not divide 601 numbers of ffn",
            ),
            (vec![("activation", "gelu"), ("techniques", "inplace")], "'inplace' needs activation=relu"),
            (vec![("tied", "yes"), ("techniques", "chunked_loss")], "'chunked_loss' is not modelled for a tied head"),
            (
                vec![("kv_heads", "1"), ("techniques", "tensor_parallel:2")],
                "2 ranks of tensor_parallel do not divide 1 kv_heads",
            ),
            (
                vec![("gated", "yes"), ("experts", "4")],
                "experts are ReLU MLPs four times as wide, with biases: activation, gated, ffn, bias and dropout do not apply",
            ),
        ] {
            let error = with_settings(&settings).workload().err().unwrap().to_string();
            assert!(error.ends_with(reason), "{settings:?}: {error}");
        }
    }

    #[test]
    fn techniques_leave_their_operations() {
        let count = |techniques, kind| summary(techniques).count(kind);
        assert_eq!(count("", OpKind::Collective) + count("", OpKind::HostAlloc) + count("", OpKind::EmptyCache), 0);
        for ranks in ["ddp", "zero1:2", "zero2:2", "zero3:2", "fsdp:2", "tensor_parallel:2"] {
            assert!(count(ranks, OpKind::Collective) > 0, "{ranks}");
        }
        // In each pass, two sequences are gathered and two sums scattered by each of four blocks; one is scattered for each of
        // two tables; backward repeats that. The head gathers its input and the logits, and scatters one gradient. Of nine
        // norms, the optimizer sums two gradients over ranks three times.
        assert_eq!(count("sequence_parallel:2", OpKind::Collective), 3 * (2 * (4 * 4 + 2) + 3 + 9 * 2 * 3));
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

    /// Outside of products and attention, a rank has its part of every sequence. It keeps its rows of a table, and the gradient
    /// of all of them.
    #[test]
    fn ranks_have_parts_of_sequences() {
        let sizes_of = |batch: &str, ranks: &str| {
            let recipe = small(&format!("sequence_parallel:{ranks}"), 1).with("batch", batch).with("vocab", "5001");
            let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
            let sizes = trace.events.iter().filter_map(|event| match event.op {
                Op::Alloc { bytes, tag, .. } => Some((trace.tables.tags()[tag.index()].category, bytes)),
                _ => None,
            });
            sizes.collect::<Vec<(Category, u64)>>()
        };
        // Nine norms of 128 tokens of every sequence, each with two statistics.
        let of_two = sizes_of("8", "2");
        let statistics = of_two.iter().filter(|size| **size == (Category::Activation, 8 * 128 * 4));
        assert_eq!(statistics.count(), 9 * 2);
        // What is gathered is copied into its place, unless there is one sequence: eight inputs, eight gradients, the input of
        // the head and the gradient of the tokens.
        assert_eq!(sizes_of("2", "4").len() - sizes_of("1", "4").len(), 18);
        // Of 5001 tokens, 1251 on a rank; the rows of the last rank are padded for this one, which sends them.
        let of_four = sizes_of("8", "4");
        assert!(of_four.contains(&(Category::Parameter, 5001 * 256 * 4)));
        assert!(of_four.contains(&(Category::Temporary, 1251 * 256 * 4)));
        assert!(of_four.contains(&(Category::Gradient, 5001 * 256 * 4)));
        // The scores that arrive are padded too, and cut before the loss.
        assert_eq!(of_four.iter().filter(|(_, bytes)| *bytes == 8 * 256 * 4 * 1251 * 4).count(), 2);
        assert!(of_four.contains(&(Category::Logits, 8 * 256 * 5001 * 4)));
    }

    /// What stays between steps, by hand: the reference model has 5.8 million weights of 2 or 4 bytes; masters, sums of
    /// gradients and two means have 4 bytes each, like the weights that they belong to. The rest is cuBLAS's.
    #[test]
    fn number_formats_of_weights_gradients_and_states_are_apart() {
        let weights = small("", 3).weight_count().unwrap().unwrap();
        let of = |techniques: &str, category: Category| {
            let trace = Trace::read(&small(techniques, 3).workload().unwrap()).unwrap();
            let mut live = std::collections::BTreeMap::new();
            for event in &trace.events {
                match event.op {
                    Op::Alloc { slot, bytes, tag, .. } => {
                        live.insert(slot, (trace.tables.tags()[tag.index()].category, bytes));
                    }
                    Op::Free { slot, .. } => {
                        live.remove(&slot);
                    }
                    _ => {}
                }
            }
            live.values().filter(|(of, _)| *of == category).map(|(_, bytes)| bytes).sum::<u64>() / weights
        };
        for (techniques, parameters, gradients, states) in [
            ("", 4, 0, 8),
            ("bf16_model", 2, 0, 4),
            ("bf16_model,fp32_grads", 2, 4, 4),
            ("bf16_master", 2, 0, 12),
            ("bf16_master,fp32_grads", 2, 4, 12),
            ("bf16_master,sgd", 2, 0, 4),
            ("bf16_master,zero_fill", 2, 6, 12),
            ("bf16_master,fp32_grads,zero_fill", 2, 4, 12),
            ("bf16_model,fp32_grads,zero_fill", 2, 6, 4),
        ] {
            let found = [Category::Parameter, Category::Gradient, Category::Optimizer].map(|kind| of(techniques, kind));
            assert_eq!(found, [parameters, gradients, states], "{techniques}");
        }
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

        /// Any settings are refused with a reason, or give a consistent trace whose later steps keep the same memory.
        #[test]
        fn any_settings_are_refused_or_train(
            settings in prop::sample::subsequence(vec![
                ("norm", "rms"), ("activation", "silu"), ("gated", "yes"), ("ffn", "600"), ("kv_heads", "2"),
                ("rotary", "yes"), ("tied", "yes"), ("bias", "no"), ("dropout", "yes"), ("vocab_multiple", "64"),
                ("causal", "no"), ("lengths", "64,256"), ("validate_every", "1"),
            ], 0..8),
            attention in prop::sample::select(vec!["auto", "math", "flash", "efficient", "cudnn"]),
            techniques in prop::sample::select(vec![
                "", "amp", "fp16", "bf16_model", "bf16_master,ckpt", "bf16_master,fp32_grads", "amp,ckpt", "ckpt2", "amp,accum2", "amp,offload",
                "offload_params", "lora", "amp,lora", "amp,tensor_parallel:2", "amp,sequence_parallel:2", "pipeline:2", "zero3:2", "chunked_loss",
                "amp,ddp", "inplace",
            ]),
        ) {
            let recipe = with_settings(&settings).with("attention", attention).with("techniques", techniques);
            match recipe.clone().workload() {
                Err(error) => {
                    let words = ["takes 16 bits only", "does not take heads", "not modelled", "needs activation"];
                    let reason = error.to_string();
                    prop_assert!(words.iter().any(|word| reason.contains(word)), "{settings:?} {techniques}: {reason}");
                }
                Ok(short) => {
                    let long = recipe.with("steps", "4").workload().unwrap();
                    let (short, long) = (check(&short).unwrap(), check(&long).unwrap());
                    prop_assert_eq!(short.live_bytes, long.live_bytes, "{:?} {}", settings, techniques);
                    prop_assert_eq!(short.peak.bytes, long.peak.bytes, "{:?} {}", settings, techniques);
                }
            }
        }

        /// Any combination is refused with a reason, or gives a consistent trace whose later steps keep the same memory.
        #[test]
        fn any_techniques_are_refused_or_train(
            words in prop::sample::subsequence(vec![
                "amp", "fp16", "bf16_model", "fp32_grads", "ckpt", "accum2", "offload", "offload_optimizer", "offload_params",
                "offload_component", "inplace", "zero_fill", "empty_cache", "gc", "sgd", "adam8bit", "fused",
                "foreach_off", "chunked_loss", "lora", "ddp", "zero1:2", "zero2:2", "zero3:2", "fsdp:3",
                "tensor_parallel:2", "sequence_parallel:2", "pipeline:2", "tf32",
            ], 0..6),
        ) {
            let techniques = words.join(",");
            match small(&techniques, 2).workload() {
                Err(error) => {
                    let is_reason = ["contradict", "together are not modelled", "needs 16-bit weights"].map(|words| error.to_string().contains(words));
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

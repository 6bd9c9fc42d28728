//! What is trained, and how: the model's shape, its batches, and the techniques.

use std::sync::Arc;

use super::techniques::{DataParallel, NumberFormat, Precision, Techniques};
use crate::{Parameter, Parameters, SeededRandom, WorkloadError};

/// The longest sequence; with the largest batch, all tokens of a step still fit the shapes of work.
const MOST_TOKENS: u32 = 1 << 18;

pub(crate) const STEPS: Parameter = Parameter::count("steps", 1..=100_000_000, "6", "training steps");
pub(crate) const LAYERS: Parameter = Parameter::count("layers", 1..=10_000, "12", "decoder blocks");
pub(crate) const WIDTH: Parameter = Parameter::count("width", 1..=1 << 16, "768", "numbers per token");
pub(crate) const HEADS: Parameter =
    Parameter::count("heads", 1..=1 << 10, "12", "attention heads; must divide the width");
pub(crate) const HEAD_WIDTH: Parameter =
    Parameter::count("head_width", 0..=1 << 12, "0", "numbers of a head; 0: the width over the heads");
pub(crate) const FFN: Parameter = Parameter::count("ffn", 1..=1 << 20, "3072", "numbers per token inside the MLP");
pub(crate) const KEY_VALUE_HEADS: Parameter =
    Parameter::count("kv_heads", 0..=1 << 10, "0", "heads of keys and values; 0: as many as heads");
pub(crate) const TIED: Parameter =
    Parameter::choice("tied", &["yes", "no"], "no", "whether the output head is the table of tokens");
pub(crate) const DROPOUT: Parameter =
    Parameter::choice("dropout", &["yes", "no"], "no", "whether numbers are dropped after embeddings and projections");
pub(crate) const VOCABULARY: Parameter = Parameter::count("vocab", 1..=1 << 20, "50257", "different tokens");
pub(crate) const CONTEXT: Parameter =
    Parameter::count("context", 1..=MOST_TOKENS, "1024", "longest sequence, in tokens");
pub(crate) const BATCH: Parameter = Parameter::count("batch", 1..=1 << 12, "8", "sequences per step");
pub(crate) const MIN_LENGTH: Parameter = Parameter::count(
    "min_length",
    0..=MOST_TOKENS,
    "0",
    "shortest sequence of steps whose length is random up to the context; 0: every step has the context's length",
);

pub(crate) const LENGTHS: Parameter = Parameter::words(
    "lengths",
    "512,1024",
    "",
    "lengths of the sequences of each step, in turn; empty: the context's, or random from min_length",
);

pub(crate) const VALIDATE_EVERY: Parameter =
    Parameter::count("validate_every", 0..=1_000_000, "0", "training steps between two validations; 0: none");
pub(crate) const VALIDATION_PASSES: Parameter =
    Parameter::count("validation_passes", 1..=1_000_000, "4", "batches of a validation");
pub(crate) const VALIDATION_LENGTH: Parameter =
    Parameter::count("validation_length", 0..=MOST_TOKENS, "0", "length of their sequences; 0: as in training");

pub(crate) const EXPERTS: Parameter =
    Parameter::count("experts", 1..=1 << 10, "1", "experts of a block, each an MLP; 1: one MLP for all tokens");
pub(crate) const CHOSEN_EXPERTS: Parameter =
    Parameter::count("chosen_experts", 1..=64, "2", "experts that each token goes to, where there are several");
pub(crate) const IMBALANCE: Parameter =
    Parameter::number("imbalance", 0.0..=1.0, "0.5", "how far the experts' shares of tokens stray from even ones");

/// How tokens are divided among experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertMixture {
    pub(crate) experts: u32,
    pub(crate) chosen: u32,
    pub(crate) imbalance: f64,
}

/// The shape of the model and of its batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelShape {
    pub(crate) layers: u32,
    pub(crate) width: u32,
    pub(crate) heads: u32,
    pub(crate) vocabulary: u32,
    pub(crate) context: u32,
    pub(crate) batch: u32,
    /// The shortest sequence; equal to the context where all are of one length.
    pub(crate) min_length: u32,
    /// Nothing where every block has one MLP for all tokens.
    pub(crate) mixture: Option<ExpertMixture>,
}

impl ModelShape {
    /// Reads the parameters that are declared above.
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<ModelShape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (context, min_length) = (count(&CONTEXT)?, count(&MIN_LENGTH)?);
        let shape = ModelShape::read_model(parameters, context, count(&BATCH)?)?;
        if min_length > context {
            return Err(parameters.refuse(format!("min_length ({min_length}) must not exceed the context ({context})")));
        }
        let mixture = if parameters.declares(EXPERTS.name) { read_mixture(parameters)? } else { None };
        Ok(ModelShape { min_length: if min_length == 0 { context } else { min_length }, mixture, ..shape })
    }

    /// Reads the model's own parameters, for sequences of one length.
    pub(crate) fn read_model(
        parameters: &Parameters<'_>,
        context: u32,
        batch: u32,
    ) -> Result<ModelShape, WorkloadError> {
        let count = |parameter: &Parameter| parameters.count(parameter.name);
        let (width, heads) = (count(&WIDTH)?, count(&HEADS)?);
        // Some models set the width of a head by itself.
        let has_head_width = parameters.declares(HEAD_WIDTH.name) && count(&HEAD_WIDTH)? > 0;
        if !has_head_width && !width.is_multiple_of(heads) {
            return Err(parameters.refuse(format!("{heads} heads do not divide a width of {width}")));
        }
        let (layers, vocabulary) = (count(&LAYERS)?, count(&VOCABULARY)?);
        Ok(ModelShape { layers, width, heads, vocabulary, context, batch, min_length: context, mixture: None })
    }

    /// The shape of a network for images: a batch, and classes in place of tokens.
    pub(crate) fn of_images(batch: u32, classes: u32) -> ModelShape {
        ModelShape {
            layers: 1,
            width: 1,
            heads: 1,
            vocabulary: classes,
            context: 1,
            batch,
            min_length: 1,
            mixture: None,
        }
    }

    /// Width of one attention head.
    pub(crate) fn head_width(&self) -> u32 {
        self.width / self.heads
    }
}

fn read_mixture(parameters: &Parameters<'_>) -> Result<Option<ExpertMixture>, WorkloadError> {
    let (experts, chosen) = (parameters.count(EXPERTS.name)?, parameters.count(CHOSEN_EXPERTS.name)?);
    let imbalance = parameters.number(IMBALANCE.name)?;
    if experts == 1 {
        return Ok(None);
    }
    if chosen > experts {
        return Err(parameters.refuse(format!("chosen_experts ({chosen}) must not exceed experts ({experts})")));
    }
    Ok(Some(ExpertMixture { experts, chosen, imbalance }))
}

/// What is trained, and how.
#[derive(Clone, Debug)]
pub(crate) struct TrainingPlan {
    pub(crate) shape: ModelShape,
    pub(crate) precision: Precision,
    pub(crate) techniques: Techniques,
}

impl TrainingPlan {
    /// Reads all parameters and checks that they fit together.
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<TrainingPlan, WorkloadError> {
        let shape = ModelShape::read(parameters)?;
        let (precision, techniques) = Techniques::read(parameters)?;
        let plan = TrainingPlan { shape, precision, techniques };
        plan.check().map_err(|reason| parameters.refuse(reason))?;
        Ok(plan)
    }

    /// Refuses 4-bit weights and other kernels, which only models of transformers have.
    pub(crate) fn refuse_libraries(&self) -> Result<(), String> {
        match (self.techniques.quantized, self.techniques.liger) {
            (true, _) => {
                Err("technique 'qlora' is modelled for llama, mistral, qwen2, qwen3 and gemma only".to_owned())
            }
            (_, true) => Err("technique 'liger' is modelled for llama, mistral, qwen2, qwen3 and gemma only; \
                              'chunked_loss' fuses the loss alone"
                .to_owned()),
            _ => Ok(()),
        }
    }

    /// Refuses FSDP where its groups of weights were not compared with PyTorch's.
    pub(crate) fn refuse_fully_shard(&self) -> Result<(), String> {
        match self.techniques.data_parallel {
            DataParallel::FullyShard { .. } => Err("technique 'fsdp' is not modelled for this model yet".to_owned()),
            _ => Ok(()),
        }
    }

    /// Refuses techniques that the models of transformers do not follow yet: their memory would be wrong.
    pub(crate) fn refuse_unmodelled(&self, is_llama_like: bool, head_width: u32) -> Result<(), String> {
        self.refuse_padded_heads(head_width)?;
        let techniques = &self.techniques;
        let refused = [
            ("qlora", techniques.quantized && !is_llama_like),
            ("lora", techniques.lora_rank.is_some() && !is_llama_like),
            ("liger", techniques.liger && !is_llama_like),
            ("chunked_loss", techniques.loss_chunks.is_some()),
            ("inplace", techniques.in_place),
            (techniques.tensor_word(), techniques.tensor_ranks > 1),
            ("pipeline", techniques.pipeline_stages > 1),
            ("offload_component", techniques.offload_embeddings),
        ];
        match refused.into_iter().find(|(_, is_set)| *is_set) {
            Some(("chunked_loss", _)) if is_llama_like => {
                Err("technique 'chunked_loss' is not modelled for this model; 'liger' fuses its loss".to_owned())
            }
            Some((word, _)) => Err(format!("technique '{word}' is not modelled for this model yet")),
            None => Ok(()),
        }
    }

    /// Refuses heads that PyTorch pads for its fused kernels of attention (`pad_last_dim`, in 16 bits) or that these do not
    /// take (`check_mem_efficient_attention`, in 32 bits).
    pub(crate) fn refuse_padded_heads(&self, head_width: u32) -> Result<(), String> {
        let step = match self.precision.of_attended() {
            NumberFormat::Half => 8,
            NumberFormat::Single => 4,
        };
        match head_width.is_multiple_of(step) {
            true => Ok(()),
            false => Err(format!(
                "heads of {head_width} numbers are not modelled: not a multiple of {step}; `oomph rehearse` runs the model's \
                 own code"
            )),
        }
    }

    /// Sequences of one micro-batch.
    pub(crate) fn micro_batch(&self) -> u32 {
        self.shape.batch / self.techniques.micro_batches
    }

    /// Refuses sequences that are divided among ranks where that was not compared with PyTorch's.
    pub(crate) fn refuse_split_sequences(&self, place: &str) -> Result<(), String> {
        match self.techniques.splits_sequences {
            true => Err(format!("technique 'sequence_parallel' is not modelled {place}")),
            false => Ok(()),
        }
    }

    /// Attention heads on this rank.
    pub(crate) fn local_heads(&self) -> u32 {
        self.shape.heads / self.techniques.tensor_ranks
    }

    /// Whether this rank has the output head: the first stage of a pipeline has none.
    pub(crate) fn has_head(&self) -> bool {
        self.techniques.pipeline_stages == 1
    }

    /// Checks that model and batch can be divided as the techniques need it.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (shape, techniques) = (&self.shape, &self.techniques);
        let divides = |parts: u32, whole: u32, what: &str, of: &str| {
            if whole.is_multiple_of(parts) { Ok(()) } else { Err(format!("{parts} {what} do not divide {whole} {of}")) }
        };
        divides(techniques.micro_batches, shape.batch, "micro-batches", "sequences")?;
        divides(techniques.tensor_ranks, shape.heads, &format!("ranks of {}", techniques.tensor_word()), "heads")?;
        divides(techniques.sequence_ranks(), shape.context, "ranks of sequence_parallel", "tokens of context")?;
        divides(techniques.pipeline_stages, shape.layers, "stages of pipeline", "layers")
    }
}

/// The length of each step's sequences: given, random, or always the context.
#[derive(Clone, Debug)]
pub(crate) struct SequenceLengths {
    shape: ModelShape,
    /// Used in turn; empty for the context's length or random ones.
    given: Arc<[u32]>,
}

impl SequenceLengths {
    /// The context's length in every step.
    pub(crate) fn fixed(shape: ModelShape) -> SequenceLengths {
        SequenceLengths { shape, given: Arc::default() }
    }

    /// Reads the lengths that are given for this shape.
    pub(crate) fn read(shape: ModelShape, parameters: &Parameters<'_>) -> Result<SequenceLengths, WorkloadError> {
        let context = shape.context;
        let length = |word: String| {
            word.parse().ok().filter(|length| (1..=context).contains(length)).ok_or_else(|| {
                let expected = format!("is not a whole number from 1 to the context ({context})");
                parameters.refuse(format!("'{word}' in lengths {expected}"))
            })
        };
        Ok(SequenceLengths {
            shape,
            given: parameters.words(LENGTHS.name)?.into_iter().map(length).collect::<Result<_, _>>()?,
        })
    }

    /// The length of a step's sequences.
    pub(crate) fn of_step(&self, step: u32, random: &mut SeededRandom) -> u32 {
        if let Some(turn) = step.checked_rem(self.given.len() as u32) {
            self.given[turn as usize]
        } else if self.shape.min_length < self.shape.context {
            random.between(self.shape.min_length.into(), self.shape.context.into()) as u32
        } else {
            self.shape.context
        }
    }
}

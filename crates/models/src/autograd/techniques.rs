//! Number formats and memory-saving techniques, by the words that name them, and what each does to the numbers of training.
//!
//! A word sets a part of [`Techniques`], which layers, optimizer and training loop read. Words combine freely. Words that
//! contradict each other and unknown words are errors. Every technique has one name, its word in `techniques`; older names
//! are read by [`TechniqueWords`].

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Parameter, Parameters, WorkloadError};
use oomph_base::Dtype;

pub(crate) const TECHNIQUES: Parameter = Parameter::words(
    "techniques",
    "amp,ckpt",
    "",
    "memory-saving techniques: amp, fp16, bf16_model, bf16_master, fp32_grads, tf32, ckpt, ckpt2, ckpt_selective, accum2, accum4, \
     accum8, offload, offload_optimizer, offload_params, offload_component, inplace, zero_fill, empty_cache[:n|forward|backward|\
     step|phase], gc[:n], sgd, adam8bit, paged_adam8bit, paged_adam, fused, foreach_off, chunked_loss[:n], liger, lora[:rank], qlora[:rank], ddp[:n], zero1:n, zero2:n, zero3:n, \
     fsdp:n, tensor_parallel:n, sequence_parallel:n, pipeline:n",
);
/// An older name of the words for number formats.
pub(crate) const PRECISION: Parameter = Parameter::alias(
    "precision",
    (TECHNIQUES.name, &["fp32", "tf32", "amp", "fp16", "bf16_model", "bf16_master"]),
    "fp32",
    "number formats",
);
/// An older name of the words for optimizers.
pub(crate) const OPTIMIZER: Parameter =
    Parameter::alias("optimizer", (TECHNIQUES.name, &["adamw", "sgd", "adam8bit"]), "adamw", "optimizer");
/// An older name: `bf16_model,master_weights` is now `bf16_master`.
const MASTER_WEIGHTS: &str = "master_weights";

/// Every word, from the parameter's help; `accum` and `ckpt` can be followed by any number.
fn known_words() -> Vec<&'static str> {
    let listed = TECHNIQUES.help.split_once(": ").map_or("", |(_, words)| words);
    listed.split(", ").map(|word| word.split(['[', ':']).next().unwrap_or(word)).collect()
}

/// The width of a number in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NumberFormat {
    /// 16 bits, bf16 or fp16.
    Half,
    /// 32 bits.
    Single,
}

impl NumberFormat {
    /// Bytes of one number.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            NumberFormat::Half => 2,
            NumberFormat::Single => 4,
        }
    }
}

/// Which 16-bit format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfFormat {
    Brain,
    /// Needs a loss scale, because its range is small.
    Ieee,
}

/// The number formats of a training program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    /// Single precision throughout.
    Single {
        /// Whether products are rounded to tf32 inside; memory is the same.
        tf32: bool,
    },
    /// Weights in single precision, cast for every product (`torch.autocast`).
    Autocast(HalfFormat),
    /// Weights and everything else in 16 bits.
    HalfModel {
        /// Whether the optimizer has single-precision copies of them, and so single-precision states.
        master_weights: bool,
    },
}

impl Precision {
    /// The format of weights and their gradients.
    pub(crate) fn of_weights(self) -> NumberFormat {
        match self {
            Precision::HalfModel { .. } => NumberFormat::Half,
            Precision::Single { .. } | Precision::Autocast(_) => NumberFormat::Single,
        }
    }

    /// Whether products cast their operands first.
    pub(crate) fn is_autocast(self) -> bool {
        matches!(self, Precision::Autocast(_))
    }

    /// Whether the loss is scaled before backward.
    pub(crate) fn scales_loss(self) -> bool {
        self == Precision::Autocast(HalfFormat::Ieee)
    }

    /// The format of what attention attends to.
    pub(crate) fn of_attended(self) -> NumberFormat {
        match self {
            Precision::Single { .. } => NumberFormat::Single,
            Precision::Autocast(_) | Precision::HalfModel { .. } => NumberFormat::Half,
        }
    }

    /// The format that attention runs in: its kernels for single precision do not use tf32.
    pub(crate) fn of_attention(self, number: NumberFormat) -> Dtype {
        match number {
            NumberFormat::Single => Dtype::F32,
            NumberFormat::Half => self.of_products(number),
        }
    }

    /// The format that a product runs in.
    pub(crate) fn of_products(self, number: NumberFormat) -> Dtype {
        match (number, self) {
            (NumberFormat::Single, Precision::Single { tf32: true }) => Dtype::Tf32,
            (NumberFormat::Single, _) => Dtype::F32,
            (NumberFormat::Half, Precision::Autocast(HalfFormat::Ieee)) => Dtype::F16,
            (NumberFormat::Half, _) => Dtype::Bf16,
        }
    }
}

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Optimizer {
    /// Two running means; see [`UpdateLoop`].
    AdamW,
    /// No state.
    Sgd,
    /// Two running means in 8 bits, tensor by tensor (bitsandbytes).
    Adam8Bit,
    /// The same in 32 bits.
    Adam32Bit,
}

/// PyTorch's implementations of AdamW. They differ in what is live during the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateLoop {
    /// All weights at once, the default on a GPU (`_multi_tensor_adamw`): the temporary of every weight is live until the
    /// last weight is updated.
    Foreach,
    /// One kernel without temporaries (`AdamW(fused=True)`).
    Fused,
    /// One weight after the other (`AdamW(foreach=False)`).
    OneByOne,
}

/// How ranks that train on different data divide the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataParallel {
    /// One rank.
    Alone,
    /// Every rank has everything; gradients are summed in buckets.
    Replicated { ranks: u32 },
    /// Every rank keeps a part: of the optimizer's state (stage 1), of the gradients too (2), of the weights too (3).
    Sharded { stage: u8, ranks: u32 },
    /// PyTorch's FSDP2: `fully_shard` on every block and on the model.
    FullyShard { ranks: u32 },
}

/// When the program returns cached memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmptyCache {
    Never,
    /// After every n-th step.
    AfterSteps(u32),
    AfterForward,
    AfterBackward,
    /// After forward, backward and optimizer.
    AfterPhases,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct Techniques {
    /// Every n-th block is run again in backward instead of kept.
    pub(crate) checkpoint_every: Option<u32>,
    /// Checkpoints keep the results of products and of attention, and run the rest again.
    pub(crate) keeps_products: bool,
    pub(crate) micro_batches: u32,
    pub(crate) offload_activations: bool,
    pub(crate) offload_optimizer: bool,
    pub(crate) offload_weights: bool,
    pub(crate) offload_embeddings: bool,
    pub(crate) in_place: bool,
    /// Gradients of 16-bit weights are added up in single precision.
    pub(crate) single_gradients: bool,
    /// Gradients are zeroed instead of dropped.
    pub(crate) zero_fill: bool,
    pub(crate) empty_cache: EmptyCache,
    /// Every n-th step calls Python's garbage collector.
    pub(crate) collect_garbage_every: Option<u32>,
    pub(crate) optimizer: Optimizer,
    pub(crate) update_loop: UpdateLoop,
    /// Large states are in unified memory, which the driver moves between host and device.
    pub(crate) pages_states: bool,
    pub(crate) loss_chunks: Option<u32>,
    /// The model runs the kernels of liger-kernel.
    pub(crate) liger: bool,
    pub(crate) lora_rank: Option<u32>,
    /// Frozen weights have 4 bits.
    pub(crate) quantized: bool,
    pub(crate) data_parallel: DataParallel,
    pub(crate) tensor_ranks: u32,
    /// Outside of products and attention, every rank of a tensor-parallel group has a part of each sequence.
    pub(crate) splits_sequences: bool,
    pub(crate) pipeline_stages: u32,
}

impl Default for Techniques {
    fn default() -> Self {
        Techniques {
            checkpoint_every: None,
            keeps_products: false,
            micro_batches: 1,
            offload_activations: false,
            offload_optimizer: false,
            offload_weights: false,
            offload_embeddings: false,
            in_place: false,
            single_gradients: false,
            zero_fill: false,
            empty_cache: EmptyCache::Never,
            collect_garbage_every: None,
            optimizer: Optimizer::AdamW,
            update_loop: UpdateLoop::Foreach,
            pages_states: false,
            loss_chunks: None,
            liger: false,
            lora_rank: None,
            quantized: false,
            data_parallel: DataParallel::Alone,
            tensor_ranks: 1,
            splits_sequences: false,
            pipeline_stages: 1,
        }
    }
}

impl Techniques {
    /// The word that divides weights among ranks.
    pub(crate) fn tensor_word(&self) -> &'static str {
        if self.splits_sequences { "sequence_parallel" } else { "tensor_parallel" }
    }

    /// Among how many ranks a sequence is divided.
    pub(crate) fn sequence_ranks(&self) -> u32 {
        if self.splits_sequences { self.tensor_ranks } else { 1 }
    }

    /// Reads the list of words, older names included.
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<(Precision, Techniques), WorkloadError> {
        let mut reading = TechniqueParser::default();
        for word in TechniqueWords::read(parameters)?.words {
            let name = name_of(&word);
            let known = known_words();
            if name == "compile" {
                let reason = "technique 'compile' is not modelled: torch.compile chooses what is saved and fused; \
                              `oomph rehearse` runs the compiled program";
                return Err(parameters.refuse(reason));
            }
            if stem_of(name) == name && !known.contains(&name) {
                return Err(parameters.refuse_word(TECHNIQUES.name, name, &known));
            }
            reading.word(&word).map_err(|reason| parameters.refuse(reason))?;
        }
        let techniques = reading.techniques.clone();
        reading.precision().map(|precision| (precision, techniques)).map_err(|reason| parameters.refuse(reason))
    }
}

/// A word without its argument.
pub(crate) fn name_of(word: &str) -> &str {
    word.split(':').next().unwrap_or_default()
}

/// The technique of a word: `accum4` is `accum`, and `ckpt2` is `ckpt`.
pub(crate) fn stem_of(name: &str) -> &str {
    let is_counted = |stem: &&str| name.strip_prefix(*stem).is_some_and(|count| count.parse::<u32>().is_ok());
    ["accum", "ckpt"].into_iter().find(is_counted).unwrap_or(name)
}

/// The words of all techniques that a workload sets, older names replaced.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TechniqueWords {
    pub(crate) words: Vec<String>,
    /// A sentence per older name, with the name to use.
    pub(crate) notes: Vec<String>,
}

impl TechniqueWords {
    /// Reads `techniques`, and the older `precision` and `optimizer`. Whether the words are right is checked later.
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<TechniqueWords, WorkloadError> {
        if !parameters.declares(TECHNIQUES.name) {
            return Ok(TechniqueWords::default());
        }
        let mut read = TechniqueWords::default();
        let listed = parameters.words(TECHNIQUES.name)?;
        for alias in parameters.aliases()? {
            let word = alias.word;
            if word != alias.default {
                read.note(&format!("{}={word}", alias.name), word);
                read.words.push(word.to_owned());
            } else if let Some(other) = listed.iter().find(|other| alias.words.contains(&name_of(other))) {
                // The default has no word in the list: any word of its kind contradicts it.
                let reason = format!("'{}={word}' and '{other}' contradict: only one of them can be set", alias.name);
                return Err(parameters.refuse(reason));
            }
        }
        read.words.extend(listed);
        if let Some(place) = read.words.iter().position(|word| word == MASTER_WEIGHTS) {
            let Some(model) = read.words.iter().position(|word| word == "bf16_model") else {
                let reason = "'master_weights' is an older name: write techniques=bf16_master for a 16-bit model with \
                              32-bit master weights";
                return Err(parameters.refuse(reason));
            };
            read.words[model] = "bf16_master".to_owned();
            read.words.remove(place);
            read.note("techniques=bf16_model,master_weights", "bf16_master");
        }
        Ok(read)
    }

    fn note(&mut self, older: &str, word: &str) {
        self.notes.push(format!("'{older}' is an older name; write {}={word}", TECHNIQUES.name));
    }
}

/// The words that change the optimizer, which is AdamW without them.
pub const OPTIMIZER_WORDS: [&str; 6] = ["sgd", "adam8bit", "paged_adam8bit", "paged_adam", "fused", "foreach_off"];

/// Words of which only one can be given.
const EXCLUSIVE: [&[&str]; 6] = [
    &["amp", "fp16", "bf16_model", "bf16_master"],
    &OPTIMIZER_WORDS,
    &["ddp", "zero1", "zero2", "zero3", "fsdp"],
    &["lora", "qlora"],
    &["ckpt", "ckpt_selective"],
    &["tensor_parallel", "sequence_parallel"],
];

/// The words whose programs were compared with FSDP's own code; others are refused beside `fsdp`.
const MODELLED_WITH_FSDP: [&str; 16] = [
    "fsdp",
    "amp",
    "bf16_model",
    "bf16_master",
    "tf32",
    "ckpt",
    "accum",
    "offload",
    "offload_params",
    "inplace",
    "zero_fill",
    "empty_cache",
    "gc",
    "sgd",
    "fused",
    "foreach_off",
];

/// The same for `sequence_parallel`.
const MODELLED_WITH_SEQUENCE_PARALLEL: [&str; 12] = [
    "sequence_parallel",
    "amp",
    "bf16_model",
    "tf32",
    "ckpt",
    "accum",
    "zero_fill",
    "empty_cache",
    "gc",
    "sgd",
    "fused",
    "foreach_off",
];

/// The techniques read so far, and the words that set them.
#[derive(Default)]
struct TechniqueParser {
    techniques: Techniques,
    seen: Vec<String>,
}

impl TechniqueParser {
    fn has(&self, word: &str) -> bool {
        self.seen.iter().any(|seen| name_of(seen) == word)
    }

    fn word(&mut self, word: &str) -> Result<(), String> {
        let (name, argument) = word.split_once(':').map_or((word, None), |(name, argument)| (name, Some(argument)));
        let group = EXCLUSIVE.into_iter().find(|group| group.contains(&stem_of(name))).unwrap_or_default();
        let is_same = |seen: &str| stem_of(seen) == stem_of(name) || group.contains(&stem_of(seen));
        match self.seen.iter().find(|seen| is_same(name_of(seen))) {
            Some(earlier) if earlier == word => return Err(format!("technique '{word}' is given twice")),
            Some(earlier) => return Err(format!("'{earlier}' and '{word}' contradict: only one of them can be set")),
            None => {}
        }
        self.seen.push(word.to_owned());
        let techniques = &mut self.techniques;
        match name {
            "sgd" => techniques.optimizer = Optimizer::Sgd,
            "adam8bit" => techniques.optimizer = Optimizer::Adam8Bit,
            "paged_adam8bit" => (techniques.optimizer, techniques.pages_states) = (Optimizer::Adam8Bit, true),
            "paged_adam" => (techniques.optimizer, techniques.pages_states) = (Optimizer::Adam32Bit, true),
            "fused" => techniques.update_loop = UpdateLoop::Fused,
            "foreach_off" => techniques.update_loop = UpdateLoop::OneByOne,
            "ckpt_selective" => (techniques.checkpoint_every, techniques.keeps_products) = (Some(1), true),
            "offload" => techniques.offload_activations = true,
            "offload_optimizer" => techniques.offload_optimizer = true,
            "offload_params" => (techniques.offload_weights, techniques.offload_optimizer) = (true, true),
            "offload_component" => techniques.offload_embeddings = true,
            "inplace" => techniques.in_place = true,
            "fp32_grads" => techniques.single_gradients = true,
            "zero_fill" => techniques.zero_fill = true,
            "empty_cache" => techniques.empty_cache = empty_cache(argument)?,
            "gc" => techniques.collect_garbage_every = Some(count(word, argument, 1, Some(1))?),
            "chunked_loss" => techniques.loss_chunks = Some(count(word, argument, 2, Some(8))?),
            "liger" => techniques.liger = true,
            "lora" => techniques.lora_rank = Some(count(word, argument, 1, Some(8))?),
            "qlora" => {
                techniques.lora_rank = Some(count(word, argument, 1, Some(8))?);
                techniques.quantized = true;
            }
            "ddp" => {
                techniques.data_parallel = DataParallel::Replicated { ranks: count(word, argument, 2, Some(8))? };
            }
            "zero1" | "zero2" | "zero3" => {
                let stage = name.strip_prefix("zero").and_then(|stage| stage.parse().ok()).unwrap_or(1);
                techniques.data_parallel = DataParallel::Sharded { stage, ranks: count(word, argument, 2, None)? };
            }
            "fsdp" => techniques.data_parallel = DataParallel::FullyShard { ranks: count(word, argument, 2, None)? },
            "tensor_parallel" => techniques.tensor_ranks = count(word, argument, 2, None)?,
            "sequence_parallel" => {
                (techniques.tensor_ranks, techniques.splits_sequences) = (count(word, argument, 2, None)?, true);
            }
            "pipeline" => techniques.pipeline_stages = count(word, argument, 2, None)?,
            _ => match (name.strip_prefix("accum"), name.strip_prefix("ckpt")) {
                (Some(micro_batches), _) => techniques.micro_batches = positive(word, micro_batches)?,
                (None, Some("")) => techniques.checkpoint_every = Some(1),
                (None, Some(every)) => techniques.checkpoint_every = Some(positive(word, every)?),
                (None, None) => {}
            },
        }
        let takes_argument = ["empty_cache", "gc", "chunked_loss", "lora", "qlora", "ddp", "fsdp", "pipeline"];
        let takes_ranks = name.starts_with("zero") || EXCLUSIVE[5].contains(&name);
        if argument.is_some() && !takes_argument.contains(&name) && !takes_ranks {
            return Err(format!("technique '{name}' takes no argument"));
        }
        Ok(())
    }

    /// Whether `fp32_grads` has 16-bit weights, and no word beside it that moves gradients between ranks or to the host.
    fn check_single_gradients(&self) -> Result<(), String> {
        if !self.techniques.single_gradients {
            return Ok(());
        }
        let moving = ["ddp", "zero1", "zero2", "zero3", "offload_optimizer", "offload_params"];
        if let Some(other) = self.seen.iter().find(|word| moving.contains(&name_of(word))) {
            return Err(format!("'fp32_grads' and '{other}' together are not modelled"));
        }
        match self.has("bf16_model") || self.has("bf16_master") {
            true => Ok(()),
            false => {
                Err("'fp32_grads' needs 16-bit weights, 'bf16_model' or 'bf16_master': the gradients of others have \
                          32 bits"
                    .to_owned())
            }
        }
    }

    /// The number formats, if no words contradict each other.
    fn precision(&self) -> Result<Precision, String> {
        let techniques = &self.techniques;
        let clash = |first: &str, second: &str, why: &str| Err(format!("'{first}' and '{second}' contradict: {why}"));
        if techniques.offload_optimizer && techniques.optimizer == Optimizer::Sgd {
            return clash("sgd", "offload_optimizer", "plain SGD has no state to offload");
        }
        if techniques.offload_optimizer && matches!(techniques.optimizer, Optimizer::Adam8Bit | Optimizer::Adam32Bit) {
            let word = OPTIMIZER_WORDS.into_iter().find(|word| self.has(word)).unwrap_or_default();
            return clash(word, "offload_optimizer", "bitsandbytes updates on the device");
        }
        if techniques.offload_optimizer && techniques.update_loop != UpdateLoop::Foreach {
            let word = if self.has("fused") { "fused" } else { "foreach_off" };
            return clash(word, "offload_optimizer", "the host updates the weights");
        }
        let shards = matches!(techniques.data_parallel, DataParallel::Sharded { .. });
        if shards && techniques.offload_weights {
            return clash("zero", "offload_params", "weights are staged from one place, not two");
        }
        for (word, modelled) in
            [("fsdp", MODELLED_WITH_FSDP.as_slice()), ("sequence_parallel", &MODELLED_WITH_SEQUENCE_PARALLEL)]
        {
            let is_modelled = |word: &&String| modelled.contains(&stem_of(name_of(word)));
            if self.has(word)
                && let Some(other) = self.seen.iter().find(|word| !is_modelled(word))
            {
                return Err(format!("'{word}' and '{other}' together are not modelled"));
            }
        }
        self.check_single_gradients()?;
        if techniques.pipeline_stages > 1 && techniques.loss_chunks.is_some() {
            return clash("pipeline", "chunked_loss", "the first stage, which is shown, has no loss");
        }
        Ok(match self.seen.iter().find(|word| EXCLUSIVE[0].contains(&word.as_str())).map(String::as_str) {
            Some("bf16_model") => Precision::HalfModel { master_weights: false },
            Some("bf16_master") => Precision::HalfModel { master_weights: true },
            Some("amp") => Precision::Autocast(HalfFormat::Brain),
            Some(_) => Precision::Autocast(HalfFormat::Ieee),
            None => Precision::Single { tf32: self.has("tf32") },
        })
    }
}

fn positive(word: &str, text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| format!("'{word}' takes a whole number from 1"))
}

fn count(word: &str, argument: Option<&str>, least: u32, default: Option<u32>) -> Result<u32, String> {
    argument
        .map_or(default, |text| text.parse().ok())
        .filter(|number| (least..=u32::from(u16::MAX)).contains(number))
        .ok_or_else(|| format!("'{word}' takes a whole number from {least} to {}", u16::MAX))
}

fn empty_cache(argument: Option<&str>) -> Result<EmptyCache, String> {
    match argument {
        None | Some("step") => Ok(EmptyCache::AfterSteps(1)),
        Some("forward") => Ok(EmptyCache::AfterForward),
        Some("backward") => Ok(EmptyCache::AfterBackward),
        Some("phase") => Ok(EmptyCache::AfterPhases),
        Some(text) => text.parse().ok().filter(|&every| every > 0).map(EmptyCache::AfterSteps).ok_or_else(|| {
            format!("'empty_cache:{text}' is none of empty_cache:N (steps), :forward, :backward, :step and :phase")
        }),
    }
}

/// How the weights after a training step differ from those of the same program without a technique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumericEffect {
    /// Every number has the same format, every update uses the same samples and the same rule. Sums may be taken in another
    /// order, as on another GPU.
    Same,
    /// Intermediate numbers have fewer bits. The optimizer's weights and states stay in single precision, every update
    /// uses the same samples and the same rule.
    Rounding,
    /// Weights or states have fewer bits, or updates follow another rule or use other samples: the trained model can be
    /// another one.
    Training,
}

impl NumericEffect {
    /// The strongest effect of some words of `techniques`; `has_batch_norm`: whether the model has layers whose result for
    /// one sample depends on the other samples of a micro-batch.
    pub(crate) fn of_words<'a>(words: impl Iterator<Item = &'a str>, has_batch_norm: bool) -> NumericEffect {
        let effects = words.map(|word| NumericEffect::of_word(word, has_batch_norm));
        effects.max().unwrap_or(NumericEffect::Same)
    }

    fn of_word(word: &str, has_batch_norm: bool) -> NumericEffect {
        match stem_of(name_of(word)) {
            // Copies and the same operations once more. `torch.utils.checkpoint` restores the state of the random numbers
            // (`preserve_rng_state`), so dropout is the same, too.
            "ckpt" | "ckpt_selective" | "offload" | "offload_optimizer" | "offload_params" | "offload_component" => {
                NumericEffect::Same
            }
            // The same values in the same or less memory.
            "inplace" | "empty_cache" | "gc" => NumericEffect::Same,
            // The same update, by other kernels; the fused one rounds fewer intermediate values.
            "foreach_off" => NumericEffect::Same,
            "fused" => NumericEffect::Rounding,
            // The same formulas by fused kernels, which round at other places (liger-kernel).
            "liger" => NumericEffect::Rounding,
            // Sums over parts of a batch, of rows, of columns.
            "chunked_loss" | "tensor_parallel" | "sequence_parallel" => NumericEffect::Same,
            // Gradients of micro-batches are summed. `torch.nn.BatchNorm2d` takes mean and variance of the micro-batch.
            "accum" | "pipeline" if !has_batch_norm => NumericEffect::Same,
            // TF32 keeps 10 bits of the mantissa of a product's operands (PyTorch, "CUDA semantics").
            "tf32" => NumericEffect::Rounding,
            // `torch.autocast` casts operands to 16 bits and leaves weights and states in fp32 (PyTorch, "Automatic Mixed
            // Precision package"). Master weights do the same for a 16-bit model (Micikevicius et al., "Mixed Precision
            // Training", 2018, section 3.1).
            "amp" | "fp16" | "bf16_master" => NumericEffect::Rounding,
            // Gradients are added up with more bits.
            "fp32_grads" => NumericEffect::Rounding,
            // paged_adam: the same rule with states in single precision, by a kernel of bitsandbytes.
            "paged_adam" => NumericEffect::Rounding,
            // - bf16_model: an update below half a unit in the last place of a 16-bit weight is lost (Zamirai et al.,
            //   "Revisiting BFloat16 Training", 2021). adam8bit, paged_adam8bit: so are changes of 8-bit states (Dettmers et al., "8-bit
            //   Optimizers via Block-wise Quantization", 2022).
            // - sgd: another rule. lora, qlora: other weights are trained; qlora: and the frozen ones have 4 bits.
            // - zero_fill: optimizers skip a weight whose gradient is None, and update one whose gradient is 0 by its momentum
            //   and weight decay (PyTorch, `Optimizer.zero_grad`).
            // - ddp, zero1, zero2, zero3, fsdp: every rank has its own batch, so an update uses the samples of all ranks.
            // - accum and pipeline with batch normalisation, and any word that is missing above.
            _ => NumericEffect::Training,
        }
    }
}

impl fmt::Display for NumericEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NumericEffect::Same => "keeps the numerics",
            NumericEffect::Rounding => "changes rounding",
            NumericEffect::Training => "can change the training result",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::NumericEffect;
    use crate::Recipe;
    use oomph_trace::Trace;

    fn refusal(techniques: &str) -> String {
        let recipe = Recipe::named("reference-gpt-163m").unwrap().with("techniques", techniques);
        recipe.workload().err().unwrap().to_string()
    }

    #[test]
    fn every_word_is_known() {
        for word in super::known_words() {
            let needs_ranks =
                ["zero1", "zero2", "zero3", "fsdp", "tensor_parallel", "sequence_parallel", "pipeline"].contains(&word);
            // bitsandbytes' weights and liger-kernel are used with models of transformers.
            let model = if ["qlora", "liger"].contains(&word) { "llama-2-7b" } else { "reference-gpt-163m" };
            let word = match word {
                "fp32_grads" => "bf16_model,fp32_grads".to_owned(),
                _ if needs_ranks => format!("{word}:4"),
                _ => word.to_owned(),
            };
            let recipe = Recipe::named(model).unwrap().with("techniques", &word);
            assert!(recipe.workload().is_ok(), "{word}: {:?}", recipe.workload().err());
        }
        for word in
            ["gc:10", "empty_cache:3", "empty_cache:phase", "lora:16", "chunked_loss:4", "ddp:2", "accum2,ckpt3"]
        {
            assert!(Recipe::named("reference-gpt-163m").unwrap().with("techniques", word).workload().is_ok(), "{word}");
        }
    }

    #[test]
    fn unknown_word_names_the_nearest() {
        assert_eq!(
            refusal("amp,chkpt"),
            "parameter techniques=amp,chkpt: 'techniques' has no 'chkpt'; did you mean 'ckpt'?"
        );
        assert!(refusal("warp").contains("there are: amp, fp16"), "{}", refusal("warp"));
    }

    #[test]
    fn contradictions_are_refused() {
        for (techniques, reason) in [
            ("sgd,adam8bit", "'sgd' and 'adam8bit' contradict: only one of them can be set"),
            ("amp,bf16_model", "'amp' and 'bf16_model' contradict: only one of them can be set"),
            ("bf16_model,bf16_master", "'bf16_model' and 'bf16_master' contradict: only one of them can be set"),
            ("ddp,zero2:4", "'ddp' and 'zero2:4' contradict: only one of them can be set"),
            ("zero2:2,zero2:4", "'zero2:2' and 'zero2:4' contradict: only one of them can be set"),
            ("sgd,offload_optimizer", "'sgd' and 'offload_optimizer' contradict: plain SGD has no state to offload"),
            ("fused,foreach_off", "'fused' and 'foreach_off' contradict: only one of them can be set"),
            ("fused,offload_optimizer", "'fused' and 'offload_optimizer' contradict: the host updates the weights"),
            ("ckpt2,ckpt_selective", "'ckpt2' and 'ckpt_selective' contradict: only one of them can be set"),
            ("adam8bit,paged_adam", "'adam8bit' and 'paged_adam' contradict: only one of them can be set"),
            (
                "paged_adam,offload_optimizer",
                "'paged_adam' and 'offload_optimizer' contradict: bitsandbytes updates on the device",
            ),
            (
                "liger",
                "technique 'liger' is modelled for llama, mistral, qwen2, qwen3 and gemma only; 'chunked_loss' fuses the loss \
                 alone",
            ),
            ("ckpt,ckpt2", "'ckpt' and 'ckpt2' contradict: only one of them can be set"),
            ("accum4,accum4", "technique 'accum4' is given twice"),
            (
                "master_weights",
                "'master_weights' is an older name: write techniques=bf16_master for a 16-bit model with 32-bit master weights",
            ),
            ("inplace:2", "technique 'inplace' takes no argument"),
            ("zero3", "'zero3' takes a whole number from 2 to 65535"),
            ("fsdp", "'fsdp' takes a whole number from 2 to 65535"),
            ("zero3:2,fsdp:2", "'zero3:2' and 'fsdp:2' contradict: only one of them can be set"),
            ("fsdp:2,lora:4", "'fsdp' and 'lora:4' together are not modelled"),
            ("fp16,fsdp:2", "'fsdp' and 'fp16' together are not modelled"),
            ("fsdp:2,offload_optimizer", "'fsdp' and 'offload_optimizer' together are not modelled"),
            (
                "amp,fp32_grads",
                "'fp32_grads' needs 16-bit weights, 'bf16_model' or 'bf16_master': the gradients of others have 32 bits",
            ),
            ("bf16_master,fp32_grads,zero2:4", "'fp32_grads' and 'zero2:4' together are not modelled"),
            ("fsdp:2,bf16_model,fp32_grads", "'fsdp' and 'fp32_grads' together are not modelled"),
            ("tensor_parallel:5", "5 ranks of tensor_parallel do not divide 12 heads"),
            ("sequence_parallel:5", "5 ranks of sequence_parallel do not divide 12 heads"),
            ("sequence_parallel:3", "3 ranks of sequence_parallel do not divide 1024 tokens of context"),
            ("sequence_parallel", "'sequence_parallel' takes a whole number from 2 to 65535"),
            ("sequence_parallel:2,offload", "'sequence_parallel' and 'offload' together are not modelled"),
            ("inplace,sequence_parallel:2", "'sequence_parallel' and 'inplace' together are not modelled"),
            (
                "tensor_parallel:2,sequence_parallel:2",
                "'tensor_parallel:2' and 'sequence_parallel:2' contradict: only one of them can be set",
            ),
            ("pipeline:5", "5 stages of pipeline do not divide 12 layers"),
            ("accum3", "3 micro-batches do not divide 8 sequences"),
            ("lora,qlora", "'lora' and 'qlora' contradict: only one of them can be set"),
            ("qlora", "technique 'qlora' is modelled for llama, mistral, qwen2, qwen3 and gemma only"),
            (
                "compile",
                "technique 'compile' is not modelled: torch.compile chooses what is saved and fused; `oomph rehearse` runs \
                 the compiled program",
            ),
            ("accum0", "'accum0' takes a whole number from 1"),
            (
                "empty_cache:often",
                "'empty_cache:often' is none of empty_cache:N (steps), :forward, :backward, :step and :phase",
            ),
        ] {
            assert_eq!(refusal(techniques), format!("workload 'reference-gpt-163m': {reason}"));
        }
    }

    #[test]
    fn precision_and_optimizer_parameters_count_as_words() {
        let with = |key, value, techniques| {
            Recipe::named("reference-gpt-163m").unwrap().with(key, value).with("techniques", techniques).workload()
        };
        assert!(with("precision", "amp", "ckpt").is_ok());
        assert!(with("optimizer", "sgd", "").is_ok());
        let error = with("optimizer", "sgd", "adam8bit").err().unwrap().to_string();
        assert_eq!(
            error,
            "workload 'reference-gpt-163m': 'sgd' and 'adam8bit' contradict: only one of them can be set"
        );
        let error = with("precision", "fp8", "").err().unwrap().to_string();
        assert_eq!(
            error,
            "parameter precision=fp8: 'precision' takes one of fp32, tf32, amp, fp16, bf16_model, bf16_master, not the text \
             'fp8'"
        );
        let error = with("precision", "fp32", "ckpt,amp").err().unwrap().to_string();
        assert_eq!(
            error,
            "workload 'reference-gpt-163m': 'precision=fp32' and 'amp' contradict: only one of them can be set"
        );
        assert!(with("optimizer", "adamw", "amp").is_ok(), "a default contradicts its own kind only");
    }

    #[test]
    fn older_names_have_the_same_meaning_and_a_note() {
        let gpt = || Recipe::named("reference-gpt-163m").unwrap();
        for (older, words, note) in [
            (gpt().with("precision", "amp"), "amp", "'precision=amp' is an older name; write techniques=amp"),
            (gpt().with("optimizer", "sgd"), "sgd", "'optimizer=sgd' is an older name; write techniques=sgd"),
            (
                gpt().with("techniques", "bf16_model,ckpt,master_weights"),
                "bf16_master,ckpt",
                "'techniques=bf16_model,master_weights' is an older name; write techniques=bf16_master",
            ),
        ] {
            assert_eq!(
                (older.technique_words().unwrap().join(","), older.notes()),
                (words.to_owned(), vec![note.to_owned()])
            );
            let newer = gpt().with("techniques", words);
            assert!(newer.notes().is_empty());
            let events =
                |recipe: &Recipe| Trace::read(&recipe.clone().with("steps", "2").workload().unwrap()).unwrap().events;
            assert!(events(&older) == events(&newer), "{words}");
        }
        assert!(gpt().with("precision", "fp32").notes().is_empty(), "a default needs no word");
        let serving = Recipe::named("llm-serve").unwrap();
        assert!(serving.with("precision", "fp32").notes().is_empty(), "the parameter of another generator");
    }

    #[test]
    fn list_is_a_text_or_an_array() {
        let gpt = || Recipe::named("reference-gpt-163m").unwrap();
        assert!(gpt().with("techniques", "[\"amp\", \"ckpt\"]").workload().is_ok());
        assert!(gpt().with("techniques", " amp , ckpt ").workload().is_ok());
        assert!(gpt().with("techniques", "[1.5]").workload().is_err());
    }

    fn effect(model: &str, words: &str) -> NumericEffect {
        let words: Vec<String> = words.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        Recipe::named(model).unwrap().numeric_effect(&words)
    }

    #[test]
    fn strongest_effect_counts() {
        for (words, expected) in [
            ("", NumericEffect::Same),
            ("ckpt2,offload,accum4,chunked_loss:4", NumericEffect::Same),
            ("sequence_parallel:4", NumericEffect::Same),
            ("ckpt,tf32", NumericEffect::Rounding),
            ("bf16_master,ckpt", NumericEffect::Rounding),
            ("bf16_master,fp32_grads", NumericEffect::Rounding),
            ("amp,adam8bit", NumericEffect::Training),
            ("bf16_model", NumericEffect::Training),
            ("zero3:8", NumericEffect::Training),
            ("fsdp:8", NumericEffect::Training),
        ] {
            assert_eq!(effect("reference-gpt-163m", words), expected, "{words}");
        }
    }

    #[test]
    fn micro_batches_change_batch_norm() {
        assert_eq!(effect("reference-gpt-163m", "accum4"), NumericEffect::Same);
        assert_eq!(effect("resnet-50", "accum4"), NumericEffect::Training);
        assert_eq!(effect("resnet-50", "offload,tf32"), NumericEffect::Rounding);
    }
}

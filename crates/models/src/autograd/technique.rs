//! Memory-saving techniques, by the words that name them, freely combined.
//!
//! A word sets a part of [`Techniques`]; layers, optimizer and training loop ask it. Words that contradict each other
//! are refused, unknown ones are answered with the nearest right one.

use super::precision::{HalfFormat, Precision};
use crate::{Parameter, Parameters, WorkloadError};

pub(super) const TECHNIQUES: Parameter = Parameter::words(
    "techniques",
    "amp,ckpt",
    "",
    "memory-saving techniques: amp, fp16, bf16_model, master_weights, tf32, ckpt, ckpt2, accum2, accum4, accum8, \
     offload, offload_optimizer, offload_params, offload_component, inplace, zero_fill, empty_cache[:n|forward|backward|\
     step|phase], gc[:n], sgd, adam8bit, chunked_loss[:n], lora[:rank], ddp[:n], zero1:n, zero2:n, zero3:n, \
     tensor_parallel:n, pipeline:n",
);
pub(super) const PRECISION: Parameter =
    Parameter::choice("precision", &["fp32", "tf32", "amp", "fp16", "bf16_model"], "fp32", "number formats");
pub(super) const OPTIMIZER: Parameter =
    Parameter::choice("optimizer", &["adamw", "sgd", "adam8bit"], "adamw", "what updates the weights");

/// Every word; `accum` and `ckpt` take any number.
const WORDS: &[&str] = &[
    "amp",
    "fp16",
    "bf16_model",
    "master_weights",
    "tf32",
    "ckpt",
    "ckpt2",
    "accum2",
    "accum4",
    "accum8",
    "offload",
    "offload_optimizer",
    "offload_params",
    "offload_component",
    "inplace",
    "zero_fill",
    "empty_cache",
    "gc",
    "sgd",
    "adam8bit",
    "chunked_loss",
    "lora",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "tensor_parallel",
    "pipeline",
];

/// What updates the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Optimizer {
    /// Two running means, over lists of tensors.
    AdamW,
    /// Nothing but the gradient.
    Sgd,
    /// Two running means in 8 bits, tensor by tensor.
    Adam8Bit,
}

/// How ranks that train on different data share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataParallel {
    /// One rank.
    Alone,
    /// Every rank has everything; gradients are summed in buckets.
    Replicated { ranks: u32 },
    /// Every rank keeps a part: of the optimizer's state (stage 1), of the gradients too (2), of the weights too (3).
    Sharded { stage: u8, ranks: u32 },
}

/// When cached memory is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyCache {
    Never,
    /// After every so many steps.
    AfterSteps(u32),
    AfterForward,
    AfterBackward,
    /// After forward, backward and optimizer.
    AfterPhases,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Techniques {
    /// Every how many blocks one is run again in backward instead of kept.
    pub(super) checkpoint_every: Option<u32>,
    pub(super) micro_batches: u32,
    pub(super) offload_activations: bool,
    pub(super) offload_optimizer: bool,
    pub(super) offload_weights: bool,
    pub(super) offload_embeddings: bool,
    pub(super) in_place: bool,
    /// Gradients are zeroed instead of dropped.
    pub(super) zero_fill: bool,
    pub(super) empty_cache: EmptyCache,
    /// Every how many steps Python's garbage is collected.
    pub(super) collect_garbage_every: Option<u32>,
    pub(super) optimizer: Optimizer,
    pub(super) loss_chunks: Option<u32>,
    pub(super) lora_rank: Option<u32>,
    pub(super) data_parallel: DataParallel,
    pub(super) tensor_ranks: u32,
    pub(super) pipeline_stages: u32,
}

impl Default for Techniques {
    fn default() -> Self {
        Techniques {
            checkpoint_every: None,
            micro_batches: 1,
            offload_activations: false,
            offload_optimizer: false,
            offload_weights: false,
            offload_embeddings: false,
            in_place: false,
            zero_fill: false,
            empty_cache: EmptyCache::Never,
            collect_garbage_every: None,
            optimizer: Optimizer::AdamW,
            loss_chunks: None,
            lora_rank: None,
            data_parallel: DataParallel::Alone,
            tensor_ranks: 1,
            pipeline_stages: 1,
        }
    }
}

impl Techniques {
    /// Reads precision, optimizer and the list of words.
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<(Precision, Techniques), WorkloadError> {
        let mut reading = Reading::default();
        for name in [parameters.choice(PRECISION.name)?, parameters.choice(OPTIMIZER.name)?] {
            if !["fp32", "adamw"].contains(&name) {
                reading.word(name).map_err(|reason| parameters.refuse(reason))?;
            }
        }
        for word in parameters.words(TECHNIQUES.name)? {
            let name = word.split(':').next().unwrap_or_default();
            let is_counted = ["accum", "ckpt"]
                .iter()
                .any(|stem| name.strip_prefix(stem).is_some_and(|count| count.parse::<u32>().is_ok()));
            if !is_counted && !WORDS.contains(&name) {
                return Err(parameters.refuse_word(TECHNIQUES.name, name, WORDS));
            }
            reading.word(&word).map_err(|reason| parameters.refuse(reason))?;
        }
        let techniques = reading.techniques.clone();
        reading.precision().map(|precision| (precision, techniques)).map_err(|reason| parameters.refuse(reason))
    }
}

/// What was read so far, to find contradictions.
#[derive(Default)]
struct Reading {
    techniques: Techniques,
    /// The word that set each thing that can be set once.
    formats: Option<&'static str>,
    optimizer: Option<&'static str>,
    data_parallel: Option<&'static str>,
    tf32: bool,
    master_weights: bool,
    seen: Vec<String>,
}

impl Reading {
    fn word(&mut self, word: &str) -> Result<(), String> {
        let (name, argument) = word.split_once(':').map_or((word, None), |(name, argument)| (name, Some(argument)));
        let stem = ["accum", "ckpt"].into_iter().find(|stem| name.starts_with(stem)).unwrap_or(name);
        if self.seen.iter().any(|seen| seen == stem) {
            return Err(format!("technique '{stem}' is given twice"));
        }
        self.seen.push(stem.to_owned());
        let techniques = &mut self.techniques;
        match name {
            "amp" => set_once(&mut self.formats, "amp")?,
            "fp16" => set_once(&mut self.formats, "fp16")?,
            "bf16_model" => set_once(&mut self.formats, "bf16_model")?,
            "master_weights" => self.master_weights = true,
            "tf32" => self.tf32 = true,
            "sgd" => {
                set_once(&mut self.optimizer, "sgd")?;
                techniques.optimizer = Optimizer::Sgd;
            }
            "adam8bit" => {
                set_once(&mut self.optimizer, "adam8bit")?;
                techniques.optimizer = Optimizer::Adam8Bit;
            }
            "offload" => techniques.offload_activations = true,
            "offload_optimizer" => techniques.offload_optimizer = true,
            "offload_params" => (techniques.offload_weights, techniques.offload_optimizer) = (true, true),
            "offload_component" => techniques.offload_embeddings = true,
            "inplace" => techniques.in_place = true,
            "zero_fill" => techniques.zero_fill = true,
            "empty_cache" => techniques.empty_cache = empty_cache(argument)?,
            "gc" => techniques.collect_garbage_every = Some(count(word, argument, 1, Some(1))?),
            "chunked_loss" => techniques.loss_chunks = Some(count(word, argument, 2, Some(8))?),
            "lora" => techniques.lora_rank = Some(count(word, argument, 1, Some(8))?),
            "ddp" => {
                set_once(&mut self.data_parallel, "ddp")?;
                techniques.data_parallel = DataParallel::Replicated { ranks: ranks(word, argument, Some(8))? };
            }
            "zero1" => self.shard("zero1", 1, ranks(word, argument, None)?)?,
            "zero2" => self.shard("zero2", 2, ranks(word, argument, None)?)?,
            "zero3" => self.shard("zero3", 3, ranks(word, argument, None)?)?,
            "tensor_parallel" => techniques.tensor_ranks = ranks(word, argument, None)?,
            "pipeline" => techniques.pipeline_stages = ranks(word, argument, None)?,
            _ => match (name.strip_prefix("accum"), name.strip_prefix("ckpt")) {
                (Some(micro_batches), _) => techniques.micro_batches = positive(word, micro_batches)?,
                (None, Some("")) => techniques.checkpoint_every = Some(1),
                (None, Some(every)) => techniques.checkpoint_every = Some(positive(word, every)?),
                (None, None) => {}
            },
        }
        let takes_argument = ["empty_cache", "gc", "chunked_loss", "lora", "ddp", "tensor_parallel", "pipeline"];
        if argument.is_some() && !takes_argument.contains(&name) && !name.starts_with("zero") {
            return Err(format!("technique '{name}' takes no argument"));
        }
        Ok(())
    }

    fn shard(&mut self, name: &'static str, stage: u8, ranks: u32) -> Result<(), String> {
        set_once(&mut self.data_parallel, name)?;
        self.techniques.data_parallel = DataParallel::Sharded { stage, ranks };
        Ok(())
    }

    /// The number formats, where nothing contradicts anything.
    fn precision(&self) -> Result<Precision, String> {
        let techniques = &self.techniques;
        let clash = |first: &str, second: &str, why: &str| Err(format!("'{first}' and '{second}' contradict: {why}"));
        if techniques.offload_optimizer && techniques.optimizer == Optimizer::Sgd {
            return clash("sgd", "offload_optimizer", "plain SGD has no state to offload");
        }
        if techniques.offload_optimizer && techniques.optimizer == Optimizer::Adam8Bit {
            return clash("adam8bit", "offload_optimizer", "8-bit Adam updates on the device");
        }
        let shards = matches!(techniques.data_parallel, DataParallel::Sharded { .. });
        if shards && techniques.offload_weights {
            return clash("zero", "offload_params", "weights are staged from one place, not two");
        }
        if techniques.pipeline_stages > 1 && techniques.loss_chunks.is_some() {
            return clash("pipeline", "chunked_loss", "the first stage, which is shown, has no loss");
        }
        match (self.formats, self.master_weights) {
            (Some("bf16_model"), master_weights) => Ok(Precision::HalfModel { master_weights }),
            (_, true) => Err("'master_weights' belong to 'bf16_model': other weights are single precision".to_owned()),
            (Some("amp"), false) => Ok(Precision::Autocast(HalfFormat::Brain)),
            (Some(_), false) => Ok(Precision::Autocast(HalfFormat::Ieee)),
            (None, false) => Ok(Precision::Single { tf32: self.tf32 }),
        }
    }
}

fn set_once(place: &mut Option<&'static str>, name: &'static str) -> Result<(), String> {
    match place.replace(name) {
        Some(earlier) => Err(format!("'{earlier}' and '{name}' contradict: only one of them can be")),
        None => Ok(()),
    }
}

fn positive(word: &str, text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| format!("'{word}' takes a whole number from 1"))
}

fn count(word: &str, argument: Option<&str>, least: u32, default: Option<u32>) -> Result<u32, String> {
    let number = match (argument, default) {
        (Some(text), _) => text.parse().ok(),
        (None, default) => default,
    };
    number
        .filter(|number| (least..=u32::from(u16::MAX)).contains(number))
        .ok_or_else(|| format!("'{word}' takes a whole number from {least} to {}", u16::MAX))
}

fn ranks(word: &str, argument: Option<&str>, default: Option<u32>) -> Result<u32, String> {
    count(word, argument, 2, default)
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

#[cfg(test)]
mod tests {
    use crate::Recipe;

    fn refusal(techniques: &str) -> String {
        let recipe = Recipe::named("gpt-124m").unwrap().with("techniques", techniques);
        recipe.workload().err().unwrap().to_string()
    }

    #[test]
    fn every_word_is_understood_alone_with_and_without_its_argument() {
        for word in super::WORDS {
            let needs_ranks = ["zero1", "zero2", "zero3", "tensor_parallel", "pipeline"].contains(word);
            let word = if needs_ranks { format!("{word}:4") } else { (*word).to_owned() };
            let word = if word == "master_weights" { "bf16_model,master_weights".to_owned() } else { word };
            let recipe = Recipe::named("gpt-124m").unwrap().with("techniques", &word);
            assert!(recipe.workload().is_ok(), "{word}: {:?}", recipe.workload().err());
        }
        for word in
            ["gc:10", "empty_cache:3", "empty_cache:phase", "lora:16", "chunked_loss:4", "ddp:2", "accum2,ckpt3"]
        {
            assert!(Recipe::named("gpt-124m").unwrap().with("techniques", word).workload().is_ok(), "{word}");
        }
    }

    #[test]
    fn an_unknown_word_is_answered_with_the_nearest_right_one() {
        assert_eq!(
            refusal("amp,chkpt"),
            "parameter techniques=amp,chkpt: 'techniques' has no 'chkpt'; did you mean 'ckpt'?"
        );
        assert!(refusal("warp").contains("there are: amp, fp16"), "{}", refusal("warp"));
    }

    #[test]
    fn contradictions_are_refused_with_the_reason() {
        for (techniques, reason) in [
            ("sgd,adam8bit", "'sgd' and 'adam8bit' contradict: only one of them can be"),
            ("amp,bf16_model", "'amp' and 'bf16_model' contradict: only one of them can be"),
            ("ddp,zero2:4", "'ddp' and 'zero2' contradict: only one of them can be"),
            ("sgd,offload_optimizer", "'sgd' and 'offload_optimizer' contradict: plain SGD has no state to offload"),
            ("ckpt,ckpt2", "technique 'ckpt' is given twice"),
            ("master_weights", "'master_weights' belong to 'bf16_model': other weights are single precision"),
            ("inplace:2", "technique 'inplace' takes no argument"),
            ("zero3", "'zero3' takes a whole number from 2 to 65535"),
            ("tensor_parallel:5", "5 ranks of tensor_parallel do not divide 12 heads"),
            ("pipeline:5", "5 stages of pipeline do not divide 12 layers"),
            ("accum3", "3 micro-batches do not divide 8 sequences"),
            ("accum0", "'accum0' takes a whole number from 1"),
            (
                "empty_cache:often",
                "'empty_cache:often' is none of empty_cache:N (steps), :forward, :backward, :step and :phase",
            ),
        ] {
            assert_eq!(refusal(techniques), format!("workload 'gpt-124m': {reason}"));
        }
    }

    #[test]
    fn precision_and_optimizer_are_parameters_too_and_contradict_words() {
        let with = |key, value, techniques| {
            Recipe::named("gpt-124m").unwrap().with(key, value).with("techniques", techniques).workload()
        };
        assert!(with("precision", "amp", "ckpt").is_ok());
        assert!(with("optimizer", "sgd", "").is_ok());
        let error = with("optimizer", "sgd", "adam8bit").err().unwrap().to_string();
        assert_eq!(error, "workload 'gpt-124m': 'sgd' and 'adam8bit' contradict: only one of them can be");
        let error = with("precision", "fp8", "").err().unwrap().to_string();
        assert_eq!(
            error,
            "parameter precision=fp8: 'precision' takes one of fp32, tf32, amp, fp16, bf16_model; the text 'fp8' is out of range"
        );
    }

    #[test]
    fn a_list_can_be_written_as_a_text_or_as_a_list() {
        let gpt = || Recipe::named("gpt-124m").unwrap();
        assert!(gpt().with("techniques", "[\"amp\", \"ckpt\"]").workload().is_ok());
        assert!(gpt().with("techniques", " amp , ckpt ").workload().is_ok());
        assert!(gpt().with("techniques", "[1.5]").workload().is_err());
    }
}

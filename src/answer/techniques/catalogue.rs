//! The catalogue of memory-saving techniques, with published figures.
//!
//! A technique is a change to a recipe, which keeps everything else that the recipe sets. The published figures come from
//! articles; the table shows them beside the measurements.

use crate::models::{NumericEffect, Recipe, WorkloadError};

/// A technique, or a useful combination of techniques.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Technique {
    /// A short name, for files and for the command line.
    pub id: &'static str,
    /// Its usual name.
    pub title: &'static str,
    /// The value of the generators' parameter `techniques`, where it differs from the id with commas for `+`.
    words: Option<&'static str>,
    /// The batch is divided by this.
    batch_divisor: u64,
    /// Published figures.
    pub published: Option<PublishedFigures>,
    /// When to use it.
    pub best_use: &'static str,
}

/// Figures from articles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedFigures {
    /// Memory saved.
    pub memory: &'static str,
    /// Effect on time.
    pub performance: &'static str,
}

/// The id of the base, which the others are compared with.
pub const BASE: &str = "base";

const SMALLER_BATCH: PublishedFigures = PublishedFigures {
    memory: "10-40 %, scales with the reduction",
    performance: "slower convergence, higher variance",
};
const MIXED_PRECISION: PublishedFigures =
    PublishedFigures { memory: "about 25-35 %", performance: "about 5-15 % faster" };
const CHECKPOINTING: PublishedFigures =
    PublishedFigures { memory: "40-60 % of activation memory", performance: "20-40 % slower per iteration" };
const ACCUMULATION: PublishedFigures =
    PublishedFigures { memory: "0-15 %, indirect", performance: "longer wall time per step" };
const OFFLOADING: PublishedFigures =
    PublishedFigures { memory: "up to 30-50 % per device", performance: "significant latency increase" };
const SHARDING: PublishedFigures = PublishedFigures { memory: "30-70 % less per GPU", performance: "communication" };

const fn technique(id: &'static str, title: &'static str, best_use: &'static str) -> Technique {
    Technique { id, title, words: None, batch_divisor: 1, published: None, best_use }
}

impl Technique {
    const fn with_published(mut self, published: PublishedFigures) -> Technique {
        self.published = Some(published);
        self
    }

    const fn with_words(mut self, words: &'static str) -> Technique {
        self.words = Some(words);
        self
    }

    const fn dividing_batch_by(mut self, divisor: u64) -> Technique {
        self.batch_divisor = divisor;
        self.with_words("")
    }

    fn words(&self) -> String {
        self.words.map_or_else(|| self.id.replace('+', ","), str::to_owned)
    }

    /// Whether it is the base, which the others are compared with.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.id == BASE
    }

    /// The model with the technique added to the techniques that it has. Combinations that do not exist are refused.
    pub fn applied_to(&self, model: &Recipe) -> Result<AppliedTechnique, TechniqueRefusal> {
        let mut words = model.technique_words().map_err(Box::new)?;
        let named = self.words();
        let named: Vec<String> = named.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        let added: Vec<String> = named.iter().filter(|word| !words.contains(word)).cloned().collect();
        if added.is_empty() && !named.is_empty() {
            return Err(TechniqueRefusal::InBase);
        }
        let micro_batches = |word: &String| word.strip_prefix("accum")?.parse().ok();
        let mut numerics = model.numeric_effect(&added);
        let mut recipe = model.clone();
        if !added.is_empty() {
            words.extend(added);
            recipe = recipe.with_technique_words(&words);
        }
        if self.batch_divisor > 1 {
            numerics = NumericEffect::Training;
            if model.count("batch").is_some() {
                recipe = recipe.with("batch", &self.batch(model).to_string());
            }
        }
        recipe.workload().map_err(Box::new)?;
        Ok(AppliedTechnique { recipe, numerics, batch_step: words.iter().find_map(micro_batches).unwrap_or(1) })
    }

    /// The sequences in one optimizer step.
    pub(super) fn batch(&self, model: &Recipe) -> u64 {
        (model.count("batch").unwrap_or(1) / self.batch_divisor).max(1)
    }
}

/// A model with a technique.
#[derive(Clone, Debug)]
pub struct AppliedTechnique {
    /// What is measured.
    pub recipe: Recipe,
    /// What the technique does to the numbers of the model's training.
    pub numerics: NumericEffect,
    /// Batches must be multiples of this: the number of micro-batches.
    pub(super) batch_step: u32,
}

/// Why a model cannot have a technique.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TechniqueRefusal {
    /// Nothing would change.
    #[error("the base has it already")]
    InBase,
    /// The generator does not know it, or it contradicts a technique of the model.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
}

/// What a model sets beyond its workload's file, and all its techniques: what the base of its table is. Empty for a model
/// without techniques as its file has it.
#[must_use]
pub fn base_settings(model: &Recipe) -> String {
    let is_technique = |key: &str| {
        key == "techniques" || model.generator.parameters.iter().any(|known| known.name == key && known.is_alias())
    };
    // The number of steps is chosen here.
    let others = model.overrides().filter(|(key, _)| !is_technique(key) && *key != "steps");
    let others = others.map(|(key, value)| format!("{key}={value}"));
    let settings: Vec<String> = model.technique_words().unwrap_or_default().into_iter().chain(others).collect();
    settings.join(", ")
}

/// Every technique, in the order in which the table shows them: alone, then together. The base is the first.
pub static TECHNIQUES: &[Technique] = &[
    technique(BASE, "Base: single precision, AdamW, gradients set to None", "as long as it fits").with_words(""),
    technique("half_batch", "Half the batch", "first aid when the GPU is oversubscribed")
        .dividing_batch_by(2)
        .with_published(SMALLER_BATCH),
    technique("quarter_batch", "A quarter of the batch", "first aid when the GPU is oversubscribed")
        .dividing_batch_by(4)
        .with_published(SMALLER_BATCH),
    technique("tf32", "TF32 products", "always, where accuracy allows: time only"),
    technique("amp", "Mixed precision (autocast, bf16)", "dense models: for speed first, memory second")
        .with_published(MIXED_PRECISION),
    technique("fp16", "Mixed precision (autocast, fp16, scaled loss)", "GPUs without bf16")
        .with_published(MIXED_PRECISION),
    technique("bf16_model", "16-bit model", "inference, and training that tolerates it")
        .with_published(MIXED_PRECISION),
    technique("bf16_master", "16-bit model, 32-bit master weights", "large models").with_published(MIXED_PRECISION),
    technique(
        "bf16_master+fp32_grads",
        "16-bit model, 32-bit master weights and gradients",
        "large models, accumulation",
    )
    .with_published(MIXED_PRECISION),
    technique("ckpt", "Checkpointing, every layer", "deep networks, long sequences").with_published(CHECKPOINTING),
    technique("ckpt2", "Checkpointing, every second layer", "when every layer is more than is needed")
        .with_published(CHECKPOINTING),
    technique("ckpt_selective", "Checkpointing that keeps products and attention", "when time matters more")
        .with_published(CHECKPOINTING),
    technique("accum2", "Accumulation over 2 micro-batches", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("accum4", "Accumulation over 4 micro-batches", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("accum8", "Accumulation over 8 micro-batches", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("offload", "Offloading activations", "when time does not matter").with_published(OFFLOADING),
    technique("offload_optimizer", "Offloading the optimizer's states", "many weights, small batch")
        .with_published(OFFLOADING),
    technique("offload_params", "Offloading weights, layer by layer", "a model larger than the GPU")
        .with_published(OFFLOADING),
    technique("inplace", "In-place activations", "convolutional networks"),
    technique("zero_fill", "Gradients zeroed instead of set to None", "never: set_to_none is the default"),
    technique("sgd", "SGD instead of AdamW", "where it converges"),
    technique("adam8bit", "8-bit AdamW (bitsandbytes)", "many weights, small batch"),
    technique("paged_adam", "AdamW with paged states (bitsandbytes)", "when only the states do not fit"),
    technique("paged_adam8bit", "8-bit AdamW with paged states (bitsandbytes)", "when only the states do not fit"),
    technique("fused", "Fused AdamW", "always on a GPU: no temporaries in the update"),
    technique("foreach_off", "AdamW weight by weight (foreach=False)", "when the update is the peak"),
    technique("lora", "LoRA adapters of rank 8", "fine-tuning on one card"),
    technique("chunked_loss", "Chunked cross-entropy", "large vocabularies"),
    technique("liger", "Fused kernels and loss (liger-kernel)", "Llama and its relatives; large vocabularies"),
    technique("empty_cache", "empty_cache after every step", "never as a habit: reserved, not peak"),
    technique("ddp", "Data parallel over 8 ranks, per rank", "speed, not memory").with_words("ddp:8"),
    technique("zero1", "ZeRO 1 over 8 ranks, per rank", "several GPUs").with_words("zero1:8").with_published(SHARDING),
    technique("zero2", "ZeRO 2 over 8 ranks, per rank", "several GPUs").with_words("zero2:8").with_published(SHARDING),
    technique("zero3", "ZeRO 3 over 8 ranks, per rank", "a model larger than the GPU")
        .with_words("zero3:8")
        .with_published(SHARDING),
    technique("fsdp", "FSDP (fully_shard) over 8 ranks, per rank", "a model larger than the GPU")
        .with_words("fsdp:8")
        .with_published(SHARDING),
    technique("tensor_parallel", "Tensor parallel over 4 ranks, per rank", "wide layers, fast links")
        .with_words("tensor_parallel:4"),
    technique("sequence_parallel", "Tensor and sequence parallel over 4 ranks, per rank", "long sequences, fast links")
        .with_words("sequence_parallel:4"),
    technique("pipeline", "Pipeline of 4 stages, the first one", "deep models, slow links").with_words("pipeline:4"),
    technique("amp+ckpt", "Mixed precision and checkpointing", "the usual pair for language models"),
    technique("amp+accum4", "Mixed precision and accumulation", "keeping the batch, at speed"),
    technique("ckpt+accum4", "Checkpointing and accumulation", "single precision on small cards"),
    technique("amp+ckpt+accum4", "The three together", "small cards"),
    technique(
        "amp+ckpt+chunked_loss",
        "Mixed precision, checkpointing, chunked loss",
        "long sequences, large vocabularies",
    ),
    technique("amp+ckpt+adam8bit", "Mixed precision, checkpointing, 8-bit AdamW", "large models on one card"),
    technique(
        "amp+ckpt+offload_optimizer",
        "Mixed precision, checkpointing, optimizer offloaded",
        "models whose states do not fit",
    ),
    technique("zero3+amp+ckpt", "ZeRO 3 over 8 ranks, mixed precision, checkpointing", "13B and more")
        .with_words("zero3:8,amp,ckpt")
        .with_published(SHARDING),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transformers_know_every_technique() {
        for technique in TECHNIQUES {
            // Its kernels replace those of models of transformers.
            let model = if technique.id == "liger" { "llama-3.2-1b" } else { "reference-gpt-163m" };
            let applied = technique.applied_to(&Recipe::named(model).unwrap());
            assert!(applied.is_ok(), "{}: {}", technique.id, applied.unwrap_err());
        }
        assert!(TECHNIQUES[0].is_base());
    }

    fn named(id: &str) -> &'static Technique {
        TECHNIQUES.iter().find(|technique| technique.id == id).unwrap()
    }

    /// What a technique makes of `reference-gpt-163m` with one parameter set: the words, or why not.
    fn applied(id: &str, key: &str, value: &str) -> Result<String, String> {
        let model = Recipe::named("reference-gpt-163m").unwrap().with(key, value);
        let applied = named(id).applied_to(&model).map_err(|refusal| refusal.to_string())?;
        Ok(applied.recipe.technique_words().unwrap().join(","))
    }

    #[test]
    fn base_stays_in_every_row() {
        assert_eq!(applied("base", "techniques", "tf32").unwrap(), "tf32");
        assert_eq!(applied("ckpt", "techniques", "tf32").unwrap(), "tf32,ckpt");
        assert_eq!(applied("ckpt", "precision", "amp").unwrap(), "amp,ckpt");
        assert_eq!(applied("amp+ckpt", "precision", "amp").unwrap(), "amp,ckpt");
        assert_eq!(applied("half_batch", "techniques", "tf32").unwrap(), "tf32");
        assert_eq!(applied("ckpt", "optimizer", "sgd").unwrap(), "sgd,ckpt");
        assert_eq!(applied("amp", "techniques", "tf32").unwrap(), "tf32,amp");
    }

    #[test]
    fn impossible_combinations_have_a_reason() {
        let contradicts = |a: &str, b: &str| {
            Err(format!("workload 'reference-gpt-163m': '{a}' and '{b}' contradict: only one of them can be set"))
        };
        assert_eq!(applied("fp16", "techniques", "amp"), contradicts("amp", "fp16"));
        assert_eq!(applied("amp+ckpt", "precision", "fp16"), contradicts("fp16", "amp"));
        assert_eq!(applied("bf16_master", "techniques", "bf16_model"), contradicts("bf16_model", "bf16_master"));
        assert_eq!(applied("adam8bit", "optimizer", "sgd"), contradicts("sgd", "adam8bit"));
        assert_eq!(applied("zero3", "techniques", "zero3:4"), contradicts("zero3:4", "zero3:8"));
        assert_eq!(applied("fsdp", "techniques", "zero3:8"), contradicts("zero3:8", "fsdp:8"));
        assert_eq!(applied("accum4", "techniques", "accum2"), contradicts("accum2", "accum4"));
        assert_eq!(applied("amp", "techniques", "amp"), Err("the base has it already".to_owned()));
        assert_eq!(
            applied("half_batch", "techniques", "accum8"),
            Err("workload 'reference-gpt-163m': 8 micro-batches do not divide 4 sequences".to_owned())
        );
    }

    #[test]
    fn effect_on_numbers_is_that_of_what_is_added() {
        let effect = |id: &str, techniques: &str| {
            let model = Recipe::named("reference-gpt-163m").unwrap().with("techniques", techniques);
            named(id).applied_to(&model).unwrap().numerics
        };
        assert_eq!(effect("base", "amp"), NumericEffect::Same);
        assert_eq!(effect("ckpt", "amp"), NumericEffect::Same);
        assert_eq!(effect("amp+ckpt", "amp"), NumericEffect::Same);
        assert_eq!(effect("amp+ckpt", "tf32"), NumericEffect::Rounding);
        assert_eq!(effect("amp+ckpt+adam8bit", ""), NumericEffect::Training);
        assert_eq!(effect("half_batch", ""), NumericEffect::Training);
    }

    #[test]
    fn base_is_named_by_what_is_set() {
        let gpt = || Recipe::named("reference-gpt-163m").unwrap();
        assert_eq!(base_settings(&gpt()), "");
        assert_eq!(base_settings(&gpt().with("steps", "9")), "");
        assert_eq!(base_settings(&gpt().with("techniques", "tf32")), "tf32");
        let model = gpt().with("context", "512").with("precision", "amp").with("techniques", "ckpt");
        assert_eq!(base_settings(&model), "amp, ckpt, context=512");
    }

    #[test]
    fn batches_divide_into_micro_batches() {
        let gpt = || Recipe::named("reference-gpt-163m").unwrap();
        let step = |id: &str| named(id).applied_to(&gpt()).unwrap().batch_step;
        assert_eq!(["base", "accum2", "accum8", "amp+ckpt+accum4", "amp+ckpt"].map(step), [1, 2, 8, 4, 1]);
        let of_base = named("ckpt").applied_to(&gpt().with("techniques", "accum4")).unwrap().batch_step;
        assert_eq!(of_base, 4, "micro-batches of the base");
    }

    #[test]
    fn ids_are_unique() {
        for (place, technique) in TECHNIQUES.iter().enumerate() {
            assert!(TECHNIQUES[..place].iter().all(|other| other.id != technique.id), "{} twice", technique.id);
        }
    }

    #[test]
    fn smaller_batch_is_at_least_one() {
        let model = Recipe::named("reference-gpt-163m").unwrap();
        let quarter = |model: &Recipe| named("quarter_batch").applied_to(model).unwrap().recipe.count("batch");
        assert_eq!((model.count("batch"), quarter(&model)), (Some(8), Some(2)));
        assert_eq!(quarter(&model.with("batch", "1")), Some(1));
    }
}

//! The catalogue of memory-saving techniques, with published figures.
//!
//! A technique is a change to a recipe. The published figures come from articles; the table shows them beside the
//! measurements.

use crate::models::Recipe;

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

    /// The recipe with the technique. A generator that does not know it refuses when the workload is made.
    #[must_use]
    pub fn applied_to(&self, recipe: &Recipe) -> Recipe {
        let (mut changed, words) = (recipe.clone(), self.words());
        if !words.is_empty() {
            changed = changed.with("techniques", &words);
        }
        if self.batch_divisor > 1 && recipe.count("batch").is_some() {
            changed = changed.with("batch", &self.batch(recipe).to_string());
        }
        changed
    }

    /// Batches must be multiples of this: the number of micro-batches.
    pub(super) fn batch_step(&self) -> u32 {
        let micro_batches = |word: &str| word.strip_prefix("accum")?.parse().ok();
        self.words().split(',').find_map(micro_batches).unwrap_or(1)
    }

    /// The sequences in one optimizer step.
    pub(super) fn batch(&self, recipe: &Recipe) -> u64 {
        (recipe.count("batch").unwrap_or(1) / self.batch_divisor).max(1)
    }
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
    technique("bf16_master", "16-bit model, 32-bit master weights", "large models")
        .with_words("bf16_model,master_weights")
        .with_published(MIXED_PRECISION),
    technique("ckpt", "Checkpointing, every layer", "deep networks, long sequences").with_published(CHECKPOINTING),
    technique("ckpt2", "Checkpointing, every second layer", "when every layer is more than is needed")
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
    technique("adam8bit", "8-bit AdamW", "many weights, small batch"),
    technique("chunked_loss", "Chunked cross-entropy", "large vocabularies"),
    technique("empty_cache", "empty_cache after every step", "never as a habit: reserved, not peak"),
    technique("ddp", "Data parallel over 8 ranks, per rank", "speed, not memory").with_words("ddp:8"),
    technique("zero1", "ZeRO 1 over 8 ranks, per rank", "several GPUs").with_words("zero1:8").with_published(SHARDING),
    technique("zero2", "ZeRO 2 over 8 ranks, per rank", "several GPUs").with_words("zero2:8").with_published(SHARDING),
    technique("zero3", "ZeRO 3 over 8 ranks, per rank", "a model larger than the GPU")
        .with_words("zero3:8")
        .with_published(SHARDING),
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
        let model = Recipe::named("gpt-124m").unwrap();
        for technique in TECHNIQUES {
            let made = technique.applied_to(&model).workload();
            assert!(
                made.is_ok(),
                "{}: {}",
                technique.id,
                made.err().map(|error| error.to_string()).unwrap_or_default()
            );
        }
        assert!(TECHNIQUES[0].is_base());
    }

    #[test]
    fn batches_divide_into_micro_batches() {
        let step = |id: &str| TECHNIQUES.iter().find(|technique| technique.id == id).unwrap().batch_step();
        assert_eq!(["base", "accum2", "accum8", "amp+ckpt+accum4", "amp+ckpt"].map(step), [1, 2, 8, 4, 1]);
    }

    #[test]
    fn ids_are_unique() {
        for (place, technique) in TECHNIQUES.iter().enumerate() {
            assert!(TECHNIQUES[..place].iter().all(|other| other.id != technique.id), "{} twice", technique.id);
        }
    }

    #[test]
    fn smaller_batch_is_at_least_one() {
        let quarter = TECHNIQUES.iter().find(|technique| technique.id == "quarter_batch").unwrap();
        let model = Recipe::named("gpt-124m").unwrap();
        assert_eq!((model.count("batch"), quarter.applied_to(&model).count("batch")), (Some(8), Some(2)));
        assert_eq!(quarter.applied_to(&model.with("batch", "1")).count("batch"), Some(1));
    }
}

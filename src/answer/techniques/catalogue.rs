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
    /// Words of the generators' parameter `techniques`.
    words: &'static str,
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

const fn technique(id: &'static str, title: &'static str, words: &'static str, best_use: &'static str) -> Technique {
    Technique { id, title, words, batch_divisor: 1, published: None, best_use }
}

impl Technique {
    const fn with_published(mut self, published: PublishedFigures) -> Technique {
        self.published = Some(published);
        self
    }

    const fn dividing_batch_by(mut self, divisor: u64) -> Technique {
        self.batch_divisor = divisor;
        self
    }

    /// Whether it is the base, which the others are compared with.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.id == BASE
    }

    /// The recipe with the technique. A generator that does not know it refuses when the workload is made.
    #[must_use]
    pub fn applied_to(&self, recipe: &Recipe) -> Recipe {
        let mut changed = recipe.clone();
        if !self.words.is_empty() {
            changed = changed.with("techniques", self.words);
        }
        if self.batch_divisor > 1
            && let Some(batch) = recipe.count("batch")
        {
            changed = changed.with("batch", &(batch / self.batch_divisor).max(1).to_string());
        }
        changed
    }

    /// Batches must be multiples of this: the number of micro-batches.
    pub(super) fn batch_step(&self) -> u32 {
        let micro_batches = |word: &str| word.strip_prefix("accum")?.parse().ok();
        self.words.split(',').find_map(micro_batches).unwrap_or(1)
    }

    /// The sequences in one optimizer step.
    pub(super) fn batch(&self, recipe: &Recipe) -> u64 {
        (recipe.count("batch").unwrap_or(1) / self.batch_divisor).max(1)
    }
}

/// Every technique, in the order in which the table shows them: alone, then together. The base is the first.
pub static TECHNIQUES: &[Technique] = &[
    technique(BASE, "Base: single precision, AdamW, gradients set to None", "", "as long as it fits"),
    technique("half_batch", "Half the batch", "", "first aid when the GPU is oversubscribed")
        .dividing_batch_by(2)
        .with_published(SMALLER_BATCH),
    technique("quarter_batch", "A quarter of the batch", "", "first aid when the GPU is oversubscribed")
        .dividing_batch_by(4)
        .with_published(SMALLER_BATCH),
    technique("tf32", "TF32 products", "tf32", "always, where accuracy allows: time only"),
    technique("amp", "Mixed precision (autocast, bf16)", "amp", "dense models: for speed first, memory second")
        .with_published(MIXED_PRECISION),
    technique("fp16", "Mixed precision (autocast, fp16, scaled loss)", "fp16", "GPUs without bf16")
        .with_published(MIXED_PRECISION),
    technique("bf16_model", "16-bit model", "bf16_model", "inference, and training that tolerates it")
        .with_published(MIXED_PRECISION),
    technique("bf16_master", "16-bit model, 32-bit master weights", "bf16_model,master_weights", "large models")
        .with_published(MIXED_PRECISION),
    technique("ckpt", "Checkpointing, every layer", "ckpt", "deep networks, long sequences")
        .with_published(CHECKPOINTING),
    technique("ckpt2", "Checkpointing, every second layer", "ckpt2", "when every layer is more than is needed")
        .with_published(CHECKPOINTING),
    technique("accum2", "Accumulation over 2 micro-batches", "accum2", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("accum4", "Accumulation over 4 micro-batches", "accum4", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("accum8", "Accumulation over 8 micro-batches", "accum8", "keeping the batch with less memory")
        .with_published(ACCUMULATION),
    technique("offload", "Offloading activations", "offload", "when time does not matter").with_published(OFFLOADING),
    technique(
        "offload_optimizer",
        "Offloading the optimizer's states",
        "offload_optimizer",
        "many weights, small batch",
    )
    .with_published(OFFLOADING),
    technique("offload_params", "Offloading weights, layer by layer", "offload_params", "a model larger than the GPU")
        .with_published(OFFLOADING),
    technique("inplace", "In-place activations", "inplace", "convolutional networks"),
    technique("zero_fill", "Gradients zeroed instead of set to None", "zero_fill", "never: set_to_none is the default"),
    technique("sgd", "SGD instead of AdamW", "sgd", "where it converges"),
    technique("adam8bit", "8-bit AdamW", "adam8bit", "many weights, small batch"),
    technique("chunked_loss", "Chunked cross-entropy", "chunked_loss", "large vocabularies"),
    technique("empty_cache", "empty_cache after every step", "empty_cache", "never as a habit: reserved, not peak"),
    technique("ddp", "Data parallel over 8 ranks, per rank", "ddp:8", "speed, not memory"),
    technique("zero1", "ZeRO 1 over 8 ranks, per rank", "zero1:8", "several GPUs").with_published(SHARDING),
    technique("zero2", "ZeRO 2 over 8 ranks, per rank", "zero2:8", "several GPUs").with_published(SHARDING),
    technique("zero3", "ZeRO 3 over 8 ranks, per rank", "zero3:8", "a model larger than the GPU")
        .with_published(SHARDING),
    technique("amp+ckpt", "Mixed precision and checkpointing", "amp,ckpt", "the usual pair for language models"),
    technique("amp+accum4", "Mixed precision and accumulation", "amp,accum4", "keeping the batch, at speed"),
    technique("ckpt+accum4", "Checkpointing and accumulation", "ckpt,accum4", "single precision on small cards"),
    technique("amp+ckpt+accum4", "The three together", "amp,ckpt,accum4", "small cards"),
    technique(
        "amp+ckpt+chunked_loss",
        "Mixed precision, checkpointing, chunked loss",
        "amp,ckpt,chunked_loss",
        "long sequences, large vocabularies",
    ),
    technique(
        "amp+ckpt+adam8bit",
        "Mixed precision, checkpointing, 8-bit AdamW",
        "amp,ckpt,adam8bit",
        "large models on one card",
    ),
    technique(
        "amp+ckpt+offload_optimizer",
        "Mixed precision, checkpointing, optimizer offloaded",
        "amp,ckpt,offload_optimizer",
        "models whose states do not fit",
    ),
    technique(
        "zero3+amp+ckpt",
        "ZeRO 3 over 8 ranks, mixed precision, checkpointing",
        "zero3:8,amp,ckpt",
        "13B and more",
    )
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

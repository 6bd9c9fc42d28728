//! Whether a model fits on a card: its memory with each of the usual ways to train it, and when it answers prompts.
//!
//! Every way is replayed under PyTorch's allocator on a GPU with enough memory, for what it needs, and then on the card with
//! several batches, for the largest one that completes: there the allocator gives back cached memory before a request fails.
//! A server takes what is left of the card for a pool of keys and values, and the answer is how much that is.

use std::sync::atomic::AtomicBool;

use serde::Serialize;

use super::{
    threshold::{LargestQuestion, largest},
    trial::{CACHING, STEPS_FOR_MEMORY, TrialError, replay_memory},
};
use crate::{
    base::GIB,
    device::DeviceSpec,
    measure::{CaseDetail, CaseRecord, Status},
    models::{NumericEffect, OPTIMIZER_WORDS, Recipe, WorkloadError},
    strategy::StrategySpec,
    trace::Category,
};

/// A usual way to use a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelUse {
    /// In words.
    pub name: String,
    /// What is done.
    pub kind: UseKind,
}

/// What is done with a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UseKind {
    /// It is trained with these techniques, as in `--set techniques=`.
    Training(Vec<String>),
    /// It answers prompts in 16 bits, with a cache of keys and values. Prompt and answer together have the length of the
    /// context.
    Answering,
    /// It answers requests in 16 bits, in a server whose keys and values are in one pool of pages, as in vLLM.
    Serving,
}

/// The share of a card that vLLM takes by default (`gpu_memory_utilization`), in percent.
pub const SERVER_PERCENT: u64 = 90;
/// The size of a page is measured with this many pages. A layer's tensor of them is then a multiple of the 2 MiB to which
/// the allocator rounds, because the width of a head is a multiple of 8.
const PAGES_TO_MEASURE: u64 = 4096;
/// The most pages of a pool.
const MOST_PAGES: u64 = 1 << 24;

/// Tokens of an answer: enough for the cache to be reallocated as in longer answers.
const ANSWER_TOKENS: u64 = 16;

/// The usual ways to train, from the most memory to the least.
pub const USUAL_WAYS: [(&str, &str); 10] = [
    ("mixed precision", "amp"),
    ("mixed precision, checkpoints", "amp,ckpt"),
    ("16-bit weights", "bf16_model"),
    ("16-bit weights, checkpoints", "bf16_model,ckpt"),
    ("16-bit weights, checkpoints, 8-bit Adam", "bf16_model,ckpt,adam8bit"),
    ("16-bit weights, checkpoints, Liger kernels", "bf16_model,ckpt,liger"),
    ("16-bit weights, checkpoints, SGD", "bf16_model,ckpt,sgd"),
    ("LoRA on 16-bit weights", "bf16_model,lora"),
    ("LoRA on 16-bit weights, checkpoints", "bf16_model,ckpt,lora"),
    ("LoRA on 4-bit weights (QLoRA), checkpoints", "amp,ckpt,qlora"),
];

impl ModelUse {
    /// The usual ways to train, with this optimizer instead of their own where one is named.
    #[must_use]
    pub fn usual(optimizer: Option<&str>) -> Vec<ModelUse> {
        let is_optimizer = |word: &str| OPTIMIZER_WORDS.contains(&word);
        let ways = USUAL_WAYS.iter().filter(|(_, words)| optimizer.is_none() || !words.split(',').any(is_optimizer));
        // AdamW is the default and has no word.
        let further = optimizer.filter(|word| is_optimizer(word));
        let way = |(name, words): &(&str, &str)| ModelUse {
            name: [*name].into_iter().chain(further).collect::<Vec<_>>().join(", "),
            kind: UseKind::Training(words.split(',').chain(further).map(str::to_owned).collect()),
        };
        ways.map(way).collect()
    }

    /// Training with exactly these techniques.
    #[must_use]
    pub fn training(words: Vec<String>) -> ModelUse {
        let name = if words.is_empty() { "single precision".to_owned() } else { words.join(", ") };
        ModelUse { name, kind: UseKind::Training(words) }
    }

    /// Answering prompts.
    #[must_use]
    pub fn answering() -> ModelUse {
        ModelUse { name: "inference, 16-bit weights".to_owned(), kind: UseKind::Answering }
    }

    /// Answering requests in a server.
    #[must_use]
    pub fn serving() -> ModelUse {
        ModelUse { name: "server with a pool of pages, 16-bit weights".to_owned(), kind: UseKind::Serving }
    }
}

/// What is asked.
pub struct FitsQuestion<'a> {
    /// The model, with batch and context.
    pub model: &'a Recipe,
    /// What is done with it.
    pub uses: &'a [ModelUse],
    /// The simulated card.
    pub card: &'a DeviceSpec,
    /// Its name for people.
    pub card_name: &'a str,
    /// Set from outside to give up.
    pub stop: &'a AtomicBool,
}

/// One use on one card.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FitRow {
    /// The model.
    pub model: String,
    /// Its weights.
    pub weights: Option<u64>,
    /// The card.
    pub card: String,
    /// The memory of the card.
    pub card_bytes: u64,
    /// What of it is left for PyTorch: without context and libraries.
    pub available_bytes: u64,
    /// The use, in words.
    pub way: String,
    /// Whether the model is trained, and does not only answer.
    pub trains: bool,
    /// The techniques of training.
    pub techniques: String,
    /// Sequences per step.
    pub batch: Option<u64>,
    /// Their length.
    pub context: Option<u64>,
    /// Whether it completes on the card; `None` where that is not known.
    pub fits: Option<bool>,
    /// Why it is not known.
    pub reason: String,
    /// The most that is allocated at once, with enough memory.
    pub peak_allocated_bytes: Option<u64>,
    /// The most that is reserved at once, with enough memory.
    pub peak_reserved_bytes: Option<u64>,
    /// The largest batch that completes on the card; 0 where not even one sequence does.
    pub largest_batch: Option<u64>,
    /// How many tokens the pool of a server has keys and values for; `None` for other uses.
    pub cache_tokens: Option<u64>,
    /// What it does to the numbers of training.
    pub numerics: Option<NumericEffect>,
    /// Weights at the allocated peak, copies in other formats included.
    pub weights_bytes: u64,
    /// Gradients at the allocated peak.
    pub gradients_bytes: u64,
    /// States of the optimizer at the allocated peak.
    pub optimizer_bytes: u64,
    /// What is saved between input and loss at the allocated peak, the input included.
    pub activations_bytes: u64,
    /// Scores of tokens or classes at the allocated peak, their copies and gradients included.
    pub logits_bytes: u64,
    /// Keys and values of earlier tokens at the allocated peak.
    pub cache_bytes: u64,
    /// What operators and the optimizer use for a moment, at the allocated peak.
    pub temporary_bytes: u64,
    /// Scratch memory of libraries at the allocated peak.
    pub workspace_bytes: u64,
}

/// Every use on the card, in the order of the question.
pub fn fits(question: &FitsQuestion<'_>) -> Result<Vec<FitRow>, TrialError> {
    question.uses.iter().map(|model_use| question.row(model_use)).collect()
}

impl FitsQuestion<'_> {
    fn row(&self, model_use: &ModelUse) -> Result<FitRow, TrialError> {
        let overhead = self.card.overhead_bytes()?;
        let card_bytes = self.card.total_bytes()?;
        let mut row = FitRow {
            model: self.model.name.clone(),
            weights: self.model.weight_count().unwrap_or(None),
            card: self.card_name.to_owned(),
            card_bytes,
            available_bytes: card_bytes.saturating_sub(overhead),
            way: model_use.name.clone(),
            batch: self.model.count("batch"),
            context: self.model.count("context"),
            ..FitRow::default()
        };
        let recipe = match &model_use.kind {
            UseKind::Training(words) => {
                (row.trains, row.techniques) = (true, words.join(","));
                row.numerics = Some(self.model.numeric_effect(words));
                self.model.clone().with("steps", STEPS_FOR_MEMORY).with_technique_words(words)
            }
            UseKind::Answering => match self.model.answering(ANSWER_TOKENS) {
                Some(recipe) => recipe,
                None => return Ok(FitRow { reason: "not modelled for this model yet".to_owned(), ..row }),
            },
            UseKind::Serving => return self.served(row),
        };
        if let Err(reason) = self.measure(Some(&recipe), &mut row)? {
            return Ok(FitRow { reason, ..row });
        }
        row.largest_batch = Some(self.largest_batch(&recipe, &row)?);
        row.fits = row.largest_batch.zip(row.batch).map(|(largest, batch)| batch <= largest);
        Ok(row)
    }

    /// Replays a recipe with enough memory and notes what it takes; or says why it is not modelled.
    fn measure(&self, recipe: Option<&Recipe>, row: &mut FitRow) -> Result<Result<(), String>, TrialError> {
        let Some(recipe) = recipe else { return Ok(Err("not modelled for this model yet".to_owned())) };
        let workload = match recipe.workload() {
            Ok(workload) => workload,
            Err(WorkloadError::Invalid { reason, .. }) => return Ok(Err(reason)),
            Err(error) => return Err(Box::new(error).into()),
        };
        let everything = self.card.with_room_for(u64::MAX >> 8);
        let (record, detail) = replay_memory(&workload, CACHING, &everything, None, self.stop)?;
        row.note(&record, &detail);
        Ok(Ok(()))
    }

    /// A server: the weights, the peak of a pass of the most tokens, and a pool with what is left of its share of the card
    /// (`determine_available_memory` of vLLM's `Worker`). Context and libraries count as part of the share.
    fn served(&self, row: FitRow) -> Result<FitRow, TrialError> {
        let [tokens, sequences] = server_defaults(row.card_bytes, &row.card);
        let recipe = |pages| self.model.serving(tokens, sequences, pages);
        let [mut profiled, mut with_pages] = [row.clone(), row.clone()];
        for (pages, measured) in [(0, &mut profiled), (PAGES_TO_MEASURE, &mut with_pages)] {
            if let Err(reason) = self.measure(recipe(pages).as_ref(), measured)? {
                return Ok(FitRow { reason, ..row });
            }
        }
        let page_bytes = (with_pages.cache_bytes / PAGES_TO_MEASURE).max(1);
        let overhead = row.card_bytes - row.available_bytes;
        let taken = overhead + profiled.peak_allocated_bytes.unwrap_or(0);
        let pages = ((row.card_bytes / 100 * SERVER_PERCENT).saturating_sub(taken) / page_bytes).min(MOST_PAGES);
        let page_tokens = recipe(pages).and_then(|recipe| recipe.count("page_tokens")).unwrap_or(1);
        // vLLM gives the first page to no sequence.
        let usable = pages.saturating_sub(1);
        let largest = usable / row.context.unwrap_or(1).div_ceil(page_tokens).max(1);
        let mut row = if largest == 0 { profiled } else { row };
        row.cache_tokens = Some(usable * page_tokens);
        row.largest_batch = Some(largest.min(sequences));
        if let Some(recipe) = recipe(pages).filter(|_| largest > 0) {
            if let Err(reason) = self.measure(Some(&recipe), &mut row)? {
                return Ok(FitRow { reason, ..row });
            }
            let workload = recipe.workload().map_err(Box::new)?;
            let (on_card, _) = replay_memory(&workload, CACHING, self.card, None, self.stop)?;
            if on_card.status != Status::Completed {
                row.largest_batch = Some(0);
            }
        }
        row.fits = row.largest_batch.zip(row.batch).map(|(largest, batch)| batch <= largest);
        Ok(row)
    }

    /// The largest batch on the card. The search begins where a line through the memory of this batch and of no batch
    /// meets the memory of the card.
    fn largest_batch(&self, recipe: &Recipe, row: &FitRow) -> Result<u64, TrialError> {
        let (allocated, batch) = (row.peak_allocated_bytes.unwrap_or(0), row.batch.unwrap_or(1).max(1));
        let constant = row.weights_bytes + row.gradients_bytes + row.optimizer_bytes + row.workspace_bytes;
        let per_sequence = (allocated.saturating_sub(constant) / batch).max(1);
        let guess = row.available_bytes.saturating_sub(constant) / per_sequence;
        let strategy = StrategySpec::from(CACHING);
        let question = LargestQuestion {
            repeat: 1,
            around: 0,
            guess: Some(guess.max(1)),
            stop: Some(self.stop),
            ..LargestQuestion::new(recipe, "batch", row.card_bytes, &strategy, self.card)
        };
        Ok(largest(&question)?.largest.unwrap_or(0))
    }
}

/// The most tokens of a pass and the most sequences of vLLM's API server on a card (`EngineArgs.get_batch_defaults`).
fn server_defaults(card_bytes: u64, card: &str) -> [u64; 2] {
    let is_large = card_bytes >= 70 * GIB && !card.to_lowercase().contains("a100");
    if is_large { [8192, 1024] } else { [2048, 256] }
}

impl FitRow {
    fn note(&mut self, record: &CaseRecord, detail: &CaseDetail) {
        (self.peak_allocated_bytes, self.peak_reserved_bytes) =
            (record.peak_allocated_bytes, record.peak_reserved_bytes);
        for part in &detail.at_peak {
            *match part.category {
                Category::Parameter => &mut self.weights_bytes,
                Category::Gradient => &mut self.gradients_bytes,
                Category::Optimizer => &mut self.optimizer_bytes,
                Category::Workspace => &mut self.workspace_bytes,
                Category::Temporary => &mut self.temporary_bytes,
                Category::Cache => &mut self.cache_bytes,
                Category::Logits => &mut self.logits_bytes,
                Category::Activation | Category::Input | Category::Unknown => &mut self.activations_bytes,
            } += part.bytes;
        }
    }
}

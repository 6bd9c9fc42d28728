//! A language model that answers requests.
//!
//! Requests arrive at random. A step admits those for which there is a place, runs their prompts one by one, and then
//! decodes one token for every running sequence. Keys and values are cached in one of three ways ([`CacheKind`]) and
//! freed when their sequence is complete. Derived from the usual code; no recording confirms it. Every cache is requested
//! from the allocator and returned to it. Servers that reserve all pages once and divide them themselves, such as vLLM,
//! make no such requests while they serve.

use std::sync::Arc;

use super::transformer::{MlpWeights, Transformer};
use crate::{
    Generator, GeneratorEntry, Parameter, SeededRandom,
    autograd::{
        graph::{SavingMode, Tensor, Variable},
        layers::{INDEX, KEYS_STEP},
        machine::TensorMachine,
        plan::{self, ModelShape, TrainingPlan},
        techniques::{NumberFormat, Precision, Techniques},
    },
};
use oomph_base::Work;
use oomph_trace::{Category, MarkKind, TraceBuilder};

const MOST_TOKENS: u32 = 1 << 18;

/// The registry entry of serving.
pub(crate) const SERVING: GeneratorEntry = GeneratorEntry {
    name: "serving",
    summary: "a language model that answers requests: prefill, decode, a growing cache of keys and values",
    seeded: true,
    parameters: &[
        Parameter::count("requests", 1..=100_000_000, "256", "requests"),
        Parameter::count("batch", 1..=1 << 12, "32", "sequences that run at the same time"),
        Parameter::number("arrivals", 0.001..=1.0, "0.5", "chance that a request arrives before a step"),
        Parameter::count("min_prompt", 1..=MOST_TOKENS, "16", "shortest prompt, in tokens"),
        Parameter::count("max_prompt", 1..=MOST_TOKENS, "1024", "longest prompt, in tokens"),
        Parameter::count("min_output", 1..=MOST_TOKENS, "8", "shortest answer, in tokens"),
        Parameter::count("max_output", 1..=MOST_TOKENS, "256", "longest answer, in tokens"),
        Parameter::choice(
            "cache",
            &["paged", "concatenated", "preallocated"],
            "paged",
            "pages for all layers; new tensors for every token; tensors of the full context",
        ),
        Parameter::count("page_tokens", 1..=1 << 12, "16", "tokens per page"),
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::VOCABULARY,
        Parameter::choice("precision", &["bf16", "fp32"], "bf16", "number format"),
    ],
    build: |parameters| {
        let prompts = parameters.count_range("min_prompt", "max_prompt")?;
        let outputs = parameters.count_range("min_output", "max_output")?;
        let context = prompts.1 + outputs.1;
        let shape = ModelShape::read_model(parameters, context, parameters.count("batch")?)?;
        let precision = match parameters.choice("precision")? {
            "fp32" => Precision::Single { tf32: false },
            _ => Precision::HalfModel { master_weights: false },
        };
        let cache = match parameters.choice("cache")? {
            "concatenated" => CacheKind::Concatenated,
            "preallocated" => CacheKind::Preallocated,
            _ => CacheKind::Paged { tokens: parameters.count("page_tokens")? },
        };
        let bytes_per_token = u64::from(shape.width) * precision.of_weights().bytes();
        let plan = TrainingPlan { shape, precision, techniques: Techniques::default() };
        let model = Arc::new(Transformer::new(&plan));
        let (requests, arrivals) = (parameters.count("requests")?, parameters.number("arrivals")?);
        Ok(Arc::new(move |random| {
            Box::new(Serving {
                random,
                machine: TensorMachine::new(plan.clone(), model.clone()),
                served: ServedModel { model: model.clone(), cache, bytes_per_token, context },
                requests,
                arrivals,
                prompts,
                outputs,
                waiting: 0,
                running: Vec::new(),
            })
        }))
    },
    count_weights: None,
};

/// How the cache of a sequence grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheKind {
    /// Two tensors per layer, allocated anew for every token (`torch.cat`).
    Concatenated,
    /// Two tensors per layer, of the context's length from the beginning.
    Preallocated,
    /// Pages of this many tokens, each with the keys and values of all layers, allocated one at a time.
    Paged { tokens: u32 },
}

/// A model with a cache of keys and values.
struct ServedModel {
    model: Arc<Transformer>,
    cache: CacheKind,
    /// Bytes of one token's keys, or values, in one layer.
    bytes_per_token: u64,
    context: u32,
}

/// A request that is being answered.
#[derive(Debug)]
struct ServedSequence {
    /// Tokens in its cache.
    length: u32,
    /// Tokens that are still to come.
    left: u32,
    /// Keys and values by layer, or pages.
    cache: Vec<Tensor>,
}

struct Serving {
    random: SeededRandom,
    machine: TensorMachine,
    served: ServedModel,
    /// Requests that have not arrived.
    requests: u32,
    arrivals: f64,
    prompts: (u32, u32),
    outputs: (u32, u32),
    /// Requests that have arrived and wait for a place.
    waiting: u32,
    running: Vec<ServedSequence>,
}

impl Serving {
    fn step(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Step, "step", step);
        // With nothing running, the next request arrives at once.
        if self.requests > 0 && (self.running.is_empty() || self.random.chance(self.arrivals)) {
            (self.requests, self.waiting) = (self.requests - 1, self.waiting + 1);
        }
        let most = self.machine.plan.shape.batch as usize;
        while self.waiting > 0 && self.running.len() < most {
            self.waiting -= 1;
            self.prefill(step);
        }
        self.machine.trace.mark(MarkKind::Phase, "decode", step);
        self.served.generate(&mut self.machine, &mut self.running, 1);
        for place in (0..self.running.len()).rev() {
            self.running[place].left -= 1;
            if self.running[place].left == 0 {
                let complete = self.running.swap_remove(place);
                complete.cache.into_iter().for_each(|tensor| self.machine.release(tensor));
            }
        }
    }

    /// Runs the prompt of a new sequence, which gives its first token. Decoding gives the others.
    fn prefill(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Phase, "prefill", step);
        let mut draw = |(least, most): (u32, u32)| self.random.between(least.into(), most.into()) as u32;
        let (prompt, output) = (draw(self.prompts), draw(self.outputs));
        let mut admitted = [ServedSequence { length: 0, left: output, cache: Vec::new() }];
        self.served.generate(&mut self.machine, &mut admitted, prompt);
        self.running.extend(admitted);
    }
}

impl Generator for Serving {
    /// How many steps the answers take is not known beforehand.
    fn parts_left(&self, _written: u32) -> u64 {
        u64::from(self.requests) + u64::from(self.waiting) + self.running.len() as u64
    }

    fn write_part(&mut self, step: u32, trace: &mut TraceBuilder) {
        std::mem::swap(&mut self.machine.trace, trace);
        if step == 0 {
            self.machine.saving = SavingMode::Off;
            self.machine.load();
        }
        self.step(step);
        std::mem::swap(&mut self.machine.trace, trace);
    }
}

/// Forward passes over new tokens of several sequences, whose earlier tokens are cached.
impl ServedModel {
    /// Runs `new_tokens` tokens of each sequence through the model and samples one more for each.
    fn generate(&self, machine: &mut TensorMachine, sequences: &mut [ServedSequence], new_tokens: u32) {
        (machine.graph.sequences, machine.graph.length) = (sequences.len() as u32, new_tokens);
        for sequence in sequences.iter_mut() {
            sequence.length += new_tokens;
            self.add_pages(machine, sequence);
        }
        let ids = machine.copy_in(INDEX * machine.tokens(), Category::Input);
        let tokens = machine.embedding(self.model.tokens, ids, machine.tokens());
        let places = machine.copy_in(INDEX * machine.tokens(), Category::Input);
        let positions = machine.embedding(self.model.positions, places, machine.tokens());
        machine.release_all([ids, places]);
        let mut x = machine.add(tokens, positions, Category::Activation);
        machine.release_all([tokens.tensor, positions.tensor]);
        for layer in 0..self.model.blocks.len() {
            machine.enter_layer(layer as u32);
            let output = self.block(machine, layer, x, sequences);
            machine.release(x.tensor);
            x = output;
        }
        machine.layer = None;
        self.sample(machine, x);
    }

    fn block(
        &self,
        machine: &mut TensorMachine,
        layer: usize,
        input: Variable,
        sequences: &mut [ServedSequence],
    ) -> Variable {
        let weights = &self.model.blocks[layer];
        let MlpWeights::Dense { up, down } = weights.mlp else { return input };
        let normed = machine.layer_norm(input, weights.norm_1);
        let query_key_value = machine.linear(normed, weights.query_key_value, Category::Temporary);
        machine.release(normed.tensor);
        for sequence in sequences.iter_mut() {
            self.append_to_cache(machine, sequence, layer);
        }
        let keys = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
        let attended = attend_to_cache(machine, query_key_value, keys);
        machine.release(query_key_value.tensor);
        let projected = machine.linear(attended, weights.projection, Category::Temporary);
        machine.release(attended.tensor);
        let middle = machine.add(input, projected, Category::Activation);
        machine.release(projected.tensor);
        let normed = machine.layer_norm(middle, weights.norm_2);
        let raised = machine.linear(normed, up, Category::Temporary);
        machine.release(normed.tensor);
        let hidden = machine.mlp_relu(raised);
        let lowered = machine.linear(hidden, down, Category::Temporary);
        machine.release(hidden.tensor);
        let output = machine.add(middle, lowered, Category::Activation);
        machine.release_all([lowered.tensor, middle.tensor]);
        output
    }

    /// Bytes of the keys, or values, of this many tokens in one layer.
    fn bytes_of(&self, tokens: u32) -> u64 {
        self.bytes_per_token * u64::from(tokens)
    }

    /// Called before a pass: allocates the pages for all tokens of the sequence.
    fn add_pages(&self, machine: &mut TensorMachine, sequence: &mut ServedSequence) {
        let CacheKind::Paged { tokens: per_page } = self.cache else { return };
        let layer = machine.layer.take();
        while (sequence.cache.len() as u32) < sequence.length.div_ceil(per_page) {
            let bytes = 2 * self.model.blocks.len() as u64 * self.bytes_of(per_page);
            sequence.cache.push(machine.alloc(bytes, Category::Cache));
        }
        machine.layer = layer;
    }

    /// Called within a layer: adds its new keys and values to the cache.
    fn append_to_cache(&self, machine: &mut TensorMachine, sequence: &mut ServedSequence, layer: usize) {
        let cache = &mut sequence.cache;
        for place in [2 * layer, 2 * layer + 1] {
            match self.cache {
                CacheKind::Concatenated => {
                    let bytes = self.bytes_of(sequence.length);
                    let longer = machine.alloc(bytes, Category::Cache);
                    match cache.get(place).copied() {
                        Some(before) => {
                            machine.elementwise(2 * bytes, [before, longer]);
                            machine.release(before);
                            cache[place] = longer;
                        }
                        None => cache.push(longer),
                    }
                }
                CacheKind::Preallocated if place == cache.len() => {
                    cache.push(machine.alloc(self.bytes_of(self.context), Category::Cache));
                }
                CacheKind::Preallocated | CacheKind::Paged { .. } => {}
            }
        }
    }

    /// The logits of every sequence's last token, their probabilities in single precision, and a token drawn from them.
    fn sample(&self, machine: &mut TensorMachine, x: Variable) {
        let Some((norm, head)) = self.model.head else { return };
        let normed = machine.layer_norm(x, norm);
        machine.release(x.tensor);
        let last = machine.alloc(machine.bytes(normed.tensor) / u64::from(machine.graph.length), Category::Activation);
        machine.elementwise(2 * machine.bytes(last), [normed.tensor, last]);
        machine.release(normed.tensor);
        let logits = machine.linear(Variable { tensor: last, ..normed }, head, Category::Logits);
        machine.release(last);
        let rows = u64::from(machine.graph.sequences);
        let of_logits = rows * u64::from(head.outputs) * NumberFormat::Single.bytes();
        let probabilities = machine.temporary(of_logits);
        machine.elementwise(2 * of_logits, [logits.tensor, probabilities]);
        machine.release(logits.tensor);
        let drawn = machine.temporary(rows * INDEX);
        machine.work(Work::Reduction { bytes: of_logits }, [probabilities, drawn]);
        machine.work(Work::CopyOut { bytes: rows * INDEX, pinned: false }, [drawn]);
        machine.release_all([probabilities, drawn]);
    }
}

fn attend_to_cache(machine: &mut TensorMachine, query_key_value: Variable, keys: u32) -> Variable {
    let number = query_key_value.number;
    let output = machine.alloc(machine.rows(machine.plan.shape.width, number), Category::Activation);
    let work = Work::Attention {
        batch: machine.graph.sequences,
        heads: machine.plan.shape.heads,
        queries: machine.graph.length,
        keys: keys.next_multiple_of(KEYS_STEP),
        head_width: machine.plan.shape.head_width(),
        dtype: machine.plan.precision.of_attention(number),
        backward: false,
        causal: machine.graph.length > 1,
    };
    machine.work(work, [query_key_value.tensor, output]);
    Variable::constant(output, number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Op, OpKind, Trace, TraceSummary, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let shape = [("layers", "3"), ("width", "64"), ("heads", "4"), ("vocab", "500"), ("requests", "40")];
        let lengths = [("min_prompt", "4"), ("max_prompt", "60"), ("min_output", "2"), ("max_output", "50")];
        let all = shape.iter().chain(&lengths).chain(settings);
        all.fold(Recipe::named("llm-serve").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> TraceSummary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    /// Blocks that stay: weights of embeddings, blocks and head, and the workspaces of products.
    const STAYS: u64 = 2 + 3 * 12 + 3 + 2;

    #[test]
    fn caches_differ_in_memory_and_requests() {
        let of = |cache| summary(&[("cache", cache)]);
        let (paged, concatenated, preallocated) = (of("paged"), of("concatenated"), of("preallocated"));
        assert!(paged.peak.bytes < preallocated.peak.bytes);
        // Every step makes keys and values of three layers anew, for one sequence at least.
        assert!(concatenated.count(OpKind::Alloc) > paged.count(OpKind::Alloc) + 3 * 2 * paged.steps);
        for summary in [paged, concatenated, preallocated] {
            assert_eq!(summary.live_blocks, STAYS);
        }
    }

    #[test]
    fn pages_hold_all_layers() {
        // One request at a time, of 60 + 20 tokens, in pages of 16.
        let exact = [("min_prompt", "60"), ("min_output", "20"), ("max_output", "20"), ("batch", "1")];
        let pages = |page_tokens| {
            let settings: Vec<_> = exact.iter().copied().chain([("page_tokens", page_tokens)]).collect();
            summary(&settings).count(OpKind::Alloc)
        };
        // The prompt takes 4 pages of 16 and the answer one more; or 10 and 4 of 6.
        assert_eq!(pages("6") - pages("16"), 40 * (14 - 5));
    }

    #[test]
    fn caches_have_their_category() {
        // One request of 60 + 20 tokens: 5 pages of 16, 2 tensors of 3 layers in each of 21 passes, or those 6 once.
        let exact = [("min_prompt", "60"), ("min_output", "20"), ("max_output", "20"), ("requests", "1")];
        for (cache, expected) in [("paged", 5), ("concatenated", 21 * 3 * 2), ("preallocated", 3 * 2)] {
            let settings: Vec<_> = exact.iter().copied().chain([("cache", cache)]).collect();
            let trace = Trace::read(&small(&settings).workload().unwrap()).unwrap();
            let is_cache = |op: &Op| matches!(op, Op::Alloc { tag, .. } if trace.tables.tags()[tag.index()].category == Category::Cache);
            assert_eq!(trace.events.iter().filter(|event| is_cache(&event.op)).count(), expected, "{cache}");
        }
    }

    #[test]
    fn contradicting_lengths_are_refused() {
        let error = small(&[("min_prompt", "61")]).workload().err().unwrap().to_string();
        assert_eq!(error, "workload 'llm-serve': min_prompt (61) must not exceed max_prompt (60)");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn only_the_model_stays(
            (cache, batch, page_tokens) in (
                prop::sample::select(vec!["paged", "concatenated", "preallocated"]), 1..9_u32, 1..40_u32,
            ),
            (arrivals, requests, seed) in (0.01..1.0_f64, 1..30_u32, any::<u64>()),
        ) {
            let settings = [
                ("cache", cache.to_owned()), ("batch", batch.to_string()), ("page_tokens", page_tokens.to_string()),
                ("arrivals", arrivals.to_string()), ("requests", requests.to_string()),
            ];
            let settings = settings.each_ref().map(|(key, value)| (*key, value.as_str()));
            let summary = check(&small(&settings).seed(seed).workload().unwrap()).unwrap();
            prop_assert_eq!(summary.live_blocks, STAYS);
            prop_assert!(summary.steps >= 2);
        }
    }
}

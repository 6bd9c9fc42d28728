//! A language model that answers requests.
//!
//! Requests arrive at random. Keys and values are cached in one of four ways. Three of them request memory while requests
//! are answered ([`CacheKind`]): a step admits requests for which there is a place, runs their prompts one by one, and then
//! decodes one token for every running sequence. Derived from the usual code; no recording confirms it.
//!
//! The fourth is a pool that is requested once, as vLLM (V1) does: [`PooledServing`]. It is compared with a plain PyTorch
//! program, request by request (`tests/integration/rehearse/server.py`).

use std::{collections::VecDeque, sync::Arc};

use super::transformer::{MlpWeights, Transformer};
use crate::{
    Generator, GeneratorEntry, GeneratorStart, Parameter, Parameters, SeededRandom, WorkloadError,
    autograd::{
        graph::{SavingMode, Tensor, Variable},
        layers::{INDEX, KEYS_STEP, linear::LinearWeights},
        machine::TensorMachine,
        plan::{self, ModelShape, TrainingPlan},
        techniques::{NumberFormat, Precision, Techniques},
    },
};
use oomph_base::{GIB, StreamId, Work};
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
            &["paged", "concatenated", "preallocated", "pool"],
            "paged",
            "pages for all layers; new tensors for every token; tensors of the full context; one pool of pages, as vLLM",
        ),
        Parameter::count("page_tokens", 1..=1 << 12, "16", "tokens per page"),
        Parameter::count("pages", 1..=1 << 24, "4096", "pages of a pool"),
        Parameter::size(
            "pool_memory",
            0..=1024 * GIB,
            "0B",
            "memory of a pool, for as many pages as fit; 0: see pages",
        ),
        Parameter::count("batched_tokens", 1..=MOST_TOKENS, "2048", "most tokens of one pass, with a pool"),
        Parameter::words(
            "graphs",
            "1,2,4,8",
            "",
            "with a pool: batch sizes for which decoding is captured as a CUDA graph; empty: none",
        ),
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::VOCABULARY,
        Parameter::choice("precision", &["bf16", "fp32"], "bf16", "number format"),
    ],
    build: |parameters| {
        let load = RequestLoad {
            requests: parameters.count("requests")?,
            arrivals: parameters.number("arrivals")?,
            prompts: parameters.count_range("min_prompt", "max_prompt")?,
            outputs: parameters.count_range("min_output", "max_output")?,
        };
        let shape = ModelShape::read_model(parameters, load.context(), parameters.count("batch")?)?;
        let precision = match parameters.choice("precision")? {
            "fp32" => Precision::Single { tf32: false },
            _ => Precision::HalfModel { master_weights: false },
        };
        let bytes_per_token = u64::from(shape.width) * precision.of_weights().bytes();
        let plan = TrainingPlan { shape, precision, techniques: Techniques::default() };
        let model = ServedModel { model: Arc::new(Transformer::new(&plan)), bytes_per_token };
        let cache = match parameters.choice("cache")? {
            "pool" => return start_pooled(parameters, plan, model, load),
            _ if !parameters.words("graphs")?.is_empty() => {
                return Err(parameters.refuse("graphs need cache=pool: other caches move while they grow"));
            }
            "concatenated" => CacheKind::Concatenated,
            "preallocated" => CacheKind::Preallocated,
            _ => CacheKind::Paged { tokens: parameters.count("page_tokens")? },
        };
        Ok(Arc::new(move |random| {
            Box::new(Serving {
                random,
                machine: TensorMachine::new(plan.clone(), model.model.clone()),
                served: model.clone(),
                cache,
                load,
                waiting: 0,
                running: Vec::new(),
            })
        }))
    },
    count_weights: None,
};

/// The requests of a run.
#[derive(Clone, Copy, Debug)]
struct RequestLoad {
    /// Requests that have not arrived.
    requests: u32,
    /// The chance that one arrives before a step.
    arrivals: f64,
    prompts: (u32, u32),
    outputs: (u32, u32),
}

impl RequestLoad {
    /// Tokens of the longest sequence.
    fn context(&self) -> u32 {
        self.prompts.1 + self.outputs.1
    }

    /// Whether a request arrives now. With nothing to do, the next one arrives at once.
    fn arrives(&mut self, random: &mut SeededRandom, is_idle: bool) -> bool {
        let arrives = self.requests > 0 && (is_idle || random.chance(self.arrivals));
        self.requests -= u32::from(arrives);
        arrives
    }

    /// The tokens of a prompt and of its answer.
    fn draw(&self, random: &mut SeededRandom) -> (u32, u32) {
        let mut draw = |(least, most): (u32, u32)| random.between(least.into(), most.into()) as u32;
        (draw(self.prompts), draw(self.outputs))
    }
}

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
#[derive(Clone)]
struct ServedModel {
    model: Arc<Transformer>,
    /// Bytes of one token's keys, or values, in one layer.
    bytes_per_token: u64,
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
    cache: CacheKind,
    load: RequestLoad,
    /// Requests that have arrived and wait for a place.
    waiting: u32,
    running: Vec<ServedSequence>,
}

impl Serving {
    fn step(&mut self, step: u32) {
        self.machine.trace.mark(MarkKind::Step, "step", step);
        self.waiting += u32::from(self.load.arrives(&mut self.random, self.running.is_empty()));
        let most = self.machine.plan.shape.batch as usize;
        while self.waiting > 0 && self.running.len() < most {
            self.waiting -= 1;
            self.prefill(step);
        }
        self.machine.trace.mark(MarkKind::Phase, "decode", step);
        self.served.generate(&mut self.machine, self.cache, &mut self.running, 1);
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
        let (prompt, output) = self.load.draw(&mut self.random);
        let mut admitted = [ServedSequence { length: 0, left: output, cache: Vec::new() }];
        self.served.generate(&mut self.machine, self.cache, &mut admitted, prompt);
        self.running.extend(admitted);
    }
}

impl Generator for Serving {
    /// How many steps the answers take is not known beforehand.
    fn parts_left(&self, _written: u32) -> u64 {
        u64::from(self.load.requests) + u64::from(self.waiting) + self.running.len() as u64
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
    fn generate(
        &self,
        machine: &mut TensorMachine,
        cache: CacheKind,
        sequences: &mut [ServedSequence],
        new_tokens: u32,
    ) {
        (machine.graph.sequences, machine.graph.length) = (sequences.len() as u32, new_tokens);
        for sequence in sequences.iter_mut() {
            sequence.length += new_tokens;
            self.add_pages(machine, cache, sequence);
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
            let output = self.block(machine, layer, x, |machine, query_key_value| {
                for sequence in sequences.iter_mut() {
                    self.append_to_cache(machine, cache, sequence, layer);
                }
                let keys = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
                let (batch, queries) = (machine.graph.sequences, machine.graph.length);
                attend_to_cache(machine, query_key_value, &[AttentionRows { batch, queries, keys }])
            });
            machine.release(x.tensor);
            x = output;
        }
        machine.layer = None;
        self.sample(machine, x);
    }

    /// A block; `attend` makes the attended rows of queries, keys and values.
    fn block(
        &self,
        machine: &mut TensorMachine,
        layer: usize,
        input: Variable,
        attend: impl FnOnce(&mut TensorMachine, Variable) -> Variable,
    ) -> Variable {
        let weights = &self.model.blocks[layer];
        let MlpWeights::Dense { up, down } = weights.mlp else { return input };
        let normed = machine.layer_norm(input, weights.norm_1);
        let query_key_value = machine.linear(normed, weights.query_key_value, Category::Temporary);
        machine.release(normed.tensor);
        let attended = attend(machine, query_key_value);
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
    fn add_pages(&self, machine: &mut TensorMachine, cache: CacheKind, sequence: &mut ServedSequence) {
        let CacheKind::Paged { tokens: per_page } = cache else { return };
        let layer = machine.layer.take();
        while (sequence.cache.len() as u32) < sequence.length.div_ceil(per_page) {
            let bytes = 2 * self.model.blocks.len() as u64 * self.bytes_of(per_page);
            sequence.cache.push(machine.alloc(bytes, Category::Cache));
        }
        machine.layer = layer;
    }

    /// Called within a layer: adds its new keys and values to the cache.
    fn append_to_cache(
        &self,
        machine: &mut TensorMachine,
        kind: CacheKind,
        sequence: &mut ServedSequence,
        layer: usize,
    ) {
        let cache = &mut sequence.cache;
        for place in [2 * layer, 2 * layer + 1] {
            match kind {
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
                    cache.push(machine.alloc(self.bytes_of(machine.plan.shape.context), Category::Cache));
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

/// Sequences that attend together: tokens of each that are new, and all of them.
#[derive(Clone, Copy, Debug)]
struct AttentionRows {
    batch: u32,
    queries: u32,
    keys: u32,
}

/// One new tensor: kernels that read a cache write it, and need no copy of keys and values.
fn attend_to_cache(machine: &mut TensorMachine, query_key_value: Variable, rows: &[AttentionRows]) -> Variable {
    let number = query_key_value.number;
    let output = machine.alloc(machine.rows(machine.plan.shape.width, number), Category::Activation);
    for &AttentionRows { batch, queries, keys } in rows {
        let work = Work::Attention {
            batch,
            heads: machine.plan.shape.heads,
            queries,
            keys: keys.next_multiple_of(KEYS_STEP),
            head_width: machine.plan.shape.head_width(),
            dtype: machine.plan.precision.of_attention(number),
            backward: false,
            causal: queries > 1,
        };
        machine.work(work, [query_key_value.tensor, output]);
    }
    Variable::constant(output, number)
}

/// What a server with a pool is set to.
#[derive(Clone, Debug)]
struct PoolSettings {
    /// Pages of a layer. The first one is not given to sequences.
    pages: u32,
    page_tokens: u32,
    /// Most tokens of one pass.
    batched_tokens: u32,
    /// Batch sizes whose decoding is captured, ascending.
    graphs: Vec<u32>,
}

impl PoolSettings {
    fn read(parameters: &Parameters<'_>, plan: &TrainingPlan, model: &ServedModel) -> Result<Self, WorkloadError> {
        let (page_tokens, batch) = (parameters.count("page_tokens")?, plan.shape.batch);
        let batched_tokens = parameters.count("batched_tokens")?;
        if batched_tokens < batch {
            let reason = format!("batched_tokens ({batched_tokens}) must not be less than the batch ({batch})");
            return Err(parameters.refuse(reason));
        }
        let per_page = 2 * u64::from(plan.shape.layers) * model.bytes_of(page_tokens);
        let pages = match parameters.size("pool_memory")? {
            0 => parameters.count("pages")?,
            memory => u32::try_from(memory / per_page).unwrap_or(u32::MAX),
        };
        let needed = plan.shape.context.div_ceil(page_tokens) + 1;
        if pages < needed {
            return Err(parameters.refuse(format!(
                "a pool of {pages} pages cannot hold the longest sequence: {} tokens need {needed} pages, the first \
                 page of the pool included",
                plan.shape.context
            )));
        }
        let size = |word: String| {
            word.parse().ok().filter(|size| (1..=batch).contains(size)).ok_or_else(|| {
                parameters.refuse(format!("'{word}' in graphs is not a whole number from 1 to the batch ({batch})"))
            })
        };
        let mut graphs = parameters.words("graphs")?.into_iter().map(size).collect::<Result<Vec<u32>, _>>()?;
        graphs.sort_unstable();
        graphs.dedup();
        Ok(PoolSettings { pages, page_tokens, batched_tokens, graphs })
    }
}

/// What a server with a pool keeps on the device for the inputs of every pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InputBuffers {
    pub(crate) ids: Tensor,
    places: Tensor,
    /// Where the keys and values of each token go.
    slots: Tensor,
    /// Where the tokens of each sequence begin.
    pub(crate) starts: Tensor,
    lengths: Tensor,
    /// The pages of each sequence.
    table: Tensor,
}

impl InputBuffers {
    /// For passes of this many tokens, and the batch and context of the plan.
    pub(crate) fn allocate(machine: &mut TensorMachine, tokens: u32, page_tokens: u32) -> InputBuffers {
        let shape = machine.plan.shape;
        let (tokens, sequences) = (u64::from(tokens), u64::from(shape.batch));
        let longest = u64::from(shape.context.div_ceil(page_tokens));
        let mut buffer = |bytes| machine.alloc(bytes, Category::Input);
        InputBuffers {
            ids: buffer(SHORT_INDEX * tokens),
            places: buffer(INDEX * tokens),
            slots: buffer(INDEX * tokens),
            starts: buffer(SHORT_INDEX * (sequences + 1)),
            lengths: buffer(SHORT_INDEX * sequences),
            table: buffer(SHORT_INDEX * sequences * longest),
        }
    }
}

/// A request in a server with a pool.
#[derive(Debug)]
struct PooledSequence {
    /// Tokens whose keys and values are in the pool.
    computed: u32,
    /// Tokens of the prompt and of the answer so far.
    known: u32,
    /// Tokens at the end.
    end: u32,
    pages: u32,
}

/// A server whose cache is one pool of pages, written after vLLM's `Worker`, `GPUModelRunner`, `Scheduler` and `Sampler`.
///
/// At start it allocates the buffers of its inputs and the weights, runs a pass of the most tokens, whose peak it would
/// measure, takes one tensor per layer for the pages, captures the decoding passes as CUDA graphs, the largest first, in
/// one pool of memory, and runs a pass of the largest batch. From then on a step is one pass over new tokens of all
/// scheduled sequences: prompts are cut where the pass is full. A sequence takes pages as it grows. Where there are none,
/// the newest one gives back all of its pages and is computed again later.
///
/// Attention is one tensor, the result: the scratch memory of vLLM's kernels is not modelled. Neither are pages that
/// sequences share.
struct PooledServing {
    random: SeededRandom,
    machine: TensorMachine,
    served: ServedModel,
    settings: PoolSettings,
    load: RequestLoad,
    buffers: Option<InputBuffers>,
    /// The work of each captured pass, in the order of the sizes.
    graphs: Vec<Vec<Work>>,
    free_pages: u32,
    waiting: VecDeque<PooledSequence>,
    running: Vec<PooledSequence>,
}

fn start_pooled(
    parameters: &Parameters<'_>,
    plan: TrainingPlan,
    served: ServedModel,
    load: RequestLoad,
) -> Result<GeneratorStart, WorkloadError> {
    let settings = PoolSettings::read(parameters, &plan, &served)?;
    Ok(Arc::new(move |random| {
        Box::new(PooledServing {
            random,
            machine: TensorMachine::new(plan.clone(), served.model.clone()),
            served: served.clone(),
            settings: settings.clone(),
            load,
            buffers: None,
            graphs: Vec::new(),
            free_pages: settings.pages - 1,
            waiting: VecDeque::new(),
            running: Vec::new(),
        })
    }))
}

impl Generator for PooledServing {
    fn parts_left(&self, _written: u32) -> u64 {
        u64::from(self.load.requests) + self.waiting.len() as u64 + self.running.len() as u64
    }

    fn write_part(&mut self, step: u32, trace: &mut TraceBuilder) {
        std::mem::swap(&mut self.machine.trace, trace);
        let buffers = self.buffers.unwrap_or_else(|| self.start());
        self.buffers = Some(buffers);
        self.step(step, &buffers);
        std::mem::swap(&mut self.machine.trace, trace);
    }
}

/// Bytes of numbers of vLLM's buffers that need no more than 32 bits.
const SHORT_INDEX: u64 = 4;
/// The private pool that all graphs are captured in.
const GRAPH_POOL: (u64, u64) = (0, 1);
const DEFAULT_POOL: (u64, u64) = (0, 0);

impl PooledServing {
    fn start(&mut self) -> InputBuffers {
        let (batch, context) = (self.machine.plan.shape.batch, self.machine.plan.shape.context);
        self.machine.saving = SavingMode::Off;
        self.machine.trace.mark(MarkKind::Phase, "buffers", 0);
        let (tokens, page_tokens) = (self.settings.batched_tokens, self.settings.page_tokens);
        let buffers = InputBuffers::allocate(&mut self.machine, tokens, page_tokens);
        self.machine.load();
        self.machine.trace.mark(MarkKind::Phase, "profile", 0);
        self.machine.trace.empty_cache();
        // Attention is skipped, because the cache does not exist yet.
        let hidden = self.served.pooled_pass(&mut self.machine, &buffers, tokens, &[]);
        self.served.draw_tokens(&mut self.machine, &buffers, Some(hidden), batch);
        self.machine.trace.device_sync();
        self.machine.trace.empty_cache();
        self.machine.trace.mark(MarkKind::Phase, "cache", 0);
        let per_layer = 2 * u64::from(self.settings.pages) * self.served.bytes_of(page_tokens);
        for layer in 0..self.served.model.blocks.len() {
            self.machine.layer = u16::try_from(layer).ok();
            let pages = self.machine.alloc(per_layer, Category::Cache);
            self.machine.elementwise(per_layer, [pages]);
        }
        self.machine.layer = None;
        self.capture(&buffers);
        self.machine.trace.mark(MarkKind::Phase, "warm-up", 0);
        let rows = [AttentionRows { batch, queries: 1, keys: context }];
        let hidden = self.served.pooled_pass(&mut self.machine, &buffers, batch, &rows);
        self.served.draw_tokens(&mut self.machine, &buffers, Some(hidden), batch);
        buffers
    }

    /// Captures the graphs on a stream of their own (`GPUModelRunner.capture_model`), each after the same pass without a
    /// graph. Entering a capture releases cached memory (`torch.cuda.graph.__enter__`).
    fn capture(&mut self, buffers: &InputBuffers) {
        if self.settings.graphs.is_empty() {
            return;
        }
        let machine = &mut self.machine;
        // The tables of a trace have room for a second stream.
        let Ok(stream) = machine.trace.new_stream() else { return };
        machine.trace.mark(MarkKind::Phase, "capture", 0);
        let event = machine.trace.new_event();
        machine.trace.event_record(event, StreamId::DEFAULT);
        machine.trace.event_wait(event, stream);
        machine.stream = stream;
        let keys = machine.plan.shape.context;
        for &size in self.settings.graphs.iter().rev() {
            let rows = [AttentionRows { batch: size, queries: 1, keys }];
            let hidden = self.served.pooled_pass(machine, buffers, size, &rows);
            machine.release(hidden.tensor);
            machine.trace.device_sync();
            machine.trace.empty_cache();
            if self.graphs.is_empty() {
                // Seed and offset of random numbers, for all graphs (`CUDAGeneratorState::register_graph`).
                for _ in ["seed", "offset"] {
                    machine.alloc(INDEX, Category::Workspace);
                }
            }
            machine.trace.use_pool(GRAPH_POOL);
            machine.captured_work = Some(Vec::new());
            let hidden = self.served.pooled_pass(machine, buffers, size, &rows);
            self.graphs.extend(machine.captured_work.take());
            machine.trace.use_pool(DEFAULT_POOL);
            // The server keeps the address of the result and does not hold it: graphs run one at a time.
            machine.release(hidden.tensor);
        }
        self.graphs.reverse();
        machine.stream = StreamId::DEFAULT;
        machine.trace.event_record(event, stream);
        machine.trace.event_wait(event, StreamId::DEFAULT);
    }

    fn step(&mut self, step: u32, buffers: &InputBuffers) {
        self.machine.trace.mark(MarkKind::Step, "step", step);
        let is_idle = self.running.is_empty() && self.waiting.is_empty();
        if self.load.arrives(&mut self.random, is_idle) {
            let (prompt, output) = self.load.draw(&mut self.random);
            self.waiting.push_back(PooledSequence { computed: 0, known: prompt, end: prompt + output, pages: 0 });
        }
        let new_tokens = self.schedule();
        let is_decoding = new_tokens.iter().all(|&new| new == 1);
        self.machine.trace.mark(MarkKind::Phase, if is_decoding { "decode" } else { "prefill" }, step);
        self.run(buffers, &new_tokens);
        for (sequence, new) in self.running.iter_mut().zip(&new_tokens) {
            sequence.computed += new;
            sequence.known += u32::from(sequence.computed == sequence.known);
        }
        let free_pages = &mut self.free_pages;
        self.running.retain(|sequence| {
            let is_complete = sequence.known == sequence.end;
            *free_pages += if is_complete { sequence.pages } else { 0 };
            !is_complete
        });
    }

    /// New tokens of the running sequences in the next pass, in their order; those that do not fit come later
    /// (`Scheduler.schedule`).
    fn schedule(&mut self) -> Vec<u32> {
        let (mut scheduled, mut budget, mut has_preempted) = (Vec::new(), self.settings.batched_tokens, false);
        while scheduled.len() < self.running.len() && budget > 0 {
            let place = scheduled.len();
            let new = (self.running[place].known - self.running[place].computed).min(budget);
            if self.take_pages(place, new) {
                scheduled.push(new);
                budget -= new;
            } else if let Some(mut newest) = self.running.pop() {
                self.free_pages += newest.pages;
                (newest.computed, newest.pages) = (0, 0);
                self.waiting.push_front(newest);
                has_preempted = true;
            }
        }
        let most = self.machine.plan.shape.batch as usize;
        while !has_preempted && budget > 0 && self.running.len() < most {
            let Some(sequence) = self.waiting.pop_front() else { break };
            let new = sequence.known.min(budget);
            self.running.push(sequence);
            if !self.take_pages(self.running.len() - 1, new) {
                self.waiting.extend(self.running.pop());
                self.waiting.rotate_right(1);
                break;
            }
            scheduled.push(new);
            budget -= new;
        }
        scheduled
    }

    /// Gives a running sequence the pages for `new` more tokens, if there are enough.
    fn take_pages(&mut self, place: usize, new: u32) -> bool {
        let sequence = &mut self.running[place];
        let wanted = (sequence.computed + new).div_ceil(self.settings.page_tokens).saturating_sub(sequence.pages);
        if wanted > self.free_pages {
            return false;
        }
        self.free_pages -= wanted;
        sequence.pages += wanted;
        true
    }

    /// A pass over the scheduled tokens: a graph where all sequences decode and one is large enough.
    fn run(&mut self, buffers: &InputBuffers, new_tokens: &[u32]) {
        let (tokens, sequences) = (new_tokens.iter().sum::<u32>(), new_tokens.len() as u32);
        let machine = &mut self.machine;
        let longest = machine.bytes(buffers.table) / u64::from(machine.plan.shape.batch);
        for (buffer, bytes) in [
            (buffers.ids, SHORT_INDEX * u64::from(tokens)),
            (buffers.places, INDEX * u64::from(tokens)),
            (buffers.slots, INDEX * u64::from(tokens)),
            (buffers.starts, SHORT_INDEX * u64::from(sequences + 1)),
            (buffers.lengths, SHORT_INDEX * u64::from(sequences)),
            (buffers.table, longest * u64::from(sequences)),
        ] {
            machine.work(Work::CopyIn { bytes, pinned: true }, [buffer]);
        }
        let rows = attention_rows(&self.running, new_tokens);
        let graph = self.settings.graphs.iter().position(|&size| size >= tokens);
        let hidden = match graph.filter(|_| tokens == sequences) {
            Some(graph) => {
                for &work in &self.graphs[graph] {
                    machine.work(with_keys(work, &rows), []);
                }
                None
            }
            None => Some(self.served.pooled_pass(machine, buffers, tokens, &rows)),
        };
        self.served.draw_tokens(machine, buffers, hidden, sequences);
    }
}

/// Sequences that decode, and those whose prompts run, as two calls of equal rows.
fn attention_rows(running: &[PooledSequence], new_tokens: &[u32]) -> Vec<AttentionRows> {
    let of = |decodes: bool| {
        let rows = running.iter().zip(new_tokens).filter(|(_, new)| (**new == 1) == decodes);
        let sum = |(batch, queries, keys), (sequence, new): (&PooledSequence, &u32)| {
            (batch + 1, queries + new, keys + sequence.computed + new)
        };
        let (batch, queries, keys) = rows.fold((0_u32, 0_u32, 0_u32), sum);
        (batch > 0).then(|| AttentionRows { batch, queries: queries.div_ceil(batch), keys: keys.div_ceil(batch) })
    };
    [true, false].into_iter().filter_map(of).collect()
}

/// Captured work with the cache as long as it is now.
fn with_keys(work: Work, rows: &[AttentionRows]) -> Work {
    match (work, rows) {
        (Work::Attention { batch, heads, queries, head_width, dtype, backward, causal, .. }, [rows]) => {
            let keys = rows.keys.next_multiple_of(KEYS_STEP);
            Work::Attention { batch, heads, queries, keys, head_width, dtype, backward, causal }
        }
        _ => work,
    }
}

/// Passes over tokens of any sequences, whose keys and values are in a pool.
impl ServedModel {
    /// The rows of all tokens, after the last norm.
    fn pooled_pass(
        &self,
        machine: &mut TensorMachine,
        buffers: &InputBuffers,
        tokens: u32,
        rows: &[AttentionRows],
    ) -> Variable {
        (machine.graph.sequences, machine.graph.length) = (1, tokens);
        let looked_up = machine.embedding(self.model.tokens, buffers.ids, tokens.into());
        let positions = machine.embedding(self.model.positions, buffers.places, tokens.into());
        let mut x = machine.add(looked_up, positions, Category::Activation);
        machine.release_all([looked_up.tensor, positions.tensor]);
        for layer in 0..self.model.blocks.len() {
            machine.enter_layer(layer as u32);
            let output = self
                .block(machine, layer, x, |machine, query_key_value| attend_to_cache(machine, query_key_value, rows));
            machine.release(x.tensor);
            x = output;
        }
        machine.layer = None;
        let Some((norm, _)) = self.model.head else { return x };
        let normed = machine.layer_norm(x, norm);
        machine.release(x.tensor);
        normed
    }

    /// Draws a token for every sequence from the rows of a pass; a graph's result has no block of its own.
    fn draw_tokens(
        &self,
        machine: &mut TensorMachine,
        buffers: &InputBuffers,
        hidden: Option<Variable>,
        sequences: u32,
    ) {
        let Some((_, head)) = self.model.head else { return };
        let number = machine.plan.precision.of_weights();
        let rows = hidden.unwrap_or(Variable::constant(buffers.starts, number));
        draw_tokens(machine, buffers.starts, head, rows, hidden.map(|hidden| hidden.tensor), sequences);
    }
}

/// Draws a token for the last row of every sequence, as vLLM's sampler does: the probabilities, divided by random numbers,
/// and the place of the largest. Releases the rows where the caller does not keep them.
pub(crate) fn draw_tokens(
    machine: &mut TensorMachine,
    starts: Tensor,
    head: LinearWeights,
    hidden: Variable,
    released: Option<Tensor>,
    sequences: u32,
) {
    let (rows, vocabulary) = (u64::from(sequences), u64::from(head.outputs));
    let ends = machine.temporary(SHORT_INDEX * rows);
    machine.elementwise(2 * SHORT_INDEX * rows, [starts, ends]);
    // Indexing takes places of 64 bits.
    let places = machine.temporary(INDEX * rows);
    let last = machine.alloc(rows * u64::from(head.inputs) * hidden.number.bytes(), Category::Activation);
    machine.elementwise(2 * machine.bytes(last), [hidden.tensor, places, last]);
    machine.release(places);
    let narrow = machine.linear(Variable { tensor: last, ..hidden }, head, Category::Logits);
    let logits = machine.in_format(narrow, NumberFormat::Single);
    machine.release(narrow.tensor);
    let wide = NumberFormat::Single.bytes() * rows * vocabulary;
    let probabilities = machine.temporary(wide);
    machine.elementwise(2 * wide, [logits.tensor, probabilities]);
    let noise = machine.temporary(wide);
    machine.elementwise(wide, [noise]);
    machine.elementwise(3 * wide, [noise, probabilities]);
    let drawn = machine.largest_of_rows(probabilities, rows, vocabulary);
    machine.work(Work::CopyOut { bytes: rows * INDEX, pinned: false }, [drawn]);
    machine.release(drawn);
    released.into_iter().for_each(|tensor| machine.release(tensor));
    machine.release_all([ends, last, logits.tensor, probabilities, noise]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_trace::{Category, Event, MarkKind, Op, OpKind, Trace, TraceSummary, check};

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

    const POOL: [(&str, &str); 4] = [("cache", "pool"), ("pages", "40"), ("batched_tokens", "64"), ("batch", "8")];

    fn pooled(settings: &[(&'static str, &'static str)]) -> Trace {
        let settings: Vec<_> = POOL.iter().chain(settings).copied().collect();
        Trace::read(&small(&settings).workload().unwrap()).unwrap()
    }

    /// Requests by category and pool of memory, from the first step on or before it.
    fn requests(trace: &Trace, while_serving: bool) -> Vec<(Category, (u64, u64), u64)> {
        let (mut pool, mut serves, mut found) = ((0, 0), false, Vec::new());
        for event in &trace.events {
            match event.op {
                Op::Mark { kind: MarkKind::Step, .. } => serves = true,
                Op::UsePool { pool: now } => pool = now,
                Op::Alloc { bytes, tag, .. } if serves == while_serving => {
                    found.push((trace.tables.tags()[tag.index()].category, pool, bytes));
                }
                _ => {}
            }
        }
        found
    }

    #[test]
    fn a_pool_is_requested_once() {
        let trace = pooled(&[]);
        let of_cache = |while_serving| {
            let requests = requests(&trace, while_serving);
            requests.into_iter().filter(|request| request.0 == Category::Cache).map(|request| request.2).collect()
        };
        // Keys and values of 40 pages of 16 tokens, 64 numbers of 2 bytes, in each of 3 layers.
        let (before, while_serving): (Vec<u64>, Vec<u64>) = (of_cache(false), of_cache(true));
        assert_eq!((before, while_serving), (vec![2 * 40 * 16 * 64 * 2; 3], Vec::new()));
        let summary = check(&trace).unwrap();
        // The model, its cache, six buffers, and no workspaces beyond those of one stream.
        assert_eq!(summary.live_blocks, STAYS + 3 + 6);
        // As many pages as fit into an amount of memory.
        let given = pooled(&[("pool_memory", "1000000B")]);
        let pages = 1_000_000 / (2 * 3 * 16 * 64 * 2);
        assert!(requests(&given, false).contains(&(Category::Cache, (0, 0), 2 * pages * 16 * 64 * 2)));
    }

    #[test]
    fn graphs_are_captured_in_one_pool_the_largest_first() {
        let trace = pooled(&[("graphs", "2,8,4,2")]);
        let hidden = 64 * 2;
        let first_of_each: Vec<u64> = trace
            .events
            .windows(2)
            .filter_map(|pair| match (pair[0].op, pair[1].op) {
                (Op::UsePool { pool: (0, 1) }, Op::Alloc { bytes, .. }) => Some(bytes),
                _ => None,
            })
            .collect();
        assert_eq!(first_of_each, [8 * hidden, 4 * hidden, 2 * hidden]);
        assert!(requests(&trace, true).iter().all(|request| request.1 == (0, 0)));
        // Workspaces of the capture's stream, and seed and offset of random numbers.
        assert_eq!(check(&trace).unwrap().live_blocks, STAYS + 3 + 6 + 2 + 2);
        // A decoding step makes the requests of sampling alone: nine, ten where weights are narrow.
        let steps = trace.events.split(|event| matches!(event.op, Op::Mark { kind: MarkKind::Step, .. })).skip(1);
        let decoded = |step: &[Event]| {
            step.iter().any(|event| match event.op {
                Op::Mark { kind: MarkKind::Phase, label, .. } => {
                    trace.tables.labels()[label as usize].raw() == "decode"
                }
                _ => false,
            })
        };
        let decoding: Vec<&[Event]> = steps.filter(|step| decoded(step)).collect();
        assert!(!decoding.is_empty());
        for step in decoding {
            let count = |kind| step.iter().filter(|event| event.op.kind() == kind).count();
            assert_eq!(count(OpKind::Alloc), 8);
            // Six buffers, the model, the sampler.
            assert!(count(OpKind::Work) > 6 + 3 * 10, "{}", count(OpKind::Work));
        }
    }

    #[test]
    fn sequences_without_pages_are_computed_again() {
        let exact = [("min_prompt", "60"), ("min_output", "50"), ("arrivals", "1.0")];
        let steps = |pages| {
            let settings: Vec<_> = exact.iter().copied().chain([("pages", pages)]).collect();
            check(&pooled(&settings)).unwrap().steps
        };
        // Eight sequences of 110 tokens take 56 pages; 15 are enough for two.
        assert!(steps("15") > 2 * steps("57"), "{} and {}", steps("15"), steps("57"));
        assert_eq!(steps("57"), steps("1000"));
    }

    #[test]
    fn impossible_pools_are_refused() {
        for (setting, reason) in [
            (
                ("pages", "7"),
                "a pool of 7 pages cannot hold the longest sequence: 110 tokens need 8 pages, the first page of the pool included",
            ),
            (("batched_tokens", "7"), "batched_tokens (7) must not be less than the batch (8)"),
            (("graphs", "1,9"), "'9' in graphs is not a whole number from 1 to the batch (8)"),
        ] {
            let settings: Vec<_> = POOL.iter().copied().chain([setting]).collect();
            let error = small(&settings).workload().err().unwrap().to_string();
            assert_eq!(error, format!("workload 'llm-serve': {reason}"));
        }
        let error = small(&[("graphs", "1")]).workload().err().unwrap().to_string();
        assert!(error.ends_with("graphs need cache=pool: other caches move while they grow"), "{error}");
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
                prop::sample::select(vec!["paged", "concatenated", "preallocated", "pool"]), 1..9_u32, 1..40_u32,
            ),
            (pages, batched_tokens) in (111..200_u32, 9..100_u32),
            (arrivals, requests, seed) in (0.01..1.0_f64, 1..30_u32, any::<u64>()),
        ) {
            let settings = [
                ("cache", cache.to_owned()), ("batch", batch.to_string()), ("page_tokens", page_tokens.to_string()),
                ("arrivals", arrivals.to_string()), ("requests", requests.to_string()),
                ("pages", pages.to_string()), ("batched_tokens", batched_tokens.to_string()),
            ];
            let settings = settings.each_ref().map(|(key, value)| (*key, value.as_str()));
            let summary = check(&small(&settings).seed(seed).workload().unwrap()).unwrap();
            // A pool of three layers, and six buffers.
            let of_pool = if cache == "pool" { 3 + 6 } else { 0 };
            prop_assert_eq!(summary.live_blocks, STAYS + of_pool);
            prop_assert!(summary.steps >= 2);
        }
    }
}

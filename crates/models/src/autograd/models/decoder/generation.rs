//! Answers to prompts: `generate` of transformers (5.22), greedy, with the cache that grows with every token
//! (`DynamicCache`), in 16 bits.
//!
//! Written after `generation/utils.py` and `cache_utils.py`. The prompt runs in one pass; then a pass per token. Only the
//! last token of a pass gets logits. Prompts have one length, so the mask of attention is all ones, and transformers drops
//! it. What it allocates for the tokens that end an answer is left out, except for what stays.
//!
//! With `served_tokens` the model starts as a server does that has a pool of pages (see [`serving`](super::super::serving)):
//! a pass of that many tokens, the pool, and the same pass again. The passes are those of transformers; keys and values
//! are not copied into the pool.

use std::sync::Arc;

use super::{
    super::serving::{InputBuffers, draw_tokens},
    CHOSEN_EXPERTS, Decoder, DecoderFamily, DecoderShape, EXPERTS, FAMILY, POSITIONS, ROTARY_WIDTH, WINDOW,
};
use crate::{
    GeneratorEntry, Parameter, Parameters, WorkloadError,
    autograd::{
        graph::{SavingMode, Tensor, Variable},
        layers::INDEX,
        machine::TensorMachine,
        plan::{self, ModelShape, TrainingPlan},
        techniques::{NumberFormat, Precision, Techniques},
        weights::parameter_count,
    },
    generator::in_parts,
};
use oomph_base::Work;
use oomph_trace::{Category, MarkKind, TraceBuilder};

const PROMPT: Parameter = Parameter::count("prompt", 1..=1 << 18, "1024", "tokens per prompt");
const ANSWER: Parameter = Parameter::count("answer", 1..=1 << 18, "64", "tokens per answer");
const SERVED_TOKENS: Parameter = Parameter::count(
    "served_tokens",
    0..=1 << 18,
    "0",
    "tokens of each of the two passes of a server that starts, instead of answers; 0: answers",
);
const PAGES: Parameter = Parameter::count("pages", 0..=1 << 24, "0", "pages of the pool of such a server");
const PAGE_TOKENS: Parameter = Parameter::count("page_tokens", 1..=1 << 12, "16", "tokens per page");

/// The registry entry of answers.
pub(crate) const GENERATION: GeneratorEntry = GeneratorEntry {
    name: "generation",
    summary: "a language model of Hugging Face's transformers that answers prompts, token by token",
    seeded: false,
    parameters: &[
        FAMILY,
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::KEY_VALUE_HEADS,
        plan::HEAD_WIDTH,
        plan::FFN,
        EXPERTS,
        CHOSEN_EXPERTS,
        ROTARY_WIDTH,
        POSITIONS,
        WINDOW,
        plan::DROPOUT,
        plan::TIED,
        plan::VOCABULARY,
        plan::BATCH,
        PROMPT,
        ANSWER,
        SERVED_TOKENS,
        PAGES,
        PAGE_TOKENS,
    ],
    build: |parameters| {
        let (plan, shape) = read(parameters)?;
        let model = Arc::new(Decoder::new(&plan, shape));
        let (prompt, answer) = (parameters.count(PROMPT.name)?, parameters.count(ANSWER.name)?);
        let start = ServerStart {
            tokens: parameters.count(SERVED_TOKENS.name)?,
            pages: parameters.count(PAGES.name)?,
            page_tokens: parameters.count(PAGE_TOKENS.name)?,
        };
        // The prompt's pass gives the first token of the answer.
        let parts = if start.tokens > 0 { 1 } else { answer };
        Ok(in_parts(parts.into(), move |_| {
            let mut program = AnsweringProgram {
                machine: TensorMachine::new(plan.clone(), model.clone()),
                model: model.clone(),
                prompt,
                answer,
                state: None,
            };
            move |step, trace: &mut TraceBuilder| {
                std::mem::swap(&mut program.machine.trace, trace);
                match start.tokens {
                    0 => program.step(step),
                    _ => program.start_server(start),
                }
                std::mem::swap(&mut program.machine.trace, trace);
            }
        }))
    },
    count_weights: Some(|parameters| {
        let (plan, shape) = read(parameters)?;
        Ok(parameter_count(&Decoder::new(&plan, shape).weights))
    }),
};

fn read(parameters: &Parameters<'_>) -> Result<(TrainingPlan, DecoderShape), WorkloadError> {
    let context = parameters.count(PROMPT.name)? + parameters.count(ANSWER.name)?;
    let shape = ModelShape::read_model(parameters, context, parameters.count(plan::BATCH.name)?)?;
    let precision = Precision::HalfModel { master_weights: false };
    let plan = TrainingPlan { shape, precision, techniques: Techniques::default() };
    let shape = DecoderShape::read(parameters, &plan)?;
    plan.refuse_padded_heads(shape.head_width).map_err(|reason| parameters.refuse(reason))?;
    shape.refuse_window(plan.shape.context).map_err(|reason| parameters.refuse(reason))?;
    if shape.family == DecoderFamily::Mixtral {
        return Err(parameters.refuse("answers of a mixture of experts are not modelled yet"));
    }
    Ok((plan, shape))
}

/// How a server starts.
#[derive(Clone, Copy, Debug)]
struct ServerStart {
    /// Tokens of a pass.
    tokens: u32,
    /// Pages of the pool.
    pages: u32,
    page_tokens: u32,
}

/// What stays between two tokens.
struct AnswerState {
    /// The prompts, and those with what was answered.
    ids: Tensor,
    /// Positions of the prompt, which the caller's arguments hold, and those of all tokens.
    positions: Tensor,
    longer_positions: Option<Tensor>,
    /// Which answers have not ended.
    unfinished: Tensor,
    logits: Option<Tensor>,
    next: Option<Tensor>,
    /// The newest tokens and positions, as the last pass got them.
    pass_inputs: Vec<Tensor>,
    /// The tokens that end an answer and fill up, and whether there are several.
    special: [Tensor; 3],
}

struct AnsweringProgram {
    machine: TensorMachine,
    model: Arc<Decoder>,
    prompt: u32,
    answer: u32,
    state: Option<AnswerState>,
}

impl AnsweringProgram {
    /// A token of every answer.
    fn step(&mut self, step: u32) {
        if step == 0 {
            self.machine.saving = SavingMode::Off;
            self.machine.load();
        }
        self.machine.trace.mark(MarkKind::Step, "step", step);
        self.machine.trace.mark(MarkKind::Phase, if step == 0 { "prefill" } else { "decode" }, step);
        let mut state = match self.state.take() {
            Some(state) => state,
            None => self.begin(),
        };
        self.prepare(&mut state, step);
        let logits = self.model.answer_pass(&mut self.machine, state.pass_inputs[0]);
        if step == 0 {
            state.pass_inputs.drain(..).for_each(|tensor| self.machine.release(tensor));
        }
        self.sample(&mut state, step, logits);
        match step + 1 == self.answer {
            true => self.end(state),
            false => self.state = Some(state),
        }
    }

    /// Weights, a pass whose peak a server measures, the pool with one tensor per layer, and a pass beside it. A token is
    /// drawn for every sequence of the batch.
    fn start_server(&mut self, start: ServerStart) {
        let machine = &mut self.machine;
        machine.saving = SavingMode::Off;
        let buffers = InputBuffers::allocate(machine, start.tokens, start.page_tokens);
        machine.load();
        let shape = self.model.shape;
        let of_token = u64::from(shape.key_value_heads) * u64::from(shape.head_width) * NumberFormat::Half.bytes();
        let of_layer = 2 * u64::from(start.pages) * u64::from(start.page_tokens) * of_token;
        for (step, phase) in (0..).zip(["profile", "serve"]) {
            machine.trace.mark(MarkKind::Step, "step", step);
            machine.trace.empty_cache();
            if step > 0 && of_layer > 0 {
                for layer in 0..machine.plan.shape.layers {
                    machine.layer = u16::try_from(layer).ok();
                    machine.alloc(of_layer, Category::Cache);
                }
                machine.layer = None;
            }
            machine.trace.mark(MarkKind::Phase, phase, step);
            (machine.graph.sequences, machine.graph.length) = (1, start.tokens);
            let hidden = self.model.rows_of_pass(machine, buffers.ids);
            let sequences = machine.plan.shape.batch;
            draw_tokens(machine, buffers.starts, self.model.head, hidden, Some(hidden.tensor), sequences);
        }
    }

    fn sequences(&self) -> u64 {
        self.machine.plan.shape.batch.into()
    }

    /// Prompts on the device, positions, and which answers are unfinished (`generate`, `_sample`).
    fn begin(&mut self) -> AnswerState {
        let (sequences, tokens) = (self.sequences(), self.sequences() * u64::from(self.prompt));
        let machine = &mut self.machine;
        let ids = machine.copy_in(INDEX * tokens, Category::Input);
        let special = [INDEX, INDEX, 1].map(|bytes| machine.alloc(bytes, Category::Input));
        let mask = machine.temporary(INDEX * tokens);
        let sums = machine.temporary(INDEX * tokens);
        let less_one = machine.temporary(INDEX * tokens);
        machine.elementwise(2 * INDEX * tokens, [sums, less_one]);
        machine.release(sums);
        let padded = machine.temporary(tokens);
        let positions = machine.alloc(INDEX * tokens, Category::Input);
        machine.elementwise(2 * INDEX * tokens, [less_one, positions]);
        machine.release_all([padded, less_one]);
        let is_one = machine.temporary(tokens);
        let all = machine.temporary(1);
        machine.elementwise(2 * tokens, [mask, is_one, all]);
        machine.release_all([is_one, all, mask]);
        let unfinished = machine.alloc(INDEX * sequences, Category::Input);
        AnswerState {
            ids,
            positions,
            longer_positions: None,
            unfinished,
            logits: None,
            next: None,
            pass_inputs: Vec::new(),
            special,
        }
    }

    /// The arguments of a pass: all tokens of the prompt, or the newest one (`prepare_inputs_for_generation`).
    fn prepare(&mut self, state: &mut AnswerState, step: u32) {
        let sequences = self.sequences();
        let machine = &mut self.machine;
        let length = if step == 0 { self.prompt } else { 1 };
        (machine.graph.sequences, machine.graph.length) = (machine.plan.shape.batch, length);
        let bytes = INDEX * sequences * u64::from(length);
        let mut inputs = vec![machine.alloc(bytes, Category::Input)];
        if step > 0 {
            inputs.push(machine.alloc(bytes, Category::Input));
        }
        for old in std::mem::replace(&mut state.pass_inputs, inputs) {
            machine.release(old);
        }
        machine.graph.cache.get_or_insert_default().tokens += length;
    }

    /// Positions for the next pass, the logits in single precision, the likeliest token, and whether all answers have ended.
    fn sample(&mut self, state: &mut AnswerState, step: u32, logits: Variable) {
        let (sequences, vocabulary) = (self.sequences(), u64::from(self.machine.plan.shape.vocabulary));
        let machine = &mut self.machine;
        let of_token = INDEX * sequences;
        let of_all = of_token * u64::from(self.prompt + step + 1);
        let range = machine.temporary(INDEX);
        let next_positions = machine.temporary(of_token);
        machine.release(range);
        let copied = machine.temporary(of_token);
        machine.elementwise(2 * of_token, [next_positions, copied]);
        machine.release(next_positions);
        let longer = machine.alloc(of_all, Category::Input);
        machine.elementwise(2 * of_all, [copied, longer]);
        machine.release(copied);
        replace(machine, &mut state.longer_positions, longer);
        let wide = NumberFormat::Single.bytes() * sequences * vocabulary;
        let single = machine.alloc(wide, Category::Activation);
        machine.elementwise(2 * wide, [logits.tensor, single]);
        replace(machine, &mut state.logits, single);
        let next = machine.largest_of_rows(single, sequences, vocabulary);
        // Answers that have ended go on with the token that fills up.
        let kept = machine.temporary(of_token);
        let filled = machine.temporary(of_token);
        let ended = machine.temporary(of_token);
        machine.release(filled);
        let chosen = machine.alloc(of_token, Category::Input);
        machine.elementwise(4 * of_token, [kept, ended, chosen]);
        machine.release_all([kept, ended, next]);
        replace(machine, &mut state.next, chosen);
        let ids = machine.alloc(of_all, Category::Input);
        machine.elementwise(2 * of_all, [state.ids, ids]);
        if step > 0 {
            // The caller holds the prompts.
            machine.release(state.ids);
        }
        state.ids = ids;
        let flags = [(); 3].map(|()| machine.temporary(sequences));
        machine.elementwise(3 * sequences, flags);
        machine.release_all(flags);
        let unfinished = machine.alloc(of_token, Category::Input);
        machine.release(std::mem::replace(&mut state.unfinished, unfinished));
        let most = machine.temporary(INDEX);
        machine.work(Work::CopyOut { bytes: INDEX, pinned: false }, [most]);
        machine.release_all([most, logits.tensor]);
    }

    /// The caller keeps the answers; everything else is freed.
    fn end(&mut self, state: AnswerState) {
        let machine = &mut self.machine;
        let kept = [state.longer_positions, state.logits, state.next].into_iter().flatten();
        let others = [state.unfinished, state.positions].into_iter().chain(state.special).chain(state.pass_inputs);
        kept.chain(others).for_each(|tensor| machine.release(tensor));
        if let Some(cache) = machine.graph.cache.take() {
            cache.layers.into_iter().flatten().for_each(|tensor| machine.release(tensor));
        }
    }
}

/// Releases what a variable held before it gets a new value.
fn replace(machine: &mut TensorMachine, variable: &mut Option<Tensor>, value: Tensor) {
    if let Some(old) = variable.replace(value) {
        machine.release(old);
    }
}

impl Decoder {
    /// Adds keys and values to the cache, where there is one, and returns those of all tokens (`DynamicLayer.update`).
    pub(super) fn cached(&self, machine: &mut TensorMachine, new: [Variable; 2]) -> [Variable; 2] {
        let Some(mut cache) = machine.graph.cache.take() else { return new };
        let layer = usize::from(machine.layer.unwrap_or_default());
        let mut all = new;
        for (place, part) in new.into_iter().enumerate() {
            let bytes = machine.size(part) / u64::from(machine.graph.length) * u64::from(cache.tokens);
            let longer = machine.alloc(bytes, Category::Cache);
            machine.elementwise(2 * bytes, [part.tensor, longer]);
            if let Some(known) = cache.layers.get(layer) {
                machine.release(known[place]);
            }
            all[place] = Variable::constant(longer, part.number);
        }
        let tensors = all.map(|variable| variable.tensor);
        match cache.layers.get_mut(layer) {
            Some(known) => *known = tensors,
            None => cache.layers.push(tensors),
        }
        for (part, tensor) in new.into_iter().zip(tensors) {
            machine.release(part.tensor);
            // The attention releases what it gets, and the cache keeps it.
            machine.retain(tensor);
        }
        machine.graph.cache = Some(cache);
        all
    }

    /// Attention of queries to the cache, after queries, keys and values were made by one product.
    pub(super) fn attend_to_cache(&self, machine: &mut TensorMachine, joined: Variable) -> Variable {
        let [query, key, value] = machine.split_in_three(joined);
        for part in [key, value] {
            machine.retain(part.tensor);
        }
        let [key, value] = self.cached(machine, [key, value]);
        let attended = self.attend(machine, [query, key, value]);
        machine.release_all([key.tensor, value.tensor]);
        attended
    }

    /// The logits of the last token of every sequence.
    fn answer_pass(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        let normed = self.rows_of_pass(machine, ids);
        let last = machine.part(normed, machine.size(normed) / u64::from(machine.graph.length));
        let logits = machine.linear(last, self.head, Category::Logits);
        machine.release(normed.tensor);
        logits
    }

    /// The rows of all tokens, after the last norm.
    fn rows_of_pass(&self, machine: &mut TensorMachine, ids: Tensor) -> Variable {
        let tokens = self.token_rows(machine, ids);
        // Variables of the model's forward, which live until it ends.
        let mut variables = vec![tokens.tensor];
        let mut hidden = match self.positions {
            Some(table) => {
                let positions = machine.embedding(table, ids, machine.tokens());
                variables.push(positions.tensor);
                machine.add(tokens, positions, Category::Activation)
            }
            None => Variable { tensor: machine.retain(tokens.tensor), ..tokens },
        };
        if self.shape.has_rotation() {
            machine.graph.arguments = self.rotation(machine, machine.tokens(), tokens.number).to_vec();
            variables.extend(machine.graph.arguments.iter().map(|table| table.tensor));
        }
        for layer in 0..self.blocks.len() as u32 {
            machine.enter_layer(layer);
            let output = self.block(machine, layer, hidden);
            machine.release(hidden.tensor);
            hidden = output;
        }
        machine.layer = None;
        let normed = self.normed(machine, hidden, self.norm);
        machine.release(hidden.tensor);
        variables.into_iter().for_each(|tensor| machine.release(tensor));
        normed
    }
}

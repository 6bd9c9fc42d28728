//! A model in training, one call for each thing a training program does.
//!
//! The plain loop is [`Trainer::step`]; programs with faults call the parts by themselves and keep what they should
//! have let go of.

use std::collections::VecDeque;

use super::{
    backward::Retain,
    embedding::INDEX,
    graph::{Graph, Value},
    machine::{Machine, Tensor},
    model::Ending,
    plan::Plan,
    precision::Number,
    saving::Saving,
    technique::EmptyCache,
};
use crate::SeededRandom;
use oomph_trace::{Category, MarkKind, TraceBuilder};

/// Whether a forward pass records what backward needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recording {
    /// As in training.
    On,
    /// As under `no_grad`.
    Off,
}

/// What a forward pass gave, with its graph. Give it to [`Trainer::backward`], [`Trainer::drop_output`], or keep it.
#[must_use = "an output that is neither run backward nor dropped lives for ever"]
pub(super) struct Output {
    pub(super) value: Value,
    pub(super) graph: Graph,
}

/// See the [module](self).
pub(super) struct Trainer {
    pub(super) machine: Machine,
    /// The batch that the program's variable holds: the old one goes when the new one is there.
    batch: Option<Tensor>,
    /// The loss that the program's variable holds.
    loss: Option<Tensor>,
    /// The loss scale and how long it has been good, in single precision.
    loss_scale: Option<[Tensor; 2]>,
}

impl Trainer {
    /// A program that has done nothing yet.
    pub(super) fn new(plan: Plan) -> Trainer {
        Trainer { machine: Machine::new(plan), batch: None, loss: None, loss_scale: None }
    }

    /// Lets what in a pass is chance be decided by these random.
    pub(super) fn with_random(mut self, random: SeededRandom) -> Trainer {
        self.machine.random = random;
        self
    }

    /// Writes what `part` does into `trace`.
    pub(super) fn write<T>(&mut self, trace: &mut TraceBuilder, part: impl FnOnce(&mut Trainer) -> T) -> T {
        std::mem::swap(&mut self.machine.trace, trace);
        let result = part(self);
        std::mem::swap(&mut self.machine.trace, trace);
        result
    }

    /// What is trained, how.
    pub(super) fn plan(&self) -> &Plan {
        &self.machine.plan
    }

    /// Brings the model to the device.
    pub(super) fn load(&mut self) {
        self.machine.load();
    }

    /// One whole training step over sequences of this length.
    pub(super) fn step(&mut self, step: u32, length: u32) {
        self.mark(MarkKind::Step, "step", step);
        let micro_batches = self.plan().techniques.micro_batches;
        let in_flight = self.plan().techniques.pipeline_stages.min(micro_batches);
        let mut waiting = VecDeque::new();
        for micro_batch in 0..micro_batches {
            if micro_batches > 1 {
                self.mark(MarkKind::MicroBatch, "micro-batch", micro_batch);
            }
            let (_, loss) = self.run_forward(step, length);
            waiting.push_back(loss);
            // A stage of a pipeline runs ahead by as many micro-batches as there are stages behind it.
            let is_last = micro_batch + 1 == micro_batches;
            while waiting.len() >= in_flight as usize || (is_last && !waiting.is_empty()) {
                let Some(output) = waiting.pop_front() else { break };
                self.machine.is_last_micro_batch = is_last && waiting.is_empty();
                self.run_backward(step, output, Retain::Nothing);
            }
        }
        self.update(step);
        self.zero_grad();
        self.end_step(step);
    }

    /// The forward phase: fetches a batch, binds the program's `loss`, and gives both.
    pub(super) fn run_forward(&mut self, step: u32, length: u32) -> (Tensor, Output) {
        self.mark(MarkKind::Phase, "forward", step);
        let batch = self.fetch_batch(length);
        let output = self.forward(batch, Recording::On, Ending::Loss);
        let loss = self.bind_loss(output);
        if self.empties_cache_after(EmptyCache::AfterForward) {
            self.empty_cache();
        }
        (batch, loss)
    }

    /// The backward phase. Where the graph is retained, the loss comes back.
    pub(super) fn run_backward(&mut self, step: u32, loss: Output, retain: Retain) -> Option<Output> {
        self.mark(MarkKind::Phase, "backward", step);
        let retained = self.backward(loss, retain);
        if self.empties_cache_after(EmptyCache::AfterBackward) {
            self.empty_cache();
        }
        retained
    }

    /// The optimizer's phase.
    pub(super) fn update(&mut self, step: u32) {
        self.mark(MarkKind::Phase, "optimizer", step);
        self.optimizer_step();
    }

    /// A pass over another batch that records nothing and leaves nothing.
    pub(super) fn validate(&mut self, pass: u32, length: u32) {
        self.mark(MarkKind::Phase, "validate", pass);
        let batch = self.new_batch(length);
        let output = self.forward(batch, Recording::Off, Ending::Loss);
        self.machine.forget_casts();
        self.drop_output(output);
        self.release(batch);
    }

    /// Brings a batch of token numbers to the device and binds the program's variable to it; the one before goes.
    pub(super) fn fetch_batch(&mut self, length: u32) -> Tensor {
        let batch = self.new_batch(length);
        if let Some(before) = self.batch.replace(batch) {
            self.machine.release(before);
        }
        batch
    }

    /// Brings a batch of token numbers to the device, for the caller to release.
    pub(super) fn new_batch(&mut self, length: u32) -> Tensor {
        let sequences = self.plan().micro_batch();
        (self.machine.graph.sequences, self.machine.graph.length) = (sequences, length);
        let bytes = INDEX * self.machine.tokens();
        self.machine.copy_in(bytes, Category::Input)
    }

    /// A forward pass over the latest batch.
    pub(super) fn forward(&mut self, batch: Tensor, recording: Recording, ending: Ending) -> Output {
        let machine = &mut self.machine;
        machine.saving = match recording {
            Recording::Off => Saving::Nothing,
            Recording::On if machine.plan.techniques.offload_activations => Saving::ToHost,
            Recording::On => Saving::Keep,
        };
        machine.enter_pass();
        let value = machine.forward(batch, ending);
        let (sequences, length) = (machine.graph.sequences, machine.graph.length);
        let next = machine.fresh_graph(sequences, length);
        let graph = std::mem::replace(&mut machine.graph, next);
        Output { value, graph }
    }

    /// Binds the program's `loss` to an output: the old one goes, then autocast ends.
    pub(super) fn bind_loss(&mut self, mut output: Output) -> Output {
        if self.plan().precision.scales_loss() {
            output = self.scale_loss(output);
        }
        // What a stage of a pipeline hands on is no loss, and nobody's variable.
        if self.plan().has_ending() {
            let held = self.machine.retain(output.value.tensor);
            if let Some(before) = self.loss.replace(held) {
                self.machine.release(before);
            }
        }
        self.machine.forget_casts();
        output
    }

    /// A backward pass. Where the graph is retained, the output comes back.
    pub(super) fn backward(&mut self, output: Output, retain: Retain) -> Option<Output> {
        let Output { value, graph } = output;
        let graph = self.machine.backward(value, graph, retain);
        match graph {
            Some(graph) => Some(Output { value, graph }),
            None => {
                self.machine.release(value.tensor);
                None
            }
        }
    }

    /// Lets a tensor go that the caller held.
    pub(super) fn release(&mut self, tensor: Tensor) {
        self.machine.release(tensor);
    }

    /// Lets an output and its graph go.
    pub(super) fn drop_output(&mut self, output: Output) {
        self.machine.drop_graph(output.graph);
        self.machine.release(output.value.tensor);
    }

    /// Updates the weights.
    pub(super) fn optimizer_step(&mut self) {
        if self.plan().precision.scales_loss() {
            self.unscale_gradients();
        }
        self.machine.optimizer_step();
        if self.empties_cache_after(EmptyCache::AfterPhases) {
            self.empty_cache();
        }
    }

    /// Forgets the gradients, or fills them with zeros.
    pub(super) fn zero_grad(&mut self) {
        self.machine.zero_gradients();
    }

    /// Gives cached memory back.
    pub(super) fn empty_cache(&mut self) {
        self.machine.trace.empty_cache();
    }

    /// What comes after a step: cleaning up.
    pub(super) fn end_step(&mut self, step: u32) {
        let techniques = &self.plan().techniques;
        let (empty_cache, garbage) = (techniques.empty_cache, techniques.collect_garbage_every);
        if garbage.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            self.collect_garbage(step);
        }
        if matches!(empty_cache, EmptyCache::AfterSteps(every) if (step + 1).is_multiple_of(every)) {
            self.empty_cache();
        }
    }

    /// Frees what only circular references hold: in a plain loop, nothing.
    pub(super) fn collect_garbage(&mut self, step: u32) {
        self.mark(MarkKind::Phase, "gc", step);
        self.machine.collect_garbage();
    }

    /// Marks a place in the trace.
    pub(super) fn mark(&mut self, kind: MarkKind, label: &str, index: u32) {
        self.machine.trace.mark(kind, label, index);
    }

    fn empties_cache_after(&self, phase: EmptyCache) -> bool {
        let chosen = self.plan().techniques.empty_cache;
        chosen == phase || chosen == EmptyCache::AfterPhases
    }

    /// fp16 has little range: the loss is scaled up, the gradients down again.
    fn scale_loss(&mut self, output: Output) -> Output {
        if self.loss_scale.is_none() {
            let scalar = |machine: &mut Machine| machine.alloc(Number::Single.bytes(), Category::Optimizer);
            self.loss_scale = Some([(); 2].map(|()| scalar(&mut self.machine)));
        }
        let Output { value, graph } = output;
        let next = std::mem::replace(&mut self.machine.graph, graph);
        let scaled = self.machine.scale(value);
        self.machine.release(value.tensor);
        Output { value: scaled, graph: std::mem::replace(&mut self.machine.graph, next) }
    }

    fn unscale_gradients(&mut self) {
        let bytes = Number::Single.bytes();
        let [is_infinite, inverse] = [(); 2].map(|()| self.machine.temporary(bytes));
        for id in 0..self.machine.weights.len() {
            if let Some(gradient) = self.machine.weights[id].resident_gradient() {
                let traffic = 2 * self.machine.bytes(gradient);
                self.machine.elementwise(traffic, [inverse, is_infinite, gradient]);
            }
        }
        self.machine.release_all([inverse, is_infinite]);
    }
}

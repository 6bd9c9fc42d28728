//! A model in training: one call for each thing that a training program does, and the generator of plain training.
//!
//! [`Trainer::step`] is the plain loop. Programs with faults call the parts and keep what they should have released.

use std::{collections::VecDeque, sync::Arc};

use super::{
    backward::RetainGraph,
    graph::{Graph, SavingMode, Tensor, Variable},
    layers::convolution_kernels::KernelSearch,
    machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
    plan::{SequenceLengths, TrainingPlan},
    techniques::{EmptyCache, NumberFormat, UpdateLoop},
};
use crate::{GeneratorStart, SeededRandom, generator::in_parts};
use oomph_trace::{Category, MarkKind, TraceBuilder};

/// Whether a forward pass records what backward needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientMode {
    /// As in training.
    Enabled,
    /// As under `no_grad`.
    Disabled,
}

/// The result of a forward pass, with its graph. Pass it to [`Trainer::run_backward`] or [`Trainer::drop_output`].
#[must_use = "an output that is neither run backward nor dropped is never freed"]
pub(crate) struct ForwardOutput {
    pub(crate) value: Variable,
    pub(crate) graph: Graph,
}

/// See the [module](self).
pub(crate) struct Trainer {
    pub(crate) machine: TensorMachine,
    /// The batch that the program's variable holds: it is released when the next batch is there.
    batch: Option<TrainingBatch>,
    /// The loss that the program's variable holds.
    loss: Option<Tensor>,
    /// The loss scale and its growth counter, in single precision.
    loss_scale: Option<[Tensor; 2]>,
}

impl Trainer {
    /// A program that has not begun.
    pub(crate) fn new(plan: TrainingPlan, model: Arc<dyn ModelArchitecture>, random: SeededRandom) -> Trainer {
        let mut machine = TensorMachine::new(plan, model);
        machine.random = random;
        Trainer { machine, batch: None, loss: None, loss_scale: None }
    }

    /// Runs a part of the program and writes its events into `trace`.
    pub(crate) fn write<T>(&mut self, trace: &mut TraceBuilder, part: impl FnOnce(&mut Trainer) -> T) -> T {
        std::mem::swap(&mut self.machine.trace, trace);
        let result = part(self);
        std::mem::swap(&mut self.machine.trace, trace);
        result
    }

    /// One training step over sequences of this length.
    pub(crate) fn step(&mut self, step: u32, length: u32) {
        self.mark(MarkKind::Step, "step", step);
        let micro_batches = self.machine.plan.techniques.micro_batches;
        let in_flight = self.machine.plan.techniques.pipeline_stages.min(micro_batches);
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
                self.run_backward(step, output, RetainGraph::No);
            }
        }
        self.update(step);
        self.machine.zero_gradients();
        self.end_step(step);
    }

    /// The forward phase: fetches a batch and binds the program's `loss`. Returns both.
    pub(crate) fn run_forward(&mut self, step: u32, length: u32) -> (TrainingBatch, ForwardOutput) {
        self.mark(MarkKind::Phase, "forward", step);
        let batch = self.fetch_batch(length);
        let output = self.forward(batch, GradientMode::Enabled, ForwardResult::Loss);
        let loss = self.bind_loss(output);
        if self.empties_cache_after(EmptyCache::AfterForward) {
            self.machine.trace.empty_cache();
        }
        (batch, loss)
    }

    /// The backward phase. Returns the loss where the graph is retained.
    pub(crate) fn run_backward(
        &mut self,
        step: u32,
        loss: ForwardOutput,
        retain: RetainGraph,
    ) -> Option<ForwardOutput> {
        self.mark(MarkKind::Phase, "backward", step);
        let ForwardOutput { value, graph } = loss;
        let retained = self.machine.backward(value, graph, retain);
        if retained.is_none() {
            self.machine.release(value.tensor);
        }
        if self.empties_cache_after(EmptyCache::AfterBackward) {
            self.machine.trace.empty_cache();
        }
        retained.map(|graph| ForwardOutput { value, graph })
    }

    /// The optimizer's phase.
    pub(crate) fn update(&mut self, step: u32) {
        self.mark(MarkKind::Phase, "optimizer", step);
        let held = if self.machine.plan.precision.scales_loss() { self.unscale_gradients() } else { Vec::new() };
        self.machine.optimizer_step();
        held.into_iter().for_each(|tensor| self.machine.release(tensor));
        if self.empties_cache_after(EmptyCache::AfterPhases) {
            self.machine.trace.empty_cache();
        }
    }

    /// A forward pass over another batch, without a graph.
    pub(crate) fn validate(&mut self, pass: u32, length: u32) {
        self.mark(MarkKind::Phase, "validate", pass);
        let batch = self.new_batch(length);
        let output = self.forward(batch, GradientMode::Disabled, ForwardResult::Loss);
        self.machine.end_autocast();
        self.drop_output(output);
        self.release_batch(batch);
    }

    /// Copies a batch to the device and binds the program's variable to it. The batch before is released.
    pub(crate) fn fetch_batch(&mut self, length: u32) -> TrainingBatch {
        let before = self.batch.take();
        let batch = self.replace_batch(length, before);
        self.batch = Some(batch);
        batch
    }

    /// Copies a batch to the device, for the caller to release.
    pub(crate) fn new_batch(&mut self, length: u32) -> TrainingBatch {
        self.replace_batch(length, None)
    }

    /// Releases a batch that the caller held.
    pub(crate) fn release_batch(&mut self, batch: TrainingBatch) {
        for tensor in [Some(batch.input), batch.targets].into_iter().flatten() {
            self.machine.release(tensor);
        }
    }

    /// Each tensor of the old batch is released when its successor is there.
    fn replace_batch(&mut self, length: u32, before: Option<TrainingBatch>) -> TrainingBatch {
        (self.machine.graph.sequences, self.machine.graph.length) = (self.machine.plan.micro_batch(), length);
        let (of_input, of_targets) = self.machine.model.batch_bytes(&self.machine);
        if self.machine.model.has_whole_batches() {
            let input = self.machine.copy_in(of_input, Category::Input);
            let targets = of_targets.map(|bytes| self.machine.copy_in(bytes, Category::Input));
            if let Some(before) = before {
                self.release_batch(before);
            }
            return TrainingBatch { input, targets };
        }
        let mut replace = |bytes, before: Option<Tensor>| {
            let tensor = self.machine.copy_in(bytes, Category::Input);
            if let Some(before) = before {
                self.machine.release(before);
            }
            tensor
        };
        TrainingBatch {
            input: replace(of_input, before.map(|batch| batch.input)),
            targets: of_targets.map(|bytes| replace(bytes, before.and_then(|batch| batch.targets))),
        }
    }

    /// A forward pass over the latest batch.
    pub(crate) fn forward(&mut self, batch: TrainingBatch, mode: GradientMode, result: ForwardResult) -> ForwardOutput {
        let machine = &mut self.machine;
        machine.saving = match mode {
            GradientMode::Disabled => SavingMode::Off,
            GradientMode::Enabled if machine.plan.techniques.offload_activations => SavingMode::ToHost,
            GradientMode::Enabled => SavingMode::Keep,
        };
        machine.enter_pass();
        let model = machine.model.clone();
        let value = model.forward(machine, batch, result);
        machine.leave_forward();
        let (sequences, length) = (machine.graph.sequences, machine.graph.length);
        let graph = std::mem::replace(&mut machine.graph, Graph { sequences, length, ..Graph::default() });
        ForwardOutput { value, graph }
    }

    /// Binds the program's `loss` to an output: the old loss is released, then autocast ends. The result is what backward
    /// begins with.
    pub(crate) fn bind_loss(&mut self, output: ForwardOutput) -> ForwardOutput {
        // The output of a stage of a pipeline is not a loss, and no variable holds it.
        if self.machine.plan.has_head() {
            let held = self.machine.retain(output.value.tensor);
            if let Some(before) = self.loss.replace(held) {
                // The old loss holds its graph.
                for leaf in std::mem::take(&mut self.machine.leaves).into_iter().rev() {
                    self.machine.release(leaf);
                }
                self.machine.release(before);
            }
        }
        self.machine.end_autocast();
        if self.machine.plan.precision.scales_loss() { self.scale_loss(output) } else { output }
    }

    /// The loss that the program's variable holds.
    pub(crate) fn held_loss(&self) -> Option<Tensor> {
        self.loss
    }

    /// Releases an output and its graph.
    pub(crate) fn drop_output(&mut self, output: ForwardOutput) {
        self.machine.drop_graph(output.graph);
        self.machine.release(output.value.tensor);
    }

    /// Cleans up after a step.
    pub(crate) fn end_step(&mut self, step: u32) {
        let techniques = &self.machine.plan.techniques;
        let (empty_cache, garbage) = (techniques.empty_cache, techniques.collect_garbage_every);
        if garbage.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            self.collect_garbage(step);
        }
        if matches!(empty_cache, EmptyCache::AfterSteps(every) if (step + 1).is_multiple_of(every)) {
            self.machine.trace.empty_cache();
        }
    }

    /// Frees tensors that only circular references hold; a plain loop has none.
    pub(crate) fn collect_garbage(&mut self, step: u32) {
        self.mark(MarkKind::Phase, "gc", step);
        self.machine.collect_garbage();
    }

    /// Marks a place in the trace.
    pub(crate) fn mark(&mut self, kind: MarkKind, label: &str, index: u32) {
        self.machine.trace.mark(kind, label, index);
    }

    fn empties_cache_after(&self, phase: EmptyCache) -> bool {
        let chosen = self.machine.plan.techniques.empty_cache;
        chosen == phase || chosen == EmptyCache::AfterPhases
    }

    /// fp16 has a small range: the loss is scaled up (`GradScaler.scale`), and the gradients are scaled down again.
    fn scale_loss(&mut self, output: ForwardOutput) -> ForwardOutput {
        if self.loss_scale.is_none() {
            let scalar = |machine: &mut TensorMachine| machine.alloc(NumberFormat::Single.bytes(), Category::Optimizer);
            self.loss_scale = Some([(); 2].map(|()| scalar(&mut self.machine)));
        }
        let ForwardOutput { value, graph } = output;
        let next = std::mem::replace(&mut self.machine.graph, graph);
        let scaled = self.machine.scale(value);
        self.machine.release(value.tensor);
        ForwardOutput { value: scaled, graph: std::mem::replace(&mut self.machine.graph, next) }
    }

    /// Scales the gradients down and looks for infinite ones (`GradScaler.step`). Returns what the scaler holds until its
    /// `update`.
    fn unscale_gradients(&mut self) -> Vec<Tensor> {
        const DOUBLE: u64 = 8;
        let machine = &mut self.machine;
        let bytes = NumberFormat::Single.bytes();
        // The fused update scales the gradients itself: they are only looked at, with a scale of one.
        let is_fused = machine.plan.techniques.update_loop == UpdateLoop::Fused;
        let inverse = if is_fused {
            machine.temporary(bytes)
        } else {
            let [wide, reciprocal] = [(); 2].map(|()| machine.temporary(DOUBLE));
            machine.release(wide);
            let inverse = machine.temporary(bytes);
            machine.release(reciprocal);
            inverse
        };
        let is_infinite = machine.temporary(bytes);
        // Both are copied to the device of the gradients, which is their own (`_MultiDeviceReplicator.get`).
        let [found, scale] = [(); 2].map(|()| machine.temporary(bytes));
        for id in 0..machine.weights.len() {
            if let Some(gradient) = machine.weights[id].resident_gradient() {
                let traffic = 2 * machine.bytes(gradient);
                machine.elementwise(traffic, [scale, found, gradient]);
            }
        }
        machine.release_all([scale, inverse, is_infinite]);
        let mut held = vec![found];
        if is_fused {
            // The sum of what was found on all devices, and the scale.
            held.extend([(); 2].map(|()| machine.temporary(bytes)));
        }
        held
    }
}

/// Passes without a graph between training steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Validation {
    pub(crate) every: u32,
    pub(crate) passes: u32,
    /// As in training where it is not set.
    pub(crate) length: Option<u32>,
}

/// The generator of plain training: the same step again and again.
pub(crate) struct PlainTraining {
    pub(crate) plan: TrainingPlan,
    pub(crate) model: Arc<dyn ModelArchitecture>,
    pub(crate) lengths: SequenceLengths,
    pub(crate) validation: Option<Validation>,
    pub(crate) kernel_search: KernelSearch,
    pub(crate) steps: u32,
}

impl PlainTraining {
    pub(crate) fn start(self) -> GeneratorStart {
        let PlainTraining { plan, model, lengths, validation, kernel_search, steps } = self;
        in_parts(steps.into(), move |mut random| {
            let mut trainer = Trainer::new(plan.clone(), model.clone(), random.clone());
            trainer.machine.kernel_search = kernel_search.clone();
            let lengths = lengths.clone();
            move |step, trace: &mut TraceBuilder| {
                trainer.write(trace, |trainer| {
                    if step == 0 {
                        trainer.machine.load();
                    }
                    trainer.step(step, lengths.of_step(step, &mut random));
                    // Never after the last step, so that training goes on behind it.
                    let done = step + 1;
                    let due = validation.filter(|validation| done < steps && done.is_multiple_of(validation.every));
                    for pass in 0..due.map_or(0, |validation| validation.passes) {
                        let length = due.and_then(|validation| validation.length);
                        trainer.validate(pass, length.unwrap_or_else(|| lengths.of_step(done, &mut random)));
                    }
                });
            }
        })
    }
}

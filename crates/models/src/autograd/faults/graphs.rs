//! Faults that keep outputs, losses and graphs, or run backward in the wrong way.

use super::{FaultProgram, FaultStep, TrainingFault, keep_forever};
use crate::autograd::{
    backward::RetainGraph,
    graph::Tensor,
    machine::{ForwardResult, TrainingBatch},
    trainer::{ForwardOutput, GradientMode, Trainer},
};
use oomph_trace::{Category, MarkKind};

/// Every step runs the model once more and keeps its logits in a list, for a metric that is computed later.
pub(crate) const OUTPUTS: TrainingFault = TrainingFault {
    name: "outputs",
    programs: &[
        // `kept.append(model(x))`: every output keeps the tensors that its graph saved.
        ("none", |_| {
            FaultProgram::training(|trainer, step, batch| {
                keep_forever(trainer.evaluate(step, batch, GradientMode::Enabled));
            })
        }),
        // `kept.append(model(x).clone().detach())`: the graph is freed, the logits stay.
        ("detach", |_| {
            FaultProgram::training(|trainer, step, batch| {
                let ForwardOutput { value, graph } = trainer.evaluate(step, batch, GradientMode::Enabled);
                let bytes = trainer.machine.bytes(value.tensor);
                keep_forever(trainer.derive(value.tensor, bytes, Category::Activation));
                // The copy has a graph until it is detached.
                trainer.machine.release(value.tensor);
                trainer.machine.drop_graph(graph);
            })
        }),
        // `kept.append(model(x).detach().cpu())`: host memory grows instead.
        ("cpu", |_| {
            FaultProgram::training(|trainer, step, batch| {
                let ForwardOutput { value, graph } = trainer.evaluate(step, batch, GradientMode::Enabled);
                trainer.machine.drop_graph(graph);
                trainer.move_to_host(value.tensor);
            })
        }),
        // `count += metric(model(x)).item()`: nothing is kept.
        ("consume", |_| {
            FaultProgram::training(|trainer, step, batch| {
                let output = trainer.evaluate(step, batch, GradientMode::Enabled);
                trainer.consume(output);
            })
        }),
    ],
};

/// `total = total + loss` as a tensor, in a loop without backward: the sum holds the graph of every step, with all the
/// tensors that it saved.
pub(crate) const LOSS_GRAPH: TrainingFault = TrainingFault {
    name: "loss_graph",
    programs: &[
        ("none", |_| {
            let mut total = None;
            FaultProgram::new(move |trainer, step| {
                let (_, loss) = trainer.run_forward(step.step, step.length);
                let bytes = trainer.machine.bytes(loss.value.tensor);
                let sum = trainer.derive(loss.value.tensor, bytes, Category::Activation);
                trainer.rebind(&mut total, sum);
                // The sum needs the loss's graph, not the loss.
                keep_forever(loss.graph);
                trainer.machine.release(loss.value.tensor);
                trainer.machine.zero_gradients();
            })
        }),
        // `total += loss.item()`: the variable `loss` alone holds the graph, until the next loss is bound to it.
        ("item", |_| {
            let mut last = None;
            FaultProgram::new(move |trainer, step| {
                let (_, loss) = trainer.run_forward(step.step, step.length);
                trainer.rebind_output(&mut last, Some(loss));
                trainer.machine.zero_gradients();
            })
        }),
    ],
};

/// `total += loss` in a loop with backward. The sum holds the nodes of every graph, which are host memory; backward has
/// released what they saved (`Node::release_variables`). The device holds the sum, and nothing more with every step.
pub(crate) const LOSS_SUM: TrainingFault = TrainingFault {
    name: "loss_sum",
    programs: &[
        ("none", |_| {
            let mut sum: Option<Tensor> = None;
            FaultProgram::new(move |trainer, step| {
                let (_, loss) = trainer.run_forward(step.step, step.length);
                let (loss_tensor, bytes) = (loss.value.tensor, trainer.machine.bytes(loss.value.tensor));
                // The program's variable holds the loss, so that it can be added after backward.
                trainer.run_backward(step.step, loss, RetainGraph::No);
                match sum {
                    // A number plus a tensor is a new tensor; later losses are added to it in place.
                    None => sum = Some(trainer.derive(loss_tensor, bytes, Category::Activation)),
                    Some(sum) => trainer.machine.elementwise(3 * bytes, [sum, loss_tensor]),
                }
                trainer.update_and_zero(step);
            })
        }),
        // `total += loss.item()`: the sum is a number on the host.
        ("item", |_| FaultProgram::plain()),
    ],
};

/// `self.seen.append(logits)` inside the criterion: backward frees the graph, and the logits stay.
pub(crate) const INTERMEDIATES: TrainingFault = TrainingFault {
    name: "intermediates",
    programs: &[("none", |_| criterion_that_remembers(false)), ("clear", |_| criterion_that_remembers(true))],
};

fn criterion_that_remembers(clears_each_step: bool) -> FaultProgram {
    FaultProgram::new(move |trainer, step| {
        trainer.mark(MarkKind::Phase, "forward", step.step);
        let batch = trainer.fetch_batch(step.length);
        let logits = trainer.forward(batch, GradientMode::Enabled, ForwardResult::Logits);
        let seen = trainer.machine.retain(logits.value.tensor);
        let loss = loss_of(trainer, logits, batch.input);
        trainer.run_backward(step.step, loss, RetainGraph::No);
        trainer.update_and_zero(step);
        if clears_each_step {
            trainer.machine.release(seen);
        }
    })
}

/// Cross-entropy of logits that the program holds itself, bound to its `loss`.
fn loss_of(trainer: &mut Trainer, logits: ForwardOutput, targets: Tensor) -> ForwardOutput {
    let ForwardOutput { value: logits, graph } = logits;
    let next = std::mem::replace(&mut trainer.machine.graph, graph);
    let value = trainer.machine.cross_entropy(logits, targets);
    trainer.machine.release(logits.tensor);
    let graph = std::mem::replace(&mut trainer.machine.graph, next);
    trainer.bind_loss(ForwardOutput { value, graph })
}

/// `loss.backward(retain_graph=True)`, and the losses are kept for a curve.
pub(crate) const RETAIN_GRAPH: TrainingFault = TrainingFault {
    name: "retain_graph",
    programs: &[
        ("none", |_| {
            FaultProgram::new(|trainer, step| {
                let (_, loss) = trainer.run_forward(step.step, step.length);
                keep_forever(trainer.run_backward(step.step, loss, RetainGraph::Yes));
                trainer.update_and_zero(step);
            })
        }),
        ("rebind", |_| retained_until_rebound(1)),
        ("release", |_| released_by_last_backward(1)),
    ],
};

/// Two backward passes over one graph, both of which retain it.
pub(crate) const RETAIN_TWICE: TrainingFault = TrainingFault {
    name: "retain_twice",
    programs: &[("none", |_| retained_until_rebound(2)), ("release", |_| released_by_last_backward(2))],
};

/// Only the program's variable holds the graph, until the next loss is bound to it.
fn retained_until_rebound(passes: u32) -> FaultProgram {
    let mut last = None;
    FaultProgram::new(move |trainer, step| {
        let (_, loss) = trainer.run_forward(step.step, step.length);
        trainer.rebind_output(&mut last, Some(loss));
        for _ in 0..passes {
            last = last.take().and_then(|loss| trainer.run_backward(step.step, loss, RetainGraph::Yes));
        }
        trainer.update_and_zero(step);
    })
}

/// The last backward pass over a graph frees it.
fn released_by_last_backward(passes: u32) -> FaultProgram {
    FaultProgram::new(move |trainer, step| {
        let mut loss = Some(trainer.run_forward(step.step, step.length).1);
        for pass in 1..=passes {
            let retain = if pass == passes { RetainGraph::No } else { RetainGraph::Yes };
            loss = loss.and_then(|loss| trainer.run_backward(step.step, loss, retain));
        }
        trainer.update_and_zero(step);
    })
}

/// No `zero_grad`: the model learns nonsense, but gradients are added in place, and memory grows only once.
/// The place of `zero_grad` decides what is live in the forward pass.
pub(crate) const NO_ZERO_GRAD: TrainingFault = TrainingFault {
    name: "no_zero_grad",
    programs: &[
        ("none", |_| training_with_zero_grad(false, false)),
        ("zero_grad", |_| FaultProgram::plain()),
        ("before_forward", |_| training_with_zero_grad(true, false)),
        ("before_backward", |_| training_with_zero_grad(false, true)),
    ],
};

fn training_with_zero_grad(before_forward: bool, before_backward: bool) -> FaultProgram {
    FaultProgram::new(move |trainer, step| {
        if before_forward {
            trainer.machine.zero_gradients();
        }
        let (_, loss) = trainer.run_forward(step.step, step.length);
        if before_backward {
            trainer.machine.zero_gradients();
        }
        trainer.run_backward(step.step, loss, RetainGraph::No);
        trainer.update(step.step);
    })
}

/// Validation without `no_grad`: every batch records a graph that is never run backward, and the program's variable holds
/// the last one while the next is made. Costly, but steady.
pub(crate) const VALIDATION_GRAPH: TrainingFault = TrainingFault {
    name: "validation_graph",
    programs: &[
        ("none", |_| {
            let mut output = None;
            FaultProgram::new(move |trainer, step| {
                let next = evaluate_new_batch(trainer, step, GradientMode::Enabled);
                trainer.rebind_output(&mut output, Some(next));
            })
        }),
        // The recorded program without a graph had a variable for its batch, too.
        ("no_grad", |_| {
            let (mut output, mut batch): (_, Option<TrainingBatch>) = (None, None);
            FaultProgram::new(move |trainer, step| {
                let next = trainer.new_batch(step.length);
                if let Some(before) = batch.replace(next) {
                    trainer.release_batch(before);
                }
                let next = trainer.evaluate(step, next, GradientMode::Disabled);
                trainer.rebind_output(&mut output, Some(next));
            })
        }),
    ],
};

/// Validation that gathers the outputs of all batches on the device.
pub(crate) const VALIDATION_OUTPUTS: TrainingFault = TrainingFault {
    name: "validation_outputs",
    programs: &[
        ("none", |_| validation_that_keeps_outputs(GradientMode::Enabled)),
        ("no_grad", |_| validation_that_keeps_outputs(GradientMode::Disabled)),
        ("consume", |_| {
            FaultProgram::new(|trainer, step| {
                let output = evaluate_new_batch(trainer, step, GradientMode::Disabled);
                trainer.consume(output);
            })
        }),
    ],
};

fn validation_that_keeps_outputs(mode: GradientMode) -> FaultProgram {
    FaultProgram::new(move |trainer, step| keep_forever(evaluate_new_batch(trainer, step, mode)))
}

/// The logits of a batch that no variable holds.
fn evaluate_new_batch(trainer: &mut Trainer, step: &FaultStep<'_>, mode: GradientMode) -> ForwardOutput {
    let batch = trainer.new_batch(step.length);
    let output = trainer.evaluate(step, batch, mode);
    trainer.release_batch(batch);
    output
}

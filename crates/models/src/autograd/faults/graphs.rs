//! Faults that keep outputs, losses and graphs, or run backward in the wrong way. Also those in which circular references
//! keep tensors: they are freed when Python's garbage collector runs, and it runs by the number of objects.

use super::{FaultProgram, FaultSettings, FaultStep, TrainingFault, keep_forever};
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
                // The program's variable holds the loss, so that it can be added after backward. With a loss scale, backward begins
                // at another tensor, which is freed by it.
                let loss_tensor = trainer.held_loss().unwrap_or(loss.value.tensor);
                let bytes = trainer.machine.bytes(loss_tensor);
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

/// Every step makes an object that holds a tensor and refers to itself.
pub(crate) const CYCLE: TrainingFault = TrainingFault {
    name: "cycle",
    programs: &[
        ("none", |settings| training_with_cycles(settings, false)),
        ("weak_reference", training_without_cycles),
        ("break_link", training_without_cycles),
        ("collect", |settings| training_with_cycles(settings, true)),
    ],
};

fn training_with_cycles(settings: &FaultSettings, collects_each_step: bool) -> FaultProgram {
    let bytes = settings.kept_bytes;
    FaultProgram::new(move |trainer, step| {
        trainer.train(step, |trainer, _| {
            let tensor = trainer.machine.temporary(bytes);
            trainer.machine.leave_in_cycle(tensor);
        });
        if collects_each_step {
            trainer.collect_garbage(step.step);
        }
    })
}

/// A weak reference, or a link that is set to `None`, makes no cycle: the last reference frees the tensor.
fn training_without_cycles(settings: &FaultSettings) -> FaultProgram {
    let bytes = settings.kept_bytes;
    FaultProgram::training(move |trainer, _, _| {
        let tensor = trainer.machine.temporary(bytes);
        trainer.machine.release(tensor);
    })
}

/// Tensors that stay from one phase to the next, and the three things that people do between phases, in all combinations.
///
/// Every step trains and validates a batch. Validation leaves its logits in a variable, with their graph, and a report that
/// refers to itself. `del` removes the names: that alone frees the logits, while the report waits for `gc`. `gc` in turn
/// can free nothing that still has a name. `empty_cache` returns to the driver what the others freed.
pub(crate) const DANGLING: TrainingFault = TrainingFault {
    name: "dangling",
    programs: &[
        ("none", |settings| train_and_validate(settings, false, false, false)),
        ("del", |settings| train_and_validate(settings, true, false, false)),
        ("gc", |settings| train_and_validate(settings, false, true, false)),
        ("del_gc", |settings| train_and_validate(settings, true, true, false)),
        ("empty_cache", |settings| train_and_validate(settings, false, false, true)),
        ("del_empty_cache", |settings| train_and_validate(settings, true, false, true)),
        ("gc_empty_cache", |settings| train_and_validate(settings, false, true, true)),
        ("del_gc_empty_cache", |settings| train_and_validate(settings, true, true, true)),
    ],
};

fn train_and_validate(settings: &FaultSettings, deletes: bool, collects: bool, empties_cache: bool) -> FaultProgram {
    let report_bytes = settings.kept_bytes;
    let (mut logits, mut report) = (None, None);
    FaultProgram::new(move |trainer, step| {
        trainer.train(step, |_, _| {});
        trainer.mark(MarkKind::Phase, "validate", step.step);
        let batch = trainer.fetch_batch(step.length);
        let new_logits = trainer.evaluate(step, batch, GradientMode::Enabled);
        let new_report = trainer.derive(new_logits.value.tensor, report_bytes, Category::Activation);
        trainer.rebind_output(&mut logits, Some(new_logits));
        if let Some(before) = report.replace(new_report) {
            trainer.machine.leave_in_cycle(before);
        }
        if deletes {
            trainer.rebind_output(&mut logits, None);
            if let Some(deleted) = report.take() {
                trainer.machine.leave_in_cycle(deleted);
            }
        }
        if collects {
            trainer.collect_garbage(step.step);
        }
        if empties_cache {
            trainer.machine.trace.empty_cache();
        }
    })
}

//! Faults in which circular references hold tensors: those are freed when Python's garbage collector runs, and it runs by
//! the number of objects.

use super::{FaultProgram, FaultSettings, TrainingFault};
use crate::autograd::trainer::GradientMode;
use oomph_trace::{Category, MarkKind};

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

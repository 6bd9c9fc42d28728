//! Tensors in circular references: they live until Python's collector runs, and that goes by the number of objects.

use super::{super::trainer::Trainer, Fault, Program, Settings, Turn};
use oomph_trace::Category;

/// Every step makes an object that holds a tensor and refers to itself.
pub(super) const CYCLE: Fault = Fault {
    name: "cycle",
    programs: &[
        ("none", |settings| Box::new(Cycle::new(settings, Ending::Collector))),
        ("weak_reference", |settings| Box::new(Cycle::new(settings, Ending::LastReference))),
        ("break_link", |settings| Box::new(Cycle::new(settings, Ending::LastReference))),
        ("collect", |settings| Box::new(Cycle::new(settings, Ending::CollectorEachStep))),
    ],
};

/// Who frees the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The collector, when there are objects enough.
    Collector,
    /// The collector, which the program calls after every step.
    CollectorEachStep,
    /// Nobody needs the collector: a weak reference, or a link that is set to nothing, makes no cycle.
    LastReference,
}

struct Cycle {
    bytes: u64,
    ending: Ending,
}

impl Cycle {
    fn new(settings: &Settings, ending: Ending) -> Cycle {
        Cycle { bytes: settings.kept_bytes, ending }
    }
}

impl Program for Cycle {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, _| {
            let tensor = trainer.machine.alloc(self.bytes, Category::Temporary);
            match self.ending {
                Ending::LastReference => trainer.release(tensor),
                Ending::Collector | Ending::CollectorEachStep => trainer.machine.leave_in_cycle(tensor),
            }
        });
        if self.ending == Ending::CollectorEachStep {
            trainer.collect_garbage(turn.step);
        }
    }
}

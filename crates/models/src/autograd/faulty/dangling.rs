//! Tensors that dangle from one phase into the next, and the three words that people put between phases.
//!
//! Every turn trains a step and validates a batch. Validation leaves its logits in a variable, with their graph, and a
//! report that refers to itself. `del` takes the names away: that alone frees the logits, while the report waits for
//! `gc`, which in turn can do nothing as long as there is a name. `empty_cache` gives the driver what the others freed.

use super::{
    super::{
        machine::Tensor,
        trainer::{Output, Recording, Trainer},
    },
    Fault, Program, Settings, Turn,
};
use oomph_trace::{Category, MarkKind};

/// What is done between phases.
#[derive(Clone, Copy, Debug, Default)]
struct Cleaning {
    deletes: bool,
    collects: bool,
    empties_cache: bool,
}

const NONE: Cleaning = Cleaning { deletes: false, collects: false, empties_cache: false };
const DELETES: Cleaning = Cleaning { deletes: true, ..NONE };
const COLLECTS: Cleaning = Cleaning { collects: true, ..NONE };
const DELETES_AND_COLLECTS: Cleaning = Cleaning { collects: true, ..DELETES };

/// All eight combinations.
pub(super) const DANGLING: Fault = Fault {
    name: "dangling",
    programs: &[
        ("none", |settings| Phases::program(settings, NONE)),
        ("del", |settings| Phases::program(settings, DELETES)),
        ("gc", |settings| Phases::program(settings, COLLECTS)),
        ("del_gc", |settings| Phases::program(settings, DELETES_AND_COLLECTS)),
        ("empty_cache", |settings| Phases::program(settings, Cleaning { empties_cache: true, ..NONE })),
        ("del_empty_cache", |settings| Phases::program(settings, Cleaning { empties_cache: true, ..DELETES })),
        ("gc_empty_cache", |settings| Phases::program(settings, Cleaning { empties_cache: true, ..COLLECTS })),
        ("del_gc_empty_cache", |settings| {
            Phases::program(settings, Cleaning { empties_cache: true, ..DELETES_AND_COLLECTS })
        }),
    ],
};

struct Phases {
    report_bytes: u64,
    cleaning: Cleaning,
    logits: Option<Output>,
    report: Option<Tensor>,
}

impl Phases {
    fn program(settings: &Settings, cleaning: Cleaning) -> Box<dyn Program> {
        Box::new(Phases { report_bytes: settings.kept_bytes, cleaning, logits: None, report: None })
    }

    /// Binds both variables anew. What they named before goes, the report into its cycle.
    fn bind(&mut self, trainer: &mut Trainer, logits: Option<Output>, report: Option<Tensor>) {
        if let Some(before) = std::mem::replace(&mut self.logits, logits) {
            trainer.drop_output(before);
        }
        if let Some(before) = std::mem::replace(&mut self.report, report) {
            trainer.machine.leave_in_cycle(before);
        }
    }
}

impl Program for Phases {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |_, _| {});
        trainer.mark(MarkKind::Phase, "validate", turn.step);
        let batch = trainer.fetch_batch(turn.length);
        let logits = trainer.evaluate(turn, batch, Recording::On);
        let report = trainer.derive(logits.value.tensor, self.report_bytes, Category::Activation);
        self.bind(trainer, Some(logits), Some(report));
        if self.cleaning.deletes {
            self.bind(trainer, None, None);
        }
        if self.cleaning.collects {
            trainer.collect_garbage(turn.step);
        }
        if self.cleaning.empties_cache {
            trainer.empty_cache();
        }
    }
}

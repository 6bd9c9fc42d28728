//! Many small tensors that are made and dropped in every step: nothing stays, but the allocator has no rest.

use super::{
    super::{machine::Tensor, trainer::Trainer},
    Fault, Program, Turn,
};
use oomph_trace::{Category, MarkKind};

/// The largest of them; sizes are even from a number to this.
const MOST_BYTES: u64 = 64 << 10;
const LEAST_BYTES: u64 = 4;

/// A metric that is computed number by number on the device.
pub(super) const CHURN: Fault = Fault {
    name: "churn",
    programs: &[
        ("none", |settings| Box::new(Churn { tensors: settings.tensors, batched: false, made: Vec::new() })),
        ("batched", |settings| Box::new(Churn { tensors: settings.tensors, batched: true, made: Vec::new() })),
    ],
};

struct Churn {
    tensors: u32,
    /// All in one tensor.
    batched: bool,
    made: Vec<Tensor>,
}

impl Program for Churn {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let step = turn.step;
        let sizes = (0..self.tensors).map(|_| turn.random.between(LEAST_BYTES, MOST_BYTES));
        trainer.mark(MarkKind::Phase, "metrics", step);
        let mut make = |bytes| {
            let tensor = trainer.machine.alloc(bytes, Category::Temporary);
            trainer.machine.elementwise(bytes, [tensor]);
            self.made.push(tensor);
        };
        if self.batched {
            make(sizes.sum());
        } else {
            sizes.for_each(make);
        }
        self.made.drain(..).for_each(|tensor| trainer.release(tensor));
        trainer.train(turn, |_, _| {});
    }
}

//! A loss that remembers what it was computed from.

use super::{
    super::{
        backward::Retain,
        machine::Tensor,
        model::Ending,
        trainer::{Output, Recording, Trainer},
    },
    Fault, Program, Turn,
};
use oomph_trace::MarkKind;

/// `self.seen.append(logits)` inside the criterion: backward empties the graph, and the logits stay.
pub(super) const INTERMEDIATES: Fault = Fault {
    name: "intermediates",
    programs: &[
        ("none", |_| Box::new(Criterion { seen: Vec::new(), clears: false })),
        ("clear", |_| Box::new(Criterion { seen: Vec::new(), clears: true })),
    ],
};

struct Criterion {
    seen: Vec<Tensor>,
    /// Whether it forgets at the end of every step.
    clears: bool,
}

impl Program for Criterion {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.mark(MarkKind::Phase, "forward", turn.step);
        let batch = trainer.fetch_batch(turn.length);
        let logits = trainer.forward(batch, Recording::On, Ending::Logits);
        self.seen.push(trainer.machine.retain(logits.value.tensor));
        let loss = trainer.loss_of(logits, batch);
        trainer.run_backward(turn.step, loss, Retain::Nothing);
        trainer.update_and_zero(turn);
        if self.clears {
            self.seen.drain(..).for_each(|tensor| trainer.release(tensor));
        }
    }
}

impl Trainer {
    /// Cross-entropy of logits that the program holds itself, bound to its `loss`.
    fn loss_of(&mut self, logits: Output, batch: Tensor) -> Output {
        let Output { value: logits, graph } = logits;
        let next = std::mem::replace(&mut self.machine.graph, graph);
        let value = self.machine.cross_entropy(logits, batch);
        self.release(logits.tensor);
        let graph = std::mem::replace(&mut self.machine.graph, next);
        self.bind_loss(Output { value, graph })
    }
}

//! A running loss that is summed as a tensor: the sum holds the graph of every step.

use super::{
    super::{graph::Graph, machine::Tensor, trainer::Trainer},
    Fault, Program, Turn,
};
use oomph_trace::Category;

/// `total = total + loss`, to be run backward some day.
pub(super) const LOSS_GRAPH: Fault = Fault {
    name: "loss_graph",
    programs: &[("none", |_| Box::new(SummedLoss::default())), ("item", |_| Box::new(SummedNumbers))],
};

/// The sum never comes to its backward.
#[derive(Default)]
struct SummedLoss {
    sum: Option<Tensor>,
    graphs: Vec<Graph>,
}

impl Program for SummedLoss {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let (_, loss) = trainer.run_forward(turn.step, turn.length);
        let bytes = trainer.machine.bytes(loss.value.tensor);
        let sum = trainer.derive(loss.value.tensor, bytes, Category::Activation);
        if let Some(before) = self.sum.replace(sum) {
            trainer.release(before);
        }
        // The sum needs the loss's graph, not the loss.
        self.graphs.push(loss.graph);
        trainer.release(loss.value.tensor);
        trainer.zero_grad();
    }
}

/// `total += loss.item()`, and every step runs backward.
struct SummedNumbers;

impl Program for SummedNumbers {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |_, _| {});
    }
}

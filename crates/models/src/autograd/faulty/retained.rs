//! Graphs that backward is told to retain.

use super::{
    super::{
        backward::Retain,
        trainer::{Output, Trainer},
    },
    Fault, Program, Turn,
};

/// `loss.backward(retain_graph=True)`, and the losses are kept for a curve.
pub(super) const RETAIN_GRAPH: Fault = Fault {
    name: "retain_graph",
    programs: &[
        ("none", |_| Box::new(KeptLosses::default())),
        ("rebind", |_| Box::new(RetainedOnce { last: None, backwards: 1 })),
        ("release", |_| Box::new(Released { backwards: 1 })),
    ],
};

/// Two backward passes over one graph, both of which retain it.
pub(super) const RETAIN_TWICE: Fault = Fault {
    name: "retain_twice",
    programs: &[
        ("none", |_| Box::new(RetainedOnce { last: None, backwards: 2 })),
        ("release", |_| Box::new(Released { backwards: 2 })),
    ],
};

/// Every loss is kept, and holds its graph.
#[derive(Default)]
struct KeptLosses {
    kept: Vec<Output>,
}

impl Program for KeptLosses {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let (_, loss) = trainer.run_forward(turn.step, turn.length);
        self.kept.extend(trainer.run_backward(turn.step, loss, Retain::Graph));
        trainer.update_and_zero(turn);
    }
}

/// The program's variable is all that holds the graph, until the next loss is bound to it.
struct RetainedOnce {
    last: Option<Output>,
    backwards: u32,
}

impl Program for RetainedOnce {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let (_, loss) = trainer.run_forward(turn.step, turn.length);
        if let Some(before) = self.last.replace(loss) {
            trainer.drop_output(before);
        }
        for _ in 0..self.backwards {
            self.last = self.last.take().and_then(|loss| trainer.run_backward(turn.step, loss, Retain::Graph));
        }
        trainer.update_and_zero(turn);
    }
}

/// The last backward pass over a graph lets it go.
struct Released {
    backwards: u32,
}

impl Program for Released {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let mut loss = Some(trainer.run_forward(turn.step, turn.length).1);
        for backward in 1..=self.backwards {
            let retain = if backward == self.backwards { Retain::Nothing } else { Retain::Graph };
            loss = loss.and_then(|loss| trainer.run_backward(turn.step, loss, retain));
        }
        trainer.update_and_zero(turn);
    }
}

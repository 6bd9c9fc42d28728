//! Outputs of the model that are gathered in a list, for a metric that is computed later.

use super::{
    super::{
        machine::Tensor,
        trainer::{Output, Recording, Trainer},
    },
    Fault, Program, Turn,
};
use oomph_trace::Category;

/// Every step runs the model once more and keeps its logits.
pub(super) const OUTPUTS: Fault = Fault {
    name: "outputs",
    programs: &[
        ("none", |_| Box::new(KeptOutputs::default())),
        ("detach", |_| Box::new(DetachedOutputs::default())),
        ("cpu", |_| Box::new(OutputsOnHost)),
        ("consume", |_| Box::new(ConsumedOutputs)),
    ],
};

/// `kept.append(model(x))`: with each come all tensors that its graph saved.
#[derive(Default)]
struct KeptOutputs {
    kept: Vec<Output>,
}

impl Program for KeptOutputs {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, batch| self.kept.push(trainer.evaluate(turn, batch, Recording::On)));
    }
}

/// `kept.append(model(x).clone().detach())`: the graph goes, the logits stay.
#[derive(Default)]
struct DetachedOutputs {
    kept: Vec<Tensor>,
}

impl Program for DetachedOutputs {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, batch| {
            let Output { value, graph } = trainer.evaluate(turn, batch, Recording::On);
            let bytes = trainer.machine.bytes(value.tensor);
            self.kept.push(trainer.derive(value.tensor, bytes, Category::Activation));
            // The copy has a graph until it is detached.
            trainer.release(value.tensor);
            trainer.machine.drop_graph(graph);
        });
    }
}

/// `kept.append(model(x).detach().cpu())`: it is the host's memory that grows.
struct OutputsOnHost;

impl Program for OutputsOnHost {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, batch| {
            let Output { value, graph } = trainer.evaluate(turn, batch, Recording::On);
            trainer.machine.drop_graph(graph);
            trainer.take_to_host(value.tensor);
        });
    }
}

/// `count += metric(model(x)).item()`: nothing is kept.
struct ConsumedOutputs;

impl Program for ConsumedOutputs {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |trainer, batch| {
            let output = trainer.evaluate(turn, batch, Recording::On);
            trainer.consume(output);
        });
    }
}

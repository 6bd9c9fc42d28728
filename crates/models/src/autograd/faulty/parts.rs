//! What these programs do beside plain training.

use super::{
    super::{
        backward::Retain,
        machine::Tensor,
        model::Ending,
        trainer::{Output, Recording, Trainer},
    },
    Turn,
};
use oomph_base::Work;
use oomph_trace::{Category, MarkKind};

impl Trainer {
    /// A plain training step, with `between` after its forward phase.
    pub(super) fn train(&mut self, turn: &Turn<'_>, between: impl FnOnce(&mut Trainer, Tensor)) {
        let (batch, loss) = self.run_forward(turn.step, turn.length);
        between(self, batch);
        self.run_backward(turn.step, loss, Retain::Nothing);
        self.update_and_zero(turn);
    }

    /// The optimizer's phase and `zero_grad`.
    pub(super) fn update_and_zero(&mut self, turn: &Turn<'_>) {
        self.update(turn.step);
        self.zero_grad();
    }

    /// The logits of a batch.
    pub(super) fn evaluate(&mut self, turn: &Turn<'_>, batch: Tensor, recording: Recording) -> Output {
        self.mark(MarkKind::Phase, "evaluate", turn.step);
        let output = self.forward(batch, recording, Ending::Logits);
        self.machine.forget_casts();
        output
    }

    /// Takes the most likely token of every row to the host, and lets the logits go.
    pub(super) fn consume(&mut self, output: Output) {
        let rows = u64::from(output.graph.sequences) * u64::from(output.graph.length);
        let tokens = self.machine.temporary(8 * rows);
        let bytes = self.machine.bytes(output.value.tensor);
        self.machine.work(Work::Reduction { bytes }, [output.value.tensor, tokens]);
        self.drop_output(output);
        self.take_to_host(tokens);
    }

    /// Copies a tensor to pageable host memory and lets it go.
    pub(super) fn take_to_host(&mut self, tensor: Tensor) {
        let bytes = self.machine.bytes(tensor);
        self.machine.work(Work::CopyOut { bytes, pinned: false }, [tensor]);
        self.release(tensor);
    }

    /// A tensor that is made from another one.
    pub(super) fn derive(&mut self, source: Tensor, bytes: u64, category: Category) -> Tensor {
        let derived = self.machine.alloc(bytes, category);
        let traffic = bytes + self.machine.bytes(source).min(bytes);
        self.machine.elementwise(traffic, [source, derived]);
        derived
    }
}

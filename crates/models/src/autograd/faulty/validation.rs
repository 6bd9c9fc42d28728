//! Validation: forward passes alone, batch after batch.

use super::{
    super::{
        machine::Tensor,
        trainer::{Output, Recording, Trainer},
    },
    Fault, Program, Turn,
};

/// No `no_grad`: every batch records a graph that nobody runs backward, and the program's variable holds the last one
/// while the next is made. Costly, but steady.
pub(super) const VALIDATION_GRAPH: Fault = Fault {
    name: "validation_graph",
    programs: &[
        ("none", |_| Box::new(Rebound::of(Recording::On))),
        ("no_grad", |_| Box::new(Rebound::of(Recording::Off))),
    ],
};

/// The outputs of all batches are gathered on the device.
pub(super) const VALIDATION_OUTPUTS: Fault = Fault {
    name: "validation_outputs",
    programs: &[
        ("none", |_| Box::new(Gathered { recording: Recording::On, kept: Vec::new() })),
        ("no_grad", |_| Box::new(Gathered { recording: Recording::Off, kept: Vec::new() })),
        ("consume", |_| Box::new(Consumed)),
    ],
};

/// A batch that nobody but the call holds.
fn evaluate_new_batch(trainer: &mut Trainer, turn: &Turn<'_>, recording: Recording) -> Output {
    let batch = trainer.new_batch(turn.length);
    let output = trainer.evaluate(turn, batch, recording);
    trainer.release(batch);
    output
}

/// One variable for the outputs.
struct Rebound {
    recording: Recording,
    last: Option<Output>,
    /// The recorded program without a graph had a variable for its batch too.
    batch: Option<Tensor>,
}

impl Rebound {
    fn of(recording: Recording) -> Rebound {
        Rebound { recording, last: None, batch: None }
    }
}

impl Program for Rebound {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let output = if self.recording == Recording::On {
            evaluate_new_batch(trainer, turn, self.recording)
        } else {
            let batch = trainer.new_batch(turn.length);
            if let Some(before) = self.batch.replace(batch) {
                trainer.release(before);
            }
            trainer.evaluate(turn, batch, self.recording)
        };
        if let Some(before) = self.last.replace(output) {
            trainer.drop_output(before);
        }
    }
}

/// A list of outputs.
struct Gathered {
    recording: Recording,
    kept: Vec<Output>,
}

impl Program for Gathered {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        self.kept.push(evaluate_new_batch(trainer, turn, self.recording));
    }
}

/// A number is taken of each output, under `no_grad`.
struct Consumed;

impl Program for Consumed {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let output = evaluate_new_batch(trainer, turn, Recording::Off);
        trainer.consume(output);
    }
}

//! Gradients that are never forgotten.

use super::{
    super::{backward::Retain, trainer::Trainer},
    Fault, Program, Turn,
};

/// No `zero_grad`: the model learns nonsense, but gradients are added in place, and memory grows once and no more.
/// Where else they are forgotten than after the step decides what is alive in the forward pass.
pub(super) const NO_ZERO_GRAD: Fault = Fault {
    name: "no_zero_grad",
    programs: &[
        ("none", |_| Box::new(Unzeroed)),
        ("zero_grad", |_| Box::new(Zeroed)),
        ("before_forward", |_| Box::new(ZeroedBeforeForward)),
        ("before_backward", |_| Box::new(ZeroedBeforeBackward)),
    ],
};

struct Unzeroed;

impl Program for Unzeroed {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let (_, loss) = trainer.run_forward(turn.step, turn.length);
        trainer.run_backward(turn.step, loss, Retain::Nothing);
        trainer.update(turn.step);
    }
}

struct ZeroedBeforeForward;

impl Program for ZeroedBeforeForward {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.zero_grad();
        Unzeroed.turn(trainer, turn);
    }
}

struct ZeroedBeforeBackward;

impl Program for ZeroedBeforeBackward {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        let (_, loss) = trainer.run_forward(turn.step, turn.length);
        trainer.zero_grad();
        trainer.run_backward(turn.step, loss, Retain::Nothing);
        trainer.update(turn.step);
    }
}

struct Zeroed;

impl Program for Zeroed {
    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |_, _| {});
    }
}

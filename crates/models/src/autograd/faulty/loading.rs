//! Loading a model from a file.

use super::{
    super::{machine::Tensor, trainer::Trainer},
    Fault, Program, Turn,
};
use oomph_trace::{Category, MarkKind};

/// `state = torch.load(file, map_location="cuda")`: the weights are on the device once in the file's dictionary and
/// once in the model, for as long as the dictionary has a name.
pub(super) const LOADED_TWICE: Fault = Fault {
    name: "loaded_twice",
    programs: &[
        ("none", |_| Box::new(Loading { home: Home::Device, state: Vec::new() })),
        ("del", |_| Box::new(Loading { home: Home::DeviceUntilLoaded, state: Vec::new() })),
        ("cpu", |_| Box::new(Loading { home: Home::Host, state: Vec::new() })),
    ],
};

/// Where the file's dictionary lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Device,
    /// Its name is deleted once the model has its weights.
    DeviceUntilLoaded,
    Host,
}

struct Loading {
    home: Home,
    state: Vec<Tensor>,
}

impl Program for Loading {
    fn load(&mut self, trainer: &mut Trainer) {
        trainer.load();
        if self.home == Home::Host {
            return;
        }
        trainer.mark(MarkKind::Phase, "load_state", 0);
        for weight in 0..trainer.machine.weights.len() {
            if let Some(tensor) = trainer.machine.weights[weight].resident() {
                trainer.machine.layer = trainer.machine.weights[weight].layer;
                let bytes = trainer.machine.bytes(tensor);
                let copy = trainer.machine.copy_in(bytes, Category::Parameter);
                trainer.machine.elementwise(2 * bytes, [copy, tensor]);
                self.state.push(copy);
            }
        }
        trainer.machine.layer = None;
        if self.home == Home::DeviceUntilLoaded {
            self.state.drain(..).for_each(|copy| trainer.release(copy));
        }
    }

    fn turn(&mut self, trainer: &mut Trainer, turn: &mut Turn<'_>) {
        trainer.train(turn, |_, _| {});
    }
}

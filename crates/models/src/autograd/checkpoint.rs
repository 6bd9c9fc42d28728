//! Checkpoints: blocks that keep nothing but their input, and are run again in backward.

use super::{
    graph::{Checkpoint, Origin, Saved, Value},
    machine::{Machine, Tensor},
    saving::{Form, Saving},
};

impl Machine {
    /// Opens a checkpoint over a block: until [`Machine::end_checkpoint`] nothing is saved but the input, and that as
    /// anything is saved outside.
    pub(super) fn begin_checkpoint(&mut self, layer: u32, input: Value) -> Saving {
        let kept_input = if self.saving == Saving::ToHost {
            self.pack(input.tensor, Form::Dense)
        } else {
            Saved::Kept(self.retain(input.tensor))
        };
        let checkpoint = self.graph.checkpoints.len() as u32;
        self.graph.checkpoints.push(Checkpoint {
            layer,
            input,
            kept_input,
            unreleased: 0,
            recomputed: Vec::new(),
            is_recomputed: false,
        });
        std::mem::replace(&mut self.saving, Saving::Drop(checkpoint))
    }

    /// Goes back to what saving meant before.
    pub(super) fn end_checkpoint(&mut self, outer: Saving) {
        self.saving = outer;
        if let Some(&Checkpoint { unreleased: 0, kept_input, .. }) = self.graph.checkpoints.last() {
            self.forget(kept_input);
        }
    }

    /// What running a block again saved at this place; the first one who asks makes it run.
    pub(super) fn take_recomputed(&mut self, checkpoint: u32, place: u32) -> Option<Tensor> {
        if !std::mem::replace(&mut self.graph.checkpoints[checkpoint as usize].is_recomputed, true) {
            self.recompute(checkpoint);
        }
        let recomputed = &mut self.graph.checkpoints[checkpoint as usize].recomputed;
        recomputed.get_mut(place as usize).and_then(Option::take)
    }

    /// A node lets go of one thing that the checkpoint stood for; the last one lets its input go.
    pub(super) fn leave_checkpoint(&mut self, checkpoint: u32) {
        let checkpoint = &mut self.graph.checkpoints[checkpoint as usize];
        checkpoint.unreleased -= 1;
        if checkpoint.unreleased == 0 {
            let kept_input = checkpoint.kept_input;
            self.forget(kept_input);
        }
    }

    /// Forgets what blocks that ran again saved and nobody asked for; the next backward pass runs them anew.
    pub(super) fn forget_recomputed(&mut self) {
        for checkpoint in 0..self.graph.checkpoints.len() {
            self.graph.checkpoints[checkpoint].is_recomputed = false;
            while let Some(unused) = self.graph.checkpoints[checkpoint].recomputed.pop() {
                if let Some(tensor) = unused {
                    self.release(tensor);
                }
            }
        }
    }

    fn recompute(&mut self, checkpoint: u32) {
        let &Checkpoint { layer, input, kept_input, .. } = &self.graph.checkpoints[checkpoint as usize];
        let tensor = match kept_input {
            Saved::OnHost { buffer, bytes } => self.bring_back(buffer, bytes),
            _ => self.retain(input.tensor),
        };
        let origin = if input.origin.needs_gradient() { Origin::Recomputed } else { Origin::Constant };
        let outer = std::mem::replace(&mut self.saving, Saving::Collect(checkpoint));
        self.recompute_block(layer, Value { tensor, origin, ..input });
        self.saving = outer;
        self.release(tensor);
    }
}

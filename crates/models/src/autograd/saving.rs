//! Saved-tensor hooks: what happens when an operator saves a tensor for backward, and when backward wants it again.
//!
//! Kept where nothing else is said; copied to pinned host memory under `offload`; dropped inside a checkpoint, whose
//! block runs again at the first tensor that is wanted.

use super::{
    graph::{Edge, GradientPlace, MOST_EDGES, Node, Operation, Origin, Saved},
    machine::{Machine, Tensor},
    weights::WeightId,
};
use oomph_trace::{BlockSlot, Category};

/// What saving means at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Saving {
    /// Nothing is recorded (`no_grad`).
    Nothing,
    /// Tensors are kept.
    Keep,
    /// Tensors are copied to the host.
    ToHost,
    /// Tensors are dropped: this checkpoint can bring them back.
    Drop(u32),
    /// This checkpoint is being run again, and collects what is saved.
    Collect(u32),
}

/// How the numbers of a saved tensor lie: only a dense one is copied to the host as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Dense,
    /// A transposed or sliced view, of this many bytes itself.
    Strided(u64),
}

/// The most tensors that one node saves.
const MOST_SAVED: usize = 7;

/// What a node gets back of what it saved, for the time of its backward.
pub(super) struct Unpacked {
    tensors: [Option<Tensor>; MOST_SAVED],
    /// Which of them were made for this time and go with it.
    own: [bool; MOST_SAVED],
}

impl Machine {
    /// Whether an operator on these values records a node.
    pub(super) fn records(&self, needs_gradient: bool) -> bool {
        needs_gradient && self.saving != Saving::Nothing
    }

    /// Where the savings of the next node begin.
    pub(super) fn begin_saving(&self) -> u32 {
        self.graph.saved.len() as u32
    }

    /// Saves a tensor for backward.
    pub(super) fn save(&mut self, tensor: Tensor, form: Form) {
        let saved = match self.saving {
            Saving::Nothing => return,
            Saving::Keep => Saved::Kept(self.retain(tensor)),
            Saving::ToHost => self.pack(tensor, form),
            Saving::Drop(checkpoint) => {
                let checkpoint_state = &mut self.graph.checkpoints[checkpoint as usize];
                let place = checkpoint_state.unreleased;
                checkpoint_state.unreleased += 1;
                Saved::Again { checkpoint, place }
            }
            Saving::Collect(checkpoint) => {
                let held = self.retain(tensor);
                self.graph.checkpoints[checkpoint as usize].recomputed.push(Some(held));
                return;
            }
        };
        self.graph.saved.push(saved);
    }

    /// Saves a weight for backward: it lives anyway, and only offloading copies it.
    pub(super) fn save_weight(&mut self, weight: WeightId, is_transposed: bool) {
        let saved = match (self.saving, self.weights[weight as usize].tensor) {
            (Saving::Nothing | Saving::Collect(_), _) => return,
            (Saving::ToHost, Some(tensor)) => {
                let form = if is_transposed { Form::Strided(self.bytes(tensor)) } else { Form::Dense };
                self.pack(tensor, form)
            }
            (Saving::Keep | Saving::Drop(_) | Saving::ToHost, _) => Saved::Weight(weight),
        };
        self.graph.saved.push(saved);
    }

    /// Records a node with one output; what was saved since `first_saved` is its own.
    pub(super) fn record(&mut self, operation: Operation, first_saved: u32, edges: [Edge; MOST_EDGES]) -> Origin {
        match self.record_many(operation, first_saved, edges, 1) {
            Some(place) => Origin::Recorded(place),
            None => Origin::Recomputed,
        }
    }

    /// Records a node with several outputs; nothing while a checkpoint runs again, whose nodes exist already.
    pub(super) fn record_many(
        &mut self,
        operation: Operation,
        first_saved: u32,
        edges: [Edge; MOST_EDGES],
        outputs: u8,
    ) -> Option<GradientPlace> {
        if matches!(self.saving, Saving::Collect(_)) {
            return None;
        }
        let first_gradient = self.graph.gradients.len() as GradientPlace;
        self.graph.gradients.resize(first_gradient as usize + usize::from(outputs), None);
        let saved_count = (self.graph.saved.len() - first_saved as usize) as u8;
        let layer = self.layer;
        self.graph.nodes.push(Node { operation, first_gradient, outputs, first_saved, saved_count, edges, layer });
        Some(first_gradient)
    }

    /// Brings back what a node saved.
    pub(super) fn unpack(&mut self, node: &Node) -> Unpacked {
        let mut unpacked = Unpacked { tensors: [None; MOST_SAVED], own: [false; MOST_SAVED] };
        for place in 0..usize::from(node.saved_count) {
            let saved = self.graph.saved[node.first_saved as usize + place];
            let (tensor, is_own) = match saved {
                Saved::Kept(tensor) => (Some(tensor), false),
                Saved::Weight(weight) => (self.weights[weight as usize].tensor, false),
                Saved::OnHost { buffer, bytes } => (Some(self.bring_back(buffer, bytes)), true),
                Saved::Again { checkpoint, place } => (self.take_recomputed(checkpoint, place), true),
                Saved::Nothing => (None, false),
            };
            unpacked.tensors[place] = tensor;
            unpacked.own[place] = is_own && tensor.is_some();
        }
        unpacked
    }

    /// Lets go of what was brought back, the last first.
    pub(super) fn drop_unpacked(&mut self, unpacked: &Unpacked) {
        for place in (0..MOST_SAVED).rev() {
            if let (true, Some(tensor)) = (unpacked.own[place], unpacked.tensors[place]) {
                self.release(tensor);
            }
        }
    }

    /// Lets go of what a node saved, the first first.
    pub(super) fn release_saved(&mut self, node: &Node) {
        for place in node.first_saved..node.first_saved + u32::from(node.saved_count) {
            let saved = std::mem::replace(&mut self.graph.saved[place as usize], Saved::Nothing);
            self.forget(saved);
        }
    }

    /// Lets go of one thing that was saved.
    pub(super) fn forget(&mut self, saved: Saved) {
        match saved {
            Saved::Kept(tensor) => self.release(tensor),
            Saved::OnHost { buffer, bytes } => self.return_host_buffer(buffer, bytes),
            Saved::Again { checkpoint, .. } => self.leave_checkpoint(checkpoint),
            Saved::Weight(_) | Saved::Nothing => {}
        }
    }

    /// A copy on the device of what was packed to the host.
    pub(super) fn bring_back(&mut self, buffer: BlockSlot, bytes: u64) -> Tensor {
        let tensor = self.alloc(bytes, Category::Activation);
        self.copy_from_host(buffer, tensor);
        tensor
    }

    /// Copies a tensor to the host; one that is not dense is made so first.
    pub(super) fn pack(&mut self, tensor: Tensor, form: Form) -> Saved {
        let bytes = match form {
            Form::Dense => self.bytes(tensor),
            Form::Strided(bytes) => bytes,
        };
        let buffer = self.take_host_buffer(bytes);
        if form == Form::Dense {
            self.copy_to_host(tensor, buffer);
        } else {
            let dense = self.temporary(bytes);
            self.elementwise(2 * bytes, [tensor, dense]);
            self.copy_to_host(dense, buffer);
            self.release(dense);
        }
        Saved::OnHost { buffer, bytes }
    }
}

impl Unpacked {
    /// The tensor saved at this place, to name it among the operands of work.
    pub(super) fn operand(&self, place: usize, otherwise: Tensor) -> Tensor {
        self.tensors[place].unwrap_or(otherwise)
    }
}

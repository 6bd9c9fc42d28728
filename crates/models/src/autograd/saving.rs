//! Saved tensors: what happens when an operator saves a tensor for backward, and when backward needs it.
//!
//! Tensors are kept by default, copied to pinned host memory under `offload`, and dropped inside a checkpoint, which
//! keeps its input and runs its block again when backward needs the first dropped tensor.

use super::{
    graph::{
        Checkpoint, GradientEdge, GradientPlace, GraphNode, GraphOperation, MOST_EDGES, SavedTensor, SavingMode,
        Tensor, Variable, VariableOrigin, WeightId,
    },
    machine::TensorMachine,
    techniques::NumberFormat,
};
use oomph_trace::{BlockSlot, Category};

/// The most tensors that one node saves.
const MOST_SAVED: usize = 7;

/// The tensors that a node saved and the edges of its inputs, during its backward.
pub(crate) struct UnpackedTensors {
    pub(crate) edges: [GradientEdge; MOST_EDGES],
    pub(crate) tensors: [Option<Tensor>; MOST_SAVED],
    /// Which of them were made for this backward and are released after it.
    is_copy: [bool; MOST_SAVED],
}

impl TensorMachine {
    /// Whether an operator records a node.
    pub(crate) fn records(&self, needs_gradient: bool) -> bool {
        needs_gradient && self.saving != SavingMode::Off
    }

    /// Saves a contiguous tensor for backward.
    pub(crate) fn save(&mut self, tensor: Tensor) {
        self.save_as(tensor, None);
    }

    /// Saves tensors for backward, where an operator on these inputs records a node.
    pub(crate) fn save_for<const COUNT: usize>(&mut self, inputs: &[Variable], tensors: [Tensor; COUNT]) {
        if self.records(inputs.iter().any(Variable::needs_gradient)) {
            tensors.into_iter().for_each(|tensor| self.save(tensor));
        }
    }

    /// Saves a transposed or sliced view of this many bytes for backward.
    pub(crate) fn save_view(&mut self, tensor: Tensor, bytes: u64) {
        self.save_as(tensor, Some(bytes));
    }

    fn save_as(&mut self, tensor: Tensor, view: Option<u64>) {
        let saved = match self.saving {
            SavingMode::Off => return,
            SavingMode::Keep => SavedTensor::Kept(self.retain(tensor)),
            SavingMode::ToHost => self.pack(tensor, view),
            SavingMode::Drop(checkpoint) => {
                let checkpoint_state = &mut self.graph.checkpoints[checkpoint as usize];
                let place = checkpoint_state.unreleased;
                checkpoint_state.unreleased += 1;
                SavedTensor::Recomputed { checkpoint, place }
            }
            SavingMode::Collect(checkpoint) => {
                let held = self.retain(tensor);
                self.graph.checkpoints[checkpoint as usize].recomputed.push(Some(held));
                return;
            }
        };
        self.graph.saved.push(saved);
    }

    /// Saves a weight for backward: it is live anyway, and only offloading copies it.
    pub(crate) fn save_weight(&mut self, weight: WeightId, is_transposed: bool) {
        let saved = match (self.saving, self.weights[weight as usize].tensor) {
            (SavingMode::Off | SavingMode::Collect(_), _) => return,
            (SavingMode::ToHost, Some(tensor)) => self.pack(tensor, is_transposed.then(|| self.bytes(tensor))),
            (SavingMode::Keep | SavingMode::Drop(_) | SavingMode::ToHost, _) => SavedTensor::Weight(weight),
        };
        self.graph.saved.push(saved);
    }

    /// The result of an operator on these inputs, which all get a gradient.
    pub(crate) fn output_of(
        &mut self,
        tensor: Tensor,
        number: NumberFormat,
        operation: GraphOperation,
        inputs: &[Variable],
    ) -> Variable {
        let records = self.records(inputs.iter().any(Variable::needs_gradient));
        let edges: [GradientEdge; MOST_EDGES] =
            std::array::from_fn(|place| inputs.get(place).map_or(GradientEdge::None, Variable::edge));
        self.output(tensor, number, records, operation, &edges)
    }

    /// The result of an operator. Where it `records`, a node joins the graph, with the tensors that were saved since the
    /// last node.
    pub(crate) fn output(
        &mut self,
        tensor: Tensor,
        number: NumberFormat,
        records: bool,
        operation: GraphOperation,
        edges: &[GradientEdge],
    ) -> Variable {
        let origin = match records.then(|| self.record(operation, edges, 1)) {
            None => VariableOrigin::Constant,
            Some(Some(place)) => VariableOrigin::Recorded(place),
            Some(None) => VariableOrigin::Recomputed,
        };
        Variable { tensor, number, origin }
    }

    /// Adds a node to the graph. Nothing while a checkpoint runs again: its nodes exist already.
    pub(crate) fn record(
        &mut self,
        operation: GraphOperation,
        edges: &[GradientEdge],
        outputs: u8,
    ) -> Option<GradientPlace> {
        if matches!(self.saving, SavingMode::Collect(_)) {
            return None;
        }
        let graph = &mut self.graph;
        let first_gradient = graph.gradients.len() as GradientPlace;
        graph.gradients.resize(first_gradient as usize + usize::from(outputs), None);
        let first_saved = graph.nodes.last().map_or(0, |node| node.first_saved + u32::from(node.saved_count));
        let saved_count = (graph.saved.len() - first_saved as usize) as u8;
        let mut all_edges = [GradientEdge::None; MOST_EDGES];
        all_edges[..edges.len()].copy_from_slice(edges);
        graph.nodes.push(GraphNode {
            operation,
            first_gradient,
            outputs,
            first_saved,
            saved_count,
            edges: all_edges,
            layer: self.layer,
        });
        Some(first_gradient)
    }

    /// Restores the tensors that a node saved.
    pub(crate) fn unpack(&mut self, node: &GraphNode) -> UnpackedTensors {
        let (tensors, is_copy) = ([None; MOST_SAVED], [false; MOST_SAVED]);
        let mut unpacked = UnpackedTensors { edges: node.edges, tensors, is_copy };
        for place in 0..usize::from(node.saved_count) {
            let saved = self.graph.saved[node.first_saved as usize + place];
            let (tensor, is_copy) = match saved {
                SavedTensor::Kept(tensor) => (Some(tensor), false),
                SavedTensor::Weight(weight) => (self.weights[weight as usize].tensor, false),
                SavedTensor::OnHost { buffer, bytes } => (Some(self.restore_from_host(buffer, bytes)), true),
                SavedTensor::Recomputed { checkpoint, place } => (self.take_recomputed(checkpoint, place), true),
                SavedTensor::Released => (None, false),
            };
            (unpacked.tensors[place], unpacked.is_copy[place]) = (tensor, is_copy);
        }
        unpacked
    }

    /// Releases restored tensors, the last first. A second call does nothing.
    pub(crate) fn release_unpacked(&mut self, unpacked: &mut UnpackedTensors) {
        for place in (0..MOST_SAVED).rev() {
            if std::mem::take(&mut unpacked.is_copy[place])
                && let Some(tensor) = unpacked.tensors[place]
            {
                self.release(tensor);
            }
        }
    }

    /// Releases what a node saved, in order.
    pub(crate) fn release_saved(&mut self, node: &GraphNode) {
        for place in node.first_saved..node.first_saved + u32::from(node.saved_count) {
            let saved = std::mem::replace(&mut self.graph.saved[place as usize], SavedTensor::Released);
            self.release_saved_tensor(saved);
        }
    }

    fn release_saved_tensor(&mut self, saved: SavedTensor) {
        match saved {
            SavedTensor::Kept(tensor) => self.release(tensor),
            SavedTensor::OnHost { buffer, bytes } => self.return_host_buffer(buffer, bytes),
            SavedTensor::Recomputed { checkpoint, .. } => self.leave_checkpoint(checkpoint),
            SavedTensor::Weight(_) | SavedTensor::Released => {}
        }
    }

    fn restore_from_host(&mut self, buffer: BlockSlot, bytes: u64) -> Tensor {
        let tensor = self.alloc(bytes, Category::Activation);
        self.copy_from_host(buffer, tensor);
        tensor
    }

    /// Copies a tensor to the host. A transposed or sliced view, which has this many bytes, is made contiguous first.
    fn pack(&mut self, tensor: Tensor, view: Option<u64>) -> SavedTensor {
        let bytes = view.unwrap_or_else(|| self.bytes(tensor));
        let buffer = self.take_host_buffer(bytes);
        if view.is_none() {
            self.copy_to_host(tensor, buffer);
        } else {
            let contiguous = self.temporary(bytes);
            self.elementwise(2 * bytes, [tensor, contiguous]);
            self.copy_to_host(contiguous, buffer);
            self.release(contiguous);
        }
        SavedTensor::OnHost { buffer, bytes }
    }

    /// Opens a checkpoint over a block. Until [`TensorMachine::end_checkpoint`] only the input is saved, in the mode that
    /// applies outside.
    pub(crate) fn begin_checkpoint(&mut self, layer: u32, input: Variable) -> SavingMode {
        let kept_input = if self.saving == SavingMode::ToHost {
            self.pack(input.tensor, None)
        } else {
            SavedTensor::Kept(self.retain(input.tensor))
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
        std::mem::replace(&mut self.saving, SavingMode::Drop(checkpoint))
    }

    /// Returns to the saving mode from before the checkpoint.
    pub(crate) fn end_checkpoint(&mut self, outer: SavingMode) {
        self.saving = outer;
        if let Some(&Checkpoint { unreleased: 0, kept_input, .. }) = self.graph.checkpoints.last() {
            self.release_saved_tensor(kept_input);
        }
    }

    /// What running the block again saved at this place; the first call runs it.
    fn take_recomputed(&mut self, checkpoint: u32, place: u32) -> Option<Tensor> {
        if !std::mem::replace(&mut self.graph.checkpoints[checkpoint as usize].is_recomputed, true) {
            self.recompute(checkpoint);
        }
        let recomputed = &mut self.graph.checkpoints[checkpoint as usize].recomputed;
        recomputed.get_mut(place as usize).and_then(Option::take)
    }

    /// Releases one saved tensor of the checkpoint; the last one releases the input.
    fn leave_checkpoint(&mut self, checkpoint: u32) {
        let checkpoint = &mut self.graph.checkpoints[checkpoint as usize];
        checkpoint.unreleased -= 1;
        if checkpoint.unreleased == 0 {
            let kept_input = checkpoint.kept_input;
            self.release_saved_tensor(kept_input);
        }
    }

    /// Releases recomputed tensors that were not used. The next backward pass runs the blocks again.
    pub(crate) fn release_recomputed(&mut self) {
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
            SavedTensor::OnHost { buffer, bytes } => self.restore_from_host(buffer, bytes),
            _ => self.retain(input.tensor),
        };
        let origin = if input.needs_gradient() { VariableOrigin::Recomputed } else { VariableOrigin::Constant };
        let outer = std::mem::replace(&mut self.saving, SavingMode::Collect(checkpoint));
        let model = self.model.clone();
        model.recompute_block(self, layer, Variable { tensor, origin, ..input });
        self.saving = outer;
        self.release(tensor);
    }
}

impl UnpackedTensors {
    /// The tensor saved at this place, as an operand of work.
    pub(crate) fn operand(&self, place: usize, otherwise: Tensor) -> Tensor {
        self.tensors[place].unwrap_or(otherwise)
    }
}

//! Saved tensors: what happens when an operator saves a tensor for backward, and when backward needs it.
//!
//! Tensors are kept by default, copied to pinned host memory under `offload`, and dropped inside a checkpoint, which
//! keeps its input and runs its block again when backward needs the first dropped tensor.

use std::collections::VecDeque;

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
const MOST_SAVED: usize = 8;

/// The tensors that a node saved and the edges of its inputs, during its backward.
pub(crate) struct UnpackedTensors {
    pub(crate) edges: [GradientEdge; MOST_EDGES],
    pub(crate) tensors: [Option<Tensor>; MOST_SAVED],
    /// Which of them were made for this backward and are released after it.
    is_copy: [bool; MOST_SAVED],
    /// Whether they come from the host: then they are contiguous.
    pub(crate) is_from_host: bool,
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

    /// Saves a variable for backward, which may be the first part of a tensor.
    pub(crate) fn save_variable(&mut self, variable: Variable) {
        match (self.saving, variable.part) {
            (SavingMode::ToHost, Some(bytes)) => {
                let saved = self.pack(variable.tensor, bytes, false);
                self.graph.saved.push(saved);
            }
            _ => self.save(variable.tensor),
        }
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
            SavingMode::ToHost => self.pack(tensor, view.unwrap_or_else(|| self.bytes(tensor)), view.is_some()),
            SavingMode::Drop(checkpoint) => {
                let place = self.count_dropped(checkpoint);
                SavedTensor::Recomputed { checkpoint, place }
            }
            SavingMode::Collect(_) if self.is_stopped => return,
            SavingMode::Collect(checkpoint) => {
                let held = self.retain(tensor);
                self.collect(checkpoint, Some(held));
                return;
            }
        };
        self.graph.saved.push(saved);
    }

    /// Counts a tensor that a checkpoint does not keep; its place among them.
    fn count_dropped(&mut self, checkpoint: u32) -> u32 {
        let checkpoint = &mut self.graph.checkpoints[checkpoint as usize];
        checkpoint.unreleased += 1;
        checkpoint.unreleased - 1
    }

    /// Notes what a checkpoint that runs again saves. The last tensor that is needed ends the run
    /// (`_StopRecomputationError`).
    fn collect(&mut self, checkpoint: u32, saved: Option<Tensor>) {
        let checkpoint = &mut self.graph.checkpoints[checkpoint as usize];
        checkpoint.recomputed.push(saved);
        self.is_stopped = checkpoint.recomputed.len() == checkpoint.unreleased as usize;
    }

    /// Saves a weight for backward: it is live anyway, and only offloading copies it.
    pub(crate) fn save_weight(&mut self, weight: WeightId, is_transposed: bool) {
        let saved = match (self.saving, self.weights[weight as usize].tensor) {
            (SavingMode::Collect(checkpoint), _) if !self.is_stopped => return self.collect(checkpoint, None),
            (SavingMode::Off | SavingMode::Collect(_), _) => return,
            (SavingMode::Drop(checkpoint), _) => {
                self.count_dropped(checkpoint);
                SavedTensor::WeightOf { checkpoint, weight }
            }
            (SavingMode::ToHost, Some(tensor)) => self.pack(tensor, self.weight_bytes(weight, tensor), is_transposed),
            (SavingMode::Keep | SavingMode::ToHost, _) => SavedTensor::Weight(weight),
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
        Variable { tensor, number, origin, part: None }
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

    /// A variable that gets a gradient although no operator made it (`requires_grad_`).
    pub(crate) fn with_gradient(&mut self, variable: Variable) -> Variable {
        if !self.records(true) || variable.needs_gradient() {
            return variable;
        }
        let place = self.record(GraphOperation::Leaf, &[], 1);
        // A block that runs again makes a leaf that no graph holds.
        if place.is_some() {
            let held = self.retain(variable.tensor);
            self.graph.leaves.push(held);
        }
        Variable { origin: place.map_or(VariableOrigin::Recomputed, VariableOrigin::Recorded), ..variable }
    }

    /// Restores the tensors that a node saved.
    pub(crate) fn unpack(&mut self, node: &GraphNode) -> UnpackedTensors {
        let (tensors, is_copy) = ([None; MOST_SAVED], [false; MOST_SAVED]);
        let mut unpacked = UnpackedTensors { edges: node.edges, tensors, is_copy, is_from_host: false };
        for place in 0..usize::from(node.saved_count) {
            let saved = self.graph.saved[node.first_saved as usize + place];
            unpacked.is_from_host |= matches!(saved, SavedTensor::OnHost { .. });
            let (tensor, is_copy) = match saved {
                SavedTensor::Kept(tensor) => (Some(tensor), false),
                SavedTensor::Weight(weight) => (self.weights[weight as usize].tensor, false),
                SavedTensor::OnHost { buffer, bytes } => (Some(self.restore_from_host(buffer, bytes)), true),
                SavedTensor::WeightOf { checkpoint, weight } => {
                    self.ensure_recomputed(checkpoint);
                    (self.weights[weight as usize].tensor, false)
                }
                SavedTensor::Recomputed { checkpoint, place } => (self.take_recomputed(checkpoint, place), true),
                SavedTensor::Released => (None, false),
            };
            (unpacked.tensors[place], unpacked.is_copy[place]) = (tensor, is_copy);
        }
        unpacked
    }

    /// Releases restored tensors, the last first. A second call does nothing.
    pub(crate) fn release_unpacked(&mut self, unpacked: &mut UnpackedTensors) {
        (0..MOST_SAVED).rev().for_each(|place| self.release_unpacked_at(unpacked, place));
    }

    /// The same for a node that is written in Python: the variables of its function are released in their order.
    pub(crate) fn release_python_variables(&mut self, unpacked: &mut UnpackedTensors) {
        (0..MOST_SAVED).for_each(|place| self.release_unpacked_at(unpacked, place));
    }

    fn release_unpacked_at(&mut self, unpacked: &mut UnpackedTensors, place: usize) {
        if std::mem::take(&mut unpacked.is_copy[place])
            && let Some(tensor) = unpacked.tensors[place]
        {
            self.release(tensor);
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
            SavedTensor::Recomputed { checkpoint, .. } | SavedTensor::WeightOf { checkpoint, .. } => {
                self.leave_checkpoint(checkpoint);
            }
            SavedTensor::Weight(_) | SavedTensor::Released => {}
        }
    }

    fn restore_from_host(&mut self, buffer: BlockSlot, bytes: u64) -> Tensor {
        let tensor = self.alloc(bytes, Category::Activation);
        self.copy_from_host(buffer, tensor);
        tensor
    }

    /// Copies this many bytes of a tensor to the host. A transposed or sliced view is made contiguous first.
    fn pack(&mut self, tensor: Tensor, bytes: u64, is_view: bool) -> SavedTensor {
        let buffer = self.take_host_buffer(bytes);
        if !is_view {
            self.copy_to_host(tensor, buffer);
        } else {
            let contiguous = self.temporary(bytes);
            self.elementwise(2 * bytes, [tensor, contiguous]);
            self.copy_to_host(contiguous, buffer);
            self.release(contiguous);
        }
        SavedTensor::OnHost { buffer, bytes }
    }

    /// Runs a block, under a checkpoint where the techniques say so. A checkpoint also keeps the further arguments of the
    /// block.
    pub(crate) fn checkpointed(
        &mut self,
        layer: u32,
        input: Variable,
        arguments: impl IntoIterator<Item = Tensor>,
        block: impl FnOnce(&mut TensorMachine) -> Variable,
    ) -> Variable {
        let every = self.plan.techniques.checkpoint_every.filter(|_| self.saving != SavingMode::Off);
        if !every.is_some_and(|every| layer.is_multiple_of(every)) {
            return block(self);
        }
        let outer = self.begin_checkpoint(layer, input, arguments);
        let output = block(self);
        self.end_checkpoint(outer);
        output
    }

    /// Opens a checkpoint over a block. Until [`TensorMachine::end_checkpoint`] only the input is saved, in the mode that
    /// applies outside.
    fn begin_checkpoint(
        &mut self,
        layer: u32,
        input: Variable,
        arguments: impl IntoIterator<Item = Tensor>,
    ) -> SavingMode {
        let kept_input = if self.saving == SavingMode::ToHost {
            self.pack(input.tensor, self.bytes(input.tensor), false)
        } else {
            SavedTensor::Kept(self.retain(input.tensor))
        };
        let held = arguments.into_iter().map(|argument| self.retain(argument)).collect();
        let checkpoint = self.graph.checkpoints.len() as u32;
        self.graph.checkpoints.push(Checkpoint {
            layer,
            input,
            kept_input,
            held,
            kept_results: VecDeque::new(),
            unreleased: 0,
            recomputed: Vec::new(),
            is_recomputed: false,
        });
        std::mem::replace(&mut self.saving, SavingMode::Drop(checkpoint))
    }

    /// Returns to the saving mode from before the checkpoint.
    fn end_checkpoint(&mut self, outer: SavingMode) {
        self.saving = outer;
        if let Some(&Checkpoint { unreleased: 0, .. }) = self.graph.checkpoints.last() {
            self.release_checkpoint(self.graph.checkpoints.len() - 1);
        }
    }

    /// Releases the input of a checkpoint, its further arguments, and the results that were kept and not needed.
    fn release_checkpoint(&mut self, place: usize) {
        let checkpoint = &mut self.graph.checkpoints[place];
        let (held, kept) = (std::mem::take(&mut checkpoint.held), std::mem::take(&mut checkpoint.kept_results));
        let kept_input = checkpoint.kept_input;
        self.release_saved_tensor(kept_input);
        for tensor in held.into_iter().chain(kept) {
            self.release(tensor);
        }
    }

    /// Memory for the result of a product or of attention, and whether the operator must run. A selective checkpoint keeps
    /// the results of the first run and takes them for the second (`create_selective_checkpoint_contexts`).
    pub(crate) fn kept_result(&mut self, bytes: u64, category: Category) -> (Tensor, bool) {
        let is_selective = self.plan.techniques.keeps_products;
        if let SavingMode::Collect(checkpoint) = self.saving
            && is_selective
            && !self.is_stopped
            && let Some(kept) = self.graph.checkpoints[checkpoint as usize].kept_results.pop_front()
        {
            return (kept, false);
        }
        let result = self.alloc(bytes, category);
        if let SavingMode::Drop(checkpoint) = self.saving
            && is_selective
        {
            let held = self.retain(result);
            self.graph.checkpoints[checkpoint as usize].kept_results.push_back(held);
        }
        (result, true)
    }

    /// What running the block again saved at this place; the first call runs it.
    fn take_recomputed(&mut self, checkpoint: u32, place: u32) -> Option<Tensor> {
        self.ensure_recomputed(checkpoint);
        let recomputed = &mut self.graph.checkpoints[checkpoint as usize].recomputed;
        recomputed.get_mut(place as usize).and_then(Option::take)
    }

    fn ensure_recomputed(&mut self, checkpoint: u32) {
        if !std::mem::replace(&mut self.graph.checkpoints[checkpoint as usize].is_recomputed, true) {
            self.recompute(checkpoint);
        }
    }

    /// Releases one saved tensor of the checkpoint; the last one releases the input.
    fn leave_checkpoint(&mut self, checkpoint: u32) {
        let place = checkpoint as usize;
        let checkpoint = &mut self.graph.checkpoints[place];
        checkpoint.unreleased -= 1;
        if checkpoint.unreleased == 0 {
            self.release_checkpoint(place);
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
        let made = model.recompute_block(self, layer, Variable { tensor, origin, ..input });
        self.end_autocast();
        made.into_iter().for_each(|tensor| self.release(tensor));
        self.is_stopped = false;
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

//! The machine that models run on: reference-counted tensors, whose last release is a free in the trace.
//!
//! Layers allocate and release as PyTorch's operators do. When a block is freed follows from who still holds it, never
//! from a list of frees. The machine knows no architecture: it sees a [`ModelArchitecture`].

use std::{collections::BTreeMap, sync::Arc};

use super::{
    graph::{Graph, SavingMode, Tensor, Variable, WeightId},
    layers::convolution_kernels::KernelSearch,
    plan::TrainingPlan,
    techniques::NumberFormat,
    weights::{DeclaredWeight, ShardedGroups, WeightState},
};
use crate::SeededRandom;
use oomph_base::{MIB, StreamId, TagId, Work};
use oomph_trace::{BlockSlot, Category, CollectiveKind, TraceBuilder};

/// What cuBLAS allocates at the first matrix product of a host thread on a stream, on a Hopper GPU.
const MATRIX_WORKSPACE: u64 = 32 * MIB;
/// What cuBLASLt allocates at the first product with a bias of a host thread.
const FUSED_MATRIX_WORKSPACE: u64 = MIB;

/// An architecture: its weights, and how it turns a batch into a loss.
pub(crate) trait ModelArchitecture: Send + Sync {
    /// The weights of this rank, in the order in which the model declares them.
    fn weights(&self) -> &[DeclaredWeight];

    /// The bytes of a batch's input, and of its targets where the input does not hold them.
    fn batch_bytes(&self, machine: &TensorMachine) -> (u64, Option<u64>);

    /// A forward pass, from a batch to the loss or the logits.
    fn forward(&self, machine: &mut TensorMachine, batch: TrainingBatch, result: ForwardResult) -> Variable;

    /// The weights in the order in which the optimizer gets them: modules list their own weights before those of their
    /// parts, and move them to the device after those.
    fn update_order(&self) -> Vec<WeightId> {
        (0..self.weights().len() as WeightId).collect()
    }

    /// The weights in the order of their names, in which a quantised model is loaded.
    fn load_order(&self) -> Vec<WeightId> {
        (0..self.weights().len() as WeightId).collect()
    }

    /// Whether a batch is one object: then the old one is released when all of the new one is there.
    fn has_whole_batches(&self) -> bool {
        false
    }

    /// Runs a block again for its checkpoint, until everything is saved that was saved the first time. Returns what is then
    /// to be released, in this order.
    fn recompute_block(&self, machine: &mut TensorMachine, layer: u32, input: Variable) -> Vec<Tensor>;
}

/// A batch on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingBatch {
    pub(crate) input: Tensor,
    /// Nothing where the targets are part of the input: the next tokens.
    pub(crate) targets: Option<Tensor>,
}

/// What a forward pass ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForwardResult {
    Loss,
    Logits,
}

/// The host thread that an operator runs on: autograd runs backward on its own thread, with its own workspaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HostThread {
    #[default]
    Main,
    Backward,
}

/// See the [module](self).
pub(crate) struct TensorMachine {
    /// Lent while a part of the trace is written.
    pub(crate) trace: TraceBuilder,
    pub(crate) plan: TrainingPlan,
    pub(crate) model: Arc<dyn ModelArchitecture>,
    pub(crate) weights: Vec<WeightState>,
    /// The graph that is being recorded or run backward.
    pub(crate) graph: Graph,
    pub(crate) saving: SavingMode,
    pub(crate) thread: HostThread,
    /// The stream that operators run on.
    pub(crate) stream: StreamId,
    /// The work of the CUDA graph that is being captured: it runs when the graph is launched.
    pub(crate) captured_work: Option<Vec<Work>>,
    /// The layer that the next blocks belong to.
    pub(crate) layer: Option<u16>,
    /// Whether the next backward pass is the last before the optimizer.
    pub(crate) is_last_micro_batch: bool,
    /// The layer whose weights are staged in for backward.
    pub(crate) staged_layer: Option<u16>,
    /// Bytes of gradients that wait for their bucket to fill.
    pub(crate) unsent_gradients: u64,
    pub(crate) has_sent_bucket: bool,
    /// What FSDP holds between two of its calls.
    pub(crate) sharded_groups: ShardedGroups,
    /// Results of collectives that no operator has waited for yet, and what each of them still reads.
    pub(crate) unfinished_collectives: Vec<[Tensor; 2]>,
    /// Whether DTensor has looked up the shape of a cast's gradient.
    pub(crate) has_shape_of_cast: bool,
    /// The weights that autocast has copies of.
    pub(crate) cast_weights: Vec<WeightId>,
    pub(crate) random: SeededRandom,
    /// Whether convolutions try all their kernels first, and which have done so.
    pub(crate) kernel_search: KernelSearch,
    garbage: GarbageCollector,
    /// References and size of each block, by slot.
    references: Vec<u32>,
    sizes: Vec<u64>,
    /// Whether a block has scores of tokens or classes, by slot.
    is_logits: Vec<bool>,
    /// Whether a block is known by a view of it only, by slot. The view holds the tensor that it is a view of, so
    /// autograd does not add to it in place.
    is_viewed: Vec<bool>,
    /// Whether a checkpoint that runs again has everything it needs: the rest of its block does not run.
    pub(crate) is_stopped: bool,
    /// Leaves of a graph that has run backward: its loss still holds them.
    pub(crate) leaves: Vec<Tensor>,
    /// How many gradients each weight still gets in this backward pass.
    pub(crate) gradients_left: Vec<u16>,
    /// By layer (the first row is for no layer) and category.
    tags: Vec<[Option<TagId>; Category::ALL.len()]>,
    /// Whether the tables of 8-bit optimizer states are on the device.
    pub(crate) has_code_tables: bool,
    /// Who has a workspace of cuBLAS and of cuBLASLt: a host thread on a stream.
    workspaces: [Vec<(HostThread, StreamId)>; 2],
    /// Pinned buffers that are not in use, by size: PyTorch keeps them.
    spare_host_buffers: BTreeMap<u64, Vec<BlockSlot>>,
}

impl TensorMachine {
    /// A machine with an empty device.
    pub(crate) fn new(plan: TrainingPlan, model: Arc<dyn ModelArchitecture>) -> TensorMachine {
        TensorMachine {
            trace: TraceBuilder::new(),
            plan,
            model,
            weights: Vec::new(),
            graph: Graph::default(),
            saving: SavingMode::Keep,
            thread: HostThread::Main,
            stream: StreamId::DEFAULT,
            captured_work: None,
            layer: None,
            is_last_micro_batch: true,
            staged_layer: None,
            unsent_gradients: 0,
            has_sent_bucket: false,
            sharded_groups: ShardedGroups::default(),
            unfinished_collectives: Vec::new(),
            has_shape_of_cast: false,
            cast_weights: Vec::new(),
            random: SeededRandom::new(0, "machine"),
            kernel_search: KernelSearch::default(),
            garbage: GarbageCollector::default(),
            references: Vec::new(),
            sizes: Vec::new(),
            is_logits: Vec::new(),
            is_viewed: Vec::new(),
            is_stopped: false,
            leaves: Vec::new(),
            gradients_left: Vec::new(),
            tags: Vec::new(),
            has_code_tables: false,
            workspaces: [const { Vec::new() }; 2],
            spare_host_buffers: BTreeMap::new(),
        }
    }

    /// A new tensor with one reference.
    pub(crate) fn alloc(&mut self, bytes: u64, category: Category) -> Tensor {
        self.alloc_on(bytes, category, self.stream)
    }

    /// A new tensor of another stream.
    pub(crate) fn alloc_on(&mut self, bytes: u64, category: Category, stream: StreamId) -> Tensor {
        if self.is_stopped {
            return Tensor::NONE;
        }
        let tag = self.tag(category);
        let slot = self.trace.alloc(bytes, stream, tag);
        let place = slot as usize;
        if place >= self.references.len() {
            self.references.resize(place + 1, 0);
            self.sizes.resize(place + 1, 0);
            self.is_logits.resize(place + 1, false);
            self.is_viewed.resize(place + 1, false);
        }
        self.references[place] = 1;
        self.sizes[place] = bytes;
        self.is_logits[place] = category == Category::Logits;
        self.is_viewed[place] = false;
        Tensor(slot)
    }

    /// The category of what is made of a tensor, number by number: logits stay logits.
    pub(crate) fn category_after(&self, tensor: Tensor, otherwise: Category) -> Category {
        match self.is_logits.get(tensor.0 as usize) {
            Some(true) => Category::Logits,
            _ => otherwise,
        }
    }

    /// A tensor that is released at the end of the operation, or soon after.
    pub(crate) fn temporary(&mut self, bytes: u64) -> Tensor {
        self.alloc(bytes, Category::Temporary)
    }

    /// Adds a reference.
    pub(crate) fn retain(&mut self, tensor: Tensor) -> Tensor {
        if let Some(references) = self.references.get_mut(tensor.0 as usize) {
            *references += 1;
        }
        tensor
    }

    /// Drops a reference; the last one frees the block.
    pub(crate) fn release(&mut self, tensor: Tensor) {
        let Some(references) = self.references.get_mut(tensor.0 as usize) else { return };
        *references -= 1;
        if *references == 0 {
            self.trace.free(tensor.0);
        }
    }

    /// Releases several, in order.
    pub(crate) fn release_all<const COUNT: usize>(&mut self, tensors: [Tensor; COUNT]) {
        for tensor in tensors {
            self.release(tensor);
        }
    }

    /// Whether there is one reference: then the tensor may be written in place.
    pub(crate) fn has_one_reference(&self, tensor: Tensor) -> bool {
        self.references[tensor.0 as usize] == 1 && !self.is_viewed[tensor.0 as usize]
    }

    /// From now on the tensor is known by a view of it only.
    pub(crate) fn becomes_view(&mut self, tensor: Tensor) {
        self.is_viewed[tensor.0 as usize] = true;
    }

    /// The size of a tensor.
    pub(crate) fn bytes(&self, tensor: Tensor) -> u64 {
        self.sizes.get(tensor.0 as usize).copied().unwrap_or(0)
    }

    /// The bytes of a variable: those of its tensor, or of its part of it.
    pub(crate) fn size(&self, variable: Variable) -> u64 {
        variable.part.unwrap_or_else(|| self.bytes(variable.tensor))
    }

    /// Queues work; at most four operands, the result last.
    pub(crate) fn work<const COUNT: usize>(&mut self, work: Work, operands: [Tensor; COUNT]) {
        match &mut self.captured_work {
            _ if self.is_stopped => {}
            Some(captured) => captured.push(work),
            None => self.trace.work(work, self.stream, &operands.map(|tensor| tensor.0)),
        }
    }

    /// Copies a tensor to pinned host memory.
    pub(crate) fn copy_to_host(&mut self, tensor: Tensor, buffer: BlockSlot) {
        let work = Work::CopyOut { bytes: self.bytes(tensor), pinned: true };
        self.trace.work(work, StreamId::DEFAULT, &[tensor.0, buffer]);
    }

    /// Copies pinned host memory to a tensor.
    pub(crate) fn copy_from_host(&mut self, buffer: BlockSlot, tensor: Tensor) {
        let work = Work::CopyIn { bytes: self.bytes(tensor), pinned: true };
        self.trace.work(work, StreamId::DEFAULT, &[buffer, tensor.0]);
    }

    /// Queues a pass over memory that reads and writes this many bytes.
    pub(crate) fn elementwise<const COUNT: usize>(&mut self, bytes: u64, operands: [Tensor; COUNT]) {
        self.work(Work::Elementwise { bytes }, operands);
    }

    /// The workspace that cuBLAS allocates at the first product of each thread and stream and keeps
    /// (`getCurrentCUDABlasHandle`).
    pub(crate) fn ensure_matrix_workspace(&mut self) {
        self.ensure_workspace(0, MATRIX_WORKSPACE);
    }

    /// The same for cuBLASLt, which makes products with a bias.
    pub(crate) fn ensure_fused_matrix_workspace(&mut self) {
        self.ensure_matrix_workspace();
        self.ensure_workspace(1, FUSED_MATRIX_WORKSPACE);
    }

    fn ensure_workspace(&mut self, library: usize, bytes: u64) {
        let owner = (self.thread, self.stream);
        if !self.is_stopped && !self.workspaces[library].contains(&owner) {
            self.workspaces[library].push(owner);
            self.keep_workspace(bytes);
        }
    }

    /// A pinned buffer on the host. PyTorch rounds them up to powers of two so that they can be reused.
    pub(crate) fn take_host_buffer(&mut self, bytes: u64) -> BlockSlot {
        let rounded = bytes.next_power_of_two();
        match self.spare_host_buffers.get_mut(&rounded).and_then(Vec::pop) {
            Some(buffer) => buffer,
            None => self.trace.host_alloc(rounded),
        }
    }

    /// Returns a pinned buffer that held this many bytes.
    pub(crate) fn return_host_buffer(&mut self, buffer: BlockSlot, bytes: u64) {
        self.spare_host_buffers.entry(bytes.next_power_of_two()).or_default().push(buffer);
    }

    /// Tokens of this pass.
    pub(crate) fn tokens(&self) -> u64 {
        u64::from(self.graph.sequences) * u64::from(self.graph.length)
    }

    /// Bytes of a tensor with this many numbers per token.
    pub(crate) fn rows(&self, columns: u32, number: NumberFormat) -> u64 {
        self.tokens() * u64::from(columns) * number.bytes()
    }

    /// A tensor that is copied from pageable host memory.
    pub(crate) fn copy_in(&mut self, bytes: u64, category: Category) -> Tensor {
        let tensor = self.alloc(bytes, category);
        self.work(Work::CopyIn { bytes, pinned: false }, [tensor]);
        tensor
    }

    /// Memory for the time of one kernel on `operand`.
    pub(crate) fn scratch(&mut self, bytes: u64, operand: Tensor) {
        let scratch = self.alloc(bytes, Category::Workspace);
        let traffic = self.bytes(operand);
        self.elementwise(2 * traffic, [operand, scratch]);
        self.release(scratch);
    }

    /// Communication with the other ranks.
    pub(crate) fn collective(&mut self, kind: CollectiveKind, bytes: u64, ranks: u32) {
        self.trace.collective(kind, bytes, ranks as u16, StreamId::DEFAULT);
    }

    fn keep_workspace(&mut self, bytes: u64) {
        let layer = self.layer.take();
        self.alloc(bytes, Category::Workspace);
        self.layer = layer;
    }

    /// Remembers tags by layer and category: there are millions of blocks, and interning hashes.
    fn tag(&mut self, category: Category) -> TagId {
        let row = self.layer.map_or(0, |layer| usize::from(layer) + 1);
        if row >= self.tags.len() {
            self.tags.resize(row + 1, [None; Category::ALL.len()]);
        }
        let layer = self.layer;
        let trace = &mut self.trace;
        *self.tags[row][category as usize].get_or_insert_with(|| trace.tag(category, layer))
    }
}

/// The young generation is collected when it has grown by more objects than this.
const THRESHOLD: u32 = 700;
/// Young objects when the optimizer runs for the first time, cycles aside.
const BEFORE_FIRST_UPDATE: u32 = 420;
/// Objects of one weight's optimizer state.
const PER_STATE: u32 = 5;
/// Objects per weight that are live while the optimizer works on the list of all weights.
const PER_UPDATED_WEIGHT: u32 = 4;
/// Objects that the first step leaves for good, optimizer state aside.
const LEFT_BY_FIRST_UPDATE: u32 = 72;
/// Objects of a cycle: the object that refers to itself, its attributes, and the class that the loop defines for it.
const PER_CYCLE: u32 = 24;

/// Python's cyclic garbage collector: it frees tensors that only circular references hold, and runs by the number of
/// objects, not by their size.
///
/// A few cycles with large tensors can fill a GPU long before it runs. The threshold is Python's. The number of objects
/// that a training step makes was fitted to one recording of a 12-layer GPT (three collections in eight steps), so the
/// shape of the saw-tooth is right and the exact steps of another program are not.
#[derive(Debug)]
struct GarbageCollector {
    /// Objects made since the last collection, less those that died by themselves.
    young: u32,
    /// Tensors that only a cycle holds, the oldest first.
    tensors: Vec<Tensor>,
}

impl Default for GarbageCollector {
    fn default() -> GarbageCollector {
        GarbageCollector { young: BEFORE_FIRST_UPDATE, tensors: Vec::new() }
    }
}

impl TensorMachine {
    /// Leaves a tensor in an unreachable cycle.
    pub(crate) fn leave_in_cycle(&mut self, tensor: Tensor) {
        self.garbage.young += PER_CYCLE;
        self.garbage.tensors.push(tensor);
    }

    /// Called while the optimizer makes the state of another weight.
    pub(crate) fn collect_while_making_state(&mut self) {
        self.garbage.young += PER_STATE;
        self.collect_if_due(0);
    }

    /// Called in the optimizer, which holds the most objects of a step.
    pub(crate) fn collect_while_updating(&mut self, weights: usize) {
        self.collect_if_due(PER_UPDATED_WEIGHT * weights as u32);
    }

    /// Called once, after the step that made the optimizer state.
    pub(crate) fn leave_objects_of_first_update(&mut self) {
        self.garbage.young += LEFT_BY_FIRST_UPDATE;
    }

    /// Frees the tensors in cycles (`gc.collect()`).
    pub(crate) fn collect_garbage(&mut self) {
        self.garbage.young = 0;
        for tensor in std::mem::take(&mut self.garbage.tensors) {
            self.release(tensor);
        }
    }

    /// Collects if there are too many objects, temporary ones included. Those survive as old objects, so their end does
    /// not reduce the count of young ones.
    fn collect_if_due(&mut self, temporary: u32) {
        if self.garbage.young + temporary > THRESHOLD {
            self.collect_garbage();
        }
    }
}

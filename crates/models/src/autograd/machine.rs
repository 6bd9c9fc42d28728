//! The machine that the model runs on: reference-counted tensors, whose last release is the free of a trace.
//!
//! Everything else in this folder is written in its terms: the layers allocate and release as PyTorch's operators do,
//! and when a block dies follows from who still holds it, never from a list of frees. It knows no layer.

use std::collections::BTreeMap;

use super::{
    collector::Collector,
    graph::Graph,
    plan::Plan,
    residual::KernelSearch,
    saving::Saving,
    weights::{Layout, Weight, WeightId},
};
use crate::SeededRandom;
use oomph_base::{MIB, StreamId, TagId, Work};
use oomph_trace::{BlockSlot, Category, TraceBuilder};

/// What cuBLAS takes for itself at the first matrix product of a host thread on a GPU of Hopper's kind.
const MATRIX_WORKSPACE: u64 = 32 * MIB;
/// What cuBLASLt takes at the first product with a bias of a host thread.
const FUSED_MATRIX_WORKSPACE: u64 = MIB;

/// The memory of a tensor. Views of it are further references to the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tensor(BlockSlot);

/// Which host thread an operator runs on: autograd runs backward on one of its own, with workspaces of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HostThread {
    #[default]
    Main,
    Backward,
}

/// See the [module](self).
pub(super) struct Machine {
    /// Lent for the time in which a part of the trace is written.
    pub(super) trace: TraceBuilder,
    pub(super) plan: Plan,
    pub(super) layout: Layout,
    pub(super) weights: Vec<Weight>,
    /// The graph that is being recorded or run backward.
    pub(super) graph: Graph,
    pub(super) saving: Saving,
    pub(super) thread: HostThread,
    /// Which layer the next blocks belong to.
    pub(super) layer: Option<u16>,
    /// Whether the next backward pass is the last before the optimizer.
    pub(super) is_last_micro_batch: bool,
    /// Which layer's weights are staged in for backward.
    pub(super) staged_layer: Option<u16>,
    /// Gradients that wait for their bucket to fill, in bytes.
    pub(super) unsent_gradients: u64,
    pub(super) has_sent_bucket: bool,
    /// Which weights autocast has copies of at the moment.
    pub(super) cast_weights: Vec<WeightId>,
    pub(super) collector: Collector,
    /// Graphs that were run, for their room.
    spare_graphs: Vec<Graph>,
    /// By slot: how many hold the block, and how large it is.
    references: Vec<u32>,
    sizes: Vec<u64>,
    /// By layer (the first row has none) and category.
    tags: Vec<[Option<TagId>; Category::ALL.len()]>,
    has_workspace: [bool; 2],
    has_fused_workspace: [bool; 2],
    /// Pinned buffers that are not in use, by size: PyTorch keeps them for the next time.
    spare_host_buffers: BTreeMap<u64, Vec<BlockSlot>>,
    /// Decides what in a pass is chance.
    pub(super) random: SeededRandom,
    /// Whether convolutions try all their kernels first, and which have done so.
    pub(super) kernel_search: KernelSearch,
}

impl Machine {
    /// A machine with nothing on its device, for the transformer.
    pub(super) fn new(plan: Plan) -> Machine {
        let layout = Layout::of(&plan);
        Machine::of(plan, layout)
    }

    /// A machine with nothing on its device, for a model with these weights.
    pub(super) fn of(plan: Plan, layout: Layout) -> Machine {
        Machine {
            trace: TraceBuilder::new(),
            layout,
            plan,
            weights: Vec::new(),
            graph: Graph::default(),
            saving: Saving::Keep,
            thread: HostThread::Main,
            layer: None,
            is_last_micro_batch: true,
            staged_layer: None,
            unsent_gradients: 0,
            has_sent_bucket: false,
            cast_weights: Vec::new(),
            collector: Collector::default(),
            spare_graphs: Vec::new(),
            references: Vec::new(),
            sizes: Vec::new(),
            tags: Vec::new(),
            has_workspace: [false; 2],
            has_fused_workspace: [false; 2],
            spare_host_buffers: BTreeMap::new(),
            random: SeededRandom::new(0, "machine"),
            kernel_search: KernelSearch::default(),
        }
    }

    /// A new tensor with one reference.
    pub(super) fn alloc(&mut self, bytes: u64, category: Category) -> Tensor {
        let tag = self.tag(category);
        let slot = self.trace.alloc(bytes, StreamId::DEFAULT, tag);
        let place = slot as usize;
        if place >= self.references.len() {
            self.references.resize(place + 1, 0);
            self.sizes.resize(place + 1, 0);
        }
        self.references[place] = 1;
        self.sizes[place] = bytes;
        Tensor(slot)
    }

    /// A tensor that is gone by the end of the operation, or soon after.
    pub(super) fn temporary(&mut self, bytes: u64) -> Tensor {
        self.alloc(bytes, Category::Temporary)
    }

    /// One holder more.
    pub(super) fn retain(&mut self, tensor: Tensor) -> Tensor {
        self.references[tensor.0 as usize] += 1;
        tensor
    }

    /// One holder less; the last one frees it.
    pub(super) fn release(&mut self, tensor: Tensor) {
        let references = &mut self.references[tensor.0 as usize];
        *references -= 1;
        if *references == 0 {
            self.trace.free(tensor.0);
        }
    }

    /// Releases several, in order.
    pub(super) fn release_all<const COUNT: usize>(&mut self, tensors: [Tensor; COUNT]) {
        for tensor in tensors {
            self.release(tensor);
        }
    }

    /// Whether nobody else holds it: then it may be written in place.
    pub(super) fn is_sole_holder(&self, tensor: Tensor) -> bool {
        self.references[tensor.0 as usize] == 1
    }

    /// How large a tensor is.
    pub(super) fn bytes(&self, tensor: Tensor) -> u64 {
        self.sizes[tensor.0 as usize]
    }

    /// Queues work; at most four operands, the result last.
    pub(super) fn work<const COUNT: usize>(&mut self, work: Work, operands: [Tensor; COUNT]) {
        self.trace.work(work, StreamId::DEFAULT, &operands.map(|tensor| tensor.0));
    }

    /// Copies a tensor to pinned host memory.
    pub(super) fn copy_to_host(&mut self, tensor: Tensor, buffer: BlockSlot) {
        let work = Work::CopyOut { bytes: self.bytes(tensor), pinned: true };
        self.trace.work(work, StreamId::DEFAULT, &[tensor.0, buffer]);
    }

    /// Copies pinned host memory to a tensor.
    pub(super) fn copy_from_host(&mut self, buffer: BlockSlot, tensor: Tensor) {
        let work = Work::CopyIn { bytes: self.bytes(tensor), pinned: true };
        self.trace.work(work, StreamId::DEFAULT, &[buffer, tensor.0]);
    }

    /// Queues a pass that reads and writes this many bytes in all.
    pub(super) fn elementwise<const COUNT: usize>(&mut self, bytes: u64, operands: [Tensor; COUNT]) {
        self.work(Work::Elementwise { bytes }, operands);
    }

    /// What the matrix library takes for itself at the first product of each thread, for good.
    pub(super) fn ensure_matrix_workspace(&mut self) {
        if !std::mem::replace(&mut self.has_workspace[self.thread as usize], true) {
            self.keep_workspace(MATRIX_WORKSPACE);
        }
    }

    /// The same of the library for products with a bias.
    pub(super) fn ensure_fused_matrix_workspace(&mut self) {
        self.ensure_matrix_workspace();
        if !std::mem::replace(&mut self.has_fused_workspace[self.thread as usize], true) {
            self.keep_workspace(FUSED_MATRIX_WORKSPACE);
        }
    }

    /// A pinned buffer on the host; PyTorch rounds them up to powers of two to use them again.
    pub(super) fn take_host_buffer(&mut self, bytes: u64) -> BlockSlot {
        let rounded = bytes.next_power_of_two();
        match self.spare_host_buffers.get_mut(&rounded).and_then(Vec::pop) {
            Some(buffer) => buffer,
            None => self.trace.host_alloc(rounded),
        }
    }

    /// Gives a pinned buffer of this many used bytes back for the next time.
    pub(super) fn return_host_buffer(&mut self, buffer: BlockSlot, bytes: u64) {
        self.spare_host_buffers.entry(bytes.next_power_of_two()).or_default().push(buffer);
    }

    /// An empty graph for a pass over this many sequences of this length.
    pub(super) fn fresh_graph(&mut self, sequences: u32, length: u32) -> Graph {
        Graph { sequences, length, ..self.spare_graphs.pop().unwrap_or_default() }
    }

    /// Keeps an emptied graph for its room.
    pub(super) fn recycle(&mut self, graph: Graph) {
        self.spare_graphs.push(graph);
    }

    fn keep_workspace(&mut self, bytes: u64) {
        let layer = self.layer.take();
        self.alloc(bytes, Category::Workspace);
        self.layer = layer;
    }

    /// Interning hashes; blocks come by the million.
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

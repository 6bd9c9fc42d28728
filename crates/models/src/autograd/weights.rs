//! The weights: how they are declared, loaded, staged in for their layer, and shared between ranks.
//!
//! Most are loaded once and stay. Weights that the host keeps, or of which this rank keeps a part, are staged in before
//! their layer's forward and backward and released after it. Ranks that train on different data sum or scatter their
//! gradients; the trace shows one of them.
//!
//! FSDP is written after PyTorch 2.11's `torch/distributed/fsdp/_fully_shard`: the weights of a block are a group, those
//! outside of all blocks are the root's group, and a group is gathered, released and reduced as one. The trace shows the
//! first rank, whose parts are never smaller than those of the others.

use super::{
    graph::{GradientEdge, GraphNode, Tensor, Variable, WeightId},
    layers::scratch,
    machine::{HostThread, TensorMachine},
    techniques::{DataParallel, NumberFormat, Precision},
};
use oomph_base::{MIB, StreamId, Work};
use oomph_trace::{BlockSlot, Category, CollectiveKind, MarkKind, TraceEventId};

/// DistributedDataParallel sums gradients in buckets of this size; the first one is small so that it starts early.
const BUCKET: u64 = 25 * MIB;
const FIRST_BUCKET: u64 = MIB;

/// How the ranks of a tensor-parallel group that has parts of the sequences share a weight and its gradient (the placements
/// of DTensor).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RankLayout {
    /// Every rank has both.
    #[default]
    Replicated,
    /// Every rank has the weight; its gradient is one summand of the whole.
    PartialGradient,
    /// Every rank has some rows of both.
    Rows,
    /// The same of columns.
    Columns,
    /// Every rank has some rows of the weight, and the whole gradient.
    RowsWithWholeGradient,
}

/// A weight as the model declares it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeclaredWeight {
    pub(crate) elements: u64,
    /// Its size along the first dimension, along which FSDP divides it. Set for the models that FSDP is modelled for.
    pub(crate) rows: u64,
    pub(crate) layer: Option<u16>,
    pub(crate) trainable: bool,
    /// Whether it is looked up row by row, and can therefore stay on the host.
    pub(crate) is_embedding: bool,
    /// Its format, where it is not that of all weights.
    pub(crate) number: Option<NumberFormat>,
    /// Whether it belongs to the model without being one of its parameters.
    pub(crate) is_buffer: bool,
    /// Whether it is kept in 4 bits.
    pub(crate) is_quantized: bool,
    pub(crate) layout: RankLayout,
    /// Its elements on all ranks, where they divide it by that layout.
    pub(crate) whole: u64,
}

/// The weights that a model has declared so far.
#[derive(Debug, Default)]
pub(crate) struct WeightList {
    pub(crate) declared: Vec<DeclaredWeight>,
    /// The layer that the next weights belong to.
    pub(crate) layer: Option<u16>,
}

impl WeightList {
    /// Declares the next weight.
    pub(crate) fn declare(&mut self, elements: u64, trainable: bool) -> WeightId {
        self.declared.push(DeclaredWeight {
            elements,
            rows: elements,
            layer: self.layer,
            trainable,
            is_embedding: false,
            number: None,
            is_buffer: false,
            is_quantized: false,
            layout: RankLayout::default(),
            whole: elements,
        });
        (self.declared.len() - 1) as WeightId
    }

    /// Declares the next weight, with this many rows.
    pub(crate) fn declare_rows(&mut self, rows: u32, elements: u64, trainable: bool) -> WeightId {
        let id = self.declare(elements, trainable);
        self.declared[id as usize].rows = rows.into();
        id
    }

    /// Declares a buffer: it has no gradient. Its format may be its own.
    pub(crate) fn declare_buffer(&mut self, elements: u64, number: Option<NumberFormat>) -> WeightId {
        let id = self.declare(elements, false);
        let declared = &mut self.declared[id as usize];
        (declared.number, declared.is_buffer) = (number, true);
        id
    }
}

/// The number of parameters of a model with these weights.
pub(crate) fn parameter_count(weights: &[DeclaredWeight]) -> u64 {
    weights.iter().filter(|weight| !weight.is_buffer).map(|weight| weight.elements).sum()
}

/// A loaded weight and what belongs to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeightState {
    /// Its memory on the device, unless it is on the host only.
    pub(crate) tensor: Option<Tensor>,
    /// Its memory on the host, where it is kept there.
    pub(crate) home: Option<BlockSlot>,
    /// This rank's part, where the whole is gathered only while it is used.
    pub(crate) shard: Option<Tensor>,
    pub(crate) elements: u64,
    rows: u64,
    layout: RankLayout,
    whole: u64,
    is_buffer: bool,
    /// Its format, where it is not that of all weights.
    number: Option<NumberFormat>,
    pub(crate) layer: Option<u16>,
    /// Frozen weights have no gradient and no optimizer state.
    pub(crate) trainable: bool,
    pub(crate) gradient: Option<Tensor>,
    /// The first gradients of this backward pass, until the last one is there: a tied weight gets several.
    pub(crate) unfinished_gradient: Option<Tensor>,
    /// This rank's part of the gradient, where the whole is scattered as soon as it is complete.
    pub(crate) gradient_shard: Option<Tensor>,
    /// Its single-precision copy, which the optimizer updates in its place.
    pub(crate) master: Option<Tensor>,
    /// The gradient of that copy.
    pub(crate) master_gradient: Option<Tensor>,
    /// The single-precision sum of its gradients, where these are not kept themselves.
    pub(crate) gradient_sum: Option<Tensor>,
    /// The optimizer's state, from the first step on.
    pub(crate) state: Vec<Tensor>,
    /// Whether there is optimizer state for it, on the host or in unified memory too.
    pub(crate) has_state: bool,
    /// Its 16-bit copy, until autocast ends.
    pub(crate) cast: Option<Variable>,
}

impl WeightState {
    /// A weight that is not loaded yet.
    pub(crate) fn of(declared: &DeclaredWeight) -> WeightState {
        let DeclaredWeight { elements, rows, layout, whole, number, layer, trainable, is_buffer, .. } = *declared;
        WeightState { elements, rows, layout, whole, number, layer, trainable, is_buffer, ..WeightState::default() }
    }

    /// What this rank has of it.
    pub(crate) fn resident(&self) -> Option<Tensor> {
        self.tensor.or(self.shard)
    }

    /// What this rank has of its gradient.
    pub(crate) fn resident_gradient(&self) -> Option<Tensor> {
        self.gradient.or(self.gradient_shard)
    }

    /// The gradient that the optimizer reads on this rank.
    pub(crate) fn read_gradient(&self) -> Option<Tensor> {
        self.master_gradient.or(self.resident_gradient())
    }

    /// The tensor that the optimizer updates on this rank, and the gradient that it reads.
    pub(crate) fn updated(&self) -> Option<(Tensor, Tensor)> {
        self.master.or(self.resident()).zip(self.read_gradient())
    }
}

impl TensorMachine {
    /// Loads the weights onto the device, or to where they are kept, and makes what training adds to them before its first
    /// step.
    pub(crate) fn load(&mut self) {
        self.trace.mark(MarkKind::Phase, "load", 0);
        if self.plan.techniques.quantized {
            self.load_quantized();
        } else if self.is_fully_sharded() {
            self.load_groups();
        } else if self.plan.techniques.splits_sequences {
            self.load_and_divide();
        } else {
            self.load_whole();
        }
        self.make_single_copies();
    }

    fn load_whole(&mut self) {
        let number = self.plan.precision.of_weights();
        let model = self.model.clone();
        for declared in model.weights() {
            self.layer = declared.layer;
            let is_sharded = self.gathers_weights();
            let elements = if is_sharded { self.part_of(declared.elements) } else { declared.elements };
            let bytes = elements * declared.number.unwrap_or(number).bytes();
            let techniques = &self.plan.techniques;
            let is_on_host = (techniques.offload_weights && declared.layer.is_some())
                || (techniques.offload_embeddings && declared.is_embedding);
            let (tensor, home) = if is_on_host {
                (None, Some(self.trace.host_alloc(bytes)))
            } else {
                (Some(self.copy_in(bytes, Category::Parameter)), None)
            };
            self.weights.push(WeightState {
                tensor: tensor.filter(|_| !is_sharded),
                home,
                shard: tensor.filter(|_| is_sharded),
                ..WeightState::of(declared)
            });
        }
        self.layer = None;
        self.allocate_buckets();
    }

    /// The format of a weight and its gradient.
    pub(crate) fn weight_number(&self, id: WeightId) -> NumberFormat {
        self.weights[id as usize].number.unwrap_or(self.plan.precision.of_weights())
    }

    /// Called before a block's forward: makes its weights available.
    pub(crate) fn enter_layer(&mut self, layer: u32) {
        self.layer = u16::try_from(layer).ok();
        if self.is_fully_sharded() {
            return self.gather_group(self.layer);
        }
        self.stage_in(self.layer);
    }

    /// Called after a block's forward: releases weights that are kept elsewhere.
    pub(crate) fn leave_layer(&mut self, layer: u32) {
        if self.is_fully_sharded() {
            return self.release_group(u16::try_from(layer).ok());
        }
        self.stage_out(u16::try_from(layer).ok());
    }

    /// Called before a pass: makes the weights outside of the blocks available.
    pub(crate) fn enter_pass(&mut self) {
        self.layer = None;
        if self.is_fully_sharded() {
            return self.enter_group_pass();
        }
        self.stage_in(None);
    }

    /// Called after a forward pass.
    pub(crate) fn leave_forward(&mut self) {
        if let Some(buffer) = self.sharded_groups.copied_out.take() {
            self.release(buffer);
        }
    }

    /// Called before a node's backward: makes the weights of its layer available and releases those of the last layer.
    pub(crate) fn stage_for_backward(&mut self, node: &GraphNode) {
        if self.is_fully_sharded() {
            return self.stage_group_for_backward(node.layer);
        }
        if !self.stages_weights() || self.staged_layer == node.layer {
            return;
        }
        if self.staged_layer.is_some() {
            self.stage_out(self.staged_layer);
        }
        self.staged_layer = node.layer;
        self.layer = node.layer;
        self.stage_in(node.layer);
    }

    /// Called after a backward pass: releases all staged weights.
    pub(crate) fn leave_pass(&mut self) {
        if self.is_fully_sharded() {
            return self.leave_group_pass();
        }
        if self.stages_weights() {
            let staged = self.staged_layer.take();
            self.stage_out(staged);
            self.stage_out(None);
        }
    }

    fn stages_weights(&self) -> bool {
        self.gathers_weights() || self.plan.techniques.offload_weights
    }

    fn stage_in(&mut self, layer: Option<u16>) {
        if !self.stages_weights() {
            return;
        }
        for id in self.weights_of(layer) {
            // The host looks up the rows of embeddings that it keeps.
            if self.weights[id].shard.is_some() || layer.is_some() {
                self.weight_on_device(id as WeightId);
            }
        }
    }

    /// The tensor of a weight; one that is kept elsewhere is fetched.
    pub(crate) fn weight_on_device(&mut self, id: WeightId) -> Tensor {
        let weight = &self.weights[id as usize];
        if let Some(tensor) = weight.tensor {
            return tensor;
        }
        let (home, bytes) = (weight.home, weight.elements * self.plan.precision.of_weights().bytes());
        let tensor = self.alloc(bytes, Category::Parameter);
        if let Some(home) = home {
            self.copy_from_host(home, tensor);
        } else if let DataParallel::Sharded { ranks, .. } = self.plan.techniques.data_parallel {
            self.collective(CollectiveKind::AllGather, bytes.div_ceil(ranks.into()), ranks);
        }
        self.weights[id as usize].tensor = Some(tensor);
        tensor
    }

    fn stage_out(&mut self, layer: Option<u16>) {
        if !self.stages_weights() {
            return;
        }
        for id in self.weights_of(layer) {
            let weight = &mut self.weights[id];
            let is_kept_elsewhere = weight.shard.is_some() || weight.home.is_some();
            if is_kept_elsewhere && let Some(tensor) = weight.tensor.take() {
                self.release(tensor);
            }
        }
    }

    /// The weights of a layer, or those outside of all layers.
    fn weights_of(&self, layer: Option<u16>) -> Vec<usize> {
        (0..self.weights.len()).filter(|&id| self.weights[id].layer == layer).collect()
    }

    /// The elements of the weight that a gradient goes to.
    pub(crate) fn elements_along(&self, edge: GradientEdge) -> u64 {
        match edge {
            GradientEdge::Weight(weight) => self.weights[weight as usize].elements,
            GradientEdge::Variable(_) | GradientEdge::None => 0,
        }
    }

    /// The elements of the gradient itself, which can be whole where the rank has a part of the weight.
    pub(crate) fn gradient_elements_along(&self, edge: GradientEdge) -> u64 {
        let is_whole = |weight: &WeightState| weight.layout == RankLayout::RowsWithWholeGradient;
        match edge {
            GradientEdge::Weight(weight) if is_whole(&self.weights[weight as usize]) => {
                self.weights[weight as usize].whole
            }
            _ => self.elements_along(edge),
        }
    }

    /// The number of elements of a weight that this rank's optimizer updates.
    pub(crate) fn shard_elements(&self, id: WeightId) -> u64 {
        let &WeightState { elements, rows, .. } = &self.weights[id as usize];
        match self.plan.techniques.data_parallel {
            // Every rank keeps as many rows, the last ones of zeros (`_init_sharded_param`).
            DataParallel::FullyShard { ranks } => rows.div_ceil(ranks.into()) * (elements / rows),
            _ => self.part_of(elements),
        }
    }

    /// The format in which a weight is kept and updated: `MixedPrecisionPolicy` narrows it only while it is used.
    pub(crate) fn kept_number(&self, id: WeightId) -> NumberFormat {
        let has_master = self.plan.precision == Precision::HalfModel { master_weights: true };
        if self.is_fully_sharded() && has_master { NumberFormat::Single } else { self.weight_number(id) }
    }

    /// The bytes of a weight on the device: with FSDP, its tensor is padded.
    pub(crate) fn weight_bytes(&self, id: WeightId, tensor: Tensor) -> u64 {
        match self.is_fully_sharded() {
            true => self.weights[id as usize].elements * self.weight_number(id).bytes(),
            false => self.bytes(tensor),
        }
    }

    /// The bytes of a gradient that the optimizer reads: with FSDP, those of a group are one tensor.
    pub(crate) fn gradient_bytes(&self, id: WeightId, gradient: Tensor) -> u64 {
        match self.is_fully_sharded() {
            true => self.shard_elements(id) * self.kept_number(id).bytes(),
            false => self.bytes(gradient),
        }
    }

    /// This rank's part of a weight with this many elements.
    fn part_of(&self, elements: u64) -> u64 {
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { ranks, .. } => elements.div_ceil(ranks.into()),
            DataParallel::Alone | DataParallel::Replicated { .. } | DataParallel::FullyShard { .. } => elements,
        }
    }

    /// Called after a backward pass: sends the last bucket.
    pub(crate) fn send_last_bucket(&mut self) {
        if self.is_last_micro_batch
            && let DataParallel::Replicated { ranks } = self.plan.techniques.data_parallel
        {
            let bytes = std::mem::take(&mut self.unsent_gradients);
            self.send_bucket(bytes, ranks);
            self.has_sent_bucket = false;
        }
    }

    /// Called when a weight's gradient of this pass is complete: shares it with the other ranks or the host.
    pub(crate) fn gradient_is_complete(&mut self, id: WeightId) {
        let Some(gradient) = self.weights[id as usize].gradient else { return };
        if let Some(sum) = self.weights[id as usize].gradient_sum {
            return self.add_to_gradient_sum(id, gradient, sum);
        }
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { stage, ranks } if stage >= 2 => self.scatter_gradient(id, gradient, ranks),
            DataParallel::Sharded { ranks, .. } if self.is_last_micro_batch => {
                let bytes = self.bytes(gradient);
                self.collective(CollectiveKind::ReduceScatter, bytes, ranks);
            }
            DataParallel::Replicated { ranks } if self.is_last_micro_batch => {
                self.unsent_gradients += self.bytes(gradient);
                let limit = if self.has_sent_bucket { BUCKET } else { FIRST_BUCKET };
                if self.unsent_gradients >= limit {
                    let bytes = std::mem::take(&mut self.unsent_gradients);
                    self.send_bucket(bytes, ranks);
                }
            }
            _ => {}
        }
        if let Some(home) = self.weights[id as usize].home {
            // The host keeps the weight and adds the gradient up.
            self.copy_to_host(gradient, home);
            self.weights[id as usize].gradient = None;
            self.release(gradient);
        }
    }

    /// Called after the optimizer: every rank gets what the others updated.
    pub(crate) fn gather_updated_weights(&mut self, updated: &[WeightId]) {
        let DataParallel::Sharded { stage, ranks } = self.plan.techniques.data_parallel else { return };
        if stage == 3 {
            return;
        }
        for &id in updated {
            if let Some(tensor) = self.weights[id as usize].tensor {
                let part = self.bytes(tensor).div_ceil(ranks.into());
                self.collective(CollectiveKind::AllGather, part, ranks);
            }
        }
    }

    /// Each rank keeps its part of a gradient and adds those of further micro-batches to it.
    fn scatter_gradient(&mut self, id: WeightId, whole: Tensor, ranks: u32) {
        let bytes = self.shard_elements(id) * self.plan.precision.of_weights().bytes();
        let shard = self.alloc(bytes, Category::Gradient);
        let whole_bytes = self.bytes(whole);
        self.collective(CollectiveKind::ReduceScatter, whole_bytes, ranks);
        self.weights[id as usize].gradient = None;
        self.release(whole);
        match self.weights[id as usize].gradient_shard {
            None => self.weights[id as usize].gradient_shard = Some(shard),
            Some(sum) => self.accumulate(shard, sum),
        }
    }

    /// Allocates the buffers in which gradients are exchanged.
    fn allocate_buckets(&mut self) {
        if !matches!(self.plan.techniques.data_parallel, DataParallel::Replicated { .. }) {
            return;
        }
        let number = self.plan.precision.of_weights();
        let (mut bytes, mut limit) = (0, FIRST_BUCKET);
        for id in (0..self.weights.len()).rev() {
            if self.weights[id].trainable {
                bytes += self.weights[id].elements * number.bytes();
            }
            if bytes >= limit || (id == 0 && bytes > 0) {
                self.alloc(bytes, Category::Gradient);
                (bytes, limit) = (0, BUCKET);
            }
        }
    }

    fn send_bucket(&mut self, bytes: u64, ranks: u32) {
        if bytes > 0 {
            self.has_sent_bucket = true;
            self.collective(CollectiveKind::AllReduce, bytes, ranks);
        }
    }

    /// Whether weights are complete only while their layer runs.
    fn gathers_weights(&self) -> bool {
        matches!(self.plan.techniques.data_parallel, DataParallel::Sharded { stage: 3, .. })
    }
}

impl TensorMachine {
    /// Moves the whole model to the device, then divides it among the ranks (`parallelize_module`): the model's own modules
    /// first, then those of every block.
    fn load_and_divide(&mut self) {
        let model = self.model.clone();
        for declared in model.weights() {
            self.layer = declared.layer;
            let number = declared.number.unwrap_or(self.plan.precision.of_weights());
            let bytes = declared.whole * number.bytes();
            let tensor = Some(self.copy_in(bytes, Category::Parameter));
            self.weights.push(WeightState { tensor, ..WeightState::of(declared) });
        }
        let blocks = (0..self.plan.shape.layers).map(|layer| u16::try_from(layer).ok());
        for layer in [None].into_iter().chain(blocks) {
            self.layer = layer;
            let mut whole = Vec::new();
            for id in self.weights_of(layer) {
                let is_bias = self.weights[id].rows == self.weights[id].elements;
                if !is_bias {
                    // The weight before belongs to another module.
                    whole.drain(..).for_each(|tensor| self.release(tensor));
                }
                whole.extend(self.divide_weight(id));
            }
            whole.into_iter().for_each(|tensor| self.release(tensor));
        }
        self.layer = None;
    }

    /// Replaces a weight by this rank's part, which the first rank sends to itself too, from a list of parts (`Shard._shard_tensor`).
    /// Parts of columns are copies, as are parts that are padded to the size of the first. Returns the whole weight.
    fn divide_weight(&mut self, id: usize) -> Option<Tensor> {
        let &WeightState { tensor, layout, elements, whole, .. } = &self.weights[id];
        let ranks = u64::from(self.plan.techniques.sequence_ranks());
        let bytes = elements * self.weight_number(id as WeightId).bytes();
        let copies = match layout {
            RankLayout::Replicated | RankLayout::PartialGradient => return None,
            RankLayout::Rows | RankLayout::RowsWithWholeGradient => ranks - whole / elements,
            RankLayout::Columns => ranks,
        };
        let copies: Vec<Tensor> = (0..copies).map(|_| self.temporary(bytes)).collect();
        let part = self.alloc(bytes, Category::Parameter);
        self.elementwise(2 * bytes, [part]);
        copies.into_iter().rev().for_each(|copy| self.release(copy));
        self.weights[id].tensor = Some(part);
        tensor
    }

    /// Gradients as the optimizer's operators take them, in the layout of their weights: this rank's rows of whole ones, and
    /// sums over ranks. Every call makes new ones (`redistribute_local_args`).
    pub(crate) fn gradients_in_layout(&mut self, updated: &[WeightId]) -> Vec<Tensor> {
        if !self.plan.techniques.splits_sequences {
            return Vec::new();
        }
        let mut made = Vec::new();
        for &id in updated {
            let &WeightState { layout, elements, layer, gradient, .. } = &self.weights[id as usize];
            let (Some(gradient), RankLayout::PartialGradient | RankLayout::RowsWithWholeGradient) = (gradient, layout)
            else {
                continue;
            };
            self.layer = layer;
            let bytes = elements * self.weight_number(id).bytes();
            let in_layout = self.temporary(bytes);
            self.elementwise(2 * bytes, [gradient, in_layout]);
            if layout == RankLayout::PartialGradient {
                self.collective(CollectiveKind::AllReduce, bytes, self.plan.techniques.sequence_ranks());
            }
            made.push(in_layout);
        }
        made
    }
}

/// What FSDP holds between two of its calls.
#[derive(Debug, Default)]
pub(crate) struct ShardedGroups {
    streams: Option<GroupStreams>,
    /// A group whose gather has begun, and its buffer.
    gathered: Option<(Option<u16>, Tensor)>,
    /// The buffer of the last group that forward has copied out: it is released after the copies of the next one.
    copied_out: Option<Tensor>,
    /// The buffer of the last reduction's gradients.
    reduced: Option<Tensor>,
}

/// FSDP's streams (`FSDPCommContext`), and the event by which one waits for another.
#[derive(Clone, Copy, Debug)]
struct GroupStreams {
    gather: StreamId,
    reduce: StreamId,
    event: TraceEventId,
}

impl TensorMachine {
    /// Whether weights are kept and used as FSDP does.
    pub(crate) fn is_fully_sharded(&self) -> bool {
        matches!(self.plan.techniques.data_parallel, DataParallel::FullyShard { .. })
    }

    /// Whether the host keeps this rank's parts of weights, gradients and states (`CPUOffloadPolicy`).
    pub(crate) fn offloads_shards(&self) -> bool {
        self.is_fully_sharded() && self.plan.techniques.offload_weights
    }

    fn group_ranks(&self) -> u64 {
        match self.plan.techniques.data_parallel {
            DataParallel::FullyShard { ranks } => ranks.into(),
            _ => 1,
        }
    }

    /// The weights of a group, in the order of their modules (`_get_managed_states`).
    fn group(&self, layer: Option<u16>) -> Vec<WeightId> {
        let is_member = |id: &usize| self.weights[*id].layer == layer && !self.weights[*id].is_buffer;
        (0..self.weights.len()).filter(is_member).map(|id| id as WeightId).collect()
    }

    /// The bytes of the shards of some weights, in the formats of `number`.
    fn shards(&self, group: &[WeightId], number: impl Fn(WeightId) -> NumberFormat) -> Vec<u64> {
        group.iter().map(|&id| self.shard_elements(id) * number(id).bytes()).collect()
    }

    fn last_layer(&self) -> Option<u16> {
        self.weights.iter().filter_map(|weight| weight.layer).max()
    }

    /// `fully_shard` on every block, then on the model: it moves the group's weights and buffers to the device, copies this
    /// rank's parts, and releases the whole weights.
    fn load_groups(&mut self) {
        let model = self.model.clone();
        self.weights = model.weights().iter().map(WeightState::of).collect();
        let blocks = 0..self.last_layer().map_or(0, |layer| layer + 1);
        for layer in blocks.map(Some).chain([None]) {
            self.layer = layer;
            let group = self.group(layer);
            let copied = |machine: &mut TensorMachine, id: WeightId| {
                let bytes = machine.weights[id as usize].elements * machine.kept_number(id).bytes();
                machine.copy_in(bytes, Category::Parameter)
            };
            let whole: Vec<Tensor> = group.iter().map(|&id| copied(self, id)).collect();
            for id in self.weights_of(layer).into_iter().filter(|&id| model.weights()[id].is_buffer) {
                self.weights[id].tensor = Some(copied(self, id as WeightId));
            }
            for (&id, &whole) in group.iter().zip(&whole) {
                let bytes = self.shard_elements(id) * self.kept_number(id).bytes();
                let shard = self.alloc(bytes, Category::Parameter);
                self.elementwise(3 * bytes, [whole, shard]);
                if self.offloads_shards() {
                    self.work(Work::CopyOut { bytes, pinned: true }, [shard]);
                    self.release(shard);
                    self.trace.host_alloc(bytes);
                } else {
                    self.weights[id as usize].shard = Some(shard);
                }
            }
            whole.into_iter().for_each(|tensor| self.release(tensor));
        }
        self.layer = None;
    }

    /// Opens FSDP's streams at their first use; a trace holds many more.
    fn group_streams(&mut self) -> GroupStreams {
        if let Some(streams) = self.sharded_groups.streams {
            return streams;
        }
        let [gather, reduce] = [(); 2].map(|()| self.trace.new_stream().unwrap_or(StreamId::DEFAULT));
        let streams = GroupStreams { gather, reduce, event: self.trace.new_event() };
        self.sharded_groups.streams = Some(streams);
        streams
    }

    /// Lets later work of a stream wait for what another has queued.
    fn wait_for_stream(&mut self, waiting: StreamId, other: StreamId) {
        let event = self.group_streams().event;
        self.trace.event_record(event, other);
        self.trace.event_wait(event, waiting);
    }

    /// Gathers a group for its forward (`FSDPParamGroup.pre_forward`).
    fn gather_group(&mut self, layer: Option<u16>) {
        self.begin_gather(layer);
        self.end_gather(layer);
    }

    /// Begins to gather a group that is neither whole nor on its way (`FSDPParamGroup.unshard`, `foreach_all_gather`). This
    /// rank's part is copied into the buffer, narrowed in a buffer of its own before.
    fn begin_gather(&mut self, layer: Option<u16>) {
        let group = self.group(layer);
        let is_whole = group.iter().all(|&id| self.weights[id as usize].tensor.is_some());
        if is_whole || self.sharded_groups.gathered.is_some_and(|(of, _)| of == layer) {
            return;
        }
        let (gather, ranks) = (self.group_streams().gather, self.group_ranks());
        let outer = std::mem::replace(&mut self.layer, layer);
        let part: u64 = self.shards(&group, |id| self.weight_number(id)).iter().sum();
        let kept: u64 = self.shards(&group, |id| self.kept_number(id)).iter().sum();
        let inputs: Vec<Tensor> = match self.offloads_shards() {
            true => group.iter().map(|&id| self.shard_from_host(id)).collect(),
            false => (part < kept).then(|| self.alloc_on(part, Category::Temporary, gather)).into_iter().collect(),
        };
        let buffer = self.alloc_on(part * ranks, Category::Temporary, gather);
        self.trace.work(Work::Elementwise { bytes: kept + part }, gather, &[buffer.0]);
        self.trace.collective(CollectiveKind::AllGather, part, ranks as u16, gather);
        inputs.into_iter().rev().for_each(|input| self.release(input));
        self.layer = outer;
        self.sharded_groups.gathered = Some((layer, buffer));
    }

    /// This rank's part of a weight, copied in and narrowed where the policy says so (`all_gather_inputs`).
    fn shard_from_host(&mut self, id: WeightId) -> Tensor {
        let gather = self.group_streams().gather;
        let [kept, part] = [self.kept_number(id), self.weight_number(id)].map(|n| self.shard_elements(id) * n.bytes());
        let copied = self.alloc_on(kept, Category::Temporary, gather);
        self.trace.work(Work::CopyIn { bytes: kept, pinned: true }, gather, &[copied.0]);
        if part == kept {
            return copied;
        }
        let narrowed = self.alloc_on(part, Category::Temporary, gather);
        self.trace.work(Work::Elementwise { bytes: kept + part }, gather, &[copied.0, narrowed.0]);
        self.release(copied);
        narrowed
    }

    /// Copies a gathered group out to its weights (`FSDPParamGroup.wait_for_unshard`). Forward keeps the buffer until the
    /// next group is copied, so that the copies overlap with its gather.
    fn end_gather(&mut self, layer: Option<u16>) {
        let Some((_, buffer)) = self.sharded_groups.gathered.take_if(|(of, _)| *of == layer) else { return };
        let (gather, ranks) = (self.group_streams().gather, self.group_ranks());
        let outer = std::mem::replace(&mut self.layer, layer);
        let group = self.group(layer);
        let parts = self.shards(&group, |id| self.weight_number(id));
        self.wait_for_stream(StreamId::DEFAULT, gather);
        for (&id, &part) in group.iter().zip(&parts) {
            let whole = self.alloc(part * ranks, Category::Parameter);
            self.weights[id as usize].tensor = Some(whole);
        }
        self.scratch(scratch::split_copy_table(&parts, ranks), buffer);
        self.wait_for_stream(gather, StreamId::DEFAULT);
        let is_forward = self.thread == HostThread::Main;
        let released = if is_forward { self.sharded_groups.copied_out.replace(buffer) } else { Some(buffer) };
        if let Some(released) = released {
            self.release(released);
        }
        self.layer = outer;
    }

    /// Releases the whole weights of a group (`FSDPParamGroup.reshard`).
    fn release_group(&mut self, layer: Option<u16>) {
        for id in self.group(layer) {
            if let Some(tensor) = self.weights[id as usize].tensor.take() {
                self.release(tensor);
            }
        }
    }

    /// Forward gathers the root's group, which stays whole until backward ends. Backward begins to gather the last block.
    fn enter_group_pass(&mut self) {
        match self.thread {
            HostThread::Main => {
                let gather = self.group_streams().gather;
                self.wait_for_stream(gather, StreamId::DEFAULT);
                self.gather_group(None);
            }
            HostThread::Backward => self.begin_gather(self.last_layer()),
        }
    }

    /// Called before a node's backward: reduces the gradients of the last block, gathers the next one, and begins to gather
    /// the one after it (`pre_backward`, `post_backward`).
    fn stage_group_for_backward(&mut self, layer: Option<u16>) {
        if self.staged_layer == layer {
            return;
        }
        if let Some(done) = std::mem::replace(&mut self.staged_layer, layer) {
            self.reduce_group(Some(done));
        }
        if let Some(block) = layer {
            self.gather_group(layer);
            if let Some(next) = block.checked_sub(1) {
                self.begin_gather(Some(next));
            }
        }
    }

    /// Called after a backward pass (`_root_post_backward_final_callback`).
    fn leave_group_pass(&mut self) {
        if let Some(done) = self.staged_layer.take() {
            self.reduce_group(Some(done));
        }
        self.reduce_group(None);
        let reduce = self.group_streams().reduce;
        self.wait_for_stream(StreamId::DEFAULT, reduce);
        if let Some(buffer) = self.sharded_groups.reduced.take() {
            self.release(buffer);
        }
    }

    /// Releases a group's whole weights and reduces its gradients to this rank's parts, which stay one tensor
    /// (`FSDPParamGroup.post_backward`, `foreach_reduce`).
    fn reduce_group(&mut self, layer: Option<u16>) {
        let group: Vec<WeightId> =
            self.group(layer).into_iter().filter(|&id| self.weights[id as usize].gradient.is_some()).collect();
        let mut gradients: Vec<Tensor> =
            group.iter().filter_map(|&id| self.weights[id as usize].gradient.take()).collect();
        self.release_group(layer);
        // A loop's variable holds the last gradient until the function returns.
        let Some(last) = gradients.pop() else { return };
        let (reduce, ranks) = (self.group_streams().reduce, self.group_ranks());
        let outer = std::mem::replace(&mut self.layer, layer);
        self.wait_for_stream(StreamId::DEFAULT, reduce);
        if let Some(before) = self.sharded_groups.reduced.take() {
            self.release(before);
        }
        let parts = self.shards(&group, |id| self.kept_number(id));
        let part: u64 = parts.iter().sum();
        let buffer = self.temporary(part * ranks);
        self.scratch(scratch::chunk_cat_table(&parts), buffer);
        gradients.into_iter().rev().for_each(|gradient| self.release(gradient));
        self.wait_for_stream(reduce, StreamId::DEFAULT);
        let reduced = self.alloc_on(part, Category::Gradient, reduce);
        self.trace.collective(CollectiveKind::ReduceScatter, part * ranks, ranks as u16, reduce);
        self.release(last);
        let offloads = self.offloads_shards();
        if offloads {
            self.trace.work(Work::CopyOut { bytes: part, pinned: true }, reduce, &[reduced.0]);
        }
        for (&id, bytes) in group.iter().zip(parts).filter(|_| !offloads) {
            match self.weights[id as usize].gradient_shard {
                None => self.weights[id as usize].gradient_shard = Some(self.retain(reduced)),
                Some(sum) => {
                    self.trace.work(Work::Elementwise { bytes: 3 * bytes }, reduce, &[reduced.0, sum.0]);
                }
            }
        }
        self.release(reduced);
        self.layer = outer;
        self.sharded_groups.reduced = Some(buffer);
    }
}

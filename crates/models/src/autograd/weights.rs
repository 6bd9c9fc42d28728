//! The weights: how they are declared, loaded, staged in for their layer, and shared between ranks.
//!
//! Most are loaded once and stay. Weights that the host keeps, or of which this rank keeps a part, are staged in before
//! their layer's forward and backward and released after it. Ranks that train on different data sum or scatter their
//! gradients; the trace shows one of them.

use super::{
    graph::{GradientEdge, GraphNode, Tensor, Variable, WeightId},
    machine::TensorMachine,
    techniques::{DataParallel, NumberFormat},
};
use oomph_base::MIB;
use oomph_trace::{BlockSlot, Category, CollectiveKind, MarkKind};

/// DistributedDataParallel sums gradients in buckets of this size; the first one is small so that it starts early.
const BUCKET: u64 = 25 * MIB;
const FIRST_BUCKET: u64 = MIB;

/// A weight as the model declares it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeclaredWeight {
    pub(crate) elements: u64,
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
            layer: self.layer,
            trainable,
            is_embedding: false,
            number: None,
            is_buffer: false,
            is_quantized: false,
        });
        (self.declared.len() - 1) as WeightId
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
        let DeclaredWeight { elements, number, layer, trainable, .. } = *declared;
        WeightState { elements, number, layer, trainable, ..WeightState::default() }
    }

    /// The tensor that the optimizer updates on this rank.
    pub(crate) fn resident(&self) -> Option<Tensor> {
        self.tensor.or(self.shard)
    }

    /// The gradient that the optimizer reads on this rank.
    pub(crate) fn resident_gradient(&self) -> Option<Tensor> {
        self.gradient.or(self.gradient_shard)
    }
}

impl TensorMachine {
    /// Loads the weights onto the device, or to where they are kept.
    pub(crate) fn load(&mut self) {
        if self.plan.techniques.quantized {
            return self.load_quantized();
        }
        self.trace.mark(MarkKind::Phase, "load", 0);
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
        self.stage_in(self.layer);
    }

    /// Called after a block's forward: releases weights that are kept elsewhere.
    pub(crate) fn leave_layer(&mut self, layer: u32) {
        self.stage_out(u16::try_from(layer).ok());
    }

    /// Called before a pass: makes the weights outside of the blocks available.
    pub(crate) fn enter_pass(&mut self) {
        self.layer = None;
        self.stage_in(None);
    }

    /// Called before a node's backward: makes the weights of its layer available and releases those of the last layer.
    pub(crate) fn stage_for_backward(&mut self, node: &GraphNode) {
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

    /// The number of elements of a weight that this rank's optimizer updates.
    pub(crate) fn shard_elements(&self, id: WeightId) -> u64 {
        self.part_of(self.weights[id as usize].elements)
    }

    /// This rank's part of a weight with this many elements.
    fn part_of(&self, elements: u64) -> u64 {
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { ranks, .. } => elements.div_ceil(ranks.into()),
            DataParallel::Alone | DataParallel::Replicated { .. } => elements,
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

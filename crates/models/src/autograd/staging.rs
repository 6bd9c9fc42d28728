//! Where weights live, and how they come to the device while their layer runs.
//!
//! Most are loaded once and stay. Those whose home is the host, or of which this rank has a part, are staged in before
//! their layer's forward and backward, and dropped after.

use super::{
    graph::Node,
    machine::{Machine, Tensor},
    technique::DataParallel,
    weights::{Weight, WeightId},
};
use oomph_trace::{Category, CollectiveKind, MarkKind};

impl Machine {
    /// Brings the model to the device, or to where its weights live.
    pub(super) fn load(&mut self) {
        self.trace.mark(MarkKind::Phase, "load", 0);
        let number = self.plan.precision.of_weights();
        for id in 0..self.layout.declared.len() {
            let declared = self.layout.declared[id];
            self.layer = declared.layer;
            let bytes = self.part_of_weight(declared.elements) * number.bytes();
            let techniques = &self.plan.techniques;
            let is_on_host = (techniques.offload_weights && declared.layer.is_some())
                || (techniques.offload_embeddings && declared.is_embedding);
            let (tensor, home) = if is_on_host {
                (None, Some(self.trace.host_alloc(bytes)))
            } else {
                (Some(self.copy_in(bytes, Category::Parameter)), None)
            };
            let is_sharded = self.gathers_weights();
            self.weights.push(Weight {
                tensor: tensor.filter(|_| !is_sharded),
                home,
                shard: tensor.filter(|_| is_sharded),
                elements: declared.elements,
                layer: declared.layer,
                trainable: declared.trainable,
                gradient: None,
                gradient_shard: None,
                state: Vec::new(),
                has_host_state: false,
                cast: None,
            });
        }
        self.layer = None;
        self.allocate_buckets();
    }

    /// Before a block's forward: its weights are there.
    pub(super) fn enter_layer(&mut self, layer: u32) {
        self.layer = u16::try_from(layer).ok();
        self.stage_in(self.layer);
    }

    /// After a block's forward: weights that live elsewhere go.
    pub(super) fn leave_layer(&mut self, layer: u32) {
        self.stage_out(u16::try_from(layer).ok());
    }

    /// Before a pass: the weights outside of the blocks are there.
    pub(super) fn enter_pass(&mut self) {
        self.layer = None;
        self.stage_in(None);
    }

    /// Before a node's backward: the weights of its layer are there, those of the layer before are gone.
    pub(super) fn before_backward_of(&mut self, node: &Node) {
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

    /// After a backward pass: nothing is staged in.
    pub(super) fn leave_pass(&mut self) {
        if self.stages_weights() {
            let staged = self.staged_layer.take();
            self.stage_out(staged);
            self.stage_out(None);
        }
    }

    fn stages_weights(&self) -> bool {
        self.gathers_weights() || self.plan.techniques.offload_weights
    }

    /// How many numbers of a weight are on this rank at rest.
    fn part_of_weight(&self, elements: u64) -> u64 {
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { stage: 3, ranks } => elements.div_ceil(ranks.into()),
            _ => elements,
        }
    }

    fn stage_in(&mut self, layer: Option<u16>) {
        if !self.stages_weights() {
            return;
        }
        for id in self.layout.weights_of(layer) {
            // Embeddings on the host are read there.
            if self.weights[id].shard.is_some() || layer.is_some() {
                self.weight_on_device(id as WeightId);
            }
        }
    }

    /// Where a weight is on the device; one that lives elsewhere is fetched.
    pub(super) fn weight_on_device(&mut self, id: WeightId) -> Tensor {
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
        for id in self.layout.weights_of(layer) {
            let weight = &mut self.weights[id];
            let lives_elsewhere = weight.shard.is_some() || weight.home.is_some();
            if lives_elsewhere && let Some(tensor) = weight.tensor.take() {
                self.release(tensor);
            }
        }
    }
}

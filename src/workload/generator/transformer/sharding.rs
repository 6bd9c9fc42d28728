//! What several ranks share, seen from one of them: gradients that are summed or scattered, weights that are gathered.
//!
//! Also weights whose home is the host: both stage a layer's weights in before it runs and drop them after.

use super::{
    graph::Node,
    machine::{Machine, Tensor},
    technique::DataParallel,
    weights::{Weight, WeightId},
};
use crate::{
    trace::{Category, CollectiveKind, MarkKind},
    unit::{MIB, StreamId, Work},
};

/// Gradients are summed over ranks in buckets of this size; the first one is small, so that it starts early.
const BUCKET: u64 = 25 * MIB;
const FIRST_BUCKET: u64 = MIB;

impl Machine {
    /// Brings the model to the device, or to where its weights live.
    pub(super) fn load(&mut self) {
        self.story.mark(MarkKind::Phase, "load", 0);
        let number = self.plan.precision.of_weights();
        for id in 0..self.layout.declared.len() {
            let declared = self.layout.declared[id];
            self.layer = declared.layer;
            let bytes = self.part_of_weight(declared.elements) * number.bytes();
            let techniques = &self.plan.techniques;
            let is_on_host = (techniques.offload_weights && declared.layer.is_some())
                || (techniques.offload_embeddings && declared.is_embedding);
            let (tensor, home) = if is_on_host {
                (None, Some(self.story.host_alloc(bytes)))
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

    /// How many numbers of a weight this rank's optimizer looks after.
    pub(super) fn shard_elements(&self, id: WeightId) -> u64 {
        let elements = self.weights[id as usize].elements;
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { ranks, .. } => elements.div_ceil(ranks.into()),
            DataParallel::Alone | DataParallel::Replicated { .. } => elements,
        }
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

    /// After a backward pass.
    pub(super) fn after_backward(&mut self) {
        if self.stages_weights() {
            let staged = self.staged_layer.take();
            self.stage_out(staged);
            self.stage_out(None);
        }
        if self.is_last_micro_batch
            && let DataParallel::Replicated { ranks } = self.plan.techniques.data_parallel
        {
            let bytes = std::mem::take(&mut self.unsent_gradients);
            self.send_bucket(bytes, ranks);
            self.has_sent_bucket = false;
        }
    }

    /// A weight's gradient of this pass is complete: it is sent on its way.
    pub(super) fn after_gradient_of(&mut self, id: WeightId) {
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
        if self.weights[id as usize].home.is_some() {
            // Summed up on the host, where the weight lives.
            let bytes = self.bytes(gradient);
            self.work(Work::CopyOut { bytes, pinned: true }, [gradient]);
            self.weights[id as usize].gradient = None;
            self.release(gradient);
        }
    }

    /// After the optimizer: every rank gets what the others updated.
    pub(super) fn gather_updated_weights(&mut self, updated: &[WeightId]) {
        let DataParallel::Sharded { stage, ranks } = self.plan.techniques.data_parallel else { return };
        if stage == 3 {
            return;
        }
        for &id in updated {
            if let Some(tensor) = self.weights[id as usize].tensor {
                let bytes = self.bytes(tensor);
                self.collective(CollectiveKind::AllGather, bytes, ranks);
            }
        }
    }

    /// Each rank keeps its part of a gradient, and adds to it what further micro-batches bring.
    fn scatter_gradient(&mut self, id: WeightId, whole: Tensor, ranks: u32) {
        let bytes = self.shard_elements(id) * self.plan.precision.of_weights().bytes();
        let shard = self.alloc(bytes, Category::Gradient);
        let whole_bytes = self.bytes(whole);
        self.collective(CollectiveKind::ReduceScatter, whole_bytes, ranks);
        self.weights[id as usize].gradient = None;
        self.release(whole);
        match self.weights[id as usize].gradient_shard {
            None => self.weights[id as usize].gradient_shard = Some(shard),
            Some(sum) => {
                self.elementwise(3 * bytes, [shard, sum]);
                self.release(shard);
            }
        }
    }

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

    fn collective(&mut self, kind: CollectiveKind, bytes: u64, ranks: u32) {
        self.story.collective(kind, bytes, ranks as u16, StreamId::DEFAULT);
    }

    fn gathers_weights(&self) -> bool {
        matches!(self.plan.techniques.data_parallel, DataParallel::Sharded { stage: 3, .. })
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
        let bytes = weight.elements * self.plan.precision.of_weights().bytes();
        let tensor = self.alloc(bytes, Category::Parameter);
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { ranks, .. } => self.collective(CollectiveKind::AllGather, bytes, ranks),
            _ => self.work(Work::CopyIn { bytes, pinned: true }, [tensor]),
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

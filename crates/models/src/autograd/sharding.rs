//! What ranks that train on different data share, seen from one of them: gradients that are summed or scattered, state
//! that is split, weights that are gathered.

use super::{
    machine::{Machine, Tensor},
    technique::DataParallel,
    weights::WeightId,
};
use oomph_base::{MIB, StreamId};
use oomph_trace::{Category, CollectiveKind};

/// Gradients are summed over ranks in buckets of this size; the first one is small, so that it starts early.
const BUCKET: u64 = 25 * MIB;
const FIRST_BUCKET: u64 = MIB;

impl Machine {
    /// How many numbers of a weight this rank's optimizer looks after.
    pub(super) fn shard_elements(&self, id: WeightId) -> u64 {
        let elements = self.weights[id as usize].elements;
        match self.plan.techniques.data_parallel {
            DataParallel::Sharded { ranks, .. } => elements.div_ceil(ranks.into()),
            DataParallel::Alone | DataParallel::Replicated { .. } => elements,
        }
    }

    /// After a backward pass: what is left in the last bucket is sent.
    pub(super) fn send_last_bucket(&mut self) {
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
        if let Some(home) = self.weights[id as usize].home {
            // Summed up on the host, where the weight lives.
            self.copy_to_host(gradient, home);
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
                let part = self.bytes(tensor).div_ceil(ranks.into());
                self.collective(CollectiveKind::AllGather, part, ranks);
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

    /// The buffers in which gradients travel.
    pub(super) fn allocate_buckets(&mut self) {
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

    pub(super) fn collective(&mut self, kind: CollectiveKind, bytes: u64, ranks: u32) {
        self.trace.collective(kind, bytes, ranks as u16, StreamId::DEFAULT);
    }

    /// Whether weights are whole only while their layer runs.
    pub(super) fn gathers_weights(&self) -> bool {
        matches!(self.plan.techniques.data_parallel, DataParallel::Sharded { stage: 3, .. })
    }
}

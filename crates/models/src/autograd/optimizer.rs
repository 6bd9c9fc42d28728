//! The optimizer's step: its state, its temporary memory, and the single-precision copies of 16-bit weights and gradients.

use super::{
    graph::{Tensor, WeightId},
    machine::TensorMachine,
    techniques::{NumberFormat, Optimizer, Precision, UpdateLoop},
    weights::WeightState,
};
use oomph_base::{StreamId, Work};
use oomph_trace::Category;

/// 8-bit state is scaled in blocks of this many numbers; smaller tensors stay in single precision.
const NUMBERS_PER_SCALE: u64 = 256;
const FEWEST_IN_8_BITS: u64 = 4096;
/// Numbers that 8 bits tell apart.
const NUMBERS_IN_8_BITS: u64 = 256;
/// Smaller tensors have their state on the device, paged or not (`get_state_buffer`).
const FEWEST_PAGED: u64 = 100_000;

impl TensorMachine {
    /// Makes the single-precision sums of gradients (`fp32_grads`), then the copies of weights that the optimizer updates
    /// (`bf16_master`). FSDP's shards are such copies; a host that updates the weights has its own.
    pub(crate) fn make_single_copies(&mut self) {
        let model = self.model.clone();
        let trained: Vec<WeightId> =
            model.update_order().into_iter().filter(|&id| self.weights[id as usize].trainable).collect();
        if self.plan.techniques.single_gradients {
            for &id in &trained {
                self.layer = self.weights[id as usize].layer;
                let sum = self.alloc(self.single_bytes(id), Category::Gradient);
                self.weights[id as usize].gradient_sum = Some(sum);
            }
        }
        let has_masters = self.plan.precision == Precision::HalfModel { master_weights: true };
        if has_masters && !self.is_fully_sharded() && !self.plan.techniques.offload_optimizer {
            for id in trained {
                if self.weight_number(id) == NumberFormat::Single {
                    continue;
                }
                self.layer = self.weights[id as usize].layer;
                let master = self.alloc(self.single_bytes(id), Category::Optimizer);
                self.weights[id as usize].master = Some(master);
            }
        }
        self.layer = None;
    }

    /// The bytes of this rank's part of a weight in single precision.
    fn single_bytes(&self, id: WeightId) -> u64 {
        self.shard_elements(id) * NumberFormat::Single.bytes()
    }

    /// A hook that backward calls with a complete gradient (`register_post_accumulate_grad_hook`): it widens the gradient,
    /// adds it to the sum, and drops it.
    pub(crate) fn add_to_gradient_sum(&mut self, id: WeightId, gradient: Tensor, sum: Tensor) {
        let bytes = self.bytes(sum);
        if self.weight_number(id) == NumberFormat::Half {
            let widened = self.temporary(bytes);
            self.elementwise(bytes + self.bytes(gradient), [gradient, widened]);
            self.accumulate(widened, sum);
        } else {
            self.elementwise(3 * bytes, [gradient, sum]);
        }
        self.weights[id as usize].gradient = None;
        self.release(gradient);
    }

    /// Gives the optimizer the gradients that it reads, where they are not those of backward: widened for single-precision
    /// copies, or the sums in the format of their weights.
    fn give_gradients(&mut self) {
        let model = self.model.clone();
        for id in model.update_order() {
            let WeightState { master, gradient_sum, .. } = self.weights[id as usize];
            let is_wide = master.is_some() || self.weight_number(id) == NumberFormat::Single;
            self.layer = self.weights[id as usize].layer;
            let given = match (gradient_sum, self.weights[id as usize].resident_gradient()) {
                (Some(sum), _) if is_wide => self.retain(sum),
                (Some(sum), _) => self.cast_gradient(sum, self.shard_elements(id) * NumberFormat::Half.bytes()),
                (None, Some(gradient)) if master.is_some() => self.cast_gradient(gradient, self.single_bytes(id)),
                (None, _) => continue,
            };
            let weight = &mut self.weights[id as usize];
            let place = if master.is_some() { &mut weight.master_gradient } else { &mut weight.gradient };
            if let Some(before) = place.replace(given) {
                self.release(before);
            }
        }
    }

    fn cast_gradient(&mut self, gradient: Tensor, bytes: u64) -> Tensor {
        let cast = self.alloc(bytes, Category::Gradient);
        self.elementwise(bytes + self.bytes(gradient), [gradient, cast]);
        cast
    }

    /// Updates every weight that has a gradient.
    pub(crate) fn optimizer_step(&mut self) {
        self.give_gradients();
        let model = self.model.clone();
        let updated: Vec<WeightId> = model
            .update_order()
            .into_iter()
            .filter(|&id| self.offloads_shards() || self.weights[id as usize].read_gradient().is_some())
            .collect();
        if self.plan.techniques.offload_optimizer {
            self.update_on_host(&updated);
        } else {
            match self.plan.techniques.optimizer {
                Optimizer::AdamW => self.update_with_adam(&updated),
                Optimizer::Sgd => self.update_with_sgd(&updated),
                Optimizer::Adam8Bit | Optimizer::Adam32Bit => self.update_with_bitsandbytes(&updated),
            }
            self.copy_masters(&updated);
            self.gather_updated_weights(&updated);
        }
        self.collect_while_updating(updated.len());
        self.layer = None;
    }

    /// Copies what was updated into the 16-bit weights.
    fn copy_masters(&mut self, updated: &[WeightId]) {
        for &id in updated {
            let weight = &self.weights[id as usize];
            if let (Some(master), Some(tensor)) = (weight.master, weight.resident()) {
                self.elementwise(self.bytes(master) + self.bytes(tensor), [master, tensor]);
            }
        }
    }

    /// AdamW: its state, then the update by one of PyTorch's three implementations.
    fn update_with_adam(&mut self, updated: &[WeightId]) {
        let bytes_of = |machine: &TensorMachine, id: WeightId| match machine.weights[id as usize].master {
            Some(_) => machine.single_bytes(id),
            None => machine.shard_elements(id) * machine.kept_number(id).bytes(),
        };
        let update_loop = self.plan.techniques.update_loop;
        let mut is_first = false;
        for &id in updated {
            if self.weights[id as usize].state.is_empty() {
                is_first = true;
                let bytes = bytes_of(self, id);
                self.layer = self.weights[id as usize].layer;
                // The fused kernel reads the number of the step on the GPU (`Adam._init_group`).
                let is_fused = update_loop == UpdateLoop::Fused;
                let step = is_fused.then(|| self.alloc(NumberFormat::Single.bytes(), Category::Optimizer));
                let mut state = vec![self.alloc(bytes, Category::Optimizer)];
                self.collect_while_making_state();
                state.push(self.alloc(bytes, Category::Optimizer));
                state.extend(step);
                self.weights[id as usize].state = state;
            }
        }
        for &id in updated {
            let (bytes, weight) = (bytes_of(self, id), &self.weights[id as usize]);
            if let (Some((tensor, gradient)), &[mean, square, ..]) = (weight.updated(), weight.state.as_slice()) {
                // Weight decay; then the first mean in one pass over it and the gradient, the second in two.
                self.elementwise(2 * bytes, [tensor]);
                self.elementwise(8 * bytes, [gradient, mean, square]);
            }
        }
        match update_loop {
            UpdateLoop::Foreach => self.use_gradients_for_means(updated),
            UpdateLoop::Fused => self.use_gradients_in_layout(updated, 1),
            UpdateLoop::OneByOne => {}
        }
        let roots = match update_loop {
            UpdateLoop::Foreach => self.temporary_for_each(updated, bytes_of),
            UpdateLoop::Fused | UpdateLoop::OneByOne => Vec::new(),
        };
        self.collect_while_updating(updated.len());
        if is_first {
            self.leave_objects_of_first_update();
        }
        let mut last = None;
        for (place, &id) in updated.iter().enumerate() {
            let bytes = bytes_of(self, id);
            let root = roots
                .get(place)
                .copied()
                .or_else(|| (update_loop == UpdateLoop::OneByOne).then(|| self.root_of_one(id, bytes, &mut last)));
            let weight = &self.weights[id as usize];
            if let (Some((tensor, _)), &[mean, square, ..]) = (weight.updated(), weight.state.as_slice()) {
                // The root in three passes; then the weight, from it and the first mean.
                match root {
                    Some(root) => self.elementwise(10 * bytes, [square, root, mean, tensor]),
                    None => self.elementwise(10 * bytes, [square, mean, tensor]),
                }
            }
        }
        for temporary in last.into_iter().chain(roots.into_iter().rev()) {
            self.release(temporary);
        }
    }

    /// The root for one weight (`_single_tensor_adamw`): it is divided into a second temporary, which a Python variable keeps
    /// until that of the next weight replaces it.
    fn root_of_one(&mut self, id: WeightId, bytes: u64, last: &mut Option<Tensor>) -> Tensor {
        self.use_gradients_for_means(&[id]);
        self.layer = self.weights[id as usize].layer;
        let root = self.temporary(bytes);
        let divided = self.temporary(bytes);
        self.release(root);
        if let Some(previous) = last.replace(divided) {
            self.release(previous);
        }
        divided
    }

    fn temporary_for_each(
        &mut self,
        weights: &[WeightId],
        bytes_of: impl Fn(&TensorMachine, WeightId) -> u64,
    ) -> Vec<Tensor> {
        let allocate = |&id: &WeightId| {
            self.layer = self.weights[id as usize].layer;
            self.temporary(bytes_of(self, id))
        };
        weights.iter().map(allocate).collect()
    }

    /// The first mean takes the gradients once (`lerp_`), the second takes them twice (`addcmul_`).
    fn use_gradients_for_means(&mut self, updated: &[WeightId]) {
        self.use_gradients_in_layout(updated, 1);
        self.use_gradients_in_layout(updated, 2);
    }

    /// An operator on these weights that takes the gradients this many times.
    fn use_gradients_in_layout(&mut self, updated: &[WeightId], times: u32) {
        let lists: Vec<Tensor> = (0..times).flat_map(|_| self.gradients_in_layout(updated)).collect();
        lists.into_iter().rev().for_each(|gradient| self.release(gradient));
    }

    fn update_with_sgd(&mut self, updated: &[WeightId]) {
        self.use_gradients_in_layout(updated, 1);
        for &id in updated {
            if let Some((tensor, gradient)) = self.weights[id as usize].updated() {
                let bytes = self.gradient_bytes(id, gradient);
                self.elementwise(3 * bytes, [gradient, tensor]);
            }
        }
    }

    /// One kernel per tensor, without temporaries (`Optimizer2State` of bitsandbytes).
    fn update_with_bitsandbytes(&mut self, updated: &[WeightId]) {
        for &id in updated {
            let elements = self.shard_elements(id);
            if !std::mem::replace(&mut self.weights[id as usize].has_state, true) {
                self.layer = self.weights[id as usize].layer;
                self.weights[id as usize].state = self.bitsandbytes_state(elements);
            }
            let weight = &self.weights[id as usize];
            if let Some((tensor, gradient)) = weight.updated() {
                // Weights, gradients, and both means, read and written.
                let bytes = 3 * self.bytes(gradient) + 4 * elements;
                match *weight.state {
                    [mean, square, ..] => self.elementwise(bytes, [gradient, mean, square, tensor]),
                    _ => self.elementwise(bytes, [gradient, tensor]),
                }
            }
        }
    }

    /// Two means: in 8 bits with a scale for every block of numbers, or in single precision. Large ones may be in unified
    /// memory, which PyTorch's allocator does not see; the trace has them on the host.
    fn bitsandbytes_state(&mut self, elements: u64) -> Vec<Tensor> {
        let single = NumberFormat::Single.bytes();
        let is_wide = self.plan.techniques.optimizer == Optimizer::Adam32Bit || elements < FEWEST_IN_8_BITS;
        let is_paged = self.plan.techniques.pages_states && elements >= FEWEST_PAGED;
        let bytes = if is_wide { elements * single } else { elements };
        if !is_wide && !std::mem::replace(&mut self.has_code_tables, true) {
            // The numbers that the codes of the first and of the second mean stand for.
            (0..2).for_each(|_| {
                self.alloc(NUMBERS_IN_8_BITS * single, Category::Optimizer);
            });
        }
        let mut state = Vec::new();
        for _ in 0..2 {
            if is_paged {
                self.trace.host_alloc(bytes);
            } else {
                state.push(self.alloc(bytes, Category::Optimizer));
            }
        }
        if !is_wide {
            let scales = elements.div_ceil(NUMBERS_PER_SCALE) * single;
            state.extend([(); 2].map(|()| self.alloc(scales, Category::Optimizer)));
        }
        state
    }

    /// The host keeps the state and updates the weights: gradients are copied out, weights are copied in.
    fn update_on_host(&mut self, updated: &[WeightId]) {
        for &id in updated {
            if !std::mem::replace(&mut self.weights[id as usize].has_state, true) {
                // Two means and a single-precision copy of the weight, which FSDP's parts are themselves.
                let bytes = self.shard_elements(id) * NumberFormat::Single.bytes();
                let count = if self.offloads_shards() { 2 } else { 3 };
                (0..count).for_each(|_| {
                    self.trace.host_alloc(bytes);
                });
            }
            let weight = &self.weights[id as usize];
            if let (Some(tensor), Some(gradient)) = (weight.resident(), weight.resident_gradient()) {
                let bytes = self.bytes(gradient);
                self.work(Work::CopyOut { bytes, pinned: true }, [gradient]);
                self.work(Work::CopyIn { bytes, pinned: true }, [tensor]);
            }
        }
        self.trace.stream_sync(StreamId::DEFAULT);
    }

    /// Drops the gradients, or fills them with zeros.
    pub(crate) fn zero_gradients(&mut self) {
        let model = self.model.clone();
        for id in model.update_order() {
            let id = id as usize;
            if let Some(sum) = self.weights[id].gradient_sum {
                self.elementwise(self.bytes(sum), [sum]);
            }
            if !self.plan.techniques.zero_fill
                && let Some(gradient) = self.weights[id].master_gradient.take()
            {
                self.release(gradient);
            }
            let Some(gradient) = self.weights[id].resident_gradient() else { continue };
            if self.plan.techniques.zero_fill {
                let bytes = self.gradient_bytes(id as WeightId, gradient);
                self.elementwise(bytes, [gradient]);
            } else {
                (self.weights[id].gradient, self.weights[id].gradient_shard) = (None, None);
                self.release(gradient);
            }
        }
    }
}

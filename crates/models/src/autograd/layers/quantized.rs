//! Frozen weights of 4 bits, as bitsandbytes (0.50) keeps them: NF4 with double quantisation.
//!
//! Blocks of 64 weights share a scale, and blocks of 256 scales share one more. A product first makes a 16-bit copy of its
//! weight. It saves nothing for backward, which makes such a copy again. bitsandbytes has kernels without that copy for few
//! tokens; which it takes depends on the card, so such programs are refused ([`refuse_few_tokens`]).

use super::{linear::LinearWeights, scratch};
use crate::autograd::{
    graph::{Gradients, GraphOperation, MOST_EDGES, Tensor, Variable, WeightId},
    machine::TensorMachine,
    plan::TrainingPlan,
    techniques::NumberFormat,
    weights::WeightState,
};
use oomph_base::ProductRole;
use oomph_trace::Category;

/// Weights that share a scale.
const BLOCK: u64 = 64;
/// Scales that share a scale.
const BLOCK_OF_SCALES: u64 = 256;
const HALF: u64 = NumberFormat::Half.bytes();
const SINGLE: u64 = NumberFormat::Single.bytes();
/// The 16 values of a 4-bit number, and the 256 of a quantised scale.
const VALUES: u64 = 16 * SINGLE;
const VALUES_OF_SCALES: u64 = 256 * SINGLE;
/// With more tokens every product makes a copy of its weight, and with more than these a large one does
/// (`backends/cuda/ops.py` of bitsandbytes).
const MOST_TOKENS_WITHOUT_COPY: u64 = 1536;
const MOST_TOKENS_OF_LARGE: u64 = 512;
const LARGE: u64 = 4 << 20;

/// Refuses programs with so few tokens that bitsandbytes may take another kernel. `least_elements`: of the smallest weight.
pub(crate) fn refuse_few_tokens(plan: &TrainingPlan, least_elements: u64) -> Result<(), String> {
    let tokens = u64::from(plan.micro_batch()) * u64::from(plan.shape.min_length);
    let most = if least_elements >= LARGE { MOST_TOKENS_OF_LARGE } else { MOST_TOKENS_WITHOUT_COPY };
    match tokens > most {
        true => Ok(()),
        false => Err(format!(
            "4-bit products of {tokens} tokens are not modelled: up to {most} tokens bitsandbytes chooses kernels by card"
        )),
    }
}

fn scales(elements: u64) -> u64 {
    elements.div_ceil(BLOCK)
}

impl TensorMachine {
    /// Loads a model with 4-bit weights and adapters: `from_pretrained` with a `BitsAndBytesConfig`,
    /// `prepare_model_for_kbit_training` and `get_peft_model`.
    pub(crate) fn load_quantized(&mut self) {
        let model = self.model.clone();
        let declared = model.weights();
        self.weights.extend(declared.iter().map(WeightState::of));
        let is_frozen = |id: &WeightId| !declared[*id as usize].trainable;
        let is_parameter = |id: &WeightId| is_frozen(id) && !declared[*id as usize].is_buffer;
        let is_narrow = |id: &WeightId| declared[*id as usize].is_quantized;
        // One request for everything, freed at once, so that the cache has the memory (`caching_allocator_warmup`).
        let all = || 0..declared.len() as WeightId;
        let bytes_of = |id: WeightId| declared[id as usize].elements * HALF / if is_narrow(&id) { 4 } else { 1 };
        let everything = self.temporary(all().filter(is_parameter).map(bytes_of).sum());
        self.release(everything);
        let mut has_map = false;
        for id in model.load_order().into_iter().filter(is_frozen) {
            let weight = &declared[id as usize];
            self.layer = weight.layer;
            let number =
                if weight.is_buffer { weight.number.unwrap_or(NumberFormat::Half) } else { NumberFormat::Half };
            let copy = self.copy_in(weight.elements * number.bytes(), Category::Parameter);
            let tensor = if weight.is_quantized { self.quantise(copy, weight.elements, &mut has_map) } else { copy };
            self.weights[id as usize].tensor = Some(tensor);
        }
        // All other parameters become single precision, and the cache is released (`prepare_model_for_kbit_training`).
        for id in all().filter(is_parameter).filter(|id| !is_narrow(id)) {
            self.widen(id);
        }
        self.trace.empty_cache();
        // Adapters have the format of the model first.
        for id in all().filter(|id| !is_frozen(id)) {
            self.layer = declared[id as usize].layer;
            let half = self.copy_in(declared[id as usize].elements * HALF, Category::Parameter);
            self.weights[id as usize].tensor = Some(half);
        }
        for id in all().filter(|id| !is_frozen(id)) {
            self.widen(id);
        }
        self.layer = None;
    }

    /// A weight in single precision, in the place of its 16-bit copy.
    fn widen(&mut self, id: WeightId) {
        self.layer = self.weights[id as usize].layer;
        let bytes = self.weights[id as usize].elements * SINGLE;
        let single = self.alloc(bytes, Category::Parameter);
        if let Some(half) = self.weights[id as usize].tensor.replace(single) {
            self.elementwise(bytes + bytes / 2, [half, single]);
            self.release(half);
        }
    }

    /// A bias in 16 bits, in the place of its single-precision copy: the first product narrows it for good
    /// (`Linear4bit.forward`).
    fn narrow_once(&mut self, id: WeightId) {
        let bytes = self.weights[id as usize].elements * HALF;
        if let Some(single) = self.weights[id as usize].tensor.filter(|&tensor| self.bytes(tensor) > bytes) {
            let half = self.alloc(bytes, Category::Parameter);
            self.elementwise(3 * bytes, [single, half]);
            self.weights[id as usize].tensor = Some(half);
            self.release(single);
        }
    }

    /// The 4-bit weight of a 16-bit one, which is released. Its scales stay beside it.
    fn quantise(&mut self, half: Tensor, elements: u64, has_map: &mut bool) -> Tensor {
        let scales = scales(elements);
        let of_blocks = self.temporary(scales * SINGLE);
        let narrow = self.alloc(elements.div_ceil(2), Category::Parameter);
        self.elementwise(elements * 3, [half, narrow]);
        let kept = |machine: &mut TensorMachine, bytes: u64| machine.alloc(bytes, Category::Parameter);
        kept(self, VALUES);
        let largest = [VALUES, SINGLE].map(|bytes| self.temporary(bytes));
        self.release_all(largest);
        // The mean of the scales, and how far each is from it.
        kept(self, SINGLE);
        self.reduce_with(scratch::sum_of_all(scales, SINGLE));
        let centred = self.temporary(scales * SINGLE);
        self.elementwise(2 * scales * SINGLE, [of_blocks, centred]);
        if !std::mem::replace(has_map, true) {
            kept(self, VALUES_OF_SCALES);
        }
        kept(self, scales.div_ceil(BLOCK_OF_SCALES) * SINGLE);
        kept(self, scales);
        kept(self, VALUES_OF_SCALES);
        self.release_all([centred, of_blocks, half]);
        narrow
    }

    /// The product of every row with a 4-bit weight, in 16 bits, returned in the format of the input.
    pub(crate) fn quantized_linear(&mut self, input: Variable, linear: LinearWeights) -> Variable {
        let narrow = self.in_format(input, NumberFormat::Half);
        if let Some(bias) = linear.bias {
            self.narrow_once(bias);
        }
        let elements = u64::from(linear.inputs) * u64::from(linear.outputs);
        let of_scales = scales(elements) * SINGLE;
        let unpacked = [(); 2].map(|()| self.temporary(of_scales));
        let weight = self.temporary(elements * HALF);
        self.elementwise(elements * 3, [unpacked[1], weight]);
        let rows = self.size(narrow) / (u64::from(linear.inputs) * HALF);
        let output = self.temporary(rows * u64::from(linear.outputs) * HALF);
        match linear.bias {
            Some(_) => self.ensure_fused_matrix_workspace(),
            None => self.ensure_matrix_workspace(),
        }
        let number = NumberFormat::Half;
        let product = self.matrix_product(ProductRole::Output, rows, linear.outputs.into(), linear.inputs, number);
        self.work(product, [narrow.tensor, weight, output]);
        self.release_all([unpacked[1], unpacked[0], weight]);
        let operation = GraphOperation::QuantizedLinear { inputs: linear.inputs, outputs: linear.outputs };
        let output = self.output_of(output, number, operation, &[narrow]);
        let result = self.in_format(output, input.number);
        self.release_all([output.tensor, narrow.tensor]);
        result
    }

    pub(crate) fn quantized_linear_backward(&mut self, inputs: u32, outputs: u32, incoming: Tensor) -> Gradients {
        let elements = u64::from(inputs) * u64::from(outputs);
        let of_scales = self.temporary(scales(elements) * SINGLE);
        let weight = self.temporary(elements * HALF);
        self.elementwise(elements * 3, [of_scales, weight]);
        self.release(of_scales);
        let rows = self.bytes(incoming) / (u64::from(outputs) * HALF);
        let gradient = self.temporary(rows * u64::from(inputs) * HALF);
        self.ensure_matrix_workspace();
        let work = self.matrix_product(ProductRole::InputGradient, rows, inputs.into(), outputs, NumberFormat::Half);
        self.work(work, [incoming, weight, gradient]);
        self.release(weight);
        let mut gradients = [None; MOST_EDGES];
        gradients[0] = Some(gradient);
        gradients
    }

    /// A copy of a variable (`clone`).
    pub(crate) fn cloned(&mut self, input: Variable) -> Variable {
        let bytes = self.size(input);
        let copy = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [input.tensor, copy]);
        self.output_of(copy, input.number, GraphOperation::Copy, &[input])
    }
}

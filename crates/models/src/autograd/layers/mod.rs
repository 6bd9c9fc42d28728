//! The layers: operators with their forward and backward, as methods of the machine.
//!
//! This file has the elementwise operators: sums, ReLU, scaling, and casts between number formats.

mod attention;
pub(crate) mod convolution;
pub(crate) mod convolution_kernels;
pub(crate) mod embedding;
pub(crate) mod experts;
mod liger;
pub(crate) mod linear;
mod loss;
pub(crate) mod norm;
pub(crate) mod pointwise;
pub(crate) mod quantized;
pub(crate) mod scratch;

use super::{
    graph::{GradientEdge, Gradients, GraphNode, GraphOperation, MOST_EDGES, Tensor, Variable, WeightId},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Bytes of an index: a token, a position, a class, the place of a maximum.
pub(crate) const INDEX: u64 = 8;
/// The keys of attention to a cache are rounded up to this many: one shape of work per length would let the tables of a
/// long trace grow without bound.
pub(crate) const KEYS_STEP: u32 = 64;

/// Where ReLU writes its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReluOutput {
    NewTensor,
    InPlace,
    /// In place, into a view of a larger tensor: backward then has more to do.
    InPlaceIntoView,
}

impl TensorMachine {
    /// The sum of two variables, as wide as the wider one.
    pub(crate) fn add(&mut self, left: Variable, right: Variable, category: Category) -> Variable {
        self.sum(left, right, None, category)
    }

    /// The sum of two variables of one format, written over the first.
    pub(crate) fn add_in_place(&mut self, left: Variable, right: Variable) -> Variable {
        let bytes = self.bytes(left.tensor);
        self.elementwise(3 * bytes, [right.tensor, left.tensor]);
        let operation = GraphOperation::Add { narrowed: [None; 2], broadcast_over: None };
        self.output_of(left.tensor, left.number, operation, &[left, right])
    }

    /// The sum of two variables. The second can be the same for all sequences: then `broadcast_over` is their number.
    pub(crate) fn sum(
        &mut self,
        left: Variable,
        right: Variable,
        broadcast_over: Option<u32>,
        category: Category,
    ) -> Variable {
        [left, right].into_iter().for_each(|operand| self.wait_for_ranks(operand.tensor));
        let number = left.number.max(right.number);
        let (of_left, of_right) = (self.bytes(left.tensor), self.bytes(right.tensor));
        let bytes = of_left / left.number.bytes() * number.bytes();
        let sum = self.alloc(bytes, category);
        self.elementwise(bytes + of_left + of_right, [left.tensor, right.tensor, sum]);
        let narrowed =
            [(left, of_left), (right, of_right)].map(|(part, bytes)| (part.number < number).then_some(bytes));
        self.output_of(sum, number, GraphOperation::Add { narrowed, broadcast_over }, &[left, right])
    }

    /// Both operands get the gradient as it is, unless one is narrower or the second was the same for all sequences.
    pub(crate) fn add_backward(
        &mut self,
        saved: &UnpackedTensors,
        narrowed: [Option<u64>; 2],
        broadcast_over: Option<u32>,
        incoming: Tensor,
    ) -> Gradients {
        let mut gradients = [None; MOST_EDGES];
        let bytes = self.bytes(incoming);
        for (place, narrow) in narrowed.into_iter().enumerate() {
            if !saved.edges[place].is_needed() {
                continue;
            }
            gradients[place] = Some(match (narrow, broadcast_over.filter(|_| place == 1)) {
                (_, Some(sequences)) => {
                    let sum = self.gradient_along(saved.edges[1], bytes / u64::from(sequences));
                    let length = self.graph.length / self.plan.techniques.sequence_ranks();
                    self.sum_rows(sequences.into(), u64::from(length) * u64::from(self.plan.shape.width));
                    self.work(Work::Reduction { bytes }, [incoming, sum]);
                    sum
                }
                (Some(narrow), None) => {
                    let cast = self.temporary(narrow);
                    self.elementwise(bytes + narrow, [incoming, cast]);
                    cast
                }
                (None, None) => self.retain(incoming),
            });
        }
        gradients
    }

    /// The activation. Takes the variable and releases it where the result is a new tensor.
    pub(crate) fn relu(&mut self, input: Variable, output: ReluOutput) -> Variable {
        let bytes = self.bytes(input.tensor);
        let is_new = output == ReluOutput::NewTensor;
        let result = if is_new { self.alloc(bytes, Category::Activation) } else { input.tensor };
        self.elementwise(2 * bytes, [input.tensor, result]);
        self.save_for(&[input], [result]);
        let operation = match output {
            ReluOutput::InPlaceIntoView => GraphOperation::ReluIntoView,
            ReluOutput::NewTensor | ReluOutput::InPlace => GraphOperation::Pointwise,
        };
        let result = self.output_of(result, input.number, operation, &[input]);
        if is_new {
            self.release(input.tensor);
        }
        result
    }

    /// The activation of an MLP, which calls it on a view.
    pub(crate) fn mlp_relu(&mut self, input: Variable) -> Variable {
        let in_place = self.plan.techniques.in_place;
        self.relu(input, if in_place { ReluOutput::InPlaceIntoView } else { ReluOutput::NewTensor })
    }

    /// PyTorch rebuilds the gradient of the whole tensor: the view's gradient in its own memory, a copy to change, the
    /// view's part of it, and the gradient of the activation. Releases `incoming`.
    pub(crate) fn relu_into_view_backward(&mut self, node: &GraphNode, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let view = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, view]);
        self.release(incoming);
        let whole = self.temporary(bytes);
        self.elementwise(2 * bytes, [view, whole]);
        let part = self.temporary(bytes);
        self.elementwise(2 * bytes, [whole, part]);
        let mut saved = self.unpack(node);
        let gradient = self.temporary(bytes);
        self.elementwise(3 * bytes, [part, saved.operand(0, part), gradient]);
        self.release_unpacked(&mut saved);
        self.release(part);
        self.elementwise(2 * bytes, [gradient, whole]);
        self.release_all([gradient, view]);
        whole
    }

    /// A variable times a constant.
    pub(crate) fn scale(&mut self, input: Variable) -> Variable {
        let bytes = self.size(input);
        let scaled = self.temporary(bytes);
        self.elementwise(2 * bytes, [input.tensor, scaled]);
        self.output_of(scaled, input.number, GraphOperation::Scale, &[input])
    }

    /// The gradient times the same constant.
    pub(crate) fn scale_backward(&mut self, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let gradient = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, gradient]);
        gradient
    }

    /// A weight as products take it, and whether it was cast for this product alone. Autocast keeps the copies of
    /// trainable weights until it ends and casts frozen weights again for every product.
    pub(crate) fn product_weight(&mut self, weight: WeightId) -> (Variable, bool) {
        let tensor = self.weight_on_device(weight);
        let part = Some(self.weight_bytes(weight, tensor));
        let plain = Variable { part, ..Variable::constant(tensor, self.weight_number(weight)) };
        if !self.plan.precision.is_autocast() {
            return (plain, false);
        }
        if let Some(cast) = self.weights[weight as usize].cast {
            return (cast, false);
        }
        let trainable = self.weights[weight as usize].trainable;
        let to = if trainable { GradientEdge::Weight(weight) } else { GradientEdge::None };
        let cast = self.cast(plain, NumberFormat::Half, to, Category::Parameter);
        if trainable {
            self.weights[weight as usize].cast = Some(cast);
            self.cast_weights.push(weight);
        }
        (cast, !trainable)
    }

    /// A variable as products take it: cast under autocast, otherwise unchanged.
    pub(crate) fn cast_for_product(&mut self, input: Variable) -> Variable {
        if self.plan.precision.is_autocast() && input.number == NumberFormat::Single {
            self.cast(input, NumberFormat::Half, input.edge(), Category::Activation)
        } else {
            input
        }
    }

    /// A variable in another format. `to` is where its gradient goes.
    pub(crate) fn cast(
        &mut self,
        input: Variable,
        number: NumberFormat,
        to: GradientEdge,
        category: Category,
    ) -> Variable {
        let bytes = self.size(input);
        let to_bytes = bytes / input.number.bytes() * number.bytes();
        let cast = self.alloc(to_bytes, self.category_after(input.tensor, category));
        self.elementwise(bytes + to_bytes, [input.tensor, cast]);
        let records = self.records(input.needs_gradient() || to.is_needed());
        self.output(cast, number, records, GraphOperation::Cast { bytes }, &[to])
    }

    /// A variable in a format: cast, or one more reference where it has that format.
    pub(crate) fn in_format(&mut self, input: Variable, number: NumberFormat) -> Variable {
        if input.number == number {
            self.retain(input.tensor);
            return input;
        }
        self.cast(input, number, input.edge(), Category::Activation)
    }

    /// The gradient in the format before the cast.
    pub(crate) fn cast_backward(&mut self, to: GradientEdge, bytes: u64, incoming: Tensor) -> Tensor {
        let is_of_ranks = self.is_of_ranks(incoming);
        if is_of_ranks && !std::mem::replace(&mut self.has_shape_of_cast, true) {
            // DTensor learns the shape of a result from a tensor without memory. The first such tensor on a GPU is this one,
            // and before it one number is allocated (`init_gpu_context`).
            self.scratch(NumberFormat::Single.bytes(), incoming);
        }
        let gradient = match self.category_after(incoming, Category::Temporary) {
            Category::Logits => self.alloc(bytes, Category::Logits),
            _ => self.gradient_along(to, bytes),
        };
        let traffic = self.bytes(incoming) + bytes;
        self.elementwise(traffic, [incoming, gradient]);
        if is_of_ranks {
            // Autograd adds to no tensor subclass in place (`can_accumulate_inplace`).
            self.becomes_view(gradient);
        }
        gradient
    }

    /// Whether the gradient of a cast is a DTensor: the operands of products are, which autocast casts; logits are not. Heads
    /// are not either, but nothing is added to their gradients, and the operands of the head come before them.
    fn is_of_ranks(&self, incoming: Tensor) -> bool {
        self.plan.techniques.splits_sequences
            && self.plan.precision.is_autocast()
            && self.category_after(incoming, Category::Temporary) != Category::Logits
    }

    /// The place of the largest number of every row (`argmax`).
    pub(crate) fn largest_of_rows(&mut self, input: Tensor, rows: u64, columns: u64) -> Tensor {
        let places = self.alloc(INDEX * rows, Category::Input);
        if let Some(scratch) = scratch::argmax_of_rows(rows, columns) {
            let partial = self.alloc(scratch.partial_sums, Category::Workspace);
            let counters = self.alloc(scratch.counters, Category::Workspace);
            self.release_all([counters, partial]);
        }
        self.work(Work::Reduction { bytes: self.bytes(input) }, [input, places]);
        places
    }

    /// Ends autocast: copies of weights that the graph did not save are freed.
    pub(crate) fn end_autocast(&mut self) {
        for place in 0..self.cast_weights.len() {
            let weight = self.cast_weights[place];
            if let Some(cast) = self.weights[weight as usize].cast.take() {
                self.release(cast.tensor);
            }
        }
        self.cast_weights.clear();
    }
}

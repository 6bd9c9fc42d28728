//! What stands between the convolutions: batch norm, the activation, the two poolings.

use super::super::{
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    saving::Form,
    weights::{NormWeights, WeightId},
};
use oomph_base::Work;
use oomph_trace::Category;

/// Bytes of the place of a maximum.
const PLACE: u64 = 8;

/// Whether the activation writes over its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activation {
    InPlace,
    Separate,
}

/// Batch norm: scale and shift, and the running statistics that no gradient reaches.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchNorm {
    pub(super) weights: NormWeights,
    pub(super) running: [WeightId; 2],
    pub(super) channels: u32,
}

/// A mean over whole images, for its backward.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Pooled {
    /// Pixels that became one.
    pixels: u64,
}

impl Machine {
    /// Normalises every channel over all images.
    pub(super) fn batch_norm(&mut self, input: Value, norm: BatchNorm) -> Value {
        let records = self.records(true);
        let first_saved = self.begin_saving();
        if records {
            self.save(input.tensor, Form::Dense);
            for weight in [norm.weights.scale, norm.running[0], norm.running[1]] {
                self.save_weight(weight, false);
            }
        }
        let bytes = self.bytes(input.tensor);
        let output = self.alloc(bytes, Category::Activation);
        let of_channels = u64::from(norm.channels) * Number::Single.bytes();
        let [mean, deviation] = [(); 2].map(|()| self.alloc(of_channels, Category::Activation));
        self.work(Work::Reduction { bytes }, [input.tensor, mean, deviation]);
        self.elementwise(2 * bytes, [input.tensor, output]);
        let origin = if records {
            self.save(mean, Form::Dense);
            self.save(deviation, Form::Dense);
            let edges = [input.origin.edge(), Edge::Weight(norm.weights.scale), Edge::Weight(norm.weights.shift)];
            self.record(Operation::BatchNorm, first_saved, edges)
        } else {
            Origin::Constant
        };
        self.release_all([mean, deviation]);
        Value { tensor: output, number: input.number, origin }
    }

    /// The gradients of input, scale and shift.
    pub(in super::super) fn batch_norm_backward(
        &mut self,
        node: &Node,
        incoming: Tensor,
    ) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let input = saved.operand(0, incoming);
        let [_, to_scale, to_shift] = node.edges;
        let bytes = self.bytes(incoming);
        let of_input = self.temporary(bytes);
        let [of_scale, of_shift] = [to_scale, to_shift].map(|edge| {
            let of_weight = match edge {
                Edge::Weight(weight) => self.weights[weight as usize].elements * Number::Single.bytes(),
                Edge::Value(_) | Edge::Nowhere => 0,
            };
            self.gradient_along(edge, of_weight)
        });
        self.work(Work::Reduction { bytes: 2 * bytes }, [incoming, input, of_scale, of_shift]);
        self.elementwise(3 * bytes, [incoming, input, of_input]);
        self.drop_unpacked(&saved);
        [Some(of_input), Some(of_scale), Some(of_shift)]
    }

    /// The activation; takes the value.
    pub(super) fn activate(&mut self, value: Value, activation: Activation) -> Value {
        let bytes = self.bytes(value.tensor);
        let output = match activation {
            Activation::InPlace => value.tensor,
            Activation::Separate => self.alloc(bytes, Category::Activation),
        };
        self.elementwise(2 * bytes, [value.tensor, output]);
        let origin = if self.records(value.origin.needs_gradient()) {
            let first_saved = self.begin_saving();
            self.save(output, Form::Dense);
            self.record(Operation::Relu, first_saved, [value.origin.edge(), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        if activation == Activation::Separate {
            self.release(value.tensor);
        }
        Value { tensor: output, number: value.number, origin }
    }

    /// The largest of every three by three pixels, at every second pixel; keeps where they were.
    pub(super) fn max_pool(&mut self, images: Value, numbers: u64) -> Value {
        let number = images.number;
        let records = self.records(images.origin.needs_gradient());
        let first_saved = self.begin_saving();
        if records {
            self.save(images.tensor, Form::Dense);
        }
        let output = self.alloc(numbers * number.bytes(), Category::Activation);
        let places = self.alloc(numbers * PLACE, Category::Activation);
        let traffic = self.bytes(images.tensor) + self.bytes(output) + self.bytes(places);
        self.elementwise(traffic, [images.tensor, places, output]);
        let origin = if records {
            self.save(places, Form::Dense);
            self.record(Operation::MaxPool, first_saved, [images.origin.edge(), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        self.release(places);
        Value { tensor: output, number, origin }
    }

    /// Zeros, and each gradient at the place of its maximum.
    pub(in super::super) fn max_pool_backward(&mut self, node: &Node, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let (images, places) = (saved.operand(0, incoming), saved.operand(1, incoming));
        let gradient = self.temporary(self.bytes(images));
        let traffic = self.bytes(gradient) + self.bytes(incoming) + self.bytes(places);
        self.elementwise(traffic, [incoming, places, gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    /// The mean of every image's channels, of so many pixels each.
    pub(super) fn mean_pool(&mut self, images: Value, pixels: u64) -> Value {
        let bytes = self.bytes(images.tensor);
        let output = self.alloc(bytes / pixels, Category::Activation);
        self.work(Work::Reduction { bytes }, [images.tensor, output]);
        let origin = if self.records(images.origin.needs_gradient()) {
            let first_saved = self.begin_saving();
            let edges = [images.origin.edge(), Edge::Nowhere, Edge::Nowhere];
            self.record(Operation::MeanPool(Pooled { pixels }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { tensor: output, number: images.number, origin }
    }

    /// The gradient of a mean, for every pixel of it.
    pub(in super::super) fn mean_pool_backward(&mut self, pooled: Pooled, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming) * pooled.pixels;
        let gradient = self.temporary(bytes);
        self.elementwise(bytes, [incoming, gradient]);
        gradient
    }
}

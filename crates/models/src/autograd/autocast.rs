//! Casts: autocast's copies of weights and inputs for products, and changes of number format in general.

use super::{
    graph::{Edge, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    weights::WeightId,
};
use oomph_trace::Category;

/// A change of number format, for its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cast {
    /// Bytes of what was cast.
    bytes: u64,
}

impl Machine {
    /// A weight as products take it, and whether it was cast for this one product: trainable ones are cast once for as
    /// long as autocast lasts.
    pub(super) fn product_weight(&mut self, weight: WeightId) -> (Value, bool) {
        let tensor = self.weight_on_device(weight);
        let plain = Value { tensor, number: self.plan.precision.of_weights(), origin: Origin::Constant };
        if !self.plan.precision.is_autocast() {
            return (plain, false);
        }
        if let Some(cast) = self.weights[weight as usize].cast {
            return (cast, false);
        }
        let trainable = self.weights[weight as usize].trainable;
        let to = if trainable { Edge::Weight(weight) } else { Edge::Nowhere };
        let cast = self.cast(plain, Number::Half, to, Category::Parameter);
        if trainable {
            self.weights[weight as usize].cast = Some(cast);
            self.cast_weights.push(weight);
        }
        (cast, !trainable)
    }

    /// A value as products take it; the same one where nothing is to be done.
    pub(super) fn cast_for_product(&mut self, value: Value) -> Value {
        if self.plan.precision.is_autocast() && value.number == Number::Single {
            self.cast(value, Number::Half, value.origin.edge(), Category::Activation)
        } else {
            value
        }
    }

    /// A value in another format. `to` is where its gradient goes.
    pub(super) fn cast(&mut self, value: Value, number: Number, to: Edge, category: Category) -> Value {
        let bytes = self.bytes(value.tensor);
        let to_bytes = bytes / value.number.bytes() * number.bytes();
        let cast = self.alloc(to_bytes, category);
        self.elementwise(bytes + to_bytes, [value.tensor, cast]);
        let needs_gradient = value.origin.needs_gradient() || to != Edge::Nowhere;
        let origin = if self.records(needs_gradient) {
            let first_saved = self.begin_saving();
            self.record(Operation::Cast(Cast { bytes }), first_saved, [to, Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        Value { tensor: cast, number, origin }
    }

    /// The gradient in the format that was cast from.
    pub(super) fn cast_backward(&mut self, node: &Node, cast: Cast, incoming: Tensor) -> Tensor {
        let gradient = self.gradient_along(node.edges[0], cast.bytes);
        let traffic = self.bytes(incoming) + cast.bytes;
        self.elementwise(traffic, [incoming, gradient]);
        gradient
    }

    /// Autocast ends: its copies of weights live on only where the graph saved them.
    pub(super) fn forget_casts(&mut self) {
        for place in 0..self.cast_weights.len() {
            let weight = self.cast_weights[place];
            if let Some(cast) = self.weights[weight as usize].cast.take() {
                self.release(cast.tensor);
            }
        }
        self.cast_weights.clear();
    }
}

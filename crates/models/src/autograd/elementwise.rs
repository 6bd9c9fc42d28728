//! Operators that go over their operands once: residual sums, the activation, scaling.

use super::{
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    saving::Form,
};
use oomph_base::Work;
use oomph_trace::Category;

/// A sum, for its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Add {
    /// Where the second operand is narrower: the bytes of its own gradient.
    narrowed: Option<u64>,
    /// Where the second operand is the same for every sequence: how many there are.
    broadcast_over: Option<u32>,
}

impl Machine {
    /// The sum of two values, as wide as the wider one.
    pub(super) fn add(&mut self, left: Value, right: Value, category: Category) -> Value {
        self.sum(left, right, None, category)
    }

    /// The sum of rows of every sequence with rows that are the same for all.
    pub(super) fn add_to_every_sequence(&mut self, rows: Value, shared: Value) -> Value {
        self.sum(rows, shared, Some(self.graph.sequences), Category::Activation)
    }

    /// The sum of two values of one format, written over the first.
    pub(super) fn add_in_place(&mut self, left: Value, right: Value) -> Value {
        let bytes = self.bytes(left.tensor);
        self.elementwise(3 * bytes, [right.tensor, left.tensor]);
        let origin = if self.records(left.origin.needs_gradient() || right.origin.needs_gradient()) {
            let edges = [left.origin.edge(), right.origin.edge(), Edge::Nowhere];
            let first_saved = self.begin_saving();
            self.record(Operation::Add(Add { narrowed: None, broadcast_over: None }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { origin, ..left }
    }

    fn sum(&mut self, left: Value, right: Value, broadcast_over: Option<u32>, category: Category) -> Value {
        let number = left.number.max(right.number);
        let (of_left, of_right) = (self.bytes(left.tensor), self.bytes(right.tensor));
        let bytes = of_left / left.number.bytes() * number.bytes();
        let sum = self.alloc(bytes, category);
        self.elementwise(bytes + of_left + of_right, [left.tensor, right.tensor, sum]);
        let origin = if self.records(left.origin.needs_gradient() || right.origin.needs_gradient()) {
            let narrowed = (right.number < number).then_some(of_right);
            let edges = [left.origin.edge(), right.origin.edge(), Edge::Nowhere];
            let first_saved = self.begin_saving();
            self.record(Operation::Add(Add { narrowed, broadcast_over }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { tensor: sum, number, origin }
    }

    /// Both operands get the gradient as it is, unless the second is narrower or was the same for all sequences.
    pub(super) fn add_backward(&mut self, node: &Node, add: Add, incoming: Tensor) -> [Option<Tensor>; MOST_EDGES] {
        let [to_left, to_right, _] = node.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_left != Edge::Nowhere {
            gradients[0] = Some(self.retain(incoming));
        }
        if to_right == Edge::Nowhere {
            return gradients;
        }
        let bytes = self.bytes(incoming);
        gradients[1] = Some(if let Some(sequences) = add.broadcast_over {
            let of_shared = bytes / u64::from(sequences);
            let sum = self.temporary(of_shared);
            self.sum_rows(sequences.into(), u64::from(self.graph.length) * u64::from(self.plan.shape.width));
            self.work(Work::Reduction { bytes }, [incoming, sum]);
            sum
        } else if let Some(narrow) = add.narrowed {
            let cast = self.temporary(narrow);
            self.elementwise(bytes + narrow, [incoming, cast]);
            cast
        } else {
            self.retain(incoming)
        });
        gradients
    }

    /// The activation; takes the value, and gives it back changed where it works in place.
    pub(super) fn relu(&mut self, value: Value) -> Value {
        let in_place = self.plan.techniques.in_place;
        let bytes = self.bytes(value.tensor);
        let records = self.records(value.origin.needs_gradient());
        let output = if in_place { value.tensor } else { self.alloc(bytes, Category::Activation) };
        self.elementwise(2 * bytes, [value.tensor, output]);
        let first_saved = self.begin_saving();
        let origin = if records {
            self.save(output, Form::Dense);
            let operation = if in_place { Operation::ReluInPlace } else { Operation::Relu };
            self.record(operation, first_saved, [value.origin.edge(), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        if !in_place {
            self.release(value.tensor);
        }
        Value { tensor: output, number: value.number, origin }
    }

    /// The gradient where the result was above zero.
    pub(super) fn relu_backward(&mut self, node: &Node, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let bytes = self.bytes(incoming);
        let gradient = self.temporary(bytes);
        self.elementwise(3 * bytes, [incoming, saved.operand(0, incoming), gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    /// Written in place into a view, so PyTorch rebuilds the gradient of the whole: the view's gradient in memory of its
    /// own, a copy to change, the part's copy, and the activation's gradient of it. Takes `incoming`.
    pub(super) fn relu_in_place_backward(&mut self, node: &Node, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let view = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, view]);
        self.release(incoming);
        let whole = self.temporary(bytes);
        self.elementwise(2 * bytes, [view, whole]);
        let part = self.temporary(bytes);
        self.elementwise(2 * bytes, [whole, part]);
        let saved = self.unpack(node);
        let gradient = self.temporary(bytes);
        self.elementwise(3 * bytes, [part, saved.operand(0, part), gradient]);
        self.drop_unpacked(&saved);
        self.release(part);
        self.elementwise(2 * bytes, [gradient, whole]);
        self.release_all([gradient, view]);
        whole
    }

    /// A value times a constant.
    pub(super) fn scale(&mut self, value: Value) -> Value {
        let bytes = self.bytes(value.tensor);
        let scaled = self.temporary(bytes);
        self.elementwise(2 * bytes, [value.tensor, scaled]);
        let origin = if self.records(value.origin.needs_gradient()) {
            let first_saved = self.begin_saving();
            self.record(Operation::Scale, first_saved, [value.origin.edge(), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        Value { tensor: scaled, origin, ..value }
    }

    /// The gradient times the same constant.
    pub(super) fn scale_backward(&mut self, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let gradient = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, gradient]);
        gradient
    }
}

//! Layer norm: saves its input, and the mean and deviation of each row.

use super::{
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    saving::Form,
    scratch,
    weights::NormWeights,
};
use oomph_base::Work;
use oomph_trace::Category;

/// A norm, for its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    weights: NormWeights,
}

/// The places of what it saves, in the order in which PyTorch names them.
const SAVED_INPUT: usize = 1;

impl Machine {
    /// Normalises every row.
    pub(super) fn norm(&mut self, input: Value, weights: NormWeights) -> Value {
        let trainable = self.weights[weights.scale as usize].trainable;
        let records = self.records(trainable || input.origin.needs_gradient());
        let first_saved = self.begin_saving();
        if records {
            self.save_weight(weights.shift, false);
            self.save(input.tensor, Form::Dense);
            self.save_weight(weights.scale, false);
        }
        let bytes = self.bytes(input.tensor);
        let output = self.alloc(bytes, Category::Activation);
        // Statistics are single precision whatever the rows are.
        let of_rows = self.tokens() * Number::Single.bytes();
        let [mean, deviation] = [(); 2].map(|()| self.alloc(of_rows, Category::Activation));
        self.elementwise(2 * bytes, [input.tensor, output]);
        if records {
            self.save(mean, Form::Dense);
            self.save(deviation, Form::Dense);
        }
        self.release_all([mean, deviation]);
        let origin = if records {
            let to = |weight| if trainable { Edge::Weight(weight) } else { Edge::Nowhere };
            let edges = [input.origin.edge(), to(weights.scale), to(weights.shift)];
            self.record(Operation::Norm(Norm { weights }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { tensor: output, number: input.number, origin }
    }

    /// The gradients of input, scale and shift.
    pub(super) fn norm_backward(&mut self, node: &Node, norm: Norm, incoming: Tensor) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let bytes = self.bytes(incoming);
        let [to_input, to_scale, to_shift] = node.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_input != Edge::Nowhere {
            let of_input = self.temporary(bytes);
            self.elementwise(3 * bytes, [incoming, saved.operand(SAVED_INPUT, incoming), of_input]);
            gradients[0] = Some(of_input);
        }
        if to_scale != Edge::Nowhere {
            let width = u64::from(self.plan.shape.width);
            let of_weight =
                self.weights[norm.weights.scale as usize].elements * self.plan.precision.of_weights().bytes();
            let of_scale = self.gradient_along(to_scale, of_weight);
            let of_shift = self.gradient_along(to_shift, of_weight);
            self.work(Work::Reduction { bytes: 2 * bytes }, [incoming, saved.operand(SAVED_INPUT, incoming), of_scale]);
            if let Some(rows) = scratch::norm_partial_rows(self.tokens(), width) {
                let [scale_rows, shift_rows] = [(); 2].map(|()| self.temporary(rows * of_weight));
                self.release_all([shift_rows, scale_rows]);
            }
            (gradients[1], gradients[2]) = (Some(of_scale), Some(of_shift));
        }
        self.drop_unpacked(&saved);
        gradients
    }
}

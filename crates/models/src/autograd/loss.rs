//! The loss: cross-entropy of the logits, or the output head and the loss in one, chunk by chunk.

use super::{
    embedding::INDEX,
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    saving::Form,
    weights::Linear,
};
use oomph_base::{ProductRole, Work};
use oomph_trace::Category;

/// The place among what the likelihood saves.
const SAVED_LOG_PROBABILITIES: usize = 0;

impl Machine {
    /// Cross-entropy against `target`, the token numbers.
    pub(super) fn cross_entropy(&mut self, logits: Value, target: Tensor) -> Value {
        let bytes = self.bytes(logits.tensor);
        let first_saved = self.begin_saving();
        let log_probabilities = self.alloc(bytes, Category::Activation);
        self.elementwise(3 * bytes, [logits.tensor, log_probabilities]);
        let origin = if self.records(logits.origin.needs_gradient()) {
            self.save(log_probabilities, Form::Dense);
            self.record(Operation::LogSoftmax, first_saved, [logits.origin.edge(), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        let log_probabilities = Value { tensor: log_probabilities, number: logits.number, origin };
        // Autocast runs the likelihood in single precision, but not the softmax that cross-entropy calls by itself.
        let is_widened = self.plan.precision.is_autocast() && logits.number == Number::Half;
        let wide = if is_widened {
            self.cast(log_probabilities, Number::Single, origin.edge(), Category::Activation)
        } else {
            log_probabilities
        };
        let loss = self.negative_log_likelihood(wide, target);
        if is_widened {
            self.release(wide.tensor);
        }
        self.release(log_probabilities.tensor);
        loss
    }

    fn negative_log_likelihood(&mut self, log_probabilities: Value, target: Tensor) -> Value {
        let number = log_probabilities.number;
        let records = self.records(log_probabilities.origin.needs_gradient());
        let first_saved = self.begin_saving();
        if records {
            self.save(log_probabilities.tensor, Form::Dense);
            self.save(target, Form::Dense);
        }
        let [loss, total_weight] = [(); 2].map(|()| self.alloc(number.bytes(), Category::Activation));
        self.work(Work::Reduction { bytes: self.tokens() * (INDEX + 32) }, [log_probabilities.tensor, target, loss]);
        let origin = if records {
            self.save(total_weight, Form::Dense);
            let edges = [log_probabilities.origin.edge(), Edge::Nowhere, Edge::Nowhere];
            self.record(Operation::NegativeLogLikelihood, first_saved, edges)
        } else {
            Origin::Constant
        };
        self.release(total_weight);
        Value { tensor: loss, number, origin }
    }

    /// Zeros, and one number a row.
    pub(super) fn negative_log_likelihood_backward(&mut self, node: &Node, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let bytes = self.bytes(saved.operand(SAVED_LOG_PROBABILITIES, incoming));
        let gradient = self.temporary(bytes);
        self.elementwise(bytes, [saved.operand(1, incoming), incoming, gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    /// The gradient of the logits.
    pub(super) fn log_softmax_backward(&mut self, node: &Node, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let bytes = self.bytes(incoming);
        let gradient = self.temporary(bytes);
        self.elementwise(3 * bytes, [incoming, saved.operand(0, incoming), gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    /// The output head and the loss in one, for some rows at a time: no more than a chunk of logits ever exists, and the
    /// gradients of rows and weight are made on the way.
    pub(super) fn fused_loss(&mut self, input: Value, head: &Linear, target: Tensor, chunks: u32) -> Value {
        let rows = self.cast_for_product(input);
        let (weight, is_own_weight) = self.product_weight(head.weight);
        let number = rows.number;
        let tokens = self.tokens();
        let records = self.records(input.origin.needs_gradient());
        let trainable = self.weights[head.weight as usize].trainable;
        let loss = self.alloc(Number::Single.bytes(), Category::Activation);
        let row_losses = self.temporary(tokens * Number::Single.bytes());
        let of_rows = records.then(|| self.alloc(self.bytes(rows.tensor), Category::Activation));
        let to_weight = match weight.origin {
            Origin::Recorded(place) => Edge::Value(place),
            Origin::Constant | Origin::Recomputed if records && trainable => Edge::Weight(head.weight),
            Origin::Constant | Origin::Recomputed => Edge::Nowhere,
        };
        let of_weight = (to_weight != Edge::Nowhere).then(|| self.gradient_along(to_weight, self.bytes(weight.tensor)));
        let rows_per_chunk = tokens.div_ceil(chunks.into());
        let (outputs, inputs) = (u64::from(head.outputs), head.inputs);
        for first_row in (0..tokens).step_by(rows_per_chunk as usize) {
            let chunk_tokens = rows_per_chunk.min(tokens - first_row);
            let bytes = chunk_tokens * outputs * number.bytes();
            let logits = self.temporary(bytes);
            self.ensure_matrix_workspace();
            self.work(
                self.gemm(ProductRole::Output, chunk_tokens, outputs, inputs, number),
                [rows.tensor, weight.tensor, logits],
            );
            self.elementwise(3 * bytes, [target, logits, row_losses]);
            if let Some(of_rows) = of_rows {
                let work = self.gemm(ProductRole::InputGradient, chunk_tokens, inputs.into(), head.outputs, number);
                self.work(work, [logits, weight.tensor, of_rows]);
            }
            if let Some(of_weight) = of_weight {
                let work = self.gemm(ProductRole::WeightGradient, outputs, inputs.into(), chunk_tokens as u32, number);
                self.work(work, [logits, rows.tensor, of_weight]);
            }
            self.release(logits);
        }
        self.work(Work::Reduction { bytes: tokens * Number::Single.bytes() }, [row_losses, loss]);
        self.release(row_losses);
        let first_saved = self.begin_saving();
        for gradient in [of_rows, of_weight].into_iter().flatten() {
            self.save(gradient, Form::Dense);
            self.release(gradient);
        }
        let origin = if records {
            self.record(Operation::FusedLoss, first_saved, [rows.origin.edge(), to_weight, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        if rows.tensor != input.tensor {
            self.release(rows.tensor);
        }
        if is_own_weight {
            self.release(weight.tensor);
        }
        Value { tensor: loss, number: Number::Single, origin }
    }

    /// What forward made, scaled in place by the gradient of the loss and handed on.
    pub(super) fn fused_loss_backward(&mut self, node: &Node, incoming: Tensor) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let mut gradients = [None; MOST_EDGES];
        for (place, gradient) in gradients.iter_mut().enumerate().take(usize::from(node.saved_count)) {
            let made = saved.operand(place, incoming);
            let bytes = self.bytes(made);
            self.elementwise(2 * bytes, [incoming, made]);
            *gradient = Some(self.retain(made));
        }
        self.drop_unpacked(&saved);
        gradients
    }
}

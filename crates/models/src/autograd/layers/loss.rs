//! The loss: cross-entropy of the logits, or the output head and the loss in one, chunk by chunk.

use super::{INDEX, linear::LinearWeights};
use crate::autograd::{
    graph::{GradientEdge, Gradients, GraphOperation, MOST_EDGES, Tensor, Variable},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{ProductRole, Work};
use oomph_trace::Category;

impl TensorMachine {
    /// Cross-entropy against `target`, the indices of tokens or classes.
    pub(crate) fn cross_entropy(&mut self, logits: Variable, target: Tensor) -> Variable {
        let bytes = self.size(logits);
        let log_probabilities = self.alloc(bytes, Category::Logits);
        if logits.part.is_some() {
            // The kernel takes rows without gaps (`host_softmax`).
            self.scratch(bytes, logits.tensor);
        }
        self.elementwise(3 * bytes, [logits.tensor, log_probabilities]);
        self.save_for(&[logits], [log_probabilities]);
        let log_probabilities = self.output_of(log_probabilities, logits.number, GraphOperation::Pointwise, &[logits]);
        // Autocast runs the likelihood in single precision, but not the softmax that cross-entropy calls itself.
        let is_widened = self.plan.precision.is_autocast() && logits.number == NumberFormat::Half;
        let wide = if is_widened {
            self.cast(log_probabilities, NumberFormat::Single, log_probabilities.edge(), Category::Activation)
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

    fn negative_log_likelihood(&mut self, log_probabilities: Variable, target: Tensor) -> Variable {
        let number = log_probabilities.number;
        self.save_for(&[log_probabilities], [log_probabilities.tensor]);
        if self.records(log_probabilities.needs_gradient()) {
            // Targets may be a part of a padded tensor.
            let part = Some(self.bytes(target).min(INDEX * self.tokens()));
            self.save_variable(Variable { part, ..Variable::constant(target, number) });
        }
        let [loss, total_weight] = [(); 2].map(|()| self.alloc(number.bytes(), Category::Activation));
        self.work(Work::Reduction { bytes: self.tokens() * (INDEX + 32) }, [log_probabilities.tensor, target, loss]);
        self.save_for(&[log_probabilities], [total_weight]);
        let loss = self.output_of(loss, number, GraphOperation::NegativeLogLikelihood, &[log_probabilities]);
        self.release(total_weight);
        loss
    }

    /// Zeros, and one number per row.
    pub(crate) fn negative_log_likelihood_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(saved.operand(0, incoming));
        let gradient = self.alloc(bytes, Category::Logits);
        self.elementwise(bytes, [saved.operand(1, incoming), incoming, gradient]);
        gradient
    }

    /// The output head and the loss in one, for some rows at a time: only one chunk of logits is live, and forward makes
    /// the gradients of rows and weight.
    pub(crate) fn fused_loss(
        &mut self,
        input: Variable,
        head: &LinearWeights,
        target: Tensor,
        chunks: u32,
    ) -> Variable {
        let rows = self.cast_for_product(input);
        let (weight, is_own_weight) = self.product_weight(head.weight);
        let number = rows.number;
        let tokens = self.tokens();
        let records = self.records(input.needs_gradient());
        let trainable = self.weights[head.weight as usize].trainable;
        let loss = self.alloc(NumberFormat::Single.bytes(), Category::Activation);
        let row_losses = self.temporary(tokens * NumberFormat::Single.bytes());
        let of_rows = records.then(|| self.alloc(self.bytes(rows.tensor), Category::Activation));
        let to_weight = match weight.edge() {
            GradientEdge::None if records && trainable => GradientEdge::Weight(head.weight),
            edge => edge,
        };
        let of_weight = to_weight.is_needed().then(|| self.gradient_along(to_weight, self.bytes(weight.tensor)));
        let rows_per_chunk = tokens.div_ceil(chunks.into());
        let (outputs, inputs) = (u64::from(head.outputs), head.inputs);
        for first_row in (0..tokens).step_by(rows_per_chunk as usize) {
            let chunk_tokens = rows_per_chunk.min(tokens - first_row);
            let bytes = chunk_tokens * outputs * number.bytes();
            let logits = self.alloc(bytes, Category::Logits);
            self.ensure_matrix_workspace();
            self.work(
                self.matrix_product(ProductRole::Output, chunk_tokens, outputs, inputs, number),
                [rows.tensor, weight.tensor, logits],
            );
            self.elementwise(3 * bytes, [target, logits, row_losses]);
            if let Some(of_rows) = of_rows {
                let work =
                    self.matrix_product(ProductRole::InputGradient, chunk_tokens, inputs.into(), head.outputs, number);
                self.work(work, [logits, weight.tensor, of_rows]);
            }
            if let Some(of_weight) = of_weight {
                let work = self.matrix_product(
                    ProductRole::WeightGradient,
                    outputs,
                    inputs.into(),
                    chunk_tokens as u32,
                    number,
                );
                self.work(work, [logits, rows.tensor, of_weight]);
            }
            self.release(logits);
        }
        self.work(Work::Reduction { bytes: tokens * NumberFormat::Single.bytes() }, [row_losses, loss]);
        self.release(row_losses);
        for gradient in [of_rows, of_weight].into_iter().flatten() {
            self.save(gradient);
            self.release(gradient);
        }
        let edges = [rows.edge(), to_weight];
        let loss = self.output(loss, NumberFormat::Single, records, GraphOperation::FusedLoss, &edges);
        if rows.tensor != input.tensor {
            self.release(rows.tensor);
        }
        if is_own_weight {
            self.release(weight.tensor);
        }
        loss
    }

    /// The gradients that forward made, scaled in place by the gradient of the loss.
    pub(crate) fn fused_loss_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Gradients {
        let mut gradients = [None; MOST_EDGES];
        for (gradient, &made) in gradients.iter_mut().zip(saved.tensors.iter().flatten()) {
            let bytes = self.bytes(made);
            self.elementwise(2 * bytes, [incoming, made]);
            *gradient = Some(self.retain(made));
        }
        gradients
    }
}

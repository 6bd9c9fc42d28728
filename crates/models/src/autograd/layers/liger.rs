//! The fused kernels of liger-kernel (0.8), which transformers uses with `use_liger_kernel`: RMS norm, rotation, the gate of
//! an MLP, and the output head with the loss.
//!
//! Each is one node of the graph. Gradients are written over the incoming gradient or over what was saved.

use super::{INDEX, linear::LinearWeights, scratch};
use crate::autograd::{
    graph::{
        GradientEdge, Gradients, GraphOperation, MOST_EDGES, SavingMode, Tensor, Variable, VariableOrigin, WeightId,
    },
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{ProductRole, Work};
use oomph_trace::Category;

/// Bytes of a number in single precision.
const SINGLE: u64 = NumberFormat::Single.bytes();

impl TensorMachine {
    /// RMS norm in one kernel. Saves its input, the scale, and one number per row.
    pub(crate) fn liger_norm(&mut self, input: Variable, scale: WeightId) -> Variable {
        let bytes = self.size(input);
        let columns = self.weights[scale as usize].elements;
        let trainable = self.weights[scale as usize].trainable;
        let output = self.alloc(bytes, Category::Activation);
        let of_rows = self.alloc(bytes / input.number.bytes() / columns * SINGLE, Category::Activation);
        self.elementwise(2 * bytes, [input.tensor, output]);
        let records = self.records(trainable || input.needs_gradient());
        if records {
            self.save(input.tensor);
            self.save_weight(scale, false);
            self.save(of_rows);
        }
        self.release(of_rows);
        let to_scale = if trainable { GradientEdge::Weight(scale) } else { GradientEdge::None };
        let operation = GraphOperation::LigerNorm { columns };
        self.output(output, input.number, records, operation, &[input.edge(), to_scale])
    }

    /// The gradient of the rows is written over the incoming one. That of the scale is summed in two steps: in every
    /// multiprocessor, then over them.
    pub(crate) fn liger_norm_backward(
        &mut self,
        saved: &mut UnpackedTensors,
        columns: u64,
        incoming: Tensor,
    ) -> Gradients {
        let bytes = self.bytes(incoming);
        let mut gradients = [None; MOST_EDGES];
        let to_scale = saved.edges[1];
        let partial = to_scale.is_needed().then(|| self.temporary(scratch::MULTIPROCESSORS * columns * SINGLE));
        self.elementwise(3 * bytes, [saved.operand(0, incoming), incoming]);
        if let Some(partial) = partial {
            let number = self.plan.precision.of_weights();
            let of_scale = columns * number.bytes();
            let sum = self.gradient_along(to_scale, columns * SINGLE);
            self.sum_rows(scratch::MULTIPROCESSORS, columns);
            self.work(Work::Reduction { bytes: self.bytes(partial) }, [partial, sum]);
            gradients[1] = Some(match number {
                NumberFormat::Single => sum,
                NumberFormat::Half => {
                    let narrow = self.gradient_along(to_scale, of_scale);
                    self.elementwise(columns * SINGLE + of_scale, [sum, narrow]);
                    self.release(sum);
                    narrow
                }
            });
            self.release(partial);
        }
        if saved.edges[0].is_needed() {
            gradients[0] = Some(self.retain(incoming));
            self.becomes_view(incoming);
        }
        self.release_python_variables(saved);
        gradients
    }

    /// Rotates queries and keys where they are. `copied`: whether their gradients come back head by head, and are copied
    /// into the order of tokens.
    pub(crate) fn liger_rotate(
        &mut self,
        heads: [Variable; 2],
        angles: [Variable; 2],
        copied: [bool; 2],
    ) -> [Variable; 2] {
        for variable in heads {
            self.elementwise(2 * self.size(variable), [angles[0].tensor, variable.tensor]);
        }
        let records = self.records(heads.iter().any(Variable::needs_gradient));
        if !records {
            return heads;
        }
        self.save(angles[0].tensor);
        self.save(angles[1].tensor);
        let place = self.record(GraphOperation::LigerRotate { copied }, &heads.map(|variable| variable.edge()), 2);
        let origin_of = |part| place.map_or(VariableOrigin::Recomputed, |place| VariableOrigin::Recorded(place + part));
        [0, 1].map(|part: u32| Variable { origin: origin_of(part), ..heads[part as usize] })
    }

    /// Rotates both gradients back, where they are or in their copies.
    pub(crate) fn liger_rotate_backward(
        &mut self,
        saved: &UnpackedTensors,
        copied: [bool; 2],
        incoming: &Gradients,
    ) -> Gradients {
        let mut gradients = [None; MOST_EDGES];
        for place in [0, 1] {
            gradients[place] = incoming[place].map(|gradient| match copied[place] {
                true => self.copied_gradient(self.bytes(gradient), gradient),
                false => self.retain(gradient),
            });
        }
        for gradient in gradients.into_iter().flatten() {
            self.elementwise(2 * self.bytes(gradient), [saved.operand(0, gradient), gradient]);
        }
        gradients
    }

    /// The product of an activated gate and another operand. Saves both.
    pub(crate) fn liger_gate(&mut self, gate: Variable, up: Variable) -> Variable {
        let bytes = self.size(gate);
        let output = self.alloc(bytes, Category::Activation);
        self.elementwise(3 * bytes, [gate.tensor, up.tensor, output]);
        self.save_for(&[gate, up], [gate.tensor, up.tensor]);
        self.output_of(output, gate.number, GraphOperation::LigerGate, &[gate, up])
    }

    /// Both gradients are written over what was saved.
    pub(crate) fn liger_gate_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Gradients {
        let bytes = self.bytes(incoming);
        let [gate, up] = [0, 1].map(|place| saved.operand(place, incoming));
        self.elementwise(5 * bytes, [incoming, gate, up]);
        [Some(self.retain(gate)), Some(self.retain(up)), None]
    }

    /// The output head and the loss, some rows at a time: forward makes the gradients of rows and weight
    /// (`fused_linear_cross_entropy_forward`).
    pub(crate) fn liger_loss(&mut self, input: Variable, head: &LinearWeights, target: Tensor) -> Variable {
        let tokens = self.tokens();
        let number = input.number;
        let weight = self.weight_on_device(head.weight);
        let trainable = self.weights[head.weight as usize].trainable;
        let records = self.records(input.needs_gradient() || trainable);
        let of_rows = self.alloc(self.size(input), Category::Activation);
        let to_weight = if records && trainable { GradientEdge::Weight(head.weight) } else { GradientEdge::None };
        let of_weight = to_weight.is_needed().then(|| self.gradient_along(to_weight, self.bytes(weight)));
        let row_losses = self.temporary(tokens * SINGLE);
        let is_counted = self.temporary(tokens);
        let count = self.temporary(INDEX);
        let as_numbers = self.temporary(tokens * INDEX);
        self.reduce_with(scratch::sum_of_all(tokens, INDEX));
        self.work(Work::Reduction { bytes: tokens * INDEX }, [target, is_counted, as_numbers, count]);
        self.release_all([as_numbers, count]);
        let rows_at_once = liger_chunk(tokens, head.outputs.into(), head.inputs.into());
        // One buffer for the logits of all chunks, unless autocast narrows the operands of every product.
        let is_autocast = self.plan.precision.is_autocast();
        let of_chunk = rows_at_once * u64::from(head.outputs) * number.bytes();
        let logits = (!is_autocast).then(|| self.alloc(of_chunk, Category::Logits));
        // A function of autograd records nothing inside.
        let outer = std::mem::replace(&mut self.saving, SavingMode::Off);
        let tensors = LigerChunk { input: input.tensor, weight, target, row_losses, of_rows, of_weight };
        for first_row in (0..tokens).step_by(rows_at_once as usize) {
            let rows = rows_at_once.min(tokens - first_row);
            match logits {
                Some(logits) => self.liger_chunk(&tensors, head, rows, number, logits),
                None => self.liger_chunk_in_autocast(&tensors, head, rows),
            }
        }
        self.saving = outer;
        logits.into_iter().for_each(|logits| self.release(logits));
        let loss = self.alloc(SINGLE, Category::Activation);
        self.reduce_with(scratch::sum_of_all(tokens, SINGLE));
        self.work(Work::Reduction { bytes: tokens * SINGLE }, [row_losses, loss]);
        self.release_all([is_counted, row_losses]);
        if records {
            self.save(of_rows);
            of_weight.into_iter().for_each(|gradient| self.save(gradient));
        }
        self.release(of_rows);
        of_weight.into_iter().for_each(|gradient| self.release(gradient));
        self.output(loss, NumberFormat::Single, records, GraphOperation::LigerLoss, &[input.edge(), to_weight])
    }

    /// The logits of some rows, written over by their gradients, and what these add to the gradients of rows and weight.
    fn liger_chunk(
        &mut self,
        tensors: &LigerChunk,
        head: &LinearWeights,
        rows: u64,
        number: NumberFormat,
        logits: Tensor,
    ) {
        let (outputs, inputs) = (u64::from(head.outputs), u64::from(head.inputs));
        let product = self.matrix_product(ProductRole::Output, rows, outputs, head.inputs, number);
        self.ensure_matrix_workspace();
        self.work(product, [tensors.input, tensors.weight, logits]);
        self.elementwise(3 * rows * outputs * number.bytes(), [tensors.target, logits, tensors.row_losses]);
        let product = self.matrix_product(ProductRole::InputGradient, rows, inputs, head.outputs, number);
        self.work(product, [logits, tensors.weight, tensors.of_rows]);
        let Some(of_weight) = tensors.of_weight else { return };
        let product = self.matrix_product(ProductRole::WeightGradient, outputs, inputs, rows as u32, number);
        match number {
            NumberFormat::Half => self.work(product, [logits, tensors.input, of_weight]),
            NumberFormat::Single => {
                // Only sums in 16 bits are added in place.
                let part = self.temporary(self.bytes(of_weight));
                self.work(product, [logits, tensors.input, part]);
                self.accumulate(part, of_weight);
            }
        }
    }

    /// The same under autocast, with new logits for every chunk. The transposed weight is a view, whose copy autocast does
    /// not keep.
    fn liger_chunk_in_autocast(&mut self, tensors: &LigerChunk, head: &LinearWeights, rows: u64) {
        let number = NumberFormat::Half;
        let (outputs, inputs) = (u64::from(head.outputs), u64::from(head.inputs));
        let [of_weight, of_input] = [outputs * inputs, rows * inputs].map(|elements| elements * number.bytes());
        let transposed = self.temporary(of_weight);
        let narrow = self.temporary(of_input);
        let logits = self.alloc(rows * outputs * number.bytes(), Category::Logits);
        self.ensure_matrix_workspace();
        self.elementwise(3 * of_weight, [tensors.weight, transposed]);
        let product = self.matrix_product(ProductRole::Output, rows, outputs, head.inputs, number);
        self.work(product, [narrow, transposed, logits]);
        self.release_all([narrow, transposed]);
        self.elementwise(3 * rows * outputs * number.bytes(), [tensors.target, logits, tensors.row_losses]);
        let (weight, is_own) = self.product_weight(head.weight);
        let part = self.temporary(of_input);
        let product = self.matrix_product(ProductRole::InputGradient, rows, inputs, head.outputs, number);
        self.work(product, [logits, weight.tensor, part]);
        if is_own {
            self.release(weight.tensor);
        }
        self.elementwise(3 * of_input, [part, tensors.of_rows]);
        self.release(part);
        if let Some(sum) = tensors.of_weight {
            let narrow = self.temporary(of_input);
            let product = self.matrix_product(ProductRole::WeightGradient, outputs, inputs, rows as u32, number);
            self.work(product, [logits, narrow, sum]);
            self.release(narrow);
        }
        self.release(logits);
    }

    /// The gradients that forward made, if the gradient of the loss is 1: a comparison, and no product.
    pub(crate) fn liger_loss_backward(&mut self, saved: &UnpackedTensors) -> Gradients {
        let compared = [SINGLE, 1, 1].map(|bytes| self.temporary(bytes));
        compared.into_iter().rev().for_each(|tensor| self.release(tensor));
        let mut gradients = [None; MOST_EDGES];
        for place in [0, 1] {
            if let (true, Some(made)) = (saved.edges[place].is_needed(), saved.tensors[place]) {
                gradients[place] = Some(self.retain(made));
            }
        }
        if let Some(of_rows) = gradients[0] {
            self.becomes_view(of_rows);
        }
        gradients
    }
}

/// What the chunks of one loss have in common.
struct LigerChunk {
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    row_losses: Tensor,
    of_rows: Tensor,
    /// Nothing where the head is frozen.
    of_weight: Option<Tensor>,
}

/// Rows whose logits are live at the same time: as many as make the logits about as large as the input, a power of two.
fn liger_chunk(tokens: u64, outputs: u64, inputs: u64) -> u64 {
    tokens.div_ceil(outputs.div_ceil(inputs)).next_power_of_two().min(tokens)
}

#[cfg(test)]
mod tests {
    use super::liger_chunk;

    /// Sizes of logits from rehearsals of liger-kernel 0.8.5.
    #[test]
    fn chunks_of_rows_as_rehearsed() {
        assert_eq!(liger_chunk(600, 128_256, 2048), 4_104_192 / 2 / 128_256);
        assert_eq!(liger_chunk(16_384, 32_000, 4096), 2048);
        assert_eq!(liger_chunk(5, 32_000, 64_000), 5);
    }
}

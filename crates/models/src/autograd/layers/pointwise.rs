//! Operators that work number by number, each a kernel of its own, as code without fused kernels calls them: products,
//! powers, means of rows, joined and cut tensors.
//!
//! What is saved and in which order gradients are made follows PyTorch's `derivatives.yaml`: a generated backward makes
//! the gradients of its operands in the alphabetical order of their names (`other` before `self`), then sums and narrows
//! them in the order of the arguments.

use crate::autograd::{
    graph::{
        FactorShape, GradientEdge, Gradients, GraphOperation, MOST_EDGES, ProductShape, Repetition, Tensor, Variable,
        WeightId,
    },
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::Work;
use oomph_trace::Category;

/// An operand of a product number by number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factor {
    variable: Variable,
    edge: GradientEdge,
    needs_gradient: bool,
    weight: Option<WeightId>,
    repetition: Repetition,
}

impl From<Variable> for Factor {
    fn from(variable: Variable) -> Factor {
        Factor {
            variable,
            edge: variable.edge(),
            needs_gradient: variable.needs_gradient(),
            weight: None,
            repetition: Repetition::None,
        }
    }
}

impl Factor {
    /// One number per row, for all numbers of the row.
    pub(crate) fn per_row(variable: Variable) -> Factor {
        Factor { repetition: Repetition::AlongRows, ..Factor::from(variable) }
    }

    /// One row, for all rows.
    pub(crate) fn for_rows(variable: Variable) -> Factor {
        Factor { repetition: Repetition::OverRows, ..Factor::from(variable) }
    }
}

impl TensorMachine {
    /// A weight of one row, for all rows.
    pub(crate) fn weight_factor(&mut self, id: WeightId) -> Factor {
        let tensor = self.weight_on_device(id);
        let trainable = self.weights[id as usize].trainable;
        let part = Some(self.weight_bytes(id, tensor));
        Factor {
            variable: Variable { part, ..Variable::constant(tensor, self.plan.precision.of_weights()) },
            edge: if trainable { GradientEdge::Weight(id) } else { GradientEdge::None },
            needs_gradient: trainable,
            weight: Some(id),
            repetition: Repetition::OverRows,
        }
    }

    /// The product of two operands, in the wider format of both. An operand is saved where the other one needs a
    /// gradient.
    pub(crate) fn multiply(
        &mut self,
        left: impl Into<Factor>,
        right: impl Into<Factor>,
        category: Category,
    ) -> Variable {
        let (left, right) = (left.into(), right.into());
        let records = self.records(left.needs_gradient || right.needs_gradient);
        for (saved, other) in [(right, left), (left, right)] {
            match saved.weight {
                _ if !records || !other.needs_gradient => {}
                Some(weight) => self.save_weight(weight, false),
                None => self.save_variable(saved.variable),
            }
        }
        let number = left.variable.number.max(right.variable.number);
        let factors = [left, right].map(|factor| FactorShape {
            bytes: self.size(factor.variable),
            number: factor.variable.number,
            repetition: factor.repetition,
        });
        let elements = factors.map(|factor| factor.bytes / factor.number.bytes());
        let bytes = elements[0].max(elements[1]) * number.bytes();
        let product = self.alloc(bytes, category);
        let traffic = bytes + factors[0].bytes + factors[1].bytes;
        self.elementwise(traffic, [left.variable.tensor, right.variable.tensor, product]);
        let operation = GraphOperation::Multiply(ProductShape { factors, bytes, number });
        self.output(product, number, records, operation, &[left.edge, right.edge])
    }

    /// The incoming gradient times the other operand; the second operand's comes first.
    pub(crate) fn multiply_backward(
        &mut self,
        saved: &mut UnpackedTensors,
        shape: ProductShape,
        incoming: Tensor,
    ) -> Gradients {
        // The incoming gradient may be a part of a larger tensor.
        let bytes = shape.bytes;
        let mut gradients = [None; MOST_EDGES];
        for place in [1, 0] {
            if saved.edges[place].is_needed() {
                // The other operand, or the incoming gradient where a weight was saved.
                let other = saved.operand(0, incoming);
                let gradient = self.temporary(bytes);
                self.elementwise(3 * bytes, [incoming, other, gradient]);
                gradients[place] = Some(gradient);
            }
        }
        self.release_unpacked(saved);
        for place in [0, 1] {
            if let Some(whole) = gradients[place] {
                gradients[place] = Some(self.reduce_to(shape.factors[place], shape.number, saved.edges[place], whole));
            }
        }
        gradients
    }

    /// Sums and narrows a gradient until it has the shape of its operand (`validate_outputs`).
    fn reduce_to(
        &mut self,
        shape: FactorShape,
        number: NumberFormat,
        edge: GradientEdge,
        mut gradient: Tensor,
    ) -> Tensor {
        let elements = shape.bytes / shape.number.bytes();
        let whole_bytes = self.bytes(gradient);
        if shape.repetition != Repetition::None {
            let sum = self.gradient_along(edge, elements * number.bytes());
            if shape.repetition == Repetition::OverRows {
                self.sum_rows(whole_bytes / number.bytes() / elements, elements);
            }
            self.work(Work::Reduction { bytes: whole_bytes }, [gradient, sum]);
            self.release(gradient);
            gradient = sum;
        }
        if self.bytes(gradient) != shape.bytes {
            let narrow = self.gradient_along(edge, shape.bytes);
            self.elementwise(self.bytes(gradient) + shape.bytes, [gradient, narrow]);
            self.release(gradient);
            gradient = narrow;
        }
        gradient
    }

    /// A power of every number.
    pub(crate) fn power(&mut self, input: Variable) -> Variable {
        self.save_for(&[input], [input.tensor]);
        self.map(input, GraphOperation::Power, Category::Temporary)
    }

    /// The exponent times a smaller power, times the incoming gradient: a power, and two products.
    pub(crate) fn power_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let [power, multiple, gradient] = [(); 3].map(|()| self.temporary(bytes));
        self.elementwise(7 * bytes, [saved.operand(0, incoming), incoming, gradient]);
        self.release_all([multiple, power]);
        gradient
    }

    /// The mean of every row of `columns` numbers.
    pub(crate) fn row_mean(&mut self, input: Variable, columns: u64) -> Variable {
        let bytes = self.bytes(input.tensor);
        let mean = self.temporary(bytes / columns);
        self.work(Work::Reduction { bytes }, [input.tensor, mean]);
        self.output_of(mean, input.number, GraphOperation::RowMean { bytes }, &[input])
    }

    /// The gradient of the mean for every number of its row.
    pub(crate) fn row_mean_backward(&mut self, bytes: u64, incoming: Tensor) -> Tensor {
        let gradient = self.temporary(bytes);
        self.elementwise(bytes, [incoming, gradient]);
        gradient
    }

    /// A variable plus a constant.
    pub(crate) fn shift(&mut self, input: Variable) -> Variable {
        self.map(input, GraphOperation::Copy, Category::Temporary)
    }

    /// The same, of a weight: its gradient goes along `to`.
    pub(crate) fn shift_of(&mut self, weight: Variable, to: GradientEdge) -> Variable {
        let bytes = self.size(weight);
        let result = self.temporary(bytes);
        self.elementwise(2 * bytes, [weight.tensor, result]);
        let records = self.records(to.is_needed());
        self.output(result, weight.number, records, GraphOperation::Copy, &[to])
    }

    /// One over the root of every number.
    pub(crate) fn inverse_root(&mut self, input: Variable) -> Variable {
        self.map_and_save_result(input, GraphOperation::InverseRoot)
    }

    /// The result's third power, half the incoming gradient, and their product.
    pub(crate) fn inverse_root_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let [power, half, gradient] = [(); 3].map(|()| self.temporary(bytes));
        self.elementwise(7 * bytes, [saved.operand(0, incoming), incoming, gradient]);
        self.release_all([half, power]);
        gradient
    }

    /// An activation whose backward is one kernel on its input: SiLU, GELU.
    pub(crate) fn smooth_activation(&mut self, input: Variable) -> Variable {
        self.save_for(&[input], [input.tensor]);
        self.map(input, GraphOperation::Pointwise, Category::Activation)
    }

    /// GELU by its approximation with a hyperbolic tangent, operator by operator (`NewGELUActivation`).
    pub(crate) fn composite_gelu(&mut self, input: Variable) -> Variable {
        let half = self.scale(input);
        // Autocast runs powers in single precision.
        let wide = if self.plan.precision.is_autocast() { NumberFormat::Single } else { input.number };
        let base = self.in_format(input, wide);
        let cube = self.power(base);
        self.release(base.tensor);
        let scaled = self.scale(cube);
        self.release(cube.tensor);
        let sum = self.add(input, scaled, Category::Temporary);
        self.release(scaled.tensor);
        let argument = self.scale(sum);
        self.release(sum.tensor);
        let tangent = self.map_and_save_result(argument, GraphOperation::Pointwise);
        self.release(argument.tensor);
        let shifted = self.shift(tangent);
        self.release(tangent.tensor);
        let output = self.multiply(half, shifted, Category::Activation);
        self.release_all([half.tensor, shifted.tensor]);
        output
    }

    /// Sets some numbers to zero and scales the others. Keeps a mask of one byte per number.
    pub(crate) fn dropout(&mut self, input: Variable) -> Variable {
        self.wait_for_ranks(input.tensor);
        let bytes = self.size(input);
        let mask = self.alloc(bytes / input.number.bytes(), Category::Activation);
        let output = self.temporary(bytes);
        self.elementwise(2 * bytes, [input.tensor, mask, output]);
        self.save_for(&[input], [mask]);
        let output = self.output_of(output, input.number, GraphOperation::Dropout, &[input]);
        self.release(mask);
        output
    }

    /// A variable whose second half of every row comes first, negated: the other operand of a rotation.
    pub(crate) fn rotate_half(&mut self, input: Variable) -> Variable {
        let bytes = self.size(input);
        let half = bytes / 2;
        let [first, second] = [(); 2].map(|()| self.part(input, half));
        let negated = self.temporary(half);
        self.elementwise(2 * half, [input.tensor, negated]);
        let negated = self.output_of(negated, input.number, GraphOperation::Negate { bytes: half }, &[second]);
        let joined = self.join(negated, first, Category::Temporary);
        self.release(negated.tensor);
        joined
    }

    /// A part of a variable, with this many bytes.
    pub(crate) fn part(&mut self, input: Variable, bytes: u64) -> Variable {
        let operation = GraphOperation::Part { bytes: self.size(input) };
        Variable { part: Some(bytes), ..self.output_of(input.tensor, input.number, operation, &[input]) }
    }

    /// Two variables in one tensor, in the wider format of both.
    pub(crate) fn join(&mut self, first: Variable, second: Variable, category: Category) -> Variable {
        let number = first.number.max(second.number);
        let elements = [first, second].map(|part| self.size(part) / part.number.bytes());
        let bytes = (elements[0] + elements[1]) * number.bytes();
        let joined = self.alloc(bytes, category);
        self.elementwise(2 * bytes, [first.tensor, second.tensor, joined]);
        let narrowed = [first, second].map(|part| (part.number < number).then(|| self.size(part)));
        self.output_of(joined, number, GraphOperation::Join { narrowed }, &[first, second])
    }

    /// A copy of a variable in memory of its own, in the order of its numbers.
    pub(crate) fn contiguous(&mut self, input: Variable) -> Variable {
        self.map(input, GraphOperation::Copy, Category::Activation)
    }

    /// Rotates pairs of numbers by the angles of these cosines and sines.
    pub(crate) fn rotate(&mut self, input: Variable, [cosines, sines]: [Variable; 2]) -> Variable {
        let along = self.multiply(input, Factor::for_rows(cosines), Category::Temporary);
        let turned = self.rotate_half(input);
        let across = self.multiply(turned, Factor::for_rows(sines), Category::Temporary);
        self.release(turned.tensor);
        let rotated = self.add(along, across, Category::Activation);
        self.release_all([along.tensor, across.tensor]);
        rotated
    }

    /// Both operands get their part of the gradient: a view of it, or a copy in their format.
    pub(crate) fn join_backward(
        &mut self,
        saved: &UnpackedTensors,
        narrowed: [Option<u64>; 2],
        incoming: Tensor,
    ) -> Gradients {
        let mut gradients = [None; MOST_EDGES];
        for (place, narrow) in narrowed.into_iter().enumerate() {
            gradients[place] = saved.edges[place].is_needed().then(|| match narrow {
                Some(bytes) => self.copied_gradient(bytes, incoming),
                None => self.retain(incoming),
            });
        }
        gradients
    }

    /// The same memory, seen in another order of its numbers.
    pub(crate) fn reordered(&mut self, input: Variable) -> Variable {
        let reordered = self.output_of(input.tensor, input.number, GraphOperation::Reorder, &[input]);
        Variable { part: input.part, ..reordered }
    }

    /// A new tensor with this many bytes, written from the incoming gradient.
    pub(crate) fn copied_gradient(&mut self, bytes: u64, incoming: Tensor) -> Tensor {
        let gradient = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, gradient]);
        gradient
    }

    /// The same, for an operator whose backward needs its result.
    fn map_and_save_result(&mut self, input: Variable, operation: GraphOperation) -> Variable {
        let bytes = self.size(input);
        let result = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [input.tensor, result]);
        self.save_for(&[input], [result]);
        self.output_of(result, input.number, operation, &[input])
    }

    /// A tensor of the same size, one pass over the input.
    fn map(&mut self, input: Variable, operation: GraphOperation, category: Category) -> Variable {
        let bytes = self.size(input);
        let result = self.alloc(bytes, category);
        self.elementwise(2 * bytes, [input.tensor, result]);
        self.output_of(result, input.number, operation, &[input])
    }
}

//! Products with a weight, as `torch.nn.Linear` makes them, with low-rank adapters (LoRA) beside frozen weights.
//!
//! A product can be split between the ranks of a tensor-parallel group. Where ranks have parts of the sequences otherwise, a
//! split product's input is gathered and its result is scattered, as DTensor does it (`torch.distributed.tensor`).

use super::scratch;
use crate::autograd::{
    graph::{
        GradientEdge, Gradients, GraphOperation, LinearShape, SplitDimension, Tensor, TensorSplit, Variable, WeightId,
    },
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{ProductRole, Work};
use oomph_trace::{Category, CollectiveKind};

/// The weights of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearWeights {
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    pub(crate) split: TensorSplit,
    /// Two thin trainable weights beside a frozen one.
    pub(crate) adapter: Option<LoraAdapter>,
    /// Whether the rows of several sequences are made one matrix for the product, so that the gradients are views.
    pub(crate) flattens: bool,
    /// Whether autocast casts weight, input and bias in this order (`addmm`), instead of bias, weight and input (`linear`):
    /// it casts the last argument first.
    pub(crate) casts_weight_first: bool,
    /// Whether the weight has 4 bits.
    pub(crate) is_quantized: bool,
}

/// Low-rank adaptation: a product through `rank` numbers per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraAdapter {
    pub(crate) down: WeightId,
    pub(crate) up: WeightId,
    pub(crate) rank: u32,
}

impl LinearWeights {
    /// A product without bias and adapter.
    pub(crate) fn plain(weight: WeightId, inputs: u32, outputs: u32, split: TensorSplit) -> LinearWeights {
        LinearWeights {
            weight,
            bias: None,
            inputs,
            outputs,
            split,
            adapter: None,
            flattens: false,
            casts_weight_first: false,
            is_quantized: false,
        }
    }

    /// The same product with weights that are this many places further in the list.
    pub(crate) fn offset_by(self, places: WeightId) -> LinearWeights {
        let offset = |adapter: LoraAdapter| LoraAdapter {
            down: adapter.down + places,
            up: adapter.up + places,
            rank: adapter.rank,
        };
        LinearWeights {
            weight: self.weight + places,
            bias: self.bias.map(|bias| bias + places),
            adapter: self.adapter.map(offset),
            ..self
        }
    }
}

/// What a product is made of, after autocast.
struct LinearOperands {
    input: Variable,
    weight: Variable,
    bias: Option<Variable>,
    /// Copies that were cast for this product alone.
    copies: [Option<Tensor>; 3],
}

impl TensorMachine {
    /// The product of every row with a weight.
    pub(crate) fn linear(&mut self, input: Variable, linear: LinearWeights, category: Category) -> Variable {
        if linear.is_quantized {
            return self.quantized_linear(input, linear);
        }
        let operands = self.linear_operands(input, &linear);
        let records = self.save_linear_operands(&operands, &linear);
        let number = operands.input.number;
        let rows = self.size(operands.input) / (u64::from(linear.inputs) * number.bytes());
        // Every rank adds its share of the bias (`Partial._partition_value`).
        let share_of_bias = operands
            .bias
            .filter(|_| linear.split == TensorSplit::Inputs && self.plan.techniques.splits_sequences)
            .map(|bias| self.temporary(self.size(bias)));
        let (output, runs) = self.kept_result(rows * u64::from(linear.outputs) * number.bytes(), category);
        if runs {
            match linear.bias {
                Some(_) => self.ensure_fused_matrix_workspace(),
                None => self.ensure_matrix_workspace(),
            }
            let product = self.matrix_product(ProductRole::Output, rows, linear.outputs.into(), linear.inputs, number);
            self.work(product, [operands.input.tensor, operands.weight.tensor, output]);
        }
        if let Some(share) = share_of_bias {
            self.release(share);
        }
        if linear.split == TensorSplit::Inputs {
            self.sum_over_tensor_ranks(output);
        }
        let shape = LinearShape {
            inputs: linear.inputs,
            outputs: linear.outputs,
            number,
            is_biased: linear.bias.is_some(),
            split: linear.split,
            flattens: linear.flattens,
        };
        let edges = self.linear_edges(&linear, &operands);
        let output = self.output(output, number, records, GraphOperation::Linear(shape), &edges);
        self.release_copies(&operands);
        match linear.adapter {
            Some(adapter) => self.add_adapter(input, &linear, adapter, output),
            None => output,
        }
    }

    /// Adds `input` through the adapter, scaled, to the output of the frozen weight.
    fn add_adapter(
        &mut self,
        input: Variable,
        linear: &LinearWeights,
        adapter: LoraAdapter,
        output: Variable,
    ) -> Variable {
        let (down_split, up_split) = match linear.split {
            TensorSplit::Inputs => (TensorSplit::Inputs, TensorSplit::Whole),
            TensorSplit::Outputs | TensorSplit::Whole => (TensorSplit::Whole, linear.split),
        };
        let down = LinearWeights::plain(adapter.down, linear.inputs, adapter.rank, down_split);
        let up = LinearWeights::plain(adapter.up, adapter.rank, linear.outputs, up_split);
        let lowered = self.linear(input, down, Category::Activation);
        let raised = self.linear(lowered, up, Category::Temporary);
        self.release(lowered.tensor);
        let scaled = self.scale(raised);
        self.release(raised.tensor);
        let sum = self.add(output, scaled, Category::Activation);
        self.release_all([output.tensor, scaled.tensor]);
        sum
    }

    /// The gradients of bias, input and weight. With a bias PyTorch makes the input's gradient before the weight's
    /// (`AddmmBackward`), without one after it (`MmBackward`).
    pub(crate) fn linear_backward(
        &mut self,
        saved: &mut UnpackedTensors,
        shape: LinearShape,
        incoming: Tensor,
    ) -> Gradients {
        let [to_bias, to_input, to_weight] = saved.edges;
        let (saves_input, saves_weight) = (to_weight.is_needed(), to_input.is_needed());
        let (of_input, of_weight);
        if shape.is_biased {
            let (input, weight) = (saved.operand(0, incoming), saved.operand(usize::from(saves_input), incoming));
            of_input = saves_weight.then(|| self.input_gradient(&shape, incoming, weight));
            of_weight = saves_input.then(|| self.weight_gradient(to_weight, &shape, incoming, input));
        } else {
            let (weight, input) = (saved.operand(0, incoming), saved.operand(usize::from(saves_weight), incoming));
            of_weight = saves_input.then(|| self.weight_gradient(to_weight, &shape, incoming, input));
            of_input = saves_weight.then(|| self.input_gradient(&shape, incoming, weight));
        }
        self.release_unpacked(saved);
        let of_bias = to_bias.is_needed().then(|| self.bias_gradient(to_bias, &shape, incoming));
        [of_bias, of_input, of_weight]
    }

    fn input_gradient(&mut self, shape: &LinearShape, incoming: Tensor, weight: Tensor) -> Tensor {
        let LinearShape { inputs, outputs, number, .. } = *shape;
        let rows = self.rows_in(incoming, outputs, number);
        let gradient = self.temporary(rows * u64::from(inputs) * number.bytes());
        self.ensure_matrix_workspace();
        let work = self.matrix_product(ProductRole::InputGradient, rows, inputs.into(), outputs, number);
        self.work(work, [incoming, weight, gradient]);
        if shape.split == TensorSplit::Outputs {
            self.sum_over_tensor_ranks(gradient);
        }
        if shape.flattens {
            self.becomes_view(gradient);
        }
        gradient
    }

    fn weight_gradient(&mut self, to: GradientEdge, shape: &LinearShape, incoming: Tensor, input: Tensor) -> Tensor {
        let LinearShape { inputs, outputs, number, .. } = *shape;
        let gradient = self.gradient_along(to, u64::from(inputs) * u64::from(outputs) * number.bytes());
        self.ensure_matrix_workspace();
        let rows = self.rows_in(incoming, outputs, number) as u32;
        let work = self.matrix_product(ProductRole::WeightGradient, outputs.into(), inputs.into(), rows, number);
        self.work(work, [incoming, input, gradient]);
        if shape.flattens {
            // The product has the transposed weight.
            self.becomes_view(gradient);
        }
        gradient
    }

    /// The operands in the format of the product. Autocast casts the last argument first.
    fn linear_operands(&mut self, input: Variable, linear: &LinearWeights) -> LinearOperands {
        let (bias, weight, cast_input);
        if linear.casts_weight_first {
            weight = self.product_weight(linear.weight);
            cast_input = self.cast_for_product(input);
            bias = linear.bias.map(|bias| self.product_weight(bias));
        } else {
            bias = linear.bias.map(|bias| self.product_weight(bias));
            weight = self.product_weight(linear.weight);
            cast_input = self.cast_for_product(input);
        }
        let copy = |variable: Variable, is_copy: bool| is_copy.then_some(variable.tensor);
        LinearOperands {
            copies: [
                copy(cast_input, cast_input.tensor != input.tensor),
                copy(weight.0, weight.1),
                bias.and_then(|(bias, is_copy)| copy(bias, is_copy)),
            ],
            input: cast_input,
            weight: weight.0,
            bias: bias.map(|(bias, _)| bias),
        }
    }

    /// The input is saved for the weight's gradient, the weight for the input's.
    fn save_linear_operands(&mut self, operands: &LinearOperands, linear: &LinearWeights) -> bool {
        let (for_input, for_weight) = (operands.input.needs_gradient(), self.weights[linear.weight as usize].trainable);
        let records = self.records(for_input || for_weight);
        if records && for_weight && linear.bias.is_some() {
            self.save(operands.input.tensor);
        }
        if records && for_input {
            if Some(operands.weight.tensor) == self.weights[linear.weight as usize].tensor {
                self.save_weight(linear.weight, true);
            } else {
                self.save_view(operands.weight.tensor, self.bytes(operands.weight.tensor));
            }
        }
        if records && for_weight && linear.bias.is_none() {
            self.save(operands.input.tensor);
        }
        records
    }

    fn linear_edges(&self, linear: &LinearWeights, operands: &LinearOperands) -> [GradientEdge; 3] {
        let trainable = self.weights[linear.weight as usize].trainable;
        let to = |variable: Variable, weight: WeightId| match variable.edge() {
            GradientEdge::None if trainable => GradientEdge::Weight(weight),
            edge => edge,
        };
        [
            linear.bias.zip(operands.bias).map_or(GradientEdge::None, |(id, bias)| to(bias, id)),
            operands.input.edge(),
            to(operands.weight, linear.weight),
        ]
    }

    fn bias_gradient(&mut self, edge: GradientEdge, shape: &LinearShape, incoming: Tensor) -> Tensor {
        let gradient = self.gradient_along(edge, u64::from(shape.outputs) * shape.number.bytes());
        let bytes = self.bytes(incoming);
        let rows = self.rows_in(incoming, shape.outputs, shape.number);
        self.sum_rows(rows, shape.outputs.into());
        self.work(Work::Reduction { bytes }, [incoming, gradient]);
        gradient
    }

    /// The rows of a tensor that has `columns` numbers per row.
    fn rows_in(&self, tensor: Tensor, columns: u32, number: NumberFormat) -> u64 {
        self.bytes(tensor) / (u64::from(columns) * number.bytes())
    }

    /// Allocates and frees the buffers of a sum over rows.
    pub(crate) fn sum_rows(&mut self, rows: u64, columns: u64) {
        self.reduce_with(scratch::sum_over_rows(rows, columns));
    }

    /// Allocates and frees the buffers of a reduction.
    pub(crate) fn reduce_with(&mut self, scratch: Option<scratch::ReductionScratch>) {
        if let Some(scratch) = scratch {
            let partial_sums = self.alloc(scratch.partial_sums, Category::Workspace);
            let counters = self.alloc(scratch.counters, Category::Workspace);
            self.release_all([counters, partial_sums]);
        }
    }

    fn release_copies(&mut self, operands: &LinearOperands) {
        for tensor in operands.copies.into_iter().flatten() {
            self.release(tensor);
        }
    }

    /// A sum over the ranks of the tensor-parallel group, in place. Where ranks have parts of the sequences, each gets its part
    /// of the sum elsewhere.
    pub(crate) fn sum_over_tensor_ranks(&mut self, tensor: Tensor) {
        if self.plan.techniques.splits_sequences {
            return;
        }
        self.collective(CollectiveKind::AllReduce, self.bytes(tensor), self.plan.techniques.tensor_ranks);
    }

    pub(crate) fn matrix_product(&self, role: ProductRole, m: u64, n: u64, k: u32, number: NumberFormat) -> Work {
        Work::Gemm { m: m as u32, n: n as u32, k, batch: 1, dtype: self.plan.precision.of_products(number), role }
    }
}

impl TensorMachine {
    /// Whole sequences, of every rank's part of them.
    pub(crate) fn gather_sequences(&mut self, input: Variable) -> Variable {
        let whole = self.all_gather(input.tensor, SplitDimension::Tokens);
        self.output_of(whole, input.number, GraphOperation::GatherSequences, &[input])
    }

    /// All `columns` numbers of every token, of those that every rank has. Ranks that cannot have as many pad theirs, and the
    /// result is then a part of what was gathered. Releases its input.
    pub(crate) fn gather_columns(&mut self, input: Variable, columns: u32) -> Variable {
        let bytes = self.bytes(input.tensor);
        let whole = self.all_gather(input.tensor, SplitDimension::Columns);
        self.release(input.tensor);
        let output = self.output_of(whole, input.number, GraphOperation::GatherColumns { bytes }, &[input]);
        let of_columns = self.rows(columns, input.number);
        Variable { part: (of_columns < self.bytes(whole)).then_some(of_columns), ..output }
    }

    /// This rank's part of the sum over ranks. Releases its input.
    pub(crate) fn scatter_sums(&mut self, input: Variable, dimension: SplitDimension) -> Variable {
        let part = self.reduce_scatter(input.tensor, dimension);
        self.release(input.tensor);
        self.output_of(part, input.number, GraphOperation::ScatterSums(dimension), &[input])
    }

    /// Joins the parts of all ranks. They arrive one after the other: along any but the first dimension they are copied into
    /// their places, unless these are the same (`all_gather_tensor`, `_maybe_view_chunk_cat`).
    pub(crate) fn all_gather(&mut self, part: Tensor, dimension: SplitDimension) -> Tensor {
        if self.is_stopped {
            return Tensor::NONE;
        }
        let (ranks, bytes) = (self.plan.techniques.tensor_ranks, self.bytes(part));
        let category = self.category_after(part, Category::Activation);
        let arrived = self.alloc(bytes * u64::from(ranks), category);
        self.collective(CollectiveKind::AllGather, bytes, ranks);
        let is_copied = match dimension {
            SplitDimension::Positions => {
                let held = self.retain(part);
                self.unfinished_collectives.push([arrived, held]);
                false
            }
            SplitDimension::Tokens => self.graph.sequences > 1,
            SplitDimension::Columns => self.tokens() > 1,
        };
        if !is_copied {
            return arrived;
        }
        let joined = self.alloc(bytes * u64::from(ranks), category);
        self.elementwise(2 * bytes * u64::from(ranks), [arrived, joined]);
        self.release(arrived);
        joined
    }

    /// This rank's part of the sum over ranks. Along any but the first dimension, the parts are copied one after the other
    /// before (`reduce_scatter_tensor`). What is reduced lives until an operator waits for the result.
    pub(crate) fn reduce_scatter(&mut self, whole: Tensor, dimension: SplitDimension) -> Tensor {
        if self.is_stopped {
            return Tensor::NONE;
        }
        let (ranks, bytes) = (self.plan.techniques.tensor_ranks, self.bytes(whole));
        let reduced = match dimension {
            SplitDimension::Positions => self.retain(whole),
            SplitDimension::Tokens | SplitDimension::Columns => self.copied_gradient(bytes, whole),
        };
        let part = self.temporary(bytes / u64::from(ranks));
        self.collective(CollectiveKind::ReduceScatter, bytes, ranks);
        self.unfinished_collectives.push([part, reduced]);
        part
    }

    /// A copy of this rank's numbers of every token, with this many bytes (`Shard._replicate_to_shard`).
    pub(crate) fn own_columns(&mut self, bytes: u64, whole: Tensor) -> Tensor {
        let part = self.alloc(bytes, self.category_after(whole, Category::Temporary));
        self.elementwise(2 * bytes, [whole, part]);
        part
    }

    /// Called by the operators that read the result of a collective: what the collective read is released
    /// (`AsyncCollectiveTensor`).
    pub(crate) fn wait_for_ranks(&mut self, result: Tensor) {
        while let Some(place) = self.unfinished_collectives.iter().position(|[of, _]| *of == result) {
            let [_, read] = self.unfinished_collectives.swap_remove(place);
            self.release(read);
        }
    }
}

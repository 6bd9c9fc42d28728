//! Products with a weight, as `torch.nn.Linear` makes them.

use super::{
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    saving::Form,
    scratch,
    weights::{Linear, Split, WeightId},
};
use oomph_base::{ProductRole, StreamId, Work};
use oomph_trace::{Category, CollectiveKind};

/// A product, for its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    inputs: u32,
    outputs: u32,
    number: Number,
    is_biased: bool,
    split: Split,
}

/// What a product is made with, after autocast had its say.
struct Operands {
    input: Value,
    weight: Value,
    bias: Option<Value>,
    /// What was cast for this product alone.
    own: [Option<Tensor>; 3],
}

impl Machine {
    /// The product of every row with a weight.
    pub(super) fn linear(&mut self, input: Value, linear: Linear, category: Category) -> Value {
        let operands = self.linear_operands(input, &linear);
        let first_saved = self.begin_saving();
        let records = self.save_linear_operands(&operands, &linear);
        let number = operands.input.number;
        let rows = self.rows_in(operands.input.tensor, linear.inputs, number);
        let output = self.alloc(rows * u64::from(linear.outputs) * number.bytes(), category);
        match linear.bias {
            Some(_) => self.ensure_fused_matrix_workspace(),
            None => self.ensure_matrix_workspace(),
        }
        let product = self.gemm(ProductRole::Output, rows, linear.outputs.into(), linear.inputs, number);
        self.work(product, [operands.input.tensor, operands.weight.tensor, output]);
        if linear.split == Split::Inputs {
            self.sum_over_ranks(output);
        }
        let origin = if records { self.record_product(&linear, &operands, first_saved) } else { Origin::Constant };
        self.release_own(&operands);
        let output = Value { tensor: output, number, origin };
        match linear.adapter {
            Some(adapter) => self.add_adapter(input, &linear, adapter, output),
            None => output,
        }
    }

    /// Only what a product saves, where a checkpoint that runs again needs no more of it.
    pub(super) fn linear_savings(&mut self, input: Value, linear: Linear) {
        let operands = self.linear_operands(input, &linear);
        self.save_linear_operands(&operands, &linear);
        self.release_own(&operands);
    }

    /// The gradients of bias, input and weight, the latter two in the order in which PyTorch names what they need.
    pub(super) fn linear_backward(
        &mut self,
        node: &Node,
        product: Product,
        incoming: Tensor,
    ) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let [to_bias, to_input, to_weight] = node.edges;
        let (saves_input, saves_weight) = (to_weight != Edge::Nowhere, to_input != Edge::Nowhere);
        let (of_input, of_weight);
        if product.is_biased {
            let (input, weight) = (saved.operand(0, incoming), saved.operand(usize::from(saves_input), incoming));
            of_input = self.input_gradient(to_input, &product, incoming, weight);
            of_weight = self.product_weight_gradient(to_weight, &product, incoming, input);
        } else {
            let (weight, input) = (saved.operand(0, incoming), saved.operand(usize::from(saves_weight), incoming));
            of_weight = self.product_weight_gradient(to_weight, &product, incoming, input);
            of_input = self.input_gradient(to_input, &product, incoming, weight);
        }
        self.drop_unpacked(&saved);
        let of_bias = (to_bias != Edge::Nowhere).then(|| self.bias_gradient(to_bias, &product, incoming));
        [of_bias, of_input, of_weight]
    }

    fn input_gradient(&mut self, to: Edge, product: &Product, incoming: Tensor, weight: Tensor) -> Option<Tensor> {
        if to == Edge::Nowhere {
            return None;
        }
        let rows = self.rows_in(incoming, product.outputs, product.number);
        let gradient = self.temporary(rows * u64::from(product.inputs) * product.number.bytes());
        self.ensure_matrix_workspace();
        let work = self.gemm(ProductRole::InputGradient, rows, product.inputs.into(), product.outputs, product.number);
        self.work(work, [incoming, weight, gradient]);
        if product.split == Split::Outputs {
            self.sum_over_ranks(gradient);
        }
        Some(gradient)
    }

    fn product_weight_gradient(
        &mut self,
        to: Edge,
        product: &Product,
        incoming: Tensor,
        input: Tensor,
    ) -> Option<Tensor> {
        if to == Edge::Nowhere {
            return None;
        }
        let bytes = u64::from(product.inputs) * u64::from(product.outputs) * product.number.bytes();
        let gradient = self.gradient_along(to, bytes);
        self.ensure_matrix_workspace();
        let rows = self.rows_in(incoming, product.outputs, product.number) as u32;
        let work =
            self.gemm(ProductRole::WeightGradient, product.outputs.into(), product.inputs.into(), rows, product.number);
        self.work(work, [incoming, input, gradient]);
        Some(gradient)
    }

    /// Autocast casts what it must, the last argument first; frozen weights are cast anew for every product.
    fn linear_operands(&mut self, input: Value, linear: &Linear) -> Operands {
        let bias = linear.bias.map(|bias| self.product_weight(bias));
        let weight = self.product_weight(linear.weight);
        let cast_input = self.cast_for_product(input);
        let own = |value: Value, is_own: bool| is_own.then_some(value.tensor);
        Operands {
            own: [
                own(cast_input, cast_input.tensor != input.tensor),
                own(weight.0, weight.1),
                bias.and_then(|(bias, is_own)| own(bias, is_own)),
            ],
            input: cast_input,
            weight: weight.0,
            bias: bias.map(|(bias, _)| bias),
        }
    }

    /// The input is saved for the weight's gradient, the weight for the input's.
    fn save_linear_operands(&mut self, operands: &Operands, linear: &Linear) -> bool {
        let (for_input, for_weight) =
            (operands.input.origin.needs_gradient(), self.weights[linear.weight as usize].trainable);
        let records = self.records(for_input || for_weight);
        if records && for_weight && linear.bias.is_some() {
            self.save(operands.input.tensor, Form::Dense);
        }
        if records && for_input {
            if Some(operands.weight.tensor) == self.weights[linear.weight as usize].tensor {
                self.save_weight(linear.weight, true);
            } else {
                self.save(operands.weight.tensor, Form::Strided(self.bytes(operands.weight.tensor)));
            }
        }
        if records && for_weight && linear.bias.is_none() {
            self.save(operands.input.tensor, Form::Dense);
        }
        records
    }

    fn record_product(&mut self, linear: &Linear, operands: &Operands, first_saved: u32) -> Origin {
        let trainable = self.weights[linear.weight as usize].trainable;
        let to = |value: Value, weight: WeightId| match value.origin {
            Origin::Recorded(place) => Edge::Value(place),
            _ if trainable => Edge::Weight(weight),
            _ => Edge::Nowhere,
        };
        let edges = [
            linear.bias.zip(operands.bias).map_or(Edge::Nowhere, |(id, value)| to(value, id)),
            operands.input.origin.edge(),
            to(operands.weight, linear.weight),
        ];
        let product = Product {
            inputs: linear.inputs,
            outputs: linear.outputs,
            number: operands.input.number,
            is_biased: linear.bias.is_some(),
            split: linear.split,
        };
        self.record(Operation::Product(product), first_saved, edges)
    }

    fn bias_gradient(&mut self, edge: Edge, product: &Product, incoming: Tensor) -> Tensor {
        let gradient = self.gradient_along(edge, u64::from(product.outputs) * product.number.bytes());
        let bytes = self.bytes(incoming);
        let rows = self.rows_in(incoming, product.outputs, product.number);
        self.sum_rows(rows, product.outputs.into());
        self.work(Work::Reduction { bytes }, [incoming, gradient]);
        gradient
    }

    /// How many rows of so many numbers a tensor has.
    fn rows_in(&self, tensor: Tensor, columns: u32, number: Number) -> u64 {
        self.bytes(tensor) / (u64::from(columns) * number.bytes())
    }

    /// The buffers of a sum over rows, taken and given back.
    pub(super) fn sum_rows(&mut self, rows: u64, columns: u64) {
        if let Some(scratch) = scratch::sum_over_rows(rows, columns) {
            let partial_sums = self.alloc(scratch.partial_sums, Category::Workspace);
            let counters = self.alloc(scratch.counters, Category::Workspace);
            self.release_all([counters, partial_sums]);
        }
    }

    fn release_own(&mut self, operands: &Operands) {
        for tensor in operands.own.into_iter().flatten() {
            self.release(tensor);
        }
    }

    /// A sum over the ranks of the tensor-parallel group, in place.
    pub(super) fn sum_over_ranks(&mut self, tensor: Tensor) {
        let (bytes, ranks) = (self.bytes(tensor), self.plan.techniques.tensor_ranks);
        self.trace.collective(CollectiveKind::AllReduce, bytes, ranks as u16, StreamId::DEFAULT);
    }

    pub(super) fn gemm(&self, role: ProductRole, m: u64, n: u64, k: u32, number: Number) -> Work {
        Work::Gemm { m: m as u32, n: n as u32, k, batch: 1, dtype: self.plan.precision.of_products(number), role }
    }
}

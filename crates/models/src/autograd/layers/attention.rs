//! Fused attention over queries, keys and values that lie in one tensor.
//!
//! The number format decides which kernel PyTorch takes: memory-efficient attention for single precision, cuDNN's for 16
//! bits on a Hopper GPU.

use super::scratch;
use crate::autograd::{
    graph::{GradientEdge, Gradients, GraphOperation, MOST_EDGES, Tensor, Variable},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{Work, round_up};
use oomph_trace::Category;

/// Memory-efficient attention pads its row sums to this many rows.
const ROW_SUM_PADDING: u64 = 32;
/// Bytes of a seed, and of an offset into its random numbers, which cuDNN's kernel keeps even without dropout.
const SEED: u64 = 8;

/// The places of the saved tensors: queries, keys and values come first.
const SAVED_INPUTS: usize = 0;
const SAVED_ROW_SUMS: usize = 3;

impl TensorMachine {
    /// Attention of every token to those before it.
    pub(crate) fn attention(&mut self, query_key_value: Variable) -> Variable {
        let number = query_key_value.number;
        let bytes = self.rows(self.plan.shape.width / self.plan.techniques.tensor_ranks, number);
        let records = self.records(query_key_value.needs_gradient());
        let inputs = if records { self.split(query_key_value) } else { [GradientEdge::None; MOST_EDGES] };
        if records {
            for _ in 0..MOST_EDGES {
                self.save_view(query_key_value.tensor, bytes);
            }
        }
        let seeds = match number {
            NumberFormat::Half => Some([(); 2].map(|()| self.alloc(SEED, Category::Activation))),
            NumberFormat::Single => None,
        };
        let output = self.alloc(bytes, Category::Activation);
        // Only backward needs the sums of rows.
        let row_sums = records.then(|| self.alloc(self.row_sum_bytes(number), Category::Activation));
        if number == NumberFormat::Half {
            self.scratch(scratch::CUDNN_FORWARD, output);
        }
        self.work(self.attention_work(number, false), [query_key_value.tensor, output]);
        if let Some(row_sums) = row_sums {
            self.save(row_sums);
            self.save_view(output, bytes);
            if let Some([seed, offset]) = seeds {
                self.save(offset);
                self.save(seed);
            }
            self.release(row_sums);
        }
        for seed in seeds.into_iter().flatten() {
            self.release(seed);
        }
        self.output(output, number, records, GraphOperation::Attention(number), &inputs)
    }

    /// The gradients of queries, keys and values.
    pub(crate) fn attention_backward(
        &mut self,
        saved: &UnpackedTensors,
        number: NumberFormat,
        incoming: Tensor,
    ) -> Gradients {
        let bytes = self.bytes(incoming);
        let gradients = [(); MOST_EDGES].map(|()| self.temporary(bytes));
        let shape = self.plan.shape;
        let heads = u64::from(self.plan.local_heads());
        let (sequences_by_heads, length, head_width) =
            (u64::from(self.graph.sequences) * heads, u64::from(self.graph.length), u64::from(shape.head_width()));
        let (row_products, workspace) = match number {
            NumberFormat::Single => {
                // The row sums of gradient times output, made by plain operators.
                let product = self.temporary(bytes);
                let of_rows = sequences_by_heads * length * NumberFormat::Single.bytes();
                let [sums, sums_by_head] = [(); 2].map(|()| self.temporary(of_rows));
                self.elementwise(3 * bytes, [incoming, product]);
                self.work(Work::Reduction { bytes }, [product, sums]);
                self.release_all([sums, product]);
                (Some(sums_by_head), scratch::memory_efficient_backward(sequences_by_heads, length, head_width))
            }
            NumberFormat::Half => (None, scratch::cudnn_backward(sequences_by_heads, length, head_width)),
        };
        let workspace = self.alloc(workspace, Category::Workspace);
        let inputs = saved.operand(SAVED_INPUTS, incoming);
        let row_sums = saved.operand(SAVED_ROW_SUMS, incoming);
        self.work(self.attention_work(number, true), [incoming, inputs, row_sums, gradients[0]]);
        if let Some(sums) = row_products {
            self.release(sums);
        }
        self.release(workspace);
        gradients.map(Some)
    }

    /// Queries, keys and values as views of one tensor; their gradients are joined again.
    fn split(&mut self, query_key_value: Variable) -> [GradientEdge; MOST_EDGES] {
        let place = self.record(GraphOperation::SplitThree, &[query_key_value.edge()], MOST_EDGES as u8);
        [0, 1, 2].map(|part| place.map_or(GradientEdge::None, |place| GradientEdge::Variable(place + part)))
    }

    /// One tensor of three gradients.
    pub(crate) fn split_backward(&mut self, parts: [Tensor; MOST_EDGES]) -> Tensor {
        let bytes = MOST_EDGES as u64 * self.bytes(parts[0]);
        let joined = self.temporary(bytes);
        self.elementwise(2 * bytes, [parts[0], parts[1], parts[2], joined]);
        joined
    }

    fn row_sum_bytes(&self, number: NumberFormat) -> u64 {
        let length = u64::from(self.graph.length);
        let length = if number == NumberFormat::Single { round_up(length, ROW_SUM_PADDING) } else { length };
        u64::from(self.graph.sequences) * u64::from(self.plan.local_heads()) * length * NumberFormat::Single.bytes()
    }

    fn attention_work(&self, number: NumberFormat, backward: bool) -> Work {
        Work::Attention {
            batch: self.graph.sequences,
            heads: self.plan.local_heads(),
            queries: self.graph.length,
            keys: self.graph.length,
            head_width: self.plan.shape.head_width(),
            dtype: self.plan.precision.of_attention(number),
            backward,
            causal: true,
        }
    }
}

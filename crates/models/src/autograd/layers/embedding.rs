//! Embeddings: rows of a table looked up by index.

use super::{INDEX, scratch};
use crate::autograd::{
    graph::{GradientEdge, GraphOperation, Tensor, Variable, WeightId},
    machine::TensorMachine,
    saving::UnpackedTensors,
};
use oomph_base::Work;
use oomph_trace::Category;

impl TensorMachine {
    /// Looks up `count` rows.
    pub(crate) fn embedding(&mut self, table: WeightId, indices: Tensor, count: u64) -> Variable {
        let number = self.plan.precision.of_weights();
        let bytes = count * u64::from(self.plan.shape.width) * number.bytes();
        let records = self.records(self.weights[table as usize].trainable);
        if self.weights[table as usize].home.is_some() {
            // The host looks up the rows and copies them in; their gradient is copied out.
            let rows = self.alloc(bytes, Category::Activation);
            self.work(Work::CopyIn { bytes, pinned: true }, [rows]);
            return self.output(rows, number, records, GraphOperation::HostEmbedding, &[]);
        }
        if records {
            self.save(indices);
        }
        let rows = self.alloc(bytes, Category::Activation);
        let operand = self.weights[table as usize].tensor.unwrap_or(rows);
        self.elementwise(2 * bytes, [indices, operand, rows]);
        let operation = GraphOperation::Embedding { indices: count };
        self.output(rows, number, records, operation, &[GradientEdge::Weight(table)])
    }

    /// The gradient of the table: few indices are added up in their order, many are sorted first
    /// (`embedding_dense_backward_cuda`).
    pub(crate) fn embedding_backward(&mut self, saved: &UnpackedTensors, indices: u64, incoming: Tensor) -> Tensor {
        let to_table = saved.edges[0];
        let elements = self.elements_along(to_table);
        let of_table = elements * self.plan.precision.of_weights().bytes();
        let gradient = if indices <= scratch::UNSORTED_INDICES {
            self.gradient_along(to_table, of_table)
        } else {
            self.sorted_embedding_gradient(to_table, of_table, elements, indices)
        };
        let traffic = self.bytes(incoming) + of_table;
        self.elementwise(traffic, [saved.operand(0, incoming), incoming, gradient]);
        gradient
    }

    fn sorted_embedding_gradient(&mut self, edge: GradientEdge, of_table: u64, elements: u64, indices: u64) -> Tensor {
        let width = u64::from(self.plan.shape.width);
        let list = INDEX * indices;
        let [sorted, origins, range] = [(); 3].map(|()| self.temporary(list));
        self.scratch(scratch::sort_pairs(indices), sorted);
        self.release(range);
        let gradient = self.gradient_along(edge, of_table);

        let offsets = self.temporary(list);
        let segment_count = self.temporary(INDEX);
        let distinct = self.temporary(list);
        self.scratch(scratch::scan(indices), distinct);
        self.release(distinct);
        let [per_segment, partial_offsets] = [(); 2].map(|()| self.temporary(list));
        self.scratch(scratch::scan(indices), per_segment);
        let partial_count = self.temporary(INDEX);
        let segments = scratch::embedding_segments(indices, elements / width);
        let starts = self.temporary(INDEX * segments);
        let sums = self.temporary(segments * width * 4);
        self.release_all([sums, starts, partial_count, partial_offsets, per_segment, segment_count, offsets]);
        self.release_all([origins, sorted]);
        gradient
    }
}

//! Embeddings: rows of a table looked up by index.

use super::{
    graph::{Edge, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    saving::Form,
    scratch,
    weights::WeightId,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Bytes of a token's or position's number.
pub(super) const INDEX: u64 = 8;

/// A lookup, for its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Embedding {
    pub(super) table: WeightId,
    /// How many rows were looked up.
    pub(super) indices: u64,
}

impl Machine {
    /// Looks up `count` rows.
    pub(super) fn embedding(&mut self, table: WeightId, indices: Tensor, count: u64) -> Value {
        let number = self.plan.precision.of_weights();
        let bytes = count * u64::from(self.plan.shape.width) * number.bytes();
        let trainable = self.weights[table as usize].trainable;
        let first_saved = self.begin_saving();
        if self.weights[table as usize].home.is_some() {
            return self.embedding_from_host(bytes, trainable);
        }
        if self.records(trainable) {
            self.save(indices, Form::Dense);
        }
        let rows = self.alloc(bytes, Category::Activation);
        let operand = self.weights[table as usize].tensor.unwrap_or(rows);
        self.elementwise(2 * bytes, [indices, operand, rows]);
        let origin = if self.records(trainable) {
            let operation = Operation::Embedding(Embedding { table, indices: count });
            self.record(operation, first_saved, [Edge::Weight(table), Edge::Nowhere, Edge::Nowhere])
        } else {
            Origin::Constant
        };
        Value { tensor: rows, number, origin }
    }

    /// A table on the host is read there, and only the rows are copied in; their gradient is copied out.
    fn embedding_from_host(&mut self, bytes: u64, trainable: bool) -> Value {
        let number = self.plan.precision.of_weights();
        let first_saved = self.begin_saving();
        let rows = self.alloc(bytes, Category::Activation);
        self.work(Work::CopyIn { bytes, pinned: true }, [rows]);
        let origin = if self.records(trainable) {
            self.record(Operation::ToHost, first_saved, [Edge::Nowhere; 3])
        } else {
            Origin::Constant
        };
        Value { tensor: rows, number, origin }
    }

    /// The gradient of the table: few indices are added up as they come, many are sorted first.
    pub(super) fn embedding_backward(&mut self, node: &Node, embedding: Embedding, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let Embedding { table, indices } = embedding;
        let elements = self.weights[table as usize].elements;
        let of_table = elements * self.plan.precision.of_weights().bytes();
        let gradient = if indices <= scratch::UNSORTED_INDICES {
            self.gradient_along(Edge::Weight(table), of_table)
        } else {
            self.sorted_embedding_gradient(Edge::Weight(table), of_table, elements, indices)
        };
        let traffic = self.bytes(incoming) + of_table;
        self.elementwise(traffic, [saved.operand(0, incoming), incoming, gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    fn sorted_embedding_gradient(&mut self, edge: Edge, of_table: u64, elements: u64, indices: u64) -> Tensor {
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

    /// Memory for the time of one kernel on `operand`.
    pub(super) fn scratch(&mut self, bytes: u64, operand: Tensor) {
        let scratch = self.alloc(bytes, Category::Workspace);
        let traffic = self.bytes(operand);
        self.elementwise(2 * traffic, [operand, scratch]);
        self.release(scratch);
    }
}

//! Embeddings, what a model does before its blocks: it looks up rows of a table by index. A vision transformer cuts images
//! into patches, puts a class token before them and adds learned positions.

use super::{INDEX, convolution_kernels, scratch};
use crate::autograd::{
    graph::{GradientEdge, Gradients, GraphOperation, MOST_EDGES, SplitDimension, Tensor, Variable, WeightId},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{Dtype, ProductRole, Work};
use oomph_trace::Category;

/// What is looked up in a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup {
    /// Rows that are looked up.
    pub(crate) count: u64,
    /// Numbers of a row.
    pub(crate) width: u32,
    /// Whether the indices of one sequence stand for all sequences: kernels need them written out.
    pub(crate) is_expanded: bool,
    /// Whether the rows are used as columns: their gradient is copied into the order of the rows.
    pub(crate) is_permuted: bool,
}

impl TensorMachine {
    /// Looks up `count` rows.
    pub(crate) fn embedding(&mut self, table: WeightId, indices: Tensor, count: u64) -> Variable {
        self.look_up(
            table,
            indices,
            Lookup { count, width: self.plan.shape.width, is_expanded: false, is_permuted: false },
        )
    }

    /// Looks up `count` rows of a table of which this rank has a part. Indices of other rows are replaced, the rows that were
    /// looked up for them are set to zero (`_MaskPartial`), and every rank gets its part of the sum over ranks.
    pub(crate) fn embedding_of_ranks(
        &mut self,
        table: WeightId,
        indices: Tensor,
        count: u64,
        dimension: SplitDimension,
    ) -> Variable {
        let [below, above, mask] = [(); 3].map(|()| self.temporary(count));
        self.elementwise(4 * INDEX * count, [indices, below, above, mask]);
        self.release_all([below, above]);
        let [copied, masked] = [(); 2].map(|()| self.temporary(INDEX * count));
        self.elementwise(4 * INDEX * count, [indices, copied, masked]);
        self.release(copied);
        let rows = self.embedding(table, indices, count);
        self.release_all([masked, mask]);
        self.scatter_sums(rows, dimension)
    }

    /// Looks up rows of any width.
    pub(crate) fn look_up(&mut self, table: WeightId, indices: Tensor, lookup: Lookup) -> Variable {
        let number = self.plan.precision.of_weights();
        let bytes = lookup.count * u64::from(lookup.width) * number.bytes();
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
        let written_out = lookup.is_expanded.then(|| self.temporary(INDEX * lookup.count));
        let rows = self.alloc(bytes, Category::Activation);
        let operand = self.weights[table as usize].tensor.unwrap_or(rows);
        self.elementwise(2 * bytes, [indices, operand, rows]);
        if let Some(written_out) = written_out {
            self.release(written_out);
        }
        let operation = GraphOperation::Embedding(lookup);
        self.output(rows, number, records, operation, &[GradientEdge::Weight(table)])
    }

    /// The gradient of the table: few indices are added up in their order, many are sorted first
    /// (`embedding_dense_backward_cuda`).
    pub(crate) fn embedding_backward(&mut self, saved: &UnpackedTensors, lookup: Lookup, incoming: Tensor) -> Tensor {
        let rows = lookup.is_permuted.then(|| self.copied_gradient(self.bytes(incoming), incoming));
        let written_out = lookup.is_expanded.then(|| self.temporary(INDEX * lookup.count));
        let to_table = saved.edges[0];
        let elements = self.gradient_elements_along(to_table);
        let of_table = elements * self.plan.precision.of_weights().bytes();
        let gradient = if lookup.count <= scratch::UNSORTED_INDICES {
            self.gradient_along(to_table, of_table)
        } else {
            self.sorted_embedding_gradient(to_table, of_table, elements, lookup)
        };
        let traffic = self.bytes(incoming) + of_table;
        self.elementwise(traffic, [saved.operand(0, incoming), incoming, gradient]);
        for copy in [written_out, rows].into_iter().flatten() {
            self.release(copy);
        }
        gradient
    }

    fn sorted_embedding_gradient(
        &mut self,
        edge: GradientEdge,
        of_table: u64,
        elements: u64,
        lookup: Lookup,
    ) -> Tensor {
        let (indices, width) = (lookup.count, u64::from(lookup.width));
        let list = INDEX * indices;
        let [sorted, origins, range] = [(); 3].map(|()| self.temporary(list));
        self.scratch(scratch::sort_pairs(indices), sorted);
        self.release(range);
        let gradient = self.gradient_along(edge, of_table);

        let offsets = self.temporary(list);
        let segment_count = self.temporary(INDEX);
        let distinct = self.temporary(list);
        self.scratch(scratch::scan_for_distinct(indices), distinct);
        self.release(distinct);
        let most_segments = indices.min(elements / width);
        let [per_segment, partial_offsets] = [(); 2].map(|()| self.temporary(INDEX * most_segments));
        self.scratch(scratch::scan_sums(most_segments), per_segment);
        let partial_count = self.temporary(INDEX);
        let segments = scratch::embedding_segments(indices, elements / width);
        let starts = self.temporary(INDEX * segments);
        if scratch::embedding_adds_at_once(indices, elements / width, width) {
            let segment_of = self.temporary(INDEX * segments);
            if of_table < elements * 4 {
                let sums = self.temporary(elements * 4);
                self.release(sums);
            }
            self.release(segment_of);
        } else {
            let sums = self.temporary(segments * width * 4);
            self.release(sums);
        }
        self.release_all([starts, partial_count, partial_offsets, per_segment, segment_count, offsets]);
        self.release_all([origins, sorted]);
        gradient
    }
}

/// Square images that are cut into square patches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatchShape {
    pub(crate) channels: u32,
    /// Rows, and columns, of an image.
    pub(crate) side: u32,
    /// Rows, and columns, of a patch.
    pub(crate) patch: u32,
    /// Numbers that a patch becomes.
    pub(crate) width: u32,
}

impl PatchShape {
    /// Patches of an image.
    pub(crate) fn patches(&self) -> u32 {
        let side = self.side / self.patch;
        side * side
    }

    /// Numbers of an image.
    pub(crate) fn image(&self) -> u64 {
        u64::from(self.channels) * u64::from(self.side) * u64::from(self.side)
    }

    /// Numbers of the filter.
    pub(crate) fn filter(&self) -> u64 {
        u64::from(self.channels) * u64::from(self.patch) * u64::from(self.patch) * u64::from(self.width)
    }

    /// Numbers that an image becomes.
    fn output(&self) -> u64 {
        u64::from(self.patches()) * u64::from(self.width)
    }

    fn work(&self, images: u64, role: ProductRole, number: NumberFormat) -> Work {
        let dtype = if number == NumberFormat::Single { Dtype::Tf32 } else { Dtype::Bf16 };
        let k = self.channels * self.patch * self.patch;
        Work::Gemm { m: images as u32 * self.patches(), n: self.width, k, batch: 1, dtype, role }
    }
}

/// Filter and bias of the patches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatchWeights {
    pub(crate) filter: WeightId,
    pub(crate) bias: WeightId,
    pub(crate) shape: PatchShape,
}

impl TensorMachine {
    /// Every patch with every filter, plus the bias (`torch.nn.Conv2d` whose stride is its size).
    pub(crate) fn patch_convolution(&mut self, images: Variable, weights: PatchWeights) -> Variable {
        let PatchWeights { filter, bias: bias_id, shape } = weights;
        let (bias, _) = self.product_weight(bias_id);
        let (weight, _) = self.product_weight(filter);
        let input = self.cast_for_product(images);
        let number = input.number;
        let records = self.records(self.weights[filter as usize].trainable);
        if records {
            self.save(input.tensor);
            if Some(weight.tensor) == self.weights[filter as usize].tensor {
                self.save_weight(filter, false);
            } else {
                self.save(weight.tensor);
            }
        }
        let count = u64::from(self.graph.sequences);
        let output = self.alloc(count * shape.output() * number.bytes(), Category::Activation);
        self.work(shape.work(count, ProductRole::Output, number), [input.tensor, weight.tensor, output]);
        let to = |variable: Variable, id: WeightId| match variable.edge() {
            GradientEdge::None => GradientEdge::Weight(id),
            edge => edge,
        };
        let edges = [GradientEdge::None, to(weight, filter), to(bias, bias_id)];
        let output = self.output(output, number, records, GraphOperation::PatchConvolution(shape, number), &edges);
        if input.tensor != images.tensor {
            self.release(input.tensor);
        }
        output
    }

    /// The gradients of filter and bias. The incoming gradient is by token and is copied, pixel by pixel.
    pub(crate) fn patch_convolution_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: PatchShape,
        number: NumberFormat,
        incoming: Tensor,
    ) -> Gradients {
        let count = u64::from(self.graph.sequences);
        let [_, to_filter, to_bias] = saved.edges;
        let of_output = count * shape.output() * number.bytes();
        let pixels = self.temporary(of_output);
        self.elementwise(2 * of_output, [incoming, pixels]);
        let of_filter = self.gradient_along(to_filter, shape.filter() * number.bytes());
        let workspace = convolution_kernels::patch_filter_workspace(
            count * shape.image(),
            count * shape.output(),
            shape.filter(),
            shape.channels.into(),
            number,
        );
        let workspace = (workspace > 0).then(|| self.alloc(workspace, Category::Workspace));
        let work = shape.work(count, ProductRole::WeightGradient, number);
        self.work(work, [pixels, saved.operand(0, pixels), of_filter]);
        if let Some(workspace) = workspace {
            self.release(workspace);
        }
        self.release(pixels);
        let of_bias = self.gradient_along(to_bias, u64::from(shape.width) * number.bytes());
        self.sum_rows(count * u64::from(shape.patches()), shape.width.into());
        self.work(Work::Reduction { bytes: of_output }, [incoming, of_bias]);
        [None, Some(of_filter), Some(of_bias)]
    }

    /// A weight of one row before the rows of every sequence, in the wider format of both.
    pub(crate) fn prepend_row(&mut self, row: WeightId, rows: Variable) -> Variable {
        let (of_row, trainable) = (self.weight_on_device(row), self.weights[row as usize].trainable);
        let number = self.plan.precision.of_weights().max(rows.number);
        let of_rows = self.bytes(rows.tensor);
        let added = u64::from(self.graph.sequences) * self.weights[row as usize].elements;
        let bytes = (of_rows / rows.number.bytes() + added) * number.bytes();
        let joined = self.alloc(bytes, Category::Activation);
        self.elementwise(bytes + of_rows, [of_row, rows.tensor, joined]);
        let to_row = if trainable { GradientEdge::Weight(row) } else { GradientEdge::None };
        let records = self.records(trainable || rows.needs_gradient());
        let operation = GraphOperation::PrependRow { narrowed: (rows.number < number).then_some(of_rows) };
        self.output(joined, number, records, operation, &[to_row, rows.edge()])
    }

    /// The rows get their part as a view, or narrowed; the weight gets the sum over sequences.
    pub(crate) fn prepend_row_backward(
        &mut self,
        saved: &UnpackedTensors,
        narrowed: Option<u64>,
        incoming: Tensor,
    ) -> Gradients {
        let [to_row, to_rows, _] = saved.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_rows.is_needed() {
            gradients[1] = Some(match narrowed {
                None => self.retain(incoming),
                Some(bytes) => {
                    let narrow = self.temporary(bytes);
                    self.elementwise(3 * bytes, [incoming, narrow]);
                    narrow
                }
            });
        }
        if to_row.is_needed() {
            let elements = self.elements_along(to_row);
            let sum = self.gradient_along(to_row, elements * self.plan.precision.of_weights().bytes());
            self.sum_rows(self.graph.sequences.into(), elements);
            self.work(Work::Reduction { bytes: self.bytes(sum) }, [incoming, sum]);
            gradients[0] = Some(sum);
        }
        gradients
    }

    /// A variable plus a weight that is the same for every sequence.
    pub(crate) fn add_weight(&mut self, left: Variable, weight: WeightId, category: Category) -> Variable {
        let (right, trainable) = (self.weight_on_device(weight), self.weights[weight as usize].trainable);
        let bytes = self.bytes(left.tensor);
        let sum = self.alloc(bytes, category);
        self.elementwise(2 * bytes, [left.tensor, right, sum]);
        let to_weight = if trainable { GradientEdge::Weight(weight) } else { GradientEdge::None };
        let records = self.records(trainable || left.needs_gradient());
        let operation = GraphOperation::Add { narrowed: [None; 2], broadcast_over: self.several_sequences() };
        self.output(sum, left.number, records, operation, &[left.edge(), to_weight])
    }

    /// The number of sequences that something is repeated for, if there are several.
    pub(crate) fn several_sequences(&self) -> Option<u32> {
        Some(self.graph.sequences).filter(|&sequences| sequences > 1)
    }
}

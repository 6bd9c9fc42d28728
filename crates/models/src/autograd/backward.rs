//! The backward pass: autograd's engine.
//!
//! Nodes run in the reverse of the order in which they were recorded. Each restores what it saved, makes its gradients,
//! releases what it restored, then the incoming gradient, then what it saved.

use super::{
    graph::{
        GradientEdge, GradientPlace, Gradients, Graph, GraphNode, GraphOperation, MOST_EDGES, SplitDimension, Tensor,
        Variable, VariableOrigin, WeightId,
    },
    machine::{HostThread, TensorMachine},
    saving::UnpackedTensors,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Whether the graph can be run backward again (`retain_graph`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetainGraph {
    Yes,
    No,
}

impl TensorMachine {
    /// Runs a graph backward from its result. Returns the graph where it is retained.
    pub(crate) fn backward(&mut self, result: Variable, graph: Graph, retain: RetainGraph) -> Option<Graph> {
        let outer = std::mem::replace(&mut self.graph, graph);
        // The program holds this one until backward returns.
        let seed = self.temporary(self.bytes(result.tensor));
        self.thread = HostThread::Backward;
        self.enter_pass();
        self.count_weight_gradients();
        if let VariableOrigin::Recorded(place) = result.origin {
            self.graph.gradients[place as usize] = Some(self.retain(seed));
        }
        for index in (0..self.graph.nodes.len()).rev() {
            let node = self.graph.nodes[index];
            self.layer = node.layer;
            self.stage_for_backward(&node);
            self.run_node(&node, retain);
        }
        self.layer = None;
        self.release_recomputed();
        self.leave_pass();
        self.send_last_bucket();
        let leaves = std::mem::take(&mut self.graph.leaves);
        self.leaves.extend(leaves);
        self.thread = HostThread::Main;
        self.release(seed);
        let done = std::mem::replace(&mut self.graph, outer);
        (retain == RetainGraph::Yes).then_some(done)
    }

    /// Releases a graph that is never run backward, from its result to its inputs.
    pub(crate) fn drop_graph(&mut self, graph: Graph) {
        let outer = std::mem::replace(&mut self.graph, graph);
        for index in (0..self.graph.nodes.len()).rev() {
            let node = self.graph.nodes[index];
            self.release_saved(&node);
        }
        for leaf in std::mem::take(&mut self.graph.leaves) {
            self.release(leaf);
        }
        self.graph = outer;
    }

    fn run_node(&mut self, node: &GraphNode, retain: RetainGraph) {
        let mut incoming = [None; MOST_EDGES];
        for (place, gradient) in incoming.iter_mut().take(usize::from(node.outputs)).enumerate() {
            *gradient = self.graph.gradients[node.first_gradient as usize + place].take();
        }
        incoming.into_iter().flatten().for_each(|gradient| self.wait_for_ranks(gradient));
        let gradients = match incoming[0] {
            Some(first) => self.node_gradients(node, first, &mut incoming),
            None => [None; MOST_EDGES],
        };
        for gradient in incoming.into_iter().flatten() {
            self.release(gradient);
        }
        if retain == RetainGraph::No {
            self.release_saved(node);
        }
        for place in delivery_order(node) {
            if let Some(gradient) = gradients[place] {
                self.deliver(gradient, node.edges[place]);
            }
        }
    }

    /// The gradients of a node's inputs. An operator that releases an incoming gradient itself takes it.
    fn node_gradients(&mut self, node: &GraphNode, first: Tensor, incoming: &mut Gradients) -> Gradients {
        if let GraphOperation::ReluIntoView = node.operation {
            incoming[0] = None;
            return one(self.relu_into_view_backward(node, first));
        }
        let mut unpacked = self.unpack(node);
        let saved = &mut unpacked;
        let gradients = match node.operation {
            GraphOperation::Embedding(lookup) => one(self.embedding_backward(saved, lookup, first)),
            GraphOperation::Add { narrowed, broadcast_over } => {
                self.add_backward(saved, narrowed, broadcast_over, first)
            }
            GraphOperation::Cast { bytes } => one(self.cast_backward(node.edges[0], bytes, first)),
            GraphOperation::Pointwise | GraphOperation::ReluIntoView => one(self.pointwise_backward(saved, first)),
            GraphOperation::Scale => one(self.scale_backward(first)),
            GraphOperation::Power => one(self.power_backward(saved, first)),
            GraphOperation::RowMean { bytes } => one(self.row_mean_backward(bytes, first)),
            GraphOperation::Copy => one(self.retain(first)),
            GraphOperation::Leaf => {
                let kept = self.retain(first);
                self.graph.leaves.push(kept);
                [None; MOST_EDGES]
            }
            GraphOperation::Dropout => one(self.pointwise_backward(saved, first)),
            GraphOperation::InverseRoot => one(self.inverse_root_backward(saved, first)),
            GraphOperation::Multiply(shape) => self.multiply_backward(saved, shape, first),
            GraphOperation::Negate { bytes } | GraphOperation::Part { bytes } => {
                one(self.copied_gradient(bytes, first))
            }
            GraphOperation::Join { narrowed } => self.join_backward(saved, narrowed, first),
            GraphOperation::Reorder => one(self.copied_gradient(self.bytes(first), first)),
            GraphOperation::LayerNorm { rows } => self.layer_norm_backward(saved, rows, first),
            GraphOperation::LigerNorm { columns } => self.liger_norm_backward(saved, columns, first),
            GraphOperation::LigerRotate { copied } => self.liger_rotate_backward(saved, copied, incoming),
            GraphOperation::LigerGate => self.liger_gate_backward(saved, first),
            GraphOperation::LigerLoss => self.liger_loss_backward(saved),
            GraphOperation::Linear(shape) => self.linear_backward(saved, shape, first),
            GraphOperation::GatherSequences => one(self.reduce_scatter(first, SplitDimension::Tokens)),
            GraphOperation::GatherColumns { bytes } => one(self.own_columns(bytes, first)),
            GraphOperation::ScatterSums(dimension) => one(self.all_gather(first, dimension)),
            GraphOperation::QuantizedLinear { inputs, outputs } => {
                self.quantized_linear_backward(inputs, outputs, first)
            }
            GraphOperation::Attention(shape, kernel) => self.attention_backward(saved, shape, kernel, first),
            GraphOperation::MaskedAttention(shape, mask) => self.masked_attention_backward(saved, shape, mask, first),
            GraphOperation::ExpandMask => one(self.expand_mask_backward(first)),
            GraphOperation::Choose { constant } => one(self.choose_backward(saved, constant, first)),
            GraphOperation::BatchedProduct { bytes } => self.batched_product_backward(saved, bytes, first),
            GraphOperation::RepeatHeads { bytes } => one(self.repeat_heads_backward(bytes, first)),
            GraphOperation::SplitTwo => one(self.split_in_two_backward(first, incoming[1].unwrap_or(first))),
            GraphOperation::SoftMax => one(self.softmax_backward(saved, first)),
            GraphOperation::DivideByRow => self.divide_by_row_backward(saved, first),
            GraphOperation::PickRows { bytes, count } => one(self.pick_rows_backward(saved, bytes, count, first)),
            GraphOperation::GroupedLinear(shape, number) => self.grouped_linear_backward(saved, shape, number, first),
            GraphOperation::SplitThree { bytes } => {
                one(self.split_backward(bytes, incoming.map(|part| part.unwrap_or(first))))
            }
            GraphOperation::NegativeLogLikelihood => one(self.negative_log_likelihood_backward(saved, first)),
            GraphOperation::FusedLoss => self.fused_loss_backward(saved, first),
            GraphOperation::HostEmbedding => {
                let work = Work::CopyOut { bytes: self.bytes(first), pinned: true };
                self.work(work, [first]);
                [None; MOST_EDGES]
            }
            GraphOperation::Route(bytes) => one(self.route_backward(saved, bytes, first)),
            GraphOperation::Gather(bytes) => one(self.gather_backward(saved, bytes, first)),
            GraphOperation::Weigh(bytes) => self.weigh_backward(saved, bytes, first),
            GraphOperation::ScatterAdd(bytes) => self.scatter_add_backward(saved, bytes, first),
            GraphOperation::Convolution(shape, number) => self.convolution_backward(saved, shape, number, first),
            GraphOperation::PatchConvolution(shape, number) => {
                self.patch_convolution_backward(saved, shape, number, first)
            }
            GraphOperation::PrependRow { narrowed } => self.prepend_row_backward(saved, narrowed, first),
            GraphOperation::BatchNorm => self.batch_norm_backward(saved, first),
            GraphOperation::MaxPool => one(self.max_pool_backward(saved, first)),
            GraphOperation::MeanPool { pixels } => one(self.mean_pool_backward(pixels, first)),
        };
        self.release_unpacked(&mut unpacked);
        gradients
    }

    /// Memory for the gradient that goes along an edge.
    pub(crate) fn gradient_along(&mut self, edge: GradientEdge, bytes: u64) -> Tensor {
        let is_first = matches!(edge, GradientEdge::Weight(weight) if self.weights[weight as usize].gradient.is_none());
        self.alloc(bytes, if is_first { Category::Gradient } else { Category::Temporary })
    }

    /// Hands a gradient on: the first one is kept as it is, a further one is added to it.
    fn deliver(&mut self, gradient: Tensor, edge: GradientEdge) {
        match edge {
            GradientEdge::None => self.release(gradient),
            GradientEdge::Variable(place) => self.deliver_to_variable(gradient, place),
            GradientEdge::Weight(weight) => self.deliver_to_weight(gradient, weight),
        }
    }

    /// A weight waits for all its gradients of the pass (`AccumulateGrad` runs once), then adds them to those of earlier
    /// passes.
    fn deliver_to_weight(&mut self, gradient: Tensor, weight: WeightId) {
        let place = weight as usize;
        let gradient = match self.weights[place].unfinished_gradient.take() {
            None => gradient,
            Some(sum) => self.added(gradient, sum, Category::Gradient),
        };
        self.gradients_left[place] -= 1;
        if self.gradients_left[place] > 0 {
            self.weights[place].unfinished_gradient = Some(gradient);
            return;
        }
        match self.weights[place].gradient {
            None => self.weights[place].gradient = Some(gradient),
            Some(sum) => self.accumulate(gradient, sum),
        }
        self.gradient_is_complete(weight);
    }

    fn count_weight_gradients(&mut self) {
        self.gradients_left.clear();
        self.gradients_left.resize(self.weights.len(), 0);
        for edge in self.graph.nodes.iter().flat_map(|node| node.edges) {
            if let GradientEdge::Weight(weight) = edge {
                self.gradients_left[weight as usize] += 1;
            }
        }
    }

    /// Keeps a gradient until its node runs; further ones are added to it.
    fn deliver_to_variable(&mut self, gradient: Tensor, place: GradientPlace) {
        let place = place as usize;
        self.graph.gradients[place] = Some(match self.graph.gradients[place] {
            None => gradient,
            Some(sum) => self.added(gradient, sum, Category::Temporary),
        });
    }

    /// The sum of two gradients: in place where there is one reference to the first, otherwise in a new tensor.
    fn added(&mut self, gradient: Tensor, sum: Tensor, category: Category) -> Tensor {
        if self.has_one_reference(sum) {
            self.accumulate(gradient, sum);
            return sum;
        }
        let bytes = self.bytes(sum);
        let fresh = self.alloc(bytes, category);
        self.elementwise(3 * bytes, [gradient, sum, fresh]);
        self.release_all([sum, gradient]);
        fresh
    }

    /// Adds a tensor to a sum in place and releases it.
    pub(crate) fn accumulate(&mut self, tensor: Tensor, sum: Tensor) {
        let bytes = self.bytes(sum);
        self.elementwise(3 * bytes, [tensor, sum]);
        self.release(tensor);
    }

    /// One pass over the incoming gradient and the saved result.
    fn pointwise_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let gradient = self.alloc(bytes, self.category_after(incoming, Category::Temporary));
        self.elementwise(3 * bytes, [incoming, saved.operand(0, incoming), gradient]);
        gradient
    }
}

/// The order in which gradients reach their places. Where `linear` makes rows of several sequences one matrix and has a bias, it
/// transposes the weight after that (`_flatten_nd_linear`), and autograd runs the later of both views first.
fn delivery_order(node: &GraphNode) -> [usize; MOST_EDGES] {
    match node.operation {
        GraphOperation::Linear(shape) if shape.flattens && shape.is_biased => [0, 2, 1],
        _ => [0, 1, 2],
    }
}

fn one(gradient: Tensor) -> Gradients {
    [Some(gradient), None, None]
}

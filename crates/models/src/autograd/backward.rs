//! The backward pass: autograd's engine.
//!
//! Nodes run in the reverse of the order in which they were recorded. Around each: what it saved is brought back, its
//! gradients are made, what was brought back goes, then the gradient that came in, then what it saved.

use super::{
    graph::{Edge, GradientPlace, Graph, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{HostThread, Machine, Tensor},
};
use oomph_base::Work;
use oomph_trace::Category;

/// Whether the graph can be run backward again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retain {
    Graph,
    Nothing,
}

impl Machine {
    /// Runs a graph backward from its result. Gives the graph back where it is retained.
    pub(super) fn backward(&mut self, result: Value, graph: Graph, retain: Retain) -> Option<Graph> {
        let outer = std::mem::replace(&mut self.graph, graph);
        // The program holds this one until backward returns.
        let seed = self.temporary(self.bytes(result.tensor));
        self.thread = HostThread::Backward;
        self.enter_pass();
        if let Origin::Recorded(place) = result.origin {
            self.graph.gradients[place as usize] = Some(self.retain(seed));
        }
        for index in (0..self.graph.nodes.len()).rev() {
            let node = self.graph.nodes[index];
            self.layer = node.layer;
            self.before_backward_of(&node);
            self.run_node(&node, retain);
        }
        self.layer = None;
        self.forget_recomputed();
        self.leave_pass();
        self.send_last_bucket();
        self.thread = HostThread::Main;
        self.release(seed);
        let mut done = std::mem::replace(&mut self.graph, outer);
        match retain {
            Retain::Graph => Some(done),
            Retain::Nothing => {
                done.clear();
                self.recycle(done);
                None
            }
        }
    }

    /// Lets go of a graph that is never run backward, from its result to its inputs.
    pub(super) fn drop_graph(&mut self, graph: Graph) {
        let outer = std::mem::replace(&mut self.graph, graph);
        for index in (0..self.graph.nodes.len()).rev() {
            let node = self.graph.nodes[index];
            self.release_saved(&node);
        }
        let mut dropped = std::mem::replace(&mut self.graph, outer);
        dropped.clear();
        self.recycle(dropped);
    }

    fn run_node(&mut self, node: &Node, retain: Retain) {
        let mut incoming = [None; MOST_EDGES];
        for (place, gradient) in incoming.iter_mut().take(usize::from(node.outputs)).enumerate() {
            *gradient = self.graph.gradients[node.first_gradient as usize + place].take();
        }
        let Some(first) = incoming[0] else {
            if retain == Retain::Nothing {
                self.release_saved(node);
            }
            return;
        };
        let mut is_taken = false;
        let one = |gradient| [Some(gradient), None, None];
        let gradients = match node.operation {
            Operation::Embedding(embedding) => one(self.embedding_backward(node, embedding, first)),
            Operation::Add(add) => self.add_backward(node, add, first),
            Operation::Cast(cast) => one(self.cast_backward(node, cast, first)),
            Operation::Relu => one(self.relu_backward(node, first)),
            Operation::ReluInPlace => {
                is_taken = true;
                one(self.relu_in_place_backward(node, first))
            }
            Operation::Norm(norm) => self.norm_backward(node, norm, first),
            Operation::Product(product) => self.linear_backward(node, product, first),
            Operation::Attention(number) => self.attention_backward(node, number, first),
            Operation::Split => one(self.split_backward(incoming.map(|part| part.unwrap_or(first)))),
            Operation::LogSoftmax => one(self.log_softmax_backward(node, first)),
            Operation::NegativeLogLikelihood => one(self.negative_log_likelihood_backward(node, first)),
            Operation::FusedLoss => self.fused_loss_backward(node, first),
            Operation::Scale => one(self.scale_backward(first)),
            Operation::ToHost => {
                let work = Work::CopyOut { bytes: self.bytes(first), pinned: true };
                self.work(work, [first]);
                [None; MOST_EDGES]
            }
            Operation::Route(routed) => one(self.route_backward(node, routed, first)),
            Operation::Gather(gathered) => one(self.gather_backward(node, gathered, first)),
            Operation::Weigh(routed) => self.weigh_backward(node, routed, first),
            Operation::Scatter(gathered) => self.scatter_backward(node, gathered, first),
            Operation::Convolution(convolved) => self.convolution_backward(node, convolved, first),
            Operation::BatchNorm => self.batch_norm_backward(node, first),
            Operation::MaxPool => one(self.max_pool_backward(node, first)),
            Operation::MeanPool(pooled) => one(self.mean_pool_backward(pooled, first)),
        };
        if !is_taken {
            for gradient in incoming.into_iter().flatten() {
                self.release(gradient);
            }
        }
        if retain == Retain::Nothing {
            self.release_saved(node);
        }
        for (gradient, edge) in gradients.into_iter().zip(node.edges) {
            if let Some(gradient) = gradient {
                self.deliver(gradient, edge);
            }
        }
    }

    /// Memory for the gradient that goes along an edge.
    pub(super) fn gradient_along(&mut self, edge: Edge, bytes: u64) -> Tensor {
        let is_first = matches!(edge, Edge::Weight(weight) if self.weights[weight as usize].gradient.is_none());
        self.alloc(bytes, if is_first { Category::Gradient } else { Category::Temporary })
    }

    /// Hands a gradient on: the first one is kept as it is, a further one is added to it, in place where nobody else
    /// holds it.
    fn deliver(&mut self, gradient: Tensor, edge: Edge) {
        match edge {
            Edge::Nowhere => self.release(gradient),
            Edge::Value(place) => self.deliver_to_value(gradient, place),
            Edge::Weight(weight) => {
                match self.weights[weight as usize].gradient {
                    None => self.weights[weight as usize].gradient = Some(gradient),
                    Some(sum) => {
                        let bytes = self.bytes(sum);
                        self.elementwise(3 * bytes, [gradient, sum]);
                        self.release(gradient);
                    }
                }
                self.after_gradient_of(weight);
            }
        }
    }

    fn deliver_to_value(&mut self, gradient: Tensor, place: GradientPlace) {
        let place = place as usize;
        let Some(sum) = self.graph.gradients[place] else {
            self.graph.gradients[place] = Some(gradient);
            return;
        };
        let bytes = self.bytes(sum);
        if self.is_sole_holder(sum) {
            self.elementwise(3 * bytes, [gradient, sum]);
            self.release(gradient);
        } else {
            let fresh = self.temporary(bytes);
            self.elementwise(3 * bytes, [gradient, sum, fresh]);
            self.release_all([sum, gradient]);
            self.graph.gradients[place] = Some(fresh);
        }
    }
}

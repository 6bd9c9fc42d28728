//! What forward leaves for backward: nodes in the order in which they were recorded, and what they saved.

use super::{machine::Tensor, precision::Number, weights::WeightId};
use oomph_trace::BlockSlot;

/// Where the gradient of a value is gathered until the node that made the value runs.
pub(super) type GradientPlace = u32;

/// A tensor as the program sees it: memory, number format, and where its gradient goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    pub(super) tensor: Tensor,
    pub(super) number: Number,
    pub(super) origin: Origin,
}

/// What made a value, as far as its gradient is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// It needs no gradient.
    Constant,
    /// A node of the graph.
    Recorded(GradientPlace),
    /// An operator that runs again for a checkpoint: it needs a gradient, and its node exists already.
    Recomputed,
}

impl Origin {
    /// Whether operators on it must save what its gradient takes.
    pub(super) fn needs_gradient(self) -> bool {
        self != Origin::Constant
    }

    /// Where a gradient of it goes.
    pub(super) fn edge(self) -> Edge {
        match self {
            Origin::Recorded(place) => Edge::Value(place),
            Origin::Constant | Origin::Recomputed => Edge::Nowhere,
        }
    }
}

/// Where a gradient goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Edge {
    Nowhere,
    Value(GradientPlace),
    Weight(WeightId),
}

/// The operators that have a backward, with what their shapes alone do not say.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Embedding(super::embedding::Embedding),
    Add(super::elementwise::Add),
    Cast(super::autocast::Cast),
    Relu,
    ReluInPlace,
    Norm(super::norm::Norm),
    Product(super::linear::Product),
    Attention(Number),
    Split,
    LogSoftmax,
    NegativeLogLikelihood,
    FusedLoss,
    Scale,
    ToHost,
    Route(super::experts::Routed),
    Gather(super::experts::Gathered),
    Weigh(super::experts::Routed),
    Scatter(super::experts::Gathered),
    Convolution(super::residual::Convolved),
    BatchNorm,
    MaxPool,
    MeanPool(super::residual::Pooled),
}

/// The most inputs or outputs that carry a gradient: queries, keys and values; scale, shift and input.
pub(super) const MOST_EDGES: usize = 3;

/// One recorded operator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) operation: Operation,
    /// Where the gradients of its outputs are gathered.
    pub(super) first_gradient: GradientPlace,
    pub(super) outputs: u8,
    /// The place of what it saved in [`Graph::saved`].
    pub(super) first_saved: u32,
    pub(super) saved_count: u8,
    pub(super) edges: [Edge; MOST_EDGES],
    pub(super) layer: Option<u16>,
}

/// What a node keeps of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Saved {
    /// The tensor itself.
    Kept(Tensor),
    /// A weight, which lives anyway.
    Weight(WeightId),
    /// A copy in pinned host memory.
    OnHost { buffer: BlockSlot, bytes: u64 },
    /// Nothing: the block is run again when it is needed, and this is the place among what that saves.
    Again { checkpoint: u32, place: u32 },
    /// Released.
    Nothing,
}

/// A part of the model that is run again in backward.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) layer: u32,
    /// The input that the part is run again from.
    pub(super) input: Value,
    /// What keeps that input.
    pub(super) kept_input: Saved,
    /// How many nodes' savings still refer to it; the last one lets the input go.
    pub(super) unreleased: u32,
    /// What running it again saved, until it is taken.
    pub(super) recomputed: Vec<Option<Tensor>>,
    pub(super) is_recomputed: bool,
}

/// Everything that one forward pass recorded. Belongs to whoever holds its result.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) saved: Vec<Saved>,
    pub(super) gradients: Vec<Option<Tensor>>,
    pub(super) checkpoints: Vec<Checkpoint>,
    /// The sequence length of this pass.
    pub(super) length: u32,
    /// The sequences of this pass.
    pub(super) sequences: u32,
    /// Tokens of every expert of every layer in this pass, where blocks have several.
    pub(super) expert_tokens: Vec<u32>,
}

impl Graph {
    /// Forgets everything and keeps the room.
    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.saved.clear();
        self.gradients.clear();
        self.checkpoints.clear();
        self.expert_tokens.clear();
    }
}

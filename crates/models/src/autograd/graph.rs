//! The recorded graph of a forward pass: its nodes in order, and the tensors that they saved for backward.
//!
//! Types only. They know neither the machine nor any layer.

use std::collections::VecDeque;

use super::{
    layers::{
        convolution_kernels::ConvolutionShape,
        embedding::{Lookup, PatchShape},
    },
    techniques::NumberFormat,
};
use oomph_trace::BlockSlot;

/// The memory of a tensor. Views are further references to the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensor(pub(crate) BlockSlot);

impl Tensor {
    /// The result of an operator that did not run.
    pub(crate) const NONE: Tensor = Tensor(BlockSlot::MAX);
}

/// The place of a weight in the model's list.
pub(crate) type WeightId = u32;

/// Where the gradient of a variable is accumulated until the node that made the variable runs.
pub(crate) type GradientPlace = u32;

/// A tensor as the program sees it: memory, number format, and where its gradient goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variable {
    pub(crate) tensor: Tensor,
    pub(crate) number: NumberFormat,
    pub(crate) origin: VariableOrigin,
    /// Its bytes, where it is a part of a larger tensor.
    pub(crate) part: Option<u64>,
}

/// What made a variable, as far as its gradient is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VariableOrigin {
    /// It needs no gradient.
    Constant,
    /// A node of the graph.
    Recorded(GradientPlace),
    /// An operator that a checkpoint runs again: it needs a gradient, and its node exists already.
    Recomputed,
}

impl Variable {
    /// A variable that needs no gradient.
    pub(crate) fn constant(tensor: Tensor, number: NumberFormat) -> Variable {
        Variable { tensor, number, origin: VariableOrigin::Constant, part: None }
    }

    /// Whether operators on it must save what its gradient needs.
    pub(crate) fn needs_gradient(&self) -> bool {
        self.origin != VariableOrigin::Constant
    }

    /// Where its gradient goes.
    pub(crate) fn edge(&self) -> GradientEdge {
        match self.origin {
            VariableOrigin::Recorded(place) => GradientEdge::Variable(place),
            VariableOrigin::Constant | VariableOrigin::Recomputed => GradientEdge::None,
        }
    }
}

/// Where a gradient goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientEdge {
    /// No gradient is needed.
    None,
    Variable(GradientPlace),
    Weight(WeightId),
}

impl GradientEdge {
    /// Whether a gradient is needed.
    pub(crate) fn is_needed(self) -> bool {
        self != GradientEdge::None
    }
}

/// How a matrix product is split between the ranks of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorSplit {
    Whole,
    /// Every rank has some outputs: gradients of the input are summed over ranks.
    Outputs,
    /// Every rank has some inputs: results are summed over ranks.
    Inputs,
}

/// The dimension along which ranks divide a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SplitDimension {
    /// The tokens of a tensor without sequences, its first dimension.
    Positions,
    /// The tokens of every sequence.
    Tokens,
    /// The numbers of every token.
    Columns,
}

/// A product with a weight, for its backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearShape {
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    pub(crate) number: NumberFormat,
    pub(crate) is_biased: bool,
    pub(crate) split: TensorSplit,
    /// Whether its gradients are views of the products that make them.
    pub(crate) flattens: bool,
}

/// A product of rows with the weights of their groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedShape {
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    pub(crate) experts: u32,
}

/// A product number by number, for its backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductShape {
    pub(crate) factors: [FactorShape; 2],
    pub(crate) bytes: u64,
    /// The wider format of both.
    pub(crate) number: NumberFormat,
}

/// An operand of a product number by number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FactorShape {
    pub(crate) bytes: u64,
    pub(crate) number: NumberFormat,
    pub(crate) repetition: Repetition,
}

/// How a smaller operand is repeated. Its gradient is a sum over the repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repetition {
    None,
    /// One row, for all rows.
    OverRows,
    /// One number per row, for all numbers of the row.
    AlongRows,
}

/// Heads and formats of fused attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) number: NumberFormat,
    pub(crate) heads: u32,
    /// Heads of keys and values, which several heads of queries share.
    pub(crate) key_value_heads: u32,
    pub(crate) head_width: u32,
    /// Whether a token attends only to those before it.
    pub(crate) is_causal: bool,
}

/// A fused kernel of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionKernel {
    MemoryEfficient,
    Cudnn,
    Flash,
}

impl AttentionKernel {
    /// The kernel that PyTorch takes by itself on a Hopper GPU. Only one of them makes the gradient of a mask.
    pub(crate) fn of(number: NumberFormat, has_mask_gradient: bool) -> AttentionKernel {
        match number {
            NumberFormat::Half if !has_mask_gradient => AttentionKernel::Cudnn,
            NumberFormat::Half | NumberFormat::Single => AttentionKernel::MemoryEfficient,
        }
    }
}

/// The operators that have a backward, with what the sizes of their tensors do not say.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GraphOperation {
    Embedding(Lookup),
    Add {
        /// Where an operand is narrower: the bytes of its gradient.
        narrowed: [Option<u64>; 2],
        /// Where the second operand is the same for every sequence: the number of sequences.
        broadcast_over: Option<u32>,
    },
    Cast {
        /// Bytes before the cast.
        bytes: u64,
    },
    /// One pass over the incoming gradient and the saved result: ReLU, log-softmax.
    Pointwise,
    /// ReLU that wrote in place into a view.
    ReluIntoView,
    Scale,
    /// A number to a constant power.
    Power,
    /// The mean of every row.
    RowMean {
        /// Bytes before the mean.
        bytes: u64,
    },
    /// A copy, or a sum with a constant: the gradient passes unchanged.
    Copy,
    InverseRoot,
    /// A product number by number, of these operands.
    Multiply(ProductShape),
    Negate {
        /// Bytes of the gradient: the incoming one may be a part of a larger tensor.
        bytes: u64,
    },
    /// Two tensors joined into one: each gets its part of the gradient as a view.
    Join {
        /// Where an operand has a narrower format: the bytes of its gradient.
        narrowed: [Option<u64>; 2],
    },
    /// Numbers times a mask, one byte each, and a constant.
    Dropout,
    /// A variable that no operator made, and that was told to get a gradient: both live as long as the loss.
    Leaf,
    /// A part of a tensor with this many bytes: its gradient is the part among zeros.
    Part {
        bytes: u64,
    },
    /// Another order of the same numbers: the gradient is copied into the old order.
    Reorder,
    /// A norm of this many rows.
    LayerNorm {
        rows: u64,
    },
    /// RMS norm of rows of this many numbers, by liger-kernel, as the three below.
    LigerNorm {
        columns: u64,
    },
    LigerRotate {
        copied: [bool; 2],
    },
    LigerGate,
    LigerLoss,
    Linear(LinearShape),
    /// The parts of all ranks, joined: their gradients are parts of sums, and every rank gets its part of the sum.
    GatherSequences,
    /// The same along the numbers of a token, whose gradient is whole on every rank. This rank's part has this many bytes.
    GatherColumns {
        bytes: u64,
    },
    /// Every rank's part of the sum over ranks: the gradients of all parts are joined.
    ScatterSums(SplitDimension),
    /// A product with a frozen weight of 4 bits.
    QuantizedLinear {
        inputs: u32,
        outputs: u32,
    },
    Attention(AttentionShape, AttentionKernel),
    /// Attention with a mask of numbers. The mask's gradient goes to this place, where it needs one.
    MaskedAttention(AttentionShape, Option<GradientPlace>),
    /// One mask for all sequences: its gradient is a sum over them.
    ExpandMask,
    /// Numbers of the variable, or a constant of this many bytes: the gradient has zeros there.
    Choose {
        constant: u64,
    },
    /// A product for each head, of operands with these bytes.
    BatchedProduct {
        bytes: [u64; 2],
    },
    /// Keys or values with these bytes, once for each head that shares them: their gradient is a sum.
    RepeatHeads {
        bytes: u64,
    },
    /// Halves of rows as views of one tensor.
    SplitTwo,
    SoftMax,
    /// Numbers divided by one number per row.
    DivideByRow,
    /// This many rows, by index, of a tensor with these bytes.
    PickRows {
        bytes: u64,
        count: u64,
    },
    GroupedLinear(GroupedShape, NumberFormat),
    /// Queries, keys and values as views of one tensor with this many bytes.
    SplitThree {
        bytes: u64,
    },
    NegativeLogLikelihood,
    FusedLoss,
    /// Rows of a table on the host: their gradient is copied there.
    HostEmbedding,
    /// The choice of experts. All four carry the bytes of the gradient that they make.
    Route(u64),
    Gather(u64),
    Weigh(u64),
    ScatterAdd(u64),
    Convolution(ConvolutionShape, NumberFormat),
    /// Images cut into patches, each a product with a filter and a bias.
    PatchConvolution(PatchShape, NumberFormat),
    /// A weight of one row before the rows of every sequence.
    PrependRow {
        /// Where the rows are narrower than the result: their bytes.
        narrowed: Option<u64>,
    },
    BatchNorm,
    MaxPool,
    MeanPool {
        /// Pixels per mean.
        pixels: u64,
    },
}

/// The most inputs or outputs that carry a gradient: queries, keys and values; scale, shift and input.
pub(crate) const MOST_EDGES: usize = 3;

/// The gradients that a node makes, in the order of its edges.
pub(crate) type Gradients = [Option<Tensor>; MOST_EDGES];

/// One recorded operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphNode {
    pub(crate) operation: GraphOperation,
    /// Where the gradients of its outputs are accumulated.
    pub(crate) first_gradient: GradientPlace,
    pub(crate) outputs: u8,
    /// The place of what it saved in [`Graph::saved`].
    pub(crate) first_saved: u32,
    pub(crate) saved_count: u8,
    pub(crate) edges: [GradientEdge; MOST_EDGES],
    pub(crate) layer: Option<u16>,
}

/// What a node keeps of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SavedTensor {
    Kept(Tensor),
    /// A weight, which is live anyway.
    Weight(WeightId),
    /// A copy in pinned host memory.
    OnHost {
        buffer: BlockSlot,
        bytes: u64,
    },
    /// A weight that was saved inside a checkpoint: to need it runs the block again, as for any other tensor.
    WeightOf {
        checkpoint: u32,
        weight: WeightId,
    },
    /// Dropped: the checkpoint runs its block again, and this is the place among what that saves.
    Recomputed {
        checkpoint: u32,
        place: u32,
    },
    Released,
}

/// A block that is run again in backward.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    pub(crate) layer: u32,
    pub(crate) input: Variable,
    pub(crate) kept_input: SavedTensor,
    /// Further arguments, which live as long as the input.
    pub(crate) held: Vec<Tensor>,
    /// Results that a selective checkpoint keeps, in the order in which the block makes them.
    pub(crate) kept_results: VecDeque<Tensor>,
    /// Saved tensors that refer to this checkpoint; the last one releases the input.
    pub(crate) unreleased: u32,
    /// What running the block again saved, until it is taken.
    pub(crate) recomputed: Vec<Option<Tensor>>,
    pub(crate) is_recomputed: bool,
}

/// What saving a tensor for backward means at the moment (PyTorch's saved-tensor hooks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavingMode {
    /// Nothing is recorded (`no_grad`).
    Off,
    Keep,
    /// Tensors are copied to the host (`save_on_cpu`).
    ToHost,
    /// Tensors are dropped: this checkpoint recomputes them.
    Drop(u32),
    /// This checkpoint is being run again and collects what is saved.
    Collect(u32),
}

/// Everything that one forward pass recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<GraphNode>,
    pub(crate) saved: Vec<SavedTensor>,
    pub(crate) gradients: Vec<Option<Tensor>>,
    pub(crate) checkpoints: Vec<Checkpoint>,
    /// Tokens per sequence in this pass.
    pub(crate) length: u32,
    /// Sequences, or images, of this pass.
    pub(crate) sequences: u32,
    /// Variables that keep their gradient, and these gradients.
    pub(crate) leaves: Vec<Tensor>,
    /// Further arguments of blocks, for those that run again.
    pub(crate) arguments: Vec<Variable>,
    /// Tokens of every expert of every layer in this pass, for a mixture of experts.
    pub(crate) expert_tokens: Vec<u32>,
    /// Keys and values of earlier passes, for models that answer.
    pub(crate) cache: Option<KeyValueCache>,
}

/// Keys and values of all tokens so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyValueCache {
    /// Tokens per sequence, those of this pass included.
    pub(crate) tokens: u32,
    /// Keys and values of every layer that has run.
    pub(crate) layers: Vec<[Tensor; 2]>,
}

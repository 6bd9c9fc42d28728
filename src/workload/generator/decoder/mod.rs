//! A decoder-only transformer in training, told as PyTorch's autograd allocates it in single precision.
//!
//! Pre-norm blocks, fused attention, a ReLU MLP four times as wide, an untied output head, cross-entropy, AdamW over
//! lists of tensors. The order of allocs and frees follows recordings of such runs; small helpers of the kernels are
//! left out. `training` and `variable_length` choose the sequence length of each step, nothing else.

mod pass;

use pass::Pass;

use crate::{
    trace::{BlockSlot, Category, MarkKind, TraceBuilder},
    unit::{MIB, StreamId, Work},
    workload::{Parameter, Parameters, WorkloadError},
};

/// The largest sequence; with the largest batch, all tokens of a step still fit the shapes of work.
pub(super) const MOST_TOKENS: u32 = 1 << 18;

pub(super) const STEPS: Parameter = Parameter::count("steps", 1..=100_000_000, "6", "training steps");
pub(super) const LAYERS: Parameter = Parameter::count("layers", 1..=10_000, "12", "decoder blocks");
pub(super) const WIDTH: Parameter = Parameter::count("width", 1..=1 << 16, "768", "numbers per token");
pub(super) const HEADS: Parameter =
    Parameter::count("heads", 1..=1 << 10, "12", "attention heads; must divide the width");
pub(super) const VOCABULARY: Parameter = Parameter::count("vocab", 1..=1 << 20, "50257", "different tokens");
pub(super) const CONTEXT: Parameter =
    Parameter::count("context", 1..=MOST_TOKENS, "1024", "longest sequence, in tokens");
pub(super) const BATCH: Parameter = Parameter::count("batch", 1..=1 << 12, "8", "sequences per step");

/// Bytes of a single-precision number.
const NUMBER: u64 = 4;
/// What the matrix library takes for itself at the first product of each thread; backward runs on one of its own.
const WORKSPACE: u64 = 32 * MIB;
/// Weights in front of the first block, and in each block.
const WEIGHTS_BEFORE: usize = 2;
const WEIGHTS_PER_BLOCK: usize = 12;

/// The shape of the model and of its batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) layers: u32,
    pub(super) width: u32,
    pub(super) heads: u32,
    pub(super) vocabulary: u32,
    pub(super) context: u32,
    pub(super) batch: u32,
}

impl Model {
    /// Reads the parameters that are declared above.
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<Model, WorkloadError> {
        let model = Model {
            layers: parameters.count(LAYERS.name)?,
            width: parameters.count(WIDTH.name)?,
            heads: parameters.count(HEADS.name)?,
            vocabulary: parameters.count(VOCABULARY.name)?,
            context: parameters.count(CONTEXT.name)?,
            batch: parameters.count(BATCH.name)?,
        };
        if !model.width.is_multiple_of(model.heads) {
            return Err(parameters.refuse(format!("{} heads do not divide a width of {}", model.heads, model.width)));
        }
        Ok(model)
    }

    /// Rows, columns and layer of every weight, in the order in which the model declares them.
    fn weights(&self) -> impl Iterator<Item = (u32, u32, Option<u16>)> {
        let Model { width, vocabulary, context, .. } = *self;
        let block = [
            (1, width), // first norm
            (1, width),
            (width, 3 * width), // queries, keys and values
            (1, 3 * width),
            (width, width), // projection
            (1, width),
            (1, width), // second norm
            (1, width),
            (width, 4 * width), // up
            (1, 4 * width),
            (4 * width, width), // down
            (1, width),
        ];
        let before: [_; WEIGHTS_BEFORE] = [(vocabulary, width, None), (context, width, None)];
        let after = [(1, width, None), (1, width, None), (vocabulary, width, None)];
        let blocks = (0..self.layers)
            .flat_map(move |layer| block.map(|(rows, columns): (u32, u32)| (rows, columns, u16::try_from(layer).ok())));
        before.into_iter().chain(blocks).chain(after)
    }
}

/// A model in training: what it keeps from step to step.
pub(super) struct Decoder {
    model: Model,
    weights: Vec<Weight>,
    /// The batch of the step before: the program holds it until it has the next.
    last_batch: Option<BlockSlot>,
}

/// One parameter tensor and what belongs to it.
struct Weight {
    slot: BlockSlot,
    bytes: u64,
    layer: Option<u16>,
    gradient: Option<BlockSlot>,
    /// AdamW's two running means, from the first step on.
    moments: Option<[BlockSlot; 2]>,
}

impl Decoder {
    /// A model that is not on the device yet.
    pub(super) fn new(model: Model) -> Decoder {
        Decoder { model, weights: Vec::new(), last_batch: None }
    }

    /// Its shape.
    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    /// Writes one training step; the first one brings the model to the device.
    pub(super) fn step(&mut self, story: &mut TraceBuilder, step: u32, length: u32) {
        if self.weights.is_empty() {
            self.load(story);
        }
        story.mark(MarkKind::Step, "step", step);
        story.mark(MarkKind::Phase, "forward", step);
        let mut pass = Pass { story, decoder: self, length };
        if step == 0 {
            pass.workspace();
        }
        let saved = pass.forward();
        pass.story.mark(MarkKind::Phase, "backward", step);
        if step == 0 {
            pass.workspace();
        }
        pass.backward(saved);
        story.mark(MarkKind::Phase, "optimizer", step);
        self.optimize(story);
    }

    fn load(&mut self, story: &mut TraceBuilder) {
        story.mark(MarkKind::Phase, "load", 0);
        for (rows, columns, layer) in self.model.weights() {
            let bytes = u64::from(rows) * u64::from(columns) * NUMBER;
            let tag = story.tag(Category::Parameter, layer);
            let slot = story.alloc(bytes, StreamId::DEFAULT, tag);
            story.work(Work::CopyIn { bytes, pinned: false }, StreamId::DEFAULT, &[slot]);
            self.weights.push(Weight { slot, bytes, layer, gradient: None, moments: None });
        }
    }

    /// AdamW over the whole list of weights at once, so the temporary of every weight lives until the last is done.
    fn optimize(&mut self, story: &mut TraceBuilder) {
        for weight in self.weights.iter_mut().filter(|weight| weight.moments.is_none()) {
            let tag = story.tag(Category::Optimizer, weight.layer);
            weight.moments = Some([(); 2].map(|()| story.alloc(weight.bytes, StreamId::DEFAULT, tag)));
        }
        let mut roots = Vec::with_capacity(self.weights.len());
        for weight in &self.weights {
            let tag = story.tag(Category::Temporary, weight.layer);
            let root = story.alloc(weight.bytes, StreamId::DEFAULT, tag);
            roots.push(root);
            if let (Some([mean, square]), Some(gradient)) = (weight.moments, weight.gradient) {
                // Both means are read and written, the gradient is read.
                let means = Work::Elementwise { bytes: 5 * weight.bytes };
                story.work(means, StreamId::DEFAULT, &[gradient, mean, square]);
                // The root is written and read again, the weight read and written, the mean read.
                let update = Work::Elementwise { bytes: 6 * weight.bytes };
                story.work(update, StreamId::DEFAULT, &[square, root, mean, weight.slot]);
            }
        }
        for root in roots.into_iter().rev() {
            story.free(root);
        }
        for gradient in self.weights.iter_mut().filter_map(|weight| weight.gradient.take()) {
            story.free(gradient);
        }
    }
}

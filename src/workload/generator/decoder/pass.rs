//! One forward and one backward pass.
//!
//! Forward keeps what autograd saves; backward takes it in reverse, frees it as its reader is done, and leaves a
//! gradient for every weight.

use super::{Decoder, NUMBER, WEIGHTS_BEFORE, WEIGHTS_PER_BLOCK, WORKSPACE};
use crate::{
    trace::{BlockSlot, Category, TraceBuilder},
    unit::{Dtype, StreamId, Work},
};

/// The places of a block's weights; the bias follows each.
const NORM_1: usize = 0;
const QUERY_KEY_VALUE: usize = 2;
const PROJECTION: usize = 4;
const NORM_2: usize = 6;
const UP: usize = 8;
const DOWN: usize = 10;
/// The places of the embeddings' weights.
const TOKENS: usize = 0;
const POSITIONS: usize = 1;

/// A pass over `length` tokens of every sequence.
pub(super) struct Pass<'a> {
    pub(super) story: &'a mut TraceBuilder,
    pub(super) decoder: &'a mut Decoder,
    pub(super) length: u32,
}

/// What forward keeps for backward.
pub(super) struct Saved {
    position_ids: BlockSlot,
    blocks: Vec<SavedBlock>,
    norm: SavedNorm,
    probabilities: BlockSlot,
    loss: BlockSlot,
}

#[derive(Clone, Copy)]
struct SavedBlock {
    norm_1: SavedNorm,
    query_key_value: BlockSlot,
    attended: BlockSlot,
    log_sums: BlockSlot,
    norm_2: SavedNorm,
    hidden: BlockSlot,
}

#[derive(Clone, Copy)]
struct SavedNorm {
    input: BlockSlot,
    mean: BlockSlot,
    deviation: BlockSlot,
    /// Saved by the product that follows.
    output: BlockSlot,
}

/// A product with a weight of `inputs` by `outputs`.
#[derive(Clone, Copy)]
struct Linear {
    weight: usize,
    inputs: u32,
    outputs: u32,
    biased: bool,
}

impl Pass<'_> {
    /// What the matrix library takes for itself, for good.
    pub(super) fn workspace(&mut self) {
        let tag = self.story.tag(Category::Workspace, None);
        self.story.alloc(WORKSPACE, StreamId::DEFAULT, tag);
    }

    /// From the batch to the loss.
    pub(super) fn forward(&mut self) -> Saved {
        let model = *self.decoder.model();
        let ids_bytes = u64::from(self.tokens()) * 8;
        let batch = self.alloc(ids_bytes, Category::Input, None);
        if let Some(last) = self.decoder.last_batch.replace(batch) {
            self.story.free(last);
        }
        self.work(Work::CopyIn { bytes: ids_bytes, pinned: false }, &[batch]);

        let embedded = self.activation(self.rows(model.width), None);
        self.elementwise(2 * self.rows(model.width), &[batch, self.decoder.weights[TOKENS].slot, embedded]);
        let position_ids = self.activation(u64::from(self.length) * 8, None);
        let positions_bytes = u64::from(self.length) * u64::from(model.width) * NUMBER;
        let positions = self.temporary(positions_bytes, None);
        self.elementwise(2 * positions_bytes, &[position_ids, self.decoder.weights[POSITIONS].slot, positions]);
        let mut stream = self.add(embedded, positions, None);
        self.free([embedded, positions]);

        let mut blocks = Vec::with_capacity(model.layers as usize);
        for layer in 0..model.layers as u16 {
            let (saved, output) = self.block_forward(layer, stream);
            blocks.push(saved);
            stream = output;
        }
        let norm = self.norm_forward(stream, None);

        let logits_bytes = self.rows(model.vocabulary);
        let logits = self.linear_forward(self.head(), norm.output, None, Category::Temporary);
        let probabilities = self.activation(logits_bytes, None);
        self.elementwise(2 * logits_bytes, &[logits, probabilities]);
        let loss = self.activation(NUMBER, None);
        self.work(Work::Reduction { bytes: u64::from(self.tokens()) * NUMBER }, &[probabilities, loss]);
        self.free([logits]);
        Saved { position_ids, blocks, norm, probabilities, loss }
    }

    /// From the loss to the gradients.
    pub(super) fn backward(&mut self, saved: Saved) {
        let model = *self.decoder.model();
        let logits_bytes = self.rows(model.vocabulary);
        let of_probabilities = self.temporary(logits_bytes, None);
        self.elementwise(logits_bytes, &[saved.loss, of_probabilities]);
        let of_logits = self.temporary(logits_bytes, None);
        self.elementwise(3 * logits_bytes, &[of_probabilities, saved.probabilities, of_logits]);
        self.free([of_probabilities, saved.probabilities]);
        let of_output = self.linear_backward(self.head(), of_logits, saved.norm.output, None);
        self.free([of_logits, saved.norm.output]);
        // The gradient of the residual stream: every norm's share is added to it in place.
        let of_stream = self.norm_backward(saved.norm, of_output, self.head().weight - 2, None);

        for (layer, block) in saved.blocks.into_iter().enumerate().rev() {
            self.block_backward(layer as u16, block, of_stream);
        }

        let positions_bytes = u64::from(self.length) * u64::from(model.width) * NUMBER;
        let of_positions = self.temporary(positions_bytes, None);
        self.work(Work::Reduction { bytes: self.rows(model.width) }, &[of_stream, of_positions]);
        for (place, input) in [(POSITIONS, of_positions), (TOKENS, of_stream)] {
            let gradient = self.gradient(place);
            self.elementwise(2 * self.decoder.weights[place].bytes, &[input, gradient]);
        }
        self.free([of_positions, saved.position_ids, of_stream, saved.loss]);
    }

    fn block_forward(&mut self, layer: u16, input: BlockSlot) -> (SavedBlock, BlockSlot) {
        let (model, of) = (*self.decoder.model(), Some(layer));
        let norm_1 = self.norm_forward(input, of);
        let query_key_value =
            self.linear_forward(self.linear(layer, QUERY_KEY_VALUE), norm_1.output, of, Category::Activation);
        let attended = self.activation(self.rows(model.width), of);
        let log_sums = self.activation(self.rows(model.heads), of);
        self.work(self.attention(false), &[query_key_value, log_sums, attended]);
        let projected = self.linear_forward(self.linear(layer, PROJECTION), attended, of, Category::Temporary);
        let middle = self.add(input, projected, of);
        self.free([projected]);

        let norm_2 = self.norm_forward(middle, of);
        let raised = self.linear_forward(self.linear(layer, UP), norm_2.output, of, Category::Temporary);
        let hidden = self.activation(self.rows(4 * model.width), of);
        self.elementwise(2 * self.rows(4 * model.width), &[raised, hidden]);
        self.free([raised]);
        let lowered = self.linear_forward(self.linear(layer, DOWN), hidden, of, Category::Temporary);
        let output = self.add(middle, lowered, of);
        self.free([lowered]);
        (SavedBlock { norm_1, query_key_value, attended, log_sums, norm_2, hidden }, output)
    }

    fn block_backward(&mut self, layer: u16, saved: SavedBlock, of_stream: BlockSlot) {
        let (model, of) = (*self.decoder.model(), Some(layer));
        let wide = self.rows(4 * model.width);
        let of_hidden = self.linear_backward(self.linear(layer, DOWN), of_stream, saved.hidden, of);
        let of_raised = self.temporary(wide, of);
        self.elementwise(3 * wide, &[of_hidden, saved.hidden, of_raised]);
        self.free([of_hidden, saved.hidden]);
        let of_normed = self.linear_backward(self.linear(layer, UP), of_raised, saved.norm_2.output, of);
        self.free([of_raised, saved.norm_2.output]);
        self.join(saved.norm_2, of_normed, self.place(layer, NORM_2), of, of_stream);

        let of_attended = self.linear_backward(self.linear(layer, PROJECTION), of_stream, saved.attended, of);
        let of_query_key_value = self.attention_backward(of_attended, &saved, of);
        let of_normed =
            self.linear_backward(self.linear(layer, QUERY_KEY_VALUE), of_query_key_value, saved.norm_1.output, of);
        self.free([of_query_key_value, saved.norm_1.output]);
        self.join(saved.norm_1, of_normed, self.place(layer, NORM_1), of, of_stream);
    }

    /// The gradients of queries, keys and values, first apart, then side by side.
    fn attention_backward(&mut self, of_attended: BlockSlot, saved: &SavedBlock, of: Option<u16>) -> BlockSlot {
        let model = *self.decoder.model();
        let narrow = self.rows(model.width);
        let [of_query, of_key, of_value] = [(); 3].map(|()| self.temporary(narrow, of));
        let sums = self.temporary(narrow, of);
        let deltas = self.temporary(self.rows(model.heads), of);
        self.work(self.attention(true), &[of_attended, saved.query_key_value, saved.log_sums, of_query]);
        self.free([deltas, sums, of_attended, saved.query_key_value, saved.log_sums, saved.attended]);
        let joined = self.temporary(3 * narrow, of);
        self.elementwise(6 * narrow, &[of_query, of_key, of_value, joined]);
        self.free([of_query, of_key, of_value]);
        joined
    }

    fn norm_forward(&mut self, input: BlockSlot, of: Option<u16>) -> SavedNorm {
        let bytes = self.rows(self.decoder.model().width);
        let output = self.activation(bytes, of);
        let [mean, deviation] = [(); 2].map(|()| self.activation(self.rows(1), of));
        self.elementwise(2 * bytes, &[input, output]);
        SavedNorm { input, mean, deviation, output }
    }

    /// Frees what the norm saved, and the gradient that comes in.
    fn norm_backward(&mut self, saved: SavedNorm, incoming: BlockSlot, weight: usize, of: Option<u16>) -> BlockSlot {
        let bytes = self.rows(self.decoder.model().width);
        let of_input = self.temporary(bytes, of);
        let [of_scale, _] = [weight, weight + 1].map(|weight| self.gradient(weight));
        self.elementwise(3 * bytes, &[incoming, saved.input, of_input]);
        self.work(Work::Reduction { bytes: 2 * bytes }, &[incoming, saved.input, of_scale]);
        self.free([incoming, saved.input, saved.mean, saved.deviation]);
        of_input
    }

    /// A norm's backward, added to the gradient of the residual stream.
    fn join(&mut self, saved: SavedNorm, incoming: BlockSlot, weight: usize, of: Option<u16>, of_stream: BlockSlot) {
        let share = self.norm_backward(saved, incoming, weight, of);
        self.elementwise(3 * self.rows(self.decoder.model().width), &[share, of_stream]);
        self.free([share]);
    }

    fn linear_forward(&mut self, linear: Linear, input: BlockSlot, of: Option<u16>, category: Category) -> BlockSlot {
        let output = self.alloc(self.rows(linear.outputs), category, of);
        let product = self.gemm(self.tokens(), linear.outputs, linear.inputs);
        self.work(product, &[input, self.decoder.weights[linear.weight].slot, output]);
        output
    }

    /// The gradient of the input; leaves those of weight and bias behind.
    fn linear_backward(&mut self, linear: Linear, incoming: BlockSlot, input: BlockSlot, of: Option<u16>) -> BlockSlot {
        let of_input = self.temporary(self.rows(linear.inputs), of);
        let product = self.gemm(self.tokens(), linear.inputs, linear.outputs);
        self.work(product, &[incoming, self.decoder.weights[linear.weight].slot, of_input]);
        let of_weight = self.gradient(linear.weight);
        self.work(self.gemm(linear.outputs, linear.inputs, self.tokens()), &[incoming, input, of_weight]);
        if linear.biased {
            let of_bias = self.gradient(linear.weight + 1);
            self.work(Work::Reduction { bytes: self.rows(linear.outputs) }, &[incoming, of_bias]);
        }
        of_input
    }

    fn add(&mut self, left: BlockSlot, right: BlockSlot, of: Option<u16>) -> BlockSlot {
        let bytes = self.rows(self.decoder.model().width);
        let sum = self.activation(bytes, of);
        self.elementwise(3 * bytes, &[left, right, sum]);
        sum
    }

    fn gradient(&mut self, weight: usize) -> BlockSlot {
        let (bytes, layer) = (self.decoder.weights[weight].bytes, self.decoder.weights[weight].layer);
        let slot = self.alloc(bytes, Category::Gradient, layer);
        self.decoder.weights[weight].gradient = Some(slot);
        slot
    }

    fn place(&self, layer: u16, weight: usize) -> usize {
        WEIGHTS_BEFORE + WEIGHTS_PER_BLOCK * usize::from(layer) + weight
    }

    fn linear(&self, layer: u16, weight: usize) -> Linear {
        let width = self.decoder.model().width;
        let (inputs, outputs) = match weight {
            QUERY_KEY_VALUE => (width, 3 * width),
            UP => (width, 4 * width),
            DOWN => (4 * width, width),
            _ => (width, width),
        };
        Linear { weight: self.place(layer, weight), inputs, outputs, biased: true }
    }

    fn head(&self) -> Linear {
        let model = self.decoder.model();
        let weight = self.decoder.weights.len() - 1;
        Linear { weight, inputs: model.width, outputs: model.vocabulary, biased: false }
    }

    fn attention(&self, backward: bool) -> Work {
        let model = self.decoder.model();
        Work::Attention {
            batch: model.batch,
            heads: model.heads,
            queries: self.length,
            keys: self.length,
            head_width: model.width / model.heads,
            dtype: Dtype::F32,
            backward,
            causal: false,
        }
    }

    fn gemm(&self, m: u32, n: u32, k: u32) -> Work {
        Work::Gemm { m, n, k, batch: 1, dtype: Dtype::F32 }
    }

    /// Tokens of the whole batch.
    fn tokens(&self) -> u32 {
        self.decoder.model().batch * self.length
    }

    /// Bytes of a tensor with this many numbers per token.
    fn rows(&self, columns: u32) -> u64 {
        u64::from(self.tokens()) * u64::from(columns) * NUMBER
    }

    fn activation(&mut self, bytes: u64, of: Option<u16>) -> BlockSlot {
        self.alloc(bytes, Category::Activation, of)
    }

    fn temporary(&mut self, bytes: u64, of: Option<u16>) -> BlockSlot {
        self.alloc(bytes, Category::Temporary, of)
    }

    fn alloc(&mut self, bytes: u64, category: Category, layer: Option<u16>) -> BlockSlot {
        let tag = self.story.tag(category, layer);
        self.story.alloc(bytes, StreamId::DEFAULT, tag)
    }

    fn free<const COUNT: usize>(&mut self, slots: [BlockSlot; COUNT]) {
        for slot in slots {
            self.story.free(slot);
        }
    }

    fn elementwise(&mut self, bytes: u64, operands: &[BlockSlot]) {
        self.work(Work::Elementwise { bytes }, operands);
    }

    fn work(&mut self, work: Work, operands: &[BlockSlot]) {
        self.story.work(work, StreamId::DEFAULT, operands);
    }
}

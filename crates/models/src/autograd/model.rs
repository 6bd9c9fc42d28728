//! The reference model: decoder-only, pre-norm, learned positions, fused attention, a ReLU MLP four times as wide, an
//! untied output head.
//!
//! Written as its Python is: every local lives until its scope ends, and that is when blocks die.

use super::{
    embedding::INDEX,
    graph::Value,
    machine::{Machine, Tensor},
    precision::Number,
    saving::Saving,
};
use oomph_base::Work;
use oomph_trace::Category;

/// What a forward pass ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The loss against the next tokens.
    Loss,
    /// The logits.
    Logits,
}

impl Machine {
    /// From token numbers to the loss or the logits. A first stage of a pipeline ends with its last block's output.
    pub(super) fn forward(&mut self, ids: Tensor, ending: Ending) -> Value {
        self.share_out_tokens();
        let mut x = self.embed(ids);
        for layer in 0..self.layout.blocks.len() as u32 {
            self.enter_layer(layer);
            let output =
                if self.is_checkpointed(layer) { self.checkpoint_block(layer, x) } else { self.block(layer, x) };
            self.release(x.tensor);
            x = output;
            self.leave_layer(layer);
        }
        self.layer = None;
        let Some((norm, head)) = self.layout.ending else { return x };
        let normed = self.norm(x, norm);
        let chunks = self.plan.techniques.loss_chunks.filter(|_| ending == Ending::Loss);
        if let Some(chunks) = chunks {
            let loss = self.fused_loss(normed, &head, ids, chunks);
            self.release_all([normed.tensor, x.tensor]);
            return loss;
        }
        let logits = self.linear(normed, head, Category::Activation);
        self.release(normed.tensor);
        if ending == Ending::Logits {
            self.release(x.tensor);
            return logits;
        }
        let loss = self.cross_entropy(logits, ids);
        self.release_all([x.tensor, logits.tensor]);
        loss
    }

    fn embed(&mut self, ids: Tensor) -> Value {
        let length = u64::from(self.graph.length);
        let tokens = self.embedding(self.layout.tokens, ids, self.tokens());
        if self.plan.techniques.tensor_ranks > 1 {
            // Every rank looked up the rows that it has.
            self.sum_over_ranks(tokens.tensor);
        }
        let range = self.alloc(INDEX * length, Category::Activation);
        self.elementwise(INDEX * length, [range]);
        let positions = self.embedding(self.layout.positions, range, length);
        self.release(range);
        let x = self.add_to_every_sequence(tokens, positions);
        self.release_all([tokens.tensor, positions.tensor]);
        x
    }

    fn block(&mut self, layer: u32, input: Value) -> Value {
        let weights = self.layout.blocks[layer as usize];
        let (middle, lowered) = if weights.router.is_some() {
            self.block_until_mixed(layer, input)
        } else {
            let (middle, hidden) = self.block_until_hidden(layer, input);
            let lowered = self.linear(hidden, weights.down, Category::Temporary);
            self.release(hidden.tensor);
            (middle, lowered)
        };
        let output = self.add(middle, lowered, Category::Activation);
        self.release_all([lowered.tensor, middle.tensor]);
        output
    }

    /// A block for its checkpoint. It stops as soon as all is saved that was saved the first time: before the last
    /// product.
    pub(super) fn recompute_block(&mut self, layer: u32, input: Value) {
        let weights = self.layout.blocks[layer as usize];
        if weights.router.is_some() {
            // The last expert saves where its rows go: there is nothing to stop before.
            let (middle, mixed) = self.block_until_mixed(layer, input);
            self.forget_casts();
            self.release_all([mixed.tensor, middle.tensor]);
            return;
        }
        let (middle, hidden) = self.block_until_hidden(layer, input);
        if weights.down.adapter.is_none() {
            self.linear_savings(hidden, weights.down);
        } else {
            // The adapter saves after the product.
            let lowered = self.linear(hidden, weights.down, Category::Temporary);
            self.release(lowered.tensor);
        }
        self.forget_casts();
        self.release_all([hidden.tensor, middle.tensor]);
    }

    fn block_until_mixed(&mut self, layer: u32, input: Value) -> (Value, Value) {
        let weights = self.layout.blocks[layer as usize];
        let (middle, normed) = self.block_until_normed(layer, input);
        let mixed = self.mixture(layer, normed, &weights);
        self.release(normed.tensor);
        (middle, mixed)
    }

    fn block_until_normed(&mut self, layer: u32, input: Value) -> (Value, Value) {
        let weights = self.layout.blocks[layer as usize];
        let normed = self.norm(input, weights.norm_1);
        let attended = self.attend(layer, normed);
        self.release(normed.tensor);
        let middle = self.add(input, attended, Category::Activation);
        self.release(attended.tensor);
        let normed = self.norm(middle, weights.norm_2);
        (middle, normed)
    }

    fn block_until_hidden(&mut self, layer: u32, input: Value) -> (Value, Value) {
        let weights = self.layout.blocks[layer as usize];
        let (middle, normed) = self.block_until_normed(layer, input);
        let raised = self.linear(normed, weights.up, Category::Temporary);
        self.release(normed.tensor);
        (middle, self.relu(raised))
    }

    fn attend(&mut self, layer: u32, input: Value) -> Value {
        let weights = self.layout.blocks[layer as usize];
        let query_key_value = self.linear(input, weights.query_key_value, Category::Activation);
        let attended = self.attention(query_key_value);
        let projected = self.linear(attended, weights.projection, Category::Temporary);
        self.release_all([query_key_value.tensor, attended.tensor]);
        projected
    }

    fn checkpoint_block(&mut self, layer: u32, input: Value) -> Value {
        let outer = self.begin_checkpoint(layer, input);
        let output = self.block(layer, input);
        self.end_checkpoint(outer);
        output
    }

    fn is_checkpointed(&self, layer: u32) -> bool {
        self.saving != Saving::Nothing
            && self.plan.techniques.checkpoint_every.is_some_and(|every| layer.is_multiple_of(every))
    }

    /// Tokens of this pass.
    pub(super) fn tokens(&self) -> u64 {
        u64::from(self.graph.sequences) * u64::from(self.graph.length)
    }

    /// Bytes of a tensor with this many numbers per token.
    pub(super) fn rows(&self, columns: u32, number: Number) -> u64 {
        self.tokens() * u64::from(columns) * number.bytes()
    }

    /// A batch from the host.
    pub(super) fn copy_in(&mut self, bytes: u64, category: Category) -> Tensor {
        let tensor = self.alloc(bytes, category);
        self.work(Work::CopyIn { bytes, pinned: false }, [tensor]);
        tensor
    }
}

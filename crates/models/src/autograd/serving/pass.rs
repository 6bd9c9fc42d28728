//! A forward pass over new tokens of several sequences, whose earlier ones are cached.

use super::{
    super::{
        graph::{Origin, Value},
        machine::{Machine, Tensor},
        precision::Number,
    },
    Sequence,
    cache::CacheShape,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Bytes of a token's number.
const TOKEN: u64 = 8;
/// Keys of attention are counted in steps of this many, or every length would be a shape of its own.
const KEYS_STEP: u32 = 64;

impl Machine {
    /// Runs `new_tokens` tokens of each sequence through the model and samples one more for each.
    pub(super) fn generate(&mut self, sequences: &mut [Sequence], new_tokens: u32, shape: &CacheShape) {
        (self.graph.sequences, self.graph.length) = (sequences.len() as u32, new_tokens);
        for sequence in sequences.iter_mut() {
            sequence.length += new_tokens;
            self.extend_pages(&mut sequence.cache, shape, sequence.length);
        }
        let ids = self.copy_in(TOKEN * self.tokens(), Category::Input);
        let tokens = self.embedding(self.layout.tokens, ids, self.tokens());
        let places = self.copy_in(TOKEN * self.tokens(), Category::Input);
        let positions = self.embedding(self.layout.positions, places, self.tokens());
        self.release_all([ids, places]);
        let mut x = self.add(tokens, positions, Category::Activation);
        self.release_all([tokens.tensor, positions.tensor]);
        for layer in 0..self.layout.blocks.len() as u32 {
            self.enter_layer(layer);
            let output = self.serve_block(layer, x, sequences, shape);
            self.release(x.tensor);
            x = output;
        }
        self.layer = None;
        self.sample(x);
    }

    fn serve_block(&mut self, layer: u32, input: Value, sequences: &mut [Sequence], shape: &CacheShape) -> Value {
        let weights = self.layout.blocks[layer as usize];
        let normed = self.norm(input, weights.norm_1);
        let query_key_value = self.linear(normed, weights.query_key_value, Category::Temporary);
        self.release(normed.tensor);
        let mut keys = 0;
        for sequence in sequences.iter_mut() {
            self.append_to_cache(&mut sequence.cache, shape, layer, sequence.length);
            keys = keys.max(sequence.length);
        }
        let attended = self.attend_to_cache(query_key_value, keys);
        self.release(query_key_value.tensor);
        let projected = self.linear(attended, weights.projection, Category::Temporary);
        self.release(attended.tensor);
        let middle = self.add(input, projected, Category::Activation);
        self.release(projected.tensor);
        let normed = self.norm(middle, weights.norm_2);
        let raised = self.linear(normed, weights.up, Category::Temporary);
        self.release(normed.tensor);
        let hidden = self.relu(raised);
        let lowered = self.linear(hidden, weights.down, Category::Temporary);
        self.release(hidden.tensor);
        let output = self.add(middle, lowered, Category::Activation);
        self.release_all([lowered.tensor, middle.tensor]);
        output
    }

    fn attend_to_cache(&mut self, query_key_value: Value, keys: u32) -> Value {
        let number = query_key_value.number;
        let output = self.alloc(self.rows(self.plan.shape.width, number), Category::Activation);
        let work = Work::Attention {
            batch: self.graph.sequences,
            heads: self.plan.shape.heads,
            queries: self.graph.length,
            keys: keys.next_multiple_of(KEYS_STEP),
            head_width: self.plan.shape.head_width(),
            dtype: self.plan.precision.of_attention(number),
            backward: false,
            causal: self.graph.length > 1,
        };
        self.work(work, [query_key_value.tensor, output]);
        Value { tensor: output, number, origin: Origin::Constant }
    }

    /// The logits of every sequence's last token, their probabilities in single precision, and a token drawn from them.
    fn sample(&mut self, x: Value) {
        let Some((norm, head)) = self.layout.ending else { return };
        let normed = self.norm(x, norm);
        self.release(x.tensor);
        let last = self.alloc(self.bytes(normed.tensor) / u64::from(self.graph.length), Category::Activation);
        self.elementwise(2 * self.bytes(last), [normed.tensor, last]);
        self.release(normed.tensor);
        let logits = self.linear(Value { tensor: last, ..normed }, head, Category::Activation);
        self.release(last);
        let rows = u64::from(self.graph.sequences);
        let of_logits = rows * u64::from(head.outputs) * Number::Single.bytes();
        let probabilities = self.temporary(of_logits);
        self.elementwise(2 * of_logits, [logits.tensor, probabilities]);
        self.release(logits.tensor);
        let drawn: Tensor = self.temporary(rows * TOKEN);
        self.work(Work::Reduction { bytes: of_logits }, [probabilities, drawn]);
        self.work(Work::CopyOut { bytes: rows * TOKEN, pinned: false }, [drawn]);
        self.release_all([probabilities, drawn]);
    }
}

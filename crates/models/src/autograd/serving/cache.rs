//! The keys and values of a sequence, and the ways in which programs keep them.

use super::super::machine::{Machine, Tensor};
use oomph_trace::Category;

/// How the cache of a sequence grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeping {
    /// Two tensors a layer, made anew with every token (`torch.cat`).
    Concatenated,
    /// Two tensors a layer, as long as the context from the beginning.
    Preallocated,
    /// Pages of so many tokens, each with the keys and values of all layers, one at a time.
    Paged { tokens: u32 },
}

/// What a sequence's cache is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub(super) keeping: Keeping,
    pub(super) layers: u32,
    /// Bytes of one token's keys, or values, in one layer.
    pub(super) bytes_per_token: u64,
    pub(super) context: u32,
}

/// The cache of one sequence.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// Keys and values layer by layer, or pages.
    tensors: Vec<Tensor>,
}

impl CacheShape {
    fn of_tokens(&self, tokens: u32) -> u64 {
        self.bytes_per_token * u64::from(tokens)
    }
}

impl Machine {
    /// Before a pass: pages for all tokens that the sequence will then have.
    pub(super) fn extend_pages(&mut self, cache: &mut Cache, shape: &CacheShape, tokens: u32) {
        let Keeping::Paged { tokens: per_page } = shape.keeping else { return };
        let layer = self.layer.take();
        while (cache.tensors.len() as u32) < tokens.div_ceil(per_page) {
            let bytes = 2 * u64::from(shape.layers) * shape.of_tokens(per_page);
            cache.tensors.push(self.alloc(bytes, Category::Activation));
        }
        self.layer = layer;
    }

    /// Within a layer: its new keys and values, up to the sequence's `tokens`, join those that are there.
    pub(super) fn append_to_cache(&mut self, cache: &mut Cache, shape: &CacheShape, layer: u32, tokens: u32) {
        let places = [2 * layer as usize, 2 * layer as usize + 1];
        match shape.keeping {
            Keeping::Concatenated => {
                for place in places {
                    let longer = self.alloc(shape.of_tokens(tokens), Category::Activation);
                    match cache.tensors.get(place).copied() {
                        Some(before) => {
                            self.elementwise(2 * shape.of_tokens(tokens), [before, longer]);
                            self.release(before);
                            cache.tensors[place] = longer;
                        }
                        None => cache.tensors.push(longer),
                    }
                }
            }
            Keeping::Preallocated => {
                for place in places {
                    if place == cache.tensors.len() {
                        cache.tensors.push(self.alloc(shape.of_tokens(shape.context), Category::Activation));
                    }
                }
            }
            Keeping::Paged { .. } => {}
        }
    }

    /// A sequence is complete: its cache goes.
    pub(super) fn drop_cache(&mut self, cache: Cache) {
        for tensor in cache.tensors {
            self.release(tensor);
        }
    }
}

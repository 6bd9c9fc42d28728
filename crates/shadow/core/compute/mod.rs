//! Computes small known values through PyTorch's simplest kernels, so that what a program reads back from masks, lengths and
//! flags is right.
//!
//! A kernel is recognised by its mangled name, once, at its first launch (`recognise`). Its arguments have the layout of
//! PyTorch's headers (`layout`), and are checked against each other before they are used: an element count against the
//! sizes, pointers against the device's range. Elements that are not known stay unknown, one by one, except where the other
//! operand decides: `true or unknown` is true. Whatever is not recognised leaves its outputs unknown (`launch`).

mod concatenate;
mod element;
mod elementwise;
mod layout;
mod recognise;
mod reduce;

pub use recognise::Recipe;

use crate::{arguments::In, state::Shadow};

/// What a recognised launch did to known values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computed {
    /// Its outputs are as known as they can be.
    Done,
    /// A count of nonzero elements, in the first pass of two.
    Count(u64),
    /// Nothing: the outputs are to be forgotten.
    No,
}

/// Computes the outputs of a recognised kernel.
pub fn compute(shadow: &mut Shadow, recipe: &Recipe, grid: [u32; 3], arguments: In<u64>) -> Computed {
    let done = match recipe {
        Recipe::Elementwise(recipe) => elementwise::compute(&mut shadow.values, recipe, arguments),
        Recipe::Range => elementwise::range(&mut shadow.values, arguments),
        Recipe::Reduction(recipe) => reduce::compute(&mut shadow.values, recipe, arguments),
        Recipe::NonzeroCount(element) => return reduce::count(&mut shadow.values, *element, arguments),
        Recipe::Concatenation(recipe) => concatenate::compute(&mut shadow.values, recipe, grid[1], arguments),
    };
    if done.is_some() { Computed::Done } else { Computed::No }
}

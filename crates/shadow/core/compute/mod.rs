//! Computes small known values through PyTorch's simplest kernels, so that what a program reads back from masks, lengths and
//! flags is right.
//!
//! A kernel is recognised by its mangled name, once, at its first launch (`recognise`). Its arguments have the layout of
//! PyTorch's headers ([`Offsets`]), and are checked against each other before they are used: an element count against the
//! sizes, pointers against the device's range. Elements that are not known stay unknown, one by one, except where the other
//! operand decides: `true or unknown` is true. Whatever is not recognised leaves its outputs unknown (`launch`).

mod concatenate;
mod element;
mod elementwise;
mod recognise;
mod reduce;

pub use concatenate::written_bytes as concatenated_bytes;
pub use recognise::{Recipe, largest_parameter};

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
        Recipe::Scan(kind) => reduce::scan(&mut shadow.values, *kind, arguments),
        Recipe::Concatenation(recipe) => concatenate::compute(&mut shadow.values, recipe, grid[1], arguments),
    };
    if done.is_some() { Computed::Done } else { Computed::No }
}

/// `MAX_DIMS` of an offset calculator.
const MAX_DIMENSIONS: usize = 25;
/// `IntDivider<unsigned int>`: the divisor and two numbers that replace the division.
const DIVIDER_BYTES: usize = 12;
const SIZES_AT: usize = 4;
const STRIDES_AT: usize = SIZES_AT + MAX_DIMENSIONS * DIVIDER_BYTES;

/// Offsets in bytes of the elements of `N` operands.
#[derive(Debug, PartialEq, Eq)]
pub struct Offsets<const N: usize> {
    dimensions: Vec<(u64, [u64; N])>,
}

impl<const N: usize> Offsets<N> {
    /// How many bytes the structure has.
    pub const BYTES: usize = STRIDES_AT + MAX_DIMENSIONS * N * 4;

    /// Reads a calculator at a byte of an argument; `None` where it cannot be one.
    pub fn read(argument: In<u8>, at: usize) -> Option<Offsets<N>> {
        let count = usize::try_from(argument.field::<i32>(at)?).ok().filter(|&count| count <= MAX_DIMENSIONS)?;
        let mut dimensions = Vec::with_capacity(count);
        for dimension in 0..count {
            let size = u64::from(argument.field::<u32>(at + SIZES_AT + dimension * DIVIDER_BYTES)?);
            let mut strides = [0; N];
            for (operand, stride) in strides.iter_mut().enumerate() {
                *stride = u64::from(argument.field::<u32>(at + STRIDES_AT + (dimension * N + operand) * 4)?);
            }
            if size == 0 {
                return None;
            }
            dimensions.push((size, strides));
        }
        Some(Offsets { dimensions })
    }

    /// How many elements the sizes give.
    pub fn count(&self) -> u64 {
        self.dimensions.iter().fold(1, |product, (size, _)| product.saturating_mul(*size))
    }

    /// The offsets of an element; the first dimension is the fastest.
    pub fn of(&self, index: u64) -> [u64; N] {
        let mut rest = index;
        let mut offsets = [0; N];
        for (size, strides) in &self.dimensions {
            let position = rest % size;
            rest /= size;
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += position * stride;
            }
        }
        offsets
    }
}

/// The next multiple of an alignment.
pub const fn aligned(at: usize, alignment: usize) -> usize {
    at.next_multiple_of(alignment)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The bytes of a calculator.
    pub fn calculator<const N: usize>(dimensions: &[(u32, [u32; N])]) -> Vec<u8> {
        let mut bytes = vec![0; Offsets::<N>::BYTES];
        bytes[..4].copy_from_slice(&(dimensions.len() as u32).to_le_bytes());
        for (dimension, (size, strides)) in dimensions.iter().enumerate() {
            let at = SIZES_AT + dimension * DIVIDER_BYTES;
            bytes[at..at + 4].copy_from_slice(&size.to_le_bytes());
            for (operand, stride) in strides.iter().enumerate() {
                let at = STRIDES_AT + (dimension * N + operand) * 4;
                bytes[at..at + 4].copy_from_slice(&stride.to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn offsets_follow_sizes_and_strides() {
        let bytes = calculator(&[(3, [8, 16]), (2, [24, 8])]);
        let offsets = Offsets::<2>::read(In(bytes.as_ptr()), 0).unwrap();
        assert_eq!((offsets.count(), offsets.of(0), offsets.of(4)), (6, [0, 0], [32, 24]));
        let wrong = 26u32.to_le_bytes();
        assert_eq!(Offsets::<2>::read(In(wrong.as_ptr()), 0), None);
    }
}

//! `torch.cat` of contiguous tensors (`Shape.cu`).

use super::{aligned, recognise::ConcatenationRecipe};
use crate::{
    arguments::In,
    card::{card, is_device_address},
    values::KeptValues,
};

/// Dimensions of `TensorSizeStride`.
const MAX_DIMENSIONS: usize = 4;

/// `kernel(output, {inputs[], offsets[], sizes[], counts[], ..}, {sizes[4], strides[4]}, dimension, stride)`.
struct Concatenation {
    output: u64,
    metadata: In<u8>,
    batch: usize,
    sizes: [u64; MAX_DIMENSIONS],
    strides: [u64; MAX_DIMENSIONS],
    dimension: usize,
    stride: u64,
}

impl Concatenation {
    fn read(recipe: &ConcatenationRecipe, arguments: In<u64>) -> Option<Concatenation> {
        let argument = |index: usize| arguments.get_at(index).map(|at| In(at as *const u8));
        let shape = argument(2)?;
        let words = |first: usize| -> Option<[u64; MAX_DIMENSIONS]> {
            let mut words = [0; MAX_DIMENSIONS];
            for (index, word) in words.iter_mut().enumerate().take(recipe.dimensions) {
                *word = u64::from(shape.field::<u32>((first + index) * 4)?);
            }
            Some(words)
        };
        Some(Concatenation {
            output: argument(0)?.field::<u64>(0).filter(|&output| is_device_address(output))?,
            metadata: argument(1)?,
            batch: recipe.batch,
            sizes: words(0)?,
            strides: words(MAX_DIMENSIONS)?,
            dimension: usize::try_from(argument(3)?.field::<i32>(0)?).ok().filter(|&one| one < recipe.dimensions)?,
            stride: u64::from(argument(4)?.field::<u32>(0)?),
        })
    }

    /// Pointer, offset and size in the dimension, and elements of an input.
    fn input(&self, index: usize) -> Option<(u64, u64, u64, u64)> {
        let numbers = aligned(self.batch * 8, 8);
        let number = |list: usize| self.metadata.field::<u32>(numbers + (list * self.batch + index) * 4).map(u64::from);
        let pointer = self.metadata.field::<u64>(index * 8).filter(|&pointer| is_device_address(pointer))?;
        Some((pointer, number(0)?, number(1)?, number(2)?))
    }

    /// The output's element for an element of an input (`CatArrIndexToOffset`).
    fn element(&self, dimensions: usize, size: u64, index: u64) -> Option<u64> {
        let mut rest = index;
        let mut offset = 0;
        for dimension in (1..dimensions).rev() {
            let length = if dimension == self.dimension { size } else { self.sizes[dimension] };
            offset += rest.checked_rem(length)? * self.strides[dimension];
            rest /= length;
        }
        Some(offset + rest * self.strides[0])
    }
}

/// Computes a concatenation of `inputs` tensors; `None` where the launch is not understood.
pub fn compute(values: &mut KeptValues, recipe: &ConcatenationRecipe, inputs: u32, arguments: In<u64>) -> Option<()> {
    let launch = Concatenation::read(recipe, arguments)?;
    let bytes = recipe.element_bytes;
    let mut writes = Vec::new();
    let mut total = 0;
    for index in 0..(inputs as usize).min(recipe.batch) {
        let (pointer, offset, size, count) = launch.input(index)?;
        total += count * bytes;
        if total > card().keep || size == 0 || count % size != 0 {
            return None;
        }
        for element in 0..count {
            let target = offset * launch.stride + launch.element(recipe.dimensions, size, element)?;
            writes.push((launch.output + target * bytes, values.get(pointer + element * bytes, bytes)));
        }
    }
    let follows = |one: &(u64, Option<Vec<u8>>), next: &(u64, Option<Vec<u8>>)| {
        one.0 + bytes == next.0 && one.1.is_some() == next.1.is_some()
    };
    for run in writes.chunk_by(follows) {
        values.forget(run[0].0, run.len() as u64 * bytes);
        let known: Vec<u8> = run.iter().flat_map(|(_, known)| known.iter().flatten().copied()).collect();
        if !known.is_empty() {
            values.put(run[0].0, known);
        }
    }
    Some(())
}

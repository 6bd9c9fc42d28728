//! `torch.cat` (`Shape.cu`).

use super::{
    aligned,
    recognise::{ConcatenationRecipe, output_form},
};
use crate::{
    arguments::In,
    card::{card, is_device_address},
    values::KeptValues,
};

/// Dimensions of `TensorSizeStride`.
const MAX_DIMENSIONS: usize = 4;

/// `kernel(output, {inputs[], offsets[], sizes[], counts[], is_contiguous[], shapes[]}, {sizes[4], strides[4]}, dimension,
/// stride)`. Where all inputs are contiguous, there is one shape, which is not used.
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
        let words = |first: usize| words(shape, first * 4, recipe.dimensions);
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

    fn input(&self, recipe: &ConcatenationRecipe, index: usize) -> Option<Input> {
        let numbers = aligned(self.batch * 8, 8);
        let number = |list: usize| self.metadata.field::<u32>(numbers + (list * self.batch + index) * 4).map(u64::from);
        let pointer = self.metadata.field::<u64>(index * 8).filter(|&pointer| is_device_address(pointer))?;
        let flags = numbers + 3 * self.batch * 4;
        let is_strided = recipe.has_strides && self.metadata.field::<u8>(flags + index)? == 0;
        let shape = aligned(flags + self.batch, 4) + index * 2 * MAX_DIMENSIONS * 4;
        let part = |first: usize| words(self.metadata, shape + first * 4, recipe.dimensions);
        let strides = if is_strided { Some((part(0)?, part(MAX_DIMENSIONS)?)) } else { None };
        Some(Input { pointer, offset: number(0)?, size: number(1)?, count: number(2)?, strides })
    }

    /// The output's element for an element of an input.
    fn element(&self, dimensions: usize, size: u64, index: u64) -> Option<u64> {
        let mut sizes = self.sizes;
        sizes[self.dimension] = size;
        offset_of(&sizes[..dimensions], &self.strides, index)
    }
}

/// One of the tensors that are joined.
struct Input {
    pointer: u64,
    /// Where it begins in the joined dimension, and how long it is there.
    offset: u64,
    size: u64,
    count: u64,
    /// Its sizes and strides, where it is not contiguous.
    strides: Option<([u64; MAX_DIMENSIONS], [u64; MAX_DIMENSIONS])>,
}

impl Input {
    /// The address of an element.
    fn address(&self, dimensions: usize, index: u64, bytes: u64) -> Option<u64> {
        let Some((sizes, strides)) = &self.strides else { return Some(self.pointer + index * bytes) };
        Some(self.pointer + offset_of(&sizes[..dimensions], strides, index)? * bytes)
    }
}

/// Where an element lies, in elements; the last dimension is the fastest (`CatArrIndexToOffset`).
fn offset_of(sizes: &[u64], strides: &[u64], index: u64) -> Option<u64> {
    let (mut rest, mut offset) = (index, 0);
    for dimension in (1..sizes.len()).rev() {
        offset += rest.checked_rem(sizes[dimension])? * strides[dimension];
        rest /= sizes[dimension];
    }
    Some(offset + rest * strides[0])
}

/// The first numbers of a list at a byte of an argument.
fn words(argument: In<u8>, at: usize, count: usize) -> Option<[u64; MAX_DIMENSIONS]> {
    let mut words = [0; MAX_DIMENSIONS];
    for (index, word) in words.iter_mut().enumerate().take(count) {
        *word = u64::from(argument.field::<u32>(at + index * 4)?);
    }
    Some(words)
}

/// How many bytes any kernel of `torch.cat` writes from its output on, by the sizes of its output.
pub fn written_bytes(name: &str, arguments: In<u64>) -> Option<u64> {
    let (dimensions, element_bytes) = output_form(name)?;
    let shape = In(arguments.get_at(2)? as *const u8);
    let sizes = words(shape, 0, dimensions)?;
    let elements = sizes[..dimensions].iter().fold(1, |product: u64, size| product.saturating_mul(*size));
    Some(elements.saturating_mul(element_bytes))
}

/// Computes a concatenation of `inputs` tensors; `None` where the launch is not understood.
pub fn compute(values: &mut KeptValues, recipe: &ConcatenationRecipe, inputs: u32, arguments: In<u64>) -> Option<()> {
    let launch = Concatenation::read(recipe, arguments)?;
    let bytes = recipe.element_bytes;
    let mut writes = Vec::new();
    let mut total = 0;
    for index in 0..(inputs as usize).min(recipe.batch) {
        let input = launch.input(recipe, index)?;
        total += input.count * bytes;
        if total > card().keep || input.size == 0 || input.count % input.size != 0 {
            return None;
        }
        for element in 0..input.count {
            let target = input.offset * launch.stride + launch.element(recipe.dimensions, input.size, element)?;
            let source = input.address(recipe.dimensions, element, bytes)?;
            writes.push((launch.output + target * bytes, values.get(source, bytes)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::window;

    const STRIDED: &str = "CatArrayBatchedCopyINS1_10OpaqueTypeILj8EEEjLi2ELi64ELi64EEEvPT_";

    /// Joins a column of two rows and three numbers that both rows share, as `expand` makes them.
    #[test]
    fn strided_inputs_are_joined_and_old_values_forgotten() {
        let recipe = ConcatenationRecipe { element_bytes: 8, dimensions: 2, batch: 64, has_strides: true };
        let (output, _) = window(0);
        let (column, row) = (output + 4096, output + 8192);
        let mut metadata = vec![0u8; 64 * 8 + 3 * 64 * 4 + 64 + 64 * 32];
        let mut write = |at: usize, bytes: &[u8]| metadata[at..at + bytes.len()].copy_from_slice(bytes);
        for (index, (pointer, numbers, shape)) in
            [(column, [0u32, 1, 2], [2u32, 1, 0, 0, 1, 1, 0, 0]), (row, [1, 3, 6], [2, 3, 0, 0, 0, 1, 0, 0])]
                .into_iter()
                .enumerate()
        {
            write(index * 8, &u64::to_le_bytes(pointer));
            for (list, number) in numbers.into_iter().enumerate() {
                write(64 * 8 + (list * 64 + index) * 4, &number.to_le_bytes());
            }
            write(64 * 8 + 3 * 64 * 4 + index, &[u8::from(index == 0)]);
            for (place, number) in shape.into_iter().enumerate() {
                write(64 * 8 + 3 * 64 * 4 + 64 + index * 32 + place * 4, &number.to_le_bytes());
            }
        }
        let shape: [u32; 8] = [2, 4, 0, 0, 4, 1, 0, 0];
        let (dimension, stride) = (1i32, 1u32);
        let arguments = [
            &raw const output as u64,
            metadata.as_ptr() as u64,
            &raw const shape as u64,
            &raw const dimension as u64,
            &raw const stride as u64,
        ];
        let mut values = KeptValues::default();
        let of = |numbers: &[i64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        values.put(column, of(&[-1, -1]));
        values.put(row, of(&[0, 1, 2]));
        assert_eq!(written_bytes(STRIDED, In(arguments.as_ptr())), Some(64));
        compute(&mut values, &recipe, 2, In(arguments.as_ptr())).unwrap();
        assert_eq!(values.get(output, 64), Some(of(&[-1, 0, 1, 2, -1, 0, 1, 2])));
        // What is not known replaces what was.
        values.forget(row, 24);
        compute(&mut values, &recipe, 2, In(arguments.as_ptr())).unwrap();
        assert_eq!((values.get(output, 8), values.get(output + 8, 8)), (Some(of(&[-1])), None));
    }
}

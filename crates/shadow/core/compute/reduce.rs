//! Reductions (`Reduce.cuh`) and counts of nonzero elements.

use super::{
    Computed, Offsets, aligned,
    element::{Element, Maybe, Scalar, load, store_all},
    recognise::{ReductionOperation, ReductionRecipe, ScanKind},
};
use crate::{
    arguments::In,
    card::{card, is_device_address},
    values::KeptValues,
};

/// `ReduceConfig`: 16 words, of which the first three are the size of an element, inputs per output, and outputs.
const CONFIGURATION_BYTES: usize = 64;

/// `ReduceOp`: operations, identity, configuration, calculators of inputs and outputs, source, targets.
struct Reduction {
    inputs: u64,
    outputs: u64,
    input_offsets: Offsets<1>,
    output_offsets: Offsets<2>,
    source: u64,
    target: u64,
}

impl Reduction {
    fn read(recipe: &ReductionRecipe, argument: In<u8>) -> Option<Reduction> {
        // The operations are empty: one byte, then the identity.
        let size = recipe.accumulator.size() as usize;
        let configuration = aligned(aligned(1, size) + size, 4);
        let word = |index: usize| argument.field::<i32>(configuration + index * 4);
        let positive = |index: usize| u64::try_from(word(index)?).ok().filter(|&number| number > 0);
        if word(0)? as u64 != recipe.input.size() {
            return None;
        }
        let calculators = configuration + CONFIGURATION_BYTES;
        let behind = calculators + Offsets::<1>::BYTES;
        let pointers = aligned(behind + Offsets::<2>::BYTES, 8);
        let pointer = |at: usize| argument.field::<u64>(at).filter(|&pointer| is_device_address(pointer));
        let found = Reduction {
            inputs: positive(1)?,
            outputs: positive(2)?,
            input_offsets: Offsets::read(argument, calculators)?,
            output_offsets: Offsets::read(argument, behind)?,
            source: pointer(pointers)?,
            target: pointer(pointers + 8)?,
        };
        let fits = found.input_offsets.count() == found.inputs && found.output_offsets.count() == found.outputs;
        (fits && found.inputs.saturating_mul(found.outputs).saturating_mul(recipe.input.size()) <= card().keep)
            .then_some(found)
    }
}

/// Combines elements. One that decides the result makes the others irrelevant.
fn reduced(operation: ReductionOperation, elements: &[Maybe]) -> Maybe {
    let truths = || elements.iter().map(|element| element.map(Scalar::is_true));
    let deciding = |decides: bool| {
        let decided = truths().any(|truth| truth == Some(decides));
        let all_known = truths().all(|truth| truth.is_some());
        (decided || all_known).then(|| Scalar::Int(i64::from(decided == decides)))
    };
    match operation {
        ReductionOperation::All => deciding(false),
        ReductionOperation::Any => deciding(true),
        ReductionOperation::Sum => elements.iter().try_fold(Scalar::Int(0), |sum, element| match (sum, (*element)?) {
            (Scalar::Int(sum), Scalar::Int(element)) => Some(Scalar::Int(sum.wrapping_add(element))),
            // The order of a floating-point sum is not known.
            _ => None,
        }),
        ReductionOperation::Maximum | ReductionOperation::Minimum => {
            let all: Option<Vec<Scalar>> = elements.iter().copied().collect();
            let all = all?;
            if all.iter().any(|element| element.float().is_nan()) {
                return None;
            }
            let pick = |one: Scalar, other: Scalar| {
                let first = match (one, other) {
                    (Scalar::Int(one), Scalar::Int(other)) => one > other,
                    (one, other) => one.float() > other.float(),
                };
                if first == (operation == ReductionOperation::Maximum) { one } else { other }
            };
            all.into_iter().reduce(pick)
        }
    }
}

/// Computes a reduction; `None` where the launch is not understood.
pub fn compute(values: &mut KeptValues, recipe: &ReductionRecipe, arguments: In<u64>) -> Option<()> {
    let reduction = Reduction::read(recipe, In(arguments.get()? as *const u8))?;
    let mut outputs = Vec::with_capacity(reduction.outputs as usize);
    for output in 0..reduction.outputs {
        let [target, source] = reduction.output_offsets.of(output);
        let elements: Vec<Maybe> = (0..reduction.inputs)
            .map(|input| reduction.source + source + reduction.input_offsets.of(input)[0])
            .map(|address| load(values, address, recipe.input))
            .collect();
        outputs.push((reduction.target + target, reduced(recipe.operation, &elements)));
    }
    for (address, value) in outputs {
        store_all(values, address, recipe.output, &[value]);
    }
    Some(())
}

/// `DeviceReduceSingleTileKernel(input, output, count, ..)` and the first pass of two. The input is a pointer with a functor.
pub fn count(values: &mut KeptValues, element: Element, arguments: In<u64>) -> Computed {
    let pointer = |index: usize| {
        let found = In(arguments.get_at(index)? as *const u64).get()?;
        is_device_address(found).then_some(found)
    };
    let counted = || -> Option<u64> {
        let items = u64::from(In(arguments.get_at(2)? as *const u32).get()?);
        if items * element.size() > card().keep {
            return None;
        }
        let source = pointer(0)?;
        let known = values.get(source, items * element.size())?;
        Some(
            known
                .chunks(element.size() as usize)
                .filter(|bytes| element.decode(bytes).is_some_and(Scalar::is_true))
                .count() as u64,
        )
    };
    counted().map_or(Computed::No, Computed::Count)
}

/// Sums along rows of 64-bit integers: an element is the sum of those up to it. Behind one that is not known, none is.
pub fn scan(values: &mut KeptValues, kind: ScanKind, arguments: In<u64>) -> Option<()> {
    const ELEMENT: u64 = 8;
    let pointer = |index: usize| {
        let word = arguments.get_at(index).and_then(|at| In(at as *const u64).get());
        word.filter(|&word| is_device_address(word))
    };
    let count = |index: usize| arguments.get_at(index).and_then(|at| In(at as *const u32).get()).map(u64::from);
    let (input, output, rows, columns) = match kind {
        ScanKind::Rows => (pointer(1)?, pointer(0)?, count(2)?, count(3)?),
        ScanKind::Flat => (pointer(0)?, pointer(1)?, 1, count(6)?),
    };
    if rows == 0 || columns == 0 || rows.checked_mul(columns)?.checked_mul(ELEMENT)? > card().keep {
        return None;
    }
    let sums: Vec<Vec<u8>> =
        (0..rows).map(|row| known_sums(values, input + row * columns * ELEMENT, columns)).collect();
    values.forget(output, rows * columns * ELEMENT);
    for (row, sums) in (0..rows).zip(sums) {
        if !sums.is_empty() {
            values.put(output + row * columns * ELEMENT, sums);
        }
    }
    Some(())
}

/// The sums of a row, as bytes, up to its first unknown element.
fn known_sums(values: &KeptValues, start: u64, columns: u64) -> Vec<u8> {
    let element = |column: u64| {
        let bytes = values.get(start + column * 8, 8)?;
        Some(i64::from_le_bytes(bytes.try_into().ok()?))
    };
    let mut sum = 0_i64;
    let mut sums = Vec::new();
    for number in (0..columns).map_while(element) {
        sum = sum.wrapping_add(number);
        sums.extend_from_slice(&sum.to_le_bytes());
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_along_rows_end_at_unknown_elements() {
        let device = crate::memory::allocate(1 << 16).unwrap();
        let mut shadow = crate::state::lock();
        let row = |numbers: &[i64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        shadow.values.put(device, row(&[1, 2, 3]));
        shadow.values.put(device + 24, row(&[5]));
        let (pointers, counts) = ([device + 4096, device], [2_u32, 3]);
        let at = |pointer: *const u64| pointer as u64;
        let arguments = [
            at(&raw const pointers[0]),
            at(&raw const pointers[1]),
            &raw const counts[0] as u64,
            &raw const counts[1] as u64,
        ];
        assert_eq!(scan(&mut shadow.values, ScanKind::Rows, In(arguments.as_ptr())), Some(()));
        assert_eq!(shadow.values.get(device + 4096, 32), Some(row(&[1, 3, 6, 5])));
        assert_eq!(shadow.values.get(device + 4096 + 32, 8), None);
        drop(shadow);
        crate::memory::free(device);
    }

    #[test]
    fn one_element_decides_and_sums_need_all() {
        let (yes, no) = (Some(Scalar::Int(1)), Some(Scalar::Int(0)));
        assert_eq!(reduced(ReductionOperation::All, &[yes, None, no]), no);
        assert_eq!(reduced(ReductionOperation::All, &[yes, None]), None);
        assert_eq!(reduced(ReductionOperation::All, &[yes, yes]), yes);
        assert_eq!(reduced(ReductionOperation::Any, &[no, None, yes]), yes);
        assert_eq!(reduced(ReductionOperation::Any, &[no, no]), no);
        assert_eq!(reduced(ReductionOperation::Sum, &[yes, yes]), Some(Scalar::Int(2)));
        assert_eq!(reduced(ReductionOperation::Sum, &[yes, None]), None);
        assert_eq!(reduced(ReductionOperation::Maximum, &[yes, Some(Scalar::Int(-4))]), yes);
        assert_eq!(reduced(ReductionOperation::Minimum, &[yes, no]), no);
    }
}

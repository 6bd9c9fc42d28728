//! Element-wise kernels, fills and ranges.

use super::{
    Offsets, aligned,
    element::{Element, Maybe, Scalar, load, store_all},
    recognise::{ElementwiseRecipe, Form, Operation, Wrapper},
};
use crate::{
    arguments::In,
    card::{card, is_device_address},
    values::KeptValues,
};

/// `kernel(int count, functor, pointers, ..)`.
const COUNT: usize = 0;
const FUNCTOR: usize = 1;
const POINTERS: usize = 2;
/// Arguments of kernels that convert: calculators of inputs and outputs, then loader and storer.
const LOADER: usize = 5;
const STORER: usize = 6;

/// An argument of a launch.
fn argument(arguments: In<u64>, index: usize) -> Option<In<u8>> {
    arguments.get_at(index).map(|at| In(at as *const u8))
}

/// How many inputs an operation has.
fn inputs(operation: Operation) -> usize {
    let of_form = |form| if form == Form::Binary { 2 } else { 1 };
    match operation {
        Operation::Fill => 0,
        Operation::Copy | Operation::OrderWithConstant | Operation::Not | Operation::LogicalNot | Operation::Negate => {
            1
        }
        Operation::AddToConstantOther | Operation::AddToConstantSelf => 1,
        Operation::Order | Operation::Add | Operation::MaskedFill => 2,
        Operation::Where => 3,
        Operation::Equality(form)
        | Operation::And(form)
        | Operation::Or(form)
        | Operation::Xor(form)
        | Operation::LogicalAnd(form)
        | Operation::LogicalOr(form)
        | Operation::Multiply(form) => of_form(form),
    }
}

/// The type of an input.
fn input_type(recipe: &ElementwiseRecipe, index: usize) -> Element {
    match (recipe.operation, index) {
        (Operation::MaskedFill, 1) | (Operation::Where, 0) => Element::Bool,
        _ => recipe.element,
    }
}

fn output_type(recipe: &ElementwiseRecipe) -> Element {
    match recipe.operation {
        Operation::Equality(_)
        | Operation::Order
        | Operation::OrderWithConstant
        | Operation::LogicalAnd(_)
        | Operation::LogicalOr(_)
        | Operation::LogicalNot => Element::Bool,
        _ => recipe.element,
    }
}

/// What the functor itself contains.
struct Constants {
    /// The kind of comparison.
    kind: i32,
    /// The constant operand or factor, and a second one.
    first: Maybe,
    second: Maybe,
}

impl Constants {
    /// Reads a functor. Members are aligned to their size.
    fn read(operation: Operation, element: Element, functor: In<u8>) -> Option<Constants> {
        let size = element.size() as usize;
        let value = |at: usize| {
            let bytes: Option<Vec<u8>> = (0..size).map(|index| functor.field::<u8>(at + index)).collect();
            element.decode(&bytes?)
        };
        let none = Constants { kind: 0, first: None, second: None };
        Some(match operation {
            Operation::Equality(form) => {
                let kind = functor.field::<i32>(0).filter(|kind| (0..2).contains(kind))?;
                let first = if form == Form::Binary { None } else { Some(value(aligned(4, size))?) };
                Constants { kind, first, second: None }
            }
            Operation::Order => {
                Constants { kind: functor.field::<i32>(0).filter(|kind| (0..4).contains(kind))?, ..none }
            }
            Operation::OrderWithConstant => Constants {
                kind: functor.field::<i32>(0).filter(|kind| (0..4).contains(kind))?,
                first: Some(value(aligned(4, size))?),
                second: None,
            },
            Operation::And(form)
            | Operation::Or(form)
            | Operation::Xor(form)
            | Operation::LogicalAnd(form)
            | Operation::LogicalOr(form)
            | Operation::Multiply(form)
                if form != Form::Binary =>
            {
                // The inner functor is empty: one byte.
                Constants { first: Some(value(aligned(1, size))?), ..none }
            }
            Operation::Fill | Operation::MaskedFill | Operation::Add => Constants { first: Some(value(0)?), ..none },
            Operation::AddToConstantOther | Operation::AddToConstantSelf => {
                Constants { first: Some(value(0)?), second: Some(value(size)?), ..none }
            }
            _ => none,
        })
    }
}

/// `a + factor * b`, where all are known.
fn add(a: Maybe, b: Maybe, factor: Maybe) -> Maybe {
    Some(match (a?, b?, factor?) {
        (Scalar::Int(a), Scalar::Int(b), Scalar::Int(factor)) => Scalar::Int(a.wrapping_add(b.wrapping_mul(factor))),
        (Scalar::Float(a), Scalar::Float(b), Scalar::Float(factor)) => Scalar::Float(a + b * factor),
        _ => return None,
    })
}

fn integers(a: Maybe, b: Maybe, combine: impl Fn(i64, i64) -> i64) -> Maybe {
    match (a?, b?) {
        (Scalar::Int(a), Scalar::Int(b)) => Some(Scalar::Int(combine(a, b))),
        _ => None,
    }
}

/// A truth value.
fn truth(value: bool) -> Maybe {
    Some(Scalar::Int(i64::from(value)))
}

/// Zero decides a conjunction; the other operand need not be known.
fn and(a: Maybe, b: Maybe) -> Maybe {
    let zero = Some(Scalar::Int(0));
    if a == zero || b == zero { zero } else { integers(a, b, |a, b| a & b) }
}

/// All bits set decide a disjunction. `full` is such a value of the type.
fn or(a: Maybe, b: Maybe, full: i64) -> Maybe {
    let full = Some(Scalar::Int(full));
    if a == full || b == full { full } else { integers(a, b, |a, b| a | b) }
}

/// `OpType`: at least, greater, at most, less. Comparisons with a value that is not a number are false.
fn order(kind: i32, a: Maybe, b: Maybe) -> Maybe {
    let ordering = match (a?, b?) {
        (Scalar::Int(a), Scalar::Int(b)) => Some(a.cmp(&b)),
        (a, b) => a.float().partial_cmp(&b.float()),
    };
    truth(ordering.is_some_and(|ordering| match kind {
        0 => ordering.is_ge(),
        1 => ordering.is_gt(),
        2 => ordering.is_le(),
        _ => ordering.is_lt(),
    }))
}

fn equality(kind: i32, a: Maybe, b: Maybe) -> Maybe {
    let equal = match (a?, b?) {
        (Scalar::Int(a), Scalar::Int(b)) => a == b,
        (a, b) => a.float() == b.float(),
    };
    truth(equal == (kind == 0))
}

/// One output element.
fn evaluate(recipe: &ElementwiseRecipe, constants: &Constants, operands: [Maybe; 3]) -> Maybe {
    let [a, b, c] = operands;
    let is_bool = recipe.element == Element::Bool;
    let of_form = |form| match form {
        Form::Binary => (a, b),
        Form::FirstConstant => (constants.first, a),
        Form::SecondConstant => (a, constants.first),
    };
    let as_truth = |value: Maybe| value.and_then(|value| truth(value.is_true()));
    match recipe.operation {
        Operation::Fill => constants.first,
        Operation::Copy => a,
        Operation::Equality(form) => equality(constants.kind, of_form(form).0, of_form(form).1),
        Operation::Order => order(constants.kind, a, b),
        Operation::OrderWithConstant => order(constants.kind, a, constants.first),
        Operation::And(form) => and(of_form(form).0, of_form(form).1),
        Operation::Or(form) => or(of_form(form).0, of_form(form).1, if is_bool { 1 } else { -1 }),
        Operation::Xor(form) => integers(of_form(form).0, of_form(form).1, |a, b| a ^ b),
        Operation::LogicalAnd(form) => and(as_truth(of_form(form).0), as_truth(of_form(form).1)),
        Operation::LogicalOr(form) => or(as_truth(of_form(form).0), as_truth(of_form(form).1), 1),
        Operation::Not if is_bool => truth(!a?.is_true()),
        Operation::Not => integers(a, a, |a, _| !a),
        Operation::LogicalNot => truth(!a?.is_true()),
        Operation::Negate => match a? {
            Scalar::Int(a) => Some(Scalar::Int(a.wrapping_neg())),
            Scalar::Float(a) => Some(Scalar::Float(-a)),
        },
        Operation::Add => add(a, b, constants.first),
        Operation::AddToConstantOther => add(a, constants.first, constants.second),
        Operation::AddToConstantSelf => add(constants.first, a, constants.second),
        Operation::Multiply(form) => {
            let (a, b) = of_form(form);
            let zero = Some(Scalar::Int(0));
            if a == zero || b == zero {
                return zero;
            }
            add(Some(if let Scalar::Int(_) = a? { Scalar::Int(0) } else { Scalar::Float(0.0) }), a, b)
        }
        Operation::MaskedFill => {
            if b?.is_true() {
                constants.first
            } else {
                a
            }
        }
        Operation::Where => {
            if a?.is_true() {
                b
            } else {
                c
            }
        }
    }
}

/// Pointers, types and offsets of the operands; the output is the first.
struct Operands {
    pointers: Vec<u64>,
    types: Vec<Element>,
    offsets: Option<OperandOffsets>,
}

/// Offset calculators for none to three inputs.
enum OperandOffsets {
    One(Offsets<1>),
    Two(Offsets<2>),
    Three(Offsets<3>),
    Four(Offsets<4>),
}

impl Operands {
    fn read(recipe: &ElementwiseRecipe, arguments: In<u64>, count: u64) -> Option<(Operands, In<u8>)> {
        let operands = inputs(recipe.operation) + 1;
        let functor = argument(arguments, FUNCTOR)?;
        let mut types = vec![output_type(recipe)];
        types.extend((0..operands - 1).map(|index| input_type(recipe, index)));
        let strided = [Wrapper::Strided, Wrapper::StridedConverting].contains(&recipe.wrapper);
        let (offsets, functor, pointers) = if strided {
            // The lambda captures the calculator, the pointers and the functor, in the order of their use.
            let (offsets, bytes) = match operands {
                1 => (OperandOffsets::One(Offsets::read(functor, 0)?), Offsets::<1>::BYTES),
                2 => (OperandOffsets::Two(Offsets::read(functor, 0)?), Offsets::<2>::BYTES),
                3 => (OperandOffsets::Three(Offsets::read(functor, 0)?), Offsets::<3>::BYTES),
                4 => (OperandOffsets::Four(Offsets::read(functor, 0)?), Offsets::<4>::BYTES),
                _ => return None,
            };
            let pointers = aligned(bytes, 8);
            let inner = In(functor.0.wrapping_add(pointers + operands * 8));
            (Some(offsets), inner, In(functor.0.wrapping_add(pointers)))
        } else {
            (None, functor, argument(arguments, POINTERS)?)
        };
        let run_time_types = match recipe.wrapper {
            Wrapper::Converting => Some((argument(arguments, STORER)?, argument(arguments, LOADER)?)),
            // One byte per operand, behind the functor, which is empty: one byte.
            Wrapper::StridedConverting => Some((In(functor.0.wrapping_add(1)), In(functor.0.wrapping_add(2)))),
            Wrapper::Contiguous | Wrapper::Strided => None,
        };
        if let Some((of_output, of_inputs)) = run_time_types {
            types[0] = Element::from_scalar_type(of_output.field(0)?)?;
            for (index, of_input) in types[1..].iter_mut().enumerate() {
                *of_input = Element::from_scalar_type(of_inputs.field(index)?)?;
            }
        }
        let pointers: Option<Vec<u64>> = (0..operands).map(|index| pointers.field::<u64>(index * 8)).collect();
        let pointers = pointers.filter(|pointers| pointers.iter().all(|&pointer| is_device_address(pointer)))?;
        let found = Operands { pointers, types, offsets };
        (found.count().is_none_or(|sizes| sizes == count)).then_some((found, functor))
    }

    /// The elements that the sizes give.
    fn count(&self) -> Option<u64> {
        self.offsets.as_ref().map(|offsets| match offsets {
            OperandOffsets::One(offsets) => offsets.count(),
            OperandOffsets::Two(offsets) => offsets.count(),
            OperandOffsets::Three(offsets) => offsets.count(),
            OperandOffsets::Four(offsets) => offsets.count(),
        })
    }

    /// The addresses of an element in each operand.
    fn addresses(&self, index: u64) -> [u64; 4] {
        let mut addresses = [0; 4];
        for (operand, address) in addresses.iter_mut().enumerate().take(self.pointers.len()) {
            let offset = match &self.offsets {
                None => index * self.types[operand].size(),
                Some(OperandOffsets::One(offsets)) => offsets.of(index)[operand],
                Some(OperandOffsets::Two(offsets)) => offsets.of(index)[operand],
                Some(OperandOffsets::Three(offsets)) => offsets.of(index)[operand],
                Some(OperandOffsets::Four(offsets)) => offsets.of(index)[operand],
            };
            *address = self.pointers[operand] + offset;
        }
        addresses
    }
}

/// Computes an element-wise kernel; `None` where the launch is not understood.
pub fn compute(values: &mut KeptValues, recipe: &ElementwiseRecipe, arguments: In<u64>) -> Option<()> {
    let count = u64::try_from(argument(arguments, COUNT)?.field::<i32>(0)?).ok()?;
    if count * output_type(recipe).size() > card().keep {
        return None;
    }
    let (operands, functor) = Operands::read(recipe, arguments, count)?;
    let constants = Constants::read(recipe.operation, recipe.element, functor)?;
    let mut outputs = Vec::with_capacity(count as usize);
    for index in 0..count {
        let addresses = operands.addresses(index);
        let mut inputs = [None; 3];
        for (input, value) in inputs.iter_mut().enumerate().take(operands.pointers.len() - 1) {
            let loaded = load(values, addresses[input + 1], operands.types[input + 1]);
            *value = loaded.and_then(|loaded| input_type(recipe, input).convert(loaded));
        }
        let computed = evaluate(recipe, &constants, inputs);
        outputs.push((addresses[0], computed.and_then(|value| output_type(recipe).convert(value))));
    }
    store(values, operands.types[0], &outputs);
    Some(())
}

/// Stores elements at their addresses; neighbours together.
fn store(values: &mut KeptValues, element: Element, outputs: &[(u64, Maybe)]) {
    for run in outputs.chunk_by(|(one, _), (next, _)| one + element.size() == *next) {
        let elements: Vec<Maybe> = run.iter().map(|(_, value)| *value).collect();
        store_all(values, run[0].0, element, &elements);
    }
}

/// `arange` of 64-bit integers: `kernel(int count, {start, step}, pointer)`.
pub fn range(values: &mut KeptValues, arguments: In<u64>) -> Option<()> {
    let count = i64::from(argument(arguments, COUNT)?.field::<i32>(0)?);
    if count < 0 || count as u64 * 8 > card().keep {
        return None;
    }
    let functor = argument(arguments, FUNCTOR)?;
    let (start, step) = (functor.field::<i64>(0)?, functor.field::<i64>(8)?);
    let target = argument(arguments, POINTERS)?.field::<u64>(0).filter(|&target| is_device_address(target))?;
    let bytes = (0..count).flat_map(|index| start.wrapping_add(step.wrapping_mul(index)).to_le_bytes()).collect();
    values.put(target, bytes);
    Some(())
}

#[cfg(test)]
mod tests {
    use oomph_driver::FIRST_RESERVED;

    use super::*;

    /// Launches a contiguous kernel over four elements: functor and pointers as PyTorch passes them.
    fn launch(values: &mut KeptValues, operation: Operation, element: Element, functor: &[u64], pointers: &[u64]) {
        let count = 4i32;
        let arguments = [&raw const count as u64, functor.as_ptr() as u64, pointers.as_ptr() as u64];
        let recipe = ElementwiseRecipe { wrapper: Wrapper::Contiguous, operation, element };
        assert_eq!(compute(values, &recipe, In(arguments.as_ptr())), Some(()));
    }

    #[test]
    fn known_operands_give_known_results_and_decide_where_they_can() {
        let at = |place: u64| FIRST_RESERVED + place * 512;
        let mut values = KeptValues::default();
        values.put(at(0), (0..4i64).flat_map(i64::to_le_bytes).collect());
        // LT is the fourth kind of order.
        launch(&mut values, Operation::OrderWithConstant, Element::I64, &[3, 2], &[at(1), at(0)]);
        assert_eq!(values.get(at(1), 4), Some(vec![1, 1, 0, 0]));
        launch(&mut values, Operation::Or(Form::Binary), Element::Bool, &[0], &[at(2), at(1), at(9)]);
        assert_eq!((values.get(at(2), 2), values.get(at(2) + 2, 1)), (Some(vec![1, 1]), None));
        launch(&mut values, Operation::And(Form::Binary), Element::Bool, &[0], &[at(3), at(9), at(1)]);
        assert_eq!((values.get(at(3), 1), values.get(at(3) + 2, 2)), (None, Some(vec![0, 0])));
        launch(&mut values, Operation::AddToConstantSelf, Element::I64, &[1, u64::MAX], &[at(4), at(0)]);
        assert_eq!(load(&values, at(4) + 24, Element::I64), Some(Scalar::Int(-2)));
        launch(&mut values, Operation::Copy, Element::I64, &[0], &[at(0), at(9)]);
        assert!(values.get(at(0), 1).is_none(), "an unknown input erases the output");
    }
}

//! What a kernel computes, by its mangled name.
//!
//! PyTorch's element-wise kernels are templates over a functor or a lambda, so their names say what they compute and on which
//! types. Names are those of PyTorch 2.11; a name that changes is no longer recognised, and nothing is computed.

use super::element::Element;

/// A kernel that can be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    Elementwise(ElementwiseRecipe),
    /// `arange` of 64-bit integers.
    Range,
    Reduction(ReductionRecipe),
    /// The count of nonzero elements of a type.
    NonzeroCount(Element),
    Concatenation(ConcatenationRecipe),
    /// Sums along rows of 64-bit integers (`cumsum`).
    Scan(ScanKind),
}

/// How the rows of a sum are passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanKind {
    /// Output, input, rows and columns (`ScanUtils.cuh`).
    Rows,
    /// One row, by cub: input, output, and the number of elements behind four others.
    Flat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementwiseRecipe {
    pub wrapper: Wrapper,
    pub operation: Operation,
    /// The type on which the functor works.
    pub element: Element,
}

/// How operands are passed (`CUDALoops.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrapper {
    /// Elements one behind the other.
    Contiguous,
    /// The same, with types that are given at run time.
    Converting,
    /// By an offset calculator.
    Strided,
    /// The same, with types that are given at run time.
    StridedConverting,
}

/// Which operands of a binary functor are constants (`Loops.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Binary,
    /// `AUnaryFunctor`: the first operand is a constant.
    FirstConstant,
    /// `BUnaryFunctor`: the second is.
    SecondConstant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Fill,
    Copy,
    Equality(Form),
    Order,
    OrderWithConstant,
    And(Form),
    Or(Form),
    Xor(Form),
    LogicalAnd(Form),
    LogicalOr(Form),
    Not,
    LogicalNot,
    Negate,
    Add,
    AddToConstantOther,
    AddToConstantSelf,
    Multiply(Form),
    MaskedFill,
    Where,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionRecipe {
    pub operation: ReductionOperation,
    pub input: Element,
    pub accumulator: Element,
    pub output: Element,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReductionOperation {
    All,
    Any,
    Sum,
    Maximum,
    Minimum,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConcatenationRecipe {
    pub element_bytes: u64,
    pub dimensions: usize,
    /// How many inputs one launch can take.
    pub batch: usize,
    /// Whether each input has sizes and strides of its own.
    pub has_strides: bool,
}

impl Recipe {
    /// What a kernel computes; `None` for most.
    pub fn of(name: &str) -> Option<Recipe> {
        if name.contains("CatArrayBatchedCopy") {
            return concatenation(name).map(Recipe::Concatenation);
        }
        if name.contains("reduce_kernelI") {
            return reduction(name).map(Recipe::Reduction);
        }
        if name.contains("DeviceReduce") {
            return template_argument(name, "NonZeroOp").map(Recipe::NonzeroCount);
        }
        if name.contains("tensor_kernel_scan_innermost_dimIlSt4plusIlEE") {
            return Some(Recipe::Scan(ScanKind::Rows));
        }
        if name.contains("DeviceScanKernelI") {
            let is_inclusive_sum = name.contains("policy_hubIllljSt4plusIlEE") && name.contains("NullTypeEj");
            return is_inclusive_sum.then_some(Recipe::Scan(ScanKind::Flat));
        }
        if name.contains("elementwise_kernel_with_index") {
            // The fourth type of AT_DISPATCH_ALL_TYPES is a 64-bit integer.
            let is_long = name.contains("arange_cuda_out") && name.contains("UlvE2_clEvEUllE_");
            return is_long.then_some(Recipe::Range);
        }
        elementwise(name).map(Recipe::Elementwise)
    }
}

/// The type in `TOKEN<type, ...>`.
fn template_argument(name: &str, token: &str) -> Option<Element> {
    let rest = &name.as_bytes()[name.find(token)? + token.len()..];
    (rest.first() == Some(&b'I')).then(|| rest.get(1).copied().and_then(Element::from_mangled)).flatten()
}

/// The types of the parameters of the first lambda behind a token that has any: `UlblE_` takes a bool and a long. Where one of
/// them is not a plain type, such as a half, the kernel is not recognised: the lambdas behind it are not the operation's.
fn lambda_parameters<'a>(name: &'a str, token: &str) -> Option<&'a [u8]> {
    let mut rest = &name[name.find(token)? + token.len()..];
    loop {
        rest = &rest[rest.find("Ul")? + 2..];
        let types = &rest.as_bytes()[..rest.find('E')?];
        if types != b"v" {
            return types.iter().all(|&letter| Element::from_mangled(letter).is_some()).then_some(types);
        }
    }
}

/// The size of the largest parameter of a kernel's first lambda, where all are plain types.
pub fn largest_parameter(name: &str) -> Option<u64> {
    lambda_parameters(name, "elementwise_kernel")?
        .iter()
        .filter_map(|&letter| Some(Element::from_mangled(letter)?.size()))
        .max()
}

/// The type of the operands where a functor is wrapped for one or two of them: `BUnaryFunctor<long, long, bool, F<long>>`.
/// Multiplication of halves has a functor of floats. `Err` for a type that is not plain.
fn wrapped_operand(name: &str) -> Result<Option<Element>, ()> {
    let Some(at) = ["12BinaryFunctorI", "13AUnaryFunctorI", "13BUnaryFunctorI"]
        .iter()
        .find_map(|token| Some(name.find(token)? + token.len()))
    else {
        return Ok(None);
    };
    name.as_bytes().get(at).copied().and_then(Element::from_mangled).map(Some).ok_or(())
}

fn form(name: &str) -> Form {
    match () {
        () if name.contains("AUnaryFunctorI") => Form::FirstConstant,
        () if name.contains("BUnaryFunctorI") => Form::SecondConstant,
        () => Form::Binary,
    }
}

fn elementwise(name: &str) -> Option<ElementwiseRecipe> {
    let wrapper = match () {
        () if name.contains("29vectorized_elementwise_kernelI") => Wrapper::Contiguous,
        // Trivial calculators, and types as in the name or at run time.
        () if name.contains("27unrolled_elementwise_kernelI") && name.contains("23TrivialOffsetCalculator") => {
            if name.contains("12LoadWithCast") { Wrapper::Converting } else { Wrapper::Contiguous }
        }
        () if name.contains("18elementwise_kernelI") && name.contains("22gpu_kernel_impl_nocastI") => Wrapper::Strided,
        () if name.contains("18elementwise_kernelI") && name.contains("15gpu_kernel_implI") => {
            Wrapper::StridedConverting
        }
        () => return None,
    };
    let (operation, element) = functor(name).or_else(|| lambda(name))?;
    // The types lie behind the functor; its size is known where it is empty.
    if wrapper == Wrapper::StridedConverting && operation != Operation::Copy {
        return None;
    }
    Some(ElementwiseRecipe { wrapper, operation, element })
}

/// Functors with a type of their own.
fn functor(name: &str) -> Option<(Operation, Element)> {
    let form = form(name);
    let known: [(&str, Operation); 11] = [
        ("11FillFunctor", Operation::Fill),
        ("16CompareEqFunctor", Operation::Equality(form)),
        ("14CompareFunctor", Operation::Order),
        ("17BitwiseAndFunctor", Operation::And(form)),
        ("16BitwiseOrFunctor", Operation::Or(form)),
        ("17BitwiseXorFunctor", Operation::Xor(form)),
        ("10MulFunctor", Operation::Multiply(form)),
        ("15CUDAFunctor_add", Operation::Add),
        ("21CUDAFunctorOnSelf_add", Operation::AddToConstantOther),
        ("22CUDAFunctorOnOther_add", Operation::AddToConstantSelf),
        ("21compare_scalar_kernel", Operation::OrderWithConstant),
    ];
    let found = known.into_iter().find_map(|(token, operation)| Some((operation, template_argument(name, token)?)))?;
    let operand = wrapped_operand(name).ok()?;
    operand.is_none_or(|operand| operand == found.1).then_some(found)
}

/// Lambdas, whose types are those of their parameters.
fn lambda(name: &str) -> Option<(Operation, Element)> {
    let form = form(name);
    let known: [(&str, Operation, usize); 8] = [
        ("direct_copy_kernel_cuda", Operation::Copy, 0),
        ("bitwise_not_kernel_cuda", Operation::Not, 0),
        ("logical_not_kernel_cuda", Operation::LogicalNot, 0),
        ("logical_and_kernel_cuda", Operation::LogicalAnd(form), 0),
        ("logical_or_kernel_cuda", Operation::LogicalOr(form), 0),
        ("15neg_kernel_cuda", Operation::Negate, 0),
        ("masked_fill_kernel", Operation::MaskedFill, 0),
        ("where_kernel_impl", Operation::Where, 1),
    ];
    known.into_iter().find_map(|(token, operation, parameter)| {
        let types = lambda_parameters(name, token)?;
        Some((operation, Element::from_mangled(*types.get(parameter)?)?))
    })
}

/// `reduce_kernel<512, 1, ReduceOp<scalar, operations<..>, unsigned, output, 4, 4>>`.
fn reduction(name: &str) -> Option<ReductionRecipe> {
    let input = template_argument(name, "8ReduceOp")?;
    let known: [(&str, ReductionOperation); 5] = [
        ("15and_kernel_cuda", ReductionOperation::All),
        ("14or_kernel_cuda", ReductionOperation::Any),
        ("11sum_functorI", ReductionOperation::Sum),
        ("13MaxNanFunctorI", ReductionOperation::Maximum),
        ("13MinNanFunctorI", ReductionOperation::Minimum),
    ];
    let (_, operation) = known.into_iter().find(|(token, _)| name.contains(token))?;
    // What the combination takes: a lambda's parameter, or the type of `func_wrapper_t<type, functor<type>>`.
    let wrapper = "14func_wrapper_t";
    let parameter = lambda_parameters(name, wrapper).and_then(|types| Element::from_mangled(*types.first()?));
    let accumulator = parameter.or_else(|| template_argument(name, wrapper))?;
    Some(ReductionRecipe { operation, input, accumulator, output: output_type(name)? })
}

/// The output's type in `.., unsigned int, TYPE, 4, 4>`.
fn output_type(name: &str) -> Option<Element> {
    let at = name.find("Li4ELi4EE")?;
    let bytes = name.as_bytes();
    (bytes.get(at.checked_sub(2)?) == Some(&b'j')).then(|| Element::from_mangled(bytes[at - 1])).flatten()
}

/// Dimensions of the output of a `CatArrayBatchedCopy..`, and the bytes of one of its elements.
pub fn output_form(name: &str) -> Option<(usize, u64)> {
    // Its sizes count vectors of 16 bytes: `<char, unsigned, dimensions, batch, stride_size, 16, ..>`.
    if let Some(at) = name.find("CatArrayBatchedCopy_vectorizedI") {
        let rest = &name[at..];
        let dimensions = rest[rest.find("jLi")? + "jLi".len()..].split('E').next()?;
        return Some((dimensions.parse().ok().filter(|count| (1..=4).contains(count))?, 16));
    }
    let recipe = concatenation(name)?;
    Some((recipe.dimensions, recipe.element_bytes))
}

/// `CatArrayBatchedCopy..<OpaqueType<8u>, unsigned int, dimensions, batch, stride_size, ..>`.
fn concatenation(name: &str) -> Option<ConcatenationRecipe> {
    // Its sizes count vectors of 16 bytes, and the dimensions behind the concatenated one are joined.
    if name.contains("CatArrayBatchedCopy_vectorized") {
        return None;
    }
    let rest = &name[name.find("OpaqueTypeILj")? + "OpaqueTypeILj".len()..];
    let (bytes, rest) = rest.split_once('E')?;
    let rest = rest.strip_prefix("EEjLi")?;
    let (dimensions, rest) = rest.split_once("ELi")?;
    let (batch, rest) = rest.split_once("ELi")?;
    let recipe = ConcatenationRecipe {
        element_bytes: bytes.parse().ok()?,
        dimensions: dimensions.parse().ok().filter(|count| (1..=4).contains(count))?,
        batch: batch.parse().ok()?,
        // One shape for all inputs: they are contiguous.
        has_strides: !rest.starts_with("1E"),
    };
    // Otherwise there is one for each.
    (!recipe.has_strides || rest.starts_with(&format!("{batch}E"))).then_some(recipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPARE: &str = "_ZN2at6native29vectorized_elementwise_kernelILi4EZNS0_21compare_scalar_kernelIlEEvRNS_18TensorIteratorBaseENS0_50_GLOBAL__N__e50ef81d_17_CompareKernels_cu_8f1b29aa6OpTypeET_EUllE_St5arrayIPcLm2EEEEviT0_T1_";
    const CAST: &str = "_ZN2at6native27unrolled_elementwise_kernelIZZZNS0_23direct_copy_kernel_cudaERNS_18TensorIteratorBaseEENKUlvE1_clEvENKUlvE9_clEvEUlbE_St5arrayIPcLm2EELi4E23TrivialOffsetCalculatorILi1EjESB_NS0_6memory12LoadWithCastILi1EEENSC_13StoreWithCastILi1EEEEEviT_T0_T2_T3_T4_T5_";
    const ALL: &str = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_14func_wrapper_tIbZZZNS0_15and_kernel_cudaERNS_14TensorIteratorEENKUlvE_clEvENKUlvE10_clEvEUlbbE_EEjbLi4ELi4EEEEEvT1_";
    const CAT: &str = "_ZN2at6native40_GLOBAL__N__0f1a8107_8_Shape_cu_49f7391c35CatArrayBatchedCopy_alignedK_contigINS1_10OpaqueTypeILj8EEEjLi2ELi128ELi1ELi16EEEvPT_NS1_25CatArrInputTensorMetadataIS5_T0_XT2_EXT3_EEENS1_16TensorSizeStrideIS8_Lj4EEEiS8_";
    const SUM_OF_ROWS: &str = "_ZN2at6native32tensor_kernel_scan_innermost_dimIlSt4plusIlEEEvPT_PKS4_jjjS4_T0_";
    const SUM_BY_CUB: &str = "_ZN14at_cuda_detail3cub6detail4scan16DeviceScanKernelINS2_10policy_hubIllljSt4plusIlEE10Policy1000EPKlPlNS0_13ScanTileStateIlLb1EEES6_NS0_8NullTypeEjlLb0ESE_EEvT0_T1_T2_iT3_T4_T5_";
    const ARGMAX: &str = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_9ArgMaxOpsIfEEjlLi4ELi4EEEEEvT1_";

    #[test]
    fn names_say_what_a_kernel_computes() {
        let elementwise =
            |wrapper, operation, element| Some(Recipe::Elementwise(ElementwiseRecipe { wrapper, operation, element }));
        assert_eq!(Recipe::of(COMPARE), elementwise(Wrapper::Contiguous, Operation::OrderWithConstant, Element::I64));
        assert_eq!(Recipe::of(CAST), elementwise(Wrapper::Converting, Operation::Copy, Element::Bool));
        let all = ReductionRecipe {
            operation: ReductionOperation::All,
            input: Element::Bool,
            accumulator: Element::Bool,
            output: Element::Bool,
        };
        assert_eq!(Recipe::of(ALL), Some(Recipe::Reduction(all)));
        let cat = ConcatenationRecipe { element_bytes: 8, dimensions: 2, batch: 128, has_strides: false };
        assert_eq!(Recipe::of(CAT), Some(Recipe::Concatenation(cat)));
        assert_eq!(Recipe::of(ARGMAX), None);
        assert_eq!(Recipe::of(SUM_OF_ROWS), Some(Recipe::Scan(ScanKind::Rows)));
        assert_eq!(Recipe::of(SUM_BY_CUB), Some(Recipe::Scan(ScanKind::Flat)));
        // An exclusive sum.
        assert_eq!(Recipe::of(&SUM_BY_CUB.replace("8NullTypeEj", "10InputValueIlSB_EEj")), None);
        assert_eq!(Recipe::of("ampere_sgemm_128x64_tn"), None);
    }

    /// Names from the wheel of 2.11 whose operands are halves, or whose arguments mean something else.
    #[test]
    fn kernels_with_other_types_or_arguments_are_not_recognised() {
        let multiply = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13BUnaryFunctorIN3c108BFloat16ES4_S4_NS0_15binary_internal10MulFunctorIfEEEESt5arrayIPcLm2EEEEviT0_T1_";
        assert_eq!(Recipe::of(multiply), None);
        let plain = multiply.replace("N3c108BFloat16ES4_S4_", "fff");
        assert!(matches!(Recipe::of(&plain), Some(Recipe::Elementwise(_))));
        let negate = "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastIZZZNS0_15neg_kernel_cudaERNS_18TensorIteratorBaseEENKUlvE0_clEvENKUlvE7_clEvEUlN3c104HalfEE_EEvS4_RKT_EUliE_EEviT1_";
        assert_eq!(Recipe::of(negate), None);
        assert!(Recipe::of(&negate.replace("N3c104HalfE", "l")).is_some());
        assert_eq!(
            Recipe::of(&CAT.replace("35CatArrayBatchedCopy_alignedK_contig", "30CatArrayBatchedCopy_vectorized")),
            None
        );
    }
}

//! Every function of the table is called with poisoned out-parameters; all of them must be written.

use crate::{
    binding,
    functions::{FAMILIES, FunctionArgument, FunctionLine},
    generic,
};

const POISON: u8 = 0xa7;
const WORDS: usize = 32;
const BUFFER: usize = 1 << 16;

/// Functions that call a function of the program: the test has none to pass.
const CALL_BACK: &[&str] = &["cudaLaunchHostFunc", "cudaStreamAddCallback", "cuLaunchHostFunc", "cuStreamAddCallback"];

type AnyFunction = extern "C" fn(
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
) -> u64;

fn call(soname: &str, name: &str, w: &[u64; WORDS]) -> u64 {
    let (code, record) = binding::resolve(soname, name);
    if !record.is_null() {
        return generic::serve(record, w.as_ptr(), w[6..].as_ptr());
    }
    // SAFETY: all arguments are words. A function reads as many as it has; the caller removes the rest from the stack.
    let function = unsafe { std::mem::transmute::<*const (), AnyFunction>(code.0) };
    function(
        w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15], w[16],
        w[17], w[18], w[19], w[20], w[21], w[22], w[23], w[24], w[25], w[26], w[27], w[28], w[29], w[30], w[31],
    )
}

/// How many bytes an argument must have written, and where.
fn written(argument: FunctionArgument) -> Option<(u8, usize)> {
    match argument {
        FunctionArgument::Handle(at) | FunctionArgument::Text(at) => Some((at, 8)),
        FunctionArgument::SmallHandle(at) => Some((at, 4)),
        FunctionArgument::Zeros(bytes, at) => Some((at, usize::from(bytes))),
        FunctionArgument::TextBuffer(at, _) | FunctionArgument::Buffer(at, _) => Some((at, 1)),
        FunctionArgument::Pointer(_) | FunctionArgument::ReturnsText => None,
    }
}

/// The out-parameters that a call leaves unwritten.
fn unwritten(soname: &str, line: &FunctionLine) -> Vec<FunctionArgument> {
    let mut buffers = vec![vec![POISON; BUFFER]; WORDS];
    // Values and lengths are 1, pointers that are read lead to zeros.
    let mut words = [1u64; WORDS];
    for argument in line.arguments() {
        let (at, fill) = match (written(argument), argument) {
            (Some((at, _)), _) => (at, POISON),
            (None, FunctionArgument::Pointer(at)) => (at, 0),
            (None, _) => continue,
        };
        buffers[usize::from(at)].fill(fill);
        words[usize::from(at)] = buffers[usize::from(at)].as_mut_ptr() as u64;
    }
    call(soname, line.name, &words);
    let is_unwritten = |argument: &FunctionArgument| {
        // By words: a value may contain the byte by chance.
        let is_poisoned = |word: &[u8]| word.iter().all(|&byte| byte == POISON);
        written(*argument).is_some_and(|(at, bytes)| buffers[usize::from(at)][..bytes].chunks(8).any(is_poisoned))
    };
    line.arguments().filter(is_unwritten).collect()
}

#[test]
fn all_out_parameters_are_written() {
    let (mut functions, mut failures) = (0, Vec::new());
    for family in FAMILIES {
        let soname = format!("{}.so.13", family.sonames[0]);
        for line in family.functions().filter(|line| !CALL_BACK.contains(&line.name.trim_end_matches("_ptsz"))) {
            functions += 1;
            let left = unwritten(&soname, &line);
            if !left.is_empty() {
                failures.push((line.name, left));
            }
        }
    }
    assert!(failures.is_empty(), "functions that leave out-parameters unwritten: {failures:?}");
    assert!(functions > 3000, "the tables have {functions} functions");
}

#[test]
fn functions_with_behaviour_are_in_the_tables() {
    let known: std::collections::HashSet<&str> =
        FAMILIES.iter().flat_map(|family| family.functions().map(|line| line.name)).collect();
    let unknown: Vec<&str> = crate::SUBJECTS
        .iter()
        .flat_map(|functions| functions.iter())
        .map(|function| function.0)
        .filter(|name| !known.contains(name))
        .collect();
    assert_eq!(unknown, [] as [&str; 0], "a misspelled name would never be called");
}

//! NVRTC: programs compile to nothing.

use std::{collections::HashMap, sync::Mutex};

use crate::{
    arguments::{Out, Text, copy_text, new_handle},
    card::card,
    state,
};

const SUCCESS: i32 = 0;
/// The size of compiled code that is reported. Nothing reads it; programs refuse code without a size.
const CODE_BYTES: u64 = 16;

/// Names that a program asked to have in its code, by name. They are given out as C texts, so they stay.
static NAMES: Mutex<Option<HashMap<String, &'static str>>> = Mutex::new(None);

/// The name under which an expression is found. Real names are mangled; nothing looks into the code here.
fn lowered(name: &str) -> *const u8 {
    let mut names = state::locked(&NAMES);
    names
        .get_or_insert_default()
        .entry(name.to_owned())
        .or_insert_with(|| Box::leak(format!("{name}\0").into_boxed_str()))
        .as_ptr()
}

fn size(bytes: Out<u64>) -> i32 {
    bytes.set(CODE_BYTES);
    SUCCESS
}

fn code(target: Out<u8>) -> i32 {
    target.zero(CODE_BYTES as usize);
    SUCCESS
}

cuda_functions! {
    fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) -> i32 {
        major.set(card().cuda / 1000);
        minor.set(card().cuda % 1000 / 10);
        SUCCESS
    }
    fn nvrtcGetErrorString(_code: i32) -> *const u8 { c"NVRTC_SUCCESS".as_ptr().cast() }
    fn nvrtcCreateProgram(program: Out<u64>, _source: Text, _name: Text, _count: i32, _headers: u64, _names: u64) -> i32 { program.set(new_handle(3)); SUCCESS }
    fn nvrtcDestroyProgram(program: Out<u64>) -> i32 { program.set(0); SUCCESS }
    fn nvrtcGetNumSupportedArchs(count: Out<i32>) -> i32 { count.set(1); SUCCESS }
    fn nvrtcGetSupportedArchs(list: Out<i32>) -> i32 { list.set(card().major * 10 + card().minor); SUCCESS }
    fn nvrtcGetPTXSize(_program: u64, bytes: Out<u64>) -> i32 { size(bytes) }
    fn nvrtcGetPTX(_program: u64, target: Out<u8>) -> i32 { code(target) }
    fn nvrtcGetCUBINSize(_program: u64, bytes: Out<u64>) -> i32 { size(bytes) }
    fn nvrtcGetCUBIN(_program: u64, target: Out<u8>) -> i32 { code(target) }
    fn nvrtcGetLTOIRSize(_program: u64, bytes: Out<u64>) -> i32 { size(bytes) }
    fn nvrtcGetLTOIR(_program: u64, target: Out<u8>) -> i32 { code(target) }
    fn nvrtcGetProgramLogSize(_program: u64, bytes: Out<u64>) -> i32 { bytes.set(1); SUCCESS }
    fn nvrtcGetProgramLog(_program: u64, target: Out<u8>) -> i32 { copy_text("", target, 1); SUCCESS }
    fn nvrtcGetLoweredName(_program: u64, name: Text, lowered_name: Out<u64>) -> i32 { lowered_name.set(lowered(name.get()) as u64); SUCCESS }
}

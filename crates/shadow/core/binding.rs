//! How the functions of a forwarder get their code.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char},
    sync::OnceLock,
};

use crate::{
    functions::{self, FunctionLine},
    generic::{self, Record},
    properties, state,
};

/// The entry point of a function.
#[derive(Clone, Copy)]
pub struct Code(pub *const ());

// SAFETY: code does not change, so its address may be used by every thread.
unsafe impl Sync for Code {}
// SAFETY: as above.
unsafe impl Send for Code {}

/// Two words in a forwarder's data: its code jumps to `code` with the slot's own address in register r11.
#[repr(C)]
pub struct Slot {
    code: *const (),
    record: *const Record,
}

/// The major version of the CUDA library in a soname: 13 for `libcudart.so.13`, 11 for `libcudart.so.11.0`.
fn major_of(soname: &str) -> u32 {
    let version = soname.split(".so.").nth(1).unwrap_or("");
    version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
}

/// Names that mean another function in one major version of CUDA: soname's beginning, version, name, function.
const RENAMED: &[(&str, u32, &str, &str)] =
    &[("libcudart", 13, "cudaStreamGetCaptureInfo", "cudaStreamGetCaptureInfo_v3")];

/// All functions with behaviour.
fn behaviours() -> &'static HashMap<&'static str, Code> {
    static ALL: OnceLock<HashMap<&'static str, Code>> = OnceLock::new();
    ALL.get_or_init(|| crate::SUBJECTS.iter().flat_map(|functions| functions.iter().copied()).collect())
}

/// The lines of all tables, by name.
fn lines() -> &'static HashMap<&'static str, FunctionLine> {
    static ALL: OnceLock<HashMap<&'static str, FunctionLine>> = OnceLock::new();
    ALL.get_or_init(|| {
        functions::FAMILIES.iter().flat_map(|family| family.functions()).map(|line| (line.name, line)).collect()
    })
}

/// The code for a name: its own function, or the generic entry with a record of what it writes.
pub fn resolve(soname: &str, name: &str) -> (Code, *const Record) {
    let major = major_of(soname);
    // Per-thread default streams: the same behaviour, since the default stream is not special here.
    let stem = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
    // NCCL's profiling names.
    let stem = if stem.starts_with("pnccl") { &stem[1..] } else { stem };
    let renamed = RENAMED.iter().find(|rule| soname.starts_with(rule.0) && rule.1 == major && rule.2 == stem);
    let (name, stem) = renamed.map_or((name, stem), |rule| (rule.3, rule.3));
    if let Some(code) = behaviours().get(name).or_else(|| behaviours().get(stem)) {
        return (*code, std::ptr::null());
    }
    let record = match lines().get(name).or_else(|| lines().get(stem)) {
        Some(line) => Record::of_line(line),
        None => Record::of_unknown(name),
    };
    (Code(generic::entry as *const ()), Box::leak(Box::new(record)))
}

/// Whether a name is one of a family's functions, so that a query for it can be answered.
pub fn is_known(name: &str) -> bool {
    behaviours().contains_key(name) || lines().contains_key(name)
}

/// A stable entry point for a name, for programs that ask for one by name (`cuGetProcAddress`). Its code finds the
/// record without a forwarder's slot.
pub fn entry_point(soname: &str, name: &str) -> *const () {
    let (code, record) = resolve(soname, name);
    if record.is_null() { code.0 } else { generic::stub_for(name, record) }
}

/// Fills the slots of a forwarder. `names` are texts that end with a zero byte, one after the other.
///
/// # Safety
/// `soname` is a text, `names` holds `count` texts and `slots` has room for `count` slots.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oomph_shadow_bind(soname: *const c_char, names: *const c_char, slots: *mut Slot, count: u64) {
    // SAFETY: the caller promises a text.
    let soname = unsafe { CStr::from_ptr(soname) }.to_str().unwrap_or("");
    state::note_library(soname);
    if soname.starts_with("libcudart") {
        properties::note_runtime(major_of(soname));
    }
    let mut next = names;
    for index in 0..count as usize {
        // SAFETY: the caller promises `count` texts, each right behind the zero byte of the one before.
        let name = unsafe { CStr::from_ptr(next) };
        let (code, record) = resolve(soname, name.to_str().unwrap_or(""));
        // SAFETY: the caller promises `count` slots and `count` texts.
        unsafe {
            slots.add(index).write(Slot { code: code.0, record });
            next = next.add(name.to_bytes().len() + 1);
        }
    }
}

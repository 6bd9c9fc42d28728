//! Calls that are answered outside of this library: a plugin's memory, streams and events are those of the simulated
//! device of the case that uses it.
//!
//! Where no server is set, which is so in every rehearsal, the library's own books answer. What the server handed out is
//! noted here, because CUDA lets programs ask what lies at an address.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    card,
    errors::SUCCESS,
    served_call::{Serve, ServedArguments, ServedCall, ServedResults},
    state,
};

static SERVER: AtomicUsize = AtomicUsize::new(0);

/// Length and origin of what the server handed out, by start.
static RANGES: Mutex<BTreeMap<u64, (u64, Origin)>> = Mutex::new(BTreeMap::new());

/// Which call handed a range out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Allocated,
    OfPool,
    Mapped,
}

/// Sets the function that answers from now on. `device` describes the card (`key=value` pairs as in
/// `OOMPH_SHADOW_DEVICE`); null for the variable.
///
/// # Safety
/// `device` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oomph_shadow_serve_by(function: Serve, device: *const c_char) {
    if !device.is_null() {
        // SAFETY: the caller promises a text.
        card::describe(&unsafe { CStr::from_ptr(device) }.to_string_lossy());
    }
    SERVER.store(function as usize, Ordering::Release);
}

/// Whether calls are answered outside.
pub fn is_set() -> bool {
    SERVER.load(Ordering::Acquire) != 0
}

/// The answer from outside: the code and the results. `None` where no server is set.
pub fn ask(call: ServedCall, arguments: ServedArguments) -> Option<(i32, ServedResults)> {
    let function = SERVER.load(Ordering::Acquire);
    if function == 0 {
        return None;
    }
    // SAFETY: only `oomph_shadow_serve_by` stores here, and it stores 0 or a function of this type.
    let function = unsafe { std::mem::transmute::<usize, Serve>(function) };
    let mut results = [0; 4];
    let code = function(call as u32, &raw const arguments, &raw mut results);
    Some((code, results))
}

/// The code alone.
pub fn code(call: ServedCall, arguments: ServedArguments) -> Option<i32> {
    ask(call, arguments).map(|(code, _)| code)
}

/// The first result, or the code of the failure.
pub fn value(call: ServedCall, arguments: ServedArguments) -> Option<Result<u64, i32>> {
    ask(call, arguments).map(|(code, [first, ..])| if code == SUCCESS { Ok(first) } else { Err(code) })
}

/// Notes a range that was handed out.
pub fn note(start: u64, bytes: u64, origin: Origin) {
    state::locked(&RANGES).insert(start, (bytes, origin));
}

/// Forgets the ranges of one origin in a range.
pub fn forget(start: u64, bytes: u64, origin: Origin) {
    state::locked(&RANGES).retain(|at, (_, of)| *of != origin || !(start..start.saturating_add(bytes)).contains(at));
}

/// The range that contains an address: start, length, origin.
pub fn containing(address: u64) -> Option<(u64, u64, Origin)> {
    let ranges = state::locked(&RANGES);
    let (&start, &(bytes, origin)) = ranges.range(..=address).next_back()?;
    (address < start + bytes.max(1)).then_some((start, bytes, origin))
}

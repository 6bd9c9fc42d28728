//! Calls of foreign code that end the process with a reason where an exception comes out of them.
//!
//! No frame of Rust can catch a C++ exception, nor read what it says. The C++ library can: a function of its ABI runs a
//! callback and must call `std::terminate` if an exception leaves it, which names the exception on standard error before the
//! process ends. A plugin whose process has no C++ library throws none.
#![expect(unsafe_code, reason = "a function of the C++ library makes the call")]

use std::ffi::c_void;

use crate::plugin::cpp_library;

/// `__cxa_vec_cleanup(array, count, size, destructor)` of the Itanium C++ ABI: calls `destructor` for every element.
type ForEachElement = unsafe extern "C-unwind" fn(*mut c_void, usize, usize, extern "C-unwind" fn(*mut c_void));

/// The way to call foreign code.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoExcept {
    for_each_element: Option<ForEachElement>,
}

/// A call, and what came of it.
struct Frame<F, R> {
    call: Option<F>,
    answer: Option<R>,
}

impl NoExcept {
    /// To be asked after the plugin was loaded, which may bring the C++ library in.
    pub(super) fn find() -> NoExcept {
        // SAFETY: the function has this type in every implementation of the ABI.
        NoExcept { for_each_element: unsafe { cpp_library::function(b"__cxa_vec_cleanup") } }
    }

    /// Makes the call. An exception that comes out of it is named, and ends the process.
    pub(super) fn call<R, F: FnOnce() -> R>(self, call: F) -> Option<R> {
        let Some(for_each_element) = self.for_each_element else { return Some(call()) };
        let mut frame = Frame { call: Some(call), answer: None };
        let size = size_of::<Frame<F, R>>();
        // SAFETY: the array is one frame, which `enter` knows by its type and which outlives the call.
        unsafe { for_each_element((&raw mut frame).cast(), 1, size, enter::<R, F>) };
        frame.answer
    }
}

extern "C-unwind" fn enter<R, F: FnOnce() -> R>(frame: *mut c_void) {
    // SAFETY: `NoExcept::call` passes a live frame of this type, and nobody else has it meanwhile.
    let frame = unsafe { &mut *frame.cast::<Frame<F, R>>() };
    frame.answer = frame.call.take().map(|call| call());
}

//! `std::bad_alloc`, thrown from here for those who expect it.
//!
//! PyTorch takes whatever a plugin in the place of its whole allocator returns, null included, for memory. Only an
//! exception stops it. The C++ library that throws one is that of the program: if it has none, nobody could catch it.
#![expect(unsafe_code, reason = "an exception is thrown by a function of the C++ library")]

use oomph_alloc::plugin::cpp_library;

/// `std::__throw_bad_alloc()`.
type Throw = unsafe extern "C-unwind" fn() -> !;

/// Throws `std::bad_alloc` out of the calling function, which must hold nothing. Returns where the program has no C++
/// library.
pub(super) fn throw_bad_alloc() {
    // SAFETY: it has been part of that library's interface, with this type, from the beginning.
    if let Some(throw) = unsafe { cpp_library::function::<Throw>(b"_ZSt17__throw_bad_allocv") } {
        // SAFETY: it takes nothing and unwinds, which its type says and every caller up to the exported function allows.
        unsafe { throw() }
    }
}

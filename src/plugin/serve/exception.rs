//! `std::bad_alloc`, thrown from here for those who expect it.
//!
//! PyTorch takes whatever a plugin in the place of its whole allocator returns, null included, for memory. Only an
//! exception stops it. The C++ library that throws one is that of the program: if it has none, nobody could catch it.
#![expect(unsafe_code, reason = "an exception is thrown by a function of the C++ library")]

/// Throws `std::bad_alloc` out of the calling function, which must hold nothing. Returns where the program has no C++
/// library.
#[cfg(target_os = "linux")]
pub(super) fn throw_bad_alloc() {
    use libloading::os::unix::{Library, RTLD_LAZY};

    /// Finds a library only if it is loaded already.
    const RTLD_NOLOAD: i32 = 4;
    type Throw = unsafe extern "C-unwind" fn() -> !;

    // SAFETY: nothing is loaded, so no code runs.
    let Ok(library) = (unsafe { Library::open(Some("libstdc++.so.6"), RTLD_LAZY | RTLD_NOLOAD) }) else { return };
    // SAFETY: `std::__throw_bad_alloc()` has been part of that library's interface, with this type, from the beginning.
    let Ok(throw) = (unsafe { library.get::<Throw>(b"_ZSt17__throw_bad_allocv") }).map(|found| *found) else { return };
    // Nothing may be left to be dropped on the exception's way; one more count on a library of the program harms nobody.
    std::mem::forget(library);
    // SAFETY: it takes nothing and unwinds, which its type says and every caller up to the exported function allows.
    unsafe { throw() }
}

/// There is no C++ library whose names are known.
#[cfg(not(target_os = "linux"))]
pub(super) fn throw_bad_alloc() {}

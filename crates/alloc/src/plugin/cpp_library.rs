//! Functions of the C++ library that the process has, if it has one: exceptions are its business alone.
#![expect(unsafe_code, reason = "a function is found by its name")]

/// A function of the C++ library by its symbol; none where no library of that kind is loaded.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
#[cfg(target_os = "linux")]
pub unsafe fn function<F: Copy>(symbol: &[u8]) -> Option<F> {
    use libloading::os::unix::{Library, RTLD_LAZY};

    /// Finds a library only if it is loaded already.
    const RTLD_NOLOAD: i32 = 4;

    // SAFETY: nothing is loaded, so no code runs.
    let library = unsafe { Library::open(Some("libstdc++.so.6"), RTLD_LAZY | RTLD_NOLOAD) }.ok()?;
    // SAFETY: the caller vouches for the type.
    let found = unsafe { library.get::<F>(symbol) }.map(|found| *found).ok();
    // It stays loaded as long as anybody may call what was found; one more count on it harms nobody.
    std::mem::forget(library);
    found
}

/// There is no C++ library whose names are known.
#[cfg(not(target_os = "linux"))]
pub unsafe fn function<F: Copy>(_symbol: &[u8]) -> Option<F> {
    None
}

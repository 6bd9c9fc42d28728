//! Pointers that callers pass: each is checked before it is touched.
//!
//! Device memory has no host memory behind it. A library function that may write its result to the host or to the device
//! (cuBLAS pointer mode) gets a pointer of either kind, so every access asks first where the pointer leads.

use std::ffi::{CStr, c_char};

use crate::card;

/// Whether a pointer can be followed on the host.
pub fn is_host<T>(pointer: *const T) -> bool {
    let address = pointer as u64;
    address >= 4096 && !card::is_device_address(address)
}

/// An out-parameter. The caller may pass null; then nothing is written.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(pub *mut T);

impl<T> Out<T> {
    /// Writes the value, unless the pointer is null or leads to device memory.
    pub fn set(self, value: T) {
        if is_host(self.0) {
            // SAFETY: the caller of a CUDA function passes null or a pointer to room for one T; device addresses were
            // excluded. CUDA does not promise alignment for byte buffers, so the write does not assume it.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes one element of an array of which the caller said that it is long enough.
    pub fn set_at(self, index: usize, value: T) {
        if is_host(self.0) {
            // SAFETY: as in `set`; the caller's own count bounds the index.
            unsafe { self.0.add(index).write_unaligned(value) }
        }
    }

    /// Writes `bytes` zero bytes.
    pub fn zero(self, bytes: usize) {
        if is_host(self.0) {
            // SAFETY: as in `set`; the length is that of the type or the length the caller passed.
            unsafe { self.0.cast::<u8>().write_bytes(0, bytes) }
        }
    }

    /// Whether the caller wants the value.
    pub fn is_wanted(&self) -> bool {
        !self.0.is_null()
    }
}

/// A parameter that is read. The caller may pass null.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(pub *const T);

impl<T: Copy> In<T> {
    /// The value, or `None` for null or device memory.
    pub fn get(self) -> Option<T> {
        self.get_at(0)
    }

    /// One element of an array whose length the caller passed.
    pub fn get_at(self, index: usize) -> Option<T> {
        // SAFETY: the caller of a CUDA function passes null or a pointer to at least as many elements as it says; device
        // addresses were excluded.
        is_host(self.0).then(|| unsafe { self.0.add(index).read_unaligned() })
    }

    /// A field of a structure: the value of type `F` at that byte.
    pub fn field<F: Copy>(self, byte: usize) -> Option<F> {
        // SAFETY: as in `get_at`; the offsets are those of CUDA's headers for the structure the caller passes.
        is_host(self.0).then(|| unsafe { self.0.cast::<u8>().add(byte).cast::<F>().read_unaligned() })
    }
}

/// A text that ends with a zero byte.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(pub *const c_char);

impl Text {
    /// The text; empty for null or text that is not UTF-8.
    pub fn get<'a>(self) -> &'a str {
        if !is_host(self.0) {
            return "";
        }
        // SAFETY: the caller passes null or a text that ends with a zero byte and lives at least as long as the call.
        unsafe { CStr::from_ptr(self.0) }.to_str().unwrap_or("")
    }
}

/// Copies a text into a caller's buffer, cut to its length, with a zero byte at the end.
pub fn copy_text(text: &str, buffer: Out<u8>, length: usize) {
    if length == 0 {
        return;
    }
    let bytes = &text.as_bytes()[..text.len().min(length - 1)];
    for (index, &byte) in bytes.iter().chain(&[0]).enumerate() {
        buffer.set_at(index, byte);
    }
}

/// Copies host memory to host memory; the ranges may overlap.
pub fn copy_host(target: *mut u8, source: *const u8, bytes: usize) {
    if bytes > 0 && is_host(target) && is_host(source) {
        // SAFETY: the caller of a CUDA copy passes ranges of that length; both are host memory.
        unsafe { std::ptr::copy(source, target, bytes) }
    }
}

/// The bytes of host memory that a caller passed.
pub fn host_bytes<'a>(source: *const u8, bytes: usize) -> &'a [u8] {
    if bytes == 0 || !is_host(source) {
        return &[];
    }
    // SAFETY: the caller passes a range of that length, which stays unchanged during the call.
    unsafe { std::slice::from_raw_parts(source, bytes) }
}

/// A new object for a handle: memory that stays, so that no two live handles are equal.
pub fn new_handle(kind: u64) -> u64 {
    Box::into_raw(Box::new([kind, 0, 0, 0])) as u64
}

/// Declares functions with C linkage and the list of their names, which `binding` looks up.
///
/// Bodies are safe code: pointers arrive as [`Out`], [`In`] and [`Text`].
#[macro_export]
macro_rules! cuda_functions {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $answer:ty)? $body:block)*) => {
        $($(#[$attribute])* pub extern "C" fn $name($($argument: $type),*) $(-> $answer)? $body)*
        /// The functions of this subject, by name.
        pub const FUNCTIONS: &[(&str, $crate::binding::Code)] = &[$((stringify!($name), $crate::binding::Code($name as *const ()))),*];
    };
}

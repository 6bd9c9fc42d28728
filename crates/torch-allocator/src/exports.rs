//! The functions that `liboomph.so` exports.
//!
//! No panic leaves them: a call that fails prints the reason on standard error and returns nothing.
#![expect(unsafe_code, reason = "exported functions have fixed names, and an exception is thrown by the C++ library")]

use std::{
    env,
    ffi::{c_int, c_void},
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::OnceLock,
};

use super::{AllocatorService, OutOfMemorySignal, ServiceError, ServiceSettings};
use oomph_alloc::plugin::cpp_function;
use oomph_base::{Address, write_file};

/// The service of this process; `None` where the environment is invalid.
static SERVICE: OnceLock<Option<AllocatorService>> = OnceLock::new();

/// PyTorch's `alloc_fn`. Null, or an exception with `OOMPH_OUT_OF_MEMORY=throw`, when memory has
/// run out or the call fails; null for zero bytes.
///
/// The exception passes this frame, so the function owns nothing and has no landing pad: a wheel that
/// zig links has an unwinder of its own, which cannot read the state of the program's.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn oomph_alloc(bytes: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    match allocate(bytes, device, stream) {
        Ok(pointer) => pointer,
        // SAFETY: it takes no arguments and unwinds, as its type says, and this function allows that.
        Err(throw) => unsafe { throw() },
    }
}

/// The block, or the function that throws. Never inlined: see [`oomph_alloc`].
#[inline(never)]
fn allocate(bytes: usize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, ThrowBadAlloc> {
    if bytes == 0 {
        return Ok(ptr::null_mut());
    }
    let served = serve(|service| service.alloc(bytes as u64, device, handle(stream)));
    if let Some(address) = served.flatten() {
        return Ok(ptr::with_exposed_provenance_mut(address.0 as usize));
    }
    let service = SERVICE.get().and_then(Option::as_ref);
    match service.map(|service| &service.settings.out_of_memory) {
        Some(OutOfMemorySignal::Throw) => throw_function().map_or(Ok(ptr::null_mut()), Err),
        _ => Ok(ptr::null_mut()),
    }
}

/// PyTorch's `free_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_free(address: *mut c_void, _bytes: usize, device: c_int, stream: *mut c_void) {
    if !address.is_null() {
        serve(|service| service.free(Address(handle(address)), device, handle(stream)));
    }
}

/// For PyTorch's `set_record_stream_fn`: the block is also used on this stream.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_record_stream(address: *mut c_void, stream: *mut c_void) {
    if !address.is_null() {
        serve(|service| service.record_stream(Address(handle(address)), handle(stream)));
    }
}

/// For PyTorch's `set_reset_fn`: `torch.cuda.empty_cache()`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_reset() {
    serve(AllocatorService::reset);
}

/// For PyTorch's `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_memory_fraction(fraction: f64, device: c_int) {
    serve(|service| service.memory_fraction(fraction, device));
}

/// Bytes held on a GPU now.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_reserved(device: c_int) -> usize {
    serve(|service| Ok(service.reserved(device))).unwrap_or(0) as usize
}

/// Serves a call; prints the reason if it fails.
pub(crate) fn serve<T>(call: impl FnOnce(&AllocatorService) -> Result<T, ServiceError>) -> Option<T> {
    let attempt = catch_unwind(AssertUnwindSafe(|| SERVICE.get_or_init(open).as_ref().map(call)));
    match attempt {
        Ok(Some(Ok(answer))) => Some(answer),
        Ok(Some(Err(error))) => {
            report(&error.to_string());
            None
        }
        // The panic or the error in the environment was printed already.
        Ok(None) | Err(_) => None,
    }
}

fn open() -> Option<AllocatorService> {
    match ServiceSettings::read(|name| env::var(name).ok()) {
        Ok(settings) => {
            // SAFETY: the function lives until the process ends: a library is not unloaded before
            // its exit handlers have run.
            unsafe { libc::atexit(write_statistics) };
            Some(AllocatorService::new(settings))
        }
        Err(error) => {
            report(&error.to_string());
            None
        }
    }
}

/// Reads counters only: the driver may have shut down already.
extern "C" fn write_statistics() {
    let _ = catch_unwind(|| {
        let Some(service) = SERVICE.get().and_then(Option::as_ref) else { return };
        let statistics = service.statistics();
        let Some(file) = &service.settings.statistics_file else {
            let _ = io::stderr().write_all(statistics.to_string().as_bytes());
            return;
        };
        let written =
            serde_json::to_vec_pretty(&statistics).map_err(io::Error::from).and_then(|text| write_file(file, &text));
        if let Err(error) = written {
            report(&format!("{}: {error}", file.display()));
        }
    });
}

fn report(text: &str) {
    // A failure to write to standard error cannot be reported.
    let _ = writeln!(io::stderr(), "oomph: {text}");
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// `std::__throw_bad_alloc()`.
type ThrowBadAlloc = unsafe extern "C-unwind" fn() -> !;

/// The function that throws `std::bad_alloc`; none if the program has no C++ library.
///
/// PyTorch treats any pointer from a plugin that replaces its whole allocator as memory, null
/// included. Only an exception stops it.
fn throw_function() -> Option<ThrowBadAlloc> {
    // SAFETY: the function has always had this type.
    unsafe { cpp_function::<ThrowBadAlloc>(b"_ZSt17__throw_bad_allocv") }
}

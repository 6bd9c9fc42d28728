//! The functions that a program finds in `liboomph.so`.
//!
//! No panic of ours leaves them: a call that fails says so on standard error and hands out nothing.
#![expect(unsafe_code, reason = "exported functions have the names that others look for")]

use std::{
    env,
    ffi::{c_int, c_void},
    fs, io,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::OnceLock,
};

use super::{OutOfMemory, ServeError, Service, Settings, exception};
use oomph_base::Address;

/// The one of this process; none where the environment makes no sense.
static SERVICE: OnceLock<Option<Service>> = OnceLock::new();

/// PyTorch's `alloc_fn`. Null, or an exception where `OOMPH_OUT_OF_MEMORY=throw`, when memory has run out or the call
/// fails; null for zero bytes.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn oomph_alloc(bytes: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    if bytes == 0 {
        return ptr::null_mut();
    }
    let served = serve(|service| service.alloc(bytes as u64, device, handle(stream)));
    if let Some(address) = served.flatten() {
        return ptr::with_exposed_provenance_mut(address.0 as usize);
    }
    if SERVICE.get().and_then(Option::as_ref).is_some_and(|it| it.settings().out_of_memory == OutOfMemory::Throw) {
        exception::throw_bad_alloc();
    }
    ptr::null_mut()
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
    serve(Service::reset);
}

/// For PyTorch's `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_memory_fraction(fraction: f64, device: c_int) {
    serve(|service| service.memory_fraction(fraction, device));
}

/// Bytes held of a GPU now.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_reserved(device: c_int) -> usize {
    serve(|service| Ok(service.reserved(device))).unwrap_or(0) as usize
}

/// Does a call; says why where that fails.
fn serve<T>(call: impl FnOnce(&Service) -> Result<T, ServeError>) -> Option<T> {
    let attempt = catch_unwind(AssertUnwindSafe(|| SERVICE.get_or_init(open).as_ref().map(call)));
    match attempt {
        Ok(Some(Ok(answer))) => Some(answer),
        Ok(Some(Err(error))) => {
            complain(&error.to_string());
            None
        }
        // The panic, or what is wrong with the environment, was told already.
        Ok(None) | Err(_) => None,
    }
}

fn open() -> Option<Service> {
    match Settings::read(|name| env::var(name).ok()) {
        Ok(settings) => {
            // SAFETY: the function is there until the process ends: a library with handlers for its end is not unloaded
            // before they have run.
            unsafe { atexit(tell_statistics) };
            Some(Service::new(settings))
        }
        Err(error) => {
            complain(&error.to_string());
            None
        }
    }
}

unsafe extern "C" {
    /// Of the C library, which is linked in any case.
    fn atexit(handler: extern "C" fn()) -> c_int;
}

/// Told from the books alone: the driver may be gone by now.
extern "C" fn tell_statistics() {
    let _ = catch_unwind(|| {
        let Some(service) = SERVICE.get().and_then(Option::as_ref) else { return };
        let statistics = service.statistics();
        let Some(file) = &service.settings().statistics_file else {
            let _ = io::stderr().write_all(statistics.to_string().as_bytes());
            return;
        };
        let written =
            serde_json::to_vec_pretty(&statistics).map_err(io::Error::from).and_then(|text| fs::write(file, text));
        if let Err(error) = written {
            complain(&format!("{}: {error}", file.display()));
        }
    });
}

fn complain(text: &str) {
    // Where even standard error is gone there is nobody to tell.
    let _ = writeln!(io::stderr(), "oomph: {text}");
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

//! The functions that `liboomph.so` exports.
//!
//! No panic leaves them: a call that fails prints the reason on standard error and returns nothing.
#![expect(unsafe_code, reason = "exported functions have fixed names, and an exception is thrown by the C++ library")]

use std::{
    env,
    ffi::{CString, c_char, c_int, c_void},
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::OnceLock,
};

use super::{AllocatorService, OutOfMemorySignal, ServiceError, ServiceSettings, history::HistorySettings, lock};
use crate::history::VALUES;
use oomph_alloc::plugin::{CPP_LIBRARY, loaded_symbol};
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
        Err(ReadyException::BadAlloc(throw)) => unsafe { throw() },
        // SAFETY: the same; the exception was made by the same library and is thrown once.
        Err(ReadyException::OutOfMemory(throw, error, kind, destroy)) => unsafe { throw(error, kind, destroy) },
    }
}

/// The block, or what to throw. Never inlined: see [`oomph_alloc`].
#[inline(never)]
fn allocate(bytes: usize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, ReadyException> {
    if bytes == 0 {
        return Ok(ptr::null_mut());
    }
    let served = serve(|service| service.alloc(bytes as u64, device, handle(stream)));
    if let Some(address) = served.flatten() {
        return Ok(ptr::with_exposed_provenance_mut(address.0 as usize));
    }
    let service = SERVICE.get().and_then(Option::as_ref);
    if served.is_some() {
        tell_out_of_memory(bytes, device);
    }
    match service.map(|service| (service, &service.settings.out_of_memory)) {
        Some((service, OutOfMemorySignal::Throw)) => {
            // A call that failed for another reason has printed it.
            let message = served.map(|_| service.out_of_memory(bytes as u64, device));
            exception(message.as_deref()).map_or(Ok(ptr::null_mut()), Err)
        }
        _ => Ok(ptr::null_mut()),
    }
}

/// PyTorch's `free_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_free(address: *mut c_void, bytes: usize, device: c_int, stream: *mut c_void) {
    if !address.is_null() {
        serve(|service| service.free(Address(handle(address)), bytes as u64, device, handle(stream)));
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

/// Writes the counters of a GPU to `values`, which has room for `count` of them, and returns how many
/// there are. `Watch::values` has their order.
///
/// # Safety
/// `values` is null, or has room for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oomph_statistics(device: c_int, values: *mut u64, count: usize) -> usize {
    let found = serve(|service| Ok(service.values(device))).unwrap_or([0; VALUES]);
    if !values.is_null() {
        // SAFETY: the caller promises the room, and no more than that is written.
        unsafe { ptr::copy_nonoverlapping(found.as_ptr(), values, count.min(VALUES)) };
    }
    VALUES
}

/// The peaks of a GPU are those since now.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_reset_peaks(device: c_int) {
    serve(|service| Ok(service.opened(device).map(|gpu| lock(gpu).reset_peaks())));
}

/// The sums of a GPU are those since now.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_reset_totals(device: c_int) {
    serve(|service| Ok(service.opened(device).map(|gpu| lock(gpu).reset_totals())));
}

/// Keeps a history from now on. `kind` is 0 to end it, 1 for the stacks of live blocks, 2 for all
/// events, of which the newest `most` are kept.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_record(kind: c_int, stacks: bool, most: usize, clear: bool) {
    let settings = (kind != 0).then_some(HistorySettings { events: kind == 2, most });
    serve(|service| {
        service.record(settings, stacks, clear);
        Ok(())
    });
}

/// The memory of all GPUs, with the history if `events`, as JSON; null if that fails. The caller
/// gives the text back to [`oomph_text_free`].
#[unsafe(no_mangle)]
pub extern "C" fn oomph_snapshot(events: bool) -> *mut c_char {
    let text = serve(|service| Ok(serde_json::to_vec(&service.snapshot(events)).ok()));
    let text = text.flatten().and_then(|text| CString::new(text).ok());
    text.map_or(ptr::null_mut(), CString::into_raw)
}

/// Frees a text.
///
/// # Safety
/// `text` is null, or came from [`oomph_snapshot`] and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oomph_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller promises where it came from.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Called after a request failed, with the device, the request, total memory and free memory. No
/// lock is held.
type OutOfMemoryObserver = extern "C" fn(c_int, u64, u64, u64);

static OBSERVER: OnceLock<OutOfMemoryObserver> = OnceLock::new();

/// Sets the function that is told when memory has run out. The first one stays.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_on_out_of_memory(observer: OutOfMemoryObserver) {
    let _ = OBSERVER.set(observer);
}

fn tell_out_of_memory(bytes: usize, device: c_int) {
    if let Some(observer) = OBSERVER.get() {
        let memory = serve(|service| Ok(service.opened(device).map(|gpu| lock(gpu).memory())));
        let (total, free) = memory.flatten().unwrap_or_default();
        observer(device, bytes as u64, total, free);
    }
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
        if service.process != std::process::id() {
            return;
        }
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

pub(crate) fn report(text: &str) {
    // A failure to write to standard error cannot be reported.
    let _ = writeln!(io::stderr(), "oomph: {text}");
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// An exception that only has to be thrown. It owns nothing: see [`oomph_alloc`].
enum ReadyException {
    /// `std::bad_alloc`.
    BadAlloc(ThrowBadAlloc),
    /// PyTorch's `c10::OutOfMemoryError`, which Python gets as `torch.OutOfMemoryError`.
    OutOfMemory(CxaThrow, *mut c_void, *const c_void, *const c_void),
}

/// `std::__throw_bad_alloc()`.
type ThrowBadAlloc = unsafe extern "C-unwind" fn() -> !;
/// `__cxa_throw(exception, its type, its destructor)`.
type CxaThrow = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !;

/// `c10::SourceLocation`.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// A `std::string` of the GNU library whose text is not in the object itself.
#[repr(C)]
struct CppString {
    text: *mut u8,
    length: usize,
    capacity: usize,
    unused: usize,
}

/// More than a `c10::Error` has in any release; it has about 130 bytes.
const ERROR_BYTES: usize = 1024;
/// Words of a table of virtual functions before the first function, the destructor.
const BEFORE_FUNCTIONS: usize = 2;

/// What to throw when memory has run out; `None` if the program has no C++ library.
///
/// PyTorch treats any pointer from a plugin that replaces its whole allocator as memory, null
/// included. Only an exception stops it. In a program without PyTorch that is `std::bad_alloc`.
fn exception(message: Option<&str>) -> Option<ReadyException> {
    if let Some(ready) = message.and_then(pytorch_exception) {
        return Some(ready);
    }
    // SAFETY: the function has always had this type.
    let throw = unsafe { loaded_symbol::<ThrowBadAlloc>(CPP_LIBRARY, b"_ZSt17__throw_bad_allocv") };
    throw.map(ReadyException::BadAlloc)
}

/// PyTorch's own exception with this message; `None` if PyTorch is not loaded, or is built for an older C++ library, which
/// has another `std::string`.
fn pytorch_exception(message: &str) -> Option<ReadyException> {
    type New = unsafe extern "C" fn(usize) -> *mut c_void;
    type MakeError = unsafe extern "C" fn(*mut c_void, SourceLocation, *mut CppString);

    const MAKE_ERROR: &[u8] =
        b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    // SAFETY: the types are those of the C++ runtime (Itanium ABI) and of `c10/util/Exception.h`. The mangled name contains
    // the types of the arguments: a release with others has another name.
    let (new, make_exception, throw, make_error, kind, functions) = unsafe {
        (
            loaded_symbol::<New>(CPP_LIBRARY, b"_Znwm")?,
            loaded_symbol::<New>(CPP_LIBRARY, b"__cxa_allocate_exception")?,
            loaded_symbol::<CxaThrow>(CPP_LIBRARY, b"__cxa_throw")?,
            loaded_symbol::<MakeError>("libc10.so", MAKE_ERROR)?,
            loaded_symbol::<*const c_void>("libc10_cuda.so", b"_ZTIN3c1016OutOfMemoryErrorE")?,
            loaded_symbol::<*const *const c_void>("libc10_cuda.so", b"_ZTVN3c1016OutOfMemoryErrorE")?,
        )
    };
    let location = SourceLocation { function: c"oomph_alloc".as_ptr(), file: c"liboomph.so".as_ptr(), line: 0 };
    // SAFETY: the string's text is allocated as C++ does it, with a zero at its end, and moved into the error. An
    // `OutOfMemoryError` is an `Error` with its own table of functions and no member of its own.
    unsafe {
        let text = new(message.len() + 1).cast::<u8>();
        text.copy_from_nonoverlapping(message.as_ptr(), message.len());
        text.add(message.len()).write(0);
        let mut string = CppString { text, length: message.len(), capacity: message.len(), unused: 0 };
        let error = make_exception(ERROR_BYTES);
        make_error(error, location, &raw mut string);
        let functions = functions.add(BEFORE_FUNCTIONS);
        error.cast::<*const *const c_void>().write(functions);
        Some(ReadyException::OutOfMemory(throw, error, kind, functions.read()))
    }
}

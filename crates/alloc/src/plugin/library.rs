//! The functions of a plugin ([`PluginFunctions`]), and the library in this process that has them.
//!
//! A library stays loaded until the process ends: it may have started threads or registered
//! functions to run at exit. An exception that leaves one of its functions ends the process
//! ([`ExceptionGuard`]), and so does a call that never returns ([`WatchedPlugin`]). Therefore each
//! case with a plugin has a process of its own.
#![expect(unsafe_code, reason = "a plugin is a C library")]

use std::{
    error::Error,
    ffi::{c_int, c_void},
    fmt, iter,
    mem::ManuallyDrop,
    path, ptr,
    time::Duration,
};

use super::{
    cuda::{self, CudaServer, answered_by},
    symbols::{AllocatorSymbols, PluginError},
    threads::{ThreadFunctions, ThreadsOutcome, run_threads},
    watchdog::WatchedPlugin,
};
use crate::strategy::StrategyError;
use oomph_base::Address;

/// The functions of a plugin, in this process or in another.
pub(super) trait PluginFunctions: fmt::Debug + Send {
    /// Calls a function for a device and a stream. `Ok(None)` where the plugin does not have it;
    /// otherwise its result, or 0 for a function without one. CUDA calls that the plugin makes
    /// meanwhile are answered by `server`.
    fn call(
        &mut self,
        call: PluginCall,
        device: c_int,
        stream: u64,
        server: &mut dyn CudaServer,
    ) -> Result<Option<u64>, PluginGone>;

    /// Forgets the plugin's state: its process ends, and the next call starts another. False where
    /// the plugin is in this process.
    fn restart(&mut self) -> bool;
}

/// The plugin's process has ended or was ended, for the reason given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PluginGone {
    /// The process died.
    Died(String),
    /// A call did not return in time.
    Hung(String),
}

impl From<PluginGone> for StrategyError {
    fn from(gone: PluginGone) -> StrategyError {
        match gone {
            PluginGone::Died(reason) => StrategyError::Died(reason),
            PluginGone::Hung(reason) => StrategyError::Hung(reason),
        }
    }
}

/// A call of a plugin's function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PluginCall {
    /// Loading the file, which runs its initialisers.
    Load,
    /// `alloc`: the result is the address, 0 where memory has run out.
    Alloc { bytes: u64 },
    /// `free`.
    Free { address: Address, bytes: u64 },
    /// `record_stream`: the block is used on another stream.
    RecordStream { address: Address },
    /// `reset`: cached memory goes back to the device.
    Reset,
    /// `reserved`: the result is how much the plugin holds.
    Reserved,
    /// `limit`: how much the plugin may hold.
    Limit { bytes: u64 },
    /// `alloc` and `free` from several threads at once: the result is a
    /// [`ThreadsOutcome`](super::threads::ThreadsOutcome).
    Threads { threads: u64, calls: u64 },
}

impl PluginCall {
    /// The call as three numbers, which can be stored without a lock and sent over a socket.
    pub(super) fn numbers(self) -> [u64; 3] {
        match self {
            PluginCall::Load => [1, 0, 0],
            PluginCall::Alloc { bytes } => [2, bytes, 0],
            PluginCall::Free { address, bytes } => [3, bytes, address.0],
            PluginCall::RecordStream { address } => [4, 0, address.0],
            PluginCall::Reset => [5, 0, 0],
            PluginCall::Reserved => [6, 0, 0],
            PluginCall::Limit { bytes } => [7, bytes, 0],
            PluginCall::Threads { threads, calls } => [8, threads, calls],
        }
    }

    /// The inverse of [`PluginCall::numbers`].
    pub(super) fn of_numbers([kind, bytes, last]: [u64; 3]) -> Option<PluginCall> {
        let address = Address(last);
        Some(match kind {
            1 => PluginCall::Load,
            2 => PluginCall::Alloc { bytes },
            3 => PluginCall::Free { address, bytes },
            4 => PluginCall::RecordStream { address },
            5 => PluginCall::Reset,
            6 => PluginCall::Reserved,
            7 => PluginCall::Limit { bytes },
            8 => PluginCall::Threads { threads: bytes, calls: last },
            _ => return None,
        })
    }
}

/// Allocates no memory, because a dying process prints it. Therefore sizes are plain numbers.
impl fmt::Display for PluginCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PluginCall::Load => f.write_str("loading it"),
            PluginCall::Alloc { bytes } => write!(f, "alloc of {bytes} bytes"),
            PluginCall::Free { address, bytes } => write!(f, "free of {bytes} bytes at {address}"),
            PluginCall::RecordStream { address } => write!(f, "record_stream of {address}"),
            PluginCall::Reset => f.write_str("reset"),
            PluginCall::Reserved => f.write_str("reserved"),
            PluginCall::Limit { bytes } => write!(f, "limit of {bytes} bytes"),
            PluginCall::Threads { threads, .. } => write!(f, "calls from {threads} threads at once"),
        }
    }
}

type AllocFn = unsafe extern "C-unwind" fn(usize, c_int, *mut c_void) -> *mut c_void;
type FreeFn = unsafe extern "C-unwind" fn(*mut c_void, usize, c_int, *mut c_void);
type RecordStreamFn = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void);
type ResetFn = unsafe extern "C-unwind" fn();
type ReservedFn = unsafe extern "C-unwind" fn(c_int) -> usize;
type LimitFn = unsafe extern "C-unwind" fn(c_int, usize);

/// A plugin that is loaded into this process.
#[derive(Debug)]
pub(super) struct PluginLibrary {
    watched: &'static WatchedPlugin,
    guard: ExceptionGuard,
    alloc: AllocFn,
    free: FreeFn,
    record_stream: Option<RecordStreamFn>,
    reset: Option<ResetFn>,
    reserved: Option<ReservedFn>,
    limit: Option<LimitFn>,
}

impl PluginLibrary {
    /// Loads the file, which runs its initialisers. A call that takes longer than `timeout` ends
    /// the process. `simulated` describes the simulated device that answers its CUDA calls, if it
    /// is not to use a real one.
    pub(super) fn open(
        file: &str,
        symbols: &AllocatorSymbols,
        timeout: Duration,
        simulated: Option<&str>,
    ) -> Result<PluginLibrary, PluginError> {
        let unloadable = |error: &dyn Error| PluginError::Unloadable { file: file.into(), reason: in_words(error) };
        // Without a folder in its name the linker would search the system's folders.
        let place = path::absolute(file).map_err(|error| unloadable(&error))?;
        if let Some(device) = simulated {
            cuda::provide(&place, device).map_err(|error| unloadable(&error))?;
        }
        let watched = WatchedPlugin::new(file, timeout);
        // SAFETY: the user asked for this code to be run.
        let library = watched.during(PluginCall::Load, || unsafe { libloading::Library::new(place) });
        let library = ManuallyDrop::new(library.map_err(|error| unloadable(&error))?);
        Ok(PluginLibrary {
            watched,
            guard: ExceptionGuard::find(),
            alloc: function(&library, &symbols.alloc).map_err(|error| unloadable(&error))?,
            free: function(&library, &symbols.free).map_err(|error| unloadable(&error))?,
            record_stream: optional(&library, symbols.record_stream.as_ref()).map_err(|error| unloadable(&error))?,
            reset: optional(&library, symbols.reset.as_ref()).map_err(|error| unloadable(&error))?,
            reserved: optional(&library, symbols.reserved.as_ref()).map_err(|error| unloadable(&error))?,
            limit: optional(&library, symbols.limit.as_ref()).map_err(|error| unloadable(&error))?,
        })
    }
}

impl PluginFunctions for PluginLibrary {
    /// A call that goes wrong ends the process, so every call that returns was carried out.
    fn call(
        &mut self,
        call: PluginCall,
        device: c_int,
        stream: u64,
        server: &mut dyn CudaServer,
    ) -> Result<Option<u64>, PluginGone> {
        if let PluginCall::Threads { threads, calls } = call {
            let outcome = answered_by(server, || self.call_from_threads(device, threads, calls));
            return Ok(Some(outcome.number()));
        }
        let stream = pointer(stream);
        let PluginLibrary { alloc, free, record_stream, reset, reserved, limit, .. } = *self;
        // SAFETY: each symbol was named as a function of its type; streams are the device's; a
        // block that is freed or used is one that `alloc` returned and that was not freed since.
        let make = || unsafe {
            match call {
                PluginCall::Load | PluginCall::Threads { .. } => return None,
                PluginCall::Alloc { bytes } => {
                    return Some(alloc(bytes as usize, device, stream).expose_provenance() as u64);
                }
                PluginCall::Reserved => return Some(reserved?(device) as u64),
                PluginCall::Free { address, bytes } => free(pointer(address.0), bytes as usize, device, stream),
                PluginCall::RecordStream { address } => record_stream?(pointer(address.0), stream),
                PluginCall::Reset => reset?(),
                PluginCall::Limit { bytes } => limit?(device, usize::try_from(bytes).unwrap_or(usize::MAX)),
            }
            Some(0)
        };
        Ok(answered_by(server, || self.watched.during(call, || self.guard.call(make))).flatten())
    }

    fn restart(&mut self) -> bool {
        false
    }
}

impl PluginLibrary {
    /// The process that waits for this one enforces the time-out.
    fn call_from_threads(&self, device: c_int, threads: u64, calls: u64) -> ThreadsOutcome {
        let (alloc, free, guard) = (self.alloc, self.free, self.guard);
        let request = |bytes: u64| {
            // SAFETY: as in `call`.
            let made = guard.call(|| unsafe { alloc(bytes as usize, device, ptr::null_mut()) });
            made.map_or(0, |address| address.expose_provenance() as u64)
        };
        let give_back = |address: u64, bytes: u64| {
            // SAFETY: as in `call`; the block is live.
            let _ = guard.call(|| unsafe { free(pointer(address), bytes as usize, device, ptr::null_mut()) });
        };
        run_threads(ThreadFunctions { alloc: request, free: give_back }, threads, calls)
    }
}

/// The error with its causes; the last one is the dynamic linker's own message.
fn in_words(error: &dyn Error) -> String {
    let causes = iter::successors(Some(error), |&error| error.source());
    causes.map(|error| error.to_string()).collect::<Vec<_>>().join(": ")
}

fn pointer(value: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(value as usize)
}

fn optional<F: Copy>(library: &libloading::Library, symbol: Option<&String>) -> Result<Option<F>, libloading::Error> {
    symbol.map(|symbol| function(library, symbol)).transpose()
}

/// The address of a function. The file has one of that name; its type is known only from what the
/// user said.
fn function<F: Copy>(library: &libloading::Library, symbol: &str) -> Result<F, libloading::Error> {
    // SAFETY: `F` is one of the types above, and the library is never unloaded.
    unsafe { library.get::<F>(symbol.as_bytes()) }.map(|found| *found)
}

/// `__cxa_vec_cleanup(array, count, size, destructor)` of the Itanium C++ ABI: calls `destructor`
/// for every element.
type ForEachElement = unsafe extern "C-unwind" fn(*mut c_void, usize, usize, extern "C-unwind" fn(*mut c_void));

/// Calls foreign code so that an exception which leaves it is named on standard error and ends the
/// process.
///
/// Rust can neither catch a C++ exception nor read its message. The C++ library can: a function of
/// its ABI runs a callback and calls `std::terminate` if an exception leaves it. A process without
/// a C++ library throws none.
#[derive(Clone, Copy, Debug)]
struct ExceptionGuard {
    for_each_element: Option<ForEachElement>,
}

/// A call and its result.
struct GuardedCall<F, R> {
    call: Option<F>,
    result: Option<R>,
}

impl ExceptionGuard {
    /// To be called after the plugin was loaded, because that may load the C++ library.
    fn find() -> ExceptionGuard {
        // SAFETY: the function has this type in every implementation of the ABI.
        ExceptionGuard { for_each_element: unsafe { loaded_symbol(CPP_LIBRARY, b"__cxa_vec_cleanup") } }
    }

    fn call<R, F: FnOnce() -> R>(self, call: F) -> Option<R> {
        let Some(for_each_element) = self.for_each_element else { return Some(call()) };
        let mut guarded = GuardedCall { call: Some(call), result: None };
        let size = size_of::<GuardedCall<F, R>>();
        // SAFETY: the array is one element, which `enter` knows by its type and which outlives the
        // call.
        unsafe { for_each_element((&raw mut guarded).cast(), 1, size, enter::<R, F>) };
        guarded.result
    }
}

extern "C-unwind" fn enter<R, F: FnOnce() -> R>(guarded: *mut c_void) {
    // SAFETY: `ExceptionGuard::call` passes a live value of this type, to which nothing else refers
    // meanwhile.
    let guarded = unsafe { &mut *guarded.cast::<GuardedCall<F, R>>() };
    guarded.result = guarded.call.take().map(|call| call());
}

/// The C++ library of a process.
pub const CPP_LIBRARY: &str = "libstdc++.so.6";

/// A symbol of a library that the process has loaded; `None` where it has not, or the library lacks the symbol.
///
/// # Safety
/// `F` is the type of a pointer to what has that name.
#[cfg(target_os = "linux")]
pub unsafe fn loaded_symbol<F: Copy>(library: &str, symbol: &[u8]) -> Option<F> {
    use libloading::os::unix::{Library, RTLD_LAZY};

    // SAFETY: with this flag a library is only found if it is loaded already, so no code runs.
    let library = unsafe { Library::open(Some(library), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
    // SAFETY: the caller vouches for the type.
    let found = unsafe { library.get::<F>(symbol) }.map(|found| *found).ok();
    // The library must stay loaded as long as what was found may be used.
    std::mem::forget(library);
    found
}

/// On other systems the names of libraries are not known.
#[cfg(not(target_os = "linux"))]
pub unsafe fn loaded_symbol<F: Copy>(_library: &str, _symbol: &[u8]) -> Option<F> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_survives_its_numbers() {
        let address = Address(0x7000);
        let calls = [
            PluginCall::Load,
            PluginCall::Alloc { bytes: 512 },
            PluginCall::Free { address, bytes: 512 },
            PluginCall::RecordStream { address },
            PluginCall::Reset,
            PluginCall::Reserved,
            PluginCall::Limit { bytes: 1 << 30 },
            PluginCall::Threads { threads: 8, calls: 100 },
        ];
        for call in calls {
            assert_eq!(PluginCall::of_numbers(call.numbers()), Some(call));
        }
        assert_eq!(PluginCall::of_numbers([0; 3]), None);
        let words = PluginCall::Free { address, bytes: 512 }.to_string();
        assert!(words.starts_with("free of 512 bytes at 0x"), "{words}");
    }
}

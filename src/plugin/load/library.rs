//! The functions of a plugin, loaded into this process.
//!
//! A library stays loaded until the process ends: it may have started threads or registered what runs at exit, and
//! nobody can know that it does not. An exception that comes out of its functions ends the process ([`NoExcept`]), which
//! is why there is one for every case.
#![expect(unsafe_code, reason = "a plugin is a C library")]

use std::{
    error::Error,
    ffi::{c_int, c_void},
    iter,
    mem::ManuallyDrop,
    path, ptr,
};

use super::{PluginError, noexcept::NoExcept, symbols::Choice};
use crate::unit::Address;

type AllocFn = unsafe extern "C-unwind" fn(usize, c_int, *mut c_void) -> *mut c_void;
type FreeFn = unsafe extern "C-unwind" fn(*mut c_void, usize, c_int, *mut c_void);
type RecordStreamFn = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void);
type ResetFn = unsafe extern "C-unwind" fn();
type ReservedFn = unsafe extern "C-unwind" fn(c_int) -> usize;

/// A loaded plugin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    noexcept: NoExcept,
    alloc: AllocFn,
    free: FreeFn,
    record_stream: Option<RecordStreamFn>,
    reset: Option<ResetFn>,
    reserved: Option<ReservedFn>,
}

impl Library {
    /// Loads the file, which runs its initialisers.
    pub(super) fn open(file: &str, choice: &Choice) -> Result<Library, PluginError> {
        let unloadable = |error: &dyn Error| PluginError::Unloadable { file: file.into(), reason: in_words(error) };
        // Without a folder in its name it would be searched for among the system's libraries.
        let place = path::absolute(file).map_err(|error| unloadable(&error))?;
        // SAFETY: the user asked for this code to be run.
        let library = unsafe { libloading::Library::new(place) }.map_err(|error| unloadable(&error))?;
        let library = ManuallyDrop::new(library);
        Ok(Library {
            noexcept: NoExcept::find(),
            alloc: function(&library, &choice.alloc).map_err(|error| unloadable(&error))?,
            free: function(&library, &choice.free).map_err(|error| unloadable(&error))?,
            record_stream: optional(&library, choice.record_stream.as_ref()).map_err(|error| unloadable(&error))?,
            reset: optional(&library, choice.reset.as_ref()).map_err(|error| unloadable(&error))?,
            reserved: optional(&library, choice.reserved.as_ref()).map_err(|error| unloadable(&error))?,
        })
    }

    /// Asks for a block; null where there is none.
    pub(super) fn alloc(&self, bytes: usize, device: c_int, stream: u64) -> Address {
        // SAFETY: the symbol was named as a function of this type; the stream is one of the device's.
        let address = self.noexcept.call(|| unsafe { (self.alloc)(bytes, device, pointer(stream)) });
        address.map_or(Address::NULL, |address| Address(address.expose_provenance() as u64))
    }

    /// Gives a block back, with what was said when it was asked for.
    pub(super) fn free(&self, address: Address, bytes: usize, device: c_int, stream: u64) {
        // SAFETY: as above; the block is one that `alloc` returned and that was not given back since.
        self.noexcept.call(|| unsafe { (self.free)(pointer(address.0), bytes, device, pointer(stream)) });
    }

    /// Tells that a live block is used on another stream, if the plugin wants to know; otherwise the caller must see to
    /// it that the block is not given back too early.
    pub(super) fn record_stream(&self, address: Address, stream: u64) -> bool {
        let Some(record_stream) = self.record_stream else { return false };
        // SAFETY: as above; the block is live.
        self.noexcept.call(|| unsafe { record_stream(pointer(address.0), pointer(stream)) });
        true
    }

    /// Asks for cached memory to be given back to the device, where the plugin can.
    pub(super) fn reset(&self) {
        if let Some(reset) = self.reset {
            // SAFETY: the symbol was named as a function of this type.
            self.noexcept.call(|| unsafe { reset() });
        }
    }

    /// How much it holds now, where it tells.
    pub(super) fn reserved(&self, device: c_int) -> Option<u64> {
        // SAFETY: the symbol was named as a function of this type.
        self.reserved.and_then(|reserved| self.noexcept.call(|| unsafe { reserved(device) } as u64))
    }
}

/// The error with its causes: the dynamic linker's own words are the last of them.
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

/// The address of a function. That the file has one of that name is known, its type only by what the user said.
fn function<F: Copy>(library: &libloading::Library, symbol: &str) -> Result<F, libloading::Error> {
    // SAFETY: `F` is one of the types above, and the library is never unloaded.
    unsafe { library.get::<F>(symbol.as_bytes()) }.map(|found| *found)
}

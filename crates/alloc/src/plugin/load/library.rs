//! The functions of a plugin, loaded into this process.
//!
//! A library stays loaded until the process ends: it may have started threads or registered what runs at exit, and
//! nobody can know that it does not. An exception that comes out of its functions ends the process ([`NoExcept`]), and so
//! does a call that never returns ([`Watched`]), which is why there is one for every case.
#![expect(unsafe_code, reason = "a plugin is a C library")]

use std::{
    error::Error,
    ffi::{c_int, c_void},
    iter,
    mem::ManuallyDrop,
    path, ptr,
    time::Duration,
};

use super::{
    PluginError,
    allocator::{Allocator, Gone},
    call::Call,
    noexcept::NoExcept,
    symbols::Choice,
    watched::Watched,
};
use oomph_base::Address;

type AllocFn = unsafe extern "C-unwind" fn(usize, c_int, *mut c_void) -> *mut c_void;
type FreeFn = unsafe extern "C-unwind" fn(*mut c_void, usize, c_int, *mut c_void);
type RecordStreamFn = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void);
type ResetFn = unsafe extern "C-unwind" fn();
type ReservedFn = unsafe extern "C-unwind" fn(c_int) -> usize;
type LimitFn = unsafe extern "C-unwind" fn(c_int, usize);

/// A loaded plugin.
#[derive(Debug)]
pub(super) struct Library {
    watched: &'static Watched,
    noexcept: NoExcept,
    alloc: AllocFn,
    free: FreeFn,
    record_stream: Option<RecordStreamFn>,
    reset: Option<ResetFn>,
    reserved: Option<ReservedFn>,
    limit: Option<LimitFn>,
}

impl Library {
    /// Loads the file, which runs its initialisers. No call may take longer than `timeout`.
    pub(super) fn open(file: &str, choice: &Choice, timeout: Duration) -> Result<Library, PluginError> {
        let unloadable = |error: &dyn Error| PluginError::Unloadable { file: file.into(), reason: in_words(error) };
        // Without a folder in its name it would be searched for among the system's libraries.
        let place = path::absolute(file).map_err(|error| unloadable(&error))?;
        let watched = Watched::new(file, timeout);
        // SAFETY: the user asked for this code to be run.
        let library = watched.during(Call::Load, || unsafe { libloading::Library::new(place) });
        let library = ManuallyDrop::new(library.map_err(|error| unloadable(&error))?);
        Ok(Library {
            watched,
            noexcept: NoExcept::find(),
            alloc: function(&library, &choice.alloc).map_err(|error| unloadable(&error))?,
            free: function(&library, &choice.free).map_err(|error| unloadable(&error))?,
            record_stream: optional(&library, choice.record_stream.as_ref()).map_err(|error| unloadable(&error))?,
            reset: optional(&library, choice.reset.as_ref()).map_err(|error| unloadable(&error))?,
            reserved: optional(&library, choice.reserved.as_ref()).map_err(|error| unloadable(&error))?,
            limit: optional(&library, choice.limit.as_ref()).map_err(|error| unloadable(&error))?,
        })
    }

    /// Makes a call under watch; an exception that comes out of it ends the process.
    fn call<R>(&self, call: Call, make: impl FnOnce() -> R) -> Option<R> {
        self.watched.during(call, || self.noexcept.call(make))
    }
}

/// What goes wrong here takes the process along, so every call that returns was carried out.
impl Allocator for Library {
    fn alloc(&mut self, bytes: usize, device: c_int, stream: u64) -> Result<Address, Gone> {
        let call = Call::Alloc { bytes: bytes as u64 };
        // SAFETY: the symbol was named as a function of this type; the stream is one of the device's.
        let address = self.call(call, || unsafe { (self.alloc)(bytes, device, pointer(stream)) });
        Ok(address.map_or(Address::NULL, |address| Address(address.expose_provenance() as u64)))
    }

    fn free(&mut self, address: Address, bytes: usize, device: c_int, stream: u64) -> Result<(), Gone> {
        let call = Call::Free { address, bytes: bytes as u64 };
        // SAFETY: as above; the block is one that `alloc` returned and that was not given back since.
        self.call(call, || unsafe { (self.free)(pointer(address.0), bytes, device, pointer(stream)) });
        Ok(())
    }

    fn record_stream(&mut self, address: Address, stream: u64) -> Result<bool, Gone> {
        let Some(record_stream) = self.record_stream else { return Ok(false) };
        // SAFETY: as above; the block is live.
        self.call(Call::RecordStream { address }, || unsafe { record_stream(pointer(address.0), pointer(stream)) });
        Ok(true)
    }

    fn reset(&mut self) -> Result<(), Gone> {
        if let Some(reset) = self.reset {
            // SAFETY: the symbol was named as a function of this type.
            self.call(Call::Reset, || unsafe { reset() });
        }
        Ok(())
    }

    fn reserved(&mut self, device: c_int) -> Result<Option<u64>, Gone> {
        // SAFETY: the symbol was named as a function of this type.
        Ok(self.reserved.and_then(|reserved| self.call(Call::Reserved, || unsafe { reserved(device) } as u64)))
    }

    fn limit(&mut self, device: c_int, bytes: u64) -> Result<bool, Gone> {
        let Some(limit) = self.limit else { return Ok(false) };
        let most = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the symbol was named as a function of this type.
        self.call(Call::Limit { bytes }, || unsafe { limit(device, most) });
        Ok(true)
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

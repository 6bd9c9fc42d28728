//! CUDA for plugins without a GPU: the shadow GPU's libraries in this process, and who answers their calls.
//!
//! A plugin finds `libcuda.so.1` and `libcudart.so.N` by the names of libraries that are loaded already, or by their symbols
//! in the global scope: both are the shadow GPU's. Calls about memory, streams and events reach the [`CudaServer`] of the
//! call that is in progress.
#![expect(unsafe_code, reason = "libraries are loaded, and a C function finds the server of the current call")]

use std::{
    ffi::{CString, c_char},
    fs::File,
    io::{self, Write},
    os::fd::{FromRawFd, IntoRawFd},
    path::Path,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use object::ReadCache;
use oomph_shadow::{
    LIBRARY,
    forwarder::{CORE_SONAME, ForwarderPlan, NeededFunctions},
    functions::family_of,
    needed_libraries,
    served_call::{Serve, ServedArguments, ServedCall, ServedResults},
};

use crate::device::DeviceProps;

/// Answers the calls of a plugin.
pub(super) trait CudaServer {
    /// The code of `CUresult` and the results.
    fn serve(&mut self, call: ServedCall, arguments: ServedArguments) -> (i32, ServedResults);
}

/// `cudaErrorCudartUnloading`, `CUDA_ERROR_DEINITIALIZED`: what CUDA answers while a process ends.
const DEINITIALIZED: i32 = 4;
/// How long another thread of a plugin waits for a call to be in progress.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// One call in this many of a thread that runs beside others is answered late, by this time. A plugin that gave up its lock
/// for a CUDA call is then entered by another thread: on a busy machine such a race showed in 1 of 17 processes, and in 1 of
/// 51 without it.
const ONE_LATE_IN: u64 = 64;
const LATE: Duration = Duration::from_millis(1);

/// Libraries that plugins open by name, or whose functions they use without naming a library. The later ones decide the
/// layout of structures for a plugin that names none.
const BY_NAME: [&str; 6] =
    ["libcuda.so.1", "libcuda.so", "libcudart.so.11.0", "libcudart.so.13", "libcudart.so", "libcudart.so.12"];

/// The server of the call in progress, and the thread that makes calls.
struct CurrentServer {
    server: Option<ServerPointer>,
    caller: Option<ThreadId>,
}

struct ServerPointer(*mut (dyn CudaServer + 'static));

// SAFETY: the pointer is only followed under the lock of `CURRENT`, by one thread at a time.
unsafe impl Send for ServerPointer {}

static CURRENT: Mutex<CurrentServer> = Mutex::new(CurrentServer { server: None, caller: None });
static ARRIVED: Condvar = Condvar::new();
/// Calls of threads that run beside others.
static ANSWERED: AtomicU64 = AtomicU64::new(0);

fn current() -> MutexGuard<'static, CurrentServer> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets `server` answer while `run` runs.
pub(super) fn answered_by<R>(server: &mut dyn CudaServer, run: impl FnOnce() -> R) -> R {
    let pointer: *mut (dyn CudaServer + '_) = server;
    // SAFETY: only the lifetime changes. The pointer is removed below, before the borrow ends.
    let pointer =
        unsafe { std::mem::transmute::<*mut (dyn CudaServer + '_), *mut (dyn CudaServer + 'static)>(pointer) };
    *current() = CurrentServer { server: Some(ServerPointer(pointer)), caller: Some(thread::current().id()) };
    ARRIVED.notify_all();
    let result = run();
    current().server = None;
    result
}

/// What the shadow GPU calls. Another thread of the plugin waits until a call is in progress; the thread that makes the
/// calls is here without one only while the process ends.
extern "C" fn serve(call: u32, arguments: *const ServedArguments, results: *mut ServedResults) -> i32 {
    let mut current = current();
    let is_beside_others = current.caller != Some(thread::current().id());
    if current.server.is_none() && is_beside_others {
        let waited = ARRIVED.wait_timeout_while(current, LONGEST_WAIT, |current| current.server.is_none());
        current = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    let (Some(ServerPointer(server)), Some(call)) = (&current.server, ServedCall::numbered(call)) else {
        return DEINITIALIZED;
    };
    // SAFETY: the pointer is set only while the server is borrowed by `answered_by`, and the lock is held. The shadow GPU
    // passes pointers to its own variables.
    let code = unsafe {
        let (code, values) = (**server).serve(call, *arguments);
        *results = values;
        code
    };
    drop(current);
    if is_beside_others && ANSWERED.fetch_add(1, Ordering::Relaxed).is_multiple_of(ONE_LATE_IN) {
        thread::sleep(LATE);
    }
    code
}

/// Loads the shadow GPU's libraries for a plugin. To be called before the plugin is loaded. On other systems than x86-64
/// Linux there are none. `device` is a [`description`].
pub(super) fn provide(plugin: &Path, device: &str) -> io::Result<()> {
    if LIBRARY.is_empty() {
        return Ok(());
    }
    let core = load(CORE_SONAME, LIBRARY)?;
    // SAFETY: the function has this type in the shadow GPU's library.
    let serve_by = unsafe { core.get::<unsafe extern "C" fn(Serve, *const c_char)>(b"oomph_shadow_serve_by") };
    let serve_by = serve_by.map_err(io::Error::other)?;
    let text = CString::new(device).map_err(io::Error::other)?;
    // SAFETY: a function that lives as long as the process, and a text.
    unsafe { serve_by(serve, text.as_ptr()) };
    std::mem::forget(core);
    // Those that the plugin names come last: structures get their layout.
    let named = named_libraries(plugin);
    let others = BY_NAME.iter().map(|&name| name.to_owned()).filter(|name| !named.contains(name));
    for soname in others.chain(named.iter().cloned()) {
        let Some(family) = family_of(&soname) else { continue };
        // The version that NVIDIA's library gives its functions: its own name.
        let version = soname.starts_with("libcudart.so.").then(|| soname.clone());
        let functions: Vec<_> = family.functions().map(|function| function.name).collect();
        let needed: NeededFunctions =
            functions.iter().take(1).map(|&name| (name.to_owned(), version.clone())).collect();
        let library = ForwarderPlan::new(&soname, &needed, functions.iter().copied()).write();
        std::mem::forget(load(&soname, &library.map_err(io::Error::other)?)?);
    }
    Ok(())
}

/// The card, as the shadow GPU reads it.
pub(super) fn description(props: &DeviceProps) -> String {
    let DeviceProps { name, total_bytes, context_bytes, .. } = props;
    format!("name={};total={total_bytes};context={context_bytes};devices=1", name.replace([';', '\0'], " "))
}

/// NVIDIA's libraries that a plugin names itself.
fn named_libraries(plugin: &Path) -> Vec<String> {
    let Ok(opened) = File::open(plugin) else { return Vec::new() };
    let named = needed_libraries(&ReadCache::new(opened)).unwrap_or_default();
    named.into_iter().filter(|name| family_of(name).is_some()).collect()
}

/// Loads a library from memory: no file is left behind.
fn load(name: &str, contents: &[u8]) -> io::Result<Library> {
    let text = CString::new(name).map_err(io::Error::other)?;
    // By its number: glibc has a function for it since 2.27, and the wheel is for 2.17.
    // SAFETY: the name is a text, and the kernel reads nothing else.
    let number = unsafe { libc::syscall(libc::SYS_memfd_create, text.as_ptr(), libc::MFD_CLOEXEC) };
    let Some(number) = i32::try_from(number).ok().filter(|number| *number >= 0) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: the descriptor is new, and nothing else uses it.
    let mut file = unsafe { File::from_raw_fd(number) };
    file.write_all(contents)?;
    // The file stays open: the loader takes a second library of the same name for the first.
    let path = format!("/proc/self/fd/{}", file.into_raw_fd());
    // SAFETY: the library is our own; its initialisers only fill tables.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(io::Error::other)
}

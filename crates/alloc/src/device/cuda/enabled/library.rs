//! Shared libraries that are loaded at run time: the driver, and cuBLAS of the CUDA toolkit.
//!
//! The driver's bindings panic at the first call of a symbol that the library lacks. So every
//! symbol is looked up here before a device is opened. cuBLAS may be of any version; only matrix
//! products need it. The loader is asked first (`LD_LIBRARY_PATH`, the system's folders), then the
//! folders that the program names, because only the program may read the environment.

use std::{
    error::Error,
    ffi::{CStr, OsStr},
    fs,
    path::PathBuf,
    sync::OnceLock,
};

use cudarc::driver::sys;
use libloading::Library;

/// What every device needs.
const CORE: &[&CStr] = &[
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemGetInfo_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    c"cuModuleLoadData",
    c"cuModuleGetFunction",
    c"cuLaunchKernel",
];

/// What giving a context back needs (drivers from CUDA 11.0 on).
pub(super) const CONTEXT_RELEASE: &[&CStr] = &[c"cuDevicePrimaryCtxRelease_v2"];

/// What virtual memory needs (drivers from CUDA 10.2 on).
pub(super) const VIRTUAL_MEMORY: &[&CStr] = &[
    c"cuMemGetAllocationGranularity",
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemCreate",
    c"cuMemRelease",
    c"cuMemMap",
    c"cuMemSetAccess",
    c"cuMemUnmap",
];

/// What calls during the capture of a stream need (drivers from CUDA 10.1 on).
pub(super) const CAPTURE_MODES: &[&CStr] = &[c"cuThreadExchangeStreamCaptureMode"];

/// What stream-ordered pools need (drivers from CUDA 11.2 on).
pub(super) const POOLS: &[&CStr] = &[
    c"cuDeviceGetDefaultMemPool",
    c"cuMemPoolCreate",
    c"cuMemPoolDestroy",
    c"cuMemPoolSetAttribute",
    c"cuMemPoolGetAttribute",
    c"cuMemPoolTrimTo",
    c"cuMemAllocFromPoolAsync",
    c"cuMemFreeAsync",
];

/// Whether the driver's library can be loaded.
pub(super) fn is_present() -> bool {
    // SAFETY: loading the driver's library runs its own initialisers and nothing else.
    unsafe { sys::is_culib_present() }
}

/// Loads and initialises the driver, once per process; the error is the reason.
pub(super) fn initialise() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME
        .get_or_init(|| {
            if !is_present() {
                return Err(
                    "the driver's library (libcuda.so.1) was not found: no NVIDIA driver on this machine".to_owned()
                );
            }
            if let Some(missing) = first_missing(CORE) {
                return Err(format!("the driver's library has no {missing}: the driver is too old"));
            }
            // SAFETY: the symbol is there, and 0 is the only value that the flags may have.
            match unsafe { sys::cuInit(0) } {
                sys::CUresult::CUDA_SUCCESS => Ok(()),
                code => Err(format!("the driver does not start: cuInit returns {code:?}")),
            }
        })
        .clone()
}

/// The newest CUDA version that the driver supports.
pub(super) fn version() -> Option<(u32, u32)> {
    initialise().ok()?;
    let mut version = 0;
    // SAFETY: the pointer is to a live integer.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    let version = u32::try_from(version).ok()?;
    (code == sys::CUresult::CUDA_SUCCESS).then_some((version / 1000, version % 1000 / 10))
}

/// The number of GPUs that this process sees.
pub(super) fn device_count() -> Result<u32, String> {
    initialise()?;
    let mut count = 0;
    // SAFETY: the pointer is to a live integer.
    match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
        sys::CUresult::CUDA_SUCCESS => Ok(u32::try_from(count).unwrap_or(0)),
        code => Err(format!("the driver does not count its devices: cuDeviceGetCount returns {code:?}")),
    }
}

/// Whether the library has all of these calls.
pub(super) fn has(symbols: &[&CStr]) -> bool {
    first_missing(symbols).is_none()
}

/// The first of the symbols that the driver's library, which is present, lacks.
fn first_missing(symbols: &[&CStr]) -> Option<String> {
    let found = |symbol: &CStr| {
        // SAFETY: the symbol is only looked up, never called through this type.
        unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.to_bytes_with_nul()) }.is_ok()
    };
    symbols.iter().find(|symbol| !found(symbol)).map(|symbol| symbol.to_string_lossy().into_owned())
}

/// Supported major versions, newest first. Since 11 the functions used here have not changed.
const MAJOR_VERSIONS: [u32; 3] = [13, 12, 11];

/// Lists the folders in which the toolkit may be.
type ToolkitFolders = fn() -> Vec<PathBuf>;

static FOLDERS: OnceLock<ToolkitFolders> = OnceLock::new();

/// Names more folders for the toolkit's libraries. The function is called only when a library is
/// needed that the loader does not find. The first call counts.
pub fn look_for_toolkit_in(folders: ToolkitFolders) {
    FOLDERS.get_or_init(|| folders);
}

/// A loaded library of the toolkit.
#[derive(Debug)]
pub(super) struct ToolkitLibrary {
    pub(super) library: Library,
    /// The file it came from, where the system reports it.
    pub(super) place: String,
}

/// Loads the newest library of that name that the driver supports; the error is the reason.
///
/// A library of a newer major version than the driver can be loaded, but fails at its first call,
/// so it is left out.
pub(super) fn load_toolkit(name: &str, newest_major: Option<u32>) -> Result<ToolkitLibrary, String> {
    let fits = |major: &&u32| newest_major.is_none_or(|newest| **major <= newest);
    let files: Vec<String> = MAJOR_VERSIONS.iter().filter(fits).map(|major| format!("lib{name}.so.{major}")).collect();
    for file in &files {
        if let Ok(library) = open(file.as_ref()) {
            let place = mapped_from(file).unwrap_or_else(|| file.clone());
            return Ok(ToolkitLibrary { library, place });
        }
    }
    let folders = FOLDERS.get().map_or_else(Vec::new, |folders| folders());
    let mut refused = None;
    for path in files.iter().flat_map(|file| folders.iter().map(move |folder| folder.join(file))) {
        if !path.is_file() {
            continue;
        }
        match open(path.as_os_str()) {
            Ok(library) => return Ok(ToolkitLibrary { library, place: path.display().to_string() }),
            Err(error) => {
                // The loader's own message is the cause of the error.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                refused = refused.or_else(|| Some(format!("{} cannot be loaded: {reason}", path.display())));
            }
        }
    }
    Err(refused.unwrap_or_else(|| {
        format!("no {} in the loader's folders, nor in {} toolkit folders", files.join(" or "), folders.len())
    }))
}

fn open(file: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: loading a library of the toolkit runs its own initialisers and nothing else.
    unsafe { Library::new(file) }
}

/// The file that is mapped into this process under a name that ends like this.
fn mapped_from(file: &str) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = |line: &str| line.find('/').map(|start| line[start..].to_owned());
    // The requested name may be a link to a longer one.
    maps.lines().filter_map(path).find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_by_all_its_names() {
        let reason = load_toolkit("surely-no-such-library", Some(12)).unwrap_err();
        assert!(
            reason.starts_with("no libsurely-no-such-library.so.12 or libsurely-no-such-library.so.11 in"),
            "{reason}"
        );
    }
}

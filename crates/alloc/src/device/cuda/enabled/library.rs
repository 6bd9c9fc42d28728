//! The driver's library: whether it is there, which version it is, and which calls it has.
//!
//! The bindings panic at the first call of a symbol that the library lacks, so every symbol this room uses is looked
//! up here before a device is opened.

use std::{ffi::CStr, sync::OnceLock};

use cudarc::driver::sys;

/// Without these there is no device.
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
    c"cuMemsetD32Async",
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
const CONTEXT_RELEASE: &[&CStr] = &[c"cuDevicePrimaryCtxRelease_v2"];

/// What virtual memory needs (drivers from CUDA 10.2 on).
const VIRTUAL_MEMORY: &[&CStr] = &[
    c"cuMemGetAllocationGranularity",
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemCreate",
    c"cuMemRelease",
    c"cuMemMap",
    c"cuMemSetAccess",
    c"cuMemUnmap",
];

/// What stream-ordered pools need (drivers from CUDA 11.2 on).
const POOLS: &[&CStr] = &[
    c"cuDeviceGetDefaultMemPool",
    c"cuMemPoolCreate",
    c"cuMemPoolDestroy",
    c"cuMemPoolSetAttribute",
    c"cuMemPoolGetAttribute",
    c"cuMemPoolTrimTo",
    c"cuMemAllocFromPoolAsync",
    c"cuMemFreeAsync",
];

/// Whether the library can be loaded at all.
pub(super) fn is_present() -> bool {
    // SAFETY: loading the driver's library runs its own initialisers and nothing else.
    unsafe { sys::is_culib_present() }
}

/// Loads and initialises the library, once for the process; why that failed, in a sentence.
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
                code => Err(format!("the driver does not start: cuInit says {code:?}")),
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

/// How many GPUs this process may see.
pub(super) fn device_count() -> Result<u32, String> {
    initialise()?;
    let mut count = 0;
    // SAFETY: the pointer is to a live integer.
    match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
        sys::CUresult::CUDA_SUCCESS => Ok(u32::try_from(count).unwrap_or(0)),
        code => Err(format!("the driver does not tell its devices: cuDeviceGetCount says {code:?}")),
    }
}

/// Whether the library can give a context back before the process ends.
pub(super) fn has_context_release() -> bool {
    first_missing(CONTEXT_RELEASE).is_none()
}

/// Whether the library has the calls for virtual memory.
pub(super) fn has_virtual_memory() -> bool {
    first_missing(VIRTUAL_MEMORY).is_none()
}

/// Whether the library has the calls for stream-ordered pools.
pub(super) fn has_pools() -> bool {
    first_missing(POOLS).is_none()
}

/// The first of the symbols that the library, which is present, does not have.
fn first_missing(symbols: &[&CStr]) -> Option<String> {
    let found = |symbol: &CStr| {
        // SAFETY: the symbol is only looked up, never called through this type.
        unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.to_bytes_with_nul()) }.is_ok()
    };
    symbols.iter().find(|symbol| !found(symbol)).map(|symbol| symbol.to_string_lossy().into_owned())
}

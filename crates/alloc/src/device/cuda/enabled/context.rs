//! The primary context of a GPU with its kernels, streams and events, and the driver's result codes
//! as errors.
//!
//! Making a context takes a good part of a second and some hundred megabytes. So there is one per
//! GPU for the life of the process, shared by all devices that are opened on it. A process that
//! only checks whether a GPU works must not hold that memory while others measure: such a context
//! is given back at once.

use std::{
    cell::Cell,
    ffi::CStr,
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use super::{
    blas::{self, BlasError, BlasHandle, BlasProduct},
    kernels::Kernels,
    library,
    work::ScratchPiece,
};
use crate::device::{CallKind, DeviceError};
use oomph_base::{EventId, StreamId};

/// A GPU with its context.
#[derive(Debug)]
pub(super) struct GpuContext {
    pub(super) ordinal: u32,
    pub(super) device: sys::CUdevice,
    primary: PrimaryContext,
    pub(super) name: String,
    pub(super) total_bytes: u64,
    /// Bytes that were not free right after the context was made: its own memory, and that of other
    /// processes.
    pub(super) taken_bytes: u64,
    /// Smallest piece of physical memory, where the GPU has virtual memory.
    pub(super) granularity_bytes: Option<u64>,
    pub(super) has_pools: bool,
    pub(super) exports: ExportAbilities,
    pub(super) kernels: Kernels,
    /// Bytes taken by the kernels.
    pub(super) kernel_bytes: u64,
    products: Mutex<Option<LoadedBlas>>,
    /// Bytes taken by the libraries that the first product loads.
    library_bytes: AtomicU64,
}

/// cuBLAS in this context.
#[derive(Debug)]
struct LoadedBlas {
    handle: BlasHandle,
    /// Free memory before the handle was made, until the first product has run.
    free_before: Option<u64>,
}

/// How memory of `cuMemCreate` can be passed on. It must be asked for when the memory is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ExportAbilities {
    /// To other processes, as a file descriptor.
    pub(super) as_files: bool,
    /// To network cards (GPUDirect RDMA).
    pub(super) to_network: bool,
}

/// A reference to the primary context of a GPU; without one the driver destroys the context.
#[derive(Debug)]
struct PrimaryContext {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

impl PrimaryContext {
    fn retain(device: sys::CUdevice) -> Result<PrimaryContext, CUresult> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live handle, the device is one that the driver named.
        succeed(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        Ok(PrimaryContext { device, handle })
    }
}

impl Drop for PrimaryContext {
    /// An old driver cannot release it: then the context stays until the process ends.
    fn drop(&mut self) {
        if !library::has(library::CONTEXT_RELEASE) {
            return;
        }
        CURRENT.set(ptr::null_mut());
        // SAFETY: the calls exist; the context was retained once, and only a probe or a failed
        // opening drops it: nothing was allocated in it. Failures are ignored.
        unsafe {
            sys::cuCtxSetCurrent(ptr::null_mut());
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

// SAFETY: the driver's handles may be used from any thread on which the context is current, which
// `enter` ensures; nothing in here changes after it was made except behind a lock.
unsafe impl Send for GpuContext {}
// SAFETY: as above.
unsafe impl Sync for GpuContext {}

/// The name of a GPU that reports none.
const UNNAMED: &str = "unnamed GPU";

/// The contexts of this process.
static CONTEXTS: Mutex<Vec<&'static GpuContext>> = Mutex::new(Vec::new());

thread_local! {
    /// The context that this module last made current on this thread.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(ptr::null_mut()) };
    /// What a guard on this thread restores.
    static KEPT: Cell<KeptContext> = const { Cell::new(KeptContext::Unguarded) };
}

/// The context of the program on one thread.
#[derive(Clone, Copy, Debug)]
enum KeptContext {
    /// No guard is active.
    Unguarded,
    /// The program's context is still current: no call under the guard has needed one.
    Current,
    /// The program's context, until a call under the guard needed one.
    Replaced(sys::CUcontext),
}

impl GpuContext {
    /// The context of a GPU, made at the first call; the error is the reason.
    pub(super) fn of(ordinal: u32) -> Result<&'static GpuContext, String> {
        must_be_there(ordinal)?;
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.iter().find(|context| context.ordinal == ordinal) {
            return Ok(context);
        }
        let context: &'static GpuContext = Box::leak(Box::new(GpuContext::make(ordinal)?));
        contexts.push(context);
        Ok(context)
    }

    /// Checks that a GPU can be used, and gives back the context that this takes, unless the
    /// process has it anyway.
    pub(super) fn probe(ordinal: u32) -> Result<(), String> {
        must_be_there(ordinal)?;
        let contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if contexts.iter().any(|context| context.ordinal == ordinal) {
            return Ok(());
        }
        GpuContext::make(ordinal).map(drop)
    }

    fn make(ordinal: u32) -> Result<GpuContext, String> {
        let explain = |call: &str, code: CUresult| format!("GPU {ordinal} cannot be used: {call} says {code:?}");
        let device = device(ordinal).map_err(|code| explain("cuDeviceGet", code))?;
        let primary = PrimaryContext::retain(device).map_err(|code| explain("cuDevicePrimaryCtxRetain", code))?;
        make_current(primary.handle).map_err(|code| explain("cuCtxSetCurrent", code))?;
        let multiprocessors =
            attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).unwrap_or(1);
        let (free_before, _) = memory_info().map_err(|code| explain("cuMemGetInfo", code))?;
        let kernels = Kernels::load(multiprocessors).map_err(|(call, code)| explain(call, code))?;
        let (free, total) = memory_info().map_err(|code| explain("cuMemGetInfo", code))?;
        let has = |which| attribute(device, which) == Some(1);
        let has_virtual_memory = library::has(library::VIRTUAL_MEMORY)
            && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        let exports = ExportAbilities {
            as_files: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            to_network: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        };
        Ok(GpuContext {
            ordinal,
            device,
            primary,
            name: name(device).unwrap_or_else(|| UNNAMED.to_owned()),
            total_bytes: total_memory(device).unwrap_or(total),
            taken_bytes: total.saturating_sub(free),
            granularity_bytes: if has_virtual_memory { granularity(device, exports) } else { None },
            has_pools: library::has(library::POOLS)
                && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            exports,
            kernels,
            kernel_bytes: free_before.saturating_sub(free),
            products: Mutex::new(None),
            library_bytes: AtomicU64::new(0),
        })
    }

    /// Makes the context current on this thread, unless it is.
    #[inline]
    pub(super) fn enter(&self) -> Result<(), CUresult> {
        if CURRENT.get() == self.primary.handle { Ok(()) } else { make_current(self.primary.handle) }
    }
}

/// Restores, when it is dropped, the context that was current on this thread: for calls from
/// another program, whose threads have their own contexts. Calls that need no driver cost nothing more: the driver is asked for the
/// program's context when a call first needs one.
#[derive(Debug)]
pub struct ContextGuard {
    /// What a guard around this one restores.
    outer: KeptContext,
}

impl ContextGuard {
    pub(super) fn begin() -> ContextGuard {
        // The program may have changed its context since the last guard.
        CURRENT.set(ptr::null_mut());
        ContextGuard { outer: KEPT.replace(KeptContext::Current) }
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let current = CURRENT.get();
        if let KeptContext::Replaced(before) = KEPT.replace(self.outer)
            && (current != before || current.is_null())
        {
            // SAFETY: the context was current on this thread under the guard, or it is null. Failures are ignored.
            unsafe { sys::cuCtxSetCurrent(before) };
        }
        CURRENT.set(ptr::null_mut());
    }
}

/// Allows this thread, until it is dropped, calls that are forbidden while any stream of the program is being captured:
/// memory is taken, mapped and given back, and events are queried. Such a call without it fails and spoils the capture.
/// Calls on a stream that is being captured stay forbidden.
#[derive(Debug)]
pub(super) struct CaptureLeave {
    before: Option<sys::CUstreamCaptureMode>,
}

impl CaptureLeave {
    /// Nothing changes unless `needed`; an old driver has no such modes.
    pub(super) fn take(needed: bool) -> CaptureLeave {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let exchanged = needed
            // SAFETY: a device that needs this has looked the call up; the pointer is to a live mode.
            && succeed(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }).is_ok();
        CaptureLeave { before: exchanged.then_some(mode) }
    }
}

impl Drop for CaptureLeave {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            // SAFETY: as above, and the driver gave this mode. A failure is ignored.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
    }
}

/// The name of a GPU. Needs no context.
pub(super) fn name_of(ordinal: u32) -> Result<String, String> {
    Ok(name(device_of(ordinal)?).unwrap_or_else(|| UNNAMED.to_owned()))
}

/// The total memory of a GPU, without using it.
pub(super) fn total_bytes_of(ordinal: u32) -> Result<u64, String> {
    total_memory(device_of(ordinal)?).ok_or_else(|| format!("GPU {ordinal} does not tell its memory"))
}

fn device_of(ordinal: u32) -> Result<sys::CUdevice, String> {
    must_be_there(ordinal)?;
    device(ordinal).map_err(|code| format!("GPU {ordinal} cannot be used: cuDeviceGet says {code:?}"))
}

/// Checks that the driver shows this process a GPU of that number; the error says what it shows.
fn must_be_there(ordinal: u32) -> Result<(), String> {
    match library::device_count()? {
        count if ordinal < count => Ok(()),
        0 => Err("the driver sees no GPU".to_owned()),
        1 => Err(format!("there is no GPU {ordinal}: the driver sees one, number 0")),
        count => Err(format!("there is no GPU {ordinal}: the driver sees {count}, numbered from 0")),
    }
}

impl GpuContext {
    /// Makes the handle of cuBLAS, if there is none yet. The context is current.
    pub(super) fn make_handle(&self) -> Result<(), BlasError> {
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if products.is_none() {
            let free_before = memory_info().ok().map(|(free, _)| free);
            *products = Some(LoadedBlas { handle: blas::handle()?, free_before });
        }
        Ok(())
    }

    /// Queues a product with cuBLAS, whose handle was made. The context is current.
    pub(super) fn multiply(
        &self,
        stream: sys::CUstream,
        workspace: ScratchPiece,
        product: &BlasProduct,
    ) -> Result<(), BlasError> {
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(products) = &mut *products else { return Err(BlasError::NO_HANDLE) };
        products.handle.multiply(stream, workspace, product)?;
        if let Some(before) = products.free_before.take() {
            let after = memory_info().map_or(before, |(free, _)| free);
            self.library_bytes.store(before.saturating_sub(after), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bytes taken by the libraries that the first product loads.
    pub(super) fn library_bytes(&self) -> u64 {
        self.library_bytes.load(Ordering::Relaxed)
    }
}

/// Waits for all work of the current context.
pub(super) fn synchronize() -> CUresult {
    // SAFETY: a context is current, or the driver says so.
    unsafe { sys::cuCtxSynchronize() }
}

/// Whether kernels of one GPU can touch the memory of another.
pub(super) fn can_reach(device: sys::CUdevice, other: sys::CUdevice) -> Result<bool, CUresult> {
    let mut answer = 0;
    // SAFETY: the pointer is to a live integer.
    succeed(unsafe { sys::cuDeviceCanAccessPeer(&raw mut answer, device, other) })?;
    Ok(answer == 1)
}

/// The properties that describe device memory of one GPU to the virtual-memory calls.
pub(super) fn pinned_on(device: sys::CUdevice, exports: ExportAbilities) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: match exports.as_files {
            true => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            false => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        },
        location: location(device),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: exports.to_network.into(),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The memory of one GPU as a place.
pub(super) fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Free and total bytes in the current context.
pub(super) fn memory_info() -> Result<(u64, u64), CUresult> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both pointers are to live integers; a context is current, or the driver says so.
    succeed(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok((free as u64, total as u64))
}

/// Success, or the code.
pub(super) fn succeed(code: CUresult) -> Result<(), CUresult> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

#[cold]
fn make_current(handle: sys::CUcontext) -> Result<(), CUresult> {
    if let KeptContext::Current = KEPT.get() {
        let mut before = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        succeed(unsafe { sys::cuCtxGetCurrent(&raw mut before) })?;
        KEPT.set(KeptContext::Replaced(before));
        if before == handle {
            CURRENT.set(handle);
            return Ok(());
        }
    }
    // SAFETY: the context is retained, for the life of the process or until `PrimaryContext` makes
    // it no longer current.
    succeed(unsafe { sys::cuCtxSetCurrent(handle) })?;
    CURRENT.set(handle);
    Ok(())
}

pub(super) fn device(ordinal: u32) -> Result<sys::CUdevice, CUresult> {
    let mut device = 0;
    let ordinal = i32::try_from(ordinal).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    // SAFETY: the pointer is to a live handle.
    succeed(unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
    Ok(device)
}

fn attribute(device: sys::CUdevice, which: CUdevice_attribute) -> Option<u32> {
    let mut value = 0;
    // SAFETY: the pointer is to a live integer.
    succeed(unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) }).ok()?;
    u32::try_from(value).ok()
}

fn name(device: sys::CUdevice) -> Option<String> {
    let mut text = [0u8; 256];
    // SAFETY: the driver writes at most this many bytes, the closing zero included.
    let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr().cast(), text.len() as i32, device) };
    succeed(code).ok()?;
    Some(CStr::from_bytes_until_nul(&text).ok()?.to_string_lossy().into_owned())
}

fn total_memory(device: sys::CUdevice) -> Option<u64> {
    let mut bytes = 0;
    // SAFETY: the pointer is to a live integer.
    succeed(unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, device) }).ok()?;
    Some(bytes as u64)
}

fn granularity(device: sys::CUdevice, exports: ExportAbilities) -> Option<u64> {
    let properties = pinned_on(device, exports);
    let mut bytes = 0;
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: both pointers are to live values.
    succeed(unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, least) }).ok()?;
    Some(bytes as u64).filter(|&bytes| bytes > 0)
}

/// The error that a code means; `requested` is how much memory the call requested. Converted at
/// once, because the binding's own error type asks the driver for its text when it is printed.
pub(super) fn device_error(call: CallKind, requested: u64, code: CUresult) -> DeviceError {
    match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory { call, requested },
        CUresult::CUDA_ERROR_INVALID_VALUE => {
            DeviceError::InvalidValue { call, reason: "CUDA_ERROR_INVALID_VALUE".to_owned() }
        }
        code => DeviceError::Driver { call, name: format!("{code:?}") },
    }
}

/// The streams and events of one device: driver handles by our numbers.
///
/// Stream 0 is the legacy default stream; all others are non-blocking, as PyTorch's are, so that
/// streams wait for each other only through events. Events carry no times, which makes them cheap.
/// A guest in another program makes no streams: it takes over the handles of the program's streams.
#[derive(Debug)]
pub(super) struct StreamTable {
    streams: Vec<sys::CUstream>,
    events: Vec<Option<sys::CUevent>>,
    destroyed: Vec<EventId>,
    pub(super) owner: StreamOwner,
}

/// Who makes and destroys the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamOwner {
    /// This device.
    Device,
    /// The program that this device is a guest in.
    Program,
}

/// Flags of `cuStreamCreate`.
pub(super) const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
/// Flags of `cuEventCreate`.
pub(super) const WITHOUT_TIMES: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

impl StreamTable {
    pub(super) fn new(owner: StreamOwner) -> StreamTable {
        StreamTable { streams: vec![ptr::null_mut()], events: Vec::new(), destroyed: Vec::new(), owner }
    }

    /// The handle of a stream.
    #[inline]
    pub(super) fn stream(&self, stream: StreamId) -> Result<sys::CUstream, String> {
        self.streams.get(stream.index()).copied().ok_or_else(|| format!("there is no stream {stream}"))
    }

    /// The handle of an event.
    #[inline]
    pub(super) fn event(&self, event: EventId) -> Result<sys::CUevent, String> {
        self.events.get(event.index()).copied().flatten().ok_or_else(|| format!("there is no event {event}"))
    }

    /// Whether there is room for another stream.
    pub(super) fn has_room(&self) -> bool {
        self.streams.len() <= usize::from(u16::MAX)
    }

    /// Numbers a new stream; the caller has checked [`has_room`](StreamTable::has_room).
    pub(super) fn add_stream(&mut self, handle: sys::CUstream) -> StreamId {
        self.streams.push(handle);
        StreamId((self.streams.len() - 1) as u16)
    }

    /// Numbers a new event.
    pub(super) fn add_event(&mut self, handle: sys::CUevent) -> EventId {
        if let Some(event) = self.destroyed.pop() {
            self.events[event.index()] = Some(handle);
            return event;
        }
        self.events.push(Some(handle));
        EventId((self.events.len() - 1) as u32)
    }

    /// Forgets an event that was destroyed.
    pub(super) fn remove_event(&mut self, event: EventId) {
        self.events[event.index()] = None;
        self.destroyed.push(event);
    }

    /// Gives everything back. The context is current; failures are ignored.
    pub(super) fn destroy_all(&mut self) {
        for event in self.events.drain(..).flatten() {
            // SAFETY: the event was made in this context and is destroyed only here.
            unsafe { sys::cuEventDestroy_v2(event) };
        }
        for stream in self.streams.drain(1..).filter(|_| self.owner == StreamOwner::Device) {
            // SAFETY: as for events; work on the stream is finished by the driver first.
            unsafe { sys::cuStreamDestroy_v2(stream) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_errors_without_asking_the_driver() {
        let error = |code| device_error(CallKind::MemAlloc, 512, code);
        assert!(error(CUresult::CUDA_ERROR_OUT_OF_MEMORY).is_out_of_memory());
        let sticky = error(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(sticky.to_string(), "cuMemAlloc: CUDA_ERROR_ILLEGAL_ADDRESS: the context is lost");
        let lasting = error(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
        let passing = error(CUresult::CUDA_ERROR_NOT_PERMITTED);
        assert!(sticky.loses_context() && lasting.loses_context() && !passing.loses_context());
    }
}

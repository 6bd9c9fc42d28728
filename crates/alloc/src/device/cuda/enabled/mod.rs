//! The real GPU: a [`Device`] over the driver's calls, with tables of all live handles and
//! addresses.
//!
//! One file per subject: `library` (loading the driver and cuBLAS), `context` (one per GPU and
//! process; streams and events), `memory` (plain, pinned, virtual), `pools`; `work` and `products`
//! for what runs on streams, over `kernels` and `blas`; `patterns` for known contents; `survey` for
//! `doctor`. The wall clock measures each driver call alone, without our tables.
//!
//! The tables make handles safe to use: an unknown number or address is refused before the driver
//! is asked. They also list what is given back when a device is dropped.
#![expect(unsafe_code, reason = "the driver is a C library")]

mod blas;
mod context;
mod kernels;
mod library;
mod memory;
mod patterns;
mod pools;
mod products;
mod survey;
mod work;

use std::{
    collections::BTreeSet,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::{self, CUresult};

pub use context::ContextGuard;
pub use library::look_for_toolkit_in;
pub use survey::survey;

use self::{
    context::{CaptureLeave, ExportAbilities, GpuContext, StreamOwner, StreamTable, device_error, succeed},
    memory::{PinnedMemory, PlainMemory},
    patterns::PatternBatches,
    pools::DriverPools,
    work::{ScratchMemory, StagingBuffers},
};
use super::{Footprint, Unavailable};
use crate::device::{
    CallKind, CallLedger, CallTally, Capabilities, Device, DeviceClock, DeviceError, DeviceProps, MemoryInfo,
    abilities_by_props, mapping::MappingTable,
};
use oomph_base::{Address, EventId, MIB, Nanos, StreamId, round_up};

/// An allocation at once after much memory was freed does not wait until it is cleared, one this much later does. Measured on
/// an H200 with 60 GiB, which take longer to clear.
const CLEARING_IS_AWAITED_AFTER: Duration = Duration::from_millis(50);
/// The GPUs of which this process has closed a device since it last waited for their memory to be cleared.
static FREED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Physical memory comes in pages of this size where the GPU does not say otherwise.
const USUAL_PAGE_BYTES: u64 = 2 * MIB;

/// Opens a GPU by its number among those that the driver shows this process.
pub fn open(ordinal: u32) -> Result<Box<dyn Device>, Unavailable> {
    Ok(Box::new(CudaDevice::open(ordinal)?))
}

/// Opens a GPU for a guest in a program with its own streams: [`Device::stream_create`] takes over
/// the handle that it is given, and every call needs a guard from [`keep_context`].
pub fn open_as_guest(ordinal: u32) -> Result<Box<dyn Device>, Unavailable> {
    Ok(Box::new(CudaDevice::with_streams_of(StreamOwner::Program, ordinal)?))
}

/// Waits until the memory of devices that this process has closed is cleared. The next allocation waits for that, 0.2 s and
/// more after 60 GiB were freed (H200): a program that is measured must not wait for what the one before it freed.
pub fn wait_for_cleared_memory(ordinal: u32) -> Result<(), Unavailable> {
    if freed().contains(&ordinal) {
        thread::sleep(CLEARING_IS_AWAITED_AFTER);
        // A full GPU is for the program to find.
        let _ = CudaDevice::open(ordinal)?.alloc(USUAL_PAGE_BYTES);
        freed().remove(&ordinal);
    }
    Ok(())
}

fn freed() -> MutexGuard<'static, BTreeSet<u32>> {
    FREED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guard that restores the context that is current on this thread now.
pub fn keep_context() -> ContextGuard {
    ContextGuard::begin()
}

/// Checks that a GPU can be used, and leaves nothing on it: the process may then start others that
/// use it.
pub fn probe(ordinal: u32) -> Result<(), Unavailable> {
    GpuContext::probe(ordinal).map_err(Unavailable)
}

/// The number of GPUs that the driver shows this process; at least one.
pub fn count() -> Result<u32, Unavailable> {
    match library::device_count() {
        Ok(0) => Err(Unavailable("the driver sees no GPU".to_owned())),
        counted => counted.map_err(Unavailable),
    }
}

/// The name of a GPU.
pub fn name(ordinal: u32) -> Result<String, Unavailable> {
    context::name_of(ordinal).map_err(Unavailable)
}

/// The total memory of a GPU.
pub fn total_bytes(ordinal: u32) -> Result<u64, Unavailable> {
    context::total_bytes_of(ordinal).map_err(Unavailable)
}

/// The newest CUDA version that the driver supports, such as `13.0`, where there is a driver.
#[must_use]
pub fn driver_version() -> Option<String> {
    library::version().map(|(major, minor)| format!("{major}.{minor}"))
}

/// The version and file of the library that runs matrix products, or why there is none. Without it
/// their streams are kept busy for as long as an H200 would be, and times of steps mean nothing.
pub fn matrix_library() -> Result<String, Unavailable> {
    blas::blas().map(|blas| format!("cuBLAS {}, {}", blas.version, blas.place)).map_err(Unavailable)
}

/// What this program and its libraries have taken of a GPU so far, besides the context.
pub fn footprint(ordinal: u32) -> Result<Footprint, Unavailable> {
    let context = GpuContext::of(ordinal).map_err(Unavailable)?;
    let library_bytes = context.library_bytes();
    Ok(Footprint {
        kernel_bytes: context.kernel_bytes,
        library_bytes,
        workspace_bytes: if library_bytes > 0 { work::WORKSPACE_BYTES } else { 0 },
    })
}

/// A real GPU.
#[derive(Debug)]
pub struct CudaDevice {
    props: DeviceProps,
    context: &'static GpuContext,
    /// Whether the program may be capturing a stream whenever it calls.
    serves_captures: bool,
    opened: Instant,
    ledger: CallLedger,
    /// What was free at the last driver query, and what this handle held then.
    available_bytes: u64,
    memory: PlainMemory,
    streams: StreamTable,
    virtual_space: MappingTable<sys::CUmemGenericAllocationHandle>,
    /// GPUs that may touch the memory of this one, besides itself.
    peers: Vec<sys::CUdevice>,
    /// Whether memory is created so that the program can pass it to other processes and to network cards.
    exports: ExportAbilities,
    pools: DriverPools,
    pinned: PinnedMemory,
    scratch: ScratchMemory,
    staging: StagingBuffers,
    batches: PatternBatches,
}

// SAFETY: the driver's handles may be used from any thread on which the context is current, which
// every call ensures; the device itself is used by one thread at a time.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// Opens a GPU by its number among those that the driver shows this process.
    pub fn open(ordinal: u32) -> Result<CudaDevice, Unavailable> {
        CudaDevice::with_streams_of(StreamOwner::Device, ordinal)
    }

    fn with_streams_of(owner: StreamOwner, ordinal: u32) -> Result<CudaDevice, Unavailable> {
        library::initialise().map_err(Unavailable)?;
        let serves_captures = owner == StreamOwner::Program && library::has(library::CAPTURE_MODES);
        let _leave = CaptureLeave::take(serves_captures);
        let context = GpuContext::of(ordinal).map_err(Unavailable)?;
        let page_bytes = context.granularity_bytes.unwrap_or(USUAL_PAGE_BYTES);
        let free = context.enter().and_then(|()| context::memory_info());
        let (available_bytes, _) = free.map_err(|code| {
            Unavailable(format!("GPU {ordinal} no longer works in this process: cuMemGetInfo says {code:?}"))
        })?;
        Ok(CudaDevice {
            props: DeviceProps {
                name: context.name.clone(),
                ordinal,
                total_bytes: context.total_bytes,
                page_bytes,
                granularity_bytes: page_bytes,
                context_bytes: context.taken_bytes,
                capabilities: Capabilities::PINNED_HOST
                    .and(Capabilities::COMPUTE)
                    .and(Capabilities::PATTERNS)
                    .and(Capabilities::VIRTUAL_MEMORY.when(context.granularity_bytes.is_some()))
                    .and(Capabilities::STREAM_ORDERED_POOLS.when(context.has_pools)),
                clock: DeviceClock::Wall,
            },
            context,
            serves_captures,
            opened: Instant::now(),
            ledger: CallLedger::default(),
            available_bytes,
            memory: PlainMemory::new(page_bytes),
            streams: StreamTable::new(owner),
            virtual_space: MappingTable::default(),
            peers: Vec::new(),
            exports: match owner {
                StreamOwner::Program => context.exports,
                StreamOwner::Device => ExportAbilities::default(),
            },
            pools: DriverPools::default(),
            pinned: PinnedMemory::default(),
            scratch: ScratchMemory::default(),
            staging: StagingBuffers::default(),
            batches: PatternBatches::default(),
        })
    }

    /// Makes a driver call in this device's context, measures it and notes it.
    #[inline]
    fn drive(&mut self, call: CallKind, requested: u64, make: impl FnOnce() -> CUresult) -> Result<(), DeviceError> {
        let entered = self.context.enter();
        let _leave = CaptureLeave::take(self.serves_captures);
        let begin = Instant::now();
        let code = entered.map_or_else(|code| code, |()| make());
        let time = Nanos(begin.elapsed().as_nanos() as u64);
        self.ledger.note(call, time, code != CUresult::CUDA_SUCCESS);
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            self.update_free_bytes();
        }
        succeed(code).map_err(|code| device_error(call, requested, code))
    }

    /// Updates the free memory when the driver had no more: other processes may have taken what was
    /// free at the last query. This is not a call of the caller, so it is not counted.
    #[cold]
    fn update_free_bytes(&mut self) {
        if let Ok((free, _)) = context::memory_info() {
            self.available_bytes = free + self.held_bytes();
        }
    }

    /// Refuses a call without asking the driver.
    fn refuse<T>(&mut self, error: DeviceError) -> Result<T, DeviceError> {
        let (DeviceError::OutOfMemory { call, .. }
        | DeviceError::InvalidValue { call, .. }
        | DeviceError::Driver { call, .. }) = error
        else {
            return Err(error);
        };
        self.ledger.note(call, Nanos::ZERO, true);
        Err(error)
    }

    /// Refuses a call that breaks a rule.
    fn refuse_because<T>(&mut self, call: CallKind, reason: impl Into<String>) -> Result<T, DeviceError> {
        self.refuse(DeviceError::InvalidValue { call, reason: reason.into() })
    }

    /// Refuses a call if a rule is broken.
    #[inline]
    fn refuse_broken<T>(&mut self, call: CallKind, checked: Result<T, String>) -> Result<T, DeviceError> {
        checked.or_else(|reason| self.refuse_because(call, reason))
    }

    /// Makes this device's context current for work outside of [`drive`](CudaDevice::drive).
    fn enter(&self, call: CallKind) -> Result<(), DeviceError> {
        self.context.enter().map_err(|code| device_error(call, 0, code))
    }

    /// The driver's handle of a stream.
    #[inline]
    fn stream(&mut self, call: CallKind, stream: StreamId) -> Result<sys::CUstream, DeviceError> {
        let found = self.streams.stream(stream);
        self.refuse_broken(call, found)
    }

    /// The driver's handle of an event.
    #[inline]
    fn event(&mut self, call: CallKind, event: EventId) -> Result<sys::CUevent, DeviceError> {
        let found = self.streams.event(event);
        self.refuse_broken(call, found)
    }
}

impl Device for CudaDevice {
    fn props(&self) -> &DeviceProps {
        &self.props
    }

    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::MemAlloc;
        if bytes > self.props.total_bytes {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let mut address = 0;
        // SAFETY: the pointer is to a live address; the driver checks the size.
        self.drive(call, bytes, || unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) })?;
        self.memory.insert(Address(address), bytes);
        Ok(Address(address))
    }

    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        let call = CallKind::MemFree;
        if !self.memory.has(address) {
            return self.refuse_because(call, format!("no allocation starts at {address}"));
        }
        // SAFETY: the allocation is live; the driver waits for the work that uses it.
        self.drive(call, 0, || unsafe { sys::cuMemFree_v2(address.0) })?;
        self.memory.remove(address);
        Ok(())
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        let mut info = MemoryInfo { free: 0, total: 0 };
        self.drive(CallKind::MemGetInfo, 0, || match context::memory_info() {
            Ok((free, total)) => {
                info = MemoryInfo { free, total };
                CUresult::CUDA_SUCCESS
            }
            Err(code) => code,
        })?;
        self.available_bytes = info.free + self.held_bytes();
        Ok(info)
    }

    fn held_bytes(&self) -> u64 {
        self.memory.held() + self.virtual_space.held() + self.pools.held()
    }

    /// An upper bound: the driver decides which small allocations share a page.
    fn growth_bytes(&self, bytes: u64) -> u64 {
        round_up(bytes, self.props.page_bytes)
    }

    fn free_bytes(&self) -> u64 {
        self.available_bytes.saturating_sub(self.held_bytes())
    }

    /// What was not free when the context was made (the driver does not separate the memory of
    /// other processes), what cuBLAS has taken, and scratch memory.
    fn overhead_bytes(&self) -> u64 {
        self.props.context_bytes + self.context.library_bytes() + self.scratch.bytes() + self.batches.bytes()
    }

    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
        let call = CallKind::StreamCreate;
        if !self.streams.has_room() {
            return self.refuse_because(call, "there are 65,536 streams already");
        }
        if self.streams.owner == StreamOwner::Program {
            return Ok(self.streams.add_stream(ptr::with_exposed_provenance_mut(known_as as usize)));
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.drive(call, 0, || unsafe { sys::cuStreamCreate(&raw mut handle, context::NON_BLOCKING) })?;
        Ok(self.streams.add_stream(handle))
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.streams.stream(stream).map_or(0, |handle| handle.addr() as u64)
    }

    fn stream_synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let call = CallKind::StreamSynchronize;
        let handle = self.stream(call, stream)?;
        // SAFETY: the stream is live.
        self.drive(call, 0, || unsafe { sys::cuStreamSynchronize(handle) })
    }

    fn stream_wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let call = CallKind::StreamWaitEvent;
        let (stream, event) = (self.stream(call, stream)?, self.event(call, event)?);
        // SAFETY: stream and event are live, and 0 is the usual flag.
        self.drive(call, 0, || unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        // SAFETY: the context is current.
        self.drive(CallKind::CtxSynchronize, 0, || unsafe { sys::cuCtxSynchronize() })
    }

    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.drive(CallKind::EventCreate, 0, || unsafe {
            sys::cuEventCreate(&raw mut handle, context::WITHOUT_TIMES)
        })?;
        Ok(self.streams.add_event(handle))
    }

    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let call = CallKind::EventRecord;
        let (stream, event) = (self.stream(call, stream)?, self.event(call, event)?);
        // SAFETY: stream and event are live and of the same context.
        self.drive(call, 0, || unsafe { sys::cuEventRecord(event, stream) })
    }

    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError> {
        let call = CallKind::EventQuery;
        let handle = self.event(call, event)?;
        let mut done = true;
        // SAFETY: the event is live.
        self.drive(call, 0, || match unsafe { sys::cuEventQuery(handle) } {
            CUresult::CUDA_ERROR_NOT_READY => {
                done = false;
                CUresult::CUDA_SUCCESS
            }
            code => code,
        })?;
        Ok(done)
    }

    fn event_synchronize(&mut self, event: EventId) -> Result<(), DeviceError> {
        let call = CallKind::EventSynchronize;
        let handle = self.event(call, event)?;
        // SAFETY: the event is live.
        self.drive(call, 0, || unsafe { sys::cuEventSynchronize(handle) })
    }

    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError> {
        let call = CallKind::EventDestroy;
        let handle = self.event(call, event)?;
        // SAFETY: the event is live, and its number is forgotten below.
        self.drive(call, 0, || unsafe { sys::cuEventDestroy_v2(handle) })?;
        self.streams.remove_event(event);
        Ok(())
    }

    fn now(&self) -> Nanos {
        Nanos(self.opened.elapsed().as_nanos() as u64)
    }

    fn elapse(&mut self, _time: Nanos) {}

    fn ledger(&self) -> CallLedger {
        self.ledger.clone()
    }

    fn calls(&self) -> CallTally {
        self.ledger.total()
    }

    abilities_by_props!();
}

impl Drop for CudaDevice {
    /// Gives everything back that was taken through this device, also during a panic. The context
    /// stays. If it is lost, so is everything in it, and the calls below are refused.
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        // SAFETY: the context is current. Nothing below may be in use by work that is still queued.
        unsafe { sys::cuCtxSynchronize() };
        freed().insert(self.props.ordinal);
        self.pools.destroy_all();
        self.release_virtual_memory();
        for address in self.memory.addresses() {
            // SAFETY: the allocation is live, and no work is left that could touch it.
            unsafe { sys::cuMemFree_v2(address.0) };
        }
        self.pinned.free_all();
        self.scratch.free_all();
        self.staging.free_all();
        self.batches.free_all();
        self.streams.destroy_all();
    }
}

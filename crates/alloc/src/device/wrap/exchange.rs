//! Driver calls as values: what was asked, and what the answer was.

use crate::device::{
    CallKind, Compute, Device, DeviceError, MemoryInfo, Patterned, Patterns, PhysicalId, PinnedHost, PoolId,
    PoolSettings, PoolUsage, StreamOrderedPools, VirtualMemory,
};
use oomph_base::{Address, EventId, StreamId, Work};

/// A driver call with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "variants and fields are those of the device's methods")]
pub enum Call {
    Alloc { bytes: u64 },
    Free { address: Address },
    MemoryInfo,
    StreamCreate { known_as: u64 },
    StreamSynchronize { stream: StreamId },
    StreamWaitEvent { stream: StreamId, event: EventId },
    Synchronize,
    EventCreate,
    EventRecord { event: EventId, stream: StreamId },
    EventQuery { event: EventId },
    EventSynchronize { event: EventId },
    EventDestroy { event: EventId },
    Reserve { bytes: u64 },
    AddressFree { address: Address, bytes: u64 },
    Create { bytes: u64 },
    Release { physical: PhysicalId },
    Map { address: Address, bytes: u64, physical: PhysicalId },
    SetAccess { address: Address, bytes: u64 },
    Unmap { address: Address, bytes: u64 },
    PoolCreate { max_bytes: Option<u64> },
    PoolDestroy { pool: PoolId },
    PoolConfigure { pool: PoolId, settings: PoolSettings },
    PoolTrim { pool: PoolId, keep_bytes: u64 },
    PoolUsage { pool: PoolId },
    AllocAsync { pool: PoolId, bytes: u64, stream: StreamId },
    FreeAsync { address: Address, stream: StreamId },
    HostAlloc { bytes: u64 },
    HostFree { address: Address },
    Launch { stream: StreamId, work: Work, operands: Vec<(Address, u64)> },
    FillBlocks { stream: StreamId, blocks: Vec<Patterned> },
    VerifyBlocks { stream: StreamId, blocks: Vec<Patterned> },
}

/// What a successful call brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing but success.
    Done,
    /// Where the memory is.
    Address(Address),
    /// Free and total memory.
    MemoryInfo(MemoryInfo),
    /// A new stream, and the driver's name for it.
    Stream(StreamId, u64),
    /// A new event.
    Event(EventId),
    /// Whether the work in front of an event is done.
    Ready(bool),
    /// A piece of physical memory.
    Physical(PhysicalId),
    /// A new pool.
    Pool(PoolId),
    /// What a pool holds.
    PoolUsage(PoolUsage),
}

/// How a call ended.
pub type Answer = Result<Reply, DeviceError>;

/// A call and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// What was asked.
    pub call: Call,
    /// What the answer was.
    pub answer: Answer,
}

impl Call {
    /// Which kind of call it is.
    #[must_use]
    pub fn kind(&self) -> CallKind {
        match self {
            Call::Alloc { .. } => CallKind::MemAlloc,
            Call::Free { .. } => CallKind::MemFree,
            Call::MemoryInfo => CallKind::MemGetInfo,
            Call::StreamCreate { .. } => CallKind::StreamCreate,
            Call::StreamSynchronize { .. } => CallKind::StreamSynchronize,
            Call::StreamWaitEvent { .. } => CallKind::StreamWaitEvent,
            Call::Synchronize => CallKind::CtxSynchronize,
            Call::EventCreate => CallKind::EventCreate,
            Call::EventRecord { .. } => CallKind::EventRecord,
            Call::EventQuery { .. } => CallKind::EventQuery,
            Call::EventSynchronize { .. } => CallKind::EventSynchronize,
            Call::EventDestroy { .. } => CallKind::EventDestroy,
            Call::Reserve { .. } => CallKind::AddressReserve,
            Call::AddressFree { .. } => CallKind::AddressFree,
            Call::Create { .. } => CallKind::MemCreate,
            Call::Release { .. } => CallKind::MemRelease,
            Call::Map { .. } => CallKind::MemMap,
            Call::SetAccess { .. } => CallKind::MemSetAccess,
            Call::Unmap { .. } => CallKind::MemUnmap,
            Call::PoolCreate { .. } => CallKind::PoolCreate,
            Call::PoolDestroy { .. } => CallKind::PoolDestroy,
            Call::PoolConfigure { .. } => CallKind::PoolSetAttribute,
            Call::PoolTrim { .. } => CallKind::PoolTrim,
            Call::PoolUsage { .. } => CallKind::PoolGetAttribute,
            Call::AllocAsync { .. } => CallKind::MemAllocAsync,
            Call::FreeAsync { .. } => CallKind::MemFreeAsync,
            Call::HostAlloc { .. } => CallKind::HostAlloc,
            Call::HostFree { .. } => CallKind::HostFree,
            Call::Launch { .. } | Call::FillBlocks { .. } | Call::VerifyBlocks { .. } => CallKind::Launch,
        }
    }

    /// How much memory or address space it asks for, 0 where it asks for none.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        match *self {
            Call::Alloc { bytes }
            | Call::Reserve { bytes }
            | Call::Create { bytes }
            | Call::AllocAsync { bytes, .. }
            | Call::HostAlloc { bytes } => bytes,
            _ => 0,
        }
    }

    /// Makes the call.
    pub fn make<D: Device + ?Sized>(&self, device: &mut D) -> Answer {
        let done = |()| Reply::Done;
        match *self {
            Call::Alloc { bytes } => device.alloc(bytes).map(Reply::Address),
            Call::Free { address } => device.free(address).map(done),
            Call::MemoryInfo => device.memory_info().map(Reply::MemoryInfo),
            Call::StreamCreate { known_as } => {
                let stream = device.stream_create(known_as)?;
                Ok(Reply::Stream(stream, device.stream_handle(stream)))
            }
            Call::StreamSynchronize { stream } => device.stream_synchronize(stream).map(done),
            Call::StreamWaitEvent { stream, event } => device.stream_wait_event(stream, event).map(done),
            Call::Synchronize => device.synchronize().map(done),
            Call::EventCreate => device.event_create().map(Reply::Event),
            Call::EventRecord { event, stream } => device.event_record(event, stream).map(done),
            Call::EventQuery { event } => device.event_query(event).map(Reply::Ready),
            Call::EventSynchronize { event } => device.event_synchronize(event).map(done),
            Call::EventDestroy { event } => device.event_destroy(event).map(done),
            Call::Reserve { bytes } => virtual_memory(device)?.reserve(bytes).map(Reply::Address),
            Call::AddressFree { address, bytes } => virtual_memory(device)?.address_free(address, bytes).map(done),
            Call::Create { bytes } => virtual_memory(device)?.create(bytes).map(Reply::Physical),
            Call::Release { physical } => virtual_memory(device)?.release(physical).map(done),
            Call::Map { address, bytes, physical } => virtual_memory(device)?.map(address, bytes, physical).map(done),
            Call::SetAccess { address, bytes } => virtual_memory(device)?.set_access(address, bytes).map(done),
            Call::Unmap { address, bytes } => virtual_memory(device)?.unmap(address, bytes).map(done),
            Call::PoolCreate { max_bytes } => pools(device)?.pool_create(max_bytes).map(Reply::Pool),
            Call::PoolDestroy { pool } => pools(device)?.pool_destroy(pool).map(done),
            Call::PoolConfigure { pool, settings } => pools(device)?.pool_configure(pool, settings).map(done),
            Call::PoolTrim { pool, keep_bytes } => pools(device)?.pool_trim(pool, keep_bytes).map(done),
            Call::PoolUsage { pool } => pools(device)?.pool_usage(pool).map(Reply::PoolUsage),
            Call::AllocAsync { pool, bytes, stream } => {
                pools(device)?.alloc_async(pool, bytes, stream).map(Reply::Address)
            }
            Call::FreeAsync { address, stream } => pools(device)?.free_async(address, stream).map(done),
            Call::HostAlloc { bytes } => pinned_host(device)?.host_alloc(bytes).map(Reply::Address),
            Call::HostFree { address } => pinned_host(device)?.host_free(address).map(done),
            Call::Launch { stream, ref work, ref operands } => {
                compute(device)?.launch(stream, work, operands).map(done)
            }
            Call::FillBlocks { stream, ref blocks } => patterns(device)?.fill_blocks(stream, blocks).map(done),
            Call::VerifyBlocks { stream, ref blocks } => patterns(device)?.verify_blocks(stream, blocks).map(done),
        }
    }
}

fn virtual_memory<D: Device + ?Sized>(device: &mut D) -> Result<&mut dyn VirtualMemory, DeviceError> {
    device.virtual_memory().ok_or(DeviceError::Unsupported { capability: "virtual memory" })
}

fn pools<D: Device + ?Sized>(device: &mut D) -> Result<&mut dyn StreamOrderedPools, DeviceError> {
    device.stream_ordered_pools().ok_or(DeviceError::Unsupported { capability: "stream-ordered pools" })
}

fn pinned_host<D: Device + ?Sized>(device: &mut D) -> Result<&mut dyn PinnedHost, DeviceError> {
    device.pinned_host().ok_or(DeviceError::Unsupported { capability: "pinned host memory" })
}

fn compute<D: Device + ?Sized>(device: &mut D) -> Result<&mut dyn Compute, DeviceError> {
    device.compute().ok_or(DeviceError::Unsupported { capability: "compute" })
}

fn patterns<D: Device + ?Sized>(device: &mut D) -> Result<&mut dyn Patterns, DeviceError> {
    device.patterns().ok_or(DeviceError::Unsupported { capability: "known contents" })
}

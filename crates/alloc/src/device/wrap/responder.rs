//! A device from one function: every method of [`Device`] and of its abilities becomes a [`Call`] that is answered in
//! one place.

use super::exchange::{Answer, Call, Reply};
use crate::device::{
    CallKind, CallLedger, CallTally, Compute, Device, DeviceError, DeviceProps, MemoryInfo, Patterned, Patterns,
    PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage, StreamOrderedPools, Verified, VirtualMemory,
};
use oomph_base::{Address, EventId, Nanos, StreamId, Work};

/// Answers driver calls that come as values. Whoever does is a [`Device`].
///
/// What is not a driver call (books, clock, findings) keeps its own method, documented in [`Device`].
#[expect(missing_docs, reason = "the methods are those of the device")]
pub trait Responder: Send {
    /// Answers a driver call. The kind of reply must be the one that the call brings.
    fn respond(&mut self, call: Call) -> Answer;

    fn props(&self) -> &DeviceProps;
    fn held_bytes(&self) -> u64;
    fn growth_bytes(&self, bytes: u64) -> u64;
    fn free_bytes(&self) -> u64;
    fn overhead_bytes(&self) -> u64;
    fn stream_handle(&self, stream: StreamId) -> u64;
    fn now(&self) -> Nanos;
    fn elapse(&mut self, time: Nanos);
    fn ledger(&self) -> CallLedger;
    fn calls(&self) -> CallTally;
    fn verified(&mut self) -> Result<Verified, DeviceError>;
}

/// Answers a call and takes out of the reply what the caller wants.
macro_rules! ask {
    ($responder:expr, $call:expr, $reply:pat => $value:expr) => {{
        let call = $call;
        let kind = call.kind();
        match $responder.respond(call)? {
            $reply => Ok($value),
            other => Err(wrong_reply(kind, other)),
        }
    }};
}

#[cold]
fn wrong_reply(call: CallKind, reply: Reply) -> DeviceError {
    DeviceError::Driver { call, name: format!("answered with {reply:?}, which is no answer to this call") }
}

impl<R: Responder> Device for R {
    fn props(&self) -> &DeviceProps {
        Responder::props(self)
    }

    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        ask!(self, Call::Alloc { bytes }, Reply::Address(address) => address)
    }

    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        ask!(self, Call::Free { address }, Reply::Done => ())
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        ask!(self, Call::MemoryInfo, Reply::MemoryInfo(info) => info)
    }

    fn held_bytes(&self) -> u64 {
        Responder::held_bytes(self)
    }

    fn growth_bytes(&self, bytes: u64) -> u64 {
        Responder::growth_bytes(self, bytes)
    }

    fn free_bytes(&self) -> u64 {
        Responder::free_bytes(self)
    }

    fn overhead_bytes(&self) -> u64 {
        Responder::overhead_bytes(self)
    }

    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
        ask!(self, Call::StreamCreate { known_as }, Reply::Stream(stream, _) => stream)
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        Responder::stream_handle(self, stream)
    }

    fn stream_synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        ask!(self, Call::StreamSynchronize { stream }, Reply::Done => ())
    }

    fn stream_wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        ask!(self, Call::StreamWaitEvent { stream, event }, Reply::Done => ())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        ask!(self, Call::Synchronize, Reply::Done => ())
    }

    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        ask!(self, Call::EventCreate, Reply::Event(event) => event)
    }

    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        ask!(self, Call::EventRecord { event, stream }, Reply::Done => ())
    }

    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError> {
        ask!(self, Call::EventQuery { event }, Reply::Ready(ready) => ready)
    }

    fn event_synchronize(&mut self, event: EventId) -> Result<(), DeviceError> {
        ask!(self, Call::EventSynchronize { event }, Reply::Done => ())
    }

    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError> {
        ask!(self, Call::EventDestroy { event }, Reply::Done => ())
    }

    fn now(&self) -> Nanos {
        Responder::now(self)
    }

    fn elapse(&mut self, time: Nanos) {
        Responder::elapse(self, time);
    }

    fn ledger(&self) -> CallLedger {
        Responder::ledger(self)
    }

    fn calls(&self) -> CallTally {
        Responder::calls(self)
    }

    fn virtual_memory(&mut self) -> Option<&mut dyn VirtualMemory> {
        if Responder::props(self).capabilities.virtual_memory { Some(self) } else { None }
    }

    fn stream_ordered_pools(&mut self) -> Option<&mut dyn StreamOrderedPools> {
        if Responder::props(self).capabilities.stream_ordered_pools { Some(self) } else { None }
    }

    fn pinned_host(&mut self) -> Option<&mut dyn PinnedHost> {
        if Responder::props(self).capabilities.pinned_host { Some(self) } else { None }
    }

    fn compute(&mut self) -> Option<&mut dyn Compute> {
        if Responder::props(self).capabilities.compute { Some(self) } else { None }
    }

    fn patterns(&mut self) -> Option<&mut dyn Patterns> {
        if Responder::props(self).capabilities.patterns { Some(self) } else { None }
    }
}

impl<R: Responder> VirtualMemory for R {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        ask!(self, Call::Reserve { bytes }, Reply::Address(address) => address)
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        ask!(self, Call::AddressFree { address, bytes }, Reply::Done => ())
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        ask!(self, Call::Create { bytes }, Reply::Physical(physical) => physical)
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        ask!(self, Call::Release { physical }, Reply::Done => ())
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        ask!(self, Call::Map { address, bytes, physical }, Reply::Done => ())
    }

    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        ask!(self, Call::SetAccess { address, bytes }, Reply::Done => ())
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        ask!(self, Call::Unmap { address, bytes }, Reply::Done => ())
    }
}

impl<R: Responder> StreamOrderedPools for R {
    fn pool_create(&mut self, max_bytes: Option<u64>) -> Result<PoolId, DeviceError> {
        ask!(self, Call::PoolCreate { max_bytes }, Reply::Pool(pool) => pool)
    }

    fn pool_destroy(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        ask!(self, Call::PoolDestroy { pool }, Reply::Done => ())
    }

    fn pool_configure(&mut self, pool: PoolId, settings: PoolSettings) -> Result<(), DeviceError> {
        ask!(self, Call::PoolConfigure { pool, settings }, Reply::Done => ())
    }

    fn pool_trim(&mut self, pool: PoolId, keep_bytes: u64) -> Result<(), DeviceError> {
        ask!(self, Call::PoolTrim { pool, keep_bytes }, Reply::Done => ())
    }

    fn pool_usage(&mut self, pool: PoolId) -> Result<PoolUsage, DeviceError> {
        ask!(self, Call::PoolUsage { pool }, Reply::PoolUsage(usage) => usage)
    }

    fn alloc_async(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<Address, DeviceError> {
        ask!(self, Call::AllocAsync { pool, bytes, stream }, Reply::Address(address) => address)
    }

    fn free_async(&mut self, address: Address, stream: StreamId) -> Result<(), DeviceError> {
        ask!(self, Call::FreeAsync { address, stream }, Reply::Done => ())
    }
}

impl<R: Responder> PinnedHost for R {
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        ask!(self, Call::HostAlloc { bytes }, Reply::Address(address) => address)
    }

    fn host_free(&mut self, address: Address) -> Result<(), DeviceError> {
        ask!(self, Call::HostFree { address }, Reply::Done => ())
    }
}

impl<R: Responder> Compute for R {
    fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        ask!(self, Call::Launch { stream, work: *work, operands: operands.to_vec() }, Reply::Done => ())
    }
}

impl<R: Responder> Patterns for R {
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        ask!(self, Call::FillBlocks { stream, blocks: blocks.to_vec() }, Reply::Done => ())
    }

    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        ask!(self, Call::VerifyBlocks { stream, blocks: blocks.to_vec() }, Reply::Done => ())
    }

    fn verified(&mut self) -> Result<Verified, DeviceError> {
        Responder::verified(self)
    }
}

//! Driver calls as values ([`DriverCall`], [`DriverReply`]), and devices that answer calls in that
//! form.

use crate::device::{
    CallKind, Device, DeviceError, MemoryInfo, Patterned, PhysicalId, PoolId, PoolSettings, PoolUsage,
};
use oomph_base::{Address, EventId, StreamId, Work};

/// What a successful call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverReply {
    /// Success without a value.
    Done,
    /// Where the memory is.
    Address(Address),
    /// Free and total memory.
    MemoryInfo(MemoryInfo),
    /// A new stream and its driver handle.
    Stream(StreamId, u64),
    /// A new event.
    Event(EventId),
    /// Whether the work in front of an event is done.
    Ready(bool),
    /// Physical memory.
    Physical(PhysicalId),
    /// A new pool.
    Pool(PoolId),
    /// What a pool holds.
    PoolUsage(PoolUsage),
}

/// The result of a call.
pub type DriverAnswer = Result<DriverReply, DeviceError>;

/// A call and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverExchange {
    /// The call.
    pub call: DriverCall,
    /// Its answer.
    pub answer: DriverAnswer,
}

/// A value that some calls return, as a [`DriverReply`] and back.
pub(crate) trait ReplyValue: Sized {
    fn into_reply(self) -> DriverReply;
    fn from_reply(reply: DriverReply) -> Option<Self>;
}

macro_rules! reply_values {
    ($($value:ty: $pattern:pat => $inside:expr, $from:expr;)*) => {
        $(impl ReplyValue for $value {
            fn into_reply(self) -> DriverReply {
                let reply: fn($value) -> DriverReply = $from;
                reply(self)
            }
            fn from_reply(reply: DriverReply) -> Option<Self> {
                if let $pattern = reply { Some($inside) } else { None }
            }
        })*
    };
}

reply_values! {
    (): DriverReply::Done => (), |()| DriverReply::Done;
    Address: DriverReply::Address(address) => address, DriverReply::Address;
    MemoryInfo: DriverReply::MemoryInfo(info) => info, DriverReply::MemoryInfo;
    EventId: DriverReply::Event(event) => event, DriverReply::Event;
    bool: DriverReply::Ready(ready) => ready, DriverReply::Ready;
    PhysicalId: DriverReply::Physical(physical) => physical, DriverReply::Physical;
    PoolId: DriverReply::Pool(pool) => pool, DriverReply::Pool;
    PoolUsage: DriverReply::PoolUsage(usage) => usage, DriverReply::PoolUsage;
    (StreamId, u64): DriverReply::Stream(stream, handle) => (stream, handle), |(id, handle)| DriverReply::Stream(id, handle);
}

/// Takes the value out of a reply. A reply of another kind is an error of the script.
pub(crate) fn value_of<T: ReplyValue>(kind: CallKind, answer: DriverAnswer) -> Result<T, DeviceError> {
    let reply = answer?;
    T::from_reply(reply)
        .ok_or_else(|| DeviceError::Driver { call: kind, name: format!("{reply:?} does not answer this call") })
}

/// The table of driver calls: per ability, each method with its arguments and result, its
/// [`DriverCall`] and its [`CallKind`]. Left out are the calls whose method differs from the value:
/// creating streams and launching work.
macro_rules! with_driver_calls {
    ($macro:ident! $given:tt) => {
        $macro! { $given
            Device as itself: [
                alloc(bytes: u64) -> Address = Alloc, MemAlloc;
                free(address: Address) -> () = Free, MemFree;
                memory_info() -> MemoryInfo = MemoryInfo, MemGetInfo;
                stream_synchronize(stream: StreamId) -> () = StreamSynchronize, StreamSynchronize;
                stream_wait_event(stream: StreamId, event: EventId) -> () = StreamWaitEvent, StreamWaitEvent;
                synchronize() -> () = Synchronize, CtxSynchronize;
                event_create() -> EventId = EventCreate, EventCreate;
                event_record(event: EventId, stream: StreamId) -> () = EventRecord, EventRecord;
                event_query(event: EventId) -> bool = EventQuery, EventQuery;
                event_synchronize(event: EventId) -> () = EventSynchronize, EventSynchronize;
                event_destroy(event: EventId) -> () = EventDestroy, EventDestroy;
            ],
            VirtualMemory as virtual_memory: [
                reserve(bytes: u64) -> Address = Reserve, AddressReserve;
                address_free(address: Address, bytes: u64) -> () = AddressFree, AddressFree;
                create(bytes: u64) -> PhysicalId = Create, MemCreate;
                release(physical: PhysicalId) -> () = Release, MemRelease;
                map(address: Address, bytes: u64, physical: PhysicalId) -> () = Map, MemMap;
                set_access(address: Address, bytes: u64) -> () = SetAccess, MemSetAccess;
                allow_peer(ordinal: u32) -> () = AllowPeer, MemSetAccess;
                unmap(address: Address, bytes: u64) -> () = Unmap, MemUnmap;
            ],
            StreamOrderedPools as stream_ordered_pools: [
                pool_create(max_bytes: Option<u64>) -> PoolId = PoolCreate, PoolCreate;
                pool_destroy(pool: PoolId) -> () = PoolDestroy, PoolDestroy;
                pool_configure(pool: PoolId, settings: PoolSettings) -> () = PoolConfigure, PoolSetAttribute;
                pool_trim(pool: PoolId, keep_bytes: u64) -> () = PoolTrim, PoolTrim;
                pool_usage(pool: PoolId) -> PoolUsage = PoolUsage, PoolGetAttribute;
                alloc_async(pool: PoolId, bytes: u64, stream: StreamId) -> Address = AllocAsync, MemAllocAsync;
                free_async(address: Address, stream: StreamId) -> () = FreeAsync, MemFreeAsync;
            ],
            PinnedHost as pinned_host: [
                host_alloc(bytes: u64) -> Address = HostAlloc, HostAlloc;
                host_free(address: Address) -> () = HostFree, HostFree;
            ]
        }
    };
}
pub(crate) use with_driver_calls;

macro_rules! define_driver_call {
    ({} $($ability:ident as $reach:ident: [
        $($method:ident($($arg:ident: $type:ty),*) -> $value:ty = $variant:ident, $kind:ident;)*
    ]),*) => {
        /// A driver call with its arguments.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "variants and fields are those of the device's methods")]
        pub enum DriverCall {
            $($($variant { $($arg: $type),* },)*)*
            StreamCreate { known_as: u64 },
            Launch { stream: StreamId, work: Work, operands: Vec<(Address, u64)> },
            FillBlocks { stream: StreamId, blocks: Vec<Patterned> },
            VerifyBlocks { stream: StreamId, blocks: Vec<Patterned> },
        }

        impl DriverCall {
            /// The kind of the call.
            #[must_use]
            pub fn kind(&self) -> CallKind {
                match self {
                    $($(DriverCall::$variant { .. } => CallKind::$kind,)*)*
                    DriverCall::StreamCreate { .. } => CallKind::StreamCreate,
                    DriverCall::Launch { .. } | DriverCall::FillBlocks { .. } | DriverCall::VerifyBlocks { .. } => {
                        CallKind::Launch
                    }
                }
            }

            /// Makes the call.
            pub fn make<D: Device + ?Sized>(&self, device: &mut D) -> DriverAnswer {
                match *self {
                    $($(DriverCall::$variant { $($arg),* } => {
                        reach!(device.$reach).$method($($arg),*).map(ReplyValue::into_reply)
                    })*)*
                    DriverCall::StreamCreate { known_as } => {
                        let stream = device.stream_create(known_as)?;
                        Ok(DriverReply::Stream(stream, device.stream_handle(stream)))
                    }
                    DriverCall::Launch { stream, ref work, ref operands } => {
                        device.compute()?.launch(stream, work, operands).map(ReplyValue::into_reply)
                    }
                    DriverCall::FillBlocks { stream, ref blocks } => {
                        device.patterns()?.fill_blocks(stream, blocks).map(ReplyValue::into_reply)
                    }
                    DriverCall::VerifyBlocks { stream, ref blocks } => {
                        device.patterns()?.verify_blocks(stream, blocks).map(ReplyValue::into_reply)
                    }
                }
            }
        }
    };
}

/// The part of a device that has an ability.
macro_rules! reach {
    ($device:ident.itself) => {
        $device
    };
    ($device:ident.$require:ident) => {
        $device.$require()?
    };
}

with_driver_calls!(define_driver_call! {});

impl DriverCall {
    /// How much memory or address space the call requests; 0 for other calls.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        match *self {
            DriverCall::Alloc { bytes }
            | DriverCall::Reserve { bytes }
            | DriverCall::Create { bytes }
            | DriverCall::AllocAsync { bytes, .. }
            | DriverCall::HostAlloc { bytes } => bytes,
            _ => 0,
        }
    }
}

/// Implements [`Device`] and its abilities for a type with the method `respond(&mut self,
/// DriverCall) -> DriverAnswer`. The methods of `Device` that are not driver calls (counters,
/// clock), and [`Patterns::verified`], are written out.
macro_rules! device_from_responses {
    ({ $generics:tt $device:ty, $bounds:tt, { $($own:tt)* }, { $($verified:tt)* } }
    Device as itself: $calls:tt, $($ability:ident as $reach:ident: $more:tt),*) => {
        device_from_responses! { @impl $generics Device for $device, $bounds, $calls, {
            $($own)*

            fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
                let answer = self.respond(DriverCall::StreamCreate { known_as });
                value_of::<(StreamId, u64)>(CallKind::StreamCreate, answer).map(|(stream, _)| stream)
            }
            crate::device::abilities_by_props!();
        }}
        $(device_from_responses! { @impl $generics $ability for $device, $bounds, $more, {} })*
        device_from_responses! { @impl $generics Compute for $device, $bounds, [], {
            fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
                let call = DriverCall::Launch { stream, work: *work, operands: operands.to_vec() };
                value_of(CallKind::Launch, self.respond(call))
            }
        }}
        device_from_responses! { @impl $generics Patterns for $device, $bounds, [], {
            fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
                let call = DriverCall::FillBlocks { stream, blocks: blocks.to_vec() };
                value_of(CallKind::Launch, self.respond(call))
            }
            fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
                let call = DriverCall::VerifyBlocks { stream, blocks: blocks.to_vec() };
                value_of(CallKind::Launch, self.respond(call))
            }
            $($verified)*
        }}
    };
    (@impl [$($generics:tt)*] $ability:ident for $device:ty, [$($bounds:tt)*], [
        $($method:ident($($arg:ident: $type:ty),*) -> $value:ty = $variant:ident, $kind:ident;)*
    ], { $($own:tt)* }) => {
        impl<$($generics)*> $ability for $device where $($bounds)* {
            $(fn $method(&mut self, $($arg: $type),*) -> Result<$value, DeviceError> {
                value_of(CallKind::$kind, self.respond(DriverCall::$variant { $($arg),* }))
            })*
            $($own)*
        }
    };
}
pub(crate) use device_from_responses;

//! The raw memory of one GPU: the trait [`Device`], its optional abilities, and its
//! implementations.
//!
//! Strategies are written once against [`Device`], for the simulated GPU ([`sim`]) and a real one
//! ([`cuda`]). A cap on memory, injected faults and scripted answers are wrappers over any device
//! ([`wrap`]). This module knows no strategy and no trace.
//!
//! An optional ability is an object that the device's accessor returns, or an error. A
//! strategy names what it needs in [`requires`](crate::strategy::Strategy::requires); a case whose
//! device lacks it is skipped ([`Capabilities::check`]).

mod calibrate;
mod call;
mod capability;
mod card;
pub mod cuda;
mod mapping;
mod pattern;
pub mod sim;
mod spec;
pub mod wrap {
    //! Behaviour over any device, below the strategy: a cap on memory ([`LimitedDevice`]), injected
    //! faults ([`FaultyDevice`]), and answers from a script ([`ScriptedDevice`]). A driver call is a
    //! value here ([`DriverCall`]).

    mod driver_call;
    mod faults;
    mod intercept;
    mod scripted;
    #[cfg(any(test, feature = "testing"))]
    pub mod stand_in;

    pub use driver_call::{DriverAnswer, DriverCall, DriverExchange, DriverReply};
    pub(crate) use driver_call::{ReplyValue, device_from_responses, value_of, with_driver_calls};
    pub use faults::{CallFailure, FaultInjector, FaultPlan, FaultSpec, FaultSpecError, FaultyDevice};
    pub use intercept::{InterceptedDevice, Interceptor, LimitedDevice, MemoryCap, capped};
    pub use scripted::{ScriptMismatch, ScriptOrder, ScriptedDevice};
}

pub use calibrate::{Calibration, ProductSupport, calibrate};
pub use call::{CallKind, CallLedger, CallTally, DeviceError};
pub use capability::{
    Capabilities, Compute, MissingCapabilities, Patterns, PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage,
    StreamOrderedPools, VirtualMemory,
};
pub use card::{Card, CardFacts};
pub use pattern::{Damage, LONGEST_PATTERN_BYTES, PatternPlace, Patterned, Verified, WORD_BYTES};
pub use spec::{DeviceFleet, DeviceSpec, DeviceSpecError};

use oomph_base::{Address, EventId, Nanos, StreamId};

/// The properties of a device. Fixed for its lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProps {
    /// The vendor's name.
    pub name: String,
    /// Its number among the GPUs that the driver shows this process; 0 for a simulated one.
    pub ordinal: u32,
    /// `totalGlobalMem`: the figure from which PyTorch computes memory fractions and address
    /// ranges.
    pub total_bytes: u64,
    /// Physical memory comes in pages of this size.
    pub page_bytes: u64,
    /// Smallest unit of physical memory for [`VirtualMemory`], and what every size there must be a
    /// multiple of.
    pub granularity_bytes: u64,
    /// Taken by the driver's context before the first allocation.
    pub context_bytes: u64,
    /// The optional abilities.
    pub capabilities: Capabilities,
    /// The clock that [`Device::now`] reads.
    pub clock: DeviceClock,
}

/// The clock of a device. The two are never mixed in one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClock {
    /// Calibrated costs on a simulated clock: deterministic.
    Virtual,
    /// A real clock.
    Wall,
}

/// Free and total memory as the driver reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free bytes.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// Raw memory, streams and events of one GPU.
///
/// Every call may fail, because any driver call may. A failed call changes nothing. No ability has
/// a default, so that a wrapper cannot forget to pass it on.
pub trait Device: Send {
    /// The properties of the device.
    fn props(&self) -> &DeviceProps;

    /// `cuMemAlloc`.
    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError>;
    /// `cuMemFree`. Waits for the work of all streams, as the real one does.
    fn free(&mut self, address: Address) -> Result<(), DeviceError>;
    /// `cuMemGetInfo`.
    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError>;
    /// Physical bytes held through this handle in whole pages, without the context and loaded
    /// libraries. Read from counters: no driver call, no cost.
    fn held_bytes(&self) -> u64;
    /// Physical bytes that an `alloc` of this size would add to `held_bytes`, from counters.
    fn growth_bytes(&self, bytes: u64) -> u64;
    /// Free memory from counters: exact on a simulated device. On a real one, that of the last
    /// [`memory_info`](Device::memory_info) or failed request, less what this handle has taken since: other processes are not seen.
    fn free_bytes(&self) -> u64;
    /// Bytes of the context and of the libraries loaded so far: what `nvidia-smi` shows beyond
    /// `held_bytes`.
    fn overhead_bytes(&self) -> u64;

    /// Makes a stream and returns its number; stream 0 always exists. Numbers are given in order. A
    /// simulated device uses `known_as`, the handle of the stream in a traced program; a real one
    /// does so only as a guest in that program ([`cuda::open_as_guest`]).
    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError>;
    /// The driver's handle of a stream, constant for its life. PyTorch orders streams by it, so its
    /// model must too. 0 for the default stream, and for one that does not exist.
    fn stream_handle(&self, stream: StreamId) -> u64;
    /// Waits for all work of one stream.
    fn stream_synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError>;
    /// Makes later work of `stream` wait for `event`.
    fn stream_wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError>;
    /// Waits for all work of all streams.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Makes an event. Numbers are recycled after [`event_destroy`](Device::event_destroy).
    fn event_create(&mut self) -> Result<EventId, DeviceError>;
    /// Puts the event behind the work queued on `stream` so far. May be called again on the same
    /// event.
    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError>;
    /// Whether the work in front of the event is done.
    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError>;
    /// Waits until the work in front of the event is done.
    fn event_synchronize(&mut self, event: EventId) -> Result<(), DeviceError>;
    /// Gives the event back.
    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError>;

    /// The current time on this device's clock.
    fn now(&self) -> Nanos;
    /// The host does something else for a while. A virtual clock advances; a real one has already
    /// done so.
    fn elapse(&mut self, time: Nanos);
    /// Driver calls so far, by kind.
    fn ledger(&self) -> CallLedger;
    /// All driver calls so far: cheap enough to be read around every operation.
    fn calls(&self) -> CallTally;

    /// Address space and physical memory handled separately, if the device can.
    fn virtual_memory(&mut self) -> Result<&mut dyn VirtualMemory, DeviceError>;
    /// The driver's own stream-ordered pools, if the device has them.
    fn stream_ordered_pools(&mut self) -> Result<&mut dyn StreamOrderedPools, DeviceError>;
    /// Page-locked host memory, if the device can.
    fn pinned_host(&mut self) -> Result<&mut dyn PinnedHost, DeviceError>;
    /// Work on streams, run or simulated, if the device can.
    fn compute(&mut self) -> Result<&mut dyn Compute, DeviceError>;
    /// Contents that are written and compared on streams, if the device can.
    fn patterns(&mut self) -> Result<&mut dyn Patterns, DeviceError>;
}

/// The accessors of the optional abilities, for a device that implements all of their traits and
/// says in its properties which of them it has.
macro_rules! abilities_by_props {
    ($($accessor:ident: $ability:ident = $capability:ident,)+) => {
        $(fn $accessor(&mut self) -> Result<&mut dyn $crate::device::$ability, DeviceError> {
            $crate::device::Capabilities::$capability.check(self.props())?;
            Ok(self)
        })+
    };
    () => {
        $crate::device::abilities_by_props! {
            virtual_memory: VirtualMemory = VIRTUAL_MEMORY,
            stream_ordered_pools: StreamOrderedPools = STREAM_ORDERED_POOLS,
            pinned_host: PinnedHost = PINNED_HOST,
            compute: Compute = COMPUTE,
            patterns: Patterns = PATTERNS,
        }
    };
}
pub(crate) use abilities_by_props;

impl dyn Device + '_ {
    /// Whether the stream exists.
    #[must_use]
    pub fn has_stream(&self, stream: StreamId) -> bool {
        stream == StreamId::DEFAULT || self.stream_handle(stream) != 0
    }
}

/// The default cap on physical memory: nine tenths of what is free on a real device, whose last
/// bytes belong to the driver and to other programs; none on a simulated one.
#[must_use]
pub fn default_limit(device: &dyn Device) -> Option<u64> {
    match device.props().clock {
        DeviceClock::Virtual => None,
        DeviceClock::Wall => Some(device.free_bytes() / 10 * 9),
    }
}

//! Allocation policies over a device: the trait, the registry, one file or folder per strategy.
//!
//! A strategy sees requests one at a time and never a trace, so it cannot look ahead. It holds no
//! device: device and event sink come with every call ([`Context`]). Its state can therefore be
//! cloned, and one policy runs on the simulated and on the real device.
//!
//! A new strategy is one file, its `mod` line here and one line in [`STRATEGIES`]. It then appears
//! in `list`, inherits the conformance and property tests, and runs in every suite with `strategies
//! = "all"`.

pub mod async_pool;
mod bfc;
mod buddy;
pub mod caching;
pub mod conformance;
mod cub;
pub mod deferred;
pub mod direct;
#[cfg(any(test, feature = "testing"))]
pub mod flawed;
mod leftovers;
pub mod null;
mod oomph;
pub(crate) mod parameters;
mod planned;
mod pooled;
#[cfg(test)]
mod properties;
mod registry;
mod rmm;
mod slab;
pub mod slots;
mod stats;
mod stitch;
#[cfg(test)]
/// The devices that tests of strategies run on.
pub(crate) mod test_device {
    use std::sync::LazyLock;

    use crate::device::{
        Device,
        sim::{Profile, SimConfig, SimDevice},
    };

    /// A simulated device on which this many bytes can be allocated.
    pub(crate) fn simulated(bytes: u64) -> Box<dyn Device> {
        // Its table of costs is read from text, which would be most of a short test's time.
        static PROFILE: LazyLock<Profile> = LazyLock::new(Profile::h200);
        let profile = PROFILE.clone();
        let capacity_bytes = Some(profile.context_bytes + bytes);
        Box::new(SimDevice::new(SimConfig { profile, capacity_bytes }).unwrap())
    }
}
mod tlsf;
pub mod wrap;

pub use oomph_base::{BlockState, BlockView, Layout, Parameter, SegmentView};
pub use oomph_pytorch::InitialLayout;
pub use parameters::{Built, Setup, SpecError, StrategyEntry, StrategySpec};
pub use registry::STRATEGIES;
pub use stats::{OffBooks, Stats, Usage};

use crate::device::{Capabilities, Device, DeviceError};
use oomph_base::{Address, SiteId, StreamId, ThreadId};

/// An allocation policy.
///
/// Every strategy keeps these rules, which the conformance suite checks:
/// - Live blocks never overlap, are at least as large as the request and aligned to [`ALIGNMENT`].
/// - `allocated <= reserved <= ` what the device holds, and blocks sum to segments.
/// - A failing driver call loses nothing and leaves the strategy usable: a failed alloc hands out
///   nothing, the block of a failed free is still live, and any call may be repeated.
/// - [`used_on`](Strategy::used_on) delays reuse until that stream has passed the free. The
///   strategy does the waiting; replay never delays a free. There is one queue per stream, first in
///   first out. Queues are polled in ascending [`StreamId`], at the start of an alloc or when
///   memory is released.
/// - After [`close`](Strategy::close) the device holds nothing for the strategy.
/// - The same calls and device answers lead to the same decisions.
pub trait Strategy: Send {
    /// Serves a request, or reports that memory has run out. A request of zero bytes is an error.
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError>;

    /// Frees a block, which is identified by address, slot and generation; the size in the handle
    /// is ignored, because callers by pointer do not know it. Only stream-ordered strategies use
    /// the caller's stream and thread.
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError>;

    /// The block is also used on `stream` (PyTorch's `record_stream`).
    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError>;

    /// Settings, pools and steps. Strategies ignore commands that do not concern them.
    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError>;

    /// Optional ability: keeps the memory of private pools apart, as [`Control::PoolBegin`] demands. For a strategy without
    /// it, [`PoolArenas`](wrap::PoolArenas) does so.
    fn serves_pools(&self) -> bool;

    /// Optional ability: continues from a layout that another allocator left, and returns the
    /// blocks that are not free in it, in its order. Called at most once, before any request. A
    /// strategy that lacks the ability, or that would not have produced this layout, returns `None`
    /// and is unchanged. Wrappers forward the call.
    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError>;

    /// Releases cached memory to the device (PyTorch's `empty_cache`).
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// Whether [`trim`](Strategy::trim) releases all memory that is not in use. A model of an allocator without such a call
    /// keeps it. Wrappers forward the call.
    fn trims(&self) -> bool {
        true
    }

    /// Releases everything, including live and pending blocks. Afterwards the strategy is as new.
    /// The counters are reset too, so read them before.
    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// The counters. They are always up to date; reading them takes constant time.
    fn stats(&self) -> Stats;

    /// The largest rounded request of this stream that reserved memory can serve; `None` if the
    /// strategy cannot know.
    fn largest_free(&self, stream: StreamId) -> Option<u64>;

    /// Every segment with its blocks, in address order; `None` if the strategy cannot know. Slow:
    /// for peaks, OOMs and tests.
    fn layout(&self) -> Option<Layout>;

    /// Counters of this strategy, by name.
    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// What the allocator did wrong, where only the code around it can see that: a plugin is known
    /// by its calls alone.
    fn flaws(&self) -> Vec<wrap::ConformanceFinding> {
        Vec::new()
    }

    /// Makes `calls` requests and frees from each of `threads` threads at once; `None` if the
    /// allocator cannot be called from several threads.
    fn call_from_threads(
        &mut self,
        _cx: &mut Context<'_>,
        _threads: u64,
        _calls: u64,
    ) -> Result<Option<ThreadedCalls>, StrategyError> {
        Ok(None)
    }

    /// The abilities that the device must have.
    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    /// A copy of the state, so that a step can be tried and rolled back; `None` if a part of the
    /// state cannot be copied (in a driver, in a plugin).
    fn fork(&self) -> Option<Box<dyn Strategy>>;
}

/// The methods of a [`Strategy`] that ignores commands, cannot resume, and can be copied whole. Its
/// statistics are its field `stats`.
macro_rules! plain_state {
    () => {
        fn control(
            &mut self,
            _: &mut $crate::strategy::Context<'_>,
            _: &$crate::strategy::Control<'_>,
        ) -> Result<(), $crate::strategy::StrategyError> {
            Ok(())
        }

        fn serves_pools(&self) -> bool {
            false
        }

        fn resume_from(
            &mut self,
            _: &mut $crate::strategy::Context<'_>,
            _: &$crate::strategy::InitialLayout,
        ) -> Result<Option<Vec<$crate::strategy::Block>>, $crate::strategy::StrategyError> {
            Ok(None)
        }

        fn stats(&self) -> $crate::strategy::Stats {
            self.stats
        }

        fn fork(&self) -> Option<Box<dyn $crate::strategy::Strategy>> {
            Some(Box::new(self.clone()))
        }
    };
}
pub(crate) use plain_state;

/// Every block starts at a multiple of this, as CUDA guarantees for `cuMemAlloc`.
pub const ALIGNMENT: u64 = 256;

/// The device and the event sink of one call.
pub struct Context<'a> {
    /// The device that memory comes from.
    pub device: &'a mut dyn Device,
    /// Receives the strategy's events.
    pub sink: &'a mut dyn EventSink,
}

impl Context<'_> {
    /// Refuses a stream that the device does not have: memory of such a stream could never be
    /// waited for. For slow paths, where a stream is seen for the first time.
    pub(crate) fn expect_stream(&self, stream: StreamId) -> Result<(), StrategyError> {
        if self.device.has_stream(stream) { Ok(()) } else { Err(StrategyError::UnknownStream(stream)) }
    }

    /// Counts and reports a failed request.
    pub(crate) fn out_of_memory(&mut self, stats: &mut Stats, stream: StreamId, shortage: Shortage) -> Attempt {
        let Shortage { rounded, device_free, .. } = shortage;
        self.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free });
        stats.ooms += 1;
        Attempt::OutOfMemory(shortage)
    }
}

/// A driver's answer, or `None` where memory ran out.
pub(crate) fn unless_out_of_memory<T>(answer: Result<T, DeviceError>) -> Result<Option<T>, DeviceError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The part of a device that a program allows itself ([`Control::Fraction`]).
pub(crate) fn checked_fraction(fraction: f64) -> Result<f64, StrategyError> {
    if (0.0..=1.0).contains(&fraction) {
        Ok(fraction)
    } else {
        Err(StrategyError::Refused(format!("memory fraction {fraction} is not between 0 and 1")))
    }
}

/// One request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The size; never zero.
    pub bytes: u64,
    /// The stream that will use the block.
    pub stream: StreamId,
    /// The host thread.
    pub thread: ThreadId,
    /// The call site.
    pub site: SiteId,
}

/// The caller of a free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// The stream on which the free is ordered.
    pub stream: StreamId,
    /// The host thread.
    pub thread: ThreadId,
}

/// A block that was handed out: the handle with which it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The start.
    pub address: Address,
    /// The size: the request, rounded by the strategy.
    pub size: u64,
    /// The strategy's index of the block.
    pub slot: u32,
    /// Distinguishes this block from earlier ones in the slot, so that stale handles are detected.
    pub generation: u32,
}

/// How an allocation ended. Running out of memory is a result, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// A block, and how it was found.
    Served(Block, Outcome),
    /// No block.
    OutOfMemory(Shortage),
}

/// How a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A cached block, whole.
    Hit,
    /// Split from a larger cached block, or combined from several.
    Split,
    /// New memory from the device.
    NewSegment,
    /// New memory, after cached memory was released.
    ReleaseAndRetry,
}

/// Why a request ran out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The request, rounded by the strategy.
    pub rounded: u64,
    /// The size that the strategy last requested from the device, or compared with its limit.
    pub asked: u64,
    /// Who refused.
    pub refused_by: Refusal,
    /// Free memory of the device, if the strategy asked for it (PyTorch's does).
    pub device_free: Option<u64>,
}

impl Shortage {
    /// The device refused exactly what the request needs.
    pub(crate) const fn of_device(rounded: u64) -> Shortage {
        Shortage { rounded, asked: rounded, refused_by: Refusal::Device, device_free: None }
    }

    /// The strategy never serves requests of this size.
    pub(crate) const fn of_size(bytes: u64) -> Shortage {
        Shortage { refused_by: Refusal::Size, ..Shortage::of_device(bytes) }
    }
}

/// A command to a strategy other than alloc and free.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Control<'a> {
    /// A step of the workload begins.
    StepBegins(u32),
    /// New settings, in the strategy's own syntax (PyTorch's `set_allocator_settings`).
    Configure(&'a str),
    /// PyTorch's `set_per_process_memory_fraction`.
    Fraction(f64),
    /// Requests of this stream, or of all streams, go to a private pool from now on.
    PoolBegin {
        /// The pool.
        pool: (u64, u64),
        /// The stream; `None` for all streams.
        stream: Option<StreamId>,
    },
    /// Ends the routing to the pool.
    PoolEnd {
        /// The pool.
        pool: (u64, u64),
    },
    /// The capture of a CUDA graph begins. Up to PyTorch 2.12 the allocator takes every [`PoolBegin`](Control::PoolBegin)
    /// for one.
    CaptureBegin,
    /// The capture of a CUDA graph ends.
    CaptureEnd,
    /// Whether all memory stays where it is, free memory too: it is the memory of a captured graph, which writes there
    /// whenever it is replayed. An instance that serves one pool of graphs gets this.
    StayInPlace(bool),
    /// Memory runs out during a capture: give cached memory back, but none that these streams used. A stream that is being
    /// captured cannot be waited for.
    TrimInCapture {
        /// The streams that are being captured.
        capturing: &'a [StreamId],
    },
    /// Creates a pool, or adds a user to it.
    PoolRetain {
        /// The pool.
        pool: (u64, u64),
        /// Whether requests of the default pool may use its cached blocks before they fail.
        use_on_oom: bool,
    },
    /// Removes a user from a pool. Without users, its memory may be released.
    PoolRelease {
        /// The pool.
        pool: (u64, u64),
    },
    /// Releases the cached memory of a pool without users, as the deletion of a `MemPool` does.
    PoolTrim {
        /// The pool.
        pool: (u64, u64),
    },
}

/// Who refused memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The device had no more.
    Device,
    /// The strategy's own limit (PyTorch's memory fraction, a pool's maximum).
    Limit,
    /// The strategy cannot serve a request of this size. It is not counted among the
    /// [`ooms`](Stats::ooms) and causes no event.
    Size,
}

/// The result of a free. A free that completes at once completes before anything else that happens
/// during the call, and causes no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// The block can be reused at once.
    Now,
    /// The block waits for other streams; [`StrategyEvent::FreeCompleted`] follows.
    Later,
}

/// What calls from several threads at once came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadedCalls {
    /// Requests that were served.
    pub served: u64,
    /// A block that overlapped another live one.
    pub overlap: Option<Address>,
}

/// An event on a slow path of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StrategyEvent {
    /// Memory was taken from the device.
    SegmentAlloc {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// The stream that it belongs to.
        stream: StreamId,
    },
    /// Memory is about to be released to the device.
    SegmentFree {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// The stream that it belonged to.
        stream: StreamId,
    },
    /// Physical memory was mapped into a range.
    SegmentMap {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// The stream that it belongs to.
        stream: StreamId,
    },
    /// Physical memory was unmapped from a range.
    SegmentUnmap {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// The stream that it belonged to.
        stream: StreamId,
    },
    /// A delayed free ([`Freed::Later`]) has completed.
    FreeCompleted {
        /// Start of the block.
        address: Address,
        /// Bytes that had been requested.
        requested: u64,
        /// The block's stream.
        stream: StreamId,
    },
    /// Cached memory was released and the request is retried.
    Retry {
        /// The rounded request.
        rounded: u64,
    },
    /// The request failed.
    OutOfMemory {
        /// The rounded request.
        rounded: u64,
        /// The stream.
        stream: StreamId,
        /// Free memory of the device, if the strategy asked for it.
        device_free: Option<u64>,
    },
}

/// Receives [`StrategyEvent`]s.
pub trait EventSink {
    /// Called at the moment the event happens, in order. By default the event is ignored.
    fn event(&mut self, _event: StrategyEvent) {}
}

/// A sink that drops all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl EventSink for Silent {}

/// A sink that keeps all events.
impl EventSink for Vec<StrategyEvent> {
    fn event(&mut self, event: StrategyEvent) {
        self.push(event);
    }
}

/// Why a call failed. Out of memory is a result, not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// A driver call failed for another reason than memory. The strategy is still usable.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The handle belongs to no live block: freed twice, or never handed out.
    #[error("no live block {address} (slot {slot}): freed twice, or never handed out")]
    UnknownBlock {
        /// The address in the handle.
        address: Address,
        /// The slot in the handle.
        slot: u32,
    },
    /// The device has no such stream.
    #[error("there is no stream {0}")]
    UnknownStream(StreamId),
    /// A request of zero bytes.
    #[error("a request for zero bytes")]
    ZeroBytes,
    /// A command that the strategy refuses.
    #[error("{0}")]
    Refused(String),
    /// The process in which the allocator runs has died. Every later call returns this error.
    #[error("{0}")]
    Died(String),
    /// The allocator did not return from a call, and its process was ended. Every later call
    /// returns this error.
    #[error("{0}")]
    Hung(String),
}

impl StrategyError {
    /// Whether the device is lost to this process: see [`DeviceError::loses_context`].
    #[must_use]
    pub fn loses_context(&self) -> bool {
        matches!(self, StrategyError::Device(error) if error.loses_context())
    }
}

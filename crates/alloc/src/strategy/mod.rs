//! Allocation policies over a device: the trait, the registry, one file a strategy.
//!
//! A strategy sees requests one at a time and never a trace, so it cannot look ahead. It holds no device: device
//! and event sink come with every call ([`Context`]), which makes its state cloneable and lets one policy run on
//! the simulated and on the real device alike.
//!
//! Adding a strategy is one file and one line in [`STRATEGIES`]: it then appears in `list` and `--help`, inherits
//! the conformance and property tests, and runs in every suite that says `strategies = "all"`.

pub mod async_pool;
mod bfc;
mod buddy;
pub mod by_address;
pub mod caching;
pub mod conformance;
mod cub;
pub mod deferred;
pub mod direct;
#[cfg(any(test, feature = "testing"))]
pub mod flawed;
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
mod stream_uses;
#[cfg(test)]
mod test_device;
mod tlsf;
pub mod wrap;

pub use oomph_base::{BlockState, BlockView, Layout, SegmentView};
pub use oomph_pytorch::InitialLayout;
pub use registry::{Built, Parameter, STRATEGIES, Setup, SpecError, StrategyEntry, StrategySpec};
pub use stats::{OffBooks, Stats, Usage};

use crate::device::{Capabilities, Device, DeviceError};
use oomph_base::{Address, SiteId, StreamId, ThreadId};

/// An allocation policy.
///
/// The rules that every strategy keeps, and that the conformance suite checks:
/// - live blocks never overlap, are at least as large as the request and aligned to [`ALIGNMENT`];
/// - `allocated <= reserved <= ` what the device holds, and blocks sum to segments;
/// - a failing driver call loses nothing and leaves the strategy usable: an alloc that fails hands out nothing, the
///   block of a failed free is still live, and any call may be made again;
/// - [`used_on`](Strategy::used_on) delays reuse until that stream has got past the free, however it is done: the
///   strategy owns the waiting, replay never delays a free. One queue a stream, first in first out; queues are polled
///   in ascending [`StreamId`], and only at the start of an alloc, or when memory is released;
/// - after [`close`](Strategy::close) the device holds nothing on the strategy's behalf;
/// - same calls, same device answers, same decisions.
pub trait Strategy: Send {
    /// Serves a request, or says that memory has run out. A zero-byte request is refused as misuse.
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError>;

    /// Takes a block back. It is known by address, slot and generation: whoever was given only a pointer cannot say how
    /// large the block is. The caller's stream and thread matter to stream-ordered strategies only.
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError>;

    /// The block is also used on `stream` (PyTorch's `record_stream`).
    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError>;

    /// Something other than memory traffic: settings, pools, steps. Strategies ignore what does not concern them.
    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError>;

    /// Optional ability: continues from a layout that another allocator left, and returns the blocks that are not free
    /// in it, in its order. Called at most once, before any request. A strategy that lacks the ability, or that would
    /// not have produced this layout, returns `None` and is unchanged. Wrappers forward the call.
    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError>;

    /// Gives cached memory back to the device (PyTorch's `empty_cache`).
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// Gives everything back, live and waiting blocks included. Afterwards the strategy is as new, its books too: read
    /// them first.
    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// The books, kept up to date at all times: reading them is constant time.
    fn stats(&self) -> Stats;

    /// The largest request, rounded as the strategy rounds blocks, that could be served from reserved memory alone,
    /// for this stream; `None` where the strategy cannot know.
    fn largest_free(&self, stream: StreamId) -> Option<u64>;

    /// Every segment with its blocks, in address order; `None` where the strategy cannot know. Slow: for peaks, OOMs
    /// and tests.
    fn layout(&self) -> Option<Layout>;

    /// Counters of the strategy's own, by name.
    fn details(&self) -> Vec<(&'static str, u64)>;

    /// What the device must be able to do.
    fn requires(&self) -> Capabilities;

    /// A copy of the whole state, so that a step can be tried and rolled back; `None` where part of the state is out
    /// of reach (in a driver, in a plugin).
    fn fork(&self) -> Option<Box<dyn Strategy>>;
}

/// Every block starts at a multiple of this: what CUDA promises for `cuMemAlloc`.
pub const ALIGNMENT: u64 = 256;

/// What a strategy works with during one call.
pub struct Context<'a> {
    /// Where memory comes from.
    pub device: &'a mut dyn Device,
    /// Who is told about what happens inside.
    pub sink: &'a mut dyn EventSink,
}

impl Context<'_> {
    /// Refuses a stream that the device has not got: memory set aside for it could never be waited for, and would be in
    /// the way of everybody else's. For slow paths, where a stream is seen for the first time.
    pub(crate) fn expect_stream(&self, stream: StreamId) -> Result<(), StrategyError> {
        if self.device.has_stream(stream) { Ok(()) } else { Err(StrategyError::UnknownStream(stream)) }
    }

    /// Counts and reports a request that failed for good.
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

/// One request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How much; never zero.
    pub bytes: u64,
    /// On which stream it will be used.
    pub stream: StreamId,
    /// Which host thread asks.
    pub thread: ThreadId,
    /// From where in the program.
    pub site: SiteId,
}

/// Who gives a block back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// The stream on which the free is ordered.
    pub stream: StreamId,
    /// The host thread.
    pub thread: ThreadId,
}

/// A block handed out, and the handle with which it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it starts.
    pub address: Address,
    /// How large it is: the request, rounded as the strategy does.
    pub size: u64,
    /// The strategy's own index of the block.
    pub slot: u32,
    /// Tells this tenant of the slot from earlier ones, so that a stale handle is caught.
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
    /// Cut from a larger cached block, or pieced together from several.
    Split,
    /// New memory from the device.
    NewSegment,
    /// New memory, after cached memory was given back to make room.
    ReleaseAndRetry,
}

/// What was missing when memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The request, rounded as the strategy rounds blocks.
    pub rounded: u64,
    /// What the strategy last asked of the device (or of its limit) for this request.
    pub asked: u64,
    /// Who refused.
    pub refused_by: Refusal,
    /// What the device said was free, if the strategy asked it (PyTorch's does).
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

/// What a strategy can be told beside allocs and frees.
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
        /// Which pool.
        pool: (u64, u64),
        /// Whose requests; `None` for all.
        stream: Option<StreamId>,
    },
    /// They no longer do.
    PoolEnd {
        /// Which pool.
        pool: (u64, u64),
    },
    /// Makes a pool, or adds a user to it.
    PoolRetain {
        /// Which pool.
        pool: (u64, u64),
        /// Whether requests of the default pool may use its cached blocks before they fail.
        use_on_oom: bool,
    },
    /// Takes a user from a pool; without users its memory may go back to the device.
    PoolRelease {
        /// Which pool.
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
    /// The strategy cannot serve a request of this size at all. It is turned away at the door: not counted among the
    /// [`ooms`](Stats::ooms), and no event tells of it.
    Size,
}

/// What became of a freed block. A free that is done at once counts as done before anything else that happens during
/// the call, and sends no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// It can be reused at once.
    Now,
    /// It waits for other streams; [`StrategyEvent::FreeCompleted`] will tell.
    Later,
}

/// What happens inside a strategy on its slow paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StrategyEvent {
    /// Memory was taken from the device.
    SegmentAlloc {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// Whose it is.
        stream: StreamId,
    },
    /// Memory is about to go back to the device.
    SegmentFree {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// Whose it was.
        stream: StreamId,
    },
    /// Physical memory was mapped into a range.
    SegmentMap {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// Whose it is.
        stream: StreamId,
    },
    /// Physical memory was unmapped from a range.
    SegmentUnmap {
        /// Start.
        address: Address,
        /// Size.
        bytes: u64,
        /// Whose it was.
        stream: StreamId,
    },
    /// A free that had to wait ([`Freed::Later`]) is done.
    FreeCompleted {
        /// Start of the block.
        address: Address,
        /// Bytes that had been requested.
        requested: u64,
        /// The block's stream.
        stream: StreamId,
    },
    /// Cached memory was given back and the request is tried again.
    Retry {
        /// The rounded request.
        rounded: u64,
    },
    /// The request failed for good.
    OutOfMemory {
        /// The rounded request.
        rounded: u64,
        /// On which stream.
        stream: StreamId,
        /// What the device said was free, if the strategy asked it.
        device_free: Option<u64>,
    },
}

/// Who is told about [`StrategyEvent`]s.
pub trait EventSink {
    /// Called at the moment the event happens, in order. By default the event is ignored.
    fn event(&mut self, _event: StrategyEvent) {}
}

/// A sink that forgets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl EventSink for Silent {}

/// A sink that keeps everything.
impl EventSink for Vec<StrategyEvent> {
    fn event(&mut self, event: StrategyEvent) {
        self.push(event);
    }
}

/// Why a call could not be carried out. Out of memory is not among the reasons.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// A driver call failed for another reason than memory. The strategy's state is still sound.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The handle belongs to no live block: freed twice, or never handed out.
    #[error("no live block {address} (slot {slot}): freed twice, or never handed out")]
    UnknownBlock {
        /// What the caller took for a block.
        address: Address,
        /// Its slot.
        slot: u32,
    },
    /// The device has no such stream.
    #[error("there is no stream {0}")]
    UnknownStream(StreamId),
    /// A request for nothing.
    #[error("a request for zero bytes")]
    ZeroBytes,
    /// A command that the strategy understands and refuses.
    #[error("{0}")]
    Refused(String),
    /// The allocator runs in a process of its own, and that has died. Every later call says the same.
    #[error("{0}")]
    Died(String),
    /// The allocator did not return from a call, and its process was ended. Every later call says the same.
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

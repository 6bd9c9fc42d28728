//! Allocation policies over a device: the trait, the registry, one file a strategy.
//!
//! A strategy sees requests one at a time and never a trace, so it cannot look ahead. It holds no device: device
//! and event sink come with every call ([`Context`]), which makes its state cloneable and lets one policy run on
//! the simulated and on the real device alike.
//!
//! Adding a strategy is one file and one line in [`STRATEGIES`]: it then appears in `list` and `--help`, inherits
//! the conformance and property tests, and runs in every suite that says `strategies = "all"`.

mod registry;
mod stats;

pub use registry::{Parameter, STRATEGIES, Setup, SpecError, StrategyEntry, StrategySpec};
pub use stats::{BlockState, BlockView, Layout, SegmentView, Stats, Usage};

use crate::{
    device::{Capabilities, Device, DeviceError},
    unit::{Address, SiteId, StreamId, ThreadId},
};

/// An allocation policy.
///
/// The rules that every strategy keeps, and that the conformance suite checks:
/// - live blocks never overlap, are at least as large as the request and aligned to [`ALIGNMENT`];
/// - `allocated <= reserved <= ` what the device holds, and blocks sum to segments;
/// - a failing driver call loses nothing and leaves the strategy usable;
/// - [`used_on`](Strategy::used_on) delays reuse until that stream has got past the free, however it is done: the
///   strategy owns the waiting, replay never delays a free;
/// - after [`close`](Strategy::close) the device holds nothing on the strategy's behalf;
/// - same calls, same device answers, same decisions.
pub trait Strategy: Send {
    /// Serves a request, or says that memory has run out. A zero-byte request is refused as misuse.
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError>;

    /// Takes a block back. The caller's stream and thread matter to stream-ordered strategies only.
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError>;

    /// The block is also used on `stream` (PyTorch's `record_stream`).
    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError>;

    /// Gives cached memory back to the device (PyTorch's `empty_cache`).
    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// Gives everything back, live blocks included. Afterwards the strategy is as new.
    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError>;

    /// The books, kept up to date at all times: reading them is constant time.
    fn stats(&self) -> &Stats;

    /// The largest request that could be served from reserved memory alone, for this stream.
    fn largest_free(&self, stream: StreamId) -> u64;

    /// Every segment with its blocks, in address order. Slow; for peaks, OOMs and tests.
    fn layout(&self) -> Layout;

    /// Counters of the strategy's own, by name.
    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// What the device must be able to do.
    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    /// A copy of the whole state, so that a step can be tried and rolled back.
    fn fork(&self) -> Box<dyn Strategy>;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A cached block, whole.
    Hit,
    /// Cut from a larger cached block.
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
}

/// Who refused memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The device had no more.
    Device,
    /// The strategy's own limit (PyTorch's memory fraction, a pool's maximum).
    Limit,
    /// The strategy cannot serve a request of this size at all.
    Size,
}

/// What became of a freed block.
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
    },
}

/// Who is told about [`StrategyEvent`]s.
pub trait EventSink {
    /// Called at the moment the event happens, in order.
    fn event(&mut self, event: StrategyEvent);
}

/// A sink that forgets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl EventSink for Silent {
    fn event(&mut self, _: StrategyEvent) {}
}

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
    /// A request for nothing.
    #[error("a request for zero bytes")]
    ZeroBytes,
}

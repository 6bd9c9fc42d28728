//! Drives a trace through a strategy on a device, and reports every event to an observer.
//!
//! [`Replay`] is the way in: it opens the device, applies the limit, builds the strategy and runs. [`replay`] does the
//! same with a strategy and a device that the caller has. [`verify`] compares a recording with the model of PyTorch's
//! allocator; [`agreement`] repeats a run on the answers that its driver gave.
//!
//! This module computes no statistics and prints nothing. It never delays a free: waiting for streams is the task of
//! the strategy. Running out of memory is an outcome, reported with its cause.

pub mod agreement;
mod drive;
pub mod verify;

pub(crate) use drive::PoolScopes;
pub use drive::{TraceEvents, replay};

use std::{fmt::Display, sync::atomic::AtomicBool};

use crate::{
    base::TagId,
    device::{
        CallLedger, Device, DeviceError, DeviceSpec, DeviceSpecError, MissingCapabilities, default_limit, wrap::capped,
    },
    plugin,
    strategy::{
        Block, Context, EventSink, Freed, Outcome, Request, Setup, Shortage, Silent, SpecError, Stats, Strategy,
        StrategyError, StrategySpec, wrap::PoolArenas,
    },
    trace::{Event, LabelId, Source, Tables, TraceError},
};

/// A replay that can be run any number of times: a source, a strategy, a device and a memory limit.
///
/// Without further calls it uses PyTorch's allocator with default settings on the simulated H200, without a limit.
///
/// ```
/// use oomph::base::{GIB, MIB, StreamId, TagId};
/// use oomph::replay::{OomCause, Replay};
/// use oomph::trace::TraceBuilder;
///
/// let mut builder = TraceBuilder::new();
/// let first = builder.alloc(30 * MIB, StreamId::DEFAULT, TagId(0));
/// builder.free(first);
/// builder.alloc(50 * MIB, StreamId::DEFAULT, TagId(0));
/// let trace = builder.finish("two blocks");
///
/// let run = Replay::new(&trace).strategy("caching").limit(GIB).run()?;
/// assert_eq!((run.outcome.ooms, run.stats.peak.reserved), (0, 80 * MIB));
///
/// let run = Replay::new(&trace).strategy("caching:expandable_segments:True").limit(40 * MIB).run()?;
/// let oom = run.outcome.first_oom.expect("50 MiB do not fit in 40 MiB");
/// assert_eq!((oom.event, oom.cause), (2, OomCause::Exhaustion));
/// # Ok::<(), oomph::replay::ReplayError>(())
/// ```
#[derive(Clone)]
pub struct Replay<'a> {
    pub(crate) source: &'a dyn Source,
    pub(crate) strategy: StrategySpec,
    device: DeviceSpec,
    pub(crate) limit: Option<u64>,
    enforcer: LimitEnforcer,
    pub(crate) options: ReplayOptions<'a>,
}

impl<'a> Replay<'a> {
    /// A replay of `source` under PyTorch's allocator on the simulated H200.
    #[must_use]
    pub fn new(source: &'a dyn Source) -> Replay<'a> {
        Replay {
            source,
            strategy: StrategySpec::from("caching"),
            device: DeviceSpec::default(),
            limit: None,
            enforcer: LimitEnforcer::default(),
            options: ReplayOptions::default(),
        }
    }

    /// The strategy, as users type it (`"caching:expandable_segments:True"`) or already parsed. Plugins are allowed.
    #[must_use]
    pub fn strategy(self, strategy: impl Into<StrategySpec>) -> Replay<'a> {
        Replay { strategy: strategy.into(), ..self }
    }

    /// The device. A fresh one is opened for every run.
    #[must_use]
    pub fn device(self, device: DeviceSpec) -> Replay<'a> {
        Replay { device, ..self }
    }

    /// The most bytes that the strategy may hold on the device. Without a limit, a simulated device gives all it has
    /// and a real one nine tenths of what is free, so that other programs survive.
    #[must_use]
    pub fn limit(self, bytes: impl Into<Option<u64>>) -> Replay<'a> {
        Replay { limit: bytes.into(), ..self }
    }

    /// Who refuses requests beyond the limit.
    #[must_use]
    pub fn enforced_by(self, enforcer: LimitEnforcer) -> Replay<'a> {
        Replay { enforcer, ..self }
    }

    /// The same replay of another source, such as one that reports progress.
    #[must_use]
    pub fn with_source<'b>(&self, source: &'b dyn Source) -> Replay<'b>
    where
        'a: 'b,
    {
        Replay { source, ..self.clone() }
    }

    /// How to replay.
    #[must_use]
    pub fn options(self, options: ReplayOptions<'a>) -> Replay<'a> {
        Replay { options, ..self }
    }

    /// Opens a fresh device and builds the strategy for it.
    ///
    /// A simulated device gives the model of PyTorch's allocator the addresses of the recording, where the source has
    /// them: the allocator chooses between equal blocks by address. Other strategies request other memory.
    pub fn open(&self) -> Result<OpenedAllocator, ReplayError> {
        if self.strategy.is_pytorch_model() && self.device.is_simulated() {
            return self.open_on(self.device.open_placing_as(&self.source.placements())?);
        }
        self.open_on(self.device.open()?)
    }

    /// Builds the strategy for a fresh device that the caller opened.
    pub fn open_on(&self, device: Box<dyn Device>) -> Result<OpenedAllocator, ReplayError> {
        // On a real device a plugin takes memory past ours, so that a cap would not bind it.
        let clock = device.props().clock;
        let limit = plugin::cap(&self.strategy, self.limit.or_else(|| default_limit(&*device)), clock);
        let device = capped(device, limit);
        let told = self.limit.filter(|_| self.enforcer == LimitEnforcer::Allocator);
        let mut strategy = plugin::build(&self.strategy, &Setup { props: device.props(), limit: told })?;
        // Two instances of a plugin share the library's state, so that a plugin has no pools.
        if !strategy.serves_pools() && !plugin::is_plugin(&self.strategy) && self.source.uses_pools()? {
            let (spec, props) = (self.strategy.clone(), device.props().clone());
            let build = move || {
                let built = spec.build(&Setup { props: &props, limit: told });
                built.map_err(|error| StrategyError::Refused(error.to_string()))
            };
            strategy = Box::new(PoolArenas::new(strategy, Box::new(build)));
        }
        Ok(OpenedAllocator { strategy, device, limit })
    }

    /// Runs once, without an observer.
    pub fn run(&self) -> Result<ReplayRun, ReplayError> {
        self.run_observed(&mut Silent)
    }

    /// Runs once, and reports every event to `observer`.
    pub fn run_observed<O: Observer>(&self, observer: &mut O) -> Result<ReplayRun, ReplayError> {
        let mut opened = self.open()?;
        let outcome = opened.replay(self.source, &self.options, observer)?;
        let (stats, calls) = (opened.strategy.stats(), opened.device.ledger());
        opened.close(outcome.events, observer)?;
        Ok(ReplayRun { outcome, stats, calls })
    }
}

/// A fresh strategy over a fresh device.
pub struct OpenedAllocator {
    /// The strategy.
    pub strategy: Box<dyn Strategy>,
    /// The device, capped at the limit.
    pub device: Box<dyn Device>,
    /// The most bytes that the device gives, where that is limited.
    pub limit: Option<u64>,
}

impl OpenedAllocator {
    /// Runs `source` once.
    pub fn replay<O: Observer>(
        &mut self,
        source: &dyn Source,
        options: &ReplayOptions<'_>,
        observer: &mut O,
    ) -> Result<ReplayOutcome, ReplayError> {
        replay(source, &mut *self.strategy, &mut *self.device, options, observer)
    }

    /// Gives all memory back. `event` is the number of events so far.
    pub fn close(mut self, event: u64, sink: &mut dyn EventSink) -> Result<(), ReplayError> {
        let closed = self.strategy.close(&mut Context { device: &mut *self.device, sink });
        closed.map_err(|source| ReplayError::Strategy { event, source })
    }
}

/// The result of a run, from before the strategy was closed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplayRun {
    /// What happened.
    pub outcome: ReplayOutcome,
    /// The strategy's counters.
    pub stats: Stats,
    /// Driver calls and the time inside them.
    pub calls: CallLedger,
}

/// Who refuses requests beyond a memory limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitEnforcer {
    /// Both: the allocator knows the limit, as PyTorch knows its memory fraction, and the device refuses what exceeds it.
    ///
    /// PyTorch's allocator compares its memory fraction with the size of a segment before it asks the driver.
    #[default]
    Allocator,
    /// The driver, as on a card of that size: the allocator does not know the limit.
    Device,
}

/// How to replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplayOptions<'a> {
    /// What to do when a request fails.
    pub on_out_of_memory: OnOutOfMemory,
    /// How fast the host goes.
    pub pace: Pace,
    /// How many times to run the whole trace, back to back in one strategy; 0 counts as 1.
    pub repeat: u32,
    /// Whether to wait for the device at every step and at the end, as a program does that times its steps.
    pub await_steps: bool,
    /// Whether to leave out kernels: memory is requested as before, and streams stay idle.
    pub without_work: bool,
    /// Whether a recording that began in the middle continues from the memory that was there, if the strategy can take
    /// it over. Otherwise its blocks are requested first.
    pub resumes: bool,
    /// Set by another thread to end the replay early.
    pub stop: Option<&'a AtomicBool>,
}

/// How fast the host goes through the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// As fast as it can: times between events are left out.
    #[default]
    Flat,
    /// The times between events pass on the device's clock.
    Recorded,
}

/// What to do when a request fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnOutOfMemory {
    /// The run ends, as a training run would.
    #[default]
    Stop,
    /// The run continues without the request and without the later events of its block.
    Skip,
}

/// What a replay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayOutcome {
    /// Events carried out or left out.
    pub events: u64,
    /// Events left out because their block was never served.
    pub left_out: u64,
    /// First requests that got a block from before the recording: see [`ReplayOptions::resumes`].
    pub inherited: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// The first of them.
    pub first_oom: Option<FailedRequest>,
    /// Whether [`ReplayOptions::stop`] ended it.
    pub interrupted: bool,
}

/// Why a replay could not be run or could not continue. Running out of memory is not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The device cannot be opened.
    #[error(transparent)]
    DeviceSpec(#[from] DeviceSpecError),
    /// The strategy cannot be built.
    #[error(transparent)]
    StrategySpec(#[from] SpecError),
    /// The device lacks something that the strategy needs.
    #[error(transparent)]
    Incapable(#[from] MissingCapabilities),
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The strategy reported an error.
    #[error("event {event}: {source}")]
    Strategy {
        /// At which event, from 0.
        event: u64,
        /// The error.
        source: StrategyError,
    },
    /// The device reported an error.
    #[error("event {event}: {source}")]
    Device {
        /// At which event, from 0.
        event: u64,
        /// The error.
        source: DeviceError,
    },
}

impl ReplayError {
    /// Whether this process can no longer use the device: see [`DeviceError::loses_context`].
    #[must_use]
    pub fn loses_context(&self) -> bool {
        match self {
            ReplayError::Strategy { source, .. } => source.loses_context(),
            ReplayError::Device { source, .. } => source.loses_context(),
            _ => false,
        }
    }
}

/// A request that failed, and the state of memory at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The number of the event, from 0.
    pub event: u64,
    /// The step it happened in, if the trace marks steps.
    pub step: Option<u32>,
    /// The phase it happened in, if the trace marks phases.
    pub phase: Option<LabelId>,
    /// The request.
    pub request: Request,
    /// What was missing, according to the strategy.
    pub shortage: Shortage,
    /// Free on the device, or up to the limit.
    pub device_free: u64,
    /// Held on the device in whole pages.
    pub device_held: u64,
    /// Reserved by the strategy but in no block.
    pub cached_free: u64,
    /// The largest piece of that for this stream, where the strategy knows.
    pub largest_free: Option<u64>,
    /// Why it failed.
    pub cause: OomCause,
}

oomph_base::named_enum! {
    /// Why a request failed.
    pub enum OomCause {
        /// Less memory was free than requested, cached memory included.
        Exhaustion = "exhaustion",
        /// Enough was free in total, but not in one usable piece.
        Fragmentation = "fragmentation",
    }
}

/// Receives the events of a replay. Every method does nothing by default, and the loop is generic over the observer, so
/// unused callbacks cost nothing.
///
/// An observer is also the [`EventSink`] of the strategy: inner events arrive between the outer ones that cause them.
pub trait Observer: EventSink {
    /// Before the event is carried out.
    fn before(&mut self, _now: &ReplayMoment<'_>) {}
    /// A request was served.
    fn served(&mut self, _now: &ReplayMoment<'_>, _live: &LiveBlock, _outcome: Outcome) {}
    /// A block is about to be freed.
    fn free_requested(&mut self, _now: &ReplayMoment<'_>, _live: &LiveBlock) {}
    /// A block was freed.
    fn freed(&mut self, _now: &ReplayMoment<'_>, _live: &LiveBlock, _freed: Freed) {}
    /// A request failed.
    fn out_of_memory(&mut self, _now: &ReplayMoment<'_>, _report: &FailedRequest) {}
    /// After the event was carried out, of any kind.
    fn after(&mut self, _now: &ReplayMoment<'_>) {}
    /// Between two rounds of a repeated trace: all live blocks are about to be freed, without events of their own.
    fn round_ends(&mut self, _strategy: &dyn Strategy) {}
}

impl Observer for Silent {}

/// The first `most` items, the number of the others, or `nothing`.
fn list_of(items: &[impl Display], most: usize, separator: &str, nothing: &str) -> String {
    let shown: Vec<String> = items.iter().take(most).map(ToString::to_string).collect();
    match items.len().saturating_sub(most) {
        _ if items.is_empty() => nothing.to_owned(),
        0 => shown.join(separator),
        more => format!("{} and {more} more", shown.join(separator)),
    }
}

/// A live block and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// The block.
    pub block: Block,
    /// The request.
    pub request: Request,
    /// The number of the event that requested it.
    pub born: u64,
    /// Category and layer.
    pub tag: TagId,
}

/// The state of a replay at one event.
pub struct ReplayMoment<'a> {
    /// The event's number, from 0.
    pub index: u64,
    /// The event.
    pub event: &'a Event,
    /// The side tables.
    pub tables: &'a Tables,
    /// The strategy.
    pub strategy: &'a dyn Strategy,
    /// The device.
    pub device: &'a dyn Device,
}

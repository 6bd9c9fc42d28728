//! Drives a trace through a strategy on a device, and tells observers what happens.
//!
//! Replay carries events out and nothing else: it computes no statistics, formats nothing and never delays a free
//! (waiting for streams is the strategy's business). Running out of memory is an outcome, reported with its cause.

pub mod agreement;
mod drive;
mod observer;
mod tenant;
mod trace_events;
pub mod verify;

pub use drive::{Options, Pace, ReplayError, Replayed, replay};
pub use observer::{Live, Moment, Observer};
pub use trace_events::TraceEvents;

use crate::{
    strategy::{Request, Shortage},
    trace::LabelId,
};

/// What to do when a request fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnOutOfMemory {
    /// The run ends there, as a training run would.
    #[default]
    Stop,
    /// The request is left out, with everything that would have happened to its block, and the run goes on.
    Skip,
}

/// A request that failed, and how memory stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The number of the event, from 0.
    pub event: u64,
    /// The step it happened in, if the trace marks steps.
    pub step: Option<u32>,
    /// The phase it happened in, if the trace marks phases.
    pub phase: Option<LabelId>,
    /// What was asked for.
    pub request: Request,
    /// What the strategy says was missing.
    pub shortage: Shortage,
    /// Free on the device (or up to the limit).
    pub device_free: u64,
    /// Held on the device in whole pages.
    pub device_held: u64,
    /// Reserved by the strategy but in no block.
    pub cached_free: u64,
    /// The largest piece of that for this stream, where the strategy knows.
    pub largest_free: Option<u64>,
    /// Why it failed.
    pub cause: Cause,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Less memory was free, cached memory included, than was asked for.
    Exhaustion,
    /// Enough was free in total, but not in one usable piece.
    Fragmentation,
}

impl Cause {
    /// Its name in files and sentences.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Exhaustion => "exhaustion",
            Cause::Fragmentation => "fragmentation",
        }
    }
}

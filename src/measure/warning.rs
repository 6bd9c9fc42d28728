//! What a reader of the numbers should know about them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::Bytes;

/// Something that makes a case's numbers less than they seem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Warning {
    /// Events were left out because their block was never served.
    EventsLeftOut {
        /// How many.
        count: u64,
    },
    /// Blocks were freed and still wait for a stream at the end.
    BlocksStillWaiting {
        /// How much they are.
        bytes: u64,
    },
    /// A layout is not in the case file.
    LayoutLeftOut {
        /// How many blocks it has.
        blocks: u64,
    },
    /// Failed requests are counted but not all described.
    OomReportsLeftOut {
        /// How many are not.
        count: u64,
    },
    /// A mark on the timeline is missing for some retries and failed requests.
    IncidentsLeftOut {
        /// How many.
        count: u64,
    },
    /// The workload queues work, and the device runs none: no stream is ever busy, so no free has to wait.
    WorkNotRun {
        /// How many pieces of work.
        count: u64,
    },
    /// The workload has no step marks, so there are no figures per step.
    NoSteps,
}

impl Warning {
    /// What to do about it.
    #[must_use]
    pub const fn advice(&self) -> &'static str {
        match self {
            Warning::EventsLeftOut { .. } => {
                "figures after the first OOM are those of a smaller program; give it more memory to see the whole one"
            }
            Warning::BlocksStillWaiting { .. } => {
                "end the workload with a device synchronisation if they should count as free"
            }
            Warning::LayoutLeftOut { .. } => "use a shorter workload to look at single blocks",
            Warning::OomReportsLeftOut { .. } => "stop at the first OOM to look at it alone",
            Warning::IncidentsLeftOut { .. } => "use the `retries` and `ooms` columns, which count all of them",
            Warning::WorkNotRun { .. } => "choose a device with compute to see what waiting for streams costs",
            Warning::NoSteps => "mark the beginning of each step in the workload",
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::EventsLeftOut { count } => {
                write!(f, "{count} events were left out because their block was never served")
            }
            Warning::BlocksStillWaiting { bytes } => {
                write!(f, "{} of freed blocks still wait for a stream at the end", Bytes(*bytes))
            }
            Warning::LayoutLeftOut { blocks } => write!(f, "a layout of {blocks} blocks is not in the case file"),
            Warning::OomReportsLeftOut { count } => write!(f, "{count} failed requests are not described one by one"),
            Warning::IncidentsLeftOut { count } => {
                write!(f, "{count} retries and failed requests have no mark on the timeline")
            }
            Warning::WorkNotRun { count } => {
                write!(f, "{count} pieces of work were not run: the device has no compute, so no stream is ever busy")
            }
            Warning::NoSteps => f.write_str("the workload marks no steps"),
        }
    }
}

//! Does memory grow from step to step, why, and who holds it.
//!
//! [`Observed::of_replay`] replays a source and writes down how memory stood in every step; [`Observed::of_snapshots`]
//! takes that from snapshots in order. [`judge`] tests three series in turn, by the slope of a line and its Student-t
//! interval ([`trend`]) and by the rules of [`growth`]:
//!
//! | series | if it grows | what brings it down |
//! |---|---|---|
//! | kept: the lowest `allocated` of a step | leak | nothing; Python's collector, where only cycles hold it |
//! | stuck: cached memory in segments that live blocks share | fragmentation | nothing |
//! | reserved | growing cache | `empty_cache`; the allocator itself, before a request fails |
//!
//! Otherwise memory is steady. The low point of a step does not depend on where exactly a step is cut. The first step is
//! start-up and is not judged; neither is one in which memory ran out. The command line asks and `report` shows the
//! answer; this room neither knows files nor prints.

mod finding;
pub mod growers;
pub mod growth;
pub mod ledger;
mod observed;
mod period;
pub mod snapshots;
pub mod steps;
pub mod trend;

pub use finding::{Finding, Quantity, RecoverableBy, Verdict, judge};
pub use growers::{Grower, GrownBy};
pub use growth::{Bar, CourseKind};
pub use ledger::StepUse;
pub use observed::Observed;
pub use period::period;
pub use steps::{FEWEST_STEPS, Steps, StepsFrom};
pub use trend::Trend;

use crate::{replay::ReplayError, strategy::StrategyError, trace::TraceError};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeakError {
    /// The source cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The strategy could not be closed.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// No such phase, or it does not repeat.
    #[error("no phase '{asked}' begins often enough to be a step; {}", known_phases(known))]
    NoSuchPhase {
        /// What was asked for.
        asked: String,
        /// Those that the source names.
        known: Vec<String>,
    },
    /// Too little to judge.
    #[error("{found} {what} are too few to tell growth from start-up: at least {needed} are needed")]
    TooShort {
        /// Of what there is too little.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many it takes.
        needed: u64,
    },
}

fn known_phases(known: &[String]) -> String {
    if known.is_empty() { "the source names none".to_owned() } else { format!("there are: {}", known.join(", ")) }
}

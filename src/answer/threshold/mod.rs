//! The smallest memory in which a source completes under a strategy, and the largest workload that fits in a memory.
//!
//! Both are searches over replays on a simulated device: [`threshold`] over caps on memory, [`largest`] over the values
//! of a generator's parameter. A found value is only worth something if its surroundings agree with it, so both look
//! around it and tell what contradicts. [`confirm`] repeats the two decisive runs where they count, on a real device;
//! [`CaseSearch`] does all that for the cases of a suite.
//!
//! # What is counted
//!
//! A cap is on the physical bytes that the *strategy* holds, in whole pages: `threshold_bytes`. A card must hold the
//! driver's context and the libraries that a program loads as well (`overhead_bytes`, those of the simulated GPU's
//! profile): `device_bytes` is the sum, the size of the smallest card. Workspaces of libraries are blocks like any other
//! where a source has them. [`LimitEnforcer`](crate::replay::LimitEnforcer) says who refuses what goes beyond.

mod case;
mod confirm;
mod largest;
mod memory;
mod probe;
mod record;
mod search;

pub use case::CaseSearch;
pub use confirm::{Confirmation, confirm};
pub use largest::{LargestQuestion, largest};
pub use memory::{Threshold, ThresholdQuestion, threshold};
pub(in crate::answer) use memory::{live_peak, overhead};
pub use probe::Probe;
pub(in crate::answer) use probe::Rehearsal;
pub(in crate::answer) use record::status_of;
pub use record::{LargestRecord, Stability, ThresholdDetail, ThresholdRecord, ThresholdStatus};

use crate::{
    base::{Bytes, did_you_mean},
    device::DeviceSpecError,
    models::WorkloadError,
    replay::ReplayError,
};

/// How often a source must get through back to back, unless somebody says otherwise: some fail only the third time.
pub const REPEATS: u32 = 3;

/// How many places around a found value are tried, unless somebody says otherwise.
pub const PROBES_AROUND: u32 = 16;

/// Why there is no answer. That memory does not suffice is an answer.
#[derive(Debug, thiserror::Error)]
pub enum ThresholdError {
    /// The device cannot be made.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// A replay broke.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The workload cannot be made with some value; boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(#[from] Box<WorkloadError>),
    /// No parameter of that name that counts something.
    #[error("generator '{generator}' has no whole-number parameter '{name}'{}", did_you_mean(suggestion.as_deref()))]
    NoSuchParameter {
        /// The workload's generator.
        generator: &'static str,
        /// What was asked for.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// Nothing is left for an allocator.
    #[error("{card} is no card: the context and libraries alone take {overhead} (a number without a unit is bytes)")]
    NoRoom {
        /// The whole of it.
        card: Bytes,
        /// What others take.
        overhead: Bytes,
    },
    /// Somebody stopped the search.
    #[error("stopped before an answer was found")]
    Interrupted,
}

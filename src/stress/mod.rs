//! Is an allocator correct? Programs that try to break a strategy, and the smallest trace that shows a failure.
//!
//! Every kind of stress plays traces through a [`StressTarget`] and reports [`StressFailure`]s. A failure carries its
//! trace, so that it can be saved, shrunk and repeated. This module uses replay and everything below it; it neither prints
//! nor reads the environment.

pub mod adversary;
mod checked_run;
pub mod faults;
mod integrity;
mod kinds;
pub mod misuse;
pub mod properties;
mod shrink;
mod soak;
mod state;
mod target;
mod verdict;

pub use checked_run::{CheckedRun, is_under_test};
pub use integrity::{BlockSizes, BlockSizesError, Integrity, ProgramMix, StopCondition, integrity_program};
pub use kinds::{KINDS, TimeShare};
pub use shrink::shrink;
pub use soak::Soak;
pub use state::{EnduranceOutcome, IntegrityCounts, MemoryLevels, StrategyTotals, StressSlice, StressState, TotalsRow};
pub use target::{StressTarget, TargetError};
pub use verdict::{FailureEvidence, StressFailure, StressKind, StressVerdict, VerdictRow};

//! Is this allocator correct: programs that try to break a strategy, and the smallest trace that shows how one broke.
//!
//! Every kind of stress plays traces through a [`Subject`] and makes a [`Failure`] of what goes wrong. A failure carries
//! its trace, so that it can be saved, shrunk and repeated. This room knows replay and all below it; it prints nothing
//! and reads no environment.

pub mod adversary;
mod draft;
mod every_kind;
mod failure;
pub mod faults;
mod integrity;
mod ledger;
pub mod misuse;
mod patience;
mod planned_fault;
mod player;
mod program;
pub mod properties;
mod shrink;
mod soak;
mod subject;
mod trial;
mod verdict;

pub use every_kind::{KINDS, KindOfStress, TimeShare};
pub use failure::Failure;
pub use integrity::{Integrity, Mixture, Outcome, Sizes, SizesError, Tally, Until, story};
pub use ledger::{Account, AccountRow, Ledger, Slice};
pub use planned_fault::{PlannedFault, PlannedFaultError};
pub use program::random_program;
pub use shrink::shrink;
pub use soak::{Levels, Soak};
pub use subject::{Subject, SubjectError};
pub use trial::{Conditions, Trial, TrialError, is_on_trial};
pub use verdict::{Evidence, Verdict, VerdictRow};

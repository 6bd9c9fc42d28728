//! Why there can be no plan.

use crate::TraceError;

/// A trace that cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The trace itself is wrong, or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Offsets would not fit into 64 bits.
    #[error("the requests of this trace add up to more than {} EiB: too much to be laid out", (i64::MAX >> 60) + 1)]
    TooMuch,
    /// Blocks are counted in 32 bits.
    #[error("more than {} blocks: too many to be laid out", u32::MAX)]
    TooMany,
}

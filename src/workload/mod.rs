//! What produces a trace: generators, and the recipes (TOML) that give them parameters.
//!
//! A workload knows no strategy and no device: it may not adapt to who runs it.

use crate::trace::TraceBuilder;

/// Tells a story part by part, in constant memory however long it is.
pub trait Generator: Send {
    /// Writes the next part (a step, or some thousand events). Returns false when there was nothing left to write.
    fn advance(&mut self, story: &mut TraceBuilder) -> bool;
}

//! The transformer generator against real PyTorch: action by action against the recordings, and by its memory against
//! every row that was measured.

#![expect(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod actions;
mod faults;
mod measured;
#[path = "../stories/mod.rs"]
mod stories;

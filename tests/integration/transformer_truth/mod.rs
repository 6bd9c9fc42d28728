//! The transformer generator against real PyTorch: action by action against the recordings, and its
//! memory against every measured row.

mod actions;
mod faults;
mod measured;

//! The transformer generator against real PyTorch: action by action against the recordings, and by its memory against
//! every row that was measured.

mod actions;
mod faults;
mod measured;

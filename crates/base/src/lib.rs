//! The vocabulary that every room shares: quantities, identities and kinds of work; what is known by
//! name, one way to do things side by side, and one to say how far they have come.
//!
//! Newtypes keep bytes, nanoseconds, addresses and indices apart at no cost. Nothing here knows about
//! devices, strategies or traces.

mod bytes;
mod ending;
mod id;
mod layout;
mod near;
pub mod packing;
mod pipe;
mod progress;
mod shelf;
mod side_by_side;
mod time;
mod work;

pub use bytes::{Bytes, GIB, KIB, MIB, ParseBytesError};
pub use ending::{ending, signal};
pub use id::{Address, EventId, SiteId, StreamId, TagId, ThreadId};
pub use layout::{BlockState, BlockView, Layout, SegmentView};
pub use near::{did_you_mean, did_you_mean_among, nearest};
pub use pipe::last_bytes;
#[cfg(any(test, feature = "testing"))]
pub use progress::ProgressLog;
pub use progress::{NoProgress, PROGRESS_STRIDE, Progress};
pub use shelf::{Shelf, Shelved};
pub use side_by_side::{as_they_come, side_by_side};
pub use time::Nanos;
pub use work::{Dtype, ProductRole, Work};

/// Rounds `value` up to a multiple of `step`, which must not be zero.
///
/// Saturates at the largest multiple that fits, so that absurd requests fail later as "too large" instead of
/// wrapping around to a small one.
///
/// ```
/// assert_eq!(oomph_base::round_up(513, 512), 1024);
/// assert_eq!(oomph_base::round_up(u64::MAX, 512), u64::MAX - 511);
/// ```
#[must_use]
pub const fn round_up(value: u64, step: u64) -> u64 {
    let down = value - value % step;
    if down == value {
        value
    } else {
        match down.checked_add(step) {
            Some(up) => up,
            None => down,
        }
    }
}

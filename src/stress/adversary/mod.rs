//! Who wastes how much memory at worst: requests made up to hurt, within a budget of live memory.
//!
//! [`robson`] is the adversary: it looks at the addresses it is given and frees exactly those blocks whose memory cannot
//! be used again.
//!
//! # What theory says
//!
//! Let no more than `M` units be alive at any time, in blocks of 1, 2, 4 ... `n` units. Robson (1971) gave a program that
//! forces every allocator that never moves a block to spread over
//!
//! ```text
//! N(M, n) = M (log2 n / 2 + 1) - n + 1   units,
//! ```
//!
//! and an allocator that needs no more (1974). For 4 GiB alive in blocks of 2 to 512 MiB these are 19.5 GiB: 4.88 times what
//! is alive. No cleverness in placing blocks helps. What helps is to move them, and virtual memory does that for whole
//! pages: the bytes stay at their addresses and free pages are mapped elsewhere. A strategy that does so at every page
//! needs about what is alive; one that gives back whole segments only is somewhere between.
//!
//! So two figures matter. *Reserved* is what a strategy takes while there is enough of everything; most keep what they
//! have, and so reach the bound. *Needed* is the least memory in which the same adversary does not bring it down.
//!
//! The adversary holds a strategy's addresses on one [line](Line): each allocation from the device has its place there, in
//! the order in which they came.

mod assessment;
mod contest;
mod error;
mod line;
mod opponent;
pub mod robson;

pub use assessment::{Assessment, Contender, EXHIBITS, MEMORY, Standing, assess};
pub use contest::{Contest, ContestError};
pub use error::AdversaryError;
pub use line::Line;
pub use opponent::{Bout, Ending, play};

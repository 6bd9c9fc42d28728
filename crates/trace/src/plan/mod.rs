//! What a trace needs at least, and how well it can be laid out by somebody who knows it beforehand.
//!
//! [`Bound::of`] reads a source once: the most bytes alive at one time, which no allocator can go below. [`pack`] gives
//! every block of [`Lifetimes`] an offset in one stretch of memory: the offline packing that separates what fragmentation
//! is unavoidable from what a policy loses, and the plan that a planned strategy carries out ([`Packing::plan`]). `inspect`
//! shows both and a suite writes them beside what strategies reserve. This room knows traces, and neither strategies
//! nor devices.
//!
//! ```
//! use oomph_trace::plan::{GRAIN, Lifetimes, PackingBudget, pack};
//! use oomph_trace::TraceBuilder;
//! use oomph_base::{MIB, StreamId, TagId};
//! let mut story = TraceBuilder::new();
//! let small = story.alloc(MIB, StreamId::DEFAULT, TagId(0));
//! let kept = story.alloc(MIB, StreamId::DEFAULT, TagId(0));
//! story.free(small);
//! story.alloc(2 * MIB, StreamId::DEFAULT, TagId(0));
//! let lifetimes = Lifetimes::read(&story.finish("trap"), GRAIN)?;
//! let packing = pack(&lifetimes, PackingBudget::QUICK);
//! // Whoever does not look ahead leaves a hole of 1 MiB under `kept` and needs 4 MiB.
//! assert_eq!((packing.height_bytes, packing.is_optimal()), (3 * MIB, true));
//! # let _ = kept;
//! # Ok::<(), oomph_trace::plan::PlanError>(())
//! ```

mod bound;
mod error;
mod exact;
mod ground;
mod improve;
mod lifetimes;
mod needs;
mod online;
mod pack;
mod packing;
#[cfg(test)]
mod puzzles;

pub use bound::Bound;
pub use error::PlanError;
pub use lifetimes::Lifetimes;
pub use needs::Needs;
pub use oomph_base::packing::{BlockLifetime, PackingBudget, PlacementOrder};
pub use pack::pack;
pub use packing::{Method, Overlap, Packing, PlannedBlock};

/// What requests are rounded up to where nobody says otherwise: the smallest unit of PyTorch's allocator.
pub const GRAIN: u64 = 512;

//! Rules of the CUDA driver that do not depend on who asks: where memory is placed, which pages it takes.
//!
//! The simulated device (`oomph-alloc`) and the shadow GPU (`oomph-shadow`) follow the same rules, so they are here once.
//! Addresses and sizes are plain numbers of bytes. This crate has no dependencies, because the shadow GPU's shared
//! library is compiled without Cargo.

mod address_space;
mod placement;
mod pool;

pub use address_space::{
    AddressSpace, CONTEXT_FREE_BYTES, END, FIRST_RESERVED, FreedAllocation, LOWEST, PagePlacement, RANGE_BYTES,
    RangePlaces, ReservedSpace, SHARE_BYTES,
};
pub use placement::{ExtentPlace, FilledExtents, FreeRanges};
pub use pool::{FreePiece, OrderedPool, PoolRules};

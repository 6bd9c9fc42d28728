//! RMM's family: the memory resources of RAPIDS (RMM 26.10) as strategies, one file each.
//!
//! | strategy | RMM's resource |
//! |---|---|
//! | [`pool`] | `pool_memory_resource`: coalescing best fit, a free list per stream |
//! | [`arena`] | `arena_memory_resource`: first fit in superblocks, an arena per stream or thread |
//! | [`fixed`] | `fixed_size_memory_resource`: blocks of one size |
//! | [`binning`] | `binning_memory_resource`: fixed sizes for small requests, a pool for the rest |
//!
//! Which block serves a request, when the pool grows and by how much, and which stream waits for which are RMM's.
//! How the block is found is not: RMM walks lists, and everything here has an index. Three things follow from the suite:
//!
//! - RMM takes its first memory when a resource is made. A strategy is made without a device, so here it is taken
//!   at the first request, and again where a trim gave everything back.
//! - RMM keeps its memory until the end. The shell ([`pooled`](super::pooled)) gives free regions back when the
//!   device refuses, and on a trim.
//! - RMM knows no `record_stream`. The shell holds such blocks back until the other streams are through.
//!
//! Its users: cuDF, cuML, Dask and Spark on RAPIDS, PyTorch and CuPy through their plugins.

mod address_order;
mod amount;
pub(super) mod arena;
pub(super) mod binning;
mod equal_blocks;
#[cfg(test)]
mod faithful;
pub(super) mod fixed;
pub(super) mod pool;
mod stream_lists;
mod superblocks;
#[cfg(test)]
mod worked;

use super::pooled::ABSURD;
use oomph_base::round_up;

/// Sizes are multiples of this.
const QUANTUM: u64 = 256;

/// A request as RMM rounds it.
#[inline]
fn rounded(bytes: u64) -> Option<u64> {
    (bytes < ABSURD).then(|| round_up(bytes, QUANTUM))
}

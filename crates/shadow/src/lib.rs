//! The shadow GPU: stand-ins for NVIDIA's CUDA libraries that keep books and compute nothing.
//!
//! The stand-ins are a shared library ([`LIBRARY`], sources in `core/`), which is embedded in the program and written to
//! the user's cache. [`functions`] is the table of all functions it serves. This crate knows nothing about PyTorch's
//! files or processes; `oomph rehearse` does.

pub mod functions;

/// The shared library; empty on machines other than x86-64 Linux.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liboomph_shadow.so"));

/// A hash of [`LIBRARY`] (FNV-1a, 64 bits): part of the name of its folder in the cache, and what a file found there is
/// checked with.
pub fn library_hash() -> u64 {
    hash(LIBRARY)
}

/// FNV-1a over bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

//! The shadow GPU: stand-ins for NVIDIA's CUDA libraries that keep books and compute nothing.
//!
//! The stand-ins are a shared library ([`LIBRARY`], sources in `core/`), which is embedded in the program and written to
//! the user's cache. [`functions`] is the table of all functions it serves. This crate knows nothing about PyTorch's
//! files or processes; `oomph rehearse` does.

pub mod functions;

/// The shared library; empty on machines other than x86-64 Linux.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liboomph_shadow.so"));

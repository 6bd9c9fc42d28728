//! Rehearsals: a user's own program on the shadow GPU, which computes nothing. Writes the libraries that stand in for
//! NVIDIA's, starts the program and gathers what it recorded. Knows nothing of terminals.

pub mod cache;
pub mod compile_cache;
pub mod facts;
pub mod forwarder;
pub mod needs;
pub mod program;
pub mod record;
pub mod running;
pub mod search;
pub mod world;

/// Whether this machine can rehearse: the libraries are x86-64 ELF files for Linux.
pub const SUPPORTED: bool = cfg!(all(target_os = "linux", target_arch = "x86_64"));

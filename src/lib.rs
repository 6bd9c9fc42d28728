//! Stress-tests and benchmarks CUDA memory allocators, on a real GPU or on a simulated one.
//!
//! Data flows one way, and the modules of this crate are named after the stations:
//!
//! ```text
//! models -> trace -> replay(strategy over device) -> measure -> report
//! ```
//!
//! - [`base`]: bytes, nanoseconds, identities; used everywhere.
//! - [`pytorch`]: facts of PyTorch's allocator: sizes, rounding, settings.
//! - [`trace`]: a sequence of allocation events, in memory and on disk.
//! - [`plan`]: lower bounds of a trace, and offline packings.
//! - [`models`]: generators of traces and their recipes.
//! - [`device`]: the raw memory of one GPU, simulated or real, and wrappers over any device.
//! - [`strategy`]: allocation policies over a device, their registry and wrappers.
//! - [`plugin`]: PyTorch's pluggable-allocator interface: any allocator's `.so` as a strategy.
//! - [`rehearse`]: runs a program of PyTorch on a GPU that computes nothing, and records it.
//! - [`replay`]: drives a trace through a strategy on a device.
//! - [`measure`]: observers of a replay and the record of a case.
//! - [`answer`]: how much memory suffices, does it leak, what saves memory, what changed.
//! - [`report`]: records as tables and files.
//! - [`suite`]: which cases to run, and running them.
//! - [`stress`]: programs that try to break a strategy.
//! - [`cli`]: the command line; the only module that prints.

pub use oomph_alloc::{device, plugin, strategy};
pub use oomph_base as base;
pub use oomph_models as models;
pub use oomph_pytorch as pytorch;
pub use oomph_trace::{self as trace, plan};

pub mod answer;
pub mod cli;
pub mod measure;
pub mod rehearse {
    //! Rehearsals: a user's own program on the shadow GPU, which computes nothing. Writes the libraries that stand in for
    //! NVIDIA's, starts the program and gathers what it recorded. Knows nothing of terminals.

    pub mod cache;
    pub mod compile_cache;
    pub mod facts;
    pub mod needs;
    pub mod program;
    pub mod record;
    pub mod running;
    pub mod search;
    pub mod world;

    /// Whether this machine can rehearse: the libraries are x86-64 ELF files for Linux.
    pub const SUPPORTED: bool = cfg!(all(target_os = "linux", target_arch = "x86_64"));
}
pub mod replay;
pub mod report;
pub mod stress;
pub mod suite;

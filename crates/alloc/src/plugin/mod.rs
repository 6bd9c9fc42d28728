//! PyTorch's pluggable-allocator interface: [`load`] puts any allocator's `.so` behind
//! [`Strategy`](crate::strategy::Strategy). The other direction is the crate `oomph-torch-allocator`.
//!
//! ```c
//! void *alloc(size_t bytes, int device, cudaStream_t stream);
//! void  free (void *address, size_t bytes, int device, cudaStream_t stream);
//! ```
//!
//! The registry cannot know a strategy that is a file: whoever takes `plugin:FILE` from users asks [`build`] and
//! [`check`] here, which pass everything else on to the registry. This room knows strategies and devices; it knows no
//! trace, and prints nothing unless it is loaded into another program.

pub mod cpp_library;
pub mod load;

pub use load::{CALL_MARK, ENTRY, HANG_MARK, build, build_apart, cap, check, hurried, is_meant};
#[cfg(unix)]
pub use load::{HostProgram, host, host_with};

//! A real NVIDIA GPU, over the driver's library alone: no toolkit, and nothing linked.
//!
//! The library is looked for at run time, so one binary runs with and without a GPU; where there is none, [`open`]
//! says why. Built without the feature `cuda`, the same functions answer that, and the rest of the crate does not
//! notice. Only [`DeviceSpec`](super::DeviceSpec) and `doctor` come here; strategies meet the GPU as a
//! [`Device`](super::Device), and know nothing of this room.
//!
//! All `unsafe` code of the devices is in here.

mod survey;

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
pub use disabled::{
    Visit, count, driver_version, footprint, look_for_toolkit_in, matrix_library, name, open, open_as_guest, probe,
    survey, visit,
};
#[cfg(feature = "cuda")]
pub use enabled::{
    CudaDevice, Visit, count, driver_version, footprint, look_for_toolkit_in, matrix_library, name, open,
    open_as_guest, probe, survey, visit,
};

pub use survey::{Finding, Verdict};

/// Why there is no such GPU, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// What a program takes of a GPU beside its context and its own allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Loaded kernels.
    pub kernel_bytes: u64,
    /// cuBLAS with its handle and the kernels of the first product; 0 before that.
    pub library_bytes: u64,
    /// What cuBLAS is given to work in, for each stream.
    pub workspace_bytes: u64,
}

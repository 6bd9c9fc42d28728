//! A real NVIDIA GPU, through the driver's library alone: no toolkit is needed, and nothing is
//! linked.
//!
//! The library is loaded at run time, so one binary runs with and without a GPU; where there is
//! none, [`open`] returns the reason. Built without the feature `cuda`, all functions return that
//! reason. Only [`DeviceSpec`](super::DeviceSpec) and `doctor` use this module; strategies see a
//! [`Device`](super::Device).
//!
//! All `unsafe` code of the devices is in here.

#[cfg(not(feature = "cuda"))]
mod disabled {
    //! The functions of this module in a build without the feature `cuda`: there is no GPU.

    use std::path::PathBuf;

    use super::{CheckStatus, CudaCheck, Footprint, Unavailable};
    use crate::device::Device;

    const REASON: &str = "this oomph was built without the feature 'cuda'";

    /// Functions that fail because there is no GPU.
    macro_rules! unavailable {
        ($($name:ident($($argument:ident: $type:ty)?) -> $value:ty;)*) => {
            $(
                /// There is no GPU.
                pub fn $name($($argument: $type)?) -> Result<$value, Unavailable> {
                    Err(Unavailable(REASON.to_owned()))
                }
            )*
        };
    }

    unavailable! {
        open(_ordinal: u32) -> Box<dyn Device>;
        open_as_guest(_ordinal: u32) -> Box<dyn Device>;
        probe(_ordinal: u32) -> ();
        count() -> u32;
        name(_ordinal: u32) -> String;
        total_bytes(_ordinal: u32) -> u64;
        matrix_library() -> String;
        footprint(_ordinal: u32) -> Footprint;
        wait_for_cleared_memory(_ordinal: u32) -> ();
    }

    /// There is no context to restore.
    #[derive(Debug)]
    pub struct NoContext;

    /// There is no context to restore.
    #[must_use]
    pub fn keep_context() -> NoContext {
        NoContext
    }

    /// There is no driver.
    #[must_use]
    pub fn driver_version() -> Option<String> {
        None
    }

    /// There is nothing to check.
    #[must_use]
    pub fn survey() -> Vec<CudaCheck> {
        vec![CudaCheck::new(CheckStatus::Missing, "cuda", REASON)]
    }

    /// There is nothing to search for.
    pub fn look_for_toolkit_in(_folders: fn() -> Vec<PathBuf>) {}
}
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
pub use disabled::{
    NoContext as ContextGuard, count, driver_version, footprint, keep_context, look_for_toolkit_in, matrix_library,
    name, open, open_as_guest, probe, survey, total_bytes, wait_for_cleared_memory,
};
#[cfg(feature = "cuda")]
pub use enabled::{
    ContextGuard, CudaDevice, count, driver_version, footprint, keep_context, look_for_toolkit_in, matrix_library,
    name, open, open_as_guest, probe, survey, total_bytes, wait_for_cleared_memory,
};

/// Why a GPU cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// What a program takes of a GPU besides its context and its own allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Loaded kernels.
    pub kernel_bytes: u64,
    /// cuBLAS with its handle and the kernels of the first product; 0 before that.
    pub library_bytes: u64,
    /// The workspace of cuBLAS, per stream.
    pub workspace_bytes: u64,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckStatus {
    /// It works.
    Ok,
    /// It is missing.
    Missing,
    /// It does not work.
    Broken,
}

/// A check of the machine's CUDA, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaCheck {
    /// What was checked.
    pub subject: String,
    /// The result.
    pub status: CheckStatus,
    /// What was found, or why the check failed.
    pub details: String,
}

impl CudaCheck {
    pub(super) fn new(status: CheckStatus, subject: impl Into<String>, details: impl Into<String>) -> CudaCheck {
        CudaCheck { subject: subject.into(), status, details: details.into() }
    }
}

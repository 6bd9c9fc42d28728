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

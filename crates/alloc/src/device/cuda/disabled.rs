//! What this room answers in a build without the feature `cuda`.

use std::path::PathBuf;

use super::{Finding, Footprint, Unavailable, Verdict};
use crate::device::Device;

const REASON: &str = "this oomph was built without the feature 'cuda'";

/// There is no GPU to open.
pub fn open(_ordinal: u32) -> Result<Box<dyn Device>, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There is no GPU to open.
pub fn open_as_guest(_ordinal: u32) -> Result<Box<dyn Device>, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There is no context to come back to.
#[must_use]
pub fn visit() -> Visit {
    Visit
}

/// A call from another program.
#[derive(Debug)]
pub struct Visit;

/// There is no GPU to look at.
pub fn probe(_ordinal: u32) -> Result<(), Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There are no GPUs to count.
pub fn count() -> Result<u32, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There is no GPU to name.
pub fn name(_ordinal: u32) -> Result<String, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There is no driver to ask.
#[must_use]
pub fn driver_version() -> Option<String> {
    None
}

/// There is nothing to look at.
#[must_use]
pub fn survey() -> Vec<Finding> {
    vec![Finding::of("cuda", Err((Verdict::Missing, REASON.to_owned())))]
}

/// There is nothing to look for.
pub fn look_for_toolkit_in(_folders: fn() -> Vec<PathBuf>) {}

/// There are no matrix products.
pub fn matrix_library() -> Result<String, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

/// There is no GPU that anything was taken of.
pub fn footprint(_ordinal: u32) -> Result<Footprint, Unavailable> {
    Err(Unavailable(REASON.to_owned()))
}

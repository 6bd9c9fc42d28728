//! The devices that tests of strategies run on.

use crate::device::{
    Device,
    sim::{Profile, SimConfig, SimDevice},
};

/// A simulated device on which this many bytes can be allocated.
pub(super) fn simulated(bytes: u64) -> Box<dyn Device> {
    let profile = Profile::h200();
    let capacity_bytes = Some(profile.context_bytes + bytes);
    Box::new(SimDevice::new(SimConfig { profile, capacity_bytes }).unwrap())
}

//! The devices that tests of strategies run on.

use std::sync::LazyLock;

use crate::device::{
    Device,
    sim::{Profile, SimConfig, SimDevice},
};

/// A simulated device on which this many bytes can be allocated.
pub(crate) fn simulated(bytes: u64) -> Box<dyn Device> {
    // Its table of costs is read from text, which would be most of a short test's time.
    static PROFILE: LazyLock<Profile> = LazyLock::new(Profile::h200);
    let profile = PROFILE.clone();
    let capacity_bytes = Some(profile.context_bytes + bytes);
    Box::new(SimDevice::new(SimConfig { profile, capacity_bytes }).unwrap())
}

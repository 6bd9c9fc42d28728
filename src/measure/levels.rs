//! The five senses in which memory is in use, read at one moment, and the shares that are lost between them.

use serde::{Deserialize, Serialize};

use crate::{
    device::Device,
    replay::ReplayMoment,
    strategy::{OffBooks, Stats},
};

/// How much memory is in use, in the five senses that people mean; see [`measure`](super).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Levels {
    /// What callers asked for, in blocks not yet reusable.
    pub requested_bytes: u64,
    /// Blocks in callers' hands.
    pub allocated_bytes: u64,
    /// These, and blocks that wait for a stream.
    pub active_bytes: u64,
    /// Taken from the device.
    pub reserved_bytes: u64,
    /// What `nvidia-smi` would show; 0 where nobody can know, as with a plugin on a simulated device that does not tell.
    pub device_used_bytes: u64,
}

impl Levels {
    /// The books of a strategy and of its device.
    #[must_use]
    pub fn new(stats: &Stats, device: &dyn Device) -> Levels {
        let usage = &stats.current;
        Levels {
            requested_bytes: usage.requested,
            allocated_bytes: usage.allocated,
            active_bytes: usage.active,
            reserved_bytes: usage.reserved,
            device_used_bytes: match stats.off_books {
                OffBooks::Nothing => device_used(device),
                OffBooks::AllReserved => device_used(device).saturating_add(usage.reserved),
                OffBooks::Unknown => 0,
            },
        }
    }

    /// Each level's maximum on its own.
    pub fn raise(&mut self, other: &Levels) {
        self.requested_bytes = self.requested_bytes.max(other.requested_bytes);
        self.allocated_bytes = self.allocated_bytes.max(other.allocated_bytes);
        self.active_bytes = self.active_bytes.max(other.active_bytes);
        self.reserved_bytes = self.reserved_bytes.max(other.reserved_bytes);
        self.device_used_bytes = self.device_used_bytes.max(other.device_used_bytes);
    }
}

impl From<&ReplayMoment<'_>> for Levels {
    fn from(now: &ReplayMoment<'_>) -> Levels {
        Levels::new(&now.strategy.stats(), now.device)
    }
}

/// What `nvidia-smi` would show for this process, as far as the device knows.
#[must_use]
pub fn device_used(device: &dyn Device) -> u64 {
    device.overhead_bytes().saturating_add(device.held_bytes())
}

/// `1 - useful / whole`: the share of `whole` that is lost. Nothing is lost of nothing: `None`.
///
/// ```
/// use oomph::measure::lost_share;
/// assert_eq!(lost_share(3, 4), Some(0.25));
/// assert_eq!(lost_share(0, 0), None);
/// ```
#[must_use]
pub fn lost_share(useful: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| 1.0 - useful as f64 / whole as f64)
}

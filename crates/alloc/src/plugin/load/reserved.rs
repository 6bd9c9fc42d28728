//! How much memory a plugin holds, from whoever can tell.
//!
//! The interface has no question for it. A plugin may offer one. On a real device whatever went missing since the first
//! request is the plugin's; asking the driver takes longer than most allocations, so it is asked only where the answer
//! can have changed upwards: a block lies where none has lain before, or more is live than ever. On a simulated device
//! nobody knows: then what is live stands in, which is the least that it can be.

use std::{collections::HashSet, ffi::c_int};

use super::allocator::Allocator;
use crate::device::{Clock, Device, DeviceError, DeviceProps};
use crate::strategy::{Block, OffBooks, StrategyError};

/// Where the figure comes from.
#[derive(Debug)]
pub(super) enum Reserved {
    /// The plugin tells.
    Told,
    /// What the device has lost.
    Lost(Loss),
    /// Nobody tells.
    Unknown,
}

/// What a real device had at first, and where blocks have lain.
#[derive(Debug)]
pub(super) struct Loss {
    free_at_first: Option<u64>,
    page_bytes: u64,
    seen_pages: HashSet<u64>,
    most_allocated: u64,
}

impl Reserved {
    /// Who will tell, of a plugin that does or does not.
    pub(super) fn of(tells: bool, props: &DeviceProps) -> Reserved {
        match (tells, props.clock) {
            (true, _) => Reserved::Told,
            (false, Clock::Virtual) => Reserved::Unknown,
            (false, Clock::Wall) => Reserved::Lost(Loss {
                free_at_first: None,
                page_bytes: props.page_bytes,
                seen_pages: HashSet::new(),
                most_allocated: 0,
            }),
        }
    }

    /// Whether the figure is more than a lower bound.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self, Reserved::Unknown)
    }

    /// What the device's books lack.
    pub(super) fn off_books(&self) -> OffBooks {
        if self.is_known() { OffBooks::AllReserved } else { OffBooks::Unknown }
    }

    /// Whether asking takes no driver call.
    pub(super) fn is_free_to_ask(&self) -> bool {
        !matches!(self, Reserved::Lost(_))
    }

    /// Looks at the device before the plugin first does anything with it.
    pub(super) fn before_first(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Reserved::Lost(loss @ Loss { free_at_first: None, .. }) = self {
            loss.free_at_first = Some(device.memory_info()?.free);
        }
        Ok(())
    }

    /// Whether a new block may mean that more is held than before; `allocated` is what is live with it.
    pub(super) fn may_have_grown(&mut self, block: &Block, allocated: u64) -> bool {
        let Reserved::Lost(loss) = self else { return true };
        // A new piece of memory shows at the beginning of a block, one that was extended at its end.
        let first = block.address.0 / loss.page_bytes;
        let last = block.address.0.saturating_add(block.size - 1) / loss.page_bytes;
        let is_new_place = loss.seen_pages.insert(first) | loss.seen_pages.insert(last);
        let is_new_high = allocated > loss.most_allocated;
        loss.most_allocated = loss.most_allocated.max(allocated);
        is_new_place || is_new_high
    }

    /// What is held now, as far as anybody tells.
    pub(super) fn look(
        &self,
        plugin: &mut dyn Allocator,
        number: c_int,
        device: &mut dyn Device,
    ) -> Result<Option<u64>, StrategyError> {
        Ok(match self {
            Reserved::Told => plugin.reserved(number)?,
            Reserved::Lost(Loss { free_at_first: Some(before), .. }) => {
                Some(before.saturating_sub(device.memory_info()?.free))
            }
            Reserved::Lost(_) | Reserved::Unknown => None,
        })
    }
}

//! Addresses of the simulated device: `cuMemAlloc` by the rules of `oomph_driver` or as recorded, and pinned host memory.

use std::collections::HashMap;

use super::{SimDevice, recorded::RecordedSpace};
use crate::device::{CallKind, DeviceError, PinnedHost};
use oomph_base::{Address, GIB, KIB, PlacementCall};
use oomph_driver::{AddressSpace, END, ExtentPlace, FreeRanges, LOWEST, PagePlacement, RangePlaces};

/// Addresses of `cuMemAlloc`.
pub(super) type SimAddressSpace = AddressSpace<SimPlaces>;

/// Where pages of the simulated device lie.
#[derive(Clone, Debug)]
pub(super) enum SimPlaces {
    /// As in a new process.
    Rule(RangePlaces),
    /// As in a recorded process.
    Recorded(Box<RecordedSpace>),
}

impl SimPlaces {
    /// The places of a new process.
    pub(super) fn of_new_process(page_bytes: u64) -> SimPlaces {
        SimPlaces::Rule(RangePlaces::new(LOWEST, END, page_bytes))
    }

    /// The places of a process that is to make these calls, where they show its addresses.
    pub(super) fn of_recording(page_bytes: u64, calls: &[PlacementCall]) -> SimPlaces {
        match RecordedSpace::new(page_bytes, calls) {
            Some(recorded) => SimPlaces::Recorded(Box::new(recorded)),
            None => SimPlaces::of_new_process(page_bytes),
        }
    }
}

impl PagePlacement for SimPlaces {
    fn place(&mut self, pages: u64) -> Option<(ExtentPlace, u64)> {
        match self {
            SimPlaces::Rule(ranges) => ranges.place(pages),
            SimPlaces::Recorded(recorded) => recorded.place(pages),
        }
    }

    fn give_back(&mut self, place: ExtentPlace, first: u64, pages: u64) {
        match self {
            SimPlaces::Rule(ranges) => ranges.give_back(place, first, pages),
            SimPlaces::Recorded(recorded) => recorded.give_back(place, first, pages),
        }
    }
}

/// Host memory is locked in pages of this size.
const HOST_PAGE_BYTES: u64 = 4 * KIB;
/// Pinned addresses lie between these two, apart from all device addresses.
const FIRST_PINNED: u64 = 64 * 1024 * GIB;
const END_PINNED: u64 = 96 * 1024 * GIB;

/// The addresses of page-locked host memory. It takes addresses and time, but no memory of the
/// device.
#[derive(Clone, Debug)]
pub(super) struct PinnedSpace {
    /// In units of [`HOST_PAGE_BYTES`].
    unused: FreeRanges,
    /// Length by address.
    live: HashMap<Address, u64>,
}

impl PinnedSpace {
    pub(super) fn new() -> PinnedSpace {
        PinnedSpace {
            unused: FreeRanges::new(FIRST_PINNED / HOST_PAGE_BYTES, (END_PINNED - FIRST_PINNED) / HOST_PAGE_BYTES),
            live: HashMap::new(),
        }
    }

    fn allocate(&mut self, bytes: u64) -> Option<Address> {
        let address = Address(self.unused.take_lowest(bytes.div_ceil(HOST_PAGE_BYTES))? * HOST_PAGE_BYTES);
        self.live.insert(address, bytes);
        Some(address)
    }

    fn free(&mut self, address: Address) -> Option<u64> {
        let bytes = self.live.remove(&address)?;
        self.unused.give_back(address.0 / HOST_PAGE_BYTES, bytes.div_ceil(HOST_PAGE_BYTES));
        Some(bytes)
    }
}

impl PinnedHost for SimDevice {
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::HostAlloc;
        let answer = if bytes == 0 { Err("the size is zero") } else { Ok(self.pinned.allocate(bytes)) };
        self.conclude_allocation(call, bytes, answer)
    }

    fn host_free(&mut self, address: Address) -> Result<(), DeviceError> {
        let call = CallKind::HostFree;
        match self.pinned.free(address) {
            Some(bytes) => self.conclude_after(self.clocks.all_ready(), call, bytes, Ok(())),
            None => self.conclude_checked(call, 0, Err(format!("no pinned memory starts at {address}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, sim::SimConfig};
    use oomph_base::MIB;

    #[test]
    fn pinned_memory_takes_nothing_from_the_device() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let free = device.free_bytes();
        let [first, second] = [device.host_alloc(MIB + 1).unwrap(), device.host_alloc(1).unwrap()];
        assert_eq!(second, first.offset(MIB + HOST_PAGE_BYTES));
        assert_eq!((device.free_bytes(), device.held_bytes()), (free, 0));
        device.host_free(first).unwrap();
        assert!(device.host_free(first).is_err(), "it was freed already");
        assert!(device.host_alloc(0).is_err());
        assert!(device.host_alloc(1 << 60).unwrap_err().is_out_of_memory());
        assert_eq!(device.host_alloc(MIB).unwrap(), first);
    }
}

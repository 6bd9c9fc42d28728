//! Page-locked host memory. It takes addresses and time, but nothing of the device's memory.

use std::collections::BTreeMap;

use super::{SimDevice, holes::Holes};
use crate::device::{CallKind, DeviceError, PinnedHost};
use oomph_base::{Address, GIB, KIB};

/// Host memory is locked in pages of this size.
const HOST_PAGE_BYTES: u64 = 4 * KIB;
/// Pinned addresses lie between these two, apart from all device addresses.
const FIRST: u64 = 64 * 1024 * GIB;
const END: u64 = 96 * 1024 * GIB;

/// The addresses of pinned host memory.
#[derive(Clone, Debug)]
pub(super) struct PinnedSpace {
    /// In units of [`HOST_PAGE_BYTES`].
    unused: Holes,
    /// Length by address.
    live: BTreeMap<Address, u64>,
}

impl PinnedSpace {
    pub(super) fn new() -> PinnedSpace {
        PinnedSpace {
            unused: Holes::new(FIRST / HOST_PAGE_BYTES, (END - FIRST) / HOST_PAGE_BYTES),
            live: BTreeMap::new(),
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
        let answer = if bytes == 0 {
            Err(DeviceError::InvalidValue { call, reason: "the size is zero".to_owned() })
        } else {
            self.pinned.allocate(bytes).ok_or(DeviceError::OutOfMemory { call, requested: bytes })
        };
        self.conclude(call, bytes, answer)
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
    fn pinned_memory_has_its_own_addresses_and_takes_nothing_from_the_device() {
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

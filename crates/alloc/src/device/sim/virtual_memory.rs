//! Virtual memory of the simulated device: where ranges are reserved, and the calls over
//! [`MappingTable`].
//!
//! Addresses follow [`ReservedSpace`].

use super::{SimDevice, contents::PhysicalRegion};
use crate::device::{CallKind, DeviceError, PhysicalId, VirtualMemory, mapping::MappingTable};
use oomph_base::{Address, GIB, Nanos};
use oomph_driver::ReservedSpace;

/// Reserved ranges end here.
const END: u64 = 64 * 1024 * GIB;

/// Addresses for reserved ranges, and what is reserved and mapped.
#[derive(Clone, Debug)]
pub(super) struct SimVirtualSpace {
    granularity: u64,
    addresses: ReservedSpace,
    pub(super) table: MappingTable<()>,
}

impl SimVirtualSpace {
    pub(super) fn new(granularity: u64) -> SimVirtualSpace {
        SimVirtualSpace { granularity, addresses: ReservedSpace::new(END), table: MappingTable::default() }
    }

    /// Checks that a length is not zero, and that it and the address are multiples of the
    /// granularity.
    fn check_multiples(&self, bytes: u64, address: u64) -> Result<(), String> {
        if bytes == 0 {
            return Err("the size is zero".to_owned());
        }
        for (what, value) in [("size", bytes), ("address", address)] {
            if !value.is_multiple_of(self.granularity) {
                return Err(format!("the {what} {value:#x} is not a multiple of {:#x}", self.granularity));
            }
        }
        Ok(())
    }

    /// The address, or `None` where the address space is used up.
    fn reserve(&mut self, bytes: u64) -> Result<Option<Address>, String> {
        self.check_multiples(bytes, 0)?;
        let start = self.take_range(bytes).map(Address);
        if let Some(start) = start {
            self.table.reserve(start, bytes);
        }
        Ok(start)
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), String> {
        self.table.check_address_free(address, bytes)?;
        self.table.address_free(address);
        self.give_back_range(address.0, bytes);
        Ok(())
    }

    /// Takes addresses for memory that is not mapped piece by piece: pools lie among the reserved
    /// ranges.
    pub(super) fn take_range(&mut self, bytes: u64) -> Option<u64> {
        self.addresses.take(bytes)
    }

    /// Gives back what [`take_range`](SimVirtualSpace::take_range) took.
    pub(super) fn give_back_range(&mut self, start: u64, bytes: u64) {
        self.addresses.give_back(start, bytes);
    }

    /// The size of the memory whose handle was released.
    fn release(&mut self, physical: PhysicalId) -> Result<u64, String> {
        let ((), bytes) = self.table.unreleased(physical)?;
        self.table.release(physical);
        Ok(bytes)
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), String> {
        self.check_multiples(bytes, address.0)?;
        self.table.check_map(address, bytes, physical)?;
        self.table.map(address, bytes, physical);
        Ok(())
    }

    fn set_access(&self, address: Address, bytes: u64) -> Result<(), String> {
        self.check_multiples(bytes, address.0)?;
        self.table.check_mapped(address, bytes)
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), String> {
        self.check_multiples(bytes, address.0)?;
        self.table.check_unmap(address, bytes)?;
        self.table.unmap(address, bytes);
        Ok(())
    }

    /// How many bytes from an address on lie before the next one that could be mapped.
    pub(super) fn unmapped_bytes_at(&self, address: u64) -> u64 {
        self.granularity - address % self.granularity
    }
}

impl SimDevice {
    /// Forgets the contents of those pieces that no longer exist.
    fn forget_dropped(&mut self, pieces: &[PhysicalId]) {
        if self.contents.are_unknown() {
            return;
        }
        for physical in pieces.iter().filter(|physical| !self.virtual_space.table.exists(**physical)) {
            self.contents.forget(PhysicalRegion::Created(*physical), 0, u64::MAX);
        }
    }

    /// Makes a change to the mappings, and gives the physical memory back that it leaves unused.
    fn change_mappings<T>(
        &mut self,
        change: impl FnOnce(&mut SimVirtualSpace) -> Result<T, String>,
    ) -> Result<T, String> {
        let before = self.virtual_space.table.held();
        let answer = change(&mut self.virtual_space);
        self.give_back(before - self.virtual_space.table.held(), self.clocks.now());
        answer
    }
}

impl SimDevice {
    /// The cost of a call about a mapped range: that of its mappings one by one. On an H200 access to 1 GiB of 512
    /// mappings took 24 ms, to 1 GiB of 33 mappings 1.2 ms.
    fn cost_by_mapping(&self, call: CallKind, address: Address, bytes: u64) -> Nanos {
        self.virtual_space.table.mapped_sizes(address, bytes).map(|size| self.profile.costs.cost(call, size)).sum()
    }

    fn conclude_mapped(&mut self, cost: Nanos, call: CallKind, answer: Result<(), String>) -> Result<(), DeviceError> {
        let answer = answer.map_err(|reason| DeviceError::InvalidValue { call, reason });
        self.conclude_costing(cost, Nanos::ZERO, call, answer)
    }
}

impl VirtualMemory for SimDevice {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let answer = self.virtual_space.reserve(bytes);
        self.conclude_allocation(CallKind::AddressReserve, bytes, answer)
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let answer = self.virtual_space.address_free(address, bytes);
        self.conclude_checked(CallKind::AddressFree, bytes, answer)
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        let answer = self
            .virtual_space
            .check_multiples(bytes, 0)
            .map(|()| self.memory.take(bytes).then(|| self.virtual_space.table.create((), bytes)));
        self.conclude_allocation(CallKind::MemCreate, bytes, answer)
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let answer = self.change_mappings(|space| space.release(physical));
        self.forget_dropped(&[physical]);
        let bytes = *answer.as_ref().unwrap_or(&0);
        self.conclude_checked(CallKind::MemRelease, bytes, answer.map(drop))
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let answer = self.virtual_space.map(address, bytes, physical);
        self.conclude_checked(CallKind::MemMap, bytes, answer)
    }

    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let cost = self.cost_by_mapping(CallKind::MemSetAccess, address, bytes);
        let answer = self.virtual_space.set_access(address, bytes);
        self.conclude_mapped(cost, CallKind::MemSetAccess, answer)
    }

    /// Simulated GPUs cannot reach each other.
    fn allow_peer(&mut self, _ordinal: u32) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let unmapped = match self.contents.are_unknown() {
            true => Vec::new(),
            false => self.virtual_space.table.physical_in(address, bytes),
        };
        let cost = self.cost_by_mapping(CallKind::MemUnmap, address, bytes);
        let answer = self.change_mappings(|space| space.unmap(address, bytes));
        self.forget_dropped(&unmapped);
        self.conclude_mapped(cost, CallKind::MemUnmap, answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, sim::SimConfig};
    use oomph_base::MIB;

    fn device() -> SimDevice {
        SimDevice::new(SimConfig::default()).unwrap()
    }

    fn refusal<T: std::fmt::Debug>(answer: Result<T, DeviceError>) -> String {
        match answer.unwrap_err() {
            DeviceError::InvalidValue { reason, .. } => reason,
            other => panic!("{other} is not a broken rule"),
        }
    }

    #[test]
    fn reserved_ranges_follow_each_other_in_steps_of_32_mib() {
        let mut device = device();
        let sizes = [100 * MIB, 32 * MIB, 2 * MIB, 64 * MIB];
        let bases = sizes.map(|bytes| device.reserve(bytes).unwrap());
        let first = 0x3_0200_0000;
        assert_eq!(bases.map(|base| base.0), [first, first + 128 * MIB, first + 160 * MIB, first + 192 * MIB]);
        device.address_free(bases[1], 32 * MIB).unwrap();
        assert_eq!(device.reserve(2 * MIB).unwrap(), bases[1]);
        assert_eq!(device.held_bytes(), 0);
    }

    #[test]
    fn physical_memory_counts_until_released() {
        let mut device = device();
        let base = device.reserve(64 * MIB).unwrap();
        let piece = device.create(20 * MIB).unwrap();
        assert_eq!(device.held_bytes(), 20 * MIB);
        device.map(base, 20 * MIB, piece).unwrap();
        device.map(base.offset(20 * MIB), 20 * MIB, piece).unwrap();
        device.set_access(base, 40 * MIB).unwrap();
        device.release(piece).unwrap();
        device.unmap(base, 20 * MIB).unwrap();
        assert_eq!(device.held_bytes(), 20 * MIB, "the second mapping keeps it");
        device.unmap(base.offset(20 * MIB), 20 * MIB).unwrap();
        assert_eq!(device.held_bytes(), 0);
        device.address_free(base, 64 * MIB).unwrap();
    }

    #[test]
    fn a_handle_kept_after_unmapping_keeps_the_memory() {
        let mut device = device();
        let base = device.reserve(2 * MIB).unwrap();
        let piece = device.create(2 * MIB).unwrap();
        device.map(base, 2 * MIB, piece).unwrap();
        device.unmap(base, 2 * MIB).unwrap();
        assert_eq!(device.held_bytes(), 2 * MIB);
        device.map(base, 2 * MIB, piece).unwrap();
        device.unmap(base, 2 * MIB).unwrap();
        device.release(piece).unwrap();
        assert_eq!(device.held_bytes(), 0);
    }

    #[test]
    fn granularity_is_enforced() {
        let mut device = device();
        assert!(refusal(device.reserve(MIB)).contains("not a multiple"));
        assert!(refusal(device.reserve(0)).contains("zero"));
        assert!(refusal(device.create(3 * MIB)).contains("not a multiple"));
        let base = device.reserve(64 * MIB).unwrap();
        let piece = device.create(2 * MIB).unwrap();
        assert!(refusal(device.map(base.offset(512), 2 * MIB, piece)).contains("address"));
        assert!(refusal(device.unmap(base.offset(512), 2 * MIB)).contains("address"));
        assert!(refusal(device.map(Address(u64::MAX - 2 * MIB + 1), 2 * MIB, piece)).contains("beyond"));
    }

    #[test]
    fn memory_is_mapped_once_in_reserved_ranges() {
        let mut device = device();
        let base = device.reserve(4 * MIB).unwrap();
        device.reserve(4 * MIB).unwrap();
        let piece = device.create(4 * MIB).unwrap();
        assert!(refusal(device.map(base, 2 * MIB, piece)).contains("mapped whole"));
        assert!(refusal(device.map(base.offset(2 * MIB), 4 * MIB, piece)).contains("one reserved range"));
        assert!(refusal(device.map(Address(2 * MIB), 4 * MIB, piece)).contains("one reserved range"));
        device.map(base, 4 * MIB, piece).unwrap();
        let other = device.create(2 * MIB).unwrap();
        assert!(refusal(device.map(base.offset(2 * MIB), 2 * MIB, other)).contains("already mapped"));
        assert!(refusal(device.map(base, 2 * MIB, PhysicalId(99))).contains("no physical memory"));
    }

    #[test]
    fn mappings_are_removed_as_they_were_made() {
        let mut device = device();
        let base = device.reserve(16 * MIB).unwrap();
        for offset in [0, 4 * MIB] {
            let piece = device.create(4 * MIB).unwrap();
            device.map(base.offset(offset), 4 * MIB, piece).unwrap();
        }
        assert!(refusal(device.unmap(base, 2 * MIB)).contains("only partly"));
        assert!(refusal(device.unmap(base.offset(2 * MIB), 6 * MIB)).contains("only partly"));
        assert!(refusal(device.unmap(base.offset(8 * MIB), 2 * MIB)).contains("nothing is mapped"));
        assert!(refusal(device.set_access(base, 10 * MIB)).contains("nothing is mapped"));
        assert!(refusal(device.address_free(base, 16 * MIB)).contains("still mapped"));
        device.set_access(base.offset(2 * MIB), 4 * MIB).unwrap();
        device.unmap(base, 8 * MIB).unwrap();
        assert!(refusal(device.address_free(base, 8 * MIB)).contains("has"));
        assert!(refusal(device.address_free(base.offset(2 * MIB), 2 * MIB)).contains("no reserved range"));
        device.address_free(base, 16 * MIB).unwrap();
    }

    #[test]
    fn a_handle_is_released_once_and_not_used_afterwards() {
        let mut device = device();
        let base = device.reserve(4 * MIB).unwrap();
        let piece = device.create(2 * MIB).unwrap();
        device.map(base, 2 * MIB, piece).unwrap();
        device.release(piece).unwrap();
        assert!(refusal(device.release(piece)).contains("was released"));
        assert!(refusal(device.map(base.offset(2 * MIB), 2 * MIB, piece)).contains("was released"));
        device.unmap(base, 2 * MIB).unwrap();
        assert!(refusal(device.release(piece)).contains("no physical memory"));
    }

    #[test]
    fn physical_memory_and_addresses_run_out() {
        let mut device = device();
        assert!(device.create(1 << 40).unwrap_err().is_out_of_memory());
        assert!(device.reserve(1 << 50).unwrap_err().is_out_of_memory());
        assert_eq!(device.held_bytes(), 0);
        assert_eq!(device.calls().failures, 2);
    }
}

//! Address space and physical memory handled apart, with the driver's rules checked.
//!
//! Reserved ranges start at the address that the real driver gives first, and each follows the one before it in steps
//! of 32 MiB. Addresses given back are used again, the lowest fitting place first.

use std::collections::BTreeMap;

use super::{SimDevice, address_space::RANGE_BYTES, contents::Ground, holes::Holes};
use crate::device::{CallKind, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::{Address, GIB};

/// The first reserved range starts here.
const FIRST: u64 = 0x3_0200_0000;
/// Reserved ranges end here.
const END: u64 = 64 * 1024 * GIB;

/// Reserved ranges, pieces of physical memory, and what is mapped where.
#[derive(Clone, Debug)]
pub(super) struct VirtualSpace {
    granularity: u64,
    /// In units of [`RANGE_BYTES`].
    unused: Holes,
    /// Length by address.
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
    /// Until released and unmapped everywhere. Numbers are never used again.
    pieces: BTreeMap<PhysicalId, Piece>,
    next_piece: u64,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    physical: PhysicalId,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    released: bool,
    mappings: u32,
}

/// Why a call is refused, in words.
type Broken = String;

impl VirtualSpace {
    pub(super) fn new(granularity: u64) -> VirtualSpace {
        VirtualSpace {
            granularity,
            unused: Holes::new(FIRST / RANGE_BYTES, (END - FIRST) / RANGE_BYTES),
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pieces: BTreeMap::new(),
            next_piece: 1,
        }
    }

    /// Whether every one of these is a multiple of the granularity, and the first, a length, is not zero.
    fn check_multiples(&self, bytes: u64, address: u64) -> Result<(), Broken> {
        if bytes == 0 {
            return Err("the size is zero".to_owned());
        }
        for (what, value) in [("size", bytes), ("address", address)] {
            if !value.is_multiple_of(self.granularity) {
                return Err(format!("the {what} {value:#x} is not a multiple of {:#x}", self.granularity));
            }
        }
        match address.checked_add(bytes) {
            Some(_) => Ok(()),
            None => Err("the range ends beyond the address space".to_owned()),
        }
    }

    /// The address, or `None` where the address space is used up.
    fn reserve(&mut self, bytes: u64) -> Result<Option<Address>, Broken> {
        self.check_multiples(bytes, 0)?;
        let start = self.take_range(bytes);
        if let Some(start) = start {
            self.reserved.insert(start, bytes);
        }
        Ok(start.map(Address))
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), Broken> {
        match self.reserved.get(&address.0) {
            None => return Err(format!("no reserved range starts at {address}")),
            Some(&reserved) if reserved != bytes => {
                return Err(format!("the range at {address} has {reserved} bytes, not {bytes}"));
            }
            Some(_) => {}
        }
        if let Some((&mapped, _)) = self.mapped.range(address.0..address.0 + bytes).next() {
            return Err(format!("memory is still mapped at {}", Address(mapped)));
        }
        self.reserved.remove(&address.0);
        self.give_back_range(address.0, bytes);
        Ok(())
    }

    /// Takes addresses for memory that is not mapped piece by piece: pools lie among the reserved ranges.
    pub(super) fn take_range(&mut self, bytes: u64) -> Option<u64> {
        self.unused.take_lowest(bytes.div_ceil(RANGE_BYTES)).map(|range| range * RANGE_BYTES)
    }

    /// Gives back what [`take_range`](VirtualSpace::take_range) took.
    pub(super) fn give_back_range(&mut self, start: u64, bytes: u64) {
        self.unused.give_back(start / RANGE_BYTES, bytes.div_ceil(RANGE_BYTES));
    }

    fn create(&mut self, bytes: u64) -> PhysicalId {
        let physical = PhysicalId(self.next_piece);
        self.next_piece += 1;
        self.pieces.insert(physical, Piece { bytes, released: false, mappings: 0 });
        physical
    }

    /// Size of the piece, and the bytes that are free again.
    fn release(&mut self, physical: PhysicalId) -> Result<(u64, u64), Broken> {
        let piece = self.piece(physical)?;
        piece.released = true;
        let bytes = piece.bytes;
        Ok((bytes, self.drop_if_unused(physical)))
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), Broken> {
        self.check_multiples(bytes, address.0)?;
        let size = self.piece(physical)?.bytes;
        if size != bytes {
            return Err(format!("the physical memory has {size} bytes, and it is mapped whole, not {bytes} of them"));
        }
        let end = address.0 + bytes;
        if self.reserved.range(..=address.0).next_back().is_none_or(|(&start, &length)| end > start + length) {
            return Err(format!("{address} to {} does not lie in one reserved range", Address(end)));
        }
        if let Some((&other, mapping)) = self.mapped.range(..end).next_back()
            && other + mapping.bytes > address.0
        {
            return Err(format!("memory is already mapped at {}", Address(other)));
        }
        self.mapped.insert(address.0, Mapping { bytes, physical });
        self.piece(physical)?.mappings += 1;
        Ok(())
    }

    fn set_access(&self, address: Address, bytes: u64) -> Result<(), Broken> {
        self.check_multiples(bytes, address.0)?;
        let end = address.0 + bytes;
        let mut covered = address.0;
        let first = self.mapped.range(..=address.0).next_back().map_or(address.0, |(&start, _)| start);
        for (&start, mapping) in self.mapped.range(first..end) {
            if start > covered {
                break;
            }
            covered = covered.max(start + mapping.bytes);
        }
        if covered < end { Err(format!("nothing is mapped at {}", Address(covered))) } else { Ok(()) }
    }

    /// The bytes that are free again.
    fn unmap(&mut self, address: Address, bytes: u64) -> Result<u64, Broken> {
        self.check_multiples(bytes, address.0)?;
        let end = address.0 + bytes;
        let cut_in_two = |at: u64| Err(format!("the mapping at {} lies only partly in the range", Address(at)));
        if let Some((&start, mapping)) = self.mapped.range(..address.0).next_back()
            && start + mapping.bytes > address.0
        {
            return cut_in_two(start);
        }
        let inside: Vec<(u64, Mapping)> =
            self.mapped.range(address.0..end).map(|(&at, &mapping)| (at, mapping)).collect();
        match inside.last() {
            None => return Err(format!("nothing is mapped at {address}")),
            Some(&(start, mapping)) if start + mapping.bytes > end => return cut_in_two(start),
            Some(_) => {}
        }
        let mut freed = 0;
        for (start, mapping) in inside {
            self.mapped.remove(&start);
            if let Some(piece) = self.pieces.get_mut(&mapping.physical) {
                piece.mappings -= 1;
            }
            freed += self.drop_if_unused(mapping.physical);
        }
        Ok(freed)
    }

    /// The physical memory at an address, where in it that is, and how many bytes of it follow there.
    pub(super) fn physical_at(&self, address: u64) -> Option<(PhysicalId, u64, u64)> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        let left = (start + mapping.bytes).checked_sub(address).filter(|&left| left > 0)?;
        Some((mapping.physical, address - start, left))
    }

    /// How many bytes from an address on lie before the next one that could be mapped.
    pub(super) fn unmapped_bytes_at(&self, address: u64) -> u64 {
        self.granularity - address % self.granularity
    }

    /// The pieces that are mapped in a range.
    fn pieces_in(&self, address: Address, bytes: u64) -> Vec<PhysicalId> {
        let end = address.0.saturating_add(bytes);
        self.mapped.range(address.0..end.max(address.0)).map(|(_, mapping)| mapping.physical).collect()
    }

    /// A piece whose handle is still held.
    fn piece(&mut self, physical: PhysicalId) -> Result<&mut Piece, Broken> {
        match self.pieces.get_mut(&physical) {
            Some(piece) if !piece.released => Ok(piece),
            Some(_) => Err(format!("the handle of physical memory {} was released", physical.0)),
            None => Err(format!("there is no physical memory {}", physical.0)),
        }
    }

    fn drop_if_unused(&mut self, physical: PhysicalId) -> u64 {
        match self.pieces.get(&physical) {
            Some(piece) if piece.released && piece.mappings == 0 => {
                let bytes = piece.bytes;
                self.pieces.remove(&physical);
                bytes
            }
            _ => 0,
        }
    }
}

impl SimDevice {
    /// What was in those of some pieces that are gone is gone too.
    fn forget_dropped(&mut self, pieces: &[PhysicalId]) {
        if self.contents.are_unknown() {
            return;
        }
        for physical in pieces.iter().filter(|physical| !self.virtual_space.pieces.contains_key(physical)) {
            self.contents.forget(Ground::Physical(*physical), 0, u64::MAX);
        }
    }
}

impl VirtualMemory for SimDevice {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::AddressReserve;
        let answer = match self.virtual_space.reserve(bytes) {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(DeviceError::OutOfMemory { call, requested: bytes }),
            Err(reason) => Err(DeviceError::InvalidValue { call, reason }),
        };
        self.conclude(call, bytes, answer)
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let answer = self.virtual_space.address_free(address, bytes);
        self.conclude_checked(CallKind::AddressFree, bytes, answer)
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        let call = CallKind::MemCreate;
        let answer = match self.virtual_space.check_multiples(bytes, 0) {
            Err(reason) => Err(DeviceError::InvalidValue { call, reason }),
            Ok(()) if !self.physical.take(bytes) => Err(DeviceError::OutOfMemory { call, requested: bytes }),
            Ok(()) => Ok(self.virtual_space.create(bytes)),
        };
        self.conclude(call, bytes, answer)
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let answer = self.virtual_space.release(physical);
        self.forget_dropped(&[physical]);
        let bytes = answer.as_ref().map_or(0, |&(bytes, _)| bytes);
        let answer = answer.map(|(_, freed)| self.physical.give_back(freed));
        self.conclude_checked(CallKind::MemRelease, bytes, answer)
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let answer = self.virtual_space.map(address, bytes, physical);
        self.conclude_checked(CallKind::MemMap, bytes, answer)
    }

    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let answer = self.virtual_space.set_access(address, bytes);
        self.conclude_checked(CallKind::MemSetAccess, bytes, answer)
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        self.settle_contents(self.clocks.now());
        let unmapped =
            if self.contents.are_unknown() { Vec::new() } else { self.virtual_space.pieces_in(address, bytes) };
        let answer = self.virtual_space.unmap(address, bytes).map(|freed| self.physical.give_back(freed));
        self.forget_dropped(&unmapped);
        self.conclude_checked(CallKind::MemUnmap, bytes, answer)
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
            other => panic!("{other} is no broken rule"),
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
    fn physical_memory_counts_until_it_is_released_and_unmapped() {
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
    fn sizes_and_addresses_must_be_multiples_of_the_granularity() {
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
    fn memory_is_mapped_whole_where_it_is_reserved_and_only_once() {
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

//! Bookkeeping of virtual memory: reserved ranges, physical memory, and what is mapped where. The
//! driver's rules are checked here, for the simulated and the real device alike.

use std::collections::BTreeMap;

use super::PhysicalId;
use oomph_base::Address;

/// Ranges, physical memory and mappings of one device. `H` is what the device keeps per piece of
/// physical memory.
#[derive(Clone, Debug, Default)]
pub(super) struct MappingTable<H> {
    /// Length by start.
    reserved: BTreeMap<Address, u64>,
    mapped: BTreeMap<Address, MappedRange>,
    /// Until it is released and unmapped everywhere. Numbers are never reused.
    physical: BTreeMap<PhysicalId, PhysicalPiece<H>>,
    last_physical: u64,
    held: u64,
}

/// Start and length.
#[cfg(feature = "cuda")]
type AddressRange = (Address, u64);

#[derive(Clone, Copy, Debug)]
struct MappedRange {
    bytes: u64,
    physical: PhysicalId,
    is_accessible: bool,
}

#[derive(Clone, Copy, Debug)]
struct PhysicalPiece<H> {
    handle: H,
    bytes: u64,
    released: bool,
    mappings: u32,
}

impl<H: Copy + Default> MappingTable<H> {
    /// Physical bytes that are created and not yet both released and unmapped.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn reserve(&mut self, address: Address, bytes: u64) {
        self.reserved.insert(address, bytes);
    }

    pub(super) fn check_address_free(&self, address: Address, bytes: u64) -> Result<(), String> {
        match self.reserved.get(&address) {
            None => return Err(format!("no reserved range starts at {address}")),
            Some(&reserved) if reserved != bytes => {
                return Err(format!("the range at {address} has {reserved} bytes, not {bytes}"));
            }
            Some(_) => {}
        }
        match self.mapped.range(address..address.offset(bytes)).next() {
            Some((mapped, _)) => Err(format!("memory is still mapped at {mapped}")),
            None => Ok(()),
        }
    }

    pub(super) fn address_free(&mut self, address: Address) {
        self.reserved.remove(&address);
    }

    /// The handle that [`create`](MappingTable::create) gives next.
    pub(super) fn next_physical(&self) -> PhysicalId {
        PhysicalId(self.last_physical + 1)
    }

    pub(super) fn create(&mut self, handle: H, bytes: u64) -> PhysicalId {
        let physical = self.next_physical();
        self.create_as(physical, handle, bytes);
        physical
    }

    /// Adds physical memory under a given handle.
    pub(super) fn create_as(&mut self, physical: PhysicalId, handle: H, bytes: u64) {
        self.last_physical = self.last_physical.max(physical.0);
        self.held += bytes;
        self.physical.insert(physical, PhysicalPiece { handle, bytes, released: false, mappings: 0 });
    }

    /// What the device keeps for physical memory whose handle is not released, and its size.
    pub(super) fn unreleased(&self, physical: PhysicalId) -> Result<(H, u64), String> {
        match self.physical.get(&physical) {
            Some(piece) if !piece.released => Ok((piece.handle, piece.bytes)),
            Some(_) => Err(format!("the handle of physical memory {} was released", physical.0)),
            None => Err(format!("there is no physical memory {}", physical.0)),
        }
    }

    /// Whether physical memory still exists, released or not.
    pub(super) fn exists(&self, physical: PhysicalId) -> bool {
        self.physical.contains_key(&physical)
    }

    pub(super) fn release(&mut self, physical: PhysicalId) {
        if let Some(piece) = self.physical.get_mut(&physical) {
            piece.released = true;
        }
        self.drop_if_unused(physical);
    }

    pub(super) fn check_map(&self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), String> {
        let (_, size) = self.unreleased(physical)?;
        if size != bytes {
            return Err(format!("the physical memory has {size} bytes, and it is mapped whole, not {bytes} of them"));
        }
        let end = end_of(address, bytes)?;
        if self.reserved.range(..=address).next_back().is_none_or(|(start, length)| end > start.offset(*length)) {
            return Err(format!("{address} to {end} does not lie in one reserved range"));
        }
        match self.mapped.range(..end).next_back() {
            Some((other, mapping)) if other.offset(mapping.bytes) > address => {
                Err(format!("memory is already mapped at {other}"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) {
        if let Some(piece) = self.physical.get_mut(&physical) {
            piece.mappings += 1;
            self.mapped.insert(address, MappedRange { bytes, physical, is_accessible: false });
        }
    }

    /// Checks that a range is mapped without a gap.
    pub(super) fn check_mapped(&self, address: Address, bytes: u64) -> Result<(), String> {
        self.check_covered(address, bytes, |_| true)
    }

    /// Whether kernels may touch all of a range.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only the real device runs kernels"))]
    pub(super) fn is_accessible(&self, address: Address, bytes: u64) -> bool {
        self.check_covered(address, bytes, |mapping| mapping.is_accessible).is_ok()
    }

    fn check_covered(&self, address: Address, bytes: u64, counts: impl Fn(&MappedRange) -> bool) -> Result<(), String> {
        let end = end_of(address, bytes)?;
        let mut covered = address;
        while covered < end {
            let mapping = self.mapped.range(..=covered).next_back().filter(|(_, mapping)| counts(mapping));
            match mapping.map(|(start, mapping)| start.offset(mapping.bytes)) {
                Some(further) if further > covered => covered = further,
                _ => return Err(format!("nothing is mapped at {covered}")),
            }
        }
        Ok(())
    }

    /// The sizes of the mappings that start in a range.
    pub(super) fn mapped_sizes(&self, address: Address, bytes: u64) -> impl Iterator<Item = u64> + '_ {
        self.mapped.range(address..Address(address.0.saturating_add(bytes))).map(|(_, mapping)| mapping.bytes)
    }

    /// Notes that kernels may touch the mappings that start in a range.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only the real device runs kernels"))]
    pub(super) fn allow_access(&mut self, address: Address, bytes: u64) {
        for (_, mapping) in self.mapped.range_mut(address..Address(address.0.saturating_add(bytes))) {
            mapping.is_accessible = true;
        }
    }

    /// Start and length of what kernels may touch.
    #[cfg(feature = "cuda")]
    pub(super) fn accessible(&self) -> Vec<AddressRange> {
        let accessible = self.mapped.iter().filter(|(_, mapping)| mapping.is_accessible);
        accessible.map(|(&address, mapping)| (address, mapping.bytes)).collect()
    }

    pub(super) fn check_unmap(&self, address: Address, bytes: u64) -> Result<(), String> {
        let end = end_of(address, bytes)?;
        let cut_in_two = |at: &Address| Err(format!("the mapping at {at} lies only partly in the range"));
        if let Some((start, mapping)) = self.mapped.range(..address).next_back()
            && start.offset(mapping.bytes) > address
        {
            return cut_in_two(start);
        }
        match self.mapped.range(address..end).next_back() {
            None => Err(format!("nothing is mapped at {address}")),
            Some((start, mapping)) if start.offset(mapping.bytes) > end => cut_in_two(start),
            Some(_) => Ok(()),
        }
    }

    /// Removes the mappings that start in a range.
    pub(super) fn unmap(&mut self, address: Address, bytes: u64) {
        let end = Address(address.0.saturating_add(bytes));
        while let Some((&start, &MappedRange { physical, .. })) = self.mapped.range(address..end).next() {
            self.mapped.remove(&start);
            if let Some(piece) = self.physical.get_mut(&physical) {
                piece.mappings -= 1;
            }
            self.drop_if_unused(physical);
        }
    }

    /// The physical memory at an address, the offset in it, and how many bytes of it follow there.
    pub(super) fn physical_at(&self, address: Address) -> Option<(PhysicalId, u64, u64)> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        let left = start.offset(mapping.bytes).0.checked_sub(address.0).filter(|&left| left > 0)?;
        Some((mapping.physical, address.0 - start.0, left))
    }

    /// The physical memory of the mappings that start in a range.
    pub(super) fn physical_in(&self, address: Address, bytes: u64) -> Vec<PhysicalId> {
        let end = Address(address.0.saturating_add(bytes));
        self.mapped.range(address..end).map(|(_, mapping)| mapping.physical).collect()
    }

    /// All mappings, unreleased handles and reserved ranges, in the order in which they must be
    /// given back.
    #[cfg(feature = "cuda")]
    pub(super) fn take_all(&mut self) -> (Vec<AddressRange>, Vec<H>, Vec<AddressRange>) {
        let table = std::mem::take(self);
        let mapped = table.mapped.iter().map(|(&address, mapping)| (address, mapping.bytes)).collect();
        let unreleased = table.physical.values().filter(|piece| !piece.released).map(|piece| piece.handle).collect();
        (mapped, unreleased, table.reserved.into_iter().collect())
    }

    fn drop_if_unused(&mut self, physical: PhysicalId) {
        if let Some(piece) = self.physical.get(&physical)
            && piece.released
            && piece.mappings == 0
        {
            self.held -= piece.bytes;
            self.physical.remove(&physical);
        }
    }
}

fn end_of(address: Address, bytes: u64) -> Result<Address, String> {
    address.0.checked_add(bytes).map(Address).ok_or_else(|| "the range ends beyond the address space".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::MIB;

    #[test]
    fn physical_memory_is_held_until_released() {
        let mut table = MappingTable::default();
        let piece = table.create(7, 4 * MIB);
        table.map(Address(32 * MIB), 4 * MIB, piece);
        table.release(piece);
        assert_eq!(table.held(), 4 * MIB);
        assert!(table.unreleased(piece).unwrap_err().contains("was released"));
        table.unmap(Address(32 * MIB), 4 * MIB);
        assert_eq!(table.held(), 0);
        assert!(table.unreleased(piece).unwrap_err().contains("there is no"));
    }

    #[test]
    fn access_must_be_granted_without_gaps() {
        let mut table = MappingTable::default();
        for start in [32, 34, 38] {
            let piece = table.create((), 2 * MIB);
            table.map(Address(start * MIB), 2 * MIB, piece);
        }
        assert!(!table.is_accessible(Address(32 * MIB), 512), "mapped, but not yet accessible");
        table.allow_access(Address(32 * MIB), 8 * MIB);
        assert!(table.is_accessible(Address(33 * MIB), 3 * MIB));
        assert!(!table.is_accessible(Address(33 * MIB), 4 * MIB));
        table.unmap(Address(34 * MIB), 2 * MIB);
        assert!(!table.is_accessible(Address(33 * MIB), 2 * MIB));
    }
}

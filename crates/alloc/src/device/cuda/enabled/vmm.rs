//! Virtual memory: reserve, create, map, and their opposites.

use std::{collections::BTreeMap, ptr};

use cudarc::driver::sys;

use super::{CudaDevice, context, memory::covered};
use crate::device::{CallKind, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::Address;

/// No GPU has more addresses than this; what the driver says to more is not worth asking.
const ADDRESS_SPACE: u64 = 1 << 47;

/// What is reserved, created and mapped.
#[derive(Debug, Default)]
pub(super) struct VirtualSpace {
    /// Length by start.
    reserved: BTreeMap<Address, u64>,
    pieces: BTreeMap<PhysicalId, Piece>,
    mapped: BTreeMap<Address, (u64, PhysicalId)>,
    /// Ranges that kernels may touch: length by start.
    accessible: BTreeMap<Address, u64>,
    last_piece: u64,
    held: u64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
    released: bool,
    mappings: u32,
}

impl VirtualSpace {
    /// Physical bytes that are created and not yet both released and unmapped.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Whether all of a range can be touched.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        let Some(end) = address.0.checked_add(bytes) else { return false };
        let mut at = address;
        while at.0 < end {
            let Some((start, length)) = self.accessible.range(..=at).next_back() else { return false };
            if start.0 + length <= at.0 {
                return false;
            }
            at = Address(start.0 + length);
        }
        true
    }

    /// Gives everything back. The context is current and idle, and what fails cannot be helped.
    pub(super) fn release_all(&mut self) {
        for (address, (bytes, _)) in std::mem::take(&mut self.mapped) {
            // SAFETY: exactly this range was mapped, and no work is left that could touch it.
            unsafe { sys::cuMemUnmap(address.0, bytes as usize) };
        }
        for (_, piece) in std::mem::take(&mut self.pieces) {
            if !piece.released {
                // SAFETY: the handle was created and not yet released.
                unsafe { sys::cuMemRelease(piece.handle) };
            }
        }
        for (address, bytes) in std::mem::take(&mut self.reserved) {
            // SAFETY: exactly this range was reserved, and nothing is mapped in it.
            unsafe { sys::cuMemAddressFree(address.0, bytes as usize) };
        }
        *self = VirtualSpace::default();
    }

    fn live(&self, physical: PhysicalId) -> Result<Piece, String> {
        match self.pieces.get(&physical) {
            Some(piece) if !piece.released => Ok(*piece),
            Some(_) => Err(format!("physical memory {} was released", physical.0)),
            None => Err(format!("there is no physical memory {}", physical.0)),
        }
    }

    fn note_created(&mut self, handle: sys::CUmemGenericAllocationHandle, bytes: u64) -> PhysicalId {
        self.last_piece += 1;
        self.held += bytes;
        let physical = PhysicalId(self.last_piece);
        self.pieces.insert(physical, Piece { handle, bytes, released: false, mappings: 0 });
        physical
    }

    fn note_released(&mut self, physical: PhysicalId) {
        if let Some(piece) = self.pieces.get_mut(&physical) {
            piece.released = true;
        }
        self.forget_if_gone(physical);
    }

    fn note_mapped(&mut self, address: Address, bytes: u64, physical: PhysicalId) {
        self.mapped.insert(address, (bytes, physical));
        if let Some(piece) = self.pieces.get_mut(&physical) {
            piece.mappings += 1;
        }
    }

    fn note_accessible(&mut self, address: Address, bytes: u64) {
        let end = address.0.saturating_add(bytes);
        let granted: Vec<(Address, u64)> =
            self.mapped.range(address..Address(end)).map(|(&start, &(length, _))| (start, length)).collect();
        self.accessible.extend(granted);
    }

    fn note_unmapped(&mut self, address: Address, bytes: u64) {
        let end = Address(address.0.saturating_add(bytes));
        while let Some((&start, &(_, physical))) = self.mapped.range(address..end).next() {
            self.mapped.remove(&start);
            self.accessible.remove(&start);
            if let Some(piece) = self.pieces.get_mut(&physical) {
                piece.mappings -= 1;
            }
            self.forget_if_gone(physical);
        }
    }

    fn forget_if_gone(&mut self, physical: PhysicalId) {
        if let Some(piece) = self.pieces.get(&physical)
            && piece.released
            && piece.mappings == 0
        {
            self.held -= piece.bytes;
            self.pieces.remove(&physical);
        }
    }
}

impl VirtualMemory for CudaDevice {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::AddressReserve;
        if bytes > ADDRESS_SPACE {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let mut start = 0;
        // SAFETY: the pointer is to a live address; the driver checks the size.
        self.drive(call, bytes, || unsafe { sys::cuMemAddressReserve(&raw mut start, bytes as usize, 0, 0, 0) })?;
        self.virtual_space.reserved.insert(Address(start), bytes);
        Ok(Address(start))
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::AddressFree;
        if self.virtual_space.reserved.get(&address) != Some(&bytes) {
            return self.refuse_because(call, format!("no reserved range of {bytes} bytes starts at {address}"));
        }
        if self.virtual_space.mapped.range(address..address.offset(bytes)).next().is_some() {
            return self.refuse_because(call, format!("the range at {address} is still mapped"));
        }
        // SAFETY: exactly this range is reserved, and nothing is mapped in it.
        self.drive(call, 0, || unsafe { sys::cuMemAddressFree(address.0, bytes as usize) })?;
        self.virtual_space.reserved.remove(&address);
        Ok(())
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        let call = CallKind::MemCreate;
        if bytes > self.props.total_bytes {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let properties = context::pinned_on(self.context.device);
        let mut handle = 0;
        // SAFETY: both pointers are to live values; the driver checks the size.
        self.drive(call, bytes, || unsafe {
            sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const properties, 0)
        })?;
        Ok(self.virtual_space.note_created(handle, bytes))
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        let call = CallKind::MemRelease;
        let handle = match self.virtual_space.live(physical) {
            Ok(piece) => piece.handle,
            Err(reason) => return self.refuse_because(call, reason),
        };
        // SAFETY: the handle was created and not yet released; mappings keep the memory itself.
        self.drive(call, 0, || unsafe { sys::cuMemRelease(handle) })?;
        self.virtual_space.note_released(physical);
        Ok(())
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        let call = CallKind::MemMap;
        let piece = match self.virtual_space.live(physical) {
            Ok(piece) => piece,
            Err(reason) => return self.refuse_because(call, reason),
        };
        if piece.bytes != bytes {
            return self.refuse_because(call, format!("{} bytes are mapped whole, not {bytes}", piece.bytes));
        }
        if !covered(&self.virtual_space.reserved, address, bytes) {
            return self.refuse_because(call, format!("{bytes} bytes at {address} are not in one reserved range"));
        }
        // SAFETY: the range is reserved by us and the handle is live; the driver refuses what is mapped already.
        self.drive(call, 0, || unsafe { sys::cuMemMap(address.0, bytes as usize, 0, piece.handle, 0) })?;
        self.virtual_space.note_mapped(address, bytes, physical);
        Ok(())
    }

    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let access = sys::CUmemAccessDesc {
            location: context::location(self.context.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pointer is to one live description; the driver refuses ranges that are not mapped.
        self.drive(CallKind::MemSetAccess, 0, || unsafe {
            sys::cuMemSetAccess(address.0, bytes as usize, ptr::from_ref(&access), 1)
        })?;
        self.virtual_space.note_accessible(address, bytes);
        Ok(())
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::MemUnmap;
        let end = address.0.saturating_add(bytes);
        let mut inside = self.virtual_space.mapped.range(address..Address(end)).peekable();
        if inside.peek().is_none() || inside.any(|(start, (length, _))| start.0 + length > end) {
            return self.refuse_because(call, format!("no whole mappings lie in {bytes} bytes at {address}"));
        }
        // SAFETY: the range covers whole mappings of ours; the caller has waited for the work that touches them, and
        // the driver waits for the rest.
        self.drive(call, 0, || unsafe { sys::cuMemUnmap(address.0, bytes as usize) })?;
        self.virtual_space.note_unmapped(address, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::MIB;

    #[test]
    fn physical_memory_is_held_until_it_is_released_and_unmapped() {
        let mut space = VirtualSpace::default();
        let piece = space.note_created(7, 4 * MIB);
        space.note_mapped(Address(32 * MIB), 4 * MIB, piece);
        space.note_released(piece);
        assert_eq!(space.held(), 4 * MIB);
        assert!(space.live(piece).unwrap_err().contains("was released"));
        space.note_unmapped(Address(32 * MIB), 4 * MIB);
        assert_eq!(space.held(), 0);
        assert!(space.live(piece).unwrap_err().contains("there is no"));
    }

    #[test]
    fn a_range_can_be_touched_where_access_was_granted_without_a_gap() {
        let mut space = VirtualSpace::default();
        for (number, start) in [32, 34, 38].into_iter().enumerate() {
            let piece = space.note_created(number as u64, 2 * MIB);
            space.note_mapped(Address(start * MIB), 2 * MIB, piece);
        }
        assert!(!space.covers(Address(32 * MIB), 512), "mapped, but not yet accessible");
        space.note_accessible(Address(32 * MIB), 8 * MIB);
        assert!(space.covers(Address(33 * MIB), 3 * MIB));
        assert!(!space.covers(Address(33 * MIB), 4 * MIB));
        space.note_unmapped(Address(34 * MIB), 2 * MIB);
        assert!(!space.covers(Address(33 * MIB), 2 * MIB));
    }
}

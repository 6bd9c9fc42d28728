//! Chunks of physical memory and the ranges they are mapped into.
//!
//! Every function here either succeeds or undoes what it did. What cannot be undone is kept and
//! given back later, so that a failing driver call loses neither memory nor addresses.

use crate::device::{Device, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::Address;

/// Memory and addresses that must still be given back to the device.
#[derive(Clone, Debug, Default)]
pub(super) struct MappingLeftovers {
    items: Vec<Leftover>,
}

#[derive(Clone, Copy, Debug)]
enum Leftover {
    /// A reserved range and how many of its bytes are mapped.
    Range {
        address: Address,
        bytes: u64,
        mapped: u64,
    },
    Physical(PhysicalId),
}

/// The device's virtual memory; a strategy that requires it spans on no device without.
pub(super) fn virtual_memory(device: &mut dyn Device) -> Result<&mut dyn VirtualMemory, DeviceError> {
    device.virtual_memory()
}

impl MappingLeftovers {
    /// Gives everything back; if a call fails, the rest is kept.
    pub(super) fn clear(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(item) = self.items.last_mut() {
            let memory = virtual_memory(device)?;
            match item {
                Leftover::Range { address, mapped, .. } if *mapped > 0 => {
                    memory.unmap(*address, *mapped)?;
                    *mapped = 0;
                    continue;
                }
                Leftover::Range { address, bytes, .. } => memory.address_free(*address, *bytes)?,
                Leftover::Physical(physical) => memory.release(*physical)?,
            }
            self.items.pop();
        }
        Ok(())
    }

    /// Creates `count` chunks of physical memory, or none.
    pub(super) fn create(
        &mut self,
        device: &mut dyn Device,
        count: u64,
        chunk: u64,
    ) -> Result<Vec<PhysicalId>, DeviceError> {
        let mut chunks = Vec::new();
        for _ in 0..count {
            match virtual_memory(device)?.create(chunk) {
                Ok(physical) => chunks.push(physical),
                Err(error) => {
                    self.give_up(device, None, chunks);
                    return Err(error);
                }
            }
        }
        Ok(chunks)
    }

    /// Maps chunks one after the other into a new range.
    pub(super) fn map(
        &mut self,
        device: &mut dyn Device,
        chunks: impl ExactSizeIterator<Item = PhysicalId>,
        chunk: u64,
    ) -> Result<Address, DeviceError> {
        let bytes = chunks.len() as u64 * chunk;
        let memory = virtual_memory(device)?;
        let address = memory.reserve(bytes)?;
        let mut mapped = 0;
        for physical in chunks {
            if let Err(error) = memory.map(address.offset(mapped), chunk, physical) {
                self.give_up(device, Some(Leftover::Range { address, bytes, mapped }), Vec::new());
                return Err(error);
            }
            mapped += chunk;
        }
        if let Err(error) = memory.set_access(address, bytes) {
            self.give_up(device, Some(Leftover::Range { address, bytes, mapped }), Vec::new());
            return Err(error);
        }
        Ok(address)
    }

    /// Unmaps a range; its addresses and its own chunks become leftovers. If the unmap fails,
    /// nothing has changed.
    pub(super) fn dismantle(
        &mut self,
        device: &mut dyn Device,
        (address, bytes): (Address, u64),
        chunks: Vec<PhysicalId>,
    ) -> Result<(), DeviceError> {
        virtual_memory(device)?.unmap(address, bytes)?;
        self.items.extend(chunks.into_iter().map(Leftover::Physical));
        self.items.push(Leftover::Range { address, bytes, mapped: 0 });
        Ok(())
    }

    /// Gives back chunks that are not mapped.
    pub(super) fn give_back(&mut self, device: &mut dyn Device, chunks: Vec<PhysicalId>) {
        self.give_up(device, None, chunks);
    }

    /// Undoes an operation that failed. Errors are ignored here: what is left is tried again later.
    fn give_up(&mut self, device: &mut dyn Device, range: Option<Leftover>, chunks: Vec<PhysicalId>) {
        self.items.extend(chunks.into_iter().map(Leftover::Physical));
        self.items.extend(range);
        let _ = self.clear(device);
    }
}

//! Chunks of physical memory and the ranges they are mapped into, with what failing driver calls leave behind.
//!
//! Every function here either does its work or undoes it; what cannot be undone is kept and given back later, so that
//! a failing call loses neither memory nor addresses.

use crate::device::{Device, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::Address;

/// What is still to be given back to the device.
#[derive(Clone, Debug, Default)]
pub(super) struct Leftovers {
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    /// A reserved range and how many of its bytes are mapped.
    Range {
        address: Address,
        bytes: u64,
        mapped: u64,
    },
    Physical(PhysicalId),
}

/// The device's virtual memory; a strategy that requires it runs on no device without.
pub(super) fn virtual_memory(device: &mut dyn Device) -> Result<&mut dyn VirtualMemory, DeviceError> {
    device.require_virtual_memory()
}

impl Leftovers {
    /// Gives back what there is; where a call fails, the rest is kept.
    pub(super) fn clear(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(piece) = self.pieces.last_mut() {
            let memory = virtual_memory(device)?;
            match piece {
                Piece::Range { address, mapped, .. } if *mapped > 0 => {
                    memory.unmap(*address, *mapped)?;
                    *mapped = 0;
                    continue;
                }
                Piece::Range { address, bytes, .. } => memory.address_free(*address, *bytes)?,
                Piece::Physical(physical) => memory.release(*physical)?,
            }
            self.pieces.pop();
        }
        Ok(())
    }

    /// Takes physical memory, chunk by chunk; all or nothing.
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

    /// Maps chunks behind each other into a fresh range.
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
                self.give_up(device, Some(Piece::Range { address, bytes, mapped }), Vec::new());
                return Err(error);
            }
            mapped += chunk;
        }
        if let Err(error) = memory.set_access(address, bytes) {
            self.give_up(device, Some(Piece::Range { address, bytes, mapped }), Vec::new());
            return Err(error);
        }
        Ok(address)
    }

    /// Unmaps a range and gives its addresses back, and the chunks that are its own. Only a failing unmap leaves it as
    /// it was; what fails later is a leftover.
    pub(super) fn dismantle(
        &mut self,
        device: &mut dyn Device,
        (address, bytes): (Address, u64),
        chunks: Vec<PhysicalId>,
    ) -> Result<(), DeviceError> {
        virtual_memory(device)?.unmap(address, bytes)?;
        self.pieces.extend(chunks.into_iter().map(Piece::Physical));
        self.pieces.push(Piece::Range { address, bytes, mapped: 0 });
        Ok(())
    }

    /// Gives chunks back that belong to no range.
    pub(super) fn give_back(&mut self, device: &mut dyn Device, chunks: Vec<PhysicalId>) {
        self.give_up(device, None, chunks);
    }

    /// Undoes what was begun. An error on the way is not the one to tell of: what is left is tried again later.
    fn give_up(&mut self, device: &mut dyn Device, range: Option<Piece>, chunks: Vec<PhysicalId>) {
        self.pieces.extend(chunks.into_iter().map(Piece::Physical));
        self.pieces.extend(range);
        let _ = self.clear(device);
    }
}

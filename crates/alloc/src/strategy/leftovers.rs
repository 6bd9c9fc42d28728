//! Chunks of physical memory and the addresses they are mapped at.
//!
//! Every function here either succeeds or undoes what it did. What cannot be undone is kept and
//! given back later, so that a failing driver call loses neither memory nor addresses.

use crate::device::{Device, DeviceError, PhysicalId};
use oomph_base::Address;

/// Memory and addresses that must still be given back to the device, the last one first.
#[derive(Clone, Debug, Default)]
pub(super) struct MappingLeftovers(Vec<Leftover>);

#[derive(Clone, Copy, Debug)]
pub(super) enum Leftover {
    Physical(PhysicalId),
    /// A reserved range, by start and length.
    Addresses(Address, u64),
    /// A mapping, by start and length.
    Mapped(Address, u64),
}

impl MappingLeftovers {
    /// Something that must still be given back.
    pub(super) fn push(&mut self, leftover: Leftover) {
        self.0.push(leftover);
    }

    /// Gives everything back; if a call fails, the rest is kept.
    pub(super) fn clear(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&leftover) = self.0.last() {
            let memory = device.virtual_memory()?;
            match leftover {
                Leftover::Physical(physical) => memory.release(physical)?,
                Leftover::Addresses(address, bytes) => memory.address_free(address, bytes)?,
                Leftover::Mapped(address, bytes) => memory.unmap(address, bytes)?,
            }
            self.0.pop();
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
            match device.virtual_memory()?.create(chunk) {
                Ok(physical) => chunks.push(physical),
                Err(error) => {
                    self.give_back(device, chunks);
                    return Err(error);
                }
            }
        }
        Ok(chunks)
    }

    /// Maps chunks, given with their sizes, one after the other from `start` on, and returns the
    /// end. If a call fails, the mapping is undone and `beneath` is given back.
    pub(super) fn map(
        &mut self,
        device: &mut dyn Device,
        start: Address,
        chunks: impl Iterator<Item = (PhysicalId, u64)>,
        beneath: impl IntoIterator<Item = Leftover>,
    ) -> Result<Address, DeviceError> {
        let memory = device.virtual_memory()?;
        let mut mapped = 0;
        let result = { chunks }.try_for_each(|(physical, bytes)| {
            memory.map(start.offset(mapped), bytes, physical)?;
            mapped += bytes;
            Ok(())
        });
        if let Err(error) = result.and_then(|()| memory.set_access(start, mapped)) {
            self.0.extend(beneath);
            if mapped > 0 {
                self.push(Leftover::Mapped(start, mapped));
            }
            // What is left after an error here is tried again later.
            let _ = self.clear(device);
            return Err(error);
        }
        Ok(start.offset(mapped))
    }

    /// Gives back chunks that are not mapped, now or later.
    pub(super) fn give_back(&mut self, device: &mut dyn Device, chunks: Vec<PhysicalId>) {
        self.0.extend(chunks.into_iter().rev().map(Leftover::Physical));
        let _ = self.clear(device);
    }
}

//! The physical memory that is mapped at each address: the driver's side of the page heap.
//!
//! Physical memory comes in chunks of whole pages, as large as the growth that created them,
//! because a call costs the same whatever its size. A chunk is mapped and unmapped whole. A chunk
//! that is not mapped is loose: it was just created or unmapped, and is mapped next. After a
//! failing call it stays loose until the next try.
//!
//! This module knows addresses, not the blocks in them.

use std::collections::BTreeMap;

use crate::device::{Device, DeviceError, PhysicalId};
use crate::strategy::{leftovers::MappingLeftovers, unless_out_of_memory};
use oomph_base::Address;

/// Physical memory that is mapped as one.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhysicalChunk {
    physical: PhysicalId,
    pub(super) bytes: u64,
}

/// All reserved addresses and chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct ChunkMapping {
    /// Reserved ranges: start and length.
    ranges: Vec<(u64, u64)>,
    /// What is mapped where, by address.
    mapped: BTreeMap<u64, PhysicalChunk>,
    loose: Vec<PhysicalChunk>,
    /// Mappings that a failing call left behind. Their chunks are among the loose.
    leftovers: MappingLeftovers,
}

impl ChunkMapping {
    /// Reserves a range of addresses.
    pub(super) fn reserve(&mut self, device: &mut dyn Device, bytes: u64) -> Result<u64, DeviceError> {
        let base = device.virtual_memory()?.reserve(bytes)?.0;
        self.ranges.push((base, bytes));
        Ok(base)
    }

    /// Undoes what an earlier failing call left behind. It must succeed before anything else is
    /// called.
    pub(super) fn mend(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.leftovers.clear(device)
    }

    /// Bytes in loose chunks.
    pub(super) fn loose_bytes(&self) -> u64 {
        self.loose.iter().map(|chunk| chunk.bytes).sum()
    }

    /// How many chunks are mapped.
    pub(super) fn mapped_chunks(&self) -> u64 {
        self.mapped.len() as u64
    }

    /// Creates a loose chunk; returns false if the device has no more memory.
    pub(super) fn create(&mut self, device: &mut dyn Device, bytes: u64) -> Result<bool, DeviceError> {
        let created = unless_out_of_memory(device.virtual_memory()?.create(bytes))?;
        self.loose.extend(created.map(|physical| PhysicalChunk { physical, bytes }));
        Ok(created.is_some())
    }

    /// Maps all loose chunks one after the other from `start` on and returns the end. If a call
    /// fails, they are all loose again.
    pub(super) fn map_loose(&mut self, device: &mut dyn Device, start: u64) -> Result<u64, DeviceError> {
        let chunks = self.loose.iter().map(|chunk| (chunk.physical, chunk.bytes));
        let end = self.leftovers.map(device, Address(start), chunks, [])?;
        let mut address = start;
        for chunk in self.loose.drain(..) {
            self.mapped.insert(address, chunk);
            address += chunk.bytes;
        }
        Ok(end.0)
    }

    /// The chunks that lie wholly in `start..end`, by address.
    pub(super) fn chunks_within(
        &self,
        start: u64,
        end: u64,
    ) -> impl DoubleEndedIterator<Item = (u64, PhysicalChunk)> + '_ {
        let inside = self.mapped.range(start..end).map(|(&address, &chunk)| (address, chunk));
        inside.filter(move |&(address, chunk)| address + chunk.bytes <= end)
    }

    /// Unmaps the chunks in `start..end` in one call; they are loose then. The range begins and
    /// ends with a chunk.
    pub(super) fn unmap(&mut self, device: &mut dyn Device, start: u64, end: u64) -> Result<(), DeviceError> {
        device.virtual_memory()?.unmap(Address(start), end - start)?;
        while let Some((&address, &chunk)) = self.mapped.range(start..end).next() {
            self.mapped.remove(&address);
            self.loose.push(chunk);
        }
        Ok(())
    }

    /// Gives all loose chunks back to the device.
    pub(super) fn release_loose(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(chunk) = self.loose.last() {
            device.virtual_memory()?.release(chunk.physical)?;
            self.loose.pop();
        }
        Ok(())
    }

    /// Whether no range is left.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Gives back one range of addresses, in which nothing is mapped; returns its start, or `None`
    /// if none is left.
    pub(super) fn release_range(&mut self, device: &mut dyn Device) -> Result<Option<u64>, DeviceError> {
        let Some(&(base, bytes)) = self.ranges.last() else { return Ok(None) };
        device.virtual_memory()?.address_free(Address(base), bytes)?;
        self.ranges.pop();
        Ok(Some(base))
    }
}

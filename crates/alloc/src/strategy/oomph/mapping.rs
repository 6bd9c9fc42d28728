//! Which physical memory lies behind which addresses: the driver's side of the page heap.
//!
//! Physical memory comes in chunks of whole pages, as large as the growth that made them, because a call costs the same
//! whatever its size. A chunk is mapped and unmapped whole. One that is mapped nowhere is loose: it has just been made or
//! taken from somewhere, and is mapped next; after a failing call it waits here for the next try.
//!
//! This module knows addresses and nothing about the blocks in them.

use std::collections::BTreeMap;

use crate::device::{Device, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::Address;

/// A piece of physical memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    physical: PhysicalId,
    pub(super) bytes: u64,
}

/// All addresses and chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Mapping {
    /// Reserved ranges: start and length.
    ranges: Vec<(u64, u64)>,
    /// What is mapped where, by address.
    mapped: BTreeMap<u64, Chunk>,
    loose: Vec<Chunk>,
    /// Start and length of what a failing call left mapped although nobody may use it: the chunks are among the loose.
    half_mapped: Vec<(u64, u64)>,
}

fn virtual_memory(device: &mut dyn Device) -> Result<&mut dyn VirtualMemory, DeviceError> {
    device.require_virtual_memory()
}

impl Mapping {
    /// Reserves a range of addresses.
    pub(super) fn reserve(&mut self, device: &mut dyn Device, bytes: u64) -> Result<u64, DeviceError> {
        let base = virtual_memory(device)?.reserve(bytes)?.0;
        self.ranges.push((base, bytes));
        Ok(base)
    }

    /// Undoes what an earlier failing call left half done. Nothing else may be called before it has succeeded.
    pub(super) fn mend(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&(start, bytes)) = self.half_mapped.last() {
            virtual_memory(device)?.unmap(Address(start), bytes)?;
            self.half_mapped.pop();
        }
        Ok(())
    }

    /// Bytes in loose chunks.
    pub(super) fn loose_bytes(&self) -> u64 {
        self.loose.iter().map(|chunk| chunk.bytes).sum()
    }

    /// How many chunks are mapped.
    pub(super) fn mapped_chunks(&self) -> u64 {
        self.mapped.len() as u64
    }

    /// Makes a loose chunk; says no where the device has no more.
    pub(super) fn create(&mut self, device: &mut dyn Device, bytes: u64) -> Result<bool, DeviceError> {
        match virtual_memory(device)?.create(bytes) {
            Ok(physical) => {
                self.loose.push(Chunk { physical, bytes });
                Ok(true)
            }
            Err(error) if error.is_out_of_memory() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Maps all loose chunks one behind the other from `start` on. All or nothing: where a call fails they are loose
    /// again.
    pub(super) fn map_loose(&mut self, device: &mut dyn Device, start: u64) -> Result<u64, DeviceError> {
        let memory = virtual_memory(device)?;
        let mut end = start;
        let mapped = self.loose.iter().try_for_each(|chunk| {
            memory.map(Address(end), chunk.bytes, chunk.physical)?;
            end += chunk.bytes;
            Ok(())
        });
        if let Err(error) = mapped.and_then(|()| memory.set_access(Address(start), end - start)) {
            if start < end && memory.unmap(Address(start), end - start).is_err() {
                self.half_mapped.push((start, end - start));
            }
            return Err(error);
        }
        let mut address = start;
        for chunk in self.loose.drain(..) {
            self.mapped.insert(address, chunk);
            address += chunk.bytes;
        }
        Ok(end)
    }

    /// The chunks that lie wholly in `start..end`, by address: they are neighbours, unless nothing is mapped between.
    pub(super) fn chunks_within(&self, start: u64, end: u64) -> impl DoubleEndedIterator<Item = (u64, Chunk)> + '_ {
        let inside = self.mapped.range(start..end).map(|(&address, &chunk)| (address, chunk));
        inside.filter(move |&(address, chunk)| address + chunk.bytes <= end)
    }

    /// Makes the chunks in `start..end` loose, in one call. The range begins and ends with a chunk.
    pub(super) fn unmap(&mut self, device: &mut dyn Device, start: u64, end: u64) -> Result<(), DeviceError> {
        virtual_memory(device)?.unmap(Address(start), end - start)?;
        while let Some((&address, &chunk)) = self.mapped.range(start..end).next() {
            self.mapped.remove(&address);
            self.loose.push(chunk);
        }
        Ok(())
    }

    /// Gives all loose chunks back to the device.
    pub(super) fn release_loose(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(chunk) = self.loose.last() {
            virtual_memory(device)?.release(chunk.physical)?;
            self.loose.pop();
        }
        Ok(())
    }

    /// Whether no range is left.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Gives one range of addresses back, in which nothing is mapped; returns where it was, or `None` if none is left.
    pub(super) fn release_range(&mut self, device: &mut dyn Device) -> Result<Option<u64>, DeviceError> {
        let Some(&(base, bytes)) = self.ranges.last() else { return Ok(None) };
        virtual_memory(device)?.address_free(Address(base), bytes)?;
        self.ranges.pop();
        Ok(Some(base))
    }
}

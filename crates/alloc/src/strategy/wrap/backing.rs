//! The physical memory behind blocks, for [`Checked`](super::Checked).
//!
//! Two addresses may show the same physical memory, and then blocks that are apart by their addresses can still
//! overlap. What is mapped where is learned from the calls that the device gets, so that nothing depends on what a
//! strategy says about itself. Memory that was allocated whole has one address only and is left alone.

use std::collections::BTreeMap;

use crate::device::{
    Device, DeviceError, PhysicalId,
    wrap::{DriverAnswer, DriverCall, Interceptor},
};
use crate::strategy::Block;
use oomph_base::Address;

/// What is mapped where, and which physical memory belongs to which block.
#[derive(Clone, Debug, Default)]
pub(super) struct Backing {
    mapped: BTreeMap<Address, (u64, PhysicalId)>,
    /// By physical memory and offset in it.
    held: BTreeMap<(PhysicalId, u64), Holding>,
    /// Where the holdings of each block are.
    extents: BTreeMap<Address, Vec<(PhysicalId, u64)>>,
}

#[derive(Clone, Copy, Debug)]
struct Holding {
    end: u64,
    block: Address,
}

impl Backing {
    /// A block was handed out; the address of another that already holds part of its physical memory.
    pub(super) fn occupy(&mut self, block: &Block) -> Option<Address> {
        let end = block.address.0.saturating_add(block.size);
        let from = self.mapped.range(..=block.address).next_back().map_or(block.address, |(&start, _)| start);
        let mut other = None;
        let mut extents = Vec::new();
        for (&Address(start), &(bytes, physical)) in self.mapped.range(from..Address(end)) {
            let (low, high) = (block.address.0.max(start), end.min(start + bytes));
            if low >= high {
                continue;
            }
            let (offset, end) = (low - start, high - start);
            let before = self.held.range(..(physical, end)).next_back();
            other = before
                .filter(|((of, _), held)| *of == physical && held.end > offset)
                .map(|(_, held)| held.block)
                .or(other);
            self.held.insert((physical, offset), Holding { end, block: block.address });
            extents.push((physical, offset));
        }
        if !extents.is_empty() {
            self.extents.insert(block.address, extents);
        }
        other
    }

    /// A block came free.
    pub(super) fn vacate(&mut self, block: Address) {
        for extent in self.extents.remove(&block).unwrap_or_default() {
            if self.held.get(&extent).is_some_and(|held| held.block == block) {
                self.held.remove(&extent);
            }
        }
    }

    /// Everything came free; what is mapped stays so.
    pub(super) fn vacate_all(&mut self) {
        self.held.clear();
        self.extents.clear();
    }
}

impl Interceptor for &mut Backing {
    fn before<D: Device + ?Sized>(&mut self, _: &DriverCall, _: &D) -> Result<(), DeviceError> {
        Ok(())
    }

    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, _: &D) {
        match *call {
            DriverCall::Map { address, bytes, physical } if answer.is_ok() => {
                self.mapped.insert(address, (bytes, physical));
            }
            DriverCall::Unmap { address, bytes } if answer.is_ok() => {
                let end = address.offset(bytes);
                while let Some((&start, _)) = self.mapped.range(address..end).next() {
                    self.mapped.remove(&start);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::wrap::InterceptedDevice;
    use crate::strategy::test_device::simulated;
    use oomph_base::MIB;

    fn block(address: Address, size: u64) -> Block {
        Block { address, size, slot: 0, generation: 0 }
    }

    #[test]
    fn blocks_under_two_addresses_of_one_chunk_overlap() {
        let mut backing = Backing::default();
        let mut sim = simulated(64 * MIB);
        let mut device = InterceptedDevice::new(&mut *sim, &mut backing);
        let memory = device.virtual_memory().unwrap();
        let chunks = [0, 1].map(|_| memory.create(2 * MIB).unwrap());
        let (first, second) = (memory.reserve(4 * MIB).unwrap(), memory.reserve(2 * MIB).unwrap());
        memory.map(first, 2 * MIB, chunks[0]).unwrap();
        memory.map(first.offset(2 * MIB), 2 * MIB, chunks[1]).unwrap();
        memory.map(second, 2 * MIB, chunks[1]).unwrap();

        let low = block(first.offset(MIB), 2 * MIB);
        assert_eq!(backing.occupy(&low), None);
        assert_eq!(backing.occupy(&block(second.offset(MIB), MIB)), None, "the other half of the chunk");
        backing.vacate(second.offset(MIB));
        assert_eq!(backing.occupy(&block(second.offset(MIB / 2), MIB)), Some(low.address));
        backing.vacate(second.offset(MIB / 2));
        backing.vacate(low.address);
        assert_eq!(backing.occupy(&block(second, 2 * MIB)), None);

        let mut device = InterceptedDevice::new(&mut *sim, &mut backing);
        device.virtual_memory().unwrap().unmap(first, 4 * MIB).unwrap();
        assert_eq!(backing.occupy(&block(first, 4 * MIB)), None, "nothing is known of what lies there");
    }
}

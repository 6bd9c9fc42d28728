//! Virtual memory management: reserve, create, map, unmap, release.

use std::collections::BTreeMap;

use oomph_driver::ReservedSpace;

use crate::{
    arguments::{In, Out},
    card::RESERVED_END,
    errors::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS},
    memory::PAGE_BYTES,
    served::{self, Origin},
    served_call::ServedCall,
    state::{self, Shadow},
    streams,
};

/// Reserved addresses and what is mapped there.
pub struct VirtualSpace {
    pub addresses: ReservedSpace,
    /// Length by start.
    reserved: BTreeMap<u64, u64>,
    /// By start of the mapping.
    mapped: BTreeMap<u64, Mapping>,
    physical: BTreeMap<u64, Physical>,
    next_handle: u64,
}

struct Mapping {
    bytes: u64,
    handle: u64,
    /// What each device may do: 1 is reading, 3 is reading and writing.
    access: BTreeMap<i32, i32>,
}

/// Memory that `cuMemCreate` made. It is given back when its handle is released and nothing maps it.
struct Physical {
    bytes: u64,
    device: usize,
    mappings: u64,
    handles: u64,
}

impl VirtualSpace {
    pub fn new() -> VirtualSpace {
        VirtualSpace {
            addresses: ReservedSpace::new(RESERVED_END),
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            physical: BTreeMap::new(),
            next_handle: 1,
        }
    }

    /// The mapping that contains an address: device, start, length.
    pub fn containing(&self, address: u64) -> Option<(usize, u64, u64)> {
        let (&start, mapping) = self.mapped.range(..=address).next_back()?;
        let device = self.physical.get(&mapping.handle)?.device;
        (address < start + mapping.bytes).then_some((device, start, mapping.bytes))
    }

    fn reserved_at(&self, address: u64, bytes: u64) -> bool {
        let around = self.reserved.range(..=address).next_back();
        around.is_some_and(|(start, length)| address + bytes <= start + length)
    }
}

impl Shadow {
    fn reserve(&mut self, bytes: u64) -> Result<u64, i32> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(INVALID_VALUE);
        }
        let start = self.virtual_space.addresses.take(bytes).ok_or(OUT_OF_MEMORY)?;
        self.virtual_space.reserved.insert(start, bytes);
        Ok(start)
    }

    fn address_free(&mut self, start: u64, bytes: u64) -> i32 {
        if self.virtual_space.reserved.get(&start) != Some(&bytes) {
            return INVALID_VALUE;
        }
        self.virtual_space.reserved.remove(&start);
        self.virtual_space.addresses.give_back(start, bytes);
        SUCCESS
    }

    fn create(&mut self, bytes: u64, device: usize) -> Result<u64, i32> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(INVALID_VALUE);
        }
        if !self.devices.get_mut(device).ok_or(INVALID_DEVICE)?.take(bytes) {
            return Err(OUT_OF_MEMORY);
        }
        let handle = self.virtual_space.next_handle;
        self.virtual_space.next_handle += 1;
        self.virtual_space.physical.insert(handle, Physical { bytes, device, mappings: 0, handles: 1 });
        Ok(handle)
    }

    fn map(&mut self, start: u64, bytes: u64, handle: u64) -> i32 {
        let space = &mut self.virtual_space;
        let occupied =
            space.mapped.range(..start + bytes).next_back().is_some_and(|(at, mapping)| at + mapping.bytes > start);
        let fits = space.reserved_at(start, bytes) && start.is_multiple_of(PAGE_BYTES) && !occupied;
        match space.physical.get_mut(&handle) {
            Some(physical) if fits && bytes <= physical.bytes => {
                physical.mappings += 1;
                space.mapped.insert(start, Mapping { bytes, handle, access: BTreeMap::new() });
                SUCCESS
            }
            _ => INVALID_VALUE,
        }
    }

    fn unmap(&mut self, start: u64, bytes: u64) -> i32 {
        let starts: Vec<u64> = self.virtual_space.mapped.range(start..start + bytes).map(|(&at, _)| at).collect();
        if starts.is_empty() {
            return INVALID_VALUE;
        }
        for at in starts {
            if let Some(mapping) = self.virtual_space.mapped.remove(&at) {
                self.values.forget(at, mapping.bytes);
                if let Some(physical) = self.virtual_space.physical.get_mut(&mapping.handle) {
                    physical.mappings -= 1;
                }
                self.drop_unused(mapping.handle);
            }
        }
        SUCCESS
    }

    fn set_access(&mut self, start: u64, bytes: u64, descriptors: In<AccessDescriptor>, count: u64) -> i32 {
        let mut code = INVALID_VALUE;
        for (_, mapping) in self.virtual_space.mapped.range_mut(start..start.saturating_add(bytes)) {
            for descriptor in (0..count as usize).filter_map(|place| descriptors.get_at(place)) {
                mapping.access.insert(descriptor.device, descriptor.flags);
            }
            code = SUCCESS;
        }
        code
    }

    /// What a device may do with what is mapped at an address; `None` where nothing is.
    fn access(&self, address: u64, device: i32) -> Option<i32> {
        let (start, mapping) = self.virtual_space.mapped.range(..=address).next_back()?;
        (address < start + mapping.bytes).then(|| mapping.access.get(&device).copied().unwrap_or(0))
    }

    fn release(&mut self, handle: u64) -> i32 {
        match self.virtual_space.physical.get_mut(&handle) {
            Some(physical) if physical.handles > 0 => physical.handles -= 1,
            _ => return INVALID_VALUE,
        }
        self.drop_unused(handle);
        SUCCESS
    }

    fn drop_unused(&mut self, handle: u64) {
        let unused =
            self.virtual_space.physical.get(&handle).is_some_and(|memory| memory.handles == 0 && memory.mappings == 0);
        if let Some(physical) = unused.then(|| self.virtual_space.physical.remove(&handle)).flatten() {
            self.devices[physical.device].give_back(physical.bytes);
        }
    }
}

/// `CUmemAccessDesc`: a `CUmemLocation`, and 3 for reading and writing.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDescriptor {
    kind: i32,
    device: i32,
    flags: i32,
}

/// `location.id` of a `CUmemAllocationProp`, which follows two enumerations and `location.type`.
fn device_of(properties: In<u8>) -> usize {
    properties.field::<i32>(12).unwrap_or(0).max(0) as usize
}

/// Maps memory of the server, which maps the whole of it.
fn map_served(start: u64, bytes: u64, offset: u64, handle: u64) -> i32 {
    if offset != 0 {
        state::note_unserved("cuMemMap with an offset");
        return NOT_SUPPORTED;
    }
    let code = served::code(ServedCall::MemMap, [start, bytes, handle]).unwrap_or(INVALID_VALUE);
    if code == SUCCESS {
        served::note(start, bytes, Origin::Mapped);
    }
    code
}

/// Costs that the driver's calls have on an H200 (median, by size, `docs/` of the simulated device).
fn elapse(nanos: u64) -> std::sync::MutexGuard<'static, Shadow> {
    let mut shadow = state::lock();
    shadow.clocks.elapse(nanos);
    shadow
}

cuda_functions! {
    fn cuMemAddressReserve(pointer: Out<u64>, bytes: u64, _alignment: u64, _wish: u64, _flags: u64) -> i32 {
        let made = served::value(ServedCall::AddressReserve, [bytes, 0, 0]);
        match made.unwrap_or_else(|| elapse(streams::CALL_NANOS).reserve(bytes)) {
            Ok(start) => { pointer.set(start); SUCCESS }
            Err(code) => { pointer.set(0); code }
        }
    }
    fn cuMemAddressFree(pointer: u64, bytes: u64) -> i32 {
        served::code(ServedCall::AddressFree, [pointer, bytes, 0]).unwrap_or_else(|| state::lock().address_free(pointer, bytes))
    }
    fn cuMemCreate(handle: Out<u64>, bytes: u64, properties: In<u8>, _flags: u64) -> i32 {
        let made = served::value(ServedCall::MemCreate, [bytes, 0, 0]);
        match made.unwrap_or_else(|| elapse(streams::MALLOC_NANOS).create(bytes, device_of(properties))) {
            Ok(made) => { handle.set(made); SUCCESS }
            Err(code) => { handle.set(0); code }
        }
    }
    fn cuMemRelease(handle: u64) -> i32 {
        served::code(ServedCall::MemRelease, [handle, 0, 0]).unwrap_or_else(|| state::lock().release(handle))
    }
    fn cuMemMap(pointer: u64, bytes: u64, offset: u64, handle: u64, _flags: u64) -> i32 {
        if served::is_set() {
            return map_served(pointer, bytes, offset, handle);
        }
        elapse(streams::CALL_NANOS).map(pointer, bytes, handle)
    }
    fn cuMemUnmap(pointer: u64, bytes: u64) -> i32 {
        let Some(code) = served::code(ServedCall::MemUnmap, [pointer, bytes, 0]) else {
            return elapse(streams::CALL_NANOS).unmap(pointer, bytes);
        };
        if code == SUCCESS {
            served::forget(pointer, bytes, Origin::Mapped);
        }
        code
    }
    fn cuMemSetAccess(pointer: u64, bytes: u64, descriptors: In<AccessDescriptor>, count: u64) -> i32 {
        let code = served::code(ServedCall::MemSetAccess, [pointer, bytes, 0]);
        code.unwrap_or_else(|| state::lock().set_access(pointer, bytes, descriptors, count))
    }
    fn cuMemGetAccess(flags: Out<u64>, location: In<u8>, pointer: u64) -> i32 {
        if served::is_set() {
            flags.set(3);
            return SUCCESS;
        }
        let device = location.field::<i32>(4).unwrap_or(-1);
        let answer = state::lock().access(pointer, device);
        flags.set(answer.unwrap_or(0) as u64);
        answer.map_or(INVALID_VALUE, |_| SUCCESS)
    }
    fn cuMemGetAllocationGranularity(granularity: Out<u64>, _properties: u64, _option: i32) -> i32 {
        granularity.set(PAGE_BYTES);
        SUCCESS
    }
    fn cuMemRetainAllocationHandle(handle: Out<u64>, pointer: u64) -> i32 {
        let mut shadow = state::lock();
        let found = shadow.virtual_space.mapped.range(..=pointer).next_back().filter(|(start, mapping)| pointer < *start + mapping.bytes).map(|(_, mapping)| mapping.handle);
        handle.set(found.unwrap_or(0));
        match found.and_then(|found| shadow.virtual_space.physical.get_mut(&found)) {
            Some(physical) => { physical.handles += 1; SUCCESS }
            None => INVALID_VALUE,
        }
    }
    // Sharing memory between processes is not offered.
    fn cuMemExportToShareableHandle(handle: Out<u64>, _allocation: u64, _kind: i32, _flags: u64) -> i32 { handle.set(0); NOT_SUPPORTED }
    fn cuMemImportFromShareableHandle(handle: Out<u64>, _source: u64, _kind: i32) -> i32 { handle.set(0); NOT_SUPPORTED }
    fn cuMulticastGetGranularity(granularity: Out<u64>, _properties: u64, _option: i32) -> i32 { granularity.set(PAGE_BYTES); SUCCESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_kept_by_mapping_and_device() {
        let mut shadow = state::lock();
        let start = shadow.reserve(64 << 20).unwrap();
        let half = 2 << 20;
        let handles = [0, half].map(|offset| {
            let handle = shadow.create(half, 0).unwrap();
            assert_eq!(shadow.map(start + offset, half, handle), SUCCESS);
            handle
        });
        let descriptors = [0, 1].map(|device| AccessDescriptor { kind: 1, device, flags: 3 });
        assert_eq!(shadow.set_access(start, half, In(descriptors.as_ptr()), 2), SUCCESS);
        assert_eq!(shadow.set_access(start + half, half, In(descriptors.as_ptr()), 1), SUCCESS);
        let found = [(0, 0), (0, 1), (half, 0), (half, 1), (2 * half, 0)];
        let found = found.map(|(offset, device)| shadow.access(start + offset, device));
        assert_eq!(found, [Some(3), Some(3), Some(3), Some(0), None]);
        assert_eq!(shadow.unmap(start, 2 * half), SUCCESS);
        assert_eq!(handles.map(|handle| shadow.release(handle)), [SUCCESS; 2]);
        assert_eq!(shadow.address_free(start, 64 << 20), SUCCESS);
    }

    #[test]
    fn memory_lives_until_it_is_released_and_unmapped() {
        let mut shadow = state::lock();
        let before = shadow.devices[0].free_bytes();
        let start = shadow.reserve(64 << 20).unwrap();
        let handle = shadow.create(20 << 20, 0).unwrap();
        assert_eq!(shadow.map(start, 20 << 20, handle), SUCCESS);
        assert_eq!(shadow.map(start + (2 << 20), 20 << 20, handle), INVALID_VALUE, "something is mapped there");
        assert_eq!(shadow.virtual_space.containing(start + 5), Some((0, start, 20 << 20)));
        assert_eq!(shadow.release(handle), SUCCESS);
        assert_eq!(before - shadow.devices[0].free_bytes(), 20 << 20);
        assert_eq!(shadow.unmap(start, 20 << 20), SUCCESS);
        assert_eq!(shadow.devices[0].free_bytes(), before);
        assert_eq!((shadow.address_free(start, 1), shadow.address_free(start, 64 << 20)), (INVALID_VALUE, SUCCESS));
        assert_eq!((shadow.create(1 << 46, 0), shadow.create(5, 0)), (Err(OUT_OF_MEMORY), Err(INVALID_VALUE)));
    }
}

//! Device memory: `cudaMalloc`, `cuMemAlloc` and what programs can ask about it.

use std::collections::BTreeMap;

use oomph_driver::AddressSpace;

use crate::{
    arguments::{In, Out},
    capture,
    card::{self, card},
    errors::{INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, conclude},
    host_memory, pools, properties,
    served::{self, Origin},
    served_call::ServedCall,
    state,
    state::current,
    streams,
};

/// Memory is handed out in pages of this size (H200 and every card since Pascal).
pub const PAGE_BYTES: u64 = 2 << 20;

/// The memory of one device.
pub struct DeviceMemory {
    space: AddressSpace,
    /// Length by start.
    live: BTreeMap<u64, u64>,
    /// Bytes in whole pages that are in use, without the context.
    held: u64,
    peak: u64,
}

impl DeviceMemory {
    pub fn new(device: usize) -> DeviceMemory {
        let (lowest, end) = card::window(device);
        DeviceMemory { space: AddressSpace::between(lowest, end, PAGE_BYTES), live: BTreeMap::new(), held: 0, peak: 0 }
    }

    /// An element-wise kernel or one of a library runs on the device.
    pub fn kernels_run(&mut self) {
        self.space.kernels_run();
    }

    /// Bytes that are left.
    pub fn free_bytes(&self) -> u64 {
        card().capacity() - self.held
    }

    /// Bytes in use, without the context: now and at most.
    pub fn usage(&self) -> (u64, u64) {
        (self.held, self.peak)
    }

    /// Takes physical memory; false where it does not fit.
    pub fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free_bytes();
        if fits {
            self.held += bytes;
            self.peak = self.peak.max(self.held);
        }
        fits
    }

    /// Gives physical memory back.
    pub fn give_back(&mut self, bytes: u64) {
        self.held -= bytes;
    }

    fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let pages = self.space.growth_pages(bytes).checked_mul(PAGE_BYTES)?;
        if !self.take(pages) {
            return None;
        }
        let address = self.space.allocate(bytes);
        match address {
            Some(address) => drop(self.live.insert(address, bytes)),
            None => self.give_back(pages),
        }
        address
    }

    /// Frees an allocation; its size, or `None` where none starts there.
    fn free(&mut self, address: u64) -> Option<u64> {
        let freed = self.space.free(address)?;
        self.live.remove(&address);
        self.give_back(freed.pages * PAGE_BYTES);
        Some(freed.bytes)
    }

    /// Start and length of the allocation that contains an address.
    fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.live.range(..=address).next_back()?;
        (address < start + bytes.max(1)).then_some((start, bytes))
    }
}

/// Allocates on the thread's device.
pub fn allocate(bytes: u64) -> Result<u64, i32> {
    if bytes == 0 {
        return Ok(0);
    }
    if let Some(served) = served::value(ServedCall::MemAlloc, [bytes, 0, 0]) {
        return served.inspect(|&start| served::note(start, bytes, Origin::Allocated));
    }
    let mut shadow = state::lock();
    shadow.clocks.elapse(streams::MALLOC_NANOS);
    shadow.devices[current::device()].allocate(bytes).ok_or(OUT_OF_MEMORY)
}

/// Frees what [`allocate`] gave, on whichever device it is. Waits for the device, as `cudaFree` does.
pub fn free(address: u64) -> i32 {
    if address == 0 {
        return SUCCESS;
    }
    if served::is_set() {
        return free_served(address);
    }
    let mut shadow = state::lock();
    shadow.clocks.synchronize_all();
    let device = card::window_of(address);
    let freed = device.and_then(|device| shadow.devices.get_mut(device)?.free(address));
    match freed {
        Some(bytes) => {
            shadow.values.forget(address, bytes);
            SUCCESS
        }
        // `cudaFree` also takes memory of a stream-ordered pool, and managed memory.
        None if shadow.pools.containing(address).is_some() => shadow.free_ordered(address, 0),
        None => host_memory::free(address),
    }
}

/// Frees memory of the server. `cudaFree` also takes memory of a stream-ordered pool, and managed memory.
fn free_served(address: u64) -> i32 {
    match served::containing(address) {
        Some((start, _, Origin::OfPool)) if start == address => pools::free_served(address, 0),
        None if host_memory::kind_of(address).is_some() => host_memory::free(address),
        _ => {
            let code = served::code(ServedCall::MemFree, [address, 0, 0]).unwrap_or(INVALID_VALUE);
            if code == SUCCESS {
                served::forget(address, 1, Origin::Allocated);
            }
            code
        }
    }
}

/// The allocation that contains an address: device, start, length.
pub fn allocation_at(address: u64) -> Option<(usize, u64, u64)> {
    if served::is_set() {
        return served::containing(address).map(|(start, bytes, _)| (0, start, bytes));
    }
    let shadow = state::lock();
    if let Some(device) = card::window_of(address) {
        return shadow.devices.get(device)?.containing(address).map(|(start, bytes)| (device, start, bytes));
    }
    let of_pool = shadow.pools.containing(address);
    of_pool.or_else(|| shadow.virtual_space.containing(address))
}

fn memory_info(free: Out<u64>, total: Out<u64>) -> i32 {
    if let Some((code, [free_bytes, total_bytes, ..])) = served::ask(ServedCall::MemGetInfo, [0; 3]) {
        free.set(free_bytes);
        total.set(total_bytes);
        return code;
    }
    free.set(state::lock().devices[current::device()].free_bytes());
    total.set(card().total);
    SUCCESS
}

/// `cudaMemoryType`, `CUmemorytype`.
const HOST: i32 = 1;
const DEVICE: i32 = 2;
const MANAGED: i32 = 3;

/// Kind of memory and device of an address, which may lie in an allocation on a device.
fn classify(address: u64, allocation: Option<(usize, u64, u64)>) -> (i32, i32) {
    if let Some((device, ..)) = allocation {
        return (DEVICE, device as i32);
    }
    match host_memory::kind_of(address) {
        Some(host_memory::Kind::Managed) => (MANAGED, 0),
        Some(_) => (HOST, 0),
        None => (0, -2),
    }
}

fn pointer_attributes(attributes: Out<u8>, pointer: u64, major: u32) -> i32 {
    let (kind, device) = classify(pointer, allocation_at(pointer));
    attributes.zero(properties::size_of("cudaPointerAttributes", major));
    let field = |name: &str, value: u64, bytes: usize| {
        properties::set_field(attributes, "cudaPointerAttributes", major, name, value, bytes)
    };
    field("type", kind as u64, 4);
    field("device", device as u64, 4);
    field("devicePointer", if kind == 0 { 0 } else { pointer }, 8);
    field("hostPointer", if kind == DEVICE { 0 } else { pointer }, 8);
    SUCCESS
}

/// `CUpointer_attribute`: the numbers of cuda.h.
fn pointer_attribute(data: *mut u8, attribute: i32, pointer: u64) -> i32 {
    let allocation = allocation_at(pointer);
    let (kind, device) = classify(pointer, allocation);
    let (start, bytes) = allocation.map_or((pointer, 0), |(_, start, bytes)| (start, bytes));
    match attribute {
        // CU_POINTER_ATTRIBUTE_CONTEXT
        1 => Out(data.cast::<u64>()).set(crate::driver_api::context_of(device.max(0) as usize)),
        // MEMORY_TYPE: an address that was never registered is an error.
        2 if kind == 0 => return INVALID_VALUE,
        2 => Out(data.cast::<i32>()).set(if kind == MANAGED { DEVICE } else { kind }),
        3 | 4 => Out(data.cast::<u64>()).set(pointer),
        // BUFFER_ID, RANGE_START_ADDR
        7 | 11 => Out(data.cast::<u64>()).set(start),
        // IS_MANAGED
        8 => Out(data.cast::<u8>()).set(u8::from(kind == MANAGED)),
        9 => Out(data.cast::<i32>()).set(device.max(0)),
        12 => Out(data.cast::<u64>()).set(bytes),
        // MAPPED
        13 => Out(data.cast::<u8>()).set(u8::from(allocation.is_some())),
        // P2P tokens, SYNC_MEMOPS, IPC, RDMA, access flags: nothing is supported.
        5 => Out(data.cast::<u64>()).zero(16),
        17 | 20 => Out(data.cast::<u64>()).set(0),
        _ => Out(data.cast::<i32>()).set(0),
    }
    SUCCESS
}

cuda_functions! {
    fn cudaMalloc(pointer: Out<u64>, bytes: u64) -> i32 {
        match capture::refused().map_or_else(|| allocate(bytes), Err) {
            Ok(address) => { pointer.set(address); SUCCESS }
            Err(code) => { pointer.set(0); conclude(code) }
        }
    }
    fn cudaFree(address: u64) -> i32 { conclude(capture::refused().unwrap_or_else(|| free(address))) }
    fn cudaMallocPitch(pointer: Out<u64>, pitch: Out<u64>, width: u64, height: u64) -> i32 {
        // Rows are aligned to texturePitchAlignment of all cards since Kepler, 512 bytes in practice.
        let row = width.next_multiple_of(512);
        pitch.set(row);
        cudaMalloc(pointer, row.saturating_mul(height))
    }
    fn cuMemAlloc_v2(pointer: Out<u64>, bytes: u64) -> i32 {
        match capture::refused().map_or_else(|| allocate(bytes), Err) {
            Ok(0) => INVALID_VALUE,
            Ok(address) => { pointer.set(address); SUCCESS }
            Err(code) => code,
        }
    }
    fn cuMemFree_v2(address: u64) -> i32 { capture::refused().unwrap_or_else(|| free(address)) }
    fn cudaMemGetInfo(free: Out<u64>, total: Out<u64>) -> i32 { memory_info(free, total) }
    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) -> i32 { memory_info(free, total) }
    fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: i32) -> i32 {
        bytes.set(card().total);
        if device < 0 || device >= card().devices { INVALID_DEVICE } else { SUCCESS }
    }
    fn cudaPointerGetAttributes(attributes: Out<u8>, pointer: u64) -> i32 {
        pointer_attributes(attributes, pointer, properties::runtime_major())
    }
    fn cuPointerGetAttribute(data: *mut u8, attribute: i32, pointer: u64) -> i32 {
        pointer_attribute(data, attribute, pointer)
    }
    fn cuPointerGetAttributes(count: u32, attributes: In<i32>, data: In<u64>, pointer: u64) -> i32 {
        for index in 0..count as usize {
            if let (Some(attribute), Some(target)) = (attributes.get_at(index), data.get_at(index)) {
                // Attributes that cannot be answered are zero, as cuda.h says of this function.
                if pointer_attribute(target as *mut u8, attribute, pointer) != SUCCESS {
                    Out(target as *mut i32).set(0);
                }
            }
        }
        SUCCESS
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<u64>, pointer: u64) -> i32 {
        let found = allocation_at(pointer);
        base.set(found.map_or(0, |(_, start, _)| start));
        size.set(found.map_or(0, |(_, _, bytes)| bytes));
        if found.is_some() { SUCCESS } else { crate::errors::NOT_FOUND }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_in_pages() {
        let mut memory = DeviceMemory::new(0);
        let before = memory.free_bytes();
        let first = memory.allocate(20 << 20).unwrap();
        let second = memory.allocate((2 << 20) + 1).unwrap();
        assert_eq!(before - memory.free_bytes(), 24 << 20);
        assert_eq!(memory.containing(second + 5), Some((second, (2 << 20) + 1)));
        assert_eq!(memory.containing(first + (20 << 20)).filter(|found| found.0 == first), None);
        assert_eq!((memory.free(first), memory.free(first)), (Some(20 << 20), None));
        assert_eq!(memory.usage(), (4 << 20, 24 << 20));
        assert_eq!(memory.allocate(1 << 50), None);
    }
}

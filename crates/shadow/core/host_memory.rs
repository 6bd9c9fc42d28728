//! Page-locked and managed memory: real host memory, so that programs can use it.

use std::{collections::BTreeMap, sync::Mutex};

use crate::{
    arguments::Out,
    errors::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, conclude},
    state, streams,
};

/// How host memory became known to CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pinned,
    Managed,
    Registered,
}

/// Start, length and kind. It has a lock of its own: host memory does not belong to a device.
static KNOWN: Mutex<BTreeMap<u64, (u64, Kind)>> = Mutex::new(BTreeMap::new());

fn known() -> std::sync::MutexGuard<'static, BTreeMap<u64, (u64, Kind)>> {
    state::locked(&KNOWN)
}

unsafe extern "C" {
    fn mmap(address: *mut u8, length: usize, protection: i32, flags: i32, file: i32, offset: i64) -> *mut u8;
    fn munmap(address: *mut u8, length: usize) -> i32;
}

/// What CUDA knows about a host address.
pub fn kind_of(address: u64) -> Option<Kind> {
    let known = known();
    let (&start, &(bytes, kind)) = known.range(..=address).next_back()?;
    (address < start + bytes).then_some(kind)
}

fn allocate(pointer: Out<u64>, bytes: u64, kind: Kind) -> i32 {
    state::lock().clocks.elapse(streams::HOST_ALLOC_NANOS + bytes / 4);
    if bytes == 0 {
        pointer.set(0);
        return SUCCESS;
    }
    // SAFETY: a new private anonymous mapping (PROT_READ | PROT_WRITE); pages are used when they are touched.
    let address = unsafe { mmap(std::ptr::null_mut(), bytes as usize, 3, 0x22, -1, 0) };
    if address as isize == -1 {
        pointer.set(0);
        return OUT_OF_MEMORY;
    }
    known().insert(address as u64, (bytes, kind));
    pointer.set(address as u64);
    SUCCESS
}

pub fn free(address: u64) -> i32 {
    if address == 0 {
        return SUCCESS;
    }
    let mut known = known();
    // Memory that was only registered belongs to the program.
    let Some((bytes, _)) = known.get(&address).copied().filter(|found| found.1 != Kind::Registered) else {
        return INVALID_VALUE;
    };
    known.remove(&address);
    // SAFETY: the mapping was made by `allocate` with this length, and the program gives it back.
    unsafe { munmap(address as *mut u8, bytes as usize) };
    SUCCESS
}

fn register(address: u64, bytes: u64) -> i32 {
    known().insert(address, (bytes, Kind::Registered));
    SUCCESS
}

fn unregister(address: u64) -> i32 {
    known().remove(&address).map_or(INVALID_VALUE, |_| SUCCESS)
}

cuda_functions! {
    fn cudaHostAlloc(pointer: Out<u64>, bytes: u64, _flags: u32) -> i32 { conclude(allocate(pointer, bytes, Kind::Pinned)) }
    fn cudaMallocHost(pointer: Out<u64>, bytes: u64) -> i32 { conclude(allocate(pointer, bytes, Kind::Pinned)) }
    fn cudaFreeHost(pointer: u64) -> i32 { conclude(free(pointer)) }
    fn cudaHostRegister(pointer: u64, bytes: u64, _flags: u32) -> i32 { register(pointer, bytes) }
    fn cudaHostUnregister(pointer: u64) -> i32 { conclude(unregister(pointer)) }
    fn cudaHostGetDevicePointer(device: Out<u64>, host: u64, _flags: u32) -> i32 { device.set(host); SUCCESS }
    fn cudaHostGetFlags(flags: Out<u32>, _host: u64) -> i32 { flags.set(0); SUCCESS }
    fn cudaMallocManaged(pointer: Out<u64>, bytes: u64, _flags: u32) -> i32 { conclude(allocate(pointer, bytes, Kind::Managed)) }
    fn cuMemAllocHost_v2(pointer: Out<u64>, bytes: u64) -> i32 { allocate(pointer, bytes, Kind::Pinned) }
    fn cuMemHostAlloc(pointer: Out<u64>, bytes: u64, _flags: u32) -> i32 { allocate(pointer, bytes, Kind::Pinned) }
    fn cuMemFreeHost(pointer: u64) -> i32 { free(pointer) }
    fn cuMemHostRegister_v2(pointer: u64, bytes: u64, _flags: u32) -> i32 { register(pointer, bytes) }
    fn cuMemHostUnregister(pointer: u64) -> i32 { unregister(pointer) }
    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, _flags: u32) -> i32 { device.set(host); SUCCESS }
    fn cuMemAllocManaged(pointer: Out<u64>, bytes: u64, _flags: u32) -> i32 { allocate(pointer, bytes, Kind::Managed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_memory_stays_the_programs() {
        let memory = vec![0u8; 4096];
        let address = memory.as_ptr() as u64;
        register(address, 4096);
        assert_eq!((kind_of(address + 9), free(address)), (Some(Kind::Registered), INVALID_VALUE));
        assert_eq!((unregister(address), unregister(address), kind_of(address)), (SUCCESS, INVALID_VALUE, None));
    }

    #[test]
    fn pinned_memory_is_real() {
        let mut address = 0u64;
        assert_eq!(cudaHostAlloc(Out(&raw mut address), 5000, 0), SUCCESS);
        Out(address as *mut u8).set_at(4999, 7);
        assert_eq!((kind_of(address + 4999), kind_of(address + 5000)), (Some(Kind::Pinned), None));
        assert_eq!((free(address), free(address)), (SUCCESS, INVALID_VALUE));
    }
}

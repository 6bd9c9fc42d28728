//! Page-locked host memory.

use std::{collections::BTreeMap, fs, ptr};

use cudarc::driver::sys;

use super::{CudaDevice, memory::covered};
use crate::device::{CallKind, DeviceError, PinnedHost};
use oomph_base::{Address, GIB};

/// Left to the host: page-locked memory cannot be swapped, and a machine without any other kills programs.
const LEFT_TO_THE_HOST: u64 = 4 * GIB;

/// Live page-locked memory: size by address.
#[derive(Debug, Default)]
pub(super) struct PinnedMemory {
    live: BTreeMap<Address, u64>,
}

impl PinnedMemory {
    /// Whether all of a range is page-locked memory that this device has handed out.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        bytes > 0 && covered(&self.live, address, bytes)
    }

    /// Gives everything back. The context is current and idle, and what fails cannot be helped.
    pub(super) fn free_all(&mut self) {
        for (address, _) in std::mem::take(&mut self.live) {
            // SAFETY: the memory is live and of `cuMemHostAlloc`.
            unsafe { sys::cuMemFreeHost(ptr::with_exposed_provenance_mut(address.0 as usize)) };
        }
    }
}

impl PinnedHost for CudaDevice {
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        // Locking more pages than there are does not fail: it ends the process.
        if available_bytes().is_some_and(|available| bytes.saturating_add(LEFT_TO_THE_HOST) > available) {
            return Err(DeviceError::OutOfMemory { call: CallKind::HostAlloc, requested: bytes });
        }
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer; the driver checks the size.
        self.drive(CallKind::HostAlloc, bytes, || unsafe {
            sys::cuMemHostAlloc(&raw mut start, bytes as usize, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        let address = Address(start.expose_provenance() as u64);
        self.pinned.live.insert(address, bytes);
        Ok(address)
    }

    fn host_free(&mut self, address: Address) -> Result<(), DeviceError> {
        let call = CallKind::HostFree;
        if !self.pinned.live.contains_key(&address) {
            return self.refuse_because(call, format!("no page-locked memory starts at {address}"));
        }
        // SAFETY: the memory is live and of `cuMemHostAlloc`; the driver waits for the work that uses it.
        self.drive(call, 0, || unsafe { sys::cuMemFreeHost(ptr::with_exposed_provenance_mut(address.0 as usize)) })?;
        self.pinned.live.remove(&address);
        Ok(())
    }
}

/// What the host, or the group of processes we are in, can still give; `None` where the system does not say.
fn available_bytes() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let of_machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let of_group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(most, current)| most.saturating_sub(current));
    of_machine.into_iter().chain(of_group).min()
}

/// The line `MemAvailable: 12345 kB`.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_the_systems_own_words() {
        assert_eq!(mem_available("MemTotal:  8 kB\nMemAvailable:    12345 kB\n"), Some(12345 * 1024));
        assert_eq!(mem_available("MemTotal:  8 kB\n"), None);
    }
}

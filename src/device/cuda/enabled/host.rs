//! Page-locked host memory.

use std::{collections::BTreeMap, ptr};

use cudarc::driver::sys;

use super::{CudaDevice, memory::covered};
use crate::{
    device::{CallKind, DeviceError, PinnedHost},
    unit::Address,
};

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

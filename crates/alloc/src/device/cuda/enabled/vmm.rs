//! Virtual memory of the real device: driver calls over [`MappingTable`](crate::device::mapping::MappingTable), which checks
//! each before the driver is asked.

use std::ptr;

use cudarc::driver::sys;

use super::{CudaDevice, context};
use crate::device::{CallKind, DeviceError, PhysicalId, VirtualMemory};
use oomph_base::Address;

/// No GPU has more addresses than this.
const ADDRESS_SPACE: u64 = 1 << 47;

impl CudaDevice {
    /// Gives all virtual memory back. The context is current and idle; failures are ignored.
    pub(super) fn release_virtual_memory(&mut self) {
        let (mapped, unreleased, reserved) = self.virtual_space.take_all();
        for (address, bytes) in mapped {
            // SAFETY: exactly this range was mapped, and no work is left that could touch it.
            unsafe { sys::cuMemUnmap(address.0, bytes as usize) };
        }
        for handle in unreleased {
            // SAFETY: the handle was created and not yet released.
            unsafe { sys::cuMemRelease(handle) };
        }
        for (address, bytes) in reserved {
            // SAFETY: exactly this range was reserved, and nothing is mapped in it.
            unsafe { sys::cuMemAddressFree(address.0, bytes as usize) };
        }
    }
}

impl VirtualMemory for CudaDevice {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::AddressReserve;
        if bytes > ADDRESS_SPACE {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let mut start = 0;
        // SAFETY: the pointer is to a live address; the driver checks the size.
        self.drive(call, bytes, || unsafe { sys::cuMemAddressReserve(&raw mut start, bytes as usize, 0, 0, 0) })?;
        self.virtual_space.reserve(Address(start), bytes);
        Ok(Address(start))
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::AddressFree;
        let checked = self.virtual_space.check_address_free(address, bytes);
        self.refuse_broken(call, checked)?;
        // SAFETY: exactly this range is reserved, and nothing is mapped in it.
        self.drive(call, 0, || unsafe { sys::cuMemAddressFree(address.0, bytes as usize) })?;
        self.virtual_space.address_free(address);
        Ok(())
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        let call = CallKind::MemCreate;
        if bytes > self.props.total_bytes {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let properties = context::pinned_on(self.context.device);
        let mut handle = 0;
        // SAFETY: both pointers are to live values; the driver checks the size.
        self.drive(call, bytes, || unsafe {
            sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const properties, 0)
        })?;
        Ok(self.virtual_space.create(handle, bytes))
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        let call = CallKind::MemRelease;
        let found = self.virtual_space.unreleased(physical);
        let (handle, _) = self.refuse_broken(call, found)?;
        // SAFETY: the handle was created and not yet released; mappings keep the memory itself.
        self.drive(call, 0, || unsafe { sys::cuMemRelease(handle) })?;
        self.virtual_space.release(physical);
        Ok(())
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        let call = CallKind::MemMap;
        let checked = self.virtual_space.check_map(address, bytes, physical);
        let found = checked.and_then(|()| self.virtual_space.unreleased(physical));
        let (handle, _) = self.refuse_broken(call, found)?;
        // SAFETY: the range is reserved and not mapped, and the handle is live.
        self.drive(call, 0, || unsafe { sys::cuMemMap(address.0, bytes as usize, 0, handle, 0) })?;
        self.virtual_space.map(address, bytes, physical);
        Ok(())
    }

    fn set_access(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let access = sys::CUmemAccessDesc {
            location: context::location(self.context.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pointer is to one live description; the driver refuses ranges that are not mapped.
        self.drive(CallKind::MemSetAccess, 0, || unsafe {
            sys::cuMemSetAccess(address.0, bytes as usize, ptr::from_ref(&access), 1)
        })?;
        self.virtual_space.allow_access(address, bytes);
        Ok(())
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::MemUnmap;
        let checked = self.virtual_space.check_unmap(address, bytes);
        self.refuse_broken(call, checked)?;
        // SAFETY: the range covers whole mappings; the caller has waited for the work that touches them, and
        // the driver waits for the rest.
        self.drive(call, 0, || unsafe { sys::cuMemUnmap(address.0, bytes as usize) })?;
        self.virtual_space.unmap(address, bytes);
        Ok(())
    }
}

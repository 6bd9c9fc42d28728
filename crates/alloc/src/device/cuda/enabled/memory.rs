//! `cuMemAlloc` allocations by page, page-locked host memory, and virtual memory, whose calls
//! [`MappingTable`](crate::device::mapping::MappingTable) checks before the driver is asked.

use std::{
    collections::{BTreeMap, HashMap},
    fs, ptr,
};

use cudarc::driver::sys;

use super::{
    CudaDevice,
    context::{self, ExportAbilities, device_error},
};
use crate::device::{CallKind, DeviceError, PhysicalId, PinnedHost, VirtualMemory};
use oomph_base::{Address, GIB};

/// Live `cuMemAlloc` allocations. Small ones may share a page, so allocations are counted per page.
#[derive(Debug)]
pub(super) struct PlainMemory {
    page_bytes: u64,
    live: BTreeMap<Address, u64>,
    /// The number of allocations that begin or end on a page. The pages between belong to one
    /// allocation.
    users: HashMap<u64, u32>,
    pages: u64,
}

impl PlainMemory {
    pub(super) fn new(page_bytes: u64) -> PlainMemory {
        PlainMemory { page_bytes, live: BTreeMap::new(), users: HashMap::new(), pages: 0 }
    }

    /// Bytes of all pages in use.
    pub(super) fn held(&self) -> u64 {
        self.pages * self.page_bytes
    }

    /// Whether an allocation starts here.
    pub(super) fn has(&self, address: Address) -> bool {
        self.live.contains_key(&address)
    }

    /// Whether all of a range lies in one allocation.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        covered(&self.live, address, bytes)
    }

    /// Where live allocations start.
    pub(super) fn addresses(&self) -> impl Iterator<Item = Address> + '_ {
        self.live.keys().copied()
    }

    pub(super) fn insert(&mut self, address: Address, bytes: u64) {
        self.live.insert(address, bytes);
        let (first, last) = self.edges(address, bytes);
        self.pages += (last - first).saturating_sub(1);
        for &page in &[first, last][..1 + usize::from(first != last)] {
            let users = self.users.entry(page).or_default();
            *users += 1;
            self.pages += u64::from(*users == 1);
        }
    }

    pub(super) fn remove(&mut self, address: Address) {
        let Some(bytes) = self.live.remove(&address) else { return };
        let (first, last) = self.edges(address, bytes);
        self.pages -= (last - first).saturating_sub(1);
        for &page in &[first, last][..1 + usize::from(first != last)] {
            if let Some(users) = self.users.get_mut(&page) {
                *users -= 1;
                if *users == 0 {
                    self.users.remove(&page);
                    self.pages -= 1;
                }
            }
        }
    }

    fn edges(&self, address: Address, bytes: u64) -> (u64, u64) {
        (address.0 / self.page_bytes, (address.0 + bytes.max(1) - 1) / self.page_bytes)
    }
}

/// Whether all of a range lies in one of the pieces, given by start and length.
pub(super) fn covered(pieces: &BTreeMap<Address, u64>, address: Address, bytes: u64) -> bool {
    let Some(end) = address.0.checked_add(bytes) else { return false };
    pieces.range(..=address).next_back().is_some_and(|(start, length)| end <= start.0 + length)
}

/// Left to the host: page-locked memory cannot be swapped, and a machine without other memory kills
/// programs.
const LEFT_TO_THE_HOST: u64 = 4 * GIB;

/// Live page-locked memory: size by address.
#[derive(Debug, Default)]
pub(super) struct PinnedMemory {
    live: BTreeMap<Address, u64>,
}

impl PinnedMemory {
    /// Whether all of a range is page-locked memory of this device.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        bytes > 0 && covered(&self.live, address, bytes)
    }

    /// Gives everything back. The context is current and idle; failures are ignored.
    pub(super) fn free_all(&mut self) {
        for (address, _) in std::mem::take(&mut self.live) {
            // SAFETY: the memory is live and of `cuMemHostAlloc`.
            unsafe { sys::cuMemFreeHost(ptr::with_exposed_provenance_mut(address.0 as usize)) };
        }
    }
}

impl PinnedHost for CudaDevice {
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        // Locking more pages than there are does not fail: the system ends the process.
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
        // SAFETY: the memory is live and of `cuMemHostAlloc`; the driver waits for the work that
        // uses it.
        self.drive(call, 0, || unsafe { sys::cuMemFreeHost(ptr::with_exposed_provenance_mut(address.0 as usize)) })?;
        self.pinned.live.remove(&address);
        Ok(())
    }
}

/// What the host, or the control group of this process, can still give; `None` where the system
/// does not say.
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

/// Whether `cuMemCreate` may have failed because of what it was asked for besides memory.
fn refuses_exports(error: &DeviceError) -> bool {
    match error {
        DeviceError::InvalidValue { .. } => true,
        DeviceError::Driver { name, .. } => ["NOT_PERMITTED", "NOT_SUPPORTED"].iter().any(|code| name.ends_with(code)),
        _ => false,
    }
}

/// No GPU has more addresses than this.
const ADDRESS_SPACE: u64 = 1 << 47;

impl CudaDevice {
    /// Takes physical memory that can be passed on as `exports` says.
    fn create_exported(
        &mut self,
        bytes: u64,
        exports: ExportAbilities,
    ) -> Result<sys::CUmemGenericAllocationHandle, DeviceError> {
        let properties = context::pinned_on(self.context.device, exports);
        let mut handle = 0;
        // SAFETY: both pointers are to live values; the driver checks the size.
        self.drive(CallKind::MemCreate, bytes, || unsafe {
            sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const properties, 0)
        })?;
        Ok(handle)
    }

    /// Lets devices read and write a mapped range.
    fn allow_access(&mut self, address: Address, bytes: u64, devices: &[sys::CUdevice]) -> Result<(), DeviceError> {
        let access = |&device: &sys::CUdevice| sys::CUmemAccessDesc {
            location: context::location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let accesses: Vec<sys::CUmemAccessDesc> = devices.iter().map(access).collect();
        // SAFETY: the pointer is to as many live descriptions; the driver refuses ranges that are not mapped.
        self.drive(CallKind::MemSetAccess, 0, || unsafe {
            sys::cuMemSetAccess(address.0, bytes as usize, accesses.as_ptr(), accesses.len())
        })
    }

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
        let mut created = self.create_exported(bytes, self.exports);
        // A container may forbid what the GPU can do.
        for fewer in [ExportAbilities { to_network: false, ..self.exports }, ExportAbilities::default()] {
            if fewer != self.exports && created.as_ref().is_err_and(refuses_exports) {
                created = self.create_exported(bytes, fewer);
                self.exports = if created.is_ok() { fewer } else { self.exports };
            }
        }
        Ok(self.virtual_space.create(created?, bytes))
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
        let devices: Vec<sys::CUdevice> = self.peers.iter().copied().chain([self.context.device]).collect();
        self.allow_access(address, bytes, &devices)?;
        self.virtual_space.allow_access(address, bytes);
        Ok(())
    }

    fn allow_peer(&mut self, ordinal: u32) -> Result<(), DeviceError> {
        let failed = |code| device_error(CallKind::MemSetAccess, 0, code);
        let peer = context::device(ordinal).map_err(failed)?;
        if peer == self.context.device || self.peers.contains(&peer) {
            return Ok(());
        }
        if !context::can_reach(peer, self.context.device).map_err(failed)? {
            return Ok(());
        }
        for (address, bytes) in self.virtual_space.accessible() {
            self.allow_access(address, bytes, &[peer])?;
        }
        self.peers.push(peer);
        Ok(())
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::MemUnmap;
        let checked = self.virtual_space.check_unmap(address, bytes);
        self.refuse_broken(call, checked)?;
        // SAFETY: the range covers whole mappings; the caller has waited for the work that touches
        // them, and the driver waits for the rest.
        self.drive(call, 0, || unsafe { sys::cuMemUnmap(address.0, bytes as usize) })?;
        self.virtual_space.unmap(address, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::MIB;

    const PAGE: u64 = 2 * MIB;

    #[test]
    fn small_allocations_share_a_page() {
        let mut memory = PlainMemory::new(PAGE);
        let [first, second] = [Address(100 * PAGE), Address(100 * PAGE + 512)];
        memory.insert(first, 512);
        memory.insert(second, 512);
        assert_eq!(memory.held(), PAGE);
        memory.remove(first);
        assert_eq!(memory.held(), PAGE);
        memory.remove(second);
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn large_allocations_hold_every_page_they_touch() {
        let mut memory = PlainMemory::new(PAGE);
        memory.insert(Address(8 * PAGE), 5 * MIB);
        assert_eq!(memory.held(), 3 * PAGE);
        memory.insert(Address(11 * PAGE - 512), 512);
        assert_eq!(memory.held(), 3 * PAGE, "the rest of the last page is used");
        memory.remove(Address(8 * PAGE));
        assert_eq!(memory.held(), PAGE);
    }

    #[test]
    fn only_whole_ranges_inside_one_allocation_are_covered() {
        let mut memory = PlainMemory::new(PAGE);
        memory.insert(Address(PAGE), 1024);
        assert!(memory.covers(Address(PAGE), 1024) && memory.covers(Address(PAGE + 512), 512));
        assert!(!memory.covers(Address(PAGE + 512), 1024));
        assert!(!memory.covers(Address(512), 8) && !memory.covers(Address(u64::MAX), 8));
    }

    #[test]
    fn available_memory_is_read_from_the_systems_own_words() {
        assert_eq!(mem_available("MemTotal:  8 kB\nMemAvailable:    12345 kB\n"), Some(12345 * 1024));
        assert_eq!(mem_available("MemTotal:  8 kB\n"), None);
    }
}

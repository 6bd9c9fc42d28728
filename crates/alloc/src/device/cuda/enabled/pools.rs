//! The driver's stream-ordered pools.

use std::{collections::BTreeMap, ptr};

use cudarc::driver::sys::{self, CUmemPool_attribute, CUresult};

use super::{
    CudaDevice,
    context::{self, device_error, succeed},
    library,
    memory::covered,
};
use crate::device::{CallKind, DeviceError, PoolId, PoolSettings, PoolUsage, StreamOrderedPools};
use oomph_base::{Address, StreamId};

/// The first driver with a maximum size for pools; earlier ones require zeros there.
const KNOWS_MAXIMUM: (u32, u32) = (12, 2);

/// DriverPools and what was allocated from them.
#[derive(Debug, Default)]
pub(super) struct DriverPools {
    /// By [`PoolId`], the default pool first; it is entered when it is first used.
    pools: Vec<Option<DriverPool>>,
    /// Size by address.
    live: BTreeMap<Address, u64>,
    /// Which pool a live allocation is from.
    pool_of: BTreeMap<Address, PoolId>,
}

#[derive(Clone, Copy, Debug)]
struct DriverPool {
    handle: sys::CUmemoryPool,
    /// What the pool may hold.
    maximum: u64,
    /// What is allocated from it.
    used: u64,
    /// What the pool held at the last query.
    reserved: u64,
}

impl DriverPools {
    /// Physical bytes in all pools, as of the last query of each.
    pub(super) fn held(&self) -> u64 {
        self.pools.iter().flatten().map(|pool| pool.reserved).sum()
    }

    /// Whether all of a range lies in one allocation.
    pub(super) fn covers(&self, address: Address, bytes: u64) -> bool {
        covered(&self.live, address, bytes)
    }

    /// Gives everything back. The context is current and idle; failures are ignored.
    pub(super) fn destroy_all(&mut self) {
        for (address, _) in std::mem::take(&mut self.live) {
            // SAFETY: the allocation is live, and no work is left that could touch it.
            unsafe { sys::cuMemFreeAsync(address.0, ptr::null_mut()) };
        }
        // SAFETY: waits for the frees above, so that destroying a pool gives its memory back.
        unsafe { sys::cuCtxSynchronize() };
        for (number, pool) in self.pools.drain(..).enumerate() {
            match pool {
                // The default pool outlives this device, and the memory it keeps would be missing
                // from the next.
                Some(DriverPool { handle, .. }) if number == 0 => restore_default(handle),
                // SAFETY: the pool was made here and is destroyed only here.
                Some(DriverPool { handle, .. }) => drop(unsafe { sys::cuMemPoolDestroy(handle) }),
                None => {}
            }
        }
        *self = DriverPools::default();
    }

    fn get(&self, pool: PoolId) -> Result<DriverPool, String> {
        self.pools.get(pool.0 as usize).copied().flatten().ok_or_else(|| format!("there is no pool {}", pool.0))
    }

    fn get_mut(&mut self, pool: PoolId) -> Option<&mut DriverPool> {
        self.pools.get_mut(pool.0 as usize)?.as_mut()
    }
}

impl CudaDevice {
    /// The pool of that number; the default pool is looked up when it is first used.
    fn pool(&mut self, call: CallKind, pool: PoolId) -> Result<DriverPool, DeviceError> {
        if pool.0 == 0 && self.pools.get(pool).is_err() {
            let mut handle = ptr::null_mut();
            // SAFETY: the pointer is to a live handle.
            let code = unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut handle, self.context.device) };
            succeed(code).map_err(|code| device_error(call, 0, code))?;
            if self.pools.pools.is_empty() {
                self.pools.pools.push(None);
            }
            self.pools.pools[0] = Some(DriverPool { handle, maximum: u64::MAX, used: 0, reserved: 0 });
        }
        let found = self.pools.get(pool);
        self.refuse_broken(call, found)
    }

    /// Updates the reserved bytes of a pool without counting a call of the caller's.
    fn update_reserved(&mut self, pool: PoolId) {
        if let Ok(DriverPool { handle, .. }) = self.pools.get(pool)
            && let Ok(reserved) = read(handle, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
            && let Some(pool) = self.pools.get_mut(pool)
        {
            pool.reserved = reserved;
        }
    }
}

impl StreamOrderedPools for CudaDevice {
    fn pool_create(&mut self, max_bytes: Option<u64>) -> Result<PoolId, DeviceError> {
        let page_bytes = self.props.page_bytes;
        // Whole pages, and never 0: that means no limit to the driver.
        let maximum = max_bytes.map_or(u64::MAX, |bytes| (bytes / page_bytes * page_bytes).max(page_bytes));
        let knows_maximum = library::version().is_some_and(|version| version >= KNOWS_MAXIMUM);
        let properties = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: context::location(self.context.device),
            win32SecurityAttributes: ptr::null_mut(),
            maxSize: if knows_maximum && max_bytes.is_some() { maximum as usize } else { 0 },
            usage: 0,
            reserved: [0; 54],
        };
        let mut handle = ptr::null_mut();
        // SAFETY: both pointers are to live values.
        self.drive(CallKind::PoolCreate, 0, || unsafe {
            sys::cuMemPoolCreate(&raw mut handle, &raw const properties)
        })?;
        if self.pools.pools.is_empty() {
            self.pools.pools.push(None);
        }
        self.pools.pools.push(Some(DriverPool { handle, maximum, used: 0, reserved: 0 }));
        Ok(PoolId((self.pools.pools.len() - 1) as u32))
    }

    fn pool_destroy(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        let call = CallKind::PoolDestroy;
        let DriverPool { handle, used, .. } = self.pool(call, pool)?;
        if pool.0 == 0 || used > 0 {
            return self.refuse_because(call, format!("pool {} is the default pool or still in use", pool.0));
        }
        // SAFETY: the pool was made here, and nothing is allocated from it.
        self.drive(call, 0, || unsafe { sys::cuMemPoolDestroy(handle) })?;
        self.pools.pools[pool.0 as usize] = None;
        Ok(())
    }

    fn pool_configure(&mut self, pool: PoolId, settings: PoolSettings) -> Result<(), DeviceError> {
        use CUmemPool_attribute as Attribute;
        let call = CallKind::PoolSetAttribute;
        let DriverPool { handle, .. } = self.pool(call, pool)?;
        let rules = [
            (Attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, settings.follow_event_dependencies),
            (Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, settings.allow_opportunistic),
            (Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, settings.allow_internal_dependencies),
        ];
        let mut threshold = settings.release_threshold;
        self.drive(call, 0, || {
            for (attribute, allowed) in rules {
                let mut value = i32::from(allowed);
                // SAFETY: the pool is live, and these attributes are plain integers.
                let code = unsafe { sys::cuMemPoolSetAttribute(handle, attribute, (&raw mut value).cast()) };
                if code != CUresult::CUDA_SUCCESS {
                    return code;
                }
            }
            let attribute = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            // SAFETY: the pool is live, and this attribute is 64 bits wide.
            unsafe { sys::cuMemPoolSetAttribute(handle, attribute, (&raw mut threshold).cast()) }
        })
    }

    fn pool_trim(&mut self, pool: PoolId, keep_bytes: u64) -> Result<(), DeviceError> {
        let call = CallKind::PoolTrim;
        let DriverPool { handle, .. } = self.pool(call, pool)?;
        // SAFETY: the pool is live.
        self.drive(call, 0, || unsafe { sys::cuMemPoolTrimTo(handle, keep_bytes as usize) })?;
        self.update_reserved(pool);
        Ok(())
    }

    fn pool_usage(&mut self, pool: PoolId) -> Result<PoolUsage, DeviceError> {
        use CUmemPool_attribute as Attribute;
        let call = CallKind::PoolGetAttribute;
        let DriverPool { handle, .. } = self.pool(call, pool)?;
        let mut usage = PoolUsage::default();
        self.drive(call, 0, || {
            for (attribute, value) in [
                (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &mut usage.reserved),
                (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &mut usage.reserved_high),
                (Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &mut usage.used),
                (Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, &mut usage.used_high),
            ] {
                match read(handle, attribute) {
                    Ok(bytes) => *value = bytes,
                    Err(code) => return code,
                }
            }
            CUresult::CUDA_SUCCESS
        })?;
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.reserved = usage.reserved;
        }
        Ok(usage)
    }

    fn alloc_async(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<Address, DeviceError> {
        let call = CallKind::MemAllocAsync;
        let DriverPool { handle, maximum, used, .. } = self.pool(call, pool)?;
        let on_stream = self.stream(call, stream)?;
        if bytes > maximum.min(self.props.total_bytes).saturating_sub(used) {
            return self.refuse(DeviceError::OutOfMemory { call, requested: bytes });
        }
        let mut address = 0;
        // SAFETY: pool and stream are live, the pointer is to a live address.
        self.drive(call, bytes, || unsafe {
            sys::cuMemAllocFromPoolAsync(&raw mut address, bytes as usize, handle, on_stream)
        })?;
        let address = Address(address);
        self.pools.live.insert(address, bytes);
        self.pools.pool_of.insert(address, pool);
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.used += bytes;
        }
        Ok(address)
    }

    fn free_async(&mut self, address: Address, stream: StreamId) -> Result<(), DeviceError> {
        let call = CallKind::MemFreeAsync;
        let on_stream = self.stream(call, stream)?;
        if !self.pools.live.contains_key(&address) {
            return self.refuse_because(call, format!("no allocation from a pool starts at {address}"));
        }
        // SAFETY: the allocation is live, and the caller orders its uses before this point of the
        // stream.
        self.drive(call, 0, || unsafe { sys::cuMemFreeAsync(address.0, on_stream) })?;
        let bytes = self.pools.live.remove(&address).unwrap_or(0);
        if let Some(pool) = self.pools.pool_of.remove(&address)
            && let Some(pool) = self.pools.get_mut(pool)
        {
            pool.used -= bytes;
        }
        Ok(())
    }
}

/// Empties a pool and sets its threshold to 0, the initial state of a default pool. Failures are
/// ignored.
fn restore_default(pool: sys::CUmemoryPool) {
    let mut keep_nothing = 0u64;
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the default pool lives as long as its GPU, and this attribute is 64 bits wide.
    unsafe {
        sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep_nothing).cast());
        sys::cuMemPoolTrimTo(pool, 0);
    }
}

fn read(pool: sys::CUmemoryPool, attribute: CUmemPool_attribute) -> Result<u64, CUresult> {
    let mut bytes = 0u64;
    // SAFETY: the pool is live, and the attributes read here are 64 bits wide.
    succeed(unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) })?;
    Ok(bytes)
}

//! Stream-ordered pools: `cudaMallocAsync` and its family. The rules are `oomph_driver`'s.

use std::collections::BTreeMap;

use oomph_driver::{OrderedPool, PoolRules, RANGE_BYTES};

use crate::{
    arguments::{In, Out, new_handle},
    errors::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, conclude},
    memory::PAGE_BYTES,
    served::{self, Origin},
    served_call::ServedCall,
    state::{self, Shadow, current},
    streams,
};

/// Sizes are rounded up to this.
const GRANULE: u64 = 512;

/// All pools, by handle.
pub struct Pools {
    by_handle: BTreeMap<u64, Pool>,
    /// The default pool and the current pool of each device.
    defaults: Vec<u64>,
    chosen: Vec<u64>,
    /// Live allocations: pool and length by start.
    live: BTreeMap<u64, (u64, u64)>,
}

struct Pool {
    device: usize,
    rules: PoolRules,
    threshold: u64,
    memory: OrderedPool,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    /// Its number at the server, where one is set. The default pool is 0.
    served: u64,
}

impl Pool {
    fn new(device: usize) -> Pool {
        let rules = PoolRules::DRIVER_DEFAULT;
        Pool {
            device,
            rules,
            threshold: 0,
            memory: OrderedPool::default(),
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            served: 0,
        }
    }

    /// The rules as the server takes them.
    fn served_settings(&self) -> [u64; 3] {
        let PoolRules { follow_event_dependencies, allow_opportunistic, allow_internal_dependencies } = self.rules;
        let flags = [follow_event_dependencies, allow_opportunistic, allow_internal_dependencies];
        let bits = flags.iter().rev().fold(0, |bits, &flag| bits << 1 | u64::from(flag));
        [self.served, self.threshold, bits]
    }
}

impl Pools {
    pub fn new(devices: usize) -> Pools {
        let mut pools =
            Pools { by_handle: BTreeMap::new(), defaults: Vec::new(), chosen: Vec::new(), live: BTreeMap::new() };
        for device in 0..devices {
            let handle = pools.create(device);
            pools.defaults.push(handle);
            pools.chosen.push(handle);
        }
        pools
    }

    fn create(&mut self, device: usize) -> u64 {
        let handle = new_handle(0);
        self.by_handle.insert(handle, Pool::new(device));
        handle
    }

    /// The allocation that contains an address: device, start, length.
    pub fn containing(&self, address: u64) -> Option<(usize, u64, u64)> {
        let (&start, &(pool, bytes)) = self.live.range(..=address).next_back()?;
        (address < start + bytes).then(|| (self.by_handle.get(&pool).map_or(0, |pool| pool.device), start, bytes))
    }
}

impl Shadow {
    fn allocate_ordered(&mut self, pool: u64, bytes: u64, stream: u64) -> Result<u64, i32> {
        self.clocks.elapse(streams::CALL_NANOS);
        if bytes == 0 {
            return Ok(0);
        }
        let size = bytes.checked_next_multiple_of(GRANULE).ok_or(OUT_OF_MEMORY)?;
        let (starts, now) = (self.clocks.ready(stream), self.clocks.now());
        let target = self.pools.by_handle.get_mut(&pool).ok_or(INVALID_VALUE)?;
        let mut found = target.memory.find(target.rules, size, stream, starts, now);
        if found.is_none() {
            self.grow(pool, size);
            let target = self.pools.by_handle.get_mut(&pool).ok_or(INVALID_VALUE)?;
            found = target.memory.best_for(size, stream).map(|piece| (piece, 0));
        }
        let (piece, until) = found.ok_or(OUT_OF_MEMORY)?;
        self.clocks.hold(stream, until);
        let target = self.pools.by_handle.get_mut(&pool).ok_or(INVALID_VALUE)?;
        let start = target.memory.take(piece, size);
        target.used += size;
        target.used_high = target.used_high.max(target.used);
        self.pools.live.insert(start, (pool, size));
        self.values.forget(start, size);
        Ok(start)
    }

    /// Frees memory of a pool in the order of a stream.
    pub fn free_ordered(&mut self, address: u64, stream: u64) -> i32 {
        self.clocks.elapse(streams::CALL_NANOS);
        if address == 0 {
            return SUCCESS;
        }
        let ready = self.clocks.ready(stream);
        let Some((pool, bytes)) = self.pools.live.remove(&address) else { return INVALID_VALUE };
        if let Some(pool) = self.pools.by_handle.get_mut(&pool) {
            pool.used -= bytes;
            pool.memory.give_back(address, bytes, stream, ready);
        }
        SUCCESS
    }

    /// Adds a chunk of whole 32 MiB, or of whole pages where there is no room for that.
    fn grow(&mut self, pool: u64, bytes: u64) {
        let Some(target) = self.pools.by_handle.get_mut(&pool) else { return };
        let Some(device) = self.devices.get_mut(target.device) else { return };
        let sizes = [RANGE_BYTES, PAGE_BYTES].map(|step| bytes.next_multiple_of(step));
        let Some(chunk) = sizes.into_iter().find(|&chunk| chunk <= device.free_bytes()) else { return };
        let Some(start) = self.virtual_space.addresses.take(chunk) else { return };
        device.take(chunk);
        target.memory.add_chunk(start, chunk);
        target.reserved += chunk;
        target.reserved_high = target.reserved_high.max(target.reserved);
    }

    /// Gives idle chunks back while the pool holds more than `keep`.
    fn shrink(&mut self, pool: u64, keep: u64) {
        let now = self.clocks.now();
        let Some(target) = self.pools.by_handle.get_mut(&pool) else { return };
        while target.reserved > keep
            && let Some((start, bytes)) = target.memory.remove_idle_chunk(now)
        {
            target.reserved -= bytes;
            self.devices[target.device].give_back(bytes);
            self.virtual_space.addresses.give_back(start, bytes);
        }
    }

    /// What the driver does when the host waits: memory above the release threshold goes back.
    pub fn release_above_thresholds(&mut self) {
        let above =
            |(&handle, pool): (&u64, &Pool)| (pool.reserved > pool.threshold).then_some((handle, pool.threshold));
        let pools: Vec<(u64, u64)> = self.pools.by_handle.iter().filter_map(above).collect();
        for (pool, threshold) in pools {
            self.shrink(pool, threshold);
        }
    }
}

/// `cudaMemPoolAttr`, `CUmemPool_attribute`: 1 to 3 are rules, 4 the threshold, 5 to 8 usage.
fn attribute(pool: u64, attribute: i32, value: *mut u8) -> i32 {
    let shadow = state::lock();
    let Some(pool) = shadow.pools.by_handle.get(&pool) else { return INVALID_VALUE };
    if (5..=8).contains(&attribute)
        && let Some((code, usage)) = served::ask(ServedCall::PoolUsage, [pool.served, 0, 0])
    {
        Out(value.cast::<u64>()).set(usage[attribute as usize - 5]);
        return code;
    }
    let flag = |set: bool| Out(value.cast::<i32>()).set(i32::from(set));
    match attribute {
        1 => flag(pool.rules.follow_event_dependencies),
        2 => flag(pool.rules.allow_opportunistic),
        3 => flag(pool.rules.allow_internal_dependencies),
        4 => Out(value.cast::<u64>()).set(pool.threshold),
        5 => Out(value.cast::<u64>()).set(pool.reserved),
        6 => Out(value.cast::<u64>()).set(pool.reserved_high),
        7 => Out(value.cast::<u64>()).set(pool.used),
        8 => Out(value.cast::<u64>()).set(pool.used_high),
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

fn set_attribute(pool: u64, attribute: i32, value: *const u8) -> i32 {
    let mut shadow = state::lock();
    let Some(pool) = shadow.pools.by_handle.get_mut(&pool) else { return INVALID_VALUE };
    let flag = In(value.cast::<i32>()).get().unwrap_or(0) != 0;
    let number = || In(value.cast::<u64>()).get().unwrap_or(0);
    match attribute {
        1 => pool.rules.follow_event_dependencies = flag,
        2 => pool.rules.allow_opportunistic = flag,
        3 => pool.rules.allow_internal_dependencies = flag,
        4 => pool.threshold = number(),
        6 => pool.reserved_high = pool.reserved,
        8 => pool.used_high = pool.used,
        _ => return INVALID_VALUE,
    }
    let settings = pool.served_settings();
    drop(shadow);
    served::code(ServedCall::PoolConfigure, settings).unwrap_or(SUCCESS)
}

fn create(pool: Out<u64>) -> i32 {
    let served = match served::value(ServedCall::PoolCreate, [0; 3]) {
        Some(Err(code)) => return code,
        made => made.and_then(Result::ok).unwrap_or(0),
    };
    let mut shadow = state::lock();
    let handle = shadow.pools.create(current::device());
    shadow.pools.by_handle.entry(handle).and_modify(|pool| pool.served = served);
    pool.set(handle);
    SUCCESS
}

fn destroy(pool: u64) -> i32 {
    let mut shadow = state::lock();
    if shadow.pools.defaults.contains(&pool) {
        return INVALID_VALUE;
    }
    if let Some(of) = shadow.pools.by_handle.get(&pool)
        && let Some(code) = served::code(ServedCall::PoolDestroy, [of.served, 0, 0])
        && code != SUCCESS
    {
        return code;
    }
    shadow.clocks.synchronize_all();
    shadow.shrink(pool, 0);
    shadow.pools.by_handle.remove(&pool).map_or(INVALID_VALUE, |_| SUCCESS)
}

fn device_pool(pool: Out<u64>, device: i32, defaults: bool) -> i32 {
    let shadow = state::lock();
    let list = if defaults { &shadow.pools.defaults } else { &shadow.pools.chosen };
    let found = list.get(device as usize).copied();
    pool.set(found.unwrap_or(0));
    found.map_or(INVALID_VALUE, |_| SUCCESS)
}

fn choose(device: i32, pool: u64) -> i32 {
    match state::lock().pools.chosen.get_mut(device as usize) {
        Some(chosen) => {
            *chosen = pool;
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}

fn allocate(pointer: Out<u64>, bytes: u64, pool: Option<u64>, stream: u64) -> i32 {
    let mut shadow = state::lock();
    let pool = pool.unwrap_or(shadow.pools.chosen[current::device()]);
    let allocated = match shadow.pools.by_handle.get(&pool).map(|pool| pool.served) {
        Some(number) if served::is_set() => {
            drop(shadow);
            allocate_served(number, bytes, stream)
        }
        _ => shadow.allocate_ordered(pool, bytes, stream),
    };
    match allocated {
        Ok(start) => {
            pointer.set(start);
            SUCCESS
        }
        Err(code) => {
            pointer.set(0);
            code
        }
    }
}

fn allocate_served(pool: u64, bytes: u64, stream: u64) -> Result<u64, i32> {
    if bytes == 0 {
        return Ok(0);
    }
    let start = served::value(ServedCall::AllocAsync, [pool, bytes, stream]).unwrap_or(Err(INVALID_VALUE))?;
    served::note(start, bytes, Origin::OfPool);
    Ok(start)
}

/// Frees memory of one of the server's pools.
pub fn free_served(address: u64, stream: u64) -> i32 {
    let code = served::code(ServedCall::FreeAsync, [address, stream, 0]).unwrap_or(INVALID_VALUE);
    if code == SUCCESS {
        served::forget(address, 1, Origin::OfPool);
    }
    code
}

fn free(address: u64, stream: u64) -> i32 {
    match served::is_set() {
        true if address == 0 => SUCCESS,
        true => free_served(address, stream),
        false => state::lock().free_ordered(address, stream),
    }
}

fn trim(pool: u64, keep: u64) -> i32 {
    let mut shadow = state::lock();
    let number = shadow.pools.by_handle.get(&pool).map_or(0, |pool| pool.served);
    if let Some(code) = served::code(ServedCall::PoolTrim, [number, keep, 0]) {
        return code;
    }
    shadow.shrink(pool, keep);
    SUCCESS
}

cuda_functions! {
    fn cudaMallocAsync(pointer: Out<u64>, bytes: u64, stream: u64) -> i32 { conclude(allocate(pointer, bytes, None, stream)) }
    fn cudaMallocFromPoolAsync(pointer: Out<u64>, bytes: u64, pool: u64, stream: u64) -> i32 { conclude(allocate(pointer, bytes, Some(pool), stream)) }
    fn cudaFreeAsync(pointer: u64, stream: u64) -> i32 { conclude(free(pointer, stream)) }
    fn cudaDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) -> i32 { device_pool(pool, device, true) }
    fn cudaDeviceGetMemPool(pool: Out<u64>, device: i32) -> i32 { device_pool(pool, device, false) }
    fn cudaDeviceSetMemPool(device: i32, pool: u64) -> i32 { choose(device, pool) }
    fn cudaMemPoolCreate(pool: Out<u64>, _properties: u64) -> i32 { create(pool) }
    fn cudaMemPoolDestroy(pool: u64) -> i32 { destroy(pool) }
    fn cudaMemPoolGetAttribute(pool: u64, name: i32, value: *mut u8) -> i32 { attribute(pool, name, value) }
    fn cudaMemPoolSetAttribute(pool: u64, name: i32, value: *const u8) -> i32 { set_attribute(pool, name, value) }
    fn cudaMemPoolTrimTo(pool: u64, keep: u64) -> i32 { trim(pool, keep) }
    fn cuMemAllocAsync(pointer: Out<u64>, bytes: u64, stream: u64) -> i32 { allocate(pointer, bytes, None, stream) }
    fn cuMemAllocFromPoolAsync(pointer: Out<u64>, bytes: u64, pool: u64, stream: u64) -> i32 { allocate(pointer, bytes, Some(pool), stream) }
    fn cuMemFreeAsync(pointer: u64, stream: u64) -> i32 { free(pointer, stream) }
    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) -> i32 { device_pool(pool, device, true) }
    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) -> i32 { device_pool(pool, device, false) }
    fn cuDeviceSetMemPool(device: i32, pool: u64) -> i32 { choose(device, pool) }
    fn cuMemPoolCreate(pool: Out<u64>, _properties: u64) -> i32 { create(pool) }
    fn cuMemPoolDestroy(pool: u64) -> i32 { destroy(pool) }
    fn cuMemPoolGetAttribute(pool: u64, name: i32, value: *mut u8) -> i32 { attribute(pool, name, value) }
    fn cuMemPoolSetAttribute(pool: u64, name: i32, value: *const u8) -> i32 { set_attribute(pool, name, value) }
    fn cuMemPoolTrimTo(pool: u64, keep: u64) -> i32 { trim(pool, keep) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_serves_several_requests_and_is_trimmed() {
        let mut shadow = state::lock();
        let pool = shadow.pools.create(0);
        let (first, second) =
            (shadow.allocate_ordered(pool, 1000, 0).unwrap(), shadow.allocate_ordered(pool, 1 << 20, 0).unwrap());
        assert_eq!(second, first + 1024);
        assert_eq!(shadow.pools.by_handle[&pool].reserved, RANGE_BYTES);
        assert_eq!((shadow.free_ordered(first, 0), shadow.free_ordered(first, 0)), (SUCCESS, INVALID_VALUE));
        assert_eq!(shadow.allocate_ordered(pool, 512, 0), Ok(first), "the stream reuses what it freed");
        shadow.free_ordered(first, 0);
        shadow.free_ordered(second, 0);
        shadow.clocks.synchronize_all();
        shadow.shrink(pool, 0);
        assert_eq!(
            (shadow.pools.by_handle[&pool].reserved, shadow.pools.by_handle[&pool].used_high),
            (0, 1024 + (1 << 20))
        );
    }
}

//! Stream-ordered pools: a simple model of the driver's own allocator.
//!
//! [`OrderedPool`] has the rules of reuse; here are chunks, limits and the calls. Free memory above the release threshold is
//! given back when the host waits, whole chunks at a time, the highest first.

use std::collections::BTreeMap;

use super::{CostCondition, SimDevice, contents::PhysicalRegion, found_or_out_of_memory};
use crate::device::{CallKind, DeviceError, PoolId, PoolSettings, PoolUsage, StreamOrderedPools};
use oomph_base::{Address, Nanos, StreamId, round_up};
use oomph_driver::{OrderedPool, PoolRules, RANGE_BYTES};

/// Sizes are rounded up to this.
const GRANULE: u64 = 512;

/// All pools of a device. The first is the default pool, which is always there.
#[derive(Clone, Debug)]
pub(super) struct PoolSpace {
    pools: Vec<Option<SimPool>>,
    /// Live allocations: which pool, and how large.
    live: BTreeMap<Address, (PoolId, u64)>,
}

#[derive(Clone, Debug)]
struct SimPool {
    settings: PoolSettings,
    maximum: u64,
    usage: PoolUsage,
    memory: OrderedPool,
}

impl SimPool {
    fn new(maximum: u64) -> SimPool {
        let settings = PoolSettings::DRIVER_DEFAULT;
        SimPool { settings, maximum, usage: PoolUsage::default(), memory: OrderedPool::default() }
    }

    fn rules(&self) -> PoolRules {
        PoolRules {
            follow_event_dependencies: self.settings.follow_event_dependencies,
            allow_opportunistic: self.settings.allow_opportunistic,
            allow_internal_dependencies: self.settings.allow_internal_dependencies,
        }
    }
}

/// A stream as the pool knows it.
fn number(stream: StreamId) -> u64 {
    u64::from(stream.0)
}

impl PoolSpace {
    pub(super) fn new() -> PoolSpace {
        PoolSpace { pools: vec![Some(SimPool::new(u64::MAX))], live: BTreeMap::new() }
    }

    fn get(&mut self, pool: PoolId) -> Result<&mut SimPool, String> {
        let place = self.pools.get_mut(pool.0 as usize);
        place.and_then(Option::as_mut).ok_or_else(|| format!("there is no pool {}", pool.0))
    }

    /// How many bytes from an address on lie in one chunk of some pool, if it lies in any.
    pub(super) fn chunk_at(&self, address: u64) -> Option<u64> {
        self.pools.iter().flatten().find_map(|pool| pool.memory.chunk_at(address))
    }
}

impl SimDevice {
    /// Gives chunks of a pool back that are idle by `moment`, while it holds more than
    /// `keep_bytes`.
    fn shrink(&mut self, pool: PoolId, keep_bytes: u64, moment: Nanos) {
        let unused_from = moment.min(self.clocks.all_ready().max(self.clocks.now()));
        self.settle_contents(unused_from);
        let Ok(pool) = self.pools.get(pool) else { return };
        let mut given_back = 0;
        while pool.usage.reserved > keep_bytes
            && let Some((start, bytes)) = pool.memory.remove_idle_chunk(moment.0)
        {
            pool.usage.reserved -= bytes;
            self.contents.forget(PhysicalRegion::Addressed, start, bytes);
            self.virtual_space.give_back_range(start, bytes);
            given_back += bytes;
        }
        self.give_back(given_back, unused_from);
    }

    /// What the driver does when the host waits for something.
    pub(super) fn release_above_thresholds(&mut self) {
        for number in 0..self.pools.pools.len() {
            let pool = PoolId(number as u32);
            let threshold = match self.pools.get(pool) {
                Ok(pool) if pool.usage.reserved > pool.settings.release_threshold => pool.settings.release_threshold,
                _ => continue,
            };
            self.shrink(pool, threshold, self.clocks.now());
        }
    }

    /// Adds a chunk of at least that size to a pool, where there is room.
    fn grow(&mut self, pool: PoolId, bytes: u64) {
        let page_bytes = self.props.page_bytes;
        let Ok(target) = self.pools.get(pool) else { return };
        let room = target.maximum.saturating_sub(target.usage.reserved).min(self.memory.free());
        let sizes = [RANGE_BYTES, page_bytes].map(|step| round_up(bytes, step));
        let Some(chunk) = sizes.into_iter().find(|chunk| (bytes..=room).contains(chunk)) else { return };
        let Some(start) = self.virtual_space.take_range(chunk) else { return };
        if !self.memory.take(chunk) {
            self.virtual_space.give_back_range(start, chunk);
            return;
        }
        target.memory.add_chunk(start, chunk);
        target.usage.reserved += chunk;
        target.usage.reserved_high = target.usage.reserved_high.max(target.usage.reserved);
    }

    /// The address, `None` where memory has run out, or which rule is broken.
    fn take_from_pool(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<Option<Address>, String> {
        if bytes == 0 {
            return Err("the size is zero".to_owned());
        }
        let starts = self.clocks.stream_ready(stream).map_err(|unknown| unknown.to_string())?;
        let (now, size) = (self.clocks.now(), round_up(bytes, GRANULE));
        if size < bytes {
            return Ok(None);
        }
        let target = self.pools.get(pool)?;
        let mut found = target.memory.find(target.rules(), size, number(stream), starts.0, now.0);
        if found.is_none() {
            self.grow(pool, size);
            found = self.pools.get(pool)?.memory.best_for(size, number(stream)).map(|piece| (piece, 0));
        }
        let Some((piece, until)) = found else { return Ok(None) };
        self.clocks.hold_until(stream, Nanos(until));
        let target = self.pools.get(pool)?;
        let address = Address(target.memory.take(piece, size));
        target.usage.used += size;
        target.usage.used_high = target.usage.used_high.max(target.usage.used);
        self.pools.live.insert(address, (pool, size));
        Ok(Some(address))
    }

    fn return_to_pool(&mut self, address: Address, stream: StreamId) -> Result<u64, String> {
        let ready = self.clocks.stream_ready(stream).map_err(|unknown| unknown.to_string())?;
        let Some(&(pool, bytes)) = self.pools.live.get(&address) else {
            return Err(format!("no allocation from a pool starts at {address}"));
        };
        self.pools.live.remove(&address);
        let pool = self.pools.get(pool)?;
        pool.usage.used -= bytes;
        pool.memory.give_back(address.0, bytes, number(stream), ready.0);
        Ok(bytes)
    }
}

impl StreamOrderedPools for SimDevice {
    fn pool_create(&mut self, max_bytes: Option<u64>) -> Result<PoolId, DeviceError> {
        self.pools.pools.push(Some(SimPool::new(max_bytes.unwrap_or(u64::MAX))));
        let pool = PoolId((self.pools.pools.len() - 1) as u32);
        self.conclude(CallKind::PoolCreate, 0, Ok(pool))
    }

    fn pool_destroy(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        let answer = match self.pools.get(pool) {
            Ok(_) if pool.0 == 0 => Err("the default pool stays".to_owned()),
            Ok(found) if found.usage.used > 0 => Err(format!("pool {} is still in use", pool.0)),
            Ok(_) => Ok(()),
            Err(reason) => Err(reason),
        };
        if answer.is_ok() {
            // Pending frees would give their memory back one by one; the caller cannot see the
            // difference.
            self.shrink(pool, 0, Nanos(u64::MAX));
            self.pools.pools[pool.0 as usize] = None;
        }
        self.conclude_checked(CallKind::PoolDestroy, 0, answer)
    }

    fn pool_configure(&mut self, pool: PoolId, settings: PoolSettings) -> Result<(), DeviceError> {
        let answer = self.pools.get(pool).map(|pool| pool.settings = settings);
        self.conclude_checked(CallKind::PoolSetAttribute, 0, answer)
    }

    fn pool_trim(&mut self, pool: PoolId, keep_bytes: u64) -> Result<(), DeviceError> {
        let answer = self.pools.get(pool).map(|_| ());
        let before = self.memory.held;
        self.shrink(pool, keep_bytes, self.clocks.now());
        self.conclude_checked(CallKind::PoolTrim, before - self.memory.held, answer)
    }

    fn pool_usage(&mut self, pool: PoolId) -> Result<PoolUsage, DeviceError> {
        let answer = self.pools.get(pool).map(|pool| pool.usage);
        self.conclude_checked(CallKind::PoolGetAttribute, 0, answer)
    }

    fn alloc_async(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<Address, DeviceError> {
        let call = CallKind::MemAllocAsync;
        let before = self.memory.held;
        let answer = self.take_from_pool(pool, bytes, stream);
        let cost = match self.memory.held - before {
            0 => self.profile.costs.cost(call, bytes),
            grown => self.profile.costs.cost_under(CostCondition::PoolGrows, call, grown),
        };
        self.conclude_costing(cost, Nanos::ZERO, call, found_or_out_of_memory(call, bytes, answer))
    }

    fn free_async(&mut self, address: Address, stream: StreamId) -> Result<(), DeviceError> {
        let answer = self.return_to_pool(address, stream);
        let bytes = *answer.as_ref().unwrap_or(&0);
        self.conclude_checked(CallKind::MemFreeAsync, bytes, answer.map(|_| ()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Compute, Device, sim::SimConfig};
    use oomph_base::{MIB, Work};

    const MAIN: StreamId = StreamId(0);
    const SIDE: StreamId = StreamId(1);

    /// A device with a second stream and a pool of at most that size in which nothing is reused
    /// across streams.
    fn pool_of(bytes: u64) -> (SimDevice, PoolId) {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        device.stream_create(0).unwrap();
        let pool = device.pool_create(Some(bytes)).unwrap();
        configure(&mut device, pool, [false; 3]);
        (device, pool)
    }

    fn configure(device: &mut SimDevice, pool: PoolId, rules: [bool; 3]) {
        let [follow_event_dependencies, allow_opportunistic, allow_internal_dependencies] = rules;
        let settings = PoolSettings {
            release_threshold: u64::MAX,
            follow_event_dependencies,
            allow_opportunistic,
            allow_internal_dependencies,
        };
        device.pool_configure(pool, settings).unwrap();
    }

    fn spin(device: &mut SimDevice, stream: StreamId) {
        device.launch(stream, &Work::Spin { nanos: Nanos(50_000_000) }, &[]).unwrap();
    }

    #[test]
    fn chunks_are_kept_until_a_trim() {
        let (mut device, pool) = pool_of(1 << 30);
        let address = device.alloc_async(pool, 3 * MIB, MAIN).unwrap();
        assert_eq!(device.held_bytes(), 32 * MIB);
        device.free_async(address, MAIN).unwrap();
        assert_eq!(device.alloc_async(pool, 1000, MAIN).unwrap(), address, "the same stream reuses at once");
        device.pool_trim(pool, 0).unwrap();
        assert_eq!(device.pool_usage(pool).unwrap().reserved, 32 * MIB, "the chunk is in use");
        device.free_async(address, MAIN).unwrap();
        device.pool_trim(pool, 0).unwrap();
        let usage = PoolUsage { reserved: 0, reserved_high: 32 * MIB, used: 0, used_high: 3 * MIB };
        assert_eq!((device.pool_usage(pool).unwrap(), device.held_bytes()), (usage, 0));
        device.pool_destroy(pool).unwrap();
        assert!(device.pool_usage(pool).is_err());
    }

    #[test]
    fn reuse_across_streams_follows_the_rules() {
        let reuses = |rules: [bool; 3], wait: bool| {
            let (mut device, pool) = pool_of(1 << 30);
            configure(&mut device, pool, rules);
            let address = device.alloc_async(pool, 32 * MIB, SIDE).unwrap();
            spin(&mut device, SIDE);
            device.free_async(address, SIDE).unwrap();
            if wait {
                device.synchronize().unwrap();
            }
            device.alloc_async(pool, 32 * MIB, MAIN).unwrap() == address
        };
        assert!(!reuses([false; 3], true), "without rules streams never share");
        assert!(reuses([false, true, false], true), "it has happened");
        assert!(!reuses([false, true, false], false), "it has not happened yet");
        assert!(reuses([false, false, true], false), "the stream is made to wait");
        assert!(!reuses([true, false, false], false), "no event orders the two");
    }

    #[test]
    fn an_event_allows_reuse_across_streams() {
        let (mut device, pool) = pool_of(1 << 30);
        configure(&mut device, pool, [true, false, false]);
        let address = device.alloc_async(pool, 32 * MIB, SIDE).unwrap();
        spin(&mut device, SIDE);
        device.free_async(address, SIDE).unwrap();
        let event = device.event_create().unwrap();
        device.event_record(event, SIDE).unwrap();
        device.stream_wait_event(MAIN, event).unwrap();
        assert_eq!(device.alloc_async(pool, 32 * MIB, MAIN).unwrap(), address);
    }

    #[test]
    fn an_inserted_wait_delays_the_stream() {
        let (mut device, pool) = pool_of(32 * MIB);
        configure(&mut device, pool, [false, false, true]);
        let address = device.alloc_async(pool, 32 * MIB, SIDE).unwrap();
        spin(&mut device, SIDE);
        device.free_async(address, SIDE).unwrap();
        device.alloc_async(pool, 32 * MIB, MAIN).unwrap();
        device.stream_synchronize(MAIN).unwrap();
        assert!(device.now() > Nanos(50_000_000));
    }

    #[test]
    fn a_full_pool_fails_and_adjacent_chunks_are_one() {
        let (mut device, pool) = pool_of(96 * MIB);
        let blocks: Vec<Address> = (0..3).map(|_| device.alloc_async(pool, 32 * MIB, MAIN).unwrap()).collect();
        assert!(device.alloc_async(pool, 512, MAIN).unwrap_err().is_out_of_memory());
        for &block in &blocks[..2] {
            device.free_async(block, MAIN).unwrap();
        }
        assert_eq!(device.alloc_async(pool, 60 * MIB, MAIN).unwrap(), blocks[0]);
        assert_eq!(device.held_bytes(), 96 * MIB);
        assert!(device.alloc_async(pool, u64::MAX, MAIN).unwrap_err().is_out_of_memory());
    }

    #[test]
    fn synchronize_trims_above_the_threshold() {
        let mut device = SimDevice::new(SimConfig::default()).unwrap();
        let pool = PoolId(0);
        let address = device.alloc_async(pool, 100 * MIB, MAIN).unwrap();
        device.free_async(address, MAIN).unwrap();
        assert_eq!(device.held_bytes(), 128 * MIB);
        device.stream_synchronize(MAIN).unwrap();
        assert_eq!(device.held_bytes(), 0, "the default pool keeps nothing");
    }

    #[test]
    fn misuse_is_refused() {
        let (mut device, pool) = pool_of(1 << 30);
        let address = device.alloc_async(pool, 512, MAIN).unwrap();
        for answer in [
            device.alloc_async(pool, 0, MAIN).map(|_| ()),
            device.alloc_async(PoolId(9), 512, MAIN).map(|_| ()),
            device.free_async(address.offset(512), MAIN),
            device.free_async(address, StreamId(9)),
            device.pool_destroy(pool),
            device.pool_destroy(PoolId(0)),
        ] {
            assert!(matches!(answer, Err(DeviceError::InvalidValue { .. })), "{answer:?}");
        }
    }
}

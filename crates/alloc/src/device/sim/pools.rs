//! Stream-ordered pools: a simple model of the driver's own allocator.
//!
//! How the real one works is not documented; this model follows the documented rules. A pool takes
//! memory in chunks of whole 32 MiB. A request is served from the smallest free piece that is large
//! enough and that the stream may use:
//!
//! 1. what the same stream freed, and, with opportunistic reuse, what is no longer in use on the
//!    device;
//! 2. what another stream freed, where events are followed and the stream already waits for that
//!    moment;
//! 3. the same without such a wait, where the driver may make the stream wait (internal
//!    dependencies);
//! 4. a new chunk, in a multiple of the page size where there is no room for 32 MiB.
//!
//! Whether an event orders two streams follows from their clocks: a stream that cannot start before
//! a moment is ordered after it. Adjacent chunks are one piece of memory. Free memory above the
//! release threshold is given back when the host waits, whole chunks at a time, the highest first.

use std::collections::{BTreeMap, BTreeSet};

use super::{SimDevice, address_space::RANGE_BYTES, contents::PhysicalRegion};
use crate::device::{CallKind, DeviceError, PoolId, PoolSettings, PoolUsage, StreamOrderedPools};
use oomph_base::{Address, Nanos, StreamId, round_up};

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
    /// Length by start.
    chunks: BTreeMap<u64, u64>,
    free: FreePieces,
}

impl SimPool {
    fn new(maximum: u64) -> SimPool {
        let settings = PoolSettings::DRIVER_DEFAULT;
        SimPool { settings, maximum, usage: PoolUsage::default(), chunks: BTreeMap::new(), free: FreePieces::default() }
    }

    /// A free piece that `stream` may use, and until when the stream must wait for it.
    fn find(&mut self, bytes: u64, stream: StreamId, starts: Nanos, now: Nanos) -> Option<(FreePiece, Nanos)> {
        if self.settings.allow_opportunistic {
            self.free.settle(now);
        }
        if let Some(piece) = self.free.best_for(bytes, stream) {
            return Some((piece, Nanos::ZERO));
        }
        let others = self.free.best_of_others(bytes, starts);
        if let Some(piece) = others.filter(|_| self.settings.follow_event_dependencies) {
            return Some((piece, Nanos::ZERO));
        }
        let soonest = self.free.soonest_of_others(bytes).filter(|_| self.settings.allow_internal_dependencies)?;
        Some((soonest, soonest.ready))
    }

    /// Takes `bytes` from the start of a free piece.
    fn take(&mut self, piece: FreePiece, bytes: u64) -> u64 {
        self.free.remove(piece.start);
        if piece.bytes > bytes {
            self.free.add(FreePiece { start: piece.start + bytes, bytes: piece.bytes - bytes, ..piece });
        }
        self.usage.used += bytes;
        self.usage.used_high = self.usage.used_high.max(self.usage.used);
        piece.start
    }

    /// The highest chunk in which nothing is in use at that moment.
    fn idle_chunk(&self, moment: Nanos) -> Option<(u64, u64)> {
        let idle = |&(&start, &bytes): &(&u64, &u64)| self.free.are_all(start, bytes, moment);
        self.chunks.iter().rev().find(idle).map(|(&start, &bytes)| (start, bytes))
    }
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
        self.pools.iter().flatten().find_map(|pool| {
            let (start, bytes) = pool.chunks.range(..=address).next_back()?;
            (start + bytes).checked_sub(address).filter(|&left| left > 0)
        })
    }
}

impl SimDevice {
    /// Gives chunks of a pool back that are idle by `moment`, while it holds more than
    /// `keep_bytes`.
    fn shrink(&mut self, pool: PoolId, keep_bytes: u64, moment: Nanos) {
        self.settle_contents(moment.min(self.clocks.all_ready().max(self.clocks.now())));
        let Ok(pool) = self.pools.get(pool) else { return };
        while pool.usage.reserved > keep_bytes
            && let Some((start, bytes)) = pool.idle_chunk(moment)
        {
            pool.free.remove_all(start, bytes);
            pool.chunks.remove(&start);
            pool.usage.reserved -= bytes;
            self.contents.forget(PhysicalRegion::Addressed, start, bytes);
            self.memory.held -= bytes;
            self.virtual_space.give_back_range(start, bytes);
        }
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
        target.chunks.insert(start, chunk);
        target.usage.reserved += chunk;
        target.usage.reserved_high = target.usage.reserved_high.max(target.usage.reserved);
        target.free.add(FreePiece { start, bytes: chunk, freed_on: None, ready: Nanos::ZERO });
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
        let mut found = self.pools.get(pool)?.find(size, stream, starts, now);
        if found.is_none() {
            self.grow(pool, size);
            found = self.pools.get(pool)?.free.best_for(size, stream).map(|piece| (piece, Nanos::ZERO));
        }
        let Some((piece, until)) = found else { return Ok(None) };
        self.clocks.hold_until(stream, until);
        let address = Address(self.pools.get(pool)?.take(piece, size));
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
        pool.free.add(FreePiece { start: address.0, bytes, freed_on: Some(stream), ready });
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
            // Pending frees would give their memory back later; the caller cannot see the
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
        let answer = self.take_from_pool(pool, bytes, stream);
        self.conclude_allocation(call, bytes, answer)
    }

    fn free_async(&mut self, address: Address, stream: StreamId) -> Result<(), DeviceError> {
        let answer = self.return_to_pool(address, stream);
        let bytes = *answer.as_ref().unwrap_or(&0);
        self.conclude_checked(CallKind::MemFreeAsync, bytes, answer.map(|_| ()))
    }
}

/// A free piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreePiece {
    start: u64,
    bytes: u64,
    /// The stream that freed it; `None` once the free has happened on the device.
    freed_on: Option<StreamId>,
    /// When the free happens on the device.
    ready: Nanos,
}

/// Free pieces. Neighbours of the same owner are one piece.
#[derive(Clone, Debug, Default)]
struct FreePieces {
    by_start: BTreeMap<u64, FreePiece>,
    /// (owner, size, start): the best fit for an owner is the next entry.
    by_size: BTreeSet<(Option<StreamId>, u64, u64)>,
    /// (moment, start) of the pieces that have an owner.
    owned: BTreeSet<(Nanos, u64)>,
}

impl FreePieces {
    /// Adds a piece and merges it with neighbours of the same owner; the whole is free when the
    /// last part is.
    fn add(&mut self, mut piece: FreePiece) {
        let before = self.by_start.range(..piece.start).next_back().map(|(_, &before)| before);
        if let Some(before) = before
            && before.start + before.bytes == piece.start
            && before.freed_on == piece.freed_on
        {
            self.remove(before.start);
            piece = FreePiece { start: before.start, bytes: before.bytes + piece.bytes, ..piece };
            piece.ready = piece.ready.max(before.ready);
        }
        if let Some(&after) = self.by_start.get(&(piece.start + piece.bytes))
            && after.freed_on == piece.freed_on
        {
            self.remove(after.start);
            piece.bytes += after.bytes;
            piece.ready = piece.ready.max(after.ready);
        }
        self.by_start.insert(piece.start, piece);
        self.by_size.insert((piece.freed_on, piece.bytes, piece.start));
        if piece.freed_on.is_some() {
            self.owned.insert((piece.ready, piece.start));
        }
    }

    /// Removes the piece at an address.
    fn remove(&mut self, start: u64) {
        if let Some(piece) = self.by_start.remove(&start) {
            self.by_size.remove(&(piece.freed_on, piece.bytes, start));
            self.owned.remove(&(piece.ready, start));
        }
    }

    /// Pieces whose free has happened on the device lose their owner.
    fn settle(&mut self, now: Nanos) {
        while let Some(&(ready, start)) = self.owned.first()
            && ready <= now
            && let Some(&piece) = self.by_start.get(&start)
        {
            self.remove(start);
            self.add(FreePiece { freed_on: None, ..piece });
        }
    }

    /// The smallest piece that is large enough, among those of the stream and those without an
    /// owner.
    fn best_for(&self, bytes: u64, stream: StreamId) -> Option<FreePiece> {
        let best = |owner| self.by_size.range((owner, bytes, 0)..).next().filter(|&&(of, ..)| of == owner);
        let own = best(Some(stream));
        let unowned = best(None);
        let (_, _, start) = [own, unowned].into_iter().flatten().min_by_key(|&&(_, size, _)| size)?;
        self.by_start.get(start).copied()
    }

    /// The smallest piece that is large enough and free on the device by `moment`, from any stream.
    fn best_of_others(&self, bytes: u64, moment: Nanos) -> Option<FreePiece> {
        self.large_enough(bytes).take_while(|piece| piece.ready <= moment).min_by_key(|piece| piece.bytes)
    }

    /// The piece that is large enough and free on the device first.
    fn soonest_of_others(&self, bytes: u64) -> Option<FreePiece> {
        self.large_enough(bytes).next()
    }

    /// Whether all of a range is free on the device by `moment`.
    fn are_all(&self, start: u64, bytes: u64, moment: Nanos) -> bool {
        let mut at = start;
        while at < start + bytes {
            let Some((_, piece)) = self.by_start.range(..=at).next_back() else { return false };
            if piece.start + piece.bytes <= at || piece.ready > moment {
                return false;
            }
            at = piece.start + piece.bytes;
        }
        true
    }

    /// Removes a range that is free throughout; what lies beyond it on either side stays.
    fn remove_all(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        while let Some((_, &piece)) = self.by_start.range(..end).next_back()
            && piece.start + piece.bytes > start
        {
            self.remove(piece.start);
            if piece.start + piece.bytes > end {
                self.add(FreePiece { start: end, bytes: piece.start + piece.bytes - end, ..piece });
            }
            if piece.start < start {
                self.add(FreePiece { bytes: start - piece.start, ..piece });
            }
        }
    }

    /// Owned pieces of at least that size, the soonest free first.
    fn large_enough(&self, bytes: u64) -> impl Iterator<Item = FreePiece> + '_ {
        let pieces = self.owned.iter().filter_map(|(_, start)| self.by_start.get(start).copied());
        pieces.filter(move |piece| piece.bytes >= bytes)
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

    fn piece(start: u64, bytes: u64, freed_on: Option<u16>, ready: u64) -> FreePiece {
        FreePiece { start, bytes, freed_on: freed_on.map(StreamId), ready: Nanos(ready) }
    }

    #[test]
    fn neighbours_of_one_owner_are_merged() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 10, Some(1), 5));
        pieces.add(piece(20, 10, Some(1), 9));
        pieces.add(piece(30, 10, Some(2), 1));
        pieces.add(piece(10, 10, Some(1), 2));
        assert_eq!(pieces.best_for(30, StreamId(1)), Some(piece(0, 30, Some(1), 9)));
        assert_eq!(pieces.best_for(31, StreamId(1)), None);
        pieces.settle(Nanos(9));
        assert_eq!(pieces.best_for(40, StreamId(7)), Some(piece(0, 40, None, 9)));
    }

    #[test]
    fn the_smallest_fit_wins() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 50, Some(1), 5));
        pieces.add(piece(100, 20, None, 0));
        pieces.add(piece(200, 30, Some(2), 9));
        assert_eq!(pieces.best_for(20, StreamId(1)).unwrap().start, 100);
        assert_eq!(pieces.best_for(21, StreamId(1)).unwrap().start, 0);
        assert_eq!(pieces.best_of_others(25, Nanos(9)).unwrap().start, 200);
        assert_eq!(pieces.best_of_others(25, Nanos(5)).unwrap().start, 0);
        assert_eq!(pieces.soonest_of_others(25).unwrap().start, 0);
    }

    #[test]
    fn a_range_is_removed_from_larger_pieces() {
        let mut pieces = FreePieces::default();
        pieces.add(piece(0, 100, None, 0));
        assert!(pieces.are_all(20, 50, Nanos(0)) && !pieces.are_all(60, 50, Nanos(0)));
        pieces.remove_all(20, 50);
        assert_eq!(pieces.best_for(1, StreamId(0)), Some(piece(0, 20, None, 0)));
        assert_eq!(pieces.best_for(21, StreamId(0)), Some(piece(70, 30, None, 0)));
    }
}

//! The device that answers a plugin's CUDA calls, and what the plugin took from it.
//!
//! Limits, faults, costs and contents are the device's own, so a plugin is tested like any strategy. What it took is
//! counted here: a process that ends gives everything back.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use oomph_driver::{END, LOWEST};
use oomph_shadow::served_call::{ADDRESS_BYTES, ADDRESS_END, ServedArguments, ServedCall, ServedResults};

use super::cuda::CudaServer;
use crate::device::{Device, DeviceError, LONGEST_PATTERN_BYTES, Patterned, PhysicalId, PoolId, PoolSettings};
use oomph_base::{Address, EventId, StreamId};

/// Codes of `CUresult`.
const SUCCESS: i32 = 0;
const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_TIMEOUT: i32 = 702;
const NOT_SUPPORTED: i32 = 801;
const UNKNOWN: i32 = 999;

/// Handles that a plugin gets for its own events and streams begin here, a step apart.
const FIRST_EVENT: u64 = 0x2000_0000;
const FIRST_STREAM: u64 = 0x1000_0000;
const HANDLE_STEP: u64 = 0x40;
/// The contents of memory that a plugin overwrites itself. No block has this key.
const OVERWRITTEN: u32 = u32::MAX;

/// The address that a plugin's process sees for an address of the simulated device, and back: there the device's
/// addresses could be those of its own libraries.
const SHIFT: u64 = END - ADDRESS_END;

/// An address of the device as the plugin sees it.
pub(super) fn to_plugin(address: Address) -> u64 {
    let lowest = LOWEST.max(END - ADDRESS_BYTES);
    if (lowest..END).contains(&address.0) { address.0 - SHIFT } else { address.0 }
}

/// An address that the plugin sees, on the device.
pub(super) fn to_device(address: u64) -> Address {
    let window = ADDRESS_END - ADDRESS_BYTES..ADDRESS_END;
    Address(if window.contains(&address) { address + SHIFT } else { address })
}

/// What a plugin took from the device and has not given back.
#[derive(Debug, Default)]
pub(super) struct ServedBooks {
    /// Bytes of `cuMemAlloc` memory, by start.
    allocated: BTreeMap<Address, u64>,
    /// Bytes of pool memory, by start.
    of_pools: BTreeMap<Address, u64>,
    /// Bytes of mappings, by start.
    mapped: BTreeMap<Address, u64>,
    reserved: BTreeMap<Address, u64>,
    physical: BTreeMap<PhysicalId, u64>,
    events: BTreeSet<EventId>,
    pools: BTreeSet<PoolId>,
    /// Whether the default pool was used.
    uses_default_pool: bool,
    streams: HashMap<u64, StreamId>,
    own_streams: u64,
    /// The event of stream queries.
    query: Option<EventId>,
    /// Physical bytes, in whole pages, without pools.
    pages: u64,
    /// The same for pools, as of the last look.
    pool_pages: u64,
    /// Calls that take or give back memory.
    memory_calls: u64,
    /// The first call that breaks a rule of CUDA.
    pub(super) invalid: Option<String>,
}

impl ServedBooks {
    /// Physical bytes in whole pages.
    pub(super) fn held(&self) -> u64 {
        self.pages + self.pool_pages
    }

    /// Bytes as the plugin asked for them: not more than it can say that it holds.
    pub(super) fn asked(&self) -> u64 {
        let sum = |ranges: &BTreeMap<Address, u64>| ranges.values().sum::<u64>();
        sum(&self.allocated) + self.physical.values().sum::<u64>() + sum(&self.of_pools)
    }

    /// Whether it takes memory from the device at all.
    pub(super) fn takes_memory(&self) -> bool {
        self.memory_calls > 0
    }

    /// How many ranges it holds.
    pub(super) fn ranges(&self) -> usize {
        self.allocated.len() + self.of_pools.len() + self.physical.len()
    }

    /// How many address ranges it has reserved.
    pub(super) fn address_ranges(&self) -> usize {
        self.reserved.len()
    }

    /// How many events it has.
    pub(super) fn events(&self) -> usize {
        self.events.len()
    }

    /// The first byte of a range that is not memory of the plugin.
    pub(super) fn outside(&self, start: Address, bytes: u64) -> Option<Address> {
        let end = start.0.saturating_add(bytes);
        let mut at = start.0;
        while at < end {
            let reach = [&self.allocated, &self.of_pools, &self.mapped].into_iter().filter_map(|ranges| {
                let (from, bytes) = ranges.range(..=Address(at)).next_back()?;
                Some(from.0 + bytes).filter(|&reach| reach > at)
            });
            match reach.max() {
                Some(reach) => at = reach,
                None => return Some(Address(at)),
            }
        }
        None
    }

    /// Asks what its pools hold: the driver gives their memory back when the host waits.
    pub(super) fn look_at_pools(&mut self, device: &mut dyn Device) {
        let default = self.uses_default_pool.then_some(PoolId(0));
        if default.is_none() && self.pools.is_empty() {
            return;
        }
        let Some(pools) = device.stream_ordered_pools().ok() else { return };
        let reserved = |pool: PoolId| pools.pool_usage(pool).map_or(0, |usage| usage.reserved);
        self.pool_pages = self.pools.iter().copied().chain(default).map(reserved).sum();
    }

    /// Gives everything back, as the driver does for a process that has ended.
    pub(super) fn end_process(&mut self, device: &mut dyn Device) {
        // A device that fails here shows it in what it still holds.
        let _ = device.synchronize();
        for &address in self.allocated.keys() {
            let _ = device.free(address);
        }
        if let Ok(memory) = device.virtual_memory() {
            for (&address, &bytes) in &self.mapped {
                let _ = memory.unmap(address, bytes);
            }
            for &physical in self.physical.keys() {
                let _ = memory.release(physical);
            }
            for (&address, &bytes) in &self.reserved {
                let _ = memory.address_free(address, bytes);
            }
        }
        if let Ok(pools) = device.stream_ordered_pools() {
            for &address in self.of_pools.keys() {
                let _ = pools.free_async(address, StreamId::DEFAULT);
            }
        }
        let _ = device.synchronize();
        if let Ok(pools) = device.stream_ordered_pools() {
            for &pool in &self.pools {
                let _ = pools.pool_destroy(pool);
            }
            if self.uses_default_pool {
                let _ = pools.pool_configure(PoolId(0), PoolSettings::DRIVER_DEFAULT);
                let _ = pools.pool_trim(PoolId(0), 0);
            }
        }
        for event in std::mem::take(&mut self.events).into_iter().chain(self.query.take()) {
            let _ = device.event_destroy(event);
        }
        *self = ServedBooks { own_streams: self.own_streams, ..ServedBooks::default() };
    }
}

/// A device that answers the calls of one plugin.
pub(super) struct DeviceServer<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) books: &'a mut ServedBooks,
}

impl CudaServer for DeviceServer<'_> {
    fn serve(&mut self, call: ServedCall, arguments: ServedArguments) -> (i32, ServedResults) {
        let before = self.device.held_bytes();
        let answer = self.answer(call, arguments);
        self.count_pages(call, before);
        match answer {
            Ok(results) => (SUCCESS, results),
            Err(ServeError::Device(error)) => {
                if let DeviceError::InvalidValue { .. } = error {
                    self.books.invalid.get_or_insert_with(|| error.to_string());
                }
                (code_of(&error), [0; 4])
            }
            Err(ServeError::UnknownHandle(what, handle)) => {
                self.books.invalid.get_or_insert_with(|| format!("{call:?}: there is no {what} {handle:#x}"));
                (INVALID_VALUE, [0; 4])
            }
        }
    }
}

/// Why a call fails.
enum ServeError {
    Device(DeviceError),
    UnknownHandle(&'static str, u64),
}

impl<E: Into<DeviceError>> From<E> for ServeError {
    fn from(error: E) -> ServeError {
        ServeError::Device(error.into())
    }
}

impl DeviceServer<'_> {
    fn answer(
        &mut self,
        call: ServedCall,
        [first, second, third]: ServedArguments,
    ) -> Result<ServedResults, ServeError> {
        let one = |value: u64| Ok([value, 0, 0, 0]);
        let done = |()| [0; 4];
        match call {
            ServedCall::MemAlloc
            | ServedCall::MemFree
            | ServedCall::AddressReserve
            | ServedCall::AddressFree
            | ServedCall::MemCreate
            | ServedCall::MemRelease
            | ServedCall::MemMap
            | ServedCall::MemSetAccess
            | ServedCall::MemUnmap => self.memory(call, first, second, third),
            ServedCall::PoolCreate
            | ServedCall::PoolDestroy
            | ServedCall::PoolConfigure
            | ServedCall::PoolTrim
            | ServedCall::PoolUsage
            | ServedCall::AllocAsync
            | ServedCall::FreeAsync => self.pools(call, first, second, third),
            ServedCall::MemGetInfo => {
                let info = self.device.memory_info()?;
                Ok([info.free, info.total, 0, 0])
            }
            ServedCall::StreamCreate => {
                self.books.own_streams += 1;
                let handle = FIRST_STREAM + self.books.own_streams * HANDLE_STEP;
                // Streams of the device are numbered as the program creates them, so a plugin's own streams are the
                // default one. What they do is ordered more than on a GPU, never less.
                self.books.streams.insert(handle, StreamId::DEFAULT);
                one(handle)
            }
            ServedCall::StreamSynchronize => {
                let stream = self.stream(first)?;
                Ok(done(self.device.stream_synchronize(stream)?))
            }
            ServedCall::StreamQuery => one(u64::from(self.is_idle(first)?)),
            ServedCall::StreamWaitEvent => {
                let (stream, event) = (self.stream(first)?, self.event(second)?);
                Ok(done(self.device.stream_wait_event(stream, event)?))
            }
            ServedCall::CtxSynchronize => Ok(done(self.device.synchronize()?)),
            ServedCall::EventCreate => {
                let event = self.device.event_create()?;
                self.books.events.insert(event);
                one(FIRST_EVENT + u64::from(event.0) * HANDLE_STEP)
            }
            ServedCall::EventDestroy => {
                let event = self.event(first)?;
                self.device.event_destroy(event)?;
                self.books.events.remove(&event);
                Ok([0; 4])
            }
            ServedCall::EventRecord => {
                let (event, stream) = (self.event(first)?, self.stream(second)?);
                Ok(done(self.device.event_record(event, stream)?))
            }
            ServedCall::EventQuery => {
                let event = self.event(first)?;
                one(u64::from(self.device.event_query(event)?))
            }
            ServedCall::EventSynchronize => {
                let event = self.event(first)?;
                Ok(done(self.device.event_synchronize(event)?))
            }
            ServedCall::Overwrite => {
                let stream = self.stream(third)?;
                let (address, bytes) = (to_device(first), second.min(LONGEST_PATTERN_BYTES));
                // Contents are known in units of 16 bytes.
                if let (Ok(patterns), true) = (self.device.patterns(), address.0.is_multiple_of(16) && bytes > 0) {
                    patterns.fill_blocks(stream, &[Patterned { address, bytes, key: OVERWRITTEN }])?;
                }
                Ok([0; 4])
            }
        }
    }

    fn memory(&mut self, call: ServedCall, first: u64, second: u64, third: u64) -> Result<ServedResults, ServeError> {
        let DeviceServer { device, books } = self;
        books.memory_calls += 1;
        let mut result = [0; 4];
        match call {
            ServedCall::MemAlloc => {
                let address = device.alloc(first)?;
                books.allocated.insert(address, first);
                result[0] = to_plugin(address);
            }
            ServedCall::MemFree => {
                let address = to_device(first);
                device.free(address)?;
                books.allocated.remove(&address);
            }
            ServedCall::AddressReserve => {
                let address = device.virtual_memory()?.reserve(first)?;
                books.reserved.insert(address, first);
                result[0] = address.0;
            }
            ServedCall::AddressFree => {
                device.virtual_memory()?.address_free(Address(first), second)?;
                books.reserved.remove(&Address(first));
            }
            ServedCall::MemCreate => {
                let physical = device.virtual_memory()?.create(first)?;
                books.physical.insert(physical, first);
                // A handle that is not null.
                result[0] = physical.0 + 1;
            }
            ServedCall::MemRelease => {
                let physical = PhysicalId(first.wrapping_sub(1));
                device.virtual_memory()?.release(physical)?;
                books.physical.remove(&physical);
            }
            ServedCall::MemMap => {
                device.virtual_memory()?.map(Address(first), second, PhysicalId(third.wrapping_sub(1)))?;
                books.mapped.insert(Address(first), second);
            }
            ServedCall::MemSetAccess => device.virtual_memory()?.set_access(Address(first), second)?,
            _ => {
                device.virtual_memory()?.unmap(Address(first), second)?;
                let end = first.saturating_add(second);
                books.mapped.retain(|at, _| !(first..end).contains(&at.0));
            }
        }
        Ok(result)
    }

    fn pools(&mut self, call: ServedCall, first: u64, second: u64, third: u64) -> Result<ServedResults, ServeError> {
        let pool = PoolId(u32::try_from(first).unwrap_or(u32::MAX));
        let stream = match call {
            ServedCall::AllocAsync => self.stream(third)?,
            ServedCall::FreeAsync => self.stream(second)?,
            _ => StreamId::DEFAULT,
        };
        let DeviceServer { device, books } = self;
        books.memory_calls += 1;
        let pools = device.stream_ordered_pools()?;
        let mut result = [0; 4];
        match call {
            ServedCall::PoolCreate => {
                let made = pools.pool_create(Some(first).filter(|&most| most > 0))?;
                books.pools.insert(made);
                result[0] = u64::from(made.0);
            }
            ServedCall::PoolDestroy => {
                pools.pool_destroy(pool)?;
                books.pools.remove(&pool);
            }
            ServedCall::PoolConfigure => {
                let settings = PoolSettings {
                    release_threshold: second,
                    follow_event_dependencies: third & 1 != 0,
                    allow_opportunistic: third & 2 != 0,
                    allow_internal_dependencies: third & 4 != 0,
                };
                pools.pool_configure(pool, settings)?;
            }
            ServedCall::PoolTrim => pools.pool_trim(pool, second)?,
            ServedCall::PoolUsage => {
                let usage = pools.pool_usage(pool)?;
                result = [usage.reserved, usage.reserved_high, usage.used, usage.used_high];
            }
            ServedCall::AllocAsync => {
                books.uses_default_pool |= pool == PoolId(0);
                let address = pools.alloc_async(pool, second, stream)?;
                books.of_pools.insert(address, second);
                result[0] = to_plugin(address);
            }
            _ => {
                let address = to_device(first);
                pools.free_async(address, stream)?;
                books.of_pools.remove(&address);
            }
        }
        Ok(result)
    }

    /// Adds to the pages what a call has changed. Pools are looked at instead.
    fn count_pages(&mut self, call: ServedCall, before: u64) {
        let after = self.device.held_bytes();
        match call {
            ServedCall::MemAlloc
            | ServedCall::MemFree
            | ServedCall::MemCreate
            | ServedCall::MemRelease
            | ServedCall::MemUnmap => self.books.pages = (self.books.pages + after).saturating_sub(before),
            // The change is that of one pool: no call of the driver is needed to see it.
            _ => self.books.pool_pages = (self.books.pool_pages + after).saturating_sub(before),
        }
    }

    /// The stream of a handle. 1 and 2 are CUDA's names for the default streams, unless the program has such streams.
    fn stream(&mut self, handle: u64) -> Result<StreamId, ServeError> {
        if handle == 0 {
            return Ok(StreamId::DEFAULT);
        }
        if let Some(&stream) = self.books.streams.get(&handle) {
            return Ok(stream);
        }
        let numbers = (1..=u16::MAX).map(StreamId);
        let with_handles = numbers.map(|stream| (stream, self.device.stream_handle(stream)));
        let found = with_handles.take_while(|&(_, known)| known != 0).find(|&(_, known)| known == handle);
        match found {
            Some((stream, _)) => {
                self.books.streams.insert(handle, stream);
                Ok(stream)
            }
            None if handle <= 2 => Ok(StreamId::DEFAULT),
            None => Err(ServeError::UnknownHandle("stream", handle)),
        }
    }

    fn event(&self, handle: u64) -> Result<EventId, ServeError> {
        let unknown = ServeError::UnknownHandle("event", handle);
        let Some(offset) = handle.checked_sub(FIRST_EVENT).filter(|offset| offset.is_multiple_of(HANDLE_STEP)) else {
            return Err(unknown);
        };
        let event = u32::try_from(offset / HANDLE_STEP).ok().map(EventId);
        event.filter(|event| self.books.events.contains(event)).ok_or(unknown)
    }

    /// Whether the work of a stream is done: the device has only events for that.
    fn is_idle(&mut self, handle: u64) -> Result<bool, ServeError> {
        let stream = self.stream(handle)?;
        let event = match self.books.query {
            Some(event) => event,
            None => *self.books.query.insert(self.device.event_create()?),
        };
        self.device.event_record(event, stream)?;
        Ok(self.device.event_query(event)?)
    }
}

/// The code of `CUresult` for an error.
fn code_of(error: &DeviceError) -> i32 {
    match error {
        DeviceError::OutOfMemory { .. } => OUT_OF_MEMORY,
        DeviceError::InvalidValue { .. } => INVALID_VALUE,
        DeviceError::Unsupported(_) => NOT_SUPPORTED,
        DeviceError::Driver { name, .. } if name.contains("TIMEOUT") => LAUNCH_TIMEOUT,
        _ => UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::test_device::simulated;
    use oomph_base::MIB;

    #[test]
    fn what_a_process_took_goes_back_when_it_ends() {
        let mut device = simulated(64 * MIB);
        let mut books = ServedBooks::default();
        let mut server = DeviceServer { device: &mut *device, books: &mut books };
        let mut ask = |call, arguments| server.serve(call, arguments);
        let (code, [address, ..]) = ask(ServedCall::MemAlloc, [3 * MIB, 0, 0]);
        assert_eq!((code, to_device(address).0 - address), (0, SHIFT));
        let (_, [event, ..]) = ask(ServedCall::EventCreate, [0; 3]);
        assert_eq!(ask(ServedCall::EventRecord, [event, 0, 0]).0, 0);
        assert_eq!(ask(ServedCall::EventRecord, [event + 1, 0, 0]).0, INVALID_VALUE);
        let (_, [range, ..]) = ask(ServedCall::AddressReserve, [4 * MIB, 0, 0]);
        let (_, [physical, ..]) = ask(ServedCall::MemCreate, [2 * MIB, 0, 0]);
        assert_eq!(ask(ServedCall::MemMap, [range, 2 * MIB, physical]).0, 0);
        let (_, [pooled, ..]) = ask(ServedCall::AllocAsync, [0, MIB, 0]);
        assert_eq!(ask(ServedCall::MemAlloc, [1 << 40, 0, 0]).0, OUT_OF_MEMORY);
        assert_eq!(books.held(), device.held_bytes());
        assert_eq!(books.asked(), 6 * MIB);
        let inside = to_device(address).offset(MIB);
        assert_eq!(
            (books.outside(inside, 2 * MIB), books.outside(inside, 2 * MIB + 1)),
            (None, Some(inside.offset(2 * MIB)))
        );
        assert_eq!((books.outside(Address(range), 2 * MIB), books.outside(to_device(pooled), MIB)), (None, None));
        assert_eq!(books.invalid.as_deref(), Some("EventRecord: there is no event 0x20000001"));
        books.end_process(&mut *device);
        assert_eq!((books.held(), device.held_bytes()), (0, 0));
    }
}

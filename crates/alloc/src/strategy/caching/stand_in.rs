//! A device for tests that answers as the stand-in CUDA runtime of `tools/torch-oracle` does:
//! addresses are handed out in a row, streams are busy on request, and any call can
//! be made to fail. It checks the driver's rules.
//!
//! The integration test `tests/integration/torch_oracle` uses this file too.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::{
    CallKind, CallLedger, CallTally, Capabilities, Compute, Device, DeviceClock, DeviceError, DeviceProps, MemoryInfo,
    Patterns, PhysicalId, PinnedHost, StreamOrderedPools, VirtualMemory,
};
use oomph_base::{Address, EventId, GIB, Nanos, StreamId};

/// Where the first segment lies.
pub const FIRST_SEGMENT: u64 = 0x7f00_0000_0000;
/// Where the first reserved range lies.
pub const FIRST_RANGE: u64 = 0x6000_0000_0000;

/// The device.
pub struct StandInDevice {
    props: DeviceProps,
    capacity: u64,
    downwards: bool,
    used: u64,
    next_segment: u64,
    next_range: u64,
    next_handle: u64,
    segments: BTreeMap<u64, u64>,
    ranges: BTreeMap<u64, u64>,
    handles: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, (u64, u64)>,
    streams: Vec<u64>,
    busy: BTreeSet<StreamId>,
    events: BTreeMap<u32, StreamId>,
    next_event: u32,
    ledger: CallLedger,
    /// The number of the call that fails.
    pub fails_at: Option<u64>,
}

impl StandInDevice {
    /// A device of `total` bytes that hands out at most `capacity`.
    pub fn new(total: u64, capacity: u64, downwards: bool) -> StandInDevice {
        StandInDevice {
            props: DeviceProps {
                name: "stand-in".to_owned(),
                ordinal: 0,
                total_bytes: total,
                page_bytes: 512,
                granularity_bytes: 512,
                context_bytes: 0,
                capabilities: Capabilities { virtual_memory: true, ..Capabilities::NONE },
                clock: DeviceClock::Virtual,
            },
            capacity,
            downwards,
            used: 0,
            next_segment: FIRST_SEGMENT,
            next_range: FIRST_RANGE,
            next_handle: 1,
            segments: BTreeMap::new(),
            ranges: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            streams: vec![0],
            busy: BTreeSet::new(),
            events: BTreeMap::new(),
            next_event: 0,
            ledger: CallLedger::default(),
            fails_at: None,
        }
    }

    /// Whether events on a stream are unfinished.
    pub fn set_busy(&mut self, stream: StreamId, busy: bool) {
        if busy {
            self.busy.insert(stream);
        } else {
            self.busy.remove(&stream);
        }
    }

    /// Events, ranges, handles and segments that were not released.
    pub fn leftovers(&self) -> usize {
        self.events.len() + self.ranges.len() + self.handles.len() + self.segments.len()
    }

    fn call(&mut self, kind: CallKind) -> Result<(), DeviceError> {
        let fails = self.fails_at == Some(self.ledger.total().count);
        self.ledger.note(kind, Nanos::ZERO, fails);
        if fails { Err(DeviceError::Driver { call: kind, name: "injected".to_owned() }) } else { Ok(()) }
    }

    fn take(&mut self, call: CallKind, requested: u64) -> Result<(), DeviceError> {
        if self.used + requested > self.capacity {
            return Err(DeviceError::OutOfMemory { call, requested });
        }
        self.used += requested;
        Ok(())
    }
}

fn broken_rule(call: CallKind, reason: &str) -> DeviceError {
    DeviceError::InvalidValue { call, reason: reason.to_owned() }
}

impl Device for StandInDevice {
    fn props(&self) -> &DeviceProps {
        &self.props
    }

    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        self.call(CallKind::MemAlloc)?;
        self.take(CallKind::MemAlloc, bytes)?;
        if self.downwards {
            self.next_segment -= bytes;
        }
        let address = self.next_segment;
        if !self.downwards {
            self.next_segment += bytes;
        }
        self.segments.insert(address, bytes);
        Ok(Address(address))
    }

    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        self.call(CallKind::MemFree)?;
        let bytes = self.segments.remove(&address.0);
        self.used -= bytes.ok_or_else(|| broken_rule(CallKind::MemFree, "not allocated"))?;
        Ok(())
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        self.call(CallKind::MemGetInfo)?;
        Ok(MemoryInfo { free: self.free_bytes(), total: self.props.total_bytes })
    }

    fn held_bytes(&self) -> u64 {
        self.used
    }

    fn growth_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    fn free_bytes(&self) -> u64 {
        self.capacity - self.used
    }

    fn overhead_bytes(&self) -> u64 {
        0
    }

    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
        self.call(CallKind::StreamCreate)?;
        self.streams.push(known_as);
        Ok(StreamId((self.streams.len() - 1) as u16))
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.streams.get(stream.index()).copied().unwrap_or(u64::from(stream.0) * 8)
    }

    fn stream_synchronize(&mut self, _: StreamId) -> Result<(), DeviceError> {
        self.call(CallKind::StreamSynchronize)
    }

    fn stream_wait_event(&mut self, _: StreamId, _: EventId) -> Result<(), DeviceError> {
        self.call(CallKind::StreamWaitEvent)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.call(CallKind::CtxSynchronize)
    }

    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        self.call(CallKind::EventCreate)?;
        self.next_event += 1;
        self.events.insert(self.next_event, StreamId::DEFAULT);
        Ok(EventId(self.next_event))
    }

    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.call(CallKind::EventRecord)?;
        self.events.insert(event.0, stream);
        Ok(())
    }

    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.call(CallKind::EventQuery)?;
        let stream = self.events.get(&event.0).ok_or_else(|| broken_rule(CallKind::EventQuery, "no such event"))?;
        Ok(!self.busy.contains(stream))
    }

    fn event_synchronize(&mut self, _: EventId) -> Result<(), DeviceError> {
        self.call(CallKind::EventSynchronize)
    }

    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.call(CallKind::EventDestroy)?;
        let known = self.events.remove(&event.0);
        known.map(drop).ok_or_else(|| broken_rule(CallKind::EventDestroy, "no such event"))
    }

    fn now(&self) -> Nanos {
        Nanos::ZERO
    }

    fn elapse(&mut self, _: Nanos) {}

    fn ledger(&self) -> CallLedger {
        self.ledger.clone()
    }

    fn calls(&self) -> CallTally {
        self.ledger.total()
    }

    fn virtual_memory(&mut self) -> Option<&mut dyn VirtualMemory> {
        Some(self)
    }

    fn stream_ordered_pools(&mut self) -> Option<&mut dyn StreamOrderedPools> {
        None
    }

    fn pinned_host(&mut self) -> Option<&mut dyn PinnedHost> {
        None
    }

    fn compute(&mut self) -> Option<&mut dyn Compute> {
        None
    }

    fn patterns(&mut self) -> Option<&mut dyn Patterns> {
        None
    }
}

impl VirtualMemory for StandInDevice {
    fn reserve(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        self.call(CallKind::AddressReserve)?;
        let address = self.next_range;
        self.next_range += (bytes + GIB) / GIB * GIB + GIB;
        self.ranges.insert(address, bytes);
        Ok(Address(address))
    }

    fn address_free(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        self.call(CallKind::AddressFree)?;
        if self.mappings.range(address.0..address.0 + bytes).next().is_some() {
            return Err(broken_rule(CallKind::AddressFree, "still mapped"));
        }
        let reserved = self.ranges.remove(&address.0).filter(|&reserved| reserved == bytes);
        reserved.map(drop).ok_or_else(|| broken_rule(CallKind::AddressFree, "not reserved"))
    }

    fn create(&mut self, bytes: u64) -> Result<PhysicalId, DeviceError> {
        self.call(CallKind::MemCreate)?;
        self.take(CallKind::MemCreate, bytes)?;
        self.next_handle += 1;
        self.handles.insert(self.next_handle, bytes);
        Ok(PhysicalId(self.next_handle))
    }

    fn release(&mut self, physical: PhysicalId) -> Result<(), DeviceError> {
        self.call(CallKind::MemRelease)?;
        let bytes = self.handles.remove(&physical.0);
        self.used -= bytes.ok_or_else(|| broken_rule(CallKind::MemRelease, "no such handle"))?;
        Ok(())
    }

    fn map(&mut self, address: Address, bytes: u64, physical: PhysicalId) -> Result<(), DeviceError> {
        self.call(CallKind::MemMap)?;
        let range = self.ranges.range(..=address.0).next_back();
        let reserved = range.is_some_and(|(start, length)| address.0 + bytes <= start + length);
        let before = self.mappings.range(..address.0 + bytes).next_back();
        let taken = before.is_some_and(|(start, (length, _))| start + length > address.0);
        if !reserved || taken || self.handles.get(&physical.0) != Some(&bytes) {
            return Err(broken_rule(CallKind::MemMap, "not reserved, already mapped, or another size"));
        }
        self.mappings.insert(address.0, (bytes, physical.0));
        Ok(())
    }

    fn set_access(&mut self, _: Address, _: u64) -> Result<(), DeviceError> {
        self.call(CallKind::MemSetAccess)
    }

    fn unmap(&mut self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        self.call(CallKind::MemUnmap)?;
        let mapped = self.mappings.remove(&address.0).filter(|&(length, _)| length == bytes);
        mapped.map(drop).ok_or_else(|| broken_rule(CallKind::MemUnmap, "not mapped"))
    }
}

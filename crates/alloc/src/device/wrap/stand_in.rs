//! The device that tests use instead of a GPU: small enough that every figure of a test can be
//! computed by hand.
//!
//! It answers as the stand-in CUDA runtime of `tools/torch-oracle` does: addresses are given out in
//! a row, streams are busy on request, and any call can be made to fail. It checks the driver's
//! rules.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Interceptor,
    driver_call::{
        DriverAnswer, DriverCall, DriverExchange, DriverReply, device_from_responses, value_of, with_driver_calls,
    },
};
use crate::device::{
    CallKind, CallLedger, CallTally, Capabilities, Compute, Device, DeviceClock, DeviceError, DeviceProps, MemoryInfo,
    Patterned, Patterns, PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage, StreamOrderedPools, Verified,
    VirtualMemory, mapping::MappingTable,
};
use oomph_base::{Address, EventId, GIB, Nanos, StreamId, Work, round_up};

/// Where the first segment lies.
pub const FIRST_SEGMENT: u64 = 0x7f00_0000_0000;
/// Where the first reserved range lies.
pub const FIRST_RANGE: u64 = 0x6000_0000_0000;

/// The device.
pub struct StandInDevice {
    /// Its properties.
    pub props: DeviceProps,
    /// What it reports as its total memory, `props.total_bytes` unless changed.
    pub memory_total: u64,
    /// Segments take multiples of this size.
    pub step_bytes: u64,
    /// The number of the call that fails, counted from 0.
    pub fails_at: Option<u64>,
    /// The kind of call that always fails.
    pub broken: Option<CallKind>,
    /// What each kind of call costs.
    pub costs: fn(CallKind) -> Nanos,
    /// The time.
    pub now: Nanos,
    capacity: u64,
    downwards: bool,
    next_segment: u64,
    next_range: u64,
    segments: BTreeMap<Address, u64>,
    mappings: MappingTable<()>,
    streams: Vec<u64>,
    busy: BTreeSet<StreamId>,
    events: BTreeMap<EventId, StreamId>,
    next_event: u32,
    ledger: CallLedger,
}

impl StandInDevice {
    /// A device of `total` bytes that gives out at most `capacity`.
    pub fn new(total: u64, capacity: u64, downwards: bool) -> StandInDevice {
        StandInDevice {
            props: DeviceProps {
                name: "stand-in".to_owned(),
                ordinal: 0,
                total_bytes: total,
                page_bytes: 512,
                granularity_bytes: 512,
                context_bytes: 0,
                capabilities: Capabilities::VIRTUAL_MEMORY,
                clock: DeviceClock::Virtual,
            },
            memory_total: total,
            step_bytes: 1,
            fails_at: None,
            broken: None,
            costs: |_| Nanos::ZERO,
            now: Nanos::ZERO,
            capacity,
            downwards,
            next_segment: FIRST_SEGMENT,
            next_range: FIRST_RANGE,
            segments: BTreeMap::new(),
            mappings: MappingTable::default(),
            streams: vec![0],
            busy: BTreeSet::new(),
            events: BTreeMap::new(),
            next_event: 0,
            ledger: CallLedger::default(),
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

    /// Events, ranges, physical memory and segments that were not given back.
    pub fn leftovers(&self) -> u64 {
        let made = |kind| self.ledger.of(kind).count - self.ledger.of(kind).failures;
        let pairs = CallKind::ALL.iter().filter_map(|&taken| Some((taken, taken.given_back_by()?)));
        pairs.map(|(taken, back)| made(taken) - made(back)).sum()
    }

    fn respond(&mut self, call: DriverCall) -> DriverAnswer {
        let kind = call.kind();
        let answer = if self.fails_at == Some(self.ledger.total().count) || self.broken == Some(kind) {
            Err(DeviceError::Driver { call: kind, name: "injected".to_owned() })
        } else if matches!(call, DriverCall::Alloc { .. } | DriverCall::Create { .. })
            && self.growth_bytes(call.requested_bytes()) > self.free_bytes()
        {
            Err(DeviceError::OutOfMemory { call: kind, requested: call.requested_bytes() })
        } else {
            self.carry_out(&call).map_err(|reason| DeviceError::InvalidValue { call: kind, reason })
        };
        let cost = (self.costs)(kind);
        self.now += cost;
        self.ledger.note(kind, cost, answer.is_err());
        answer
    }

    fn carry_out(&mut self, call: &DriverCall) -> Result<DriverReply, String> {
        match *call {
            DriverCall::Alloc { bytes } => {
                let size = self.growth_bytes(bytes);
                let address = if self.downwards { self.next_segment - size } else { self.next_segment };
                self.next_segment = if self.downwards { address } else { address + size };
                self.segments.insert(Address(address), size);
                return Ok(DriverReply::Address(Address(address)));
            }
            DriverCall::Free { address } => {
                self.segments.remove(&address).ok_or_else(|| format!("no segment starts at {address}"))?;
            }
            DriverCall::MemoryInfo {} => {
                let info = MemoryInfo { free: self.free_bytes(), total: self.memory_total };
                return Ok(DriverReply::MemoryInfo(info));
            }
            DriverCall::StreamCreate { known_as } => {
                self.streams.push(known_as);
                return Ok(DriverReply::Stream(StreamId((self.streams.len() - 1) as u16), known_as));
            }
            DriverCall::EventCreate {} => {
                self.next_event += 1;
                self.events.insert(EventId(self.next_event), StreamId::DEFAULT);
                return Ok(DriverReply::Event(EventId(self.next_event)));
            }
            DriverCall::EventRecord { event, stream } => drop(self.events.insert(event, stream)),
            DriverCall::EventQuery { event } => {
                let stream = self.events.get(&event).ok_or_else(|| format!("there is no event {event}"))?;
                return Ok(DriverReply::Ready(!self.busy.contains(stream)));
            }
            DriverCall::EventDestroy { event } => {
                self.events.remove(&event).ok_or_else(|| format!("there is no event {event}"))?;
            }
            DriverCall::Reserve { bytes } => {
                let address = Address(self.next_range);
                self.next_range += (bytes + GIB) / GIB * GIB + GIB;
                self.mappings.reserve(address, bytes);
                return Ok(DriverReply::Address(address));
            }
            DriverCall::AddressFree { address, bytes } => {
                self.mappings.check_address_free(address, bytes)?;
                self.mappings.address_free(address);
            }
            DriverCall::Create { bytes } => return Ok(DriverReply::Physical(self.mappings.create((), bytes))),
            DriverCall::Release { physical } => {
                self.mappings.unreleased(physical)?;
                self.mappings.release(physical);
            }
            DriverCall::Map { address, bytes, physical } => {
                self.mappings.check_map(address, bytes, physical)?;
                self.mappings.map(address, bytes, physical);
            }
            DriverCall::SetAccess { address, bytes } => self.mappings.check_mapped(address, bytes)?,
            DriverCall::Unmap { address, bytes } => {
                self.mappings.check_unmap(address, bytes)?;
                self.mappings.unmap(address, bytes);
            }
            _ => {}
        }
        Ok(DriverReply::Done)
    }
}

with_driver_calls! { device_from_responses! {
    [] StandInDevice, [],
    {
        fn props(&self) -> &DeviceProps {
            &self.props
        }
        fn held_bytes(&self) -> u64 {
            self.segments.values().sum::<u64>() + self.mappings.held()
        }
        fn growth_bytes(&self, bytes: u64) -> u64 {
            round_up(bytes, self.step_bytes)
        }
        fn free_bytes(&self) -> u64 {
            self.capacity - self.held_bytes()
        }
        fn overhead_bytes(&self) -> u64 {
            self.props.context_bytes
        }
        fn stream_handle(&self, stream: StreamId) -> u64 {
            self.streams.get(stream.index()).copied().unwrap_or(u64::from(stream.0) * 8)
        }
        fn now(&self) -> Nanos {
            self.now
        }
        fn elapse(&mut self, time: Nanos) {
            self.now += time;
        }
        fn ledger(&self) -> CallLedger {
            self.ledger.clone()
        }
        fn calls(&self) -> CallTally {
            self.ledger.total()
        }
    },
    {
        /// There are no contents to compare.
        fn verified(&mut self) -> Result<Verified, DeviceError> {
            Ok(Verified::default())
        }
    }
}}

/// Records every call and its answer.
#[derive(Debug, Default)]
pub struct CallLog(pub Vec<DriverExchange>);

impl Interceptor for CallLog {
    fn after<D: Device + ?Sized>(&mut self, call: &DriverCall, answer: &mut DriverAnswer, _: &D) {
        self.0.push(DriverExchange { call: call.clone(), answer: answer.clone() });
    }
}

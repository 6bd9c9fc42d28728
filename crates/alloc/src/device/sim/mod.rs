//! The simulated GPU: exact memory accounting, addresses as the real driver gives them, measured
//! costs on a virtual clock.
//!
//! Deterministic and cloneable: the same calls give the same answers and times. It knows no
//! strategy.
//!
//! One file per subject: `address_space` (where `cuMemAlloc` places memory), `virtual_memory`,
//! `pools`, `clock` (streams and events), `costs` (of driver calls), `work_times` (of kernels and
//! copies), `contents` (patterns in memory), `profile` (which GPU), `recorded` (addresses in the replay of a
//! recording). Rules of the driver that the shadow GPU follows too are in `oomph_driver`.

mod address_space;
mod clock;
mod contents;
mod costs;
mod pools;
mod profile;
mod recorded;
mod virtual_memory;
mod work_times;

pub use costs::{Cost, CostCondition, CostTable, CostTableError};
pub use profile::{Profile, ProfileFile, SimConfig, SimConfigError};
pub use work_times::{ClearingRates, ImpossibleTime, Rates, WorkTable, WorkTime};

use self::{
    address_space::{PinnedSpace, SimAddressSpace, SimPlaces},
    clock::StreamClocks,
    contents::Contents,
    pools::PoolSpace,
    virtual_memory::SimVirtualSpace,
};
use super::{
    CallKind, CallLedger, CallTally, Capabilities, Device, DeviceClock, DeviceError, DeviceProps, MemoryInfo,
    abilities_by_props,
};
use oomph_base::{Address, EventId, Nanos, PlacementCall, StreamId};

/// A simulated GPU.
///
/// ```
/// use oomph_alloc::device::{Device, sim::{SimConfig, SimDevice}};
/// let mut device = SimDevice::new("sim:80GiB".parse::<SimConfig>()?)?;
/// let address = device.alloc(3 << 20)?;
/// assert_eq!(device.held_bytes(), 4 << 20, "memory comes in pages of 2 MiB");
/// device.free(address)?;
/// assert_eq!(device.held_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SimDevice {
    props: DeviceProps,
    profile: Profile,
    clocks: StreamClocks,
    ledger: CallLedger,
    memory: PhysicalMemory,
    address_space: SimAddressSpace,
    virtual_space: SimVirtualSpace,
    pools: PoolSpace,
    pinned: PinnedSpace,
    contents: Contents,
    libraries_loaded: bool,
    /// When the memory that was given back so far is cleared.
    cleared_at: Nanos,
}

/// Counts physical memory. Which page is which never matters.
#[derive(Clone, Debug)]
struct PhysicalMemory {
    total: u64,
    /// Taken by the context and loaded libraries.
    overhead: u64,
    /// Taken by allocations.
    held: u64,
}

impl PhysicalMemory {
    fn free(&self) -> u64 {
        self.total.saturating_sub(self.overhead).saturating_sub(self.held)
    }

    /// Takes memory for an allocation; false, and nothing taken, where there is not enough.
    fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free();
        self.held += if fits { bytes } else { 0 };
        fits
    }
}

impl SimDevice {
    /// A fresh device with its context.
    pub fn new(config: impl Into<SimConfig>) -> Result<SimDevice, SimConfigError> {
        let config = config.into();
        config.check()?;
        let total_bytes = config.total_bytes();
        let profile = config.profile;
        Ok(SimDevice {
            props: DeviceProps {
                name: format!("{} (simulated)", profile.vendor_name),
                ordinal: 0,
                total_bytes,
                page_bytes: profile.page_bytes,
                granularity_bytes: profile.granularity_bytes,
                context_bytes: profile.context_bytes,
                capabilities: Capabilities::ALL,
                clock: DeviceClock::Virtual,
            },
            clocks: StreamClocks::new(),
            ledger: CallLedger::default(),
            memory: PhysicalMemory { total: total_bytes, overhead: profile.context_bytes, held: 0 },
            address_space: SimAddressSpace::placing(SimPlaces::of_new_process(profile.page_bytes), profile.page_bytes),
            virtual_space: SimVirtualSpace::new(profile.granularity_bytes),
            pools: PoolSpace::new(),
            pinned: PinnedSpace::new(),
            contents: Contents::default(),
            libraries_loaded: false,
            cleared_at: Nanos::ZERO,
            profile,
        })
    }

    /// The same fresh device in a process that placed memory as these calls say. As long as the
    /// calls are the same, so are the addresses; later ones follow the rule of that process.
    #[must_use]
    pub fn placing_as(self, calls: &[PlacementCall]) -> SimDevice {
        let page_bytes = self.props.page_bytes;
        let places = SimPlaces::of_recording(page_bytes, calls);
        SimDevice { address_space: SimAddressSpace::placing(places, page_bytes), ..self }
    }

    /// Memory goes back to the driver, which clears it from some time on.
    fn give_back(&mut self, bytes: u64, from: Nanos) {
        self.memory.held -= bytes;
        // Many calls give nothing back.
        if let Some(clearing) = self.profile.clearing.filter(|_| bytes > 0) {
            self.cleared_at = self.cleared_at.max(from) + clearing.time(bytes);
        }
    }

    /// Notes a call and advances the clock by its cost. A failed call costs as much as the smallest one.
    fn conclude<T>(&mut self, call: CallKind, bytes: u64, answer: Result<T, DeviceError>) -> Result<T, DeviceError> {
        self.conclude_after(Nanos::ZERO, call, bytes, answer)
    }

    /// Like [`conclude`](SimDevice::conclude), for a call that first waits until some time. The
    /// wait counts as time in the call.
    fn conclude_after<T>(
        &mut self,
        until: Nanos,
        call: CallKind,
        bytes: u64,
        answer: Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let cost = self.profile.costs.cost(call, bytes);
        self.conclude_costing(cost, until, call, answer)
    }

    /// Like [`conclude_after`](SimDevice::conclude_after), for a call whose cost depends on more than its size.
    fn conclude_costing<T>(
        &mut self,
        cost: Nanos,
        until: Nanos,
        call: CallKind,
        answer: Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let waited = self.clocks.wait_until(until);
        let costs = &self.profile.costs;
        let cost = if answer.is_err() { costs.cost(call, 0) } else { cost };
        self.clocks.elapse(cost);
        self.ledger.note(call, waited + cost, answer.is_err());
        answer
    }

    /// Like [`conclude`](SimDevice::conclude), for a call that can only fail by breaking a rule.
    fn conclude_checked<T>(
        &mut self,
        call: CallKind,
        bytes: u64,
        answer: Result<T, impl ToString>,
    ) -> Result<T, DeviceError> {
        let answer = answer.map_err(|reason| DeviceError::InvalidValue { call, reason: reason.to_string() });
        self.conclude(call, bytes, answer)
    }

    /// Concludes a call that returns an address or handle; `None` means that memory or addresses
    /// have run out.
    fn conclude_allocation<T>(
        &mut self,
        call: CallKind,
        bytes: u64,
        answer: Result<Option<T>, impl ToString>,
    ) -> Result<T, DeviceError> {
        self.conclude(call, bytes, found_or_out_of_memory(call, bytes, answer))
    }

    /// Waits until a time that may be unknown.
    fn conclude_waiting(
        &mut self,
        call: CallKind,
        until: Result<Nanos, clock::UnknownHandle>,
    ) -> Result<(), DeviceError> {
        match until {
            Ok(until) => {
                self.conclude_after(until, call, 0, Ok(()))?;
                self.release_above_thresholds();
                Ok(())
            }
            Err(unknown) => self.conclude_checked(call, 0, Err(unknown)),
        }
    }
}

/// The answer to an allocation; `None` means that memory or addresses have run out.
fn found_or_out_of_memory<T>(
    call: CallKind,
    requested: u64,
    answer: Result<Option<T>, impl ToString>,
) -> Result<T, DeviceError> {
    match answer {
        Ok(found) => found.ok_or(DeviceError::OutOfMemory { call, requested }),
        Err(reason) => Err(DeviceError::InvalidValue { call, reason: reason.to_string() }),
    }
}

/// Whether a call about plain memory moves pages.
const fn page_condition(pages: u64) -> CostCondition {
    match pages {
        0 => CostCondition::SharedPage,
        _ => CostCondition::Usual,
    }
}

impl Device for SimDevice {
    fn props(&self) -> &DeviceProps {
        &self.props
    }

    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let call = CallKind::MemAlloc;
        if bytes == 0 {
            return self.conclude_checked(call, 0, Err("the size is zero"));
        }
        let growth = self.growth_bytes(bytes);
        if !self.memory.take(growth) {
            return self.conclude_allocation(call, bytes, Ok::<_, String>(None));
        }
        let place = self.address_space.allocate(bytes).map(Address);
        match place {
            Some(address) => self.forget_contents(address, bytes),
            None => self.memory.held -= growth,
        }
        let cost = self.profile.costs.cost_under(page_condition(growth), call, bytes);
        let answer = place.ok_or(DeviceError::OutOfMemory { call, requested: bytes });
        self.conclude_costing(cost, Nanos::ZERO, call, answer)
    }

    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        let call = CallKind::MemFree;
        match self.address_space.free(address.0) {
            Some(freed) => {
                let unused_from = self.clocks.all_ready();
                self.settle_contents(unused_from);
                self.forget_contents(address, freed.bytes);
                self.give_back(freed.pages * self.props.page_bytes, unused_from.max(self.clocks.now()));
                let cost = self.profile.costs.cost_under(page_condition(freed.pages), call, freed.bytes);
                self.conclude_costing(cost, unused_from, call, Ok(()))
            }
            None => self.conclude_checked(call, 0, Err(format!("no allocation starts at {address}"))),
        }
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        let info = MemoryInfo { free: self.memory.free(), total: self.memory.total };
        self.conclude(CallKind::MemGetInfo, 0, Ok(info))
    }

    fn held_bytes(&self) -> u64 {
        self.memory.held
    }

    fn growth_bytes(&self, bytes: u64) -> u64 {
        self.address_space.growth_pages(bytes).saturating_mul(self.props.page_bytes)
    }

    fn free_bytes(&self) -> u64 {
        self.memory.free()
    }

    fn overhead_bytes(&self) -> u64 {
        self.memory.overhead
    }

    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
        let stream = self.clocks.create_stream(known_as).ok_or("there are 65,536 streams already");
        self.conclude_checked(CallKind::StreamCreate, 0, stream)
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.clocks.handle(stream)
    }

    fn stream_synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let until = self.clocks.stream_ready(stream);
        self.conclude_waiting(CallKind::StreamSynchronize, until)
    }

    fn stream_wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let answer = self.clocks.wait_event(stream, event);
        self.conclude_checked(CallKind::StreamWaitEvent, 0, answer)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.conclude_waiting(CallKind::CtxSynchronize, Ok(self.clocks.all_ready()))
    }

    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        let event = self.clocks.create_event();
        self.conclude(CallKind::EventCreate, 0, Ok(event))
    }

    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let answer = self.clocks.record(event, stream);
        self.conclude_checked(CallKind::EventRecord, 0, answer)
    }

    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError> {
        let answer = self.clocks.event_done(event).map(|done| done <= self.clocks.now());
        self.conclude_checked(CallKind::EventQuery, 0, answer)
    }

    fn event_synchronize(&mut self, event: EventId) -> Result<(), DeviceError> {
        let until = self.clocks.event_done(event);
        self.conclude_waiting(CallKind::EventSynchronize, until)
    }

    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError> {
        let answer = self.clocks.destroy_event(event);
        self.conclude_checked(CallKind::EventDestroy, 0, answer)
    }

    fn now(&self) -> Nanos {
        self.clocks.now()
    }

    fn elapse(&mut self, time: Nanos) {
        self.clocks.elapse(time);
    }

    fn ledger(&self) -> CallLedger {
        self.ledger.clone()
    }

    fn calls(&self) -> CallTally {
        self.ledger.total()
    }

    abilities_by_props!();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::Compute;
    use oomph_base::{MIB, Work, round_up};

    fn device() -> SimDevice {
        SimDevice::new(SimConfig::default()).unwrap()
    }

    fn spin(device: &mut SimDevice, stream: StreamId, nanos: u64) {
        device.launch(stream, &Work::Spin { nanos: Nanos(nanos) }, &[]).unwrap();
    }

    #[test]
    fn memory_is_counted_in_whole_pages_beside_the_context() {
        let mut device = device();
        let fresh = device.memory_info().unwrap();
        assert_eq!(fresh, MemoryInfo { free: 150_109_880_320 - Profile::h200().context_bytes, total: 150_109_880_320 });
        let address = device.alloc(20 * MIB + 512).unwrap();
        assert_eq!(device.held_bytes(), 22 * MIB);
        assert_eq!(device.memory_info().unwrap().free, fresh.free - 22 * MIB);
        device.free(address).unwrap();
        assert_eq!((device.held_bytes(), device.free_bytes()), (0, fresh.free));
    }

    #[test]
    fn memory_runs_out_exactly_at_the_last_page() {
        let config =
            SimConfig { capacity_bytes: Some(Profile::h200().context_bytes + 4 * MIB), ..SimConfig::default() };
        let mut device = SimDevice::new(config).unwrap();
        let address = device.alloc(2 * MIB).unwrap();
        let refused = device.alloc(2 * MIB + 1).unwrap_err();
        assert_eq!(refused, DeviceError::OutOfMemory { call: CallKind::MemAlloc, requested: 2 * MIB + 1 });
        assert!(device.alloc(u64::MAX).unwrap_err().is_out_of_memory());
        assert_eq!(device.held_bytes(), 2 * MIB);
        device.alloc(2 * MIB).unwrap();
        assert!(device.alloc(1).unwrap_err().is_out_of_memory());
        device.free(address).unwrap();
        assert_eq!(device.alloc(1).unwrap(), address);
    }

    #[test]
    fn addresses_can_run_out_before_memory_does() {
        let mut device = SimDevice::new("sim:90TiB".parse::<SimConfig>().unwrap()).unwrap();
        assert!(device.alloc(40 << 40).unwrap_err().is_out_of_memory());
        assert_eq!(device.held_bytes(), 0);
        device.alloc(30 << 40).unwrap();
    }

    #[test]
    fn misuse_is_refused() {
        let mut device = device();
        let address = device.alloc(512).unwrap();
        for answer in [
            device.alloc(0).map(|_| ()),
            device.free(address.offset(512)),
            device.stream_synchronize(StreamId(3)),
            device.event_record(EventId(0), StreamId(0)),
            device.event_destroy(EventId(0)),
            device.launch(StreamId(3), &Work::Spin { nanos: Nanos(1) }, &[]),
        ] {
            assert!(matches!(answer, Err(DeviceError::InvalidValue { .. })), "{answer:?}");
        }
        assert_eq!(device.calls().failures, 6);
    }

    #[test]
    fn every_call_is_in_the_ledger_and_takes_its_time() {
        let mut device = device();
        let address = device.alloc(512).unwrap();
        device.free(address).unwrap();
        let costs = Profile::h200().costs;
        for call in [CallKind::MemAlloc, CallKind::MemFree] {
            assert_eq!(device.ledger().of(call).time, costs.cost(call, 512), "{call}");
        }
        assert_eq!(device.now(), device.calls().time);
        device.elapse(Nanos(5));
        assert_eq!(device.now(), device.calls().time + Nanos(5));
    }

    #[test]
    fn an_event_is_pending_until_its_stream_gets_there() {
        let mut device = device();
        let side = device.stream_create(0x77).unwrap();
        let event = device.event_create().unwrap();
        assert!(device.event_query(event).unwrap(), "nothing is in front of it");
        spin(&mut device, side, 1_000_000);
        device.event_record(event, side).unwrap();
        assert!(!device.event_query(event).unwrap());
        device.stream_synchronize(StreamId::DEFAULT).unwrap();
        assert!(!device.event_query(event).unwrap(), "the other stream is not waited for");
        device.elapse(Nanos(1_000_000));
        assert!(device.event_query(event).unwrap());
        assert_eq!((side, device.stream_handle(side)), (StreamId(1), 0x77));
    }

    #[test]
    fn a_stream_that_waits_for_an_event_gets_there_after_it() {
        let mut device = device();
        let side = device.stream_create(0).unwrap();
        let [first, second] = [device.event_create().unwrap(), device.event_create().unwrap()];
        spin(&mut device, StreamId::DEFAULT, 1_000_000);
        device.event_record(first, StreamId::DEFAULT).unwrap();
        device.stream_wait_event(side, first).unwrap();
        device.event_record(second, side).unwrap();
        assert!(!device.event_query(second).unwrap());
        device.event_synchronize(second).unwrap();
        assert!(device.event_query(first).unwrap());
    }

    #[test]
    fn freeing_waits_for_the_work_of_all_streams() {
        let mut device = device();
        let side = device.stream_create(0).unwrap();
        let address = device.alloc(512).unwrap();
        spin(&mut device, side, 10_000_000);
        device.free(address).unwrap();
        assert!(device.now() > Nanos(10_000_000));
        assert!(device.ledger().of(CallKind::MemFree).time > Nanos(9_900_000));
        spin(&mut device, side, 10_000_000);
        device.synchronize().unwrap();
        assert!(device.now() > Nanos(20_000_000));
    }

    /// Sizes on both sides of a page and of a range.
    fn sizes() -> impl Strategy<Value = u64> {
        prop_oneof![1..8_192u64, 1..4 * MIB, MIB..80 * MIB]
    }

    proptest! {
        #[test]
        fn held_bytes_are_exact_and_allocations_never_overlap(
            steps in prop::collection::vec((any::<bool>(), sizes(), any::<prop::sample::Index>()), 1..200)
        ) {
            let mut device = SimDevice::new("sim:2GiB".parse::<SimConfig>().unwrap()).unwrap();
            let mut live: Vec<(Address, u64)> = Vec::new();
            for (frees, bytes, pick) in steps {
                if frees && !live.is_empty() {
                    let (address, _) = live.swap_remove(pick.index(live.len()));
                    device.free(address).unwrap();
                } else {
                    let (held, growth) = (device.held_bytes(), device.growth_bytes(bytes));
                    match device.alloc(bytes) {
                        Ok(address) => {
                            live.push((address, bytes));
                            prop_assert_eq!(device.held_bytes(), held + growth);
                        }
                        Err(error) => {
                            prop_assert!(error.is_out_of_memory() && growth > device.free_bytes());
                            prop_assert_eq!(device.held_bytes(), held);
                        }
                    }
                }
                let mut sorted = live.clone();
                sorted.sort_unstable();
                prop_assert!(sorted.windows(2).all(|pair| pair[0].0.offset(pair[0].1) <= pair[1].0));
                let mut pages: Vec<u64> = live
                    .iter()
                    .flat_map(|&(address, bytes)| {
                        (address.0 / (2 * MIB)..round_up(address.0 + bytes, 2 * MIB) / (2 * MIB)).collect::<Vec<_>>()
                    })
                    .collect();
                pages.sort_unstable();
                pages.dedup();
                prop_assert_eq!(device.held_bytes(), pages.len() as u64 * 2 * MIB);
                prop_assert_eq!(device.free_bytes() + device.held_bytes() + device.overhead_bytes(), 2048 * MIB);
            }
            for (address, _) in live {
                device.free(address).unwrap();
            }
            prop_assert_eq!(device.held_bytes(), 0);
        }
    }
}

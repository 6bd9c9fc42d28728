//! A device whose answers come from a script: where memory lies, whether events are done, which
//! calls fail.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use super::driver_call::{
    DriverAnswer, DriverCall, DriverExchange, DriverReply, device_from_responses, value_of, with_driver_calls,
};
use crate::device::{
    CallKind, CallLedger, CallTally, Compute, Device, DeviceError, DeviceProps, MemoryInfo, Patterned, Patterns,
    PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage, StreamOrderedPools, Verified, VirtualMemory,
    mapping::MappingTable,
};
use oomph_base::{Address, EventId, Nanos, StreamId, Work, round_up};

/// How closely the calls must follow the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptOrder {
    /// Every call is in the script, in that order.
    Strict,
    /// The lines of one kind of call are in order; kinds may interleave in any way. A call for
    /// which the script has no (more) lines is accepted, except for calls that return an address.
    Loose,
}

/// A call that differs from the script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("call {number} is {made:?}, but the script says {expected}")]
pub struct ScriptMismatch {
    /// The number of the call, counted from 1.
    pub number: u64,
    /// The call that was made.
    pub made: DriverCall,
    /// What the script says.
    pub expected: String,
}

/// An answer, and the call that it is for: any call of the kind, or exactly this one.
#[derive(Clone, Debug)]
struct ScriptLine {
    kind: CallKind,
    exactly: Option<DriverCall>,
    answer: DriverAnswer,
}

impl ScriptLine {
    fn fits(&self, call: &DriverCall) -> bool {
        self.kind == call.kind() && self.exactly.as_ref().is_none_or(|exactly| exactly == call)
    }

    fn in_words(&self) -> String {
        match &self.exactly {
            Some(call) => format!("{call:?}"),
            None => format!("some {}", self.kind),
        }
    }
}

/// Lines to be read in order. A copy shares the lines and has its own position.
#[derive(Clone, Debug, Default)]
struct ScriptLines {
    lines: Arc<Vec<ScriptLine>>,
    next: usize,
}

/// Supplies the next part of a script when the last was read; an empty part is the end.
#[derive(Clone)]
struct ScriptSupply(Arc<Mutex<dyn FnMut() -> Vec<DriverExchange> + Send>>);

impl fmt::Debug for ScriptSupply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScriptSupply")
    }
}

/// A device whose answers come from a script.
///
/// A call that is not in the script fails with a driver error; the first such call is kept as the
/// [`mismatch`](ScriptedDevice::mismatch). Calls take no time. A copy is independent of the
/// original, so a caller can try calls and roll back.
///
/// In the [loose](ScriptOrder::Loose) order, an event is done unless its stream is [marked
/// busy](ScriptedDevice::set_busy).
///
/// ```
/// use oomph_alloc::device::{
///     CallKind, Device,
///     sim::{SimConfig, SimDevice},
///     wrap::{DriverReply, ScriptOrder, ScriptedDevice},
/// };
/// use oomph_base::Address;
/// let props = SimDevice::new(SimConfig::default())?.props().clone();
/// let mut device = ScriptedDevice::new(props, ScriptOrder::Loose);
/// device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Address(Address(0x7f00_0000_0000))));
/// assert_eq!(device.alloc(2 << 20)?, Address(0x7f00_0000_0000));
/// device.free(Address(0x7f00_0000_0000))?;
/// assert!(device.alloc(2 << 20).is_err(), "the script does not say where");
/// assert_eq!(device.mismatch().unwrap().number, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ScriptedDevice {
    props: DeviceProps,
    order: ScriptOrder,
    /// One list for a strict script, otherwise one per kind of call.
    script: Vec<ScriptLines>,
    supply: Option<ScriptSupply>,
    mismatch: Option<ScriptMismatch>,
    granted: GrantedMemory,
    /// Handles by stream.
    streams: Vec<u64>,
    busy: Vec<StreamId>,
    /// On which stream an event was last recorded; the outer `None` is an unused number.
    events: Vec<Option<Option<StreamId>>>,
    pools: u32,
    now: Nanos,
    ledger: CallLedger,
}

impl ScriptedDevice {
    /// A device with these properties and an empty script.
    #[must_use]
    pub fn new(props: DeviceProps, order: ScriptOrder) -> ScriptedDevice {
        let lists = match order {
            ScriptOrder::Strict => 1,
            ScriptOrder::Loose => CallKind::ALL.len(),
        };
        ScriptedDevice {
            order,
            script: vec![ScriptLines::default(); lists],
            supply: None,
            mismatch: None,
            granted: GrantedMemory { page_bytes: props.page_bytes.max(1), ..GrantedMemory::default() },
            streams: vec![0],
            busy: Vec::new(),
            events: Vec::new(),
            pools: 0,
            now: Nanos::ZERO,
            ledger: CallLedger::default(),
            props,
        }
    }

    /// A device that answers exactly as another one did, or does at this moment. It asks `supply`
    /// for the next part of the script whenever it has read all of it, and holds only that part, so
    /// a run of any length can be followed. An empty part is the end.
    ///
    /// ```
    /// use oomph_alloc::device::{Device, sim::{SimConfig, SimDevice}};
    /// use oomph_alloc::device::wrap::{DriverCall, DriverExchange, DriverReply, ScriptedDevice};
    /// use oomph_base::Address;
    /// let props = SimDevice::new(SimConfig::default())?.props().clone();
    /// let answer = Ok(DriverReply::Address(Address(4096)));
    /// let mut parts = [DriverExchange { call: DriverCall::Alloc { bytes: 512 }, answer }].into_iter();
    /// let mut device = ScriptedDevice::following(props, move || parts.next().into_iter().collect());
    /// assert_eq!(device.alloc(512)?, Address(4096));
    /// assert!(device.alloc(512).is_err(), "the script has ended");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn following(
        props: DeviceProps,
        supply: impl FnMut() -> Vec<DriverExchange> + Send + 'static,
    ) -> ScriptedDevice {
        let supply = Some(ScriptSupply(Arc::new(Mutex::new(supply))));
        ScriptedDevice { supply, ..ScriptedDevice::new(props, ScriptOrder::Strict) }
    }

    /// Adds an answer for exactly this call.
    pub fn expect(&mut self, call: DriverCall, answer: DriverAnswer) {
        self.push(ScriptLine { kind: call.kind(), exactly: Some(call), answer });
    }

    /// Adds an answer for any call of a kind.
    pub fn expect_any(&mut self, kind: CallKind, answer: DriverAnswer) {
        self.push(ScriptLine { kind, exactly: None, answer });
    }

    fn push(&mut self, line: ScriptLine) {
        Arc::make_mut(&mut self.lines_for(line.kind).lines).push(line);
    }

    fn lines_for(&mut self, kind: CallKind) -> &mut ScriptLines {
        match self.order {
            ScriptOrder::Strict => &mut self.script[0],
            ScriptOrder::Loose => &mut self.script[kind as usize],
        }
    }

    /// Drops every line of the script, read or not, so that the next part can be written when it is
    /// known. What was granted stays.
    pub fn clear_script(&mut self) {
        self.script.fill(ScriptLines::default());
    }

    /// Says whether events on a stream are pending, for queries that the script leaves open.
    pub fn set_busy(&mut self, stream: StreamId, busy: bool) {
        self.busy.retain(|&other| other != stream);
        if busy {
            self.busy.push(stream);
        }
    }

    /// The first call that differs from the script.
    #[must_use]
    pub fn mismatch(&self) -> Option<&ScriptMismatch> {
        self.mismatch.as_ref()
    }

    /// The number of lines that were not read yet.
    #[must_use]
    pub fn unread(&self) -> usize {
        self.script.iter().map(|list| list.lines.len() - list.next).sum()
    }

    /// The call that the next line of a [strict](ScriptOrder::Strict) script answers, where the
    /// line names one.
    pub fn next_expected(&mut self) -> Option<&DriverCall> {
        self.read_on();
        let [ScriptLines { lines, next }] = &self.script[..] else { return None };
        lines.get(*next)?.exactly.as_ref()
    }

    /// Fetches the next part of the script where all of the last was read.
    fn read_on(&mut self) {
        if let Some(ScriptSupply(supply)) = self.supply.clone()
            && self.unread() == 0
        {
            self.clear_script();
            let exchanges = supply.lock().unwrap_or_else(PoisonError::into_inner)();
            for DriverExchange { call, answer } in exchanges {
                self.expect(call, answer);
            }
        }
    }

    fn respond(&mut self, call: DriverCall) -> DriverAnswer {
        self.read_on();
        let is_strict = self.order == ScriptOrder::Strict;
        let ScriptLines { lines, next } = self.lines_for(call.kind());
        let found = match lines.get(*next) {
            Some(line) if line.fits(&call) => {
                *next += 1;
                Ok(line.answer.clone())
            }
            Some(line) => Err(line.in_words()),
            None if is_strict => Err("nothing more".to_owned()),
            None => self.make_up(&call).ok_or_else(|| "nothing more".to_owned()),
        };
        let answer = found.unwrap_or_else(|expected| {
            let mismatch = ScriptMismatch { number: self.ledger.total().count + 1, made: call.clone(), expected };
            let name = mismatch.to_string();
            self.mismatch.get_or_insert(mismatch);
            Err(DeviceError::Driver { call: call.kind(), name })
        });
        self.note(&call, &answer);
        self.ledger.note(call.kind(), Nanos::ZERO, answer.is_err());
        answer
    }

    /// The answer to a call that the script leaves open; `None` for an address, which only the
    /// script can know.
    fn make_up(&self, call: &DriverCall) -> Option<DriverAnswer> {
        Some(Ok(match *call {
            DriverCall::Alloc { .. }
            | DriverCall::Reserve { .. }
            | DriverCall::AllocAsync { .. }
            | DriverCall::HostAlloc { .. } => return None,
            DriverCall::MemoryInfo {} => {
                DriverReply::MemoryInfo(MemoryInfo { free: self.free_bytes(), total: self.props.total_bytes })
            }
            DriverCall::StreamCreate { known_as } => {
                DriverReply::Stream(StreamId(u16::try_from(self.streams.len()).ok()?), known_as)
            }
            DriverCall::EventCreate {} => {
                let unused = self.events.iter().position(Option::is_none).unwrap_or(self.events.len());
                DriverReply::Event(EventId(unused as u32))
            }
            DriverCall::EventQuery { event } => {
                let stream = self.events.get(event.index()).copied().flatten().flatten();
                DriverReply::Ready(stream.is_none_or(|stream| !self.busy.contains(&stream)))
            }
            DriverCall::Create { bytes } if bytes > self.free_bytes() => {
                return Some(Err(DeviceError::OutOfMemory { call: call.kind(), requested: bytes }));
            }
            DriverCall::Create { .. } => DriverReply::Physical(self.granted.table.next_physical()),
            DriverCall::PoolCreate { .. } => DriverReply::Pool(PoolId(self.pools + 1)),
            DriverCall::PoolUsage { .. } => DriverReply::PoolUsage(PoolUsage::default()),
            _ => DriverReply::Done,
        }))
    }

    /// Updates streams, events and memory for a call that was answered.
    fn note(&mut self, call: &DriverCall, answer: &DriverAnswer) {
        self.granted.note(call, answer);
        match (call, answer) {
            (_, &Ok(DriverReply::Stream(stream, handle))) => set(&mut self.streams, stream.index(), handle, 0),
            (_, &Ok(DriverReply::Event(event))) => set(&mut self.events, event.index(), Some(None), None),
            (&DriverCall::EventRecord { event, stream }, Ok(_)) => {
                set(&mut self.events, event.index(), Some(Some(stream)), None);
            }
            (&DriverCall::EventDestroy { event }, Ok(_)) => set(&mut self.events, event.index(), None, None),
            (_, &Ok(DriverReply::Pool(pool))) => self.pools = self.pools.max(pool.0),
            _ => {}
        }
    }
}

/// Sets an element, which may lie beyond the end.
fn set<T: Clone>(list: &mut Vec<T>, place: usize, value: T, filling: T) {
    if place >= list.len() {
        list.resize(place + 1, filling);
    }
    list[place] = value;
}

with_driver_calls! { device_from_responses! {
    [] ScriptedDevice, [],
    {
        fn props(&self) -> &DeviceProps {
            &self.props
        }
        fn held_bytes(&self) -> u64 {
            self.granted.held()
        }
        fn growth_bytes(&self, bytes: u64) -> u64 {
            self.granted.growth(bytes)
        }
        fn free_bytes(&self) -> u64 {
            self.props.total_bytes.saturating_sub(self.props.context_bytes).saturating_sub(self.granted.held())
        }
        fn overhead_bytes(&self) -> u64 {
            self.props.context_bytes
        }
        fn stream_handle(&self, stream: StreamId) -> u64 {
            self.streams.get(stream.index()).copied().unwrap_or(0)
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
        /// There is no memory whose contents could be compared.
        fn verified(&mut self) -> Result<Verified, DeviceError> {
            Ok(Verified::default())
        }
    }
}}

/// The memory that a script has granted, in whole pages; small allocations do not share pages. It
/// checks no rules, because the author of the script has accepted the calls in it.
#[derive(Clone, Debug, Default)]
struct GrantedMemory {
    page_bytes: u64,
    allocations: BTreeMap<Address, u64>,
    allocated: u64,
    table: MappingTable<()>,
}

impl GrantedMemory {
    fn held(&self) -> u64 {
        self.allocated + self.table.held()
    }

    fn growth(&self, bytes: u64) -> u64 {
        round_up(bytes, self.page_bytes)
    }

    /// Updates the memory for a call that was answered.
    fn note(&mut self, call: &DriverCall, answer: &DriverAnswer) {
        match (call, answer) {
            (&DriverCall::Alloc { bytes }, &Ok(DriverReply::Address(address))) => {
                let growth = self.growth(bytes);
                self.allocated += growth;
                self.allocations.insert(address, growth);
            }
            (DriverCall::Free { address }, Ok(_)) => self.allocated -= self.allocations.remove(address).unwrap_or(0),
            (&DriverCall::Create { bytes }, &Ok(DriverReply::Physical(physical))) => {
                self.table.create_as(physical, (), bytes);
            }
            (&DriverCall::Release { physical }, Ok(_)) => self.table.release(physical),
            (&DriverCall::Map { address, bytes, physical }, Ok(_)) => self.table.map(address, bytes, physical),
            (&DriverCall::Unmap { address, bytes }, Ok(_)) => self.table.unmap(address, bytes),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::{
        Capabilities,
        sim::{SimConfig, SimDevice},
        wrap::{CallFailure, FaultPlan, FaultyDevice, InterceptedDevice, stand_in::CallLog},
    };
    use oomph_base::MIB;

    fn props() -> DeviceProps {
        SimDevice::new(SimConfig::default()).unwrap().props().clone()
    }

    fn loose() -> ScriptedDevice {
        ScriptedDevice::new(props(), ScriptOrder::Loose)
    }

    #[test]
    fn strict_script_reports_the_first_mismatch() {
        let mut device = ScriptedDevice::new(props(), ScriptOrder::Strict);
        device.expect(DriverCall::Alloc { bytes: 512 }, Ok(DriverReply::Address(Address(0x1000))));
        device.expect(DriverCall::Free { address: Address(0x1000) }, Ok(DriverReply::Done));
        device.alloc(512).unwrap();
        device.free(Address(0x2000)).unwrap_err();
        let mismatch = device.mismatch().unwrap().to_string();
        let expected = "call 2 is Free { address: Address(8192) }, but the script says Free { address: Address(4096) }";
        assert_eq!(mismatch, expected);
        device.free(Address(0x1000)).unwrap();
        device.synchronize().unwrap_err();
        assert_eq!((device.unread(), device.mismatch().unwrap().number), (0, 2), "the first is kept");
    }

    #[test]
    fn loose_script_needs_only_addresses() {
        let mut device = loose();
        device.expect_any(CallKind::AddressReserve, Ok(DriverReply::Address(Address(0x3_0200_0000))));
        device.expect(DriverCall::Alloc { bytes: 20 * MIB }, Ok(DriverReply::Address(Address(0x7f00_0000_0000))));
        let piece = device.create(2 * MIB).unwrap();
        let address = device.alloc(20 * MIB).unwrap();
        let base = device.reserve(64 * MIB).unwrap();
        device.map(base, 2 * MIB, piece).unwrap();
        device.release(piece).unwrap();
        assert_eq!(device.held_bytes(), 22 * MIB);
        device.unmap(base, 2 * MIB).unwrap();
        device.free(address).unwrap();
        assert_eq!((device.held_bytes(), device.unread(), device.mismatch()), (0, 0, None));
        let info = device.memory_info().unwrap();
        assert_eq!(info.free, info.total - device.props().context_bytes);
    }

    #[test]
    fn scripted_failures_and_wrong_sizes_are_reported() {
        let mut device = loose();
        let exhausted = DeviceError::OutOfMemory { call: CallKind::MemAlloc, requested: 512 };
        device.expect_any(CallKind::MemAlloc, Err(exhausted.clone()));
        device.expect(DriverCall::Alloc { bytes: 1024 }, Ok(DriverReply::Address(Address(0x1000))));
        assert_eq!(device.alloc(512), Err(exhausted));
        assert_eq!((device.held_bytes(), device.mismatch()), (0, None));
        device.alloc(2048).unwrap_err();
        assert_eq!(device.mismatch().unwrap().made, DriverCall::Alloc { bytes: 2048 });
    }

    #[test]
    fn events_are_pending_while_their_stream_is_busy() {
        let mut device = loose();
        let side = device.stream_create(0x55).unwrap();
        assert_eq!((side, device.stream_handle(side)), (StreamId(1), 0x55));
        let event = device.event_create().unwrap();
        device.set_busy(side, true);
        assert!(device.event_query(event).unwrap(), "it was never recorded");
        device.event_record(event, side).unwrap();
        assert!(!device.event_query(event).unwrap());
        device.set_busy(side, false);
        assert!(device.event_query(event).unwrap());
        device.expect_any(CallKind::EventQuery, Ok(DriverReply::Ready(false)));
        assert!(!device.event_query(event).unwrap());
        device.event_destroy(event).unwrap();
        assert_eq!(device.event_create().unwrap(), event);
    }

    #[test]
    fn a_copy_allows_a_rollback() {
        let mut device = loose();
        for n in 1..4 {
            device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Address(Address(n << 24))));
        }
        device.alloc(512).unwrap();
        let before = device.clone();
        device.alloc(512).unwrap();
        device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Address(Address(9 << 24))));
        device.free(Address(1 << 24)).unwrap();
        let mut device = before;
        assert_eq!((device.unread(), device.held_bytes(), device.calls().count), (2, 2 * MIB, 1));
        assert_eq!(device.alloc(512).unwrap(), Address(2 << 24));
    }

    #[test]
    fn a_script_can_be_written_part_by_part() {
        let mut device = loose();
        for n in 1..3 {
            device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Address(Address(n << 24))));
        }
        device.alloc(512).unwrap();
        device.clear_script();
        assert_eq!((device.unread(), device.held_bytes()), (0, 2 * MIB));
        device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Address(Address(9 << 24))));
        assert_eq!(device.alloc(512).unwrap(), Address(9 << 24));
    }

    #[test]
    fn a_reply_of_the_wrong_kind_is_an_error() {
        let mut device = loose();
        device.expect_any(CallKind::MemAlloc, Ok(DriverReply::Done));
        assert!(matches!(device.alloc(512), Err(DeviceError::Driver { .. })));
    }

    /// Something of everything, as random numbers have it; what it returns depends on every answer.
    fn exercise(device: &mut dyn Device, steps: &[(u8, u64)]) -> Vec<String> {
        let mut addresses = vec![Address(64)];
        let mut pieces = Vec::new();
        let mut events = vec![EventId(7)];
        let mut seen = Vec::new();
        for &(what, number) in steps {
            let address = addresses[number as usize % addresses.len()];
            let event = events[number as usize % events.len()];
            let stream = StreamId((number % 3) as u16);
            let bytes = (number % 64) * MIB;
            let virtual_memory = device.virtual_memory().unwrap();
            seen.push(match what {
                0 => format!("{:?}", virtual_memory.reserve(bytes).inspect(|&at| addresses.push(at))),
                1 => format!("{:?}", virtual_memory.create(bytes).inspect(|&piece| pieces.push((piece, bytes)))),
                2 => match pieces.get(number as usize % pieces.len().max(1)) {
                    Some(&(piece, bytes)) => format!("{:?}", virtual_memory.map(address, bytes, piece)),
                    None => format!("{:?}", virtual_memory.unmap(address, bytes)),
                },
                3 => format!("{:?}", virtual_memory.set_access(address, bytes)),
                4 => format!("{:?}", device.free(address)),
                5 => format!("{:?}", device.memory_info()),
                6 => format!("{:?}", device.stream_create(number).map(|stream| device.stream_handle(stream))),
                7 => format!("{:?}", device.event_create().inspect(|&event| events.push(event))),
                8 => format!("{:?}", device.event_record(event, stream)),
                9 => format!("{:?}", device.event_query(event)),
                10 => {
                    let work = Work::Spin { nanos: Nanos(number * 1_000) };
                    format!("{:?}", device.compute().unwrap().launch(stream, &work, &[(address, 1)]))
                }
                11 => format!("{:?}", device.pinned_host().unwrap().host_alloc(number)),
                _ => format!("{:?}", device.alloc(number * 1_000).inspect(|&at| addresses.push(at))),
            });
        }
        seen
    }

    proptest! {
        #[test]
        fn replaying_a_recorded_run_gives_the_same_answers(
            steps in prop::collection::vec((0u8..16, 0u64..200_000), 1..150)
        ) {
            let sim = SimDevice::new("sim:2GiB".parse::<SimConfig>().unwrap()).unwrap();
            let plan = FaultPlan::none().fail_every(None, 11, CallFailure::OutOfMemory);
            let mut recorded = InterceptedDevice::new(Box::new(FaultyDevice::with(plan, Box::new(sim))), CallLog::default());
            let first = exercise(&mut recorded, &steps);
            let tally = recorded.calls();
            let props = recorded.props().clone();
            let CallLog(mut log) = recorded.interceptor;
            prop_assert_eq!(log.len() as u64, tally.count);
            let mut scripted = ScriptedDevice::following(props, move || std::mem::take(&mut log));
            prop_assert_eq!(exercise(&mut scripted, &steps), first);
            prop_assert_eq!((scripted.mismatch(), scripted.unread()), (None, 0));
            prop_assert_eq!((scripted.calls().count, scripted.calls().failures), (tally.count, tally.failures));
        }
    }

    #[test]
    fn work_is_accepted_where_the_device_has_compute() {
        let mut device = loose();
        device.launch(StreamId(0), &Work::Elementwise { bytes: 1 }, &[]).unwrap();
        let mut device =
            ScriptedDevice::new(DeviceProps { capabilities: Capabilities::NONE, ..props() }, ScriptOrder::Loose);
        assert!(device.compute().is_err() && device.virtual_memory().is_err());
    }
}

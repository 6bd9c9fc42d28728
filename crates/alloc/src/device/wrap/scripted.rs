//! A device whose answers come from a list.

use super::{
    exchange::{Answer, Call, Exchange, Reply},
    granted::Granted,
    responder::Responder,
    script::{Expected, Line, Manner, Mismatch, Script},
};
use crate::device::{
    CallKind, CallLedger, CallTally, DeviceError, DeviceProps, MemoryInfo, PoolId, PoolUsage, Verified,
};
use oomph_base::{EventId, Nanos, StreamId};

/// A device whose answers come from a list: where memory lies, whether events are done, which calls fail.
///
/// A call that the script does not foresee fails with a driver error, and the first such is kept as a
/// [`mismatch`](Scripted::mismatch). Calls take no time. A copy is independent of the original, so a reading can be
/// tried and rolled back.
///
/// In the [loose](Manner::Loose) manner, an event is done unless its stream is [marked busy](Scripted::set_busy).
///
/// ```
/// use oomph_alloc::device::{CallKind, Device, sim::{SimConfig, SimDevice}, wrap::{Manner, Reply, Scripted}};
/// use oomph_base::Address;
/// let props = SimDevice::new(SimConfig::default())?.props().clone();
/// let mut device = Scripted::new(props, Manner::Loose);
/// device.expect_any(CallKind::MemAlloc, Ok(Reply::Address(Address(0x7f00_0000_0000))));
/// assert_eq!(device.alloc(2 << 20)?, Address(0x7f00_0000_0000));
/// device.free(Address(0x7f00_0000_0000))?;
/// assert!(device.alloc(2 << 20).is_err(), "the script does not say where");
/// assert_eq!(device.mismatch().unwrap().number, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scripted {
    props: DeviceProps,
    script: Script,
    mismatch: Option<Mismatch>,
    granted: Granted,
    /// Handles by stream.
    streams: Vec<u64>,
    busy: Vec<StreamId>,
    /// On which stream an event was last recorded; a place with `None` is free to be used.
    events: Vec<Option<Option<StreamId>>>,
    pools: u32,
    now: Nanos,
    ledger: CallLedger,
}

impl Scripted {
    /// A device that says `props` of itself, with an empty script.
    #[must_use]
    pub fn new(props: DeviceProps, manner: Manner) -> Scripted {
        Scripted {
            script: Script::new(manner),
            mismatch: None,
            granted: Granted::new(props.page_bytes.max(1)),
            streams: vec![0],
            busy: Vec::new(),
            events: Vec::new(),
            pools: 0,
            now: Nanos::ZERO,
            ledger: CallLedger::default(),
            props,
        }
    }

    /// A device that answers exactly as another one did.
    #[must_use]
    pub fn replaying(props: DeviceProps, exchanges: impl IntoIterator<Item = Exchange>) -> Scripted {
        let mut device = Scripted::new(props, Manner::Strict);
        for exchange in exchanges {
            device.push(exchange.into());
        }
        device
    }

    /// Adds a line at the end of the script.
    pub fn push(&mut self, line: Line) {
        self.script.push(line);
    }

    /// Adds an answer for exactly this call.
    pub fn expect(&mut self, call: Call, answer: Answer) {
        self.push(Line { expected: Expected::Exactly(call), answer });
    }

    /// Adds an answer for any call of a kind.
    pub fn expect_any(&mut self, kind: CallKind, answer: Answer) {
        self.push(Line { expected: Expected::Any(kind), answer });
    }

    /// Drops every line of the script, read or not, so that the next part can be written as it becomes known. What was
    /// granted stays.
    pub fn clear_script(&mut self) {
        self.script.clear();
    }

    /// Says whether events on a stream are pending, for queries that the script leaves open.
    pub fn set_busy(&mut self, stream: StreamId, busy: bool) {
        self.busy.retain(|&other| other != stream);
        if busy {
            self.busy.push(stream);
        }
    }

    /// The first call that was not what the script says.
    #[must_use]
    pub fn mismatch(&self) -> Option<&Mismatch> {
        self.mismatch.as_ref()
    }

    /// Lines that no call has asked for yet.
    #[must_use]
    pub fn unread(&self) -> usize {
        self.script.unread()
    }

    /// The call that the next line of a [strict](Manner::Strict) script is for, where it says which.
    #[must_use]
    pub fn next_expected(&self) -> Option<&Call> {
        self.script.next_expected()
    }

    /// The answer to a call that the script leaves open, if there is one to be made up.
    fn make_up(&self, call: &Call) -> Option<Answer> {
        Some(Ok(match *call {
            Call::Alloc { .. } | Call::Reserve { .. } | Call::AllocAsync { .. } | Call::HostAlloc { .. } => {
                return None;
            }
            Call::MemoryInfo => {
                Reply::MemoryInfo(MemoryInfo { free: Responder::free_bytes(self), total: self.props.total_bytes })
            }
            Call::StreamCreate { known_as } => match u16::try_from(self.streams.len()) {
                Ok(number) => Reply::Stream(StreamId(number), known_as),
                Err(_) => return None,
            },
            Call::EventCreate => {
                let place = self.events.iter().position(Option::is_none).unwrap_or(self.events.len());
                Reply::Event(EventId(place as u32))
            }
            Call::EventQuery { event } => {
                let stream = self.events.get(event.index()).copied().flatten().flatten();
                Reply::Ready(stream.is_none_or(|stream| !self.busy.contains(&stream)))
            }
            Call::Create { bytes } if bytes > Responder::free_bytes(self) => {
                return Some(Err(DeviceError::OutOfMemory { call: call.kind(), requested: bytes }));
            }
            Call::Create { .. } => Reply::Physical(self.granted.next_piece()),
            Call::PoolCreate { .. } => Reply::Pool(PoolId(self.pools + 1)),
            Call::PoolUsage { .. } => Reply::PoolUsage(PoolUsage::default()),
            _ => Reply::Done,
        }))
    }

    /// Takes note of a call that was answered.
    fn note(&mut self, call: &Call, answer: &Answer) {
        self.granted.note(call, answer);
        match (call, answer) {
            (_, &Ok(Reply::Stream(stream, handle))) => {
                set(&mut self.streams, stream.index(), handle, 0);
            }
            (_, &Ok(Reply::Event(event))) => set(&mut self.events, event.index(), Some(None), None),
            (&Call::EventRecord { event, stream }, Ok(_)) => {
                set(&mut self.events, event.index(), Some(Some(stream)), None);
            }
            (&Call::EventDestroy { event }, Ok(_)) => set(&mut self.events, event.index(), None, None),
            (_, &Ok(Reply::Pool(pool))) => self.pools = self.pools.max(pool.0),
            _ => {}
        }
    }
}

/// Puts a value at a place, which may lie beyond the end.
fn set<T: Clone>(list: &mut Vec<T>, place: usize, value: T, filling: T) {
    if place >= list.len() {
        list.resize(place + 1, filling);
    }
    list[place] = value;
}

impl Responder for Scripted {
    fn respond(&mut self, call: Call) -> Answer {
        let open = match self.script.answer(&call) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => self.make_up(&call).ok_or(None),
            Err(expected) => Err(expected),
        };
        let answer = open.unwrap_or_else(|expected| {
            let mismatch = Mismatch { number: self.ledger.total().count + 1, made: call.clone(), expected };
            let name = mismatch.to_string();
            self.mismatch.get_or_insert(mismatch);
            Err(DeviceError::Driver { call: call.kind(), name })
        });
        self.note(&call, &answer);
        self.ledger.note(call.kind(), Nanos::ZERO, answer.is_err());
        answer
    }

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

    /// There is no memory whose contents could be looked at.
    fn verified(&mut self) -> Result<Verified, DeviceError> {
        Ok(Verified::default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Call, Manner, Reply, Scripted};
    use crate::device::{
        CallKind, Capabilities, Compute, Device, DeviceError, DeviceProps, VirtualMemory,
        sim::{SimConfig, SimDevice},
        wrap::{Fault, FaultPlan, Faulty, Logged},
    };
    use oomph_base::{Address, EventId, MIB, Nanos, StreamId, Work};

    fn props() -> DeviceProps {
        SimDevice::new(SimConfig::default()).unwrap().props().clone()
    }

    fn loose() -> Scripted {
        Scripted::new(props(), Manner::Loose)
    }

    #[test]
    fn a_strict_script_names_the_first_call_that_strays_from_it() {
        let mut device = Scripted::new(props(), Manner::Strict);
        device.expect(Call::Alloc { bytes: 512 }, Ok(Reply::Address(Address(0x1000))));
        device.expect(Call::Free { address: Address(0x1000) }, Ok(Reply::Done));
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
    fn a_loose_script_needs_to_know_only_where_memory_lies() {
        let mut device = loose();
        device.expect_any(CallKind::AddressReserve, Ok(Reply::Address(Address(0x3_0200_0000))));
        device.expect(Call::Alloc { bytes: 20 * MIB }, Ok(Reply::Address(Address(0x7f00_0000_0000))));
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
    fn scripted_failures_and_sizes_that_differ_are_seen() {
        let mut device = loose();
        let exhausted = DeviceError::OutOfMemory { call: CallKind::MemAlloc, requested: 512 };
        device.expect_any(CallKind::MemAlloc, Err(exhausted.clone()));
        device.expect(Call::Alloc { bytes: 1024 }, Ok(Reply::Address(Address(0x1000))));
        assert_eq!(device.alloc(512), Err(exhausted));
        assert_eq!((device.held_bytes(), device.mismatch()), (0, None));
        device.alloc(2048).unwrap_err();
        assert_eq!(device.mismatch().unwrap().made, Call::Alloc { bytes: 2048 });
    }

    #[test]
    fn events_are_pending_while_their_stream_is_busy_or_the_script_says_so() {
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
        device.expect_any(CallKind::EventQuery, Ok(Reply::Ready(false)));
        assert!(!device.event_query(event).unwrap());
        device.event_destroy(event).unwrap();
        assert_eq!(device.event_create().unwrap(), event);
    }

    #[test]
    fn a_copy_is_rolled_back_to_without_a_trace() {
        let mut device = loose();
        for n in 1..4 {
            device.expect_any(CallKind::MemAlloc, Ok(Reply::Address(Address(n << 24))));
        }
        device.alloc(512).unwrap();
        let before = device.clone();
        device.alloc(512).unwrap();
        device.expect_any(CallKind::MemAlloc, Ok(Reply::Address(Address(9 << 24))));
        device.free(Address(1 << 24)).unwrap();
        let mut device = before;
        assert_eq!((device.unread(), device.held_bytes(), device.calls().count), (2, 2 * MIB, 1));
        assert_eq!(device.alloc(512).unwrap(), Address(2 << 24));
    }

    #[test]
    fn a_script_can_be_written_part_by_part() {
        let mut device = loose();
        for n in 1..3 {
            device.expect_any(CallKind::MemAlloc, Ok(Reply::Address(Address(n << 24))));
        }
        device.alloc(512).unwrap();
        device.clear_script();
        assert_eq!((device.unread(), device.held_bytes()), (0, 2 * MIB));
        device.expect_any(CallKind::MemAlloc, Ok(Reply::Address(Address(9 << 24))));
        assert_eq!(device.alloc(512).unwrap(), Address(9 << 24));
    }

    #[test]
    fn a_reply_of_the_wrong_kind_is_an_error_not_a_panic() {
        let mut device = loose();
        device.expect_any(CallKind::MemAlloc, Ok(Reply::Done));
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
        fn replaying_a_logged_run_gives_the_same_answers(
            steps in prop::collection::vec((0u8..16, 0u64..200_000), 1..150)
        ) {
            let sim = SimDevice::new("sim:2GiB".parse::<SimConfig>().unwrap()).unwrap();
            let plan = FaultPlan::none().fail_every(None, 11, Fault::OutOfMemory);
            let mut logged = Logged::over(Box::new(Faulty::with(plan, Box::new(sim))));
            let first = exercise(&mut logged, &steps);
            let tally = logged.calls();
            let props = logged.props().clone();
            let (_, log) = logged.into_parts();
            prop_assert_eq!(log.exchanges().len() as u64, tally.count);
            let mut scripted = Scripted::replaying(props, log.into_exchanges());
            prop_assert_eq!(exercise(&mut scripted, &steps), first);
            prop_assert_eq!((scripted.mismatch(), scripted.unread()), (None, 0));
            prop_assert_eq!((scripted.calls().count, scripted.calls().failures), (tally.count, tally.failures));
        }
    }

    #[test]
    fn work_is_accepted_where_the_device_has_compute() {
        let mut device = loose();
        device.launch(StreamId(0), &Work::Elementwise { bytes: 1 }, &[]).unwrap();
        let mut device = Scripted::new(DeviceProps { capabilities: Capabilities::NONE, ..props() }, Manner::Loose);
        assert!(device.compute().is_none() && device.virtual_memory().is_none());
    }
}

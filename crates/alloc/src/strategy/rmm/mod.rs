//! The memory resources of RMM (RAPIDS Memory Manager, 26.10) as strategies.
//!
//! | strategy | RMM's resource |
//! |---|---|
//! | [`pool`] | `pool_memory_resource`: coalescing best fit, a free list per stream |
//! | [`arena`] | `arena_memory_resource`: first fit in superblocks, an arena per stream or thread |
//! | [`fixed`] | `fixed_size_memory_resource`: blocks of one size |
//! | [`binning`] | `binning_memory_resource`: fixed sizes for small requests, a pool for the rest |
//!
//! RMM's rules decide which block serves a request, when and by how much the pool grows, and which
//! stream waits for which. The search is different: RMM walks lists, here everything has an index.
//! Two more differences follow from the suite:
//!
//! - RMM takes its first memory when a resource is created. A strategy is created without a device,
//!   so the memory is taken at the first request.
//! - RMM has no `record_stream`. [`PoolStrategy`](super::pooled::PoolStrategy) holds such blocks back
//!   until the other streams are done.
//!
//! Two parameters depart from RMM, both off by default: `empty_cache` gives memory back, which RMM
//! does only under a `maximum`, and `lazy_events` records an event when another stream needs it,
//! where RMM records one at every free.
//!
//! Users: cuDF, cuML, Dask and Spark on RAPIDS, PyTorch and CuPy through their plugins.

pub(super) mod arena;
#[cfg(test)]
mod bench;
pub(super) mod binning;
pub(super) mod fixed;
pub(super) mod pool;
#[cfg(test)]
mod reference;

use super::{
    Parameter,
    parameters::Setting,
    pooled::{PerStream, REQUEST_LIMIT, WaitEvent},
};
use crate::device::{Device, DeviceError};
use oomph_base::{StreamId, round_up};

/// Sizes are multiples of this.
const QUANTUM: u64 = 256;

/// What all four do otherwise than RMM.
const FIRST_REQUEST: &str = "takes its first memory at the first request, not when it is created";
const RECORD_STREAM: &str = "holds a block back that other streams use (record_stream), which RMM does not know";

const EMPTY_CACHE: &str = "empty_cache";
const EMPTY_CACHE_PARAMETER: Parameter = Parameter::text(
    EMPTY_CACHE,
    "True, False",
    "False",
    "not in RMM: give wholly free memory back at an empty_cache and when the device refuses",
);
const LAZY_EVENTS: &str = "lazy_events";
const LAZY_EVENTS_PARAMETER: Parameter = Parameter::text(
    LAZY_EVENTS,
    "True, False",
    "False",
    "not in RMM: record an event when another stream waits for it, not at every free",
);

/// A request as RMM rounds it.
#[inline]
fn rounded(bytes: u64) -> Option<u64> {
    (bytes < REQUEST_LIMIT).then(|| round_up(bytes, QUANTUM))
}

/// An amount of memory as RMM's users give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RmmAmount {
    Bytes(u64),
    /// Of what is free on the device when the memory is taken.
    PercentOfFree(u64),
}

impl RmmAmount {
    /// How users write it.
    const VALUES: &str = "an amount of memory, or a share of what is free (50%)";

    /// Reads a parameter.
    fn read(setting: &Setting<'_>) -> Result<RmmAmount, String> {
        let Some(percent) = setting.value.strip_suffix('%') else {
            return multiple_of_quantum(setting).map(RmmAmount::Bytes);
        };
        match percent.trim().parse() {
            Ok(percent @ 1..=100) => Ok(RmmAmount::PercentOfFree(percent)),
            _ => Err(setting.refused(&format!("'{}' is not between 1% and 100%", setting.value))),
        }
    }

    /// In bytes, a multiple of [`QUANTUM`].
    fn resolve(self, device: &mut dyn Device) -> Result<u64, DeviceError> {
        match self {
            RmmAmount::Bytes(bytes) => Ok(bytes),
            RmmAmount::PercentOfFree(percent) => {
                let free = u128::from(device.memory_info()?.free);
                Ok((free * u128::from(percent) / 100) as u64 / QUANTUM * QUANTUM)
            }
        }
    }
}

/// A parameter in bytes, as RMM wants it.
fn multiple_of_quantum(setting: &Setting<'_>) -> Result<u64, String> {
    match setting.bytes()? {
        bytes if bytes % QUANTUM == 0 => Ok(bytes),
        _ => Err(setting.refused(&format!("'{}' is not a multiple of {QUANTUM} bytes", setting.value))),
    }
}

/// A free list per stream, and which stream must wait for which.
///
/// RMM records an event at every free, and a stream that takes from another's list waits for that
/// event. With lazy events it is recorded when another stream waits: the same streams wait at the
/// same requests, for work that was queued up to then. A list into which nothing was freed holds
/// memory that was never used: RMM waits for an event that was never recorded, which does not wait,
/// and here the driver is not called.
///
/// RMM visits the lists of other streams in the order of its events' addresses. Here it is the
/// order in which the streams were first seen, which is the order in which RMM creates those
/// events.
#[derive(Clone, Debug)]
struct StreamLists<L> {
    /// By stream.
    lists: PerStream<StreamList<L>>,
    /// Streams in the order in which they were first seen.
    seen: Vec<StreamId>,
    lazy_events: bool,
}

#[derive(Clone, Debug, Default)]
struct StreamList<L> {
    blocks: L,
    /// Whether RMM's map has this list. It may be empty.
    present: bool,
    work: ListedWork,
    event: WaitEvent,
}

/// The work of a stream that others must wait for before they use the blocks of its list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ListedWork {
    #[default]
    None,
    /// All of it is before the stream's event.
    Recorded,
    /// Some of it may be after the event, or there is no event.
    Unrecorded,
}

impl<L: Default> StreamLists<L> {
    fn new(lazy_events: bool) -> Self {
        StreamLists { lists: PerStream::default(), seen: Vec::new(), lazy_events }
    }

    /// The list of a stream, if it exists.
    #[inline]
    fn get(&mut self, stream: StreamId) -> Option<&mut L> {
        self.lists.get_mut(stream).filter(|list| list.present).map(|list| &mut list.blocks)
    }

    /// The list of a stream, made if it does not exist.
    #[inline]
    fn get_or_make(&mut self, stream: StreamId) -> &mut L {
        &mut self.list(stream).blocks
    }

    /// Called before a block goes into the list of this stream.
    #[inline]
    fn record_free(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        if self.lazy_events {
            return Ok(());
        }
        let list = self.list(stream);
        list.event.record(device, stream)?;
        list.work = ListedWork::Recorded;
        Ok(())
    }

    /// The list into which this stream frees, after [`record_free`](StreamLists::record_free).
    #[inline]
    fn freed_by(&mut self, stream: StreamId) -> &mut L {
        if self.lazy_events { self.used_by(stream) } else { self.get_or_make(stream) }
    }

    /// The list of a stream, for memory that the stream used before without an event after it.
    #[inline]
    fn used_by(&mut self, stream: StreamId) -> &mut L {
        let list = self.list(stream);
        list.work = ListedWork::Unrecorded;
        &mut list.blocks
    }

    /// All streams with lists except one.
    fn others(&self, stream: StreamId) -> Vec<StreamId> {
        let present = |&other: &StreamId| self.lists.get(other).is_some_and(|list| list.present);
        self.seen.iter().copied().filter(|&other| other != stream).filter(present).collect()
    }

    /// Every stream's list.
    fn iter(&self) -> impl Iterator<Item = &L> {
        self.lists.iter().map(|list| &list.blocks)
    }

    /// Makes later work of `stream` wait until `owner` is done with what it has freed.
    fn wait_for(&mut self, device: &mut dyn Device, stream: StreamId, owner: StreamId) -> Result<(), DeviceError> {
        let Some(list) = self.lists.get_mut(owner) else { return Ok(()) };
        match list.work {
            ListedWork::None => Ok(()),
            ListedWork::Recorded => list.event.wait_for_recorded(device, stream),
            ListedWork::Unrecorded => list.event.wait(device, stream, owner),
        }
    }

    /// Takes a list away, to be added to another's.
    fn remove(&mut self, stream: StreamId) -> L {
        let list = self.list(stream);
        list.present = false;
        std::mem::take(&mut list.blocks)
    }

    /// Gives the events back.
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.seen.iter().try_for_each(|&stream| self.lists.of(stream).event.destroy(device))
    }

    #[inline]
    fn list(&mut self, stream: StreamId) -> &mut StreamList<L> {
        if !self.lists.get(stream).is_some_and(|list| list.present) {
            self.make(stream);
        }
        self.lists.of(stream)
    }

    #[cold]
    fn make(&mut self, stream: StreamId) {
        self.lists.of(stream).present = true;
        if !self.seen.contains(&stream) {
            self.seen.push(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::{device::wrap::stand_in::StandInDevice, strategy::test_device::simulated};
    use oomph_base::MIB;

    fn read(value: &str) -> Result<RmmAmount, String> {
        RmmAmount::read(&Setting { key: "initial", value })
    }

    #[test]
    fn amounts_are_bytes_or_shares() {
        assert_eq!(read("2MiB"), Ok(RmmAmount::Bytes(2 * MIB)));
        assert_eq!(read("50%"), Ok(RmmAmount::PercentOfFree(50)));
        for wrong in ["0%", "101%", "-1%", "%", "100", "1e3", ""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_share_is_of_what_is_free_and_rounded_down() {
        let mut device = simulated(96 * MIB);
        assert_eq!(RmmAmount::PercentOfFree(50).resolve(&mut *device), Ok(48 * MIB));
        let third = RmmAmount::PercentOfFree(33).resolve(&mut *device).unwrap();
        assert!(third.is_multiple_of(QUANTUM) && third <= 96 * MIB / 3, "{third}");
        assert_eq!(RmmAmount::Bytes(512).resolve(&mut *device), Ok(512));
    }

    const FIRST: StreamId = StreamId(2);
    const SECOND: StreamId = StreamId(0);

    fn waits(device: &StandInDevice) -> (u64, u64) {
        (device.ledger().of(CallKind::EventRecord).count, device.ledger().of(CallKind::StreamWaitEvent).count)
    }

    #[test]
    fn lists_come_in_the_order_in_which_streams_were_seen() {
        let mut lists = StreamLists::<Vec<u32>>::new(true);
        lists.get_or_make(FIRST).push(1);
        lists.freed_by(SECOND).push(2);
        assert_eq!(lists.others(StreamId(7)), [FIRST, SECOND]);
        assert_eq!(lists.others(FIRST), [SECOND]);
        assert_eq!(lists.remove(FIRST), [1]);
        assert_eq!(lists.get(FIRST), None);
        assert_eq!(lists.others(SECOND), []);
        lists.freed_by(FIRST);
        assert_eq!(lists.others(StreamId(7)), [FIRST, SECOND]);
    }

    #[test]
    fn only_what_was_freed_is_waited_for() {
        let (mut lists, mut device) = (StreamLists::<Vec<u32>>::new(true), StandInDevice::new(1 << 30, 1 << 30, false));
        lists.get_or_make(FIRST);
        lists.wait_for(&mut device, SECOND, FIRST).unwrap();
        assert_eq!(waits(&device), (0, 0));
        lists.freed_by(FIRST);
        for _ in 0..2 {
            lists.wait_for(&mut device, SECOND, FIRST).unwrap();
        }
        assert_eq!(waits(&device), (2, 2));
        assert_eq!(device.ledger().of(CallKind::EventCreate).count, 1);
        lists.close(&mut device).unwrap();
        assert_eq!(device.leftovers(), 0);
    }

    #[test]
    fn rmm_records_an_event_at_every_free() {
        let (mut lists, mut device) =
            (StreamLists::<Vec<u32>>::new(false), StandInDevice::new(1 << 30, 1 << 30, false));
        for free in 1..=3 {
            lists.record_free(&mut device, FIRST).unwrap();
            lists.freed_by(FIRST).push(free);
        }
        assert_eq!(waits(&device), (3, 0));
        lists.wait_for(&mut device, SECOND, FIRST).unwrap();
        assert_eq!(waits(&device), (3, 1));
        // Memory that came without an event: it is recorded now.
        lists.used_by(FIRST).push(4);
        lists.wait_for(&mut device, SECOND, FIRST).unwrap();
        assert_eq!(waits(&device), (4, 2));
    }
}

//! Driver calls and the time inside them, by kind and by the part of the driver they belong to.

use serde::{Deserialize, Serialize};

use crate::device::{CallKind, CallLedger, CallTally};

/// One kind of driver call over a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCalls {
    /// Which call.
    pub call: CallKind,
    /// How often, failed ones included.
    pub count: u64,
    /// How often it failed.
    pub failures: u64,
    /// Time inside it.
    pub time_ns: u64,
}

/// The kinds that were called at all.
#[must_use]
pub fn by_kind(ledger: &CallLedger) -> Vec<DriverCalls> {
    ledger
        .iter()
        .map(|(call, CallTally { count, failures, time })| DriverCalls { call, count, failures, time_ns: time.0 })
        .collect()
}

/// The parts of the driver that have columns of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `cuMemAlloc`.
    Alloc,
    /// `cuMemFree`.
    Free,
    /// Waiting for streams, events or the device.
    Synchronize,
    /// Making, recording, querying and destroying events.
    Event,
    /// Reserving, creating, mapping and their opposites.
    Mapping,
    /// The driver's own stream-ordered pools.
    Pool,
    /// Everything else: streams, memory info, host memory, launches.
    Other,
}

impl Part {
    /// The part that a call belongs to.
    #[must_use]
    pub const fn of(call: CallKind) -> Part {
        match call {
            CallKind::MemAlloc => Part::Alloc,
            CallKind::MemFree => Part::Free,
            CallKind::StreamSynchronize | CallKind::CtxSynchronize | CallKind::EventSynchronize => Part::Synchronize,
            CallKind::EventCreate | CallKind::EventRecord | CallKind::EventQuery | CallKind::EventDestroy => {
                Part::Event
            }
            CallKind::AddressReserve
            | CallKind::AddressFree
            | CallKind::MemCreate
            | CallKind::MemRelease
            | CallKind::MemMap
            | CallKind::MemSetAccess
            | CallKind::MemUnmap => Part::Mapping,
            CallKind::PoolCreate
            | CallKind::PoolDestroy
            | CallKind::PoolSetAttribute
            | CallKind::PoolGetAttribute
            | CallKind::PoolTrim
            | CallKind::MemAllocAsync
            | CallKind::MemFreeAsync => Part::Pool,
            CallKind::MemGetInfo
            | CallKind::StreamCreate
            | CallKind::StreamWaitEvent
            | CallKind::HostAlloc
            | CallKind::HostFree
            | CallKind::Launch => Part::Other,
        }
    }

    /// All calls of this part.
    #[must_use]
    pub fn tally(self, ledger: &CallLedger) -> CallTally {
        ledger.iter().filter(|(call, _)| Part::of(*call) == self).fold(CallTally::default(), |sum, (_, tally)| {
            CallTally {
                count: sum.count + tally.count,
                failures: sum.failures + tally.failures,
                time: sum.time + tally.time,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Nanos;

    #[test]
    fn the_parts_sum_to_the_whole() {
        let mut ledger = CallLedger::default();
        for (place, &call) in CallKind::ALL.iter().enumerate() {
            ledger.note(call, Nanos(1 << place), place % 2 == 0);
        }
        let parts = [Part::Alloc, Part::Free, Part::Synchronize, Part::Event, Part::Mapping, Part::Pool, Part::Other];
        let tallies = parts.map(|part| part.tally(&ledger));
        assert_eq!(tallies.iter().map(|tally| tally.time).sum::<Nanos>(), ledger.total().time);
        assert_eq!(tallies.iter().map(|tally| tally.count).sum::<u64>(), CallKind::ALL.len() as u64);
        assert_eq!(by_kind(&ledger).len(), CallKind::ALL.len());
    }
}

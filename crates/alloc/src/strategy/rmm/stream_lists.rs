//! Free lists per stream, and which stream must wait for which: what RMM's pool and its fixed-size resource share.
//!
//! RMM records an event whenever a block is freed, and a stream that takes from another's list waits for that event.
//! Here the event is recorded when it is needed: the same streams wait at the same requests, and a free costs no
//! driver call. The wait may then cover work that was queued after the last free, never less. A list into which nothing
//! was freed holds memory that nobody has used: RMM waits for an event that was never recorded, which is no wait, and
//! here nothing is asked of the driver.
//!
//! RMM goes through the lists of other streams in the order of its events' addresses. Here it is the order in which
//! the streams were first seen, which is the order in which RMM makes those events.

use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// A free list per stream.
#[derive(Clone, Debug)]
pub(super) struct StreamLists<L> {
    /// By stream.
    lists: Vec<StreamList<L>>,
    /// In the order in which they were first seen.
    seen: Vec<StreamId>,
}

#[derive(Clone, Debug, Default)]
struct StreamList<L> {
    blocks: L,
    /// Whether RMM's map has such a list. It may be empty.
    present: bool,
    seen: bool,
    /// Whether there is work of this stream that others must wait for.
    freed: bool,
    event: Option<EventId>,
}

impl<L> Default for StreamLists<L> {
    fn default() -> Self {
        StreamLists { lists: Vec::new(), seen: Vec::new() }
    }
}

impl<L: Default> StreamLists<L> {
    /// The list of a stream, where there is one.
    #[inline]
    pub(super) fn get(&mut self, stream: StreamId) -> Option<&mut L> {
        self.lists.get_mut(stream.index()).filter(|list| list.present).map(|list| &mut list.blocks)
    }

    /// The list of a stream, made where there is none.
    #[inline]
    pub(super) fn get_or_make(&mut self, stream: StreamId) -> &mut L {
        &mut self.list(stream).blocks
    }

    /// The list into which this stream frees.
    #[inline]
    pub(super) fn freed_by(&mut self, stream: StreamId) -> &mut L {
        let list = self.list(stream);
        list.freed = true;
        &mut list.blocks
    }

    /// The streams with lists, but for one.
    pub(super) fn others(&self, stream: StreamId) -> Vec<StreamId> {
        let present = |other: &StreamId| self.lists[other.index()].present;
        self.seen.iter().copied().filter(|&other| other != stream).filter(present).collect()
    }

    /// Every stream's list.
    pub(super) fn iter(&self) -> impl Iterator<Item = &L> {
        self.lists.iter().map(|list| &list.blocks)
    }

    /// Makes later work of `stream` wait until `owner` is done with what it has freed.
    pub(super) fn wait_for(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        owner: StreamId,
    ) -> Result<(), DeviceError> {
        let Some(list) = self.lists.get_mut(owner.index()).filter(|list| list.freed) else { return Ok(()) };
        let event = match list.event {
            Some(event) => event,
            None => *list.event.insert(device.event_create()?),
        };
        device.event_record(event, owner)?;
        device.stream_wait_event(stream, event)
    }

    /// Takes a list away, to be added to another's.
    pub(super) fn remove(&mut self, stream: StreamId) -> L {
        let list = self.list(stream);
        list.present = false;
        std::mem::take(&mut list.blocks)
    }

    /// Gives the events back.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        for list in &mut self.lists {
            if let Some(event) = list.event {
                device.event_destroy(event)?;
                list.event = None;
            }
        }
        Ok(())
    }

    #[inline]
    fn list(&mut self, stream: StreamId) -> &mut StreamList<L> {
        if !self.lists.get(stream.index()).is_some_and(|list| list.present) {
            self.make(stream);
        }
        &mut self.lists[stream.index()]
    }

    #[cold]
    fn make(&mut self, stream: StreamId) {
        if self.lists.len() <= stream.index() {
            self.lists.resize_with(stream.index() + 1, StreamList::default);
        }
        let list = &mut self.lists[stream.index()];
        list.present = true;
        if !std::mem::replace(&mut list.seen, true) {
            self.seen.push(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::caching::stand_in::StandIn;

    const FIRST: StreamId = StreamId(2);
    const SECOND: StreamId = StreamId(0);

    fn waits(device: &StandIn) -> (u64, u64) {
        (device.ledger().of(CallKind::EventRecord).count, device.ledger().of(CallKind::StreamWaitEvent).count)
    }

    #[test]
    fn lists_come_in_the_order_in_which_streams_were_seen() {
        let mut lists = StreamLists::<Vec<u32>>::default();
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
        let (mut lists, mut device) = (StreamLists::<Vec<u32>>::default(), StandIn::new(1 << 30, 1 << 30, false));
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
}

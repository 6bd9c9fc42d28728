//! Blocks that other streams use: which streams those are, and waiting for them after a free.
//!
//! Knows nothing about blocks: it carries the strategy's own tokens and 32-bit entries.

use std::collections::{BTreeMap, VecDeque};

use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// What to do with unfinished events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Stop at the first unfinished event of each queue.
    Poll,
    /// Wait for every event.
    Wait,
}

/// Freed blocks that wait for events on streams. There is one queue per stream, first in first out;
/// queues are processed in ascending [`StreamId`]. A block is released when the last of its events
/// has finished. `T` is the strategy's own name for a block.
#[derive(Clone, Debug)]
pub struct DeferredFrees<T> {
    /// Events in the order of their recording, each with the ticket of the block that waits for it.
    queues: Vec<VecDeque<(EventId, u64)>>,
    /// By ticket: the block, and how many of its events have not finished.
    held: BTreeMap<u64, (T, usize)>,
    next_ticket: u64,
    idle_events: Vec<EventId>,
}

impl<T> Default for DeferredFrees<T> {
    fn default() -> Self {
        DeferredFrees { queues: Vec::new(), held: BTreeMap::new(), next_ticket: 0, idle_events: Vec::new() }
    }
}

impl<T: Copy> DeferredFrees<T> {
    /// Whether no block waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many blocks wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Holds `token` until each of `streams` has passed this point. If an event cannot be created
    /// or recorded, the token is not held.
    pub fn hold(&mut self, device: &mut dyn Device, token: T, streams: &[StreamId]) -> Result<(), DeviceError> {
        let mut events = Vec::with_capacity(streams.len());
        for &stream in streams {
            let event = self.idle_events.pop().map_or_else(|| device.event_create(), Ok);
            let recorded = event.and_then(|event| {
                events.push(event);
                device.event_record(event, stream)
            });
            if let Err(error) = recorded {
                self.idle_events.append(&mut events);
                return Err(error);
            }
        }
        let Some(last) = streams.iter().map(|stream| stream.index()).max() else { return Ok(()) };
        if self.queues.len() <= last {
            self.queues.resize_with(last + 1, VecDeque::new);
        }
        for (event, stream) in events.into_iter().zip(streams) {
            self.queues[stream.index()].push_back((event, self.next_ticket));
        }
        self.held.insert(self.next_ticket, (token, streams.len()));
        self.next_ticket += 1;
        Ok(())
    }

    /// Processes the queues and appends the tokens that no longer wait to `released`, in order. If
    /// a driver call fails, earlier tokens are released and the rest stays queued.
    pub fn release(
        &mut self,
        device: &mut dyn Device,
        patience: Patience,
        released: &mut Vec<T>,
    ) -> Result<(), DeviceError> {
        for queue in &mut self.queues {
            while let Some(&(event, ticket)) = queue.front() {
                match patience {
                    Patience::Poll if !device.event_query(event)? => break,
                    Patience::Poll => {}
                    Patience::Wait => device.event_synchronize(event)?,
                }
                queue.pop_front();
                self.idle_events.push(event);
                match self.held.remove(&ticket) {
                    Some((token, 1)) => released.push(token),
                    Some((token, unfinished)) => drop(self.held.insert(ticket, (token, unfinished - 1))),
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// Waits for the events of the wanted tokens only, and appends those to `released` that no longer wait. If a driver
    /// call fails, the rest stays queued.
    pub fn release_wanted(
        &mut self,
        device: &mut dyn Device,
        wanted: impl Fn(T) -> bool,
        released: &mut Vec<T>,
    ) -> Result<(), DeviceError> {
        for queue in &mut self.queues {
            let mut place = 0;
            while let Some(&(event, ticket)) = queue.get(place) {
                let Some((token, unfinished)) = self.held.get_mut(&ticket).filter(|(token, _)| wanted(*token)) else {
                    place += 1;
                    continue;
                };
                device.event_synchronize(event)?;
                queue.remove(place);
                self.idle_events.push(event);
                *unfinished -= 1;
                if *unfinished == 0 {
                    released.push(*token);
                    self.held.remove(&ticket);
                }
            }
        }
        Ok(())
    }

    /// Lets later work of `stream` wait for the events of a token, which then no longer waits. If a driver call fails, it still
    /// waits.
    pub fn hand_over(&mut self, device: &mut dyn Device, token: T, stream: StreamId) -> Result<(), DeviceError>
    where
        T: PartialEq,
    {
        let found = self.held.iter().find(|(_, (held, _))| *held == token);
        let Some(wanted) = found.map(|(&ticket, _)| ticket) else { return Ok(()) };
        let others = self.queues.iter().enumerate().filter(|(number, _)| *number != stream.index());
        for (event, _) in others.flat_map(|(_, queue)| queue).filter(|(_, ticket)| *ticket == wanted) {
            device.stream_wait_event(stream, *event)?;
        }
        for queue in &mut self.queues {
            self.idle_events.extend(queue.iter().filter(|(_, ticket)| *ticket == wanted).map(|(event, _)| *event));
            queue.retain(|(_, ticket)| *ticket != wanted);
        }
        self.held.remove(&wanted);
        Ok(())
    }

    /// Destroys the idle events. Events that still wait are kept.
    pub fn destroy_idle_events(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&event) = self.idle_events.last() {
            device.event_destroy(event)?;
            self.idle_events.pop();
        }
        Ok(())
    }
}

/// The streams that use one block, except its own.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockUses {
    /// In ascending order.
    pub(super) streams: Vec<StreamId>,
    /// Those recorded during a stream capture: a block freed in the capture does not wait for them.
    /// PyTorch does not clear this record when the block is freed outside, so that a later `Block`
    /// object at the same host address inherits it; that is not modelled.
    captured: Vec<StreamId>,
}

/// The stream uses of all blocks that have any: what `record_stream` leaves until the block is
/// freed.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamUses {
    entries: Vec<BlockUses>,
    vacant: Vec<u32>,
}

impl StreamUses {
    /// An empty entry.
    pub(super) fn add(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(BlockUses::default());
            (self.entries.len() - 1) as u32
        })
    }

    /// Removes an entry.
    pub(super) fn remove(&mut self, entry: u32) {
        self.entries[entry as usize].streams.clear();
        self.entries[entry as usize].captured.clear();
        self.vacant.push(entry);
    }

    /// Records a use.
    pub(super) fn record(&mut self, entry: u32, stream: StreamId, capturing: bool) {
        let uses = &mut self.entries[entry as usize];
        insert_sorted(&mut uses.streams, stream);
        if capturing {
            insert_sorted(&mut uses.captured, stream);
        }
    }

    /// The streams in an entry.
    pub(super) fn streams(&self, entry: u32) -> &[StreamId] {
        self.entries.get(entry as usize).map_or(&[], |uses| &uses.streams)
    }

    /// Drops the streams that were recorded in a capture, when it is over.
    pub(super) fn end_capture(&mut self, entry: u32) {
        let uses = &mut self.entries[entry as usize];
        let captured = std::mem::take(&mut uses.captured);
        uses.streams.retain(|stream| !captured.contains(stream));
    }
}

/// Adds a stream to a sorted list, once.
fn insert_sorted(streams: &mut Vec<StreamId>, stream: StreamId) {
    if let Err(place) = streams.binary_search(&stream) {
        streams.insert(place, stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::wrap::stand_in::StandInDevice;

    const LEFT: StreamId = StreamId(1);
    const RIGHT: StreamId = StreamId(2);

    fn device() -> StandInDevice {
        StandInDevice::new(1 << 30, 1 << 30, false)
    }

    fn released(frees: &mut DeferredFrees<char>, device: &mut StandInDevice, patience: Patience) -> String {
        let mut released = Vec::new();
        frees.release(device, patience, &mut released).unwrap();
        released.into_iter().collect()
    }

    #[test]
    fn free_waits_for_every_stream_in_order() {
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        device.set_busy(LEFT, true);
        frees.hold(&mut device, 'a', &[LEFT, RIGHT]).unwrap();
        frees.hold(&mut device, 'b', &[RIGHT]).unwrap();
        frees.hold(&mut device, 'c', &[LEFT]).unwrap();
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "b");
        assert_eq!(frees.len(), 2);
        device.set_busy(LEFT, false);
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "ac");
        assert!(frees.is_empty());
    }

    #[test]
    fn others_wait_on_while_some_are_awaited() {
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        device.set_busy(LEFT, true);
        device.set_busy(RIGHT, true);
        frees.hold(&mut device, 'a', &[LEFT]).unwrap();
        frees.hold(&mut device, 'b', &[LEFT, RIGHT]).unwrap();
        frees.hold(&mut device, 'c', &[RIGHT]).unwrap();
        let mut released = Vec::new();
        frees.release_wanted(&mut device, |token| token == 'b', &mut released).unwrap();
        assert_eq!((released, frees.len()), (vec!['b'], 2));
    }

    #[test]
    fn a_stream_waits_in_place_of_the_host() {
        use crate::device::{CallKind, Device};
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        device.set_busy(LEFT, true);
        frees.hold(&mut device, 'a', &[LEFT, RIGHT]).unwrap();
        frees.hold(&mut device, 'b', &[LEFT]).unwrap();
        device.fails_at = Some(device.calls().count);
        frees.hand_over(&mut device, 'a', StreamId(0)).unwrap_err();
        assert_eq!(frees.len(), 2);
        frees.hand_over(&mut device, 'a', RIGHT).unwrap();
        assert_eq!((frees.len(), device.ledger().of(CallKind::StreamWaitEvent).count), (1, 2));
        device.set_busy(LEFT, false);
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "b");
        frees.destroy_idle_events(&mut device).unwrap();
        assert_eq!(device.leftovers(), 0);
    }

    #[test]
    fn waiting_releases_busy_streams() {
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        device.set_busy(LEFT, true);
        frees.hold(&mut device, 'a', &[LEFT]).unwrap();
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "");
        assert_eq!(released(&mut frees, &mut device, Patience::Wait), "a");
    }

    #[test]
    fn events_are_reused_and_destroyed() {
        use crate::device::{CallKind, Device};
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        for _ in 0..3 {
            frees.hold(&mut device, 'a', &[LEFT, RIGHT]).unwrap();
            assert_eq!(released(&mut frees, &mut device, Patience::Poll), "a");
        }
        assert_eq!(device.ledger().of(CallKind::EventCreate).count, 2);
        frees.destroy_idle_events(&mut device).unwrap();
        assert_eq!(device.leftovers(), 0);
    }

    #[test]
    fn failing_call_keeps_the_queues_sound() {
        for call in 0..4 {
            let (mut device, mut frees) = (device(), DeferredFrees::default());
            device.fails_at = Some(call);
            frees.hold(&mut device, 'a', &[LEFT, RIGHT]).unwrap_err();
            assert!(frees.is_empty());
            frees.hold(&mut device, 'a', &[LEFT, RIGHT]).unwrap();
            assert_eq!(released(&mut frees, &mut device, Patience::Poll), "a");
        }
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        frees.hold(&mut device, 'a', &[LEFT]).unwrap();
        frees.hold(&mut device, 'b', &[LEFT]).unwrap();
        device.fails_at = Some(5);
        let mut done = Vec::new();
        frees.release(&mut device, Patience::Poll, &mut done).unwrap_err();
        assert_eq!(done, ['a']);
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "b");
    }
}

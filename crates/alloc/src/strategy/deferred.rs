//! Waiting for streams: blocks that were freed while other streams may still use them.
//!
//! A strategy hands in what was freed and the streams that used it; one event is recorded on each. There is one queue
//! a stream, first in first out, and queues are looked at in ascending [`StreamId`]: a block comes back when the last
//! of its events is done. This module knows nothing about blocks: it carries the strategy's own tokens.

use std::collections::VecDeque;

use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// Whether unfinished events are left in their queue or waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A queue is left at its first unfinished event.
    Poll,
    /// Every event is waited for.
    Wait,
}

/// What was freed and waits for streams.
#[derive(Clone, Debug)]
pub struct DeferredFrees<T> {
    queues: Vec<VecDeque<(EventId, u32)>>,
    tickets: Vec<Ticket<T>>,
    vacant: Vec<u32>,
    idle_events: Vec<EventId>,
    waiting: usize,
}

#[derive(Clone, Debug)]
struct Ticket<T> {
    token: T,
    unfinished: u32,
}

impl<T> Default for DeferredFrees<T> {
    fn default() -> Self {
        DeferredFrees {
            queues: Vec::new(),
            tickets: Vec::new(),
            vacant: Vec::new(),
            idle_events: Vec::new(),
            waiting: 0,
        }
    }
}

impl<T: Copy> DeferredFrees<T> {
    /// Whether nothing waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// How many tokens wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Holds `token` back until each of `streams` has got past this point. All or nothing: where an event cannot be
    /// made or recorded, the token was not taken.
    pub fn hold(&mut self, device: &mut dyn Device, token: T, streams: &[StreamId]) -> Result<(), DeviceError> {
        let mut events = Vec::with_capacity(streams.len());
        for &stream in streams {
            let recorded = self.idle_event(device).and_then(|event| {
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
        let ticket = self.issue(token, streams.len() as u32);
        for (event, stream) in events.into_iter().zip(streams) {
            self.queues[stream.index()].push_back((event, ticket));
        }
        self.waiting += 1;
        Ok(())
    }

    /// Looks at the queues and appends to `released` what no longer waits, in the order in which it came free. Where a
    /// driver call fails, what was released before it stands, and the rest stays queued.
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
                let held = &mut self.tickets[ticket as usize];
                held.unfinished -= 1;
                if held.unfinished == 0 {
                    released.push(held.token);
                    self.vacant.push(ticket);
                    self.waiting -= 1;
                }
            }
        }
        Ok(())
    }

    /// Gives every idle event back to the device. Events that still wait are kept.
    pub fn destroy_idle_events(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&event) = self.idle_events.last() {
            device.event_destroy(event)?;
            self.idle_events.pop();
        }
        Ok(())
    }

    fn idle_event(&mut self, device: &mut dyn Device) -> Result<EventId, DeviceError> {
        self.idle_events.pop().map_or_else(|| device.event_create(), Ok)
    }

    fn issue(&mut self, token: T, unfinished: u32) -> u32 {
        let ticket = Ticket { token, unfinished };
        match self.vacant.pop() {
            Some(place) => {
                self.tickets[place as usize] = ticket;
                place
            }
            None => {
                self.tickets.push(ticket);
                (self.tickets.len() - 1) as u32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::caching::stand_in::StandIn;

    const LEFT: StreamId = StreamId(1);
    const RIGHT: StreamId = StreamId(2);

    fn device() -> StandIn {
        StandIn::new(1 << 30, 1 << 30, false)
    }

    fn released(frees: &mut DeferredFrees<char>, device: &mut StandIn, patience: Patience) -> String {
        let mut released = Vec::new();
        frees.release(device, patience, &mut released).unwrap();
        released.into_iter().collect()
    }

    #[test]
    fn a_free_waits_for_every_stream_and_for_those_before_it() {
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
    fn waiting_releases_what_polling_does_not() {
        let (mut device, mut frees) = (device(), DeferredFrees::default());
        device.set_busy(LEFT, true);
        frees.hold(&mut device, 'a', &[LEFT]).unwrap();
        assert_eq!(released(&mut frees, &mut device, Patience::Poll), "");
        assert_eq!(released(&mut frees, &mut device, Patience::Wait), "a");
    }

    #[test]
    fn events_are_used_again_and_given_back() {
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
    fn a_failing_call_takes_nothing_and_drops_nothing() {
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

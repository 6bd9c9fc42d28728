//! Streams and events on a virtual clock.
//!
//! The host has a current time; every stream has a time at which its queued work is done. Queuing
//! work moves only the stream, waiting moves only the host. Streams wait for each other only
//! through events: the default stream is like the others, as it is for programs whose side streams
//! are non-blocking.

use std::collections::VecDeque;

use oomph_base::{EventId, Nanos, StreamId};

/// Made-up stream handles start here, a fixed step apart.
const FIRST_HANDLE: u64 = 0x1000_0000;
const HANDLE_STEP: u64 = 0x100;

/// The host's current time, the streams and the events.
#[derive(Clone, Debug)]
pub(super) struct StreamClocks {
    now: Nanos,
    streams: Vec<StreamClock>,
    events: Vec<SimEvent>,
    destroyed: Vec<EventId>,
}

#[derive(Clone, Debug)]
struct StreamClock {
    handle: u64,
    /// When all work queued so far is done.
    ready: Nanos,
    /// When each piece of work is done that was not done at the last look, in order.
    queued: VecDeque<Nanos>,
}

impl StreamClock {
    fn new(handle: u64) -> StreamClock {
        StreamClock { handle, ready: Nanos::ZERO, queued: VecDeque::new() }
    }

    fn drop_done(&mut self, now: Nanos) {
        while self.queued.front().is_some_and(|&done| done <= now) {
            self.queued.pop_front();
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum SimEvent {
    Destroyed,
    /// Done at that time; an event that was never recorded is done at time 0.
    Live(Nanos),
}

/// An unknown stream or event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnknownHandle {
    #[error("there is no stream {0}")]
    Stream(StreamId),
    #[error("there is no event {0}")]
    Event(EventId),
}

impl StreamClocks {
    pub(super) fn new() -> StreamClocks {
        StreamClocks { now: Nanos::ZERO, streams: vec![StreamClock::new(0)], events: Vec::new(), destroyed: Vec::new() }
    }

    pub(super) fn now(&self) -> Nanos {
        self.now
    }

    pub(super) fn elapse(&mut self, time: Nanos) {
        self.now += time;
    }

    /// The host waits until `time`. Returns how long that took.
    pub(super) fn wait_until(&mut self, time: Nanos) -> Nanos {
        let waited = time.since(self.now);
        self.now += waited;
        waited
    }

    /// When the work of all streams is done.
    pub(super) fn all_ready(&self) -> Nanos {
        self.streams.iter().map(|stream| stream.ready).max().unwrap_or_default()
    }

    /// When the work of one stream is done.
    pub(super) fn stream_ready(&self, stream: StreamId) -> Result<Nanos, UnknownHandle> {
        self.streams.get(stream.index()).map(|stream| stream.ready).ok_or(UnknownHandle::Stream(stream))
    }

    /// A new stream, or `None` when the numbers are used up. It gets a made-up handle if `known_as`
    /// is 0.
    pub(super) fn create_stream(&mut self, known_as: u64) -> Option<StreamId> {
        let number = u16::try_from(self.streams.len()).ok()?;
        let handle = if known_as == 0 { FIRST_HANDLE + u64::from(number) * HANDLE_STEP } else { known_as };
        self.streams.push(StreamClock::new(handle));
        Some(StreamId(number))
    }

    /// The handle of a stream, 0 where there is none.
    pub(super) fn handle(&self, stream: StreamId) -> u64 {
        self.streams.get(stream.index()).map_or(0, |stream| stream.handle)
    }

    /// Until when the host waits before it can queue one more piece of work, where a stream holds at most `most` pieces
    /// that are not done.
    pub(super) fn queue_has_room(&mut self, stream: StreamId, most: usize) -> Result<Nanos, UnknownHandle> {
        let now = self.now;
        let stream = self.stream_mut(stream)?;
        stream.drop_done(now);
        let queued = &stream.queued;
        Ok(queued.len().checked_sub(most).map_or(Nanos::ZERO, |place| queued[place]))
    }

    /// Queues work that takes `time`.
    pub(super) fn run(&mut self, stream: StreamId, time: Nanos) -> Result<(), UnknownHandle> {
        let now = self.now;
        let stream = self.stream_mut(stream)?;
        stream.drop_done(now);
        stream.ready = stream.ready.max(now) + time;
        stream.queued.push_back(stream.ready);
        Ok(())
    }

    /// Later work of `stream` waits for `event`.
    pub(super) fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), UnknownHandle> {
        let done = self.event_done(event)?;
        let stream = self.stream_mut(stream)?;
        stream.ready = stream.ready.max(done);
        Ok(())
    }

    /// Later work of a stream, if there is one, starts at `moment` at the earliest.
    pub(super) fn hold_until(&mut self, stream: StreamId, moment: Nanos) {
        if let Ok(stream) = self.stream_mut(stream) {
            stream.ready = stream.ready.max(moment);
        }
    }

    pub(super) fn create_event(&mut self) -> EventId {
        match self.destroyed.pop() {
            Some(event) => {
                self.events[event.index()] = SimEvent::Live(Nanos::ZERO);
                event
            }
            None => {
                self.events.push(SimEvent::Live(Nanos::ZERO));
                EventId((self.events.len() - 1) as u32)
            }
        }
    }

    /// Puts the event behind the work queued on `stream` so far.
    pub(super) fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), UnknownHandle> {
        self.event_done(event)?;
        self.events[event.index()] = SimEvent::Live(self.stream_ready(stream)?);
        Ok(())
    }

    /// When the work in front of the event is done.
    pub(super) fn event_done(&self, event: EventId) -> Result<Nanos, UnknownHandle> {
        match self.events.get(event.index()) {
            Some(&SimEvent::Live(done)) => Ok(done),
            Some(SimEvent::Destroyed) | None => Err(UnknownHandle::Event(event)),
        }
    }

    pub(super) fn destroy_event(&mut self, event: EventId) -> Result<(), UnknownHandle> {
        self.event_done(event)?;
        self.events[event.index()] = SimEvent::Destroyed;
        self.destroyed.push(event);
        Ok(())
    }

    fn stream_mut(&mut self, stream: StreamId) -> Result<&mut StreamClock, UnknownHandle> {
        self.streams.get_mut(stream.index()).ok_or(UnknownHandle::Stream(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_done_when_the_work_in_front_of_it_is() {
        let mut clocks = StreamClocks::new();
        let event = clocks.create_event();
        assert_eq!(clocks.event_done(event), Ok(Nanos::ZERO));
        clocks.elapse(Nanos(10));
        clocks.run(StreamId(0), Nanos(5)).unwrap();
        clocks.record(event, StreamId(0)).unwrap();
        clocks.run(StreamId(0), Nanos(100)).unwrap();
        assert_eq!(clocks.event_done(event), Ok(Nanos(15)));
        assert_eq!(clocks.all_ready(), Nanos(115));
    }

    #[test]
    fn stream_wait_delays_later_work() {
        let mut clocks = StreamClocks::new();
        let side = clocks.create_stream(0xabc).unwrap();
        let event = clocks.create_event();
        clocks.run(StreamId(0), Nanos(50)).unwrap();
        clocks.record(event, StreamId(0)).unwrap();
        clocks.wait_event(side, event).unwrap();
        clocks.run(side, Nanos(1)).unwrap();
        assert_eq!(clocks.stream_ready(side), Ok(Nanos(51)));
        assert_eq!(clocks.handle(side), 0xabc);
    }

    #[test]
    fn a_full_queue_has_room_when_its_first_work_is_done() {
        let mut clocks = StreamClocks::new();
        let stream = StreamId(0);
        for _ in 0..3 {
            clocks.run(stream, Nanos(10)).unwrap();
        }
        assert_eq!(clocks.queue_has_room(stream, 4), Ok(Nanos::ZERO));
        assert_eq!(clocks.queue_has_room(stream, 3), Ok(Nanos(10)));
        assert_eq!(clocks.queue_has_room(stream, 1), Ok(Nanos(30)));
        clocks.wait_until(Nanos(10));
        assert_eq!(clocks.queue_has_room(stream, 3), Ok(Nanos::ZERO));
    }

    #[test]
    fn waiting_moves_the_host_and_never_back() {
        let mut clocks = StreamClocks::new();
        assert_eq!(clocks.wait_until(Nanos(7)), Nanos(7));
        assert_eq!(clocks.wait_until(Nanos(3)), Nanos::ZERO);
        assert_eq!(clocks.now(), Nanos(7));
    }

    #[test]
    fn destroyed_event_ids_are_reused() {
        let mut clocks = StreamClocks::new();
        let event = clocks.create_event();
        clocks.destroy_event(event).unwrap();
        assert_eq!(clocks.event_done(event), Err(UnknownHandle::Event(event)));
        assert_eq!(clocks.destroy_event(event), Err(UnknownHandle::Event(event)));
        assert_eq!(clocks.create_event(), event);
    }
}

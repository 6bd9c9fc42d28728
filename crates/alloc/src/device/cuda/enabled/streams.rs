//! StreamTable and events: the driver's handles by our numbers.
//!
//! Stream 0 is the legacy default stream; all others are made non-blocking, as PyTorch's are, so that streams wait for
//! each other only through events. Events carry no times, which makes them cheap.
//!
//! A guest in another program makes no streams: it takes over the handles of the program's streams.

use std::ptr;

use cudarc::driver::sys;

use oomph_base::{EventId, StreamId};

/// The streams and events of one device.
#[derive(Debug)]
pub(super) struct StreamTable {
    streams: Vec<sys::CUstream>,
    events: Vec<Option<sys::CUevent>>,
    destroyed: Vec<EventId>,
    owner: StreamOwner,
}

/// Who makes and destroys the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamOwner {
    /// This device.
    Device,
    /// The program that this device is a guest in.
    Program,
}

/// Flags of `cuStreamCreate`.
pub(super) const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
/// Flags of `cuEventCreate`.
pub(super) const WITHOUT_TIMES: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

impl StreamTable {
    pub(super) fn new(owner: StreamOwner) -> StreamTable {
        StreamTable { streams: vec![ptr::null_mut()], events: Vec::new(), destroyed: Vec::new(), owner }
    }

    /// Who makes the streams.
    pub(super) fn owner(&self) -> StreamOwner {
        self.owner
    }

    /// The handle of a stream.
    #[inline]
    pub(super) fn stream(&self, stream: StreamId) -> Result<sys::CUstream, String> {
        self.streams.get(stream.index()).copied().ok_or_else(|| format!("there is no stream {stream}"))
    }

    /// The handle of an event.
    #[inline]
    pub(super) fn event(&self, event: EventId) -> Result<sys::CUevent, String> {
        self.events.get(event.index()).copied().flatten().ok_or_else(|| format!("there is no event {event}"))
    }

    /// Whether there is room for another stream.
    pub(super) fn has_room(&self) -> bool {
        self.streams.len() <= usize::from(u16::MAX)
    }

    /// Numbers a new stream; [`has_room`](StreamTable::has_room) holds.
    pub(super) fn add_stream(&mut self, handle: sys::CUstream) -> StreamId {
        self.streams.push(handle);
        StreamId((self.streams.len() - 1) as u16)
    }

    /// Numbers a new event.
    pub(super) fn add_event(&mut self, handle: sys::CUevent) -> EventId {
        if let Some(event) = self.destroyed.pop() {
            self.events[event.index()] = Some(handle);
            return event;
        }
        self.events.push(Some(handle));
        EventId((self.events.len() - 1) as u32)
    }

    /// Forgets an event that was destroyed.
    pub(super) fn remove_event(&mut self, event: EventId) {
        self.events[event.index()] = None;
        self.destroyed.push(event);
    }

    /// Gives everything back. The context is current; failures are ignored.
    pub(super) fn destroy_all(&mut self) {
        for event in self.events.drain(..).flatten() {
            // SAFETY: the event was made in this context and is destroyed only here.
            unsafe { sys::cuEventDestroy_v2(event) };
        }
        for stream in self.streams.drain(1..).filter(|_| self.owner == StreamOwner::Device) {
            // SAFETY: as for events; work on the stream is finished by the driver first.
            unsafe { sys::cuStreamDestroy_v2(stream) };
        }
    }
}

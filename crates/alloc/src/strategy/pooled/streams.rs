//! Memory that one stream used and another takes: the second is made to wait for the first.

use super::RegionTable;
use crate::device::{Device, DeviceError};
use oomph_base::{EventId, StreamId};

/// An event by which one stream waits for another. One event serves all waits, because a wait is
/// for what was recorded before it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitEvent(Option<EventId>);

impl WaitEvent {
    /// Lets later work of `stream` wait for everything that `other` has queued so far.
    pub(crate) fn wait(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        other: StreamId,
    ) -> Result<(), DeviceError> {
        self.record(device, other)?;
        self.wait_for_recorded(device, stream)
    }

    /// Notes what `stream` has queued so far.
    pub(crate) fn record(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        let event = match self.0 {
            Some(event) => event,
            None => *self.0.insert(device.event_create()?),
        };
        device.event_record(event, stream)
    }

    /// Lets later work of `stream` wait for what was noted last.
    pub(crate) fn wait_for_recorded(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        self.0.map_or(Ok(()), |event| device.stream_wait_event(stream, event))
    }

    /// Gives the event back to the device.
    pub(crate) fn destroy(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Some(event) = self.0 {
            device.event_destroy(event)?;
            self.0 = None;
        }
        Ok(())
    }
}

/// The streams that used each free piece, for policies that keep one pool for all streams.
///
/// The note of a free piece has one bit per stream that used a part of it. Streams beyond the bits
/// share them: some then wait without need, none too little.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamHandover {
    pub(crate) event: WaitEvent,
    /// Streams so far are numbered below this.
    streams: u32,
}

/// The bit of a stream in a note.
#[inline]
fn bit(stream: StreamId) -> u32 {
    1 << (u32::from(stream.0) % u32::BITS)
}

impl StreamHandover {
    /// A piece that its stream has used becomes free.
    #[inline]
    pub(crate) fn note_user(&mut self, table: &mut RegionTable, slot: u32) {
        let piece = &mut table[slot];
        piece.note = bit(piece.stream);
        self.streams = self.streams.max(u32::from(piece.stream.0) + 1);
    }

    /// Makes `stream` wait for all others that used a free piece.
    #[inline]
    pub(crate) fn make_safe(
        &mut self,
        device: &mut dyn Device,
        users: u32,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let shared_bits = self.streams.max(u32::from(stream.0) + 1) > u32::BITS;
        if users & !bit(stream) == 0 && !shared_bits {
            return Ok(());
        }
        self.wait_for(device, users, stream)
    }

    #[cold]
    fn wait_for(&mut self, device: &mut dyn Device, users: u32, stream: StreamId) -> Result<(), DeviceError> {
        let streams = (0..self.streams).map(|number| StreamId(number as u16));
        for user in streams.filter(|&user| user != stream && users & bit(user) != 0) {
            self.event.wait(device, stream, user)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::device::wrap::stand_in::StandInDevice;
    use oomph_base::Address;

    fn waits(users: &[u16], stream: u16) -> u64 {
        let (mut handover, mut table) = (StreamHandover::default(), RegionTable::default());
        let mut device = StandInDevice::new(1 << 30, 1 << 30, false);
        let mut note = 0;
        for &user in users {
            let slot = table.add_region(Address(4096), 512, StreamId(user));
            handover.note_user(&mut table, slot);
            note |= table[slot].note;
        }
        handover.make_safe(&mut device, note, StreamId(stream)).unwrap();
        let waits = device.ledger().of(CallKind::StreamWaitEvent).count;
        handover.event.destroy(&mut device).unwrap();
        assert_eq!(device.leftovers(), 0);
        waits
    }

    #[test]
    fn a_stream_waits_for_every_other_user() {
        assert_eq!(waits(&[], 0), 0);
        assert_eq!(waits(&[3], 3), 0);
        assert_eq!(waits(&[3], 1), 1);
        assert_eq!(waits(&[0, 2, 5], 2), 2);
    }

    #[test]
    fn streams_that_share_a_bit_wait_for_each_other() {
        assert_eq!(waits(&[1], 33), 1);
        assert_eq!(waits(&[33], 1), 1);
    }
}

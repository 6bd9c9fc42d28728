//! Memory that one stream used and another takes: the second is made to wait for the first.
//!
//! For policies that keep one pool for all streams. A free piece's note says which streams its parts were used on, one
//! bit a stream; streams beyond the bits share them, which makes some wait in vain but none too little.

use super::{Device, DeviceError, Ground};
use oomph_base::{EventId, StreamId};

/// Who must wait for whom.
#[derive(Clone, Debug, Default)]
pub(in crate::strategy) struct Handover {
    /// Used again and again: a wait is for what was recorded when it was asked for.
    event: Option<EventId>,
    /// Streams so far are numbered below this.
    streams: u32,
}

/// The bit of a stream in a note.
#[inline]
fn bit(stream: StreamId) -> u32 {
    1 << (u32::from(stream.0) % u32::BITS)
}

impl Handover {
    /// A piece that this stream has used becomes free.
    #[inline]
    pub(in crate::strategy) fn note_user(&mut self, ground: &mut Ground, slot: u32) {
        let piece = &mut ground[slot];
        piece.note = bit(piece.stream);
        self.streams = self.streams.max(u32::from(piece.stream.0) + 1);
    }

    /// The next piece is about to join this one.
    #[inline]
    pub(in crate::strategy) fn join_next(ground: &mut Ground, slot: u32) {
        let next = ground[slot].next;
        ground[slot].note |= ground[next].note;
    }

    /// Makes `stream` wait for all others that used a free piece.
    #[inline]
    pub(in crate::strategy) fn make_safe(
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
        for user in (0..self.streams)
            .map(|number| StreamId(number as u16))
            .filter(|&user| user != stream && users & bit(user) != 0)
        {
            let event = match self.event {
                Some(event) => event,
                None => *self.event.insert(device.event_create()?),
            };
            device.event_record(event, user)?;
            device.stream_wait_event(stream, event)?;
        }
        Ok(())
    }

    /// Gives the event back.
    pub(in crate::strategy) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Some(event) = self.event {
            device.event_destroy(event)?;
            self.event = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::caching::stand_in::StandIn;
    use oomph_base::Address;

    fn waits(users: &[u16], stream: u16) -> u64 {
        let (mut handover, mut ground) = (Handover::default(), Ground::default());
        let mut device = StandIn::new(1 << 30, 1 << 30, false);
        let mut note = 0;
        for &user in users {
            let slot = ground.add_region(Address(4096), 512, StreamId(user));
            handover.note_user(&mut ground, slot);
            note |= ground[slot].note;
        }
        handover.make_safe(&mut device, note, StreamId(stream)).unwrap();
        let waits = device.ledger().of(CallKind::StreamWaitEvent).count;
        handover.close(&mut device).unwrap();
        assert_eq!(device.leftovers(), 0);
        waits
    }

    #[test]
    fn a_stream_waits_for_every_other_user_and_never_for_itself() {
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

//! Free blocks of one size: a queue per stream, the longest free first.
//!
//! What RMM's fixed-size resource keeps, and each bin of its binning resource. A request takes from its own stream's
//! queue, else from the first other queue that has a block, after a wait for its owner. RMM also waits for owners of
//! empty queues before it asks for more memory; that is left out, as nothing is taken from them.

use super::stream_lists::StreamLists;
use crate::device::{Device, DeviceError};
use crate::strategy::pooled::{Ground, NONE};
use oomph_base::StreamId;

/// A queue of free pieces, linked through their links.
#[derive(Clone, Debug)]
struct Queue {
    first: u32,
    last: u32,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { first: NONE, last: NONE }
    }
}

impl Queue {
    #[inline]
    fn push(&mut self, ground: &mut Ground, slot: u32) {
        let last = std::mem::replace(&mut self.last, slot);
        ground[slot].links = [last, NONE];
        if last == NONE {
            self.first = slot;
        } else {
            ground[last].links[1] = slot;
        }
    }

    #[inline]
    fn remove(&mut self, ground: &mut Ground, slot: u32) {
        let [before, after] = ground[slot].links;
        if before == NONE {
            self.first = after;
        } else {
            ground[before].links[1] = after;
        }
        if after == NONE {
            self.last = before;
        } else {
            ground[after].links[0] = before;
        }
    }

    fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

/// The free blocks of one size.
#[derive(Clone, Debug)]
pub(super) struct EqualBlocks {
    /// How large each is.
    pub(super) size: u64,
    queues: StreamLists<Queue>,
}

impl EqualBlocks {
    pub(super) fn new(size: u64) -> EqualBlocks {
        EqualBlocks { size, queues: StreamLists::default() }
    }

    /// Takes a block for a stream.
    #[inline]
    pub(super) fn take(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<Option<u32>, DeviceError> {
        if let Some(own) = self.queues.get(stream).filter(|own| !own.is_empty()) {
            let slot = own.first;
            own.remove(ground, slot);
            return Ok(Some(slot));
        }
        self.take_from_another(ground, device, stream)
    }

    #[cold]
    fn take_from_another(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<Option<u32>, DeviceError> {
        self.queues.get_or_make(stream);
        for owner in self.queues.others(stream) {
            let first = self.queues.get_or_make(owner).first;
            if first != NONE {
                self.queues.wait_for(device, stream, owner)?;
                self.queues.get_or_make(owner).remove(ground, first);
                return Ok(Some(first));
            }
        }
        Ok(None)
    }

    /// Cuts a piece into blocks that a stream may have without a wait. Whether others have to wait for it depends on
    /// whether the memory is new.
    pub(super) fn adopt(&mut self, ground: &mut Ground, slot: u32, stream: StreamId, note: u32, new: bool) {
        let queue = if new { self.queues.get_or_make(stream) } else { self.queues.freed_by(stream) };
        let mut block = slot;
        loop {
            ground[block].stream = stream;
            ground[block].note = note;
            let rest = (ground[block].size > self.size).then(|| ground.cut(block, self.size));
            queue.push(ground, block);
            match rest {
                Some(rest) => block = rest,
                None => break,
            }
        }
    }

    /// A block is free: the stream that freed it is noted in it.
    #[inline]
    pub(super) fn keep(&mut self, ground: &mut Ground, slot: u32) {
        let stream = ground[slot].stream;
        self.queues.freed_by(stream).push(ground, slot);
    }

    /// A free block is no more.
    pub(super) fn forget(&mut self, ground: &mut Ground, slot: u32) {
        let stream = ground[slot].stream;
        self.queues.get_or_make(stream).remove(ground, slot);
    }

    /// Whether no stream has a free block.
    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(Queue::is_empty)
    }

    /// Gives the events back.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.queues.close(device)
    }
}

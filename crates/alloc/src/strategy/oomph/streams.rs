//! Memory that several streams use: blocks that wait for their users, and free memory that one stream takes over from
//! another.

use super::{
    Oomph,
    blocks::{NONE, State},
};
use crate::device::DeviceError;
use crate::strategy::{Context, StrategyError, StrategyEvent, deferred::Patience};
use oomph_base::{Address, StreamId};

impl Oomph {
    /// Frees a block that other streams use: it waits for them.
    #[cold]
    pub(super) fn free_later(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        self.deferred.hold(cx.device, slot, self.uses.streams(self.blocks[slot].uses))?;
        self.forget_uses(slot);
        self.blocks[slot].state = State::Pending;
        self.stats.on_free(self.blocks[slot].size);
        Ok(())
    }

    /// Drops what is known about a block's use on other streams.
    pub(super) fn forget_uses(&mut self, slot: u32) {
        let entry = std::mem::replace(&mut self.blocks[slot].uses, NONE);
        if entry != NONE {
            self.uses.remove(entry);
        }
    }

    /// Takes up the frees that streams have got past.
    #[cold]
    pub(super) fn poll_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Poll)
    }

    /// Waits for every stream that a free waits for.
    pub(super) fn await_frees(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)
    }

    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let mut released = std::mem::take(&mut self.released);
        let result = self.deferred.release(cx.device, patience, &mut released);
        for slot in released.drain(..) {
            let record = &self.blocks[slot];
            let (address, size, requested, stream) =
                (Address(record.address), record.size, record.requested, record.stream);
            cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
            self.free_block(slot);
            self.stats.on_reusable(requested, size);
        }
        self.released = released;
        Ok(result?)
    }

    /// Takes a free block of another stream that is large enough, if there is one: its first `bytes` are the stream's
    /// own from now on, on no shelf, and its next work waits for what the other stream has queued so far.
    pub(super) fn take_over(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        bytes: u64,
    ) -> Result<Option<u32>, StrategyError> {
        let others = self.homes.iter().zip(0u16..).filter(|&(_, other)| StreamId(other) != stream);
        let candidates = others.filter_map(|(home, _)| home.pages.find_any(&self.blocks, bytes));
        let Some(slot) = candidates.min_by_key(|&slot| (self.blocks[slot].size, self.blocks[slot].address)) else {
            return Ok(None);
        };
        self.wait_for(cx, stream, self.blocks[slot].stream)?;
        self.unshelve(slot);
        if self.blocks[slot].size > bytes {
            let rest = self.blocks.split(slot, bytes);
            self.shelve(rest);
        }
        self.blocks[slot].stream = stream;
        self.counters.blocks_taken_over += 1;
        Ok(Some(slot))
    }

    /// Lets later work of `stream` wait for all that `other` has to do so far. One event serves all: a wait is for what
    /// was recorded before it.
    pub(super) fn wait_for(
        &mut self,
        cx: &mut Context<'_>,
        stream: StreamId,
        other: StreamId,
    ) -> Result<(), DeviceError> {
        let event = match self.handover {
            Some(event) => event,
            None => *self.handover.insert(cx.device.event_create()?),
        };
        cx.device.event_record(event, other)?;
        cx.device.stream_wait_event(stream, event)
    }
}

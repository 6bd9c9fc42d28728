//! Giving memory back to the device.

use super::{Oomph, blocks::State};
use crate::strategy::{Context, StrategyError};

impl Oomph {
    /// Gives back every chunk that is free as a whole, whosever it is.
    pub(super) fn release_cached(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.mapping.mend(cx.device)?;
        self.return_empty_slabs();
        let stretches = self.free_stretches(&self.runs(), (0, 0));
        self.take_away(cx, &stretches)?;
        Ok(self.mapping.release_loose(cx.device)?)
    }

    /// Gives everything back, whoever holds it.
    pub(super) fn release_everything(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.await_frees(cx)?;
        self.deferred.destroy_idle_events(cx.device)?;
        if let Some(event) = self.handover {
            cx.device.event_destroy(event)?;
            self.handover = None;
        }
        if !self.mapping.is_empty() {
            cx.device.synchronize()?;
        }
        // Blocks come free first, so that what a failing call leaves behind is an ordinary cache.
        let live = self.blocks.iter().filter(|(_, record)| record.state == State::Allocated);
        let live: Vec<u32> = live.map(|(slot, _)| slot).collect();
        for slot in live {
            let (requested, size) = (self.blocks[slot].requested, self.blocks[slot].size);
            self.forget_uses(slot);
            self.free_block(slot);
            self.stats.on_free(size);
            self.stats.on_reusable(requested, size);
        }
        self.release_cached(cx)?;
        while let Some(base) = self.mapping.release_range(cx.device)? {
            if let Some(gap) = self.gaps.remove(&base) {
                self.blocks.remove(gap);
            }
        }
        Ok(())
    }
}

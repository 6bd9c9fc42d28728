//! Giving memory and addresses back: unused ranges, segments of which nothing is in use, and at the end everything.

use super::{Occupant, RANGE, Stitch, fused, tiles::Pool};
use crate::strategy::{Context, StrategyError, StrategyEvent, deferred::Patience};
use oomph_base::Address;

impl Stitch {
    /// Gives unused ranges back, least recently used first, until there are `limit` bytes of addresses: of the kinds
    /// asked for, whose memory is wholly free (`true`) or not.
    pub(super) fn collect(
        &mut self,
        cx: &mut Context<'_>,
        limit: u64,
        wholly_free: &[bool],
        spared: Option<u32>,
    ) -> Result<(), StrategyError> {
        let mut collected = 0;
        for slot in wholly_free.iter().flat_map(|&kind| self.fused.idle(kind)).collect::<Vec<u32>>() {
            if collected >= limit {
                break;
            }
            if spared != Some(slot) {
                collected += self.fused[slot].bytes;
                self.drop_range(cx, slot)?;
            }
        }
        Ok(())
    }

    /// Gives the addresses of an idle range back.
    fn drop_range(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let range = &self.fused[slot];
        cx.device.stream_synchronize(range.stream)?;
        self.leftovers.dismantle(cx.device, (range.address, range.bytes), Vec::new())?;
        for place in 0..self.fused[slot].runs.len() {
            if let Some(segment) = self.tiles.segment_mut(self.fused[slot].runs[place].segment) {
                segment.shown_in.retain(|&shown| shown != slot);
            }
        }
        self.fused.remove(slot);
        self.counts.collected += 1;
        Ok(self.leftovers.clear(cx.device)?)
    }

    /// Gives back all ranges that nobody holds and all segments of which nothing is in use.
    pub(super) fn release_unused(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.leftovers.clear(cx.device)?;
        self.collect(cx, u64::MAX, &[false, true], None)?;
        for number in self.tiles.free_segments() {
            self.release_segment(cx, number)?;
        }
        Ok(())
    }

    /// Gives back a segment that no range shows and of which nothing is in use.
    fn release_segment(&mut self, cx: &mut Context<'_>, number: u32) -> Result<(), StrategyError> {
        let Some(segment) = self.tiles.segment(number) else { return Ok(()) };
        let (address, bytes, stream) = (Address(segment.address), segment.bytes, segment.stream);
        match segment.pool {
            Pool::Small => {
                cx.device.free(address)?;
                cx.sink.event(StrategyEvent::SegmentFree { address, bytes, stream });
            }
            Pool::Large => {
                cx.device.stream_synchronize(stream)?;
                self.leftovers.dismantle(cx.device, (address, bytes), segment.chunks.clone())?;
                cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes, stream });
            }
        }
        self.tiles.remove_segment(number);
        self.stats.on_release(bytes, 1);
        Ok(self.leftovers.clear(cx.device)?)
    }

    /// Gives everything back, whoever holds it.
    pub(super) fn release_everything(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.deferred.destroy_idle_events(cx.device)?;
        cx.device.synchronize()?;
        // Blocks come free first, so that what a failing call leaves behind is an ordinary cache.
        self.uses.clear();
        let held = self.fused.iter().filter(|(_, range)| range.state != fused::State::Idle);
        let ranges: Vec<u32> = held.map(|(slot, _)| slot | RANGE).collect();
        for slot in self.tiles.in_use().into_iter().chain(ranges) {
            if let Some(Occupant { size, requested, .. }) = self.occupant(slot) {
                self.stats.on_free(size);
                self.stats.on_reusable(requested, size);
                self.set_free(slot);
            }
        }
        self.release_unused(cx)
    }
}

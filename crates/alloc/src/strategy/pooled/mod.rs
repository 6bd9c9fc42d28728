//! What all pooling strategies share: a shell around a [`Policy`].
//!
//! A pooling strategy takes regions from the device, cuts them into pieces and keeps the free ones. The shell does
//! what does not depend on which: handles, streams that still use a freed piece, growth and what is tried when the
//! device refuses, the books, the events, trim and close. The policy says how large a block is, which free piece serves,
//! how free pieces are joined and kept, and how much to ask of the device. Its calls are compiled into the shell.
//!
//! When the device refuses, frees that wait for streams are waited for, regions that are free as a whole go back, and
//! the request is tried once more. Some of the allocators modelled here never give memory back; without it a test of
//! them would end where the device is full of memory that nobody uses.

mod ground;
mod handover;
#[cfg(test)]
mod trial;

pub(super) use ground::{Ground, NONE, Piece, Region, State};
pub(super) use handover::Handover;
#[cfg(test)]
pub(super) use trial::Trial;

use super::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Refusal, Request, Shortage, Stats,
    Strategy, StrategyError, StrategyEvent,
    deferred::{DeferredFrees, Patience},
    stream_uses::StreamUses,
};
use crate::device::{Capabilities, Device, DeviceError};
use oomph_base::{Address, StreamId, ThreadId};

/// Requests from here on are refused: no device comes near.
pub(super) const ABSURD: u64 = 1 << 46;

/// A request as policies see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// The size of the block, as [`Policy::block_size`] gave it.
    pub(super) size: u64,
    pub(super) stream: StreamId,
    pub(super) thread: ThreadId,
}

/// What a policy has to say to the wish for more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// Ask the device for a region of this size. Where it came and does not serve the need, growth is asked again.
    Ask(u64),
    /// There is nothing (else) to ask for.
    End,
    /// It would go beyond the policy's own limit.
    BeyondLimit,
}

/// Where a block goes that its owner has done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// Among the free pieces.
    Pool,
    /// Back to the device, with its whole region: it must be the only piece there.
    Device,
}

/// How a pool keeps its free memory.
///
/// Free pieces are the policy's between [`keep`](Policy::keep) and [`take`](Policy::take) or
/// [`forget`](Policy::forget). A call that returns an error must have changed nothing that matters: it is made again.
pub(super) trait Policy: Clone + Send + 'static {
    /// Whether a piece that comes back is from then on its freer's, whatever stream it was taken for.
    const GOES_TO_ITS_FREER: bool = false;

    /// How large a block for this request is; `None` for what could never be served.
    fn block_size(&self, bytes: u64) -> Option<u64>;

    /// Nothing is held, and memory is about to be taken: what the policy has to ask the device about itself first.
    fn begin(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let _ = device;
        Ok(())
    }

    /// Finds a free piece for the need, cuts it to size where the policy cuts, and no longer keeps it. A piece that was
    /// used on another stream is the policy's to make safe ([`Device::stream_wait_event`]), or to leave alone.
    fn take(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        need: &Need,
    ) -> Result<Option<(u32, Outcome)>, DeviceError>;

    /// A caller is about to give a piece back: what has to be done on the device first. The piece may have to wait for
    /// other streams before it is [`keep`](Policy::keep)'s.
    fn freeing(
        &mut self,
        ground: &Ground,
        device: &mut dyn Device,
        slot: u32,
        caller: Caller,
    ) -> Result<(), DeviceError> {
        let _ = (ground, device, slot, caller);
        Ok(())
    }

    /// A piece has come back and waits for nobody, and nothing has changed yet: where it goes, and what the device must
    /// be asked before.
    #[inline]
    fn destination(
        &mut self,
        ground: &mut Ground,
        device: &mut dyn Device,
        slot: u32,
    ) -> Result<Destination, DeviceError> {
        let _ = (ground, device, slot);
        Ok(Destination::Pool)
    }

    /// A piece is free: joins it with its neighbours where the policy joins, and keeps it.
    fn keep(&mut self, ground: &mut Ground, slot: u32);

    /// A new region came, as one free piece, because of this need: cuts it where the policy cuts early, and keeps it.
    fn welcome(&mut self, ground: &mut Ground, slot: u32, need: &Need) {
        let _ = need;
        self.keep(ground, slot);
    }

    /// A free piece is about to go back to the device with its region.
    fn forget(&mut self, ground: &mut Ground, slot: u32);

    /// Memory was refused, and the request will be tried once more: brings together what the policy keeps apart.
    fn gather(&mut self, ground: &mut Ground, device: &mut dyn Device) -> Result<(), DeviceError> {
        let _ = (ground, device);
        Ok(())
    }

    /// Whether regions that are free as a whole, `idle` bytes together, go back to the device before that.
    fn gives_back(&self, need: &Need, stats: &Stats, idle: u64) -> bool {
        let _ = (need, stats, idle);
        true
    }

    /// Whether enough of them has gone back: they go in address order, until it has.
    fn has_room(&self, need: &Need, stats: &Stats, refused_by: Refusal) -> bool {
        let _ = (need, stats, refused_by);
        false
    }

    /// How much to ask of the device; `attempt` counts the refusals so far, and `stats` says what is held.
    fn growth(&mut self, need: &Need, stats: &Stats, attempt: u32) -> Growth;

    /// The largest block that could be served to this stream without the device.
    fn largest_free(&self, ground: &Ground, stream: StreamId) -> u64;

    /// Which part of the strategy a region belongs to, for people.
    fn pool_name(&self, region: &Region) -> &'static str;

    /// Counters of the policy's own.
    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Gives back what the policy itself took from the device (events). Called when all regions are gone.
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let _ = device;
        Ok(())
    }

    /// The policy as it was when it was made.
    fn renewed(&self) -> Self;
}

/// A pooling strategy.
#[derive(Clone, Debug)]
pub(super) struct Pooled<P> {
    policy: P,
    ground: Ground,
    uses: StreamUses,
    /// Freed pieces whose other streams are not through yet.
    deferred: DeferredFrees<u32>,
    /// Pieces that no longer wait, and are still to be taken up.
    passed: Vec<u32>,
    /// Streams below this are known to exist: a device numbers them in a row.
    streams: u32,
    stats: Stats,
}

impl<P: Policy> Pooled<P> {
    pub(super) fn new(policy: P) -> Pooled<P> {
        Pooled {
            policy,
            ground: Ground::default(),
            uses: StreamUses::default(),
            deferred: DeferredFrees::default(),
            passed: Vec::new(),
            streams: 1,
            stats: Stats::default(),
        }
    }

    /// Lets nobody in on a stream that does not exist.
    #[inline]
    fn check(&mut self, cx: &Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
        if u32::from(stream.0) < self.streams { Ok(()) } else { self.meet(cx, stream) }
    }

    #[cold]
    fn meet(&mut self, cx: &Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
        cx.expect_stream(stream)?;
        self.streams = u32::from(stream.0) + 1;
        Ok(())
    }

    #[inline]
    fn hand_out(&mut self, slot: u32, request: &Request, outcome: Outcome) -> Attempt {
        let block = self.ground.occupy(slot, request.bytes, request.stream);
        self.stats.on_alloc(request.bytes, block.size);
        Attempt::Served(block, outcome)
    }

    /// A request that no free piece serves.
    #[cold]
    fn alloc_from_device(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        need: &Need,
    ) -> Result<Attempt, StrategyError> {
        let refused_by = match self.grow(cx, need)? {
            Ok(slot) => return Ok(self.hand_out(slot, request, Outcome::NewSegment)),
            Err(shortage) => shortage.refused_by,
        };
        cx.sink.event(StrategyEvent::Retry { rounded: need.size });
        self.stats.retries += 1;
        self.complete_frees(cx, Patience::Wait)?;
        self.policy.gather(&mut self.ground, cx.device)?;
        let free = self.free_regions();
        let idle = free.iter().map(|&region| self.ground.region(region).bytes).sum();
        if self.policy.gives_back(need, &self.stats, idle) {
            for region in free {
                if self.policy.has_room(need, &self.stats, refused_by) {
                    break;
                }
                self.release(cx, region)?;
            }
        }
        // Frees that were waited for may have made room in regions that stay.
        if let Some((slot, _)) = self.policy.take(&mut self.ground, cx.device, need)? {
            return Ok(self.hand_out(slot, request, Outcome::ReleaseAndRetry));
        }
        match self.grow(cx, need)? {
            Ok(slot) => Ok(self.hand_out(slot, request, Outcome::ReleaseAndRetry)),
            Err(shortage) => {
                self.stats.ooms += 1;
                let (rounded, stream) = (need.size, need.stream);
                cx.sink.event(StrategyEvent::OutOfMemory { rounded, stream, device_free: None });
                Ok(Attempt::OutOfMemory(shortage))
            }
        }
    }

    /// Takes a region from the device, and from it the piece that serves the need.
    fn grow(&mut self, cx: &mut Context<'_>, need: &Need) -> Result<Result<u32, Shortage>, StrategyError> {
        let mut shortage =
            Shortage { rounded: need.size, asked: need.size, refused_by: Refusal::Device, device_free: None };
        if self.stats.segments == 0 {
            self.policy.begin(cx.device)?;
        }
        let mut refusals = 0;
        loop {
            let bytes = match self.policy.growth(need, &self.stats, refusals) {
                Growth::Ask(bytes) => bytes,
                Growth::End => break,
                Growth::BeyondLimit => {
                    shortage.refused_by = Refusal::Limit;
                    break;
                }
            };
            shortage.asked = bytes;
            match cx.device.alloc(bytes) {
                Ok(address) => {
                    cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream: need.stream });
                    self.stats.on_reserve(bytes, 1);
                    let slot = self.ground.add_region(address, bytes, need.stream);
                    self.policy.welcome(&mut self.ground, slot, need);
                    if let Some((slot, _)) = self.policy.take(&mut self.ground, cx.device, need)? {
                        return Ok(Ok(slot));
                    }
                    refusals = 0;
                }
                Err(error) if error.is_out_of_memory() => refusals += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Err(shortage))
    }

    /// Takes up the frees that streams have got past. What a driver error keeps from being taken up is next time's first.
    #[cold]
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let looked = self.deferred.release(cx.device, patience, &mut self.passed);
        let mut done = 0;
        let taken_up = loop {
            let Some(&slot) = self.passed.get(done) else { break Ok(()) };
            if let Err(error) = self.take_up(cx, slot) {
                break Err(error);
            }
            done += 1;
        };
        self.passed.drain(..done);
        taken_up.and(looked.map_err(StrategyError::from))
    }

    /// A piece no longer waits for streams.
    fn take_up(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let Piece { address, size, requested, stream, region, .. } = self.ground[slot];
        let completed = StrategyEvent::FreeCompleted { address: Address(address), requested, stream };
        match self.policy.destination(&mut self.ground, cx.device, slot)? {
            Destination::Pool => {
                cx.sink.event(completed);
                self.stats.on_reusable(requested, size);
                self.ground.vacate_tenant(slot);
                self.policy.keep(&mut self.ground, slot);
            }
            Destination::Device => {
                cx.device.free(Address(self.ground.region(region).address))?;
                cx.sink.event(completed);
                self.forget_region(cx, region);
            }
        }
        Ok(())
    }

    /// Frees a piece that other streams use: it waits for them.
    #[cold]
    fn free_later(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        let Piece { uses, size, .. } = self.ground[slot];
        self.deferred.hold(cx.device, slot, self.uses.streams(uses))?;
        self.forget_uses(slot);
        self.ground[slot].state = State::Pending;
        self.stats.on_free(size);
        Ok(())
    }

    fn forget_uses(&mut self, slot: u32) {
        let entry = std::mem::replace(&mut self.ground[slot].uses, NONE);
        if entry != NONE {
            self.uses.remove(entry);
        }
    }

    /// Every region without a live or waiting piece, in address order.
    fn free_regions(&self) -> Vec<u32> {
        let mut free: Vec<u32> =
            self.ground.regions().filter(|&region| self.ground.region(region).occupied == 0).collect();
        free.sort_unstable_by_key(|&region| self.ground.region(region).address);
        free
    }

    /// Gives a region back, with all that is in it.
    fn release(&mut self, cx: &mut Context<'_>, region: u32) -> Result<(), StrategyError> {
        cx.device.free(Address(self.ground.region(region).address))?;
        self.forget_region(cx, region);
        Ok(())
    }

    /// A region has gone back.
    fn forget_region(&mut self, cx: &mut Context<'_>, number: u32) {
        let Region { address, bytes, stream, .. } = *self.ground.region(number);
        cx.sink.event(StrategyEvent::SegmentFree { address: Address(address), bytes, stream });
        let pieces: Vec<u32> = self.ground.pieces_of(number).collect();
        for slot in pieces {
            let Piece { state, size, requested, .. } = self.ground[slot];
            if state == State::Free {
                self.policy.forget(&mut self.ground, slot);
                continue;
            }
            if state == State::Allocated {
                self.forget_uses(slot);
                self.stats.on_free(size);
            }
            self.ground.vacate_tenant(slot);
            self.stats.on_reusable(requested, size);
        }
        self.ground.remove_region(number);
        self.stats.on_release(bytes, 1);
    }
}

impl<P: Policy> Strategy for Pooled<P> {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        let Some(size) = self.policy.block_size(request.bytes) else {
            let (rounded, asked) = (request.bytes, request.bytes);
            let shortage = Shortage { rounded, asked, refused_by: Refusal::Size, device_free: None };
            return Ok(Attempt::OutOfMemory(shortage));
        };
        self.check(cx, request.stream)?;
        if !self.deferred.is_empty() || !self.passed.is_empty() {
            self.complete_frees(cx, Patience::Poll)?;
        }
        let need = Need { size, stream: request.stream, thread: request.thread };
        match self.policy.take(&mut self.ground, cx.device, &need)? {
            Some((slot, outcome)) => Ok(self.hand_out(slot, request, outcome)),
            None => self.alloc_from_device(cx, request, &need),
        }
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let &Piece { size, requested, uses, .. } = self.ground.live(&block)?;
        self.check(cx, caller.stream)?;
        self.policy.freeing(&self.ground, cx.device, block.slot, caller)?;
        if P::GOES_TO_ITS_FREER {
            self.ground[block.slot].stream = caller.stream;
        }
        if uses != NONE {
            self.free_later(cx, block.slot)?;
            return Ok(Freed::Later);
        }
        match self.policy.destination(&mut self.ground, cx.device, block.slot)? {
            Destination::Pool => {
                self.stats.on_free(size);
                self.stats.on_reusable(requested, size);
                self.ground.vacate_tenant(block.slot);
                self.policy.keep(&mut self.ground, block.slot);
            }
            Destination::Device => self.release(cx, self.ground[block.slot].region)?,
        }
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let piece = self.ground.live(block)?;
        if piece.stream == stream {
            return Ok(());
        }
        if piece.uses == NONE {
            self.ground[block.slot].uses = self.uses.add();
        }
        self.uses.note(self.ground[block.slot].uses, stream, false);
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.free_regions().into_iter().try_for_each(|region| self.release(cx, region))
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.ground.regions().try_for_each(|region| self.release(cx, region))?;
        self.deferred.destroy_idle_events(cx.device)?;
        self.policy.close(cx.device)?;
        *self = Pooled::new(self.policy.renewed());
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        Some(self.policy.largest_free(&self.ground, stream))
    }

    fn layout(&self) -> Option<Layout> {
        Some(self.ground.layout(|region| self.policy.pool_name(region)))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.policy.details()
    }

    fn requires(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

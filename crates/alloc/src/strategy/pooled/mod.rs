//! The common part of all pooling strategies: [`PoolStrategy`], which runs a [`PoolPolicy`].
//!
//! A pooling strategy takes regions from the device, cuts them into pieces and keeps the free ones.
//! `PoolStrategy` does what is the same for all: handles, streams that still use a freed piece,
//! growth, the retry when the device refuses, statistics, events, trim and close. The policy
//! decides how large a block is, which free piece serves, how free pieces are joined and kept, and
//! how much to ask of the device. Its calls are inlined.
//!
//! When the device refuses, the strategy waits for deferred frees, gives back the regions that are
//! wholly free where the policy allows it, and tries the request once more.

#[cfg(test)]
mod bench;
mod free_lists;
mod pieces;
mod streams;

#[cfg(test)]
pub(crate) use bench::PoolBench;
pub(crate) use free_lists::{FreeByAddress, FreeLists, PerStream, SizeClasses};
pub(crate) use pieces::{DeviceRegion, MemoryPiece, NONE, PieceState, PieceTable, RegionTable};
pub(crate) use streams::{StreamHandover, WaitEvent};

use super::{
    Attempt, Block, Caller, Context, Freed, Layout, Outcome, Refusal, Request, Shortage, Stats, Strategy,
    StrategyError, StrategyEvent, deferred::Patience, plain_state, unless_out_of_memory,
};
use crate::device::{Device, DeviceError};
use oomph_base::{Address, StreamId, ThreadId};

/// Requests of this size and above are refused: no device has so much memory.
pub(crate) const REQUEST_LIMIT: u64 = 1 << 46;

/// A request as policies see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolRequest {
    /// The size of the block, as [`PoolPolicy::block_size`] gave it.
    pub(crate) size: u64,
    pub(crate) stream: StreamId,
    pub(crate) thread: ThreadId,
}

/// A policy's answer when no free piece serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolGrowth {
    /// Ask the device for a region of this size. If the new region does not serve the request, the
    /// policy is asked again.
    Ask(u64),
    /// Nothing more to ask for.
    End,
    /// Growth would exceed the policy's own limit.
    BeyondLimit,
}

/// A free piece that serves a request, and how it was found; `None` if there is none.
pub(crate) type TakenPiece = Result<Option<(u32, Outcome)>, DeviceError>;

/// How a pool keeps its free memory.
///
/// A free piece belongs to the policy from [`keep`](PoolPolicy::keep) until
/// [`take`](PoolPolicy::take) or [`forget`](PoolPolicy::forget). A call that fails must leave the
/// policy able to repeat it.
pub(crate) trait PoolPolicy: Clone + Send + 'static {
    /// Whether a freed piece belongs to the stream that frees it, not to the one it was taken for.
    const GOES_TO_FREEING_STREAM: bool = false;

    /// How large a block for this request is; `None` for sizes that are never served.
    fn block_size(&self, bytes: u64) -> Option<u64>;

    /// Called before the first region is taken, for questions to the device.
    fn begin(&mut self, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Finds a free piece for the request, cuts it to size where the policy cuts, and no longer
    /// keeps it. The policy must make a piece safe that another stream used ([`WaitEvent`]), or not
    /// take it.
    fn take(&mut self, table: &mut RegionTable, device: &mut dyn Device, request: &PoolRequest) -> TakenPiece;

    /// Called before a piece is freed, for what must be done on the device first. The piece may
    /// still have to wait for other streams.
    fn before_free(
        &mut self,
        _table: &RegionTable,
        _device: &mut dyn Device,
        _slot: u32,
        _caller: Caller,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether a piece that is freed and waits for no stream goes back to the device with its region,
    /// of which it must then be the only piece. Nothing has changed yet.
    #[inline]
    fn returns_to_device(
        &mut self,
        _table: &mut RegionTable,
        _device: &mut dyn Device,
        _slot: u32,
    ) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Keeps a free piece, joined with its neighbours where the policy joins.
    fn keep(&mut self, table: &mut RegionTable, slot: u32);

    /// Keeps a new region, one free piece, that was taken for this request.
    fn add_region(&mut self, table: &mut RegionTable, slot: u32, _request: &PoolRequest) {
        self.keep(table, slot);
    }

    /// Forgets a free piece that goes back to the device with its region.
    fn forget(&mut self, table: &mut RegionTable, slot: u32);

    /// Called before a refused request is retried: brings together free memory that the policy
    /// keeps apart.
    fn consolidate(&mut self, _table: &mut RegionTable, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether a trim gives wholly free regions back to the device. Some of the allocators modelled here keep their memory
    /// until the end.
    fn trims(&self) -> bool {
        true
    }

    /// Called after a trim.
    fn trimmed(&mut self, _stats: &Stats) {}

    /// Whether wholly free regions, `_idle` bytes in sum, go back to the device before the retry.
    fn releases_regions(&self, _request: &PoolRequest, _stats: &Stats, _idle: u64) -> bool {
        self.trims()
    }

    /// Whether enough of them went back. They go in address order.
    fn has_released_enough(&self, _request: &PoolRequest, _stats: &Stats, _refused_by: Refusal) -> bool {
        false
    }

    /// How much to ask of the device. `attempt` counts the refusals so far.
    fn growth(&mut self, request: &PoolRequest, stats: &Stats, attempt: u32) -> PoolGrowth;

    /// The largest block that this stream could get without the device.
    fn largest_free(&self, table: &RegionTable, stream: StreamId) -> u64;

    /// The part of the strategy that a region belongs to, if there are several.
    fn pool_name(&self, _region: &DeviceRegion) -> Option<&'static str> {
        None
    }

    /// The policy's own counters.
    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Gives back what the policy itself took from the device (events). All regions have gone.
    fn close(&mut self, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// A pooling strategy.
#[derive(Clone, Debug)]
pub(crate) struct PoolStrategy<P> {
    name: &'static str,
    policy: P,
    /// The policy in its initial state.
    initial: P,
    table: RegionTable,
    /// Pieces whose streams are done. After a driver error they stay here for the next call.
    passed: Vec<u32>,
    /// Streams below this are known to exist: a device numbers them consecutively.
    streams: u32,
    stats: Stats,
}

impl<P: PoolPolicy> PoolStrategy<P> {
    /// `name` is that of the strategy.
    pub(crate) fn new(name: &'static str, policy: P) -> PoolStrategy<P> {
        PoolStrategy {
            name,
            initial: policy.clone(),
            policy,
            table: RegionTable::default(),
            passed: Vec::new(),
            streams: 1,
            stats: Stats::default(),
        }
    }

    /// Refuses a stream that does not exist.
    #[inline]
    fn check_stream(&mut self, cx: &Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
        if u32::from(stream.0) < self.streams { Ok(()) } else { self.learn_stream(cx, stream) }
    }

    #[cold]
    fn learn_stream(&mut self, cx: &Context<'_>, stream: StreamId) -> Result<(), StrategyError> {
        cx.expect_stream(stream)?;
        self.streams = u32::from(stream.0) + 1;
        Ok(())
    }

    #[inline]
    fn hand_out(&mut self, slot: u32, request: &Request, outcome: Outcome) -> Attempt {
        let block = self.table.hand_out(slot, request.bytes, request.stream);
        self.stats.on_alloc(request.bytes, block.size);
        Attempt::Served(block, outcome)
    }

    /// Serves a request for which there is no free piece.
    #[cold]
    fn alloc_from_device(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        need: &PoolRequest,
    ) -> Result<Attempt, StrategyError> {
        let refused_by = match self.grow(cx, need)? {
            Ok(slot) => return Ok(self.hand_out(slot, request, Outcome::NewSegment)),
            Err(shortage) => shortage.refused_by,
        };
        cx.sink.event(StrategyEvent::Retry { rounded: need.size });
        self.stats.retries += 1;
        self.complete_frees(cx, Patience::Wait)?;
        self.policy.consolidate(&mut self.table, cx.device)?;
        let free = self.free_regions();
        let idle = free.iter().map(|&region| self.table.region(region).bytes).sum();
        if self.policy.releases_regions(need, &self.stats, idle) {
            for region in free {
                if self.policy.has_released_enough(need, &self.stats, refused_by) {
                    break;
                }
                self.release(cx, region)?;
            }
        }
        // The completed frees may have left a free piece in a region that stays.
        if let Some((slot, _)) = self.policy.take(&mut self.table, cx.device, need)? {
            return Ok(self.hand_out(slot, request, Outcome::ReleaseAndRetry));
        }
        match self.grow(cx, need)? {
            Ok(slot) => Ok(self.hand_out(slot, request, Outcome::ReleaseAndRetry)),
            Err(shortage) => Ok(cx.out_of_memory(&mut self.stats, need.stream, shortage)),
        }
    }

    /// Takes regions from the device until a piece of them serves the request.
    fn grow(&mut self, cx: &mut Context<'_>, need: &PoolRequest) -> Result<Result<u32, Shortage>, StrategyError> {
        let mut shortage = Shortage::of_device(need.size);
        if self.stats.segments == 0 {
            self.policy.begin(cx.device)?;
        }
        let mut refusals = 0;
        loop {
            let bytes = match self.policy.growth(need, &self.stats, refusals) {
                PoolGrowth::Ask(bytes) => bytes,
                PoolGrowth::End => break,
                PoolGrowth::BeyondLimit => {
                    shortage.refused_by = Refusal::Limit;
                    break;
                }
            };
            shortage.asked = bytes;
            let Some(address) = unless_out_of_memory(cx.device.alloc(bytes))? else {
                refusals += 1;
                continue;
            };
            cx.sink.event(StrategyEvent::SegmentAlloc { address, bytes, stream: need.stream });
            self.stats.on_reserve(bytes, 1);
            let slot = self.table.add_region(address, bytes, need.stream);
            self.policy.add_region(&mut self.table, slot, need);
            if let Some((slot, _)) = self.policy.take(&mut self.table, cx.device, need)? {
                return Ok(Ok(slot));
            }
            refusals = 0;
        }
        Ok(Err(shortage))
    }

    /// Completes the frees whose streams are done.
    #[cold]
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), StrategyError> {
        let (passed, polled) = self.table.completed(cx.device, patience);
        self.passed.extend(passed);
        let mut done = 0;
        let completed = loop {
            let Some(&slot) = self.passed.get(done) else { break Ok(()) };
            if let Err(error) = self.complete_free(cx, slot) {
                break Err(error);
            }
            done += 1;
        };
        self.passed.drain(..done);
        completed.and(polled.map_err(StrategyError::from))
    }

    fn complete_free(&mut self, cx: &mut Context<'_>, slot: u32) -> Result<(), StrategyError> {
        if self.policy.returns_to_device(&mut self.table, cx.device, slot)? {
            let MemoryPiece { address, requested, stream, region, .. } = self.table[slot];
            cx.device.free(Address(self.table.region(region).address))?;
            cx.sink.event(StrategyEvent::FreeCompleted { address: Address(address), requested, stream });
            self.forget_region(cx, region);
        } else {
            self.table.report_completed(cx, &mut self.stats, slot);
            self.table.vacate(slot);
            self.policy.keep(&mut self.table, slot);
        }
        Ok(())
    }

    /// Every region without an allocated or pending piece, in address order.
    fn free_regions(&self) -> Vec<u32> {
        let mut free = self.table.regions();
        free.retain(|&region| self.table.region(region).occupied == 0);
        free.sort_unstable_by_key(|&region| self.table.region(region).address);
        free
    }

    /// Gives a region back to the device, whatever is in it.
    fn release(&mut self, cx: &mut Context<'_>, region: u32) -> Result<(), StrategyError> {
        cx.device.free(Address(self.table.region(region).address))?;
        self.forget_region(cx, region);
        Ok(())
    }

    /// Removes a region that has gone back to the device.
    fn forget_region(&mut self, cx: &mut Context<'_>, number: u32) {
        let DeviceRegion { address, bytes, stream, .. } = *self.table.region(number);
        cx.sink.event(StrategyEvent::SegmentFree { address: Address(address), bytes, stream });
        let pieces: Vec<u32> = self.table.pieces_of(number).collect();
        for slot in pieces {
            let MemoryPiece { state, size, requested, .. } = self.table[slot];
            if state == PieceState::Free {
                self.policy.forget(&mut self.table, slot);
                continue;
            }
            if state == PieceState::Allocated {
                self.table.forget_uses(slot);
                self.stats.on_free(size);
            }
            self.table.vacate(slot);
            self.stats.on_reusable(requested, size);
        }
        self.table.remove_region(number);
        self.stats.on_release(bytes, 1);
    }
}

impl<P: PoolPolicy> Strategy for PoolStrategy<P> {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        let Some(size) = self.policy.block_size(request.bytes) else {
            return Ok(Attempt::OutOfMemory(Shortage::of_size(request.bytes)));
        };
        self.check_stream(cx, request.stream)?;
        if !self.table.deferred.is_empty() || !self.passed.is_empty() {
            self.complete_frees(cx, Patience::Poll)?;
        }
        let need = PoolRequest { size, stream: request.stream, thread: request.thread };
        match self.policy.take(&mut self.table, cx.device, &need)? {
            Some((slot, outcome)) => Ok(self.hand_out(slot, request, outcome)),
            None => self.alloc_from_device(cx, request, &need),
        }
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let piece = self.table.live(&block)?;
        let (size, requested, shared) = (piece.size, piece.requested, piece.is_shared());
        self.check_stream(cx, caller.stream)?;
        self.policy.before_free(&self.table, cx.device, block.slot, caller)?;
        if P::GOES_TO_FREEING_STREAM {
            self.table[block.slot].stream = caller.stream;
        }
        if shared {
            self.table.free_later(cx.device, block.slot)?;
            self.stats.on_free(size);
            return Ok(Freed::Later);
        }
        if self.policy.returns_to_device(&mut self.table, cx.device, block.slot)? {
            self.release(cx, self.table[block.slot].region)?;
        } else {
            self.stats.on_free(size);
            self.stats.on_reusable(requested, size);
            self.table.vacate(block.slot);
            self.policy.keep(&mut self.table, block.slot);
        }
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.table.note_use(block, stream, false)
    }

    plain_state!();

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        if self.policy.trims() {
            self.free_regions().into_iter().try_for_each(|region| self.release(cx, region))?;
            self.policy.trimmed(&self.stats);
        }
        Ok(())
    }

    fn trims(&self) -> bool {
        self.policy.trims()
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        self.table.regions().into_iter().try_for_each(|region| self.release(cx, region))?;
        self.table.deferred.destroy_idle_events(cx.device)?;
        self.policy.close(cx.device)?;
        *self = PoolStrategy::new(self.name, self.initial.clone());
        Ok(())
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        Some(self.policy.largest_free(&self.table, stream))
    }

    fn layout(&self) -> Option<Layout> {
        Some(self.table.layout(|region| self.policy.pool_name(region).unwrap_or(self.name)))
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.policy.details()
    }
}

//! `async`: the driver's own stream-ordered allocator, `cudaMallocAsync`.
//!
//! Every block is one `cuMemAllocFromPoolAsync` and one `cuMemFreeAsync`; the driver decides what
//! is cached, split and reused. The strategy has its own pool, which may hold what was free on the
//! device when the pool was created, so that a cap on the device is a cap on the pool. When memory
//! runs out, it waits for the device, empties the pool and tries once more, as PyTorch does since
//! 2.14; earlier releases fail at once.
//!
//! A block that other streams use is given back when their events are done, which is checked at the
//! next request. PyTorch makes a stream of its own wait for those events instead. In both, the
//! block comes back when its last user is done, and no stream is stalled for it.
//!
//! A block is the request rounded up to [`GRANULE`]. Only the driver knows what the pool has
//! reserved. It is asked when more is in use than it had reserved at the last look, at every
//! [`LOOK_EVERY`]-th request, at steps, retries and trims. Between two looks `reserved` may be out
//! of date; its peak is corrected at the next look, because the driver keeps the peak too. The pool
//! counts as one segment and has no address.

use std::collections::VecDeque;

use super::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Parameter, Refusal,
    Request, Setup, Shortage, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent,
    deferred::Patience,
    direct::GRANULE,
    parameters,
    pooled::{MemoryPiece, NONE, PieceState, PieceTable},
    unless_out_of_memory,
};
use crate::device::{Capabilities, Device, DeviceError, PoolId, PoolSettings, PoolUsage};
use oomph_base::{Address, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: NAME,
    summary: "the driver's stream-ordered pool (cudaMallocAsync)",
    origin: "CUDA's cuMemAllocFromPoolAsync; PyTorch's backend:cudaMallocAsync, RMM's cuda_async_memory_resource",
    differs: &[
        "gives a block back when the events of its other streams are done, seen at the next request; PyTorch makes a stream of its own wait for them",
        "waits for the device, empties the pool and tries again when memory runs out, as PyTorch does since 2.14; earlier releases fail at once",
    ],
    parameters: &[
        Parameter::text(
            "release_threshold",
            "an amount of memory, or max",
            "max",
            "free memory above this goes back to the device at every synchronization",
        ),
        Parameter::text(
            "reuse_follow_event_dependencies",
            "True or False",
            "True",
            "reuse memory that another stream freed, if an event orders the two",
        ),
        Parameter::text(
            "reuse_allow_opportunistic",
            "True or False",
            "True",
            "reuse memory that another stream freed, once the free has happened on the device",
        ),
        Parameter::text(
            "reuse_allow_internal_dependencies",
            "True or False",
            "True",
            "let a stream wait for another to reuse memory that it freed",
        ),
    ],
    variants: &[
        "reuse_allow_internal_dependencies:False",
        "reuse_follow_event_dependencies:False,reuse_allow_opportunistic:False,reuse_allow_internal_dependencies:False",
    ],
    build,
};

const NAME: &str = "async";

/// After this many requests the driver is asked what the pool holds, even if nothing suggests
/// growth.
pub const LOOK_EVERY: u64 = 64;

/// The counter among the [details](Strategy::details) with the most that was in use of the pool, as
/// the driver counts it.
pub const USED_HIGH: &str = "pool_used_high_bytes";

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    Ok(Box::new(AsyncPool::new(settings(parameters)?)))
}

fn settings(parameters: &str) -> Result<PoolSettings, SpecError> {
    let mut settings = PoolSettings { release_threshold: u64::MAX, ..PoolSettings::DRIVER_DEFAULT };
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            "release_threshold" if setting.value == "max" => settings.release_threshold = u64::MAX,
            "release_threshold" => settings.release_threshold = setting.bytes()?,
            "reuse_follow_event_dependencies" => settings.follow_event_dependencies = setting.truth()?,
            "reuse_allow_opportunistic" => settings.allow_opportunistic = setting.truth()?,
            _ => settings.allow_internal_dependencies = setting.truth()?,
        }
        Ok(())
    })?;
    Ok(settings)
}

/// The strategy that leaves everything to the driver.
#[derive(Clone, Debug)]
pub struct AsyncPool {
    settings: PoolSettings,
    pool: Option<OpenedPool>,
    blocks: PieceTable,
    /// Blocks to give back to the pool when the driver accepts them. Those that a caller held are
    /// pending; others never got into the statistics.
    departing: VecDeque<u32>,
    since_look: u64,
    looks: u64,
    used_high: u64,
    stats: Stats,
}

/// The pool, once it exists.
#[derive(Clone, Copy, Debug)]
struct OpenedPool {
    id: PoolId,
    configured: bool,
    /// The most that it may hold.
    maximum: u64,
}

impl AsyncPool {
    fn new(settings: PoolSettings) -> AsyncPool {
        AsyncPool {
            settings,
            pool: None,
            blocks: PieceTable::default(),
            departing: VecDeque::new(),
            since_look: 0,
            looks: 0,
            used_high: 0,
            stats: Stats::default(),
        }
    }

    /// The pool, created and configured at the first call.
    fn open_pool(&mut self, device: &mut dyn Device) -> Result<OpenedPool, DeviceError> {
        let mut pool = match self.pool {
            Some(pool) if pool.configured => return Ok(pool),
            Some(pool) => pool,
            None => {
                let maximum = device.memory_info()?.free;
                OpenedPool {
                    id: device.stream_ordered_pools()?.pool_create(Some(maximum))?,
                    configured: false,
                    maximum,
                }
            }
        };
        self.pool = Some(pool);
        device.stream_ordered_pools()?.pool_configure(pool.id, self.settings)?;
        pool.configured = true;
        self.pool = Some(pool);
        Ok(pool)
    }

    /// Asks the driver what the pool holds, and updates the statistics.
    fn look(&mut self, cx: &mut Context<'_>, pool: PoolId) -> Result<(), DeviceError> {
        let PoolUsage { reserved, reserved_high, used_high, .. } =
            cx.device.stream_ordered_pools()?.pool_usage(pool)?;
        self.since_look = 0;
        self.looks += 1;
        self.used_high = self.used_high.max(used_high);
        self.book_reserved(cx, reserved);
        self.stats.peak.reserved = self.stats.peak.reserved.max(reserved_high);
        Ok(())
    }

    fn book_reserved(&mut self, cx: &mut Context<'_>, reserved: u64) {
        let (address, stream) = (Address::NULL, StreamId::DEFAULT);
        let before = self.stats.current.reserved;
        if reserved > before {
            let bytes = reserved - before;
            cx.sink.event(StrategyEvent::SegmentMap { address, bytes, stream });
            self.stats.on_reserve(bytes, u64::from(before == 0));
        } else if reserved < before {
            let bytes = before - reserved;
            cx.sink.event(StrategyEvent::SegmentUnmap { address, bytes, stream });
            self.stats.on_release(bytes, u64::from(reserved == 0));
        }
    }

    /// Gives back the blocks whose streams are done.
    fn complete_frees(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), DeviceError> {
        let (completed, result) = self.blocks.completed(cx.device, patience);
        self.departing.extend(completed);
        result?;
        while let Some(&slot) = self.departing.front() {
            let MemoryPiece { address, stream, state, .. } = self.blocks[slot];
            cx.device.stream_ordered_pools()?.free_async(Address(address), stream)?;
            self.departing.pop_front();
            if state == PieceState::Pending {
                self.blocks.report_completed(cx, &mut self.stats, slot);
            }
            self.blocks.remove(slot);
        }
        Ok(())
    }

    /// Waits for everything and empties the pool.
    fn empty(&mut self, cx: &mut Context<'_>, pool: PoolId) -> Result<(), DeviceError> {
        self.complete_frees(cx, Patience::Wait)?;
        cx.device.synchronize()?;
        cx.device.stream_ordered_pools()?.pool_trim(pool, 0)?;
        let looked = self.look(cx, pool);
        if looked.is_err() {
            // After a trim only the bytes in use are certain.
            self.book_reserved(cx, self.stats.current.active);
        }
        looked
    }

    /// Updates the statistics if the pool may have changed since the last look; returns whether it
    /// has grown. `size` bytes were just taken from it and are not yet counted.
    fn look_if_due(&mut self, cx: &mut Context<'_>, pool: PoolId, size: u64) -> Result<bool, DeviceError> {
        self.since_look += 1;
        let before = self.stats.current.reserved;
        let must_have_grown = self.stats.current.active + size > before;
        // Memory above the threshold may go back at every synchronization.
        let may_have_shrunk = self.settings.release_threshold != u64::MAX;
        if must_have_grown || may_have_shrunk || self.since_look >= LOOK_EVERY {
            self.look(cx, pool)?;
        }
        Ok(self.stats.current.reserved > before)
    }
}

impl Strategy for AsyncPool {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if request.bytes == 0 {
            return Err(StrategyError::ZeroBytes);
        }
        let &Request { bytes: requested, stream, .. } = request;
        let size = round_up(requested, GRANULE);
        let pool = self.open_pool(cx.device)?;
        self.complete_frees(cx, Patience::Poll)?;
        let mut found = unless_out_of_memory(cx.device.stream_ordered_pools()?.alloc_async(pool.id, size, stream))?;
        let retried = found.is_none();
        if retried {
            cx.sink.event(StrategyEvent::Retry { rounded: size });
            self.empty(cx, pool.id)?;
            self.stats.retries += 1;
            found = unless_out_of_memory(cx.device.stream_ordered_pools()?.alloc_async(pool.id, size, stream))?;
        }
        let Some(address) = found else {
            let room = pool.maximum.saturating_sub(self.stats.current.active);
            let refused_by = if size > room { Refusal::Limit } else { Refusal::Device };
            let shortage = Shortage { refused_by, ..Shortage::of_device(size) };
            return Ok(cx.out_of_memory(&mut self.stats, stream, shortage));
        };
        let slot = self.blocks.insert(MemoryPiece::new(address.0, size, stream));
        let outcome = match self.look_if_due(cx, pool.id, size) {
            Ok(_) if retried => Outcome::ReleaseAndRetry,
            Ok(true) => Outcome::NewSegment,
            Ok(false) => Outcome::Hit,
            Err(error) => {
                self.departing.push_back(slot);
                return Err(error.into());
            }
        };
        self.stats.on_alloc(requested, size);
        Ok(Attempt::Served(self.blocks.occupy(slot, requested), outcome))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let &MemoryPiece { size, requested, stream, uses, .. } = self.blocks.live(&block)?;
        if uses != NONE {
            self.blocks.free_later(cx.device, block.slot)?;
            self.stats.on_free(size);
            return Ok(Freed::Later);
        }
        cx.device.stream_ordered_pools()?.free_async(block.address, stream)?;
        self.blocks.remove(block.slot);
        self.stats.on_free(size);
        self.stats.on_reusable(requested, size);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.blocks.note_use(block, stream, false)
    }

    fn serves_pools(&self) -> bool {
        false
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        if let (Control::StepBegins(_), Some(pool)) = (command, self.pool) {
            self.look(cx, pool.id)?;
        }
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        match self.pool {
            Some(pool) => Ok(self.empty(cx, pool.id)?),
            None => Ok(()),
        }
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.complete_frees(cx, Patience::Wait)?;
        let live: Vec<u32> = self.blocks.iter().map(|(slot, _)| slot).collect();
        for slot in live {
            let MemoryPiece { address, stream, .. } = self.blocks[slot];
            cx.device.stream_ordered_pools()?.free_async(Address(address), stream)?;
            self.blocks.remove(slot);
        }
        self.blocks.deferred.destroy_idle_events(cx.device)?;
        if let Some(pool) = self.pool {
            // Without this, a destroyed pool does not give its memory back at once.
            cx.device.synchronize()?;
            cx.device.stream_ordered_pools()?.pool_destroy(pool.id)?;
        }
        *self = AsyncPool::new(self.settings);
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        None
    }

    fn layout(&self) -> Option<Layout> {
        None
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("pool_looks", self.looks), (USED_HIGH, self.used_high)]
    }

    fn requires(&self) -> Capabilities {
        Capabilities::STREAM_ORDERED_POOLS
    }

    /// The pool itself is state of the device and not copied.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read() {
        assert_eq!(settings("").unwrap().release_threshold, u64::MAX);
        let chosen = settings("release_threshold:1GiB, reuse_allow_opportunistic:False").unwrap();
        assert_eq!((chosen.release_threshold, chosen.allow_opportunistic), (1 << 30, false));
        assert!(chosen.follow_event_dependencies && chosen.allow_internal_dependencies);
    }

    #[test]
    fn mistakes_in_settings_are_explained() {
        let refused = |text: &str| settings(text).unwrap_err().to_string();
        assert!(refused("release_treshold:1").contains("did you mean 'release_threshold'?"));
        assert!(refused("reuse_allow_opportunistic:true").contains("'true' is not True or False"));
        assert!(refused("release_threshold").contains("not of the form key:value"));
        assert!(refused("release_threshold:much").contains("not an amount of memory"));
    }
}

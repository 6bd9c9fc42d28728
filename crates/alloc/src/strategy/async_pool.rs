//! `async`: the driver's own stream-ordered allocator, `cudaMallocAsync`.
//!
//! Every block is one `cuMemAllocFromPoolAsync` and one `cuMemFreeAsync`; what is cached, split and reused is the
//! driver's business. The strategy has a pool of its own, which may hold what was free when it was made, so that a cap
//! on the device is a cap on the pool. When memory runs out it waits for the device, empties the pool and tries once
//! more, as PyTorch does since 2.14; before, its first failure was the last.
//!
//! A block that other streams use is given back when their events are done, which is looked at when the next request
//! comes. PyTorch lets a stream of its own wait for those events instead; with both the block comes back only when its
//! last user is through, and no stream is stalled for it.
//!
//! Its books: a block is the request rounded up to [`GRANULE`]. What the pool has reserved only the driver knows: it is
//! asked when more is in use than it had at the last look, at every [`LOOK_EVERY`]-th request, at steps, retries and
//! trims. Between two looks reserved may lag behind; its peak catches up at the next, because the driver keeps it too.
//! The pool is one segment, and lies nowhere in particular.

use std::collections::{BTreeMap, VecDeque};

use super::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome, Parameter, Refusal,
    Request, Setup, Shortage, SpecError, Stats, Strategy, StrategyEntry, StrategyError, StrategyEvent,
    deferred::insert_sorted,
    deferred::{DeferredFrees, Patience},
    direct::GRANULE,
    parameters,
    slots::Slots,
};
use crate::device::{Capabilities, Device, DeviceError, PoolId, PoolSettings, PoolUsage, StreamOrderedPools};
use oomph_base::{Address, StreamId, round_up};

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: NAME,
    summary: "the driver's stream-ordered pool (cudaMallocAsync)",
    origin: "CUDA's cuMemAllocFromPoolAsync; PyTorch's backend:cudaMallocAsync, RMM's cuda_async_memory_resource",
    parameters: &[
        Parameter::text(
            RELEASE_THRESHOLD,
            "an amount of memory, or max",
            "max",
            "free memory above this goes back to the device whenever something is waited for",
        ),
        Parameter::text(
            FOLLOW_EVENTS,
            "True or False",
            "True",
            "reuse what another stream freed where an event orders the two",
        ),
        Parameter::text(
            OPPORTUNISTIC,
            "True or False",
            "True",
            "reuse what another stream freed once that has happened on the device",
        ),
        Parameter::text(
            INTERNAL_DEPENDENCIES,
            "True or False",
            "True",
            "let a stream wait for another to reuse what that one freed",
        ),
    ],
    variants: &[
        "reuse_allow_internal_dependencies:False",
        "reuse_follow_event_dependencies:False,reuse_allow_opportunistic:False,reuse_allow_internal_dependencies:False",
    ],
    build,
};

const NAME: &str = "async";
const RELEASE_THRESHOLD: &str = "release_threshold";
const FOLLOW_EVENTS: &str = "reuse_follow_event_dependencies";
const OPPORTUNISTIC: &str = "reuse_allow_opportunistic";
const INTERNAL_DEPENDENCIES: &str = "reuse_allow_internal_dependencies";

/// After this many requests the driver is asked what the pool holds, even if nothing suggests that it has grown.
pub const LOOK_EVERY: u64 = 64;

/// The counter among the [details](Strategy::details) that says how much of the pool was in use at most, as the driver
/// counts it.
pub const USED_HIGH: &str = "pool_used_high_bytes";

fn build(parameters: &str, _: &Setup<'_>) -> Built {
    Ok(Box::new(AsyncPool::new(settings(parameters)?)))
}

fn settings(parameters: &str) -> Result<PoolSettings, SpecError> {
    let mut settings = PoolSettings {
        release_threshold: u64::MAX,
        follow_event_dependencies: true,
        allow_opportunistic: true,
        allow_internal_dependencies: true,
    };
    parameters::read(&ENTRY, parameters, |setting| {
        match setting.key {
            RELEASE_THRESHOLD if setting.value == "max" => settings.release_threshold = u64::MAX,
            RELEASE_THRESHOLD => settings.release_threshold = setting.bytes()?,
            FOLLOW_EVENTS => settings.follow_event_dependencies = setting.truth()?,
            OPPORTUNISTIC => settings.allow_opportunistic = setting.truth()?,
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
    pool: Option<Pool>,
    blocks: Slots<Owner>,
    /// The streams that use a block beside its own, by slot.
    uses: BTreeMap<u32, Vec<StreamId>>,
    /// Freed blocks whose other streams are not through yet.
    deferred: DeferredFrees<Departing>,
    /// What is to be given back to the pool as soon as the driver takes it.
    departing: VecDeque<Departing>,
    since_look: u64,
    looks: u64,
    used_high: u64,
    stats: Stats,
}

/// The pool, once there is one.
#[derive(Clone, Copy, Debug)]
struct Pool {
    id: PoolId,
    configured: bool,
    /// What it may hold.
    maximum: u64,
}

/// Who asked for a block, and for how much.
#[derive(Clone, Copy, Debug)]
struct Owner {
    requested: u64,
    stream: StreamId,
}

/// A block on its way back to the pool.
#[derive(Clone, Copy, Debug)]
struct Departing {
    address: Address,
    size: u64,
    owner: Owner,
    /// Whether it is in the books: a caller had it.
    booked: bool,
}

fn pools(device: &mut dyn Device) -> Result<&mut dyn StreamOrderedPools, DeviceError> {
    device.require_stream_ordered_pools()
}

/// An address, or nothing where memory has run out.
fn if_there_is_room(answer: Result<Address, DeviceError>) -> Result<Option<Address>, DeviceError> {
    match answer {
        Ok(address) => Ok(Some(address)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

impl AsyncPool {
    fn new(settings: PoolSettings) -> AsyncPool {
        AsyncPool {
            settings,
            pool: None,
            blocks: Slots::default(),
            uses: BTreeMap::new(),
            deferred: DeferredFrees::default(),
            departing: VecDeque::new(),
            since_look: 0,
            looks: 0,
            used_high: 0,
            stats: Stats::default(),
        }
    }

    /// The pool, made and set up where that has not happened yet.
    fn open_pool(&mut self, device: &mut dyn Device) -> Result<Pool, DeviceError> {
        let mut pool = match self.pool {
            Some(pool) if pool.configured => return Ok(pool),
            Some(pool) => pool,
            None => {
                let maximum = device.memory_info()?.free;
                Pool { id: pools(device)?.pool_create(Some(maximum))?, configured: false, maximum }
            }
        };
        self.pool = Some(pool);
        pools(device)?.pool_configure(pool.id, self.settings)?;
        pool.configured = true;
        self.pool = Some(pool);
        Ok(pool)
    }

    /// Asks the driver what the pool holds, and brings the books up to date.
    fn look(&mut self, cx: &mut Context<'_>, pool: PoolId) -> Result<(), DeviceError> {
        let PoolUsage { reserved, reserved_high, used_high, .. } = pools(cx.device)?.pool_usage(pool)?;
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

    /// Gives blocks back whose streams are through.
    fn take_leave(&mut self, cx: &mut Context<'_>, patience: Patience) -> Result<(), DeviceError> {
        if !self.deferred.is_empty() {
            let mut through = Vec::new();
            let released = self.deferred.release(cx.device, patience, &mut through);
            self.departing.extend(through);
            released?;
        }
        while let Some(&Departing { address, size, owner, booked }) = self.departing.front() {
            pools(cx.device)?.free_async(address, owner.stream)?;
            self.departing.pop_front();
            if booked {
                self.stats.on_reusable(owner.requested, size);
                let (requested, stream) = (owner.requested, owner.stream);
                cx.sink.event(StrategyEvent::FreeCompleted { address, requested, stream });
            }
        }
        Ok(())
    }

    /// Waits for everything and empties the pool.
    fn empty(&mut self, cx: &mut Context<'_>, pool: PoolId) -> Result<(), DeviceError> {
        self.take_leave(cx, Patience::Wait)?;
        cx.device.synchronize()?;
        pools(cx.device)?.pool_trim(pool, 0)?;
        let looked = self.look(cx, pool);
        if looked.is_err() {
            // After a trim nothing is certain but what is in use.
            self.book_reserved(cx, self.stats.current.active);
        }
        looked
    }

    /// Brings the books up to date if the pool may have changed since the last look; `size` bytes were just taken from
    /// it and are not yet in the books. Whether it has grown.
    fn look_if_due(&mut self, cx: &mut Context<'_>, pool: PoolId, size: u64) -> Result<bool, DeviceError> {
        self.since_look += 1;
        let before = self.stats.current.reserved;
        let must_have_grown = self.stats.current.active + size > before;
        // Memory above a threshold may go back whenever the program waits for something.
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
        self.take_leave(cx, Patience::Poll)?;
        let mut found = if_there_is_room(pools(cx.device)?.alloc_async(pool.id, size, stream))?;
        let retried = found.is_none();
        if retried {
            cx.sink.event(StrategyEvent::Retry { rounded: size });
            self.empty(cx, pool.id)?;
            self.stats.retries += 1;
            found = if_there_is_room(pools(cx.device)?.alloc_async(pool.id, size, stream))?;
        }
        let Some(address) = found else {
            self.stats.ooms += 1;
            cx.sink.event(StrategyEvent::OutOfMemory { rounded: size, stream, device_free: None });
            let room = pool.maximum.saturating_sub(self.stats.current.active);
            let refused_by = if size > room { Refusal::Limit } else { Refusal::Device };
            return Ok(Attempt::OutOfMemory(Shortage { rounded: size, asked: size, refused_by, device_free: None }));
        };
        let owner = Owner { requested, stream };
        let outcome = match self.look_if_due(cx, pool.id, size) {
            Ok(_) if retried => Outcome::ReleaseAndRetry,
            Ok(true) => Outcome::NewSegment,
            Ok(false) => Outcome::Hit,
            Err(error) => {
                self.departing.push_back(Departing { address, size, owner, booked: false });
                return Err(error.into());
            }
        };
        self.stats.on_alloc(requested, size);
        Ok(Attempt::Served(self.blocks.insert(address, size, owner), outcome))
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let (size, owner) = self.blocks.get(&block)?;
        let freed = match self.uses.get(&block.slot) {
            None => {
                pools(cx.device)?.free_async(block.address, owner.stream)?;
                Freed::Now
            }
            Some(users) => {
                let departing = Departing { address: block.address, size, owner, booked: true };
                self.deferred.hold(cx.device, departing, users)?;
                self.uses.remove(&block.slot);
                Freed::Later
            }
        };
        self.blocks.remove(&block)?;
        self.stats.on_free(size);
        if freed == Freed::Now {
            self.stats.on_reusable(owner.requested, size);
        }
        Ok(freed)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let (_, owner) = self.blocks.get(block)?;
        if stream != owner.stream {
            insert_sorted(self.uses.entry(block.slot).or_default(), stream);
        }
        Ok(())
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
        self.take_leave(cx, Patience::Wait)?;
        let live: Vec<(Block, Owner)> = self.blocks.iter().collect();
        for (block, owner) in live {
            pools(cx.device)?.free_async(block.address, owner.stream)?;
            self.blocks.remove(&block)?;
        }
        self.deferred.destroy_idle_events(cx.device)?;
        if let Some(pool) = self.pool {
            // Only then does a destroyed pool give its memory back at once.
            cx.device.synchronize()?;
            pools(cx.device)?.pool_destroy(pool.id)?;
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
        Capabilities { stream_ordered_pools: true, ..Capabilities::NONE }
    }

    /// The pool itself is state of the device, and is copied or not with that.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_typed() {
        assert_eq!(settings("").unwrap().release_threshold, u64::MAX);
        let chosen = settings("release_threshold:1GiB, reuse_allow_opportunistic:False").unwrap();
        assert_eq!((chosen.release_threshold, chosen.allow_opportunistic), (1 << 30, false));
        assert!(chosen.follow_event_dependencies && chosen.allow_internal_dependencies);
    }

    #[test]
    fn slips_in_settings_are_explained() {
        let refused = |text: &str| settings(text).unwrap_err().to_string();
        assert!(refused("release_treshold:1").contains("did you mean 'release_threshold'?"));
        assert!(refused("reuse_allow_opportunistic:true").contains("'true' is not True or False"));
        assert!(refused("release_threshold").contains("not of the form key:value"));
        assert!(refused("release_threshold:much").contains("not an amount of memory"));
    }
}

//! Pools: the memory of captured CUDA graphs, apart from all other memory.
//!
//! A graph writes to the same addresses whenever it is replayed, also to those that were freed while it was captured. So each
//! pool has an instance of the strategy of its own (an arena), whose memory stays where it is and serves no other request
//! until PyTorch has released the pool as often as it began to allocate to it. All arenas share the device and its limit.
//!
//! PyTorch names a pool by two numbers and tells by a C++ function which streams allocate to it ([`StreamFilter`]).
#![expect(unsafe_code, reason = "a C++ function is called, and exported functions have fixed names")]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use super::{AllocatorService, ServiceError, exports::serve};
use oomph_alloc::strategy::{
    Attempt, Caller, Context, Control, Freed, Request, Stats, Strategy, StrategyError, wrap::AddressedStrategy,
};
use oomph_base::{Address, Layout, StreamId};

/// PyTorch's number of a pool (`MempoolId_t`).
pub(crate) type PoolKey = (u64, u64);

/// Strategies that keep the rules of a capture: no call on a stream that is being captured, and memory stays in place.
const SERVES_GRAPHS: [&str; 2] = ["oomph", "caching"];

/// Whether captured graphs can be served by the strategy of that name.
pub(crate) fn serves_graphs(strategy: &str) -> bool {
    SERVES_GRAPHS.contains(&strategy)
}

/// Makes the strategy of another arena.
type ArenaBuilder = Box<dyn Fn() -> Result<Box<dyn Strategy>, ServiceError> + Send>;

/// Whether the stream with this handle allocates to a pool.
pub(crate) type RouteFilter = Box<dyn Fn(u64) -> bool + Send>;

/// A strategy for the default pool, and one for each pool of graphs.
pub(crate) struct Arenas {
    default: AddressedStrategy<Box<dyn Strategy>>,
    pools: Vec<PoolArena>,
    /// Pools that PyTorch allocates to now, in the order of their beginnings.
    routes: Vec<(PoolKey, RouteFilter)>,
    build: ArenaBuilder,
    /// Sums over all arenas, once there was a pool. A program without graphs pays nothing for them.
    sum: Option<Stats>,
    /// Counters of arenas that were closed.
    closed: Stats,
    /// The arena of the last request or free, and the counters of all others together: programs mostly call one arena many times.
    others: Option<(Option<usize>, Stats)>,
}

/// The memory of one pool.
struct PoolArena {
    key: PoolKey,
    /// Beginnings without a release. Without any, no graph uses the memory.
    users: u32,
    strategy: AddressedStrategy<Box<dyn Strategy>>,
    /// The pool inside of the strategy, if it has pools of its own: its number, and how often its use began.
    inner: (u64, u32),
}

impl PoolArena {
    /// A capture begins or ends anywhere on the device.
    fn capture(&mut self, cx: &mut Context<'_>, begins: bool) -> Result<(), StrategyError> {
        self.inner.1 += u32::from(begins);
        capture(cx, &mut self.strategy, (self.inner.0, None), begins)
    }

    /// No graph uses the memory any more: what is free goes back.
    fn give_back(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.strategy.control(cx, &Control::StayInPlace(false))?;
        while self.strategy.serves_pools() && self.inner.1 > 0 {
            self.strategy.control(cx, &Control::PoolRelease { pool: (INNER, self.inner.0) })?;
            self.inner.1 -= 1;
        }
        // A pool that was released is not used again.
        self.inner.0 += 1;
        self.strategy.trim(cx)
    }
}

/// The first number of pools inside of a strategy.
const INNER: u64 = u64::MAX;
/// A pool that does not serve requests: a stream of this number does not exist. Its use tells a strategy with pools of its own that a
/// capture is under way.
const NO_POOL: (u64, Option<StreamId>) = (0, Some(StreamId(u16::MAX)));

/// The streams of the program: the handles, by our stream number.
pub(crate) type StreamHandles<'a> = &'a [u64];

impl Arenas {
    pub(crate) fn new(default: Box<dyn Strategy>, build: ArenaBuilder) -> Arenas {
        let default = AddressedStrategy::new(default);
        let (sum, others, closed) = (None, None, Stats::default());
        Arenas { default, pools: Vec::new(), routes: Vec::new(), build, sum, closed, others }
    }

    /// Serves a request. Before memory has run out, the other arenas give back what they can.
    pub(crate) fn alloc(
        &mut self,
        cx: &mut Context<'_>,
        request: &Request,
        streams: StreamHandles<'_>,
    ) -> Result<Attempt, StrategyError> {
        if self.sum.is_none() {
            return self.default.alloc(cx, request);
        }
        let place = self.place_for(streams[request.stream.index()]);
        // After an error they are summed up again.
        let others = self.others.take();
        let mut attempt = self.at(place).alloc(cx, request)?;
        if matches!(attempt, Attempt::OutOfMemory(_)) && self.relieve(cx, streams)? {
            attempt = self.at(place).alloc(cx, request)?;
        } else {
            self.others = others;
        }
        self.count_after(place);
        Ok(attempt)
    }

    /// Frees a block. Nearly all are of the default pool, so that it is asked first.
    pub(crate) fn free(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
    ) -> Result<Freed, StrategyError> {
        let freed = self.default.free_by_address(cx, address, caller);
        if self.sum.is_none() {
            return freed;
        }
        if let Err(StrategyError::UnknownBlock { .. }) = freed {
            return self.free_in_pools(cx, address, caller);
        }
        self.count_after(None);
        freed
    }

    fn free_in_pools(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
    ) -> Result<Freed, StrategyError> {
        let others = self.others.take();
        for place in 0..self.pools.len() {
            let arena = &mut self.pools[place];
            match arena.strategy.free_by_address(cx, address, caller) {
                Err(StrategyError::UnknownBlock { .. }) => {}
                Ok(freed) => {
                    let is_last = arena.users == 0 && arena.strategy.stats().live_blocks == 0;
                    self.others = others;
                    self.count_after(Some(place));
                    if is_last {
                        self.give_back_released(cx)?;
                    }
                    return Ok(freed);
                }
                Err(error) => return Err(error),
            }
        }
        Err(StrategyError::UnknownBlock { address, slot: u32::MAX })
    }

    pub(crate) fn used_on(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        stream: StreamId,
    ) -> Result<(), StrategyError> {
        let mut answer = self.default.used_on_by_address(cx, address, stream);
        for arena in &mut self.pools {
            if !matches!(answer, Err(StrategyError::UnknownBlock { .. })) {
                break;
            }
            answer = arena.strategy.used_on_by_address(cx, address, stream);
        }
        answer
    }

    /// PyTorch's `empty_cache`. During a capture nothing is given back.
    pub(crate) fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if !self.routes.is_empty() {
            return Ok(());
        }
        self.give_back_released(cx)?;
        let trimmed = self.default.trim(cx);
        self.count();
        trimmed
    }

    /// Settings, for all arenas.
    pub(crate) fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.others = None;
        self.default.control(cx, command)?;
        self.pools.iter_mut().try_for_each(|arena| arena.strategy.control(cx, command))
    }

    /// The counters of all arenas together.
    pub(crate) fn stats(&self) -> Stats {
        self.sum.unwrap_or_else(|| self.default.stats())
    }

    /// The segments of all arenas; `None` if a strategy cannot know them.
    pub(crate) fn layout(&self) -> Option<Layout> {
        let mut segments = self.default.layout()?.segments;
        for arena in &self.pools {
            segments.extend(arena.strategy.layout()?.segments);
        }
        Some(Layout::of(segments))
    }

    /// The strategy of the default pool.
    pub(crate) fn default_pool(&self) -> &dyn Strategy {
        &self.default
    }

    fn at(&mut self, place: Option<usize>) -> &mut AddressedStrategy<Box<dyn Strategy>> {
        match place {
            Some(place) => &mut self.pools[place].strategy,
            None => &mut self.default,
        }
    }

    /// The arena of a stream's requests, `None` for the default pool. The beginning that came last counts, as in PyTorch.
    fn place_for(&self, handle: u64) -> Option<usize> {
        let (key, _) = self.routes.iter().rev().find(|(_, filter)| filter(handle))?;
        self.find(*key)
    }

    fn find(&self, key: PoolKey) -> Option<usize> {
        self.pools.iter().position(|arena| arena.key == key)
    }

    /// Sums up the counters, once there was a pool.
    fn count(&mut self) {
        self.others = None;
        self.count_after(None);
    }

    /// The same after a call that changed the counters of this arena only.
    fn count_after(&mut self, place: Option<usize>) {
        let others = match self.others {
            Some((counted, others)) if counted == place => others,
            _ => self.all_but(place),
        };
        self.others = Some((place, others));
        let before = self.sum.unwrap_or_else(|| self.default.stats());
        let mut sum = Stats { peak: before.peak, peak_segments: before.peak_segments, ..Stats::default() };
        sum.add(&others);
        sum.add(&self.at(place).stats());
        self.sum = Some(sum);
    }

    /// The counters of all arenas but one, closed ones included.
    fn all_but(&self, place: Option<usize>) -> Stats {
        let mut others = self.closed;
        if place.is_some() {
            others.add(&self.default.stats());
        }
        let pools = self.pools.iter().enumerate().filter(|&(pool, _)| Some(pool) != place);
        pools.for_each(|(_, arena)| others.add(&arena.strategy.stats()));
        others
    }
}

/// Beginning, end and release of pools.
impl Arenas {
    /// PyTorch's `beginAllocateToPool`: requests of these streams go to the pool.
    pub(crate) fn begin_pool(
        &mut self,
        cx: &mut Context<'_>,
        key: PoolKey,
        filter: RouteFilter,
    ) -> Result<(), ServiceError> {
        self.others = None;
        if let Some(place) = self.find(key) {
            let arena = &mut self.pools[place];
            arena.users += 1;
            arena.strategy.control(cx, &Control::StayInPlace(true))?;
            if self.routes.is_empty() {
                // Blocks of other streams that were freed in the last capture become free. In this one they cannot.
                arena.strategy.trim(cx)?;
            }
        } else {
            let strategy = AddressedStrategy::new((self.build)()?);
            let mut arena = PoolArena { key, users: 1, strategy, inner: (1, 0) };
            arena.strategy.control(cx, &Control::StayInPlace(true))?;
            if !self.routes.is_empty() {
                arena.capture(cx, true)?;
            }
            self.pools.push(arena);
        }
        if self.routes.is_empty() {
            self.capture_everywhere(cx, true)?;
        }
        self.routes.push((key, filter));
        self.count();
        Ok(())
    }

    /// PyTorch's `endAllocateToPool`. The capture may still be under way, so that the driver is not called.
    pub(crate) fn end_pool(&mut self, cx: &mut Context<'_>, key: PoolKey) -> Result<(), ServiceError> {
        let place = self.routes.iter().rposition(|(routed, _)| *routed == key);
        drop(self.routes.remove(place.ok_or(ServiceError::PoolNotBegun(key))?));
        if self.routes.is_empty() {
            self.capture_everywhere(cx, false)?;
        }
        Ok(())
    }

    /// PyTorch's `releasePool`: one graph less uses the pool. After the last, the memory goes back as soon as no block is
    /// live in it.
    pub(crate) fn release_pool(&mut self, cx: &mut Context<'_>, key: PoolKey) -> Result<(), ServiceError> {
        let place = self.find(key).filter(|&place| self.pools[place].users > 0);
        let arena = &mut self.pools[place.ok_or(ServiceError::PoolNotBegun(key))?];
        arena.users -= 1;
        if arena.users > 0 {
            return Ok(());
        }
        // The graph of a beginning without an end is gone, and its filter with it.
        let routed = self.routes.len();
        self.routes.retain(|(of, _)| *of != key);
        if routed > 0 && self.routes.is_empty() {
            self.capture_everywhere(cx, false)?;
        }
        if self.routes.is_empty() {
            self.give_back_released(cx)?;
        }
        Ok(())
    }

    fn capture_everywhere(&mut self, cx: &mut Context<'_>, begins: bool) -> Result<(), StrategyError> {
        self.others = None;
        capture(cx, &mut self.default, NO_POOL, begins)?;
        self.pools.iter_mut().try_for_each(|arena| arena.capture(cx, begins))
    }

    /// Gives back the memory of pools without users: all of it where no block is live. Not during a capture: a graph may
    /// have been replayed on any stream, and only the whole device can be waited for.
    fn give_back_released(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        if !self.routes.is_empty() || self.pools.iter().all(|arena| arena.users > 0) {
            return Ok(());
        }
        cx.device.synchronize()?;
        self.others = None;
        for arena in self.pools.iter_mut().filter(|arena| arena.users == 0) {
            if arena.strategy.stats().live_blocks == 0 {
                let Stats { allocs, frees, retries, ooms, .. } = arena.strategy.stats();
                arena.strategy.close(cx)?;
                self.closed.add(&Stats { allocs, frees, retries, ooms, ..Stats::default() });
            } else {
                arena.give_back(cx)?;
            }
        }
        self.pools.retain(|arena| arena.users > 0 || arena.strategy.stats().live_blocks > 0);
        self.count();
        Ok(())
    }

    /// Gives back cached memory that other requests can have, when memory has run out for one. Returns whether there was
    /// any. During a capture that is the default pool's, outside that of released pools.
    fn relieve(&mut self, cx: &mut Context<'_>, streams: StreamHandles<'_>) -> Result<bool, StrategyError> {
        let before = cx.device.held_bytes();
        if self.routes.is_empty() {
            self.give_back_released(cx)?;
        } else {
            let is_capturing = |handle: &u64| self.routes.iter().any(|(_, filter)| filter(*handle));
            let numbered = (0u16..).zip(streams).filter(|(_, handle)| is_capturing(handle));
            let capturing: Vec<StreamId> = numbered.map(|(number, _)| StreamId(number)).collect();
            self.default.control(cx, &Control::TrimInCapture { capturing: &capturing })?;
        }
        Ok(cx.device.held_bytes() < before)
    }
}

/// Tells one strategy that a capture begins or ends. A strategy with pools of its own takes the use of a pool for a capture,
/// as PyTorch does up to 2.12.
fn capture(
    cx: &mut Context<'_>,
    strategy: &mut dyn Strategy,
    (number, stream): (u64, Option<StreamId>),
    begins: bool,
) -> Result<(), StrategyError> {
    strategy.control(cx, if begins { &Control::CaptureBegin } else { &Control::CaptureEnd })?;
    if !strategy.serves_pools() {
        return Ok(());
    }
    let pool = (INNER, number);
    strategy.control(cx, &if begins { Control::PoolBegin { pool, stream } } else { Control::PoolEnd { pool } })
}

/// What a `std::function<bool(cudaStream_t)>` of the GNU library consists of. PyTorch passes it by address and destroys it
/// after the call.
#[repr(C)]
#[derive(Debug)]
pub struct CppStreamFilter {
    functor: [usize; 2],
    /// Copies and destroys the functor; null in an empty function.
    manager: Option<unsafe extern "C" fn(*mut [usize; 2], *const [usize; 2], c_int) -> bool>,
    invoker: Option<unsafe extern "C" fn(*const [usize; 2], *const *mut c_void) -> bool>,
}

/// The operations of a manager (`_Manager_operation`).
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// A copy of a C++ function that selects streams.
struct StreamFilter(CppStreamFilter);

// SAFETY: PyTorch calls its filters from any thread, under the lock of its allocator; here the lock of the GPU is held.
unsafe impl Send for StreamFilter {}

impl StreamFilter {
    /// Copies the function.
    ///
    /// # Safety
    /// `function` is null or points to a live `std::function<bool(cudaStream_t)>`.
    unsafe fn copied(function: *const CppStreamFilter) -> Option<StreamFilter> {
        // SAFETY: as the caller promises.
        let function = unsafe { function.as_ref() }?;
        let (manager, invoker) = (function.manager?, function.invoker?);
        let mut functor = [0; 2];
        // SAFETY: this is how the library copies a function: into storage of the same size.
        unsafe { manager(&raw mut functor, &raw const function.functor, CLONE) };
        Some(StreamFilter(CppStreamFilter { functor, manager: Some(manager), invoker: Some(invoker) }))
    }

    /// Whether the function selects this stream. If it throws, the process ends with the text of the exception.
    fn selects(&self, handle: u64) -> bool {
        let stream: *mut c_void = ptr::with_exposed_provenance_mut(handle as usize);
        // SAFETY: the functor is live, and the argument is passed by reference.
        self.0.invoker.is_some_and(|invoker| unsafe { invoker(&raw const self.0.functor, &raw const stream) })
    }
}

impl Drop for StreamFilter {
    fn drop(&mut self) {
        let functor = &raw mut self.0.functor;
        if let Some(manager) = self.0.manager {
            // SAFETY: the functor was copied by this manager and is destroyed once.
            unsafe { manager(functor, functor, DESTROY) };
        }
    }
}

/// For PyTorch's `set_begin_allocate_to_pool`. `std::pair` of two numbers is passed as two numbers.
///
/// # Safety
/// `filter` is null or points to a live `std::function<bool(cudaStream_t)>`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oomph_begin_pool(device: c_int, first: u64, second: u64, filter: *const CppStreamFilter) {
    // SAFETY: as the caller promises.
    let filter = unsafe { StreamFilter::copied(filter) };
    let selects = move |handle| filter.as_ref().is_some_and(|filter| filter.selects(handle));
    serve(|service| service.begin_pool(device, (first, second), Box::new(selects)));
}

/// For PyTorch's `set_end_allocate_to_pool_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_end_pool(device: c_int, first: u64, second: u64) {
    serve(|service| service.with_gpu(device, |gpu| gpu.with_arenas(|arenas, cx| arenas.end_pool(cx, (first, second)))));
}

/// For PyTorch's `set_release_pool`.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_release_pool(device: c_int, first: u64, second: u64) {
    serve(|service| {
        service.with_gpu(device, |gpu| gpu.with_arenas(|arenas, cx| arenas.release_pool(cx, (first, second))))
    });
}

/// 1 if the strategy serves captured graphs, 0 if not.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_serves_graphs() -> c_int {
    let served = serve(|service| Ok(serves_graphs(&service.settings.strategy.name)));
    c_int::from(served.unwrap_or(false))
}

/// Driver calls for a GPU so far: the replay of a graph adds none.
#[unsafe(no_mangle)]
pub extern "C" fn oomph_driver_calls(device: c_int) -> usize {
    serve(|service| service.with_gpu(device, |gpu| Ok(gpu.statistics().driver_calls))).unwrap_or(0) as usize
}

impl AllocatorService {
    fn begin_pool(&self, device: i32, key: PoolKey, filter: RouteFilter) -> Result<(), ServiceError> {
        if !serves_graphs(&self.settings.strategy.name) {
            return Err(ServiceError::NoGraphs(self.settings.strategy.name.clone()));
        }
        self.with_gpu(device, |gpu| gpu.begin_pool(key, filter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_alloc::device::{
        CallKind, Device,
        sim::{SimConfig, SimDevice},
        wrap::capped,
    };
    use oomph_alloc::strategy::{Setup, Silent, StrategySpec};
    use oomph_base::{MIB, SiteId, ThreadId};

    /// Handles of the default stream, a stream that is captured and another one.
    const HANDLES: [u64; 3] = [0, 100, 200];
    const EAGER: u16 = 0;
    const CAPTURED: u16 = 1;
    const POOL: PoolKey = (0, 7);

    struct Bench {
        arenas: Arenas,
        device: Box<dyn Device>,
    }

    impl Bench {
        fn new(strategy: &'static str, limit: Option<u64>) -> Bench {
            let device: Box<dyn Device> = Box::new(SimDevice::new(SimConfig::default()).unwrap());
            let mut device = capped(device, limit);
            for handle in &HANDLES[1..] {
                device.stream_create(*handle).unwrap();
            }
            let props = device.props().clone();
            let build = move || Ok(StrategySpec::from(strategy).build(&Setup { props: &props, limit: None })?);
            Bench { arenas: Arenas::new(build().unwrap(), Box::new(build)), device }
        }

        fn call<T>(&mut self, call: impl FnOnce(&mut Arenas, &mut Context<'_>) -> T) -> T {
            call(&mut self.arenas, &mut Context { device: &mut *self.device, sink: &mut Silent })
        }

        fn attempt(&mut self, bytes: u64, stream: u16) -> Option<Address> {
            let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
            match self.call(|arenas, cx| arenas.alloc(cx, &request, &HANDLES)).unwrap() {
                Attempt::Served(block, _) => Some(block.address),
                Attempt::OutOfMemory(_) => None,
            }
        }

        fn alloc(&mut self, mebibytes: u64, stream: u16) -> Address {
            self.attempt(mebibytes * MIB, stream).unwrap()
        }

        fn free(&mut self, address: Address) {
            self.call(|arenas, cx| arenas.free(cx, address, Caller::default())).unwrap();
        }

        fn begin(&mut self, key: PoolKey) {
            self.call(|arenas, cx| arenas.begin_pool(cx, key, Box::new(|handle| handle == 100))).unwrap();
        }

        fn end(&mut self, key: PoolKey) {
            self.call(|arenas, cx| arenas.end_pool(cx, key)).unwrap();
        }

        fn release(&mut self, key: PoolKey) {
            self.call(|arenas, cx| arenas.release_pool(cx, key)).unwrap();
        }

        fn trim(&mut self) {
            self.call(Arenas::trim).unwrap();
        }

        /// A graph with one block that is freed in the capture and one that lives on, which is returned.
        fn graph(&mut self, key: PoolKey) -> Address {
            self.begin(key);
            let (kept, freed) = (self.alloc(30, CAPTURED), self.alloc(50, CAPTURED));
            self.free(freed);
            self.end(key);
            kept
        }

        fn calls(&self, kind: CallKind) -> u64 {
            self.device.ledger().of(kind).count
        }

        /// Calls that a capture forbids on its streams, or that would move memory.
        fn waits(&self) -> u64 {
            [
                CallKind::EventRecord,
                CallKind::EventQuery,
                CallKind::EventSynchronize,
                CallKind::StreamSynchronize,
                CallKind::StreamWaitEvent,
                CallKind::CtxSynchronize,
                CallKind::MemUnmap,
                CallKind::MemFree,
            ]
            .map(|kind| self.calls(kind))
            .iter()
            .sum()
        }
    }

    fn with_each_strategy(test: impl Fn(Bench)) {
        SERVES_GRAPHS.iter().for_each(|strategy| test(Bench::new(strategy, None)));
    }

    #[test]
    fn memory_of_a_graph_stays_and_serves_no_other_request() {
        with_each_strategy(|mut bench| {
            let kept = bench.graph(POOL);
            let reserved = bench.device.held_bytes();
            // Neither eager requests nor another graph get the memory that was freed in the capture.
            let eager = bench.alloc(50, EAGER);
            assert!(bench.device.held_bytes() >= reserved + 50 * MIB);
            let other = bench.graph((0, 8));
            assert!(bench.device.held_bytes() >= reserved + 130 * MIB);
            // Nor does empty_cache give it back.
            bench.free(eager);
            bench.trim();
            assert!(bench.device.held_bytes() >= reserved + 80 * MIB);
            assert!(bench.device.held_bytes() < reserved + 130 * MIB, "the eager block went back");
            bench.free(kept);
            bench.free(other);
        });
    }

    #[test]
    fn a_released_pool_gives_back_every_byte() {
        with_each_strategy(|mut bench| {
            let kept = bench.graph(POOL);
            bench.free(kept);
            assert!(bench.device.held_bytes() >= 80 * MIB);
            bench.release(POOL);
            assert_eq!((bench.device.held_bytes(), bench.arenas.pools.len()), (0, 0));
            let stats = bench.arenas.stats();
            assert_eq!((stats.allocs, stats.frees, stats.live_blocks, stats.current.reserved), (2, 2, 0, 0));
            assert!(stats.peak.reserved >= 80 * MIB && stats.peak.allocated >= 80 * MIB);
        });
    }

    #[test]
    fn blocks_of_a_released_pool_can_be_freed() {
        with_each_strategy(|mut bench| {
            let kept = bench.graph(POOL);
            bench.release(POOL);
            let held = bench.device.held_bytes();
            assert!((30 * MIB..60 * MIB).contains(&held), "a block of 30 MiB is live, and {held} bytes are held");
            // The pool may be used again before its memory has gone back.
            let second = bench.graph(POOL);
            bench.free(second);
            bench.release(POOL);
            bench.free(kept);
            assert_eq!(bench.device.held_bytes(), 0);
            let twice = bench.call(|arenas, cx| arenas.free(cx, kept, Caller::default()));
            assert!(matches!(twice, Err(StrategyError::UnknownBlock { .. })));
        });
    }

    #[test]
    fn graphs_share_a_pool_until_the_last_is_gone() {
        with_each_strategy(|mut bench| {
            let first = bench.graph(POOL);
            let reserved = bench.device.held_bytes();
            bench.begin(POOL);
            let second = bench.alloc(50, CAPTURED);
            bench.end(POOL);
            assert_eq!(bench.device.held_bytes(), reserved, "the second graph reuses what the first freed");
            bench.free(first);
            bench.free(second);
            bench.release(POOL);
            bench.trim();
            assert_eq!(bench.device.held_bytes(), reserved, "the second graph still uses the pool");
            bench.release(POOL);
            assert_eq!(bench.device.held_bytes(), 0);
            let again = bench.call(|arenas, cx| arenas.release_pool(cx, POOL));
            assert!(matches!(again, Err(ServiceError::PoolNotBegun(POOL))));
        });
    }

    /// Frees of blocks that other streams use wait until the capture is over, in every pool.
    #[test]
    fn nothing_is_waited_for_moved_or_given_back_in_a_capture() {
        with_each_strategy(|mut bench| {
            let cached = bench.alloc(60, 2);
            let shared = bench.alloc(40, EAGER);
            bench.call(|arenas, cx| arenas.used_on(cx, shared, StreamId(2))).unwrap();
            bench.free(cached);
            let before = bench.waits();
            bench.begin(POOL);
            let in_graph = bench.alloc(20, CAPTURED);
            bench.call(|arenas, cx| arenas.used_on(cx, in_graph, StreamId(2))).unwrap();
            bench.free(in_graph);
            bench.free(shared);
            // Free memory of another stream is not taken over.
            let eager = bench.alloc(60, EAGER);
            bench.trim();
            let second = bench.alloc(20, CAPTURED);
            assert_ne!(second, in_graph, "a stream may still use it");
            assert_eq!(bench.waits(), before);
            bench.end(POOL);
            assert_eq!(bench.waits(), before, "the capture may still be under way");
            bench.free(eager);
            bench.alloc(1, EAGER);
            assert!(bench.calls(CallKind::EventRecord) > 0, "the shared block waits for its stream now");
            bench.begin(POOL);
            assert_eq!(bench.alloc(20, CAPTURED), in_graph, "its use was part of the graph");
            bench.end(POOL);
        });
    }

    #[test]
    fn cached_memory_of_the_default_pool_serves_a_graph_before_memory_runs_out() {
        let mut bench = Bench::new("oomph", Some(256 * MIB));
        let cached = bench.alloc(200, EAGER);
        bench.free(cached);
        bench.begin(POOL);
        let block = bench.alloc(200, CAPTURED);
        assert!(bench.device.held_bytes() <= 256 * MIB);
        assert_eq!(bench.attempt(200 * MIB, CAPTURED), None);
        bench.end(POOL);
        // And what a released pool holds serves the default pool.
        bench.release(POOL);
        bench.begin((0, 8));
        bench.free(block);
        bench.end((0, 8));
        assert!(bench.device.held_bytes() >= 200 * MIB, "nothing was given back in the capture");
        bench.alloc(200, EAGER);
    }

    /// A stream that is being captured cannot be waited for: its cached memory stays.
    #[test]
    fn cached_memory_of_a_captured_stream_is_not_given_back() {
        let mut bench = Bench::new("oomph", Some(256 * MIB));
        let cached = bench.alloc(200, CAPTURED);
        bench.free(cached);
        bench.begin(POOL);
        let before = bench.waits();
        assert_eq!(bench.attempt(200 * MIB, CAPTURED), None);
        assert_eq!(bench.waits(), before);
        bench.end(POOL);
    }

    #[test]
    fn a_capture_that_never_ended_is_forgotten_with_its_pool() {
        let mut bench = Bench::new("oomph", None);
        bench.begin(POOL);
        let block = bench.alloc(20, CAPTURED);
        bench.free(block);
        bench.release(POOL);
        assert_eq!((bench.arenas.routes.len(), bench.device.held_bytes()), (0, 0));
        bench.alloc(20, CAPTURED);
        assert!(bench.arenas.pools.is_empty());
    }
}

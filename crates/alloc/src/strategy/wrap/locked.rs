//! One strategy and its device behind one lock, shared by many threads.
//!
//! PyTorch's allocator does the same: one mutex per device, held during every call, driver calls
//! included. Each thread drives a view of the strategy and of the device. The thread's own device
//! calls (launches, events) take the same lock, because a device does not support concurrent
//! callers.

use std::sync::mpsc::{self, Receiver, SyncSender};

use spin::{Yield, mutex::SpinMutex};

use crate::device::{
    CallKind, CallLedger, CallTally, Capabilities, Compute, Device, DeviceError, DeviceProps, MemoryInfo, Patterned,
    Patterns, PhysicalId, PinnedHost, PoolId, PoolSettings, PoolUsage, StreamOrderedPools, Verified, VirtualMemory,
    wrap::{DriverAnswer, DriverCall, DriverReply, device_from_responses, value_of, with_driver_calls},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, EventSink, Freed, InitialLayout, Layout, Request, Stats, Strategy,
    StrategyError,
};
use oomph_base::{Address, EventId, Nanos, StreamId, ThreadId, Work};

/// The lock that callers of a strategy share. It yields instead of sleeping, because most calls are
/// shorter than a wake-up. A panic does not poison it: a strategy keeps its state sound through
/// every error, and a panic of an event sink must not take memory away from all other threads.
pub(in crate::strategy) type Lock<T> = SpinMutex<T, Yield>;

/// A strategy, its device and its event sink behind one lock, for any number of threads.
pub struct LockedStrategy<S, E> {
    inside: Lock<LockedParts<S, E>>,
}

struct LockedParts<S, E> {
    strategy: S,
    device: Box<dyn Device>,
    sink: E,
}

impl<S: Strategy, E: EventSink> LockedStrategy<S, E> {
    /// Puts the three behind one lock.
    pub fn new(strategy: S, device: Box<dyn Device>, sink: E) -> Self {
        LockedStrategy { inside: Lock::new(LockedParts { strategy, device, sink }) }
    }

    /// The three parts.
    pub fn into_parts(self) -> (S, Box<dyn Device>, E) {
        let LockedParts { strategy, device, sink } = self.inside.into_inner();
        (strategy, device, sink)
    }

    /// Makes calls under the lock.
    #[inline]
    pub fn with<R>(&self, call: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        let LockedParts { strategy, device, sink } = &mut *self.inside.lock();
        call(strategy, &mut Context { device: &mut **device, sink })
    }
}

/// One thread's view of a [`LockedStrategy`] strategy. The context of a call is ignored: device and
/// event sink are behind the lock.
pub struct SharedStrategy<'a, S, E> {
    locked: &'a LockedStrategy<S, E>,
    /// The counters after the last failed request, which is when the driver reads them.
    stats: Stats,
}

/// One thread's view of the device of a [`LockedStrategy`] strategy.
pub struct SharedDevice<'a, S, E> {
    locked: &'a LockedStrategy<S, E>,
    props: DeviceProps,
    /// Streams that all threads share, except the default one.
    common_streams: u16,
    /// How many of them this thread has created.
    known_streams: u16,
}

impl<S: Strategy, E: EventSink> LockedStrategy<S, E> {
    /// A view for one more thread. The first `common_streams` streams that a thread creates are the
    /// same for all threads and exist already; further ones belong to the thread.
    pub fn share(&self, common_streams: u16) -> (SharedStrategy<'_, S, E>, SharedDevice<'_, S, E>) {
        let (stats, props) = self.with(|strategy, cx| (strategy.stats(), cx.device.props().clone()));
        (SharedStrategy { locked: self, stats }, SharedDevice { locked: self, props, common_streams, known_streams: 0 })
    }
}

/// Methods of [`Strategy`] or [`Device`] that take the lock and call what is behind it.
macro_rules! under_lock {
    (cx: $(fn $name:ident($($argument:ident: $type:ty),*) -> $output:ty;)*) => {$(
        #[inline]
        fn $name(&mut self, _: &mut Context<'_>, $($argument: $type),*) -> Result<$output, StrategyError> {
            self.locked.with(|strategy, cx| strategy.$name(cx, $($argument),*))
        }
    )*};
    (&self: $(fn $name:ident($($argument:ident: $type:ty),*) -> $output:ty;)*) => {$(
        fn $name(&self, $($argument: $type),*) -> $output {
            self.with(|inner| inner.$name($($argument),*))
        }
    )*};
}

impl<S: Strategy, E: EventSink> SharedStrategy<'_, S, E> {
    fn with<R>(&self, call: impl FnOnce(&S) -> R) -> R {
        self.locked.with(|strategy, _| call(strategy))
    }
}

impl<S: Strategy, E: EventSink + Send> Strategy for SharedStrategy<'_, S, E> {
    #[inline]
    fn alloc(&mut self, _: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let (attempt, stats) = self.locked.with(|strategy, cx| {
            let attempt = strategy.alloc(cx, request);
            let failed = matches!(attempt, Ok(Attempt::OutOfMemory(_)));
            (attempt, failed.then(|| strategy.stats()))
        });
        if let Some(stats) = stats {
            self.stats = stats;
        }
        attempt
    }

    // A close closes it for all threads.
    under_lock! { cx:
        fn free(block: Block, caller: Caller) -> Freed;
        fn used_on(block: &Block, stream: StreamId) -> ();
        fn control(command: &Control<'_>) -> ();
        fn resume_from(initial: &InitialLayout) -> Option<Vec<Block>>;
        fn trim() -> ();
        fn close() -> ();
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    under_lock! { &self:
        fn largest_free(stream: StreamId) -> Option<u64>;
        fn layout() -> Option<Layout>;
        fn details() -> Vec<(&'static str, u64)>;
        fn requires() -> Capabilities;
        fn serves_pools() -> bool;
        fn trims() -> bool;
        fn fork() -> Option<Box<dyn Strategy>>;
    }
}

/// How many blocks of one thread wait for the next.
const MOST_RELAYED: usize = 16;

/// A thread's view of a strategy that sends its frees to the next thread and frees what the thread before it sends, as
/// producers and consumers do. The threads form a ring. A thread frees a block itself if the next one is behind by
/// 16 blocks.
pub struct RelayedFrees<S> {
    inner: S,
    thread: ThreadId,
    to_next: SyncSender<(Block, StreamId)>,
    from_last: Receiver<(Block, StreamId)>,
}

impl<S: Strategy> RelayedFrees<S> {
    /// A ring of all views.
    pub fn ring(views: Vec<S>) -> Vec<RelayedFrees<S>> {
        let (mut to_next, from_last): (Vec<_>, Vec<_>) = views.iter().map(|_| mpsc::sync_channel(MOST_RELAYED)).unzip();
        to_next.rotate_left(1.min(views.len()));
        let ends = to_next.into_iter().zip(from_last);
        let numbered = (0..).map(ThreadId).zip(views).zip(ends);
        numbered
            .map(|((thread, inner), (to_next, from_last))| RelayedFrees { inner, thread, to_next, from_last })
            .collect()
    }

    /// Frees what the thread before this one still sends, until it has ended.
    pub fn finish(self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let RelayedFrees { mut inner, thread, to_next, from_last } = self;
        drop(to_next);
        from_last.into_iter().try_for_each(|(block, stream)| inner.free(cx, block, Caller { stream, thread }).map(drop))
    }
}

impl<S: Strategy> Strategy for RelayedFrees<S> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        while let Ok((block, stream)) = self.from_last.try_recv() {
            self.inner.free(cx, block, Caller { stream, thread: self.thread })?;
        }
        self.inner.alloc(cx, request)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        match self.to_next.try_send((block, caller.stream)) {
            Ok(()) => Ok(Freed::Later),
            Err(_) => self.inner.free(cx, block, caller),
        }
    }

    forward!(self => self.inner; used_on control resume_from trim close views fork);
}

impl<S: Strategy, E: EventSink> SharedDevice<'_, S, E> {
    fn with<R>(&self, call: impl FnOnce(&mut dyn Device) -> R) -> R {
        self.locked.with(|_, cx| call(&mut *cx.device))
    }

    fn respond(&mut self, call: DriverCall) -> DriverAnswer {
        if matches!(call, DriverCall::StreamCreate { .. }) && self.known_streams < self.common_streams {
            self.known_streams += 1;
            let stream = StreamId(self.known_streams);
            return Ok(DriverReply::Stream(stream, self.with(|device| device.stream_handle(stream))));
        }
        self.with(|device| call.make(device))
    }
}

with_driver_calls! { device_from_responses! {
    ['a, S, E] SharedDevice<'a, S, E>, [S: Strategy, E: EventSink + Send],
    {
        fn props(&self) -> &DeviceProps {
            &self.props
        }
        fn elapse(&mut self, time: Nanos) {
            self.with(|device| device.elapse(time));
        }
        under_lock! { &self:
            fn held_bytes() -> u64;
            fn growth_bytes(bytes: u64) -> u64;
            fn free_bytes() -> u64;
            fn overhead_bytes() -> u64;
            fn stream_handle(stream: StreamId) -> u64;
            fn now() -> Nanos;
            fn ledger() -> CallLedger;
            fn calls() -> CallTally;
        }
    },
    {
        /// Returns the results for the blocks of all threads.
        fn verified(&mut self) -> Result<Verified, DeviceError> {
            self.with(|device| device.patterns()?.verified())
        }
    }
}}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::{
        STRATEGIES, Setup, Silent, StrategySpec,
        test_device::simulated,
        wrap::{AddressedStrategy, CheckedStrategy},
    };
    use oomph_base::{GIB, KIB, MIB, SiteId, ThreadId};

    fn locked(bytes: u64) -> LockedStrategy<CheckedStrategy<Box<dyn Strategy>>, Silent> {
        let device = simulated(bytes);
        let strategy = StrategySpec::from("caching").build(&Setup { props: device.props(), limit: None }).unwrap();
        LockedStrategy::new(CheckedStrategy::new(strategy), device, Silent)
    }

    fn request(bytes: u64, thread: u16) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(thread), site: SiteId(0) }
    }

    #[test]
    fn a_relayed_block_is_freed_by_the_next_thread() {
        let locked = locked(GIB);
        let (views, mut devices): (Vec<_>, Vec<_>) = (0..3).map(|_| locked.share(0)).unzip();
        let mut ring = RelayedFrees::ring(views);
        let live = || locked.with(|strategy, _| strategy.stats().allocs - strategy.stats().frees);
        let mut ask = |ring: &mut [RelayedFrees<_>], thread: usize| {
            let mut cx = Context { device: &mut devices[thread], sink: &mut Silent };
            match ring[thread].alloc(&mut cx, &request(KIB, thread as u16)).unwrap() {
                Attempt::Served(block, _) => ring[thread].free(&mut cx, block, Caller::default()).unwrap(),
                Attempt::OutOfMemory(_) => panic!("not served"),
            }
        };
        assert_eq!((ask(&mut ring, 0), live()), (Freed::Later, 1));
        // The third thread is not the next one.
        ask(&mut ring, 2);
        assert_eq!(live(), 2);
        // The second one frees the block of the first.
        ask(&mut ring, 1);
        assert_eq!(live(), 2);
        std::thread::scope(|scope| {
            for (view, mut device) in ring.into_iter().zip(devices) {
                scope.spawn(move || view.finish(&mut Context { device: &mut device, sink: &mut Silent }).unwrap());
            }
        });
        assert_eq!(live(), 0);
        locked.with(|strategy, _| assert!(strategy.is_sound(), "{:?}", strategy.violations()));
    }

    #[test]
    fn threads_share_one_strategy() {
        let locked = locked(4 * GIB);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (mut strategy, mut device) = locked.share(0);
                scope.spawn(move || {
                    let mut cx = Context { device: &mut device, sink: &mut Silent };
                    for round in 1..=200 {
                        let Ok(Attempt::Served(block, _)) = strategy.alloc(&mut cx, &request(round * KIB, thread))
                        else {
                            panic!("not served")
                        };
                        if let Ok(compute) = cx.device.compute() {
                            compute.launch(StreamId::DEFAULT, &Work::Spin { nanos: Nanos(1) }, &[]).unwrap();
                        }
                        strategy.free(&mut cx, block, Caller::default()).unwrap();
                    }
                });
            }
        });
        assert_eq!(locked.with(|strategy, _| strategy.stats()).allocs, 800);
        locked.with(|strategy, cx| strategy.close(cx)).unwrap();
        let (strategy, device, _) = locked.into_parts();
        assert_eq!(strategy.violations(), []);
        assert_eq!(device.held_bytes(), 0);
        assert_eq!(device.ledger().of(CallKind::Launch).count, 800);
    }

    #[test]
    fn threads_share_the_first_streams() {
        let mut device = simulated(GIB);
        assert_eq!(device.stream_create(0), Ok(StreamId(1)));
        let strategy = StrategySpec::from("direct").build(&Setup { props: device.props(), limit: None }).unwrap();
        let locked = LockedStrategy::new(strategy, device, Silent);
        let ((_, mut first), (_, mut second)) = (locked.share(1), locked.share(1));
        assert_eq!((first.stream_create(0), second.stream_create(0)), (Ok(StreamId(1)), Ok(StreamId(1))));
        assert_eq!((first.stream_create(0), second.stream_create(0)), (Ok(StreamId(2)), Ok(StreamId(3))));
    }

    #[test]
    fn counters_after_a_failed_request_cover_all_threads() {
        let locked = locked(1024 * MIB);
        let (mut first, mut device) = locked.share(0);
        let (mut second, _) = locked.share(0);
        let mut cx = Context { device: &mut device, sink: &mut Silent };
        first.alloc(&mut cx, &request(100 * MIB, 0)).unwrap();
        assert_eq!(second.stats().current.allocated, 0, "not asked since");
        assert!(matches!(second.alloc(&mut cx, &request(4 * GIB, 1)), Ok(Attempt::OutOfMemory(_))));
        assert_eq!(second.stats().current.allocated, 100 * MIB);
    }

    #[test]
    fn threads_share_every_strategy_and_free_by_address() {
        for entry in STRATEGIES {
            let device = simulated(4 * GIB);
            let spec = StrategySpec { name: entry.name.to_owned(), parameters: String::new() };
            let strategy = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
            let shared =
                LockedStrategy::new(AddressedStrategy::new(CheckedStrategy::new(strategy)), device, Vec::new());
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let shared = &shared;
                    scope.spawn(move || churn(shared, ThreadId(thread)));
                }
            });
            let stats = shared.with(|strategy, _| strategy.stats());
            assert_eq!((stats.allocs, stats.frees, stats.current.allocated), (800, 800, 0), "{}", entry.name);
            shared.with(|strategy, cx| strategy.close(cx)).unwrap();
            let (strategy, device, _) = shared.into_parts();
            assert_eq!(strategy.inner.violations(), [], "{}", entry.name);
            assert_eq!(device.held_bytes(), 0, "{}", entry.name);
        }
    }

    /// Holds a few blocks at any time, and gives the oldest back by its address alone.
    fn churn<S: Strategy, E: EventSink>(shared: &LockedStrategy<AddressedStrategy<S>, E>, thread: ThreadId) {
        let mut held = std::collections::VecDeque::new();
        for round in 0..200 {
            let bytes = 1 + (u64::from(thread.0) * 7919 + round * 104_729) % 300_000;
            let request = Request { bytes, stream: StreamId::DEFAULT, thread, site: SiteId(0) };
            let Attempt::Served(block, _) = shared.with(|strategy, cx| strategy.alloc(cx, &request)).unwrap() else {
                panic!("out of memory")
            };
            held.push_back(block.address);
            if held.len() > 5 {
                let address = held.pop_front().unwrap();
                let caller = Caller { thread, ..Caller::default() };
                shared.with(|strategy, cx| strategy.free_by_address(cx, address, caller)).unwrap();
            }
        }
        for address in held {
            shared.with(|strategy, cx| strategy.free_by_address(cx, address, Caller::default())).unwrap();
        }
    }
}

//! One thread's view of a [`Locked`] strategy and of its device.
//!
//! Whoever drives a strategy holds it and its device apart, each for itself alone. Here many threads each hold such a
//! pair, and behind every pair is the same lock: a call takes it, is carried out by the one strategy on the one device,
//! and gives it back. Device calls of the thread's own (launches, events) take the same lock, because a device is not
//! made for two callers at once.

use super::Locked;
use crate::device::{
    CallLedger, CallTally, Capabilities, Compute, Device, DeviceError, DeviceProps, MemoryInfo, Patterned, Patterns,
    PinnedHost, StreamOrderedPools, Verified, VirtualMemory,
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, EventSink, Freed, InitialLayout, Layout, Request, Stats, Strategy,
    StrategyError,
};
use oomph_base::{Address, EventId, Nanos, StreamId, Work};

/// The strategy, as one of its threads sees it. The context that comes with a call is not looked at: the device that
/// counts is behind the lock, and so is the event sink.
pub struct SharedStrategy<'a, S, E> {
    locked: &'a Locked<S, E>,
    /// The books as of the last request that failed, when somebody may ask why: a reference to the true ones cannot
    /// leave the lock.
    stats: Stats,
}

/// The device, as one of the threads sees it.
pub struct SharedDevice<'a, S, E> {
    locked: &'a Locked<S, E>,
    props: DeviceProps,
    /// Streams beside the default one that all threads have in common.
    common_streams: u16,
    /// How many of them this thread knows.
    known_streams: u16,
}

impl<S: Strategy, E: EventSink> Locked<S, E> {
    /// A pair for one more thread to drive. The first `common_streams` streams that any thread makes are the same for
    /// all and exist already; further ones are a thread's own.
    pub fn share(&self, common_streams: u16) -> (SharedStrategy<'_, S, E>, SharedDevice<'_, S, E>) {
        let (stats, props) = self.with(|strategy, cx| (strategy.stats(), cx.device.props().clone()));
        (SharedStrategy { locked: self, stats }, SharedDevice { locked: self, props, common_streams, known_streams: 0 })
    }
}

impl<S: Strategy, E: EventSink + Send> Strategy for SharedStrategy<'_, S, E> {
    #[inline]
    fn alloc(&mut self, _: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let attempt = self.locked.alloc(request);
        if matches!(attempt, Ok(Attempt::OutOfMemory(_))) {
            self.stats = self.locked.stats();
        }
        attempt
    }

    #[inline]
    fn free(&mut self, _: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        self.locked.free(block, caller)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.locked.used_on(block, stream)
    }

    fn control(&mut self, _: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.locked.control(command)
    }

    fn resume_from(
        &mut self,
        _: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        self.locked.with(|strategy, cx| strategy.resume_from(cx, initial))
    }

    fn trim(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        self.locked.trim()
    }

    /// Closes it for all threads.
    fn close(&mut self, _: &mut Context<'_>) -> Result<(), StrategyError> {
        self.locked.close()
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.locked.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        self.locked.layout()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.locked.details()
    }

    fn requires(&self) -> Capabilities {
        self.locked.requires()
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        self.locked.fork()
    }
}

impl<S: Strategy, E: EventSink> SharedDevice<'_, S, E> {
    fn with<R>(&self, call: impl FnOnce(&mut dyn Device) -> R) -> R {
        self.locked.with(|_, cx| call(&mut *cx.device))
    }
}

impl<S: Strategy, E: EventSink + Send> Device for SharedDevice<'_, S, E> {
    fn props(&self) -> &DeviceProps {
        &self.props
    }

    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        self.with(|device| device.alloc(bytes))
    }

    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        self.with(|device| device.free(address))
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        self.with(|device| device.memory_info())
    }

    fn held_bytes(&self) -> u64 {
        self.with(|device| device.held_bytes())
    }

    fn growth_bytes(&self, bytes: u64) -> u64 {
        self.with(|device| device.growth_bytes(bytes))
    }

    fn free_bytes(&self) -> u64 {
        self.with(|device| device.free_bytes())
    }

    fn overhead_bytes(&self) -> u64 {
        self.with(|device| device.overhead_bytes())
    }

    fn stream_create(&mut self, known_as: u64) -> Result<StreamId, DeviceError> {
        if self.known_streams < self.common_streams {
            self.known_streams += 1;
            return Ok(StreamId(self.known_streams));
        }
        self.with(|device| device.stream_create(known_as))
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.with(|device| device.stream_handle(stream))
    }

    fn stream_synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.with(|device| device.stream_synchronize(stream))
    }

    fn stream_wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.with(|device| device.stream_wait_event(stream, event))
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.with(|device| device.synchronize())
    }

    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        self.with(|device| device.event_create())
    }

    fn event_record(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.with(|device| device.event_record(event, stream))
    }

    fn event_query(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.with(|device| device.event_query(event))
    }

    fn event_synchronize(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.with(|device| device.event_synchronize(event))
    }

    fn event_destroy(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.with(|device| device.event_destroy(event))
    }

    fn now(&self) -> Nanos {
        self.with(|device| device.now())
    }

    fn elapse(&mut self, time: Nanos) {
        self.with(|device| device.elapse(time));
    }

    fn ledger(&self) -> CallLedger {
        self.with(|device| device.ledger())
    }

    fn calls(&self) -> CallTally {
        self.with(|device| device.calls())
    }

    /// What strategies need a device for, they find on the one behind the lock.
    fn virtual_memory(&mut self) -> Option<&mut dyn VirtualMemory> {
        None
    }

    /// As for virtual memory.
    fn stream_ordered_pools(&mut self) -> Option<&mut dyn StreamOrderedPools> {
        None
    }

    fn pinned_host(&mut self) -> Option<&mut dyn PinnedHost> {
        if self.props.capabilities.pinned_host { Some(self) } else { None }
    }

    fn compute(&mut self) -> Option<&mut dyn Compute> {
        if self.props.capabilities.compute { Some(self) } else { None }
    }

    fn patterns(&mut self) -> Option<&mut dyn Patterns> {
        if self.props.capabilities.patterns { Some(self) } else { None }
    }
}

impl<S: Strategy, E: EventSink + Send> PinnedHost for SharedDevice<'_, S, E> {
    fn host_alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        self.with(|device| device.require_pinned_host()?.host_alloc(bytes))
    }

    fn host_free(&mut self, address: Address) -> Result<(), DeviceError> {
        self.with(|device| device.require_pinned_host()?.host_free(address))
    }
}

impl<S: Strategy, E: EventSink + Send> Compute for SharedDevice<'_, S, E> {
    fn launch(&mut self, stream: StreamId, work: &Work, operands: &[(Address, u64)]) -> Result<(), DeviceError> {
        self.with(|device| device.require_compute()?.launch(stream, work, operands))
    }
}

impl<S: Strategy, E: EventSink + Send> Patterns for SharedDevice<'_, S, E> {
    fn fill_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.with(|device| device.require_patterns()?.fill_blocks(stream, blocks))
    }

    fn verify_blocks(&mut self, stream: StreamId, blocks: &[Patterned]) -> Result<(), DeviceError> {
        self.with(|device| device.require_patterns()?.verify_blocks(stream, blocks))
    }

    /// What the blocks of all threads have come to goes to whoever asks.
    fn verified(&mut self) -> Result<Verified, DeviceError> {
        self.with(|device| device.require_patterns()?.verified())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use crate::strategy::{Setup, Silent, StrategySpec, test_device::simulated, wrap::Checked};
    use oomph_base::{GIB, KIB, MIB, SiteId, ThreadId};

    fn locked(bytes: u64) -> Locked<Checked<Box<dyn Strategy>>, Silent> {
        let device = simulated(bytes);
        let strategy = StrategySpec::from("caching").build(&Setup { props: device.props(), limit: None }).unwrap();
        Locked::new(Checked::new(strategy), device, Silent)
    }

    fn request(bytes: u64, thread: u16) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(thread), site: SiteId(0) }
    }

    #[test]
    fn threads_that_each_drive_a_pair_of_their_own_share_one_strategy() {
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
                        if let Some(compute) = cx.device.compute() {
                            compute.launch(StreamId::DEFAULT, &Work::Spin { nanos: Nanos(1) }, &[]).unwrap();
                        }
                        strategy.free(&mut cx, block, Caller::default()).unwrap();
                    }
                });
            }
        });
        assert_eq!(locked.stats().allocs, 800);
        locked.close().unwrap();
        let (strategy, device, _) = locked.into_parts();
        assert_eq!(strategy.violations(), []);
        assert_eq!(device.held_bytes(), 0);
        assert_eq!(device.ledger().of(CallKind::Launch).count, 800);
    }

    #[test]
    fn threads_have_the_first_streams_in_common() {
        let mut device = simulated(GIB);
        assert_eq!(device.stream_create(0), Ok(StreamId(1)));
        let strategy = StrategySpec::from("direct").build(&Setup { props: device.props(), limit: None }).unwrap();
        let locked = Locked::new(strategy, device, Silent);
        let ((_, mut first), (_, mut second)) = (locked.share(1), locked.share(1));
        assert_eq!((first.stream_create(0), second.stream_create(0)), (Ok(StreamId(1)), Ok(StreamId(1))));
        assert_eq!((first.stream_create(0), second.stream_create(0)), (Ok(StreamId(2)), Ok(StreamId(3))));
    }

    #[test]
    fn after_a_failed_request_the_books_tell_what_all_threads_hold() {
        let locked = locked(1024 * MIB);
        let (mut first, mut device) = locked.share(0);
        let (mut second, _) = locked.share(0);
        let mut cx = Context { device: &mut device, sink: &mut Silent };
        first.alloc(&mut cx, &request(100 * MIB, 0)).unwrap();
        assert_eq!(second.stats().current.allocated, 0, "not asked since");
        assert!(matches!(second.alloc(&mut cx, &request(4 * GIB, 1)), Ok(Attempt::OutOfMemory(_))));
        assert_eq!(second.stats().current.allocated, 100 * MIB);
    }
}

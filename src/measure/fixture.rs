//! A device and a strategy so small that every figure of a test can be computed by hand.

use crate::{
    base::{Address, EventId, KIB, Nanos, StreamId, round_up},
    device::{
        CallKind, CallLedger, CallTally, Capabilities, Compute, Device, DeviceClock, DeviceError, DeviceProps,
        MemoryInfo, Patterns, PinnedHost, StreamOrderedPools, VirtualMemory,
    },
    strategy::{
        Attempt, Block, BlockState, BlockView, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome,
        Refusal, Request, SegmentView, Shortage, Stats, Strategy, StrategyError, StrategyEvent,
    },
};

/// What an allocation costs on [`TinyDevice`].
pub(crate) const ALLOC_NS: u64 = 100;
/// What a free costs on [`TinyDevice`].
pub(crate) const FREE_NS: u64 = 40;
/// Context and libraries of [`TinyDevice`].
pub(crate) const OVERHEAD: u64 = 5 * KIB;

/// Memory in 1 KiB pages and nothing else; every call has a fixed price.
pub(crate) struct TinyDevice {
    props: DeviceProps,
    held: Vec<(Address, u64)>,
    next_address: u64,
    clock: Nanos,
    ledger: CallLedger,
}

impl TinyDevice {
    pub(crate) fn new(capacity: u64) -> TinyDevice {
        TinyDevice {
            props: DeviceProps {
                name: "tiny".to_owned(),
                ordinal: 0,
                total_bytes: capacity,
                page_bytes: KIB,
                granularity_bytes: KIB,
                context_bytes: OVERHEAD,
                capabilities: Capabilities::NONE,
                clock: DeviceClock::Virtual,
            },
            held: Vec::new(),
            next_address: KIB,
            clock: Nanos(1_000_000),
            ledger: CallLedger::default(),
        }
    }

    fn spend(&mut self, kind: CallKind, ns: u64, failed: bool) {
        self.clock += Nanos(ns);
        self.ledger.note(kind, Nanos(ns), failed);
    }
}

impl Device for TinyDevice {
    fn props(&self) -> &DeviceProps {
        &self.props
    }
    fn alloc(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let failed = self.growth_bytes(bytes) > self.free_bytes();
        self.spend(CallKind::MemAlloc, ALLOC_NS, failed);
        if failed {
            return Err(DeviceError::OutOfMemory { call: CallKind::MemAlloc, requested: bytes });
        }
        let address = Address(self.next_address);
        self.next_address += round_up(bytes, KIB);
        self.held.push((address, round_up(bytes, KIB)));
        Ok(address)
    }
    fn free(&mut self, address: Address) -> Result<(), DeviceError> {
        self.spend(CallKind::MemFree, FREE_NS, false);
        self.held.retain(|(held, _)| *held != address);
        Ok(())
    }
    fn memory_info(&mut self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: self.free_bytes(), total: self.props.total_bytes })
    }
    fn held_bytes(&self) -> u64 {
        self.held.iter().map(|(_, bytes)| bytes).sum()
    }
    fn growth_bytes(&self, bytes: u64) -> u64 {
        round_up(bytes, KIB)
    }
    fn free_bytes(&self) -> u64 {
        self.props.total_bytes - self.held_bytes()
    }
    fn overhead_bytes(&self) -> u64 {
        OVERHEAD
    }
    fn stream_create(&mut self, _: u64) -> Result<StreamId, DeviceError> {
        Ok(StreamId(1))
    }
    fn stream_handle(&self, stream: StreamId) -> u64 {
        u64::from(stream.0)
    }
    fn stream_synchronize(&mut self, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn stream_wait_event(&mut self, _: StreamId, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::Driver { call: CallKind::CtxSynchronize, name: "CUDA_ERROR_TINY".to_owned() })
    }
    fn event_create(&mut self) -> Result<EventId, DeviceError> {
        Ok(EventId(0))
    }
    fn event_record(&mut self, _: EventId, _: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn event_query(&mut self, _: EventId) -> Result<bool, DeviceError> {
        Ok(true)
    }
    fn event_synchronize(&mut self, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn event_destroy(&mut self, _: EventId) -> Result<(), DeviceError> {
        Ok(())
    }
    fn now(&self) -> Nanos {
        self.clock
    }
    fn elapse(&mut self, time: Nanos) {
        self.clock += time;
    }
    fn ledger(&self) -> CallLedger {
        self.ledger.clone()
    }
    fn calls(&self) -> CallTally {
        self.ledger.total()
    }
    fn virtual_memory(&mut self) -> Option<&mut dyn VirtualMemory> {
        None
    }
    fn stream_ordered_pools(&mut self) -> Option<&mut dyn StreamOrderedPools> {
        None
    }
    fn pinned_host(&mut self) -> Option<&mut dyn PinnedHost> {
        None
    }
    fn compute(&mut self) -> Option<&mut dyn Compute> {
        None
    }
    fn patterns(&mut self) -> Option<&mut dyn Patterns> {
        None
    }
}

/// One block a segment, both as large as the request rounded up to 256 bytes. Freed segments are kept and handed out
/// whole to the next request that fits; a block used on another stream is never reusable before the end.
#[derive(Clone, Default)]
pub(crate) struct TinyStrategy {
    segments: Vec<Segment>,
    stats: Stats,
    /// Set by tests: `close` keeps this many segments, as a broken strategy would.
    pub(crate) forgets: usize,
    /// Set by tests: what the strategy claims to need.
    pub(crate) requires: Capabilities,
}

#[derive(Clone)]
struct Segment {
    address: Address,
    bytes: u64,
    block: BlockView,
    shared: bool,
}

impl TinyStrategy {
    fn release_free(&mut self, cx: &mut Context<'_>) -> Result<(), DeviceError> {
        for segment in self.segments.extract_if(.., |segment| segment.block.state == BlockState::Free) {
            cx.device.free(segment.address)?;
            self.stats.on_release(segment.bytes, 1);
        }
        Ok(())
    }

    fn find(&mut self, block: &Block) -> Result<&mut Segment, StrategyError> {
        let unknown = StrategyError::UnknownBlock { address: block.address, slot: block.slot };
        self.segments.iter_mut().find(|segment| segment.address == block.address).ok_or(unknown)
    }
}

impl Strategy for TinyStrategy {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let size = round_up(request.bytes, 256);
        let fits = |segment: &Segment| segment.block.state == BlockState::Free && segment.bytes >= size;
        let mut outcome = Outcome::Hit;
        let place = match self.segments.iter().position(fits) {
            Some(place) => place,
            None => {
                outcome = Outcome::NewSegment;
                let mut taken = cx.device.alloc(size);
                if taken.is_err() {
                    outcome = Outcome::ReleaseAndRetry;
                    self.stats.retries += 1;
                    cx.sink.event(StrategyEvent::Retry { rounded: size });
                    self.release_free(cx)?;
                    taken = cx.device.alloc(size);
                }
                let Ok(address) = taken else {
                    self.stats.ooms += 1;
                    let (refused_by, device_free) = (Refusal::Device, None);
                    return Ok(Attempt::OutOfMemory(Shortage { rounded: size, asked: size, refused_by, device_free }));
                };
                self.stats.on_reserve(size, 1);
                let block = BlockView { address, size, requested: 0, state: BlockState::Free };
                self.segments.push(Segment { address, bytes: size, block, shared: false });
                self.segments.len() - 1
            }
        };
        let segment = &mut self.segments[place];
        let size = segment.bytes;
        segment.block =
            BlockView { address: segment.address, size, requested: request.bytes, state: BlockState::Allocated };
        self.stats.on_alloc(request.bytes, size);
        Ok(Attempt::Served(Block { address: segment.address, size, slot: 0, generation: 0 }, outcome))
    }

    fn free(&mut self, _: &mut Context<'_>, block: Block, _: Caller) -> Result<Freed, StrategyError> {
        let segment = self.find(&block)?;
        let (shared, requested) = (segment.shared, segment.block.requested);
        segment.block.state = if shared { BlockState::Pending } else { BlockState::Free };
        self.stats.on_free(block.size);
        if shared {
            return Ok(Freed::Later);
        }
        self.stats.on_reusable(requested, block.size);
        Ok(Freed::Now)
    }

    fn used_on(&mut self, _: &mut Context<'_>, block: &Block, _: StreamId) -> Result<(), StrategyError> {
        self.find(block)?.shared = true;
        Ok(())
    }

    fn control(&mut self, _: &mut Context<'_>, _: &Control<'_>) -> Result<(), StrategyError> {
        Ok(())
    }

    fn resume_from(&mut self, _: &mut Context<'_>, _: &InitialLayout) -> Result<Option<Vec<Block>>, StrategyError> {
        Ok(None)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        Ok(self.release_free(cx)?)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        for segment in self.segments.drain(..).skip(self.forgets) {
            cx.device.free(segment.address)?;
        }
        self.stats = Stats::default();
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn largest_free(&self, _: StreamId) -> Option<u64> {
        let free = self.segments.iter().filter(|segment| segment.block.state == BlockState::Free);
        Some(free.map(|segment| segment.bytes).max().unwrap_or(0))
    }

    fn layout(&self) -> Option<Layout> {
        let segments = self.segments.iter().map(|segment| SegmentView {
            address: segment.address,
            bytes: segment.bytes,
            stream: StreamId::DEFAULT,
            pool: "shelf".into(),
            pool_id: (0, 0),
            mapped: false,
            alias: false,
            blocks: vec![segment.block],
        });
        Some(Layout { segments: segments.collect() })
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        vec![("segments_on_the_shelf", self.segments.len() as u64)]
    }

    fn requires(&self) -> Capabilities {
        self.requires
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.clone()))
    }
}

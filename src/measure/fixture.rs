//! A device and a strategy so small that every figure of a test can be computed by hand.

use crate::{
    base::{Address, KIB, Nanos, StreamId, round_up},
    device::{CallKind, Capabilities, DeviceError, wrap::stand_in::StandInDevice},
    strategy::{
        Attempt, Block, BlockState, BlockView, Caller, Context, Control, Freed, InitialLayout, Layout, Outcome,
        Refusal, Request, SegmentView, Shortage, Stats, Strategy, StrategyError, StrategyEvent,
    },
};

/// What an allocation costs on [`tiny_device`].
pub(crate) const ALLOC_NS: u64 = 100;
/// What a free costs on [`tiny_device`].
pub(crate) const FREE_NS: u64 = 40;
/// Context and libraries of [`tiny_device`].
pub(crate) const OVERHEAD: u64 = 5 * KIB;

/// Memory in 1 KiB pages and nothing else: allocations and frees have a fixed price, and waiting for
/// all streams fails.
pub(crate) fn tiny_device(capacity: u64) -> StandInDevice {
    let mut device = StandInDevice::new(capacity, capacity, false);
    device.props.name = "tiny".to_owned();
    (device.props.page_bytes, device.props.granularity_bytes, device.step_bytes) = (KIB, KIB, KIB);
    device.props.context_bytes = OVERHEAD;
    device.props.capabilities = Capabilities::NONE;
    device.broken = Some(CallKind::CtxSynchronize);
    device.costs = |kind| match kind {
        CallKind::MemAlloc => Nanos(ALLOC_NS),
        CallKind::MemFree => Nanos(FREE_NS),
        _ => Nanos::ZERO,
    };
    device.now = Nanos(1_000_000);
    device
}

/// One block per segment, both as large as the request rounded up to 256 bytes. Freed segments are kept and handed out
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

    fn serves_pools(&self) -> bool {
        false
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

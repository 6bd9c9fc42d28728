//! A pooling strategy on a device with consecutive addresses, for worked examples.

use crate::device::{
    CallKind, Device,
    wrap::stand_in::{FIRST_SEGMENT, StandInDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Outcome, Request, Setup, Shortage, Strategy, StrategyEvent, StrategySpec,
};
use oomph_base::{SiteId, StreamId, ThreadId};

/// A strategy, its device and its events.
pub(crate) struct PoolBench {
    pub(crate) strategy: Box<dyn Strategy>,
    pub(crate) device: StandInDevice,
    events: Vec<StrategyEvent>,
}

impl PoolBench {
    /// A new strategy on a device of `bytes`.
    pub(crate) fn new(spec: &str, bytes: u64) -> PoolBench {
        let device = StandInDevice::new(bytes, bytes, false);
        let strategy = StrategySpec::from(spec).build(&Setup { props: device.props(), limit: None }).unwrap();
        PoolBench { strategy, device, events: Vec::new() }
    }

    /// What a request on a stream comes to.
    pub(crate) fn ask(&mut self, bytes: u64, stream: u16) -> Result<(Block, Outcome), Shortage> {
        let request = Request { bytes, stream: StreamId(stream), thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: &mut self.device, sink: &mut self.events };
        match self.strategy.alloc(&mut cx, &request).unwrap() {
            Attempt::Served(block, outcome) => Ok((block, outcome)),
            Attempt::OutOfMemory(shortage) => Err(shortage),
        }
    }

    /// A block on the default stream.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Block {
        self.ask(bytes, 0).unwrap().0
    }

    /// Gives a block back.
    pub(crate) fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut self.device, sink: &mut self.events };
        self.strategy.free(&mut cx, block, Caller::default()).unwrap();
    }

    /// PyTorch's `empty_cache`.
    pub(crate) fn trim(&mut self) {
        let mut cx = Context { device: &mut self.device, sink: &mut self.events };
        self.strategy.trim(&mut cx).unwrap();
    }

    /// How far into the device's row of addresses a block lies, and how large it is.
    pub(crate) fn place(block: Block) -> (u64, u64) {
        (block.address.0 - FIRST_SEGMENT, block.size)
    }

    /// The sizes of all regions that were taken since the last time, in order, those given back
    /// negative.
    pub(crate) fn regions(&mut self) -> Vec<i64> {
        let sizes = self.events.drain(..).filter_map(|event| match event {
            StrategyEvent::SegmentAlloc { bytes, .. } => Some(bytes as i64),
            StrategyEvent::SegmentFree { bytes, .. } => Some(-(bytes as i64)),
            _ => None,
        });
        sizes.collect()
    }

    /// How often a driver call was made.
    pub(crate) fn calls(&self, kind: CallKind) -> u64 {
        self.device.ledger().of(kind).count
    }
}

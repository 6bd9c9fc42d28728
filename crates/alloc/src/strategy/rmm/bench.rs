//! A strategy on a device with consecutive addresses, for worked examples. Blocks are identified by
//! their distance from the first region.

use crate::device::{
    CallKind, Device,
    wrap::stand_in::{FIRST_SEGMENT, StandInDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Outcome, Refusal, Request, Setup, Strategy, StrategyEvent, StrategySpec,
};
use oomph_base::{SiteId, StreamId, ThreadId};

/// A strategy with its device, its events and its live blocks.
pub(super) struct RmmBench {
    pub(super) strategy: Box<dyn Strategy>,
    pub(super) device: StandInDevice,
    events: Vec<StrategyEvent>,
    live: Vec<Block>,
    /// Who asks and frees.
    pub(super) thread: ThreadId,
}

impl RmmBench {
    /// The strategy of this name on a device of `capacity` bytes.
    pub(super) fn new(spec: &str, capacity: u64) -> RmmBench {
        let device = StandInDevice::new(capacity, capacity, false);
        let strategy = StrategySpec::from(spec).build(&Setup { props: device.props(), limit: None }).unwrap();
        RmmBench { strategy, device, events: Vec::new(), live: Vec::new(), thread: ThreadId(0) }
    }

    /// Asks for memory: where the block lies and how it was found, or who refused it.
    pub(super) fn ask(&mut self, bytes: u64, stream: u16) -> Result<(u64, Outcome), Refusal> {
        let request = Request { bytes, stream: StreamId(stream), thread: self.thread, site: SiteId(0) };
        let mut cx = Context { device: &mut self.device, sink: &mut self.events };
        match self.strategy.alloc(&mut cx, &request).unwrap() {
            Attempt::Served(block, outcome) => {
                self.live.push(block);
                Ok((block.address.0 - FIRST_SEGMENT, outcome))
            }
            Attempt::OutOfMemory(shortage) => Err(shortage.refused_by),
        }
    }

    /// Asks for memory that is there: where the block lies.
    pub(super) fn alloc(&mut self, bytes: u64, stream: u16) -> u64 {
        self.ask(bytes, stream).unwrap().0
    }

    /// Gives back the block at a place.
    pub(super) fn free(&mut self, at: u64, stream: u16) {
        let place = self.live.iter().position(|block| block.address.0 - FIRST_SEGMENT == at).unwrap();
        let block = self.live.swap_remove(place);
        let mut cx = Context { device: &mut self.device, sink: &mut self.events };
        let caller = Caller { stream: StreamId(stream), thread: self.thread };
        self.strategy.free(&mut cx, block, caller).unwrap();
    }

    /// What was taken from the device so far (above zero) and given back to it (below), in order.
    pub(super) fn growth(&self) -> Vec<i64> {
        let steps = self.events.iter().filter_map(|event| match *event {
            StrategyEvent::SegmentAlloc { bytes, .. } => Some(bytes as i64),
            StrategyEvent::SegmentFree { bytes, .. } => Some(-(bytes as i64)),
            _ => None,
        });
        steps.collect()
    }

    /// Driver calls of a kind so far.
    pub(super) fn calls(&self, kind: CallKind) -> u64 {
        self.device.ledger().of(kind).count
    }

    /// The free blocks, each with its place and size, in address order.
    pub(super) fn free_blocks(&self) -> Vec<(u64, u64)> {
        let layout = self.strategy.layout().unwrap();
        let free = layout.blocks().filter(|block| block.state == crate::strategy::BlockState::Free);
        free.map(|block| (block.address.0 - FIRST_SEGMENT, block.size)).collect()
    }
}

//! A strategy that goes on with memory that was there before: its first requests get the blocks that it inherited.
//!
//! `replay` puts it over a strategy when a recording began in the middle, because the story of such a recording first asks
//! for the blocks that were there. Whoever declines the heritage serves these requests like any others.

use std::collections::VecDeque;

use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, Heritage, Outcome, Request, Strategy, StrategyError,
};
use oomph_base::StreamId;

/// A strategy and what it is offered to take over.
pub struct Heir<'a> {
    inner: &'a mut dyn Strategy,
    /// Offered at the first request: before, the device may lack the streams.
    offered: Option<Heritage>,
    /// For the requests that come first, in order.
    inherited: VecDeque<Block>,
    /// Requests that got a block of those.
    given: u64,
}

impl<'a> Heir<'a> {
    /// Offers a heritage to a strategy that has no memory yet.
    pub fn new(inner: &'a mut dyn Strategy, heritage: Heritage) -> Heir<'a> {
        Heir { inner, offered: Some(heritage), inherited: VecDeque::new(), given: 0 }
    }

    /// How many requests got a block that was inherited.
    #[must_use]
    pub fn given(&self) -> u64 {
        self.given
    }
}

impl Strategy for Heir<'_> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if let Some(heritage) = self.offered.take() {
            self.inherited = self.inner.adopt(cx, &heritage)?.unwrap_or_default().into();
        }
        match self.inherited.pop_front() {
            Some(block) => {
                self.given += 1;
                Ok(Attempt::Served(block, Outcome::Hit))
            }
            None => self.inner.alloc(cx, request),
        }
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        self.inner.free(cx, block, caller)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.inner.used_on(cx, block, stream)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.inner.control(cx, command)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.inner.trim(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.inherited.clear();
        self.inner.close(cx)
    }

    views_of_inner!();

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        Device,
        sim::{SimConfig, SimDevice},
    };
    use crate::strategy::{BlockState, Setup, Silent, StrategySpec};
    use oomph_base::{MIB, SiteId, ThreadId};
    use oomph_pytorch::AllocatorSettings;

    fn request(bytes: u64) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) }
    }

    /// Three blocks and, but for the first, what they leave behind when the second is freed.
    fn heritage(device: &mut SimDevice) -> Heritage {
        let mut strategy = build("caching", device);
        let mut cx = Context { device, sink: &mut Silent };
        let mut blocks = Vec::new();
        for bytes in [3 * MIB, 5 * MIB, 4 * MIB] {
            let Ok(Attempt::Served(block, _)) = strategy.alloc(&mut cx, &request(bytes)) else { panic!("no memory") };
            blocks.push(block);
        }
        strategy.free(&mut cx, blocks[1], Caller::default()).unwrap();
        Heritage { layout: strategy.layout().unwrap(), settings: AllocatorSettings::default() }
    }

    fn build(strategy: &str, device: &SimDevice) -> Box<dyn Strategy> {
        StrategySpec::from(strategy).build(&Setup { props: device.props(), limit: None }).unwrap()
    }

    fn sim() -> SimDevice {
        SimDevice::new(SimConfig::default()).unwrap()
    }

    #[test]
    fn the_first_requests_get_what_was_there_and_the_next_one_the_hole_between() {
        let heritage = heritage(&mut sim());
        let mut device = sim();
        let mut strategy = build("caching", &device);
        let mut heir = Heir::new(&mut *strategy, heritage.clone());
        let mut cx = Context { device: &mut device, sink: &mut Silent };
        for bytes in [3 * MIB, 4 * MIB, 5 * MIB] {
            let attempt = heir.alloc(&mut cx, &request(bytes)).unwrap();
            assert!(matches!(attempt, Attempt::Served(block, Outcome::Hit) if block.size == bytes), "{attempt:?}");
        }
        assert_eq!(heir.given(), 2);
        let layout = heir.layout().unwrap();
        let states: Vec<BlockState> = layout.blocks().take(3).map(|block| block.state).collect();
        assert_eq!((layout.segments.len(), &states[..]), (1, &[BlockState::Allocated; 3][..]));
    }

    #[test]
    fn whoever_declines_serves_everybody_as_ever() {
        let heritage = heritage(&mut sim());
        for other in ["direct", "caching:roundup_power2_divisions:4", "pool"] {
            let mut device = sim();
            let mut strategy = build(other, &device);
            let mut heir = Heir::new(&mut *strategy, heritage.clone());
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            let attempt = heir.alloc(&mut cx, &request(3 * MIB)).unwrap();
            assert!(matches!(attempt, Attempt::Served(..)), "{other}: {attempt:?}");
            assert_eq!((heir.stats().allocs, heir.stats().live_blocks, heir.given()), (1, 1, 0), "{other}");
        }
    }
}

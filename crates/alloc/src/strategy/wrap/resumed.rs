//! Continues a strategy from the memory that a recording began with.
//!
//! `replay` puts it over a strategy when a trace has an initial layout. Such a trace first requests
//! the blocks that are live in the layout. A strategy that declines the layout serves these
//! requests like any others.

use std::collections::VecDeque;

use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Outcome, Request, Strategy, StrategyError,
};
use oomph_base::StreamId;

/// A strategy that is asked to continue from an initial layout.
pub struct ResumedStrategy<'a> {
    inner: &'a mut dyn Strategy,
    /// Passed on at the first request: before that, the device may lack the streams.
    initial: Option<InitialLayout>,
    /// The live blocks of the layout, for the first requests, in order.
    blocks: VecDeque<Block>,
    /// How many requests got such a block.
    pub given: u64,
}

impl<'a> ResumedStrategy<'a> {
    /// `inner` has no memory yet.
    pub fn new(inner: &'a mut dyn Strategy, initial: InitialLayout) -> ResumedStrategy<'a> {
        ResumedStrategy { inner, initial: Some(initial), blocks: VecDeque::new(), given: 0 }
    }
}

impl Strategy for ResumedStrategy<'_> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        if let Some(initial) = self.initial.take() {
            self.blocks = self.inner.resume_from(cx, &initial)?.unwrap_or_default().into();
        }
        match self.blocks.pop_front() {
            Some(block) => {
                self.given += 1;
                Ok(Attempt::Served(block, Outcome::Hit))
            }
            None => self.inner.alloc(cx, request),
        }
    }

    forward!(self => self.inner; free used_on control resume_from trim views);

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.blocks.clear();
        self.inner.close(cx)
    }

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
    use crate::strategy::{BlockState, Setup, Silent, StrategySpec, wrap::CheckedStrategy};
    use oomph_base::{MIB, SiteId, ThreadId};
    use oomph_pytorch::AllocatorSettings;

    fn request(bytes: u64) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, thread: ThreadId(0), site: SiteId(0) }
    }

    /// Three blocks in one segment, of which the second has been freed.
    fn initial(device: &mut SimDevice) -> InitialLayout {
        let mut strategy = build("caching", device);
        let mut cx = Context { device, sink: &mut Silent };
        let mut blocks = Vec::new();
        for bytes in [3 * MIB, 5 * MIB, 4 * MIB] {
            let Ok(Attempt::Served(block, _)) = strategy.alloc(&mut cx, &request(bytes)) else { panic!("no memory") };
            blocks.push(block);
        }
        strategy.free(&mut cx, blocks[1], Caller::default()).unwrap();
        InitialLayout { layout: strategy.layout().unwrap(), settings: AllocatorSettings::default(), limit: None }
    }

    fn build(strategy: &str, device: &SimDevice) -> Box<dyn Strategy> {
        StrategySpec::from(strategy).build(&Setup { props: device.props(), limit: None }).unwrap()
    }

    fn sim() -> SimDevice {
        SimDevice::new(SimConfig::default()).unwrap()
    }

    /// The first requests get the blocks of the layout, the next one the hole between them.
    #[test]
    fn caching_resumes_alone_and_within_wrappers() {
        let initial = initial(&mut sim());
        for spec in ["caching", "address:caching"] {
            let mut device = sim();
            let mut strategy = CheckedStrategy::new(build(spec, &device));
            let mut resumed = ResumedStrategy::new(&mut strategy, initial.clone());
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            let mut blocks = Vec::new();
            for bytes in [3 * MIB, 4 * MIB, 5 * MIB] {
                let Ok(Attempt::Served(block, Outcome::Hit)) = resumed.alloc(&mut cx, &request(bytes)) else {
                    panic!("{spec}: no cached block for {bytes} bytes")
                };
                assert_eq!(block.size, bytes, "{spec}");
                blocks.push(block);
            }
            assert_eq!(resumed.given, 2, "{spec}");
            let layout = resumed.layout().unwrap();
            let states: Vec<BlockState> = layout.blocks().take(3).map(|block| block.state).collect();
            assert_eq!((layout.segments.len(), &states[..]), (1, &[BlockState::Allocated; 3][..]), "{spec}");
            for block in blocks {
                assert_eq!(resumed.free(&mut cx, block, Caller::default()), Ok(Freed::Now), "{spec}");
            }
            resumed.close(&mut cx).unwrap();
            assert_eq!(strategy.violations(), [], "{spec}");
            assert_eq!(device.held_bytes(), 0, "{spec}");
        }
    }

    #[test]
    fn other_strategies_serve_all_requests_themselves() {
        let initial = initial(&mut sim());
        for other in ["direct", "caching:roundup_power2_divisions:4", "pool"] {
            let mut device = sim();
            let mut strategy = build(other, &device);
            let mut resumed = ResumedStrategy::new(&mut *strategy, initial.clone());
            let mut cx = Context { device: &mut device, sink: &mut Silent };
            let attempt = resumed.alloc(&mut cx, &request(3 * MIB)).unwrap();
            assert!(matches!(attempt, Attempt::Served(..)), "{other}: {attempt:?}");
            assert_eq!((resumed.stats().allocs, resumed.stats().live_blocks, resumed.given), (1, 1, 0), "{other}");
        }
    }
}

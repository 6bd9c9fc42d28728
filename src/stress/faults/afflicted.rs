//! A strategy that something befalls: its driver calls fail, its memory is taken, its events never complete.
//!
//! It is a strategy itself, so that it is watched and driven like any other, and only what the strategy asks of the device
//! can fail, never what the program asks. Whoever plays the program holds a [`Chart`] of it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
};

use super::{
    affliction::Affliction,
    hindrance::{Hindrance, Tallies},
};
use crate::{
    base::{Address, StreamId},
    device::{Capabilities, Device, wrap::InterceptedDevice},
    strategy::{
        Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Request, Stats, Strategy, StrategyError,
    },
};

/// A strategy under an affliction.
pub(super) struct Afflicted {
    inner: Box<dyn Strategy>,
    chart: Chart,
}

/// What is known of an afflicted strategy from outside.
#[derive(Clone, Default)]
pub(super) struct Chart {
    shared: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    hindrance: Hindrance,
    /// Blocks that the program holds, and who would give them back.
    live: BTreeMap<Address, (Block, Caller)>,
}

impl Chart {
    /// From now on all is well.
    pub(super) fn lift(&self, device: &mut dyn Device) {
        self.state().hindrance.lift(device);
    }

    /// What the strategy asked of the device, refused calls included.
    pub(super) fn asked(&self) -> Tallies {
        *self.state().hindrance.asked()
    }

    /// How often the strategy was called.
    pub(super) fn moments(&self) -> u64 {
        self.state().hindrance.moments()
    }

    /// Driver calls that were made to fail.
    pub(super) fn injected(&self) -> u64 {
        self.state().hindrance.injected()
    }

    /// Whether the strategy asked for an event again and again in one call.
    pub(super) fn spins(&self) -> bool {
        self.state().hindrance.spins()
    }

    /// How much of the device another process has taken, kept up to date.
    pub(super) fn taken_bytes(&self) -> Arc<AtomicU64> {
        self.state().hindrance.taken_bytes()
    }

    /// Blocks that the program holds, and who would give them back.
    pub(super) fn live(&self) -> Vec<(Block, Caller)> {
        self.state().live.values().copied().collect()
    }

    /// A strategy that panics leaves nothing half done in here.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Afflicted {
    /// Afflicts a strategy, or only looks on.
    pub(super) fn new(inner: Box<dyn Strategy>, affliction: Option<Affliction>) -> (Afflicted, Chart) {
        let chart = Chart::default();
        chart.state().hindrance = Hindrance::new(affliction);
        (Afflicted { inner, chart: chart.clone() }, chart)
    }

    fn call<R>(
        &mut self,
        cx: &mut Context<'_>,
        call: impl FnOnce(&mut dyn Strategy, &mut Context<'_>) -> Result<R, StrategyError>,
    ) -> Result<R, StrategyError> {
        let mut state = self.chart.state();
        state.hindrance.next_moment(cx.device);
        let mut device = InterceptedDevice::new(&mut *cx.device, &mut state.hindrance);
        call(&mut *self.inner, &mut Context { device: &mut device, sink: cx.sink })
    }
}

impl Strategy for Afflicted {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let attempt = self.call(cx, |inner, cx| inner.alloc(cx, request))?;
        if let Attempt::Served(block, _) = attempt {
            let caller = Caller { stream: request.stream, thread: request.thread };
            self.chart.state().live.insert(block.address, (block, caller));
        }
        Ok(attempt)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let freed = self.call(cx, |inner, cx| inner.free(cx, block, caller))?;
        self.chart.state().live.remove(&block.address);
        Ok(freed)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.used_on(cx, block, stream))
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.control(cx, command))
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        self.call(cx, |inner, cx| inner.resume_from(cx, initial))
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.trim(cx))
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.call(cx, |inner, cx| inner.close(cx))?;
        self.chart.state().live.clear();
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.inner.largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        self.inner.layout()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.inner.details()
    }

    fn requires(&self) -> Capabilities {
        self.inner.requires()
    }

    /// What befalls the one does not befall the other.
    fn fork(&self) -> Option<Box<dyn Strategy>> {
        self.inner.fork()
    }
}

//! One strategy and its device behind one lock, shared by many threads.
//!
//! PyTorch's allocator does the same: one mutex a device, held for the whole of every call, driver calls included.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{
    device::{Capabilities, Device},
    strategy::{
        Attempt, Block, Caller, Context, Control, EventSink, Freed, Layout, Request, Stats, Strategy, StrategyError,
    },
    unit::StreamId,
};

/// A strategy that any number of threads may call. It has the methods of [`Strategy`], on a shared reference and
/// without a context, which lies behind the lock as well.
pub struct Locked<S, D, E> {
    inside: Mutex<Inside<S, D, E>>,
}

struct Inside<S, D, E> {
    strategy: S,
    device: D,
    sink: E,
}

impl<S: Strategy, D: Device, E: EventSink> Locked<S, D, E> {
    /// Locks the three up together.
    pub fn new(strategy: S, device: D, sink: E) -> Self {
        Locked { inside: Mutex::new(Inside { strategy, device, sink }) }
    }

    /// What was locked up.
    pub fn into_parts(self) -> (S, D, E) {
        let Inside { strategy, device, sink } = self.inside.into_inner().unwrap_or_else(PoisonError::into_inner);
        (strategy, device, sink)
    }

    /// Several calls under one lock, or one that the strategy has beyond the trait.
    pub fn with<R>(&self, call: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        let Inside { strategy, device, sink } = &mut *self.lock();
        call(strategy, &mut Context { device, sink })
    }

    /// A strategy keeps its state sound through every error, so a panic elsewhere in the process (an event sink's, a
    /// closure's in [`with`](Locked::with)) does not take memory away from all other threads.
    fn lock(&self) -> MutexGuard<'_, Inside<S, D, E>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Strategy::alloc`].
    pub fn alloc(&self, request: &Request) -> Result<Attempt, StrategyError> {
        self.with(|strategy, cx| strategy.alloc(cx, request))
    }

    /// [`Strategy::free`].
    pub fn free(&self, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        self.with(|strategy, cx| strategy.free(cx, block, caller))
    }

    /// [`Strategy::used_on`].
    pub fn used_on(&self, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.with(|strategy, cx| strategy.used_on(cx, block, stream))
    }

    /// [`Strategy::control`].
    pub fn control(&self, command: &Control<'_>) -> Result<(), StrategyError> {
        self.with(|strategy, cx| strategy.control(cx, command))
    }

    /// [`Strategy::trim`].
    pub fn trim(&self) -> Result<(), StrategyError> {
        self.with(|strategy, cx| strategy.trim(cx))
    }

    /// [`Strategy::close`].
    pub fn close(&self) -> Result<(), StrategyError> {
        self.with(|strategy, cx| strategy.close(cx))
    }

    /// A copy of [`Strategy::stats`].
    pub fn stats(&self) -> Stats {
        *self.lock().strategy.stats()
    }

    /// [`Strategy::largest_free`].
    pub fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.lock().strategy.largest_free(stream)
    }

    /// [`Strategy::layout`].
    pub fn layout(&self) -> Option<Layout> {
        self.lock().strategy.layout()
    }

    /// [`Strategy::details`].
    pub fn details(&self) -> Vec<(&'static str, u64)> {
        self.lock().strategy.details()
    }

    /// [`Strategy::requires`].
    pub fn requires(&self) -> Capabilities {
        self.lock().strategy.requires()
    }

    /// [`Strategy::fork`].
    pub fn fork(&self) -> Option<Box<dyn Strategy>> {
        self.lock().strategy.fork()
    }
}

//! One strategy and its device behind one lock, shared by many threads.
//!
//! PyTorch's allocator does the same: one mutex a device, held for the whole of every call, driver calls included. Calls
//! are short, so whoever finds the lock taken offers its core to others and tries again: being put to sleep and woken up
//! would take longer than most waits.

use spin::{Yield, mutex::SpinMutex};

use crate::device::{Capabilities, Device};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, EventSink, Freed, Layout, Request, Stats, Strategy, StrategyError,
};
use oomph_base::StreamId;

/// The lock that callers of a strategy share. A panic under it leaves it open: a strategy keeps its state sound through
/// every error, and an event sink's panic must not take memory away from all other threads.
pub(in crate::strategy) type Lock<T> = SpinMutex<T, Yield>;

/// A strategy that any number of threads may call. It has the methods of [`Strategy`], on a shared reference and
/// without a context, which lies behind the lock as well.
pub struct Locked<S, E> {
    inside: Lock<Inside<S, E>>,
}

struct Inside<S, E> {
    strategy: S,
    device: Box<dyn Device>,
    sink: E,
}

impl<S: Strategy, E: EventSink> Locked<S, E> {
    /// Locks the three up together.
    pub fn new(strategy: S, device: Box<dyn Device>, sink: E) -> Self {
        Locked { inside: Lock::new(Inside { strategy, device, sink }) }
    }

    /// What was locked up.
    pub fn into_parts(self) -> (S, Box<dyn Device>, E) {
        let Inside { strategy, device, sink } = self.inside.into_inner();
        (strategy, device, sink)
    }

    /// Several calls under one lock, or one that the strategy has beyond the trait.
    #[inline]
    pub fn with<R>(&self, call: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        let Inside { strategy, device, sink } = &mut *self.inside.lock();
        call(strategy, &mut Context { device: &mut **device, sink })
    }

    /// [`Strategy::alloc`].
    #[inline]
    pub fn alloc(&self, request: &Request) -> Result<Attempt, StrategyError> {
        self.with(|strategy, cx| strategy.alloc(cx, request))
    }

    /// [`Strategy::free`].
    #[inline]
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

    /// [`Strategy::stats`].
    pub fn stats(&self) -> Stats {
        self.inside.lock().strategy.stats()
    }

    /// [`Strategy::largest_free`].
    pub fn largest_free(&self, stream: StreamId) -> Option<u64> {
        self.inside.lock().strategy.largest_free(stream)
    }

    /// [`Strategy::layout`].
    pub fn layout(&self) -> Option<Layout> {
        self.inside.lock().strategy.layout()
    }

    /// [`Strategy::details`].
    pub fn details(&self) -> Vec<(&'static str, u64)> {
        self.inside.lock().strategy.details()
    }

    /// [`Strategy::requires`].
    pub fn requires(&self) -> Capabilities {
        self.inside.lock().strategy.requires()
    }

    /// [`Strategy::fork`].
    pub fn fork(&self) -> Option<Box<dyn Strategy>> {
        self.inside.lock().strategy.fork()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{
        STRATEGIES, Setup, StrategySpec,
        test_device::simulated,
        wrap::{Addressed, Checked},
    };
    use oomph_base::{GIB, SiteId, ThreadId};

    #[test]
    fn many_threads_share_every_strategy_and_free_by_address() {
        for entry in STRATEGIES {
            let device = simulated(4 * GIB);
            let spec = StrategySpec { name: entry.name.to_owned(), parameters: String::new() };
            let strategy = spec.build(&Setup { props: device.props(), limit: None }).unwrap();
            let shared = Locked::new(Addressed::new(Checked::new(strategy)), device, Vec::new());
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let shared = &shared;
                    scope.spawn(move || churn(shared, ThreadId(thread)));
                }
            });
            let stats = shared.stats();
            assert_eq!((stats.allocs, stats.frees, stats.current.allocated), (800, 800, 0), "{}", entry.name);
            shared.close().unwrap();
            let (strategy, device, _) = shared.into_parts();
            assert_eq!(strategy.into_inner().violations(), [], "{}", entry.name);
            assert_eq!(device.held_bytes(), 0, "{}", entry.name);
        }
    }

    /// Holds a few blocks at any time, and gives the oldest back by its address alone.
    fn churn<S: Strategy, E: EventSink>(shared: &Locked<Addressed<S>, E>, thread: ThreadId) {
        let mut held = std::collections::VecDeque::new();
        for round in 0..200 {
            let bytes = 1 + (u64::from(thread.0) * 7919 + round * 104_729) % 300_000;
            let request = Request { bytes, stream: StreamId::DEFAULT, thread, site: SiteId(0) };
            let Attempt::Served(block, _) = shared.alloc(&request).unwrap() else { panic!("out of memory") };
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

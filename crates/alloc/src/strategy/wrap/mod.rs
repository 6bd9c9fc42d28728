//! Wrappers over any strategy. Each adds one thing and forwards every call.
//!
//! - [`CheckedStrategy`]: checks the contract and collects violations.
//! - [`AddressedStrategy`]: blocks can be freed by their address alone.
//! - [`PoolArenas`]: one instance of a strategy for each private pool.
//! - [`LockedStrategy`]: one strategy and its device, shared by many threads; each thread drives a
//!   [`SharedStrategy`] and a [`SharedDevice`].
//! - [`RelayedFrees`]: a thread's view whose blocks are freed by the next thread.
//! - [`ResumedStrategy`]: continues from an initial layout; the first requests get the blocks that
//!   are live in it.
//!
//! Wrappers nest, as in `LockedStrategy<AddressedStrategy<CheckedStrategy<_>>>`, and accept a
//! concrete strategy or a boxed one. They know only the trait.

/// Forwards methods of [`Strategy`] to an inner strategy: `forward!(self => self.inner; trim
/// stats)`.
macro_rules! forward {
    ($self:ident => $inner:expr; $($method:ident)*) => { $(forward_one!($method $self $inner);)* };
}

/// One method of [`forward`].
macro_rules! forward_one {
    (alloc $self:ident $inner:expr) => {
        fn alloc(&mut $self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
            $inner.alloc(cx, request)
        }
    };
    (free $self:ident $inner:expr) => {
        fn free(&mut $self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
            $inner.free(cx, block, caller)
        }
    };
    (used_on $self:ident $inner:expr) => {
        fn used_on(&mut $self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
            $inner.used_on(cx, block, stream)
        }
    };
    (control $self:ident $inner:expr) => {
        fn control(&mut $self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
            $inner.control(cx, command)
        }
    };
    (resume_from $self:ident $inner:expr) => {
        fn resume_from(
            &mut $self,
            cx: &mut Context<'_>,
            initial: &InitialLayout,
        ) -> Result<Option<Vec<Block>>, StrategyError> {
            $inner.resume_from(cx, initial)
        }
    };
    (fork $self:ident $inner:expr) => {
        fn fork(&$self) -> Option<Box<dyn Strategy>> {
            $inner.fork()
        }
    };
    (views $self:ident $inner:expr) => {
        fn largest_free(&$self, stream: StreamId) -> Option<u64> {
            $inner.largest_free(stream)
        }

        fn stats(&$self) -> $crate::strategy::Stats {
            $inner.stats()
        }

        fn layout(&$self) -> Option<$crate::strategy::Layout> {
            $inner.layout()
        }

        fn details(&$self) -> Vec<(&'static str, u64)> {
            $inner.details()
        }

        fn flaws(&$self) -> Vec<$crate::strategy::wrap::ConformanceFinding> {
            $inner.flaws()
        }

        fn call_from_threads(
            &mut $self,
            cx: &mut Context<'_>,
            threads: u64,
            calls: u64,
        ) -> Result<Option<$crate::strategy::ThreadedCalls>, StrategyError> {
            $inner.call_from_threads(cx, threads, calls)
        }

        fn requires(&$self) -> $crate::device::Capabilities {
            $inner.requires()
        }

        fn serves_pools(&$self) -> bool {
            $inner.serves_pools()
        }

        fn trims(&$self) -> bool {
            $inner.trims()
        }
    };
    ($method:ident $self:ident $inner:expr) => {
        fn $method(&mut $self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
            $inner.$method(cx)
        }
    };
}

pub(super) mod addressed;
mod arenas;
mod checked;
mod locked;
mod resumed;
mod shadow;

pub use addressed::AddressedStrategy;
pub use arenas::PoolArenas;
pub use checked::{CheckedStrategy, ConformanceFinding, rules};
use locked::Lock;
pub use locked::{LockedStrategy, RelayedFrees, SharedDevice, SharedStrategy};
pub use resumed::ResumedStrategy;

use super::{Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Request, Strategy, StrategyError};
use oomph_base::StreamId;

/// The registry builds boxed strategies, which can be wrapped like any other.
impl<S: Strategy + ?Sized> Strategy for Box<S> {
    forward!(self => (**self); alloc free used_on control resume_from trim close views fork);
}

//! Wrappers over any strategy. Each adds one thing and forwards every call.
//!
//! - [`CheckedStrategy`]: checks the contract and collects violations.
//! - [`AddressedStrategy`]: blocks can be freed by their address alone.
//! - [`LockedStrategy`]: one strategy and its device, shared by many threads; each thread drives a
//!   [`SharedStrategy`] and a [`SharedDevice`].
//! - [`ResumedStrategy`]: continues from an initial layout; the first requests get the blocks that
//!   are live in it.
//!
//! Wrappers nest, as in `LockedStrategy<AddressedStrategy<CheckedStrategy<_>>>`, and accept a concrete strategy or a boxed
//! one. They know only the trait.

/// The read-only methods of [`Strategy`], forwarded to the field `inner`.
macro_rules! views_of_inner {
    () => {
        fn stats(&self) -> $crate::strategy::Stats {
            self.inner.stats()
        }

        fn largest_free(&self, stream: oomph_base::StreamId) -> Option<u64> {
            self.inner.largest_free(stream)
        }

        fn layout(&self) -> Option<$crate::strategy::Layout> {
            self.inner.layout()
        }

        fn details(&self) -> Vec<(&'static str, u64)> {
            self.inner.details()
        }

        fn requires(&self) -> $crate::device::Capabilities {
            self.inner.requires()
        }
    };
}

pub(super) mod addressed;
mod checked;
mod locked;
mod resumed;
mod shadow;

pub use addressed::AddressedStrategy;
pub use checked::{CheckedStrategy, ContractRule, ContractViolation};
use locked::Lock;
pub use locked::{LockedStrategy, SharedDevice, SharedStrategy};
pub use resumed::ResumedStrategy;

use super::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Request, Stats, Strategy, StrategyError,
};
use crate::device::Capabilities;
use oomph_base::StreamId;

/// The registry builds boxed strategies, which can be wrapped like any other.
impl<S: Strategy + ?Sized> Strategy for Box<S> {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        (**self).alloc(cx, request)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        (**self).free(cx, block, caller)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        (**self).used_on(cx, block, stream)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        (**self).control(cx, command)
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        (**self).resume_from(cx, initial)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        (**self).trim(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        (**self).close(cx)
    }

    fn stats(&self) -> Stats {
        (**self).stats()
    }

    fn largest_free(&self, stream: StreamId) -> Option<u64> {
        (**self).largest_free(stream)
    }

    fn layout(&self) -> Option<Layout> {
        (**self).layout()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        (**self).details()
    }

    fn requires(&self) -> Capabilities {
        (**self).requires()
    }

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        (**self).fork()
    }
}

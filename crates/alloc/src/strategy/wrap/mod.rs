//! Wrappers over any strategy: each adds one thing and passes every call on.
//!
//! - [`Checked`]: watches the contract and collects violations.
//! - [`Addressed`]: blocks can be given back by their address alone.
//! - [`Locked`]: one strategy and its device, shared by many threads; [`SharedStrategy`] and [`SharedDevice`] are what
//!   each of the threads drives.
//! - [`ResumedStrategy`]: continues from an initial layout; the first requests get the blocks that are live in it.
//!
//! Wrappers nest, `Locked<Addressed<Checked<_>>>`, and take a concrete strategy or a boxed one. They know the trait
//! and no strategy in particular.

/// The methods of [`Strategy`] that only look, passed on to the field `inner`: no wrapper has anything to add to them.
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
pub(super) use views_of_inner;

mod address_table;
mod addressed;
mod audit;
mod backing;
mod checked;
mod locked;
mod resumed;
mod shadow;
mod shared;

pub use addressed::Addressed;
pub use checked::{Checked, Rule, Violation};
pub(super) use locked::Lock;
pub use locked::Locked;
pub use resumed::ResumedStrategy;
pub use shared::{SharedDevice, SharedStrategy};

use super::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Layout, Request, Stats, Strategy, StrategyError,
};
use crate::device::Capabilities;
use oomph_base::StreamId;

/// What the registry builds is a strategy too, so that it can be wrapped.
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

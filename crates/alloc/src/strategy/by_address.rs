//! `address:INNER`: any strategy, called as PyTorch's allocator is called.
//!
//! PyTorch's callers hold a pointer and no handle: every call takes a lock, and every free looks the pointer up in a
//! table. This wrapper does both around another strategy, so that its speed can be compared with PyTorch's like with
//! like. Decisions are those of the inner strategy.

use super::{
    Attempt, Block, Built, Caller, Context, Control, Freed, InitialLayout, Parameter, Request, Setup, Strategy,
    StrategyEntry, StrategyError, StrategySpec,
    wrap::{Addressed, Lock, views_of_inner},
};
use oomph_base::StreamId;

/// The registry's line.
pub(super) const ENTRY: StrategyEntry = StrategyEntry {
    name: "address",
    summary: "another strategy, called by address and under a lock as PyTorch's allocator is",
    origin: "the calling convention of PyTorch's raw_alloc and raw_delete",
    parameters: &[Parameter {
        name: "INNER",
        values: "any strategy with its parameters",
        default: "caching",
        help: "which strategy serves the requests",
    }],
    variants: &[],
    build,
};

fn build(parameters: &str, setup: &Setup<'_>) -> Built {
    let inner = StrategySpec::from(if parameters.is_empty() { "caching" } else { parameters });
    Ok(Box::new(ByAddress { lock: Lock::new(()), inner: Addressed::new(inner.build(setup)?) }))
}

/// A strategy behind a lock and an address table.
pub struct ByAddress {
    /// Guards nothing that the compiler knows of: taking it is the point.
    lock: Lock<()>,
    inner: Addressed<Box<dyn Strategy>>,
}

impl Strategy for ByAddress {
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        let _guard = self.lock.lock();
        self.inner.alloc(cx, request)
    }

    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        let _guard = self.lock.lock();
        self.inner.free(cx, block, caller)
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        let _guard = self.lock.lock();
        self.inner.used_on(cx, block, stream)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        let _guard = self.lock.lock();
        self.inner.control(cx, command)
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        let _guard = self.lock.lock();
        self.inner.resume_from(cx, initial)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let _guard = self.lock.lock();
        self.inner.trim(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        let _guard = self.lock.lock();
        self.inner.close(cx)
    }

    views_of_inner!();

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(ByAddress { lock: Lock::new(()), inner: self.inner.fork_addressed()? }))
    }
}

//! The private pools of a trace, as commands to a strategy.

use std::collections::HashSet;

use crate::{
    strategy::{Context, Control, Strategy, StrategyError},
    trace::torch::{DEFAULT_POOL, PoolKey},
};

/// The pools that a trace uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolScopes {
    /// The private pool that requests use now.
    current: Option<PoolKey>,
    /// Pools that were used and not released.
    held: HashSet<PoolKey>,
    /// How often the trace was repeated. Pools of an earlier round are other pools.
    round: u64,
}

impl PoolScopes {
    /// Requests from here on use `pool`.
    pub(crate) fn enter(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
        pool: PoolKey,
    ) -> Result<(), StrategyError> {
        if pool == self.current() {
            return Ok(());
        }
        if let Some(pool) = self.current.take() {
            strategy.control(cx, &Control::PoolEnd { pool })?;
            // A scope is a user of its pool.
            strategy.control(cx, &Control::PoolRelease { pool })?;
        }
        if pool == DEFAULT_POOL {
            return Ok(());
        }
        let pool = self.of_this_round(pool);
        if self.held.insert(pool) {
            strategy.control(cx, &Control::PoolRetain { pool, use_on_oom: false })?;
        }
        strategy.control(cx, &Control::PoolBegin { pool, stream: None })?;
        self.current = Some(pool);
        Ok(())
    }

    /// The pool that requests use now.
    pub(crate) fn current(&self) -> PoolKey {
        self.current.map_or(DEFAULT_POOL, |(first, second)| (first, second.wrapping_sub(self.round << 32)))
    }

    /// The program gives up a pool.
    pub(crate) fn release(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
        pool: PoolKey,
        trims: bool,
    ) -> Result<(), StrategyError> {
        let pool = self.of_this_round(pool);
        if self.current == Some(pool) {
            self.enter(strategy, cx, DEFAULT_POOL)?;
        }
        if !self.held.remove(&pool) {
            // Nothing used it yet. A pool of an initial layout has a user.
            strategy.control(cx, &Control::PoolRetain { pool, use_on_oom: false })?;
        }
        strategy.control(cx, &Control::PoolRelease { pool })?;
        if trims {
            strategy.control(cx, &Control::PoolTrim { pool })?;
        }
        Ok(())
    }

    /// The program has ended, and runs again.
    pub(crate) fn next_round(
        &mut self,
        strategy: &mut dyn Strategy,
        cx: &mut Context<'_>,
    ) -> Result<(), StrategyError> {
        self.enter(strategy, cx, DEFAULT_POOL)?;
        let mut held: Vec<PoolKey> = self.held.drain().collect();
        held.sort_unstable();
        for pool in held {
            strategy.control(cx, &Control::PoolRelease { pool })?;
        }
        self.round += 1;
        Ok(())
    }

    fn of_this_round(&self, (first, second): PoolKey) -> PoolKey {
        (first, second.wrapping_add(self.round << 32))
    }
}

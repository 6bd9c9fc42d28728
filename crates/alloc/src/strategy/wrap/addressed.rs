//! Lets callers who have only a pointer, as the plugin ABI does, give blocks back by address.
//!
//! A handle makes `free` a table lookup by index; a pointer must first be found. PyTorch keeps such a table too and
//! looks blocks up in it under its lock, so a fair timing of its `free` includes one: this wrapper.

use super::address_table::AddressTable;
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Freed, InitialLayout, Request, Strategy, StrategyError,
};
use oomph_base::{Address, StreamId};

/// A strategy whose blocks can be named by address.
#[derive(Clone, Debug)]
pub struct Addressed<S> {
    inner: S,
    live: AddressTable,
}

impl<S: Strategy> Addressed<S> {
    /// `inner` has no live blocks yet.
    pub fn new(inner: S) -> Self {
        Addressed { inner, live: AddressTable::default() }
    }

    /// The strategy inside.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// The strategy inside, to be looked at.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The strategy inside. What is allocated or freed behind the table's back cannot be named by address.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The live block that starts at `address`, but for its size.
    fn block_at(&self, address: Address) -> Result<Block, StrategyError> {
        self.live.get(address).ok_or(StrategyError::UnknownBlock { address, slot: u32::MAX })
    }

    /// [`Strategy::free`] of the block that starts at `address`.
    pub fn free_by_address(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
    ) -> Result<Freed, StrategyError> {
        self.free_found(cx, address, caller, |_| true)
    }

    /// A copy whose type is known, as [`Strategy::fork`] makes it.
    pub fn fork_addressed(&self) -> Option<Addressed<Box<dyn Strategy>>> {
        Some(Addressed { inner: self.inner.fork()?, live: self.live.clone() })
    }

    /// One search in the table for both questions: is it live, and is it the one that is meant.
    #[inline]
    fn free_found(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        caller: Caller,
        is_meant: impl FnOnce(&Block) -> bool,
    ) -> Result<Freed, StrategyError> {
        let Some(block) = self.live.remove(address) else {
            return Err(StrategyError::UnknownBlock { address, slot: u32::MAX });
        };
        if !is_meant(&block) {
            self.put_back(block);
            return Err(StrategyError::UnknownBlock { address, slot: block.slot });
        }
        match self.inner.free(cx, block, caller) {
            Ok(freed) => Ok(freed),
            Err(error) => Err(self.put_back_after(block, error)),
        }
    }

    #[cold]
    fn put_back_after(&mut self, block: Block, error: StrategyError) -> StrategyError {
        self.put_back(block);
        error
    }

    /// A block that could not be freed is still live.
    #[cold]
    fn put_back(&mut self, block: Block) {
        self.live.insert(&block);
    }

    /// [`Strategy::used_on`] of the block that starts at `address`.
    pub fn used_on_by_address(
        &mut self,
        cx: &mut Context<'_>,
        address: Address,
        stream: StreamId,
    ) -> Result<(), StrategyError> {
        let block = self.block_at(address)?;
        self.inner.used_on(cx, &block, stream)
    }
}

impl<S: Strategy> Strategy for Addressed<S> {
    #[inline]
    fn alloc(&mut self, cx: &mut Context<'_>, request: &Request) -> Result<Attempt, StrategyError> {
        // Taken apart and put together again: passed on as a whole it would be copied.
        match self.inner.alloc(cx, request) {
            Ok(Attempt::Served(block, outcome)) => {
                self.live.insert(&block);
                Ok(Attempt::Served(block, outcome))
            }
            other => other,
        }
    }

    #[inline]
    fn free(&mut self, cx: &mut Context<'_>, block: Block, caller: Caller) -> Result<Freed, StrategyError> {
        self.free_found(cx, block.address, caller, |found| {
            found.slot == block.slot && found.generation == block.generation
        })
    }

    fn used_on(&mut self, cx: &mut Context<'_>, block: &Block, stream: StreamId) -> Result<(), StrategyError> {
        self.inner.used_on(cx, block, stream)
    }

    fn control(&mut self, cx: &mut Context<'_>, command: &Control<'_>) -> Result<(), StrategyError> {
        self.inner.control(cx, command)
    }

    fn resume_from(
        &mut self,
        cx: &mut Context<'_>,
        initial: &InitialLayout,
    ) -> Result<Option<Vec<Block>>, StrategyError> {
        let resumed = self.inner.resume_from(cx, initial)?;
        resumed.iter().flatten().for_each(|block| self.live.insert(block));
        Ok(resumed)
    }

    fn trim(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.inner.trim(cx)
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Result<(), StrategyError> {
        self.inner.close(cx)?;
        self.live = AddressTable::default();
        Ok(())
    }

    views_of_inner!();

    fn fork(&self) -> Option<Box<dyn Strategy>> {
        Some(Box::new(self.fork_addressed()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::{Silent, null::Null, test_device::simulated};
    use oomph_base::{MIB, SiteId, ThreadId};

    #[test]
    fn an_address_is_good_for_one_free() {
        let mut device = simulated(64 * MIB);
        let mut cx = Context { device: &mut *device, sink: &mut Silent };
        let mut strategy = Addressed::new(Null::default());
        let request = Request { bytes: 512, stream: StreamId(0), thread: ThreadId(0), site: SiteId(0) };
        let Attempt::Served(block, _) = strategy.alloc(&mut cx, &request).unwrap() else { panic!("out of memory") };
        assert_eq!(strategy.block_at(block.address).map(|found| found.slot), Ok(block.slot));
        strategy.used_on_by_address(&mut cx, block.address, StreamId(1)).unwrap();
        let caller = Caller::default();
        assert!(strategy.free_by_address(&mut cx, block.address.offset(256), caller).is_err());
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Ok(Freed::Now));
        let unknown = StrategyError::UnknownBlock { address: block.address, slot: u32::MAX };
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Err(unknown.clone()));
        strategy.alloc(&mut cx, &request).unwrap();
        strategy.close(&mut cx).unwrap();
        assert_eq!(strategy.free_by_address(&mut cx, block.address, caller), Err(unknown));
    }
}

//! The memory that a reader may take, so that a small hostile file cannot fill the machine.

use std::mem::size_of;

/// The remaining memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryBudget {
    left: u64,
    whole: u64,
}

/// A file needs more memory than the budget allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what it describes needs more than {} of memory", oomph_base::Bytes(*.0))]
pub struct OutOfBudget(pub u64);

impl MemoryBudget {
    /// Enough for about 25 million trace entries.
    pub(crate) const DEFAULT: MemoryBudget = MemoryBudget::of(4 << 30);

    pub(crate) const fn of(bytes: u64) -> MemoryBudget {
        MemoryBudget { left: bytes, whole: bytes }
    }

    /// Takes `bytes` from the budget.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), OutOfBudget> {
        match self.left.checked_sub(bytes as u64) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(OutOfBudget(self.whole)),
        }
    }

    /// Pushes, and charges the growth of the vector.
    #[inline]
    pub(crate) fn push<T>(&mut self, to: &mut Vec<T>, item: T) -> Result<(), OutOfBudget> {
        if to.len() == to.capacity() {
            self.grow(to, 1)?;
        }
        to.push(item);
        Ok(())
    }

    /// Appends, and charges the growth of the vector.
    pub(crate) fn extend<T: Copy>(&mut self, to: &mut Vec<T>, items: &[T]) -> Result<(), OutOfBudget> {
        if to.capacity() - to.len() < items.len() {
            self.grow(to, items.len())?;
        }
        to.extend_from_slice(items);
        Ok(())
    }

    #[cold]
    fn grow<T>(&mut self, vector: &mut Vec<T>, least: usize) -> Result<(), OutOfBudget> {
        let more = vector.capacity().max(least).max(16);
        self.charge(more.saturating_mul(size_of::<T>()))?;
        vector.reserve_exact(vector.capacity() - vector.len() + more);
        Ok(())
    }
}

//! The memory that a reader may take, so that a small hostile file cannot fill the machine.

use std::{fs, mem::size_of, path::Path};

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
    /// For input of unknown size: enough for about 25 million trace entries.
    pub(crate) const DEFAULT: MemoryBudget = MemoryBudget::of(4 << 30);
    /// What every file may take: enough for about 1.6 million trace entries.
    const SMALLEST_BYTES: u64 = 256 << 20;
    /// What each byte of a file, compressed or not, may take in addition. Entries take three times their bytes in a pickle,
    /// and the most regular recordings compress to one hundredth.
    const BYTES_PER_FILE_BYTE: u64 = 512;

    /// The same for logs of calls. An event takes 24 bytes, but a replay takes several times the memory of its trace.
    const SMALLEST_LOG_BYTES: u64 = 64 << 20;
    const BYTES_PER_LOG_BYTE: u64 = 128;

    /// For the content of a recording: a small file must not fill the machine.
    pub(crate) fn for_file(path: &Path) -> MemoryBudget {
        MemoryBudget::within(path, MemoryBudget::SMALLEST_BYTES, MemoryBudget::BYTES_PER_FILE_BYTE)
    }

    /// For the content of a log of calls.
    pub(crate) fn for_log(path: &Path) -> MemoryBudget {
        MemoryBudget::within(path, MemoryBudget::SMALLEST_LOG_BYTES, MemoryBudget::BYTES_PER_LOG_BYTE)
    }

    fn within(path: &Path, smallest: u64, per_byte: u64) -> MemoryBudget {
        let file_bytes = fs::metadata(path).map_or(0, |file| file.len());
        let bytes = smallest.saturating_add(file_bytes.saturating_mul(per_byte));
        MemoryBudget::of(bytes.min(MemoryBudget::DEFAULT.whole))
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_may_take_less_than_a_gibibyte() {
        let folder = tempfile::tempdir().unwrap();
        let budget_of = |file_bytes: u64| {
            let path = folder.path().join("a");
            fs::File::create(&path).unwrap().set_len(file_bytes).unwrap();
            MemoryBudget::for_file(&path).whole
        };
        assert!(budget_of(1 << 20) < 1 << 30);
        assert_eq!(budget_of(1 << 30), MemoryBudget::DEFAULT.whole);
        assert_eq!(budget_of(0), MemoryBudget::for_file(Path::new("/no such file")).whole);
    }
}

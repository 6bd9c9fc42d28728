//! The free chunks of [`bfc`](super), in the order (size, address): 21 bins by power of two, and which of them hold one.

use std::collections::BTreeSet;

use crate::strategy::pooled::Ground;

/// From 256 B to 256 MiB and above.
const BINS: usize = 21;
/// The smallest chunk is two to this power.
const SMALLEST: u32 = 8;

/// Free chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Bins {
    /// Size, address and slot of each chunk.
    chunks: [BTreeSet<(u64, u64, u32)>; BINS],
    /// Which bins are not empty.
    occupied: u32,
}

/// The bin of a size.
#[inline]
fn bin_of(size: u64) -> usize {
    ((size >> SMALLEST).max(1).ilog2() as usize).min(BINS - 1)
}

impl Bins {
    /// Adds a chunk.
    #[inline]
    pub(super) fn insert(&mut self, ground: &Ground, slot: u32) {
        let piece = &ground[slot];
        let bin = bin_of(piece.size);
        self.chunks[bin].insert((piece.size, piece.address, slot));
        self.occupied |= 1 << bin;
    }

    /// Removes a chunk that is in here.
    #[inline]
    pub(super) fn remove(&mut self, size: u64, address: u64, slot: u32) {
        let bin = bin_of(size);
        self.chunks[bin].remove(&(size, address, slot));
        if self.chunks[bin].is_empty() {
            self.occupied &= !(1 << bin);
        }
    }

    /// The smallest chunk of at least `size`; the lowest address among equals.
    #[inline]
    pub(super) fn first_at_least(&self, size: u64) -> Option<u32> {
        let bin = bin_of(size);
        if self.occupied >> bin & 1 != 0
            && let Some(&(_, _, slot)) = self.chunks[bin].range((size, 0, 0)..).next()
        {
            return Some(slot);
        }
        let above = self.occupied & (!0 << (bin + 1));
        let next = self.chunks.get(above.trailing_zeros() as usize)?;
        next.first().map(|&(_, _, slot)| slot)
    }

    /// The size of the largest chunk.
    pub(super) fn largest(&self) -> u64 {
        let highest = self.occupied.checked_ilog2().and_then(|bin| self.chunks[bin as usize].last());
        highest.map_or(0, |&(size, _, _)| size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{GIB, MIB};

    #[test]
    fn a_bin_spans_a_power_of_two_and_the_last_has_no_end() {
        assert_eq!([256, 511, 512, 1024].map(bin_of), [0, 0, 1, 2]);
        assert_eq!([2 * MIB, 256 * MIB - 256, 256 * MIB, 40 * GIB].map(bin_of), [13, 19, 20, 20]);
    }
}

//! The size classes of free blocks, and the searches over them.

use crate::strategy::pooled::{FreeLists, PieceTable, SizeClasses};

/// Sizes are multiples of this.
pub(super) const QUANTUM: u64 = 512;
/// Classes per power of two.
const STEPS: usize = 1 << STEP_BITS;
const STEP_BITS: u32 = 6;
/// How many blocks of the request's own class are tried before a larger block is taken.
const TRIES: usize = 4;
/// The same where a close fit is worth more.
pub(super) const BEST_TRIES: usize = 16;

/// 64 classes per power of two; below 32 KiB one per multiple of [`QUANTUM`].
#[derive(Clone, Debug)]
pub(super) struct PageClasses;

impl SizeClasses for PageClasses {
    /// Sizes up to 2^50 bytes.
    const COUNT: usize = 36 * STEPS;

    /// Sizes that are not multiples of the quantum (as search keys may be) are rounded up.
    #[inline]
    fn class_of(size: u64) -> usize {
        let quanta = size.div_ceil(QUANTUM);
        if quanta < STEPS as u64 {
            return quanta as usize;
        }
        let power = quanta.ilog2();
        let class = (((power - STEP_BITS + 1) as usize) << STEP_BITS)
            | ((quanta >> (power - STEP_BITS)) as usize & (STEPS - 1));
        class.min(PageClasses::COUNT - 1)
    }
}

impl FreeLists<PageClasses> {
    /// A block of at least `size`, little larger than the best: in the request's own class only the
    /// latest blocks are tried.
    #[inline]
    pub(super) fn find(&self, blocks: &PieceTable, size: u64) -> Option<u32> {
        let class = PageClasses::class_of(size);
        let fits = |&slot: &u32| blocks[slot].size >= size;
        self.pieces_of(blocks, class).take(TRIES).find(fits).or_else(|| self.head(self.first_from(class + 1)?))
    }

    /// The smallest block of at least `size`, the lowest address among equals. At most `tries` blocks
    /// of a class are compared.
    #[inline]
    pub(super) fn find_best(&self, blocks: &PieceTable, size: u64, tries: usize) -> Option<u32> {
        let best_in = |class: usize| {
            let fitting = self.pieces_of(blocks, class).take(tries).filter(|&slot| blocks[slot].size >= size);
            fitting.min_by_key(|&slot| (blocks[slot].size, blocks[slot].address))
        };
        let class = PageClasses::class_of(size);
        best_in(class).or_else(|| best_in(self.first_from(class + 1)?))
    }

    /// The size of the largest block.
    pub(super) fn largest(&self, blocks: &PieceTable) -> u64 {
        let Some(class) = self.last() else { return 0 };
        self.pieces_of(blocks, class).map(|slot| blocks[slot].size).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::strategy::pooled::MemoryPiece;
    use oomph_base::{MIB, StreamId};

    #[test]
    fn classes_are_in_the_order_of_sizes() {
        let sizes = (1..70_000u64).map(|quanta| quanta * QUANTUM).chain((26..50).map(|power| 1 << power));
        let classes: Vec<usize> = sizes.map(PageClasses::class_of).collect();
        assert!(classes.is_sorted());
        assert_eq!(PageClasses::class_of(1), PageClasses::class_of(512));
        assert_ne!(PageClasses::class_of(63 * QUANTUM), PageClasses::class_of(64 * QUANTUM));
    }

    proptest! {
        #[test]
        fn searches_find_a_block_that_fits_if_there_is_one(
            steps in prop::collection::vec((any::<bool>(), prop_oneof![1u64..200, 1u64..70_000]), 1..400)
        ) {
            let mut blocks = PieceTable::default();
            let mut lists = FreeLists::<PageClasses>::default();
            let mut model = BTreeMap::new();
            for (insert, quanta) in steps {
                let size = quanta * QUANTUM;
                let found = lists.find_best(&blocks, size, usize::MAX);
                let best = model.range((size, 0)..).next().map(|(&(size, _), ())| size);
                prop_assert_eq!(found.is_some(), best.is_some());
                if let (Some(slot), Some(best)) = (found, best) {
                    prop_assert!(model.contains_key(&(blocks[slot].size, slot)));
                    prop_assert!(blocks[slot].size >= size && blocks[slot].size <= best + best / STEPS as u64);
                }
                if let Some(slot) = lists.find(&blocks, size) {
                    prop_assert!(blocks[slot].size >= size && model.contains_key(&(blocks[slot].size, slot)));
                }
                prop_assert_eq!(lists.largest(&blocks), model.keys().next_back().map_or(0, |&(size, _)| size));
                if insert {
                    let slot = blocks.insert(MemoryPiece::new(MIB, size, StreamId(0)));
                    lists.insert(&mut blocks, slot);
                    model.insert((size, slot), ());
                } else if let Some(slot) = found {
                    lists.remove(&mut blocks, slot);
                    model.remove(&(blocks[slot].size, slot));
                    blocks.remove(slot);
                }
                let mut listed: Vec<u32> = lists.iter(&blocks).collect();
                let mut expected: Vec<u32> = model.keys().map(|&(_, slot)| slot).collect();
                listed.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(listed, expected);
            }
        }
    }
}

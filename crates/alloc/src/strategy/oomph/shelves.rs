//! Free blocks of one stream by size: constant time whatever their number.
//!
//! A shelf holds blocks of nearly one size, 64 shelves to a power of two and below 64 KiB one shelf a size. A bitmap of
//! two levels says which shelves hold any. Blocks on a shelf are linked through their own records, the latest first, so
//! that nothing is hashed, moved or allocated.

use super::blocks::{Blocks, NONE};

/// Sizes are multiples of this.
pub(super) const QUANTUM: u64 = 1 << QUANTUM_SHIFT;
const QUANTUM_SHIFT: u32 = 9;
/// Shelves for each power of two, one word of the bitmap.
const STEPS: usize = 64;
const STEPS_SHIFT: u32 = 6;
/// Powers of two: sizes up to 2^50 bytes and more.
const WORDS: usize = 36;
/// How many blocks on the shelf of the request's own size are looked at before a larger one is taken.
const LOOKS: usize = 4;
/// The same where a close fit is worth more.
const BEST_LOOKS: usize = 16;

/// Free blocks of one kind and stream.
#[derive(Clone, Debug)]
pub(super) struct Shelves {
    /// Which words of `occupied` are not zero.
    summary: u64,
    /// Which shelves hold a block.
    occupied: [u64; WORDS],
    /// The first block of each shelf; holds only while the shelf is occupied.
    first: Box<[u32]>,
}

impl Default for Shelves {
    fn default() -> Self {
        Shelves { summary: 0, occupied: [0; WORDS], first: vec![NONE; WORDS * STEPS].into_boxed_slice() }
    }
}

impl Shelves {
    /// Adds a free block.
    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, slot: u32) {
        let shelf = shelf_of(blocks[slot].size);
        let (word, bit) = (shelf / STEPS, 1 << (shelf % STEPS));
        let former = if self.occupied[word] & bit == 0 {
            self.occupied[word] |= bit;
            self.summary |= 1 << word;
            NONE
        } else {
            let former = self.first[shelf];
            blocks[former].ahead = slot;
            former
        };
        self.first[shelf] = slot;
        let block = &mut blocks[slot];
        block.ahead = NONE;
        block.behind = former;
    }

    /// Removes a block that is in here.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, slot: u32) {
        let block = &blocks[slot];
        let (ahead, behind) = (block.ahead, block.behind);
        if behind != NONE {
            blocks[behind].ahead = ahead;
        }
        if ahead != NONE {
            blocks[ahead].behind = behind;
            return;
        }
        let shelf = shelf_of(blocks[slot].size);
        self.first[shelf] = behind;
        if behind == NONE {
            let word = shelf / STEPS;
            self.occupied[word] &= !(1 << (shelf % STEPS));
            if self.occupied[word] == 0 {
                self.summary &= !(1 << word);
            }
        }
    }

    /// A block of at least `size`, hardly larger than the best: where the request's own shelf holds many blocks, only
    /// the latest are looked at.
    #[inline]
    pub(super) fn find(&self, blocks: &Blocks, size: u64) -> Option<u32> {
        let shelf = shelf_of(size);
        self.on_shelf(blocks, shelf, size, LOOKS).or_else(|| self.first_above(shelf))
    }

    /// The smallest block of at least `size`, the lowest among equals, as far as a bounded number of looks can tell.
    #[inline]
    pub(super) fn find_best(&self, blocks: &Blocks, size: u64) -> Option<u32> {
        let shelf = shelf_of(size);
        self.best_on_shelf(blocks, shelf, size, BEST_LOOKS).or_else(|| {
            let above = shelf_of(blocks[self.first_above(shelf)?].size);
            self.best_on_shelf(blocks, above, size, BEST_LOOKS)
        })
    }

    fn best_on_shelf(&self, blocks: &Blocks, shelf: usize, size: u64, looks: usize) -> Option<u32> {
        let fitting = self.shelf(blocks, shelf).take(looks).filter(|&slot| blocks[slot].size >= size);
        fitting.min_by_key(|&slot| (blocks[slot].size, blocks[slot].address))
    }

    /// The same, whatever it takes: `None` means that there is none.
    pub(super) fn find_any(&self, blocks: &Blocks, size: u64) -> Option<u32> {
        let shelf = shelf_of(size);
        self.best_on_shelf(blocks, shelf, size, usize::MAX).or_else(|| {
            let above = shelf_of(blocks[self.first_above(shelf)?].size);
            self.best_on_shelf(blocks, above, size, usize::MAX)
        })
    }

    /// The largest block.
    pub(super) fn largest(&self, blocks: &Blocks) -> Option<u32> {
        let word = self.summary.checked_ilog2()? as usize;
        let shelf = word * STEPS + self.occupied[word].checked_ilog2()? as usize;
        self.shelf(blocks, shelf).max_by_key(|&slot| blocks[slot].size)
    }

    /// The blocks of at least `size`, in no particular order.
    pub(super) fn at_least<'a>(&'a self, blocks: &'a Blocks, size: u64) -> impl Iterator<Item = u32> + 'a {
        let from = shelf_of(size);
        let shelves = (from / STEPS..WORDS).flat_map(move |word| {
            let below = if word == from / STEPS { from % STEPS } else { 0 };
            bits(self.occupied[word] & (u64::MAX << below)).map(move |bit| word * STEPS + bit)
        });
        shelves.flat_map(move |shelf| self.shelf(blocks, shelf)).filter(move |&slot| blocks[slot].size >= size)
    }

    /// The blocks of one shelf, the latest first.
    fn shelf<'a>(&'a self, blocks: &'a Blocks, shelf: usize) -> impl Iterator<Item = u32> + 'a {
        let occupied = self.occupied[shelf / STEPS] & (1 << (shelf % STEPS)) != 0;
        let first = if occupied { self.first[shelf] } else { NONE };
        let is_there = |&slot: &u32| slot != NONE;
        std::iter::successors(Some(first).filter(is_there), move |&slot| Some(blocks[slot].behind).filter(is_there))
    }

    #[inline]
    fn on_shelf(&self, blocks: &Blocks, shelf: usize, size: u64, looks: usize) -> Option<u32> {
        if self.occupied[shelf / STEPS] & (1 << (shelf % STEPS)) == 0 {
            return None;
        }
        let mut slot = self.first[shelf];
        for _ in 0..looks {
            let block = blocks.get(slot)?;
            if block.size >= size {
                return Some(slot);
            }
            slot = block.behind;
        }
        None
    }

    /// The first block on the next occupied shelf above.
    #[inline]
    fn first_above(&self, shelf: usize) -> Option<u32> {
        let word = shelf / STEPS;
        // Two shifts, because one by 64 would be none.
        let rest = self.occupied[word] & ((u64::MAX << (shelf % STEPS)) << 1);
        let shelf = if rest != 0 {
            word * STEPS + rest.trailing_zeros() as usize
        } else {
            let words = self.summary & ((u64::MAX << word) << 1);
            if words == 0 {
                return None;
            }
            let word = words.trailing_zeros() as usize;
            word * STEPS + self.occupied[word].trailing_zeros() as usize
        };
        Some(self.first[shelf])
    }
}

/// The shelf for a size. Sizes that are no multiple of the quantum (as search keys may be) go up.
#[inline]
fn shelf_of(size: u64) -> usize {
    let quanta = size.div_ceil(QUANTUM);
    if quanta < STEPS as u64 {
        return quanta as usize;
    }
    let power = quanta.ilog2();
    let shelf = (((power - STEPS_SHIFT + 1) as usize) << STEPS_SHIFT)
        | ((quanta >> (power - STEPS_SHIFT)) as usize & (STEPS - 1));
    shelf.min(WORDS * STEPS - 1)
}

/// The places of the ones in a word, ascending.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros() as usize);
        word &= word.wrapping_sub(1);
        bit
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{
        super::blocks::{Record, State},
        *,
    };
    use oomph_base::{MIB, StreamId};

    #[test]
    fn shelves_are_in_the_order_of_sizes() {
        let sizes = (1..70_000u64).map(|quanta| quanta * QUANTUM).chain((26..50).map(|power| 1 << power));
        let shelves: Vec<usize> = sizes.map(shelf_of).collect();
        assert!(shelves.is_sorted());
        assert_eq!(shelf_of(1), shelf_of(512));
        assert_ne!(shelf_of(63 * QUANTUM), shelf_of(64 * QUANTUM));
    }

    proptest! {
        #[test]
        fn what_is_found_is_there_and_fits_and_nothing_that_fits_is_missed(
            steps in prop::collection::vec((any::<bool>(), prop_oneof![1u64..200, 1u64..70_000]), 1..400)
        ) {
            let (mut blocks, mut shelves, mut model) = (Blocks::default(), Shelves::default(), BTreeMap::new());
            for (insert, quanta) in steps {
                let size = quanta * QUANTUM;
                let found = shelves.find_any(&blocks, size);
                let best = model.range((size, 0)..).next().map(|(&(size, _), ())| size);
                prop_assert_eq!(found.is_some(), best.is_some());
                if let (Some(slot), Some(best)) = (found, best) {
                    prop_assert!(model.contains_key(&(blocks[slot].size, slot)));
                    prop_assert!(blocks[slot].size >= size && blocks[slot].size <= best + best / STEPS as u64);
                }
                if let Some(slot) = shelves.find(&blocks, size) {
                    prop_assert!(blocks[slot].size >= size && model.contains_key(&(blocks[slot].size, slot)));
                }
                let largest = shelves.largest(&blocks).map(|slot| blocks[slot].size);
                prop_assert_eq!(largest, model.keys().next_back().map(|&(size, _)| size));
                if insert {
                    let slot = blocks.insert(Record::lone(MIB, size, NONE, StreamId(0), State::Free));
                    shelves.insert(&mut blocks, slot);
                    model.insert((size, slot), ());
                } else if let Some(slot) = found {
                    shelves.remove(&mut blocks, slot);
                    model.remove(&(blocks[slot].size, slot));
                    blocks.remove(slot);
                }
                let mut listed: Vec<u32> = shelves.at_least(&blocks, size).collect();
                let mut expected: Vec<u32> = model.range((size, 0)..).map(|(&(_, slot), ())| slot).collect();
                listed.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(listed, expected);
            }
        }
    }
}

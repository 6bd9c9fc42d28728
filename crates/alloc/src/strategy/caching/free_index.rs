//! The free blocks of one pool and stream in the order (size, address), the latest of them close at hand.
//!
//! What was freed or cut off last is most often the next to be taken or merged again, so it waits outside the bins
//! until another block takes its place there: a free and an allocation in turn touch no bin at all. Nobody outside can
//! tell, as every question is answered for the latest block and the bins together.

use std::hint::select_unpredictable;

use super::{blocks::NONE, size_bins::SizeBins};

/// A free block. Its order is that of the index; no two have the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::strategy) struct Entry {
    pub(in crate::strategy) size: u64,
    pub(in crate::strategy) address: u64,
    pub(in crate::strategy) slot: u32,
}

impl Entry {
    /// No block: smaller than any request, and at no block's address.
    const NONE: Entry = Entry { size: 0, address: 0, slot: NONE };
    /// No block either: larger than any other.
    pub(super) const END: Entry = Entry { size: u64::MAX, address: u64::MAX, slot: NONE };

    /// Without a branch, as one long number: which of two blocks is the smaller cannot be guessed.
    #[inline]
    fn precedes(&self, other: &Entry) -> bool {
        let key = |entry: &Entry| u128::from(entry.size) << 64 | u128::from(entry.address);
        key(self) < key(other)
    }

    /// One of two blocks, field by field in registers: through memory, the processor would wait for itself.
    #[inline]
    fn select(first: bool, one: &Entry, other: &Entry) -> Entry {
        Entry {
            size: select_unpredictable(first, one.size, other.size),
            address: select_unpredictable(first, one.address, other.address),
            slot: select_unpredictable(first, one.slot, other.slot),
        }
    }
}

/// The free blocks of one pool and stream.
#[derive(Clone, Debug)]
pub(in crate::strategy) struct FreeIndex {
    /// The block that came in last, or [`Entry::NONE`] if it has left. It is not in the bins.
    latest: Entry,
    bins: SizeBins,
}

impl Default for FreeIndex {
    fn default() -> Self {
        FreeIndex { latest: Entry::NONE, bins: SizeBins::default() }
    }
}

impl FreeIndex {
    /// Adds a block.
    #[inline(always)]
    pub(in crate::strategy) fn insert(&mut self, entry: Entry) {
        let former = std::mem::replace(&mut self.latest, entry);
        if former.size != 0 {
            self.bins.insert(former);
        }
    }

    /// Removes a block that is in here.
    #[inline(always)]
    pub(in crate::strategy) fn remove(&mut self, entry: Entry) {
        if self.latest.address == entry.address {
            self.latest = Entry::NONE;
        } else {
            self.bins.remove(entry);
        }
    }

    /// The smallest block of at least `size`; the lowest address among equals.
    #[inline(always)]
    pub(in crate::strategy) fn first_at_least(&self, size: u64) -> Option<Entry> {
        let binned = self.bins.first_at_least(size);
        let latest_is_first = (self.latest.size >= size) & self.latest.precedes(&binned);
        let first = Entry::select(latest_is_first, &self.latest, &binned);
        (first.size != u64::MAX).then_some(first)
    }

    /// The block that follows (size, address).
    pub(in crate::strategy) fn after(&self, size: u64, address: u64) -> Option<Entry> {
        let binned = self.bins.after(size, address);
        let latest = self.latest().filter(|latest| (latest.size, latest.address) > (size, address));
        latest.filter(|latest| binned.is_none_or(|other| latest.precedes(&other))).or(binned)
    }

    /// The last block before (size, address).
    pub(in crate::strategy) fn before(&self, size: u64, address: u64) -> Option<Entry> {
        let latest = self.latest().filter(|latest| (latest.size, latest.address) < (size, address));
        latest.max(self.bins.before(size, address))
    }

    /// The largest block; the highest address among equals.
    pub(in crate::strategy) fn last(&self) -> Option<Entry> {
        self.before(u64::MAX, 0)
    }

    /// Every block from (size, address) on, in order.
    pub(in crate::strategy) fn ascending(&self, size: u64, address: u64) -> impl Iterator<Item = Entry> + '_ {
        let mut latest = self.latest().filter(|latest| (latest.size, latest.address) >= (size, address));
        let mut binned = self.bins.ascending(size, address).peekable();
        std::iter::from_fn(move || {
            let latest_is_next = latest.is_some_and(|latest| binned.peek().is_none_or(|other| latest.precedes(other)));
            if latest_is_next { latest.take() } else { binned.next() }
        })
    }

    fn latest(&self) -> Option<Entry> {
        (self.latest.size != 0).then_some(self.latest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use oomph_base::MIB;

    /// Sizes crowd in few bins, so that bins grow into maps and shrink again, and some lie above the bins.
    fn size() -> impl Strategy<Value = u64> {
        prop_oneof![
            (1u64..4).prop_map(|n| n * 512),
            (1u64..=65_536).prop_map(|n| n * 512),
            (1u64..100).prop_map(|n| 32 * MIB + n * 512),
        ]
    }

    fn entry((&(size, address), &slot): (&(u64, u64), &u32)) -> Entry {
        Entry { size, address, slot }
    }

    proptest! {
        #[test]
        fn the_index_agrees_with_an_ordered_map(steps in prop::collection::vec((any::<bool>(), size(), 0u64..200), 1..600)) {
            let (mut index, mut model) = (FreeIndex::default(), BTreeMap::new());
            for (number, (insert, size, place)) in (0u32..).zip(steps) {
                let address = 4096 + place * 512;
                if insert && model.keys().all(|&(_, other)| other != address) {
                    index.insert(Entry { size, address, slot: number });
                    model.insert((size, address), number);
                } else if let Some((&(size, address), _)) = model.range((size, address)..).next() {
                    let slot = model.remove(&(size, address)).unwrap();
                    index.remove(Entry { size, address, slot });
                }
                let value = |found: Option<(&(u64, u64), &u32)>| found.map(entry);
                prop_assert_eq!(index.first_at_least(size), value(model.range((size, 0)..).next()));
                prop_assert_eq!(index.after(size, address), value(model.range((size, address + 1)..).next()));
                prop_assert_eq!(index.before(size, address), value(model.range(..(size, address)).next_back()));
                prop_assert_eq!(index.last(), value(model.last_key_value()));
                let next = index.ascending(size, address).take(3);
                prop_assert!(next.eq(model.range((size, address)..).take(3).map(entry)));
            }
            prop_assert!(index.ascending(0, 0).eq(model.iter().map(entry)));
        }
    }

    #[test]
    fn a_bin_of_many_equal_blocks_hands_out_the_lowest_address() {
        let mut index = FreeIndex::default();
        for n in 0..10_000u64 {
            // A full cycle of a permutation: neither ascending nor descending.
            index.insert(Entry { size: 512, address: 512 + (n * 7_919 % 10_000) * 512, slot: n as u32 });
        }
        for n in 0..10_000u64 {
            let slot = index.first_at_least(512).unwrap().slot;
            assert_eq!(u64::from(slot) * 7_919 % 10_000, n);
            index.remove(Entry { size: 512, address: 512 + n * 512, slot });
        }
        assert_eq!(index.first_at_least(512), None);
    }
}

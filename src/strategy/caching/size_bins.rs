//! The free blocks of one pool and stream in the order (size, address).
//!
//! PyTorch keeps a tree. Here sizes up to 32 MiB have a bin each (sizes are multiples of 512 bytes) under a bitmap of
//! three levels, so that the best fit is found in a few words; larger blocks are in an ordered map. Bins are made when
//! they are first used.

use std::collections::BTreeMap;

/// Sizes are multiples of this.
const QUANTUM_SHIFT: u32 = 9;
/// Sizes up to 32 MiB have bins of their own.
const BINS: usize = 1 << 16;
const GROUP: usize = 64;
/// A bin that holds more than this becomes an ordered map.
const FEW: usize = 64;

/// The free blocks of one pool and stream.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeIndex {
    /// Which words of `groups_occupied` are not zero.
    words_occupied: u64,
    /// Which groups hold a block.
    groups_occupied: [u64; BINS / GROUP / 64],
    groups: Vec<Option<Box<Group>>>,
    /// Blocks above 32 MiB by (size, address).
    huge: BTreeMap<(u64, u64), u32>,
}

/// 64 neighbouring bins.
#[derive(Clone, Debug)]
struct Group {
    occupied: u64,
    bins: [Bin; GROUP],
}

/// Blocks of one size.
#[derive(Clone, Debug)]
enum Bin {
    Empty,
    /// Most bins never hold two blocks at once, and so need no memory of their own.
    One(u64, u32),
    /// By descending address: the lowest is at the end, where it is cheap to take. Kept when it runs empty.
    Few(Vec<(u64, u32)>),
    Many(BTreeMap<u64, u32>),
}

impl FreeIndex {
    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, size: u64, address: u64, slot: u32) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.insert((size, address), slot);
            return;
        };
        if self.groups.len() <= group_number {
            self.groups.resize_with(group_number + 1, || None);
        }
        let group = self.groups[group_number].get_or_insert_with(Box::default);
        group.bins[place].insert(address, slot);
        if group.occupied == 0 {
            self.groups_occupied[group_number / 64] |= 1 << (group_number % 64);
            self.words_occupied |= 1 << (group_number / 64);
        }
        group.occupied |= 1 << place;
    }

    /// Removes a block that is in here.
    #[inline]
    pub(super) fn remove(&mut self, size: u64, address: u64) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.remove(&(size, address));
            return;
        };
        let Some(Some(group)) = self.groups.get_mut(group_number) else { return };
        if group.bins[place].remove(address) {
            group.occupied &= !(1 << place);
            if group.occupied == 0 {
                self.groups_occupied[group_number / 64] &= !(1 << (group_number % 64));
                if self.groups_occupied[group_number / 64] == 0 {
                    self.words_occupied &= !(1 << (group_number / 64));
                }
            }
        }
    }

    /// The smallest block of at least `size`; the lowest address among equals.
    #[inline]
    pub(super) fn first_at_least(&self, size: u64) -> Option<u32> {
        match bin_of(size) {
            Some((group, place)) => self.first_from_bin(group, place),
            None => self.huge.range((size, 0)..).next().map(|(_, &slot)| slot),
        }
    }

    /// The block that follows (size, address).
    pub(super) fn after(&self, size: u64, address: u64) -> Option<u32> {
        let Some((group, place)) = bin_of(size) else {
            return self.huge.range((size, address + 1)..).next().map(|(_, &slot)| slot);
        };
        self.bin(group, place).and_then(|bin| bin.above(address)).or_else(|| self.first_at_least(size + 512))
    }

    /// The last block before (size, address).
    pub(super) fn before(&self, size: u64, address: u64) -> Option<u32> {
        let Some((group, place)) = bin_of(size) else {
            let below = self.huge.range(..(size, address)).next_back().map(|(_, &slot)| slot);
            return below.or_else(|| self.last_below_bin(BINS / GROUP, 0));
        };
        self.bin(group, place).and_then(|bin| bin.below(address)).or_else(|| self.last_below_bin(group, place))
    }

    /// The largest block; the highest address among equals.
    pub(super) fn last(&self) -> Option<u32> {
        self.before(u64::MAX, 0)
    }

    /// Every block, by (size, address).
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let binned = self.groups.iter().flatten().flat_map(|group| group.bins.iter().flat_map(Bin::iter));
        binned.chain(self.huge.values().copied())
    }

    fn bin(&self, group: usize, place: usize) -> Option<&Bin> {
        self.groups.get(group)?.as_ref().map(|group| &group.bins[place])
    }

    /// The first block in this bin or above.
    #[inline]
    fn first_from_bin(&self, group_number: usize, place: usize) -> Option<u32> {
        if let Some(Some(group)) = self.groups.get(group_number) {
            let at_or_above = group.occupied & (u64::MAX << place);
            if at_or_above != 0 {
                return group.bins[at_or_above.trailing_zeros() as usize].lowest();
            }
        }
        match self.next_group(group_number) {
            Some(group) => group.bins[group.occupied.trailing_zeros() as usize].lowest(),
            None => self.huge.first_key_value().map(|(_, &slot)| slot),
        }
    }

    /// The next group above that holds a block.
    #[inline]
    fn next_group(&self, below: usize) -> Option<&Group> {
        let word = below / 64;
        // Two shifts, because one by 64 would be none.
        let rest = self.groups_occupied[word] & ((u64::MAX << (below % 64)) << 1);
        let number = if rest != 0 {
            word * 64 + rest.trailing_zeros() as usize
        } else {
            let words = self.words_occupied & ((u64::MAX << word) << 1);
            if words == 0 {
                return None;
            }
            let word = words.trailing_zeros() as usize;
            word * 64 + self.groups_occupied[word].trailing_zeros() as usize
        };
        self.groups[number].as_deref()
    }

    /// The last block in the bins below this one.
    fn last_below_bin(&self, group_number: usize, place: usize) -> Option<u32> {
        if let Some(Some(group)) = self.groups.get(group_number) {
            let below = group.occupied & !(u64::MAX << place);
            if below != 0 {
                return group.bins[highest_bit(below)].highest();
            }
        }
        let last = group_number.min(self.groups.len());
        let group = self.groups[..last].iter().rev().flatten().find(|group| group.occupied != 0)?;
        group.bins[highest_bit(group.occupied)].highest()
    }
}

/// Group and place of the bin for a size, or nothing above 32 MiB. Sizes that are no multiple of the quantum (as search
/// keys may be) go up.
#[inline]
fn bin_of(size: u64) -> Option<(usize, usize)> {
    let number = (size.max(1) - 1) >> QUANTUM_SHIFT;
    (number < BINS as u64).then_some((number as usize / GROUP, number as usize % GROUP))
}

#[inline]
fn highest_bit(word: u64) -> usize {
    63 - word.leading_zeros() as usize
}

impl Default for Group {
    fn default() -> Self {
        Group { occupied: 0, bins: std::array::from_fn(|_| Bin::Empty) }
    }
}

impl Bin {
    #[inline]
    fn insert(&mut self, address: u64, slot: u32) {
        match self {
            Bin::Empty => *self = Bin::One(address, slot),
            Bin::One(other, resident) => {
                let mut entries = vec![(*other, *resident), (address, slot)];
                entries.sort_unstable_by(|a, b| b.cmp(a));
                *self = Bin::Few(entries);
            }
            Bin::Few(entries) if entries.len() < FEW => {
                let place = entries.partition_point(|&(other, _)| other > address);
                entries.insert(place, (address, slot));
            }
            Bin::Few(entries) => {
                let mut many: BTreeMap<u64, u32> = entries.drain(..).collect();
                many.insert(address, slot);
                *self = Bin::Many(many);
            }
            Bin::Many(entries) => {
                entries.insert(address, slot);
            }
        }
    }

    /// Removes an entry and says whether the bin is now empty.
    #[inline]
    fn remove(&mut self, address: u64) -> bool {
        match self {
            Bin::Empty => true,
            Bin::One(..) => {
                *self = Bin::Empty;
                true
            }
            Bin::Few(entries) => {
                if entries.last().is_some_and(|&(lowest, _)| lowest == address) {
                    entries.pop();
                } else if let Ok(place) = entries.binary_search_by(|&(other, _)| address.cmp(&other)) {
                    entries.remove(place);
                }
                entries.is_empty()
            }
            Bin::Many(entries) => {
                entries.remove(&address);
                if entries.len() <= FEW / 4 {
                    *self = Bin::Few(entries.iter().rev().map(|(&address, &slot)| (address, slot)).collect());
                }
                false
            }
        }
    }

    #[inline]
    fn lowest(&self) -> Option<u32> {
        match self {
            Bin::Empty => None,
            Bin::One(_, slot) => Some(*slot),
            Bin::Few(entries) => entries.last().map(|&(_, slot)| slot),
            Bin::Many(entries) => entries.first_key_value().map(|(_, &slot)| slot),
        }
    }

    fn highest(&self) -> Option<u32> {
        match self {
            Bin::Empty => None,
            Bin::One(_, slot) => Some(*slot),
            Bin::Few(entries) => entries.first().map(|&(_, slot)| slot),
            Bin::Many(entries) => entries.last_key_value().map(|(_, &slot)| slot),
        }
    }

    fn above(&self, address: u64) -> Option<u32> {
        match self {
            Bin::Empty => None,
            Bin::One(other, slot) => (*other > address).then_some(*slot),
            Bin::Few(entries) => {
                let higher = entries.partition_point(|&(other, _)| other > address);
                higher.checked_sub(1).map(|place| entries[place].1)
            }
            Bin::Many(entries) => entries.range(address + 1..).next().map(|(_, &slot)| slot),
        }
    }

    fn below(&self, address: u64) -> Option<u32> {
        match self {
            Bin::Empty => None,
            Bin::One(other, slot) => (*other < address).then_some(*slot),
            Bin::Few(entries) => {
                let not_lower = entries.partition_point(|&(other, _)| other >= address);
                entries.get(not_lower).map(|&(_, slot)| slot)
            }
            Bin::Many(entries) => entries.range(..address).next_back().map(|(_, &slot)| slot),
        }
    }

    fn iter(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            Bin::Empty => Box::new(std::iter::empty()),
            Bin::One(_, slot) => Box::new(std::iter::once(*slot)),
            Bin::Few(entries) => Box::new(entries.iter().rev().map(|&(_, slot)| slot)),
            Bin::Many(entries) => Box::new(entries.values().copied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::unit::MIB;

    /// Sizes crowd in few bins, so that bins grow into maps and shrink again, and some lie above the bins.
    fn size() -> impl Strategy<Value = u64> {
        prop_oneof![
            (1u64..4).prop_map(|n| n * 512),
            (1u64..=65_536).prop_map(|n| n * 512),
            (1u64..100).prop_map(|n| 32 * MIB + n * 512),
        ]
    }

    proptest! {
        #[test]
        fn the_index_agrees_with_an_ordered_map(steps in prop::collection::vec((any::<bool>(), size(), 0u64..200), 1..600)) {
            let (mut index, mut model) = (FreeIndex::default(), BTreeMap::new());
            for (number, (insert, size, place)) in (0u32..).zip(steps) {
                let address = 4096 + place * 512;
                if insert && !model.contains_key(&(size, address)) {
                    index.insert(size, address, number);
                    model.insert((size, address), number);
                } else if let Some((&(size, address), _)) = model.range((size, address)..).next() {
                    index.remove(size, address);
                    model.remove(&(size, address));
                }
                let value = |entry: Option<(&(u64, u64), &u32)>| entry.map(|(_, &slot)| slot);
                prop_assert_eq!(index.first_at_least(size), value(model.range((size, 0)..).next()));
                prop_assert_eq!(index.after(size, address), value(model.range((size, address + 1)..).next()));
                prop_assert_eq!(index.before(size, address), value(model.range(..(size, address)).next_back()));
                prop_assert_eq!(index.last(), value(model.last_key_value()));
            }
            prop_assert!(index.iter().eq(model.values().copied()));
        }
    }

    #[test]
    fn a_bin_of_many_equal_blocks_hands_out_the_lowest_address() {
        let mut index = FreeIndex::default();
        for n in 0..10_000u64 {
            // A full cycle of a permutation: neither ascending nor descending.
            index.insert(512, 512 + (n * 7_919 % 10_000) * 512, n as u32);
        }
        for n in 0..10_000u64 {
            let slot = index.first_at_least(512).unwrap();
            assert_eq!(u64::from(slot) * 7_919 % 10_000, n);
            index.remove(512, 512 + n * 512);
        }
        assert_eq!(index.first_at_least(512), None);
    }
}

//! Blocks in the order (size, address), by size.
//!
//! PyTorch keeps a tree. Here sizes up to 32 MiB have a bin each (sizes are multiples of 512 bytes) under a bitmap of
//! three levels, so that the best fit is found in a few words; larger blocks are in an ordered map. Bins are made when
//! they are first used.

use std::collections::BTreeMap;

use super::free_index::Entry;

/// Sizes are multiples of this.
const QUANTUM_SHIFT: u32 = 9;
/// Sizes up to 32 MiB have bins of their own.
const BINS: usize = 1 << 16;
const GROUP: usize = 64;
/// A bin that holds more than this becomes an ordered map.
const FEW: usize = 64;

/// Blocks by size.
#[derive(Clone, Debug, Default)]
pub(super) struct SizeBins {
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

impl SizeBins {
    /// Adds a block.
    pub(super) fn insert(&mut self, Entry { size, address, slot }: Entry) {
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
    #[inline(always)]
    pub(super) fn first_at_least(&self, size: u64) -> Option<Entry> {
        match bin_of(size) {
            Some((group, place)) => self.first_from_bin(group, place),
            None => self.first_huge(size),
        }
    }

    #[inline(never)]
    fn first_huge(&self, size: u64) -> Option<Entry> {
        self.huge.range((size, 0)..).next().map(huge_entry)
    }

    /// The block that follows (size, address).
    pub(super) fn after(&self, size: u64, address: u64) -> Option<Entry> {
        let Some((group, place)) = bin_of(size) else {
            return self.huge.range((size, address + 1)..).next().map(huge_entry);
        };
        let same_size = self.bin(group, place).and_then(|bin| bin.above(address));
        same_size.map(binned_entry(group, place)).or_else(|| self.first_at_least(size + (1 << QUANTUM_SHIFT)))
    }

    /// The last block before (size, address).
    pub(super) fn before(&self, size: u64, address: u64) -> Option<Entry> {
        let Some((group, place)) = bin_of(size) else {
            let below = self.huge.range(..(size, address)).next_back().map(huge_entry);
            return below.or_else(|| self.last_below_bin(BINS / GROUP, 0));
        };
        let same_size = self.bin(group, place).and_then(|bin| bin.below(address));
        same_size.map(binned_entry(group, place)).or_else(|| self.last_below_bin(group, place))
    }

    /// Every block, by (size, address). From block to block by the bitmaps: most bins are empty.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        std::iter::successors(self.first_at_least(0), |entry| self.after(entry.size, entry.address))
    }

    fn bin(&self, group: usize, place: usize) -> Option<&Bin> {
        self.groups.get(group)?.as_ref().map(|group| &group.bins[place])
    }

    /// The first block in this bin or above.
    #[inline]
    fn first_from_bin(&self, group_number: usize, place: usize) -> Option<Entry> {
        if let Some(Some(group)) = self.groups.get(group_number) {
            let at_or_above = group.occupied & (u64::MAX << place);
            if at_or_above != 0 {
                return group.lowest(group_number, at_or_above);
            }
        }
        match self.next_group(group_number) {
            Some((number, group)) => group.lowest(number, group.occupied),
            None => self.first_huge(0),
        }
    }

    /// The next group above that holds a block.
    #[inline]
    fn next_group(&self, below: usize) -> Option<(usize, &Group)> {
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
        Some((number, self.groups[number].as_deref()?))
    }

    /// The last block in the bins below this one.
    fn last_below_bin(&self, group_number: usize, place: usize) -> Option<Entry> {
        if let Some(Some(group)) = self.groups.get(group_number) {
            let below = group.occupied & !(u64::MAX << place);
            if below != 0 {
                return group.highest(group_number, below);
            }
        }
        let last = group_number.min(self.groups.len());
        let mut below = (0..last).rev().zip(self.groups[..last].iter().rev());
        below.find_map(|(number, group)| {
            let group = group.as_ref().filter(|group| group.occupied != 0)?;
            group.highest(number, group.occupied)
        })
    }
}

impl Group {
    /// The lowest block of the smallest size among some of the bins.
    #[inline]
    fn lowest(&self, number: usize, bins: u64) -> Option<Entry> {
        let place = bins.trailing_zeros() as usize;
        self.bins[place % GROUP].lowest().map(binned_entry(number, place))
    }

    /// The highest block of the largest size among some of the bins.
    fn highest(&self, number: usize, bins: u64) -> Option<Entry> {
        let place = 63 - bins.leading_zeros() as usize;
        self.bins[place].highest().map(binned_entry(number, place))
    }
}

/// Every size has its bin, so that the bin tells the size.
#[inline]
fn binned_entry(group: usize, place: usize) -> impl Fn((u64, u32)) -> Entry {
    let size = ((group * GROUP + place + 1) as u64) << QUANTUM_SHIFT;
    move |(address, slot)| Entry { size, address, slot }
}

fn huge_entry((&(size, address), &slot): (&(u64, u64), &u32)) -> Entry {
    Entry { size, address, slot }
}

/// Group and place of the bin for a size, or nothing above 32 MiB. Sizes that are no multiple of the quantum (as search
/// keys may be) go up.
#[inline]
fn bin_of(size: u64) -> Option<(usize, usize)> {
    let number = (size.max(1) - 1) >> QUANTUM_SHIFT;
    (number < BINS as u64).then_some((number as usize / GROUP, number as usize % GROUP))
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
    fn lowest(&self) -> Option<(u64, u32)> {
        match self {
            Bin::Empty => None,
            Bin::One(address, slot) => Some((*address, *slot)),
            Bin::Few(entries) => entries.last().copied(),
            Bin::Many(entries) => entries.first_key_value().map(copied),
        }
    }

    fn highest(&self) -> Option<(u64, u32)> {
        match self {
            Bin::Empty => None,
            Bin::One(address, slot) => Some((*address, *slot)),
            Bin::Few(entries) => entries.first().copied(),
            Bin::Many(entries) => entries.last_key_value().map(copied),
        }
    }

    fn above(&self, address: u64) -> Option<(u64, u32)> {
        match self {
            Bin::Empty => None,
            Bin::One(other, slot) => (*other > address).then_some((*other, *slot)),
            Bin::Few(entries) => {
                let higher = entries.partition_point(|&(other, _)| other > address);
                higher.checked_sub(1).map(|place| entries[place])
            }
            Bin::Many(entries) => entries.range(address + 1..).next().map(copied),
        }
    }

    fn below(&self, address: u64) -> Option<(u64, u32)> {
        match self {
            Bin::Empty => None,
            Bin::One(other, slot) => (*other < address).then_some((*other, *slot)),
            Bin::Few(entries) => {
                let not_lower = entries.partition_point(|&(other, _)| other >= address);
                entries.get(not_lower).copied()
            }
            Bin::Many(entries) => entries.range(..address).next_back().map(copied),
        }
    }
}

fn copied((&address, &slot): (&u64, &u32)) -> (u64, u32) {
    (address, slot)
}

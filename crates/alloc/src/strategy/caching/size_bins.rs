//! Blocks in the order (size, address), by size.
//!
//! PyTorch keeps a tree. Here sizes up to 32 MiB have a bin each (sizes are multiples of 512 bytes) under a bitmap of
//! three levels, so that the best fit is found in a few words; larger blocks are in an ordered map. A bin holds the
//! block with the lowest address, the one that is handed out next; others of its size wait in a [`Crowd`]. Bins are
//! made when they are first used.

use std::{collections::BTreeMap, hint::select_unpredictable};

use super::{
    blocks::NONE,
    crowd::{Crowd, Places},
    free_index::Entry,
};

/// Sizes are multiples of this.
const QUANTUM_SHIFT: u32 = 9;
/// Sizes up to 32 MiB have bins of their own.
const BINS: usize = 1 << 16;
const GROUP: usize = 64;

/// Blocks by size.
#[derive(Clone, Debug, Default)]
pub(super) struct SizeBins {
    /// Which words of `groups_occupied` are not zero.
    words_occupied: u64,
    /// Which groups hold a block.
    groups_occupied: [u64; BINS / GROUP / 64],
    groups: Vec<Option<Box<Group>>>,
    crowds: Vec<Crowd>,
    places: Places,
    /// Blocks above 32 MiB by (size, address).
    huge: BTreeMap<(u64, u64), u32>,
}

/// 64 neighbouring bins.
#[derive(Clone, Debug)]
struct Group {
    /// Which bins hold a block.
    occupied: u64,
    /// Which bins hold more than one.
    crowded: u64,
    bins: [Bin; GROUP],
}

/// Blocks of one size. What it says holds only while its group says that it is occupied.
#[derive(Clone, Copy, Debug)]
struct Bin {
    /// The lowest.
    address: u64,
    slot: u32,
    /// Where the others are, or [`NONE`] if there never were any.
    crowd: u32,
}

impl SizeBins {
    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, Entry { size, address, slot }: Entry) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.insert((size, address), slot);
            return;
        };
        let Some(Some(group)) = self.groups.get_mut(group_number) else {
            self.add_group(group_number);
            return self.insert(Entry { size, address, slot });
        };
        let (bit, bin) = (1 << place, &mut group.bins[place]);
        if group.occupied & bit != 0 {
            return self.join(group_number, place, (address, slot));
        }
        bin.address = address;
        bin.slot = slot;
        group.occupied |= bit;
        self.groups_occupied[group_number / 64] |= 1 << (group_number % 64);
        self.words_occupied |= 1 << (group_number / 64);
    }

    /// Removes a block that is in here.
    #[inline]
    pub(super) fn remove(&mut self, Entry { size, address, slot }: Entry) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.remove(&(size, address));
            return;
        };
        let Some(Some(group)) = self.groups.get_mut(group_number) else { return };
        let bit = 1 << place;
        if group.crowded & bit != 0 {
            return self.leave(group_number, place, slot);
        }
        group.occupied &= !bit;
        // Without a branch: whether it was the last of its group cannot be guessed.
        let word = &mut self.groups_occupied[group_number / 64];
        *word &= !(u64::from(group.occupied == 0) << (group_number % 64));
        self.words_occupied &= !(u64::from(*word == 0) << (group_number / 64));
    }

    /// The smallest block of at least `size`, the lowest address among equals; or [`Entry::END`], which stays in
    /// registers where an option would go through memory.
    #[inline(always)]
    pub(super) fn first_at_least(&self, size: u64) -> Entry {
        match bin_of(size) {
            Some((group, place)) => self.first_from_bin(group, place),
            None => self.first_huge(size),
        }
    }

    /// The block that follows (size, address).
    pub(super) fn after(&self, size: u64, address: u64) -> Option<Entry> {
        if self.is_empty() {
            return None;
        }
        let Some((group, place)) = bin_of(size) else {
            return self.huge.range((size, address + 1)..).next().map(huge_entry);
        };
        let above = |(lowest, crowd): ((u64, u32), Option<&Crowd>)| {
            Some(lowest).filter(|lowest| lowest.0 > address).or_else(|| crowd?.above(address))
        };
        let same_size = self.bin(group, place).and_then(above);
        same_size.map(binned_entry(group, place)).or_else(|| self.found_above(size))
    }

    /// The smallest block of more than `size`.
    fn found_above(&self, size: u64) -> Option<Entry> {
        Some(self.first_at_least(size + (1 << QUANTUM_SHIFT))).filter(|&found| found != Entry::END)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.words_occupied == 0 && self.huge.is_empty()
    }

    /// The last block before (size, address).
    pub(super) fn before(&self, size: u64, address: u64) -> Option<Entry> {
        let Some((group, place)) = bin_of(size) else {
            let below = self.huge.range(..(size, address)).next_back().map(huge_entry);
            return below.or_else(|| self.last_below_bin(BINS / GROUP, 0));
        };
        self.highest_below(group, place, address).or_else(|| self.last_below_bin(group, place))
    }

    /// Every block from (size, address) on, in order. From bin to bin by the bitmaps: most are empty.
    pub(super) fn ascending(&self, size: u64, address: u64) -> impl Iterator<Item = Entry> + '_ {
        let mut next = Some(self.first_at_least(size)).filter(|&found| found != Entry::END);
        let mut bin: Vec<Entry> = Vec::new();
        std::iter::from_fn(move || {
            if bin.is_empty() {
                bin = self.of_size(next?.size);
                // The last comes first.
                bin.sort_unstable_by(|one, other| other.cmp(one));
                next = self.found_above(bin.first()?.size);
            }
            bin.pop()
        })
        .skip_while(move |entry| (entry.size, entry.address) < (size, address))
    }

    /// All blocks of a size, in no order.
    fn of_size(&self, size: u64) -> Vec<Entry> {
        let Some((group, place)) = bin_of(size) else {
            return self.huge.range((size, 0)..=(size, u64::MAX)).map(huge_entry).collect();
        };
        let Some((lowest, crowd)) = self.bin(group, place) else { return Vec::new() };
        let others = crowd.into_iter().flat_map(Crowd::iter);
        std::iter::once(lowest).chain(others).map(binned_entry(group, place)).collect()
    }

    #[cold]
    fn add_group(&mut self, number: usize) {
        if self.groups.len() <= number {
            self.groups.resize_with(number + 1, || None);
        }
        let bin = Bin { address: 0, slot: NONE, crowd: NONE };
        self.groups[number] = Some(Box::new(Group { occupied: 0, crowded: 0, bins: [bin; GROUP] }));
    }

    /// Adds a block to a bin that holds another already.
    #[inline(never)]
    fn join(&mut self, group: usize, place: usize, block: (u64, u32)) {
        let Some(Some(group)) = self.groups.get_mut(group) else { return };
        let bin = &mut group.bins[place];
        group.crowded |= 1 << place;
        let resident = (bin.address, bin.slot);
        let (lowest, other) = select_unpredictable(block.0 < resident.0, (block, resident), (resident, block));
        (bin.address, bin.slot) = lowest;
        if bin.crowd == NONE {
            bin.crowd = self.crowds.len() as u32;
            self.crowds.push(Crowd::default());
        }
        self.crowds[bin.crowd as usize].insert(other, &mut self.places);
    }

    /// Removes a block from a bin that holds others too.
    #[inline(never)]
    fn leave(&mut self, group: usize, place: usize, slot: u32) {
        let Some(Some(group)) = self.groups.get_mut(group) else { return };
        let bin = &mut group.bins[place];
        let crowd = &mut self.crowds[bin.crowd as usize];
        if bin.slot != slot {
            crowd.remove(slot, &mut self.places);
        } else if let Some(lowest) = crowd.take_lowest(&mut self.places) {
            (bin.address, bin.slot) = lowest;
        }
        if crowd.is_empty() {
            group.crowded &= !(1 << place);
        }
    }

    /// The lowest block of an occupied bin, and the crowd of the others.
    fn bin(&self, group: usize, place: usize) -> Option<((u64, u32), Option<&Crowd>)> {
        let group = self.groups.get(group)?.as_deref().filter(|group| group.occupied & (1 << place) != 0)?;
        let bin = &group.bins[place];
        Some(((bin.address, bin.slot), self.crowds.get(bin.crowd as usize)))
    }

    /// The highest block of one size below an address.
    fn highest_below(&self, group: usize, place: usize, address: u64) -> Option<Entry> {
        let (lowest, crowd) = self.bin(group, place)?;
        let others = crowd.and_then(|crowd| crowd.below(address));
        others.or(Some(lowest).filter(|lowest| lowest.0 < address)).map(binned_entry(group, place))
    }

    #[inline]
    fn first_huge(&self, size: u64) -> Entry {
        if self.huge.is_empty() { Entry::END } else { self.search_huge(size).map_or(Entry::END, huge_entry) }
    }

    /// Two references come back in registers; an entry would be returned in memory, and whatever else could have been
    /// found in its stead would go there too.
    #[inline(never)]
    fn search_huge(&self, size: u64) -> Option<(&(u64, u64), &u32)> {
        self.huge.range((size, 0)..).next()
    }

    /// The first block in this bin or above.
    #[inline(always)]
    fn first_from_bin(&self, group_number: usize, place: usize) -> Entry {
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
        let highest = |number: usize, bins: u64| {
            let place = bins.checked_ilog2()? as usize;
            self.highest_below(number, place, u64::MAX)
        };
        let group = self.groups.get(group_number).and_then(Option::as_deref);
        let below = group.map_or(0, |group| group.occupied & !(u64::MAX << place));
        highest(group_number, below).or_else(|| {
            let last = group_number.min(self.groups.len());
            let mut groups = (0..last).rev().zip(self.groups[..last].iter().rev());
            groups.find_map(|(number, group)| highest(number, group.as_ref()?.occupied))
        })
    }
}

impl Group {
    /// The lowest block of the smallest size among some of the bins; at least one is among them.
    #[inline]
    fn lowest(&self, number: usize, bins: u64) -> Entry {
        let place = bins.trailing_zeros() as usize % GROUP;
        let bin = &self.bins[place];
        binned_entry(number, place)((bin.address, bin.slot))
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

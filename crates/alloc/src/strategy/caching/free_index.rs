//! The free blocks of one pool and stream, ordered by size and, among equals, by a number that the
//! strategy gives them, as `BlockComparatorSize` orders them. The number is the address, or the age
//! of a block or segment; no two blocks have the same.
//!
//! PyTorch keeps a `std::set`. Here, sizes up to 32 MiB have one bin each under a bitmap of three
//! levels, so the best fit is found in a few words; larger blocks are in an ordered map. The block
//! that was added last stays outside the bins until the next one is added: it is the block most
//! likely to be taken or merged next, so a free followed by an allocation touches no bin.
//!
//! Bins need sizes that are multiples of 512. Releases in which other sizes are possible keep all
//! blocks in the ordered map.

use std::{collections::BTreeMap, hint::select_unpredictable};

use crate::strategy::pooled::NONE;

/// A free block. Blocks are ordered as in the index; no two have the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::strategy) struct FreeBlock {
    pub(in crate::strategy) size: u64,
    pub(in crate::strategy) order: u64,
    pub(in crate::strategy) slot: u32,
}

impl FreeBlock {
    /// Stands for no block: smaller than any request.
    const NONE: FreeBlock = FreeBlock { size: 0, order: 0, slot: NONE };
    /// Stands for no block: larger than any other.
    const END: FreeBlock = FreeBlock { size: u64::MAX, order: u64::MAX, slot: NONE };

    /// Compares both keys as one number, without a branch: which block is smaller cannot be
    /// predicted.
    #[inline]
    fn precedes(&self, other: &FreeBlock) -> bool {
        let key = |entry: &FreeBlock| u128::from(entry.size) << 64 | u128::from(entry.order);
        key(self) < key(other)
    }

    /// Selects field by field, in registers: through memory, the loads would wait for the stores.
    #[inline]
    fn select(first: bool, one: &FreeBlock, other: &FreeBlock) -> FreeBlock {
        FreeBlock {
            size: select_unpredictable(first, one.size, other.size),
            order: select_unpredictable(first, one.order, other.order),
            slot: select_unpredictable(first, one.slot, other.slot),
        }
    }
}

/// The free blocks of one pool and stream.
#[derive(Clone, Debug)]
pub(in crate::strategy) struct FreeIndex {
    /// The block that was added last, or [`FreeBlock::NONE`] if it was removed. It is not in the
    /// bins.
    latest: FreeBlock,
    bins: SizeBins,
}

impl Default for FreeIndex {
    fn default() -> Self {
        FreeIndex { latest: FreeBlock::NONE, bins: SizeBins::default() }
    }
}

impl FreeIndex {
    /// An empty index. With `any_size`, sizes need not be multiples of 512.
    pub(in crate::strategy) fn new(any_size: bool) -> FreeIndex {
        FreeIndex { bins: SizeBins { any_size, ..SizeBins::default() }, ..FreeIndex::default() }
    }

    /// Adds a block.
    #[inline(always)]
    pub(in crate::strategy) fn insert(&mut self, entry: FreeBlock) {
        let former = std::mem::replace(&mut self.latest, entry);
        if former.size != 0 {
            self.bins.insert(former);
        }
    }

    /// Removes a block that is in here.
    #[inline(always)]
    pub(in crate::strategy) fn remove(&mut self, entry: FreeBlock) {
        if self.latest.slot == entry.slot {
            self.latest = FreeBlock::NONE;
        } else {
            self.bins.remove(entry);
        }
    }

    /// The smallest block of at least `size`; the lowest order among equals.
    #[inline(always)]
    pub(in crate::strategy) fn first_at_least(&self, size: u64) -> Option<FreeBlock> {
        let binned = self.bins.first_at_least(size);
        let latest_is_first = (self.latest.size >= size) & self.latest.precedes(&binned);
        let first = FreeBlock::select(latest_is_first, &self.latest, &binned);
        (first.size != u64::MAX).then_some(first)
    }

    /// The block that follows (size, order).
    pub(in crate::strategy) fn after(&self, size: u64, order: u64) -> Option<FreeBlock> {
        let binned = self.bins.after(size, order);
        let latest = self.latest().filter(|latest| (latest.size, latest.order) > (size, order));
        latest.filter(|latest| binned.is_none_or(|other| latest.precedes(&other))).or(binned)
    }

    /// The last block before (size, order).
    pub(in crate::strategy) fn before(&self, size: u64, order: u64) -> Option<FreeBlock> {
        let latest = self.latest().filter(|latest| (latest.size, latest.order) < (size, order));
        latest.max(self.bins.before(size, order))
    }

    /// The largest block; the highest order among equals.
    pub(in crate::strategy) fn last(&self) -> Option<FreeBlock> {
        self.before(u64::MAX, 0)
    }

    /// Every block from (size, order) on, in order.
    pub(in crate::strategy) fn ascending(&self, size: u64, order: u64) -> impl Iterator<Item = FreeBlock> + '_ {
        let mut latest = self.latest().filter(|latest| (latest.size, latest.order) >= (size, order));
        let mut binned = self.bins.ascending(size, order).peekable();
        std::iter::from_fn(move || {
            let latest_is_next = latest.is_some_and(|latest| binned.peek().is_none_or(|other| latest.precedes(other)));
            if latest_is_next { latest.take() } else { binned.next() }
        })
    }

    fn latest(&self) -> Option<FreeBlock> {
        (self.latest.size != 0).then_some(self.latest)
    }
}

/// Sizes are multiples of 512 bytes (`kMinBlockSize`).
const QUANTUM_SHIFT: u32 = 9;
/// Sizes up to 32 MiB have bins of their own.
const BINS: usize = 1 << 16;
const GROUP: usize = 64;

/// Free blocks by size. Bins are allocated on first use.
#[derive(Clone, Debug, Default)]
struct SizeBins {
    /// Which words of `groups_occupied` are not zero.
    words_occupied: u64,
    /// Which groups hold a block.
    groups_occupied: [u64; BINS / GROUP / 64],
    groups: Vec<Option<Box<BinGroup>>>,
    heaps: Vec<AddressHeap>,
    places: HeapPositions,
    /// Blocks above 32 MiB by (size, order), or all blocks if sizes are not multiples of 512.
    huge: BTreeMap<(u64, u64), u32>,
    /// There are no bins.
    any_size: bool,
}

/// 64 neighbouring bins.
#[derive(Clone, Debug)]
struct BinGroup {
    /// Which bins hold a block.
    occupied: u64,
    /// Which bins hold more than one block.
    crowded: u64,
    bins: [SizeBin; GROUP],
}

/// The blocks of one size: the block with the lowest order, which is handed out next, and a heap
/// of the others. Valid only while the bit of the bin in `occupied` is set.
#[derive(Clone, Copy, Debug)]
struct SizeBin {
    /// The lowest block.
    order: u64,
    slot: u32,
    /// The heap of the other blocks, or [`NONE`] if there has never been one.
    heap: u32,
}

impl SizeBins {
    /// Adds a block.
    #[inline]
    fn insert(&mut self, FreeBlock { size, order, slot }: FreeBlock) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.insert((size, order), slot);
            return;
        };
        let Some(Some(group)) = self.groups.get_mut(group_number) else {
            return self.insert_first(group_number, FreeBlock { size, order, slot });
        };
        let (bit, bin) = (1 << place, &mut group.bins[place]);
        if group.occupied & bit != 0 {
            return self.join(group_number, place, (order, slot));
        }
        bin.order = order;
        bin.slot = slot;
        group.occupied |= bit;
        self.groups_occupied[group_number / 64] |= 1 << (group_number % 64);
        self.words_occupied |= 1 << (group_number / 64);
    }

    /// Removes a block that is in here.
    #[inline]
    fn remove(&mut self, FreeBlock { size, order, slot }: FreeBlock) {
        let Some((group_number, place)) = bin_of(size) else {
            self.huge.remove(&(size, order));
            return;
        };
        let Some(Some(group)) = self.groups.get_mut(group_number) else {
            self.huge.remove(&(size, order));
            return;
        };
        let bit = 1 << place;
        if group.crowded & bit != 0 {
            return self.leave(group_number, place, slot);
        }
        group.occupied &= !bit;
        // Without a branch: whether it was the last of its group cannot be predicted.
        let word = &mut self.groups_occupied[group_number / 64];
        *word &= !(u64::from(group.occupied == 0) << (group_number % 64));
        self.words_occupied &= !(u64::from(*word == 0) << (group_number / 64));
    }

    /// The smallest block of at least `size`, the lowest order among equals; or
    /// [`FreeBlock::END`]. An `Option` would be returned through memory, this stays in registers.
    #[inline(always)]
    fn first_at_least(&self, size: u64) -> FreeBlock {
        match bin_of(size) {
            Some((group, place)) => self.first_from_bin(group, place, size),
            None => self.first_huge(size),
        }
    }

    /// The block that follows (size, order).
    fn after(&self, size: u64, order: u64) -> Option<FreeBlock> {
        if self.is_empty() {
            return None;
        }
        let same_size = self.of_size(size).filter(|block| block.order > order).min();
        same_size.or_else(|| self.found_above(size))
    }

    /// The smallest block of more than `size`.
    fn found_above(&self, size: u64) -> Option<FreeBlock> {
        Some(self.first_at_least(size + 1)).filter(|&found| found != FreeBlock::END)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.words_occupied == 0 && self.huge.is_empty()
    }

    /// The last block before (size, order).
    fn before(&self, size: u64, order: u64) -> Option<FreeBlock> {
        let same_size = self.of_size(size).filter(|block| block.order < order).max();
        let below = same_size.or_else(|| self.huge.range(..(size, 0)).next_back().map(huge_entry));
        let (group, place) = bin_of(size).unwrap_or((BINS / GROUP, 0));
        below.or_else(|| self.last_below_bin(group, place))
    }

    /// Every block from (size, order) on, in order. The bitmaps skip empty bins.
    fn ascending(&self, size: u64, order: u64) -> impl Iterator<Item = FreeBlock> + '_ {
        let mut next = Some(self.first_at_least(size)).filter(|&found| found != FreeBlock::END);
        let mut bin: Vec<FreeBlock> = Vec::new();
        std::iter::from_fn(move || {
            if bin.is_empty() {
                bin = self.of_size(next?.size).collect();
                // Descending, because `pop` takes the last.
                bin.sort_unstable_by(|one, other| other.cmp(one));
                next = self.found_above(bin.first()?.size);
            }
            bin.pop()
        })
        .skip_while(move |entry| (entry.size, entry.order) < (size, order))
    }

    /// All blocks of a size, unordered.
    fn of_size(&self, size: u64) -> impl Iterator<Item = FreeBlock> + '_ {
        let binned = bin_of(size).into_iter().flat_map(|(group, place)| {
            let (lowest, heap) = self.bin(group, place).unzip();
            let others = heap.flatten().into_iter().flat_map(|heap| heap.nodes.iter().copied());
            lowest.into_iter().chain(others).map(binned_entry(group, place))
        });
        binned.chain(self.huge.range((size, 0)..=(size, u64::MAX)).map(huge_entry))
    }

    /// Adds a block to a group without bins so far.
    #[cold]
    fn insert_first(&mut self, number: usize, block: FreeBlock) {
        if self.any_size {
            self.huge.insert((block.size, block.order), block.slot);
            return;
        }
        if self.groups.len() <= number {
            self.groups.resize_with(number + 1, || None);
        }
        let bin = SizeBin { order: 0, slot: NONE, heap: NONE };
        self.groups[number] = Some(Box::new(BinGroup { occupied: 0, crowded: 0, bins: [bin; GROUP] }));
        self.insert(block);
    }

    /// Adds a block to an occupied bin.
    #[inline(never)]
    fn join(&mut self, group: usize, place: usize, block: (u64, u32)) {
        let Some(Some(group)) = self.groups.get_mut(group) else { return };
        let bin = &mut group.bins[place];
        group.crowded |= 1 << place;
        let resident = (bin.order, bin.slot);
        let (lowest, other) = select_unpredictable(block.0 < resident.0, (block, resident), (resident, block));
        (bin.order, bin.slot) = lowest;
        if bin.heap == NONE {
            bin.heap = self.heaps.len() as u32;
            self.heaps.push(AddressHeap::default());
        }
        self.heaps[bin.heap as usize].insert(other, &mut self.places);
    }

    /// Removes a block from a bin that holds several.
    #[inline(never)]
    fn leave(&mut self, group: usize, place: usize, slot: u32) {
        let Some(Some(group)) = self.groups.get_mut(group) else { return };
        let bin = &mut group.bins[place];
        let heap = &mut self.heaps[bin.heap as usize];
        if bin.slot != slot {
            heap.remove(slot, &mut self.places);
        } else if let Some(lowest) = heap.take_lowest(&mut self.places) {
            (bin.order, bin.slot) = lowest;
        }
        if heap.is_empty() {
            group.crowded &= !(1 << place);
        }
    }

    /// The lowest block of an occupied bin, and the heap of the others.
    fn bin(&self, group: usize, place: usize) -> Option<((u64, u32), Option<&AddressHeap>)> {
        let group = self.groups.get(group)?.as_deref().filter(|group| group.occupied & (1 << place) != 0)?;
        let bin = &group.bins[place];
        Some(((bin.order, bin.slot), self.heaps.get(bin.heap as usize)))
    }

    #[inline]
    fn first_huge(&self, size: u64) -> FreeBlock {
        if self.huge.is_empty() { FreeBlock::END } else { self.search_huge(size).map_or(FreeBlock::END, huge_entry) }
    }

    /// Returns two references, which fit in registers; a `FreeBlock` would be returned through
    /// memory.
    #[inline(never)]
    fn search_huge(&self, size: u64) -> Option<(&(u64, u64), &u32)> {
        self.huge.range((size, 0)..).next()
    }

    /// The first block in this bin, which is for `size`, or above.
    #[inline(always)]
    fn first_from_bin(&self, group_number: usize, place: usize, size: u64) -> FreeBlock {
        if let Some(Some(group)) = self.groups.get(group_number) {
            let at_or_above = group.occupied & (u64::MAX << place);
            if at_or_above != 0 {
                return group.lowest(group_number, at_or_above);
            }
        }
        match self.next_group(group_number) {
            Some((number, group)) => group.lowest(number, group.occupied),
            None => self.first_huge(size),
        }
    }

    /// The next group above that holds a block.
    #[inline]
    fn next_group(&self, below: usize) -> Option<(usize, &BinGroup)> {
        let word = below / 64;
        // Two shifts, because a shift by 64 is not defined.
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
    fn last_below_bin(&self, group_number: usize, place: usize) -> Option<FreeBlock> {
        let highest = |number: usize, bins: u64| {
            let size = bin_size(number, bins.checked_ilog2()? as usize);
            self.of_size(size).max()
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

impl BinGroup {
    /// The lowest block of the smallest size among the bins of a non-empty bit set.
    #[inline]
    fn lowest(&self, number: usize, bins: u64) -> FreeBlock {
        let place = bins.trailing_zeros() as usize % GROUP;
        let bin = &self.bins[place];
        binned_entry(number, place)((bin.order, bin.slot))
    }
}

/// Makes an entry of what a bin holds. The bin determines the size.
#[inline]
fn binned_entry(group: usize, place: usize) -> impl Fn((u64, u32)) -> FreeBlock {
    let size = bin_size(group, place);
    move |(order, slot)| FreeBlock { size, order, slot }
}

/// The size of the blocks in a bin.
#[inline]
fn bin_size(group: usize, place: usize) -> u64 {
    ((group * GROUP + place + 1) as u64) << QUANTUM_SHIFT
}

fn huge_entry((&(size, order), &slot): (&(u64, u64), &u32)) -> FreeBlock {
    FreeBlock { size, order, slot }
}

/// Group and place of the bin for a size; `None` above 32 MiB. A size that is not a multiple of 512
/// (a search key) is rounded up.
#[inline]
fn bin_of(size: u64) -> Option<(usize, usize)> {
    let number = (size.max(1) - 1) >> QUANTUM_SHIFT;
    (number < BINS as u64).then_some((number as usize / GROUP, number as usize % GROUP))
}

/// Children per heap node. With four, most inserted blocks stay at the bottom, which branch
/// prediction learns, and the four lie in one or two cache lines.
const CHILDREN: usize = 4;

/// The position of each block in its heap, by slot. Valid only for blocks that are in a heap.
#[derive(Clone, Debug, Default)]
struct HeapPositions(Vec<u32>);

impl HeapPositions {
    #[inline]
    fn note(&mut self, slot: u32, place: usize) {
        match self.0.get_mut(slot as usize) {
            Some(noted) => *noted = place as u32,
            None => self.note_first(slot, place),
        }
    }

    #[cold]
    fn note_first(&mut self, slot: u32, place: usize) {
        self.0.resize((slot as usize + 1).next_power_of_two(), 0);
        self.note(slot, place);
    }
}

/// The blocks of one size except the lowest: a heap of (order, slot), lowest order first. The
/// lowest is removed when it is handed out, any other when a neighbour merges with it, which is why
/// positions are noted by slot.
#[derive(Clone, Debug, Default)]
struct AddressHeap {
    nodes: Vec<(u64, u32)>,
}

impl AddressHeap {
    #[inline]
    fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Adds a block.
    #[inline]
    fn insert(&mut self, block: (u64, u32), places: &mut HeapPositions) {
        self.nodes.push(block);
        self.rise(self.nodes.len() - 1, block, places);
    }

    /// Removes a block that is in here.
    #[inline]
    fn remove(&mut self, slot: u32, places: &mut HeapPositions) {
        let place = places.0.get(slot as usize).map_or(usize::MAX, |&place| place as usize);
        let Some(last) = self.nodes.pop() else { return };
        if place < self.nodes.len() {
            let place = self.sink(place, last, places);
            self.rise(place, last, places);
        }
    }

    /// Removes the block with the lowest order.
    #[inline]
    fn take_lowest(&mut self, places: &mut HeapPositions) -> Option<(u64, u32)> {
        let last = self.nodes.pop()?;
        let Some(&lowest) = self.nodes.first() else { return Some(last) };
        let place = self.sink(0, last, places);
        self.settle(place, last, places);
        Some(lowest)
    }

    /// Moves the gap at `place` up to where `block` belongs, and puts the block there.
    #[inline]
    fn rise(&mut self, mut place: usize, block: (u64, u32), places: &mut HeapPositions) {
        while place > 0 {
            let above = (place - 1) / CHILDREN;
            let parent = self.nodes[above];
            if parent.0 < block.0 {
                break;
            }
            self.settle(place, parent, places);
            place = above;
        }
        self.settle(place, block, places);
    }

    /// Moves the gap at `place` down to where `block` belongs.
    #[inline]
    fn sink(&mut self, mut place: usize, block: (u64, u32), places: &mut HeapPositions) -> usize {
        loop {
            let first = CHILDREN * place + 1;
            let Some(children) = self.nodes.get(first..).filter(|children| !children.is_empty()) else { return place };
            let (nth, child) = match children.first_chunk::<CHILDREN>() {
                Some(children) => lowest_of(children),
                None => lowest_of(children),
            };
            if block.0 < child.0 {
                return place;
            }
            self.settle(place, child, places);
            place = first + nth;
        }
    }

    #[inline]
    fn settle(&mut self, place: usize, block: (u64, u32), places: &mut HeapPositions) {
        self.nodes[place] = block;
        places.note(block.1, place);
    }
}

/// The lowest of some blocks and its position among them. Without a branch: which it is cannot be
/// predicted.
#[inline(always)]
fn lowest_of(blocks: &[(u64, u32)]) -> (usize, (u64, u32)) {
    let (mut place, mut lowest) = (0, blocks[0]);
    for (other, &block) in blocks.iter().enumerate().skip(1) {
        let is_lower = block.0 < lowest.0;
        place = select_unpredictable(is_lower, other, place);
        lowest.0 = select_unpredictable(is_lower, block.0, lowest.0);
        lowest.1 = select_unpredictable(is_lower, block.1, lowest.1);
    }
    (place, lowest)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use oomph_base::MIB;

    /// Many sizes share few bins, so heaps grow and shrink, and some sizes lie above the bins.
    fn size() -> impl Strategy<Value = u64> {
        prop_oneof![
            (1u64..4).prop_map(|n| n * 512),
            (1u64..=65_536).prop_map(|n| n * 512),
            (1u64..100).prop_map(|n| 32 * MIB + n * 512),
        ]
    }

    fn entry((&(size, order), &slot): (&(u64, u64), &u32)) -> FreeBlock {
        FreeBlock { size, order, slot }
    }

    proptest! {
        #[test]
        fn free_index_agrees_with_ordered_map(
            steps in prop::collection::vec((any::<bool>(), size(), 0u64..200), 1..600),
            any_size: bool,
        ) {
            let (mut index, mut model) = (FreeIndex::new(any_size), BTreeMap::new());
            for (number, (insert, size, place)) in (0u32..).zip(steps) {
                let size = size - if any_size { place % 512 } else { 0 };
                let order = 4096 + place * 512;
                if insert && model.keys().all(|&(_, other)| other != order) {
                    index.insert(FreeBlock { size, order, slot: number });
                    model.insert((size, order), number);
                } else if let Some((&(size, order), _)) = model.range((size, order)..).next() {
                    let slot = model.remove(&(size, order)).unwrap();
                    index.remove(FreeBlock { size, order, slot });
                }
                let value = |found: Option<(&(u64, u64), &u32)>| found.map(entry);
                prop_assert_eq!(index.first_at_least(size), value(model.range((size, 0)..).next()));
                prop_assert_eq!(index.after(size, order), value(model.range((size, order + 1)..).next()));
                prop_assert_eq!(index.before(size, order), value(model.range(..(size, order)).next_back()));
                prop_assert_eq!(index.last(), value(model.last_key_value()));
                let next = index.ascending(size, order).take(3);
                prop_assert!(next.eq(model.range((size, order)..).take(3).map(entry)));
            }
            prop_assert!(index.ascending(0, 0).eq(model.iter().map(entry)));
        }
    }

    #[test]
    fn lowest_order_of_equal_blocks_comes_first() {
        let mut index = FreeIndex::default();
        for n in 0..10_000u64 {
            // A full cycle of a permutation: neither ascending nor descending.
            index.insert(FreeBlock { size: 512, order: 512 + (n * 7_919 % 10_000) * 512, slot: n as u32 });
        }
        for n in 0..10_000u64 {
            let slot = index.first_at_least(512).unwrap().slot;
            assert_eq!(u64::from(slot) * 7_919 % 10_000, n);
            index.remove(FreeBlock { size: 512, order: 512 + n * 512, slot });
        }
        assert_eq!(index.first_at_least(512), None);
    }
}

//! Free blocks in address order, with a fast search for the first that is large enough.
//!
//! Blocks are in leaves of up to [`LEAF`], in address order throughout. One row has the size of the
//! largest block of each leaf. A search reads that row up to the first leaf with a block that fits, and
//! then that leaf. With ten thousand free blocks both together are a few hundred numbers, where RMM
//! visits every block of a tree.

use super::QUANTUM;

/// Blocks in a leaf at most.
const LEAF: usize = 64;
/// Neighbouring leaves with no more blocks than this together become one.
const SPARSE: usize = LEAF / 2;
/// Numbers compared at a time.
const STRIDE: usize = 16;

/// The largest block that can be in here: sizes are kept in quanta, in 32 bits.
pub(super) const LARGEST: u64 = u32::MAX as u64 * QUANTUM;

/// Free blocks in address order.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressOrder {
    /// The lower limit of each leaf: its blocks lie there or above, those of earlier leaves below.
    starts: Vec<u64>,
    /// The size of the largest block of each leaf, in quanta.
    largest: Vec<u32>,
    leaves: Vec<Vec<AddressedBlock>>,
}

#[derive(Clone, Copy, Debug)]
struct AddressedBlock {
    address: u64,
    quanta: u32,
    slot: u32,
}

impl AddressedBlock {
    fn new(address: u64, bytes: u64, slot: u32) -> AddressedBlock {
        AddressedBlock { address, quanta: in_quanta(bytes), slot }
    }
}

#[inline]
fn in_quanta(bytes: u64) -> u32 {
    (bytes / QUANTUM) as u32
}

/// The first number that is at least `quanta`.
#[inline]
fn first_at_least(numbers: &[u32], quanta: u32) -> Option<usize> {
    for (stride, numbers) in numbers.chunks(STRIDE).enumerate() {
        // To the end of the stride in any case: that compiles to a few wide comparisons.
        if numbers.iter().fold(false, |any, &number| any | (number >= quanta)) {
            return numbers.iter().position(|&number| number >= quanta).map(|position| stride * STRIDE + position);
        }
    }
    None
}

#[inline]
fn largest(leaf: &[AddressedBlock]) -> u32 {
    leaf.iter().map(|block| block.quanta).max().unwrap_or(0)
}

impl AddressOrder {
    /// The slot of the first block of at least `bytes`.
    #[inline]
    pub(super) fn first_fit(&self, bytes: u64) -> Option<u32> {
        let quanta = in_quanta(bytes);
        let leaf = &self.leaves[first_at_least(&self.largest, quanta)?];
        leaf.iter().find(|block| block.quanta >= quanta).map(|block| block.slot)
    }

    /// The size of the largest block.
    pub(super) fn largest(&self) -> u64 {
        u64::from(self.largest.iter().copied().max().unwrap_or(0)) * QUANTUM
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, address: u64, bytes: u64, slot: u32) {
        let (leaf, position) = self.place(address);
        match self.leaves.get_mut(leaf) {
            Some(found) if found.len() < LEAF => {
                found.insert(position, AddressedBlock::new(address, bytes, slot));
                self.largest[leaf] = self.largest[leaf].max(in_quanta(bytes));
                self.starts[leaf] = self.starts[leaf].min(address);
            }
            found => {
                match found {
                    Some(_) => self.divide(leaf),
                    None => self.add_leaf(leaf, address, Vec::with_capacity(LEAF)),
                }
                self.insert(address, bytes, slot);
            }
        }
    }

    /// Removes the block at an address.
    #[inline]
    pub(super) fn remove(&mut self, address: u64) {
        let (leaf, position) = self.place(address);
        let found = &mut self.leaves[leaf];
        let removed = found.remove(position);
        if removed.quanta == self.largest[leaf] {
            self.largest[leaf] = largest(found);
        }
        if found.len() <= SPARSE / 2 {
            self.thin_out(leaf);
        }
    }

    /// Gives the block at an address another start, size and slot. Its neighbours in the order must
    /// stay the same.
    #[inline]
    pub(super) fn replace(&mut self, address: u64, new_address: u64, bytes: u64, slot: u32) {
        let (leaf, position) = self.place(address);
        let found = &mut self.leaves[leaf];
        let former = std::mem::replace(&mut found[position], AddressedBlock::new(new_address, bytes, slot));
        if in_quanta(bytes) >= self.largest[leaf] {
            self.largest[leaf] = in_quanta(bytes);
        } else if former.quanta == self.largest[leaf] {
            self.largest[leaf] = largest(found);
        }
        self.starts[leaf] = self.starts[leaf].min(new_address);
        // The limit of the next leaf may be below its first block, from blocks that have gone.
        if self.starts.get(leaf + 1).is_some_and(|&start| start <= new_address) {
            self.starts[leaf + 1] = self.leaves[leaf + 1][0].address;
        }
    }

    /// The leaf of an address and the position in it.
    #[inline]
    fn place(&self, address: u64) -> (usize, usize) {
        let leaf = self.starts.partition_point(|&start| start <= address).saturating_sub(1);
        let before = |found: &Vec<AddressedBlock>| found.partition_point(|other| other.address < address);
        (leaf, self.leaves.get(leaf).map_or(0, before))
    }

    #[cold]
    fn divide(&mut self, leaf: usize) {
        let upper = self.leaves[leaf].split_off(LEAF / 2);
        self.largest[leaf] = largest(&self.leaves[leaf]);
        self.add_leaf(leaf + 1, upper[0].address, upper);
    }

    fn add_leaf(&mut self, index: usize, start: u64, leaf: Vec<AddressedBlock>) {
        self.starts.insert(index, start);
        self.largest.insert(index, largest(&leaf));
        self.leaves.insert(index, leaf);
    }

    /// Drops a leaf without blocks, and joins a leaf with few blocks with a neighbour where both fit
    /// into half a leaf. The last leaf stays: a block that comes and goes should not create it each
    /// time.
    #[cold]
    fn thin_out(&mut self, leaf: usize) {
        if self.leaves.len() == 1 {
            return;
        }
        if self.leaves[leaf].is_empty() {
            self.drop_leaf(leaf);
            return;
        }
        let sparse = |pair: &[Vec<AddressedBlock>]| pair[0].len() + pair[1].len() <= SPARSE;
        let lower = leaf.saturating_sub(1);
        if let Some(pair) = self.leaves[lower..].windows(2).take(leaf + 1 - lower).position(sparse) {
            let lower = lower + pair;
            let mut upper = self.drop_leaf(lower + 1);
            self.leaves[lower].append(&mut upper);
            self.largest[lower] = largest(&self.leaves[lower]);
        }
    }

    fn drop_leaf(&mut self, leaf: usize) -> Vec<AddressedBlock> {
        self.starts.remove(leaf);
        self.largest.remove(leaf);
        self.leaves.remove(leaf)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_order_agrees_with_a_map(
            steps in prop::collection::vec((0..5u8, 0..900u64, 1..200u64), 1..1500),
        ) {
            let (mut order, mut model) = (AddressOrder::default(), BTreeMap::new());
            for (number, (action, place, quanta)) in (0u32..).zip(steps) {
                let (address, bytes) = ((1 << 30) + place * 100 * QUANTUM, quanta * QUANTUM);
                let near = model.range(address..).next().map(|(&address, _)| address);
                match (action, near) {
                    (0..3, _) if !model.contains_key(&address) => {
                        order.insert(address, bytes, number);
                        model.insert(address, (bytes, number));
                    }
                    (3, Some(near)) => {
                        // Far enough to pass the addresses of many blocks that have gone.
                        let distance = 7 * bytes;
                        let moved = if quanta % 2 == 0 { near + distance } else { near - distance };
                        let between = (near.min(moved), near.max(moved));
                        if model.range(between.0..=between.1).count() == 1 {
                            order.replace(near, moved, bytes, number);
                            model.remove(&near);
                            model.insert(moved, (bytes, number));
                        }
                    }
                    (_, Some(near)) => {
                        order.remove(near);
                        model.remove(&near);
                    }
                    _ => {}
                }
                for wanted in [1, quanta, 150, 250] {
                    let fits = model.values().find(|(bytes, _)| *bytes >= wanted * QUANTUM);
                    prop_assert_eq!(order.first_fit(wanted * QUANTUM), fits.map(|&(_, slot)| slot));
                }
                prop_assert_eq!(order.largest(), model.values().map(|&(bytes, _)| bytes).max().unwrap_or(0));
            }
        }
    }

    #[test]
    fn empty_leaves_are_dropped_and_sparse_ones_joined() {
        let mut order = AddressOrder::default();
        for block in 0..1000 {
            order.insert(block * 1000 * QUANTUM, QUANTUM, block as u32);
        }
        let many = order.leaves.len();
        for block in (0..1000).filter(|block| block % 10 != 0) {
            order.remove(block * 1000 * QUANTUM);
        }
        let few = order.leaves.len();
        assert!(many >= 1000 / LEAF && few < many / 3, "{many} leaves, then {few}");
        for block in (0..1000).filter(|block| block % 10 == 0) {
            assert_eq!(order.first_fit(QUANTUM), Some(block as u32));
            order.remove(block * 1000 * QUANTUM);
        }
        assert_eq!((order.first_fit(QUANTUM), order.leaves.len()), (None, 1));
    }
}

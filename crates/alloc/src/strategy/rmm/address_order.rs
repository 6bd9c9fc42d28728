//! Free blocks in address order, of which the first that is large enough is found fast.
//!
//! Blocks lie in leaves of up to [`LEAF`], in address order throughout. What the largest block of each leaf is stands in
//! one row, so that a search walks that row to the first leaf with a block that fits, and then that leaf. Rows are
//! compared many at a time. With ten thousand free blocks both walks together are a few hundred numbers, where RMM
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
    /// Below which address no block of a leaf lies, and above which none of the one before.
    starts: Vec<u64>,
    /// The size of the largest block of each leaf, in quanta.
    largest: Vec<u32>,
    #[expect(clippy::vec_box, reason = "a leaf is 1 KiB, and those behind a new one move")]
    leaves: Vec<Box<Leaf>>,
}

#[derive(Clone, Debug)]
struct Leaf {
    blocks: usize,
    addresses: [u64; LEAF],
    quanta: [u32; LEAF],
    slots: [u32; LEAF],
}

/// Where a block is, or would be.
#[derive(Clone, Copy, Debug)]
struct Place {
    leaf: usize,
    position: usize,
}

/// The first number that is at least `quanta`.
#[inline]
fn first_at_least(numbers: &[u32], quanta: u32) -> Option<usize> {
    for (stride, numbers) in numbers.chunks(STRIDE).enumerate() {
        // To the end of the stride whatever is found: that makes a few wide comparisons of it.
        if numbers.iter().fold(false, |any, &number| any | (number >= quanta)) {
            return numbers.iter().position(|&number| number >= quanta).map(|position| stride * STRIDE + position);
        }
    }
    None
}

#[inline]
fn in_quanta(bytes: u64) -> u32 {
    (bytes / QUANTUM) as u32
}

impl Leaf {
    fn new() -> Box<Leaf> {
        Box::new(Leaf { blocks: 0, addresses: [0; LEAF], quanta: [0; LEAF], slots: [0; LEAF] })
    }

    #[inline]
    fn largest(&self) -> u32 {
        self.quanta[..self.blocks].iter().copied().fold(0, u32::max)
    }

    #[inline]
    fn insert(&mut self, position: usize, address: u64, quanta: u32, slot: u32) {
        let end = self.blocks;
        self.addresses.copy_within(position..end, position + 1);
        self.quanta.copy_within(position..end, position + 1);
        self.slots.copy_within(position..end, position + 1);
        self.set(position, address, quanta, slot);
        self.blocks += 1;
    }

    #[inline]
    fn set(&mut self, position: usize, address: u64, quanta: u32, slot: u32) {
        self.addresses[position] = address;
        self.quanta[position] = quanta;
        self.slots[position] = slot;
    }

    #[inline]
    fn remove(&mut self, position: usize) {
        let end = self.blocks;
        self.addresses.copy_within(position + 1..end, position);
        self.quanta.copy_within(position + 1..end, position);
        self.slots.copy_within(position + 1..end, position);
        self.blocks -= 1;
    }

    /// Moves the blocks from a position on to the end of another leaf.
    fn move_to(&mut self, from: usize, other: &mut Leaf) {
        let (end, moved) = (self.blocks, self.blocks - from);
        let there = other.blocks..other.blocks + moved;
        other.addresses[there.clone()].copy_from_slice(&self.addresses[from..end]);
        other.quanta[there.clone()].copy_from_slice(&self.quanta[from..end]);
        other.slots[there].copy_from_slice(&self.slots[from..end]);
        other.blocks += moved;
        self.blocks = from;
    }
}

impl AddressOrder {
    /// The slot of the first block of at least so many bytes.
    #[inline]
    pub(super) fn first_fit(&self, bytes: u64) -> Option<u32> {
        let quanta = in_quanta(bytes);
        let leaf = &self.leaves[first_at_least(&self.largest, quanta)?];
        first_at_least(&leaf.quanta[..leaf.blocks], quanta).map(|position| leaf.slots[position])
    }

    /// The size of the largest block.
    pub(super) fn largest(&self) -> u64 {
        u64::from(self.largest.iter().copied().max().unwrap_or(0)) * QUANTUM
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, address: u64, bytes: u64, slot: u32) {
        let Place { leaf, position } = self.place(address);
        match self.leaves.get_mut(leaf) {
            Some(found) if found.blocks < LEAF => {
                found.insert(position, address, in_quanta(bytes), slot);
                self.largest[leaf] = self.largest[leaf].max(in_quanta(bytes));
                self.starts[leaf] = self.starts[leaf].min(address);
            }
            found => {
                match found {
                    Some(_) => self.divide(leaf),
                    None => self.add_leaf(leaf, address, Leaf::new()),
                }
                self.insert(address, bytes, slot);
            }
        }
    }

    /// Removes the block at an address.
    #[inline]
    pub(super) fn remove(&mut self, address: u64) {
        let Place { leaf, position } = self.place(address);
        let found = &mut self.leaves[leaf];
        let quanta = found.quanta[position];
        found.remove(position);
        if quanta == self.largest[leaf] {
            self.largest[leaf] = found.largest();
        }
        if found.blocks <= SPARSE / 2 {
            self.thin_out(leaf);
        }
    }

    /// The block at an address has another beginning, size or slot from now on; its neighbours in the order are the
    /// same.
    #[inline]
    pub(super) fn replace(&mut self, address: u64, new_address: u64, bytes: u64, slot: u32) {
        let Place { leaf, position } = self.place(address);
        let (found, quanta) = (&mut self.leaves[leaf], in_quanta(bytes));
        let former = found.quanta[position];
        found.set(position, new_address, quanta, slot);
        self.starts[leaf] = self.starts[leaf].min(new_address);
        // The next leaf may have begun lower once than its first block does now.
        if self.starts.get(leaf + 1).is_some_and(|&start| start <= new_address) {
            self.starts[leaf + 1] = self.leaves[leaf + 1].addresses[0];
        }
        if quanta >= self.largest[leaf] {
            self.largest[leaf] = quanta;
        } else if former == self.largest[leaf] {
            self.largest[leaf] = self.leaves[leaf].largest();
        }
    }

    #[inline]
    fn place(&self, address: u64) -> Place {
        let leaf = self.starts.partition_point(|&start| start <= address).saturating_sub(1);
        let position = self
            .leaves
            .get(leaf)
            .map_or(0, |found| found.addresses[..found.blocks].partition_point(|&other| other < address));
        Place { leaf, position }
    }

    #[cold]
    fn divide(&mut self, leaf: usize) {
        let mut upper = Leaf::new();
        let lower = &mut self.leaves[leaf];
        lower.move_to(LEAF / 2, &mut upper);
        self.largest[leaf] = lower.largest();
        self.add_leaf(leaf + 1, upper.addresses[0], upper);
    }

    fn add_leaf(&mut self, place: usize, start: u64, leaf: Box<Leaf>) {
        self.starts.insert(place, start);
        self.largest.insert(place, leaf.largest());
        self.leaves.insert(place, leaf);
    }

    /// Drops a leaf without blocks, and joins one with few with a neighbour where both fit into half a leaf. The last
    /// leaf stays: a block that comes and goes should not make it anew each time.
    #[cold]
    fn thin_out(&mut self, leaf: usize) {
        if self.leaves.len() == 1 {
            return;
        }
        if self.leaves[leaf].blocks == 0 {
            self.drop_leaf(leaf);
            return;
        }
        let sparse = |pair: &[Box<Leaf>]| pair[0].blocks + pair[1].blocks <= SPARSE;
        let lower = leaf.saturating_sub(1);
        if let Some(pair) = self.leaves[lower..].windows(2).take(leaf + 1 - lower).position(sparse) {
            let lower = lower + pair;
            let mut upper = self.drop_leaf(lower + 1);
            upper.move_to(0, &mut self.leaves[lower]);
            self.largest[lower] = self.leaves[lower].largest();
        }
    }

    fn drop_leaf(&mut self, leaf: usize) -> Box<Leaf> {
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
        fn the_order_agrees_with_a_map_that_is_searched_from_end_to_end(
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
                        // As far as over many places where others have left.
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
    fn leaves_that_empty_are_dropped_and_sparse_ones_joined() {
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

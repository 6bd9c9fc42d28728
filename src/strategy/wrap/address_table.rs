//! A hash table from block address to [`Block`], made for being called on every alloc and free.
//!
//! Open addressing with linear probing in one array, at most half full; a removal closes the gap it leaves, so there
//! are no tombstones and the table does not age.

use crate::{strategy::Block, unit::Address};

/// The table. The null address is never a key: it marks an empty place.
#[derive(Clone, Debug)]
pub(super) struct AddressTable {
    /// A power of two many.
    places: Vec<Block>,
    /// How many of them are in use.
    used: usize,
}

const EMPTY: Block = Block { address: Address::NULL, size: 0, slot: 0, generation: 0 };
const SMALLEST: usize = 64;

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable { places: vec![EMPTY; SMALLEST], used: 0 }
    }
}

impl AddressTable {
    /// Puts a block in, in place of one with the same address.
    pub(super) fn insert(&mut self, block: Block) {
        if block.address == Address::NULL {
            return;
        }
        if (self.used + 1) * 2 > self.places.len() {
            self.grow();
        }
        let place = self.place_of(block.address);
        self.used += usize::from(self.places[place].address == Address::NULL);
        self.places[place] = block;
    }

    /// The block at this address.
    pub(super) fn get(&self, address: Address) -> Option<Block> {
        let block = self.places[self.place_of(address)];
        (block.address != Address::NULL).then_some(block)
    }

    /// Takes the block at this address out.
    pub(super) fn remove(&mut self, address: Address) -> Option<Block> {
        let mut gap = self.place_of(address);
        let removed = self.places[gap];
        if removed.address == Address::NULL {
            return None;
        }
        let mask = self.places.len() - 1;
        let mut place = gap;
        loop {
            place = (place + 1) & mask;
            let block = self.places[place];
            if block.address == Address::NULL {
                break;
            }
            // A block may move back into the gap unless that lies before the place its address hashes to.
            let wanted = self.hash(block.address);
            if place.wrapping_sub(wanted) & mask >= place.wrapping_sub(gap) & mask {
                self.places[gap] = block;
                gap = place;
            }
        }
        self.places[gap] = EMPTY;
        self.used -= 1;
        Some(removed)
    }

    /// Where the address is, or else the empty place where it would go.
    fn place_of(&self, address: Address) -> usize {
        let mask = self.places.len() - 1;
        let mut place = self.hash(address);
        while self.places[place].address != address && self.places[place].address != Address::NULL {
            place = (place + 1) & mask;
        }
        place
    }

    /// Multiplicative hashing: addresses differ in their middle bits, the product's top bits depend on all of them.
    fn hash(&self, address: Address) -> usize {
        let product = address.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (product >> (64 - self.places.len().trailing_zeros())) as usize
    }

    fn grow(&mut self) {
        let twice = vec![EMPTY; self.places.len() * 2];
        for block in std::mem::replace(&mut self.places, twice) {
            if block.address != Address::NULL {
                let place = self.place_of(block.address);
                self.places[place] = block;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_table_agrees_with_an_ordered_map(steps in prop::collection::vec((any::<bool>(), 1..200u64, any::<u32>()), 0..600)) {
            let mut table = AddressTable::default();
            let mut map = BTreeMap::new();
            for (insert, place, slot) in steps {
                let address = Address(place * 512);
                if insert {
                    let block = Block { address, size: 512, slot, generation: 0 };
                    table.insert(block);
                    map.insert(address, block);
                } else {
                    prop_assert_eq!(table.remove(address), map.remove(&address));
                }
                prop_assert_eq!(table.used, map.len());
            }
            for place in 0..200 {
                let address = Address(place * 512);
                prop_assert_eq!(table.get(address), map.get(&address).copied());
            }
        }
    }
}

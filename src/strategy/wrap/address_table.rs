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
    /// How many more blocks may come in before the table must grow.
    room: usize,
    /// How far a hash is shifted to become a place.
    shift: u32,
}

const EMPTY: Block = Block { address: Address::NULL, size: 0, slot: 0, generation: 0 };
const SMALLEST: usize = 64;

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable::with_places(SMALLEST)
    }
}

impl AddressTable {
    fn with_places(count: usize) -> AddressTable {
        AddressTable { places: vec![EMPTY; count], room: count / 2, shift: 64 - count.trailing_zeros() }
    }

    /// Puts a block in, in place of one with the same address.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) {
        if block.address == Address::NULL {
            return;
        }
        if self.room == 0 {
            self.grow();
        }
        let place = self.place_of(block.address);
        let place = &mut self.places[place];
        self.room -= usize::from(place.address == Address::NULL);
        *place = block;
    }

    /// The block at this address.
    #[inline]
    pub(super) fn get(&self, address: Address) -> Option<Block> {
        let block = self.places[self.place_of(address)];
        (block.address != Address::NULL).then_some(block)
    }

    /// Takes the block at this address out.
    #[inline]
    pub(super) fn remove(&mut self, address: Address) -> Option<Block> {
        let mut gap = self.place_of(address);
        let (shift, places) = (self.shift, self.places.as_mut_slice());
        let removed = places[gap];
        if removed.address == Address::NULL {
            return None;
        }
        let mask = places.len() - 1;
        let mut place = gap;
        loop {
            place = (place + 1) & mask;
            let block = places[place];
            if block.address == Address::NULL {
                break;
            }
            // A block may move back into the gap unless that lies before the place its address hashes to.
            let wanted = hash(block.address, shift);
            if place.wrapping_sub(wanted) & mask >= place.wrapping_sub(gap) & mask {
                places[gap] = block;
                gap = place;
            }
        }
        // The rest of an empty place is never read.
        places[gap].address = Address::NULL;
        self.room += 1;
        Some(removed)
    }

    /// Where the address is, or else the empty place where it would go.
    #[inline]
    fn place_of(&self, address: Address) -> usize {
        let places = self.places.as_slice();
        let mut place = hash(address, self.shift);
        while places[place].address != address && places[place].address != Address::NULL {
            place = (place + 1) & (places.len() - 1);
        }
        place
    }

    #[cold]
    fn grow(&mut self) {
        let twice = AddressTable::with_places(self.places.len() * 2);
        for block in std::mem::replace(self, twice).places {
            self.insert(block);
        }
    }
}

/// Multiplicative hashing: addresses differ in their middle bits, the product's top bits depend on all of them.
#[inline]
fn hash(address: Address, shift: u32) -> usize {
    (address.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> shift) as usize
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
                prop_assert_eq!(table.places.len() / 2 - table.room, map.len());
            }
            for place in 0..200 {
                let address = Address(place * 512);
                prop_assert_eq!(table.get(address), map.get(&address).copied());
            }
        }
    }
}

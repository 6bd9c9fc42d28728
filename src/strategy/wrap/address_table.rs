//! A hash table from block address to [`Block`], made for being called on every alloc and free.
//!
//! An address belongs to one bucket of four places, all of which are compared at once: whether the second or the third
//! holds it is nothing that a processor would have to guess. There are so many buckets that few overflow; what finds
//! its bucket full goes to an ordered map. A removal leaves nothing behind, and the table does not age.

use std::collections::BTreeMap;

use crate::{strategy::Block, unit::Address};

/// Places of a bucket: their addresses fill half a cache line, what is known of their blocks a whole one.
const WAYS: usize = 4;
const FEWEST_BUCKETS: usize = 64;

/// The table. The null address is never a key: it marks an empty place. No address comes in twice.
#[derive(Clone, Debug)]
pub(super) struct AddressTable {
    /// Addresses by bucket; a power of two many.
    keys: Vec<[Address; WAYS]>,
    /// What else is known of the blocks at the same places.
    tenants: Vec<[Tenant; WAYS]>,
    /// Blocks whose bucket was full.
    spilled: BTreeMap<Address, Block>,
    /// How many more blocks may come in before the table must grow.
    room: usize,
    /// How far a hash is shifted to become a bucket.
    shift: u32,
}

/// A block without its address.
#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
    size: u64,
    slot: u32,
    generation: u32,
}

impl Tenant {
    #[inline]
    fn at(self, address: Address) -> Block {
        Block { address, size: self.size, slot: self.slot, generation: self.generation }
    }
}

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable::with_buckets(FEWEST_BUCKETS)
    }
}

impl AddressTable {
    fn with_buckets(count: usize) -> AddressTable {
        AddressTable {
            keys: vec![[Address::NULL; WAYS]; count],
            tenants: vec![[Tenant::default(); WAYS]; count],
            spilled: BTreeMap::new(),
            room: room_in(count),
            shift: 64 - count.trailing_zeros(),
        }
    }

    /// Puts in a block whose address is not in here.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) {
        if block.address == Address::NULL {
            return;
        }
        if self.room == 0 {
            self.grow();
        }
        self.room -= 1;
        let bucket = self.bucket_of(block.address);
        let keys = &mut self.keys[bucket];
        match way_of(keys, Address::NULL) {
            Some(way) => {
                keys[way] = block.address;
                let Block { size, slot, generation, .. } = block;
                self.tenants[bucket][way] = Tenant { size, slot, generation };
            }
            None => self.spill(block),
        }
    }

    /// The block at this address.
    #[inline]
    pub(super) fn get(&self, address: Address) -> Option<Block> {
        let bucket = self.bucket_of(address);
        match way_of(&self.keys[bucket], address) {
            Some(way) if address != Address::NULL => Some(self.tenants[bucket][way].at(address)),
            _ => self.spilled.get(&address).copied(),
        }
    }

    /// Takes the block at this address out.
    #[inline]
    pub(super) fn remove(&mut self, address: Address) -> Option<Block> {
        let bucket = self.bucket_of(address);
        let keys = &mut self.keys[bucket];
        let block = match way_of(keys, address) {
            Some(way) if address != Address::NULL => {
                keys[way] = Address::NULL;
                self.tenants[bucket][way].at(address)
            }
            _ => self.spilled.remove(&address)?,
        };
        self.room += 1;
        Some(block)
    }

    #[cold]
    fn spill(&mut self, block: Block) {
        self.spilled.insert(block.address, block);
    }

    #[cold]
    fn grow(&mut self) {
        let twice = AddressTable::with_buckets(self.keys.len() * 2);
        let former = std::mem::replace(self, twice);
        let places = former.keys.iter().flatten().zip(former.tenants.iter().flatten());
        let settled = places.filter(|(key, _)| **key != Address::NULL).map(|(&key, tenant)| tenant.at(key));
        for block in settled.chain(former.spilled.into_values()) {
            self.insert(block);
        }
    }

    /// Multiplicative hashing: addresses differ in their middle bits, the product's top bits depend on all of them.
    #[inline]
    fn bucket_of(&self, address: Address) -> usize {
        (address.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }
}

/// How many blocks a table may hold: with 1.5 a bucket, one in a hundred finds its bucket full.
const fn room_in(buckets: usize) -> usize {
    buckets + buckets / 2
}

/// The first place of a bucket that holds `wanted`. Without a branch until all four are compared.
#[inline]
fn way_of(keys: &[Address; WAYS], wanted: Address) -> Option<usize> {
    let [first, second, third, fourth] = keys.map(|key| u32::from(key == wanted));
    let found = first | second << 1 | third << 2 | fourth << 3;
    (found != 0).then(|| found.trailing_zeros() as usize % WAYS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_table_agrees_with_an_ordered_map(
            steps in prop::collection::vec((any::<bool>(), 1..400u64, any::<u32>()), 0..1_500),
            // A stride of 2^64 / (golden ratio) would put neighbours side by side; others crowd some buckets.
            stride in prop::sample::select(vec![256u64, 512, 2 << 20, 0x9E37_79B9_7F4A_7C15 | 1, 1 << 44]),
        ) {
            let mut table = AddressTable::default();
            let mut map = BTreeMap::new();
            for (insert, place, slot) in steps {
                let address = Address(place.wrapping_mul(stride).max(1));
                let block = Block { address, size: 512, slot, generation: 0 };
                if insert && !map.contains_key(&address) {
                    table.insert(block);
                    map.insert(address, block);
                } else {
                    prop_assert_eq!(table.remove(address), map.remove(&address));
                }
                prop_assert_eq!(room_in(table.keys.len()) - table.room, map.len());
            }
            for place in 0..400u64 {
                let address = Address(place.wrapping_mul(stride).max(1));
                prop_assert_eq!(table.get(address), map.get(&address).copied());
            }
        }
    }

    #[test]
    fn blocks_that_find_their_bucket_full_are_kept_aside() {
        let mut table = AddressTable::default();
        let home = table.bucket_of(Address(512));
        let mut neighbours: Vec<Address> = Vec::new();
        neighbours.extend((1..).map(|n| Address(n * 512)).filter(|&address| table.bucket_of(address) == home).take(7));
        let block = |address| Block { address, size: 512, slot: 0, generation: 0 };
        neighbours.iter().for_each(|&address| table.insert(block(address)));
        assert_eq!(table.spilled.len(), 3);
        for &address in &neighbours {
            assert_eq!(table.get(address), Some(block(address)));
            assert_eq!(table.remove(address), Some(block(address)));
            assert_eq!(table.remove(address), None);
        }
        assert_eq!(table.room, room_in(FEWEST_BUCKETS));
    }

    #[test]
    fn the_null_address_is_never_found() {
        let mut table = AddressTable::default();
        table.insert(Tenant::default().at(Address::NULL));
        assert_eq!((table.get(Address::NULL), table.remove(Address::NULL)), (None, None));
    }
}

//! A hash table from the address of a block to what else its handle holds, made for being called on every alloc and free.
//!
//! An address belongs to one bucket, a cache line with four places, all of which are compared at once: whether the second
//! or the third holds it is nothing that a processor would have to guess. There are so many buckets that few overflow;
//! what finds its bucket full goes to an ordered map. A removal leaves nothing behind, and the table does not age.

use std::collections::BTreeMap;

use crate::strategy::Block;
use oomph_base::Address;

const WAYS: usize = 4;
const FEWEST_BUCKETS: usize = 64;

/// The table. The null address is never a key: it marks an empty place. No address comes in twice.
#[derive(Clone, Debug)]
pub(super) struct AddressTable {
    /// A power of two many.
    buckets: Vec<Bucket>,
    /// Blocks whose bucket was full.
    spilled: BTreeMap<Address, Tenant>,
    /// How many more blocks may come in before the table must grow.
    room: usize,
    /// How far a hash is shifted to become a bucket.
    shift: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket {
    addresses: [Address; WAYS],
    tenants: [Tenant; WAYS],
}

/// Which block is at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tenant {
    slot: u32,
    generation: u32,
}

impl Tenant {
    /// The handle, without the size, which strategies do not need to know a block by.
    #[inline]
    fn at(self, address: Address) -> Block {
        Block { address, size: 0, slot: self.slot, generation: self.generation }
    }
}

impl Bucket {
    const EMPTY: Bucket =
        Bucket { addresses: [Address::NULL; WAYS], tenants: [Tenant { slot: 0, generation: 0 }; WAYS] };

    /// The first place that holds `wanted`. Without a branch until all four are compared.
    #[inline]
    fn way_of(&self, wanted: Address) -> Option<usize> {
        let [first, second, third, fourth] = self.addresses.map(|address| u32::from(address == wanted));
        let found = first | second << 1 | third << 2 | fourth << 3;
        (found != 0).then(|| found.trailing_zeros() as usize % WAYS)
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
            buckets: vec![Bucket::EMPTY; count],
            spilled: BTreeMap::new(),
            room: room_in(count),
            shift: 64 - count.trailing_zeros(),
        }
    }

    /// Puts in a block whose address is not in here.
    #[inline]
    pub(super) fn insert(&mut self, block: &Block) {
        self.place(block.address, Tenant { slot: block.slot, generation: block.generation });
    }

    #[inline]
    fn place(&mut self, address: Address, tenant: Tenant) {
        if address == Address::NULL {
            return;
        }
        if self.room == 0 {
            self.grow();
        }
        self.room -= 1;
        let number = self.bucket_of(address);
        let bucket = &mut self.buckets[number];
        match bucket.way_of(Address::NULL) {
            Some(way) => {
                bucket.addresses[way] = address;
                bucket.tenants[way] = tenant;
            }
            None => self.spill(address, tenant),
        }
    }

    /// The handle of the block at this address, but for its size.
    #[inline]
    pub(super) fn get(&self, address: Address) -> Option<Block> {
        let bucket = &self.buckets[self.bucket_of(address)];
        match bucket.way_of(address) {
            Some(way) if address != Address::NULL => Some(bucket.tenants[way].at(address)),
            _ => self.spilled.get(&address).map(|tenant| tenant.at(address)),
        }
    }

    /// Takes the block at this address out.
    #[inline]
    pub(super) fn remove(&mut self, address: Address) -> Option<Block> {
        let number = self.bucket_of(address);
        let bucket = &mut self.buckets[number];
        let tenant = match bucket.way_of(address) {
            Some(way) if address != Address::NULL => {
                bucket.addresses[way] = Address::NULL;
                bucket.tenants[way]
            }
            _ => self.spilled.remove(&address)?,
        };
        self.room += 1;
        Some(tenant.at(address))
    }

    #[cold]
    fn spill(&mut self, address: Address, tenant: Tenant) {
        self.spilled.insert(address, tenant);
    }

    #[cold]
    fn grow(&mut self) {
        let twice = AddressTable::with_buckets(self.buckets.len() * 2);
        let former = std::mem::replace(self, twice);
        let places = former.buckets.iter().flat_map(|bucket| bucket.addresses.into_iter().zip(bucket.tenants));
        // An empty place is left out by its address.
        for (address, tenant) in places.chain(former.spilled) {
            self.place(address, tenant);
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
                let block = Block { address, size: 0, slot, generation: 0 };
                if insert && !map.contains_key(&address) {
                    table.insert(&block);
                    map.insert(address, block);
                } else {
                    prop_assert_eq!(table.remove(address), map.remove(&address));
                }
                prop_assert_eq!(room_in(table.buckets.len()) - table.room, map.len());
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
        let block = |address| Block { address, size: 0, slot: 7, generation: 9 };
        neighbours.iter().for_each(|&address| table.insert(&block(address)));
        assert_eq!(table.spilled.len(), 3);
        for &address in &neighbours {
            assert_eq!(table.get(address), Some(block(address)));
            assert_eq!(table.remove(address), Some(block(address)));
            assert_eq!(table.remove(address), None);
        }
        assert_eq!(table.room, room_in(FEWEST_BUCKETS));
    }

    #[test]
    fn a_bucket_fills_one_cache_line() {
        assert_eq!((size_of::<Bucket>(), align_of::<Bucket>()), (64, 64));
    }

    #[test]
    fn the_null_address_is_never_found() {
        let mut table = AddressTable::default();
        table.insert(&Tenant::default().at(Address::NULL));
        assert_eq!((table.get(Address::NULL), table.remove(Address::NULL)), (None, None));
    }
}

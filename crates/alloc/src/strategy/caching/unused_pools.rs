//! Private pools without users, in the order in which PyTorch releases their memory.
//!
//! PyTorch keeps them in a hash table (`graph_pools_freeable`, a `ska::flat_hash_map`) and goes through its slots. The table
//! is small and its hash is the number of the pool, so the order follows from the numbers. It depends on how many pools
//! were in the table at the same time, because the table grows and never shrinks.

use super::pools::PoolKey;

/// The fewest slots of a table.
const FEWEST_SLOTS: usize = 4;
/// The fewest slots beyond its own in which an entry is looked for (`min_lookups`).
const FEWEST_LOOKUPS: usize = 4;
/// How many slots a table may have for each pool. PyTorch's table grows as long as too many pools share a slot. Its numbers count
/// up from 1, so it does not come to that; keys of a forged recording, or of pools whose number is unknown, do.
const MOST_SLOTS_PER_POOL: usize = 1024;
/// 2^64 divided by the golden ratio (`fibonacci_hash_policy`).
const MULTIPLIER: u64 = 11_400_714_819_323_198_485;

/// The pools without users. Open addressing; an entry far from its own slot displaces one that is nearer to its own.
#[derive(Clone, Debug, Default)]
pub(super) struct UnusedPools {
    /// More than there are hashes: the last entries move up, they do not wrap around.
    slots: Vec<Option<TableEntry>>,
    /// How many slots a hash can name: a power of two, or 0 before the first entry.
    buckets: usize,
    /// How many slots beyond its own an entry is looked for in, at least: more where the table may not grow.
    reach: usize,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct TableEntry {
    key: PoolKey,
    /// How many slots it lies beyond its own.
    distance: usize,
}

impl UnusedPools {
    /// The pools in the order of their slots.
    pub(super) fn keys(&self) -> impl Iterator<Item = PoolKey> + '_ {
        self.slots.iter().flatten().map(|entry| entry.key)
    }

    /// Adds a pool that is not in the table.
    pub(super) fn insert(&mut self, key: PoolKey) {
        if 2 * (self.len + 1) > self.buckets {
            self.rehash(FEWEST_SLOTS.max(2 * self.buckets));
        }
        let mut key = key;
        while let Err(left_over) = self.place(key) {
            key = left_over;
            if self.buckets < MOST_SLOTS_PER_POOL * (self.len + 1) {
                self.rehash(2 * self.buckets);
            } else {
                self.reach = 2 * self.lookups();
                self.rehash(self.buckets);
            }
        }
    }

    /// Removes a pool. Entries that were displaced move back.
    pub(super) fn remove(&mut self, key: PoolKey) {
        let found = self.slots.iter().position(|slot| slot.is_some_and(|entry| entry.key == key));
        let Some(mut slot) = found else { return };
        self.len -= 1;
        self.slots[slot] = None;
        while let Some(next) = self.slots.get(slot + 1).copied().flatten().filter(|next| next.distance > 0) {
            self.slots[slot] = Some(TableEntry { distance: next.distance - 1, ..next });
            self.slots[slot + 1] = None;
            slot += 1;
        }
    }

    /// Makes the table again with at least this many slots, as if these of its pools had come first, in this order.
    pub(super) fn rebuild(&mut self, buckets: usize, first: &[PoolKey]) {
        let present: Vec<PoolKey> = self.keys().collect();
        let (mut before, after): (Vec<PoolKey>, Vec<PoolKey>) =
            present.into_iter().partition(|key| first.contains(key));
        before.sort_by_key(|key| first.iter().position(|other| other == key));
        self.slots.clear();
        self.rehash(buckets.next_power_of_two().max(self.buckets).max(FEWEST_SLOTS));
        before.into_iter().chain(after).for_each(|key| self.insert(key));
    }

    fn lookups(&self) -> usize {
        self.reach.max(FEWEST_LOOKUPS).max(self.buckets.ilog2() as usize)
    }

    fn own_slot(&self, (first, second): PoolKey) -> usize {
        let hash = if first == 0 { second } else { first };
        (MULTIPLIER.wrapping_mul(hash) >> (u64::BITS - self.buckets.ilog2())) as usize
    }

    /// Puts a pool into its slot or the next ones. The error is the pool for which there is none.
    fn place(&mut self, key: PoolKey) -> Result<(), PoolKey> {
        let mut slot = self.own_slot(key);
        let mut carried = TableEntry { key, distance: 0 };
        while self.slots.get(slot).copied().flatten().is_some_and(|entry| entry.distance >= carried.distance) {
            (slot, carried.distance) = (slot + 1, carried.distance + 1);
        }
        let first = slot;
        while carried.distance < self.lookups() {
            match self.slots[slot].replace(carried) {
                None => {
                    self.len += 1;
                    return Ok(());
                }
                Some(entry) if slot == first || entry.distance < carried.distance => carried = entry,
                Some(entry) => self.slots[slot] = Some(entry),
            }
            (slot, carried.distance) = (slot + 1, carried.distance + 1);
        }
        if slot > first {
            // The displaced entry stays, and the new one waits for a larger table.
            self.slots[first] = Some(carried);
        }
        Err(key)
    }

    fn rehash(&mut self, buckets: usize) {
        let before = std::mem::take(&mut self.slots);
        (self.buckets, self.len) = (buckets, 0);
        self.slots = vec![None; buckets + self.lookups() - 1];
        before.into_iter().flatten().for_each(|entry| self.insert(entry.key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(pools: &UnusedPools) -> Vec<PoolKey> {
        pools.keys().collect()
    }

    fn of(keys: &[PoolKey]) -> UnusedPools {
        let mut pools = UnusedPools::default();
        keys.iter().for_each(|&key| pools.insert(key));
        pools
    }

    /// Orders that were seen in recordings of 2.13.
    #[test]
    fn order_is_that_of_pytorch() {
        assert_eq!(keys(&of(&[(1, 0), (2, 0)])), [(2, 0), (1, 0)]);
        assert_eq!(keys(&of(&[(0, 2), (1, 0), (3, 0)])), [(0, 2), (1, 0), (3, 0)]);
        assert_eq!(keys(&of(&[(1, 0), (3, 0), (4, 0)])), [(4, 0), (1, 0), (3, 0)]);
    }

    #[test]
    fn equal_numbers_come_in_the_order_of_their_release() {
        assert_eq!(keys(&of(&[(1, 0), (0, 1), (0, 2)])), [(0, 2), (1, 0), (0, 1)]);
        assert_eq!(keys(&of(&[(0, 1), (1, 0), (0, 2)])), [(0, 2), (0, 1), (1, 0)]);
    }

    #[test]
    fn entries_move_back_when_one_is_removed() {
        let mut pools = of(&[(1, 0), (0, 1), (3, 0)]);
        pools.remove((1, 0));
        pools.insert((1, 0));
        assert_eq!(keys(&pools), [(0, 1), (1, 0), (3, 0)]);
        pools.remove((7, 7));
        assert_eq!(keys(&pools).len(), 3);
    }

    /// The table keeps its size, and with it the order.
    #[test]
    fn larger_table_has_another_order() {
        let mut once_larger = of(&[(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]);
        [1, 3, 4].into_iter().for_each(|number| once_larger.remove((0, number)));
        let mut rebuilt = of(&[(0, 2), (0, 5)]);
        assert_eq!(keys(&rebuilt), [(0, 2), (0, 5)]);
        rebuilt.rebuild(8, &[]);
        assert_eq!(keys(&rebuilt), [(0, 5), (0, 2)]);
        assert_eq!(keys(&once_larger), [(0, 5), (0, 2)]);
    }

    #[test]
    fn rebuilt_table_has_another_order_of_equal_numbers_only() {
        let mut pools = of(&[(0, 1), (1, 0), (3, 0)]);
        pools.rebuild(0, &[(3, 0), (1, 0), (9, 0)]);
        assert_eq!(keys(&pools), [(1, 0), (0, 1), (3, 0)]);
    }

    /// PyTorch's keys have one number that is 0. The verifier's own ones for pools without a number do not, and the hash is the
    /// first number.
    #[test]
    fn table_does_not_grow_without_bound() {
        let mut pools = UnusedPools::default();
        (1..100).for_each(|number| pools.insert((7, number)));
        assert_eq!(keys(&pools).len(), 99);
        assert!(pools.slots.len() <= 4 * MOST_SLOTS_PER_POOL * 100, "{}", pools.slots.len());
        (1..100).for_each(|number| pools.remove((7, number)));
        assert_eq!(keys(&pools), []);
    }

    #[test]
    fn all_pools_are_found_whatever_the_numbers() {
        let mut pools = UnusedPools::default();
        for number in 1..200 {
            pools.insert((number, 0));
            pools.insert((0, number));
        }
        let mut found = keys(&pools);
        found.sort_unstable();
        assert_eq!(found.len(), 398);
        found.dedup();
        assert_eq!(found.len(), 398);
        found.into_iter().for_each(|key| pools.remove(key));
        assert_eq!(keys(&pools), []);
    }
}

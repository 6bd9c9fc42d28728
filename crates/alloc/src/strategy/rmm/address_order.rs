//! Free blocks in address order, with a fast search for the first that is large enough.
//!
//! RMM visits every block of a tree. Here blocks are divided by the power of two of their size: in
//! a higher class than the request's every block fits, so that only the first of each has to be
//! compared.

use std::collections::BTreeMap;

/// Free blocks in address order.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressOrder {
    /// Size and slot by power of two and address.
    blocks: BTreeMap<(u32, u64), (u64, u32)>,
}

impl AddressOrder {
    /// The slot of the block with the lowest address of at least `bytes`, which is not zero.
    #[inline]
    pub(super) fn first_fit(&self, bytes: u64) -> Option<u32> {
        let mut power = bytes.ilog2();
        let mut own = self.blocks.range((power, 0)..(power + 1, 0));
        let mut first = own.find(|&(_, &(size, _))| size >= bytes).map(|(&(_, address), &(_, slot))| (address, slot));
        while let Some((&(higher, address), &(_, slot))) = self.blocks.range((power + 1, 0)..).next() {
            first = Some(first.map_or((address, slot), |lowest| lowest.min((address, slot))));
            power = higher;
        }
        first.map(|(_, slot)| slot)
    }

    /// The size of the largest block.
    pub(super) fn largest(&self) -> u64 {
        let Some((&(power, _), _)) = self.blocks.last_key_value() else { return 0 };
        self.blocks.range((power, 0)..).map(|(_, &(size, _))| size).max().unwrap_or(0)
    }

    #[inline]
    pub(super) fn insert(&mut self, address: u64, bytes: u64, slot: u32) {
        self.blocks.insert((bytes.ilog2(), address), (bytes, slot));
    }

    #[inline]
    pub(super) fn remove(&mut self, address: u64, bytes: u64) {
        self.blocks.remove(&(bytes.ilog2(), address));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_order_agrees_with_a_map(
            steps in prop::collection::vec((any::<bool>(), 0..900u64, 1..200u64), 1..600),
        ) {
            let (mut order, mut model) = (AddressOrder::default(), BTreeMap::new());
            for (number, (insert, address, bytes)) in (0u32..).zip(steps) {
                let near = model.range(address..).next().map(|(&address, &(bytes, _))| (address, bytes));
                match (insert, near) {
                    (true, _) if !model.contains_key(&address) => {
                        order.insert(address, bytes, number);
                        model.insert(address, (bytes, number));
                    }
                    (false, Some((near, bytes))) => {
                        order.remove(near, bytes);
                        model.remove(&near);
                    }
                    _ => {}
                }
                for wanted in [1, bytes, 150, 250] {
                    let fits = model.values().find(|&&(size, _)| size >= wanted);
                    prop_assert_eq!(order.first_fit(wanted), fits.map(|&(_, slot)| slot));
                }
                prop_assert_eq!(order.largest(), model.values().map(|&(size, _)| size).max().unwrap_or(0));
            }
        }
    }
}

//! The unmapped stretches of an arena's expandable segments, by address.
//!
//! Whoever looks for a free block must know whether addresses without memory follow it. Until memory is given back an
//! arena has a single such stretch, the end of its range, so where that starts is kept at hand: one comparison spares a
//! look at the block's record and at its neighbour's, which no cache holds.

use std::collections::BTreeMap;

/// Unmapped stretches by where they start, with their slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Unmapped {
    /// Where the first one starts; nowhere is zero, where no block ends.
    first: u64,
    /// Whether there are others.
    several: bool,
    stretches: BTreeMap<u64, u32>,
}

impl Unmapped {
    /// Whether one may start here; a no is certain.
    #[inline]
    pub(super) fn may_start_at(&self, address: u64) -> bool {
        (self.first == address) | self.several
    }

    pub(super) fn insert(&mut self, start: u64, slot: u32) {
        self.stretches.insert(start, slot);
        self.look_anew();
    }

    pub(super) fn remove(&mut self, start: u64) {
        self.stretches.remove(&start);
        self.look_anew();
    }

    /// The slots of all, from the lowest address on.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.stretches.values().copied()
    }

    fn look_anew(&mut self) {
        self.first = self.stretches.first_key_value().map_or(0, |(&start, _)| start);
        self.several = self.stretches.len() > 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_never_denied_and_a_lone_one_is_known_exactly() {
        let mut unmapped = Unmapped::default();
        assert!(!unmapped.may_start_at(4096));
        unmapped.insert(4096, 1);
        assert!(unmapped.may_start_at(4096) && !unmapped.may_start_at(8192));
        unmapped.insert(8192, 2);
        assert!(unmapped.may_start_at(4096) && unmapped.may_start_at(8192));
        assert_eq!(unmapped.slots().collect::<Vec<_>>(), [1, 2]);
        unmapped.remove(4096);
        assert!(unmapped.may_start_at(8192) && !unmapped.may_start_at(4096));
        unmapped.remove(8192);
        assert!(!unmapped.may_start_at(8192));
    }
}

//! Where `cuMemAddressReserve` and the chunks of stream-ordered pools are placed.
//!
//! Reserved ranges start at the address that the real driver gives first (an H200 with driver 580.159.04), and each follows
//! the one before it in steps of 32 MiB. Addresses that were given back are used again, the lowest fitting place first.

use super::{address_space::RANGE_BYTES, placement::FreeRanges};

/// The first reserved range starts here.
pub const FIRST_RESERVED: u64 = 0x3_0200_0000;

/// Addresses for reserved ranges.
#[derive(Clone, Debug)]
pub struct ReservedSpace {
    /// In units of [`RANGE_BYTES`].
    unused: FreeRanges,
}

impl ReservedSpace {
    /// All addresses from [`FIRST_RESERVED`] to `end` are free.
    pub fn new(end: u64) -> ReservedSpace {
        ReservedSpace { unused: FreeRanges::new(FIRST_RESERVED / RANGE_BYTES, (end - FIRST_RESERVED) / RANGE_BYTES) }
    }

    /// Takes addresses, or `None` where there is no room.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        self.unused.take_lowest(bytes.div_ceil(RANGE_BYTES)).map(|range| range * RANGE_BYTES)
    }

    /// Gives back what [`take`](ReservedSpace::take) took.
    pub fn give_back(&mut self, start: u64, bytes: u64) {
        self.unused.give_back(start / RANGE_BYTES, bytes.div_ceil(RANGE_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_each_other_and_the_lowest_hole_is_reused() {
        let mut space = ReservedSpace::new(1 << 40);
        let first = space.take(33 << 20).unwrap();
        let second = space.take(1).unwrap();
        assert_eq!((first, second), (FIRST_RESERVED, FIRST_RESERVED + 2 * RANGE_BYTES));
        space.give_back(first, 33 << 20);
        assert_eq!(space.take(RANGE_BYTES), Some(first));
        assert_eq!(space.take(1 << 40), None);
    }
}

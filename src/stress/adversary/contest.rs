//! What an adversary may do: how much may be alive, and in blocks of which sizes.

use crate::{
    base::{Bytes, GIB, MIB},
    strategy::ALIGNMENT,
};

/// The rules of a game between an adversary and an allocator.
///
/// ```
/// use oomph::stress::adversary::Contest;
/// let contest = Contest::new(4 << 30, 512 << 20, 2 << 20)?;
/// assert_eq!((contest.live_units(), contest.largest_units()), (2048, 256));
/// assert_eq!(contest.bound_bytes(), (2048 * 5 - 256 + 1) * (2 << 20));
/// # Ok::<(), oomph::stress::adversary::ContestError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contest {
    /// What may be alive at any time.
    pub live_bytes: u64,
    /// The largest block.
    pub largest_bytes: u64,
    /// The smallest block; all others are this times a power of two.
    pub unit_bytes: u64,
}

/// A contest that nobody can hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContestError {
    /// Every allocator rounds blocks of this size up, so the budget would not be what is alive.
    #[error("a unit of {0} bytes is no multiple of {ALIGNMENT}, to which every allocator rounds")]
    CrookedUnit(u64),
    /// Sizes are the unit, twice the unit, and so on.
    #[error("the largest block of {} is no power of two times the unit of {}", Bytes(*largest), Bytes(*unit))]
    NoPowerOfTwo {
        /// The largest block.
        largest: u64,
        /// The unit.
        unit: u64,
    },
    /// Nothing could be freed to make room for the largest block.
    #[error("live memory of {} cannot hold two blocks of {}", Bytes(*live), Bytes(*largest))]
    TooFewLive {
        /// The budget.
        live: u64,
        /// The largest block.
        largest: u64,
    },
    /// No device has as much.
    #[error("live memory of {} is more than {}", Bytes(*.0), Bytes(Contest::MOST_LIVE_BYTES))]
    TooMuchLive(u64),
    /// So many blocks would take the host's memory.
    #[error("{live_units} units alive at once are more than {}: take a larger unit", Contest::MOST_UNITS)]
    TooManyUnits {
        /// How many there would be.
        live_units: u64,
    },
}

impl Default for Contest {
    /// Blocks of one to 256 pages within 4 GiB: large enough that every allocator treats the blocks as large ones, small
    /// enough that what follows fits on any card of 24 GiB.
    fn default() -> Self {
        Contest { live_bytes: 4 * GIB, largest_bytes: 512 * MIB, unit_bytes: 2 * MIB }
    }
}

impl Contest {
    /// How much may be alive: several times that must have room among the addresses of a simulated device.
    pub const MOST_LIVE_BYTES: u64 = 1024 * GIB;
    /// How many blocks there may be at once.
    pub const MOST_UNITS: u64 = 1 << 22;

    /// A contest within these limits; the budget is rounded down to whole units.
    pub fn new(live_bytes: u64, largest_bytes: u64, unit_bytes: u64) -> Result<Contest, ContestError> {
        if unit_bytes == 0 || !unit_bytes.is_multiple_of(ALIGNMENT) {
            return Err(ContestError::CrookedUnit(unit_bytes));
        }
        if !largest_bytes.is_multiple_of(unit_bytes) || !(largest_bytes / unit_bytes).is_power_of_two() {
            return Err(ContestError::NoPowerOfTwo { largest: largest_bytes, unit: unit_bytes });
        }
        if live_bytes / 2 < largest_bytes {
            return Err(ContestError::TooFewLive { live: live_bytes, largest: largest_bytes });
        }
        if live_bytes > Contest::MOST_LIVE_BYTES {
            return Err(ContestError::TooMuchLive(live_bytes));
        }
        let live_units = live_bytes / unit_bytes;
        if live_units > Contest::MOST_UNITS {
            return Err(ContestError::TooManyUnits { live_units });
        }
        Ok(Contest { live_bytes: live_units * unit_bytes, largest_bytes, unit_bytes })
    }

    /// `M`: the budget in units.
    #[must_use]
    pub fn live_units(&self) -> u64 {
        self.live_bytes / self.unit_bytes
    }

    /// `n`: the largest block in units.
    #[must_use]
    pub fn largest_units(&self) -> u64 {
        self.largest_bytes / self.unit_bytes
    }

    /// How often the smallest block can be doubled: `log2 n`.
    #[must_use]
    pub fn doublings(&self) -> u32 {
        self.largest_units().ilog2()
    }

    /// What Robson's program forces every allocator to that never moves a block, in whole units.
    #[must_use]
    pub fn bound_bytes(&self) -> u64 {
        self.bound_up_to(self.doublings())
    }

    /// The largest blocks with which the program forces nobody who never moves a block beyond `bytes`. Who needs no more
    /// than that although blocks are larger gives memory back, or moves it, in pieces of about this size.
    #[must_use]
    pub fn fragmenting_bytes(&self, bytes: u64) -> u64 {
        let harmless = (0..=self.doublings()).rev().find(|&doublings| self.bound_up_to(doublings) <= bytes);
        self.unit_bytes << harmless.unwrap_or(0)
    }

    /// The bound where blocks are doubled so many times.
    fn bound_up_to(&self, doublings: u32) -> u64 {
        let units = (self.live_units() * (u64::from(doublings) + 2)).div_ceil(2) - (1 << doublings) + 1;
        units * self.unit_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_published_one() {
        let bound = |live: u64, largest: u64| Contest::new(live * 512, largest * 512, 512).unwrap().bound_bytes() / 512;
        // Knuth, The Art of Computer Programming, 2.5, exercises 36 to 38: floor((3M - 1) / 2) for blocks of 1 and 2.
        assert_eq!([bound(16, 2), bound(17, 2), bound(4, 2)], [23, 25, 5]);
        assert_eq!([bound(1024, 16), bound(4096, 64), bound(4096, 256)], [3057, 16321, 20225]);
        assert_eq!(bound(8192, 512), 44545);
        assert_eq!(bound(100, 1), 100, "blocks of one size leave no hole that another cannot use");
    }

    #[test]
    fn what_is_needed_tells_which_blocks_fragment() {
        let contest = Contest::default();
        assert_eq!(contest.fragmenting_bytes(contest.live_bytes), 2 * MIB);
        assert_eq!(contest.fragmenting_bytes(3 * contest.live_bytes), 32 * MIB);
        assert_eq!(contest.fragmenting_bytes(contest.bound_bytes()), 512 * MIB);
        assert_eq!(contest.fragmenting_bytes(0), 2 * MIB);
    }

    #[test]
    fn impossible_contests_are_refused() {
        assert_eq!(Contest::new(4096, 1024, 100), Err(ContestError::CrookedUnit(100)));
        assert_eq!(Contest::new(4096, 1024, 0), Err(ContestError::CrookedUnit(0)));
        assert_eq!(Contest::new(8192, 1536, 512), Err(ContestError::NoPowerOfTwo { largest: 1536, unit: 512 }));
        assert_eq!(Contest::new(8192, 0, 512), Err(ContestError::NoPowerOfTwo { largest: 0, unit: 512 }));
        assert_eq!(Contest::new(1536, 1024, 512), Err(ContestError::TooFewLive { live: 1536, largest: 1024 }));
        assert_eq!(Contest::new(4 * GIB, MIB, 512), Err(ContestError::TooManyUnits { live_units: 1 << 23 }));
        assert_eq!(Contest::new(u64::MAX, 1 << 62, 1 << 62), Err(ContestError::TooMuchLive(u64::MAX)));
        assert_eq!(Contest::new(4097, 1024, 512).unwrap().live_bytes, 4096);
        let usual = Contest::default();
        assert_eq!(Contest::new(usual.live_bytes, usual.largest_bytes, usual.unit_bytes), Ok(usual));
    }
}

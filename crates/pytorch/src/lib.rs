//! Facts of PyTorch's CUDA caching allocator, as of release 2.11: constants, size rounding, the
//! settings with their syntax and defaults, and the settings that a memory snapshot names.
//!
//! Each fact names the C++ function that it follows. The crate knows no trace, device or strategy.
//!
//! ```
//! use oomph_pytorch::{AllocatorSettings, MIN_BLOCK_SIZE};
//! let settings = AllocatorSettings::default().updated("expandable_segments:True")?;
//! assert_eq!(settings.round_size(100), MIN_BLOCK_SIZE);
//! assert_eq!(settings.allocation_size(3 << 20), 20 << 20);
//! # Ok::<(), oomph_pytorch::AllocatorSettingsError>(())
//! ```

mod recorded;
mod release;
mod settings;

pub use recorded::{InitialLayout, RecordedSettings, RecordedValue};
pub use release::{
    AllocatorRules, FractionRule, PoolFallback, PoolRules, Release, ReleaseError, ReleaseSpan, TieOrder,
};
pub use settings::{
    AllocatorSettings, AllocatorSettingsError, CONF_VARIABLE, NEW_CONF_VARIABLE, RangeReserve, UNLIMITED, export_line,
    variable_note,
};

use oomph_base::{MIB, round_up};

/// `kMinBlockSize`: block sizes are multiples of this.
pub const MIN_BLOCK_SIZE: u64 = 512;
/// `kSmallSize`: rounded requests up to this size go to the small pool. In a large segment, a
/// remainder is split off only if it is larger than this.
pub const SMALL_SIZE: u64 = MIB;
/// `kSmallBuffer`: the size of a segment of the small pool, and of a page of a small expandable
/// segment.
pub const SMALL_BUFFER: u64 = 2 * MIB;
/// `kLargeBuffer`: the default of `large_segment_size_mb` and of `max_non_split_rounding_mb`.
pub const LARGE_BUFFER: u64 = 20 * MIB;
/// `kMinLargeAlloc`: rounded requests from this size on get a segment of their own.
pub const MIN_LARGE_ALLOC: u64 = 10 * MIB;
/// `kRoundLarge`: the size of such a segment is a multiple of this.
pub const ROUND_LARGE: u64 = 2 * MIB;
/// `NativeCachingAllocator::allocate` refuses requests from this size on (`one_exa_bytes`).
pub const REQUEST_LIMIT: u64 = 1 << 60;
/// `kRoundUpPowerOfTwoIntervals`: `roundup_power2_divisions` has one entry for each power of two
/// from 1 MiB to 32 GiB.
pub const ROUNDUP_INTERVALS: usize = 16;

impl AllocatorSettings {
    /// The size of the block that serves a request: `DeviceCachingAllocator::round_size` with
    /// `roundup_power2_next_division`.
    #[inline]
    #[must_use]
    pub fn round_size(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK_SIZE {
            return MIN_BLOCK_SIZE;
        }
        let power = bytes.ilog2();
        let interval = power.saturating_sub(MIB.ilog2()).min(ROUNDUP_INTERVALS as u32 - 1);
        let divisions = self.roundup_power2_divisions[interval as usize];
        let step = if divisions > 1 && bytes > MIN_BLOCK_SIZE.saturating_mul(divisions) {
            (1 << power) >> divisions.ilog2()
        } else if divisions == 1 && self.release.rules().one_division_keeps_size {
            1
        } else {
            MIN_BLOCK_SIZE
        };
        // Both steps are powers of two; a mask is cheaper than a division.
        bytes.saturating_add(step - 1) & !(step - 1)
    }

    /// The size of the segment that is allocated for a rounded request:
    /// `DeviceCachingAllocator::get_allocation_size`.
    #[must_use]
    pub fn allocation_size(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_SIZE {
            SMALL_BUFFER
        } else if rounded < MIN_LARGE_ALLOC {
            self.large_segment_size
        } else {
            round_up(rounded, ROUND_LARGE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_size_divides_powers_of_two() {
        let quarters = AllocatorSettings::default().updated("roundup_power2_divisions:4").unwrap();
        for (bytes, rounded) in [
            (0, 512),
            (1, 512),
            (1200, 1536),
            (2049, 2560),
            (5000, 5120),
            (3 * MIB, 3 * MIB),
            (3 * MIB + 1, 7 * MIB / 2),
            (21 * MIB, 24 * MIB),
            (84 * MIB, 96 * MIB),
            (100 * MIB, 112 * MIB),
            (64 * MIB, 64 * MIB),
        ] {
            assert_eq!(quarters.round_size(bytes), rounded, "{bytes}");
        }
        let default = AllocatorSettings::default();
        for (bytes, rounded) in [(0, 512), (1, 512), (512, 512), (513, 1024), (100 * MIB + 1, 100 * MIB + 512)] {
            assert_eq!(default.round_size(bytes), rounded, "{bytes}");
        }
    }

    #[test]
    fn allocation_size_depends_on_the_pool() {
        let settings = AllocatorSettings { large_segment_size: 32 * MIB, ..AllocatorSettings::default() };
        for (rounded, segment) in [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 32 * MIB),
            (10 * MIB - 512, 32 * MIB),
            (10 * MIB, 10 * MIB),
            (11 * MIB, 12 * MIB),
        ] {
            assert_eq!(settings.allocation_size(rounded), segment, "{rounded}");
        }
    }
}

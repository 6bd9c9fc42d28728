//! Known contents: the pattern of a key, and what other contents in its place mean.
//!
//! Word `i` of a pattern is an invertible function of the key and `i`. So a wrong word in a block
//! shows which other block was written there, and which part of it. The kernels of the CUDA device
//! compute the same words; the simulated device only records what was written where.

use std::fmt;

use oomph_base::Address;

/// Patterns consist of words of this many bytes. The last word may be cut.
pub const WORD_BYTES: u64 = 8;

/// The longest block with a pattern: its words are numbered with 32 bits.
pub const LONGEST_PATTERN_BYTES: u64 = WORD_BYTES << 32;

/// Odd, so that multiplying by it can be undone.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Its inverse: the product of the two is 1.
const GATHER: u64 = inverse_of(SPREAD);
/// More than a third of a word, so that the shift is undone in two steps.
const FOLD: u32 = 29;

/// A block and the key of its pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patterned {
    /// Where it starts: a multiple of 16.
    pub address: Address,
    /// How many bytes of it hold the pattern; at most [`LONGEST_PATTERN_BYTES`].
    pub bytes: u64,
    /// Distinguishes its contents from all others. Zero is not used: it is the key that unwritten
    /// memory shows.
    pub key: u32,
}

/// A place in the pattern of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PatternPlace {
    /// The key of the pattern.
    pub key: u32,
    /// How many bytes from its start.
    pub offset: u64,
}

/// A block whose contents were not those of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The block that was compared.
    pub key: u32,
    /// Its first wrong byte on a simulated device, the word that it lies in on a real one.
    pub offset: u64,
    /// What was there instead. On a real device any word looks like a pattern: only the caller
    /// knows whether a block of that key was ever filled. `None` where there was no pattern, or no
    /// memory.
    pub found: Option<PatternPlace>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} has lost its contents at byte {}", self.key, self.offset)?;
        match self.found {
            Some(PatternPlace { key, offset }) => write!(f, ", where byte {offset} of block {key} is"),
            None => f.write_str(", where nothing was written"),
        }
    }
}

/// The result of comparisons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks compared.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks with wrong contents, and the first wrong place of each.
    pub damaged: Vec<Damage>,
}

impl Verified {
    /// Adds the result of others.
    pub fn absorb(&mut self, other: Verified) {
        self.blocks += other.blocks;
        self.bytes += other.bytes;
        self.damaged.extend(other.damaged);
    }
}

impl PatternPlace {
    /// The word of the pattern at this place.
    ///
    /// ```
    /// use oomph_alloc::device::PatternPlace;
    /// let place = PatternPlace { key: 7, offset: 4096 };
    /// assert_eq!(PatternPlace::in_word(place.word()), place);
    /// ```
    #[must_use]
    pub const fn word(self) -> u64 {
        let place = ((self.key as u64) << 32) | ((self.offset / WORD_BYTES) & 0xffff_ffff);
        let spread = place.wrapping_mul(SPREAD);
        spread ^ (spread >> FOLD)
    }

    /// The place that a word belongs to.
    #[must_use]
    pub const fn in_word(word: u64) -> PatternPlace {
        let spread = word ^ (word >> FOLD) ^ (word >> (2 * FOLD));
        let place = spread.wrapping_mul(GATHER);
        PatternPlace { key: (place >> 32) as u32, offset: (place & 0xffff_ffff) * WORD_BYTES }
    }
}

/// The number whose product with an odd one is 1, by Newton's steps: each doubles the bits that are
/// right.
const fn inverse_of(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut step = 0;
    while step < 5 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_are_invertible(key: u32, index: u32) {
            let place = PatternPlace { key, offset: u64::from(index) * WORD_BYTES };
            prop_assert_eq!(PatternPlace::in_word(place.word()), place);
        }

        #[test]
        fn every_word_has_a_place(word: u64) {
            prop_assert_eq!(PatternPlace::in_word(word).word(), word);
        }
    }

    #[test]
    fn unwritten_memory_has_key_zero() {
        assert_eq!(PatternPlace::in_word(0).key, 0);
        assert_eq!(SPREAD.wrapping_mul(GATHER), 1);
    }

    #[test]
    fn damage_names_the_intruder() {
        let found = Some(PatternPlace { key: 9, offset: 64 });
        let damage = Damage { key: 3, offset: 512, found };
        assert_eq!(damage.to_string(), "block 3 has lost its contents at byte 512, where byte 64 of block 9 is");
    }
}

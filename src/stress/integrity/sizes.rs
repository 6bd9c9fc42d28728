//! How large the blocks are that a program asks for.

use std::{fmt, str::FromStr};

use crate::{
    base::{Bytes, GIB, KIB, MIB},
    models::{PowerLaw, SeededRandom},
};

/// The chance to reach twice a size: small blocks are many, large ones hold most of the memory.
const TAIL_EXPONENT: f64 = 0.25;

/// Sizes from the smallest to the largest, small ones more often. As users type it: `small`, `mixed`, `large`, or the two
/// ends of a range.
///
/// ```
/// use oomph::stress::Sizes;
/// let sizes: Sizes = "512..2MiB".parse()?;
/// assert_eq!(sizes.to_string(), "512..2097152");
/// assert!("2MiB..512".parse::<Sizes>().is_err());
/// # Ok::<(), oomph::stress::SizesError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    least: u64,
    most: u64,
}

/// A text that is no range of sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no range of sizes; write small, mixed, large, or one like 512..2MiB")]
pub struct SizesError(String);

impl Sizes {
    /// Blocks of a byte to 64 KiB: many of them.
    pub const SMALL: Sizes = Sizes { least: 1, most: 64 * KIB };
    /// Blocks of a byte to 32 MiB, of every order of magnitude.
    pub const MIXED: Sizes = Sizes { least: 1, most: 32 * MIB };
    /// Blocks of 1 MiB to 1 GiB: many bytes.
    pub const LARGE: Sizes = Sizes { least: MIB, most: GIB };

    /// The same with no block above a size.
    #[must_use]
    pub fn up_to(self, most: u64) -> Sizes {
        let most = most.clamp(1, self.most);
        Sizes { least: self.least.min(most), most }
    }

    /// Draws one.
    pub(super) fn draw(self, dice: &mut SeededRandom) -> u64 {
        PowerLaw::new(self.least, self.most, TAIL_EXPONENT).draw(dice)
    }
}

impl FromStr for Sizes {
    type Err = SizesError;

    fn from_str(text: &str) -> Result<Sizes, SizesError> {
        let refused = || SizesError(text.to_owned());
        let size = |part: &str| part.trim().parse::<Bytes>().map(|Bytes(bytes)| bytes).map_err(|_| refused());
        match text.trim() {
            "small" => Ok(Sizes::SMALL),
            "mixed" => Ok(Sizes::MIXED),
            "large" => Ok(Sizes::LARGE),
            range => {
                let (least, most) = range.split_once("..").ok_or_else(refused)?;
                let sizes = Sizes { least: size(least)?, most: size(most)? };
                if sizes.least == 0 || sizes.least > sizes.most { Err(refused()) } else { Ok(sizes) }
            }
        }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_sizes_lie_in_the_range_and_reach_both_ends() {
        let (sizes, mut dice) = (Sizes::MIXED.up_to(MIB), SeededRandom::new(1, "sizes"));
        let drawn: Vec<u64> = (0..20_000).map(|_| sizes.draw(&mut dice)).collect();
        assert!(drawn.iter().all(|bytes| (1..=MIB).contains(bytes)));
        assert!(drawn.iter().any(|&bytes| bytes < 8) && drawn.iter().any(|&bytes| bytes > MIB / 2));
    }

    #[test]
    fn what_is_no_range_is_refused_in_words() {
        for text in ["", "huge", "0..5", "5..4", "1..x", "7"] {
            assert!(text.parse::<Sizes>().unwrap_err().to_string().contains("512..2MiB"), "{text}");
        }
        assert_eq!("large".parse::<Sizes>().unwrap().up_to(512), Sizes { least: 512, most: 512 });
    }
}

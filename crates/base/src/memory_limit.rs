//! What a process may take of a device ([`MemoryLimit`]), and sizes as users type them ([`Bytes::typed`]).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, de};

use crate::{Bytes, MIB, ParseBytesError};

/// What a process may take of a device: a size, or a fraction of what the device has.
///
/// ```
/// use oomph_base::{Bytes, GIB, MemoryLimit};
/// assert_eq!("24GiB".parse::<MemoryLimit>()?.resolve(80 * GIB), Some(24 * GIB));
/// assert_eq!("0.5".parse::<MemoryLimit>()?.resolve(80 * GIB), Some(40 * GIB));
/// assert_eq!("100%".parse::<MemoryLimit>()?.resolve(80 * GIB), None, "no limit");
/// # Ok::<(), oomph_base::MemoryLimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    /// A size.
    Size(Bytes),
    /// A fraction of the device, from 0 to 1, as in PyTorch's `set_per_process_memory_fraction`.
    Fraction(f64),
}

impl MemoryLimit {
    /// The limit in bytes on a device with `total_bytes`; `None` means no limit.
    ///
    /// A fraction is rounded as PyTorch does (`DeviceCachingAllocator::setMemoryFraction`): the product is truncated, and
    /// a fraction of 1 sets no limit.
    #[must_use]
    pub fn resolve(self, total_bytes: u64) -> Option<u64> {
        match self {
            MemoryLimit::Size(Bytes(bytes)) => Some(bytes),
            MemoryLimit::Fraction(fraction) => (fraction < 1.0).then_some((fraction * total_bytes as f64) as u64),
        }
    }

    /// Whether the device must be known to resolve it.
    #[must_use]
    pub const fn is_fraction(self) -> bool {
        matches!(self, MemoryLimit::Fraction(_))
    }
}

/// Exact, and as users type it: `1024MiB`, `1000B`, `0.04`.
impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryLimit::Size(Bytes(bytes)) if bytes.is_multiple_of(MIB) => write!(f, "{}MiB", bytes / MIB),
            MemoryLimit::Size(Bytes(bytes)) => write!(f, "{bytes}B"),
            // A whole number would be read as bytes.
            MemoryLimit::Fraction(fraction) => write!(f, "{fraction:?}"),
        }
    }
}

/// The text is not a memory limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryLimitError {
    /// Neither a size nor a fraction.
    #[error("'{0}' is neither a size such as 24GiB nor a fraction of the device such as 0.5 or 50%")]
    Neither(String),
    /// A fraction below 0 or above 1.
    #[error("{0} is not a fraction from 0 to 1; write a size with its unit, such as 24GiB")]
    OutOfRange(String),
    /// It may mean 1 GiB or all of the device.
    #[error("1 means 1 byte; did you mean 1GiB, or 1.0 for no limit? (write 1B for one byte)")]
    One,
    /// A size without its unit.
    #[error(transparent)]
    NoUnit(#[from] TypedSizeError),
}

impl FromStr for MemoryLimit {
    type Err = MemoryLimitError;

    /// Reads a size (`24GiB`, `1073741824`) or a fraction (`0.04`, `1.0`, `4%`). Numbers with a decimal point or a percent
    /// sign are fractions; whole numbers are bytes, and small ones are questioned.
    fn from_str(text: &str) -> Result<MemoryLimit, MemoryLimitError> {
        let text = text.trim();
        let percent = text.strip_suffix('%').map(str::trim_end);
        let is_decimal = percent.is_some() || text.contains(['.', 'e', 'E']);
        // Read as one decimal number: dividing 4.2 by 100 would round twice.
        let number: Option<f64> = match percent {
            Some(number) => format!("{number}e-2").parse().ok(),
            None => text.parse().ok(),
        };
        match number.filter(|number| is_decimal && number.is_finite()) {
            Some(fraction) if (0.0..=1.0).contains(&fraction) => Ok(MemoryLimit::Fraction(fraction)),
            Some(fraction) if percent.is_some() || fraction < 0.0 => Err(MemoryLimitError::OutOfRange(text.to_owned())),
            _ if text == "1" => Err(MemoryLimitError::One),
            _ => match Bytes::typed(text) {
                Ok(size) => Ok(MemoryLimit::Size(size)),
                Err(TypedSizeError::Parse(_)) => Err(MemoryLimitError::Neither(text.to_owned())),
                Err(question) => Err(question.into()),
            },
        }
    }
}

/// A number with a decimal point is a fraction, a whole one is bytes; a text is read as on the command line.
impl<'de> Deserialize<'de> for MemoryLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected a size such as \"80GiB\", a number of bytes, or a fraction such as 0.5"
        )]
        enum Written {
            Bytes(u64),
            Fraction(f64),
            Text(String),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => bytes.to_string(),
            Written::Fraction(fraction) => format!("{fraction:?}"),
            Written::Text(text) => text,
        };
        text.parse().map_err(de::Error::custom)
    }
}

/// Why a typed size is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TypedSizeError {
    /// Not a size.
    #[error(transparent)]
    Parse(#[from] ParseBytesError),
    /// A few bytes, where a size in GiB or MiB is more likely.
    #[error("{0} means {0} bytes; did you mean {0}{unit}? (write {0}B for bytes)", unit = likely_unit(.0))]
    FewBytes(String),
    /// A part of a byte.
    #[error("{0} has no unit; did you mean {0}GiB?")]
    PartOfAByte(String),
}

/// The unit that a number probably has: no card has a thousand GiB.
fn likely_unit(number: &str) -> &'static str {
    if number.len() < 4 { "GiB" } else { "MiB" }
}

/// Smaller amounts of memory need a unit.
const LEAST_WITHOUT_UNIT: u64 = MIB;

impl Bytes {
    /// A size as users type it for a device or a process. Numbers without a unit are bytes; below 1 MiB, and with a
    /// decimal point, they are questioned, because GiB were meant.
    pub fn typed(text: &str) -> Result<Bytes, TypedSizeError> {
        let text = text.trim();
        let has_unit = text.parse::<f64>().is_err();
        if !has_unit && text.contains('.') && text.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(TypedSizeError::PartOfAByte(text.to_owned()));
        }
        let size: Bytes = text.parse()?;
        if !has_unit && (1..LEAST_WITHOUT_UNIT).contains(&size.0) {
            return Err(TypedSizeError::FewBytes(text.to_owned()));
        }
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GIB;

    /// An H200, on which the recordings of the tests were made.
    const TOTAL: u64 = 150_109_880_320;

    fn limit(text: &str) -> MemoryLimit {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn refusal(text: &str) -> String {
        text.parse::<MemoryLimit>().unwrap_err().to_string()
    }

    #[test]
    fn sizes_and_fractions_are_told_apart() {
        for (text, size) in [
            ("24GiB", 24 * GIB),
            (" 24 GiB ", 24 * GIB),
            ("1.5GiB", 3 * GIB / 2),
            ("24B", 24),
            ("1B", 1),
            ("0", 0),
            ("1048576", MIB),
            ("25769803776", 24 * GIB),
        ] {
            assert_eq!(limit(text), MemoryLimit::Size(Bytes(size)), "{text}");
        }
        for (text, fraction) in [
            ("0.04", 0.04),
            (".5", 0.5),
            ("0.0", 0.0),
            ("1.0", 1.0),
            ("1.", 1.0),
            ("5e-2", 0.05),
            ("4%", 0.04),
            ("4.2 %", 0.042),
            ("100%", 1.0),
            ("0%", 0.0),
        ] {
            assert_eq!(limit(text), MemoryLimit::Fraction(fraction), "{text}");
        }
    }

    #[test]
    fn fractions_are_rounded_as_pytorch_does() {
        assert_eq!(limit("0.042").resolve(TOTAL), Some(6_304_614_973));
        assert_eq!(limit("4.2%").resolve(TOTAL), limit("0.042").resolve(TOTAL));
        assert_eq!(limit("0.0").resolve(TOTAL), Some(0));
        assert_eq!(limit("1.0").resolve(TOTAL), None);
        assert_eq!(limit("0.9999999").resolve(TOTAL), Some(150_109_865_309));
        assert_eq!(limit("24GiB").resolve(MIB), Some(24 * GIB), "a size does not depend on the device");
    }

    #[test]
    fn numbers_without_a_unit_are_questioned() {
        assert_eq!(refusal("24"), "24 means 24 bytes; did you mean 24GiB? (write 24B for bytes)");
        assert_eq!(refusal("24576"), "24576 means 24576 bytes; did you mean 24576MiB? (write 24576B for bytes)");
        assert!(refusal("1048575").contains("did you mean"));
        assert_eq!(refusal("1"), "1 means 1 byte; did you mean 1GiB, or 1.0 for no limit? (write 1B for one byte)");
        assert_eq!(refusal("1.5"), "1.5 has no unit; did you mean 1.5GiB?");
        assert_eq!(refusal("24.0"), "24.0 has no unit; did you mean 24.0GiB?");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["101%", "-0.5", "-3%"] {
            assert!(refusal(text).contains("is not a fraction from 0 to 1"), "{text}: {}", refusal(text));
        }
        for text in ["", "half", "24 parsecs", "NaN", "inf", "%", "-1", "0.5 of it", "1e400"] {
            assert!(refusal(text).contains("is neither a size such as 24GiB nor"), "{text}: {}", refusal(text));
        }
    }

    #[test]
    fn limits_print_as_they_are_read() {
        for (text, printed) in
            [("1GiB", "1024MiB"), ("1000000000", "1000000000B"), ("7B", "7B"), ("4%", "0.04"), ("100%", "1.0")]
        {
            assert_eq!(limit(text).to_string(), printed);
            assert_eq!(limit(printed), limit(text));
        }
    }

    #[test]
    fn limits_are_read_from_files() {
        let read = |text: &str| serde_json::from_str::<MemoryLimit>(text).map_err(|error| error.to_string());
        assert_eq!(read("0.5"), Ok(MemoryLimit::Fraction(0.5)));
        assert_eq!(read("\"50%\""), Ok(MemoryLimit::Fraction(0.5)));
        assert_eq!(read("\"6GiB\""), Ok(MemoryLimit::Size(Bytes(6 * GIB))));
        assert_eq!(read("1073741824"), Ok(MemoryLimit::Size(Bytes(GIB))));
        assert!(read("6").unwrap_err().contains("did you mean 6GiB?"));
        assert!(read("true").unwrap_err().contains("expected a size"));
    }
}

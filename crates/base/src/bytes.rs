//! Amounts of memory: parsed from what people type, printed in binary units.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, de};

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// An amount of memory.
///
/// ```
/// use oomph_base::Bytes;
/// assert_eq!("2MiB".parse::<Bytes>().unwrap(), Bytes(2 << 20));
/// assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    /// Whole bytes below 1 KiB, otherwise three significant digits or more: `512 B`, `20.0 MiB`, `1,234 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..KIB => return f.pad(&format!("{} B", self.0)),
            KIB..MIB => (KIB, "KiB"),
            MIB..GIB => (MIB, "MiB"),
            _ => (GIB, "GiB"),
        };
        let value = self.0 as f64 / unit as f64;
        let decimals = if value < 10.0 {
            2
        } else if value < 100.0 {
            1
        } else {
            0
        };
        f.pad(&format!("{value:.decimals$} {name}"))
    }
}

/// The text is not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an amount of memory; write it like 512MiB, 80GiB or 1048576")]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || ParseBytesError(text.to_owned());
        // bytesize reads a negative number or NaN as zero; neither is an amount of memory.
        if !text.trim_start().starts_with(|c: char| c.is_ascii_digit()) {
            return Err(refused());
        }
        // More than fits in 64 bits becomes the most that does.
        let size = text.trim().parse::<bytesize::ByteSize>().ok().filter(|size| size.as_u64() < u64::MAX);
        size.map(|size| Bytes(size.as_u64())).ok_or_else(refused)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    /// Accepts a number of bytes or a text such as `"80GiB"`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an amount of memory such as \"80GiB\" or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Bytes, E> {
                Ok(Bytes(value))
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Bytes, E> {
                u64::try_from(value).map(Bytes).map_err(|_| E::custom("memory cannot be negative"))
            }
            fn visit_str<E: de::Error>(self, value: &str) -> Result<Bytes, E> {
                value.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_as_people_type_them() {
        for (text, bytes) in
            [("512", 512), ("2MiB", 2 * MIB), ("80 GiB", 80 * GIB), ("1.5GiB", 3 * GIB / 2), ("1kb", 1000)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "x", "-1", "12 parsecs", "NaN", "99999999999999999999GiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_in_binary_units() {
        let shown = [0, 512, 2 * MIB, 20 * MIB, 100 * MIB, 141 * GIB].map(|n| Bytes(n).to_string());
        assert_eq!(shown, ["0 B", "512 B", "2.00 MiB", "20.0 MiB", "100 MiB", "141 GiB"]);
    }
}

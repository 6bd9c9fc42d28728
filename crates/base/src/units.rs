//! Quantities and identities: bytes, nanoseconds, addresses and the numbers of streams, threads, events, sites and tags.

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign},
    str::FromStr,
};

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
        f.pad(&three_digits(value, name))
    }
}

/// A value with its unit, in three significant digits or more.
fn three_digits(value: f64, unit: &str) -> String {
    let decimals = match value {
        0.0..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
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
        // bytesize turns more than 64 bits hold into the largest number.
        let size = text.trim().parse::<bytesize::ByteSize>().ok().filter(|size| size.as_u64() < u64::MAX);
        size.map(|size| Bytes(size.as_u64())).ok_or_else(refused)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected an amount of memory such as \"80GiB\" or a number of bytes")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(bytes) => Ok(Bytes(bytes)),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

/// Nanoseconds: a duration, or an instant on a device's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time.
    pub const ZERO: Nanos = Nanos(0);

    /// The difference, or zero where `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Nanos) {
        *self = *self + other;
    }
}

impl Sum for Nanos {
    fn sum<I: Iterator<Item = Nanos>>(iter: I) -> Nanos {
        iter.fold(Nanos::ZERO, Add::add)
    }
}

impl fmt::Display for Nanos {
    /// Three significant digits in the largest unit that is not above the value: `912 ns`, `4.41 us`, `12.7 ms`, `1.23 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} ns", self.0)),
            1_000..1_000_000 => (self.0 as f64 / 1e3, "us"),
            1_000_000..1_000_000_000 => (self.0 as f64 / 1e6, "ms"),
            _ => (self.0 as f64 / 1e9, "s"),
        };
        f.pad(&three_digits(value, unit))
    }
}

/// A device address. No block is at address 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Address(pub u64);

impl Address {
    /// The null address, which no block has.
    pub const NULL: Address = Address(0);

    /// The address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident($inner:ty);)*) => {$(
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The position in a table that is indexed by this identity.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

index! {
    /// A stream, numbered from the default stream 0. `Device::stream_handle` gives the driver's handle.
    StreamId(u16);
    /// A host thread, numbered from 0.
    ThreadId(u16);
    /// An event on a stream, numbered by the device.
    EventId(u32);
    /// An interned call site; 0 is "unknown".
    SiteId(u32);
    /// An interned tag (category and layer); 0 is "untagged".
    TagId(u32);
}

impl StreamId {
    /// The default stream.
    pub const DEFAULT: StreamId = StreamId(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
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
    fn sizes_print_in_binary_units() {
        let shown = [0, 512, 2 * MIB, 20 * MIB, 100 * MIB, 141 * GIB].map(|n| Bytes(n).to_string());
        assert_eq!(shown, ["0 B", "512 B", "2.00 MiB", "20.0 MiB", "100 MiB", "141 GiB"]);
    }
}

#[cfg(test)]
mod time_tests {
    use super::*;

    #[test]
    fn durations_print_with_a_fitting_unit() {
        let shown = [0, 912, 4_410, 12_700_000, 456_000_000, 1_230_000_000].map(|n| Nanos(n).to_string());
        assert_eq!(shown, ["0 ns", "912 ns", "4.41 us", "12.7 ms", "456 ms", "1.23 s"]);
    }
}

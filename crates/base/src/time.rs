//! Durations and instants in nanoseconds, virtual or real.

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Sub},
};

use serde::{Deserialize, Serialize};

/// Nanoseconds: a duration, or an instant on a device's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time at all.
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

impl Sub for Nanos {
    type Output = Nanos;
    fn sub(self, other: Nanos) -> Nanos {
        self.since(other)
    }
}

impl Sum for Nanos {
    fn sum<I: Iterator<Item = Nanos>>(iter: I) -> Nanos {
        iter.fold(Nanos::ZERO, Add::add)
    }
}

impl fmt::Display for Nanos {
    /// Three significant digits in the unit a person would choose: `912 ns`, `4.41 us`, `12.7 ms`, `1.23 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} ns", self.0)),
            1_000..1_000_000 => (self.0 as f64 / 1e3, "us"),
            1_000_000..1_000_000_000 => (self.0 as f64 / 1e6, "ms"),
            _ => (self.0 as f64 / 1e9, "s"),
        };
        let decimals = if value < 10.0 {
            2
        } else if value < 100.0 {
            1
        } else {
            0
        };
        f.pad(&format!("{value:.decimals$} {unit}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_a_person_would_say_them() {
        let shown = [0, 912, 4_410, 12_700_000, 456_000_000, 1_230_000_000].map(|n| Nanos(n).to_string());
        assert_eq!(shown, ["0 ns", "912 ns", "4.41 us", "12.7 ms", "456 ms", "1.23 s"]);
    }
}

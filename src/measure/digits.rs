//! How many digits a measured or computed number has in CSV and JSON.
//!
//! Shares, ratios and rates have six significant digits: more would be noise, and fewer would hide changes. Amounts of
//! bytes and times that are averages are whole. Everything else is counted and exact.

use serde::{Serialize, Serializer};

/// A number with six significant digits.
///
/// ```
/// use oomph::measure::digits::six_digits;
/// assert_eq!(six_digits(1.0 / 3.0), 0.333333);
/// assert_eq!(six_digits(1.0e-9 / 7.0), 1.42857e-10);
/// assert_eq!(six_digits(29_761_904.76), 29_761_900.0);
/// ```
#[must_use]
pub fn six_digits(number: f64) -> f64 {
    format!("{number:.5e}").parse().unwrap_or(number)
}

/// For `serialize_with`: [`six_digits`].
pub fn required<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    six_digits(*number).serialize(serializer)
}

/// For `serialize_with`: [`six_digits`], where the number is known.
pub fn optional<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    number.map(six_digits).serialize(serializer)
}

/// For `serialize_with`: a whole number.
pub fn whole<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    (number.round() as i64).serialize(serializer)
}

/// For `serialize_with`: a whole number, where it is known.
pub fn optional_whole<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    number.map(|number| number.round() as i64).serialize(serializer)
}

//! Declarations of parameters, the same for strategies and for workload generators.

use std::{fmt, ops::RangeInclusive};

use crate::Bytes;

/// A parameter of a strategy or of a workload generator: what `list` shows and what may be set.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The name that users set.
    pub name: &'static str,
    /// The values that it accepts.
    pub values: ParameterValues,
    /// The default, as a user would type it.
    pub default: &'static str,
    /// What it does.
    pub help: &'static str,
}

/// The values that a parameter accepts; bounds are inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterValues {
    /// A whole number.
    Count {
        /// The smallest.
        least: u32,
        /// The largest.
        most: u32,
    },
    /// An amount of memory.
    Size {
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// Any number.
    Number {
        /// The smallest.
        least: f64,
        /// The largest.
        most: f64,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of words, as `first,second` or as a TOML list.
    Words {
        /// An example of such a list.
        example: &'static str,
    },
    /// Values in words. The code that reads the parameter checks them.
    Text(&'static str),
}

impl Parameter {
    /// A parameter that takes a whole number.
    #[must_use]
    pub const fn count(
        name: &'static str,
        range: RangeInclusive<u32>,
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Count { least: *range.start(), most: *range.end() }, default, help }
    }

    /// A parameter that takes an amount of memory.
    #[must_use]
    pub const fn size(
        name: &'static str,
        range: RangeInclusive<u64>,
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Size { least: *range.start(), most: *range.end() }, default, help }
    }

    /// A parameter that takes a number.
    #[must_use]
    pub const fn number(
        name: &'static str,
        range: RangeInclusive<f64>,
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Number { least: *range.start(), most: *range.end() }, default, help }
    }

    /// A parameter that takes one of some words.
    #[must_use]
    pub const fn choice(
        name: &'static str,
        words: &'static [&'static str],
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Choice(words), default, help }
    }

    /// A parameter that takes a list of words; which ones, its generator knows.
    #[must_use]
    pub const fn words(
        name: &'static str,
        example: &'static str,
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Words { example }, default, help }
    }

    /// A parameter whose values are described in words.
    #[must_use]
    pub const fn text(
        name: &'static str,
        values: &'static str,
        default: &'static str,
        help: &'static str,
    ) -> Parameter {
        Parameter { name, values: ParameterValues::Text(values), default, help }
    }
}

impl fmt::Display for ParameterValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ParameterValues::Count { least, most } => write!(f, "a whole number from {least} to {most}"),
            ParameterValues::Size { least, most } => write!(f, "a size from {} to {}", Bytes(least), Bytes(most)),
            ParameterValues::Number { least, most } => write!(f, "a number from {least} to {most}"),
            ParameterValues::Choice(words) => write!(f, "one of {}", words.join(", ")),
            ParameterValues::Words { example } => write!(f, "a list of words such as {example}"),
            ParameterValues::Text(values) => f.write_str(values),
        }
    }
}

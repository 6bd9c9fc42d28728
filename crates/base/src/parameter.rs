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
    /// One of these words: an older way to add a word to a list parameter. Accepted, and not shown in lists of
    /// parameters. The default adds nothing.
    Alias {
        /// The parameter that takes the word now.
        of: &'static str,
        /// The words.
        words: &'static [&'static str],
    },
    /// A list of words, as `first,second` or as a TOML list.
    Words {
        /// An example of such a list.
        example: &'static str,
    },
    /// Values in words. The code that reads the parameter checks them.
    Text(&'static str),
}

/// A constructor of [`Parameter`] per kind of value.
macro_rules! constructors {
    ($($(#[$doc:meta])* $kind:ident($given:ident: $type:ty) => $values:expr;)*) => {
        impl Parameter {$(
            $(#[$doc])*
            #[must_use]
            pub const fn $kind(name: &'static str, $given: $type, default: &'static str, help: &'static str) -> Self {
                Parameter { name, values: $values, default, help }
            }
        )*}
    };
}

constructors! {
    /// A parameter that takes a whole number.
    count(range: RangeInclusive<u32>) => ParameterValues::Count { least: *range.start(), most: *range.end() };
    /// A parameter that takes an amount of memory.
    size(range: RangeInclusive<u64>) => ParameterValues::Size { least: *range.start(), most: *range.end() };
    /// A parameter that takes a number.
    number(range: RangeInclusive<f64>) => ParameterValues::Number { least: *range.start(), most: *range.end() };
    /// A parameter that takes one of some words.
    choice(words: &'static [&'static str]) => ParameterValues::Choice(words);
    /// An older way to add a word to the list parameter that comes first.
    alias(words: (&'static str, &'static [&'static str])) => ParameterValues::Alias { of: words.0, words: words.1 };
    /// A parameter that takes a list of words; which ones, its generator knows.
    words(example: &'static str) => ParameterValues::Words { example };
    /// A parameter whose values are described in words.
    text(values: &'static str) => ParameterValues::Text(values);
}

impl Parameter {
    /// Whether it is an older name, which lists of parameters leave out.
    #[must_use]
    pub const fn is_alias(&self) -> bool {
        matches!(self.values, ParameterValues::Alias { .. })
    }
}

impl fmt::Display for ParameterValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ParameterValues::Count { least, most } => write!(f, "a whole number from {least} to {most}"),
            ParameterValues::Size { least, most } => write!(f, "a size from {} to {}", Bytes(least), Bytes(most)),
            ParameterValues::Number { least, most } => write!(f, "a number from {least} to {most}"),
            ParameterValues::Choice(words) | ParameterValues::Alias { words, .. } => {
                write!(f, "one of {}", words.join(", "))
            }
            ParameterValues::Words { example } => write!(f, "a list of words such as {example}"),
            ParameterValues::Text(values) => f.write_str(values),
        }
    }
}

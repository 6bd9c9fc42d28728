//! What can be wrong with a recipe or its parameters.

use std::{fmt, io, path::PathBuf};

use oomph_base::{did_you_mean, did_you_mean_among};

/// A workload that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No recipe of that name, neither in the binary nor in the current folder.
    #[error("unknown workload '{name}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().map(String::as_str)))]
    UnknownWorkload {
        /// What was asked for.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
        /// All there are.
        known: Vec<String>,
    },
    /// The file system said no.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A recipe that is not TOML, or not a recipe.
    #[error("{place}: {reason}")]
    Recipe {
        /// Where.
        place: Place,
        /// Why.
        reason: String,
    },
    /// A parameter that its generator refuses.
    #[error("{place}: {problem}")]
    Parameter {
        /// Where it was set.
        place: Place,
        /// What is wrong with it.
        problem: Problem,
    },
}

/// Where something was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file.
    File {
        /// Which file.
        file: String,
        /// Which line, from 1.
        line: usize,
        /// Which character of the line, from 1.
        column: usize,
    },
    /// In an override, as `key=value`.
    Override(String),
    /// Nowhere in particular: the parameters of this workload do not go together.
    Workload(String),
}

impl Place {
    /// The place of the byte `offset` of a file's text.
    #[must_use]
    pub fn in_file(file: &str, text: &str, offset: usize) -> Place {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Place::File {
            file: file.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            Place::Override(text) => write!(f, "parameter {text}"),
            Place::Workload(name) => write!(f, "workload '{name}'"),
        }
    }
}

/// What is wrong with a parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The generator has no such parameter.
    #[error("generator '{generator}' has no parameter '{name}'{}", did_you_mean(suggestion.as_deref()))]
    Unknown {
        /// Which generator.
        generator: &'static str,
        /// What was set.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// A value of another type.
    #[error("'{name}' takes {expected}, not {found}")]
    WrongType {
        /// Which parameter.
        name: &'static str,
        /// What it takes, in words.
        expected: String,
        /// What it got, in words.
        found: String,
    },
    /// A value of the right type that is too small or too large.
    #[error("'{name}' takes {expected}; {found} is out of range")]
    OutOfRange {
        /// Which parameter.
        name: &'static str,
        /// What it takes, in words.
        expected: String,
        /// What it got, in words.
        found: String,
    },
    /// A word in a list that is none of those the generator knows.
    #[error("'{name}' has no '{word}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().copied()))]
    UnknownWord {
        /// Which parameter.
        name: &'static str,
        /// What was in it.
        word: String,
        /// What could be.
        known: &'static [&'static str],
        /// The nearest right one.
        suggestion: Option<String>,
    },
    /// Values that are right each by itself and wrong together.
    #[error("{0}")]
    Impossible(String),
}

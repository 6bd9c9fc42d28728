//! Errors in recipes and parameters.

use std::{fmt, io, path::PathBuf};

use oomph_base::did_you_mean_among;

/// A workload that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No recipe has this name, neither in the binary nor in the current folder.
    #[error("unknown workload '{name}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().map(String::as_str)))]
    UnknownWorkload {
        /// The name.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
        /// All names.
        known: Vec<String>,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A recipe that is not valid, or a parameter that its generator refuses.
    #[error("{place}: {reason}")]
    Invalid {
        /// Where it was set.
        place: SettingPlace,
        /// Why.
        reason: String,
    },
}

/// Where a setting was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingPlace {
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
    /// In no single place: the parameters of this workload do not fit together.
    Workload(String),
}

impl SettingPlace {
    /// The place of the byte `offset` of a file's text.
    #[must_use]
    pub fn in_file(file: &str, text: &str, offset: usize) -> SettingPlace {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        SettingPlace::File {
            file: file.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for SettingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingPlace::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            SettingPlace::Override(text) => write!(f, "parameter {text}"),
            SettingPlace::Workload(name) => write!(f, "workload '{name}'"),
        }
    }
}

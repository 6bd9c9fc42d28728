//! What can be wrong with a trace.

use std::{io, path::PathBuf};

/// A trace that cannot be read, written or believed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file system said no.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A line that cannot be understood.
    #[error("{path}:{line}: {reason}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// Why.
        reason: String,
    },
    /// A file of a kind or version that this program does not know.
    #[error("{path}: {reason}")]
    Format {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// An event that contradicts those before it.
    #[error("event {index}: {reason}")]
    Contradiction {
        /// Which event, from 0.
        index: u64,
        /// What is wrong with it.
        reason: String,
    },
}

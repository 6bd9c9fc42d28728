//! What can go wrong with a run's files.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A run folder that cannot be written, read or continued.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file system said no.
    #[error("{path}: {source}")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The folder holds a run already.
    #[error("{path} holds a run already: go on with --resume {path}, or choose another folder")]
    Occupied {
        /// Which folder.
        path: PathBuf,
    },
    /// There is nothing of that name.
    #[error("{path}: no such folder")]
    NoFolder {
        /// Which folder.
        path: PathBuf,
    },
    /// A file where a folder is meant.
    #[error("{path} is a file; the folder of a run is meant")]
    NotAFolder {
        /// Which file.
        path: PathBuf,
    },
    /// There is no run to go on with.
    #[error("{path} holds no run: it has no env.json")]
    NoRun {
        /// Which folder.
        path: PathBuf,
    },
    /// The run was made elsewhere or otherwise; its rows must not be mixed with new ones.
    #[error("{path} cannot be resumed: its {what} is '{there}', this run's is '{here}'")]
    OtherEnvironment {
        /// Which folder.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// Its value in this run.
        here: String,
        /// Its value in the folder.
        there: String,
    },
    /// The run is one of other cases; its rows must not be mixed with new ones.
    #[error(
        "{path} holds the case {case_id}, which is none of this run's; resume with the same suites, filters and limit"
    )]
    OtherCases {
        /// Which folder.
        path: PathBuf,
        /// The first case that is none of this run's.
        case_id: String,
    },
    /// The folder is a shard whose cases were dealt out otherwise.
    #[error(
        "{path} cannot be resumed: its plan.csv deals out other cases than this run, or otherwise; resume with the \
         same suites, filters, partition and trace files"
    )]
    OtherPlan {
        /// Which folder.
        path: PathBuf,
    },
    /// The folder is no part of a run.
    #[error("{path} is no shard: its run was not made with --partition")]
    NoShard {
        /// Which folder.
        path: PathBuf,
    },
    /// The shards are not one whole run.
    #[error("the shards are not one whole run: {reason}")]
    NotWhole {
        /// The first reason.
        reason: String,
    },
    /// The columns are those of another version of this program.
    #[error("{path}: the columns are not those of schema {schema}")]
    OtherColumns {
        /// Which file.
        path: PathBuf,
        /// The schema that this program writes.
        schema: u32,
    },
    /// A row that cannot be understood.
    #[error("{path}:{line}: {reason}")]
    Row {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// Why.
        reason: String,
    },
    /// A JSON file that cannot be understood.
    #[error("{path}: {source}")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Why, with line and column.
        source: serde_json::Error,
    },
    /// Rows that cannot be written as CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
}

impl ReportError {
    /// For `map_err`: the file system said no to `path`.
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> ReportError + '_ {
        move |source| ReportError::Io { path: path.to_owned(), source }
    }

    /// For `map_err`: the JSON in `path` cannot be understood.
    pub(super) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> ReportError + '_ {
        move |source| ReportError::Json { path: path.to_owned(), source }
    }
}

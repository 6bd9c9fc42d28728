//! What can go wrong with the files of a run.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A run folder that cannot be written, read or continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum ReportError {
    /// A file or folder cannot be read or written.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// The folder already holds a run.
    #[error("{path} already holds a run: continue it with --resume {path}, or choose another folder")]
    Occupied { path: PathBuf },
    /// The folder does not exist.
    #[error("{path}: no such folder")]
    NoFolder { path: PathBuf },
    /// The path names a file, not a folder.
    #[error("{path} is a file; name the folder of a run")]
    NotAFolder { path: PathBuf },
    /// The folder holds no run.
    #[error("{path} holds no run: it has no env.json")]
    NoRun { path: PathBuf },
    /// The folder's run has another environment, so its rows cannot be mixed with new ones.
    #[error("{path} cannot be resumed: its {what} is '{there}', this run's is '{here}'")]
    OtherEnvironment { path: PathBuf, what: &'static str, here: String, there: String },
    /// The folder's run has other cases, so its rows cannot be mixed with new ones.
    #[error(
        "{path} holds the case {case_id}, which is not part of this run; resume with the same suites, filters and limit"
    )]
    OtherCases { path: PathBuf, case_id: String },
    /// The folder is a shard with another plan.
    #[error(
        "{path} cannot be resumed: its plan.csv has other cases or another distribution than this run; resume with the \
         same suites, filters, partition and trace files"
    )]
    OtherPlan { path: PathBuf },
    /// The folder is not a shard.
    #[error("{path} is not a shard: its run was made without --partition")]
    NoShard { path: PathBuf },
    /// The shards do not form one complete run.
    #[error("the shards do not form one complete run: {reason}")]
    NotWhole { reason: String },
    /// The columns are those of another version of this program.
    #[error("{path}: the columns are not those of schema {schema}")]
    OtherColumns { path: PathBuf, schema: u32 },
    /// A newer release wrote the files, or they are damaged.
    #[error(
        "{path} has schema {there}; this release of oomph reads schemas 1 to {here}. Read it with the release that wrote \
         it, or a newer one"
    )]
    UnknownSchema { path: PathBuf, there: u32, here: u32 },
    /// An older release wrote the files, and rows of two schemas cannot be in one file.
    #[error(
        "{path} {cannot}: it has schema {there}, and this release of oomph writes schema {here}. Start a new run with \
         --output, or use the release that wrote it ({version})"
    )]
    OldSchema { path: PathBuf, cannot: &'static str, there: u32, here: u32, version: String },
    /// A row cannot be read.
    #[error("{path}:{line}: {reason}")]
    Row { path: PathBuf, line: u64, reason: String },
    /// A JSON file cannot be read.
    #[error("{path}: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    /// Rows cannot be written as CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The result has no rows of one kind.
    #[error("this result has no CSV form; choose --format json")]
    NoCsv,
}

impl ReportError {
    /// For `map_err`: `path` cannot be read or written.
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> ReportError + '_ {
        move |source| ReportError::Io { path: path.to_owned(), source }
    }

    /// For `map_err`: the JSON in `path` is not valid.
    pub(super) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> ReportError + '_ {
        move |source| ReportError::Json { path: path.to_owned(), source }
    }
}

//! What can go wrong with the files of a run.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::base::{FileText, escaped};

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
    #[error("{path} cannot be resumed: its {what} is '{}', this run's is '{}'", escaped(there), escaped(here))]
    OtherEnvironment { path: PathBuf, what: &'static str, here: String, there: String },
    /// The folder's run has other cases, so its rows cannot be mixed with new ones.
    #[error(
        "{path} holds the case {}, which is not part of this run; resume with the same suites, filters and limit",
        escaped(case_id)
    )]
    OtherCases { path: PathBuf, case_id: String },
    /// The folder is a shard with another plan.
    #[error(
        "{path} cannot be resumed: its plan.csv has other cases or another distribution than this run; resume with the \
         same suites, filters, partition and trace files"
    )]
    OtherPlan { path: PathBuf },
    /// A case of the folder's run has another content now, so its rows cannot be mixed with new ones.
    #[error(
        "{path} cannot be resumed: the content of suites, workloads or trace files has changed since it began: {what} is \
         not what it was for the case {}; undo the change, or start a new run with --output",
        escaped(case_id)
    )]
    ChangedCase { path: PathBuf, case_id: String, what: &'static str },
    /// Another process writes into the folder.
    #[error("{path} is being written by {owner}: wait until it ends, or choose another folder")]
    Locked { path: PathBuf, owner: String },
    /// The folder for a merged run is not new.
    #[error("{path} is not empty: choose a new folder")]
    NotEmpty { path: PathBuf },
    /// A file has another checksum than its content.
    #[error("{path} was changed or damaged after it was written; restore it from a copy, or start a new run")]
    ChangedFile { path: PathBuf },
    /// A row has another checksum than its cells.
    #[error(
        "{path}:{line}: the row was changed or damaged after it was written; restore the file from a copy, or delete the \
         line and continue the run with --resume"
    )]
    ChangedRow { path: PathBuf, line: u64 },
    /// The file of a case has the details of another case.
    #[error("{path} holds the details of the case {case_id}; continue the run with --resume to write it again")]
    OtherDetail { path: PathBuf, case_id: FileText },
    /// The file of a case unpacks to more than any case has.
    #[error("{path} unpacks to more than {} MiB, which is more than a case has", most_bytes >> 20)]
    DetailTooLarge { path: PathBuf, most_bytes: u64 },
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
         --output, or use the release that wrote it ({})",
        escaped(version)
    )]
    OldSchema { path: PathBuf, cannot: &'static str, there: u32, here: u32, version: String },
    /// A row cannot be read.
    #[error("{path}:{line}: {}", escaped(reason))]
    Row { path: PathBuf, line: u64, reason: String },
    /// A JSON file cannot be read.
    #[error("{path}: {}", escaped(&source.to_string()))]
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

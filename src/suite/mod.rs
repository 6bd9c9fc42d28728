//! Which cases to run, and running them.
//!
//! A suite is a TOML file ([`SuiteFile`]) that unfolds into [`Case`]s; a [`CaseRunner`] turns a case into its record:
//! [`InProcess`], or a [`WorkerProcess`] for what might take the process down; [`Isolation`] says which. The room tells what happens through one stream of [`CaseProgress`] and neither prints nor writes files: that is for
//! whoever listens.

mod agreement;
mod case;
mod contents;
mod file;
mod filter;
mod in_process;
mod isolation;
mod needs;
mod partition;
mod rank_files;
mod run;
mod source;
mod story;
mod timeout;
pub mod worker;

pub use agreement::compare;
pub use case::{Case, CaseSettings};
pub use contents::{contents, contents_of_models};
pub use file::{Group, OnOom, Selection, SuiteFile, SuiteKind};
pub use filter::Filter;
pub use in_process::InProcess;
pub use isolation::{Isolating, Isolation};
pub use needs::WithNeeds;
pub use partition::{Partition, PartitionError};
pub use rank_files::{RankFile, rank_files, read_at_once};
pub use run::{CaseOutcome, CaseProgress, CaseRunner, all_cores, run, run_on};
pub use source::{SourceError, SourceSpec};
pub use timeout::{CaseTimeout, TimeoutError};
pub use worker::WorkerProcess;

use std::{io, path::PathBuf};

use crate::{base::did_you_mean_among, models::WorkloadError, strategy::SpecError};

/// A suite that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The file system said no.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The file is not a suite.
    #[error("{file}: {reason}")]
    Syntax {
        /// Which file.
        file: String,
        /// Why, with line and column.
        reason: String,
    },
    /// No suite of that name.
    #[error("unknown suite '{name}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().map(String::as_str)))]
    UnknownSuite {
        /// What was asked for.
        name: String,
        /// The nearest right name.
        suggestion: Option<String>,
        /// All there are.
        known: Vec<String>,
    },
    /// A trace file that the suite names is not there.
    #[error(
        "suite '{suite}': no file matches '{pattern}', seen from the current folder; run it where the files are (recordings \
         are in the repository and not in the binary)"
    )]
    NoTraceFile {
        /// Which suite.
        suite: String,
        /// What was looked for.
        pattern: String,
    },
    /// Parameters for a trace file, which has none.
    #[error("suite '{suite}': '{path}' is a trace file, which has nothing to set")]
    NothingToSet {
        /// Which suite.
        suite: String,
        /// Which file.
        path: String,
    },
    /// A strategy that the suite names is wrong.
    #[error("suite '{suite}': {source}")]
    Strategy {
        /// Which suite.
        suite: String,
        /// What is wrong.
        source: SpecError,
    },
    /// A workload that the suite names is wrong.
    #[error("suite '{suite}': {source}")]
    Workload {
        /// Which suite.
        suite: String,
        /// What is wrong; boxed, because it is several times the size of everything else here.
        source: Box<WorkloadError>,
    },
}

/// A case of an embedded workload on the simulated device.
#[cfg(test)]
fn test_case(workload: &str, strategy: &str) -> Case {
    let origin = SourceSpec { name: workload.to_owned(), seed: 1, ..SourceSpec::default() };
    let source = origin.open(&crate::base::NoProgress).unwrap_or_else(|error| panic!("{error}"));
    Case {
        label: crate::measure::CaseLabel {
            suite: "test".to_owned(),
            workload: source.name().to_owned(),
            strategy: strategy.to_owned(),
            device: "sim".to_owned(),
            ..Default::default()
        },
        source: source.into(),
        origin,
        strategy: strategy.into(),
        device: "sim".parse().unwrap_or_else(|error| panic!("{error}")),
        on_out_of_memory: Default::default(),
        pace: Default::default(),
        without_work: false,
        timed: false,
        threads: Vec::new(),
        timeout: None,
    }
}

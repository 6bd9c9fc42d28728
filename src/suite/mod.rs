//! Which cases to run, and running them.
//!
//! A suite is a TOML file ([`SuiteFile`]) that unfolds into [`Case`]s. A [`CaseRunner`] runs a
//! case: [`InProcess`], or a [`WorkerProcess`] for cases that might end the process; [`Isolation`]
//! decides. The module reports [`CaseProgress`]; it neither prints nor writes files.

mod case;
mod case_names;
mod deadline;
mod file;
mod in_process;
mod rank_files;
mod run;
mod source;
pub mod worker;

pub use case::{Case, CaseFilter, CaseFingerprint, CaseScope, CaseSettings, fingerprint, fingerprints};
pub use deadline::{CaseDeadline, StoppableSource};
pub use file::{AllWord, CaseTimeout, CaseTimeoutError, NameSelection, SuiteFile, SuiteGroup, SuiteKind};
pub use in_process::{InProcess, compare};
pub use rank_files::{RankFile, rank_files, read_at_once};
pub use run::{
    CaseOutcome, CaseProgress, CaseRunner, IsolatingRunner, Isolation, RoundTimes, WithNeeds, all_cores, run, run_on,
    time_in_rounds,
};
pub use source::{SourceError, SourceFamily, SourceSpec};
pub use worker::{TurnTimes, WorkerProcess};

use std::{io, path::PathBuf};

use crate::{base::did_you_mean_among, device::DeviceSpecError, models::WorkloadError, strategy::SpecError};

/// A suite that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is not a valid suite.
    #[error("{file}: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// The reason, with line and column.
        reason: String,
    },
    /// There is no suite of that name.
    #[error("unknown suite '{name}'{}", did_you_mean_among(suggestion.as_deref(), known.iter().map(String::as_str)))]
    UnknownSuite {
        /// The name.
        name: String,
        /// The nearest name.
        suggestion: Option<String>,
        /// All names.
        known: Vec<String>,
    },
    /// A trace file of the suite is missing.
    #[error(
        "suite '{suite}': no file matches '{pattern}' in the current folder; run it where the files are (recordings are in \
         the repository, not in the binary)"
    )]
    NoTraceFile {
        /// The suite.
        suite: String,
        /// The path or pattern.
        pattern: String,
    },
    /// Parameters for a trace file.
    #[error("suite '{suite}': '{path}' is a trace file and has no parameters to set")]
    NothingToSet {
        /// The suite.
        suite: String,
        /// The file.
        path: String,
    },
    /// Two cases of the suite have the same id.
    #[error(
        "suite '{suite}': two cases have the id '{case_id}': remove what is listed twice (a workload, file, strategy, limit \
         or seed), or the group that repeats another one"
    )]
    DuplicateCase {
        /// The suite.
        suite: String,
        /// The id.
        case_id: String,
    },
    /// A model is listed twice.
    #[error("suite '{suite}': the model '{model}' is listed twice: remove one")]
    DuplicateModel {
        /// The suite.
        suite: String,
        /// The model.
        model: String,
    },
    /// The lists of the suite multiply to too many cases.
    #[error(
        "suite '{suite}' has more than {most} cases: workloads, strategies, limits and seeds are multiplied; divide it into \
         several suites"
    )]
    TooManyCases {
        /// The suite.
        suite: String,
        /// The most cases.
        most: usize,
    },
    /// A strategy of the suite is invalid.
    #[error("suite '{suite}': {source}")]
    Strategy {
        /// The suite.
        suite: String,
        /// The error.
        source: SpecError,
    },
    /// The device does not tell how much memory it has.
    #[error("suite '{suite}': {source}")]
    Device {
        /// The suite.
        suite: String,
        /// The error.
        source: DeviceSpecError,
    },
    /// A workload of the suite is invalid.
    #[error("suite '{suite}': {source}")]
    Workload {
        /// The suite.
        suite: String,
        /// The error; boxed, because it is much larger than the other variants.
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
        scope: CaseScope::Whole,
        threads: Vec::new(),
        sharing: crate::measure::ThreadSharing::default(),
        most_lives: crate::measure::lifetimes::MOST_LIVES,
        timeout: None,
    }
}

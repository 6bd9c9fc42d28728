//! Errors with the exit code they deserve.

use std::{fmt, io, process::ExitCode};

use anyhow::anyhow;

use super::{exit, output};
use crate::replay::ReplayError;

/// What a subcommand returns: an exit code, or why there is none.
pub type Outcome = Result<u8, Failure>;

/// An error and its exit code.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    /// The user's input is wrong.
    pub fn usage(error: impl Into<anyhow::Error>) -> Failure {
        Failure { code: exit::USAGE, error: error.into() }
    }

    /// The device is not there.
    pub fn device(error: impl Into<anyhow::Error>) -> Failure {
        Failure { code: exit::DEVICE_UNAVAILABLE, error: error.into() }
    }

    /// A replay that could not be run: a missing device and a wrong strategy have their own exit codes.
    pub fn replay(error: ReplayError) -> Failure {
        match error {
            ReplayError::DeviceSpec(error) => Failure::device(error),
            ReplayError::StrategySpec(error) => Failure::usage(error),
            error => error.into(),
        }
    }

    /// The filters leave nothing.
    pub fn nothing_selected(error: impl Into<anyhow::Error>) -> Failure {
        Failure { code: exit::NOTHING_SELECTED, error: error.into() }
    }

    /// The same, said of something.
    pub fn context(self, subject: &str) -> Failure {
        Failure { error: anyhow!("{subject}: {}", self.error), ..self }
    }

    /// Prints the error once, for its words include those of its cause, and gives the exit code. A reader who closed the pipe has seen enough: that is no error.
    pub fn report(self) -> ExitCode {
        let closed_pipe = self
            .error
            .chain()
            .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe));
        if closed_pipe {
            return ExitCode::SUCCESS;
        }
        output::complain(&format!("error: {}", self.error));
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure { code: exit::FAILURE, error: error.into() }
    }
}

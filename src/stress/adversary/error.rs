//! Why an adversary cannot play.

use crate::{device::MissingCapabilities, strategy::StrategyError, stress::SubjectError};

/// Why a game was not played to its end. Running out of memory is not among the reasons.
#[derive(Debug, thiserror::Error)]
pub enum AdversaryError {
    /// There is no such device or strategy.
    #[error(transparent)]
    Subject(#[from] SubjectError),
    /// The strategy cannot run on this device.
    #[error(transparent)]
    Unable(#[from] MissingCapabilities),
    /// The strategy gave up.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// Stopped from outside.
    #[error("interrupted")]
    Interrupted,
}

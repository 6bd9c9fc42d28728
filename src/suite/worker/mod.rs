//! Cases in processes of their own: what a crash, a poisoned GPU or a hanging case costs is then one case.
//!
//! A worker is this same program, started for one case: [`WorkerProcess`] starts it, and carrying out its [`Order`] is all
//! it does. They
//! talk in lines. On its standard input the worker gets the case, and perhaps [`STOP`] later; the end of its input means
//! that nobody waits for it any more. On its standard output it gives the outcome, as the last line. `cli` holds the
//! worker's end of the pipes, because a library neither reads standard input nor exits.

mod complaints;
mod fate;
mod order;
mod process;

pub use order::Order;
pub use process::WorkerProcess;

/// The line that asks a worker to end its case where it is, and to give the outcome of the part that ran.
pub const STOP: &str = "stop";

/// A line that is no case, or an outcome that does not fit into one.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Not something that [`WorkerProcess`] has written.
    #[error("a worker is started by oomph itself and told its case on standard input: {0}")]
    Order(serde_json::Error),
    /// The outcome cannot be written.
    #[error("the outcome cannot be written: {0}")]
    Outcome(serde_json::Error),
}

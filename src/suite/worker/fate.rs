//! How a worker ended that gave no outcome, in words.

use std::{io, process::ExitStatus};

use crate::{
    base::{exit_description, exit_signal},
    measure::Status,
    suite::CaseTimeout,
};

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fate {
    /// There never was a worker.
    #[error("the worker process cannot be started: {0}")]
    NotStarted(io::Error),
    /// Nobody knows what became of it.
    #[error("the worker process cannot be waited for: {0}")]
    Unknown(io::Error),
    /// It took too long and was ended.
    #[error("timed out after {0}")]
    TimedOut(CaseTimeout),
    /// A plugin did not return from a call, and took the worker along.
    #[error("plugin {0}")]
    Hung(String),
    /// It died, or gave up.
    #[error("{}the worker process {}{}", blamed(.plugin_call), exit_description(*.status), quoted(.last_words))]
    Ended {
        /// How.
        status: ExitStatus,
        /// The plugin and its call that it died in, if so.
        plugin_call: Option<String>,
        /// The last line of its standard error.
        last_words: String,
    },
    /// It ended well and said something else.
    #[error("the worker process ended without an outcome: {reason}{}", quoted(.last_words))]
    Incomprehensible {
        /// What is wrong with what it said.
        reason: serde_json::Error,
        /// The last line of its standard error.
        last_words: String,
    },
}

impl Fate {
    /// What the case is then: somebody's wish where a signal came from outside, and otherwise broken.
    pub(super) fn status(&self) -> Status {
        match self {
            Fate::Ended { status, .. } if is_wish(*status) => Status::Interrupted,
            _ => Status::Error,
        }
    }
}

/// Whether somebody asked the process to end: SIGHUP, SIGINT or SIGTERM.
fn is_wish(status: ExitStatus) -> bool {
    matches!(exit_signal(status), Some(1 | 2 | 15))
}

fn blamed(plugin_call: &Option<String>) -> String {
    plugin_call.as_ref().map_or_else(String::new, |call| format!("plugin {call}: "))
}

fn quoted(last_words: &str) -> String {
    if last_words.is_empty() { String::new() } else { format!("; its last words: {last_words}") }
}

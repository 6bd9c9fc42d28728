//! What went wrong under stress.

use std::fmt;

use crate::trace::Trace;

/// A promise that a strategy broke, and how it can be seen again.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which kind of stress found it: `integrity`, `properties`, `faults` ...
    pub found_by: &'static str,
    /// The strategy, as users type it.
    pub strategy: String,
    /// What happened.
    pub detail: String,
    /// The program that shows it, as small as it could be made.
    pub trace: Option<Trace>,
    /// What else must be said to `oomph stress KIND --trace FILE --strategy S` to see it again.
    pub conditions: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.strategy, self.found_by, self.detail)
    }
}

//! How long a case may take.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, de};

/// The longest that a case may take on the wall clock, written `90s` or `5m`. Whatever takes longer is ended from outside,
/// so such a case runs in a process of its own.
///
/// ```
/// use oomph::suite::CaseTimeout;
/// let timeout: CaseTimeout = "1m 30s".parse()?;
/// assert_eq!((timeout.duration().as_secs(), timeout.to_string()), (90, "1m 30s".to_owned()));
/// assert!("0s".parse::<CaseTimeout>().is_err());
/// # Ok::<(), oomph::suite::TimeoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaseTimeout(Duration);

/// A text that is no time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no time for a case: {reason}; write it like 90s or 5m")]
pub struct TimeoutError {
    text: String,
    reason: String,
}

impl CaseTimeout {
    /// How long a case with a plugin may take where nobody said: a hang must not be the end of a run, and whoever waits
    /// for longer cases can say so.
    pub const OF_PLUGINS: CaseTimeout = CaseTimeout(Duration::from_secs(600));

    /// How long that is.
    #[must_use]
    pub fn duration(self) -> Duration {
        self.0
    }
}

impl FromStr for CaseTimeout {
    type Err = TimeoutError;

    fn from_str(text: &str) -> Result<CaseTimeout, TimeoutError> {
        let refused = |reason: String| TimeoutError { text: text.to_owned(), reason };
        match humantime::parse_duration(text) {
            Ok(Duration::ZERO) => Err(refused("nothing is done in no time".to_owned())),
            Ok(duration) => Ok(CaseTimeout(duration)),
            Err(error) => Err(refused(error.to_string())),
        }
    }
}

impl fmt::Display for CaseTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl<'de> Deserialize<'de> for CaseTimeout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<CaseTimeout, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

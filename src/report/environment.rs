//! Where and how a run was made: `env.json`.

use serde::{Deserialize, Serialize};

/// What a reader needs to judge a run and to repeat it. The caller fills it in: this room looks at no machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// [`SCHEMA`](crate::measure::SCHEMA).
    pub schema: u32,
    /// When the run began, RFC 3339 in UTC.
    pub started: String,
    /// The command line, word by word.
    pub command: Vec<String>,
    /// The program's version.
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
    /// What the random choices start from.
    pub seed: u64,
    /// The processor's name, or the architecture where it is not known.
    pub machine: String,
    /// The operating system.
    pub os: String,
    /// Processors that could be used.
    pub cpus: u32,
    /// The device, as users type it.
    pub device: String,
    /// What the device says it is.
    pub device_name: String,
    /// The driver's version, if there is a driver.
    pub driver: Option<String>,
}

impl Environment {
    /// What differs from `other` so that their rows must not stand in one file: `(name, here, there)`.
    #[must_use]
    pub fn conflict(&self, other: &Environment) -> Option<(&'static str, String, String)> {
        [
            ("schema", self.schema.to_string(), other.schema.to_string()),
            ("commit", self.commit.clone(), other.commit.clone()),
            ("device", self.device.clone(), other.device.clone()),
            ("device_name", self.device_name.clone(), other.device_name.clone()),
            ("driver", self.driver.clone().unwrap_or_default(), other.driver.clone().unwrap_or_default()),
            ("seed", self.seed.to_string(), other.seed.to_string()),
        ]
        .into_iter()
        .find(|(_, here, there)| here != there)
    }
}

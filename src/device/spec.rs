//! A device by name, as users type it.

use std::{fmt, str::FromStr};

use super::{
    Device,
    sim::{SimConfig, SimConfigError, SimDevice},
};
use crate::unit::{did_you_mean, nearest};

/// Which device to open: `sim`, `sim:80GiB`, `sim:h200`, `cuda`, `cuda:1` or `auto`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Sim(Box<SimConfig>),
    Cuda,
}

/// Why a device cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceSpecError {
    /// The text is not a device.
    #[error("unknown device '{text}', write sim, sim:80GiB, sim:h200, cuda, cuda:1 or auto{}", did_you_mean(suggestion.as_deref()))]
    Unknown {
        /// What was typed.
        text: String,
        /// The nearest right word.
        suggestion: Option<String>,
    },
    /// The simulated device cannot be made like that.
    #[error(transparent)]
    Sim(#[from] SimConfigError),
    /// There is no such GPU here. Never answered by the simulated device instead.
    #[error("device '{0}' is not available: this version of oomph has no CUDA device; use --device sim")]
    Unavailable(String),
}

impl DeviceSpec {
    /// Opens a fresh device.
    pub fn open(&self) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            Kind::Sim(config) => Ok(Box::new(SimDevice::new(SimConfig::clone(config))?)),
            Kind::Cuda => Err(DeviceSpecError::Unavailable(self.text.clone())),
        }
    }
}

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<Self, DeviceSpecError> {
        let text = text.trim();
        let kind = match text.split_once(':').map_or(text, |(name, _)| name) {
            "sim" => Kind::Sim(Box::new(text.parse()?)),
            // The best there is: without a CUDA device that is the simulated one.
            "auto" => Kind::Sim(Box::default()),
            "cuda" => Kind::Cuda,
            other => {
                return Err(DeviceSpecError::Unknown {
                    text: text.to_owned(),
                    suggestion: nearest(other, ["sim", "cuda", "auto"]),
                });
            }
        };
        let text = if text == "auto" { "sim" } else { text };
        Ok(DeviceSpec { text: text.to_owned(), kind })
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::GIB;

    #[test]
    fn a_simulated_device_opens_with_the_size_that_was_asked_for() {
        let device = "sim:80GiB".parse::<DeviceSpec>().unwrap().open().unwrap();
        assert_eq!(device.props().total_bytes, 80 * GIB);
    }

    #[test]
    fn asking_for_cuda_never_falls_back() {
        let spec: DeviceSpec = "cuda:1".parse().unwrap();
        assert_eq!(spec.open().err(), Some(DeviceSpecError::Unavailable("cuda:1".to_owned())));
    }

    #[test]
    fn slips_of_the_finger_are_explained() {
        let message = "cude".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(message.contains("did you mean 'cuda'?"), "{message}");
        assert!("sim:0".parse::<DeviceSpec>().and_then(|spec| spec.open().map(|_| ())).is_err());
    }
}

//! A device by name, as users type it.

use std::{fmt, str::FromStr};

use super::{
    Device, cuda,
    fleet::is_of_several,
    sim::{SimConfig, SimConfigError, SimDevice},
};
use oomph_base::{Bytes, did_you_mean, nearest};

/// Which device to open: `sim`, `sim:80GiB`, `sim:h200`, `cuda`, `cuda:1` or `auto`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Sim(Box<SimConfig>),
    Cuda(u32),
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
    /// The text names several devices where one is wanted.
    #[error(
        "'{text}' means several devices, and one is wanted here, such as cuda:0; `oomph run` shares cases among several"
    )]
    Several {
        /// What was typed.
        text: String,
    },
    /// The text looks like several devices, and is not.
    #[error("'{text}' means no devices: write cuda:all, or as many simulated ones, from 1xsim to {most}xsim:80GiB")]
    UnknownFleet {
        /// What was typed.
        text: String,
        /// How many there may be.
        most: u32,
    },
    /// GPUs of different kinds.
    #[error("'{text}' means GPUs that are not alike ({names}): name one of them, or choose with CUDA_VISIBLE_DEVICES")]
    Unlike {
        /// What was typed.
        text: String,
        /// What they are called.
        names: String,
    },
    /// The simulated device cannot be made like that.
    #[error(transparent)]
    Sim(#[from] SimConfigError),
    /// There is no such GPU here. Never answered by the simulated device instead.
    #[error("device '{device}' is not available: {reason}; --device sim needs none, and `oomph doctor` tells more")]
    Unavailable {
        /// What was asked for.
        device: String,
        /// Why it is not there.
        reason: cuda::Unavailable,
    },
}

impl DeviceSpec {
    /// Opens a fresh device.
    pub fn open(&self) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            Kind::Sim(config) => Ok(Box::new(SimDevice::new(SimConfig::clone(config))?)),
            &Kind::Cuda(ordinal) => cuda::open(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Opens a fresh device for a guest in a program that has streams of its own: see [`cuda::open_as_guest`].
    pub fn open_as_guest(&self) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            Kind::Sim(_) => self.open(),
            &Kind::Cuda(ordinal) => cuda::open_as_guest(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Makes sure that the device can be opened, and leaves nothing on it.
    pub fn check(&self) -> Result<(), DeviceSpecError> {
        match self.kind {
            Kind::Sim(_) => self.open().map(drop),
            Kind::Cuda(ordinal) => cuda::probe(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// What the device says it is.
    pub fn device_name(&self) -> Result<String, DeviceSpecError> {
        match self.kind {
            Kind::Sim(_) => Ok(self.open()?.props().name.clone()),
            Kind::Cuda(ordinal) => cuda::name(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Whether everything about the device is of our making, its clock included: only then cases may run side by side.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self.kind, Kind::Sim(_))
    }

    /// The same device with at least so much memory in all. A real one has what it has.
    #[must_use]
    pub fn with_room_for(&self, total_bytes: u64) -> DeviceSpec {
        let mut roomy = self.clone();
        if let Kind::Sim(config) = &mut roomy.kind
            && config.total_bytes() < total_bytes
        {
            config.capacity_bytes = Some(total_bytes);
            roomy.text = format!("{} with {}", self.text, Bytes(total_bytes));
        }
        roomy
    }

    /// The same device under another name.
    pub(super) fn known_as(&self, text: &str) -> DeviceSpec {
        DeviceSpec { text: text.to_owned(), ..self.clone() }
    }

    /// The driver under the device, where there is one.
    #[must_use]
    pub fn driver(&self) -> Option<String> {
        match self.kind {
            Kind::Sim(_) => None,
            Kind::Cuda(_) => cuda::driver_version().map(|version| format!("CUDA {version}")),
        }
    }

    fn unavailable(&self, reason: cuda::Unavailable) -> DeviceSpecError {
        DeviceSpecError::Unavailable { device: self.text.clone(), reason }
    }

    /// Why matrix products do not run for real on this device, where they do not: times of steps mean nothing then.
    #[must_use]
    pub fn lacks_products(&self) -> Option<String> {
        match self.kind {
            Kind::Sim(_) => None,
            Kind::Cuda(_) => cuda::matrix_library().err().map(|reason| reason.to_string()),
        }
    }

    /// What kernels and libraries have taken of the device so far beside the context.
    #[must_use]
    pub fn footprint(&self) -> cuda::Footprint {
        match &self.kind {
            Kind::Sim(config) => {
                cuda::Footprint { library_bytes: config.profile.library_bytes, ..cuda::Footprint::default() }
            }
            &Kind::Cuda(ordinal) => cuda::footprint(ordinal).unwrap_or_default(),
        }
    }
}

/// The simulated device with its default size: `sim`.
impl Default for DeviceSpec {
    fn default() -> DeviceSpec {
        DeviceSpec { text: "sim".to_owned(), kind: Kind::Sim(Box::default()) }
    }
}

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<Self, DeviceSpecError> {
        let typed = text.trim();
        if is_of_several(typed) {
            return Err(DeviceSpecError::Several { text: typed.to_owned() });
        }
        let unknown = |suggestion| DeviceSpecError::Unknown { text: typed.to_owned(), suggestion };
        // The best there is: a GPU that works, otherwise the simulated one.
        let text = match typed {
            "auto" if cuda::probe(0).is_ok() => "cuda",
            "auto" => "sim",
            other => other,
        };
        let kind = match text.split_once(':') {
            None if text == "cuda" => Kind::Cuda(0),
            Some(("cuda", number)) => Kind::Cuda(number.parse().map_err(|_| unknown(None))?),
            None | Some(("sim", _)) if text.starts_with("sim") => Kind::Sim(Box::new(text.parse()?)),
            other => {
                let name = other.map_or(text, |(name, _)| name);
                return Err(unknown(nearest(name, ["sim", "cuda", "auto"])));
            }
        };
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
    use oomph_base::GIB;

    #[test]
    fn a_simulated_device_opens_with_the_size_that_was_asked_for() {
        let device = "sim:80GiB".parse::<DeviceSpec>().unwrap().open().unwrap();
        assert_eq!(device.props().total_bytes, 80 * GIB);
    }

    #[test]
    fn a_simulated_device_can_be_given_more_memory_and_never_less() {
        let spec: DeviceSpec = "sim:80GiB".parse().unwrap();
        assert_eq!(spec.with_room_for(79 * GIB), spec);
        assert_eq!(spec.with_room_for(141 * GIB).open().unwrap().props().total_bytes, 141 * GIB);
        let real: DeviceSpec = "cuda:7".parse().unwrap();
        assert_eq!(real.with_room_for(u64::MAX), real);
    }

    #[test]
    fn asking_for_cuda_never_falls_back() {
        // No machine has that many GPUs.
        let spec: DeviceSpec = "cuda:4000".parse().unwrap();
        for refusal in [spec.open().err(), spec.check().err(), spec.device_name().err()] {
            assert!(matches!(refusal, Some(DeviceSpecError::Unavailable { device, .. }) if device == "cuda:4000"));
        }
        assert!("cuda:first".parse::<DeviceSpec>().unwrap_err().to_string().contains("unknown device 'cuda:first'"));
    }

    #[test]
    fn auto_is_a_device_that_opens() {
        let spec: DeviceSpec = "auto".parse().unwrap();
        assert_eq!(spec.is_simulated(), spec.to_string() == "sim");
        spec.open().unwrap();
    }

    #[test]
    fn slips_of_the_finger_are_explained() {
        let message = "cude".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(message.contains("did you mean 'cuda'?"), "{message}");
        assert!("sim:0".parse::<DeviceSpec>().and_then(|spec| spec.open().map(|_| ())).is_err());
    }
}

//! Devices by name, as users type them: one ([`DeviceSpec`]) or several of one kind
//! ([`DeviceFleet`]).

use std::{collections::BTreeSet, fmt, str::FromStr};

use super::{
    Device, cuda,
    sim::{SimConfig, SimConfigError, SimDevice},
};
use oomph_base::{Bytes, MemoryLimit, PlacementCall, did_you_mean, nearest};

/// Which device to open: `sim`, `cuda`, `cuda:1` or `auto`; `sim:CARD` such as `sim:80GiB` or `sim:h200` has another
/// card.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    text: String,
    kind: DeviceKind,
}

#[derive(Clone, Debug, PartialEq)]
enum DeviceKind {
    Sim(Box<SimConfig>),
    Cuda(u32),
}

/// Why a device cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceSpecError {
    /// The text is not a device.
    #[error("unknown device '{text}', write sim, cuda, cuda:1 or auto{}", did_you_mean(suggestion.as_deref()))]
    Unknown {
        /// What was typed.
        text: String,
        /// The nearest valid word.
        suggestion: Option<String>,
    },
    /// The text names several devices where one is needed.
    #[error("'{text}' means several devices, and this needs one, such as cuda:0; `oomph run` accepts several")]
    Several {
        /// What was typed.
        text: String,
    },
    /// The text looks like several devices but is invalid.
    #[error(
        "'{text}' is not a set of devices: write cuda:all, or a number of simulated ones, from 1xsim to {most}xsim"
    )]
    UnknownFleet {
        /// What was typed.
        text: String,
        /// The largest number.
        most: u32,
    },
    /// GPUs of different kinds.
    #[error("'{text}' means different GPUs ({names}): name one of them, or select some with CUDA_VISIBLE_DEVICES")]
    Unlike {
        /// What was typed.
        text: String,
        /// Their names.
        names: String,
    },
    /// The simulated device is invalid.
    #[error(transparent)]
    Sim(#[from] SimConfigError),
    /// The GPU cannot be used. The simulated device is never used instead.
    #[error(
        "device '{device}' is not available: {reason}; --device sim needs no GPU, and `oomph doctor` shows details"
    )]
    Unavailable {
        /// The device.
        device: String,
        /// The reason.
        reason: cuda::Unavailable,
    },
}

impl DeviceSpec {
    /// Opens a fresh device.
    pub fn open(&self) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            DeviceKind::Sim(config) => Ok(Box::new(SimDevice::new(SimConfig::clone(config))?)),
            &DeviceKind::Cuda(ordinal) => cuda::open(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Opens a fresh device. A simulated one places memory as these calls of a recorded program say:
    /// see [`SimDevice::placing_as`].
    pub fn open_placing_as(&self, calls: &[PlacementCall]) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            DeviceKind::Sim(config) if !calls.is_empty() => {
                Ok(Box::new(SimDevice::new(SimConfig::clone(config))?.placing_as(calls)))
            }
            _ => self.open(),
        }
    }

    /// Waits until memory that this process has freed is cleared: see [`cuda::wait_for_cleared_memory`].
    pub fn wait_for_cleared_memory(&self) -> Result<(), DeviceSpecError> {
        match self.kind {
            DeviceKind::Sim(_) => Ok(()),
            DeviceKind::Cuda(ordinal) => {
                cuda::wait_for_cleared_memory(ordinal).map_err(|reason| self.unavailable(reason))
            }
        }
    }

    /// Opens a fresh device for a guest in a program with its own streams: see
    /// [`cuda::open_as_guest`].
    pub fn open_as_guest(&self) -> Result<Box<dyn Device>, DeviceSpecError> {
        match &self.kind {
            DeviceKind::Sim(_) => self.open(),
            &DeviceKind::Cuda(ordinal) => cuda::open_as_guest(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Checks that the device can be opened, and leaves nothing on it.
    pub fn check(&self) -> Result<(), DeviceSpecError> {
        match self.kind {
            DeviceKind::Sim(_) => self.open().map(drop),
            DeviceKind::Cuda(ordinal) => cuda::probe(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// The name of the device.
    pub fn device_name(&self) -> Result<String, DeviceSpecError> {
        match self.kind {
            DeviceKind::Sim(_) => Ok(self.open()?.props().name.clone()),
            DeviceKind::Cuda(ordinal) => cuda::name(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// Whether the device is simulated, its clock included: only then cases may run in parallel.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self.kind, DeviceKind::Sim(_))
    }

    /// A simulated device with a name.
    pub(super) fn simulated(text: &str, config: SimConfig) -> DeviceSpec {
        DeviceSpec { text: text.to_owned(), kind: DeviceKind::Sim(Box::new(config)) }
    }

    /// A memory limit on this device in bytes; `None` is no limit.
    pub fn limit_bytes(&self, limit: MemoryLimit) -> Result<Option<u64>, DeviceSpecError> {
        // A size is known without a device.
        let total_bytes = if limit.is_fraction() { self.total_bytes()? } else { 0 };
        Ok(limit.resolve(total_bytes))
    }

    /// What the context and the libraries take before a strategy takes anything.
    pub fn overhead_bytes(&self) -> Result<u64, DeviceSpecError> {
        Ok(self.open()?.props().context_bytes.saturating_add(self.footprint().library_bytes))
    }

    /// Total memory, as PyTorch computes fractions of it. Leaves nothing on the device.
    pub fn total_bytes(&self) -> Result<u64, DeviceSpecError> {
        match &self.kind {
            DeviceKind::Sim(config) => Ok(config.total_bytes()),
            &DeviceKind::Cuda(ordinal) => cuda::total_bytes(ordinal).map_err(|reason| self.unavailable(reason)),
        }
    }

    /// The same device with at least this much memory. A real one is unchanged.
    #[must_use]
    pub fn with_room_for(&self, total_bytes: u64) -> DeviceSpec {
        let mut roomy = self.clone();
        if let DeviceKind::Sim(config) = &mut roomy.kind
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

    /// The driver of a real device.
    #[must_use]
    pub fn driver(&self) -> Option<String> {
        match self.kind {
            DeviceKind::Sim(_) => None,
            DeviceKind::Cuda(_) => cuda::driver_version().map(|version| format!("CUDA {version}")),
        }
    }

    fn unavailable(&self, reason: cuda::Unavailable) -> DeviceSpecError {
        DeviceSpecError::Unavailable { device: self.text.clone(), reason }
    }

    /// Why matrix products do not run on this device, if they do not: then times of steps mean
    /// nothing.
    #[must_use]
    pub fn lacks_products(&self) -> Option<String> {
        match self.kind {
            DeviceKind::Sim(_) => None,
            DeviceKind::Cuda(_) => cuda::matrix_library().err().map(|reason| reason.to_string()),
        }
    }

    /// What kernels and libraries have taken of the device so far, besides the context.
    #[must_use]
    pub fn footprint(&self) -> cuda::Footprint {
        match &self.kind {
            DeviceKind::Sim(config) => {
                cuda::Footprint { library_bytes: config.profile.library_bytes, ..cuda::Footprint::default() }
            }
            &DeviceKind::Cuda(ordinal) => cuda::footprint(ordinal).unwrap_or_default(),
        }
    }
}

/// The simulated device with its default size: `sim`.
impl Default for DeviceSpec {
    fn default() -> DeviceSpec {
        DeviceSpec { text: "sim".to_owned(), kind: DeviceKind::Sim(Box::default()) }
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
        // A GPU if one works, otherwise the simulated one.
        let text = match typed {
            "auto" if cuda::probe(0).is_ok() => "cuda",
            "auto" => "sim",
            other => other,
        };
        let kind = match text.split_once(':') {
            None if text == "cuda" => DeviceKind::Cuda(0),
            Some(("cuda", number)) => DeviceKind::Cuda(number.parse().map_err(|_| unknown(None))?),
            None | Some(("sim", _)) if text.starts_with("sim") => DeviceKind::Sim(Box::new(text.parse()?)),
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

/// Where the cases of a run go: one device, all GPUs of the machine (`cuda:all`), or several
/// simulated ones (`4xsim`, `2xsim:80GiB`).
///
/// ```
/// use oomph_alloc::device::DeviceFleet;
/// let four: DeviceFleet = "4xsim:80GiB".parse()?;
/// assert_eq!(four.members().len(), 4);
/// assert_eq!(four.any().to_string(), "4xsim:80GiB", "the name does not depend on which of them runs a case");
/// # Ok::<(), oomph_alloc::device::DeviceSpecError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFleet {
    text: String,
    members: Vec<DeviceSpec>,
}

impl DeviceFleet {
    /// Its devices.
    #[must_use]
    pub fn members(&self) -> &[DeviceSpec] {
        &self.members
    }

    /// Whether it is written as several devices, even if the machine has only one.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        is_of_several(&self.text)
    }

    /// One of them under the name of all: rows must not depend on which device was free.
    #[must_use]
    pub fn any(&self) -> DeviceSpec {
        self.members[0].known_as(&self.text)
    }

    /// Checks that all can be opened and are of one kind: rows of different GPUs must not have one
    /// name.
    pub fn check(&self) -> Result<(), DeviceSpecError> {
        self.members.iter().try_for_each(DeviceSpec::check)?;
        let names = self.members.iter().map(DeviceSpec::device_name).collect::<Result<Vec<_>, _>>()?;
        alike(&self.text, &names)
    }
}

fn alike(text: &str, names: &[String]) -> Result<(), DeviceSpecError> {
    let different: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    if different.len() > 1 {
        let names = different.into_iter().collect::<Vec<_>>().join(", ");
        return Err(DeviceSpecError::Unlike { text: text.to_owned(), names });
    }
    Ok(())
}

/// Whether the text names several devices.
fn is_of_several(text: &str) -> bool {
    text == ALL_GPUS || simulated(text).is_some()
}

/// Each device is a thread of this machine, so a larger number is a typing error.
const MOST_SIMULATED: u32 = 1024;

const ALL_GPUS: &str = "cuda:all";

/// The number before the `x`, and the device after it.
fn simulated(text: &str) -> Option<(u32, &str)> {
    let (count, device) = text.split_once('x')?;
    Some((count.parse().ok()?, device))
}

impl From<DeviceSpec> for DeviceFleet {
    fn from(device: DeviceSpec) -> DeviceFleet {
        DeviceFleet { text: device.to_string(), members: vec![device] }
    }
}

impl FromStr for DeviceFleet {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<DeviceFleet, DeviceSpecError> {
        let text = text.trim();
        let unknown = || DeviceSpecError::UnknownFleet { text: text.to_owned(), most: MOST_SIMULATED };
        let members: Vec<DeviceSpec> = match simulated(text) {
            _ if text == ALL_GPUS => {
                let unavailable = |reason| DeviceSpecError::Unavailable { device: text.to_owned(), reason };
                let count = cuda::count().map_err(unavailable)?;
                (0..count).map(|ordinal| format!("cuda:{ordinal}").parse()).collect::<Result<_, _>>()?
            }
            Some((count @ 1..=MOST_SIMULATED, device)) if device.starts_with("sim") => {
                vec![device.parse()?; count as usize]
            }
            Some(_) => return Err(unknown()),
            None => return text.parse().map(|one: DeviceSpec| one.into()),
        };
        Ok(DeviceFleet { text: text.to_owned(), members })
    }
}

impl fmt::Display for DeviceFleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::GIB;

    #[test]
    fn a_simulated_device_has_the_given_size() {
        let device = "sim:80GiB".parse::<DeviceSpec>().unwrap().open().unwrap();
        assert_eq!(device.props().total_bytes, 80 * GIB);
    }

    #[test]
    fn a_simulated_device_can_get_more_memory() {
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
    fn misspelt_devices_are_explained() {
        let message = "cude".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(message.contains("did you mean 'cuda'?"), "{message}");
        assert!("sim:0".parse::<DeviceSpec>().and_then(|spec| spec.open().map(|_| ())).is_err());
    }

    #[test]
    fn one_device_is_a_fleet() {
        for text in ["sim", "sim:80GiB", "cuda:3"] {
            let fleet: DeviceFleet = text.parse().unwrap();
            assert!(!fleet.is_shared());
            assert_eq!(fleet.members(), [text.parse().unwrap()]);
            assert_eq!(fleet.any(), text.parse().unwrap());
        }
    }

    #[test]
    fn simulated_devices_are_counted_and_alike() {
        let fleet: DeviceFleet = "3xsim:80GiB".parse().unwrap();
        assert!(fleet.is_shared() && fleet.check().is_ok());
        assert_eq!(fleet.members(), vec!["sim:80GiB".parse().unwrap(); 3]);
        assert!("1xsim".parse::<DeviceFleet>().unwrap().is_shared());
        for text in ["0xsim", "1025xsim", "4000000000xsim", "2xcuda", "2x", "2xsim:nothing", "cuda:some", "2x2xsim"] {
            assert!(text.parse::<DeviceFleet>().is_err(), "{text}");
        }
        let message = "1025xsim".parse::<DeviceFleet>().unwrap_err().to_string();
        assert!(message.contains("from 1xsim to 1024xsim"), "{message}");
    }

    #[test]
    fn several_devices_are_refused_where_one_is_needed() {
        for text in ["cuda:all", "4xsim"] {
            let message = text.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(message.contains("several devices"), "{message}");
        }
    }

    #[test]
    fn different_gpus_are_refused() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        alike("cuda:all", &names(&["H200", "H200"])).unwrap();
        let message = alike("cuda:all", &names(&["H200", "L4", "H200"])).unwrap_err().to_string();
        assert!(message.contains("H200, L4"), "{message}");
    }
}

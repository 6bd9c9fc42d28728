//! Several devices of one kind, which take the cases of a run in turn.

use std::{collections::BTreeSet, fmt, str::FromStr};

use super::{DeviceSpec, DeviceSpecError, cuda};

/// Where the cases of a run go: one device by its name, all GPUs of the machine (`cuda:all`), or as many simulated ones
/// (`4xsim`, `2xsim:80GiB`).
///
/// ```
/// use oomph_alloc::device::Fleet;
/// let four: Fleet = "4xsim:80GiB".parse()?;
/// assert_eq!(four.members().len(), 4);
/// assert_eq!(four.any().to_string(), "4xsim:80GiB", "which of them a case runs on is no part of its name");
/// # Ok::<(), oomph_alloc::device::DeviceSpecError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    text: String,
    members: Vec<DeviceSpec>,
}

impl Fleet {
    /// Its devices.
    #[must_use]
    pub fn members(&self) -> &[DeviceSpec] {
        &self.members
    }

    /// Whether it is spelled as several devices, however many those are on this machine.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        is_of_several(&self.text)
    }

    /// One of them under the name of all: rows must not depend on which of several like devices was free.
    #[must_use]
    pub fn any(&self) -> DeviceSpec {
        self.members[0].known_as(&self.text)
    }

    /// Makes sure that all can be opened and are alike: rows from different GPUs must not stand under one name.
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
pub(super) fn is_of_several(text: &str) -> bool {
    text == ALL_GPUS || simulated(text).is_some()
}

/// Each is a thread of this machine, so that more are a slip of the finger.
const MOST_SIMULATED: u32 = 1024;

const ALL_GPUS: &str = "cuda:all";

/// The number before the `x`, and the device after it.
fn simulated(text: &str) -> Option<(u32, &str)> {
    let (count, device) = text.split_once('x')?;
    Some((count.parse().ok()?, device))
}

impl From<DeviceSpec> for Fleet {
    fn from(device: DeviceSpec) -> Fleet {
        Fleet { text: device.to_string(), members: vec![device] }
    }
}

impl FromStr for Fleet {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<Fleet, DeviceSpecError> {
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
        Ok(Fleet { text: text.to_owned(), members })
    }
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_is_a_fleet_of_its_own() {
        for text in ["sim", "sim:80GiB", "cuda:3"] {
            let fleet: Fleet = text.parse().unwrap();
            assert!(!fleet.is_shared());
            assert_eq!(fleet.members(), [text.parse().unwrap()]);
            assert_eq!(fleet.any(), text.parse().unwrap());
        }
    }

    #[test]
    fn simulated_devices_are_counted_and_alike() {
        let fleet: Fleet = "3xsim:80GiB".parse().unwrap();
        assert!(fleet.is_shared() && fleet.check().is_ok());
        assert_eq!(fleet.members(), vec!["sim:80GiB".parse().unwrap(); 3]);
        assert!("1xsim".parse::<Fleet>().unwrap().is_shared());
        for text in ["0xsim", "1025xsim", "4000000000xsim", "2xcuda", "2x", "2xsim:nothing", "cuda:some", "2x2xsim"] {
            assert!(text.parse::<Fleet>().is_err(), "{text}");
        }
        let message = "1025xsim".parse::<Fleet>().unwrap_err().to_string();
        assert!(message.contains("from 1xsim to 1024xsim"), "{message}");
    }

    #[test]
    fn a_command_that_wants_one_device_says_so() {
        for text in ["cuda:all", "4xsim"] {
            let message = text.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(message.contains("several devices"), "{message}");
        }
    }

    #[test]
    fn different_gpus_do_not_share_a_run() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        alike("cuda:all", &names(&["H200", "H200"])).unwrap();
        let message = alike("cuda:all", &names(&["H200", "L4", "H200"])).unwrap_err().to_string();
        assert!(message.contains("H200, L4"), "{message}");
    }
}

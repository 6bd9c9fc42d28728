//! The settings that are read from the environment of the program.

use std::path::PathBuf;

use oomph_alloc::device::{DeviceSpec, DeviceSpecError};
use oomph_alloc::strategy::{SpecError, StrategySpec};
use oomph_base::{Bytes, ParseBytesError};

/// The settings that are read from the environment of the program.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServiceSettings {
    /// `OOMPH_STRATEGY`: the strategy; `oomph` by default.
    pub(crate) strategy: StrategySpec,
    /// `OOMPH_LIMIT`: the most physical bytes to hold on each GPU.
    pub(crate) limit: Option<u64>,
    /// `OOMPH_DEVICE`: a simulated GPU per device number, such as `sim`, which makes addresses up
    /// for programs that never touch the memory; `None` for `cuda`, the default.
    pub(crate) simulated: Option<DeviceSpec>,
    /// `OOMPH_STATS`: the file for statistics at exit, as JSON; without it they are printed on
    /// standard error.
    pub(crate) statistics_file: Option<PathBuf>,
    /// `OOMPH_OUT_OF_MEMORY`: `null` by default.
    pub(crate) out_of_memory: OutOfMemorySignal,
    /// `OOMPH_FAULTS`: driver calls that fail, for tests; by default none.
    pub(crate) faults: DriverFaults,
    /// PyTorch's own allocator with the settings of the program, as a strategy; `None` with
    /// `OOMPH_COMPARE=off`, and where it would be compared with itself.
    pub(crate) native: Option<String>,
}

/// Driver calls that fail at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriverFaults {
    /// Each call fails with a probability of one over this number; with 0 none fails.
    pub(crate) one_in: u64,
    /// Which calls fail: the same ones with the same number.
    pub(crate) seed: u64,
}

/// How the program learns that memory has run out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OutOfMemorySignal {
    /// A null pointer. PyTorch checks for it only where a plugin serves a `MemPool`.
    #[default]
    Null,
    /// PyTorch's `OutOfMemoryError` is thrown, or `std::bad_alloc` without PyTorch. A plugin that replaces PyTorch's whole
    /// allocator needs this.
    Throw,
}

/// An invalid variable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServiceSettingsError {
    /// The strategy is unknown or refuses its parameters.
    #[error("OOMPH_STRATEGY: {0}")]
    Strategy(#[from] SpecError),
    /// Not an amount of memory.
    #[error("OOMPH_LIMIT: {0}")]
    Limit(#[from] ParseBytesError),
    /// A limit that serves no request.
    #[error("OOMPH_LIMIT: 0 leaves no memory; leave it out for all memory of the GPU")]
    NoMemory,
    /// Neither `cuda` nor a simulated device.
    #[error("OOMPH_DEVICE: {0}")]
    Device(#[from] DeviceSpecError),
    /// A GPU by number.
    #[error("OOMPH_DEVICE: '{0}': the program selects the GPU; write cuda, or sim for a simulated one")]
    Numbered(String),
    /// An unknown word.
    #[error("OOMPH_OUT_OF_MEMORY: '{0}' is neither null nor throw")]
    OutOfMemory(String),
    /// Not one or two numbers.
    #[error(
        "OOMPH_FAULTS: '{0}' is neither a number such as 20, with which one of 20 driver calls fails, nor 20:7 with a seed"
    )]
    Faults(String),
    /// An unknown word.
    #[error("OOMPH_COMPARE: '{0}' is neither on nor off")]
    Compare(String),
}

impl ServiceSettings {
    /// Reads the variables.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<ServiceSettings, ServiceSettingsError> {
        let strategy = StrategySpec::from(variable("OOMPH_STRATEGY").as_deref().unwrap_or("oomph"));
        strategy.check()?;
        let native = match variable("OOMPH_COMPARE").as_deref() {
            None | Some("on") => Some(native(&variable)),
            Some("off") => None,
            Some(other) => return Err(ServiceSettingsError::Compare(other.to_owned())),
        };
        Ok(ServiceSettings {
            native: native.filter(|native| *native != strategy.to_string()),
            strategy,
            limit: match variable("OOMPH_LIMIT").map(|text| text.parse::<Bytes>()).transpose()? {
                Some(Bytes(0)) => return Err(ServiceSettingsError::NoMemory),
                limit => limit.map(|bytes| bytes.0),
            },
            simulated: simulated(variable("OOMPH_DEVICE").as_deref().unwrap_or("cuda"))?,
            statistics_file: variable("OOMPH_STATS").map(PathBuf::from),
            out_of_memory: match variable("OOMPH_OUT_OF_MEMORY").as_deref() {
                None | Some("null") => OutOfMemorySignal::Null,
                Some("throw") => OutOfMemorySignal::Throw,
                Some(other) => return Err(ServiceSettingsError::OutOfMemory(other.to_owned())),
            },
            faults: match variable("OOMPH_FAULTS") {
                None => DriverFaults::default(),
                Some(text) => faults(&text).ok_or(ServiceSettingsError::Faults(text))?,
            },
        })
    }
}

/// `20`, or `20:7` with a seed.
fn faults(text: &str) -> Option<DriverFaults> {
    let (one_in, seed) = text.split_once(':').unwrap_or((text, "0"));
    Some(DriverFaults { one_in: one_in.parse().ok()?, seed: seed.parse().ok()? })
}

/// PyTorch's allocator as the program would have it. An unknown setting is not an error here: PyTorch's
/// allocator is not used.
fn native(variable: impl Fn(&str) -> Option<String>) -> String {
    let release = variable("OOMPH_TORCH_RELEASE").map(|release| format!("release:{release}"));
    let conf = variable("PYTORCH_CUDA_ALLOC_CONF").or_else(|| variable("PYTORCH_ALLOC_CONF"));
    let settings: Vec<String> = release.into_iter().chain(conf.filter(|conf| !conf.is_empty())).collect();
    if settings.is_empty() { "caching".to_owned() } else { format!("caching:{}", settings.join(",")) }
}

/// The simulated device of that name; `None` for `cuda`, the GPU that the program selects.
fn simulated(text: &str) -> Result<Option<DeviceSpec>, ServiceSettingsError> {
    if text == "cuda" {
        return Ok(None);
    }
    let spec: DeviceSpec = text.parse()?;
    if spec.is_simulated() { Ok(Some(spec)) } else { Err(ServiceSettingsError::Numbered(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<ServiceSettings, ServiceSettingsError> {
        ServiceSettings::read(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn defaults_without_variables() {
        let settings = read(&[]).unwrap();
        assert_eq!((settings.strategy.to_string().as_str(), settings.simulated), ("oomph", None));
        assert_eq!((settings.limit, settings.out_of_memory), (None, OutOfMemorySignal::Null));
    }

    #[test]
    fn native_allocator_has_the_settings_of_the_program() {
        let native = |set: &[(&str, &str)]| read(set).unwrap().native;
        assert_eq!(native(&[]).as_deref(), Some("caching"));
        let set = [("OOMPH_TORCH_RELEASE", "2.13"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
        assert_eq!(native(&set).as_deref(), Some("caching:release:2.13,expandable_segments:True"));
        assert_eq!(native(&[("OOMPH_COMPARE", "off")]), None);
        assert_eq!(native(&[("OOMPH_STRATEGY", "caching")]), None);
    }

    #[test]
    fn faults_may_have_a_seed() {
        let faults = |text| read(&[("OOMPH_FAULTS", text)]).unwrap().faults;
        assert_eq!(faults("20"), DriverFaults { one_in: 20, seed: 0 });
        assert_eq!(faults("20:7"), DriverFaults { one_in: 20, seed: 7 });
        assert_eq!(read(&[]).unwrap().faults, faults("0"));
    }

    #[test]
    fn invalid_variables_are_named() {
        for (name, value) in [
            ("OOMPH_STRATEGY", "cachign"),
            ("OOMPH_LIMIT", "much"),
            ("OOMPH_LIMIT", "0"),
            ("OOMPH_DEVICE", "cuda:1"),
            ("OOMPH_DEVICE", "tpu"),
            ("OOMPH_OUT_OF_MEMORY", "panic"),
            ("OOMPH_COMPARE", "maybe"),
            ("OOMPH_FAULTS", "some"),
            ("OOMPH_FAULTS", "20:"),
        ] {
            let message = read(&[(name, value)]).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{name}: ")), "{message}");
        }
    }
}

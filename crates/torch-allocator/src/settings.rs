//! What the environment of the program says.

use std::path::PathBuf;

use oomph_alloc::device::{DeviceSpec, DeviceSpecError};
use oomph_alloc::strategy::{SpecError, StrategySpec};
use oomph_base::{Bytes, ParseBytesError};

/// What the environment of the program says.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `OOMPH_STRATEGY`: who serves; `oomph` by default.
    pub strategy: StrategySpec,
    /// `OOMPH_LIMIT`: physical bytes that may be held of each GPU.
    pub limit: Option<u64>,
    /// `OOMPH_DEVICE`: `cuda` by default; `sim` makes addresses up, for tests of programs that never touch the memory.
    pub memory: Memory,
    /// `OOMPH_STATS`: the file that is given statistics at exit, as JSON; otherwise standard error has them in words.
    pub statistics_file: Option<PathBuf>,
    /// `OOMPH_OUT_OF_MEMORY`: `null` by default.
    pub out_of_memory: OutOfMemory,
}

/// Whose memory is handed out.
#[derive(Clone, Debug, PartialEq)]
pub enum Memory {
    /// That of the GPU with the number that the program names.
    Cuda,
    /// That of a simulated GPU of this kind for each number.
    Simulated(DeviceSpec),
}

/// How the program learns that memory has run out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutOfMemory {
    /// It gets a null pointer. PyTorch looks for it where a plugin serves a `MemPool`, and nowhere else.
    #[default]
    Null,
    /// `std::bad_alloc` is thrown: what a plugin in the place of PyTorch's whole allocator must do.
    Throw,
}

/// A variable that makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// There is no such strategy, or it refuses its parameters.
    #[error("OOMPH_STRATEGY: {0}")]
    Strategy(#[from] SpecError),
    /// Not an amount of memory.
    #[error("OOMPH_LIMIT: {0}")]
    Limit(#[from] ParseBytesError),
    /// Neither `cuda` nor a simulated device.
    #[error("OOMPH_DEVICE: {0}")]
    Device(#[from] DeviceSpecError),
    /// A GPU by number.
    #[error("OOMPH_DEVICE: '{0}': which GPU is for the program to say; write cuda, or sim for a simulated one")]
    Numbered(String),
    /// Neither word.
    #[error("OOMPH_OUT_OF_MEMORY: '{0}' is neither null nor throw")]
    OutOfMemory(String),
}

impl Settings {
    /// Reads the variables that are there.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, SettingsError> {
        let strategy = StrategySpec::from(variable("OOMPH_STRATEGY").as_deref().unwrap_or("oomph"));
        strategy.check()?;
        Ok(Settings {
            strategy,
            limit: variable("OOMPH_LIMIT").map(|text| text.parse::<Bytes>()).transpose()?.map(|bytes| bytes.0),
            memory: memory(variable("OOMPH_DEVICE").as_deref().unwrap_or("cuda"))?,
            statistics_file: variable("OOMPH_STATS").map(PathBuf::from),
            out_of_memory: match variable("OOMPH_OUT_OF_MEMORY").as_deref() {
                None | Some("null") => OutOfMemory::Null,
                Some("throw") => OutOfMemory::Throw,
                Some(other) => return Err(SettingsError::OutOfMemory(other.to_owned())),
            },
        })
    }
}

impl Memory {
    /// The GPU with this number.
    pub(super) fn numbered(&self, device: i32) -> Result<DeviceSpec, DeviceSpecError> {
        match self {
            Memory::Cuda => format!("cuda:{device}").parse(),
            Memory::Simulated(spec) => Ok(spec.clone()),
        }
    }
}

fn memory(text: &str) -> Result<Memory, SettingsError> {
    if text == "cuda" {
        return Ok(Memory::Cuda);
    }
    let spec: DeviceSpec = text.parse()?;
    if spec.is_simulated() { Ok(Memory::Simulated(spec)) } else { Err(SettingsError::Numbered(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::read(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn without_variables_our_own_strategy_serves_the_gpu() {
        let settings = read(&[]).unwrap();
        assert_eq!((settings.strategy.to_string().as_str(), settings.memory), ("oomph", Memory::Cuda));
        assert_eq!((settings.limit, settings.out_of_memory), (None, OutOfMemory::Null));
    }

    #[test]
    fn a_variable_that_makes_no_sense_is_named() {
        for (name, value) in [
            ("OOMPH_STRATEGY", "cachign"),
            ("OOMPH_LIMIT", "much"),
            ("OOMPH_DEVICE", "cuda:1"),
            ("OOMPH_DEVICE", "tpu"),
            ("OOMPH_OUT_OF_MEMORY", "panic"),
        ] {
            let message = read(&[(name, value)]).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{name}: ")), "{message}");
        }
    }
}

//! What is put under stress: a strategy and the device that it runs on, both by name.

use std::time::Duration;

use super::StressFailure;
#[cfg(test)]
use crate::strategy::flawed::Flawed;
use crate::{
    device::{Capabilities, Device, DeviceProps, DeviceSpec, DeviceSpecError, MissingCapabilities, wrap::capped},
    plugin,
    strategy::{Built, Setup, SpecError, Strategy, StrategySpec},
};

/// A strategy and its device by name, because every run starts with fresh ones.
#[derive(Clone, Debug)]
pub struct StressTarget {
    /// The strategy.
    pub strategy: StrategySpec,
    /// The device.
    pub device: DeviceSpec,
    /// Physical bytes that the strategy may hold; `None` for all that the device has.
    pub memory_bytes: Option<u64>,
    /// Whether programs may also be played in more memory than that: nobody set a limit.
    pub varies_memory: bool,
}

/// How long a call of a plugin may take unless its user says otherwise. It takes microseconds; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a target cannot be put under stress.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// The strategy cannot be built.
    #[error(transparent)]
    Strategy(#[from] SpecError),
    /// The device lacks capabilities that the strategy needs.
    #[error(transparent)]
    Missing(#[from] MissingCapabilities),
    /// The strategy has no memory whose contents could be checked.
    #[error("its memory is imaginary")]
    Imaginary,
}

impl TargetError {
    /// Whether the target exists but cannot be tested here.
    pub fn is_skip(&self) -> bool {
        matches!(self, TargetError::Missing(_) | TargetError::Imaginary)
    }
}

/// A fresh strategy and the fresh device that it runs on.
pub(super) type OpenedTarget = (Box<dyn Strategy>, Box<dyn Device>);

impl StressTarget {
    /// A failure of this target, without a trace.
    pub(super) fn failure(&self, found_by: &'static str, detail: String) -> StressFailure {
        let strategy = self.strategy.to_string();
        StressFailure { found_by, strategy, detail, trace: None, conditions: Vec::new() }
    }

    /// A fresh strategy and device. Checks that the device has what the strategy needs.
    pub(super) fn open(&self) -> Result<OpenedTarget, TargetError> {
        let device = self.open_device()?;
        let strategy = self.build(device.props())?;
        strategy.requires().check(device.props())?;
        Ok((strategy, device))
    }

    /// Like `open`, for programs that check the contents of blocks.
    pub(super) fn open_with_contents(&self) -> Result<OpenedTarget, TargetError> {
        if self.strategy.name == "null" {
            return Err(TargetError::Imaginary);
        }
        let (strategy, device) = self.open()?;
        Capabilities::PATTERNS.check(device.props())?;
        Ok((strategy, device))
    }

    /// A fresh device with the target's memory. On a real one a plugin keeps its limit itself and
    /// sees all memory.
    pub fn open_device(&self) -> Result<Box<dyn Device>, TargetError> {
        let device = self.device.open()?;
        let clock = device.props().clock;
        Ok(capped(device, plugin::cap(&self.strategy, self.memory_bytes, clock)))
    }

    /// A fresh strategy for that device. In tests of this module `flawed:FLAW` is a strategy too.
    pub fn build(&self, props: &DeviceProps) -> Built {
        #[cfg(test)]
        if let ("flawed", Some(flawed)) = (self.strategy.name.as_str(), Flawed::named(&self.strategy.parameters)) {
            return Ok(Box::new(flawed));
        }
        let setup = Setup { props, limit: self.memory_bytes };
        if self.device.is_simulated() {
            plugin::build_apart(&plugin::with_patience(&self.strategy, PATIENCE), &setup)
        } else {
            plugin::build(&self.strategy, &setup)
        }
    }

    /// The same target with a shorter time-out for plugin calls: shrinking a trace that hangs tries
    /// many that hang.
    pub fn with_short_timeout(&self) -> StressTarget {
        StressTarget { strategy: plugin::with_short_timeout(&self.strategy), ..self.clone() }
    }

    /// Whether it is a plugin: its functions are foreign code.
    pub(super) fn is_plugin(&self) -> bool {
        plugin::is_plugin(&self.strategy)
    }

    /// A target on the simulated device.
    #[cfg(test)]
    pub(crate) fn simulated(strategy: &str, memory_bytes: u64) -> StressTarget {
        let device = "sim".parse().unwrap_or_else(|error| panic!("{error}"));
        StressTarget {
            strategy: StrategySpec::from(strategy),
            device,
            memory_bytes: Some(memory_bytes),
            varies_memory: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    #[test]
    fn every_strategy_sees_the_memory_of_the_target() {
        let free = |strategy: &str| StressTarget::simulated(strategy, GIB).open_device().unwrap().free_bytes();
        assert_eq!((free("caching"), free("plugin:my.so")), (GIB, GIB));
    }
}

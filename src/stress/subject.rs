//! Who is put under stress, and on what.

#[cfg(test)]
use crate::strategy::flawed::Flawed;
use crate::{
    device::{Device, DeviceProps, DeviceSpec, DeviceSpecError, wrap::capped},
    plugin,
    strategy::{Built, Setup, SpecError, StrategySpec},
};

/// A strategy and the device it runs on, both by name: every trial starts with fresh ones.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Who.
    pub strategy: StrategySpec,
    /// Where.
    pub device: DeviceSpec,
    /// Physical bytes that it may hold; `None` for all that the device has.
    pub memory_bytes: Option<u64>,
}

/// Why a subject cannot be put up.
#[derive(Debug, thiserror::Error)]
pub enum SubjectError {
    /// There is no such device.
    #[error(transparent)]
    Device(#[from] DeviceSpecError),
    /// There is no such strategy.
    #[error(transparent)]
    Strategy(#[from] SpecError),
}

impl Subject {
    /// A fresh device with the subject's memory.
    pub fn open_device(&self) -> Result<Box<dyn Device>, SubjectError> {
        Ok(capped(self.device.open()?, self.memory_bytes))
    }

    /// A fresh strategy for that device. In tests of this room `flawed:FLAW` is a strategy too.
    pub fn build(&self, props: &DeviceProps) -> Built {
        #[cfg(test)]
        if let ("flawed", Some(flawed)) = (self.strategy.name.as_str(), Flawed::named(&self.strategy.parameters)) {
            return Ok(Box::new(flawed));
        }
        let setup = Setup { props, limit: self.memory_bytes };
        if self.device.is_simulated() {
            plugin::build_apart(&self.strategy, &setup)
        } else {
            plugin::build(&self.strategy, &setup)
        }
    }

    /// The same subject, which is not waited for as long where it hangs: for the many tries that shrinking takes.
    #[must_use]
    pub fn hurried(&self) -> Subject {
        Subject { strategy: plugin::hurried(&self.strategy), ..self.clone() }
    }
}

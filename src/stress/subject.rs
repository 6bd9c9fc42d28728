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
    /// A fresh device with the subject's memory; all of it where the subject keeps its limit itself.
    pub fn open_device(&self) -> Result<Box<dyn Device>, SubjectError> {
        Ok(capped(self.device.open()?, plugin::cap(&self.strategy, self.memory_bytes)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::GIB;

    #[test]
    fn a_plugin_sees_all_that_the_device_has_lost_whatever_it_may_hold() {
        let free = |strategy: &str, memory_bytes| {
            let device = "sim".parse().unwrap();
            let subject = Subject { strategy: StrategySpec::from(strategy), device, memory_bytes };
            subject.open_device().unwrap().free_bytes()
        };
        assert_eq!(free("caching", Some(GIB)), GIB);
        assert_eq!(free("plugin:my.so", Some(GIB)), free("plugin:my.so", None));
    }
}
